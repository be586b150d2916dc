/* attention backward, fast CPU version; see attention.h and cpu_tile.h.
 *
 * A step is one block of queries of one head against one block of keys: recompute p, then ds, then
 * add to dv, dk (in place) and dq (transposed, in scratch). With enough kv heads a unit of work is
 * one kv head and every step is done once. With fewer kv heads than threads there are two passes,
 * one by key block for dk and dv, one by query block for dq: 7 products instead of 5, but no lack
 * of units. Each sum has the same order in both, so the choice may follow the number of threads. */
#include "ops/cpu_tile.h"
#include "ops/attention/attention_drop_int.h"

#include <math.h>
#include <omp.h>

struct scratch {
    float *q, *dout, *dq; /* transposed: [D][QUERY_BLOCK], [Dv][..], [D][..] */
    float *p, *ds;        /* [KEY_BLOCK][QUERY_BLOCK] */
    float *lse, *delta;   /* by query */
};

static int64_t scratch_floats(const struct attention_bwd_args *a)
{
    return QUERY_BLOCK * (2 * a->q.dim[3] + a->v.dim[3] + 2 * KEY_BLOCK + 2) + 16;
}

static int64_t query_blocks(const struct attention_bwd_args *a) { return ceil_div(a->q.dim[1], QUERY_BLOCK); }

/* Each query block leaves its part of dsink here: [B][H][query blocks]. */
static int64_t sink_floats(const struct attention_bwd_args *a)
{
    return a->sink.rank == 0 ? 0 : round_up(a->q.dim[0] * a->q.dim[2] * query_blocks(a), 16);
}

int64_t CPU_NAME(attention_bwd_work_cpu)(const struct attention_bwd_args *a)
{
    return (omp_get_max_threads() * scratch_floats(a) + sink_floats(a)) * (int64_t)sizeof(float);
}

/* One block of queries of one head, ready to meet keys. */
struct step {
    const struct attention_bwd_args *a;
    struct queries q;
    struct scratch s;
    struct attention_drop drop;
    int64_t batch, head, group;
};

static void step_begin(struct step *t, const struct mask *mask, int64_t block, float *sink_part)
{
    const struct attention_bwd_args *a = t->a;
    struct scratch *s = &t->s;
    int64_t d = a->q.dim[3], d_v = a->v.dim[3];
    queries_init(&t->q, mask, t->batch, block, a->q.dim[1]);
    int64_t first = t->q.first, count = t->q.count;
    const float *lse = (const float *)a->lse.data + t->batch * a->lse.stride[0] + t->head * a->lse.stride[1];
    float sink = present(&a->sink) ? ((const float *)a->sink.data)[t->head] : 0.0f;
    double sink_sum = 0;
    for (int64_t i = 0; i < QUERY_BLOCK; i++) {
        s->lse[i] = i < count ? lse[first + i] : 0.0f;
        s->delta[i] = 0;
        if (i >= count)
            continue;
        const float *dout = head_at(&a->d_o, t->batch, first + i, t->head);
        const float *o = head_at(&a->o, t->batch, first + i, t->head);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < d_v; c++)
            sum += dout[c] * o[c];
        s->delta[i] = sum;
        if (sink_part != NULL)
            sink_sum -= exp((double)sink - (double)s->lse[i]) * (double)sum;
    }
    if (sink_part != NULL)
        *sink_part = (float)sink_sum;
    if (count < QUERY_BLOCK) {
        for (int64_t i = 0; i < d * QUERY_BLOCK; i++)
            s->q[i] = 0;
        for (int64_t i = 0; i < d_v * QUERY_BLOCK; i++)
            s->dout[i] = 0;
    }
    transpose(s->q, QUERY_BLOCK, head_at(&a->q, t->batch, first, t->head), a->q.stride[1], count, d, (float)a->scale);
    transpose(s->dout, QUERY_BLOCK, head_at(&a->d_o, t->batch, first, t->head), a->d_o.stride[1], count, d_v, 1.0f);
}

/* p = exp(score - lse), ds = p * (dp - delta) * scale, both 0 where the mask hides the key. */
static void probabilities(struct step *t, int panel, struct span keys, int64_t key)
{
    float scale = (float)t->a->scale;
    for (int64_t lane = panel * PANEL; lane < (panel + 1) * PANEL; lane += VL) {
        vec lse = *(const vec *)(t->s.lse + lane), delta = *(const vec *)(t->s.delta + lane);
        for (int64_t k = keys.from; k < keys.to; k++) {
            vec *x = (vec *)(t->s.p + k * QUERY_BLOCK + lane), *ds = (vec *)(t->s.ds + k * QUERY_BLOCK + lane);
            vec p = vec_exp(*x - lse);
            if (!keys.whole)
                p = vec_choose(sees(&t->q, lane, key + k), p, (vec){0});
            *x = p;
            *ds = p * (*ds - delta) * scale;
        }
    }
}

/* dk and dv of the keys in `keys` from queries [first, first + n) of the block. */
static void add_keys(struct step *t, struct span keys, int64_t key, int64_t first, int64_t n)
{
    const struct attention_bwd_args *a = t->a;
    int64_t at = keys.from * QUERY_BLOCK + first, row = key + keys.from;
    multiply(&(struct product){.a = t->s.p + at,
                               .a_row = QUERY_BLOCK,
                               .a_step = 1,
                               .b = head_at(&a->d_o, t->batch, t->q.first + first, t->head),
                               .b_row = a->d_o.stride[1],
                               .out = head_at(&a->dv, t->batch, row, t->group),
                               .out_row = a->dv.stride[1],
                               .rows = keys.to - keys.from,
                               .cols = a->v.dim[3],
                               .depth = n,
                               .add = true});
    multiply(&(struct product){.a = t->s.ds + at,
                               .a_row = QUERY_BLOCK,
                               .a_step = 1,
                               .b = head_at(&a->q, t->batch, t->q.first + first, t->head),
                               .b_row = a->q.stride[1],
                               .out = head_at(&a->dk, t->batch, row, t->group),
                               .out_row = a->dk.stride[1],
                               .rows = keys.to - keys.from,
                               .cols = a->q.dim[3],
                               .depth = n,
                               .add = true});
}

static void step_keys(struct step *t, int64_t key, bool want_kv, bool want_q)
{
    const struct attention_bwd_args *a = t->a;
    int64_t d = a->q.dim[3], d_v = a->v.dim[3], n = min_i64(KEY_BLOCK, a->k.dim[1] - key);
    int panels = (int)ceil_div(t->q.count, PANEL);
    struct span spans[PANELS];
    for (int panel = 0; panel < panels; panel++) {
        struct span keys = spans[panel] = panel_span(&t->q, panel, key, n);
        if (keys.from >= keys.to)
            continue;
        int64_t at = keys.from * QUERY_BLOCK + panel * PANEL, rows = keys.to - keys.from;
        const float *k = head_at(&a->k, t->batch, key + keys.from, t->group);
        multiply(&(struct product){.a = k,
                                   .a_row = a->k.stride[1],
                                   .a_step = 1,
                                   .b = t->s.q + panel * PANEL,
                                   .b_row = QUERY_BLOCK,
                                   .out = t->s.p + at,
                                   .out_row = QUERY_BLOCK,
                                   .rows = rows,
                                   .cols = PANEL,
                                   .depth = d});
        multiply(&(struct product){.a = head_at(&a->v, t->batch, key + keys.from, t->group),
                                   .a_row = a->v.stride[1],
                                   .a_step = 1,
                                   .b = t->s.dout + panel * PANEL,
                                   .b_row = QUERY_BLOCK,
                                   .out = t->s.ds + at,
                                   .out_row = QUERY_BLOCK,
                                   .rows = rows,
                                   .cols = PANEL,
                                   .depth = d_v});
        if (t->drop.kept != 0)
            attention_drop_block(&t->drop, t->q.first + panel * PANEL, PANEL, a->before + key, keys.from, keys.to,
                                 t->s.ds + panel * PANEL, QUERY_BLOCK);
        probabilities(t, panel, keys, key);
        if (t->drop.kept != 0)
            attention_drop_block(&t->drop, t->q.first + panel * PANEL, PANEL, a->before + key, keys.from, keys.to,
                                 t->s.p + panel * PANEL, QUERY_BLOCK);
        if (want_q)
            multiply(&(struct product){.a = k,
                                       .a_row = 1,
                                       .a_step = a->k.stride[1],
                                       .b = t->s.ds + at,
                                       .b_row = QUERY_BLOCK,
                                       .out = t->s.dq + panel * PANEL,
                                       .out_row = QUERY_BLOCK,
                                       .rows = d,
                                       .cols = PANEL,
                                       .depth = rows,
                                       .add = true});
    }
    /* Panels that need the same keys go together: fewer loads and stores of dk and dv. */
    for (int panel = 0, next; want_kv && panel < panels; panel = next) {
        for (next = panel + 1;
             next < panels && spans[next].from == spans[panel].from && spans[next].to == spans[panel].to;)
            next++;
        if (spans[panel].from < spans[panel].to)
            add_keys(t, spans[panel], key, panel * PANEL, min_i64(t->q.count, next * PANEL) - panel * PANEL);
    }
}

static void clear_keys(const struct attention_bwd_args *a, int64_t batch, int64_t group, int64_t from, int64_t to)
{
    for (int64_t j = from; j < to; j++) {
        float *dk = head_at(&a->dk, batch, j, group), *dv = head_at(&a->dv, batch, j, group);
        for (int64_t c = 0; c < a->q.dim[3]; c++)
            dk[c] = 0;
        for (int64_t c = 0; c < a->v.dim[3]; c++)
            dv[c] = 0;
    }
}

static struct step new_step(const struct attention_bwd_args *a, int64_t batch, int64_t head, float *memory)
{
    int64_t d = a->q.dim[3], d_v = a->v.dim[3];
    struct scratch s = {.q = take(&memory, d * QUERY_BLOCK),
                        .dout = take(&memory, d_v * QUERY_BLOCK),
                        .dq = take(&memory, d * QUERY_BLOCK),
                        .p = take(&memory, KEY_BLOCK * QUERY_BLOCK),
                        .ds = take(&memory, KEY_BLOCK * QUERY_BLOCK),
                        .lse = take(&memory, QUERY_BLOCK),
                        .delta = take(&memory, QUERY_BLOCK)};
    return (struct step){.a = a,
                         .s = s,
                         .drop = attention_drop_of(&a->drop, batch, head),
                         .batch = batch,
                         .head = head,
                         .group = head / (a->q.dim[2] / a->k.dim[2])};
}

/* All keys of one block of queries: dq, and dk and dv too if wanted. */
static void query_pass(const struct attention_bwd_args *a, const struct mask *mask, int64_t batch, int64_t head,
                       int64_t block, bool want_kv, float *memory, float *sink_parts)
{
    struct step t = new_step(a, batch, head, memory);
    int64_t d = a->q.dim[3];
    float *part = sink_parts == NULL ? NULL : sink_parts + (batch * a->q.dim[2] + head) * query_blocks(a) + block;
    step_begin(&t, mask, block, part);
    for (int64_t i = 0; i < d * QUERY_BLOCK; i++)
        t.s.dq[i] = 0;
    for (int64_t key = t.q.low_min / KEY_BLOCK * KEY_BLOCK; key <= t.q.high_max; key += KEY_BLOCK)
        step_keys(&t, key, want_kv, true);
    transpose(head_at(&a->dq, batch, t.q.first, head), a->dq.stride[1], t.s.dq, QUERY_BLOCK, d, t.q.count, 1.0f);
}

/* All queries that see one block of keys: dk and dv. */
static void key_pass(const struct attention_bwd_args *a, const struct mask *mask, int64_t batch, int64_t group,
                     int64_t key, float *memory)
{
    int64_t share = a->q.dim[2] / a->k.dim[2], last = min_i64(a->k.dim[1], key + KEY_BLOCK) - 1;
    clear_keys(a, batch, group, key, last + 1);
    for (int64_t head = group * share; head < (group + 1) * share; head++) {
        struct step t = new_step(a, batch, head, memory);
        for (int64_t block = max_i64(0, key - mask->start) / QUERY_BLOCK; block < query_blocks(a); block++) {
            if (mask->window > 0 && mask->start + block * QUERY_BLOCK - mask->window + 1 > last)
                break;
            step_begin(&t, mask, block, NULL);
            if (t.q.low_min <= last && t.q.high_max >= key)
                step_keys(&t, key, true, false);
        }
    }
}

static void sum_sink(const struct attention_bwd_args *a, const float *parts)
{
    int64_t heads = a->q.dim[2], blocks = query_blocks(a);
    float *dsink = a->dsink.data;
    for (int64_t h = 0; h < heads; h++) {
        double sum = a->acc_dsink ? (double)dsink[h] : 0;
        for (int64_t b = 0; b < a->q.dim[0]; b++)
            for (int64_t i = 0; i < blocks; i++)
                sum += (double)parts[(b * heads + h) * blocks + i];
        dsink[h] = (float)sum;
    }
}

int CPU_NAME(attention_bwd_cpu)(struct lane *l, const struct attention_bwd_args *a)
{
    TRY(attention_bwd_check(a, l->err));
    TRY(check_work("attention_bwd", &a->work, CPU_NAME(attention_bwd_work_cpu)(a), l->err));
    int64_t n_batch = a->q.dim[0], heads = a->q.dim[2], groups = a->k.dim[2], n_keys = a->k.dim[1];
    int64_t blocks = query_blocks(a), key_blocks = ceil_div(n_keys, KEY_BLOCK), share = heads / max_i64(1, groups);
    int64_t each = scratch_floats(a);
    struct mask mask = {.doc_start = &a->doc_start,
                        .start = n_keys + a->after - a->q.dim[1],
                        .window = a->window,
                        .before = a->before,
                        .keys = n_keys};
    float *memory = a->work.data, *sinks = present(&a->sink) ? memory + omp_get_max_threads() * each : NULL;
    if (n_batch * groups >= omp_get_max_threads()) {
#pragma omp parallel for schedule(dynamic)
        for (int64_t u = 0; u < n_batch * groups; u++) {
            float *mine = align_floats(memory + omp_get_thread_num() * each);
            int64_t batch = u / groups, group = u % groups;
            clear_keys(a, batch, group, 0, n_keys);
            for (int64_t i = 0; i < share * blocks; i++)
                query_pass(a, &mask, batch, group * share + i / blocks, i % blocks, true, mine, sinks);
        }
    } else {
#pragma omp parallel for schedule(dynamic)
        for (int64_t u = 0; u < n_batch * heads * blocks; u++) {
            float *mine = align_floats(memory + omp_get_thread_num() * each);
            query_pass(a, &mask, u / (blocks * heads), u / blocks % heads, blocks - 1 - u % blocks, false, mine, sinks);
        }
#pragma omp parallel for schedule(dynamic)
        for (int64_t u = 0; u < n_batch * groups * key_blocks; u++) {
            float *mine = align_floats(memory + omp_get_thread_num() * each);
            key_pass(a, &mask, u / (key_blocks * groups), u / key_blocks % groups, u % key_blocks * KEY_BLOCK, mine);
        }
    }
    if (present(&a->sink))
        sum_sink(a, sinks);
    return ST_OK;
}
