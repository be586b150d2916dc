/* addnorm: the residual joint. Closes a sublayer and opens the next in one pass:
 *   s = x + dropout(f + bias)         close: f [rows, d] the sublayer's output, bias [d] wide, optional
 *   y = s * rstd * gain               open: gain from w (wide) as in rmsnorm, rstd = (mean(s^2)+eps)^-1/2
 *   f, y [rows, d] real; x, s [rows, d] the stream: both real, or both wide; rstd [rows] wide. rows in token order
 *   (dropout needs it). Where the stream is real, s is rounded to it before it is normed.
 *   f absent: s = x is not written (s must be absent too, and the norm reads x).
 *   y absent: the statistics alone, and w is not read; rstd and w absent as well: close only. s may be x. Dropout rule
 *   with p = 0: no mask.
 * backward: given dy (gradient of y; absent iff y was) and ds (gradient of s from further on;
 *   absent: 0), s, w, rstd:
 *   dx = ds + norm_backward(dy); df = mask * dx / (1-p); dbias = sum df; dw = sum dy * s * rstd.
 *   dy, df real; s, ds, dx are of the stream's type. dx may be ds. df optional: without dropout and with a real
 *   stream it equals dx, and callers read dx instead.
 *   dw, dbias wide, optional; sums by blocks of RMSNORM_BLOCK rows in order. */
#ifndef BRAID_OPS_ADDNORM_H
#define BRAID_OPS_ADDNORM_H

#include "ops/op.h"
#include "ops/dropout/dropout.h"

#define ADDNORM_FWD_FIELDS(T, N, S, op)                                                                                \
    T(op, x, IN, STREAM, "rows d")                                                                                     \
    T(op, f, OPT, REAL, "rows d")                                                                                      \
    T(op, bias, OPT, WIDE, "d &f")                                                                                     \
    T(op, w, OPT, WIDE, "d &rstd")                                                                                     \
    T(op, s, OPT_OUT, STREAM, "rows d @f")                                                                             \
    T(op, y, OPT_OUT, REAL, "rows d")                                                                                  \
    T(op, rstd, OPT_SAVED, WIDE, "rows +y")                                                                            \
    N(op, double, eps, 1e-5)                                                                                           \
    N(op, bool, zero_centered, 0)                                                                                      \
    S(op, struct dropout_rule drop)
OP_ARGS(addnorm_fwd, ADDNORM_FWD_FIELDS);
#define ADDNORM_BWD_FIELDS(T, N, S, op)                                                                                \
    T(op, dy, OPT, REAL, "rows d")                                                                                     \
    T(op, ds, OPT, STREAM, "rows d")                                                                                   \
    T(op, s, OPT, STREAM, "rows d +dy")                                                                                \
    T(op, w, OPT, WIDE, "d &dy")                                                                                       \
    T(op, rstd, OPT, WIDE, "rows +dy")                                                                                 \
    T(op, dx, OUT, STREAM, "rows d")                                                                                   \
    T(op, df, OPT_OUT, REAL, "rows d")                                                                                 \
    T(op, dw, OPT_SUM, WIDE, "d &w")                                                                                   \
    T(op, dbias, OPT_SUM, WIDE, "d")                                                                                   \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, bool, zero_centered, 0)                                                                                      \
    S(op, struct dropout_rule drop)
OP_ARGS(addnorm_bwd, ADDNORM_BWD_FIELDS);

#endif
