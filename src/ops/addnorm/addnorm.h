/* addnorm: the residual joint. Closes a sublayer and opens the next in one pass:
 *   s = x + dropout(f + bias)         close: f [rows, d] the sublayer's output, bias [d] wide, optional
 *   y = s * rstd * gain               open: gain from w (wide) as in rmsnorm, rstd = (mean(s^2)+eps)^-1/2
 *   x, f, s, y [rows, d] real; rstd [rows] wide. rows in token order (dropout needs it).
 *   f absent: s = x is not written (s must be absent too, and the norm reads x).
 *   y absent (then w, rstd too): close only. s may be x. Dropout rule with p = 0: no mask.
 * backward: given dy (gradient of y; absent iff y was) and ds (gradient of s from further on;
 *   absent: 0), s, w, rstd:
 *   dx = ds + norm_backward(dy); df = mask * dx / (1-p); dbias = sum df; dw = sum dy * s * rstd.
 *   dx may be ds. df optional: without dropout it equals dx, and callers read dx instead.
 *   dw, dbias wide, optional; sums by blocks of RMSNORM_BLOCK rows in order. */
#ifndef BRAID_OPS_ADDNORM_H
#define BRAID_OPS_ADDNORM_H

#include "dev/dev.h"
#include "ops/dropout/dropout.h"

struct addnorm_fwd_args {
    struct tensor x, f, bias, w, s, y, rstd;
    double eps;
    bool zero_centered;
    struct dropout_rule drop;
};
struct addnorm_bwd_args {
    struct tensor dy, ds, s, w, rstd, dx, df, dw, dbias, work;
    bool zero_centered, acc_dw, acc_dbias;
    struct dropout_rule drop;
};
int addnorm_fwd_check(const struct addnorm_fwd_args *a, struct err *e);
int addnorm_bwd_check(const struct addnorm_bwd_args *a, struct err *e);

#endif
