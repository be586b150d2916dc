/* What a launcher tells a process about its place, read from the variables it sets. Variables of two launchers must
 * agree. */
#include "comm/comm_int.h"

#include <stdlib.h>

/* -1: not set. */
static int env_number(const char *name, int *out, struct err *e)
{
    const char *text = getenv(name);
    int64_t v;
    *out = -1;
    if (text == NULL || text[0] == '\0')
        return ST_OK;
    if (!parse_i64(text, &v) || v < 0 || v > 1 << 24) {
        err_set(e, ST_USAGE, "%s='%s' is not a rank or a number of ranks", name, text);
        return err_hint(e, "launchers set it; remove it from the environment if no launcher is used");
    }
    *out = (int)v;
    return ST_OK;
}

struct launcher {
    const char *by, *rank, *size, *local_rank, *local_size;
    enum comm_kind kind;
};
/* Slurm: a batch script sees the number of tasks too, but only what srun starts is a step with tasks. */
static const struct launcher launchers[] = {
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", COMM_MPI},
    {"mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", COMM_MPI},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", COMM_MPI},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", COMM_TCP},
};

static int read_launcher(const struct launcher *from, struct launch *l, struct err *e)
{
    *l = (struct launch){.kind = from->kind, .by = from->by};
    TRY(env_number(from->rank, &l->rank, e));
    TRY(env_number(from->size, &l->size, e));
    TRY(env_number(from->local_rank, &l->local_rank, e));
    TRY(env_number(from->local_size, &l->local_size, e));
    bool only_one = (l->rank < 0) != (l->size < 0);
    if (only_one && from->kind == COMM_TCP) {
        err_set(e, ST_USAGE, "%s is set, but %s is not", l->rank < 0 ? from->size : from->rank,
                l->rank < 0 ? from->rank : from->size);
        return err_hint(e, "a launcher sets both; without one, remove it from the environment");
    }
    if (only_one || l->rank < 0) {
        l->size = 0;
        return ST_OK;
    }
    if (l->rank >= l->size)
        return err_set(e, ST_USAGE, "%s=%d is not below %s=%d", from->rank, l->rank, from->size, l->size);
    if (l->local_size > 0 && l->local_rank >= l->local_size)
        return err_set(e, ST_USAGE, "%s=%d is not below %s=%d", from->local_rank, l->local_rank, from->local_size,
                       l->local_size);
    return ST_OK;
}

/* On an error *l says what is known so far: whose ranks these are. */
int launch_read(struct launch *l, struct err *e)
{
    struct launch found = {.kind = COMM_SELF, .size = 1, .local_size = 1, .by = "nothing"};
    bool any = false;
    *l = found;
    for (int i = 0; i < countof(launchers); i++) {
        struct launch x;
        int st = read_launcher(&launchers[i], &x, e);
        if (!any && x.rank >= 0 && x.size > 0)
            *l = x;
        TRY(st);
        if (x.size == 0)
            continue;
        if (any && (x.rank != found.rank || x.size != found.size)) {
            err_set(e, ST_USAGE, "%s says rank %d of %d, but %s=%d and %s=%d say otherwise", found.by, found.rank,
                    found.size, launchers[i].rank, x.rank, launchers[i].size, x.size);
            return err_hint(e, "start with one launcher, and remove the other's variables");
        }
        if (!any)
            found = x;
        any = true;
    }
    if (found.local_rank < 0)
        found.local_rank = 0;
    if (found.size == 1)
        found.kind = COMM_SELF;
    *l = found;
    return ST_OK;
}

int launch_detect(struct launch *l, struct err *e)
{
    int st = launch_read(l, e);
    if (st == ST_OK || l->kind == COMM_SELF || l->size < 1)
        return st;
    err_clear(e); /* the ranks can be reached: world_open finds it again, and rank 0 says it */
    return ST_OK;
}
