/* What a file holds, as a number: its size and a hash of its bytes, of all of them or, where it is large, of blocks
 * spread evenly over it. Times and names do not count, so a copy has the identity of its original. */
#include "base/file.h"
#include "base/mem.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
#include <xxhash.h>

enum { BLOCK = 64 << 10, SAMPLED_BLOCKS = 256, WHOLE_MAX = 64 << 20 };

static int read_block(int fd, char *block, int64_t at, int64_t n, const char *path, struct err *e)
{
    for (int64_t done = 0; done < n;) {
        ssize_t got = pread(fd, block + done, (size_t)(n - done), at + done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return err_errno(e, "cannot read %s", path);
        if (got == 0)
            return err_set(e, ST_IO, "%s became shorter while it was read", path);
        done += got;
    }
    return ST_OK;
}

static int hash_blocks(int fd, int64_t size, XXH3_state_t *hash, char *block, const char *path, struct err *e)
{
    bool whole = size <= WHOLE_MAX;
    int64_t n = whole ? ceil_div(size, BLOCK) : SAMPLED_BLOCKS;
    for (int64_t i = 0; i < n; i++) {
        int64_t at = whole ? i * BLOCK : (size - BLOCK) / (n - 1) * i + (size - BLOCK) % (n - 1) * i / (n - 1);
        int64_t bytes = min_i64(BLOCK, size - at);
        TRY(read_block(fd, block, at, bytes, path, e));
        if (XXH3_64bits_update(hash, block, (size_t)bytes) != XXH_OK)
            return err_set(e, ST_INTERNAL, "cannot hash %s", path);
    }
    return ST_OK;
}

int file_identify(const char *path, struct file_id *id, struct err *e)
{
    int fd, st;
    char *block = NULL;
    XXH3_state_t *hash = NULL;
    *id = (struct file_id){.path = path};
    TRY(file_open_regular(path, &fd, &id->bytes, e));
    TRY_OUT(mem_array((void **)&block, BLOCK, 1, e));
    hash = XXH3_createState();
    if (hash == NULL || XXH3_64bits_reset(hash) != XXH_OK) {
        st = err_set(e, ST_NOMEM, "out of memory reading %s", path);
        goto out;
    }
    TRY_OUT(hash_blocks(fd, id->bytes, hash, block, path, e));
    id->xxh3 = XXH3_64bits_digest(hash);
out:
    XXH3_freeState(hash);
    free(block);
    close(fd);
    return st;
}
