/* gmm on the GPU: launchers, the product without tensor cores, gradients of bias and probability. bf16 in whole vectors
 * goes to gmm_tma.cu or gmm_mma.cu; fp32, which must be exact, and odd shapes are computed here. */
#include "ops/gmm/gmm_tma.cuh"
#include "ops/gmm/gmm.h"

/* ---- products in fp32 ------------------------------------------------------------------------ */

enum { TILE = 64, DEPTH = 16, THREADS = 256 };

/* One element of an operand, by its place in the product; zero outside. */
template <typename T>
__device__ __forceinline__ float operand(const T *base, int64_t along, int64_t across, int i, int k, bool inside)
{
    return inside ? to_float(base[i * along + k * across]) : 0.0f;
}

/* A tile of TILE x TILE by THREADS threads, 4 x 4 each; operands pass through shared memory DEPTH at a time. */
template <typename T, int PRODUCT> __global__ void __launch_bounds__(THREADS) fma_product(struct gmm_job p)
{
    DYNAMIC_SHARED(int, table, 4);
    __shared__ float a_tile[DEPTH][TILE + 4], b_tile[DEPTH][TILE + 4];
    struct gmm_table t = gmm_table_make<PRODUCT, TILE, TILE>(p, table);
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    for (int tile = blockIdx.x; tile < t.total; tile += gridDim.x) {
        struct gmm_at at = gmm_find<PRODUCT, TILE, TILE>(p, t, tile);
        int n_valid = min(TILE, p.across - at.n);
        const T *a = (const T *)p.a, *b = (const T *)p.b + (at.expert < p.experts ? at.expert * p.b_expert : 0);
        int64_t a_m = PRODUCT == GMM_WEIGHT ? 1 : p.lda, a_k = PRODUCT == GMM_WEIGHT ? p.lda : 1;
        int64_t b_n = PRODUCT == GMM_FORWARD ? p.ldb : 1, b_k = PRODUCT == GMM_FORWARD ? 1 : p.ldb;
        a += at.m * a_m + at.k_first * a_k;
        b += at.n * b_n + (PRODUCT == GMM_WEIGHT ? at.k_first * b_k : 0);
        float acc[4][4] = {};
        for (int k0 = 0; k0 < at.depth; k0 += DEPTH) {
            for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
                /* Neighbouring threads read neighbouring addresses. */
                int am = PRODUCT == GMM_WEIGHT ? i % TILE : i / DEPTH,
                    ak = PRODUCT == GMM_WEIGHT ? i / TILE : i % DEPTH;
                int bn = PRODUCT == GMM_FORWARD ? i / DEPTH : i % TILE,
                    bk = PRODUCT == GMM_FORWARD ? i % DEPTH : i / TILE;
                a_tile[ak][am] = operand(a, a_m, a_k, am, k0 + ak, am < at.m_valid && k0 + ak < at.depth);
                b_tile[bk][bn] = operand(b, b_n, b_k, bn, k0 + bk, bn < n_valid && k0 + bk < at.depth);
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < DEPTH; k++) {
                float av[4], bv[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    av[i] = a_tile[k][ty * 4 + i];
                    bv[i] = b_tile[k][tx * 4 + i];
                }
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        acc[i][j] += av[i] * bv[j];
            }
            __syncthreads();
        }
        for (int i = 0; i < 4 && ty * 4 + i < at.m_valid; i++) {
            int m = at.m + ty * 4 + i;
            float prob = PRODUCT == GMM_FORWARD && p.prob != NULL ? p.prob[m] : 1.0f;
            for (int j = 0; j < 4 && tx * 4 + j < n_valid; j++) {
                int n = at.n + tx * 4 + j;
                if (PRODUCT == GMM_WEIGHT) {
                    float *c = (float *)p.c + at.expert * p.c_expert + m * p.ldc + n;
                    *c = (p.acc ? *c : 0.0f) + acc[i][j];
                } else {
                    bool biased = PRODUCT == GMM_FORWARD && p.bias != NULL && at.expert < p.experts;
                    float bias = biased ? prob * p.bias[(int64_t)at.expert * p.across + n] : 0.0f;
                    ((T *)p.c)[m * p.ldc + n] = from_float<T>(acc[i][j] + bias);
                }
            }
        }
    }
}

template <typename T> static int fma_launch(struct lane *l, const struct gmm_job *p, enum gmm_product product)
{
    int64_t down =
        product == GMM_WEIGHT ? ceil_div(p->down, TILE) * p->experts : ceil_div(p->rows, TILE) + p->experts + 1;
    int64_t blocks = min_i64(down * ceil_div(p->across, TILE), 64 * (int64_t)cuda_of(l)->sm_budget);
    size_t shared = gmm_table_bytes(p->experts);
    if (product == GMM_FORWARD)
        LAUNCH(l, (fma_product<T, GMM_FORWARD>), (unsigned)blocks, THREADS, shared, *p);
    else if (product == GMM_INPUT)
        LAUNCH(l, (fma_product<T, GMM_INPUT>), (unsigned)blocks, THREADS, shared, *p);
    else
        LAUNCH(l, (fma_product<T, GMM_WEIGHT>), (unsigned)blocks, THREADS, shared, *p);
    return ST_OK;
}

static int check_sizes(struct lane *l, const char *op, int64_t experts, int64_t rows, int64_t in, int64_t out)
{
    int64_t tiles = (ceil_div(rows, TILE) + experts + 1) * ceil_div(max_i64(in, out), TILE),
            weights = experts * ceil_div(in, TILE) * ceil_div(out, TILE);
    if (experts <= GMM_MAX_EXPERTS && max_i64(rows, max_i64(in, out)) <= INT32_MAX / 2 &&
        max_i64(tiles, weights) <= INT32_MAX / 2)
        return ST_OK;
    return err_set(l->err, ST_INVALID,
                   "%s: %lld experts of %lld x %lld with %lld rows; a GPU takes at most %d experts and 2^30 tiles", op,
                   (long long)experts, (long long)out, (long long)in, (long long)rows, GMM_MAX_EXPERTS);
}

static int tensor_cores(struct lane *l, const struct gmm_job *p, enum gmm_product product)
{
    struct gmm_tma_job j = {};
    j.g = *p;
    j.after = product == GMM_WEIGHT ? GMM_SUMS : GMM_STORE;
    int64_t down =
        product == GMM_WEIGHT ? ceil_div(p->down, GMM_FORM_ROWS) * p->experts : ceil_div(p->rows, GMM_FORM_ROWS);
    bool fills = cuda_of(l)->want.large_tiles || gmm_form_fills(down, p->across, cuda_of(l)->sm_count);
    return fills && gmm_tma_fits(l, &j) ? gmm_tma(l, &j, product) : gmm_mma(l, p, product);
}

static int product_launch(struct lane *l, const struct gmm_job *p, enum gmm_product product, enum dtype real,
                          bool vectors)
{
    if (p->across == 0 || (product == GMM_WEIGHT ? p->down : p->rows) == 0)
        return ST_OK;
    if (real == DT_BF16 && vectors)
        return tensor_cores(l, p, product);
    int st = ST_OK;
    BY_REAL(real, T, st = fma_launch<T>(l, p, product));
    return st;
}

extern "C" int gmm_fwd_cuda(struct lane *l, const struct gmm_fwd_args *a)
{
    TRY(gmm_fwd_check(a, l->err));
    int64_t experts = a->w.dim[0], out = a->w.dim[1], in = a->w.dim[2];
    TRY(check_sizes(l, "gmm_fwd", experts, a->x.dim[0], in, out));
    struct gmm_job p = {};
    p.a = a->x.data;
    p.b = a->w.data;
    p.c = a->y.data;
    p.lda = a->x.stride[0];
    p.ldb = in;
    p.ldc = a->y.stride[0];
    p.b_expert = out * in;
    p.bias = (const float *)a->bias.data;
    p.prob = (const float *)a->prob.data;
    p.offset = (const int32_t *)a->offset.data;
    p.rows = (int)a->x.dim[0];
    p.experts = (int)experts;
    p.across = (int)out;
    p.depth = (int)in;
    return product_launch(l, &p, GMM_FORWARD, a->x.dtype, aligned16(&a->x) && aligned16(&a->w) && aligned16(&a->y));
}

/* ---- gradients of bias and probability ------------------------------------------------------- */

struct side_job {
    const void *dy;
    const float *bias, *prob;
    const int32_t *offset;
    float *dbias, *dprob;
    int64_t stride, rows, out;
    int experts;
    bool acc;
};

enum { COLUMN_WARPS = THREADS / 32 };

/* 32 columns of one expert: each warp takes every eighth row, and the warps' sums are added in order. */
template <typename T> __global__ void __launch_bounds__(THREADS) bias_gradient(struct side_job p)
{
    __shared__ float part[COLUMN_WARPS][32];
    int64_t chunks = (p.out + 31) / 32, e = blockIdx.x / chunks, c = blockIdx.x % chunks * 32 + threadIdx.x % 32;
    int warp = threadIdx.x / 32;
    int64_t first = min(max((int64_t)p.offset[e], (int64_t)0), p.rows), end = min((int64_t)p.offset[e + 1], p.rows);
    float sum = 0;
    if (c < p.out) {
#pragma unroll 8
        for (int64_t r = first + warp; r < end; r += COLUMN_WARPS)
            sum += (p.prob != NULL ? p.prob[r] : 1.0f) * to_float(((const T *)p.dy)[r * p.stride + c]);
    }
    part[warp][threadIdx.x % 32] = sum;
    __syncthreads();
    if (warp > 0 || c >= p.out)
        return;
    for (int w = 1; w < COLUMN_WARPS; w++)
        sum += part[w][threadIdx.x];
    float *dbias = p.dbias + e * p.out + c;
    *dbias = (p.acc ? *dbias : 0.0f) + sum;
}

/* The same in vectors of 16 bytes: eight lanes take eight of them, of every 32nd row; then the 32 sums of a column are
 * added in order. */
template <typename T> __global__ void __launch_bounds__(THREADS) bias_gradient_vectors(struct side_job p)
{
    constexpr int N = pack<T>::N, WIDTH = 8 * N, AT_ONCE = THREADS / 8;
    __shared__ float part[AT_ONCE][WIDTH + 4];
    int64_t chunks = (p.out + WIDTH - 1) / WIDTH, e = blockIdx.x / chunks, c0 = blockIdx.x % chunks * WIDTH;
    int lane = threadIdx.x % 8, row = threadIdx.x / 8;
    int64_t first = min(max((int64_t)p.offset[e], (int64_t)0), p.rows), end = min((int64_t)p.offset[e + 1], p.rows),
            c = c0 + lane * N;
    float sum[N] = {};
    if (c < p.out) {
        const T *dy = (const T *)p.dy + c;
#pragma unroll 4
        for (int64_t r = first + row; r < end; r += AT_ONCE) {
            float v[N], factor = p.prob != NULL ? p.prob[r] : 1.0f;
            unpack<T>(load_raw(dy + r * p.stride), v);
#pragma unroll
            for (int i = 0; i < N; i++)
                sum[i] += factor * v[i];
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        part[row][lane * N + i] = sum[i];
    __syncthreads();
    if (threadIdx.x >= WIDTH || c0 + threadIdx.x >= p.out)
        return;
    float all = 0;
    for (int r = 0; r < AT_ONCE; r++)
        all += part[r][threadIdx.x];
    float *dbias = p.dbias + e * p.out + c0 + threadIdx.x;
    *dbias = (p.acc ? *dbias : 0.0f) + all;
}

/* A warp for each row. */
template <typename T> __global__ void __launch_bounds__(THREADS) prob_gradient(struct side_job p)
{
    int64_t r = (int64_t)blockIdx.x * COLUMN_WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32, low = 0, high = p.experts;
    if (r >= p.rows)
        return;
    while (low < high) { /* the first expert that ends after r */
        int middle = (low + high) / 2;
        if (p.offset[middle + 1] <= r)
            low = middle + 1;
        else
            high = middle;
    }
    float sum = 0;
    if (low < p.experts) {
        const T *dy = (const T *)p.dy + r * p.stride;
        const float *bias = p.bias + low * p.out;
#pragma unroll 4
        for (int64_t c = lane; c < p.out; c += 32)
            sum += to_float(dy[c]) * bias[c];
    }
    sum = warp_sum(sum);
    if (lane == 0 && (low < p.experts || !p.acc))
        p.dprob[r] = (p.acc ? p.dprob[r] : 0.0f) + sum;
}

static int side_gradients(struct lane *l, const struct gmm_bwd_args *a)
{
    struct side_job p = {a->dy.data,
                         (const float *)a->bias.data,
                         (const float *)a->prob.data,
                         (const int32_t *)a->offset.data,
                         (float *)a->dbias.data,
                         (float *)a->dprob.data,
                         a->dy.stride[0],
                         a->dy.dim[0],
                         a->dy.dim[1],
                         (int)(a->offset.dim[0] - 1),
                         false};
    BY_REAL(a->dy.dtype, T, {
        if (present(&a->dbias)) {
            p.acc = a->acc_dbias;
            if (aligned16(&a->dy))
                LAUNCH(l, bias_gradient_vectors<T>, (unsigned)(p.experts * ceil_div(p.out, 8 * pack<T>::N)), THREADS, 0,
                       p);
            else
                LAUNCH(l, bias_gradient<T>, (unsigned)(p.experts * ceil_div(p.out, 32)), THREADS, 0, p);
        }
        if (present(&a->dprob)) {
            p.acc = a->acc_dprob;
            LAUNCH(l, prob_gradient<T>, (unsigned)ceil_div(p.rows, COLUMN_WARPS), THREADS, 0, p);
        }
    });
    return ST_OK;
}

static int input_gradient(struct lane *l, const struct gmm_bwd_args *a)
{
    int64_t in = a->w.dim[2], out = a->dy.dim[1];
    struct gmm_job p = {};
    p.a = a->dy.data;
    p.b = a->w.data;
    p.c = a->dx.data;
    p.lda = a->dy.stride[0];
    p.ldb = in;
    p.ldc = a->dx.stride[0];
    p.b_expert = out * in;
    p.offset = (const int32_t *)a->offset.data;
    p.rows = (int)a->dy.dim[0];
    p.experts = (int)(a->offset.dim[0] - 1);
    p.across = (int)in;
    p.depth = (int)out;
    return product_launch(l, &p, GMM_INPUT, a->dy.dtype, aligned16(&a->dy) && aligned16(&a->w) && aligned16(&a->dx));
}

static int weight_gradient(struct lane *l, const struct gmm_bwd_args *a)
{
    int64_t in = a->x.dim[1], out = a->dy.dim[1];
    struct gmm_job p = {};
    p.a = a->dy.data;
    p.b = a->x.data;
    p.c = a->dw.data;
    p.lda = a->dy.stride[0];
    p.ldb = a->x.stride[0];
    p.ldc = in;
    p.c_expert = out * in;
    p.offset = (const int32_t *)a->offset.data;
    p.rows = (int)a->dy.dim[0];
    p.experts = (int)(a->offset.dim[0] - 1);
    p.down = (int)out;
    p.across = (int)in;
    p.acc = a->acc_dw;
    return product_launch(l, &p, GMM_WEIGHT, a->dy.dtype, aligned16(&a->dy) && aligned16(&a->x) && aligned16(&a->dw));
}

extern "C" int gmm_bwd_cuda(struct lane *l, const struct gmm_bwd_args *a)
{
    TRY(gmm_bwd_check(a, l->err));
    int64_t in = present(&a->dx) ? a->w.dim[2] : present(&a->dw) ? a->x.dim[1] : 0;
    TRY(check_sizes(l, "gmm_bwd", a->offset.dim[0] - 1, a->dy.dim[0], in, a->dy.dim[1]));
    if (present(&a->dx))
        TRY(input_gradient(l, a));
    if (present(&a->dw))
        TRY(weight_gradient(l, a));
    return side_gradients(l, a);
}
