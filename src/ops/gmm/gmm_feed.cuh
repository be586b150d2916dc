/* Inside of gmm_tma.cu: sizes of tiles and stages, the copying thread, the multiplying groups.
 *
 * Both groups of warps work on one tile of 128 x 256, 64 rows each. Operands lie in shared memory in boxes of 64 lines
 * of 128 bytes with the 128-byte swizzle; every bulk copy is one box. After a tile stages are lent to its results
 * (gmm_store.cuh). A tile is computed by one block in the same way on every multiprocessor, so results do not depend on
 * their number. */
#ifndef BRAID_OPS_GMM_FEED_CUH
#define BRAID_OPS_GMM_FEED_CUH

#include "ops/cuda/ptx.cuh"
#include "ops/gmm/gmm_tma.cuh"

/* Tensor maps: operands and what is read beside them (DACT: inputs of the activation; SUMS: old gradients), in boxes of
 * 64 rows; what is stored, in strips of 16 rows: c (SUMS: rows cut into lines of 32 columns), or pre (ACT, DACT: its
 * gradient) and the activation. */
struct gmm_maps {
    CUtensorMap a, b, old, strip[2];
};

/* gmm_tma.cu. [experts, rows, cols] with this stride between rows (elements; FP8 codes too), in boxes of so many lines
 * of 128 bytes; the fp32 sums of a weight gradient, in strips. */
extern "C" int gmm_map_make(struct lane *l, CUtensorMap *map, const void *data, enum dtype type, int64_t experts,
                            int64_t rows, int64_t cols, int64_t stride, int lines);
extern "C" int gmm_sums_map(struct lane *l, CUtensorMap *map, const struct gmm_job *g);
/* What is stored. */
extern "C" int gmm_result_maps(struct lane *l, struct gmm_maps *m, const struct gmm_tma_job *j);

enum { BOX = 64, BOX_BYTES = BOX * 128, GROUP = 128, BLOCK = 3 * GROUP, STRIP = 16, PIECE = STRIP * 128 };

/* Sizes; constants only. A group has 64 rows of BN columns. LENT: stages lent to results after a tile. */
template <int AFTER, int KIND> struct form {
    static constexpr bool GATED = KIND != GMM_RELU2;
    static constexpr int BM = GMM_FORM_ROWS, BN = GMM_FORM_COLS, STAGES = 4;
    static constexpr int NT = AFTER == GMM_ACT && GATED ? BN / 2 : BN; /* columns of the output */
    static constexpr int A_BOXES = BM / BOX, B_BOXES = BN / BOX, STAGE = (A_BOXES + B_BOXES) * BOX_BYTES;
    static constexpr int OUT = 4 * BOX_BYTES, RING = STAGES * STAGE; /* OUT: two boxes of each group */
    /* barriers, number of tiles; then the table */
    static constexpr int BARS = 2 * STAGES * 8, BYTES = RING + OUT + BARS + 16;
    /* of a thread that multiplies, that copies */
    static constexpr int REGS = AFTER == GMM_DACT && KIND == GMM_CLAMPED_GATE ? 240 : 232, COPY_REGS = 504 - 2 * REGS;
    static constexpr int LENT = AFTER == GMM_DACT ? NT / 64 : 1;
};

#if HOPPER_CODE

/* ---- where a tile is ------------------------------------------------------------------------- */

template <int PRODUCT, typename F>
__device__ __forceinline__ struct gmm_at tile_at(const struct gmm_job &g, const struct gmm_table &t, int tile)
{
    return gmm_find<PRODUCT, F::BM, F::NT>(g, t, tile);
}
__device__ __forceinline__ int steps_of(const struct gmm_at &at) { return (at.depth + BOX - 1) / BOX; }

/* ---- the copying thread ---------------------------------------------------------------------- */

template <int PRODUCT, int AFTER, typename F>
__device__ __forceinline__ void copy_step(const CUtensorMap *ma, const CUtensorMap *mb, const struct gmm_job &g,
                                          const struct gmm_at &at, int k, char *stage, uint64_t *full)
{
    constexpr bool WEIGHT = PRODUCT == GMM_WEIGHT, FORWARD = PRODUCT == GMM_FORWARD;
    barrier_expect(full, F::STAGE);
    int depth = at.k_first + k * BOX;
#pragma unroll
    for (int i = 0; i < F::A_BOXES; i++) {
        int col = WEIGHT ? at.m + i * BOX : depth, row = WEIGHT ? depth : at.m + i * BOX;
        tma_load_3d(stage + i * BOX_BYTES, ma, col, row, 0, full);
    }
    char *b = stage + F::A_BOXES * BOX_BYTES;
#pragma unroll
    for (int i = 0; i < F::B_BOXES; i++) {
        constexpr int HALF = F::B_BOXES / 2;
        bool up = AFTER == GMM_ACT && F::GATED && i >= HALF;
        int n = at.n + (up ? g.across + (i - HALF) * BOX : i * BOX);
        int col = FORWARD ? depth : n, row = FORWARD ? n : depth, expert = WEIGHT ? 0 : at.expert;
        tma_load_3d(b + i * BOX_BYTES, mb, col, row, expert, full);
    }
}

/* What the end of the tile reads of memory, a little with each of the last steps: old gradients, or saved inputs of the
 * activation. */
template <int AFTER, typename F>
__device__ __forceinline__ void prefetch_step(const CUtensorMap *old, const struct gmm_job &g, const struct gmm_at &at,
                                              int left)
{
    constexpr int WIDE = AFTER == GMM_DACT ? 64 : 32, ACROSS = F::NT / WIDE,
                  HALVES = AFTER == GMM_DACT && F::GATED ? 2 : 1;
    constexpr int BOXES = F::A_BOXES * ACROSS * HALVES, STEPS = BOXES < 8 ? BOXES : 8, EACH = BOXES / STEPS;
    static_assert(BOXES % STEPS == 0, "boxes go evenly with the steps");
    if (left > STEPS)
        return;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int box = (STEPS - left) * EACH + i, half = box % HALVES, col = box / HALVES % ACROSS,
            row = box / HALVES / ACROSS;
        tma_prefetch_3d(old, at.n + col * WIDE + half * g.across, at.m + row * BOX, AFTER == GMM_DACT ? 0 : at.expert);
    }
}

/* A stage for results. DACT finds the saved inputs of the activation there, 64 columns of them: boxes of gates of both
 * groups, then of ups. */
template <int AFTER, typename F>
__device__ __forceinline__ void lend_stage(const CUtensorMap *pre, const struct gmm_job &g, const struct gmm_at &at,
                                           int piece, char *stage, uint64_t *full)
{
    if (AFTER != GMM_DACT) {
        barrier_arrive(full);
        return;
    }
    constexpr int BOXES = F::A_BOXES * (F::GATED ? 2 : 1);
    barrier_expect(full, BOXES * BOX_BYTES);
#pragma unroll
    for (int i = 0; i < BOXES; i++)
        tma_load_3d(stage + i * BOX_BYTES, pre, at.n + piece * 64 + i / F::A_BOXES * g.across,
                    at.m + i % F::A_BOXES * BOX, 0, full);
}

/* ---- multiplying ----------------------------------------------------------------------------- */

/* Lines from `valid` on hold another expert's rows: no part of this sum. Both groups read them, and clear them
 * together. */
template <typename F> __device__ __forceinline__ void clear_lines(char *stage, int valid)
{
    int lines = BOX - valid;
    for (int i = (int)threadIdx.x - GROUP; i < (F::A_BOXES + F::B_BOXES) * lines * 8; i += 2 * GROUP) {
        int box = i / (lines * 8), line = valid + i % (lines * 8) / 8, chunk = i % 8;
        *(uint4 *)(stage + box * BOX_BYTES + line * 128 + chunk * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    named_barrier<1, 2 * GROUP>();
}

/* This warp is done with a stage that was multiplied. Where its lanes also wrote or read there, each arrives for
 * itself. */
__device__ __forceinline__ void release(uint64_t *empty)
{
    if (threadIdx.x % 32 == 0)
        barrier_arrive_for(empty, 32);
}

/* The last stage with results of the tile before goes back when bulk copies have read it. */
template <typename F> __device__ __forceinline__ void release_lent(uint64_t *empty, uint32_t step, bool &owed)
{
    if (!owed)
        return;
    if (threadIdx.x % 32 == 0)
        bulk_wait_read<0>();
    __syncwarp();
    barrier_arrive(empty + (step - 1) % F::STAGES);
    owed = false;
}

/* A group none of whose rows exist: it gives back all stages of the tile, lent ones too, and the other group has the
 * tensor cores to itself. */
template <typename F>
__device__ __forceinline__ void pass_tile(uint64_t *full, uint64_t *empty, uint32_t step, int steps, bool &owed)
{
    for (int s = 0; s < steps; s++) {
        uint32_t at = (step + s) % F::STAGES;
        barrier_wait_bounded(full + at, (step + s) / F::STAGES & 1);
        if (s == 0)
            release_lent<F>(empty, step, owed);
        __syncwarp(); /* all lanes have seen it: after the release its barrier may go on twice */
        release(empty + at);
    }
}

/* c = the tile; `step` counts stages since the start of the kernel. last(): while the last products run. owed: the
 * stage before `step` still holds results. A tile without steps leaves c as it is. */
template <int PRODUCT, typename F, typename LAST>
__device__ __forceinline__ void multiply_tile(float (&c)[F::BN / 2], char *ring, uint64_t *full, uint64_t *empty,
                                              uint32_t step, int steps, int depth, int group, bool &owed, LAST last)
{
    constexpr int A_MN = PRODUCT == GMM_WEIGHT, B_MN = PRODUCT != GMM_FORWARD;
    uint32_t before = 0;
    for (int s = 0; s < steps; s++) {
        uint32_t at = (step + s) % F::STAGES;
        char *stage = ring + at * F::STAGE;
        barrier_wait_bounded(full + at, (step + s) / F::STAGES & 1);
        if (PRODUCT == GMM_WEIGHT && depth - s * BOX < BOX)
            clear_lines<F>(stage, depth - s * BOX);
        uint64_t a = wgmma_tile(stage + group * BOX_BYTES, BOX_BYTES, 1024);
        uint64_t b = wgmma_tile(stage + F::A_BOXES * BOX_BYTES, BOX_BYTES, 1024);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < BOX / 16; k++)
            wgmma<F::BN, A_MN, B_MN>::run(c, a + k * (A_MN ? 2048 : 32) / 16, b + k * (B_MN ? 2048 : 32) / 16,
                                          s + k == 0);
        wgmma_commit();
        if (s > 0) {
            wgmma_wait<1>();
            release(empty + before);
        } else {
            release_lent<F>(empty, step, owed);
        }
        before = at;
    }
    last();
    wgmma_wait<0>();
    wgmma_hold(c);
    if (steps > 0)
        barrier_arrive(empty + before); /* lines of it may have been cleared */
}

#endif /* HOPPER_CODE */

#endif
