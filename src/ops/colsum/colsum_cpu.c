/* colsum, fast CPU version; see colsum.h. Blocks of rows in parallel into work, then the blocks in
 * order, columns in parallel. */
#include "ops/ops_cpu_int.h"
#include "ops/colsum/colsum.h"

#include <string.h>

enum { STRIP = 256 }; /* columns one thread adds up at a time: partial sums stay in the cache */

int64_t CPU_NAME(colsum_work_cpu)(const struct colsum_args *a)
{
    return ceil_div(rows_of(&a->x), COLSUM_BLOCK) * cols_of(&a->x) * (int64_t)sizeof(float);
}

static void add_row(float *restrict sum, const float *restrict x, int64_t n)
{
#pragma omp simd
    for (int64_t c = 0; c < n; c++)
        sum[c] += x[c];
}

int CPU_NAME(colsum_cpu)(struct lane *l, const struct colsum_args *a)
{
    TRY(colsum_check(a, l->err));
    TRY(check_work("colsum", &a->work, CPU_NAME(colsum_work_cpu)(a), l->err));
    int64_t rows = a->x.dim[0], n = a->x.dim[1], blocks = ceil_div(rows, COLSUM_BLOCK);
    float *partial = a->work.data, *out = a->out.data;
    bool small = rows * n < 16384;
#pragma omp parallel for schedule(static) if (!small)
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = b * COLSUM_BLOCK, end = min_i64(rows, first + COLSUM_BLOCK);
        memcpy(partial + b * n, f32_row(&a->x, first), (size_t)n * sizeof(float));
        for (int64_t r = first + 1; r < end; r++)
            add_row(partial + b * n, f32_row(&a->x, r), n);
    }
#pragma omp parallel for schedule(static) if (!small)
    for (int64_t first = 0; first < n; first += STRIP) {
        int64_t wide = min_i64(STRIP, n - first);
        if (!a->acc_out)
            memset(out + first, 0, (size_t)wide * sizeof(float));
        for (int64_t b = 0; b < blocks; b++)
            add_row(out + first, partial + b * n + first, wide);
    }
    return ST_OK;
}
