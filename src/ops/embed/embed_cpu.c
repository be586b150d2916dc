/* embed, fast CPU version; see embed.h. The backward gives each thread a range of columns and lets
 * it walk the tokens in order: every element of dw has one writer and one order of summands,
 * whatever the number of threads, and no scratch is needed. */
#include "ops/embed/embed_int.h"
#include "ops/embed/embed.h"
#include "ops/ops_cpu_int.h"

#include <omp.h>
#include <string.h>

enum { COLS = 16 }; /* columns are distributed in cache lines, so that threads never share one */

int CPU_NAME(embed_fwd_cpu)(struct lane *l, const struct embed_fwd_args *a)
{
    TRY(embed_fwd_check(a, l->err));
    TRY(embed_token_check("embed_fwd", &a->token, a->w.dim[0], a->part, l->err));
    int64_t rows = a->token.dim[0], d = a->w.dim[1], vocab = a->w.dim[0], first = a->first;
    const int32_t *token = a->token.data;
    const float *w = a->w.data;
#pragma omp parallel for schedule(static) if (rows * d > 16384)
    for (int64_t t = 0; t < rows; t++) {
        if (token[t] >= first && token[t] < first + vocab)
            memcpy(f32_row(&a->y, t), w + (token[t] - first) * d, (size_t)d * sizeof *w);
        else
            memset(f32_row(&a->y, t), 0, (size_t)d * sizeof *w);
    }
    return ST_OK;
}

int64_t CPU_NAME(embed_bwd_work_cpu)(const struct embed_bwd_args *a)
{
    (void)a;
    return 0;
}

static void add_columns(const struct embed_bwd_args *a, int64_t first, int64_t end)
{
    int64_t rows = a->token.dim[0], d = a->dw.dim[1], vocab = a->dw.dim[0];
    const int32_t *token = a->token.data;
    for (int64_t t = 0; t < rows; t++) {
        int64_t row = token[t] - a->first;
        if (row < 0 || row >= vocab)
            continue;
        const float *dy = f32_row(&a->dy, t);
        float *dw = (float *)a->dw.data + row * d;
#pragma omp simd
        for (int64_t c = first; c < end; c++)
            dw[c] += dy[c];
    }
}

int CPU_NAME(embed_bwd_cpu)(struct lane *l, const struct embed_bwd_args *a)
{
    TRY(embed_bwd_check(a, l->err));
    TRY(embed_token_check("embed_bwd", &a->token, a->dw.dim[0], a->part, l->err));
    int64_t vocab = a->dw.dim[0], rows = a->token.dim[0], d = a->dw.dim[1];
    int64_t groups = ceil_div(d, COLS);
    float *dw = a->dw.data;
#pragma omp parallel if ((rows + vocab) * d > 16384)
    {
        int64_t n = omp_get_num_threads(), me = omp_get_thread_num();
        if (!a->acc_dw) {
#pragma omp for schedule(static)
            for (int64_t v = 0; v < vocab; v++)
                memset(dw + v * d, 0, (size_t)d * sizeof *dw);
        }
        add_columns(a, groups * me / n * COLS, min_i64(d, groups * (me + 1) / n * COLS));
    }
    return ST_OK;
}
