/* Groups of parameters and LoRA, on every kind of model: freezing some parameters changes no bit of the others'
 * gradients; an adapted model is the model with merged weights, forward and backward; moments, saving and resuming;
 * every mesh. */
#include "run.h"

/* ---- groups in a config ---------------------------------------------------------------------- */

static void groups_are_read_written_and_matched(void **state)
{
    (void)state;
    static const char text[] =
        "[model]\nhidden = 32\n[group.base]\nmatch = *\nfreeze = on\n"
        "[group.head]\n# a comment\nmatch = \"output_layer.*, \"\n    \"*final_norm*\"\nlr = 0.25\nweight_decay = 0\n";
    struct config c, again;
    struct err e = {0};
    struct buf out, second;
    buf_init(&out, 0);
    buf_init(&second, 0);
    assert_ok(config_init(&c, &e), &e);
    assert_ok(config_read_ini_text(&c, text, sizeof text - 1, "t.ini", &e), &e);
    assert_int_equal(c.n_groups, 2);
    assert_string_equal(c.group[1].name, "head");
    assert_int_equal(config_group_of(&c, "output_layer.weight"), 1);
    assert_int_equal(config_group_of(&c, "decoder.final_norm.weight"), 1);
    assert_int_equal(config_group_of(&c, "embedding.word_embeddings.weight"), 0);
    config_write(&c, &out, false);
    assert_ok(config_init(&again, &e), &e);
    assert_ok(config_read_ini_text(&again, out.text, out.len, "again", &e), &e);
    config_write(&again, &second, false);
    assert_string_equal(out.text, second.text);
    assert_ok(config_set(&again, "group.head.lr", "2", NULL, &e), &e);
    assert_true(again.group[1].lr == 2);
    buf_release(&out);
    buf_release(&second);
    config_release(&c);
    config_release(&again);
}

static void wrong_groups_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"[group.a]\nmatch = *\nmatch = x\n", "t.ini:3: group.a.match was already set in line 2"},
        {"[group.a]\nmach = *\n", "no option 'mach'"},
        {"[group.]\nmatch = *\n", "names no group"},
        {"[group.a b]\nmatch = *\n", "names no group"},
        {"[group.a.b]\nmatch = *\n", "names no group"},
        {"[group]\nmatch = *\n", "no section is called [group]"},
        {"[group.a]\nlr = -1\n", "group.a.lr = -1 is out of range"},
        {"[group.a]\nmatch = *\nfreeze = maybe\n", "group.a.freeze = maybe"},
        {"[group.a]\n", "group.a.match is empty"},
        {"[group.a]\nmatch = *\nfreeze = on\nlr = 2\n", "frozen, but its lr"},
    };
    for (int i = 0; i < countof(bad); i++) {
        struct config c;
        struct err e = {0};
        assert_ok(config_init(&c, &e), &e);
        int st = config_read_ini_text(&c, bad[i].text, strlen(bad[i].text), "t.ini", &e);
        if (st == ST_OK)
            st = config_finish(&c, &e);
        assert_fails(st, ST_USAGE, &e, bad[i].says);
        config_release(&c);
    }
}

/* ---- gradients ------------------------------------------------------------------------------- */

static bool matches_something(const struct tiny *t, const char *globs)
{
    for (int k = 0; k < t->m.params.n; k++)
        if (config_globs_match(globs, t->m.params.list[k].p.key))
            return true;
    return false;
}

static void compare_gradients(const struct tiny *all, const struct tiny *some, const char *what)
{
    for (int k = 0; k < some->m.params.n; k++) {
        const struct param_entry *row = &some->m.params.list[k];
        int full = param_find(&all->m.params, row->p.key);
        if (row->p.frozen)
            assert_int_equal(row->grad_offset, -1);
        if (!param_trained(&row->p))
            continue;
        struct tensor a = model_grad(&some->m, k), b = model_grad(&all->m, full);
        if (memcmp(a.data, b.data, (size_t)tensor_bytes(&a)) != 0)
            fail_msg("%s: the gradient of %s differs", what, row->p.key);
    }
}

static void frozen_parameters_change_no_other_gradient(void **state)
{
    (void)state;
    static const char *const freeze[] = {"*self_attention*,*mixer*",
                                         "embedding*,output_layer*",
                                         "*norm*,*bias*",
                                         "decoder.layers.0.*,decoder.layers.1.*,embed*",
                                         "*experts*,*router*,*hyper*,mtp*",
                                         "*.weight"};
    int n;
    const char *const *models = tiny_models(&n);
    for (int i = 0; i < n; i++) {
        struct tiny all;
        tiny_open(&all, models[i], DEV_CPU, 1);
        tiny_run(&all, 4);
        for (int k = 0; k < countof(freeze); k++) {
            struct tiny some;
            char options[1024];
            if (!matches_something(&all, freeze[k]))
                continue;
            snprintf(options, sizeof options, "%s group.a.match=%s group.a.freeze=on%s", models[i], freeze[k],
                     k % 2 ? " plan.recompute=full" : "");
            tiny_open(&some, options, DEV_CPU, 1);
            tiny_run(&some, 4);
            assert_true(some.m.mem.planned[ARENA_GRAD] < all.m.mem.planned[ARENA_GRAD]);
            compare_gradients(&all, &some, options);
            tiny_close(&some);
        }
        tiny_close(&all);
    }
}

/* Hyper-connections whose parameters are all frozen compute no gradient of them, not even into scratch. */
static void frozen_streams_have_no_gradients_of_parameters(void **state)
{
    (void)state;
    static const char *const models[] = {
        "model.pattern=*-*- model.mhc_streams=4",
        "model.pattern=*-*- model.mhc_streams=3 model.mtp_layers=1 model.mtp_pattern=*-"};
    for (int i = 0; i < countof(models); i++) {
        struct tiny t;
        char options[512];
        snprintf(options, sizeof options, "%s group.a.match=*hyper_connection*,*hc_head* group.a.freeze=on", models[i]);
        tiny_open(&t, options, DEV_CPU, 1);
        const struct graph *g = &t.train.g;
        for (int n = 0; n < g->n_nodes; n++)
            for (int ph = 0; ph < PH_COUNT; ph++)
                for (int u = 0; u < g->nodes[n].phase[ph].n_uses; u++) {
                    slot_id s = g->nodes[n].phase[ph].use[u].slot; /* NO_SLOT: what the model does not have */
                    assert_in_range(s + 1, 0, g->n_slots);
                    if (s != NO_SLOT && g->slots[s].unwanted)
                        fail_msg("%s: node %s makes %s", models[i], g->nodes[n].name, g->slots[s].name);
                }
        tiny_close(&t);
    }
}

/* Layers in front of the first trained one are not walked backward. */
static void layers_before_the_first_trained_one_save_nothing(void **state)
{
    (void)state;
    struct tiny t;
    tiny_open(
        &t,
        "model.pattern=*-*-*- group.a.match=* group.a.freeze=on group.b.match=decoder.layers.5.* group.b.freeze=off",
        DEV_CPU, 1);
    int backward = 0, early = 0;
    for (int i = 0; i < t.train.p.n_steps; i++) {
        const struct step *s = &t.train.p.steps[i];
        bool is_backward = s->ref.phase == PH_BWD || s->ref.phase == PH_DW;
        backward += is_backward;
        early += is_backward && t.train.g.nodes[s->ref.node].layer < 5;
    }
    assert_true(backward > 0);
    assert_int_equal(early, 0);
    tiny_close(&t);
}

/* ---- LoRA ------------------------------------------------------------------------------------ */

static double *values(const struct tiny *t, int k) { return model_param(&t->m, k).data; }
static double *gradient(const struct tiny *t, int k) { return model_grad(&t->m, k).data; }

/* Adapters begin with zeros in the second matrix, which would hide errors: all of them get numbers. */
static void fill_adapters(struct tiny *t)
{
    for (int k = 0; k < t->m.params.n; k++) {
        const struct param *p = &t->m.params.list[k].p;
        for (int64_t i = 0; p->lora.of > 0 && i < param_elems(p); i++)
            values(t, k)[i] = 0.3 * rng_normal(rng_key(3, p->key), (uint64_t)i);
    }
}

static void add_merged(const struct tiny *from, struct tiny *to, double scale)
{
    for (int k = 0; k < from->m.params.n; k++) {
        const struct param *p = &from->m.params.list[k].p;
        if (p->lora.of > 0)
            continue;
        int at = param_find(&to->m.params, p->key);
        memcpy(values(to, at), values(from, k), (size_t)param_elems(p) * sizeof(double));
    }
    for (int k = 1; k < from->m.params.n; k++) {
        const struct param *up = &from->m.params.list[k].p, *down = &from->m.params.list[k - 1].p;
        if (!up->lora.up)
            continue;
        assert_int_equal(up->lora.of, down->lora.of);
        double *w = values(to, param_find(&to->m.params, from->m.params.list[up->lora.of - 1].p.key));
        int64_t in = down->dim[1], rank = up->dim[1];
        for (int64_t r = 0; r < up->dim[0]; r++)
            for (int64_t c = 0; c < in; c++)
                for (int64_t q = 0; q < rank; q++)
                    w[(up->lora.first + r) * in + c] +=
                        scale * values(from, k)[r * rank + q] * values(from, k - 1)[q * in + c];
    }
}

/* dB = s dW A^T and dA = s B^T dW, with the gradient of the merged weight. */
static void compare_adapter(const struct tiny *lora, const struct tiny *merged, int k, double scale)
{
    const struct param *up = &lora->m.params.list[k].p, *down = &lora->m.params.list[k - 1].p;
    const double *dw = gradient(merged, param_find(&merged->m.params, lora->m.params.list[up->lora.of - 1].p.key));
    int64_t in = down->dim[1], rank = up->dim[1], rows = up->dim[0];
    dw += up->lora.first * in;
    for (int64_t q = 0; q < rank; q++) {
        for (int64_t r = 0; r < rows; r++) {
            double want = 0;
            for (int64_t c = 0; c < in; c++)
                want += scale * dw[r * in + c] * values(lora, k - 1)[q * in + c];
            if (fabs(gradient(lora, k)[r * rank + q] - want) > 1e-10)
                fail_msg("%s [%d, %d]: %g instead of %g", up->key, (int)r, (int)q, gradient(lora, k)[r * rank + q],
                         want);
        }
        for (int64_t c = 0; c < in; c++) {
            double want = 0;
            for (int64_t r = 0; r < rows; r++)
                want += scale * dw[r * in + c] * values(lora, k)[r * rank + q];
            if (fabs(gradient(lora, k - 1)[q * in + c] - want) > 1e-10)
                fail_msg("%s [%d, %d]: %g instead of %g", down->key, (int)q, (int)c, gradient(lora, k - 1)[q * in + c],
                         want);
        }
    }
}

static void an_adapted_model_is_the_model_with_merged_weights(void **state)
{
    (void)state;
    int n;
    const char *const *models = tiny_models(&n);
    for (int i = 0; i < n; i++) {
        struct tiny lora, merged;
        char options[1024];
        const double scale = 6.0 / 4;
        snprintf(options, sizeof options, "%s lora.rank=4 lora.alpha=6%s", models[i],
                 i % 2 ? " plan.recompute=full plan.delay_dw=on" : "");
        tiny_open(&lora, options, DEV_REF, 1);
        tiny_open(&merged, models[i], DEV_REF, 1);
        fill_adapters(&lora);
        add_merged(&lora, &merged, scale);
        tiny_run(&lora, 4);
        tiny_run(&merged, 4);
        if (fabs(tiny_loss(&lora) - tiny_loss(&merged)) > 1e-9 * fabs(tiny_loss(&merged)))
            fail_msg("%s: loss %.12g instead of %.12g", options, tiny_loss(&lora), tiny_loss(&merged));
        int adapters = 0;
        for (int k = 0; k < lora.m.params.n; k++) {
            const struct param *p = &lora.m.params.list[k].p;
            assert_true(p->buffer || p->frozen == (p->lora.of == 0));
            if (p->lora.up)
                compare_adapter(&lora, &merged, k, scale);
            adapters += p->lora.up;
        }
        assert_true(adapters > 2);
        tiny_close(&lora);
        tiny_close(&merged);
    }
}

static void targets_choose_adapters(void **state)
{
    (void)state;
    static const struct {
        const char *targets;
        int adapters; /* of two attention and two gated MLP layers */
    } cases[] = {
        {"all-linear", 14},    {"q_proj,v_proj", 4},          {"linear_qkv", 6}, {"linear_qkv.k", 2}, {"down_proj", 2},
        {"*layers.1.mlp*", 3}, {"linear_fc1.gate,o_proj", 4}, {"nothing", 0}};
    for (int i = 0; i < countof(cases); i++) {
        struct tiny t;
        char options[256];
        snprintf(options, sizeof options, "model.pattern=*-*- lora.rank=2 lora.targets=%s", cases[i].targets);
        tiny_open(&t, options, DEV_CPU, 1);
        int n = 0;
        for (int k = 0; k < t.m.params.n; k++)
            n += t.m.params.list[k].p.lora.up;
        assert_int_equal(n, cases[i].adapters);
        tiny_close(&t);
    }
}

/* ---- runs ------------------------------------------------------------------------------------ */

static void opening_names_globs_without_a_parameter(void **state)
{
    (void)state;
    static const struct {
        const char *options, *says;
    } bad[] = {
        {"group.a.match=*nothing*", "matches none of the model's"},
        {"group.a.match=* group.a.freeze=on", "nothing to train"},
        {"group.a.match=embed* group.b.match=*", "group.a has no parameters"},
        {"lora.rank=2 lora.targets=q_proj,other", "'other' names nothing"},
        {"lora.rank=2 lora.targets=embedding.word_embeddings", "no linear layer"},
        {"lora.rank=2 lora.targets=*mlp.experts.* model.pattern=*E model.experts=4", "weights of experts"},
    };
    struct playground p;
    playground_open(&p);
    for (int i = 0; i < countof(bad); i++) {
        struct config c;
        struct trainer t = {0};
        struct err e = {0};
        run_config(&c, &p, bad[i].options);
        int st = trainer_open(&t, &c, NULL, true, &e);
        assert_fails(st, st, &e, bad[i].says);
        assert_int_not_equal(st, ST_OK);
        trainer_close(&t);
        config_release(&c);
    }
    playground_close(&p);
}

/* A factor of the learning rate and a weight decay reach the update: rate 0 moves nothing, and decay alone shrinks. */
static void rate_and_decay_of_a_group_reach_the_update(void **state)
{
    (void)state;
    struct playground p;
    struct config c;
    struct trainer t = {0};
    struct snapshot before;
    struct err e = {0};
    playground_open(&p);
    run_config(
        &c, &p,
        "group.still.match=*linear_qkv.weight group.still.lr=0 group.fast.match=*linear_fc1.weight group.fast.lr=10 "
        "group.fast.weight_decay=0.5 train.warmup=0 train.schedule=constant");
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    snapshot_take(&before, &t);
    run_steps(&t, 1, NULL);
    for (int k = 0; k < t.model.params.n; k++) {
        const struct param_entry *row = &t.model.params.list[k];
        const float *was = (const float *)(const void *)(before.data[0] + row->offset),
                    *is = model_param(&t.model, k).data;
        double moved = 0;
        for (int64_t i = 0; i < param_elems(&row->p); i++)
            moved = fmax(moved, fabs((double)is[i] - (double)was[i]));
        bool still = strstr(row->p.key, "linear_qkv.weight") != NULL,
             fast = strstr(row->p.key, "linear_fc1.weight") != NULL;
        /* The first update of Adam is the learning rate, 3e-3, wherever there is a gradient. */
        assert_true(still ? moved == 0 : fast ? moved > 0.025 && moved < 0.035 : moved > 0.002 && moved < 0.004);
    }
    snapshot_free(&before);
    trainer_close(&t);
    config_release(&c);
    playground_close(&p);
}

static void a_run_with_adapters_resumes_to_the_same_bits(void **state)
{
    (void)state;
    static const char options[] =
        "model.pattern=*- lora.rank=2 group.n.match=*final_norm* group.n.freeze=off group.n.lr=0.5";
    struct playground p;
    struct config c;
    struct trainer t = {0};
    struct snapshot whole, resumed;
    struct ckpt *from = NULL;
    struct err e = {0};
    playground_open(&p);
    run_config(&c, &p, options);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    run_steps(&t, 3, NULL);
    assert_ok(trainer_save(&t, &e), &e);
    run_steps(&t, 3, NULL);
    snapshot_take(&whole, &t);
    trainer_close(&t);
    assert_ok(ckpt_open(&from, p.run, &e), &e);
    assert_ok(trainer_open(&t, &c, from, true, &e), &e);
    run_steps(&t, 3, NULL);
    snapshot_take(&resumed, &t);
    assert_true(snapshot_equal(&whole, &resumed));
    trainer_close(&t);
    ckpt_close(from);
    snapshot_free(&whole);
    snapshot_free(&resumed);
    config_release(&c);
    playground_close(&p);
}

static void other_groups_than_the_checkpoints_are_a_conflict(void **state)
{
    (void)state;
    struct config made, c;
    struct err e = {0};
    struct buf text, changes;
    buf_init(&text, 0);
    buf_init(&changes, 0);
    tiny_config(&made, "group.a.match=embed* group.a.freeze=on group.b.match=*norm* group.b.lr=0.5");
    config_write(&made, &text, false);
    static const struct {
        const char *options, *says;
    } cases[] = {{"", NULL},
                 {"group.a.match=embed* group.a.freeze=on group.b.match=*norm* group.b.lr=0.25", NULL},
                 {"group.a.match=embed* group.b.match=*norm*", "group.a.freeze is auto"},
                 {"group.a.match=embed* group.a.freeze=on group.b.match=*bias*", "group.b.match is *bias*"},
                 {"group.a.match=embed* group.a.freeze=on", "group b of parameters is missing here"}};
    for (int i = 0; i < countof(cases); i++) {
        assert_ok(config_init(&c, &e), &e);
        assert_ok(tiny_set(&c, cases[i].options, &e), &e);
        int st = config_load_saved(&c, text.text, text.len, "ckpt", CFG_SAVED_ALL, &changes, &e);
        if (cases[i].says != NULL)
            assert_fails(st, ST_CONFLICT, &e, cases[i].says);
        else
            assert_ok(st, &e);
        if (i == 0)
            assert_true(c.n_groups == 2 && c.group[1].lr == 0.5 && c.group[0].freeze == CFG_FREEZE_ON);
        if (i == 1)
            assert_true(c.group[1].lr == 0.25 && strstr(changes.text, "group.b: lr 0.5") != NULL);
        config_release(&c);
    }
    buf_release(&text);
    buf_release(&changes);
    config_release(&made);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_are_read_written_and_matched),
        cmocka_unit_test(wrong_groups_are_refused),
        cmocka_unit_test(frozen_parameters_change_no_other_gradient),
        cmocka_unit_test(frozen_streams_have_no_gradients_of_parameters),
        cmocka_unit_test(layers_before_the_first_trained_one_save_nothing),
        cmocka_unit_test(an_adapted_model_is_the_model_with_merged_weights),
        cmocka_unit_test(targets_choose_adapters),
        cmocka_unit_test(opening_names_globs_without_a_parameter),
        cmocka_unit_test(rate_and_decay_of_a_group_reach_the_update),
        cmocka_unit_test(a_run_with_adapters_resumes_to_the_same_bits),
        cmocka_unit_test(other_groups_than_the_checkpoints_are_a_conflict),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
