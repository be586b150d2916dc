/* The indexer on tensor cores, bf16; see indexer.h. A block takes one query and walks its keys, 64 at a time: heads are
 * the rows of the products. Keys come in by asynchronous copies, one tile ahead.
 *   scores_mma     relu, weights and the sum over heads happen in registers
 *   gradient_mma   the same products again, then those of the gradients: of the query in registers, what it adds to
 *                  each of its keys to scratch */
#include "ops/cuda/mma.cuh"
#include "ops/indexer/indexer_cuda.cuh"
#include "ops/sparse/sparse_cuda.cuh"

enum { CORE_WARPS = 4, CORE_THREADS = CORE_WARPS * 32, CORE_HEADS = CORE_WARPS * 16, TILE_KEYS = 64, PAD = 8 };
enum { G_PITCH = TILE_KEYS + PAD };

/* Keys n .. n + 63 of a row, zeros where there is none. */
template <int WIDTH>
__device__ __forceinline__ void load_keys(bf16 *to, const index_call<bf16> &c, const key_list &keys, int64_t b,
                                          int first)
{
    constexpr int PACKS = WIDTH / 8;
    for (int x = threadIdx.x; x < TILE_KEYS * PACKS; x += CORE_THREADS) {
        int n = first + x / PACKS, at = x % PACKS * 8, key = n < keys.count ? keys.key(n) : -1;
        copy_async16(to + x / PACKS * (WIDTH + PAD) + at, c.k.at(b, max(key, 0), 0) + at, key >= 0);
    }
    copies_commit();
}

template <int WIDTH>
__device__ __forceinline__ void load_query(bf16 *to, const index_call<bf16> &c, int64_t b, int64_t i)
{
    for (int x = threadIdx.x; x < CORE_HEADS * (WIDTH / 8); x += CORE_THREADS) {
        int h = x / (WIDTH / 8), at = x % (WIDTH / 8) * 8;
        uint4 zero = make_uint4(0, 0, 0, 0);
        *(uint4 *)(to + h * (WIDTH + PAD) + at) = h < c.heads ? *(const uint4 *)(c.q.at(b, i, h) + at) : zero;
    }
}

/* The next tile is asked for, the present one awaited. */
template <int WIDTH>
__device__ __forceinline__ void step_keys(bf16 *next, const index_call<bf16> &c, const key_list &keys, int64_t b,
                                          int first)
{
    if (first < keys.count) {
        load_keys<WIDTH>(next, c, keys, b, first);
        copies_wait<1>();
    } else {
        copies_wait<0>();
    }
    __syncthreads();
}

/* This warp's 16 heads: operands of their products, and their two weights of this lane. */
template <int WIDTH> struct own_heads {
    uint32_t a[WIDTH / 16][4];
    float w[2];
};
template <int WIDTH>
__device__ __forceinline__ own_heads<WIDTH> take_heads(const bf16 *q, const index_call<bf16> &c, int64_t b, int64_t i)
{
    own_heads<WIDTH> o;
    int row = threadIdx.x / 32 * 16;
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++)
        frag_a(o.a[k], q + row * (WIDTH + PAD) + k * 16, WIDTH + PAD);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int h = row + threadIdx.x % 32 / 4 + half * 8;
        o.w[half] = h < c.heads ? c.w.at(b, i, 0)[h] : 0.0f;
    }
    return o;
}

/* Products with keys n .. n + 15 of a tile. */
template <int WIDTH>
__device__ __forceinline__ void product_tile(float (*z)[4], const own_heads<WIDTH> &o, const bf16 *tile, int n)
{
#pragma unroll
    for (int x = 0; x < 2; x++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            z[x][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) {
        uint32_t b[4];
        frag_b(b, tile + n * (WIDTH + PAD) + k * 16, WIDTH + PAD);
        mma_bf16(z[0], o.a[k], b[0], b[1]);
        mma_bf16(z[1], o.a[k], b[2], b[3]);
    }
}

template <int WIDTH>
static __global__ void __launch_bounds__(CORE_THREADS)
    scores_mma(const __grid_constant__ index_call<bf16> c, int64_t first_row, float *scores, int64_t pitch, float scale)
{
    constexpr int PITCH = WIDTH + PAD;
    DYNAMIC_SHARED(bf16, pool, 16);
    __shared__ float part[CORE_WARPS][TILE_KEYS];
    bf16 *q = pool, *tiles = pool + CORE_HEADS * PITCH;
    int64_t r = first_row + blockIdx.x, b = r / c.rows, i = r % c.rows;
    key_list keys = keys_of(c, b, i);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *out = scores + blockIdx.x * pitch + (c.by_key ? keys.first : 0);
    if (keys.count == 0)
        return;
    load_keys<WIDTH>(tiles, c, keys, b, 0);
    load_query<WIDTH>(q, c, b, i);
    __syncthreads();
    own_heads<WIDTH> own = take_heads<WIDTH>(q, c, b, i);
    for (int first = 0, at = 0; first < keys.count; first += TILE_KEYS, at ^= 1) {
        step_keys<WIDTH>(tiles + (at ^ 1) * TILE_KEYS * PITCH, c, keys, b, first + TILE_KEYS);
#pragma unroll
        for (int n = 0; n < TILE_KEYS; n += 16) {
            float z[2][4];
            product_tile<WIDTH>(z, own, tiles + at * TILE_KEYS * PITCH, n);
#pragma unroll
            for (int x = 0; x < 2; x++)
#pragma unroll
                for (int e = 0; e < 2; e++) { /* over the eight lanes that hold other heads of the same key */
                    float low = z[x][e], high = z[x][e + 2];
                    float s =
                        own.w[0] * (c.relu && low < 0 ? 0.0f : low) + own.w[1] * (c.relu && high < 0 ? 0.0f : high);
                    s += __shfl_xor_sync(0xffffffffu, s, 4);
                    s += __shfl_xor_sync(0xffffffffu, s, 8);
                    s += __shfl_xor_sync(0xffffffffu, s, 16);
                    if (lane < 4)
                        part[warp][n + x * 8 + lane * 2 + e] = s;
                }
        }
        __syncthreads();
        int n = first + threadIdx.x;
        if (threadIdx.x < TILE_KEYS && n < keys.count) {
            float s = 0;
#pragma unroll
            for (int x = 0; x < CORE_WARPS; x++)
                s += part[x][threadIdx.x];
            out[n] = keys.key(n) < 0 ? -INFINITY : s * scale;
        }
        __syncthreads();
    }
}

/* acc (16 x WIDTH) += a (16 x 16) times 16 rows of WIDTH channels. */
template <int WIDTH> __device__ __forceinline__ void add_channels(float (*acc)[4], const uint32_t *a, const bf16 *rows)
{
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n += 2) {
        uint32_t b[4];
        frag_b_t(b, rows + n * 8, WIDTH + PAD);
        mma_bf16(acc[n], a, b[0], b[1]);
        mma_bf16(acc[n + 1], a, b[2], b[3]);
    }
}
template <int N> __device__ __forceinline__ void clear(float (*acc)[4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc[n][e] = 0.0f;
}

/* g[h][n] = ds_n w_h where head h passes relu; dw of this lane's two heads. */
template <int WIDTH>
__device__ __forceinline__ void gradient_tile(bf16 *g, float *dw, const own_heads<WIDTH> &own, const bf16 *tile,
                                              const float *ds, bool relu)
{
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < TILE_KEYS; n += 16) {
        float z[2][4];
        product_tile<WIDTH>(z, own, tile, n);
#pragma unroll
        for (int x = 0; x < 2; x++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int col = n + x * 8 + lane % 4 * 2;
                float v[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float at = z[x][2 * half + e], d = relu && at < 0 ? 0.0f : ds[col + e];
                    dw[half] += d * at;
                    v[e] = d * own.w[half];
                }
                *(uint32_t *)(g + (row + half * 8) * G_PITCH + col) = pack_bf16(v[0], v[1]);
            }
    }
}

template <int WIDTH>
static __global__ void __launch_bounds__(CORE_THREADS)
    gradient_mma(const __grid_constant__ index_call<bf16> c, int64_t first_row, const float *target, float *add,
                 const double *scale, double factor)
{
    constexpr int PITCH = WIDTH + PAD, N = WIDTH / 8;
    DYNAMIC_SHARED(bf16, pool, 16);
    __shared__ float ds[TILE_KEYS];
    bf16 *q = pool, *tiles = q + CORE_HEADS * PITCH, *g = tiles + 2 * TILE_KEYS * PITCH;
    int64_t r = first_row + blockIdx.x, b = r / c.rows, i = r % c.rows;
    key_list keys = keys_of(c, b, i);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float by = (float)(scale[0] * factor), dw[2] = {0, 0}, dq[N][4];
    const float *p = target + (int64_t)blockIdx.x * 2 * c.most;
    clear<N>(dq);
    load_query<WIDTH>(q, c, b, i);
    if (keys.count > 0)
        load_keys<WIDTH>(tiles, c, keys, b, 0);
    __syncthreads();
    own_heads<WIDTH> own = take_heads<WIDTH>(q, c, b, i);
    for (int first = 0, at = 0; first < keys.count; first += TILE_KEYS, at ^= 1) {
        const bf16 *tile = tiles + at * TILE_KEYS * PITCH;
        int mine = first + threadIdx.x;
        if (threadIdx.x < TILE_KEYS)
            ds[threadIdx.x] = mine < keys.count && keys.key(mine) >= 0 ? by * p[mine] : 0.0f;
        step_keys<WIDTH>(tiles + (at ^ 1) * TILE_KEYS * PITCH, c, keys, b, first + TILE_KEYS);
        gradient_tile<WIDTH>(g, dw, own, tile, ds, c.relu);
        __syncthreads();
        float sum[N][4];
        clear<N>(sum);
#pragma unroll
        for (int k = 0; k < TILE_KEYS; k += 16) {
            uint32_t a[4];
            frag_a(a, g + warp * 16 * G_PITCH + k, G_PITCH);
            add_channels<WIDTH>(dq, a, tile + k * PITCH);
            frag_a_t(a, g + k * G_PITCH + warp * 16, G_PITCH);
            add_channels<WIDTH>(sum, a, q + k * PITCH);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int n = first + warp * 16 + lane / 4 + half * 8;
            float *out = add + ((int64_t)blockIdx.x * c.most + n) * WIDTH + lane % 4 * 2;
#pragma unroll
            for (int x = 0; x < N; x++)
                if (n < keys.count)
                    *(float2 *)(out + x * 8) = make_float2(sum[x][2 * half], sum[x][2 * half + 1]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int h = warp * 16 + lane / 4 + half * 8;
        float total = dw[half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (h >= c.heads)
            continue;
        bf16 *out = c.dq.at(b, i, h) + lane % 4 * 2;
#pragma unroll
        for (int x = 0; x < N; x++)
            *(uint32_t *)(out + x * 8) = pack_bf16(dq[x][2 * half], dq[x][2 * half + 1]);
        if (lane % 4 == 0)
            c.dw.at(b, i, 0)[h] = from_float<bf16>(total);
    }
}

/* A warp for each key: what the queries of a chunk add to it, in order. A key that none of them has is left alone, but
 * by the first chunk. */
static __global__ void __launch_bounds__(CORE_THREADS)
    sum_keys(float *sum, const float *add, const __grid_constant__ index_places place, int keys, int count, int most,
             int width, bool keep)
{
    int64_t j = (int64_t)blockIdx.x * CORE_WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    bool mine = lane * 4 < width, touched = !keep;
    if (j >= keys)
        return;
    float4 *to = (float4 *)(sum + j * width) + lane, total = make_float4(0, 0, 0, 0);
    for (int base = 0; base < count; base += 32) {
        int n = base + lane < count ? *place.at(base + lane, j) : -1;
        unsigned there = __ballot_sync(0xffffffffu, n >= 0);
        if (there != 0 && !touched) {
            touched = true;
            total = mine ? *to : total;
        }
        while (there != 0) {
            int row = __ffs((int)there) - 1, at = __shfl_sync(0xffffffffu, n, row);
            there &= there - 1;
            if (!mine)
                continue;
            float4 v = ((const float4 *)(add + ((int64_t)(base + row) * most + at) * width))[lane];
            total.x += v.x;
            total.y += v.y;
            total.z += v.z;
            total.w += v.w;
        }
    }
    if (mine && touched)
        *to = total;
}

/* ---- launchers ------------------------------------------------------------------------------- */

bool index_cores_fit(const struct tensor *q, const struct tensor *k)
{
    struct index_shape s = {q->dtype, q->dim[2], q->dim[3], aligned16(q) && aligned16(k), true};
    return index_path_of(&s, &sparse_some_hopper).path != SPARSE_PATH_PLAIN;
}

int index_scores(struct lane *l, const index_call<bf16> &c, int64_t first, unsigned count, float *out, int64_t pitch,
                 float scale)
{
    struct index_shape s = {DT_BF16, c.heads, c.width, true, c.idx != NULL};
    struct sparse_device d = sparse_device_of(l);
    bool hopper = index_path_of(&s, &d).path == SPARSE_PATH_HOPPER;
    return (hopper ? index_scores_hopper : index_scores_mma)(l, c, first, count, out, pitch, scale);
}

template <int WIDTH>
static int run_scores(struct lane *l, const index_call<bf16> &c, int64_t first, unsigned count, float *out,
                      int64_t pitch, float scale)
{
    int smem = (CORE_HEADS + 2 * TILE_KEYS) * (WIDTH + PAD) * 2;
    auto kernel = scores_mma<WIDTH>;
    NEEDS_SMEM(l, kernel, smem);
    LAUNCH(l, kernel, count, CORE_THREADS, smem, c, first, out, pitch, scale);
    return ST_OK;
}

int index_scores_mma(struct lane *l, const index_call<bf16> &c, int64_t first, unsigned count, float *out,
                     int64_t pitch, float scale)
{
    return (c.width == 64 ? run_scores<64> : run_scores<128>)(l, c, first, count, out, pitch, scale);
}

template <int WIDTH>
static int run_gradient(struct lane *l, const index_call<bf16> &c, const index_gradient &g, int64_t first, int count)
{
    int smem = ((CORE_HEADS + 2 * TILE_KEYS) * (WIDTH + PAD) + CORE_HEADS * G_PITCH) * 2;
    auto kernel = gradient_mma<WIDTH>;
    NEEDS_SMEM(l, kernel, smem);
    LAUNCH(l, kernel, (unsigned)count, CORE_THREADS, smem, c, first, g.target, g.add, g.scale, g.factor);
    return ST_OK;
}

int index_gradient_mma(struct lane *l, const index_call<bf16> &c, const index_gradient &g, int64_t first, int count)
{
    return (c.width == 64 ? run_gradient<64> : run_gradient<128>)(l, c, g, first, count);
}

int index_sum_keys(struct lane *l, const index_call<bf16> &c, const index_gradient &g, int count, bool keep)
{
    LAUNCH(l, sum_keys, (unsigned)ceil_div(c.keys, CORE_WARPS), CORE_THREADS, 0, g.sum, g.add, g.place, c.keys, count,
           c.most, c.width, keep);
    return ST_OK;
}
