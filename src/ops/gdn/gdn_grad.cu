/* gdn backward on CUDA, last kernel: dq, dk, dalpha, dbeta of one piece of one key head, by a block of eight warps.
 * A warp takes one of four blocks of 16 rows and one of two halves: of the columns of a product, or, where products are
 * square, of the two there are. What value heads share or add to stays in registers while they are taken in turn. With
 * G = dO X^T, H = dV X^T (lower triangles), and S, E the state that enters and the gradient of the one that leaves:
 *   d(q^ k^) = D G,   d(k^ k^) = -D H below the diagonal
 *   dQ^ = diag(e^s) dO S^T + d(q^ k^) K^
 *   dK^ = diag(e^(s_end - s)) X E^T - diag(e^s) dV S^T + d(q^ k^)^T Q^ + (d(k^ k^) + d(k^ k^)^T) K^
 *   dbeta_i = (1 - w_i) (dV_i . R_i - sum_j D_ij H_ij k^_i . k^_j)
 *   dg as in gdn_bwd_cpu.c; the pairs by sums over rows minus sums over columns, taken from the end. */
#include "ops/gdn/gdn_tile.cuh"

enum { GRAD_WARPS = 8, GRAD_THREADS = GRAD_WARPS * 32 };

/* ROOMY: both states lie side by side, and the products of the keys are kept. Else E takes the place of S after its
 * last use, and every value head recomputes the products: for GPUs with less shared memory. */
template <int DK, int DV, bool ROOMY> struct grad_tiles {
    bf16 k[PIECE * (DK + 8)], q[PIECE * (DK + 8)];
    bf16 s[DK * (DV + 8)], e[ROOMY ? DK * (DV + 8) : 8];
    bf16 r[PIECE * (DV + 8)]; /* V, then R */
    bf16 d_o[PIECE * (DV + 8)], dv[PIECE * (DV + 8)], x[PIECE * (DV + 8)];
    uint32_t t[2 * BLOCKS * BLOCK_WORDS];
    float row_factors[2][UNIT_ROWS * PIECE]; /* of this value head and the next */
    /* sums that meet: by half of the columns, or by square and row block */
    float value_dot[2][PIECE], pass[2][PIECE], inject[2][PIECE], along[2][2][PIECE];
    float row_sum[2][PIECE], col_sum[2][4][PIECE], state_dot[GRAD_WARPS];
    float products[ROOMY ? 32 : 1][GRAD_THREADS]; /* q^ k^ or k^ k^ of each thread: registers are scarcer */
};
/* After the value heads the square gradients take the place of the states and what follows them. */
enum { SQUARE_WORDS = BLOCKS * BLOCK_WORDS };
static_assert(4 * SQUARE_WORDS * 4 <= (64 + 2 * PIECE) * (64 + 8) * 2, "four squares fit where s, e, r and d_o were");

/* Adds the four lanes that share a row. */
__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
/* Adds the eight lanes that share a column. */
__device__ __forceinline__ float column_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    return x + __shfl_xor_sync(0xffffffffu, x, 16);
}
__device__ __forceinline__ void put_rows(float *to, int row, float upper, float lower)
{
    upper = quad_sum(upper);
    lower = quad_sum(lower);
    if (threadIdx.x % 4 == 0) {
        to[row] = upper;
        to[row + 8] = lower;
    }
}

/* c = rows [row, row + 16) of a times the transpose of rows [column, column + 8 N) of b; d the same with e, where there
 * is one. */
template <int N, int LD, int DEPTH, bool TWO>
__device__ __forceinline__ void rows_by_rows(float (&c)[N][4], float (&d)[N][4], const bf16 *a, const bf16 *e, int row,
                                             const bf16 *b, int column)
{
#pragma unroll 2
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t x[4], w[4], y[4];
        load_a<LD>(x, a, row, k);
        if (TWO)
            load_a<LD>(w, e, row, k);
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            load_b<LD>(y, b, column + 16 * n, k);
            mma_bf16(c[2 * n], x, y[0], y[1]);
            mma_bf16(c[2 * n + 1], x, y[2], y[3]);
            if (TWO) {
                mma_bf16(d[2 * n], w, y[0], y[1]);
                mma_bf16(d[2 * n + 1], w, y[2], y[3]);
            }
        }
    }
}

/* Lower triangle of the product of two sets of rows: c[j] for block column j <= block. */
template <int LD, int DEPTH>
__device__ __forceinline__ void triangle(float (&c)[4][2][4], const bf16 *a, const bf16 *b, int block)
{
#pragma unroll 2
    for (int d = 0; d < DEPTH; d += 16) {
        uint32_t x[4], y[4];
        load_a<LD>(x, a, 16 * block, d);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j > block)
                continue;
            load_b<LD>(y, b, 16 * j, d);
            mma_bf16(c[j][0], x, y[0], y[1]);
            mma_bf16(c[j][1], x, y[2], y[3]);
        }
    }
}

/* What a value head needs; E comes by itself, and later. */
template <int DK, int DV, bool ROOMY>
__device__ __forceinline__ void load_head(struct grad_tiles<DK, DV, ROOMY> *m, const struct gdn_grad_args &a, int b,
                                          int index, struct piece p, int h)
{
    int64_t unit = unit_of(a.g, b, index, h);
    load_rows<DV>(m->s, state_at(a.piece_states, b, index, h), a.piece_states.n, a.g.dk, a.g.dv, DK);
    load_rows<DV>(m->r, view_at(a.v, b, p.first, h), a.v.s, p.n, a.g.dv, PIECE);
    load_rows<DV>(m->dv, view_at(a.dv, b, p.first, h), a.dv.s, p.n, a.g.dv, PIECE);
    load_bytes(m->t, a.blocks + unit * (UNIT_BLOCKS * BLOCK_WORDS), 2 * SQUARE_WORDS * 4);
    load_bytes(m->row_factors[h % 2], a.factors + unit * (UNIT_ROWS * PIECE), UNIT_ROWS * PIECE * 4);
    load_rows<DV>(m->d_o, view_at(a.d_o, b, p.first, h), a.d_o.s, p.n, a.g.dv, PIECE);
    copies_commit();
}
template <int DK, int DV, bool ROOMY>
__device__ __forceinline__ void load_gradient(struct grad_tiles<DK, DV, ROOMY> *m, const struct gdn_grad_args &a, int b,
                                              int index, int h)
{
    load_rows<DV>(ROOMY ? m->e : m->s, state_at(a.gradients, b, index, h), a.gradients.n, a.g.dk, a.g.dv, DK);
    copies_commit();
}

/* R in place of V, and its products with dV. */
template <int DK, int DV, bool ROOMY>
__device__ __forceinline__ void make_r(struct grad_tiles<DK, DV, ROOMY> *m, const float *factors, int block, int half)
{
    constexpr int LD = DV + 8, N = DV / 16;
    int lane = threadIdx.x % 32, row = 16 * block + lane / 4, first = half * (DV / 2) + lane % 4 * 2;
    float c[N][4] = {}, upper = 0, lower = 0;
#pragma unroll 2
    for (int d = 0; d < DK; d += 16) {
        uint32_t x[4], y[4];
        load_a<DK + 8>(x, m->k, 16 * block, d);
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            load_b_trans<LD>(y, m->s, d, half * (DV / 2) + 16 * n);
            mma_bf16(c[2 * n], x, y[0], y[1]);
            mma_bf16(c[2 * n + 1], x, y[2], y[3]);
        }
    }
    float key = factors[ROW_KEY * PIECE + row], key8 = factors[ROW_KEY * PIECE + row + 8];
#pragma unroll
    for (int n = 0; n < N; n++) {
        int at = row * LD + first + 8 * n;
        float2 v = unpack2(*(uint32_t *)(m->r + at)), v8 = unpack2(*(uint32_t *)(m->r + at + 8 * LD));
        float2 d = unpack2(*(uint32_t *)(m->dv + at)), d8 = unpack2(*(uint32_t *)(m->dv + at + 8 * LD));
        v.x -= key * c[n][0];
        v.y -= key * c[n][1];
        v8.x -= key8 * c[n][2];
        v8.y -= key8 * c[n][3];
        upper += v.x * d.x + v.y * d.y;
        lower += v8.x * d8.x + v8.y * d8.y;
        *(uint32_t *)(m->r + at) = pack2(v.x, v.y);
        *(uint32_t *)(m->r + at + 8 * LD) = pack2(v8.x, v8.y);
    }
    put_rows(m->value_dot[half], row, upper, lower);
}

template <int DK, int DV, bool ROOMY>
__device__ __forceinline__ void make_x(struct grad_tiles<DK, DV, ROOMY> *m, int block, int half)
{
    constexpr int LD = DV + 8, N = DV / 16;
    int lane = threadIdx.x % 32, row = 16 * block + lane / 4, first = half * (DV / 2) + lane % 4 * 2;
    float c[N][4] = {};
    for (int j = 0; j <= block; j++) {
        uint32_t x[4], rest[4], y[4];
        block_a_trans(x, m->t + (T_HIGH + block_index_t(block, j)) * BLOCK_WORDS);
        block_a_trans(rest, m->t + (T_LOW + block_index_t(block, j)) * BLOCK_WORDS);
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            load_b_trans<LD>(y, m->r, 16 * j, half * (DV / 2) + 16 * n);
            mma_bf16(c[2 * n], rest, y[0], y[1]);
            mma_bf16(c[2 * n + 1], rest, y[2], y[3]);
            mma_bf16(c[2 * n], x, y[0], y[1]);
            mma_bf16(c[2 * n + 1], x, y[2], y[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        int at = row * LD + first + 8 * n;
        *(uint32_t *)(m->x + at) = pack2(c[n][0], c[n][1]);
        *(uint32_t *)(m->x + at + 8 * LD) = pack2(c[n][2], c[n][3]);
    }
}

/* This thread's part of the lower triangle of q^ k^ (half 0) or k^ k^ (half 1). */
template <int DK, int DV, bool ROOMY>
__device__ __forceinline__ void make_products(const struct grad_tiles<DK, DV, ROOMY> *m, const float *factors,
                                              float (&c)[4][2][4], int block, int half)
{
    int lane = threadIdx.x % 32, row = 16 * block + lane / 4;
    const float *kf = factors + ROW_KF * PIECE, *by_row = half ? kf : factors + ROW_QF * PIECE;
    float f[2] = {by_row[row], by_row[row + 8]};
    triangle<DK + 8, DK>(c, half ? m->k : m->q, m->k, block);
#pragma unroll
    for (int i = 0; i < 32; i++)
        c[i / 8][i / 4 % 2][i % 4] *= f[i / 2 % 2] * kf[i / 4 * 8 + lane % 4 * 2 + i % 2];
}
template <int DK, int DV, bool ROOMY>
__device__ __forceinline__ void get_products(const struct grad_tiles<DK, DV, ROOMY> *m, const float *factors,
                                             float (&c)[4][2][4], int block, int half)
{
    if (!ROOMY)
        make_products(m, factors, c, block, half);
#pragma unroll
    for (int i = 0; i < (ROOMY ? 32 : 0); i++)
        c[i / 8][i / 4 % 2][i % 4] = m->products[i][threadIdx.x];
}

/* G (half 0) or H (half 1) of this warp's rows: to `sum`, the gradient of the products, and to dg. */
template <int DK, int DV, bool ROOMY>
__device__ __forceinline__ void pairs(struct grad_tiles<DK, DV, ROOMY> *m, const float *factors, float (&sum)[4][2][4],
                                      int block, int half)
{
    int lane = threadIdx.x % 32, row = 16 * block + lane / 4, q = lane % 4;
    float c[4][2][4] = {}, products[4][2][4] = {}, rows[2] = {0, 0};
    triangle<DV + 8, DV>(c, half ? m->dv : m->d_o, m->x, block);
    get_products(m, factors, products, block, half);
    const float *s = factors + ROW_S * PIECE, *low = factors + ROW_LOW * PIECE;
    float s_row[2] = {s[row], s[row + 8]}, low_row[2] = {low[row], low[row + 8]}, sign = half ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j > block)
            continue;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            float cols[2] = {0, 0};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int at = row + (e >> 1) * 8, col = 16 * j + 8 * t + 2 * q + (e & 1);
                bool sees = (half ? col < at : col <= at) && low_row[e >> 1] <= (float)col;
                float d = sees ? sign * exp_fast(fminf(s_row[e >> 1] - s[col], 0.0f)) * c[j][t][e] : 0.0f;
                float through = col < at ? d * products[j][t][e] : 0.0f; /* the diagonal does not decay */
                sum[j][t][e] += d;
                rows[e >> 1] += through;
                cols[e & 1] += through;
            }
            float left = column_sum(cols[0]), right = column_sum(cols[1]);
            if (lane < 4) {
                m->col_sum[half][block][16 * j + 8 * t + 2 * q] = left;
                m->col_sum[half][block][16 * j + 8 * t + 2 * q + 1] = right;
            }
        }
    }
    put_rows(m->row_sum[half], row, rows[0], rows[1]);
}

/* sum += sign f z, z [16, DK / 2] with row factors f; gives z . rows of `with`. */
template <int DK>
__device__ __forceinline__ void add_scaled(float (&sum)[DK / 16][4], float (&dot)[2], const float (&z)[DK / 16][4],
                                           const bf16 *with, const float *factor, float sign, int block, int half)
{
    constexpr int LD = DK + 8;
    int lane = threadIdx.x % 32, row = 16 * block + lane / 4;
    float f = sign * factor[row], f8 = sign * factor[row + 8];
    dot[0] = dot[1] = 0;
#pragma unroll
    for (int n = 0; n < DK / 16; n++) {
        int at = row * LD + half * (DK / 2) + 8 * n + lane % 4 * 2;
        float2 x = unpack2(*(const uint32_t *)(with + at)), x8 = unpack2(*(const uint32_t *)(with + at + 8 * LD));
        dot[0] += z[n][0] * x.x + z[n][1] * x.y;
        dot[1] += z[n][2] * x8.x + z[n][3] * x8.y;
        sum[n][0] += f * z[n][0];
        sum[n][1] += f * z[n][1];
        sum[n][2] += f8 * z[n][2];
        sum[n][3] += f8 * z[n][3];
    }
}

/* <E, S>, by warp; E from memory where it has no place of its own. */
template <int DK, int DV, bool ROOMY>
__device__ __forceinline__ void state_dots(struct grad_tiles<DK, DV, ROOMY> *m, const struct gdn_grad_args &a,
                                           const bf16 *e)
{
    float sum = 0;
    for (int i = (int)threadIdx.x; i < DK * (DV / 8); i += GRAD_THREADS) {
        int row = i / (DV / 8), col = i % (DV / 8) * 8, at = row * (DV + 8) + col;
        if (!ROOMY && (row >= a.g.dk || col >= a.g.dv))
            continue;
        pack<bf16> x = load16(ROOMY ? m->e + at : e + row * a.gradients.n + col), y = load16(m->s + at);
#pragma unroll
        for (int k = 0; k < 8; k++)
            sum += to_float(x.v[k]) * to_float(y.v[k]);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        m->state_dot[threadIdx.x / 32] = sum;
}

/* dalpha, dbeta and the head's sums: by one warp, lane l for rows 2l and 2l + 1. */
template <int DK, int DV, bool ROOMY>
__device__ __forceinline__ void gate_gradients(const struct grad_tiles<DK, DV, ROOMY> *m, const float *factors,
                                               const struct gdn_grad_args &a, int b, int index, struct piece p, int h)
{
    int lane = threadIdx.x % 32;
    float through = 0, later[2], inject[2], a_log = 0, dt_bias = 0;
    for (int w = 0; w < GRAD_WARPS; w++)
        through += m->state_dot[w];
    through *= factors[ROW_DECAY * PIECE];
    for (int e = 0; e < 2; e++) {
        int r = 2 * lane + e;
        float cols = 0;
        for (int block = r / 16; block < 4; block++)
            cols += m->col_sum[0][block][r] + m->col_sum[1][block][r];
        later[e] = m->row_sum[0][r] + m->row_sum[1][r] - cols + m->pass[0][r] + m->pass[1][r];
        inject[e] = m->inject[0][r] + m->inject[1][r];
    }
    float after = later[0] + later[1], before = inject[0] + inject[1];
    for (int d = 1; d < 32; d *= 2) {
        float x = __shfl_down_sync(0xffffffffu, after, d), y = __shfl_up_sync(0xffffffffu, before, d);
        after += lane + d < 32 ? x : 0.0f;
        before += lane >= d ? y : 0.0f;
    }
    float rest = __shfl_down_sync(0xffffffffu, after, 1), start = __shfl_up_sync(0xffffffffu, before, 1);
    rest = lane == 31 ? 0.0f : rest;  /* of later rows than this lane's */
    start = lane == 0 ? 0.0f : start; /* of earlier ones */
    float dg[2] = {rest + later[1] + later[0] + start + through, rest + later[1] + start + inject[0] + through};
    for (int e = 0; e < 2; e++) {
        int r = 2 * lane + e;
        if (r >= p.n)
            continue;
        float d = dg[e] * factors[ROW_SLOPE * PIECE + r];
        float dw = m->value_dot[0][r] + m->value_dot[1][r] + m->row_sum[1][r];
        *view_at(a.dalpha, b, p.first + r, h) = from_float<bf16>(d);
        *view_at(a.dbeta, b, p.first + r, h) = from_float<bf16>(dw * (1.0f - factors[ROW_W * PIECE + r]));
        a_log += dg[e] * factors[ROW_G * PIECE + r];
        dt_bias += d;
    }
    a_log = warp_sum(a_log);
    dt_bias = warp_sum(dt_bias);
    if (lane == 0) {
        float *sums = a.sums + unit_of(a.g, b, index, h) * 2;
        sums[0] = a_log;
        sums[1] = dt_bias;
    }
}

/* The gradients of the products as four block triangles, ready to meet the rows as they come: by the factor of the
 * column's key, or of the row's query (half 0) or key (half 1). */
__device__ __forceinline__ void store_squares(uint32_t *squares, const float (&sum)[4][2][4], const float *kf,
                                              const float *qf, int block, int half)
{
    int lane = threadIdx.x % 32, row = 16 * block + lane / 4, q = lane % 4;
    const float *by_row = half ? kf : qf;
    float f[2] = {by_row[row], by_row[row + 8]};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j > block)
            continue;
        float col[2][4], own[2][4];
        uint32_t out[4];
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                col[t][e] = sum[j][t][e] * kf[16 * j + 8 * t + 2 * q + (e & 1)];
                own[t][e] = sum[j][t][e] * f[e >> 1];
            }
        uint32_t *to = squares + block_index(block, j) * BLOCK_WORDS;
        round_to_a(out, col[0], col[1]);
        store_block(to + 2 * half * SQUARE_WORDS, out);
        round_to_a(out, own[0], own[1]);
        store_block(to + (2 * half + 1) * SQUARE_WORDS, out);
    }
}

/* c += block times rows [depth, depth + 16) of the tile, columns from `first`. */
template <int N, int LD>
__device__ __forceinline__ void block_by_rows(float (&c)[N][4], const uint32_t (&x)[4], const bf16 *tile, int depth,
                                              int first)
{
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
        uint32_t y[4];
        load_b_trans<LD>(y, tile, depth, first + 16 * n);
        mma_bf16(c[2 * n], x, y[0], y[1]);
        mma_bf16(c[2 * n + 1], x, y[2], y[3]);
    }
}

/* Gradient d of rows of unit length times scale, to that of the rows as they came, in place of them. factor: f times
 * scale; square: of f over that factor. */
template <int DK>
__device__ __forceinline__ void dot_rows(float *along, const float (&d)[DK / 16][4], const bf16 *tile, int block,
                                         int half)
{
    int lane = threadIdx.x % 32, row = 16 * block + lane / 4, first = half * (DK / 2) + lane % 4 * 2;
    float upper = 0, lower = 0;
#pragma unroll
    for (int n = 0; n < DK / 16; n++) {
        int at = row * (DK + 8) + first + 8 * n;
        float2 x = unpack2(*(const uint32_t *)(tile + at)), x8 = unpack2(*(const uint32_t *)(tile + at + 8 * (DK + 8)));
        upper += d[n][0] * x.x + d[n][1] * x.y;
        lower += d[n][2] * x8.x + d[n][3] * x8.y;
    }
    put_rows(along, row, upper, lower);
}
template <int DK>
__device__ __forceinline__ void through_length(bf16 *tile, const float (&d)[DK / 16][4], const float *along0,
                                               const float *along1, const float *factor, float unscale, int block,
                                               int half)
{
    int lane = threadIdx.x % 32, row = 16 * block + lane / 4, first = half * (DK / 2) + lane % 4 * 2;
    float f = factor[row], f8 = factor[row + 8], unit = f * unscale, unit8 = f8 * unscale;
    float pull = unit * unit * (along0[row] + along1[row]), pull8 = unit8 * unit8 * (along0[row + 8] + along1[row + 8]);
#pragma unroll
    for (int n = 0; n < DK / 16; n++) {
        uint32_t *at = (uint32_t *)(tile + row * (DK + 8) + first + 8 * n), *at8 = at + 4 * (DK + 8);
        float2 x = unpack2(*at), x8 = unpack2(*at8);
        *at = pack2(f * (d[n][0] - x.x * pull), f * (d[n][1] - x.y * pull));
        *at8 = pack2(f8 * (d[n][2] - x8.x * pull8), f8 * (d[n][3] - x8.y * pull8));
    }
}
template <int DK>
__device__ __forceinline__ void store_rows(bf16 *to, int64_t stride, const bf16 *tile, int n, int width)
{
    for (int i = (int)threadIdx.x; i < PIECE * (DK / 8); i += GRAD_THREADS) {
        int r = i / (DK / 8), c = i % (DK / 8) * 8;
        if (r < n && c < width)
            store16(to + r * stride + c, load16(tile + r * (DK + 8) + c));
    }
}

template <int DK, int DV, bool ROOMY>
__global__ __launch_bounds__(GRAD_THREADS, 1) void grad_kernel(const __grid_constant__ struct gdn_grad_args a)
{
    struct grad_tiles<DK, DV, ROOMY> *m = (struct grad_tiles<DK, DV, ROOMY> *)shared_memory();
    /* Warps w and w + 4 share a scheduler: together they have the same share of every triangle. */
    int warp = threadIdx.x / 32, half = warp / 4, block = half ? 3 - warp % 4 : warp;
    int row = 16 * block + threadIdx.x % 32 / 4;
    int kh = (int)(blockIdx.x % a.g.key_heads), at = (int)(blockIdx.x / a.g.key_heads);
    int b = at / a.g.n_pieces, index = at % a.g.n_pieces;
    struct piece p = piece_at(a.g, index);
    load_rows<DK>(m->k, view_at(a.k, b, p.first, kh), a.k.s, p.n, a.g.dk, PIECE);
    load_rows<DK>(m->q, view_at(a.q, b, p.first, kh), a.q.s, p.n, a.g.dk, PIECE);
    load_head(m, a, b, index, p, kh * a.g.per_key);
    if (ROOMY)
        load_gradient(m, a, b, index, kh * a.g.per_key);
    float squares[4][2][4] = {}, dq[DK / 16][4] = {}, dk[DK / 16][4] = {};
    for (int v = 0; v < a.g.per_key; v++) {
        int h = kh * a.g.per_key + v;
        bool more = v + 1 < a.g.per_key;
        const float *factors = m->row_factors[h % 2];
        copies_wait<ROOMY ? 1 : 0>();
        __syncthreads();
        if (ROOMY && v == 0) {
            float c[4][2][4] = {};
            make_products(m, factors, c, block, half);
#pragma unroll
            for (int i = 0; i < 32; i++)
                m->products[ROOMY ? i : 0][threadIdx.x] = c[i / 8][i / 4 % 2][i % 4];
        }
        const float *kf = factors + ROW_KF * PIECE, *qf = factors + ROW_QF * PIECE;
        make_r(m, factors, block, half);
        __syncthreads();
        make_x(m, block, half);
        copies_wait<0>();
        __syncthreads();
        pairs(m, factors, squares, block, half);
        float dot[2], pass[2];
        const float *start = factors + ROW_START * PIECE, *end = factors + ROW_END * PIECE;
        {
            float of_o[DK / 16][4] = {}, of_v[DK / 16][4] = {};
            rows_by_rows<DK / 16, DV + 8, DV, true>(of_o, of_v, m->d_o, m->dv, 16 * block, m->s, half * (DK / 2));
            add_scaled<DK>(dq, dot, of_o, m->q, start, 1.0f, block, half);
            pass[0] = dot[0] * start[row] * qf[row];
            pass[1] = dot[1] * start[row + 8] * qf[row + 8];
            add_scaled<DK>(dk, dot, of_v, m->k, start, -1.0f, block, half);
            pass[0] -= dot[0] * start[row] * kf[row];
            pass[1] -= dot[1] * start[row + 8] * kf[row + 8];
        }
        put_rows(m->pass[half], row, pass[0], pass[1]);
        state_dots(m, a, state_at(a.gradients, b, index, h));
        __syncthreads();
        if (!ROOMY) {
            load_gradient(m, a, b, index, h);
            copies_wait<0>();
            __syncthreads();
        } else if (more) {
            load_head(m, a, b, index, p, h + 1); /* all of it but X and E is done with */
        }
        float of_x[DK / 16][4] = {};
        rows_by_rows<DK / 16, DV + 8, DV, false>(of_x, of_x, m->x, m->x, 16 * block, ROOMY ? m->e : m->s,
                                                 half * (DK / 2));
        add_scaled<DK>(dk, dot, of_x, m->k, end, 1.0f, block, half);
        put_rows(m->inject[half], row, dot[0] * end[row] * kf[row], dot[1] * end[row + 8] * kf[row + 8]);
        __syncthreads();
        if (ROOMY && more)
            load_gradient(m, a, b, index, h + 1);
        else if (more)
            load_head(m, a, b, index, p, h + 1);
        if (warp == 0)
            gate_gradients(m, factors, a, b, index, p, h);
    }
    const float *last = m->row_factors[((kh + 1) * a.g.per_key - 1) % 2], *kf = last + ROW_KF * PIECE,
                *qf = last + ROW_QF * PIECE;
    uint32_t *square = (uint32_t *)m->s, x[4];
    store_squares(square, squares, kf, qf, block, half);
    __syncthreads();
    for (int j = 0; j <= block; j++) {
        block_a(x, square + block_index(block, j) * BLOCK_WORDS);
        block_by_rows<DK / 16, DK + 8>(dq, x, m->k, 16 * j, half * (DK / 2));
        block_a(x, square + 2 * SQUARE_WORDS + block_index(block, j) * BLOCK_WORDS);
        block_by_rows<DK / 16, DK + 8>(dk, x, m->k, 16 * j, half * (DK / 2));
    }
    for (int i = block; i < 4; i++) {
        block_a_trans(x, square + SQUARE_WORDS + block_index(i, block) * BLOCK_WORDS);
        block_by_rows<DK / 16, DK + 8>(dk, x, m->q, 16 * i, half * (DK / 2));
        block_a_trans(x, square + 3 * SQUARE_WORDS + block_index(i, block) * BLOCK_WORDS);
        block_by_rows<DK / 16, DK + 8>(dk, x, m->k, 16 * i, half * (DK / 2));
    }
    dot_rows<DK>(m->along[0][half], dq, m->q, block, half);
    dot_rows<DK>(m->along[1][half], dk, m->k, block, half);
    __syncthreads();
    through_length<DK>(m->q, dq, m->along[0][0], m->along[0][1], qf, 1.0f / a.g.scale, block, half);
    through_length<DK>(m->k, dk, m->along[1][0], m->along[1][1], kf, 1.0f, block, half);
    __syncthreads();
    store_rows<DK>(view_at(a.dq, b, p.first, kh), a.dq.s, m->q, p.n, a.g.dk);
    store_rows<DK>(view_at(a.dk, b, p.first, kh), a.dk.s, m->k, p.n, a.g.dk);
}

/* Bytes of shared memory of the variant that this much room allows; 0: of none. */
template <int DK, int DV> static int64_t grad_shared(int64_t room, bool *roomy)
{
    int64_t large = (int64_t)sizeof(struct grad_tiles<DK, DV, true>),
            small = (int64_t)sizeof(struct grad_tiles<DK, DV, false>);
    *roomy = large <= room;
    return large <= room ? large : small <= room ? small : 0;
}

template <int DK, int DV> static int launch_grad(struct lane *l, const struct gdn_grad_args *a)
{
    bool roomy;
    const int64_t bytes = grad_shared<DK, DV>(cuda_of(l)->smem_per_block, &roomy);
    const unsigned grid = (unsigned)(a->g.batch * a->g.n_pieces * a->g.key_heads);
    if (roomy) {
        NEEDS_SMEM(l, (grad_kernel<DK, DV, true>), bytes);
        LAUNCH(l, (grad_kernel<DK, DV, true>), grid, GRAD_THREADS, (size_t)bytes, *a);
    } else {
        NEEDS_SMEM(l, (grad_kernel<DK, DV, false>), bytes);
        LAUNCH(l, (grad_kernel<DK, DV, false>), grid, GRAD_THREADS, (size_t)bytes, *a);
    }
    return ST_OK;
}

int gdn_grad(struct lane *l, const struct gdn_grad_args *a)
{
    if (a->g.dk <= 64)
        return a->g.dv <= 64 ? launch_grad<64, 64>(l, a) : launch_grad<64, 128>(l, a);
    return a->g.dv <= 64 ? launch_grad<128, 64>(l, a) : launch_grad<128, 128>(l, a);
}

bool gdn_grad_fits(const struct lane *l, const struct gdn_geom *g)
{
    int64_t room = cuda_of(l)->smem_per_block;
    bool roomy;
    if (g->dk <= 64)
        return (g->dv <= 64 ? grad_shared<64, 64>(room, &roomy) : grad_shared<64, 128>(room, &roomy)) > 0;
    return (g->dv <= 64 ? grad_shared<128, 64>(room, &roomy) : grad_shared<128, 128>(room, &roomy)) > 0;
}
