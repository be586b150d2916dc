/* Choices of routers on file. train.record_routes writes down which experts every token of a run went to;
 * train.replay_routes makes another run, on another device or in another precision, send them to the same ones, so that
 * the two can be compared although a near tie would fall differently. Weights of the choices come from the run's own
 * router, forward and backward.
 *
 * The file holds, after its header, for each sample of the run by global index, for each router, [seq, k] numbers of 16
 * bits: 1 + expert, 0 where nothing was recorded. A place depends on sample and layer alone, never on how samples were
 * grouped or divided among machines. Little-endian, like all our files. */
#include "train/train.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SITES = 4096 };
static const char magic[8] = "braidrt1";

struct routes_header {
    char magic[8];
    uint32_t sites, k, experts, unused;
    int64_t seq;
};

struct routes_file {
    FILE *f;
    const char *path;
    struct routes_header head;
    int64_t data;    /* where samples begin */
    int32_t *layers; /* of the sites in the file */
};
struct routes {
    struct model *m;
    int64_t batch, seq;
    struct routes_file in, out;
    int32_t *idx;   /* one site of one microbatch */
    uint16_t *cell; /* one site of one sample */
};

static int file_failed(const struct routes_file *r, const char *what, struct err *e)
{
    return err_set(e, ST_IO, "%s: cannot %s recorded routes: %s", r->path, what,
                   errno != 0 ? strerror(errno) : "the file ends early");
}

static struct routes_header header_of(const struct routes *r)
{
    const struct route_site *s = &r->m->routes.s[0];
    struct routes_header h = {
        .sites = (uint32_t)r->m->routes.n, .k = (uint32_t)s->k, .experts = (uint32_t)s->experts, .seq = r->seq};
    memcpy(h.magic, magic, sizeof magic);
    return h;
}

static int read_header(struct routes_file *r, const struct routes_header *want, struct err *e)
{
    errno = 0;
    if (fread(&r->head, sizeof r->head, 1, r->f) != 1)
        return file_failed(r, "read", e);
    if (memcmp(r->head.magic, magic, sizeof magic) != 0 || r->head.sites < 1 || r->head.sites > MAX_SITES)
        return err_set(e, ST_INVALID, "%s is not a file of recorded routes", r->path);
    if (r->head.k != want->k || r->head.experts != want->experts || r->head.seq != want->seq)
        return err_set(e, ST_INVALID,
                       "%s was recorded with %u of %u experts and sequences of %lld, this run has %u of %u and %lld",
                       r->path, r->head.k, r->head.experts, (long long)r->head.seq, want->k, want->experts,
                       (long long)want->seq);
    TRY(mem_array((void **)&r->layers, r->head.sites, sizeof *r->layers, e));
    errno = 0;
    if (fread(r->layers, sizeof *r->layers, r->head.sites, r->f) != r->head.sites)
        return file_failed(r, "read", e);
    r->data = (int64_t)sizeof r->head + (int64_t)r->head.sites * (int64_t)sizeof *r->layers;
    return ST_OK;
}

static int open_for_reading(struct routes_file *r, const char *path, const char *mode, const struct routes_header *want,
                            struct err *e)
{
    r->path = path;
    errno = 0;
    r->f = fopen(path, mode);
    return r->f != NULL ? read_header(r, want, e) : file_failed(r, "open", e);
}

static int create(struct routes_file *r, const char *path, const struct routes_header *head,
                  const struct route_list *sites, struct err *e)
{
    r->path = path;
    r->head = *head;
    errno = 0;
    r->f = fopen(path, "w+b");
    if (r->f == NULL)
        return file_failed(r, "create", e);
    TRY(mem_array((void **)&r->layers, head->sites, sizeof *r->layers, e));
    for (int i = 0; i < sites->n; i++)
        r->layers[i] = sites->s[i].layer;
    if (fwrite(head, sizeof *head, 1, r->f) != 1 ||
        fwrite(r->layers, sizeof *r->layers, head->sites, r->f) != head->sites)
        return file_failed(r, "write", e);
    r->data = (int64_t)sizeof *head + (int64_t)head->sites * (int64_t)sizeof *r->layers;
    return ST_OK;
}

int routes_open(struct routes **out, struct model *m, const struct config *cfg, int64_t step, struct err *e)
{
    const struct config_train *t = &cfg->train;
    bool record = t->record_routes[0] != '\0', replay = t->replay_routes[0] != '\0';
    struct routes *r;
    *out = NULL;
    if (!record && !replay)
        return ST_OK;
    if (m->routes.n == 0 || m->routes.n > MAX_SITES)
        return err_set(e, ST_USAGE, "train.%s is set, but the model has %d layers with a router that learns",
                       record ? "record_routes" : "replay_routes", m->routes.n);
    if (record && replay && strcmp(t->record_routes, t->replay_routes) == 0)
        return err_set(e, ST_USAGE, "train.record_routes and train.replay_routes name the same file, %s",
                       t->record_routes);
    TRY(mem_array((void **)&r, 1, sizeof *r, e));
    *out = r;
    *r = (struct routes){.m = m, .batch = t->micro_batch, .seq = t->seq};
    struct routes_header head = header_of(r);
    int64_t cells = r->seq * (int64_t)head.k;
    TRY(mem_array((void **)&r->idx, (size_t)(cells * r->batch), sizeof *r->idx, e));
    TRY(mem_array((void **)&r->cell, (size_t)cells, sizeof *r->cell, e));
    if (replay)
        TRY(open_for_reading(&r->in, t->replay_routes, "rb", &head, e));
    if (!record)
        return ST_OK;
    /* A run that goes on goes on recording, if it did so before. */
    return step > 0 && file_exists(t->record_routes) ? open_for_reading(&r->out, t->record_routes, "r+b", &head, e)
                                                     : create(&r->out, t->record_routes, &head, &m->routes, e);
}

int routes_refuse(const struct config *cfg, const char *command, struct err *e)
{
    bool record = cfg->train.record_routes[0] != '\0', replay = cfg->train.replay_routes[0] != '\0';
    if (!record && !replay)
        return ST_OK;
    return err_set(e, ST_USAGE, "train.%s is set, but %s takes no steps: routes are recorded and replayed in training",
                   record ? "record_routes" : "replay_routes", command);
}

void routes_close(struct routes *r)
{
    if (r == NULL)
        return;
    for (int i = 0; i < 2; i++) {
        struct routes_file *f = i == 0 ? &r->in : &r->out;
        if (f->f != NULL)
            fclose(f->f);
        free(f->layers);
    }
    free(r->idx);
    free(r->cell);
    free(r);
}

/* Goes to where this layer of this sample is. */
static int find(const struct routes_file *f, int64_t sample, int layer, struct err *e)
{
    int64_t cells = f->head.seq * (int64_t)f->head.k;
    uint32_t at = 0;
    while (at < f->head.sites && f->layers[at] != layer)
        at++;
    if (at == f->head.sites)
        return err_set(e, ST_INVALID, "%s has no routes of layer %d", f->path, layer + 1);
    int64_t place = f->data + (sample * (int64_t)f->head.sites + at) * cells * (int64_t)sizeof(uint16_t);
    errno = 0;
    return fseeko(f->f, (off_t)place, SEEK_SET) == 0 ? ST_OK : file_failed(f, "find", e);
}

static int read_cells(struct routes *r, int64_t sample, int layer, int32_t *idx, struct err *e)
{
    size_t n = (size_t)(r->seq * (int64_t)r->in.head.k);
    TRY(find(&r->in, sample, layer, e));
    bool complete = fread(r->cell, sizeof *r->cell, n, r->in.f) == n;
    for (size_t i = 0; complete && i < n; i++) {
        complete = r->cell[i] != 0 && r->cell[i] <= r->in.head.experts;
        idx[i] = (int32_t)r->cell[i] - 1;
    }
    if (complete)
        return ST_OK;
    err_set(e, ST_INVALID, "%s has no routes of sample %lld, layer %d", r->in.path, (long long)sample, layer + 1);
    return err_hint(e, "record as many steps as are replayed, with the same train.global_batch");
}

/* A choice that capacity dropped is recorded like any other: the replay drops by itself. */
static int write_cells(struct routes *r, int64_t sample, int layer, const int32_t *idx, struct err *e)
{
    size_t n = (size_t)(r->seq * (int64_t)r->out.head.k);
    for (size_t i = 0; i < n; i++)
        r->cell[i] = (uint16_t)(1 + (idx[i] < 0 ? -1 - idx[i] : idx[i]));
    TRY(find(&r->out, sample, layer, e));
    errno = 0;
    return fwrite(r->cell, sizeof *r->cell, n, r->out.f) == n ? ST_OK : file_failed(&r->out, "write", e);
}

int routes_give(struct routes *r, int64_t first_sample, struct err *e)
{
    for (int i = 0; r != NULL && r->in.f != NULL && i < r->m->routes.n; i++) {
        const struct route_site *s = &r->m->routes.s[i];
        int64_t cells = r->seq * s->k;
        for (int64_t b = 0; b < r->batch; b++)
            TRY(read_cells(r, first_sample + b, s->layer, r->idx + b * cells, e));
        TRY(model_write_state(r->m, s->given, r->idx, r->batch * cells * (int64_t)sizeof *r->idx, e));
    }
    return ST_OK;
}

int routes_take(struct routes *r, int64_t first_sample, struct err *e)
{
    for (int i = 0; r != NULL && r->out.f != NULL && i < r->m->routes.n; i++) {
        const struct route_site *s = &r->m->routes.s[i];
        int64_t cells = r->seq * s->k;
        TRY(model_read_state(r->m, s->chosen, r->idx, r->batch * cells * (int64_t)sizeof *r->idx, e));
        for (int64_t b = 0; b < r->batch; b++)
            TRY(write_cells(r, first_sample + b, s->layer, r->idx + b * cells, e));
    }
    errno = 0;
    return r == NULL || r->out.f == NULL || fflush(r->out.f) == 0 ? ST_OK : file_failed(&r->out, "write", e);
}
