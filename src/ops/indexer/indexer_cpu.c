/* indexer, fast CPU version; see indexer.h. Queries in parallel. Selection is by the order of whole numbers: a score's
 * bits, mapped so that a larger score is a smaller number, above the key's index. */
#include "ops/cpu_math.h"
#include "ops/indexer/indexer_int.h"
#include "ops/ops_cpu_int.h"
#include "ops/sparse/sparse.h"

#include <math.h>
#include <omp.h>
#include <string.h>

static float *head_at(const struct tensor *t, int64_t b, int64_t i, int64_t h)
{
    return (float *)t->data + b * t->stride[0] + i * t->stride[1] + h * t->stride[2];
}
static float *row_at(const struct tensor *t, int64_t b, int64_t i)
{
    return (float *)t->data + b * t->stride[0] + i * t->stride[1];
}

static float score(const struct tensor *q, const struct tensor *k, const struct tensor *w, bool relu, int64_t b,
                   int64_t i, int64_t j)
{
    float sum = 0;
    for (int64_t h = 0; h < q->dim[2]; h++) {
        float z = dot_f32(head_at(q, b, i, h), row_at(k, b, j), q->dim[3]);
        sum += row_at(w, b, i)[h] * (relu && z < 0 ? 0 : z);
    }
    return sum;
}

/* ---- selection ------------------------------------------------------------------------------- */

/* Smaller for larger scores, then for smaller keys; all differ. */
static uint64_t rank_of(float score, int64_t key)
{
    uint32_t bits;
    score = isnan(score) ? -INFINITY : score + 0.0f; /* -0 counts as 0 */
    memcpy(&bits, &score, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u; /* ascending as numbers are */
    return (uint64_t)~bits << 32 | (uint64_t)key;
}

/* The n-th smallest (from 0) of count different numbers, which are put in another order. */
static uint64_t nth_smallest(uint64_t *x, int64_t count, int64_t n)
{
    int64_t low = 0, high = count - 1;
    while (low < high) {
        uint64_t pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] < pivot)
                i++;
            while (x[j] > pivot)
                j--;
            if (i <= j) {
                uint64_t swap = x[i];
                x[i++] = x[j];
                x[j--] = swap;
            }
        }
        if (n <= j)
            high = j;
        else if (n >= i)
            low = i;
        else
            return x[n];
    }
    return x[n];
}

int64_t CPU_NAME(index_topk_work_cpu)(const struct index_topk_args *a)
{
    return omp_get_max_threads() * 2 * a->k.dim[1] * (int64_t)sizeof(uint64_t);
}

static void select_row(const struct index_topk_args *a, int64_t start, int64_t r, uint64_t *rank)
{
    int64_t b = r / a->q.dim[1], i = r % a->q.dim[1], kept = 0;
    struct index_range seen = index_seen(&a->doc_start, a->ratio, a->k.dim[1], b, i, start + i);
    int64_t first = seen.first, n = max_i64(0, seen.end - first);
    int32_t *idx = (int32_t *)a->idx.data + r * a->topk;
    uint64_t last = UINT64_MAX, *copy = rank + a->k.dim[1];
    if (n > a->topk) {
        for (int64_t j = 0; j < n; j++)
            rank[j] = rank_of(score(&a->q, &a->k, &a->w, a->relu, b, i, first + j), first + j);
        memcpy(copy, rank, (size_t)n * sizeof *rank);
        last = a->topk > 0 ? nth_smallest(copy, n, a->topk - 1) : 0;
    }
    for (int64_t j = 0; j < n && kept < a->topk; j++)
        if (n <= a->topk || rank[j] <= last)
            idx[kept++] = (int32_t)(first + j);
    while (kept < a->topk)
        idx[kept++] = -1;
}

int CPU_NAME(index_topk_cpu)(struct lane *l, const struct index_topk_args *a)
{
    TRY(index_topk_check(a, l->err));
    TRY(check_work("index_topk", &a->work, CPU_NAME(index_topk_work_cpu)(a), l->err));
    int64_t rows = a->q.dim[0] * a->q.dim[1], start = index_start(&a->start);
#pragma omp parallel for schedule(static, 1)
    for (int64_t r = 0; r < rows; r++)
        select_row(a, start, r, (uint64_t *)a->work.data + omp_get_thread_num() * 2 * a->k.dim[1]);
    return ST_OK;
}

/* ---- loss ------------------------------------------------------------------------------------ */

/* Rows whose additions to dk are held at once: a number of shapes alone. */
static int64_t block_rows(const struct index_loss_args *a)
{
    enum { MOST_FLOATS = 1 << 22, MOST_ROWS = 64 };
    int64_t row = index_most(&a->idx, a->k.dim[1]) * a->k.dim[2];
    return min_i64(MOST_ROWS, max_i64(1, MOST_FLOATS / max_i64(1, row)));
}
static int64_t thread_floats(const struct index_loss_args *a) { return 2 * index_most(&a->idx, a->k.dim[1]); }

int64_t CPU_NAME(index_loss_work_cpu)(const struct index_loss_args *a)
{
    int64_t row = index_most(&a->idx, a->k.dim[1]) * a->k.dim[2], rows = a->q.dim[0] * a->q.dim[1];
    return (omp_get_max_threads() * thread_floats(a) + block_rows(a) * row + rows) * (int64_t)sizeof(float);
}

/* What attention weights are made of, whichever op asks. */
struct attended {
    const struct tensor *mq, *mk, *lse; /* lse absent: that of the row's own keys counts */
    float scale;
};

/* Attention weights of all heads of a row, added up: p, and their sum. s: room for the scores of a head. */
static float add_heads(const struct attended *a, const struct index_row *r, int64_t b, int64_t i, float *p, float *s)
{
    int64_t heads = a->mq->dim[2], per_group = heads / max_i64(1, a->mk->dim[2]);
    float total = 0;
    memset(p, 0, (size_t)r->count * sizeof *p);
    for (int64_t h = 0; h < heads; h++) {
        float top = -INFINITY, lse = 0;
        for (int64_t n = 0; n < r->count; n++) {
            int64_t j = index_key(r, n);
            s[n] =
                j < 0 ? -INFINITY
                      : a->scale * dot_f32(head_at(a->mq, b, i, h), head_at(a->mk, b, j, h / per_group), a->mq->dim[3]);
            top = s[n] > top || isnan(s[n]) ? s[n] : top;
        }
        if (present(a->lse)) {
            lse = row_at(a->lse, b, h)[i];
        } else {
            for (int64_t n = 0; n < r->count; n++)
                lse += s[n] == -INFINITY ? 0 : fast_expf(s[n] - top);
            lse = top + logf(lse);
        }
        for (int64_t n = 0; n < r->count; n++)
            p[n] += s[n] == -INFINITY ? 0 : fast_expf(s[n] - lse);
    }
    for (int64_t n = 0; n < r->count; n++)
        total += p[n];
    return total;
}

/* The same made to sum to 1. */
static void target(const struct index_loss_args *a, const struct index_row *r, int64_t b, int64_t i, float *p, float *s)
{
    struct attended of = {&a->mq, &a->mk, &a->lse, (float)a->softmax_scale};
    float total = add_heads(&of, r, b, i, p, s);
    for (int64_t n = 0; n < r->count; n++)
        p[n] = total == 0 ? p[n] : p[n] / total;
}

static float row_loss(const struct index_loss_args *a, const struct index_row *r, int64_t b, int64_t i, const float *p,
                      float *s)
{
    float top = -INFINITY, sum = 0, loss = 0;
    for (int64_t n = 0; n < r->count; n++) {
        int64_t j = index_key(r, n);
        s[n] = j < 0 ? -INFINITY : (float)a->score_scale * score(&a->q, &a->k, &a->w, a->relu, b, i, j);
        top = s[n] > top || isnan(s[n]) ? s[n] : top;
    }
    for (int64_t n = 0; n < r->count; n++)
        sum += s[n] == -INFINITY ? 0 : fast_expf(s[n] - top);
    float log_sum = logf(sum);
    for (int64_t n = 0; n < r->count; n++) {
        if (index_key(r, n) < 0) {
            s[n] = 0;
            continue;
        }
        float lp = s[n] - top - log_sum;
        loss += p[n] == 0 ? 0 : p[n] * (logf(p[n]) - lp);
        s[n] = fast_expf(lp) - p[n];
    }
    return loss;
}

/* dq and dw of a row, and what the row adds to each of its keys: add[n][c]. */
static void row_gradient(const struct index_loss_args *a, const struct index_row *r, int64_t b, int64_t i,
                         const float *ds, float factor, float *add)
{
    int64_t heads = a->q.dim[2], d = a->q.dim[3];
    memset(row_at(&a->dw, b, i), 0, (size_t)heads * sizeof(float));
    for (int64_t h = 0; h < heads; h++)
        memset(head_at(&a->dq, b, i, h), 0, (size_t)d * sizeof(float));
    for (int64_t n = 0; n < r->count; n++) {
        int64_t j = index_key(r, n);
        if (j < 0)
            continue;
        const float *k = row_at(&a->k, b, j);
        memset(add + n * d, 0, (size_t)d * sizeof *add);
        for (int64_t h = 0; h < heads; h++) {
            const float *q = head_at(&a->q, b, i, h);
            float z = dot_f32(q, k, d), di = factor * ds[n], by_w = di * row_at(&a->w, b, i)[h];
            if (a->relu && z < 0)
                continue;
            row_at(&a->dw, b, i)[h] += di * z;
            add_scaled_f32(head_at(&a->dq, b, i, h), k, by_w, d);
            add_scaled_f32(add + n * d, q, by_w, d);
        }
    }
}

static void one_row(const struct index_loss_args *a, int64_t r, float *kl, float *scratch, float *add)
{
    int64_t b = r / a->q.dim[1], i = r % a->q.dim[1];
    struct index_row row = index_row_of(&a->idx, &a->doc_start, index_start(&a->start), a->ratio, a->k.dim[1], b, i);
    float *p = scratch, *s = p + index_most(&a->idx, a->k.dim[1]);
    target(a, &row, b, i, p, s);
    float share =
        index_share(a->mass.data, a->q.dim[0] * a->q.dim[1], present(&a->mass) ? a->mass.dim[0] : 0, a->rank, r);
    kl[r] = share * row_loss(a, &row, b, i, p, s);
    if (present(&a->dq)) {
        double scale = (double)share * ((const double *)a->scale.data)[0] * a->coeff * a->score_scale;
        row_gradient(a, &row, b, i, s, (float)(scale / (double)(a->q.dim[0] * a->q.dim[1])), add);
    }
}

/* Channels [from, to) of what a block of rows adds to dk, rows in order. */
static void add_block(const struct index_loss_args *a, int64_t b, int64_t first, int64_t count, const float *add,
                      int64_t from, int64_t to)
{
    int64_t d = a->q.dim[3], most = index_most(&a->idx, a->k.dim[1]), start = index_start(&a->start);
    for (int64_t i = 0; i < count; i++) {
        struct index_row row = index_row_of(&a->idx, &a->doc_start, start, a->ratio, a->k.dim[1], b, first + i);
        for (int64_t n = 0; n < row.count; n++)
            if (index_key(&row, n) >= 0)
                add_scaled_f32(row_at(&a->dk, b, index_key(&row, n)) + from, add + (i * most + n) * d + from, 1,
                               to - from);
    }
}

int CPU_NAME(index_loss_cpu)(struct lane *l, const struct index_loss_args *a)
{
    TRY(index_loss_check(a, l->err));
    if (present(&a->idx))
        TRY(sparse_check_list("index_loss", &a->idx, a->k.dim[1], l->err));
    TRY(check_work("index_loss", &a->work, CPU_NAME(index_loss_work_cpu)(a), l->err));
    enum { CHANNELS = 16 };
    int64_t seq = a->q.dim[1], rows = a->q.dim[0] * seq, d = a->q.dim[3], block = block_rows(a);
    int64_t row = index_most(&a->idx, a->k.dim[1]) * d, each = thread_floats(a);
    float *kl = a->work.data, *add = kl + rows, *mine = add + block * row;
    for (int64_t r = 0; present(&a->dk) && r < rows_of(&a->dk); r++)
        memset(f32_row(&a->dk, r), 0, (size_t)d * sizeof(float));
    for (int64_t b = 0; b < a->q.dim[0]; b++)
        for (int64_t first = 0; first < seq; first += block) {
            int64_t count = min_i64(block, seq - first);
#pragma omp parallel for schedule(static, 1)
            for (int64_t i = 0; i < count; i++)
                one_row(a, b * seq + first + i, kl, mine + omp_get_thread_num() * each, add + i * row);
            if (!present(&a->dk))
                continue;
#pragma omp parallel for schedule(static)
            for (int64_t c = 0; c < ceil_div(d, CHANNELS); c++)
                add_block(a, b, first, count, add, c * CHANNELS, min_i64(d, (c + 1) * CHANNELS));
        }
    double total = 0;
    for (int64_t r = 0; r < rows; r++)
        total += (double)kl[r];
    if (present(&a->kl))
        memcpy(a->kl.data, kl, (size_t)rows * sizeof *kl);
    if (present(&a->loss)) {
        double *loss = a->loss.data;
        *loss = (a->acc_loss ? *loss : 0) + (rows > 0 ? a->coeff * total / (double)rows : 0);
    }
    return ST_OK;
}

int64_t CPU_NAME(index_mass_work_cpu)(const struct index_mass_args *a)
{
    return omp_get_max_threads() * 2 * index_most(&a->idx, a->mk.dim[1]) * (int64_t)sizeof(float);
}

int CPU_NAME(index_mass_cpu)(struct lane *l, const struct index_mass_args *a)
{
    TRY(index_mass_check(a, l->err));
    if (present(&a->idx))
        TRY(sparse_check_list("index_mass", &a->idx, a->mk.dim[1], l->err));
    TRY(check_work("index_mass", &a->work, CPU_NAME(index_mass_work_cpu)(a), l->err));
    struct attended of = {&a->mq, &a->mk, &a->lse, (float)a->softmax_scale};
    int64_t most = index_most(&a->idx, a->mk.dim[1]), start = index_start(&a->start);
#pragma omp parallel for schedule(static, 1)
    for (int64_t r = 0; r < tensor_elems(&a->mass); r++) {
        int64_t b = r / a->mq.dim[1], i = r % a->mq.dim[1];
        struct index_row row = index_row_of(&a->idx, &a->doc_start, start, a->ratio, a->mk.dim[1], b, i);
        float *p = (float *)a->work.data + omp_get_thread_num() * 2 * most;
        ((float *)a->mass.data)[r] = add_heads(&of, &row, b, i, p, p + most);
    }
    return ST_OK;
}

/* ---- recall ---------------------------------------------------------------------------------- */

int64_t CPU_NAME(index_recall_work_cpu)(const struct index_recall_args *a)
{
    int64_t rows = a->mq.dim[0] * index_sampled(a->mq.dim[1], a->every);
    return rows * a->mq.dim[2] * (int64_t)sizeof(double);
}

static double kept_share(const struct index_recall_args *a, int64_t b, int64_t i, int64_t h)
{
    int64_t start = index_start(&a->start);
    struct index_row all = index_row_of(&(struct tensor){0}, &a->doc_start, start, a->ratio, a->mk.dim[1], b, i);
    struct index_row list = index_row_of(&a->idx, &a->doc_start, start, a->ratio, a->mk.dim[1], b, i);
    int64_t g = h / (a->mq.dim[2] / a->mk.dim[2]), d = a->mq.dim[3];
    const float *q = head_at(&a->mq, b, i, h);
    float top = -INFINITY;
    double sum = 0, kept = 0;
    for (int64_t n = 0; n < all.count; n++) {
        float s = (float)a->softmax_scale * dot_f32(q, head_at(&a->mk, b, all.first + n, g), d);
        sum = s > top ? sum * (double)fast_expf(top - s) + 1 : sum + (double)fast_expf(s - top);
        top = s > top ? s : top;
    }
    for (int64_t n = 0; n < list.count; n++)
        if (list.list[n] >= 0)
            kept +=
                (double)fast_expf((float)a->softmax_scale * dot_f32(q, head_at(&a->mk, b, list.list[n], g), d) - top);
    return all.count > 0 ? kept / sum : 1;
}

int CPU_NAME(index_recall_cpu)(struct lane *l, const struct index_recall_args *a)
{
    TRY(index_recall_check(a, l->err));
    TRY(sparse_check_list("index_recall", &a->idx, a->mk.dim[1], l->err));
    TRY(check_work("index_recall", &a->work, CPU_NAME(index_recall_work_cpu)(a), l->err));
    int64_t n = index_sampled(a->mq.dim[1], a->every), heads = a->mq.dim[2], all = a->mq.dim[0] * n * heads;
    double *share = a->work.data, sum = 0, *recall = a->recall.data;
#pragma omp parallel for schedule(dynamic)
    for (int64_t u = 0; u < all; u++)
        share[u] = kept_share(a, u / heads / n, index_sample_row(a->mq.dim[1], a->every, u / heads % n), u % heads);
    for (int64_t u = 0; u < all; u++)
        sum += share[u];
    *recall = (a->acc_recall ? *recall : 0) + (all > 0 ? sum / (double)all : 0);
    return ST_OK;
}
