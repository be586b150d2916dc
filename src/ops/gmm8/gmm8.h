/* gmm8: the grouped products of ops/gmm of FP8 codes with inverse scales (ops/quantise). R rows, experts and offset as
 * in ops/gmm; n: rows of a matrix B_e of an expert, k: its columns, over which is summed.
 *   gmm8      y [R, n] real: y[r] = x[r] B_e^T + p_r bias_e, rows past offset[E] become 0
 *             x [R, k] codes, E4M3 or E5M2, xs by rows of `block`; w the B of all experts, E4M3: [E n, k], one below
 *             the other, or if turned [n, E k], side by side; ws by squares where `square`, else by rows. bias [E, n]
 *             and prob [R] wide, optional, p_r as in ops/gmm
 *   gmm8_dw   dw [E, out, in] wide: dw_e (+)= dy_e^T x_e from the transposes dyt [out, R], E4M3 or E5M2, and xt [in,
 *             R], E4M3, both by rows, so by `block` tokens, counted from the first of all experts
 * The codes of a weight [E, out, in], quantised as [E out, in], are w of the forward product, and those of its
 * transpose w of the input gradient, turned. A GPU has fast kernels (Hopper) where blocks are of 128 or one scale, and
 * rows and columns of every B_e multiples of 128, so that no block reaches into the next expert; gmm8_dw also where R
 * is a multiple of 16. Others decode and multiply in fp32. Sums are fp32, of tensor cores promoted to it every 128
 * products. */
#ifndef BRAID_OPS_GMM8_H
#define BRAID_OPS_GMM8_H

#include "ops/op.h"

#define GMM8_FIELDS(T, N, S, op)                                                                                       \
    T(op, x, FIXED, F8, "")                                                                                            \
    T(op, xs, FIXED, WIDE, "")                                                                                         \
    T(op, w, FIXED, F8, "")                                                                                            \
    T(op, ws, FIXED, WIDE, "")                                                                                         \
    T(op, bias, OPT, WIDE, "")                                                                                         \
    T(op, prob, OPT, WIDE, "")                                                                                         \
    T(op, offset, FIXED, I32, "")                                                                                      \
    T(op, y, OUT, REAL, "")                                                                                            \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, block, 128)                                                                                         \
    N(op, bool, square, 1)                                                                                             \
    N(op, bool, turned, 0)
OP_ARGS(gmm8, GMM8_FIELDS);
#define GMM8_DW_FIELDS(T, N, S, op)                                                                                    \
    T(op, dyt, FIXED, F8, "")                                                                                          \
    T(op, dyts, FIXED, WIDE, "")                                                                                       \
    T(op, xt, FIXED, F8, "")                                                                                           \
    T(op, xts, FIXED, WIDE, "")                                                                                        \
    T(op, offset, FIXED, I32, "")                                                                                      \
    T(op, dw, SUM, WIDE, "")                                                                                           \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, block, 128)
OP_ARGS(gmm8_dw, GMM8_DW_FIELDS);

/* Matrices of experts as codes: rows x and stacked or turned w belong together. */
OP_C int gmm8_operands_check(const char *op, const struct tensor *x, const struct tensor *xs, const struct tensor *w,
                             const struct tensor *ws, const struct tensor *offset, enum dtype wide, int64_t block,
                             bool square, bool turned, struct err *e);
/* Rows of B_e. */
static inline int64_t gmm8_rows(const struct tensor *w, const struct tensor *offset, bool turned)
{
    int64_t experts = offset->dim[0] - 1;
    return turned ? w->dim[0] : w->dim[0] / (experts > 0 ? experts : 1);
}

#endif
