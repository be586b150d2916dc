/* norm8: the second half of ops/addnorm with FP8 codes (ops/quantise) instead of numbers, for linear layers that read
 * what is normed: y = x * rstd * gain as q, qs and t, ts, codes by rows of `block` values of y and of its transpose.
 *   x [rows, d] real, rows may be strided; rstd [rows] wide, from addnorm of x; gain from w [d] wide: w, 1 + w when
 *   zero_centered, 1 where w is absent.
 * The values are rounded to the real type before they become codes: bits are those of addnorm followed by quantise. Of
 * each pair of codes and scales one may be absent. Where x and rstd are kept for the backward pass, t can be made there
 * and need not be kept. On a GPU one pass where `block` is 128 and codes fit tiles; else, and on other devices, by way
 * of `work`. */
#ifndef BRAID_OPS_NORM8_H
#define BRAID_OPS_NORM8_H

#include "ops/op.h"

#define NORM8_FIELDS(T, N, S, op)                                                                                      \
    T(op, x, IN, REAL, "")                                                                                             \
    T(op, rstd, IN, WIDE, "")                                                                                          \
    T(op, w, OPT, WIDE, "")                                                                                            \
    T(op, q, OPT_SAVED, F8, "")                                                                                        \
    T(op, qs, OPT_SAVED, WIDE, "")                                                                                     \
    T(op, t, OPT_SAVED, F8, "")                                                                                        \
    T(op, ts, OPT_SAVED, WIDE, "")                                                                                     \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, int64_t, block, 128)                                                                                         \
    N(op, bool, zero_centered, 0)
OP_ARGS(norm8, NORM8_FIELDS);

#endif
