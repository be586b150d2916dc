/* What Hopper's passes of the boundary share: shapes, places of values in swizzled tiles, bulk copies. Private to
 * ops/mhc. See mhc_cluster.cu and mhc_pass_bwd.cu for the designs. */
#ifndef BRAID_OPS_MHC_PASS_CUH
#define BRAID_OPS_MHC_PASS_CUH

#include "ops/cuda/hopper.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/mhc/portable/mhc_sinkhorn.cuh"

enum {
    CL_N = 4,                           /* streams */
    CL_LOGITS = CL_N * CL_N + 2 * CL_N, /* 24 */
    CL_COLS = 256,                      /* channels of a block, of every stream */
    CL_GROUPS = 2,                      /* groups of warps, each with tiles of its own */
    CL_WARPS = 8,                       /* of a group */
    CL_GROUP_THREADS = 32 * CL_WARPS,
    CL_WORKERS = CL_GROUPS * CL_GROUP_THREADS,
    CL_THREADS = CL_WORKERS + 128, /* and a warpgroup of helpers: a copier for each group */
    CL_BLOCKS = 128,               /* of a grid, at most: one for each multiprocessor of an H100, but for a few */
    CL_ROW = 128,                  /* bytes of a line of a tile: 64 channels */
};

/* Two numbers as pairs of bf16, high halves and what these leave. */
INLINE uint2 split_pair(float a, float b)
{
    uint32_t high = pack_bf16(a, b);
    float2 taken = unpack_bf16(high);
    return make_uint2(high, pack_bf16(a - taken.x, b - taken.y));
}

/* sum += weight[i] y[i], 8 channels of each stream. */
INLINE void add_streams(const uint4 (&y)[CL_N], const float (&weight)[CL_N], float (&sum)[8])
{
    UNROLLED (i, CL_N) {
        float v[8];
        unpack<bf16>(y[i], v);
        UNROLLED (e, 8)
            sum[e] = fmaf(weight[i], v[e], sum[e]);
    }
}

#if HOPPER_CODE

/* Bit 8 i + e: channel c + e of stream i is kept. */
INLINE uint32_t kept_channels(const struct drop_rule &rule, int64_t d, int64_t row, int c)
{
    struct draw_place at = drop_row_of(rule, row);
    uint32_t kept = 0;
#pragma unroll 1 /* registers */
    for (int i = 0; i < CL_N; i++) {
        float factor[8];
        uint32_t bits = 0;
        drop_factors(rule, at, i * d + c, factor);
        UNROLLED (e, 8)
            bits |= factor[e] != 0 ? 1u << e : 0u;
        kept |= bits << (8 * i);
    }
    return kept;
}
INLINE void group_barrier(int group) { named_barrier_of(1 + group, CL_GROUP_THREADS); }

/* 16-byte piece `piece` (of 8) of line `line` of a swizzled tile. */
INLINE int in_tile(int line, int piece) { return line * CL_ROW + ((piece ^ (line % 8)) << 4); }

#endif /* HOPPER_CODE */

#endif
