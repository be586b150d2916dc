/* plan/: what is saved, what is replayed, who adds and who writes, where in-place is legal, which
 * plans are refused, what the executor and the trace say. Small graphs made by hand; test_random.c
 * makes large ones. */
#include "toy.h"

#include <jansson.h>

/* x -> a -> b -> c, each node's backward reading what the flags say. A gradient flows back the same
 * way and every node adds its weight gradient to a slot of its own. */
enum { CHAIN = 3 };
struct chain {
    struct rig r;
    int source, node[CHAIN], head;
    slot_id y[CHAIN + 1], dy[CHAIN + 1], grad[CHAIN];
};

/* saves[k]: node k's dw reads its input y[k]. */
static void chain_declare(struct chain *c, const bool saves[CHAIN])
{
    struct rig *r = &c->r;
    rig_init(r);
    slot_id w = rig_keep(r, "w", ARENA_PARAM, 8);
    for (int k = 0; k <= CHAIN; k++) {
        char name[16];
        snprintf(name, sizeof name, "y%d", k);
        c->y[k] = rig_slot(r, name, 16);
        snprintf(name, sizeof name, "dy%d", k);
        c->dy[k] = rig_slot(r, name, 16);
    }
    c->source = rig_node(r, "source", LANE_COPY);
    RIG_USES(r, c->source, PH_FWD, 0.5, WRITES(c->y[0]));
    for (int k = 0; k < CHAIN; k++) {
        char name[16];
        snprintf(name, sizeof name, "grad%d", k);
        c->grad[k] = rig_keep(r, name, ARENA_GRAD, 16);
        snprintf(name, sizeof name, "n%d", k);
        c->node[k] = rig_node(r, name, LANE_COMPUTE);
        RIG_USES(r, c->node[k], PH_FWD, 0.1 * k, READS(c->y[k]), READS(w), WRITES(c->y[k + 1]));
        RIG_USES(r, c->node[k], PH_REPLAY, 0.1 * k, READS(c->y[k]), READS(w), WRITES(c->y[k + 1]));
        graph_replay(&r->g, c->y[k + 1], c->node[k]);
        RIG_USES(r, c->node[k], PH_BWD, 0.2, READS(c->dy[k + 1]), READS(w), WRITES(c->dy[k]));
        RIG_USES(r, c->node[k], PH_DW, 0.3, READS(c->dy[k + 1]), READS(saves[k] ? c->y[k] : NO_SLOT), ADDS(c->grad[k]));
    }
    c->head = rig_node(r, "head", LANE_COMPUTE);
    RIG_USES(r, c->head, PH_FWD, 0.7, READS(c->y[CHAIN]), WRITES(c->dy[CHAIN]));
}

static void only_what_the_backward_half_reads_is_saved(void **state)
{
    (void)state;
    struct chain c;
    chain_declare(&c, (const bool[]){false, true, false});
    rig_make(&c.r);
    const struct plan *p = &c.r.p;
    assert_int_equal(find_life(p, c.y[0], false)->arena, ARENA_WORK);
    assert_int_equal(find_life(p, c.y[1], false)->arena, ARENA_FRAME);
    assert_int_equal(find_life(p, c.y[2], false)->arena, ARENA_WORK);
    /* made in the forward half, read in the backward half: saved, though it is a gradient */
    assert_int_equal(find_life(p, c.dy[CHAIN], false)->arena, ARENA_FRAME);
    assert_int_equal(find_life(p, c.dy[0], false)->arena, ARENA_WORK);
    assert_int_equal(p->frame_bytes, 2 * 128);
    assert_true(p->work_bytes < p->work_unshared_bytes);
    assert_int_equal(p->n_replays, 0);
    rig_release(&c.r);
}

static void dropped_slots_are_replayed_once_and_in_forward_order(void **state)
{
    (void)state;
    static const bool all[CHAIN] = {true, true, true};
    struct chain kept, c;
    chain_declare(&kept, all);
    rig_make(&kept.r);
    rig_run(&kept.r, true);
    chain_declare(&c, all);
    assert_int_equal(graph_drop(&c.r.g, "y1", INT64_MAX) + graph_drop(&c.r.g, "y2", INT64_MAX), 2);
    rig_make(&c.r);
    const struct plan *p = &c.r.p;
    assert_int_equal(p->n_replays, 2);
    assert_int_equal(count_steps(p, c.node[0], PH_REPLAY), 1); /* read by two: n1's dw and n1's replay */
    int first = find_step(p, c.node[0], PH_REPLAY), second = find_step(p, c.node[1], PH_REPLAY);
    assert_int_equal(second, first + 1);
    assert_int_equal(find_step(p, c.node[2], PH_DW), second + 1); /* just before the first reader */
    assert_int_equal(find_life(p, c.y[1], false)->arena, ARENA_WORK);
    assert_int_equal(find_life(p, c.y[1], true)->arena, ARENA_WORK);
    assert_int_equal(find_life(p, c.y[0], false)->arena, ARENA_FRAME); /* the replays start from it */
    assert_int_equal(p->frame_bytes, kept.r.p.frame_bytes - 2 * 128);
    c.r.x.poison = true;
    rig_run(&c.r, true);
    assert_int_equal(rig_result(&c.r), rig_result(&kept.r));
    rig_release(&c.r);
    rig_release(&kept.r);
}

/* One node makes two slots; only one is dropped, and the backward of a later node needs both. */
static void a_kept_slot_is_not_touched_by_a_replay(void **state)
{
    (void)state;
    uint64_t result[2];
    for (int drop = 0; drop < 2; drop++) {
        struct rig r;
        rig_init(&r);
        slot_id x = rig_slot(&r, "x", 8), two[2] = {rig_slot(&r, "kept", 8), rig_slot(&r, "other", 8)},
                d = rig_slot(&r, "d", 8);
        slot_id grad = rig_keep(&r, "grad", ARENA_GRAD, 8);
        int source = rig_node(&r, "source", LANE_COMPUTE), pair = rig_node(&r, "pair", LANE_SIDE),
            last = rig_node(&r, "last", LANE_COMPUTE);
        RIG_USES(&r, source, PH_FWD, 1, WRITES(x));
        RIG_USES(&r, pair, PH_FWD, 2, READS(x), WRITES(two[0]), WRITES(two[1]));
        RIG_USES(&r, pair, PH_REPLAY, 2, READS(x), WRITES(two[0]), WRITES(two[1]));
        graph_replay(&r.g, two[0], pair);
        graph_replay(&r.g, two[1], pair);
        RIG_USES(&r, last, PH_FWD, 3, READS(two[0]), READS(two[1]), WRITES(d));
        RIG_USES(&r, last, PH_DW, 4, READS(d), READS(two[1]), READS(two[0]), ADDS(grad));
        if (drop)
            assert_int_equal(graph_drop(&r.g, "other", INT64_MAX), 1);
        rig_make(&r);
        if (drop) {
            const struct step *replay = &r.p.steps[find_step(&r.p, pair, PH_REPLAY)],
                              *dw = &r.p.steps[find_step(&r.p, last, PH_DW)];
            assert_int_equal(r.p.inst[dw->instance[2]].arena, ARENA_FRAME);
            assert_true(replay->instance[1] != dw->instance[2] && replay->t[1].data != dw->t[2].data);
            assert_int_equal(r.p.inst[replay->instance[1]].arena, ARENA_WORK);
            assert_int_equal(replay->instance[2], dw->instance[1]);
        }
        r.x.poison = true;
        rig_run(&r, true);
        result[drop] = rig_result(&r);
        rig_release(&r);
    }
    assert_int_equal(result[0], result[1]);
}

/* Writes 1, 2, 4: exact sums that name their contributors. */
static int put_value(const struct step_ctx *c)
{
    double v = *(const double *)c->self, *out = c->t[0].data;
    out[0] = c->add[0] ? out[0] + v : v;
    return ST_OK;
}

static int copy_value(const struct step_ctx *c)
{
    double *out = c->t[1].data;
    out[0] = ((const double *)c->t[0].data)[0];
    return ST_OK;
}

static void the_first_contribution_writes_and_later_ones_add(void **state)
{
    (void)state;
    static const double value[] = {1, 2, 4};
    struct rig r;
    rig_init(&r);
    slot_id grad = rig_keep(&r, "grad", ARENA_GRAD, 1), sum = rig_slot(&r, "sum", 1),
            copy = rig_keep(&r, "copy", ARENA_STATE, 1);
    for (int k = 0; k < 3; k++) {
        int n = graph_node(&r.g, "put", (enum lane_id)k, &value[k]);
        GRAPH_PHASE(&r.g, n, PH_FWD, put_value, ADDS(grad));
        n = graph_node(&r.g, "put", (enum lane_id)(3 - k), &value[k]);
        GRAPH_PHASE(&r.g, n, PH_FWD, put_value, ADDS(sum));
    }
    int n = graph_node(&r.g, "copy", LANE_COMPUTE, NULL);
    GRAPH_PHASE(&r.g, n, PH_FWD, copy_value, READS(sum), WRITES(copy));
    rig_make(&r);
    const double *g = (const void *)r.m.base[ARENA_GRAD], *s = (const void *)r.m.base[ARENA_STATE];
    r.x.random_lanes = 5;
    rig_run(&r, true);
    assert_true(g[0] == 7 && s[0] == 7);
    rig_run(&r, false); /* later microbatch: persistent sums go on, activations start afresh */
    assert_true(g[0] == 14 && s[0] == 7);
    rig_run(&r, true); /* next step */
    assert_true(g[0] == 7 && s[0] == 7);
    rig_release(&r);
}

/* s is read by `before` and then by `over`, which may write t over it; `after` may read s, too. */
static bool merges(enum lane_id before_lane, bool read_after, enum lane_id after_lane, bool keep_output)
{
    struct rig r;
    rig_init(&r);
    slot_id s = rig_slot(&r, "s", 8), t = rig_slot(&r, "t", 8), grad = rig_keep(&r, "grad", ARENA_GRAD, 8);
    int source = rig_node(&r, "source", LANE_COMPUTE), before = rig_node(&r, "before", before_lane);
    int over = rig_node(&r, "over", LANE_COMPUTE), after = rig_node(&r, "after", after_lane);
    RIG_USES(&r, source, PH_FWD, 1, WRITES(s));
    RIG_USES(&r, before, PH_FWD, 1, READS(s), ADDS(grad));
    RIG_USES(&r, over, PH_FWD, 2, READS(s), WRITES(t));
    graph_inplace(&r.g, over, PH_FWD, s, t);
    RIG_USES(&r, after, PH_FWD, 3, READS(t), READS(read_after ? s : NO_SLOT), ADDS(grad));
    if (keep_output)
        RIG_USES(&r, after, PH_DW, 3, READS(t), ADDS(grad));
    rig_make(&r);
    const struct step *step = &r.p.steps[find_step(&r.p, over, PH_FWD)];
    bool same = step->t[0].data == step->t[1].data;
    assert_int_equal(same, find_life(&r.p, t, false)->merged >= 0);
    rig_release(&r);
    return same;
}

static void in_place_needs_proof_that_the_input_is_dead(void **state)
{
    (void)state;
    assert_true(merges(LANE_COMPUTE, false, LANE_COMPUTE, false));
    assert_true(merges(LANE_COMPUTE, false, LANE_SIDE, false));
    /* earlier in the list, but on a lane nobody waited for */
    assert_false(merges(LANE_SIDE, false, LANE_COMPUTE, false));
    /* read later, on this lane or another */
    assert_false(merges(LANE_COMPUTE, true, LANE_COMPUTE, false));
    assert_false(merges(LANE_COMPUTE, true, LANE_COMM, false));
    /* a saved output has its place in the frame */
    assert_false(merges(LANE_COMPUTE, false, LANE_COMPUTE, true));
}

/* dpre may be written over pre in bwd, unless another lane's weight gradient
 * reads pre afterwards. */
static void a_later_weight_gradient_on_another_lane_prevents_in_place(void **state)
{
    (void)state;
    for (int side = 0; side < 2; side++) {
        struct rig r;
        rig_init(&r);
        slot_id pre = rig_slot(&r, "pre", 8), d = rig_slot(&r, "d", 8), dpre = rig_slot(&r, "dpre", 8);
        slot_id grad = rig_keep(&r, "grad", ARENA_GRAD, 8);
        int dw = rig_node(&r, "dw", side ? LANE_SIDE : LANE_COMPUTE), act = rig_node(&r, "act", LANE_COMPUTE);
        RIG_USES(&r, dw, PH_FWD, 1, WRITES(pre));
        RIG_USES(&r, dw, PH_DW, 5, READS(dpre), READS(side ? pre : NO_SLOT), ADDS(grad));
        RIG_USES(&r, act, PH_FWD, 2, READS(pre), WRITES(d));
        RIG_USES(&r, act, PH_BWD, 3, READS(d), READS(pre), WRITES(dpre));
        graph_inplace(&r.g, act, PH_BWD, pre, dpre);
        rig_make(&r);
        assert_int_equal(find_life(&r.p, dpre, false)->merged >= 0, !side);
        assert_int_equal(find_life(&r.p, dpre, false)->arena, side ? ARENA_WORK : ARENA_FRAME);
        rig_release(&r);
    }
}

static void waits_stand_only_between_lanes(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    slot_id a = rig_slot(&r, "a", 4), b = rig_slot(&r, "b", 4), c = rig_slot(&r, "c", 4), d = rig_slot(&r, "d", 4);
    int n0 = rig_node(&r, "n0", LANE_COMPUTE), n1 = rig_node(&r, "n1", LANE_COMPUTE),
        n2 = rig_node(&r, "n2", LANE_COMM), n3 = rig_node(&r, "n3", LANE_COMM), n4 = rig_node(&r, "n4", LANE_COMPUTE);
    RIG_USES(&r, n0, PH_FWD, 1, WRITES(a));
    RIG_USES(&r, n1, PH_FWD, 1, READS(a), WRITES(b));
    RIG_USES(&r, n2, PH_FWD, 1, READS(b), WRITES(c));
    RIG_USES(&r, n3, PH_FWD, 1, READS(a), READS(c), WRITES(d)); /* n2's wait already proves that a is there */
    RIG_USES(&r, n4, PH_FWD, 1, READS(d), READS(c), WRITES(NO_SLOT));
    assert_ok(rig_plan(&r), &r.e);
    const struct step *s = r.p.steps;
    assert_int_equal(r.p.n_waits, 2);
    assert_int_equal(s[1].n_waits, 0);
    assert_int_equal(s[2].n_waits, 1);
    assert_int_equal(s[2].wait[0], 1);
    assert_int_equal(s[3].n_waits, 0);
    assert_int_equal(s[4].n_waits, 1);
    assert_int_equal(s[4].wait[0], 3);
    assert_int_equal(s[4].lane_pos, 2);
    rig_release(&r);
}

static void what_a_wait_proves_is_not_waited_for_again(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    slot_id a = rig_slot(&r, "a", 4), b = rig_slot(&r, "b", 4), c = rig_slot(&r, "c", 4);
    int n0 = rig_node(&r, "n0", LANE_COMPUTE), n1 = rig_node(&r, "n1", LANE_SIDE), n2 = rig_node(&r, "n2", LANE_COMM),
        n3 = rig_node(&r, "n3", LANE_COMM);
    RIG_USES(&r, n0, PH_FWD, 1, WRITES(a));
    RIG_USES(&r, n1, PH_FWD, 1, READS(a), WRITES(b));
    RIG_USES(&r, n2, PH_FWD, 1, READS(b), READS(a), WRITES(c)); /* n1 waited for n0, and n2 waits for n1 */
    RIG_USES(&r, n3, PH_FWD, 1, READS(a), READS(b), READS(c), WRITES(NO_SLOT)); /* after n2 on its lane */
    assert_ok(rig_plan(&r), &r.e);
    assert_int_equal(r.p.n_waits, 2);
    assert_int_equal(r.p.steps[2].n_waits, 1);
    assert_int_equal(r.p.steps[2].wait[0], 1);
    rig_release(&r);
}

/* One persistent cell, written, read by two lanes, written again: the second write must not
 * overtake. */
static void a_write_waits_for_the_readers_before_it(void **state)
{
    (void)state;
    static const double value[] = {1, 2};
    struct rig r;
    rig_init(&r);
    slot_id cell = rig_keep(&r, "cell", ARENA_STATE, 1), seen[3];
    static const enum lane_id lane[3] = {LANE_COMM, LANE_COPY, LANE_COMM};
    for (int k = 0; k < 3; k++)
        seen[k] = rig_keep(&r, "seen", ARENA_GRAD, 1);
    for (int k = 0; k < 2; k++) {
        int put = graph_node(&r.g, "put", k ? LANE_SIDE : LANE_COMPUTE, &value[k]);
        GRAPH_PHASE(&r.g, put, PH_FWD, put_value, WRITES(cell));
        for (int i = 2 * k; i < 2 + k; i++) {
            int get = graph_node(&r.g, "get", lane[i], NULL);
            GRAPH_PHASE(&r.g, get, PH_FWD, copy_value, READS(cell), WRITES(seen[i]));
        }
    }
    rig_make(&r);
    const char *grad = r.m.base[ARENA_GRAD];
    for (uint64_t seed = 1; seed <= 50; seed++) {
        r.x.random_lanes = seed;
        rig_run(&r, true);
        for (int k = 0; k < 3; k++)
            assert_true(*(const double *)(const void *)(grad + k * DEV_ALIGN) == (k < 2 ? 1 : 2));
    }
    rig_release(&r);
}

/* Two microbatches in flight, as a pipeline has them: F0 F1 B0 B1. */
static void microbatches_in_flight_have_frames_of_their_own(void **state)
{
    (void)state;
    static const bool all[CHAIN] = {true, true, true};
    for (int drop = 0; drop < 2; drop++) {
        struct chain one, two;
        chain_declare(&one, all);
        rig_make(&one.r);
        rig_run(&one.r, true);
        rig_run(&one.r, false);
        chain_declare(&two, all);
        if (drop)
            assert_int_equal(graph_drop(&two.r.g, "y*", INT64_MAX), CHAIN);
        for (int mb = 0; mb < 2; mb++)
            for (int n = 0; n < two.r.g.n_nodes; n++)
                assert_ok(order_add(&two.r.o, n, PH_FWD, mb, &two.r.e), &two.r.e);
        for (int mb = 0; mb < 2; mb++)
            for (int k = CHAIN - 1; k >= 0; k--) {
                assert_ok(order_add(&two.r.o, two.node[k], PH_BWD, mb, &two.r.e), &two.r.e);
                assert_ok(order_add(&two.r.o, two.node[k], PH_DW, mb, &two.r.e), &two.r.e);
            }
        rig_make(&two.r);
        assert_int_equal(two.r.p.n_mb, 2);
        assert_int_equal(two.r.p.n_replays, drop ? 2 * 2 : 0); /* y3 is not needed again */
        assert_int_equal(two.r.p.n_frames, 2);
        assert_int_equal(two.r.p.frame_bytes, 2 * (drop ? 2 * 128 : one.r.p.frame_bytes));
        assert_int_equal(two.r.m.allocated[ARENA_FRAME], two.r.p.frame_bytes);
        two.r.x.poison = true;
        for (uint64_t seed = 0; seed < 20; seed++) {
            two.r.x.random_lanes = seed;
            rig_run(&two.r, true);
            assert_int_equal(rig_result(&two.r), rig_result(&one.r));
        }
        struct buf out;
        buf_init(&out, 0);
        plan_print_steps(&two.r.p, &out);
        plan_print_memory(&two.r.p, &out);
        assert_non_null(strstr(out.text, "[mb 1]"));
        assert_non_null(strstr(out.text, "2 microbatches with 2 frames"));
        buf_release(&out);
        rig_release(&one.r);
        rig_release(&two.r);
    }
}

/* ---- errors ---------------------------------------------------------------------------------- */

static void impossible_graphs_are_refused(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    slot_id a = rig_slot(&r, "a", 4), b = rig_slot(&r, "b", 4);
    int n = rig_node(&r, "early", LANE_COMPUTE);
    RIG_USES(&r, n, PH_FWD, 1, READS(a), WRITES(b));
    assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "node early (fwd) reads slot a, which nothing has written");
    rig_release(&r);

    rig_init(&r);
    a = rig_slot(&r, "a", 4);
    int n0 = rig_node(&r, "n0", LANE_COMPUTE), n1 = rig_node(&r, "n1", LANE_SIDE);
    RIG_USES(&r, n0, PH_FWD, 1, WRITES(a));
    RIG_USES(&r, n1, PH_FWD, 1, WRITES(a));
    assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "node n1 (fwd) writes slot a a second time");
    rig_release(&r);

    rig_init(&r);
    a = rig_slot(&r, "a", 4);
    n0 = rig_node(&r, "n0", LANE_COMPUTE);
    RIG_USES(&r, n0, PH_FWD, 1, WRITES(a));
    graph_replay(&r.g, a, n0);
    assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "names node n0 as its replay, which does not write it");
    rig_release(&r);

    rig_init(&r);
    n0 = rig_node(&r, "n0", LANE_COMPUTE);
    RIG_USES(&r, n0, PH_FWD, 1, WRITES(NO_SLOT));
    RIG_USES(&r, n0, PH_FWD, 1, WRITES(NO_SLOT));
    assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "declared twice");
    rig_release(&r);

    rig_init(&r);
    n0 = rig_node(&r, "n0", LANE_COMPUTE);
    slot_id used = rig_slot(&r, "used", 8), other = rig_slot(&r, "other", 8);
    RIG_USES(&r, n0, PH_FWD, 1, WRITES(used));
    graph_inplace(&r.g, n0, PH_FWD, used, other);
    assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "slots used and other cannot be one");
    rig_release(&r);
}

static void a_replay_that_needs_itself_is_refused(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    slot_id a = rig_slot(&r, "a", 4), b = rig_slot(&r, "b", 4), grad = rig_keep(&r, "grad", ARENA_GRAD, 4);
    int n0 = rig_node(&r, "n0", LANE_COMPUTE), n1 = rig_node(&r, "n1", LANE_COMPUTE);
    RIG_USES(&r, n0, PH_FWD, 1, WRITES(a));
    RIG_USES(&r, n0, PH_REPLAY, 1, READS(b), WRITES(a));
    RIG_USES(&r, n1, PH_FWD, 1, READS(a), WRITES(b));
    RIG_USES(&r, n1, PH_REPLAY, 1, READS(a), WRITES(b));
    RIG_USES(&r, n1, PH_DW, 1, READS(b), ADDS(grad));
    graph_replay(&r.g, a, n0);
    graph_replay(&r.g, b, n1);
    assert_int_equal(graph_drop(&r.g, "full", INT64_MAX), 2);
    assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "the replay of slot b needs slot b itself");
    rig_release(&r);
}

/* b is made of a, which is kept, by a replay alone: no forward step writes it, and it is not kept. */
static void a_slot_that_is_dropped_from_the_start_needs_no_forward_phase(void **state)
{
    (void)state;
    for (int by_replay = 0; by_replay < 2; by_replay++) {
        struct rig r;
        rig_init(&r);
        slot_id a = rig_slot(&r, "a", 64), b = rig_slot(&r, "b", 64), grad = rig_keep(&r, "grad", ARENA_GRAD, 64);
        int n0 = rig_node(&r, "n0", LANE_COMPUTE), n1 = rig_node(&r, "n1", LANE_COMPUTE),
            n2 = rig_node(&r, "n2", LANE_COMPUTE);
        RIG_USES(&r, n0, PH_FWD, 1, WRITES(a));
        RIG_USES(&r, n0, PH_DW, 1, READS(a), ADDS(grad));
        if (by_replay) {
            RIG_USES(&r, n1, PH_REPLAY, 2, READS(a), WRITES(b));
            graph_replay(&r.g, b, n1);
            r.g.slots[b].dropped = true;
        }
        RIG_USES(&r, n2, PH_DW, 3, READS(b), ADDS(grad));
        if (!by_replay) {
            assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "reads slot b, which nothing has written yet");
        } else {
            assert_ok(rig_plan(&r), &r.e);
            assert_int_equal(r.p.n_replays, 1);
            assert_int_equal(r.p.frame_bytes, round_up(64 * 8, DEV_ALIGN)); /* a alone */
        }
        rig_release(&r);
    }
}

static void one_place_in_memory_has_one_shape(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    slot_id a = graph_persistent(&r.g, "a", tensor_1d(NULL, DT_F64, 4), ARENA_GRAD, 0);
    assert_int_equal(graph_persistent(&r.g, "again", tensor_1d(NULL, DT_F64, 4), ARENA_GRAD, 0), a);
    assert_int_equal(graph_persistent(&r.g, "other", tensor_1d(NULL, DT_F64, 4), ARENA_PARAM, 0), a + 1);
    graph_persistent(&r.g, "wrong", tensor_1d(NULL, DT_F64, 5), ARENA_GRAD, 0);
    assert_fails(rig_plan(&r), ST_INTERNAL, &r.e, "shares its memory with a but not its shape");
    rig_release(&r);
}

static void names_mean_slots_that_can_be_recomputed(void **state)
{
    (void)state;
    static const bool all[CHAIN] = {true, true, true};
    struct chain c;
    struct buf names;
    chain_declare(&c, all);
    assert_int_equal(graph_drop(&c.r.g, "nonsense", INT64_MAX), 0);
    assert_int_equal(graph_drop(&c.r.g, "y0", INT64_MAX), 0); /* exists, has no replay */
    for (int i = 1; i <= CHAIN; i++)
        c.r.g.slots[c.y[i]].layer = i - 1;
    assert_int_equal(graph_drop(&c.r.g, "y3", 2), 0); /* exists, in a later layer */
    assert_int_equal(graph_drop(&c.r.g, "y*", 2), 2);
    assert_true(c.r.g.slots[c.y[1]].dropped && c.r.g.slots[c.y[2]].dropped && !c.r.g.slots[c.y[3]].dropped);
    assert_int_equal(graph_drop(&c.r.g, "full", 3), 3);
    assert_true(c.r.g.slots[c.y[3]].dropped);
    buf_init(&names, 0);
    graph_droppable(&c.r.g, &names);
    assert_string_equal(names.text, "y1, y2, y3, ");
    buf_release(&names);
    rig_release(&c.r);
}

static int fail_step(const struct step_ctx *c) { return err_set(c->lane->err, ST_INVALID, "the op said no"); }

static void a_failing_step_names_its_node(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    graph_scope(&r.g, 3, "attn");
    int n = graph_node(&r.g, "core", LANE_COMPUTE, NULL);
    GRAPH_PHASE(&r.g, n, PH_FWD, fail_step, WRITES(NO_SLOT));
    rig_make(&r);
    struct run_info run = {.step = 12};
    assert_fails(exec_run(&r.x, &r.p, &run, &r.e), ST_INVALID, &r.e, "the op said no");
    assert_string_equal(r.e.trail, "node 3.attn.core (fwd), step 12, plan 'toy'");
    rig_release(&r);
}

static void the_first_bad_value_is_found(void **state)
{
    (void)state;
    struct chain c;
    chain_declare(&c, (const bool[]){true, true, true});
    rig_make(&c.r);
    c.r.x.find_nan = true;
    rig_run(&c.r, true);
    ((double *)(void *)c.r.m.base[ARENA_PARAM])[5] = INFINITY;
    struct run_info run = {.first_mb = true};
    assert_fails(exec_run(&c.r.x, &c.r.p, &run, &c.r.e), ST_NONFINITE, &c.r.e,
                 "inf at element 5 of slot y1, written by node n0 (fwd)");
    rig_release(&c.r);
}

static void waits_in_a_circle_are_reported_not_waited_for(void **state)
{
    (void)state;
    struct chain c;
    chain_declare(&c, (const bool[]){true, true, true});
    rig_make(&c.r);
    c.r.p.steps[0].wait[c.r.p.steps[0].n_waits++] = 1; /* the copy waits for the compute that waits for it */
    c.r.x.random_lanes = 1;
    struct run_info run = {.first_mb = true};
    assert_fails(exec_run(&c.r.x, &c.r.p, &run, &c.r.e), ST_INTERNAL, &c.r.e, "stuck");
    rig_release(&c.r);
}

static void a_plan_does_not_bind_to_less_memory_than_it_needs(void **state)
{
    (void)state;
    struct chain c;
    chain_declare(&c, (const bool[]){true, true, true});
    assert_ok(rig_plan(&c.r), &c.r.e);
    memory_reserve_max(&c.r.m, ARENA_FRAME, c.r.p.frame_bytes);
    memory_reserve_max(&c.r.m, ARENA_WORK, c.r.p.work_bytes - 1 - DEV_ALIGN);
    assert_ok(memory_commit(&c.r.m, &c.r.dev, &c.r.e), &c.r.e);
    assert_fails(plan_bind(&c.r.p, &c.r.m, &c.r.e), ST_INTERNAL, &c.r.e, "lies outside arena workspace");
    rig_release(&c.r);
}

/* A device with room for the first arenas only. */
static int refuse_large(struct dev *d, int64_t bytes, void **out, struct err *e)
{
    (void)d;
    return bytes > 1000 ? err_set(e, ST_NOMEM, "the device has no room")
                        : mem_aligned(out, (size_t)bytes, DEV_ALIGN, e);
}

/* Offsets in a frame are sums: 2^63 bytes and more would be negative ones. */
static void activations_that_cannot_be_counted_are_refused(void **state)
{
    (void)state;
    struct rig r;
    enum { N = 5 };
    slot_id y[N], dy;
    rig_init(&r);
    for (int k = 0; k < N; k++) {
        char name[16];
        snprintf(name, sizeof name, "y%d", k);
        y[k] = rig_slot(&r, name, (int64_t)1 << 57); /* doubles: 2^60 bytes each */
    }
    dy = rig_slot(&r, "dy", 16);
    int node = rig_node(&r, "wide", LANE_COMPUTE);
    RIG_USES(&r, node, PH_FWD, 0.1, WRITES(y[0]), WRITES(y[1]), WRITES(y[2]), WRITES(y[3]), WRITES(y[4]), WRITES(dy));
    RIG_USES(&r, node, PH_BWD, 0.1, READS(dy), READS(y[0]), READS(y[1]), READS(y[2]), READS(y[3]), READS(y[4]));
    assert_fails(rig_plan(&r), ST_INVALID, &r.e, "more than can be counted");
    rig_release(&r);
}

static void too_large_a_plan_is_refused_with_its_sizes(void **state)
{
    (void)state;
    struct rig r;
    rig_init(&r);
    struct dev_vt vt = *r.dev.vt;
    const struct dev_vt *real = r.dev.vt;
    vt.alloc = refuse_large;
    r.dev.vt = &vt;
    memory_reserve(&r.m, ARENA_PARAM, 100);
    memory_reserve_max(&r.m, ARENA_FRAME, 5000);
    assert_fails(memory_commit(&r.m, &r.dev, &r.e), ST_NOMEM, &r.e, "parameters 128 B");
    assert_non_null(strstr(r.e.msg, "no room"));
    assert_non_null(strstr(r.e.hint, "plan.recompute"));
    assert_null(r.m.base[ARENA_PARAM]); /* what was taken is given back */
    r.dev.vt = real;
    rig_release(&r);
}

/* ---- trace and text -------------------------------------------------------------------------- */

static void the_trace_is_json_with_one_event_per_step(void **state)
{
    (void)state;
    struct chain c;
    struct err e = {0};
    char *dir = temp_dir(), *path = path_join(dir, "trace.json");
    chain_declare(&c, (const bool[]){true, true, true});
    graph_cost(&c.r.g, c.node[0], PH_FWD, 2e9, 1);
    rig_make(&c.r);
    int n = c.r.p.n_steps;
    assert_ok(trace_open(&c.r.x.trace, n + 3, &e), &e);
    rig_run(&c.r, true);
    rig_run(&c.r, false); /* only three of these fit */
    assert_ok(trace_write(c.r.x.trace, path, &e), &e);
    json_error_t je;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &je);
    assert_non_null(root);
    int events = 0, names = 0, dropped = 0;
    size_t i;
    json_t *ev;
    json_array_foreach(root, i, ev)
    {
        const char *ph = json_string_value(json_object_get(ev, "ph"));
        assert_non_null(ph);
        names += strcmp(ph, "M") == 0;
        dropped += strcmp(ph, "i") == 0;
        if (strcmp(ph, "X") != 0)
            continue;
        const struct step *s = &c.r.p.steps[json_integer_value(json_object_get(json_object_get(ev, "args"), "step"))];
        assert_int_equal(json_integer_value(json_object_get(ev, "tid")), s->lane);
        assert_int_equal(json_array_size(json_object_get(json_object_get(ev, "args"), "waits")), s->n_waits);
        assert_true(json_number_value(json_object_get(ev, "ts")) >= 0 &&
                    json_number_value(json_object_get(ev, "dur")) >= 0);
        assert_int_equal(json_integer_value(json_object_get(json_object_get(ev, "args"), "mb")), 0);
        if (events == 1) {
            assert_string_equal(json_string_value(json_object_get(ev, "name")), "n0 fwd");
            assert_true(json_number_value(json_object_get(json_object_get(ev, "args"), "gflop")) == 2);
        }
        events++;
    }
    assert_int_equal(events, n + 3);
    assert_int_equal(names, 1 + LANE_COUNT);
    assert_int_equal(dropped, 1);
    json_decref(root);
    trace_close(c.r.x.trace);
    rig_release(&c.r);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(path);
    free(dir);
}

static void plans_print_their_steps_and_memory(void **state)
{
    (void)state;
    struct chain c;
    struct buf out;
    chain_declare(&c, (const bool[]){true, true, true});
    assert_int_equal(graph_drop(&c.r.g, "y2", INT64_MAX), 1);
    rig_make(&c.r);
    buf_init(&out, 0);
    plan_print_steps(&c.r.p, &out);
    plan_print_memory(&c.r.p, &out);
    memory_print(&c.r.m, &out);
    assert_false(out.failed);
    static const char *const wanted[] = {
        "compute  replay  n1", "[wait 0]", "+grad1@g", "1 replays", "y1", "frames", "total"};
    for (int i = 0; i < countof(wanted); i++)
        if (strstr(out.text, wanted[i]) == NULL)
            fail_msg("'%s' is not in:\n%s", wanted[i], out.text);
    buf_release(&out);
    rig_release(&c.r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_what_the_backward_half_reads_is_saved),
        cmocka_unit_test(dropped_slots_are_replayed_once_and_in_forward_order),
        cmocka_unit_test(a_kept_slot_is_not_touched_by_a_replay),
        cmocka_unit_test(the_first_contribution_writes_and_later_ones_add),
        cmocka_unit_test(in_place_needs_proof_that_the_input_is_dead),
        cmocka_unit_test(a_later_weight_gradient_on_another_lane_prevents_in_place),
        cmocka_unit_test(waits_stand_only_between_lanes),
        cmocka_unit_test(what_a_wait_proves_is_not_waited_for_again),
        cmocka_unit_test(a_write_waits_for_the_readers_before_it),
        cmocka_unit_test(microbatches_in_flight_have_frames_of_their_own),
        cmocka_unit_test(impossible_graphs_are_refused),
        cmocka_unit_test(a_replay_that_needs_itself_is_refused),
        cmocka_unit_test(a_slot_that_is_dropped_from_the_start_needs_no_forward_phase),
        cmocka_unit_test(one_place_in_memory_has_one_shape),
        cmocka_unit_test(names_mean_slots_that_can_be_recomputed),
        cmocka_unit_test(a_failing_step_names_its_node),
        cmocka_unit_test(the_first_bad_value_is_found),
        cmocka_unit_test(waits_in_a_circle_are_reported_not_waited_for),
        cmocka_unit_test(a_plan_does_not_bind_to_less_memory_than_it_needs),
        cmocka_unit_test(activations_that_cannot_be_counted_are_refused),
        cmocka_unit_test(too_large_a_plan_is_refused_with_its_sizes),
        cmocka_unit_test(the_trace_is_json_with_one_event_per_step),
        cmocka_unit_test(plans_print_their_steps_and_memory),
    };
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
