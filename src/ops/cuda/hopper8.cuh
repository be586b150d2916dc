/* Hopper's wgmma of FP8 codes; see hopper.cuh for tiles and accumulators. */
#ifndef BRAID_OPS_CUDA_HOPPER8_CUH
#define BRAID_OPS_CUDA_HOPPER8_CUH

#include "ops/cuda/hopper.cuh"

#if HOPPER_CODE

/* D [64, 128] (+)= A [64, 32] B [32, 128], both K-major from shared memory: a line is 128 codes, a step of 32 along K
 * is +32 bytes. Sums have about 14 bits: add them up in fp32 every 128 of K. A is E4M3 or E5M2, B E4M3. start does not
 * read d. */
template <enum dtype A> struct wgmma8;

#define WGMMA8(A, name)                                                                                                \
    template <> struct wgmma8<A> {                                                                                     \
        static __device__ __forceinline__ void run(float (&d)[64], uint64_t a, uint64_t b)                             \
        {                                                                                                              \
            WGMMA_ASM("eq.b32 p, 0, 0", "m64n128k32.f32." name ".e4m3", 64, "+f", "%64, %65, p, 1, 1", "l"(a),         \
                      "l"(b));                                                                                         \
        }                                                                                                              \
        static __device__ __forceinline__ void start(float (&d)[64], uint64_t a, uint64_t b)                           \
        {                                                                                                              \
            WGMMA_ASM("ne.b32 p, 0, 0", "m64n128k32.f32." name ".e4m3", 64, "=f", "%64, %65, p, 1, 1", "l"(a),         \
                      "l"(b));                                                                                         \
        }                                                                                                              \
    }
WGMMA8(DT_F8_E4M3, "e4m3");
WGMMA8(DT_F8_E5M2, "e5m2");

#endif /* HOPPER_CODE */

#endif
