/* attention forward, fast CPU version; see attention.h and cpu_tile.h. One unit of work
 * is a block of queries of one head: units do not share anything, so threads do not change the
 * result. */
#include "ops/cpu_tile.h"
#include "ops/attention/attention_drop_int.h"
#include "ops/cpu_math.h"

#include <math.h>
#include <omp.h>

/* Smaller than any logit, yet finite, so that differences are finite too. */
static const float no_logit = -1e30f;

/* Up to this many queries a row at a time beats padding them to a panel of queries. */
enum { FEW_QUERIES = 6 };

struct scratch {
    float *q, *o;     /* transposed: [D][QUERY_BLOCK], [Dv][QUERY_BLOCK] */
    float *p;         /* [KEY_BLOCK][QUERY_BLOCK] */
    float *max, *sum; /* of the softmax, by query */
};

static int64_t scratch_floats(const struct attention_fwd_args *a)
{
    return QUERY_BLOCK * (a->q.dim[3] + a->v.dim[3] + KEY_BLOCK + 2) + 16;
}

int64_t CPU_NAME(attention_fwd_work_cpu)(const struct attention_fwd_args *a)
{
    if (a->q.dim[1] <= FEW_QUERIES && a->drop.p == 0)
        return 0;
    return omp_get_max_threads() * scratch_floats(a) * (int64_t)sizeof(float);
}

static float sink_of(const struct attention_fwd_args *a, int64_t head, bool *has)
{
    *has = present(&a->sink) || a->sink_zero;
    return present(&a->sink) ? ((const float *)a->sink.data)[head] : 0.0f;
}

_Static_assert((int)KEY_BLOCK <= (int)DROPOUT_RUN, "a block of keys has one run of random bits");

/* Scores of VL queries against the keys of a span become probabilities relative to the largest
 * score so far. Returns what to scale earlier sums and outputs by. Hidden keys weigh exactly
 * nothing, even where no key is visible yet. */
static vec softmax_lanes(const struct queries *q, struct scratch *s, int64_t lane, struct span keys, int64_t key)
{
    vec before = *(const vec *)(s->max + lane), top = before, sum = {0};
    for (int64_t k = keys.from; k < keys.to; k++) {
        vec *x = (vec *)(s->p + k * QUERY_BLOCK + lane);
        if (!keys.whole)
            *x = vec_choose(sees(q, lane, key + k), *x, (vec){0} + no_logit);
        top = vec_max(*x, top);
    }
    for (int64_t k = keys.from; k < keys.to; k++) {
        vec *x = (vec *)(s->p + k * QUERY_BLOCK + lane), p = vec_exp(*x - top);
        *x = keys.whole ? p : vec_choose(sees(q, lane, key + k), p, (vec){0});
        sum += *x;
    }
    vec shrink = vec_exp(before - top);
    *(vec *)(s->max + lane) = top;
    *(vec *)(s->sum + lane) = *(const vec *)(s->sum + lane) * shrink + sum;
    return shrink;
}

static void softmax_panel(const struct queries *q, struct scratch *s, int panel, struct span keys, int64_t key,
                          int64_t d_v)
{
    for (int64_t lane = panel * PANEL; lane < (panel + 1) * PANEL; lane += VL) {
        vec shrink = softmax_lanes(q, s, lane, keys, key);
        for (int64_t d = 0; d < d_v; d++)
            *(vec *)(s->o + d * QUERY_BLOCK + lane) *= shrink;
    }
}

static void finish_block(const struct attention_fwd_args *a, const struct queries *q, struct scratch *s, int64_t batch,
                         int64_t head)
{
    int64_t d_v = a->v.dim[3];
    float *lse = (float *)a->lse.data + batch * a->lse.stride[0] + head * a->lse.stride[1] + q->first;
    for (int64_t i = 0; i < q->count; i++) {
        bool any = s->sum[i] > 0 || isnan(s->sum[i]);
        lse[i] = any ? s->max[i] + logf(s->sum[i]) : -INFINITY;
        s->sum[i] = any ? 1.0f / s->sum[i] : 0.0f;
    }
    for (int64_t d = 0; d < d_v; d++) {
        float *o = s->o + d * QUERY_BLOCK;
#pragma omp simd
        for (int i = 0; i < QUERY_BLOCK; i++)
            o[i] *= s->sum[i];
    }
    transpose(head_at(&a->o, batch, q->first, head), a->o.stride[1], s->o, QUERY_BLOCK, d_v, q->count, 1.0f);
}

static void fwd_block(const struct attention_fwd_args *a, const struct mask *mask, int64_t batch, int64_t head,
                      int64_t block, float *memory)
{
    int64_t d = a->q.dim[3], d_v = a->v.dim[3], group = head / (a->q.dim[2] / a->k.dim[2]);
    struct scratch s = {.q = take(&memory, d * QUERY_BLOCK),
                        .o = take(&memory, d_v * QUERY_BLOCK),
                        .p = take(&memory, KEY_BLOCK * QUERY_BLOCK),
                        .max = take(&memory, QUERY_BLOCK),
                        .sum = take(&memory, QUERY_BLOCK)};
    struct queries q;
    queries_init(&q, mask, batch, block, a->q.dim[1]);
    struct attention_drop drop = attention_drop_of(&a->drop, batch, head);
    bool has_sink;
    float sink = sink_of(a, head, &has_sink);
    for (int64_t i = 0; i < QUERY_BLOCK; i++) {
        s.max[i] = has_sink ? sink : no_logit;
        s.sum[i] = has_sink ? 1.0f : 0.0f;
    }
    for (int64_t i = 0; i < d_v * QUERY_BLOCK; i++)
        s.o[i] = 0;
    for (int64_t i = 0; q.count < QUERY_BLOCK && i < d * QUERY_BLOCK; i++)
        s.q[i] = 0;
    transpose(s.q, QUERY_BLOCK, head_at(&a->q, batch, q.first, head), a->q.stride[1], q.count, d, (float)a->scale);

    int panels = (int)ceil_div(q.count, PANEL);
    for (int64_t key = q.low_min / KEY_BLOCK * KEY_BLOCK; key <= q.high_max; key += KEY_BLOCK) {
        int64_t n = min_i64(KEY_BLOCK, q.high_max + 1 - key);
        for (int panel = 0; panel < panels; panel++) {
            struct span keys = panel_span(&q, panel, key, n);
            if (keys.from >= keys.to)
                continue;
            float *p = s.p + keys.from * QUERY_BLOCK + panel * PANEL;
            multiply(&(struct product){.a = head_at(&a->k, batch, key + keys.from, group),
                                       .a_row = a->k.stride[1],
                                       .a_step = 1,
                                       .b = s.q + panel * PANEL,
                                       .b_row = QUERY_BLOCK,
                                       .out = p,
                                       .out_row = QUERY_BLOCK,
                                       .rows = keys.to - keys.from,
                                       .cols = PANEL,
                                       .depth = d});
            softmax_panel(&q, &s, panel, keys, key, d_v);
            if (drop.kept != 0)
                attention_drop_block(&drop, q.first + panel * PANEL, PANEL, a->before + key, keys.from, keys.to,
                                     s.p + panel * PANEL, QUERY_BLOCK);
            multiply(&(struct product){.a = head_at(&a->v, batch, key + keys.from, group),
                                       .a_row = 1,
                                       .a_step = a->v.stride[1],
                                       .b = p,
                                       .b_row = QUERY_BLOCK,
                                       .out = s.o + panel * PANEL,
                                       .out_row = QUERY_BLOCK,
                                       .rows = d_v,
                                       .cols = PANEL,
                                       .depth = keys.to - keys.from,
                                       .add = true});
        }
    }
    finish_block(a, &q, &s, batch, head);
}

/* Rows of one head lie far apart in a cache of many heads, where the processor does not guess the
 * next address: ask for it in time. */
enum { AHEAD = 8 };
static void fetch_row(const float *row, int64_t n)
{
    for (int64_t c = 0; c < n; c += 16)
        __builtin_prefetch(row + c);
}

/* One query by itself: decoding. Keys are taken in chunks that share one maximum. */
static void fwd_row(const struct attention_fwd_args *a, const struct mask *mask, int64_t batch, int64_t head, int64_t i)
{
    int64_t d = a->q.dim[3], d_v = a->v.dim[3], group = head / (a->q.dim[2] / a->k.dim[2]);
    int64_t at = mask->start + i, low = mask->window > 0 ? max_i64(0, at - mask->window + 1) : 0;
    if (present(mask->doc_start))
        low = max_i64(low,
                      ((const int32_t *)mask->doc_start->data + batch * mask->doc_start->stride[0])[i] - mask->before);
    at = min_i64(at, mask->keys - 1);
    const float *q = head_at(&a->q, batch, i, head);
    float *o = head_at(&a->o, batch, i, head), scale = (float)a->scale, p[KEY_BLOCK];
    bool has_sink;
    float sink = sink_of(a, head, &has_sink);
    float max = has_sink ? sink : no_logit, sum = has_sink ? 1.0f : 0.0f;
    for (int64_t c = 0; c < d_v; c++)
        o[c] = 0;
    for (int64_t key = low; key <= at; key += KEY_BLOCK) {
        int64_t n = min_i64(KEY_BLOCK, at + 1 - key);
        float top = max;
        for (int64_t j = 0; j < n; j++) {
            const float *k = head_at(&a->k, batch, key + j, group);
            float dot = 0;
            if (key + j + AHEAD <= at)
                fetch_row(head_at(&a->k, batch, key + j + AHEAD, group), d);
            fetch_row(head_at(&a->v, batch, key + j, group), d_v);
#pragma omp simd reduction(+ : dot)
            for (int64_t c = 0; c < d; c++)
                dot += q[c] * k[c];
            p[j] = dot * scale;
            top = p[j] > top ? p[j] : top;
        }
        float shrink = fast_expf(max - top);
        max = top;
        sum *= shrink;
        for (int64_t c = 0; c < d_v; c++)
            o[c] *= shrink;
#pragma omp simd
        for (int64_t j = 0; j < n; j++)
            p[j] = fast_expf(p[j] - top);
        for (int64_t j = 0; j < n; j++)
            sum += p[j];
        multiply(&(struct product){.a = p,
                                   .a_step = 1,
                                   .b = head_at(&a->v, batch, key, group),
                                   .b_row = a->v.stride[1],
                                   .out = o,
                                   .rows = 1,
                                   .cols = d_v,
                                   .depth = n,
                                   .add = true});
    }
    bool any = sum > 0 || isnan(sum);
    for (int64_t c = 0; c < d_v; c++)
        o[c] *= any ? 1.0f / sum : 0.0f;
    float *lse = (float *)a->lse.data + batch * a->lse.stride[0] + head * a->lse.stride[1];
    lse[i] = any ? max + logf(sum) : -INFINITY;
}

int CPU_NAME(attention_fwd_cpu)(struct lane *l, const struct attention_fwd_args *a)
{
    TRY(attention_fwd_check(a, l->err));
    int64_t start;
    TRY(attention_start(a, &start, l->err));
    TRY(check_work("attention_fwd", &a->work, CPU_NAME(attention_fwd_work_cpu)(a), l->err));
    struct mask mask = {
        .doc_start = &a->doc_start, .start = start, .window = a->window, .before = a->before, .keys = a->k.dim[1]};
    int64_t n_batch = a->q.dim[0], n = a->q.dim[1], heads = a->q.dim[2];
    if (n <= FEW_QUERIES && a->drop.p == 0) {
#pragma omp parallel for schedule(dynamic) if (n_batch * n * heads > 1)
        for (int64_t u = 0; u < n_batch * n * heads; u++)
            fwd_row(a, &mask, u / heads / n, u % heads, u / heads % n);
        return ST_OK;
    }
    int64_t blocks = ceil_div(n, QUERY_BLOCK), each = scratch_floats(a);
    /* Blocks of a head follow each other while its keys are in cache; late ones see the most keys
     * and go first, so that threads end together. */
#pragma omp parallel for schedule(dynamic)
    for (int64_t u = 0; u < n_batch * heads * blocks; u++) {
        float *mine = align_floats((float *)a->work.data + omp_get_thread_num() * each);
        fwd_block(a, &mask, u / (blocks * heads), u / blocks % heads, blocks - 1 - u % blocks, mine);
    }
    return ST_OK;
}
