/* model/: patterns, what each schedule must leave unchanged, gradient
 * accumulation, initial values. */
#include "tiny.h"

/* ---- results to compare ---------------------------------------------------------------------- */

struct result {
    double loss;
    int64_t bytes;
    char *grads, *params;
    struct plan_size {
        int64_t frame, work;
        int replays, fetches;
    } size;
};

static void *copy_of(const void *bytes, int64_t n)
{
    void *p = malloc((size_t)n);
    assert_non_null(p);
    memcpy(p, bytes, (size_t)n);
    return p;
}

static void result_of(struct result *r, const char *base, const char *more, enum dev_kind kind, int threads,
                      int64_t samples)
{
    char options[512];
    snprintf(options, sizeof options, "%s %s", base, more);
    struct tiny t;
    tiny_open(&t, options, kind, threads);
    for (int a = 0; a < ARENA_COUNT; a++)
        assert_int_equal(t.m.mem.planned[a], t.m.mem.allocated[a]);
    tiny_run(&t, samples);
    *r = (struct result){
        .loss = tiny_loss(&t),
        .bytes = t.m.mem.allocated[ARENA_GRAD],
        .size = {t.train.p.frame_bytes, t.train.p.work_bytes, t.train.p.n_replays, t.train.p.n_fetches}};
    r->grads = copy_of(t.m.mem.base[ARENA_GRAD], r->bytes);
    r->params = copy_of(t.m.mem.base[ARENA_PARAM], r->bytes);
    tiny_close(&t);
}

static void result_free(struct result *r)
{
    free(r->grads);
    free(r->params);
}

static void assert_same_bits(const struct result *a, const struct result *b, const char *what)
{
    assert_int_equal(a->bytes, b->bytes);
    if (memcmp(&a->loss, &b->loss, sizeof a->loss) != 0)
        fail_msg("%s: loss %.17g is not %.17g", what, b->loss, a->loss);
    if (memcmp(a->grads, b->grads, (size_t)a->bytes) != 0)
        fail_msg("%s: gradients differ", what);
}

/* The largest difference between two gradient arenas, relative to the largest value. */
static double difference(const struct result *a, const struct result *b, enum dtype dtype)
{
    struct tensor x = tensor_1d(a->grads, dtype, a->bytes / (int64_t)dtype_bytes(dtype)), y = x;
    y.data = b->grads;
    double worst = 0, top = 0;
    for (int64_t i = 0, n = tensor_elems(&x); i < n; i++) {
        worst = fmax(worst, fabs(tensor_get(&x, i) - tensor_get(&y, i)));
        top = fmax(top, fabs(tensor_get(&x, i)));
    }
    assert_true(top > 0);
    return worst / top;
}

static const char *everything(void)
{
    int n;
    return tiny_models(&n)[1];
}

/* ---- schedules ------------------------------------------------------------------------------- */

static void schedules_do_not_change_a_bit(enum dev_kind kind)
{
    int n_models;
    const char *const *models = tiny_models(&n_models);
    static const char *const variants[] = {
        "plan.poison=on",
        "plan.random_lanes=1 plan.poison=on",
        "plan.random_lanes=2 plan.poison=on",
        "plan.random_lanes=3",
        "plan.find_nan=on",
        "plan.delay_dw=on",
        "plan.delay_dw=on plan.random_lanes=4 plan.poison=on",
        "plan.recompute=norm",
        "plan.recompute=attn.qkv",
        "plan.recompute=attn.o",
        "plan.recompute=attn.lse",
        "plan.recompute=mlp.act",
        "plan.recompute=mlp.pre",
        "plan.recompute=mlp.*",
        "plan.recompute=attn.*",
        "plan.recompute=mlp",
        "plan.recompute=norm,mlp.act",
        "plan.recompute=norm,attn.qkv,mlp.pre plan.delay_dw=on plan.poison=on",
        "plan.recompute=full",
        "plan.recompute=full plan.poison=on plan.random_lanes=5 plan.delay_dw=on",
        "plan.recompute=mla.q",
        "plan.recompute=mla.kv_down",
        "plan.recompute=mla.latent",
        "plan.recompute=mla.k",
        "plan.recompute=mla.*",
        "plan.recompute=dsa.q",
        "plan.recompute=dsa.index_q",
        "plan.recompute=dsa.index_k plan.poison=on",
        "plan.recompute=dsa.*",
        "plan.recompute=csa.q",
        "plan.recompute=csa.keys,csa.entry plan.poison=on",
        "plan.recompute=csa.index_q",
        "plan.recompute=csa.*",
        "plan.recompute=joint.stream",
        "plan.recompute=joint.* plan.poison=on plan.random_lanes=6",
        "plan.recompute_block=2",
        "plan.recompute_block=3 plan.recompute=full plan.poison=on",
        "plan.recompute_block=auto plan.recompute=mlp plan.delay_dw=on plan.poison=on",
        "plan.offload=* plan.offload_min=0 plan.poison=on",
        "plan.offload=* plan.offload_min=0 plan.delay_dw=on plan.poison=on plan.random_lanes=7",
        "plan.offload=joint.* plan.offload_min=0 plan.poison=on plan.random_lanes=8",
        "plan.offload=*:2 plan.offload_min=0 plan.recompute=norm,mlp.act plan.poison=on plan.random_lanes=9",
        "plan.offload=* plan.offload_min=0 plan.recompute=full plan.poison=on plan.random_lanes=10",
        "plan.offload=joint.stream plan.offload_min=0 plan.recompute_block=2 plan.poison=on plan.random_lanes=11",
    };
    for (int k = 0; k < n_models; k++) {
        struct result plain;
        result_of(&plain, models[k], "", kind, 1, 4);
        assert_true(isfinite(plain.loss));
        for (int i = 0; i < countof(variants); i++) {
            struct result r;
            /* A model has attention of one kind, and names of the others mean nothing to it; only
             * hyper-connections can recompute streams. */
            const char *own = strchr(models[k], '+') != NULL      ? "mla."
                              : strchr(models[k], 'D') != NULL    ? "dsa."
                              : strpbrk(models[k], "CHW") != NULL ? "csa."
                                                                  : "attn.";
            static const char *const kinds[] = {"attn.", "mla.", "dsa.", "csa."};
            bool wide = strstr(models[k], "mhc_streams") != NULL, other = false;
            for (int x = 0; x < countof(kinds); x++)
                other |= strstr(variants[i], kinds[x]) != NULL && strcmp(kinds[x], own) != 0;
            bool streams = strstr(variants[i], "stream") != NULL || strstr(variants[i], "block") != NULL ||
                           strstr(variants[i], "joint.*") != NULL;
            if (other || (streams && !wide))
                continue;
            result_of(&r, models[k], variants[i], kind, 1, 4);
            assert_same_bits(&plain, &r, variants[i]);
            bool again = strstr(variants[i], "recompute") != NULL, away = strstr(variants[i], "offload") != NULL;
            assert_int_equal(r.size.replays > 0, again);
            assert_int_equal(r.size.fetches > 0, away);
            assert_true(again || away ? r.size.frame < plain.size.frame : r.size.frame == plain.size.frame);
            result_free(&r);
        }
        result_free(&plain);
    }
}

static void schedules_do_not_change_a_bit_on_ref(void **state)
{
    (void)state;
    schedules_do_not_change_a_bit(DEV_REF);
}

static void schedules_do_not_change_a_bit_on_cpu(void **state)
{
    (void)state;
    schedules_do_not_change_a_bit(DEV_CPU);
}

/* Nodes on random lanes, lanes in random order: the waits, not the list, must keep every order. */
static void spread_over_lanes(const struct result *plain, const char *model, const char *policy, uint64_t seed)
{
    char options[512];
    struct tiny t;
    snprintf(options, sizeof options, "%s %s", model, policy);
    tiny_open(&t, options, DEV_REF, 1);
    int replays = t.train.p.n_replays;
    for (int n = 0; n < t.train.g.n_nodes; n++)
        t.train.g.nodes[n].lane = (enum lane_id)rng_below(seed, (uint64_t)n, LANE_COUNT);
    struct order order = {0};
    assert_ok(schedule_plain(&t.train.g, t.c.plan.delay_dw, &order, &t.e), &t.e);
    plan_release(&t.train.p);
    assert_ok(plan_build(&t.train.p, "spread", &t.train.g, &order, &t.e), &t.e);
    order_release(&order);
    assert_true(t.train.p.n_waits > 20 && t.train.p.n_replays == replays);
    /* Lanes that may overtake each other share less memory, so the workspace grows. */
    struct memory m = {0}, both = t.m.mem;
    memory_reserve_max(&m, ARENA_WORK, t.train.p.work_bytes);
    assert_ok(memory_commit(&m, &t.dev, &t.e), &t.e);
    both.base[ARENA_WORK] = m.base[ARENA_WORK];
    both.allocated[ARENA_WORK] = m.allocated[ARENA_WORK];
    assert_ok(plan_bind(&t.train.p, &both, &t.e), &t.e);
    assert_ok(exec_prepare(&t.x, &t.train.p, &t.e), &t.e);
    t.x.poison = true;
    for (uint64_t k = 1; k <= 5; k++) {
        t.x.random_lanes = 100 * seed + k;
        tiny_run(&t, 2);
        double loss = tiny_loss(&t);
        assert_memory_equal(&loss, &plain->loss, sizeof loss);
        assert_memory_equal(t.m.mem.base[ARENA_GRAD], plain->grads, (size_t)plain->bytes);
    }
    memory_release(&m);
    tiny_close(&t);
}

static void lanes_do_not_change_a_bit(void **state)
{
    (void)state;
    static const char *const policies[] = {"", "plan.recompute=full", "plan.recompute=norm,mlp.act plan.delay_dw=on"};
    int n_models;
    const char *const *models = tiny_models(&n_models);
    for (int i = 0; i < n_models * countof(policies); i++) {
        const char *model = models[i / countof(policies)], *policy = policies[i % countof(policies)];
        struct result plain;
        result_of(&plain, model, policy, DEV_REF, 1, 2);
        for (uint64_t seed = 1; seed <= 3; seed++)
            spread_over_lanes(&plain, model, policy, seed);
        result_free(&plain);
    }
}

static void recompute_frees_what_it_names(void **state)
{
    (void)state;
    struct tiny t;
    struct result none, act;
    result_of(&none, "model.pattern=-", "", DEV_REF, 1, 2);
    result_of(&act, "model.pattern=-", "plan.recompute=mlp.act", DEV_REF, 1, 2);
    tiny_open(&t, "model.pattern=-", DEV_REF, 1);
    int64_t act_bytes = t.c.train.micro_batch * t.c.train.seq * t.c.model.ffn * 8;
    assert_int_equal(none.size.frame - act.size.frame, round_up(act_bytes, DEV_ALIGN));
    assert_int_equal(act.size.replays, 1);
    tiny_close(&t);
    result_free(&none);
    result_free(&act);
}

/* Grouped layers have other keys, and so other initial values: those of the flat model are copied. */
static void brackets_group_and_change_nothing(void **state)
{
    (void)state;
    for (enum dev_kind kind = DEV_REF; kind <= DEV_CPU; kind++) {
        struct tiny flat, grouped;
        tiny_open(&flat, "model.dropout=0.3 model.pattern=*-*", kind, 1);
        tiny_open(&grouped, "model.dropout=0.3 model.pattern=[*-]*", kind, 1);
        size_t n = (size_t)flat.m.mem.allocated[ARENA_PARAM];
        assert_int_equal(grouped.m.mem.allocated[ARENA_PARAM], n);
        assert_string_equal(grouped.m.params.list[flat.m.params.n - 1].p.key, "decoder.final_layernorm.weight");
        assert_true(param_find(&grouped.m.params, "decoder.layers.0.mlp.linear_fc1.weight") >= 0);
        memcpy(grouped.m.mem.base[ARENA_PARAM], flat.m.mem.base[ARENA_PARAM], n);
        tiny_run(&flat, 2);
        tiny_run(&grouped, 2);
        double a = tiny_loss(&flat), b = tiny_loss(&grouped);
        assert_memory_equal(&a, &b, sizeof a);
        assert_memory_equal(flat.m.mem.base[ARENA_GRAD], grouped.m.mem.base[ARENA_GRAD], n);
        tiny_close(&flat);
        tiny_close(&grouped);
    }
}

/* ---- accumulation and threads ---------------------------------------------------------------- */

static void microbatches_add_up_to_the_batch(void **state)
{
    (void)state;
    static const struct {
        enum dev_kind kind;
        enum dtype dtype;
        double bound;
    } cases[] = {{DEV_REF, DT_F64, 1e-12}, {DEV_CPU, DT_F32, 1e-5}};
    for (int k = 0; k < countof(cases); k++) {
        struct result whole, halves, quarters;
        result_of(&whole, everything(), "train.micro_batch=4", cases[k].kind, 1, 4);
        result_of(&halves, everything(), "train.micro_batch=2", cases[k].kind, 1, 4);
        result_of(&quarters, everything(), "train.micro_batch=1", cases[k].kind, 1, 4);
        assert_true(fabs(whole.loss - halves.loss) <= cases[k].bound * whole.loss);
        assert_true(fabs(whole.loss - quarters.loss) <= cases[k].bound * whole.loss);
        assert_true(difference(&whole, &halves, cases[k].dtype) <= cases[k].bound);
        assert_true(difference(&whole, &quarters, cases[k].dtype) <= cases[k].bound);
        result_free(&whole);
        result_free(&halves);
        result_free(&quarters);
    }
}

static void dropout_follows_the_sample_and_the_step(void **state)
{
    (void)state;
    struct tiny t;
    double loss[4];
    tiny_open(&t, "model.dropout=0.3", DEV_REF, 1);
    static const int64_t step[] = {3, 3, 4, 3}, sample[] = {4, 4, 4, 6};
    for (int i = 0; i < 4; i++) {
        struct tiny_batch b;
        tiny_batch_fill(&b, &t.c, 4, 2); /* the same tokens every time */
        struct run_info run = {.step = step[i],
                               .first_sample = sample[i],
                               .first_mb = true,
                               .scale = 1,
                               .tokens = b.tokens,
                               .labels = b.labels,
                               .pos = b.pos,
                               .doc_start = b.doc};
        assert_ok(exec_run(&t.x, &t.train.p, &run, &t.e), &t.e);
        loss[i] = tiny_loss(&t);
        tiny_batch_release(&b);
    }
    assert_true(loss[0] == loss[1]);
    assert_true(loss[0] != loss[2] && loss[0] != loss[3] && loss[2] != loss[3]);
    tiny_close(&t);
}

static void threads_change_rounding_only(void **state)
{
    (void)state;
    struct result one, two, ref;
    result_of(&one, everything(), "", DEV_CPU, 1, 4);
    result_of(&two, everything(), "", DEV_CPU, 2, 4);
    assert_true(difference(&one, &two, DT_F32) <= 1e-5);
    assert_true(fabs(one.loss - two.loss) <= 1e-6 * one.loss);
    /* and the fast device agrees with the judge */
    result_of(&ref, everything(), "", DEV_REF, 1, 4);
    assert_true(fabs(one.loss - ref.loss) <= 1e-5 * ref.loss);
    result_free(&one);
    result_free(&two);
    result_free(&ref);
}

static void initial_values_depend_on_seed_and_key_alone(void **state)
{
    (void)state;
    struct result r[3], other;
    for (int i = 0; i < 3; i++)
        result_of(&r[i], everything(), "", DEV_CPU, i + 1, 2);
    result_of(&other, everything(), "run.seed=99", DEV_CPU, 1, 2);
    assert_memory_equal(r[0].params, r[1].params, (size_t)r[0].bytes);
    assert_memory_equal(r[0].params, r[2].params, (size_t)r[0].bytes);
    assert_true(memcmp(r[0].params, other.params, (size_t)other.bytes) != 0);
    /* a deeper model, and another device, start its shared keys at the same numbers */
    struct tiny small, large;
    tiny_open(&small, "model.pattern=*- model.init_scale=none", DEV_CPU, 1);
    tiny_open(&large, "model.pattern=*-*- model.init_scale=none", DEV_REF, 1);
    for (int k = 0; k < small.m.params.n; k++) {
        int at = param_find(&large.m.params, small.m.params.list[k].p.key);
        assert_true(at >= 0);
        struct tensor a = model_param(&small.m, k), b = model_param(&large.m, at);
        assert_true(tensor_same_shape(&a, &b));
        for (int64_t i = 0; i < tensor_elems(&a); i++)
            assert_true(tensor_get(&a, i) == tensor_get(&b, i));
    }
    tiny_close(&small);
    tiny_close(&large);
    for (int i = 0; i < 3; i++)
        result_free(&r[i]);
    result_free(&other);
}

static void output_projections_start_smaller_in_deep_stacks(void **state)
{
    (void)state;
    static const struct {
        const char *scale;
        double divisor;
    } cases[] = {{"none", 1}, {"hybrid", 2}, {"gpt", 2.8284271247461903}, {"auto", 2}};
    for (int k = 0; k < countof(cases); k++) {
        char options[128];
        struct tiny t;
        snprintf(options, sizeof options, "model.pattern=*-*- model.init_std=0.5 model.init_scale=%s", cases[k].scale);
        tiny_open(&t, options, DEV_REF, 1);
        const struct param_table *p = &t.m.params;
        double in = p->list[param_find(p, "decoder.layers.1.mlp.linear_fc1.weight")].p.init_a;
        double out = p->list[param_find(p, "decoder.layers.1.mlp.linear_fc2.weight")].p.init_a;
        assert_true(in == 0.5 && fabs(out * cases[k].divisor - 0.5) < 1e-15);
        tiny_close(&t);
    }
}

/* ---- errors ---------------------------------------------------------------------------------- */

static void patterns_are_refused_where_they_are_wrong(void **state)
{
    (void)state;
    static const struct {
        const char *text, *message, *mark;
    } cases[] = {
        {"*-x", "not a valid layer symbol", "*-x\n          ^"},
        {"*-]", "was not opened at position 3", "*-]\n          ^"},
        {"*[-[*]]", "a group inside a group", "^"},
        {"*[]", "a group cannot be empty at position 3", "^"},
        {"-[*-", "'[' without a matching ']' at position 2", "-[*-\n         ^"},
        {"*-|[*|-]", "'[' without a matching ']' at position 4", "^"},
        {"[", "without a matching", "^"},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct pattern p;
        struct err e = {0};
        assert_fails(pattern_parse(&p, cases[i].text, &e), ST_USAGE, &e, cases[i].message);
        if (strstr(e.hint, cases[i].mark) == NULL)
            fail_msg("'%s': the hint is '%s'", cases[i].text, e.hint);
    }
    char *long_text = malloc(PATTERN_MAX + 2);
    assert_non_null(long_text);
    memset(long_text, '-', PATTERN_MAX + 1);
    long_text[PATTERN_MAX + 1] = '\0';
    struct pattern p;
    struct err e = {0};
    assert_fails(pattern_parse(&p, long_text, &e), ST_USAGE, &e, "at most 4096");
    long_text[PATTERN_MAX] = '\0';
    assert_ok(pattern_parse(&p, long_text, &e), &e);
    assert_int_equal(p.n_layers, PATTERN_MAX);
    free(long_text);
    assert_ok(pattern_parse(&p, "[*-]-*", &e), &e);
    assert_string_equal(p.symbols, "*--*");
}

/* Symbols that the pattern language knows before the core exists say so; nothing is planned or
 * allocated. */
static void symbols_without_a_core_say_so_before_anything_is_allocated(void **state)
{
    (void)state;
    for (const char *s = "MG+DE"; *s != '\0'; s++) {
        const struct core_kind *k = core_find(*s);
        assert_non_null(k);
        if (k->declare != NULL)
            continue;
        char options[64];
        struct config c;
        struct err e = {0};
        struct dev dev;
        struct model m;
        snprintf(options, sizeof options, "model.pattern=--%c-", *s);
        tiny_config(&c, options);
        assert_ok(dev_open(&dev, DEV_REF, 1, &e), &e);
        assert_fails(model_init(&m, &c, &dev, &e), ST_USAGE, &e, "no core yet");
        assert_non_null(strstr(e.msg, "position 3"));
        for (int a = 0; a < ARENA_COUNT; a++)
            assert_true(m.mem.planned[a] == 0 && m.mem.base[a] == NULL);
        model_release(&m);
        dev_close(&dev);
        config_release(&c);
    }
}

static void unknown_recompute_names_are_refused(void **state)
{
    (void)state;
    struct config c;
    struct dev dev;
    struct model m;
    struct model_plan mp;
    struct err e = {0};
    tiny_config(&c, "plan.recompute=mlp.act,atn.qkv");
    assert_ok(dev_open(&dev, DEV_REF, 1, &e), &e);
    assert_ok(model_init(&m, &c, &dev, &e), &e);
    struct model_plan_opts o = {.name = "train", .mode = BUILD_TRAIN, .batch = 2, .seq = 8};
    assert_fails(model_plan_build(&m, &mp, &o, &e), ST_USAGE, &e, "'atn.qkv'");
    static const char *const valid[] = {"attn.qkv", "attn.o", "mlp.pre", "mlp.act", "joint.norm", "full"};
    for (int i = 0; i < countof(valid); i++)
        assert_non_null(strstr(e.hint, valid[i]));
    model_plan_release(&mp);
    /* Evaluation saves nothing, so the policy does not concern it. */
    o = (struct model_plan_opts){.name = "eval", .mode = BUILD_EVAL, .batch = 2, .seq = 8};
    assert_ok(model_plan_build(&m, &mp, &o, &e), &e);
    assert_int_equal(mp.p.frame_bytes, 0);
    model_plan_release(&mp);
    model_release(&m);
    dev_close(&dev);
    config_release(&c);
}

static void tied_weights_are_one_parameter(void **state)
{
    (void)state;
    struct tiny tied, untied;
    tiny_open(&tied, "", DEV_REF, 1);
    tiny_open(&untied, "model.tied=off", DEV_REF, 1);
    assert_int_equal(param_find(&tied.m.params, "output_layer.weight"), -1);
    assert_true(param_find(&untied.m.params, "output_layer.weight") >= 0);
    assert_int_equal(untied.m.params.n, tied.m.params.n + 1);
    assert_int_equal(param_table_elems(&untied.m.params) - param_table_elems(&tied.m.params), 23 * 16);
    struct buf out;
    buf_init(&out, 0);
    model_print_stack(&tied.m, &out);
    model_print_params(&tied.m, &out);
    assert_non_null(strstr(out.text, "embedding (tied)"));
    assert_non_null(strstr(out.text, "decoder.layers.1.mlp.linear_fc2.weight"));
    buf_release(&out);
    tiny_close(&tied);
    tiny_close(&untied);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(schedules_do_not_change_a_bit_on_ref),
        cmocka_unit_test(schedules_do_not_change_a_bit_on_cpu),
        cmocka_unit_test(lanes_do_not_change_a_bit),
        cmocka_unit_test(recompute_frees_what_it_names),
        cmocka_unit_test(brackets_group_and_change_nothing),
        cmocka_unit_test(microbatches_add_up_to_the_batch),
        cmocka_unit_test(dropout_follows_the_sample_and_the_step),
        cmocka_unit_test(threads_change_rounding_only),
        cmocka_unit_test(initial_values_depend_on_seed_and_key_alone),
        cmocka_unit_test(output_projections_start_smaller_in_deep_stacks),
        cmocka_unit_test(patterns_are_refused_where_they_are_wrong),
        cmocka_unit_test(symbols_without_a_core_say_so_before_anything_is_allocated),
        cmocka_unit_test(unknown_recompute_names_are_refused),
        cmocka_unit_test(tied_weights_are_one_parameter),
    };
    return cmocka_run_group_tests_name("model", tests, NULL, NULL);
}
