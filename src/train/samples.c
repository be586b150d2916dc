/* Text at evaluations; see samples_int.h. The decode plans share parameters and activation memory
 * with training, so a sample costs its caches and nothing else, and `braid plan` shows them. */
#include "train/samples_int.h"

#include <stdlib.h>
#include <string.h>

enum { AT_ONCE = 16 }; /* tokens of a prompt in one run: each needs a row of logits, beside what training needs */

struct samples {
    struct generator g; /* without plans where there are several ranks */
    int32_t *prompt;
    size_t n_prompt;
    struct candidate *scratch;
    bool ready; /* prompt and scratch are there */
    bool off;   /* something failed, and was noted */
};

static bool alone(const struct trainer *t) { return t->model.mesh.world == 1 && t->model.mesh.vpp == 1; }

int samples_plan(struct trainer *t, struct err *e)
{
    if (t->cfg->run.sample_tokens == 0)
        return ST_OK;
    TRY(mem_array((void **)&t->samples, 1, sizeof *t->samples, e));
    struct generator_size size = {.batch = 1, .tokens = t->cfg->train.seq, .at_once = AT_ONCE};
    return alone(t) ? generator_plan(&t->samples->g, &t->model, size, e) : ST_OK;
}

int samples_bind(struct trainer *t, struct err *e)
{
    return t->samples != NULL && alone(t) ? generator_bind(&t->samples->g, e) : ST_OK;
}

void samples_release(struct trainer *t)
{
    if (t->samples == NULL)
        return;
    generator_close(&t->samples->g);
    free(t->samples->prompt);
    free(t->samples->scratch);
    free(t->samples);
    t->samples = NULL;
}

static int prepare(struct trainer *t, struct samples *s, struct err *e)
{
    const char *prompt = t->cfg->generate.prompt[0] ? t->cfg->generate.prompt : "\n";
    struct token_ids ids = {0};
    if (s->ready)
        return ST_OK;
    if (t->model.mesh.world > 1)
        return err_set(e, ST_UNSUPPORTED, "run.sample_tokens needs a run on one rank, and there are %d",
                       t->model.mesh.world);
    if (!alone(t))
        return err_set(e, ST_UNSUPPORTED,
                       "run.sample_tokens needs a run without virtual stages, and parallel.vpp is %d",
                       t->model.mesh.vpp);
    TRY(mem_array((void **)&s->scratch, (size_t)t->cfg->model.vocab, sizeof *s->scratch, e));
    int st = tokenizer_encode(&t->tok, prompt, strlen(prompt), TOKEN_SPECIAL | TOKEN_TEMPLATE, &ids, e);
    s->prompt = ids.ids;
    s->n_prompt = ids.n;
    TRY(st);
    if ((int64_t)s->n_prompt >= s->g.cache_len)
        return err_set(e, ST_INVALID, "the prompt has %zu tokens, but a sequence has train.seq = %lld", s->n_prompt,
                       (long long)t->cfg->train.seq);
    for (size_t i = 0; i < s->n_prompt; i++)
        if (s->prompt[i] < 0 || s->prompt[i] >= t->cfg->model.vocab)
            return err_set(e, ST_INVALID, "the prompt needs token %d, but the model has a vocabulary of %lld",
                           (int)s->prompt[i], (long long)t->cfg->model.vocab);
    s->ready = true;
    return ST_OK;
}

/* A zero byte would end the text, and a page has no use for the others. */
static bool is_control(uint8_t byte) { return (byte < ' ' && byte != '\n' && byte != '\t') || byte == 0x7f; }

static int write_text(struct trainer *t, struct samples *s, struct buf *text, struct err *e)
{
    const struct config_generate *o = &t->cfg->generate;
    struct sampler sampler = {
        .temperature = o->temperature, .top_k = o->top_k, .top_p = o->top_p, .seed = (uint64_t)o->seed};
    struct tensor logits;
    TRY(prepare(t, s, e));
    generator_rewind(&s->g);
    buf_add(text, o->prompt);
    TRY(generator_feed(&s->g, s->prompt, (int64_t)s->n_prompt, &logits, e));
    int64_t tokens = min_i64(t->cfg->run.sample_tokens, s->g.cache_len - (int64_t)s->n_prompt);
    for (int64_t i = 0; i < tokens; i++) {
        uint8_t bytes[1024];
        size_t n;
        int32_t id = sample_token(&sampler, &logits, t->cfg->model.vocab, (uint64_t)i, s->scratch);
        if (id == t->tok.eod)
            break;
        TRY(tokenizer_decode(&t->tok, id, bytes, sizeof bytes, &n, e));
        for (size_t k = 0; k < n && k < sizeof bytes; k++)
            buf_add_n(text, is_control(bytes[k]) ? "?" : (const char *)&bytes[k], 1);
        if (i + 1 < tokens)
            TRY(generator_feed(&s->g, &id, 1, &logits, e));
    }
    return buf_check(text, e);
}

void samples_write(struct trainer *t)
{
    struct samples *s = t->samples;
    struct err e = {0};
    struct buf text;
    if (s == NULL || s->off || t->log == NULL)
        return;
    buf_init(&text, 0);
    buf_add(&text, "");
    if (write_text(t, s, &text, &e) == ST_OK) {
        log_sample(t->log, t->step, text.text);
    } else {
        s->off = true;
        log_event(t->log, LOG_NOTE, t->step, "no text is written by this run: %s", e.msg);
    }
    buf_release(&text);
}
