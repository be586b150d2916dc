/* ring: what attention over blocks of keys needs beside attention itself (parallel.cp_comm=ring).
 *
 * ring_merge: results over blocks of keys (attention.h: before, after) become those over all of them, one block a call.
 *   o [B, S, H, Dv] real and lse [B, H, S] wide are those of a block. sum, of the shape of o, wide, and total, of the
 *   shape of lse, are those of the blocks so far: the first call sets them, later ones make
 *     t = log(e^total + e^lse),  sum = e^(total - t) sum + e^(lse - t) o,  total = t.
 *   lse = -inf: the row sees nothing of the block (or nothing at all yet), which then weighs nothing; o is finite
 *   there. y: sum in the real type, for the last block. Both flags acc_ are the same. No aliasing.
 *   The order of blocks is the order of calls; within a row nothing is summed over elements.
 * ring_add: y (+)= x, elementwise, [rows, n], each real or wide: parts of gradients in the order of calls. No aliasing.
 */
#ifndef BRAID_OPS_RING_H
#define BRAID_OPS_RING_H

#include "ops/op.h"

#define RING_MERGE_FIELDS(T, N, S, op)                                                                                 \
    T(op, o, IN, REAL, "b s h dv")                                                                                     \
    T(op, lse, IN, WIDE, "b h s")                                                                                      \
    T(op, sum, SUM, WIDE, "b s h dv")                                                                                  \
    T(op, total, SUM, WIDE, "b h s")                                                                                   \
    T(op, y, OPT_OUT, REAL, "b s h dv")
OP_ARGS(ring_merge, RING_MERGE_FIELDS);
#define RING_ADD_FIELDS(T, N, S, op)                                                                                   \
    T(op, x, IN, STREAM, "rows n")                                                                                     \
    T(op, y, SUM, STREAM, "rows n")
OP_ARGS(ring_add, RING_ADD_FIELDS);

#endif
