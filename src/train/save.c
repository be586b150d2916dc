/* Saving: whatever the ranks, the files are those that one rank would write. The first rank has a list of all
 * parameters (on paper: of a model as one rank has it) and writes them one after the other. For each it asks the
 * others, who answer with the elements they are responsible for; it holds one tensor at a time, and a part that no rank
 * sent is an error. */
#include "train/ranks_int.h"
#include "train/reshard_int.h"

#include <stdlib.h>
#include <string.h>

static const char *const moment[2] = {"exp_avg", "exp_avg_sq"};
enum what { WHAT_VALUE, WHAT_MOMENT1, WHAT_MOMENT2, WHAT_COUNT };

/* ---- what a rank answers for ----------------------------------------------------------------- */

/* Elements [first, first + n) of the whole parameter, and where they are on the device; n 0: another rank has them. */
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
    int64_t slice = slice_first(&row->p);
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
    return (struct extent){.first = slice + s.first, .n = s.n, .at = tensor_1d((char *)t.data + skip, t.dtype, s.n)};
}

/* ---- the first rank asks, the others answer -------------------------------------------------- */

struct request {
    int32_t index, what; /* parameter of the full table; index -1: that was all */
    int32_t status;      /* then, if this is no success, the first rank's message follows */
};
struct answer {
    int64_t first, n;
};

struct saver {
    struct trainer *t;
    const struct param_table *full; /* of a model as one rank has it */
    const int *local;               /* row of each in this rank's table, -1: none */
    struct ckpt_item *items;
    struct request *request; /* that belongs to each item */
    int n;
    struct err *note;    /* of ckpt_save */
    struct tensor whole; /* the tensor being put together */
    int64_t room;
};

static int place(const struct saver *s, const struct extent *x, const void *values, int64_t *placed, struct err *e)
{
    int64_t size = (int64_t)dtype_bytes(s->whole.dtype);
    if (x->first < 0 || x->n < 0 || x->first + x->n > tensor_elems(&s->whole))
        return err_set(e, ST_INTERNAL, "a rank sent elements %lld .. %lld of a tensor of %lld", (long long)x->first,
                       (long long)(x->first + x->n), (long long)tensor_elems(&s->whole));
    if (values != NULL)
        memcpy((char *)s->whole.data + x->first * size, values, (size_t)(x->n * size));
    *placed += x->n;
    return ST_OK;
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
    if (x.n == 0)
        return ST_OK;
    TRY(place(s, &x, NULL, placed, e));
    int64_t size = (int64_t)dtype_bytes(s->whole.dtype);
    if (x.at.dtype != s->whole.dtype) {
        struct tensor wide;
        TRY(fetch_wide(t, &x, s->whole.dtype, &wide, e));
        memcpy((char *)s->whole.data + x.first * size, wide.data, (size_t)(x.n * size));
        free(wide.data);
        return ST_OK;
    }
    return t->dev.vt->copy_out(&t->dev, (char *)s->whole.data + x.first * size, x.at.data, x.n * size, e);
}

static int take_from(struct saver *s, int rank, int64_t *placed, struct err *e)
{
    struct comm *all = s->t->model.mesh.all;
    struct answer a;
    TRY(comm_host_recv(all, "save", &a, (int64_t)sizeof a, rank, e));
    if (a.n == 0)
        return ST_OK;
    struct extent x = {.first = a.first, .n = a.n};
    TRY(place(s, &x, NULL, placed, e));
    int64_t size = (int64_t)dtype_bytes(s->whole.dtype);
    return comm_host_recv(all, "save", (char *)s->whole.data + a.first * size, a.n * size, rank, e);
}

static int ask(struct saver *s, const struct request *q, struct err *e)
{
    const struct mesh *mesh = &s->t->model.mesh;
    for (int r = 1; r < mesh->world; r++)
        TRY(comm_host_send(mesh->all, "save", q, (int64_t)sizeof *q, r, e));
    return ST_OK;
}

/* One tensor of the files, put together. */
static int fetch(void *ctx, const char *key, struct tensor *host, struct err *e)
{
    struct saver *s = ctx;
    int i = 0;
    while (i < s->n && s->items[i].key != key)
        i++;
    if (i == s->n)
        return err_set(e, ST_INTERNAL, "tensor %s is unknown", key);
    int64_t bytes = tensor_bytes(host), placed = 0;
    void *data = s->whole.data;
    if (bytes > s->room) {
        free(data);
        s->whole.data = NULL;
        TRY(mem_aligned(&data, (size_t)bytes, DEV_ALIGN, e));
        s->room = bytes;
    }
    s->whole = *host;
    s->whole.data = data;
    TRY(ask(s, &s->request[i], e));
    TRY(take_own(s, &s->request[i], &placed, e));
    for (int r = 1; r < s->t->model.mesh.world; r++)
        TRY(take_from(s, r, &placed, e));
    if (placed != tensor_elems(host))
        return err_set(e, ST_INTERNAL, "saving %s: ranks hold %lld of its %lld elements", key, (long long)placed,
                       (long long)tensor_elems(host));
    *host = s->whole;
    return ST_OK;
}

static int answer_one(struct trainer *t, const struct extent *x, enum dtype type, struct err *e)
{
    struct comm *all = t->model.mesh.all;
    struct answer a = {x->first, x->n};
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
        TRY(answer_one(t, &x, saved_type(t, &s->full->list[q.index].p, (enum what)q.what), e));
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

static int write_files(struct saver *s, struct err *e)
{
    struct trainer *t = s->t;
    struct arena keys;
    struct buf config;
    int st;
    arena_init(&keys);
    buf_init(&config, 0);
    TRY_OUT(list_items(s, &keys, e));
    config_write(t->cfg, &config, false);
    TRY_OUT(buf_check(&config, e));
    struct ckpt_source source = {.fetch = fetch, .ctx = s};
    struct ckpt_save_args args = {.run_dir = t->cfg->run.dir,
                                  .step = t->step,
                                  .items = s->items,
                                  .n_items = s->n,
                                  .source = &source,
                                  .config_text = config.text,
                                  .keep = (int)t->cfg->run.keep,
                                  .data = t->data,
                                  .n_data = t->n_data,
                                  .lock = t->lock,
                                  .note = s->note,
                                  .files = t->tok_files,
                                  .n_files = t->n_tok_files,
                                  .counters = {.samples = t->step * t->cfg->train.global_batch,
                                               .tokens = t->tokens_seen,
                                               .seed = (uint64_t)t->cfg->run.seed,
                                               .wall_seconds = t->train_seconds}};
    st = ckpt_save(&args, e);
out:
    free(s->items);
    free(s->request);
    free(s->whole.data);
    arena_release(&keys);
    buf_release(&config);
    return st;
}

int trainer_save(struct trainer *t, struct err *e) { return trainer_save_noting(t, NULL, e); }

int trainer_save_noting(struct trainer *t, struct err *note, struct err *e)
{
    struct full_table full;
    int st;
    TRY(full_table_open(&full, &t->model, e));
    struct saver s = {.t = t, .full = full.params, .local = full.local, .note = note};
    if (trainer_is_rank0(t))
        st = tell_end(&s, write_files(&s, e), e);
    else
        st = answer_all(&s, e);
    full_table_close(&full);
    return st;
}
