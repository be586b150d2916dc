/* attention forward on tensor cores; see attention_cuda.cuh. A block takes a tile of queries of one head and walks over
 * the tiles of keys its rows see, with a running maximum and sum for every row; the next keys and values are on their
 * way while these are used. Results do not depend on the device: tiles are fixed. */
#include "ops/attention/attention_tile.cuh"

enum { FWD_WARPS = 4 };

template <int D, int DV, int M, int KEYS> constexpr int fwd_smem()
{
    constexpr int ROWS = FWD_WARPS * 16 * M;
    return (int)sizeof(bf16) * (ROWS * (D + TILE_PAD) + 2 * KEYS * (D + TILE_PAD) + 2 * KEYS * (DV + TILE_PAD));
}

/* Keys a row does not see. */
template <int N> __device__ __forceinline__ void mask_scores(float (*s)[4], const key_range *seen, int key)
{
    int col = key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int j = col + n * 8 + e % 2;
            if (j < seen[e / 2].lo || j > seen[e / 2].hi)
                s[n][e] = -INFINITY;
        }
}

/* Scores to powers of two: the running maximum (of unscaled scores: scale > 0) and sum brought forward, what was summed
 * scaled down. */
template <int N, int DV>
__device__ __forceinline__ void softmax_step(float (*s)[4], float (*acc)[4], float *max_of, float *sum, float scale)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < N; n++)
            top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top = fmaxf(top, max_of[half]);
        float base = top == -INFINITY ? 0.0f : top * scale, shrink = exp2_fast(max_of[half] * scale - base), add = 0;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float x = exp2_fast(s[n][2 * half + e] * scale - base);
                s[n][2 * half + e] = x;
                add += x;
            }
        max_of[half] = top;
        sum[half] = sum[half] * shrink + add;
#pragma unroll
        for (int n = 0; n < DV / 8; n++) {
            acc[n][2 * half] *= shrink;
            acc[n][2 * half + 1] *= shrink;
        }
    }
}

/* The sink joins the softmax last; then the row of the output and the logarithm of its sum. */
template <int DV>
__device__ __forceinline__ void finish_row(const attn_call<bf16> &c, int b, int h, int i, const float (*acc)[4],
                                           int half, float top, float sum)
{
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    float scale = 1.0f;
    if (c.sink != NULL || c.sink_zero) {
        float sink = c.sink != NULL ? c.sink[h] * LOG2E : 0.0f, base = fmaxf(top, sink);
        scale = exp2_fast(top - base);
        sum = sum * scale + exp2_fast(sink - base);
        top = base;
    }
    if (i >= c.rows)
        return;
    store_row<DV>(c.o.at(b, h) + i * c.o.row, acc, half, sum > 0 ? scale / sum : 0.0f, c.width_v, c.aligned);
    if (threadIdx.x % 4 == 0)
        c.lse[b * c.lse_batch + h * c.lse_head + i] = sum > 0 ? (top + log2f(sum)) * LN2 : -INFINITY;
}

template <int D, int DV, int M, int KEYS, bool DROP>
__global__ void __launch_bounds__(FWD_WARPS * 32) fwd_mma(const attn_call<bf16> c)
{
    constexpr int ROWS = FWD_WARPS * 16 * M, N = KEYS / 8, THREADS = FWD_WARPS * 32;
    constexpr int K_SIZE = KEYS * (D + TILE_PAD), V_SIZE = KEYS * (DV + TILE_PAD);
    DYNAMIC_SHARED(uint4, pool, 16);
    __shared__ int scratch[2 * FWD_WARPS];
    bf16 *qs = (bf16 *)pool, *ks = qs + ROWS * (D + TILE_PAD), *vs = ks + 2 * K_SIZE;
    int tiles = (c.rows + ROWS - 1) / ROWS, heads = c.batch * c.heads;
    int i0 = (tiles - 1 - (int)(blockIdx.x / heads)) * ROWS; /* long rows first */
    int b = (int)(blockIdx.x % heads) / c.heads, h = (int)(blockIdx.x % heads) % c.heads, g = h / c.per_group;
    int first = first_index(c), last_key = min(c.keys, first + c.rows), warp = threadIdx.x / 32,
        lane = threadIdx.x % 32;
    const bf16 *k = c.k.at(b, g), *v = c.v.at(b, g);

    key_range seen[M][2], mine = {0x7fffffff, -1};
    float acc[M][DV / 8][4], top[M][2], sum[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            key_range r = keys_seen(c, first, b, i0 + warp * 16 * M + m * 16 + half * 8 + lane / 4);
            seen[m][half] = r;
            if (r.lo <= r.hi) {
                mine.lo = min(mine.lo, r.lo);
                mine.hi = max(mine.hi, r.hi);
            }
            top[m][half] = -INFINITY;
            sum[m][half] = 0;
#pragma unroll
            for (int n = 0; n < DV / 8; n++)
                acc[m][n][2 * half] = acc[m][n][2 * half + 1] = 0;
        }
    key_range all_rows = block_range<FWD_WARPS>(mine, scratch);
    load_tile<ROWS, D, THREADS>(qs, c.q.at(b, h), c.q.row, i0, c.rows, c.width, c.aligned);
    int t = all_rows.lo / KEYS, end = all_rows.lo <= all_rows.hi ? all_rows.hi / KEYS : t - 1, stage = 0;
    if (t <= end) {
        load_tile<KEYS, D, THREADS>(ks, k, c.k.row, t * KEYS, last_key, c.width, c.aligned);
        load_tile<KEYS, DV, THREADS>(vs, v, c.v.row, t * KEYS, last_key, c.width_v, c.aligned);
    }
    copies_commit();
    for (; t <= end; t++, stage ^= 1) {
        if (t < end) {
            load_tile<KEYS, D, THREADS>(ks + (stage ^ 1) * K_SIZE, k, c.k.row, (t + 1) * KEYS, last_key, c.width,
                                        c.aligned);
            load_tile<KEYS, DV, THREADS>(vs + (stage ^ 1) * V_SIZE, v, c.v.row, (t + 1) * KEYS, last_key, c.width_v,
                                         c.aligned);
            copies_commit();
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        int j0 = t * KEYS, j1 = j0 + KEYS - 1;
        bool some = false, all = true;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                some = some || (seen[m][half].lo <= j1 && seen[m][half].hi >= j0);
                all = all && seen[m][half].lo <= j0 && seen[m][half].hi >= j1;
            }
        all = __all_sync(0xffffffffu, all);
        if (__any_sync(0xffffffffu, some)) {
            float s[M][N][4];
            product_rows<D, M, N>(s, qs, warp * 16 * M, ks + stage * K_SIZE);
#pragma unroll
            for (int m = 0; m < M; m++) {
                if (!all)
                    mask_scores<N>(s[m], seen[m], j0);
                softmax_step<N, DV>(s[m], acc[m], top[m], sum[m], c.scale * LOG2E);
                if constexpr (DROP)
                    drop_rows<N>(s[m], drop_of(c, b, h), i0 + warp * 16 * M + m * 16 + lane / 4, j0);
            }
            product_channels<DV, M, N>(acc, s, vs + stage * V_SIZE);
        }
        __syncthreads();
    }
    copies_wait<0>(); /* a block whose rows see nothing still has its queries on the way */
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            finish_row<DV>(c, b, h, i0 + warp * 16 * M + m * 16 + half * 8 + lane / 4, acc[m], half,
                           top[m][half] * (c.scale * LOG2E), sum[m][half]);
}

template <int D, int DV, int M, int KEYS, bool DROP> static int launch_fwd(struct lane *l, const attn_call<bf16> &c)
{
    int64_t tiles = ceil_div(c.rows, FWD_WARPS * 16 * M);
    auto kernel = fwd_mma<D, DV, M, KEYS, DROP>;
    NEEDS_SMEM(l, kernel, (fwd_smem<D, DV, M, KEYS>()));
    LAUNCH(l, kernel, (unsigned)(tiles * c.batch * c.heads), FWD_WARPS * 32, (fwd_smem<D, DV, M, KEYS>()), c);
    return ST_OK;
}

/* With dropout the random numbers of 32 rows to a warp would spill up to 1408 bytes; 16 rows have room, and the same
 * bits. */
template <bool DROP> static int by_width(struct lane *l, const attn_call<bf16> &c)
{
    constexpr int M = DROP ? 1 : 2;
    if (c.width <= 64 && c.width_v <= 64)
        return launch_fwd<64, 64, M, 64, DROP>(l, c);
    if (c.width <= 128 && c.width_v <= 128)
        return launch_fwd<128, 128, M, 64, DROP>(l, c);
    if (c.width <= 192 && c.width_v <= 128)
        return launch_fwd<192, 128, M, 64, DROP>(l, c);
    return launch_fwd<256, 256, 1, 32, DROP>(l, c);
}

int attention_fwd_mma(struct lane *l, const attn_call<bf16> &c)
{
    return c.drop_info != NULL ? by_width<true>(l, c) : by_width<false>(l, c);
}
