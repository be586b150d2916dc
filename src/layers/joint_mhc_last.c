/* The last joint of a stack with n streams, and what closes streams in front of a cut; see joint_mhc.c. Where gates are learned and nobody but the head
 * wants the streams, combine, contraction and final norm are one op; otherwise two nodes, between which multi-token prediction takes the streams. */
#include "layers/joint_mhc_int.h"
#include "ops/mhc/mhc.h"
#include "ops/rmsnorm/rmsnorm.h"

#include <math.h>
#include <string.h>

static int combine_bwd(const struct step_ctx *c)
{
    enum { G, X, F, COEF_IN, INFO, DX, DF, DCOEF_IN, WORK };
    const struct joint *j = c->self;
    struct dev *d = c->lane->dev;
    struct mhc_combine_bwd_args a = {
        .dy = c->t[G], .x = c->t[X], .f = c->t[F], .post = post_of(j, &c->t[COEF_IN]), .res = res_of(j, &c->t[COEF_IN]), .dx = c->t[DX],
        .df = c->t[DF], .dpost = post_of(j, &c->t[DCOEF_IN]), .dres = res_of(j, &c->t[DCOEF_IN]), .work = c->t[WORK], .rule = j->rule,
        .drop = drop_rule(j, &c->t[INFO])};
    /* Nothing but the aggregate, which is not this joint's, depends on pre. */
    TRY(d->vt->fill(d, c->t[DCOEF_IN].data, 0, tensor_bytes(&c->t[DCOEF_IN]), c->lane->err));
    return c->ops->mhc_combine_bwd(c->lane, &a);
}

static int contract_fwd(const struct step_ctx *c)
{
    enum { STREAM, FN, BASE, SCALE, GAIN, ONE, M, M_RSTD, H, RSTD };
    const struct joint *j = c->self;
    struct mhc_contract_fwd_args a = {.x = c->t[STREAM], .w = c->t[FN], .base = c->t[BASE], .scale = c->t[SCALE], .y = c->t[ONE],
                                      .m = c->t[M], .rstd = c->t[M_RSTD], .eps = j->eps};
    struct rmsnorm_fwd_args n = {.x = c->t[ONE], .w = c->t[GAIN], .y = c->t[H], .rstd = c->t[RSTD], .eps = j->eps,
                                 .zero_centered = j->zero_centered};
    TRY(c->ops->mhc_contract_fwd(c->lane, &a));
    return c->ops->rmsnorm_fwd(c->lane, &n);
}

static int contract_bwd(const struct step_ctx *c)
{
    enum { DH, STREAM, FN, BASE, SCALE, GAIN, ONE, M, M_RSTD, RSTD, DONE, G, DFN, DBASE, DSCALE, DGAIN, WORK, NORM_WORK };
    const struct joint *j = c->self;
    struct rmsnorm_bwd_args n = {.dy = c->t[DH], .x = c->t[ONE], .w = c->t[GAIN], .rstd = c->t[RSTD], .dx = c->t[DONE], .dw = c->t[DGAIN],
                                 .work = c->t[NORM_WORK], .zero_centered = j->zero_centered, .acc_dw = c->add[DGAIN]};
    struct mhc_contract_bwd_args a = {.dy = c->t[DONE], .x = c->t[STREAM], .w = c->t[FN], .base = c->t[BASE], .scale = c->t[SCALE],
                                      .m = c->t[M], .rstd = c->t[M_RSTD], .dx = c->t[G], .dw = c->t[DFN], .dbase = c->t[DBASE],
                                      .dscale = c->t[DSCALE], .work = c->t[WORK], .eps = j->eps,
                                      .acc_dx = c->add[G], /* a prediction depth read the streams too, and came first */
                                      .acc_params = c->add[DFN]};
    TRY(c->ops->rmsnorm_bwd(c->lane, &n));
    return c->ops->mhc_contract_bwd(c->lane, &a);
}

/* All of the last joint at once; and its norm again, from streams and gates. */
static int leave_fwd(const struct step_ctx *c)
{
    enum { X, F, COEF_IN, INFO, FN, BASE, SCALE, GAIN, STREAM, STAT, COEF, H, WORK };
    const struct joint *j = c->self;
    struct mhc_leave_fwd_args a = {.x = c->t[X], .f = c->t[F], .coef_in = c->t[COEF_IN], .w = c->t[FN], .base = c->t[BASE], .scale = c->t[SCALE],
                                   .gain = c->t[GAIN], .y = c->t[STREAM], .stat = c->t[STAT], .coef = c->t[COEF], .h = c->t[H], .work = c->t[WORK],
                                   .rule = j->rule, .drop = drop_rule(j, &c->t[INFO]), .eps = j->eps, .zero_centered = j->zero_centered};
    return c->ops->mhc_leave_fwd(c->lane, &a);
}

static int leave_replay(const struct step_ctx *c)
{
    enum { STREAM, STAT, COEF, GAIN, H, WORK };
    const struct joint *j = c->self;
    struct mhc_leave_fwd_args a = {.gain = c->t[GAIN], .y = c->t[STREAM], .stat = c->t[STAT], .coef = c->t[COEF], .h = c->t[H], .work = c->t[WORK],
                                   .rule = j->rule, .eps = j->eps, .zero_centered = j->zero_centered, .reuse = true};
    return c->ops->mhc_leave_fwd(c->lane, &a);
}

static int leave_bwd(const struct step_ctx *c)
{
    enum { DH, STREAM, STAT, COEF, GAIN, FN, BASE, SCALE, X, F, COEF_IN, INFO, DX, DF, DCOEF_IN, DGAIN, DFN, DBASE, DSCALE, WORK };
    const struct joint *j = c->self;
    struct mhc_leave_bwd_args a = {
        .dh = c->t[DH], .y = c->t[STREAM], .stat = c->t[STAT], .coef = c->t[COEF], .gain = c->t[GAIN], .w = c->t[FN], .base = c->t[BASE], .scale = c->t[SCALE],
        .x = c->t[X], .f = c->t[F], .coef_in = c->t[COEF_IN], .dx = c->t[DX], .df = c->t[DF], .dcoef_in = c->t[DCOEF_IN], .dgain = c->t[DGAIN],
        .dw = c->t[DFN], .dbase = c->t[DBASE], .dscale = c->t[DSCALE], .work = c->t[WORK], .rule = j->rule, .drop = drop_rule(j, &c->t[INFO]),
        .eps = j->eps, .zero_centered = j->zero_centered, .acc_params = c->add[DFN], .acc_dgain = c->add[DGAIN]};
    return c->ops->mhc_leave_bwd(c->lane, &a);
}

/* ---- declaration ------------------------------------------------------------------------------------------------ */

struct param mhc_matrix(const char *key, int64_t out, int64_t in)
{
    double bound = sqrt(6.0 / (double)(out + in));
    return (struct param){.key = key, .rank = 2, .dim = {out, in}, .init = INIT_UNIFORM, .init_a = -bound, .init_b = bound, .decay = true,
                          .wide = true};
}

void mhc_declare_close(struct build *b, const struct parts *p, const struct sublayer *prev, slot_id g_stream)
{
    struct graph *g = b->g;
    double wide = (double)(b->rows * b->cfg->model.hidden * p->j->rule.streams), size = (double)dtype_bytes(b->dev->real);
    double flops = 2 * wide * (double)(p->j->rule.streams + 1);
    int n = graph_node(g, "close", LANE_COMPUTE, p->j);
    GRAPH_PHASE(g, n, PH_FWD, mhc_combine_again, READS(prev->x), READS(prev->f), READS(prev->aux[AUX_COEF]), READS(p->info), WRITES(p->stream));
    graph_inplace(g, n, PH_FWD, 0, 4);
    graph_cost(g, n, PH_FWD, flops, 2.25 * wide * size);
    if (!training(b))
        return;
    mhc_declare_stream_replay(b, p, prev, n);
    GRAPH_PHASE(g, n, PH_BWD, combine_bwd, READS(g_stream), READS(prev->x), READS(prev->f), READS(prev->aux[AUX_COEF]), READS(p->info),
                WRITES(prev->dx), WRITES(prev->df), WRITES(prev->aux[AUX_DCOEF]), WRITES(NO_SLOT));
    graph_inplace(g, n, PH_BWD, 0, 5);
    graph_cost(g, n, PH_BWD, 2 * flops, 3.5 * wide * size);
}

static struct mhc_leave_bwd_args leave_shapes(const struct build *b, const struct joint *j)
{
    enum dtype real = b->dev->real, wide = b->dev->wide;
    int64_t d = b->cfg->model.hidden, n = j->rule.streams;
    struct tensor streams = tensor_2d(NULL, real, b->rows, n * d), thin = tensor_2d(NULL, real, b->rows, d), coef = tensor_2d(NULL, wide, b->rows, mhc_logits(n));
    return (struct mhc_leave_bwd_args){.dh = thin, .y = streams, .stat = tensor_2d(NULL, wide, b->rows, n + 2), .coef = tensor_2d(NULL, wide, b->rows, n),
                                       .gain = tensor_1d(NULL, wide, d), .w = tensor_2d(NULL, wide, n, n * d), .base = tensor_1d(NULL, wide, n),
                                       .scale = tensor_1d(NULL, wide, 1), .x = streams, .f = thin, .coef_in = coef, .dx = streams, .df = thin, .dcoef_in = coef,
                                       .dgain = tensor_1d(NULL, wide, d), .dw = tensor_2d(NULL, wide, n, n * d), .dbase = tensor_1d(NULL, wide, n),
                                       .dscale = tensor_1d(NULL, wide, 1), .rule = j->rule};
}

static slot_id leave_work(struct build *b, const struct joint *j, const char *name, bool reuse)
{
    struct mhc_leave_bwd_args s = leave_shapes(b, j);
    struct mhc_leave_fwd_args a = {.x = s.x, .f = s.f, .coef_in = s.coef_in, .w = s.w, .base = s.base, .scale = s.scale, .gain = s.gain, .y = s.y,
                                   .stat = s.stat, .coef = s.coef, .h = s.dh, .rule = j->rule, .reuse = reuse};
    return b->ops->mhc_leave_fwd_work ? build_work(b, name, b->ops->mhc_leave_fwd_work(&a)) : NO_SLOT;
}

static slot_id leave_bwd_work(struct build *b, const struct joint *j)
{
    struct mhc_leave_bwd_args a = leave_shapes(b, j);
    return b->ops->mhc_leave_bwd_work ? build_work(b, "leave_bwd_work", b->ops->mhc_leave_bwd_work(&a)) : NO_SLOT;
}

static void declare_leave_replays(struct build *b, const struct parts *p, const struct sublayer *prev)
{
    struct graph *g = b->g;
    double wide = (double)(b->rows * b->cfg->model.hidden * p->j->rule.streams), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "replay_norm", LANE_COMPUTE, p->j);
    GRAPH_PHASE(g, n, PH_REPLAY, leave_replay, READS(p->stream), READS(p->stat), READS(p->coef), READS(p->gain.w), WRITES(p->norm),
                WRITES(leave_work(b, p->j, "replay_work", true)));
    graph_cost(g, n, PH_REPLAY, 3 * wide, 1.25 * wide * size);
    graph_replay(g, p->norm, n);
    mhc_declare_stream_replay(b, p, prev, graph_node(g, "replay_stream", LANE_COMPUTE, p->j));
}

/* Nobody but the head wants what is left of the streams, and gates are learned: one op for all of it. */
static int declare_leave(struct build *b, struct parts *p, const struct sublayer *prev, struct sublayer *next, const struct weight *fn, const struct weight *base,
                         const struct weight *scale)
{
    struct graph *g = b->g;
    int64_t streams = p->j->rule.streams;
    double wide = (double)(b->rows * b->cfg->model.hidden * streams), size = (double)dtype_bytes(b->dev->real), flops = wide * (double)(4 * streams + 8);
    p->stat = build_wide(b, "left_stat", b->rows, streams + 2);
    p->coef = build_wide(b, "left_coef", b->rows, streams);
    next->dx = NO_SLOT;
    int n = graph_node(g, "leave", LANE_COMPUTE, p->j);
    GRAPH_PHASE(g, n, PH_FWD, leave_fwd, READS(prev->x), READS(prev->f), READS(prev->aux[AUX_COEF]), READS(p->info), READS(fn->w), READS(base->w), READS(scale->w),
                READS(p->gain.w), WRITES(p->stream), WRITES(p->stat), WRITES(p->coef), WRITES(p->norm), WRITES(leave_work(b, p->j, "leave_work", false)));
    graph_inplace(g, n, PH_FWD, 0, 8); /* where nobody looks back */
    graph_cost(g, n, PH_FWD, flops, 2.5 * wide * size);
    if (!training(b))
        return g->err.code;
    declare_leave_replays(b, p, prev);
    GRAPH_PHASE(g, n, PH_BWD, leave_bwd, READS(next->dh), READS(p->stream), READS(p->stat), READS(p->coef), READS(p->gain.w), READS(fn->w), READS(base->w),
                READS(scale->w), READS(prev->x), READS(prev->f), READS(prev->aux[AUX_COEF]), READS(p->info), WRITES(prev->dx), WRITES(prev->df),
                WRITES(prev->aux[AUX_DCOEF]), ADDS(p->gain.dw), ADDS(fn->dw), ADDS(base->dw), ADDS(scale->dw), WRITES(leave_bwd_work(b, p->j)));
    graph_cost(g, n, PH_BWD, 3 * flops, 4.75 * wide * size);
    return g->err.code;
}

static slot_id contract_work(struct build *b, const struct joint *j)
{
    int64_t d = b->cfg->model.hidden, n = j->rule.streams;
    struct mhc_contract_bwd_args a = {.dy = tensor_2d(NULL, b->dev->real, b->rows, d), .dx = tensor_2d(NULL, b->dev->real, b->rows, n * d),
                                      .w = tensor_2d(NULL, b->dev->wide, n, n * d)};
    return b->ops->mhc_contract_bwd_work ? build_work(b, "contract_work", b->ops->mhc_contract_bwd_work(&a)) : NO_SLOT;
}

static slot_id norm_work(struct build *b)
{
    struct tensor t = tensor_2d(NULL, b->dev->real, b->rows, b->cfg->model.hidden), w = tensor_1d(NULL, b->dev->wide, t.dim[1]);
    struct rmsnorm_bwd_args a = {.dy = t, .x = t, .w = w, .dx = t, .dw = w};
    return b->ops->rmsnorm_bwd_work ? build_work(b, "norm_work", b->ops->rmsnorm_bwd_work(&a)) : NO_SLOT;
}

/* Keys beside the final norm's: "decoder.final_norm.weight" gives "decoder.hc_head_fn". */
static struct weight head_weight(struct build *b, const char *norm_key, const char *name, struct param p)
{
    const char *end = strstr(norm_key, "final_");
    char key[160];
    snprintf(key, sizeof key, "%.*s%s", end ? (int)(end - norm_key) : 0, norm_key, name);
    p.key = key;
    return build_weight(b, &p);
}

int mhc_declare_last(struct build *b, struct parts *p, const struct sublayer *prev, struct sublayer *next, const char *norm_key)
{
    struct graph *g = b->g;
    const struct joint *j = p->j;
    bool learned = j->rule.profile == MHC_D;
    int64_t d = b->cfg->model.hidden, n = j->rule.streams;
    struct weight fn = no_weight(), base = no_weight(), scale = no_weight();
    if (learned) {
        fn = head_weight(b, norm_key, "hc_head_fn", mhc_matrix("", n, n * d));
        base = head_weight(b, norm_key, "hc_head_base", param_vector("", n, INIT_ZERO));
        scale = head_weight(b, norm_key, "hc_head_scale", param_vector("", 1, INIT_ONE));
    }
    if (learned && prev->f != NO_SLOT && b->n_depths == 0 && b->ops->mhc_leave_fwd != NULL)
        return declare_leave(b, p, prev, next, &fn, &base, &scale);
    slot_id one = build_real(b, "contracted", b->rows, d), rstd = graph_slot(g, "rstd", tensor_1d(NULL, b->dev->wide, b->rows));
    slot_id m = learned ? build_wide(b, "m", b->rows, n) : NO_SLOT, m_rstd = learned ? build_wide(b, "m_rstd", b->rows, 1) : NO_SLOT;
    slot_id done = build_grad(b, "done", b->rows, d);
    bool closes = prev->f != NO_SLOT; /* not in a chunk without layers: what came over the cut is contracted */
    next->dx = closes ? build_grad(b, "dcontracted", b->rows, n * d) : prev->dx;
    if (closes)
        mhc_declare_close(b, p, prev, next->dx);
    double wide = (double)(b->rows * n * d), size = (double)dtype_bytes(b->dev->real);
    int node = graph_node(g, "contract", LANE_COMPUTE, j);
    GRAPH_PHASE(g, node, PH_FWD, contract_fwd, READS(p->stream), READS(fn.w), READS(base.w), READS(scale.w), READS(p->gain.w), WRITES(one),
                WRITES(m), WRITES(m_rstd), WRITES(p->norm), WRITES(rstd));
    graph_cost(g, node, PH_FWD, wide * (double)(2 * n + 4), 1.5 * wide * size);
    if (!training(b))
        return g->err.code;
    GRAPH_PHASE(g, node, PH_REPLAY, contract_fwd, READS(p->stream), READS(fn.w), READS(base.w), READS(scale.w), READS(p->gain.w), WRITES(one),
                WRITES(m), WRITES(m_rstd), WRITES(p->norm), WRITES(rstd));
    graph_cost(g, node, PH_REPLAY, wide * (double)(2 * n + 4), 1.5 * wide * size);
    graph_replay(g, p->norm, node);
    graph_replay(g, one, node);
    GRAPH_PHASE(g, node, PH_BWD, contract_bwd, READS(next->dh), READS(p->stream), READS(fn.w), READS(base.w), READS(scale.w), READS(p->gain.w),
                READS(one), READS(m), READS(m_rstd), READS(rstd), WRITES(done), ADDS(next->dx), ADDS(fn.dw), ADDS(base.dw),
                ADDS(scale.dw), ADDS(p->gain.dw), WRITES(learned ? contract_work(b, j) : NO_SLOT), WRITES(norm_work(b)));
    graph_cost(g, node, PH_BWD, wide * (double)(4 * n + 6), 2.5 * wide * size);
    return g->err.code;
}
