/* gmm, fast CPU version; see gmm.h. Threads take the pieces of the products of all experts one by one; inside a
 * parallel region sgemm() computes each on the calling thread. */
#include "ops/cpu_gemm.h"
#include "ops/gmm/gmm.h"
#include "ops/gmm/gmm_int.h"
#include "ops/ops_cpu_int.h"

#include <limits.h>
#include <string.h>

/* OpenBLAS counts in 32 bits. */
static int check_range(const char *op, const struct tensor *x, const struct tensor *y, struct err *e)
{
    const struct tensor *t[] = {x, y};
    for (int i = 0; i < countof(t); i++)
        if (present(t[i]) && max_i64(t[i]->dim[1], t[i]->stride[0]) > INT_MAX)
            return err_set(e, ST_UNSUPPORTED, "%s: rows of %lld elements are beyond OpenBLAS's 32-bit sizes", op,
                           (long long)max_i64(t[i]->dim[1], t[i]->stride[0]));
    return ST_OK;
}

static int64_t leading(const struct tensor *t) { return max_i64(max_i64(1, t->stride[0]), t->dim[1]); }

/* One piece of the product of an expert: at most GMM_ROWS rows and GMM_COLS columns of the output. Rows come
 * last: an expert's weights are packed once for all of its rows. */
struct piece {
    int64_t expert, row, rows, col, cols;
};
struct pieces {
    const int32_t *offset;
    int64_t experts, cols;
};

/* The i-th of the even parts of n that are at most `most`, whole register tiles of the product each. */
static int64_t count_parts(int64_t n, int64_t most) { return ceil_div(n, most); }
static void find_part(int64_t n, int64_t most, int64_t i, int64_t *first, int64_t *size)
{
    enum { ALIGN = 32 };
    int64_t each = round_up(ceil_div(n, count_parts(n, most)), ALIGN);
    *first = min_i64(i * each, n);
    *size = min_i64(each, n - *first);
}

static int64_t count_pieces(const struct pieces *p)
{
    int64_t n = 0;
    for (int64_t e = 0; e < p->experts; e++)
        n += count_parts(p->offset[e + 1] - p->offset[e], GMM_ROWS);
    return n * count_parts(p->cols, GMM_COLS);
}

/* The i-th piece, counted over all experts; false where there is nothing to do. */
static bool find_piece(const struct pieces *p, int64_t i, struct piece *out)
{
    int64_t across = count_parts(p->cols, GMM_COLS);
    for (int64_t e = 0; e < p->experts; e++) {
        int64_t n = p->offset[e + 1] - p->offset[e], here = count_parts(n, GMM_ROWS) * across;
        if (i < here) {
            *out = (struct piece){.expert = e};
            find_part(n, GMM_ROWS, i / across, &out->row, &out->rows);
            find_part(p->cols, GMM_COLS, i % across, &out->col, &out->cols);
            out->row += p->offset[e];
            return out->rows > 0 && out->cols > 0;
        }
        i -= here;
    }
    return false;
}

static void zero_tail(const struct tensor *y, int64_t first)
{
    for (int64_t r = first; r < y->dim[0]; r++)
        memset(f32_row(y, r), 0, (size_t)y->dim[1] * sizeof(float));
}

/* ---- forward --------------------------------------------------------------------------------- */

static void put_bias(const struct gmm_fwd_args *a, const struct piece *p)
{
    const float *bias = (const float *)a->bias.data + p->expert * a->w.dim[1] + p->col, *prob = a->prob.data;
    for (int64_t r = p->row; r < p->row + p->rows; r++) {
        float *y = f32_row(&a->y, r) + p->col, scale = prob == NULL ? 1.0f : prob[r];
#pragma omp simd
        for (int64_t o = 0; o < p->cols; o++)
            y[o] = scale * bias[o];
    }
}

int CPU_NAME(gmm_fwd_cpu)(struct lane *l, const struct gmm_fwd_args *a)
{
    TRY(gmm_fwd_check(a, l->err));
    TRY(gmm_offset_check("gmm_fwd", &a->offset, a->x.dim[0], l->err));
    TRY(check_range("gmm_fwd", &a->x, &a->y, l->err));
    int64_t out = a->w.dim[1], in = a->w.dim[2];
    struct pieces all = {a->offset.data, a->w.dim[0], out};
    int64_t n = count_pieces(&all);
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < n; i++) {
        struct piece p;
        if (!find_piece(&all, i, &p))
            continue;
        bool biased = present(&a->bias);
        if (biased)
            put_bias(a, &p);
        else if (in == 0)
            for (int64_t r = p.row; r < p.row + p.rows; r++)
                memset(f32_row(&a->y, r) + p.col, 0, (size_t)p.cols * sizeof(float));
        if (in > 0)
            sgemm(&(struct sgemm){.trans_b = true,
                                  .m = p.rows,
                                  .n = p.cols,
                                  .k = in,
                                  .alpha = 1,
                                  .a = f32_row(&a->x, p.row),
                                  .lda = leading(&a->x),
                                  .b = (const float *)a->w.data + (p.expert * out + p.col) * in,
                                  .ldb = in,
                                  .beta = biased ? 1 : 0,
                                  .c = f32_row(&a->y, p.row) + p.col,
                                  .ldc = leading(&a->y)});
    }
    zero_tail(&a->y, all.offset[all.experts]);
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

static void input_gradient(const struct gmm_bwd_args *a)
{
    int64_t out = a->w.dim[1], in = a->w.dim[2];
    struct pieces all = {a->offset.data, a->w.dim[0], in};
    int64_t n = out > 0 ? count_pieces(&all) : 0;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < n; i++) {
        struct piece p;
        if (find_piece(&all, i, &p))
            sgemm(&(struct sgemm){.m = p.rows,
                                  .n = p.cols,
                                  .k = out,
                                  .alpha = 1,
                                  .a = f32_row(&a->dy, p.row),
                                  .lda = leading(&a->dy),
                                  .b = (const float *)a->w.data + p.expert * out * in + p.col,
                                  .ldb = in,
                                  .c = f32_row(&a->dx, p.row) + p.col,
                                  .ldc = leading(&a->dx)});
    }
    zero_tail(&a->dx, out > 0 ? all.offset[all.experts] : 0);
}

/* Pieces are rows of dw: columns of dy. */
static void weight_gradient(const struct gmm_bwd_args *a)
{
    int64_t experts = a->dw.dim[0], out = a->dw.dim[1], in = a->dw.dim[2], per = count_parts(out, GMM_COLS);
    const int32_t *offset = a->offset.data;
    if (in == 0)
        return;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < experts * per; i++) {
        int64_t e = i / per, n = offset[e + 1] - offset[e], first, m;
        find_part(out, GMM_COLS, i % per, &first, &m);
        float *dw = (float *)a->dw.data + (e * out + first) * in;
        if (n > 0 && m > 0)
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
