/* ssd backward, CUDA: dx, the heads' sum of dG, and the per-row products that need the square matrices; see
 * ssd_cuda.cuh.
 *
 * A block takes one piece and up to SSD_HEADS heads of one group. All squares are held transposed, rows j: warp w owns
 * 16 rows of G^T and of the sum of dG^T in registers, from the diagonal to the right. Per head it makes M^T 16 columns
 * at a time, multiplies by the decays, and uses the rounded G L at once as the left operand of w. */
#include "ops/ssd/ssd_cuda.cuh"
#include "ops/ssd/ssd.h"

enum { THREADS = 256, P_TILES = SSD_P / 8, P_BLOCKS = SSD_P / 16, Q_TILES = SSD_ROWS / 8, Q_BLOCKS = SSD_ROWS / 16 };

struct dx_stage {
    bf16 x[P_TILE], dy[P_TILE], e[P_TILE];
};
struct dx_shared {
    bf16 b[N_TILE];
    struct dx_stage stage[2]; /* the second holds C at first */
    float delta[2][SSD_ROWS], s[2][SSD_ROWS], to_end[2][SSD_ROWS];
    int low[SSD_ROWS];
    float col[2][Q_BLOCKS][SSD_ROWS]; /* sums over the rows j of a tile; by head, even and odd */
    float row[2][SSD_ROWS], dd[2][Q_BLOCKS];
};

__device__ __forceinline__ void dx_load(const struct ssd_grads &a, struct dx_shared *sh, int k, int b, int u, int h,
                                        struct span sp)
{
    int64_t at = rows_at(a.s, b, u, h);
    load_tile<SSD_P, THREADS>(sh->stage[k].x, row_of<bf16>(a.x, b, sp.first, h), a.x.row, sp.n, a.s.p, a.vec);
    load_tile<SSD_P, THREADS>(sh->stage[k].dy, row_of<bf16>(a.dy, b, sp.first, h), a.dy.row, sp.n, a.s.p, a.vec);
    load_tile<SSD_P, THREADS>(sh->stage[k].e, state_of<bf16>(a.e, b, u, h), a.e.row, a.s.n, SSD_P, true);
    load_numbers(sh->delta[k], a.r.delta + at, 0);
    load_numbers(sh->s[k], a.r.s + at, 32);
    load_numbers(sh->to_end[k], a.r.to_end + at, 64);
    copies_commit();
}

/* What a lane carries over the column blocks of one head: its rows are j and j + 8. */
struct dx_rows {
    int j;
    float s[2], delta[2], pair[2], dd; /* pair: sums of G L M, the part of w . x from inside the piece */
};

__device__ __forceinline__ void leaving_block(float (*w)[4], const bf16 *bm, const bf16 *e, int tile, int n)
{
    uint32_t a[4], b[4];
    frag_a(a, bm + tile * 16 * N_ROW + n * 16, N_ROW);
#pragma unroll
    for (int q = 0; q < P_BLOCKS; q++) {
        frag_b_t(b, e + n * 16 * P_ROW + q * 16, P_ROW);
        mma_bf16(w[2 * q], a, b[0], b[1]);
        mma_bf16(w[2 * q + 1], a, b[2], b[3]);
    }
}

/* to_end_j E^T B_j */
__device__ __forceinline__ void leaving(float (*w)[4], const struct dx_shared *sh, int k, int tile, int n_blocks, int j)
{
    if (n_blocks == SSD_N / 16) {
#pragma unroll
        for (int n = 0; n < SSD_N / 16; n++)
            leaving_block(w, sh->b, sh->stage[k].e, tile, n);
    } else {
#pragma unroll 1
        for (int n = 0; n < n_blocks; n++)
            leaving_block(w, sh->b, sh->stage[k].e, tile, n);
    }
    float f0 = sh->to_end[k][j], f1 = sh->to_end[k][j + 8];
#pragma unroll
    for (int q = 0; q < P_TILES; q++) {
        w[q][0] *= f0;
        w[q][1] *= f0;
        w[q][2] *= f1;
        w[q][3] *= f1;
    }
}

/* Adds the sums of two 8-column tiles over the warp's 16 rows: each exchange halves what a lane still carries. */
__device__ __forceinline__ void column_sums(float *to, const float (*v)[2])
{
    int lane = threadIdx.x % 32, t = lane % 4;
    bool right = lane & 16, odd = lane & 8;
    float keep0 = right ? v[1][0] : v[0][0], keep1 = right ? v[1][1] : v[0][1];
    float send0 = right ? v[0][0] : v[1][0], send1 = right ? v[0][1] : v[1][1];
    keep0 += __shfl_xor_sync(0xffffffffu, send0, 16);
    keep1 += __shfl_xor_sync(0xffffffffu, send1, 16);
    float sum = odd ? keep1 : keep0, send = odd ? keep0 : keep1;
    sum += __shfl_xor_sync(0xffffffffu, send, 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 4);
    if ((lane & 4) == 0)
        to[(right ? 8 : 0) + 2 * t + (odd ? 1 : 0)] = sum;
}

/* Columns 16 i .. of one head: dG^T added to dg, G L packed as the left operand of w. */
template <bool DOCUMENTS>
__device__ __forceinline__ void pair_block(uint32_t *gl, float (*dg)[4], const float (*g)[4], const float (*m)[4],
                                           struct dx_rows *r, struct dx_shared *sh, int k, int i, int tile)
{
    int t = threadIdx.x % 4;
    float cols[2][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int col = i * 16 + half * 8 + 2 * t;
        float2 si = *(const float2 *)(sh->s[k] + col);
        float v[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int at = col + e % 2, j = r->j + e / 2 * 8;
            float d = (e % 2 ? si.y : si.x) - r->s[e / 2];
            if (i <= tile || DOCUMENTS)
                d = at >= j && (!DOCUMENTS || sh->low[at] <= j) ? d : -INFINITY;
            if (i == tile && at == j)
                r->dd += m[half][e];
            float l = exp2_fast(d), product = m[half][e] * l;
            v[e] = g[half][e] * l;
            dg[half][e] += product * r->delta[e / 2];
            product *= g[half][e];
            r->pair[e / 2] += product;
            cols[half][e % 2] = e < 2 ? product * r->delta[0] : cols[half][e % 2] + product * r->delta[1];
        }
        gl[2 * half] = pack_bf16(v[0], v[1]);
        gl[2 * half + 1] = pack_bf16(v[2], v[3]);
    }
    column_sums(sh->col[k][tile] + i * 16, cols);
}

/* One head: w of the warp's rows. DOCUMENTS: one begins in this piece. */
template <bool DOCUMENTS>
__device__ __forceinline__ void dx_head(float (*w)[4], float (*dg)[4], const float (*g)[4], struct dx_rows *r,
                                        struct dx_shared *sh, int k, int tile, int q_blocks)
{
    const struct dx_stage *in = &sh->stage[k];
    /* Two blocks of columns at a time, so that the products of one overlap the sums of the other; of an odd tile the
     * first lies left of the diagonal and adds zeros. */
#pragma unroll
    for (int i = 0; i < Q_BLOCKS; i += 2)
        if (i + 1 >= tile && i < q_blocks) {
            float m[2][2][4] = {};
            uint32_t x[4], b[4], gl[2][4];
#pragma unroll
            for (int p = 0; p < P_BLOCKS; p++) {
                frag_a(x, in->x + tile * 16 * P_ROW + p * 16, P_ROW);
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    frag_b(b, in->dy + (i + c) * 16 * P_ROW + p * 16, P_ROW);
                    mma_bf16(m[c][0], x, b[0], b[1]);
                    mma_bf16(m[c][1], x, b[2], b[3]);
                }
            }
#pragma unroll
            for (int c = 0; c < 2; c++)
                pair_block<DOCUMENTS>(gl[c], dg + 2 * (i + c), g + 2 * (i + c), m[c], r, sh, k, i + c, tile);
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int q = 0; q < P_BLOCKS; q++) {
                    frag_b_t(b, in->dy + (i + c) * 16 * P_ROW + q * 16, P_ROW);
                    mma_bf16(w[2 * q], gl[c], b[0], b[1]);
                    mma_bf16(w[2 * q + 1], gl[c], b[2], b[3]);
                }
        }
}

/* w becomes dx. */
__device__ __forceinline__ void finish_rows(float (*w)[4], const bf16 *dys, const struct dx_rows *r, float d)
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bf16 *dy = dys + (r->j + 8 * half) * P_ROW + 2 * t;
#pragma unroll
        for (int q = 0; q < P_TILES; q++) {
            float2 v = unpack_bf16(*(const uint32_t *)(dy + q * 8));
            w[q][2 * half] = r->delta[half] * w[q][2 * half] + d * v.x;
            w[q][2 * half + 1] = r->delta[half] * w[q][2 * half + 1] + d * v.y;
        }
    }
}

/* Row sums less column sums of a head, and its part of dD, once all warps have left theirs. */
__device__ __forceinline__ void flush(const struct ssd_grads &a, const struct dx_shared *sh, int k, int64_t at,
                                      int64_t sum_at, int rows)
{
    int i = threadIdx.x;
    if (i < rows) {
        float sum = 0;
        for (int m = 0; m <= i / 16; m++)
            sum += sh->col[k][m][i];
        a.diff[at + i] = sum - sh->row[k][i];
    }
    if (i == THREADS - 1) {
        float sum = 0;
        for (int m = 0; m < Q_BLOCKS; m++)
            sum += sh->dd[k][m];
        a.sums.d[sum_at] = sum;
    }
}

static __global__ void __launch_bounds__(THREADS, 1) dx_kernel(const __grid_constant__ struct ssd_grads a)
{
    DYNAMIC_SHARED(char, shared, 16);
    struct dx_shared *sh = (struct dx_shared *)shared;
    int block = blockIdx.x % a.blocks, group = blockIdx.x / a.blocks % a.s.groups,
        piece = blockIdx.x / a.blocks / a.s.groups;
    int b = piece / a.s.pieces, u = piece % a.s.pieces, tile = triangle_tile(threadIdx.x / 32), t = threadIdx.x % 4;
    int h0 = group * a.s.per_group + block * SSD_HEADS, heads = min(SSD_HEADS, a.s.per_group - block * SSD_HEADS);
    struct span sp = span_of(a.s, u);
    int n_blocks = (a.s.n + 15) / 16, q_blocks = (sp.n + 15) / 16, j = tile * 16 + threadIdx.x % 32 / 4;
    bf16 *cm = (bf16 *)&sh->stage[1];
    bool mine = tile < q_blocks;
    load_tile<SSD_N, THREADS>(sh->b, row_of<bf16>(a.bm, b, sp.first, group), a.bm.row, sp.n, a.s.n, a.vec);
    load_tile<SSD_N, THREADS>(cm, row_of<bf16>(a.cm, b, sp.first, group), a.cm.row, sp.n, a.s.n, a.vec);
    load_numbers(sh->low, a.r.low + (int64_t)piece * SSD_ROWS, 0);
    copies_commit();
    dx_load(a, sh, 0, b, u, h0, sp);
    copies_wait<1>();
    __syncthreads();
    bool documents = sh->low[SSD_ROWS - 1] >= 0;
    float g[Q_TILES][4] = {}, dg[Q_TILES][4] = {};
    for (int n = 0; mine && n < n_blocks; n++) {
        uint32_t left[4], right[4];
        frag_a(left, sh->b + tile * 16 * N_ROW + n * 16, N_ROW);
#pragma unroll
        for (int i = 0; i < Q_BLOCKS; i++)
            if (i >= tile && i < q_blocks) {
                frag_b(right, cm + i * 16 * N_ROW + n * 16, N_ROW);
                mma_bf16(g[2 * i], left, right[0], right[1]);
                mma_bf16(g[2 * i + 1], left, right[2], right[3]);
            }
    }
    for (int k = 0; k < heads; k++) {
        int h = h0 + k, now = k % 2;
        int64_t at = rows_at(a.s, b, u, h), sum_at = (int64_t)piece * a.s.heads + h;
        copies_wait<0>();
        __syncthreads(); /* this head's tiles are there, and no thread reads the other stage any more */
        if (k + 1 < heads)
            dx_load(a, sh, (k + 1) % 2, b, u, h + 1, sp);
        if (k > 0)
            flush(a, sh, (k + 1) % 2, rows_at(a.s, b, u, h - 1), sum_at - 1, sp.n);
        struct dx_rows r = {
            j, {sh->s[now][j], sh->s[now][j + 8]}, {sh->delta[now][j], sh->delta[now][j + 8]}, {0, 0}, 0};
        if (mine) {
            float w[P_TILES][4] = {};
            leaving(w, sh, now, tile, n_blocks, j);
            if (documents)
                dx_head<true>(w, dg, g, &r, sh, now, tile, q_blocks);
            else
                dx_head<false>(w, dg, g, &r, sh, now, tile, q_blocks);
            finish_rows(w, sh->stage[now].dy, &r, a.d != NULL ? a.d[h] : 0.0f);
            float pair0 = quad_sum(r.pair[0]), pair1 = quad_sum(r.pair[1]);
            if (t == 0) {
                a.wx[at + j] = pair0;
                a.wx[at + j + 8] = pair1;
                sh->row[now][j] = pair0 * r.delta[0];
                sh->row[now][j + 8] = pair1 * r.delta[1];
            }
            bf16 *dx = row_of<bf16>(a.dx, b, sp.first + j, h);
            store_rows<P_TILES>(w, j < sp.n ? dx : NULL, j + 8 < sp.n ? dx + 8 * a.dx.row : NULL, a.s.p, a.vec);
        }
        float dd = warp_sum(r.dd);
        if (threadIdx.x % 32 == 0)
            sh->dd[now][tile] = dd;
    }
    __syncthreads();
    flush(a, sh, (heads - 1) % 2, rows_at(a.s, b, u, h0 + heads - 1), (int64_t)piece * a.s.heads + h0 + heads - 1,
          sp.n);
    if (mine) {
        bf16 *to = a.dg + ((int64_t)blockIdx.x * SSD_ROWS + j) * SSD_ROWS;
        store_rows<Q_TILES>(dg, to, to + 8 * SSD_ROWS, SSD_ROWS, true);
    }
}

int ssd_dx(struct lane *l, const struct ssd_grads *g)
{
    dim3 grid((unsigned)((int64_t)g->s.batch * g->s.pieces * g->s.groups * g->blocks));
    NEEDS_SMEM(l, dx_kernel, sizeof(struct dx_shared));
    LAUNCH(l, dx_kernel, grid, THREADS, sizeof(struct dx_shared), *g);
    return ST_OK;
}
