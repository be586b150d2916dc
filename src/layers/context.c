/* Messages between ranks that divide sequences; see context.h. */
#include "layers/context.h"

struct context_node {
    const struct mesh *mesh; /* its group is looked up when a step runs: a plan on paper has none */
    const char *what;
    int64_t batch, own, all; /* own, all: elements of a sequence that this rank has, and that it sees */
    int pass;                /* a state goes from rank pass - 1 to rank pass */
};

static int comm_for(const struct step_ctx *c, struct comm **out)
{
    const struct context_node *n = c->self;
    *out = n->mesh->cp_comm;
    return *out != NULL
               ? ST_OK
               : err_set(c->lane->err, ST_INTERNAL, "%s: this plan was made without the ranks it is for", n->what);
}

/* Elements [i * n, (i + 1) * n) of a tensor. */
static struct tensor slice(const struct tensor *t, int64_t i, int64_t n)
{
    return tensor_1d((char *)t->data + i * n * (int64_t)dtype_bytes(t->dtype), t->dtype, n);
}

enum { ROWS_OWN, ROWS_ALL };
static int gather_step(const struct step_ctx *c)
{
    const struct context_node *n = c->self;
    struct comm *comm;
    TRY(comm_for(c, &comm));
    TRY(comm_group_begin(comm, c->lane, n->what));
    for (int64_t b = 0; b < n->batch; b++) {
        struct tensor own = slice(&c->t[ROWS_OWN], b, n->own), all = slice(&c->t[ROWS_ALL], b, n->all);
        TRY(comm_gather_line(comm, c->lane, n->what, &own, &all, false));
    }
    return comm_group_end(comm, c->lane);
}

enum { SUM_ALL, SUM_OWN, SUM_WORK };
static int sum_step(const struct step_ctx *c)
{
    const struct context_node *n = c->self;
    struct comm *comm;
    TRY(comm_for(c, &comm));
    TRY(comm_group_begin(comm, c->lane, n->what));
    int64_t pieces = comm->size - comm->rank;
    for (int64_t b = 0; b < n->batch; b++) {
        struct tensor own = slice(&c->t[SUM_OWN], b, n->own), all = slice(&c->t[SUM_ALL], b, n->all),
                      work = slice(&c->t[SUM_WORK], b, pieces * n->own);
        TRY(comm_sum_line(comm, c->lane, n->what, &all, &own, &work));
    }
    return comm_group_end(comm, c->lane);
}

struct context_rows context_rows_of(struct build *b, const char *name, int64_t rows, int64_t width)
{
    struct context_rows r = {.width = width, .rows = rows, .seen = (b->mesh->cp_rank + 1) * rows};
    char own[64], all[64], down[64], dall[64];
    snprintf(own, sizeof own, "%s_own", name);
    snprintf(all, sizeof all, "%s_all", name);
    snprintf(down, sizeof down, "d%s_own", name);
    snprintf(dall, sizeof dall, "d%s_all", name);
    r.own = build_real(b, own, b->batch * rows, width);
    r.all = build_real(b, all, b->batch * r.seen, width);
    r.down = build_grad(b, down, b->batch * rows, width);
    r.dall = build_grad(b, dall, b->batch * r.seen, width);
    return r;
}

struct context_rows context_rows(struct build *b, const char *name, int64_t width)
{
    return context_rows_of(b, name, b->seq, width);
}

static void fill_first(struct tensor *host, const void *first) { *(int64_t *)host->data = *(const int64_t *)first; }

slot_id context_first(struct build *b)
{
    struct graph *g = b->g;
    int64_t *first = context_divides(b) ? graph_own(g, sizeof *first) : NULL;
    if (first == NULL)
        return NO_SLOT;
    *first = b->mesh->cp_rank * b->seq;
    const char *scope = g->scope;
    int layer = g->layer;
    graph_scope(g, -1, "context");
    slot_id s =
        build_table(b, b->mode == BUILD_TRAIN ? "first" : "first_eval", tensor_1d(NULL, DT_I64, 1), fill_first, first);
    g->scope = scope;
    g->layer = layer;
    return s;
}

void context_gather(struct build *b, const char *name, const struct context_rows *r)
{
    struct graph *g = b->g;
    struct context_node *self = graph_own(g, sizeof *self);
    if (self == NULL || g->err.code != ST_OK)
        return;
    *self = (struct context_node){.mesh = b->mesh,
                                  .what = graph_name(g, name),
                                  .batch = b->batch,
                                  .own = r->rows * r->width,
                                  .all = r->seen * r->width};
    double bytes = (double)tensor_bytes(&g->slots[r->all].shape);
    int n = graph_node(g, name, LANE_COMM, self);
    graph_role(g, n, ROLE_CONTEXT);
    GRAPH_PHASE(g, n, PH_FWD, gather_step, [ROWS_OWN] = READS(r->own), [ROWS_ALL] = WRITES(r->all));
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (!training(b))
        return;
    graph_again(g, n, r->all);
    int64_t pieces = b->mesh->cp - b->mesh->cp_rank;
    char work_name[64];
    snprintf(work_name, sizeof work_name, "%s_sum_work", name);
    slot_id work = build_real(b, work_name, b->batch * r->rows * pieces, r->width);
    GRAPH_PHASE(g, n, PH_BWD,
                sum_step, [SUM_ALL] = READS(r->dall), [SUM_OWN] = WRITES(r->down), [SUM_WORK] = WRITES(work));
    graph_cost(g, n, PH_BWD, 0, bytes);
}

/* ---- edges and states ------------------------------------------------------------------------ */

enum { EDGE_SEND, EDGE_RECV };
static int shift_by(const struct step_ctx *c, bool back)
{
    const struct context_node *n = c->self;
    struct tensor recv = c->t[EDGE_RECV];
    struct comm *comm;
    TRY(comm_for(c, &comm));
    return comm_shift(comm, c->lane, n->what, &c->t[EDGE_SEND], &recv, back);
}
static int shift_fwd(const struct step_ctx *c) { return shift_by(c, false); }
static int shift_bwd(const struct step_ctx *c) { return shift_by(c, true); }

static double bytes_of(const struct build *b, slot_id s)
{
    return b->g->err.code == ST_OK && s >= 0 ? (double)tensor_bytes(&b->g->slots[s].shape) : 0;
}

void context_halo(struct build *b, const char *name, const struct context_edge *e)
{
    struct graph *g = b->g;
    struct context_node *self = graph_own(g, sizeof *self);
    if (self == NULL)
        return;
    *self = (struct context_node){.mesh = b->mesh, .what = graph_name(g, name)};
    int n = graph_node(g, name, LANE_COMM, self);
    graph_role(g, n, ROLE_CONTEXT);
    GRAPH_PHASE(g, n, PH_FWD, shift_fwd, [EDGE_SEND] = READS(e->tail), [EDGE_RECV] = WRITES(e->halo));
    double bytes = bytes_of(b, e->tail != NO_SLOT ? e->tail : e->halo);
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (!training(b))
        return;
    GRAPH_PHASE(g, n, PH_BWD, shift_bwd, [EDGE_SEND] = READS(e->dhalo), [EDGE_RECV] = WRITES(e->dtail));
    graph_cost(g, n, PH_BWD, 0, bytes);
}

static int pass_by(const struct step_ctx *c, bool back)
{
    const struct context_node *n = c->self;
    int from = n->pass - !back, to = n->pass - back;
    struct comm *comm;
    TRY(comm_for(c, &comm));
    return comm_hop(comm, c->lane, n->what, &c->t[comm->rank == from ? EDGE_SEND : EDGE_RECV], from, to);
}
static int pass_fwd(const struct step_ctx *c) { return pass_by(c, false); }
static int pass_bwd(const struct step_ctx *c) { return pass_by(c, true); }

/* From rank `pass` - 1 to rank `pass`. */
static void declare_pass(struct build *b, const struct context_state *s, int pass)
{
    struct graph *g = b->g;
    char name[32];
    struct context_node *self = graph_own(g, sizeof *self);
    if (self == NULL)
        return;
    snprintf(name, sizeof name, "pass%d", pass);
    *self = (struct context_node){.mesh = b->mesh, .what = graph_name(g, name), .pass = pass};
    bool gives = b->mesh->cp_rank == pass - 1, takes = b->mesh->cp_rank == pass;
    int n = graph_node(g, name, LANE_COMM, self);
    graph_role(g, n, ROLE_CONTEXT);
    GRAPH_PHASE(
        g, n, PH_FWD,
        pass_fwd, [EDGE_SEND] = READS(gives ? s->final : NO_SLOT), [EDGE_RECV] = WRITES(takes ? s->init : NO_SLOT));
    graph_cost(g, n, PH_FWD, 0, bytes_of(b, gives ? s->final : takes ? s->init : NO_SLOT));
    if (!training(b))
        return;
    GRAPH_PHASE(
        g, n, PH_BWD,
        pass_bwd, [EDGE_SEND] = READS(takes ? s->dinit : NO_SLOT), [EDGE_RECV] = WRITES(gives ? s->dfinal : NO_SLOT));
    graph_cost(g, n, PH_BWD, 0, bytes_of(b, takes ? s->dinit : gives ? s->dfinal : NO_SLOT));
}

void context_passes(struct build *b, const struct context_state *s, bool before)
{
    int first = before ? 1 : b->mesh->cp_rank + 1, last = before ? b->mesh->cp_rank : b->mesh->cp - 1;
    for (int pass = first; pass <= last; pass++)
        declare_pass(b, s, pass);
}
