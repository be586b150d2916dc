/* Reads Hugging Face's tokenizer.json: BPE models, byte-level or of characters with byte fallback.
 * What it does not know it refuses by name, as leaving a step out would give other ids. */
#include "token/token_int.h"

#include <jansson.h>
#include <stdlib.h>

struct reader {
    struct token_model *m;
    const char *path;
};

static int corrupt(const struct reader *r, struct err *e, const char *what)
{
    return err_set(e, ST_CORRUPT, "%s: %s", r->path, what);
}

static int unsupported(const struct reader *r, struct err *e, const char *part, const char *type)
{
    err_set(e, ST_UNSUPPORTED, "%s: %s of type '%.60s' is not supported", r->path, part, type);
    return err_hint(e, "byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek, ...) and "
                       "SentencePiece-style BPE with byte fallback are");
}

/* A member that is a string; "" where it is missing or null. */
static const char *text_of(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s != NULL ? s : "";
}

static bool flag_of(const json_t *o, const char *key, bool missing)
{
    const json_t *v = json_object_get(o, key);
    return json_is_boolean(v) ? json_is_true(v) : missing;
}

/* ---- Normaliser ------------------------------------------------------------------------------ */

static int norm_push(struct reader *r, enum norm_kind kind, const json_t *from, const json_t *to, struct err *e)
{
    struct norm *n = &r->m->norm;
    if (n->n == NORM_MAX)
        return corrupt(r, e, "too many normalizers");
    struct norm_step *s = &n->step[n->n];
    *s = (struct norm_step){.kind = kind, .n_from = json_string_length(from), .n_to = json_string_length(to)};
    s->from = strdup(from != NULL ? json_string_value(from) : "");
    s->to = strdup(to != NULL ? json_string_value(to) : "");
    n->n++;
    return s->from != NULL && s->to != NULL ? ST_OK : err_set(e, ST_NOMEM, "out of memory reading %s", r->path);
}

static int read_norm(struct reader *r, const json_t *o, int depth, struct err *e)
{
    static const struct {
        const char *name;
        enum norm_kind kind;
    } forms[] = {{"NFC", NORM_NFC}, {"NFD", NORM_NFD}, {"NFKC", NORM_NFKC}, {"NFKD", NORM_NFKD}};
    if (o == NULL || json_is_null(o))
        return ST_OK;
    const char *type = text_of(o, "type");
    if (strcmp(type, "Sequence") == 0 && depth < 4) {
        const json_t *list = json_object_get(o, "normalizers");
        for (size_t i = 0; i < json_array_size(list); i++)
            TRY(read_norm(r, json_array_get(list, i), depth + 1, e));
        return ST_OK;
    }
    for (int i = 0; i < countof(forms); i++)
        if (strcmp(type, forms[i].name) == 0)
            return norm_push(r, forms[i].kind, NULL, NULL, e);
    if (strcmp(type, "Prepend") == 0 && json_is_string(json_object_get(o, "prepend")))
        return norm_push(r, NORM_PREPEND, NULL, json_object_get(o, "prepend"), e);
    const json_t *from = json_object_get(json_object_get(o, "pattern"), "String");
    if (strcmp(type, "Replace") == 0 && json_string_length(from) > 0 && json_is_string(json_object_get(o, "content")))
        return norm_push(r, NORM_REPLACE, from, json_object_get(o, "content"), e);
    return unsupported(r, e, "a normalizer", type);
}

/* ---- Pre-tokenizer --------------------------------------------------------------------------- */

static int stage_push(struct reader *r, struct stage s, struct err *e)
{
    if (r->m->n_stages == STAGES_MAX) {
        free(s.string);
        return corrupt(r, e, "too many pre-tokenizers");
    }
    r->m->stage[r->m->n_stages++] = s;
    return ST_OK;
}

static int read_split(struct reader *r, const json_t *o, struct err *e)
{
    static const char *const behaviors[] = {[SPLIT_ISOLATED] = "Isolated",
                                            [SPLIT_REMOVED] = "Removed",
                                            [SPLIT_WITH_PREVIOUS] = "MergedWithPrevious",
                                            [SPLIT_WITH_NEXT] = "MergedWithNext"};
    const char *name = text_of(o, "behavior");
    int behavior = 0;
    while (behavior < countof(behaviors) && strcmp(behaviors[behavior], name) != 0)
        behavior++;
    if (behavior == countof(behaviors))
        return unsupported(r, e, "a Split with behavior", name);
    const json_t *pattern = json_object_get(o, "pattern"), *string = json_object_get(pattern, "String");
    const char *regex = json_string_value(json_object_get(pattern, "Regex"));
    bool invert = flag_of(o, "invert", false);
    if (regex != NULL) {
        if (strlen(regex) != json_string_length(json_object_get(pattern, "Regex")))
            return corrupt(r, e, "a pattern holds a NUL character");
        /* Earlier versions of braid wrote a known pattern so, and mean what they always did. */
        if (split_find_pattern(regex) == NULL && split_reads_otherwise(regex))
            return unsupported(r, e, "a pattern that repeats a count ('{n,m}+')", regex);
        if (token_model_add_pattern(r->m, regex, e) != ST_OK)
            return err_in(e, "reading %s", r->path);
        struct stage *s = &r->m->stage[r->m->n_stages - 1];
        s->behavior = (enum stage_behavior)behavior;
        s->invert = invert;
        return ST_OK;
    }
    if (json_string_length(string) == 0)
        return corrupt(r, e, "a Split has neither a Regex nor a String");
    struct stage s = {.kind = STAGE_STRING,
                      .behavior = (enum stage_behavior)behavior,
                      .invert = invert,
                      .string = strdup(json_string_value(string)),
                      .n_string = json_string_length(string)};
    return s.string != NULL ? stage_push(r, s, e) : err_set(e, ST_NOMEM, "out of memory reading %s", r->path);
}

static int read_byte_level(struct reader *r, const json_t *o, struct err *e)
{
    r->m->byte_level = true;
    if (flag_of(o, "add_prefix_space", true))
        TRY(stage_push(r, (struct stage){.kind = STAGE_SPACE}, e));
    return flag_of(o, "use_regex", true) ? token_model_add_pattern(r->m, split_find_name("gpt2")->pattern, e) : ST_OK;
}

static int read_metaspace(struct reader *r, const json_t *o, struct err *e)
{
    const json_t *mark = json_object_get(o, "replacement");
    const char *scheme = text_of(o, "prepend_scheme");
    struct stage s = {.kind = STAGE_METASPACE, .when = META_ALWAYS};
    if (scheme[0] == '\0')
        s.when = flag_of(o, "add_prefix_space", true) ? META_ALWAYS : META_NEVER; /* the older spelling */
    else if (strcmp(scheme, "first") == 0)
        s.when = META_FIRST;
    else if (strcmp(scheme, "never") == 0)
        s.when = META_NEVER;
    else if (strcmp(scheme, "always") != 0)
        return unsupported(r, e, "a Metaspace with prepend_scheme", scheme);
    if (json_string_length(mark) == 0)
        return corrupt(r, e, "a Metaspace has no replacement");
    s.n_string = json_string_length(mark);
    if ((s.string = strdup(json_string_value(mark))) == NULL)
        return err_set(e, ST_NOMEM, "out of memory reading %s", r->path);
    TRY(stage_push(r, s, e));
    if (!flag_of(o, "split", true))
        return ST_OK;
    struct stage cut = {
        .kind = STAGE_STRING, .behavior = SPLIT_WITH_NEXT, .string = strdup(s.string), .n_string = s.n_string};
    return cut.string != NULL ? stage_push(r, cut, e) : err_set(e, ST_NOMEM, "out of memory reading %s", r->path);
}

static int read_pre(struct reader *r, const json_t *o, int depth, struct err *e)
{
    if (o == NULL || json_is_null(o))
        return ST_OK;
    const char *type = text_of(o, "type");
    if (strcmp(type, "Sequence") == 0 && depth < 4) {
        const json_t *list = json_object_get(o, "pretokenizers");
        for (size_t i = 0; i < json_array_size(list); i++)
            TRY(read_pre(r, json_array_get(list, i), depth + 1, e));
        return ST_OK;
    }
    if (r->m->byte_level)
        return corrupt(r, e, "a pre-tokenizer comes after ByteLevel");
    if (strcmp(type, "Split") == 0)
        return read_split(r, o, e);
    if (strcmp(type, "ByteLevel") == 0)
        return read_byte_level(r, o, e);
    if (strcmp(type, "Metaspace") == 0)
        return read_metaspace(r, o, e);
    if (strcmp(type, "Digits") == 0) /* all digits of a number are one piece, or each is one */
        return token_model_add_pattern(r->m, flag_of(o, "individual_digits", false) ? "\\p{N}" : "\\p{N}+", e);
    return unsupported(r, e, "a pre-tokenizer", type);
}

/* ---- Model ----------------------------------------------------------------------------------- */

/* Byte-level keys are written in the byte alphabet. A key that is not (a special token) cannot come
 * out of BPE. */
static int read_vocab(struct reader *r, json_t *vocab, struct err *e)
{
    uint8_t *bytes;
    TRY(mem_array((void **)&bytes, TOKEN_MAX_BYTES, 1, e));
    void *it = json_object_iter(vocab);
    int st = ST_OK;
    for (; it != NULL && st == ST_OK; it = json_object_iter_next(vocab, it)) {
        const char *key = json_object_iter_key(it);
        const json_t *id = json_object_iter_value(it);
        size_t n = strlen(key);
        int64_t got = -1;
        if (!json_is_integer(id) || n > TOKEN_MAX_BYTES) {
            st = err_set(e, ST_CORRUPT, "the id of token '%.60s' is not a number, or the token is too long", key);
            break;
        }
        if (r->m->byte_level)
            got = alphabet_decode(key, n, bytes);
        st = got >= 0 ? vocab_add(&r->m->vocab, json_integer_value(id), bytes, (size_t)got, T_MODEL, e)
                      : vocab_add(&r->m->vocab, json_integer_value(id), key, n, r->m->byte_level ? 0 : T_MODEL, e);
    }
    free(bytes);
    return st;
}

/* The two halves of a merge in its two spellings: "a b", or ["a", "b"]. */
static bool merge_halves(const json_t *m, const char *half[2], size_t n[2])
{
    if (json_is_array(m) && json_array_size(m) == 2) {
        for (size_t k = 0; k < 2; k++) {
            half[k] = json_string_value(json_array_get(m, k));
            n[k] = json_string_length(json_array_get(m, k));
        }
        return half[0] != NULL && half[1] != NULL;
    }
    const char *text = json_string_value(m), *space = text != NULL ? strchr(text, ' ') : NULL;
    if (space == NULL || strchr(space + 1, ' ') != NULL)
        return false;
    half[0] = text;
    n[0] = (size_t)(space - text);
    half[1] = space + 1;
    n[1] = json_string_length(m) - n[0] - 1;
    return true;
}

/* Ids of both halves and of their concatenation; false: one is not in the vocabulary. */
static bool merge_ids(const struct token_model *m, const char *const half[2], const size_t n[2], uint8_t *text,
                      int32_t id[3])
{
    size_t at = 0;
    for (int k = 0; k < 2; k++) {
        if (n[k] == 0 || at + n[k] > TOKEN_MAX_BYTES)
            return false;
        int64_t len = (int64_t)n[k];
        if (m->byte_level)
            len = alphabet_decode(half[k], n[k], text + at);
        else
            memcpy(text + at, half[k], n[k]);
        if (len < 0)
            return false;
        id[k] = vocab_find(&m->vocab, text + at, (size_t)len, piece_hash(text + at, (size_t)len));
        at += (size_t)len;
    }
    id[2] = vocab_find(&m->vocab, text, at, piece_hash(text, at));
    return id[0] >= 0 && id[1] >= 0 && id[2] >= 0;
}

static int read_merges(struct reader *r, const json_t *merges, struct err *e)
{
    size_t count = json_array_size(merges);
    uint8_t *text;
    if (count > TOKEN_MAX_ID)
        return corrupt(r, e, "too many merges");
    TRY(vocab_pairs_init(&r->m->vocab, count, e));
    TRY(mem_array((void **)&text, TOKEN_MAX_BYTES, 1, e));
    int st = ST_OK;
    for (size_t i = 0; i < count && st == ST_OK; i++) {
        const char *half[2];
        size_t n[2];
        int32_t id[3];
        if (!merge_halves(json_array_get(merges, i), half, n))
            st = err_set(e, ST_CORRUPT, "%s: merge %zu is not two strings", r->path, i);
        else if (!merge_ids(r->m, half, n, text, id))
            st = err_set(e, ST_CORRUPT, "%s: merge %zu ('%.40s' and '%.40s') is not made of tokens of the vocabulary",
                         r->path, i, half[0], half[1]);
        else
            vocab_add_pair(&r->m->vocab, id[0], id[1], (uint32_t)i, id[2]);
    }
    free(text);
    return st;
}

static int read_model(struct reader *r, json_t *o, struct err *e)
{
    struct token_model *m = r->m;
    const char *type = text_of(o, "type");
    if (!json_is_object(o))
        return corrupt(r, e, "there is no model");
    if (strcmp(type, "BPE") != 0 && !(type[0] == '\0' && json_is_array(json_object_get(o, "merges"))))
        return unsupported(r, e, "a model", type);
    if (text_of(o, "continuing_subword_prefix")[0] != '\0' || text_of(o, "end_of_word_suffix")[0] != '\0')
        return unsupported(r, e, "a model", "BPE with prefixes or suffixes of words");
    const json_t *dropout = json_object_get(o, "dropout");
    if (json_is_number(dropout) && json_number_value(dropout) > 0)
        return unsupported(r, e, "a model", "BPE with dropout");
    m->byte_fallback = flag_of(o, "byte_fallback", false);
    m->fuse_unk = flag_of(o, "fuse_unk", false);
    m->ignore_merges = flag_of(o, "ignore_merges", false);
    json_t *vocab = json_object_get(o, "vocab");
    if (!json_is_object(vocab) || !json_is_array(json_object_get(o, "merges")))
        return corrupt(r, e, "the model lacks its vocab or its merges");
    TRY(read_vocab(r, vocab, e));
    TRY(vocab_index(&m->vocab, e));
    TRY(read_merges(r, json_object_get(o, "merges"), e));
    const char *unk = text_of(o, "unk_token");
    const json_t *unk_id = unk[0] != '\0' ? json_object_get(vocab, unk) : NULL;
    if (unk[0] != '\0' && unk_id == NULL)
        return err_set(e, ST_CORRUPT, "%s: unk_token '%.60s' is not in the vocabulary", r->path, unk);
    m->unk = unk_id != NULL ? (int32_t)json_integer_value(unk_id) : -1; /* vocab_add checked the range */
    return ST_OK;
}

/* ---- Added tokens, template, decoder --------------------------------------------------------- */

static int read_added(struct reader *r, const json_t *list, struct err *e)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *o = json_array_get(list, i), *id = json_object_get(o, "id"),
                     *text = json_object_get(o, "content");
        if (!json_is_integer(id) || !json_is_string(text) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= TOKEN_MAX_ID)
            return err_set(e, ST_CORRUPT, "%s: added token %zu has no valid id or no content", r->path, i);
        struct added_token a = {.id = (int32_t)json_integer_value(id), .n = json_string_length(text)};
        char *copy = strdup(json_string_value(text));
        if (copy == NULL)
            return err_set(e, ST_NOMEM, "out of memory reading %s", r->path);
        a.text = copy;
        a.n = strlen(copy);
        a.special = flag_of(o, "special", false);
        a.normalized = flag_of(o, "normalized", !a.special);
        a.lstrip = flag_of(o, "lstrip", false);
        a.rstrip = flag_of(o, "rstrip", false);
        a.single_word = flag_of(o, "single_word", false);
        int st = token_model_add_added(r->m, &a, e);
        free(copy);
        TRY(st);
    }
    return ST_OK;
}

static int template_put(struct reader *r, const json_t *ids, bool before, struct err *e)
{
    struct token_model *m = r->m;
    for (size_t i = 0; i < json_array_size(ids); i++) {
        int *n = before ? &m->n_prefix : &m->n_suffix;
        json_int_t id = json_integer_value(json_array_get(ids, i));
        if (*n == AFFIX_MAX || id < 0 || id >= TOKEN_MAX_ID)
            return corrupt(r, e, "the template has too many tokens, or one outside the vocabulary");
        (before ? m->prefix : m->suffix)[(*n)++] = (int32_t)id;
    }
    return ST_OK;
}

static int read_template(struct reader *r, const json_t *o, int depth, struct err *e)
{
    const char *type = text_of(o, "type");
    if (strcmp(type, "Sequence") == 0 && depth < 4) {
        const json_t *list = json_object_get(o, "processors");
        for (size_t i = 0; i < json_array_size(list); i++)
            TRY(read_template(r, json_array_get(list, i), depth + 1, e));
        return ST_OK;
    }
    if (o == NULL || json_is_null(o) || strcmp(type, "ByteLevel") == 0 || strcmp(type, "Sequence") == 0)
        return ST_OK;
    if (strcmp(type, "TemplateProcessing") != 0)
        return unsupported(r, e, "a post_processor", type);
    const json_t *single = json_object_get(o, "single"), *specials = json_object_get(o, "special_tokens");
    bool before = true;
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *part = json_array_get(single, i), *token = json_object_get(part, "SpecialToken");
        if (token == NULL)
            before = false;
        else
            TRY(template_put(r, json_object_get(json_object_get(specials, text_of(token, "id")), "ids"), before, e));
    }
    return ST_OK;
}

/* Only one thing in the decoder is not known from the model: whether the first space of a text is
 * dropped. */
static void read_decoder(struct reader *r, const json_t *o, int depth)
{
    const char *type = text_of(o, "type");
    const json_t *list = json_object_get(o, "decoders");
    for (size_t i = 0; i < json_array_size(list) && depth < 4; i++)
        read_decoder(r, json_array_get(list, i), depth + 1);
    if (strcmp(type, "Strip") == 0 && json_integer_value(json_object_get(o, "start")) == 1)
        r->m->strip_first = true;
    if (strcmp(type, "Metaspace") == 0)
        r->m->strip_first = strcmp(text_of(o, "prepend_scheme"), "never") != 0 && flag_of(o, "add_prefix_space", true);
}

int read_hf(struct token_model *m, const char *path, const char *text, size_t n, struct err *e)
{
    struct reader r = {.m = m, .path = path};
    json_error_t why;
    m->kind = "tokenizer.json";
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &why);
    if (root == NULL)
        return err_set(e, ST_CORRUPT, "%s: line %d, column %d: %s", path, why.line, why.column, why.text);
    int st = ST_OK;
    if (!json_is_object(root))
        TRY_OUT(corrupt(&r, e, "not a JSON object"));
    const char *version = text_of(root, "version");
    if (strcmp(version, "1.0") != 0)
        TRY_OUT(err_set(e, ST_UNSUPPORTED, "%s: version '%.20s' of tokenizer.json; 1.0 is supported", path, version));
    TRY_OUT(read_norm(&r, json_object_get(root, "normalizer"), 0, e));
    TRY_OUT(read_pre(&r, json_object_get(root, "pre_tokenizer"), 0, e));
    TRY_OUT(read_model(&r, json_object_get(root, "model"), e));
    TRY_OUT(read_added(&r, json_object_get(root, "added_tokens"), e));
    TRY_OUT(read_template(&r, json_object_get(root, "post_processor"), 0, e));
    read_decoder(&r, json_object_get(root, "decoder"), 0);
    TRY_OUT(token_model_finish(m, e));
    for (int i = 0; i < m->n_prefix + m->n_suffix; i++)
        if ((i < m->n_prefix ? m->prefix[i] : m->suffix[i - m->n_prefix]) >= m->vocab.n)
            TRY_OUT(corrupt(&r, e, "the template names a token outside the vocabulary"));
out:
    json_decref(root);
    return st == ST_OK ? st : err_in(e, "reading the tokenizer %s", path);
}
