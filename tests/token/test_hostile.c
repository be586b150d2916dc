/* token/: files that are damaged or made to harm are refused with a reason; none crashes or takes
 * the machine down. */
#include "support.h"
#include "token/token_int.h"

enum { FILE_SIZE = 65536 };

static int try_hf(const char *json, struct err *e)
{
    struct token_model *m = calloc(1, sizeof *m);
    assert_non_null(m);
    int st = read_hf(m, "t.json", json, strlen(json), e);
    token_model_release(m);
    return st;
}

/* A tokenizer.json with these parts in place of sound ones; NULL: sound. */
static const char *with(const char *vocab, const char *merges, const char *pre, const char *rest)
{
    static char text[FILE_SIZE];
    snprintf(text, sizeof text,
             "{\"version\": \"1.0\", \"pre_tokenizer\": %s, %s \"model\": {\"type\": \"BPE\", "
             "\"vocab\": %s, \"merges\": %s}}",
             pre ? pre : "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}", rest ? rest : "",
             vocab ? vocab : "{\"a\": 0, \"b\": 1, \"ab\": 2, \"c\": 3, \"abc\": 4}",
             merges ? merges : "[\"a b\", [\"ab\", \"c\"]]");
    return text;
}

static void sound_files_are_read(void **state)
{
    (void)state;
    struct err e = {0};
    assert_ok(try_hf(with(NULL, NULL, NULL, NULL), &e), &e);
    assert_ok(try_hf(with(NULL, NULL, "null", NULL), &e), &e);
    assert_ok(try_hf(with(NULL, NULL, NULL, "\"unknown\": [1, 2],"), &e), &e);
    assert_ok(try_hf(with("{\"a\": 0, \"b\": 9, \"ab\": 2}", "[]", NULL, NULL), &e), &e); /* holes are fine */
}

static void damaged_json_is_refused(void **state)
{
    (void)state;
    struct err e = {0};
    assert_fails(try_hf("", &e), ST_CORRUPT, &e, "t.json");
    assert_fails(try_hf("[]", &e), ST_CORRUPT, &e, "not a JSON object");
    assert_fails(try_hf("{\"version\": \"2.0\"}", &e), ST_UNSUPPORTED, &e, "2.0");
    assert_fails(try_hf("{\"version\": \"1.0\"}", &e), ST_CORRUPT, &e, "no model");
    assert_fails(try_hf(with("{\"a\": 0, \"a\": 1}", "[]", NULL, NULL), &e), ST_CORRUPT, &e, "duplicate");
    assert_fails(try_hf(with("{\"a\\ud800\": 0}", "[]", NULL, NULL), &e), ST_CORRUPT, &e, "line 1");
    assert_fails(try_hf(with("[]", "[]", NULL, NULL), &e), ST_CORRUPT, &e, "vocab");
    assert_fails(try_hf(with("{}", "[]", NULL, NULL), &e), ST_CORRUPT, &e, "empty");
}

static void damaged_vocabularies_are_refused(void **state)
{
    (void)state;
    struct err e = {0};
    assert_fails(try_hf(with("{\"a\": 0, \"b\": 0}", "[]", NULL, NULL), &e), ST_CORRUPT, &e, "two tokens");
    assert_fails(try_hf(with("{\"a\": -1}", "[]", NULL, NULL), &e), ST_CORRUPT, &e, "-1");
    assert_fails(try_hf(with("{\"a\": 99999999999}", "[]", NULL, NULL), &e), ST_CORRUPT, &e, "99999999999");
    assert_fails(try_hf(with("{\"a\": 16777215}", "[]", NULL, NULL), &e), ST_CORRUPT, &e, "only 1 tokens");
    assert_fails(try_hf(with("{\"a\": \"x\"}", "[]", NULL, NULL), &e), ST_CORRUPT, &e, "not a number");
    assert_fails(try_hf(with(NULL, "[\"a x\"]", NULL, NULL), &e), ST_CORRUPT, &e, "merge 0");
    assert_fails(try_hf(with(NULL, "[\"a c\"]", NULL, NULL), &e), ST_CORRUPT, &e, "merge 0");
    assert_fails(try_hf(with(NULL, "[\"a b c\"]", NULL, NULL), &e), ST_CORRUPT, &e, "not two strings");
    assert_fails(try_hf(with(NULL, "[\"ab\"]", NULL, NULL), &e), ST_CORRUPT, &e, "not two strings");
    assert_fails(try_hf(with(NULL, "[[\"a\", 5]]", NULL, NULL), &e), ST_CORRUPT, &e, "not two strings");
    assert_fails(try_hf(with(NULL, "[[\"\", \"a\"]]", NULL, NULL), &e), ST_CORRUPT, &e, "merge 0");
}

static void added_tokens_are_checked(void **state)
{
    (void)state;
    struct err e = {0};
    assert_ok(
        try_hf(with(NULL, NULL, NULL, "\"added_tokens\": [{\"id\": 5, \"content\": \"<x>\", \"special\": true}],"), &e),
        &e);
    assert_fails(try_hf(with(NULL, NULL, NULL, "\"added_tokens\": [{\"id\": 1, \"content\": \"<x>\"}],"), &e),
                 ST_CORRUPT, &e, "<x>");
    assert_fails(try_hf(with(NULL, NULL, NULL, "\"added_tokens\": [{\"id\": 5, \"content\": \"\"}],"), &e), ST_CORRUPT,
                 &e, "empty");
    assert_fails(try_hf(with(NULL, NULL, NULL, "\"added_tokens\": [{\"content\": \"y\"}],"), &e), ST_CORRUPT, &e,
                 "added token 0");
    assert_fails(try_hf(with(NULL, NULL, NULL,
                             "\"added_tokens\": [{\"id\": 5, \"content\": \"<x>\"}, {\"id\": 6, "
                             "\"content\": \"<x>\"}],"),
                        &e),
                 ST_CORRUPT, &e, "twice");
    assert_fails(try_hf(with(NULL, NULL, NULL,
                             "\"post_processor\": {\"type\": \"TemplateProcessing\", \"single\": "
                             "[{\"SpecialToken\": {\"id\": \"q\"}}], "
                             "\"special_tokens\": {\"q\": {\"ids\": [77]}}},"),
                        &e),
                 ST_CORRUPT, &e, "outside the vocabulary");
}

static void unknown_steps_are_refused_by_name(void **state)
{
    (void)state;
    struct err e = {0};
    assert_fails(try_hf(with(NULL, NULL, "{\"type\": \"BertPreTokenizer\"}", NULL), &e), ST_UNSUPPORTED, &e,
                 "BertPreTokenizer");
    assert_fails(try_hf(with(NULL, NULL, NULL, "\"normalizer\": {\"type\": \"Lowercase\"},"), &e), ST_UNSUPPORTED, &e,
                 "Lowercase");
    assert_fails(try_hf(with(NULL, NULL, NULL, "\"post_processor\": {\"type\": \"BertProcessing\"},"), &e),
                 ST_UNSUPPORTED, &e, "BertProcessing");
    assert_fails(try_hf("{\"version\": \"1.0\", \"model\": {\"type\": \"Unigram\"}}", &e), ST_UNSUPPORTED, &e,
                 "Unigram");
    assert_fails(try_hf(with(NULL, NULL,
                             "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"((\"}, "
                             "\"behavior\": \"Isolated\"}",
                             NULL),
                        &e),
                 ST_CORRUPT, &e, "((");
}

/* A regex that needs exponentially many attempts ends with an error that says where. */
static void a_regex_that_explodes_is_an_error(void **state)
{
    (void)state;
    struct err e = {0};
    struct regex *r;
    struct regex_match *m;
    size_t from, to;
    char text[64];
    memset(text, 'a', sizeof text);
    text[63] = 'b';
    assert_ok(regex_open(&r, "(a+)+$", &e), &e);
    assert_ok(regex_match_open(&m, r, &e), &e);
    assert_fails(regex_find(r, m, (const uint8_t *)text, sizeof text, 0, &from, &to, &e), ST_UNSUPPORTED, &e, "byte 0");
    regex_match_close(m);
    regex_close(r);
}

static int try_ranks(const char *text, struct err *e)
{
    struct token_model *m = calloc(1, sizeof *m);
    assert_non_null(m);
    int st = read_tiktoken(m, "t.tiktoken", text, strlen(text), "gpt2", "", e);
    token_model_release(m);
    return st;
}

static void damaged_rank_files_are_refused(void **state)
{
    (void)state;
    struct err e = {0};
    struct buf all;
    buf_init(&all, 0);
    for (int i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        base64_encode(&byte, 1, &all);
        buf_addf(&all, " %d\n", i);
    }
    assert_ok(try_ranks(all.text, &e), &e);
    struct buf more;
    buf_init(&more, 0);
    static const struct {
        const char *line, *why;
    } bad[] = {{"AAA= 256 7\n", "not a rank"},
               {"AAA=256\n", "base64 rank"},
               {"A*A= 256\n", "base64 rank"},
               {"AAE= -2\n", "-2"},
               {"AAE= 300\n", "256 is missing"},
               {"AAE= 20000000\n", "20000000"},
               {"AAE= 3\n", "two tokens"},
               {"AA== 256\n", "same 1 bytes"},
               {"AAE= 99999999999999999999\n", "not a rank"}};
    for (int i = 0; i < countof(bad); i++) {
        buf_clear(&more);
        buf_add(&more, all.text);
        buf_add(&more, bad[i].line);
        assert_fails(try_ranks(more.text, &e), ST_CORRUPT, &e, bad[i].why);
    }
    assert_fails(try_ranks("YQ== 0\n", &e), ST_CORRUPT, &e, "0x00 has no token");
    buf_release(&more);
    buf_release(&all);
}

static void damaged_pairs_and_tekken_are_refused(void **state)
{
    (void)state;
    struct err e = {0};
    static const struct {
        const char *encoder, *merges, *why;
    } bad[] = {{"[]", "", "JSON object"},
               {"{\"a\": 0", "", "line"},
               {"{\"a\": 0, \"b\": 1}", "a b\n", "not made of tokens"},
               {"{\"a\": 0}", "#version\nab\n", "not two tokens"},
               {"{\"\\u4e00\": 0}", "", "byte alphabet"}};
    for (int i = 0; i < countof(bad); i++) {
        struct token_model *m = calloc(1, sizeof *m);
        assert_non_null(m);
        assert_fails(read_gpt2(m, "encoder.json", bad[i].encoder, strlen(bad[i].encoder), bad[i].merges,
                               strlen(bad[i].merges), &e),
                     ST_CORRUPT, &e, bad[i].why);
        token_model_release(m);
    }
    static const char *const tekken[] = {"{}",
                                         "{\"config\": {\"pattern\": \"x\", \"default_vocab_size\": 5, "
                                         "\"default_num_special_tokens\": 1}, \"vocab\": []}",
                                         "{\"config\": {\"pattern\": \"x\", \"default_vocab_size\": 2, "
                                         "\"default_num_special_tokens\": 1}, \"vocab\": [{\"rank\": 3}]}"};
    for (int i = 0; i < countof(tekken); i++) {
        struct token_model *m = calloc(1, sizeof *m);
        assert_non_null(m);
        assert_int_equal(read_tekken(m, "tekken.json", tekken[i], strlen(tekken[i]), &e), ST_CORRUPT);
        token_model_release(m);
    }
}

/* A vocabulary without some byte says so when a text needs it. */
static void missing_bytes_are_named(void **state)
{
    (void)state;
    struct err e = {0};
    const char *json = with(NULL, NULL, NULL, NULL);
    struct tokenizer t = {.eod = -1, .model = calloc(1, sizeof *t.model)};
    struct token_encoder *c;
    struct token_ids ids = {0};
    assert_non_null(t.model);
    assert_ok(read_hf(t.model, "t.json", json, strlen(json), &e), &e);
    t.vocab = t.model->vocab.n;
    assert_ok(token_encoder_open(&c, &t, &e), &e);
    assert_ok(token_encode(c, "abcab", 5, 0, &ids, &e), &e);
    assert_int_equal(ids.n, 2);
    assert_fails(token_encode(c, "abz", 3, 0, &ids, &e), ST_INVALID, &e, "7A");
    assert_fails(token_encode(c, "\xff", 1, 0, &ids, &e), ST_INVALID, &e, "0xFF");
    free(ids.ids);
    token_encoder_close(c);
    tokenizer_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sound_files_are_read),
        cmocka_unit_test(damaged_json_is_refused),
        cmocka_unit_test(damaged_vocabularies_are_refused),
        cmocka_unit_test(added_tokens_are_checked),
        cmocka_unit_test(unknown_steps_are_refused_by_name),
        cmocka_unit_test(a_regex_that_explodes_is_an_error),
        cmocka_unit_test(damaged_rank_files_are_refused),
        cmocka_unit_test(damaged_pairs_and_tekken_are_refused),
        cmocka_unit_test(missing_bytes_are_named),
    };
    return cmocka_run_group_tests_name("hostile tokenizer files", tests, NULL, NULL);
}
