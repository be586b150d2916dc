/* model/policy.c: what the text of recompute options means to a model. */
#include "tiny.h"

static int read_policy(struct policy *p, const char *options, struct err *e)
{
    struct config c;
    tiny_config(&c, options);
    int st = policy_read(p, &c, 8, e);
    config_release(&c);
    return st;
}

static void words_are_read_with_their_layers(void **state)
{
    (void)state;
    struct policy p;
    struct err e = {0};
    assert_ok(read_policy(&p, "plan.recompute=norm:12,,mlp.*", &e), &e);
    assert_int_equal(p.n_words, 2);
    assert_string_equal(p.words[0].name, "norm");
    assert_int_equal(p.words[0].layers, 12);
    assert_string_equal(p.words[1].name, "mlp.*");
    assert_int_equal(p.words[1].layers, INT64_MAX);
    policy_release(&p);
    assert_ok(read_policy(&p, "", &e), &e);
    assert_int_equal(p.n_words, 0);
    assert_true(p.streams.stay && p.streams.every == 0);
    policy_release(&p);
}

static void malformed_words_are_refused(void **state)
{
    (void)state;
    static const char *const wrong[] = {"y1:", "y1:0", "y1:-2", "y1:two", "y1:2x", "y1:1:2"};
    struct policy p;
    struct err e = {0};
    for (int i = 0; i < countof(wrong); i++) {
        char options[64];
        snprintf(options, sizeof options, "plan.recompute=%s", wrong[i]);
        assert_fails(read_policy(&p, options, &e), ST_USAGE, &e, "number of layers");
        policy_release(&p);
    }
    char word[100] = "plan.recompute=";
    memset(word + strlen(word), 'y', sizeof word - strlen(word) - 1);
    assert_fails(read_policy(&p, word, &e), ST_USAGE, &e, "too long");
    policy_release(&p);
    static const char *const nothing[] = {"plan.recompute=,", "plan.recompute=,,", "plan.offload=,"};
    for (int i = 0; i < countof(nothing); i++) {
        assert_fails(read_policy(&p, nothing[i], &e), ST_USAGE, &e, "names nothing");
        policy_release(&p);
    }
}

static void granularity_adds_words(void **state)
{
    (void)state;
    struct policy p;
    struct err e = {0};
    assert_ok(read_policy(&p, "plan.recompute_granularity=full plan.recompute=norm", &e), &e);
    assert_int_equal(p.n_words, 2);
    assert_string_equal(p.words[0].name, "full");
    policy_release(&p);
    assert_ok(read_policy(&p, "plan.recompute_granularity=selective", &e), &e);
    assert_int_equal(p.n_words, 1);
    assert_string_equal(p.words[0].name, "core_attn");
    policy_release(&p);
}

static void blocks_of_streams_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *options;
        struct stream_policy streams;
    } rows[] = {
        {"", {.stay = true}},
        {"plan.recompute=norm", {.stay = true}},
        {"plan.recompute=joint.*", {.stay = false}},
        {"plan.recompute=mhc", {.every = INT64_MAX}},
        {"plan.recompute=mhc:2", {.stay = true}},
        {"plan.recompute_block=3", {.every = 3, .by_unit = true}},
        {"plan.recompute_block=3 plan.recompute=mhc", {.every = 3, .by_unit = true}},
        {"plan.recompute_block=auto", {.every = -1}},
    };
    for (int i = 0; i < countof(rows); i++) {
        struct policy p;
        struct err e = {0};
        char options[128];
        snprintf(options, sizeof options, "model.mhc_streams=4 %s", rows[i].options);
        assert_ok(read_policy(&p, options, &e), &e);
        int64_t every = rows[i].streams.every == -1 ? mhc_block_layers(4, 8) : rows[i].streams.every;
        assert_int_equal(p.streams.every, every);
        assert_int_equal(p.streams.by_unit, rows[i].streams.by_unit);
        assert_int_equal(p.streams.stay, rows[i].streams.stay);
        policy_release(&p);
    }
}

/* Builds a training plan; the error, if there is one, is left in e. */
static int plan_of(const char *options, int *dropped, struct err *e)
{
    struct config c;
    struct dev dev;
    struct model m;
    struct model_plan plan = {0};
    tiny_config(&c, options);
    assert_ok(dev_open(&dev, DEV_CPU, 1, e), e);
    struct model_plan_opts o = {.name = "train", .mode = BUILD_TRAIN, .batch = c.train.micro_batch, .seq = c.train.seq};
    int st = model_init(&m, &c, &dev, e);
    if (st == ST_OK)
        st = model_plan_build(&m, &plan, &o, e);
    *dropped = 0;
    for (int s = 0; st == ST_OK && s < plan.g.n_slots; s++)
        *dropped += plan.g.slots[s].dropped;
    model_plan_release(&plan);
    model_release(&m);
    dev_close(&dev);
    config_release(&c);
    return st;
}

static void groups_of_kinds_drop_their_slots(void **state)
{
    (void)state;
    struct err e = {0};
    int n, all;
    assert_ok(plan_of("model.pattern=*-*-", &n, &e), &e);
    assert_int_equal(n, 0);
    assert_ok(plan_of("model.pattern=*-*- plan.recompute=core_attn", &all, &e), &e);
    assert_ok(plan_of("model.pattern=*-*- plan.recompute=core_attn:1", &n, &e), &e);
    assert_true(n > 0 && all == 2 * n);
    assert_ok(plan_of("model.pattern=*- plan.recompute=mlp", &n, &e), &e);
    assert_true(n > 0);
}

static void words_that_mean_nothing_get_the_valid_ones(void **state)
{
    (void)state;
    struct err e = {0};
    int n;
    assert_fails(plan_of("model.pattern=*- plan.recompute=norm,nonsense", &n, &e), ST_USAGE, &e, "core_attn");
    assert_non_null(strstr(e.msg, "'nonsense'"));
    assert_non_null(strstr(e.hint, "joint.norm, "));
    assert_non_null(strstr(e.hint, "mlp.act, "));
    assert_fails(plan_of("model.pattern=*- plan.recompute=moe_act", &n, &e), ST_USAGE, &e,
                 "core_attn"); /* of a kind that is not there */
    assert_non_null(strstr(e.msg, "'moe_act'"));
    assert_fails(plan_of("model.pattern=*- plan.recompute=mlp.act:1", &n, &e), ST_USAGE, &e, "of the first 1 layers");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(words_are_read_with_their_layers),
        cmocka_unit_test(malformed_words_are_refused),
        cmocka_unit_test(granularity_adds_words),
        cmocka_unit_test(blocks_of_streams_are_read),
        cmocka_unit_test(groups_of_kinds_drop_their_slots),
        cmocka_unit_test(words_that_mean_nothing_get_the_valid_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
