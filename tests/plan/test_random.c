/* plan/: large random graphs on random lanes. Whatever the lanes, the dropped slots and the order
 * in which lanes happen to run, the result must equal plain execution to the last bit. And the
 * method must have teeth: a plan without one of its waits, or placed by list order, has to be
 * caught. */
#include "toy.h"

enum { NODES = 14, MAX_IN = 3, ORDERS = 200 };

struct random_opts {
    uint64_t seed;
    bool lanes;   /* random lanes; otherwise all on one */
    bool drops;   /* random slots are recomputed */
    bool offload; /* and others wait in host memory */
    bool inplace;
    bool delay_dw;
};

struct draws {
    uint64_t key, n;
};
static int draw(struct draws *d, int below) { return (int)rng_below(d->key, d->n++, (uint64_t)below); }

/* What one node is made of, so that the declarations below read in order. */
struct random_node {
    slot_id in[MAX_IN], din[MAX_IN], out, dout, weight, grad;
    int n_in, id;
    double salt;
};

static void declare_backward(struct rig *r, const struct random_node *n, bool reads_output, bool inplace)
{
    struct use bwd[2 + 2 * MAX_IN];
    int k = 0;
    bwd[k++] = (struct use)READS(n->dout);
    bwd[k++] = (struct use)READS(n->weight);
    for (int i = 0; i < n->n_in; i++)
        bwd[k++] = (struct use)READS(i == 0 && reads_output ? n->out : n->in[i]);
    int first_out = k;
    bool same_size = true;
    for (int i = 0; i < n->n_in; i++) {
        bwd[k++] = (struct use)ADDS(n->din[i]);
        same_size &= r->g.slots[n->din[i]].shape.dim[0] == r->g.slots[bwd[2].slot].shape.dim[0];
    }
    rig_uses(r, n->id, PH_BWD, bwd, k, n->salt + 0.5);
    if (inplace && same_size)
        /* legal where that slot dies, which it often does not */
        graph_inplace(&r->g, n->id, PH_BWD, bwd[2].slot, bwd[first_out].slot);
    RIG_USES(r, n->id, PH_DW, n->salt + 0.7, READS(n->dout), READS(n->in[0]), ADDS(n->grad));
}

/* A random graph of NODES nodes. Its shape depends on the seed alone; lanes, drops and in-place on
 * opts. */
static void random_graph(struct rig *r, const struct random_opts *o)
{
    struct draws shape = {.key = rng_key(o->seed, "shape")}, policy = {.key = rng_key(o->seed, "policy")};
    slot_id value[NODES + 1], grad_of[NODES + 1], grads[4];
    bool used[NODES + 1] = {false};
    rig_init(r);
    slot_id w = rig_keep(r, "w", ARENA_PARAM, 24);
    for (int k = 0; k < countof(grads); k++)
        grads[k] = rig_keep(r, "grad", ARENA_GRAD, 24); /* shared by several nodes, as tied weights are */
    for (int k = 0; k <= NODES; k++) {
        int64_t n = draw(&shape, 2) ? 24 : 8 + 8 * draw(&shape, 5);
        graph_scope(&r->g, k, "n");
        value[k] = rig_slot(r, "v", n);
        grad_of[k] = rig_slot(r, "dv", n);
    }
    int lane = o->lanes ? draw(&policy, LANE_COUNT) : 0;
    int source = rig_node(r, "source", (enum lane_id)lane);
    RIG_USES(r, source, PH_FWD, 0.9, WRITES(value[0]));
    RIG_USES(r, source, PH_DW, 0.4, READS(grad_of[0]), ADDS(grads[0]));
    for (int k = 1; k <= NODES; k++) {
        struct random_node n = {.out = value[k],
                                .dout = grad_of[k],
                                .weight = w,
                                .grad = grads[draw(&shape, countof(grads))],
                                .salt = 0.01 * k};
        int wanted = k == NODES ? 1 : 1 + draw(&shape, MAX_IN);
        for (int tries = 0; tries < 2 * MAX_IN && n.n_in < wanted; tries++) {
            int from = tries == 0 ? k - 1 : draw(&shape, k);
            bool twice = false;
            for (int i = 0; i < n.n_in; i++)
                twice |= n.in[i] == value[from];
            if (!twice) {
                n.in[n.n_in] = value[from];
                n.din[n.n_in++] = grad_of[from];
                used[from] = true;
            }
        }
        n.id = rig_node(r, "node", (enum lane_id)(o->lanes ? draw(&policy, LANE_COUNT) : 0));
        struct use fwd[MAX_IN + 2];
        int u = 0;
        for (; u < n.n_in; u++)
            fwd[u] = (struct use)READS(n.in[u]);
        fwd[u++] = (struct use)READS(w);
        fwd[u++] = (struct use)WRITES(n.out);
        rig_uses(r, n.id, PH_FWD, fwd, u, n.salt);
        rig_uses(r, n.id, PH_REPLAY, fwd, u, n.salt);
        graph_replay(&r->g, n.out, n.id);
        r->g.slots[n.out].dropped = o->drops && draw(&policy, 2);
        r->g.slots[n.out].offload = o->offload && draw(&policy, 2);
        declare_backward(r, &n, draw(&shape, 2), o->inplace);
    }
    assert_true(used[NODES - 1]);
    int head = rig_node(r, "head", LANE_COMPUTE);
    RIG_USES(r, head, PH_FWD, 0.2, READS(value[NODES]), WRITES(grad_of[NODES]));
    struct offload_count count;
    assert_ok(schedule_plain(&r->g, o->delay_dw, &r->o, &r->e), &r->e);
    assert_ok(order_offload(&r->g, &r->o, 0, &count, &r->e), &r->e);
}

/* One lane, nothing dropped, list order. delay_dw changes the order of additions, so it is an
 * argument. */
static uint64_t plain_result(uint64_t seed, bool delay_dw)
{
    struct rig r;
    random_graph(&r, &(struct random_opts){.seed = seed, .delay_dw = delay_dw});
    rig_make(&r);
    assert_int_equal(r.p.n_waits, 0);
    rig_run(&r, true);
    uint64_t h = rig_result(&r);
    const double *g = (const void *)r.m.base[ARENA_GRAD];
    for (int64_t i = 0; i < r.m.allocated[ARENA_GRAD] / 8; i++)
        assert_true(isfinite(g[i]));
    rig_release(&r);
    return h;
}

static void every_schedule_equals_the_plain_one_bit_for_bit(void **state)
{
    (void)state;
    int replays = 0, waits = 0, merged = 0, smaller = 0, plans = 0, fetches = 0;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        for (int variant = 0; variant < 6; variant++) {
            struct random_opts o = {.seed = seed,
                                    .lanes = true,
                                    .drops = variant & 1,
                                    .inplace = variant & 2,
                                    .offload = variant >= 4,
                                    .delay_dw = seed & 1};
            uint64_t want = plain_result(seed, o.delay_dw);
            struct rig r;
            random_graph(&r, &o);
            rig_make(&r);
            r.x.poison = true;
            rig_run(&r, true);
            assert_int_equal(rig_result(&r), want);
            for (int order = 1; order <= ORDERS; order++) {
                r.x.random_lanes = seed * 1000 + (uint64_t)order;
                rig_run(&r, true);
                if (rig_result(&r) != want)
                    fail_msg("seed %d, variant %d, order %d differs from plain execution", (int)seed, variant, order);
            }
            plans++;
            replays += r.p.n_replays;
            fetches += r.p.n_fetches;
            waits += r.p.n_waits;
            assert_true(r.p.work_bytes <= r.p.work_unshared_bytes);
            smaller += r.p.work_bytes < r.p.work_unshared_bytes;
            for (int i = 0; i < r.p.n_inst; i++)
                merged += r.p.inst[i].merged >= 0;
            rig_release(&r);
        }
    }
    /* The graphs must have had something to prove. */
    print_message("           %d plans: %d replays, %d fetches, %d waits, %d in place\n", plans, replays, fetches,
                  waits, merged);
    assert_true(replays > 500 && fetches > 300 && waits > 5000 && merged > 20);
    assert_true(4 * smaller > 3 * plans); /* where lanes may overtake each other freely, nothing can be shared */
}

static bool orders_find_a_difference(struct rig *r, uint64_t want)
{
    r->x.poison = true;
    for (int order = 1; order <= ORDERS; order++) {
        r->x.random_lanes = (uint64_t)order;
        rig_run(r, true);
        if (rig_result(r) != want)
            return true;
    }
    return false;
}

static void a_missing_wait_is_caught(void **state)
{
    (void)state;
    int removed = 0, caught = 0;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        uint64_t want = plain_result(seed, false);
        struct rig r;
        random_graph(&r, &(struct random_opts){.seed = seed, .lanes = true, .drops = true});
        rig_make(&r);
        for (int i = 0; i < r.p.n_steps; i++) {
            struct step *s = &r.p.steps[i], whole = *s;
            for (int w = 0; w < whole.n_waits; w++) {
                s->wait[w] = whole.wait[whole.n_waits - 1];
                s->n_waits = whole.n_waits - 1;
                removed++;
                caught += orders_find_a_difference(&r, want);
                *s = whole;
            }
        }
        assert_false(orders_find_a_difference(&r, want)); /* whole again */
        rig_release(&r);
    }
    print_message("           %d of %d removed waits were caught\n", caught, removed);
    assert_true(removed > 50);
    /* Some waits order steps that another path happens to order in nearly every run. */
    assert_true(caught * 10 >= removed * 9);
}

/* ---- a planner that frees by list order: right on one queue, wrong on several ---------------- */

static bool overlap_in_list(const struct instance *a, const struct instance *b)
{
    return a->first_step <= b->last_step && b->first_step <= a->last_step;
}

static void place_by_list_order(struct rig *r)
{
    struct plan *p = &r->p;
    p->work_bytes = 0;
    for (int i = 0; i < p->n_inst; i++) {
        struct instance *x = &p->inst[i];
        if (x->arena != ARENA_WORK)
            continue;
        bool moved = true;
        x->offset = 0;
        while (moved) {
            moved = false;
            for (int k = 0; k < i; k++) {
                const struct instance *y = &p->inst[k];
                if (y->arena == ARENA_WORK && overlap_in_list(x, y) && x->offset < y->offset + y->bytes &&
                    y->offset < x->offset + x->bytes) {
                    x->offset = y->offset + y->bytes;
                    moved = true;
                }
            }
        }
        p->work_bytes = max_i64(p->work_bytes, x->offset + x->bytes);
    }
}

static void placement_by_list_order_is_caught(void **state)
{
    (void)state;
    int caught = 0, graphs = 0;
    for (uint64_t seed = 1; seed <= 8; seed++, graphs++) {
        uint64_t want = plain_result(seed, false);
        struct rig r;
        random_graph(&r, &(struct random_opts){.seed = seed, .lanes = true});
        assert_ok(rig_plan(&r), &r.e);
        int64_t proven = r.p.work_bytes;
        place_by_list_order(&r);
        assert_true(r.p.work_bytes <= proven); /* it looks better ... */
        rig_commit(&r);
        r.x.poison = true;
        rig_run(&r, true);
        assert_int_equal(rig_result(&r), want); /* ... and works, as long as nobody overtakes */
        caught += orders_find_a_difference(&r, want);
        rig_release(&r);
    }
    assert_int_equal(caught, graphs);
}

/* ---- two living slots in one place ----------------------------------------------------------- */

static void overlapping_slots_are_caught(void **state)
{
    (void)state;
    uint64_t seed = 2, want = plain_result(seed, false);
    int moved = 0, caught = 0;
    struct rig r;
    random_graph(&r, &(struct random_opts){.seed = seed, .lanes = true});
    rig_make(&r);
    for (int i = 0; i < r.p.n_inst; i++) {
        for (int k = 0; k < r.p.n_inst; k++) {
            struct instance *x = &r.p.inst[i], *y = &r.p.inst[k];
            /* y is written while x still waits for its last reader */
            if (x->arena != ARENA_WORK || y->arena != ARENA_WORK ||
                !(x->first_step < y->first_step && y->first_step < x->last_step) ||
                y->offset + y->bytes > r.p.work_bytes || x->offset + y->bytes > r.p.work_bytes)
                continue;
            int64_t before = y->offset;
            y->offset = x->offset;
            assert_ok(plan_bind(&r.p, &r.m, &r.e), &r.e);
            r.x.poison = true;
            r.x.random_lanes = 0;
            rig_run(&r, true);
            moved++;
            caught += rig_result(&r) != want;
            y->offset = before;
        }
    }
    assert_true(moved > 5);
    assert_int_equal(caught, moved);
    rig_release(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_schedule_equals_the_plain_one_bit_for_bit),
        cmocka_unit_test(a_missing_wait_is_caught),
        cmocka_unit_test(placement_by_list_order_is_caught),
        cmocka_unit_test(overlapping_slots_are_caught),
    };
    return cmocka_run_group_tests_name("plan: random graphs", tests, NULL, NULL);
}
