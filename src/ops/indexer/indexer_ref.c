/* indexer, reference; see indexer.h. Row by row, in double. */
#include "ops/indexer/indexer_int.h"
#include "ops/ops_ref_int.h"
#include "ops/sparse/sparse.h"

#include <math.h>
#include <stdlib.h>

static double *head_at(const struct tensor *t, int64_t b, int64_t i, int64_t h)
{
    return (double *)t->data + b * t->stride[0] + i * t->stride[1] + h * t->stride[2];
}
static double *row_at(const struct tensor *t, int64_t b, int64_t i)
{
    return (double *)t->data + b * t->stride[0] + i * t->stride[1];
}

/* I of one query and key. */
static double score(const struct tensor *q, const struct tensor *k, const struct tensor *w, bool relu, int64_t b,
                    int64_t i, int64_t j)
{
    double sum = 0;
    for (int64_t h = 0; h < q->dim[2]; h++) {
        double z = dot_f64(head_at(q, b, i, h), row_at(k, b, j), q->dim[3]);
        sum += row_at(w, b, i)[h] * (relu && z < 0 ? 0 : z);
    }
    return sum;
}

/* ---- selection ------------------------------------------------------------------------------- */

struct scored {
    double score;
    int64_t key;
};

static int by_score(const void *a, const void *b)
{
    const struct scored *x = a, *y = b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x->key < y->key ? -1 : 1;
}

static int by_key(const void *a, const void *b)
{
    const struct scored *x = a, *y = b;
    return x->key < y->key ? -1 : 1;
}

int64_t index_topk_work_ref(const struct index_topk_args *a) { return a->k.dim[1] * (int64_t)sizeof(struct scored); }

int index_topk_ref(struct lane *l, const struct index_topk_args *a)
{
    TRY(index_topk_check(a, l->err));
    TRY(check_work("index_topk", &a->work, index_topk_work_ref(a), l->err));
    struct scored *all = a->work.data;
    int64_t start = index_start(&a->start);
    for (int64_t r = 0; r < a->q.dim[0] * a->q.dim[1]; r++) {
        int64_t b = r / a->q.dim[1], i = r % a->q.dim[1], n = 0;
        int32_t *idx = (int32_t *)a->idx.data + r * a->topk;
        struct index_range seen = index_seen(&a->doc_start, a->ratio, a->k.dim[1], b, i, start + i);
        for (int64_t j = seen.first; j < seen.end; j++) {
            double x = score(&a->q, &a->k, &a->w, a->relu, b, i, j);
            all[n++] = (struct scored){isnan(x) ? -INFINITY : x, j};
        }
        int64_t kept = min_i64(n, a->topk);
        qsort(all, (size_t)n, sizeof *all, by_score);
        qsort(all, (size_t)kept, sizeof *all, by_key);
        for (int64_t k = 0; k < a->topk; k++)
            idx[k] = k < kept ? (int32_t)all[k].key : -1;
    }
    return ST_OK;
}

/* ---- loss ------------------------------------------------------------------------------------ */

/* What attention weights are made of, whichever op asks. */
struct attended {
    const struct tensor *mq, *mk, *lse; /* lse absent: that of the row's own keys counts */
    double scale;
};

/* Attention weights of all heads of a row, added up: p, and their sum. s: room for the scores of a head. */
static double add_heads(const struct attended *a, const struct index_row *r, int64_t b, int64_t i, double *p, double *s)
{
    int64_t heads = a->mq->dim[2], per_group = heads / max_i64(1, a->mk->dim[2]);
    double total = 0;
    for (int64_t n = 0; n < r->count; n++)
        p[n] = 0;
    for (int64_t h = 0; h < heads; h++) {
        double top = -INFINITY, lse = 0;
        for (int64_t n = 0; n < r->count; n++) {
            int64_t j = index_key(r, n);
            s[n] =
                j < 0 ? -INFINITY
                      : a->scale * dot_f64(head_at(a->mq, b, i, h), head_at(a->mk, b, j, h / per_group), a->mq->dim[3]);
            top = fmax(top, s[n]);
        }
        if (present(a->lse))
            lse = row_at(a->lse, b, h)[i];
        else {
            for (int64_t n = 0; n < r->count; n++)
                lse += s[n] > -INFINITY ? exp(s[n] - top) : 0;
            lse = top + log(lse);
        }
        for (int64_t n = 0; n < r->count; n++)
            p[n] += s[n] > -INFINITY ? exp(s[n] - lse) : 0;
    }
    for (int64_t n = 0; n < r->count; n++)
        total += p[n];
    return total;
}

/* The same made to sum to 1. */
static void target(const struct index_loss_args *a, const struct index_row *r, int64_t b, int64_t i, double *p,
                   double *s)
{
    struct attended of = {&a->mq, &a->mk, &a->lse, a->softmax_scale};
    double total = add_heads(&of, r, b, i, p, s);
    for (int64_t n = 0; n < r->count; n++)
        p[n] = total > 0 ? p[n] / total : p[n];
}

/* How often row r counts; see index_share(). */
static double share_of(const struct index_loss_args *a, int64_t r)
{
    const double *mass = a->mass.data;
    int64_t rows = a->q.dim[0] * a->q.dim[1], ranks = present(&a->mass) ? a->mass.dim[0] : 0;
    double all = 0;
    for (int64_t k = 0; k < ranks; k++)
        all += mass[k * rows + r];
    return all == 0 ? 1 : mass[a->rank * rows + r] / all * (double)ranks;
}

/* The loss of a row; s becomes softmax(score_scale I) - p, the gradient of it by score_scale I. */
static double row_loss(const struct index_loss_args *a, const struct index_row *r, int64_t b, int64_t i,
                       const double *p, double *s)
{
    double top = -INFINITY, sum = 0, loss = 0;
    for (int64_t n = 0; n < r->count; n++) {
        int64_t j = index_key(r, n);
        s[n] = j < 0 ? -INFINITY : a->score_scale * score(&a->q, &a->k, &a->w, a->relu, b, i, j);
        top = fmax(top, s[n]);
    }
    for (int64_t n = 0; n < r->count; n++)
        sum += index_key(r, n) >= 0 ? exp(s[n] - top) : 0;
    for (int64_t n = 0; n < r->count; n++) {
        if (index_key(r, n) < 0) {
            s[n] = 0;
            continue;
        }
        double lp = s[n] - top - log(sum);
        loss += p[n] != 0 ? p[n] * (log(p[n]) - lp) : 0;
        s[n] = exp(lp) - p[n];
    }
    return loss;
}

static void row_gradient(const struct index_loss_args *a, const struct index_row *r, int64_t b, int64_t i,
                         const double *ds, double factor)
{
    for (int64_t h = 0; h < a->q.dim[2]; h++) {
        const double *q = head_at(&a->q, b, i, h);
        double *dq = head_at(&a->dq, b, i, h), *dw = row_at(&a->dw, b, i) + h, w = row_at(&a->w, b, i)[h];
        *dw = 0;
        for (int64_t c = 0; c < a->q.dim[3]; c++)
            dq[c] = 0;
        for (int64_t n = 0; n < r->count; n++) {
            int64_t j = index_key(r, n);
            if (j < 0)
                continue;
            double *dk = row_at(&a->dk, b, j), z = dot_f64(q, row_at(&a->k, b, j), a->q.dim[3]), di = factor * ds[n];
            if (a->relu && z < 0)
                continue;
            *dw += di * z;
            for (int64_t c = 0; c < a->q.dim[3]; c++) {
                dq[c] += di * w * row_at(&a->k, b, j)[c];
                dk[c] += di * w * q[c];
            }
        }
    }
}

int64_t index_loss_work_ref(const struct index_loss_args *a)
{
    return 2 * index_most(&a->idx, a->k.dim[1]) * (int64_t)sizeof(double);
}

int index_loss_ref(struct lane *l, const struct index_loss_args *a)
{
    TRY(index_loss_check(a, l->err));
    if (present(&a->idx))
        TRY(sparse_check_list("index_loss", &a->idx, a->k.dim[1], l->err));
    TRY(check_work("index_loss", &a->work, index_loss_work_ref(a), l->err));
    double *p = a->work.data, *s = p + index_most(&a->idx, a->k.dim[1]), total = 0;
    int64_t rows = a->q.dim[0] * a->q.dim[1], start = index_start(&a->start);
    for (int64_t r = 0; present(&a->dk) && r < rows_of(&a->dk); r++)
        for (int64_t c = 0; c < cols_of(&a->dk); c++)
            f64_row(&a->dk, r)[c] = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t b = r / a->q.dim[1], i = r % a->q.dim[1];
        struct index_row row = index_row_of(&a->idx, &a->doc_start, start, a->ratio, a->k.dim[1], b, i);
        target(a, &row, b, i, p, s);
        double share = share_of(a, r), kl = share * row_loss(a, &row, b, i, p, s);
        total += kl;
        if (present(&a->kl))
            ((double *)a->kl.data)[r] = kl;
        if (present(&a->dq))
            row_gradient(a, &row, b, i, s,
                         share * ((const double *)a->scale.data)[0] * a->coeff * a->score_scale / (double)rows);
    }
    if (present(&a->loss)) {
        double *loss = a->loss.data;
        *loss = (a->acc_loss ? *loss : 0) + (rows > 0 ? a->coeff * total / (double)rows : 0);
    }
    return ST_OK;
}

int64_t index_mass_work_ref(const struct index_mass_args *a)
{
    return 2 * index_most(&a->idx, a->mk.dim[1]) * (int64_t)sizeof(double);
}

int index_mass_ref(struct lane *l, const struct index_mass_args *a)
{
    TRY(index_mass_check(a, l->err));
    if (present(&a->idx))
        TRY(sparse_check_list("index_mass", &a->idx, a->mk.dim[1], l->err));
    TRY(check_work("index_mass", &a->work, index_mass_work_ref(a), l->err));
    struct attended of = {&a->mq, &a->mk, &a->lse, a->softmax_scale};
    double *p = a->work.data, *s = p + index_most(&a->idx, a->mk.dim[1]);
    int64_t start = index_start(&a->start);
    for (int64_t r = 0; r < tensor_elems(&a->mass); r++) {
        int64_t b = r / a->mq.dim[1], i = r % a->mq.dim[1];
        struct index_row row = index_row_of(&a->idx, &a->doc_start, start, a->ratio, a->mk.dim[1], b, i);
        ((double *)a->mass.data)[r] = add_heads(&of, &row, b, i, p, s);
    }
    return ST_OK;
}

/* ---- recall ---------------------------------------------------------------------------------- */

/* The share of one head's attention that the list keeps. */
static double kept_share(const struct index_recall_args *a, int64_t b, int64_t i, int64_t h)
{
    int64_t start = index_start(&a->start);
    struct index_row all = index_row_of(&(struct tensor){0}, &a->doc_start, start, a->ratio, a->mk.dim[1], b, i);
    struct index_row list = index_row_of(&a->idx, &a->doc_start, start, a->ratio, a->mk.dim[1], b, i);
    int64_t g = h / (a->mq.dim[2] / a->mk.dim[2]);
    const double *q = head_at(&a->mq, b, i, h);
    double top = -INFINITY, sum = 0, kept = 0;
    for (int64_t n = 0; n < all.count; n++)
        top = fmax(top, a->softmax_scale * dot_f64(q, head_at(&a->mk, b, all.first + n, g), a->mq.dim[3]));
    for (int64_t n = 0; n < all.count; n++)
        sum += exp(a->softmax_scale * dot_f64(q, head_at(&a->mk, b, all.first + n, g), a->mq.dim[3]) - top);
    for (int64_t n = 0; n < list.count; n++)
        if (list.list[n] >= 0)
            kept += exp(a->softmax_scale * dot_f64(q, head_at(&a->mk, b, list.list[n], g), a->mq.dim[3]) - top);
    return all.count > 0 ? kept / sum : 1;
}

int index_recall_ref(struct lane *l, const struct index_recall_args *a)
{
    TRY(index_recall_check(a, l->err));
    TRY(sparse_check_list("index_recall", &a->idx, a->mk.dim[1], l->err));
    int64_t n = index_sampled(a->mq.dim[1], a->every), heads = a->mq.dim[2];
    double sum = 0, *recall = a->recall.data;
    for (int64_t b = 0; b < a->mq.dim[0]; b++)
        for (int64_t r = 0; r < n; r++)
            for (int64_t h = 0; h < heads; h++)
                sum += kept_share(a, b, index_sample_row(a->mq.dim[1], a->every, r), h);
    double count = (double)(a->mq.dim[0] * n * heads);
    *recall = (a->acc_recall ? *recall : 0) + (count > 0 ? sum / count : 0);
    return ST_OK;
}
