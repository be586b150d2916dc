/* adamw: one decoupled-weight-decay Adam update of one parameter, or of several, in place.
 *   p, g, m, v [n] wide dense. hyper F64 [8] on the device: [0] lr, [1] 1 - beta1^t, [2] 1 - beta2^t, [3] t - 1.
 *   scale F64 [4] from clip: [1] gradient coefficient, [2] skip if nonzero: nothing is written.
 *   copy [n] real dense, optional: p after the update, rounded; what the layers compute with.
 *   q [rows, cols] E4M3 and qs, t [cols, rows] and ts, optional: FP8 codes of p after the update, of rows cols = n
 *   elements, and of its transpose, with scales for squares of 128: bits are those of ops/quantise. t only beside q.
 *   g' = g * scale[1]; m = b1 m + (1-b1) g'; v = b2 v + (1-b2) g'^2;
 *   p -= lr * ( (m / hyper[1]) / (sqrt(v / hyper[2]) + eps) + decay * p ).
 * with lr = rate * hyper[0].
 * bf16: m and v are stored as bf16 (or as wide numbers that bf16 could hold), rounded up or down at random so that the
 *   mean is right: a nearest rounding would lose every change of less than 1 / 256. What is rounded is used by the next
 *   update, p of this one is computed before. The draw of an element is a function of the parameter's key, t and the
 *   element's place in the whole parameter (adamw_place), so that no division into parts or ranks changes a bit.
 * more: n_more further parameters (host memory, read during the call) with a decay and a rate of their own. Each is
 * updated
 *   as by a call of its own, but a GPU needs one launch for dozens of them. */
#ifndef BRAID_OPS_ADAMW_H
#define BRAID_OPS_ADAMW_H

#include "base/philox.h"
#include "ops/op.h"

#include <string.h>

enum { ADAMW_SQUARE = 128 }; /* values that share a scale: so many rows and columns of them */

/* Where the elements of a part are in the whole parameter: element i is number first + (lead + i) / row * step +
 * (lead + i) % row of it; row 0: first + lead + i. key: of the parameter's draws. */
struct adamw_place {
    uint64_t key;
    int64_t first, lead, row, step;
};
struct adamw_part {
    struct tensor p, g, m, v, copy;
    double decay, rate; /* rate: factor of the learning rate */
    struct adamw_place at;
    struct tensor q, qs, t, ts;
};
#define ADAMW_FIELDS(T, N, S, op)                                                                                      \
    T(op, p, STATE, WIDE, "n")                                                                                         \
    T(op, g, IN, WIDE, "n")                                                                                            \
    T(op, m, STATE, STREAM, "n")                                                                                       \
    T(op, v, STATE, STREAM, "n")                                                                                       \
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
    N(op, bool, bf16, 0)                                                                                               \
    N(op, int, n_more, 0)                                                                                              \
    S(op, struct adamw_place at)                                                                                       \
    S(op, const struct adamw_part *more)
OP_ARGS(adamw, ADAMW_FIELDS);
/* Parameter k of the call, 0 <= k <= n_more. */
static inline struct adamw_part adamw_part_at(const struct adamw_args *a, int k)
{
    struct adamw_part first = {a->p, a->g, a->m, a->v, a->copy, a->decay, a->rate, a->at, a->q, a->qs, a->t, a->ts};
    return k == 0 ? first : a->more[k - 1];
}

HOST_DEVICE static inline int64_t adamw_place_of(const struct adamw_place *at, int64_t i)
{
    int64_t k = at->lead + i;
    return at->row > 0 ? at->first + k / at->row * at->step + k % at->row : at->first + k;
}

/* Draws of elements 4 * four to 4 * four + 3 in the update with this hyper[3]: 16 bits for m below 16 for v. */
HOST_DEVICE static inline struct philox4 adamw_draws(uint64_t key, int64_t four, double update)
{
    uint64_t t = (uint64_t)update;
    return philox(key, (uint32_t)four, (uint32_t)((uint64_t)four >> 32), (uint32_t)t, 1 + (uint32_t)(t >> 32));
}

/* The upper half of x plus 16 random bits: x rounded to bf16, up with the probability of what is cut off. Numbers that
 * are not finite stay so, and finite ones stay finite. */
HOST_DEVICE static inline uint16_t adamw_round(float x, uint32_t draw)
{
    uint32_t bits, up;
    memcpy(&bits, &x, sizeof bits);
    up = bits + (draw & 0xFFFFu);
    if ((up & 0x7F800000u) == 0x7F800000u)
        up = (bits & 0x7F800000u) == 0x7F800000u && (bits & 0x7FFFFFu) != 0 ? bits | 0x400000u : bits;
    return (uint16_t)(up >> 16);
}

#endif
