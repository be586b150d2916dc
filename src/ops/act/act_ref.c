/* act, reference; see act.h. */
#include "ops/ops_ref_int.h"
#include "ops/act/act.h"

#include <math.h>

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

/* The curve of one kind at x, and its slope. */
static double curve(const struct act_rule *r, double x, double *slope)
{
    double alpha = 1, s, k = 0.7978845608028654, cubic = 0.044715; /* k: sqrt(2 / pi) */
    switch (r->kind) {
    case ACT_GEGLU:
    case ACT_GELU:
        s = tanh(k * (x + cubic * x * x * x));
        *slope = 0.5 * (1 + s) + 0.5 * x * (1 - s * s) * k * (1 + 3 * cubic * x * x);
        return 0.5 * x * (1 + s);
    case ACT_RELU2: *slope = x > 0 ? 2 * x : 0; return x > 0 ? x * x : 0;
    case ACT_QUICK_GEGLU:
    case ACT_QUICK_GELU: alpha = r->alpha; break;
    case ACT_SWIGLU:
    case ACT_SILU: break;
    }
    s = sigmoid(alpha * x);
    *slope = s + alpha * x * s * (1 - s);
    return x * s;
}

/* One output before prob, and its derivatives by gate (or x) and up. */
static double one_value(const struct act_rule *r, double gate, double up, double *d_gate, double *d_up)
{
    double limit = r->clamp > 0 ? r->clamp : INFINITY;
    double slope, value = curve(r, fmin(gate, limit), &slope);
    slope = gate > limit ? 0 : slope;
    double factor = act_is_gated(r->kind) ? fmax(fmin(up, limit), -limit) + r->offset : 1;
    *d_gate = slope * factor;
    *d_up = fabs(up) > limit ? 0 : value;
    return value * factor;
}

/* Columns of x that make column j of y. */
static void columns(const struct act_rule *r, int64_t f, int64_t j, int64_t *gate, int64_t *up)
{
    int64_t g = r->interleave > 0 ? r->interleave : max_i64(f, 1);
    bool gated = act_is_gated(r->kind);
    *gate = gated ? j / g * 2 * g + j % g : j;
    *up = gated ? *gate + g : j;
}

int act_fwd_ref(struct lane *l, const struct act_fwd_args *a)
{
    TRY(act_fwd_check(a, l->err));
    int64_t rows = a->y.dim[0], f = a->y.dim[1], gate, up;
    for (int64_t r = 0; r < rows; r++) {
        const double *x = f64_row(&a->x, r);
        double prob = present(&a->prob) ? ((const double *)a->prob.data)[r] : 1, d_gate, d_up;
        for (int64_t j = 0; j < f; j++) {
            columns(&a->rule, f, j, &gate, &up);
            f64_row(&a->y, r)[j] = prob * one_value(&a->rule, x[gate], x[up], &d_gate, &d_up);
        }
    }
    return ST_OK;
}

int act_bwd_ref(struct lane *l, const struct act_bwd_args *a)
{
    TRY(act_bwd_check(a, l->err));
    int64_t rows = a->dy.dim[0], f = a->dy.dim[1], gate, up;
    for (int64_t r = 0; r < rows; r++) {
        const double *x = f64_row(&a->x, r), *dy = f64_row(&a->dy, r);
        double *dx = f64_row(&a->dx, r);
        double prob = present(&a->prob) ? ((const double *)a->prob.data)[r] : 1, d_prob = 0, d_gate, d_up;
        for (int64_t j = 0; j < f; j++) {
            columns(&a->rule, f, j, &gate, &up);
            d_prob += dy[j] * one_value(&a->rule, x[gate], x[up], &d_gate, &d_up);
            dx[gate] = prob * dy[j] * d_gate;
            if (up != gate)
                dx[up] = prob * dy[j] * d_up;
        }
        if (present(&a->dprob))
            ((double *)a->dprob.data)[r] = d_prob;
    }
    return ST_OK;
}
