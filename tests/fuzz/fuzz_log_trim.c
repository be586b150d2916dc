/* metrics.jsonl of a killed run, trimmed: any bytes; what stays are lines of the file, in order, without later steps;
 * trimming once more changes nothing. */
#include "log/log_int.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool condition)
{
    if (!condition)
        abort();
}

enum { STEP = 3 };

static void check_kept(const char *kept, size_t n, const char *old, const char *old_end)
{
    for (const char *at = kept; at < kept + n;) {
        const char *stop = memchr(at, '\n', (size_t)(kept + n - at));
        must(stop != NULL); /* a half line is cut off */
        size_t len = (size_t)(stop - at) + 1;
        old = memmem(old, (size_t)(old_end - old), at, len);
        must(old != NULL);
        old += len;
        json_t *rec = json_loadb(at, len, JSON_REJECT_DUPLICATES, NULL);
        const json_t *step = json_object_get(rec, "step");
        must(json_is_string(json_object_get(rec, "event")) || !json_is_integer(step) ||
             json_integer_value(step) <= STEP);
        json_decref(rec);
        at += len;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[] = "/dev/shm/braid-fuzz-XXXXXX", *kept;
    int64_t removed, again;
    size_t n;
    int fd = mkstemp(path);
    must(fd >= 0 && file_write_fd(fd, data, size, path, NULL) == ST_OK);
    close(fd);
    must(metrics_trim(path, STEP, &removed, NULL) == ST_OK && removed >= 0);
    must(file_read(path, 1 << 24, &kept, &n, NULL) == ST_OK && n <= size && (removed > 0 || n == size));
    check_kept(kept, n, (const char *)data, (const char *)data + size);
    must(metrics_trim(path, STEP, &again, NULL) == ST_OK && again == 0);
    free(kept);
    unlink(path);
    return 0;
}
