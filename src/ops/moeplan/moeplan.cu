/* moeplan on the GPU: a stable counting sort in two launches, without a count ever leaving the device.
 *
 * The choices are cut into at most MAX_BLOCKS runs, one per block, and each run into one per warp. count_choices leaves
 * how often each expert occurs in each block. place_choices adds up what comes before its own block (all experts
 * before, and the same expert in earlier blocks), then in earlier warps, and distributes the rows in order. Only
 * integers are added, so the order of the atomics in shared memory changes nothing. */
#include "ops/cuda/kernel.cuh"
#include "ops/moeplan/moeplan.h"

enum { THREADS = 256, WARPS = THREADS / 32, MAX_BLOCKS = 128, MAX_E = 4096, MIN_PER_WARP = 128, LOADS = 4 };

/* Choices of one warp: a multiple of 32. */
static int64_t per_warp(int64_t n) { return max_i64(MIN_PER_WARP, round_up(ceil_div(n, MAX_BLOCKS * WARPS), 32)); }
static int64_t blocks_for(int64_t n) { return ceil_div(n, per_warp(n) * WARPS); }

int64_t moeplan_work_cuda(const struct moeplan_args *a)
{
    return blocks_for(tensor_elems(&a->idx)) * (a->offset.dim[0] - 1) * (int64_t)sizeof(int32_t);
}

struct choices {
    const int32_t *idx;
    int n, experts, per_warp, rows; /* rows: places for them */
};

/* Expert of choice i; -1: dropped, or not an expert at all. */
__device__ __forceinline__ int expert_at(const struct choices &c, int64_t i)
{
    int e = i < c.n ? c.idx[i] : -1;
    return e < c.experts ? max(e, -1) : -1;
}

/* Walks the warp's run (a multiple of 32 choices, but for the last one) 32 at a time; counts[e] goes up by the choices
 * of e. deal(i, e, rank) is told, for each choice, what counts[e] was for it. */
template <typename F> __device__ __forceinline__ void walk(const struct choices &c, int *counts, const F &deal)
{
    int lane = threadIdx.x % 32;
    int64_t first = ((int64_t)blockIdx.x * WARPS + threadIdx.x / 32) * c.per_warp,
            end = min(first + c.per_warp, (int64_t)c.n);
    for (int64_t at = first; at < end; at += 32 * LOADS) {
        int expert[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++)
            expert[i] = at + 32 * i < end ? expert_at(c, at + 32 * i + lane) : -1;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int e = expert[i];
            unsigned same = __match_any_sync(0xffffffffu, e);
            int leader = __ffs(same) - 1, before = __popc(same & ((1u << lane) - 1)), base = 0;
            if (lane == leader && e >= 0) {
                base = counts[e];
                counts[e] = base + __popc(same);
            }
            base = __shfl_sync(0xffffffffu, base, leader);
            __syncwarp();
            if (at + 32 * i + lane < end)
                deal(at + 32 * i + lane, e, base + before);
        }
    }
}

__global__ void __launch_bounds__(THREADS) count_choices(struct choices c, int32_t *hist)
{
    DYNAMIC_SHARED(int, counts, 4);
    for (int e = threadIdx.x; e < c.experts; e += THREADS)
        counts[e] = 0;
    __syncthreads();
    int64_t first = (int64_t)blockIdx.x * WARPS * c.per_warp;
    for (int64_t i = first + threadIdx.x; i < first + (int64_t)WARPS * c.per_warp; i += THREADS) {
        int e = expert_at(c, i);
        if (e >= 0)
            atomicAdd(&counts[e], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < c.experts; e += THREADS)
        hist[(int64_t)blockIdx.x * c.experts + e] = counts[e];
}

/* From the counts of an expert in total and in earlier blocks to its first row of all and of this block. Warp 0. */
__device__ __forceinline__ void scan_experts(int experts, int *total, int *start)
{
    int lane = threadIdx.x, carry = 0;
    for (int e0 = 0; e0 < experts; e0 += 32) {
        int e = e0 + lane, own = e < experts ? total[e] : 0, sum = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_up_sync(0xffffffffu, sum, d);
            sum += lane >= d ? other : 0;
        }
        if (e < experts) {
            total[e] = carry + sum - own;
            start[e] += carry + sum - own;
        }
        carry += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (lane == 0)
        total[experts] = carry;
}

/* total[e]: of all blocks; start[e]: of those before this one. Four experts at a time where they come in fours. */
__device__ __forceinline__ void add_blocks(const struct choices &c, const int32_t *hist, int *total, int *start)
{
    int n = (int)gridDim.x * c.experts, earlier = (int)blockIdx.x * c.experts, step = c.experts % 4 == 0 ? 4 : 1;
#pragma unroll 8
    for (int i = threadIdx.x * step; i < n; i += THREADS * step) {
        int4 count = step == 4 ? *(const int4 *)(hist + i) : make_int4(hist[i], 0, 0, 0);
        int e = i % c.experts, values[4] = {count.x, count.y, count.z, count.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (values[j] == 0)
                continue;
            atomicAdd(&total[e + j], values[j]);
            if (i < earlier)
                atomicAdd(&start[e + j], values[j]);
        }
    }
}

/* Shared: total [E + 1], start [E], counts by warp [WARPS][E]. */
__global__ void __launch_bounds__(THREADS) place_choices(struct choices c, const int32_t *hist, int32_t *offset,
                                                         int32_t *row, int32_t *src, double *need, bool acc)
{
    DYNAMIC_SHARED(int, shared, 4);
    int *total = shared, *start = total + c.experts + 1, *by_warp = start + c.experts;
    int *mine = by_warp + threadIdx.x / 32 * c.experts;
    for (int e = threadIdx.x; e < (WARPS + 2) * c.experts + 1; e += THREADS)
        shared[e] = 0;
    __syncthreads();
    add_blocks(c, hist, total, start);
    walk(c, mine, [](int64_t, int, int) {});
    __syncthreads();
    if (threadIdx.x < 32)
        scan_experts(c.experts, total, start);
    __syncthreads();
    for (int e = threadIdx.x; e < c.experts; e += THREADS) {
        int at = start[e];
        for (int w = 0; w < WARPS; w++) {
            int count = by_warp[w * c.experts + e];
            by_warp[w * c.experts + e] = at;
            at += count;
        }
        if (blockIdx.x == 0)
            offset[e] = min(total[e], c.rows);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        offset[c.experts] = min(total[c.experts], c.rows);
        if (need != NULL)
            *need = acc ? fmax(*need, (double)total[c.experts]) : (double)total[c.experts];
    }
    __syncthreads();
    walk(c, mine, [&](int64_t i, int e, int at) {
        bool placed = e >= 0 && at < c.rows;
        row[i] = placed ? at : -1;
        if (placed)
            src[at] = (int32_t)i;
    });
    for (int64_t r = total[c.experts] + (int64_t)blockIdx.x * THREADS + threadIdx.x; r < c.rows;
         r += (int64_t)gridDim.x * THREADS)
        src[r] = -1;
}

extern "C" int moeplan_cuda(struct lane *l, const struct moeplan_args *a)
{
    TRY(moeplan_check(a, l->err));
    TRY(check_work("moeplan", &a->work, moeplan_work_cuda(a), l->err));
    int64_t n = tensor_elems(&a->idx), experts = a->offset.dim[0] - 1;
    if (experts > MAX_E)
        return err_set(l->err, ST_INVALID, "moeplan: %lld experts; a GPU sorts among at most %d", (long long)experts,
                       MAX_E);
    int32_t *offset = (int32_t *)a->offset.data;
    double *need = (double *)a->need.data;
    if (n == 0 && need != NULL && !a->acc_need)
        TRY(cuda_status(l->err, (int)cudaMemsetAsync(need, 0, sizeof *need, stream_of(l)), "cudaMemsetAsync(need)"));
    if (n == 0)
        return cuda_status(l->err,
                           (int)cudaMemsetAsync(offset, 0, (size_t)(experts + 1) * sizeof *offset, stream_of(l)),
                           "cudaMemsetAsync(offset)");
    struct choices c = {(const int32_t *)a->idx.data, (int)n, (int)experts, (int)per_warp(n), (int)a->src.dim[0]};
    int32_t *hist = (int32_t *)a->work.data;
    unsigned blocks = (unsigned)blocks_for(n);
    size_t shared = ((WARPS + 2) * (size_t)experts + 1) * sizeof(int);
    if (shared > 48 * 1024)
        NEEDS_SMEM(l, place_choices, shared);
    LAUNCH(l, count_choices, blocks, THREADS, (size_t)experts * sizeof(int), c, hist);
    LAUNCH(l, place_choices, blocks, THREADS, shared, c, hist, offset, (int32_t *)a->row.data, (int32_t *)a->src.data,
           need, a->acc_need);
    return ST_OK;
}
