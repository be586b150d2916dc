/* colsum, CUDA version; see colsum.h. A block takes a tile of columns of a fixed run of rows: a warp a row at a time, a
 * lane a vector of columns; the warps' sums meet in shared memory, those of the blocks in ops/cuda/sums.cuh. */
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sums.cuh"
#include "ops/colsum/colsum.h"

enum { WARPS = 8 };

template <typename T, int V>
static __global__ void __launch_bounds__(32 * WARPS)
    colsum_tiles(const __grid_constant__ struct tensor x, int64_t rows_per_block, float *partial)
{
    __shared__ float shared[WARPS * 32 * V];
    constexpr int AHEAD = 4;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t rows = x.dim[0], n = x.dim[1], tiles = (n + 32 * V - 1) / (32 * V), block = blockIdx.x / tiles;
    int64_t column = (blockIdx.x % tiles * 32 + lane) * V, first = block * rows_per_block,
            end = min(rows, first + rows_per_block);
    bool mine = column < n;
    float sum[V] = {};
    for (int64_t r = first + warp; r < end; r += WARPS * AHEAD) {
        float value[AHEAD][V];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (mine && r + k * WARPS < end)
                load_floats(row2<T>(x, r + k * WARPS) + column, value[k]);
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (mine && r + k * WARPS < end)
#pragma unroll
                for (int e = 0; e < V; e++)
                    sum[e] += value[k][e];
    }
#pragma unroll
    for (int e = 0; e < V; e++)
        shared[(warp * V + e) * 32 + lane] = sum[e];
    __syncthreads();
    if (warp != 0 || !mine)
        return;
    for (int w = 1; w < WARPS; w++)
#pragma unroll
        for (int e = 0; e < V; e++)
            sum[e] += shared[(w * V + e) * 32 + lane];
    store_floats(partial + block * n + column, sum);
}

static int64_t rows_per_block(int64_t rows)
{
    return round_up(max_i64(ceil_div(rows, 128), COLSUM_BLOCK), COLSUM_BLOCK);
}
static int64_t blocks_of(int64_t rows) { return ceil_div(rows, rows_per_block(rows)); }

extern "C" int64_t colsum_work_cuda(const struct colsum_args *a)
{
    return blocks_of(a->x.dim[0]) * a->x.dim[1] * (int64_t)sizeof(float);
}

template <typename T, int V> static int launch(struct lane *l, const struct colsum_args *a)
{
    int64_t rows = a->x.dim[0], n = a->x.dim[1];
    LAUNCH(l, (colsum_tiles<T, V>), (unsigned)(ceil_div(n, 32 * V) * blocks_of(rows)), 32 * WARPS, 0, a->x,
           rows_per_block(rows), (float *)a->work.data);
    return add_partials(l, (const float *)a->work.data, blocks_of(rows), n, (float *)a->out.data, n, 0, a->acc_out);
}

extern "C" int colsum_cuda(struct lane *l, const struct colsum_args *a)
{
    TRY(colsum_check(a, l->err));
    TRY(check_work("colsum", &a->work, colsum_work_cuda(a), l->err));
    bool vectors = aligned16(&a->x) && pointer16(a->work.data);
    if (a->x.dtype == DT_BF16)
        return vectors ? launch<bf16, 8>(l, a) : launch<bf16, 1>(l, a);
    return vectors ? launch<float, 4>(l, a) : launch<float, 1>(l, a);
}
