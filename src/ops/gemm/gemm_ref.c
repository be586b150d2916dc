/* gemm, reference; see gemm.h. Rows of C in parallel: no sum crosses a row, so threads change
 * nothing. The inner loop walks B in memory order: whole models are
 * gradient-checked through this. */
#include "ops/ops_ref_int.h"
#include "ops/gemm/gemm.h"

static void add_row(const struct gemm_args *a, int64_t i, int64_t k, int64_t n, double *c)
{
    const double *ad = a->a.data, *bd = a->b.data;
    int64_t a_start = a->trans_a ? i : i * a->a.stride[0], a_step = a->trans_a ? a->a.stride[0] : 1;
    if (!a->trans_b) {
        for (int64_t p = 0; p < k; p++) {
            double scale = a->alpha * ad[a_start + p * a_step];
            const double *b = bd + p * a->b.stride[0];
            for (int64_t j = 0; j < n; j++)
                c[j] += scale * b[j];
        }
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        const double *b = bd + j * a->b.stride[0];
        double sum = 0;
        for (int64_t p = 0; p < k; p++)
            sum += ad[a_start + p * a_step] * b[p];
        c[j] += a->alpha * sum;
    }
}

int gemm_ref(struct lane *l, const struct gemm_args *a)
{
    TRY(gemm_check(a, l->err));
    int64_t m = a->c.dim[0], n = a->c.dim[1], k = a->a.dim[a->trans_a ? 0 : 1];
    const double *bias = a->bias.data;
#pragma omp parallel for schedule(static) if (m * n * k > 100000)
    for (int64_t i = 0; i < m; i++) {
        double *c = f64_row(&a->c, i);
        for (int64_t j = 0; j < n; j++)
            c[j] = (a->acc_c ? c[j] : 0) + (bias == NULL ? 0 : bias[j]);
        add_row(a, i, k, n, c);
    }
    return ST_OK;
}
