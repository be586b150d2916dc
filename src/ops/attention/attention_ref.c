/* attention, reference; see attention.h. Row by row: what a row gets depends on its own query and
 * the keys it sees, taken in ascending order, and on nothing else in the call, so that decoding
 * with a cache gives the same bits as the full pass. */
#include "ops/ops_ref_int.h"
#include "ops/attention/attention_drop_int.h"

#include <math.h>

static double *at(const struct tensor *t, int64_t b, int64_t row, int64_t head)
{
    return (double *)t->data + b * t->stride[0] + row * t->stride[1] + head * t->stride[2];
}

/* The first key that the query at index s sees; the last is s itself, or the last of the block. All are counted from
 * the first key of the block. */
static int64_t first_key(const struct tensor *doc_start, int64_t window, int64_t before, int64_t b, int64_t i,
                         int64_t s)
{
    int64_t first = window > 0 ? max_i64(0, s - window + 1) : 0;
    if (present(doc_start))
        first = max_i64(first, ((const int32_t *)doc_start->data)[b * doc_start->stride[0] + i] - before);
    return first;
}

static void fwd_row(const struct attention_fwd_args *a, int64_t start, int64_t b, int64_t h, int64_t i)
{
    int64_t d = a->q.dim[3], d_v = a->v.dim[3], g = h / (a->q.dim[2] / a->k.dim[2]), s = start + i;
    int64_t first = first_key(&a->doc_start, a->window, a->before, b, i, s), last = min_i64(s, a->k.dim[1] - 1);
    const double *q = at(&a->q, b, i, h);
    double *o = at(&a->o, b, i, h), max = -INFINITY, sum = 0;
    struct attention_drop drop = attention_drop_of(&a->drop, b, h);
    bool has_sink = present(&a->sink) || a->sink_zero;
    double sink = present(&a->sink) ? ((const double *)a->sink.data)[h] : 0;
    for (int64_t j = first; j <= last; j++)
        max = fmax(max, a->scale * dot_f64(q, at(&a->k, b, j, g), d));
    if (has_sink) {
        max = fmax(max, sink);
        sum = exp(sink - max);
    }
    for (int64_t c = 0; c < d_v; c++)
        o[c] = 0;
    for (int64_t j = first; j <= last; j++) {
        double p = exp(a->scale * dot_f64(q, at(&a->k, b, j, g), d) - max);
        const double *v = at(&a->v, b, j, g);
        sum += p;
        p *= attention_drop_factor(&drop, i, a->before + j);
        for (int64_t c = 0; c < d_v; c++)
            o[c] += p * v[c];
    }
    bool any = first <= last || has_sink;
    for (int64_t c = 0; c < d_v; c++)
        o[c] = any ? o[c] / sum : 0;
    ((double *)a->lse.data)[b * a->lse.stride[0] + h * a->lse.stride[1] + i] = any ? max + log(sum) : -INFINITY;
}

int attention_fwd_ref(struct lane *l, const struct attention_fwd_args *a)
{
    TRY(attention_fwd_check(a, l->err));
    int64_t start;
    TRY(attention_start(a, &start, l->err));
    for (int64_t b = 0; b < a->q.dim[0]; b++)
        for (int64_t h = 0; h < a->q.dim[2]; h++)
            for (int64_t i = 0; i < a->q.dim[1]; i++)
                fwd_row(a, start, b, h, i);
    return ST_OK;
}

static void clear(const struct tensor *t)
{
    for (int64_t r = 0; r < rows_of(t); r++)
        for (int64_t c = 0; c < cols_of(t); c++)
            f64_row(t, r)[c] = 0;
}

static void bwd_row(const struct attention_bwd_args *a, int64_t b, int64_t h, int64_t i)
{
    int64_t d = a->q.dim[3], d_v = a->v.dim[3], g = h / (a->q.dim[2] / a->k.dim[2]),
            s = a->k.dim[1] + a->after - a->q.dim[1] + i;
    const double *q = at(&a->q, b, i, h), *dout = at(&a->d_o, b, i, h);
    double *dq = at(&a->dq, b, i, h), delta = dot_f64(dout, at(&a->o, b, i, h), d_v);
    struct attention_drop drop = attention_drop_of(&a->drop, b, h);
    double lse = ((const double *)a->lse.data)[b * a->lse.stride[0] + h * a->lse.stride[1] + i];
    int64_t first = first_key(&a->doc_start, a->window, a->before, b, i, s), last = min_i64(s, a->k.dim[1] - 1);
    for (int64_t j = first; j <= last; j++) {
        const double *k = at(&a->k, b, j, g);
        double *dk = at(&a->dk, b, j, g), *dv = at(&a->dv, b, j, g);
        double p = exp(a->scale * dot_f64(q, k, d) - lse);
        double factor = attention_drop_factor(&drop, i, a->before + j);
        double ds = p * (factor * dot_f64(dout, at(&a->v, b, j, g), d_v) - delta) * a->scale;
        for (int64_t c = 0; c < d_v; c++)
            dv[c] += factor * p * dout[c];
        for (int64_t c = 0; c < d; c++) {
            dq[c] += ds * k[c];
            dk[c] += ds * q[c];
        }
    }
    if (present(&a->sink))
        ((double *)a->dsink.data)[h] -= exp(((const double *)a->sink.data)[h] - lse) * delta;
}

int attention_bwd_ref(struct lane *l, const struct attention_bwd_args *a)
{
    TRY(attention_bwd_check(a, l->err));
    clear(&a->dq);
    clear(&a->dk);
    clear(&a->dv);
    if (present(&a->sink) && !a->acc_dsink)
        clear(&a->dsink);
    for (int64_t b = 0; b < a->q.dim[0]; b++)
        for (int64_t h = 0; h < a->q.dim[2]; h++)
            for (int64_t i = 0; i < a->q.dim[1]; i++)
                bwd_row(a, b, h, i);
    return ST_OK;
}
