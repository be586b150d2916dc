/* data/: text to tokens: parts and threads, lines of JSON, compressed files, the manifest, and text
 * as training data. */
#include "support.h"

#include "data/data_int.h"

#include <jansson.h>
#include <zlib.h>
#include <zstd.h>

/* The ids that one call gives for the whole text, and those that data_tokenize writes part by part
 * with these threads. */
static void check_parts(const char *tokenizer, const char *name, const char *text, size_t n, int threads)
{
    struct err e = {0};
    struct tokenizer tok;
    struct token_encoder *c;
    struct token_ids whole = {0};
    struct tokenize_stats s;
    struct source src;
    assert_ok(tokenizer_open(&tok, tokenizer, false, &e), &e);
    assert_ok(token_encoder_open(&c, &tok, &e), &e);
    assert_ok(token_encode(c, text, n, 0, &whole, &e), &e);
    const char *in[] = {in_test_dir(name)};
    struct tokenize_opts o = {
        .in = in, .n_in = 1, .out = in_test_dir("p"), .tokenizer = &tok, .threads = threads, .replace = true};
    assert_ok(data_tokenize(&o, &s, &e), &e);
    assert_int_equal(s.tokens, whole.n);
    assert_int_equal(s.bytes, n);
    int32_t *ids = malloc(whole.n * sizeof *ids);
    assert_ok(source_open(&src, in_test_dir("p"), NULL, -1, &e), &e);
    assert_int_equal(src.n_seqs, 1);
    assert_ok(source_read(&src, 0, 0, (int64_t)whole.n, tok.vocab, ids, &e), &e);
    assert_memory_equal(ids, whole.ids, whole.n * sizeof *ids);
    source_close(&src);
    free(ids);
    free(whole.ids);
    token_encoder_close(c);
    tokenizer_close(&tok);
}

/* More than two parts of text; the regex tokenizer allows no cut and sees its document whole. */
static void parts_and_threads_do_not_show(void **state)
{
    (void)state;
    enum { SIZE = (5 << 19) + 1 };
    struct err e = {0};
    char *corpus, *text = malloc(SIZE);
    size_t n;
    assert_ok(file_read("tests/token/golden/corpus.txt", 1 << 20, &corpus, &n, &e), &e);
    for (size_t at = 0; at < SIZE; at += n)
        memcpy(text + at, corpus, SIZE - at < n ? SIZE - at : n);
    write_test_file("big.txt", text, SIZE);
    for (int threads = 1; threads < 4; threads++)
        check_parts("tests/token/golden/deepseekstyle.json", "big.txt", text, SIZE, threads);
    check_parts("tests/token/golden/regex.json", "big.txt", text, SIZE, 2);
    struct source src;
    struct tokenizer tok;
    assert_ok(tokenizer_open(&tok, "tests/token/golden/regex.json", false, &e), &e);
    assert_fails(source_open(&src, in_test_dir("big.txt"), &tok, -1, &e), ST_INVALID, &e, "tokenizer.json");
    assert_fails(source_open(&src, in_test_dir("big.txt"), NULL, -1, &e), ST_INVALID, &e, "tokenize");
    tokenizer_close(&tok);
    free(corpus);
    free(text);
}

static void write_packed(const char *name, const char *text, size_t n)
{
    if (str_ends(name, ".gz")) {
        gzFile f = gzopen(in_test_dir(name), "wb");
        assert_non_null(f);
        assert_int_equal(gzwrite(f, text, (unsigned)n), n);
        assert_int_equal(gzclose(f), Z_OK);
    } else if (str_ends(name, ".zst")) {
        size_t cap = ZSTD_compressBound(n);
        char *packed = malloc(cap);
        size_t len = ZSTD_compress(packed, cap, text, n, 1);
        assert_false(ZSTD_isError(len));
        write_test_file(name, packed, len);
        free(packed);
    } else {
        write_test_file(name, text, n);
    }
}

static void lines_of_json_are_documents(void **state)
{
    (void)state;
    struct err e = {0};
    struct tokenizer tok;
    struct tokenize_stats s;
    assert_ok(tokenizer_open(&tok, "bytes", true, &e), &e);
    static const char text[] = "{\"text\": \"one\"}\n\n  \n{\"id\": 3, \"text\": "
                               "\"tw\\u00f6\"}\r\n{\"text\": \"\"}\n{\"text\": \"end\"}";
    static const char *const names[] = {"a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.ndjson"};
    static const int32_t want[] = {'o', 'n', 'e', 256, 't', 'w', 0xc3, 0xb6, 256, 'e', 'n', 'd', 256};
    for (int i = 0; i < countof(names); i++) {
        write_packed(names[i], text, sizeof text - 1);
        const char *in[] = {in_test_dir(names[i])};
        struct tokenize_opts o = {.in = in, .n_in = 1, .out = in_test_dir("o"), .tokenizer = &tok, .replace = true};
        assert_ok(data_tokenize(&o, &s, &e), &e);
        assert_int_equal(s.documents, 3);
        assert_int_equal(s.skipped_empty, 1);
        assert_int_equal(s.tokens, countof(want));
        struct source src;
        int32_t ids[16];
        size_t at = 0;
        assert_ok(source_open(&src, in_test_dir("o"), NULL, -1, &e), &e);
        for (int64_t k = 0; k < 3; k++) {
            int64_t n = source_seq_len(&src, k);
            assert_ok(source_read(&src, k, 0, n, 257, ids + at, &e), &e);
            at += (size_t)n;
        }
        assert_memory_equal(ids, want, sizeof want);
        source_close(&src);
    }
}

static void bad_lines_are_named_or_counted(void **state)
{
    (void)state;
    struct err e = {0};
    struct tokenizer tok;
    struct tokenize_stats s;
    assert_ok(tokenizer_open(&tok, "bytes", false, &e), &e);
    static const struct {
        const char *text, *why;
        int64_t good, bad;
    } files[] = {
        {"{\"text\": \"a\"}\n{\"text\": 5}\n{\"text\": \"b\"}\n", "line 2: field \"text\" is not a string", 2, 1},
        {"{\"text\": \"a\"}\n\nnonsense\n[]\n", "line 3: column", 1, 2},
        {"{\"text\": \"a\"}\n{\"txt\": \"a\"}", "line 2: no field \"text\"", 1, 1},
        {"{\"text\": \"a\"}\n{\"text\": \"\\ud800\"}", "line 2", 1, 1},
        {"{\"text\": \"a\"}\n{\"text\": \"\xff\"}", "line 2", 1, 1}};
    for (int i = 0; i < countof(files); i++) {
        write_test_file("b.jsonl", files[i].text, strlen(files[i].text));
        const char *in[] = {in_test_dir("b.jsonl")};
        struct tokenize_opts o = {.in = in, .n_in = 1, .out = in_test_dir("o"), .tokenizer = &tok, .replace = true};
        assert_fails(data_tokenize(&o, &s, &e), ST_CORRUPT, &e, files[i].why);
        o.skip_bad = true;
        assert_ok(data_tokenize(&o, &s, &e), &e);
        assert_int_equal(s.documents, files[i].good);
        assert_int_equal(s.bad_lines, files[i].bad);
        assert_non_null(strstr(s.first_bad, files[i].why));
    }
}

static void damaged_compression_is_an_error(void **state)
{
    (void)state;
    struct err e = {0};
    struct tokenizer tok;
    struct tokenize_stats s;
    char text[4000], bytes[8000];
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (char)('a' + rng_below(3, i, 26));
    assert_ok(tokenizer_open(&tok, "bytes", false, &e), &e);
    static const char *const names[] = {"t.gz", "t.zst"};
    for (int i = 0; i < 2; i++) {
        write_packed(names[i], text, sizeof text);
        FILE *f = fopen(in_test_dir(names[i]), "rb");
        size_t n = fread(bytes, 1, sizeof bytes, f);
        fclose(f);
        const char *in[] = {in_test_dir(names[i])};
        struct tokenize_opts o = {.in = in, .n_in = 1, .out = in_test_dir("o"), .tokenizer = &tok};
        write_test_file(names[i], bytes, n - 9); /* cut off */
        assert_fails(data_tokenize(&o, &s, &e), ST_CORRUPT, &e, names[i]);
        memset(bytes + (i == 0 ? n / 2 : 6), 0xff, 40); /* Zstandard has no checksum here: its block headers */
        write_test_file(names[i], bytes, n);
        assert_fails(data_tokenize(&o, &s, &e), ST_CORRUPT, &e, names[i]);
    }
    assert_false(file_exists(in_test_dir("o.bin")));
}

/* ---- the manifest, and text as data ---------------------------------------------------------- */

static void data_of_another_tokenizer_is_refused(void **state)
{
    (void)state;
    struct err e = {0};
    struct tokenizer a, b;
    struct tokenize_stats s;
    struct dataset *ds;
    assert_ok(tokenizer_open(&a, "tests/token/golden/deepseekstyle.json", false, &e), &e);
    assert_ok(tokenizer_open(&b, "tests/token/golden/gpt2style.json", false, &e), &e);
    write_test_file("t.txt", "the theme of the thesis is there, these others bother the brothers", 66);
    const char *in[] = {in_test_dir("t.txt")};
    struct tokenize_opts o = {
        .in = in, .n_in = 1, .out = in_test_dir("o"), .tokenizer = &a, .tokenizer_name = "a.json"};
    assert_ok(data_tokenize(&o, &s, &e), &e);
    struct data_opts d = {.paths = in_test_dir("o"), .seq = 4, .vocab = 1000, .tokenizer = &a, .eod = -1};
    assert_ok(dataset_open(&ds, &d, &e), &e);
    dataset_close(ds);
    d.tokenizer = &b;
    assert_fails(dataset_open(&ds, &d, &e), ST_CONFLICT, &e, "a.json");
    struct token_manifest m;
    assert_ok(token_manifest_read(in_test_dir("o"), &m, &e), &e);
    assert_true(m.found && m.tokens == s.tokens && m.documents == 1 && m.bytes == 66);
    write_test_file("o.tokens.json", "{}", 2);
    assert_fails(dataset_open(&ds, &d, &e), ST_CORRUPT, &e, "o.tokens.json");
    assert_int_equal(unlink(in_test_dir("o.tokens.json")), 0);
    assert_ok(dataset_open(&ds, &d, &e), &e); /* nothing is known: vocabulary and ids fit */
    dataset_close(ds);
    tokenizer_close(&a);
    tokenizer_close(&b);
}

static void count_notes(void *ctx, const char *line)
{
    int *n = ctx;
    n[strstr(line, "tokenizing once") != NULL ? 0 : strstr(line, "tokens from") != NULL ? 1 : 2]++;
}

static void text_is_tokenised_once(void **state)
{
    (void)state;
    struct err e = {0};
    struct tokenizer tok;
    struct dataset *ds;
    int notes[3] = {0};
    static const char line[] = "{\"body\": \"the theme of the thesis is there\"}\n";
    assert_ok(tokenizer_open(&tok, "tests/token/golden/deepseekstyle.json", false, &e), &e);
    write_test_file("t.jsonl", line, sizeof line - 1);
    struct data_opts d = {.paths = in_test_dir("t.jsonl"),
                          .seq = 2,
                          .vocab = tok.vocab,
                          .tokenizer = &tok,
                          .eod = -1,
                          .cache_dir = in_test_dir("cache"),
                          .field = "body",
                          .note = count_notes,
                          .note_ctx = notes};
    for (int i = 0; i < 3; i++) {
        assert_ok(dataset_open(&ds, &d, &e), &e);
        assert_true(dataset_has_text(ds));
        assert_true(dataset_tokens(ds) > 4 && dataset_tokens(ds) < 32);
        dataset_close(ds);
    }
    assert_true(notes[0] == 1 && notes[1] == 2 && notes[2] == 1);
    write_test_file("t.jsonl", line, sizeof line - 2); /* another size: made anew */
    assert_ok(dataset_open(&ds, &d, &e), &e);
    dataset_close(ds);
    assert_int_equal(notes[0], 2);
    d.field = "text";
    assert_fails(dataset_open(&ds, &d, &e), ST_CORRUPT, &e, "no field");
    tokenizer_close(&tok);
    assert_ok(tokenizer_open(&tok, "bytes", false, &e), &e); /* bytes need it for lines of JSON too */
    d.field = "body";
    d.vocab = 256;
    assert_ok(dataset_open(&ds, &d, &e), &e);
    assert_int_equal(dataset_tokens(ds), 32);
    dataset_close(ds);
}

#define WITH_DIR(test) cmocka_unit_test_setup_teardown(test, make_test_dir, drop_test_dir)

/* Simple lines take a short cut: whatever it accepts, the parser finds the same; what it does not,
 * the parser decides. */
static void texts_taken_without_a_parser_are_the_same(void **state)
{
    (void)state;
    static const struct {
        const char *line;
        bool quick;
    } cases[] = {
        {"{\"text\": \"plain\"}", true},
        {"{\"id\":17,\"text\":\"a\\n\\t\\\"b\\\" \\\\ \\/ "
         "\\u00e9\\ud83d\\ude42\\u0000z\",\"n\":-1.5,\"ok\":true,\"x\":null}",
         true},
        {" { \"a\" : \"long enough for whole words of eight bytes\" , \"text\" : \"\xc3\xa9\xe6\x97\xa5 and the same "
         "once more\" } ",
         true},
        {"{\"text\": \"\"}", true},
        {"{\"text\": \"a\", \"meta\": {\"b\": [1]}}", false}, /* good, and for the parser */
        {"{\"text\": \"a\", \"n\": 1e5}", false},
        {"{\"text\": \"a\", \"text\": \"b\"}", false},
        {"{\"te\\u0078t\": \"a\"}", true},
        {"{\"text\": \"a\"} x", false}, /* bad ones */
        {"{\"text\": \"a\",}", false},
        {"{\"text\": \"a\"", false},
        {"{\"text\": \"a", false},
        {"{\"text\": \"\\ud800 alone\"}", false},
        {"{\"text\": \"\\x41\"}", false},
        {"{\"text\": \"\xff\"}", false},
        {"{\"text\": \"\x01\"}", false},
        {"{\"text\": \"12345678\x1f\"}", false},
        {"{\"text\": \"a\", \"n\": 01}", false},
        {"{\"text\": \"a\", \"n\": truex}", false},
        {"{\"text\": 5}", false},
        {"[\"text\"]", false},
    };
    uint8_t scratch[256];
    for (int i = 0; i < countof(cases); i++) {
        size_t n = strlen(cases[i].line), len = 0;
        bool quick = jsonl_text((const uint8_t *)cases[i].line, n, "text", scratch, &len);
        if (quick != cases[i].quick)
            fail_msg("%s: %s", cases[i].line, quick ? "accepted" : "left to the parser");
        json_t *root = json_loadb(cases[i].line, n, JSON_ALLOW_NUL, NULL), *v = json_object_get(root, "text");
        if (quick) {
            assert_true(json_is_string(v));
            assert_int_equal(json_string_length(v), len);
            assert_memory_equal(json_string_value(v), scratch, len);
        }
        json_decref(root);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_taken_without_a_parser_are_the_same),
        WITH_DIR(parts_and_threads_do_not_show),
        WITH_DIR(lines_of_json_are_documents),
        WITH_DIR(bad_lines_are_named_or_counted),
        WITH_DIR(damaged_compression_is_an_error),
        WITH_DIR(data_of_another_tokenizer_is_refused),
        WITH_DIR(text_is_tokenised_once),
    };
    return cmocka_run_group_tests_name("text to tokens", tests, NULL, NULL);
}
