/* Tensor cores by mma.sync (compute capability 8.0 and later): loads of operands from shared memory for mma_bf16
 * (ptx.cuh).
 *
 * Two neighbouring C tiles, rounded and packed, are an A tile: c of columns 0-7 gives a[0], a[1], of 8-15 a[2], a[3].
 *
 * Tiles in shared memory are rows of bf16; a row stride that is an odd multiple of 16 bytes has no bank conflicts. The
 * four loads are named by how the operand is stored:
 *   frag_a    A[m][k] in rows m     frag_a_t  in rows k (transposed on the way)
 *   frag_b    B in rows n           frag_b_t  in rows k
 * The last two give two tiles of 8 columns: b[0], b[1] and b[2], b[3]. */
#ifndef BRAID_OPS_CUDA_MMA_CUH
#define BRAID_OPS_CUDA_MMA_CUH

#include "ops/cuda/kernel.cuh"
#include "ops/cuda/ptx.cuh"

/* `tile` is the top left corner of 16 x 16 stored elements, `stride` the distance of its rows. */
__device__ __forceinline__ void frag_a(uint32_t *a, const bf16 *tile, int stride)
{
    int l = threadIdx.x % 32;
    load_matrices(a, tile + (l % 16) * stride + l / 16 * 8);
}
__device__ __forceinline__ void frag_a_t(uint32_t *a, const bf16 *tile, int stride)
{
    int l = threadIdx.x % 32;
    load_matrices_t(a, tile + (l % 8 + l / 16 * 8) * stride + l / 8 % 2 * 8);
}
__device__ __forceinline__ void frag_b(uint32_t *b, const bf16 *tile, int stride)
{
    int l = threadIdx.x % 32;
    load_matrices(b, tile + (l % 8 + l / 16 * 8) * stride + l / 8 % 2 * 8);
}
__device__ __forceinline__ void frag_b_t(uint32_t *b, const bf16 *tile, int stride)
{
    int l = threadIdx.x % 32;
    load_matrices_t(b, tile + (l % 16) * stride + l / 16 * 8);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high)
{
    union {
        __nv_bfloat162 v;
        uint32_t raw;
    } u;
    u.v = __floats2bfloat162_rn(low, high);
    return u.raw;
}
__device__ __forceinline__ float2 unpack_bf16(uint32_t v)
{
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

#endif
