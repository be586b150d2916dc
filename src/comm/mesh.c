/* Ranks as a grid: pure arithmetic, then the groups. */
#include "comm/comm.h"

#include <stdlib.h>

struct mesh mesh_alone(void) { return (struct mesh){.world = 1, .pp = 1, .vpp = 1, .dp = 1, .ep = 1, .edp = 1}; }

int mesh_place(struct mesh *m, const struct mesh_sizes *s, int world, int rank, struct err *e)
{
    if (world % s->pp != 0) {
        err_set(e, ST_USAGE, "%d ranks do not divide into parallel.pp = %d stages", world, s->pp);
        return err_hint(e, "start a multiple of %d ranks, or change parallel.pp", s->pp);
    }
    int dp = world / s->pp;
    if (dp % s->ep != 0) {
        err_set(e, ST_USAGE, "the %d ranks of a stage do not divide by parallel.ep = %d", dp, s->ep);
        return err_hint(e, "ranks = pp * ep * (copies of the experts): %d = %d * %d * ?", world, s->pp, s->ep);
    }
    if (rank < 0 || rank >= world)
        return err_set(e, ST_USAGE, "rank %d of a world of %d", rank, world);
    int dp_rank = rank % dp;
    *m = (struct mesh){.world = world,
                       .rank = rank,
                       .pp = s->pp,
                       .vpp = s->vpp,
                       .first_layers = s->first_layers,
                       .last_layers = s->last_layers,
                       .zero = s->zero,
                       .dp = dp,
                       .ep = s->ep,
                       .edp = dp / s->ep,
                       .pp_rank = rank / dp,
                       .dp_rank = dp_rank,
                       .ep_rank = dp_rank % s->ep,
                       .edp_rank = dp_rank / s->ep};
    return ST_OK;
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

int mesh_open(struct mesh *m, const struct mesh_sizes *s, struct world *w, struct err *e)
{
    *m = mesh_alone();
    TRY(comm_agree(world_comm(w), "mesh", mesh_place(m, s, world_size(w), world_rank(w), e), e));
    int stage = m->pp_rank * m->dp; /* the first rank of this stage */
    m->all = world_comm(w);
    m->ep_nodes = world_kind(w) == COMM_LOOP;
    int st = open_line(w, "dp", stage, 1, m->dp, &m->dp_comm, e);
    if (st == ST_OK)
        st = open_line(w, "ep", stage + m->edp_rank * m->ep, 1, m->ep, &m->ep_comm, e);
    if (st == ST_OK)
        st = open_line(w, "edp", stage + m->ep_rank, m->ep, m->edp, &m->edp_comm, e);
    if (st == ST_OK)
        st = open_line(w, "pp", m->dp_rank, m->dp, m->pp, &m->pp_comm, e);
    if (st == ST_OK)
        st = comm_ring(m->pp_comm, e);
    bool end = m->pp > 1 && (m->pp_rank == 0 || m->pp_rank == m->pp - 1);
    if (st == ST_OK)
        st = open_line(w, "ends", m->dp_rank, m->dp * (m->pp - 1), end ? 2 : 0, &m->ends_comm, e);
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
    comm_close(m->dp_comm);
    m->all = m->dp_comm = m->ep_comm = m->edp_comm = m->pp_comm = m->ends_comm = NULL;
}

/* ---- copies of a parameter ------------------------------------------------------------------- */

enum { PIECE_ALIGN = 64 };

int mesh_copies(const struct mesh *m, const struct param *p) { return p->expert ? m->edp : m->dp; }
int mesh_copy_rank(const struct mesh *m, const struct param *p) { return p->expert ? m->edp_rank : m->dp_rank; }
struct comm *mesh_copy_comm(const struct mesh *m, const struct param *p)
{
    return p->expert ? m->edp_comm : m->dp_comm;
}

struct shard mesh_shard(const struct mesh *m, const struct param *p)
{
    int ranks = mesh_copies(m, p);
    int64_t elems = param_elems(p), piece = ranks > 1 ? round_up(ceil_div(elems, ranks), PIECE_ALIGN) : elems;
    int64_t first = min_i64(mesh_copy_rank(m, p) * piece, elems);
    return (struct shard){.first = first, .n = min_i64(piece, elems - first), .piece = piece};
}

bool mesh_shards(const struct mesh *m, const struct param *p, enum kept_form form)
{
    static const int from[] = {[KEPT_WEIGHT] = 3, [KEPT_GRADIENT] = 2, [KEPT_MASTER] = 1, [KEPT_MOMENT] = 1};
    return param_trained(p) && m->zero >= from[form] && mesh_copies(m, p) > 1;
}

struct shard mesh_kept(const struct mesh *m, const struct param *p, enum kept_form form)
{
    int64_t elems = param_elems(p);
    return mesh_shards(m, p, form) ? mesh_shard(m, p) : (struct shard){.n = elems, .piece = elems};
}
