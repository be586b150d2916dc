/* Tiles in shared memory and tensor-core products for attention: mma.sync m16n8k16, bf16 in, fp32 out.
 *
 * A tile holds rows of COLS channels at a pitch of COLS + 8, so that the eight rows a matrix load takes lie in
 * different banks. Rows and channels that do not exist are zero. */
#ifndef BRAID_OPS_ATTENTION_TILE_CUH
#define BRAID_OPS_ATTENTION_TILE_CUH

#include "ops/attention/attention_cuda.cuh"
#include "ops/cuda/ptx.cuh"

enum { TILE_PAD = 8 };

/* Rows first .. first + ROWS - 1 of a matrix of n_rows rows and n_cols channels. */
template <int ROWS, int COLS, int THREADS>
__device__ __forceinline__ void load_tile(bf16 *dst, const bf16 *src, int64_t stride, int first, int n_rows, int n_cols,
                                          bool aligned)
{
    constexpr int PITCH = COLS + TILE_PAD;
    if (aligned) {
        constexpr int PACKS = COLS / 8;
#pragma unroll 2
        for (int x = threadIdx.x; x < ROWS * PACKS; x += THREADS) {
            int r = x / PACKS, c = x % PACKS * 8;
            bool valid = first + r < n_rows && c < n_cols;
            copy_async16(dst + r * PITCH + c, valid ? src + (first + r) * stride + c : src, valid);
        }
    } else {
        for (int x = threadIdx.x; x < ROWS * COLS; x += THREADS) {
            int r = x / COLS, c = x % COLS;
            bool valid = first + r < n_rows && c < n_cols;
            dst[r * PITCH + c] = valid ? src[(first + r) * stride + c] : __float2bfloat16_rn(0.0f);
        }
    }
}

/* Left operand: rows row .. row + 15, channels col .. col + 15 of a tile. */
template <int COLS> __device__ __forceinline__ void load_left(uint32_t *a, const bf16 *tile, int row, int col)
{
    int lane = threadIdx.x % 32;
    load_matrices(a, tile + (row + lane % 16) * (COLS + TILE_PAD) + col + lane / 16 * 8);
}
/* Right operand, two of 8 columns each (b[0], b[1] and b[2], b[3]): the columns of the product are rows of the tile. */
template <int COLS> __device__ __forceinline__ void load_right_rows(uint32_t *b, const bf16 *tile, int row, int col)
{
    int lane = threadIdx.x % 32;
    load_matrices(b, tile + (row + lane % 8 + lane / 16 * 8) * (COLS + TILE_PAD) + col + lane / 8 % 2 * 8);
}
/* The same where the columns of the product are channels of the tile, and its rows are summed over. */
template <int COLS> __device__ __forceinline__ void load_right_channels(uint32_t *b, const bf16 *tile, int row, int col)
{
    int lane = threadIdx.x % 32;
    load_matrices_t(b, tile + (row + lane % 16) * (COLS + TILE_PAD) + col + lane / 16 * 8);
}

/* c (16 x 8) += a (16 x 16) b (16 x 8). c: rows lane / 4 and 8 more, columns 2 * (lane % 4) and 1 more. */
__device__ __forceinline__ void mma(float *c, const uint32_t *a, const uint32_t *b) { mma_bf16(c, a, b[0], b[1]); }

/* Two neighbouring 16 x 8 results as a left operand. */
__device__ __forceinline__ void results_to_left(uint32_t *a, const float *c0, const float *c1)
{
    a[0] = pack2(c0[0], c0[1]);
    a[1] = pack2(c0[2], c0[3]);
    a[2] = pack2(c1[0], c1[1]);
    a[3] = pack2(c1[2], c1[3]);
}

/* c[m][n] = rows (row + 16 m) of x times rows of y, over COLS channels: x y^T. */
template <int COLS, int M, int N>
__device__ __forceinline__ void product_rows(float (*c)[N][4], const bf16 *x, int row, const bf16 *y)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                c[m][n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < COLS; k += 16) {
        uint32_t a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++)
            load_left<COLS>(a[m], x, row + 16 * m, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            load_right_rows<COLS>(b, y, n * 8, k);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(c[m][n], a[m], b);
                mma(c[m][n + 1], a[m], b + 2);
            }
        }
    }
}

/* acc[m] += p[m] (16 x 8N, rounded to bf16) times the tile y (8N rows of COLS channels). */
template <int COLS, int M, int N>
__device__ __forceinline__ void product_channels(float (*acc)[COLS / 8][4], const float (*p)[N][4], const bf16 *y)
{
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        uint32_t a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++)
            results_to_left(a[m], p[m][k], p[m][k + 1]);
#pragma unroll
        for (int n = 0; n < COLS / 8; n += 2) {
            load_right_channels<COLS>(b, y, k * 8, n * 8);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(acc[m][n], a[m], b);
                mma(acc[m][n + 1], a[m], b + 2);
            }
        }
    }
}

/* Values of 16 queries and 8 N keys times the factors of dropout: weights, or their gradients. row: of this thread's
 * first half. */
template <int N> __device__ __forceinline__ void drop_rows(float (*s)[4], const head_drop &d, int row, int key)
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 kept = drop_pair(d, row + half * 8, key + n * 8 + threadIdx.x % 4 * 2);
            s[n][2 * half] *= kept.x;
            s[n][2 * half + 1] *= kept.y;
        }
}

/* One row of a result, scaled and rounded: the two values this thread holds of every 8 channels. */
template <int COLS>
__device__ __forceinline__ void store_row(bf16 *row, const float (*acc)[4], int half, float scale, int n_cols,
                                          bool aligned)
{
#pragma unroll
    for (int n = 0; n < COLS / 8; n++) {
        int col = n * 8 + threadIdx.x % 4 * 2;
        float x = acc[n][2 * half] * scale, y = acc[n][2 * half + 1] * scale;
        if (aligned) {
            if (col < n_cols)
                *(uint32_t *)(row + col) = pack2(x, y);
        } else {
            if (col < n_cols)
                row[col] = __float2bfloat16_rn(x);
            if (col + 1 < n_cols)
                row[col + 1] = __float2bfloat16_rn(y);
        }
    }
}

/* Smallest lo and largest hi over the rows of a block that see anything; lo > hi if none does.
 * scratch: 2 ints a warp. */
template <int WARPS> __device__ __forceinline__ key_range block_range(key_range r, int *scratch)
{
    bool any = r.lo <= r.hi;
    int lo = __reduce_min_sync(0xffffffffu, any ? r.lo : 0x7fffffff),
        hi = __reduce_max_sync(0xffffffffu, any ? r.hi : -1);
    if (threadIdx.x % 32 == 0) {
        scratch[2 * (threadIdx.x / 32)] = lo;
        scratch[2 * (threadIdx.x / 32) + 1] = hi;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        lo = min(lo, scratch[2 * w]);
        hi = max(hi, scratch[2 * w + 1]);
    }
    key_range out = {lo, hi};
    return out;
}

#endif
