/* sparse, fast CPU version; see sparse.h. Queries in parallel, a key's row read once for all heads. The gradient of
 * keys has two steps for a block of queries: every query writes what it adds to each key of its list, then every thread
 * adds up its own channels, queries in order. */
#include "ops/cpu_math.h"
#include "ops/ops_cpu_int.h"
#include "ops/sparse/sparse.h"

#include <math.h>
#include <omp.h>
#include <string.h>

static float *head_at(const struct tensor *t, int64_t b, int64_t i, int64_t h)
{
    return (float *)t->data + b * t->stride[0] + i * t->stride[1] + h * t->stride[2];
}
static float *key_at(const struct tensor *t, int64_t b, int64_t j)
{
    return (float *)t->data + b * t->stride[0] + j * t->stride[1];
}
static const int32_t *list_at(const struct tensor *idx, int64_t b, int64_t i)
{
    return (const int32_t *)idx->data + b * idx->stride[0] + i * idx->stride[1];
}
static float *lse_at(const struct tensor *t, int64_t b, int64_t h, int64_t i)
{
    return (float *)t->data + b * t->stride[0] + h * t->stride[1] + i;
}

/* Scratch of a thread: scores of all heads of a row, [H][K]; backward twice that. */
static int64_t row_floats(const struct tensor *q, const struct tensor *idx) { return q->dim[2] * idx->dim[2]; }

int64_t CPU_NAME(sparse_fwd_work_cpu)(const struct sparse_fwd_args *a)
{
    return omp_get_max_threads() * row_floats(&a->q, &a->idx) * (int64_t)sizeof(float);
}

/* s[h][k] = scale q_h.kv_k, -inf where there is no key. */
static void scores(float *s, const struct tensor *q, const struct tensor *kv, const int32_t *list, int64_t n,
                   float scale, int64_t b, int64_t i)
{
    for (int64_t k = 0; k < n; k++)
        for (int64_t h = 0; h < q->dim[2]; h++)
            s[h * n + k] =
                list[k] < 0 ? -INFINITY : scale * dot_f32(head_at(q, b, i, h), key_at(kv, b, list[k]), q->dim[3]);
}

static void fwd_row(const struct sparse_fwd_args *a, int64_t b, int64_t i, float *s)
{
    int64_t heads = a->q.dim[2], n = a->idx.dim[2];
    const int32_t *list = list_at(&a->idx, b, i);
    scores(s, &a->q, &a->kv, list, n, (float)a->scale, b, i);
    for (int64_t h = 0; h < heads; h++) {
        float *p = s + h * n, *o = head_at(&a->o, b, i, h), sum = 0;
        float sink = present(&a->sink) ? ((const float *)a->sink.data)[h] : -INFINITY, max = sink;
        for (int64_t k = 0; k < n; k++)
            max = p[k] > max || isnan(p[k]) ? p[k] : max;
        for (int64_t k = 0; k < n; k++) {
            p[k] = p[k] == -INFINITY ? 0 : fast_expf(p[k] - max);
            sum += p[k];
        }
        sum += sink > -INFINITY ? fast_expf(sink - max) : 0;
        bool any = sum > 0 || isnan(sum);
        memset(o, 0, (size_t)a->dv * sizeof *o);
        *lse_at(&a->lse, b, h, i) = any ? max + logf(sum) : -INFINITY;
        for (int64_t k = 0; any && k < n; k++)
            p[k] /= sum;
    }
    for (int64_t k = 0; k < n; k++)
        for (int64_t h = 0; list[k] >= 0 && h < heads; h++)
            add_scaled_f32(head_at(&a->o, b, i, h), key_at(&a->kv, b, list[k]), s[h * n + k], a->dv);
}

int CPU_NAME(sparse_fwd_cpu)(struct lane *l, const struct sparse_fwd_args *a)
{
    TRY(sparse_fwd_check(a, l->err));
    TRY(sparse_check_list("sparse_fwd", &a->idx, a->kv.dim[1], l->err));
    TRY(check_work("sparse_fwd", &a->work, CPU_NAME(sparse_fwd_work_cpu)(a), l->err));
    int64_t rows = a->q.dim[0] * a->q.dim[1], each = row_floats(&a->q, &a->idx);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        fwd_row(a, r / a->q.dim[1], r % a->q.dim[1], (float *)a->work.data + omp_get_thread_num() * each);
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Queries whose additions to keys are held at once: a number of shapes alone. */
static int64_t block_rows(const struct sparse_bwd_args *a)
{
    enum { MOST_FLOATS = 1 << 22, MOST_ROWS = 64 };
    int64_t row = a->idx.dim[2] * a->kv.dim[2];
    return min_i64(MOST_ROWS, max_i64(1, MOST_FLOATS / max_i64(1, row)));
}

int64_t CPU_NAME(sparse_bwd_work_cpu)(const struct sparse_bwd_args *a)
{
    int64_t row = a->idx.dim[2] * a->kv.dim[2], rows = a->q.dim[0] * a->q.dim[1];
    return (omp_get_max_threads() * row_floats(&a->q, &a->idx) + block_rows(a) * row + rows * a->q.dim[2]) *
           (int64_t)sizeof(float);
}

/* dq of a row, and what the row adds to each key of its list: add[k][c]. delta: of the row's heads. */
static void bwd_row(const struct sparse_bwd_args *a, int64_t b, int64_t i, float *s, float *add, float *delta)
{
    int64_t heads = a->q.dim[2], d = a->q.dim[3], n = a->idx.dim[2];
    const int32_t *list = list_at(&a->idx, b, i);
    scores(s, &a->q, &a->kv, list, n, (float)a->scale, b, i);
    for (int64_t h = 0; h < heads; h++) {
        float lse = *lse_at(&a->lse, b, h, i), *p = s + h * n;
        delta[h] = dot_f32(head_at(&a->d_o, b, i, h), head_at(&a->o, b, i, h), a->dv);
        memset(head_at(&a->dq, b, i, h), 0, (size_t)d * sizeof(float));
        for (int64_t k = 0; k < n; k++)
            p[k] = list[k] < 0 ? 0 : fast_expf(p[k] - lse);
    }
    for (int64_t k = 0; k < n; k++) {
        if (list[k] < 0)
            continue;
        const float *kv = key_at(&a->kv, b, list[k]);
        float *to = add + k * d;
        memset(to, 0, (size_t)d * sizeof *to);
        for (int64_t h = 0; h < heads; h++) {
            const float *dout = head_at(&a->d_o, b, i, h);
            float p = s[h * n + k], ds = p * (dot_f32(dout, kv, a->dv) - delta[h]) * (float)a->scale;
            add_scaled_f32(head_at(&a->dq, b, i, h), kv, ds, d);
            add_scaled_f32(to, head_at(&a->q, b, i, h), ds, d);
            add_scaled_f32(to, dout, p, a->dv);
        }
    }
}

/* Channels [from, to) of what a block of rows adds to keys, rows in order. */
static void add_block(const struct sparse_bwd_args *a, int64_t b, int64_t first, int64_t count, const float *add,
                      int64_t from, int64_t to)
{
    int64_t d = a->q.dim[3], n = a->idx.dim[2];
    for (int64_t i = 0; i < count; i++) {
        const int32_t *list = list_at(&a->idx, b, first + i);
        for (int64_t k = 0; k < n; k++)
            if (list[k] >= 0)
                add_scaled_f32(key_at(&a->dkv, b, list[k]) + from, add + (i * n + k) * d + from, 1, to - from);
    }
}

static void add_sinks(const struct sparse_bwd_args *a, const float *delta)
{
    float *dsink = a->dsink.data;
    int64_t heads = a->q.dim[2], seq = a->q.dim[1];
    for (int64_t h = 0; h < heads; h++) {
        float sink = ((const float *)a->sink.data)[h];
        double sum = 0;
        for (int64_t r = 0; r < a->q.dim[0] * seq; r++)
            sum -= (double)expf(sink - *lse_at(&a->lse, r / seq, h, r % seq)) * (double)delta[r * heads + h];
        dsink[h] = (a->acc_dsink ? dsink[h] : 0) + (float)sum;
    }
}

int CPU_NAME(sparse_bwd_cpu)(struct lane *l, const struct sparse_bwd_args *a)
{
    TRY(sparse_bwd_check(a, l->err));
    TRY(sparse_check_list("sparse_bwd", &a->idx, a->kv.dim[1], l->err));
    TRY(check_work("sparse_bwd", &a->work, CPU_NAME(sparse_bwd_work_cpu)(a), l->err));
    int64_t seq = a->q.dim[1], heads = a->q.dim[2], d = a->q.dim[3], row = a->idx.dim[2] * d, block = block_rows(a);
    int64_t each = row_floats(&a->q, &a->idx);
    enum { CHANNELS = 16 };
    float *delta = a->work.data, *add = delta + a->q.dim[0] * seq * heads, *mine = add + block * row;
    for (int64_t r = 0; r < rows_of(&a->dkv); r++)
        memset(f32_row(&a->dkv, r), 0, (size_t)d * sizeof(float));
    for (int64_t b = 0; b < a->q.dim[0]; b++)
        for (int64_t first = 0; first < seq; first += block) {
            int64_t count = min_i64(block, seq - first);
#pragma omp parallel for schedule(static)
            for (int64_t i = 0; i < count; i++)
                bwd_row(a, b, first + i, mine + omp_get_thread_num() * each, add + i * row,
                        delta + (b * seq + first + i) * heads);
#pragma omp parallel for schedule(static)
            for (int64_t c = 0; c < ceil_div(d, CHANNELS); c++)
                add_block(a, b, first, count, add, c * CHANNELS, min_i64(d, (c + 1) * CHANNELS));
        }
    if (present(&a->sink))
        add_sinks(a, delta);
    return ST_OK;
}
