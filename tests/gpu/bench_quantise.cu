/* Variants of the quantiser beside the one that ops/quantise runs: are their codes the same bits, and how fast are
 * they.
 *
 *   bench_quantise check      small shapes: codes and scales of every variant are those of the op, or "not ok"
 *   bench_quantise time [MS]  shapes of training: microseconds and share of the copy rate, all in one call; MS for each
 *                             (30)
 * Variants: `ahead` keeps blocks on their multiprocessors and asks for the next tile before it quantises this one, with
 * two or three blocks on a multiprocessor; `split` (fp32 by squares) gives a thread four columns in each half of a
 * tile, so that loads of a warp are contiguous. What is faster here belongs into ops/quantise. */
#include "bench.cuh"
#include "ops/cuda/f8.cuh"
#include "ops/ops.h"

enum { COPIES = 4 }; /* of the input, so that no call finds its own in the cache */

struct job {
    const void *x;
    int64_t stride;
    struct f8_out o;
    int tiles, across;
};

/* ---- variants -------------------------------------------------------------------------------- */

template <typename T, bool SPLIT>
static __device__ __forceinline__ void load_tile(const struct job &j, int tile, f8_eight<T> *to)
{
    int64_t r0 = (int64_t)(tile / j.across) * F8_TILE, c0 = (int64_t)(tile % j.across) * F8_TILE;
    if constexpr (SPLIT) {
        int c = threadIdx.x % 16;
        int64_t row = r0 + threadIdx.x / 16 * 8;
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int64_t col = c0 + f8_column<true>(c, half, 0);
                bool inside = row + i < j.o.rows && col < j.o.cols;
                to[i].raw[half] = inside ? load_raw((const T *)j.x + (row + i) * j.stride + col) : zero_raw();
            }
    } else {
        f8_walk<T> from(j.x, j.stride, r0, c0, f8_valid(j.o, r0, c0));
#pragma unroll
        for (int i = 0; i < 8; i++, from.next())
            to[i] = from.load();
    }
}

template <typename T, int BLOCKS, int PER_SM>
static __global__ void __launch_bounds__(F8_THREADS, PER_SM) ahead_tiles(const __grid_constant__ struct job j)
{
    __shared__ struct f8_shared s;
    f8_eight<T> tile[8], next[8];
    int t = blockIdx.x;
    if (t < j.tiles)
        load_tile<T, false>(j, t, next);
    for (; t < j.tiles; t += gridDim.x) {
        int64_t r0 = (int64_t)(t / j.across) * F8_TILE, c0 = (int64_t)(t % j.across) * F8_TILE;
#pragma unroll
        for (int i = 0; i < 8; i++)
            tile[i] = next[i];
        if (t + (int)gridDim.x < j.tiles)
            load_tile<T, false>(j, t + (int)gridDim.x, next);
        f8_clear(tile, f8_valid(j.o, r0, c0));
        f8_quantise_tile<T, DT_F8_E4M3, BLOCKS>(tile, j.o, r0, c0, 0, &s);
        __syncthreads(); /* the tile is read out of shared memory */
    }
}

static __global__ void __launch_bounds__(F8_THREADS, 2) split_tiles(const __grid_constant__ struct job j)
{
    __shared__ struct f8_shared s;
    f8_eight<float> tile[8];
    int64_t r0 = (int64_t)(blockIdx.x / j.across) * F8_TILE, c0 = (int64_t)(blockIdx.x % j.across) * F8_TILE;
    load_tile<float, true>(j, blockIdx.x, tile);
    float factor = f8_square_factor<float, DT_F8_E4M3>(f8_thread_most<float>(tile), j.o, r0, c0, &s);
    int64_t row = r0 + threadIdx.x / 16 * 8, col = c0 + f8_column<true>(threadIdx.x % 16, 0, 0);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float v[8];
        f8_floats(tile[i], v);
        uint2 w = f8_word<DT_F8_E4M3>(v, factor);
        uint8_t *q = j.o.q + (row + i) * j.o.cols + col;
        if (row + i < j.o.rows && col < j.o.cols)
            *(uint32_t *)q = w.x;
        if (row + i < j.o.rows && col + F8_TILE / 2 < j.o.cols)
            *(uint32_t *)(q + F8_TILE / 2) = w.y;
    }
    f8_columns<float, DT_F8_E4M3, F8_SQUARE, true>(tile, j.o, r0, c0, factor, &s);
}

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

enum variant { BY_OP, AHEAD2, AHEAD3, SPLIT, VARIANTS };
static const char *const names[] = {"op", "ahead, 2 blocks", "ahead, 3 blocks", "split"};

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

static bool takes(enum variant v, const struct shape *s)
{
    return v == BY_OP || (v == SPLIT ? s->wide && s->square && s->q && s->t : !s->wide && !s->square);
}

static int run(struct bench *b, const struct shape *s, const struct data *d, int which, enum variant v)
{
    struct lane *l = &b->lane;
    struct quantise_args a = d->out;
    a.x = d->x[which];
    if (v == BY_OP)
        return ops_for(&b->dev)->quantise(l, &a);
    struct job j = {};
    j.x = a.x.data;
    j.stride = s->cols;
    j.o = f8_out_of(&a.q, &a.qs, &a.t, &a.ts, s->rows, s->cols, 128, s->square);
    j.across = (int)ceil_div(s->cols, F8_TILE);
    j.tiles = (int)ceil_div(s->rows, F8_TILE) * j.across;
    unsigned sms = (unsigned)cuda_of(l)->sm_count;
    if (v == SPLIT)
        LAUNCH(l, split_tiles, (unsigned)j.tiles, F8_THREADS, 0, j);
    else if (v == AHEAD2)
        LAUNCH(l, (ahead_tiles<bf16, F8_ROWS, 2>), min(2 * sms, (unsigned)j.tiles), F8_THREADS, 0, j);
    else
        LAUNCH(l, (ahead_tiles<bf16, F8_ROWS, 3>), min(3 * sms, (unsigned)j.tiles), F8_THREADS, 0, j);
    return ST_OK;
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

/* ---- check ----------------------------------------------------------------------------------- */

static char *fetch(struct bench *b, const struct quantise_args *a, size_t *bytes)
{
    const struct tensor *all[] = {&a->q, &a->qs, &a->t, &a->ts};
    char *host = NULL;
    *bytes = 0;
    CHECK(cudaStreamSynchronize(stream_of(&b->lane)));
    for (int k = 0; k < countof(all); k++) {
        size_t n = all[k]->data != NULL ? (size_t)tensor_bytes(all[k]) : 0;
        host = (char *)realloc(host, *bytes + n + 1);
        if (host == NULL)
            exit(1);
        if (n > 0)
            CHECK(cudaMemcpy(host + *bytes, all[k]->data, n, cudaMemcpyDeviceToHost));
        *bytes += n;
    }
    return host;
}

static int check(struct bench *b)
{
    static const struct shape shapes[] = {{144, 272, false, false, true, true},
                                          {256, 384, false, false, true, false},
                                          {400, 136, false, false, false, true},
                                          {272, 144, true, true, true, true},
                                          {256, 128, true, true, true, true}};
    int passed = 0, failed = 0;
    for (int i = 0; i < countof(shapes); i++) {
        const struct shape *s = &shapes[i];
        struct data d = make(b, s);
        size_t bytes, same;
        ok(b, run(b, s, &d, 0, BY_OP));
        char *want = fetch(b, &d.out, &bytes);
        for (int v = 1; v < VARIANTS; v++) {
            if (!takes((enum variant)v, s))
                continue;
            if (d.out.q.data != NULL)
                CHECK(cudaMemsetAsync(d.out.q.data, 0x55, (size_t)tensor_bytes(&d.out.q), stream_of(&b->lane)));
            if (d.out.t.data != NULL)
                CHECK(cudaMemsetAsync(d.out.t.data, 0x55, (size_t)tensor_bytes(&d.out.t), stream_of(&b->lane)));
            ok(b, run(b, s, &d, 0, (enum variant)v));
            char *got = fetch(b, &d.out, &same);
            bool is = memcmp(want, got, bytes) == 0;
            is ? passed++ : failed++;
            printf("%s %s, %lld x %lld\n", is ? "ok" : "not ok", names[v], (long long)s->rows, (long long)s->cols);
            free(got);
        }
        free(want);
        drop(&d);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
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
    printf("copy of 1 GiB: %.2f TB/s\n%-34s %-18s %9s %14s\n", rate * 1e-6, "shape", "variant", "us", "of copy rate");
    for (int i = 0; i < countof(shapes); i++) {
        const struct shape *s = &shapes[i];
        struct data d = make(b, s);
        double bytes = (double)(s->rows * s->cols) * ((s->wide ? 4 : 2) + s->q + s->t);
        char name[64];
        snprintf(name, sizeof name, "%lld x %lld %s%s%s%s", (long long)s->rows, (long long)s->cols,
                 s->wide ? "fp32 " : "", s->square ? "squares " : "", s->q ? "q " : "", s->t ? "t" : "");
        for (int v = 0; v < VARIANTS; v++)
            if (takes((enum variant)v, s)) {
                us = time_of(b, ms, [&](int k) { return run(b, s, &d, k, (enum variant)v); });
                printf("%-34s %-18s %9.1f %12.1f %%\n", name, names[v], us, 100 * bytes / us / rate);
            }
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
    bool time = argc > 1 && strcmp(argv[1], "time") == 0;
    return time ? timed(&b, argc > 2 ? atof(argv[2]) : 30) : check(&b);
}
