/* gemm: C (+)= alpha * op(A) * op(B), and bias added to every row of C if given.
 *   a [m, k] (or [k, m] if trans_a), b [k, n] (or [n, k] if trans_b), c [m, n]; rank 2, real (c: real
 *   or wide), unit last stride. bias [n] wide, optional, added after scaling; with acc_c it is added again.
 * A linear layer is y = x * W^T (trans_b), its input gradient dx = dy * W, its weight gradient
 * dW (+)= dy^T * x (trans_a). Without acc_c C is never read. c overlaps neither a nor b. */
#ifndef BRAID_OPS_GEMM_H
#define BRAID_OPS_GEMM_H

#include "ops/op.h"

#define GEMM_FIELDS(T, N, S, op)                                                                                       \
    T(op, a, IN, REAL, "")                                                                                             \
    T(op, b, IN, REAL, "")                                                                                             \
    T(op, c, SUM, REAL, "")                                                                                            \
    T(op, bias, OPT, WIDE, "n")                                                                                        \
    N(op, bool, trans_a, 0)                                                                                            \
    N(op, bool, trans_b, 0)                                                                                            \
    N(op, double, alpha, 1)
OP_ARGS(gemm, GEMM_FIELDS);

#endif
