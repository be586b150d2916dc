/* rope, fast CPU version; see rope.h. Tokens in parallel; the sums of dw are taken over fixed blocks of
 * tokens into work and are then added in block order, so threads do not change the result. */
#include "ops/ops_cpu_int.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"

#include <math.h>

/* y = rotation of x by (cosines, sign * sines) over `pairs` channel pairs; y may be x. */
static void rotate(float *y, const float *x, const float *cosines, const float *sines, float sign, int64_t pairs,
                   bool interleaved)
{
    if (interleaved) {
#pragma omp simd
        for (int64_t c = 0; c < pairs; c++) {
            float u = x[2 * c], v = x[2 * c + 1], s = sign * sines[c];
            y[2 * c] = u * cosines[c] - v * s;
            y[2 * c + 1] = v * cosines[c] + u * s;
        }
    } else {
#pragma omp simd
        for (int64_t c = 0; c < pairs; c++) {
            float u = x[c], v = x[c + pairs], s = sign * sines[c];
            y[c] = u * cosines[c] - v * s;
            y[c + pairs] = v * cosines[c] + u * s;
        }
    }
}

/* The channels that are not rotated. */
static void pass(float *y, const float *x, int64_t from, int64_t d)
{
    if (y == x)
        return;
#pragma omp simd
    for (int64_t c = from; c < d; c++)
        y[c] = x[c];
}

static float normalise(const struct rope_fwd_args *a, float *y, const float *x, int64_t d)
{
    const float *w = a->w.data, one = a->zero_centered ? 1.0f : 0.0f;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < d; c++)
        sum += x[c] * x[c];
    float rstd = 1.0f / sqrtf(sum / (float)d + (float)a->eps);
#pragma omp simd
    for (int64_t c = 0; c < d; c++)
        y[c] = x[c] * rstd * (w[c] + one);
    return rstd;
}

int CPU_NAME(rope_fwd_cpu)(struct lane *l, const struct rope_fwd_args *a)
{
    TRY(rope_fwd_check(a, l->err));
    TRY(rope_positions_check("rope_fwd", &a->pos, &a->cos, l->err));
    int64_t tokens = a->x.dim[0], heads = a->x.dim[1], d = a->x.dim[2];
    int64_t pairs = present(&a->cos) ? a->cos.dim[1] : 0;
    const int32_t *pos = a->pos.data;
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        const float *cosines = pairs > 0 ? f32_row(&a->cos, pos[t]) : NULL;
        const float *sines = pairs > 0 ? f32_row(&a->sin, pos[t]) : NULL;
        for (int64_t h = 0; h < heads; h++) {
            const float *x = (const float *)a->x.data + t * a->x.stride[0] + h * a->x.stride[1];
            float *y = (float *)a->y.data + t * a->y.stride[0] + h * a->y.stride[1];
            if (present(&a->w)) {
                f32_row(&a->rstd, t)[h] = normalise(a, y, x, d);
                x = y;
            }
            rotate(y, x, cosines, sines, 1.0f, pairs, a->interleaved);
            pass(y, x, 2 * pairs, d);
        }
    }
    return ST_OK;
}

int64_t CPU_NAME(rope_bwd_work_cpu)(const struct rope_bwd_args *a)
{
    return a->w.rank == 0 ? 0 : ceil_div(a->dy.dim[0], RMSNORM_BLOCK) * a->dy.dim[2] * (int64_t)sizeof(float);
}

/* du of one head, in dx, becomes dx. */
static void norm_bwd(const struct rope_bwd_args *a, float *dx, const float *x, float rstd, int64_t d, float *dw_block)
{
    const float *w = a->w.data, one = a->zero_centered ? 1.0f : 0.0f;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < d; c++) {
        sum += dx[c] * (w[c] + one) * x[c];
        dw_block[c] += dx[c] * x[c] * rstd;
    }
    float k = sum * rstd * rstd / (float)d;
#pragma omp simd
    for (int64_t c = 0; c < d; c++)
        dx[c] = rstd * (dx[c] * (w[c] + one) - x[c] * k);
}

static void bwd_token(const struct rope_bwd_args *a, int64_t t, float *dw_block)
{
    int64_t heads = a->dy.dim[1], d = a->dy.dim[2], pairs = present(&a->cos) ? a->cos.dim[1] : 0;
    int64_t position = pairs > 0 ? ((const int32_t *)a->pos.data)[t] : 0;
    const float *cosines = pairs > 0 ? f32_row(&a->cos, position) : NULL;
    const float *sines = pairs > 0 ? f32_row(&a->sin, position) : NULL;
    for (int64_t h = 0; h < heads; h++) {
        const float *dy = (const float *)a->dy.data + t * a->dy.stride[0] + h * a->dy.stride[1];
        float *dx = (float *)a->dx.data + t * a->dx.stride[0] + h * a->dx.stride[1];
        rotate(dx, dy, cosines, sines, -1.0f, pairs, a->interleaved);
        pass(dx, dy, 2 * pairs, d);
        if (dw_block != NULL)
            norm_bwd(a, dx, (const float *)a->x.data + t * a->x.stride[0] + h * a->x.stride[1], f32_row(&a->rstd, t)[h],
                     d, dw_block);
    }
}

int CPU_NAME(rope_bwd_cpu)(struct lane *l, const struct rope_bwd_args *a)
{
    TRY(rope_bwd_check(a, l->err));
    TRY(rope_positions_check("rope_bwd", &a->pos, &a->cos, l->err));
    TRY(check_work("rope_bwd", &a->work, CPU_NAME(rope_bwd_work_cpu)(a), l->err));
    int64_t tokens = a->dy.dim[0], d = a->dy.dim[2], blocks = ceil_div(tokens, RMSNORM_BLOCK);
    float *partial = present(&a->w) ? a->work.data : NULL, *dw = a->dw.data;
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        float *mine = partial == NULL ? NULL : partial + b * d;
        for (int64_t c = 0; mine != NULL && c < d; c++)
            mine[c] = 0;
        for (int64_t t = b * RMSNORM_BLOCK; t < min_i64(tokens, (b + 1) * RMSNORM_BLOCK); t++)
            bwd_token(a, t, mine);
    }
    for (int64_t c = 0; present(&a->w) && c < d; c++) {
        float sum = a->acc_dw ? dw[c] : 0.0f;
        for (int64_t b = 0; b < blocks; b++)
            sum += partial[b * d + c];
        dw[c] = sum;
    }
    return ST_OK;
}
