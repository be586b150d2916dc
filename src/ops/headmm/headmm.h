/* headmm: a linear map of its own for each head, without bias.
 *   x [T, H, K], y [T, H, N] real, strided; w real, strided: [H, K, N], or with trans [H, N, K].
 *   y[t, h] = x[t, h] w[h], or with trans x[t, h] w[h]^T.
 * backward: dx = the transposed map of dy; dw[h] (wide) (+)= the sum over t of x^T dy, laid out as w.
 * The weights of a projection whose rows are heads, [H (n + v), R], are such a w by views: latent attention multiplies
 * queries with the rows n, and its output with the rows v, of every head. headmm_dw is the gradient of such a weight,
 * of which every row must be written by one call: dw [H, K + K2, N] wide (+)= the sum over t of x^T dy in the rows of
 * K, of x2^T dy2 in those of K2. Sums are GEMM's. No aliasing. */
#ifndef BRAID_OPS_HEADMM_H
#define BRAID_OPS_HEADMM_H

#include "ops/op.h"

#define HEADMM_FWD_FIELDS(T, N, S, op)                                                                                 \
    T(op, x, IN, REAL, "t h xw")                                                                                       \
    T(op, w, IN, REAL, "h wr wc")                                                                                      \
    T(op, y, OUT, REAL, "t h yw")                                                                                      \
    N(op, bool, trans, 0)
OP_ARGS(headmm_fwd, HEADMM_FWD_FIELDS);
#define HEADMM_BWD_FIELDS(T, N, S, op)                                                                                 \
    T(op, dy, IN, REAL, "t h yw")                                                                                      \
    T(op, x, IN, REAL, "t h xw")                                                                                       \
    T(op, w, IN, REAL, "h wr wc")                                                                                      \
    T(op, dx, OPT_OUT, REAL, "t h xw")                                                                                 \
    T(op, dw, OPT_SUM, WIDE, "h wr wc")                                                                                \
    N(op, bool, trans, 0)
OP_ARGS(headmm_bwd, HEADMM_BWD_FIELDS);
#define HEADMM_DW_FIELDS(T, N, S, op)                                                                                  \
    T(op, x, IN, REAL, "t h xw")                                                                                       \
    T(op, dy, IN, REAL, "t h yw")                                                                                      \
    T(op, x2, IN, REAL, "t h x2w")                                                                                     \
    T(op, dy2, IN, REAL, "t h yw")                                                                                     \
    T(op, dw, SUM, WIDE, "h xw+x2w yw")
OP_ARGS(headmm_dw, HEADMM_DW_FIELDS);

#endif
