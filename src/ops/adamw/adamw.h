/* adamw: one decoupled-weight-decay Adam update of one parameter, or of several, in place.
 *   p, g, m, v [n] wide dense. hyper F64 [8] on the device: [0] lr, [1] 1 - beta1^t, [2] 1 - beta2^t.
 *   scale F64 [4] from clip: [1] gradient coefficient, [2] skip if nonzero: nothing is written.
 *   copy [n] real dense, optional: p after the update, rounded; what the layers compute with.
 *   q [rows, cols] E4M3 and qs, t [cols, rows] and ts, optional: FP8 codes of p after the update, of rows cols = n
 *   elements, and of its transpose, with scales for squares of 128: bits are those of ops/quantise. t only beside q.
 *   g' = g * scale[1]; m = b1 m + (1-b1) g'; v = b2 v + (1-b2) g'^2;
 *   p -= lr * ( (m / hyper[1]) / (sqrt(v / hyper[2]) + eps) + decay * p ).
 * with lr = rate * hyper[0].
 * more: n_more further parameters (host memory, read during the call) with a decay and a rate of their own. Each is
 * updated
 *   as by a call of its own, but a GPU needs one launch for dozens of them. */
#ifndef BRAID_OPS_ADAMW_H
#define BRAID_OPS_ADAMW_H

#include "ops/op.h"

enum { ADAMW_SQUARE = 128 }; /* values that share a scale: so many rows and columns of them */

struct adamw_part {
    struct tensor p, g, m, v, copy;
    double decay, rate; /* rate: factor of the learning rate */
    struct tensor q, qs, t, ts;
};
#define ADAMW_FIELDS(T, N, S, op)                                                                                      \
    T(op, p, STATE, WIDE, "n")                                                                                         \
    T(op, g, IN, WIDE, "n")                                                                                            \
    T(op, m, STATE, WIDE, "n")                                                                                         \
    T(op, v, STATE, WIDE, "n")                                                                                         \
    T(op, copy, OPT_OUT, REAL, "n")                                                                                    \
    T(op, hyper, IN, F64, "8")                                                                                         \
    T(op, scale, IN, F64, "4")                                                                                         \
    T(op, q, OPT_SAVED, F8, "")                                                                                        \
    T(op, qs, OPT_SAVED, WIDE, "")                                                                                     \
    T(op, t, OPT_SAVED, F8, "")                                                                                        \
    T(op, ts, OPT_SAVED, WIDE, "")                                                                                     \
    N(op, double, beta1, 0.9)                                                                                          \
    N(op, double, beta2, 0.95)                                                                                         \
    N(op, double, eps, 1e-8)                                                                                           \
    N(op, double, decay, 0.1)                                                                                          \
    N(op, double, rate, 1)                                                                                             \
    N(op, int, n_more, 0)                                                                                              \
    S(op, const struct adamw_part *more)
OP_ARGS(adamw, ADAMW_FIELDS);
/* Parameter k of the call, 0 <= k <= n_more. */
static inline struct adamw_part adamw_part_at(const struct adamw_args *a, int k)
{
    struct adamw_part first = {a->p, a->g, a->m, a->v, a->copy, a->decay, a->rate, a->q, a->qs, a->t, a->ts};
    return k == 0 ? first : a->more[k - 1];
}

#endif
