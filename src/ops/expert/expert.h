/* expert: what lies between the two matrices of experts, in one op with the product beside it. Rows, experts and offset as in
 * ops/gmm, activations as in ops/act; f: width of the activation, n: 2f if it is gated, else f.
 *   expert_up        pre [R, n] = x [R, in] W_e^T + bias_e;  y [R, f] = prob * act(pre)
 *                    w [E, n, in] real, bias [E, n] and prob [R] wide, optional. Rows past offset[E] become 0.
 *   expert_down_bwd  of z = y W_e^T + prob * bias_e, w [E, out, f], from dz [R, out] to the input of the activation:
 *                    dpre [R, n] (may be pre); y [R, f] = prob * act(pre) again, optional, for the gradient of w;
 *                    dprob [R] wide, iff prob: <dz W_e, act(pre)> + <dz, bias_e>. Past offset[E] rows of dpre and
 *                    dprob become 0, those of y are not defined.
 * What a GPU computes in one kernel, others compose of gmm and act. */
#ifndef BRAID_OPS_EXPERT_H
#define BRAID_OPS_EXPERT_H

#include "dev/dev.h"
#include "ops/act/act.h"

struct expert_up_args {
    struct tensor x, w, bias, prob, offset, pre, y;
    struct act_rule rule;
};
struct expert_down_bwd_args {
    struct tensor dz, w, bias, pre, prob, offset, dpre, y, dprob, work;
    struct act_rule rule;
};
int expert_up_check(const struct expert_up_args *a, struct err *e);
int expert_down_bwd_check(const struct expert_down_bwd_args *a, struct err *e);
/* Why no kernel of a GPU has this activation beside the product; NULL: one has (bf16 on Hopper). */
const char *expert_not_fused(const struct act_rule *r);

#endif
