/* Pipeline stages: a model cut into chunks, over thread ranks or with several chunks on one, says what the uncut model
 * says: losses, metrics and the gradient of every parameter, over several steps. */
#include "model/pipe.h"

#define EXPERTS "model.experts=4 model.topk=2 model.shared_ffn=8 model.seq_aux_loss=0.1 model.router_z_loss=0.01 "
#define MAMBA "model.mamba_head_dim=4 model.mamba_state=4 model.mamba_groups=1 model.mamba_chunk=4 "
#define STREAMS(n) "model.mhc_streams=" #n " model.mhc_gating=0.8 "
#define DROPOUT "model.dropout=0.1 data.eod=on data.eod_mask=on "

static double bound_of(enum dev_kind kind) { return kind == DEV_REF ? 1e-9 : 1e-5; }

/* Runs both and gives back the largest difference. */
static double gap_of(const char *options, enum dev_kind kind, int pp, int vpp, int n_micro, bool by_microbatch)
{
    struct err e = {0};
    const char *where;
    struct pipe_run one = {
        .options = options, .kind = kind, .n_micro = n_micro, .steps = 3, .by_microbatch = true, .eval = true};
    struct pipe_run many = one;
    many.pp = pp;
    many.vpp = vpp;
    many.by_microbatch = by_microbatch;
    assert_ok(pipe_start(&one, &e), &e);
    assert_ok(pipe_start(&many, &e), &e);
    double gap = pipe_compare(&one, &many, &where);
    if (gap > bound_of(kind))
        printf("    pp %d, vpp %d: %.2g at %s\n", pp, vpp, gap, where);
    pipe_end(&one);
    pipe_end(&many);
    return gap;
}

/* ---- the close half -------------------------------------------------------------------------- */

/* One rank sends to itself: every schedule of one microbatch gives the fused joint's bits, whatever is recomputed. */
static void a_cut_on_one_rank_changes_no_bit(void **state)
{
    (void)state;
    static const char *const models[] = {
        "model.pattern=*-|*- ",
        "model.pattern=*-|*- " DROPOUT,
        "model.pattern=*|-|*|- model.hidden=72 " DROPOUT,
        "model.pattern=*|-|*|- model.hidden=88 model.bias=on ",
        "model.pattern=*-|*- " STREAMS(2),
        "model.pattern=*|-|*|- model.hidden=72 model.tied=off " STREAMS(4) DROPOUT,
        "model.pattern=*-|*E|/*E " EXPERTS STREAMS(4) DROPOUT,
        "model.pattern=|M*||E|/*E/*E " MAMBA EXPERTS DROPOUT,
        "model.pattern=|M*||E|/*E " MAMBA EXPERTS STREAMS(3) "model.mhc_profile=s " DROPOUT,
    };
    static const char *const policies[] = {"", "plan.recompute=full plan.poison=on",
                                           "plan.recompute=norm plan.random_lanes=3 plan.poison=on plan.delay_dw=on",
                                           "plan.recompute_block=2 plan.recompute=full plan.poison=on",
                                           "plan.offload=* plan.offload_min=0 plan.random_lanes=4 plan.poison=on"};
    for (int i = 0; i < countof(models); i++)
        for (int p = 0; p < countof(policies); p++)
            for (enum dev_kind kind = DEV_REF; kind <= DEV_CPU; kind++) {
                char options[512];
                int vpp = 1;
                for (const char *s = models[i]; *s != '\0'; s++)
                    vpp += *s == '|';
                if (strstr(policies[p], "block") != NULL && strstr(models[i], "mhc") == NULL)
                    continue;
                snprintf(options, sizeof options, "%s %s", models[i], policies[p]);
                if (gap_of(options, kind, 1, vpp, 2, true) != 0)
                    fail_msg("%s, device %d", options, (int)kind);
            }
}

/* ---- over ranks ------------------------------------------------------------------------------ */

#define ALL EXPERTS MAMBA DROPOUT
static const struct layout {
    const char *pattern;
    int pp, vpp;
} layouts[] = {
    {"M*E-", 2, 1},
    {"[M*]|[*E]/*E", 2, 1},
    {"M*E-", 4, 1},
    {"M|*-|E|*-/*E", 4, 1},
    {"M|*-|E|*-/*E", 2, 2},
    {"M|*-|E|*-/*E", 1, 4},
    {"M*|E-|*E|/*E/*E", 2, 2},
    {"|M*||E-", 4, 1},
    {"M*E|-E|/*E", 1, 3},
    {"|M*E-|E*|/*E", 4, 1},
};
static const char *const sorts[] = {ALL, ALL "model.tied=off ", ALL STREAMS(2),
                                    ALL STREAMS(4) "model.tied=off plan.recompute=full "};

static void ranks_say_what_one_says(enum dev_kind kind, bool by_microbatch)
{
    for (int i = 0; i < countof(layouts); i++)
        for (int k = 0; k < countof(sorts); k++) {
            char options[512];
            bool depths = strchr(layouts[i].pattern, '/') != NULL, tied = strstr(sorts[k], "tied=off") == NULL;
            snprintf(options, sizeof options, "model.pattern=%s %s", layouts[i].pattern, sorts[k]);
            double gap = gap_of(options, kind, layouts[i].pp, layouts[i].vpp, 4, by_microbatch);
            /* A weight that is used twice sums its gradients in another order when the uses are apart. */
            bool shared = tied || depths;
            if (gap > (shared ? bound_of(kind) : 0))
                fail_msg("%s, pp %d, vpp %d: %g", options, layouts[i].pp, layouts[i].vpp, gap);
        }
}

static void ranks_say_what_one_says_in_double(void **state)
{
    (void)state;
    ranks_say_what_one_says(DEV_REF, false);
    ranks_say_what_one_says(DEV_REF, true);
}

static void ranks_say_what_one_says_in_fp32(void **state)
{
    (void)state;
    ranks_say_what_one_says(DEV_CPU, false);
    ranks_say_what_one_says(DEV_CPU, true);
}

/* Both on one mesh, microbatch by microbatch and all in one plan: the same bits, rank by rank. */
static void same_on_mesh(const char *plain_options, const char *options, enum dev_kind kind, int pp, int vpp)
{
    struct err e = {0};
    struct pipe_run plain = {
        .options = plain_options, .kind = kind, .pp = pp, .vpp = vpp, .n_micro = 8, .steps = 2, .by_microbatch = true};
    struct pipe_run other = plain;
    other.options = options;
    other.by_microbatch = false;
    assert_ok(pipe_start(&plain, &e), &e);
    assert_ok(pipe_start(&other, &e), &e);
    for (int r = 0; r < plain.n_ranks; r++) {
        assert_int_equal(plain.rank[r]->at_once, 1);
        assert_int_equal(other.rank[r]->at_once, 8);
        assert_int_equal(plain.rank[r]->n, other.rank[r]->n);
        for (int k = 0; k < plain.rank[r]->n; k++) {
            const struct pipe_value *a = &plain.rank[r]->v[k], *b = &other.rank[r]->v[k];
            assert_string_equal(a->name, b->name);
            if (pipe_gap(a, b) != 0)
                fail_msg("%s, pp %d, vpp %d, rank %d: %s differs by %g", options, pp, vpp, r, a->name, pipe_gap(a, b));
        }
    }
    pipe_end(&plain);
    pipe_end(&other);
}

/* On one mesh every schedule gives the bits of the plain one, rank by rank: one forward and one backward in turn,
 * interleaved, with replays, delayed weight gradients, lanes in any order. */
static void schedules_of_a_mesh_agree_to_the_bit(void **state)
{
    (void)state;
    static const char *const policies[] = {"", "plan.random_lanes=5 plan.poison=on",
                                           "plan.recompute=full plan.delay_dw=on plan.poison=on",
                                           "plan.recompute=norm plan.delay_dw=on plan.random_lanes=6 plan.poison=on",
                                           "plan.offload=* plan.offload_min=0 plan.recompute=norm plan.delay_dw=on "
                                           "plan.random_lanes=8 plan.poison=on"};
    for (int i = 0; i < countof(layouts); i++)
        for (int p = 0; p < countof(policies); p++) {
            char options[1024], plain_options[512];
            const char *sort = sorts[(i + p) % countof(sorts)];
            snprintf(plain_options, sizeof plain_options, "model.pattern=%s %s", layouts[i].pattern, sort);
            snprintf(options, sizeof options, "%s %s", plain_options, policies[p]);
            same_on_mesh(plain_options, options, p % 2 ? DEV_REF : DEV_CPU, layouts[i].pp, layouts[i].vpp);
        }
}

/* ---- what each rank holds -------------------------------------------------------------------- */

struct paper {
    struct config c;
    struct dev dev;
    struct model m;
    struct model_plan train;
};

/* The training plan of one rank, without anybody to talk to. */
static int paper_open(struct paper *p, const char *options, const struct mesh_sizes *sizes, int rank, struct err *e)
{
    *p = (struct paper){0};
    tiny_config(&p->c, options);
    struct model_plan_opts o = {
        .name = "train", .mode = BUILD_TRAIN, .batch = p->c.train.micro_batch, .seq = p->c.train.seq};
    TRY(dev_open(&p->dev, DEV_CPU, 1, e));
    TRY(model_init(&p->m, &p->c, &p->dev, e));
    TRY(mesh_place(&p->m.mesh, sizes, sizes->pp, rank, e));
    return model_plan_build(&p->m, &p->train, &o, e);
}

static void paper_close(struct paper *p)
{
    model_plan_release(&p->train);
    model_release(&p->m);
    dev_close(&p->dev);
    config_release(&p->c);
}

/* Nodes whose name ends so, in this chunk (-1: any). */
static int count_nodes(const struct graph *g, const char *glob, int chunk)
{
    int n = 0;
    for (int i = 0; i < g->n_nodes; i++)
        n += str_glob(glob, g->nodes[i].name) && (chunk < 0 || g->nodes[i].chunk == chunk);
    return n;
}

/* Blocks of streams that are recomputed end at cuts: every chunk has replays of its own, for several layers each, and
 * takes no more memory than with one for each layer. Where every stream is dropped, that in front of a cut is not
 * recomputed: it was only sent. */
static void blocks_of_streams_end_at_cuts(void **state)
{
    (void)state;
    static const struct {
        const char *model;
        int pp, vpp, rebuilds[2][4]; /* of each segment, by policy */
    } cases[] = {
        {"model.pattern=*-*-|-*--*-/*-*- " EXPERTS STREAMS(4) DROPOUT, 2, 1, {{1, 2}, {1, 2}}}, /* the depth has one */
        {"model.pattern=*-*-|*E*E|*-*-|*-*- " EXPERTS STREAMS(2) DROPOUT, 2, 2, {{1, 1, 1, 1}, {1, 1, 1, 1}}},
        {"model.pattern=*-*-*-*-*-|*-*- " STREAMS(3) DROPOUT, 1, 2, {{2, 1}, {2, 1}}},
        /* one stream between expansion and cut */
        {"model.pattern=*-|*-*- " STREAMS(2) DROPOUT, 2, 1, {{0, 1}, {0, 1}}},
    };
    static const char *const policies[] = {
        "plan.recompute=mhc plan.recompute_block=4 plan.poison=on plan.random_lanes=5 plan.delay_dw=on",
        "plan.recompute=joint.* plan.poison=on"};
    for (int i = 0; i < countof(cases) * countof(policies); i++) {
        int k = i % countof(policies);
        const char *model = cases[i / countof(policies)].model;
        const struct mesh_sizes sizes = {
            .pp = cases[i / countof(policies)].pp, .vpp = cases[i / countof(policies)].vpp, .ep = 1};
        char options[1024], off[1100];
        struct err e = {0};
        snprintf(options, sizeof options, "%s %s", model, policies[k]);
        snprintf(off, sizeof off, "%s mhc.rebuild=off", options);
        for (int s = 0; s < sizes.pp * sizes.vpp; s++) {
            struct paper joined, apart;
            assert_ok(paper_open(&joined, options, &sizes, s % sizes.pp, &e), &e);
            assert_ok(paper_open(&apart, off, &sizes, s % sizes.pp, &e), &e);
            assert_int_equal(count_nodes(&joined.train.g, "*.joint.rebuild", s / sizes.pp),
                             cases[i / countof(policies)].rebuilds[k][s]);
            assert_int_equal(count_nodes(&apart.train.g, "*.joint.rebuild", -1), 0);
            if (joined.train.p.frame_bytes != apart.train.p.frame_bytes ||
                joined.train.p.work_bytes > apart.train.p.work_bytes)
                fail_msg("%s, segment %d: workspace %lld, apart %lld", options, s, (long long)joined.train.p.work_bytes,
                         (long long)apart.train.p.work_bytes);
            paper_close(&joined);
            paper_close(&apart);
        }
        same_on_mesh(model, options, i % 3 ? DEV_REF : DEV_CPU, sizes.pp, sizes.vpp);
    }
}

/* Width of what a chunk receives and sends; 0: nothing. */
static int64_t width_at(const struct graph *g, enum node_role role, int chunk)
{
    for (int i = 0; i < g->n_nodes; i++)
        if (g->nodes[i].role == role && g->nodes[i].chunk == chunk) {
            const struct node *n = &g->nodes[i];
            const struct phase *f = &n->phase[PH_FWD], *b = &n->phase[PH_BWD];
            assert_int_equal(n->lane, LANE_COMM);
            assert_int_equal(f->use[0].mode, role == ROLE_CUT_IN ? USE_WRITE : USE_READ);
            assert_int_equal(b->use[0].mode, role == ROLE_CUT_IN ? USE_READ : USE_WRITE);
            assert_true(tensor_same_shape(&g->slots[f->use[0].slot].shape, &g->slots[b->use[0].slot].shape));
            return g->slots[f->use[0].slot].shape.dim[1];
        }
    return 0;
}

/* Where one stream becomes several: a joint that the embedding enters, or a node of its own in front of a cut. */
static int count_expanded(const struct graph *g, int chunk, int64_t hidden)
{
    int n = 0;
    for (int i = 0; i < g->n_nodes; i++)
        if (g->nodes[i].chunk == chunk &&
            (str_glob("*.joint.expand", g->nodes[i].name) || str_glob("*.joint.joint", g->nodes[i].name)))
            n += g->slots[g->nodes[i].phase[PH_FWD].use[0].slot].shape.dim[1] == hidden;
    return n;
}

/* The pipeline cases of the hyper-connection tests this follows: all streams cross every cut, they are made from the
 * embedding on the first stage alone and contracted where the final norm is; one stage knows nothing of it. */
static void all_streams_cross_every_cut(void **state)
{
    (void)state;
    static const struct {
        const char *pattern;
        int pp, vpp;
    } cases[] = {{"*-*-", 1, 1},    {"*-*-", 2, 1},    {"*-*-", 4, 1},       {"*|-|*|-", 2, 2},
                 {"*|-|*|-", 1, 4}, {"|*-||*-", 4, 1}, {"*-|*|-|/*-", 2, 2}, {"|*-*-", 2, 1}};
    static const int streams[] = {0, 2, 4};
    for (int i = 0; i < countof(cases); i++)
        for (int k = 0; k < countof(streams); k++) {
            int64_t sent = 0, wide = 16 * (streams[k] ? streams[k] : 1);
            int segments = cases[i].pp * cases[i].vpp, expands = 0, contracts = 0, heads = 0, embeddings = 0;
            for (int s = 0; s < segments; s++) {
                struct err e = {0};
                struct paper p;
                char options[128];
                int rank = s % cases[i].pp, v = s / cases[i].pp;
                snprintf(options, sizeof options, "model.pattern=%s model.mhc_streams=%d", cases[i].pattern,
                         streams[k]);
                assert_ok(paper_open(&p, options, &(struct mesh_sizes){.pp = cases[i].pp, .vpp = cases[i].vpp, .ep = 1},
                                     rank, &e),
                          &e);
                const struct graph *g = &p.train.g;
                assert_int_equal(width_at(g, ROLE_CUT_IN, v), s == 0 ? 0 : wide);
                assert_int_equal(width_at(g, ROLE_CUT_IN, v), sent); /* what the one before sent */
                sent = width_at(g, ROLE_CUT_OUT, v);
                assert_int_equal(sent, s == segments - 1 ? 0 : wide);
                bool first = s == 0, last = s == segments - 1;
                assert_int_equal(count_nodes(g, "embed.embed", v), first);
                assert_int_equal(count_nodes(g, "head.head", v), last);
                int contracted = count_nodes(g, "*.joint.contract", v) + count_nodes(g, "*.joint.leave", v),
                    expanded = streams[k] > 0 ? count_expanded(g, v, 16) : 0;
                assert_int_equal(expanded, first && streams[k] > 0);
                assert_int_equal(contracted, (last && streams[k] > 0) * (1 + p.m.pattern.n_mtp_depths));
                expands += expanded;
                contracts += contracted;
                heads += count_nodes(g, "head.head", v);
                embeddings += count_nodes(g, "embed.embed", v);
                assert_int_equal(p.train.loss == NO_SLOT, rank != cases[i].pp - 1);
                paper_close(&p);
            }
            assert_int_equal(heads, 1);
            assert_int_equal(embeddings, 1);
            assert_int_equal(expands, streams[k] > 0);
            assert_int_equal(contracts > 0, streams[k] > 0);
        }
}

/* Every layer of the model is on one rank, under the number and with the keys of the whole model. */
static void every_parameter_has_a_rank(void **state)
{
    (void)state;
    for (int i = 0; i < countof(layouts); i++)
        for (int k = 0; k < countof(sorts); k++) {
            struct err e = {0};
            struct paper whole, part;
            char options[512];
            int n = 0, shared = 0;
            snprintf(options, sizeof options, "model.pattern=%s %s", layouts[i].pattern, sorts[k]);
            assert_ok(paper_open(&whole, options, &(struct mesh_sizes){.pp = 1, .vpp = 1, .ep = 1}, 0, &e), &e);
            for (int r = 0; r < layouts[i].pp; r++) {
                assert_ok(paper_open(&part, options,
                                     &(struct mesh_sizes){.pp = layouts[i].pp, .vpp = layouts[i].vpp, .ep = 1}, r, &e),
                          &e);
                for (int q = 0; q < part.m.params.n; q++) {
                    const struct param *p = &part.m.params.list[q].p;
                    int at = param_find(&whole.m.params, p->key);
                    assert_true(at >= 0);
                    const struct param *w = &whole.m.params.list[at].p;
                    assert_int_equal(w->layer, p->layer);
                    assert_true(w->init == p->init && w->init_a == p->init_a && w->init_b == p->init_b &&
                                w->decay == p->decay);
                    assert_memory_equal(w->dim, p->dim, sizeof w->dim);
                    assert_false(w->shared_ends);
                    assert_true(!p->shared_ends || r == 0 || r == layouts[i].pp - 1);
                    shared += p->shared_ends;
                    n++;
                }
                paper_close(&part);
            }
            bool twice = layouts[i].pp > 1 && (whole.c.model.tied || whole.m.pattern.n_mtp_depths > 0);
            assert_int_equal(shared, twice ? 2 : 0);
            assert_int_equal(n, whole.m.params.n + twice);
            paper_close(&whole);
        }
}

static void layers_are_dealt_out(void **state)
{
    (void)state;
    static const struct {
        const char *pattern;
        int pp, vpp;
        int from[8], n[8]; /* by segment */
    } cases[] = {
        {"*-*-*-*-", 2, 1, {0, 4}, {4, 4}},
        {"M*M*M*M*", 4, 1, {0, 2, 4, 6}, {2, 2, 2, 2}},
        {"*-*|-*-*|-*-*|-*-", 4, 1, {0, 3, 7, 11}, {3, 4, 4, 3}},
        {"||M*", 1, 3, {0, 0, 0}, {0, 0, 2}},
        {"|*-|", 1, 1, {0}, {2}},
        {"[*-][*-]|[*-][*E]|[*E][*E]|[*E][*E]|[*E][*E]|[*E][*E]|[*E][*E]|/*E",
         4,
         2,
         {0, 4, 8, 12, 16, 20, 24, 28},
         {4, 4, 4, 4, 4, 4, 4, 0}},
    };
    static const struct {
        const char *pattern;
        int pp, vpp;
        const char *says;
    } refused[] = {{"*-*-*-*-*-*-*-", 4, 1, "evenly divisible"},
                   {"*|-|*|-", 2, 1, "4 segments"},
                   {"*|-", 4, 1, "2 segments"},
                   {"*-*-", 1, 2, "out of range"},
                   {"*-*-", 2, 2, "Virtual pipeline"},
                   {"[*-*]-", 2, 1, "would split"}};
    struct err e = {0};
    struct pattern p;
    struct mesh m;
    struct model_chunk c;
    for (int i = 0; i < countof(cases); i++) {
        assert_ok(pattern_parse(&p, cases[i].pattern, &e), &e);
        for (int s = 0; s < cases[i].pp * cases[i].vpp; s++) {
            assert_ok(mesh_place(&m, &(struct mesh_sizes){.pp = cases[i].pp, .vpp = cases[i].vpp, .ep = 1}, cases[i].pp,
                                 s % cases[i].pp, &e),
                      &e);
            assert_ok(model_chunk(&p, &m, s / cases[i].pp, &c, &e), &e);
            assert_int_equal(c.from, cases[i].from[s]);
            assert_int_equal(c.n, cases[i].n[s]);
            assert_int_equal(c.segment, s);
            assert_int_equal(c.first, s == 0);
            assert_int_equal(c.last, s == cases[i].pp * cases[i].vpp - 1);
        }
    }
    static const struct {
        const char *pattern;
        int pp, first, last, n[4];
    } sized[] = {{"M*M*M*M*", 4, 1, 1, {1, 3, 3, 1}},
                 {"M*M*M*", 4, 3, 0, {3, 1, 1, 1}},
                 {"[*-][*E]M-", 3, 2, 0, {2, 2, 2}},
                 {"[*-][*-][*-]", 2, 0, 2, {4, 2}}};
    for (int i = 0; i < countof(sized); i++) {
        assert_ok(pattern_parse(&p, sized[i].pattern, &e), &e);
        struct mesh_sizes sizes = {
            .pp = sized[i].pp, .vpp = 1, .ep = 1, .first_layers = sized[i].first, .last_layers = sized[i].last};
        for (int s = 0, from = 0; s < sized[i].pp; from += sized[i].n[s++]) {
            assert_ok(mesh_place(&m, &sizes, sized[i].pp, s, &e), &e);
            assert_ok(model_chunk(&p, &m, 0, &c, &e), &e);
            assert_int_equal(c.from, from);
            assert_int_equal(c.n, sized[i].n[s]);
        }
    }
    for (int i = 0; i < countof(refused); i++) {
        assert_ok(pattern_parse(&p, refused[i].pattern, &e), &e);
        assert_ok(mesh_place(&m, &(struct mesh_sizes){.pp = refused[i].pp, .vpp = refused[i].vpp, .ep = 1},
                             refused[i].pp, refused[i].pp - 1, &e),
                  &e);
        assert_fails(model_chunk(&p, &m, refused[i].vpp - 1, &c, &e), ST_USAGE, &e, refused[i].says);
    }
}

/* A name of plan.recompute that only another stage knows is fine; one that no stage knows is refused by all. */
static void recompute_names_are_those_of_the_whole_model(void **state)
{
    (void)state;
    for (int r = 0; r < 2; r++) {
        struct err e = {0};
        struct paper p;
        assert_ok(paper_open(&p, "model.pattern=*|- plan.recompute=attn.o,mlp.act,norm",
                             &(struct mesh_sizes){.pp = 2, .vpp = 1, .ep = 1}, r, &e),
                  &e);
        assert_int_equal(p.train.p.n_replays, 2); /* each its own core and the norm in front of it */
        paper_close(&p);
        assert_fails(paper_open(&p, "model.pattern=*|- plan.recompute=attn.o,mamba.y",
                                &(struct mesh_sizes){.pp = 2, .vpp = 1, .ep = 1}, r, &e),
                     ST_USAGE, &e, "mamba.y");
        paper_close(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_cut_on_one_rank_changes_no_bit),
        cmocka_unit_test(schedules_of_a_mesh_agree_to_the_bit),
        cmocka_unit_test(blocks_of_streams_end_at_cuts),
        cmocka_unit_test(all_streams_cross_every_cut),
        cmocka_unit_test(every_parameter_has_a_rank),
        cmocka_unit_test(layers_are_dealt_out),
        cmocka_unit_test(recompute_names_are_those_of_the_whole_model),
        cmocka_unit_test(ranks_say_what_one_says_in_double),
        cmocka_unit_test(ranks_say_what_one_says_in_fp32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
