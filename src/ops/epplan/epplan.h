/* epplan: where rows go when experts live on several ranks. P ranks hold El = E / P experts each; a rank sends a buffer
 * of up to cap rows to each. A token that chose several experts of one rank is one row there, with as many choices. All
 * maps stay on the device.
 *
 * epdest, from idx I32 [T, k], the experts of each token (negative: dropped):
 *   dest I32 [T, most]: the ranks that hold them, each once, rising; -1 behind the last. An expert outside 0 .. E - 1
 *   is an error on the host; a GPU drops the choice, and it drops ranks beyond `most`, of which there should be none.
 *
 * epsend, from moeplan's maps of dest, as if ranks were experts: offset I32 [P + 1], row I32 [T, most], src [T most]:
 *   to I32 [T, most]: place of a token in the buffers, rank * cap + i, -1: none (or the buffer is full);
 *   from I32 [P cap]: the entry of `to` that leads there, -1: none. So permute and unpermute use to and from like row
 *     and src, with k = most;
 *   rows I32 [P]: rows of each buffer in use;
 *   need F64 [1]: the largest buffer that was asked for (acc_need: if larger than before). If it is above cap, rows
 *     were left out: the step is void and has to be repeated with more room.
 *
 * epchoices, from idx, to and from: the choices that travel with the rows, `per` for each place of the buffers.
 *   sent I32 [P cap, per]: experts of the row at that place, in order of k, counted from the first of the rank (whole:
 *     from the first of all); -1 behind the last;
 *   src I32 [P cap per]: the choice t k + j that each is, -1: none;
 *   row I32 [T, k]: the inverse, -1 for what is not sent.
 * What arrives is again tokens with `per` choices each, for moeplan at the receiver. */
#ifndef BRAID_OPS_EPPLAN_H
#define BRAID_OPS_EPPLAN_H

#include "ops/op.h"

#define EPDEST_FIELDS(T, N, S, op)                                                                                     \
    T(op, idx, IN, I32, "rows k !")                                                                                    \
    T(op, dest, OUT, I32, "rows most !")                                                                               \
    N(op, int64_t, most, 2)                                                                                            \
    N(op, int64_t, ranks, 2)                                                                                           \
    N(op, int64_t, local, 4)
OP_ARGS(epdest, EPDEST_FIELDS);
#define EPSEND_FIELDS(T, N, S, op)                                                                                     \
    T(op, offset, IN, I32, "ranks+1")                                                                                  \
    T(op, row, IN, I32, "rows most !")                                                                                 \
    T(op, src, IN, I32, "rows*most")                                                                                   \
    T(op, to, OUT, I32, "rows most !")                                                                                 \
    T(op, from, OUT, I32, "ranks*cap")                                                                                 \
    T(op, rows, OUT, I32, "ranks")                                                                                     \
    T(op, need, SUM, F64, "1")
OP_ARGS(epsend, EPSEND_FIELDS);
#define EPCHOICES_FIELDS(T, N, S, op)                                                                                  \
    T(op, idx, IN, I32, "rows k !")                                                                                    \
    T(op, to, IN, I32, "rows most !")                                                                                  \
    T(op, from, IN, I32, "places")                                                                                     \
    T(op, sent, OUT, I32, "places per !")                                                                              \
    T(op, src, OUT, I32, "places*per")                                                                                 \
    T(op, row, OUT, I32, "rows k !")                                                                                   \
    N(op, int64_t, per, 2)                                                                                             \
    N(op, int64_t, ranks, 2)                                                                                           \
    N(op, int64_t, local, 4)                                                                                           \
    N(op, bool, whole, 0)
OP_ARGS(epchoices, EPCHOICES_FIELDS);
/* The host versions are one: integers leave nothing to choose between slow and fast. */
int epdest_host(const struct epdest_args *a, struct err *e);
int epsend_host(const struct epsend_args *a, struct err *e);
int epchoices_host(const struct epchoices_args *a, struct err *e);

#endif
