/* gmm8 on the GPU: launchers, and a plain kernel that decodes tiles to fp32 for what the kernels of gmm8_tma.cu do not
 * take (other GPUs, other blocks, sizes that are no multiples of 128); see gmm8.h. */
#include "ops/cuda/ptx.cuh"
#include "ops/gmm8/gmm8_cuda.cuh"

enum { TILE = 64, DEPTH = 16, THREADS = 256 };

struct codes {
    const uint8_t *code;
    const float *scale;
    int64_t cols, stride;
    int block;
    bool square, e5m2;
};
struct plain {
    struct gmm_job g;
    struct codes a, b;
    bool turned;
};

static struct codes codes_of(const struct tensor *t, const struct tensor *scales, int64_t block, bool square)
{
    struct codes c = {};
    c.code = (const uint8_t *)t->data;
    c.scale = (const float *)scales->data;
    c.cols = t->dim[1];
    c.stride = f8_scale_stride(t->dim[0], t->dim[1], block, square);
    c.block = (int)block;
    c.square = square;
    c.e5m2 = t->dtype == DT_F8_E5M2;
    return c;
}
static __device__ __forceinline__ float decoded(const struct codes &o, int64_t r, int64_t c, bool inside)
{
    if (!inside)
        return 0.0f;
    int64_t at = o.block == 0 ? 0 : o.square ? r / o.block * o.stride + c / o.block : c / o.block * o.stride + r;
    return f8_to_f32(o.code[r * o.cols + c], o.e5m2 ? DT_F8_E5M2 : DT_F8_E4M3) * o.scale[at];
}

/* The tiles of ops/gmm's product in fp32. */
template <typename T, int PRODUCT>
static __global__ void __launch_bounds__(THREADS) decoded_product(const __grid_constant__ struct plain p)
{
    DYNAMIC_SHARED(int, table, 4);
    __shared__ float a_tile[DEPTH][TILE + 4], b_tile[DEPTH][TILE + 4];
    const struct gmm_job &g = p.g;
    struct gmm_table t = gmm_table_make<PRODUCT, TILE, TILE>(g, table);
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    for (int tile = blockIdx.x; tile < t.total; tile += gridDim.x) {
        struct gmm_at at = gmm_find<PRODUCT, TILE, TILE>(g, t, tile);
        int n_valid = min(TILE, g.across - at.n), k_first = PRODUCT == GMM_WEIGHT ? at.k_first : 0;
        int64_t b_row = PRODUCT == GMM_WEIGHT || p.turned ? at.n : (int64_t)at.expert * g.across + at.n,
                b_col = PRODUCT != GMM_WEIGHT && p.turned ? (int64_t)at.expert * g.depth : k_first;
        float acc[4][4] = {};
        for (int k0 = 0; k0 < at.depth; k0 += DEPTH) {
            for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
                int r = i / DEPTH, k = i % DEPTH;
                bool deep = k0 + k < at.depth;
                a_tile[k][r] = decoded(p.a, at.m + r, k_first + k0 + k, deep && r < at.m_valid);
                b_tile[k][r] = decoded(p.b, b_row + r, b_col + k0 + k, deep && r < n_valid);
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < DEPTH; k++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        acc[i][j] += a_tile[k][ty * 4 + i] * b_tile[k][tx * 4 + j];
            __syncthreads();
        }
        for (int i = 0; i < 4 && ty * 4 + i < at.m_valid; i++) {
            int m = at.m + ty * 4 + i;
            float prob = g.prob != NULL ? g.prob[m] : 1.0f;
            for (int j = 0; j < 4 && tx * 4 + j < n_valid; j++) {
                int n = at.n + tx * 4 + j;
                if (PRODUCT == GMM_WEIGHT) {
                    float *c = (float *)g.c + at.expert * g.c_expert + m * g.ldc + n;
                    *c = (g.acc ? *c : 0.0f) + acc[i][j];
                } else {
                    bool biased = g.bias != NULL && at.expert < g.experts;
                    float bias = biased ? prob * g.bias[(int64_t)at.expert * g.across + n] : 0.0f;
                    ((T *)g.c)[m * g.ldc + n] = from_float<T>(acc[i][j] + bias);
                }
            }
        }
    }
}

/* PRODUCT and T are chosen by the caller. */
template <typename T, int PRODUCT> static int plain_launch(struct lane *l, const struct plain *p)
{
    const struct gmm_job *g = &p->g;
    int64_t down =
        PRODUCT == GMM_WEIGHT ? ceil_div(g->down, TILE) * g->experts : ceil_div(g->rows, TILE) + g->experts + 1;
    int64_t tiles = down * ceil_div(g->across, TILE);
    if (g->experts > GMM_MAX_EXPERTS || tiles > INT32_MAX / 2)
        return err_set(l->err, ST_INVALID, "gmm8: %d experts and %lld tiles; a GPU takes at most %d and 2^30",
                       g->experts, (long long)tiles, GMM_MAX_EXPERTS);
    unsigned blocks = (unsigned)min_i64(tiles, 64 * (int64_t)cuda_of(l)->sm_budget);
    LAUNCH(l, (decoded_product<T, PRODUCT>), blocks, THREADS, gmm_table_bytes(g->experts), *p);
    return ST_OK;
}

extern "C" int gmm8_cuda(struct lane *l, const struct gmm8_args *a)
{
    TRY(gmm8_check(a, l->err));
    int64_t n = gmm8_rows(&a->w, &a->offset, a->turned);
    if (a->x.dim[0] == 0 || n == 0)
        return ST_OK;
    bool fits;
    struct gmm8_job p = gmm8_job_of(&a->x, &a->xs, &a->w, &a->ws, &a->offset, a->block, a->square, a->turned, n, &fits);
    struct gmm_job *g = &p.j.g;
    p.j.after = GMM_STORE;
    g->c = a->y.data;
    g->ldc = a->x.dim[0] > 1 ? a->y.stride[0] : n;
    g->bias = (const float *)a->bias.data;
    g->prob = (const float *)a->prob.data;
    if (fits && a->y.dtype == DT_BF16 && aligned16(&a->y) && gmm8_tma_fits(l, &p))
        return gmm8_tma(l, &p);
    struct plain plain = {};
    plain.g = *g;
    plain.a = codes_of(&a->x, &a->xs, a->block, false);
    plain.b = codes_of(&a->w, &a->ws, a->block, a->square);
    plain.turned = a->turned;
    int st = ST_OK;
    BY_REAL(a->y.dtype, T, st = (plain_launch<T, GMM_FORWARD>(l, &plain)));
    return st;
}

extern "C" int gmm8_dw_cuda(struct lane *l, const struct gmm8_dw_args *a)
{
    TRY(gmm8_dw_check(a, l->err));
    int64_t rows = a->dyt.dim[1], out = a->dyt.dim[0], in = a->xt.dim[0];
    if (out == 0 || in == 0)
        return ST_OK;
    struct gmm8_job p = {};
    struct gmm_job *g = &p.j.g;
    p.j.after = GMM_SUMS;
    p.a_type = a->dyt.dtype;
    p.as = (const float *)a->dyts.data;
    p.bs = (const float *)a->xts.data;
    if (a->block == 128) {
        p.as_row = p.bs_k = 1;
        p.as_stride = f8_scale_stride(out, rows, a->block, false);
        p.bs_stride = f8_scale_stride(in, rows, a->block, false);
    }
    g->a = a->dyt.data;
    g->b = a->xt.data;
    g->c = a->dw.data;
    g->lda = g->ldb = rows;
    g->ldc = in;
    g->c_expert = out * in;
    g->offset = (const int32_t *)a->offset.data;
    g->experts = (int)(a->offset.dim[0] - 1);
    g->rows = (int)rows;
    g->down = (int)out;
    g->across = (int)in;
    g->acc = a->acc_dw;
    bool aligned = aligned16(&a->dw) && ((uintptr_t)a->dyt.data | (uintptr_t)a->xt.data) % 16 == 0;
    if (aligned && (a->block == 128 || a->block == 0) && gmm8_tma_fits(l, &p))
        return gmm8_tma(l, &p);
    struct plain plain = {};
    plain.g = *g;
    plain.a = codes_of(&a->dyt, &a->dyts, a->block, false);
    plain.b = codes_of(&a->xt, &a->xts, a->block, false);
    return plain_launch<float, GMM_WEIGHT>(l, &plain);
}
