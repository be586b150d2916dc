/* Where a trainer stands: its rank's place in the mesh, and its share of the machine. */
#include "train/train.h"

#include <string.h>

struct rank_place place_alone(void) { return (struct rank_place){.mesh = mesh_alone()}; }

int place_sizes(const struct config *cfg, struct mesh_sizes *s, struct err *e)
{
    static const enum loop_axis axes[] = {[CFG_LOOP_EP] = LOOP_EP, [CFG_LOOP_DP] = LOOP_DP, [CFG_LOOP_TP] = LOOP_TP};
    const struct config_parallel *c = &cfg->parallel;
    *s = (struct mesh_sizes){.pp = (int)c->pp,
                             .vpp = (int)c->vpp,
                             .ep = (int)c->ep,
                             .tp = (int)c->tp,
                             .cp = (int)c->cp,
                             .etp = (int)c->etp,
                             .first_layers = c->pp > 1 ? (int)c->first_layers : 0,
                             .last_layers = c->pp > 1 ? (int)c->last_layers : 0,
                             .zero = (int)c->zero,
                             .loop = axes[c->loop_axis]};
    /* Fewer groups of keys and values than ranks: several share one. */
    int64_t groups = strchr(cfg->model.pattern, '*') != NULL ? cfg->model.kv_heads : 0;
    if (groups > 0 && c->tp > groups && c->tp % groups == 0)
        s->kv_ranks = (int)(c->tp / groups);
    if (s->vpp == 0 && s->pp == 1)
        s->vpp = 1; /* '|' without a pipeline says nothing */
    if (s->vpp > 0)
        return ST_OK;
    struct pattern p;
    enum pattern_error code;
    TRY(pattern_parse(&p, cfg->model.pattern, e));
    TRY(pattern_virtual_stages(&p, s->pp, &s->vpp, &code, e));
    s->vpp = s->vpp > 0 ? s->vpp : 1;
    return ST_OK;
}

/* Ranks of one machine share its cores, unless the user said how many each takes. */
static int threads_for(const struct config *cfg, int local_ranks)
{
    bool given = config_source_of(cfg, "run.threads").source != CFG_FROM_AUTO;
    return given ? (int)cfg->run.threads : (int)max_i64(1, cpu_count() / local_ranks);
}

int place_open(struct rank_place *p, const struct config *cfg, struct world *w, int local_rank, int local_ranks,
               struct err *e)
{
    struct mesh_sizes sizes;
    *p = place_alone();
    TRY(comm_agree(world_comm(w), "mesh", place_sizes(cfg, &sizes, e), e));
    TRY(mesh_open(&p->mesh, &sizes, w, e));
    p->world = w;
    p->threads = threads_for(cfg, local_ranks);
    p->gpu = local_rank;
    return ST_OK;
}

int place_on_paper(struct rank_place *p, const struct config *cfg, int rank, struct err *e)
{
    struct mesh_sizes sizes;
    *p = place_alone();
    TRY(place_sizes(cfg, &sizes, e));
    return mesh_place(&p->mesh, &sizes, (int)max_i64(cfg->parallel.ranks, 1), rank, e);
}

void place_close(struct rank_place *p)
{
    if (p->world != NULL)
        mesh_close(&p->mesh);
    *p = place_alone();
}
