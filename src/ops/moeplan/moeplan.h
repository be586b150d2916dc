/* moeplan: from chosen experts to row ranges, on the device: a stable sort by (expert, token).
 *   idx I32 [T, k]: experts of each token; negative: dropped. E experts, R = T k rows.
 *   offset I32 [E + 1]: rows of expert e are [offset[e], offset[e + 1]); offset[E] rows are in use.
 *   row I32 [T, k]: where choice (t, j) went, -1 if dropped.
 *   src I32 [R]: the choice t k + j that row came from, -1 past the last row in use.
 *   cut: R = T k - cut rows, where fewer are expected. Rows beyond are left out: their choices count as dropped.
 *   need F64 [1]: the rows that were wanted (acc_need: if more than before), optional unless cut > 0.
 * An expert outside 0..E-1 is an error on the host; a GPU drops the choice. */
#ifndef BRAID_OPS_MOEPLAN_H
#define BRAID_OPS_MOEPLAN_H

#include "ops/op.h"

#define MOEPLAN_FIELDS(T, N, S, op)                                                                                    \
    T(op, idx, IN, I32, "rows k !")                                                                                    \
    T(op, offset, OUT, I32, "experts+1")                                                                               \
    T(op, row, OUT, I32, "rows k !")                                                                                   \
    T(op, src, OUT, I32, "rows*k-cut")                                                                                 \
    T(op, need, OPT_SUM, F64, "1")                                                                                     \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, cut, 0)
OP_ARGS(moeplan, MOEPLAN_FIELDS);

/* The host versions are one: integers leave nothing to choose between slow and fast. */
int moeplan_host(const struct moeplan_args *a, struct err *e);

#endif
