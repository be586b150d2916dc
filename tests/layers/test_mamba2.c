/* The Mamba-2 core as declared: keys, shapes, initial values, decay, and what the plan keeps. The
 * maths of the whole model (gradients, schedules, decoding) is tested in model/ and train/ on the
 * patterns of tiny.h. */
#include "support.h"

#include "layers/layer.h"

struct declared {
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

static void declare(struct declared *d, enum build_mode mode, int64_t seq,
                    const char *const *settings)
{
    memset(d, 0, sizeof *d);
    assert_ok(config_init(&d->c, &d->e), &d->e);
    assert_ok(config_set(&d->c, "model.pattern", "M", NULL, &d->e), &d->e);
    for (int i = 0; settings[i] != NULL; i += 2)
        assert_ok(config_set(&d->c, settings[i], settings[i + 1], NULL, &d->e), &d->e);
    assert_ok(config_finish(&d->c, &d->e), &d->e);
    assert_ok(dev_open(&d->dev, DEV_CPU, 1, &d->e), &d->e);
    graph_init(&d->g);
    param_table_init(&d->params);
    int64_t hidden = d->c.model.hidden;
    struct build b = {.cfg = &d->c,
                      .dev = &d->dev,
                      .ops = ops_for(&d->dev),
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
    assert_ok(core_find('M')->declare(&b, &d->io), &d->g.err);
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

static const struct param *param_named(const struct declared *d, const char *name)
{
    for (int i = 0; i < d->params.n; i++)
        if (strcmp(d->params.list[i].p.key, name) == 0)
            return &d->params.list[i].p;
    fail_msg("no parameter %s", name);
    return NULL;
}

static const struct slot *slot_tagged(const struct declared *d, const char *tag)
{
    for (int i = 0; i < d->g.n_slots; i++)
        if (strcmp(d->g.slots[i].tag, tag) == 0)
            return &d->g.slots[i];
    return NULL;
}

static void assert_param(const struct declared *d, const char *name, int rank, int64_t a, int64_t b,
                         int64_t c, bool decay, enum init_kind init, double init_a, double init_b)
{
    char key[128];
    snprintf(key, sizeof key, "decoder.layers.0.mixer.%s", name);
    const struct param *p = param_named(d, key);
    const int64_t want[] = {a, b, c};
    assert_int_equal(p->rank, rank);
    for (int i = 0; i < rank; i++)
        assert_int_equal(p->dim[i], want[i]);
    assert_int_equal(p->decay, decay);
    assert_int_equal(p->init, init);
    assert_true(fabs(p->init_a - init_a) < 1e-12 && fabs(p->init_b - init_b) < 1e-12);
    assert_int_equal(p->rows.n_sections, 0);
}

static const char *const megatron[] = {"model.hidden", "256", "model.heads", "4", NULL};

/* A known count: hidden 256 with Megatron's defaults has 933,400 parameters, 512 of them
 * its norm's. */
static void keys_shapes_and_initial_values_are_megatrons(void **state)
{
    (void)state;
    struct declared d;
    declare(&d, BUILD_TRAIN, 8, megatron);
    assert_string_equal(core_find('M')->norm_key, "mixer.in_proj.layer_norm_weight");
    assert_param(&d, "in_proj.weight", 2, 2 * 512 + 2 * 8 * 128 + 8, 256, 0, true, INIT_NORMAL,
                 0.02, 0);
    assert_param(&d, "conv1d.weight", 3, 512 + 2 * 8 * 128, 1, 4, true, INIT_UNIFORM, -0.5, 0.5);
    assert_param(&d, "conv1d.bias", 1, 512 + 2 * 8 * 128, 0, 0, false, INIT_UNIFORM, -0.5, 0.5);
    assert_param(&d, "dt_bias", 1, 8, 0, 0, false, INIT_DT_BIAS, 0.001, 0.1);
    assert_param(&d, "A_log", 1, 8, 0, 0, false, INIT_LOG_UNIFORM, 1, 16);
    assert_param(&d, "D", 1, 8, 0, 0, false, INIT_ONE, 0, 0);
    assert_param(&d, "norm.weight", 1, 512, 0, 0, false, INIT_ONE, 0, 0);
    assert_param(&d, "out_proj.weight", 2, 256, 512, 0, true, INIT_NORMAL, 0.02 / 2, 0);
    assert_int_equal(param_table_elems(&d.params), 933400 - 512);
    release(&d);
}

static void decoding_keeps_a_tail_and_a_state_and_nothing_else(void **state)
{
    (void)state;
    struct declared d;
    declare(&d, BUILD_DECODE, 1, megatron);
    assert_int_equal(d.tables.n, 2);
    assert_int_equal(tensor_elems(&slot_tagged(&d, "mamba.conv_state")->shape),
                     2 * 3 * (512 + 2 * 8 * 128));
    assert_int_equal(tensor_elems(&slot_tagged(&d, "mamba.ssm_state")->shape), 2 * 8 * 128 * 64);
    assert_null(slot_tagged(&d, "mamba.states"));
    release(&d);
    declare(&d, BUILD_DECODE, 1, (const char *const[]){"model.mamba_conv", "1", NULL});
    assert_int_equal(d.tables.n, 1); /* one tap has no tail */
    release(&d);
}

static void everything_between_the_projections_can_be_made_again(void **state)
{
    (void)state;
    static const char *const tags[] = {"mamba.zxbcdt", "mamba.xbc", "mamba.y",
                                       "mamba.states", "mamba.n",   "mamba.rstd"};
    struct declared d;
    declare(&d, BUILD_TRAIN, 300, megatron);
    for (int i = 0; i < countof(tags); i++)
        assert_true(slot_tagged(&d, tags[i])->replay >= 0);
    assert_int_equal(slot_tagged(&d, "mamba.states")->shape.dim[1],
                     3); /* 300 rows in chunks of 128 */
    assert_int_equal(slot_tagged(&d, "mamba.rstd")->shape.dim[1], 8);
    release(&d);
    declare(&d, BUILD_TRAIN, 8,
            (const char *const[]){"model.hidden", "256", "model.heads", "4", "model.mamba_norm",
                                  "whole", NULL});
    assert_int_equal(slot_tagged(&d, "mamba.rstd")->shape.dim[1], 1);
    release(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_shapes_and_initial_values_are_megatrons),
        cmocka_unit_test(decoding_keeps_a_tail_and_a_state_and_nothing_else),
        cmocka_unit_test(everything_between_the_projections_can_be_made_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
