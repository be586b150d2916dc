/* gate: y = x * sigmoid(g); the output gate of attention and of shared experts.
 *   x, y [.., n] real; g [.., n], or [.., 1] (one gate for the whole row); strided. y may be x.
 * backward: dx = dy * sigmoid(g); dg = dy * x * s(1-s), summed over the row if g is [.., 1].
 *   dx may be dy. */
#ifndef BRAID_OPS_GATE_H
#define BRAID_OPS_GATE_H

#include "dev/dev.h"

struct gate_fwd_args {
    struct tensor x, g, y;
};
struct gate_bwd_args {
    struct tensor dy, x, g, dx, dg;
};
int gate_fwd_check(const struct gate_fwd_args *a, struct err *e);
int gate_bwd_check(const struct gate_bwd_args *a, struct err *e);

#endif
