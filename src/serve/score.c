/* The engine: text to ids, log-probabilities of all tokens of a sequence in few runs of a plan, one more token at a
 * time. */
#include "serve/serve_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- opening --------------------------------------------------------------------------------- */

int scorer_open(struct scorer *s, const struct config *cfg, const struct ckpt *from, int64_t length, struct err *e)
{
    *s = (struct scorer){.cfg = cfg, .length = length};
    TRY(tokenizer_for(cfg, &s->tok, e));
    TRY(token_encoder_open(&s->encoder, &s->tok, e));
    TRY(scorer_find_prefix(s, e));
    s->has_chat = cfg->data.chat[0] != '\0';
    if (s->has_chat)
        TRY(chat_for(cfg, &s->tok, &s->chat, e));
    TRY(mem_array((void **)&s->scratch, (size_t)cfg->model.vocab, sizeof *s->scratch, e));
    TRY(device_open(&s->dev, cfg, e));
    return generator_open(&s->g, cfg, &s->dev, from, (struct generator_size){.batch = 1, .tokens = length}, e);
}

void scorer_close(struct scorer *s)
{
    generator_close(&s->g);
    dev_close(&s->dev);
    token_encoder_close(s->encoder);
    chat_template_close(&s->chat);
    tokenizer_close(&s->tok);
    free(s->scratch);
    *s = (struct scorer){0};
}

/* ---- probabilities --------------------------------------------------------------------------- */

/* Keeps the best n_top, in order; an equal one that comes later stays behind. */
static void add_top(struct token_score *out, int n_top, int32_t id, double x)
{
    int at = out->n_top;
    if (at == n_top && x <= out->top[at - 1].logprob)
        return;
    if (at < n_top)
        out->n_top++;
    else
        at--;
    for (; at > 0 && out->top[at - 1].logprob < x; at--)
        out->top[at] = out->top[at - 1];
    out->top[at].id = id;
    out->top[at].logprob = x;
}

/* In double and in the order of ids, so that the same logits give the same number on any number of threads. The largest
 * logit and its own logarithm go through the same subtraction: a token that is the likeliest has exactly the best
 * alternative's value. */
static bool score_row(const struct tensor *row, int64_t vocab, int32_t id, int n_top, struct token_score *out)
{
    double most = -INFINITY, sum = 0;
    *out = (struct token_score){.n_top = 0};
    for (int64_t i = 0; i < vocab; i++) {
        double x = logit_at(row, i);
        most = x > most ? x : most;
        if (n_top > 0)
            add_top(out, n_top, (int32_t)i, x);
    }
    for (int64_t i = 0; i < vocab; i++)
        sum += exp(logit_at(row, i) - most);
    double norm = most + log(sum);
    out->logprob = logit_at(row, id) - norm;
    for (int i = 0; i < out->n_top; i++)
        out->top[i].logprob -= norm;
    return isfinite(out->logprob);
}

static int not_finite(int64_t position, struct err *e)
{
    err_set(e, ST_NONFINITE, "the model's logits at position %lld are not finite", (long long)position);
    return err_hint(
        e, "`braid ckpt verify` checks the file; plan.find_nan=on names the first step that makes such a value");
}

int scorer_score(const struct scorer *s, const struct tensor *row, int32_t id, int n_top, struct token_score *out,
                 struct err *e)
{
    return score_row(row, s->cfg->model.vocab, id, n_top, out) ? ST_OK : not_finite(s->g.pos - 1, e);
}

struct scoring {
    const struct scorer *s;
    const int32_t *ids;
    int64_t n, from;
    int n_top;
    struct token_score *scores;
};

/* Row r holds the logits of token r + 1. */
static int score_rows(void *ctx, int64_t first, const struct tensor *logits, struct err *e)
{
    const struct scoring *j = ctx;
    int64_t begin = max_i64(j->from - 1 - first, 0), end = min_i64(logits->dim[0], j->n - 1 - first), bad = -1;
#pragma omp parallel for schedule(static) reduction(max : bad)
    for (int64_t r = begin; r < end; r++) {
        struct tensor row = tensor_rows(logits, r, 1);
        int64_t i = first + r + 1;
        if (!score_row(&row, j->s->cfg->model.vocab, j->ids[i], j->n_top, &j->scores[i]))
            bad = i > bad ? i : bad;
    }
    return bad < 0 ? ST_OK : not_finite(bad, e);
}

int scorer_begin(struct scorer *s, const int32_t *ids, int64_t n, int64_t from, int n_top, struct token_score *scores,
                 struct tensor *last, struct err *e)
{
    struct scoring j = {.s = s, .ids = ids, .n = n, .from = from, .n_top = n_top, .scores = scores};
    if (n < 1)
        return err_set(e, ST_INVALID, "a sequence of no tokens cannot be continued");
    if (n > s->length)
        return err_set(e, ST_INVALID, "a sequence of %lld tokens is longer than the %lld that were planned for",
                       (long long)n, (long long)s->length);
    TRY(scorer_check_ids(s, ids, (size_t)n, e));
    if (scores != NULL && from == 0)
        scores[0] = (struct token_score){.logprob = NAN};
    generator_rewind(&s->g);
    return generator_feed_all(&s->g, ids, n, scores != NULL ? score_rows : NULL, &j, last, e);
}

int scorer_continue(struct scorer *s, int32_t id, struct tensor *last, struct err *e)
{
    return generator_feed(&s->g, &id, 1, last, e);
}
