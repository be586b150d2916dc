/* The dense MLP core, symbol '-':  f = fc2( act( fc1 h ) ).
 *
 *   pre  [rows, 2f or f]  = h W1^T + b1           gated kinds hold [gate | up]
 *   act  [rows, f]        = act(gate) * up        (ops/act)
 *   f    [rows, hidden]   = act W2^T + b2
 * backward: dact = df W2; dpre = act'(pre) * dact; dh = dpre W1; dW2 = df^T act; dW1 = dpre^T h. */
#include "layers/layer.h"
#include "ops/act8/act8.h"

/* Before both linear layers: who makes codes of the activation, and of the gradient of the pre-activations unless a
 * bias sums them. The adapters of LoRA read both as they are. */
void act_codes(struct build *b, const struct act_slots *s, const struct weight *w1, const struct weight *w2, bool bias)
{
    if (b->cfg->lora.rank > 0)
        return;
    if (w2->codes.q != NO_SLOT)
        declare_known(b, s->act, DT_F8_E4M3);
    if (w1->codes.q != NO_SLOT && training(b) && !bias)
        declare_known(b, s->dpre, code_rule(b->cfg).grad);
}

static void declare_act_bwd(struct build *b, int n, struct act_rule rule, const struct act_slots *s)
{
    struct graph *g = b->g;
    struct code_slots dx = known_codes(b, s->dpre);
    if (dx.q != NO_SLOT) {
        GRAPH_OP(g, n, PH_BWD, act8_bwd, .dy = of(g, s->dact), .x = of(g, s->pre), .q = of(g, dx.q), .qs = of(g, dx.qs),
                 .t = of(g, dx.t), .ts = of(g, dx.ts), .rule = rule, .block = code_rule(b->cfg).block);
        return;
    }
    GRAPH_OP(g, n, PH_BWD, act_bwd, .dy = of(g, s->dact), .x = of(g, s->pre), .dx = of(g, s->dpre), .rule = rule);
    graph_inplace(g, n, PH_BWD, s->pre, s->dpre); /* the pre-activations die here */
}

void act_declare(struct build *b, const char *name, struct act_rule rule, const struct act_slots *s)
{
    struct graph *g = b->g;
    struct code_slots y = known_codes(b, s->act);
    double elems = g->err.code == ST_OK ? (double)tensor_elems(&g->slots[s->pre].shape) : 0;
    double size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, name, LANE_COMPUTE, NULL);
    if (y.q != NO_SLOT)
        GRAPH_OP(g, n, PH_FWD, act8_fwd, .x = of(g, s->pre), .q = of(g, y.q), .qs = of(g, y.qs), .t = of(g, y.t),
                 .ts = of(g, y.ts), .rule = rule, .block = code_rule(b->cfg).block);
    else
        GRAPH_OP(g, n, PH_FWD, act_fwd, .x = of(g, s->pre), .y = of(g, s->act), .rule = rule);
    graph_cost(g, n, PH_FWD, 8 * elems, 1.5 * elems * size);
    if (!training(b))
        return;
    if (y.q != NO_SLOT)
        codes_again(b, n, &y);
    else
        graph_again(g, n, s->act);
    declare_act_bwd(b, n, rule, s);
    graph_cost(g, n, PH_BWD, 16 * elems, 2.5 * elems * size);
}

static int mlp_declare(struct build *b, struct core_io *io)
{
    const struct config_model *c = &b->cfg->model;
    struct act_rule rule = {
        .kind = (enum act_kind)c->act, .clamp = c->act_clamp, .alpha = c->act_alpha, .offset = c->act_offset};
    int64_t f = c->ffn, wide = act_is_gated(rule.kind) ? 2 * f : f, d = c->hidden;
    graph_scope(b->g, b->layer, "mlp");
    struct param p1 = param_matrix("mlp.linear_fc1.weight", wide, d, c->init_std),
                 p2 = param_matrix("mlp.linear_fc2.weight", d, f, output_std(b));
    struct param pb1 = param_vector("mlp.linear_fc1.bias", wide, INIT_ZERO),
                 pb2 = param_vector("mlp.linear_fc2.bias", d, INIT_ZERO);
    for (int64_t at = 0; at < wide; at += f) { /* gate and up each */
        param_split_section(&p1, 0, f, UNIT_FFN, f);
        param_split_section(&pb1, 0, f, UNIT_FFN, f);
    }
    param_split(&p2, 1, UNIT_FFN, f);
    param_replicate(&pb2, GRAD_OVER_TOKENS);
    struct weight w1 = build_linear_weight(b, &p1), w2 = build_linear_weight(b, &p2);
    bool bias = c->bias || c->mlp_bias;
    struct weight b1 = bias ? build_weight(b, &pb1) : no_weight(), b2 = bias ? build_weight(b, &pb2) : no_weight();
    f /= b->mesh->tp; /* this rank's channels from here on */
    wide /= b->mesh->tp;

    slot_id pre = build_real(b, "pre", b->rows, wide), act = build_real(b, "act", b->rows, f);
    slot_id dact = build_grad(b, "dact", b->rows, f), dpre = build_grad(b, "dpre", b->rows, wide);
    io->f = build_real(b, "out", b->rows, d);
    struct act_slots slots = {.pre = pre, .act = act, .dact = dact, .dpre = dpre};
    act_codes(b, &slots, &w1, &w2, bias);
    linear_declare(b, "fc1",
                   &(struct linear){.x = io->h,
                                    .y = pre,
                                    .dy = dpre,
                                    .dx = io->dh,
                                    .w = w1,
                                    .bias = b1,
                                    .in = d,
                                    .out = wide,
                                    .part = {{wide > f ? "gate" : "up", f}, {wide > f ? "up" : NULL, f}}});
    act_declare(b, "act", rule, &slots);
    linear_declare(
        b, "fc2",
        &(struct linear){
            .x = act, .y = io->f, .dy = io->df, .dx = dact, .w = w2, .bias = b2, .in = f, .out = d, .summed = true});
    return b->g->err.code;
}

/* ---- options --------------------------------------------------------------------------------- */

static bool gated(const struct config *c) { return act_is_gated((enum act_kind)c->model.act); }

static bool not_all_biases(const struct config *c) { return !c->model.bias; }

static bool gate_options_without_gate(const struct config *c)
{
    return !gated(c) && (c->model.act_clamp != 0 || c->model.act_offset != 0);
}

static bool alpha_without_quick(const struct config *c)
{
    return c->model.act_alpha != 1.702 && c->model.act != CFG_ACT_QUICK_GELU && c->model.act != CFG_ACT_QUICK_GEGLU;
}

/* clang-format off */
static const struct option_use mlp_uses[] = {
    {"model.bias", NULL, NULL},
    {"model.mlp_bias", not_all_biases, "model.bias = off, which gives these biases too"},
    {"model.ffn", NULL, NULL},
    {"model.act", NULL, NULL},
    {"model.act_clamp", NULL, NULL},
    {"model.act_alpha", NULL, NULL},
    {"model.act_offset", NULL, NULL},
};
static const struct rule mlp_rules[] = {
    {"clamp-and-offset-need-gate", gate_options_without_gate,
     "model.act_clamp and model.act_offset need a gated activation",
     {"model.act", "model.act_clamp", "model.act_offset"}},
    {"alpha-needs-quick", alpha_without_quick,
     "model.act_alpha only matters to quick_gelu and quick_geglu",
     {"model.act", "model.act_alpha"}},
};
static const struct tiny_size mlp_tiny[] = {
    {"model.ffn", 24, true},
};
/* clang-format on */

static double mlp_flops(const struct config *c, int64_t seq)
{
    (void)seq;
    return 4 * (double)c->model.hidden * (double)c->model.ffn * (gated(c) ? 1.5 : 1);
}

static struct kind_sizes mlp_sizes(const struct config *c)
{
    double width = 2 * (double)c->model.ffn;
    return (struct kind_sizes){.token = width, .weight = width * (double)c->model.hidden};
}

const struct core_kind core_mlp = {
    .symbol = '-',
    .name = "mlp",
    .title = "MLP",
    .norm_key = "mlp.linear_fc1.layer_norm_weight",
    .options = {KIND_ROWS(uses, mlp_uses), KIND_ROWS(rules, mlp_rules), KIND_ROWS(tiny, mlp_tiny)},
    .keys = {.family = "MLP", .place = KEY_PLACE_MLP, .transformer = true, .prefixes = {"mlp.linear_fc"}},
    .flops = mlp_flops,
    .divides_sequence = true,
    .divides_weights = true,
    .sizes = mlp_sizes,
    .declare = mlp_declare,
};
