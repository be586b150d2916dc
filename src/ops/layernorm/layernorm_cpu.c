/* layernorm, fast CPU version; see layernorm.h. Rows in parallel; the sums of dw and db are taken over fixed blocks of
 * rows into work and are then added in block order, so threads do not change the result. */
#include "ops/layernorm/layernorm.h"
#include "ops/ops_cpu_int.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

static float sum_of(const float *x, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++)
        sum += x[c];
    return sum;
}

static float squares_about(const float *x, float mean, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < n; c++)
        sum += (x[c] - mean) * (x[c] - mean);
    return sum;
}

/* The flags are constants where this is inlined: an absent tensor is then never part of the loop. */
INLINE void write_row(bool has_w, bool has_b, int64_t d, const float *x, const float *w, float one, const float *b,
                      float mean, float rstd, float *y)
{
#pragma omp simd
    for (int64_t c = 0; c < d; c++) {
        float v = (x[c] - mean) * rstd;
        v = has_w ? v * (w[c] + one) : v;
        y[c] = has_b ? v + b[c] : v;
    }
}

int CPU_NAME(layernorm_fwd_cpu)(struct lane *l, const struct layernorm_fwd_args *a)
{
    TRY(layernorm_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0], d = a->x.dim[1];
    const float *w = a->w.data, *b = a->b.data, one = a->zero_centered ? 1.0f : 0.0f;
    float *means = a->mean.data, *rstds = a->rstd.data;
#pragma omp parallel for schedule(static) if (rows * d > 4096)
    for (int64_t r = 0; r < rows; r++) {
        const float *x = f32_row(&a->x, r);
        float *y = f32_row(&a->y, r), mean = sum_of(x, d) / (float)d;
        float rstd = 1.0f / sqrtf(squares_about(x, mean, d) / (float)d + (float)a->eps);
        means[r] = mean;
        rstds[r] = rstd;
        if (w == NULL && b == NULL)
            write_row(false, false, d, x, NULL, one, NULL, mean, rstd, y);
        else if (b == NULL)
            write_row(true, false, d, x, w, one, NULL, mean, rstd, y);
        else if (w == NULL)
            write_row(false, true, d, x, NULL, one, b, mean, rstd, y);
        else
            write_row(true, true, d, x, w, one, b, mean, rstd, y);
    }
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

int64_t CPU_NAME(layernorm_bwd_work_cpu)(const struct layernorm_bwd_args *a)
{
    int64_t sums = (a->dw.rank > 0) + (a->db.rank > 0);
    return sums * ceil_div(rows_of(&a->x), LAYERNORM_BLOCK) * cols_of(&a->x) * (int64_t)sizeof(float);
}

struct row_sums {
    float u, ux; /* sums of dy * gain, and of that times the normed row */
};

INLINE struct row_sums sum_row(bool has_w, int64_t d, const float *dy, const float *x, const float *w, float one,
                               float mean, float rstd)
{
    float u_sum = 0, ux_sum = 0;
#pragma omp simd reduction(+ : u_sum, ux_sum)
    for (int64_t c = 0; c < d; c++) {
        float u = has_w ? dy[c] * (w[c] + one) : dy[c];
        u_sum += u;
        ux_sum += u * ((x[c] - mean) * rstd);
    }
    return (struct row_sums){u_sum, ux_sum};
}

INLINE void dx_row(bool has_w, bool adds, int64_t d, const float *dy, const float *x, const float *w, float one,
                   const float *dres, float mean, float rstd, struct row_sums s, float *dx)
{
    float mean_u = s.u / (float)d, mean_ux = s.ux / (float)d;
#pragma omp simd
    for (int64_t c = 0; c < d; c++) {
        float u = has_w ? dy[c] * (w[c] + one) : dy[c];
        float v = rstd * (u - mean_u - (x[c] - mean) * rstd * mean_ux);
        dx[c] = adds ? v + dres[c] : v;
    }
}

/* Before dx is written, which may be dy. */
static void add_sums(int64_t d, const float *dy, const float *x, float mean, float rstd, float *dw, float *db)
{
    if (dw != NULL) {
#pragma omp simd
        for (int64_t c = 0; c < d; c++)
            dw[c] += dy[c] * ((x[c] - mean) * rstd);
    }
    if (db != NULL) {
#pragma omp simd
        for (int64_t c = 0; c < d; c++)
            db[c] += dy[c];
    }
}

static void bwd_row(const struct layernorm_bwd_args *a, int64_t r, float *dw, float *db)
{
    int64_t d = a->x.dim[1];
    const float *x = f32_row(&a->x, r), *dy = f32_row(&a->dy, r), *w = a->w.data,
                *dres = present(&a->dres) ? f32_row(&a->dres, r) : NULL;
    float *dx = f32_row(&a->dx, r), rstd = ((const float *)a->rstd.data)[r], mean = ((const float *)a->mean.data)[r];
    float one = a->zero_centered ? 1.0f : 0.0f;
    add_sums(d, dy, x, mean, rstd, dw, db);
    if (w == NULL) {
        struct row_sums s = sum_row(false, d, dy, x, NULL, one, mean, rstd);
        dres == NULL ? dx_row(false, false, d, dy, x, NULL, one, NULL, mean, rstd, s, dx)
                     : dx_row(false, true, d, dy, x, NULL, one, dres, mean, rstd, s, dx);
    } else {
        struct row_sums s = sum_row(true, d, dy, x, w, one, mean, rstd);
        dres == NULL ? dx_row(true, false, d, dy, x, w, one, NULL, mean, rstd, s, dx)
                     : dx_row(true, true, d, dy, x, w, one, dres, mean, rstd, s, dx);
    }
}

/* out (+)= the blocks' sums in order. */
static void add_blocks(float *out, bool acc, const float *partial, int64_t blocks, int64_t d)
{
#pragma omp parallel for schedule(static) if (blocks * d > 16384)
    for (int64_t c = 0; c < d; c++) {
        float sum = acc ? out[c] : 0.0f;
        for (int64_t b = 0; b < blocks; b++)
            sum += partial[b * d + c];
        out[c] = sum;
    }
}

int CPU_NAME(layernorm_bwd_cpu)(struct lane *l, const struct layernorm_bwd_args *a)
{
    TRY(layernorm_bwd_check(a, l->err));
    TRY(check_work("layernorm_bwd", &a->work, CPU_NAME(layernorm_bwd_work_cpu)(a), l->err));
    int64_t rows = a->x.dim[0], d = a->x.dim[1], blocks = ceil_div(rows, LAYERNORM_BLOCK);
    float *partial = a->work.data, *dw = present(&a->dw) ? partial : NULL;
    float *db = present(&a->db) && partial != NULL ? partial + (dw ? blocks * d : 0) : NULL;
#pragma omp parallel for schedule(static) if (rows * d > 4096)
    for (int64_t k = 0; k < blocks; k++) {
        float *my_dw = dw ? dw + k * d : NULL, *my_db = db ? db + k * d : NULL;
        if (my_dw != NULL)
            memset(my_dw, 0, (size_t)d * sizeof *my_dw);
        if (my_db != NULL)
            memset(my_db, 0, (size_t)d * sizeof *my_db);
        for (int64_t r = k * LAYERNORM_BLOCK; r < min_i64(rows, (k + 1) * LAYERNORM_BLOCK); r++)
            bwd_row(a, r, my_dw, my_db);
    }
    if (present(&a->dw))
        add_blocks(a->dw.data, a->acc_dw, dw, blocks, d);
    if (present(&a->db))
        add_blocks(a->db.data, a->acc_db, db, blocks, d);
    return ST_OK;
}
