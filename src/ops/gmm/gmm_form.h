/* How the products of experts are cut on a GPU with bulk copies (gmm_tma.cuh): plain C, so that it can be tested without one. */
#ifndef BRAID_OPS_GMM_FORM_H
#define BRAID_OPS_GMM_FORM_H

#include "base/base.h"

/*          tile of the output   groups of warps       good for
 * WIDE     128 x 256            share a tile          fewest bytes copied for a product
 * LOW      64 x 256             a tile each           few rows an expert
 * RING     128 x 256            share a tile          results leave through stages of the ring, nobody waits for stores
 * PAIR     128 x 256            share a tile          as RING; two blocks copy what both need once
 * All give the same bits. RING and PAIR have not run on a GPU yet: only gpu.expert_form chooses them. */
enum gmm_form { GMM_WIDE, GMM_LOW, GMM_RING, GMM_PAIR, GMM_FORMS };

/* What is done with a tile of sums before it is stored; tensors as in gmm_cuda.cuh.
 *   STORE  c = sums (+ prob * bias), bf16
 *   ACT    b has rows [gate | up] (or one for each value): pre = sums + bias, c = prob * act(pre)
 *   DACT   sums are the gradient of the activation: c = gradient of pre, act = prob * act(pre), part = share of dprob
 *   SUMS   fp32 c (+)= sums, the weight gradient */
enum gmm_after { GMM_STORE, GMM_ACT, GMM_DACT, GMM_SUMS };

struct gmm_form_size {
    int64_t m, n; /* rows and columns of the product that a tile takes */
};
static inline struct gmm_form_size gmm_form_size(enum gmm_form f)
{
    static const struct gmm_form_size size[GMM_FORMS] = {{128, 256}, {64, 256}, {128, 256}, {128, 256}};
    return size[f];
}

/* rows: of all experts together, which is the depth of the weight gradient. Where the last tile of an expert would be mostly
 * empty it is made lower. (docs/LOG.md has the measurements.) wanted: 0, or 1 + the form to take whatever the shape. */
static inline enum gmm_form gmm_form_for(enum gmm_after after, int64_t rows, int64_t experts, int wanted)
{
    bool low = wanted > 0 ? wanted - 1 == GMM_LOW : rows / max_i64(experts, 1) < 96;
    if (low)
        return after == GMM_SUMS ? GMM_WIDE : GMM_LOW; /* rows are the depth of the weight gradient */
    return wanted > 0 && wanted <= GMM_FORMS ? (enum gmm_form)(wanted - 1) : GMM_WIDE;
}

/* Smaller products are left to smaller tiles: at least a quarter of the multiprocessors must have a tile. */
static inline bool gmm_form_fills(enum gmm_form f, int64_t tiles_down, int64_t columns, int64_t multiprocessors)
{
    return 4 * tiles_down * ceil_div(columns, gmm_form_size(f).n) >= multiprocessors;
}

/* Tiles that run at the same time should form a square of the output, so that rows and weights are read from the
 * cache: tiles down before the next column of tiles. */
static inline int gmm_form_sweep(enum gmm_form f, enum gmm_after after)
{
    return f == GMM_LOW ? 24 : f == GMM_PAIR && after == GMM_SUMS ? 8 : 16; /* the weight gradient's pairs lie one below the other */
}

#endif
