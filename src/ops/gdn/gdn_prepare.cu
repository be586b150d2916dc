/* gdn on CUDA, first kernel of both directions: what does not depend on the state. A block of four warps takes one
 * piece of one key head, warp i its rows 16 i to 16 i + 15: K K^T and Q K^T once, then for each value head gates,
 * A, its inverse and P. Diagonal blocks of I + A are inverted by substitution in fp32; the blocks left of them by
 * T_ij = -(sum over j < k <= i of T_ik A_kj) T_jj, with both factors split into two bf16 parts. */
#include "ops/gdn/gdn_tile.cuh"

enum { WARPS = 4, OFF_DIAGONAL = 6, DIAGONAL_ROW = 17 };

struct prepare_args {
    struct gdn_geom g;
    gdn_view<const bf16> q, k;
    gdn_gates<bf16> gates;
    uint32_t *blocks;
    float *factors;
};

/* Shared memory behind the two tiles. */
struct prepare_rest {
    float diagonal[WARPS][16 * DIAGONAL_ROW];
    uint32_t a[2][OFF_DIAGONAL][BLOCK_WORDS]; /* A left of the diagonal: high and low parts */
    uint32_t t[2][WARPS][BLOCK_WORDS];        /* inverses of the diagonal blocks */
    float s[WARPS][PIECE], w[WARPS][PIECE];   /* of up to four heads */
    float kf[PIECE], qf[PIECE];
    int low[PIECE];
};
template <int DK> constexpr int prepare_smem() { return 2 * PIECE * (DK + 8) * 2 + (int)sizeof(struct prepare_rest); }

__device__ __forceinline__ int off_diagonal_index(int i, int j) { return i * (i - 1) / 2 + j; }

/* Where the last document before each row began; by one warp, lane l for rows 2l and 2l + 1. */
__device__ void find_documents(const struct prepare_args &a, int b, struct piece p, int *low)
{
    int lane = threadIdx.x % 32, at[2];
    for (int e = 0; e < 2; e++) {
        int r = 2 * lane + e;
        bool begins = a.gates.doc_start != NULL && r < p.n &&
                      a.gates.doc_start[b * a.gates.doc_stride + p.first + r] == p.first + r;
        at[e] = begins ? r : -1;
    }
    int last = at[1] > at[0] ? at[1] : at[0];
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(0xffffffffu, last, d);
        last = lane >= d && other > last ? other : last;
    }
    int before = __shfl_up_sync(0xffffffffu, last, 1);
    before = lane == 0 ? -1 : before;
    low[2 * lane] = at[0] > before ? at[0] : before;
    low[2 * lane + 1] = last;
}

template <int DK> __device__ float row_factor(const bf16 *row)
{
    float sum = 0;
    for (int c = 0; c < DK; c += 8) {
        pack<bf16> x = load16(row + c);
#pragma unroll
        for (int e = 0; e < 8; e++)
            sum += to_float(x.v[e]) * to_float(x.v[e]);
    }
    return 1.0f / sqrtf(sum + (float)GDN_EPS);
}

/* What the gates of one head are made from, of a lane's two rows: asked for long before they are used. */
struct raw_gates {
    float alpha[2], beta[2], A_log, dt_bias;
};
__device__ __forceinline__ struct raw_gates load_gates(const struct prepare_args &a, int b, struct piece p, int h)
{
    struct raw_gates raw;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int r = 2 * (threadIdx.x % 32) + e;
        raw.alpha[e] = r < p.n ? to_float(*view_at(a.gates.alpha, b, p.first + r, h)) : 0.0f;
        raw.beta[e] = r < p.n ? to_float(*view_at(a.gates.beta, b, p.first + r, h)) : 0.0f;
    }
    raw.A_log = a.gates.A_log[h];
    raw.dt_bias = a.gates.dt_bias[h];
    return raw;
}

/* Gates of one head by one warp, into shared memory (s, w) and to the row factors. */
__device__ void head_gates(const struct raw_gates &from, struct piece p, float *factors, const struct prepare_rest *m,
                           float *s_out, float *w_out)
{
    int lane = threadIdx.x % 32;
    float rate = -expf(from.A_log), g[2], w[2], slope[2], s[2];
    for (int e = 0; e < 2; e++) {
        int r = 2 * lane + e;
        bool real = r < p.n;
        float raw = real ? from.alpha[e] + from.dt_bias : 0.0f, beta = from.beta[e];
        g[e] = real ? rate * (raw > 20.0f ? raw : log1pf(expf(raw))) : 0.0f;
        slope[e] = raw > 20.0f ? rate : rate / (1.0f + expf(-raw));
        w[e] = real ? 1.0f / (1.0f + expf(-beta)) : 0.0f;
    }
    float sum = g[0] + g[1];
    for (int d = 1; d < 32; d *= 2) {
        float other = __shfl_up_sync(0xffffffffu, sum, d);
        sum += lane >= d ? other : 0.0f;
    }
    float before = __shfl_up_sync(0xffffffffu, sum, 1);
    s[0] = (lane == 0 ? 0.0f : before) + g[0];
    s[1] = s[0] + g[1];
    float end = __shfl_sync(0xffffffffu, s[1], 31);
    int last = m->low[PIECE - 1];
    for (int e = 0; e < 2; e++) {
        int r = 2 * lane + e;
        float from_start = m->low[r] < 0 ? expf(s[e]) : 0.0f, to_end = r >= last ? expf(fminf(end - s[e], 0.0f)) : 0.0f;
        s_out[r] = s[e];
        w_out[r] = w[e];
        factors[ROW_KEY * PIECE + r] = from_start * m->kf[r];
        factors[ROW_QUERY * PIECE + r] = from_start * m->qf[r];
        factors[ROW_WRITE * PIECE + r] = to_end * m->kf[r];
        factors[ROW_DECAY * PIECE + r] = last < 0 ? expf(end) : 0.0f;
        factors[ROW_START * PIECE + r] = from_start;
        factors[ROW_END * PIECE + r] = to_end;
        factors[ROW_S * PIECE + r] = s[e];
        factors[ROW_W * PIECE + r] = w[e];
        factors[ROW_G * PIECE + r] = g[e];
        factors[ROW_SLOPE * PIECE + r] = slope[e];
        factors[ROW_KF * PIECE + r] = m->kf[r];
        factors[ROW_QF * PIECE + r] = m->qf[r];
        factors[ROW_LOW * PIECE + r] = (float)m->low[r];
    }
}

/* Inverse of I + A for a 16 x 16 block, in place; by one warp, lane c (and c + 16) for column c. */
__device__ __forceinline__ void invert_diagonal(float *block)
{
    int lane = threadIdx.x % 32, c = lane % 16;
    float x[16];
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 16; r++) {
        float sum = r == c ? 1.0f : 0.0f;
#pragma unroll
        for (int k = 0; k < r; k++)
            sum -= block[r * DIAGONAL_ROW + k] * x[k];
        x[r] = sum;
    }
    __syncwarp();
    if (lane < 16) {
#pragma unroll
        for (int r = 0; r < 16; r++)
            block[r * DIAGONAL_ROW + c] = x[r];
    }
    __syncwarp();
}

/* c += a b, both in two parts. */
__device__ __forceinline__ void mma_split(float (&c)[2][4], const uint32_t (&high)[4], const uint32_t (&low)[4],
                                          const uint32_t *b_high, const uint32_t *b_low)
{
    uint32_t bh[4], bl[4];
    block_b(bh, b_high);
    block_b(bl, b_low);
#pragma unroll
    for (int t = 0; t < 2; t++) {
        mma_bf16(c[t], low, bh[2 * t], bh[2 * t + 1]);
        mma_bf16(c[t], high, bl[2 * t], bl[2 * t + 1]);
        mma_bf16(c[t], high, bh[2 * t], bh[2 * t + 1]);
    }
}

/* Block (i, j) of one of the matrices of a piece. */
template <bool TRANSPOSED>
__device__ __forceinline__ void put_block(uint32_t *unit, int matrix, int i, int j, const uint32_t (&a)[4])
{
    if (TRANSPOSED)
        store_block_t(unit + (matrix + block_index_t(i, j)) * BLOCK_WORDS, a);
    else
        store_block(unit + (matrix + block_index(i, j)) * BLOCK_WORDS, a);
}

/* Block (i, j) of T = (I + A)^-1 diag(w), w of its columns, in two parts. */
template <bool TRANSPOSED>
__device__ __forceinline__ void store_inverse(uint32_t *unit, int i, int j, const float (&c)[2][4], const float *w)
{
    int q = threadIdx.x % 4;
    float scaled[2][4];
    uint32_t high[4], low[4];
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            scaled[t][e] = c[t][e] * w[8 * t + 2 * q + (e & 1)];
    round_to_a(high, scaled[0], scaled[1]);
    rest_to_a(low, scaled[0], scaled[1], high);
    put_block<TRANSPOSED>(unit, T_HIGH, i, j, high);
    put_block<TRANSPOSED>(unit, T_LOW, i, j, low);
}

/* A and P of this warp's rows from the products of unit rows; A goes to shared memory. */
template <bool TRANSPOSED>
__device__ __forceinline__ void scale_products(const float (&kk)[4][2][4], const float (&qk)[4][2][4],
                                               struct prepare_rest *m, const float *s, const float *w, uint32_t *unit,
                                               int warp)
{
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j > warp)
            continue;
        float a[2][4], p[2][4];
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int row = 16 * warp + g + (e >> 1) * 8, col = 16 * j + 8 * t + 2 * q + (e & 1);
                float d = col <= row && m->low[row] <= col ? exp_fast(fminf(s[row] - s[col], 0.0f)) : 0.0f;
                a[t][e] = col < row ? w[row] * d * kk[j][t][e] : 0.0f;
                p[t][e] = d * qk[j][t][e];
            }
        uint32_t high[4], low[4];
        round_to_a(high, p[0], p[1]);
        put_block<TRANSPOSED>(unit, P_AT, warp, j, high);
        if (j == warp) {
#pragma unroll
            for (int t = 0; t < 2; t++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    m->diagonal[warp][(g + (e >> 1) * 8) * DIAGONAL_ROW + 8 * t + 2 * q + (e & 1)] = a[t][e];
        } else {
            round_to_a(high, a[0], a[1]);
            rest_to_a(low, a[0], a[1], high);
            store_block(m->a[0][off_diagonal_index(warp, j)], high);
            store_block(m->a[1][off_diagonal_index(warp, j)], low);
        }
    }
}

/* T of this warp's rows. Between the two halves all warps meet. */
template <bool TRANSPOSED>
__device__ __forceinline__ void invert_rows(struct prepare_rest *m, const float *w, uint32_t *unit, int warp)
{
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    uint32_t high[4][4], low[4][4]; /* T_(warp, k) */
    float *block = m->diagonal[warp], c[2][4];
    invert_diagonal(block);
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            c[t][e] = block[(g + (e >> 1) * 8) * DIAGONAL_ROW + 8 * t + 2 * q + (e & 1)];
    store_inverse<TRANSPOSED>(unit, warp, warp, c, w + 16 * warp);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k != warp)
            continue;
        round_to_a(high[k], c[0], c[1]);
        rest_to_a(low[k], c[0], c[1], high[k]);
        store_block(m->t[0][warp], high[k]);
        store_block(m->t[1][warp], low[k]);
    }
    __syncthreads();
#pragma unroll
    for (int j = 2; j >= 0; j--) {
        if (j >= warp)
            continue;
        float sum[2][4] = {};
#pragma unroll
        for (int k = 1; k < 4; k++)
            if (k > j && k <= warp)
                mma_split(sum, high[k], low[k], m->a[0][off_diagonal_index(k, j)], m->a[1][off_diagonal_index(k, j)]);
        uint32_t sum_high[4], sum_low[4];
        round_to_a(sum_high, sum[0], sum[1]);
        rest_to_a(sum_low, sum[0], sum[1], sum_high);
        float out[2][4] = {};
        mma_split(out, sum_high, sum_low, m->t[0][j], m->t[1][j]);
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                out[t][e] = -out[t][e];
        store_inverse<TRANSPOSED>(unit, warp, j, out, w + 16 * j);
        round_to_a(high[j], out[0], out[1]);
        rest_to_a(low[j], out[0], out[1], high[j]);
    }
}

template <int DK, bool TRANSPOSED>
__global__ __launch_bounds__(WARPS * 32, 4) void prepare_kernel(const __grid_constant__ struct prepare_args a)
{
    constexpr int LD = DK + 8;
    bf16 *k_tile = (bf16 *)shared_memory(), *q_tile = k_tile + PIECE * LD;
    struct prepare_rest *m = (struct prepare_rest *)(q_tile + PIECE * LD);
    /* Which rows a warp takes changes from block to block: a multiprocessor has several blocks, and the last rows are
     * most of the work. */
    int warp = (threadIdx.x / 32 + (blockIdx.x * 0x9E3779B1u >> 30)) % WARPS;
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int kh = (int)(blockIdx.x % a.g.key_heads), at = (int)(blockIdx.x / a.g.key_heads);
    int b = at / a.g.n_pieces, index = at % a.g.n_pieces;
    struct piece p = piece_at(a.g, index);
    load_rows<DK>(k_tile, view_at(a.k, b, p.first, kh), a.k.s, p.n, a.g.dk, PIECE);
    load_rows<DK>(q_tile, view_at(a.q, b, p.first, kh), a.q.s, p.n, a.g.dk, PIECE);
    copies_commit();
    struct raw_gates raw = {};
    if (warp < a.g.per_key)
        raw = load_gates(a, b, p, kh * a.g.per_key + warp);
    if (warp == WARPS - 1)
        find_documents(a, b, p, m->low);
    copies_wait<0>();
    __syncthreads();
    if (threadIdx.x < PIECE)
        m->kf[threadIdx.x] = row_factor<DK>(k_tile + threadIdx.x * LD);
    else
        m->qf[threadIdx.x - PIECE] = a.g.scale * row_factor<DK>(q_tile + (threadIdx.x - PIECE) * LD);
    __syncthreads();
    if (warp < a.g.per_key) /* gates of the first four heads, a warp each; the first rows have the fewest products */
        head_gates(raw, p, a.factors + unit_of(a.g, b, index, kh * a.g.per_key + warp) * (UNIT_ROWS * PIECE), m,
                   m->s[warp], m->w[warp]);
    float kk[4][2][4] = {}, qk[4][2][4] = {};
#pragma unroll
    for (int d = 0; d < DK; d += 16) {
        uint32_t k_rows[4], q_rows[4], cols[4];
        load_a<LD>(k_rows, k_tile, 16 * warp, d);
        load_a<LD>(q_rows, q_tile, 16 * warp, d);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j > warp)
                continue;
            load_b<LD>(cols, k_tile, 16 * j, d);
#pragma unroll
            for (int t = 0; t < 2; t++) {
                mma_bf16(kk[j][t], k_rows, cols[2 * t], cols[2 * t + 1]);
                mma_bf16(qk[j][t], q_rows, cols[2 * t], cols[2 * t + 1]);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int row = 16 * warp + g + (e >> 1) * 8;
                float col = m->kf[16 * j + 8 * t + 2 * q + (e & 1)];
                kk[j][t][e] *= m->kf[row] * col;
                qk[j][t][e] *= m->qf[row] * col;
            }
    for (int v = 0; v < a.g.per_key; v++) {
        int slot = v % WARPS, h = kh * a.g.per_key + v;
        if (slot == 0 && v > 0) { /* gates of the next four */
            if (v + warp < a.g.per_key)
                head_gates(load_gates(a, b, p, h + warp), p,
                           a.factors + unit_of(a.g, b, index, h + warp) * (UNIT_ROWS * PIECE), m, m->s[warp],
                           m->w[warp]);
            __syncthreads();
        }
        uint32_t *unit = a.blocks + unit_of(a.g, b, index, h) * (UNIT_BLOCKS * BLOCK_WORDS);
        scale_products<TRANSPOSED>(kk, qk, m, m->s[slot], m->w[slot], unit, warp);
        invert_rows<TRANSPOSED>(m, m->w[slot], unit, warp);
        __syncthreads();
    }
}

template <int DK, bool TRANSPOSED> static int launch_prepare(struct lane *l, const struct prepare_args *a)
{
    const int bytes = prepare_smem<DK>();
    NEEDS_SMEM(l, (prepare_kernel<DK, TRANSPOSED>), bytes);
    LAUNCH(l, (prepare_kernel<DK, TRANSPOSED>), (unsigned)(a->g.batch * a->g.n_pieces * a->g.key_heads), WARPS * 32,
           bytes, *a);
    return ST_OK;
}

int gdn_prepare(struct lane *l, const struct gdn_geom *g, gdn_view<const bf16> q, gdn_view<const bf16> k,
                const gdn_gates<bf16> *gates, uint32_t *blocks, float *factors, bool transposed)
{
    struct prepare_args a = {*g, q, k, *gates, blocks, factors};
    if (transposed)
        return g->dk <= 64 ? launch_prepare<64, true>(l, &a) : launch_prepare<128, true>(l, &a);
    return g->dk <= 64 ? launch_prepare<64, false>(l, &a) : launch_prepare<128, false>(l, &a);
}
