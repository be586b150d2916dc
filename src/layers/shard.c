/* Slices of parameters, and rows of the residual stream that ranks gather and scatter; see shard.h. */
#include "layers/shard.h"

/* ---- parameters ------------------------------------------------------------------------------ */

int shard_param(struct build *b, struct param *p)
{
    const struct mesh *m = b->mesh;
    if (m->tp == 1 || p->expert)
        return ST_OK;
    bool complete = p->split.how == SPLIT_NONE && p->split.grad == GRAD_COMPLETE;
    if (complete && !p->buffer && !p->frozen)
        return err_set(&b->g->err, ST_INTERNAL,
                       "parameter %s: every tensor-parallel rank has its whole gradient, which would be added up",
                       p->key);
    return param_cut(p, m->tp, m->tp_rank, &b->g->err);
}

/* ---- rows ------------------------------------------------------------------------------------ */

int64_t shard_first_row(const struct build *b) { return b->rows < all_rows(b) ? b->mesh->tp_rank * b->rows : 0; }

struct tensor shard_rows(const struct build *b, struct tensor t)
{
    return t.data != NULL && b->rows < all_rows(b) ? tensor_rows(&t, shard_first_row(b), b->rows) : t;
}

/* ---- steps ----------------------------------------------------------------------------------- */

struct shard_node {
    const char *what;
    const struct mesh *mesh; /* its groups are looked up when a step runs: a plan on paper has none */
    bool kv;                 /* among the ranks that share keys and values, else all tensor-parallel ones */
};

static int group_of(const struct step_ctx *c, struct comm **out)
{
    const struct shard_node *n = c->self;
    *out = n->kv ? n->mesh->kv_comm : n->mesh->tp_comm;
    return *out != NULL
               ? ST_OK
               : err_set(c->lane->err, ST_INTERNAL, "%s: this plan was made without the ranks it is for", n->what);
}

enum { GATHER_PART, GATHER_ALL };
static int gather_step(const struct step_ctx *c)
{
    const struct shard_node *n = c->self;
    struct tensor part = c->t[GATHER_PART], all = c->t[GATHER_ALL];
    struct comm *comm;
    TRY(group_of(c, &comm));
    int64_t piece = tensor_elems(&part);
    part = tensor_1d(part.data, part.dtype, piece);
    all = tensor_1d(all.data, all.dtype, tensor_elems(&all));
    return comm_gather_pieces(comm, c->lane, n->what, &part, &all, piece);
}

enum { SCATTER_ALL, SCATTER_PART, SCATTER_WORK };
static int scatter_step(const struct step_ctx *c)
{
    const struct shard_node *n = c->self;
    struct tensor all = c->t[SCATTER_ALL], part = c->t[SCATTER_PART], work = c->t[SCATTER_WORK];
    struct comm *comm;
    TRY(group_of(c, &comm));
    int64_t piece = tensor_elems(&part);
    part = tensor_1d(part.data, part.dtype, piece);
    all = tensor_1d(all.data, all.dtype, tensor_elems(&all));
    struct piece_slice s = {.piece = piece, .n = piece};
    return comm_sum_pieces(comm, c->lane, n->what, &all, s, &part, c->add[SCATTER_PART], &work);
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static int ranks_of(const struct build *b, bool kv) { return kv ? b->mesh->kv_ranks : b->mesh->tp; }

static int add_node(struct build *b, const char *name, enum node_role role, bool kv)
{
    struct shard_node *n = graph_own(b->g, sizeof *n);
    if (n == NULL)
        return -1;
    *n = (struct shard_node){.what = graph_name(b->g, name), .mesh = b->mesh, .kv = kv};
    int node = graph_node(b->g, name, LANE_COMM, n);
    graph_role(b->g, node, role);
    return node;
}

static void add_gather(struct build *b, int node, enum phase_id ph, slot_id part, slot_id all)
{
    struct graph *g = b->g;
    GRAPH_PHASE(g, node, ph, gather_step, [GATHER_PART] = READS(part), [GATHER_ALL] = WRITES(all));
    if (g->err.code == ST_OK)
        graph_cost(g, node, ph, 0, (double)tensor_bytes(&g->slots[all].shape));
}

static void add_scatter(struct build *b, int node, enum phase_id ph, slot_id all, slot_id part, int ranks)
{
    struct graph *g = b->g;
    if (g->err.code != ST_OK)
        return;
    const struct slot *to = &g->slots[part];
    struct tensor shape = to->shape;
    bool sums = to->sum;
    char name[80];
    snprintf(name, sizeof name, "%s_sums", phase_name(ph));
    /* One piece more: what is there already where it is added to. */
    slot_id work = build_work(
        b, name, comm_sum_room(ranks, tensor_elems(&shape), shape.dtype, false) + (sums ? tensor_bytes(&shape) : 0));
    GRAPH_PHASE(g, node, ph, scatter_step, [SCATTER_ALL] = READS(all),
                [SCATTER_PART] = {.slot = part, .mode = sums ? USE_ADD : USE_WRITE}, [SCATTER_WORK] = WRITES(work));
    graph_cost(g, node, ph, 0, (double)(tensor_bytes(&shape) * ranks));
}

static slot_id slot_of_all(struct build *b, const char *name, slot_id like, int ranks)
{
    if (like == NO_SLOT || b->g->err.code != ST_OK)
        return NO_SLOT;
    struct tensor shape = b->g->slots[like].shape;
    return graph_slot(b->g, name, tensor_2d(NULL, shape.dtype, shape.dim[0] * ranks, shape.dim[1]));
}

static struct gathered gather_over(struct build *b, const char *name, slot_id x, slot_id dx, enum node_role role,
                                   bool kv)
{
    int ranks = ranks_of(b, kv);
    struct graph *g = b->g;
    char grad[64];
    snprintf(grad, sizeof grad, "d%s", name);
    struct gathered all = {.x = slot_of_all(b, name, x, ranks), .dx = slot_of_all(b, grad, dx, ranks)};
    int node = add_node(b, name, role, kv);
    add_gather(b, node, PH_FWD, x, all.x);
    if (!training(b) || g->err.code != ST_OK)
        return all;
    add_gather(b, node, PH_REPLAY, x, all.x);
    graph_replay(g, all.x, node);
    g->slots[all.x].dropped = g->slots[all.x].weight =
        true; /* gathered again for the backward half, whatever else is */
    if (dx != NO_SLOT)
        add_scatter(b, node, PH_BWD, all.dx, dx, ranks);
    return all;
}

struct gathered shard_gather(struct build *b, const char *name, slot_id x, slot_id dx)
{
    return gather_over(b, name, x, dx, ROLE_SHARD, false);
}

struct gathered shard_gather_kv(struct build *b, const char *name, slot_id x, slot_id dx)
{
    return gather_over(b, name, x, dx, ROLE_SHARD, true);
}

void shard_collect(struct build *b, const char *name, slot_id part, slot_id all)
{
    add_gather(b, add_node(b, name, ROLE_SHARD, false), PH_BWD, part, all);
}

static void scatter_rows(struct build *b, const char *name, slot_id y_all, slot_id y, slot_id dy, slot_id dy_all,
                         enum node_role role)
{
    int node = add_node(b, name, role, false);
    add_scatter(b, node, PH_FWD, y_all, y, b->mesh->tp);
    if (training(b) && dy != NO_SLOT && dy_all != NO_SLOT)
        add_gather(b, node, PH_BWD, dy, dy_all);
}

void shard_scatter(struct build *b, const char *name, slot_id y_all, slot_id y, slot_id dy, slot_id dy_all)
{
    scatter_rows(b, name, y_all, y, dy, dy_all, ROLE_SHARD);
}

/* ---- layers ---------------------------------------------------------------------------------- */

/* What is exchanged has names of its own: "3.tp.gathered". */
struct name_scope {
    int layer;
    const char *scope;
};
static struct name_scope enter_scope(struct build *b)
{
    struct name_scope was = {.layer = b->g->layer, .scope = b->g->scope};
    graph_scope(b->g, b->layer, "tp");
    return was;
}

static void leave_scope(struct build *b, struct name_scope was)
{
    b->g->layer = was.layer;
    b->g->scope = was.scope;
}

struct shard_scope shard_begin(struct build *b, struct core_io *io, bool whole)
{
    struct shard_scope s = {.outside = *io, .whole = whole, .on = b->mesh->tp > 1 || b->mesh->tp_nodes};
    if (!s.on)
        return s;
    struct name_scope was = enter_scope(b);
    struct gathered h = gather_over(b, "gathered", io->h, io->dh, whole ? ROLE_ROWS_IN : ROLE_SHARD, false);
    *io = (struct core_io){.h = h.x, .dh = h.dx, .df = slot_of_all(b, "dout", s.outside.df, b->mesh->tp), .f = NO_SLOT};
    leave_scope(b, was);
    b->rows *= b->mesh->tp;
    return s;
}

void shard_end(struct build *b, const struct shard_scope *s, struct core_io *io)
{
    if (!s->on)
        return;
    b->rows /= b->mesh->tp;
    struct name_scope was = enter_scope(b);
    slot_id f = build_real(b, "own_out", b->rows, b->cfg->model.hidden);
    scatter_rows(b, "scattered", io->f, f, s->outside.df, io->df, s->whole ? ROLE_ROWS_OUT : ROLE_SHARD);
    leave_scope(b, was);
    *io = s->outside;
    io->f = f;
}
