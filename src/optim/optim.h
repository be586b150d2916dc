/* The update: gradient norm, clipping and AdamW, declared as nodes and planned like everything else. */
#ifndef BRAID_OPTIM_H
#define BRAID_OPTIM_H

#include "model/model.h"
#include "optim/schedule.h"

enum { HYPER_LR, HYPER_CORRECT1, HYPER_CORRECT2, HYPER_COUNT = 8 };
enum { CLIP_NORM, CLIP_COEF, CLIP_SKIP, CLIP_SUM, CLIP_COUNT };

struct optim {
    struct graph g;
    struct plan p;
    struct lr_schedule schedule;
    double beta1, beta2;
    slot_id clip; /* F64 [4]: what the update decided */
    /* Moments lie in host memory, and master weights too; the nodes that copy each bucket in and out. */
    bool streamed, masters_away;
    const int *copies; /* [2 * n_buckets] in, out */
    int n_buckets;
    bool built;
};
/* After the train plan was built (its parameters and loss slot exist), before model_commit. */
int optim_build(struct optim *o, struct model *m, const struct model_plan *train, struct err *e);
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

#endif
