/* The recurrent cores as declared (Mamba-2, gated delta net): keys, shapes, initial values, decay, and what the plan
 * keeps. The maths of whole models (gradients, schedules, decoding) is tested in model/ and train/ on the patterns of
 * tiny.h, and in train/test_gdn.c. */
#include "support.h"

#include "layers/layer.h"

struct declared {
    struct mesh mesh;
    struct config c;
    struct dev dev;
    struct graph g;
    struct memory mem;
    struct param_table params;
    struct table_list tables;
    struct metric_list metrics;
    struct update_list updates;
    struct core_io io;
    struct err e;
};

static void declare(struct declared *d, const char *symbol, enum build_mode mode, int64_t seq,
                    const char *const *settings)
{
    memset(d, 0, sizeof *d);
    assert_ok(config_init(&d->c, &d->e), &d->e);
    assert_ok(config_set(&d->c, "model.pattern", symbol, NULL, &d->e), &d->e);
    for (int i = 0; settings[i] != NULL; i += 2)
        assert_ok(config_set(&d->c, settings[i], settings[i + 1], NULL, &d->e), &d->e);
    assert_ok(config_finish(&d->c, &d->e), &d->e);
    assert_ok(dev_open(&d->dev, DEV_CPU, 1, &d->e), &d->e);
    graph_init(&d->g, ops_for(&d->dev));
    param_table_init(&d->params);
    int64_t hidden = d->c.model.hidden;
    d->mesh = mesh_alone();
    struct build b = {.cfg = &d->c,
                      .dev = &d->dev,
                      .ops = ops_for(&d->dev),
                      .mesh = &d->mesh,
                      .mode = mode,
                      .g = &d->g,
                      .mem = &d->mem,
                      .params = &d->params,
                      .tables = &d->tables,
                      .metrics = &d->metrics,
                      .updates = &d->updates,
                      .batch = 2,
                      .seq = seq,
                      .rows = 2 * seq,
                      .cache_len = seq,
                      .n_layers = 4,
                      .prefix = "decoder.layers.0.",
                      .e = &d->e};
    b.in = (struct batch_slots){.token = NO_SLOT,
                                .label = NO_SLOT,
                                .pos = NO_SLOT,
                                .doc_start = NO_SLOT,
                                .doc_local = NO_SLOT,
                                .info = NO_SLOT,
                                .start = NO_SLOT,
                                .scale = NO_SLOT,
                                .mb_share = NO_SLOT,
                                .loss = NO_SLOT};
    graph_scope(&d->g, 0, "test");
    d->io = (struct core_io){.h = build_real(&b, "h", b.rows, hidden),
                             .f = NO_SLOT,
                             .df = build_grad(&b, "df", b.rows, hidden),
                             .dh = build_grad(&b, "dh", b.rows, hidden)};
    assert_ok(core_find(symbol[0])->declare(&b, &d->io), &d->g.err);
}

static void release(struct declared *d)
{
    graph_release(&d->g);
    param_table_release(&d->params);
    free(d->tables.t);
    free(d->metrics.m);
    free(d->updates.u);
    dev_close(&d->dev);
    config_release(&d->c);
}

static const struct slot *slot_tagged(const struct declared *d, const char *tag)
{
    for (int i = 0; i < d->g.n_slots; i++)
        if (strcmp(d->g.slots[i].tag, tag) == 0)
            return &d->g.slots[i];
    return NULL;
}

struct wanted {
    const char *name; /* without the layer's prefix */
    int rank;
    int64_t dim[3];
    bool decay;
    enum init_kind init;
    double init_a, init_b;
};

static void assert_param(const struct declared *d, const struct wanted *w)
{
    char key[128];
    snprintf(key, sizeof key, "decoder.layers.0.%s", w->name);
    int k = param_find(&d->params, key);
    if (k < 0)
        fail_msg("no parameter %s", key);
    const struct param *p = &d->params.list[k].p;
    assert_int_equal(p->rank, w->rank);
    for (int i = 0; i < w->rank; i++)
        assert_int_equal(p->dim[i], w->dim[i]);
    assert_int_equal(p->decay, w->decay);
    assert_int_equal(p->init, w->init);
    assert_int_equal(p->rows.n_sections, 0);
    assert_true(fabs(p->init_a - w->init_a) < 1e-12 && fabs(p->init_b - w->init_b) < 1e-12);
}

static const char *const megatron[] = {"model.hidden", "256", "model.heads", "4", NULL};

/* A known count: hidden 256 with Megatron's defaults has 933,400 parameters, 512 of them its norm's. */
static void keys_shapes_and_initial_values_of_mamba_are_megatrons(void **state)
{
    (void)state;
    static const struct wanted wanted[] = {
        {"mixer.in_proj.weight", 2, {2 * 512 + 2 * 8 * 128 + 8, 256}, true, INIT_NORMAL, 0.02, 0},
        {"mixer.conv1d.weight", 3, {512 + 2 * 8 * 128, 1, 4}, true, INIT_UNIFORM, -0.5, 0.5},
        {"mixer.conv1d.bias", 1, {512 + 2 * 8 * 128}, false, INIT_UNIFORM, -0.5, 0.5},
        {"mixer.dt_bias", 1, {8}, false, INIT_DT_BIAS, 0.001, 0.1},
        {"mixer.A_log", 1, {8}, false, INIT_LOG_UNIFORM, 1, 16},
        {"mixer.D", 1, {8}, false, INIT_ONE, 0, 0},
        {"mixer.norm.weight", 1, {512}, false, INIT_ONE, 0, 0},
        {"mixer.out_proj.weight", 2, {256, 512}, true, INIT_NORMAL, 0.02 / 2, 0},
    };
    struct declared d;
    declare(&d, "M", BUILD_TRAIN, 8, megatron);
    assert_string_equal(core_find('M')->norm_key, "mixer.in_proj.layer_norm_weight");
    for (int i = 0; i < countof(wanted); i++)
        assert_param(&d, &wanted[i]);
    assert_int_equal(d.params.n, countof(wanted));
    assert_int_equal(param_table_elems(&d.params), 933400 - 512);
    release(&d);
}

/* hidden 256: 4 value heads and 2 key heads of 128 channels. */
static void keys_shapes_and_initial_values_of_a_delta_net_are_megatrons(void **state)
{
    (void)state;
    static const struct wanted wanted[] = {
        {"self_attention.in_proj.weight", 2, {2 * 256 + 2 * 512 + 2 * 4, 256}, true, INIT_NORMAL, 0.02, 0},
        {"self_attention.conv1d.weight", 3, {2 * 256 + 512, 1, 4}, true, INIT_UNIFORM, -0.5, 0.5},
        {"self_attention.dt_bias", 1, {4}, false, INIT_ONE, 0, 0},
        {"self_attention.A_log", 1, {4}, false, INIT_LOG_UNIFORM, 1, 16},
        {"self_attention.out_norm.weight", 1, {128}, false, INIT_ONE, 0, 0},
        {"self_attention.out_proj.weight", 2, {256, 512}, true, INIT_NORMAL, 0.02 / 2, 0},
    };
    struct declared d;
    declare(&d, "G", BUILD_TRAIN, 8, megatron);
    assert_string_equal(core_find('G')->norm_key, "self_attention.in_proj.layer_norm_weight");
    for (int i = 0; i < countof(wanted); i++)
        assert_param(&d, &wanted[i]);
    assert_int_equal(d.params.n, countof(wanted));
    release(&d);
    declare(&d, "G", BUILD_TRAIN, 8,
            (const char *const[]){"model.hidden", "256", "model.heads", "4", "model.norm_zero_centered", "on", NULL});
    assert_param(&d, &(struct wanted){"self_attention.out_norm.weight", 1, {128}, false, INIT_ZERO, 0, 0});
    release(&d);
}

static void assert_elems(const struct declared *d, const char *tag, int64_t elems)
{
    assert_int_equal(tensor_elems(&slot_tagged(d, tag)->shape), elems);
}

static void decoding_keeps_a_tail_and_a_state_and_nothing_else(void **state)
{
    (void)state;
    struct declared d;
    declare(&d, "M", BUILD_DECODE, 1, megatron);
    assert_int_equal(d.tables.n, 2);
    assert_elems(&d, "mamba.conv_state", 2 * 3 * (512 + 2 * 8 * 128));
    assert_elems(&d, "mamba.ssm_state", 2 * 8 * 128 * 64);
    assert_null(slot_tagged(&d, "mamba.states"));
    release(&d);
    declare(&d, "G", BUILD_DECODE, 1, megatron);
    assert_int_equal(d.tables.n, 2);
    assert_elems(&d, "gdn.conv_state", 2 * 3 * (2 * 256 + 512));
    assert_elems(&d, "gdn.rule_state", 2 * 4 * 128 * 128);
    assert_null(slot_tagged(&d, "gdn.states"));
    release(&d);
    declare(&d, "M", BUILD_DECODE, 1, (const char *const[]){"model.mamba_conv", "1", NULL});
    assert_int_equal(d.tables.n, 1); /* one tap has no tail */
    release(&d);
    declare(&d, "G", BUILD_DECODE, 1, (const char *const[]){"model.gdn_conv", "1", NULL});
    assert_int_equal(d.tables.n, 1);
    release(&d);
}

/* 300 rows: 3 chunks of 128, 5 of 64. */
static void everything_between_the_projections_can_be_made_again(void **state)
{
    (void)state;
    static const struct {
        const char *symbol, *states, *rstd, *tags[4];
        int64_t chunks, groups;
    } cores[] = {{"M", "mamba.states", "mamba.rstd", {"mamba.zxbcdt", "mamba.xbc", "mamba.y", "mamba.n"}, 3, 8},
                 {"G", "gdn.states", "gdn.rstd", {"gdn.in", "gdn.qkv", "gdn.o", "gdn.n"}, 5, 4}};
    struct declared d;
    for (int i = 0; i < countof(cores); i++) {
        declare(&d, cores[i].symbol, BUILD_TRAIN, 300, megatron);
        const struct slot *states = slot_tagged(&d, cores[i].states), *rstd = slot_tagged(&d, cores[i].rstd);
        assert_true(states->replay >= 0 && rstd->replay >= 0);
        assert_int_equal(states->shape.dim[1], cores[i].chunks);
        assert_int_equal(rstd->shape.dim[1], cores[i].groups);
        for (int k = 0; k < countof(cores[i].tags); k++)
            assert_true(slot_tagged(&d, cores[i].tags[k])->replay >= 0);
        release(&d);
    }
    declare(&d, "M", BUILD_TRAIN, 8,
            (const char *const[]){"model.hidden", "256", "model.heads", "4", "model.mamba_norm", "whole", NULL});
    assert_int_equal(slot_tagged(&d, "mamba.rstd")->shape.dim[1], 1);
    release(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_shapes_and_initial_values_of_mamba_are_megatrons),
        cmocka_unit_test(keys_shapes_and_initial_values_of_a_delta_net_are_megatrons),
        cmocka_unit_test(decoding_keeps_a_tail_and_a_state_and_nothing_else),
        cmocka_unit_test(everything_between_the_projections_can_be_made_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
