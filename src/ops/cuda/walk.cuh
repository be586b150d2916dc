/* Scans with a state per head in registers, as gdn and ssd have them: what their kernels share.
 *
 * A warp owns 16 columns of the state of one head and holds them transposed, S^T [16, depth], as C
 * fragments (ptx.cuh): every product of a piece of PIECE rows has these 16 columns as its rows, so
 * a result is the left operand of the next product without leaving the warp. Right operands come
 * from shared memory.
 *
 * Row m of a warp's 16 stands for column 4 (m % 8 / 2) + 2 (m / 8) + m % 2: then a row of an input,
 * an output or a state is eight bytes per lane, and transpose8 turns it into fragments. */
#ifndef BRAID_OPS_CUDA_WALK_CUH
#define BRAID_OPS_CUDA_WALK_CUH

#include "ops/cuda/hopper.cuh"
#include "ops/cuda/kernel.cuh"
#include "ops/cuda/ptx.cuh"

enum { PIECE = 64, TILES = PIECE / 8 };

/* ---- triangles ------------------------------------------------------------------------------- */

/* Blocks of 16 x 16 on and below the diagonal of a matrix of PIECE rows; a block is four 8 x 8
 * matrices, row by row, each 128 bytes. By columns: the blocks of a column follow each other, from
 * below (block_index). Transposed, by rows: each block is stored transposed, and the blocks of a
 * row follow each other (block_index_t). So what one step of 16 along the sum reads is one operand
 * of wgmma (wgmma_matrices), whatever its size. */
enum { BLOCKS = 10, BLOCK_WORDS = 128 };
__host__ __device__ constexpr int block_index(int i, int j) { return 4 * j - j * (j - 1) / 2 + 3 - i; }
__host__ __device__ constexpr int block_index_t(int i, int j) { return i * (i + 1) / 2 + j; }

/* ---- fragments ------------------------------------------------------------------------------- */

__device__ __forceinline__ uint32_t pack2(float low, float high)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&v;
}
__device__ __forceinline__ float2 unpack2(uint32_t x) { return __bfloat1622float2(*(__nv_bfloat162 *)&x); }
/* What pack2(low, high) leaves over. */
__device__ __forceinline__ uint32_t pack2_rest(float low, float high, uint32_t packed)
{
    float2 v = unpack2(packed);
    return pack2(low - v.x, high - v.y);
}

/* The A fragment of two C fragments side by side. */
__device__ __forceinline__ void round_to_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4])
{
    a[0] = pack2(left[0], left[1]);
    a[1] = pack2(left[2], left[3]);
    a[2] = pack2(right[0], right[1]);
    a[3] = pack2(right[2], right[3]);
}
__device__ __forceinline__ void rest_to_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4],
                                          const uint32_t (&rounded)[4])
{
    a[0] = pack2_rest(left[0], left[1], rounded[0]);
    a[1] = pack2_rest(left[2], left[3], rounded[1]);
    a[2] = pack2_rest(right[0], right[1], rounded[2]);
    a[3] = pack2_rest(right[2], right[3], rounded[3]);
}

/* Stores the block whose A fragment this is. */
__device__ __forceinline__ void store_block(uint32_t *block, const uint32_t (&a)[4])
{
    int lane = threadIdx.x % 32;
    block[lane] = a[0];
    block[32 + lane] = a[2];
    block[64 + lane] = a[1];
    block[96 + lane] = a[3];
}

/* The same of its transpose. */
__device__ __forceinline__ void store_block_t(uint32_t *block, const uint32_t (&a)[4])
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++)
        block[32 * i + lane] = transpose8(a[i]);
}

/* ---- rows of memory -------------------------------------------------------------------------- */

/* Four columns of rows 8t + g of a [rows, dv] matrix: zeros outside. */
__device__ __forceinline__ void load_columns(uint2 (&x)[TILES], const bf16 *from, int64_t stride, int n, bool valid)
{
    int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        x[t] = make_uint2(0, 0);
        if (valid && 8 * t + g < n)
            x[t] = *(const uint2 *)(from + (8 * t + g) * stride);
    }
}
/* C fragments [16, PIECE] to rows of a [rows, dv] matrix. */
__device__ __forceinline__ void store_columns(bf16 *to, int64_t stride, int n, bool valid, const float (&c)[TILES][4])
{
    int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        uint2 x = make_uint2(transpose8(pack2(c[t][0], c[t][1])), transpose8(pack2(c[t][2], c[t][3])));
        if (valid && 8 * t + g < n)
            *(uint2 *)(to + (8 * t + g) * stride) = x;
    }
}

/* Rows 16 d to 16 d + 15 of a state, from the A fragment of its transpose. to: this lane's first
 * column. */
__device__ __forceinline__ void store_state_rows(bf16 *to, int64_t stride, int d, int dk, bool valid,
                                                 const uint32_t (&a)[4])
{
    int g = threadIdx.x % 32 / 4, row = 16 * d + g;
    uint2 x = make_uint2(transpose8(a[0]), transpose8(a[1])), y = make_uint2(transpose8(a[2]), transpose8(a[3]));
    if (valid && row < dk)
        *(uint2 *)(to + row * stride) = x;
    if (valid && row + 8 < dk)
        *(uint2 *)(to + (row + 8) * stride) = y;
}

/* The whole state of this warp's columns, element by element: at the ends of a walk. first: of the
 * 16 columns. */
__device__ __forceinline__ int state_column(int e)
{
    int g = threadIdx.x % 32 / 4;
    return 4 * (g / 2) + 2 * (e >> 1) + g % 2;
}
template <typename T, int DK>
__device__ __forceinline__ void load_state(float (&s)[DK / 8][4], const T *from, int64_t stride, int first, int dk,
                                           int dv)
{
    int q = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < DK / 8; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = 8 * t + 2 * q + (e & 1), col = first + state_column(e);
            s[t][e] = from != NULL && row < dk && col < dv ? to_float(from[row * stride + col]) : 0.0f;
        }
}
template <int DK>
__device__ __forceinline__ void store_state(const float (&s)[DK / 8][4], float *to, int64_t stride, int first, int dk,
                                            int dv)
{
    int q = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < DK / 8; t++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int row = 8 * t + 2 * q + (e & 1), col = first + state_column(e);
            if (row < dk && col < dv)
                to[row * stride + col] = s[t][e];
        }
}

/* Two row factors, of the rows whose values lie in one register of tile t. */
__device__ __forceinline__ float2 row_pair(const float *rows, int t)
{
    return *(const float2 *)(rows + 8 * t + threadIdx.x % 4 * 2);
}

/* A fragments of c with columns scaled by row factors. */
__device__ __forceinline__ void scale_to_a(uint32_t (&a)[PIECE / 16][4], const float (&c)[TILES][4], const float *rows)
{
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++) {
        float2 left = row_pair(rows, 2 * j), right = row_pair(rows, 2 * j + 1);
        a[j][0] = pack2(c[2 * j][0] * left.x, c[2 * j][1] * left.y);
        a[j][1] = pack2(c[2 * j][2] * left.x, c[2 * j][3] * left.y);
        a[j][2] = pack2(c[2 * j + 1][0] * right.x, c[2 * j + 1][1] * right.y);
        a[j][3] = pack2(c[2 * j + 1][2] * right.x, c[2 * j + 1][3] * right.y);
    }
}

/* ---- products of a warpgroup, 16 columns a warp ---------------------------------------------- */

#if HOPPER_CODE

/* c (+)= x R^T for rows R [PIECE, DK] of a tile; x [16 a warp, DK] in A fragments. */
template <int DK>
__device__ __forceinline__ void by_rows(float (&c)[TILES][4], const uint32_t (&x)[DK / 16][4],
                                        const bf16 (*tile)[PIECE][64])
{
    uint64_t rows = wgmma_tile(tile, 1024, 1024);
#pragma unroll
    for (int d = 0; d < DK / 16; d++)
        wgmma_left<PIECE, 0>::run(*(float(*)[4 * TILES]) c, x[d], rows + d / 4 * (PIECE * 128 / 16) + d % 4 * 2,
                                  d == 0);
}
/* s += x R; x [16 a warp, PIECE]. */
template <int DK>
__device__ __forceinline__ void add_rows_wgmma(float (&s)[DK / 8][4], const uint32_t (&x)[PIECE / 16][4],
                                               const bf16 (*tile)[PIECE][64])
{
    uint64_t rows = wgmma_tile(tile, PIECE * 128, 1024);
#pragma unroll
    for (int j = 0; j < PIECE / 16; j++)
        wgmma_left<DK, 1>::run(*(float(*)[DK / 2]) s, x[j], rows + j * (2048 / 16), 0);
}
/* c += x_J times the transpose of block column J of a triangle: to columns from 16 J. The blocks of
 * columns of c are in reverse order, so that what is added to is the beginning of c, as wgmma's
 * registers must be. */
template <int J>
__device__ __forceinline__ void by_column(float (&c)[TILES][4], const uint32_t (&x)[4], const uint32_t *triangle,
                                          int first)
{
    constexpr int N = PIECE - 16 * J;
    uint64_t column = wgmma_matrices(triangle + block_index(3, J) * BLOCK_WORDS, 128, 256);
    wgmma_left<N, 0>::run(*(float(*)[N / 2]) c[0], x, column, first);
}
/* c += x_I times block row I of a triangle whose blocks are transposed: to columns before 16 (I +
 * 1). */
template <int I>
__device__ __forceinline__ void by_row(float (&c)[TILES][4], const uint32_t (&x)[4], const uint32_t *triangle,
                                       int first)
{
    constexpr int N = 16 * (I + 1);
    uint64_t row = wgmma_matrices(triangle + block_index_t(I, 0) * BLOCK_WORDS, 128, 256);
    wgmma_left<N, 0>::run(*(float(*)[N / 2]) c[0], x, row, first);
}

/* Tiles of c of by_column in order. */
__device__ __forceinline__ void in_order(float (&to)[TILES][4], const float (&c)[TILES][4])
{
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[t][e] = c[(TILES / 2 - 1 - t / 2) * 2 + t % 2][e];
}

/* They are added to `to`. */
__device__ __forceinline__ void add_in_order(float (&to)[TILES][4], const float (&c)[TILES][4])
{
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[t][e] += c[(TILES / 2 - 1 - t / 2) * 2 + t % 2][e];
}

template <int N> __device__ __forceinline__ void hold(float (&c)[N][4]) { wgmma_hold(*(float(*)[4 * N]) c); }
template <int N> __device__ __forceinline__ void hold(uint32_t (&a)[N][4]) { wgmma_hold_left(*(uint32_t(*)[4 * N]) a); }
template <int N> __device__ __forceinline__ void scale_all(float (&c)[N][4], float by)
{
#pragma unroll
    for (int t = 0; t < N; t++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            c[t][e] *= by;
}
__device__ __forceinline__ void scale_by_rows(float (&c)[TILES][4], const float *rows)
{
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float2 f = row_pair(rows, t);
        c[t][0] *= f.x;
        c[t][1] *= f.y;
        c[t][2] *= f.x;
        c[t][3] *= f.y;
    }
}
#endif /* HOPPER_CODE */

#endif
