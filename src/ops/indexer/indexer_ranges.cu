/* Attention weights of all keys that a query sees, summed over heads, on tensor cores, bf16: what the indexer learns
 * from where it does not learn from lists. A block takes 128 queries and 64 keys, a warp 16 of the queries; channels
 * come in 64 at a time, by asynchronous copies, one step ahead.
 *   range_weights   a block for each pair of tiles; heads one after the other, weights added up in registers
 *   range_lse       where nobody has the denominators: a block for each head and tile of queries walks over the keys */
#include "ops/cuda/mma.cuh"
#include "ops/indexer/indexer_cuda.cuh"

enum { WARPS = 8, THREADS = WARPS * 32, QUERIES = WARPS * 16, KEYS = 64, DEPTH = 64, PITCH = DEPTH + 8 };
static constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

struct range_tiles {
    bf16 q[QUERIES * PITCH], k[KEYS * PITCH];
};

/* Rows first .. first + count of sequence b; lse of row i of them and head h: lse[h * lse_head + i]. */
struct range_rows {
    index_call<bf16> c;
    int b, first, count, steps; /* steps: of 64 channels, for a head */
    float *lse;
    int64_t lse_head;
};

__device__ __forceinline__ index_range range_of(const range_rows &r, int row)
{
    index_range none = {0, 0};
    return row < r.count ? row_seen(r.c, r.b, r.first + row) : none;
}

/* 64 channels of queries `row` on and of keys `key` on; zeros for what is not there. */
__device__ __forceinline__ void load_step(range_tiles &to, const range_rows &r, int row, int key, int head, int channel)
{
    for (int x = threadIdx.x; x < (QUERIES + KEYS) * (DEPTH / 8); x += THREADS) {
        int n = x / (DEPTH / 8), at = x % (DEPTH / 8) * 8;
        bool query = n < QUERIES;
        int line = query ? row + n : key + n - QUERIES;
        bool there = line < (query ? r.count : r.c.keys) && channel + at < r.c.main_width;
        const bf16 *from = query ? r.c.mq.at(r.b, r.first + (there ? line : 0), head)
                                 : r.c.mk.at(r.b, there ? line : 0, head / r.c.per_group);
        copy_async16((query ? to.q + n * PITCH : to.k + (n - QUERIES) * PITCH) + at, from + (there ? channel + at : 0),
                     there);
    }
    copies_commit();
}

/* The next step is asked for, the present one awaited. */
__device__ __forceinline__ void next_step(bool more, range_tiles &to, const range_rows &r, int row, int key, int head,
                                          int channel)
{
    if (more) {
        load_step(to, r, row, key, head, channel);
        copies_wait<1>();
    } else {
        copies_wait<0>();
    }
    __syncthreads();
}

__device__ __forceinline__ void add_step(float (&z)[KEYS / 8][4], const range_tiles &t)
{
    int row = (int)threadIdx.x / 32 * 16;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t a[4], b[4];
        frag_a(a, t.q + row * PITCH + k, PITCH);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n += 2) {
            frag_b(b, t.k + n * 8 * PITCH + k, PITCH);
            mma_bf16(z[n], a, b[0], b[1]);
            mma_bf16(z[n + 1], a, b[2], b[3]);
        }
    }
}

__device__ __forceinline__ void clear(float (&z)[KEYS / 8][4])
{
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            z[n][e] = 0.0f;
}

/* A thread holds z[n][e] of query own_row(e / 2) of the tile and key own_key(n, e). */
__device__ __forceinline__ int own_row(int half)
{
    return (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4 + half * 8;
}
__device__ __forceinline__ int own_key(int n, int e) { return n * 8 + (int)threadIdx.x % 4 * 2 + e % 2; }

/* ---- weights --------------------------------------------------------------------------------- */

__device__ __forceinline__ bool block_sees(const range_rows &r, int row, int key)
{
    __shared__ bool sees[WARPS];
    int mine = row + (int)threadIdx.x % QUERIES;
    index_range seen = range_of(r, mine);
    bool any = __any_sync(0xffffffffu, seen.first < key + KEYS && key < seen.end);
    if (threadIdx.x % 32 == 0)
        sees[threadIdx.x / 32] = any;
    __syncthreads();
    any = false;
    for (int w = 0; w < WARPS; w++)
        any |= sees[w];
    return any;
}

__device__ __forceinline__ void add_weights(float (&sum)[KEYS / 8][4], const float (&z)[KEYS / 8][4],
                                            const range_rows &r, int row, int head)
{
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = row + own_row(half);
        lse[half] = i < r.count ? r.lse[head * r.lse_head + i] * LOG2E : INFINITY;
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[n][e] += exp2_fast(z[n][e] * (r.c.softmax_scale * LOG2E) - lse[e / 2]);
}

static __global__ void __launch_bounds__(THREADS)
    range_weights(const __grid_constant__ range_rows r, float *out, int64_t pitch)
{
    DYNAMIC_SHARED(char, raw, 16);
    range_tiles *tiles = (range_tiles *)raw;
    int key = (int)blockIdx.x * KEYS, row = (int)blockIdx.y * QUERIES, all = r.c.main_heads * r.steps;
    if (!block_sees(r, row, key))
        return;
    float z[KEYS / 8][4], sum[KEYS / 8][4];
    clear(z);
    clear(sum);
    load_step(tiles[0], r, row, key, 0, 0);
    for (int t = 0; t < all; t++) {
        int next = t + 1;
        next_step(next < all, tiles[next % 2], r, row, key, next / r.steps, next % r.steps * DEPTH);
        add_step(z, tiles[t % 2]);
        if (next % r.steps == 0) {
            add_weights(sum, z, r, row, t / r.steps);
            clear(z);
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = row + own_row(half);
        index_range seen = range_of(r, i);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = half * 2; e < half * 2 + 2; e++) {
                int j = key + own_key(n, e);
                if (j >= seen.first && j < seen.end)
                    out[i * pitch + j - seen.first] = sum[n][e];
            }
    }
}

/* ---- denominators ---------------------------------------------------------------------------- */

/* A sum of powers of two: 2^top * sum. */
struct power_sum {
    float top, sum;
};
__device__ __forceinline__ power_sum join(power_sum a, power_sum b)
{
    float top = fmaxf(a.top, b.top);
    if (top == -INFINITY)
        return a;
    power_sum out = {top, a.sum * exp2_fast(a.top - top) + b.sum * exp2_fast(b.top - top)};
    return out;
}

/* What the row's keys of this tile add. */
__device__ __forceinline__ power_sum tile_sum(const float (&z)[KEYS / 8][4], const range_rows &r, int row, int key,
                                              int half)
{
    index_range seen = range_of(r, row + own_row(half));
    float scale = r.c.softmax_scale * LOG2E;
    power_sum s = {-INFINITY, 0.0f};
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = half * 2; e < half * 2 + 2; e++) {
            int j = key + own_key(n, e);
            if (j >= seen.first && j < seen.end)
                s.top = fmaxf(s.top, z[n][e] * scale);
        }
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = half * 2; e < half * 2 + 2; e++) {
            int j = key + own_key(n, e);
            if (j >= seen.first && j < seen.end)
                s.sum += exp2_fast(z[n][e] * scale - s.top);
        }
    return s;
}

static __global__ void __launch_bounds__(THREADS) range_lse(const __grid_constant__ range_rows r)
{
    DYNAMIC_SHARED(char, raw, 16);
    range_tiles *tiles = (range_tiles *)raw;
    int row = (int)blockIdx.x * QUERIES, head = (int)blockIdx.y, last = min(row + QUERIES, r.count) - 1;
    int64_t start = r.c.start != NULL ? *r.c.start : 0;
    /* With documents an entry more than in one document may be complete. */
    int end = (int)min(index_visible(start + r.first + last, 0, r.c.ratio, r.c.keys).end + 1, (int64_t)r.c.keys);
    int all = max(0, (end + KEYS - 1) / KEYS) * r.steps;
    power_sum s[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
    float z[KEYS / 8][4];
    clear(z);
    if (all > 0)
        load_step(tiles[0], r, row, 0, head, 0);
    for (int t = 0; t < all; t++) {
        int next = t + 1;
        next_step(next < all, tiles[next % 2], r, row, next / r.steps * KEYS, head, next % r.steps * DEPTH);
        add_step(z, tiles[t % 2]);
        if (next % r.steps == 0) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                s[half] = join(s[half], tile_sum(z, r, row, t / r.steps * KEYS, half));
            clear(z);
        }
        __syncthreads();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) { /* that have other keys of the same row */
            power_sum other = {__shfl_xor_sync(0xffffffffu, s[half].top, lanes),
                               __shfl_xor_sync(0xffffffffu, s[half].sum, lanes)};
            s[half] = join(s[half], other);
        }
        int i = row + own_row(half);
        if (threadIdx.x % 4 == 0 && i < r.count)
            r.lse[head * r.lse_head + i] = (s[half].top + log2f(s[half].sum)) * LN2;
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

bool index_ranges_fit(const struct tensor *mq, const struct tensor *mk)
{
    return mq->dtype == DT_BF16 && aligned16(mq) && aligned16(mk);
}

int index_range_weights(struct lane *l, const index_call<bf16> &c, int b, int first, int count, float *out,
                        int64_t pitch, float *lse)
{
    range_rows r = {c, b, first, count, (c.main_width + DEPTH - 1) / DEPTH, lse, count};
    unsigned tiles = (unsigned)ceil_div(count, QUERIES);
    NEEDS_SMEM(l, range_weights, 2 * sizeof(range_tiles));
    NEEDS_SMEM(l, range_lse, 2 * sizeof(range_tiles));
    if (c.lse != NULL) {
        r.lse = (float *)c.lse + b * c.lse_batch + first;
        r.lse_head = c.lse_head;
    } else {
        LAUNCH(l, range_lse, dim3(tiles, (unsigned)c.main_heads), THREADS, 2 * sizeof(range_tiles), r);
    }
    LAUNCH(l, range_weights, dim3((unsigned)ceil_div(c.keys, KEYS), tiles), THREADS, 2 * sizeof(range_tiles), r, out,
           pitch);
    return ST_OK;
}
