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

#include "ops/op.h"

enum { GATEDNORM_BLOCK = 64 };

#define GATEDNORM_FWD_FIELDS(T, N, S, op)                                                                              \
    T(op, x, IN, REAL, "rows d")                                                                                       \
    T(op, z, IN, REAL, "rows d")                                                                                       \
    T(op, w, IN, WIDE, "d|group")                                                                                      \
    T(op, y, OUT, REAL, "rows d")                                                                                      \
    T(op, rstd, SAVED, WIDE, "rows d/group")                                                                           \
    N(op, double, eps, 1e-5)                                                                                           \
    N(op, int64_t, group, 8)                                                                                           \
    N(op, bool, norm_first, 0)                                                                                         \
    N(op, bool, zero_centered, 0)
OP_ARGS(gatednorm_fwd, GATEDNORM_FWD_FIELDS);
#define GATEDNORM_BWD_FIELDS(T, N, S, op)                                                                              \
    T(op, dy, IN, REAL, "rows d")                                                                                      \
    T(op, x, IN, REAL, "rows d")                                                                                       \
    T(op, z, IN, REAL, "rows d")                                                                                       \
    T(op, w, IN, WIDE, "d|group")                                                                                      \
    T(op, rstd, IN, WIDE, "rows d/group")                                                                              \
    T(op, dx, OUT, REAL, "rows d")                                                                                     \
    T(op, dz, OUT, REAL, "rows d")                                                                                     \
    T(op, dw, SUM, WIDE, "=w")                                                                                         \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, group, 8)                                                                                           \
    N(op, bool, norm_first, 0)                                                                                         \
    N(op, bool, zero_centered, 0)
OP_ARGS(gatednorm_bwd, GATEDNORM_BWD_FIELDS);

#endif
