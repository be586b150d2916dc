/* The update of optimizer state that lies in host memory (optim.offload): it passes through the device in buckets.
 *
 *     copy      in 0   in 1   in 2          in 3
 *     compute          adamw 0       adamw 1
 *     update                  out 0         out 1         both directions of the link at once
 *
 * Bucket k comes in when bucket k - 2 has left, so three buckets of memory are enough. AdamW works element by element:
 * however the elements are cut into buckets, the bits are the same.
 *
 * With optim.overlap the same nodes are part of the training plan of a step's first microbatch, which then applies the
 * update of the step before (build_beside). They use the slots that layers are bound to, so the planner finds what a
 * layer waits for: the buckets with its weights; its gradients are overwritten when AdamW has read them. AdamW has the
 * queue of the copies out there, since computing must not wait for copies of layers that come later. */
#include "dev/host.h"
#include "ops/ops.h"
#include "optim/optim_int.h"

#include <stdlib.h>

/* Elements of a bucket at most; small models have several buckets too. */
enum { BUCKET_MOST = 1 << 25, BUCKET_LEAST = 256, BUCKETS = 8 };

/* A place in a slot that a bucket's AdamW uses: position among its uses, -1: none; bytes from the slot's begin. */
struct spot {
    int use;
    int64_t offset;
};
/* Consecutive elements of one parameter, and where they are in the bucket: bytes, -1: not there. */
struct piece {
    struct trained t;
    int64_t m, v, master; /* in the bucket */
    slot_id m_slot, v_slot, master_slot;
    struct spot grad_at, param_at, master_at;
};
struct bucket {
    const struct update_node *n;
    struct piece *list;
    int pieces;
    bool masters; /* come along */
    int64_t elems, bytes;
    struct adamw_part *parts; /* filled at every run */
    struct use *uses;         /* of AdamW */
    int n_uses;
};
/* Buckets of one graph. */
struct stream {
    struct graph *g;
    const struct update_node *n;
    bool masters, beside;
    struct bucket *list;
    int count;
};

/* ---- steps ----------------------------------------------------------------------------------- */

/* Uses of a copy: the bucket, then of each piece the moments and, if it comes along, the master weights. */
static int copy_pieces(const struct step_ctx *c, bool in)
{
    const struct bucket *b = c->self;
    struct dev *d = c->lane->dev;
    int use = 1;
    for (int i = 0; i < b->pieces; i++) {
        const struct piece *p = &b->list[i];
        const int64_t at[] = {p->m, p->v, p->master};
        for (int k = 0; k < countof(at); k++) {
            if (at[k] < 0)
                continue;
            char *here = (char *)c->t[0].data + at[k], *there = c->t[use].data;
            int64_t bytes = tensor_bytes(&c->t[use]);
            TRY(dev_copy_on(d, c->lane->index, in ? here : there, in ? there : here, bytes, c->lane->err));
            use++;
        }
    }
    return ST_OK;
}
static int in_step(const struct step_ctx *c) { return copy_pieces(c, true); }
static int out_step(const struct step_ctx *c) { return copy_pieces(c, false); }

/* AdamW's first uses; gradients, parameters and master weights follow. */
enum { HYPER, SCALE, STATE, FIXED_USES };

static struct tensor spot_at(const struct step_ctx *c, const struct spot *s, enum dtype type, int64_t n)
{
    return s->use < 0 ? (struct tensor){0} : tensor_1d((char *)c->t[s->use].data + s->offset, type, n);
}

static struct adamw_part part_at(const struct step_ctx *c, const struct bucket *b, const struct piece *p)
{
    const struct update_node *n = b->n;
    const struct trained *t = &p->t;
    const struct stretch state = {.begin = 0, .end = b->bytes};
    bool copy = t->master >= 0;
    struct tensor param = spot_at(c, &p->param_at, copy ? n->real : n->wide, t->elems);
    struct tensor master = p->master >= 0 ? stretch_at(&c->t[STATE], &state, p->master, n->wide, t->elems)
                                          : spot_at(c, &p->master_at, n->wide, t->elems);
    return (struct adamw_part){.p = copy ? master : param,
                               .g = spot_at(c, &p->grad_at, n->wide, t->elems),
                               .m = stretch_at(&c->t[STATE], &state, p->m, n->state, t->elems),
                               .v = stretch_at(&c->t[STATE], &state, p->v, n->state, t->elems),
                               .copy = copy ? param : (struct tensor){0},
                               .decay = t->decay,
                               .rate = t->rate};
}

static int bucket_step(const struct step_ctx *c)
{
    const struct bucket *b = c->self;
    int parts = 0;
    for (int i = 0; i < b->pieces; i++) {
        const struct adamw_part whole = part_at(c, b, &b->list[i]);
        parts += split_parts(b->n, &b->list[i].t, &whole, b->parts + parts);
    }
    struct adamw_args a = update_args(b->n, b->parts, parts, &c->t[HYPER], &c->t[SCALE]);
    return c->ops->adamw(c->lane, &a);
}

/* ---- slots ----------------------------------------------------------------------------------- */

static slot_id piece_slot(struct graph *g, const char *name, enum arena_id arena, int64_t offset, int64_t bytes)
{
    return graph_persistent(g, name, tensor_1d(NULL, DT_U8, bytes), arena, offset);
}

static bool overlaps(const struct slot *s, enum arena_id arena, int64_t offset, int64_t bytes)
{
    return s->arena == (int)arena && s->offset < offset + bytes && offset < s->offset + tensor_bytes(&s->shape);
}

static int add_use(struct bucket *b, slot_id slot, enum use_mode mode)
{
    for (int u = FIXED_USES; u < b->n_uses; u++)
        if (b->uses[u].slot == slot)
            return u;
    b->uses[b->n_uses] = (struct use){.slot = slot, .mode = mode};
    return b->n_uses++;
}

/* Uses of a place in an arena: every slot of the graph that has a part of it, since the planner knows dependencies by
 * slots. Where no slot holds all of it, it gets one. Room for new uses was counted by overlapping(). */
static struct spot find_spot(struct graph *g, struct bucket *b, enum arena_id arena, int64_t offset, int64_t bytes,
                             enum use_mode mode)
{
    struct spot found = {.use = -1};
    if (offset < 0)
        return found;
    for (int s = 0; s < g->n_slots; s++) {
        const struct slot *slot = &g->slots[s];
        if (!overlaps(slot, arena, offset, bytes))
            continue;
        int use = add_use(b, s, mode);
        if (slot->offset <= offset && offset + bytes <= slot->offset + tensor_bytes(&slot->shape))
            found = (struct spot){.use = use, .offset = offset - slot->offset};
    }
    if (found.use < 0)
        found.use = add_use(b, piece_slot(g, "piece", arena, offset, bytes), mode);
    return found;
}

static int overlapping(const struct graph *g, enum arena_id arena, int64_t offset, int64_t bytes)
{
    int n = 1; /* it may get one of its own */
    for (int s = 0; offset >= 0 && s < g->n_slots; s++)
        n += overlaps(&g->slots[s], arena, offset, bytes);
    return n;
}

/* ---- cutting --------------------------------------------------------------------------------- */

static int64_t take_room(struct bucket *b, int64_t bytes)
{
    int64_t at = b->bytes;
    b->bytes += round_up(bytes, DEV_ALIGN);
    return at;
}

/* Elements [first, first + n) of a parameter, as the next piece of the bucket. */
static void add_piece(struct graph *g, struct bucket *b, const struct trained *whole, int64_t first, int64_t n)
{
    int64_t wide = (int64_t)dtype_bytes(b->n->wide), real = (int64_t)dtype_bytes(b->n->real),
            state = (int64_t)dtype_bytes(b->n->state);
    bool copy = whole->master >= 0;
    struct piece *p = &b->list[b->pieces++];
    *p = (struct piece){.t = *whole, .master = -1, .master_slot = NO_SLOT};
    p->t.elems = n;
    p->t.local += first;
    p->t.optim += first * state;
    p->t.second += first * state;
    p->t.grad += first * wide;
    p->t.param += first * (copy ? real : wide);
    p->t.master += copy ? first * wide : 0;
    p->m = take_room(b, n * state);
    p->v = take_room(b, n * state);
    p->m_slot = piece_slot(g, "first", ARENA_OPTIM, p->t.optim, n * state);
    p->v_slot = piece_slot(g, "second", ARENA_OPTIM, p->t.second, n * state);
    if (copy && b->masters) {
        p->master = take_room(b, n * wide);
        p->master_slot = piece_slot(g, "master", ARENA_MASTER, p->t.master, n * wide);
    }
    b->elems += n;
}

/* All parameters in order, cut where a bucket is full. */
static int cut(struct stream *x)
{
    struct graph *g = x->g;
    const struct update_node *n = x->n;
    int64_t total = 0;
    for (int k = 0; k < n->n; k++)
        total += n->list[k].elems;
    int64_t size = round_up(max_i64(BUCKET_LEAST, min_i64(BUCKET_MOST, ceil_div(total, BUCKETS))), DEV_ALIGN);
    int64_t most = ceil_div(total, size - DEV_ALIGN) + 1;
    x->list = graph_own(g, (size_t)most * sizeof *x->list);
    struct piece *pieces = graph_own(g, (size_t)(most + n->n) * sizeof *pieces);
    if (x->list == NULL || pieces == NULL)
        return ST_NOMEM;
    for (int k = 0; k < n->n; k++)
        for (int64_t first = 0; first < n->list[k].elems;) {
            struct bucket *b = x->count > 0 ? &x->list[x->count - 1] : NULL;
            if (b == NULL || size - b->elems < DEV_ALIGN) {
                struct piece *next = b == NULL ? pieces : b->list + b->pieces;
                b = &x->list[x->count++];
                *b = (struct bucket){.n = n, .list = next, .masters = x->masters};
            }
            int64_t room = size - b->elems, left = n->list[k].elems - first;
            int64_t part = left <= room ? left : room - room % DEV_ALIGN; /* what follows stays aligned */
            add_piece(g, b, &n->list[k], first, part);
            first += part;
        }
    return ST_OK;
}

/* The slots that AdamW of a bucket uses beside the bucket, and room for its list of parts. */
static int find_uses(struct graph *g, struct bucket *b, slot_id hyper, slot_id clip)
{
    const struct update_node *n = b->n;
    int64_t wide = (int64_t)dtype_bytes(n->wide), real = (int64_t)dtype_bytes(n->real);
    int most = FIXED_USES, parts = 1;
    for (int i = 0; i < b->pieces; i++) {
        const struct trained *t = &b->list[i].t;
        most += overlapping(g, ARENA_GRAD, t->grad, t->elems * wide) +
                overlapping(g, ARENA_PARAM, t->param, t->elems * wide) +
                overlapping(g, ARENA_MASTER, t->master, t->elems * wide);
        parts += split_parts(n, t, NULL, NULL);
    }
    b->uses = graph_own(g, (size_t)most * sizeof *b->uses);
    b->parts = graph_own(g, (size_t)parts * sizeof *b->parts);
    if (b->uses == NULL || b->parts == NULL)
        return ST_NOMEM;
    b->uses[HYPER] = (struct use)READS(hyper);
    b->uses[SCALE] = (struct use)READS(clip);
    b->n_uses = FIXED_USES;
    for (int i = 0; i < b->pieces; i++) {
        struct piece *p = &b->list[i];
        const struct trained *t = &p->t;
        bool copy = t->master >= 0;
        p->grad_at = find_spot(g, b, ARENA_GRAD, t->grad, t->elems * wide, USE_READ);
        p->param_at = find_spot(g, b, ARENA_PARAM, t->param, t->elems * (copy ? real : wide), USE_ADD);
        p->master_at = p->master >= 0 ? (struct spot){.use = -1}
                                      : find_spot(g, b, ARENA_MASTER, t->master, t->elems * wide, USE_ADD);
    }
    return ST_OK;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static int declare_copy(struct graph *g, const struct bucket *b, const char *name, enum lane_id lane, slot_id state,
                        bool in)
{
    struct use *uses = graph_own(g, (size_t)(1 + 3 * b->pieces) * sizeof *uses);
    int n = 0, node = graph_node(g, name, lane, b);
    if (uses == NULL)
        return -1;
    uses[n++] = (struct use){.slot = state, .mode = in ? USE_WRITE : USE_READ};
    for (int i = 0; i < b->pieces; i++) {
        const slot_id slots[] = {b->list[i].m_slot, b->list[i].v_slot, b->list[i].master_slot};
        for (int k = 0; k < countof(slots); k++)
            if (slots[k] != NO_SLOT)
                uses[n++] = (struct use){.slot = slots[k], .mode = in ? USE_READ : USE_WRITE};
    }
    graph_role(g, node, ROLE_OFFLOAD);
    graph_phase(g, node, PH_FWD, in ? in_step : out_step, uses, n);
    graph_cost(g, node, PH_FWD, 0, (double)b->bytes);
    return node;
}

static int declare_bucket(struct stream *x, struct bucket *b, struct bucket_nodes *out)
{
    struct graph *g = x->g;
    slot_id state = graph_slot(g, "bucket", tensor_1d(NULL, DT_U8, b->bytes));
    double copy = (double)dtype_bytes(b->n->real), wide = (double)dtype_bytes(b->n->wide),
           moment = (double)dtype_bytes(b->n->state);
    b->uses[STATE] = (struct use)ADDS(state);
    out->in = declare_copy(g, b, "fetch", LANE_COPY, state, true);
    out->adamw = graph_node(g, "adamw", x->beside ? LANE_UPDATE : LANE_COMPUTE, b);
    graph_phase(g, out->adamw, PH_FWD, bucket_step, b->uses, b->n_uses);
    graph_cost(g, out->adamw, PH_FWD, 12 * (double)b->elems, (double)b->elems * (3 * wide + 4 * moment + copy));
    out->out = declare_copy(g, b, "return", LANE_UPDATE, state, false);
    return g->err.code;
}

static int declare_buckets(struct stream *x, slot_id hyper, slot_id clip, struct bucket_nodes **out, int *count)
{
    TRY(cut(x));
    struct bucket_nodes *nodes = graph_own(x->g, (size_t)(x->count + 1) * sizeof *nodes);
    if (nodes == NULL)
        return ST_NOMEM;
    for (int k = 0; k < x->count; k++) {
        TRY(find_uses(x->g, &x->list[k], hyper, clip));
        TRY(declare_bucket(x, &x->list[k], &nodes[k]));
    }
    *out = nodes;
    *count = x->count;
    return x->g->err.code;
}

int declare_streamed_update(struct optim *o, const struct update_node *n, slot_id hyper)
{
    struct stream x = {.g = &o->g, .n = n, .masters = o->masters_away};
    return declare_buckets(&x, hyper, o->clip, &o->buckets, &o->n_buckets);
}

/* ---- order ----------------------------------------------------------------------------------- */

/* Buckets in the order that is being made. */
struct placing {
    const struct bucket_nodes *nodes;
    int count, fetched, applied;
    struct order *out;
    struct err *e;
};

static int place_fetch(struct placing *x)
{
    int after = 0, k = x->fetched++;
    for (int i = x->out->n; k >= 2 && after == 0 && i > 0; i--)
        after = x->out->list[i - 1].node == x->nodes[k - 2].out ? i : 0;
    TRY(order_add(x->out, x->nodes[k].in, PH_FWD, 0, x->e));
    x->out->list[x->out->n - 1].after_copy = after;
    return ST_OK;
}

/* The next bucket is updated; the one after it is fetched meanwhile. */
static int place_bucket(struct placing *x)
{
    int k = x->applied++;
    while (x->fetched <= k + 1 && x->fetched < x->count)
        TRY(place_fetch(x));
    TRY(order_add(x->out, x->nodes[k].adamw, PH_FWD, 0, x->e));
    return order_add(x->out, x->nodes[k].out, PH_FWD, 0, x->e);
}

static bool is_bucket_node(const struct optim *o, int node)
{
    return o->n_buckets > 0 && node >= o->buckets[0].in && node <= o->buckets[o->n_buckets - 1].out;
}

int order_streamed_update(const struct optim *o, bool alone, const struct order *all, struct order *decide,
                          struct order *apply, struct err *e)
{
    struct placing x = {.nodes = o->buckets, .count = o->n_buckets, .out = apply, .e = e};
    bool placed = false;
    for (int i = 0; i < all->n; i++) {
        bool bucket = is_bucket_node(o, all->list[i].node);
        if (!bucket) /* codes are made of new weights */
            TRY(order_add(placed && alone ? apply : decide, all->list[i].node, all->list[i].phase, all->list[i].mb, e));
        for (; bucket && !placed && x.applied < x.count;)
            TRY(place_bucket(&x));
        placed |= bucket;
    }
    return ST_OK;
}

/* ---- beside the next step -------------------------------------------------------------------- */

static int declare_beside(struct optim *o, struct graph *g)
{
    const struct slot *hyper = &o->g.slots[o->hyper], *clip = &o->g.slots[o->clip];
    struct stream x = {.g = g, .n = o->update, .masters = o->masters_away, .beside = true};
    const char *scope = g->scope;
    int layer = g->layer, chunk = g->chunk;
    graph_scope(g, -1, "update");
    g->chunk = 0;
    int st = declare_buckets(&x, graph_persistent(g, "hyper", hyper->shape, ARENA_STATE, hyper->offset),
                             graph_persistent(g, "clip", clip->shape, ARENA_STATE, clip->offset), &o->beside_buckets,
                             &o->n_buckets);
    g->scope = scope;
    g->layer = layer;
    g->chunk = chunk;
    return st;
}

/* Which bucket is the last that uses each slot; -1: none. */
static void find_last(const struct optim *o, const struct graph *g, int *last)
{
    for (int s = 0; s < g->n_slots; s++)
        last[s] = -1;
    for (int k = 0; k < o->n_buckets; k++) {
        const struct phase *p = &g->nodes[o->beside_buckets[k].adamw].phase[PH_FWD];
        for (int u = FIXED_USES; u < p->n_uses; u++)
            last[p->use[u].slot] = k;
    }
}

/* The order of the training plan; before an entry come the buckets that it needs, and those before them. */
static int order_beside(const struct optim *o, const struct graph *g, const struct order *train, struct order *out,
                        struct err *e)
{
    struct placing x = {.nodes = o->beside_buckets, .count = o->n_buckets, .out = out, .e = e};
    int *last = NULL, *new_of = NULL, st;
    TRY_OUT(mem_array((void **)&last, (size_t)g->n_slots + 1, sizeof *last, e));
    TRY_OUT(mem_array((void **)&new_of, (size_t)train->n + 1, sizeof *new_of, e));
    find_last(o, g, last);
    for (int i = 0; i < train->n; i++) {
        struct step_ref r = train->list[i];
        const struct phase *p = &g->nodes[r.node].phase[r.phase];
        for (int u = 0; u < p->n_uses; u++)
            while (p->use[u].slot >= 0 && x.applied <= last[p->use[u].slot])
                TRY_OUT(place_bucket(&x));
        new_of[i] = out->n;
        TRY_OUT(order_add(out, r.node, r.phase, r.mb, e));
        out->list[out->n - 1].after = r.after > 0 ? new_of[r.after - 1] + 1 : 0;
        out->list[out->n - 1].after_copy = r.after_copy > 0 ? new_of[r.after_copy - 1] + 1 : 0;
    }
    while (x.applied < x.count)
        TRY_OUT(place_bucket(&x));
out:
    free(last);
    free(new_of);
    return st;
}

int build_beside(struct optim *o, struct model *m, struct model_plan *train, struct err *e)
{
    struct order order = {0};
    if (declare_beside(o, &train->g) != ST_OK) {
        *e = train->g.err;
        return e->code != ST_OK ? e->code : err_set(e, ST_NOMEM, "out of memory declaring the update");
    }
    int st = order_beside(o, &train->g, &train->order, &order, e);
    if (st == ST_OK)
        st = plan_build(&o->beside, "train, update", &train->g, &order, e);
    order_release(&order);
    TRY(st);
    memory_reserve_max(&m->mem, ARENA_FRAME, o->beside.frame_bytes);
    memory_reserve_max(&m->mem, ARENA_WORK, o->beside.work_bytes);
    memory_reserve_max(&m->mem, ARENA_HOST, o->beside.host_bytes);
    return ST_OK;
}

/* ---- showing --------------------------------------------------------------------------------- */

double optim_moved(const struct optim *o)
{
    double bytes = 0;
    for (int k = 0; k < o->n_buckets; k++)
        bytes += o->g.nodes[o->buckets[k].in].phase[PH_FWD].bytes;
    return bytes;
}

void optim_print(const struct optim *o, const struct model *m, struct buf *out)
{
    const char *alone = optim_alone(o, m);
    char moved[32];
    if (o->n_buckets == 0)
        return;
    buf_addf(
        out, "update: %s of %s pass through the device in %d buckets, %s%s\n",
        human_bytes(optim_moved(o), moved, sizeof moved),
        o->masters_away && m->dev->real != m->dev->wide ? "moments and fp32 master weights" : "moments", o->n_buckets,
        alone == NULL ? "beside the forward pass of the next step" : "between the steps: ", alone != NULL ? alone : "");
}
