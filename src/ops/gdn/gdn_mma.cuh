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

#include "ops/cuda/kernel.cuh"
#include "ops/cuda/ptx.cuh"

__device__ __forceinline__ char *shared_memory()
{
    DYNAMIC_SHARED(uint4, gdn_shared, 16);
    return (char *)gdn_shared;
}

#endif
