/* plan/: whole steps of several microbatches. Every schedule on every pipeline gives the bits of plain execution, with
 * lanes in random legal orders and dead slots poisoned; frames are shared where they can be; and mistakes others made
 * with overlapped schedules are caught: each as a named mutant. How long steps take is in test_step_time.c. */
#include "net.h"

static void plain_net(struct net *n, const struct net_opts *o, int n_mb, struct post *post)
{
    static struct net_opts alone; /* outlives the net */
    struct err e = {0};
    alone = *o;
    alone.pp = 1;
    alone.pp_rank = 0;
    post_open(post);
    net_declare(n, &alone, post);
    assert_ok(schedule_plain(&n->r.g, false, &n->r.o, &e), &e);
    assert_ok(rig_plan(&n->r), &n->r.e);
    net_commit(n);
    assert_ok(net_run(n, n_mb, &e), &e);
}

static void step_net(struct net *n, const struct setup *s, struct post *post)
{
    struct err e = {0};
    net_declare(n, &s->net, post);
    struct offload_count count;
    assert_ok(schedule_step(&n->r.g, &s->s, &n->r.o, &e), &e);
    assert_ok(order_offload(&n->r.g, &n->r.o, 0, &count, &e), &e);
    assert_ok(rig_plan(&n->r), &n->r.e);
    assert_int_equal(n->r.p.n_fetches, count.slots * s->s.n_mb);
    net_commit(n);
}

/* ---- every schedule equals plain ------------------------------------------------------------- */

struct rank_run {
    struct net net;
    struct setup s;
    struct err e;
    int status;
    pthread_t thread;
};
static void *run_rank(void *arg)
{
    struct rank_run *r = arg;
    r->status = net_run(&r->net, r->s.s.n_mb, &r->e);
    return NULL;
}

static const char *run_ranks(struct rank_run *ranks, int pp, uint64_t seed, const struct net *want, struct post *post)
{
    const char *fault = NULL;
    memset(post->sent, 0, sizeof post->sent);
    for (int r = 0; r < pp; r++) {
        ranks[r].net.r.x.random_lanes = seed ? seed * 16 + (uint64_t)r : 0;
        ranks[r].net.r.x.poison = true;
        assert_int_equal(pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < pp; r++)
        pthread_join(ranks[r].thread, NULL);
    for (int r = 0; r < pp; r++) {
        assert_ok(ranks[r].status, &ranks[r].e);
        if (fault == NULL)
            fault = net_difference(&ranks[r].net, want);
    }
    return fault;
}

static void compare_with_plain(const struct setup *s, int seeds)
{
    struct rank_run ranks[4];
    struct net want;
    struct post plain, post;
    plain_net(&want, &s->net, s->s.n_mb, &plain);
    post_open(&post);
    for (int r = 0; r < s->s.pp; r++) {
        ranks[r] = (struct rank_run){.s = *s};
        ranks[r].s.net.pp = s->s.pp;
        ranks[r].s.net.pp_rank = ranks[r].s.s.pp_rank = r;
        step_net(&ranks[r].net, &ranks[r].s, &post);
        assert_int_equal(ranks[r].net.r.p.n_mb, s->s.n_mb);
    }
    for (int seed = 0; seed < seeds; seed++) {
        const char *slot = run_ranks(ranks, s->s.pp, (uint64_t)seed, &want, &post);
        if (slot != NULL)
            fail_msg(
                "pp %d, vpp %d, %d microbatches, overlap %d, delay_dw %d, drop %d, offload %d, seed %d: %s differs "
                "from plain",
                s->s.pp, s->s.vpp, s->s.n_mb, s->s.overlap, s->s.delay_dw, s->net.drop, s->net.offload, seed, slot);
    }
    for (int r = 0; r < s->s.pp; r++)
        rig_release(&ranks[r].net.r);
    rig_release(&want.r);
    post_close(&post);
    post_close(&plain);
}

static void every_schedule_equals_plain_bit_for_bit(void **state)
{
    (void)state;
    static const struct {
        const char *segment[NET_MAX_SEGMENTS];
        int n, pp, vpp, n_mb;
    } nets[] = {
        {{"*E*E"}, 1, 1, 1, 3},
        {{"*-*E*E-"}, 1, 1, 1, 1},
        {{"*-*-", "*E*E"}, 2, 1, 2, 3}, /* pairs with unequal numbers of expert layers, both ways */
        {{"E", "", "*E-E"}, 3, 1, 3, 4},
        {{"*E", "*-", "*E"}, 3, 3, 1, 5},
        {{"*E", "-", "*E*E", ""}, 4, 2, 2, 4}, /* the last chunk holds the head alone */
        {{"*-", "*E", "*E", "*E"}, 4, 2, 2, 5},
        {{"*", "-", "E", "*E", "*-", "*E"}, 6, 3, 2, 6},
    };
    int schedules = 0;
    for (int k = 0; k < countof(nets); k++)
        for (int variant = 0; variant < 24; variant++) {
            struct setup s = {.s = {.pp = nets[k].pp,
                                    .vpp = nets[k].vpp,
                                    .n_mb = nets[k].n_mb,
                                    .overlap = (enum overlap_kind)(variant % 3),
                                    .delay_dw = variant / 3 % 2},
                              .net = {.n_segments = nets[k].n,
                                      .pp = nets[k].pp,
                                      .drop = variant / 6 % 2,
                                      .offload = variant / 12,
                                      .tied = nets[k].pp == 1}};
            memcpy(s.net.segment, nets[k].segment, sizeof s.net.segment);
            s.s.group = nets[k].n_mb == 5 && nets[k].vpp > 1 ? 3 : 0;
            if (s.s.overlap == OVERLAP_EP && s.s.pp > 1 && s.s.vpp == 1)
                continue;
            compare_with_plain(&s, nets[k].pp > 1 || s.net.offload ? 6 : 12);
            schedules++;
        }
    print_message("           %d schedules\n", schedules);
    assert_true(schedules > 160);
}

/* With one microbatch and one chunk it is the plain schedule itself; sums keep plain's order under every overlap. */
static void orders_keep_the_order_of_sums(void **state)
{
    (void)state;
    struct post post;
    post_open(&post);
    for (int tied = 0; tied < 2; tied++) {
        struct net_opts o = {.segment = {"*-*E*E"}, .n_segments = 1, .pp = 1, .tied = tied};
        struct net n;
        struct err e = {0};
        net_declare(&n, &o, &post);
        for (int delay = 0; delay < 2; delay++) {
            struct order plain = {0}, step = {0};
            assert_ok(schedule_plain(&n.r.g, delay, &plain, &e), &e);
            assert_ok(schedule_step(&n.r.g, &(struct schedule_opts){.delay_dw = delay}, &step, &e), &e);
            assert_int_equal(plain.n, step.n);
            assert_memory_equal(plain.list, step.list, (size_t)plain.n * sizeof *plain.list);
            order_release(&step);
            order_release(&plain);
        }
        struct order plain = {0}, step = {0};
        assert_ok(schedule_step(&n.r.g, &(struct schedule_opts){.n_mb = 4}, &plain, &e), &e);
        assert_ok(schedule_step(&n.r.g, &(struct schedule_opts){.n_mb = 4, .overlap = OVERLAP_EP, .delay_dw = true},
                                &step, &e),
                  &e);
        assert_int_equal(plain.n, step.n);
        assert_ok(order_same_sums(&n.r.g, &plain, &step, &e), &e);
        struct step_ref swap = step.list[step.n - 1]; /* the embedding's dw of the last microbatch, put first */
        memmove(step.list + 1, step.list, (size_t)(step.n - 1) * sizeof swap);
        step.list[0] = swap;
        assert_fails(order_same_sums(&n.r.g, &plain, &step, &e), ST_INVALID, &e, "embed.g");
        order_release(&step);
        order_release(&plain);
        rig_release(&n.r);
    }
    post_close(&post);
}

/* Brackets number layers and name nodes; the order of an overlapped step does not see them. */
static void flat_and_grouped_layers_have_one_order(void **state)
{
    (void)state;
    struct post post;
    post_open(&post);
    for (int overlap = OVERLAP_EP; overlap <= OVERLAP_DW; overlap++)
        for (int delay = 0; delay < 2; delay++) {
            struct order order[2] = {{0}, {0}};
            for (int grouped = 0; grouped < 2; grouped++) {
                struct net_opts o = {.segment = {"*E*E*E"}, .n_segments = 1, .pp = 1, .grouped = grouped};
                struct net n;
                struct err e = {0};
                net_declare(&n, &o, &post);
                assert_ok(schedule_step(&n.r.g,
                                        &(struct schedule_opts){
                                            .n_mb = 3, .overlap = (enum overlap_kind)overlap, .delay_dw = delay},
                                        &order[grouped], &e),
                          &e);
                rig_release(&n.r);
            }
            assert_int_equal(order[0].n, order[1].n);
            assert_memory_equal(order[0].list, order[1].list, (size_t)order[0].n * sizeof *order[0].list);
            order_release(&order[0]);
            order_release(&order[1]);
        }
    post_close(&post);
}

/* ---- the order of a pair --------------------------------------------------------------------- */

static void a_pair_follows_the_table(void **state)
{
    (void)state;
    struct post post;
    struct net n;
    struct err e = {0};
    struct net_opts o = {.segment = {"E"}, .n_segments = 1, .pp = 1};
    struct order order = {0};
    struct buf got;
    post_open(&post);
    net_declare(&n, &o, &post);
    assert_ok(
        schedule_step(&n.r.g, &(struct schedule_opts){.n_mb = 2, .overlap = OVERLAP_EP, .delay_dw = true}, &order, &e),
        &e);
    buf_init(&got, 0);
    for (int i = 0; i < order.n; i++) {
        const char *name = strrchr(n.r.g.nodes[order.list[i].node].name, '.');
        buf_addf(&got, "%s%d.%s ",
                 order.list[i].phase == PH_FWD   ? "f"
                 : order.list[i].phase == PH_BWD ? "b"
                                                 : "w",
                 order.list[i].mb, name + 1);
    }
    assert_string_equal(got.text,
                        "f0.batch f1.batch f0.look_up f0.norm f0.shared f0.router f0.dispatch f0.fc1 f0.fc2 f0.combine "
                        "f0.unpermute f0.add f0.loss "
                        /* the pair */
                        "b0.add b0.unpermute b0.combine f1.look_up f1.norm f1.shared f1.router b0.fc2 b0.fc1 "
                        "f1.dispatch b0.dispatch "
                        "w0.fc2 w0.fc1 f1.fc1 f1.fc2 f1.combine b0.router b0.shared b0.norm w0.shared w0.look_up "
                        "f1.unpermute f1.add f1.loss "
                        "b1.add b1.unpermute b1.combine b1.fc2 b1.fc1 b1.dispatch w1.fc2 w1.fc1 b1.router b1.shared "
                        "b1.norm w1.shared w1.look_up ");
    buf_release(&got);
    order_release(&order);
    rig_release(&n.r);
    post_close(&post);
}

/* ---- frames ---------------------------------------------------------------------------------- */

static int64_t frames_of(const struct schedule_opts *s, const struct net_opts *o)
{
    struct post post;
    struct net n;
    struct err e = {0};
    post_open(&post);
    net_declare(&n, o, &post);
    assert_ok(schedule_step(&n.r.g, s, &n.r.o, &e), &e);
    assert_ok(rig_plan(&n.r), &n.r.e);
    assert_int_equal(n.r.p.n_frames, s->n_mb * (s->vpp ? s->vpp : 1));
    int64_t bytes = n.r.p.frame_bytes;
    rig_release(&n.r);
    post_close(&post);
    return bytes;
}

static void frames_of_finished_microbatches_are_used_again(void **state)
{
    (void)state;
    struct net_opts o = {.segment = {"*E*E*-"}, .n_segments = 1, .pp = 1};
    int64_t one = frames_of(&(struct schedule_opts){.n_mb = 1}, &o);
    /* tokens and labels are there for every microbatch from the start; of the saved ones, only tokens lie beside the
     * frames */
    int64_t tokens = round_up(NET_WIDTH * 8, DEV_ALIGN), frame = one - tokens;
    for (int n_mb = 2; n_mb <= 8; n_mb *= 2) {
        assert_int_equal(frames_of(&(struct schedule_opts){.n_mb = n_mb}, &o), frame + n_mb * tokens);
        assert_int_equal(frames_of(&(struct schedule_opts){.n_mb = n_mb, .overlap = OVERLAP_EP}, &o),
                         2 * frame + n_mb * tokens);
    }
    /* a pipeline keeps its peak: 4 stages, stage r has 4 - r frames of 8 microbatches */
    for (int r = 0; r < 4; r++) {
        struct net_opts p = {.segment = {"*-*E", "*-*E", "*-*E", "*-*E"}, .n_segments = 4, .pp = 4, .pp_rank = r};
        int64_t ends = r == 0 ? tokens : 0;
        frame = frames_of(&(struct schedule_opts){.pp = 4, .pp_rank = r, .n_mb = 1}, &p) - ends;
        int64_t all = frames_of(&(struct schedule_opts){.pp = 4, .pp_rank = r, .n_mb = 8}, &p) - 8 * ends;
        assert_int_equal(all, (4 - r) * frame);
    }
}

static void persistent_slots_may_not_pass_values_within_a_microbatch(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    slot_id table = rig_keep(&r, "table", ARENA_STATE, 8), d = rig_slot(&r, "d", 8),
            g = rig_keep(&r, "g", ARENA_GRAD, 8);
    int k = rig_node(&r, "core", LANE_COMPUTE);
    RIG_USES(&r, k, PH_FWD, 1, WRITES(table), WRITES(d));
    RIG_USES(&r, k, PH_DW, 1, READS(d), READS(table), ADDS(g));
    assert_ok(schedule_step(&r.g, &(struct schedule_opts){.n_mb = 2}, &r.o, &r.e), &r.e);
    assert_ok(rig_plan(&r), &r.e); /* one after the other: fine */
    plan_release(&r.p);
    order_release(&r.o);
    assert_ok(schedule_step(&r.g, &(struct schedule_opts){.pp = 2, .n_mb = 2}, &r.o, &r.e), &r.e); /* F0 F1 B0 B1 */
    assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "microbatch 0 reads slot table, which microbatch 1 has changed");
    rig_release(&r);
}

/* Each step gets the run_info of its microbatch, host nodes first, and errors and NaN are told with it. */
static int note_run(const struct step_ctx *c)
{
    double *out = c->t[0].data;
    out[0] = (double)c->run->first_sample;
    return ST_OK;
}
static int check_run(const struct step_ctx *c)
{
    double seen = ((const double *)c->t[0].data)[0], *sum = c->t[1].data;
    if (seen != (double)c->run->first_sample)
        return err_set(c->lane->err, ST_INVALID, "saw %g", seen);
    sum[0] = (c->add[1] ? sum[0] : 0) + (seen == 7 ? NAN : seen);
    return c->run->start == 1 ? err_set(c->lane->err, ST_INVALID, "asked to fail") : ST_OK;
}

static void every_step_gets_the_run_info_of_its_microbatch(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    slot_id x = rig_slot(&r, "x", 1), sum = rig_keep(&r, "sum", ARENA_GRAD, 1);
    int source = graph_node(&r.g, "source", LANE_COPY, NULL), sink = graph_node(&r.g, "sink", LANE_COMPUTE, NULL);
    graph_host(&r.g, source);
    GRAPH_PHASE(&r.g, source, PH_FWD, note_run, WRITES(x));
    GRAPH_PHASE(&r.g, sink, PH_DW, check_run, READS(x), ADDS(sum));
    assert_ok(schedule_step(&r.g, &(struct schedule_opts){.pp = 2, .n_mb = 3}, &r.o, &r.e), &r.e);
    rig_make(&r);
    struct run_info run[3] = {{.first_mb = true, .first_sample = 1}, {.first_sample = 2}, {.first_sample = 4}};
    const double *got = (const void *)r.m.base[ARENA_GRAD];
    for (int again = 0; again < 2; again++) {
        assert_ok(exec_run(&r.x, &r.p, run, &r.e), &r.e);
        assert_true(got[0] == 7);
    }
    run[0].first_mb = false; /* the step goes on: a second run adds */
    assert_ok(exec_run(&r.x, &r.p, run, &r.e), &r.e);
    assert_true(got[0] == 14);
    run[1].start = 1;
    assert_int_equal(exec_run(&r.x, &r.p, run, &r.e), ST_INVALID);
    assert_non_null(strstr(r.e.trail, "node sink (dw), microbatch 1"));
    run[1].start = 0;
    run[2].first_sample = 7;
    r.x.find_nan = true;
    r.e = (struct err){0};
    assert_int_equal(exec_run(&r.x, &r.p, run, &r.e), ST_NONFINITE);
    assert_non_null(strstr(r.e.trail, "microbatch 2"));
    rig_release(&r);
}

/* ---- the method has teeth -------------------------------------------------------------------- */

static void overlapped(struct net *n, const char *layers, bool drop, int n_mb, struct post *post)
{
    static struct net_opts o;
    o = (struct net_opts){.segment = {layers}, .n_segments = 1, .pp = 1, .drop = drop};
    const struct setup s = {.net = o, .s = {.n_mb = n_mb, .overlap = OVERLAP_EP, .delay_dw = true}};
    post_open(post);
    step_net(n, &s, post);
    n->o = &o;
    n->r.x.poison = true;
}

static bool orders_differ(struct net *n, const struct net *want, int n_mb, int seeds)
{
    struct err e = {0};
    for (int seed = 0; seed < seeds; seed++) {
        n->r.x.random_lanes = (uint64_t)seed;
        assert_ok(net_run(n, n_mb, &e), &e);
        if (net_difference(n, want) != NULL)
            return true;
    }
    return false;
}

static void a_missing_wait_is_caught(void **state)
{
    (void)state;
    struct net n, want;
    struct post post, plain;
    int removed = 0, caught = 0;
    overlapped(&n, "*E*E", true, 3, &post);
    plain_net(&want, n.o, 3, &plain);
    for (int i = 0; i < n.r.p.n_steps; i++) {
        struct step *s = &n.r.p.steps[i], kept = *s;
        for (int w = 0; w < kept.n_waits; w++) {
            if (n.r.g.nodes[n.r.p.steps[kept.wait[w]].ref.node].host)
                continue; /* done before the lanes part */
            s->wait[w] = kept.wait[kept.n_waits - 1];
            s->n_waits = kept.n_waits - 1;
            removed++;
            caught += orders_differ(&n, &want, 3, 120);
            *s = kept;
        }
    }
    assert_false(orders_differ(&n, &want, 3, 120));
    print_message("           %d of %d removed waits were caught\n", caught, removed);
    assert_true(removed > 20 && caught * 10 >= removed * 9);
    rig_release(&n.r);
    rig_release(&want.r);
    post_close(&post);
    post_close(&plain);
}

/* ---- mutants: letters of the ledger of the overlapped schedules this re-creates -------------- */

/* B: whatever a backward half computes, it computes once. Adding up twice would not always be noticed. */
static void mutant_B_backward_twice(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    slot_id x = rig_slot(&r, "x", 8), g = rig_keep(&r, "g", ARENA_GRAD, 8);
    int k = rig_node(&r, "norm", LANE_COMPUTE);
    RIG_USES(&r, k, PH_FWD, 1, WRITES(x));
    RIG_USES(&r, k, PH_BWD, 1, READS(x), ADDS(g));
    assert_ok(schedule_step(&r.g, &(struct schedule_opts){.n_mb = 2}, &r.o, &r.e), &r.e);
    assert_ok(rig_plan(&r), &r.e);
    plan_release(&r.p);
    assert_ok(order_add(&r.o, k, PH_BWD, 1, &r.e), &r.e);
    assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "node norm (bwd) of microbatch 1 is in the order twice");
    rig_release(&r);
}

/* E: a dropped slot is rebuilt once per microbatch, on the compute lane, and after the all-to-alls that come before its
 * first reader. NULL: so it is. */
static const char *rebuild_fault(const struct plan *p)
{
    for (int i = 0; i < p->n_steps; i++) {
        const struct step *s = &p->steps[i];
        const struct phase *ph = &p->g->nodes[s->ref.node].phase[s->ref.phase];
        if (s->ref.phase != PH_REPLAY)
            continue;
        if (s->lane != LANE_COMPUTE)
            return "on the wrong lane";
        int made = s->instance[ph->n_uses - 1], reader = i;
        assert_true(p->inst[made].rebuilt && p->inst[made].first_step == i);
        for (bool read = false; !read;) {
            const struct step *r = &p->steps[++reader];
            assert_true(reader < p->n_steps);
            for (int u = 0; u < p->g->nodes[r->ref.node].phase[r->ref.phase].n_uses; u++)
                read |= r->instance[u] == made;
            if (!read && r->lane == LANE_COMM && r->ref.mb == s->ref.mb)
                return "too early";
        }
        for (int k = 0; k < i; k++)
            if (p->steps[k].ref.phase == PH_REPLAY && p->steps[k].ref.node == s->ref.node &&
                p->steps[k].ref.mb == s->ref.mb)
                return "twice";
    }
    return NULL;
}

static void mutant_E_rebuilt_at_the_combine(void **state)
{
    (void)state;
    struct net n;
    struct post post;
    overlapped(&n, "*E*E", true, 3, &post);
    assert_true(n.r.p.n_replays == 3 * 2 * 4); /* per layer pair: two norms, qkv, fc1 */
    assert_null(rebuild_fault(&n.r.p));
    struct plan mutant;
    struct order o = {0};
    struct err e = {0};
    int hooked = 0;
    for (int i = 0; i < n.r.o.n; i++) {
        const struct step_ref *r = &n.r.o.list[i];
        const struct node *node = &n.r.g.nodes[r->node];
        /* the hook of the combine: the norm of its layer again, before the combine's backward */
        for (int k = 0; node->role == ROLE_COMBINE && r->phase == PH_BWD && k < n.r.g.n_nodes; k++) {
            const char *name = strrchr(n.r.g.nodes[k].name, '.');
            if (n.r.g.nodes[k].layer == node->layer && name != NULL && strcmp(name, ".norm") == 0) {
                assert_ok(order_add(&o, k, PH_REPLAY, r->mb, &e), &e);
                hooked++;
            }
        }
        assert_ok(order_add(&o, r->node, r->phase, r->mb, &e), &e);
    }
    assert_int_equal(hooked, 6);
    assert_ok(plan_build(&mutant, "mutant E", &n.r.g, &o, &e), &e);
    assert_string_equal(rebuild_fault(&mutant), "too early");
    int replay = 0;
    while (n.r.p.steps[replay].ref.phase != PH_REPLAY)
        replay++;
    n.r.p.steps[replay].lane = LANE_COMM;
    assert_string_equal(rebuild_fault(&n.r.p), "on the wrong lane");
    plan_release(&mutant);
    order_release(&o);
    rig_release(&n.r);
    post_close(&post);
}

/* K: what a step writes owns its bytes: nobody else's live slot lies there. In list order; lanes are
 * the business of M. */
static const char *storage_fault(const struct plan *p)
{
    for (int i = 0; i < p->n_inst; i++)
        for (int k = 0; k < p->n_inst; k++) {
            const struct instance *x = &p->inst[i], *y = &p->inst[k];
            if (i == k || x->arena != y->arena || (x->arena != ARENA_FRAME && x->arena != ARENA_WORK) ||
                x->merged == k || y->merged == i)
                continue;
            bool together = x->first_step < y->first_step && y->first_step <= x->last_step;
            if (together && x->offset < y->offset + y->bytes && y->offset < x->offset + x->bytes)
                return p->g->slots[y->slot].name;
        }
    return NULL;
}

static int life_of(const struct plan *p, const char *name, int mb)
{
    for (int i = 0; i < p->n_inst; i++)
        if (p->inst[i].mb == mb && strcmp(p->g->slots[p->inst[i].slot].name, name) == 0)
            return i;
    fail_msg("no slot %s", name);
    return -1;
}

static void mutant_K_output_is_a_view(void **state)
{
    (void)state;
    struct net n, want;
    struct post post, plain;
    struct err e = {0};
    overlapped(&n, "*E*E", false, 3, &post);
    plain_net(&want, n.o, 3, &plain);
    assert_null(storage_fault(&n.r.p));
    /* the output of the attention's first half becomes a view of its input, which its weight gradient still reads */
    struct instance *out = &n.r.p.inst[life_of(&n.r.p, "2.a.qkv", 1)];
    const struct instance *in = &n.r.p.inst[life_of(&n.r.p, "2.a.norm", 1)];
    out->arena = in->arena;
    out->offset = in->offset;
    assert_string_equal(storage_fault(&n.r.p), "2.a.qkv");
    assert_ok(plan_bind(&n.r.p, &n.r.m, &e), &e);
    n.r.x.poison = false;
    assert_ok(net_run(&n, 3, &e), &e);
    assert_string_equal(net_difference(&n, &want), "2.a.qkv.g");
    rig_release(&n.r);
    rig_release(&want.r);
    post_close(&post);
    post_close(&plain);
}

/* Is step `a` done before step `b` starts, whatever the lanes do? */
static bool proven_before(const struct plan *p, int a, int b)
{
    if (b < a)
        return false;
    for (int w = 0; w < p->steps[b].n_waits; w++)
        if (p->steps[b].wait[w] == a || proven_before(p, a, p->steps[b].wait[w]))
            return true;
    int before = b - 1;
    while (before >= 0 && p->steps[before].lane != p->steps[b].lane)
        before--;
    return before == a || (before > a && proven_before(p, a, before));
}

/* M: what an all-to-all reads lives until it has been done, not until it has been launched. The mutant gives its bytes
 * to what the compute lane writes next: right as long as lanes run in list order, wrong as soon as the comm lane is
 * late. */
static void mutant_M_recycled_when_launched(void **state)
{
    (void)state;
    struct net n, want;
    struct post post, plain;
    struct err e = {0};
    int moved = 0, caught = 0;
    overlapped(&n, "*E*E", false, 3, &post);
    plain_net(&want, n.o, 3, &plain);
    struct plan *p = &n.r.p;
    for (int x = 0; x < p->n_inst; x++) {
        const struct instance *read = &p->inst[x];
        const struct step *last = &p->steps[read->last_step];
        if (last->lane != LANE_COMM || p->g->slots[read->slot].arena >= 0)
            continue;
        for (int y = 0; y < p->n_inst; y++) {
            struct instance *next = &p->inst[y], was = *next;
            bool after = next->first_step > read->last_step && next->first_step <= read->last_step + 3;
            if (!after || p->g->slots[next->slot].arena >= 0 || p->steps[next->first_step].lane != LANE_COMPUTE ||
                next->merged >= 0 || proven_before(p, read->last_step, next->first_step))
                continue;
            next->arena = read->arena;
            next->offset = read->offset;
            assert_ok(plan_bind(p, &n.r.m, &e), &e);
            n.r.x.random_lanes = 0;
            n.r.x.poison = false;
            assert_ok(net_run(&n, 3, &e), &e);
            if (net_difference(&n, &want) == NULL) { /* looks right (it may also have met a third slot) */
                moved++;
                caught += orders_differ(&n, &want, 3, 60);
            }
            *next = was;
        }
    }
    assert_ok(plan_bind(p, &n.r.m, &e), &e);
    assert_false(orders_differ(&n, &want, 3, 60));
    print_message("           %d of %d recycled slots were caught\n", caught, moved);
    assert_true(moved > 4 && caught * 10 >= moved * 9);
    rig_release(&n.r);
    rig_release(&want.r);
    post_close(&post);
    post_close(&plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_schedule_equals_plain_bit_for_bit),
        cmocka_unit_test(orders_keep_the_order_of_sums),
        cmocka_unit_test(flat_and_grouped_layers_have_one_order),
        cmocka_unit_test(a_pair_follows_the_table),
        cmocka_unit_test(frames_of_finished_microbatches_are_used_again),
        cmocka_unit_test(persistent_slots_may_not_pass_values_within_a_microbatch),
        cmocka_unit_test(every_step_gets_the_run_info_of_its_microbatch),
        cmocka_unit_test(a_missing_wait_is_caught),
        cmocka_unit_test(mutant_B_backward_twice),
        cmocka_unit_test(mutant_E_rebuilt_at_the_combine),
        cmocka_unit_test(mutant_K_output_is_a_view),
        cmocka_unit_test(mutant_M_recycled_when_launched),
    };
    return cmocka_run_group_tests_name("plan: whole steps", tests, NULL, NULL);
}
