/* Attention weights of a query, summed over its heads, for Hopper: what the indexer of sparse attention learns from;
 * see sparse_hopper.cuh. All heads stay in shared memory, so that keys are gathered once: 32 at a time, 64 heads for
 * each of two groups. Sums over the heads of a warp are taken by exchanges, those over warps in shared memory.
 *
 * What bounds it: 32 keys of 576 channels are 252 KB of shared memory for 128 heads, about 2000 cycles, where the
 * tensor cores need 1152 and the copies from the cache 1230 to 1540. */
#include "ops/sparse/sparse_hopper.cuh"

enum { SUM_KEYS = 32, ALL_HEADS = 128, WEIGHT_THREADS = GROUP + RESULTS, WARPS = RESULTS / 32 };

template <int D> struct weights_pool {
    bf16 q[D / 64][ALL_HEADS][64];
    bf16 kv[2][D / 64][SUM_KEYS][64];
    float part[2][WARPS][SUM_KEYS];
    uint32_t valid[2][2];
    uint64_t kv_full[2], kv_empty[2];
};

#if HOPPER_CODE

/* Weights of the two heads of this thread, added up, of 8 keys: column 2 t, 2 t + 1 of every 8 for t = lane % 4. */
__device__ __forceinline__ void weights_of(float *sum, const float (&x)[SUM_KEYS / 2], const float *lse, uint32_t valid,
                                           float scale)
{
    int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        int at = n / 2 * 4 + n % 2;
        float both = exp2_fast(x[at] * scale - lse[0]) + exp2_fast(x[at + 2] * scale - lse[1]);
        sum[n] = valid >> (n / 2 * 8 + column + n % 2) & 1 ? both : 0.0f;
    }
}

/* Sums over the eight lanes that have the same columns; each keeps one of the 8, n = lane / 4. */
__device__ __forceinline__ float sum_of_lanes(float *v)
{
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        bool high = threadIdx.x % 32 & (half * 4);
#pragma unroll
        for (int n = 0; n < half; n++) {
            float keep = high ? v[n + half] : v[n], give = high ? v[n] : v[n + half];
            v[n] = keep + __shfl_xor_sync(0xffffffffu, give, half * 4);
        }
    }
    return v[0];
}

template <int D>
__device__ __forceinline__ void sum_group(weights_pool<D> *s, const sparse_call<bf16> &c, int b, int i, float *out)
{
    int thread = threadIdx.x - GROUP, group = thread / GROUP, warp = thread / 32, lane = thread % 32;
    int n = lane / 4, column = n / 2 * 8 + lane % 4 * 2 + n % 2;
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int h = warp * 16 + lane / 4 + half * 8;
        lse[half] = h < c.heads ? *c.lse_at(b, h, i) * SPARSE_LOG2E : INFINITY; /* weights of no head are 0 */
    }
    bring_heads<ALL_HEADS, D / 64, RESULTS>(s->q, c.q, b, i, 0, c.heads, 0, thread);
    copies_commit();
    copies_wait<0>();
    fence_async_proxy();
    named_barrier<1, RESULTS>();
    for (int t = 0; t * SUM_KEYS < c.most; t++) {
        float x[SUM_KEYS / 2], sum[8];
        barrier_wait(&s->kv_full[t % 2], (uint32_t)(t / 2) & 1);
        wgmma_begin();
        score_product<D / 64, SUM_KEYS, ALL_HEADS>(x, s->q[0][group * HOP_HEADS], s->kv[t % 2]);
        wgmma_commit();
        uint32_t valid = s->valid[t % 2][0] | s->valid[t % 2][1] << 16;
        wgmma_wait<0>();
        wgmma_hold(x);
        barrier_arrive(&s->kv_empty[t % 2]);
        weights_of(sum, x, lse, valid, c.scale * SPARSE_LOG2E);
        s->part[t % 2][warp][column] = sum_of_lanes(sum);
        named_barrier<1, RESULTS>();
        if (warp == t % WARPS && t * SUM_KEYS + lane < c.most) {
            float total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                total += s->part[t % 2][w][lane];
            out[t * SUM_KEYS + lane] = total;
        }
    }
}

#endif /* HOPPER_CODE */

template <int D>
__global__ void __launch_bounds__(WEIGHT_THREADS, 1)
    weights_hopper(const __grid_constant__ sparse_call<bf16> c, int b, int first_row, float *out, int64_t pitch)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, raw, 1024);
    weights_pool<D> *s = pool_at<weights_pool<D>>(raw);
    int role = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0), i = first_row + blockIdx.x;
    if (threadIdx.x == 0) {
        init_gather(s);
        barrier_init_done();
    }
    __syncthreads();
    if (role == 0)
        gather_tiles<D, SUM_KEYS>(s, c, b, c.list(b, i), (c.most + SUM_KEYS - 1) / SUM_KEYS);
    else
        sum_group<D>(s, c, b, i, out + blockIdx.x * pitch);
#endif
}

template <int D>
static int run(struct lane *l, const sparse_call<bf16> &c, int b, int first, int count, float *out, int64_t pitch)
{
    constexpr int SMEM = pool_bytes<weights_pool<D>>();
    auto kernel = weights_hopper<D>;
    NEEDS_SMEM(l, kernel, SMEM);
    LAUNCH(l, kernel, (unsigned)count, WEIGHT_THREADS, SMEM, c, b, first, out, pitch);
    return ST_OK;
}

int sparse_weights_hopper(struct lane *l, const sparse_call<bf16> &c, int b, int first, int count, float *out,
                          int64_t pitch)
{
    auto widths = c.width == 576 ? run<576> : c.width == 512 ? run<512> : run<192>;
    return widths(l, c, b, first, count, out, pitch);
}
