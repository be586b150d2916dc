/* Which tile of the output one block of a GPU computes at a time: plain C, so that it can be tested without one. */
#ifndef BRAID_OPS_GMM_TILE_H
#define BRAID_OPS_GMM_TILE_H

#include "base/base.h"

/* The tiles there are kernels for. */
enum gmm_tile { GMM_TILE_SMALL, GMM_TILE_LARGE, GMM_TILES };

struct gmm_tile_size {
    int64_t m, n;   /* rows and columns of the output */
    int64_t blocks; /* that run on one multiprocessor at a time */
    double rate;    /* of a multiprocessor, with full tiles; the best one is 1 */
};
static inline struct gmm_tile_size gmm_tile_size(enum gmm_tile t)
{
    struct gmm_tile_size small = {64, 128, 2, 0.5}, large = {128, 256, 1, 1.0};
    return t == GMM_TILE_LARGE ? large : small;
}

/* One product: `groups` matrices of n columns; rows: of all of them together where they are ragged (y and dx), of each
 * where they are not (dw). */
struct gmm_shape {
    int64_t rows, n, groups;
    bool ragged;
};

/* Most tiles the product can have: a ragged group's last tile may be almost empty, and rows in no
 * group are one more. */
static inline int64_t gmm_tiles_most(const struct gmm_shape *s, enum gmm_tile t)
{
    struct gmm_tile_size z = gmm_tile_size(t);
    int64_t down = s->ragged ? ceil_div(s->rows, z.m) + s->groups + 1 : ceil_div(s->rows, z.m) * s->groups;
    return down * ceil_div(s->n, z.n);
}

/* Time in units of one output element at full rate: whole waves of whole tiles, half of a ragged group's last one
 * wasted. */
static inline double gmm_tile_time(const struct gmm_shape *s, enum gmm_tile t, int64_t multiprocessors)
{
    struct gmm_tile_size z = gmm_tile_size(t);
    double down = s->ragged ? (double)s->rows / (double)z.m + 0.5 * (double)min_i64(s->groups, s->rows)
                            : (double)(ceil_div(s->rows, z.m) * s->groups);
    double tiles = down * (double)ceil_div(s->n, z.n), at_once = (double)(z.blocks * multiprocessors);
    double waves = tiles <= at_once ? 1 : tiles / at_once;
    int64_t together = tiles <= (double)multiprocessors ? 1 : z.blocks; /* that share a multiprocessor */
    return waves * (double)(z.m * z.n * together) / z.rate;
}

static inline enum gmm_tile gmm_tile_for(const struct gmm_shape *s, int64_t multiprocessors)
{
    return gmm_tile_time(s, GMM_TILE_LARGE, multiprocessors) <= gmm_tile_time(s, GMM_TILE_SMALL, multiprocessors)
               ? GMM_TILE_LARGE
               : GMM_TILE_SMALL;
}

#endif
