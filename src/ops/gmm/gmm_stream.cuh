/* How bf16 operands of gmm reach shared memory, and results leave the tensor cores' accumulators. Operands: a ring of
 * stages of DEPTH = 64 along the depth, filled by cp.async, in a stream that runs on from one tile of the output into
 * the next. Used by gmm_mma.cu.
 *
 * In a stage every row has 128 bytes. An operand whose depth is contiguous in memory has one row for each row (or
 * column) of the tile. One whose rows (or columns) are contiguous lies in panels of 64 of them: 64 rows along the
 * depth, 128 bytes each. The 16-byte chunks of row r are permuted by r % 8: the 128-byte swizzle of the tensor cores,
 * and no two of the eight addresses of an ldmatrix share a bank. */
#ifndef BRAID_OPS_GMM_STREAM_CUH
#define BRAID_OPS_GMM_STREAM_CUH

#include "ops/cuda/ptx.cuh"
#include "ops/gmm/gmm_cuda.cuh"

enum { DEPTH = 64, CHUNK = 8, STEPS = DEPTH / 16, ROW_BYTES = 128, PANEL_BYTES = DEPTH * ROW_BYTES };

/* Sizes of a tile (gmm_tile.h): BM x BN by WARPS_M x WARPS_N warps, each WM x WN of it; constants only. */
template <int TILE> struct shape {
    static constexpr bool LARGE = TILE == GMM_TILE_LARGE;
    static constexpr int BM = LARGE ? 128 : 64, BN = LARGE ? 256 : 128, WARPS_M = 2, WARPS_N = LARGE ? 4 : 2;
    static constexpr int STAGES = 4, BLOCKS = LARGE ? 1 : 2; /* BLOCKS: on one multiprocessor */
    static constexpr int THREADS = 32 * WARPS_M * WARPS_N, WM = BM / WARPS_M, WN = BN / WARPS_N, MI = WM / 16,
                         NI = WN / 8;
    static constexpr int A_BYTES = BM * DEPTH * 2, STAGE_BYTES = (BM + BN) * DEPTH * 2, OUT_BYTES = 16 * WN * 2;
    static constexpr int BYTES = STAGES * STAGE_BYTES + WARPS_M * WARPS_N * OUT_BYTES;
};

/* ---- one operand ----------------------------------------------------------------------------- */

/* How SIZE rows (or columns) of a tile are copied; LONG: the depth is contiguous in memory. Constants only. */
template <int SIZE, int THREADS, bool LONG> struct layout {
    static constexpr int PER_ROW = (LONG ? DEPTH : SIZE) / CHUNK; /* chunks of a row in memory */
    static constexpr int ROWS_AT_ONCE = THREADS / PER_ROW;
    static constexpr int COPIES = SIZE * DEPTH / CHUNK / THREADS; /* by each thread and stage */
    static_assert(COPIES % STEPS == 0, "copies go evenly with the depth steps");
    static_assert(ROWS_AT_ONCE % 8 == 0, "the permutation is the same for all copies of a thread");
};
struct operand {
    const bf16 *from; /* this thread's first chunk of the coming stage */
    int64_t ld;
    int size; /* rows or columns of the tile that exist */
};

/* base: element (0, 0) of the tile, at depth 0. */
template <int SIZE, int THREADS, bool LONG>
__device__ __forceinline__ struct operand operand_at(const bf16 *base, int64_t ld, int size)
{
    typedef layout<SIZE, THREADS, LONG> to;
    struct operand o = {base + threadIdx.x / to::PER_ROW * ld + threadIdx.x % to::PER_ROW * CHUNK, ld, size};
    return o;
}

/* Quarter q of this thread's copies to the stage at `to`; depth: what is left of it from this stage on. */
template <int SIZE, int THREADS, bool LONG>
__device__ __forceinline__ void operand_copy(const struct operand &o, uint32_t to, int q, int depth)
{
    typedef layout<SIZE, THREADS, LONG> at;
    int chunk = threadIdx.x % at::PER_ROW, row = threadIdx.x / at::PER_ROW, c = chunk * CHUNK;
#pragma unroll
    for (int j = 0; j < at::COPIES / STEPS; j++) {
        int i = q * (at::COPIES / STEPS) + j, r = row + i * at::ROWS_AT_ONCE;
        bool there = LONG ? r < o.size && c < depth : c < o.size && r < depth;
        uint32_t panel = LONG ? 0 : chunk / 8 * PANEL_BYTES;
        copy_async16(to + panel + r * ROW_BYTES + ((chunk % 8 ^ row % 8) << 4),
                     o.from + (int64_t)i * at::ROWS_AT_ONCE * o.ld, there);
    }
}

/* ---- the stream of stages -------------------------------------------------------------------- */

struct stream {
    struct operand a, b;
    struct gmm_at at;
    int tile, depth; /* where it lies, and the depth left of it; 0: nothing left at all */
};

/* On to the next tile that has any depth, from in->tile on. */
template <int TILE, int PRODUCT>
__device__ __forceinline__ void stream_open(struct stream *in, const struct gmm_job &p, const struct gmm_table &t)
{
    typedef shape<TILE> S;
    for (in->depth = 0; in->tile < t.total; in->tile += gridDim.x) {
        struct gmm_at at = gmm_find<PRODUCT, S::BM, S::BN>(p, t, in->tile);
        if (at.depth == 0)
            continue;
        in->at = at;
        const bf16 *a = (const bf16 *)p.a + (PRODUCT == GMM_WEIGHT ? at.k_first * p.lda + at.m : at.m * p.lda);
        const bf16 *b = (const bf16 *)p.b + at.expert * p.b_expert +
                        (PRODUCT == GMM_FORWARD ? at.n * p.ldb : at.k_first * p.ldb + at.n);
        in->depth = at.depth;
        in->a = operand_at<S::BM, S::THREADS, PRODUCT != GMM_WEIGHT>(a, p.lda, at.m_valid);
        in->b = operand_at<S::BN, S::THREADS, PRODUCT == GMM_FORWARD>(b, p.ldb, min(S::BN, p.across - at.n));
        return;
    }
}

/* A quarter of a stage. */
template <int TILE, int PRODUCT>
__device__ __forceinline__ void stream_copy(const struct stream &in, uint32_t stage, int quarter)
{
    typedef shape<TILE> S;
    if (in.depth <= 0)
        return;
    operand_copy<S::BM, S::THREADS, PRODUCT != GMM_WEIGHT>(in.a, stage, quarter, in.depth);
    operand_copy<S::BN, S::THREADS, PRODUCT == GMM_FORWARD>(in.b, stage + S::A_BYTES, quarter, in.depth);
}

template <int TILE, int PRODUCT>
__device__ __forceinline__ void stream_advance(struct stream *in, const struct gmm_job &p, const struct gmm_table &t)
{
    if (in->depth <= 0)
        return;
    in->depth -= DEPTH;
    in->a.from += PRODUCT != GMM_WEIGHT ? (int64_t)DEPTH : DEPTH * in->a.ld;
    in->b.from += PRODUCT == GMM_FORWARD ? (int64_t)DEPTH : DEPTH * in->b.ld;
    if (in->depth <= 0) {
        in->tile += gridDim.x;
        stream_open<TILE, PRODUCT>(in, p, t);
    }
}

/* ---- storing --------------------------------------------------------------------------------- */

/* A piece is 16 rows x 64 columns of a tile in the accumulators of one warp: eight blocks of eight columns, of which a
 * lane holds two columns in rows lane / 4 and lane / 4 + 8. r0, n0: where the piece begins in the tile. */
enum { PIECE_BLOCKS = 8, PIECE_BYTES = 16 * 128 };

/* Rows of bf16, through PIECE_BYTES of the warp's own shared memory, so that stores are 16 bytes wide. */
template <int PRODUCT>
__device__ __forceinline__ void store_rows(const struct gmm_job &p, const struct gmm_at &at,
                                           const float c[PIECE_BLOCKS][4], int r0, int n0, char *out)
{
    int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
    bool biased = PRODUCT == GMM_FORWARD && p.bias != NULL && at.expert < p.experts;
    float prob[2] = {1.0f, 1.0f};
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (biased && p.prob != NULL)
            prob[h] = r0 + group + 8 * h < at.m_valid ? p.prob[at.m + r0 + group + 8 * h] : 0.0f;
#pragma unroll
    for (int i = 0; i < PIECE_BLOCKS; i++) {
        int n = at.n + n0 + i * 8 + 2 * pair;
        float bias[2] = {0.0f, 0.0f};
        if (biased && n < p.across) {
            bias[0] = p.bias[(int64_t)at.expert * p.across + n];
            bias[1] = p.bias[(int64_t)at.expert * p.across + n + 1];
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
            *(__nv_bfloat162 *)(out + (group + 8 * h) * 128 + ((i ^ group) << 4) + 4 * pair) =
                __floats2bfloat162_rn(c[i][2 * h] + prob[h] * bias[0], c[i][2 * h + 1] + prob[h] * bias[1]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = i * 4 + lane / 8, chunk = lane % 8, n = at.n + n0 + chunk * CHUNK;
        uint4 v = *(const uint4 *)(out + r * 128 + ((chunk ^ (r % 8)) << 4));
        if (r0 + r < at.m_valid && n < p.across)
            *(uint4 *)((bf16 *)p.c + (int64_t)(at.m + r0 + r) * p.ldc + n) = v;
    }
    __syncwarp();
}

/* fp32 gradients: four lanes fill a sector of 32 bytes. */
__device__ __forceinline__ void store_gradient(const struct gmm_job &p, const struct gmm_at &at,
                                               const float c[PIECE_BLOCKS][4], int r0, int n0)
{
    int lane = threadIdx.x % 32, n = at.n + n0 + 2 * (lane % 4);
    if (p.acc && at.depth == 0)
        return;
    float *rows = (float *)p.c + at.expert * p.c_expert + (int64_t)(at.m + r0 + lane / 4) * p.ldc + n;
    float2 old[2][PIECE_BLOCKS];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < PIECE_BLOCKS; i++) {
            bool there = p.acc && r0 + lane / 4 + 8 * h < at.m_valid && n + 8 * i < p.across;
            old[h][i] = there ? __ldcs((const float2 *)(rows + 8 * h * p.ldc + 8 * i)) : make_float2(0.0f, 0.0f);
        }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < PIECE_BLOCKS; i++)
            if (r0 + lane / 4 + 8 * h < at.m_valid && n + 8 * i < p.across)
                __stcs((float2 *)(rows + 8 * h * p.ldc + 8 * i),
                       make_float2(old[h][i].x + c[i][2 * h], old[h][i].y + c[i][2 * h + 1]));
}

#endif
