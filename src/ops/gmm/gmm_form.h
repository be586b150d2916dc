/* How the products of experts are cut on a GPU with bulk copies (gmm_tma.cuh): plain C, so that it can be tested
 * without one. */
#ifndef BRAID_OPS_GMM_FORM_H
#define BRAID_OPS_GMM_FORM_H

#include "base/base.h"

/* What is done with a tile of sums before it is stored; tensors as in gmm_cuda.cuh.
 *   STORE  c = sums (+ prob * bias), bf16
 *   ACT    b has rows [gate | up] (or one for each value): pre = sums + bias, c = prob * act(pre)
 *   DACT   sums are the gradient of the activation: c = gradient of pre, act = prob * act(pre), part = share of dprob
 *   SUMS   fp32 c (+)= sums, the weight gradient */
enum gmm_after { GMM_STORE, GMM_ACT, GMM_DACT, GMM_SUMS };

/* Rows and columns of the product that a tile takes. Tiles that run at the same time should form a square of the
 * output, so that rows and weights are read from the cache: GMM_FORM_SWEEP tiles down before the next column of tiles.
 * (docs/LOG.md has the measurements.) */
enum { GMM_FORM_ROWS = 128, GMM_FORM_COLS = 256, GMM_FORM_SWEEP = 16 };

/* Smaller products are left to smaller tiles: at least a quarter of the multiprocessors must have a tile. */
static inline bool gmm_form_fills(int64_t tiles_down, int64_t columns, int64_t multiprocessors)
{
    return 4 * tiles_down * ceil_div(columns, GMM_FORM_COLS) >= multiprocessors;
}

#endif
