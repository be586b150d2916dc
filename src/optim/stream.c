/* The update of optimizer state that lies in host memory (optim.offload): it passes through the device in buckets.
 *
 *     copy      in 0   in 1   in 2          in 3
 *     compute          adamw 0       adamw 1
 *     side                    out 0         out 1         both directions of the link at once
 *
 * Bucket k comes in when bucket k - 2 has left, so three buckets of memory are enough. AdamW works element by element:
 * however the elements are cut into buckets, the bits are the same. */
#include "dev/host.h"
#include "ops/ops.h"
#include "optim/optim_int.h"

/* Elements of a bucket at most; small models have several buckets too. */
enum { BUCKET_MOST = 1 << 25, BUCKET_LEAST = 256, BUCKETS = 8 };

/* Consecutive elements of one parameter, and where they are in the bucket: bytes, -1: not there. */
struct piece {
    struct trained t;     /* optim: of the first moment */
    int64_t second;       /* of the second moment, in the arena */
    int64_t m, v, master; /* in the bucket */
    slot_id m_slot, v_slot, master_slot;
};
struct bucket {
    const struct update_node *n;
    struct piece *list;
    int pieces;
    bool masters; /* come along */
    int64_t elems, bytes;
};

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

enum { GRAD, HYPER, SCALE, PARAM, MASTER, STATE };

static struct adamw_part part_at(const struct step_ctx *c, const struct bucket *b, const struct piece *p)
{
    const struct update_node *n = b->n;
    const struct trained *t = &p->t;
    const struct stretch state = {.begin = 0, .end = b->bytes};
    bool copy = t->master >= 0;
    struct tensor param = stretch_at(&c->t[PARAM], &n->form[FORM_PARAM], t->param, copy ? n->real : n->wide, t->elems);
    struct tensor master = p->master >= 0
                               ? stretch_at(&c->t[STATE], &state, p->master, n->wide, t->elems)
                               : stretch_at(&c->t[MASTER], &n->form[FORM_MASTER], t->master, n->wide, t->elems);
    return (struct adamw_part){.p = copy ? master : param,
                               .g = stretch_at(&c->t[GRAD], &n->form[FORM_GRAD], t->grad, n->wide, t->elems),
                               .m = stretch_at(&c->t[STATE], &state, p->m, n->wide, t->elems),
                               .v = stretch_at(&c->t[STATE], &state, p->v, n->wide, t->elems),
                               .copy = copy ? param : (struct tensor){0},
                               .decay = t->decay,
                               .rate = t->rate};
}

static int bucket_step(const struct step_ctx *c)
{
    const struct bucket *b = c->self;
    const struct update_node *n = b->n;
    for (int i = 0; i < b->pieces; i++)
        n->parts[i] = part_at(c, b, &b->list[i]);
    const struct adamw_part *p = &n->parts[0];
    struct adamw_args a = {.p = p->p,
                           .g = p->g,
                           .m = p->m,
                           .v = p->v,
                           .copy = p->copy,
                           .hyper = c->t[HYPER],
                           .scale = c->t[SCALE],
                           .beta1 = n->beta1,
                           .beta2 = n->beta2,
                           .eps = n->eps,
                           .decay = p->decay,
                           .rate = p->rate,
                           .more = p + 1,
                           .n_more = b->pieces - 1};
    return c->ops->adamw(c->lane, &a);
}

/* ---- cutting --------------------------------------------------------------------------------- */

static slot_id piece_slot(struct graph *g, const char *name, enum arena_id arena, int64_t offset, int64_t bytes)
{
    return graph_persistent(g, name, tensor_1d(NULL, DT_U8, bytes), arena, offset);
}

static int64_t take_room(struct bucket *b, int64_t bytes)
{
    int64_t at = b->bytes;
    b->bytes += round_up(bytes, DEV_ALIGN);
    return at;
}

/* Elements [first, first + n) of a parameter, as the next piece of the bucket. */
static void add_piece(struct graph *g, struct bucket *b, const struct trained *whole, int64_t first, int64_t n)
{
    int64_t wide = (int64_t)dtype_bytes(b->n->wide), real = (int64_t)dtype_bytes(b->n->real), bytes = n * wide;
    bool copy = whole->master >= 0;
    struct piece *p = &b->list[b->pieces++];
    *p = (struct piece){.t = *whole, .master = -1, .master_slot = NO_SLOT};
    p->second = whole->optim + round_up(whole->elems * wide, DEV_ALIGN) + first * wide;
    p->t.elems = n;
    p->t.optim += first * wide;
    p->t.grad += first * wide;
    p->t.param += first * (copy ? real : wide);
    p->t.master += copy ? first * wide : 0;
    p->m = take_room(b, bytes);
    p->v = take_room(b, bytes);
    p->m_slot = piece_slot(g, "first", ARENA_OPTIM, p->t.optim, bytes);
    p->v_slot = piece_slot(g, "second", ARENA_OPTIM, p->second, bytes);
    if (copy && b->masters) {
        p->master = take_room(b, bytes);
        p->master_slot = piece_slot(g, "master", ARENA_MASTER, p->t.master, bytes);
    }
    b->elems += n;
}

/* All parameters in order, cut where a bucket is full. A bucket has at most as many pieces as there are parameters. */
static struct bucket *cut(struct optim *o, const struct update_node *n, int *count)
{
    struct graph *g = &o->g;
    int64_t total = 0;
    for (int k = 0; k < n->n; k++)
        total += n->list[k].elems;
    int64_t size = round_up(max_i64(BUCKET_LEAST, min_i64(BUCKET_MOST, ceil_div(total, BUCKETS))), DEV_ALIGN);
    *count = 0;
    int64_t most = ceil_div(total, size - DEV_ALIGN) + 1;
    struct bucket *list = graph_own(g, (size_t)most * sizeof *list);
    struct piece *pieces = graph_own(g, (size_t)(most + n->n) * sizeof *pieces);
    if (list == NULL || pieces == NULL)
        return NULL;
    for (int k = 0; k < n->n; k++)
        for (int64_t first = 0; first < n->list[k].elems;) {
            struct bucket *b = *count > 0 ? &list[*count - 1] : NULL;
            if (b == NULL || size - b->elems < DEV_ALIGN) {
                struct piece *next = b == NULL ? pieces : b->list + b->pieces;
                b = &list[(*count)++];
                *b = (struct bucket){.n = n, .list = next, .masters = o->masters_away};
            }
            int64_t room = size - b->elems, left = n->list[k].elems - first;
            int64_t part = left <= room ? left : room - room % DEV_ALIGN; /* what follows stays aligned */
            add_piece(g, b, &n->list[k], first, part);
            first += part;
        }
    return list;
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

static void declare_bucket(struct optim *o, const struct bucket *b, slot_id state, const slot_id *uses)
{
    struct graph *g = &o->g;
    double copy = uses[MASTER] != NO_SLOT || b->masters ? (double)dtype_bytes(b->n->real) : 0;
    int node = graph_node(g, "adamw", LANE_COMPUTE, b);
    GRAPH_PHASE(g, node, PH_FWD,
                bucket_step, [GRAD] = READS(uses[GRAD]), [HYPER] = READS(uses[HYPER]), [SCALE] = READS(uses[SCALE]),
                [PARAM] = ADDS(uses[PARAM]), [MASTER] = ADDS(uses[MASTER]), [STATE] = ADDS(state));
    graph_cost(g, node, PH_FWD, 12 * (double)b->elems, (double)b->elems * (7 * (double)dtype_bytes(b->n->wide) + copy));
}

void declare_streamed_update(struct optim *o, const struct update_node *n, slot_id grads, slot_id param, slot_id hyper)
{
    struct graph *g = &o->g;
    int count;
    struct bucket *list = cut(o, n, &count);
    slot_id master = o->masters_away ? NO_SLOT : stretch_slot(g, n, FORM_MASTER), before = NO_SLOT;
    int *copies = graph_own(g, (size_t)(2 * count + 1) * sizeof *copies);
    if (list == NULL || copies == NULL)
        return;
    const slot_id uses[] = {
        [GRAD] = grads, [HYPER] = hyper, [SCALE] = o->clip, [PARAM] = param, [MASTER] = master, [STATE] = NO_SLOT};
    for (int k = 0; k <= count; k++) { /* one bucket ahead */
        slot_id state = NO_SLOT;
        if (k < count) {
            state = graph_slot(g, "bucket", tensor_1d(NULL, DT_U8, list[k].bytes));
            copies[2 * k] = declare_copy(g, &list[k], "fetch", LANE_COPY, state, true);
        }
        if (k > 0) {
            declare_bucket(o, &list[k - 1], before, uses);
            copies[2 * k - 1] = declare_copy(g, &list[k - 1], "return", LANE_SIDE, before, false);
        }
        before = state;
    }
    o->copies = copies;
    o->n_buckets = count;
}

void order_streamed_update(const struct optim *o, struct order *order)
{
    for (int k = 2; k < o->n_buckets; k++) {
        int in = -1, out = -1;
        for (int i = 0; i < order->n; i++) {
            in = order->list[i].node == o->copies[2 * k] ? i : in;
            out = order->list[i].node == o->copies[2 * (k - 2) + 1] ? i : out;
        }
        if (in > out && out >= 0)
            order->list[in].after_copy = out + 1;
    }
}
