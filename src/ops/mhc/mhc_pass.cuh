/* What Hopper's passes of the boundary share: shapes, places of values in swizzled tiles, bulk copies. Private to ops/mhc. See mhc_pass.cu
 * for the design. */
#ifndef BRAID_OPS_MHC_PASS_CUH
#define BRAID_OPS_MHC_PASS_CUH

#include "ops/cuda/hopper.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/mhc/mhc_sinkhorn.cuh"

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
__device__ __forceinline__ uint2 split_pair(float a, float b)
{
    uint32_t high = pack_bf16(a, b);
    float2 taken = unpack_bf16(high);
    return make_uint2(high, pack_bf16(a - taken.x, b - taken.y));
}

/* What the backward passes are told of a row beforehand is made from these. */
struct record_args {
    const float *stat, *coef, *coef_in, *dcoef, *a_pre, *a_post, *a_res, *beta;
    const float *dpre, *m; /* as norm_bwd_args gives them, where the norm comes first */
    int64_t stat_stride, coef_stride, dcoef_stride, dz_stride, rows, k;
    float *dz, *records;
    int iterations;
    bool profile_d;
};
static inline struct record_args record_args_of(const struct mhc_boundary_bwd_args *b, float *records)
{
    struct record_args a = {};
    a.stat = (const float *)b->stat.data;
    a.coef = (const float *)b->coef.data;
    a.dcoef = (const float *)b->dcoef.data;
    a.a_pre = (const float *)b->a_pre.data;
    a.a_post = (const float *)b->a_post.data;
    a.a_res = (const float *)b->a_res.data;
    a.beta = (const float *)b->beta.data;
    a.stat_stride = b->stat.stride[0];
    a.coef_stride = b->coef.stride[0];
    a.dcoef_stride = present(&b->dcoef) ? b->dcoef.stride[0] : 0;
    a.dz_stride = b->dz.stride[0];
    a.rows = b->dx.dim[0];
    a.k = b->dx.dim[1];
    a.dz = (float *)b->dz.data;
    a.records = records;
    a.iterations = (int)b->rule.iterations;
    a.profile_d = b->rule.profile == MHC_D;
    return a;
}

#if HOPPER_CODE

/* All parts of a box of tensor_map_parts. */
__device__ __forceinline__ void parts_load(void *dst, const CUtensorMap *map, int col, int row, uint64_t *bar) { tma_load_3d(dst, map, col, row, 0, bar); }
__device__ __forceinline__ void parts_store(const CUtensorMap *map, int col, int row, const void *src) { tma_store_3d(map, col, row, 0, src); }
/* Until the stores of this thread have read shared memory. */
__device__ __forceinline__ void stores_read(void)
{
    bulk_commit();
    bulk_wait_read<0>();
}
__device__ __forceinline__ void group_barrier(int group) { named_barrier_of(1 + group, CL_GROUP_THREADS); }

/* 16-byte piece `piece` (of 8) of line `line` of a swizzled tile. */
__device__ __forceinline__ int in_tile(int line, int piece) { return line * CL_ROW + ((piece ^ (line % 8)) << 4); }

#endif /* HOPPER_CODE */

#endif
