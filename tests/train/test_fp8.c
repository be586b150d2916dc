/* gpu.precision=fp8 on host devices: it learns, schedules and devices agree, codes follow the weights through updates,
 * saving and loading, memory is won, and what cannot be is refused. */
#include "run.h"

/* Layers wide enough for several blocks. */
#define WIDE "model.hidden=144 model.heads=2 model.ffn=272 train.seq=32 "
#define FP8 "gpu.precision=fp8 "

static double last_loss(const char *options, struct snapshot *end)
{
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t;
    double loss[12];
    playground_open(&pg);
    run_config(&c, &pg, options);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    run_steps(&t, countof(loss), loss);
    if (end != NULL)
        snapshot_take(end, &t);
    trainer_close(&t);
    config_release(&c);
    playground_close(&pg);
    return loss[countof(loss) - 1];
}

static void it_learns_as_without_and_on_every_device(void **state)
{
    (void)state;
    double plain = last_loss(WIDE, NULL);
    static const char *const with[] = {
        WIDE FP8,
        WIDE FP8 "run.device=ref",
        WIDE FP8 "gpu.fp8_recipe=tensor",
        WIDE FP8 "gpu.fp8_recipe=mxfp8",
        WIDE FP8 "gpu.fp8_grad=e5m2",
        WIDE FP8 "gpu.fp8_keep=*linear_qkv*,decoder.layers.1.*",
    };
    for (int i = 0; i < countof(with); i++) {
        double loss = last_loss(with[i], NULL);
        if (!(fabs(loss - plain) < 5e-3 * plain))
            fail_msg("'%s': loss %g, without FP8 %g", with[i], loss, plain);
        assert_true(loss != plain); /* it was FP8 */
    }
}

static void schedules_give_the_same_bits(void **state)
{
    (void)state;
    static const char *const models[] = {
        WIDE FP8, WIDE FP8 "model.bias=on", WIDE FP8 "lora.rank=4", WIDE FP8 "model.pattern=*-/*- model.mhc_streams=2",
        WIDE FP8 "gpu.fp8_recipe=tensor model.pattern=*E model.experts=4 model.topk=2 model.shared_ffn=32"};
    static const char *const ways[] = {"plan.recompute=full", "plan.recompute=joint.norm", "plan.delay_dw=on",
                                       "plan.poison=on plan.random_lanes=5"};
    for (int m = 0; m < countof(models); m++) {
        struct snapshot plain, other;
        last_loss(models[m], &plain);
        for (int w = 0; w < countof(ways); w++) {
            char options[400];
            snprintf(options, sizeof options, "%s %s", models[m], ways[w]);
            last_loss(options, &other);
            if (!snapshot_equal(&plain, &other))
                fail_msg("'%s' changes bits of '%s'", ways[w], models[m]);
            snapshot_free(&other);
        }
        snapshot_free(&plain);
    }
}

/* The codes are those of the weights now: making them again changes nothing. */
static void expect_fresh_codes(struct trainer *t)
{
    struct err e = {0};
    size_t bytes = (size_t)t->model.mem.allocated[ARENA_CODE];
    char *before = malloc(bytes);
    assert_non_null(before);
    assert_true(bytes > 0);
    memcpy(before, t->model.mem.base[ARENA_CODE], bytes);
    assert_ok(model_quantise(&t->model, &e), &e);
    assert_memory_equal(before, t->model.mem.base[ARENA_CODE], bytes);
    free(before);
}

static void codes_follow_the_weights(void **state)
{
    (void)state;
    static const char *const with[] = {FP8 "model.dropout=0.1", FP8 "gpu.fp8_recipe=tensor run.device=ref",
                                       FP8 "gpu.fp8_recipe=mxfp8"};
    for (int i = 0; i < countof(with); i++) {
        struct playground pg;
        struct config c;
        struct err e = {0};
        struct trainer t;
        struct ckpt *from;
        double whole[6], parts[6];
        playground_open(&pg);
        run_config(&c, &pg, with[i]);
        assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
        expect_fresh_codes(&t);
        run_steps(&t, 6, whole);
        expect_fresh_codes(&t);
        trainer_close(&t);
        assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
        run_steps(&t, 3, parts);
        assert_ok(trainer_save(&t, &e), &e);
        trainer_close(&t);
        assert_ok(ckpt_open(&from, pg.run, &e), &e);
        assert_ok(trainer_open(&t, &c, from, true, &e), &e);
        ckpt_close(from);
        expect_fresh_codes(&t);
        run_steps(&t, 3, parts + 3);
        assert_memory_equal(whole, parts, sizeof whole);
        trainer_close(&t);
        config_release(&c);
        playground_close(&pg);
    }
}

static int64_t frame_bytes(const char *options, int64_t *codes)
{
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t;
    playground_open(&pg);
    run_config(&c, &pg, options);
    assert_ok(trainer_plan(&t, &c, false, &e), &e);
    int64_t bytes = t.model.mem.planned[ARENA_FRAME];
    *codes = t.model.mem.planned[ARENA_CODE];
    trainer_close(&t);
    config_release(&c);
    playground_close(&pg);
    return bytes;
}

static void saved_inputs_are_codes(void **state)
{
    (void)state;
    int64_t codes, none, with = frame_bytes(WIDE FP8, &codes), without = frame_bytes(WIDE, &none);
    assert_int_equal(none, 0);
    assert_true(codes > 2 * (144 * 3 * 144 + 144 * 144 + 3 * 144 * 272)); /* both orientations, and scales */
    /* Per token: inputs of qkv, fc1 and fc2 take a byte instead of four, proj's one more; scales beside them. */
    int64_t tokens = 2 * 32, won = tokens * (3 * (144 + 144 + 272) - 144);
    assert_true(with < without - won * 9 / 10);
}

static void expect_refused(const char *options, const char *text)
{
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t = {0};
    playground_open(&pg);
    run_config(&c, &pg, options);
    assert_fails(trainer_plan(&t, &c, false, &e), ST_USAGE, &e, text);
    trainer_close(&t);
    config_release(&c);
    playground_close(&pg);
}

static void what_reaches_no_layer_is_refused(void **state)
{
    (void)state;
    expect_refused(FP8 "model.hidden=24 model.heads=2 model.ffn=40", "no linear layer");
    expect_refused(FP8 "gpu.fp8_keep=*", "no linear layer");
    expect_refused(FP8 "gpu.fp8_keep=*linear_qkv*,nothing", "'nothing' matches");
}

static void a_bad_value_is_named(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t;
    struct step_result r;
    playground_open(&pg);
    run_config(&c, &pg, FP8);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    int k = param_find(&t.model.params, "decoder.layers.1.mlp.linear_fc1.weight");
    assert_true(k >= 0);
    struct tensor w = model_param(&t.model, k);
    tensor_set(&w, 3, NAN);
    assert_ok(model_quantise(&t.model, &e), &e);
    assert_fails(trainer_step(&t, &r, &e), ST_NONFINITE, &e, "written by node 1.mlp.fc1 (fwd)");
    trainer_close(&t);
    config_release(&c);
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_learns_as_without_and_on_every_device),
        cmocka_unit_test(schedules_give_the_same_bits),
        cmocka_unit_test(codes_follow_the_weights),
        cmocka_unit_test(saved_inputs_are_codes),
        cmocka_unit_test(what_reaches_no_layer_is_refused),
        cmocka_unit_test(a_bad_value_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
