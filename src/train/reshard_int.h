/* Private to train/: parameters of this rank among those of the whole model, for files that do not
 * depend on the ranks. */
#ifndef BRAID_TRAIN_RESHARD_INT_H
#define BRAID_TRAIN_RESHARD_INT_H

#include "train/train.h"

/* First element of a slice in the whole parameter. */
static inline int64_t slice_first(const struct param *p)
{
    return p->shard.full > 0 && p->dim[0] > 0 ? p->shard.first * (param_elems(p) / p->dim[0]) : 0;
}

/* Every parameter of the model with its whole shape. Where this rank holds all of them, its own table. */
struct full_table {
    const struct param_table *params;
    int *local;         /* row in this rank's table, -1: another stage has it */
    struct model paper; /* private */
    struct model_plan plan;
    bool made;
};
int full_table_open(struct full_table *f, const struct model *m, struct err *e);
void full_table_close(struct full_table *f);

#endif
