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
    int64_t elems, grad, master, param, optim, second; /* optim, second: of the first and second moment */
    double decay, rate;
    int index;     /* the parameter */
    int64_t local; /* first element, in this rank's part of it */
    bool coded;    /* the update makes its FP8 codes: all of it is updated here */
};
enum form { FORM_GRAD, FORM_MASTER, FORM_PARAM, FORM_OPTIM, FORM_COUNT };
struct update_node {
    const struct model *m;
    double beta1, beta2, eps;
    enum dtype wide, real, state;
    int n;
    const struct trained *list;
    struct stretch form[FORM_COUNT];
    int64_t first_sum; /* norm: of all sums */
    /* Filled at every run: what the ops take as lists. */
    struct tensor *grads;     /* [n] */
    struct adamw_part *parts; /* as many as split_parts() makes of all */
};

/* The part of an update as the op takes it: one, or where moments are rounded one for each stretch of the whole
 * parameter. Returns their number; out may be NULL. */
int split_parts(const struct update_node *n, const struct trained *t, const struct adamw_part *whole,
                struct adamw_part *out);
struct adamw_args update_args(const struct update_node *n, const struct adamw_part *parts, int n_parts,
                              const struct tensor *hyper, const struct tensor *scale);

/* n elements at this byte of the arena whose stretch is t. */
struct tensor stretch_at(const struct tensor *t, const struct stretch *s, int64_t offset, enum dtype type, int64_t n);
slot_id stretch_slot(struct graph *g, const struct update_node *n, enum form form);
/* Nodes of a bucket: its state comes in, AdamW, its state goes out. */
struct bucket_nodes {
    int in, adamw, out;
};
/* The update of state that lies in host memory (stream.c). Slots of gradients and parameters must have been declared.
 * */
int declare_streamed_update(struct optim *o, const struct update_node *n, slot_id hyper);
/* An order of all nodes of the update becomes two: up to the decision, and the buckets. What follows them comes after
 * them too where they run alone, else with the decision. */
int order_streamed_update(const struct optim *o, bool alone, const struct order *all, struct order *decide,
                          struct order *apply, struct err *e);
/* The training plan once more, with the buckets of the update in it: o->beside. */
int build_beside(struct optim *o, struct model *m, struct model_plan *train, struct err *e);

/* Gradients of weights that first and last pipeline stage both hold become the sums of both; nothing where there are
 * none. */
void declare_ends(struct optim *o, const struct model *m, slot_id grads, const struct stretch *s);
/* Codes that ranks make together, of new values; nothing where there are none. */
void declare_shared_codes(struct optim *o, const struct model *m, slot_id params, slot_id codes);
/* Weights whose codes each rank makes of all values become those of the ranks that updated them; nothing where no other
 * rank does. */
void declare_coded_gather(struct optim *o, const struct model *m, slot_id params, const struct stretch *s);
/* t [ranks, n]: every rank's own row goes to all. */
void declare_share(struct optim *o, const struct model *m, const char *name, slot_id t);

#endif
