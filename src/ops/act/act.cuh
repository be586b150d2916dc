/* The nonlinearities of ops/act on the GPU, value and derivatives, for the kernels that store them as they are
 * (act.cu) and as FP8 codes (act8.cu). All curves are a sigmoid or a square: 0.5 (1 + tanh(u)) is sigmoid(2u). */
#ifndef BRAID_OPS_ACT_CUH
#define BRAID_OPS_ACT_CUH

#include "ops/act/act.h"
#include "ops/cuda/rows.cuh"

enum curve_kind { CURVE_SIGMOID, CURVE_GELU, CURVE_SQUARE };

struct act_call {
    struct tensor x, y; /* backward: y is dx */
    struct tensor dy;
    const float *prob;
    float *dprob;
    int64_t rows, f, block; /* block: columns of gate before those of up */
    float limit, alpha, offset;
};

/* The curve at x, and its slope. */
template <int CURVE> __device__ __forceinline__ float curve(const struct act_call &a, float x, float *slope)
{
    if constexpr (CURVE == CURVE_SQUARE) {
        float v = x > 0 ? x : (x <= 0 ? 0.0f : x); /* NaN stays NaN */
        *slope = 2 * v;
        return v * v;
    } else {
        const float k2 = 1.5957691216057308f, cubic = 0.044715f; /* 2 sqrt(2 / pi) */
        float u = CURVE == CURVE_GELU ? k2 * (x + cubic * x * x * x) : a.alpha * x;
        float du = CURVE == CURVE_GELU ? k2 * (1 + 3 * cubic * x * x) : a.alpha;
        float s = quick_sigmoid(u);
        *slope = s + x * s * (1 - s) * du;
        return x * s;
    }
}

/* One output before prob, and its derivatives. CLAMPED false: there is no limit. */
template <int CURVE, bool GATED, bool CLAMPED = true>
__device__ __forceinline__ float one_value(const struct act_call &a, float gate, float up, float *d_gate, float *d_up)
{
    float slope, value = curve<CURVE>(a, CLAMPED && gate > a.limit ? a.limit : gate, &slope);
    slope = CLAMPED && gate > a.limit ? 0.0f : slope;
    if (!GATED) {
        *d_gate = slope;
        *d_up = 0;
        return value;
    }
    float factor = (!CLAMPED ? up : up > a.limit ? a.limit : up < -a.limit ? -a.limit : up) + a.offset;
    *d_gate = slope * factor;
    *d_up = CLAMPED && fabsf(up) > a.limit ? 0.0f : value;
    return value * factor;
}

/* From the rule; a->f is known. */
static inline void act_numbers(struct act_call *a, const struct act_rule *r)
{
    bool quick = r->kind == ACT_QUICK_GEGLU || r->kind == ACT_QUICK_GELU;
    a->limit = r->clamp > 0 ? (float)r->clamp : INFINITY;
    a->alpha = quick ? (float)r->alpha : 1.0f;
    a->offset = (float)r->offset;
    a->block = act_is_gated(r->kind) && r->interleave > 0 ? r->interleave : max_i64(a->f, 1);
}

#endif
