/* Gathers and reductions of units: where order_prefetch() puts them, that the planner's memory is
 * that of two units however many there are, that no legal interleaving of lanes changes a bit, and
 * that a gradient which grows after its reduction is refused. */
#include "toy.h"

enum { WIDTH = 32, MOST_UNITS = 16 };

/* A chain of units: x' = f(x, w), dx = f(dx', w), dw = f(dx', x). Weights are gathered, gradients
 * reduced, by nodes on the comm lane. */
struct chain {
    struct rig r;
    int n, gather[MOST_UNITS], reduce[MOST_UNITS], work[MOST_UNITS];
    slot_id w[MOST_UNITS], dw[MOST_UNITS];
};

static void declare_unit(struct chain *c, int k, slot_id *x, slot_id *dx)
{
    struct rig *r = &c->r;
    char name[32];
    snprintf(name, sizeof name, "%d", k);
    graph_scope(&r->g, k, "unit");
    slot_id shard = rig_keep(r, "shard", ARENA_PARAM, WIDTH / 4), grad = rig_keep(r, "grad", ARENA_GRAD, WIDTH / 4);
    c->w[k] = rig_slot(r, "w", WIDTH);
    c->dw[k] = rig_slot(r, "dw", WIDTH);
    graph_sum(&r->g, c->dw[k]);
    c->gather[k] = rig_node(r, "gather", LANE_COMM);
    RIG_USES(r, c->gather[k], PH_FWD, 0.1, READS(shard), WRITES(c->w[k]));
    RIG_USES(r, c->gather[k], PH_REPLAY, 0.1, READS(shard), WRITES(c->w[k]));
    graph_replay(&r->g, c->w[k], c->gather[k]);
    graph_role(&r->g, c->gather[k], ROLE_GATHER);
    r->g.slots[c->w[k]].dropped = r->g.slots[c->w[k]].weight = true;
    c->reduce[k] = rig_node(r, "reduce", LANE_COMM);
    RIG_USES(r, c->reduce[k], PH_DW, 0.2, READS(c->dw[k]), ADDS(grad));
    graph_role(&r->g, c->reduce[k], ROLE_REDUCE);
    slot_id y = rig_slot(r, "y", 4), dy = rig_slot(r, "dy", 4);
    c->work[k] = rig_node(r, "work", LANE_COMPUTE);
    RIG_USES(r, c->work[k], PH_FWD, 0.3, READS(*x), READS(c->w[k]), WRITES(y));
    RIG_USES(r, c->work[k], PH_BWD, 0.4, READS(dy), READS(c->w[k]), WRITES(*dx));
    RIG_USES(r, c->work[k], PH_DW, 0.5, READS(dy), READS(*x), ADDS(c->dw[k]));
    *x = y;
    *dx = dy;
}

static void chain_open(struct chain *c, int n)
{
    *c = (struct chain){.n = n};
    rig_init(&c->r);
    slot_id x = rig_slot(&c->r, "x", 4), dx = rig_slot(&c->r, "dx", 4);
    graph_scope(&c->r.g, -1, "start");
    int start = rig_node(&c->r, "start", LANE_COMPUTE);
    RIG_USES(&c->r, start, PH_FWD, 0.7, WRITES(x));
    for (int k = 0; k < n; k++)
        declare_unit(c, k, &x, &dx);
    graph_scope(&c->r.g, n, "end");
    int end = rig_node(&c->r, "end", LANE_COMPUTE);
    RIG_USES(&c->r, end, PH_BWD, 0.8, READS(x), WRITES(dx));
}

static void chain_plan(struct chain *c, bool delay_dw)
{
    assert_ok(schedule_plain(&c->r.g, delay_dw, &c->r.o, &c->r.e), &c->r.e);
    assert_ok(order_prefetch(&c->r.g, &c->r.o, &c->r.e), &c->r.e);
    rig_make(&c->r);
}

static void weights_come_one_unit_ahead(void **state)
{
    (void)state;
    struct chain c;
    chain_open(&c, 6);
    chain_plan(&c, false);
    for (int k = 0; k < c.n; k++) {
        int gathered = find_step(&c.r.p, c.gather[k], PH_FWD), again = find_step(&c.r.p, c.gather[k], PH_REPLAY);
        assert_int_equal(count_steps(&c.r.p, c.gather[k], PH_FWD), 1);
        assert_int_equal(count_steps(&c.r.p, c.gather[k], PH_REPLAY), 1);
        assert_true(gathered < find_step(&c.r.p, c.work[k], PH_FWD) && again < find_step(&c.r.p, c.work[k], PH_BWD));
        if (k > 0) /* listed before the unit in front of it computes, after the one before that */
            assert_true(gathered < find_step(&c.r.p, c.work[k - 1], PH_FWD));
        if (k > 1)
            assert_true(gathered > find_step(&c.r.p, c.work[k - 2], PH_FWD));
        if (k < c.n - 1)
            assert_true(again < find_step(&c.r.p, c.work[k + 1], PH_BWD));
        assert_true(find_step(&c.r.p, c.reduce[k], PH_DW) > find_step(&c.r.p, c.work[k], PH_DW));
    }
    rig_release(&c.r);
}

/* Two units of weights, two of gradients and what is computed with; the more units, the same. */
static void memory_is_that_of_two_units(void **state)
{
    (void)state;
    for (int delay = 0; delay < 2; delay++) {
        int64_t bytes[2];
        for (int i = 0; i < 2; i++) {
            struct chain c;
            chain_open(&c, i == 0 ? 6 : MOST_UNITS);
            chain_plan(&c, delay);
            bytes[i] = c.r.p.work_bytes;
            rig_release(&c.r);
        }
        assert_int_equal(bytes[0], bytes[1]);
        assert_true(bytes[0] <= 4 * WIDTH * 8 + 4 * DEV_ALIGN);
    }
}

static uint64_t result_of(int n, bool prefetch, bool delay_dw, uint64_t lanes)
{
    struct chain c;
    chain_open(&c, n);
    if (prefetch)
        chain_plan(&c, delay_dw);
    else
        rig_make(&c.r); /* gathers where they are declared, replays where they are needed */
    c.r.x.random_lanes = lanes;
    c.r.x.poison = lanes != 0;
    rig_run(&c.r, true);
    rig_run(&c.r, false);
    uint64_t result = rig_result(&c.r);
    rig_release(&c.r);
    return result;
}

static void no_interleaving_changes_a_bit(void **state)
{
    (void)state;
    uint64_t plain = result_of(7, false, false, 0);
    for (uint64_t lanes = 0; lanes < 60; lanes++)
        assert_true(result_of(7, true, lanes % 2, lanes) == plain);
}

/* The mistake of a reduction that starts before the last contribution. */
static void a_gradient_that_grows_after_its_reduction_is_refused(void **state)
{
    (void)state;
    struct chain c;
    struct err e = {0};
    chain_open(&c, 3);
    graph_scope(&c.r.g, -1, "late");
    assert_ok(schedule_plain(&c.r.g, false, &c.r.o, &c.r.e), &c.r.e);
    int reduce = -1, dw = -1;
    for (int i = 0; i < c.r.o.n; i++) {
        reduce = c.r.o.list[i].node == c.reduce[1] ? i : reduce;
        dw = c.r.o.list[i].node == c.work[1] && c.r.o.list[i].phase == PH_DW ? i : dw;
    }
    assert_true(dw >= 0 && reduce > dw);
    struct step_ref kept = c.r.o.list[dw];
    memmove(&c.r.o.list[dw], &c.r.o.list[dw + 1], (size_t)(reduce - dw) * sizeof kept);
    c.r.o.list[reduce] = kept;
    assert_fails(order_prefetch(&c.r.g, &c.r.o, &e), ST_INTERNAL, &e, "which has been reduced already");
    rig_release(&c.r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_come_one_unit_ahead),
        cmocka_unit_test(memory_is_that_of_two_units),
        cmocka_unit_test(no_interleaving_changes_a_bit),
        cmocka_unit_test(a_gradient_that_grows_after_its_reduction_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
