/* Generating text: prefill and decode plans over shared caches, and sampling. */
#include "train/train.h"

#include <math.h>
#include <stdlib.h>

enum { PREFILL = 32 }; /* most prompt tokens per run of the prefill plan; the rest go one by one */

int generator_plan(struct generator *g, struct model *m, int64_t max_tokens, struct err *e)
{
    int64_t at_once = min_i64(PREFILL, max_tokens);
    struct model_plan_opts prefill = {.name = "prefill", .mode = BUILD_DECODE, .batch = 1, .seq = at_once, .cache_len = max_tokens};
    struct model_plan_opts decode = {.name = "decode", .mode = BUILD_DECODE, .batch = 1, .seq = 1, .cache_len = max_tokens};
    g->model = m;
    exec_init(&g->exec, m->dev);
    plan_options(&g->exec, m->cfg);
    TRY(model_plan_build(m, &g->prefill, &prefill, e));
    return model_plan_build(m, &g->decode, &decode, e);
}

int generator_bind(struct generator *g, struct err *e)
{
    TRY(plan_bind(&g->prefill.p, &g->model->mem, e));
    TRY(plan_bind(&g->decode.p, &g->model->mem, e));
    TRY(exec_prepare(&g->exec, &g->prefill.p, e));
    TRY(exec_prepare(&g->exec, &g->decode.p, e));
    return mem_array((void **)&g->positions, PREFILL, sizeof *g->positions, e);
}

int generator_open(struct generator *g, const struct config *cfg, struct dev *dev, const struct ckpt *from, int64_t max_tokens,
                   struct err *e)
{
    *g = (struct generator){0};
    TRY(model_init(&g->own, cfg, dev, e));
    TRY(generator_plan(g, &g->own, max_tokens, e));
    TRY(model_commit(&g->own, NULL, 0, e));
    TRY(generator_bind(g, e));
    return from ? load_params(&g->own, from, e) : model_init_params(&g->own, e);
}

void generator_close(struct generator *g)
{
    if (g->model != NULL)
        dev_fetched(g->model->dev, &g->last);
    exec_release(&g->exec);
    model_plan_release(&g->prefill);
    model_plan_release(&g->decode);
    model_release(&g->own);
    free(g->positions);
    *g = (struct generator){0};
}

void generator_rewind(struct generator *g) { g->pos = 0; }

int generator_feed(struct generator *g, const int32_t *tokens, int64_t n, struct tensor *logits, struct err *e)
{
    if (g->pos + n > g->decode.cache_len)
        return err_set(e, ST_INVALID, "the cache holds %lld tokens, %lld more do not fit", (long long)g->decode.cache_len, (long long)n);
    for (int64_t done = 0; done < n;) {
        struct model_plan *mp = n - done >= g->prefill.seq ? &g->prefill : &g->decode;
        for (int64_t i = 0; i < mp->seq; i++)
            g->positions[i] = (int32_t)(g->pos + i);
        struct run_info run = {.tokens = tokens + done, .pos = g->positions, .start = g->pos, .first_mb = true};
        TRY(exec_run(&g->exec, &mp->p, &run, e));
        g->pos += mp->seq;
        done += mp->seq;
        struct tensor all = model_slot(g->model, mp, mp->logits), last = tensor_rows(&all, mp->seq - 1, 1);
        dev_fetched(g->model->dev, &g->last);
        TRY(dev_fetch(g->model->dev, &last, &g->last, e));
        *logits = g->last;
    }
    return ST_OK;
}

/* ---- sampling ------------------------------------------------------------------------------------------------- */

static int by_probability(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->p != y->p)
        return x->p < y->p ? 1 : -1;
    return x->id - y->id;
}

int sample_token(const struct sampler *s, const struct tensor *logits, int64_t vocab, uint64_t n, struct candidate *scratch)
{
    int64_t best = 0;
    for (int64_t i = 0; i < vocab; i++) {
        scratch[i] = (struct candidate){.p = tensor_get(logits, i), .id = (int)i};
        if (scratch[i].p > scratch[best].p)
            best = i;
    }
    if (s->temperature <= 0)
        return (int)best;
    double top = scratch[best].p, sum = 0, kept = 0;
    for (int64_t i = 0; i < vocab; i++)
        sum += scratch[i].p = exp((scratch[i].p - top) / s->temperature);
    qsort(scratch, (size_t)vocab, sizeof *scratch, by_probability);
    int64_t k = s->top_k > 0 ? min_i64(s->top_k, vocab) : vocab, used = 0;
    while (used < k && (used == 0 || kept < s->top_p * sum))
        kept += scratch[used++].p;
    double u = rng_uniform(rng_key(s->seed, "sample"), n) * kept;
    for (int64_t i = 0; i < used; i++) {
        u -= scratch[i].p;
        if (u <= 0)
            return scratch[i].id;
    }
    return scratch[used - 1].id;
}
