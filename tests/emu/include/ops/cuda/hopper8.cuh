/* The emulator's src/ops/cuda/hopper8.cuh. */
#ifndef BRAID_OPS_CUDA_HOPPER8_CUH
#define BRAID_OPS_CUDA_HOPPER8_CUH

#include "ops/cuda/hopper.cuh"

/* FP8 codes, 32 deep and 128 columns wide; the right operand is E4M3. */
void emu_wgmma8(float *d, uint64_t a, uint64_t b, bool a_e5m2, bool first);

template <enum dtype A> struct wgmma8 {
    static inline void run(float (&d)[64], uint64_t a, uint64_t b) { emu_wgmma8(d, a, b, A == DT_F8_E5M2, false); }
    static inline void start(float (&d)[64], uint64_t a, uint64_t b) { emu_wgmma8(d, a, b, A == DT_F8_E5M2, true); }
};

#endif
