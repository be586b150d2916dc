/* permute and unpermute, fast CPU version; see permute.h. Rows in parallel; a token's rows are
 * summed by its one writer, in order of k. */
#include "ops/ops_cpu_int.h"
#include "ops/permute/permute.h"

#include <string.h>

int CPU_NAME(permute_cpu)(struct lane *l, const struct permute_args *a)
{
    TRY(permute_check(a, l->err));
    int64_t rows = a->src.dim[0], d = present(&a->y) ? a->y.dim[1] : 0, k = a->k;
    const int32_t *src = a->src.data;
    const float *prob = a->prob.data;
    float *yprob = a->yprob.data;
#pragma omp parallel for schedule(static) if (rows * d > 16384)
    for (int64_t r = 0; r < rows; r++) {
        if (d > 0 && src[r] < 0)
            memset(f32_row(&a->y, r), 0, (size_t)d * sizeof(float));
        else if (d > 0)
            memcpy(f32_row(&a->y, r), f32_row(&a->x, src[r] / k), (size_t)d * sizeof(float));
        if (yprob != NULL)
            yprob[r] = src[r] < 0 ? 0.0f : prob[src[r]];
    }
    return ST_OK;
}

/* Columns [first, end) of one token, in registers; n source rows. */
static void sum_rows(const float *const *from, int64_t n, const float *base, float *y, bool acc, int64_t d)
{
    enum { RUN = 64 };
    for (int64_t c = 0; c < d; c += RUN) {
        float sum[RUN];
        int64_t m = min_i64(RUN, d - c);
        for (int64_t i = 0; i < m; i++)
            sum[i] = 0;
        for (int64_t j = 0; j < n; j++) {
            const float *x = from[j] + c;
#pragma omp simd
            for (int64_t i = 0; i < m; i++)
                sum[i] += x[i];
        }
        if (base != NULL) {
#pragma omp simd
            for (int64_t i = 0; i < m; i++)
                sum[i] += base[c + i];
        }
        if (acc) {
#pragma omp simd
            for (int64_t i = 0; i < m; i++)
                sum[i] += y[c + i];
        }
        memcpy(y + c, sum, (size_t)m * sizeof *sum);
    }
}

int CPU_NAME(unpermute_cpu)(struct lane *l, const struct unpermute_args *a)
{
    TRY(unpermute_check(a, l->err));
    int64_t rows = a->row.dim[0], k = a->row.dim[1], d = present(&a->y) ? a->y.dim[1] : 0;
    const float *xprob = a->xprob.data;
    float *yprob = a->yprob.data;
#pragma omp parallel for schedule(static) if (rows * d > 16384)
    for (int64_t t = 0; t < rows; t++) {
        const int32_t *row = (const int32_t *)a->row.data + t * k;
        const float *from[PERMUTE_MAX_K];
        int64_t n = 0;
        for (int64_t j = 0; j < k; j++) {
            if (d > 0 && row[j] >= 0)
                from[n++] = f32_row(&a->x, row[j]);
            if (yprob != NULL)
                yprob[t * k + j] = row[j] < 0 ? 0.0f : xprob[row[j]];
        }
        if (d > 0)
            sum_rows(from, n, present(&a->base) ? f32_row(&a->base, t) : NULL, f32_row(&a->y, t), a->acc_y, d);
    }
    return ST_OK;
}
