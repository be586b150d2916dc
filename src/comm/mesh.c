/* Ranks as a grid: pure arithmetic, then the groups. */
#include "comm/comm.h"

struct mesh mesh_alone(void)
{
    return (struct mesh){.world = 1, .pp = 1, .vpp = 1, .dp = 1, .ep = 1, .edp = 1};
}

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
    *m = (struct mesh){.world = world, .rank = rank, .pp = s->pp, .vpp = s->vpp, .dp = dp, .ep = s->ep, .edp = dp / s->ep,
                       .pp_rank = rank / dp, .dp_rank = dp_rank, .ep_rank = dp_rank % s->ep, .edp_rank = dp_rank / s->ep};
    return ST_OK;
}
