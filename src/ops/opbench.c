/* Timing over op descriptors; see opbench.h. */
#include "ops/opbench.h"

#include "ops/opcheck.h"

#include <stdlib.h>
#include <string.h>

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* On a GPU: a large copy, and a large product of random bf16 matrices. */
static int measure_gpu(struct dev *dev, struct roofline *r, struct err *e)
{
    static const struct op_sample copy = {"rows=65536 d=8192 p=0"},
                                  product = {"m=8192 n=8192 k=8192 trans_b=1 no_bias=1"};
    const struct roofline none = {.bytes_per_s = 1, .flops_per_s = 1};
    struct op_timing t;
    if (ops_has(ops_for(dev), "dropout")) {
        TRY(op_bench(op_find("dropout"), &copy, dev, &none, 0.2, &t, e));
        r->bytes_per_s = t.cost.bytes / t.seconds;
    }
    TRY(op_bench(op_find("gemm"), &product, dev, &none, 0.3, &t, e));
    r->flops_per_s = t.cost.flops / t.seconds;
    return ST_OK;
}

int roofline_measure(struct dev *dev, struct roofline *r, struct err *e)
{
    if (dev->kind == DEV_CUDA)
        return measure_gpu(dev, r, e);
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

/* Several calls captured once and replayed, so that launches by the host do not count. */
static int time_captured(const struct op_call *c, const struct op_block *b, struct dev *dev, double budget,
                         struct op_timing *out, struct err *e)
{
    enum { CALLS = 8, MAX_RUNS = 50 };
    struct op_call there;
    void *base = NULL, *graph = NULL;
    struct lane lane = {.dev = dev, .err = e};
    double times[MAX_RUNS];
    int st;
    TRY_OUT(op_send(c, b, dev, &there, &base, e));
    for (int k = 0; k < 2; k++)
        TRY_OUT(op_call_run(ops_for(dev), &lane, &there));
    TRY_OUT(dev->vt->sync(dev, e));
    TRY_OUT(dev->vt->capture_begin(dev, e));
    int ran = ST_OK;
    for (int k = 0; k < CALLS && ran == ST_OK; k++)
        ran = op_call_run(ops_for(dev), &lane, &there);
    TRY_OUT(dev->vt->capture_end(dev, &graph, ran == ST_OK ? e : NULL));
    TRY_OUT(ran);
    TRY_OUT(dev->vt->capture_run(dev, graph, e));
    TRY_OUT(dev->vt->sync(dev, e));
    double stop = time_now() + budget;
    do {
        double begin = time_now();
        TRY_OUT(dev->vt->capture_run(dev, graph, e));
        TRY_OUT(dev->vt->sync(dev, e));
        times[out->runs++] = (time_now() - begin) / CALLS;
    } while (out->runs < MAX_RUNS && (time_now() < stop || out->runs < 3));
    qsort(times, (size_t)out->runs, sizeof times[0], ascending);
    out->seconds = times[out->runs / 2];
out:
    dev->vt->capture_free(dev, graph);
    if (base != NULL)
        dev->vt->free(dev, base);
    return st;
}

static int time_calls(const struct op_call *c, struct dev *dev, double budget, struct op_timing *out, struct err *e)
{
    enum { MAX_RUNS = 200 };
    struct lane lane = {.dev = dev, .err = e};
    double times[MAX_RUNS];
    const struct ops *ops = ops_for(dev);
    TRY(op_call_run(ops, &lane, c));
    double stop = time_now() + budget;
    do {
        double begin = time_now();
        TRY(op_call_run(ops, &lane, c));
        times[out->runs++] = time_now() - begin;
    } while (out->runs < MAX_RUNS && (time_now() < stop || out->runs < 3));
    qsort(times, (size_t)out->runs, sizeof times[0], ascending);
    out->seconds = times[out->runs / 2];
    return ST_OK;
}

int op_bench(const struct op_desc *d, const struct op_sample *s, struct dev *dev, const struct roofline *r,
             double budget, struct op_timing *out, struct err *e)
{
    struct op_call c;
    struct op_block b = {0};
    int st;
    *out = (struct op_timing){0};
    TRY_OUT(op_call_sample(&c, d, s, ops_for(dev), e));
    TRY_OUT(op_call_alloc_fast(&c, &b, 1, e));
    TRY_OUT(dev->kind == DEV_CUDA ? time_captured(&c, &b, dev, budget, out, e) : time_calls(&c, dev, budget, out, e));
    d->cost(&c, &out->cost);
    double by_flops = r->flops_per_s > 0 ? out->cost.flops / r->flops_per_s : 0;
    double by_bytes = r->bytes_per_s > 0 ? out->cost.bytes / r->bytes_per_s : 0;
    out->of_roofline = (by_flops > by_bytes ? by_flops : by_bytes) / out->seconds;
out:
    op_call_free(&b);
    return st;
}
