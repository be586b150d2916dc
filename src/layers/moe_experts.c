/* The MLPs of experts: two grouped products and what lies between them (moe.c says what the letters mean).
 *   pre [R, w] = x W1_e^T + b1_e;  act [R, f] = prob * act(pre);  y [R, d] = act W2_e^T + prob * b2_e
 * Two ways to the same numbers. In steps: products and activation are nodes of their own, and act is kept for the weight
 * gradient of fc2 or made again. Fused, as GPUs want it: fc1 makes pre and act; the backward of fc2 goes through the
 * activation and makes act again on the way, so that only pre is kept. On hosts both give the same bits. */
#include "layers/moe_experts.h"
#include "ops/act/act.h"
#include "ops/expert/expert.h"
#include "ops/gmm/gmm.h"

static int group_fwd(const struct step_ctx *c)
{
    enum { X, W, BIAS, PROB, OFFSET, Y };
    struct gmm_fwd_args a = {.x = c->t[X],
                             .w = c->t[W],
                             .bias = c->t[BIAS],
                             .prob = c->t[PROB],
                             .offset = c->t[OFFSET],
                             .y = c->t[Y]};
    return c->ops->gmm_fwd(c->lane, &a);
}

static int group_bwd(const struct step_ctx *c)
{
    enum { DY, W, OFFSET, DX };
    struct gmm_bwd_args a = {.dy = c->t[DY], .w = c->t[W], .offset = c->t[OFFSET], .dx = c->t[DX]};
    return c->ops->gmm_bwd(c->lane, &a);
}

static int group_dw(const struct step_ctx *c)
{
    enum { DY, X, PROB, OFFSET, DW, DBIAS };
    struct gmm_bwd_args a = {.dy = c->t[DY],
                             .x = c->t[X],
                             .prob = c->t[PROB],
                             .offset = c->t[OFFSET],
                             .dw = c->t[DW],
                             .dbias = c->t[DBIAS],
                             .acc_dw = c->add[DW],
                             .acc_dbias = c->add[DBIAS]};
    return c->ops->gmm_bwd(c->lane, &a);
}

static int act_forward(const struct step_ctx *c)
{
    enum { PRE, PROB, ACT };
    const struct act_rule *rule = c->self;
    struct act_fwd_args a = {.x = c->t[PRE], .prob = c->t[PROB], .y = c->t[ACT], .rule = *rule};
    return c->ops->act_fwd(c->lane, &a);
}

/* The probability also scales the bias of fc2, which adds to its gradient. */
static int act_backward(const struct step_ctx *c)
{
    enum { DACT, PRE, PROB, DY, B2, OFFSET, DPRE, DPROB };
    const struct act_rule *rule = c->self;
    struct act_bwd_args a = {.dy = c->t[DACT],
                             .x = c->t[PRE],
                             .prob = c->t[PROB],
                             .dx = c->t[DPRE],
                             .dprob = c->t[DPROB],
                             .rule = *rule};
    TRY(c->ops->act_bwd(c->lane, &a));
    if (c->t[B2].data == NULL)
        return ST_OK;
    struct gmm_bwd_args g = {.dy = c->t[DY],
                             .bias = c->t[B2],
                             .offset = c->t[OFFSET],
                             .dprob = c->t[DPROB],
                             .acc_dprob = true};
    return c->ops->gmm_bwd(c->lane, &g);
}

static int up_fwd(const struct step_ctx *c)
{
    enum { X, W, BIAS, PROB, OFFSET, PRE, ACT };
    const struct act_rule *rule = c->self;
    struct expert_up_args a = {.x = c->t[X],
                               .w = c->t[W],
                               .bias = c->t[BIAS],
                               .prob = c->t[PROB],
                               .offset = c->t[OFFSET],
                               .pre = c->t[PRE],
                               .y = c->t[ACT],
                               .rule = *rule};
    return c->ops->expert_up(c->lane, &a);
}

static int down_bwd(const struct step_ctx *c)
{
    enum { DY, W, BIAS, PRE, PROB, OFFSET, DPRE, ACT, DPROB, WORK };
    const struct act_rule *rule = c->self;
    struct expert_down_bwd_args a = {.dz = c->t[DY],
                                     .w = c->t[W],
                                     .bias = c->t[BIAS],
                                     .pre = c->t[PRE],
                                     .prob = c->t[PROB],
                                     .offset = c->t[OFFSET],
                                     .dpre = c->t[DPRE],
                                     .y = c->t[ACT],
                                     .dprob = c->t[DPROB],
                                     .work = c->t[WORK],
                                     .rule = *rule};
    return c->ops->expert_down_bwd(c->lane, &a);
}

/* ---- nodes -------------------------------------------------------------------------------------------------------------- */

/* Between the products. again: act as the fused backward makes it. */
struct between {
    slot_id pre, dpre, act, dact, again, work;
};

struct product_cost {
    double flops, bytes;
};
static struct product_cost product_cost(const struct build *b, slot_id x, slot_id y, slot_id w)
{
    const struct slot *s = b->g->slots;
    double rows = (double)s[x].shape.dim[0], in = (double)s[x].shape.dim[1], out = (double)s[y].shape.dim[1],
           experts = (double)s[w].shape.dim[0];
    return (struct product_cost){2 * rows * in * out,
                                 (double)dtype_bytes(b->dev->real) * (rows * (in + out) + experts * in * out)};
}

/* A product's weight gradient from its input and the gradient of its output. */
static void declare_dw(struct build *b, int n, const struct experts *e, slot_id dy, slot_id x, slot_id prob, const struct weight *w,
                       const struct weight *bias)
{
    struct product_cost cost = product_cost(b, x, dy, w->w);
    GRAPH_PHASE(b->g, n, PH_DW, group_dw, READS(dy), READS(x), READS(prob), READS(e->offset), ADDS(w->dw), ADDS(bias->dw));
    graph_cost(b->g, n, PH_DW, cost.flops, cost.bytes);
}

static void declare_dx(struct build *b, int n, const struct experts *e, slot_id dy, slot_id dx, const struct weight *w)
{
    struct product_cost cost = product_cost(b, dx, dy, w->w);
    GRAPH_PHASE(b->g, n, PH_BWD, group_bwd, READS(dy), READS(w->w), READS(e->offset), WRITES(dx));
    graph_cost(b->g, n, PH_BWD, cost.flops, cost.bytes);
}

static void declare_fc1(struct build *b, const struct experts *e, const struct between *s)
{
    struct graph *g = b->g;
    struct product_cost cost = product_cost(b, e->x, s->pre, e->w1.w);
    int n = graph_node(g, "fc1", LANE_COMPUTE, NULL);
    GRAPH_PHASE(g, n, PH_FWD, group_fwd, READS(e->x), READS(e->w1.w), READS(e->b1.w), READS(NO_SLOT), READS(e->offset), WRITES(s->pre));
    graph_cost(g, n, PH_FWD, cost.flops, cost.bytes);
    if (!training(b))
        return;
    GRAPH_PHASE(g, n, PH_REPLAY, group_fwd, READS(e->x), READS(e->w1.w), READS(e->b1.w), READS(NO_SLOT), READS(e->offset), WRITES(s->pre));
    graph_cost(g, n, PH_REPLAY, cost.flops, cost.bytes);
    graph_replay(g, s->pre, n);
    declare_dx(b, n, e, s->dpre, e->dx, &e->w1);
    declare_dw(b, n, e, s->dpre, e->x, NO_SLOT, &e->w1, &e->b1);
}

static void declare_act(struct build *b, const struct experts *e, const struct between *s)
{
    struct graph *g = b->g;
    double elems = (double)tensor_elems(&g->slots[s->pre].shape), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "act", LANE_COMPUTE, e->act);
    GRAPH_PHASE(g, n, PH_FWD, act_forward, READS(s->pre), READS(e->prob), WRITES(s->act));
    graph_cost(g, n, PH_FWD, 8 * elems, 1.5 * elems * size);
    if (!training(b))
        return;
    GRAPH_PHASE(g, n, PH_REPLAY, act_forward, READS(s->pre), READS(e->prob), WRITES(s->act));
    graph_replay(g, s->act, n);
    slot_id dy = e->b2.w != NO_SLOT ? e->dy : NO_SLOT;
    GRAPH_PHASE(g, n, PH_BWD, act_backward, READS(s->dact), READS(s->pre), READS(e->prob), READS(dy), READS(e->b2.w), READS(e->offset),
                WRITES(s->dpre), WRITES(e->dprob));
    graph_inplace(g, n, PH_BWD, 1, 6); /* the pre-activations die here */
    graph_cost(g, n, PH_BWD, 16 * elems, 2.5 * elems * size);
}

/* Forward of fc2, the same in both ways. */
static int declare_fc2(struct build *b, const struct experts *e, const struct between *s)
{
    struct graph *g = b->g;
    slot_id prob = e->b2.w != NO_SLOT ? e->prob : NO_SLOT;
    struct product_cost cost = product_cost(b, s->act, e->y, e->w2.w);
    int n = graph_node(g, "fc2", LANE_COMPUTE, e->act);
    GRAPH_PHASE(g, n, PH_FWD, group_fwd, READS(s->act), READS(e->w2.w), READS(e->b2.w), READS(prob), READS(e->offset), WRITES(e->y));
    graph_cost(g, n, PH_FWD, cost.flops, cost.bytes);
    if (!training(b))
        return n;
    slot_id x = s->again != NO_SLOT ? s->again : s->act;
    if (s->again == NO_SLOT)
        declare_dx(b, n, e, e->dy, s->dact, &e->w2);
    declare_dw(b, n, e, e->dy, x, prob, &e->w2, &e->b2);
    return n;
}

static void declare_up(struct build *b, const struct experts *e, const struct between *s)
{
    struct graph *g = b->g;
    struct product_cost cost = product_cost(b, e->x, s->pre, e->w1.w);
    int n = graph_node(g, "fc1", LANE_COMPUTE, e->act);
    GRAPH_PHASE(g, n, PH_FWD, up_fwd, READS(e->x), READS(e->w1.w), READS(e->b1.w), READS(e->prob), READS(e->offset), WRITES(s->pre),
                WRITES(s->act));
    graph_cost(g, n, PH_FWD, cost.flops, cost.bytes);
    if (!training(b))
        return;
    GRAPH_PHASE(g, n, PH_REPLAY, up_fwd, READS(e->x), READS(e->w1.w), READS(e->b1.w), READS(e->prob), READS(e->offset), WRITES(s->pre),
                WRITES(s->act));
    graph_cost(g, n, PH_REPLAY, cost.flops, cost.bytes);
    graph_replay(g, s->pre, n);
    graph_replay(g, s->act, n);
    declare_dx(b, n, e, s->dpre, e->dx, &e->w1);
    declare_dw(b, n, e, s->dpre, e->x, NO_SLOT, &e->w1, &e->b1);
}

static void declare_down(struct build *b, const struct experts *e, const struct between *s)
{
    struct graph *g = b->g;
    int n = declare_fc2(b, e, s);
    if (!training(b))
        return;
    struct product_cost cost = product_cost(b, s->again, e->dy, e->w2.w);
    GRAPH_PHASE(g, n, PH_BWD, down_bwd, READS(e->dy), READS(e->w2.w), READS(e->b2.w), READS(s->pre), READS(e->prob), READS(e->offset),
                WRITES(s->dpre), WRITES(s->again), WRITES(e->dprob), WRITES(s->work));
    graph_inplace(g, n, PH_BWD, 3, 6); /* the pre-activations die here */
    graph_cost(g, n, PH_BWD, cost.flops, cost.bytes + 2 * (double)tensor_bytes(&g->slots[s->pre].shape));
}

static slot_id down_work(struct build *b, const struct experts *e, const struct between *s)
{
    const struct slot *slots = b->g->slots;
    struct expert_down_bwd_args a = {.dz = slots[e->dy].shape, .w = slots[e->w2.w].shape, .pre = slots[s->pre].shape, .rule = *e->act};
    return b->ops->expert_down_bwd_work ? build_work(b, "down_work", b->ops->expert_down_bwd_work(&a)) : NO_SLOT;
}

static bool is_fused(const struct build *b)
{
    int how = b->cfg->plan.fused_experts;
    return how == CFG_FUSED_ON || (how == CFG_FUSED_AUTO && b->dev->kind == DEV_CUDA);
}

void experts_declare(struct build *b, const struct experts *e)
{
    if (b->g->err.code != ST_OK)
        return;
    int64_t rows = b->g->slots[e->x].shape.dim[0];
    bool fused = is_fused(b);
    struct between s = {.pre = build_real(b, "pre", rows, e->wide),
                        .dpre = build_grad(b, "dpre", rows, e->wide),
                        .act = build_real(b, "act", rows, e->ffn),
                        .dact = fused ? NO_SLOT : build_grad(b, "dact", rows, e->ffn),
                        .again = fused ? build_grad(b, "act_again", rows, e->ffn) : NO_SLOT,
                        .work = NO_SLOT};
    if (!fused) {
        declare_fc1(b, e, &s);
        declare_act(b, e, &s);
        declare_fc2(b, e, &s);
        return;
    }
    if (training(b) && b->g->err.code == ST_OK)
        s.work = down_work(b, e, &s);
    declare_up(b, e, &s);
    declare_down(b, e, &s);
}
