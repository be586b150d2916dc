/* joint_mhc in whole models: parameters and their initial values, streams that are expanded and contracted exactly
 * once, recompute by blocks, every schedule bit for bit, health numbers. Gradient checks of models with it are in
 * the general tests (tiny_models), its options in test_mhc_options.c. */
#include "tiny.h"
#include "ops/mhc/mhc.h"

static const char base[] = "model.pattern=*-*-*- model.mhc_streams=4 model.mhc_gating=0.5";

/* ---- parameters ------------------------------------------------------------------------------ */

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
    static const char *const modules[] = {"decoder.layers.0.self_attention_hyper_connection.",
                                          "decoder.layers.1.mlp_hyper_connection."};
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

/* ---- structure ------------------------------------------------------------------------------- */

static int count_nodes(const struct tiny *t, const char *suffix)
{
    int n = 0;
    for (int i = 0; i < t->train.g.n_nodes; i++) {
        size_t have = strlen(t->train.g.nodes[i].name), want = strlen(suffix);
        n += have >= want && strcmp(t->train.g.nodes[i].name + have - want, suffix) == 0;
    }
    return n;
}

/* Joints that begin with a single stream: the first thing they read has its width. */
static int count_entered(const struct tiny *t)
{
    int n = 0;
    for (int i = 0; i < t->train.g.n_nodes; i++) {
        const struct node *node = &t->train.g.nodes[i];
        const char *dot = strstr(node->name, ".joint.joint");
        n += dot != NULL && dot[strlen(".joint.joint")] == '\0' &&
             t->train.g.slots[node->phase[PH_FWD].use[0].slot].shape.dim[1] == t->c.model.hidden;
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
        assert_int_equal(count_entered(&t), 1);
        assert_int_equal(count_nodes(&t, "joint.expand"), 0);
        assert_int_equal(count_nodes(&t, "joint.leave"), i == 0); /* learned gates; the mean is a node of its own */
        assert_int_equal(count_nodes(&t, "joint.contract"), i == 1);
        assert_int_equal(count_nodes(&t, "joint.close"), i == 1);
        assert_int_equal(count_nodes(&t, "joint.joint"), 5);
        tiny_close(&t);
    }
}

static int find_slot(const struct tiny *t, const char *name)
{
    for (int s = 0; s < t->train.g.n_slots; s++)
        if (strcmp(t->train.g.slots[s].name, name) == 0)
            return s;
    fail_msg("there is no slot %s", name);
    return -1;
}

/* A prediction depth takes the streams from before their contraction, adds its gradient to theirs, and hands its own
 * stack streams again: expanded once in the whole model, contracted once per head. */
static void prediction_depths_import_the_uncontracted_streams(void **state)
{
    (void)state;
    struct tiny t;
    struct tensor v;
    tiny_open(&t, "model.pattern=*-/*-/*- model.mhc_streams=3", DEV_REF, 1);
    assert_int_equal(count_entered(&t), 1);
    assert_int_equal(count_nodes(&t, "joint.expand"), 0);
    assert_int_equal(count_nodes(&t, "joint.leave"), 0);
    assert_int_equal(count_nodes(&t, "joint.contract"), 3);
    assert_int_equal(count_nodes(&t, "joint.close"), 3);
    static const char *const source[] = {"2.joint.stream", "5.joint.stream"}, *const gradient[] = {
                                                                                  "2.joint.dcontracted",
                                                                                  "5.joint.dcontracted"};
    for (int depth = 0; depth < 2; depth++) {
        char name[64];
        snprintf(name, sizeof name, "mtp%d.norms", depth);
        int n = 0;
        while (n < t.train.g.n_nodes && strcmp(t.train.g.nodes[n].name, name) != 0)
            n++;
        assert_true(n < t.train.g.n_nodes);
        const struct phase *fwd = &t.train.g.nodes[n].phase[PH_FWD], *bwd = &t.train.g.nodes[n].phase[PH_BWD];
        int stream = find_slot(&t, source[depth]), dstream = find_slot(&t, gradient[depth]);
        bool reads = false, adds = false;
        for (int u = 0; u < fwd->n_uses; u++)
            reads |= fwd->use[u].slot == stream && fwd->use[u].mode == USE_READ;
        for (int u = 0; u < bwd->n_uses; u++)
            adds |= bwd->use[u].slot == dstream && bwd->use[u].mode == USE_ADD;
        assert_true(reads && adds);
        snprintf(name, sizeof name, "mtp%d.stream", depth);
        assert_int_equal(t.train.g.slots[find_slot(&t, name)].shape.dim[1], 3 * t.c.model.hidden);
        static const char *const keys[] = {"e_proj.weight", "h_proj.weight", "hc_head_fn"};
        static const int64_t cols[] = {16, 16, 48};
        for (int k = 0; k < countof(keys); k++) {
            snprintf(name, sizeof name, "mtp.layers.%d.%s", depth, keys[k]);
            assert_int_equal(find_param(&t, name, &v)->dim[1], cols[k]);
        }
    }
    tiny_close(&t);
}

/* The streams a depth sees differ, so scaling one of them must show in its loss; a depth fed with the contracted
 * state would not notice which stream it was. */
static void prediction_depths_see_every_stream(void **state)
{
    (void)state;
    double loss[3];
    for (int k = 0; k < 3; k++) {
        struct tiny t;
        struct tensor v;
        tiny_open(&t, "model.pattern=*-/*- model.mhc_streams=2 model.mhc_gating=0.8", DEV_REF, 1);
        /* The last mapping of the main stack: how much of the MLP goes into stream 0 or 1. */
        find_param(&t, "decoder.layers.1.mlp_hyper_connection.bias", &v);
        if (k > 0)
            tensor_set(&v, 2 + (k - 1), 0.5);
        tiny_run(&t, 2);
        struct tensor l = model_slot(&t.m, &t.train, t.train.mtp_loss[0]);
        loss[k] = ((const double *)l.data)[0];
        tiny_close(&t);
    }
    assert_true(loss[1] != loss[0] && loss[2] != loss[0] && loss[1] != loss[2]);
}

/* Every parameter of a stack of all kinds of layers gets a gradient that is finite and not 0: except that equal streams
 * cannot be told apart by the first mixing matrix. */
static void every_parameter_gets_a_gradient(void **state)
{
    (void)state;
    int n;
    const char *const *models = tiny_models(&n);
    for (int i = 0; i < n; i++) {
        struct tiny t;
        if (strstr(models[i], "mhc_streams") == NULL)
            continue;
        tiny_open(&t, models[i], DEV_REF, 1);
        tiny_run(&t, 4);
        for (int k = 0; k < t.m.params.n; k++) {
            const struct param *p = &t.m.params.list[k].p;
            if (p->buffer)
                continue;
            struct tensor g = model_grad(&t.m, k);
            double top = 0;
            for (int64_t j = 0; j < tensor_elems(&g); j++) {
                assert_true(isfinite(tensor_get(&g, j)));
                top = fmax(top, fabs(tensor_get(&g, j)));
            }
            bool first_res = p->layer == 0 && str_ends(p->key, "alpha_res");
            if (!(top > (first_res ? -1 : 0)))
                fail_msg("%s: %s gets no gradient", models[i], p->key);
            if (first_res)
                assert_true(top < 1e-3);
        }
        tiny_close(&t);
    }
}

/* Layers of a kind in one group, which share a number in the keys, have a mapping each. */
static void layers_of_a_group_have_a_mapping_each(void **state)
{
    (void)state;
    struct tiny t;
    struct tensor v;
    tiny_open(
        &t,
        "model.pattern=[G*-E] model.mhc_streams=2 model.gdn_value_heads=2 model.gdn_key_dim=4 model.gdn_value_dim=4",
        DEV_REF, 1);
    static const char *const modules[] = {"self_attention", "self_attention_hyper_connection_2", "mlp",
                                          "mlp_hyper_connection_2"};
    for (int i = 0; i < countof(modules); i++) {
        char key[128];
        snprintf(key, sizeof key, "decoder.layers.0.%s%s.mapping_proj.weight", modules[i],
                 i % 2 ? "" : "_hyper_connection");
        assert_int_equal(find_param(&t, key, &v)->layer, i);
    }
    tiny_close(&t);
}

/* ---- recompute ------------------------------------------------------------------------------- */

struct outcome {
    double loss;
    int64_t bytes, frame, work;
    int replays, rebuilds; /* rebuilds: of them, those that make the streams of several layers */
    char *grads;
};

static int count_rebuilds(const struct plan *p)
{
    int n = 0;
    for (int i = 0; i < p->n_steps; i++)
        n += str_ends(p->g->nodes[p->steps[i].ref.node].name, "joint.rebuild");
    return n;
}

static struct outcome outcome_with(const char *options, enum dev_kind kind, int threads)
{
    struct tiny t;
    tiny_open(&t, options, kind, threads);
    tiny_run(&t, 4);
    struct outcome r = {.loss = tiny_loss(&t),
                        .bytes = t.m.mem.allocated[ARENA_GRAD],
                        .frame = t.train.p.frame_bytes,
                        .work = t.train.p.work_bytes,
                        .replays = t.train.p.n_replays,
                        .rebuilds = count_rebuilds(&t.train.p)};
    assert_true(isfinite(r.loss));
    r.grads = malloc((size_t)r.bytes);
    assert_non_null(r.grads);
    memcpy(r.grads, t.m.mem.base[ARENA_GRAD], (size_t)r.bytes);
    tiny_close(&t);
    return r;
}

static struct outcome outcome_of(const char *more, enum dev_kind kind, int threads)
{
    char options[512];
    snprintf(options, sizeof options, "%s %s", base, more);
    return outcome_with(options, kind, threads);
}

static void recompute_in_blocks_does_not_change_a_bit(void **state)
{
    (void)state;
    static const char *const common[] = {"", "model.dropout=0.2 model.mhc_profile=s"};
    static const char *const blocks[] = {"1", "2", "3", "5", "100", "auto"};
    static const char *const more[] = {"", "plan.poison=on plan.random_lanes=3",
                                       "plan.recompute=norm plan.delay_dw=on plan.poison=on"};
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

/* One replay for several layers against one for each: the same bits in no more memory, in fewer steps where `joins`. */
static void check_rebuild(const char *options, enum dev_kind kind, bool joins)
{
    char apart_options[512], plain_options[512];
    snprintf(apart_options, sizeof apart_options, "%s mhc.rebuild=off", options);
    snprintf(plain_options, sizeof plain_options, "%s", options);
    *strstr(plain_options, " plan.") = '\0'; /* what is recomputed, and how, comes last */
    struct outcome plain = outcome_with(plain_options, kind, 1), apart = outcome_with(apart_options, kind, 1),
                   joined = outcome_with(options, kind, 1);
    if (joined.loss != plain.loss || apart.loss != plain.loss ||
        memcmp(joined.grads, plain.grads, (size_t)plain.bytes) != 0 ||
        memcmp(apart.grads, plain.grads, (size_t)plain.bytes) != 0)
        fail_msg("'%s' changes the result", options);
    if (joined.frame != apart.frame || joined.work > apart.work)
        fail_msg("'%s': frame and workspace %lld + %lld, apart %lld + %lld", options, (long long)joined.frame,
                 (long long)joined.work, (long long)apart.frame, (long long)apart.work);
    assert_int_equal(plain.rebuilds + apart.rebuilds, 0);
    if (joins != (joined.rebuilds > 0) || joins != (joined.replays < apart.replays))
        fail_msg("'%s': %d of %d replays for several layers, apart %d replays", options, joined.rebuilds,
                 joined.replays, apart.replays);
    free(plain.grads);
    free(apart.grads);
    free(joined.grads);
}

static void streams_of_several_layers_are_made_again_at_once(void **state)
{
    (void)state;
    static const struct {
        const char *model, *policy;
        bool joins;
    } cases[] = {
        {"model.pattern=*-*-*-*-*- model.mhc_streams=4", "plan.recompute_block=4", true},
        {"model.pattern=*-*-*-*-*- model.mhc_streams=3 model.mhc_profile=s model.dropout=0.2",
         "plan.recompute_block=10", true},
        {"model.pattern=*-*-*-*-*- model.mhc_streams=2 model.dropout=0.1 model.hidden=24",
         "plan.recompute=mhc plan.delay_dw=on", true},
        {"model.pattern=*-*-*-*-*- model.mhc_streams=4", "plan.recompute=joint.*", true}, /* the ends, too */
        {"model.pattern=*-*-*-*-*- model.mhc_streams=4", "plan.recompute_block=1", false},
        /* one stream in each block */
        {"model.pattern=*-*-*-*-*- model.mhc_streams=4", "plan.recompute_block=2", false},
        /* Prediction depths have chains of their own. */
        {"model.pattern=*-*-/*-*-/*-*- model.mhc_streams=2 model.dropout=0.1",
         "plan.recompute=mhc plan.recompute_block=3", true},
        {"model.pattern=*-*-/*-*- model.mhc_streams=4 model.experts=4", "plan.recompute=joint.*", true},
        {"model.pattern=[*E][*-][*E] model.mhc_streams=2 model.experts=4", "plan.recompute=mhc,moe.act,core_attn",
         true},
        /* A core whose output is recomputed needs the stream before it: what follows begins a new replay, here each
         * layer or every other. */
        {"model.pattern=*-*-*- model.mhc_streams=4 model.dropout=0.1", "plan.recompute_block=6 plan.recompute=full",
         false},
        {"model.pattern=*-*-*- model.mhc_streams=4 model.dropout=0.1", "plan.recompute_block=6 plan.recompute=mlp",
         true},
    };
    static const char *const ways[] = {"", "plan.poison=on plan.random_lanes=7",
                                       "plan.poison=on plan.random_lanes=8 plan.delay_dw=on"};
    for (int i = 0; i < countof(cases); i++)
        for (int k = 0; k < countof(ways); k++) {
            char options[400];
            bool delayed = strstr(cases[i].policy, "delay_dw") != NULL;
            snprintf(options, sizeof options, "%s model.mhc_gating=0.5 %s %s", cases[i].model, cases[i].policy,
                     delayed && k == 2 ? ways[1] : ways[k]);
            check_rebuild(options, (i + k) % 2 ? DEV_CPU : DEV_REF, cases[i].joins);
        }
}

/* A group is what Megatron calls a layer: [*-] in blocks of 2 is *- in blocks of 4. MTP depths are one unit. */
static void blocks_count_groups_where_the_pattern_is_grouped(void **state)
{
    (void)state;
    static const struct {
        const char *pattern, *block;
        int dropped;
    } cases[] = {
        {"*-*-*-*-", "2", 4},         {"[*-][*-][*-][*-]", "2", 6}, {"*-*-*-*-", "4", 6},
        {"[*-][*-][*-][*-]", "1", 4}, {"[*-][*-][*-]-", "2", 5},    /* kept before groups 0 and 2 */ {"[*-]x4", "3", 6},
        {"[*-]x2/*-", "1", 3},        {"*-*-/*-", "1", 0},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct tiny t;
        char options[256];
        int dropped = 0;
        snprintf(options, sizeof options, "model.pattern=%s model.mhc_streams=2 plan.recompute_block=%s",
                 cases[i].pattern, cases[i].block);
        tiny_open(&t, options, DEV_REF, 1);
        for (int s = 0; s < t.train.g.n_slots; s++)
            dropped += t.train.g.slots[s].dropped;
        if (dropped != cases[i].dropped)
            fail_msg("%s in blocks of %s: %d streams are dropped instead of %d", cases[i].pattern, cases[i].block,
                     dropped, cases[i].dropped);
        tiny_close(&t);
    }
}

/* As many layers as a node has uses for; every stream is made by one of them, from the end of the one before. */
static void long_blocks_take_several_replays(void **state)
{
    (void)state;
    static const struct {
        const char *policy;
        int dropped, runs;
    } cases[] = {{"plan.recompute_block=100", 19, 3},
                 {"plan.recompute_block=8", 7 + 7 + 3, 3},
                 {"plan.recompute_block=9", 8 + 8 + 1, 2},
                 {"plan.recompute_block=5", 16, 4}};
    for (int i = 0; i < countof(cases); i++) {
        struct tiny t;
        struct buf b;
        char options[256];
        snprintf(options, sizeof options, "model.pattern=-------------------- model.mhc_streams=2 %s", cases[i].policy);
        tiny_open(&t, options, DEV_REF, 1);
        const struct graph *g = &t.train.g;
        int dropped = 0, made = 0;
        for (int s = 0; s < g->n_slots; s++)
            dropped += g->slots[s].dropped;
        for (int n = 0; n < g->n_nodes; n++) {
            const struct phase *p = &g->nodes[n].phase[PH_REPLAY];
            if (!str_ends(g->nodes[n].name, "joint.rebuild"))
                continue;
            assert_null(g->nodes[n].phase[PH_FWD].fn);
            for (int u = 0; u < p->n_uses; u++)
                if (p->use[u].mode == USE_WRITE) {
                    made++;
                    assert_true(g->slots[p->use[u].slot].dropped && g->slots[p->use[u].slot].replay == n);
                }
        }
        assert_int_equal(dropped, cases[i].dropped);
        assert_int_equal(count_rebuilds(&t.train.p), cases[i].runs);
        assert_true(made == dropped || (i == 2 && made == dropped - 3)); /* 8 = 7 + 1, and the one of the last block */
        assert_int_equal(t.train.p.n_replays, cases[i].runs + dropped - made);
        buf_init(&b, 0);
        plan_print_steps(&t.train.p, &b);
        assert_non_null(strstr(b.text, "joint.rebuild"));
        buf_release(&b);
        tiny_close(&t);
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

/* Bytes and number of saved slots with this tag, read from what `braid plan` prints. */
static void printed(const struct tiny *t, const char *tag, double *bytes, int *count)
{
    struct buf b;
    char line[64];
    buf_init(&b, 0);
    plan_print_memory(&t->train.p, &b);
    snprintf(line, sizeof line, "\n%s ", tag);
    const char *at = strstr(b.text, line);
    *bytes = 0;
    *count = 0;
    if (at != NULL) {
        char unit[16];
        assert_int_equal(sscanf(at + strlen(line), "%lf %15s %d", bytes, unit, count), 3);
        *bytes *= strcmp(unit, "GiB") == 0   ? 1 << 30
                  : strcmp(unit, "MiB") == 0 ? 1 << 20
                  : strcmp(unit, "KiB") == 0 ? 1 << 10
                                             : 1;
    }
    buf_release(&b);
}

/* mhc.md, 4.5. With recompute in blocks of r sublayers: n C a token for each block (and for the last combine, which is
 * kept), C for each output, the coefficients; the rest only while a block is worked on, (n + 2) C for each of its
 * sublayers. */
static void plans_show_the_memory_the_specification_predicts(void **state)
{
    (void)state;
    enum { LAYERS = 12, WIDTH = 128, ROWS = 4 * 64 };
    static const int64_t sizes[] = {0, 1, 2, 3, 4, 6, 12, -1};
    static const int64_t streams[] = {2, 4};
    for (int k = 0; k < countof(streams); k++) {
        int64_t n = streams[k], unit = ROWS * WIDTH * (int64_t)sizeof(float), plain_work = 0, plain_frame = 0;
        for (int i = 0; i < countof(sizes); i++) {
            char options[256], block[16];
            struct tiny t;
            int64_t r = sizes[i] == -1 ? mhc_block_layers(n, LAYERS) : sizes[i];
            snprintf(block, sizeof block, sizes[i] == 0 ? "off" : sizes[i] == -1 ? "auto" : "%d", (int)sizes[i]);
            snprintf(options, sizeof options,
                     "model.pattern=------------ model.hidden=%d model.ffn=64 model.mhc_streams=%d train.seq=64 "
                     "train.micro_batch=4 "
                     "plan.recompute_block=%s %s",
                     WIDTH, (int)n, block, r > 0 ? "plan.recompute=joint.norm" : "");
            tiny_open(&t, options, DEV_CPU, 1);
            double stream_bytes, norm_bytes, coef_bytes, out_bytes;
            int stream_count, norm_count, coef_count, out_count;
            printed(&t, "joint.stream", &stream_bytes, &stream_count);
            printed(&t, "joint.norm", &norm_bytes, &norm_count);
            printed(&t, "joint.coef", &coef_bytes, &coef_count);
            printed(&t, "mlp.out", &out_bytes, &out_count);
            int64_t kept = r > 0 ? ceil_div(LAYERS, r) + 1 : LAYERS + 1;
            assert_int_equal(stream_count, kept);
            /* printed with three digits */
            assert_true(fabs(stream_bytes - (double)(kept * n * unit)) < 0.01 * stream_bytes);
            /* the head is done with the last one in the forward half */
            assert_int_equal(norm_count, r > 0 ? 0 : LAYERS);
            assert_true(out_count == LAYERS && coef_count == LAYERS);
            assert_true(fabs(coef_bytes - (double)(LAYERS * ROWS * mhc_logits(n) * (int64_t)sizeof(float))) <
                        0.01 * coef_bytes);
            /* Exactly, and against the plan without recompute. */
            if (r == 0) {
                plain_work = t.train.p.work_bytes;
                plain_frame = t.train.p.frame_bytes;
            } else {
                assert_int_equal(plain_frame - t.train.p.frame_bytes, (LAYERS + 1 - kept) * n * unit + LAYERS * unit);
                assert_in_range(t.train.p.work_bytes, plain_work, plain_work + (n + 2) * unit * r);
                if (r > 1 && r < LAYERS)
                    assert_true(t.train.p.frame_bytes + t.train.p.work_bytes < plain_frame + plain_work);
            }
            for (int a = 0; a < ARENA_COUNT; a++)
                assert_int_equal(t.m.mem.planned[a], t.m.mem.allocated[a]);
            tiny_close(&t);
        }
    }
}

static void recompute_of_eight_layers_lowers_the_peak(void **state)
{
    (void)state;
    int64_t peak[3];
    static const char *const policies[] = {"", "plan.recompute=mhc plan.recompute_block=2",
                                           "plan.recompute=mhc plan.recompute_block=4"};
    for (int i = 0; i < 3; i++) {
        char options[256];
        struct tiny t;
        snprintf(options, sizeof options,
                 "model.pattern=*-*-*-*-*-*-*-*- model.hidden=128 model.heads=4 model.ffn=128 model.mhc_streams=4 "
                 "train.seq=64 "
                 "train.micro_batch=4 %s",
                 policies[i]);
        tiny_open(&t, options, DEV_CPU, 1);
        peak[i] = t.train.p.frame_bytes + t.train.p.work_bytes;
        tiny_close(&t);
    }
    assert_true(peak[1] < peak[0] && peak[2] < peak[1]);
}

/* As in Megatron: without a number of layers the whole stack is one block, and its last combine is kept. */
static void the_name_mhc_drops_all_streams_but_the_ends(void **state)
{
    (void)state;
    struct tiny t;
    tiny_open(&t, "model.pattern=*-*- model.mhc_streams=2 plan.recompute=mhc", DEV_REF, 1);
    for (int s = 0; s < t.train.g.n_slots; s++) {
        const struct slot *slot = &t.train.g.slots[s];
        if (strcmp(slot->tag, "joint.stream") == 0)
            assert_int_equal(slot->dropped, slot->layer > 0 && slot->layer < 4);
        else
            assert_int_equal(slot->dropped, strcmp(slot->tag, "joint.norm") == 0);
    }
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
    struct outcome one = outcome_of("model.dropout=0.1", DEV_CPU, 1),
                   three = outcome_of("model.dropout=0.1", DEV_CPU, 3);
    assert_true(one.loss == three.loss);
    free(one.grads);
    free(three.grads);
}

/* ---- values ---------------------------------------------------------------------------------- */

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters_have_megatron_keys_shapes_and_initial_values),
        cmocka_unit_test(streams_are_expanded_and_contracted_exactly_once),
        cmocka_unit_test(prediction_depths_import_the_uncontracted_streams),
        cmocka_unit_test(prediction_depths_see_every_stream),
        cmocka_unit_test(every_parameter_gets_a_gradient),
        cmocka_unit_test(layers_of_a_group_have_a_mapping_each),
        cmocka_unit_test(recompute_in_blocks_does_not_change_a_bit),
        cmocka_unit_test(streams_of_several_layers_are_made_again_at_once),
        cmocka_unit_test(blocks_count_groups_where_the_pattern_is_grouped),
        cmocka_unit_test(long_blocks_take_several_replays),
        cmocka_unit_test(streams_between_block_borders_are_dropped_and_no_others),
        cmocka_unit_test(plans_show_the_memory_the_specification_predicts),
        cmocka_unit_test(recompute_of_eight_layers_lowers_the_peak),
        cmocka_unit_test(the_name_mhc_drops_all_streams_but_the_ends),
        cmocka_unit_test(whole_stacks_can_be_recomputed_from_the_embedding),
        cmocka_unit_test(the_block_that_needs_least_memory_is_chosen),
        cmocka_unit_test(threads_do_not_change_a_bit),
        cmocka_unit_test(evaluation_agrees_with_training_and_between_devices),
        cmocka_unit_test(health_numbers_are_sane_at_the_start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
