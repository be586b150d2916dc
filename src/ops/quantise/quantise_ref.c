/* quantise, reference; see quantise.h. Block by block: largest magnitude, scale, codes. */
#include "ops/ops_ref_int.h"
#include "ops/quantise/quantise.h"
#include "tensor/f8.h"

/* The element of x that becomes code [r, c] of q, or of t. */
static double element(const struct quantise_args *a, bool transposed, int64_t r, int64_t c)
{
    int64_t row = transposed ? c : r, col = transposed ? r : c;
    int64_t from = present(&a->src) ? ((const int32_t *)a->src.data)[row] : row;
    if (from < 0)
        return 0;
    return f64_row(&a->x, present(&a->src) ? from / a->k : from)[col];
}

static double scale_of(double amax, enum dtype type, int *exponent)
{
    *exponent = isfinite(amax) ? f8_exponent_f64(amax, type) : 0;
    return isfinite(amax) ? ldexp(1, -*exponent) : NAN;
}

/* Rows [r, r + height) and columns [c, c + width) of the codes. */
static void one_block(const struct quantise_args *a, const struct tensor *codes, bool transposed, int64_t r,
                      int64_t height, int64_t c, int64_t width, double *scale)
{
    double amax = 0;
    int exponent;
    uint8_t *code = codes->data;
    for (int64_t i = r; i < r + height; i++)
        for (int64_t j = c; j < c + width; j++) {
            double v = fabs(element(a, transposed, i, j));
            amax = isnan(amax) || v <= amax ? amax : v; /* NaN stays */
        }
    *scale = scale_of(amax, codes->dtype, &exponent);
    for (int64_t i = r; i < r + height; i++)
        for (int64_t j = c; j < c + width; j++)
            code[i * codes->dim[1] + j] = f8_from_f64(ldexp(element(a, transposed, i, j), exponent), codes->dtype);
}

static void quantise_one(const struct quantise_args *a, const struct tensor *codes, const struct tensor *scales,
                         bool transposed)
{
    int64_t rows = codes->dim[0], cols = codes->dim[1];
    int64_t width = a->block > 0 ? a->block : max_i64(cols, 1), height = a->square      ? a->block
                                                                         : a->block > 0 ? 1
                                                                                        : max_i64(rows, 1);
    double *scale = scales->data;
    for (int64_t i = 0, n = tensor_elems(scales); i < n; i++)
        scale[i] = 0;
    for (int64_t r = 0; r < rows; r += height)
        for (int64_t c = 0; c < cols; c += width)
            one_block(a, codes, transposed, r, min_i64(height, rows - r), c, min_i64(width, cols - c),
                      scale + f8_scale_at(codes, a->block, a->square, r, c));
}

int quantise_ref(struct lane *l, const struct quantise_args *a)
{
    TRY(quantise_check(a, l->err));
    if (present(&a->q))
        quantise_one(a, &a->q, &a->qs, false);
    if (present(&a->t))
        quantise_one(a, &a->t, &a->ts, true);
    return ST_OK;
}
