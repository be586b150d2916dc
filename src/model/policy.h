/* What a training plan does with activations between the forward and the backward pass: keep them, drop and recompute
 * them, or let them wait in host memory. plan.recompute, plan.recompute_granularity, plan.recompute_block and
 * plan.offload are read once, here, when the model is made; layers see what concerns them as values of struct
 * build (struct stream_policy). */
#ifndef BRAID_MODEL_POLICY_H
#define BRAID_MODEL_POLICY_H

#include "layers/layer.h"
#include "plan/plan.h"

/* One word of the list: a slot, a scope, a glob, a group of a layer kind, or "full". */
enum { POLICY_NAME = 64 };
struct policy_word {
    char name[POLICY_NAME];
    int64_t layers; /* of the first so many only */
    bool offload;   /* of plan.offload, else of plan.recompute */
};
struct policy {
    struct policy_word *words; /* of both lists, in the order given */
    int n_words;
    size_t cap;
    struct stream_policy streams;
};
/* n_layers: of the model. Release it whether this fails or not. */
int policy_read(struct policy *p, const struct config *c, int n_layers, struct err *e);
void policy_release(struct policy *p);
/* Marks what a word means; returns how many slots that are. */
int policy_mark(const struct policy_word *w, struct graph *g);
/* The error for a word that means nothing: it lists what this graph can recompute or offload. */
int policy_unknown(const struct policy_word *w, const struct graph *g, struct err *e);
/* The error for a list of plan.offload that moves nothing, with the reasons. */
int policy_moves_nothing(const struct config *c, const struct offload_count *count, struct err *e);

#endif
