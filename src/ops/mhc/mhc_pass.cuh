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

#if HOPPER_CODE

__device__ __forceinline__ void bulk_load(void *dst, const void *src, uint32_t bytes, uint64_t *bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address(dst)), "l"(src),
                 "r"(bytes), "r"(smem_address(bar))
                 : "memory");
}
__device__ __forceinline__ void bulk_store(void *dst, const void *src, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(smem_address(src)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void tile_store(const CUtensorMap *map, int col, int row, const void *src)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"((uint64_t)map), "r"(smem_address(src)), "r"(col),
                 "r"(row)
                 : "memory");
}
/* The same of tensor_map_parts, all parts of the box. */
__device__ __forceinline__ void parts_load(void *dst, const CUtensorMap *map, int col, int row, uint64_t *bar)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(dst)),
                 "l"((uint64_t)map), "r"(smem_address(bar)), "r"(col), "r"(row), "r"(0)
                 : "memory");
}
__device__ __forceinline__ void parts_store(const CUtensorMap *map, int col, int row, const void *src)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"((uint64_t)map), "r"(smem_address(src)), "r"(col),
                 "r"(row), "r"(0)
                 : "memory");
}
/* Until the stores of this thread have read shared memory. */
__device__ __forceinline__ void stores_read(void)
{
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void group_barrier(int group)
{
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"((int)CL_GROUP_THREADS) : "memory");
}

/* 16-byte piece `piece` (of 8) of line `line` of a swizzled tile. */
__device__ __forceinline__ int in_tile(int line, int piece) { return line * CL_ROW + ((piece ^ (line % 8)) << 4); }

#endif /* HOPPER_CODE */

#endif
