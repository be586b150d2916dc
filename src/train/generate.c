/* Generating text: plans of several lengths over shared caches, and sampling. */
#include "train/train.h"

#include <math.h>
#include <stdlib.h>

static const int64_t lengths[GENERATOR_PLANS] = {256, 64, 16, 4, 1};

int generator_plan(struct generator *g, struct model *m, int64_t max_tokens, int64_t at_once, struct err *e)
{
    g->model = m;
    g->cache_len = max_tokens;
    exec_init(&g->exec, m->dev);
    plan_options(&g->exec, m->cfg);
    for (int i = 0; i < GENERATOR_PLANS; i++) {
        struct model_plan_opts o = {.name = lengths[i] > 1 ? "prefill" : "decode",
                                    .mode = BUILD_DECODE,
                                    .batch = 1,
                                    .seq = lengths[i],
                                    .cache_len = max_tokens};
        if (lengths[i] <= max_i64(min_i64(max_tokens, at_once), 1))
            TRY(model_plan_build(m, &g->plans[g->n_plans++], &o, e));
    }
    return ST_OK;
}

int generator_bind(struct generator *g, struct err *e)
{
    for (int i = 0; i < g->n_plans; i++) {
        TRY(plan_bind(&g->plans[i].p, &g->model->mem, e));
        TRY(exec_prepare(&g->exec, &g->plans[i].p, e));
    }
    return mem_array((void **)&g->positions, (size_t)g->plans[0].seq, sizeof *g->positions, e);
}

int generator_open(struct generator *g, const struct config *cfg, struct dev *dev, const struct ckpt *from,
                   int64_t max_tokens, struct err *e)
{
    *g = (struct generator){0};
    TRY(model_init(&g->own, cfg, dev, e));
    TRY(generator_plan(g, &g->own, max_tokens, lengths[0], e));
    TRY(model_commit(&g->own, NULL, 0, e));
    TRY(generator_bind(g, e));
    return from ? load_params(&g->own, from, e) : model_init_params(&g->own, e);
}

void generator_close(struct generator *g)
{
    if (g->model != NULL)
        dev_fetched(g->model->dev, &g->host);
    exec_release(&g->exec);
    for (int i = 0; i < g->n_plans; i++)
        model_plan_release(&g->plans[i]);
    model_release(&g->own);
    free(g->positions);
    *g = (struct generator){0};
}

void generator_rewind(struct generator *g) { g->pos = 0; }

/* The longest plan that fits takes the next tokens; *logits are all of its rows, on the device. */
static int run_some(struct generator *g, const int32_t *tokens, int64_t n, int64_t *taken, struct tensor *logits,
                    struct err *e)
{
    struct model_plan *mp = g->plans;
    while (mp->seq > n)
        mp++;
    if (g->check != NULL)
        TRY(g->check(g->check_ctx, e));
    for (int64_t i = 0; i < mp->seq; i++)
        g->positions[i] = (int32_t)(g->pos + i);
    struct run_info run = {.tokens = tokens, .pos = g->positions, .start = g->pos, .first_mb = true};
    TRY(exec_run(&g->exec, &mp->p, &run, e));
    g->pos += mp->seq;
    *taken = mp->seq;
    *logits = model_slot(g->model, mp, mp->logits);
    return ST_OK;
}

int generator_feed_all(struct generator *g, const int32_t *tokens, int64_t n, logits_fn fn, void *ctx,
                       struct tensor *last, struct err *e)
{
    if (g->pos + n > g->cache_len)
        return err_set(e, ST_INVALID, "the cache holds %lld tokens, %lld more do not fit", (long long)g->cache_len,
                       (long long)n);
    for (int64_t done = 0, taken; done < n; done += taken) {
        struct tensor rows;
        TRY(run_some(g, tokens + done, n - done, &taken, &rows, e));
        if (fn == NULL && done + taken < n)
            continue;
        if (fn == NULL)
            rows = tensor_rows(&rows, taken - 1, 1);
        dev_fetched(g->model->dev, &g->host);
        TRY(dev_fetch(g->model->dev, &rows, &g->host, e));
        if (fn != NULL)
            TRY(fn(ctx, done, &g->host, e));
        *last = tensor_rows(&g->host, g->host.dim[0] - 1, 1);
    }
    return ST_OK;
}

int generator_feed(struct generator *g, const int32_t *tokens, int64_t n, struct tensor *logits, struct err *e)
{
    return generator_feed_all(g, tokens, n, NULL, NULL, logits, e);
}

/* ---- sampling -------------------------------------------------------------------------------- */

/* Likelier ones first, equal ones by id: no two candidates are equal. */
static bool comes_before(const struct candidate *x, const struct candidate *y)
{
    return x->p != y->p ? x->p > y->p : x->id < y->id;
}

static int by_probability(const void *a, const void *b) { return comes_before(a, b) ? -1 : 1; }

/* Quickselect: moves the n candidates that come first to the front, in any order. */
static void select_first(struct candidate *c, int64_t all, int64_t n)
{
    int64_t low = 0, high = all - 1;
    while (low < high) {
        struct candidate pivot = c[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (comes_before(&c[i], &pivot))
                i++;
            while (comes_before(&pivot, &c[j]))
                j--;
            if (i > j)
                break;
            struct candidate swap = c[i];
            c[i++] = c[j];
            c[j--] = swap;
        }
        if (n - 1 <= j)
            high = j;
        else if (n - 1 >= i)
            low = i;
        else
            return;
    }
}

/* Candidates of which the first `sorted` are the best, in order. */
struct ordering {
    struct candidate *c;
    int64_t n, sorted;
};

/* Puts as many in order as are needed to see candidate i: a few dozen at first, then eight times as many. */
static const struct candidate *best(struct ordering *o, int64_t i)
{
    while (o->sorted <= i) {
        int64_t from = o->sorted, to = min_i64(max_i64(64, 8 * from), o->n);
        select_first(o->c + from, o->n - from, to - from);
        qsort(o->c + from, (size_t)(to - from), sizeof *o->c, by_probability);
        o->sorted = to;
    }
    return &o->c[i];
}

int sample_token(const struct sampler *s, const struct tensor *logits, int64_t vocab, uint64_t n,
                 struct candidate *scratch)
{
    int64_t likeliest = 0;
    for (int64_t i = 0; i < vocab; i++) {
        scratch[i] = (struct candidate){.p = tensor_get(logits, i), .id = (int)i};
        if (scratch[i].p > scratch[likeliest].p)
            likeliest = i;
    }
    if (s->temperature <= 0)
        return (int)likeliest;
    double top = scratch[likeliest].p, sum = 0, kept = 0;
    for (int64_t i = 0; i < vocab; i++)
        sum += scratch[i].p = exp((scratch[i].p - top) / s->temperature);
    struct ordering order = {.c = scratch, .n = vocab};
    int64_t k = s->top_k > 0 ? min_i64(s->top_k, vocab) : vocab, used = 0;
    if (k == vocab && s->top_p >= 1) { /* all of them: what they have together is known without an order */
        used = vocab;
        kept = sum;
    }
    while (used < k && (used == 0 || kept < s->top_p * sum))
        kept += best(&order, used++)->p;
    double u = rng_uniform(rng_key(s->seed, "sample"), n) * kept;
    for (int64_t i = 0; i < used; i++) {
        u -= best(&order, i)->p;
        if (u <= 0)
            return scratch[i].id;
    }
    return best(&order, used - 1)->id;
}
