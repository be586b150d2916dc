/* expert: what lies between the two matrices of experts, in one op with the product beside it. Rows, experts and offset
 * as in ops/gmm, activations as in ops/act; f: width of the activation, n: 2f if it is gated, else f.
 *   expert_up        pre [R, n] = x [R, in] W_e^T + bias_e;  y [R, f] = prob * act(pre)
 *                    w [E, n, in] real, bias [E, n] and prob [R] wide, optional. Rows past offset[E] become 0.
 *   expert_down_bwd  of z = y W_e^T + prob * bias_e, w [E, out, f], from dz [R, out] to the input of the activation:
 *                    dpre [R, n] (may be pre); y [R, f] = prob * act(pre) again, optional, for the gradient of w;
 *                    dprob [R] wide, iff prob: <dz W_e, act(pre)> + <dz, bias_e>. Past offset[E] rows of dpre and
 *                    dprob become 0, those of y are not defined.
 * What a GPU computes in one kernel, others compose of gmm and act. */
#ifndef BRAID_OPS_EXPERT_H
#define BRAID_OPS_EXPERT_H

#include "ops/op.h"
#include "ops/act/act.h"

#define EXPERT_UP_FIELDS(T, N, S, op)                                                                                  \
    T(op, x, IN, REAL, "rows in")                                                                                      \
    T(op, w, IN, REAL, "experts gate*f in !")                                                                          \
    T(op, bias, OPT, WIDE, "experts gate*f !")                                                                         \
    T(op, prob, OPT, WIDE, "rows")                                                                                     \
    T(op, offset, IN, I32, "experts+1")                                                                                \
    T(op, pre, OUT, REAL, "rows gate*f")                                                                               \
    T(op, y, OUT, REAL, "rows f")                                                                                      \
    S(op, struct act_rule rule)
OP_ARGS(expert_up, EXPERT_UP_FIELDS);
#define EXPERT_DOWN_BWD_FIELDS(T, N, S, op)                                                                            \
    T(op, dz, IN, REAL, "rows in")                                                                                     \
    T(op, w, IN, REAL, "experts in f !")                                                                               \
    T(op, bias, OPT, WIDE, "experts in")                                                                               \
    T(op, pre, IN, REAL, "rows gate*f")                                                                                \
    T(op, prob, OPT, WIDE, "rows")                                                                                     \
    T(op, offset, IN, I32, "experts+1")                                                                                \
    T(op, dpre, OUT, REAL, "rows gate*f")                                                                              \
    T(op, y, OPT_OUT, REAL, "rows f")                                                                                  \
    T(op, dprob, OPT_OUT, WIDE, "rows @prob")                                                                          \
    T(op, work, WORK, U8, "")                                                                                          \
    S(op, struct act_rule rule)
OP_ARGS(expert_down_bwd, EXPERT_DOWN_BWD_FIELDS);
/* Why no kernel of a GPU has this activation beside the product; NULL: one has (bf16 on Hopper). */
OP_C const char *expert_not_fused(const struct act_rule *r);

#endif
