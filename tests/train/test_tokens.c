/* Training, evaluation in bits per byte and generation on token files of every kind, with a
 * tokenizer of a vocabulary. */
#include "support.h"
#include "train/run.h"

#include <math.h>

#define TOKENIZER "tests/token/golden/deepseekstyle.json"

enum kind { PAIR_U16, PAIR_I32, SHARD, KINDS };

struct corpus {
    struct tokenizer tok;
    struct token_ids ids;
};

static void corpus_open(struct corpus *c)
{
    struct err e = {0};
    char *text;
    size_t n;
    *c = (struct corpus){0};
    assert_ok(tokenizer_open(&c->tok, TOKENIZER, false, &e), &e);
    assert_ok(file_read("tests/token/golden/corpus.txt", 1 << 20, &text, &n, &e), &e);
    assert_ok(tokenizer_encode(&c->tok, text, n, 0, &c->ids, &e), &e);
    free(text);
}

static void corpus_close(struct corpus *c)
{
    tokenizer_close(&c->tok);
    free(c->ids.ids);
}

/* llm.c's form: 256 numbers of 32 bits, then ids of 16. */
static void write_shard(const struct corpus *c, const char *path)
{
    struct err e = {0};
    int32_t header[256] = {20240520, 1, (int32_t)c->ids.n};
    struct buf b;
    buf_init(&b, 0);
    buf_add_n(&b, header, sizeof header);
    for (size_t i = 0; i < c->ids.n; i++) {
        uint16_t id = (uint16_t)c->ids.ids[i];
        buf_add_n(&b, &id, sizeof id);
    }
    assert_ok(file_write_atomic(path, b.text, b.len, &e), &e);
    buf_release(&b);
}

/* The path to give to data.train. */
static char *write_tokens(const struct corpus *c, const struct playground *p, enum kind kind)
{
    struct err e = {0};
    char *path = path_join(p->dir, kind == SHARD ? "shard.bin" : "pair");
    assert_non_null(path);
    if (kind == SHARD) {
        write_shard(c, path);
        return path;
    }
    struct token_writer *w;
    assert_ok(token_writer_open(&w, path, kind == PAIR_U16 ? DT_U16 : DT_I32, false, &e), &e);
    assert_ok(token_writer_add(w, c->ids.ids, c->ids.n, &e), &e);
    assert_ok(token_writer_close(w, &e), &e);
    return path;
}

static void check_run(struct trainer *t, const struct corpus *c)
{
    struct err e = {0};
    struct eval_result r;
    run_steps(t, 3, NULL);
    assert_ok(trainer_eval(t, &r, &e), &e);
    assert_false(r.failed);
    /* All of the validation data: whole batches of 2 x 16 targets; its bytes are those of the
     * tokens. */
    int64_t valid = dataset_tokens(t->valid_data), batches = (valid - 1) / 16 / 2;
    assert_int_equal(r.tokens, batches * 32);
    assert_int_equal(r.tokens_total, valid);
    assert_true(r.bytes > (double)r.tokens); /* more than a byte a token, as no special token is among them */
    assert_true(fabs(r.bits_per_byte - r.loss * (double)r.tokens / (log(2.0) * r.bytes)) < 1e-9);
    /* The same bytes, counted from the file's ids by hand. */
    double bytes = 0;
    for (int64_t i = 0; i < batches * 2; i++) {
        int32_t ids[17];
        assert_ok(dataset_get(t->valid_data, i, ids, &e), &e);
        for (int k = 1; k < 17; k++)
            bytes += (double)token_n_bytes(&c->tok, ids[k]);
    }
    assert_true(bytes == r.bytes);
}

static void token_files_train_and_evaluate(void **state)
{
    (void)state;
    struct corpus corpus;
    corpus_open(&corpus);
    for (int kind = 0; kind < KINDS; kind++) {
        struct playground p;
        struct config c = {0};
        struct trainer t = {0};
        struct err e = {0};
        char options[128];
        playground_open(&p);
        char *path = write_tokens(&corpus, &p, (enum kind)kind);
        snprintf(options, sizeof options,
                 "model.vocab=%d data.split=80,20 train.eval_batches=all run.dir=", corpus.tok.vocab);
        run_config(&c, &p, options);
        assert_ok(config_set(&c, "data.tokenizer", TOKENIZER, NULL, &e), &e);
        assert_ok(config_set(&c, "data.train", path, NULL, &e), &e);
        assert_ok(config_finish(&c, &e), &e);
        assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
        check_run(&t, &corpus);
        trainer_close(&t);
        config_release(&c);
        free(path);
        playground_close(&p);
    }
    corpus_close(&corpus);
}

/* A checkpoint holds the tokenizer's file, and the saved path is replaced by it
 * once that is gone. */
static void checkpoints_carry_the_tokenizer(void **state)
{
    (void)state;
    struct playground p;
    struct config c = {0}, other = {0};
    struct trainer t = {0};
    struct ckpt *ck;
    struct err e = {0};
    playground_open(&p);
    char *copy = path_join(p.dir, "tok.json"), *bytes, *saved;
    size_t n, n_saved;
    assert_ok(file_read(TOKENIZER, 1 << 20, &bytes, &n, &e), &e);
    assert_ok(file_write_atomic(copy, bytes, n, &e), &e);
    run_config(&c, &p, "model.vocab=700");
    assert_ok(config_set(&c, "data.tokenizer", copy, NULL, &e), &e);
    assert_ok(config_finish(&c, &e), &e);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    assert_int_equal(unlink(copy), 0); /* the run has read it */
    assert_ok(trainer_save(&t, &e), &e);
    trainer_close(&t);
    assert_ok(ckpt_open(&ck, p.run, &e), &e);
    const char *text = ckpt_config_text(ck);
    assert_ok(config_init(&other, &e), &e);
    assert_ok(config_load_saved(&other, text, strlen(text), "saved", CFG_SAVED_MODEL, NULL, &e), &e);
    assert_string_equal(other.data.tokenizer, copy);
    assert_ok(tokenizer_of_checkpoint(&other, ck, true, &e), &e);
    assert_true(str_ends(other.data.tokenizer, "/tokenizer.json"));
    assert_ok(file_read(other.data.tokenizer, 1 << 20, &saved, &n_saved, &e), &e);
    assert_int_equal(n, n_saved);
    assert_memory_equal(bytes, saved, n);
    assert_ok(config_set(&other, "data.tokenizer", "mine.json", NULL, &e), &e); /* a user's choice stays */
    assert_ok(tokenizer_of_checkpoint(&other, ck, false, &e), &e);
    assert_string_equal(other.data.tokenizer, "mine.json");
    ckpt_close(ck);
    config_release(&c);
    config_release(&other);
    free(bytes);
    free(saved);
    free(copy);
    playground_close(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(token_files_train_and_evaluate),
        cmocka_unit_test(checkpoints_carry_the_tokenizer),
    };
    return cmocka_run_group_tests_name("token files", tests, NULL, NULL);
}
