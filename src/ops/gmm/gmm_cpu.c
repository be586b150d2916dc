/* gmm, fast CPU version; see gmm.h. Tiles of all experts are dealt to threads one by one; inside a
 * parallel region sgemm() computes each on the thread that asked. */
#include "ops/cpu_gemm.h"
#include "ops/gmm/gmm_int.h"
#include "ops/ops_cpu_int.h"

#include <limits.h>
#include <string.h>

/* OpenBLAS counts in 32 bits. */
static int check_range(const char *op, const struct tensor *x, const struct tensor *y,
                       struct err *e)
{
    const struct tensor *t[] = {x, y};
    for (int i = 0; i < countof(t); i++)
        if (present(t[i]) && max_i64(t[i]->dim[1], t[i]->stride[0]) > INT_MAX)
            return err_set(e, ST_UNSUPPORTED,
                           "%s: rows of %lld elements are beyond OpenBLAS's 32-bit sizes", op,
                           (long long)max_i64(t[i]->dim[1], t[i]->stride[0]));
    return ST_OK;
}

static int64_t leading(const struct tensor *t)
{
    return max_i64(max_i64(1, t->stride[0]), t->dim[1]);
}

/* The tile-th tile of rows, counted over all experts; false past the last. */
struct tile {
    int64_t expert, first, rows;
};
static bool find_tile(const int32_t *offset, int64_t experts, int64_t tile, struct tile *out)
{
    for (int64_t e = 0; e < experts; e++) {
        int64_t n = offset[e + 1] - offset[e], tiles = ceil_div(n, GMM_ROWS);
        if (tile < tiles) {
            int64_t at = tile * GMM_ROWS;
            *out = (struct tile){e, offset[e] + at, min_i64(GMM_ROWS, n - at)};
            return true;
        }
        tile -= tiles;
    }
    return false;
}

static int64_t count_tiles(const int32_t *offset, int64_t experts)
{
    int64_t n = 0;
    for (int64_t e = 0; e < experts; e++)
        n += ceil_div(offset[e + 1] - offset[e], GMM_ROWS);
    return n;
}

static void zero_tail(const struct tensor *y, int64_t first)
{
    for (int64_t r = first; r < y->dim[0]; r++)
        memset(f32_row(y, r), 0, (size_t)y->dim[1] * sizeof(float));
}

/* ---- forward
 * ---------------------------------------------------------------------------------------- */

static void put_bias(const struct gmm_fwd_args *a, const struct tile *t)
{
    int64_t out = a->w.dim[1];
    const float *bias = (const float *)a->bias.data + t->expert * out, *prob = a->prob.data;
    for (int64_t r = t->first; r < t->first + t->rows; r++) {
        float *y = f32_row(&a->y, r), p = prob == NULL ? 1.0f : prob[r];
#pragma omp simd
        for (int64_t o = 0; o < out; o++)
            y[o] = p * bias[o];
    }
}

int CPU_NAME(gmm_fwd_cpu)(struct lane *l, const struct gmm_fwd_args *a)
{
    TRY(gmm_fwd_check(a, l->err));
    TRY(gmm_offset_check("gmm_fwd", &a->offset, a->x.dim[0], l->err));
    TRY(check_range("gmm_fwd", &a->x, &a->y, l->err));
    int64_t experts = a->w.dim[0], out = a->w.dim[1], in = a->w.dim[2];
    const int32_t *offset = a->offset.data;
    int64_t tiles = out > 0 ? count_tiles(offset, experts) : 0;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < tiles; i++) {
        struct tile t;
        if (!find_tile(offset, experts, i, &t))
            continue;
        bool biased = present(&a->bias);
        if (biased)
            put_bias(a, &t);
        else if (in == 0)
            for (int64_t r = t.first; r < t.first + t.rows; r++)
                memset(f32_row(&a->y, r), 0, (size_t)out * sizeof(float));
        if (in > 0)
            sgemm(&(struct sgemm){.trans_b = true,
                                  .m = t.rows,
                                  .n = out,
                                  .k = in,
                                  .alpha = 1,
                                  .a = f32_row(&a->x, t.first),
                                  .lda = leading(&a->x),
                                  .b = (const float *)a->w.data + t.expert * out * in,
                                  .ldb = in,
                                  .beta = biased ? 1 : 0,
                                  .c = f32_row(&a->y, t.first),
                                  .ldc = leading(&a->y)});
    }
    zero_tail(&a->y, offset[experts]);
    return ST_OK;
}

/* ---- backward
 * --------------------------------------------------------------------------------------- */

static void input_gradient(const struct gmm_bwd_args *a)
{
    int64_t experts = a->w.dim[0], out = a->w.dim[1], in = a->w.dim[2];
    const int32_t *offset = a->offset.data;
    int64_t tiles = in > 0 && out > 0 ? count_tiles(offset, experts) : 0;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < tiles; i++) {
        struct tile t;
        if (find_tile(offset, experts, i, &t))
            sgemm(&(struct sgemm){.m = t.rows,
                                  .n = in,
                                  .k = out,
                                  .alpha = 1,
                                  .a = f32_row(&a->dy, t.first),
                                  .lda = leading(&a->dy),
                                  .b = (const float *)a->w.data + t.expert * out * in,
                                  .ldb = in,
                                  .c = f32_row(&a->dx, t.first),
                                  .ldc = leading(&a->dx)});
    }
    zero_tail(&a->dx, out > 0 ? offset[experts] : 0);
}

static void weight_gradient(const struct gmm_bwd_args *a)
{
    int64_t experts = a->dw.dim[0], out = a->dw.dim[1], in = a->dw.dim[2],
            per = ceil_div(out, GMM_ROWS);
    const int32_t *offset = a->offset.data;
    if (in == 0)
        return;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < experts * per; i++) {
        int64_t e = i / per, first = i % per * GMM_ROWS, m = min_i64(GMM_ROWS, out - first),
                n = offset[e + 1] - offset[e];
        float *dw = (float *)a->dw.data + (e * out + first) * in;
        if (n > 0)
            sgemm(&(struct sgemm){.trans_a = true,
                                  .m = m,
                                  .n = in,
                                  .k = n,
                                  .alpha = 1,
                                  .a = f32_row(&a->dy, offset[e]) + first,
                                  .lda = leading(&a->dy),
                                  .b = f32_row(&a->x, offset[e]),
                                  .ldb = leading(&a->x),
                                  .beta = a->acc_dw ? 1 : 0,
                                  .c = dw,
                                  .ldc = in});
        else if (!a->acc_dw)
            memset(dw, 0, (size_t)(m * in) * sizeof *dw);
    }
}

static void bias_gradient(const struct gmm_bwd_args *a)
{
    int64_t experts = a->dbias.dim[0], out = a->dbias.dim[1];
    const int32_t *offset = a->offset.data;
    const float *prob = a->prob.data;
#pragma omp parallel for schedule(dynamic)
    for (int64_t e = 0; e < experts; e++) {
        float *dbias = (float *)a->dbias.data + e * out;
        if (!a->acc_dbias)
            memset(dbias, 0, (size_t)out * sizeof *dbias);
        for (int64_t r = offset[e]; r < offset[e + 1]; r++) {
            const float *dy = f32_row(&a->dy, r);
            float p = prob == NULL ? 1.0f : prob[r];
#pragma omp simd
            for (int64_t o = 0; o < out; o++)
                dbias[o] += p * dy[o];
        }
    }
}

static void prob_gradient(const struct gmm_bwd_args *a)
{
    int64_t experts = a->bias.dim[0], out = a->bias.dim[1], rows = a->dy.dim[0];
    const int32_t *offset = a->offset.data;
    float *dprob = a->dprob.data;
#pragma omp parallel for schedule(dynamic)
    for (int64_t e = 0; e < experts; e++) {
        const float *bias = (const float *)a->bias.data + e * out;
        for (int64_t r = offset[e]; r < offset[e + 1]; r++) {
            const float *dy = f32_row(&a->dy, r);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t o = 0; o < out; o++)
                sum += dy[o] * bias[o];
            dprob[r] = (a->acc_dprob ? dprob[r] : 0.0f) + sum;
        }
    }
    for (int64_t r = offset[experts]; !a->acc_dprob && r < rows; r++)
        dprob[r] = 0;
}

int CPU_NAME(gmm_bwd_cpu)(struct lane *l, const struct gmm_bwd_args *a)
{
    TRY(gmm_bwd_check(a, l->err));
    TRY(gmm_offset_check("gmm_bwd", &a->offset, a->dy.dim[0], l->err));
    TRY(check_range("gmm_bwd", &a->dy, &a->x, l->err));
    if (present(&a->dx))
        input_gradient(a);
    if (present(&a->dw))
        weight_gradient(a);
    if (present(&a->dbias))
        bias_gradient(a);
    if (present(&a->dprob))
        prob_gradient(a);
    return ST_OK;
}
