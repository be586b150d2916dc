/* rmsnorm, fast CPU version; see rmsnorm.h. Rows in parallel; the sums of dw are taken over fixed blocks of
 * rows into work and are then added in block order, so threads do not change the result. */
#include "ops/cpu_math.h"
#include "ops/ops_cpu_int.h"
#include "ops/rmsnorm/rmsnorm.h"

#include <math.h>

int CPU_NAME(rmsnorm_fwd_cpu)(struct lane *l, const struct rmsnorm_fwd_args *a)
{
    TRY(rmsnorm_fwd_check(a, l->err));
    int64_t rows = rows_of(&a->x), d = cols_of(&a->x);
    const float *w = a->w.data, one = a->zero_centered ? 1.0f : 0.0f;
    float *rstds = a->rstd.data;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = f32_row(&a->x, r);
        float *y = f32_row(&a->y, r);
        float rstd = 1.0f / sqrtf(dot_f32(x, x, d) / (float)d + (float)a->eps);
        rstds[r] = rstd;
        scale_row_f32(y, x, rstd, w, one, d);
    }
    return ST_OK;
}

int64_t CPU_NAME(rmsnorm_bwd_work_cpu)(const struct rmsnorm_bwd_args *a)
{
    return a->w.rank == 0 ? 0 : ceil_div(rows_of(&a->x), RMSNORM_BLOCK) * cols_of(&a->x) * (int64_t)sizeof(float);
}

/* gain and add are constants where this is inlined: chosen within the loop, an absent tensor would be read by masked
 * loads from NULL, hundreds of cycles each. */
static inline __attribute__((always_inline)) void dx_row(bool gain, bool add, int64_t d, const float *dy,
                                                         const float *x, const float *w, float one, const float *dres,
                                                         float rstd, float k, float *dx)
{
#pragma omp simd
    for (int64_t c = 0; c < d; c++) {
        float u = rstd * ((gain ? dy[c] * (w[c] + one) : dy[c]) - x[c] * k);
        dx[c] = add ? u + dres[c] : u;
    }
}

static void bwd_row(const struct rmsnorm_bwd_args *a, int64_t r, float *dw_block)
{
    int64_t d = cols_of(&a->x);
    const float *x = f32_row(&a->x, r), *dy = f32_row(&a->dy, r), *w = a->w.data;
    const float *dres = present(&a->dres) ? f32_row(&a->dres, r) : NULL;
    float *dx = f32_row(&a->dx, r), rstd = ((const float *)a->rstd.data)[r];
    float one = a->zero_centered ? 1.0f : 0.0f, sum = 0;
    if (w == NULL) {
        sum = dot_f32(dy, x, d);
    } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < d; c++) {
            sum += dy[c] * (w[c] + one) * x[c];
            dw_block[c] += dy[c] * x[c] * rstd;
        }
    }
    float k = sum * rstd * rstd / (float)d;
    if (w == NULL)
        dres == NULL ? dx_row(false, false, d, dy, x, w, one, dres, rstd, k, dx)
                     : dx_row(false, true, d, dy, x, w, one, dres, rstd, k, dx);
    else
        dres == NULL ? dx_row(true, false, d, dy, x, w, one, dres, rstd, k, dx)
                     : dx_row(true, true, d, dy, x, w, one, dres, rstd, k, dx);
}

int CPU_NAME(rmsnorm_bwd_cpu)(struct lane *l, const struct rmsnorm_bwd_args *a)
{
    TRY(rmsnorm_bwd_check(a, l->err));
    TRY(check_work("rmsnorm_bwd", &a->work, CPU_NAME(rmsnorm_bwd_work_cpu)(a), l->err));
    int64_t rows = rows_of(&a->x), d = cols_of(&a->x), blocks = ceil_div(rows, RMSNORM_BLOCK);
    float *partial = a->work.data, *dw = a->dw.data;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        float *mine = present(&a->w) ? partial + b * d : NULL;
        for (int64_t c = 0; mine != NULL && c < d; c++)
            mine[c] = 0;
        for (int64_t r = b * RMSNORM_BLOCK; r < min_i64(rows, (b + 1) * RMSNORM_BLOCK); r++)
            bwd_row(a, r, mine);
    }
    if (dw == NULL)
        return ST_OK;
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < d; c++) {
        float sum = a->acc_dw ? dw[c] : 0.0f;
        for (int64_t b = 0; b < blocks; b++)
            sum += partial[b * d + c];
        dw[c] = sum;
    }
    return ST_OK;
}
