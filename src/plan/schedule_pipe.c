/* Tables of a pipeline: which half (forward, backward) of which microbatch in which chunk a stage does, in order. 1F1B,
 * and interleaved 1F1B where a stage has several chunks. Pure functions of a few numbers; schedule_overlap.c turns
 * units into nodes. */
#include "plan/plan_int.h"

#include <stdlib.h>

static struct schedule_opts with_defaults(const struct schedule_opts *o)
{
    struct schedule_opts x = *o;
    x.pp = x.pp > 0 ? x.pp : 1;
    x.vpp = x.vpp > 0 ? x.vpp : 1;
    x.n_mb = x.n_mb > 0 ? x.n_mb : 1;
    x.group = x.group > 0 ? x.group : x.pp;
    return x;
}

static int check(const struct schedule_opts *o, struct err *e)
{
    if (o->pp_rank < 0 || o->pp_rank >= o->pp)
        return err_set(e, ST_INTERNAL, "schedule: stage %d of %d", o->pp_rank, o->pp);
    if (o->pp > 1 && o->vpp == 1 && overlap_pairs(o->overlap)) {
        err_set(e, ST_USAGE, "parallel.overlap=%s with parallel.pp=%d needs parallel.vpp of at least 2",
                o->overlap == OVERLAP_EP ? "ep" : "tp", o->pp);
        err_hint(e,
                 "with one chunk per stage the last stage's forward would be paired with the backward of the same "
                 "microbatch, which "
                 "needs it first; cut the pattern into %d segments or more, or use parallel.overlap=dw",
                 2 * o->pp);
        return ST_USAGE;
    }
    if (o->vpp == 1 || o->forward_only)
        return ST_OK;
    if (o->group < o->pp || o->group > o->n_mb) {
        err_set(e, ST_USAGE,
                "%d chunks per stage: parallel.pp_group=%d must lie between parallel.pp=%d and the %d microbatches of "
                "a step",
                o->vpp, o->group, o->pp, o->n_mb);
        err_hint(e, "a larger train.global_batch gives more microbatches");
        return ST_USAGE;
    }
    int rest = o->n_mb % o->group;
    if (rest != 0 && rest < o->pp) {
        err_set(
            e, ST_USAGE,
            "%d microbatches in groups of %d (parallel.pp_group) leave a last group of %d, fewer than the %d stages",
            o->n_mb, o->group, rest, o->pp);
        err_hint(e, "%d microbatches would fit, or another parallel.pp_group", o->n_mb - rest);
        return ST_USAGE;
    }
    return ST_OK;
}

int schedule_warmup(const struct schedule_opts *opts)
{
    struct schedule_opts o = with_defaults(opts);
    int later = o.pp - o.pp_rank - 1, all = o.n_mb * o.vpp;
    int w = o.vpp == 1 ? later : 2 * later + (o.vpp - 1) * o.group;
    /* One more keeps the two halves of a pair independent: see schedule_overlap.c. */
    w += overlap_pairs(o.overlap);
    return o.forward_only || w > all ? all : w;
}

/* Unit number id of a stage: groups of microbatches, in each all chunks, in each the group's microbatches. Backward
 * units follow the same table with the chunks in reverse order. */
static struct schedule_unit unit_of(const struct schedule_opts *o, int id, bool backward)
{
    int first = id / (o->group * o->vpp) * o->group; /* of its group */
    int size = o->n_mb - first < o->group ? o->n_mb - first : o->group;
    int at = id - first * o->vpp, chunk = at / size;
    return (struct schedule_unit){
        .backward = backward, .chunk = backward ? o->vpp - 1 - chunk : chunk, .mb = first + at % size};
}

static int add_unit(struct schedule_units *s, struct schedule_unit u, struct err *e)
{
    TRY(mem_grow((void **)&s->u, &s->cap, (size_t)s->n + 1, sizeof *s->u, e));
    s->u[s->n++] = u;
    return ST_OK;
}

int schedule_units(const struct schedule_opts *opts, struct schedule_units *out, struct err *e)
{
    struct schedule_opts o = with_defaults(opts);
    TRY(check(&o, e));
    if (o.forward_only && o.group > o.n_mb)
        o.group = o.n_mb;
    int all = o.n_mb * o.vpp, warmup = schedule_warmup(&o);
    for (int id = 0; id < warmup; id++)
        TRY(add_unit(out, unit_of(&o, id, false), e));
    for (int id = 0; !o.forward_only && id < all; id++) {
        if (id + warmup < all) {
            struct schedule_unit f = unit_of(&o, id + warmup, false);
            f.paired = overlap_pairs(o.overlap);
            TRY(add_unit(out, f, e));
        }
        TRY(add_unit(out, unit_of(&o, id, true), e));
    }
    return ST_OK;
}

void schedule_units_release(struct schedule_units *s)
{
    free(s->u);
    *s = (struct schedule_units){0};
}

/* ---- a whole step ---------------------------------------------------------------------------- */

static int check_chunks(const struct graph *g, int vpp, struct err *e)
{
    for (int n = 0; n < g->n_nodes; n++)
        if (g->nodes[n].chunk < 0 || g->nodes[n].chunk >= vpp)
            return err_set(e, ST_INTERNAL, "node %s is in chunk %d, but the schedule has %d", g->nodes[n].name,
                           g->nodes[n].chunk, vpp);
    return ST_OK;
}

static int add_host_nodes(const struct graph *g, int n_mb, struct order *out, struct err *e)
{
    for (int mb = 0; mb < n_mb; mb++)
        for (int n = 0; n < g->n_nodes; n++)
            if (g->nodes[n].host && g->nodes[n].phase[PH_FWD].fn != NULL)
                TRY(order_add(out, n, PH_FWD, mb, e));
    return ST_OK;
}

/* One plan holds the whole step, about three kilobytes for each of its entries. */
static int check_size(const struct graph *g, const struct schedule_opts *o, struct err *e)
{
    enum { MAX_STEPS = 1 << 22 };
    int64_t each = 0;
    for (int n = 0; n < g->n_nodes; n++)
        for (int ph = 0; ph < PH_COUNT; ph++)
            each += g->nodes[n].phase[ph].fn != NULL;
    if (each * o->n_mb <= MAX_STEPS)
        return ST_OK;
    err_set(e, ST_USAGE,
            "%d microbatches of %lld pieces of work each are more than the %d that one plan of a step may have",
            o->n_mb, (long long)each, MAX_STEPS);
    return err_hint(e, "a larger train.micro_batch or a smaller train.global_batch gives fewer; up to %lld fit here",
                    (long long)(MAX_STEPS / each));
}

int schedule_step(const struct graph *g, const struct schedule_opts *opts, struct order *out, struct err *e)
{
    struct schedule_opts o = with_defaults(opts);
    struct schedule_units s = {0};
    struct cutter c = {0};
    int st;
    TRY_OUT(check_size(g, &o, e));
    TRY_OUT(check_chunks(g, o.vpp, e));
    TRY_OUT(schedule_units(&o, &s, e));
    TRY_OUT(cutter_open(&c, g, &o, out, e));
    TRY_OUT(add_host_nodes(g, o.n_mb, out, e));
    for (int i = 0; i < s.n; i++) {
        const struct schedule_unit *u = &s.u[i];
        if (u->paired) {
            TRY_OUT(cutter_pair(&c, u, u + 1));
            i++;
        } else {
            TRY_OUT(u->backward ? cutter_backward(&c, u) : cutter_forward(&c, u));
        }
    }
out:
    cutter_close(&c);
    schedule_units_release(&s);
    return st;
}

/* ---- order of additions ---------------------------------------------------------------------- */

/* A digest per persistent slot of who adds to it, in order. */
static int digest_sums(const struct graph *g, const struct order *o, uint64_t *digest)
{
    for (int i = 0; i < o->n; i++) {
        const struct step_ref *r = &o->list[i];
        const struct phase *ph = &g->nodes[r->node].phase[r->phase];
        for (int u = 0; u < ph->n_uses; u++) {
            slot_id s = ph->use[u].slot;
            if (s < 0 || g->slots[s].arena < 0 || ph->use[u].mode != USE_ADD)
                continue;
            const int64_t who[4] = {r->node, r->phase, r->mb, u};
            digest[s] = hash64(who, sizeof who, digest[s] + 1);
        }
    }
    return ST_OK;
}

int order_same_sums(const struct graph *g, const struct order *a, const struct order *b, struct err *e)
{
    uint64_t *x = NULL, *y = NULL;
    int st;
    TRY_OUT(mem_array((void **)&x, (size_t)g->n_slots + 1, sizeof *x, e));
    TRY_OUT(mem_array((void **)&y, (size_t)g->n_slots + 1, sizeof *y, e));
    digest_sums(g, a, x);
    digest_sums(g, b, y);
    for (int s = 0; s < g->n_slots && st == ST_OK; s++)
        if (x[s] != y[s])
            st = err_set(e, ST_INVALID, "the two orders add to slot %s in different order", g->slots[s].name);
out:
    free(x);
    free(y);
    return st;
}
