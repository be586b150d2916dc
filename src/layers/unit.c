/* Gathers of weights and reductions of gradients, unit by unit; see unit.h. */
#include "layers/unit.h"

#include <stdlib.h>

/* A parameter in a unit. */
struct member {
    int index; /* into the parameter table */
    slot_id whole;
    bool codes; /* whole is its FP8 codes */
};
struct members {
    struct member *list;
    int n, node; /* node: that exchanges them, -1: none yet */
    size_t cap;
};
/* What a graph has of a parameter so far. */
struct bound {
    slot_id w, dw;
    int unit; /* that gathers w */
};
struct units {
    struct members gather[COPY_GROUPS], reduce[COPY_GROUPS];
    struct members late[COPY_GROUPS]; /* reduced when the forward half is done */
    struct bound *of;                 /* [parameter] */
    int n_of;
    size_t cap_of;
    int number, layer; /* of the open unit */
    const char *scope;
    bool only_forward;
};

int units_open(struct units **out, struct err *e)
{
    TRY(mem_array((void **)out, 1, sizeof **out, e));
    for (int k = 0; k < COPY_GROUPS; k++)
        (*out)->gather[k].node = (*out)->reduce[k].node = (*out)->late[k].node = -1;
    (*out)->scope = "unit";
    (*out)->layer = -1;
    return ST_OK;
}

void units_close(struct units *u)
{
    if (u == NULL)
        return;
    for (int k = 0; k < COPY_GROUPS; k++) {
        free(u->gather[k].list);
        free(u->reduce[k].list);
        free(u->late[k].list);
    }
    free(u->of);
    free(u);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Tensors of parameter k in a step: the shard that is kept (absent: it is a part of the whole one),
 * and the whole. */
enum { PER_PARAM = 2 };
static int own_use(int k) { return PER_PARAM * k; }
static int whole_use(int k) { return PER_PARAM * k + 1; }

static struct comm *comm_of(const struct unit_exchange *x) { return mesh_group(x->mesh, x->group).comm; }

static struct tensor whole_of(const struct step_ctx *c, const struct unit_exchange *x, int k)
{
    return tensor_1d(c->t[whole_use(k)].data, x->part[k].type, x->part[k].elems);
}

static struct tensor own_of(const struct step_ctx *c, const struct unit_exchange *x, int k)
{
    const struct unit_part *p = &x->part[k];
    char *at = c->t[own_use(k)].data;
    if (at == NULL && p->own > 0) {
        int rank = mesh_group(x->mesh, x->group).rank;
        at = (char *)c->t[whole_use(k)].data + rank * p->piece * (int64_t)dtype_bytes(p->type);
    }
    return tensor_1d(at, p->type, p->own);
}

static int gather_all(const struct step_ctx *c, const struct unit_exchange *x, bool from_own)
{
    struct comm *comm = comm_of(x);
    TRY(comm_group_begin(comm, c->lane, x->what));
    for (int k = 0; k < x->n; k++) {
        struct tensor whole = whole_of(c, x, k), own = own_of(c, x, k);
        TRY(from_own ? comm_gather_pieces(comm, c->lane, x->what, &own, &whole, x->part[k].piece)
                     : comm_all_gather(comm, c->lane, x->what, &whole, x->part[k].piece));
    }
    return comm_group_end(comm, c->lane);
}

static int no_comm(const struct step_ctx *c, const struct unit_exchange *x)
{
    return err_set(c->lane->err, ST_INTERNAL, "%s: this plan was made without the ranks it is for", x->what);
}

static int gather_step(const struct step_ctx *c)
{
    const struct unit_exchange *x = c->self;
    if (x->once && !c->run->first_mb)
        return ST_OK;
    return comm_of(x) == NULL ? no_comm(c, x) : gather_all(c, x, true);
}

/* One piece of every parameter after the other, in messages of at most x->most
 * elements of a piece. */
static int sum_all(const struct step_ctx *c, const struct unit_exchange *x)
{
    struct comm *comm = comm_of(x);
    const struct tensor *work = &c->t[PER_PARAM * x->n];
    int64_t used = 0;
    TRY(comm_group_begin(comm, c->lane, x->what));
    for (int k = 0; k < x->n; k++) {
        const struct unit_part *p = &x->part[k];
        struct tensor whole = whole_of(c, x, k), own = own_of(c, x, k);
        bool add = c->t[own_use(k)].data != NULL && c->add[own_use(k)];
        for (int64_t from = 0; from < p->piece; from += x->most) {
            struct piece_slice s = {
                .piece = p->piece, .from = from, .n = min_i64(x->most, p->piece - from), .bf16 = p->bf16};
            int64_t room = comm_sum_room(comm->size, s.n, p->type, s.bf16);
            if (used + room > tensor_bytes(work)) {
                TRY(comm_group_end(comm, c->lane));
                TRY(comm_group_begin(comm, c->lane, x->what));
                used = 0;
            }
            struct tensor scratch = tensor_1d((char *)work->data + used, DT_U8, room);
            TRY(comm_sum_pieces(comm, c->lane, x->what, &whole, s, &own, add, &scratch));
            used += room;
        }
    }
    return comm_group_end(comm, c->lane);
}

static int reduce_step(const struct step_ctx *c)
{
    const struct unit_exchange *x = c->self;
    if (x->once && !c->run->last_mb)
        return ST_OK;
    if (comm_of(x) == NULL)
        return no_comm(c, x);
    TRY(sum_all(c, x));
    return x->collect ? gather_all(c, x, false) : ST_OK;
}

/* ---- declaring the nodes --------------------------------------------------------------------- */

/* In the open unit's scope, whatever layer is declaring. */
static int add_node(struct build *b, const char *name, enum node_role role)
{
    struct graph *g = b->g;
    const struct units *u = b->units;
    const char *scope = g->scope;
    int layer = g->layer;
    g->layer = u->layer;
    g->scope = u->scope;
    int node = graph_node(g, name, LANE_COMM, NULL);
    struct unit_exchange *x = graph_own(g, sizeof *x);
    if (x != NULL && node >= 0) {
        x->what = graph_name(g, name);
        x->mesh = b->mesh;
        g->nodes[node].self = x;
    }
    graph_role(g, node, role);
    g->layer = layer;
    g->scope = scope;
    return node;
}

static int add_member(struct build *b, struct members *m, int index, slot_id whole, bool codes)
{
    if (b->g->err.code != ST_OK ||
        mem_grow((void **)&m->list, &m->cap, (size_t)m->n + 1, sizeof *m->list, &b->g->err) != ST_OK)
        return b->g->err.code;
    m->list[m->n++] = (struct member){.index = index, .whole = whole, .codes = codes};
    return ST_OK;
}

/* The shard that is kept of a parameter, as a slot; absent where this rank's piece is empty, or
 * where all is kept. */
static slot_id shard_slot(struct build *b, int index, enum kept_form form)
{
    const struct param_entry *row = &b->params->list[index];
    struct shard s = mesh_shard(b->mesh, &row->p);
    if (s.n == 0 || !mesh_shards(b->mesh, &row->p, form))
        return NO_SLOT;
    if (form == KEPT_CODES)
        return graph_persistent(b->g, "codes_shard", tensor_1d(NULL, DT_F8_E4M3, s.n), ARENA_CODE, row->code_offset[0]);
    bool grad = form == KEPT_GRADIENT;
    struct tensor shape = tensor_1d(NULL, grad ? b->dev->wide : param_dtype(&row->p, b->dev->real), s.n);
    return graph_persistent(b->g, grad ? "grad_shard" : "shard", shape, grad ? ARENA_GRAD : ARENA_PARAM,
                            grad ? row->grad_offset : row->offset);
}

/* Sizes of the members; returns the bytes that all have together. */
static double fill_exchange(struct build *b, const struct members *m, struct unit_exchange *x, bool grads)
{
    double bytes = 0;
    x->part = graph_own(b->g, (size_t)m->n * sizeof *x->part);
    for (int k = 0; x->part != NULL && k < m->n; k++) {
        const struct param *p = &b->params->list[m->list[k].index].p;
        struct shard s = mesh_shard(b->mesh, p);
        x->part[k] = (struct unit_part){.elems = param_elems(p), .piece = s.piece, .own = s.n};
        x->part[k].type = grads ? b->dev->wide : m->list[k].codes ? DT_F8_E4M3 : param_dtype(p, b->dev->real);
        x->part[k].bf16 = grads && b->cfg->parallel.reduce == CFG_REDUCE_BF16 && param_dtype(p, DT_BF16) == DT_BF16;
        bytes += (double)(x->part[k].elems * (int64_t)dtype_bytes(x->part[k].type));
        x->group = mesh_copy_group(b->mesh, p);
        x->n = m->n;
    }
    return bytes;
}

static struct unit_exchange *exchange_of(struct build *b, const struct members *m)
{
    return (struct unit_exchange *)(uintptr_t)b->g->nodes[m->node].self;
}

static void declare_gather(struct build *b, const struct members *m)
{
    struct graph *g = b->g;
    if (m->n == 0 || g->err.code != ST_OK)
        return;
    struct unit_exchange *x = exchange_of(b, m);
    struct use *use = graph_own(g, (size_t)(PER_PARAM * m->n) * sizeof *use);
    double bytes = fill_exchange(b, m, x, false);
    if (g->err.code != ST_OK)
        return;
    x->once = g->nodes[m->node].per_step = b->mesh->zero < 3;
    for (int k = 0; k < m->n; k++) {
        enum kept_form form = m->list[k].codes ? KEPT_CODES : KEPT_WEIGHT;
        use[own_use(k)] = (struct use)READS(shard_slot(b, m->list[k].index, form));
        use[whole_use(k)] = (struct use){.slot = m->list[k].whole, .mode = x->once ? USE_ADD : USE_WRITE};
    }
    graph_phase(g, m->node, PH_FWD, gather_step, use, PER_PARAM * m->n);
    graph_cost(g, m->node, PH_FWD, 0, bytes);
    if (x->once || !training(b))
        return;
    graph_phase(g, m->node, PH_REPLAY, gather_step, use, PER_PARAM * m->n);
    graph_cost(g, m->node, PH_REPLAY, 0, bytes);
    for (int k = 0; k < m->n; k++) {
        graph_replay(g, m->list[k].whole, m->node);
        g->slots[m->list[k].whole].dropped = true;
    }
}

/* Scratch for sums: that of one message, or of all where they fit into one. */
static int64_t sum_room(const struct unit_exchange *x, int ranks, int64_t message_bytes)
{
    int64_t all = 0, largest = 0;
    for (int k = 0; k < x->n; k++) {
        int64_t piece = x->part[k].piece;
        for (int64_t from = 0; from < piece; from += x->most) {
            int64_t room = comm_sum_room(ranks, min_i64(x->most, piece - from), x->part[k].type, x->part[k].bf16);
            largest = max_i64(largest, room);
            all += room;
        }
    }
    return max_i64(largest, min_i64(all, message_bytes));
}

static void declare_reduce(struct build *b, const struct members *m, enum phase_id ph)
{
    struct graph *g = b->g;
    if (m->n == 0 || g->err.code != ST_OK)
        return;
    static const char *const work_name[] = {[COPIES_SLICE] = "reduce_work",
                                            [COPIES_STAGE] = "reduce_replicated_work",
                                            [COPIES_EXPERT] = "reduce_experts_work"};
    struct unit_exchange *x = exchange_of(b, m);
    struct use *use = graph_own(g, (size_t)(PER_PARAM * m->n + 1) * sizeof *use);
    double bytes = fill_exchange(b, m, x, true), message = b->cfg->parallel.bucket_mb * 1e6;
    if (g->err.code != ST_OK)
        return;
    int ranks = mesh_copies(b->mesh, &b->params->list[m->list[0].index].p);
    x->once = g->nodes[m->node].per_step = b->mesh->zero < 2;
    x->collect = b->mesh->zero == 0;
    x->most = max_i64(16, (int64_t)(message / (double)(ranks * (int)dtype_bytes(b->dev->wide))) / 16 * 16);
    for (int k = 0; k < m->n; k++) {
        use[own_use(k)] = (struct use)ADDS(shard_slot(b, m->list[k].index, KEPT_GRADIENT));
        use[whole_use(k)] = (struct use){.slot = m->list[k].whole, .mode = x->once ? USE_ADD : USE_READ};
    }
    int64_t room = sum_room(x, ranks, (int64_t)message);
    use[PER_PARAM * m->n] = (struct use)WRITES(graph_slot(g, work_name[x->group], tensor_1d(NULL, DT_U8, room)));
    graph_phase(g, m->node, ph, reduce_step, use, PER_PARAM * m->n + 1);
    graph_cost(g, m->node, ph, 0, bytes);
}

/* ---- units ----------------------------------------------------------------------------------- */

static void members_clear(struct members *m)
{
    m->n = 0;
    m->node = -1;
}

static void end_unit(struct build *b)
{
    struct units *u = b->units;
    for (int k = 0; k < COPY_GROUPS; k++) {
        declare_gather(b, &u->gather[k]);
        declare_reduce(b, &u->reduce[k], PH_DW);
        members_clear(&u->gather[k]);
        members_clear(&u->reduce[k]);
    }
}

static const char *const gather_name[] = {
    [COPIES_SLICE] = "gather", [COPIES_STAGE] = "gather_replicated", [COPIES_EXPERT] = "gather_experts"};
static const char *const reduce_name[] = {
    [COPIES_SLICE] = "reduce", [COPIES_STAGE] = "reduce_replicated", [COPIES_EXPERT] = "reduce_experts"};

/* Nodes stand in front of all others of the unit, also of those that get weights later (adapters); without members they
 * do nothing. */
static void add_nodes(struct build *b, enum copy_group group)
{
    struct units *u = b->units;
    bool alone = mesh_group(b->mesh, group).n == 1 && !b->mesh->dp_nodes;
    if (alone || (group == COPIES_STAGE && b->mesh->tp == 1))
        return;
    if (b->mesh->zero == 3 || (b->mesh->zero > 0 && training(b)))
        u->gather[group].node = add_node(b, gather_name[group], ROLE_GATHER);
    if (training(b) && !u->only_forward)
        u->reduce[group].node = add_node(b, reduce_name[group], ROLE_REDUCE);
}

void unit_begin(struct build *b, int layer, const char *scope, bool only_forward)
{
    struct units *u = b->units;
    const char *kept = arena_strdup(&b->g->text, scope);
    if (kept == NULL) {
        err_set(&b->g->err, ST_NOMEM, "out of memory declaring %s", scope);
        return;
    }
    end_unit(b);
    u->number++;
    u->layer = layer;
    u->scope = kept;
    u->only_forward = only_forward;
    for (enum copy_group group = 0; group < COPY_GROUPS; group++)
        add_nodes(b, group);
}

void units_finish(struct build *b)
{
    struct units *u = b->units;
    end_unit(b);
    u->scope = "head"; /* nothing else is late */
    u->layer = -1;
    for (int k = 0; k < COPY_GROUPS; k++) {
        if (u->late[k].n > 0)
            u->late[k].node = add_node(b, reduce_name[k], ROLE_REDUCE);
        declare_reduce(b, &u->late[k], PH_FWD);
        members_clear(&u->late[k]);
    }
    u->number++;
    u->only_forward = false;
}

static struct bound *bound_of(struct build *b, int index)
{
    struct units *u = b->units;
    if (mem_grow((void **)&u->of, &u->cap_of, (size_t)index + 1, sizeof *u->of, &b->g->err) != ST_OK)
        return NULL;
    for (; u->n_of <= index; u->n_of++)
        u->of[u->n_of] = (struct bound){.w = NO_SLOT, .dw = NO_SLOT, .unit = -1};
    return &u->of[index];
}

slot_id unit_weight(struct build *b, int index, const char *name)
{
    const struct param_entry *row = &b->params->list[index];
    struct units *u = b->units;
    struct tensor shape = tensor_shape(param_dtype(&row->p, b->dev->real), row->p.rank, row->p.dim);
    bool gathered = u != NULL && mesh_shards(b->mesh, &row->p, KEPT_WEIGHT);
    bool refreshed =
        u != NULL && !gathered && training(b) && !row->p.codes && mesh_shards(b->mesh, &row->p, KEPT_MOMENT);
    if (gathered && row->p.code_shards)
        return graph_slot(b->g, name, shape); /* which nothing reads: its codes are gathered */
    struct bound *at = gathered || refreshed ? bound_of(b, index) : NULL;
    if (!gathered && !refreshed)
        return graph_persistent(b->g, name, shape, ARENA_PARAM, row->offset);
    if (at == NULL || (at->w != NO_SLOT && (refreshed || at->unit == u->number)))
        return at != NULL ? at->w : NO_SLOT;
    struct members *m = &u->gather[mesh_copy_group(b->mesh, &row->p)];
    slot_id w =
        gathered ? graph_slot(b->g, name, shape) : graph_persistent(b->g, name, shape, ARENA_PARAM, row->offset);
    if (w == NO_SLOT || add_member(b, m, index, w, false) != ST_OK)
        return NO_SLOT;
    b->g->slots[w].weight = gathered;
    *at = (struct bound){.w = w, .dw = at->dw, .unit = u->number};
    return w;
}

slot_id unit_codes(struct build *b, int index, const char *name, struct tensor shape)
{
    const struct param_entry *row = &b->params->list[index];
    struct bound *at = bound_of(b, index);
    if (at == NULL || (at->w != NO_SLOT && at->unit == b->units->number))
        return at != NULL ? at->w : NO_SLOT;
    slot_id q = graph_slot(b->g, name, shape);
    if (q == NO_SLOT || add_member(b, &b->units->gather[mesh_copy_group(b->mesh, &row->p)], index, q, true) != ST_OK)
        return NO_SLOT;
    b->g->slots[q].weight = true;
    *at = (struct bound){.w = q, .dw = at->dw, .unit = b->units->number};
    return q;
}

slot_id unit_gradient(struct build *b, int index, const char *name)
{
    const struct param_entry *row = &b->params->list[index];
    struct units *u = b->units;
    struct tensor shape = tensor_shape(b->dev->wide, row->p.rank, row->p.dim);
    bool transient = u != NULL && mesh_shards(b->mesh, &row->p, KEPT_GRADIENT);
    if (u == NULL || (mesh_copies(b->mesh, &row->p) == 1 && !b->mesh->dp_nodes))
        return graph_persistent(b->g, name, shape, ARENA_GRAD, row->grad_offset);
    struct bound *at = bound_of(b, index);
    if (at == NULL || at->dw != NO_SLOT)
        return at != NULL ? at->dw : NO_SLOT;
    enum copy_group group = mesh_copy_group(b->mesh, &row->p);
    struct members *m = u->only_forward ? &u->late[group] : &u->reduce[group];
    slot_id dw =
        transient ? graph_slot(b->g, name, shape) : graph_persistent(b->g, name, shape, ARENA_GRAD, row->grad_offset);
    graph_sum(b->g, dw);
    if (dw == NO_SLOT || add_member(b, m, index, dw, false) != ST_OK)
        return NO_SLOT;
    return at->dw = dw;
}
