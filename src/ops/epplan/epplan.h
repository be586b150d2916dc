/* epplan: where rows go when experts live on several ranks. P ranks hold El = E / P experts each; a rank sends a buffer
 * of up to cap rows to each. All maps stay on the device.
 *
 * epsend, at the rows' home, from moeplan's offset I32 [E + 1], row I32 [T, k], src I32 [T k]:
 *   to I32 [T, k]: place of a choice in the buffers, rank * cap + i, -1 if dropped (or if the buffer is full);
 *   from I32 [P cap]: the choice at that place, -1: none. So permute and unpermute use to and from like row and src;
 *   count I32 [P, El]: rows for each expert, in full, which the receiver is told;
 *   rows I32 [P]: rows of each buffer in use;
 *   need F64 [1]: the largest buffer that was asked for (acc_need: if larger than before). If it is above cap, rows
 *     were left out: the step is void and has to be repeated with more room.
 *
 * eprecv, at the experts, from count I32 [P, El] as received (of each rank, rows for the local experts):
 *   offset I32 [El + 1]: rows by local expert, each expert's by rank, then in the order sent;
 *   from I32 [P cap]: the place in the buffers that a row came from, -1 past the last;
 *   to I32 [P cap, 1]: the inverse;
 *   rows I32 [P]: rows of each buffer. What lies beyond cap is cut off as the sender did. */
#ifndef BRAID_OPS_EPPLAN_H
#define BRAID_OPS_EPPLAN_H

#include "ops/op.h"

#define EPSEND_FIELDS(T, N, S, op)                                                                                     \
    T(op, offset, IN, I32, "ranks*local+1")                                                                            \
    T(op, row, IN, I32, "rows k !")                                                                                    \
    T(op, src, IN, I32, "rows*k")                                                                                      \
    T(op, to, OUT, I32, "rows k !")                                                                                    \
    T(op, from, OUT, I32, "ranks*cap")                                                                                 \
    T(op, count, OUT, I32, "ranks local !")                                                                            \
    T(op, rows, OUT, I32, "ranks")                                                                                     \
    T(op, need, SUM, F64, "1")
OP_ARGS(epsend, EPSEND_FIELDS);
#define EPRECV_FIELDS(T, N, S, op)                                                                                     \
    T(op, count, IN, I32, "ranks experts !")                                                                           \
    T(op, offset, OUT, I32, "experts+1")                                                                               \
    T(op, from, OUT, I32, "ranks*cap")                                                                                 \
    T(op, to, OUT, I32, "ranks*cap 1")                                                                                 \
    T(op, rows, OUT, I32, "ranks")
OP_ARGS(eprecv, EPRECV_FIELDS);
/* The host versions are one: integers leave nothing to choose between slow and fast. */
int epsend_host(const struct epsend_args *a, struct err *e);
int eprecv_host(const struct eprecv_args *a, struct err *e);

#endif
