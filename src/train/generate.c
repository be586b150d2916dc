/* Generating text: plans of several lengths over shared caches, and sampling. */
#include "train/train.h"

#include <math.h>
#include <stdlib.h>

static const int64_t lengths[GENERATOR_PLANS] = {256, 64, 16, 4, 1};

int generator_plan(struct generator *g, struct model *m, struct generator_size size, struct err *e)
{
    int64_t most = (size.at_once > 0 ? size.at_once : lengths[0]) / size.batch;
    g->model = m;
    g->batch = size.batch;
    g->cache_len = size.tokens;
    exec_init(&g->exec, m->dev);
    plan_options(&g->exec, m->cfg);
    for (int i = 0; i < GENERATOR_PLANS; i++) {
        struct model_plan_opts o = {.name = lengths[i] > 1 ? "prefill" : "decode",
                                    .mode = BUILD_DECODE,
                                    .batch = size.batch,
                                    .seq = lengths[i],
                                    .cache_len = size.tokens};
        if (lengths[i] <= max_i64(min_i64(size.tokens, most), 1))
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
    size_t rows = (size_t)(g->batch * g->plans[0].seq);
    struct tensor logits = model_slot(g->model, &g->plans[0], g->plans[0].logits);
    g->last = tensor_2d(NULL, logits.dtype, g->batch, logits.dim[1]);
    TRY(mem_array((void **)&g->positions, rows, sizeof *g->positions, e));
    TRY(mem_array((void **)&g->tokens, rows, sizeof *g->tokens, e));
    return mem_aligned(&g->last.data, (size_t)tensor_bytes(&g->last), DEV_ALIGN, e);
}

int generator_open(struct generator *g, const struct config *cfg, struct dev *dev, const struct ckpt *from,
                   struct generator_size size, struct err *e)
{
    *g = (struct generator){0};
    TRY(model_init(&g->own, cfg, dev, e));
    TRY(generator_plan(g, &g->own, size, e));
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
    free(g->tokens);
    free(g->last.data);
    *g = (struct generator){0};
}

void generator_rewind(struct generator *g) { g->pos = 0; }

/* The longest plan that fits takes the next tokens of every sequence, of which there are n more, `step` apart;
 * *logits are all of its rows, on the device. */
static int run_some(struct generator *g, const int32_t *tokens, int64_t n, int64_t step, int64_t *taken,
                    struct tensor *logits, struct err *e)
{
    struct model_plan *mp = g->plans;
    while (mp->seq > n)
        mp++;
    if (g->check != NULL)
        TRY(g->check(g->check_ctx, e));
    for (int64_t b = 0; b < g->batch; b++)
        for (int64_t i = 0; i < mp->seq; i++) {
            g->tokens[b * mp->seq + i] = tokens[b * step + i];
            g->positions[b * mp->seq + i] = (int32_t)(g->pos + i);
        }
    struct run_info run = {.tokens = g->tokens, .pos = g->positions, .start = g->pos, .first_mb = true};
    TRY(exec_run(&g->exec, &mp->p, &run, e));
    g->pos += mp->seq;
    *taken = mp->seq;
    *logits = model_slot(g->model, mp, mp->logits);
    return ST_OK;
}

static int check_room(const struct generator *g, int64_t n, struct err *e)
{
    if (g->pos + n > g->cache_len)
        return err_set(e, ST_INVALID, "the cache holds %lld tokens, %lld more do not fit", (long long)g->cache_len,
                       (long long)n);
    return ST_OK;
}

int generator_feed_all(struct generator *g, const int32_t *tokens, int64_t n, logits_fn fn, void *ctx,
                       struct tensor *last, struct err *e)
{
    if (fn == NULL)
        return generator_feed(g, tokens, n, last, e);
    if (g->batch != 1)
        return err_set(e, ST_INTERNAL, "the logits of %lld sequences side by side are not shown row by row",
                       (long long)g->batch);
    TRY(check_room(g, n, e));
    for (int64_t done = 0, taken; done < n; done += taken) {
        struct tensor rows;
        TRY(run_some(g, tokens + done, n - done, n, &taken, &rows, e));
        dev_fetched(g->model->dev, &g->host);
        TRY(dev_fetch(g->model->dev, &rows, &g->host, e));
        TRY(fn(ctx, done, &g->host, e));
        *last = tensor_rows(&g->host, g->host.dim[0] - 1, 1);
    }
    return ST_OK;
}

/* Rows of single tokens are those of all sequences; of longer runs each sequence has its last row elsewhere. */
static int take_last(struct generator *g, const struct tensor *rows, int64_t seq, struct err *e)
{
    struct dev *d = g->model->dev;
    int64_t n = seq == 1 ? g->batch : 1;
    for (int64_t b = 0; b < g->batch; b += n) {
        struct tensor from = tensor_rows(rows, (b + 1) * seq - 1, n), to = tensor_rows(&g->last, b, n);
        TRY(d->vt->copy_out(d, to.data, from.data, tensor_bytes(&to), e));
    }
    return ST_OK;
}

int generator_feed(struct generator *g, const int32_t *tokens, int64_t n, struct tensor *logits, struct err *e)
{
    struct tensor rows = {0};
    int64_t taken = 0;
    TRY(check_room(g, n, e));
    for (int64_t done = 0; done < n; done += taken)
        TRY(run_some(g, tokens + done, n - done, n, &taken, &rows, e));
    if (!tensor_is_dense(&rows))
        return err_set(e, ST_INTERNAL, "the logits of a plan for text are not dense");
    *logits = g->last;
    return n > 0 ? take_last(g, &rows, taken, e) : ST_OK;
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

static int64_t likeliest_token(const struct tensor *logits, int64_t vocab)
{
    int64_t best = 0;
    double most = logit_at(logits, 0);
    for (int64_t i = 1; i < vocab; i++) {
        double x = logit_at(logits, i);
        if (x > most) {
            most = x;
            best = i;
        }
    }
    return best;
}

int sample_token(const struct sampler *s, const struct tensor *logits, int64_t vocab, uint64_t n,
                 struct candidate *scratch)
{
    int64_t likeliest = likeliest_token(logits, vocab);
    if (s->temperature <= 0)
        return (int)likeliest;
    for (int64_t i = 0; i < vocab; i++)
        scratch[i] = (struct candidate){.p = logit_at(logits, i), .id = (int)i};
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
