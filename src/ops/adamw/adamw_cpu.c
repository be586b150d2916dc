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

/* Everything that does not depend on the element, once and in double. */
struct rates {
    float b1, c1, b2, c2, coef, step, v_fix, eps, shrink;
};

static struct rates rates_of(const struct adamw_args *a, const struct adamw_part *part)
{
    const double *hyper = a->hyper.data, *scale = a->scale.data;
    double lr = part->rate * hyper[0];
    return (struct rates){.b1 = (float)a->beta1,
                          .c1 = (float)(1 - a->beta1),
                          .b2 = (float)a->beta2,
                          .c2 = (float)(1 - a->beta2),
                          .coef = (float)scale[1],
                          .step = (float)(lr / hyper[1]),
                          .v_fix = (float)(1 / hyper[2]),
                          .eps = (float)a->eps,
                          .shrink = (float)(lr * part->decay)};
}

static inline void update_at(const struct rates *r, float g, float *restrict p, float *restrict m, float *restrict v)
{
    float gi = g * r->coef;
    float mi = r->b1 * *m + r->c1 * gi, vi = r->b2 * *v + r->c2 * gi * gi;
    *m = mi;
    *v = vi;
    *p -= r->step * mi / (root(vi * r->v_fix) + r->eps) + r->shrink * *p;
}

/* Moments that bf16 holds pass through fp32 in short stretches, which stay in the cache. */
enum { STRETCH = 256 };
struct stretch {
    float m[STRETCH], v[STRETCH];
    uint32_t draw[STRETCH + 4];
};

static void load_moments(float *restrict out, const struct tensor *t, int64_t from, int n)
{
    if (t->dtype == DT_F32) {
        memcpy(out, (const float *)t->data + from, (size_t)n * sizeof *out);
        return;
    }
    const uint16_t *restrict x = (const uint16_t *)t->data + from;
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(&out[i], &bits, sizeof bits);
    }
}

static void store_moments(const struct tensor *t, int64_t from, int n, const float *restrict x,
                          const uint32_t *restrict draw, int shift)
{
    uint16_t *restrict narrow = (uint16_t *)t->data + from;
    float *restrict wide = (float *)t->data + from;
    if (t->dtype == DT_BF16) {
        for (int i = 0; i < n; i++)
            narrow[i] = adamw_round(x[i], draw[i] >> shift);
        return;
    }
    for (int i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)adamw_round(x[i], draw[i] >> shift) << 16;
        memcpy(&wide[i], &bits, sizeof bits);
    }
}

/* Draws of n elements from `from` on; where they lie in a row of the whole parameter, four at a time. */
static const uint32_t *draws_of(struct stretch *s, const struct adamw_place *at, double update, int64_t from, int n)
{
    int64_t first = adamw_place_of(at, from), skip = first % 4;
    if (at->row == 0 || adamw_place_of(at, from + n - 1) == first + n - 1) {
        for (int k = 0; k * 4 < skip + n; k++) {
            struct philox4 r = adamw_draws(at->key, first / 4 + k, update);
            memcpy(s->draw + 4 * k, r.v, sizeof r.v);
        }
        return s->draw + skip;
    }
    for (int i = 0; i < n; i++) {
        int64_t place = adamw_place_of(at, from + i);
        s->draw[i] = adamw_draws(at->key, place / 4, update).v[place % 4];
    }
    return s->draw;
}

static void update_rounded(const struct adamw_args *a, const struct adamw_part *part)
{
    const struct rates r = rates_of(a, part);
    const float *g = part->g.data;
    const double *hyper = a->hyper.data;
    float *p = part->p.data;
    int64_t n = part->p.dim[0];
#pragma omp parallel for schedule(static) if (n > 8192)
    for (int64_t from = 0; from < n; from += STRETCH) {
        struct stretch s;
        int k = (int)min_i64(STRETCH, n - from);
        const uint32_t *draw = draws_of(&s, &part->at, hyper[3], from, k);
        load_moments(s.m, &part->m, from, k);
        load_moments(s.v, &part->v, from, k);
#pragma omp simd
        for (int i = 0; i < k; i++)
            update_at(&r, g[from + i], &p[from + i], &s.m[i], &s.v[i]);
        store_moments(&part->m, from, k, s.m, draw, 0);
        store_moments(&part->v, from, k, s.v, draw, 16);
    }
}

static void update_one(const struct adamw_args *a, const struct adamw_part *part)
{
    const struct rates r = rates_of(a, part);
    const float *restrict g = part->g.data;
    float *restrict p = part->p.data, *restrict m = part->m.data, *restrict v = part->v.data;
    int64_t n = part->p.dim[0];
#pragma omp parallel for simd schedule(static) if (n > 8192)
    for (int64_t i = 0; i < n; i++)
        update_at(&r, g[i], &p[i], &m[i], &v[i]);
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
        if (a->bf16)
            update_rounded(a, &part);
        else
            update_one(a, &part);
        if (present(&part.copy) && part.p.dim[0] > 0)
            memcpy(part.copy.data, part.p.data, (size_t)tensor_bytes(&part.p));
        struct quantise_args codes = adamw_quantise(&part);
        if (present(&part.q))
            TRY(CPU_NAME(quantise_cpu)(l, &codes));
    }
    return ST_OK;
}
