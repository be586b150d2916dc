/* Gathers and reductions of units among the steps of a schedule; see order_prefetch() in plan.h.
 *
 * A schedule says in which order layers compute. Where ranks share out weights and gradients
 * (parallel.zero), a *unit* of layers has a node that gathers its weights (ROLE_GATHER) and one
 * that sends its gradients to their owners (ROLE_REDUCE). This pass puts them where they hide
 * behind computing:
 *
 *     compute   unit 0          | unit 1          | unit 2
 *     comm      gather 1        | gather 2        | gather 3       forward: weights one unit ahead
 *     comm      gather u-1, reduce u+1            | ...            backward of unit u: weights ahead, gradients behind
 *
 * Without further order all gathers would start at once, each with memory of its own. So a gather
 * waits until the unit before the one that computes is done, and the first gradient of a unit until
 * the reduction of the last unit but one is: then the planner proves that the memory of two units
 * is enough. These waits are the only ones in a plan that do not follow from slots
 * (step_ref.after). */
#include "plan/plan_int.h"

#include <stdlib.h>
#include <string.h>

/* A gather, and the entry that is the first to need what it gathers. */
struct demand {
    struct step_ref ref;
    int at;
};
struct prefetch {
    const struct graph *g;
    struct order *o, out;
    int n_mb;
    int *gather_of; /* [slot] node that gathers it, -1: none */
    bool *asked;    /* [(node * 2 + again) * n_mb + mb] is among the demands */
    int *wrote;     /* [slot * n_mb + mb] first entry that writes it, -1: none */
    bool *closed;   /* [slot * n_mb + mb] its gradient has been reduced */
    struct demand *demand;
    int n_demands;
    size_t cap_demands;
    struct err *e;
};

static const struct node *node_of(const struct prefetch *x, const struct step_ref *r) { return &x->g->nodes[r->node]; }
static const struct phase *phase_of(const struct prefetch *x, const struct step_ref *r)
{
    return &node_of(x, r)->phase[r->phase];
}

static bool concerns(const struct graph *g)
{
    for (int n = 0; n < g->n_nodes; n++)
        if (g->nodes[n].role == ROLE_GATHER || g->nodes[n].role == ROLE_REDUCE)
            return true;
    return false;
}

static int open_lists(struct prefetch *x)
{
    const struct graph *g = x->g;
    size_t slots = (size_t)g->n_slots + 1, mbs = (size_t)x->n_mb;
    TRY(mem_array((void **)&x->gather_of, slots, sizeof *x->gather_of, x->e));
    TRY(mem_array((void **)&x->asked, ((size_t)g->n_nodes + 1) * 2 * mbs, sizeof *x->asked, x->e));
    TRY(mem_array((void **)&x->wrote, slots * mbs, sizeof *x->wrote, x->e));
    TRY(mem_array((void **)&x->closed, slots * mbs, sizeof *x->closed, x->e));
    memset(x->gather_of, 0xFF, slots * sizeof *x->gather_of);
    for (int n = 0; n < g->n_nodes; n++) {
        const struct phase *p = &g->nodes[n].phase[PH_FWD];
        for (int u = 0; g->nodes[n].role == ROLE_GATHER && u < p->n_uses; u++)
            if (p->use[u].slot >= 0 && p->use[u].mode != USE_READ)
                x->gather_of[p->use[u].slot] = n;
    }
    return ST_OK;
}

static void close_lists(struct prefetch *x)
{
    free(x->gather_of);
    free(x->asked);
    free(x->wrote);
    free(x->closed);
    free(x->demand);
    order_release(&x->out);
}

/* ---- what stays of the schedule's own entries ------------------------------------------------ */

/* Gathers are placed anew. What is reduced once per step is reduced in its last microbatch, after
 * which no entry of it is left. */
static void keep_entries(struct prefetch *x)
{
    struct order *o = x->o;
    int n = 0;
    for (int i = 0; i < o->n; i++) {
        const struct step_ref *r = &o->list[i];
        const struct node *node = node_of(x, r);
        if (node->role == ROLE_GATHER || (node->role == ROLE_REDUCE && node->per_step && r->mb < x->n_mb - 1))
            continue;
        o->list[n++] = *r;
    }
    o->n = n;
}

/* ---- gathers --------------------------------------------------------------------------------- */

static int add_demand(struct prefetch *x, int node, const struct step_ref *by, int at)
{
    bool once = x->g->nodes[node].per_step, again = !once && by->phase != PH_FWD;
    int mb = once ? 0 : by->mb;
    bool *asked = &x->asked[((size_t)node * 2 + again) * (size_t)x->n_mb + (size_t)mb];
    if (*asked)
        return ST_OK;
    *asked = true;
    if (once && by->mb != 0)
        return err_set(x->e, ST_INTERNAL,
                       "microbatch %d is the first to use the weights of %s, which are gathered in "
                       "microbatch 0",
                       by->mb, x->g->nodes[node].name);
    TRY(mem_grow((void **)&x->demand, &x->cap_demands, (size_t)x->n_demands + 1, sizeof *x->demand, x->e));
    x->demand[x->n_demands++] =
        (struct demand){.ref = {.node = node, .phase = again ? PH_REPLAY : PH_FWD, .mb = mb}, .at = at};
    return ST_OK;
}

static int find_demands(struct prefetch *x)
{
    for (int i = 0; i < x->o->n; i++) {
        const struct phase *p = phase_of(x, &x->o->list[i]);
        for (int u = 0; u < p->n_uses; u++)
            if (p->use[u].slot >= 0 && x->gather_of[p->use[u].slot] >= 0)
                TRY(add_demand(x, x->gather_of[p->use[u].slot], &x->o->list[i], i));
    }
    return ST_OK;
}

/* The entry in front of which a demand's gather goes: where the demands before it are first needed,
 * ahead of reductions that can wait. */
static int place_of(const struct prefetch *x, int k)
{
    int first = k;
    while (first > 0 && x->demand[first - 1].at == x->demand[k].at)
        first--;
    int at = first > 0 ? x->demand[first - 1].at : x->demand[k].at;
    while (at > 0 && node_of(x, &x->o->list[at - 1])->role == ROLE_REDUCE)
        at--;
    return at;
}

/* A gather into memory that others use too starts after all computing that the
 * list has before it. */
static int last_computed(const struct prefetch *x)
{
    for (int i = x->out.n; i > 0; i--) {
        const struct node *n = node_of(x, &x->out.list[i - 1]);
        if (n->lane == LANE_COMPUTE && !n->host)
            return i;
    }
    return 0;
}

static int add(struct prefetch *x, struct step_ref r)
{
    TRY(order_add(&x->out, r.node, r.phase, r.mb, x->e));
    x->out.list[x->out.n - 1].after = r.after;
    return ST_OK;
}

static int place_gathers(struct prefetch *x)
{
    int next = 0;
    for (int i = 0; i <= x->o->n; i++) {
        for (; next < x->n_demands && place_of(x, next) == i; next++) {
            struct step_ref r = x->demand[next].ref;
            r.after = x->g->nodes[r.node].per_step ? 0 : last_computed(x);
            TRY(add(x, r));
        }
        if (i < x->o->n)
            TRY(add(x, x->o->list[i]));
    }
    return ST_OK;
}

/* ---- reductions ------------------------------------------------------------------------------ */

/* Which entry is the first to write each slot, by microbatch. */
static void find_first_writes(struct prefetch *x)
{
    memset(x->wrote, 0xFF, ((size_t)x->g->n_slots + 1) * (size_t)x->n_mb * sizeof *x->wrote);
    for (int i = x->out.n - 1; i >= 0; i--) {
        const struct phase *p = phase_of(x, &x->out.list[i]);
        for (int u = 0; u < p->n_uses; u++)
            if (p->use[u].slot >= 0 && p->use[u].mode != USE_READ)
                x->wrote[(size_t)p->use[u].slot * (size_t)x->n_mb + (size_t)x->out.list[i].mb] = i;
    }
}

/* The first entry that writes one of the gradients which reduction r reads. */
static int first_gradient(const struct prefetch *x, const struct step_ref *r)
{
    const struct phase *reads = phase_of(x, r);
    int first = -1;
    for (int u = 0; u < reads->n_uses; u++) {
        if (reads->use[u].slot < 0 || reads->use[u].mode != USE_READ)
            continue;
        int at = x->wrote[(size_t)reads->use[u].slot * (size_t)x->n_mb + (size_t)r->mb];
        first = at >= 0 && (first < 0 || at < first) ? at : first;
    }
    return first;
}

/* Gradients of a unit begin when those of the last unit but one have left. */
static void pace_reductions(struct prefetch *x)
{
    int before[2] = {-1, -1}; /* the last reductions, newest first */
    find_first_writes(x);
    for (int i = 0; i < x->out.n; i++) {
        const struct node *n = node_of(x, &x->out.list[i]);
        if (n->role != ROLE_REDUCE || n->per_step)
            continue;
        int first = before[1] >= 0 ? first_gradient(x, &x->out.list[i]) : -1;
        if (first > before[1] && x->out.list[first].after < before[1] + 1)
            x->out.list[first].after = before[1] + 1;
        before[1] = before[0];
        before[0] = i;
    }
}

/* No gradient may change after its reduction: each is ready exactly once. */
static int check_reductions(struct prefetch *x)
{
    for (int i = 0; i < x->out.n; i++) {
        const struct step_ref *r = &x->out.list[i];
        const struct node *n = node_of(x, r);
        const struct phase *p = phase_of(x, r);
        for (int u = 0; u < p->n_uses; u++) {
            slot_id s = p->use[u].slot;
            if (s < 0)
                continue;
            bool *closed = &x->closed[(size_t)s * (size_t)x->n_mb + (size_t)r->mb];
            if (n->role == ROLE_REDUCE && x->g->slots[s].sum)
                for (int mb = 0; mb < x->n_mb; mb++)
                    x->closed[(size_t)s * (size_t)x->n_mb + (size_t)mb] |= n->per_step || mb == r->mb;
            else if (n->role != ROLE_REDUCE && p->use[u].mode != USE_READ && *closed)
                return err_set(x->e, ST_INTERNAL, "node %s (%s) adds to %s, which has been reduced already", n->name,
                               phase_name(r->phase), x->g->slots[s].name);
        }
    }
    return ST_OK;
}

int order_prefetch(const struct graph *g, struct order *o, struct err *e)
{
    struct prefetch x = {.g = g, .o = o, .n_mb = 1, .e = e};
    int st;
    if (!concerns(g))
        return ST_OK;
    for (int i = 0; i < o->n; i++)
        x.n_mb = o->list[i].mb + 1 > x.n_mb ? o->list[i].mb + 1 : x.n_mb;
    TRY_OUT(open_lists(&x));
    keep_entries(&x);
    TRY_OUT(find_demands(&x));
    TRY_OUT(place_gathers(&x));
    pace_reductions(&x);
    TRY_OUT(check_reductions(&x));
    struct order made = x.out;
    x.out = *o;
    *o = made;
out:
    close_lists(&x);
    return st;
}
