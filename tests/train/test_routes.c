/* train/routes.c: what is recorded is what was chosen, a replay of one's own choices changes nothing, a replay of
 * others' changes the run, and files that do not fit are refused. */
#include "run.h"

#include <math.h>

#define EXPERTS "model.pattern=*E*E model.experts=6 model.topk=2 model.expert_ffn=16 model.aux_loss=0.01 "

/* Losses of n steps and the parameters after them; record, replay: file names in the playground or NULL. */
static void train(const struct playground *pg, const char *options, const char *record, const char *replay, int n,
                  double *losses, struct snapshot *s)
{
    struct config c;
    struct err e = {0};
    struct trainer t;
    run_config(&c, pg, options);
    const char *names[2] = {"train.record_routes", "train.replay_routes"}, *files[2] = {record, replay};
    for (int i = 0; i < 2; i++) {
        char *path = path_join(pg->dir, files[i] ? files[i] : "none");
        if (files[i] != NULL)
            assert_ok(config_set(&c, names[i], path, NULL, &e), &e);
        free(path);
    }
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    run_steps(&t, n, losses);
    snapshot_take(s, &t);
    trainer_close(&t);
    config_release(&c);
}

static void read_all(const struct playground *pg, const char *name, char **bytes, size_t *n)
{
    struct err e = {0};
    char *path = path_join(pg->dir, name);
    assert_ok(file_read(path, 1 << 24, bytes, n, &e), &e);
    free(path);
}

static void assert_same_bytes(const struct playground *pg, const char *a, const char *b)
{
    char *first, *second;
    size_t n_first, n_second;
    read_all(pg, a, &first, &n_first);
    read_all(pg, b, &second, &n_second);
    assert_int_equal(n_first, n_second);
    assert_memory_equal(first, second, n_first);
    free(first);
    free(second);
}

static void own_choices_change_nothing(const char *options)
{
    struct playground pg;
    struct snapshot plain, recorded, replayed;
    double a[6], b[6], c[6];
    playground_open(&pg);
    train(&pg, options, NULL, NULL, 6, a, &plain);
    train(&pg, options, "routes", NULL, 6, b, &recorded);
    train(&pg, options, "again", "routes", 6, c, &replayed);
    assert_memory_equal(a, b, sizeof a);
    assert_memory_equal(a, c, sizeof a);
    assert_true(snapshot_equal(&plain, &recorded));
    assert_true(snapshot_equal(&plain, &replayed));
    assert_same_bytes(&pg, "routes", "again");
    snapshot_free(&plain);
    snapshot_free(&recorded);
    snapshot_free(&replayed);
    playground_close(&pg);
}

static void a_replay_of_the_same_run_gives_its_bits(void **state)
{
    (void)state;
    own_choices_change_nothing(EXPERTS);
    own_choices_change_nothing(EXPERTS "run.device=ref");
    own_choices_change_nothing(
        EXPERTS "model.router_score=sigmoid model.router_bias=on model.router_capacity=0.7 model.seq_aux_loss=0.01");
    own_choices_change_nothing("model.pattern=*E/*E model.experts=6 model.topk=3 model.expert_ffn=16 "
                               "model.router_pre_softmax=on plan.recompute=full");
}

/* Samples have places of their own in the file, however they were grouped. */
static void microbatches_need_not_be_the_same(void **state)
{
    (void)state;
    struct playground pg;
    struct snapshot two, four;
    double a[5], b[5];
    playground_open(&pg);
    train(&pg, EXPERTS "model.aux_loss=0", "routes", NULL, 5, a, &two);
    train(&pg, EXPERTS "model.aux_loss=0 train.micro_batch=4", "again", "routes", 5, b, &four);
    for (int i = 0; i < 5; i++)
        assert_true(fabs(a[i] - b[i]) < 1e-5);
    assert_same_bytes(&pg, "routes", "again");
    snapshot_free(&two);
    snapshot_free(&four);
    playground_close(&pg);
}

static void choices_of_another_run_are_followed(void **state)
{
    (void)state;
    struct playground pg;
    struct snapshot other, plain, led;
    double a[4], b[4], c[4];
    playground_open(&pg);
    train(&pg, EXPERTS "run.seed=77", "other", NULL, 4, a, &other);
    train(&pg, EXPERTS, NULL, NULL, 4, b, &plain);
    train(&pg, EXPERTS, "followed", "other", 4, c, &led);
    assert_true(b[0] != c[0]);
    assert_false(snapshot_equal(&plain, &led));
    assert_same_bytes(&pg, "other", "followed");
    snapshot_free(&other);
    snapshot_free(&plain);
    snapshot_free(&led);
    playground_close(&pg);
}

/* Opens and runs until something fails; returns the status of that. */
static int status_of(const struct playground *pg, const char *options, const char *replay, int steps)
{
    struct config c;
    struct err e = {0};
    struct trainer t = {0};
    struct step_result r;
    run_config(&c, pg, options);
    char *path = path_join(pg->dir, replay);
    assert_ok(config_set(&c, "train.replay_routes", path, NULL, &e), &e);
    int st = trainer_open(&t, &c, NULL, true, &e);
    for (int i = 0; st == ST_OK && i < steps; i++)
        st = trainer_step(&t, &r, &e);
    trainer_close(&t);
    config_release(&c);
    free(path);
    return st;
}

static void files_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    struct playground pg;
    struct snapshot s;
    double a[2];
    struct err e = {0};
    playground_open(&pg);
    train(&pg, EXPERTS, "routes", NULL, 2, a, &s);
    snapshot_free(&s);
    assert_int_equal(status_of(&pg, EXPERTS, "routes", 2), ST_OK);
    /* a step more than recorded */
    assert_int_equal(status_of(&pg, EXPERTS, "routes", 3), ST_INVALID);
    assert_int_equal(status_of(&pg, EXPERTS "model.topk=3", "routes", 1), ST_INVALID);       /* other choices */
    assert_int_equal(status_of(&pg, EXPERTS "model.pattern=E*E*", "routes", 1), ST_INVALID); /* other layers */
    assert_int_equal(status_of(&pg, EXPERTS, "text.txt", 1), ST_INVALID);                    /* another file */
    assert_int_equal(status_of(&pg, EXPERTS, "missing", 1), ST_IO);
    assert_int_equal(status_of(&pg, "model.pattern=*-", "routes", 1), ST_USAGE); /* nothing to route */
    char *path = path_join(pg.dir, "short");
    assert_ok(file_write_atomic(path, "braidrt1", 8, &e), &e);
    free(path);
    assert_int_equal(status_of(&pg, EXPERTS, "short", 1), ST_IO);
    playground_close(&pg);
}

/* Without a trainer nobody dictates: tokens would silently go to expert 0. */
static void only_training_follows_a_file(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct err e = {0};
    double worst;
    playground_open(&pg);
    run_config(&c, &pg, EXPERTS "train.replay_routes=routes");
    assert_fails(model_gradcheck(&c, 1, NULL, NULL, &worst, &e), ST_USAGE, &e,
                 "train.replay_routes is set, but gradcheck takes no steps");
    config_release(&c);
    run_config(&c, &pg, EXPERTS "train.record_routes=routes");
    assert_fails(routes_refuse(&c, "braid grads", &e), ST_USAGE, &e,
                 "train.record_routes is set, but braid grads takes no steps");
    config_release(&c);
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_replay_of_the_same_run_gives_its_bits),
        cmocka_unit_test(microbatches_need_not_be_the_same),
        cmocka_unit_test(choices_of_another_run_are_followed),
        cmocka_unit_test(files_that_do_not_fit_are_refused),
        cmocka_unit_test(only_training_follows_a_file),
    };
    return cmocka_run_group_tests_name("routes", tests, NULL, NULL);
}
