/* The experts of a mixture: what moe.c asks of moe_experts.c. Private to layers/. */
#ifndef BRAID_LAYERS_MOE_EXPERTS_INT_H
#define BRAID_LAYERS_MOE_EXPERTS_INT_H

#include "layers/layer.h"
#include "ops/act/act.h"

/* Rows sorted by expert, their probabilities, what comes out. act lives as long as the graph. */
struct experts {
    slot_id offset, x, dx, prob, dprob, y, dy;
    struct weight w1, w2, b1, b2;
    const struct act_rule *act;
    int64_t ffn, wide; /* width of the activation, rows of w1 */
};
void experts_declare(struct build *b, const struct experts *e);

#endif
