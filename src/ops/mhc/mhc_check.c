/* Argument checks of the mhc ops; see mhc.h. */
#include "ops/check.h"
#include "ops/dropout/dropout.h"
#include "ops/mhc/mhc.h"
#include "ops/ops.h"

static int rule_check(const char *op, const struct mhc_rule *r, struct err *e)
{
    if (r->streams < 2 || r->streams > MHC_MAX_STREAMS)
        return err_set(e, ST_INVALID, "%s: %lld streams, expected 2 to %d", op, (long long)r->streams, MHC_MAX_STREAMS);
    if (r->iterations < 1 || r->iterations > MHC_MAX_ITERATIONS)
        return err_set(e, ST_INVALID, "%s: %lld Sinkhorn iterations, expected 1 to %d", op, (long long)r->iterations,
                       MHC_MAX_ITERATIONS);
    if (r->profile != MHC_D && r->profile != MHC_S)
        return err_set(e, ST_INVALID, "%s: profile %d is neither D nor S", op, (int)r->profile);
    return ST_OK;
}

static int refuse_if(const char *op, bool wrong, const char *what, struct err *e)
{
    return wrong ? err_set(e, ST_INVALID, "%s: %s", op, what) : ST_OK;
}

/* The width of a stream tensor must be a multiple of the number of streams: K = n C. */
static int width_check(const char *op, int64_t k, int64_t n, struct err *e)
{
    if (n >= 1 && k % n == 0)
        return ST_OK;
    return err_set(e, ST_INVALID, "%s: the streams have %lld channels in all, not a multiple of %lld streams", op,
                   (long long)k, (long long)n);
}

static int drop_check(const char *op, const struct dropout_rule *r, const struct tensor *like, struct err *e)
{
    struct dropout_args d = {.x = *like, .y = *like, .rule = *r};
    int st = dropout_check(&d, e);
    return st != ST_OK ? (err_in(e, "%s", op), st) : ST_OK;
}

int mhc_project_fwd_check(const struct mhc_project_fwd_args *a, struct err *e)
{
    const char *op = "mhc_project_fwd";
    enum dtype real = a->x.dtype, wide = wide_of(real);
    CHECK_T(op, "x", &a->x, real, 2, -1, -1);
    CHECK_T(op, "w", &a->w, wide, 2, -1, a->x.dim[1]);
    CHECK_T(op, "p", &a->p, wide, 2, a->x.dim[0], a->w.dim[0]);
    CHECK_T(op, "rho", &a->rho, wide, 2, a->x.dim[0], 1);
    return ST_OK;
}

int mhc_project_bwd_check(const struct mhc_project_bwd_args *a, struct err *e)
{
    const char *op = "mhc_project_bwd";
    enum dtype real = a->x.dtype, wide = wide_of(real);
    CHECK_T(op, "x", &a->x, real, 2, -1, -1);
    int64_t rows = a->x.dim[0], k = a->x.dim[1];
    CHECK_T(op, "w", &a->w, wide, 2, -1, k);
    CHECK_T(op, "dp", &a->dp, wide, 2, rows, a->w.dim[0]);
    CHECK_T(op, "drho", &a->drho, wide, 2, rows, 1);
    CHECK_T(op, "rho", &a->rho, wide, 2, rows, 1);
    CHECK_T(op, "dx", &a->dx, real, 2, rows, k);
    CHECK_OPT(op, "dw", &a->dw, wide, 2, a->w.dim[0], k);
    return ST_OK;
}

int mhc_gates_fwd_check(const struct mhc_gates_fwd_args *a, struct err *e)
{
    const char *op = "mhc_gates_fwd";
    enum dtype wide = a->p.dtype;
    TRY(rule_check(op, &a->rule, e));
    int64_t n = a->rule.streams;
    CHECK_T(op, "p", &a->p, wide, 2, -1, mhc_logits(n));
    int64_t rows = a->p.dim[0];
    CHECK_T(op, "rho", &a->rho, wide, 2, rows, 1);
    CHECK_T(op, "a_pre", &a->a_pre, wide, 1, 1);
    CHECK_T(op, "a_post", &a->a_post, wide, 1, 1);
    CHECK_T(op, "a_res", &a->a_res, wide, 1, 1);
    CHECK_T(op, "beta", &a->beta, wide, 1, mhc_logits(n));
    CHECK_T(op, "pre", &a->pre, wide, 2, rows, n);
    CHECK_T(op, "post", &a->post, wide, 2, rows, n);
    CHECK_T(op, "logits", &a->logits, wide, 2, rows, n * n);
    return ST_OK;
}

int mhc_gates_bwd_check(const struct mhc_gates_bwd_args *a, struct err *e)
{
    const char *op = "mhc_gates_bwd";
    enum dtype wide = a->p.dtype;
    TRY(rule_check(op, &a->rule, e));
    int64_t n = a->rule.streams;
    CHECK_T(op, "p", &a->p, wide, 2, -1, mhc_logits(n));
    int64_t rows = a->p.dim[0];
    CHECK_OPT(op, "dpre", &a->dpre, wide, 2, rows, n);
    CHECK_OPT(op, "dpost", &a->dpost, wide, 2, rows, n);
    CHECK_OPT(op, "dlogits", &a->dlogits, wide, 2, rows, n * n);
    CHECK_T(op, "rho", &a->rho, wide, 2, rows, 1);
    CHECK_T(op, "a_pre", &a->a_pre, wide, 1, 1);
    CHECK_T(op, "a_post", &a->a_post, wide, 1, 1);
    CHECK_T(op, "a_res", &a->a_res, wide, 1, 1);
    CHECK_T(op, "beta", &a->beta, wide, 1, mhc_logits(n));
    CHECK_T(op, "dp", &a->dp, wide, 2, rows, mhc_logits(n));
    CHECK_T(op, "drho", &a->drho, wide, 2, rows, 1);
    CHECK_OPT(op, "dz", &a->dz, wide, 2, rows, mhc_logits(n));
    bool sums = present(&a->dbeta);
    TRY(refuse_if(op, present(&a->da_pre) != sums || present(&a->da_post) != sums || present(&a->da_res) != sums,
                  "da_pre, da_post, da_res and dbeta must be given together or not at all", e));
    CHECK_OPT(op, "da_pre", &a->da_pre, wide, 1, 1);
    CHECK_OPT(op, "da_post", &a->da_post, wide, 1, 1);
    CHECK_OPT(op, "da_res", &a->da_res, wide, 1, 1);
    CHECK_OPT(op, "dbeta", &a->dbeta, wide, 1, mhc_logits(n));
    return ST_OK;
}

int mhc_sinkhorn_fwd_check(const struct mhc_sinkhorn_fwd_args *a, struct err *e)
{
    const char *op = "mhc_sinkhorn_fwd";
    TRY(rule_check(op, &a->rule, e));
    int64_t n = a->rule.streams;
    CHECK_T(op, "logits", &a->logits, a->logits.dtype, 2, -1, n * n);
    CHECK_T(op, "res", &a->res, a->logits.dtype, 2, a->logits.dim[0], n * n);
    return ST_OK;
}

int mhc_sinkhorn_bwd_check(const struct mhc_sinkhorn_bwd_args *a, struct err *e)
{
    const char *op = "mhc_sinkhorn_bwd";
    TRY(rule_check(op, &a->rule, e));
    int64_t n = a->rule.streams;
    CHECK_T(op, "logits", &a->logits, a->logits.dtype, 2, -1, n * n);
    CHECK_T(op, "dres", &a->dres, a->logits.dtype, 2, a->logits.dim[0], n * n);
    CHECK_T(op, "dlogits", &a->dlogits, a->logits.dtype, 2, a->logits.dim[0], n * n);
    return ST_OK;
}

int mhc_aggregate_fwd_check(const struct mhc_aggregate_fwd_args *a, struct err *e)
{
    const char *op = "mhc_aggregate_fwd";
    enum dtype real = a->x.dtype, wide = wide_of(real);
    CHECK_T(op, "x", &a->x, real, 2, -1, -1);
    CHECK_T(op, "pre", &a->pre, wide, 2, a->x.dim[0], -1);
    TRY(width_check(op, a->x.dim[1], a->pre.dim[1], e));
    TRY(refuse_if(op, a->pre.dim[1] > MHC_MAX_STREAMS, "too many streams", e));
    CHECK_T(op, "a", &a->a, real, 2, a->x.dim[0], a->x.dim[1] / a->pre.dim[1]);
    return ST_OK;
}

int mhc_aggregate_bwd_check(const struct mhc_aggregate_bwd_args *a, struct err *e)
{
    const char *op = "mhc_aggregate_bwd";
    enum dtype real = a->x.dtype, wide = wide_of(real);
    CHECK_T(op, "x", &a->x, real, 2, -1, -1);
    int64_t rows = a->x.dim[0];
    CHECK_T(op, "pre", &a->pre, wide, 2, rows, -1);
    TRY(width_check(op, a->x.dim[1], a->pre.dim[1], e));
    TRY(refuse_if(op, a->pre.dim[1] > MHC_MAX_STREAMS, "too many streams", e));
    CHECK_T(op, "da", &a->da, real, 2, rows, a->x.dim[1] / a->pre.dim[1]);
    CHECK_T(op, "dx", &a->dx, real, 2, rows, a->x.dim[1]);
    CHECK_T(op, "dpre", &a->dpre, wide, 2, rows, a->pre.dim[1]);
    return ST_OK;
}

int mhc_combine_fwd_check(const struct mhc_combine_fwd_args *a, struct err *e)
{
    const char *op = "mhc_combine_fwd";
    enum dtype real = a->x.dtype, wide = wide_of(real);
    TRY(rule_check(op, &a->rule, e));
    int64_t n = a->rule.streams;
    CHECK_T(op, "x", &a->x, real, 2, -1, -1);
    TRY(width_check(op, a->x.dim[1], n, e));
    int64_t rows = a->x.dim[0], c = a->x.dim[1] / n;
    CHECK_T(op, "f", &a->f, real, 2, rows, c);
    CHECK_OPT(op, "bias", &a->bias, wide, 1, c);
    CHECK_T(op, "post", &a->post, wide, 2, rows, n);
    CHECK_T(op, "res", &a->res, wide, 2, rows, n * n);
    CHECK_T(op, "y", &a->y, real, 2, rows, a->x.dim[1]);
    return drop_check(op, &a->drop, &a->x, e);
}

int mhc_combine_bwd_check(const struct mhc_combine_bwd_args *a, struct err *e)
{
    const char *op = "mhc_combine_bwd";
    enum dtype real = a->x.dtype, wide = wide_of(real);
    TRY(rule_check(op, &a->rule, e));
    int64_t n = a->rule.streams;
    CHECK_T(op, "x", &a->x, real, 2, -1, -1);
    TRY(width_check(op, a->x.dim[1], n, e));
    int64_t rows = a->x.dim[0], k = a->x.dim[1], c = k / n;
    CHECK_T(op, "dy", &a->dy, real, 2, rows, k);
    CHECK_T(op, "f", &a->f, real, 2, rows, c);
    CHECK_OPT(op, "bias", &a->bias, wide, 1, c);
    CHECK_T(op, "post", &a->post, wide, 2, rows, n);
    CHECK_T(op, "res", &a->res, wide, 2, rows, n * n);
    CHECK_T(op, "dx", &a->dx, real, 2, rows, k);
    CHECK_T(op, "df", &a->df, real, 2, rows, c);
    CHECK_T(op, "dpost", &a->dpost, wide, 2, rows, n);
    CHECK_T(op, "dres", &a->dres, wide, 2, rows, n * n);
    CHECK_OPT(op, "dbias", &a->dbias, wide, 1, c);
    return drop_check(op, &a->drop, &a->x, e);
}

static int fan_check(const char *op, const struct tensor *one, const struct tensor *many, struct err *e)
{
    CHECK_T(op, "the single stream", one, one->dtype, 2, -1, -1);
    CHECK_T(op, "the streams", many, one->dtype, 2, one->dim[0], -1);
    return one->dim[1] == 0 ? refuse_if(op, many->dim[1] != 0, "widths differ", e)
                            : width_check(op, many->dim[1], one->dim[1], e);
}

int mhc_expand_fwd_check(const struct mhc_expand_fwd_args *a, struct err *e)
{
    return fan_check("mhc_expand_fwd", &a->x, &a->y, e);
}

int mhc_expand_bwd_check(const struct mhc_expand_bwd_args *a, struct err *e)
{
    return fan_check("mhc_expand_bwd", &a->dx, &a->dy, e);
}

int mhc_contract_fwd_check(const struct mhc_contract_fwd_args *a, struct err *e)
{
    const char *op = "mhc_contract_fwd";
    TRY(fan_check(op, &a->y, &a->x, e));
    if (!present(&a->w))
        return refuse_if(op, present(&a->base) || present(&a->scale), "base or scale is given without w", e);
    enum dtype real = a->x.dtype, wide = wide_of(real);
    CHECK_T(op, "w", &a->w, wide, 2, -1, a->x.dim[1]);
    int64_t n = a->w.dim[0];
    TRY(refuse_if(op, n < 1 || n > MHC_MAX_STREAMS || n * a->y.dim[1] != a->x.dim[1],
                  "w must have as many rows as there are streams", e));
    CHECK_T(op, "base", &a->base, wide, 1, n);
    CHECK_T(op, "scale", &a->scale, wide, 1, 1);
    CHECK_T(op, "m", &a->m, wide, 2, a->x.dim[0], n);
    CHECK_T(op, "rstd", &a->rstd, wide, 2, a->x.dim[0], 1);
    return ST_OK;
}

int mhc_contract_bwd_check(const struct mhc_contract_bwd_args *a, struct err *e)
{
    const char *op = "mhc_contract_bwd";
    enum dtype real = a->dx.dtype, wide = wide_of(real);
    TRY(fan_check(op, &a->dy, &a->dx, e));
    if (!present(&a->w))
        return refuse_if(op, present(&a->dw) || present(&a->dbase) || present(&a->dscale), "gradients of w are wanted without w", e);
    int64_t rows = a->dx.dim[0], k = a->dx.dim[1];
    CHECK_T(op, "x", &a->x, real, 2, rows, k);
    CHECK_T(op, "w", &a->w, wide, 2, -1, k);
    int64_t n = a->w.dim[0];
    TRY(refuse_if(op, n < 1 || n > MHC_MAX_STREAMS || n * a->dy.dim[1] != k, "w must have as many rows as there are streams", e));
    CHECK_T(op, "base", &a->base, wide, 1, n);
    CHECK_T(op, "scale", &a->scale, wide, 1, 1);
    CHECK_T(op, "m", &a->m, wide, 2, rows, n);
    CHECK_T(op, "rstd", &a->rstd, wide, 2, rows, 1);
    CHECK_T(op, "dw", &a->dw, wide, 2, n, k);
    CHECK_T(op, "dbase", &a->dbase, wide, 1, n);
    CHECK_T(op, "dscale", &a->dscale, wide, 1, 1);
    return ST_OK;
}

/* Parameters of the mapping and what it made, of a boundary over rows x k. */
static int mapping_check(const char *op, const struct mhc_boundary_fwd_args *a, int64_t rows, int64_t k, enum dtype wide,
                         struct err *e)
{
    int64_t n = a->rule.streams, logits = mhc_logits(n);
    if (!a->reuse) {
        CHECK_T(op, "w", &a->w, wide, 2, logits, k);
        CHECK_T(op, "a_pre", &a->a_pre, wide, 1, 1);
        CHECK_T(op, "a_post", &a->a_post, wide, 1, 1);
        CHECK_T(op, "a_res", &a->a_res, wide, 1, 1);
        CHECK_T(op, "beta", &a->beta, wide, 1, logits);
    }
    CHECK_T(op, "stat", &a->stat, wide, 2, rows, logits + 2);
    CHECK_T(op, "coef", &a->coef, wide, 2, rows, logits);
    return ST_OK;
}

int mhc_boundary_fwd_check(const struct mhc_boundary_fwd_args *a, struct err *e)
{
    const char *op = "mhc_boundary_fwd";
    enum dtype real = a->x.dtype, wide = wide_of(real);
    TRY(rule_check(op, &a->rule, e));
    int64_t n = a->rule.streams;
    CHECK_T(op, "x", &a->x, real, 2, -1, -1);
    bool closes = present(&a->f), enters = mhc_enters_fwd(a);
    int64_t rows = a->x.dim[0], k = enters ? n * a->x.dim[1] : a->x.dim[1], c = k / n;
    TRY(width_check(op, k, n, e));
    TRY(refuse_if(op, closes != present(&a->coef_in) || (closes && !present(&a->y)),
                  "f, coef_in and y must be given together, or y alone, or none of them", e));
    TRY(refuse_if(op, enters && a->reuse, "nothing can be reused where a stream enters", e));
    TRY(refuse_if(op, !closes && present(&a->bias), "bias is given without f", e));
    CHECK_OPT(op, "f", &a->f, real, 2, rows, c);
    CHECK_OPT(op, "bias", &a->bias, wide, 1, c);
    CHECK_OPT(op, "coef_in", &a->coef_in, wide, 2, rows, mhc_logits(n));
    CHECK_OPT(op, "y", &a->y, real, 2, rows, k);
    CHECK_OPT(op, "gain", &a->gain, wide, 1, c);
    TRY(refuse_if(op, !a->reuse && !present(&a->h), "h is missing", e));
    CHECK_OPT(op, "h", &a->h, real, 2, rows, c);
    if (present(&a->h))
        TRY(mapping_check(op, a, rows, k, wide, e));
    return closes ? drop_check(op, &a->drop, &a->x, e) : ST_OK;
}

int mhc_boundary_bwd_check(const struct mhc_boundary_bwd_args *a, struct err *e)
{
    const char *op = "mhc_boundary_bwd";
    enum dtype real = a->dx.dtype, wide = wide_of(real);
    TRY(rule_check(op, &a->rule, e));
    int64_t n = a->rule.streams, logits = mhc_logits(n);
    CHECK_T(op, "dx", &a->dx, real, 2, -1, -1);
    bool closes = present(&a->f), enters = mhc_enters_bwd(a);
    int64_t rows = a->dx.dim[0], k = enters ? n * a->dx.dim[1] : a->dx.dim[1], c = k / n;
    TRY(width_check(op, k, n, e));
    CHECK_T(op, "dh", &a->dh, real, 2, rows, c);
    CHECK_OPT(op, "dy", &a->dy, real, 2, rows, k);
    CHECK_OPT(op, "dcoef", &a->dcoef, wide, 2, rows, logits);
    CHECK_T(op, "y", &a->y, real, 2, rows, k);
    CHECK_OPT(op, "gain", &a->gain, wide, 1, c);
    const struct mhc_boundary_fwd_args m = {.w = a->w, .a_pre = a->a_pre, .a_post = a->a_post, .a_res = a->a_res, .beta = a->beta,
                                            .stat = a->stat, .coef = a->coef, .rule = a->rule};
    TRY(mapping_check(op, &m, rows, k, wide, e));
    CHECK_T(op, "dz", &a->dz, wide, 2, rows, logits);
    CHECK_OPT(op, "products", &a->products, wide, 2, logits + 1, k);
    CHECK_OPT(op, "ready", &a->ready, DT_U8, 1, -1);
    CHECK_OPT(op, "dgain", &a->dgain, wide, 1, c);
    TRY(refuse_if(op, present(&a->dgain) != present(&a->gain), "dgain and gain must be given together or not at all", e));
    TRY(refuse_if(op, (closes && !present(&a->x)) || closes != present(&a->coef_in) || closes != present(&a->df) || closes != present(&a->dcoef_in),
                  "x, f, coef_in, df and dcoef_in must be given together, or x alone, or none of them", e));
    TRY(refuse_if(op, !closes && (present(&a->bias) || present(&a->dbias)), "bias is given without f", e));
    CHECK_OPT(op, "x", &a->x, real, 2, rows, closes ? k : c);
    if (!closes)
        return ST_OK;
    CHECK_T(op, "f", &a->f, real, 2, rows, c);
    CHECK_OPT(op, "bias", &a->bias, wide, 1, c);
    CHECK_T(op, "coef_in", &a->coef_in, wide, 2, rows, logits);
    CHECK_T(op, "df", &a->df, real, 2, rows, c);
    CHECK_T(op, "dcoef_in", &a->dcoef_in, wide, 2, rows, logits);
    CHECK_OPT(op, "dbias", &a->dbias, wide, 1, c);
    return drop_check(op, &a->drop, &a->dx, e);
}

int mhc_boundary_ready_check(const struct mhc_boundary_bwd_args *a, struct err *e)
{
    const char *op = "mhc_boundary_ready";
    enum dtype wide = wide_of(a->dx.dtype);
    TRY(rule_check(op, &a->rule, e));
    int64_t rows = a->dx.dim[0], k = a->dx.dim[1];
    TRY(width_check(op, k, a->rule.streams, e));
    const struct mhc_boundary_fwd_args m = {.w = a->w, .a_pre = a->a_pre, .a_post = a->a_post, .a_res = a->a_res, .beta = a->beta,
                                            .stat = a->stat, .coef = a->coef, .rule = a->rule};
    TRY(mapping_check(op, &m, rows, k, wide, e));
    CHECK_OPT(op, "dcoef", &a->dcoef, wide, 2, rows, mhc_logits(a->rule.streams));
    CHECK_T(op, "ready", &a->ready, DT_U8, 1, -1);
    return ST_OK;
}

int mhc_boundary_dw_check(const struct mhc_boundary_dw_args *a, struct err *e)
{
    const char *op = "mhc_boundary_dw";
    enum dtype real = a->y.dtype, wide = wide_of(real);
    TRY(rule_check(op, &a->rule, e));
    int64_t logits = mhc_logits(a->rule.streams);
    CHECK_T(op, "y", &a->y, real, 2, -1, -1);
    int64_t rows = a->y.dim[0], k = a->y.dim[1];
    CHECK_T(op, "dz", &a->dz, wide, 2, rows, logits);
    CHECK_OPT(op, "products", &a->products, wide, 2, logits + 1, k);
    CHECK_T(op, "stat", &a->stat, wide, 2, rows, logits + 2);
    CHECK_T(op, "a_pre", &a->a_pre, wide, 1, 1);
    CHECK_T(op, "a_post", &a->a_post, wide, 1, 1);
    CHECK_T(op, "a_res", &a->a_res, wide, 1, 1);
    CHECK_T(op, "dw", &a->dw, wide, 2, logits, k);
    CHECK_T(op, "da_pre", &a->da_pre, wide, 1, 1);
    CHECK_T(op, "da_post", &a->da_post, wide, 1, 1);
    CHECK_T(op, "da_res", &a->da_res, wide, 1, 1);
    CHECK_T(op, "dbeta", &a->dbeta, wide, 1, logits);
    return ST_OK;
}

int mhc_health_check(const struct mhc_health_args *a, struct err *e)
{
    const char *op = "mhc_health";
    TRY(rule_check(op, &a->rule, e));
    int64_t n = a->rule.streams;
    TRY(refuse_if(op, a->layers < 1 || a->layers > MHC_HEALTH_LAYERS, "too many mixes at once, or none", e));
    const struct tensor *coef = &a->layer[0].coef, *y = &a->layer[0].y;
    for (int l = 0; l < a->layers; l++) {
        CHECK_T(op, "coef", &a->layer[l].coef, coef->dtype, 2, l > 0 ? coef->dim[0] : -1, mhc_logits(n));
        CHECK_T(op, "y", &a->layer[l].y, y->dtype, 2, coef->dim[0], l > 0 ? y->dim[1] : -1);
        for (int i = 0; i < MHC_HEALTH_ITEMS; i++)
            CHECK_T(op, "out", &a->layer[l].out[i], DT_F64, 1, 1);
    }
    TRY(width_check(op, y->dim[1], n, e));
    CHECK_OPT(op, "comp_in", &a->comp_in, coef->dtype, 2, MHC_HEALTH_ROWS, n * n);
    CHECK_T(op, "comp", &a->comp, coef->dtype, 2, MHC_HEALTH_ROWS, n * n);
    return ST_OK;
}
