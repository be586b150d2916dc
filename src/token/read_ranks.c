/* Readers of vocabularies whose merges follow from ranks (tiktoken, tekken.json), and of the GPT-2
 * pair. */
#include "token/token_int.h"

#include <jansson.h>
#include <stdlib.h>

/* tiktoken files hold neither pattern nor special tokens; those of published models are known by
 * their size. */
struct known_ranks {
    int64_t n;
    const char *name, *pattern, *special;
    int64_t vocab; /* reserved tokens fill up to it; 0: none */
    bool nfc;      /* text is normalised first */
};
static const struct known_ranks known[] = {
    {50256, "r50k", "r50k", "<|endoftext|>", 0, false},
    {50280, "p50k", "r50k", "", 0, false},
    {100256, "cl100k", "cl100k", "", 0, false},
    {128000, "Llama 3", "llama3",
     "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|> "
     "<|finetune_right_pad_id|> <|step_id|> <|start_header_id|> <|end_header_id|> <|eom_id|> "
     "<|eot_id|> "
     "<|python_tag|> <|image|>",
     128256, false},
    {151643, "Qwen", "qwen2", "<|endoftext|> <|im_start|> <|im_end|>", 0, true},
    {199998, "o200k", "o200k", "<|endoftext|>", 0, false},
    {200000, "Llama 4", "o200k", "<|begin_of_text|> <|end_of_text|>", 0, false},
    {248044, "Qwen 3.5", "qwen35", "<|endoftext|> <|im_start|> <|im_end|>", 0, true},
};

static int add_special(struct token_model *m, int32_t id, const char *text, size_t n, struct err *e)
{
    struct added_token a = {.id = id, .n = n, .special = true};
    char *copy = strndup(text, n);
    if (copy == NULL)
        return err_set(e, ST_NOMEM, "out of memory for a special token");
    a.text = copy;
    int st = token_model_add_added(m, &a, e);
    free(copy);
    return st;
}

/* Names separated by spaces get the ids from `id` on. */
static int add_specials(struct token_model *m, int32_t id, const char *names, struct err *e)
{
    while (*names != '\0') {
        size_t n = strcspn(names, " ");
        if (n > 0)
            TRY(add_special(m, id++, names, n, e));
        names += n + (names[n] == ' ');
    }
    return ST_OK;
}

static int add_reserved(struct token_model *m, int32_t id, const struct known_ranks *k, struct err *e)
{
    char name[64];
    int next = 2; /* the first two stand among the named ones */
    TRY(add_specials(m, id, k->special, e));
    for (int64_t at = id + m->n_added; at < k->vocab; at++) {
        int n = snprintf(name, sizeof name, "<|reserved_special_token_%d|>", next++);
        TRY(add_special(m, (int32_t)at, name, (size_t)n, e));
    }
    return ST_OK;
}

/* "base64 SPACE rank" */
static int read_line(struct token_model *m, const char *line, size_t n, uint8_t *bytes, struct err *e)
{
    const char *space = memchr(line, ' ', n);
    size_t n_text = space != NULL ? (size_t)(space - line) : 0;
    char number[24] = "";
    int64_t rank, len = n_text > 0 && n_text <= TOKEN_MAX_BYTES ? base64_decode(line, n_text, bytes) : -1;
    if (len <= 0 || n - n_text - 1 >= sizeof number)
        return err_set(e, ST_CORRUPT, "not 'base64 rank': '%.*s'", (int)(n < 60 ? n : 60), line);
    memcpy(number, space + 1, n - n_text - 1);
    if (!parse_i64(number, &rank))
        return err_set(e, ST_CORRUPT, "'%s' is not a rank", number);
    return vocab_add(&m->vocab, rank, bytes, (size_t)len, T_MODEL, e);
}

static int read_lines(struct token_model *m, const char *path, const char *text, size_t n, struct err *e)
{
    uint8_t *bytes;
    int64_t line_number = 0;
    TRY(mem_array((void **)&bytes, TOKEN_MAX_BYTES + 4, 1, e));
    int st = ST_OK;
    for (size_t at = 0; at < n && st == ST_OK;) {
        const char *end = memchr(text + at, '\n', n - at);
        size_t len = end != NULL ? (size_t)(end - text) - at : n - at, used = len;
        line_number++;
        if (used > 0 && text[at + used - 1] == '\r')
            used--;
        if (used > 0)
            st = read_line(m, text + at, used, bytes, e);
        if (st != ST_OK)
            err_in(e, "%s, line %lld", path, (long long)line_number);
        at += len + 1;
    }
    free(bytes);
    return st;
}

/* Ranks from `first` on without holes, and a token for every byte: then any text can be encoded. */
static int check_ranks(struct token_model *m, const char *path, int32_t first, struct err *e)
{
    for (int32_t id = first; id < m->vocab.n; id++)
        if (!(m->vocab.flags[id] & T_USED))
            return err_set(e, ST_CORRUPT, "%s: rank %d is missing", path, id - first);
    for (int b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        if (vocab_find(&m->vocab, &byte, 1, piece_hash(&byte, 1)) < 0)
            return err_set(e, ST_CORRUPT, "%s: byte 0x%02X has no token", path, (unsigned)b);
    }
    return ST_OK;
}

/* Pattern and special tokens: as asked for, else those of the model with this number of tokens. */
static int complete_ranks(struct token_model *m, const char *path, const char *pattern, const char *special,
                          struct err *e)
{
    const struct known_ranks *k = NULL;
    int32_t n = m->vocab.n;
    for (int i = 0; i < countof(known); i++)
        if (known[i].n == n)
            k = &known[i];
    bool given = pattern != NULL && pattern[0] != '\0', named = special != NULL && special[0] != '\0';
    if (!given && k == NULL) {
        err_set(e, ST_USAGE, "%s: a tiktoken file of %d tokens does not say how text is split", path, n);
        return err_hint(e, "set data.token_pattern to the name of a pattern (gpt2, llama3, cl100k, "
                           "o200k, ...) or a regular "
                           "expression, and data.token_special to the special tokens");
    }
    const char *name = given ? pattern : k->pattern;
    const struct split_known *s = split_find_name(name);
    TRY(token_model_add_pattern(m, s != NULL ? s->pattern : name, e));
    if (k != NULL && k->nfc && !given)
        m->norm = (struct norm){.step = {{.kind = NORM_NFC}}, .n = 1};
    if (named)
        return add_specials(m, n, special, e);
    return k != NULL ? add_reserved(m, n, k, e) : ST_OK;
}

static void rank_model(struct token_model *m, const char *kind)
{
    m->kind = kind;
    m->byte_level = m->ignore_merges = true;
    m->unk = -1;
}

int read_tiktoken(struct token_model *m, const char *path, const char *text, size_t n, const char *pattern,
                  const char *special, struct err *e)
{
    rank_model(m, "tiktoken");
    TRY(read_lines(m, path, text, n, e));
    TRY(vocab_index(&m->vocab, e));
    TRY(check_ranks(m, path, 0, e));
    TRY(vocab_pairs_of_ranks(&m->vocab, e));
    TRY(complete_ranks(m, path, pattern, special, e));
    return token_model_finish(m, e);
}

/* ---- tekken.json ----------------------------------------------------------------------------- */

static int tekken_specials(struct token_model *m, const char *path, const json_t *list, int64_t n, struct err *e)
{
    static const char *const names[] = {"<unk>",
                                        "<s>",
                                        "</s>",
                                        "[INST]",
                                        "[/INST]",
                                        "[AVAILABLE_TOOLS]",
                                        "[/AVAILABLE_TOOLS]",
                                        "[TOOL_RESULTS]",
                                        "[/TOOL_RESULTS]",
                                        "[TOOL_CALLS]",
                                        "[IMG]",
                                        "<pad>",
                                        "[IMG_BREAK]",
                                        "[IMG_END]",
                                        "[PREFIX]",
                                        "[MIDDLE]",
                                        "[SUFFIX]",
                                        "[SYSTEM_PROMPT]",
                                        "[/SYSTEM_PROMPT]",
                                        "[TOOL_CONTENT]"};
    for (int64_t id = 0; id < n; id++) {
        char text[32];
        const json_t *given = json_array_get(list, (size_t)id);
        const char *name = json_string_value(json_object_get(given, "token_str"));
        if (given != NULL && (name == NULL || json_integer_value(json_object_get(given, "rank")) != id))
            return err_set(e, ST_CORRUPT, "%s: special token %lld has another rank, or no text", path, (long long)id);
        if (name == NULL && list == NULL && id < countof(names))
            name = names[id];
        snprintf(text, sizeof text, "<SPECIAL_%lld>", (long long)id);
        name = name != NULL ? name : text;
        TRY(add_special(m, (int32_t)id, name, strlen(name), e));
    }
    return ST_OK;
}

static int tekken_vocab(struct token_model *m, const char *path, const json_t *list, int64_t special, int64_t n,
                        struct err *e)
{
    uint8_t *bytes;
    TRY(mem_array((void **)&bytes, TOKEN_MAX_BYTES + 4, 1, e));
    int st = ST_OK;
    for (int64_t i = 0; i < n && st == ST_OK; i++) {
        const json_t *o = json_array_get(list, (size_t)i), *text = json_object_get(o, "token_bytes");
        size_t n_text = json_string_length(text);
        int64_t len =
            n_text > 0 && n_text <= TOKEN_MAX_BYTES ? base64_decode(json_string_value(text), n_text, bytes) : -1;
        if (len <= 0 || json_integer_value(json_object_get(o, "rank")) != i)
            st = err_set(e, ST_CORRUPT, "%s: entry %lld of the vocabulary is not its rank and bytes in base64", path,
                         (long long)i);
        else
            st = vocab_add(&m->vocab, special + i, bytes, (size_t)len, T_MODEL, e);
    }
    free(bytes);
    return st;
}

int read_tekken(struct token_model *m, const char *path, const char *text, size_t n, struct err *e)
{
    json_error_t why;
    rank_model(m, "tekken.json");
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &why);
    if (root == NULL)
        return err_set(e, ST_CORRUPT, "%s: line %d, column %d: %s", path, why.line, why.column, why.text);
    const json_t *config = json_object_get(root, "config"), *vocab = json_object_get(root, "vocab");
    const json_t *pattern = json_object_get(config, "pattern");
    int64_t size = json_integer_value(json_object_get(config, "default_vocab_size"));
    int64_t special = json_integer_value(json_object_get(config, "default_num_special_tokens"));
    int st;
    if (json_string_length(pattern) == 0 || special < 0 || special >= TOKEN_MAX_ID || size <= special ||
        size > TOKEN_MAX_ID || (int64_t)json_array_size(vocab) < size - special)
        TRY_OUT(
            err_set(e, ST_CORRUPT, "%s: config and vocab of tekken.json are missing or do not fit each other", path));
    TRY_OUT(tekken_vocab(m, path, vocab, special, size - special, e));
    TRY_OUT(vocab_index(&m->vocab, e));
    TRY_OUT(check_ranks(m, path, (int32_t)special, e));
    TRY_OUT(vocab_pairs_of_ranks(&m->vocab, e));
    TRY_OUT(tekken_specials(m, path, json_object_get(root, "special_tokens"), special, e));
    TRY_OUT(token_model_add_pattern(m, json_string_value(pattern), e));
    TRY_OUT(token_model_finish(m, e));
out:
    json_decref(root);
    return st;
}

/* ---- GPT-2 ----------------------------------------------------------------------------------- */

/* encoder.json is the vocabulary in the byte alphabet; a key outside of it is a special token. */
static int gpt2_vocab(struct token_model *m, const char *path, json_t *root, struct err *e)
{
    uint8_t *bytes;
    TRY(mem_array((void **)&bytes, TOKEN_MAX_BYTES, 1, e));
    int st = ST_OK;
    for (void *it = json_object_iter(root); it != NULL && st == ST_OK; it = json_object_iter_next(root, it)) {
        const char *key = json_object_iter_key(it);
        const json_t *id = json_object_iter_value(it);
        size_t n = strlen(key);
        bool special = strcmp(key, "<|endoftext|>") == 0;
        int64_t len = json_is_integer(id) && n <= TOKEN_MAX_BYTES ? alphabet_decode(key, n, bytes) : -1;
        if (len < 0)
            st = err_set(e, ST_CORRUPT, "%s: '%.60s' is not a token in the byte alphabet with its id", path, key);
        else
            st = vocab_add(&m->vocab, json_integer_value(id), bytes, (size_t)len, special ? 0 : T_MODEL, e);
        if (st == ST_OK && special)
            st = add_special(m, (int32_t)json_integer_value(id), key, n, e);
    }
    free(bytes);
    return st;
}

static int gpt2_merge(struct token_model *m, const char *line, size_t n, uint32_t rank, uint8_t *bytes, struct err *e)
{
    const char *space = memchr(line, ' ', n);
    if (space == NULL || n > TOKEN_MAX_BYTES)
        return err_set(e, ST_CORRUPT, "not two tokens: '%.*s'", (int)(n < 60 ? n : 60), line);
    size_t n_left = (size_t)(space - line);
    int64_t left = alphabet_decode(line, n_left, bytes);
    int64_t right = left < 0 ? -1 : alphabet_decode(space + 1, n - n_left - 1, bytes + left);
    int32_t id[3] = {-1, -1, -1};
    if (left > 0 && right > 0) {
        id[0] = vocab_find(&m->vocab, bytes, (size_t)left, piece_hash(bytes, (size_t)left));
        id[1] = vocab_find(&m->vocab, bytes + left, (size_t)right, piece_hash(bytes + left, (size_t)right));
        id[2] = vocab_find(&m->vocab, bytes, (size_t)(left + right), piece_hash(bytes, (size_t)(left + right)));
    }
    if (id[0] < 0 || id[1] < 0 || id[2] < 0)
        return err_set(e, ST_CORRUPT, "merge '%.*s' is not made of tokens of the vocabulary", (int)(n < 60 ? n : 60),
                       line);
    vocab_add_pair(&m->vocab, id[0], id[1], rank, id[2]);
    return ST_OK;
}

static int gpt2_merges(struct token_model *m, const char *path, const char *text, size_t n, struct err *e)
{
    uint8_t *bytes;
    uint32_t rank = 0;
    size_t lines = 0;
    for (size_t i = 0; i < n; i++)
        lines += text[i] == '\n';
    TRY(vocab_pairs_init(&m->vocab, lines + 1, e));
    TRY(mem_array((void **)&bytes, TOKEN_MAX_BYTES, 1, e));
    int st = ST_OK;
    for (size_t at = 0; at < n && st == ST_OK;) {
        const char *end = memchr(text + at, '\n', n - at);
        size_t len = end != NULL ? (size_t)(end - text) - at : n - at, used = len;
        if (used > 0 && text[at + used - 1] == '\r')
            used--;
        if (used > 0 && !(at == 0 && text[0] == '#'))
            st = gpt2_merge(m, text + at, used, rank++, bytes, e);
        at += len + 1;
    }
    free(bytes);
    return st == ST_OK ? st : err_in(e, "%s, merge %u", path, rank);
}

int read_gpt2(struct token_model *m, const char *path, const char *encoder, size_t n_encoder, const char *merges,
              size_t n_merges, struct err *e)
{
    json_error_t why;
    rank_model(m, "GPT-2 encoder.json and vocab.bpe");
    m->ignore_merges = false;
    json_t *root = json_loadb(encoder, n_encoder, JSON_REJECT_DUPLICATES, &why);
    if (root == NULL)
        return err_set(e, ST_CORRUPT, "%s: line %d, column %d: %s", path, why.line, why.column, why.text);
    int st;
    if (!json_is_object(root))
        TRY_OUT(err_set(e, ST_CORRUPT, "%s is not a JSON object of tokens and ids", path));
    TRY_OUT(gpt2_vocab(m, path, root, e));
    TRY_OUT(vocab_index(&m->vocab, e));
    TRY_OUT(gpt2_merges(m, path, merges, n_merges, e));
    TRY_OUT(token_model_add_pattern(m, split_find_name("gpt2")->pattern, e));
    TRY_OUT(token_model_finish(m, e));
out:
    json_decref(root);
    return st;
}
