/* joint_mhc in whole models: parameters and their initial values, streams that are expanded and contracted exactly
 * once, recompute by blocks, every schedule bit for bit, health numbers, options. Gradient checks of models with it
 * are in the general tests (tiny_models). */
#include "tiny.h"

static const char base[] = "model.pattern=*-*-*- model.mhc_streams=4 model.mhc_gating=0.5";

/* ---- parameters ------------------------------------------------------------------------------------------------- */

static const struct param *find_param(const struct tiny *t, const char *key, struct tensor *value)
{
    for (int i = 0; i < t->m.params.n; i++)
        if (strcmp(t->m.params.list[i].p.key, key) == 0) {
            *value = model_param(&t->m, i);
            return &t->m.params.list[i].p;
        }
    fail_msg("there is no parameter %s", key);
    return NULL;
}

static void parameters_have_megatron_keys_shapes_and_initial_values(void **state)
{
    (void)state;
    struct tiny t;
    struct tensor v;
    tiny_open(&t, "model.pattern=*- model.mhc_streams=4", DEV_REF, 1);
    static const char *const modules[] = {"decoder.layers.0.self_attention_hyper_connection.", "decoder.layers.1.mlp_hyper_connection."};
    for (int i = 0; i < 2; i++) {
        char key[160];
        snprintf(key, sizeof key, "%smapping_proj.weight", modules[i]);
        const struct param *w = find_param(&t, key, &v);
        assert_true(w->dim[0] == 24 && w->dim[1] == 64 && w->decay);
        double bound = sqrt(6.0 / (24 + 64)), largest = 0;
        for (int64_t k = 0; k < tensor_elems(&v); k++)
            largest = fmax(largest, fabs(tensor_get(&v, k)));
        assert_true(largest <= bound && largest > 0.95 * bound);
        static const char *const alphas[] = {"alpha_pre", "alpha_post", "alpha_res"};
        for (int a = 0; a < 3; a++) {
            snprintf(key, sizeof key, "%s%s", modules[i], alphas[a]);
            const struct param *p = find_param(&t, key, &v);
            assert_true(p->rank == 1 && p->dim[0] == 1 && !p->decay && (float)tensor_get(&v, 0) == 0.01f);
        }
        snprintf(key, sizeof key, "%sbias", modules[i]);
        const struct param *p = find_param(&t, key, &v);
        assert_true(p->dim[0] == 24 && !p->decay && tensor_get(&v, 0) == 0);
    }
    assert_true(find_param(&t, "decoder.hc_head_fn", &v)->dim[1] == 64);
    assert_true(find_param(&t, "decoder.hc_head_base", &v)->dim[0] == 4 && tensor_get(&v, 3) == 0);
    assert_true(find_param(&t, "decoder.hc_head_scale", &v)->dim[0] == 1 && tensor_get(&v, 0) == 1);
    tiny_close(&t);
    tiny_open(&t, "model.pattern=*- model.mhc_streams=2 model.mhc_profile=s", DEV_REF, 1);
    for (int i = 0; i < t.m.params.n; i++) /* the mean has no parameters */
        assert_null(strstr(t.m.params.list[i].p.key, "hc_head"));
    tiny_close(&t);
}

/* ---- structure ---------------------------------------------------------------------------------------------------- */

static int count_nodes(const struct tiny *t, const char *suffix)
{
    int n = 0;
    for (int i = 0; i < t->train.g.n_nodes; i++) {
        size_t have = strlen(t->train.g.nodes[i].name), want = strlen(suffix);
        n += have >= want && strcmp(t->train.g.nodes[i].name + have - want, suffix) == 0;
    }
    return n;
}

static void streams_are_expanded_and_contracted_exactly_once(void **state)
{
    (void)state;
    static const char *const profiles[] = {"d", "s"};
    for (int i = 0; i < 2; i++) {
        char options[128];
        struct tiny t;
        snprintf(options, sizeof options, "model.pattern=*-*-- model.mhc_streams=3 model.mhc_profile=%s", profiles[i]);
        tiny_open(&t, options, DEV_REF, 1);
        assert_int_equal(count_nodes(&t, "joint.expand"), 1);
        assert_int_equal(count_nodes(&t, "joint.contract"), 1);
        assert_int_equal(count_nodes(&t, "joint.close"), 1);
        assert_int_equal(count_nodes(&t, "joint.joint"), 5);
        tiny_close(&t);
    }
}

/* ---- recompute ------------------------------------------------------------------------------------------------------ */

struct outcome {
    double loss;
    int64_t bytes, frame;
    int replays;
    char *grads;
};

static struct outcome outcome_of(const char *more, enum dev_kind kind, int threads)
{
    char options[512];
    struct tiny t;
    snprintf(options, sizeof options, "%s %s", base, more);
    tiny_open(&t, options, kind, threads);
    tiny_run(&t, 4);
    struct outcome r = {.loss = tiny_loss(&t), .bytes = t.m.mem.allocated[ARENA_GRAD], .frame = t.train.p.frame_bytes, .replays = t.train.p.n_replays};
    assert_true(isfinite(r.loss));
    r.grads = malloc((size_t)r.bytes);
    assert_non_null(r.grads);
    memcpy(r.grads, t.m.mem.base[ARENA_GRAD], (size_t)r.bytes);
    tiny_close(&t);
    return r;
}

static void recompute_in_blocks_does_not_change_a_bit(void **state)
{
    (void)state;
    static const char *const common[] = {"", "model.dropout=0.2 model.mhc_profile=s"};
    static const char *const blocks[] = {"1", "2", "3", "5", "100", "auto"};
    static const char *const more[] = {"", "plan.poison=on plan.random_lanes=3", "plan.recompute=norm plan.delay_dw=on plan.poison=on"};
    for (int kind = 0; kind < 2; kind++)
        for (int k = 0; k < countof(common); k++) {
            struct outcome plain = outcome_of(common[k], kind ? DEV_CPU : DEV_REF, 1);
            for (int i = 0; i < countof(blocks); i++)
                for (int j = 0; j < countof(more); j++) {
                    char options[256];
                    snprintf(options, sizeof options, "%s plan.recompute_block=%s %s", common[k], blocks[i], more[j]);
                    struct outcome r = outcome_of(options, kind ? DEV_CPU : DEV_REF, 1);
                    if (r.loss != plain.loss || memcmp(r.grads, plain.grads, (size_t)plain.bytes) != 0)
                        fail_msg("'%s' changes the result", options);
                    if (i > 0)
                        assert_true(r.replays > 0 && r.frame < plain.frame);
                    free(r.grads);
                }
            free(plain.grads);
        }
}

static void streams_between_block_borders_are_dropped_and_no_others(void **state)
{
    (void)state;
    struct tiny t;
    char options[160];
    snprintf(options, sizeof options, "%s plan.recompute_block=2", base);
    tiny_open(&t, options, DEV_REF, 1);
    int seen = 0;
    for (int s = 0; s < t.train.g.n_slots; s++) {
        const struct slot *slot = &t.train.g.slots[s];
        if (strcmp(slot->tag, "joint.stream") != 0) {
            assert_false(slot->dropped);
            continue;
        }
        /* Six layers: joints 0, 2, 4 open blocks, joint 6 is the last combine. */
        assert_int_equal(slot->dropped, slot->layer % 2 == 1);
        seen++;
    }
    assert_int_equal(seen, 7);
    tiny_close(&t);
}

static void whole_stacks_can_be_recomputed_from_the_embedding(void **state)
{
    (void)state;
    struct outcome plain = outcome_of("", DEV_CPU, 2), all = outcome_of("plan.recompute=joint.*", DEV_CPU, 2);
    assert_true(plain.loss == all.loss);
    assert_memory_equal(plain.grads, all.grads, (size_t)plain.bytes);
    assert_true(all.frame < plain.frame);
    free(plain.grads);
    free(all.grads);
}

static void the_block_that_needs_least_memory_is_chosen(void **state)
{
    (void)state;
    static const int64_t want[][3] = {{4, 30, 5}, {4, 1, 1}, {2, 1, 1}};
    for (int i = 0; i < countof(want); i++) {
        int64_t n = want[i][0], layers = want[i][1], r = mhc_block_layers(n, layers), least = INT64_MAX;
        for (int64_t k = 1; k <= layers; k++)
            least = min_i64(least, n * ceil_div(layers, k) + (n + 2) * k);
        assert_int_equal(n * ceil_div(layers, r) + (n + 2) * r, least);
        assert_true(llabs(r - want[i][2]) <= 1);
    }
    /* Near the square root of n L / (n + 2). */
    assert_in_range(mhc_block_layers(4, 61), 5, 8);
    assert_in_range(mhc_block_layers(4, 122), 8, 11);
}

static void threads_do_not_change_a_bit(void **state)
{
    (void)state;
    struct outcome one = outcome_of("model.dropout=0.1", DEV_CPU, 1), three = outcome_of("model.dropout=0.1", DEV_CPU, 3);
    assert_true(one.loss == three.loss);
    free(one.grads);
    free(three.grads);
}

/* ---- values --------------------------------------------------------------------------------------------------------- */

static void evaluation_agrees_with_training_and_between_devices(void **state)
{
    (void)state;
    struct outcome ref = outcome_of("", DEV_REF, 1), cpu = outcome_of("", DEV_CPU, 2);
    assert_true(fabs(ref.loss - cpu.loss) < 1e-4 * fabs(ref.loss));
    struct outcome rounded = outcome_of("model.mhc_bf16_coef=on", DEV_REF, 1);
    assert_true(rounded.loss != ref.loss && fabs(rounded.loss - ref.loss) < 3e-2 * fabs(ref.loss));
    free(ref.grads);
    free(cpu.grads);
    free(rounded.grads);
}

static double metric(const struct tiny *t, const char *tag, int layer)
{
    for (int i = 0; i < t->m.metrics.n; i++) {
        const struct metric *m = &t->m.metrics.m[i];
        if (strcmp(m->tag, tag) == 0 && m->layer == layer)
            return *(const double *)(t->m.mem.base[ARENA_STATE] + m->offset);
    }
    fail_msg("there is no metric %s of layer %d", tag, layer);
    return 0;
}

static void health_numbers_are_sane_at_the_start(void **state)
{
    (void)state;
    struct tiny t;
    tiny_open(&t, "model.pattern=*-*- model.mhc_streams=4", DEV_CPU, 2);
    tiny_run(&t, 2);
    for (int layer = 0; layer < 4; layer++) {
        assert_true(metric(&t, "mhc row error", layer) < 1e-4);
        assert_true(metric(&t, "mhc column error", layer) < 1e-4);
        assert_true(fabs(metric(&t, "mhc gain forward", layer) - 1) < 1e-3);
        assert_true(fabs(metric(&t, "mhc gain backward", layer) - 1) < 1e-3);
    }
    assert_true(fabs(metric(&t, "mhc stream similarity", 0) - 1) < 1e-6); /* equal streams */
    tiny_close(&t);
}

/* ---- options ---------------------------------------------------------------------------------------------------------- */

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
        cmocka_unit_test(parameters_have_megatron_keys_shapes_and_initial_values),
        cmocka_unit_test(streams_are_expanded_and_contracted_exactly_once),
        cmocka_unit_test(recompute_in_blocks_does_not_change_a_bit),
        cmocka_unit_test(streams_between_block_borders_are_dropped_and_no_others),
        cmocka_unit_test(whole_stacks_can_be_recomputed_from_the_embedding),
        cmocka_unit_test(the_block_that_needs_least_memory_is_chosen),
        cmocka_unit_test(threads_do_not_change_a_bit),
        cmocka_unit_test(evaluation_agrees_with_training_and_between_devices),
        cmocka_unit_test(health_numbers_are_sane_at_the_start),
        cmocka_unit_test(impossible_options_are_refused),
        cmocka_unit_test(both_upstream_spellings_are_understood),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
