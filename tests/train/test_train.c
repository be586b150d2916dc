/* train/: resuming, non-finite values, evaluation, and that it learns. */
#include "run.h"

/* ---- resuming -------------------------------------------------------------------------------- */

static void resume_equals_straight(const char *options)
{
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t;
    struct snapshot straight, resumed, half;
    double whole[20], parts[20];
    playground_open(&pg);
    run_config(&c, &pg, options);

    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    run_steps(&t, 20, whole);
    snapshot_take(&straight, &t);
    int64_t tokens = t.tokens_seen;
    trainer_close(&t);

    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    run_steps(&t, 10, parts);
    snapshot_take(&half, &t);
    assert_ok(trainer_save(&t, &e), &e);
    trainer_close(&t);
    struct ckpt *from;
    assert_ok(ckpt_open(&from, pg.run, &e), &e);
    assert_ok(trainer_open(&t, &c, from, true, &e), &e);
    ckpt_close(from);
    assert_int_equal(t.step, 10);
    snapshot_take(&resumed, &t);
    assert_true(snapshot_equal(&half, &resumed));
    snapshot_free(&resumed);
    run_steps(&t, 10, parts + 10);
    snapshot_take(&resumed, &t);
    assert_int_equal(t.step, 20);
    assert_int_equal(t.tokens_seen, tokens);
    trainer_close(&t);

    assert_memory_equal(whole, parts, sizeof whole);
    assert_true(snapshot_equal(&straight, &resumed));
    assert_false(snapshot_equal(&straight, &half)); /* there was something to resume */
    snapshot_free(&straight);
    snapshot_free(&resumed);
    snapshot_free(&half);
    config_release(&c);
    playground_close(&pg);
}

static void a_resumed_run_equals_a_straight_one_bit_for_bit(void **state)
{
    (void)state;
    resume_equals_straight("model.dropout=0.1");
    resume_equals_straight("model.dropout=0.1 run.device=ref model.pattern=*-* model.qk_norm=on model.bias=on");
    resume_equals_straight("model.dropout=0.2 data.eod=on data.eod_mask=on model.vocab=257 "
                           "plan.recompute=full train.schedule=wsd");
    resume_equals_straight("model.pattern=*-*- model.mhc_streams=4 model.dropout=0.1 plan.recompute_block=2");
    resume_equals_straight("model.pattern=[*E]-/*-/*- model.mhc_streams=2 model.mhc_profile=s model.experts=4 "
                           "model.dropout=0.1 plan.recompute=mhc");
}

/* ---- non-finite values ----------------------------------------------------------------------- */

struct poisoned {
    const char *key;
    double value;
    const char *node;
};

static void a_bad_value_stops_the_run_and_names_its_node(void **state)
{
    (void)state;
    static const struct poisoned cases[] = {
        {"decoder.layers.1.mlp.linear_fc1.weight", NAN, "written by node 1.mlp.fc1 (fwd)"},
        {"decoder.layers.0.self_attention.linear_proj.weight", INFINITY, "written by node 0.attn.proj (fwd)"},
        {"decoder.final_norm.weight", NAN, "written by node 2.joint.joint (fwd)"},
        {"decoder.layers.0.self_attention.linear_qkv.weight", -INFINITY, "written by node 0.attn.qkv (fwd)"},
    };
    struct playground pg;
    playground_open(&pg);
    for (int i = 0; i < countof(cases); i++) {
        struct config c;
        struct err e = {0};
        struct trainer t;
        struct step_result r;
        struct snapshot before, after;
        run_config(&c, &pg, i % 2 ? "run.device=ref" : "plan.poison=on");
        assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
        run_steps(&t, 2, NULL);
        struct tensor p = model_param(&t.model, param_find(&t.model.params, cases[i].key));
        double good = tensor_get(&p, 3);
        tensor_set(&p, 3, cases[i].value);
        snapshot_take(&before, &t);
        assert_fails(trainer_step(&t, &r, &e), ST_NONFINITE, &e, cases[i].node);
        assert_non_null(strstr(e.msg, "first non-finite value"));
        assert_non_null(strstr(e.hint, "train.nonfinite=skip"));
        snapshot_take(&after, &t);
        assert_true(snapshot_equal(&before, &after));
        assert_int_equal(t.step, 2);
        assert_false(t.exec.find_nan); /* the search is over */
        tensor_set(&p, 3, good);
        run_steps(&t, 1, NULL); /* and the trainer is not broken */
        snapshot_free(&before);
        snapshot_free(&after);
        trainer_close(&t);
        config_release(&c);
    }
    playground_close(&pg);
}

static void skipping_counts_and_changes_nothing(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t;
    struct step_result r;
    struct snapshot before, after;
    playground_open(&pg);
    run_config(&c, &pg, "train.nonfinite=skip");
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    run_steps(&t, 1, NULL);
    struct tensor p = model_param(&t.model, param_find(&t.model.params, "decoder.layers.1.mlp.linear_fc2.weight"));
    double good = tensor_get(&p, 0);
    tensor_set(&p, 0, NAN);
    snapshot_take(&before, &t);
    for (int i = 1; i <= 3; i++) {
        assert_ok(trainer_step(&t, &r, &e), &e);
        assert_true(r.skipped && !isfinite(r.loss));
        assert_int_equal(t.skipped, i);
        assert_int_equal(t.step, 1 + i); /* the data goes on */
    }
    snapshot_take(&after, &t);
    assert_true(snapshot_equal(&before, &after));
    tensor_set(&p, 0, good);
    assert_ok(trainer_step(&t, &r, &e), &e);
    assert_true(!r.skipped && isfinite(r.loss) && t.skipped == 3);
    snapshot_free(&before);
    snapshot_free(&after);
    trainer_close(&t);
    config_release(&c);
    playground_close(&pg);
}

/* ---- evaluation ------------------------------------------------------------------------------ */

/* Mean loss and bits per byte from logits, by the definition. */
static void direct_eval(struct trainer *t, double *loss, double *bits)
{
    struct tiny direct = {.c = *t->cfg};
    struct model_plan *plans[] = {&direct.train};
    struct model_plan_opts o = {.name = "direct",
                                .mode = BUILD_TRAIN,
                                .batch = t->cfg->train.micro_batch,
                                .seq = t->cfg->train.seq,
                                .want_logits = true};
    struct batch_opts bo = t->batch_opts;
    struct err e = {0};
    double sum = 0;
    int64_t labels = 0, bytes = 0;
    bo.global_batch = bo.micro_batch;
    assert_ok(model_init(&direct.m, t->cfg, &t->dev, &e), &e);
    assert_ok(model_plan_build(&direct.m, &direct.train, &o, &e), &e);
    assert_ok(model_commit(&direct.m, plans, 1, &e), &e);
    memcpy(direct.m.mem.base[ARENA_PARAM], t->model.mem.base[ARENA_PARAM], (size_t)t->model.mem.allocated[ARENA_PARAM]);
    exec_init(&direct.x, &t->dev);
    assert_ok(exec_prepare(&direct.x, &direct.train.p, &e), &e);
    for (int64_t k = 0; k < t->cfg->train.eval_batches; k++) {
        struct batch b;
        assert_ok(batch_alloc(&b, bo.micro_batch, t->cfg->train.seq, &e), &e);
        assert_ok(batch_fill(&b, t->valid_data, &bo, k, 0, &e), &e);
        struct run_info run = {.first_mb = true,
                               .scale = 1,
                               .tokens = b.tokens,
                               .labels = b.labels,
                               .pos = b.pos,
                               .doc_start = b.doc_start};
        assert_ok(exec_run(&direct.x, &direct.train.p, &run, &e), &e);
        struct tensor logits = model_slot(&direct.m, &direct.train, direct.train.logits);
        for (int64_t i = 0; i < logits.dim[0]; i++) {
            double z = 0;
            if (b.labels[i] < 0)
                continue;
            for (int64_t v = 0; v < logits.dim[1]; v++)
                z += exp(tensor_get(&logits, i * logits.dim[1] + v));
            sum += log(z) - tensor_get(&logits, i * logits.dim[1] + b.labels[i]);
            labels++;
            bytes += b.labels[i] < 256; /* the end of a document is no byte */
        }
        batch_release(&b);
    }
    *loss = sum / (double)labels;
    *bits = sum / log(2) / (double)bytes;
    exec_release(&direct.x);
    model_plan_release(&direct.train);
    model_release(&direct.m);
}

static void evaluation_equals_its_definition(void **state)
{
    (void)state;
    static const char *const cases[] = {
        "run.device=ref",
        "run.device=ref data.eod=on data.eod_mask=on model.vocab=257",
    };
    struct playground pg;
    playground_open(&pg);
    for (int i = 0; i < countof(cases); i++) {
        struct config c;
        struct err e = {0};
        struct trainer t;
        char options[256];
        double want_loss, want_bits;
        struct eval_result r, again;
        snprintf(options, sizeof options, "%s data.split=70,30 train.eval_batches=3", cases[i]);
        run_config(&c, &pg, options);
        assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
        run_steps(&t, 2, NULL);
        assert_ok(trainer_eval(&t, &r, &e), &e);
        direct_eval(&t, &want_loss, &want_bits);
        assert_true(fabs(r.loss - want_loss) < 1e-12 * want_loss);
        assert_true(fabs(r.bits_per_byte - want_bits) < 1e-12 * want_bits);
        assert_ok(trainer_eval(&t, &again, &e), &e);
        assert_true(again.loss == r.loss); /* the same batches each time */
        trainer_close(&t);
        config_release(&c);
    }
    playground_close(&pg);
}

/* Dropout must not reach evaluation: another dropout, the same parameters, the same loss. */
static void evaluation_ignores_dropout(void **state)
{
    (void)state;
    struct playground pg;
    double loss[2];
    playground_open(&pg);
    for (int i = 0; i < 2; i++) {
        struct config c;
        struct err e = {0};
        struct trainer t;
        run_config(&c, &pg, i ? "model.dropout=0.5 data.split=70,30" : "data.split=70,30");
        assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
        struct eval_result r;
        assert_ok(trainer_eval(&t, &r, &e), &e);
        loss[i] = r.loss;
        trainer_close(&t);
        config_release(&c);
    }
    assert_true(loss[0] == loss[1]);
    playground_close(&pg);
}

/* ---- learning -------------------------------------------------------------------------------- */

static void it_learns_a_repetitive_text(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t;
    enum { STEPS = 120 };
    double loss[STEPS];
    char options[512];
    playground_open(&pg);
    snprintf(options, sizeof options, "data.train=%s train.steps=%d train.lr=2e-2 run.threads=2", pg.dull, STEPS);
    run_config(&c, &pg, options);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    run_steps(&t, STEPS, loss);
    assert_true(fabs(loss[0] - log(256)) < 0.2); /* knows nothing */
    assert_true(loss[STEPS - 1] < 0.2);          /* knows the word */
    trainer_close(&t);
    config_release(&c);
    playground_close(&pg);
}

/* The whole loop, twice: to step 6, then on to step 10 from its own checkpoint; and without a data
 * path. */
static void the_loop_saves_where_it_ends(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t;
    struct ckpt *from;
    playground_open(&pg);
    run_config(&c, &pg, "train.steps=6 run.save_every=4 data.split=80,20 train.eval_every=3");
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    assert_ok(trainer_run(&t, &e), &e);
    trainer_close(&t);
    config_release(&c);
    assert_ok(ckpt_open(&from, pg.run, &e), &e);
    assert_int_equal(ckpt_step(from), 6);
    assert_int_equal(ckpt_counters(from)->tokens, 6 * 4 * 16);
    run_config(&c, &pg, "train.steps=10");
    assert_ok(trainer_open(&t, &c, from, true, &e), &e);
    ckpt_close(from);
    assert_ok(trainer_run(&t, &e), &e);
    assert_int_equal(t.step, 10);
    trainer_close(&t);
    config_release(&c);
    run_config(&c, &pg, "");
    assert_ok(config_set(&c, "data.train", "", NULL, &e), &e);
    assert_fails(trainer_open(&t, &c, NULL, true, &e), ST_USAGE, &e, "data.train is not set");
    trainer_close(&t);
    config_release(&c);
    playground_close(&pg);
}

/* A checkpoint written beside the steps has the bits of one that they wait for; the log names both. */
static void checkpoints_written_beside_the_steps_have_the_same_bits(void **state)
{
    (void)state;
    struct playground pg[2];
    struct config c;
    struct err e = {0};
    struct trainer t;
    for (int on = 0; on < 2; on++) {
        playground_open(&pg[on]);
        run_config(&c, &pg[on],
                   on ? "train.steps=7 run.save_every=2 run.keep=0 run.async_save=on"
                      : "train.steps=7 run.save_every=2 run.keep=0");
        assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
        assert_ok(trainer_run(&t, &e), &e);
        trainer_close(&t);
        config_release(&c);
    }
    static const int64_t steps[] = {2, 4, 6, 7};
    for (int i = 0; i < countof(steps); i++) {
        struct ckpt *from[2];
        for (int on = 0; on < 2; on++)
            assert_ok(ckpt_open_intact(&from[on], pg[on].run, steps[i], NULL, &e), &e);
        assert_int_equal(ckpt_count(from[0]), ckpt_count(from[1]));
        for (int k = 0; k < ckpt_count(from[0]); k++) {
            struct ckpt_tensor a = ckpt_at(from[0], k), b = ckpt_at(from[1], k);
            assert_string_equal(a.key, b.key);
            assert_memory_equal(a.view.data, b.view.data, (size_t)tensor_bytes(&a.view));
        }
        ckpt_close(from[0]);
        ckpt_close(from[1]);
    }
    playground_close(&pg[0]);
    playground_close(&pg[1]);
}

/* The error of a checkpoint that a thread writes ends the run after a later step, long before its end. */
static void a_checkpoint_that_fails_beside_the_steps_ends_the_run(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t;
    playground_open(&pg);
    char *path = path_join(pg.run, "checkpoints");
    assert_ok(file_make_dirs(pg.run, &e), &e);
    assert_ok(file_write_atomic(path, "no folder", 9, &e), &e);
    run_config(&c, &pg, "train.steps=100000 run.save_every=1 run.async_save=on run.report=off run.tensorboard=off");
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    assert_int_not_equal(trainer_run(&t, &e), ST_OK);
    assert_non_null(strstr(e.msg, "checkpoints"));
    assert_true(t.step >= 1 && t.step < 1000);
    trainer_close(&t);
    free(path);
    config_release(&c);
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_resumed_run_equals_a_straight_one_bit_for_bit),
        cmocka_unit_test(a_bad_value_stops_the_run_and_names_its_node),
        cmocka_unit_test(skipping_counts_and_changes_nothing),
        cmocka_unit_test(evaluation_equals_its_definition),
        cmocka_unit_test(evaluation_ignores_dropout),
        cmocka_unit_test(it_learns_a_repetitive_text),
        cmocka_unit_test(the_loop_saves_where_it_ends),
        cmocka_unit_test(checkpoints_written_beside_the_steps_have_the_same_bits),
        cmocka_unit_test(a_checkpoint_that_fails_beside_the_steps_ends_the_run),
    };
    return cmocka_run_group_tests_name("train", tests, NULL, NULL);
}
