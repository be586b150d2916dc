/* attention backward on tensor cores; see attention_cuda.cuh. Two kernels, so that every gradient has one owner and no
 * atomics are needed: one block for a tile of keys sums dk and dv over the query heads of its group and their rows, one
 * block for a tile of queries sums dq over keys. Both recompute the scores from q, k and the saved logarithms.
 * delta (sum of do * o of each row) is made by attention.cu before. */
#include "ops/attention/attention_tile.cuh"

enum { BWD_WARPS = 4, BWD_THREADS = BWD_WARPS * 32 };

/* ---- dk and dv: the scores transposed, keys x queries ---------------------------------------- */

/* A warp owns 16 keys. Where both sums do not fit registers, the kernel runs once for each. */
enum { KEYS_OF_BLOCK = BWD_WARPS * 16 };

/* What a tile of queries needs beside q and do, by row. */
template <int ROWS> struct row_data {
    float log2_sum[ROWS], delta[ROWS];
    int lo[ROWS], hi[ROWS];
};

template <int D, int DV, int ROWS> constexpr int dkdv_smem()
{
    return (int)sizeof(bf16) * (KEYS_OF_BLOCK + 2 * ROWS) * (D + DV + 2 * TILE_PAD) + 2 * (int)sizeof(row_data<ROWS>);
}

template <int D, int DV, int ROWS>
__device__ __forceinline__ void load_queries(const attn_call<bf16> &c, bf16 *qs, bf16 *dos, row_data<ROWS> *rows,
                                             int first, int b, int h, int i0)
{
    load_tile<ROWS, D, BWD_THREADS>(qs, c.q.at(b, h), c.q.row, i0, c.rows, c.width, c.aligned);
    load_tile<ROWS, DV, BWD_THREADS>(dos, c.dout.at(b, h), c.dout.row, i0, c.rows, c.width_v, c.aligned);
    if (threadIdx.x < ROWS) {
        int i = i0 + threadIdx.x;
        bool valid = i < c.rows;
        key_range r = keys_seen(c, first, b, i);
        rows->lo[threadIdx.x] = r.lo;
        rows->hi[threadIdx.x] = r.hi;
        rows->log2_sum[threadIdx.x] = valid ? c.lse[b * c.lse_batch + h * c.lse_head + i] * LOG2E : 0.0f;
        rows->delta[threadIdx.x] = valid ? c.delta[((int64_t)b * c.heads + h) * c.rows + i] : 0.0f;
    }
}

/* First and last query that see any of the keys j0 .. j1; lo > hi if none does. */
__device__ __forceinline__ key_range queries_seeing(const attn_call<bf16> &c, int first, int b, int j0, int j1,
                                                    int *scratch)
{
    int64_t last = c.window > 0 ? (int64_t)j1 + c.window - 1 - first : c.rows - 1;
    key_range r = {max(0, j0 - first), (int)min((int64_t)c.rows - 1, last)};
    if (c.doc == NULL)
        return r;
    key_range mine = {0x7fffffff, -1};
    for (int i = r.lo + threadIdx.x; i <= r.hi; i += BWD_THREADS)
        if (c.doc[b * c.doc_batch + i] - c.before <= j1) {
            mine.lo = min(mine.lo, i);
            mine.hi = i;
        }
    return block_range<BWD_WARPS>(mine, scratch);
}

/* Probabilities of keys that a query, a column here, does not see. */
template <int N, int ROWS> __device__ __forceinline__ void mask_columns(float (*p)[4], const row_data<ROWS> *r, int key)
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = n * 8 + threadIdx.x % 4 * 2 + e % 2, j = key + e / 2 * 8;
            if (j < r->lo[i] || j > r->hi[i])
                p[n][e] = 0;
        }
}

/* Factors of a warp's 16 keys for the queries of a tile, which are columns here. */
template <int N> __device__ __forceinline__ void drop_columns(float (*kept)[4], const head_drop &d, int row, int key)
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            kept[n][e] = drop_factor(d, row + n * 8 + threadIdx.x % 4 * 2 + e % 2, key + e / 2 * 8);
}

template <int D, int DV, int ROWS, bool DO_K, bool DO_V, bool DROP>
__global__ void __launch_bounds__(BWD_THREADS) dkdv_mma(const attn_call<bf16> c)
{
    constexpr int N = ROWS / 8, Q_SIZE = ROWS * (D + TILE_PAD), DO_SIZE = ROWS * (DV + TILE_PAD);
    DYNAMIC_SHARED(uint4, pool, 16);
    __shared__ int scratch[2 * BWD_WARPS];
    bf16 *ks = (bf16 *)pool, *vs = ks + KEYS_OF_BLOCK * (D + TILE_PAD), *qs = vs + KEYS_OF_BLOCK * (DV + TILE_PAD),
         *dos = qs + 2 * Q_SIZE;
    row_data<ROWS> *rows = (row_data<ROWS> *)(dos + 2 * DO_SIZE);
    int groups = c.batch * c.groups, j0 = (int)(blockIdx.x / groups) * KEYS_OF_BLOCK,
        j1 = min(j0 + KEYS_OF_BLOCK, c.keys) - 1;
    int b = (int)(blockIdx.x % groups) / c.groups, g = (int)(blockIdx.x % groups) % c.groups;
    int first = first_index(c), warp = threadIdx.x / 32, lane = threadIdx.x % 32, key = j0 + warp * 16 + lane / 4;

    float dk[1][DO_K ? D / 8 : 1][4], dv[1][DO_V ? DV / 8 : 1][4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
#pragma unroll
        for (int n = 0; n < (DO_K ? D / 8 : 1); n++)
            dk[0][n][e] = 0;
#pragma unroll
        for (int n = 0; n < (DO_V ? DV / 8 : 1); n++)
            dv[0][n][e] = 0;
    }
    key_range range = queries_seeing(c, first, b, j0, j1, scratch);
    int t0 = range.lo / ROWS, tiles = range.lo <= range.hi ? range.hi / ROWS - t0 + 1 : 0, steps = tiles * c.per_group;
    load_tile<KEYS_OF_BLOCK, D, BWD_THREADS>(ks, c.k.at(b, g), c.k.row, j0, c.keys, c.width, c.aligned);
    load_tile<KEYS_OF_BLOCK, DV, BWD_THREADS>(vs, c.v.at(b, g), c.v.row, j0, c.keys, c.width_v, c.aligned);
    if (steps > 0)
        load_queries<D, DV, ROWS>(c, qs, dos, rows, first, b, g * c.per_group, t0 * ROWS);
    copies_commit();
    for (int step = 0; step < steps; step++) {
        int stage = step % 2, next = step + 1;
        if (next < steps) {
            load_queries<D, DV, ROWS>(c, qs + (stage ^ 1) * Q_SIZE, dos + (stage ^ 1) * DO_SIZE, rows + (stage ^ 1),
                                      first, b, g * c.per_group + next / tiles, (t0 + next % tiles) * ROWS);
            copies_commit();
            copies_wait<1>();
        } else {
            copies_wait<0>();
        }
        __syncthreads();
        const row_data<ROWS> *r = rows + stage;
        const bf16 *q = qs + stage * Q_SIZE, *d_o = dos + stage * DO_SIZE;
        int w0 = j0 + warp * 16, w1 = w0 + 15;
        bool some = false, all = w1 < c.keys;
#pragma unroll
        for (int i = lane; i < ROWS; i += 32) {
            some = some || (r->lo[i] <= w1 && r->hi[i] >= w0);
            all = all && r->lo[i] <= w0 && r->hi[i] >= w1;
        }
        all = __all_sync(0xffffffffu, all);
        if (__any_sync(0xffffffffu, some)) {
            float p[1][N][4], ds[1][N][4];
            product_rows<D, 1, N>(p, ks, warp * 16, q);
#pragma unroll
            for (int n = 0; n < N; n++) {
                float2 log2_sum = *(const float2 *)&r->log2_sum[n * 8 + lane % 4 * 2];
#pragma unroll
                for (int e = 0; e < 4; e++)
                    p[0][n][e] = exp2_fast(p[0][n][e] * (c.scale * LOG2E) - (e % 2 ? log2_sum.y : log2_sum.x));
            }
            if (!all)
                mask_columns<N, ROWS>(p[0], r, key);
            if constexpr (DO_V && !DROP)
                product_channels<DV, 1, N>(dv, p, d_o);
            float kept[DROP ? N : 1][4];
            if constexpr (DROP)
                drop_columns<N>(kept, drop_of(c, b, g * c.per_group + step / tiles), (t0 + step % tiles) * ROWS, key);
            if constexpr (DO_K) {
                product_rows<DV, 1, N>(ds, vs, warp * 16, d_o);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    float2 delta = *(const float2 *)&r->delta[n * 8 + lane % 4 * 2];
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        ds[0][n][e] = p[0][n][e] * ((DROP ? kept[DROP ? n : 0][e] * ds[0][n][e] : ds[0][n][e]) -
                                                    (e % 2 ? delta.y : delta.x));
                }
                product_channels<D, 1, N>(dk, ds, q);
            }
            if constexpr (DO_V && DROP) {
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        p[0][n][e] *= kept[n][e];
                product_channels<DV, 1, N>(dv, p, d_o);
            }
        }
        __syncthreads();
    }
    copies_wait<0>();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int j = key + half * 8;
        if (j >= c.keys)
            continue;
        if constexpr (DO_K)
            store_row<D>(c.dk.at(b, g) + j * c.dk.row, dk[0], half, c.scale, c.width, c.aligned);
        if constexpr (DO_V)
            store_row<DV>(c.dv.at(b, g) + j * c.dv.row, dv[0], half, 1.0f, c.width_v, c.aligned);
    }
}

template <int D, int DV, int ROWS, bool DO_K, bool DO_V, bool DROP>
static int launch_dkdv(struct lane *l, const attn_call<bf16> &c)
{
    int64_t tiles = ceil_div(c.keys, KEYS_OF_BLOCK);
    auto kernel = dkdv_mma<D, DV, ROWS, DO_K, DO_V, DROP>;
    NEEDS_SMEM(l, kernel, (dkdv_smem<D, DV, ROWS>()));
    LAUNCH(l, kernel, (unsigned)(tiles * c.batch * c.groups), BWD_THREADS, (dkdv_smem<D, DV, ROWS>()), c);
    return ST_OK;
}

/* ---- dq: queries x keys ---------------------------------------------------------------------- */

template <int D, int DV, int M, int KEYS> constexpr int dq_smem()
{
    return (int)sizeof(bf16) * (BWD_WARPS * 16 * M + 2 * KEYS) * (D + DV + 2 * TILE_PAD);
}

template <int N> __device__ __forceinline__ void mask_rows(float (*ds)[4], const key_range *seen, int key)
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int j = key + n * 8 + threadIdx.x % 4 * 2 + e % 2;
            if (j < seen[e / 2].lo || j > seen[e / 2].hi)
                ds[n][e] = 0;
        }
}

template <int D, int DV, int M, int KEYS, bool DROP>
__global__ void __launch_bounds__(BWD_THREADS) dq_mma(const attn_call<bf16> c)
{
    constexpr int ROWS = BWD_WARPS * 16 * M, N = KEYS / 8, K_SIZE = KEYS * (D + TILE_PAD),
                  V_SIZE = KEYS * (DV + TILE_PAD);
    DYNAMIC_SHARED(uint4, pool, 16);
    __shared__ int scratch[2 * BWD_WARPS];
    bf16 *qs = (bf16 *)pool, *dos = qs + ROWS * (D + TILE_PAD), *ks = dos + ROWS * (DV + TILE_PAD),
         *vs = ks + 2 * K_SIZE;
    int tiles = (c.rows + ROWS - 1) / ROWS, heads = c.batch * c.heads;
    int i0 = (tiles - 1 - (int)(blockIdx.x / heads)) * ROWS;
    int b = (int)(blockIdx.x % heads) / c.heads, h = (int)(blockIdx.x % heads) % c.heads, g = h / c.per_group;
    int first = first_index(c), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bf16 *k = c.k.at(b, g), *v = c.v.at(b, g);

    key_range seen[M][2], mine = {0x7fffffff, -1};
    float dq[M][D / 8][4], log2_sum[M][2], delta[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = i0 + warp * 16 * M + m * 16 + half * 8 + lane / 4;
            key_range r = keys_seen(c, first, b, i);
            seen[m][half] = r;
            if (r.lo <= r.hi) {
                mine.lo = min(mine.lo, r.lo);
                mine.hi = max(mine.hi, r.hi);
            }
            bool valid = i < c.rows;
            log2_sum[m][half] = valid ? c.lse[b * c.lse_batch + h * c.lse_head + i] * LOG2E : 0.0f;
            delta[m][half] = valid ? c.delta[((int64_t)b * c.heads + h) * c.rows + i] : 0.0f;
#pragma unroll
            for (int n = 0; n < D / 8; n++)
                dq[m][n][2 * half] = dq[m][n][2 * half + 1] = 0;
        }
    key_range all_rows = block_range<BWD_WARPS>(mine, scratch);
    load_tile<ROWS, D, BWD_THREADS>(qs, c.q.at(b, h), c.q.row, i0, c.rows, c.width, c.aligned);
    load_tile<ROWS, DV, BWD_THREADS>(dos, c.dout.at(b, h), c.dout.row, i0, c.rows, c.width_v, c.aligned);
    int t = all_rows.lo / KEYS, end = all_rows.lo <= all_rows.hi ? all_rows.hi / KEYS : t - 1, stage = 0;
    if (t <= end) {
        load_tile<KEYS, D, BWD_THREADS>(ks, k, c.k.row, t * KEYS, c.keys, c.width, c.aligned);
        load_tile<KEYS, DV, BWD_THREADS>(vs, v, c.v.row, t * KEYS, c.keys, c.width_v, c.aligned);
    }
    copies_commit();
    for (; t <= end; t++, stage ^= 1) {
        if (t < end) {
            load_tile<KEYS, D, BWD_THREADS>(ks + (stage ^ 1) * K_SIZE, k, c.k.row, (t + 1) * KEYS, c.keys, c.width,
                                            c.aligned);
            load_tile<KEYS, DV, BWD_THREADS>(vs + (stage ^ 1) * V_SIZE, v, c.v.row, (t + 1) * KEYS, c.keys, c.width_v,
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
            float p[M][N][4], ds[M][N][4];
            product_rows<D, M, N>(p, qs, warp * 16 * M, ks + stage * K_SIZE);
            product_rows<DV, M, N>(ds, dos, warp * 16 * M, vs + stage * V_SIZE);
#pragma unroll
            for (int m = 0; m < M; m++) {
                if constexpr (DROP)
                    drop_rows<N>(ds[m], drop_of(c, b, h), i0 + warp * 16 * M + m * 16 + lane / 4, j0);
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        ds[m][n][e] = exp2_fast(p[m][n][e] * (c.scale * LOG2E) - log2_sum[m][e / 2]) *
                                      (ds[m][n][e] - delta[m][e / 2]);
                if (!all)
                    mask_rows<N>(ds[m], seen[m], j0);
            }
            product_channels<D, M, N>(dq, ds, ks + stage * K_SIZE);
        }
        __syncthreads();
    }
    copies_wait<0>();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = i0 + warp * 16 * M + m * 16 + half * 8 + lane / 4;
            if (i < c.rows)
                store_row<D>(c.dq.at(b, h) + i * c.dq.row, dq[m], half, c.scale, c.width, c.aligned);
        }
}

template <int D, int DV, int M, int KEYS, bool DROP> static int launch_dq(struct lane *l, const attn_call<bf16> &c)
{
    int64_t tiles = ceil_div(c.rows, BWD_WARPS * 16 * M);
    auto kernel = dq_mma<D, DV, M, KEYS, DROP>;
    NEEDS_SMEM(l, kernel, (dq_smem<D, DV, M, KEYS>()));
    LAUNCH(l, kernel, (unsigned)(tiles * c.batch * c.heads), BWD_THREADS, (dq_smem<D, DV, M, KEYS>()), c);
    return ST_OK;
}

template <bool DROP> static int by_width(struct lane *l, const attn_call<bf16> &c)
{
    if (c.width <= 64 && c.width_v <= 64) {
        TRY((launch_dkdv<64, 64, 64, true, true, DROP>(l, c)));
        return launch_dq<64, 64, 2, 32, DROP>(l, c);
    }
    if (c.width <= 128 && c.width_v <= 128) {
        TRY((launch_dkdv<128, 128, 32, true, true, DROP>(l, c)));
        return launch_dq<128, 128, 2, 32, DROP>(l, c);
    }
    if (c.width <= 192 && c.width_v <= 128) {
        TRY((launch_dkdv<192, 128, 32, true, true, DROP>(l, c)));
        return launch_dq<192, 128, 1, 32, DROP>(l, c);
    }
    TRY((launch_dkdv<256, 256, 32, true, false, DROP>(l, c)));
    TRY((launch_dkdv<256, 256, 32, false, true, DROP>(l, c)));
    return launch_dq<256, 256, 1, 32, DROP>(l, c);
}

int attention_bwd_mma(struct lane *l, const attn_call<bf16> &c)
{
    return c.drop_info != NULL ? by_width<true>(l, c) : by_width<false>(l, c);
}
