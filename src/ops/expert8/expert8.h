/* expert8: ops/expert of FP8 codes, with products as in ops/gmm8: what lies between the two matrices of experts.
 *   expert8_up        pre [R, n] = x [R, in] W_e^T + bias_e, real; q [R, f], qs: codes by rows of prob * act(pre)
 *                     w the codes of W [E n, in], one below the other. Past offset[E] rows of pre and q become 0
 *   expert8_down_bwd  from the codes dz [R, out] through w [E, out, f], whose codes are turned [f, E out], to the input
 *                     of the activation: dpre [R, n] (may be pre); y [R, f] = prob * act(pre) again, optional; dprob
 *                     [R] wide, iff prob: <dz W_e, act(pre)>. Past offset[E] rows of dpre and dprob become 0, and
 *                     those of y where those of pre are
 * Blocks as in ops/gmm8. A Hopper GPU does each in one kernel where that has one, with the activation in fp32 from
 * unrounded sums; elsewhere by way of `work`. A value next to a tie of two codes falls to either side. */
#ifndef BRAID_OPS_EXPERT8_H
#define BRAID_OPS_EXPERT8_H

#include "ops/act/act.h"
#include "ops/op.h"

#define EXPERT8_UP_FIELDS(T, N, S, op)                                                                                 \
    T(op, x, FIXED, F8, "")                                                                                            \
    T(op, xs, FIXED, WIDE, "")                                                                                         \
    T(op, w, FIXED, F8, "")                                                                                            \
    T(op, ws, FIXED, WIDE, "")                                                                                         \
    T(op, bias, OPT, WIDE, "")                                                                                         \
    T(op, prob, OPT, WIDE, "")                                                                                         \
    T(op, offset, FIXED, I32, "")                                                                                      \
    T(op, pre, OUT, REAL, "")                                                                                          \
    T(op, q, SAVED, F8, "")                                                                                            \
    T(op, qs, SAVED, WIDE, "")                                                                                         \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, block, 128)                                                                                         \
    N(op, bool, square, 1)                                                                                             \
    S(op, struct act_rule rule)
OP_ARGS(expert8_up, EXPERT8_UP_FIELDS);
#define EXPERT8_DOWN_BWD_FIELDS(T, N, S, op)                                                                           \
    T(op, dz, FIXED, F8, "")                                                                                           \
    T(op, dzs, FIXED, WIDE, "")                                                                                        \
    T(op, w, FIXED, F8, "")                                                                                            \
    T(op, ws, FIXED, WIDE, "")                                                                                         \
    T(op, pre, IN, REAL, "")                                                                                           \
    T(op, prob, OPT, WIDE, "")                                                                                         \
    T(op, offset, FIXED, I32, "")                                                                                      \
    T(op, dpre, OUT, REAL, "")                                                                                         \
    T(op, y, OPT_OUT, REAL, "")                                                                                        \
    T(op, dprob, OPT_OUT, WIDE, "")                                                                                    \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, block, 128)                                                                                         \
    N(op, bool, square, 1)                                                                                             \
    S(op, struct act_rule rule)
OP_ARGS(expert8_down_bwd, EXPERT8_DOWN_BWD_FIELDS);

#endif
