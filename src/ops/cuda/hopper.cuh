/* Hopper's own instructions as small functions: mbarrier, bulk tensor copies (TMA), wgmma, named barriers, register
 * budgets. Only for sm_90a; callers guard kernels with HOPPER_CODE and launch them when cuda_of(lane)->hopper.
 *
 * Shared-memory tiles are what a bulk copy of a box 64 elements (128 bytes) wide with the 128-byte swizzle leaves:
 * lines of 128 bytes, 8 lines to a swizzle atom of 1024 bytes, tiles aligned to 1024 bytes.
 *   K-major operand: a line is 64 values along K of one row.   step of 16 along K: +32 bytes
 *   MN-major operand: a line is 64 values along M or N of one k. step of 16 along K: +2048 bytes; blocks of 64 along M
 *   or N follow each other, each of K lines. */
#ifndef BRAID_OPS_CUDA_HOPPER_CUH
#define BRAID_OPS_CUDA_HOPPER_CUH

#include "ops/cuda/kernel.cuh"

#include <cuda.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_CODE 1
#else
#define HOPPER_CODE 0
#endif

/* A row-major matrix of bf16 [rows, cols] with this stride (elements), read in boxes of box_rows x 64 columns. Elements
 * outside read as 0. Base and stride must be multiples of 16 bytes. */
int tensor_map_2d(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int64_t stride,
                  int box_rows);
/* A row is `parts` pieces of cols; boxes of box_cols columns of box_rows rows of all parts, a row's lines one after the
 * other: [parts][box_rows][box_cols / 64] lines. cols and box_cols: multiples of 64. */
int tensor_map_slices(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t parts, int64_t cols,
                      int64_t stride, int box_rows, int box_cols);
/* The same, but a block of 64 columns after the other: [box_cols / 64][parts][box_rows] lines. cols and box_cols:
 * multiples of 64. */
int tensor_map_blocks(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t parts, int64_t cols,
                      int64_t stride, int box_rows, int box_cols);
/* A tensor [batch, row, head, channel] of bf16 with adjacent channels, in boxes of box_rows rows x 64 channels of one
 * head: tma_load_4d at (channel, row, head, batch). Base and strides must be multiples of 16 bytes. */
int tensor_map_heads(struct lane *l, CUtensorMap *map, const struct tensor *t, int box_rows);

#if HOPPER_CODE

__device__ __forceinline__ uint32_t smem_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- mbarrier -------------------------------------------------------------------------------- */

__device__ __forceinline__ void barrier_init(uint64_t *bar, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals));
}
/* After barrier_init, before anyone else uses them. */
__device__ __forceinline__ void barrier_init_done(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Threads that wait see everything that this thread did before. Where the threads of a warp hand over what each of them
 * wrote, each arrives: one lane after a __syncwarp would do, but compute-sanitizer's racecheck does not see that it
 * acts for the others, and in the passes of ops/mhc it was not faster. */
__device__ __forceinline__ void barrier_arrive(uint64_t *bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}
/* The same as so many arrivals: for threads that have nothing of their own to hand over. */
__device__ __forceinline__ void barrier_arrive_for(uint64_t *bar, uint32_t threads)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t *bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t *bar, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra again;\n"
                 "over:\n"
                 "}" ::"r"(smem_address(bar)),
                 "r"(parity)
                 : "memory");
}

/* The same, but a wait that cannot end is an error, not a hang. */
__device__ __forceinline__ void barrier_wait_bounded(uint64_t *bar, uint32_t parity)
{
    uint32_t done = 0;
#pragma unroll 1
    for (int polls = 0; polls < 1 << 24; polls++) {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(done)
                     : "r"(smem_address(bar)), "r"(parity)
                     : "memory");
        if (done != 0)
            return;
    }
    __trap();
}

/* ---- bulk tensor copies ---------------------------------------------------------------------- */

__device__ __forceinline__ void tma_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"((uint64_t)map) : "memory");
}
/* Box at (row, col) of the matrix to shared memory; arrives on bar with its bytes. */
__device__ __forceinline__ void tma_load_2d(void *dst, const CUtensorMap *map, int col, int row, uint64_t *bar)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            smem_address(dst)),
        "l"((uint64_t)map), "r"(smem_address(bar)), "r"(col), "r"(row)
        : "memory");
}
/* The same of a map with three dimensions: at (part, row, col). */
__device__ __forceinline__ void tma_load_3d(void *dst, const CUtensorMap *map, int col, int row, int part,
                                            uint64_t *bar)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(smem_address(dst)),
        "l"((uint64_t)map), "r"(smem_address(bar)), "r"(col), "r"(row), "r"(part)
        : "memory");
}
/* The same of a map with four dimensions, such as tensor_map_heads: at (batch, head, row, col). */
__device__ __forceinline__ void tma_load_4d(void *dst, const CUtensorMap *map, int col, int row, int head, int batch,
                                            uint64_t *bar)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
                 "%6}], [%2];" ::"r"(smem_address(dst)),
                 "l"((uint64_t)map), "r"(smem_address(bar)), "r"(col), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
/* All parts of a box of tensor_map_slices: at (row, line), where a line is 64 columns. */
__device__ __forceinline__ void tma_load_slice(void *dst, const CUtensorMap *map, int line, int row, uint64_t *bar)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
                 "%3}], [%2];" ::"r"(smem_address(dst)),
                 "l"((uint64_t)map), "r"(smem_address(bar)), "r"(0), "r"(line), "r"(row)
                 : "memory");
}
/* The same of tensor_map_blocks. */
__device__ __forceinline__ void tma_load_blocks(void *dst, const CUtensorMap *map, int line, int row, uint64_t *bar)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %5, %3, "
                 "%4}], [%2];" ::"r"(smem_address(dst)),
                 "l"((uint64_t)map), "r"(smem_address(bar)), "r"(0), "r"(line), "r"(row)
                 : "memory");
}
/* What will be read soon comes to the cache. */
__device__ __forceinline__ void tma_prefetch_3d(const CUtensorMap *map, int col, int row, int part)
{
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"((uint64_t)map), "r"(col),
                 "r"(row), "r"(part)
                 : "memory");
}
/* The box of tma_load_slice. */
__device__ __forceinline__ void tma_prefetch_slice(const CUtensorMap *map, int line, int row)
{
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %1}];" ::"l"((uint64_t)map), "r"(0),
                 "r"(line), "r"(row)
                 : "memory");
}
/* Bytes as they lie in memory: addresses and sizes are multiples of 16. */
__device__ __forceinline__ void bulk_load(void *dst, const void *src, uint32_t bytes, uint64_t *bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(dst)),
                 "l"(src), "r"(bytes), "r"(smem_address(bar))
                 : "memory");
}

/* Boxes from shared memory, stored or added; what lies outside is left out. Stores belong to the thread that asks for
 * them, in groups that bulk_commit ends. */
__device__ __forceinline__ void tma_store_2d(const CUtensorMap *map, int col, int row, const void *src)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"((uint64_t)map),
                 "r"(smem_address(src)), "r"(col), "r"(row)
                 : "memory");
}
__device__ __forceinline__ void tma_store_slice(const CUtensorMap *map, int line, int row, const void *src)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %2}], [%1];" ::"l"((uint64_t)map),
        "r"(smem_address(src)), "r"(0), "r"(line), "r"(row)
        : "memory");
}
__device__ __forceinline__ void tma_store_blocks(const CUtensorMap *map, int line, int row, const void *src)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %4, %2, %3}], [%1];" ::"l"((uint64_t)map),
        "r"(smem_address(src)), "r"(0), "r"(line), "r"(row)
        : "memory");
}
/* Written once and not read again soon: the cache lets go of it first. */
__device__ __forceinline__ uint64_t cache_goes_first(void)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void tma_store_3d_once(const CUtensorMap *map, int col, int row, int part, const void *src)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;" ::"l"(
            (uint64_t)map),
        "r"(smem_address(src)), "r"(col), "r"(row), "r"(part), "l"(cache_goes_first())
        : "memory");
}
/* Box of a map with four dimensions, whose rows are cut into lines: at (part, row, line). */
__device__ __forceinline__ void tma_store_4d_once(const CUtensorMap *map, int line, int row, int part, const void *src)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(
            (uint64_t)map),
        "r"(smem_address(src)), "r"(0), "r"(line), "r"(row), "r"(part), "l"(cache_goes_first())
        : "memory");
}
__device__ __forceinline__ void tma_add_4d(const CUtensorMap *map, int line, int row, int part, const void *src)
{
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            (uint64_t)map),
        "r"(smem_address(src)), "r"(0), "r"(line), "r"(row), "r"(part)
        : "memory");
}
__device__ __forceinline__ void bulk_store(void *dst, const void *src, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(smem_address(src)),
                 "r"(bytes)
                 : "memory");
}
/* Adds fp32 values to those in memory. */
__device__ __forceinline__ void bulk_add(float *dst, const float *src, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
                 "r"(smem_address(src)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit(void) { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* Until all but the latest LEFT groups of this thread have read shared memory; or are done. */
template <int LEFT> __device__ __forceinline__ void bulk_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
template <int LEFT> __device__ __forceinline__ void bulk_wait(void)
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* Ordinary writes to shared memory become visible to bulk copies and wgmma; then a barrier. */
__device__ __forceinline__ void fence_async_proxy(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* ---- turns: blocks that work on the same memory one after the other -------------------------- */

/* Until *turn has come to mine: what the blocks before did to memory, by stores or bulk copies, is visible; to bulk
 * copies after turn_taken, also to those of another thread that this one hands over to by a barrier. The blocks before
 * must have begun before this one, or the wait may never end. */
__device__ __forceinline__ void turn_wait(const int *turn, int mine)
{
    int now;
    for (;;) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
        if (now >= mine)
            break;
        __nanosleep(32);
    }
}
__device__ __forceinline__ void turn_taken(void) { asm volatile("fence.proxy.async.global;" ::: "memory"); }
/* The next one's turn, after bulk_wait<0>. */
__device__ __forceinline__ void turn_pass(int *turn)
{
    asm volatile("fence.proxy.async.global;\n"
                 "red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn)
                 : "memory");
}

/* ---- clusters: blocks that see each other's shared memory (LAUNCH_CLUSTER) ------------------- */

__device__ __forceinline__ uint32_t cluster_rank(void)
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* All threads of all blocks of the cluster. Before the first use of another block's memory, and before a block that
 * others may still write to ends. */
__device__ __forceinline__ void cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/* The address of the same variable in the block of that rank, for cluster_send. */
__device__ __forceinline__ uint32_t smem_address_in(const void *p, uint32_t rank)
{
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_address(p)), "r"(rank));
    return there;
}
/* 16 bytes to shared memory of a block of the cluster; arrives on bar, in the same block, with its bytes. The cluster
 * has two blocks at least. */
__device__ __forceinline__ void cluster_send(uint32_t dst, float4 v, uint32_t bar)
{
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(dst),
        "r"(bar), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
        : "memory");
}

/* One arrival on a barrier of a block of the cluster, by its address there (smem_address_in). For "this room may be
 * written again": what this thread has read of its own shared memory, it has read. It does not carry writes to the
 * other block, for which there is cluster_send (with .release.cluster it would, but that waits for all of the thread's
 * stores to memory). */
__device__ __forceinline__ void cluster_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* ---- barriers of part of a block, register budgets ------------------------------------------- */

template <int ID, int THREADS> __device__ __forceinline__ void named_barrier(void)
{
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
__device__ __forceinline__ void named_barrier_of(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/* Without waiting. */
__device__ __forceinline__ void named_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int N> __device__ __forceinline__ void registers_down(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_up(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- shared memory, by address --------------------------------------------------------------- */

/* The other way round of load_matrices (ptx.cuh). */
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

/* Each 8 x 8 matrix transposed: register column i goes to the row at lane i's address. */
__device__ __forceinline__ void store_matrices_t(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

/* ---- wgmma: D [64, N] (+)= A [64, 16] B [16, N], both from shared memory, issued by 4 warps together  */

/* stride: K-major, between groups of 8 rows. MN-major: of 8 k; leading: between blocks of 64 along M or N. */
__device__ __forceinline__ uint64_t wgmma_tile(const void *p, uint32_t leading, uint32_t stride)
{
    return (uint64_t)((smem_address(p) & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | (uint64_t)1 << 62;
}
/* A K-major operand as 8 x 8 matrices of 128 bytes, rows of 16 bytes, without swizzle. leading: between the two
 * matrices of 16 along K; stride: between groups of 8 rows. Aligned to 16 bytes. */
__device__ __forceinline__ uint64_t wgmma_matrices(const void *p, uint32_t leading, uint32_t stride)
{
    return (uint64_t)((smem_address(p) & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32;
}
__device__ __forceinline__ void wgmma_begin(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* The compiler must not move uses of accumulators across waits. */
template <int COUNT> __device__ __forceinline__ void wgmma_hold(float (&d)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

/* What the assembler of all widths shares: the first accumulators %0, %1, ... by number, the same as operands of asm,
 * and the instruction. C: "+f", or "=f" where what d held before does not count. accumulate: the predicate of adding to
 * D. */
#define WGMMA_TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_TEXT_16 WGMMA_TEXT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_TEXT_24 WGMMA_TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_TEXT_32 WGMMA_TEXT_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_TEXT_64                                                                                                  \
    WGMMA_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"                   \
                  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_TEXT_96                                                                                                  \
    WGMMA_TEXT_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"                   \
                  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_TEXT_128                                                                                                 \
    WGMMA_TEXT_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"       \
                  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_D_4(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define WGMMA_D_8(C, i) WGMMA_D_4(C, i), WGMMA_D_4(C, i + 4)
#define WGMMA_D_16(C, i) WGMMA_D_8(C, i), WGMMA_D_8(C, i + 8)
#define WGMMA_D_24(C, i) WGMMA_D_16(C, i), WGMMA_D_8(C, i + 16)
#define WGMMA_D_32(C, i) WGMMA_D_16(C, i), WGMMA_D_16(C, i + 16)
#define WGMMA_D_64(C, i) WGMMA_D_32(C, i), WGMMA_D_32(C, i + 32)
#define WGMMA_D_96(C, i) WGMMA_D_64(C, i), WGMMA_D_32(C, i + 64)
#define WGMMA_D_128(C, i) WGMMA_D_64(C, i), WGMMA_D_64(C, i + 64)
#define WGMMA_ASM(accumulate, shape_and_types, count, C, operands, ...)                                                \
    asm volatile("{\n"                                                                                                 \
                 ".reg .pred p;\n"                                                                                     \
                 "setp." accumulate ";\n"                                                                              \
                 "wgmma.mma_async.sync.aligned." shape_and_types " {" WGMMA_TEXT_##count "}, " operands ";\n}"         \
                 : WGMMA_D_##count(C, 0)                                                                               \
                 : __VA_ARGS__)

/* d[j]: of thread t of the warpgroup, warp w = t / 32, g = t % 32 / 4, q = t % 4: row 16 w + g + 8 (j / 2 % 2), column
 * 8 (j / 4) + 2 q + j % 2. A_MN, B_MN: 1 for MN-major operands. first: D is overwritten. start: the first product of a
 * sum, which does not read d, so that its registers are free before. */
template <int N, int A_MN, int B_MN> struct wgmma;

#define WGMMA(N, count, first_operand, run_operands, start_operands)                                                   \
    template <int A_MN, int B_MN> struct wgmma<N, A_MN, B_MN> {                                                        \
        static __device__ __forceinline__ void run(float (&d)[count], uint64_t a, uint64_t b, int first)               \
        {                                                                                                              \
            WGMMA_ASM("eq.b32 p, " first_operand ", 0", "m64n" #N "k16.f32.bf16.bf16", count, "+f", run_operands,      \
                      "l"(a), "l"(b), "r"(first), "n"(A_MN), "n"(B_MN));                                               \
        }                                                                                                              \
        static __device__ __forceinline__ void start(float (&d)[count], uint64_t a, uint64_t b)                        \
        {                                                                                                              \
            WGMMA_ASM("ne.b32 p, 0, 0", "m64n" #N "k16.f32.bf16.bf16", count, "=f", start_operands, "l"(a), "l"(b),    \
                      "n"(A_MN), "n"(B_MN));                                                                           \
        }                                                                                                              \
    }
WGMMA(32, 16, "%18", "%16, %17, p, 1, 1, %19, %20", "%16, %17, p, 1, 1, %18, %19");
WGMMA(48, 24, "%26", "%24, %25, p, 1, 1, %27, %28", "%24, %25, p, 1, 1, %26, %27");
WGMMA(64, 32, "%34", "%32, %33, p, 1, 1, %35, %36", "%32, %33, p, 1, 1, %34, %35");
WGMMA(128, 64, "%66", "%64, %65, p, 1, 1, %67, %68", "%64, %65, p, 1, 1, %66, %67");
WGMMA(192, 96, "%98", "%96, %97, p, 1, 1, %99, %100", "%96, %97, p, 1, 1, %98, %99");
WGMMA(256, 128, "%130", "%128, %129, p, 1, 1, %131, %132", "%128, %129, p, 1, 1, %130, %131");

/* The same with A from registers: a[0]: row 16 w + g, k 2q and 2q + 1; a[1]: row + 8; a[2], a[3]: the same rows, k + 8.
 * They must keep their values until the product is done: wgmma_hold_left after the wait. */
template <int N, int B_MN> struct wgmma_left;

#define WGMMA_LEFT(N, count, first_operand, operands)                                                                  \
    template <int B_MN> struct wgmma_left<N, B_MN> {                                                                   \
        static __device__ __forceinline__ void run(float (&d)[count], const uint32_t *a, uint64_t b, int first)        \
        {                                                                                                              \
            WGMMA_ASM("eq.b32 p, " first_operand ", 0", "m64n" #N "k16.f32.bf16.bf16", count, "+f", operands,          \
                      "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(first), "n"(B_MN));                      \
        }                                                                                                              \
    }
WGMMA_LEFT(16, 8, "%13", "{%8, %9, %10, %11}, %12, p, 1, 1, %14");
WGMMA_LEFT(32, 16, "%21", "{%16, %17, %18, %19}, %20, p, 1, 1, %22");
WGMMA_LEFT(48, 24, "%29", "{%24, %25, %26, %27}, %28, p, 1, 1, %30");
WGMMA_LEFT(64, 32, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38");
WGMMA_LEFT(128, 64, "%69", "{%64, %65, %66, %67}, %68, p, 1, 1, %70");

template <int COUNT> __device__ __forceinline__ void wgmma_hold_left(uint32_t (&a)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+r"(a[i])::"memory");
}

#endif /* HOPPER_CODE */

#endif
