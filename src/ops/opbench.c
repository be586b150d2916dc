/* Timing over op descriptors; see opbench.h. */
#include "ops/opbench.h"

#include "ops/opcheck.h"

#include <stdlib.h>
#include <string.h>

int roofline_measure(struct dev *dev, struct roofline *r, struct err *e)
{
    enum { BYTES = 1 << 27, ROUNDS = 5 };
    char *src = NULL, *dst = NULL;
    TRY(mem_aligned((void **)&src, BYTES, 4096, e));
    int st = mem_aligned((void **)&dst, BYTES, 4096, e);
    *r = (struct roofline){.flops_per_s = dev_peak_flops(dev)};
    if (st == ST_OK) {
        memset(src, 1, BYTES);
        memset(dst, 2, BYTES);
    }
    for (int k = 0; st == ST_OK && k < ROUNDS; k++) {
        double begin = time_now();
#pragma omp parallel for schedule(static)
        for (int64_t b = 0; b < BYTES / 4096; b++)
            memcpy(dst + b * 4096, src + b * 4096, 4096);
        double rate = 2.0 * BYTES / (time_now() - begin);
        r->bytes_per_s = rate > r->bytes_per_s ? rate : r->bytes_per_s;
    }
    free(src);
    free(dst);
    return st;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int op_bench(const struct op_desc *d, const struct op_sample *s, struct dev *dev, const struct roofline *r, double budget,
             struct op_timing *out, struct err *e)
{
    enum { MAX_RUNS = 200 };
    struct op_call c;
    struct op_block b = {0};
    struct lane lane = {.dev = dev, .err = e};
    const struct ops *ops = ops_for(dev);
    double times[MAX_RUNS];
    int st;
    *out = (struct op_timing){0};
    TRY_OUT(op_call_sample(&c, d, s, ops, e));
    TRY_OUT(op_call_alloc(&c, &b, 1, false, e));
    TRY_OUT(d->run(ops, &lane, &c));
    double stop = time_now() + budget;
    do {
        double begin = time_now();
        TRY_OUT(d->run(ops, &lane, &c));
        times[out->runs++] = time_now() - begin;
    } while (out->runs < MAX_RUNS && (time_now() < stop || out->runs < 3));
    qsort(times, (size_t)out->runs, sizeof times[0], ascending);
    out->seconds = times[out->runs / 2];
    d->cost(&c, &out->cost);
    double by_flops = r->flops_per_s > 0 ? out->cost.flops / r->flops_per_s : 0, by_bytes = out->cost.bytes / r->bytes_per_s;
    out->of_roofline = (by_flops > by_bytes ? by_flops : by_bytes) / out->seconds;
out:
    op_call_free(&b);
    return st;
}
