/* The shared expert of a mixture: an MLP that every token goes to, with a gate of its own where asked for; see moe.c.
 * */
#include "layers/moe_experts_int.h"
#include "layers/shard.h"
#include "ops/gate/gate.h"

/* out * sigmoid(h gate^T); returns the gated output. */
static slot_id declare_shared_gate(struct build *b, const struct core_io *io, slot_id out, slot_id dout)
{
    struct graph *g = b->g;
    int64_t d = b->cfg->model.hidden;
    struct param p = param_matrix("mlp.shared_experts.gate_weight", 1, d, b->cfg->model.init_std);
    param_replicate(&p, GRAD_OVER_TOKENS);
    slot_id score = build_real(b, "shared_score", b->rows, 1), dscore = build_grad(b, "dshared_score", b->rows, 1);
    slot_id gated = build_real(b, "shared_gated", b->rows, d);
    linear_declare(b, "shared_score",
                   &(struct linear){.x = io->h,
                                    .y = score,
                                    .dy = dscore,
                                    .dx = io->dh,
                                    .w = build_weight(b, &p),
                                    .bias = no_weight(),
                                    .in = d,
                                    .out = 1,
                                    .plain = true});
    int n = graph_node(g, "shared_gate", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, gate_fwd, .x = of(g, out), .g = of(g, score), .y = of(g, gated));
    if (training(b))
        GRAPH_OP(g, n, PH_BWD, gate_bwd, .dy = of(g, io->df), .x = of(g, out), .g = of(g, score), .dx = of(g, dout),
                 .dg = of(g, dscore));
    return gated;
}

slot_id shared_expert_declare(struct build *b, struct act_rule rule, const struct core_io *io)
{
    const struct config_model *c = &b->cfg->model;
    if (c->shared_ffn == 0)
        return NO_SLOT;
    int64_t f = c->shared_ffn, wide = act_is_gated(rule.kind) ? 2 * f : f, d = c->hidden;
    struct param p1 = param_matrix("mlp.shared_experts.linear_fc1.weight", wide, d, c->init_std);
    struct param p2 = param_matrix("mlp.shared_experts.linear_fc2.weight", d, f, output_std(b));
    for (int64_t at = 0; at < wide; at += f) /* gate and up each */
        param_split_section(&p1, 0, f, UNIT_FFN, f);
    param_split(&p2, 1, UNIT_FFN, f);
    struct weight w1 = build_linear_weight(b, &p1), w2 = build_linear_weight(b, &p2);
    f /= b->mesh->tp; /* this rank's channels from here on, of all rows */
    wide /= b->mesh->tp;
    slot_id dout = c->shared_gate ? build_grad(b, "dshared", b->rows, d) : io->df;
    struct core_io in = {.h = io->h, .dh = io->dh, .df = dout};
    struct shard_scope divided = shard_begin(b, &in, false);
    slot_id pre = build_real(b, "shared_pre", b->rows, wide), act = build_real(b, "shared_act", b->rows, f);
    slot_id dpre = build_grad(b, "dshared_pre", b->rows, wide), dact = build_grad(b, "dshared_act", b->rows, f);
    in.f = build_real(b, "shared", b->rows, d);
    struct act_slots slots = {.pre = pre, .act = act, .dact = dact, .dpre = dpre};
    act_codes(b, &slots, &w1, &w2, false);
    linear_declare(b, "shared_fc1",
                   &(struct linear){.x = in.h,
                                    .y = pre,
                                    .dy = dpre,
                                    .dx = in.dh,
                                    .w = w1,
                                    .bias = no_weight(),
                                    .in = d,
                                    .out = wide,
                                    .part = {{wide > f ? "gate" : "up", f}, {wide > f ? "up" : NULL, f}}});
    act_declare(b, "shared_act", rule, &slots);
    linear_declare(b, "shared_fc2",
                   &(struct linear){
                       .x = act, .y = in.f, .dy = in.df, .dx = dact, .w = w2, .bias = no_weight(), .in = f, .out = d});
    shard_end(b, &divided, &in);
    return c->shared_gate ? declare_shared_gate(b, io, in.f, dout) : in.f;
}
