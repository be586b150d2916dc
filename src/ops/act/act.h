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

#include "ops/op.h"

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
/* Columns of x for one of y. */
static inline int64_t act_gate(enum act_kind k) { return act_is_gated(k) ? 2 : 1; }

struct act_rule {
    enum act_kind kind;
    double clamp, alpha, offset;
    int64_t interleave; /* 0: gate and up are halves */
};
#define ACT_FWD_FIELDS(T, N, S, op)                                                                                    \
    T(op, x, IN, REAL, "rows gate*f")                                                                                  \
    T(op, prob, OPT, WIDE, "rows")                                                                                     \
    T(op, y, OUT, REAL, "rows f")                                                                                      \
    S(op, struct act_rule rule)
OP_ARGS(act_fwd, ACT_FWD_FIELDS);
#define ACT_BWD_FIELDS(T, N, S, op)                                                                                    \
    T(op, dy, IN, REAL, "rows f")                                                                                      \
    T(op, x, IN, REAL, "rows gate*f")                                                                                  \
    T(op, prob, OPT, WIDE, "rows")                                                                                     \
    T(op, dx, OUT, REAL, "rows gate*f")                                                                                \
    T(op, dprob, OPT_OUT, WIDE, "rows @prob")                                                                          \
    S(op, struct act_rule rule)
OP_ARGS(act_bwd, ACT_BWD_FIELDS);

#endif
