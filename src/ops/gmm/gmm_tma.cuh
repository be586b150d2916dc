/* How the grouped products of experts run on Hopper: one block per multiprocessor walks over tiles of the output. One thread
 * copies operands into a ring of stages with bulk copies (TMA); two groups of four warps multiply with wgmma and store.
 *
 *   WIDE    both groups work on one tile of 128 x 256, 64 rows each: fewest bytes copied for a product
 *   LOW     each group has its own tile of 64 x 256, for experts with few rows: while one stores, the other multiplies
 *
 * Operands lie in shared memory in boxes of 64 lines of 128 bytes with the 128-byte swizzle; every bulk copy is one box. A tile
 * belongs to one group whoever runs it, so results do not depend on the number of multiprocessors. */
#ifndef BRAID_OPS_GMM_TMA_CUH
#define BRAID_OPS_GMM_TMA_CUH

#include "ops/cuda/hopper.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/gmm/gmm_cuda.cuh"
extern "C" {
#include "ops/gmm/gmm_form.h"
}

struct gmm_tma_job {
    struct gmm_job g; /* across of ACT and DACT: the width f of the activation */
    enum gmm_after after;
    int kind;  /* ACT, DACT: enum gmm_curve */
    float limit, alpha, offset;
    bf16 *pre, *act; /* ACT writes pre, DACT reads it (may be c); act may be NULL */
    int64_t ldpre, ldact;
    float *part; /* DACT: [column tiles][rows]; NULL: not wanted */
};
enum gmm_curve { GMM_RELU2, GMM_GATE, GMM_CLAMPED_GATE }; /* x sigmoid(alpha x) (up + offset); limits only where clamped */

/* gmm_tma.cu. Whether these kernels take the job: bf16, all rows at multiples of 16 bytes is for the caller to know. */
extern "C" bool gmm_tma_fits(const struct lane *l, const struct gmm_tma_job *j);
extern "C" int gmm_tma(struct lane *l, const struct gmm_tma_job *j, enum gmm_product product, enum gmm_form f);
/* DACT, after it: dprob from part. */
extern "C" int gmm_tma_dprob(struct lane *l, const struct gmm_tma_job *j, enum gmm_form f, float *dprob);

/* Tensor maps: operands, what is stored (STORE, ACT, SUMS), inputs of the activation (ACT, DACT). */
struct gmm_maps {
    CUtensorMap a, b, c, pre;
};

enum { BOX = 64, BOX_BYTES = BOX * 128, GROUP = 128, BLOCK = 3 * GROUP, PIECE = 16 * 128 };

/* Sizes; constants only. OWN: each group has its own tile. A group always has 64 rows of BN columns. */
template <int AFTER, int KIND, int FORM> struct form {
    static constexpr bool OWN = FORM == GMM_LOW, GATED = KIND != GMM_RELU2;
    static constexpr int BM = OWN ? 64 : 128, BN = 256, STAGES = 4;
    static constexpr int NT = AFTER == GMM_ACT && GATED ? BN / 2 : BN; /* columns of the output */
    static constexpr int A_BOXES = BM / BOX, B_BOXES = BN / BOX, STAGE = (A_BOXES + B_BOXES) * BOX_BYTES;
    static constexpr int OUT = 4 * BOX_BYTES, RING = STAGES * STAGE; /* OUT: two boxes of each group */
    static constexpr int BARS = 2 * STAGES * 8, BYTES = RING + OUT + BARS; /* then the table */
    static constexpr int REGS = AFTER == GMM_DACT ? 240 : 232, COPY_REGS = REGS == 240 ? 24 : 40; /* of a thread that multiplies, that copies */
};

#if HOPPER_CODE

/* ---- waiting, copies --------------------------------------------------------------------------------------------- */

__device__ __forceinline__ void box_load(char *to, const CUtensorMap *map, int col, int row, int expert, uint64_t *bar)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
                     smem_address(to)),
                 "l"((uint64_t)map), "r"(smem_address(bar)), "r"(col), "r"(row), "r"(expert)
                 : "memory");
}
/* A box from shared memory, added or stored; what lies outside the matrix is left out. */
template <bool ADD> __device__ __forceinline__ void box_store(const char *from, const CUtensorMap *map, int col, int row, int expert)
{
    if (ADD)
        asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"((uint64_t)map),
                     "r"(smem_address(from)), "r"(col), "r"(row), "r"(expert)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"((uint64_t)map),
                     "r"(smem_address(from)), "r"(col), "r"(row), "r"(expert)
                     : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* What will be read soon comes to the cache. */
__device__ __forceinline__ void box_prefetch(const CUtensorMap *map, int col, int row, int expert)
{
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"((uint64_t)map), "r"(col), "r"(row), "r"(expert) : "memory");
}
template <int LEFT> __device__ __forceinline__ void box_stores_read(void) { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory"); }
__device__ __forceinline__ void group_sync(int group)
{
    if (group == 0)
        named_barrier<1, GROUP>();
    else
        named_barrier<2, GROUP>();
}

/* With a tile each, the groups take turns at multiplying: a barrier's phase tells only the last two of them apart, so no group
 * may wait for copies that lie further ahead. */
__device__ __forceinline__ void turn_wait(int group)
{
    if (group == 0)
        named_barrier<3, 2 * GROUP>();
    else
        named_barrier<4, 2 * GROUP>();
}
__device__ __forceinline__ void turn_give(int group)
{
    if (group == 0)
        asm volatile("bar.arrive 4, %0;" ::"n"(2 * GROUP) : "memory");
    else
        asm volatile("bar.arrive 3, %0;" ::"n"(2 * GROUP) : "memory");
}

/* ---- depth of a tile ---------------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ int steps_of(const struct gmm_at &at) { return (at.depth + BOX - 1) / BOX; }

/* ---- the copying thread --------------------------------------------------------------------------------------------------------- */

template <int PRODUCT, int AFTER, typename F>
__device__ __forceinline__ void copy_step(const CUtensorMap *ma, const CUtensorMap *mb, const struct gmm_job &g, const struct gmm_at &at, int k, char *stage,
                                          uint64_t *full)
{
    constexpr bool WEIGHT = PRODUCT == GMM_WEIGHT, FORWARD = PRODUCT == GMM_FORWARD;
    barrier_expect(full, F::STAGE);
    int depth = at.k_first + k * BOX;
#pragma unroll
    for (int i = 0; i < F::A_BOXES; i++) {
        int col = WEIGHT ? at.m + i * BOX : depth, row = WEIGHT ? depth : at.m + i * BOX;
        box_load(stage + i * BOX_BYTES, ma, col, row, 0, full);
    }
    char *b = stage + F::A_BOXES * BOX_BYTES;
#pragma unroll
    for (int i = 0; i < F::B_BOXES; i++) {
        constexpr int HALF = F::B_BOXES / 2;
        bool up = AFTER == GMM_ACT && F::GATED && i >= HALF;
        int n = at.n + (up ? g.across + (i - HALF) * BOX : i * BOX);
        int col = FORWARD ? depth : n, row = FORWARD ? n : depth, expert = WEIGHT ? 0 : at.expert;
        box_load(b + i * BOX_BYTES, mb, col, row, expert, full);
    }
}

/* What the end of the tile reads of memory, a little with each of the last steps: old gradients, or saved inputs of the
 * activation. */
template <int AFTER, typename F>
__device__ __forceinline__ void prefetch_step(const CUtensorMap *mc, const struct gmm_job &g, const struct gmm_at &at, int left)
{
    constexpr int WIDE = AFTER == GMM_DACT ? 64 : 32, ACROSS = F::NT / WIDE, HALVES = AFTER == GMM_DACT && F::GATED ? 2 : 1;
    constexpr int BOXES = F::A_BOXES * ACROSS * HALVES, STEPS = BOXES < 8 ? BOXES : 8, EACH = BOXES / STEPS;
    static_assert(BOXES % STEPS == 0, "boxes go evenly with the steps");
    if (left > STEPS)
        return;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int box = (STEPS - left) * EACH + i, half = box % HALVES, col = box / HALVES % ACROSS, row = box / HALVES / ACROSS;
        box_prefetch(mc, at.n + col * WIDE + half * g.across, at.m + row * BOX, AFTER == GMM_DACT ? 0 : at.expert);
    }
}

/* ---- multiplying ------------------------------------------------------------------------------------------------------------------ */

/* Lines from `valid` on hold another expert's rows: no part of this sum. Each group clears what it reads. */
template <typename F> __device__ __forceinline__ void clear_lines(char *stage, int valid, int group)
{
    int t = threadIdx.x % GROUP, lines = BOX - valid;
    for (int i = t; i < (1 + F::B_BOXES) * lines * 8; i += GROUP) {
        int box = i / (lines * 8), line = valid + i % (lines * 8) / 8, chunk = i % 8;
        int at = box == 0 ? (F::OWN ? 0 : group) : F::A_BOXES + box - 1;
        *(uint4 *)(stage + at * BOX_BYTES + line * 128 + chunk * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    group_sync(group);
}

__device__ __forceinline__ void release(uint64_t *empty)
{
    if (threadIdx.x % 32 == 0)
        barrier_arrive(empty);
}

/* c = the tile; `step` counts stages since the start of the kernel. last(): while the last products run. */
template <int PRODUCT, typename F, typename LAST>
__device__ __forceinline__ void multiply_tile(float (&c)[F::BN / 2], char *ring, uint64_t *full, uint64_t *empty, uint32_t step, int steps,
                                              int depth, int group, bool more, LAST last)
{
    constexpr int A_MN = PRODUCT == GMM_WEIGHT, B_MN = PRODUCT != GMM_FORWARD;
    uint32_t before = 0;
#pragma unroll
    for (int i = 0; i < F::BN / 2; i++)
        c[i] = 0;
    for (int s = 0; s < steps; s++) {
        uint32_t at = (step + s) % F::STAGES;
        char *stage = ring + at * F::STAGE;
        barrier_wait_bounded(full + at, (step + s) / F::STAGES & 1);
        if (PRODUCT == GMM_WEIGHT && depth - s * BOX < BOX)
            clear_lines<F>(stage, depth - s * BOX, group);
        uint64_t a = wgmma_tile(stage + (F::OWN ? 0 : group) * BOX_BYTES, BOX_BYTES, 1024);
        uint64_t b = wgmma_tile(stage + F::A_BOXES * BOX_BYTES, BOX_BYTES, 1024);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < BOX / 16; k++)
            wgmma<F::BN, A_MN, B_MN>::run(c, a + k * (A_MN ? 2048 : 32) / 16, b + k * (B_MN ? 2048 : 32) / 16, 0);
        wgmma_commit();
        if (s > 0) {
            wgmma_wait<1>();
            release(empty + before);
        }
        before = at;
    }
    if (F::OWN && more)
        turn_give(group);
    last();
    wgmma_wait<0>();
    wgmma_hold(c);
    if (steps > 0)
        release(empty + before);
}

/* ---- storing: pieces of 16 rows x 64 columns, by one warp ------------------------------------------------------------------------------ */

/* A warp's words of a piece, as the accumulators' lanes hold them, to shared memory and from it: word[i][h] has two columns of
 * block i of eight, in row lane / 4 + 8 h. Rows have 128 bytes, their chunks of 16 permuted as bulk copies want it. */
__device__ __forceinline__ void words_put(char *piece, const uint32_t (&word)[8][2])
{
    int lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
    uint32_t line = smem_address(piece) + (row + matrix % 2 * 8) * 128;
#pragma unroll
    for (int i = 0; i < 8; i += 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(line + (((i + matrix / 2) ^ row) << 4)), "r"(word[i][0]),
                     "r"(word[i][1]), "r"(word[i + 1][0]), "r"(word[i + 1][1])
                     : "memory");
}
__device__ __forceinline__ void words_get(uint32_t (&word)[8][2], const char *piece)
{
    int lane = threadIdx.x % 32, row = lane % 8, matrix = lane / 8;
    uint32_t line = smem_address(piece) + (row + matrix % 2 * 8) * 128;
#pragma unroll
    for (int i = 0; i < 8; i += 2)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[i][0]), "=r"(word[i][1]), "=r"(word[i + 1][0]), "=r"(word[i + 1][1])
                     : "r"(line + (((i + matrix / 2) ^ row) << 4))
                     : "memory");
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
__device__ __forceinline__ void piece_fetch(uint4 (&v)[4], const bf16 *from, int64_t ld, int rows, int cols)
{
    int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = i * 4 + lane / 8;
        v[i] = make_uint4(0, 0, 0, 0);
        if (r < rows && chunk * 8 < cols)
            asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w)
                         : "l"(from + r * ld + chunk * 8));
    }
}
__device__ __forceinline__ void piece_fill(char *piece, const uint4 (&v)[4])
{
    int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = i * 4 + lane / 8;
        *(uint4 *)(piece + r * 128 + ((chunk ^ (r % 8)) << 4)) = v[i];
    }
}

/* Row of the tile where the group's rows begin, and this warp's. */
template <typename F> __device__ __forceinline__ int group_row(int group) { return F::OWN ? 0 : group * BOX; }
template <typename F> __device__ __forceinline__ int warp_row(int group) { return group_row<F>(group) + threadIdx.x % GROUP / 32 * 16; }

/* sums += prob * bias (prob may be NULL). halves: matrices of `across` columns in the tile. */
template <typename F>
__device__ __forceinline__ void add_bias(float (&c)[F::BN / 2], const float *bias, const float *prob, const struct gmm_at &at, int halves, int across,
                                         int group)
{
    int lane = threadIdx.x % 32, row = warp_row<F>(group) + lane / 4, half = F::BN / halves;
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

/* Where pieces go on their way to memory: this group's two boxes, in turn. */
struct way_out {
    char *boxes; /* of the group; a warp's piece is a quarter of a box */
    int group, next;
    bool whole; /* all rows of the group's tile exist: whole boxes go by bulk copy. Else warps store the rows there are. */
};
__device__ __forceinline__ struct way_out way_out(char *boxes, int group, bool whole)
{
    struct way_out w = {boxes, group, 0, whole};
    if (!whole) { /* bulk copies of the tile before may still read the boxes */
        if (threadIdx.x % GROUP == 0)
            box_stores_read<0>();
        group_sync(group);
    }
    return w;
}
/* to: where the box begins in memory (row `row` and column `col` of the matrix of the map). */
__device__ __forceinline__ void piece_out(struct way_out &w, const uint32_t (&word)[8][2], const CUtensorMap *map, int row, int col, bf16 *to, int64_t ld,
                                          int rows, int cols)
{
    int t = threadIdx.x % GROUP, warp = t / 32;
    char *box = w.boxes + w.next * BOX_BYTES, *piece = box + warp * PIECE;
    w.next ^= 1;
    if (w.whole) {
        if (t == 0)
            box_stores_read<1>();
        group_sync(w.group);
        words_put(piece, word);
        fence_async_proxy();
        group_sync(w.group);
        if (t == 0)
            box_store<false>(box, map, col, row, 0);
        return;
    }
    __syncwarp();
    words_put(piece, word);
    __syncwarp();
    piece_store(piece, to + warp * 16 * ld, ld, rows - warp * 16, cols);
}

template <typename F>
__device__ __forceinline__ void store_rows(const CUtensorMap *mc, const struct gmm_job &g, const struct gmm_at &at, float (&c)[F::BN / 2], int group,
                                           char *boxes)
{
    if (g.bias != NULL && at.expert < g.experts)
        add_bias<F>(c, g.bias, g.prob, at, 1, g.across, group);
    int first = group_row<F>(group), row = at.m + first;
    struct way_out w = way_out(boxes, group, at.m_valid >= first + BOX);
#pragma unroll
    for (int p = 0; p < F::BN / 64; p++) {
        int n = at.n + p * 64;
        uint32_t word[8][2];
#pragma unroll
        for (int i = 0; i < 16; i++)
            word[i / 2][i % 2] = pack2(c[32 * p + 2 * i], c[32 * p + 2 * i + 1]);
        piece_out(w, word, mc, row, n, (bf16 *)g.c + (int64_t)row * g.ldc + n, g.ldc, at.m_valid - first, g.across - n);
    }
}

/* 1 / (1 + 2^x) without the care for tiny numbers that costs a third of the instructions: 0 and 1 at the ends. */
__device__ __forceinline__ float sigmoid_of_log2(float minus_x)
{
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(minus_x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    return s;
}

/* The activation and its slopes; `up` of a plain one is not read. */
template <int KIND> __device__ __forceinline__ float activate(const struct gmm_tma_job &j, float gate, float up, float *d_gate, float *d_up)
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
template <typename F> __device__ __forceinline__ void row_probs(float (&prob)[2], const struct gmm_job &g, const struct gmm_at &at, int group)
{
    int r = warp_row<F>(group) + threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; h++)
        prob[h] = at.expert == g.experts ? 0.0f : g.prob != NULL && r + 8 * h < at.m_valid ? g.prob[at.m + r + 8 * h] : 1.0f;
}

template <int KIND, typename F>
__device__ __forceinline__ void store_act(const struct gmm_maps &m, const struct gmm_tma_job &j, const struct gmm_at &at, float (&c)[F::BN / 2],
                                          const float (&prob)[2], int group, char *boxes)
{
    constexpr int UP = F::GATED ? F::BN / 4 : 0; /* accumulators from gate to up */
    const struct gmm_job &g = j.g;
    if (g.bias != NULL && at.expert < g.experts)
        add_bias<F>(c, g.bias, NULL, at, F::GATED ? 2 : 1, g.across, group);
    /* A box of gates that reaches past their last column would write over ups. */
    bool columns = !F::GATED || g.across - at.n >= F::NT;
    int first = group_row<F>(group), row = at.m + first, rows = at.m_valid - first;
    struct way_out w = way_out(boxes, group, columns && rows >= BOX);
#pragma unroll
    for (int p = 0; p < F::NT / 64; p++) {
        int n = at.n + p * 64, cols = g.across - n;
        bf16 *pre = j.pre + (int64_t)row * j.ldpre + n;
        uint32_t word[8][2];
#pragma unroll
        for (int i = 0; i < 16; i++)
            word[i / 2][i % 2] = pack2(c[32 * p + 2 * i], c[32 * p + 2 * i + 1]);
        piece_out(w, word, &m.pre, row, n, pre, j.ldpre, rows, cols);
        if (F::GATED) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                word[i / 2][i % 2] = pack2(c[UP + 32 * p + 2 * i], c[UP + 32 * p + 2 * i + 1]);
            piece_out(w, word, &m.pre, row, n + g.across, pre + g.across, j.ldpre, rows, cols);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float v[2], unused[2];
#pragma unroll
            for (int e = 0; e < 2; e++)
                v[e] = prob[i % 2] * activate<KIND>(j, c[32 * p + 2 * i + e], c[UP + 32 * p + 2 * i + e], &unused[0], &unused[1]);
            word[i / 2][i % 2] = pack2(v[0], v[1]);
        }
        piece_out(w, word, &m.c, row, n, (bf16 *)g.c + (int64_t)row * g.ldc + n, g.ldc, rows, cols);
    }
}

/* What DACT reads of a piece, asked for before it is needed. */
struct saved {
    uint4 gate[4], up[4];
};
template <typename F>
__device__ __forceinline__ void saved_fetch(struct saved *s, const struct gmm_tma_job &j, const struct gmm_at &at, int piece, int group)
{
    int r0 = warp_row<F>(group), n0 = at.n + piece * 64;
    asm volatile("" : "+r"(n0));
    const bf16 *pre = j.pre + (int64_t)(at.m + r0) * j.ldpre + n0;
    int rows = at.expert < j.g.experts ? at.m_valid - r0 : 0;
    piece_fetch(s->gate, pre, j.ldpre, rows, j.g.across - n0);
    if (F::GATED)
        piece_fetch(s->up, pre + j.g.across, j.ldpre, rows, j.g.across - n0);
}

/* A piece: (gate, up) become their gradients, act the activation times the probability. */
template <int KIND>
__device__ __forceinline__ void dact_words(const struct gmm_tma_job &j, const float *c, const float (&prob)[2], uint32_t (&gates)[8][2],
                                           uint32_t (&ups)[8][2], uint32_t (&act)[8][2], float (&sum)[2])
{
#pragma unroll
    for (int i = 0; i < 8; i++)
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

template <int KIND, typename F>
__device__ __forceinline__ void store_dact(const struct gmm_tma_job &j, const struct gmm_at &at, const float (&c)[F::BN / 2], const float (&prob)[2],
                                           struct saved *s, int group, char *boxes)
{
    constexpr int PIECES = F::NT / 64;
    const struct gmm_job &g = j.g;
    int lane = threadIdx.x % 32, r0 = warp_row<F>(group), rows = at.m_valid - r0;
    char *gates = boxes + threadIdx.x % GROUP / 32 * PIECE, *ups = gates + BOX_BYTES;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int n0 = at.n + p * 64;
        asm volatile("" : "+r"(n0)); /* addresses of one piece at a time, or they would fill the registers */
        int cols = g.across - n0;
        uint32_t gate[8][2], up[8][2], act[8][2];
        __syncwarp();
        piece_fill(gates, s->gate);
        if (F::GATED)
            piece_fill(ups, s->up);
        __syncwarp();
        words_get(gate, gates);
        if (F::GATED)
            words_get(up, ups);
        dact_words<KIND>(j, &c[32 * p], prob, gate, up, act, sum);
        __syncwarp();
        words_put(gates, gate);
        if (F::GATED)
            words_put(ups, up);
        __syncwarp();
        if (p + 1 < PIECES)
            saved_fetch<F>(s, j, at, p + 1, group);
        bf16 *dpre = (bf16 *)g.c + (int64_t)(at.m + r0) * g.ldc + n0;
        piece_store(gates, dpre, g.ldc, rows, cols);
        if (F::GATED)
            piece_store(ups, dpre + g.across, g.ldc, rows, cols);
        if (j.act != NULL) {
            __syncwarp();
            words_put(gates, act);
            __syncwarp();
            piece_store(gates, j.act + (int64_t)(at.m + r0) * j.ldact + n0, j.ldact, rows, cols);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
        int r = lane / 4 + 8 * h;
        if (j.part != NULL && lane % 4 == 0 && r < rows && at.n < g.across)
            j.part[(int64_t)(at.n / F::NT) * g.rows + at.m + r0 + r] = sum[h];
    }
    __syncwarp();
}

/* fp32 sums: boxes of 64 rows x 32 columns through two buffers of the group, added by the copy engine. Each element is added
 * to once. Odd rows write their blocks in another order, so that no bank is hit twice. */
template <bool ADD, typename F>
__device__ __forceinline__ void store_sums(const CUtensorMap *mc, const struct gmm_at &at, const float (&c)[F::BN / 2], int group, char *boxes)
{
    int t = threadIdx.x % GROUP, lane = t % 32, row = lane / 4, pair = lane % 4, odd = row & 1;
#pragma unroll
    for (int p = 0; p < F::BN / 32; p++) {
        char *box = boxes + p % 2 * BOX_BYTES;
        if (t == 0)
            box_stores_read<1>();
        group_sync(group);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int d = 4 * (p * 4 + i) + 2 * h;
                float2 low = make_float2(c[d], c[d + 1]), high = make_float2(c[d + 8], c[d + 9]);
                char *line = box + (t / 32 * 16 + row + 8 * h) * 128 + pair % 2 * 8;
                int first = 2 * (i + 2 * odd) + pair / 2, second = 2 * (i + 2 - 2 * odd) + pair / 2;
                *(float2 *)(line + ((first ^ row) << 4)) = odd ? high : low;
                *(float2 *)(line + ((second ^ row) << 4)) = odd ? low : high;
            }
        fence_async_proxy();
        group_sync(group);
        if (t == 0)
            box_store<ADD>(box, mc, at.n + p * 32, at.m + group_row<F>(group), at.expert);
    }
}

#endif /* HOPPER_CODE */

/* ---- the kernel --------------------------------------------------------------------------------------------------------------------------- */

template <int PRODUCT, int AFTER, int KIND, int FORM>
__global__ void __launch_bounds__(BLOCK, 1)
    tma_product(const __grid_constant__ struct gmm_maps m, const __grid_constant__ struct gmm_tma_job j)
{
#if HOPPER_CODE
    typedef form<AFTER, KIND, FORM> F;
    extern __shared__ __align__(1024) char shared[];
    uint64_t *full = (uint64_t *)(shared + F::RING + F::OUT), *empty = full + F::STAGES;
    int first = (int)blockIdx.x, stride = (int)gridDim.x;
    struct gmm_table t = gmm_table_make<PRODUCT, F::BM, F::NT>(j.g, (int *)(shared + F::BYTES));
    if (threadIdx.x == 0) {
        if (smem_address(shared) % 1024 != 0)
            __trap();
        for (int s = 0; s < F::STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, F::OWN ? 4 : 8); /* warps that read a stage */
        }
        barrier_init_done();
        tma_prefetch(&m.a);
        tma_prefetch(&m.b);
    }
    __syncthreads();
    int role = threadIdx.x / GROUP;
    if (role == 0) {
        registers_down<F::COPY_REGS>();
        if (threadIdx.x == 0) {
            uint32_t step = 0;
            for (int tile = first; tile < t.total; tile += stride) {
                struct gmm_at at = gmm_find<PRODUCT, F::BM, F::NT>(j.g, t, tile);
                for (int k = 0, steps = steps_of(at); k < steps; k++, step++) {
                    uint32_t s = step % F::STAGES;
                    barrier_wait_bounded(empty + s, (step / F::STAGES & 1) ^ 1);
                    copy_step<PRODUCT, AFTER, F>(&m.a, &m.b, j.g, at, k, shared + s * F::STAGE, full + s);
                    if constexpr (AFTER == GMM_DACT || AFTER == GMM_SUMS)
                        if (AFTER == GMM_DACT || j.g.acc)
                            prefetch_step<AFTER, F>(AFTER == GMM_DACT ? &m.pre : &m.c, j.g, at, steps - k);
                }
            }
        }
    } else {
        registers_up<F::REGS>();
        int group = role - 1, own = 0;
        char *boxes = shared + F::RING + group * 2 * BOX_BYTES;
        uint32_t step = 0;
        /* Where the next tile is takes a while to find: that goes on beside the last products, if registers allow. */
        constexpr bool EARLY = !F::OWN && AFTER != GMM_DACT;
        struct gmm_at next = gmm_find<PRODUCT, F::BM, F::NT>(j.g, t, first);
        for (int tile = first; tile < t.total; tile += stride, own ^= 1) {
            struct gmm_at at = EARLY ? next : gmm_find<PRODUCT, F::BM, F::NT>(j.g, t, tile);
            int steps = steps_of(at);
            if (!F::OWN || own == group) {
                float c[F::BN / 2], prob[2];
                struct saved s;
                if (AFTER == GMM_ACT || AFTER == GMM_DACT)
                    row_probs<F>(prob, j.g, at, group);
                if (F::OWN && tile != first)
                    turn_wait(group);
                multiply_tile<PRODUCT, F>(c, shared, full, empty, step, steps, at.depth, group, tile + stride < t.total, [&] {
                    if (AFTER == GMM_DACT)
                        saved_fetch<F>(&s, j, at, 0, group);
                    if (EARLY && tile + stride < t.total)
                        next = gmm_find<PRODUCT, F::BM, F::NT>(j.g, t, tile + stride);
                });
                if constexpr (AFTER == GMM_STORE)
                    store_rows<F>(&m.c, j.g, at, c, group, boxes);
                else if constexpr (AFTER == GMM_ACT)
                    store_act<KIND, F>(m, j, at, c, prob, group, boxes);
                else if constexpr (AFTER == GMM_DACT)
                    store_dact<KIND, F>(j, at, c, prob, &s, group, boxes);
                else if (!j.g.acc)
                    store_sums<false, F>(&m.c, at, c, group, boxes);
                else if (steps > 0)
                    store_sums<true, F>(&m.c, at, c, group, boxes);
            }
            step += (uint32_t)steps;
        }
        if (AFTER != GMM_DACT && threadIdx.x % GROUP == 0)
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
#endif
}

#endif
