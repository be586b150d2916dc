/* ssd backward, CUDA: dB and dC, summed over the heads of a group, and the products of rows with states; see
 * ssd_cuda.cuh.
 *
 * A block takes one piece of one group, heads in order. Its first 8 warps make dC (u = dy, w = S, v = C), the other 8
 * make dB (u = x, w = E, v = B); a warp owns 16 rows. Per head z = w u is scaled row by row and added in fp32, and its
 * product with v is pass, or what becomes inject. At the end the heads' dG, from ssd_dx, meets B and C. */
#include "ops/ssd/ssd_cuda.cuh"

enum { THREADS = 512, WARPS = THREADS / 32, P_BLOCKS = SSD_P / 16, N_TILES = SSD_N / 8, Q_BLOCKS = SSD_ROWS / 16 };
enum { SIDE_C, SIDE_B };

struct dbc_stage {
    bf16 u[2][P_TILE], w[2][P_TILE];
};
/* STAGES 2: the next head, and dG in the end, is copied while one is worked on; 1 where shared memory is small. */
template <int STAGES> struct dbc_shared {
    bf16 v[2][N_TILE];
    struct dbc_stage stage[STAGES];
    float from_start[STAGES][SSD_ROWS], delta[STAGES][SSD_ROWS], to_end[STAGES][SSD_ROWS];
    float scratch[2][WARPS]; /* by head, even and odd */
};
static_assert(sizeof(struct dbc_stage) >= N_TILE * sizeof(bf16) && (int)SSD_N == (int)SSD_ROWS, "dG fits");

template <int STAGES>
__device__ __forceinline__ void dbc_load(const struct ssd_grads &a, struct dbc_shared<STAGES> *sh, int k, int b, int u,
                                         int h, struct span sp)
{
    int64_t at = rows_at(a.s, b, u, h);
    struct dbc_stage *to = &sh->stage[k];
    load_tile<SSD_P, THREADS>(to->u[SIDE_C], row_of<bf16>(a.dy, b, sp.first, h), a.dy.row, sp.n, a.s.p, a.vec);
    load_tile<SSD_P, THREADS>(to->u[SIDE_B], row_of<bf16>(a.x, b, sp.first, h), a.x.row, sp.n, a.s.p, a.vec);
    load_tile<SSD_P, THREADS>(to->w[SIDE_C], state_of<bf16>(a.states, b, u, h), a.states.row, a.s.n, a.state_cols,
                              a.state_vec);
    load_tile<SSD_P, THREADS>(to->w[SIDE_B], state_of<bf16>(a.e, b, u, h), a.e.row, a.s.n, SSD_P, true);
    load_numbers(sh->from_start[k], a.r.from_start + at, 0);
    load_numbers(sh->delta[k], a.r.delta + at, 32);
    load_numbers(sh->to_end[k], a.r.to_end + at, 64);
    copies_commit();
}

/* dG of a block of heads, behind the heads: where head per_group + block would be. */
template <int STAGES>
__device__ __forceinline__ bf16 *pairs_at(const struct ssd_grads &a, struct dbc_shared<STAGES> *sh, int block)
{
    return (bf16 *)&sh->stage[(a.s.per_group + block) % STAGES];
}
template <int STAGES>
__device__ __forceinline__ void pairs_load(const struct ssd_grads &a, struct dbc_shared<STAGES> *sh, int block,
                                           int rows)
{
    const bf16 *from = a.dg + ((int64_t)blockIdx.x * a.blocks + block) * SSD_ROWS * SSD_ROWS;
    load_tile<SSD_ROWS, THREADS>(pairs_at(a, sh, block), from, SSD_ROWS, rows, SSD_ROWS, true);
    copies_commit();
}

/* One head: sum += factor z, dot = z . v, for rows i and i + 8. */
__device__ __forceinline__ void through_states(float (*sum)[4], float *dot, const bf16 *u, const bf16 *w, const bf16 *v,
                                               const float *factor, int tile, int n)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const bf16 *v0 = v + (tile * 16 + g) * N_ROW + 2 * t, *v1 = v0 + 8 * N_ROW;
    uint32_t ua[P_BLOCKS][4];
#pragma unroll
    for (int p = 0; p < P_BLOCKS; p++)
        frag_a(ua[p], u + tile * 16 * P_ROW + p * 16, P_ROW);
    dot[0] = dot[1] = 0;
#pragma unroll
    for (int c = 0; c < SSD_N / 32; c++)
        if (c * 32 < n) {
            float z[4][4] = {};
#pragma unroll
            for (int p = 0; p < P_BLOCKS; p++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t b[4];
                    frag_b(b, w + (c * 32 + half * 16) * P_ROW + p * 16, P_ROW);
                    mma_bf16(z[2 * half], ua[p], b[0], b[1]);
                    mma_bf16(z[2 * half + 1], ua[p], b[2], b[3]);
                }
#pragma unroll
            for (int q = 0; q < 4; q++) {
                int k = c * 4 + q;
                float2 x0 = unpack_bf16(*(const uint32_t *)(v0 + k * 8)),
                       x1 = unpack_bf16(*(const uint32_t *)(v1 + k * 8));
                dot[0] += z[q][0] * x0.x + z[q][1] * x0.y;
                dot[1] += z[q][2] * x1.x + z[q][3] * x1.y;
                sum[k][0] += factor[0] * z[q][0];
                sum[k][1] += factor[0] * z[q][1];
                sum[k][2] += factor[1] * z[q][2];
                sum[k][3] += factor[1] * z[q][3];
            }
        }
}

/* This thread's share of <E, S>. */
__device__ __forceinline__ float state_product(const struct dbc_stage *in)
{
    static_assert(THREADS * 16 == SSD_N * SSD_P, "16 elements each");
    int at = (threadIdx.x / 4) * P_ROW + threadIdx.x % 4 * 16;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        uint4 s = *(const uint4 *)(in->w[SIDE_C] + at + 8 * k), e = *(const uint4 *)(in->w[SIDE_B] + at + 8 * k);
        const uint32_t sv[4] = {s.x, s.y, s.z, s.w}, ev[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
        for (int q = 0; q < 4; q++) {
            float2 x = unpack_bf16(sv[q]), y = unpack_bf16(ev[q]);
            sum += x.x * y.x + x.y * y.y;
        }
    }
    return sum;
}

/* dC_i += sum_j dG_ij B_j, or dB_j += sum_i dG_ij C_i; dg is transposed, other is B or C. */
__device__ __forceinline__ void through_pairs(float (*sum)[4], const bf16 *dg, const bf16 *other, int side, int tile,
                                              int q_blocks, int n)
{
    int from = side == SIDE_C ? 0 : tile, to = side == SIDE_C ? tile + 1 : q_blocks;
    for (int k = from; k < to; k++) {
        uint32_t a[4], b[4];
        if (side == SIDE_C)
            frag_a_t(a, dg + k * 16 * N_ROW + tile * 16, N_ROW);
        else
            frag_a(a, dg + tile * 16 * N_ROW + k * 16, N_ROW);
#pragma unroll
        for (int q = 0; q < N_TILES / 2; q++)
            if (q * 16 < n) {
                frag_b_t(b, other + k * 16 * N_ROW + q * 16, N_ROW);
                mma_bf16(sum[2 * q], a, b[0], b[1]);
                mma_bf16(sum[2 * q + 1], a, b[2], b[3]);
            }
    }
}

/* decay <E, S> of a head, once all warps have left their share. */
__device__ __forceinline__ void flush(const struct ssd_grads &a, const float *shares, int piece, int h, int64_t at)
{
    if (threadIdx.x != 0)
        return;
    float all = 0;
    for (int w = 0; w < WARPS; w++)
        all += shares[w];
    a.through[(int64_t)piece * a.s.heads + h] = all * a.r.decay[at / a.s.pad];
}

template <int STAGES>
static __global__ void __launch_bounds__(THREADS, 1) dbc_kernel(const __grid_constant__ struct ssd_grads a)
{
    DYNAMIC_SHARED(char, shared, 16);
    struct dbc_shared<STAGES> *sh = (struct dbc_shared<STAGES> *)shared;
    int group = blockIdx.x % a.s.groups, piece = blockIdx.x / a.s.groups, b = piece / a.s.pieces,
        u = piece % a.s.pieces;
    int warp = threadIdx.x / 32, side = warp / 8, tile = triangle_tile(warp % 8), i = tile * 16 + threadIdx.x % 32 / 4;
    int h0 = group * a.s.per_group, t = threadIdx.x % 4;
    struct span sp = span_of(a.s, u);
    int q_blocks = (sp.n + 15) / 16;
    bool mine = tile < q_blocks;
    load_tile<SSD_N, THREADS>(sh->v[SIDE_C], row_of<bf16>(a.cm, b, sp.first, group), a.cm.row, sp.n, a.s.n, a.vec);
    load_tile<SSD_N, THREADS>(sh->v[SIDE_B], row_of<bf16>(a.bm, b, sp.first, group), a.bm.row, sp.n, a.s.n, a.vec);
    dbc_load(a, sh, 0, b, u, h0, sp);
    float sum[N_TILES][4] = {};
    for (int k = 0; k < a.s.per_group; k++) {
        int h = h0 + k, now = k % STAGES;
        int64_t at = rows_at(a.s, b, u, h);
        copies_wait<0>();
        __syncthreads(); /* this head's tiles are there, and no thread reads the other stage any more */
        if (STAGES > 1 && k + 1 < a.s.per_group)
            dbc_load(a, sh, (k + 1) % STAGES, b, u, h + 1, sp);
        else if (STAGES > 1)
            pairs_load(a, sh, 0, sp.n);
        if (k > 0)
            flush(a, sh->scratch[(k + 1) % 2], piece, h - 1, at - a.s.pieces * a.s.pad);
        if (mine) {
            float factor[2], dot[2], seen[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                seen[e] = (side == SIDE_C ? sh->from_start : sh->to_end)[now][i + 8 * e];
                factor[e] = side == SIDE_C ? seen[e] : seen[e] * sh->delta[now][i + 8 * e];
            }
            through_states(sum, dot, sh->stage[now].u[side], sh->stage[now].w[side], sh->v[side], factor, tile, a.s.n);
            float dot0 = seen[0] * quad_sum(dot[0]), dot1 = seen[1] * quad_sum(dot[1]);
            float *to = (side == SIDE_C ? a.pass : a.wx_leaving) + at + i;
            if (t == 0) {
                to[0] = dot0;
                to[8] = dot1;
            }
        }
        float part_of = warp_sum(state_product(&sh->stage[now]));
        if (threadIdx.x % 32 == 0)
            sh->scratch[k % 2][warp] = part_of;
        if (STAGES == 1 && k + 1 < a.s.per_group) {
            __syncthreads();
            dbc_load(a, sh, 0, b, u, h + 1, sp);
        }
    }
    for (int block = 0; block < a.blocks; block++) {
        if (STAGES == 1) {
            __syncthreads(); /* no thread reads the stage any more */
            pairs_load(a, sh, block, sp.n);
        }
        copies_wait<0>();
        __syncthreads();
        if (STAGES > 1 && block + 1 < a.blocks)
            pairs_load(a, sh, block + 1, sp.n);
        if (block == 0)
            flush(a, sh->scratch[(a.s.per_group - 1) % 2], piece, h0 + a.s.per_group - 1,
                  rows_at(a.s, b, u, h0 + a.s.per_group - 1));
        if (mine)
            through_pairs(sum, pairs_at(a, sh, block), sh->v[1 - side], side, tile, q_blocks, a.s.n);
    }
    if (mine) {
        const struct rows_view &out = side == SIDE_C ? a.dc : a.db;
        bf16 *to = row_of<bf16>(out, b, sp.first + i, group);
        store_rows<N_TILES>(sum, i < sp.n ? to : NULL, i + 8 < sp.n ? to + 8 * out.row : NULL, a.s.n, a.vec);
    }
}

template <int STAGES> static int launch(struct lane *l, const struct ssd_grads *g)
{
    dim3 grid((unsigned)((int64_t)g->s.batch * g->s.pieces * g->s.groups));
    int bytes = (int)sizeof(struct dbc_shared<STAGES>);
    NEEDS_SMEM(l, dbc_kernel<STAGES>, bytes);
    LAUNCH(l, dbc_kernel<STAGES>, grid, THREADS, bytes, *g);
    return ST_OK;
}

int ssd_dbc(struct lane *l, const struct ssd_grads *g)
{
    bool large = cuda_of(l)->smem_per_block >= (int64_t)sizeof(struct dbc_shared<2>);
    return large ? launch<2>(l, g) : launch<1>(l, g);
}
