/* The boundary that enters a model: one stream x becomes n equal ones, and nothing is closed; see mhc.h. What the
 * general way does with n streams is done with one: their projection is that of x by the sum of w over streams, their
 * root mean square is that of x, and every stream has the same product with a gradient. So x is read where n streams
 * would be, and only y and its gradient have n. */
#include "ops/mhc/portable/mhc_cuda.cuh"

enum { WARPS = MHC_THREADS / 32 };

/* ---- w over streams, and back ---------------------------------------------------------------- */

/* sum[i][c] = sum over streams of w[i][stream d + c] */
static __global__ void add_parts(const float *w, int64_t stride, int n, int64_t d, float *sum)
{
    int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y;
    if (c >= d)
        return;
    float v = 0;
    for (int s = 0; s < n; s++)
        v += w[i * stride + s * d + c];
    sum[i * d + c] = v;
}
static __global__ void copy_parts(const float *sum, int n, int64_t d, float *out, int64_t stride)
{
    int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y;
    for (int s = 0; c < d && s < n; s++)
        out[i * stride + s * d + c] = sum[i * d + c];
}
static dim3 parts_grid(int64_t logits, int64_t d) { return dim3((unsigned)ceil_div(d, 256), (unsigned)logits); }

static int sum_of_parts(struct lane *l, const struct tensor *w, int64_t n, float *sum)
{
    int64_t d = w->dim[1] / n;
    LAUNCH(l, add_parts, parts_grid(w->dim[0], d), 256, 0, floats(w), w->stride[0], (int)n, d, sum);
    return ST_OK;
}

/* ---- forward --------------------------------------------------------------------------------- */

/* sum over streams of pre_i v, in the order in which the norm of a stream is recomputed (mhc_mix.cu). */
template <int N, int VEC> INLINE void weigh(const float *pre, int n, const float (&v)[VEC], float (&out)[VEC])
{
    UNROLLED (e, VEC)
        out[e] = 0;
    UNROLLED (i, n)
        UNROLLED (e, VEC)
            out[e] = fmaf(pre[i], v[e], out[e]);
}

int64_t mhc_first_fwd_bytes(const struct mhc_boundary_fwd_args *b)
{
    struct carve c = {};
    carve_floats(&c, mhc_logits(b->rule.streams) * b->x.dim[1]);
    return c.used;
}

static int make_coefficients(struct lane *l, const struct mhc_boundary_fwd_args *b, float *sum)
{
    int64_t n = b->rule.streams, logits = mhc_logits(n);
    struct mhc_project_fwd_args project = {.x = b->x,
                                           .w = tensor_2d(sum, DT_F32, logits, b->x.dim[1]),
                                           .p = tensor_cols(&b->stat, 0, logits),
                                           .rho = tensor_cols(&b->stat, logits, 1),
                                           .root_eps = b->rule.root_eps};
    struct coef_args a = mhc_boundary_coef(b);
    TRY(sum_of_parts(l, &b->w, n, sum));
    TRY(mhc_project_fwd_cuda(l, &project));
    return mhc_coefficients(l, &a);
}

int mhc_first_fwd(struct lane *l, const struct mhc_boundary_fwd_args *b)
{
    struct mhc_expand_fwd_args expand = {.x = b->x, .y = b->y};
    struct aggregate_args a = {.x = view_of(&b->x),
                               .out = view_of(&b->h),
                               .rstd = view_at(&b->stat, mhc_logits(b->rule.streams) + 1),
                               .weight = {.pre = view_of(&b->coef)},
                               .rows = b->x.dim[0],
                               .d = b->x.dim[1],
                               .norm = norm_of(b),
                               .eps = (float)b->eps,
                               .n = (int)b->rule.streams,
                               .normed = true,
                               .equal = true};
    TRY(make_coefficients(l, b, floats(&b->work)));
    TRY(mhc_expand_fwd_cuda(l, &expand));
    return mhc_aggregate_rows(l, &a, b->x.dtype,
                              b->rule.kernels != MHC_KERNELS_REF && aligned16(&b->x) && aligned16(&b->h) &&
                                  pointer16(a.norm.gain));
}

/* ---- backward -------------------------------------------------------------------------------- */

struct first_bwd_args {
    struct view dh, x, dy, dx; /* dy may be absent; dx holds what came through the projection */
    struct view pre, rstd, rho;
    float *dpre, *m, *rho_out, *dgain; /* [rows, n]; [rows]; rho without gaps; partial sums [blocks, d] or NULL */
    int64_t rows, rows_per_block, d;
    struct norm_args norm;
    int n;
};

/* m and dpre of every row, as norm_bwd_rows (mhc_mix_bwd.cu) makes them, but with one product for all streams. */
template <typename T, int N, int VEC>
static __global__ void __launch_bounds__(MHC_THREADS) first_dots(const __grid_constant__ struct first_bwd_args a)
{
    constexpr int MAX = streams<N>::MAX, GROUP = 32;
    __shared__ float sums[GROUP][WARPS][2]; /* <x, u>, <x, a> */
    int n = streams<N>::count(a.n), warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32,
        warps = (int)blockDim.x / 32;
    int64_t mine = (int64_t)threadIdx.x * VEC, first = blockIdx.x * a.rows_per_block,
            end = min(first + a.rows_per_block, a.rows);
    float dgain[VEC] = {}; /* of this thread's first channels; of others in memory */
    for (int64_t start = first; start < end; start += GROUP) {
        int count = (int)min(end - start, (int64_t)GROUP);
#pragma unroll 4
        for (int r = 0; r < count; r++) {
            int64_t row = start + r;
            const T *x = at<T>(a.x, row), *dh = at<T>(a.dh, row);
            float rstd = number_at(a.rstd, row, 0), with_u = 0, with_a = 0, pre[MAX];
            UNROLLED (i, n)
                pre[i] = number_at(a.pre, row, i);
            for (int64_t c = mine; c < a.d; c += (int64_t)blockDim.x * VEC) {
                float v[VEC], u[VEC], sum[VEC], gain[VEC];
                load_floats(x + c, v);
                load_floats(dh + c, u);
                load_gain(a.norm, c, gain);
                weigh<N>(pre, n, v, sum);
                UNROLLED (e, VEC) {
                    float dg = u[e] * sum[e] * rstd;
                    if (c == mine)
                        dgain[e] += dg;
                    else if (a.dgain != NULL)
                        a.dgain[blockIdx.x * a.d + c + e] =
                            (row == first ? 0.0f : a.dgain[blockIdx.x * a.d + c + e]) + dg;
                    with_u += v[e] * u[e] * gain[e];
                    with_a += v[e] * sum[e];
                }
            }
            with_u = warp_sum(with_u);
            with_a = warp_sum(with_a);
            if (lane == 0) {
                sums[r][warp][0] = with_u;
                sums[r][warp][1] = with_a;
            }
        }
        __syncthreads();
        if ((int)threadIdx.x < count) {
            int r = (int)threadIdx.x;
            int64_t row = start + r;
            float rstd = number_at(a.rstd, row, 0), with_u = 0, with_a = 0, dot = 0;
            for (int w = 0; w < warps; w++) {
                with_u += sums[r][w][0];
                with_a += sums[r][w][1];
            }
            for (int i = 0; i < n; i++)
                dot += number_at(a.pre, row, i) * with_u;
            float m = rstd * rstd * dot / (float)max(a.d, (int64_t)1);
            a.m[row] = m;
            a.rho_out[row] = number_at(a.rho, row, 0);
            for (int i = 0; i < n; i++)
                a.dpre[row * n + i] = rstd * (with_u - m * with_a);
        }
        __syncthreads();
    }
    if (a.dgain != NULL && mine < a.d)
        store_floats(a.dgain + blockIdx.x * a.d + mine, dgain);
}

/* dx += sum over streams of dy_i + pre_i da */
template <typename T, int N, int VEC>
static __global__ void __launch_bounds__(MHC_THREADS) first_dx(const __grid_constant__ struct first_bwd_args a)
{
    int64_t row = blockIdx.x;
    int n = streams<N>::count(a.n);
    const T *dy = a.dy.data == NULL ? NULL : at<T>(a.dy, row);
    float pre[streams<N>::MAX], all = 0, rstd = number_at(a.rstd, row, 0), m = a.m[row];
    UNROLLED (i, n) {
        pre[i] = number_at(a.pre, row, i);
        all += pre[i];
    }
    for (int64_t c = (int64_t)threadIdx.x * VEC; c < a.d; c += (int64_t)blockDim.x * VEC) {
        packed in[streams<N>::MAX] = {};
        float v[VEC], u[VEC], out[VEC], sum[VEC], gain[VEC];
        if (dy != NULL)
            UNROLLED (i, n)
                in[i] = load_packed<T, VEC>(dy + i * a.d + c);
        load_floats(at<T>(a.x, row) + c, v);
        load_floats(at<T>(a.dh, row) + c, u);
        load_floats(at<T>(a.dx, row) + c, out);
        load_gain(a.norm, c, gain);
        weigh<N>(pre, n, v, sum);
        UNROLLED (e, VEC)
            out[e] += all * rstd * (u[e] * gain[e] - sum[e] * m);
        UNROLLED (i, n) {
            unpack_to<T>(in[i], v);
            UNROLLED (e, VEC)
                out[e] += v[e];
        }
        store_floats(at<T>(a.dx, row) + c, out);
    }
}

struct first_work {
    float *sum, *dsum; /* of w over streams, [N, d], and its gradient */
    float *dpre, *m, *rho, *dp, *drho, *dgain;
    float *partial; /* of sums over rows */
    struct tensor project;
};
static struct mhc_project_bwd_args project_args(const struct mhc_boundary_bwd_args *b, const struct first_work *w)
{
    int64_t rows = b->dx.dim[0], d = b->dx.dim[1], logits = mhc_logits(b->rule.streams);
    struct mhc_project_bwd_args p = {.dp = tensor_2d(w->dp, DT_F32, rows, logits),
                                     .drho = tensor_2d(w->drho, DT_F32, rows, 1),
                                     .x = b->x,
                                     .w = tensor_2d(w->sum, DT_F32, logits, d),
                                     .rho = tensor_2d(w->rho, DT_F32, rows, 1),
                                     .dx = b->dx,
                                     .root_eps = b->rule.root_eps};
    if (b->products.rank > 0)
        p.dw = tensor_2d(w->dsum, DT_F32, logits, d);
    p.work = w->project;
    return p;
}
static int64_t divide_work(const struct mhc_boundary_bwd_args *b, struct first_work *w)
{
    struct carve c = {(char *)b->work.data, 0};
    int64_t rows = b->dx.dim[0], d = b->dx.dim[1], n = b->rule.streams, logits = mhc_logits(n);
    *w = {};
    w->sum = carve_floats(&c, logits * d);
    w->dsum = carve_floats(&c, logits * d);
    w->dpre = carve_floats(&c, rows * n);
    w->m = carve_floats(&c, rows);
    w->rho = carve_floats(&c, rows);
    w->dp = carve_floats(&c, rows * logits);
    w->drho = carve_floats(&c, rows);
    if (b->dgain.rank > 0)
        w->dgain = carve_floats(&c, mhc_row_blocks(rows, d, b->dx.dtype) * d);
    if (b->products.rank > 0)
        w->partial = carve_floats(&c, MHC_PARAM_BLOCKS * 2 * logits);
    struct mhc_project_bwd_args p = project_args(b, w);
    int64_t bytes = mhc_project_bwd_work_cuda(&p);
    w->project = tensor_1d(carve_bytes(&c, bytes), DT_U8, bytes);
    return c.used;
}
int64_t mhc_first_bwd_bytes(const struct mhc_boundary_bwd_args *b)
{
    struct first_work w;
    return divide_work(b, &w);
}

static int through_coefficients(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct first_work *w)
{
    struct coef_bwd_args a = mhc_boundary_coef_bwd(b, w->dpre, w->dp);
    a.drho = {w->drho, 1};
    return mhc_coefficients_bwd(l, &a);
}

static int leave_products(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct first_work *w)
{
    int64_t n = b->rule.streams, logits = mhc_logits(n), d = b->dx.dim[1];
    struct param_sum_args s = param_sums_of(&b->dz, &b->stat, n, w->partial);
    s.sums = floats(&b->products) + logits * b->products.stride[0];
    LAUNCH(l, copy_parts, parts_grid(logits, d), 256, 0, w->dsum, (int)n, d, floats(&b->products),
           b->products.stride[0]);
    return mhc_param_sums(l, &s);
}

int mhc_first_bwd(struct lane *l, const struct mhc_boundary_bwd_args *b)
{
    struct first_work w;
    divide_work(b, &w);
    int64_t n = b->rule.streams;
    enum dtype real = b->dx.dtype;
    struct first_bwd_args a = {.dh = view_of(&b->dh),
                               .x = view_of(&b->x),
                               .dy = view_of(&b->dy),
                               .dx = view_of(&b->dx),
                               .pre = view_of(&b->coef),
                               .rstd = view_at(&b->stat, mhc_logits(n) + 1),
                               .rho = view_at(&b->stat, mhc_logits(n)),
                               .dpre = w.dpre,
                               .m = w.m,
                               .rho_out = w.rho,
                               .dgain = present(&b->dgain) ? w.dgain : NULL,
                               .rows = b->dx.dim[0],
                               .rows_per_block = mhc_rows_per_block(b->dx.dim[0], b->dx.dim[1], real),
                               .d = b->dx.dim[1],
                               .norm = norm_of(b),
                               .n = (int)n};
    bool aligned = b->rule.kernels != MHC_KERNELS_REF && absent_or_aligned16(&b->dy) && aligned16(&b->dx) &&
                   aligned16(&b->dh) && aligned16(&b->x) && pointer16(a.norm.gain) && whole_vectors(a.d, real);
    TRY(sum_of_parts(l, &b->w, n, w.sum));
    MHC_DISPATCH(
        real, a.n, aligned, T, N, VEC,
        LAUNCH(l, (first_dots<T, N, VEC>), (unsigned)ceil_div(a.rows, a.rows_per_block), mhc_threads(a.d, VEC), 0, a));
    if (a.dgain != NULL)
        TRY(add_partials(l, a.dgain, mhc_row_blocks(a.rows, a.d, real), a.d, floats(&b->dgain), a.d, 0, b->acc_dgain));
    TRY(through_coefficients(l, b, &w));
    struct mhc_project_bwd_args p = project_args(b, &w);
    TRY(mhc_project_bwd_cuda(l, &p));
    MHC_DISPATCH(real, a.n, aligned, T, N, VEC,
                 LAUNCH(l, (first_dx<T, N, VEC>), (unsigned)a.rows, mhc_threads(a.d, VEC), 0, a));
    return present(&b->products) ? leave_products(l, b, &w) : ST_OK;
}
