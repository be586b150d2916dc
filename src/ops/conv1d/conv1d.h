/* conv1d: causal convolution of each channel with its own W taps, then bias, then SiLU if asked.
 *   pre[b,t,c] = bias[c] + sum_k w[c,k] * x[b, t-(W-1)+k, c];   y = silu ? pre * sigmoid(pre) : pre
 *   x, y [B, S, C] real, strided (columns of a wider row); w [C, W] wide, 1 <= W <= CONV1D_MAX_WIDTH;
 *   bias [C] wide, optional.
 *   init [B, W-1, C] optional: the rows -(W-1)..-1 of x (decoding); absent: zeros.
 *   start I64 [1] optional: when it holds 0 a text begins here, and init counts as zeros whatever
 * it holds. final [B, W-1, C] optional output: the last W-1 rows of [init | x], the init of the
 * next call; it may be init. y must not overlap x. doc_start I32 [B, S] optional: index of the
 * first row of this row's document; row t sees row j only if j >= doc_start[b,t] (rows of init have
 * negative indices). backward, dpre = dy * act'(pre), pre recomputed from x: dx[j] = sum over t of
 * w[:, j-t+W-1] dpre[t] over the rows t that see j; dinit the same for rows before 0; dw[c,k] = sum
 * dpre[t] x[t-(W-1)+k]; dbias = sum dpre (both wide): sums over blocks of CONV1D_BLOCK rows, added in order.
 * final takes no gradient. No aliasing. */
#ifndef BRAID_OPS_CONV1D_H
#define BRAID_OPS_CONV1D_H

#include "ops/op.h"

enum { CONV1D_MAX_WIDTH = 16, CONV1D_BLOCK = 64 };

#define CONV1D_FWD_FIELDS(T, N, S, op)                                                                                 \
    T(op, x, IN, REAL, "b s c")                                                                                        \
    T(op, w, IN, WIDE, "c taps")                                                                                       \
    T(op, bias, OPT, WIDE, "c")                                                                                        \
    T(op, init, OPT, REAL, "b taps-1 c")                                                                               \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, start, OPT, I64, "1")                                                                                        \
    T(op, y, OUT, REAL, "b s c")                                                                                       \
    T(op, final, OPT_SAVED, REAL, "b taps-1 c")                                                                        \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, bool, silu, 1)
OP_ARGS(conv1d_fwd, CONV1D_FWD_FIELDS);
#define CONV1D_BWD_FIELDS(T, N, S, op)                                                                                 \
    T(op, dy, IN, REAL, "b s c")                                                                                       \
    T(op, x, IN, REAL, "b s c")                                                                                        \
    T(op, w, IN, WIDE, "c taps")                                                                                       \
    T(op, bias, OPT, WIDE, "c")                                                                                        \
    T(op, init, OPT, REAL, "b taps-1 c")                                                                               \
    T(op, doc_start, OPT, I32, "b s")                                                                                  \
    T(op, dx, OUT, REAL, "b s c")                                                                                      \
    T(op, dw, SUM, WIDE, "c taps")                                                                                     \
    T(op, dbias, OPT_SUM, WIDE, "c &bias")                                                                             \
    T(op, dinit, OPT_OUT, REAL, "b taps-1 c &init")                                                                    \
    T(op, work, WORK, U8, "")                                                                                          \
    N(op, bool, silu, 1)
OP_ARGS(conv1d_bwd, CONV1D_BWD_FIELDS);

#endif
