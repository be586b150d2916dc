/* row8: rows that travel between ranks as FP8 codes, each with its scales behind it, so that a row is one message part.
 *   a packed row: d codes E4M3, one for each value, then a byte for each block of 128 of them, zeros up to a multiple
 *   of 16 bytes (row8_bytes). The byte e stands for the inverse scale 2^(e - 127), as in E8M0; 255: NaN, where a block
 *   has a value that is not finite.
 *
 * row8_pack: q[r] = codes of x[src[r] / k], or zeros where src[r] is -1. x [rows, d] real, strided; src I32 [places],
 *   optional: without it the rows as they are. q U8 [places, row8_bytes(d)].
 * row8_unpack: y[r] = the values of q[src[r] / k], or zeros. q U8 [rows, row8_bytes(d)], y [places, d] real, strided.
 * Map entries must be in range: they come from moeplan or epplan (a GPU takes those that are not for -1).
 *
 * A value differs from that of x by at most 2^-4 |x|, down to where codes become subnormal; packing what was unpacked
 * gives the same values. The same bits on every device for the same x. No gradient is taken: a layer passes it straight
 * through. */
#ifndef BRAID_OPS_ROW8_H
#define BRAID_OPS_ROW8_H

#include "ops/op.h"

#define ROW8_PACK_FIELDS(T, N, S, op)                                                                                  \
    T(op, x, IN, REAL, "")                                                                                             \
    T(op, src, OPT_FIXED, I32, "")                                                                                     \
    T(op, q, SAVED, U8, "")                                                                                            \
    N(op, int64_t, k, 1)
OP_ARGS(row8_pack, ROW8_PACK_FIELDS);
#define ROW8_UNPACK_FIELDS(T, N, S, op)                                                                                \
    T(op, q, FIXED, U8, "")                                                                                            \
    T(op, src, OPT_FIXED, I32, "")                                                                                     \
    T(op, y, SAVED, REAL, "")                                                                                          \
    N(op, int64_t, k, 1)
OP_ARGS(row8_unpack, ROW8_UNPACK_FIELDS);

enum { ROW8_BLOCK = 128, ROW8_NAN = 255 };
static inline int64_t row8_blocks(int64_t d) { return ceil_div(d, ROW8_BLOCK); }
static inline int64_t row8_bytes(int64_t d) { return round_up(d + row8_blocks(d), 16); }

#endif
