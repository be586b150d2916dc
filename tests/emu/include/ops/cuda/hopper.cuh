/* The emulator's src/ops/cuda/hopper.cuh: the same functions, without assembler. A function that is added there must be
 * added here. */
#ifndef BRAID_OPS_CUDA_HOPPER_CUH
#define BRAID_OPS_CUDA_HOPPER_CUH

#include "ops/cuda/kernel.cuh"
#include "ops/cuda/ptx.cuh"

#include <cuda.h>

#define HOPPER_CODE 1

int tensor_map_2d(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t cols, int64_t stride,
                  int box_rows);
int tensor_map_slices(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t parts, int64_t cols,
                      int64_t stride, int box_rows, int box_cols);
int tensor_map_blocks(struct lane *l, CUtensorMap *map, const void *data, int64_t rows, int64_t parts, int64_t cols,
                      int64_t stride, int box_rows, int box_cols);

int tensor_map_heads(struct lane *l, CUtensorMap *map, const struct tensor *t, int box_rows);

static inline uint32_t smem_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- mbarrier -------------------------------------------------------------------------------- */

static inline void barrier_init(uint64_t *bar, uint32_t arrivals) { emu_mbarrier_init(bar, arrivals); }
static inline void barrier_init_done(void) { emu_maybe_yield(); }
static inline void barrier_arrive(uint64_t *bar) { emu_mbarrier_arrive(bar, 1, 0); }
static inline void barrier_arrive_for(uint64_t *bar, uint32_t threads) { emu_mbarrier_arrive(bar, threads, 0); }
static inline void barrier_expect(uint64_t *bar, uint32_t bytes) { emu_mbarrier_arrive(bar, 1, bytes); }
static inline void barrier_wait(uint64_t *bar, uint32_t parity) { emu_mbarrier_wait(bar, parity); }
static inline void barrier_wait_bounded(uint64_t *bar, uint32_t parity) { emu_mbarrier_wait(bar, parity); }

/* ---- bulk copies ----------------------------------------------------------------------------- */

static inline void tma_prefetch(const CUtensorMap *) {}
static inline void tma_prefetch_3d(const CUtensorMap *, int, int, int) {}
static inline void tma_prefetch_slice(const CUtensorMap *, int, int) {}
static inline void tma_load_2d(void *dst, const CUtensorMap *map, int col, int row, uint64_t *bar)
{
    int at[2] = {col, row};
    emu_tensor_load(dst, map, 2, at, bar);
}
static inline void tma_load_3d(void *dst, const CUtensorMap *map, int col, int row, int part, uint64_t *bar)
{
    int at[3] = {col, row, part};
    emu_tensor_load(dst, map, 3, at, bar);
}
static inline void tma_load_4d(void *dst, const CUtensorMap *map, int col, int row, int head, int batch, uint64_t *bar)
{
    int at[4] = {col, row, head, batch};
    emu_tensor_load(dst, map, 4, at, bar);
}
static inline void tma_load_slice(void *dst, const CUtensorMap *map, int line, int row, uint64_t *bar)
{
    int at[4] = {0, line, row, 0};
    emu_tensor_load(dst, map, 4, at, bar);
}
static inline void tma_load_blocks(void *dst, const CUtensorMap *map, int line, int row, uint64_t *bar)
{
    int at[4] = {0, row, 0, line};
    emu_tensor_load(dst, map, 4, at, bar);
}
static inline void bulk_load(void *dst, const void *src, uint32_t bytes, uint64_t *bar)
{
    emu_bulk_load(dst, src, bytes, bar);
}
static inline void tma_store_2d(const CUtensorMap *map, int col, int row, const void *src)
{
    int at[2] = {col, row};
    emu_tensor_store(map, 2, at, src, false);
}
static inline void tma_store_slice(const CUtensorMap *map, int line, int row, const void *src)
{
    int at[4] = {0, line, row, 0};
    emu_tensor_store(map, 4, at, src, false);
}
static inline void tma_store_blocks(const CUtensorMap *map, int line, int row, const void *src)
{
    int at[4] = {0, row, 0, line};
    emu_tensor_store(map, 4, at, src, false);
}
static inline void tma_store_3d_once(const CUtensorMap *map, int col, int row, int part, const void *src)
{
    int at[3] = {col, row, part};
    emu_tensor_store(map, 3, at, src, false);
}
static inline void tma_store_4d_once(const CUtensorMap *map, int line, int row, int part, const void *src)
{
    int at[4] = {0, line, row, part};
    emu_tensor_store(map, 4, at, src, false);
}
static inline void tma_add_4d(const CUtensorMap *map, int line, int row, int part, const void *src)
{
    int at[4] = {0, line, row, part};
    emu_tensor_store(map, 4, at, src, true);
}
static inline void bulk_store(void *dst, const void *src, uint32_t bytes) { emu_bulk_store(dst, src, bytes); }
static inline void bulk_add(float *dst, const float *src, uint32_t bytes) { emu_bulk_add(dst, src, bytes); }
static inline void bulk_commit(void) { emu_bulk_commit(); }
template <int LEFT> static inline void bulk_wait_read(void) { emu_bulk_wait(LEFT, true); }
template <int LEFT> static inline void bulk_wait(void) { emu_bulk_wait(LEFT, false); }
static inline void fence_async_proxy(void) { emu_fence_async(); }

/* ---- turns ----------------------------------------------------------------------------------- */

static inline void turn_wait(const int *turn, int mine)
{
    while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) < mine)
        __nanosleep(0);
}
static inline void turn_taken(void) {}
static inline void turn_pass(int *turn) { __atomic_fetch_add(turn, 1, __ATOMIC_RELEASE); }

/* ---- clusters -------------------------------------------------------------------------------- */

static inline uint32_t cluster_rank(void) { return emu_cluster_rank(); }
static inline void cluster_sync(void) { emu_cluster_barrier(); }
static inline uint32_t smem_address_in(const void *p, uint32_t rank) { return emu_shared_address_in(p, rank); }
static inline void cluster_send(uint32_t dst, float4 v, uint32_t bar) { emu_send(dst, &v, bar); }
static inline void cluster_arrive(uint32_t bar) { emu_mbarrier_arrive_at(bar, 1, 0); }

/* ---- barriers of part of a block, register budgets ------------------------------------------- */

template <int ID, int THREADS> static inline void named_barrier(void) { emu_named_barrier(ID, THREADS, true); }
static inline void named_barrier_of(int id, int threads) { emu_named_barrier(id, threads, true); }
static inline void named_barrier_arrive(int id, int threads) { emu_named_barrier(id, threads, false); }
template <int N> static inline void registers_down(void)
{
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg");
}
template <int N> static inline void registers_up(void)
{
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg");
}

/* ---- shared memory, by address --------------------------------------------------------------- */

static inline void store_matrices(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    uint32_t give[5] = {row, r0, r1, r2, r3};
    emu_meet(0xffffffffu, EMU_STORE_MATRICES, give, sizeof give, emu_store_matrices_all);
}

static inline void store_matrices_t(uint32_t row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    store_matrices(row, transpose8(r0), transpose8(r1), transpose8(r2), transpose8(r3));
}

/* ---- wgmma ----------------------------------------------------------------------------------- */

static inline uint64_t wgmma_tile(const void *p, uint32_t leading, uint32_t stride)
{
    return (uint64_t)((smem_address(p) & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | (uint64_t)1 << 62;
}
static inline uint64_t wgmma_matrices(const void *p, uint32_t leading, uint32_t stride)
{
    return (uint64_t)((smem_address(p) & 0x3FFFF) >> 4) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32;
}
static inline void wgmma_begin(void) {}
static inline void wgmma_commit(void) { emu_wgmma_commit(); }
template <int N> static inline void wgmma_wait(void) { emu_wgmma_wait(N); }
template <int COUNT> static inline void wgmma_hold(float (&d)[COUNT]) { __asm__ volatile("" ::"r"(d) : "memory"); }

template <int N, int A_MN, int B_MN> struct wgmma {
    static inline void run(float (&d)[N / 2], uint64_t a, uint64_t b, int first)
    {
        emu_wgmma(d, N, a, b, A_MN != 0, B_MN != 0, first != 0);
    }
    static inline void start(float (&d)[N / 2], uint64_t a, uint64_t b) { run(d, a, b, 1); }
};
template <int N, int B_MN> struct wgmma_left {
    static inline void run(float (&d)[N / 2], const uint32_t *a, uint64_t b, int first)
    {
        emu_wgmma_left(d, N, a, b, B_MN != 0, first != 0);
    }
};
template <int COUNT> static inline void wgmma_hold_left(uint32_t (&a)[COUNT])
{
    __asm__ volatile("" ::"r"(a) : "memory");
}

#endif
