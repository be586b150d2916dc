/* Private to optim/: buckets of parameters, and the exchanges between ranks that the update plan is given. */
#ifndef BRAID_OPTIM_INT_H
#define BRAID_OPTIM_INT_H

#include "optim/optim.h"

/* Trained parameters that are reduced, updated and gathered together. */
struct bucket {
    const char *suffix; /* of its nodes' names: "" if it is the only one */
    int n;
    const int *index;   /* into the parameter table, rising */
    bool exchanged;     /* other ranks hold copies of these */
};
/* On one rank a single bucket; else parameters in table order, up to parallel.bucket_mb of gradients each, experts and the
 * others apart, since they are shared with different ranks. */
int bucket_list(struct graph *g, const struct model *m, struct bucket **out, int *n);

/* The part of an arena that a slot of a bucket stands for. */
struct stretch {
    int64_t begin, end; /* bytes; empty where end <= begin */
};

/* Gradients become sums over ranks: all of them where every rank updates all, else each rank's own shard. */
void declare_reduce(struct optim *o, const struct model *m, const struct bucket *b, slot_id grads, const struct stretch *s);
/* What each rank updated goes to the others. */
void declare_gather(struct optim *o, const struct model *m, const struct bucket *b, slot_id params, const struct stretch *s);
/* t [ranks, n]: every rank's own row goes to all. */
void declare_share(struct optim *o, const struct model *m, const char *name, slot_id t);

#endif
