/* plan/: how long whole steps take. Overlap hides what it should, and planning itself stays fast for large steps and
 * for thousands of microbatches, with the plans of the exhaustive planner. */
#include "net.h"

#include "plan/simulate.h"

/* ---- time ------------------------------------------------------------------------------------ */

/* GEMMs 1, all-to-alls 1.5, messages 0.2, the rest 0.1. */
static double toy_seconds(const void *ctx, const struct plan *p, int step)
{
    (void)ctx;
    const struct step *s = &p->steps[step];
    const struct node *n = &p->g->nodes[s->ref.node];
    if (n->host)
        return 0;
    if (n->role == ROLE_DISPATCH || n->role == ROLE_COMBINE)
        return 1.5;
    return n->role != ROLE_NONE ? 0.2 : n->phase[s->ref.phase].flops > 0 ? 1 : 0.1;
}

static void simulate(struct sim *sim, const struct net_opts *o, struct schedule_opts s, bool in_list_order)
{
    struct err e = {0};
    struct net n[4];
    struct post post;
    int pp = s.pp ? s.pp : 1;
    post_open(&post);
    assert_ok(sim_open(sim, pp, &e), &e);
    sim->in_list_order = in_list_order;
    for (int r = 0; r < pp; r++) {
        struct setup setup = {.net = *o, .s = s};
        setup.net.pp = pp;
        setup.net.pp_rank = setup.s.pp_rank = r;
        net_declare(&n[r], &setup.net, &post);
        assert_ok(schedule_step(&n[r].r.g, &setup.s, &n[r].r.o, &e), &e);
        assert_ok(rig_plan(&n[r].r), &n[r].r.e);
        assert_ok(sim_add_plan(sim, &(struct sim_place){.rank = r, .pp = pp, .pp_rank = r, .vpp = s.vpp, .group = -1},
                               &n[r].r.p, toy_seconds, NULL, &e),
                  &e);
    }
    assert_ok(sim_run(sim, &e), &e);
    for (int r = 0; r < pp; r++)
        rig_release(&n[r].r);
    post_close(&post);
}

static double all_exposed(const struct sim *s)
{
    double sum = 0;
    for (int r = 0; r < s->n_ranks; r++)
        for (int ph = 0; ph < PH_COUNT; ph++)
            sum += s->rank[r].exposed[ph];
    return sum;
}

static void overlap_hides_all_to_alls(void **state)
{
    (void)state;
    static const struct {
        struct net_opts net;
        struct schedule_opts s;
    } cases[] = {
        {{.segment = {"*E*E*E*E"}, .n_segments = 1}, {.n_mb = 8}},
        {{.segment = {"*-*-", "*E*E*E"}, .n_segments = 2}, {.vpp = 2, .n_mb = 8}}, /* dense against expert layers */
        {{.segment = {"*E*E", "*E*E", "*E*E", "*E*E"}, .n_segments = 4}, {.pp = 2, .vpp = 2, .n_mb = 8}},
    };
    for (int k = 0; k < countof(cases); k++) {
        double time[3], exposed[3];
        for (int kind = 0; kind < 3; kind++) {
            struct schedule_opts s = cases[k].s;
            struct sim sim;
            s.overlap = kind == 1 ? OVERLAP_DW : kind == 2 ? OVERLAP_EP : OVERLAP_NONE;
            s.delay_dw = kind > 0;
            simulate(&sim, &cases[k].net, s, false);
            time[kind] = sim.makespan;
            exposed[kind] = all_exposed(&sim);
            sim_close(&sim);
        }
        print_message("           case %d: plain %.1f (exposed %.1f), dw %.1f (%.1f), ep %.1f (%.1f)\n", k, time[0],
                      exposed[0], time[1], exposed[1], time[2], exposed[2]);
        assert_true(exposed[1] < exposed[0] && time[1] < time[0]);
        assert_true(2 * exposed[2] < exposed[0] && time[2] < time[1]);
    }
}

/* As host devices run it: one thing at a time in list order, receives that block. */
static void plans_of_all_ranks_end_in_list_order(void **state)
{
    (void)state;
    static const char *const segments[] = {"*E", "*-", "*E*E", "", "E", "*E", "-", "*E", "E", "*", "*E", "E"};
    for (int pp = 1; pp <= 4; pp++)
        for (int vpp = 1; vpp <= 3; vpp++)
            for (int overlap = 0; overlap < 3; overlap++)
                for (int lanes = 0; lanes < 2; lanes++) {
                    struct net_opts o = {.n_segments = pp * vpp};
                    memcpy(o.segment, segments, (size_t)(pp * vpp) * sizeof *segments);
                    struct schedule_opts s = {
                        .pp = pp, .vpp = vpp, .n_mb = 2 * pp, .overlap = (enum overlap_kind)overlap, .delay_dw = true};
                    if (overlap == OVERLAP_EP && pp > 1 && vpp == 1)
                        continue;
                    struct sim sim;
                    simulate(&sim, &o, s, lanes == 0);
                    assert_true(sim.makespan > 0);
                    sim_close(&sim);
                }
}

/* 64 layers, 16 microbatches: placing must not grow with the square of the steps. */
static void large_steps_are_planned_quickly(void **state)
{
    (void)state;
    struct post post;
    struct net n;
    struct err e = {0};
    struct net_opts o = {.segment = {"*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E*E"},
                         .n_segments = 1,
                         .pp = 1,
                         .drop = true};
    post_open(&post);
    net_declare(&n, &o, &post);
    double begin = time_now();
    assert_ok(
        schedule_step(&n.r.g, &(struct schedule_opts){.n_mb = 16, .overlap = OVERLAP_EP, .delay_dw = true}, &n.r.o, &e),
        &e);
    double ordered = time_now();
    assert_ok(rig_plan(&n.r), &n.r.e);
    print_message("           %d steps, %d instances: order %.3f s, plan %.3f s\n", n.r.p.n_steps, n.r.p.n_inst,
                  ordered - begin, time_now() - ordered);
    assert_true(n.r.p.n_steps > 17000);
    assert_true(time_now() - begin < 20); /* about 0.3 s; loaded machines and sanitizers included */
    rig_release(&n.r);
    post_close(&post);
}

/* ---- plans do not change with the speed of the planner --------------------------------------- */

/* Everything a plan says: steps, lanes, waits, and the place of every life of a slot. */
static uint64_t plan_digest(const struct plan *p)
{
    uint64_t h = hash64(&p->frame_bytes, sizeof p->frame_bytes, hash64(&p->work_bytes, sizeof p->work_bytes, 1));
    for (int i = 0; i < p->n_steps; i++) {
        const struct step *s = &p->steps[i];
        const int64_t fields[] = {s->ref.node, s->ref.phase, s->ref.mb, s->lane, s->n_waits, s->waited};
        h = hash64(fields, sizeof fields, h);
        h = hash64(s->wait, (size_t)s->n_waits * sizeof *s->wait, h);
        h = hash64(s->instance, (size_t)p->g->nodes[s->ref.node].phase[s->ref.phase].n_uses * sizeof *s->instance, h);
    }
    for (int i = 0; i < p->n_inst; i++) {
        const struct instance *x = &p->inst[i];
        const int64_t fields[] = {x->slot, x->mb, x->arena, x->offset, x->bytes, x->merged, x->n_uses};
        h = hash64(fields, sizeof fields, h);
    }
    return h;
}

/* The digests were taken from a planner that compared every unit with every other one. */
static void plans_are_those_of_the_exhaustive_planner(void **state)
{
    (void)state;
    static const struct {
        struct setup s;
        uint64_t digest;
    } known[] = {
        {{{.segment = {"*E*-"}, .n_segments = 1, .pp = 1}, {.n_mb = 7, .overlap = OVERLAP_EP}}, 0x829e8c9aadd3f8f5ull},
        {{{.segment = {"*E*-"}, .n_segments = 1, .pp = 1, .drop = true},
          {.n_mb = 64, .overlap = OVERLAP_EP, .delay_dw = true}},
         0xc458fd1a847a3415ull},
        {{{.segment = {"*-", "*E"}, .n_segments = 2, .pp = 2, .pp_rank = 0}, {.pp = 2, .pp_rank = 0, .n_mb = 300}},
         0xc7298a4202baa548ull},
        {{{.segment = {"*-", "*E"}, .n_segments = 2, .pp = 2, .pp_rank = 1, .drop = true},
          {.pp = 2, .pp_rank = 1, .n_mb = 300}},
         0x2c03e7cb46768c52ull},
        {{{.segment = {"*-", "*E", "*-", "E*"}, .n_segments = 4, .pp = 2, .pp_rank = 0},
          {.pp = 2, .vpp = 2, .n_mb = 200}},
         0x74765d3f4add8871ull},
        {{{.segment = {"*-", "*E", "*-", "E*"}, .n_segments = 4, .pp = 2, .pp_rank = 1, .drop = true},
          {.pp = 2, .vpp = 2, .pp_rank = 1, .n_mb = 40, .overlap = OVERLAP_EP, .delay_dw = true}},
         0xa51ee950d3e0b198ull},
        {{{.segment = {"*-", "*E", "*-", "E*"}, .n_segments = 4, .pp = 4, .pp_rank = 1},
          {.pp = 4, .pp_rank = 1, .n_mb = 257, .overlap = OVERLAP_DW}},
         0x701338151b7362acull},
    };
    for (int i = 0; i < countof(known); i++) {
        struct net n;
        struct post post;
        struct err e = {0};
        post_open(&post);
        net_declare(&n, &known[i].s.net, &post);
        assert_ok(schedule_step(&n.r.g, &known[i].s.s, &n.r.o, &e), &e);
        assert_ok(rig_plan(&n.r), &n.r.e);
        uint64_t digest = plan_digest(&n.r.p);
        if (digest != known[i].digest)
            print_message("           setup %d: 0x%llxull\n", i, (unsigned long long)digest);
        assert_int_equal(digest, known[i].digest);
        rig_release(&n.r);
        post_close(&post);
    }
}

/* Thousands of microbatches: what comes from the host lives from the start until it is used, all of it at the same
 * time. */
static void thousands_of_microbatches_are_planned_quickly(void **state)
{
    (void)state;
    struct post post;
    struct net n;
    struct err e = {0};
    static const struct net_opts o = {.segment = {"*-", "*E"}, .n_segments = 2, .pp = 2, .pp_rank = 1};
    post_open(&post);
    net_declare(&n, &o, &post);
    double begin = time_now();
    assert_ok(schedule_step(&n.r.g, &(struct schedule_opts){.pp = 2, .pp_rank = 1, .n_mb = 4096}, &n.r.o, &e), &e);
    assert_ok(rig_plan(&n.r), &n.r.e);
    print_message("           %d steps, %d instances: %.3f s\n", n.r.p.n_steps, n.r.p.n_inst, time_now() - begin);
    assert_true(time_now() - begin < 120); /* about a second of work */
    rig_release(&n.r);
    post_close(&post);
}

static void absurd_numbers_of_microbatches_are_refused(void **state)
{
    (void)state;
    struct post post;
    struct net n;
    struct err e = {0};
    static const struct net_opts o = {.segment = {"*-", "*E"}, .n_segments = 2, .pp = 2};
    post_open(&post);
    net_declare(&n, &o, &post);
    assert_fails(schedule_step(&n.r.g, &(struct schedule_opts){.pp = 2, .n_mb = 1 << 24}, &n.r.o, &e), ST_USAGE, &e,
                 "16777216 microbatches");
    rig_release(&n.r);
    post_close(&post);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(overlap_hides_all_to_alls),
        cmocka_unit_test(plans_of_all_ranks_end_in_list_order),
        cmocka_unit_test(large_steps_are_planned_quickly),
        cmocka_unit_test(plans_are_those_of_the_exhaustive_planner),
        cmocka_unit_test(absurd_numbers_of_microbatches_are_refused),
        cmocka_unit_test(thousands_of_microbatches_are_planned_quickly),
    };
    return cmocka_run_group_tests_name("plan: time of whole steps", tests, NULL, NULL);
}
