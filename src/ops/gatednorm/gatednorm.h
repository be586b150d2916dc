/* gatednorm: RMSNorm over groups of channels together with a SiLU gate, in either order.
 *   gate first (Mamba-2):          v = x * silu(z);  y = v * rstd * gain,            rstd over v
 *   norm first (gated delta net):  y = x * rstd * gain * silu(z),                    rstd over x
 *   rstd = (mean over the group of square + eps)^-1/2, one per row and group of `group` channels.
 *   gain is w, or 1 + w when zero_centered. w wide, [d] (a gain per channel) or [group] (shared by all
 * groups). x, z, y [rows, d] real, strided; d % group == 0, group >= 1 (group == d: norm over the
 * whole width). rstd [rows, d / group] wide, written forward, read backward. y may be x. backward,
 * gate first: vh = v * rstd, u = dy * gain, dv = rstd * (u - vh * mean(u * vh)); dx = dv * silu(z),
 * dz = dv * x * silu'(z), dw = sum dy * vh. norm first: xh = x * rstd, dn = dy * silu(z), u = dn *
 * gain; dx = rstd * (u - xh * mean(u * xh)), dz = dy * xh * gain * silu'(z), dw = sum dn * xh. dx
 * may be dy. dw, wide: sums over blocks of GATEDNORM_BLOCK rows, added in block order. */
#ifndef BRAID_OPS_GATEDNORM_H
#define BRAID_OPS_GATEDNORM_H

#include "dev/dev.h"

enum { GATEDNORM_BLOCK = 64 };

struct gatednorm_fwd_args {
    struct tensor x, z, w, y, rstd;
    double eps;
    int64_t group;
    bool norm_first, zero_centered;
};
struct gatednorm_bwd_args {
    struct tensor dy, x, z, w, rstd, dx, dz, dw, work;
    int64_t group;
    bool norm_first, zero_centered, acc_dw;
};
int gatednorm_fwd_check(const struct gatednorm_fwd_args *a, struct err *e);
int gatednorm_bwd_check(const struct gatednorm_bwd_args *a, struct err *e);

#endif
