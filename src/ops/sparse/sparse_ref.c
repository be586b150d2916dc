/* sparse, reference; see sparse.h. Row by row, keys in the order of their list. */
#include "ops/ops_ref_int.h"
#include "ops/sparse/sparse.h"

#include <math.h>

static double *q_at(const struct tensor *t, int64_t b, int64_t i, int64_t h)
{
    return (double *)t->data + b * t->stride[0] + i * t->stride[1] + h * t->stride[2];
}
static double *key_at(const struct tensor *t, int64_t b, int64_t j)
{
    return (double *)t->data + b * t->stride[0] + j * t->stride[1];
}
static const int32_t *list_at(const struct tensor *idx, int64_t b, int64_t i)
{
    return (const int32_t *)idx->data + b * idx->stride[0] + i * idx->stride[1];
}
static double *lse_at(const struct tensor *t, int64_t b, int64_t h, int64_t i)
{
    return (double *)t->data + b * t->stride[0] + h * t->stride[1] + i;
}

static void fwd_row(const struct sparse_fwd_args *a, int64_t b, int64_t i, int64_t h)
{
    int64_t d = a->q.dim[3], n = a->idx.dim[2];
    const int32_t *list = list_at(&a->idx, b, i);
    const double *q = q_at(&a->q, b, i, h);
    bool any = present(&a->sink);
    double *o = q_at(&a->o, b, i, h), max = any ? ((const double *)a->sink.data)[h] : -INFINITY;
    for (int64_t k = 0; k < n; k++)
        if (list[k] >= 0) {
            max = fmax(max, a->scale * dot_f64(q, key_at(&a->kv, b, list[k]), d));
            any = true;
        }
    double sum = present(&a->sink) ? exp(((const double *)a->sink.data)[h] - max) : 0;
    for (int64_t c = 0; c < a->dv; c++)
        o[c] = 0;
    for (int64_t k = 0; k < n; k++) {
        if (list[k] < 0)
            continue;
        const double *kv = key_at(&a->kv, b, list[k]);
        double p = exp(a->scale * dot_f64(q, kv, d) - max);
        sum += p;
        for (int64_t c = 0; c < a->dv; c++)
            o[c] += p * kv[c];
    }
    for (int64_t c = 0; c < a->dv; c++)
        o[c] = any ? o[c] / sum : 0;
    *lse_at(&a->lse, b, h, i) = any ? max + log(sum) : -INFINITY;
}

int sparse_fwd_ref(struct lane *l, const struct sparse_fwd_args *a)
{
    TRY(sparse_fwd_check(a, l->err));
    TRY(sparse_check_list("sparse_fwd", &a->idx, a->kv.dim[1], l->err));
    for (int64_t b = 0; b < a->q.dim[0]; b++)
        for (int64_t i = 0; i < a->q.dim[1]; i++)
            for (int64_t h = 0; h < a->q.dim[2]; h++)
                fwd_row(a, b, i, h);
    return ST_OK;
}

static void clear(const struct tensor *t)
{
    for (int64_t r = 0; r < rows_of(t); r++)
        for (int64_t c = 0; c < cols_of(t); c++)
            f64_row(t, r)[c] = 0;
}

static void bwd_row(const struct sparse_bwd_args *a, int64_t b, int64_t i, int64_t h)
{
    int64_t d = a->q.dim[3], n = a->idx.dim[2];
    const int32_t *list = list_at(&a->idx, b, i);
    const double *q = q_at(&a->q, b, i, h), *dout = q_at(&a->d_o, b, i, h);
    double *dq = q_at(&a->dq, b, i, h), delta = dot_f64(dout, q_at(&a->o, b, i, h), a->dv),
           lse = *lse_at(&a->lse, b, h, i);
    for (int64_t k = 0; k < n; k++) {
        if (list[k] < 0)
            continue;
        const double *kv = key_at(&a->kv, b, list[k]);
        double *dkv = key_at(&a->dkv, b, list[k]), p = exp(a->scale * dot_f64(q, kv, d) - lse);
        double ds = p * (dot_f64(dout, kv, a->dv) - delta) * a->scale;
        for (int64_t c = 0; c < d; c++) {
            dq[c] += ds * kv[c];
            dkv[c] += ds * q[c] + (c < a->dv ? p * dout[c] : 0);
        }
    }
    if (present(&a->sink))
        ((double *)a->dsink.data)[h] -= exp(((const double *)a->sink.data)[h] - lse) * delta;
}

int sparse_bwd_ref(struct lane *l, const struct sparse_bwd_args *a)
{
    TRY(sparse_bwd_check(a, l->err));
    TRY(sparse_check_list("sparse_bwd", &a->idx, a->kv.dim[1], l->err));
    clear(&a->dq);
    clear(&a->dkv);
    if (present(&a->sink) && !a->acc_dsink)
        clear(&a->dsink);
    for (int64_t b = 0; b < a->q.dim[0]; b++)
        for (int64_t i = 0; i < a->q.dim[1]; i++)
            for (int64_t h = 0; h < a->q.dim[2]; h++)
                bwd_row(a, b, i, h);
    return ST_OK;
}
