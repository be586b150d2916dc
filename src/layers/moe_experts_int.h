/* The experts of a mixture: what moe.c asks of moe_experts.c. Private to layers/. */
#ifndef BRAID_LAYERS_MOE_EXPERTS_INT_H
#define BRAID_LAYERS_MOE_EXPERTS_INT_H

#include "layers/layer.h"
#include "ops/act/act.h"

/* Rows sorted by expert, their probabilities, what comes out. act lives as long as the graph. Where the rows may be
 * fetched from tokens, with the codes that are made of them (FP8), h and df are those, and src with k choices to a
 * token says which; x and dy are then not made. */
struct experts {
    slot_id offset, x, dx, prob, dprob, y, dy;
    slot_id h, df, src, row; /* NO_SLOT: x and dy are there; row: src the other way round */
    int64_t k;
    struct weight w1, w2, b1, b2;
    const struct act_rule *act;
    int64_t ffn, wide; /* width of the activation, rows of w1 */
};
void experts_declare(struct build *b, const struct experts *e);
/* moe_experts8.c: whether the experts have codes; whether it wants x, and dy, as tokens and src. */
bool experts8(const struct weight *w1);
bool experts8_fetch_x(const struct build *b, const struct weight *w1);
bool experts8_fetch_dy(const struct build *b, const struct weight *w1, const struct weight *b2);
void experts8_declare(struct build *b, const struct experts *e);

/* moe_shared.c: the output of the shared expert, on which the experts' is added; NO_SLOT: there is none. */
slot_id shared_expert_declare(struct build *b, struct act_rule rule, const struct core_io *io);

/* moe_kernels.c: what core_kind says of sizes and kernels. */
struct kind_sizes moe_sizes(const struct config *c);
void moe_kernels(const struct kernel_report *r);

#endif
