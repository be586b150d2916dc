/* Timing over op descriptors: median time, bytes and FLOPs per second, and the share of the roofline
 * measured in the same run. */
#ifndef BRAID_OPS_OPBENCH_H
#define BRAID_OPS_OPBENCH_H

#include "ops/opdesc.h"

struct roofline {
    double flops_per_s; /* dense GEMM */
    double bytes_per_s; /* read + write of a copy too large for the caches */
};
int roofline_measure(struct dev *dev, struct roofline *r, struct err *e);

struct op_timing {
    double seconds; /* median */
    struct op_cost cost;
    double of_roofline; /* 0..1: ideal time / measured */
    int runs;
};
/* Runs for about `budget` seconds after a warm-up, on random data. */
int op_bench(const struct op_desc *d, const struct op_sample *s, struct dev *dev, const struct roofline *r,
             double budget, struct op_timing *out, struct err *e);

#endif
