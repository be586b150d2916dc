/* Inside of gmm_tma.cu, forms RING and PAIR: results leave through stages of the ring. After the last step of a tile the copying
 * thread lends the next stages: the warps fill them with results and go on multiplying, bulk copies read them, and only then
 * they are stages again. Each warp stores its own strips of 16 rows, so that no warp waits for another. The gradient of the
 * activation finds its saved inputs in the lent stages, copied there while the products ran, and overwrites them.
 * A tile without depth (an expert without rows, rows of no expert) takes no stage: its zeros are stored plainly. */
#ifndef BRAID_OPS_GMM_RING_CUH
#define BRAID_OPS_GMM_RING_CUH

#include "ops/gmm/gmm_store.cuh"

#if HOPPER_CODE

/* The stage of this step, copied or lent. */
template <typename F> __device__ __forceinline__ char *stage_of(char *ring, uint64_t *full, uint32_t step)
{
    barrier_wait_bounded(full + step % F::STAGES, step / F::STAGES & 1);
    return ring + step % F::STAGES * F::STAGE;
}

/* What a warp may fill: two buffers of its own and three in each lent stage, in turn. */
template <typename F> struct strips {
    char *own, *stage[F::LENT];
    int count; /* stages taken so far */
};
template <typename F> __device__ __forceinline__ struct strips<F> strips_of(char *own)
{
    struct strips<F> s;
    s.own = own + threadIdx.x % GROUP / 32 * PIECE;
    s.count = 0;
    return s;
}
/* Buffer of the k-th strip of the tile; k is a constant after unrolling. */
template <typename F> __device__ __forceinline__ char *strip_buffer(struct strips<F> &s, int k, char *ring, uint64_t *full, uint32_t step, int group)
{
    int i = k % F::BUFFERS, lent = (i - 2) / 3;
    if (k >= F::BUFFERS) { /* What left from here must have been read. All other buffers but one, being filled, may be on their way. */
        if (threadIdx.x % 32 == 0)
            bulk_wait_read<F::BUFFERS - 2>();
        __syncwarp();
    }
    if (i < 2)
        return s.own + i * BOX_BYTES;
    if (s.count == lent) {
        s.stage[lent] = stage_of<F>(ring, full, step + lent) + group * 3 * BOX_BYTES + threadIdx.x % GROUP / 32 * PIECE;
        s.count++;
    }
    return s.stage[lent] + (i - 2) % 3 * BOX_BYTES;
}

/* All lanes have filled strips that leave next. */
__device__ __forceinline__ void strips_ready(void)
{
    fence_async_proxy();
    __syncwarp();
}
/* A filled strip to memory: by bulk copy where all of it exists, else row by row, without those that do not exist. */
__device__ __forceinline__ void strip_out(const char *strip, const CUtensorMap *map, int row, int col, bf16 *to, int64_t ld, int rows, int cols, bool whole)
{
    if (!whole)
        piece_store(strip, to, ld, rows, cols);
    else if (threadIdx.x % 32 == 0)
        tma_store_3d(map, col, row, 0, strip);
}
/* What was sent off is one group of bulk copies, be it nothing: waiting counts groups. */
__device__ __forceinline__ void strips_sent(void)
{
    if (threadIdx.x % 32 == 0)
        bulk_commit();
}

template <typename F> __device__ __forceinline__ void words_of(uint32_t (&word)[8][2], const float (&c)[F::BN / 2], int first)
{
#pragma unroll
    for (int i = 0; i < 16; i++)
        word[i / 2][i % 2] = pack2(c[first + 2 * i], c[first + 2 * i + 1]);
}

template <typename F>
__device__ __forceinline__ void ring_rows(const struct gmm_maps &m, const struct gmm_job &g, const struct gmm_at &at, float (&c)[F::BN / 2], int group, char *own,
                                          char *ring, uint64_t *full, uint32_t step)
{
    if (g.bias != NULL)
        add_bias<F>(c, g.bias, g.prob, at, 1, g.across, group);
    int r0 = warp_row<F>(group), row = at.m + r0, rows = at.m_valid - r0;
    struct strips<F> s = strips_of<F>(own);
#pragma unroll
    for (int p = 0; p < F::BN / 64; p++) {
        int n = at.n + p * 64;
        uint32_t word[8][2];
        char *strip = strip_buffer<F>(s, p, ring, full, step, group);
        words_of<F>(word, c, 32 * p);
        words_put(strip, word);
        strips_ready();
        strip_out(strip, &m.strip[0], row, n, (bf16 *)g.c + (int64_t)row * g.ldc + n, g.ldc, rows, g.across - n, rows >= STRIP);
        strips_sent();
    }
}

/* The activation times the probability, of sums from `first` on. */
template <int KIND, typename F>
__device__ __forceinline__ void act_words(uint32_t (&word)[8][2], const struct gmm_tma_job &j, const float (&c)[F::BN / 2], int first, int up,
                                          const float (&prob)[2])
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float v[2], unused[2];
#pragma unroll
        for (int e = 0; e < 2; e++)
            v[e] = prob[i % 2] * activate<KIND>(j, c[first + 2 * i + e], c[up + first + 2 * i + e], &unused[0], &unused[1]);
        word[i / 2][i % 2] = pack2(v[0], v[1]);
    }
}

template <int KIND, typename F>
__device__ __forceinline__ void ring_act(const struct gmm_maps &m, const struct gmm_tma_job &j, const struct gmm_at &at, float (&c)[F::BN / 2],
                                         const float (&prob)[2], int group, char *own, char *ring, uint64_t *full, uint32_t step)
{
    constexpr int UP = F::GATED ? F::BN / 4 : 0, EACH = F::GATED ? 3 : 2; /* accumulators from gate to up; strips of 64 columns */
    const struct gmm_job &g = j.g;
    if (g.bias != NULL)
        add_bias<F>(c, g.bias, NULL, at, F::GATED ? 2 : 1, g.across, group);
    int r0 = warp_row<F>(group), row = at.m + r0, rows = at.m_valid - r0;
    struct strips<F> s = strips_of<F>(own);
#pragma unroll
    for (int p = 0; p < F::NT / 64; p++) {
        int n = at.n + p * 64, cols = g.across - n;
        bool whole = rows >= STRIP && cols >= 64; /* gates past their last column would write over ups */
        bf16 *pre = j.pre + (int64_t)row * j.ldpre + n;
        uint32_t word[8][2];
        char *gates = strip_buffer<F>(s, EACH * p, ring, full, step, group), *ups = gates;
        words_of<F>(word, c, 32 * p);
        words_put(gates, word);
        if (F::GATED) {
            ups = strip_buffer<F>(s, EACH * p + 1, ring, full, step, group);
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
        char *acts = strip_buffer<F>(s, EACH * p + EACH - 1, ring, full, step, group);
        words_put(acts, word);
        strips_ready();
        strip_out(acts, &m.strip[1], row, n, (bf16 *)g.c + (int64_t)row * g.ldc + n, g.ldc, rows, cols, whole);
        strips_sent();
    }
}

/* Sixteen rows of 64 columns: saved inputs become their gradients in place, act is filled. Two blocks of eight columns at a time, or they
 * would not fit beside the sums. */
template <int KIND, typename F>
__device__ __forceinline__ void dact_strips(const struct gmm_tma_job &j, const float *c, const float (&prob)[2], char *gates, char *ups, char *acts,
                                            float (&sum)[2])
{
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        uint32_t gate[2][2], up[2][2] = {}, act[2][2];
        words_get(gate, gates, i);
        if (F::GATED)
            words_get(up, ups, i);
        dact_words<KIND>(j, c + 4 * i, prob, gate, up, act, sum);
        __syncwarp();
        words_put(gates, gate, i);
        if (F::GATED)
            words_put(ups, up, i);
        if (j.act != NULL)
            words_put(acts, act, i);
    }
}

/* Each lent stage holds 64 columns: gates of both groups, ups, and room for act. All but the last are given back here. */
template <int KIND, typename F>
__device__ __forceinline__ void ring_dact(const struct gmm_maps &m, const struct gmm_tma_job &j, const struct gmm_at &at, const float (&c)[F::BN / 2],
                                          const float (&prob)[2], int group, char *ring, uint64_t *full, uint64_t *empty, uint32_t step)
{
    const struct gmm_job &g = j.g;
    int lane = threadIdx.x % 32, r0 = warp_row<F>(group), row = at.m + r0, rows = at.m_valid - r0;
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
            release<F>(empty + (step + p - 1) % F::STAGES);
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

/* fp32 sums: strips of 16 rows x 32 columns. */
template <bool ADD, typename F>
__device__ __forceinline__ void ring_sums(const struct gmm_maps &m, const struct gmm_at &at, const float (&c)[F::BN / 2], int group, char *own, char *ring,
                                          uint64_t *full, uint32_t step)
{
    struct strips<F> s = strips_of<F>(own);
#pragma unroll
    for (int p = 0; p < F::BN / 32; p++) {
        char *strip = strip_buffer<F>(s, p, ring, full, step, group);
        sums_put<F>(strip, c, p);
        strips_ready();
        if (threadIdx.x % 32 == 0)
            box_store<ADD>(strip, &m.strip[0], at.n + p * 32, at.m + warp_row<F>(group), at.expert);
    }
}

/* Zeros for a tile without depth: `rows` rows of `chunks` times 16 bytes, by the threads of both groups. */
__device__ __forceinline__ void ring_zeros(char *to, int64_t ld_bytes, int rows, int chunks)
{
    for (int i = threadIdx.x - GROUP; i < rows * chunks; i += 2 * GROUP)
        *(uint4 *)(to + i / chunks * ld_bytes + i % chunks * 16) = make_uint4(0, 0, 0, 0);
}
template <int AFTER, typename F> __device__ __forceinline__ void ring_empty(const struct gmm_tma_job &j, const struct gmm_at &at)
{
    const struct gmm_job &g = j.g;
    constexpr int SIZE = AFTER == GMM_SUMS ? 4 : 2;
    int cols = min(F::NT, g.across - at.n), chunks = max(cols, 0) * SIZE / 16;
    int64_t first = (int64_t)at.m * g.ldc + at.n;
    if (AFTER == GMM_SUMS) {
        if (!g.acc)
            ring_zeros((char *)((float *)g.c + (int64_t)at.expert * g.down * g.ldc + first), g.ldc * SIZE, at.m_valid, chunks);
        return;
    }
    ring_zeros((char *)((bf16 *)g.c + first), g.ldc * SIZE, at.m_valid, chunks);
    bool gated = AFTER != GMM_STORE && F::GATED;
    if (AFTER == GMM_DACT) {
        if (gated)
            ring_zeros((char *)((bf16 *)g.c + first + g.across), g.ldc * SIZE, at.m_valid, chunks);
        for (int r = threadIdx.x - GROUP; j.part != NULL && at.n < g.across && r < at.m_valid; r += 2 * GROUP)
            j.part[(int64_t)(at.n / F::NT) * g.rows + at.m + r] = 0.0f;
    } else if (AFTER == GMM_ACT) {
        for (int half = 0; half < (gated ? 2 : 1); half++)
            ring_zeros((char *)(j.pre + (int64_t)at.m * j.ldpre + at.n + half * g.across), j.ldpre * SIZE, at.m_valid, chunks);
    }
}

/* The tile's results on their way; step: the first lent stage. owed: stages hold results after it. */
template <int AFTER, int KIND, typename F>
__device__ __forceinline__ void ring_store(const struct gmm_maps &m, const struct gmm_tma_job &j, const struct gmm_at &at, float (&c)[F::BN / 2],
                                          const float (&prob)[2], int group, char *own, char *ring, uint64_t *full, uint64_t *empty, uint32_t step, bool &owed)
{
    if (at.depth <= 0) {
        ring_empty<AFTER, F>(j, at);
        return;
    }
    owed = true;
    if constexpr (AFTER == GMM_STORE)
        ring_rows<F>(m, j.g, at, c, group, own, ring, full, step);
    else if constexpr (AFTER == GMM_ACT)
        ring_act<KIND, F>(m, j, at, c, prob, group, own, ring, full, step);
    else if constexpr (AFTER == GMM_DACT)
        ring_dact<KIND, F>(m, j, at, c, prob, group, ring, full, empty, step);
    else if (j.g.acc)
        ring_sums<true, F>(m, at, c, group, own, ring, full, step);
    else
        ring_sums<false, F>(m, at, c, group, own, ring, full, step);
}

#endif /* HOPPER_CODE */

#endif
