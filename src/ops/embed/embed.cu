/* embed, CUDA version; see embed.h.
 *
 * Backward: tokens are sorted by id, stably, so each id's tokens are a run in order of t; then a warp sums a slice of
 * columns of one run in that order. Sorting is by digits of 8 bits, least first: per digit one kernel counts digits in
 * chunks of tokens, one works out where each chunk's tokens go and moves them. Counts are integers, so atomics in
 * shared memory do no harm to determinism. When dw is overwritten, rows of ids without tokens are set to zero apart. */
#include "ops/cuda/rows.cuh"
#include "ops/embed/embed.h"

enum { CHUNK = 1024, DIGITS = 256 };

/* ---- forward --------------------------------------------------------------------------------- */

/* A vector of V elements a thread. */
template <typename T, int V>
static __global__ void __launch_bounds__(256) gather_rows(const int32_t *token, int64_t rows, const T *w, int64_t vocab,
                                                          int64_t d, T *y, int64_t y_stride, int64_t first, bool part)
{
    unsigned vectors = (unsigned)(d / V);
    int64_t total = rows * vectors, i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= total)
        return;
    int64_t row = total < (1ll << 32) ? (int64_t)((unsigned)i / vectors) : i / vectors, at = (i - row * vectors) * V,
            id = token[row] - first;
    float value[V];
#pragma unroll
    for (int e = 0; e < V; e++)
        value[e] = part ? 0.0f : __int_as_float(0x7fffffff);
    if (id >= 0 && id < vocab)
        load_floats(w + id * d + at, value);
    store_floats(y + row * y_stride + at, value);
}

template <typename T> static int gather(struct lane *l, const struct embed_fwd_args *a)
{
    constexpr int V = pack<T>::N;
    int64_t rows = a->token.dim[0], vocab = a->w.dim[0], d = a->w.dim[1], stride = a->y.stride[0];
    const int32_t *token = (const int32_t *)a->token.data;
    if (aligned16(&a->w) && aligned16(&a->y))
        LAUNCH(l, (gather_rows<T, V>), (unsigned)ceil_div(rows * (d / V), 256), 256, 0, token, rows,
               (const T *)a->w.data, vocab, d, (T *)a->y.data, stride, a->first, a->part);
    else
        LAUNCH(l, (gather_rows<T, 1>), (unsigned)ceil_div(rows * d, 256), 256, 0, token, rows, (const T *)a->w.data,
               vocab, d, (T *)a->y.data, stride, a->first, a->part);
    return ST_OK;
}

extern "C" int embed_fwd_cuda(struct lane *l, const struct embed_fwd_args *a)
{
    TRY(embed_fwd_check(a, l->err));
    BY_REAL(a->w.dtype, T, return gather<T>(l, a));
}

/* ---- sorting tokens by id -------------------------------------------------------------------- */

/* One pass: from (key, index) pairs to (key, index) pairs. In the first pass keys are the tokens, clamped into the
 * vocabulary, and indices count; of a part of a table, those of other rows get the id `vocab`, behind all others. */
struct sort_pass {
    const int32_t *token; /* first pass, else NULL */
    const int2 *from;
    int2 *to;
    int32_t *counts; /* [chunks, DIGITS] */
    int n, vocab, shift, first;
    bool part;
};
__device__ __forceinline__ int2 sort_item(const struct sort_pass &p, int i)
{
    if (p.token == NULL)
        return p.from[i];
    int id = p.token[i] - p.first;
    bool held = id >= 0 && id < p.vocab;
    return make_int2(p.part && !held ? p.vocab : min(max(id, 0), p.vocab - 1), i);
}

static __global__ void __launch_bounds__(CHUNK) count_digits(const struct sort_pass p)
{
    __shared__ int32_t count[DIGITS];
    int i = blockIdx.x * CHUNK + threadIdx.x;
    if (threadIdx.x < DIGITS)
        count[threadIdx.x] = 0;
    __syncthreads();
    if (i < p.n)
        atomicAdd(&count[sort_item(p, i).x >> p.shift & (DIGITS - 1)], 1);
    __syncthreads();
    if (threadIdx.x < DIGITS)
        p.counts[blockIdx.x * DIGITS + threadIdx.x] = count[threadIdx.x];
}

static __global__ void __launch_bounds__(CHUNK) move_by_digit(const struct sort_pass p)
{
    constexpr int WARPS = CHUNK / 32;
    __shared__ uint16_t in_warp[WARPS][DIGITS]; /* tokens of the warp with the digit, then of the warps before it */
    __shared__ int32_t start[DIGITS];
    int i = blockIdx.x * CHUNK + threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int k = threadIdx.x; k < WARPS * DIGITS; k += CHUNK)
        in_warp[k / DIGITS][k % DIGITS] = 0;
    /* Where this chunk's tokens of a digit begin: all tokens of smaller digits, and of this digit in chunks before. */
    int total = 0, before = 0;
    if (threadIdx.x < DIGITS) {
        for (int c = 0; c < (int)gridDim.x; c++) {
            int have = p.counts[c * DIGITS + threadIdx.x];
            before += c < (int)blockIdx.x ? have : 0;
            total += have;
        }
        start[threadIdx.x] = total;
    }
    __syncthreads();
    for (int d = 1; d < DIGITS; d <<= 1) { /* inclusive sums over digits */
        int add = threadIdx.x < DIGITS && (int)threadIdx.x >= d ? start[threadIdx.x - d] : 0;
        __syncthreads();
        if (threadIdx.x < DIGITS)
            start[threadIdx.x] += add;
        __syncthreads();
    }
    if (threadIdx.x < DIGITS)
        start[threadIdx.x] += before - total;
    /* Rank among the tokens of the same digit: in the warp, then over the warps before it. */
    bool live = i < p.n;
    int2 item = live ? sort_item(p, i) : make_int2(0, 0);
    int digit = live ? item.x >> p.shift & (DIGITS - 1) : DIGITS;
    unsigned same = __match_any_sync(0xffffffffu, digit);
    int rank = __popc(same & ((1u << lane) - 1u));
    if (live && rank == 0)
        in_warp[warp][digit] = (uint16_t)__popc(same);
    __syncthreads();
    if (threadIdx.x < DIGITS) {
        int sum = 0;
        for (int w = 0; w < WARPS; w++) {
            int have = in_warp[w][threadIdx.x];
            in_warp[w][threadIdx.x] = (uint16_t)sum;
            sum += have;
        }
    }
    __syncthreads();
    if (live)
        p.to[start[digit] + in_warp[warp][digit] + rank] = item;
}

/* first[id] = index of the first of its tokens; the others stay -1. */
static __global__ void __launch_bounds__(256) mark_runs(const int2 *sorted, int n, int vocab, int32_t *first)
{
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n && sorted[i].x < vocab && (i == 0 || sorted[i - 1].x != sorted[i].x))
        first[sorted[i].x] = i;
}

/* ---- sums of runs ---------------------------------------------------------------------------- */

/* For every sorted token and slice of 32 V columns a warp; where a run begins it sums the run into dw[id], else it has
 * nothing to do. */
template <typename T, int V>
static __global__ void __launch_bounds__(256) sum_runs(const int2 *sorted, int n, int vocab, int slices, const T *dy,
                                                       int64_t dy_stride, float *dw, int64_t d, bool acc)
{
    constexpr int BATCH = 8;
    int64_t work = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    int i = (int)(work / slices), lane = threadIdx.x % 32;
    int64_t column = ((work - (int64_t)i * slices) * 32 + lane) * V;
    if (i >= n)
        return;
    int id = sorted[i].x;
    if (id >= vocab || (i > 0 && sorted[i - 1].x == id))
        return;
    bool mine = column < d;
    float sum[V] = {}, *to = dw + (int64_t)id * d + column;
    if (acc && mine)
        load_floats(to, sum);
    for (int count = 32; count == 32 && i < n; i += 32) {
        /* The next 32 tokens of the run, one in each lane. */
        int2 next = i + lane < n ? sorted[i + lane] : make_int2(-1, 0);
        unsigned in_run = __ballot_sync(0xffffffffu, next.x == id);
        count = in_run == 0xffffffffu ? 32 : __ffs(~in_run) - 1;
        for (int k = 0; k < count; k += BATCH) {
            float value[BATCH][V];
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                int t = __shfl_sync(0xffffffffu, next.y, (k + b) & 31);
                if (k + b < count && mine)
                    load_floats(dy + t * dy_stride + column, value[b]);
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                if (k + b < count && mine)
#pragma unroll
                    for (int e = 0; e < V; e++)
                        sum[e] += value[b][e];
        }
    }
    if (mine)
        store_floats(to, sum);
}

enum { ZERO_ROWS = 4 };
/* Rows of ids that no token has. */
template <int V>
static __global__ void __launch_bounds__(256) zero_absent(const int32_t *first, int64_t vocab, float *dw, int64_t d)
{
    for (int64_t id = (int64_t)blockIdx.x * ZERO_ROWS; id < min(vocab, ((int64_t)blockIdx.x + 1) * ZERO_ROWS); id++)
        if (first[id] < 0)
            for (int64_t c = threadIdx.x * V; c < d; c += 256 * V) {
                const float zeros[V] = {};
                store_floats(dw + id * d + c, zeros);
            }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Places in the scratch, in bytes: two lists of pairs, the counts, the first token of each id. */
struct sort_work {
    int64_t second, counts, first, bytes;
};
static struct sort_work work_of(int64_t n, int64_t vocab)
{
    struct sort_work w;
    w.second = round_up(n * 8, DEV_ALIGN);
    w.counts = w.second + round_up(n * 8, DEV_ALIGN);
    w.first = w.counts + round_up(ceil_div(n, CHUNK) * DIGITS * 4, DEV_ALIGN);
    w.bytes = w.first + round_up(vocab * 4, DEV_ALIGN);
    return w;
}

extern "C" int64_t embed_bwd_work_cuda(const struct embed_bwd_args *a)
{
    return work_of(a->token.dim[0], a->dw.dim[0]).bytes;
}

static int sort_tokens(struct lane *l, const struct embed_bwd_args *a, const struct sort_work *at, const int2 **sorted)
{
    char *work = (char *)a->work.data;
    int2 *list[2] = {(int2 *)work, (int2 *)(work + at->second)};
    struct sort_pass p = {(const int32_t *)a->token.data,
                          NULL,
                          list[0],
                          (int32_t *)(work + at->counts),
                          (int)a->token.dim[0],
                          (int)a->dw.dim[0],
                          0,
                          (int)a->first,
                          a->part};
    unsigned chunks = (unsigned)ceil_div(p.n, CHUNK);
    for (int pass = 0; pass == 0 || (p.vocab - !a->part) >> p.shift > 0; pass++) {
        LAUNCH(l, count_digits, chunks, CHUNK, 0, p);
        LAUNCH(l, move_by_digit, chunks, CHUNK, 0, p);
        *sorted = p.to;
        p.token = NULL;
        p.from = p.to;
        p.to = list[(pass + 1) % 2];
        p.shift += 8;
    }
    return ST_OK;
}

template <typename T, int V>
static int sum_by_run(struct lane *l, const struct embed_bwd_args *a, const struct sort_work *at, const int2 *sorted)
{
    int64_t n = a->token.dim[0], vocab = a->dw.dim[0], d = a->dw.dim[1];
    int slices = (int)ceil_div(d, 32 * V);
    const T *dy = (const T *)a->dy.data;
    float *dw = (float *)a->dw.data;
    int32_t *first = (int32_t *)((char *)a->work.data + at->first);
    if (slices == 0)
        return ST_OK;
    if (!a->acc_dw) {
        TRY(cuda_status(l->err, (int)cudaMemsetAsync(first, 0xFF, (size_t)vocab * sizeof *first, stream_of(l)),
                        "cudaMemsetAsync(embed runs)"));
        LAUNCH(l, mark_runs, (unsigned)ceil_div(n, 256), 256, 0, sorted, (int)n, (int)vocab, first);
        LAUNCH(l, zero_absent<V>, (unsigned)ceil_div(vocab, ZERO_ROWS), 256, 0, first, vocab, dw, d);
    }
    LAUNCH(l, (sum_runs<T, V>), (unsigned)ceil_div(n * slices, 8), 256, 0, sorted, (int)n, (int)vocab, slices, dy,
           a->dy.stride[0], dw, d, a->acc_dw);
    return ST_OK;
}

extern "C" int embed_bwd_cuda(struct lane *l, const struct embed_bwd_args *a)
{
    TRY(embed_bwd_check(a, l->err));
    TRY(check_work("embed_bwd", &a->work, embed_bwd_work_cuda(a), l->err));
    int64_t n = a->token.dim[0], vocab = a->dw.dim[0], d = a->dw.dim[1];
    if (n > INT32_MAX || vocab > INT32_MAX)
        return err_set(l->err, ST_UNSUPPORTED,
                       "embed_bwd: %lld tokens of a vocabulary of %lld are more than 32 bits count", (long long)n,
                       (long long)vocab);
    if (d == 0 || vocab == 0)
        return ST_OK;
    struct sort_work at = work_of(n, vocab);
    const int2 *sorted = NULL;
    TRY(sort_tokens(l, a, &at, &sorted));
    bool vectors = aligned16(&a->dy) && aligned16(&a->dw);
    if (a->dy.dtype == DT_BF16)
        return vectors ? sum_by_run<bf16, 4>(l, a, &at, sorted) : sum_by_run<bf16, 1>(l, a, &at, sorted);
    return vectors ? sum_by_run<float, 4>(l, a, &at, sorted) : sum_by_run<float, 1>(l, a, &at, sorted);
}
