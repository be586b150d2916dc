/* permute and unpermute, reference; see permute.h. */
#include "ops/ops_ref_int.h"
#include "ops/permute/permute.h"

int permute_ref(struct lane *l, const struct permute_args *a)
{
    TRY(permute_check(a, l->err));
    const int32_t *src = a->src.data;
    for (int64_t r = 0; r < a->src.dim[0]; r++) {
        for (int64_t c = 0; present(&a->y) && c < a->y.dim[1]; c++)
            f64_row(&a->y, r)[c] = src[r] < 0 ? 0 : f64_row(&a->x, src[r] / a->k)[c];
        if (present(&a->yprob))
            ((double *)a->yprob.data)[r] = src[r] < 0 ? 0 : ((const double *)a->prob.data)[src[r]];
    }
    return ST_OK;
}

int unpermute_ref(struct lane *l, const struct unpermute_args *a)
{
    TRY(unpermute_check(a, l->err));
    int64_t k = a->row.dim[1];
    const int32_t *row = a->row.data;
    for (int64_t t = 0; t < a->row.dim[0]; t++) {
        for (int64_t c = 0; present(&a->y) && c < a->y.dim[1]; c++) {
            double sum = 0, *y = f64_row(&a->y, t) + c;
            for (int64_t j = 0; j < k; j++)
                sum += row[t * k + j] < 0 ? 0 : f64_row(&a->x, row[t * k + j])[c];
            double with_base = (present(&a->base) ? f64_row(&a->base, t)[c] : 0) + sum;
            *y = (a->acc_y ? *y : 0) + with_base;
        }
        for (int64_t j = 0; present(&a->yprob) && j < k; j++)
            ((double *)a->yprob.data)[t * k + j] =
                row[t * k + j] < 0 ? 0 : ((const double *)a->xprob.data)[row[t * k + j]];
    }
    return ST_OK;
}
