/* mHC: pre, post and the boundary between two sublayers, forward and backward, as calls of the ops in ops/mhc. With a
 * norm, pre is a boundary that closes nothing; without one it is the chain of primitives. */
#include "lib/lib_int.h"

#include "ops/mhc/mhc.h"
#include "ops/mhc/mhc_path.h"

#include <math.h>

struct sizes {
    int64_t rows, n, d, k, logits;
};

static int sizes_of(struct call *c, const struct braidk_mhc *m, const struct braidk_tensor *x, struct sizes *s)
{
    TRY(begin(c, "x", x));
    if (m->streams < 2 || m->streams > MHC_MAX_STREAMS)
        return invalid(c, "argument streams is %d, expected 2 to %d", (int)m->streams, MHC_MAX_STREAMS);
    if (m->profile != BRAIDK_MHC_D && m->profile != BRAIDK_MHC_S)
        return invalid(c, "argument profile is %d, expected 0 (D) or 1 (S)", (int)m->profile);
    if (x->rank != 2 || x->shape[1] <= 0 || x->shape[1] % m->streams != 0)
        return invalid(c, "argument x must be [rows, streams * channels] with %d streams", (int)m->streams);
    *s = (struct sizes){x->shape[0], m->streams, x->shape[1] / m->streams, x->shape[1], mhc_logits(m->streams)};
    return ST_OK;
}

static int rule_of(struct call *c, const struct braidk_mhc *m, struct mhc_rule *r)
{
    if (m->iterations < 1 || m->iterations > MHC_MAX_ITERATIONS)
        return invalid(c, "argument iterations is %d, expected 1 to %d", (int)m->iterations, MHC_MAX_ITERATIONS);
    if (!(m->root_eps >= 0) || !isfinite(m->root_eps) || !(m->norm_eps >= 0) || !isfinite(m->norm_eps))
        return invalid(c, "argument root_eps or norm_eps is negative or not a number");
    *r = (struct mhc_rule){.streams = m->streams,
                           .profile = m->profile == BRAIDK_MHC_S ? MHC_S : MHC_D,
                           .iterations = m->iterations,
                           .root_eps = m->root_eps};
    return ST_OK;
}

/* ---- which kernels --------------------------------------------------------------------------- */

static bool whole(const struct tensor *t)
{
    return t->rank == 0 || (tensor_is_dense(t) && (uintptr_t)t->data % 16 == 0);
}

/* Are these kernels fused ones, which need no workspace of cuBLASLt? What is not dense and aligned may be slower. */
static int choose(struct call *c, const struct sizes *s, const struct mhc_rule *r, bool closes, bool maps, bool aligned)
{
    struct mhc_shape shape = {.real = real_of(c),
                              .streams = r->streams,
                              .channels = s->d,
                              .aligned = aligned,
                              .w_aligned = aligned,
                              .closes = closes,
                              .maps = maps};
    struct mhc_device device = c->gpu.hopper ? mhc_some_hopper : mhc_some_gpu;
    if (!on_gpu(c))
        return ST_OK;
    c->products = c->products || mhc_path_of(&shape, &device).path == MHC_PATH_ROWS;
    if (!c->describe)
        return ST_OK;
    device.multiprocessors = c->gpu.sm_count;
    if (c->gpu.hopper && mhc_may_cluster(&shape))
        TRY(c->ops->mhc_boundary_clusters(&c->lane, s->d, &device.in_clusters));
    struct mhc_choice chosen = mhc_path_of(&shape, &device);
    explain(c, "%s: %s", chosen.kernels, chosen.why);
    return ST_OK;
}

/* ---- parameters ------------------------------------------------------------------------------ */

struct params {
    struct tensor fn, base, scale, norm_weight;
};
#define TAKE_PARAMS(c, a, s, p)                                                                                        \
    do {                                                                                                               \
        struct tensor fn = {0}, base = {0}, scale = {0}, norm_weight = {0};                                            \
        TAKE(c, a, fn, wide_type(c), (s).logits, (s).k);                                                               \
        TAKE(c, a, base, wide_type(c), (s).logits);                                                                    \
        TAKE(c, a, scale, wide_type(c), 3);                                                                            \
        TAKE_OPT(c, a, norm_weight, wide_type(c), (s).d);                                                              \
        if ((a)->mhc.norm == 0 && (a)->norm_weight.rank > 0)                                                           \
            return invalid(c, "argument norm_weight is given, but norm is 0");                                         \
        (p) = (struct params){fn, base, scale, norm_weight};                                                           \
    } while (0)
/* Their gradients; dnorm_weight iff norm_weight. */
#define TAKE_GRADS(c, a, s, p, g)                                                                                      \
    do {                                                                                                               \
        struct tensor dfn = {0}, dbase = {0}, dscale = {0}, dnorm_weight = {0};                                        \
        TAKE(c, a, dfn, wide_type(c), (s).logits, (s).k);                                                              \
        TAKE(c, a, dbase, wide_type(c), (s).logits);                                                                   \
        TAKE(c, a, dscale, wide_type(c), 3);                                                                           \
        if ((p).norm_weight.rank > 0)                                                                                  \
            TAKE(c, a, dnorm_weight, wide_type(c), (s).d);                                                             \
        (g) = (struct params){dfn, dbase, dscale, dnorm_weight};                                                       \
    } while (0)

static struct tensor pre_of(const struct sizes *s, const struct tensor *t) { return tensor_cols(t, 0, s->n); }
static struct tensor post_of(const struct sizes *s, const struct tensor *t) { return tensor_cols(t, s->n, s->n); }
static struct tensor comb_of(const struct sizes *s, const struct tensor *t)
{
    return tensor_cols(t, 2 * s->n, s->n * s->n);
}

/* ---- pre without a norm: primitives ---------------------------------------------------------- */

static struct mhc_gates_fwd_args gates_of(const struct sizes *s, const struct mhc_rule *r, const struct params *p,
                                          const struct tensor *stat)
{
    return (struct mhc_gates_fwd_args){.p = tensor_cols(stat, 0, s->logits),
                                       .rho = tensor_cols(stat, s->logits, 1),
                                       .a_pre = element(&p->scale, 0),
                                       .a_post = element(&p->scale, 1),
                                       .a_res = element(&p->scale, 2),
                                       .beta = p->base,
                                       .rule = *r};
}

static int plain_pre(struct call *c, const struct sizes *s, const struct mhc_rule *r, const struct params *p,
                     const struct tensor *x, const struct tensor *h, const struct tensor *coef,
                     const struct tensor *stat)
{
    struct mhc_project_fwd_args project = {.x = *x,
                                           .w = p->fn,
                                           .p = tensor_cols(stat, 0, s->logits),
                                           .rho = tensor_cols(stat, s->logits, 1),
                                           .root_eps = r->root_eps};
    struct mhc_gates_fwd_args gates = gates_of(s, r, p, stat);
    struct mhc_sinkhorn_fwd_args sinkhorn = {.logits = comb_of(s, coef), .res = comb_of(s, coef), .rule = *r};
    struct mhc_aggregate_fwd_args aggregate = {.x = *x, .pre = pre_of(s, coef), .a = *h};
    gates.pre = pre_of(s, coef);
    gates.post = post_of(s, coef);
    gates.logits = comb_of(s, coef);
    if (c->describe)
        explain(c, "separate kernels: h without a norm has no fused ones");
    RUN_PLAIN(c, mhc_project_fwd, &project);
    RUN_PLAIN(c, mhc_gates_fwd, &gates);
    RUN_PLAIN(c, mhc_sinkhorn_fwd, &sinkhorn);
    RUN_PLAIN(c, mhc_aggregate_fwd, &aggregate);
    return ST_OK;
}

struct pre_grads {
    struct tensor dh, dcoef, dx;
    struct params d;
};

static int plain_pre_bwd(struct call *c, const struct sizes *s, const struct mhc_rule *r, const struct params *p,
                         const struct tensor *x, const struct tensor *coef, const struct tensor *stat,
                         const struct pre_grads *g)
{
    enum dtype wide = wide_type(c);
    struct tensor dpre = PART(c, wide, s->rows, s->n), again = PART(c, wide, s->rows, s->logits),
                  dp = PART(c, wide, s->rows, s->logits), drho = PART(c, wide, s->rows, 1);
    struct mhc_aggregate_bwd_args aggregate = {.da = g->dh, .x = *x, .pre = pre_of(s, coef), .dx = g->dx, .dpre = dpre};
    struct mhc_gates_fwd_args logits = gates_of(s, r, p, stat);
    struct mhc_gates_bwd_args gates = {.dpre = dpre,
                                       .p = logits.p,
                                       .rho = logits.rho,
                                       .a_pre = logits.a_pre,
                                       .a_post = logits.a_post,
                                       .a_res = logits.a_res,
                                       .beta = logits.beta,
                                       .dp = dp,
                                       .drho = drho,
                                       .da_pre = element(&g->d.scale, 0),
                                       .da_post = element(&g->d.scale, 1),
                                       .da_res = element(&g->d.scale, 2),
                                       .dbeta = g->d.base,
                                       .rule = *r};
    struct mhc_project_bwd_args project = {.dp = dp,
                                           .drho = drho,
                                           .x = *x,
                                           .w = p->fn,
                                           .rho = logits.rho,
                                           .dx = g->dx,
                                           .acc_dx = true,
                                           .dw = g->d.fn,
                                           .root_eps = r->root_eps};
    c->products = true;
    RUN_PLAIN(c, mhc_aggregate_bwd, &aggregate);
    if (g->dcoef.rank > 0) {
        logits.pre = pre_of(s, &again);
        logits.post = post_of(s, &again);
        logits.logits = comb_of(s, &again);
        RUN_PLAIN(c, mhc_gates_fwd, &logits);
        struct mhc_sinkhorn_bwd_args sinkhorn = {
            .dres = comb_of(s, &g->dcoef), .logits = logits.logits, .dlogits = logits.logits, .rule = *r};
        RUN_PLAIN(c, mhc_sinkhorn_bwd, &sinkhorn);
        gates.dpost = post_of(s, &g->dcoef);
        gates.dlogits = logits.logits;
    }
    RUN_PLAIN(c, mhc_gates_bwd, &gates);
    RUN(c, mhc_project_bwd, &project);
    return ST_OK;
}

/* ---- the boundary ---------------------------------------------------------------------------- */

static int boundary(struct call *c, struct mhc_boundary_fwd_args *b, const struct params *p)
{
    b->w = p->fn;
    b->a_pre = element(&p->scale, 0);
    b->a_post = element(&p->scale, 1);
    b->a_res = element(&p->scale, 2);
    b->beta = p->base;
    b->gain = p->norm_weight;
    RUN(c, mhc_boundary_fwd, b);
    return ST_OK;
}

static int boundary_bwd(struct call *c, const struct sizes *s, struct mhc_boundary_bwd_args *b, const struct params *p,
                        const struct params *g)
{
    b->w = p->fn;
    b->a_pre = element(&p->scale, 0);
    b->a_post = element(&p->scale, 1);
    b->a_res = element(&p->scale, 2);
    b->beta = p->base;
    b->gain = p->norm_weight;
    b->dgain = g->norm_weight;
    b->dz = PART(c, wide_type(c), s->rows, s->logits);
    if (c->ops->mhc_boundary_products != NULL && c->ops->mhc_boundary_products(b))
        b->products = PART(c, wide_type(c), s->logits + 1, s->k);
    RUN(c, mhc_boundary_bwd, b);
    struct mhc_boundary_dw_args dw = {.dz = b->dz,
                                      .stat = b->stat,
                                      .y = b->y,
                                      .products = b->products,
                                      .a_pre = b->a_pre,
                                      .a_post = b->a_post,
                                      .a_res = b->a_res,
                                      .dw = g->fn,
                                      .da_pre = element(&g->scale, 0),
                                      .da_post = element(&g->scale, 1),
                                      .da_res = element(&g->scale, 2),
                                      .dbeta = g->base,
                                      .rule = b->rule};
    RUN(c, mhc_boundary_dw, &dw);
    return ST_OK;
}

/* ---- pre ------------------------------------------------------------------------------------- */

int lib_mhc_pre(struct call *c, const struct braidk_mhc_pre_args *a)
{
    struct sizes s;
    struct mhc_rule r;
    struct params p;
    struct tensor x, h, coef, stat;
    TRY(sizes_of(c, &a->mhc, &a->x, &s));
    TRY(rule_of(c, &a->mhc, &r));
    TAKE_PARAMS(c, a, s, p);
    TAKE(c, a, x, real_of(c), s.rows, s.k);
    TAKE(c, a, h, real_of(c), s.rows, s.d);
    TAKE(c, a, coef, wide_type(c), s.rows, s.logits);
    TAKE(c, a, stat, wide_type(c), s.rows, s.logits + 2);
    if (a->mhc.norm == 0)
        return plain_pre(c, &s, &r, &p, &x, &h, &coef, &stat);
    TRY(choose(c, &s, &r, false, true, false));
    struct mhc_boundary_fwd_args b = {.x = x, .h = h, .coef = coef, .stat = stat, .rule = r, .eps = a->mhc.norm_eps};
    return boundary(c, &b, &p);
}

int lib_mhc_pre_bwd(struct call *c, const struct braidk_mhc_pre_bwd_args *a)
{
    struct sizes s;
    struct mhc_rule r;
    struct params p, g;
    struct tensor dh, dcoef = {0}, x, coef, stat, dx;
    TRY(sizes_of(c, &a->mhc, &a->x, &s));
    TRY(rule_of(c, &a->mhc, &r));
    TAKE_PARAMS(c, a, s, p);
    TAKE(c, a, x, real_of(c), s.rows, s.k);
    TAKE(c, a, dh, real_of(c), s.rows, s.d);
    TAKE_OPT(c, a, dcoef, wide_type(c), s.rows, s.logits);
    TAKE(c, a, coef, wide_type(c), s.rows, s.logits);
    TAKE(c, a, stat, wide_type(c), s.rows, s.logits + 2);
    TAKE(c, a, dx, real_of(c), s.rows, s.k);
    TAKE_GRADS(c, a, s, p, g);
    if (a->mhc.norm == 0) {
        struct pre_grads out = {.dh = dh, .dcoef = dcoef, .dx = dx, .d = g};
        return plain_pre_bwd(c, &s, &r, &p, &x, &coef, &stat, &out);
    }
    TRY(choose(c, &s, &r, false, false, false));
    struct mhc_boundary_bwd_args b = {
        .dh = dh, .dcoef = dcoef, .stat = stat, .coef = coef, .y = x, .dx = dx, .rule = r};
    return boundary_bwd(c, &s, &b, &p, &g);
}

/* ---- post ------------------------------------------------------------------------------------ */

static struct mhc_combine_fwd_args combine_of(const struct sizes *s, const struct mhc_rule *r, const struct tensor *x,
                                              const struct tensor *f, const struct tensor *coef,
                                              const struct tensor *bias, const struct tensor *y)
{
    return (struct mhc_combine_fwd_args){
        .x = *x, .f = *f, .bias = *bias, .post = post_of(s, coef), .res = comb_of(s, coef), .y = *y, .rule = *r};
}
static struct mhc_combine_bwd_args combine_bwd_of(const struct sizes *s, const struct mhc_combine_fwd_args *f,
                                                  const struct tensor *dy, const struct tensor *dcoef)
{
    return (struct mhc_combine_bwd_args){.dy = *dy,
                                         .x = f->x,
                                         .f = f->f,
                                         .bias = f->bias,
                                         .post = f->post,
                                         .res = f->res,
                                         .dpre = pre_of(s, dcoef),
                                         .dpost = post_of(s, dcoef),
                                         .dres = comb_of(s, dcoef),
                                         .rule = f->rule};
}

int lib_mhc_post(struct call *c, const struct braidk_mhc_post_args *a)
{
    struct sizes s;
    struct tensor x, f, coef, bias = {0}, y;
    TRY(sizes_of(c, &a->mhc, &a->x, &s));
    struct mhc_rule r = {.streams = s.n, .profile = a->mhc.profile == BRAIDK_MHC_S ? MHC_S : MHC_D, .iterations = 1};
    TAKE(c, a, x, real_of(c), s.rows, s.k);
    TAKE(c, a, f, real_of(c), s.rows, s.d);
    TAKE(c, a, coef, wide_type(c), s.rows, s.logits);
    TAKE_OPT(c, a, bias, wide_type(c), s.d);
    TAKE(c, a, y, real_of(c), s.rows, s.k);
    struct mhc_combine_fwd_args combine = combine_of(&s, &r, &x, &f, &coef, &bias, &y);
    RUN_PLAIN(c, mhc_combine_fwd, &combine);
    return ST_OK;
}

int lib_mhc_post_bwd(struct call *c, const struct braidk_mhc_post_bwd_args *a)
{
    struct sizes s;
    struct tensor dy, x, f, coef, bias = {0}, dx, df, dcoef, dbias = {0};
    TRY(sizes_of(c, &a->mhc, &a->x, &s));
    struct mhc_rule r = {.streams = s.n, .profile = a->mhc.profile == BRAIDK_MHC_S ? MHC_S : MHC_D, .iterations = 1};
    TAKE(c, a, dy, real_of(c), s.rows, s.k);
    TAKE(c, a, x, real_of(c), s.rows, s.k);
    TAKE(c, a, f, real_of(c), s.rows, s.d);
    TAKE(c, a, coef, wide_type(c), s.rows, s.logits);
    TAKE_OPT(c, a, bias, wide_type(c), s.d);
    TAKE(c, a, dx, real_of(c), s.rows, s.k);
    TAKE(c, a, df, real_of(c), s.rows, s.d);
    TAKE(c, a, dcoef, wide_type(c), s.rows, s.logits);
    if (bias.rank > 0)
        TAKE(c, a, dbias, wide_type(c), s.d);
    struct mhc_combine_fwd_args combine = combine_of(&s, &r, &x, &f, &coef, &bias, &x);
    struct mhc_combine_bwd_args b = combine_bwd_of(&s, &combine, &dy, &dcoef);
    b.dx = dx;
    b.df = df;
    b.dbias = dbias;
    RUN(c, mhc_combine_bwd, &b);
    return ST_OK;
}

/* ---- boundary -------------------------------------------------------------------------------- */

static int needs_norm(struct call *c, const struct braidk_mhc *m)
{
    return m->norm != 0 ? ST_OK : invalid(c, "argument norm is 0: without a norm call mhc_post, then mhc_pre");
}

int lib_mhc_boundary(struct call *c, const struct braidk_mhc_boundary_args *a)
{
    struct sizes s;
    struct mhc_rule r;
    struct params p;
    struct tensor x, f, coef_in, bias = {0}, y, h, coef, stat;
    TRY(sizes_of(c, &a->mhc, &a->x, &s));
    TRY(rule_of(c, &a->mhc, &r));
    TRY(needs_norm(c, &a->mhc));
    TAKE_PARAMS(c, a, s, p);
    TAKE(c, a, x, real_of(c), s.rows, s.k);
    TAKE(c, a, f, real_of(c), s.rows, s.d);
    TAKE(c, a, coef_in, wide_type(c), s.rows, s.logits);
    TAKE_OPT(c, a, bias, wide_type(c), s.d);
    TAKE(c, a, y, real_of(c), s.rows, s.k);
    TAKE(c, a, h, real_of(c), s.rows, s.d);
    TAKE(c, a, coef, wide_type(c), s.rows, s.logits);
    TAKE(c, a, stat, wide_type(c), s.rows, s.logits + 2);
    bool aligned = whole(&x) && whole(&f) && whole(&coef_in) && whole(&bias) && whole(&y) && whole(&h) &&
                   whole(&coef) && whole(&p.fn) && whole(&p.norm_weight);
    TRY(choose(c, &s, &r, true, true, aligned));
    struct mhc_boundary_fwd_args b = {.x = x,
                                      .f = f,
                                      .bias = bias,
                                      .coef_in = coef_in,
                                      .y = y,
                                      .h = h,
                                      .coef = coef,
                                      .stat = stat,
                                      .rule = r,
                                      .eps = a->mhc.norm_eps};
    return boundary(c, &b, &p);
}

int lib_mhc_boundary_bwd(struct call *c, const struct braidk_mhc_boundary_bwd_args *a)
{
    struct sizes s;
    struct mhc_rule r;
    struct params p, g;
    struct tensor dy = {0}, dh, dcoef = {0}, x, f, coef_in, bias = {0}, y, coef, stat, dx, df, dcoef_in, dbias = {0};
    TRY(sizes_of(c, &a->mhc, &a->x, &s));
    TRY(rule_of(c, &a->mhc, &r));
    TRY(needs_norm(c, &a->mhc));
    TAKE_PARAMS(c, a, s, p);
    TAKE_OPT(c, a, dy, real_of(c), s.rows, s.k);
    TAKE(c, a, dh, real_of(c), s.rows, s.d);
    TAKE_OPT(c, a, dcoef, wide_type(c), s.rows, s.logits);
    TAKE(c, a, x, real_of(c), s.rows, s.k);
    TAKE(c, a, f, real_of(c), s.rows, s.d);
    TAKE(c, a, coef_in, wide_type(c), s.rows, s.logits);
    TAKE_OPT(c, a, bias, wide_type(c), s.d);
    TAKE(c, a, y, real_of(c), s.rows, s.k);
    TAKE(c, a, coef, wide_type(c), s.rows, s.logits);
    TAKE(c, a, stat, wide_type(c), s.rows, s.logits + 2);
    TAKE(c, a, dx, real_of(c), s.rows, s.k);
    TAKE(c, a, df, real_of(c), s.rows, s.d);
    TAKE(c, a, dcoef_in, wide_type(c), s.rows, s.logits);
    if (bias.rank > 0)
        TAKE(c, a, dbias, wide_type(c), s.d);
    TAKE_GRADS(c, a, s, p, g);
    bool aligned = whole(&dy) && whole(&dh) && whole(&dcoef) && whole(&x) && whole(&f) && whole(&coef_in) &&
                   whole(&y) && whole(&coef) && whole(&dx) && whole(&df) && whole(&dcoef_in) && whole(&p.fn) &&
                   whole(&p.norm_weight);
    TRY(choose(c, &s, &r, dbias.rank == 0, false, aligned));
    struct mhc_boundary_bwd_args b = {.dh = dh,
                                      .dy = dy,
                                      .dcoef = dcoef,
                                      .stat = stat,
                                      .coef = coef,
                                      .x = x,
                                      .f = f,
                                      .bias = bias,
                                      .coef_in = coef_in,
                                      .y = y,
                                      .dx = dx,
                                      .df = df,
                                      .dcoef_in = dcoef_in,
                                      .dbias = dbias,
                                      .rule = r};
    return boundary_bwd(c, &s, &b, &p, &g);
}
