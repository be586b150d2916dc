/* colsum: out[c] (+)= sum over rows of x[row, c]; the gradient of a bias.
 *   x [rows, n] real, out [n] wide. Blocks of COLSUM_BLOCK rows, then blocks in order. */
#ifndef BRAID_OPS_COLSUM_H
#define BRAID_OPS_COLSUM_H

#include "ops/op.h"

enum { COLSUM_BLOCK = 64 };

#define COLSUM_FIELDS(T, N, S, op)                                                                                     \
    T(op, x, IN, REAL, "rows n")                                                                                       \
    T(op, out, SUM, WIDE, "n")                                                                                         \
    T(op, work, WORK, U8, "")
OP_ARGS(colsum, COLSUM_FIELDS);

#endif
