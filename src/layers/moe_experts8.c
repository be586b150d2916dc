/* The MLPs of experts in FP8 (gpu.precision=fp8; moe.c says what the letters mean, linear8.c how codes are made).
 *
 *   forward   pre, act = fc1 of the codes of x, by rows of 128; act leaves fc1 as codes, and y = fc2 of them
 *   backward  dpre = the gradient through fc2 and the activation, from codes of dy; dx from codes of dpre
 *   dw        from transposes by 128 tokens: dW1 += dpre^T x, dW2 += dy^T act
 * Kept for the backward pass is pre alone, and what x is made of. The transposes of x and act are made in the backward
 * pass: x is fetched again, act recomputed from pre. Where all experts are here and each block has its own scale, rows
 * of x and dy are fetched from the tokens by the quantiser itself. */
#include "layers/moe_experts_int.h"
#include "ops/expert8/expert8.h"
#include "ops/gmm/gmm.h"
#include "ops/gmm8/gmm8.h"
#include "ops/quantise/quantise.h"

bool experts8(const struct weight *w1) { return w1->codes.q != NO_SLOT; }
bool experts8_fetch_x(const struct build *b, const struct weight *w1)
{
    return experts8(w1) && code_rule(b->cfg).block > 0;
}
/* Biases of fc2 want their gradient from dy itself. */
bool experts8_fetch_dy(const struct build *b, const struct weight *w1, const struct weight *b2)
{
    return experts8_fetch_x(b, w1) && b2->w == NO_SLOT;
}

/* ---- slots ----------------------------------------------------------------------------------- */

/* Codes and scales of one orientation, [rows, cols]. */
struct coded {
    slot_id q, s;
};
static struct coded coded_slots(struct build *b, const char *codes, const char *scales, enum dtype type, int64_t rows,
                                int64_t cols)
{
    return (struct coded){
        graph_slot(b->g, codes, tensor_2d(NULL, type, rows, cols)),
        graph_slot(b->g, scales, f8_scales(b->dev->wide, rows, cols, code_rule(b->cfg).block, false))};
}

struct codes8 {
    struct code_rule rule;
    slot_id pre, dpre, again;        /* again: the activation, recomputed */
    struct coded x, act;             /* by rows */
    struct coded dy, dpre_q;         /* gradients, by rows */
    struct coded xt, actt, dyt, dpt; /* transposes, by tokens */
};

static struct codes8 declare_slots(struct build *b, const struct experts *e)
{
    struct codes8 c = {.rule = code_rule(b->cfg)};
    int64_t rows = b->g->slots[e->prob].shape.dim[0], d = b->g->slots[e->y].shape.dim[1];
    enum dtype e4m3 = DT_F8_E4M3, grad = c.rule.grad;
    c.pre = build_real(b, "pre", rows, e->wide);
    c.dpre = build_grad(b, "dpre", rows, e->wide);
    c.again = build_grad(b, "act_again", rows, e->ffn);
    c.x = coded_slots(b, "rows.codes", "rows.scales", e4m3, rows, d);
    c.act = coded_slots(b, "act.codes", "act.scales", e4m3, rows, e->ffn);
    if (!training(b))
        return c;
    c.xt = coded_slots(b, "rows.codes_t", "rows.scales_t", e4m3, d, rows);
    c.actt = coded_slots(b, "act.codes_t", "act.scales_t", e4m3, e->ffn, rows);
    c.dy = coded_slots(b, "dout_rows.codes", "dout_rows.scales", grad, rows, d);
    c.dyt = coded_slots(b, "dout_rows.codes_t", "dout_rows.scales_t", grad, d, rows);
    c.dpre_q = coded_slots(b, "dpre.codes", "dpre.scales", grad, rows, e->wide);
    c.dpt = coded_slots(b, "dpre.codes_t", "dpre.scales_t", grad, e->wide, rows);
    return c;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

/* Codes of rows, or of tokens that src puts into rows. */
static void quantise_to(struct build *b, int n, enum phase_id ph, const struct experts *e, slot_id rows, slot_id tokens,
                        const struct coded *q, const struct coded *t)
{
    struct graph *g = b->g;
    struct coded none = {NO_SLOT, NO_SLOT};
    q = q != NULL ? q : &none;
    t = t != NULL ? t : &none;
    GRAPH_OP(g, n, ph, quantise, .x = of(g, tokens != NO_SLOT ? tokens : rows),
             .src = of(g, tokens != NO_SLOT ? e->src : NO_SLOT), .row = of(g, tokens != NO_SLOT ? e->row : NO_SLOT),
             .k = e->k, .q = of(g, q->q), .qs = of(g, q->s), .t = of(g, t->q), .ts = of(g, t->s),
             .block = code_rule(b->cfg).block);
}

/* The cost of a product [rows, in] x [experts, out, in] that moves `extra` bytes more. */
static void product_cost(struct build *b, int n, enum phase_id ph, const struct weight *w, int64_t rows, double extra)
{
    const struct param *p = &b->params->list[w->param].p;
    double experts = (double)p->dim[0], out = (double)p->dim[1], in = (double)p->dim[2];
    graph_cost(b->g, n, ph, 2 * (double)rows * in * out, (double)rows * (in + 2 * out) + experts * in * out + extra);
}

static void declare_dw(struct build *b, int n, const struct experts *e, const struct codes8 *c, const struct coded *dyt,
                       const struct coded *xt, const struct weight *w)
{
    struct graph *g = b->g;
    GRAPH_OP(g, n, PH_DW, gmm8_dw, .dyt = of(g, dyt->q), .dyts = of(g, dyt->s), .xt = of(g, xt->q), .xts = of(g, xt->s),
             .offset = of(g, e->offset), .dw = of(g, w->dw), .block = c->rule.block);
}

static void declare_fc1(struct build *b, const struct experts *e, const struct codes8 *c)
{
    struct graph *g = b->g;
    int64_t rows = g->slots[e->prob].shape.dim[0];
    double moved = 3 * (double)tensor_elems(&g->slots[c->x.q].shape);
    int n = graph_node(g, "fc1", LANE_COMPUTE, NULL);
    quantise_to(b, n, PH_FWD, e, e->x, e->h, &c->x, NULL);
    GRAPH_OP(g, n, PH_FWD, expert8_up, .x = of(g, c->x.q), .xs = of(g, c->x.s), .w = of(g, e->w1.codes.q),
             .ws = of(g, e->w1.codes.qs), .bias = of(g, e->b1.w), .prob = of(g, e->prob), .offset = of(g, e->offset),
             .pre = of(g, c->pre), .q = of(g, c->act.q), .qs = of(g, c->act.s), .block = c->rule.block,
             .square = c->rule.square, .rule = *e->act);
    product_cost(b, n, PH_FWD, &e->w1, rows, moved);
    if (!training(b))
        return;
    graph_again(g, n, c->pre);
    graph_again(g, n, c->x.q); /* never kept; recompute policies may still name them */
    graph_again(g, n, c->x.s);
    graph_again(g, n, c->act.q);
    graph_again(g, n, c->act.s);
    quantise_to(b, n, PH_BWD, e, c->dpre, NO_SLOT, &c->dpre_q, &c->dpt);
    GRAPH_OP(g, n, PH_BWD, gmm8, .x = of(g, c->dpre_q.q), .xs = of(g, c->dpre_q.s), .w = of(g, e->w1.codes.t),
             .ws = of(g, e->w1.codes.ts), .offset = of(g, e->offset), .y = of(g, e->dx), .block = c->rule.block,
             .square = c->rule.square, .turned = true);
    product_cost(b, n, PH_BWD, &e->w1, rows, 4 * (double)tensor_elems(&g->slots[c->dpre].shape));
    quantise_to(b, n, PH_DW, e, e->x, e->h, NULL, &c->xt);
    declare_dw(b, n, e, c, &c->dpt, &c->xt, &e->w1);
    if (e->b1.w != NO_SLOT)
        GRAPH_OP(g, n, PH_DW, gmm_bwd, .dy = of(g, c->dpre), .offset = of(g, e->offset), .dbias = of(g, e->b1.dw));
    product_cost(b, n, PH_DW, &e->w1, rows, moved);
}

static void declare_fc2(struct build *b, const struct experts *e, const struct codes8 *c)
{
    struct graph *g = b->g;
    int64_t rows = g->slots[e->prob].shape.dim[0];
    slot_id prob = e->b2.w != NO_SLOT ? e->prob : NO_SLOT;
    int n = graph_node(g, "fc2", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, gmm8, .x = of(g, c->act.q), .xs = of(g, c->act.s), .w = of(g, e->w2.codes.q),
             .ws = of(g, e->w2.codes.qs), .bias = of(g, e->b2.w), .prob = of(g, prob), .offset = of(g, e->offset),
             .y = of(g, e->y), .block = c->rule.block, .square = c->rule.square);
    product_cost(b, n, PH_FWD, &e->w2, rows, 0);
    if (!training(b))
        return;
    quantise_to(b, n, PH_BWD, e, e->dy, e->df, &c->dy, &c->dyt);
    GRAPH_OP(g, n, PH_BWD, expert8_down_bwd, .dz = of(g, c->dy.q), .dzs = of(g, c->dy.s), .w = of(g, e->w2.codes.t),
             .ws = of(g, e->w2.codes.ts), .pre = of(g, c->pre), .prob = of(g, e->prob), .offset = of(g, e->offset),
             .dpre = of(g, c->dpre), .y = of(g, c->again), .dprob = of(g, e->dprob), .block = c->rule.block,
             .square = c->rule.square, .rule = *e->act);
    if (e->b2.w != NO_SLOT) /* the probability also scales the bias of fc2, which adds to its gradient */
        GRAPH_OP(g, n, PH_BWD, gmm_bwd, .dy = of(g, e->dy), .bias = of(g, e->b2.w), .offset = of(g, e->offset),
                 .dprob = of(g, e->dprob));
    quantise_to(b, n, PH_BWD, e, c->again, NO_SLOT, NULL, &c->actt);
    graph_inplace(g, n, PH_BWD, c->pre, c->dpre); /* the pre-activations die here */
    product_cost(b, n, PH_BWD, &e->w2, rows, 3 * (double)tensor_bytes(&g->slots[c->pre].shape));
    declare_dw(b, n, e, c, &c->dyt, &c->actt, &e->w2);
    if (e->b2.w != NO_SLOT)
        GRAPH_OP(g, n, PH_DW, gmm_bwd, .dy = of(g, e->dy), .prob = of(g, prob), .offset = of(g, e->offset),
                 .dbias = of(g, e->b2.dw));
    product_cost(b, n, PH_DW, &e->w2, rows, 0);
}

void experts8_declare(struct build *b, const struct experts *e)
{
    struct codes8 c = declare_slots(b, e);
    if (b->g->err.code != ST_OK)
        return;
    declare_fc1(b, e, &c);
    declare_fc2(b, e, &c);
}
