/* Multiple-choice tasks from a file of JSON lines: which continuation does the model find likeliest? The rules by which
 * text is cut into tokens are those of lm-evaluation-harness, so that log-likelihoods can be compared with it. */
#include "serve/serve.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LINE_MAX_BYTES = 64 << 20, CONTINUATIONS_MAX = 65536 };

struct task {
    struct token_ids *sequence; /* context and continuation of each */
    int64_t *n_context;         /* tokens of it that are context */
    int64_t *bytes;             /* of text behind the continuation */
    int n, cap;
    int64_t label; /* -1: none */
};

static void task_release(struct task *t)
{
    for (int i = 0; i < t->n; i++)
        free(t->sequence[i].ids);
    free(t->sequence);
    free(t->n_context);
    free(t->bytes);
    *t = (struct task){0};
}

/* ---- reading a line ------------------------------------------------------------------------- */

static int read_ids(const struct scorer *s, const json_t *list, const char *name, struct token_ids *out, struct err *e)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t id = json_integer_value(v);
        if (!json_is_integer(v))
            return err_set(e, ST_INVALID, "%s: element %zu is not a token id", name, i);
        if (id < 0 || id >= s->cfg->model.vocab)
            return err_set(e, ST_INVALID, "%s: token %lld does not exist: the model has a vocabulary of %lld", name,
                           (long long)id, (long long)s->cfg->model.vocab);
        int32_t one = (int32_t)id;
        TRY(scorer_append(out, &one, 1, e));
    }
    return ST_OK;
}

/* Spaces at the end of a context belong to the word that follows, as most vocabularies have it. */
static size_t without_spaces(const char *text, size_t n)
{
    while (n > 0 && (text[n - 1] == ' ' || (text[n - 1] >= '\t' && text[n - 1] <= '\r') ||
                     (text[n - 1] >= 0x1c && text[n - 1] <= 0x1f)))
        n--;
    return n;
}

/* Context and continuation are tokenised as one text; what the context alone does not need is the continuation. */
static int encode_texts(struct scorer *s, const json_t *context, const json_t *continuation, struct token_ids *out,
                        int64_t *n_context, struct err *e)
{
    size_t n = json_string_length(context), kept = without_spaces(json_string_value(context), n);
    struct buf text;
    struct token_ids alone = {0};
    buf_init(&text, 0);
    buf_add_n(&text, json_string_value(context), n);
    buf_add_n(&text, json_string_value(continuation), json_string_length(continuation));
    int st = buf_check(&text, e);
    if (st == ST_OK)
        st = scorer_encode(s, text.text, kept, true, &alone, e);
    if (st == ST_OK)
        st = scorer_encode(s, text.text, text.len, true, out, e);
    *n_context = (int64_t)alone.n;
    free(alone.ids);
    buf_release(&text);
    return st;
}

/* Something must come before the first token that is scored. */
static int encode_start(struct scorer *s, struct token_ids *out, struct err *e)
{
    if (s->n_prefix > 0)
        return scorer_append(out, s->prefix, (size_t)s->n_prefix, e);
    if (s->tok.eod >= 0 && s->tok.eod < s->cfg->model.vocab)
        return scorer_append(out, &s->tok.eod, 1, e);
    err_set(e, ST_INVALID, "the context is empty, and the tokenizer has no token that begins or ends a text");
    return err_hint(e, "give a context; with data.eod=on the end-of-document token stands for an empty one");
}

static int encode_pair(struct scorer *s, const json_t *context, const json_t *continuation, struct token_ids *out,
                       int64_t *n_context, struct err *e)
{
    bool is_text = json_is_string(context), more_text = json_is_string(continuation);
    bool empty = is_text ? without_spaces(json_string_value(context), json_string_length(context)) == 0
                         : json_array_size(context) == 0;
    if (is_text && more_text && !empty)
        return encode_texts(s, context, continuation, out, n_context, e);
    if (empty)
        TRY(encode_start(s, out, e));
    else if (is_text)
        TRY(scorer_encode(s, json_string_value(context), json_string_length(context), true, out, e));
    else
        TRY(read_ids(s, context, "context", out, e));
    *n_context = (int64_t)out->n;
    if (!more_text)
        return read_ids(s, continuation, "continuations", out, e);
    struct buf text; /* a context of nothing but spaces is part of the continuation */
    buf_init(&text, 0);
    if (is_text && empty)
        buf_add_n(&text, json_string_value(context), json_string_length(context));
    buf_add_n(&text, json_string_value(continuation), json_string_length(continuation));
    int st = buf_check(&text, e);
    if (st == ST_OK && text.len > 0)
        st = scorer_encode(s, text.text, text.len, false, out, e);
    buf_release(&text);
    return st;
}

static int add_continuation(struct scorer *s, struct task *t, const json_t *context, const json_t *one, struct err *e)
{
    int k = t->n;
    struct token_ids *ids = &t->sequence[k];
    if (!json_is_string(one) && !json_is_array(one))
        return err_set(e, ST_INVALID, "continuations[%d] is neither text nor a list of token ids", k);
    t->n++;
    if (encode_pair(s, context, one, ids, &t->n_context[k], e) != ST_OK)
        return err_in(e, "continuations[%d]", k);
    int64_t n = (int64_t)ids->n - t->n_context[k];
    if (n < 1)
        return err_set(e, ST_INVALID, "continuations[%d] adds no token", k);
    if (n >= s->length) {
        err_set(e, ST_INVALID, "continuations[%d] has %lld tokens; %lld fit, the context needs one", k, (long long)n,
                (long long)s->length - 1);
        return err_hint(e, "--length=N plans for longer sequences");
    }
    TRY(scorer_check_ids(s, ids->ids, ids->n, e));
    if (json_is_string(one))
        t->bytes[k] = (int64_t)json_string_length(one);
    else
        for (size_t i = (size_t)t->n_context[k]; i < ids->n; i++)
            t->bytes[k] += token_n_bytes(&s->tok, ids->ids[i]);
    t->bytes[k] = max_i64(t->bytes[k], 1);
    return ST_OK;
}

static int read_fields(struct scorer *s, struct task *t, const json_t *root, struct err *e)
{
    static const char *const known[] = {"context", "continuations", "label"};
    const json_t *context = json_object_get(root, known[0]), *list = json_object_get(root, known[1]),
                 *label = json_object_get(root, known[2]);
    if (!json_is_string(context) && !json_is_array(context))
        return err_set(e, ST_INVALID, "field \"context\" is %s",
                       context == NULL ? "missing" : "neither text nor a list of token ids");
    if (!json_is_array(list) || json_array_size(list) == 0)
        return err_set(e, ST_INVALID, "field \"continuations\" is %s",
                       list == NULL ? "missing" : "not a list of at least one");
    if (json_array_size(list) > CONTINUATIONS_MAX)
        return err_set(e, ST_INVALID, "%zu continuations; at most %d are taken", json_array_size(list),
                       CONTINUATIONS_MAX);
    t->cap = (int)json_array_size(list);
    t->label = -1;
    if (label != NULL && !json_is_null(label)) {
        t->label = json_is_integer(label) ? json_integer_value(label) : -1;
        if (t->label < 0 || t->label >= t->cap)
            return err_set(e, ST_INVALID, "field \"label\" must be a number from 0 to %d", t->cap - 1);
    }
    TRY(mem_array((void **)&t->sequence, (size_t)t->cap, sizeof *t->sequence, e));
    TRY(mem_array((void **)&t->n_context, (size_t)t->cap, sizeof *t->n_context, e));
    TRY(mem_array((void **)&t->bytes, (size_t)t->cap, sizeof *t->bytes, e));
    for (int k = 0; k < t->cap; k++)
        TRY(add_continuation(s, t, context, json_array_get(list, (size_t)k), e));
    return ST_OK;
}

static int task_read(struct scorer *s, struct task *t, const char *line, size_t n, struct err *e)
{
    json_error_t why;
    *t = (struct task){.label = -1};
    json_t *root = json_loadb(line, n, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL)
        return err_set(e, ST_CORRUPT, "this is not JSON: %s (column %d)", why.text, why.column);
    int st = json_is_object(root) ? read_fields(s, t, root, e) : err_set(e, ST_INVALID, "this is not a JSON object");
    json_decref(root);
    return st;
}

/* ---- scoring -------------------------------------------------------------------------------- */

struct pass {
    struct scorer *s;
    const struct task_opts *o;
    struct task_result *r;
    struct token_score *scores; /* s->length of them */
    double *logprob;            /* of each continuation of a line */
    bool *greedy;
    size_t cap_logprob, cap_greedy;
    int64_t tokens_done;
    struct buf out;
    bool score; /* second pass: the first only reads, so that a bad line is found before hours of work */
};

/* Where the sequence is too long, the context loses its beginning. */
static int score_continuation(struct pass *p, const struct task *t, int k, struct err *e)
{
    const struct token_ids *ids = &t->sequence[k];
    int64_t skip = max_i64((int64_t)ids->n - p->s->length, 0), n = (int64_t)ids->n - skip,
            from = t->n_context[k] - skip;
    struct tensor last;
    TRY(scorer_begin(p->s, ids->ids + skip, n, from, 1, p->scores, &last, e));
    p->logprob[k] = 0;
    p->greedy[k] = true;
    for (int64_t i = from; i < n; i++) {
        p->logprob[k] += p->scores[i].logprob;
        p->greedy[k] = p->greedy[k] && p->scores[i].logprob == p->scores[i].top[0].logprob;
    }
    p->tokens_done += n;
    p->r->cut += skip > 0;
    if (p->o->progress != NULL)
        p->o->progress(p->o->ctx, p->tokens_done, p->r->tokens);
    return ST_OK;
}

static void write_line(struct pass *p, const struct task *t, int64_t number, int best, int best_norm)
{
    struct buf *b = &p->out;
    buf_addf(b, "{\"line\": %lld, \"label\": ", (long long)number);
    if (t->label >= 0)
        buf_addf(b, "%lld", (long long)t->label);
    else
        buf_add(b, "null");
    buf_addf(b, ", \"chosen\": %d, \"chosen_norm\": %d, \"logprobs\": [", best, best_norm);
    for (int k = 0; k < t->n; k++)
        buf_addf(b, "%s%.17g", k ? ", " : "", p->logprob[k]);
    buf_add(b, "], \"greedy\": [");
    for (int k = 0; k < t->n; k++)
        buf_addf(b, "%s%s", k ? ", " : "", p->greedy[k] ? "true" : "false");
    buf_add(b, "], \"tokens\": [");
    for (int k = 0; k < t->n; k++)
        buf_addf(b, "%s%lld", k ? ", " : "", (long long)((int64_t)t->sequence[k].n - t->n_context[k]));
    buf_add(b, "], \"bytes\": [");
    for (int k = 0; k < t->n; k++)
        buf_addf(b, "%s%lld", k ? ", " : "", (long long)t->bytes[k]);
    buf_add(b, "]}\n");
}

static int score_task(struct pass *p, const struct task *t, int64_t number, struct err *e)
{
    int best = 0, best_norm = 0;
    TRY(mem_grow((void **)&p->logprob, &p->cap_logprob, (size_t)t->n, sizeof *p->logprob, e));
    TRY(mem_grow((void **)&p->greedy, &p->cap_greedy, (size_t)t->n, sizeof *p->greedy, e));
    for (int k = 0; k < t->n; k++) {
        TRY(score_continuation(p, t, k, e));
        best = p->logprob[k] > p->logprob[best] ? k : best;
        best_norm =
            p->logprob[k] / (double)t->bytes[k] > p->logprob[best_norm] / (double)t->bytes[best_norm] ? k : best_norm;
    }
    if (t->label >= 0) {
        p->r->labelled++;
        p->r->right += best == t->label;
        p->r->right_norm += best_norm == t->label;
        p->r->logprob += p->logprob[t->label];
    }
    if (p->o->out != NULL)
        write_line(p, t, number, best, best_norm);
    return buf_check(&p->out, e);
}

static int one_line(struct pass *p, const char *line, size_t n, int64_t number, struct err *e)
{
    struct task t;
    if (n > LINE_MAX_BYTES)
        return err_set(e, ST_INVALID, "a line of %zu bytes is longer than the %d MiB that are read", n,
                       LINE_MAX_BYTES >> 20);
    int st = task_read(p->s, &t, line, n, e);
    if (st == ST_OK && p->score)
        st = score_task(p, &t, number, e);
    else if (st == ST_OK) {
        p->r->lines++;
        p->r->continuations += t.n;
        for (int k = 0; k < t.n; k++)
            p->r->tokens += min_i64((int64_t)t.sequence[k].n, p->s->length);
    }
    task_release(&t);
    return st;
}

static int all_lines(struct pass *p, const struct file_map *m, struct err *e)
{
    int64_t number = 0;
    for (const char *at = (const char *)m->data, *end = at + m->size; at < end;) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        size_t n = (size_t)((stop != NULL ? stop : end) - at);
        number++;
        if (without_spaces(at, n) > 0 && one_line(p, at, n, number, e) != ST_OK) {
            struct err inner = *e;
            err_set(e, inner.code, "%s, line %lld: %s%s%.300s", p->o->path, (long long)number, inner.trail,
                    inner.trail[0] ? ": " : "", inner.msg);
            return inner.hint[0] ? err_hint(e, "%s", inner.hint) : (int)inner.code;
        }
        at += n + 1;
    }
    return ST_OK;
}

int tasks_run(struct scorer *s, const struct task_opts *o, struct task_result *r, struct err *e)
{
    struct pass p = {.s = s, .o = o, .r = r};
    struct file_map m = {0};
    int st;
    *r = (struct task_result){0};
    buf_init(&p.out, 0);
    TRY_OUT(file_map_open(&m, o->path, e));
    TRY_OUT(mem_array((void **)&p.scores, (size_t)s->length, sizeof *p.scores, e));
    if (m.data != NULL)
        TRY_OUT(all_lines(&p, &m, e));
    if (r->lines == 0) {
        st = err_set(e, ST_INVALID, "%s holds no task", o->path);
        goto out;
    }
    p.score = true;
    TRY_OUT(all_lines(&p, &m, e));
    if (o->out != NULL)
        st = file_write_atomic(o->out, p.out.text, p.out.len, e);
out:
    file_map_close(&m);
    buf_release(&p.out);
    free(p.scores);
    free(p.logprob);
    free(p.greedy);
    return st;
}
