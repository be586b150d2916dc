/* ring_merge and ring_add, fast CPU version; see ring.h. */
#include "ops/ops_cpu_int.h"
#include "ops/ring/ring.h"

#include <math.h>

static inline float *at(const struct tensor *t, int64_t i, int64_t j, int64_t k)
{
    return (float *)t->data + i * t->stride[0] + j * t->stride[1] + k * t->stride[2];
}

static void merge_row(const struct ring_merge_args *a, int64_t b, int64_t i, int64_t h)
{
    int64_t n = a->o.dim[3];
    const float *o = at(&a->o, b, i, h), lse = *at(&a->lse, b, h, i);
    float *sum = at(&a->sum, b, i, h), *total = at(&a->total, b, h, i);
    float before = a->acc_total ? *total : -INFINITY, top = fmaxf(before, lse), all = top, old = 0, add = 0;
    if (top != -INFINITY) {
        all = top + logf(expf(before - top) + expf(lse - top));
        old = expf(before - all);
        add = expf(lse - all);
    }
    *total = all;
    if (old == 0) {
#pragma omp simd
        for (int64_t c = 0; c < n; c++)
            sum[c] = add * o[c];
    } else {
#pragma omp simd
        for (int64_t c = 0; c < n; c++)
            sum[c] = old * sum[c] + add * o[c];
    }
    if (!present(&a->y))
        return;
    float *y = at(&a->y, b, i, h);
#pragma omp simd
    for (int64_t c = 0; c < n; c++)
        y[c] = sum[c];
}

int CPU_NAME(ring_merge_cpu)(struct lane *l, const struct ring_merge_args *a)
{
    TRY(ring_merge_check(a, l->err));
    int64_t rows = a->o.dim[0] * a->o.dim[1], n = a->o.dim[1], heads = a->o.dim[2];
#pragma omp parallel for schedule(static) if (rows * heads * a->o.dim[3] > 8192)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++)
            merge_row(a, r / n, r % n, h);
    return ST_OK;
}

int CPU_NAME(ring_add_cpu)(struct lane *l, const struct ring_add_args *a)
{
    TRY(ring_add_check(a, l->err));
    int64_t rows = a->x.dim[0], n = a->x.dim[1];
    bool adds = a->acc_y;
#pragma omp parallel for schedule(static) if (rows * n > 8192)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = f32_row(&a->x, r);
        float *y = f32_row(&a->y, r);
        if (adds) {
#pragma omp simd
            for (int64_t c = 0; c < n; c++)
                y[c] += x[c];
        } else {
#pragma omp simd
            for (int64_t c = 0; c < n; c++)
                y[c] = x[c];
        }
    }
    return ST_OK;
}
