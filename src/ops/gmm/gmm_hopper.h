/* The grouped products on Hopper's bulk copies and wgmma (gmm_hopper.cu); gmm.cu calls them where they fit. */
#ifndef BRAID_OPS_GMM_HOPPER_H
#define BRAID_OPS_GMM_HOPPER_H

#include "ops/gmm/gmm.h"

/* y [R, n] = x [R, k] times the expert's matrix w [E, ..]: w_rows 'n' (K-major, forward) or 'k' (MN-major, input gradient). */
struct gmm_rows_call {
    struct tensor x, w, offset, y;
    bool by_k; /* w is [E, k, n] */
};
/* dw [E, m, n] wide (+)= a_e^T b_e over the rows of each expert: a [R, m], b [R, n]. */
struct gmm_dw_call {
    struct tensor a, b, offset, dw;
    bool add;
};
/* bf16, widths that bulk copies can take, a GPU that has them. */
bool gmm_hopper_fits(const struct lane *l, const struct tensor *a, const struct tensor *b);
int gmm_hopper_rows(struct lane *l, const struct gmm_rows_call *c);
int gmm_hopper_dw(struct lane *l, const struct gmm_dw_call *c);

#endif
