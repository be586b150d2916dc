/* What a checkpoint holds does not depend on how a model lays out its memory, and holds all of its state:
 * experts with gate and up rows in blocks, and the table of a router that hashes. */
#include "run.h"

static struct tensor param(const struct trainer *t, const char *key)
{
    int k = param_find(&t->model.params, key);
    assert_true(k >= 0);
    return model_param(&t->model, k);
}

/* Opens the newest checkpoint of a run and a trainer that starts from it. */
static void open_from(struct trainer *t, const struct config *c, const char *run)
{
    struct err e = {0};
    struct ckpt *from;
    assert_ok(ckpt_open(&from, run, &e), &e);
    assert_ok(trainer_open(t, c, from, true, &e), &e);
    ckpt_close(from);
}

static void assert_same_checkpoints(const char *run_a, const char *run_b)
{
    struct err e = {0};
    struct ckpt *a, *b;
    assert_ok(ckpt_open(&a, run_a, &e), &e);
    assert_ok(ckpt_open(&b, run_b, &e), &e);
    assert_int_equal(ckpt_count(a), ckpt_count(b));
    for (int i = 0; i < ckpt_count(a); i++) {
        struct ckpt_tensor x = ckpt_at(a, i), y = ckpt_at(b, i);
        struct st_difference d;
        assert_string_equal(x.key, y.key);
        assert_int_equal(x.view.dtype, y.view.dtype);
        assert_ok(st_compare(&x.view, &y.view, &d, &e), &e);
        if (d.count != 0)
            fail_msg("%s differs in %lld elements", x.key, (long long)d.count);
    }
    ckpt_close(a);
    ckpt_close(b);
}

/* A run of a plain model goes on as a model with blocks, is saved again, and goes on as a plain one. */
static void blocks_of_gate_and_up_rows_stay_in_memory(void **state)
{
    (void)state;
    static const char options[] =
        "model.pattern=*E model.experts=4 model.expert_ffn=12 model.expert_bias=on train.eval_batches=2";
    static const char fc1[] = "decoder.layers.1.mlp.experts.linear_fc1.weight";
    struct playground pg;
    struct config plain, blocks;
    struct trainer t;
    struct err e = {0};
    playground_open(&pg);
    char text[256], *other = path_join(pg.dir, "other"), *third = path_join(pg.dir, "third");
    run_config(&plain, &pg, options);
    snprintf(text, sizeof text, "%s model.glu_interleave=3 run.dir=%s", options, other);
    run_config(&blocks, &pg, text);

    double loss[4] = {0};
    assert_ok(trainer_open(&t, &plain, NULL, true, &e), &e);
    run_steps(&t, 5, NULL);
    assert_ok(trainer_save(&t, &e), &e);
    struct tensor w = param(&t, fc1);
    int64_t bytes = tensor_bytes(&w);
    char *halves = malloc((size_t)bytes);
    assert_non_null(halves);
    memcpy(halves, w.data, (size_t)bytes);
    run_steps(&t, 1, &loss[0]);
    trainer_close(&t);

    open_from(&t, &blocks, pg.run);
    w = param(&t, fc1);
    assert_memory_not_equal(halves, w.data, (size_t)bytes);
    for (int64_t k = 0; k < 4; k++) /* row 3 of memory is the first up row: 12 of the file */
        assert_memory_equal((float *)w.data + (k * 24 + 3) * 16, (float *)(void *)halves + (k * 24 + 12) * 16,
                            16 * sizeof(float));
    assert_ok(trainer_save(&t, &e), &e);
    run_steps(&t, 1, &loss[1]);
    trainer_close(&t);
    assert_same_checkpoints(pg.run, other); /* parameters and moments */
    /* The same sums; which column of a product a row is may change how OpenBLAS rounds it. */
    assert_true(fabs(loss[0] - loss[1]) <= 1e-6 * loss[0]);

    assert_ok(config_set(&plain, "run.dir", third, NULL, &e), &e);
    open_from(&t, &plain, other);
    assert_ok(trainer_save(&t, &e), &e);
    trainer_close(&t);
    assert_same_checkpoints(pg.run, third);
    config_release(&plain);
    config_release(&blocks);
    free(halves);
    free(other);
    free(third);
    playground_close(&pg);
}

/* A trained table comes from a checkpoint, is used, and is saved with the rest. */
static void the_table_of_a_hashing_router_is_saved_and_restored(void **state)
{
    (void)state;
    static const char key[] = "decoder.layers.0.mlp.router.tid2eid";
    struct playground pg;
    struct config c;
    struct trainer t;
    struct err e = {0};
    double loss[3];
    playground_open(&pg);
    run_config(&c, &pg, "model.pattern=E-E model.experts=4 model.expert_ffn=12 model.router_hash_layers=1");
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    struct tensor table = param(&t, key);
    int64_t n = tensor_elems(&table);
    int32_t *want = malloc((size_t)n * sizeof *want);
    assert_non_null(want);
    assert_int_equal(table.dtype, DT_I32);
    assert_int_equal(param_find(&t.model.params, "decoder.layers.2.mlp.router.tid2eid"), -1);
    for (int64_t i = 0; i < n; i++) { /* where it starts: token t to experts t, t + 1 */
        assert_int_equal(((int32_t *)table.data)[i], (i / 2 + i % 2) % 4);
        want[i] = (int32_t)(i % 2 == 0 ? rng_below(3, (uint64_t)i, 2) : 2 + rng_below(4, (uint64_t)i, 2));
    }
    run_steps(&t, 1, &loss[0]);
    trainer_close(&t);

    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    memcpy(param(&t, key).data, want, (size_t)n * sizeof *want);
    assert_ok(trainer_save(&t, &e), &e);
    run_steps(&t, 1, &loss[1]);
    assert_memory_equal(param(&t, key).data, want, (size_t)n * sizeof *want); /* no step trains it */
    trainer_close(&t);
    assert_true(loss[0] != loss[1]); /* it routes */

    open_from(&t, &c, pg.run);
    assert_memory_equal(param(&t, key).data, want, (size_t)n * sizeof *want);
    run_steps(&t, 1, &loss[2]);
    assert_true(loss[1] == loss[2]);
    trainer_close(&t);

    struct ckpt *from;
    assert_ok(ckpt_open(&from, pg.run, &e), &e);
    assert_true(ckpt_has(from, key, CKPT_MODEL));
    assert_false(ckpt_has(from, "exp_avg.decoder.layers.0.mlp.router.tid2eid", CKPT_OPTIM));
    ckpt_close(from);
    config_release(&c);
    free(want);
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_of_gate_and_up_rows_stay_in_memory),
        cmocka_unit_test(the_table_of_a_hashing_router_is_saved_and_restored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
