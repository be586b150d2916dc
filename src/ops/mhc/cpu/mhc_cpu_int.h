/* What the fast CPU versions of the mhc ops share; private to ops/mhc/mhc_*_cpu.c, compiled once per
 * instruction set.
 *
 * Two ways of using vector registers: over channels (mixing, projections), and over tokens ("lanes": gates and
 * Sinkhorn, where one token's matrix is too small for a register but VL of them fill one). */
#ifndef BRAID_OPS_MHC_CPU_INT_H
#define BRAID_OPS_MHC_CPU_INT_H

#include "ops/cpu_math.h"
#include "ops/dropout/dropout.h"
#include "ops/mhc/mhc.h"
#include "ops/ops_cpu_int.h"

#include <math.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VEC_LENGTH 16
#elif defined(__AVX__)
#include <immintrin.h>
#define VEC_LENGTH 8
#else
#define VEC_LENGTH 4
#endif
enum { VL = VEC_LENGTH };
typedef float vec __attribute__((vector_size(4 * VL), may_alias));
typedef int32_t vec_mask __attribute__((vector_size(4 * VL), may_alias));
typedef float quad __attribute__((vector_size(16), may_alias));
/* in tensors, which are aligned as floats */
typedef float vec_anywhere __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef float quad_anywhere __attribute__((vector_size(16), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
/* For loops over what has to stay in registers, where gcc would decide too late: those over a few streams, and copies,
 * which would become calls of memcpy. Elsewhere it only costs compile time. */
#if defined(__clang__)
#define UNROLL
#define UNROLL_COPY
#else
#define UNROLL _Pragma("GCC unroll 4")
#define UNROLL_COPY _Pragma("GCC unroll 20")
#endif
#define EPS ((float)MHC_EPS)

enum {
    LOGITS_MAX = MHC_MAX_STREAMS * MHC_MAX_STREAMS + 2 * MHC_MAX_STREAMS,
    MATRIX_MAX = MHC_MAX_STREAMS * MHC_MAX_STREAMS,
    GROUP = 4,            /* tokens that share a pass over the weight */
    LINE = 16,            /* floats in a line of cache */
    BRING_ROOM = 1 << 17, /* floats, half a megabyte: what may wait in the second-level cache */
    RUN = 128,            /* channels whose dropout factors or gradients are kept at once */
};

/* A statement in which STREAMS is a constant for the usual numbers of streams, so that loops over streams unroll. Each
 * constant is another copy of the code: more of them cost more compile time than they gain. */
#define FOR_STREAMS(n, ...)                                                                                            \
    do {                                                                                                               \
        switch (n) {                                                                                                   \
        case 2: BY_STREAMS(2, __VA_ARGS__);                                                                            \
        case 4: BY_STREAMS(4, __VA_ARGS__);                                                                            \
        default: BY_STREAMS(n, __VA_ARGS__);                                                                           \
        }                                                                                                              \
    } while (0)
#define BY_STREAMS(n, ...)                                                                                             \
    {                                                                                                                  \
        const int64_t STREAMS = n;                                                                                     \
        __VA_ARGS__;                                                                                                   \
    }                                                                                                                  \
    break

static inline quad quad_at(const float *p) { return *(const quad_anywhere *)p; }
static inline void quad_put(float *p, quad v) { *(quad_anywhere *)p = v; }
static inline vec vec_at(const float *p) { return *(const vec_anywhere *)p; }
static inline void vec_put(float *p, vec v) { *(vec_anywhere *)p = v; }
static inline vec vec_all(float v) { return (vec){0} + v; }
static inline vec vec_choose(vec_mask which, vec yes, vec no)
{
    return (vec)((which & (vec_mask)yes) | (~which & (vec_mask)no));
}
static inline vec vec_max(vec a, vec b) { return vec_choose(a > b, a, b); }

/* Shuffles. Lanes form quarters of four floats each; every quarter of the result is made of the same quarter of a and
 * b: PICK takes a[i], b[i], a[j], b[j] of it, PAIR a[i], a[j], b[i], b[j]. */
#if VEC_LENGTH == 16
#define EACH(i, j, k, l)                                                                                               \
    i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, k + 8, l + 8, i + 12, j + 12, k + 12, l + 12
typedef float vec_half __attribute__((vector_size(32), may_alias));
static inline quad vec_fold(vec v)
{
    vec_half h = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
}
/* q[0], q[4], q[8], q[12] side by side; and back. */
static inline vec vec_of_quads(const quad *q)
{
    vec_half low = __builtin_shufflevector(q[0], q[4], 0, 1, 2, 3, 4, 5, 6, 7),
             high = __builtin_shufflevector(q[8], q[12], 0, 1, 2, 3, 4, 5, 6, 7);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
static inline void vec_to_quads(vec v, quad *q)
{
    q[0] = __builtin_shufflevector(v, v, 0, 1, 2, 3);
    q[4] = __builtin_shufflevector(v, v, 4, 5, 6, 7);
    q[8] = __builtin_shufflevector(v, v, 8, 9, 10, 11);
    q[12] = __builtin_shufflevector(v, v, 12, 13, 14, 15);
}
#elif VEC_LENGTH == 8
#define EACH(i, j, k, l) i, j, k, l, i + 4, j + 4, k + 4, l + 4
static inline quad vec_fold(vec v)
{
    return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
}
static inline vec vec_of_quads(const quad *q) { return __builtin_shufflevector(q[0], q[4], 0, 1, 2, 3, 4, 5, 6, 7); }
static inline void vec_to_quads(vec v, quad *q)
{
    q[0] = __builtin_shufflevector(v, v, 0, 1, 2, 3);
    q[4] = __builtin_shufflevector(v, v, 4, 5, 6, 7);
}
#else
#define EACH(i, j, k, l) i, j, k, l
static inline quad vec_fold(vec v) { return v; }
static inline vec vec_of_quads(const quad *q) { return q[0]; }
static inline void vec_to_quads(vec v, quad *q) { q[0] = v; }
#endif
#define PICK(a, b, i, j) __builtin_shufflevector(a, b, EACH(i, i + VEC_LENGTH, j, j + VEC_LENGTH))
#define PAIR(a, b, i, j) __builtin_shufflevector(a, b, EACH(i, j, i + VEC_LENGTH, j + VEC_LENGTH))

static inline float vec_sum(vec v)
{
    quad q = vec_fold(v);
    return (q[0] + q[2]) + (q[1] + q[3]);
}
/* The sums of a, b, c and d: little more work than one, so sums are taken by fours where there are many. */
static inline quad vec_sum4(vec a, vec b, vec c, vec d)
{
    vec ab = PICK(a, b, 0, 1) + PICK(a, b, 2, 3), cd = PICK(c, d, 0, 1) + PICK(c, d, 2, 3);
    return vec_fold(PAIR(ab, cd, 0, 1) + PAIR(ab, cd, 2, 3));
}
/* In every quarter, v[i][j] becomes v[j][i]. */
static inline void vec_transpose4(vec *v)
{
    vec low = PICK(v[0], v[1], 0, 1), high = PICK(v[0], v[1], 2, 3), low2 = PICK(v[2], v[3], 0, 1),
        high2 = PICK(v[2], v[3], 2, 3);
    v[0] = PAIR(low, low2, 0, 1);
    v[1] = PAIR(low, low2, 2, 3);
    v[2] = PAIR(high, high2, 0, 1);
    v[3] = PAIR(high, high2, 2, 3);
}
/* out[i] = sum of v[i] */
INLINE void vec_sums(const vec *v, int64_t n, float *out)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        quad_put(out + i, vec_sum4(v[i], v[i + 1], v[i + 2], v[i + 3]));
    for (; i < n; i++)
        out[i] = vec_sum(v[i]);
}
static inline void vec_exp_each(float *v)
{
#pragma omp simd
    for (int i = 0; i < VL; i++)
        v[i] = fast_expf(v[i]);
}

/* 1 / v for v that is neither 0 nor subnormal: the estimate and a step of Newton's, a fifth of a division's time. */
static inline vec vec_inverse(vec v)
{
#if VEC_LENGTH == 16
    vec r = (vec)_mm512_rcp14_ps((__m512)v);
#elif VEC_LENGTH == 8
    vec r = (vec)_mm256_rcp_ps((__m256)v);
#else
    return 1.0f / v;
#endif
#if VEC_LENGTH > 4
    return r + r * (1.0f - v * r);
#endif
}

/* Row r of a matrix; all tensors of these ops with more than one row have two dims. */
static inline float *row_of(const struct tensor *t, int64_t r) { return (float *)t->data + r * t->stride[0]; }

/* Memory that will be needed. Kernels walk streams side by side and small tiles at a time, which hardware does not see
 * through. Those with much arithmetic ask for a line now and then, in address order and one group of tokens ahead: more
 * than about two dozen lines under way would make each other, and the loads between them, wait. */
static inline void fetch(const float *p) { __builtin_prefetch(p, 0, 1); }

/* The others read ahead: rows of up to five matrices (NULL: none, data NULL: absent) into the second-level cache, in
 * address order, those that will be written too. */
struct bring {
    const struct tensor *t[5];
};
static inline void bring_rows(const struct bring *b, int64_t first, int64_t count)
{
    for (int64_t r = first; r < first + count; r++)
        for (int i = 0; i < 5 && b->t[i] != NULL; i++) {
            if (b->t[i]->data == NULL || r >= b->t[i]->dim[0])
                continue;
            const volatile float *row = row_of(b->t[i], r);
            for (int64_t c = 0; c < b->t[i]->dim[1]; c += LINE)
                (void)row[c];
        }
}
/* Number of rows at once, a multiple of VL; 0 where rows are too long. */
static inline int64_t bring_count(const struct bring *b)
{
    int64_t floats = 1;
    for (int i = 0; i < 5 && b->t[i] != NULL; i++)
        floats += b->t[i]->data ? b->t[i]->dim[1] : 0;
    return min_i64(MHC_BLOCK, BRING_ROOM / floats / VL * VL);
}
/* Before row r is worked on, rows being taken by blocks of MHC_BLOCK. */
static inline void bring_at(const struct bring *b, int64_t r, int64_t count)
{
    if (count > 0 && r % MHC_BLOCK % count == 0)
        bring_rows(b, r, min_i64(count, MHC_BLOCK - r % MHC_BLOCK));
}

static inline float scalar_of(const struct tensor *t) { return ((const float *)t->data)[0]; }
static inline float rounded(const struct mhc_rule *r, float v)
{
    return r->round_bf16 ? bf16_to_f32(f32_to_bf16(v)) : v;
}
/* By lanes on purpose: a single running sum of 16384 squares would lose five digits. */
static inline float dot_of(const float *x, const float *y, int64_t n)
{
    vec a = {0}, b = {0};
    int64_t c = 0;
    for (; c + 2 * VL <= n; c += 2 * VL) {
        a += vec_at(x + c) * vec_at(y + c);
        b += vec_at(x + c + VL) * vec_at(y + c + VL);
    }
    float sum = vec_sum(a + b);
    for (; c < n; c++)
        sum += x[c] * y[c];
    return sum;
}
/* In double: what it scales, every gate of the row reads. */
static inline float sum_squares(const float *x, int64_t n)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++)
        sum += (double)x[c] * (double)x[c];
    return (float)sum;
}

/* rho of a row of n floats. */
static inline float root_of(const float *x, int64_t n, double root_eps)
{
    return sqrtf((n > 0 ? sum_squares(x, n) / (float)n : 0) + (float)root_eps) - (float)mhc_root_less(root_eps);
}

/* mix[i * n + j]: weight of stream j in new stream i. */
static inline void load_mix(const struct mhc_rule *r, const float *res, float *mix)
{
    int64_t n = r->streams;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            mix[i * n + j] = r->profile == MHC_D ? res[j * n + i] : res[i * n + j];
}

/* ---- rows: mhc_mix_cpu.c --------------------------------------------------------------------- */

/* Dropout factors of channels [first, first + count) of token t. */
void CPU_NAME(mhc_drop_factors)(const struct dropout_rule *r, int64_t t, int64_t first, int64_t count, float *factor);
/* One row of combine. res and post: the row's coefficients. */
void CPU_NAME(mhc_combine_row)(const struct mhc_combine_fwd_args *a, int64_t r, const float *post, const float *res);

/* A run of channels of one row of combine's backward. Streams of g, x, dx lie g_step, d, d apart. factor
 * (RUN apart) NULL: no dropout. sums: n^2 of the mix, then n of post, per vector lane. */
struct combine_run {
    int64_t n, count, g_step, d;
    const float *g, *x, *f, *bias, *factor, *mix, *post;
    float *dx, *df;
    vec *sums;
    bool fresh; /* sums start at zero */
};
void CPU_NAME(mhc_combine_bwd_run)(const struct combine_run *c);
/* dres and dpost of a row from its sums. */
void CPU_NAME(mhc_combine_bwd_finish)(const struct mhc_rule *r, const vec *sums, float *dpost, float *dres);

/* out [count] (+)= the partials in order, partial_step apart. */
void CPU_NAME(mhc_add_partials)(float *out, bool acc, const float *partial, int64_t partial_step, int64_t blocks,
                                int64_t count);

/* ---- coefficients: mhc_coef_cpu.c ------------------------------------------------------------ */

/* p[g] = x rows [first, first + count) times w^T, count <= GROUP. Meanwhile fetches the same rows, `ahead` further on,
 * of matrices as wide as x (their rows together) and narrower ones; NULL: none. */
struct project_ahead {
    const struct tensor *wide[2], *thin;
    int64_t rows;
};
void CPU_NAME(mhc_project_group)(const struct tensor *x, const struct tensor *w, int64_t first, int64_t count,
                                 float *const *p, const struct project_ahead *ahead);
/* Coefficients of rows [first, first + count) from stat, count <= VL. */
void CPU_NAME(mhc_coef_lanes)(const struct mhc_boundary_fwd_args *a, int64_t first, int64_t count);
/* dz of rows [first, first + count) from stat. dp [VL, N]: gradients of their coefficients in, of p out. through_rho
 * [VL]: drho / (K rho). */
void CPU_NAME(mhc_coef_bwd_lanes)(const struct mhc_boundary_bwd_args *a, int64_t first, int64_t count, float *dp,
                                  float *through_rho);

/* ---- weight gradient: mhc_outer_cpu.c -------------------------------------------------------- */

/* dw [m, k] (+)= sum over rows of dp[row]^T y[row]; dp rows lie dp_step apart. partial: mhc_outer_floats. */
struct outer {
    const float *dp;
    int64_t dp_step, m;
    const struct tensor *y, *dw;
    float *partial;
    bool acc;
};
int64_t CPU_NAME(mhc_outer_floats)(int64_t rows, int64_t m, int64_t k);
void CPU_NAME(mhc_outer)(const struct outer *o);

#endif
