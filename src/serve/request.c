/* A completions request, from JSON that anybody may have sent: every field is checked, none is ignored. */
#include "serve/serve.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

enum { TOKEN_BYTES = 1024 };

struct reading {
    struct completion_request *r;
    const struct serve_limits *l;
    int64_t vocab;
    encode_fn encode;
    void *ctx;
    bool prefix;
    encode_chat_fn encode_chat; /* of a conversation; else NULL */
};

/* ---- prompts --------------------------------------------------------------------------------- */

static int check_prompt(const struct reading *in, int k, struct err *e)
{
    const struct token_ids *p = &in->r->prompts[k];
    if (p->n == 0) {
        err_set(e, ST_INVALID, "prompt %d has no tokens", k);
        return err_hint(e, "a prompt needs a text, or at least one token id");
    }
    for (size_t i = 0; i < p->n; i++)
        if (p->ids[i] < 0 || p->ids[i] >= in->vocab)
            return err_set(e, ST_INVALID, "prompt %d: token %d does not exist: the model has a vocabulary of %lld", k,
                           (int)p->ids[i], (long long)in->vocab);
    if ((int64_t)p->n + in->r->max_tokens > in->l->length)
        return err_set(e, ST_INVALID,
                       "prompt %d has %zu tokens, and max_tokens is %lld: together at most %lld are possible", k, p->n,
                       (long long)in->r->max_tokens, (long long)in->l->length);
    in->r->n_tokens += (int64_t)p->n;
    int64_t all = in->r->n_tokens + (k + 1) * in->r->max_tokens;
    if (all > in->l->tokens)
        return err_set(e, ST_INVALID,
                       "prompts and max_tokens for each of them make more than %lld tokens: send fewer prompts at once",
                       (long long)in->l->tokens);
    return ST_OK;
}

static int read_text(const struct reading *in, int k, const json_t *text, struct err *e)
{
    /* Tokenising megabytes takes seconds; no vocabulary has tokens so long that this could fit. */
    if (json_string_length(text) / TOKEN_BYTES > (size_t)in->l->length)
        return err_set(e, ST_INVALID, "prompt %d has %zu bytes, which are more than %lld tokens", k,
                       json_string_length(text), (long long)in->l->length);
    TRY(in->encode(in->ctx, json_string_value(text), json_string_length(text), in->prefix, &in->r->prompts[k], e));
    return check_prompt(in, k, e);
}

static int read_ids(const struct reading *in, int k, const json_t *list, struct err *e)
{
    struct token_ids *p = &in->r->prompts[k];
    size_t n = json_array_size(list);
    if (n > (size_t)in->l->length)
        return err_set(e, ST_INVALID, "prompt %d has %zu tokens, at most %lld are possible", k, n,
                       (long long)in->l->length);
    TRY(mem_grow((void **)&p->ids, &p->cap, n > 0 ? n : 1, sizeof *p->ids, e));
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t id = json_integer_value(v);
        if (!json_is_integer(v))
            return err_set(e, ST_INVALID, "prompt %d: element %zu is not a token id", k, i);
        if (id < 0 || id >= in->vocab)
            return err_set(e, ST_INVALID, "prompt %d: token %lld does not exist: the model has a vocabulary of %lld", k,
                           (long long)id, (long long)in->vocab);
        p->ids[p->n++] = (int32_t)id;
    }
    return check_prompt(in, k, e);
}

/* A text, a list of texts, a list of ids, a list of lists of ids. */
static int read_prompts(const struct reading *in, const json_t *prompt, struct err *e)
{
    bool text = json_is_string(prompt), list = json_is_array(prompt);
    const json_t *first = list ? json_array_get(prompt, 0) : NULL;
    if (!text && first == NULL)
        return err_set(e, ST_INVALID,
                       "\"prompt\" must be a text, a list of texts, a list of token ids or a list of such lists");
    bool one = text || json_is_integer(first);
    size_t n = one ? 1 : json_array_size(prompt);
    if (n > PROMPTS_MAX)
        return err_set(e, ST_INVALID, "\"prompt\" holds %zu prompts, at most %d are taken at once", n, PROMPTS_MAX);
    TRY(mem_array((void **)&in->r->prompts, n, sizeof *in->r->prompts, e));
    in->r->n_prompts = (int)n;
    for (size_t k = 0; k < n; k++) {
        const json_t *p = one ? prompt : json_array_get(prompt, k);
        if (json_is_string(p))
            TRY(read_text(in, (int)k, p, e));
        else if (json_is_array(p))
            TRY(read_ids(in, (int)k, p, e));
        else
            return err_set(e, ST_INVALID, "prompt %zu is neither a text nor a list of token ids", k);
    }
    return ST_OK;
}

/* ---- the other fields ------------------------------------------------------------------------ */

static int add_stop(struct completion_request *r, const json_t *text, struct err *e)
{
    size_t n = json_string_length(text);
    if (!json_is_string(text) || n == 0 || n > STOP_BYTES)
        return err_set(e, ST_INVALID, "\"stop\" must be a text of 1 to %d bytes, or a list of them", STOP_BYTES);
    if (r->n_stops == STOPS_MAX)
        return err_set(e, ST_INVALID, "\"stop\" has more than %d texts", STOPS_MAX);
    char *copy = malloc(n);
    if (copy == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    memcpy(copy, json_string_value(text), n);
    r->stop[r->n_stops] = copy;
    r->n_stop[r->n_stops++] = n;
    return ST_OK;
}

static int read_stops(struct completion_request *r, const json_t *v, struct err *e)
{
    if (!json_is_array(v))
        return add_stop(r, v, e);
    for (size_t i = 0; i < json_array_size(v); i++)
        TRY(add_stop(r, json_array_get(v, i), e));
    return ST_OK;
}

static int read_integer(const json_t *v, const char *name, int64_t least, int64_t most, int64_t *out, struct err *e)
{
    if (!json_is_integer(v) || json_integer_value(v) < least || json_integer_value(v) > most)
        return err_set(e, ST_INVALID, "\"%s\" must be a whole number from %lld to %lld", name, (long long)least,
                       (long long)most);
    *out = json_integer_value(v);
    return ST_OK;
}

static int read_number(const json_t *v, const char *name, double least, double most, double *out, struct err *e)
{
    double x = json_number_value(v);
    if (!json_is_number(v) || !(x >= least && x <= most))
        return err_set(e, ST_INVALID, "\"%s\" must be a number from %g to %g", name, least, most);
    *out = x;
    return ST_OK;
}

static int read_bool(const json_t *v, const char *name, bool *out, struct err *e)
{
    if (!json_is_boolean(v))
        return err_set(e, ST_INVALID, "\"%s\" must be true or false", name);
    *out = json_is_true(v);
    return ST_OK;
}

/* Fields of OpenAI's interface that are not built: the value that changes nothing is accepted, any other is refused. */
static int read_neutral(const char *name, const json_t *v, bool *found, struct err *e)
{
    static const char *const zero[] = {"presence_penalty", "frequency_penalty"}, *const one[] = {"n", "best_of"};
    static const char *const empty[] = {"logit_bias", "suffix", "stream_options"};
    bool neutral = false;
    *found = true;
    for (int i = 0; i < countof(zero); i++)
        if (strcmp(name, zero[i]) == 0)
            return json_is_number(v) && json_number_value(v) == 0
                       ? ST_OK
                       : err_set(e, ST_UNSUPPORTED, "\"%s\" other than 0 is not supported", name);
    for (int i = 0; i < countof(one); i++)
        if (strcmp(name, one[i]) == 0) {
            neutral = json_is_integer(v) && json_integer_value(v) == 1;
            return neutral ? ST_OK
                           : err_set(e, ST_UNSUPPORTED,
                                     "\"%s\" other than 1 is not supported: repeat the prompt in a list", name);
        }
    for (int i = 0; i < countof(empty); i++)
        if (strcmp(name, empty[i]) == 0) {
            neutral =
                (json_is_object(v) && json_object_size(v) == 0) || (json_is_string(v) && json_string_length(v) == 0);
            return neutral ? ST_OK : err_set(e, ST_UNSUPPORTED, "\"%s\" is not supported", name);
        }
    if (strcmp(name, "stream") == 0)
        return json_is_false(v)
                   ? ST_OK
                   : err_set(e, ST_UNSUPPORTED, "\"stream\" is not supported: the answer comes in one piece");
    if (strcmp(name, "model") == 0 || strcmp(name, "user") == 0) /* there is one model, and there is no billing */
        return json_is_string(v) ? ST_OK : err_set(e, ST_INVALID, "\"%s\" must be a text", name);
    *found = false;
    return ST_OK;
}

/* Fields that mean something else in a conversation, or nothing. */
static int read_chat_field(struct reading *in, const char *name, const json_t *v, bool *found, struct err *e)
{
    static const char *const none[] = {"prompt", "echo", "add_special_tokens"};
    *found = true;
    if (strcmp(name, "messages") == 0)
        return ST_OK; /* read last, as prompts are */
    if (strcmp(name, "max_completion_tokens") == 0)
        return read_integer(v, name, 0, in->l->length, &in->r->max_tokens, e);
    if (strcmp(name, "logprobs") == 0)
        return json_is_false(v)
                   ? ST_OK
                   : err_set(e, ST_UNSUPPORTED, "\"logprobs\" is not supported here: /v1/completions has them");
    for (int i = 0; i < countof(none); i++)
        if (strcmp(name, none[i]) == 0)
            return err_set(e, ST_INVALID, "\"%s\" belongs to /v1/completions; a conversation has \"messages\"", name);
    *found = false;
    return ST_OK;
}

static int unknown_field(const char *name, struct err *e)
{
    static const char *const names[] = {"prompt", "max_tokens", "temperature", "top_p",    "top_k",
                                        "stop",   "seed",       "echo",        "logprobs", "add_special_tokens"};
    struct buf safe;
    buf_init(&safe, 256);
    reply_string(&safe, name, strnlen(name, 32));
    const char *near = nearest_name(name, names, countof(names));
    err_set(e, ST_INVALID, "unknown field %s", safe.text != NULL ? safe.text : "");
    buf_release(&safe);
    return near != NULL ? err_hint(e, "did you mean \"%s\"?", near) : (int)e->code;
}

static int read_field(struct reading *in, const char *name, const json_t *v, struct err *e)
{
    struct completion_request *r = in->r;
    int64_t n;
    bool found = false;
    if (in->encode_chat != NULL && !json_is_null(v))
        TRY(read_chat_field(in, name, v, &found, e));
    if (found || strcmp(name, "prompt") == 0 || json_is_null(v))
        return ST_OK; /* prompts are read last, when the limits on them are known */
    if (strcmp(name, "max_tokens") == 0)
        return read_integer(v, name, 0, in->l->length, &r->max_tokens, e);
    if (strcmp(name, "temperature") == 0)
        return read_number(v, name, 0, 100, &r->sampler.temperature, e);
    if (strcmp(name, "top_p") == 0)
        return read_number(v, name, 0, 1, &r->sampler.top_p, e);
    if (strcmp(name, "top_k") == 0) {
        TRY(read_integer(v, name, -1, INT32_MAX, &n, e));
        r->sampler.top_k = max_i64(n, 0);
        return ST_OK;
    }
    if (strcmp(name, "stop") == 0)
        return read_stops(r, v, e);
    if (strcmp(name, "seed") == 0) {
        TRY(read_integer(v, name, INT64_MIN, INT64_MAX, &n, e));
        r->sampler.seed = (uint64_t)n;
        return ST_OK;
    }
    if (strcmp(name, "echo") == 0)
        return read_bool(v, name, &r->echo, e);
    if (strcmp(name, "logprobs") == 0) {
        TRY(read_integer(v, name, 0, SCORER_TOP, &n, e));
        r->n_top = (int)n;
        return ST_OK;
    }
    if (strcmp(name, "add_special_tokens") == 0)
        return read_bool(v, name, &in->prefix, e);
    TRY(read_neutral(name, v, &found, e));
    return found ? ST_OK : unknown_field(name, e);
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* A reply may fill what the messages leave, where max_tokens does not say less. */
static int read_messages(struct reading *in, const json_t *root, struct err *e)
{
    struct completion_request *r = in->r;
    struct chat_list l;
    char why[192];
    size_t bytes = 0;
    int st = ST_OK;
    TRY(mem_array((void **)&r->prompts, 1, sizeof *r->prompts, e));
    r->n_prompts = 1;
    chat_list_init(&l);
    if (!chat_list_read(&l, root, "messages", why, sizeof why))
        st = err_set(e, ST_INVALID, "%s", why);
    for (size_t i = 0; i < l.n; i++)
        bytes += l.m[i].n;
    if (st == ST_OK && bytes / TOKEN_BYTES > (size_t)in->l->length)
        st = err_set(e, ST_INVALID, "the messages have %zu bytes, which are more than %lld tokens", bytes,
                     (long long)in->l->length);
    if (st == ST_OK)
        st = in->encode_chat(in->ctx, &l, &r->prompts[0], e);
    chat_list_release(&l);
    TRY(st);
    if (r->max_tokens < 0)
        r->max_tokens = max_i64(0, min_i64(in->l->length, in->l->tokens) - (int64_t)r->prompts[0].n);
    return check_prompt(in, 0, e);
}

static int read_object(struct reading *in, json_t *root, struct err *e)
{
    const char *name;
    json_t *v;
    if (!json_is_object(root))
        return err_set(e, ST_INVALID, "the request must be a JSON object");
    json_object_foreach(root, name, v) TRY(read_field(in, name, v, e));
    if (in->encode_chat != NULL)
        return read_messages(in, root, e);
    v = json_object_get(root, "prompt");
    if (v == NULL)
        return err_set(e, ST_INVALID, "there is no field \"prompt\"");
    return read_prompts(in, v, e);
}

static int read_body(struct reading *in, const char *body, size_t n, struct err *e)
{
    struct completion_request *r = in->r;
    json_error_t why;
    /* Without a seed two equal requests shall differ, as clients of this interface expect. */
    if (getrandom(&r->sampler.seed, sizeof r->sampler.seed, 0) != (ssize_t)sizeof r->sampler.seed)
        return err_errno(e, "no random seed could be had");
    json_t *root = json_loadb(body, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &why);
    if (root == NULL)
        return err_set(e, ST_INVALID, "the request is not JSON: %s (line %d, column %d)", why.text, why.line,
                       why.column);
    int st = read_object(in, root, e);
    json_decref(root);
    return st;
}

int request_read(struct completion_request *r, const char *body, size_t n, const struct serve_limits *l, int64_t vocab,
                 encode_fn encode, void *ctx, struct err *e)
{
    struct reading in = {.r = r, .l = l, .vocab = vocab, .encode = encode, .ctx = ctx, .prefix = true};
    *r = (struct completion_request){.max_tokens = 16, .n_top = -1, .sampler = {.temperature = 1, .top_p = 1}};
    return read_body(&in, body, n, e);
}

int request_read_chat(struct completion_request *r, const char *body, size_t n, const struct serve_limits *l,
                      int64_t vocab, const struct chat_template *chat, encode_chat_fn encode, void *ctx, struct err *e)
{
    struct reading in = {.r = r, .l = l, .vocab = vocab, .encode_chat = encode, .ctx = ctx};
    *r = (struct completion_request){
        .max_tokens = -1, .n_top = -1, .chat = chat, .sampler = {.temperature = 1, .top_p = 1}};
    TRY(read_body(&in, body, n, e));
    if (chat->stop_id >= 0)
        return ST_OK;
    json_t *stop = json_string(chat->stop); /* a tokenizer of bytes has no token that ends a reply */
    int st = stop != NULL ? add_stop(r, stop, e) : err_set(e, ST_NOMEM, "out of memory");
    json_decref(stop);
    return st;
}

void request_release(struct completion_request *r)
{
    for (int k = 0; k < r->n_prompts; k++)
        free(r->prompts[k].ids);
    for (int i = 0; i < r->n_stops; i++)
        free(r->stop[i]);
    free(r->prompts);
    *r = (struct completion_request){.n_prompts = 0};
}
