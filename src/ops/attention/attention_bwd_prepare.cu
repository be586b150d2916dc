/* What the backward pass for Hopper needs before its kernel; see attention_bwd_hopper.cu. */
#include "ops/attention/attention_bwd_hopper.cuh"

/* A block for each tile of a head. */
template <int D> __global__ void __launch_bounds__(256) prepare_rows(const __grid_constant__ bwd_job j)
{
    constexpr int ROWS = TILE_ROWS<D>, LANES = D / 8, AT_ONCE = 256 / LANES;
    __shared__ float scratch[8];
    __shared__ int most[8];
    const attn_call<bf16> &c = j.c;
    int h = (int)(blockIdx.x % c.heads), m = (int)(blockIdx.x / c.heads) % j.tiles,
        b = (int)(blockIdx.x / c.heads) / j.tiles;
    row_record<ROWS> *out = (row_record<ROWS> *)j.records + tile_index(j, b, h, m);
    int part = threadIdx.x % LANES, most_lo = 0;
    float dsink = 0, sink = c.sink != NULL ? c.sink[h] * LOG2E : 0.0f;
#pragma unroll
    for (int x = 0; x < ROWS; x += AT_ONCE) {
        int r = x + threadIdx.x / LANES, i = m * ROWS + r;
        bool valid = i < c.rows;
        float sum = 0;
        if (valid && part * 8 < c.width_v) {
            pack<bf16> p = load16(c.dout.at(b, h) + i * c.dout.row + part * 8),
                       o = load16(c.o.at(b, h) + i * c.o.row + part * 8);
#pragma unroll
            for (int e = 0; e < 8; e++)
                sum += to_float(p.v[e]) * to_float(o.v[e]);
        }
#pragma unroll
        for (int d = LANES / 2; d > 0; d >>= 1)
            sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (part == 0) {
            float lse = valid ? c.lse[b * c.lse_batch + h * c.lse_head + i] * LOG2E : INFINITY;
            key_range seen = keys_seen(c, first_query(j), b, i);
            out->log2_sum[r] = lse == -INFINITY ? INFINITY : lse;
            out->delta[r] = valid ? sum : 0.0f;
            out->lo[r] = seen.lo;
            most_lo = max(most_lo, seen.lo);
            if (valid && c.sink != NULL)
                dsink += exp2_fast(sink - lse) * sum;
        }
    }
    most_lo = __reduce_max_sync(0xffffffffu, most_lo);
    if (threadIdx.x % 32 == 0)
        most[threadIdx.x / 32] = most_lo;
    float total = c.sink != NULL ? block_sum<256>(dsink, scratch) : 0.0f;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    for (int w = 0; w < 8; w++)
        most_lo = max(most_lo, most[w]);
    out->most_lo = most_lo;
    out->pad[0] = out->pad[1] = out->pad[2] = 0;
    j.turn[tile_index(j, b, h, m)] = 0;
    for (int64_t x = blockIdx.x; j.shares > 1 && x < (int64_t)c.batch * c.groups * j.blocks; x += gridDim.x)
        j.kv_turn[x] = 0;
    if (blockIdx.x == 0)
        *j.ticket = 0;
    if (c.sink != NULL)
        j.dsink_part[blockIdx.x] = total;
}

/* dsink[h] = - the sum of the parts of its tiles. */
static __global__ void __launch_bounds__(256) sum_dsink_parts(const __grid_constant__ bwd_job j, float *dsink, bool acc)
{
    __shared__ float scratch[8];
    float sum = 0;
    for (int x = threadIdx.x; x < j.c.batch * j.tiles; x += 256)
        sum += j.dsink_part[(int64_t)x * j.c.heads + blockIdx.x];
    sum = block_sum<256>(sum, scratch);
    if (threadIdx.x == 0)
        dsink[blockIdx.x] = (acc ? dsink[blockIdx.x] : 0.0f) - sum;
}

/* With documents: the ranges of key blocks and tiles, a block for each batch. A tile's first block is that of any tile
 * from it on, so that the tiles of a key block follow each other whatever the documents are. */
static __global__ void __launch_bounds__(256) document_ranges(const __grid_constant__ bwd_job j)
{
    __shared__ int least[256];
    int b = blockIdx.x, each = (j.tiles + 255) / 256, from = threadIdx.x * each, to = min(from + each, j.tiles),
        lo = 0x7fffffff;
    int *tile_lo = j.tile_lo + (int64_t)b * j.tiles, *last_tile = j.last_tile + (int64_t)b * j.blocks;
    for (int m = to - 1; m >= from; m--) {
        for (int i = m * j.rows_of_tile; i < min(j.c.rows, (m + 1) * j.rows_of_tile); i++) {
            key_range seen = keys_seen(j.c, first_query(j), b, i);
            lo = min(lo, max(min(seen.lo, seen.hi), 0));
        }
        tile_lo[m] = lo / KEYS;
    }
    least[threadIdx.x] = lo;
    __syncthreads();
    int after = 0x7fffffff;
    for (int t = threadIdx.x + 1; t < 256; t++)
        after = min(after, least[t]);
    for (int m = from; m < to; m++)
        tile_lo[m] = min(tile_lo[m], after / KEYS);
    __syncthreads();
    for (int n = threadIdx.x; n < j.blocks; n += 256) {
        int low = 0, high = j.tiles; /* the first tile whose first block is beyond n */
        while (low < high) {
            int middle = (low + high) / 2;
            if (tile_lo[middle] <= n)
                low = middle + 1;
            else
                high = middle;
        }
        last_tile[n] = low - 1;
    }
}

int attention_bwd_prepare(struct lane *l, const struct attention_bwd_args *a, const bwd_job &j)
{
    auto prepare = j.rows_of_tile == TILE_ROWS<64> ? prepare_rows<64> : prepare_rows<128>;
    LAUNCH(l, prepare, (unsigned)(j.c.batch * j.tiles * j.c.heads), 256, 0, j);
    if (present(&a->sink))
        LAUNCH(l, sum_dsink_parts, (unsigned)j.c.heads, 256, 0, j, (float *)a->dsink.data, a->acc_dsink);
    if (j.tile_lo != NULL)
        LAUNCH(l, document_ranges, (unsigned)j.c.batch, 256, 0, j);
    return ST_OK;
}
