/* Vector maths for the fast CPU ops: branch-free inline functions that compilers turn into SIMD code
 * inside "#pragma omp simd" loops. Errors are a few units in the last place of fp32. */
#ifndef BRAID_OPS_CPU_MATH_H
#define BRAID_OPS_CPU_MATH_H

#include <stdint.h>
#include <string.h>

/* e^x: x = n ln2 + r, |r| <= ln2/2, polynomial of degree 6 for e^r, 2^n by exponent bits.
 * Below -87.3 gives about 1e-38 (never a subnormal stall), above 88 saturates near 1.6e38. */
static inline float fast_expf(float x)
{
    x = x < -87.33654f ? -87.33654f : x;
    x = x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f; /* round to nearest: n sits in the low bits */
    float n = shifted - 12582912.0f;
    float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r * r + r) + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

static inline float dot_f32(const float *x, const float *y, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++)
        sum += x[c] * y[c];
    return sum;
}
static inline void add_scaled_f32(float *to, const float *x, float scale, int64_t n)
{
#pragma omp simd
    for (int64_t c = 0; c < n; c++)
        to[c] += scale * x[c];
}
/* y = x * scale * (gain + one); gain: may be NULL. */
static inline void scale_row_f32(float *y, const float *x, float scale, const float *gain, float one, int64_t n)
{
    if (gain == NULL) {
#pragma omp simd
        for (int64_t c = 0; c < n; c++)
            y[c] = x[c] * scale;
    } else {
#pragma omp simd
        for (int64_t c = 0; c < n; c++)
            y[c] = x[c] * scale * (gain[c] + one);
    }
}

static inline float fast_sigmoidf(float x) { return 1.0f / (1.0f + fast_expf(-x)); }

#endif
