/* Inside of gmm8_tma.cu: sizes, the copying thread, the multiplying groups, and the one result that ops/gmm does not
 * have, the activation as codes.
 *
 * A group multiplies its 64 rows by 128 columns at a time, 128 deep, into 64 registers, and adds these sums, scaled, to
 * 128 registers of fp32; meanwhile the other group has the tensor cores. Scales of rows and of blocks of weights are
 * read from memory a step ahead. For the weight gradient both operands have scales by rows, so those come with the
 * stage. Its depth are tokens, and blocks of 128 tokens that share a scale are counted from the first token of all: an
 * expert's first and last block may hold tokens of others, whose codes in a are cleared. */
#ifndef BRAID_OPS_GMM8_FEED_CUH
#define BRAID_OPS_GMM8_FEED_CUH

#include "ops/cuda/f8.cuh"
#include "ops/cuda/hopper8.cuh"
#include "ops/gmm/gmm_store.cuh"
#include "ops/gmm8/gmm8_tma.cuh"

enum { DEEP = 128 };

/* Sizes as in gmm_feed.cuh. The sums of a weight gradient leave through two lent stages and need no room of their
 * own. */
template <int AFTER, int KIND> struct form8 {
    static constexpr bool GATED = KIND != GMM_RELU2, SUMS = AFTER == GMM_SUMS;
    static constexpr int BM = GMM_FORM_ROWS, BN = GMM_FORM_COLS, STAGES = 4;
    static constexpr int NT = AFTER == GMM_ACT && GATED ? BN / 2 : BN;
    static constexpr int A_BOXES = BM / BOX, B_BOXES = BN / BOX, OPERANDS = (A_BOXES + B_BOXES) * BOX_BYTES;
    static constexpr int STAGE = OPERANDS + (SUMS ? 2048 : 0); /* scales of a, then of b */
    static constexpr int OUT = SUMS ? 0 : 4 * BOX_BYTES, RING = STAGES * STAGE;
    static constexpr int BARS = 2 * STAGES * 8, BYTES = RING + OUT + BARS + 16;
    static constexpr int REGS = 240, COPY_REGS = 24;
    static constexpr int LENT = AFTER == GMM_DACT ? NT / 64 : SUMS ? 2 : 1;
};

#if HOPPER_CODE

/* Blocks of depth; where the first one begins. */
template <int AFTER> __device__ __forceinline__ int first_of(const struct gmm_at &at)
{
    return AFTER == GMM_SUMS ? at.k_first / DEEP * DEEP : 0;
}
template <int AFTER> __device__ __forceinline__ int blocks_of(const struct gmm_at &at)
{
    return at.depth <= 0 ? 0 : (at.k_first + at.depth - first_of<AFTER>(at) + DEEP - 1) / DEEP;
}

/* ---- the copying thread ---------------------------------------------------------------------- */

template <int AFTER, typename F>
__device__ __forceinline__ void copy_codes(const CUtensorMap *ma, const CUtensorMap *mb, const struct gmm8_job &p,
                                           const struct gmm_at &at, int k, char *stage, uint64_t *full)
{
    const struct gmm_job &g = p.j.g;
    int depth = first_of<AFTER>(at) + k * DEEP, expert = AFTER == GMM_SUMS || p.turned ? 0 : at.expert;
    int a_scales = 0, b_scales = 0;
    if (F::SUMS && p.as_row != 0) {
        a_scales = min(F::BM, (int)p.as_stride - at.m) * 4;
        b_scales = min(F::BN, (int)p.bs_stride - at.n) * 4;
    }
    barrier_expect(full, (uint32_t)(F::OPERANDS + a_scales + b_scales));
#pragma unroll
    for (int i = 0; i < F::A_BOXES; i++)
        tma_load_3d(stage + i * BOX_BYTES, ma, depth, at.m + i * BOX, 0, full);
    char *b = stage + F::A_BOXES * BOX_BYTES;
    int b_depth = depth + (AFTER != GMM_SUMS && p.turned ? at.expert * g.depth : 0);
#pragma unroll
    for (int i = 0; i < F::B_BOXES; i++) {
        constexpr int HALF = F::B_BOXES / 2;
        bool up = AFTER == GMM_ACT && F::GATED && i >= HALF;
        tma_load_3d(b + i * BOX_BYTES, mb, b_depth, at.n + (up ? g.across + (i - HALF) * BOX : i * BOX), expert, full);
    }
    if (a_scales > 0) {
        bulk_load(stage + F::OPERANDS, p.as + depth / DEEP * p.as_stride + at.m, (uint32_t)a_scales, full);
        bulk_load(stage + F::OPERANDS + F::BM * 4, p.bs + depth / DEEP * p.bs_stride + at.n, (uint32_t)b_scales, full);
    }
}

/* ---- multiplying ----------------------------------------------------------------------------- */

/* Codes of a group's lines outside of [first, end) are tokens of other experts: no part of this sum. */
__device__ __forceinline__ void clear_tokens(char *box, int first, int end, int group)
{
    for (int i = (int)threadIdx.x % GROUP; i < BOX * 8; i += GROUP) {
        int line = i / 8, chunk = i % 8;
        uint32_t *at = (uint32_t *)(box + line * 128 + ((chunk ^ (line % 8)) << 4));
#pragma unroll
        for (int w = 0; w < 4; w++) {
            int low = first - (chunk * 16 + w * 4), high = end - (chunk * 16 + w * 4);
            uint32_t keep = low <= 0 ? 0xffffffffu : low >= 4 ? 0u : 0xffffffffu << (8 * low);
            keep &= high >= 4 ? 0xffffffffu : high <= 0 ? 0u : 0xffffffffu >> (32 - 8 * high);
            if (keep != 0xffffffffu)
                at[w] &= keep;
        }
    }
    fence_async_proxy();
    if (group == 0)
        named_barrier<2, GROUP>();
    else
        named_barrier<3, GROUP>();
}

/* Scales of a step for one lane: of its two rows of a, of the two blocks of 128 columns of b. */
struct step_scales {
    float row[2], block[2];
};
/* Where they are: numbers of the first of each two, and how far on the second is. */
struct scale_walk {
    uint32_t row, block;
    int row_gap, block_gap;
};
template <int AFTER, typename F>
__device__ __forceinline__ struct scale_walk scales_at(const struct gmm8_job &p, const struct gmm_at &at, int group)
{
    const struct gmm_job &g = p.j.g;
    constexpr bool UPS = AFTER == GMM_ACT && F::GATED;
    /* Rows and columns that do not exist read what does: their sums are not stored. */
    int row = min(at.m + warp_row(group) + (int)threadIdx.x % 32 / 4, g.rows - 1), n = at.n / 128,
        second = UPS ? (at.n + g.across) / 128 : min(n + 1, (g.across - 1) / 128);
    int above = p.turned ? 0 : at.expert * ((UPS ? 2 : 1) * g.across / 128);
    struct scale_walk w;
    w.row = (uint32_t)(row * p.as_row);
    w.row_gap = (min(row + 8, g.rows - 1) - row) * p.as_row;
    w.block = (uint32_t)((above + n) * p.bs_stride + (p.turned ? at.expert * (g.depth / 128) * p.bs_k : 0));
    w.block_gap = (second - n) * (int)p.bs_stride;
    return w;
}
__device__ __forceinline__ struct step_scales scales_next(const struct gmm8_job &p, struct scale_walk &w)
{
    struct step_scales s;
    s.row[0] = __ldg(p.as + w.row);
    s.row[1] = __ldg(p.as + w.row + w.row_gap);
    s.block[0] = __ldg(p.bs + w.block);
    s.block[1] = __ldg(p.bs + w.block + w.block_gap);
    w.row += (uint32_t)p.as_stride;
    w.block += (uint32_t)p.bs_k;
    return s;
}

/* 64 rows by 128 columns, 128 deep, by one group. */
template <enum dtype A> __device__ __forceinline__ void multiply_half(float (&part)[64], uint64_t a, uint64_t b)
{
    wgmma_begin();
    wgmma8<A>::start(part, a, b);
#pragma unroll
    for (int k = 1; k < DEEP / 32; k++)
        wgmma8<A>::run(part, a + k * 2, b + k * 2);
    wgmma_commit();
}
/* Only steps [first, end) of 32: the others hold tokens of other experts alone. */
template <enum dtype A>
__device__ __forceinline__ void multiply_some(float (&part)[64], uint64_t a, uint64_t b, int first, int end)
{
    wgmma_begin();
    wgmma8<A>::start(part, a + first * 2, b + first * 2);
#pragma unroll 1
    for (int k = first + 1; k < end; k++)
        wgmma8<A>::run(part, a + k * 2, b + k * 2);
    wgmma_commit();
}
__device__ __forceinline__ void add_scaled(float *c, const float (&part)[64], float first_row, float second_row)
{
#pragma unroll
    for (int i = 0; i < 64; i++)
        c[i] += part[i] * (i % 4 < 2 ? first_row : second_row);
}
/* The same with a scale for each of the lane's 32 columns, which lie in shared memory, four pairs at a time. They are
 * fetched while the products run, for the first two fours, and multiplied with those of the rows before the sums are:
 * 3 to 6 % faster than multiplying the sums twice. */
struct column_scales {
    float four[2][16]; /* of a four: its columns of the first row and of the second */
};
__device__ __forceinline__ void columns_get(struct column_scales &s, const float *column, float first_row,
                                            float second_row, int which)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 pair = *(const float2 *)(column + 32 * which + 8 * i + 2 * (threadIdx.x % 4));
        float *to = &s.four[which % 2][4 * i];
        to[0] = pair.x * first_row;
        to[1] = pair.y * first_row;
        to[2] = pair.x * second_row;
        to[3] = pair.y * second_row;
    }
    __asm__ volatile("" ::: "memory"); /* not later */
}
__device__ __forceinline__ void add_scaled_by_column(float *c, const float (&part)[64], float first_row,
                                                     float second_row, struct column_scales &s, const float *column)
{
#pragma unroll
    for (int which = 0; which < 4; which++) {
#pragma unroll
        for (int i = 0; i < 16; i++)
            c[16 * which + i] += part[16 * which + i] * s.four[which % 2][i];
        if (which < 2)
            columns_get(s, column, first_row, second_row, which + 2);
    }
}

/* c = the tile, as multiply_tile of gmm_feed.cuh makes it: rows by matrices of weights. */
template <int AFTER, enum dtype A, typename F, typename LAST>
__device__ __forceinline__ void multiply_rows(float (&c)[F::BN / 2], char *ring, uint64_t *full, uint64_t *empty,
                                              uint32_t step, int steps, const struct gmm8_job &p,
                                              const struct gmm_at &at, int group, bool &owed, LAST last)
{
    float part[64];
    struct scale_walk walk = scales_at<AFTER, F>(p, at, group);
    struct step_scales next = scales_next(p, walk);
    for (int s = 0; s < steps; s++) {
        uint32_t k = (step + s) % F::STAGES;
        char *stage = ring + k * F::STAGE;
        barrier_wait_bounded(full + k, (step + s) / F::STAGES & 1);
        uint64_t a = wgmma_tile(stage + group * BOX_BYTES, BOX_BYTES, 1024),
                 b = wgmma_tile(stage + F::A_BOXES * BOX_BYTES, BOX_BYTES, 1024);
        multiply_half<A>(part, a, b);
        if (s == 0)
            release_lent<F>(empty, step, owed);
        struct step_scales now = next;
        if (s + 1 < steps)
            next = scales_next(p, walk);
        wgmma_wait<0>();
        wgmma_hold(part);
        add_scaled(c, part, now.row[0] * now.block[0], now.row[1] * now.block[0]);
        multiply_half<A>(part, a, b + 2 * BOX_BYTES / 16);
        if (s + 1 == steps)
            last();
        wgmma_wait<0>();
        wgmma_hold(part);
        release(empty + k);
        add_scaled(c + 64, part, now.row[0] * now.block[1], now.row[1] * now.block[1]);
    }
}

/* The weight gradient: both operands are by rows, which are tokens. SCALES: every row has its own, else a tensor has
 * one; two loops, since ptxas would merge the sums of both and lose the fused multiply-adds. */
template <bool SCALES, enum dtype A, typename F, typename LAST>
__device__ __forceinline__ void multiply_tokens(float (&c)[F::BN / 2], char *ring, uint64_t *full, uint64_t *empty,
                                                uint32_t step, int steps, const struct gmm8_job &p,
                                                const struct gmm_at &at, int group, bool &owed, LAST last)
{
    float part[64], whole = SCALES ? 0.0f : __ldg(p.as) * __ldg(p.bs);
    for (int s = 0; s < steps; s++) {
        uint32_t k = (step + s) % F::STAGES;
        char *stage = ring + k * F::STAGE, *mine = stage + group * BOX_BYTES;
        const float *scale = (const float *)(stage + F::OPERANDS),
                    *rows = scale + warp_row(group) + threadIdx.x % 32 / 4;
        barrier_wait_bounded(full + k, (step + s) / F::STAGES & 1);
        int low = at.k_first - first_of<GMM_SUMS>(at) - s * DEEP, high = low + at.depth;
        bool partly = low > 0 || high < DEEP;
        if (partly)
            clear_tokens(mine, low, high, group);
        uint64_t a = wgmma_tile(mine, BOX_BYTES, 1024), b = wgmma_tile(stage + F::A_BOXES * BOX_BYTES, BOX_BYTES, 1024);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint64_t b_half = b + half * 2 * BOX_BYTES / 16;
            if (partly)
                multiply_some<A>(part, a, b_half, max(low, 0) / 32, (min(high, DEEP) + 31) / 32);
            else
                multiply_half<A>(part, a, b_half);
            if (half == 0 && s == 0)
                release_lent<F>(empty, step, owed);
            if (half == 1 && s + 1 == steps)
                last();
            if constexpr (!SCALES) {
                wgmma_wait<0>();
                wgmma_hold(part);
                add_scaled(c + 64 * half, part, whole, whole);
            } else {
                const float *columns = scale + F::BM + 128 * half;
                float first = rows[0], second = rows[8];
                struct column_scales some;
                columns_get(some, columns, first, second, 0);
                columns_get(some, columns, first, second, 1);
                wgmma_wait<0>();
                wgmma_hold(part);
                add_scaled_by_column(c + 64 * half, part, first, second, some, columns);
            }
        }
        barrier_arrive(empty + k); /* each lane: it has read scales there, and may have cleared codes */
    }
}

template <int AFTER, enum dtype A, typename F, typename LAST>
__device__ __forceinline__ void multiply_codes(float (&c)[F::BN / 2], char *ring, uint64_t *full, uint64_t *empty,
                                               uint32_t step, int steps, const struct gmm8_job &p,
                                               const struct gmm_at &at, int group, bool &owed, LAST last)
{
#pragma unroll
    for (int i = 0; i < F::BN / 2; i++)
        c[i] = 0.0f;
    if (steps == 0)
        last();
    else if constexpr (F::SUMS) {
        if (p.as_row != 0)
            multiply_tokens<true, A, F>(c, ring, full, empty, step, steps, p, at, group, owed, last);
        else
            multiply_tokens<false, A, F>(c, ring, full, empty, step, steps, p, at, group, owed, last);
    } else
        multiply_rows<AFTER, A, F>(c, ring, full, empty, step, steps, p, at, group, owed, last);
}

/* ---- sums of weight gradients ---------------------------------------------------------------- */

/* As store_sums of gmm_store.cuh, but strips go by turns through the two lent stages, the first of which is given back
 * here. */
template <bool ADD, typename F>
__device__ __forceinline__ void store_lent_sums(const struct gmm_maps &m, const struct gmm_job &g,
                                                const struct gmm_at &at, const float (&c)[F::BN / 2], int group,
                                                char *ring, uint64_t *full, uint64_t *empty, uint32_t step)
{
    int mine = (group * 4 + threadIdx.x % GROUP / 32) * 2 * PIECE, row = at.m + warp_row(group), lines = g.across / 32;
#pragma unroll
    for (int k = 0; k < F::BN / 64; k++) {
        if (k > 1) { /* what left from this buffer must have been read */
            if (threadIdx.x % 32 == 0)
                bulk_wait_read<1>();
            __syncwarp();
        }
        char *strip = (k < 2 ? stage_of<F>(ring, full, step + k) : ring + (step + k % 2) % F::STAGES * F::STAGE) + mine;
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
    if (threadIdx.x % 32 == 0)
        bulk_wait_read<1>();
    __syncwarp();
    barrier_arrive(empty + step % F::STAGES);
}

/* ---- the activation as codes ----------------------------------------------------------------- */

/* Sixteen rows of 128 values, one warp: v as accumulators lie. The scale of a row is that of ops/quantise. */
__device__ __forceinline__ void codes_out(const struct gmm8_job &p, const CUtensorMap *map, char *strip, const float *v,
                                          int row, int rows, int n)
{
    int lane = threadIdx.x % 32;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t most = 0;
        float inverse;
#pragma unroll
        for (int i = 0; i < 16; i++)
            most = max_u32(most, max_u32(magnitude(v[4 * i + 2 * h]), magnitude(v[4 * i + 2 * h + 1])));
        factor[h] = f8_factor<DT_F8_E4M3>(warp_max_u32(most, 4), &inverse);
        if (lane % 4 == 0 && lane / 4 + 8 * h < rows)
            p.qs[(int64_t)(n / 128) * p.qs_stride + row + lane / 4 + 8 * h] = inverse;
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int line = lane / 4 + 8 * h;
            *(uint16_t *)(strip + line * 128 + (((i / 2) ^ (line % 8)) << 4) + i % 2 * 8 + 2 * (lane % 4)) =
                (uint16_t)f8_pair<DT_F8_E4M3>(v[4 * i + 2 * h] * factor[h], v[4 * i + 2 * h + 1] * factor[h]);
        }
    strips_ready();
    int64_t width = p.j.g.across;
    if (rows < STRIP)
        piece_store(strip, (bf16 *)(p.q + row * width + n), width / 2, rows, 64);
    else if (lane == 0)
        tma_store_3d_once(map, n, row, 0, strip);
    strips_sent();
}

template <int KIND, typename F>
__device__ __forceinline__ void store_codes(const struct gmm_maps &m, const struct gmm8_job &p, const struct gmm_at &at,
                                            float (&c)[F::BN / 2], const float (&prob)[2], int group, char *own,
                                            char *ring, uint64_t *full, uint32_t step)
{
    constexpr int UP = F::GATED ? F::BN / 4 : 0, EACH = F::GATED ? 5 : 3; /* strips for 128 values of the activation */
    const struct gmm_tma_job &j = p.j;
    const struct gmm_job &g = j.g;
    if (g.bias != NULL)
        add_bias<F>(c, g.bias, NULL, at, F::GATED ? 2 : 1, g.across, group);
    int r0 = warp_row(group), row = at.m + r0, rows = at.m_valid - r0;
#pragma unroll
    for (int block = 0; block < F::NT / 128; block++) {
        bool there = at.n + 128 * block < g.across;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int n = at.n + 128 * block + 64 * half, cols = there ? 64 : 0;
            bf16 *pre = j.pre + (int64_t)row * j.ldpre + n;
            bool whole = rows >= STRIP && there;
#pragma unroll
            for (int up = 0; up < (F::GATED ? 2 : 1); up++) {
                uint32_t word[8][2];
                char *strip =
                    strip_buffer<F>(EACH * block + (F::GATED ? 2 * half + up : half), own, ring, full, step, group);
                words_of<F>(word, c, 64 * block + 32 * half + up * UP);
                words_put(strip, word);
                strips_ready();
                strip_out(strip, &m.strip[0], row, n + up * g.across, pre + up * g.across, j.ldpre, rows, cols, whole);
                strips_sent();
            }
        }
#pragma unroll
        for (int i = 0; i < 64; i++) {
            float unused[2];
            c[64 * block + i] =
                prob[i / 2 % 2] * activate<KIND>(j, c[64 * block + i], c[64 * block + UP + i], &unused[0], &unused[1]);
        }
        char *strip = strip_buffer<F>(EACH * block + EACH - 1, own, ring, full, step, group);
        if (there)
            codes_out(p, &m.strip[1], strip, c + 64 * block, row, rows, at.n + 128 * block);
        else
            strips_sent();
    }
}

/* A tile of rows that no expert has. */
template <int AFTER, typename F>
__device__ __forceinline__ void codes_empty(const struct gmm8_job &p, const struct gmm_at &at)
{
    const struct gmm_job &g = p.j.g;
    int cols = max(min(F::NT, g.across - at.n), 0);
    if (AFTER == GMM_DACT && p.j.act != NULL)
        store_zeros((char *)(p.j.act + (int64_t)at.m * p.j.ldact + at.n), p.j.ldact * 2, at.m_valid, cols * 2 / 16);
    if constexpr (AFTER != GMM_ACT) {
        store_empty<AFTER, F>(p.j, at);
    } else {
        for (int half = 0; half < (F::GATED ? 2 : 1); half++)
            store_zeros((char *)(p.j.pre + (int64_t)at.m * p.j.ldpre + at.n + half * g.across), p.j.ldpre * 2,
                        at.m_valid, cols * 2 / 16);
        store_zeros((char *)p.q + (int64_t)at.m * g.across + at.n, g.across, at.m_valid, cols / 16);
        for (int i = (int)threadIdx.x - GROUP; i < cols / 128 * at.m_valid; i += 2 * GROUP)
            p.qs[(int64_t)(at.n / 128 + i / at.m_valid) * p.qs_stride + at.m + i % at.m_valid] = 1.0f;
    }
}

#endif /* HOPPER_CODE */

#endif
