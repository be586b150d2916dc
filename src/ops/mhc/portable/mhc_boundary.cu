/* The boundary between two sublayers; see mhc.h. Forward: combine with the root mean square of what it
 * stores; projection; gates and Sinkhorn; aggregate with norm. Backward: the sums of norm and aggregate; coefficients;
 * then in one pass the whole gradient of the stream and combine's backward. Projections are library products.
 *
 * On Hopper 4 streams of a multiple of 256 aligned bf16 channels have the projection and its backward inside large
 * passes (../hopper); mhc_path.c decides. */
#include "ops/mhc/portable/mhc_cuda.cuh"
#include "ops/gemm/gemm.h"

static struct tensor strided_2d(void *data, enum dtype t, int64_t rows, int64_t cols, int64_t stride)
{
    struct tensor v = tensor_2d(data, t, rows, cols);
    v.stride[0] = stride;
    return v;
}

/* ---- which kernels --------------------------------------------------------------------------- */

static bool no_gaps(const struct tensor *t)
{
    return t->data == NULL || (t->stride[0] == t->dim[1] && pointer16(t->data));
}

struct mhc_shape mhc_shape_of(const struct mhc_rule *r, const struct tensor *stream, bool aligned, bool closes)
{
    struct mhc_shape s = {.kernels = r->kernels,
                          .real = stream->dtype,
                          .streams = r->streams,
                          .channels = stream->dim[1] / r->streams,
                          .aligned = aligned,
                          .w_aligned = aligned,
                          .closes = closes};
    return s;
}

int mhc_path_on(struct lane *l, const struct mhc_shape *s, struct mhc_choice *out)
{
    struct mhc_device d = {cuda_of(l)->hopper, cuda_of(l)->sm_count, 0};
    if (d.hopper && mhc_may_cluster(s))
        TRY(mhc_boundary_clusters_cuda(l, s->channels, &d.in_clusters));
    *out = mhc_path_of(s, &d);
    return mhc_refuse_path(s, out, l->err);
}

static int path_fwd(struct lane *l, const struct mhc_boundary_fwd_args *a, enum mhc_path *path)
{
    bool aligned = no_gaps(&a->x) && no_gaps(&a->y) && no_gaps(&a->coef_in) && absent_or_aligned16(&a->f) &&
                   absent_or_aligned16(&a->h) && aligned16(&a->coef) && pointer16(a->bias.data) &&
                   pointer16(a->gain.data);
    struct mhc_shape s = mhc_shape_of(&a->rule, &a->x, aligned, present(&a->f));
    struct mhc_choice c = {};
    s.maps = present(&a->h) && !a->reuse;
    s.w_aligned = a->reuse || aligned16(&a->w);
    TRY(mhc_path_on(l, &s, &c));
    *path = c.path;
    return ST_OK;
}
/* A gradient of the bias is summed by the separate kernels only. */
static int path_bwd(struct lane *l, const struct mhc_boundary_bwd_args *a, enum mhc_path *path)
{
    bool aligned = no_gaps(&a->coef_in) && absent_or_aligned16(&a->x) && absent_or_aligned16(&a->dy) &&
                   absent_or_aligned16(&a->f) && aligned16(&a->dh) && aligned16(&a->y) && aligned16(&a->dx) &&
                   absent_or_aligned16(&a->df) && aligned16(&a->dz) && absent_or_aligned16(&a->dcoef_in) &&
                   aligned16(&a->coef) && pointer16(a->bias.data) && pointer16(a->gain.data);
    struct mhc_shape s = mhc_shape_of(&a->rule, &a->dx, aligned, present(&a->f) && !present(&a->dbias));
    struct mhc_choice c = {};
    TRY(mhc_path_on(l, &s, &c));
    *path = c.path;
    return ST_OK;
}
/* For sizes of scratch, which are asked for before tensors have places and a device is known: would a Hopper GPU take
 * its passes, if all is aligned? */
static bool may_pass(const struct mhc_shape *s) { return mhc_path_of(s, &mhc_some_hopper).path == MHC_PATH_PASS; }

/* ---- forward --------------------------------------------------------------------------------- */

/* bf16: the halves of w and the product with them, [rows, 2 padded]. fp32 needs nothing: the product goes to stat. */
struct fwd_work {
    bf16 *halves;
    float *p;
    void *pass;
};
static int64_t divide_fwd(const struct mhc_boundary_fwd_args *a, struct fwd_work *w)
{
    struct carve c = {(char *)a->work.data, 0};
    int64_t padded = split_rows(mhc_logits(a->rule.streams));
    *w = {};
    if (a->x.dtype == DT_BF16 && !a->reuse) {
        w->halves = (bf16 *)carve_bytes(&c, 2 * padded * split_stride(a->x.dim[1]) * 2);
        w->p = carve_floats(&c, a->x.dim[0] * 2 * padded);
    }
    int64_t d = a->x.dim[1] / a->rule.streams;
    struct mhc_shape s = mhc_shape_of(&a->rule, &a->x, true, a->f.rank > 0);
    if (may_pass(&s) && !a->reuse)
        w->pass = carve_bytes(&c, mhc_boundary_cluster_bytes(a->x.dim[0], d));
    return c.used;
}

extern "C" int64_t mhc_boundary_fwd_work_cuda(const struct mhc_boundary_fwd_args *a)
{
    struct fwd_work w;
    return mhc_is_first_fwd(a) ? mhc_first_fwd_bytes(a) : divide_fwd(a, &w);
}

static int close_sublayer(struct lane *l, const struct mhc_boundary_fwd_args *b, enum mhc_path path)
{
    int64_t n = b->rule.streams;
    bool projects = present(&b->h) && !b->reuse;
    struct combine_args a = {.x = view_of(&b->x),
                             .f = view_of(&b->f),
                             .y = view_of(&b->y),
                             .post = view_at(&b->coef_in, n),
                             .res = view_at(&b->coef_in, 2 * n),
                             .bias = floats(&b->bias),
                             .rows = b->x.dim[0],
                             .d = b->x.dim[1] / n,
                             .rule = rule_of(b->rule),
                             .drop = drop_rule_of(&b->drop)};
    if (projects)
        a.rho = view_at(&b->stat, mhc_logits(n));
    if (!present(&b->f) && !projects)
        return ST_OK;
    return mhc_combine_rows(l, &a, b->x.dtype,
                            path != MHC_PATH_PLAIN && aligned16(&b->x) && absent_or_aligned16(&b->f) &&
                                absent_or_aligned16(&b->y) && pointer16(a.bias));
}

struct coef_args mhc_boundary_coef(const struct mhc_boundary_fwd_args *b)
{
    int64_t n = b->rule.streams;
    return {.p = view_of(&b->stat),
            .rho = view_at(&b->stat, mhc_logits(n)),
            .pre = view_of(&b->coef),
            .post = view_at(&b->coef, n),
            .res = view_at(&b->coef, 2 * n),
            .by = gate_params_of(b),
            .rows = b->x.dim[0],
            .rule = rule_of(b->rule),
            .sinkhorn = true};
}

static int make_coefficients(struct lane *l, const struct mhc_boundary_fwd_args *b, const struct tensor *stream,
                             const struct fwd_work *w)
{
    int64_t logits = mhc_logits(b->rule.streams), padded = split_rows(logits), k = stream->dim[1];
    struct gemm_args g = {.a = *stream, .trans_b = true, .alpha = 1};
    struct coef_args a = mhc_boundary_coef(b);
    if (stream->dtype == DT_BF16) {
        TRY(mhc_split_matrix(l, &b->w, w->halves, 2));
        g.b = strided_2d(w->halves, DT_BF16, 2 * padded, k, split_stride(k));
        g.c = tensor_2d(w->p, DT_F32, stream->dim[0], 2 * padded);
        a.p_to = a.p;
        a.p = view_of(&g.c);
        a.low = view_at(&g.c, padded);
    } else {
        g.b = b->w;
        g.c = tensor_cols(&b->stat, 0, logits);
    }
    TRY(gemm_cuda(l, &g));
    return mhc_coefficients(l, &a);
}

/* given: stat has 1 / rms. */
static int open_sublayer(struct lane *l, const struct mhc_boundary_fwd_args *b, const struct tensor *stream,
                         enum mhc_path path, bool given)
{
    int64_t n = b->rule.streams;
    struct aggregate_args a = {.x = view_of(stream),
                               .out = view_of(&b->h),
                               .rstd = view_at(&b->stat, mhc_logits(n) + 1),
                               .weight = {.pre = view_of(&b->coef)},
                               .rows = stream->dim[0],
                               .d = stream->dim[1] / n,
                               .norm = norm_of(b),
                               .eps = (float)b->eps,
                               .n = (int)n,
                               .normed = true,
                               .given = given};
    return mhc_aggregate_rows(l, &a, stream->dtype,
                              path != MHC_PATH_PLAIN && aligned16(stream) && aligned16(&b->h) &&
                                  pointer16(a.norm.gain));
}

extern "C" int mhc_boundary_fwd_cuda(struct lane *l, const struct mhc_boundary_fwd_args *a)
{
    struct fwd_work w;
    TRY(mhc_boundary_fwd_check(a, l->err));
    TRY(check_work("mhc_boundary_fwd", &a->work, mhc_is_first_fwd(a) ? mhc_first_fwd_bytes(a) : divide_fwd(a, &w),
                   l->err));
    if (a->x.dim[0] == 0 || a->x.dim[1] == 0)
        return ST_OK;
    if (mhc_is_first_fwd(a))
        return mhc_first_fwd(l, a);
    divide_fwd(a, &w);
    const struct tensor *stream = present(&a->f) ? &a->y : &a->x;
    enum mhc_path path;
    TRY(path_fwd(l, a, &path));
    if (path == MHC_PATH_CLUSTER)
        return mhc_boundary_cluster(l, a, w.pass);
    if (path == MHC_PATH_PASS && present(&a->h) && !a->reuse) {
        TRY(mhc_boundary_ring(l, a, w.pass));
        return open_sublayer(l, a, stream, path, true);
    }
    TRY(close_sublayer(l, a, path));
    if (!present(&a->h))
        return ST_OK;
    if (!a->reuse)
        TRY(make_coefficients(l, a, stream, &w));
    return open_sublayer(l, a, stream, path, a->reuse);
}

/* ---- backward -------------------------------------------------------------------------------- */

enum { GW_ROWS = 2048 };
struct bwd_work {
    bf16 *halves, *split; /* of w: high, high, low; of dp: high, low, high (bf16 streams) */
    float *dp;            /* fp32 streams */
    void *gw;             /* [gw_rows, K] real: dp w */
    int64_t gw_rows;
    void *pass, *outer;
    float *partial; /* of sums over rows */
    float *m, *row_scale, *dpre, *dgain, *dbias;
};
static bool bwd_may_pass(const struct mhc_boundary_bwd_args *a)
{
    struct mhc_shape s = mhc_shape_of(&a->rule, &a->dx, true, a->f.rank > 0 && a->dbias.rank == 0);
    return may_pass(&s);
}

static int64_t divide_bwd(const struct mhc_boundary_bwd_args *a, struct bwd_work *w)
{
    struct carve c = {(char *)a->work.data, 0};
    int64_t rows = a->dx.dim[0], k = a->dx.dim[1], n = a->rule.streams, d = k / n, logits = mhc_logits(n),
            padded = split_rows(logits);
    int64_t blocks = mhc_row_blocks(rows, d, a->dx.dtype);
    *w = {};
    if (a->dx.dtype == DT_BF16) {
        w->halves = (bf16 *)carve_bytes(&c, 3 * padded * split_stride(k) * 2);
        w->split = (bf16 *)carve_bytes(&c, rows * 3 * padded * 2);
    } else {
        w->dp = carve_floats(&c, rows * logits);
    }
    /* in pieces, where Hopper's pass would do without it */
    w->gw_rows = bwd_may_pass(a) ? min_i64(rows, GW_ROWS) : rows;
    w->gw = carve_bytes(&c, w->gw_rows * split_stride(k) * (int64_t)dtype_bytes(a->dx.dtype));
    w->m = carve_floats(&c, rows);
    w->row_scale = carve_floats(&c, rows);
    w->dpre = carve_floats(&c, rows * n);
    if (a->dgain.rank > 0)
        w->dgain = carve_floats(&c, blocks * d);
    if (a->dbias.rank > 0)
        w->dbias = carve_floats(&c, blocks * d);
    if (bwd_may_pass(a))
        w->pass = carve_bytes(&c, mhc_boundary_bwd_pass_bytes(a));
    if (a->products.rank > 0) {
        w->outer = carve_bytes(&c, mhc_outer_bytes(rows, logits, k, a->dx.dtype));
        w->partial = carve_floats(&c, MHC_PARAM_BLOCKS * 2 * logits);
    }
    return c.used;
}

extern "C" int64_t mhc_boundary_bwd_work_cuda(const struct mhc_boundary_bwd_args *a)
{
    struct bwd_work w;
    return mhc_is_first_bwd(a) ? mhc_first_bwd_bytes(a) : divide_bwd(a, &w);
}

/* The passes multiply y by dp while they have it. */
extern "C" bool mhc_boundary_products_cuda(const struct mhc_boundary_bwd_args *a)
{
    return (mhc_is_first_bwd(a) || bwd_may_pass(a)) && a->dx.dim[0] > 0;
}

/* Whether the pass will run is not known before its tensors are: if not, what is ready is not used. */
extern "C" int64_t mhc_boundary_prepare_bytes_cuda(const struct mhc_boundary_bwd_args *a)
{
    return !mhc_is_first_bwd(a) && bwd_may_pass(a) && a->dx.dim[0] > 0 ? mhc_boundary_bwd_pass_ready_bytes(a) : 0;
}
extern "C" int mhc_boundary_prepare_cuda(struct lane *l, const struct mhc_boundary_bwd_args *a)
{
    TRY(mhc_boundary_prepare_check(a, l->err));
    TRY(check_work("mhc_boundary_prepare", &a->ready, mhc_boundary_prepare_bytes_cuda(a), l->err));
    if (mhc_boundary_prepare_bytes_cuda(a) == 0 || !cuda_of(l)->hopper || !aligned16(&a->coef))
        return ST_OK;
    return mhc_boundary_bwd_pass_ready(l, a);
}

/* Where they do not run: products from dz, to dw. */
template <typename A> static int outer_of_dz(struct lane *l, const A *a, const struct tensor *dw, bool acc, void *work)
{
    struct outer_args o = {.dp = view_of(&a->dz),
                           .rho = view_at(&a->stat, mhc_logits(a->rule.streams)),
                           .alpha = {floats(&a->a_pre), floats(&a->a_post), floats(&a->a_res)},
                           .streams = (int)a->rule.streams,
                           .y = a->y,
                           .dw = *dw,
                           .acc = acc};
    return mhc_outer(l, &o, work);
}
static int make_products(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct bwd_work *w)
{
    struct tensor dw = b->products;
    dw.dim[0] = mhc_logits(b->rule.streams);
    TRY(outer_of_dz(l, b, &dw, false, w->outer));
    struct param_sum_args s = param_sums_of(&b->dz, &b->stat, b->rule.streams, w->partial);
    s.sums = floats(&b->products) + dw.dim[0] * dw.stride[0];
    return mhc_param_sums(l, &s);
}

/* dpre and m of every row, dgain. */
static int through_norm(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct bwd_work *w,
                        enum mhc_path path)
{
    int64_t n = b->rule.streams;
    enum dtype real = b->dx.dtype;
    struct norm_bwd_args a = {.dh = view_of(&b->dh),
                              .y = view_of(&b->y),
                              .pre = view_of(&b->coef),
                              .rstd = view_at(&b->stat, mhc_logits(n) + 1),
                              .dpre = w->dpre,
                              .m = w->m,
                              .dgain = present(&b->dgain) ? w->dgain : NULL,
                              .rows = b->dx.dim[0],
                              .d = b->dx.dim[1] / n,
                              .norm = norm_of(b),
                              .n = (int)n};
    a.rows_per_block = mhc_rows_per_block(a.rows, a.d, real);
    TRY(mhc_norm_bwd_rows(l, &a, real,
                          path != MHC_PATH_PLAIN && aligned16(&b->dh) && aligned16(&b->y) && pointer16(a.norm.gain) &&
                              pointer16(a.dgain)));
    return a.dgain == NULL ? ST_OK
                           : add_partials(l, a.dgain, mhc_row_blocks(a.rows, a.d, real), a.d, floats(&b->dgain), a.d, 0,
                                          b->acc_dgain);
}

/* Arguments of boundary and coefficients, both as the op has them; dpre: that part of pre's gradient which comes
 * through h, without gaps. */
struct coef_bwd_args mhc_boundary_coef_bwd(const struct mhc_boundary_bwd_args *b, float *dpre, float *dp)
{
    int64_t n = b->rule.streams, logits = mhc_logits(n);
    return {.p = view_of(&b->stat),
            .rho = view_at(&b->stat, logits),
            .dpre = {dpre, n},
            .dpre2 = view_of(&b->dcoef),
            .dpost = view_at(&b->dcoef, n),
            .dres = view_at(&b->dcoef, 2 * n),
            .dz = view_of(&b->dz),
            .dp = {dp, logits},
            .by = gate_params_of(b),
            .rows = b->dx.dim[0],
            .k = b->y.dim[1],
            .rule = rule_of(b->rule),
            .sinkhorn = true};
}

/* dz, dp, and the factor of y through rho. */
static int through_coefficients(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct bwd_work *w)
{
    struct coef_bwd_args a = mhc_boundary_coef_bwd(b, w->dpre, w->dp);
    a.split = w->split;
    a.split_width = (int)split_rows(mhc_logits(b->rule.streams));
    a.row_scale = w->row_scale;
    return mhc_coefficients_bwd(l, &a);
}

/* gw of rows first to first + count. */
static int make_gw(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct bwd_work *w, int64_t first,
                   int64_t count)
{
    int64_t logits = mhc_logits(b->rule.streams), padded = split_rows(logits), k = b->dx.dim[1];
    struct gemm_args g = {.c = strided_2d(w->gw, b->dx.dtype, count, k, split_stride(k)), .alpha = 1};
    if (b->dx.dtype == DT_BF16) {
        g.a = tensor_2d(w->split + first * 3 * padded, DT_BF16, count, 3 * padded);
        g.b = strided_2d(w->halves, DT_BF16, 3 * padded, k, split_stride(k));
    } else {
        g.a = tensor_2d(w->dp + first * logits, DT_F32, count, logits);
        g.b = b->w;
    }
    return gemm_cuda(l, &g);
}

static int finish(struct lane *l, const struct mhc_boundary_bwd_args *b, const struct bwd_work *w, enum mhc_path path)
{
    int64_t n = b->rule.streams, k = b->dx.dim[1];
    enum dtype real = b->dx.dtype;
    bool closes = present(&b->f);
    struct mix_bwd_args a = {.dy = view_of(&b->dy),
                             .dx = view_of(&b->dx),
                             .dh = view_of(&b->dh),
                             .y = view_of(&b->y),
                             .gw = {w->gw, split_stride(k)},
                             .x = view_of(&b->x),
                             .f = view_of(&b->f),
                             .df = view_of(&b->df),
                             .pre = view_of(&b->coef),
                             .rstd = view_at(&b->stat, mhc_logits(n) + 1),
                             .post = view_at(&b->coef_in, n),
                             .res = view_at(&b->coef_in, 2 * n),
                             .dpre = view_of(&b->dcoef_in),
                             .dpost = view_at(&b->dcoef_in, n),
                             .dres = view_at(&b->dcoef_in, 2 * n),
                             .m = w->m,
                             .row_scale = w->row_scale,
                             .bias = floats(&b->bias),
                             .norm = norm_of(b),
                             .dbias = present(&b->dbias) ? w->dbias : NULL,
                             .rows = b->dx.dim[0],
                             .d = k / n,
                             .rule = rule_of(b->rule),
                             .opens = true,
                             .closes = closes};
    a.rows_per_block = mhc_rows_per_block(a.rows, a.d, real);
    if (closes)
        a.drop = drop_rule_of(&b->drop);
    bool aligned = path != MHC_PATH_PLAIN && absent_or_aligned16(&b->dy) && aligned16(&b->dx) && aligned16(&b->dh) &&
                   aligned16(&b->y) && absent_or_aligned16(&b->x) && absent_or_aligned16(&b->f) &&
                   absent_or_aligned16(&b->df) && pointer16(w->gw) && pointer16(a.norm.gain) && pointer16(a.bias) &&
                   pointer16(a.dbias);
    if (w->halves != NULL)
        TRY(mhc_split_matrix(l, &b->w, w->halves, 3));
    int64_t rows = a.rows;
    for (int64_t first = 0; first < rows; first += w->gw_rows) {
        a.first_row = first;
        a.rows = min_i64(first + w->gw_rows, rows);
        TRY(make_gw(l, b, w, first, a.rows - first));
        TRY(mhc_mix_bwd_rows(l, &a, real, aligned));
    }
    return a.dbias == NULL ? ST_OK
                           : add_partials(l, a.dbias, mhc_row_blocks(rows, a.d, real), a.d, floats(&b->dbias), a.d, 0,
                                          b->acc_dbias);
}

extern "C" int mhc_boundary_bwd_cuda(struct lane *l, const struct mhc_boundary_bwd_args *a)
{
    struct bwd_work w;
    TRY(mhc_boundary_bwd_check(a, l->err));
    TRY(check_work("mhc_boundary_bwd", &a->work, mhc_is_first_bwd(a) ? mhc_first_bwd_bytes(a) : divide_bwd(a, &w),
                   l->err));
    if (mhc_is_first_bwd(a))
        return mhc_first_bwd(l, a);
    divide_bwd(a, &w);
    enum mhc_path path;
    TRY(path_bwd(l, a, &path));
    if (path == MHC_PATH_PASS && a->dx.dim[0] > 0)
        return mhc_boundary_bwd_pass(l, a, w.pass);
    TRY(through_norm(l, a, &w, path));
    TRY(through_coefficients(l, a, &w));
    TRY(finish(l, a, &w, path));
    return present(&a->products) ? make_products(l, a, &w) : ST_OK;
}

/* ---- gradients of the mapping's parameters --------------------------------------------------- */

static int64_t divide_dw(const struct mhc_boundary_dw_args *a, void **outer, float **partial)
{
    struct carve c = {(char *)a->work.data, 0};
    int64_t logits = mhc_logits(a->rule.streams);
    *outer = NULL;
    *partial = NULL;
    if (a->products.rank == 0) {
        *outer = carve_bytes(&c, mhc_outer_bytes(a->y.dim[0], logits, a->y.dim[1], a->y.dtype));
        *partial = carve_floats(&c, MHC_PARAM_BLOCKS * 2 * logits);
    }
    return c.used;
}

extern "C" int64_t mhc_boundary_dw_work_cuda(const struct mhc_boundary_dw_args *a)
{
    void *outer;
    float *partial;
    return divide_dw(a, &outer, &partial);
}

static int add_given(struct lane *l, const struct mhc_boundary_dw_args *a)
{
    struct add_products_args s = {.products = view_of(&a->products),
                                  .dw = view_of(&a->dw),
                                  .to = param_gradients_of(a, mhc_boundary_adds(a)),
                                  .k = a->dw.dim[1],
                                  .n = (int)a->rule.streams,
                                  .add_dw = a->acc_dw};
    return mhc_add_products(l, &s);
}

extern "C" int mhc_boundary_dw_cuda(struct lane *l, const struct mhc_boundary_dw_args *a)
{
    void *outer;
    float *partial;
    TRY(mhc_boundary_dw_check(a, l->err));
    TRY(check_work("mhc_boundary_dw", &a->work, divide_dw(a, &outer, &partial), l->err));
    if (present(&a->products))
        return add_given(l, a);
    TRY(outer_of_dz(l, a, &a->dw, a->acc_dw, outer));
    struct param_sum_args s = param_sums_of(&a->dz, &a->stat, a->rule.streams, partial);
    s.to = param_gradients_of(a, mhc_boundary_adds(a));
    return mhc_param_sums(l, &s);
}
