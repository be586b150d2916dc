/* conv1d: causal convolution of each channel with its own W taps, then bias, then SiLU if asked.
 *   pre[b,t,c] = bias[c] + sum_k w[c,k] * x[b, t-(W-1)+k, c];   y = silu ? pre * sigmoid(pre) : pre
 *   x, y [B, S, C] real, strided (columns of a wider row); w [C, W] wide, 1 <= W <= CONV1D_MAX_WIDTH;
 *   bias [C] wide, optional.
 *   init [B, W-1, C] optional: the rows -(W-1)..-1 of x (decoding); absent: zeros.
 *   start I64 [1] optional: when it holds 0 a text begins here, and init counts as zeros whatever
 * it holds. final [B, W-1, C] optional output: the last W-1 rows of [init | x], the init of the
 * next call; it may be init. y must not overlap x. doc_start I32 [B, S] optional: index of the
 * first row of this row's document; row t sees row j only if j >= doc_start[b,t] (rows of init have
 * negative indices). backward, dpre = dy * act'(pre), pre made again from x: dx[j] = sum over t of
 * w[:, j-t+W-1] dpre[t] over the rows t that see j; dinit the same for rows before 0; dw[c,k] = sum
 * dpre[t] x[t-(W-1)+k]; dbias = sum dpre (both wide): sums over blocks of CONV1D_BLOCK rows, added in order.
 * final takes no gradient. No aliasing. */
#ifndef BRAID_OPS_CONV1D_H
#define BRAID_OPS_CONV1D_H

#include "dev/dev.h"

enum { CONV1D_MAX_WIDTH = 16, CONV1D_BLOCK = 64 };

struct conv1d_fwd_args {
    struct tensor x, w, bias, init, doc_start, start, y, final, work;
    bool silu;
};
struct conv1d_bwd_args {
    struct tensor dy, x, w, bias, init, doc_start, dx, dw, dbias, dinit, work;
    bool silu, acc_dw, acc_dbias;
};
int conv1d_fwd_check(const struct conv1d_fwd_args *a, struct err *e);
int conv1d_bwd_check(const struct conv1d_bwd_args *a, struct err *e);

#endif
