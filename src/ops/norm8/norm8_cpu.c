/* norm8, fast CPU version: the values as addnorm computes them, then quantise; see norm8.h. */
#include "ops/cpu_math.h"
#include "ops/norm8/norm8_int.h"
#include "ops/ops_cpu_int.h"

int64_t CPU_NAME(norm8_work_cpu)(const struct norm8_args *a) { return norm8_values_bytes(&a->x); }

int CPU_NAME(norm8_cpu)(struct lane *l, const struct norm8_args *a)
{
    TRY(norm8_check(a, l->err));
    TRY(check_work("norm8", &a->work, CPU_NAME(norm8_work_cpu)(a), l->err));
    const float *w = a->w.data, one = a->zero_centered ? 1.0f : 0.0f;
    int64_t rows = a->x.dim[0], d = a->x.dim[1];
#pragma omp parallel for schedule(static) if (rows * d > 4096)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = f32_row(&a->x, r), rstd = ((const float *)a->rstd.data)[r];
        float *y = (float *)a->work.data + r * d;
        scale_row_f32(y, x, rstd, w, one, d);
    }
    struct quantise_args q = norm8_quantise(a);
    return CPU_NAME(quantise_cpu)(l, &q);
}
