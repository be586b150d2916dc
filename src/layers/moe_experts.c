/* The MLPs of experts: two grouped products and what lies between them (moe.c says what the letters mean).
 *   pre [R, w] = x W1_e^T + b1_e;  act [R, f] = prob * act(pre);  y [R, d] = act W2_e^T + prob * b2_e
 * Two ways to the same numbers. In steps: products and activation are nodes of their own, and act is kept for the
 * weight gradient of fc2 or recomputed. Fused, as GPUs want it: fc1 makes pre and act; the backward of fc2 goes through
 * the activation and recomputes act, so that only pre is kept. On hosts both give the same bits. In FP8 there is one
 * way of its own (moe_experts8.c). */
#include "layers/moe_experts_int.h"
#include "ops/act/act.h"
#include "ops/expert/expert.h"
#include "ops/gmm/gmm.h"

/* ---- nodes ----------------------------------------------------------------------------------- */

/* Between the products. again: act as the fused backward makes it. */
struct between {
    slot_id pre, dpre, act, dact, again;
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
static void declare_dw(struct build *b, int n, const struct experts *e, slot_id dy, slot_id x, slot_id prob,
                       const struct weight *w, const struct weight *bias)
{
    struct product_cost cost = product_cost(b, x, dy, w->w);
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_DW, gmm_bwd, .dy = of(g, dy), .x = of(g, x), .prob = of(g, prob), .offset = of(g, e->offset),
             .dw = of(g, w->dw), .dbias = of(g, bias->dw));
    graph_cost(b->g, n, PH_DW, cost.flops, cost.bytes);
}

static void declare_dx(struct build *b, int n, const struct experts *e, slot_id dy, slot_id dx, const struct weight *w)
{
    struct product_cost cost = product_cost(b, dx, dy, w->w);
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_BWD, gmm_bwd, .dy = of(g, dy), .w = of(g, w->w), .offset = of(g, e->offset), .dx = of(g, dx));
    graph_cost(b->g, n, PH_BWD, cost.flops, cost.bytes);
}

static void declare_fc1(struct build *b, const struct experts *e, const struct between *s)
{
    struct graph *g = b->g;
    struct product_cost cost = product_cost(b, e->x, s->pre, e->w1.w);
    int n = graph_node(g, "fc1", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, gmm_fwd, .x = of(g, e->x), .w = of(g, e->w1.w), .bias = of(g, e->b1.w),
             .offset = of(g, e->offset), .y = of(g, s->pre));
    graph_cost(g, n, PH_FWD, cost.flops, cost.bytes);
    if (!training(b))
        return;
    graph_again(g, n, s->pre);
    declare_dx(b, n, e, s->dpre, e->dx, &e->w1);
    declare_dw(b, n, e, s->dpre, e->x, NO_SLOT, &e->w1, &e->b1);
}

static void declare_act(struct build *b, const struct experts *e, const struct between *s)
{
    struct graph *g = b->g;
    double elems = (double)tensor_elems(&g->slots[s->pre].shape), size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "act", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, act_fwd, .x = of(g, s->pre), .prob = of(g, e->prob), .y = of(g, s->act), .rule = *e->act);
    graph_cost(g, n, PH_FWD, 8 * elems, 1.5 * elems * size);
    if (!training(b))
        return;
    graph_again(g, n, s->act);
    GRAPH_OP(g, n, PH_BWD, act_bwd, .dy = of(g, s->dact), .x = of(g, s->pre), .prob = of(g, e->prob),
             .dx = of(g, s->dpre), .dprob = of(g, e->dprob), .rule = *e->act);
    if (e->b2.w != NO_SLOT) /* the probability also scales the bias of fc2, which adds to its gradient */
        GRAPH_OP(g, n, PH_BWD, gmm_bwd, .dy = of(g, e->dy), .bias = of(g, e->b2.w), .offset = of(g, e->offset),
                 .dprob = of(g, e->dprob));
    graph_inplace(g, n, PH_BWD, s->pre, s->dpre); /* the pre-activations die here */
    graph_cost(g, n, PH_BWD, 16 * elems, 2.5 * elems * size);
}

/* Forward of fc2, the same in both ways. */
static int declare_fc2(struct build *b, const struct experts *e, const struct between *s)
{
    struct graph *g = b->g;
    slot_id prob = e->b2.w != NO_SLOT ? e->prob : NO_SLOT;
    struct product_cost cost = product_cost(b, s->act, e->y, e->w2.w);
    int n = graph_node(g, "fc2", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, gmm_fwd, .x = of(g, s->act), .w = of(g, e->w2.w), .bias = of(g, e->b2.w),
             .prob = of(g, prob), .offset = of(g, e->offset), .y = of(g, e->y));
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
    int n = graph_node(g, "fc1", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, expert_up, .x = of(g, e->x), .w = of(g, e->w1.w), .bias = of(g, e->b1.w),
             .prob = of(g, e->prob), .offset = of(g, e->offset), .pre = of(g, s->pre), .y = of(g, s->act),
             .rule = *e->act);
    graph_cost(g, n, PH_FWD, cost.flops, cost.bytes);
    if (!training(b))
        return;
    graph_again(g, n, s->pre);
    graph_again(g, n, s->act);
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
    GRAPH_OP(g, n, PH_BWD, expert_down_bwd, .dz = of(g, e->dy), .w = of(g, e->w2.w), .bias = of(g, e->b2.w),
             .pre = of(g, s->pre), .prob = of(g, e->prob), .offset = of(g, e->offset), .dpre = of(g, s->dpre),
             .y = of(g, s->again), .dprob = of(g, e->dprob), .rule = *e->act);
    graph_inplace(g, n, PH_BWD, s->pre, s->dpre); /* the pre-activations die here */
    graph_cost(g, n, PH_BWD, cost.flops, cost.bytes + 2 * (double)tensor_bytes(&g->slots[s->pre].shape));
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
    if (experts8(&e->w1)) {
        experts8_declare(b, e);
        return;
    }
    int64_t rows = b->g->slots[e->x].shape.dim[0];
    bool fused = is_fused(b);
    struct between s = {.pre = build_real(b, "pre", rows, e->wide),
                        .dpre = build_grad(b, "dpre", rows, e->wide),
                        .act = build_real(b, "act", rows, e->ffn),
                        .dact = fused ? NO_SLOT : build_grad(b, "dact", rows, e->ffn),
                        .again = fused ? build_grad(b, "act_again", rows, e->ffn) : NO_SLOT};
    if (!fused) {
        declare_fc1(b, e, &s);
        declare_act(b, e, &s);
        declare_fc2(b, e, &s);
        return;
    }
    declare_up(b, e, &s);
    declare_down(b, e, &s);
}
