/* rmsnorm: y = x * rstd * gain, rstd = (mean(x^2) + eps)^-1/2 over the last dim.
 * gain is w, or 1 + w when zero_centered; no w: gain 1.
 *   x, y [.., d] real (rank 2 or 3); w [d] wide; rstd [rows] wide, written forward, read backward.
 *   y may be x.
 * backward: u = dy * gain, xh = x * rstd: dx = rstd * (u - xh * mean(u * xh)) (+ dres), dw = sum dy * xh.
 *   dres [.., d] optional, added to dx: the gradient that by-passes the norm. dx may be dy or dres.
 *   dw [d] wide, optional (present iff w is). Sum over rows in blocks of RMSNORM_BLOCK rows, blocks in
 *   order, so the order depends on the shape alone. */
#ifndef BRAID_OPS_RMSNORM_H
#define BRAID_OPS_RMSNORM_H

#include "ops/op.h"

enum { RMSNORM_BLOCK = 64 };

#define RMSNORM_FWD_FIELDS(T, N, S, op)                                                                                \
    T(op, x, IN, REAL, "... d")                                                                                        \
    T(op, w, OPT, WIDE, "d")                                                                                           \
    T(op, y, OUT, REAL, "... d")                                                                                       \
    T(op, rstd, SAVED, WIDE, "all")                                                                                    \
    N(op, double, eps, 1e-5)                                                                                           \
    N(op, bool, zero_centered, 0)
OP_ARGS(rmsnorm_fwd, RMSNORM_FWD_FIELDS);
#define RMSNORM_BWD_FIELDS(T, N, S, op)                                                                                \
    T(op, dy, IN, REAL, "... d")                                                                                       \
    T(op, x, IN, REAL, "... d")                                                                                        \
    T(op, w, OPT, WIDE, "d")                                                                                           \
    T(op, rstd, IN, WIDE, "all")                                                                                       \
    T(op, dres, OPT, REAL, "... d")                                                                                    \
    T(op, dx, OUT, REAL, "... d")                                                                                      \
    T(op, dw, OPT_SUM, WIDE, "d @w")                                                                                   \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, bool, zero_centered, 0)
OP_ARGS(rmsnorm_bwd, RMSNORM_BWD_FIELDS);

#endif
