/* quantise: x [rows, cols] to FP8 codes with a scale for each block (tensor/f8.h), in x's own order, transposed, or
 * both from one reading of x.
 *   x       real or wide; rows may be strided
 *   src     I32 [rows], optional: row r of the codes is row src[r] / k of x, or zeros where src[r] is -1, as
 *           ops/permute copies them. `rows` are then as many as src has. Entries are in range, and blocks by rows
 *   row     I32 [rows of x, k], optional: the same map the other way round, -1 for what src does not have, so that a
 *           device may read each row of x once
 *   q, qs   codes [rows, cols], E4M3 or E5M2, and inverse scales, wide: one for `block` values of a row, with `square`
 *           for block x block values, with block 0 for the whole tensor
 *   t, ts   codes of the transpose [cols, rows] with its own scales, along its own rows, so along columns of x; with
 *           square or block 0 the same codes as q, in the other order
 * Of q and t at least one is given; both have one type. Codes are contiguous. Inverse scales lie as cuBLASLt reads
 * them, rows of the codes side by side: [blocks of a row, rows], with square [blocks of rows, blocks of a row], the
 * last dimension rounded up to a multiple of 4 with zeros (f8_scales).
 *
 * The value of q[r, c] is code * qs. It differs from x by at most 2^-4 |x| (E4M3) or 2^-3 |x| (E5M2), down to where
 * codes become subnormal. A block with a value that is not finite gets NaN as scale, so that whatever is made of it is
 * not finite either. The same bits on every device for the same x. No gradient is taken: a layer passes it straight
 * through. */
#ifndef BRAID_OPS_QUANTISE_H
#define BRAID_OPS_QUANTISE_H

#include "ops/op.h"

#define QUANTISE_FIELDS(T, N, S, op)                                                                                   \
    T(op, x, IN, REAL, "")                                                                                             \
    T(op, src, OPT_FIXED, I32, "")                                                                                     \
    T(op, row, OPT_FIXED, I32, "")                                                                                     \
    T(op, q, OPT_SAVED, F8, "")                                                                                        \
    T(op, qs, OPT_SAVED, WIDE, "")                                                                                     \
    T(op, t, OPT_SAVED, F8, "")                                                                                        \
    T(op, ts, OPT_SAVED, WIDE, "")                                                                                     \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, block, 128)                                                                                         \
    N(op, bool, square, 0)                                                                                             \
    N(op, int64_t, k, 1)
OP_ARGS(quantise, QUANTISE_FIELDS);

/* Rows that are quantised. */
static inline int64_t quantise_rows(const struct quantise_args *a)
{
    return a->src.data != NULL ? a->src.dim[0] : a->x.dim[0];
}
/* Side by side in one row of inverse scales of codes [rows, cols]. */
static inline int64_t f8_scale_stride(int64_t rows, int64_t cols, int64_t block, bool square)
{
    return block == 0 ? 4 : round_up(square ? ceil_div(cols, block) : rows, 4);
}
/* Shape of them all. */
static inline struct tensor f8_scales(enum dtype wide, int64_t rows, int64_t cols, int64_t block, bool square)
{
    int64_t n = block == 0 ? 1 : ceil_div(square ? rows : cols, block);
    return tensor_1d(NULL, wide, n * f8_scale_stride(rows, cols, block, square));
}
/* Which of them belongs to code [r, c]. */
static inline int64_t f8_scale_at(const struct tensor *codes, int64_t block, bool square, int64_t r, int64_t c)
{
    if (block == 0)
        return 0;
    int64_t stride = f8_scale_stride(codes->dim[0], codes->dim[1], block, square);
    return square ? r / block * stride + c / block : c / block * stride + r;
}
/* Codes and their scales fit each other; `name` is that of the codes. */
OP_C int f8_check(const char *op, const char *name, const struct tensor *codes, const struct tensor *scales,
                  enum dtype wide, int64_t block, bool square, struct err *e);

#endif
