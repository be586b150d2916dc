/* The last boundary: combine, contract by learned gates, norm; see mhc.h. Where the fused kernels between two sublayers
 * run, they serve here too: the learned gates are a mapping of which only pre is wanted, with other eps. So w is laid
 * out as theirs, with zeros for what is not wanted, and so are the rows' records. Elsewhere it is a chain of separate
 * kernels. */
#include "ops/mhc/portable/mhc_cuda.cuh"
extern "C" {
#include "ops/rmsnorm/rmsnorm.h"
}

static int take_rstd(struct lane *l, const struct mhc_final_bwd_args *a, const struct tensor *rstd);
#define OP(name) name##_cuda
#define WORK_OF(op, args) op##_work_cuda(args)
#define TAKE_RSTD take_rstd
#include "ops/mhc/mhc_final_int.h"

enum { LOGITS = 24, STREAMS = 4, RECORD = LOGITS + 2 }; /* of the fused kernels */

static bool no_gaps(const struct tensor *t) { return t->stride[0] == t->dim[1] && pointer16(t->data); }

/* ---- the mapping of the fused kernels -------------------------------------------------------- */

struct head_mapping {
    float *w, *beta, *zero; /* [LOGITS, k], [LOGITS], [1] */
};
static struct head_mapping carve_mapping(struct carve *c, int64_t k)
{
    struct head_mapping m;
    m.w = carve_floats(c, LOGITS * k);
    m.beta = carve_floats(c, LOGITS);
    m.zero = carve_floats(c, 1);
    return m;
}
static __global__ void lay_out_mapping(const float *w, int64_t stride, const float *base, int64_t k,
                                       struct head_mapping m)
{
    int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y;
    if (c < k)
        m.w[i * k + c] = i < STREAMS ? w[i * stride + c] : 0.0f;
    if (c == 0)
        m.beta[i] = i < STREAMS ? base[i] : 0.0f;
    if (c == 0 && i == 0)
        *m.zero = 0;
}
static int make_mapping(struct lane *l, const struct tensor *w, const struct tensor *base, const struct head_mapping &m)
{
    int64_t k = w->dim[1];
    LAUNCH(l, lay_out_mapping, dim3((unsigned)ceil_div(k, 256), LOGITS), 256, 0, floats(w), w->stride[0], floats(base),
           k, m);
    return ST_OK;
}

/* What is kept of a row, and as the fused kernels have it: p with zeros, a root mean square that gives the same 1 /
 * (rho + eps), 1 / rms of h; gates. */
struct row_records {
    float *stat, *coef, *wide_stat, *wide_coef;
    int64_t stat_stride, coef_stride, rows;
};
static __global__ void take_rows(const __grid_constant__ struct row_records a)
{
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.rows)
        return;
    const float *from = a.wide_stat + row * RECORD;
    float *stat = a.stat + row * a.stat_stride;
    for (int i = 0; i < STREAMS; i++) {
        stat[i] = from[i];
        a.coef[row * a.coef_stride + i] = a.wide_coef[row * LOGITS + i];
    }
    stat[STREAMS] = 1.0f / (from[LOGITS] + (float)MHC_EPS);
    stat[STREAMS + 1] = from[LOGITS + 1];
}
static __global__ void give_rows(const __grid_constant__ struct row_records a)
{
    int64_t item = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = item / RECORD;
    int i = (int)(item % RECORD);
    if (row >= a.rows)
        return;
    const float *stat = a.stat + row * a.stat_stride;
    a.wide_stat[item] = i < STREAMS   ? stat[i]
                        : i < LOGITS  ? 0.0f
                        : i == LOGITS ? 1.0f / stat[STREAMS] - (float)MHC_EPS
                                      : stat[STREAMS + 1];
    if (i < LOGITS)
        a.wide_coef[row * LOGITS + i] = i < STREAMS ? a.coef[row * a.coef_stride + i] : 0.0f;
}
static struct row_records records_of(const struct tensor *stat, const struct tensor *coef, float *wide_stat,
                                     float *wide_coef)
{
    struct row_records r = {floats(stat),    floats(coef),    wide_stat,   wide_coef,
                            stat->stride[0], coef->stride[0], stat->dim[0]};
    return r;
}

/* As the fused kernels see it: contract's gates are profile D's, and not rounded. */
static struct mhc_shape shape_of(const struct mhc_rule *r, const struct tensor *stream, bool aligned)
{
    return mhc_shape_of(r, stream, aligned, r->profile == MHC_D && !r->round_bf16 && stream->dim[0] > 0);
}
static bool may_fuse(const struct mhc_rule *r, const struct tensor *stream)
{
    struct mhc_shape s = shape_of(r, stream, true);
    return mhc_path_of(&s, &mhc_some_hopper).path == MHC_PATH_PASS;
}

/* ---- forward --------------------------------------------------------------------------------- */

struct fwd_work {
    struct head_mapping map;
    float *stat, *coef;
    void *pass;
};
static int64_t divide_fwd(const struct mhc_final_fwd_args *a, struct fwd_work *w)
{
    struct carve c = {(char *)a->work.data, 0};
    int64_t rows = a->y.dim[0];
    *w = {};
    if (a->reuse || !may_fuse(&a->rule, &a->y))
        return 0;
    w->map = carve_mapping(&c, a->y.dim[1]);
    w->stat = carve_floats(&c, rows * RECORD);
    w->coef = carve_floats(&c, rows * LOGITS);
    w->pass = carve_bytes(&c, mhc_boundary_cluster_bytes(rows, a->y.dim[1] / STREAMS));
    return c.used;
}
extern "C" int64_t mhc_final_fwd_work_cuda(const struct mhc_final_fwd_args *a)
{
    struct fwd_work w;
    return divide_fwd(a, &w);
}

/* In clusters, where the device runs enough of them: other widths would need a second pass for h. */
static int fuses(struct lane *l, const struct mhc_final_fwd_args *a, bool *fused)
{
    bool aligned = no_gaps(&a->x) && no_gaps(&a->y) && no_gaps(&a->coef_in) && aligned16(&a->f) && aligned16(&a->h) &&
                   pointer16(a->gain.data);
    struct mhc_shape s = shape_of(&a->rule, &a->y, aligned);
    struct mhc_choice c = {};
    s.maps = true;
    TRY(mhc_path_on(l, &s, &c));
    *fused = c.path == MHC_PATH_CLUSTER;
    return ST_OK;
}

static int final_in_clusters(struct lane *l, const struct mhc_final_fwd_args *a, const struct fwd_work *w)
{
    int64_t rows = a->y.dim[0], k = a->y.dim[1];
    struct tensor zero = tensor_1d(w->map.zero, DT_F32, 1);
    struct mhc_boundary_fwd_args b = {.x = a->x,
                                      .f = a->f,
                                      .coef_in = a->coef_in,
                                      .w = tensor_2d(w->map.w, DT_F32, LOGITS, k),
                                      .a_pre = a->scale,
                                      .a_post = zero,
                                      .a_res = zero,
                                      .beta = tensor_1d(w->map.beta, DT_F32, LOGITS),
                                      .gain = a->gain,
                                      .y = a->y,
                                      .stat = tensor_2d(w->stat, DT_F32, rows, RECORD),
                                      .coef = tensor_2d(w->coef, DT_F32, rows, LOGITS),
                                      .h = a->h,
                                      .rule = a->rule,
                                      .drop = a->drop,
                                      .eps = a->eps,
                                      .zero_centered = a->zero_centered};
    b.rule.iterations = 1; /* of what is not wanted */
    struct row_records r = records_of(&a->stat, &a->coef, w->stat, w->coef);
    TRY(make_mapping(l, &a->w, &a->base, w->map));
    TRY(mhc_final_cluster(l, &b, w->pass));
    LAUNCH(l, take_rows, (unsigned)ceil_div(rows, 128), 128, 0, r);
    return ST_OK;
}

/* coef from stat. */
static __global__ void make_gates(const __grid_constant__ struct row_records a, const float *base, const float *scale,
                                  int n, float eps)
{
    int64_t item = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = item / n;
    int i = (int)(item % n);
    if (row >= a.rows)
        return;
    const float *stat = a.stat + row * a.stat_stride;
    a.coef[row * a.coef_stride + i] = precise_sigmoid(stat[i] * stat[n] * *scale + base[i]) + eps;
}

static int close_and_contract(struct lane *l, const struct mhc_final_fwd_args *a)
{
    struct mhc_combine_fwd_args c = final_combine(a);
    struct mhc_contract_fwd_args g = final_contract(a, &a->h); /* for its width */
    TRY(mhc_combine_fwd_cuda(l, &c));
    TRY(mhc_contract_gates(l, &g));
    int n = (int)a->rule.streams;
    LAUNCH(l, make_gates, (unsigned)ceil_div(a->y.dim[0] * n, 128), 128, 0, records_of(&a->stat, &a->coef, NULL, NULL),
           floats(&a->base), floats(&a->scale), n, (float)a->eps);
    return ST_OK;
}

extern "C" int mhc_final_fwd_cuda(struct lane *l, const struct mhc_final_fwd_args *a)
{
    struct fwd_work w;
    bool fused = false;
    TRY(mhc_final_fwd_check(a, l->err));
    TRY(check_work("mhc_final_fwd", &a->work, divide_fwd(a, &w), l->err));
    if (a->y.dim[0] == 0 || a->y.dim[1] == 0)
        return ST_OK;
    if (!a->reuse)
        TRY(fuses(l, a, &fused));
    if (fused)
        return final_in_clusters(l, a, &w);
    if (!a->reuse)
        TRY(close_and_contract(l, a));
    int64_t n = a->rule.streams;
    struct aggregate_args h = {.x = view_of(&a->y),
                               .out = view_of(&a->h),
                               .rstd = view_at(&a->stat, n + 1),
                               .weight = {.pre = view_of(&a->coef)},
                               .rows = a->y.dim[0],
                               .d = a->h.dim[1],
                               .norm = norm_of(a),
                               .eps = (float)a->eps,
                               .n = (int)n,
                               .normed = true,
                               .given = a->reuse};
    return mhc_aggregate_rows(l, &h, a->y.dtype, aligned16(&a->y) && aligned16(&a->h) && pointer16(h.norm.gain));
}

/* ---- backward -------------------------------------------------------------------------------- */

struct bwd_work {
    struct head_mapping map;
    float *stat, *coef, *dz, *products;
    void *pass;
};
static struct mhc_boundary_bwd_args fused_args(const struct mhc_final_bwd_args *a, const struct bwd_work *w)
{
    int64_t rows = a->dx.dim[0], k = a->dx.dim[1];
    struct mhc_boundary_bwd_args b = {.dh = a->dh,
                                      .stat = tensor_2d(w->stat, DT_F32, rows, RECORD),
                                      .coef = tensor_2d(w->coef, DT_F32, rows, LOGITS),
                                      .gain = a->gain,
                                      .w = tensor_2d(w->map.w, DT_F32, LOGITS, k),
                                      .a_pre = a->scale,
                                      .a_post = tensor_1d(w->map.zero, DT_F32, 1),
                                      .a_res = tensor_1d(w->map.zero, DT_F32, 1),
                                      .beta = tensor_1d(w->map.beta, DT_F32, LOGITS),
                                      .x = a->x,
                                      .f = a->f,
                                      .coef_in = a->coef_in,
                                      .y = a->y,
                                      .dx = a->dx,
                                      .df = a->df,
                                      .dcoef_in = a->dcoef_in,
                                      .dz = tensor_2d(w->dz, DT_F32, rows, LOGITS),
                                      .dgain = a->dgain,
                                      .acc_dgain = a->acc_dgain,
                                      .products =
                                          a->dw.rank == 0 ? tensor{} : tensor_2d(w->products, DT_F32, LOGITS + 1, k),
                                      .rule = a->rule,
                                      .drop = a->drop,
                                      .zero_centered = a->zero_centered};
    return b;
}
static int64_t divide_fused(const struct mhc_final_bwd_args *a, struct bwd_work *w)
{
    struct carve c = {(char *)a->work.data, 0};
    int64_t rows = a->dx.dim[0], k = a->dx.dim[1];
    w->map = carve_mapping(&c, k);
    w->stat = carve_floats(&c, rows * RECORD);
    w->coef = carve_floats(&c, rows * LOGITS);
    w->dz = carve_floats(&c, rows * LOGITS);
    w->products = carve_floats(&c, (LOGITS + 1) * k);
    struct mhc_boundary_bwd_args b = fused_args(a, w);
    w->pass = carve_bytes(&c, mhc_boundary_bwd_pass_bytes(&b));
    return c.used;
}
extern "C" int64_t mhc_final_bwd_work_cuda(const struct mhc_final_bwd_args *a)
{
    struct bwd_work w = {};
    struct final_scratch s;
    int64_t chain = divide_chain(a, &s);
    return may_fuse(&a->rule, &a->dx) ? max_i64(chain, divide_fused(a, &w)) : chain;
}

struct param_args {
    const float *products; /* the last row: sums of dz, then of dz p / rho */
    float *dw, *dbase, *dscale;
    int64_t k, stride;
    bool add;
};
static __global__ void final_params(const __grid_constant__ struct param_args a)
{
    int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y;
    if (c < a.k)
        a.dw[i * a.stride + c] = (a.add ? a.dw[i * a.stride + c] : 0.0f) + a.products[i * a.k + c];
    const float *sums = a.products + LOGITS * a.k;
    if (c == 0)
        a.dbase[i] = (a.add ? a.dbase[i] : 0.0f) + sums[i];
    if (c == 0 && i == 0) {
        float sum = 0;
        for (int j = 0; j < STREAMS; j++)
            sum += sums[LOGITS + j];
        *a.dscale = (a.add ? *a.dscale : 0.0f) + sum;
    }
}

static int final_by_pass(struct lane *l, const struct mhc_final_bwd_args *a, const struct bwd_work *w)
{
    struct mhc_boundary_bwd_args b = fused_args(a, w);
    int64_t rows = a->dx.dim[0], k = a->dx.dim[1];
    TRY(make_mapping(l, &a->w, &a->base, w->map));
    LAUNCH(l, give_rows, (unsigned)ceil_div(rows * RECORD, 256), 256, 0,
           records_of(&a->stat, &a->coef, w->stat, w->coef));
    TRY(mhc_boundary_bwd_pass(l, &b, w->pass));
    if (!present(&a->dw))
        return ST_OK;
    struct param_args p = {w->products, floats(&a->dw),  floats(&a->dbase), floats(&a->dscale),
                           k,           a->dw.stride[0], mhc_final_adds(a)};
    LAUNCH(l, final_params, dim3((unsigned)ceil_div(k, 256), STREAMS), 256, 0, p);
    return ST_OK;
}

/* The norm's rstd without gaps. */
static __global__ void chain_rows(const float *stat, int64_t stat_stride, float *rstd, int64_t rows, int n)
{
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows)
        rstd[row] = stat[row * stat_stride + n + 1];
}

static int take_rstd(struct lane *l, const struct mhc_final_bwd_args *a, const struct tensor *rstd)
{
    int64_t rows = a->dx.dim[0];
    LAUNCH(l, chain_rows, (unsigned)ceil_div(rows, 128), 128, 0, floats(&a->stat), a->stat.stride[0], floats(rstd),
           rows, (int)a->rule.streams);
    return ST_OK;
}

extern "C" int mhc_final_bwd_cuda(struct lane *l, const struct mhc_final_bwd_args *a)
{
    struct bwd_work w = {};
    TRY(mhc_final_bwd_check(a, l->err));
    TRY(check_work("mhc_final_bwd", &a->work, mhc_final_bwd_work_cuda(a), l->err));
    bool aligned = no_gaps(&a->coef_in) && aligned16(&a->x) && aligned16(&a->f) && aligned16(&a->dh) &&
                   aligned16(&a->y) && aligned16(&a->dx) && aligned16(&a->df) && aligned16(&a->dcoef_in) &&
                   pointer16(a->gain.data);
    struct mhc_shape s = shape_of(&a->rule, &a->dx, aligned);
    struct mhc_choice c = {};
    TRY(mhc_path_on(l, &s, &c));
    if (c.path == MHC_PATH_PASS) {
        divide_fused(a, &w);
        return final_by_pass(l, a, &w);
    }
    return final_by_chain(l, a);
}
