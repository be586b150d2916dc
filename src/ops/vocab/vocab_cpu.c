/* vocab, fast CPU version; see vocab.h. Rows in parallel; the loss is summed in double over rows in order. */
#include "ops/vocab/vocab.h"
#include "ops/cpu_math.h"
#include "ops/ops_cpu_int.h"
#include "ops/vocab/vocab_int.h"

#include <math.h>

/* Sum of exp(z - max): fp32 within a block, double over blocks. */
static double sum_exp(const float *z, float max, int64_t n)
{
    enum { BLOCK = 1024 };
    double total = 0;
    for (int64_t first = 0; first < n; first += BLOCK) {
        float sum = 0;
        const float *at = z + first;
        int64_t len = min_i64(BLOCK, n - first);
#pragma omp simd reduction(+ : sum)
        for (int64_t v = 0; v < len; v++)
            sum += fast_expf(at[v] - max);
        total += (double)sum;
    }
    return total;
}

int CPU_NAME(vocab_stats_cpu)(struct lane *l, const struct vocab_stats_args *a)
{
    TRY(vocab_stats_check(a, l->err));
    TRY(vocab_label_check("vocab_stats", &a->label, a->vocab, l->err));
    int64_t rows = a->z.dim[0], n = a->z.dim[1];
    const int32_t *label = a->label.data;
#pragma omp parallel for schedule(static) if (rows * n > 4096)
    for (int64_t r = 0; r < rows; r++) {
        const float *z = f32_row(&a->z, r);
        float *out = f32_row(&a->stats, r), max = -INFINITY;
        for (int64_t v = 0; v < n; v++)
            max = z[v] > max ? z[v] : max;
        int64_t at = label[r] - a->first;
        out[VOCAB_MAX] = max;
        out[VOCAB_SUM] = n > 0 ? (float)sum_exp(z, max, n) : 0;
        out[VOCAB_TARGET] = label[r] >= 0 && at >= 0 && at < n ? z[at] : 0;
    }
    return ST_OK;
}

int64_t CPU_NAME(vocab_loss_work_cpu)(const struct vocab_loss_args *a) { return a->z.dim[0] * (int64_t)sizeof(double); }

static double row_loss(const struct vocab_loss_args *a, int64_t r, double *lse)
{
    int64_t ranks = a->all.dim[0], rows = a->all.dim[1];
    const float *all = a->all.data;
    double max = -INFINITY, sum = 0, target = 0;
    for (int64_t k = 0; k < ranks; k++)
        max = fmax(max, (double)all[(k * rows + r) * VOCAB_STATS + VOCAB_MAX]);
    for (int64_t k = 0; k < ranks; k++) {
        const float *s = all + (k * rows + r) * VOCAB_STATS;
        sum += (double)s[VOCAB_SUM] * exp((double)s[VOCAB_MAX] - max);
        target += (double)s[VOCAB_TARGET];
    }
    *lse = max + log(sum);
    return max - target + log(sum); /* first: lse - target would cancel */
}

/* Gradient of one row; a label that does not count gives zeros. What is below e^-70 counts as 0, lest subnormal numbers
 * slow the GEMMs that follow. */
static void row_gradient(const struct vocab_loss_args *a, int64_t r, double lse, bool counts)
{
    int64_t n = a->z.dim[1], at = ((const int32_t *)a->label.data)[r] - a->first;
    double scale = counts ? ((const double *)a->scale.data)[0] : 0;
    const float *z = f32_row(&a->z, r);
    float *dz = f32_row(&a->dz, r), k = (float)(scale * (1 + 2 * a->z_loss * lse)), from = (float)lse;
#pragma omp simd
    for (int64_t v = 0; v < n; v++) {
        float x = z[v] - from, e = fast_expf(x);
        dz[v] = counts ? k * (x < -70.0f ? 0.0f : e) : 0.0f;
    }
    if (counts && at >= 0 && at < n)
        dz[at] -= (float)scale;
}

int CPU_NAME(vocab_loss_cpu)(struct lane *l, const struct vocab_loss_args *a)
{
    TRY(vocab_loss_check(a, l->err));
    TRY(vocab_label_check("vocab_loss", &a->label, a->vocab, l->err));
    TRY(check_work("vocab_loss", &a->work, CPU_NAME(vocab_loss_work_cpu)(a), l->err));
    int64_t rows = a->z.dim[0], n = a->z.dim[1];
    const int32_t *label = a->label.data;
    double *nll = a->work.data, total = 0, count = 0, *loss = a->loss.data;
#pragma omp parallel for schedule(static) if (rows * n > 4096)
    for (int64_t r = 0; r < rows; r++) {
        double lse = 0;
        nll[r] = label[r] >= 0 ? row_loss(a, r, &lse) : 0;
        if (present(&a->dz))
            row_gradient(a, r, lse, label[r] >= 0);
    }
    for (int64_t r = 0; r < rows; r++) {
        total += nll[r];
        count += label[r] >= 0;
    }
    loss[0] = (a->acc_loss ? loss[0] : 0) + total;
    loss[1] = (a->acc_loss ? loss[1] : 0) + count;
    return ST_OK;
}
