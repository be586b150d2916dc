/* A line of a tasks file: JSON that may be wrong in any way. The rules by which text is cut into tokens are those of
 * lm-evaluation-harness, so that log-likelihoods can be compared with it. */
#include "serve/serve_int.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { LINE_MAX_BYTES = 64 << 20, CONTINUATIONS_MAX = 65536 };

void task_release(struct task *t)
{
    for (int i = 0; i < t->n; i++)
        free(t->sequence[i].ids);
    free(t->sequence);
    free(t->n_context);
    free(t->bytes);
    *t = (struct task){0};
}

/* ---- reading a line -------------------------------------------------------------------------- */

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
size_t task_without_spaces(const char *text, size_t n)
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
    size_t n = json_string_length(context), kept = task_without_spaces(json_string_value(context), n);
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
    bool empty = is_text ? task_without_spaces(json_string_value(context), json_string_length(context)) == 0
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
    if (t->n_context[k] < 1)
        return err_set(e, ST_INVALID, "the context has no token, and the first token of a sequence has no probability");
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

int task_read(struct scorer *s, struct task *t, const char *line, size_t n, struct err *e)
{
    json_error_t why;
    *t = (struct task){.label = -1};
    if (n > LINE_MAX_BYTES)
        return err_set(e, ST_INVALID, "a line of %zu bytes is longer than the %d MiB that are read", n,
                       LINE_MAX_BYTES >> 20);
    json_t *root = json_loadb(line, n, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL)
        return err_set(e, ST_CORRUPT, "this is not JSON: %s (column %d)", why.text, why.column);
    int st = json_is_object(root) ? read_fields(s, t, root, e) : err_set(e, ST_INVALID, "this is not a JSON object");
    json_decref(root);
    return st;
}
