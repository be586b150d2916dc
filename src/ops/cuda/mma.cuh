/* Tensor cores by mma.sync (compute capability 8.0 and later): bf16 products with fp32 sums, the loads of their operands
 * from shared memory, and asynchronous copies into it.
 *
 * One mma_bf16 is C[16][8] += A[16][16] B[16][8]. With g = lane / 4 and t = lane % 4 a lane holds
 *   c[0], c[1]: row g, columns 2t, 2t+1;   c[2], c[3]: row g+8, the same columns
 *   a[0]: row g, k 2t..2t+1;  a[1]: row g+8;  a[2], a[3]: the same rows, k 2t+8..2t+9
 * so two neighbouring C tiles, rounded and packed, are an A tile: c of columns 0-7 gives a[0], a[1], of 8-15 a[2], a[3].
 *
 * Tiles in shared memory are rows of bf16; a row stride that is an odd multiple of 16 bytes has no bank conflicts. The four
 * loads are named by how the operand is stored:
 *   frag_a    A[m][k] in rows m     frag_a_t  in rows k (transposed on the way)
 *   frag_b    B in rows n           frag_b_t  in rows k;   both give two tiles of 8 columns: b[0], b[1] and b[2], b[3] */
#ifndef BRAID_OPS_CUDA_MMA_CUH
#define BRAID_OPS_CUDA_MMA_CUH

#include "ops/cuda/kernel.cuh"

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void mma_bf16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(uint32_t *r, const bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}
__device__ __forceinline__ void load_matrices_t(uint32_t *r, const bf16 *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
}

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

/* 16 bytes into shared memory, zeros where not valid (the address must still be a legal one). */
__device__ __forceinline__ void copy_async16(void *shared, const void *global, bool valid)
{
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_commit(void) { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
/* Until at most PENDING of this thread's latest groups are under way. */
template <int PENDING> __device__ __forceinline__ void copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

#endif
