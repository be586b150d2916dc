/* shard8 on the GPU; see shard8.h. A block of threads finds the maximum of a scale block (or of many rows, where one
 * scale is for all), a thread makes four codes, a block of threads turns a tile of 64 x 64 bytes. */
#include "ops/cuda/f8.cuh"
#include "ops/shard8/shard8.h"

enum { THREADS = 256, MOST_BLOCKS = 1024, TURN_TILE = 64 };

/* ---- maxima ---------------------------------------------------------------------------------- */

struct own_rows {
    const float *x;
    int64_t n, cols, first, block, down, across;
};

static __device__ uint32_t all_most(uint32_t most)
{
    __shared__ uint32_t scratch[THREADS / 32];
    most = warp_max_u32(most, 32);
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = most;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++)
        most = max_u32(most, scratch[w]);
    return most;
}

static __global__ void __launch_bounds__(THREADS) most_of_blocks(struct own_rows p, uint32_t *out)
{
    int64_t r = (int64_t)blockIdx.x / p.across * p.block - p.first % p.block, c0 = blockIdx.x % p.across * p.block,
            end = r + p.block < p.n ? r + p.block : p.n, width = c0 + p.block < p.cols ? p.block : p.cols - c0;
    r = r > 0 ? r : 0;
    uint32_t most = 0;
    for (int64_t i = threadIdx.x, all = (end - r) * width; i < all; i += THREADS)
        most = max_u32(most, magnitude(p.x[(r + i / width) * p.cols + c0 + i % width]));
    most = all_most(most);
    if (threadIdx.x == 0)
        out[blockIdx.x] = most;
}

/* One for all; the order of an integer maximum does not matter. */
static __global__ void __launch_bounds__(THREADS) most_of_all(struct own_rows p, uint32_t *out)
{
    uint32_t most = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, all = p.n * p.cols; i < all;
         i += (int64_t)gridDim.x * THREADS)
        most = max_u32(most, magnitude(p.x[i]));
    most = all_most(most);
    if (threadIdx.x == 0)
        atomicMax(out, most);
}

extern "C" int shard8_most_cuda(struct lane *l, const struct shard8_most_args *a)
{
    TRY(shard8_most_check(a, l->err));
    struct own_rows p = {(const float *)a->x.data, a->x.dim[0],   a->x.dim[1], a->first, a->block,
                         a->most.dim[0],           a->most.dim[1]};
    uint32_t *out = (uint32_t *)a->most.data;
    if (a->block > 0) {
        LAUNCH(l, most_of_blocks, (unsigned)(p.down * p.across), THREADS, 0, p, out);
        return ST_OK;
    }
    TRY(cuda_status(l->err, (int)cudaMemsetAsync(out, 0, sizeof *out, stream_of(l)), "cudaMemsetAsync"));
    LAUNCH(l, most_of_all, (unsigned)min_i64(ceil_div(p.n * p.cols, THREADS), MOST_BLOCKS), THREADS, 0, p, out);
    return ST_OK;
}

/* ---- scales and codes ------------------------------------------------------------------------ */

struct maxima {
    const uint32_t *most;
    int64_t rows, cols, piece, block, ranks, down, across; /* rows, cols: of the whole matrix */
};

/* Scales as they lie in memory, for codes in their own order or transposed; zeros where there is no block. */
static __global__ void __launch_bounds__(THREADS)
    write_scales(struct maxima p, float *out, int64_t n, int64_t stride, bool turned)
{
    int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x, i = turned ? at % stride : at / stride,
            j = turned ? at / stride : at % stride, rows = p.block > 0 ? (p.rows + p.block - 1) / p.block : 1;
    uint32_t most = 0;
    float inverse = 0;
    if (at >= n)
        return;
    if (i < rows && j < p.across) {
        for (int64_t r = shard8_first(i, p.piece, p.block), end = shard8_end(i, p.piece, p.block, p.ranks); r < end;
             r++)
            most = max_u32(most, p.most[(r * p.down + shard8_row(i, r, p.piece, p.block)) * p.across + j]);
        f8_factor<DT_F8_E4M3>(most, &inverse);
    }
    out[at] = inverse;
}

/* The factor that belongs to an inverse scale: both are powers of two. */
static __device__ __forceinline__ float factor_of(float inverse)
{
    uint32_t bits = __float_as_uint(inverse);
    return bits >= 0x7f800000u ? 1.0f : f8_power(127 - (int)(bits >> 23));
}

/* Four codes side by side (FOUR: the rows are whole fours), under one scale: blocks are whole fours, too. */
template <bool FOUR>
static __global__ void __launch_bounds__(THREADS)
    encode_rows(struct own_rows p, const float *scales, int64_t stride, uint8_t *q)
{
    int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * (FOUR ? 4 : 1), r = at / p.cols, c = at % p.cols;
    if (at >= p.n * p.cols)
        return;
    float factor = factor_of(p.block > 0 ? scales[(p.first + r) / p.block * stride + c / p.block] : scales[0]);
    if (FOUR) {
        float4 v = *(const float4 *)(p.x + at);
        *(uint32_t *)(q + at) =
            f8_pair<DT_F8_E4M3>(v.x * factor, v.y * factor) | f8_pair<DT_F8_E4M3>(v.z * factor, v.w * factor) << 16;
    } else {
        q[at] = (uint8_t)f8_pair<DT_F8_E4M3>(p.x[at] * factor, 0.0f);
    }
}

static int scales_of(struct lane *l, const struct maxima &p, const struct tensor *out, int64_t stride, bool turned)
{
    int64_t n = tensor_elems(out);
    if (p.rows == 0 || p.cols == 0)
        return n == 0 ? ST_OK
                      : cuda_status(l->err, (int)cudaMemsetAsync(out->data, 0, (size_t)tensor_bytes(out), stream_of(l)),
                                    "cudaMemsetAsync");
    LAUNCH(l, write_scales, (unsigned)ceil_div(n, THREADS), THREADS, 0, p, (float *)out->data, n, stride, turned);
    return ST_OK;
}

extern "C" int shard8_codes_cuda(struct lane *l, const struct shard8_codes_args *a)
{
    TRY(shard8_codes_check(a, l->err));
    bool square = a->block > 0;
    int64_t cols = a->x.dim[1], stride = f8_scale_stride(a->rows, cols, a->block, square);
    struct maxima m = {(const uint32_t *)a->most.data,
                       a->rows,
                       cols,
                       a->piece,
                       a->block,
                       a->most.dim[0],
                       a->most.dim[1],
                       a->most.dim[2]};
    struct own_rows p = {(const float *)a->x.data, a->x.dim[0], cols, a->first, a->block, 0, 0};
    TRY(scales_of(l, m, &a->qs, stride, false));
    if (a->ts.data != NULL)
        TRY(scales_of(l, m, &a->ts, f8_scale_stride(cols, a->rows, a->block, square), true));
    bool four = cols % 4 == 0 && a->block % 4 == 0 && (uintptr_t)p.x % 16 == 0 && (uintptr_t)a->q.data % 4 == 0;
    int64_t threads = p.n * cols / (four ? 4 : 1);
    if (four)
        LAUNCH(l, encode_rows<true>, (unsigned)ceil_div(threads, THREADS), THREADS, 0, p, (const float *)a->qs.data,
               stride, (uint8_t *)a->q.data);
    else
        LAUNCH(l, encode_rows<false>, (unsigned)ceil_div(threads, THREADS), THREADS, 0, p, (const float *)a->qs.data,
               stride, (uint8_t *)a->q.data);
    return ST_OK;
}

/* ---- transposes ------------------------------------------------------------------------------ */

/* FOUR: rows and columns are whole fours, which are loaded and stored at once. */
template <bool FOUR>
static __global__ void __launch_bounds__(THREADS) turn_tiles(const uint8_t *q, uint8_t *t, int64_t rows, int64_t cols)
{
    enum { PER = FOUR ? 4 : 1, ACROSS = TURN_TILE / PER, STEP = THREADS / ACROSS };
    __shared__ __align__(4) uint8_t tile[TURN_TILE][TURN_TILE + 4];
    int64_t across = (cols + TURN_TILE - 1) / TURN_TILE, r0 = blockIdx.x / across * TURN_TILE,
            c0 = blockIdx.x % across * TURN_TILE;
    int x = (int)threadIdx.x % ACROSS * PER, y = (int)threadIdx.x / ACROSS;
    for (int i = y; i < TURN_TILE; i += STEP)
        if (r0 + i < rows && c0 + x < cols) {
            if (FOUR)
                *(uint32_t *)&tile[i][x] = *(const uint32_t *)(q + (r0 + i) * cols + c0 + x);
            else
                tile[i][x] = q[(r0 + i) * cols + c0 + x];
        }
    __syncthreads();
    for (int i = y; i < TURN_TILE; i += STEP)
        if (c0 + i < cols && r0 + x < rows) {
            uint8_t *to = t + (c0 + i) * rows + r0 + x;
            if (FOUR)
                *(uint32_t *)to = (uint32_t)tile[x][i] | (uint32_t)tile[x + (FOUR ? 1 : 0)][i] << 8 |
                                  (uint32_t)tile[x + (FOUR ? 2 : 0)][i] << 16 |
                                  (uint32_t)tile[x + (FOUR ? 3 : 0)][i] << 24;
            else
                *to = tile[x][i];
        }
}

extern "C" int shard8_turn_cuda(struct lane *l, const struct shard8_turn_args *a)
{
    TRY(shard8_turn_check(a, l->err));
    int64_t rows = a->q.dim[0], cols = a->q.dim[1], tiles = ceil_div(rows, TURN_TILE) * ceil_div(cols, TURN_TILE);
    const uint8_t *q = (const uint8_t *)a->q.data;
    uint8_t *t = (uint8_t *)a->t.data;
    if (rows % 4 == 0 && cols % 4 == 0 && (uintptr_t)q % 4 == 0 && (uintptr_t)t % 4 == 0)
        LAUNCH(l, turn_tiles<true>, (unsigned)tiles, THREADS, 0, q, t, rows, cols);
    else
        LAUNCH(l, turn_tiles<false>, (unsigned)tiles, THREADS, 0, q, t, rows, cols);
    return ST_OK;
}
