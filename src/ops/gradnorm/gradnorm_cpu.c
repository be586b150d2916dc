/* sqnorm and clip, fast CPU version; see gradnorm.h. Blocks in parallel, their sums in work, then
 * added in order. */
#include "ops/ops_cpu_int.h"
#include "ops/gradnorm/gradnorm.h"

#include <math.h>

static int64_t blocks_of(const struct tensor *x) { return ceil_div(x->dim[0], SQNORM_BLOCK); }

int64_t CPU_NAME(sqnorm_work_cpu)(const struct sqnorm_args *a)
{
    int64_t most = 0; /* the tensors take turns */
    for (int k = 0; k <= a->n_more; k++)
        most = max_i64(most, blocks_of(sqnorm_at(a, k)));
    return most * (int64_t)sizeof(double);
}

static double block_sum(const float *x, int64_t n)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sum;
}

static double sum_squares(const struct tensor *t, double *partial)
{
    int64_t n = t->dim[0], blocks = blocks_of(t);
    const float *x = t->data;
    double total = 0;
#pragma omp parallel for schedule(static) if (blocks > 8)
    for (int64_t b = 0; b < blocks; b++)
        partial[b] = block_sum(x + b * SQNORM_BLOCK, min_i64(SQNORM_BLOCK, n - b * SQNORM_BLOCK));
    for (int64_t b = 0; b < blocks; b++)
        total += partial[b];
    return total;
}

int CPU_NAME(sqnorm_cpu)(struct lane *l, const struct sqnorm_args *a)
{
    TRY(sqnorm_check(a, l->err));
    TRY(check_work("sqnorm", &a->work, CPU_NAME(sqnorm_work_cpu)(a), l->err));
    for (int k = 0; k <= a->n_more; k++)
        ((double *)a->out.data)[k] = sum_squares(sqnorm_at(a, k), a->work.data);
    return ST_OK;
}

int CPU_NAME(clip_cpu)(struct lane *l, const struct clip_args *a)
{
    TRY(clip_check(a, l->err));
    const double *sums = a->sums.data, *loss = a->loss.data;
    double total = 0, *out = a->out.data;
    for (int64_t i = 0; i < a->sums.dim[0]; i++)
        total += sums[i * a->sums.stride[0]];
    double norm = sqrt(total), coef = a->max_norm / (norm + 1e-6);
    bool loss_ok = loss == NULL || (isfinite(loss[0]) && isfinite(loss[1]));
    out[0] = norm;
    out[1] = a->max_norm > 0 && coef < 1 ? coef : 1.0;
    out[2] = isfinite(norm) && loss_ok ? 0 : 1;
    out[3] = out[2] == 0 ? total : NAN;
    return ST_OK;
}
