/* The plain residual joint: s = x + dropout(f), h = rmsnorm(s), one fused pass (ops/addnorm).
 *
 *   stream  [rows, hidden]  s; the first joint has nothing to add and passes the embedding on
 *   h       [rows, hidden]  normed input of the next core; rstd [rows]
 * backward: dx = ds + norm_backward(dh): the gradient of the stream has this one owner. df equals dx
 * without dropout, and then is the same slot. */
#include "layers/layer.h"
#include "ops/addnorm/addnorm.h"
#include "ops/dropout/dropout.h"

struct joint {
    double eps;
    bool zero_centered;
    double dropout;
    uint64_t key;
    int64_t seq;
};

static struct dropout_rule rule(const struct joint *j, const struct tensor *info)
{
    return (struct dropout_rule){.p = info->data ? j->dropout : 0, .key = j->key, .seq = j->seq, .info = *info};
}

static int joint_fwd(const struct step_ctx *c)
{
    enum { X, F, W, INFO, S, H, RSTD };
    const struct joint *j = c->self;
    struct addnorm_fwd_args a = {.x = c->t[X], .f = c->t[F], .w = c->t[W], .s = c->t[S], .y = c->t[H], .rstd = c->t[RSTD],
                                 .eps = j->eps, .zero_centered = j->zero_centered, .drop = rule(j, &c->t[INFO])};
    return c->ops->addnorm_fwd(c->lane, &a);
}

/* The norm alone, from the stream that was kept. */
static int joint_replay(const struct step_ctx *c)
{
    enum { S, W, H, RSTD };
    const struct joint *j = c->self;
    struct addnorm_fwd_args a = {.x = c->t[S], .w = c->t[W], .y = c->t[H], .rstd = c->t[RSTD], .eps = j->eps,
                                 .zero_centered = j->zero_centered};
    return c->ops->addnorm_fwd(c->lane, &a);
}

static int joint_bwd(const struct step_ctx *c)
{
    enum { DH, DS, S, W, RSTD, INFO, DX, DF, DW, WORK };
    const struct joint *j = c->self;
    struct addnorm_bwd_args a = {.dy = c->t[DH], .ds = c->t[DS], .s = c->t[S], .w = c->t[W], .rstd = c->t[RSTD], .dx = c->t[DX],
                                 .df = c->t[DF], .dw = c->t[DW], .work = c->t[WORK], .zero_centered = j->zero_centered,
                                 .acc_dw = c->add[DW], .drop = rule(j, &c->t[INFO])};
    return c->ops->addnorm_bwd(c->lane, &a);
}

/* The sum alone, in front of a cut. */
static int close_fwd(const struct step_ctx *c)
{
    enum { X, F, INFO, S };
    const struct joint *j = c->self;
    struct addnorm_fwd_args a = {.x = c->t[X], .f = c->t[F], .s = c->t[S], .drop = rule(j, &c->t[INFO])};
    return c->ops->addnorm_fwd(c->lane, &a);
}

static int close_bwd(const struct step_ctx *c)
{
    enum { DS, INFO, DX, DF };
    const struct joint *j = c->self;
    struct addnorm_bwd_args a = {.ds = c->t[DS], .dx = c->t[DX], .df = c->t[DF], .drop = rule(j, &c->t[INFO])};
    return c->ops->addnorm_bwd(c->lane, &a);
}

static slot_id bwd_work(struct build *b)
{
    struct tensor t = tensor_2d(NULL, b->dev->real, b->rows, b->cfg->model.hidden), w = tensor_1d(NULL, b->dev->wide, t.dim[1]);
    struct addnorm_bwd_args a = {.dy = t, .ds = t, .s = t, .w = w, .dx = t, .dw = w};
    return b->ops->addnorm_bwd_work ? build_work(b, "bwd_work", b->ops->addnorm_bwd_work(&a)) : NO_SLOT;
}

static bool drops_out(const struct build *b) { return training(b) && b->cfg->model.dropout > 0; }

static struct joint *sizes(struct build *b)
{
    const struct config_model *c = &b->cfg->model;
    struct joint *j = graph_own(b->g, sizeof *j);
    if (j == NULL)
        return NULL;
    *j = (struct joint){.eps = c->norm_eps, .zero_centered = c->norm_zero_centered, .dropout = drops_out(b) ? c->dropout : 0, .seq = b->seq};
    char site[64];
    snprintf(site, sizeof site, "dropout.joint.%d", b->layer);
    j->key = rng_key((uint64_t)b->cfg->run.seed, site);
    return j;
}

static int residual_declare(struct build *b, const struct sublayer *prev, struct sublayer *next, const char *norm_key, bool last)
{
    const struct config_model *c = &b->cfg->model;
    struct graph *g = b->g;
    struct joint *j = sizes(b);
    if (j == NULL)
        return ST_NOMEM;
    bool closes = prev->f != NO_SLOT, drops = drops_out(b);
    graph_scope(g, b->layer, "joint");

    struct param gain = param_vector(norm_key, c->hidden, c->norm_zero_centered ? INIT_ZERO : INIT_ONE);
    struct weight w = build_weight(b, &gain);
    int64_t d = c->hidden;
    slot_id s = closes ? build_real(b, "stream", b->rows, d) : NO_SLOT, rstd = graph_slot(g, "rstd", tensor_1d(NULL, b->dev->wide, b->rows));
    slot_id info = drops && closes ? b->in.info : NO_SLOT;
    next->x = closes ? s : prev->x;
    next->h = build_real(b, "norm", b->rows, d);
    next->dh = build_grad(b, "dnorm", b->rows, d);
    next->dx = last ? NO_SLOT : build_grad(b, "dstream", b->rows, d);
    next->df = last ? NO_SLOT : drops ? build_grad(b, "df", b->rows, d) : next->dx;
    next->f = NO_SLOT;

    double elems = (double)(b->rows * d), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "joint", LANE_COMPUTE, j);
    GRAPH_PHASE(g, n, PH_FWD, joint_fwd, READS(prev->x), READS(prev->f), READS(w.w), READS(info), WRITES(s), WRITES(next->h), WRITES(rstd));
    graph_cost(g, n, PH_FWD, 5 * elems, (closes ? 4 : 2) * elems * size);
    if (!training(b))
        return g->err.code;
    GRAPH_PHASE(g, n, PH_REPLAY, joint_replay, READS(next->x), READS(w.w), WRITES(next->h), WRITES(rstd));
    graph_cost(g, n, PH_REPLAY, 4 * elems, 2 * elems * size);
    graph_replay(g, next->h, n);
    slot_id df = closes && prev->df != prev->dx ? prev->df : NO_SLOT;
    GRAPH_PHASE(g, n, PH_BWD, joint_bwd, READS(next->dh), READS(next->dx), READS(next->x), READS(w.w), READS(rstd), READS(info),
                WRITES(prev->dx), WRITES(df), ADDS(w.dw), WRITES(bwd_work(b)));
    graph_inplace(g, n, PH_BWD, 1, 6); /* the gradient that came in becomes the one that goes out */
    graph_cost(g, n, PH_BWD, 11 * elems, 4 * elems * size);
    return g->err.code;
}

static int residual_close(struct build *b, const struct sublayer *prev, struct sublayer *next)
{
    struct graph *g = b->g;
    int64_t d = b->cfg->model.hidden;
    *next = *prev;
    if (prev->f == NO_SLOT)
        return ST_OK;
    struct joint *j = sizes(b);
    if (j == NULL)
        return ST_NOMEM;
    graph_scope(g, b->layer, "joint");
    slot_id info = drops_out(b) ? b->in.info : NO_SLOT;
    *next = sublayer_entry(build_real(b, "stream", b->rows, d), build_grad(b, "dstream", b->rows, d), false);
    double elems = (double)(b->rows * d), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "close", LANE_COMPUTE, j);
    GRAPH_PHASE(g, n, PH_FWD, close_fwd, READS(prev->x), READS(prev->f), READS(info), WRITES(next->x));
    graph_inplace(g, n, PH_FWD, 0, 3); /* where nobody looks back */
    graph_cost(g, n, PH_FWD, elems, 3 * elems * size);
    if (!training(b))
        return g->err.code;
    GRAPH_PHASE(g, n, PH_BWD, close_bwd, READS(next->dx), READS(info), WRITES(prev->dx), WRITES(prev->df != prev->dx ? prev->df : NO_SLOT));
    graph_inplace(g, n, PH_BWD, 0, 2);
    graph_cost(g, n, PH_BWD, elems, 2 * elems * size);
    return g->err.code;
}

static void residual_arrive(struct build *b, struct sublayer *entry)
{
    int64_t d = b->cfg->model.hidden;
    *entry = sublayer_entry(build_real(b, "stream", b->rows, d), build_grad(b, "dstream", b->rows, d), false);
}

const struct joint_kind joint_residual = {.name = "residual", .declare = residual_declare, .close = residual_close, .arrive = residual_arrive};
