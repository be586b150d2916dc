/* Saving: whatever the ranks, the files are those that one rank would write. The first rank has a list of all
 * parameters (on paper: of a model as one rank has it) and writes them one after the other. For each it asks the
 * others, who answer with the elements they are responsible for; it holds one tensor at a time, and a part that no rank
 * sent is an error. With run.async_save it keeps them all, and a thread writes the copy while training goes on. */
#include "train/ranks_int.h"
#include "train/reshard_int.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const char *const moment[2] = {"exp_avg", "exp_avg_sq"};
enum what { WHAT_VALUE, WHAT_MOMENT1, WHAT_MOMENT2, WHAT_COUNT };

/* ---- what a rank answers for ----------------------------------------------------------------- */

/* Elements [first, first + n) of this rank's part of a parameter, and where they are on the device; n 0: another rank
 * has them. */
struct extent {
    int64_t first, n;
    struct tensor at;
};

/* The type that files hold. */
static enum dtype saved_type(const struct trainer *t, const struct param *p, enum what what)
{
    return what == WHAT_VALUE ? param_dtype(p, t->dev.wide) : t->dev.wide;
}

static struct extent extent_of(const struct model *m, int k, enum what what)
{
    const struct param_entry *row = &m->params.list[k];
    const struct mesh *mesh = &m->mesh;
    bool copy = mesh_copy_rank(mesh, &row->p) > 0; /* of what another rank answers for */
    bool far_end = row->p.shared_ends && mesh->pp_rank > 0;
    /* Experts live on every rank of ep_comm, each a slice; what is whole on all of them is answered for by one. Where a
     * rank updates a piece it answers for that: its copy of the others' pieces is renewed by the next step. */
    bool pieces = !shard_is_all(m, k);
    struct shard s = pieces ? shard_of(m, k) : (struct shard){.n = param_elems(&row->p)};
    if (far_end || (!pieces && copy) || s.n == 0)
        return (struct extent){0};
    struct tensor t = what == WHAT_VALUE ? model_param(m, k) : optim_state(m, k, what == WHAT_MOMENT2);
    int64_t skip = what == WHAT_VALUE ? (s.first - model_param_kept(m, k).first) * (int64_t)dtype_bytes(t.dtype) : 0;
    return (struct extent){.first = s.first, .n = s.n, .at = tensor_1d((char *)t.data + skip, t.dtype, s.n)};
}

/* ---- the first rank asks, the others answer -------------------------------------------------- */

struct request {
    int32_t index, what; /* parameter of the full table; index -1: that was all */
    int32_t status;      /* then, if this is no success, the first rank's message follows */
};
/* Which elements follow, and of which part of the parameter: as in struct param. */
struct answer {
    int64_t first, n;
    int64_t dim[4], full, from;
    int32_t ranks, rank;
};

struct saver {
    struct trainer *t;
    const struct param_table *full; /* of a model as one rank has it */
    const int *local;               /* row of each in this rank's table, -1: none */
    struct ckpt_item *items;
    struct request *request; /* that belongs to each item */
    int n;
    struct tensor whole; /* the tensor being put together */
    int64_t room;
};

/* Values of a part go to their places in the whole tensor. */
static int place(struct saver *s, const struct param *part, const struct extent *x, void *values, int64_t *placed,
                 struct err *e)
{
    *placed += x->n;
    return reshard_copy(part, x->first, x->n, values, s->whole.data, (int64_t)dtype_bytes(s->whole.dtype),
                        RESHARD_PLACE, e);
}

/* A frozen parameter has no master weights: files hold its working copy, widened. The caller frees the values. */
static int fetch_wide(struct trainer *t, const struct extent *x, enum dtype type, struct tensor *out, struct err *e)
{
    struct tensor host;
    *out = tensor_1d(NULL, type, x->n);
    TRY(mem_aligned(&out->data, (size_t)max_i64(tensor_bytes(out), 1), DEV_ALIGN, e));
    int st = dev_fetch(&t->dev, &x->at, &host, e);
    if (st != ST_OK) {
        free(out->data);
        return st;
    }
    tensor_convert(out, &host);
    dev_fetched(&t->dev, &host);
    return ST_OK;
}

static int take_own(struct saver *s, const struct request *q, int64_t *placed, struct err *e)
{
    struct trainer *t = s->t;
    int k = s->local[q->index];
    struct extent x = k >= 0 ? extent_of(&t->model, k, (enum what)q->what) : (struct extent){0};
    struct tensor values;
    if (x.n == 0)
        return ST_OK;
    struct param_run run = param_run_from(&t->model.params.list[k].p, x.first);
    int64_t size = (int64_t)dtype_bytes(s->whole.dtype);
    if (run.n >= x.n && x.at.dtype == s->whole.dtype && run.whole + x.n <= tensor_elems(&s->whole)) {
        *placed += x.n;
        return t->dev.vt->copy_out(&t->dev, (char *)s->whole.data + run.whole * size, x.at.data, x.n * size, e);
    }
    TRY(fetch_wide(t, &x, s->whole.dtype, &values, e));
    int st = place(s, &t->model.params.list[k].p, &x, values.data, placed, e);
    free(values.data);
    return st;
}

/* The part that an answer describes, of a parameter of the full table. */
static int part_of(const struct param *whole, const struct answer *a, struct param *out, struct err *e)
{
    *out = *whole;
    bool sane = a->ranks >= 0 && a->rank >= 0 && (a->ranks == 0 || a->rank < a->ranks) && a->full >= 0;
    for (int d = 0; d < whole->rank; d++) {
        sane &= a->dim[d] >= 0 && a->dim[d] <= whole->dim[d];
        out->dim[d] = a->dim[d];
    }
    out->shard.full = a->full;
    out->shard.first = a->from;
    out->slice.ranks = a->ranks;
    out->slice.rank = a->rank;
    sane = sane && (a->full == 0 || a->full == whole->dim[0]) &&
           (a->ranks == 0 || out->dim[whole->split.dim] * a->ranks == whole->dim[whole->split.dim]);
    return sane ? ST_OK : err_set(e, ST_INTERNAL, "a rank sent a part of %s that does not fit", whole->key);
}

static int take_from(struct saver *s, const struct request *q, int rank, int64_t *placed, struct err *e)
{
    struct comm *all = s->t->model.mesh.all;
    struct answer a;
    struct param part;
    void *values;
    TRY(comm_host_recv(all, "save", &a, (int64_t)sizeof a, rank, e));
    if (a.n == 0)
        return ST_OK;
    TRY(part_of(&s->full->list[q->index].p, &a, &part, e));
    struct extent x = {.first = a.first, .n = a.n};
    int64_t bytes = a.n * (int64_t)dtype_bytes(s->whole.dtype);
    if (a.n < 0 || a.n > param_elems(&part))
        return err_set(e, ST_INTERNAL, "a rank sent %lld elements of a part of %s", (long long)a.n, part.key);
    TRY(mem_aligned(&values, (size_t)bytes, DEV_ALIGN, e));
    int st = comm_host_recv(all, "save", values, bytes, rank, e);
    if (st == ST_OK)
        st = place(s, &part, &x, values, placed, e);
    free(values);
    return st;
}

static int ask(struct saver *s, const struct request *q, struct err *e)
{
    const struct mesh *mesh = &s->t->model.mesh;
    for (int r = 1; r < mesh->world; r++)
        TRY(comm_host_send(mesh->all, "save", q, (int64_t)sizeof *q, r, e));
    return ST_OK;
}

/* One tensor of the files, put together in s->whole. */
static int gather(struct saver *s, int i, struct err *e)
{
    int64_t placed = 0;
    TRY(ask(s, &s->request[i], e));
    TRY(take_own(s, &s->request[i], &placed, e));
    for (int r = 1; r < s->t->model.mesh.world; r++)
        TRY(take_from(s, &s->request[i], r, &placed, e));
    if (placed != tensor_elems(&s->whole))
        return err_set(e, ST_INTERNAL, "saving %s: ranks hold %lld of its %lld elements", s->items[i].key,
                       (long long)placed, (long long)tensor_elems(&s->whole));
    return ST_OK;
}

static int fetch(void *ctx, const char *key, struct tensor *host, struct err *e)
{
    struct saver *s = ctx;
    int i = 0;
    while (i < s->n && s->items[i].key != key)
        i++;
    if (i == s->n)
        return err_set(e, ST_INTERNAL, "tensor %s is unknown", key);
    int64_t bytes = tensor_bytes(host);
    void *data = s->whole.data;
    if (bytes > s->room) {
        free(data);
        s->whole.data = NULL;
        TRY(mem_aligned(&data, (size_t)bytes, DEV_ALIGN, e));
        s->room = bytes;
    }
    s->whole = *host;
    s->whole.data = data;
    TRY(gather(s, i, e));
    *host = s->whole;
    return ST_OK;
}

static int answer_one(struct trainer *t, const struct param *p, const struct extent *x, enum dtype type, struct err *e)
{
    struct comm *all = t->model.mesh.all;
    struct answer a = {.first = x->first, .n = x->n};
    if (x->n > 0) {
        memcpy(a.dim, p->dim, sizeof a.dim);
        a.full = p->shard.full;
        a.from = p->shard.first;
        a.ranks = p->slice.ranks;
        a.rank = p->slice.rank;
    }
    struct tensor host;
    TRY(comm_host_send(all, "save", &a, (int64_t)sizeof a, 0, e));
    if (x->n == 0)
        return ST_OK;
    if (x->at.dtype != type) {
        struct tensor wide;
        TRY(fetch_wide(t, x, type, &wide, e));
        int sent = comm_host_send(all, "save", wide.data, tensor_bytes(&wide), 0, e);
        free(wide.data);
        return sent;
    }
    TRY(dev_fetch(&t->dev, &x->at, &host, e));
    int st = comm_host_send(all, "save", host.data, tensor_bytes(&host), 0, e);
    dev_fetched(&t->dev, &host);
    return st;
}

/* All go on, or all stop and say why the first rank could not write. */
static int tell_end(struct saver *s, int st, struct err *e)
{
    const struct mesh *mesh = &s->t->model.mesh;
    struct request end = {.index = -1, .status = st};
    if (st == ST_OK)
        return ask(s, &end, e);
    if (ask(s, &end, NULL) == ST_OK)
        for (int r = 1; r < mesh->world; r++)
            comm_host_send(mesh->all, "save", e->msg, (int64_t)sizeof e->msg, r, NULL);
    return st;
}

static int hear_end(struct saver *s, int st, struct err *e)
{
    char why[sizeof e->msg];
    if (st == ST_OK)
        return ST_OK;
    TRY(comm_host_recv(s->t->model.mesh.all, "save", why, (int64_t)sizeof why, 0, e));
    return err_set(e, (enum status)st, "the first rank could not save the checkpoint: %.900s", why);
}

/* Until the first rank has all it wants, or could not write it. */
static int answer_all(struct saver *s, struct err *e)
{
    struct trainer *t = s->t;
    for (;;) {
        struct request q;
        TRY(comm_host_recv(t->model.mesh.all, "save", &q, (int64_t)sizeof q, 0, e));
        if (q.index < 0)
            return hear_end(s, q.status, e);
        int k = s->local[q.index];
        struct extent x = k >= 0 ? extent_of(&t->model, k, (enum what)q.what) : (struct extent){0};
        TRY(answer_one(t, k >= 0 ? &t->model.params.list[k].p : NULL, &x,
                       saved_type(t, &s->full->list[q.index].p, (enum what)q.what), e));
    }
}

/* ---- the files ------------------------------------------------------------------------------- */

static int list_items(struct saver *s, struct arena *keys, struct err *e)
{
    struct trainer *t = s->t;
    TRY(mem_array((void **)&s->items, WHAT_COUNT * (size_t)s->full->n, sizeof *s->items, e));
    TRY(mem_array((void **)&s->request, WHAT_COUNT * (size_t)s->full->n, sizeof *s->request, e));
    for (int k = 0; k < s->full->n; k++) {
        const struct param *p = &s->full->list[k].p;
        for (int w = 0; w < (param_trained(p) ? WHAT_COUNT : 1); w++) {
            const char *key = w == WHAT_VALUE ? p->key : arena_printf(keys, "%s.%s", moment[w - 1], p->key);
            if (key == NULL)
                return err_set(e, ST_NOMEM, "out of memory saving a checkpoint");
            s->request[s->n] = (struct request){.index = k, .what = w};
            s->items[s->n++] =
                (struct ckpt_item){.key = key,
                                   .param = p,
                                   .section = w == WHAT_VALUE ? CKPT_MODEL : CKPT_OPTIM,
                                   .host = tensor_shape(saved_type(t, p, (enum what)w), p->rank, p->dim)};
        }
    }
    return ST_OK;
}

/* One checkpoint on its way: of the rank that writes, all it needs without the trainer. */
struct save_job {
    struct saver s;
    struct full_table full;
    struct arena keys;
    struct buf config;
    struct ckpt_source source;
    struct ckpt_save_args args;
    struct err note, err;
    int status;
    pthread_t thread;
    bool threaded;
    atomic_bool done;
};

static void job_free(struct save_job *j)
{
    for (int i = 0; j->args.source == NULL && i < j->s.n; i++)
        free(j->s.items[i].host.data);
    free(j->s.items);
    free(j->s.request);
    free(j->s.whole.data);
    arena_release(&j->keys);
    buf_release(&j->config);
    full_table_close(&j->full);
    free(j);
}

static int job_new(struct save_job **out, struct trainer *t, struct err *e)
{
    struct save_job *j;
    TRY(mem_array((void **)&j, 1, sizeof *j, e));
    arena_init(&j->keys);
    buf_init(&j->config, 0);
    int st = full_table_open(&j->full, &t->model, e);
    j->s = (struct saver){.t = t, .full = j->full.params, .local = j->full.local};
    j->source = (struct ckpt_source){.fetch = fetch, .ctx = &j->s};
    if (st != ST_OK)
        job_free(j);
    else
        *out = j;
    return st;
}

static int describe(struct save_job *j, struct err *e)
{
    struct trainer *t = j->s.t;
    TRY(list_items(&j->s, &j->keys, e));
    config_write(t->cfg, &j->config, false);
    TRY(buf_check(&j->config, e));
    j->args = (struct ckpt_save_args){.run_dir = t->cfg->run.dir,
                                      .step = t->step,
                                      .items = j->s.items,
                                      .n_items = j->s.n,
                                      .source = &j->source,
                                      .config_text = j->config.text,
                                      .keep = (int)t->cfg->run.keep,
                                      .data = t->data,
                                      .n_data = t->n_data,
                                      .lock = t->lock,
                                      .note = &j->note,
                                      .files = t->tok_files,
                                      .n_files = t->n_tok_files,
                                      .counters = {.samples = t->step * t->cfg->train.global_batch,
                                                   .tokens = t->tokens_seen,
                                                   .seed = (uint64_t)t->cfg->run.seed,
                                                   .wall_seconds = t->train_seconds}};
    return ST_OK;
}

int trainer_save(struct trainer *t, struct err *e) { return trainer_save_noting(t, NULL, e); }

int trainer_save_noting(struct trainer *t, struct err *note, struct err *e)
{
    struct save_job *j;
    int st;
    TRY(job_new(&j, t, e));
    if (trainer_is_rank0(t)) {
        st = describe(j, e);
        if (st == ST_OK)
            st = ckpt_save(&j->args, e);
        st = tell_end(&j->s, st, e);
        if (note != NULL)
            *note = j->note;
    } else {
        st = answer_all(&j->s, e);
    }
    job_free(j);
    return st;
}

int trainer_visit_saved(struct trainer *t, saved_fn fn, void *ctx, struct err *e)
{
    struct save_job *j;
    int st;
    TRY(job_new(&j, t, e));
    if (!trainer_is_rank0(t)) {
        st = answer_all(&j->s, e);
        job_free(j);
        return st;
    }
    st = describe(j, e);
    for (int i = 0; st == ST_OK && i < j->s.n; i++) {
        struct tensor host = j->s.items[i].host;
        st = fetch(&j->s, j->s.items[i].key, &host, e);
        if (st == ST_OK)
            st = fn(ctx, j->s.items[i].key, &host, e);
    }
    st = tell_end(&j->s, st, e);
    job_free(j);
    return st;
}

/* ---- while training goes on ------------------------------------------------------------------ */

/* All tensors in memory: from here on the job needs neither the device nor the other ranks. */
static int copy_all(struct save_job *j, struct err *e)
{
    struct saver *s = &j->s;
    j->args.source = NULL;
    for (int i = 0; i < s->n; i++) {
        struct tensor *host = &s->items[i].host;
        if (mem_aligned(&host->data, (size_t)max_i64(tensor_bytes(host), 1), DEV_ALIGN, e) != ST_OK) {
            err_hint(e,
                     "run.async_save keeps a copy of the whole checkpoint in host memory; run.async_save=off does not");
            return ST_NOMEM;
        }
        s->whole = *host;
        int st = gather(s, i, e);
        s->whole.data = NULL;
        TRY(st);
    }
    return ST_OK;
}

static void *write_copy(void *ctx)
{
    struct save_job *j = ctx;
    j->status = ckpt_save(&j->args, &j->err);
    atomic_store(&j->done, true);
    return NULL;
}

int trainer_save_begin(struct trainer *t, struct err *e)
{
    struct save_job *j;
    int st;
    if (t->saving != NULL)
        return err_set(e, ST_INTERNAL, "step %lld is to be saved while another checkpoint is being written",
                       (long long)t->step);
    TRY(job_new(&j, t, e));
    if (!trainer_is_rank0(t)) {
        st = answer_all(&j->s, e);
        job_free(j);
        return st;
    }
    st = describe(j, e);
    if (st == ST_OK)
        st = copy_all(j, e);
    st = tell_end(&j->s, st, e);
    if (st != ST_OK) {
        job_free(j);
        return st;
    }
    t->saving = j;
    j->threaded = pthread_create(&j->thread, NULL, write_copy, j) == 0;
    if (!j->threaded)
        write_copy(j);
    return ST_OK;
}

enum saving trainer_saving(const struct trainer *t)
{
    if (t->saving == NULL)
        return SAVING_NOTHING;
    if (!atomic_load(&t->saving->done))
        return SAVING_UNDER_WAY;
    return t->saving->status == ST_OK ? SAVING_DONE : SAVING_FAILED;
}

int trainer_save_end(struct trainer *t, int64_t *step, struct err *note, struct err *e)
{
    struct save_job *j = t->saving;
    *step = -1;
    if (j == NULL)
        return ST_OK;
    if (j->threaded)
        pthread_join(j->thread, NULL);
    int st = j->status;
    *step = j->args.step;
    if (st != ST_OK && e != NULL)
        *e = j->err;
    if (note != NULL)
        *note = j->note;
    t->saving = NULL;
    job_free(j);
    return st;
}
