/* act8: ops/act whose result is FP8 codes (ops/quantise) instead of numbers, for the linear layers that read it.
 *   forward   y of act_fwd as q, qs and t, ts: codes by rows of `block` values of y and of its transpose
 *   backward  dx of act_bwd likewise
 * The values are rounded to the real type before they become codes: bits are those of act followed by quantise. Of
 * each pair of codes and scales one may be absent. No prob: experts have kernels of their own. On a GPU one pass where
 * `block` is 128, gate and up are halves of x and f is a multiple of 128; else, and on other devices, by way of
 * `work`. */
#ifndef BRAID_OPS_ACT8_H
#define BRAID_OPS_ACT8_H

#include "ops/act/act.h"

#define ACT8_FWD_FIELDS(T, N, S, op)                                                                                   \
    T(op, x, IN, REAL, "")                                                                                             \
    T(op, q, OPT_SAVED, F8, "")                                                                                        \
    T(op, qs, OPT_SAVED, WIDE, "")                                                                                     \
    T(op, t, OPT_SAVED, F8, "")                                                                                        \
    T(op, ts, OPT_SAVED, WIDE, "")                                                                                     \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, block, 128)                                                                                         \
    S(op, struct act_rule rule)
OP_ARGS(act8_fwd, ACT8_FWD_FIELDS);
#define ACT8_BWD_FIELDS(T, N, S, op)                                                                                   \
    T(op, dy, IN, REAL, "")                                                                                            \
    T(op, x, IN, REAL, "")                                                                                             \
    T(op, q, OPT_SAVED, F8, "")                                                                                        \
    T(op, qs, OPT_SAVED, WIDE, "")                                                                                     \
    T(op, t, OPT_SAVED, F8, "")                                                                                        \
    T(op, ts, OPT_SAVED, WIDE, "")                                                                                     \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, block, 128)                                                                                         \
    S(op, struct act_rule rule)
OP_ARGS(act8_bwd, ACT8_BWD_FIELDS);

#endif
