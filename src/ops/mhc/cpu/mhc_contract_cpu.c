/* Contracting the streams into one, on the CPU: the mean, or learned gates; see mhc.h. */
#include "ops/mhc/cpu/mhc_cpu_int.h"
#include "ops/mhc/mhc.h"

#include <math.h>

/* y = sum_i weight_i x_i */
static void weighted_sum(int64_t n, int64_t d, const float *x, const float *weight, float *y)
{
    int64_t c = 0;
    for (; c + VL <= d; c += VL) {
        vec sum = {0};
        for (int64_t i = 0; i < n; i++)
            sum += vec_at(x + i * d + c) * weight[i];
        vec_put(y + c, sum);
    }
    for (; c < d; c++) {
        float sum = 0;
        for (int64_t i = 0; i < n; i++)
            sum += x[i * d + c] * weight[i];
        y[c] = sum;
    }
}

static void mean_of(int64_t n, int64_t d, const float *x, float *y)
{
    for (int64_t i = 0; i < n; i++) {
#pragma omp simd
        for (int64_t c = 0; c < d; c++)
            y[c] = (i > 0 ? y[c] : 0) + x[i * d + c] / (float)n;
    }
}

/* The streams of one group of tokens into one; learned gates go by w x and the root mean square. */
static void contract_group(const struct mhc_contract_fwd_args *a, int64_t first, int64_t count)
{
    int64_t d = a->y.dim[1], k = a->x.dim[1], n = present(&a->w) ? a->w.dim[0] : d > 0 ? k / d : 0;
    float *m[GROUP] = {NULL};
    for (int64_t t = 0; present(&a->w) && t < count; t++)
        m[t] = row_of(&a->m, first + t);
    if (present(&a->w))
        CPU_NAME(mhc_project_group)(&a->x, &a->w, first, count, m, NULL);
    for (int64_t t = 0; t < count; t++) {
        const float *x = row_of(&a->x, first + t);
        float weight[MHC_MAX_STREAMS];
        if (!present(&a->w)) {
            mean_of(n, d, x, row_of(&a->y, first + t));
            continue;
        }
        float rstd = 1.0f / sqrtf((k > 0 ? sum_squares(x, k) / (float)k : 0) + (float)a->eps);
        for (int64_t i = 0; i < n; i++)
            weight[i] =
                fast_sigmoidf(m[t][i] * rstd * scalar_of(&a->scale) + ((const float *)a->base.data)[i]) + (float)a->eps;
        row_of(&a->rstd, first + t)[0] = rstd;
        weighted_sum(n, d, x, weight, row_of(&a->y, first + t));
    }
}

int CPU_NAME(mhc_contract_fwd_cpu)(struct lane *l, const struct mhc_contract_fwd_args *a)
{
    TRY(mhc_contract_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0];
    const struct bring bring = {{&a->x, &a->y}};
    int64_t at_once = bring_count(&bring);
#pragma omp parallel for schedule(static) if (rows * a->x.dim[1] > 4096)
    for (int64_t b = 0; b < rows; b += MHC_BLOCK) {
        int64_t end = min_i64(rows, b + MHC_BLOCK);
        for (int64_t first = b; first < end; first += GROUP) {
            bring_at(&bring, first, at_once);
            contract_group(a, first, min_i64(GROUP, end - first));
        }
    }
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

/* dx (+)= gate dy - through_norm x + sum_k dm_k w_k over the d channels of one stream, which starts at w. */
static void contract_bwd_stream(int64_t d, bool acc, float gate, float through_norm, const float *dy, const float *x,
                                int64_t n, const float *dm, const float *w, int64_t w_step, float *dx)
{
    enum { WIDE = 4 };
    int64_t c = 0;
    for (; c + WIDE * VL <= d; c += WIDE * VL) {
        vec sum[WIDE];
        for (int v = 0; v < WIDE; v++)
            sum[v] = vec_at(dy + c + v * VL) * gate - vec_at(x + c + v * VL) * through_norm;
        for (int v = 0; acc && v < WIDE; v++)
            sum[v] += vec_at(dx + c + v * VL);
        for (int64_t k = 0; k < n; k++)
            for (int v = 0; v < WIDE; v++)
                sum[v] += vec_at(w + k * w_step + c + v * VL) * dm[k];
        for (int v = 0; v < WIDE; v++)
            vec_put(dx + c + v * VL, sum[v]);
    }
    for (; c < d; c++) {
        float sum = (acc ? dx[c] : 0) + gate * dy[c] - through_norm * x[c];
        for (int64_t k = 0; k < n; k++)
            sum += w[k * w_step + c] * dm[k];
        dx[c] = sum;
    }
}

static void contract_bwd_row(const struct mhc_contract_bwd_args *a, int64_t r, float *dm, float *dv)
{
    int64_t d = a->dy.dim[1], k = a->dx.dim[1], n = a->w.dim[0];
    const float *x = row_of(&a->x, r), *dy = row_of(&a->dy, r), *m = row_of(&a->m, r);
    float rstd = row_of(&a->rstd, r)[0], scale = scalar_of(&a->scale), drstd = 0, gate[MHC_MAX_STREAMS];
    for (int64_t i = 0; i < n; i++) {
        float z = m[i] * rstd * scale + ((const float *)a->base.data)[i], s = fast_sigmoidf(z);
        gate[i] = s + (float)a->eps;
        dv[i] = dot_of(dy, x + i * d, d) * s * fast_sigmoidf(-z); /* 1 - s would cancel where the gate is open */
        dm[i] = dv[i] * scale * rstd;
        drstd += dv[i] * scale * m[i];
    }
    float through_norm = drstd * rstd * rstd * rstd / (float)(k > 0 ? k : 1);
    for (int64_t i = 0; i < n; i++)
        contract_bwd_stream(d, a->acc_dx, gate[i], through_norm, dy, x + i * d, n, dm, (const float *)a->w.data + i * d,
                            a->w.stride[0], row_of(&a->dx, r) + i * d);
}

static void mean_bwd_row(const struct mhc_contract_bwd_args *a, int64_t r, int64_t n)
{
    int64_t d = a->dy.dim[1];
    const float *dy = row_of(&a->dy, r);
    for (int64_t i = 0; i < n; i++) {
        float *dx = row_of(&a->dx, r) + i * d;
#pragma omp simd
        for (int64_t c = 0; c < d; c++)
            dx[c] = dy[c] / (float)n + (a->acc_dx ? dx[c] : 0);
    }
}

static void gate_sums(const struct mhc_contract_bwd_args *a, const float *dv)
{
    int64_t rows = a->dx.dim[0], n = a->w.dim[0];
    double base[MHC_MAX_STREAMS] = {0}, scale = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++) {
            base[i] += (double)dv[r * n + i];
            scale += (double)dv[r * n + i] * (double)row_of(&a->m, r)[i] * (double)row_of(&a->rstd, r)[0];
        }
    float *dbase = a->dbase.data, *dscale = a->dscale.data;
    for (int64_t i = 0; i < n; i++)
        dbase[i] = (mhc_contract_adds(a) ? dbase[i] : 0) + (float)base[i];
    dscale[0] = (mhc_contract_adds(a) ? dscale[0] : 0) + (float)scale;
}

int CPU_NAME(mhc_contract_bwd_cpu)(struct lane *l, const struct mhc_contract_bwd_args *a)
{
    TRY(mhc_contract_bwd_check(a, l->err));
    TRY(check_work("mhc_contract_bwd", &a->work, CPU_NAME(mhc_contract_bwd_work_cpu)(a), l->err));
    int64_t rows = a->dx.dim[0], d = a->dy.dim[1], k = a->dx.dim[1];
    bool learned = present(&a->w);
    int64_t n = learned ? a->w.dim[0] : d > 0 ? k / d : 0;
    float *dm = a->work.data, *dv = learned && dm ? dm + rows * n : NULL;
    const struct bring bring = {{&a->x, &a->dy, &a->dx}};
    int64_t at_once = bring_count(&bring);
#pragma omp parallel for schedule(static) if (rows * k > 4096)
    for (int64_t b = 0; b < rows; b += MHC_BLOCK)
        for (int64_t r = b; r < min_i64(rows, b + MHC_BLOCK); r++) {
            bring_at(&bring, r, at_once);
            if (learned)
                contract_bwd_row(a, r, dm + r * n, dv + r * n);
            else
                mean_bwd_row(a, r, n);
        }
    if (!present(&a->dw))
        return ST_OK;
    gate_sums(a, dv);
    struct outer o = {.dp = dm,
                      .dp_step = n,
                      .m = n,
                      .y = &a->x,
                      .dw = &a->dw,
                      .partial = rows > 0 ? dv + rows * n : a->work.data,
                      .acc = mhc_contract_adds(a)};
    CPU_NAME(mhc_outer)(&o);
    return ST_OK;
}
