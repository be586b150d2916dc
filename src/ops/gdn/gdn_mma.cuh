/* gdn on CUDA: the warp-wide instructions its tiles are made of, for compute capability 8.0 and above; private to
 * gdn*.cu.
 *
 * Fragments of mma m16n8k16, with g = lane / 4 and q = lane % 4; a register holds two bf16, the lower index low:
 *   A (16 x 16)  a0 (g, 2q), a1 (g + 8, 2q), a2 (g, 2q + 8), a3 (g + 8, 2q + 8)     (row, first column)
 *   B (16 x 8)   b0 (2q, g), b1 (2q + 8, g)                                         (first row, column)
 *   C (16 x 8)   c0 c1 (g, 2q), c2 c3 (g + 8, 2q), fp32
 * So C rounded in pairs is an A fragment (two C side by side), and the B fragment of its transpose. */
#ifndef BRAID_OPS_GDN_MMA_CUH
#define BRAID_OPS_GDN_MMA_CUH

#include <stdint.h>

extern __shared__ uint4 gdn_shared[];
__device__ __forceinline__ char *shared_memory() { return (char *)gdn_shared; }

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* Four 8 x 8 matrices of bf16; lane 8 m + r gives the address of row r of matrix m. Register m of lane l gets row g,
 * columns 2q and 2q + 1 of matrix m; with _trans of its transpose. */
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_trans(uint32_t (&r)[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/* An 8 x 8 matrix spread over the warp (row g, columns 2q and 2q + 1), transposed. */
__device__ __forceinline__ uint32_t transpose8(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* c += a b */
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* 16 bytes to shared memory without a register; zeros where not valid (the address must still be one of ours). */
__device__ __forceinline__ void copy_async16(void *to, const void *from, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Until at most N of this thread's groups are under way. */
template <int N>
__device__ __forceinline__ void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif
