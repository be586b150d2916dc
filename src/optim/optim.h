/* The update: gradient norm, clipping and AdamW, declared as nodes and planned like everything else. */
#ifndef BRAID_OPTIM_H
#define BRAID_OPTIM_H

#include "model/model.h"
#include "optim/schedule.h"

enum { HYPER_LR, HYPER_CORRECT1, HYPER_CORRECT2, HYPER_STEP, HYPER_COUNT = 8 };
enum { CLIP_NORM, CLIP_COEF, CLIP_SKIP, CLIP_SUM, CLIP_COUNT };

struct bucket_nodes;
struct update_node;

/* The update as one plan, p; or where state lies in host memory (optim.offload) as two, p up to the decision and apply
 * for what follows. With optim.overlap the training plan of the next step does what apply would: beside. */
struct optim {
    struct graph g;
    struct plan p, apply;
    struct plan beside; /* over the graph of the training plan; its name is NULL where there is none */
    struct lr_schedule schedule;
    double beta1, beta2;
    slot_id hyper;
    slot_id clip;                /* F64 [4]: what the update decided */
    bool streamed, masters_away; /* moments lie in host memory, and master weights too */
    const struct update_node *update;
    struct bucket_nodes *buckets, *beside_buckets; /* [n_buckets] nodes in g, and in the graph of the training plan */
    int n_buckets;
    bool built;
};
/* After the train plan was built (its parameters and loss slot exist), before model_commit. */
int optim_build(struct optim *o, struct model *m, struct model_plan *train, struct err *e);
/* Why the update does not run beside the next step: NULL where it does, or where nothing is in host memory. */
const char *optim_alone(const struct optim *o, const struct model *m);
/* Bytes of state that an update moves each way between host and device; 0: none. */
double optim_moved(const struct optim *o);
/* A line that says where the update runs, and why; nothing where no state is in host memory. */
void optim_print(const struct optim *o, const struct model *m, struct buf *out);
void optim_release(struct optim *o);
/* Hyper-parameters of update number `step` (0-based), in the order ops/adamw wants. */
void optim_hyper(const struct optim *o, int64_t step, double hyper[HYPER_COUNT]);

/* Which elements of parameter `index`, as this rank holds it, are this rank's own among those that hold copies. */
struct shard shard_of(const struct model *m, int index);
/* What this rank updates of it: its shard, or all of it. */
struct shard shard_updated(const struct model *m, int index);
bool shard_is_all(const struct model *m, int index);

/* First (which 0) and second (which 1) moment of what this rank updates of parameter `index`: of the parameter's shape,
 * or of a shard [n]. On the device, or in host memory that its copies reach (optim.offload). */
struct tensor optim_state(const struct model *m, int index, int which);
/* Type of the moments (optim.state): the wide one, or bf16. */
enum dtype optim_type(const struct model *m);

#endif
