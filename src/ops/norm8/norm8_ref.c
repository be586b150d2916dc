/* norm8, reference: the values, then quantise; see norm8.h. */
#include "ops/norm8/norm8_int.h"
#include "ops/ops_ref_int.h"

int64_t norm8_work_ref(const struct norm8_args *a) { return norm8_values_bytes(&a->x); }

int norm8_ref(struct lane *l, const struct norm8_args *a)
{
    TRY(norm8_check(a, l->err));
    TRY(check_work("norm8", &a->work, norm8_work_ref(a), l->err));
    const double *rstd = a->rstd.data, *w = a->w.data;
    double *y = a->work.data;
    int64_t rows = a->x.dim[0], d = a->x.dim[1];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < d; c++)
            y[r * d + c] = f64_row(&a->x, r)[c] * rstd[r] * (w != NULL ? w[c] + (a->zero_centered ? 1 : 0) : 1);
    struct quantise_args q = norm8_quantise(a);
    return quantise_ref(l, &q);
}
