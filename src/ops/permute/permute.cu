/* permute and unpermute on the GPU: copies of whole rows, a warp per token (or per row), 16 bytes per lane and access.
 * With the map by token at hand a token is read once and written k times; without it each row fetches its token. */
#include "ops/cuda/kernel.cuh"
#include "ops/permute/permute.h"

enum { THREADS = 256, WARPS = THREADS / 32, DEEP = 8 };

/* Two-dimensional rows without the shape that the kernels do not need. */
struct rows {
    void *data;
    int64_t stride, n; /* stride in elements; n rows */
};
static struct rows rows_of_tensor(const struct tensor *t)
{
    struct rows r = {t->data, t->data != NULL ? t->stride[0] : 0, t->data != NULL ? t->dim[0] : 0};
    return r;
}
template <typename T> __device__ __forceinline__ T *at_row(const struct rows &r, int64_t i)
{
    return (T *)r.data + i * r.stride;
}

struct permute_job {
    struct rows x, y;
    const int32_t *src, *row;
    const float *prob;
    float *yprob;
    int64_t k, cols; /* cols: of elements, or of 16-byte vectors */
};

static unsigned blocks_of_warps(int64_t warps) { return (unsigned)ceil_div(warps, WARPS); }

/* A row that no token fills. */
template <typename T, bool VEC>
__device__ __forceinline__ void clear_row(const struct permute_job &p, int64_t r, int lane)
{
    T *y = at_row<T>(p.y, r);
    for (int64_t c = lane; c < p.cols; c += 32) {
        if (VEC)
            ((uint4 *)y)[c] = make_uint4(0, 0, 0, 0);
        else
            y[c] = from_float<T>(0);
    }
    if (lane == 0 && p.yprob != NULL)
        p.yprob[r] = 0;
}

template <typename T, bool VEC> __device__ __forceinline__ void copy_row(const T *x, T *const y, int64_t cols, int lane)
{
    for (int64_t c = lane; !VEC && c < cols; c += 32)
        y[c] = x[c];
    for (int64_t c0 = lane; VEC && c0 < cols; c0 += 32 * DEEP) {
        uint4 v[DEEP];
#pragma unroll
        for (int i = 0; i < DEEP; i++)
            if (c0 + 32 * i < cols)
                v[i] = __ldg((const uint4 *)x + c0 + 32 * i);
#pragma unroll
        for (int i = 0; i < DEEP; i++)
            if (c0 + 32 * i < cols)
                __stcs((uint4 *)y + c0 + 32 * i, v[i]);
    }
}

/* One warp for each row. */
template <typename T, bool VEC> __global__ void __launch_bounds__(THREADS) gather_rows(struct permute_job p)
{
    int64_t r = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (r >= p.y.n)
        return;
    int64_t from = p.src[r], token = from / p.k;
    if (from < 0 || token >= p.x.n) {
        clear_row<T, VEC>(p, r, lane);
        return;
    }
    copy_row<T, VEC>(at_row<T>(p.x, token), at_row<T>(p.y, r), p.cols, lane);
    if (lane == 0 && p.yprob != NULL)
        p.yprob[r] = p.prob[from];
}

/* One token to its k rows. */
template <typename T, bool VEC>
__device__ __forceinline__ void spread_token(const struct permute_job &p, int64_t t, int lane)
{
    const int32_t *row = p.row + t * p.k;
    const T *x = at_row<T>(p.x, t);
    for (int64_t c0 = lane; c0 < p.cols; c0 += 32 * DEEP) {
        uint4 v[DEEP];
        T scalar[DEEP];
#pragma unroll
        for (int i = 0; i < DEEP; i++) {
            int64_t c = c0 + 32 * i;
            if (VEC && c < p.cols)
                v[i] = __ldcs((const uint4 *)x + c);
            if (!VEC && c < p.cols)
                scalar[i] = x[c];
        }
        for (int64_t j = 0; j < p.k; j++) {
            int64_t r = row[j];
            if (r < 0 || r >= p.y.n)
                continue;
            T *y = at_row<T>(p.y, r);
#pragma unroll
            for (int i = 0; i < DEEP; i++) {
                int64_t c = c0 + 32 * i;
                if (VEC && c < p.cols)
                    __stcs((uint4 *)y + c, v[i]);
                if (!VEC && c < p.cols)
                    y[c] = scalar[i];
            }
        }
    }
    for (int64_t j = lane; p.yprob != NULL && j < p.k; j += 32)
        if (row[j] >= 0 && row[j] < p.y.n)
            p.yprob[row[j]] = p.prob[t * p.k + j];
}

/* The first warps take a token each; the others look at 32 rows each and clear those without one. */
template <typename T, bool VEC> __global__ void __launch_bounds__(THREADS) spread_rows(struct permute_job p)
{
    int64_t w = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (w < p.x.n) {
        spread_token<T, VEC>(p, w, lane);
        return;
    }
    int64_t first = (w - p.x.n) * 32, mine = first + lane;
    unsigned empty = __ballot_sync(0xffffffffu, mine < p.y.n && p.src[mine] < 0);
    for (; empty != 0; empty &= empty - 1)
        clear_row<T, VEC>(p, first + __ffs(empty) - 1, lane);
}

extern "C" int permute_cuda(struct lane *l, const struct permute_args *a)
{
    TRY(permute_check(a, l->err));
    bool rows = a->x.data != NULL, vec = rows && aligned16(&a->x) && aligned16(&a->y);
    struct permute_job p = {rows_of_tensor(&a->x),
                            rows_of_tensor(&a->y),
                            (const int32_t *)a->src.data,
                            (const int32_t *)a->row.data,
                            (const float *)a->prob.data,
                            (float *)a->yprob.data,
                            a->k,
                            rows ? a->x.dim[1] : 0};
    if (!rows) { /* rows without columns, whose probabilities move */
        p.x.n = a->prob.dim[0];
        p.y.n = a->src.dim[0];
    }
    BY_REAL(rows ? a->x.dtype : DT_F32, T, {
        if (vec)
            p.cols /= pack<T>::N;
        if (p.row != NULL) {
            unsigned blocks = blocks_of_warps(p.x.n + ceil_div(p.y.n, 32));
            if (vec)
                LAUNCH(l, (spread_rows<T, true>), blocks, THREADS, 0, p);
            else
                LAUNCH(l, (spread_rows<T, false>), blocks, THREADS, 0, p);
        } else if (vec) {
            LAUNCH(l, (gather_rows<T, true>), blocks_of_warps(p.y.n), THREADS, 0, p);
        } else {
            LAUNCH(l, (gather_rows<T, false>), blocks_of_warps(p.y.n), THREADS, 0, p);
        }
    });
    return ST_OK;
}

/* ---- back ------------------------------------------------------------------------------------ */

struct unpermute_job {
    struct rows x, base, y;
    const int32_t *row;
    const float *xprob;
    float *yprob;
    int64_t tokens, k, cols, prob_rows;
    bool acc_y;
    int lanes; /* threads that share a token: 32, 64, 128 or 256 */
};

__device__ __forceinline__ int64_t row_or_none(int64_t r, int64_t n) { return r >= 0 && r < n ? r : -1; }

/* DEEP rows of a token from choice j0 on, at N columns: all loads first, then the sums in order. A row that is missing
 * is read as row 0 and not added, so that no load waits for a branch. */
template <typename T, int N>
__device__ __forceinline__ void add_rows(const struct unpermute_job &p, const int row[DEEP], int64_t c, float sum[N])
{
    pack<T> v[DEEP];
#pragma unroll
    for (int j = 0; j < DEEP; j++) {
        const T *x = at_row<T>(p.x, max(row[j], 0)) + c * N;
        if (N == 1)
            v[j].v[0] = *x;
        else
            v[j] = load16(x);
    }
#pragma unroll
    for (int j = 0; j < DEEP; j++)
#pragma unroll
        for (int i = 0; i < N; i++)
            sum[i] += row[j] >= 0 ? to_float(v[j].v[i]) : 0.0f;
}

__device__ __forceinline__ void rows_from(const struct unpermute_job &p, const int32_t *row, int64_t j0, int out[DEEP])
{
#pragma unroll
    for (int j = 0; j < DEEP; j++)
        out[j] = j0 + j < p.k ? (int)row_or_none(row[j0 + j], p.x.n) : -1;
}

/* p.lanes threads for each token; N elements of a thread at a time. */
template <typename T, int N> __global__ void __launch_bounds__(THREADS) combine_rows(struct unpermute_job p)
{
    int64_t t = (int64_t)blockIdx.x * (THREADS / p.lanes) + threadIdx.x / p.lanes;
    if (t >= p.tokens)
        return;
    const int32_t *row = p.row + t * p.k;
    int first[DEEP];
    rows_from(p, row, 0, first);
    for (int64_t c = threadIdx.x % p.lanes; c < p.cols; c += p.lanes) {
        float sum[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            sum[i] = 0;
        if (p.x.n > 0)
            add_rows<T, N>(p, first, c, sum);
        for (int64_t j0 = DEEP; p.x.n > 0 && j0 < p.k; j0 += DEEP) {
            int next[DEEP];
            rows_from(p, row, j0, next);
            add_rows<T, N>(p, next, c, sum);
        }
        T *y = at_row<T>(p.y, t) + c * N;
        const T *base = at_row<T>(p.base, t) + c * N;
        pack<T> b, old, out;
        if (p.base.data != NULL) {
            if (N == 1)
                b.v[0] = base[0];
            else
                b = load16(base);
        }
        if (p.acc_y) {
            if (N == 1)
                old.v[0] = y[0];
            else
                old = load16(y);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            float with_base = (p.base.data != NULL ? to_float(b.v[i]) : 0.0f) + sum[i];
            out.v[i] = from_float<T>((p.acc_y ? to_float(old.v[i]) : 0.0f) + with_base);
        }
        if (N == 1)
            y[0] = out.v[0];
        else
            store16(y, out);
    }
}

__global__ void __launch_bounds__(THREADS) gather_probs(struct unpermute_job p)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.tokens * p.k)
        return;
    int64_t r = row_or_none(p.row[i], p.prob_rows);
    p.yprob[i] = r < 0 ? 0.0f : p.xprob[r];
}

extern "C" int unpermute_cuda(struct lane *l, const struct unpermute_args *a)
{
    TRY(unpermute_check(a, l->err));
    struct unpermute_job p = {rows_of_tensor(&a->x),
                              rows_of_tensor(&a->base),
                              rows_of_tensor(&a->y),
                              (const int32_t *)a->row.data,
                              (const float *)a->xprob.data,
                              (float *)a->yprob.data,
                              a->row.dim[0],
                              a->row.dim[1],
                              0,
                              0,
                              a->acc_y,
                              32};
    if (present(&a->y)) {
        p.cols = a->y.dim[1];
        bool vec = aligned16(&a->x) && aligned16(&a->y) && absent_or_aligned16(&a->base);
        p.cols /= vec ? 16 / (int64_t)dtype_bytes(a->y.dtype) : 1;
        while (p.lanes < THREADS && p.lanes < p.cols)
            p.lanes *= 2;
        unsigned blocks = (unsigned)ceil_div(p.tokens * p.lanes, THREADS);
        BY_REAL(a->y.dtype, T, {
            if (vec)
                LAUNCH(l, (combine_rows<T, pack<T>::N>), blocks, THREADS, 0, p);
            else
                LAUNCH(l, (combine_rows<T, 1>), blocks, THREADS, 0, p);
        });
    }
    if (present(&a->yprob)) {
        p.prob_rows = a->xprob.dim[0];
        LAUNCH(l, gather_probs, (unsigned)ceil_div(p.tokens * p.k, THREADS), THREADS, 0, p);
    }
    return ST_OK;
}
