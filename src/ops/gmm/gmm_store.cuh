/* Inside of gmm_tma.cu: what is done with a tile of sums, and how it leaves. After the last step of a tile the copying
 * thread lends the next stages of the ring: the warps fill them with results and go on multiplying, bulk copies read
 * them, and only then they are stages again. Each warp stores its own strips of 16 rows, so that no warp waits for
 * another. The gradient of the activation finds its saved inputs in the lent stages, copied there while the products
 * ran, and overwrites them. A tile without depth (an expert without rows, rows of no expert) takes no stage: its zeros
 * are stored plainly. */
#ifndef BRAID_OPS_GMM_STORE_CUH
#define BRAID_OPS_GMM_STORE_CUH

#include "ops/gmm/gmm_feed.cuh"

#if HOPPER_CODE

/* ---- pieces of 16 rows x 64 columns, by one warp --------------------------------------------- */

/* A warp's words of a piece, as the accumulators' lanes hold them, to shared memory and from it: word[i][h] has two
 * columns of block i of eight, in row lane / 4 + 8 h. Rows have 128 bytes, their chunks of 16 permuted as bulk copies
 * want it. */
__device__ __forceinline__ uint32_t words_at(const char *piece, int i)
{
    int lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
    return smem_address(piece) + (row + matrix % 2 * 8) * 128 + (((i + matrix / 2) ^ row) << 4);
}
/* N of the eight blocks, from block `first` on. */
template <int N> __device__ __forceinline__ void words_put(char *piece, const uint32_t (&word)[N][2], int first = 0)
{
#pragma unroll
    for (int i = 0; i < N; i += 2)
        store_matrices(words_at(piece, first + i), word[i][0], word[i][1], word[i + 1][0], word[i + 1][1]);
}
template <int N> __device__ __forceinline__ void words_get(uint32_t (&word)[N][2], const char *piece, int first = 0)
{
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        uint32_t r[4];
        load_matrices(r, words_at(piece, first + i));
        word[i][0] = r[0];
        word[i][1] = r[1];
        word[i + 1][0] = r[2];
        word[i + 1][1] = r[3];
    }
}
/* Rows of 128 bytes to or from memory: 16 bytes a lane. */
__device__ __forceinline__ void piece_store(const char *piece, bf16 *to, int64_t ld, int rows, int cols)
{
    int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = i * 4 + lane / 8;
        uint4 v = *(const uint4 *)(piece + r * 128 + ((chunk ^ (r % 8)) << 4));
        if (r < rows && chunk * 8 < cols)
            *(uint4 *)(to + r * ld + chunk * 8) = v;
    }
}
/* Row of the tile where the group's rows begin, and this warp's. */
__device__ __forceinline__ int group_row(int group) { return group * BOX; }
__device__ __forceinline__ int warp_row(int group) { return group_row(group) + threadIdx.x % GROUP / 32 * STRIP; }

/* sums += prob * bias (prob may be NULL). halves: matrices of `across` columns in the tile. */
template <typename F>
__device__ __forceinline__ void add_bias(float (&c)[F::BN / 2], const float *bias, const float *prob,
                                         const struct gmm_at &at, int halves, int across, int group)
{
    int lane = threadIdx.x % 32, row = warp_row(group) + lane / 4, half = F::BN / halves;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        factor[h] = prob != NULL && row + 8 * h < at.m_valid ? prob[at.m + row + 8 * h] : 1.0f;
#pragma unroll
    for (int i = 0; i < F::BN / 8; i++) {
        int n = at.n + i * 8 % half + 2 * (lane % 4);
        if (n < across) {
            const float *b = bias + ((int64_t)at.expert * halves + i * 8 / half) * across + n;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                c[4 * i + 2 * h] += factor[h] * b[0];
                c[4 * i + 2 * h + 1] += factor[h] * b[1];
            }
        }
    }
}

/* 1 / (1 + 2^x) without the care for tiny numbers that costs a third of the instructions: 0 and 1 at the ends. */
__device__ __forceinline__ float sigmoid_of_log2(float minus_x) { return reciprocal_fast(1.0f + exp2_fast(minus_x)); }

/* The activation and its slopes; `up` of a plain one is not read. */
template <int KIND>
__device__ __forceinline__ float activate(const struct gmm_tma_job &j, float gate, float up, float *d_gate, float *d_up)
{
    constexpr bool LIMITS = KIND != GMM_GATE;
    float x = LIMITS && gate > j.limit ? j.limit : gate;
    if (KIND == GMM_RELU2) {
        float v = x > 0 ? x : (x <= 0 ? 0.0f : x); /* NaN stays NaN */
        *d_gate = gate > j.limit ? 0.0f : 2 * v;
        *d_up = 0;
        return v * v;
    }
    float s = sigmoid_of_log2(-1.44269504f * j.alpha * x), value = x * s, slope = s + value * (j.alpha - j.alpha * s);
    float factor = LIMITS ? (up > j.limit ? j.limit : up < -j.limit ? -j.limit : up) + j.offset : up;
    *d_gate = LIMITS && gate > j.limit ? 0.0f : slope * factor;
    *d_up = LIMITS && fabsf(up) > j.limit ? 0.0f : value;
    return value * factor;
}

/* Probabilities of this lane's two rows; 0 for rows of no expert. */
template <typename F>
__device__ __forceinline__ void row_probs(float (&prob)[2], const struct gmm_job &g, const struct gmm_at &at, int group)
{
    int r = warp_row(group) + threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; h++)
        prob[h] = at.expert == g.experts                     ? 0.0f
                  : g.prob != NULL && r + 8 * h < at.m_valid ? g.prob[at.m + r + 8 * h]
                                                             : 1.0f;
}

/* N blocks of a piece: (gate, up) become their gradients, act the activation times the probability. */
template <int KIND, int N>
__device__ __forceinline__ void dact_words(const struct gmm_tma_job &j, const float *c, const float (&prob)[2],
                                           uint32_t (&gates)[N][2], uint32_t (&ups)[N][2], uint32_t (*act)[2],
                                           float (&sum)[2])
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float gate[2], up[2], v[2];
            unpack2(gates[i][h], gate);
            unpack2(ups[i][h], up);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float d_gate, d_up, own = c[4 * i + 2 * h + e], a = activate<KIND>(j, gate[e], up[e], &d_gate, &d_up);
                sum[h] += own * a;
                v[e] = prob[h] * a;
                own *= prob[h];
                gate[e] = own * d_gate;
                up[e] = own * d_up;
            }
            gates[i][h] = pack2(gate[0], gate[1]);
            ups[i][h] = pack2(up[0], up[1]);
            act[i][h] = pack2(v[0], v[1]);
        }
}

/* A warp's 16 rows x 64 columns of fp32 sums, from 64 k on: a row is two lines of 128 bytes. */
template <typename F> __device__ __forceinline__ void sums_put(char *strip, const float (&c)[F::BN / 2], int k)
{
    int lane = threadIdx.x % 32, pair = lane % 4;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int d = 4 * (8 * k + i) + 2 * h, line = 2 * (lane / 4 + 8 * h) + i / 4, chunk = 2 * (i % 4) + pair / 2;
            *(float2 *)(strip + line * 128 + ((chunk ^ (line % 8)) << 4) + pair % 2 * 8) = make_float2(c[d], c[d + 1]);
        }
}

/* ---- strips on their way --------------------------------------------------------------------- */

/* The stage of this step, copied or lent. */
template <typename F> __device__ __forceinline__ char *stage_of(char *ring, uint64_t *full, uint32_t step)
{
    barrier_wait_bounded(full + step % F::STAGES, step / F::STAGES & 1);
    return ring + step % F::STAGES * F::STAGE;
}

/* Where a warp puts the k-th strip of a tile, k a constant after unrolling: two buffers of its own, then three in the
 * lent stage, then the first again. */
enum { BUFFERS = 5 };
template <typename F>
__device__ __forceinline__ char *strip_buffer(int k, char *own, char *ring, uint64_t *full, uint32_t step, int group)
{
    int i = k % BUFFERS, warp = threadIdx.x % GROUP / 32;
    /* What left from here must have been read. All other buffers but one, being filled, may be on their way. */
    if (k >= BUFFERS) {
        if (threadIdx.x % 32 == 0)
            bulk_wait_read<BUFFERS - 2>();
        __syncwarp();
    }
    if (i < 2)
        return own + i * BOX_BYTES + warp * PIECE;
    char *stage = k == 2 ? stage_of<F>(ring, full, step) : ring + step % F::STAGES * F::STAGE;
    return stage + (group * 3 + i - 2) * BOX_BYTES + warp * PIECE;
}

/* All lanes have filled strips that leave next. */
__device__ __forceinline__ void strips_ready(void)
{
    fence_async_proxy();
    __syncwarp();
}
/* A filled strip to memory: by bulk copy where all of it exists, else row by row, without those that do not exist. */
__device__ __forceinline__ void strip_out(const char *strip, const CUtensorMap *map, int row, int col, bf16 *to,
                                          int64_t ld, int rows, int cols, bool whole)
{
    if (!whole)
        piece_store(strip, to, ld, rows, cols);
    else if (threadIdx.x % 32 == 0)
        tma_store_3d_once(map, col, row, 0, strip);
}
/* What was sent off is one group of bulk copies, be it nothing: waiting counts groups. */
__device__ __forceinline__ void strips_sent(void)
{
    if (threadIdx.x % 32 == 0)
        bulk_commit();
}

/* ---- results --------------------------------------------------------------------------------- */

template <typename F>
__device__ __forceinline__ void words_of(uint32_t (&word)[8][2], const float (&c)[F::BN / 2], int first)
{
#pragma unroll
    for (int i = 0; i < 16; i++)
        word[i / 2][i % 2] = pack2(c[first + 2 * i], c[first + 2 * i + 1]);
}

template <typename F>
__device__ __forceinline__ void store_rows(const struct gmm_maps &m, const struct gmm_job &g, const struct gmm_at &at,
                                           float (&c)[F::BN / 2], int group, char *own, char *ring, uint64_t *full,
                                           uint32_t step)
{
    if (g.bias != NULL)
        add_bias<F>(c, g.bias, g.prob, at, 1, g.across, group);
    int r0 = warp_row(group), row = at.m + r0, rows = at.m_valid - r0;
#pragma unroll
    for (int p = 0; p < F::BN / 64; p++) {
        int n = at.n + p * 64;
        uint32_t word[8][2];
        char *strip = strip_buffer<F>(p, own, ring, full, step, group);
        words_of<F>(word, c, 32 * p);
        words_put(strip, word);
        strips_ready();
        strip_out(strip, &m.strip[0], row, n, (bf16 *)g.c + (int64_t)row * g.ldc + n, g.ldc, rows, g.across - n,
                  rows >= STRIP);
        strips_sent();
    }
}

/* The activation times the probability, of sums from `first` on. */
template <int KIND, typename F>
__device__ __forceinline__ void act_words(uint32_t (&word)[8][2], const struct gmm_tma_job &j,
                                          const float (&c)[F::BN / 2], int first, int up, const float (&prob)[2])
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float v[2], unused[2];
#pragma unroll
        for (int e = 0; e < 2; e++)
            v[e] = prob[i % 2] *
                   activate<KIND>(j, c[first + 2 * i + e], c[up + first + 2 * i + e], &unused[0], &unused[1]);
        word[i / 2][i % 2] = pack2(v[0], v[1]);
    }
}

template <int KIND, typename F>
__device__ __forceinline__ void store_act(const struct gmm_maps &m, const struct gmm_tma_job &j,
                                          const struct gmm_at &at, float (&c)[F::BN / 2], const float (&prob)[2],
                                          int group, char *own, char *ring, uint64_t *full, uint32_t step)
{
    /* accumulators from gate to up; strips of 64 columns */
    constexpr int UP = F::GATED ? F::BN / 4 : 0, EACH = F::GATED ? 3 : 2;
    const struct gmm_job &g = j.g;
    if (g.bias != NULL)
        add_bias<F>(c, g.bias, NULL, at, F::GATED ? 2 : 1, g.across, group);
    int r0 = warp_row(group), row = at.m + r0, rows = at.m_valid - r0;
#pragma unroll
    for (int p = 0; p < F::NT / 64; p++) {
        int n = at.n + p * 64, cols = g.across - n;
        bool whole = rows >= STRIP && cols >= 64; /* gates past their last column would write over ups */
        bf16 *pre = j.pre + (int64_t)row * j.ldpre + n;
        uint32_t word[8][2];
        char *gates = strip_buffer<F>(EACH * p, own, ring, full, step, group), *ups = gates;
        words_of<F>(word, c, 32 * p);
        words_put(gates, word);
        if (F::GATED) {
            ups = strip_buffer<F>(EACH * p + 1, own, ring, full, step, group);
            words_of<F>(word, c, UP + 32 * p);
            words_put(ups, word);
        }
        strips_ready();
        strip_out(gates, &m.strip[0], row, n, pre, j.ldpre, rows, cols, whole);
        strips_sent();
        if (F::GATED) {
            strip_out(ups, &m.strip[0], row, n + g.across, pre + g.across, j.ldpre, rows, cols, whole);
            strips_sent();
        }
        if (rows > 0)
            act_words<KIND, F>(word, j, c, 32 * p, UP, prob);
        char *acts = strip_buffer<F>(EACH * p + EACH - 1, own, ring, full, step, group);
        words_put(acts, word);
        strips_ready();
        strip_out(acts, &m.strip[1], row, n, (bf16 *)g.c + (int64_t)row * g.ldc + n, g.ldc, rows, cols, whole);
        strips_sent();
    }
}

/* Sixteen rows of 64 columns: saved inputs become their gradients in place, act is filled. Two blocks of eight columns
 * at a time, or they would not fit beside the sums; the next two are read before. */
template <int KIND, typename F>
__device__ __forceinline__ void dact_strips(const struct gmm_tma_job &j, const float *c, const float (&prob)[2],
                                            char *gates, char *ups, char *acts, float (&sum)[2])
{
    uint32_t gate[2][2][2], up[2][2][2] = {};
    words_get(gate[0], gates, 0);
    if (F::GATED)
        words_get(up[0], ups, 0);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        int now = i / 2 % 2, next = now ^ 1;
        uint32_t act[2][2];
        if (i < 6) {
            words_get(gate[next], gates, i + 2);
            if (F::GATED)
                words_get(up[next], ups, i + 2);
        }
        dact_words<KIND>(j, c + 4 * i, prob, gate[now], up[now], act, sum);
        __syncwarp();
        words_put(gates, gate[now], i);
        if (F::GATED)
            words_put(ups, up[now], i);
        if (j.act != NULL)
            words_put(acts, act, i);
    }
}

/* Each lent stage holds 64 columns: gates of both groups, ups, and room for act. All but the last
 * are given back here. */
template <int KIND, typename F>
__device__ __forceinline__ void store_dact(const struct gmm_maps &m, const struct gmm_tma_job &j,
                                           const struct gmm_at &at, const float (&c)[F::BN / 2], const float (&prob)[2],
                                           int group, char *ring, uint64_t *full, uint64_t *empty, uint32_t step)
{
    const struct gmm_job &g = j.g;
    int lane = threadIdx.x % 32, r0 = warp_row(group), row = at.m + r0, rows = at.m_valid - r0;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int p = 0; p < F::LENT; p++) {
        int n = at.n + p * 64, cols = g.across - n;
        bool whole = rows >= STRIP && cols >= 64;
        char *gates = stage_of<F>(ring, full, step + p) + group * BOX_BYTES + threadIdx.x % GROUP / 32 * PIECE;
        char *ups = gates + F::A_BOXES * BOX_BYTES, *acts = gates + (F::GATED ? 2 : 1) * F::A_BOXES * BOX_BYTES;
        if (rows > 0)
            dact_strips<KIND, F>(j, &c[32 * p], prob, gates, ups, acts, sum);
        bf16 *dpre = (bf16 *)g.c + (int64_t)row * g.ldc + n;
        strips_ready();
        strip_out(gates, &m.strip[0], row, n, dpre, g.ldc, rows, cols, whole);
        if (F::GATED)
            strip_out(ups, &m.strip[0], row, n + g.across, dpre + g.across, g.ldc, rows, cols, whole);
        if (j.act != NULL)
            strip_out(acts, &m.strip[1], row, n, j.act + (int64_t)row * j.ldact + n, j.ldact, rows, cols, whole);
        strips_sent();
        if (p > 0) {
            if (lane == 0)
                bulk_wait_read<1>();
            __syncwarp();
            barrier_arrive(empty + (step + p - 1) % F::STAGES);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        int r = lane / 4 + 8 * h;
        if (j.part != NULL && lane % 4 == 0 && r < rows && at.n < g.across)
            j.part[(int64_t)(at.n / F::NT) * g.rows + row + r] = sum[h];
    }
}

/* Columns past the last whole line, plainly. */
template <bool ADD, typename F>
__device__ __forceinline__ void store_rest(const struct gmm_job &g, const struct gmm_at &at,
                                           const float (&c)[F::BN / 2], int group)
{
    int lane = threadIdx.x % 32, r0 = warp_row(group) + lane / 4, first = g.across / 32 * 32;
    float *to = (float *)g.c + ((int64_t)at.expert * g.down + at.m) * g.ldc;
#pragma unroll
    for (int i = 0; i < F::BN / 8; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = r0 + 8 * h, n = at.n + 8 * i + 2 * (lane % 4);
            if (r < at.m_valid && n >= first && n < g.across) {
                float2 *p = (float2 *)(to + r * g.ldc + n), v = make_float2(c[4 * i + 2 * h], c[4 * i + 2 * h + 1]);
                if (ADD)
                    v = make_float2(p->x + v.x, p->y + v.y);
                *p = v;
            }
        }
}

/* fp32 sums: strips of 16 rows x 64 columns; one buffer of the warp's own, one in the lent stage. (Rows of 256 bytes in
 * one piece are written at 4.4 TB/s, of 128 at 4.0.) */
template <bool ADD, typename F>
__device__ __forceinline__ void store_sums(const struct gmm_maps &m, const struct gmm_job &g, const struct gmm_at &at,
                                           const float (&c)[F::BN / 2], int group, char *out, char *ring,
                                           uint64_t *full, uint32_t step)
{
    int mine = (group * 4 + threadIdx.x % GROUP / 32) * 2 * PIECE, row = at.m + warp_row(group), lines = g.across / 32;
    char *lent = NULL;
#pragma unroll
    for (int k = 0; k < F::BN / 64; k++) {
        if (k == 1)
            lent = stage_of<F>(ring, full, step);
        if (k > 1) { /* what left from this buffer must have been read */
            if (threadIdx.x % 32 == 0)
                bulk_wait_read<1>();
            __syncwarp();
        }
        char *strip = (k % 2 == 0 ? out : lent) + mine;
        sums_put<F>(strip, c, k);
        strips_ready();
        int line = at.n / 32 + 2 * k;
        if (threadIdx.x % 32 == 0 && line < lines) {
            if (ADD)
                tma_add_4d(&m.strip[0], line, row, at.expert, strip);
            else
                tma_store_4d_once(&m.strip[0], line, row, at.expert, strip);
        }
        strips_sent();
    }
    if (g.across % 32 != 0 && at.n + F::BN > lines * 32)
        store_rest<ADD, F>(g, at, c, group);
}

/* Zeros for a tile without depth: `rows` rows of `chunks` times 16 bytes, by the threads of both groups. */
__device__ __forceinline__ void store_zeros(char *to, int64_t ld_bytes, int rows, int chunks)
{
    for (int i = threadIdx.x - GROUP; i < rows * chunks; i += 2 * GROUP)
        *(uint4 *)(to + i / chunks * ld_bytes + i % chunks * 16) = make_uint4(0, 0, 0, 0);
}
template <int AFTER, typename F>
__device__ __forceinline__ void store_empty(const struct gmm_tma_job &j, const struct gmm_at &at)
{
    const struct gmm_job &g = j.g;
    constexpr int SIZE = AFTER == GMM_SUMS ? 4 : 2;
    int cols = min(F::NT, g.across - at.n), chunks = max(cols, 0) * SIZE / 16;
    int64_t first = (int64_t)at.m * g.ldc + at.n;
    if (AFTER == GMM_SUMS) {
        if (!g.acc)
            store_zeros((char *)((float *)g.c + (int64_t)at.expert * g.down * g.ldc + first), g.ldc * SIZE, at.m_valid,
                        chunks);
        return;
    }
    store_zeros((char *)((bf16 *)g.c + first), g.ldc * SIZE, at.m_valid, chunks);
    bool gated = AFTER != GMM_STORE && F::GATED;
    if (AFTER == GMM_DACT) {
        if (gated)
            store_zeros((char *)((bf16 *)g.c + first + g.across), g.ldc * SIZE, at.m_valid, chunks);
        for (int r = threadIdx.x - GROUP; j.part != NULL && at.n < g.across && r < at.m_valid; r += 2 * GROUP)
            j.part[(int64_t)(at.n / F::NT) * g.rows + at.m + r] = 0.0f;
    } else if (AFTER == GMM_ACT) {
        for (int half = 0; half < (gated ? 2 : 1); half++)
            store_zeros((char *)(j.pre + (int64_t)at.m * j.ldpre + at.n + half * g.across), j.ldpre * SIZE, at.m_valid,
                        chunks);
    }
}

/* The tile's results on their way; step: the first lent stage. owed: a stage holds results after it. */
template <int AFTER, int KIND, typename F>
__device__ __forceinline__ void store_tile(const struct gmm_maps &m, const struct gmm_tma_job &j,
                                           const struct gmm_at &at, float (&c)[F::BN / 2], const float (&prob)[2],
                                           int group, char *out, char *ring, uint64_t *full, uint64_t *empty,
                                           uint32_t step, bool &owed)
{
    if (at.depth <= 0) {
        store_empty<AFTER, F>(j, at);
        return;
    }
    owed = true;
    char *own = out + group * 2 * BOX_BYTES;
    if constexpr (AFTER == GMM_STORE)
        store_rows<F>(m, j.g, at, c, group, own, ring, full, step);
    else if constexpr (AFTER == GMM_ACT)
        store_act<KIND, F>(m, j, at, c, prob, group, own, ring, full, step);
    else if constexpr (AFTER == GMM_DACT)
        store_dact<KIND, F>(m, j, at, c, prob, group, ring, full, empty, step);
    else if (j.g.acc)
        store_sums<true, F>(m, j.g, at, c, group, out, ring, full, step);
    else
        store_sums<false, F>(m, j.g, at, c, group, out, ring, full, step);
}

#endif /* HOPPER_CODE */

#endif
