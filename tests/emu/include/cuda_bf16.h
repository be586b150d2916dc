/* bf16 for the emulator: 16 bits, rounded to nearest even, as on the GPU. */
#ifndef BRAID_EMU_CUDA_BF16_H
#define BRAID_EMU_CUDA_BF16_H

#include "cuda_runtime.h"

static inline uint16_t emu_bf16_bits(float x)
{
    uint32_t u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return 0x7fff;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

struct __nv_bfloat16 {
    uint16_t raw;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) : raw(emu_bf16_bits(x)) {}
    operator float() const { return __uint_as_float((uint32_t)raw << 16); }
};
struct __attribute__((aligned(4))) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
static inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
static inline float __bfloat162float(__nv_bfloat16 x) { return (float)x; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x)
{
    __nv_bfloat16 v;
    v.raw = x;
    return v;
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y)
{
    __nv_bfloat162 v;
    v.x = __nv_bfloat16(x);
    v.y = __nv_bfloat16(y);
    return v;
}
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return make_float2((float)v.x, (float)v.y); }
static inline float __low2float(__nv_bfloat162 v) { return (float)v.x; }
static inline float __high2float(__nv_bfloat162 v) { return (float)v.y; }
static inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b)
{
    return __floats2bfloat162_rn(fmaxf(a.x, b.x), fmaxf(a.y, b.y));
}

#endif
