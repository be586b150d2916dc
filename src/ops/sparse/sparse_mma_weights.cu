/* Attention weights of a query, summed over its heads, on tensor cores: what the indexer of sparse attention learns
 * from. The first half of the forward pass (sparse_mma.cu), with known denominators. */
#include "ops/sparse/sparse_mma.cuh"

template <int D> struct weights_shared {
    bf16 q[MMA_HEADS * (D + MMA_PAD)];
    bf16 kv[2][MMA_KEYS * (D + MMA_PAD)];
    float s[MMA_HEADS * SCORE_PITCH], lse[MMA_HEADS], part[8][MMA_KEYS];
    int keys[2][MMA_KEYS];
};

/* Eight threads have a key, each eight heads. */
template <int D>
__device__ __forceinline__ void sum_tile(weights_shared<D> &m, const int *keys, float scale, int heads, float *out,
                                         int left, bool add)
{
    int key = threadIdx.x % MMA_KEYS, part = threadIdx.x / MMA_KEYS;
    float sum = 0;
#pragma unroll
    for (int x = 0; x < 8; x++) {
        int h = part * 8 + x;
        if (h < heads && keys[key] >= 0)
            sum += exp2_fast(m.s[h * SCORE_PITCH + key] * scale - m.lse[h]);
    }
    m.part[part][key] = sum;
    __syncthreads();
    if (threadIdx.x < MMA_KEYS && (int)threadIdx.x < left) {
        float total = add ? out[threadIdx.x] : 0.0f;
#pragma unroll
        for (int x = 0; x < 8; x++)
            total += m.part[x][threadIdx.x];
        out[threadIdx.x] = total;
    }
}

template <int D>
static __global__ void __launch_bounds__(MMA_THREADS, 1)
    weights_mma(const __grid_constant__ sparse_call<bf16> c, int b, int first_row, float *out, int64_t pitch)
{
    constexpr int PITCH = D + MMA_PAD;
    DYNAMIC_SHARED(char, raw, 16);
    weights_shared<D> &m = *(weights_shared<D> *)raw;
    int i = first_row + blockIdx.x, warp = threadIdx.x / 32;
    const int32_t *list = c.list(b, i);
    out += blockIdx.x * pitch;
    for (int first = 0; first < c.heads; first += MMA_HEADS) {
        load_heads<D>(m.q, c.q, b, i, first, c.heads);
        gather_keys<D>(m.kv[0], m.keys[0], c, b, list, 0);
        if (threadIdx.x < MMA_HEADS && first + (int)threadIdx.x < c.heads)
            m.lse[threadIdx.x] = *c.lse_at(b, first + threadIdx.x, i) * SPARSE_LOG2E;
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
            sum_tile(m, m.keys[at], c.scale * SPARSE_LOG2E, c.heads - first, out + k, c.most - k, first > 0);
            __syncthreads();
        }
        copies_wait<0>();
        __syncthreads();
    }
}

template <int D>
static int run(struct lane *l, const sparse_call<bf16> &c, int b, int first, int count, float *out, int64_t pitch)
{
    auto kernel = weights_mma<D>;
    NEEDS_SMEM(l, kernel, sizeof(weights_shared<D>));
    LAUNCH(l, kernel, (unsigned)count, MMA_THREADS, sizeof(weights_shared<D>), c, b, first, out, pitch);
    return ST_OK;
}

int sparse_weights_mma(struct lane *l, const sparse_call<bf16> &c, int b, int first, int count, float *out,
                       int64_t pitch)
{
    auto widths = c.width == 576 ? run<576> : c.width == 512 ? run<512> : run<160>;
    return widths(l, c, b, first, count, out, pitch);
}
