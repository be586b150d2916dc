/* shard8: FP8 codes of a matrix [rows, cols] of which this rank has some rows, and the codes of all of it. Ranks divide
 * the rows in pieces of `piece`, rank r having those from r * piece on, so a scale block may be divided, too.
 *
 * shard8_most: the largest magnitude of the own values in each block that they reach into.
 *   x [n, cols] wide, contiguous: rows first .. first + n - 1 of the matrix. most [down, across] wide: row k belongs to
 *   row first / block + k of the blocks (block x block values; block 0: one for all). Blocks without own values get 0;
 *   a NaN is larger than all else.
 * shard8_codes: own codes and all scales, from the results of all ranks. most [ranks, down, across]; q [n, cols] E4M3;
 *   qs, and ts for the transpose (optional): inverse scales of the whole matrix as ops/quantise lays them out (square
 *   blocks, or block 0).
 * shard8_turn: t [cols, rows] = the transpose of q, bytes. With square blocks, or one scale for all, these are the
 * codes
 *   of the transpose.
 * Codes and scales are bit for bit those that quantise makes of the whole matrix: the largest of maxima is the maximum.
 * No gradient is taken. */
#ifndef BRAID_OPS_SHARD8_H
#define BRAID_OPS_SHARD8_H

#include "ops/quantise/quantise.h"
#include "tensor/f8.h"

#define SHARD8_MOST_FIELDS(T, N, S, op)                                                                                \
    T(op, x, FIXED, WIDE, "")                                                                                          \
    T(op, most, SAVED, WIDE, "")                                                                                       \
    N(op, int64_t, first, 0)                                                                                           \
    N(op, int64_t, block, 128)
OP_ARGS(shard8_most, SHARD8_MOST_FIELDS);
#define SHARD8_CODES_FIELDS(T, N, S, op)                                                                               \
    T(op, x, FIXED, WIDE, "")                                                                                          \
    T(op, most, FIXED, WIDE, "")                                                                                       \
    T(op, q, SAVED, F8, "")                                                                                            \
    T(op, qs, SAVED, WIDE, "")                                                                                         \
    T(op, ts, OPT_SAVED, WIDE, "")                                                                                     \
    N(op, int64_t, rows, 0)                                                                                            \
    N(op, int64_t, first, 0)                                                                                           \
    N(op, int64_t, piece, 1)                                                                                           \
    N(op, int64_t, block, 128)
OP_ARGS(shard8_codes, SHARD8_CODES_FIELDS);
#define SHARD8_TURN_FIELDS(T, N, S, op)                                                                                \
    T(op, q, FIXED, F8, "rows cols !")                                                                                 \
    T(op, t, SAVED, F8, "cols rows !")
OP_ARGS(shard8_turn, SHARD8_TURN_FIELDS);

/* Blocks that a piece of so many rows may reach into: rows of them, and how many are side by side. */
static inline int64_t shard8_down(int64_t piece, int64_t block) { return block > 0 ? ceil_div(piece, block) + 1 : 1; }
static inline int64_t shard8_across(int64_t cols, int64_t block) { return block > 0 ? ceil_div(cols, block) : 1; }
/* Which row of the maxima of rank r belongs to row i of the blocks. */
F8_INLINE int64_t shard8_row(int64_t i, int64_t r, int64_t piece, int64_t block)
{
    return block > 0 ? i - r * piece / block : 0;
}
/* The ranks [first, end) that have rows of it. */
F8_INLINE int64_t shard8_first(int64_t i, int64_t piece, int64_t block) { return block > 0 ? i * block / piece : 0; }
F8_INLINE int64_t shard8_end(int64_t i, int64_t piece, int64_t block, int64_t ranks)
{
    int64_t end = block > 0 ? (i * block + block - 1) / piece + 1 : ranks;
    return end < ranks ? end : ranks;
}

#endif
