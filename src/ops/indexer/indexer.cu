/* indexer, CUDA version; see indexer.h. Scores are computed for a chunk of queries at a time, so that scratch does not
 * grow with the square of the sequence; selection is a radix select on their bits, a block for each query. */
#include "ops/cuda/kernel.cuh"
#include "ops/indexer/indexer_cuda.cuh"

enum { SCORE_THREADS = 128, SELECT_THREADS = 256, ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / 32 };

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

/* The topk-th largest of n scores and how many equal to it are still taken: byte by byte from the top. */
struct threshold {
    uint32_t value;
    int equal;
};
__device__ __forceinline__ threshold find_threshold(const float *s, int n, int topk, uint32_t *bins, uint32_t *shared)
{
    uint32_t prefix = 0;
    int left = topk;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int x = threadIdx.x; x < 256; x += SELECT_THREADS)
            bins[x] = 0;
        __syncthreads();
        for (int x = threadIdx.x; x < n; x += SELECT_THREADS) {
            uint32_t o = order_of(s[x]);
            if (shift == 24 || o >> (shift + 8) == prefix >> (shift + 8))
                atomicAdd(&bins[o >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = 255, seen = 0;
            while (bin > 0 && seen + (int)bins[bin] < left)
                seen += (int)bins[bin--];
            shared[0] = prefix | (uint32_t)bin << shift;
            shared[1] = (uint32_t)(left - seen);
        }
        __syncthreads();
        prefix = shared[0];
        left = (int)shared[1];
        __syncthreads();
    }
    threshold t = {prefix, left};
    return t;
}

/* How many threads before this one have the flag, and how many of the block. */
__device__ __forceinline__ int count_before(bool flag, int *counts, int *all)
{
    unsigned votes = __ballot_sync(0xffffffffu, flag);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, before = __popc(votes & ((1u << lane) - 1));
    if (lane == 0)
        counts[warp] = __popc(votes);
    __syncthreads();
    *all = 0;
    for (int w = 0; w < SELECT_THREADS / 32; w++) {
        before += w < warp ? counts[w] : 0;
        *all += counts[w];
    }
    __syncthreads();
    return before;
}

template <typename T>
static __global__ void __launch_bounds__(SELECT_THREADS)
    select_rows(const __grid_constant__ index_call<T> c, int64_t first_row, const float *scores, int32_t *idx, int topk)
{
    __shared__ uint32_t bins[256], shared[2];
    __shared__ int counts[SELECT_THREADS / 32];
    int64_t r = first_row + blockIdx.x, b = r / c.rows, i = r % c.rows;
    index_range seen = row_seen(c, b, i);
    int64_t first = seen.first;
    const float *s = scores + (int64_t)blockIdx.x * c.keys + first;
    int n = (int)max((int64_t)0, seen.end - first), kept = 0, equal = 0, all;
    threshold t = {0, 0};
    idx += r * topk;
    if (n > topk && topk > 0)
        t = find_threshold(s, n, topk, bins, shared);
    for (int base = 0; base < n; base += SELECT_THREADS) {
        int x = base + threadIdx.x;
        uint32_t o = x < n && n > topk ? order_of(s[x]) : 0;
        bool tie = x < n && n > topk && o == t.value;
        int rank = equal + count_before(tie, counts, &all);
        equal += all;
        bool take = x < n && (n <= topk || o > t.value || (tie && rank < t.equal));
        int at = kept + count_before(take, counts, &all);
        kept += all;
        if (take && at < topk)
            idx[at] = (int32_t)(first + x);
    }
    for (int x = kept + threadIdx.x; x < topk; x += SELECT_THREADS)
        idx[x] = -1;
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
    return index_scores_mma(l, c, first, count, scores, c.keys, 1.0f);
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
