/* init: initial values of a parameter, a pure function of key and position.
 *   y [n] wide dense, or I32 for INIT_HASH; copy [n] real optional: the same, rounded.
 *   first: y starts at this element of the whole parameter, of which a rank may hold a part.
 *   kind, a, b as in enum init_kind (tensor.h); row: length of a row, for INIT_HASH; n_values likewise.
 * Every value is computed in double and rounded to fp32, on every device, so that all start from the same numbers (a
 * GPU's logarithm and cosine may differ in the last bit of a double, hence a few of a billion values in the last of a
 * float). */
#ifndef BRAID_OPS_INIT_H
#define BRAID_OPS_INIT_H

#include "ops/op.h"

#define INIT_FIELDS(T, N, S, op)                                                                                       \
    T(op, y, OUT, WIDE, "n")                                                                                           \
    T(op, copy, OPT_OUT, REAL, "n")                                                                                    \
    N(op, double, a, 0.02)                                                                                             \
    N(op, double, b, 1)                                                                                                \
    N(op, int64_t, row, 0)                                                                                             \
    N(op, int64_t, n_values, 0)                                                                                        \
    N(op, int64_t, first, 0)                                                                                           \
    N(op, uint64_t, key, 1)                                                                                            \
    S(op, enum init_kind kind)
OP_ARGS(init, INIT_FIELDS);
/* Host versions are one: there is nothing to choose between slow and fast. */
int init_host(const struct init_args *a, struct err *e);

#endif
