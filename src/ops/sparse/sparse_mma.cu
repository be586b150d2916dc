/* sparse forward on tensor cores, bf16; see sparse_mma.cuh. A block takes 64 heads of a query and walks its list, 32
 * keys at a time, one tile ahead: scores by eight warps (16 heads, 16 keys each), softmax with a running maximum, then
 * every warp adds to its own channels of all 64 outputs. */
#include "ops/sparse/sparse_mma.cuh"

template <int D, int DV> struct fwd_shared {
    bf16 q[MMA_HEADS * (D + MMA_PAD)];
    bf16 kv[2][MMA_KEYS * (D + MMA_PAD)];
    float s[MMA_HEADS * SCORE_PITCH];
    bf16 p[MMA_HEADS * WEIGHT_PITCH];
    float top[MMA_HEADS], sum[MMA_HEADS], factor[MMA_HEADS];
    int keys[2][MMA_KEYS];
};

/* Weights of a tile from its scores, in base 2; factor: what a new maximum makes of the sums so far. Four threads have
 * a row. */
template <typename S> __device__ __forceinline__ void softmax_tile(S &m, const int *keys, float scale)
{
    int row = threadIdx.x / 4, from = threadIdx.x % 4 * 8;
    float v[8], most = -INFINITY, old = m.top[row], add = 0;
#pragma unroll
    for (int x = 0; x < 8; x++) {
        v[x] = keys[from + x] >= 0 ? m.s[row * SCORE_PITCH + from + x] * scale : -INFINITY;
        most = fmaxf(most, v[x]);
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)), old);
#pragma unroll
    for (int x = 0; x < 8; x++) {
        v[x] = most == -INFINITY ? 0.0f : exp2_fast(v[x] - most);
        add += v[x];
    }
    add += __shfl_xor_sync(0xffffffffu, add, 1);
    add += __shfl_xor_sync(0xffffffffu, add, 2);
    float factor = most == -INFINITY ? 1.0f : exp2_fast(old - most);
    uint4 packed =
        make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    *(uint4 *)(m.p + row * WEIGHT_PITCH + from) = packed;
    __syncwarp();
    if (from == 0) {
        m.top[row] = most;
        m.sum[row] = m.sum[row] * factor + add;
        m.factor[row] = factor;
    }
}

template <int D, int DV>
static __global__ void __launch_bounds__(MMA_THREADS, 1) fwd_mma(const __grid_constant__ sparse_call<bf16> c)
{
    constexpr int PITCH = D + MMA_PAD, N = DV / 64; /* tiles of 8 channels of a warp */
    DYNAMIC_SHARED(char, raw, 16);
    fwd_shared<D, DV> &m = *(fwd_shared<D, DV> *)raw;
    int groups = (c.heads + MMA_HEADS - 1) / MMA_HEADS, first = blockIdx.x % groups * MMA_HEADS;
    int64_t r = blockIdx.x / groups;
    int b = (int)(r / c.rows), i = (int)(r % c.rows), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t *list = c.list(b, i);
    float acc[4][N][4];
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                acc[t][n][e] = 0.0f;
    load_heads<D>(m.q, c.q, b, i, first, c.heads);
    gather_keys<D>(m.kv[0], m.keys[0], c, b, list, 0);
    if (threadIdx.x < MMA_HEADS) {
        bool sink = c.sink != NULL && first + threadIdx.x < c.heads;
        m.top[threadIdx.x] = sink ? c.sink[first + threadIdx.x] * SPARSE_LOG2E : -INFINITY;
        m.sum[threadIdx.x] = sink ? 1.0f : 0.0f;
    }
    for (int k = 0, at = 0; k < c.most; k += MMA_KEYS, at ^= 1) {
        if (k + MMA_KEYS < c.most) {
            gather_keys<D>(m.kv[at ^ 1], m.keys[at ^ 1], c, b, list, k + MMA_KEYS);
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        score_tile<D, PITCH, PITCH, 2>(m.s, m.q, warp % 4 * 16, m.kv[at], warp / 4 * 16);
        __syncthreads();
        softmax_tile(m, m.keys[at], c.scale * SPARSE_LOG2E);
        __syncthreads();
        if (__any_sync(0xffffffffu, m.factor[lane] != 1.0f || m.factor[lane + 32] != 1.0f))
#pragma unroll
            for (int t = 0; t < 4; t++) {
                float low = m.factor[t * 16 + lane / 4], high = m.factor[t * 16 + lane / 4 + 8];
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        acc[t][n][e] *= e < 2 ? low : high;
            }
#pragma unroll
        for (int kk = 0; kk < MMA_KEYS; kk += 16)
#pragma unroll
            for (int t = 0; t < 4; t++) {
                uint32_t a[4];
                frag_a(a, m.p + t * 16 * WEIGHT_PITCH + kk, WEIGHT_PITCH);
                add_channels<N, PITCH>(acc[t], a, m.kv[at] + kk * PITCH, warp * (DV / 8));
            }
        __syncthreads();
    }
    copies_wait<0>();
    __syncthreads();
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = t * 16 + lane / 4 + half * 8, h = first + row;
            if (h >= c.heads)
                continue;
            float sum = m.sum[row], by = sum == 0 ? 0.0f : 1.0f / sum;
            bf16 *o = c.o.at(b, i, h) + warp * (DV / 8) + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < N; n++)
                *(uint32_t *)(o + n * 8) = pack_bf16(acc[t][n][2 * half] * by, acc[t][n][2 * half + 1] * by);
            if (warp == 0 && lane % 4 == 0)
                *c.lse_at(b, h, i) = sum == 0 ? -INFINITY : (m.top[row] + log2f(sum)) * SPARSE_LN2;
        }
}

template <int D, int DV> static int run(struct lane *l, const sparse_call<bf16> &c)
{
    int64_t groups = ceil_div(c.heads, MMA_HEADS);
    auto kernel = fwd_mma<D, DV>;
    NEEDS_SMEM(l, kernel, sizeof(fwd_shared<D, DV>));
    LAUNCH(l, kernel, (unsigned)(groups * c.batch * c.rows), MMA_THREADS, sizeof(fwd_shared<D, DV>), c);
    return ST_OK;
}

int sparse_fwd_mma(struct lane *l, const sparse_call<bf16> &c)
{
    return c.width == 576 ? run<576, 512>(l, c) : c.width == 512 ? run<512, 512>(l, c) : run<160, 128>(l, c);
}
