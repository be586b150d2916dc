/* metrics.jsonl read back and drawn: any bytes give a report and a text curve, never a crash. */
#include "log/report_int.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int fd = memfd_create("metrics", 0);
    struct history *h = calloc(1, sizeof *h);
    if (fd < 0 || h == NULL || history_init(h, NULL) != ST_OK)
        abort();
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int64_t ignored;
    if (file_write_fd(fd, data, size, path, NULL) != ST_OK || history_load(h, path, &ignored, NULL) != ST_OK)
        abort();
    struct buf b;
    buf_init(&b, 0);
    struct report_facts f = {.title = "t", .status = "running"};
    if (report_html(&b, h, &f, NULL) != ST_OK || strstr(b.text, "<script") != NULL)
        abort();
    buf_release(&b);
    FILE *nowhere = fopen("/dev/null", "w");
    if (nowhere != NULL) {
        report_history_curve(nowhere, h, (size & 1) != 0);
        fclose(nowhere);
    }
    history_release(h);
    free(h);
    close(fd);
    return 0;
}
