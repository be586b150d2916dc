/* dropout, fast CPU version; see dropout.h. Rows in parallel, draws for 64 channels at a time. */
#include "ops/dropout/dropout_mask.h"
#include "ops/dropout/dropout.h"
#include "ops/ops_cpu_int.h"

#include <string.h>

static void drop_row(const struct dropout_rule *r, int64_t t, const float *x, float *y, int64_t d)
{
    struct draw_place at = dropout_place(r->info.data, t + r->first, r->seq);
    uint32_t threshold = dropout_threshold(r->p), bits[DROPOUT_RUN];
    float scale = (float)(1 / (1 - r->p));
    for (int64_t first = 0; first < d; first += DROPOUT_RUN) {
        int64_t n = min_i64(DROPOUT_RUN, d - first);
        dropout_bits(r->key, at.step, at.sample, at.pos, first, bits);
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            y[first + i] = bits[i] >= threshold ? x[first + i] * scale : 0.0f;
    }
}

int CPU_NAME(dropout_cpu)(struct lane *l, const struct dropout_args *a)
{
    TRY(dropout_check(a, l->err));
    int64_t rows = a->x.dim[0], d = a->x.dim[1];
#pragma omp parallel for schedule(static) if (rows * d > 4096)
    for (int64_t t = 0; t < rows; t++) {
        const float *x = f32_row(&a->x, t);
        float *y = f32_row(&a->y, t);
        if (a->rule.p > 0)
            drop_row(&a->rule, t, x, y, d);
        else if (x != y)
            memcpy(y, x, (size_t)d * sizeof *x);
    }
    return ST_OK;
}
