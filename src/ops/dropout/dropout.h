/* dropout: y = keep ? x / (1 - p) : 0, keep a pure function of (key, step, sample, position,
 * channel): the same mask forward, backward, under recompute and on every mesh.
 *   x, y [tokens, d], each real or wide: what enters a wide residual stream, or its gradient that leaves it, changes
 *   its type on the way. y may be x if they are of one type. Its own backward: apply it to dy.
 *   info I64 [4] on the device: [0] step, [1] global index of the first sample, [2] position of the first row of
 *   every sample, where the rows are a part of it (dropout_place). first: rows of the microbatch in front of row 0,
 *   which other ranks have.
 *   p = 0 copies. key names the site (rng_key). */
#ifndef BRAID_OPS_DROPOUT_H
#define BRAID_OPS_DROPOUT_H

#include "ops/op.h"

struct dropout_rule {
    double p;
    uint64_t key;
    int64_t seq, first;
    struct tensor info;
};

#define DROPOUT_FIELDS(T, N, S, op)                                                                                    \
    T(op, x, IN, STREAM, "rows d")                                                                                     \
    T(op, y, OUT, STREAM, "rows d")                                                                                    \
    S(op, struct dropout_rule rule)
OP_ARGS(dropout, DROPOUT_FIELDS);
/* Rows of the descriptors of other ops with a rule `drop`. */
#define DROPOUT_INFO(op) OP_FIELD_IN(op, "info", drop.info, OPT, I64, "4")
#define DROPOUT_ATTRS(op)                                                                                              \
    OP_ATTR_IN(op, double, "p", drop.p, 0)                                                                             \
    OP_ATTR_IN(op, uint64_t, "key", drop.key, 77)                                                                      \
    OP_ATTR_IN(op, int64_t, "seq", drop.seq, 4)                                                                        \
    OP_ATTR_IN(op, int64_t, "first", drop.first, 0)

/* Where a row of sequences of seq rows is in the stream of random numbers: the one place that reads info. */
struct draw_place {
    int64_t step, sample, pos;
};
/* A sum with what a file may say: it wraps. */
HOST_DEVICE static inline int64_t draw_after(int64_t at, int64_t n) { return (int64_t)((uint64_t)at + (uint64_t)n); }
HOST_DEVICE static inline struct draw_place dropout_place(const int64_t *info, int64_t row, int64_t seq)
{
    struct draw_place at = {info[0], draw_after(info[1], row / seq), draw_after(info[2], row % seq)};
    return at;
}

/* The one mask: four channels share a draw. threshold = dropout_threshold(p). */
HOST_DEVICE static inline uint32_t dropout_threshold(double p) { return (uint32_t)(p * 4294967296.0); }
HOST_DEVICE static inline struct philox4 dropout_draw(uint64_t key, int64_t step, int64_t sample, int64_t pos,
                                                      int64_t channel)
{
    return philox(key, (uint32_t)(channel / 4), (uint32_t)pos, (uint32_t)sample,
                  (uint32_t)step ^ (uint32_t)((uint64_t)sample >> 32));
}
HOST_DEVICE static inline bool dropout_keep(uint64_t key, uint32_t threshold, int64_t step, int64_t sample, int64_t pos,
                                            int64_t channel)
{
    return dropout_draw(key, step, sample, pos, channel).v[channel % 4] >= threshold;
}

#endif
