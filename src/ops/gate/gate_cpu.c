/* gate, fast CPU version; see gate.h. */
#include "ops/ops_cpu_int.h"
#include "ops/gate/gate.h"

#include "ops/cpu_math.h"

int CPU_NAME(gate_fwd_cpu)(struct lane *l, const struct gate_fwd_args *a)
{
    TRY(gate_fwd_check(a, l->err));
    int64_t rows = rows_of(&a->x), n = cols_of(&a->x);
    bool shared = cols_of(&a->g) == 1;
#pragma omp parallel for schedule(static) if (rows * n > 8192)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = f32_row(&a->x, r), *g = f32_row(&a->g, r);
        float *y = f32_row(&a->y, r);
        if (shared) {
            float s = fast_sigmoidf(g[0]);
#pragma omp simd
            for (int64_t c = 0; c < n; c++)
                y[c] = x[c] * s;
        } else {
#pragma omp simd
            for (int64_t c = 0; c < n; c++)
                y[c] = x[c] * fast_sigmoidf(g[c]);
        }
    }
    return ST_OK;
}

int CPU_NAME(gate_bwd_cpu)(struct lane *l, const struct gate_bwd_args *a)
{
    TRY(gate_bwd_check(a, l->err));
    int64_t rows = rows_of(&a->x), n = cols_of(&a->x);
    bool shared = cols_of(&a->g) == 1;
#pragma omp parallel for schedule(static) if (rows * n > 8192)
    for (int64_t r = 0; r < rows; r++) {
        const float *dy = f32_row(&a->dy, r), *x = f32_row(&a->x, r), *g = f32_row(&a->g, r);
        float *dx = f32_row(&a->dx, r), *dg = f32_row(&a->dg, r);
        if (shared) {
            float s = fast_sigmoidf(g[0]), sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < n; c++) {
                float d = dy[c];
                sum += d * x[c];
                dx[c] = d * s;
            }
            dg[0] = sum * s * (1.0f - s);
        } else {
#pragma omp simd
            for (int64_t c = 0; c < n; c++) {
                float s = fast_sigmoidf(g[c]), through = dy[c] * s;
                dg[c] = through * x[c] * (1.0f - s);
                dx[c] = through;
            }
        }
    }
    return ST_OK;
}
