/* sparse forward for Hopper, bf16; see sparse_hopper.cuh. A list is walked 64 keys at a time. The group of scores runs
 * a tile ahead: it multiplies queries with keys, takes the softmax with a running maximum and leaves weights and what a
 * new maximum makes of older sums in shared memory, while the two groups of results add the tile before to their halves
 * of the channels.
 *
 * What bounds it: a tile of 576 channels is 73,728 bytes from the cache and 9.1 million multiply-adds, 2176 cycles of
 * the tensor cores. With 24 to 30 bytes a cycle for each multiprocessor the copies take 2450 to 3070 cycles, so keys
 * come slower than they are used. */
#include "ops/sparse/sparse_hopper.cuh"

enum { FWD_KEYS = 64 };

/* 1024-byte alignment of every tile. p: lines of 64 weights, a head each. */
template <int D, int DV> struct fwd_pool {
    bf16 q[D / 64][HOP_HEADS][64];
    bf16 kv[2][D / 64][FWD_KEYS][64];
    bf16 p[HOP_HEADS][64];
    float factor[HOP_HEADS];
    uint32_t valid[2][2];
    uint64_t kv_full[2], kv_empty[2], p_full, p_empty;
};

#if HOPPER_CODE

/* What softmax knows of this thread's two heads, in base 2. The sum is this thread's part of it. */
struct running {
    float top[2], sum[2];
};

/* Scores become weights; `factor` is what older sums are multiplied by. */
__device__ __forceinline__ void soften(float (&s)[FWD_KEYS / 2], running &r, float *factor, const uint32_t *valid,
                                       float scale)
{
    int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = -INFINITY, add = 0;
#pragma unroll
        for (int x = 0; x < FWD_KEYS / 4; x++) {
            int at = x / 2 * 4 + half * 2 + x % 2, bit = x / 2 % 4 * 8 + column + x % 2;
            s[at] = valid[x / 8] >> bit & 1 ? s[at] * scale : -INFINITY;
            most = fmaxf(most, s[at]);
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)), r.top[half]);
        float origin = most == -INFINITY ? 0.0f : most; /* no key yet: all weights are 0 */
#pragma unroll
        for (int x = 0; x < FWD_KEYS / 4; x++) {
            int at = x / 2 * 4 + half * 2 + x % 2;
            s[at] = exp2_fast(s[at] - origin);
            add += s[at];
        }
        factor[half] = most == -INFINITY ? 1.0f : exp2_fast(r.top[half] - most);
        r.sum[half] = r.sum[half] * factor[half] + add;
        r.top[half] = most;
    }
}

template <int D, int DV>
__device__ __forceinline__ void score_group(fwd_pool<D, DV> *s, const sparse_call<bf16> &c, int b, int i, int first)
{
    int lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane / 4,
        tiles = (c.most + FWD_KEYS - 1) / FWD_KEYS;
    running r;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bool sink = c.sink != NULL && first + row + half * 8 < c.heads;
        r.top[half] = sink ? c.sink[first + row + half * 8] * SPARSE_LOG2E : -INFINITY;
        r.sum[half] = sink && lane % 4 == 0 ? 1.0f : 0.0f;
    }
    float factor[2];
    for (int t = 0; t < tiles; t++) {
        float x[FWD_KEYS / 2];
        barrier_wait(&s->kv_full[t % 2], (uint32_t)(t / 2) & 1);
        wgmma_begin();
        score_product<D / 64, FWD_KEYS, HOP_HEADS>(x, s->q[0][0], s->kv[t % 2]);
        wgmma_commit();
        uint32_t valid[2] = {s->valid[t % 2][0], s->valid[t % 2][1]};
        wgmma_wait<0>();
        wgmma_hold(x);
        soften(x, r, factor, valid, c.scale * SPARSE_LOG2E);
        barrier_wait(&s->p_empty, (uint32_t)(t & 1) ^ 1);
#pragma unroll
        for (int k = 0; k < FWD_KEYS; k += 16)
            store_16x16(s->p, k, x + k / 2);
        if (lane % 4 < 2)
            s->factor[row + lane % 4 * 8] = lane % 4 == 0 ? factor[0] : factor[1];
        fence_async_proxy();
        barrier_arrive(&s->p_full);
    }
    barrier_wait(&s->p_empty, (uint32_t)(tiles & 1) ^ 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = r.sum[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (lane % 4 != half)
            continue;
        int h = first + row + half * 8;
        s->factor[row + half * 8] = sum == 0 ? 0.0f : 1.0f / sum;
        if (h < c.heads)
            *c.lse_at(b, h, i) = sum == 0 ? -INFINITY : (r.top[half] + log2f(sum)) * SPARSE_LN2;
    }
    barrier_arrive(&s->p_full);
}

/* Half of the channels of all 64 results, in two products: one of 256 channels would need more registers than a block
 * of 512 threads begins with, which the compiler refuses. */
template <int D, int DV>
__device__ __forceinline__ void result_group(fwd_pool<D, DV> *s, const sparse_call<bf16> &c, int b, int i, int first,
                                             int half)
{
    constexpr int N = DV / 4 < 64 ? 64 : DV / 4, PARTS = DV / 2 / N;
    int lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane / 4,
        tiles = (c.most + FWD_KEYS - 1) / FWD_KEYS;
    float acc[PARTS][N / 2];
#pragma unroll
    for (int x = 0; x < PARTS; x++)
        clear_sums(acc[x]);
    for (int t = 0; t < tiles; t++) {
        barrier_wait(&s->p_full, (uint32_t)t & 1);
        float low = s->factor[row], high = s->factor[row + 8];
        if (__any_sync(0xffffffffu, low != 1.0f || high != 1.0f))
#pragma unroll
            for (int x = 0; x < PARTS * N / 2; x++)
                acc[x / (N / 2)][x % (N / 2)] *= x % 4 < 2 ? low : high;
#pragma unroll
        for (int x = 0; x < PARTS; x++)
            wgmma_hold(acc[x]);
        wgmma_begin();
#pragma unroll
        for (int x = 0; x < PARTS; x++)
            add_product<N, FWD_KEYS>(acc[x], s->p, 0, s->kv[t % 2] + (half * PARTS + x) * (N / 64));
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int x = 0; x < PARTS; x++)
            wgmma_hold(acc[x]);
        barrier_arrive(&s->p_empty);
        barrier_arrive(&s->kv_empty[t % 2]);
    }
    barrier_wait(&s->p_full, (uint32_t)tiles & 1);
#pragma unroll
    for (int x = 0; x < PARTS; x++)
        store_rows<N>(acc[x], c.o, b, i, first, c.heads, (half * PARTS + x) * N, s->factor[row], s->factor[row + 8]);
}

template <int D, int DV>
__device__ __forceinline__ void bring_query(fwd_pool<D, DV> *s, const sparse_call<bf16> &c, int b, int i, int first)
{
    bring_heads<HOP_HEADS, D / 64, HOP_THREADS - GROUP>(s->q, c.q, b, i, first, c.heads, 0, threadIdx.x - GROUP);
    heads_are_there();
}

#endif /* HOPPER_CODE */

template <int D, int DV>
__global__ void __launch_bounds__(HOP_THREADS, 1) fwd_hopper(const __grid_constant__ sparse_call<bf16> c)
{
#if HOPPER_CODE
    DYNAMIC_SHARED(char, raw, 1024);
    fwd_pool<D, DV> *s = pool_at<fwd_pool<D, DV>>(raw);
    int role = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0), groups = (c.heads + HOP_HEADS - 1) / HOP_HEADS,
        first = blockIdx.x % groups * HOP_HEADS;
    int64_t r = blockIdx.x / groups;
    int b = (int)(r / c.rows), i = (int)(r % c.rows);
    if (threadIdx.x == 0) {
        init_gather(s);
        barrier_init(&s->p_full, GROUP);
        barrier_init(&s->p_empty, RESULTS);
        barrier_init_done();
    }
    __syncthreads();
    if (role == 0) {
        registers_down<56>();
        gather_tiles<D, FWD_KEYS>(s, c, b, c.list(b, i), (c.most + FWD_KEYS - 1) / FWD_KEYS);
        return;
    }
    bring_query<D, DV>(s, c, b, i, first);
    if (role == 1) {
        registers_down<104>();
        score_group<D, DV>(s, c, b, i, first);
    } else {
        registers_up<176>();
        result_group<D, DV>(s, c, b, i, first, role - 2);
    }
#endif
}

template <int D, int DV> static int run(struct lane *l, const sparse_call<bf16> &c)
{
    constexpr int smem = pool_bytes<fwd_pool<D, DV>>();
    auto kernel = fwd_hopper<D, DV>;
    NEEDS_SMEM(l, kernel, smem);
    LAUNCH(l, kernel, (unsigned)(ceil_div(c.heads, HOP_HEADS) * c.batch * c.rows), HOP_THREADS, smem, c);
    return ST_OK;
}

int sparse_fwd_hopper(struct lane *l, const sparse_call<bf16> &c)
{
    return c.width == 576 ? run<576, 512>(l, c) : c.width == 512 ? run<512, 512>(l, c) : run<192, 128>(l, c);
}
