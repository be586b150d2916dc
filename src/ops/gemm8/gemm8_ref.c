/* gemm8, reference; see gemm8.h. Codes are decoded to double; sums are taken in double. */
#include "ops/gemm8/gemm8.h"
#include "ops/ops_ref_int.h"
#include "ops/quantise/quantise.h"
#include "tensor/f8.h"

static double value(const struct tensor *codes, const struct tensor *scales, int64_t block, bool square, int64_t r,
                    int64_t c)
{
    uint8_t code = ((const uint8_t *)codes->data)[r * codes->dim[1] + c];
    return (double)f8_to_f32(code, codes->dtype) *
           ((const double *)scales->data)[f8_scale_at(codes, block, square, r, c)];
}

int gemm8_ref(struct lane *l, const struct gemm8_args *a)
{
    TRY(gemm8_check(a, l->err));
    int64_t m = a->c.dim[0], n = a->c.dim[1], k = a->a.dim[1];
    const double *bias = a->bias.data;
#pragma omp parallel for schedule(static) if (m * n * k > 20000)
    for (int64_t i = 0; i < m; i++) {
        double *c = f64_row(&a->c, i);
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t p = 0; p < k; p++)
                sum += value(&a->a, &a->as, a->block, a->a_square, i, p) *
                       value(&a->b, &a->bs, a->block, a->b_square, j, p);
            c[j] = (a->acc_c ? c[j] : 0) + (bias != NULL ? bias[j] : 0) + sum;
        }
    }
    return ST_OK;
}
