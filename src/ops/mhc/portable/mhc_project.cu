/* Products of the streams with small fp32 matrices: the projection p = x w^T, its gradient, and dw = dp^T x.
 *
 * bf16 streams meet the matrix as two bf16 halves (high + low), so that the library's tensor-core products give it 16
 * bits of fraction; the boundary and all weight gradients go this way. The primitives have one form for Hopper, which
 * splits up to 24 rows of w on the way (mhc_project_ring.cu; dx and dw together in mhc_project_back.cu), and one for
 * all else, below. */
#include "ops/mhc/portable/mhc_cuda.cuh"
#include "ops/gemm/gemm.h"

INLINE bf16 high_half(float v) { return __float2bfloat16_rn(v); }
INLINE bf16 low_half(float v) { return __float2bfloat16_rn(v - __bfloat162float(__float2bfloat16_rn(v))); }

/* ---- halves ---------------------------------------------------------------------------------- */

static __global__ void split_matrix(const float *w, int64_t stride, int64_t n, int64_t k, bf16 *out, int64_t padded,
                                    int64_t out_stride, int parts)
{
    int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (c >= k)
        return;
    float v = row < n ? w[row * stride + c] : 0.0f;
    for (int part = 0; part < parts; part++)
        out[(part * padded + row) * out_stride + c] = part == parts - 1 ? low_half(v) : high_half(v);
}

int mhc_split_matrix(struct lane *l, const struct tensor *w, bf16 *out, int parts)
{
    int64_t n = w->dim[0], k = w->dim[1], padded = split_rows(n);
    LAUNCH(l, split_matrix, dim3((unsigned)ceil_div(k, 256), (unsigned)padded), 256, 0, floats(w), w->stride[0], n, k,
           out, padded, split_stride(k), parts);
    return ST_OK;
}

/* ---- dw -------------------------------------------------------------------------------------- */

/* dp of one row and logit: as given, or from dz. */
INLINE float dp_of(const struct outer_args &a, int64_t row, int64_t i)
{
    float v = number_at(a.dp, row, i);
    if (a.rho.data != NULL)
        v *= *a.alpha[i < a.streams ? 0 : i < 2 * a.streams ? 1 : 2] / (number_at(a.rho, row, 0) + (float)MHC_EPS);
    return v;
}

/* T bf16: [rows, 2 padded], high | low; float: [rows, padded]. */
template <typename T>
static __global__ void write_dp(const __grid_constant__ struct outer_args a, int64_t rows, int64_t n, int64_t padded,
                                T *out)
{
    int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = index / padded, i = index % padded;
    if (row >= rows)
        return;
    float v = i < n ? dp_of(a, row, i) : 0.0f;
    if constexpr (sizeof(T) == 2) {
        out[row * 2 * padded + i] = high_half(v);
        out[row * 2 * padded + padded + i] = low_half(v);
    } else {
        out[row * padded + i] = v;
    }
}

static __global__ void add_halves(const float *sums, int64_t padded, int64_t sums_stride, float *dw, int64_t stride,
                                  int64_t k, bool acc)
{
    int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y;
    if (c >= k)
        return;
    float v = sums[i * sums_stride + c] + sums[(padded + i) * sums_stride + c];
    dw[i * stride + c] = (acc ? dw[i * stride + c] : 0.0f) + v;
}

int64_t mhc_outer_bytes(int64_t rows, int64_t n, int64_t k, enum dtype real)
{
    struct carve c = {};
    int64_t padded = split_rows(n);
    carve_bytes(&c, rows * padded * 4); /* two halves, or one float */
    if (real == DT_BF16)
        carve_bytes(&c, 2 * padded * split_stride(k) * 4);
    return c.used;
}

static struct tensor strided_2d(void *data, enum dtype t, int64_t rows, int64_t cols, int64_t stride)
{
    struct tensor v = tensor_2d(data, t, rows, cols);
    v.stride[0] = stride;
    return v;
}

int mhc_outer(struct lane *l, const struct outer_args *a, void *work)
{
    int64_t rows = a->y.dim[0], n = a->dw.dim[0], k = a->y.dim[1], padded = split_rows(n), stride = split_stride(k);
    struct carve c = {(char *)work, 0};
    void *dp = carve_bytes(&c, rows * padded * 4);
    unsigned grid = (unsigned)ceil_div(rows * padded, 256);
    struct gemm_args g = {.b = a->y, .trans_a = true, .alpha = 1};
    if (a->y.dtype != DT_BF16) {
        LAUNCH(l, write_dp<float>, grid, 256, 0, *a, rows, n, padded, (float *)dp);
        g.a = strided_2d(dp, DT_F32, rows, n, padded);
        g.c = a->dw;
        g.acc_c = a->acc;
        return gemm_cuda(l, &g);
    }
    float *sums = carve_floats(&c, 2 * padded * stride);
    LAUNCH(l, write_dp<bf16>, grid, 256, 0, *a, rows, n, padded, (bf16 *)dp);
    g.a = tensor_2d(dp, DT_BF16, rows, 2 * padded);
    g.c = strided_2d(sums, DT_F32, 2 * padded, k, stride);
    TRY(gemm_cuda(l, &g));
    LAUNCH(l, add_halves, dim3((unsigned)ceil_div(k, 256), (unsigned)n), 256, 0, sums, padded, stride, floats(&a->dw),
           a->dw.stride[0], k, a->acc);
    return ST_OK;
}

/* ---- Hopper's passes for bf16: mhc_project_ring.cu, mhc_project_back.cu */
bool mhc_project_back_can(const struct lane *l, const struct mhc_project_bwd_args *b);
int64_t mhc_project_back_bytes(const struct mhc_project_bwd_args *b);
int mhc_project_back(struct lane *l, const struct mhc_project_bwd_args *b);
bool mhc_project_rings(const struct lane *l, const struct mhc_project_fwd_args *b);
int mhc_project_ring(struct lane *l, const struct mhc_project_fwd_args *b);

/* ---- primitives ------------------------------------------------------------------------------ */

/* A warp per output; output n is rho. */
template <typename T>
static __global__ void __launch_bounds__(256)
    project_rows(struct view x_rows, struct view w, struct view p, struct view rho, int64_t n, int64_t k,
                 float root_eps, float root_less)
{
    int64_t row = blockIdx.x, i = (int64_t)blockIdx.y * 8 + threadIdx.x / 32;
    if (i > n)
        return;
    const T *x = at<T>(x_rows, row);
    float sum = 0;
    if (i < n) {
        const float *by = at<float>(w, i);
        for (int64_t c = threadIdx.x % 32; c < k; c += 32)
            sum += to_float(x[c]) * by[c];
    } else {
        for (int64_t c = threadIdx.x % 32; c < k; c += 32)
            sum += to_float(x[c]) * to_float(x[c]);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 != 0)
        return;
    if (i < n)
        at<float>(p, row)[i] = sum;
    else
        *at<float>(rho, row) = sqrtf(sum / (float)max(k, (int64_t)1) + root_eps) - root_less;
}

extern "C" int mhc_project_fwd_cuda(struct lane *l, const struct mhc_project_fwd_args *a)
{
    TRY(mhc_project_fwd_check(a, l->err));
    int64_t n = a->w.dim[0], k = a->x.dim[1];
    if (mhc_project_rings(l, a))
        return mhc_project_ring(l, a);
    BY_REAL(a->x.dtype, T,
            LAUNCH(l, project_rows<T>, dim3((unsigned)a->x.dim[0], (unsigned)ceil_div(n + 1, 8)), 256, 0,
                   view_of(&a->x), view_of(&a->w), view_of(&a->p), view_of(&a->rho), n, k, (float)a->root_eps,
                   (float)mhc_root_less(a->root_eps)));
    return ST_OK;
}

struct project_bwd {
    struct view dp, drho, x, w, rho, dx;
    int64_t rows, n, k;
    bool acc;
    float root_less;
};
enum { DX_ROWS = 8 }; /* of a block, for which a number of w is read once */
template <typename T>
static __global__ void __launch_bounds__(256) project_dx(const __grid_constant__ struct project_bwd a)
{
    int64_t first = (int64_t)blockIdx.x * DX_ROWS, c = (int64_t)blockIdx.y * 256 + threadIdx.x;
    if (c >= a.k)
        return;
    float sum[DX_ROWS];
    UNROLLED (r, DX_ROWS) {
        int64_t row = min(first + r, a.rows - 1);
        float root = *at<float>(a.rho, row) + a.root_less;
        sum[r] = (root == 0 ? 0.0f : *at<float>(a.drho, row) / ((float)a.k * root)) * to_float(at<T>(a.x, row)[c]);
    }
    for (int64_t i = 0; i < a.n; i++) {
        float w = at<float>(a.w, i)[c];
        UNROLLED (r, DX_ROWS)
            sum[r] += at<float>(a.dp, min(first + r, a.rows - 1))[i] * w;
    }
    UNROLLED (r, DX_ROWS) {
        T *dx = at<T>(a.dx, min(first + r, a.rows - 1)) + c;
        if (first + r < a.rows)
            *dx = from_float<T>((a.acc ? to_float(*dx) : 0.0f) + sum[r]);
    }
}

extern "C" int64_t mhc_project_bwd_work_cuda(const struct mhc_project_bwd_args *a)
{
    return a->dw.rank == 0
               ? 0
               : max_i64(mhc_outer_bytes(a->x.dim[0], a->w.dim[0], a->x.dim[1], a->x.dtype), mhc_project_back_bytes(a));
}

extern "C" int mhc_project_bwd_cuda(struct lane *l, const struct mhc_project_bwd_args *p)
{
    TRY(mhc_project_bwd_check(p, l->err));
    TRY(check_work("mhc_project_bwd", &p->work, mhc_project_bwd_work_cuda(p), l->err));
    struct project_bwd a = {view_of(&p->dp), view_of(&p->drho), view_of(&p->x), view_of(&p->w), view_of(&p->rho),
                            view_of(&p->dx), p->x.dim[0],       p->w.dim[0],    p->x.dim[1],    p->acc_dx};
    a.root_less = (float)mhc_root_less(p->root_eps);
    if (mhc_project_back_can(l, p))
        return mhc_project_back(l, p);
    BY_REAL(
        p->x.dtype, T,
        LAUNCH(l, project_dx<T>, dim3((unsigned)ceil_div(a.rows, DX_ROWS), (unsigned)ceil_div(a.k, 256)), 256, 0, a));
    if (!present(&p->dw))
        return ST_OK;
    struct outer_args o = {.dp = view_of(&p->dp), .y = p->x, .dw = p->dw, .acc = p->acc_dw};
    return mhc_outer(l, &o, p->work.data);
}
