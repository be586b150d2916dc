/* Instructions of compute capability 8.0 that C++ has no name for, as small functions: matrix loads and products of
 * tensor cores, asynchronous copies into shared memory, fast functions. In ops/ only this file and hopper.cuh hold
 * assembler:
 * tests/emu replaces these two.
 *
 * One mma_bf16 is C[16][8] += A[16][16] B[16][8]. With g = lane / 4 and t = lane % 4 a lane holds
 *   c[0], c[1]: row g, columns 2t, 2t+1;   c[2], c[3]: row g+8, the same columns
 *   a[0]: row g, k 2t..2t+1;  a[1]: row g+8;  a[2], a[3]: the same rows, k 2t+8..2t+9
 *   b0: k 2t..2t+1, column g;  b1: k 2t+8..2t+9
 * A register holds two bf16, the lower index low. */
#ifndef BRAID_OPS_CUDA_PTX_CUH
#define BRAID_OPS_CUDA_PTX_CUH

#include <cuda_runtime.h>
#include <stdint.h>

extern "C" {
#include "tensor/f8.h"
}

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- tensor cores, by a warp ----------------------------------------------------------------- */

__device__ __forceinline__ void mma_bf16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* Half the depth: A[16][8] B[8][8]. */
__device__ __forceinline__ void mma_bf16_k8(float *c, uint32_t a0, uint32_t a1, uint32_t b)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

/* Four 8 x 8 matrices of bf16: lane 8 m + r gives the address of row r of matrix m (16 bytes). Register m of a lane
 * gets row g, columns 2t and 2t + 1 of matrix m; with _t of its transpose. */
__device__ __forceinline__ void load_matrices(uint32_t *r, uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_t(uint32_t *r, uint32_t row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t *r, const void *row) { load_matrices(r, shared_address(row)); }
__device__ __forceinline__ void load_matrices_t(uint32_t *r, const void *row)
{
    load_matrices_t(r, shared_address(row));
}

/* An 8 x 8 matrix spread over the warp (row g, columns 2t and 2t + 1), transposed. */
__device__ __forceinline__ uint32_t transpose8(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* ---- asynchronous copies --------------------------------------------------------------------- */

/* 16 bytes into shared memory without a register, zeros where not valid (the address must still be a legal one). */
__device__ __forceinline__ void copy_async16(uint32_t shared, const void *global, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_async16(void *shared, const void *global, bool valid)
{
    copy_async16(shared_address(shared), global, valid);
}
__device__ __forceinline__ void copy_async16(void *shared, const void *global)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copies_commit(void) { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
/* Until at most LEFT of this thread's latest groups are under way. */
template <int LEFT> __device__ __forceinline__ void copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(LEFT) : "memory");
}

/* ---- memory, functions ----------------------------------------------------------------------- */

/* 16 bytes of device memory that will not be read again soon. */
__device__ __forceinline__ uint4 load_passing(const void *p)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

/* Two FP8 codes (tensor/f8.h), the lower index low. */
template <enum dtype TYPE> __device__ __forceinline__ uint32_t f8_pair(float low, float high)
{
#if __CUDA_ARCH__ >= 890
    uint16_t two;
    if (TYPE == DT_F8_E5M2)
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
    return two;
#else
    return (uint32_t)f8_from_f32(low, TYPE) | (uint32_t)f8_from_f32(high, TYPE) << 8;
#endif
}

/* 2^x; minus infinity gives 0. */
__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* e^x, with the bits of __expf where that is not below the smallest normal number; 0 there, and three instructions
 * less. */
__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(1.4426950408889634f * x); }
/* The larger one; what is not a number stays so. */
__device__ __forceinline__ float max_or_nan(float x, float y)
{
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ __forceinline__ float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
