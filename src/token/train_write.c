/* Training, third part: opening a trainer, and the files it writes. */
#include "token/train_int.h"

#include <stdlib.h>

static int count_names(const char *names)
{
    int n = 0;
    for (bool in = false; *names != '\0'; names++) {
        n += *names != ' ' && !in;
        in = *names != ' ';
    }
    return n;
}

static int open_pattern(struct token_trainer *t, struct err *e)
{
    const char *p = t->o.pattern != NULL && t->o.pattern[0] != '\0' ? t->o.pattern : "gpt2";
    t->known = split_find_name(p);
    if (t->known == NULL)
        t->known = split_find_pattern(p);
    if (t->known == NULL && split_reads_otherwise(p)) {
        err_set(e, ST_UNSUPPORTED,
                "the pattern repeats a count ('{n,m}+'), which programs that read tokenizer.json understand otherwise");
        return err_hint(e, "put the part before the '+' into an atomic group: (?>X{n,m})");
    }
    if (t->known == NULL)
        TRY(regex_open(&t->regex, p, e));
    t->pattern = strdup(t->known != NULL ? t->known->pattern : p);
    t->special = strdup(t->o.special != NULL ? t->o.special : "");
    return t->pattern != NULL && t->special != NULL ? ST_OK : err_set(e, ST_NOMEM, "out of memory for a trainer");
}

int token_trainer_open(struct token_trainer **out, const struct token_train_opts *o, struct err *e)
{
    *out = NULL;
    int n_special = count_names(o->special != NULL ? o->special : "");
    if (o->vocab < 256 + n_special || o->vocab > TOKEN_MAX_ID)
        return err_set(e, ST_USAGE,
                       "a vocabulary of %lld tokens; it must hold 256 bytes and %d special tokens, "
                       "and at most %d",
                       (long long)o->vocab, n_special, TOKEN_MAX_ID);
    struct token_trainer *t = calloc(1, sizeof *t);
    if (t == NULL)
        return err_set(e, ST_NOMEM, "out of memory for a trainer");
    t->o = *o;
    t->o.threads = o->threads > 0 ? o->threads : cpu_count();
    t->n_special = n_special;
    int st;
    TRY_OUT(open_pattern(t, e));
    TRY_OUT(classes_make(&t->classes, e));
    TRY_OUT(pieces_init(&t->pieces, 1 << 16, e));
    *out = t;
    return ST_OK;
out:
    token_trainer_close(t);
    return st;
}

void token_trainer_close(struct token_trainer *t)
{
    if (t == NULL)
        return;
    regex_close(t->regex);
    pieces_release(&t->pieces);
    free(t->classes);
    free(t->pattern);
    free(t->special);
    free(t->bytes);
    free(t->tokens);
    free(t->merges);
    free(t);
}

struct token_train_stats token_trainer_stats(const struct token_trainer *t) { return t->stats; }

/* ---- tokenizer.json -------------------------------------------------------------------------- */

static void add_json_text(struct buf *out, const char *text, size_t n)
{
    buf_add(out, "\"");
    for (size_t i = 0; i < n; i++) {
        uint8_t c = (uint8_t)text[i];
        if (c == '"' || c == '\\')
            buf_addf(out, "\\%c", c);
        else if (c < 0x20)
            buf_addf(out, "\\u%04x", (unsigned)c);
        else
            buf_add_n(out, &text[i], 1);
    }
    buf_add(out, "\"");
}

/* A token in the byte alphabet. */
static void add_token(const struct token_trainer *t, struct buf *out, uint32_t id)
{
    struct token_span s = t->tokens[id];
    buf_add(out, "\"");
    for (uint32_t i = 0; i < s.len; i++) {
        uint8_t utf8[4], byte = t->bytes[s.off + i];
        if (byte == '"' || byte == '\\')
            buf_add(out, "\\");
        buf_add_n(out, utf8, utf8_put(alphabet_char(byte), utf8));
    }
    buf_add(out, "\"");
}

static void add_specials(const struct token_trainer *t, struct buf *out)
{
    size_t id = t->n_tokens;
    const char *p = t->special;
    while (*(p += strspn(p, " ")) != '\0') {
        size_t n = strcspn(p, " ");
        buf_addf(out, "%s\n    {\"id\": %zu, \"content\": ", id > t->n_tokens ? "," : "", id);
        add_json_text(out, p, n);
        buf_add(out, ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                     "\"normalized\": false, \"special\": true}");
        id++;
        p += n;
    }
}

static void add_merges(const struct token_trainer *t, struct buf *out)
{
    for (size_t i = 0; i < t->n_merges; i++) {
        buf_add(out, i > 0 ? ",\n      [" : "\n      [");
        add_token(t, out, t->merges[i].left);
        buf_add(out, ", ");
        add_token(t, out, t->merges[i].right);
        buf_add(out, "]");
    }
}

static int write_json(const struct token_trainer *t, const char *path, struct err *e)
{
    struct buf b;
    buf_init(&b, 0);
    buf_add(&b, "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n  "
                "\"added_tokens\": [");
    add_specials(t, &b);
    buf_add(&b, "],\n  \"normalizer\": null,\n  \"pre_tokenizer\": {\"type\": \"Sequence\", "
                "\"pretokenizers\": [\n"
                "    {\"type\": \"Split\", \"pattern\": {\"Regex\": ");
    const char *pattern = t->known != NULL && t->known->in_json != NULL ? t->known->in_json : t->pattern;
    add_json_text(&b, pattern, strlen(pattern));
    buf_add(&b, "}, \"behavior\": \"Isolated\", \"invert\": false},\n"
                "    {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": "
                "true, \"use_regex\": false}]},\n"
                "  \"post_processor\": null,\n"
                "  \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, "
                "\"trim_offsets\": true, \"use_regex\": true},\n"
                "  \"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
                "\"continuing_subword_prefix\": null, "
                "\"end_of_word_suffix\": null, \"fuse_unk\": false, \"byte_fallback\": false, "
                "\"ignore_merges\": false,\n"
                "    \"vocab\": {");
    for (size_t id = 0; id < t->n_tokens; id++) {
        buf_add(&b, id > 0 ? ",\n      " : "\n      ");
        add_token(t, &b, (uint32_t)id);
        buf_addf(&b, ": %zu", id);
    }
    buf_add(&b, "},\n    \"merges\": [");
    add_merges(t, &b);
    buf_add(&b, "]\n  }\n}\n");
    int st = buf_check(&b, e);
    if (st == ST_OK)
        st = file_write_atomic(path, b.text, b.len, e);
    buf_release(&b);
    return st;
}

static int write_tiktoken(const struct token_trainer *t, const char *path, struct err *e)
{
    struct buf b;
    buf_init(&b, 0);
    for (size_t id = 0; id < t->n_tokens; id++) {
        base64_encode(t->bytes + t->tokens[id].off, t->tokens[id].len, &b);
        buf_addf(&b, " %zu\n", id);
    }
    int st = buf_check(&b, e);
    if (st == ST_OK)
        st = file_write_atomic(path, b.text, b.len, e);
    buf_release(&b);
    return st;
}

int token_trainer_write(const struct token_trainer *t, const char *prefix, struct err *e)
{
    size_t n = strlen(prefix) + 16;
    char *path;
    TRY(mem_array((void **)&path, n, 1, e));
    snprintf(path, n, "%s.json", prefix);
    int st = write_json(t, path, e);
    snprintf(path, n, "%s.tiktoken", prefix);
    if (st == ST_OK)
        st = write_tiktoken(t, path, e);
    free(path);
    return st;
}
