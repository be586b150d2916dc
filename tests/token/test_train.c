/* token/: training a vocabulary gives the merges of Hugging Face's trainer, whatever the threads,
 * and files that read back. */
#include "support.h"
#include "token/train_int.h"

#define GOLDEN "tests/token/golden/"

struct corpus {
    char *text;
    size_t n;
};

static struct corpus read_corpus(void)
{
    struct corpus c;
    struct err e = {0};
    assert_ok(file_read(GOLDEN "corpus.txt", 1 << 20, &c.text, &c.n, &e), &e);
    return c;
}

/* Trained on the corpus in `parts` texts per call. */
static struct token_trainer *trained(const struct token_train_opts *o, const struct corpus *c, int parts)
{
    struct token_trainer *t;
    struct err e = {0};
    assert_ok(token_trainer_open(&t, o, &e), &e);
    for (size_t at = 0; at < c->n;) {
        struct token_text texts[8];
        int n = 0;
        for (; n < parts && at < c->n; n++) {
            size_t len = c->n - at < 900 ? c->n - at : token_trainer_cut(t, c->text + at, 900);
            texts[n] = (struct token_text){.bytes = c->text + at, .n = len};
            at += len;
        }
        assert_ok(token_trainer_add(t, texts, n, &e), &e);
    }
    assert_ok(token_trainer_run(t, NULL, NULL, &e), &e);
    return t;
}

static void add_alphabet(const struct token_trainer *t, uint32_t id, struct buf *out)
{
    for (uint32_t i = 0; i < t->tokens[id].len; i++) {
        uint8_t utf8[4];
        buf_add_n(out, utf8, utf8_put(alphabet_char(t->bytes[t->tokens[id].off + i]), utf8));
    }
}

static void merges_are_those_of_the_reference(void **state)
{
    (void)state;
    struct corpus c = read_corpus();
    static const char *const patterns[] = {"gpt2", "llama3"};
    for (int k = 0; k < 2; k++) {
        char path[256], *want;
        size_t n;
        struct err e = {0};
        struct buf got;
        struct token_train_opts o = {.vocab = 900, .pattern = patterns[k], .threads = 2};
        struct token_trainer *t = trained(&o, &c, 3);
        buf_init(&got, 0);
        for (size_t i = 0; i < t->n_merges; i++) {
            add_alphabet(t, t->merges[i].left, &got);
            buf_add(&got, " ");
            add_alphabet(t, t->merges[i].right, &got);
            buf_add(&got, "\n");
        }
        snprintf(path, sizeof path, GOLDEN "merges-%s.txt", patterns[k]);
        assert_ok(file_read(path, 1 << 20, &want, &n, &e), &e);
        assert_string_equal(got.text, want);
        free(want);
        buf_release(&got);
        token_trainer_close(t);
    }
    free(c.text);
}

static void threads_and_calls_do_not_show(void **state)
{
    (void)state;
    struct corpus c = read_corpus();
    struct token_train_opts o = {.vocab = 700, .threads = 1};
    struct token_trainer *a = trained(&o, &c, 8);
    for (int threads = 2; threads < 6; threads++) {
        o.threads = threads;
        struct token_trainer *b = trained(&o, &c, threads);
        assert_int_equal(a->n_merges, b->n_merges);
        assert_int_equal(a->n_bytes, b->n_bytes);
        assert_memory_equal(a->bytes, b->bytes, a->n_bytes);
        assert_memory_equal(a->merges, b->merges, a->n_merges * sizeof *a->merges);
        token_trainer_close(b);
    }
    token_trainer_close(a);
    free(c.text);
}

static void limits_are_kept(void **state)
{
    (void)state;
    struct corpus c = read_corpus();
    struct err e = {0};
    struct token_train_opts o = {.vocab = 2000, .max_token_bytes = 3, .threads = 1};
    struct token_trainer *t = trained(&o, &c, 8);
    for (size_t i = 0; i < t->n_tokens; i++)
        assert_true(t->tokens[i].len <= 3);
    token_trainer_close(t);
    o = (struct token_train_opts){.vocab = 5000, .min_frequency = 24, .threads = 1};
    t = trained(&o, &c, 8);
    struct token_train_stats few = token_trainer_stats(t);
    token_trainer_close(t);
    o.min_frequency = 0;
    t = trained(&o, &c, 8);
    assert_true(few.merges > 0 && few.merges < token_trainer_stats(t).merges);
    assert_true(token_trainer_stats(t).tokens < 5000); /* nothing left to merge */
    token_trainer_close(t);
    o.max_pieces = 20;
    t = trained(&o, &c, 1);
    assert_true(token_trainer_stats(t).dropped > 0);
    token_trainer_close(t);
    o = (struct token_train_opts){.vocab = 257, .special = "a b"};
    assert_fails(token_trainer_open(&t, &o, &e), ST_USAGE, &e, "2 special tokens");
    o = (struct token_train_opts){.vocab = 300, .pattern = "(("};
    assert_fails(token_trainer_open(&t, &o, &e), ST_CORRUPT, &e, "((");
    free(c.text);
}

/* Both files that are written read back to tokenizers with the same ids of text. */
static void files_read_back(void **state)
{
    (void)state;
    struct corpus c = read_corpus();
    struct err e = {0};
    char *dir = temp_dir(), prefix[256], path[300];
    struct token_train_opts o = {
        .vocab = 600, .special = "<|endoftext|> <|\"quoted\\|>", .pattern = "llama3", .threads = 2};
    struct token_trainer *t = trained(&o, &c, 8);
    snprintf(prefix, sizeof prefix, "%s/tok", dir);
    assert_ok(token_trainer_write(t, prefix, &e), &e);
    struct tokenizer json, ranks;
    snprintf(path, sizeof path, "%s.json", prefix);
    assert_ok(tokenizer_open(&json, path, true, &e), &e);
    snprintf(path, sizeof path, "%s.tiktoken", prefix);
    assert_fails(tokenizer_open(&ranks, path, false, &e), ST_USAGE, &e, "data.token_pattern");
    struct tokenizer_opts with = {.name = path, .pattern = "llama3", .special = o.special, .eod = true};
    assert_ok(tokenizer_open_opts(&ranks, &with, &e), &e);
    assert_int_equal(json.vocab, 600);
    assert_int_equal(ranks.vocab, 600);
    assert_int_equal(json.eod, 598);
    assert_int_equal(ranks.eod, 598);
    assert_int_equal(tokenizer_find(&json, "<|\"quoted\\|>"), 599);
    struct token_encoder *a, *b;
    struct token_ids x = {0}, y = {0};
    assert_ok(token_encoder_open(&a, &json, &e), &e);
    assert_ok(token_encoder_open(&b, &ranks, &e), &e);
    assert_ok(token_encode(a, c.text, c.n, 0, &x, &e), &e);
    assert_ok(token_encode(b, c.text, c.n, 0, &y, &e), &e);
    assert_true(x.n < c.n / 2);
    assert_int_equal(x.n, y.n);
    assert_memory_equal(x.ids, y.ids, x.n * sizeof *x.ids);
    token_encoder_close(a);
    token_encoder_close(b);
    free(x.ids);
    free(y.ids);
    tokenizer_close(&json);
    tokenizer_close(&ranks);
    token_trainer_close(t);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(dir);
    free(c.text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_are_those_of_the_reference),
        cmocka_unit_test(threads_and_calls_do_not_show),
        cmocka_unit_test(limits_are_kept),
        cmocka_unit_test(files_read_back),
    };
    return cmocka_run_group_tests_name("training a vocabulary", tests, NULL, NULL);
}
