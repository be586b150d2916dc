/* Offload: saved slots wait in host memory between their forward and their backward uses; see order_offload() in
 * plan.h.
 *
 * To the planner an offloaded slot is a dropped one whose replay is a copy. A node on the copy lane has two phases:
 *
 *     fwd      slot -> host slot    as soon as the slot is complete
 *     replay   host slot -> slot    for the backward pass
 *
 *     compute   layer 0     | layer 1     | layer 2  ...   backward 2 | backward 1  | backward 0
 *     copy                    out of 0    | out of 1       into 1     | into 0
 *
 * Waits and addresses follow from the slots, as everywhere. Two more kinds of waits bound the memory of the device
 * (step_ref.after_copy): a layer writes its slots when those of the last layer but one have left, and slots of a layer
 * return when the layer before it in the backward pass begins. So those of two or three layers are on the device. */
#include "dev/host.h"
#include "plan/plan_int.h"

#include <stdlib.h>
#include <string.h>

/* A copy back to the device: of which slot, where it is placed at the earliest, and the entry that needs it. */
struct fetch {
    slot_id slot;
    int mb, place, needed;
};
struct offload {
    const struct graph *g;
    struct order *o, out;
    int n_mb;
    bool *chosen; /* [slot] */
    int *node_of; /* [slot] the node that copies it */
    int *wrote;   /* [slot * n_mb + mb] last entry of the forward half that writes it, -1: none */
    int *needed;  /* [slot * n_mb + mb] first entry after the forward half that reads it, -1: none */
    bool *opened; /* [slot * n_mb + mb] what its replay reads has been noted */
    int *new_of;  /* [entry] its position in the new order */
    struct fetch *fetch;
    int n_fetches;
    size_t cap_fetches;
    struct offload_count *count;
    struct err *e;
};

/* ---- which slots ----------------------------------------------------------------------------- */

/* Inside an offloaded layer's neighbourhood: some slot of the same layer has a tag like this. NULL: always. */
static bool has_beside(const struct graph *g, int layer, const char *beside)
{
    for (int s = 0; beside != NULL && s < g->n_slots; s++)
        if (g->slots[s].layer == layer && str_glob(beside, g->slots[s].tag))
            return true;
    return beside == NULL;
}

int graph_offload(struct graph *g, const char *name, const char *beside, int64_t layers)
{
    int matched = 0;
    for (int s = 0; s < g->n_slots; s++) {
        struct slot *slot = &g->slots[s];
        if (slot->arena >= 0 || slot->weight || slot->layer >= layers || !slot_name_matches(name, slot->tag) ||
            !has_beside(g, slot->layer, beside))
            continue;
        slot->offload = true;
        matched++;
    }
    return matched;
}

static const struct phase *phase_of(const struct offload *x, const struct step_ref *r)
{
    return &x->g->nodes[r->node].phase[r->phase];
}

static size_t life(const struct offload *x, slot_id slot, int mb)
{
    return (size_t)slot * (size_t)x->n_mb + (size_t)mb;
}

static void choose(struct offload *x, int64_t min_elems)
{
    for (int s = 0; s < x->g->n_slots; s++) {
        const struct slot *slot = &x->g->slots[s];
        if (!slot->offload)
            continue;
        bool small = tensor_elems(&slot->shape) < min_elems;
        x->chosen[s] = !slot->dropped && !small;
        x->count->recomputed += slot->dropped;
        x->count->small += !slot->dropped && small;
    }
}

/* Where a chosen slot is written. What the host writes is there before anything runs, and what the backward half
 * changes must be where it was: both stay. */
static void find_writes(struct offload *x)
{
    for (int i = 0; i < x->o->n; i++) {
        const struct step_ref *r = &x->o->list[i];
        const struct phase *p = phase_of(x, r);
        for (int u = 0; u < p->n_uses; u++) {
            slot_id s = p->use[u].slot;
            if (s < 0 || !x->chosen[s] || p->use[u].mode == USE_READ)
                continue;
            if (r->phase == PH_FWD && !x->g->nodes[r->node].host)
                x->wrote[life(x, s, r->mb)] = i;
            else if (r->phase != PH_REPLAY)
                x->chosen[s] = false;
        }
    }
}

/* Entry `at` reads what the phase reads; a dropped slot is recomputed first, and what that reads is needed then. */
static void note_needs(struct offload *x, const struct phase *p, int mb, int at)
{
    for (int u = 0; u < p->n_uses; u++) {
        slot_id s = p->use[u].slot;
        if (s < 0 || p->use[u].mode != USE_READ)
            continue;
        const struct slot *slot = &x->g->slots[s];
        if (x->chosen[s] && x->needed[life(x, s, mb)] < 0)
            x->needed[life(x, s, mb)] = at;
        if (!slot->dropped || slot->replay < 0 || x->opened[life(x, s, mb)])
            continue;
        x->opened[life(x, s, mb)] = true;
        note_needs(x, &x->g->nodes[slot->replay].phase[PH_REPLAY], mb, at);
    }
}

/* A slot that no later half reads is not saved, so there is nothing to offload. */
static void find_needs(struct offload *x)
{
    for (int i = 0; i < x->o->n; i++)
        if (x->o->list[i].phase != PH_FWD)
            note_needs(x, phase_of(x, &x->o->list[i]), x->o->list[i].mb, i);
    for (int s = 0; s < x->g->n_slots; s++)
        for (int mb = 0; x->chosen[s] && mb < x->n_mb; mb++)
            if (x->wrote[life(x, s, mb)] < 0 || x->needed[life(x, s, mb)] <= x->wrote[life(x, s, mb)])
                x->chosen[s] = false;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static int copy_step(const struct step_ctx *c)
{
    struct dev *d = c->lane->dev;
    return dev_copy_on(d, c->lane->index, c->t[1].data, c->t[0].data, tensor_bytes(&c->t[0]), c->lane->err);
}

static void add_node(struct offload *x, struct graph *g, slot_id slot)
{
    const struct slot *s = &g->slots[slot];
    double bytes = (double)tensor_bytes(&s->shape);
    int chunk = g->chunk, writer = x->o->list[x->wrote[life(x, slot, 0)]].node;
    const char *tag = s->tag;
    g->chunk = g->nodes[writer].chunk;
    graph_scope(g, s->layer, "host");
    slot_id host = graph_slot(g, tag, s->shape);
    int node = graph_node(g, tag, LANE_COPY, NULL);
    g->chunk = chunk;
    if (host < 0 || node < 0)
        return;
    g->slots[host].host = true;
    graph_role(g, node, ROLE_OFFLOAD);
    GRAPH_PHASE(g, node, PH_FWD, copy_step, READS(slot), WRITES(host));
    GRAPH_PHASE(g, node, PH_REPLAY, copy_step, READS(host), WRITES(slot));
    graph_cost(g, node, PH_FWD, 0, bytes);
    graph_cost(g, node, PH_REPLAY, 0, bytes);
    g->slots[slot].dropped = true;
    graph_replay(g, slot, node);
    x->node_of[slot] = node;
    x->count->slots++;
    x->count->bytes += tensor_bytes(&g->slots[slot].shape);
}

/* ---- places ---------------------------------------------------------------------------------- */

static bool same_layer(const struct offload *x, int a, int b)
{
    const struct step_ref *p = &x->o->list[a], *q = &x->o->list[b];
    return p->mb == q->mb && x->g->nodes[p->node].layer == x->g->nodes[q->node].layer;
}

/* The first entry of the layer whose backward pass comes before that of entry `at`; forward entries between do not
 * count. */
static int one_layer_ahead(const struct offload *x, int at)
{
    int place = at, layer = at, others = 0;
    for (int i = at - 1; i >= 0 && others < 2; i--) {
        if (x->o->list[i].phase == PH_FWD)
            continue;
        if (!same_layer(x, i, layer)) {
            layer = i;
            others++;
        }
        if (others < 2)
            place = i;
    }
    return place;
}

static int by_need(const void *a, const void *b)
{
    const struct fetch *x = a, *y = b;
    return x->needed != y->needed ? x->needed - y->needed : x->slot - y->slot;
}

static int list_fetches(struct offload *x, int n_slots)
{
    for (int s = 0; s < n_slots; s++)
        for (int mb = 0; x->chosen[s] && mb < x->n_mb; mb++) {
            int at = x->needed[life(x, s, mb)], place = one_layer_ahead(x, at), wrote = x->wrote[life(x, s, mb)];
            TRY(mem_grow((void **)&x->fetch, &x->cap_fetches, (size_t)x->n_fetches + 1, sizeof *x->fetch, x->e));
            x->fetch[x->n_fetches++] =
                (struct fetch){.slot = s, .mb = mb, .place = place > wrote ? place : wrote + 1, .needed = at};
        }
    if (x->n_fetches > 0)
        qsort(x->fetch, (size_t)x->n_fetches, sizeof *x->fetch, by_need);
    for (int k = 1; k < x->n_fetches; k++) /* one queue: the order of needs is the order of copies */
        if (x->fetch[k].place < x->fetch[k - 1].place)
            x->fetch[k].place = x->fetch[k - 1].place;
    return ST_OK;
}

/* Position + 1 of the last computing in the new order. */
static int last_computed(const struct offload *x)
{
    for (int i = x->out.n; i > 0; i--) {
        const struct node *n = &x->g->nodes[x->out.list[i - 1].node];
        if (n->lane == LANE_COMPUTE && !n->host)
            return i;
    }
    return 0;
}

/* Copies out of a layer, in the new order: their first and last slot's writer and the last copy. */
struct leaving {
    int layer, mb, first_write, last_copy;
};

/* Computing that writes slots of a layer waits for the copies of the last layer but one. */
static void pace(struct offload *x, const struct leaving *now, const struct leaving *before)
{
    if (before->last_copy < 0 || before->last_copy >= now->first_write)
        return;
    struct step_ref *r = &x->out.list[now->first_write];
    r->after_copy = before->last_copy + 1 > r->after_copy ? before->last_copy + 1 : r->after_copy;
}

static int add_copies_out(struct offload *x, int entry, int n_slots, struct leaving recent[3])
{
    const struct step_ref *r = &x->o->list[entry];
    const struct phase *p = phase_of(x, r);
    for (int u = 0; r->phase == PH_FWD && u < p->n_uses; u++) {
        slot_id s = p->use[u].slot;
        if (s < 0 || s >= n_slots || p->use[u].mode == USE_READ || !x->chosen[s] ||
            x->wrote[life(x, s, r->mb)] != entry)
            continue;
        int layer = x->g->slots[s].layer;
        if (recent[0].last_copy < 0 || recent[0].layer != layer || recent[0].mb != r->mb) {
            recent[2] = recent[1];
            recent[1] = recent[0];
            recent[0] = (struct leaving){.layer = layer, .mb = r->mb, .first_write = x->new_of[entry]};
            pace(x, &recent[0], &recent[2]);
        }
        recent[0].last_copy = x->out.n;
        TRY(order_add(&x->out, x->node_of[s], PH_FWD, r->mb, x->e));
    }
    return ST_OK;
}

static int place_copies(struct offload *x, int n_slots)
{
    struct leaving recent[3] = {{.last_copy = -1}, {.last_copy = -1}, {.last_copy = -1}};
    int next = 0;
    for (int i = 0; i < x->o->n; i++) {
        for (; next < x->n_fetches && x->fetch[next].place <= i; next++) {
            const struct fetch *f = &x->fetch[next];
            int after = last_computed(x);
            TRY(order_add(&x->out, x->node_of[f->slot], PH_REPLAY, f->mb, x->e));
            x->out.list[x->out.n - 1].after_copy = after;
        }
        struct step_ref r = x->o->list[i];
        x->new_of[i] = x->out.n;
        TRY(order_add(&x->out, r.node, r.phase, r.mb, x->e));
        struct step_ref *made = &x->out.list[x->out.n - 1];
        made->after = r.after > 0 ? x->new_of[r.after - 1] + 1 : 0;
        TRY(add_copies_out(x, i, n_slots, recent));
    }
    return ST_OK;
}

/* ---- the pass -------------------------------------------------------------------------------- */

static int open_lists(struct offload *x)
{
    size_t slots = (size_t)x->g->n_slots + 1, lives = slots * (size_t)x->n_mb;
    TRY(mem_array((void **)&x->chosen, slots, sizeof *x->chosen, x->e));
    TRY(mem_array((void **)&x->node_of, slots, sizeof *x->node_of, x->e));
    TRY(mem_array((void **)&x->wrote, lives, sizeof *x->wrote, x->e));
    TRY(mem_array((void **)&x->needed, lives, sizeof *x->needed, x->e));
    TRY(mem_array((void **)&x->opened, lives, sizeof *x->opened, x->e));
    TRY(mem_array((void **)&x->new_of, (size_t)x->o->n + 1, sizeof *x->new_of, x->e));
    memset(x->wrote, 0xFF, lives * sizeof *x->wrote);
    memset(x->needed, 0xFF, lives * sizeof *x->needed);
    return ST_OK;
}

static void close_lists(struct offload *x)
{
    free(x->chosen);
    free(x->node_of);
    free(x->wrote);
    free(x->needed);
    free(x->opened);
    free(x->new_of);
    free(x->fetch);
    order_release(&x->out);
}

static int count_marked(const struct graph *g)
{
    int n = 0;
    for (int s = 0; s < g->n_slots; s++)
        n += g->slots[s].offload;
    return n;
}

int order_offload(struct graph *g, struct order *o, int64_t min_elems, struct offload_count *count, struct err *e)
{
    struct offload x = {.g = g, .o = o, .n_mb = 1, .count = count, .e = e};
    int st, n_slots = g->n_slots;
    *count = (struct offload_count){.named = count_marked(g)};
    if (count->named == 0)
        return ST_OK;
    for (int i = 0; i < o->n; i++)
        x.n_mb = o->list[i].mb + 1 > x.n_mb ? o->list[i].mb + 1 : x.n_mb;
    TRY_OUT(open_lists(&x));
    choose(&x, min_elems);
    find_writes(&x);
    find_needs(&x);
    for (slot_id s = 0; s < n_slots; s++)
        if (x.chosen[s])
            add_node(&x, g, s);
    if (g->err.code != ST_OK) {
        *e = g->err;
        st = e->code;
        goto out;
    }
    TRY_OUT(list_fetches(&x, n_slots));
    TRY_OUT(place_copies(&x, n_slots));
    struct order made = x.out;
    x.out = *o;
    *o = made;
out:
    close_lists(&x);
    return st;
}
