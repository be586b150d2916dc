/* Contracting the streams into one, on the CPU: the mean, or learned gates; see mhc.h. */
#include "ops/mhc/mhc_cpu_int.h"

#include <math.h>

static void weighted_sum(int64_t n, int64_t d, const float *x, const float *weight, float *y)
{
    for (int64_t i = 0; i < n; i++) {
#pragma omp simd
        for (int64_t c = 0; c < d; c++)
            y[c] = (i > 0 ? y[c] : 0) + weight[i] * x[i * d + c];
    }
}

/* The streams of one group of tokens into one; learned gates go by w x and the root mean square. */
static void contract_group(const struct mhc_contract_fwd_args *a, int64_t first, int64_t count)
{
    int64_t d = a->y.dim[1], k = a->x.dim[1], n = present(&a->w) ? a->w.dim[0] : d > 0 ? k / d : 0;
    float *m[GROUP] = {NULL};
    for (int64_t t = 0; present(&a->w) && t < count; t++)
        m[t] = f32_row(&a->m, first + t);
    if (present(&a->w))
        CPU_NAME(mhc_project_group)(&a->x, &a->w, first, count, m);
    for (int64_t t = 0; t < count; t++) {
        const float *x = f32_row(&a->x, first + t);
        float weight[MHC_MAX_STREAMS];
        if (!present(&a->w)) {
            float *y = f32_row(&a->y, first + t);
            for (int64_t i = 0; i < n; i++) {
#pragma omp simd
                for (int64_t c = 0; c < d; c++)
                    y[c] = (i > 0 ? y[c] : 0) + x[i * d + c] / (float)n;
            }
            continue;
        }
        float rstd = 1.0f / sqrtf((k > 0 ? sum_squares(x, k) / (float)k : 0) + (float)a->eps);
        for (int64_t i = 0; i < n; i++)
            weight[i] = fast_sigmoidf(m[t][i] * rstd * scalar_of(&a->scale) + ((const float *)a->base.data)[i]) + (float)a->eps;
        f32_row(&a->rstd, first + t)[0] = rstd;
        weighted_sum(n, d, x, weight, f32_row(&a->y, first + t));
    }
}

int CPU_NAME(mhc_contract_fwd_cpu)(struct lane *l, const struct mhc_contract_fwd_args *a)
{
    TRY(mhc_contract_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0];
#pragma omp parallel for schedule(static) if (rows * a->x.dim[1] > 4096)
    for (int64_t first = 0; first < rows; first += GROUP)
        contract_group(a, first, min_i64(GROUP, rows - first));
    return ST_OK;
}

/* Per row: dm [n] for the gradient of w, and the gradient of the gates' logits [n]; then partial sums of dw. */
int64_t CPU_NAME(mhc_contract_bwd_work_cpu)(const struct mhc_contract_bwd_args *a)
{
    if (a->w.rank == 0)
        return 0;
    int64_t rows = a->dx.dim[0], n = a->w.dim[0];
    return (2 * rows * n + CPU_NAME(mhc_outer_floats)(rows, n, a->dx.dim[1])) * (int64_t)sizeof(float);
}

static void contract_bwd_row(const struct mhc_contract_bwd_args *a, int64_t r, float *dm, float *dv)
{
    int64_t d = a->dy.dim[1], k = a->dx.dim[1], n = a->w.dim[0];
    const float *x = f32_row(&a->x, r), *dy = f32_row(&a->dy, r), *m = f32_row(&a->m, r);
    float rstd = f32_row(&a->rstd, r)[0], scale = scalar_of(&a->scale), drstd = 0, *dx = f32_row(&a->dx, r);
    for (int64_t i = 0; i < n; i++) {
        float z = m[i] * rstd * scale + ((const float *)a->base.data)[i], s = fast_sigmoidf(z), sum = 0, gate = s + (float)a->eps;
        const float *xi = x + i * d;
        float *out = dx + i * d;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < d; c++) {
            sum += dy[c] * xi[c];
            out[c] = gate * dy[c];
        }
        dv[i] = sum * s * fast_sigmoidf(-z); /* 1 - s would cancel where the gate is open */
        dm[i] = dv[i] * scale * rstd;
        drstd += dv[i] * scale * m[i];
    }
    float through_norm = drstd * rstd * rstd * rstd / (float)(k > 0 ? k : 1);
#pragma omp simd
    for (int64_t c = 0; c < k; c++)
        dx[c] -= through_norm * x[c];
    for (int64_t i = 0; i < n; i++) {
        const float *w = f32_row(&a->w, i);
#pragma omp simd
        for (int64_t c = 0; c < k; c++)
            dx[c] += dm[i] * w[c];
    }
}

static void gate_sums(const struct mhc_contract_bwd_args *a, const float *dv)
{
    int64_t rows = a->dx.dim[0], n = a->w.dim[0];
    double base[MHC_MAX_STREAMS] = {0}, scale = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++) {
            base[i] += (double)dv[r * n + i];
            scale += (double)dv[r * n + i] * (double)f32_row(&a->m, r)[i] * (double)f32_row(&a->rstd, r)[0];
        }
    float *dbase = a->dbase.data, *dscale = a->dscale.data;
    for (int64_t i = 0; i < n; i++)
        dbase[i] = (a->acc_params ? dbase[i] : 0) + (float)base[i];
    dscale[0] = (a->acc_params ? dscale[0] : 0) + (float)scale;
}

int CPU_NAME(mhc_contract_bwd_cpu)(struct lane *l, const struct mhc_contract_bwd_args *a)
{
    TRY(mhc_contract_bwd_check(a, l->err));
    TRY(check_work("mhc_contract_bwd", &a->work, CPU_NAME(mhc_contract_bwd_work_cpu)(a), l->err));
    int64_t rows = a->dx.dim[0], d = a->dy.dim[1], k = a->dx.dim[1];
    bool learned = present(&a->w);
    int64_t n = learned ? a->w.dim[0] : d > 0 ? k / d : 0;
    float *dm = a->work.data, *dv = learned && dm ? dm + rows * n : NULL;
#pragma omp parallel for schedule(static) if (rows * k > 4096)
    for (int64_t r = 0; r < rows; r++) {
        if (learned)
            contract_bwd_row(a, r, dm + r * n, dv + r * n);
        for (int64_t i = 0; !learned && i < n; i++) {
            float *dx = f32_row(&a->dx, r) + i * d;
            const float *dy = f32_row(&a->dy, r);
#pragma omp simd
            for (int64_t c = 0; c < d; c++)
                dx[c] = dy[c] / (float)n;
        }
    }
    if (!learned)
        return ST_OK;
    gate_sums(a, dv);
    struct outer o = {.dp = dm, .dp_step = n, .m = n, .y = &a->x, .dw = &a->dw, .partial = rows > 0 ? dv + rows * n : a->work.data,
                      .acc = a->acc_params};
    CPU_NAME(mhc_outer)(&o);
    return ST_OK;
}
