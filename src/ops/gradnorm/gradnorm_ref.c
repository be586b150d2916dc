/* sqnorm and clip, reference; see gradnorm.h. */
#include "ops/ops_ref_int.h"
#include "ops/gradnorm/gradnorm.h"

#include <math.h>

static double sum_squares(const struct tensor *t)
{
    const double *x = t->data;
    double total = 0;
    for (int64_t first = 0; first < t->dim[0]; first += SQNORM_BLOCK) {
        double sum = 0;
        for (int64_t i = first; i < min_i64(t->dim[0], first + SQNORM_BLOCK); i++)
            sum += x[i] * x[i];
        total += sum;
    }
    return total;
}

int sqnorm_ref(struct lane *l, const struct sqnorm_args *a)
{
    TRY(sqnorm_check(a, l->err));
    for (int k = 0; k <= a->n_more; k++)
        ((double *)a->out.data)[k] = sum_squares(sqnorm_at(a, k));
    return ST_OK;
}

int clip_ref(struct lane *l, const struct clip_args *a)
{
    TRY(clip_check(a, l->err));
    const double *sums = a->sums.data, *loss = a->loss.data;
    double total = 0, *out = a->out.data;
    for (int64_t i = 0; i < a->sums.dim[0]; i++)
        total += sums[i * a->sums.stride[0]];
    double norm = sqrt(total), coef = a->max_norm / (norm + 1e-6);
    bool skip = !isfinite(norm) || (loss != NULL && !(isfinite(loss[0]) && isfinite(loss[1])));
    out[0] = norm;
    out[1] = a->max_norm == 0 || coef > 1 ? 1 : coef;
    out[2] = skip ? 1 : 0;
    out[3] = skip ? NAN : total;
    return ST_OK;
}
