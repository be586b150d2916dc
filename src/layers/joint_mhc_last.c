/* The last joint of a stack with n streams, and what closes streams in front of a cut; see joint_mhc.c. Where gates are
 * learned and nobody but the head wants the streams, combine, contraction and final norm are one op; otherwise two
 * nodes, between which multi-token prediction takes the streams. */
#include "layers/joint_mhc_int.h"
#include "ops/mhc/mhc.h"
#include "ops/rmsnorm/rmsnorm.h"

#include <math.h>
#include <string.h>

struct param mhc_matrix(const char *key, int64_t out, int64_t in)
{
    double bound = sqrt(6.0 / (double)(out + in));
    return (struct param){.key = key,
                          .rank = 2,
                          .dim = {out, in},
                          .init = INIT_UNIFORM,
                          .init_a = -bound,
                          .init_b = bound,
                          .decay = true,
                          .wide = true};
}

void mhc_declare_close(struct build *b, const struct parts *p, const struct sublayer *prev, slot_id g_stream)
{
    struct graph *g = b->g;
    double wide = (double)(b->rows * b->cfg->model.hidden * p->j->rule.streams),
           size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "close", LANE_COMPUTE, p->j);
    mhc_declare_combine(b, p, prev, n, PH_FWD);
    graph_inplace(g, n, PH_FWD, prev->x, p->stream);
    if (!training(b))
        return;
    mhc_declare_combine(b, p, prev, n, PH_REPLAY);
    struct tensor coef = of(g, prev->aux[AUX_COEF]), dcoef = of(g, prev->aux[AUX_DCOEF]);
    GRAPH_OP(g, n, PH_BWD, mhc_combine_bwd, .dy = of(g, g_stream), .x = of(g, prev->x), .f = of(g, prev->f),
             .post = post_of(p->j, &coef), .res = res_of(p->j, &coef), .dx = of(g, prev->dx), .df = of(g, prev->df),
             .dpre = tensor_cols(&dcoef, 0, p->j->rule.streams), .dpost = post_of(p->j, &dcoef),
             .dres = res_of(p->j, &dcoef), .rule = p->j->rule, .drop = drop_rule(g, p));
    graph_inplace(g, n, PH_BWD, g_stream, prev->dx);
    graph_cost(g, n, PH_BWD, 4 * wide * (double)(p->j->rule.streams + 1), 3.5 * wide * size);
}

static void declare_leave_replays(struct build *b, const struct parts *p, const struct sublayer *prev)
{
    struct graph *g = b->g;
    double wide = (double)(b->rows * b->cfg->model.hidden * p->j->rule.streams),
           size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "replay_norm", LANE_COMPUTE, p->j);
    const struct mhc_final_fwd_args again = {.gain = of(g, p->gain.w),
                                             .y = of(g, p->stream),
                                             .stat = of(g, p->stat),
                                             .coef = of(g, p->coef),
                                             .h = of(g, p->norm),
                                             .rule = p->j->rule,
                                             .eps = p->j->eps,
                                             .zero_centered = p->j->zero_centered,
                                             .reuse = true};
    graph_op(g, n, PH_REPLAY, &mhc_final_again_desc, &again);
    graph_cost(g, n, PH_REPLAY, 3 * wide, 1.25 * wide * size);
    graph_replay(g, p->norm, n);
    mhc_declare_combine(b, p, prev, graph_node(g, "replay_stream", LANE_COMPUTE, p->j), PH_REPLAY);
}

/* Nobody but the head wants what is left of the streams, and gates are learned: one op for all of it. */
static int declare_leave(struct build *b, struct parts *p, const struct sublayer *prev, struct sublayer *next,
                         const struct weight *fn, const struct weight *base, const struct weight *scale)
{
    struct graph *g = b->g;
    int64_t streams = p->j->rule.streams;
    double wide = (double)(b->rows * b->cfg->model.hidden * streams), size = (double)dtype_bytes(b->dev->real),
           flops = wide * (double)(4 * streams + 8);
    p->stat = build_wide(b, "left_stat", b->rows, streams + 2);
    p->coef = build_wide(b, "left_coef", b->rows, streams);
    next->dx = NO_SLOT;
    int n = graph_node(g, "leave", LANE_COMPUTE, p->j);
    GRAPH_OP(g, n, PH_FWD, mhc_final_fwd, .x = of(g, prev->x), .f = of(g, prev->f),
             .coef_in = of(g, prev->aux[AUX_COEF]), .w = of(g, fn->w), .base = of(g, base->w), .scale = of(g, scale->w),
             .gain = of(g, p->gain.w), .y = of(g, p->stream), .stat = of(g, p->stat), .coef = of(g, p->coef),
             .h = of(g, p->norm), .rule = p->j->rule, .drop = drop_rule(g, p), .eps = p->j->eps,
             .zero_centered = p->j->zero_centered);
    graph_inplace(g, n, PH_FWD, prev->x, p->stream); /* where no backward step reads it */
    graph_cost(g, n, PH_FWD, flops, 2.5 * wide * size);
    if (!training(b))
        return g->err.code;
    declare_leave_replays(b, p, prev);
    GRAPH_OP(g, n, PH_BWD, mhc_final_bwd, .dh = of(g, next->dh), .stat = of(g, p->stat), .w = of(g, fn->w),
             .base = of(g, base->w), .scale = of(g, scale->w), .gain = of(g, p->gain.w), .x = of(g, prev->x),
             .f = of(g, prev->f), .coef_in = of(g, prev->aux[AUX_COEF]), .y = of(g, p->stream), .coef = of(g, p->coef),
             .dx = of(g, prev->dx), .df = of(g, prev->df), .dcoef_in = of(g, prev->aux[AUX_DCOEF]),
             .dgain = of(g, p->gain.dw), .dw = of(g, fn->dw), .dbase = of(g, base->dw), .dscale = of(g, scale->dw),
             .rule = p->j->rule, .drop = drop_rule(g, p), .eps = p->j->eps, .zero_centered = p->j->zero_centered);
    graph_cost(g, n, PH_BWD, 3 * flops, 4.75 * wide * size);
    return g->err.code;
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

int mhc_declare_last(struct build *b, struct parts *p, const struct sublayer *prev, struct sublayer *next,
                     const char *norm_key)
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
    if (learned && prev->f != NO_SLOT && b->n_depths == 0)
        return declare_leave(b, p, prev, next, &fn, &base, &scale);
    slot_id one = build_real(b, "contracted", b->rows, d),
            rstd = graph_slot(g, "rstd", tensor_1d(NULL, b->dev->wide, b->rows));
    slot_id m = learned ? build_wide(b, "m", b->rows, n) : NO_SLOT,
            m_rstd = learned ? build_wide(b, "m_rstd", b->rows, 1) : NO_SLOT;
    slot_id done = build_grad(b, "done", b->rows, d);
    bool closes = prev->f != NO_SLOT; /* not in a chunk without layers: what came over the cut is contracted */
    next->dx = closes ? build_grad(b, "dcontracted", b->rows, n * d) : prev->dx;
    if (closes)
        mhc_declare_close(b, p, prev, next->dx);
    double wide = (double)(b->rows * n * d), size = (double)dtype_bytes(b->dev->real);
    int node = graph_node(g, "contract", LANE_COMPUTE, j);
    GRAPH_OP(g, node, PH_FWD, mhc_contract_fwd, .x = of(g, p->stream), .w = of(g, fn.w), .base = of(g, base.w),
             .scale = of(g, scale.w), .y = of(g, one), .m = of(g, m), .rstd = of(g, m_rstd), .eps = j->eps);
    GRAPH_OP(g, node, PH_FWD, rmsnorm_fwd, .x = of(g, one), .w = of(g, p->gain.w), .y = of(g, p->norm),
             .rstd = of(g, rstd), .eps = j->eps, .zero_centered = j->zero_centered);
    graph_cost(g, node, PH_FWD, wide * (double)(2 * n + 4), 1.5 * wide * size);
    if (!training(b))
        return g->err.code;
    graph_again(g, node, p->norm);
    graph_again(g, node, one);
    graph_sum(g, next->dx); /* a prediction depth reads the streams too, and comes first */
    GRAPH_OP(g, node, PH_BWD, rmsnorm_bwd, .dy = of(g, next->dh), .x = of(g, one), .w = of(g, p->gain.w),
             .rstd = of(g, rstd), .dx = of(g, done), .dw = of(g, p->gain.dw), .zero_centered = j->zero_centered);
    GRAPH_OP(g, node, PH_BWD, mhc_contract_bwd, .dy = of(g, done), .x = of(g, learned ? p->stream : NO_SLOT),
             .w = of(g, fn.w), .base = of(g, base.w), .scale = of(g, scale.w), .m = of(g, m), .rstd = of(g, m_rstd),
             .dx = of(g, next->dx), .dw = of(g, fn.dw), .dbase = of(g, base.dw), .dscale = of(g, scale.dw),
             .eps = j->eps);
    graph_cost(g, node, PH_BWD, wide * (double)(4 * n + 6), 2.5 * wide * size);
    return g->err.code;
}
