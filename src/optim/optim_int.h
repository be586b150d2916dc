/* Private to optim/: nodes of the update, and the exchanges between ranks that its plan is given. */
#ifndef BRAID_OPTIM_INT_H
#define BRAID_OPTIM_INT_H

#include "ops/adamw/adamw.h"
#include "optim/optim.h"

/* The part of an arena that a slot stands for. */
struct stretch {
    int64_t begin, end; /* bytes; empty where end <= begin */
};

/* Where the part of a parameter that a node works on is; bytes into the arena, -1: not there. */
struct trained {
    int64_t elems, grad, master, param, optim;
    double decay, rate;
    int coded; /* the parameter whose FP8 codes the update makes, all of it being updated here; -1: none */
};
enum form { FORM_GRAD, FORM_MASTER, FORM_PARAM, FORM_OPTIM, FORM_COUNT };
struct update_node {
    double beta1, beta2, eps;
    enum dtype wide, real;
    const struct model *m;
    int n;
    const struct trained *list;
    struct stretch form[FORM_COUNT];
    int64_t first_sum;    /* norm: of all sums */
    struct tensor *grads; /* n of each, filled at every run: what the ops take as lists */
    struct adamw_part *parts;
};

/* n elements at this byte of the arena whose stretch is t. */
struct tensor stretch_at(const struct tensor *t, const struct stretch *s, int64_t offset, enum dtype type, int64_t n);
slot_id stretch_slot(struct graph *g, const struct update_node *n, enum form form);
/* The update of state that lies in host memory (stream.c), and what bounds the memory of the device that it passes
 * through. */
void declare_streamed_update(struct optim *o, const struct update_node *n, slot_id grads, slot_id param, slot_id hyper);
void order_streamed_update(const struct optim *o, struct order *order);

/* Gradients of weights that first and last pipeline stage both hold become the sums of both; nothing where there are
 * none. */
void declare_ends(struct optim *o, const struct model *m, slot_id grads, const struct stretch *s);
/* Weights that have FP8 codes become those of the ranks that updated them; nothing where no other rank does. */
void declare_coded_gather(struct optim *o, const struct model *m, slot_id params, const struct stretch *s);
/* t [ranks, n]: every rank's own row goes to all. */
void declare_share(struct optim *o, const struct model *m, const char *name, slot_id t);

#endif
