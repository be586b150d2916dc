/* A baseline of benchmarks: any bytes are read, or refused with a message, and what was read compares with itself. */
#include "log/baseline.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct baseline b;
    struct err e = {0};
    struct buf out;
    baseline_init(&b);
    buf_init(&out, 0);
    int st = baseline_parse(&b, (const char *)data, size, "input", &e);
    if (st == ST_OK) {
        baseline_compare(&b, &b, 5, true, &out);
        if (buf_check(&out, &e) != ST_OK || strstr(out.text, "; 0 with other bits; 0 new, 0 missing") == NULL)
            abort();
    } else if (e.msg[0] == '\0') {
        abort();
    }
    buf_release(&out);
    baseline_release(&b);
    return 0;
}
