/* shard8, reference; see shard8.h. */
#include "ops/ops_ref_int.h"
#include "ops/shard8/shard8.h"

static double larger(double a, double b) { return isnan(a) || b <= a ? a : b; } /* NaN stays */

int shard8_most_ref(struct lane *l, const struct shard8_most_args *a)
{
    TRY(shard8_most_check(a, l->err));
    int64_t across = a->most.dim[1], at = a->block > 0 ? a->first / a->block : 0;
    double *most = a->most.data;
    for (int64_t i = 0, n = tensor_elems(&a->most); i < n; i++)
        most[i] = 0;
    for (int64_t r = 0; r < a->x.dim[0]; r++)
        for (int64_t c = 0; c < a->x.dim[1]; c++) {
            int64_t i = a->block > 0 ? (a->first + r) / a->block - at : 0, j = a->block > 0 ? c / a->block : 0;
            most[i * across + j] = larger(most[i * across + j], fabs(f64_row(&a->x, r)[c]));
        }
    return ST_OK;
}

/* Exponent of the scale of block [i, j], and the inverse scale. */
static int exponent_of(const struct shard8_codes_args *a, int64_t i, int64_t j, double *inverse)
{
    int64_t down = a->most.dim[1], across = a->most.dim[2];
    const double *most = a->most.data;
    double amax = 0;
    for (int64_t r = shard8_first(i, a->piece, a->block), end = shard8_end(i, a->piece, a->block, a->most.dim[0]);
         r < end; r++)
        amax = larger(amax, most[(r * down + shard8_row(i, r, a->piece, a->block)) * across + j]);
    int k = isfinite(amax) ? f8_exponent_f64(amax, DT_F8_E4M3) : 0;
    *inverse = isfinite(amax) ? ldexp(1, -k) : NAN;
    return k;
}

int shard8_codes_ref(struct lane *l, const struct shard8_codes_args *a)
{
    TRY(shard8_codes_check(a, l->err));
    int64_t cols = a->x.dim[1], block = a->block;
    struct tensor whole = tensor_2d(NULL, DT_F8_E4M3, a->rows, cols),
                  turned = tensor_2d(NULL, DT_F8_E4M3, cols, a->rows);
    const struct tensor *scales[] = {&a->qs, &a->ts};
    double inverse;
    for (int s = 0; s < 2; s++)
        for (int64_t i = 0; present(scales[s]) && i < tensor_elems(scales[s]); i++)
            ((double *)scales[s]->data)[i] = 0;
    for (int64_t r = 0; r<a->rows; r += block> 0 ? block : a->rows)
        for (int64_t c = 0; c<cols; c += block> 0 ? block : cols) {
            exponent_of(a, block > 0 ? r / block : 0, block > 0 ? c / block : 0, &inverse);
            ((double *)a->qs.data)[f8_scale_at(&whole, block, block > 0, r, c)] = inverse;
            if (present(&a->ts))
                ((double *)a->ts.data)[f8_scale_at(&turned, block, block > 0, c, r)] = inverse;
        }
    for (int64_t r = 0; r < a->x.dim[0]; r++)
        for (int64_t c = 0; c < cols; c++) {
            int k = exponent_of(a, block > 0 ? (a->first + r) / block : 0, block > 0 ? c / block : 0, &inverse);
            ((uint8_t *)a->q.data)[r * cols + c] = f8_from_f64(ldexp(f64_row(&a->x, r)[c], k), DT_F8_E4M3);
        }
    return ST_OK;
}

int shard8_turn_ref(struct lane *l, const struct shard8_turn_args *a)
{
    TRY(shard8_turn_check(a, l->err));
    int64_t rows = a->q.dim[0], cols = a->q.dim[1];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            ((uint8_t *)a->t.data)[c * rows + r] = ((const uint8_t *)a->q.data)[r * cols + c];
    return ST_OK;
}
