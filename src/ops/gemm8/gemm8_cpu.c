/* gemm8, fast CPU version; see gemm8.h. Both operands are decoded to fp32, which is exact, and multiplied like any
 * others. */
#include "ops/cpu_gemm.h"
#include "ops/gemm8/gemm8.h"
#include "ops/ops_cpu_int.h"
#include "ops/quantise/quantise.h"
#include "tensor/f8.h"

#include <limits.h>
#include <string.h>

int64_t CPU_NAME(gemm8_work_cpu)(const struct gemm8_args *a)
{
    return (round_up(tensor_elems(&a->a), 32) + tensor_elems(&a->b)) * (int64_t)sizeof(float);
}

static void decode(const struct tensor *codes, const struct tensor *scales, int64_t block, bool square, float *out)
{
    int64_t rows = codes->dim[0], cols = codes->dim[1], step = block > 0 ? block : max_i64(cols, 1);
    const float *scale = scales->data;
    float table[256];
    for (int i = 0; i < 256; i++)
        table[i] = f8_to_f32((uint8_t)i, codes->dtype);
#pragma omp parallel for schedule(static) if (rows * cols > 16384)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += step) {
            const uint8_t *from = (const uint8_t *)codes->data + r * cols + c;
            float *to = out + r * cols + c, s = scale[f8_scale_at(codes, block, square, r, c)];
            for (int64_t i = 0, n = min_i64(step, cols - c); i < n; i++)
                to[i] = table[from[i]] * s;
        }
}

static void start(const struct gemm8_args *a)
{
    int64_t m = a->c.dim[0], n = a->c.dim[1];
    const float *bias = a->bias.data;
    for (int64_t i = 0; i < m; i++) {
        float *c = f32_row(&a->c, i);
        for (int64_t j = 0; j < n; j++)
            c[j] = (a->acc_c ? c[j] : 0) + (bias != NULL ? bias[j] : 0);
    }
}

int CPU_NAME(gemm8_cpu)(struct lane *l, const struct gemm8_args *a)
{
    TRY(gemm8_check(a, l->err));
    TRY(check_work("gemm8", &a->work, CPU_NAME(gemm8_work_cpu)(a), l->err));
    int64_t m = a->c.dim[0], n = a->c.dim[1], k = a->a.dim[1], ldc = max_i64(1, m > 1 ? a->c.stride[0] : n);
    if (max_i64(max_i64(m, n), max_i64(k, ldc)) > INT_MAX)
        return err_set(l->err, ST_UNSUPPORTED,
                       "gemm8: a product of %lld x %lld x %lld is beyond OpenBLAS's 32-bit sizes", (long long)m,
                       (long long)n, (long long)k);
    if (m == 0 || n == 0)
        return ST_OK;
    bool prepared = k == 0 || present(&a->bias);
    if (prepared)
        start(a);
    if (k == 0)
        return ST_OK;
    float *av = a->work.data, *bv = av + round_up(m * k, 32);
    decode(&a->a, &a->as, a->block, a->a_square, av);
    decode(&a->b, &a->bs, a->block, a->b_square, bv);
    sgemm(&(struct sgemm){.trans_b = true,
                          .m = m,
                          .n = n,
                          .k = k,
                          .alpha = 1,
                          .a = av,
                          .lda = k,
                          .b = bv,
                          .ldb = k,
                          .c = a->c.data,
                          .ldc = ldc,
                          .beta = prepared || a->acc_c ? 1.0f : 0.0f});
    return ST_OK;
}
