/* Reading text that may be compressed: plain files, gzip (.gz) and Zstandard (.zst), by name. */
#include "data/data_int.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

enum { IN_BYTES = 1 << 17 };

struct text_in {
    char *path;
    enum text_packing packing;
    int fd; /* -1: not open; of gzip, zlib has it */
    gzFile gz;
    ZSTD_DStream *zstd;
    uint8_t *packed; /* Zstandard's input */
    ZSTD_inBuffer in;
    bool mid_frame;         /* the file may not end here */
    int64_t consumed, size; /* bytes of the file */
};

enum text_packing text_packing_of(const char *path)
{
    return str_ends(path, ".gz") ? TEXT_GZIP : str_ends(path, ".zst") ? TEXT_ZSTD : TEXT_PLAIN;
}

bool text_is_jsonl(const char *path)
{
    static const char *const ends[] = {".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst"};
    for (int i = 0; i < countof(ends); i++)
        if (str_ends(path, ends[i]))
            return true;
    return false;
}

static int start(struct text_in *t, struct err *e)
{
    TRY(file_open_regular(t->path, &t->fd, &t->size, e));
    if (t->packing == TEXT_GZIP) {
        t->gz = gzdopen(t->fd, "rb");
        if (t->gz == NULL)
            return err_set(e, ST_NOMEM, "out of memory opening %s", t->path);
        t->fd = -1;
        if (gzbuffer(t->gz, IN_BYTES) != 0)
            return err_set(e, ST_NOMEM, "out of memory opening %s", t->path);
    } else if (t->packing == TEXT_ZSTD) {
        t->zstd = ZSTD_createDStream();
        TRY(mem_array((void **)&t->packed, IN_BYTES, 1, e));
        if (t->zstd == NULL)
            return err_set(e, ST_NOMEM, "out of memory opening %s", t->path);
        t->in.src = t->packed;
    }
    return ST_OK;
}

int text_in_open(struct text_in **out, const char *path, struct err *e)
{
    struct text_in *t = *out = calloc(1, sizeof *t);
    if (t == NULL || (t->path = strdup(path)) == NULL) {
        free(t);
        *out = NULL;
        return err_set(e, ST_NOMEM, "out of memory opening %s", path);
    }
    t->fd = -1;
    t->packing = text_packing_of(path);
    int st = start(t, e);
    if (st != ST_OK) {
        text_in_close(t);
        *out = NULL;
    }
    return st;
}

void text_in_close(struct text_in *t)
{
    if (t == NULL)
        return;
    if (t->gz != NULL)
        (void)gzclose_r(t->gz); /* reading: nothing can be lost */
    if (t->fd >= 0)
        close(t->fd);
    ZSTD_freeDStream(t->zstd);
    free(t->packed);
    free(t->path);
    free(t);
}

static int read_fd(struct text_in *t, void *out, size_t cap, size_t *n, struct err *e)
{
    ssize_t got;
    do {
        got = read(t->fd, out, cap);
    } while (got < 0 && errno == EINTR);
    if (got < 0)
        return err_errno(e, "cannot read %s", t->path);
    *n = (size_t)got;
    t->consumed += got;
    return ST_OK;
}

static int read_gzip(struct text_in *t, uint8_t *out, size_t cap, size_t *n, struct err *e)
{
    int got = gzread(t->gz, out, (unsigned)min_i64((int64_t)cap, 1 << 30)), code;
    const char *why = gzerror(t->gz, &code);
    if (got < 0 || code != Z_OK)
        return err_set(e, ST_CORRUPT, "%s: %s", t->path, code == Z_BUF_ERROR ? "the gzip data ends too early" : why);
    *n = (size_t)got;
    t->consumed = gzoffset(t->gz);
    return ST_OK;
}

static int read_zstd(struct text_in *t, uint8_t *out, size_t cap, size_t *n, struct err *e)
{
    ZSTD_outBuffer to = {.dst = out, .size = cap};
    while (to.pos == 0) {
        if (t->in.pos == t->in.size) {
            size_t got;
            TRY(read_fd(t, t->packed, IN_BYTES, &got, e));
            t->in.pos = 0;
            t->in.size = got;
            if (got == 0 && t->mid_frame)
                return err_set(e, ST_CORRUPT, "%s: the Zstandard data ends too early", t->path);
            if (got == 0)
                break;
        }
        size_t left = ZSTD_decompressStream(t->zstd, &to, &t->in);
        if (ZSTD_isError(left))
            return err_set(e, ST_CORRUPT, "%s: %s", t->path, ZSTD_getErrorName(left));
        t->mid_frame = left != 0;
    }
    *n = to.pos;
    return ST_OK;
}

int text_in_read(struct text_in *t, uint8_t *out, size_t cap, size_t *n, struct err *e)
{
    for (*n = 0; *n < cap;) {
        size_t got = 0;
        TRY(t->packing == TEXT_GZIP   ? read_gzip(t, out + *n, cap - *n, &got, e)
            : t->packing == TEXT_ZSTD ? read_zstd(t, out + *n, cap - *n, &got, e)
                                      : read_fd(t, out + *n, cap - *n, &got, e));
        if (got == 0 && t->packing == TEXT_PLAIN && t->consumed < t->size)
            return err_set(e, ST_IO, "%s became shorter while it was read: %lld of %lld bytes", t->path,
                           (long long)t->consumed, (long long)t->size);
        if (got == 0)
            break;
        *n += got;
    }
    return ST_OK;
}

int64_t text_in_consumed(const struct text_in *t) { return t->consumed; }
