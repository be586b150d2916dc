/* What the fast CPU versions of the mhc ops share; private to ops/mhc/mhc_*_cpu.c, compiled once per
 * instruction set.
 *
 * Two ways of using vector registers: over channels (mixing, projections), and over tokens ("lanes": gates and
 * Sinkhorn, where one token's matrix is too small for a register but VL of them fill one). */
#ifndef BRAID_OPS_MHC_CPU_INT_H
#define BRAID_OPS_MHC_CPU_INT_H

#include "ops/cpu_math.h"
#include "ops/ops_cpu_int.h"

#if defined(__AVX512F__)
enum { VL = 16 };
#elif defined(__AVX__)
enum { VL = 8 };
#else
enum { VL = 4 };
#endif
typedef float vec __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t vec_mask __attribute__((vector_size(4 * VL), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL /* clang unrolls loops of known, small trip count without being asked */
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define EPS ((float)MHC_EPS)

enum {
    LOGITS_MAX = MHC_MAX_STREAMS * MHC_MAX_STREAMS + 2 * MHC_MAX_STREAMS,
    MATRIX_MAX = MHC_MAX_STREAMS * MHC_MAX_STREAMS,
    GROUP = 4, /* tokens that share a pass over the weight */
};

/* CALL(n) with n a constant for the usual numbers of streams, so that loops over streams unroll. Each
 * constant is another copy of the code: more of them cost more compile time than they gain. */
#define FOR_STREAMS(n, CALL)           \
    do {                               \
        switch (n) {                   \
        case 2: CALL(2); break;        \
        case 4: CALL(4); break;        \
        default: CALL(n); break;       \
        }                              \
    } while (0)

static inline vec vec_at(const float *p) { return *(const vec *)p; }
static inline void vec_put(float *p, vec v) { *(vec *)p = v; }
static inline vec vec_all(float v) { return (vec){0} + v; }
static inline vec vec_choose(vec_mask which, vec yes, vec no)
{
    return (vec)((which & (vec_mask)yes) | (~which & (vec_mask)no));
}
static inline vec vec_max(vec a, vec b) { return vec_choose(a > b, a, b); }
static inline float vec_sum(vec v)
{
    float s[VL];
    memcpy(s, &v, sizeof s);
    for (int half = VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            s[i] += s[i + half];
    return s[0];
}
static inline void vec_exp_each(float *v)
{
#pragma omp simd
    for (int i = 0; i < VL; i++)
        v[i] = fast_expf(v[i]);
}

static inline float scalar_of(const struct tensor *t) { return ((const float *)t->data)[0]; }
static inline float rounded(const struct mhc_rule *r, float v)
{
    return r->round_bf16 ? bf16_to_f32(f32_to_bf16(v)) : v;
}
/* By lanes on purpose: a single running sum of 16384 squares would lose five digits. */
static inline float sum_squares(const float *x, int64_t n)
{
    vec lanes = {0};
    int64_t c = 0;
    for (; c + VL <= n; c += VL)
        lanes += vec_at(x + c) * vec_at(x + c);
    float sum = vec_sum(lanes);
    for (; c < n; c++)
        sum += x[c] * x[c];
    return sum;
}

/* mix[i * n + j]: weight of stream j in new stream i. */
static inline void load_mix(const struct mhc_rule *r, const float *res, float *mix)
{
    int64_t n = r->streams;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++)
            mix[i * n + j] = r->profile == MHC_D ? res[j * n + i] : res[i * n + j];
}

/* ---- rows: mhc_mix_cpu.c -------------------------------------------------------------------------- */

/* Dropout factors of channels [first, first + count) of token t, count <= DROPOUT_RUN. */
void CPU_NAME(mhc_drop_factors)(const struct dropout_rule *r, int64_t t, int64_t first, int64_t count, float *factor);
/* One row of combine; returns the sum of y^2. res and post: the row's coefficients. */
float CPU_NAME(mhc_combine_row)(const struct mhc_combine_fwd_args *a, int64_t r, const float *post, const float *res);

/* A run of channels of one row of combine's backward. Streams of g, x, dx lie g_step, d, d apart. factor
 * (DROPOUT_RUN apart) NULL: no dropout. sums: n^2 of the mix, then n of post, per vector lane. */
struct combine_run {
    int64_t n, count, g_step, d;
    const float *g, *x, *f, *bias, *factor, *mix, *post;
    float *dx, *df;
    vec *sums;
};
void CPU_NAME(mhc_combine_bwd_run)(const struct combine_run *c);
/* dres and dpost of a row from its sums. */
void CPU_NAME(mhc_combine_bwd_finish)(const struct mhc_rule *r, const vec *sums, float *dpost, float *dres);

/* out [count] (+)= the partials in order, partial_step apart. */
void CPU_NAME(mhc_add_partials)(float *out, bool acc, const float *partial, int64_t partial_step, int64_t blocks, int64_t count);

/* ---- coefficients: mhc_coef_cpu.c ------------------------------------------------------------------- */

/* p[g] = x rows [first, first + count) times w^T, count <= GROUP. */
void CPU_NAME(mhc_project_group)(const struct tensor *x, const struct tensor *w, int64_t first, int64_t count, float *const *p);
/* Coefficients of rows [first, first + count) from stat, count <= VL. */
void CPU_NAME(mhc_coef_lanes)(const struct mhc_boundary_fwd_args *a, int64_t first, int64_t count);
/* dz of rows [first, first + count) from stat and the gradients of their coefficients (lane layout: dcoef[k] holds
 * logit k of VL tokens; overwritten with dz). */
void CPU_NAME(mhc_coef_bwd_lanes)(const struct mhc_boundary_bwd_args *a, int64_t first, int64_t count, vec *dcoef);

/* ---- weight gradient: mhc_outer_cpu.c ---------------------------------------------------------------- */

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
