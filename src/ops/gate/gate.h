/* gate: y = x * sigmoid(g); the output gate of attention and of shared experts.
 *   x, y [.., n] real; g [.., n], or [.., 1] (one gate for the whole row); strided. y may be x.
 * backward: dx = dy * sigmoid(g); dg = dy * x * s(1-s), summed over the row if g is [.., 1].
 *   dx may be dy. */
#ifndef BRAID_OPS_GATE_H
#define BRAID_OPS_GATE_H

#include "ops/op.h"

#define GATE_FWD_FIELDS(T, N, S, op)                                                                                   \
    T(op, x, IN, REAL, "... n")                                                                                        \
    T(op, g, IN, REAL, "... n|1")                                                                                      \
    T(op, y, OUT, REAL, "... n")
OP_ARGS(gate_fwd, GATE_FWD_FIELDS);
#define GATE_BWD_FIELDS(T, N, S, op)                                                                                   \
    T(op, dy, IN, REAL, "... n")                                                                                       \
    T(op, x, IN, REAL, "... n")                                                                                        \
    T(op, g, IN, REAL, "... n|1")                                                                                      \
    T(op, dx, OUT, REAL, "... n")                                                                                      \
    T(op, dg, OUT, REAL, "=g")
OP_ARGS(gate_bwd, GATE_BWD_FIELDS);

#endif
