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

#include "dev/dev.h"

enum { RMSNORM_BLOCK = 64 };

struct rmsnorm_fwd_args {
    struct tensor x, w, y, rstd;
    double eps;
    bool zero_centered;
};
struct rmsnorm_bwd_args {
    struct tensor dy, x, w, rstd, dres, dx, dw, work;
    bool zero_centered, acc_dw;
};
int rmsnorm_fwd_check(const struct rmsnorm_fwd_args *a, struct err *e);
int rmsnorm_bwd_check(const struct rmsnorm_bwd_args *a, struct err *e);

#endif
