/* Numbers of eight bits, and the scale that belongs to a block of them.
 *
 *   E4M3: 4 bits of exponent, 3 of mantissa, largest value 448, no infinity; NaN is 0x7f.
 *   E5M2: 5 bits of exponent, 2 of mantissa, largest finite value 57344; the upper byte of an F16.
 * A block of values is stored as codes of x * 2^k, and beside them the inverse scale 2^-k. k is the largest exponent
 * with which no value of the block exceeds the format, so scaling is exact and the only error is that of rounding to
 * the code (to nearest, ties to even). Every device makes the same bits: the functions for float are branch-free, so
 * that loops over them become vectors, and the one for double rounds once. */
#ifndef BRAID_TENSOR_F8_H
#define BRAID_TENSOR_F8_H

#include "tensor/tensor.h"

#include <math.h>
#include <string.h>

/* Kernels use the same functions where the hardware has no instruction. */
#ifdef __CUDACC__
#define F8_INLINE static inline __host__ __device__
#else
#define F8_INLINE static inline
#endif

static inline bool dtype_is_f8(enum dtype t) { return t == DT_F8_E4M3 || t == DT_F8_E5M2; }

/* Largest values are 1.75 * 2^F8_TOP(t). */
F8_INLINE int f8_top(enum dtype t) { return t == DT_F8_E5M2 ? 15 : 8; }

enum { F8_NAN = 0x7f, F8_EXPONENT_MAX = 126 };

/* Saturating: what is larger than the largest value becomes it, infinities too. NaN stays NaN. */
F8_INLINE uint8_t f8_from_f32(float v, enum dtype t)
{
    const bool wide = t == DT_F8_E5M2;
    const uint32_t shift = wide ? 21 : 20, bias = wide ? (127 - 15) << 2 : (127 - 7) << 3;
    const uint32_t largest = wide ? 0x7b : 0x7e, least_normal = wide ? 0x38800000u : 0x3c800000u; /* 2^-14, 2^-6 */
    const uint32_t limit = wide ? 0x47600000u : 0x43e00000u;                                      /* 57344, 448 */
    const float magic = wide ? 128.0f : 16384.0f; /* its last bit is worth what that of a subnormal code is */
    uint32_t u, m;
    memcpy(&u, &v, sizeof u);
    uint32_t sign = u >> 24 & 0x80u;
    u &= 0x7fffffffu;
    float a, small;
    memcpy(&a, &u, sizeof a);
    small = a + magic;
    memcpy(&m, &small, sizeof m);
    uint32_t m0;
    memcpy(&m0, &magic, sizeof m0);
    uint32_t normal = ((u + (1u << (shift - 1)) - 1 + (u >> shift & 1u)) >> shift) - bias;
    uint32_t code = u < least_normal ? m - m0 : normal;
    code = u >= limit ? largest : code;
    return (uint8_t)(u > 0x7f800000u ? (uint32_t)F8_NAN : sign | code);
}

F8_INLINE float f8_to_f32(uint8_t code, enum dtype t)
{
    const bool wide = t == DT_F8_E5M2;
    const uint32_t bits = wide ? 2 : 3, exponent = (code & 0x7fu) >> bits, mantissa = code & ((1u << bits) - 1);
    uint32_t sign = (uint32_t)(code & 0x80u) << 24,
             u = sign | (exponent + (wide ? 112 : 120)) << 23 | mantissa << (23 - bits);
    float v;
    if (wide ? exponent == 31 : (code & 0x7f) == F8_NAN) /* E5M2 has infinities */
        u = sign | (wide && mantissa == 0 ? 0x7f800000u : 0x7fc00000u);
    if (exponent == 0)
        return (sign ? -(float)mantissa : (float)mantissa) * (wide ? 0x1p-16f : 0x1p-9f);
    memcpy(&v, &u, sizeof v);
    return v;
}

/* One rounding, from double. */
uint8_t f8_from_f64(double v, enum dtype t);

/* Exponent k of the scale for a block whose largest magnitude is amax: the largest with amax * 2^k <= the largest
 * value of the format, within the range of normal floats; 0 for a block of zeros. amax is finite. */
F8_INLINE int f8_exponent(float amax, enum dtype t)
{
    uint32_t u;
    memcpy(&u, &amax, sizeof u);
    int k = f8_top(t) + 127 - (int)((u + 0x1fffffu) >> 23); /* a mantissa above 1.75 counts as the next exponent */
    k = k > F8_EXPONENT_MAX ? F8_EXPONENT_MAX : k;
    return u == 0 ? 0 : k;
}
int f8_exponent_f64(double amax, enum dtype t);

/* 2^k for -126 <= k <= 127. */
F8_INLINE float f8_power(int k)
{
    uint32_t u = (uint32_t)(k + 127) << 23;
    float v;
    memcpy(&v, &u, sizeof v);
    return v;
}

#endif
