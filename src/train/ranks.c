/* Communication of ranks between plans: label counts, losses, stop requests, numbers for the log. Small, in host
 * memory, in the same order on every rank. */
#include "train/ranks_int.h"

#include <stdlib.h>
#include <string.h>

enum { TAG_ROOM = 64, SUMMARY_BYTES = 128 };

/* A metric of another stage, as its first rank described it. */
struct metric_name {
    char tag[TAG_ROOM];
    int32_t layer, n;
};
struct stage_metrics {
    struct metric_name *name;
    int64_t n, values;
};
struct ranks {
    int n_stages;                /* of this rank's knowledge: all on the first rank, else one */
    struct stage_metrics *stage; /* the own one first */
    double *mine, *other, *sum;  /* as many values as a stage has at most */
    double *summaries;           /* SUMMARY_BYTES of every rank */
};

/* ---- opening: who reports what --------------------------------------------------------------- */

static int describe_metrics(const struct model *m, struct stage_metrics *s, struct err *e)
{
    TRY(mem_array((void **)&s->name, (size_t)m->metrics.n, sizeof *s->name, e));
    for (int k = 0; k < m->metrics.n; k++) {
        const struct metric *x = &m->metrics.m[k];
        if (x->room > 0)
            continue;
        struct metric_name *n = &s->name[s->n++];
        snprintf(n->tag, sizeof n->tag, "%s", x->tag);
        n->layer = x->layer;
        n->n = (int32_t)x->n;
        s->values += x->n;
    }
    return ST_OK;
}

static int recv_metrics(struct comm *all, int from, struct stage_metrics *s, struct err *e)
{
    TRY(comm_host_recv(all, "metrics", &s->n, (int64_t)sizeof s->n, from, e));
    TRY(mem_array((void **)&s->name, (size_t)s->n, sizeof *s->name, e));
    TRY(comm_host_recv(all, "metrics", s->name, s->n * (int64_t)sizeof *s->name, from, e));
    for (int64_t k = 0; k < s->n; k++)
        s->values += s->name[k].n;
    return ST_OK;
}

static int exchange_names(struct trainer *t, struct ranks *r, struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    struct stage_metrics *own = &r->stage[0];
    TRY(describe_metrics(&t->model, own, e));
    if (mesh->rank == 0)
        for (int p = 1; p < mesh->pp; p++)
            TRY(recv_metrics(mesh->all, p * mesh->stage, &r->stage[p], e));
    else if (mesh->stage_rank == 0) {
        TRY(comm_host_send(mesh->all, "metrics", &own->n, (int64_t)sizeof own->n, 0, e));
        TRY(comm_host_send(mesh->all, "metrics", own->name, own->n * (int64_t)sizeof *own->name, 0, e));
    }
    return ST_OK;
}

int ranks_open(struct trainer *t, struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    if (mesh->world == 1)
        return ST_OK;
    struct ranks *r;
    TRY(mem_array((void **)&r, 1, sizeof *r, e));
    t->ranks = r;
    r->n_stages = mesh->rank == 0 ? mesh->pp : 1;
    TRY(mem_array((void **)&r->stage, (size_t)r->n_stages, sizeof *r->stage, e));
    TRY(exchange_names(t, r, e));
    int64_t most = 1;
    for (int s = 0; s < r->n_stages; s++)
        most = max_i64(most, r->stage[s].values);
    double **rooms[] = {&r->mine, &r->other, &r->sum};
    for (int i = 0; i < countof(rooms); i++)
        TRY(mem_array((void **)rooms[i], (size_t)most, sizeof(double), e));
    return mem_array((void **)&r->summaries, (size_t)mesh->world, SUMMARY_BYTES, e);
}

void ranks_close(struct ranks *r)
{
    if (r == NULL)
        return;
    for (int s = 0; r->stage != NULL && s < r->n_stages; s++)
        free(r->stage[s].name);
    free(r->stage);
    free(r->mine);
    free(r->other);
    free(r->sum);
    free(r->summaries);
    free(r);
}

/* ---- each step ------------------------------------------------------------------------------- */

/* Every rank hears of all, since one that cannot read its data ends the run on all of them; those of a stage share a
 * batch, and the ranks that divide samples between them have read the same ones. */
int ranks_sum_counts(struct trainer *t, int64_t *counts, int n, int st, struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    struct count_summary {
        int64_t failed, counts[1 + MTP_MAX_DEPTHS];
    } mine = {.failed = st != ST_OK}, *all;
    _Static_assert(sizeof mine <= SUMMARY_BYTES, "a summary fits its buffer");
    t->data_failed = st != ST_OK;
    if (t->ranks == NULL)
        return st;
    all = (struct count_summary *)t->ranks->summaries;
    for (int k = 0; k < n; k++)
        mine.counts[k] = counts[k];
    int gathered =
        comm_host_gather(mesh->all, "label counts", &mine, (int64_t)sizeof mine, all, st == ST_OK ? e : NULL);
    if (gathered != ST_OK) { /* the others are gone; an error of this rank's own says more */
        t->data_failed = false;
        return st != ST_OK ? st : gathered;
    }
    for (int r = 0; r < mesh->world; r++)
        t->data_failed |= all[r].failed != 0;
    if (t->data_failed)
        return comm_agree(mesh->all, "data", st, e);
    for (int k = 0; k < n; k++) {
        counts[k] = 0;
        for (int d = 0; d < mesh->dp; d++)
            counts[k] += all[mesh_rank_at(mesh, mesh->pp_rank, d, 0, 0)].counts[k];
    }
    return ST_OK;
}

int ranks_after_step(struct trainer *t, struct step_summary *w, struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    _Static_assert(sizeof *w <= SUMMARY_BYTES && (1 + MTP_MAX_DEPTHS) * sizeof(int64_t) <= SUMMARY_BYTES,
                   "a summary fits its buffer");
    if (t->ranks == NULL)
        return ST_OK;
    struct step_summary *all = (struct step_summary *)t->ranks->summaries;
    TRY(comm_host_gather(mesh->all, "end of step", w, (int64_t)sizeof *w, all, e));
    *w = (struct step_summary){0};
    for (int r = 0; r < mesh->world; r++) {
        for (int k = 0; k <= MTP_MAX_DEPTHS; k++)
            w->loss[k] += all[r].loss[k];
        w->stop = all[r].stop > w->stop ? all[r].stop : w->stop;
        w->saving = all[r].saving > w->saving ? all[r].saving : w->saving;
    }
    return ST_OK;
}

int ranks_largest(struct trainer *t, const char *what, double *value, struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    if (t->ranks == NULL)
        return ST_OK;
    double *all = t->ranks->summaries;
    TRY(comm_host_gather(mesh->all, what, value, (int64_t)sizeof *value, all, e));
    for (int r = 0; r < mesh->world; r++)
        *value = all[r] > *value ? all[r] : *value;
    return ST_OK;
}

int ranks_agree(struct trainer *t, const char *what, int status, struct err *e)
{
    return t->model.mesh.world == 1 ? status : comm_agree(t->model.mesh.all, what, status, e);
}

int ranks_collect(struct trainer *t, const char *what, const void *mine, int64_t bytes, void *all, struct err *e)
{
    if (t->ranks != NULL)
        return comm_host_gather(t->model.mesh.all, what, mine, bytes, all, e);
    memcpy(all, mine, (size_t)bytes);
    return ST_OK;
}

/* ---- metrics --------------------------------------------------------------------------------- */

static int read_values(struct trainer *t, double *out, struct err *e)
{
    int64_t at = 0;
    for (int k = 0; k < t->model.metrics.n; k++) {
        const struct metric *m = &t->model.metrics.m[k];
        if (m->room > 0)
            continue;
        TRY(model_read_state(&t->model, m->offset, out + at, m->n * (int64_t)sizeof *out, e));
        at += m->n;
    }
    return ST_OK;
}

static void log_value(struct trainer *t, const char *name, int layer, int64_t n, int64_t i, double value)
{
    char tag[160];
    if (n > 1)
        snprintf(tag, sizeof tag, "%s/layer %d.%lld", name, layer, (long long)i);
    else
        snprintf(tag, sizeof tag, "%s/layer %d", name, layer);
    log_scalar(t->log, tag, value);
}

static void log_values(struct trainer *t, const struct stage_metrics *s, const double *sum, double share)
{
    for (int64_t k = 0; k < s->n; k++)
        for (int64_t i = 0; i < s->name[k].n; i++)
            log_value(t, s->name[k].tag, s->name[k].layer, s->name[k].n, i, *sum++ * share);
}

/* The first rank adds up the copies of each stage in rank order. */
static int gather_stage(struct trainer *t, int p, struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    struct ranks *r = t->ranks;
    const struct stage_metrics *s = &r->stage[p];
    for (int64_t k = 0; k < s->values; k++)
        r->sum[k] = p == 0 ? r->mine[k] : 0;
    for (int d = p == 0 ? 1 : 0; d < mesh->stage; d++) {
        TRY(comm_host_recv(mesh->all, "metrics", r->other, s->values * (int64_t)sizeof(double), p * mesh->stage + d,
                           e));
        for (int64_t k = 0; k < s->values; k++)
            r->sum[k] += r->other[k];
    }
    log_values(t, s, r->sum, 1.0 / (double)(t->n_micro * mesh->stage));
    return ST_OK;
}

static int report_alone(struct trainer *t, struct err *e)
{
    for (int k = 0; k < t->model.metrics.n; k++) {
        const struct metric *m = &t->model.metrics.m[k];
        for (int64_t i = 0; m->room == 0 && i < m->n; i++) {
            double value = 0;
            TRY(model_read_state(&t->model, m->offset + i * (int64_t)sizeof value, &value, sizeof value, e));
            log_value(t, m->tag, m->layer, m->n, i, value / (double)t->n_micro);
        }
    }
    return ST_OK;
}

int ranks_report_metrics(struct trainer *t, struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    if (t->ranks == NULL)
        return report_alone(t, e);
    struct ranks *r = t->ranks;
    TRY(read_values(t, r->mine, e));
    if (mesh->rank != 0)
        return comm_host_send(mesh->all, "metrics", r->mine, r->stage[0].values * (int64_t)sizeof(double), 0, e);
    for (int p = 0; p < mesh->pp; p++)
        TRY(gather_stage(t, p, e));
    return ST_OK;
}
