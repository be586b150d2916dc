/* gemm8: C (+)= A B^T of FP8 codes with scales by blocks, and bias added to every row of C if given.
 *   a [m, k], b [n, k]   codes, E4M3 or E5M2 each, contiguous; as, bs their inverse scales as ops/quantise makes them
 *   c [m, n]             real or wide, rows may be strided; bias [n] wide, optional, as in ops/gemm
 *   block, a_square, b_square   as the operands were quantised; both of 128 x 128 blocks is refused, as no GPU has it
 * Sums are fp32, with what tensor cores add up promoted to fp32 at least every 128 products. Products and
 * dequantisation are exact, so devices differ by the rounding of sums only.
 * A linear layer: y = x W^T with a = x by rows, b = W by squares; dx = dy W with a = dy by rows, b = W^T by squares;
 * dW (+)= dy^T x with a = dy^T and b = x^T, both by rows, which are tokens. c overlaps neither a nor b. */
#ifndef BRAID_OPS_GEMM8_H
#define BRAID_OPS_GEMM8_H

#include "ops/op.h"

#define GEMM8_FIELDS(T, N, S, op)                                                                                      \
    T(op, a, FIXED, F8, "")                                                                                            \
    T(op, as, FIXED, WIDE, "")                                                                                         \
    T(op, b, FIXED, F8, "")                                                                                            \
    T(op, bs, FIXED, WIDE, "")                                                                                         \
    T(op, c, SUM, REAL, "")                                                                                            \
    T(op, bias, OPT, WIDE, "n")                                                                                        \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, block, 128)                                                                                         \
    N(op, bool, a_square, 0)                                                                                           \
    N(op, bool, b_square, 0)
OP_ARGS(gemm8, GEMM8_FIELDS);

#endif
