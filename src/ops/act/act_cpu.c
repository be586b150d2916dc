/* act, fast CPU version; see act.h. Two loops, gated and plain, each direction; the curve is a
 * constant in every copy of a loop, so that it becomes straight vector code. */
#include "ops/ops_cpu_int.h"
#include "ops/act/act.h"

#include "ops/cpu_math.h"

#include <math.h>

#define INLINE static inline __attribute__((always_inline))

/* gelu's tanh form is x * sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3), so every curve but
 * relu2 is x * sigmoid(h(x)). */
enum curve { CURVE_SIGMOID, CURVE_GELU, CURVE_RELU2 };

struct point {
    float value, slope;
};

INLINE struct point curve_at(enum curve k, float x, float alpha)
{
    if (k == CURVE_RELU2) {
        float pos = 0.5f * (x + fabsf(x)); /* max(x, 0) without a branch; keeps a NaN */
        return (struct point){pos * pos, 2.0f * pos};
    }
    const float two_k = 1.5957691216f, cubic = 0.044715f;
    float h = k == CURVE_GELU ? two_k * x * (1.0f + cubic * x * x) : alpha * x;
    float slope_h = k == CURVE_GELU ? two_k * (1.0f + 3.0f * cubic * x * x) : alpha;
    float s = fast_sigmoidf(h), value = x * s;
    return (struct point){value, s + value * (1.0f - s) * slope_h};
}

/* One row and what its loops need of the rule. */
struct row {
    const float *x, *dy;
    float *y, *dx;
    int64_t f, block; /* width of y; gate and up columns alternate in runs of block */
    float limit, alpha, offset, prob;
};

INLINE void gated_fwd(enum curve k, const struct row *r)
{
    float limit = r->limit, alpha = r->alpha, offset = r->offset, prob = r->prob;
    for (int64_t at = 0; at < r->f; at += r->block) {
        const float *gate = r->x + 2 * at, *up = gate + r->block;
        float *y = r->y + at;
#pragma omp simd
        for (int64_t j = 0; j < r->block; j++) {
            float g = gate[j] > limit ? limit : gate[j], u = up[j] > limit ? limit : up[j];
            u = u < -limit ? -limit : u;
            y[j] = curve_at(k, g, alpha).value * (u + offset) * prob;
        }
    }
}

/* Returns the sum of dy times the value before prob. dx may be x: each turn of the loop reads its
 * two elements before it writes them. */
INLINE float gated_bwd(enum curve k, const struct row *r)
{
    float limit = r->limit, alpha = r->alpha, offset = r->offset, prob = r->prob, sum = 0;
    for (int64_t at = 0; at < r->f; at += r->block) {
        const float *gate = r->x + 2 * at, *up = gate + r->block, *dy = r->dy + at;
        float *dgate = r->dx + 2 * at, *dup = dgate + r->block;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < r->block; j++) {
            float g = gate[j] > limit ? limit : gate[j], u = up[j] > limit ? limit : up[j];
            u = u < -limit ? -limit : u;
            struct point p = curve_at(k, g, alpha);
            float d = dy[j], by_gate = d * prob * p.slope * (u + offset), by_up = d * prob * p.value;
            sum += d * p.value * (u + offset);
            by_gate = gate[j] > limit ? 0.0f : by_gate;
            by_up = up[j] > limit ? 0.0f : by_up;
            by_up = up[j] < -limit ? 0.0f : by_up;
            dgate[j] = by_gate;
            dup[j] = by_up;
        }
    }
    return sum;
}

INLINE void plain_fwd(enum curve k, const struct row *r)
{
    const float *x = r->x;
    float *y = r->y, limit = r->limit, alpha = r->alpha, prob = r->prob;
#pragma omp simd
    for (int64_t j = 0; j < r->f; j++)
        y[j] = curve_at(k, x[j] > limit ? limit : x[j], alpha).value * prob;
}

INLINE float plain_bwd(enum curve k, const struct row *r)
{
    const float *x = r->x, *dy = r->dy;
    float *dx = r->dx, limit = r->limit, alpha = r->alpha, prob = r->prob, sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < r->f; j++) {
        struct point p = curve_at(k, x[j] > limit ? limit : x[j], alpha);
        float d = dy[j], by_x = d * prob * p.slope;
        sum += d * p.value;
        dx[j] = x[j] > limit ? 0.0f : by_x;
    }
    return sum;
}

static void fwd_row(enum act_kind kind, const struct row *r)
{
    switch (kind) {
    case ACT_SWIGLU:
    case ACT_QUICK_GEGLU: gated_fwd(CURVE_SIGMOID, r); break;
    case ACT_GEGLU: gated_fwd(CURVE_GELU, r); break;
    case ACT_GELU: plain_fwd(CURVE_GELU, r); break;
    case ACT_QUICK_GELU:
    case ACT_SILU: plain_fwd(CURVE_SIGMOID, r); break;
    case ACT_RELU2: plain_fwd(CURVE_RELU2, r); break;
    }
}

static float bwd_row(enum act_kind kind, const struct row *r)
{
    switch (kind) {
    case ACT_SWIGLU:
    case ACT_QUICK_GEGLU: return gated_bwd(CURVE_SIGMOID, r);
    case ACT_GEGLU: return gated_bwd(CURVE_GELU, r);
    case ACT_GELU: return plain_bwd(CURVE_GELU, r);
    case ACT_QUICK_GELU:
    case ACT_SILU: return plain_bwd(CURVE_SIGMOID, r);
    case ACT_RELU2: return plain_bwd(CURVE_RELU2, r);
    }
    return 0;
}

static struct row row_of_rule(const struct act_rule *rule, int64_t f)
{
    bool quick = rule->kind == ACT_QUICK_GEGLU || rule->kind == ACT_QUICK_GELU;
    return (struct row){.f = f,
                        .block = rule->interleave > 0 ? rule->interleave : max_i64(f, 1),
                        .limit = rule->clamp > 0 ? (float)rule->clamp : INFINITY,
                        .alpha = quick ? (float)rule->alpha : 1.0f,
                        .offset = (float)rule->offset,
                        .prob = 1.0f};
}

int CPU_NAME(act_fwd_cpu)(struct lane *l, const struct act_fwd_args *a)
{
    TRY(act_fwd_check(a, l->err));
    int64_t rows = a->y.dim[0], f = a->y.dim[1];
    const float *prob = a->prob.data;
#pragma omp parallel for schedule(static) if (rows * f > 4096)
    for (int64_t i = 0; i < rows; i++) {
        struct row r = row_of_rule(&a->rule, f);
        r.x = f32_row(&a->x, i);
        r.y = f32_row(&a->y, i);
        r.prob = prob == NULL ? 1.0f : prob[i];
        fwd_row(a->rule.kind, &r);
    }
    return ST_OK;
}

int CPU_NAME(act_bwd_cpu)(struct lane *l, const struct act_bwd_args *a)
{
    TRY(act_bwd_check(a, l->err));
    int64_t rows = a->dy.dim[0], f = a->dy.dim[1];
    const float *prob = a->prob.data;
    float *dprob = a->dprob.data;
#pragma omp parallel for schedule(static) if (rows * f > 4096)
    for (int64_t i = 0; i < rows; i++) {
        struct row r = row_of_rule(&a->rule, f);
        r.x = f32_row(&a->x, i);
        r.dy = f32_row(&a->dy, i);
        r.dx = f32_row(&a->dx, i);
        r.prob = prob == NULL ? 1.0f : prob[i];
        float sum = bwd_row(a->rule.kind, &r);
        if (dprob != NULL)
            dprob[i] = sum;
    }
    return ST_OK;
}
