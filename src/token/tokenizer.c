/* Opening a tokenizer by name or path, and what is asked of one that is open. */
#include "token/token_int.h"

#include <inttypes.h>
#include <stdlib.h>

enum { BYTE_IDS = 256 };

/* ---- Files ----------------------------------------------------------------------------------- */

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* The other file of a GPT-2 pair, malloc'd; NULL: path is neither, or no memory. */
static char *pair_of(const char *path, bool *is_encoder)
{
    const char *base = base_name(path);
    *is_encoder = strcmp(base, "encoder.json") == 0;
    const char *other = *is_encoder ? "vocab.bpe" : strcmp(base, "vocab.bpe") == 0 ? "encoder.json" : NULL;
    size_t dir = (size_t)(base - path);
    char *out = other != NULL ? malloc(dir + strlen(other) + 1) : NULL;
    if (out != NULL) {
        memcpy(out, path, dir);
        memcpy(out + dir, other, strlen(other) + 1);
    }
    return out;
}

static int open_gpt2(struct token_model *m, const char *path, char *other, bool is_encoder, struct err *e)
{
    char *a = NULL, *b = NULL;
    size_t n_a, n_b;
    m->files[is_encoder ? 1 : 0] = other;
    m->files[is_encoder ? 0 : 1] = strdup(path);
    m->n_files = 2;
    int st = ST_OK;
    if (m->files[0] == NULL || m->files[1] == NULL)
        TRY_OUT(err_set(e, ST_NOMEM, "out of memory opening %s", path));
    TRY_OUT(file_read(m->files[0], TOKEN_MAX_FILE, &a, &n_a, e));
    TRY_OUT(file_read(m->files[1], TOKEN_MAX_FILE, &b, &n_b, e));
    TRY_OUT(read_gpt2(m, m->files[0], a, n_a, b, n_b, e));
out:
    free(a);
    free(b);
    return st;
}

/* JSON is told by its first character, tekken.json by its keys: they come before the vocabulary. */
static bool looks_like_tekken(const char *text, size_t n)
{
    size_t head = n < 65536 ? n : 65536;
    return memmem(text, head, "\"default_num_special_tokens\"", 28) != NULL;
}

static int open_file(struct token_model *m, const struct tokenizer_opts *o, struct err *e)
{
    bool is_encoder;
    char *other = pair_of(o->name, &is_encoder), *text;
    size_t n, at = 0;
    if (other != NULL)
        return open_gpt2(m, o->name, other, is_encoder, e);
    TRY(file_read(o->name, TOKEN_MAX_FILE, &text, &n, e));
    while (at < n && (text[at] == ' ' || text[at] == '\n' || text[at] == '\r' || text[at] == '\t'))
        at++;
    bool json = at < n && text[at] == '{',
         given = (o->pattern != NULL && o->pattern[0] != '\0') || (o->special != NULL && o->special[0] != '\0');
    int st;
    if (json && given)
        st = err_set(e, ST_USAGE, "data.token_pattern and data.token_special are for tiktoken files; %s has its own",
                     o->name);
    else if (json)
        st = looks_like_tekken(text, n) ? read_tekken(m, o->name, text, n, e) : read_hf(m, o->name, text, n, e);
    else
        st = read_tiktoken(m, o->name, text, n, o->pattern, o->special, e);
    free(text);
    m->files[0] = strdup(o->name);
    m->n_files = 1;
    return st != ST_OK || m->files[0] != NULL ? st : err_set(e, ST_NOMEM, "out of memory opening %s", o->name);
}

/* ---- Opening --------------------------------------------------------------------------------- */

static int find_eod(struct tokenizer *t, const struct tokenizer_opts *o, struct err *e)
{
    /* The fourth is DeepSeek's, with U+FF5C and U+2581 for the bar and the spaces. */
    static const char *const names[] = {
        "<|endoftext|>",
        "<|end_of_text|>",
        "</s>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|end_of_sentence|>",
        "<eos>",
        "<|eos|>",
        "<|im_end|>",
        "<EOT>",
    };
    if (o->eod_token != NULL && o->eod_token[0] != '\0') {
        t->eod = tokenizer_find(t, o->eod_token);
        return t->eod >= 0 ? ST_OK : err_set(e, ST_USAGE, "%s has no token '%s'", o->name, o->eod_token);
    }
    for (int i = 0; i < countof(names) && t->eod < 0; i++)
        t->eod = tokenizer_find(t, names[i]);
    if (t->eod >= 0)
        return ST_OK;
    err_set(e, ST_USAGE, "no known end-of-document token in %s", o->name);
    return err_hint(e, "name it with data.eod_token, or set data.eod=off");
}

static int open_bytes(struct tokenizer *t, const struct tokenizer_opts *o)
{
    t->is_bytes = true;
    t->vocab = BYTE_IDS + (o->eod ? 1 : 0);
    t->eod = o->eod ? BYTE_IDS : -1;
    t->hash = hash64_str("bytes", 0); /* the same with and without an end-of-document token: ids of text agree */
    return ST_OK;
}

int tokenizer_open_opts(struct tokenizer *t, const struct tokenizer_opts *o, struct err *e)
{
    *t = (struct tokenizer){.eod = -1};
    if (strcmp(o->name, "bytes") == 0)
        return open_bytes(t, o);
    if (!file_exists(o->name)) {
        err_set(e, ST_IO, "unknown tokenizer '%s': it is not 'bytes', and there is no such file", o->name);
        return err_hint(e, "name a tokenizer.json, a .tiktoken file, a tekken.json, or GPT-2's encoder.json");
    }
    t->model = calloc(1, sizeof *t->model);
    if (t->model == NULL)
        return err_set(e, ST_NOMEM, "out of memory opening %s", o->name);
    int st = open_file(t->model, o, e);
    if (st == ST_OK) {
        t->vocab = t->model->vocab.n;
        t->hash = token_model_hash(t->model);
        st = o->eod ? find_eod(t, o, e) : ST_OK;
    }
    if (st != ST_OK)
        tokenizer_close(t);
    return st;
}

int tokenizer_open(struct tokenizer *t, const char *name, bool with_eod, struct err *e)
{
    return tokenizer_open_opts(t, &(struct tokenizer_opts){.name = name, .eod = with_eod}, e);
}

void tokenizer_close(struct tokenizer *t)
{
    token_model_release(t->model);
    *t = (struct tokenizer){.eod = -1};
}

/* ---- Asking ---------------------------------------------------------------------------------- */

int64_t token_n_bytes(const struct tokenizer *t, int32_t id)
{
    if (id < 0 || id >= t->vocab)
        return 0;
    if (t->model == NULL)
        return id < BYTE_IDS ? 1 : 0;
    return t->model->vocab.flags[id] & T_SPECIAL ? 0 : (int64_t)t->model->vocab.text[id].len;
}

int tokenizer_decode(const struct tokenizer *t, int32_t id, uint8_t *out, size_t cap, size_t *n, struct err *e)
{
    if (id < 0 || id >= t->vocab)
        return err_set(e, ST_INVALID, "token id %d is outside the vocabulary of %d", id, t->vocab);
    *n = (size_t)token_n_bytes(t, id);
    size_t used = *n < cap ? *n : cap;
    if (t->model == NULL && used > 0)
        out[0] = (uint8_t)id;
    else if (used > 0)
        memcpy(out, t->model->vocab.bytes + t->model->vocab.text[id].off, used);
    return ST_OK;
}

int tokenizer_count_bytes(const struct tokenizer *t, const int32_t *ids, int64_t n, int64_t *bytes, struct err *e)
{
    *bytes = 0;
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] >= t->vocab)
            return err_set(e, ST_INVALID, "token id %d is outside the vocabulary of %d", ids[i], t->vocab);
        *bytes += token_n_bytes(t, ids[i]);
    }
    return ST_OK;
}

size_t tokenizer_text_skip(const struct tokenizer *t) { return t->model != NULL && t->model->strip_first ? 1 : 0; }

bool token_is_special(const struct tokenizer *t, int32_t id)
{
    if (t->model == NULL)
        return id >= BYTE_IDS;
    return id >= 0 && id < t->vocab && (t->model->vocab.flags[id] & T_SPECIAL) != 0;
}

const char *tokenizer_name(const struct tokenizer *t, int32_t id, size_t *n)
{
    if (t->model == NULL || id < 0 || id >= t->vocab || !(t->model->vocab.flags[id] & T_ADDED))
        return NULL;
    *n = t->model->vocab.text[id].len;
    return (const char *)t->model->vocab.bytes + t->model->vocab.text[id].off;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *text)
{
    size_t n = strlen(text);
    for (int i = 0; t->model != NULL && i < t->model->n_added; i++)
        if (t->model->added[i].n == n && memcmp(t->model->added[i].text, text, n) == 0)
            return t->model->added[i].id;
    return -1;
}

const char *tokenizer_kind(const struct tokenizer *t) { return t->model != NULL ? t->model->kind : "bytes"; }

const char *tokenizer_hash_text(const struct tokenizer *t, char out[17])
{
    snprintf(out, 17, "%016" PRIx64, t->hash);
    return out;
}

int tokenizer_n_files(const struct tokenizer *t) { return t->model != NULL ? t->model->n_files : 0; }
const char *tokenizer_file(const struct tokenizer *t, int i) { return t->model->files[i]; }
