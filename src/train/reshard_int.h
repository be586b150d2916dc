/* Private to train/: parameters of this rank among those of the whole model, for files that do not
 * depend on the ranks. */
#ifndef BRAID_TRAIN_RESHARD_INT_H
#define BRAID_TRAIN_RESHARD_INT_H

#include "train/train.h"

/* Host memory: elements [first, first + n) of a rank's part of p between `part` [n] and the whole parameter, both of
 * elements of so many bytes. */
enum reshard { RESHARD_TAKE, RESHARD_PLACE };
int reshard_copy(const struct param *p, int64_t first, int64_t n, void *part, void *whole, int64_t size,
                 enum reshard way, struct err *e);

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
