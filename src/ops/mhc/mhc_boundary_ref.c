/* The boundary between two sublayers, reference: the chain of primitives, step by step; see mhc.h. Beside it
 * the health numbers, which are few enough that one slow version serves both host devices. */
#include "ops/mhc/mhc_health_int.h"
#include "ops/mhc/mhc.h"
#include "ops/ops_ref_int.h"
#include "ops/rmsnorm/rmsnorm.h"

/* Sections of a coefficient row. */
static struct tensor pre_of(const struct mhc_rule *r, const struct tensor *coef)
{
    return tensor_cols(coef, 0, r->streams);
}
static struct tensor post_of(const struct mhc_rule *r, const struct tensor *coef)
{
    return tensor_cols(coef, r->streams, r->streams);
}
static struct tensor res_of(const struct mhc_rule *r, const struct tensor *coef)
{
    return tensor_cols(coef, 2 * r->streams, r->streams * r->streams);
}

/* Sections of a stat row. */
static struct tensor p_of(const struct mhc_rule *r, const struct tensor *stat)
{
    return tensor_cols(stat, 0, mhc_logits(r->streams));
}
static struct tensor rho_of(const struct mhc_rule *r, const struct tensor *stat)
{
    return tensor_cols(stat, mhc_logits(r->streams), 1);
}
static struct tensor rstd_of(const struct mhc_rule *r, const struct tensor *stat)
{
    return tensor_cols(stat, mhc_logits(r->streams) + 1, 1);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* The aggregate, and the norm's rstd as a vector of its own. */
int64_t mhc_boundary_fwd_work_ref(const struct mhc_boundary_fwd_args *a)
{
    return a->x.dim[0] * (a->x.dim[1] / (mhc_is_first_fwd(a) ? 1 : a->rule.streams) + 1) * (int64_t)sizeof(double);
}

static int make_coefficients(struct lane *l, const struct mhc_boundary_fwd_args *a, const struct tensor *stream)
{
    struct mhc_project_fwd_args project = {.x = *stream,
                                           .w = a->w,
                                           .p = p_of(&a->rule, &a->stat),
                                           .rho = rho_of(&a->rule, &a->stat),
                                           .root_eps = a->rule.root_eps};
    struct mhc_gates_fwd_args gates = {.p = project.p,
                                       .rho = project.rho,
                                       .a_pre = a->a_pre,
                                       .a_post = a->a_post,
                                       .a_res = a->a_res,
                                       .beta = a->beta,
                                       .pre = pre_of(&a->rule, &a->coef),
                                       .post = post_of(&a->rule, &a->coef),
                                       .logits = res_of(&a->rule, &a->coef),
                                       .rule = a->rule};
    struct mhc_sinkhorn_fwd_args sinkhorn = {.logits = gates.logits, .res = gates.logits, .rule = a->rule};
    TRY(mhc_project_fwd_ref(l, &project));
    TRY(mhc_gates_fwd_ref(l, &gates));
    return mhc_sinkhorn_fwd_ref(l, &sinkhorn);
}

int mhc_boundary_fwd_ref(struct lane *l, const struct mhc_boundary_fwd_args *a)
{
    TRY(mhc_boundary_fwd_check(a, l->err));
    TRY(check_work("mhc_boundary_fwd", &a->work, mhc_boundary_fwd_work_ref(a), l->err));
    int64_t rows = a->x.dim[0], d = a->x.dim[1] / (mhc_is_first_fwd(a) ? 1 : a->rule.streams);
    if (rows == 0)
        return ST_OK;
    struct tensor stream = present(&a->y) ? a->y : a->x;
    if (mhc_is_first_fwd(a)) {
        struct mhc_expand_fwd_args expand = {.x = a->x, .y = a->y};
        TRY(mhc_expand_fwd_ref(l, &expand));
    }
    if (present(&a->f)) {
        struct mhc_combine_fwd_args combine = {.x = a->x,
                                               .f = a->f,
                                               .bias = a->bias,
                                               .post = post_of(&a->rule, &a->coef_in),
                                               .res = res_of(&a->rule, &a->coef_in),
                                               .y = a->y,
                                               .rule = a->rule,
                                               .drop = a->drop};
        TRY(mhc_combine_fwd_ref(l, &combine));
    }
    if (!present(&a->h))
        return ST_OK;
    if (!a->reuse)
        TRY(make_coefficients(l, a, &stream));
    double *work = a->work.data;
    struct mhc_aggregate_fwd_args aggregate = {
        .x = stream, .pre = pre_of(&a->rule, &a->coef), .a = tensor_2d(work, DT_F64, rows, d)};
    struct rmsnorm_fwd_args norm = {.x = aggregate.a,
                                    .w = a->gain,
                                    .y = a->h,
                                    .rstd = tensor_1d(work + rows * d, DT_F64, rows),
                                    .eps = a->eps,
                                    .zero_centered = a->zero_centered};
    TRY(mhc_aggregate_fwd_ref(l, &aggregate));
    TRY(rmsnorm_fwd_ref(l, &norm));
    struct tensor rstd = rstd_of(&a->rule, &a->stat);
    for (int64_t r = 0; !a->reuse && r < rows; r++)
        f64_row(&rstd, r)[0] = work[rows * d + r];
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Sums over all streams. */
static int64_t width_of(const struct mhc_boundary_bwd_args *a)
{
    return mhc_is_first_bwd(a) ? a->rule.streams * a->dx.dim[1] : a->dx.dim[1];
}

/* Scratch: the aggregate, its gradient, rstd, the whole gradient of the stream, and per row: logits of res,
 * dpre, dp, drho, and the gates recomputed. */
int64_t mhc_boundary_bwd_work_ref(const struct mhc_boundary_bwd_args *a)
{
    int64_t n = a->rule.streams, k = width_of(a);
    return a->dx.dim[0] * (2 * (k / n) + 1 + k + n * n + n + mhc_logits(n) + 1 + 2 * n) * (int64_t)sizeof(double);
}

struct scratch {
    struct tensor a, da, rstd, g, logits, dpre, dp, drho, gates;
};

static struct scratch divide_work(const struct mhc_boundary_bwd_args *a)
{
    int64_t rows = a->dx.dim[0], n = a->rule.streams, k = width_of(a), d = k / n;
    double *at = a->work.data;
    struct scratch s;
    struct {
        struct tensor *t;
        int64_t cols;
    } parts[] = {{&s.a, d},    {&s.da, d},       {&s.g, k}, {&s.logits, n * n}, {&s.dpre, n}, {&s.dp, mhc_logits(n)},
                 {&s.drho, 1}, {&s.gates, 2 * n}};
    for (int i = 0; i < countof(parts); i++) {
        *parts[i].t = tensor_2d(at, DT_F64, rows, parts[i].cols);
        at += rows * parts[i].cols;
    }
    s.rstd = tensor_1d(at, DT_F64, rows);
    return s;
}

/* da, dgain and the aggregate's share of the stream's gradient. */
static int through_norm(struct lane *l, const struct mhc_boundary_bwd_args *a, const struct scratch *s)
{
    int64_t rows = a->dx.dim[0], k = width_of(a);
    struct tensor rstd = rstd_of(&a->rule, &a->stat), pre = pre_of(&a->rule, &a->coef);
    for (int64_t r = 0; r < rows; r++) {
        ((double *)s->rstd.data)[r] = f64_row(&rstd, r)[0];
        for (int64_t c = 0; c < k; c++)
            f64_row(&s->g, r)[c] = present(&a->dy) ? f64_row(&a->dy, r)[c] : 0;
    }
    struct mhc_aggregate_fwd_args again = {.x = a->y, .pre = pre, .a = s->a};
    struct rmsnorm_bwd_args norm = {.dy = a->dh,
                                    .x = s->a,
                                    .w = a->gain,
                                    .rstd = s->rstd,
                                    .dx = s->da,
                                    .dw = a->dgain,
                                    .zero_centered = a->zero_centered,
                                    .acc_dw = a->acc_dgain};
    struct mhc_aggregate_bwd_args aggregate = {
        .da = s->da, .x = a->y, .pre = pre, .dx = s->g, .dpre = s->dpre, .acc_dx = true};
    TRY(mhc_aggregate_fwd_ref(l, &again));
    TRY(rmsnorm_bwd_ref(l, &norm));
    TRY(mhc_aggregate_bwd_ref(l, &aggregate));
    for (int64_t r = 0; present(&a->dcoef) && r < rows; r++)
        for (int64_t i = 0; i < a->rule.streams; i++)
            f64_row(&s->dpre, r)[i] += f64_row(&a->dcoef, r)[i];
    return ST_OK;
}

/* dz, and its share of the stream's gradient. */
static int through_coefficients(struct lane *l, const struct mhc_boundary_bwd_args *a, const struct scratch *s)
{
    int64_t n = a->rule.streams;
    struct mhc_gates_fwd_args again = {.p = p_of(&a->rule, &a->stat),
                                       .rho = rho_of(&a->rule, &a->stat),
                                       .a_pre = a->a_pre,
                                       .a_post = a->a_post,
                                       .a_res = a->a_res,
                                       .beta = a->beta,
                                       .pre = tensor_cols(&s->gates, 0, n),
                                       .post = tensor_cols(&s->gates, n, n),
                                       .logits = s->logits,
                                       .rule = a->rule};
    TRY(mhc_gates_fwd_ref(l, &again));
    struct mhc_gates_bwd_args gates = {.dpre = s->dpre,
                                       .p = again.p,
                                       .rho = again.rho,
                                       .a_pre = a->a_pre,
                                       .a_post = a->a_post,
                                       .a_res = a->a_res,
                                       .beta = a->beta,
                                       .dp = s->dp,
                                       .drho = s->drho,
                                       .dz = a->dz,
                                       .rule = a->rule};
    if (present(&a->dcoef)) {
        struct mhc_sinkhorn_bwd_args sinkhorn = {
            .dres = res_of(&a->rule, &a->dcoef), .logits = s->logits, .dlogits = s->logits, .rule = a->rule};
        TRY(mhc_sinkhorn_bwd_ref(l, &sinkhorn));
        gates.dpost = post_of(&a->rule, &a->dcoef);
        gates.dlogits = s->logits;
    }
    TRY(mhc_gates_bwd_ref(l, &gates));
    struct mhc_project_bwd_args project = {.dp = s->dp,
                                           .drho = s->drho,
                                           .x = a->y,
                                           .w = a->w,
                                           .rho = again.rho,
                                           .dx = s->g,
                                           .acc_dx = true,
                                           .root_eps = a->rule.root_eps};
    return mhc_project_bwd_ref(l, &project);
}

int mhc_boundary_bwd_ref(struct lane *l, const struct mhc_boundary_bwd_args *a)
{
    TRY(mhc_boundary_bwd_check(a, l->err));
    TRY(check_work("mhc_boundary_bwd", &a->work, mhc_boundary_bwd_work_ref(a), l->err));
    int64_t rows = a->dx.dim[0], k = width_of(a), n = a->rule.streams, d = k / n;
    for (int64_t c = 0; rows == 0 && c < d; c++) { /* nothing to sum */
        if (present(&a->dgain) && !a->acc_dgain)
            ((double *)a->dgain.data)[c] = 0;
        if (present(&a->dbias) && !a->acc_dbias)
            ((double *)a->dbias.data)[c] = 0;
    }
    if (rows == 0)
        return ST_OK;
    struct scratch s = divide_work(a);
    TRY(through_norm(l, a, &s));
    TRY(through_coefficients(l, a, &s));
    if (mhc_is_first_bwd(a)) {
        struct mhc_expand_bwd_args expand = {.dy = s.g, .dx = a->dx};
        return mhc_expand_bwd_ref(l, &expand);
    }
    if (!present(&a->f)) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < k; c++)
                f64_row(&a->dx, r)[c] = f64_row(&s.g, r)[c];
        return ST_OK;
    }
    struct mhc_combine_bwd_args combine = {.dy = s.g,
                                           .x = a->x,
                                           .f = a->f,
                                           .bias = a->bias,
                                           .post = post_of(&a->rule, &a->coef_in),
                                           .res = res_of(&a->rule, &a->coef_in),
                                           .dx = a->dx,
                                           .df = a->df,
                                           .dpre = pre_of(&a->rule, &a->dcoef_in),
                                           .dpost = post_of(&a->rule, &a->dcoef_in),
                                           .dres = res_of(&a->rule, &a->dcoef_in),
                                           .dbias = a->dbias,
                                           .rule = a->rule,
                                           .drop = a->drop,
                                           .acc_dbias = a->acc_dbias};
    return mhc_combine_bwd_ref(l, &combine);
}

int mhc_boundary_dw_ref(struct lane *l, const struct mhc_boundary_dw_args *a)
{
    TRY(mhc_boundary_dw_check(a, l->err));
    int64_t n = a->rule.streams, logits = mhc_logits(n), k = a->y.dim[1];
    double *dbeta = a->dbeta.data;
    const struct tensor *const alpha[3] = {&a->a_pre, &a->a_post, &a->a_res}, *const dalpha[3] = {
                                                                                  &a->da_pre, &a->da_post, &a->da_res};
    for (int64_t i = 0; !a->acc_dw && i < logits; i++)
        for (int64_t c = 0; c < k; c++)
            f64_row(&a->dw, i)[c] = 0;
    for (int64_t i = 0; !mhc_boundary_adds(a) && i < logits; i++)
        dbeta[i] = 0;
    for (int i = 0; !mhc_boundary_adds(a) && i < 3; i++)
        ((double *)dalpha[i]->data)[0] = 0;
    for (int64_t r = 0; r < a->y.dim[0]; r++) {
        const double *dz = f64_row(&a->dz, r), *stat = f64_row(&a->stat, r), *y = f64_row(&a->y, r);
        double q = 1 / (stat[logits] + MHC_EPS);
        for (int64_t i = 0; i < logits; i++) {
            int group = i < n ? 0 : i < 2 * n ? 1 : 2;
            double dp = dz[i] * ((const double *)alpha[group]->data)[0] * q;
            dbeta[i] += dz[i];
            ((double *)dalpha[group]->data)[0] += dz[i] * stat[i] * q;
            for (int64_t c = 0; c < k; c++)
                f64_row(&a->dw, i)[c] += dp * y[c];
        }
    }
    return ST_OK;
}

static double health_dot(const void *p, const void *q, int64_t d)
{
    const double *x = p, *y = q;
    double sum = 0;
    for (int64_t c = 0; c < d; c++)
        sum += x[c] * y[c];
    return sum;
}

int mhc_health_ref(struct lane *l, const struct mhc_health_args *a)
{
    TRY(mhc_health_check(a, l->err));
    mhc_health(a, health_dot);
    return ST_OK;
}
