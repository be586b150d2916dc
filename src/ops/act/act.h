/* act: the nonlinearity between the two matrices of an MLP.
 * Gated kinds: x [rows, 2f] = [gate | up] (or interleaved in blocks of `interleave` columns: gate
 * block, up block, ...), y [rows, f] = act(min(gate, clamp)) * (clip(up, -clamp, clamp) + offset).
 * Plain kinds: x [rows, f], y = act(x) (clamp bounds x from above).
 *   clamp 0: none. alpha: the factor of the quick kinds, x * sigmoid(alpha x).
 *   prob [rows] wide, optional: y is multiplied by prob[row] (expert MLPs).
 *   swiglu: silu; geglu: gelu, tanh form; quick_geglu: x*sigmoid(alpha x); gelu: tanh form;
 *   quick_gelu; relu2: max(x,0)^2; silu.
 * backward: dx like x, dprob [rows] wide, optional (iff prob). Where a clamp is active the gradient of
 * the clamped input is 0. dx may be x (same shape): the pre-activations are not needed again. */
#ifndef BRAID_OPS_ACT_H
#define BRAID_OPS_ACT_H

#include "dev/dev.h"

enum act_kind {
    ACT_SWIGLU,
    ACT_GEGLU,
    ACT_QUICK_GEGLU,
    ACT_GELU,
    ACT_QUICK_GELU,
    ACT_RELU2,
    ACT_SILU,
};
static inline bool act_is_gated(enum act_kind k) { return k <= ACT_QUICK_GEGLU; }

struct act_rule {
    enum act_kind kind;
    double clamp, alpha, offset;
    int64_t interleave; /* 0: gate and up are halves */
};
struct act_fwd_args {
    struct tensor x, prob, y;
    struct act_rule rule;
};
struct act_bwd_args {
    struct tensor dy, x, prob, dx, dprob;
    struct act_rule rule;
};
int act_fwd_check(const struct act_fwd_args *a, struct err *e);
int act_bwd_check(const struct act_bwd_args *a, struct err *e);

#endif
