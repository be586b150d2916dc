/* gemm: C = alpha * op(A) * op(B) + beta * C, and bias added to every row of C if given.
 *   a [m, k] (or [k, m] if trans_a), b [k, n] (or [n, k] if trans_b), c [m, n]; rank 2, real (c: real
 *   or wide), unit last stride. bias [n] wide, optional, added after scaling; with beta != 0 it is added again.
 * A linear layer is y = x * W^T (trans_b), its input gradient dx = dy * W, its weight gradient
 * dW (+)= dy^T * x (trans_a; beta 0 or 1). beta 0 never reads C. c overlaps neither a nor b. */
#ifndef BRAID_OPS_GEMM_H
#define BRAID_OPS_GEMM_H

#include "dev/dev.h"

struct gemm_args {
    struct tensor a, b, c, bias;
    bool trans_a, trans_b;
    double alpha, beta;
};
int gemm_check(const struct gemm_args *a, struct err *e);

#endif
