/* The mixture-of-experts layer inside a model: metrics and updates by layer, layouts that must not
 * matter, one expert against a dense layer, options that clash. */
#include "tiny.h"
#include "ops/router/router.h"

/* Bytes of a parameter, by key. */
static struct tensor param(const struct tiny *t, const char *key)
{
    int k = param_find(&t->m.params, key);
    assert_true(k >= 0);
    return model_param(&t->m, k);
}

static const double *metric(const struct tiny *t, const char *tag, int layer)
{
    for (int k = 0; k < t->m.metrics.n; k++) {
        const struct metric *m = &t->m.metrics.m[k];
        if (strcmp(m->tag, tag) == 0 && m->layer == layer)
            return (const double *)(const void *)(t->m.mem.base[ARENA_STATE] + m->offset);
    }
    return NULL;
}

static void every_layer_reports_for_itself(void **state)
{
    (void)state;
    struct tiny t;
    tiny_open(&t, "model.pattern=E-E model.aux_loss=0.1 model.router_z_loss=0.01 model.router_capacity=0.5", DEV_CPU,
              1);
    tiny_run(&t, 4);
    for (int layer = 0; layer < 3; layer += 2) {
        double aux = *metric(&t, "router aux loss", layer) / 2, z = *metric(&t, "router z loss", layer) / 2;
        double sum = *metric(&t, "router loss", layer) / 2, load = *metric(&t, "expert load max", layer) / 2;
        assert_true(aux > 0.5 && aux < 8);
        assert_true(fabs(sum - (0.1 * aux + 0.01 * z)) < 1e-9);
        assert_true(load >= 1 && load <= 8);
        assert_true(*metric(&t, "expert dropped", layer) > 0);
    }
    assert_true(*metric(&t, "router aux loss", 0) != *metric(&t, "router aux loss", 2));
    assert_null(metric(&t, "router aux loss", 1));
    assert_null(metric(&t, "router seq aux loss", 0));
    tiny_close(&t);
}

/* As in Megatron layers of every kind count, and those of prediction depths do not. */
static void hash_layers_count_all_layers(void **state)
{
    (void)state;
    static const struct {
        const char *options;
        bool first, second;
    } cases[] = {{"model.pattern=*E-E/E model.router_hash_layers=1", false, false},
                 {"model.pattern=*E-E/E model.router_hash_layers=2", true, false},
                 {"model.pattern=*E-E/E model.router_hash_layers=3", true, false},
                 {"model.pattern=*E-E/E model.router_hash_layers=64", true, true}};
    for (int i = 0; i < countof(cases); i++) {
        struct tiny t;
        tiny_open(&t, cases[i].options, DEV_CPU, 1);
        assert_int_equal(param_find(&t.m.params, "decoder.layers.1.mlp.router.tid2eid") >= 0, cases[i].first);
        assert_int_equal(param_find(&t.m.params, "decoder.layers.3.mlp.router.tid2eid") >= 0, cases[i].second);
        assert_int_equal(param_find(&t.m.params, "mtp.layers.0.mtp_model_layer.layers.0.mlp.router.tid2eid"), -1);
        tiny_close(&t);
    }
}

static void each_biased_router_brings_one_update(void **state)
{
    (void)state;
    struct tiny t;
    tiny_open(&t,
              "model.pattern=EE*E model.router_score=sigmoid model.router_bias=on "
              "model.router_hash_layers=1",
              DEV_CPU, 1);
    assert_int_equal(t.m.updates.n, 2); /* the first layer routes by table and has no bias */
    assert_int_equal(param_find(&t.m.params, "decoder.layers.0.mlp.router.expert_bias"), -1);
    int k = param_find(&t.m.params, "decoder.layers.3.mlp.router.expert_bias");
    assert_true(k >= 0 && t.m.params.list[k].p.buffer);
    tiny_run(&t, 4);
    /* Run the update by hand: each bias moves by the rate, away from the busy experts. */
    const struct update_decl *u = &t.m.updates.u[1];
    struct tensor use[2];
    for (int i = 0; i < 2; i++) {
        use[i] = u->use[i].shape;
        use[i].data = t.m.mem.base[u->use[i].arena] + u->use[i].offset;
    }
    assert_ptr_equal(use[1].data, param(&t, "decoder.layers.3.mlp.router.expert_bias").data);
    double total = 0;
    for (int e = 0; e < 8; e++)
        total += tensor_get(&use[0], e);
    assert_true(total == 4 * 8 * 2); /* samples * tokens * topk: both microbatches count */
    struct lane lane = {.dev = &t.dev, .err = &t.e};
    struct step_ctx ctx = {.ops = t.m.ops, .lane = &lane, .self = u->self, .t = use};
    assert_ok(u->fn(&ctx), &t.e);
    for (int e = 0; e < 8; e++) {
        double tally = tensor_get(&use[0], e), want = tally < total / 8 ? 1e-3 : tally > total / 8 ? -1e-3 : 0;
        assert_true(fabs(tensor_get(&use[1], e) - want) < 1e-9);
    }
    tiny_close(&t);
}

/* Interleaved gate and up rows are only another order of the same matrix. */
static void interleaved_weights_mean_the_same_as_halves(void **state)
{
    (void)state;
    enum { F = 12, G = 3, D = 16 };
    struct tiny a, b;
    tiny_open(&a, "model.pattern=E model.expert_bias=on", DEV_REF, 1);
    tiny_open(&b, "model.pattern=E model.expert_bias=on model.glu_interleave=3", DEV_REF, 1);
    struct tensor from = param(&a, "decoder.layers.0.mlp.experts.linear_fc1.weight"),
                  to = param(&b, "decoder.layers.0.mlp.experts.linear_fc1.weight");
    for (int64_t e = 0; e < 8; e++)
        for (int64_t half = 0; half < 2; half++)
            for (int64_t j = 0; j < F; j++)
                memcpy((double *)to.data + (e * 2 * F + j / G * 2 * G + half * G + j % G) * D,
                       (double *)from.data + (e * 2 * F + half * F + j) * D, D * sizeof(double));
    tiny_run(&a, 2);
    tiny_run(&b, 2);
    assert_true(tiny_loss(&a) == tiny_loss(&b));
    tiny_close(&a);
    tiny_close(&b);
}

/* A dense MLP is a mixture of one expert that every token goes to. */
static void one_expert_is_a_dense_layer(void **state)
{
    (void)state;
    struct tiny moe, dense;
    tiny_open(&moe, "model.pattern=E model.experts=1 model.topk=1", DEV_REF, 1);
    tiny_open(&dense, "model.pattern=-", DEV_REF, 1);
    const char *keys[][2] = {
        {"decoder.layers.0.mlp.experts.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.weight"},
        {"decoder.layers.0.mlp.experts.linear_fc2.weight", "decoder.layers.0.mlp.linear_fc2.weight"}};
    for (int i = 0; i < countof(keys); i++) {
        struct tensor from = param(&dense, keys[i][1]), to = param(&moe, keys[i][0]);
        assert_int_equal(tensor_bytes(&from), tensor_bytes(&to));
        memcpy(to.data, from.data, (size_t)tensor_bytes(&from));
    }
    tiny_run(&moe, 2);
    tiny_run(&dense, 2);
    assert_true(fabs(tiny_loss(&moe) - tiny_loss(&dense)) < 1e-12 * tiny_loss(&dense));
    tiny_close(&moe);
    tiny_close(&dense);
}

/* What is drawn while training is drawn again, the same, when it is recomputed. */
static void recomputing_noise_changes_no_bit(void **state)
{
    (void)state;
    static const char *const models[] = {
        "model.pattern=EE model.router_jitter=0.2 model.aux_loss=0.1 model.router_capacity=0.6",
        "model.pattern=EE model.router_force_balance=on model.global_aux_loss=0.1"};
    for (int i = 0; i < countof(models); i++) {
        char options[256];
        struct tiny a, b;
        snprintf(options, sizeof options, "%s plan.recompute=full plan.poison=on plan.delay_dw=on plan.random_lanes=3",
                 models[i]);
        tiny_open(&a, models[i], DEV_CPU, 1);
        tiny_open(&b, options, DEV_CPU, 2);
        tiny_run(&a, 4);
        tiny_run(&b, 4);
        assert_true(b.train.p.n_replays > 4);
        assert_memory_equal(a.m.mem.base[ARENA_GRAD], b.m.mem.base[ARENA_GRAD], (size_t)a.m.mem.allocated[ARENA_GRAD]);
        assert_true(*metric(&a, "router loss", 1) == *metric(&b, "router loss", 1));
        tiny_close(&a);
        tiny_close(&b);
    }
}

/* Forced balance replaces the logits, and the gradient still reaches the router. */
static void forced_balance_spreads_tokens_and_keeps_gradients(void **state)
{
    (void)state;
    struct tiny t;
    tiny_open(&t,
              "model.pattern=E model.experts=4 model.router_force_balance=on train.seq=64 "
              "train.micro_batch=4",
              DEV_CPU, 2);
    tiny_run(&t, 4);
    assert_true(*metric(&t, "expert load max", 0) < 1.4 && *metric(&t, "expert load entropy", 0) > 0.98);
    struct tensor g = model_grad(&t.m, param_find(&t.m.params, "decoder.layers.0.mlp.router.weight"));
    double sum = 0;
    for (int64_t i = 0; i < tensor_elems(&g); i++)
        sum += fabs(tensor_get(&g, i));
    assert_true(sum > 1e-4);
    tiny_close(&t);
}

/* Products and activations in one op, with everything that moves their steps about: on a host, not a bit changes. */
static void fused_experts_give_the_same_bits(void **state)
{
    (void)state;
    static const char *const models[] = {
        "model.pattern=E*E model.expert_bias=on",
        "model.pattern=EE model.act=relu2",
        "model.pattern=EE model.act=quick_geglu model.act_clamp=0.4 model.act_offset=1 model.router_capacity=0.6",
        "model.pattern=E model.glu_interleave=3 model.shared_ffn=8",
    };
    static const char *const ways[] = {"", "plan.recompute=moe.act,moe.rows plan.poison=on",
                                       "plan.recompute=full plan.delay_dw=on plan.poison=on plan.random_lanes=3"};
    for (int i = 0; i < countof(models); i++) {
        struct tiny apart;
        char options[400];
        snprintf(options, sizeof options, "%s plan.fused_experts=off", models[i]);
        tiny_open(&apart, options, DEV_CPU, 1);
        tiny_run(&apart, 4);
        for (int k = 0; k < countof(ways); k++) {
            struct tiny fused;
            snprintf(options, sizeof options, "%s plan.fused_experts=on %s", models[i], ways[k]);
            tiny_open(&fused, options, DEV_CPU, 1);
            tiny_run(&fused, 4);
            assert_true(tiny_loss(&fused) == tiny_loss(&apart));
            assert_memory_equal(fused.m.mem.base[ARENA_GRAD], apart.m.mem.base[ARENA_GRAD],
                                (size_t)apart.m.mem.allocated[ARENA_GRAD]);
            tiny_close(&fused);
        }
        tiny_close(&apart);
    }
}

/* Bytes of activations with this tag prefix that the backward pass reads as the forward pass left them. */
static int64_t kept_bytes(const struct graph *g, const char *prefix)
{
    int64_t sum = 0;
    for (int s = 0; s < g->n_slots; s++) {
        bool made = false, read = false;
        for (int n = 0; n < g->n_nodes; n++)
            for (int ph = 0; ph < PH_COUNT; ph++)
                for (int u = 0; u < g->nodes[n].phase[ph].n_uses; u++) {
                    const struct use *use = &g->nodes[n].phase[ph].use[u];
                    made |= use->slot == s && ph == PH_FWD && use->mode != USE_READ;
                    read |= use->slot == s && ph != PH_FWD && use->mode == USE_READ;
                }
        if (made && read && !g->slots[s].dropped && g->slots[s].arena < 0 && str_starts(g->slots[s].tag, prefix))
            sum += tensor_bytes(&g->slots[s].shape);
    }
    return sum;
}

/* Fused, with the sorted rows recomputed, a layer keeps its input (T d, the norm's) and the inputs of the activation (2
 * T k f), beside maps, scores and probabilities: 2 T d + 4 T k f bytes in bf16. In steps it keeps T k (d + f) values
 * more; T k f, the activations, if the rows are recomputed; and none if both are. */
static void what_a_layer_keeps_for_its_backward_pass(void **state)
{
    (void)state;
    enum { D = 64, F = 32, K = 2, E = 8 };
    static const char model[] = "model.pattern=E model.hidden=64 model.expert_ffn=32 model.topk=2 train.seq=64";
    struct tiny fused, apart;
    char options[256];
    snprintf(options, sizeof options, "%s plan.fused_experts=on plan.recompute=moe.rows", model);
    tiny_open(&fused, options, DEV_CPU, 1);
    snprintf(options, sizeof options, "%s plan.fused_experts=off", model);
    tiny_open(&apart, options, DEV_CPU, 1);
    int64_t tokens = fused.c.train.micro_batch * fused.c.train.seq, size = sizeof(float);
    int64_t maps = tokens * K * 6 * size + (E + 1) * size, scores = tokens * E * size;
    int64_t kept = kept_bytes(&fused.train.g, "moe."), most = tokens * K * 2 * F * size;
    assert_in_range(kept, most, most + maps + scores);
    assert_in_range(kept_bytes(&apart.train.g, "moe."), most + tokens * K * (D + F) * size,
                    most + tokens * K * (D + F) * size + maps + scores);
    tiny_close(&apart);
    for (int act = 0; act < 2; act++) {
        snprintf(options, sizeof options, "%s plan.fused_experts=off plan.recompute=moe.rows%s", model,
                 act ? ",moe.act" : "");
        tiny_open(&apart, options, DEV_CPU, 1);
        assert_int_equal(kept_bytes(&apart.train.g, "moe."), kept + (act ? 0 : tokens * K * F * size));
        tiny_close(&apart);
    }
    tiny_close(&fused);
}

/* Delayed or not, each weight gradient is made once, after the backward step that it needs, and a parameter's gradient
 * is complete after as many steps as declare a share in it. */
static void each_weight_gradient_is_made_once(void **state)
{
    (void)state;
    struct tiny t;
    tiny_open(&t, "model.pattern=E*E model.expert_bias=on plan.fused_experts=on", DEV_CPU, 1);
    const struct graph *g = &t.train.g;
    for (int delay = 0; delay < 2; delay++) {
        struct order order = {0};
        assert_ok(schedule_plain(g, delay, &order, &t.e), &t.e);
        int dw_steps = 0;
        for (int n = 0; n < g->n_nodes; n++) {
            int made = 0, at = -1, after = -1;
            for (int i = 0; i < order.n; i++) {
                made += order.list[i].node == n && order.list[i].phase == PH_DW;
                at = order.list[i].node == n && order.list[i].phase == PH_DW ? i : at;
                after = order.list[i].node == n && order.list[i].phase == PH_BWD ? i : after;
            }
            assert_int_equal(made, g->nodes[n].phase[PH_DW].fn != NULL);
            assert_true(made == 0 || g->nodes[n].phase[PH_BWD].fn == NULL || at > after);
            dw_steps += made;
        }
        assert_true(dw_steps > 6);
        for (int s = 0; s < g->n_slots; s++) {
            int declared = 0, done = 0;
            if (g->slots[s].arena != ARENA_GRAD)
                continue;
            for (int n = 0; n < g->n_nodes; n++)
                for (int ph = 0; ph < PH_COUNT; ph++)
                    for (int u = 0; u < g->nodes[n].phase[ph].n_uses; u++)
                        declared +=
                            g->nodes[n].phase[ph].use[u].slot == s && g->nodes[n].phase[ph].use[u].mode != USE_READ;
            for (int i = 0; i < order.n; i++) {
                const struct phase *ph = &g->nodes[order.list[i].node].phase[order.list[i].phase];
                for (int u = 0; u < ph->n_uses; u++)
                    done += ph->use[u].slot == s && ph->use[u].mode != USE_READ;
            }
            assert_true(declared > 0 && done == declared);
        }
        order_release(&order);
    }
    tiny_close(&t);
}

static void options_that_clash_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *options, *rule;
    } bad[] = {
        {"model.topk=9", "topk-within-experts"},
        {"model.topk=1", "one-expert-needs-pre-softmax"},
        {"model.router_score=sigmoid model.router_pre_softmax=on", "pre-softmax-needs-softmax"},
        {"model.router_bias=on", "router-bias-needs-sigmoid"},
        {"model.router_groups=3 model.router_group_topk=1", "router-groups-fit"},
        {"model.router_group_topk=1", "router-groups-fit"},
        {"model.router_groups=8 model.router_group_topk=1", "router-groups-fit"},
        {"model.glu_interleave=5", "interleave-fits"},
        {"model.shared_gate=on", "shared-gate-needs-shared"},
    };
    for (int i = 0; i < countof(bad); i++) {
        struct config c;
        struct err e = {0};
        assert_ok(config_init(&c, &e), &e);
        assert_ok(tiny_set(&c, "model.pattern=E model.hidden=16 model.heads=2 model.vocab=9", &e), &e);
        assert_ok(tiny_set(&c, bad[i].options, &e), &e);
        assert_fails(config_finish(&c, &e), ST_USAGE, &e, bad[i].rule);
        config_release(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_layer_reports_for_itself),
        cmocka_unit_test(each_biased_router_brings_one_update),
        cmocka_unit_test(hash_layers_count_all_layers),
        cmocka_unit_test(interleaved_weights_mean_the_same_as_halves),
        cmocka_unit_test(one_expert_is_a_dense_layer),
        cmocka_unit_test(recomputing_noise_changes_no_bit),
        cmocka_unit_test(forced_balance_spreads_tokens_and_keeps_gradients),
        cmocka_unit_test(fused_experts_give_the_same_bits),
        cmocka_unit_test(what_a_layer_keeps_for_its_backward_pass),
        cmocka_unit_test(each_weight_gradient_is_made_once),
        cmocka_unit_test(options_that_clash_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
