/* gpu.precision=fp8 on host devices: it learns, schedules and devices agree, codes follow the weights through updates,
 * saving and loading, memory is won, and what cannot be is refused. */
#include "run.h"

/* Layers wide enough for several blocks. */
#define WIDE "model.hidden=144 model.heads=2 model.ffn=272 train.seq=32 "
#define FP8 "gpu.precision=fp8 "
/* Experts whose matrices have several blocks. */
#define EXPERTS                                                                                                        \
    "model.pattern=*E model.hidden=128 model.heads=2 model.experts=4 model.topk=2 model.expert_ffn=256 train.seq=32 "

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

static void experts_learn_as_without(void **state)
{
    (void)state;
    double plain = last_loss(EXPERTS, NULL), none = last_loss(EXPERTS FP8 "gpu.fp8_keep=*mlp.experts*", NULL);
    static const char *const with[] = {
        EXPERTS FP8,
        EXPERTS FP8 "run.device=ref",
        EXPERTS FP8 "gpu.fp8_recipe=tensor",
        EXPERTS FP8 "gpu.fp8_recipe=mxfp8 model.glu_interleave=32",
        EXPERTS FP8 "gpu.fp8_grad=e5m2 model.expert_bias=on",
        EXPERTS FP8 "gpu.fp8_keep=*linear_qkv* model.router_capacity=1",
    };
    assert_true(fabs(none - plain) < 5e-3 * plain);
    for (int i = 0; i < countof(with); i++) {
        double loss = last_loss(with[i], NULL);
        if (!(fabs(loss - plain) < 1e-2 * plain))
            fail_msg("'%s': loss %g, without FP8 %g", with[i], loss, plain);
        assert_true(loss != none); /* experts were in FP8 */
    }
    /* One of the two matrices named keeps both; sizes that are no multiples of 128 too. */
    assert_true(last_loss(EXPERTS FP8 "gpu.fp8_keep=*experts.linear_fc1*", NULL) == none);
    assert_true(last_loss(EXPERTS FP8 "model.expert_ffn=144", NULL) ==
                last_loss(EXPERTS FP8 "model.expert_ffn=144 gpu.fp8_keep=*mlp.experts*", NULL));
}

static void schedules_give_the_same_bits(void **state)
{
    (void)state;
    static const char *const models[] = {
        WIDE FP8,
        WIDE FP8 "model.bias=on",
        WIDE FP8 "lora.rank=4",
        WIDE FP8 "model.pattern=*-/*- model.mhc_streams=2",
        WIDE FP8 "gpu.fp8_recipe=tensor model.pattern=*E model.experts=4 model.topk=2 model.shared_ffn=32",
        EXPERTS FP8,
        EXPERTS FP8 "model.expert_bias=on model.shared_ffn=64 gpu.fp8_recipe=tensor"};
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
                                       FP8 "gpu.fp8_recipe=mxfp8", EXPERTS FP8, WIDE FP8 "optim.offload=all"};
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

/* How many nodes of a graph have a name that ends so. */
static int nodes_named(const struct graph *g, const char *end)
{
    int n = 0;
    for (int i = 0; i < g->n_nodes; i++) {
        size_t a = strlen(g->nodes[i].name), b = strlen(end);
        n += a >= b && strcmp(g->nodes[i].name + a - b, end) == 0;
    }
    return n;
}

static void expect_updated_codes(const char *options, bool by_update)
{
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t;
    playground_open(&pg);
    run_config(&c, &pg, options);
    assert_ok(trainer_plan(&t, &c, false, &e), &e);
    assert_int_equal(nodes_named(&t.optim.g, "quantise"), by_update ? 0 : 1);
    trainer_close(&t);
    config_release(&c);
    playground_close(&pg);
}

/* Squares of whole matrices; one scale for all needs the new values first, and parts of matrices do not hold whole
 * squares. That the codes are right is shown by codes_follow_the_weights. */
static void the_update_makes_codes_where_it_can(void **state)
{
    (void)state;
    expect_updated_codes(WIDE FP8, true);
    expect_updated_codes(EXPERTS FP8, true);
    expect_updated_codes(WIDE FP8 "gpu.fp8_recipe=tensor", false);
    expect_updated_codes(WIDE FP8 "gpu.fp8_recipe=mxfp8", false);
    expect_updated_codes(WIDE FP8 "optim.offload=all", false);
}

static void saved_inputs_are_codes(void **state)
{
    (void)state;
    int64_t codes, none, with = frame_bytes(WIDE FP8, &codes), without = frame_bytes(WIDE, &none);
    assert_int_equal(none, 0);
    assert_true(codes > 2 * (144 * 3 * 144 + 144 * 144 + 3 * 144 * 272)); /* both orientations, and scales */
    /* Per token: nothing is kept of the inputs of qkv and fc1, whose codes are made of the streams that are kept, and
     * nothing more for proj, whose input attention keeps; the input of fc2 takes a byte instead of four. */
    int64_t tokens = 2 * 32, won = tokens * (4 * (144 + 144) + 3 * 272);
    assert_true(with < without - won * 9 / 10);
    /* Experts keep what they keep otherwise, and their weights take both orientations of codes. */
    with = frame_bytes(EXPERTS FP8 "plan.recompute=moe.rows", &codes);
    without = frame_bytes(EXPERTS "plan.recompute=moe.rows plan.fused_experts=on", &none);
    assert_true(codes > 2 * (128 * 3 * 128 + 128 * 128 + 4 * 3 * 128 * 256));
    assert_true(with <= without);
}

/* Bytes that the nodes of one name exchange in the forward phases of a graph. */
static double exchanged(const struct graph *g, const char *end)
{
    double bytes = 0;
    for (int i = 0; i < g->n_nodes; i++) {
        size_t a = strlen(g->nodes[i].name), b = strlen(end);
        if (a >= b && strcmp(g->nodes[i].name + a - b, end) == 0)
            bytes += g->nodes[i].phase[PH_FWD].bytes;
    }
    return bytes;
}

struct gathers {
    double units, update;     /* bytes that travel in the training plan and in the update */
    int64_t params, quantise; /* bytes of kept values; nodes that make codes of them */
};
static struct gathers gathers_of(const char *options)
{
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t;
    struct rank_place place;
    playground_open(&pg);
    run_config(&c, &pg, options);
    assert_ok(place_on_paper(&place, &c, 0, &e), &e);
    assert_ok(trainer_plan_on(&t, &c, &place, true, &e), &e);
    struct gathers g = {.units = exchanged(&t.train.g, ".gather"),
                        .update = exchanged(&t.optim.g, "update.gather"),
                        .params = t.model.mem.planned[ARENA_PARAM],
                        .quantise = nodes_named(&t.train.g, "weight.quantise") + nodes_named(&t.optim.g, "quantise")};
    trainer_close(&t);
    place_close(&place);
    config_release(&c);
    playground_close(&pg);
    return g;
}

/* A byte a value instead of four, of every weight that has codes; and these keep the values of their own rows only. */
static void weights_are_gathered_as_codes(void **state)
{
    (void)state;
#define RANKS WIDE FP8 "model.pattern=*- train.global_batch=6 parallel.ranks=3 "
    const double coded = 144 * 3 * 144 + 144 * 144 + 3 * 144 * 272;
    struct gathers none = gathers_of(RANKS "parallel.zero=0"), one = gathers_of(RANKS "parallel.zero=1"),
                   three = gathers_of(RANKS "parallel.zero=3"),
                   values = gathers_of(RANKS "parallel.zero=3 gpu.fp8_recipe=mxfp8"),
                   late = gathers_of(RANKS "parallel.zero=1 gpu.fp8_recipe=mxfp8");
    assert_true(none.update == 0 && none.units == 0);
    assert_true(one.update == coded && late.update == 4 * coded);
    assert_true(three.update == 0 && values.units - three.units == 3 * coded);
    assert_true(one.quantise == 0 && three.quantise == 0 && late.quantise == 1 && values.quantise > 0);
    assert_true((double)(late.params - one.params) > 4 * coded * 2 / 3 - 8192);
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

static void expect_named(const char *options, const char *key, const char *text)
{
    struct playground pg;
    struct config c;
    struct err e = {0};
    struct trainer t;
    struct step_result r;
    playground_open(&pg);
    run_config(&c, &pg, options);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    int k = param_find(&t.model.params, key);
    assert_true(k >= 0);
    struct tensor w = model_param(&t.model, k);
    tensor_set(&w, 3, NAN);
    assert_ok(model_quantise(&t.model, &e), &e);
    assert_fails(trainer_step(&t, &r, &e), ST_NONFINITE, &e, text);
    trainer_close(&t);
    config_release(&c);
    playground_close(&pg);
}

static void a_bad_value_is_named(void **state)
{
    (void)state;
    expect_named(FP8, "decoder.layers.1.mlp.linear_fc1.weight", "written by node 1.mlp.fc1 (fwd)");
    expect_named(EXPERTS FP8, "decoder.layers.1.mlp.experts.linear_fc1.weight", "written by node 1.moe.fc1 (fwd)");
    expect_named(EXPERTS FP8, "decoder.layers.1.mlp.experts.linear_fc2.weight", "written by node 1.moe.fc2 (fwd)");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_learns_as_without_and_on_every_device),
        cmocka_unit_test(experts_learn_as_without),
        cmocka_unit_test(schedules_give_the_same_bits),
        cmocka_unit_test(codes_follow_the_weights),
        cmocka_unit_test(the_update_makes_codes_where_it_can),
        cmocka_unit_test(saved_inputs_are_codes),
        cmocka_unit_test(weights_are_gathered_as_codes),
        cmocka_unit_test(what_reaches_no_layer_is_refused),
        cmocka_unit_test(a_bad_value_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
