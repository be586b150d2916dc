/* Who updates what, and what ranks exchange in an update; see optim.h and optim_int.h.
 *
 * Of a parameter that R ranks hold copies of, rank r owns piece r (mesh_shard). With parallel.zero of 1 or more it has
 * the sum of that piece's gradients, keeps its moments and updates it; with 0 every rank has all sums and updates
 * everything. Sums are taken in rank order and the norm over the same pieces either way, so that all give the same
 * bits. */
#include "optim/optim_int.h"

struct shard shard_of(const struct model *m, int index) { return mesh_shard(&m->mesh, &m->params.list[index].p); }
bool shard_is_all(const struct model *m, int index)
{
    return !mesh_shards(&m->mesh, &m->params.list[index].p, KEPT_MOMENT);
}
struct shard shard_updated(const struct model *m, int index)
{
    return mesh_kept(&m->mesh, &m->params.list[index].p, KEPT_MOMENT);
}

/* ---- both ends of a pipeline ----------------------------------------------------------------- */

/* Sums over data-parallel ranks are there already, so each rank adds up what it updates with its partner at the other
 * end. */
struct ends_node {
    const char *what;
    const struct mesh *mesh;
    enum dtype type;
    int n;
    struct end_part {
        int64_t offset, elems; /* offset: bytes into the stretch */
    } * part;
};

static int ends_step(const struct step_ctx *c)
{
    enum { GRADS, WORK };
    const struct ends_node *x = c->self;
    if (x->mesh->ends_comm == NULL)
        return err_set(c->lane->err, ST_INTERNAL, "%s: this plan was made without the ranks it is for", x->what);
    for (int k = 0; k < x->n; k++) {
        struct tensor t = tensor_1d((char *)c->t[GRADS].data + x->part[k].offset, x->type, x->part[k].elems);
        struct tensor work = tensor_1d(c->t[WORK].data, x->type, 2 * x->part[k].elems);
        TRY(comm_all_reduce(x->mesh->ends_comm, c->lane, x->what, &t, &work));
    }
    return ST_OK;
}

void declare_ends(struct optim *o, const struct model *m, slot_id grads, const struct stretch *s)
{
    struct graph *g = &o->g;
    struct ends_node *x = graph_own(g, sizeof *x);
    struct end_part *part = graph_own(g, (size_t)m->params.n * sizeof *part);
    int64_t most = 0, size = (int64_t)dtype_bytes(m->dev->wide);
    double bytes = 0;
    if (x == NULL || part == NULL)
        return;
    *x = (struct ends_node){.mesh = &m->mesh, .type = m->dev->wide, .part = part};
    for (int k = 0; k < m->params.n; k++) {
        const struct param_entry *row = &m->params.list[k];
        struct shard updated = shard_updated(m, k), kept = mesh_kept(&m->mesh, &row->p, KEPT_GRADIENT);
        if (!row->p.shared_ends || !param_trained(&row->p) || updated.n == 0)
            continue;
        part[x->n++] = (struct end_part){.offset = row->grad_offset - s->begin + (updated.first - kept.first) * size,
                                         .elems = updated.n};
        most = max_i64(most, updated.n);
        bytes += (double)(updated.n * size);
    }
    if (x->n == 0)
        return;
    x->what = graph_name(g, "ends");
    slot_id work = graph_slot(g, "ends_work", tensor_1d(NULL, DT_U8, 2 * most * size));
    int node = graph_node(g, "ends", LANE_COMM, x);
    GRAPH_PHASE(g, node, PH_FWD, ends_step, ADDS(grads), WRITES(work));
    graph_cost(g, node, PH_FWD, 0, bytes);
}

/* ---- weights with codes ---------------------------------------------------------------------- */

/* Values whose codes every rank makes of all of them, right after the update: these do not wait for the next step to be
 * gathered. */
static bool gathers_values(const struct model *m, int k)
{
    const struct param_entry *row = &m->params.list[k];
    return row->code_offset[0] >= 0 && !model_shares_codes(m, k) && mesh_shards(&m->mesh, &row->p, KEPT_MOMENT);
}

struct coded_node {
    const char *what;
    const struct model *m;
    int64_t begin; /* of the stretch */
};

static int coded_gather_step(const struct step_ctx *c)
{
    const struct coded_node *x = c->self;
    const struct mesh *mesh = &x->m->mesh;
    for (int k = 0; k < x->m->params.n; k++) {
        const struct param_entry *row = &x->m->params.list[k];
        if (!gathers_values(x->m, k))
            continue;
        struct tensor w =
            tensor_1d((char *)c->t[0].data + (row->offset - x->begin), x->m->dev->wide, param_elems(&row->p));
        TRY(comm_all_gather(mesh_copy_comm(mesh, &row->p), c->lane, x->what, &w, mesh_shard(mesh, &row->p).piece));
    }
    return ST_OK;
}

void declare_coded_gather(struct optim *o, const struct model *m, slot_id params, const struct stretch *s)
{
    struct graph *g = &o->g;
    double bytes = 0;
    for (int k = 0; k < m->params.n; k++) {
        const struct param *p = &m->params.list[k].p;
        if (gathers_values(m, k))
            bytes += (double)(param_elems(p) * (int64_t)dtype_bytes(m->dev->wide));
    }
    struct coded_node *x = graph_own(g, sizeof *x);
    if (x == NULL || bytes == 0)
        return;
    *x = (struct coded_node){.what = graph_name(g, "gather"), .m = m, .begin = s->begin};
    int node = graph_node(g, "gather", LANE_COMM, x);
    GRAPH_PHASE(g, node, PH_FWD, coded_gather_step, ADDS(params));
    graph_cost(g, node, PH_FWD, 0, bytes);
}

/* Codes that ranks make together: the stages of model/codes.c, one node each. */
struct stage_node {
    const char *what;
    const struct model *m;
    enum code_stage stage;
};

static int stage_step(const struct step_ctx *c)
{
    const struct stage_node *x = c->self;
    return model_code_stage(x->m, x->stage, x->what, c->lane);
}

void declare_shared_codes(struct optim *o, const struct model *m, slot_id params, slot_id codes)
{
    static const char *const name[] = {[CODES_MOST] = "codes_most",
                                       [CODES_SHARE] = "codes_share",
                                       [CODES_ENCODE] = "codes",
                                       [CODES_GATHER] = "gather",
                                       [CODES_TURN] = "codes_turn"};
    struct graph *g = &o->g;
    for (int stage = 0; stage < CODE_STAGES; stage++) {
        double bytes = model_code_stage_bytes(m, (enum code_stage)stage);
        struct stage_node *x = bytes > 0 ? graph_own(g, sizeof *x) : NULL;
        if (x == NULL)
            continue;
        *x = (struct stage_node){.what = graph_name(g, name[stage]), .m = m, .stage = (enum code_stage)stage};
        bool exchange = stage == CODES_SHARE || stage == CODES_GATHER;
        int node = graph_node(g, name[stage], exchange ? LANE_COMM : LANE_COMPUTE, x);
        GRAPH_PHASE(g, node, PH_FWD, stage_step, READS(params), ADDS(codes));
        graph_cost(g, node, PH_FWD, 0, bytes);
    }
}

/* ---- a number of each rank ------------------------------------------------------------------- */

struct share_node {
    const char *what;
    struct comm *comm;
};

static int share_step(const struct step_ctx *c)
{
    const struct share_node *x = c->self;
    struct tensor t = tensor_1d(c->t[0].data, c->t[0].dtype, tensor_elems(&c->t[0]));
    return comm_all_gather(x->comm, c->lane, x->what, &t, tensor_elems(&t) / x->comm->size);
}

void declare_share(struct optim *o, const struct model *m, const char *name, slot_id t)
{
    struct share_node *x = graph_own(&o->g, sizeof *x);
    if (x == NULL)
        return;
    *x = (struct share_node){.what = graph_name(&o->g, name), .comm = m->mesh.all};
    GRAPH_PHASE(&o->g, graph_node(&o->g, name, LANE_COMM, x), PH_FWD, share_step, ADDS(t));
}
