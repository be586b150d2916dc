/* Which rank updates what, and how ranks exchange it; see optim.h and optim_int.h.
 *
 * A parameter that R ranks hold copies of is cut into R pieces of equal size, rounded up so that pieces begin where
 * vectors do. Rank r owns piece r: it receives the sum of that piece's gradients, keeps its moments and updates it (ZeRO-1);
 * then all ranks collect the pieces. With parallel.zero=off the sums go to all, and every rank updates everything; sums
 * are taken in rank order either way, and the norm is taken over the same pieces, so that both give the same bits. */
#include "optim/optim_int.h"

#include <string.h>

enum { PIECE_ALIGN = 64 };

static int ranks_of(const struct mesh *mesh, const struct param *p) { return p->expert ? mesh->edp : mesh->dp; }
static int rank_of(const struct mesh *mesh, const struct param *p) { return p->expert ? mesh->edp_rank : mesh->dp_rank; }
static struct comm *comm_of(const struct mesh *mesh, const struct param *p) { return p->expert ? mesh->edp_comm : mesh->dp_comm; }

struct shard shard_of(const struct model *m, int index)
{
    const struct param *p = &m->params.list[index].p;
    int ranks = ranks_of(&m->mesh, p);
    int64_t elems = param_elems(p), piece = ranks > 1 ? round_up(ceil_div(elems, ranks), PIECE_ALIGN) : elems;
    int64_t first = min_i64(rank_of(&m->mesh, p) * piece, elems);
    return (struct shard){.first = first, .n = min_i64(piece, elems - first), .piece = piece};
}

bool shard_is_all(const struct model *m, int index)
{
    return !m->cfg->parallel.zero || ranks_of(&m->mesh, &m->params.list[index].p) == 1;
}

struct shard shard_updated(const struct model *m, int index)
{
    int64_t elems = param_elems(&m->params.list[index].p);
    return shard_is_all(m, index) ? (struct shard){.n = elems, .piece = elems} : shard_of(m, index);
}

/* ---- buckets -------------------------------------------------------------------------------------------------- */

static bool trained(const struct model *m, int k) { return param_trained(&m->params.list[k].p); }

/* The copies of this parameter, by kind: 0 none, 1 of all, 2 of experts. */
static int copies(const struct model *m, int k)
{
    const struct param *p = &m->params.list[k].p;
    if (ranks_of(&m->mesh, p) == 1 && !p->shared_ends)
        return 0;
    return p->expert ? 2 : 1;
}

/* The next bucket of this kind from parameter `from` on; returns where the one after it starts. */
static int fill_bucket(const struct model *m, int kind, int from, int64_t most, int *index, struct bucket *b)
{
    int64_t bytes = 0;
    *b = (struct bucket){.index = index, .exchanged = kind != 0, .suffix = ""};
    for (int k = from; k < m->params.n; k++) {
        if (!trained(m, k) || copies(m, k) != kind)
            continue;
        int64_t more = param_elems(&m->params.list[k].p) * (int64_t)dtype_bytes(m->dev->wide);
        if (b->n > 0 && kind != 0 && bytes + more > most)
            return k;
        index[b->n++] = k;
        bytes += more;
    }
    return m->params.n;
}

int bucket_list(struct graph *g, const struct model *m, struct bucket **out, int *n)
{
    int64_t most = (int64_t)(m->cfg->parallel.bucket_mb * 1e6);
    struct bucket *list = graph_own(g, ((size_t)m->params.n + 3) * sizeof *list);
    int *index = graph_own(g, (size_t)(m->params.n + 1) * sizeof *index);
    *out = list;
    *n = 0;
    if (list == NULL || index == NULL)
        return ST_NOMEM;
    for (int kind = 0; kind < 3; kind++)
        for (int from = 0; from < m->params.n;) {
            from = fill_bucket(m, kind, from, most, index, &list[*n]);
            index += list[*n].n;
            *n += list[*n].n > 0;
        }
    for (int i = 0; *n > 1 && i < *n; i++) {
        list[i].suffix = arena_printf(&g->text, ".%d", i);
        if (list[i].suffix == NULL)
            return ST_NOMEM;
    }
    return ST_OK;
}

/* ---- exchanges of a bucket ---------------------------------------------------------------------------------------- */

struct exchanged {
    int64_t offset, elems, piece; /* offset: bytes into the stretch */
    enum dtype type;
    bool ends;
};
struct exchange {
    const char *what;
    struct comm *comm, *ends; /* NULL in a plan that is not run, and with a single rank */
    bool sum, collect;        /* pieces are summed; pieces go to all */
    int n;
    const struct exchanged *list;
};

static struct tensor part_of(const struct tensor *t, const struct exchanged *x)
{
    return tensor_1d((char *)t->data + x->offset, x->type, x->elems);
}

static int64_t piece_bytes(const struct exchanged *x) { return x->piece * (int64_t)dtype_bytes(x->type); }

/* First and last pipeline stage, each with the gradient of its own copy. */
static int sum_ends(const struct step_ctx *c, const struct exchange *x)
{
    for (int k = 0; x->ends != NULL && x->sum && k < x->n; k++) {
        struct tensor t = part_of(&c->t[0], &x->list[k]), work = tensor_1d(c->t[1].data, t.dtype, 2 * x->list[k].elems);
        if (x->list[k].ends)
            TRY(comm_all_reduce(x->ends, c->lane, x->what, &t, &work));
    }
    return ST_OK;
}

static int sum_pieces(const struct step_ctx *c, const struct exchange *x)
{
    int64_t at = 0;
    TRY(comm_group_begin(x->comm, c->lane, x->what));
    for (int k = 0; k < x->n; k++) {
        int64_t room = x->comm->size * piece_bytes(&x->list[k]);
        struct tensor t = part_of(&c->t[0], &x->list[k]), work = tensor_1d((char *)c->t[1].data + at, t.dtype, x->comm->size * x->list[k].piece);
        TRY(comm_reduce_scatter(x->comm, c->lane, x->what, &t, x->list[k].piece, &work));
        at += round_up(room, DEV_ALIGN);
    }
    return comm_group_end(x->comm, c->lane);
}

static int collect_pieces(const struct step_ctx *c, const struct exchange *x)
{
    TRY(comm_group_begin(x->comm, c->lane, x->what));
    for (int k = 0; k < x->n; k++) {
        struct tensor t = part_of(&c->t[0], &x->list[k]);
        TRY(comm_all_gather(x->comm, c->lane, x->what, &t, x->list[k].piece));
    }
    return comm_group_end(x->comm, c->lane);
}

static int exchange_step(const struct step_ctx *c)
{
    const struct exchange *x = c->self;
    TRY(sum_ends(c, x));
    if (x->comm == NULL || x->comm->size == 1)
        return ST_OK;
    if (x->sum)
        TRY(sum_pieces(c, x));
    return x->collect ? collect_pieces(c, x) : ST_OK;
}

/* Scratch that the sums of a bucket need. */
static int64_t sum_room(const struct exchange *x, int ranks)
{
    int64_t pieces = 0, ends = 0;
    for (int k = 0; k < x->n; k++) {
        pieces += round_up(ranks * piece_bytes(&x->list[k]), DEV_ALIGN);
        if (x->list[k].ends)
            ends = max_i64(ends, 2 * x->list[k].elems * (int64_t)dtype_bytes(x->list[k].type));
    }
    return max_i64(ranks > 1 ? pieces : 0, ends);
}

/* The bucket's parameters as the exchange sees them: offsets are those of gradients, or of the layers' copies. */
static struct exchange *new_exchange(struct graph *g, const struct model *m, const struct bucket *b, bool grads, const struct stretch *s)
{
    struct exchange *x = graph_own(g, sizeof *x);
    struct exchanged *list = graph_own(g, (size_t)b->n * sizeof *list);
    if (x == NULL || list == NULL)
        return NULL;
    *x = (struct exchange){.n = b->n, .list = list};
    for (int i = 0; i < b->n; i++) {
        const struct param_entry *row = &m->params.list[b->index[i]];
        list[i] = (struct exchanged){.offset = (grads ? row->grad_offset : row->offset) - s->begin, .elems = param_elems(&row->p),
                                     .piece = shard_of(m, b->index[i]).piece, .ends = row->p.shared_ends,
                                     .type = grads ? m->dev->wide : param_dtype(&row->p, m->dev->real)};
        x->comm = comm_of(&m->mesh, &row->p);
        x->ends = row->p.shared_ends ? m->mesh.ends_comm : x->ends;
    }
    return x;
}

static void declare_exchange(struct graph *g, const struct bucket *b, const char *name, struct exchange *x, slot_id t, int64_t work_bytes)
{
    char full[64], scratch[80];
    snprintf(full, sizeof full, "%s%s", name, b->suffix);
    snprintf(scratch, sizeof scratch, "%s_work", full);
    x->what = graph_name(g, full);
    slot_id work = work_bytes > 0 ? graph_slot(g, scratch, tensor_1d(NULL, DT_U8, work_bytes)) : NO_SLOT;
    int node = graph_node(g, full, LANE_COMM, x);
    GRAPH_PHASE(g, node, PH_FWD, exchange_step, ADDS(t), WRITES(work));
    double bytes = 0;
    for (int k = 0; k < x->n; k++)
        bytes += (double)(x->list[k].elems * (int64_t)dtype_bytes(x->list[k].type));
    graph_cost(g, node, PH_FWD, 0, bytes);
}

void declare_reduce(struct optim *o, const struct model *m, const struct bucket *b, slot_id grads, const struct stretch *s)
{
    struct exchange *x = b->exchanged ? new_exchange(&o->g, m, b, true, s) : NULL;
    if (x == NULL)
        return;
    x->sum = true;
    x->collect = !m->cfg->parallel.zero;
    declare_exchange(&o->g, b, "reduce", x, grads, sum_room(x, ranks_of(&m->mesh, &m->params.list[b->index[0]].p)));
}

void declare_gather(struct optim *o, const struct model *m, const struct bucket *b, slot_id params, const struct stretch *s)
{
    if (!b->exchanged || shard_is_all(m, b->index[0]))
        return;
    struct exchange *x = new_exchange(&o->g, m, b, false, s);
    if (x == NULL)
        return;
    x->collect = true;
    declare_exchange(&o->g, b, "gather", x, params, 0);
}

/* ---- a number of each rank ------------------------------------------------------------------------------------------ */

struct gather {
    const char *what;
    struct comm *comm;
};

static int share_step(const struct step_ctx *c)
{
    const struct gather *x = c->self;
    struct tensor t = tensor_1d(c->t[0].data, c->t[0].dtype, tensor_elems(&c->t[0]));
    return comm_all_gather(x->comm, c->lane, x->what, &t, tensor_elems(&t) / x->comm->size);
}

void declare_share(struct optim *o, const struct model *m, const char *name, slot_id t)
{
    struct gather *x = graph_own(&o->g, sizeof *x);
    if (x == NULL)
        return;
    *x = (struct gather){.what = graph_name(&o->g, name), .comm = m->mesh.all};
    GRAPH_PHASE(&o->g, graph_node(&o->g, name, LANE_COMM, x), PH_FWD, share_step, ADDS(t));
}
