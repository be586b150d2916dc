/* Running a completions request, and its answer as JSON. */
#include "serve/serve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE_BYTES = 65536 };

/* ---- one prompt ------------------------------------------------------------------------------ */

struct choice {
    struct token_ids ids;       /* the prompt, then what was made */
    size_t n_prompt, first;     /* first: the first token that is shown */
    struct token_score *scores; /* NULL: not asked for */
    size_t *offset;             /* of each token in text, in bytes; from `first` on */
    struct buf text;
    size_t text_made; /* where new text begins in it */
    int64_t n_made;   /* tokens drawn, also those that are not shown */
    bool stopped;
};

static void choice_release(struct choice *c)
{
    free(c->ids.ids);
    free(c->scores);
    free(c->offset);
    buf_release(&c->text);
}

/* Bytes of a token in text: none for special tokens; ids that the tokenizer does not know appear as numbers. */
static void add_piece(const struct scorer *s, int32_t id, struct buf *out)
{
    uint8_t bytes[PIECE_BYTES];
    size_t n = 0;
    struct err unknown = {0};
    if (tokenizer_name(&s->tok, id, &n) != NULL && token_is_special(&s->tok, id))
        return;
    if (tokenizer_decode(&s->tok, id, bytes, sizeof bytes, &n, &unknown) == ST_OK)
        buf_add_n(out, bytes, n < sizeof bytes ? n : sizeof bytes);
    else
        buf_addf(out, "<%d>", (int)id);
}

static void show_token(const struct scorer *s, struct choice *c, size_t i)
{
    c->offset[i] = c->text.len;
    add_piece(s, c->ids.ids[i], &c->text);
}

/* Cuts the text before the first stop text, and drops the tokens behind it. Only the end of the text is new. */
static bool find_stop(const struct completion_request *r, struct choice *c, size_t old_len)
{
    size_t cut = c->text.len;
    bool found = false;
    for (int i = 0; i < r->n_stops; i++) {
        size_t back = r->n_stop[i] - 1, from = old_len > c->text_made + back ? old_len - back : c->text_made;
        const char *hit =
            c->text.text != NULL ? memmem(c->text.text + from, c->text.len - from, r->stop[i], r->n_stop[i]) : NULL;
        if (hit != NULL && (size_t)(hit - c->text.text) < cut) {
            cut = (size_t)(hit - c->text.text);
            found = true;
        }
    }
    if (!found)
        return false;
    c->text.len = cut;
    c->text.text[cut] = '\0';
    while (c->ids.n > c->n_prompt && c->offset[c->ids.n - 1] >= cut)
        c->ids.n--;
    return true;
}

static int make_tokens(struct scorer *s, const struct completion_request *r, struct choice *c, struct sampler sampler,
                       struct tensor *last, struct err *e)
{
    for (int64_t i = 0; i < r->max_tokens; i++) {
        struct token_score score;
        size_t at = c->ids.n, old_len = c->text.len;
        int32_t id = sample_token(&sampler, last, s->cfg->model.vocab, (uint64_t)i, s->scratch);
        TRY(scorer_score(s, last, id, r->n_top > 0 ? r->n_top : 0, &score, e));
        c->n_made++;
        if (id == s->tok.eod || (r->chat != NULL && id == r->chat->stop_id)) {
            c->stopped = true;
            return ST_OK;
        }
        TRY(scorer_append(&c->ids, &id, 1, e));
        if (c->scores != NULL)
            c->scores[at] = score;
        show_token(s, c, at);
        TRY(buf_check(&c->text, e));
        if ((c->stopped = find_stop(r, c, old_len)))
            return ST_OK;
        if (i + 1 < r->max_tokens)
            TRY(scorer_continue(s, id, last, e));
    }
    return ST_OK;
}

static int make_choice(struct scorer *s, const struct completion_request *r, int k, struct choice *c, struct err *e)
{
    const struct token_ids *prompt = &r->prompts[k];
    struct sampler sampler = r->sampler;
    struct tensor last;
    size_t n_all = prompt->n + (size_t)r->max_tokens;
    bool score_prompt = r->echo && r->n_top >= 0;
    sampler.seed += (uint64_t)k;
    c->n_prompt = prompt->n;
    c->first = r->echo ? 0 : prompt->n;
    TRY(scorer_append(&c->ids, prompt->ids, prompt->n, e));
    TRY(mem_array((void **)&c->offset, n_all, sizeof *c->offset, e));
    if (r->n_top >= 0)
        TRY(mem_array((void **)&c->scores, n_all, sizeof *c->scores, e));
    TRY(scorer_begin(s, prompt->ids, (int64_t)prompt->n, 0, r->n_top, score_prompt ? c->scores : NULL, &last, e));
    for (size_t i = c->first; i < prompt->n; i++)
        show_token(s, c, i);
    c->text_made = c->text.len;
    TRY(buf_check(&c->text, e));
    return make_tokens(s, r, c, sampler, &last, e);
}

/* ---- its answer ------------------------------------------------------------------------------ */

/* A token as a key: its text, or its bytes where they are no whole characters. Special tokens go by name. */
static void token_text(const struct scorer *s, int32_t id, struct buf *out)
{
    size_t n = 0;
    const char *name = tokenizer_name(&s->tok, id, &n);
    buf_clear(out);
    if (name != NULL && token_is_special(&s->tok, id)) {
        buf_add_n(out, name, n);
        return;
    }
    add_piece(s, id, out);
    for (size_t i = 0, size; i < out->len; i += size) {
        size = reply_character(out->text + i, out->len - i);
        if (size > 0)
            continue;
        char hex[4 * 8 + 1];
        size_t bytes = out->len < 8 ? out->len : 8, all = out->len;
        for (size_t k = 0; k < bytes; k++)
            snprintf(hex + 4 * k, sizeof hex - 4 * k, "\\x%02x", (uint8_t)out->text[k]);
        buf_clear(out);
        buf_addf(out, "bytes:%s%s", hex, all > bytes ? "..." : "");
        return;
    }
}

/* Two tokens may look alike; JSON keys may not. The likelier one is kept. */
static void write_top(const struct scorer *s, struct buf *out, const struct token_score *score, int32_t id)
{
    struct buf text[SCORER_TOP + 1];
    int n = 0;
    buf_add(out, "{");
    for (int i = 0; i <= score->n_top; i++) {
        bool chosen = i == score->n_top, seen = false;
        buf_init(&text[n], 0);
        token_text(s, chosen ? id : score->top[i].id, &text[n]);
        for (int k = 0; k < n && !seen; k++)
            seen = text[k].len == text[n].len &&
                   (text[n].len == 0 || memcmp(text[k].text, text[n].text, text[n].len) == 0);
        if (seen) {
            buf_release(&text[n]);
            continue;
        }
        buf_add(out, n > 0 ? ", " : "");
        reply_string(out, text[n].text != NULL ? text[n].text : "", text[n].len);
        buf_addf(out, ": %.17g", chosen ? score->logprob : score->top[i].logprob);
        n++;
    }
    buf_add(out, "}");
    for (int k = 0; k < n; k++)
        buf_release(&text[k]);
}

/* Offsets count characters of the text as it is sent, where each byte that is no character became one. */
static void write_offsets(struct buf *out, const struct choice *c)
{
    size_t at = 0, characters = 0;
    for (size_t i = c->first; i < c->ids.n; i++) {
        while (at < c->offset[i]) {
            size_t size = reply_character(c->text.text + at, c->text.len - at);
            at += size > 0 ? size : 1;
            characters++;
        }
        buf_addf(out, "%s%zu", i > c->first ? ", " : "", characters);
    }
}

static void write_logprobs(const struct scorer *s, struct buf *out, const struct choice *c)
{
    struct buf text;
    buf_init(&text, 0);
    buf_add(out, "{\"tokens\": [");
    for (size_t i = c->first; i < c->ids.n; i++) {
        token_text(s, c->ids.ids[i], &text);
        buf_add(out, i > c->first ? ", " : "");
        reply_string(out, text.text != NULL ? text.text : "", text.len);
    }
    buf_add(out, "], \"token_logprobs\": [");
    for (size_t i = c->first; i < c->ids.n; i++) {
        buf_add(out, i > c->first ? ", " : "");
        if (isnan(c->scores[i].logprob)) /* the first token of a prompt */
            buf_add(out, "null");
        else
            buf_addf(out, "%.17g", c->scores[i].logprob);
    }
    buf_add(out, "], \"top_logprobs\": [");
    for (size_t i = c->first; i < c->ids.n; i++) {
        buf_add(out, i > c->first ? ", " : "");
        if (isnan(c->scores[i].logprob))
            buf_add(out, "null");
        else
            write_top(s, out, &c->scores[i], c->ids.ids[i]);
    }
    buf_add(out, "], \"text_offset\": [");
    write_offsets(out, c);
    buf_add(out, "]}");
    buf_release(&text);
}

/* Spaces that the template puts in front of a reply are not part of it. */
static void write_message(struct buf *out, const struct chat_template *chat, const struct choice *c)
{
    const char *text = c->text.text != NULL ? c->text.text : "";
    size_t lead = strcspn(chat->assistant + strlen(chat->generation), "{"), n = c->text.len;
    for (; lead > 0 && n > 0 && *text == ' '; lead--, n--)
        text++;
    buf_add(out, "{\"index\": 0, \"message\": {\"role\": \"assistant\", \"content\": ");
    reply_string(out, text, n);
    buf_addf(out, "}, \"logprobs\": null, \"finish_reason\": \"%s\"}", c->stopped ? "stop" : "length");
}

static void write_choice(const struct scorer *s, struct buf *out, const struct choice *c, int k)
{
    buf_addf(out, "%s{\"index\": %d, \"text\": ", k > 0 ? ", " : "", k);
    reply_string(out, c->text.text != NULL ? c->text.text : "", c->text.len);
    buf_add(out, ", \"logprobs\": ");
    if (c->scores != NULL)
        write_logprobs(s, out, c);
    else
        buf_add(out, "null");
    buf_addf(out, ", \"finish_reason\": \"%s\"}", c->stopped ? "stop" : "length");
}

int request_answer(struct scorer *s, const struct completion_request *r, const char *model, struct buf *out,
                   struct err *e)
{
    int64_t made = 0;
    double now = time_wall();
    buf_addf(out, "{\"id\": \"%s-%016llx\", \"object\": \"%s\", \"created\": %lld, \"model\": ",
             r->chat != NULL ? "chatcmpl" : "cmpl", (unsigned long long)hash64(&now, sizeof now, r->sampler.seed),
             r->chat != NULL ? "chat.completion" : "text_completion", (long long)now);
    reply_string(out, model, strlen(model));
    buf_add(out, ", \"choices\": [");
    for (int k = 0; k < r->n_prompts; k++) {
        struct choice c = {.n_prompt = 0};
        buf_init(&c.text, 0);
        int st = make_choice(s, r, k, &c, e);
        if (st == ST_OK && r->chat != NULL)
            write_message(out, r->chat, &c);
        else if (st == ST_OK)
            write_choice(s, out, &c, k);
        made += c.n_made;
        choice_release(&c);
        TRY(st);
        TRY(buf_check(out, e));
    }
    buf_addf(out, "], \"usage\": {\"prompt_tokens\": %lld, \"completion_tokens\": %lld, \"total_tokens\": %lld}}\n",
             (long long)r->n_tokens, (long long)made, (long long)(r->n_tokens + made));
    return buf_check(out, e);
}
