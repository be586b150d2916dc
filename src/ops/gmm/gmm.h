/* gmm: grouped matrix product, one weight matrix per contiguous range of rows.
 *   rows of expert e are [offset[e], offset[e + 1]) of R; offset I32 [E + 1], on the device, rising
 * from 0 to at most R. x [R, in], w [E, out, in], y [R, out] real; bias [E, out] wide; x, y strided, w
 * and bias dense. y[r] = x[r] W_e^T + p_r bias_e; prob [R] wide, optional: p_r = prob[r], else 1. Rows
 * past offset[E] of y become 0. backward, each output optional, all but dx wide: dx[r] = dy[r] W_e (0 past
 * offset[E]); dw_e (+)= dy_e^T x_e; dbias_e (+)= sum p_r dy_r; dprob_r (+)= dy_r . bias_e. An
 * expert without rows adds nothing (acc false: zeros). Products go in even pieces
 * of at most GMM_ROWS rows and GMM_COLS columns (dw: GMM_COLS columns of dy), each by one thread, so that
 * the number of threads does not change the result. */
#ifndef BRAID_OPS_GMM_H
#define BRAID_OPS_GMM_H

#include "ops/op.h"

enum { GMM_ROWS = 1024, GMM_COLS = 256 };

#define GMM_FWD_FIELDS(T, N, S, op)                                                                                    \
    T(op, x, IN, REAL, "rows in")                                                                                      \
    T(op, w, IN, REAL, "experts out in !")                                                                             \
    T(op, bias, OPT, WIDE, "experts out !")                                                                            \
    T(op, prob, OPT, WIDE, "rows")                                                                                     \
    T(op, offset, IN, I32, "experts+1")                                                                                \
    T(op, y, OUT, REAL, "rows out")
OP_ARGS(gmm_fwd, GMM_FWD_FIELDS);
#define GMM_BWD_FIELDS(T, N, S, op)                                                                                    \
    T(op, dy, IN, REAL, "rows out")                                                                                    \
    T(op, x, OPT, REAL, "rows in +dw")                                                                                 \
    T(op, w, OPT, REAL, "experts out in ! +dx")                                                                        \
    T(op, bias, OPT, WIDE, "experts out ! +dprob")                                                                     \
    T(op, prob, OPT, WIDE, "rows")                                                                                     \
    T(op, offset, IN, I32, "experts+1")                                                                                \
    T(op, dx, OPT_OUT, REAL, "rows in")                                                                                \
    T(op, dw, OPT_SUM, WIDE, "experts out in !")                                                                       \
    T(op, dbias, OPT_SUM, WIDE, "experts out !")                                                                       \
    T(op, dprob, OPT_SUM, WIDE, "rows")
OP_ARGS(gmm_bwd, GMM_BWD_FIELDS);

#endif
