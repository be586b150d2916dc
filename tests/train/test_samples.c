/* Text written at evaluations: it is in the log, training does not notice, and what cannot be
 * written never ends a run. */
#include "run.h"

#include <jansson.h>

/* Runs the trainer and returns its metrics.jsonl; the run folder is removed. */
static char *train(const struct playground *pg, const char *options)
{
    struct config c;
    struct err e = {0};
    struct trainer t = {0};
    char all[1024];
    snprintf(all, sizeof all,
             "model.vocab=257 data.eod=on data.split=80,20 train.steps=4 train.warmup=1 "
             "train.eval_every=2 train.eval_batches=1 %s",
             options);
    run_config(&c, pg, all);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    assert_ok(trainer_run(&t, &e), &e);
    trainer_close(&t);
    char *path = path_join(pg->run, "metrics.jsonl"), *text;
    size_t n;
    assert_ok(file_read(path, 1 << 20, &text, &n, &e), &e);
    assert_ok(file_remove_tree(pg->run, &e), &e);
    free(path);
    config_release(&c);
    return text;
}

/* Losses of steps and evaluations, one a line; samples are counted. */
static int losses_of(const char *metrics, struct buf *out)
{
    int samples = 0;
    for (const char *at = metrics; *at != '\0'; at += strcspn(at, "\n") + 1) {
        json_t *rec = json_loadb(at, strcspn(at, "\n"), 0, NULL);
        assert_non_null(rec);
        const char *event = json_string_value(json_object_get(rec, "event"));
        static const char *const key[] = {"loss", "val_loss"};
        for (int i = 0; i < countof(key); i++)
            if (json_object_get(rec, key[i]) != NULL)
                buf_addf(out, "%s %.17g\n", key[i], json_number_value(json_object_get(rec, key[i])));
        if (event != NULL && strcmp(event, "sample") == 0) {
            assert_true(strlen(json_string_value(json_object_get(rec, "text"))) > 0);
            samples++;
        }
        json_decref(rec);
    }
    return samples;
}

static void training_does_not_notice_samples(void **state)
{
    (void)state;
    struct playground pg;
    int n;
    const char *const *models = tiny_models(&n);
    playground_open(&pg);
    for (int i = 0; i < n; i++) {
        char with[1024];
        struct buf plain, sampled;
        buf_init(&plain, 0);
        buf_init(&sampled, 0);
        snprintf(with, sizeof with, "%s run.sample_tokens=9 generate.prompt=ab", models[i]);
        char *a = train(&pg, models[i]), *b = train(&pg, with);
        assert_int_equal(losses_of(a, &plain), 0);
        assert_int_equal(losses_of(b, &sampled), 2);
        assert_string_equal(plain.text, sampled.text);
        buf_release(&plain);
        buf_release(&sampled);
        free(a);
        free(b);
    }
    playground_close(&pg);
}

static void without_evaluations_the_end_is_sampled(void **state)
{
    (void)state;
    struct playground pg;
    struct buf losses;
    playground_open(&pg);
    buf_init(&losses, 0);
    char *text = train(&pg, "train.eval_every=0 run.sample_tokens=5");
    assert_int_equal(losses_of(text, &losses), 1);
    buf_release(&losses);
    free(text);
    playground_close(&pg);
}

static void a_prompt_that_does_not_fit_is_noted_and_the_run_goes_on(void **state)
{
    (void)state;
    struct playground pg;
    struct buf losses;
    playground_open(&pg);
    buf_init(&losses, 0);
    char *text = train(&pg, "run.sample_tokens=9 generate.prompt=12345678901234567890");
    assert_int_equal(losses_of(text, &losses), 0);
    assert_non_null(strstr(text, "no text is written by this run: the prompt has 20 tokens, but"));
    assert_null(strstr(strstr(text, "no text is written") + 1, "no text is written")); /* once */
    buf_release(&losses);
    free(text);
    playground_close(&pg);
}

static void samples_end_with_the_sequence(void **state)
{
    (void)state;
    struct playground pg;
    struct buf losses;
    playground_open(&pg);
    buf_init(&losses, 0);
    char *text = train(&pg, "run.sample_tokens=1000 generate.prompt=abc");
    assert_int_equal(losses_of(text, &losses), 2);
    buf_release(&losses);
    free(text);
    playground_close(&pg);
}

static void several_ranks_note_that_no_text_is_written(void **state)
{
    (void)state;
    struct config c;
    struct playground pg;
    struct trainer t = {0};
    struct err e = {0};
    struct rank_place place = place_alone();
    playground_open(&pg);
    run_config(&c, &pg, "run.sample_tokens=5 train.micro_batch=1");
    assert_ok(config_set(&c, "parallel.ranks", "2", NULL, &e), &e);
    assert_ok(place_on_paper(&place, &c, 0, &e), &e);
    assert_ok(trainer_plan_on(&t, &c, &place, true, &e), &e);
    assert_non_null(t.samples); /* asked for: samples_write says that it is not done */
    trainer_close(&t);
    place_close(&place);
    config_release(&c);
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(training_does_not_notice_samples),
        cmocka_unit_test(without_evaluations_the_end_is_sampled),
        cmocka_unit_test(a_prompt_that_does_not_fit_is_noted_and_the_run_goes_on),
        cmocka_unit_test(samples_end_with_the_sequence),
        cmocka_unit_test(several_ranks_note_that_no_text_is_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
