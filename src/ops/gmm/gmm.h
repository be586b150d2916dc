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

#include "dev/dev.h"

enum { GMM_ROWS = 1024, GMM_COLS = 256 };

struct gmm_fwd_args {
    struct tensor x, w, bias, prob, offset, y;
};
struct gmm_bwd_args {
    struct tensor dy, x, w, bias, prob, offset, dx, dw, dbias, dprob;
    bool acc_dw, acc_dbias, acc_dprob;
};
int gmm_fwd_check(const struct gmm_fwd_args *a, struct err *e);
int gmm_bwd_check(const struct gmm_bwd_args *a, struct err *e);

#endif
