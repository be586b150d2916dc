/* The best meshes and policies for a number of GPUs: all legal ones are estimated, the most promising planned and
 * simulated rank by rank. Nothing is allocated. */
#ifndef BRAID_SEARCH_H
#define BRAID_SEARCH_H

#include "sim/timeline.h"

struct search_opts {
    int gpus;
    double budget; /* bytes of one GPU */
    double tokens; /* of the whole training; 0: not asked */
    int simulated; /* how many of the best are planned and simulated */
};
/* Prints the table. train.global_batch stays: only how it is distributed changes. */
int search_print(const struct config *c, const struct machine *m, const struct search_opts *o, struct buf *out,
                 struct err *e);

#endif
