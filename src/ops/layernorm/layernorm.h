/* layernorm: y = (x - mean) * rstd * gain + b, mean and variance of the last dim, rstd = (variance + eps)^-1/2.
 * gain is w, or 1 + w when zero_centered; no w: gain 1; no b: nothing is added.
 *   y [rows, d] real; x [rows, d] real, or wide where the residual stream is; w, b [d] wide; mean, rstd [rows] wide,
 *   written forward, read backward. y may be x if they are of one type.
 *   The variance is the mean of (x - mean)^2, taken after the mean is known.
 * backward: u = dy * gain, xh = (x - mean) * rstd: dx = rstd * (u - mean(u) - xh * mean(u * xh)) (+ dres),
 *   dw = sum dy * xh, db = sum dy. dres [rows, d] optional, added to dx: the gradient that by-passes the norm. dx may
 * be dres, or dy if they are of one type. x, dres and dx are of one type, dy is real. dw, db [d] wide, optional (dw
 * only with w). Sums over rows go by blocks of LAYERNORM_BLOCK rows (a GPU: blocks that depend on the number of rows),
 * blocks in order, so the order depends on the shape alone. */
#ifndef BRAID_OPS_LAYERNORM_H
#define BRAID_OPS_LAYERNORM_H

#include "ops/op.h"

enum { LAYERNORM_BLOCK = 64 };

#define LAYERNORM_FWD_FIELDS(T, N, S, op)                                                                              \
    T(op, x, IN, STREAM, "rows d")                                                                                     \
    T(op, w, OPT, WIDE, "d")                                                                                           \
    T(op, b, OPT, WIDE, "d")                                                                                           \
    T(op, y, OUT, REAL, "rows d")                                                                                      \
    T(op, mean, SAVED, WIDE, "rows")                                                                                   \
    T(op, rstd, SAVED, WIDE, "rows")                                                                                   \
    N(op, double, eps, 1e-5)                                                                                           \
    N(op, bool, zero_centered, 0)
OP_ARGS(layernorm_fwd, LAYERNORM_FWD_FIELDS);
#define LAYERNORM_BWD_FIELDS(T, N, S, op)                                                                              \
    T(op, dy, IN, REAL, "rows d")                                                                                      \
    T(op, x, IN, STREAM, "rows d")                                                                                     \
    T(op, w, OPT, WIDE, "d")                                                                                           \
    T(op, mean, IN, WIDE, "rows")                                                                                      \
    T(op, rstd, IN, WIDE, "rows")                                                                                      \
    T(op, dres, OPT, STREAM, "rows d")                                                                                 \
    T(op, dx, OUT, STREAM, "rows d")                                                                                   \
    T(op, dw, OPT_SUM, WIDE, "d @w")                                                                                   \
    T(op, db, OPT_SUM, WIDE, "d")                                                                                      \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, bool, zero_centered, 0)
OP_ARGS(layernorm_bwd, LAYERNORM_BWD_FIELDS);

#endif
