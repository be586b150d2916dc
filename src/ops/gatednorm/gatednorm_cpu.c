/* gatednorm, fast CPU version; see gatednorm.h. Rows in parallel; the sums of dw go by fixed blocks
 * of rows into work and are then added in block order, so threads do not change the result. */
#include "ops/cpu_math.h"
#include "ops/gatednorm/gatednorm.h"
#include "ops/ops_cpu_int.h"

#include <math.h>

/* Gain of the first channel of group k: gains are per channel, or shared by all groups. */
static const float *gain_of(const struct tensor *w, int64_t group, int64_t k)
{
    return (const float *)w->data + (w->dim[0] == group ? 0 : k * group);
}

static float fwd_sum(const float *x, const float *z, float *y, int64_t n, bool norm_first)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++) {
        float v = x[c] * (z[c] * fast_sigmoidf(z[c])), s = norm_first ? x[c] : v;
        y[c] = v;
        sum += s * s;
    }
    return sum;
}

int CPU_NAME(gatednorm_fwd_cpu)(struct lane *l, const struct gatednorm_fwd_args *a)
{
    TRY(gatednorm_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0], g = a->group, groups = a->x.dim[1] / g;
    float one = a->zero_centered ? 1.0f : 0.0f;
#pragma omp parallel for schedule(static) if (rows * a->x.dim[1] > 8192)
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t k = 0; k < groups; k++) {
            const float *w = gain_of(&a->w, g, k);
            float *y = f32_row(&a->y, r) + k * g;
            float sum = fwd_sum(f32_row(&a->x, r) + k * g, f32_row(&a->z, r) + k * g, y, g, a->norm_first);
            float rstd = 1.0f / sqrtf(sum / (float)g + (float)a->eps);
            f32_row(&a->rstd, r)[k] = rstd;
#pragma omp simd
            for (int64_t c = 0; c < g; c++)
                y[c] = y[c] * rstd * (w[c] + one);
        }
    }
    return ST_OK;
}

int64_t CPU_NAME(gatednorm_bwd_work_cpu)(const struct gatednorm_bwd_args *a)
{
    return ceil_div(a->x.dim[0], GATEDNORM_BLOCK) * a->w.dim[0] * (int64_t)sizeof(float);
}

/* The pointers of one group of one row. */
struct group {
    const float *x, *z, *dy, *w;
    float *dx, *dz, *dw;
    float rstd, one;
    int64_t n;
};

static void gate_first(const struct group *p)
{
    const float *x = p->x, *z = p->z, *dy = p->dy, *w = p->w;
    float *dx = p->dx, *dz = p->dz, *dw = p->dw, rstd = p->rstd, one = p->one, sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < p->n; c++) {
        float hat = x[c] * (z[c] * fast_sigmoidf(z[c])) * rstd, t = dy[c] * hat;
        dw[c] += t;
        sum += t * (w[c] + one);
    }
    float mean = sum / (float)p->n;
#pragma omp simd
    for (int64_t c = 0; c < p->n; c++) {
        float sig = fast_sigmoidf(z[c]), gate = z[c] * sig;
        float dv = rstd * (dy[c] * (w[c] + one) - x[c] * gate * rstd * mean);
        dz[c] = dv * x[c] * (sig * (1.0f + z[c] * (1.0f - sig)));
        dx[c] = dv * gate;
    }
}

static void norm_first(const struct group *p)
{
    const float *x = p->x, *z = p->z, *dy = p->dy, *w = p->w;
    float *dx = p->dx, *dz = p->dz, *dw = p->dw, rstd = p->rstd, one = p->one, sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < p->n; c++) {
        float t = dy[c] * (z[c] * fast_sigmoidf(z[c])) * (x[c] * rstd);
        dw[c] += t;
        sum += t * (w[c] + one);
    }
    float mean = sum / (float)p->n;
#pragma omp simd
    for (int64_t c = 0; c < p->n; c++) {
        float sig = fast_sigmoidf(z[c]), u = dy[c] * (w[c] + one), hat = x[c] * rstd;
        dz[c] = u * hat * (sig * (1.0f + z[c] * (1.0f - sig)));
        dx[c] = rstd * (u * (z[c] * sig) - hat * mean);
    }
}

static void bwd_row(const struct gatednorm_bwd_args *a, int64_t r, float *dw)
{
    int64_t g = a->group, groups = a->x.dim[1] / g;
    bool shared = a->w.dim[0] == g;
    for (int64_t k = 0; k < groups; k++) {
        struct group p = {.x = f32_row(&a->x, r) + k * g,
                          .z = f32_row(&a->z, r) + k * g,
                          .dy = f32_row(&a->dy, r) + k * g,
                          .w = gain_of(&a->w, g, k),
                          .dx = f32_row(&a->dx, r) + k * g,
                          .dz = f32_row(&a->dz, r) + k * g,
                          .dw = dw + (shared ? 0 : k * g),
                          .rstd = f32_row(&a->rstd, r)[k],
                          .one = a->zero_centered ? 1.0f : 0.0f,
                          .n = g};
        if (a->norm_first)
            norm_first(&p);
        else
            gate_first(&p);
    }
}

int CPU_NAME(gatednorm_bwd_cpu)(struct lane *l, const struct gatednorm_bwd_args *a)
{
    TRY(gatednorm_bwd_check(a, l->err));
    TRY(check_work("gatednorm_bwd", &a->work, CPU_NAME(gatednorm_bwd_work_cpu)(a), l->err));
    int64_t rows = a->x.dim[0], n_w = a->w.dim[0], blocks = ceil_div(rows, GATEDNORM_BLOCK);
    float *partial = a->work.data, *dw = a->dw.data;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        float *mine = partial + b * n_w;
        for (int64_t c = 0; c < n_w; c++)
            mine[c] = 0;
        for (int64_t r = b * GATEDNORM_BLOCK; r < min_i64(rows, (b + 1) * GATEDNORM_BLOCK); r++)
            bwd_row(a, r, mine);
    }
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < n_w; c++) {
        float sum = a->acc_dw ? dw[c] : 0.0f;
        for (int64_t b = 0; b < blocks; b++)
            sum += partial[b * n_w + c];
        dw[c] = sum;
    }
    return ST_OK;
}
