/* The emulator's src/ops/cuda/ptx.cuh: the same functions, without assembler. Lanes of a warp meet and one of them
 * works for all. */
#ifndef BRAID_OPS_CUDA_PTX_CUH
#define BRAID_OPS_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

extern "C" {
#include "tensor/f8.h"
}

static inline uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* What a lane gives to a product, and gets: see emu_mma_all (warp.cc). */
struct emu_mma {
    float c[4];
    uint32_t a[4], b[2];
    int depth;
};
void emu_mma_all(struct emu_meeting *m);
/* Addresses of rows become four registers. */
void emu_load_matrices_all(struct emu_meeting *m);
void emu_load_matrices_t_all(struct emu_meeting *m);
void emu_store_matrices_all(struct emu_meeting *m); /* address, then registers */
void emu_transpose_all(struct emu_meeting *m);

static inline void emu_product(float *c, struct emu_mma give)
{
    memcpy(give.c, c, sizeof give.c);
    memcpy(c, emu_meet(0xffffffffu, EMU_MMA, &give, sizeof give, emu_mma_all)->given[emu_self->lane], sizeof give.c);
}
static inline void mma_bf16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    emu_product(c, (struct emu_mma){{}, {a[0], a[1], a[2], a[3]}, {b0, b1}, 16});
}
static inline void mma_bf16_k8(float *c, uint32_t a0, uint32_t a1, uint32_t b)
{
    emu_product(c, (struct emu_mma){{}, {a0, a1, 0, 0}, {b, 0}, 8});
}

static inline void load_matrices(uint32_t *r, uint32_t row)
{
    memcpy(r, emu_meet(0xffffffffu, EMU_LOAD_MATRICES, &row, sizeof row, emu_load_matrices_all)->given[emu_self->lane],
           16);
}
static inline void load_matrices_t(uint32_t *r, uint32_t row)
{
    memcpy(r,
           emu_meet(0xffffffffu, EMU_LOAD_MATRICES, &row, sizeof row, emu_load_matrices_t_all)->given[emu_self->lane],
           16);
}
static inline void load_matrices(uint32_t *r, const void *row) { load_matrices(r, shared_address(row)); }
static inline void load_matrices_t(uint32_t *r, const void *row) { load_matrices_t(r, shared_address(row)); }

static inline uint32_t transpose8(uint32_t x)
{
    memcpy(&x, emu_meet(0xffffffffu, EMU_TRANSPOSE, &x, sizeof x, emu_transpose_all)->given[emu_self->lane], sizeof x);
    return x;
}

static inline void copy_async16(void *shared, const void *global, bool valid)
{
    emu_copy_async(shared, global, 16, valid ? 16 : 0);
}
static inline void copy_async16(uint32_t shared, const void *global, bool valid)
{
    copy_async16(emu_shared_pointer(shared), global, valid);
}
static inline void copy_async16(void *shared, const void *global) { copy_async16(shared, global, true); }
static inline void copies_commit(void) { emu_copies_commit(); }
template <int LEFT> static inline void copies_wait(void) { emu_copies_wait(LEFT); }

template <enum dtype TYPE> static inline uint32_t f8_pair(float low, float high)
{
    return (uint32_t)f8_from_f32(low, TYPE) | (uint32_t)f8_from_f32(high, TYPE) << 8;
}
static inline uint4 load_passing(const void *p) { return *(const uint4 *)p; }
/* Numbers below the normal ones are 0. */
static inline float emu_flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
static inline float exp2_fast(float x) { return emu_flushed(exp2f(emu_flushed(x))); }
static inline float exp_fast(float x) { return exp2_fast(1.4426950408889634f * x); }
static inline float max_or_nan(float x, float y) { return x != x || y != y ? NAN : fmaxf(x, y); }
static inline float reciprocal_fast(float x) { return emu_flushed(1.0f / emu_flushed(x)); }

#endif
