/* Private to optim/: the exchanges between ranks that the update plan is given. */
#ifndef BRAID_OPTIM_INT_H
#define BRAID_OPTIM_INT_H

#include "optim/optim.h"

/* The part of an arena that a slot stands for. */
struct stretch {
    int64_t begin, end; /* bytes; empty where end <= begin */
};

/* Gradients of weights that first and last pipeline stage both hold become the sums of both; nothing where there are
 * none. */
void declare_ends(struct optim *o, const struct model *m, slot_id grads, const struct stretch *s);
/* Weights that have FP8 codes become those of the ranks that updated them; nothing where no other rank does. */
void declare_coded_gather(struct optim *o, const struct model *m, slot_id params, const struct stretch *s);
/* t [ranks, n]: every rank's own row goes to all. */
void declare_share(struct optim *o, const struct model *m, const char *name, slot_id t);

#endif
