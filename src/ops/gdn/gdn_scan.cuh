/* gdn on CUDA: what the forward and the backward walk over the pieces share; private to gdn_fwd.cu and gdn_bwd.cu.
 *
 * A warp owns 16 columns of the state (or of its gradient) of one head and holds them transposed, S^T [16, dk], as C
 * fragments in registers for the whole walk: every product of a piece has these 16 columns as its rows, so a result is
 * the left operand of the next product without leaving the warp. Right operands (K, Q, T, P) come from shared memory,
 * two stages deep.
 *
 * Row m of a warp's 16 stands for column 4 (m % 8 / 2) + 2 (m / 8) + m % 2: then a row of V, O or of a state is eight
 * bytes per lane, and transpose8 turns it into fragments. */
#ifndef BRAID_OPS_GDN_SCAN_CUH
#define BRAID_OPS_GDN_SCAN_CUH

#include "ops/gdn/gdn_tile.cuh"

enum { SCAN_WARPS = 8, TILES = PIECE / 8 };

template <int DK>
struct scan_stage {
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

/* Four columns of rows 8t + g of a [rows, dv] matrix: zeros outside. */
__device__ __forceinline__ void load_columns(uint2 (&x)[TILES], const bf16 *from, int64_t stride, int n, bool valid)
{
    int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        x[t] = make_uint2(0, 0);
        if (valid && 8 * t + g < n)
            x[t] = *(const uint2 *)(from + (8 * t + g) * stride);
    }
}
/* C fragments [16, PIECE] to rows of a [rows, dv] matrix. */
__device__ __forceinline__ void store_columns(bf16 *to, int64_t stride, int n, bool valid, const float (&c)[TILES][4])
{
    int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        uint2 x = make_uint2(transpose8(pack2(c[t][0], c[t][1])), transpose8(pack2(c[t][2], c[t][3])));
        if (valid && 8 * t + g < n)
            *(uint2 *)(to + (8 * t + g) * stride) = x;
    }
}

/* Rows 16 d to 16 d + 15 of a state, from the A fragment of its transpose. to: this lane's first column. */
__device__ __forceinline__ void store_state_rows(bf16 *to, int64_t stride, int d, int dk, bool valid,
                                                 const uint32_t (&a)[4])
{
    int g = threadIdx.x % 32 / 4, row = 16 * d + g;
    uint2 x = make_uint2(transpose8(a[0]), transpose8(a[1])), y = make_uint2(transpose8(a[2]), transpose8(a[3]));
    if (valid && row < dk)
        *(uint2 *)(to + row * stride) = x;
    if (valid && row + 8 < dk)
        *(uint2 *)(to + (row + 8) * stride) = y;
}

/* The whole state of this warp's columns, element by element: at the ends of a walk. first: of the 16 columns. */
__device__ __forceinline__ int state_column(int e)
{
    int g = threadIdx.x % 32 / 4;
    return 4 * (g / 2) + 2 * (e >> 1) + g % 2;
}
template <typename T, int DK>
__device__ __forceinline__ void load_state(float (&s)[DK / 8][4], const T *from, int64_t stride, int first, int dk,
                                           int dv)
{
    int q = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < DK / 8; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = 8 * t + 2 * q + (e & 1), col = first + state_column(e);
            s[t][e] = from != NULL && row < dk && col < dv ? to_float(from[row * stride + col]) : 0.0f;
        }
}
template <int DK>
__device__ __forceinline__ void store_state(const float (&s)[DK / 8][4], float *to, int64_t stride, int first, int dk,
                                            int dv)
{
    int q = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < DK / 8; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = 8 * t + 2 * q + (e & 1), col = first + state_column(e);
            if (row < dk && col < dv)
                to[row * stride + col] = s[t][e];
        }
}

/* Two row factors, of the rows whose values lie in one register of tile t. */
__device__ __forceinline__ float2 row_pair(const float *rows, int t)
{
    return *(const float2 *)(rows + 8 * t + threadIdx.x % 4 * 2);
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

/* A fragments of c with columns scaled by row factors. */
__device__ __forceinline__ void scale_to_a(uint32_t (&a)[PIECE / 16][4], const float (&c)[TILES][4], const float *rows)
{
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++) {
        float2 left = row_pair(rows, 2 * j), right = row_pair(rows, 2 * j + 1);
        a[j][0] = pack2(c[2 * j][0] * left.x, c[2 * j][1] * left.y);
        a[j][1] = pack2(c[2 * j][2] * left.x, c[2 * j][3] * left.y);
        a[j][2] = pack2(c[2 * j + 1][0] * right.x, c[2 * j + 1][1] * right.y);
        a[j][3] = pack2(c[2 * j + 1][2] * right.x, c[2 * j + 1][3] * right.y);
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
