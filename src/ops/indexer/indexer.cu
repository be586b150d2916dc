/* indexer, CUDA version; see indexer.h. Scores are computed for a chunk of queries at a time, so that scratch does not
 * grow with the square of the sequence; selection is a radix select on their bits, a block for each query, that reads
 * them three times: to count the first digits, to collect those that share the threshold's, and to take the keys. */
#include "ops/cuda/kernel.cuh"
#include "ops/indexer/indexer_cuda.cuh"

enum { SCORE_THREADS = 128, SELECT_THREADS = 512, SELECT_WARPS = SELECT_THREADS / 32 };

/* ---- scores ---------------------------------------------------------------------------------- */

/* A thread for each key, the query's heads in shared memory. */
template <typename T>
static __global__ void __launch_bounds__(SCORE_THREADS)
    scores_plain(const __grid_constant__ index_call<T> c, int64_t first_row, float *scores)
{
    DYNAMIC_SHARED(float, q, 4);
    int64_t r = first_row + blockIdx.y, b = r / c.rows, i = r % c.rows;
    for (int x = threadIdx.x; x < c.heads * c.width; x += SCORE_THREADS)
        q[x] = to_float(c.q.at(b, i, x / c.width)[x % c.width]);
    __syncthreads();
    int64_t j = (int64_t)blockIdx.x * SCORE_THREADS + threadIdx.x;
    if (j >= row_seen(c, b, i).end)
        return;
    const T *k = c.k.at(b, j, 0);
    float sum = 0;
    for (int h = 0; h < c.heads; h++) {
        float z = 0;
        for (int x = 0; x < c.width; x++)
            z += to_float(k[x]) * q[h * c.width + x];
        sum += c.w.at(b, i, 0)[h] * (c.relu && z < 0 ? 0.0f : z);
    }
    scores[(int64_t)blockIdx.y * c.keys + j] = sum;
}

/* ---- selection ------------------------------------------------------------------------------- */

/* Ascending as the numbers are; what is not a number counts as minus infinity, -0 as 0. */
__device__ __forceinline__ uint32_t order_of(float x)
{
    uint32_t bits = __float_as_uint(isnan(x) ? -INFINITY : x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* What a block needs to select: counts by digit, the values that share the threshold's first digit if they are few. */
enum { BINS = 2048, CANDIDATES = 4096, EACH = 4 /* scores under way of a thread */ };
struct select_shared {
    uint32_t bins[BINS], list[CANDIDATES], n_list, bin, left, inside, warp[SELECT_WARPS];
};

/* Every score of a row, as order_of, EACH loads at a time. */
template <typename F> __device__ __forceinline__ void each_score(const float *s, int n, F visit)
{
    for (int x = threadIdx.x; x < n; x += EACH * SELECT_THREADS) {
        float v[EACH];
#pragma unroll
        for (int u = 0; u < EACH; u++)
            v[u] = x + u * SELECT_THREADS < n ? s[x + u * SELECT_THREADS] : 0.0f;
#pragma unroll
        for (int u = 0; u < EACH; u++)
            if (x + u * SELECT_THREADS < n)
                visit(order_of(v[u]));
    }
}

/* Finds, among digits counted in bins, that of the left-th largest value, and how many of its values are still taken.
 * By the first warp; a lane has 64 bins, the first lane the uppermost. */
__device__ __forceinline__ void choose_bin(select_shared &m, uint32_t left)
{
    int lane = threadIdx.x, top = BINS - 1 - lane * (BINS / 32);
    uint32_t sum = 0, upto;
    for (int x = 0; x < BINS / 32; x++)
        sum += m.bins[top - (x + lane) % (BINS / 32)];
    upto = sum;
    for (int d = 1; d < 32; d *= 2) {
        uint32_t other = __shfl_up_sync(0xffffffffu, upto, d);
        upto += lane >= d ? other : 0;
    }
    if (upto >= left && upto - sum < left) {
        uint32_t seen = upto - sum;
        while (seen + m.bins[top] < left)
            seen += m.bins[top--];
        m.bin = (uint32_t)top;
        m.left = left - seen;
        m.inside = m.bins[top];
    }
}

/* The topk-th largest of n > topk scores and how many equal to it are still taken: digits of 11, 11 and 10 bits from
 * the top. Where few values share the first digit, the others are counted in shared memory. */
struct threshold {
    uint32_t value;
    int equal;
};
__device__ __forceinline__ threshold find_threshold(const float *s, int n, int topk, select_shared &m)
{
    uint32_t prefix = 0, left = (uint32_t)topk;
    bool listed = false;
#pragma unroll
    for (int round = 0; round < 3; round++) {
        const int shift = round == 0 ? 21 : round == 1 ? 10 : 0, bits = round == 2 ? 10 : 11;
        for (int x = threadIdx.x; x < BINS; x += SELECT_THREADS)
            m.bins[x] = 0;
        if (round == 0 && threadIdx.x == 0)
            m.n_list = 0;
        __syncthreads();
        auto count = [&](uint32_t o) {
            if ((uint64_t)o >> (shift + bits) == prefix)
                atomicAdd(&m.bins[o >> shift & ((1u << bits) - 1)], 1u);
        };
        if (listed)
            for (uint32_t x = threadIdx.x; x < m.n_list; x += SELECT_THREADS)
                count(m.list[x]);
        else
            each_score(s, n, count);
        __syncthreads();
        if (threadIdx.x < 32)
            choose_bin(m, left);
        __syncthreads();
        prefix = prefix << bits | m.bin;
        left = m.left;
        if (round == 0 && m.inside <= CANDIDATES) {
            listed = true;
            each_score(s, n, [&](uint32_t o) {
                if (o >> 21 == prefix)
                    m.list[atomicAdd(&m.n_list, 1u)] = o;
            });
        }
        __syncthreads();
    }
    threshold t = {prefix, (int)left};
    return t;
}

/* Sum of x over the threads before this one, and of all. */
__device__ __forceinline__ uint32_t sum_before(uint32_t x, uint32_t *warp_sum, uint32_t *all)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t upto = x, before = 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        uint32_t other = __shfl_up_sync(0xffffffffu, upto, d);
        upto += lane >= d ? other : 0;
    }
    if (lane == 31)
        warp_sum[warp] = upto;
    __syncthreads();
    *all = 0;
#pragma unroll
    for (int w = 0; w < SELECT_WARPS; w++) {
        before += w < warp ? warp_sum[w] : 0;
        *all += warp_sum[w];
    }
    __syncthreads();
    return before + upto - x;
}

/* Keys in order: those above the threshold, and the first ones that are equal to it. */
__device__ __forceinline__ void take_keys(int32_t *idx, const float *s, int n, int first, threshold t,
                                          uint32_t *scratch)
{
    uint32_t above = 0, equal = 0, all;
    for (int base = 0; base < n; base += EACH * SELECT_THREADS) {
        int at = base + EACH * threadIdx.x;
        uint32_t o[EACH], mine = 0; /* those above in the lower half, equal ones in the upper */
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            o[u] = at + u < n ? order_of(s[at + u]) : 0;
            mine += at + u < n ? (o[u] > t.value) + ((uint32_t)(o[u] == t.value) << 16) : 0;
        }
        uint32_t before = sum_before(mine, scratch, &all), higher = above + (before & 0xffff),
                 ties = equal + (before >> 16);
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            bool exists = at + u < n, over = exists && o[u] > t.value, tie = exists && o[u] == t.value;
            if (over || (tie && ties < (uint32_t)t.equal))
                idx[higher + min(ties, (uint32_t)t.equal)] = first + at + u;
            higher += over;
            ties += tie;
        }
        above += all & 0xffff;
        equal += all >> 16;
    }
}

template <typename T>
static __global__ void __launch_bounds__(SELECT_THREADS)
    select_rows(const __grid_constant__ index_call<T> c, int64_t first_row, const float *scores, int32_t *idx, int topk)
{
    __shared__ select_shared m;
    int64_t r = first_row + blockIdx.x, b = r / c.rows, i = r % c.rows;
    index_range seen = row_seen(c, b, i);
    int64_t first = seen.first;
    const float *s = scores + (int64_t)blockIdx.x * c.keys + first;
    int n = (int)max((int64_t)0, seen.end - first);
    idx += r * topk;
    if (n > topk && topk > 0)
        take_keys(idx, s, n, (int)first, find_threshold(s, n, topk, m), m.warp);
    else
        for (int x = threadIdx.x; x < topk; x += SELECT_THREADS)
            idx[x] = x < n ? (int32_t)(first + x) : -1;
}

static int64_t rows_at_once(int64_t rows, int64_t row_bytes)
{
    enum { MOST_BYTES = 1 << 27, MOST_ROWS = 32768 };
    return min_i64(max_i64(1, rows), max_i64(1, min_i64(MOST_ROWS, MOST_BYTES / max_i64(1, row_bytes))));
}

extern "C" int64_t index_topk_work_cuda(const struct index_topk_args *a)
{
    return rows_at_once(a->q.dim[0] * a->q.dim[1], a->k.dim[1] * 4) * a->k.dim[1] * 4;
}

static int scores_on_cores(struct lane *l, const index_call<bf16> &c, int64_t first, unsigned count, float *scores)
{
    return index_scores(l, c, first, count, scores, c.keys, 1.0f);
}
static int scores_on_cores(struct lane *, const index_call<float> &, int64_t, unsigned, float *) { return ST_OK; }

template <typename T> static int run_topk(struct lane *l, const struct index_topk_args *a)
{
    index_call<T> c = {};
    c.q = index_view<T>(&a->q);
    c.k = index_view<T>(&a->k);
    c.w = index_view<float>(&a->w);
    c.doc = (const int32_t *)a->doc_start.data;
    c.doc_batch = a->doc_start.rank > 0 ? a->doc_start.stride[0] : 0;
    c.start = (const int64_t *)a->start.data;
    c.batch = (int)a->q.dim[0];
    c.rows = (int)a->q.dim[1];
    c.keys = (int)a->k.dim[1];
    c.heads = (int)a->q.dim[2];
    c.width = (int)a->q.dim[3];
    c.most = c.keys;
    c.by_key = true;
    c.ratio = a->ratio;
    c.relu = a->relu;
    float *scores = (float *)a->work.data;
    int64_t rows = a->q.dim[0] * a->q.dim[1], chunk = rows_at_once(rows, a->k.dim[1] * 4);
    int smem = c.heads * c.width * 4;
    auto plain = scores_plain<T>;
    NEEDS_SMEM(l, plain, smem);
    for (int64_t first = 0; first < rows; first += chunk) {
        unsigned count = (unsigned)min_i64(chunk, rows - first);
        if (a->topk < c.keys && index_cores_fit(&a->q, &a->k))
            TRY(scores_on_cores(l, c, first, count, scores));
        else if (a->topk < c.keys)
            LAUNCH(l, plain, dim3((unsigned)ceil_div(c.keys, SCORE_THREADS), count), SCORE_THREADS, smem, c, first,
                   scores);
        LAUNCH(l, select_rows<T>, count, SELECT_THREADS, 0, c, first, scores, (int32_t *)a->idx.data, (int)a->topk);
    }
    return ST_OK;
}

extern "C" int index_topk_cuda(struct lane *l, const struct index_topk_args *a)
{
    TRY(index_topk_check(a, l->err));
    TRY(check_work("index_topk", &a->work, index_topk_work_cuda(a), l->err));
    BY_REAL(a->q.dtype, T, return run_topk<T>(l, a));
}
