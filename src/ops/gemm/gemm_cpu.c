/* gemm, fast CPU version: OpenBLAS; see gemm.h. With a bias, C is first set to bias (or added to) and
 * the product added to it: that replaces the pass in which OpenBLAS itself clears C. */
#include "ops/cpu_gemm.h"
#include "ops/gemm/gemm.h"
#include "ops/ops_cpu_int.h"

#include <limits.h>
#include <string.h>

/* A matrix of one row may have any stride; OpenBLAS wants one of at least the row length and 1. */
static int64_t leading(const struct tensor *t) { return max_i64(1, t->dim[0] > 1 ? t->stride[0] : t->dim[1]); }

static int check_range(const struct gemm_args *a, struct err *e)
{
    const struct tensor *t[] = {&a->a, &a->b, &a->c};
    for (int i = 0; i < countof(t); i++)
        if (max_i64(max_i64(t[i]->dim[0], t[i]->dim[1]), leading(t[i])) > INT_MAX)
            return err_set(e, ST_UNSUPPORTED,
                           "gemm: a [%lld, %lld] matrix with row stride %lld is beyond OpenBLAS's "
                           "32-bit sizes",
                           (long long)t[i]->dim[0], (long long)t[i]->dim[1], (long long)leading(t[i]));
    return ST_OK;
}

static void start_with_bias(const struct gemm_args *a)
{
    int64_t m = a->c.dim[0], n = a->c.dim[1];
    const float *bias = a->bias.data;
#pragma omp parallel for schedule(static) if (m * n > 16384)
    for (int64_t i = 0; i < m; i++) {
        float *c = f32_row(&a->c, i);
        if (!a->acc_c && bias != NULL)
            memcpy(c, bias, (size_t)n * sizeof *c);
        else if (!a->acc_c)
            memset(c, 0, (size_t)n * sizeof *c);
#pragma omp simd
        for (int64_t j = 0; j < (a->acc_c && bias != NULL ? n : 0); j++)
            c[j] += bias[j];
    }
}

int CPU_NAME(gemm_cpu)(struct lane *l, const struct gemm_args *a)
{
    TRY(gemm_check(a, l->err));
    TRY(check_range(a, l->err));
    int64_t m = a->c.dim[0], n = a->c.dim[1], k = a->a.dim[a->trans_a ? 0 : 1];
    if (m == 0 || n == 0)
        return ST_OK;
    bool empty = k == 0 || (float)a->alpha == 0;
    bool prepared = empty || present(&a->bias);
    if (prepared)
        start_with_bias(a);
    if (!empty)
        sgemm(&(struct sgemm){.trans_a = a->trans_a,
                              .trans_b = a->trans_b,
                              .m = m,
                              .n = n,
                              .k = k,
                              .alpha = (float)a->alpha,
                              .a = a->a.data,
                              .lda = leading(&a->a),
                              .b = a->b.data,
                              .ldb = leading(&a->b),
                              .c = a->c.data,
                              .ldc = leading(&a->c),
                              .beta = prepared || a->acc_c ? 1.0f : 0.0f});
    return ST_OK;
}
