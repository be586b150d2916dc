/* Ranks as a grid: pure arithmetic, then the groups. */
#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>

struct mesh mesh_alone(void)
{
    return (struct mesh){.world = 1,
                         .tp = 1,
                         .cp = 1,
                         .dp = 1,
                         .stage = 1,
                         .pp = 1,
                         .vpp = 1,
                         .etp = 1,
                         .ep = 1,
                         .edp = 1,
                         .kv_ranks = 1};
}

/* Sizes that tests and callers leave out count as one. */
static int size_of(int n) { return n > 0 ? n : 1; }

static int refuse_model_ranks(const struct mesh_sizes *s, int stage, struct err *e)
{
    int tp = size_of(s->tp), cp = size_of(s->cp);
    err_set(e, ST_USAGE, "the %d ranks of a stage do not divide by parallel.tp = %d times parallel.cp = %d", stage, tp,
            cp);
    return err_hint(e, "ranks = tp * cp * pp * (ranks that share the batch): start a multiple of %d ranks",
                    tp * cp * s->pp);
}

static int refuse_expert_ranks(const struct mesh_sizes *s, int stage, int world, struct err *e)
{
    err_set(e, ST_USAGE, "the %d ranks of a stage do not divide by parallel.ep = %d", stage, s->ep);
    if (size_of(s->etp) > 1)
        err_set(e, ST_USAGE, "the %d ranks of a stage do not divide by parallel.ep = %d times parallel.etp = %d", stage,
                s->ep, s->etp);
    int etp = size_of(s->etp), ep = s->ep;
    while (etp > 1 && stage % (etp * s->ep) != 0)
        etp--;
    while (ep > 1 && stage % (etp * ep) != 0)
        ep--;
    return err_hint(e,
                    "ranks = pp * ep * etp * (copies of the experts): start a multiple of %d ranks, or use parallel.ep "
                    "= %d and parallel.etp = %d on these %d",
                    s->pp * s->ep * size_of(s->etp), ep, etp, world);
}

int mesh_place(struct mesh *m, const struct mesh_sizes *s, int world, int rank, struct err *e)
{
    int tp = size_of(s->tp), cp = size_of(s->cp), etp = size_of(s->etp), stage = world / s->pp;
    if (world % s->pp != 0) {
        err_set(e, ST_USAGE, "%d ranks do not divide into parallel.pp = %d stages", world, s->pp);
        return err_hint(e, "start a multiple of %d ranks, or change parallel.pp", s->pp);
    }
    if (stage % (tp * cp) != 0)
        return refuse_model_ranks(s, stage, e);
    if (stage % (etp * s->ep) != 0)
        return refuse_expert_ranks(s, stage, world, e);
    if (rank < 0 || rank >= world)
        return err_set(e, ST_USAGE, "rank %d of a world of %d", rank, world);
    int at = rank % stage;
    *m = (struct mesh){.world = world,
                       .rank = rank,
                       .pp = s->pp,
                       .vpp = s->vpp,
                       .first_layers = s->first_layers,
                       .last_layers = s->last_layers,
                       .zero = s->zero,
                       .tp = tp,
                       .cp = cp,
                       .dp = stage / (tp * cp),
                       .stage = stage,
                       .kv_ranks = size_of(s->kv_ranks),
                       .etp = etp,
                       .ep = s->ep,
                       .edp = stage / (etp * s->ep),
                       .pp_rank = rank / stage,
                       .stage_rank = at,
                       .tp_rank = at % tp,
                       .cp_rank = at / tp % cp,
                       .dp_rank = at / (tp * cp),
                       .etp_rank = at % etp,
                       .ep_rank = at / etp % s->ep,
                       .edp_rank = at / (etp * s->ep)};
    return ST_OK;
}

const char *mesh_text(const struct mesh *m, char *out, size_t size)
{
    char tp[48] = "", cp[48] = "", etp[32] = "";
    if (m->tp > 1)
        snprintf(tp, sizeof tp, ", tensor-parallel over %d", m->tp);
    if (m->cp > 1)
        snprintf(cp, sizeof cp, ", context-parallel over %d", m->cp);
    if (m->etp > 1)
        snprintf(etp, sizeof etp, ", each over %d", m->etp);
    snprintf(out, size, "%d data-parallel, %d pipeline stages%s%s, experts over %d%s", m->dp, m->pp, tp, cp, m->ep,
             etp);
    return out;
}

/* Every `step`-th rank from `first`. */
static int open_line(struct world *w, const char *name, int first, int step, int n, struct comm **out, struct err *e)
{
    int *ranks;
    TRY(mem_array((void **)&ranks, (size_t)n, sizeof *ranks, e));
    for (int i = 0; i < n; i++)
        ranks[i] = first + i * step;
    int st = comm_open(w, name, ranks, n, out, e);
    free(ranks);
    return st;
}

/* Groups within the stage. A group with the members of another is that one, so that no connection is opened twice. */
static int open_stage(struct mesh *m, struct world *w, struct err *e)
{
    int stage = m->pp_rank * m->stage, inner = m->tp * m->cp, experts = m->etp * m->ep;
    TRY(open_line(w, "dp", stage + m->tp_rank, m->tp, m->cp * m->dp, &m->dp_comm, e));
    m->stage_comm = m->dp_comm;
    if (m->tp > 1)
        TRY(open_line(w, "stage", stage, 1, m->stage, &m->stage_comm, e));
    if (m->tp > 1 || m->tp_nodes)
        TRY(open_line(w, "tp", m->rank - m->tp_rank, 1, m->tp, &m->tp_comm, e));
    if (m->cp > 1)
        TRY(open_line(w, "cp", stage + m->dp_rank * inner + m->tp_rank, m->tp, m->cp, &m->cp_comm, e));
    m->batch_comm = m->tp > 1 ? m->tp_comm : m->cp_comm;
    if (m->tp > 1 && m->cp > 1)
        TRY(open_line(w, "batch", stage + m->dp_rank * inner, 1, inner, &m->batch_comm, e));
    if (m->kv_ranks > 1)
        TRY(open_line(w, "kv", m->rank - m->tp_rank % m->kv_ranks, 1, m->kv_ranks, &m->kv_comm, e));
    if (m->etp > 1)
        TRY(open_line(w, "etp", m->rank - m->etp_rank, 1, m->etp, &m->etp_comm, e));
    TRY(open_line(w, "ep", stage + m->edp_rank * experts + m->etp_rank, m->etp, m->ep, &m->ep_comm, e));
    return open_line(w, "edp", stage + m->ep_rank * m->etp + m->etp_rank, experts, m->edp, &m->edp_comm, e);
}

int mesh_open(struct mesh *m, const struct mesh_sizes *s, struct world *w, struct err *e)
{
    *m = mesh_alone();
    TRY(comm_agree(world_comm(w), "mesh", mesh_place(m, s, world_size(w), world_rank(w), e), e));
    m->all = world_comm(w);
    m->ep_nodes = world_kind(w) == COMM_LOOP && s->loop == LOOP_EP;
    m->dp_nodes = world_kind(w) == COMM_LOOP && s->loop == LOOP_DP;
    m->tp_nodes = world_kind(w) == COMM_LOOP && s->loop == LOOP_TP;
    int st = open_stage(m, w, e);
    if (st == ST_OK)
        st = open_line(w, "pp", m->stage_rank, m->stage, m->pp, &m->pp_comm, e);
    if (st == ST_OK)
        st = comm_ring(m->pp_comm, e);
    bool end = m->pp > 1 && (m->pp_rank == 0 || m->pp_rank == m->pp - 1);
    if (st == ST_OK)
        st = open_line(w, "ends", m->stage_rank, m->stage * (m->pp - 1), end ? 2 : 0, &m->ends_comm, e);
    if (st != ST_OK)
        mesh_close(m);
    return st;
}

void mesh_close(struct mesh *m)
{
    comm_close(m->ends_comm);
    comm_close(m->pp_comm);
    comm_close(m->edp_comm);
    comm_close(m->ep_comm);
    comm_close(m->etp_comm);
    comm_close(m->kv_comm);
    if (m->batch_comm != m->tp_comm && m->batch_comm != m->cp_comm)
        comm_close(m->batch_comm);
    comm_close(m->cp_comm);
    comm_close(m->tp_comm);
    if (m->stage_comm != m->dp_comm)
        comm_close(m->stage_comm);
    comm_close(m->dp_comm);
    m->all = m->dp_comm = m->stage_comm = m->tp_comm = m->cp_comm = m->batch_comm = NULL;
    m->kv_comm = m->etp_comm = m->ep_comm = m->edp_comm = m->pp_comm = m->ends_comm = NULL;
}

/* ---- copies of a parameter ------------------------------------------------------------------- */

enum { PIECE_ALIGN = 64 };

/* The one place that decides with whom a gradient is added up. */
enum copy_group mesh_copy_group(const struct mesh *m, const struct param *p)
{
    if (p->expert)
        return COPIES_EXPERT;
    return m->tp == 1 || p->split.how == SPLIT_DIM ? COPIES_SLICE : COPIES_STAGE;
}

struct copies mesh_group(const struct mesh *m, enum copy_group group)
{
    const struct copies of[] = {
        [COPIES_SLICE] = {m->cp * m->dp, m->cp_rank + m->cp * m->dp_rank, m->tp, m->dp_comm},
        [COPIES_STAGE] = {m->stage, m->stage_rank, 1, m->stage_comm},
        [COPIES_EXPERT] = {m->edp, m->edp_rank, m->etp * m->ep, m->edp_comm},
    };
    return of[group];
}

static struct copies copies_of(const struct mesh *m, const struct param *p)
{
    return mesh_group(m, mesh_copy_group(m, p));
}
int mesh_copies(const struct mesh *m, const struct param *p) { return copies_of(m, p).n; }
int mesh_copy_rank(const struct mesh *m, const struct param *p) { return copies_of(m, p).rank; }
struct comm *mesh_copy_comm(const struct mesh *m, const struct param *p) { return copies_of(m, p).comm; }

/* Pieces are multiples of this; with code_shards of whole rows, too. */
static int64_t piece_align(const struct param *p)
{
    int64_t align = p->code_shards ? p->dim[p->rank - 1] : PIECE_ALIGN;
    while (align % PIECE_ALIGN != 0)
        align *= 2;
    return align;
}

struct shard mesh_shard(const struct mesh *m, const struct param *p)
{
    int ranks = mesh_copies(m, p);
    int64_t elems = param_elems(p), piece = ranks > 1 ? round_up(ceil_div(elems, ranks), piece_align(p)) : elems;
    int64_t first = min_i64(mesh_copy_rank(m, p) * piece, elems);
    return (struct shard){.first = first, .n = min_i64(piece, elems - first), .piece = piece};
}

bool mesh_shards(const struct mesh *m, const struct param *p, enum kept_form form)
{
    static const int from[] = {
        [KEPT_WEIGHT] = 3, [KEPT_GRADIENT] = 2, [KEPT_MASTER] = 1, [KEPT_MOMENT] = 1, [KEPT_CODES] = 3};
    int level = form == KEPT_WEIGHT && p->code_shards ? 1 : from[form];
    return param_trained(p) && m->zero >= level && (mesh_copies(m, p) > 1 || m->dp_nodes);
}

struct shard mesh_kept(const struct mesh *m, const struct param *p, enum kept_form form)
{
    int64_t elems = param_elems(p);
    return mesh_shards(m, p, form) ? mesh_shard(m, p) : (struct shard){.n = elems, .piece = elems};
}
