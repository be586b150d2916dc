/* plan/: slots that wait in host memory. What is copied and when, what stays and why, and that the memory of the device
 * does not grow with the number of layers. Bits under every schedule: test_random.c, test_step.c, tests/model. */
#include "toy.h"

/* x -> y1 -> y2 ...: one node a layer, whose weight gradient reads its input. */
enum { MOST = 24, WIDTH = 64 };
struct tower {
    struct rig r;
    int n, node[MOST];
    slot_id y[MOST + 1], dy[MOST + 1];
};

static void tower_declare(struct tower *t, int n)
{
    struct rig *r = &t->r;
    char name[16];
    t->n = n;
    rig_init(r);
    for (int k = 0; k <= n; k++) {
        graph_scope(&r->g, k, "tower");
        t->y[k] = rig_slot(r, "y", WIDTH);
        t->dy[k] = rig_slot(r, "dy", WIDTH);
    }
    graph_scope(&r->g, 0, "tower");
    int source = rig_node(r, "source", LANE_COMPUTE);
    RIG_USES(r, source, PH_FWD, 0.5, WRITES(t->y[0]));
    for (int k = 0; k < n; k++) {
        graph_scope(&r->g, k, "tower");
        snprintf(name, sizeof name, "grad%d", k);
        slot_id grad = rig_keep(r, name, ARENA_GRAD, WIDTH);
        t->node[k] = rig_node(r, "node", LANE_COMPUTE);
        RIG_USES(r, t->node[k], PH_FWD, 0.1 * k, READS(t->y[k]), WRITES(t->y[k + 1]));
        RIG_USES(r, t->node[k], PH_REPLAY, 0.1 * k, READS(t->y[k]), WRITES(t->y[k + 1]));
        graph_replay(&r->g, t->y[k + 1], t->node[k]);
        RIG_USES(r, t->node[k], PH_BWD, 0.2, READS(t->dy[k + 1]), WRITES(t->dy[k]));
        RIG_USES(r, t->node[k], PH_DW, 0.3, READS(t->dy[k + 1]), READS(t->y[k]), ADDS(grad));
    }
    graph_scope(&r->g, n, "tower");
    int head = rig_node(r, "head", LANE_COMPUTE);
    RIG_USES(r, head, PH_FWD, 0.7, READS(t->y[n]), WRITES(t->dy[n]));
}

static struct offload_count tower_plan(struct tower *t, const char *name, int64_t layers, int64_t min_elems)
{
    struct offload_count count;
    if (name != NULL)
        assert_true(graph_offload(&t->r.g, name, NULL, layers) > 0);
    assert_ok(schedule_plain(&t->r.g, false, &t->r.o, &t->r.e), &t->r.e);
    assert_ok(order_offload(&t->r.g, &t->r.o, min_elems, &count, &t->r.e), &t->r.e);
    rig_make(&t->r);
    return count;
}

static uint64_t tower_result(struct tower *t)
{
    t->r.x.poison = true;
    rig_run(&t->r, true);
    uint64_t want = rig_result(&t->r);
    for (uint64_t order = 1; order <= 50; order++) {
        t->r.x.random_lanes = order;
        rig_run(&t->r, true);
        assert_int_equal(rig_result(&t->r), want);
    }
    return want;
}

static int host_copies(const struct plan *p, enum phase_id ph)
{
    int n = 0;
    for (int i = 0; i < p->n_steps; i++)
        n += p->g->nodes[p->steps[i].ref.node].role == ROLE_OFFLOAD && p->steps[i].ref.phase == ph;
    return n;
}

static void what_is_saved_is_copied_out_once_and_back_once(void **state)
{
    (void)state;
    struct tower plain, t;
    tower_declare(&plain, 6);
    tower_plan(&plain, NULL, 0, 0);
    tower_declare(&t, 6);
    struct offload_count count = tower_plan(&t, "y", INT64_MAX, 0);
    assert_int_equal(count.named, 7); /* y6 is read by the head only, in the forward half: nothing keeps it */
    assert_int_equal(count.slots, 6);
    assert_int_equal(count.bytes, 6 * WIDTH * 8);
    assert_int_equal(host_copies(&t.r.p, PH_FWD), 6);
    assert_int_equal(host_copies(&t.r.p, PH_REPLAY), 6);
    assert_int_equal(t.r.p.n_fetches, 6);
    assert_int_equal(t.r.p.n_replays, 0);
    assert_int_equal(t.r.p.host_bytes, 6 * WIDTH * 8);
    assert_int_equal(t.r.m.allocated[ARENA_HOST], t.r.p.host_bytes);
    assert_int_equal(t.r.p.frame_bytes, WIDTH * 8); /* the gradient that the head makes */
    assert_int_equal(tower_result(&t), tower_result(&plain));
    rig_release(&t.r);
    rig_release(&plain.r);
}

static void device_memory_does_not_grow_with_layers(void **state)
{
    (void)state;
    int64_t bytes[2];
    for (int i = 0; i < 2; i++) {
        struct tower t;
        tower_declare(&t, i == 0 ? 10 : MOST);
        tower_plan(&t, "y", INT64_MAX, 0);
        bytes[i] = t.r.p.work_bytes + t.r.p.frame_bytes;
        tower_result(&t);
        rig_release(&t.r);
    }
    assert_int_equal(bytes[0], bytes[1]);
    assert_true(bytes[0] <= 8 * WIDTH * 8);
}

/* A copy back starts before the step that needs it could: while the layer before it computes. */
static void copies_back_run_one_layer_ahead(void **state)
{
    (void)state;
    struct tower t;
    tower_declare(&t, 8);
    tower_plan(&t, "y", INT64_MAX, 0);
    const struct plan *p = &t.r.p;
    for (int k = 0; k < 6; k++) {
        int fetch = -1;
        for (int i = 0; i < p->n_steps; i++)
            if (p->steps[i].ref.phase == PH_REPLAY && p->inst[p->steps[i].instance[1]].slot == t.y[k])
                fetch = i;
        assert_true(fetch >= 0);
        assert_int_equal(p->steps[fetch].lane, LANE_COPY);
        assert_true(fetch < find_step(p, t.node[k + 1], PH_BWD)); /* before that layer begins */
        assert_true(fetch > find_step(p, t.node[k + 2], PH_BWD)); /* not all of them at once */
        int dw = find_step(p, t.node[k], PH_DW);
        bool waits = false;
        for (int w = 0; w < p->steps[dw].n_waits; w++)
            waits |= p->steps[dw].wait[w] >= fetch;
        assert_true(waits);
    }
    rig_release(&t.r);
}

static void what_is_small_recomputed_or_of_later_layers_stays(void **state)
{
    (void)state;
    struct tower t;
    tower_declare(&t, 6);
    struct offload_count count = tower_plan(&t, "y", INT64_MAX, WIDTH + 1);
    assert_int_equal(count.slots, 0);
    assert_int_equal(count.small, 7);
    assert_int_equal(t.r.p.host_bytes, 0);
    rig_release(&t.r);
    tower_declare(&t, 6);
    t.r.g.slots[t.y[2]].dropped = true;
    count = tower_plan(&t, "y", 4, WIDTH);
    assert_int_equal(count.named, 4); /* layers 0 to 3 */
    assert_int_equal(count.recomputed, 1);
    assert_int_equal(count.slots, 3);
    assert_int_equal(t.r.p.n_replays, 1); /* from y1, which comes back for it */
    tower_result(&t);
    rig_release(&t.r);
}

/* The backward half adds to what the forward half wrote: it must be where it was. */
static void what_the_backward_half_changes_stays(void **state)
{
    (void)state;
    struct tower t;
    tower_declare(&t, 3);
    struct rig *r = &t.r;
    graph_scope(&r->g, 1, "tower");
    slot_id sum = rig_slot(r, "sum", WIDTH), grad = rig_keep(r, "sum.grad", ARENA_GRAD, WIDTH);
    int first = rig_node(r, "first", LANE_COMPUTE);
    RIG_USES(r, first, PH_FWD, 0.1, READS(t.y[0]), ADDS(sum));
    RIG_USES(r, first, PH_BWD, 0.1, READS(t.dy[3]), ADDS(sum));
    RIG_USES(r, first, PH_DW, 0.1, READS(sum), ADDS(grad));
    struct offload_count count = tower_plan(&t, "sum", INT64_MAX, 0);
    assert_int_equal(count.named, 1);
    assert_int_equal(count.slots, 0);
    tower_result(&t);
    rig_release(r);
}

static void names_beside_a_tag_mean_the_layers_that_have_it(void **state)
{
    (void)state;
    struct tower t;
    tower_declare(&t, 4);
    graph_scope(&t.r.g, 2, "other");
    rig_slot(&t.r, "z", WIDTH);
    assert_int_equal(graph_offload(&t.r.g, "tower.y", "other.*", INT64_MAX), 1);
    assert_true(t.r.g.slots[t.y[2]].offload);
    assert_int_equal(graph_offload(&t.r.g, "nothing", NULL, INT64_MAX), 0);
    rig_release(&t.r);
}

static void more_host_memory_than_there_is_is_refused(void **state)
{
    (void)state;
    struct tower t;
    tower_declare(&t, 2);
    memory_reserve_max(&t.r.m, ARENA_HOST, (int64_t)1 << 50);
    assert_fails(memory_commit(&t.r.m, &t.r.dev, &t.r.e), ST_NOMEM, &t.r.e, "1.00 PiB of host memory");
    rig_release(&t.r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_saved_is_copied_out_once_and_back_once),
        cmocka_unit_test(device_memory_does_not_grow_with_layers),
        cmocka_unit_test(copies_back_run_one_layer_ahead),
        cmocka_unit_test(what_is_small_recomputed_or_of_later_layers_stays),
        cmocka_unit_test(what_the_backward_half_changes_stays),
        cmocka_unit_test(names_beside_a_tag_mean_the_layers_that_have_it),
        cmocka_unit_test(more_host_memory_than_there_is_is_refused),
    };
    return cmocka_run_group_tests_name("plan: offload", tests, NULL, NULL);
}
