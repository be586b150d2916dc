/* addnorm, fast CPU version; see addnorm.h. A row stays in the nearest cache through the few short
 * loops it needs. Sums over rows go by fixed blocks of rows into work and are then added in block
 * order, so threads do not change the result. */
#include "ops/cpu_math.h"
#include "ops/dropout/dropout_mask.h"
#include "ops/addnorm/addnorm.h"
#include "ops/dropout/dropout.h"
#include "ops/ops_cpu_int.h"
#include "ops/rmsnorm/rmsnorm.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
enum { STRIP = 256 }; /* columns one thread adds up at a time */

/* factor[i] of channel first + i, i < DROPOUT_RUN, of token t: 0 or 1 / (1 - p). */
static void drop_factors(const struct dropout_rule *r, int64_t t, int64_t first, float *factor)
{
    struct draw_place at = dropout_place(r->info.data, t + r->first, r->seq);
    uint32_t bits[DROPOUT_RUN], threshold = dropout_threshold(r->p);
    float kept = (float)(1 / (1 - r->p));
    dropout_bits(r->key, at.step, at.sample, at.pos, first, bits);
#pragma omp simd
    for (int i = 0; i < DROPOUT_RUN; i++)
        factor[i] = bits[i] >= threshold ? kept : 0.0f;
}

/* ---- forward --------------------------------------------------------------------------------- */

/* s = x + (f + bias) * factor over n channels. The flags are constants. */
INLINE void add_part(bool biased, bool dropped, int64_t n, const float *x, const float *f, const float *bias,
                     const float *factor, float *s)
{
#pragma omp simd
    for (int64_t c = 0; c < n; c++) {
        float v = biased ? f[c] + bias[c] : f[c];
        s[c] = x[c] + (dropped ? v * factor[c] : v);
    }
}

static void add_row(const struct addnorm_fwd_args *a, int64_t r, int64_t d)
{
    const float *x = f32_row(&a->x, r), *f = f32_row(&a->f, r), *bias = a->bias.data;
    float *s = f32_row(&a->s, r), factor[DROPOUT_RUN];
    if (a->drop.p == 0 && bias == NULL)
        add_part(false, false, d, x, f, NULL, NULL, s);
    else if (a->drop.p == 0)
        add_part(true, false, d, x, f, bias, NULL, s);
    for (int64_t c = 0; a->drop.p > 0 && c < d; c += DROPOUT_RUN) {
        int64_t n = min_i64(DROPOUT_RUN, d - c);
        drop_factors(&a->drop, r, c, factor);
        if (bias == NULL)
            add_part(false, true, n, x + c, f + c, NULL, factor, s + c);
        else
            add_part(true, true, n, x + c, f + c, bias + c, factor, s + c);
    }
}

int CPU_NAME(addnorm_fwd_cpu)(struct lane *l, const struct addnorm_fwd_args *a)
{
    TRY(addnorm_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0], d = a->x.dim[1];
    const float *w = a->w.data, one = a->zero_centered ? 1.0f : 0.0f;
#pragma omp parallel for schedule(static) if (rows * d > 4096)
    for (int64_t r = 0; r < rows; r++) {
        bool adds = present(&a->f);
        const float *s = f32_row(adds ? &a->s : &a->x, r);
        if (adds)
            add_row(a, r, d);
        if (!present(&a->rstd))
            continue;
        /* The same sum whether s was just made or given: a norm recomputed from a kept stream, or from one that came
         * over a pipeline cut, has the same bits. */
        float sum = dot_f32(s, s, d), rstd = 1.0f / sqrtf(sum / (float)d + (float)a->eps);
        ((float *)a->rstd.data)[r] = rstd;
        if (!present(&a->y))
            continue;
        float *y = f32_row(&a->y, r);
        scale_row_f32(y, s, rstd, w, one, d);
    }
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

int64_t CPU_NAME(addnorm_bwd_work_cpu)(const struct addnorm_bwd_args *a)
{
    int64_t sums = (a->dw.rank > 0) + (a->dbias.rank > 0);
    return sums * ceil_div(rows_of(&a->dx), RMSNORM_BLOCK) * cols_of(&a->dx) * (int64_t)sizeof(float);
}

/* The sum of dy * gain * s, and dw += dy * s * rstd where wanted. */
INLINE float dot_part(bool has_w, bool has_dw, int64_t d, const float *dy, const float *s, const float *w, float one,
                      float rstd, float *dw)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < d; c++) {
        float p = dy[c] * s[c];
        sum += has_w ? p * (w[c] + one) : p;
        if (has_dw)
            dw[c] += p * rstd;
    }
    return sum;
}

/* dx = ds + rstd * (dy * gain - s * k); dx may be ds. */
INLINE void dx_part(bool has_w, bool has_ds, int64_t d, const float *dy, const float *s, const float *w, float one,
                    const float *ds, float rstd, float k, float *dx)
{
#pragma omp simd
    for (int64_t c = 0; c < d; c++) {
        float u = has_w ? dy[c] * (w[c] + one) : dy[c];
        float v = rstd * (u - s[c] * k);
        dx[c] = has_ds ? ds[c] + v : v;
    }
}

static void row_dx(const struct addnorm_bwd_args *a, int64_t r, int64_t d, float *dw)
{
    const float *ds = present(&a->ds) ? f32_row(&a->ds, r) : NULL, *w = a->w.data;
    float *dx = f32_row(&a->dx, r), one = a->zero_centered ? 1.0f : 0.0f;
    if (!present(&a->dy)) {
        if (ds == NULL)
            memset(dx, 0, (size_t)d * sizeof *dx);
        else if (ds != dx)
            memcpy(dx, ds, (size_t)d * sizeof *dx);
        return;
    }
    const float *dy = f32_row(&a->dy, r), *s = f32_row(&a->s, r);
    float rstd = ((const float *)a->rstd.data)[r], sum;
    if (w == NULL)
        sum = dot_part(false, false, d, dy, s, NULL, 0, rstd, NULL);
    else if (dw == NULL)
        sum = dot_part(true, false, d, dy, s, w, one, rstd, NULL);
    else
        sum = dot_part(true, true, d, dy, s, w, one, rstd, dw);
    float k = sum * rstd * rstd / (float)d;
    if (w == NULL && ds == NULL)
        dx_part(false, false, d, dy, s, NULL, 0, NULL, rstd, k, dx);
    else if (w == NULL)
        dx_part(false, true, d, dy, s, NULL, 0, ds, rstd, k, dx);
    else if (ds == NULL)
        dx_part(true, false, d, dy, s, w, one, NULL, rstd, k, dx);
    else
        dx_part(true, true, d, dy, s, w, one, ds, rstd, k, dx);
}

/* df = dx * mask / (1 - p) and dbias += df over n channels, where wanted. */
static void df_part(int64_t n, const float *dx, const float *factor, float *df, float *dbias)
{
    for (int64_t first = 0; first < n; first += DROPOUT_RUN) {
        int64_t end = min_i64(n, first + DROPOUT_RUN);
        float value[DROPOUT_RUN];
#pragma omp simd
        for (int64_t c = first; c < end; c++)
            value[c - first] = factor == NULL ? dx[c] : dx[c] * factor[c];
        if (df != NULL)
            memcpy(df + first, value, (size_t)(end - first) * sizeof *df);
        if (dbias != NULL) {
#pragma omp simd
            for (int64_t c = first; c < end; c++)
                dbias[c] += value[c - first];
        }
    }
}

static void row_df(const struct addnorm_bwd_args *a, int64_t r, int64_t d, float *dbias)
{
    const float *dx = f32_row(&a->dx, r);
    float *df = present(&a->df) ? f32_row(&a->df, r) : NULL, factor[DROPOUT_RUN];
    if (df == NULL && dbias == NULL)
        return;
    if (a->drop.p == 0) {
        df_part(d, dx, NULL, df, dbias);
        return;
    }
    for (int64_t c = 0; c < d; c += DROPOUT_RUN) {
        drop_factors(&a->drop, r, c, factor);
        df_part(min_i64(DROPOUT_RUN, d - c), dx + c, factor, df == NULL ? NULL : df + c,
                dbias == NULL ? NULL : dbias + c);
    }
}

/* out (+)= the blocks' sums in order. */
static void add_blocks(float *out, bool acc, const float *partial, int64_t blocks, int64_t d)
{
#pragma omp parallel for schedule(static) if (blocks * d > 16384)
    for (int64_t first = 0; first < d; first += STRIP) {
        int64_t end = min_i64(d, first + STRIP);
        if (!acc)
            memset(out + first, 0, (size_t)(end - first) * sizeof *out);
        for (int64_t b = 0; b < blocks; b++) {
#pragma omp simd
            for (int64_t c = first; c < end; c++)
                out[c] += partial[b * d + c];
        }
    }
}

int CPU_NAME(addnorm_bwd_cpu)(struct lane *l, const struct addnorm_bwd_args *a)
{
    TRY(addnorm_bwd_check(a, l->err));
    TRY(check_work("addnorm_bwd", &a->work, CPU_NAME(addnorm_bwd_work_cpu)(a), l->err));
    int64_t rows = a->dx.dim[0], d = a->dx.dim[1], blocks = ceil_div(rows, RMSNORM_BLOCK);
    float *partial = a->work.data; /* may be absent when there is nothing to sum */
    float *dw = present(&a->dw) ? partial : NULL;
    float *dbias = present(&a->dbias) && partial ? partial + (dw ? blocks * d : 0) : NULL;
#pragma omp parallel for schedule(static) if (rows * d > 4096)
    for (int64_t b = 0; b < blocks; b++) {
        float *my_dw = dw ? dw + b * d : NULL, *my_dbias = dbias ? dbias + b * d : NULL;
        if (my_dw != NULL)
            memset(my_dw, 0, (size_t)d * sizeof *my_dw);
        if (my_dbias != NULL)
            memset(my_dbias, 0, (size_t)d * sizeof *my_dbias);
        for (int64_t r = b * RMSNORM_BLOCK; r < min_i64(rows, (b + 1) * RMSNORM_BLOCK); r++) {
            row_dx(a, r, d, my_dw);
            row_df(a, r, d, my_dbias);
        }
    }
    if (present(&a->dw))
        add_blocks(a->dw.data, a->acc_dw, dw, blocks, d);
    if (present(&a->dbias))
        add_blocks(a->dbias.data, a->acc_dbias, dbias, blocks, d);
    return ST_OK;
}
