/* Options of hyper-connections: what is refused and with which words, what help says, and other programs' names. */
#include "tiny.h"

static void refused(const char *name, const char *value, const char *text)
{
    struct config c;
    struct err e = {0};
    assert_ok(config_init(&c, &e), &e);
    int st = config_set(&c, name, value, NULL, &e);
    if (st == ST_OK)
        st = config_finish(&c, &e);
    assert_int_not_equal(st, ST_OK);
    if (strstr(e.msg, text) == NULL && strstr(e.hint, text) == NULL)
        fail_msg("%s=%s: '%s' is not in '%s'", name, value, text, e.msg);
    config_release(&c);
}

static void impossible_options_are_refused(void **state)
{
    (void)state;
    refused("model.mhc_streams", "1", "at least 2");
    refused("model.mhc_streams", "-2", "mhc_streams");
    refused("model.mhc_iterations", "0", "mhc_iterations");
    refused("model.mhc_gating", "-0.1", "mhc_gating");
    refused("model.mhc_profile", "s", "need model.mhc_streams");
    refused("plan.recompute_block", "2", "needs model.mhc_streams");
    refused("plan.recompute_block", "0", "off, auto or a number");
    refused("plan.recompute_block", "on", "off, auto or a number");
    refused("plan.recompute_block", "-1", "off, auto or a number");
    refused("plan.recompute_block", "2.5", "off, auto or a number");
    refused("plan.recompute", "mhc", "need model.mhc_streams");
    refused("mhc.kernels", "primitive", "need model.mhc_streams");
    refused("mhc.rebuild", "off", "need model.mhc_streams");
    refused("plan.recompute_granularity", "some", "selective");
    refused("model.mhc_streams", "17", "mhc_streams");
}

/* Host devices have one kind of kernels; others are an error and not a silent fallback. */
static void other_kernels_than_the_devices_are_refused(void **state)
{
    (void)state;
    static const char *const kinds[] = {"primitive", "ref", "boundary", "auto"};
    for (int i = 0; i < countof(kinds); i++) {
        char options[128];
        struct tiny t = {0};
        struct model_plan_opts o = {.name = "train", .mode = BUILD_TRAIN, .batch = 2, .seq = 8};
        snprintf(options, sizeof options, "model.mhc_streams=2 mhc.kernels=%s", kinds[i]);
        tiny_config(&t.c, options);
        assert_ok(dev_open(&t.dev, DEV_REF, 1, &t.e), &t.e);
        assert_ok(model_init(&t.m, &t.c, &t.dev, &t.e), &t.e);
        if (i < 2)
            assert_fails(model_plan_build(&t.m, &t.train, &o, &t.e), ST_USAGE, &t.e, "needs a GPU");
        else
            assert_ok(model_plan_build(&t.m, &t.train, &o, &t.e), &t.e);
        model_plan_release(&t.train);
        model_release(&t.m);
        dev_close(&t.dev);
        config_release(&t.c);
    }
}

/* Unknown recompute names are answered with those of the model, hyper-connections included. */
static void unknown_recompute_names_are_answered_with_the_valid_ones(void **state)
{
    (void)state;
    static const char *const names[] = {"joint.streams", "mla_up_proj", "jnt.*"};
    for (int i = 0; i < countof(names); i++) {
        char options[128];
        struct tiny t = {0};
        struct model_plan_opts o = {.name = "train", .mode = BUILD_TRAIN, .batch = 2, .seq = 8};
        snprintf(options, sizeof options, "model.mhc_streams=2 plan.recompute=norm,%s", names[i]);
        tiny_config(&t.c, options);
        assert_ok(dev_open(&t.dev, DEV_REF, 1, &t.e), &t.e);
        assert_ok(model_init(&t.m, &t.c, &t.dev, &t.e), &t.e);
        assert_fails(model_plan_build(&t.m, &t.train, &o, &t.e), ST_USAGE, &t.e, names[i]);
        assert_non_null(strstr(t.e.hint, "joint.stream, joint.norm"));
        assert_non_null(strstr(t.e.hint, "mlp.act"));
        model_plan_release(&t.train);
        model_release(&t.m);
        dev_close(&t.dev);
        config_release(&t.c);
    }
}

static void help_says_what_streams_cost(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 0);
    config_help(&b, "model");
    for (size_t i = 0; i < b.len; i++) /* lines are wrapped */
        b.text[i] = b.text[i] == '\n' ? ' ' : b.text[i];
    char *text = b.text, *out = text;
    for (const char *p = text; *p != '\0'; p++)
        if (*p != ' ' || out == text || out[-1] != ' ')
            *out++ = *p;
    *out = '\0';
    static const char *const says[] = {"what pipeline stages send each other grow n-fold",
                                       "plan.recompute_block gives memory back"};
    for (int i = 0; i < countof(says); i++)
        if (strstr(b.text, says[i]) == NULL)
            fail_msg("help does not say '%s'", says[i]);
    buf_release(&b);
}

static void both_upstream_spellings_are_understood(void **state)
{
    (void)state;
    static char enable[2][32] = {"--enable-hyper-connections", "--enable-mhc-connections"};
    static char streams[2][32] = {"--num-residual-streams", "--mhc-num-residual-streams"};
    static char eight[] = "8", iterations[] = "--mhc-sinkhorn-iterations=7";
    for (int i = 0; i < 2; i++) {
        struct config c;
        struct err e = {0};
        struct config_args args = {0};
        assert_ok(config_init(&c, &e), &e);
        assert_ok(config_parse_args(&c, 4, (char *const[]){enable[i], streams[i], eight, iterations}, &args, &e), &e);
        assert_ok(config_finish(&c, &e), &e);
        assert_true(c.model.mhc_streams == 8 && c.model.mhc_iterations == 7);
        config_release(&c);
    }
    /* A whole command line of upstream's. */
    static char words[][40] = {"--enable-hyper-connections",
                               "--num-residual-streams",
                               "4",
                               "--mhc-init-gating-factor",
                               "0.02",
                               "--use-fused-mhc",
                               "--recompute-granularity",
                               "selective",
                               "--recompute-modules",
                               "core_attn",
                               "mhc",
                               "--mhc-recompute-layer-num",
                               "2"};
    char *argv[countof(words)];
    for (int i = 0; i < countof(words); i++)
        argv[i] = words[i];
    struct config whole;
    struct err e = {0};
    struct config_args args = {0};
    assert_ok(config_init(&whole, &e), &e);
    assert_ok(config_parse_args(&whole, countof(words), argv, &args, &e), &e);
    assert_ok(config_finish(&whole, &e), &e);
    assert_true(whole.model.mhc_streams == 4 && whole.model.mhc_gating == 0.02 &&
                whole.mhc.kernels == CFG_MHC_KERNELS_BOUNDARY);
    assert_string_equal(whole.plan.recompute, "core_attn mhc");
    assert_string_equal(whole.plan.recompute_block, "2");
    assert_int_equal(whole.plan.recompute_granularity, CFG_GRANULARITY_SELECTIVE);
    config_release(&whole);
    struct config c;
    tiny_config(&c, "model.mhc=on");
    assert_int_equal(c.model.mhc_streams, 4);
    config_release(&c);
    tiny_config(&c, "");
    assert_int_equal(c.model.mhc_streams, 0);
    config_release(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(impossible_options_are_refused),
        cmocka_unit_test(other_kernels_than_the_devices_are_refused),
        cmocka_unit_test(unknown_recompute_names_are_answered_with_the_valid_ones),
        cmocka_unit_test(help_says_what_streams_cost),
        cmocka_unit_test(both_upstream_spellings_are_understood),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
