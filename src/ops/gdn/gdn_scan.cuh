/* gdn on CUDA: what the forward and the backward walk over the pieces share; private to gdn_fwd.cu and gdn_bwd.cu.
 *
 * A warp owns 16 columns of the state (or of its gradient) of one head and holds them transposed, S^T [16, dk], as C
 * fragments in registers for the whole walk: every product of a piece has these 16 columns as its rows, so a result is
 * the left operand of the next product without leaving the warp. Right operands (K, Q, T, P) come from shared memory,
 * two stages deep.
 * How a warp's columns lie: ops/cuda/walk.cuh. */
#ifndef BRAID_OPS_GDN_SCAN_CUH
#define BRAID_OPS_GDN_SCAN_CUH

#include "ops/gdn/gdn_tile.cuh"

enum { SCAN_WARPS = 8 };

template <int DK> struct scan_stage {
    bf16 k[PIECE * (DK + 8)], q[PIECE * (DK + 8)];
    uint32_t blocks[UNIT_BLOCKS * BLOCK_WORDS];
    float rows[SCAN_ROWS * PIECE];
};

template <int DK>
__device__ __forceinline__ void load_stage(struct scan_stage<DK> *to, const struct gdn_geom &g,
                                           const gdn_view<const bf16> &q, const gdn_view<const bf16> &k,
                                           const uint32_t *blocks, const float *factors, int b, int h, int index)
{
    struct piece p = piece_at(g, index);
    int64_t unit = unit_of(g, b, index, h);
    int kh = h / g.per_key;
    load_rows<DK>(to->k, view_at(k, b, p.first, kh), k.s, p.n, g.dk, PIECE);
    load_rows<DK>(to->q, view_at(q, b, p.first, kh), q.s, p.n, g.dk, PIECE);
    load_bytes(to->blocks, blocks + unit * (UNIT_BLOCKS * BLOCK_WORDS), UNIT_BLOCKS * BLOCK_WORDS * 4);
    load_bytes(to->rows, factors + unit * (UNIT_ROWS * PIECE), SCAN_ROWS * PIECE * 4);
    copies_commit();
}

/* s = decay s + x^T-fragments times the rows of the tile: x [16, PIECE] in A fragments, tile [PIECE, DK]. */
template <int DK>
__device__ __forceinline__ void add_rows(float (&s)[DK / 8][4], const uint32_t (&x)[PIECE / 16][4], const bf16 *tile)
{
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++)
#pragma unroll
        for (int d = 0; d < DK / 16; d++) {
            uint32_t b[4];
            load_b_trans<DK + 8>(b, tile, 16 * j, 16 * d);
            mma_bf16(s[2 * d], x[j], b[0], b[1]);
            mma_bf16(s[2 * d + 1], x[j], b[2], b[3]);
        }
}

/* Warps of a block. Few heads are spread over more blocks: a warp's walk takes the same time wherever it runs, but the
 * fewer share an SM's shared memory the sooner it is done. */
static inline int scan_warps(const struct gdn_geom *g)
{
    enum { ENOUGH_BLOCKS = 128 };
    int64_t need = ceil_div(g->dv, 16), heads = (int64_t)g->batch * g->heads, warps = min_i64(need, SCAN_WARPS);
    while (warps > 2 && heads * ceil_div(need, warps) < ENOUGH_BLOCKS)
        warps = ceil_div(warps, 2);
    return (int)warps;
}

#endif
