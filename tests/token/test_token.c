/* token/: ids against those of tokenizers and tiktoken (golden files), splitters against PCRE2,
 * decoding, cuts. The golden files are made by tools/token_golden.py. */
#include "support.h"
#include "token/token_int.h"

#define GOLDEN "tests/token/golden/"

static struct tokenizer open_golden(const char *file, const char *pattern, const char *special)
{
    char path[256];
    struct err e = {0};
    struct tokenizer t;
    snprintf(path, sizeof path, GOLDEN "%s", file);
    struct tokenizer_opts o = {.name = path, .pattern = pattern, .special = special};
    assert_ok(tokenizer_open_opts(&t, &o, &e), &e);
    return t;
}

static const struct golden {
    const char *file, *ids, *pattern, *special;
    bool exact; /* text comes back byte for byte: nothing is normalised or put in front */
} golden[] = {
    {"gpt2style.json", "gpt2style.ids", NULL, NULL, false}, /* tokens that swallow white space */
    {"llama3style.json", "llama3style.ids", NULL, NULL, false},
    {"deepseekstyle.json", "deepseekstyle.ids", NULL, NULL, true},
    {"regex.json", "regex.ids", NULL, NULL, false},
    {"llama2style.json", "llama2style.ids", NULL, NULL, false},
    {"metaspace.json", "metaspace.ids", NULL, NULL, false},
    {"small.tiktoken", "small.ids", "llama3", "<|endoftext|> <|pad|>", true},
    {"tekken.json", "tekken.ids", NULL, NULL, true},
    {"gpt2/encoder.json", "gpt2/encoder.ids", NULL, NULL, true},
    {"gpt2/vocab.bpe", "gpt2/encoder.ids", NULL, NULL, true},
};

/* One line: base64 of a text, then ids. */
static void check_line(struct token_encoder *c, const struct golden *g, const char *line, size_t n)
{
    uint8_t text[8192];
    struct token_ids got = {0};
    struct err e = {0};
    const char *end = line + n, *p = memchr(line, ' ', n);
    assert_non_null(p);
    int64_t len = base64_decode(line, (size_t)(p - line), text);
    assert_true(len >= 0);
    /* Tekken's special tokens are no text for its judge. */
    unsigned flags = strcmp(g->file, "tekken.json") == 0 ? 0 : TOKEN_SPECIAL;
    assert_ok(token_encode(c, text, (size_t)len, flags, &got, &e), &e);
    size_t k = 0;
    while (p < end && *p == ' ' && p + 1 < end) {
        char *stop;
        long want = strtol(p + 1, &stop, 10);
        if (k >= got.n || got.ids[k] != want)
            fail_msg("%s: id %zu of '%.*s' is %d, not %ld", g->file, k, (int)len, (const char *)text,
                     k < got.n ? got.ids[k] : -1, want);
        k++;
        p = stop;
    }
    assert_int_equal(k, got.n);
    free(got.ids);
}

static void ids_are_those_of_the_reference_programs(void **state)
{
    (void)state;
    for (int i = 0; i < countof(golden); i++) {
        const struct golden *g = &golden[i];
        struct tokenizer t = open_golden(g->file, g->pattern, g->special);
        struct token_encoder *c;
        struct err e = {0};
        char path[256], *text;
        size_t n;
        int lines = 0;
        assert_ok(token_encoder_open(&c, &t, &e), &e);
        snprintf(path, sizeof path, GOLDEN "%s", g->ids);
        assert_ok(file_read(path, 1 << 20, &text, &n, &e), &e);
        for (char *p = text, *end; (end = strchr(p, '\n')) != NULL; p = end + 1, lines++)
            check_line(c, g, p, (size_t)(end - p));
        assert_true(lines > 70);
        free(text);
        token_encoder_close(c);
        tokenizer_close(&t);
    }
}

/* ---- random texts ---------------------------------------------------------------------------- */

/* Characters that PCRE2 knows: its Unicode may be older than utf8proc's (14
 * and 15 in Debian 12). */
struct known_chars {
    struct regex *assigned;
    struct regex_match *match;
};

static bool char_is_known(const struct known_chars *k, uint32_t c)
{
    uint8_t text[4];
    size_t n = utf8_put(c, text), from, to;
    struct err e = {0};
    assert_ok(regex_find(k->assigned, k->match, text, n, 0, &from, &to, &e), &e);
    return from == 0;
}

static size_t random_text(uint64_t key, uint8_t *out, size_t cap, bool valid, const struct known_chars *known)
{
    static const char *const bits[] = {" ",
                                       "  ",
                                       "\n",
                                       "\r\n",
                                       " \n ",
                                       "'s",
                                       "'LL",
                                       "'\xc5\xbf",
                                       "abc",
                                       "ABC",
                                       "Abc",
                                       "123",
                                       "4567",
                                       "\xe3\x80\x80",
                                       "\xe2\x80\xa8",
                                       "\xc2\x85",
                                       "\xe1\xa0\x8e",
                                       "\xcc\x81",
                                       "e\xcc\x81",
                                       "\xe4\xb8\x80",
                                       "\xe3\x81\x82",
                                       "/",
                                       "//",
                                       "!?",
                                       "_",
                                       "\t",
                                       "\xf0\x9f\x98\x80",
                                       "\xe0\xb8\x97",
                                       "\xe0\xa4\xbf",
                                       "\x01",
                                       "\xd9\xa3",
                                       "<|endoftext|>"};
    size_t n = 0;
    for (uint64_t i = 0; n + 16 < cap; i++) {
        uint64_t kind = rng_below(key, 3 * i, 10), x = rng_below(key, 3 * i + 1, 1u << 30);
        if (kind == 0 && !valid) {
            out[n++] = (uint8_t)x;
        } else if (kind < 3) {
            uint32_t c = (uint32_t)(x % (rng_below(key, 3 * i + 2, 2) ? 0x3000u : 0x1FFFFu));
            bool skip = (c >= 0xD800 && c < 0xE000) || (known != NULL && !char_is_known(known, c));
            n += skip ? 0 : utf8_put(c, out + n);
        } else {
            const char *s = bits[x % (uint64_t)countof(bits)];
            memcpy(out + n, s, strlen(s));
            n += strlen(s);
        }
    }
    return n;
}

/* The pieces of a splitter and those of its regex, which PCRE2 (Unicode 14, as utf8proc) finds. */
static void splitters_cut_as_their_regexes_do(void **state)
{
    (void)state;
    enum { TEXT = 4000 };
    int n_known;
    const struct split_known *known = split_table(&n_known);
    uint8_t *classes, text[TEXT];
    struct err e = {0};
    struct known_chars chars;
    assert_ok(classes_make(&classes, &e), &e);
    assert_ok(regex_open(&chars.assigned, "\\P{Cn}", &e), &e);
    assert_ok(regex_match_open(&chars.match, chars.assigned, &e), &e);
    for (int k = 0; k < n_known; k++) {
        struct regex *r;
        struct regex_match *m;
        assert_ok(regex_open(&r, known[k].pattern, &e), &e);
        assert_ok(regex_match_open(&m, r, &e), &e);
        for (uint64_t seed = 0; seed < 60; seed++) {
            size_t n = random_text(seed + 1000, text, sizeof text, true, &chars), at = 0, from, to;
            while (at < n) {
                assert_ok(regex_find(r, m, text, n, at, &from, &to, &e), &e);
                for (; at < from; at += utf8_valid_len(text + at, text + n))
                    if (known[k].match(classes, text + at, text + n) != 0)
                        fail_msg("%s matches at %zu of text %d, its regex does not", known[k].name, at, (int)seed);
                if (from == n)
                    break;
                size_t len = known[k].match(classes, text + from, text + n);
                if (len != to - from)
                    fail_msg("%s: %zu bytes at %zu of text %d, its regex %zu: '%.*s'", known[k].name, len, from,
                             (int)seed, to - from, (int)(to - from), (const char *)text + from);
                at = to;
            }
        }
        regex_match_close(m);
        regex_close(r);
    }
    regex_match_close(chars.match);
    regex_close(chars.assigned);
    free(classes);
}

static size_t decode_all(const struct tokenizer *t, const struct token_ids *ids, uint8_t *out, size_t cap)
{
    size_t at = 0;
    struct err e = {0};
    for (size_t i = 0; i < ids->n; i++) {
        size_t n;
        const char *name = token_is_special(t, ids->ids[i]) ? tokenizer_name(t, ids->ids[i], &n) : NULL;
        if (name != NULL) {
            memcpy(out + at, name, n);
        } else {
            assert_ok(tokenizer_decode(t, ids->ids[i], out + at, cap - at, &n, &e), &e);
            assert_int_equal(n, token_n_bytes(t, ids->ids[i]));
        }
        at += n;
        assert_true(at <= cap);
    }
    return at;
}

static void any_bytes_come_back(void **state)
{
    (void)state;
    enum { TEXT = 3000 };
    uint8_t text[TEXT], back[TEXT + 64];
    for (int i = 0; i < countof(golden); i++) {
        if (!golden[i].exact)
            continue;
        struct tokenizer t = open_golden(golden[i].file, golden[i].pattern, golden[i].special);
        struct token_encoder *c;
        struct token_ids ids = {0};
        struct err e = {0};
        assert_ok(token_encoder_open(&c, &t, &e), &e);
        for (uint64_t seed = 0; seed < 40; seed++) {
            size_t n = random_text(seed, text, sizeof text, seed % 2 == 0, NULL);
            for (size_t k = 0; seed == 39 && k < n; k++) /* bytes alone */
                text[k] = (uint8_t)rng_below(99, k, 256);
            ids.n = 0;
            assert_ok(token_encode(c, text, n, seed % 3 ? TOKEN_SPECIAL : 0, &ids, &e), &e);
            assert_int_equal(decode_all(&t, &ids, back, sizeof back), n);
            assert_memory_equal(text, back, n);
        }
        free(ids.ids);
        token_encoder_close(c);
        tokenizer_close(&t);
    }
}

/* SentencePiece: a space is put in front, and taken off again. Spaces are written U+2581, so that
 * character comes back as a space. */
static void characters_come_back_with_byte_fallback(void **state)
{
    (void)state;
    static const char text[] = "The quick \xe6\x97\xa5\xe6\x9c\xac fox,  \xf0\x9f\x98\x80 and\ttabs\n";
    struct err e = {0};
    struct tokenizer t = open_golden("llama2style.json", NULL, NULL);
    struct token_ids ids = {0};
    uint8_t back[128];
    assert_ok(tokenizer_encode(&t, text, sizeof text - 1, 0, &ids, &e), &e);
    size_t n = decode_all(&t, &ids, back, sizeof back), skip = tokenizer_text_skip(&t);
    assert_int_equal(skip, 1);
    assert_int_equal(n, sizeof text - 1 + skip);
    assert_memory_equal(back + skip, text, sizeof text - 1);
    free(ids.ids);
    tokenizer_close(&t);
}

/* Parts that end where token_cut allows it have the ids of the whole. */
static void cuts_do_not_show(void **state)
{
    (void)state;
    enum { TEXT = 20000 };
    static uint8_t text[TEXT];
    int cuts = 0;
    for (int i = 0; i < countof(golden); i++) {
        struct tokenizer t = open_golden(golden[i].file, golden[i].pattern, golden[i].special);
        struct token_encoder *c;
        struct token_ids whole = {0}, parts = {0};
        struct err e = {0};
        assert_ok(token_encoder_open(&c, &t, &e), &e);
        for (uint64_t seed = 0; seed < 10; seed++) {
            size_t n = random_text(seed + 500, text, sizeof text, seed % 2 == 0, NULL);
            whole.n = parts.n = 0;
            assert_ok(token_encode(c, text, n, 0, &whole, &e), &e);
            for (size_t at = 0, len; at < n; at += len) {
                len = 0;
                for (size_t window = 50; window < n - at && len == 0; window *= 2)
                    len = token_cut(&t, text + at, window);
                cuts += len > 0;
                len = len > 0 ? len : n - at;
                assert_ok(token_encode(c, text + at, len, 0, &parts, &e), &e);
            }
            assert_int_equal(whole.n, parts.n);
            assert_memory_equal(whole.ids, parts.ids, whole.n * sizeof *whole.ids);
        }
        free(whole.ids);
        free(parts.ids);
        token_encoder_close(c);
        tokenizer_close(&t);
    }
    assert_true(cuts > 1000);
}

static void special_tokens_templates_and_hashes(void **state)
{
    (void)state;
    struct err e = {0};
    struct tokenizer t = open_golden("llama3style.json", NULL, NULL), other = open_golden("gpt2style.json", NULL, NULL);
    struct token_encoder *c;
    struct token_ids ids = {0};
    size_t n;
    int32_t eot = tokenizer_find(&t, "<|endoftext|>");
    assert_true(eot > 0);
    assert_true(token_is_special(&t, eot));
    assert_int_equal(token_n_bytes(&t, eot), 0);
    assert_int_equal(token_n_bytes(&t, -1) + token_n_bytes(&t, t.vocab), 0);
    assert_non_null(tokenizer_name(&t, eot, &n));
    assert_int_equal(n, 13);
    assert_ok(token_encoder_open(&c, &t, &e), &e);
    assert_ok(token_encode(c, "<|endoftext|>", 13, TOKEN_SPECIAL | TOKEN_TEMPLATE, &ids, &e), &e);
    assert_int_equal(ids.n, 2); /* the template's, and the text's */
    assert_int_equal(ids.ids[0], eot);
    assert_int_equal(ids.ids[1], eot);
    ids.n = 0;
    assert_ok(token_encode(c, "<|endoftext|>", 13, 0, &ids, &e), &e);
    assert_true(ids.n > 1);
    assert_true(t.hash != other.hash);
    struct tokenizer again = open_golden("llama3style.json", NULL, NULL);
    assert_true(t.hash == again.hash);
    assert_int_equal(t.eod, -1); /* not asked for */
    tokenizer_close(&again);
    assert_ok(tokenizer_open(&again, GOLDEN "llama3style.json", true, &e), &e);
    assert_int_equal(again.eod, eot);
    tokenizer_close(&again);
    struct tokenizer_opts named = {.name = GOLDEN "llama3style.json", .eod = true, .eod_token = "<|pad|>"};
    assert_ok(tokenizer_open_opts(&again, &named, &e), &e);
    assert_int_equal(again.eod, tokenizer_find(&t, "<|pad|>"));
    tokenizer_close(&again);
    named.eod_token = "<|nothing|>";
    assert_fails(tokenizer_open_opts(&again, &named, &e), ST_USAGE, &e, "<|nothing|>");
    assert_fails(tokenizer_open(&again, GOLDEN "regex.json", true, &e), ST_USAGE, &e, "data.eod_token");
    free(ids.ids);
    token_encoder_close(c);
    tokenizer_close(&t);
    tokenizer_close(&other);
}

/* Bytes of text behind ids: the table that bits per byte rest on. */
static void byte_lengths_add_up(void **state)
{
    (void)state;
    enum { TEXT = 5000 };
    uint8_t text[TEXT];
    struct err e = {0};
    struct tokenizer t = open_golden("deepseekstyle.json", NULL, NULL);
    struct token_encoder *c;
    struct token_ids ids = {0};
    int64_t bytes;
    assert_ok(token_encoder_open(&c, &t, &e), &e);
    size_t n = random_text(77, text, sizeof text, true, NULL);
    assert_ok(token_encode(c, text, n, 0, &ids, &e), &e);
    assert_ok(tokenizer_count_bytes(&t, ids.ids, (int64_t)ids.n, &bytes, &e), &e);
    assert_int_equal(bytes, n);
    int32_t odd[] = {-1, tokenizer_find(&t, "<|endoftext|>"), ids.ids[0]};
    assert_ok(tokenizer_count_bytes(&t, odd, 3, &bytes, &e), &e);
    assert_int_equal(bytes, token_n_bytes(&t, ids.ids[0]));
    odd[0] = t.vocab;
    assert_fails(tokenizer_count_bytes(&t, odd, 1, &bytes, &e), ST_INVALID, &e, "outside the vocabulary");
    free(ids.ids);
    token_encoder_close(c);
    tokenizer_close(&t);
}

/* Two million spaces, and a text without any place to cut: no piece may cost the square of its
 * length. */
static void long_pieces_take_no_time(void **state)
{
    (void)state;
    enum { LONG = 2000000 };
    struct err e = {0};
    char *text = malloc(LONG);
    assert_non_null(text);
    const char *const files[] = {"gpt2/encoder.json", "llama2style.json"};
    for (int i = 0; i < 2; i++) {
        struct tokenizer t = open_golden(files[i], NULL, NULL);
        struct token_encoder *c;
        struct token_ids ids = {0};
        assert_ok(token_encoder_open(&c, &t, &e), &e);
        for (int kind = 0; kind < 2; kind++) {
            for (size_t k = 0; k < LONG; k++)
                text[k] = kind == 0 ? ' ' : (char)('a' + rng_below(5, k, 26));
            ids.n = 0;
            assert_ok(token_encode(c, text, LONG, 0, &ids, &e), &e);
            assert_true(ids.n > 1000);
        }
        free(ids.ids);
        token_encoder_close(c);
        tokenizer_close(&t);
    }
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ids_are_those_of_the_reference_programs),
        cmocka_unit_test(splitters_cut_as_their_regexes_do),
        cmocka_unit_test(any_bytes_come_back),
        cmocka_unit_test(characters_come_back_with_byte_fallback),
        cmocka_unit_test(cuts_do_not_show),
        cmocka_unit_test(special_tokens_templates_and_hashes),
        cmocka_unit_test(byte_lengths_add_up),
        cmocka_unit_test(long_pieces_take_no_time),
    };
    return cmocka_run_group_tests_name("token", tests, NULL, NULL);
}
