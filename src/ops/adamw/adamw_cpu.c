/* adamw, fast CPU version; see adamw.h. One pass over p, g, m and v, bound by memory. */
#include "ops/adamw/adamw_int.h"
#include "ops/adamw/adamw.h"
#include "ops/ops_cpu_int.h"

#include <string.h>

/* Square root of x >= 0 to about one unit in the last place: three Newton steps for x^-1/2 from the
 * exponent trick, one for the root. sqrtf may set errno and so would keep the loop from SIMD code.
 * Infinity counts as the largest number, NaN stays NaN. */
static inline float root(float x)
{
    uint32_t bits;
    float y, half;
    x = x > 3.0e38f ? 3.0e38f : x;
    half = 0.5f * x;
    memcpy(&bits, &x, sizeof bits);
    bits = 0x5f3759dfu - (bits >> 1);
    memcpy(&y, &bits, sizeof y);
    y = y * (1.5f - (half * y) * y);
    y = y * (1.5f - (half * y) * y);
    y = y * (1.5f - (half * y) * y);
    float s = x * y;
    return s + 0.5f * y * (x - s * s);
}

static void update_one(const struct adamw_args *a, const struct adamw_part *part)
{
    const double *hyper = a->hyper.data, *scale = a->scale.data;
    const float *restrict g = part->g.data;
    float *restrict p = part->p.data, *restrict m = part->m.data, *restrict v = part->v.data;
    int64_t n = part->p.dim[0];
    /* Everything that does not depend on the element, once and in double. */
    float b1 = (float)a->beta1, c1 = (float)(1 - a->beta1), b2 = (float)a->beta2, c2 = (float)(1 - a->beta2);
    double lr = part->rate * hyper[0];
    float coef = (float)scale[1], step = (float)(lr / hyper[1]), v_fix = (float)(1 / hyper[2]);
    float eps = (float)a->eps, shrink = (float)(lr * part->decay);
#pragma omp parallel for simd schedule(static) if (n > 8192)
    for (int64_t i = 0; i < n; i++) {
        float gi = g[i] * coef;
        float mi = b1 * m[i] + c1 * gi, vi = b2 * v[i] + c2 * gi * gi;
        m[i] = mi;
        v[i] = vi;
        p[i] -= step * mi / (root(vi * v_fix) + eps) + shrink * p[i];
    }
    if (present(&part->copy) && n > 0)
        memcpy(part->copy.data, p, (size_t)n * sizeof *p);
}

int CPU_NAME(adamw_cpu)(struct lane *l, const struct adamw_args *a)
{
    TRY(adamw_check(a, l->err));
    const double *scale = a->scale.data;
    if (scale[2] != 0)
        return ST_OK;
    TRY(adamw_value_check(a, l->err));
    for (int k = 0; k <= a->n_more; k++) {
        struct adamw_part part = adamw_part_at(a, k);
        update_one(a, &part);
        struct quantise_args codes = adamw_quantise(&part);
        if (present(&part.q))
            TRY(CPU_NAME(quantise_cpu)(l, &codes));
    }
    return ST_OK;
}
