/* A mixture of experts: sizes and slots that moe.c and moe_params.c share. Private to layers/. */
#ifndef BRAID_LAYERS_MOE_INT_H
#define BRAID_LAYERS_MOE_INT_H

#include "layers/moe_ep_int.h"
#include "layers/moe_experts_int.h"
#include "ops/act/act.h"
#include "ops/router/router.h"

struct moe {
    int64_t experts, k, width, ffn, wide, vocab; /* wide: rows of fc1 */
    int64_t local;                               /* experts on this rank */
    int64_t batch_ranks;                         /* that share the batch */
    struct router_rule rule;
    struct act_rule act, shared_act;
    double jitter, bias_rate;
    uint64_t jitter_key, noise_key;
    int64_t seq;
    bool hashed;
};

struct moe_slots {
    slot_id hj, dhj, gate, logits, dlogits, probs, dprobs, idx, load, stat, tally, global;
    slot_id offset, xp, dxp, prow, dprow, yp, dyp; /* at the experts */
    struct ep_home home; /* where the tokens are; the same slots unless experts live on other ranks */
    struct ep ep;
    slot_id shared; /* what the combine starts from, or NO_SLOT */
    slot_id given;  /* choices of another run, or NO_SLOT */
    struct weight router, router_bias, bias, table, w1, w2, b1, b2;
};

/* Declares them into s; the width of experts in m becomes that of this rank's slices. */
void moe_declare_params(struct build *b, struct moe *m, struct moe_slots *s);

#endif
