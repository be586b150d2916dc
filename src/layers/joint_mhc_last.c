/* The last joint of a stack with n streams, and what closes streams in front of a cut; see joint_mhc.c. Where gates are learned and nobody but the head
 * wants the streams, combine, contraction and final norm are one op; otherwise two nodes, between which multi-token prediction takes the streams. */
#include "layers/joint_mhc_int.h"
#include "ops/mhc/mhc.h"
#include "ops/ops.h"
#include "ops/rmsnorm/rmsnorm.h"

#include <math.h>
#include <string.h>

enum {
    COMBINE_BWD_G, COMBINE_BWD_X, COMBINE_BWD_F, COMBINE_BWD_COEF_IN, COMBINE_BWD_INFO, COMBINE_BWD_DX,
    COMBINE_BWD_DF, COMBINE_BWD_DCOEF_IN, COMBINE_BWD_WORK
};
static int combine_bwd(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    struct dev *d = c->lane->dev;
    struct mhc_combine_bwd_args a = {
        .dy = c->t[COMBINE_BWD_G], .x = c->t[COMBINE_BWD_X], .f = c->t[COMBINE_BWD_F], .post = post_of(j, &c->t[COMBINE_BWD_COEF_IN]), .res = res_of(j, &c->t[COMBINE_BWD_COEF_IN]), .dx = c->t[COMBINE_BWD_DX],
        .df = c->t[COMBINE_BWD_DF], .dpost = post_of(j, &c->t[COMBINE_BWD_DCOEF_IN]), .dres = res_of(j, &c->t[COMBINE_BWD_DCOEF_IN]), .work = c->t[COMBINE_BWD_WORK], .rule = j->rule,
        .drop = drop_rule(j, &c->t[COMBINE_BWD_INFO])};
    /* Nothing but the aggregate, which is not this joint's, depends on pre. */
    TRY(d->vt->fill(d, c->t[COMBINE_BWD_DCOEF_IN].data, 0, tensor_bytes(&c->t[COMBINE_BWD_DCOEF_IN]), c->lane->err));
    return c->ops->mhc_combine_bwd(c->lane, &a);
}

enum {
    CONTRACT_FWD_STREAM, CONTRACT_FWD_FN, CONTRACT_FWD_BASE, CONTRACT_FWD_SCALE, CONTRACT_FWD_GAIN,
    CONTRACT_FWD_ONE, CONTRACT_FWD_M, CONTRACT_FWD_M_RSTD, CONTRACT_FWD_H, CONTRACT_FWD_RSTD
};
static int contract_fwd(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    struct mhc_contract_fwd_args a = {.x = c->t[CONTRACT_FWD_STREAM], .w = c->t[CONTRACT_FWD_FN], .base = c->t[CONTRACT_FWD_BASE], .scale = c->t[CONTRACT_FWD_SCALE], .y = c->t[CONTRACT_FWD_ONE],
                                      .m = c->t[CONTRACT_FWD_M], .rstd = c->t[CONTRACT_FWD_M_RSTD], .eps = j->eps};
    struct rmsnorm_fwd_args n = {.x = c->t[CONTRACT_FWD_ONE], .w = c->t[CONTRACT_FWD_GAIN], .y = c->t[CONTRACT_FWD_H], .rstd = c->t[CONTRACT_FWD_RSTD], .eps = j->eps,
                                 .zero_centered = j->zero_centered};
    TRY(c->ops->mhc_contract_fwd(c->lane, &a));
    return c->ops->rmsnorm_fwd(c->lane, &n);
}

enum {
    CONTRACT_BWD_DH, CONTRACT_BWD_STREAM, CONTRACT_BWD_FN, CONTRACT_BWD_BASE, CONTRACT_BWD_SCALE,
    CONTRACT_BWD_GAIN, CONTRACT_BWD_ONE, CONTRACT_BWD_M, CONTRACT_BWD_M_RSTD, CONTRACT_BWD_RSTD, CONTRACT_BWD_DONE,
    CONTRACT_BWD_G, CONTRACT_BWD_DFN, CONTRACT_BWD_DBASE, CONTRACT_BWD_DSCALE, CONTRACT_BWD_DGAIN,
    CONTRACT_BWD_WORK, CONTRACT_BWD_NORM_WORK
};
static int contract_bwd(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    struct rmsnorm_bwd_args n = {.dy = c->t[CONTRACT_BWD_DH], .x = c->t[CONTRACT_BWD_ONE], .w = c->t[CONTRACT_BWD_GAIN], .rstd = c->t[CONTRACT_BWD_RSTD], .dx = c->t[CONTRACT_BWD_DONE], .dw = c->t[CONTRACT_BWD_DGAIN],
                                 .work = c->t[CONTRACT_BWD_NORM_WORK], .zero_centered = j->zero_centered, .acc_dw = c->add[CONTRACT_BWD_DGAIN]};
    struct mhc_contract_bwd_args a = {.dy = c->t[CONTRACT_BWD_DONE], .x = c->t[CONTRACT_BWD_STREAM], .w = c->t[CONTRACT_BWD_FN], .base = c->t[CONTRACT_BWD_BASE], .scale = c->t[CONTRACT_BWD_SCALE],
                                      .m = c->t[CONTRACT_BWD_M], .rstd = c->t[CONTRACT_BWD_M_RSTD], .dx = c->t[CONTRACT_BWD_G], .dw = c->t[CONTRACT_BWD_DFN], .dbase = c->t[CONTRACT_BWD_DBASE],
                                      .dscale = c->t[CONTRACT_BWD_DSCALE], .work = c->t[CONTRACT_BWD_WORK], .eps = j->eps,
                                      .acc_dx = c->add[CONTRACT_BWD_G], /* a prediction depth read the streams too, and came first */
                                      .acc_params = c->add[CONTRACT_BWD_DFN] || c->add[CONTRACT_BWD_DBASE] || c->add[CONTRACT_BWD_DSCALE]};
    TRY(c->ops->rmsnorm_bwd(c->lane, &n));
    return c->ops->mhc_contract_bwd(c->lane, &a);
}

/* All of the last joint at once; and its norm again, from streams and gates. */
enum {
    LEAVE_FWD_X, LEAVE_FWD_F, LEAVE_FWD_COEF_IN, LEAVE_FWD_INFO, LEAVE_FWD_FN, LEAVE_FWD_BASE, LEAVE_FWD_SCALE,
    LEAVE_FWD_GAIN, LEAVE_FWD_STREAM, LEAVE_FWD_STAT, LEAVE_FWD_COEF, LEAVE_FWD_H, LEAVE_FWD_WORK
};
static int leave_fwd(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    struct mhc_leave_fwd_args a = {.x = c->t[LEAVE_FWD_X], .f = c->t[LEAVE_FWD_F], .coef_in = c->t[LEAVE_FWD_COEF_IN], .w = c->t[LEAVE_FWD_FN], .base = c->t[LEAVE_FWD_BASE], .scale = c->t[LEAVE_FWD_SCALE],
                                   .gain = c->t[LEAVE_FWD_GAIN], .y = c->t[LEAVE_FWD_STREAM], .stat = c->t[LEAVE_FWD_STAT], .coef = c->t[LEAVE_FWD_COEF], .h = c->t[LEAVE_FWD_H], .work = c->t[LEAVE_FWD_WORK],
                                   .rule = j->rule, .drop = drop_rule(j, &c->t[LEAVE_FWD_INFO]), .eps = j->eps, .zero_centered = j->zero_centered};
    return c->ops->mhc_leave_fwd(c->lane, &a);
}

enum {
    LEAVE_REPLAY_STREAM, LEAVE_REPLAY_STAT, LEAVE_REPLAY_COEF, LEAVE_REPLAY_GAIN, LEAVE_REPLAY_H,
    LEAVE_REPLAY_WORK
};
static int leave_replay(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    struct mhc_leave_fwd_args a = {.gain = c->t[LEAVE_REPLAY_GAIN], .y = c->t[LEAVE_REPLAY_STREAM], .stat = c->t[LEAVE_REPLAY_STAT], .coef = c->t[LEAVE_REPLAY_COEF], .h = c->t[LEAVE_REPLAY_H], .work = c->t[LEAVE_REPLAY_WORK],
                                   .rule = j->rule, .eps = j->eps, .zero_centered = j->zero_centered, .reuse = true};
    return c->ops->mhc_leave_fwd(c->lane, &a);
}

enum {
    LEAVE_BWD_DH, LEAVE_BWD_STREAM, LEAVE_BWD_STAT, LEAVE_BWD_COEF, LEAVE_BWD_GAIN, LEAVE_BWD_FN, LEAVE_BWD_BASE,
    LEAVE_BWD_SCALE, LEAVE_BWD_X, LEAVE_BWD_F, LEAVE_BWD_COEF_IN, LEAVE_BWD_INFO, LEAVE_BWD_DX, LEAVE_BWD_DF,
    LEAVE_BWD_DCOEF_IN, LEAVE_BWD_DGAIN, LEAVE_BWD_DFN, LEAVE_BWD_DBASE, LEAVE_BWD_DSCALE, LEAVE_BWD_WORK
};
static int leave_bwd(const struct step_ctx *c)
{
    const struct joint *j = c->self;
    struct mhc_leave_bwd_args a = {
        .dh = c->t[LEAVE_BWD_DH], .y = c->t[LEAVE_BWD_STREAM], .stat = c->t[LEAVE_BWD_STAT], .coef = c->t[LEAVE_BWD_COEF], .gain = c->t[LEAVE_BWD_GAIN], .w = c->t[LEAVE_BWD_FN], .base = c->t[LEAVE_BWD_BASE], .scale = c->t[LEAVE_BWD_SCALE],
        .x = c->t[LEAVE_BWD_X], .f = c->t[LEAVE_BWD_F], .coef_in = c->t[LEAVE_BWD_COEF_IN], .dx = c->t[LEAVE_BWD_DX], .df = c->t[LEAVE_BWD_DF], .dcoef_in = c->t[LEAVE_BWD_DCOEF_IN], .dgain = c->t[LEAVE_BWD_DGAIN],
        .dw = c->t[LEAVE_BWD_DFN], .dbase = c->t[LEAVE_BWD_DBASE], .dscale = c->t[LEAVE_BWD_DSCALE], .work = c->t[LEAVE_BWD_WORK], .rule = j->rule, .drop = drop_rule(j, &c->t[LEAVE_BWD_INFO]),
        .eps = j->eps, .zero_centered = j->zero_centered, .acc_params = c->add[LEAVE_BWD_DFN] || c->add[LEAVE_BWD_DBASE] || c->add[LEAVE_BWD_DSCALE], .acc_dgain = c->add[LEAVE_BWD_DGAIN]};
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
    GRAPH_PHASE(g, n, PH_FWD, mhc_combine_again, [COMBINE_X] = READS(prev->x), [COMBINE_F] = READS(prev->f),
                [COMBINE_COEF] = READS(prev->aux[AUX_COEF]), [COMBINE_INFO] = READS(p->info), [COMBINE_STREAM] = WRITES(p->stream));
    graph_inplace(g, n, PH_FWD, prev->x, p->stream);
    graph_cost(g, n, PH_FWD, flops, 2.25 * wide * size);
    if (!training(b))
        return;
    mhc_declare_stream_replay(b, p, prev, n);
    GRAPH_PHASE(g, n, PH_BWD, combine_bwd, [COMBINE_BWD_G] = READS(g_stream), [COMBINE_BWD_X] = READS(prev->x),
                [COMBINE_BWD_F] = READS(prev->f), [COMBINE_BWD_COEF_IN] = READS(prev->aux[AUX_COEF]),
                [COMBINE_BWD_INFO] = READS(p->info), [COMBINE_BWD_DX] = WRITES(prev->dx),
                [COMBINE_BWD_DF] = WRITES(prev->df), [COMBINE_BWD_DCOEF_IN] = WRITES(prev->aux[AUX_DCOEF]),
                [COMBINE_BWD_WORK] = WRITES(NO_SLOT));
    graph_inplace(g, n, PH_BWD, g_stream, prev->dx);
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
    GRAPH_PHASE(g, n, PH_REPLAY, leave_replay, [LEAVE_REPLAY_STREAM] = READS(p->stream),
                [LEAVE_REPLAY_STAT] = READS(p->stat), [LEAVE_REPLAY_COEF] = READS(p->coef),
                [LEAVE_REPLAY_GAIN] = READS(p->gain.w), [LEAVE_REPLAY_H] = WRITES(p->norm),
                [LEAVE_REPLAY_WORK] = WRITES(leave_work(b, p->j, "replay_work", true)));
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
    GRAPH_PHASE(g, n, PH_FWD, leave_fwd, [LEAVE_FWD_X] = READS(prev->x), [LEAVE_FWD_F] = READS(prev->f),
                [LEAVE_FWD_COEF_IN] = READS(prev->aux[AUX_COEF]), [LEAVE_FWD_INFO] = READS(p->info),
                [LEAVE_FWD_FN] = READS(fn->w), [LEAVE_FWD_BASE] = READS(base->w),
                [LEAVE_FWD_SCALE] = READS(scale->w), [LEAVE_FWD_GAIN] = READS(p->gain.w),
                [LEAVE_FWD_STREAM] = WRITES(p->stream), [LEAVE_FWD_STAT] = WRITES(p->stat),
                [LEAVE_FWD_COEF] = WRITES(p->coef), [LEAVE_FWD_H] = WRITES(p->norm),
                [LEAVE_FWD_WORK] = WRITES(leave_work(b, p->j, "leave_work", false)));
    graph_inplace(g, n, PH_FWD, prev->x, p->stream); /* where nobody looks back */
    graph_cost(g, n, PH_FWD, flops, 2.5 * wide * size);
    if (!training(b))
        return g->err.code;
    declare_leave_replays(b, p, prev);
    GRAPH_PHASE(g, n, PH_BWD, leave_bwd, [LEAVE_BWD_DH] = READS(next->dh), [LEAVE_BWD_STREAM] = READS(p->stream),
                [LEAVE_BWD_STAT] = READS(p->stat), [LEAVE_BWD_COEF] = READS(p->coef),
                [LEAVE_BWD_GAIN] = READS(p->gain.w), [LEAVE_BWD_FN] = READS(fn->w),
                [LEAVE_BWD_BASE] = READS(base->w), [LEAVE_BWD_SCALE] = READS(scale->w),
                [LEAVE_BWD_X] = READS(prev->x), [LEAVE_BWD_F] = READS(prev->f),
                [LEAVE_BWD_COEF_IN] = READS(prev->aux[AUX_COEF]), [LEAVE_BWD_INFO] = READS(p->info),
                [LEAVE_BWD_DX] = WRITES(prev->dx), [LEAVE_BWD_DF] = WRITES(prev->df),
                [LEAVE_BWD_DCOEF_IN] = WRITES(prev->aux[AUX_DCOEF]), [LEAVE_BWD_DGAIN] = ADDS(p->gain.dw),
                [LEAVE_BWD_DFN] = ADDS(fn->dw), [LEAVE_BWD_DBASE] = ADDS(base->dw),
                [LEAVE_BWD_DSCALE] = ADDS(scale->dw), [LEAVE_BWD_WORK] = WRITES(leave_bwd_work(b, p->j)));
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
    param_replicate(&p, GRAD_OVER_TOKENS);
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
    GRAPH_PHASE(g, node, PH_FWD, contract_fwd, [CONTRACT_FWD_STREAM] = READS(p->stream),
                [CONTRACT_FWD_FN] = READS(fn.w), [CONTRACT_FWD_BASE] = READS(base.w),
                [CONTRACT_FWD_SCALE] = READS(scale.w), [CONTRACT_FWD_GAIN] = READS(p->gain.w),
                [CONTRACT_FWD_ONE] = WRITES(one), [CONTRACT_FWD_M] = WRITES(m),
                [CONTRACT_FWD_M_RSTD] = WRITES(m_rstd), [CONTRACT_FWD_H] = WRITES(p->norm),
                [CONTRACT_FWD_RSTD] = WRITES(rstd));
    graph_cost(g, node, PH_FWD, wide * (double)(2 * n + 4), 1.5 * wide * size);
    if (!training(b))
        return g->err.code;
    GRAPH_PHASE(g, node, PH_REPLAY, contract_fwd, [CONTRACT_FWD_STREAM] = READS(p->stream),
                [CONTRACT_FWD_FN] = READS(fn.w), [CONTRACT_FWD_BASE] = READS(base.w),
                [CONTRACT_FWD_SCALE] = READS(scale.w), [CONTRACT_FWD_GAIN] = READS(p->gain.w),
                [CONTRACT_FWD_ONE] = WRITES(one), [CONTRACT_FWD_M] = WRITES(m),
                [CONTRACT_FWD_M_RSTD] = WRITES(m_rstd), [CONTRACT_FWD_H] = WRITES(p->norm),
                [CONTRACT_FWD_RSTD] = WRITES(rstd));
    graph_cost(g, node, PH_REPLAY, wide * (double)(2 * n + 4), 1.5 * wide * size);
    graph_replay(g, p->norm, node);
    graph_replay(g, one, node);
    GRAPH_PHASE(g, node, PH_BWD, contract_bwd, [CONTRACT_BWD_DH] = READS(next->dh),
                [CONTRACT_BWD_STREAM] = READS(p->stream), [CONTRACT_BWD_FN] = READS(fn.w),
                [CONTRACT_BWD_BASE] = READS(base.w), [CONTRACT_BWD_SCALE] = READS(scale.w),
                [CONTRACT_BWD_GAIN] = READS(p->gain.w), [CONTRACT_BWD_ONE] = READS(one), [CONTRACT_BWD_M] = READS(m),
                [CONTRACT_BWD_M_RSTD] = READS(m_rstd), [CONTRACT_BWD_RSTD] = READS(rstd),
                [CONTRACT_BWD_DONE] = WRITES(done), [CONTRACT_BWD_G] = ADDS(next->dx),
                [CONTRACT_BWD_DFN] = ADDS(fn.dw), [CONTRACT_BWD_DBASE] = ADDS(base.dw),
                [CONTRACT_BWD_DSCALE] = ADDS(scale.dw), [CONTRACT_BWD_DGAIN] = ADDS(p->gain.dw),
                [CONTRACT_BWD_WORK] = WRITES(learned ? contract_work(b, j) : NO_SLOT),
                [CONTRACT_BWD_NORM_WORK] = WRITES(norm_work(b)));
    graph_cost(g, node, PH_BWD, wide * (double)(4 * n + 6), 2.5 * wide * size);
    return g->err.code;
}
