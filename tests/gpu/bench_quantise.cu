/* The quantiser beside a copy that moves as many bytes, at shapes of training.
 *
 *   bench_quantise [MS]   microseconds and share of the copy rate, all in one call; MS for each (30) */
#include "bench.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/ops.h"
extern "C" {
#include "ops/quantise/quantise.h"
}

enum { COPIES = 4 }; /* of the input, so that no call finds its own in the cache */

static __global__ void __launch_bounds__(256) copy_kernel(const uint4 *from, uint4 *to, int64_t n)
{
    for (int64_t i = (int64_t)blockIdx.x * 1024 + threadIdx.x; i < n; i += (int64_t)gridDim.x * 1024) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[k] = i + 256 * k < n ? from[i + 256 * k] : zero_raw();
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (i + 256 * k < n)
                to[i + 256 * k] = v[k];
    }
}

struct shape {
    int64_t rows, cols;
    bool wide, square, q, t;
};

struct bench {
    struct dev dev;
    struct lane lane;
    struct err err;
};
struct data {
    struct tensor x[COPIES];
    struct quantise_args out;
};

static int run(struct bench *b, const struct data *d, int which)
{
    struct quantise_args a = d->out;
    a.x = d->x[which];
    return ops_for(&b->dev)->quantise(&b->lane, &a);
}

/* ---- data ------------------------------------------------------------------------------------ */

static void ok(struct bench *b, int st)
{
    if (st == ST_OK)
        return;
    printf("not ok %s\n0 passed, 1 failed\n", b->err.msg);
    exit(1);
}

static void *room(int64_t bytes)
{
    void *p = NULL;
    CHECK(cudaMalloc(&p, (size_t)bytes + 16));
    return p;
}

static int fill_x(struct bench *b, struct tensor *x, uint64_t seed)
{
    int64_t n = tensor_elems(x);
    if (x->dtype == DT_BF16)
        LAUNCH(&b->lane, fill<bf16>, 1024, 256, 0, (bf16 *)x->data, n, 1.0f, 0.0f, seed);
    else
        LAUNCH(&b->lane, fill<float>, 1024, 256, 0, (float *)x->data, n, 1.0f, 0.0f, seed);
    return ST_OK;
}

static struct data make(struct bench *b, const struct shape *s)
{
    struct data d = {};
    enum dtype type = s->wide ? DT_F32 : DT_BF16;
    for (int k = 0; k < COPIES; k++) {
        d.x[k] = tensor_2d(room(s->rows * s->cols * (int64_t)dtype_bytes(type)), type, s->rows, s->cols);
        ok(b, fill_x(b, &d.x[k], 7 + k));
    }
    d.out.block = 128;
    d.out.square = s->square;
    d.out.k = 1;
    if (s->q) {
        d.out.q = tensor_2d(room(s->rows * s->cols), DT_F8_E4M3, s->rows, s->cols);
        d.out.qs = f8_scales(DT_F32, s->rows, s->cols, 128, s->square);
        d.out.qs.data = room(tensor_bytes(&d.out.qs));
    }
    if (s->t) {
        d.out.t = tensor_2d(room(s->rows * s->cols), DT_F8_E4M3, s->cols, s->rows);
        d.out.ts = f8_scales(DT_F32, s->cols, s->rows, 128, s->square);
        d.out.ts.data = room(tensor_bytes(&d.out.ts));
    }
    return d;
}

static void drop(struct data *d)
{
    void *all[] = {d->out.q.data, d->out.qs.data, d->out.t.data, d->out.ts.data};
    for (int k = 0; k < COPIES; k++)
        CHECK(cudaFree(d->x[k].data));
    for (int k = 0; k < countof(all); k++)
        CHECK(cudaFree(all[k]));
}

/* ---- time ------------------------------------------------------------------------------------ */

/* Microseconds of a call, the best of three rounds. */
template <typename CALL> static double time_of(struct bench *b, double ms, CALL call)
{
    cudaEvent_t begin, end;
    double best = 0;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    int calls = 20;
    for (int round = 0; round < 4; round++) { /* the first one finds out how many calls fill a third of the time */
        float took = 0;
        CHECK(cudaEventRecord(begin, stream_of(&b->lane)));
        for (int i = 0; i < calls; i++)
            ok(b, call(i % COPIES));
        CHECK(cudaEventRecord(end, stream_of(&b->lane)));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&took, begin, end));
        double us = 1e3 * (double)took / calls;
        best = round == 1 || (round > 1 && us < best) ? us : best;
        if (round == 0)
            calls = (int)max(20.0, min(2000.0, ms * 1e3 / 3 / us));
    }
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    return best;
}

static int copy_call(struct bench *b, const uint4 *from, uint4 *to, int64_t bytes)
{
    LAUNCH(&b->lane, copy_kernel, (unsigned)min_i64(ceil_div(bytes, 16 * 1024), 1 << 20), 256, 0, from, to, bytes / 16);
    return ST_OK;
}

static int timed(struct bench *b, double ms)
{
    static const struct shape shapes[] = {
        {16384, 2048, false, false, true, true},  {16384, 2048, false, false, true, false},
        {16384, 2048, false, false, false, true}, {16384, 5632, false, false, true, true},
        {16384, 11264, false, false, true, true}, {11264, 2048, true, true, true, true}};
    const int64_t large = (int64_t)1 << 30;
    uint4 *from = (uint4 *)room(large), *to = (uint4 *)room(large);
    double us = time_of(b, ms, [&](int) { return copy_call(b, from, to, large); }), rate = 2.0 * (double)large / us;
    printf("copy of 1 GiB: %.2f TB/s\n%-34s %-18s %9s %14s\n", rate * 1e-6, "shape", "", "us", "of copy rate");
    for (int i = 0; i < countof(shapes); i++) {
        const struct shape *s = &shapes[i];
        struct data d = make(b, s);
        double bytes = (double)(s->rows * s->cols) * ((s->wide ? 4 : 2) + s->q + s->t);
        char name[64];
        snprintf(name, sizeof name, "%lld x %lld %s%s%s%s", (long long)s->rows, (long long)s->cols,
                 s->wide ? "fp32 " : "", s->square ? "squares " : "", s->q ? "q " : "", s->t ? "t" : "");
        us = time_of(b, ms, [&](int k) { return run(b, &d, k); });
        printf("%-34s %-18s %9.1f %12.1f %%\n", name, "quantised", us, 100 * bytes / us / rate);
        us = time_of(b, ms, [&](int k) { return copy_call(b, (const uint4 *)d.x[k].data, to, (int64_t)(bytes / 2)); });
        printf("%-34s %-18s %9.1f %12.1f %%\n", name, "copy of as much", us, 100 * bytes / us / rate);
        drop(&d);
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct bench b = {};
    struct dev_gpu want = {};
    if (!open_gpu(&b.dev, &b.lane, &b.err, &want))
        return 1;
    return timed(&b, argc > 1 ? atof(argv[1]) : 30);
}
