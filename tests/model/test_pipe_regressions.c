/* Two mistakes that pipelines over hybrid stacks with multi-token prediction made, each as a check that this one passes
 * and that a mutant, which makes the mistake in the planned graph itself, does not. Letters are those of the ledger, as
 * in test_regressions.c.
 *   A  the final norm was left out in a last chunk without layers, or seen by the head alone
 *   B  what two read (the head and a prediction depth) went back twice, or once too little */
#include "model/pipe.h"

#define SIZES                                                                                                          \
    "model.experts=4 model.topk=2 model.mamba_head_dim=4 model.mamba_state=4 model.mamba_groups=1 "                    \
    "model.mamba_chunk=4 model.seq_aux_loss=0.1 "

static struct pipe_run run_of(const char *options, int vpp)
{
    return (struct pipe_run){.options = options,
                             .kind = DEV_REF,
                             .pp = vpp > 0,
                             .vpp = vpp,
                             .n_micro = 2,
                             .steps = 1,
                             .by_microbatch = true};
}

static int segments_of(const char *pattern)
{
    int n = 1;
    for (const char *s = pattern; *s != '\0'; s++)
        n += *s == '|';
    return n;
}

/* One rank, uncut, against one rank with a chunk per segment; what differs first, or NULL. */
static const char *first_fault(const char *pattern, const char *more, int (*patch)(struct pipe_place *, struct err *),
                               struct err *e)
{
    static char named[160];
    char options[512];
    const char *where, *fault = NULL;
    snprintf(options, sizeof options, SIZES "model.pattern=%s %s", pattern, more);
    struct pipe_run one = run_of(options, 0), cut = run_of(options, segments_of(pattern));
    cut.patch = patch;
    assert_ok(pipe_start(&one, e), e);
    if (pipe_start(&cut, e) != ST_OK) {
        fault = "refused";
    } else if (pipe_compare(&one, &cut, &where) > 1e-10) {
        /* the first in the order of what a rank says: losses, then metrics, then gradients */
        for (int i = 0; i < one.rank[0]->n && fault == NULL; i++) {
            const struct pipe_value *a = &one.rank[0]->v[i], *b = pipe_find(cut.rank[0], a->name);
            if (b == NULL || pipe_gap(a, b) > 1e-10) {
                snprintf(named, sizeof named, "%s", a->name);
                fault = named;
            }
        }
    }
    pipe_end(&one);
    pipe_end(&cut);
    return fault;
}

/* ---- the graph, by name ---------------------------------------------------------------------- */

static slot_id slot_named(const struct graph *g, const char *glob)
{
    for (int s = 0; s < g->n_slots; s++)
        if (str_glob(glob, g->slots[s].name))
            return s;
    return NO_SLOT;
}

static struct node *node_named(struct graph *g, const char *glob)
{
    for (int n = 0; n < g->n_nodes; n++)
        if (str_glob(glob, g->nodes[n].name))
            return &g->nodes[n];
    return NULL;
}

static int missing(const char *what, struct err *e) { return err_set(e, ST_INTERNAL, "the mutant finds no %s", what); }

/* The node's use of one slot becomes a use of another. */
static int swap_use(struct node *n, enum phase_id ph, slot_id from, slot_id to, struct err *e)
{
    if (n == NULL || from == NO_SLOT || to == NO_SLOT)
        return missing("slot or node", e);
    for (int u = 0; u < n->phase[ph].n_uses; u++)
        if (n->phase[ph].use[u].slot == from) {
            n->phase[ph].use[u].slot = to;
            return ST_OK;
        }
    return missing("use", e);
}

/* Output of the final joint, and what it is made of: the stream that came over the last cut. Four layers in front. */
static slot_id normed(const struct graph *g) { return slot_named(g, "4.joint.norm"); }
static slot_id stream(const struct graph *g) { return slot_named(g, "4.cut*.stream"); }

/* ---- A --------------------------------------------------------------------------------------- */

static int mutant_A_no_norm_in_an_empty_chunk(struct pipe_place *p, struct err *e)
{
    struct graph *g = &p->train.g;
    TRY(swap_use(node_named(g, "head.head"), PH_FWD, normed(g), stream(g), e));
    TRY(swap_use(node_named(g, "mtp0.norms"), PH_FWD, normed(g), stream(g), e));
    return pipe_replan(p, e);
}

static int mutant_A_norm_for_the_head_alone(struct pipe_place *p, struct err *e)
{
    struct graph *g = &p->train.g;
    TRY(swap_use(node_named(g, "mtp0.norms"), PH_FWD, normed(g), stream(g), e));
    return pipe_replan(p, e);
}

static int mutant_A_norm_for_the_depth_alone(struct pipe_place *p, struct err *e)
{
    struct graph *g = &p->train.g;
    TRY(swap_use(node_named(g, "head.head"), PH_FWD, normed(g), stream(g), e));
    return pipe_replan(p, e);
}

/* Nodes of all chunks that use the final norm's gain forward, and the chunk of the last of them. */
static int norms_in(const struct graph *g, const char *gain, int *chunk)
{
    slot_id w = slot_named(g, gain);
    int n = 0;
    for (int k = 0; k < g->n_nodes; k++) {
        const struct phase *f = &g->nodes[k].phase[PH_FWD];
        for (int u = 0; u < f->n_uses; u++)
            if (f->use[u].slot == w && w != NO_SLOT) {
                n++;
                *chunk = g->nodes[k].chunk;
            }
    }
    return n;
}

static int check_one_norm(struct pipe_place *p, struct err *e)
{
    int chunk = -1, n = norms_in(&p->train.g, "*decoder.final_*norm.weight", &chunk);
    bool right = n == 1 && chunk == p->m.mesh.vpp - 1;
    return right ? ST_OK : err_set(e, ST_INTERNAL, "%d final norms, the last in chunk %d", n, chunk);
}

static void the_final_norm_is_applied_once_and_seen_by_all(void **state)
{
    (void)state;
    static const char *const patterns[] = {"M*E-",     "M*|E-",        "M*|E-/*E",      "M*E-|",
                                           "M*E-|/*E", "M*|E-|/*E/*E", "[*-]|[*E]|/*E", "M*E-||/*E"};
    static const char *const joints[] = {"", "model.mhc_streams=2 model.mhc_gating=0.8"};
    struct err e = {0};
    for (int i = 0; i < countof(patterns); i++)
        for (int k = 0; k < countof(joints); k++) {
            const char *fault = first_fault(patterns[i], joints[k], check_one_norm, &e);
            if (fault != NULL)
                fail_msg("'%s': %s %s", patterns[i], fault, e.msg);
        }
}

static void a_final_norm_left_out_is_caught(void **state)
{
    (void)state;
    static const struct {
        int (*mutant)(struct pipe_place *, struct err *);
        const char *fault;
    } cases[] = {
        {mutant_A_no_norm_in_an_empty_chunk, "step 0, loss main"},
        {mutant_A_norm_for_the_head_alone, "step 0, loss depth 0"},
        {mutant_A_norm_for_the_depth_alone, "step 0, loss main"},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct err e = {0};
        const char *fault = first_fault("M*E-|/*E", "", cases[i].mutant, &e);
        assert_non_null(fault);
        assert_string_equal(fault, cases[i].fault);
    }
}

/* ---- B --------------------------------------------------------------------------------------- */

/* Every backward and weight gradient runs once for each microbatch. */
static int check_once(struct pipe_place *p, struct err *e)
{
    const struct plan *q = &p->train.p;
    for (int n = 0; n < p->train.g.n_nodes; n++)
        for (int ph = PH_BWD; ph <= PH_DW; ph++) {
            int times = 0;
            for (int i = 0; i < q->n_steps; i++)
                times += q->steps[i].ref.node == n && q->steps[i].ref.phase == (enum phase_id)ph;
            if (times != (p->train.g.nodes[n].phase[ph].fn != NULL) * q->n_mb)
                return err_set(e, ST_INTERNAL, "node %s runs %s %d times", p->train.g.nodes[n].name,
                               phase_name((enum phase_id)ph), times);
        }
    return ST_OK;
}

/* The plan with one node's backward twice. */
static int twice(struct pipe_place *p, const char *name, struct err *e)
{
    struct graph *g = &p->train.g;
    struct order order = {0};
    const struct node *n = node_named(g, name);
    if (n == NULL)
        return missing(name, e);
    plan_release(&p->train.p);
    int st = schedule_plain(g, false, &order, e);
    for (int i = 0, end = order.n; st == ST_OK && i < end; i++)
        if (&g->nodes[order.list[i].node] == n && order.list[i].phase == PH_BWD)
            st = order_add(&order, order.list[i].node, PH_BWD, 0, e);
    if (st == ST_OK)
        st = plan_build(&p->train.p, "mutant", g, &order, e);
    order_release(&order);
    return st;
}

static int mutant_B_final_norm_goes_back_twice(struct pipe_place *p, struct err *e)
{
    return twice(p, "4.joint.joint", e);
}
static int mutant_B_depth_goes_back_twice(struct pipe_place *p, struct err *e) { return twice(p, "mtp0.norms", e); }

/* A slot like another that nobody reads. */
static slot_id dead_copy(struct graph *g, slot_id of)
{
    return of == NO_SLOT ? NO_SLOT : graph_slot(g, "dead", g->slots[of].shape);
}

static int mutant_B_depth_gradient_is_lost(struct pipe_place *p, struct err *e)
{
    struct graph *g = &p->train.g;
    slot_id d = slot_named(g, "4.joint.dnorm"), dead = dead_copy(g, d);
    TRY(swap_use(node_named(g, "mtp0.norms"), PH_BWD, d, dead, e));
    return pipe_replan(p, e);
}

static int mutant_B_gradient_stays_at_the_cut(struct pipe_place *p, struct err *e)
{
    struct graph *g = &p->train.g;
    struct node *in = node_named(g, "*.cut0.in");
    slot_id d = slot_named(g, "*.cut0.dstream"), old = slot_named(g, "*.cut0.stream");
    TRY(swap_use(in, PH_BWD, d, old, e)); /* sends the stream itself back */
    return pipe_replan(p, e);
}

static void what_two_read_goes_back_once_from_each(void **state)
{
    (void)state;
    static const char *const depths[] = {"/*E", "/*E/*E", "/*E/*E/*E/*E"}, *const mains[] = {"M*|E-|", "[*-]|[*E]|",
                                                                                             "M*E-|"};
    static const char *const joints[] = {"", "model.mhc_streams=2 model.mhc_gating=0.8", "model.tied=off"};
    for (int d = 0; d < countof(depths); d++)
        for (int i = 0; i < countof(mains); i++)
            for (int k = 0; k < countof(joints); k++) {
                struct err e = {0};
                char pattern[64];
                snprintf(pattern, sizeof pattern, "%s%s", mains[i], depths[d]);
                const char *fault = first_fault(pattern, joints[k], check_once, &e);
                if (fault != NULL)
                    fail_msg("'%s' %s: %s %s", pattern, joints[k], fault, e.msg);
            }
}

static void gradients_that_go_back_wrongly_are_caught(void **state)
{
    (void)state;
    static const struct {
        int (*mutant)(struct pipe_place *, struct err *);
        const char *fault, *message;
    } cases[] = {
        {mutant_B_final_norm_goes_back_twice, "refused", "is in the order twice"},
        {mutant_B_depth_goes_back_twice, "refused", "is in the order twice"},
        {mutant_B_depth_gradient_is_lost, "refused", "which nothing has yet written"},
        {mutant_B_gradient_stays_at_the_cut, "step 0, gradient of embedding.word_embeddings.weight", NULL},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct err e = {0};
        const char *fault = first_fault("M*E-|/*E", "", cases[i].mutant, &e);
        assert_non_null(fault);
        assert_string_equal(fault, cases[i].fault);
        if (strcmp(fault, "refused") == 0)
            assert_fails(e.code, ST_INTERNAL, &e, cases[i].message);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_final_norm_is_applied_once_and_seen_by_all),
        cmocka_unit_test(a_final_norm_left_out_is_caught),
        cmocka_unit_test(what_two_read_goes_back_once_from_each),
        cmocka_unit_test(gradients_that_go_back_wrongly_are_caught),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
