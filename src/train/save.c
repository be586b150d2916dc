/* Saving: whatever the ranks, a checkpoint has the tensors that one rank would write. Every rank writes some of them,
 * whole, into files of its own (pieces_int.h says which); rank 0 creates the folder, writes the manifest after all have
 * said that they are done, and renames it. With run.async_save each rank keeps a copy of what it writes, and a thread
 * writes that while training goes on; ranks meet for the rest after the step in which the last one is done. */
#include "train/pieces_int.h"
#include "train/ranks_int.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* One checkpoint that is being written, on one rank. */
struct save_job {
    struct pieces p;
    struct buf config;
    struct ckpt_source source;
    struct ckpt_save_args args;
    struct ckpt_saving *saving; /* rank 0 */
    char folder[PATH_MAX];      /* where all write */
    struct ckpt_sums sums;      /* of this rank's files */
    struct tensor whole;        /* the tensor being put together */
    int64_t room;
    int next; /* in the order of p */
    struct err note, err;
    int status;
    pthread_t thread;
    bool threaded;
    atomic_bool done;
};

static const struct mesh *mesh_of(const struct save_job *j) { return &j->p.t->model.mesh; }
static bool writes(const struct save_job *j) { return mesh_of(j)->rank < j->args.n_parts; }

/* Memory for the next tensor that this rank writes. */
static int fetch(void *ctx, const char *key, struct tensor *host, struct err *e)
{
    struct save_job *j = ctx;
    struct pieces *p = &j->p;
    while (j->next < p->n && p->items[p->order[j->next]].part != mesh_of(j)->rank)
        j->next++;
    if (j->next == p->n || p->items[p->order[j->next]].key != key)
        return err_set(e, ST_INTERNAL, "tensor %s is not the next to be written", key);
    int i = p->order[j->next++];
    int64_t bytes = tensor_bytes(host);
    void *data = j->whole.data;
    if (bytes > j->room) {
        free(data);
        j->whole.data = NULL;
        j->room = 0;
        TRY(mem_aligned(&data, (size_t)bytes, DEV_ALIGN, e));
        j->room = bytes;
    }
    j->whole = *host;
    j->whole.data = data;
    TRY(pieces_fetch(p, i, &j->whole, e));
    *host = j->whole;
    return ST_OK;
}

/* ---- one job --------------------------------------------------------------------------------- */

static void job_free(struct save_job *j)
{
    for (int i = 0; j->args.source == NULL && i < j->p.n; i++)
        free(j->p.items[i].host.data);
    free(j->whole.data);
    buf_release(&j->config);
    pieces_close(&j->p);
    free(j);
}

static void describe(struct save_job *j)
{
    struct trainer *t = j->p.t;
    j->args = (struct ckpt_save_args){.run_dir = t->cfg->run.dir,
                                      .step = t->step,
                                      .items = j->p.items,
                                      .n_items = j->p.n,
                                      .n_parts = j->p.writers,
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
}

static int writers_of(const struct trainer *t)
{
    int64_t world = t->model.mesh.world, wanted = t->cfg->run.save_ranks;
    return (int)(wanted > 0 ? min_i64(wanted, world) : world);
}

static int job_new(struct save_job **out, struct trainer *t, int writers, bool spread, struct err *e)
{
    struct save_job *j;
    TRY(trainer_settle(t, e));
    TRY(ranks_agree(t, "save", mem_array((void **)&j, 1, sizeof *j, e), e));
    buf_init(&j->config, 0);
    j->source = (struct ckpt_source){.fetch = fetch, .ctx = j};
    int st = pieces_open(&j->p, t, writers, spread, e);
    if (st == ST_OK) {
        config_write(t->cfg, &j->config, false);
        describe(j);
        st = ranks_agree(t, "save", buf_check(&j->config, e), e);
    }
    if (st != ST_OK) {
        j->args.source = &j->source;
        job_free(j);
    } else {
        *out = j;
    }
    return st;
}

/* Rank 0 creates the folder, and all that write must see it. */
static int open_folder(struct save_job *j, struct err *e)
{
    struct trainer *t = j->p.t;
    int st = ST_OK;
    if (trainer_is_rank0(t)) {
        st = ckpt_begin(&j->saving, &j->args, e);
        if (st == ST_OK && strlen(ckpt_saving_folder(j->saving)) >= sizeof j->folder)
            st = err_set(e, ST_USAGE, "run.dir: the path is too long");
        if (st == ST_OK)
            memcpy(j->folder, ckpt_saving_folder(j->saving), strlen(ckpt_saving_folder(j->saving)) + 1);
    }
    TRY(ranks_agree(t, "checkpoint folder", st, e));
    if (j->args.n_parts == 1)
        return ST_OK;
    TRY(comm_host_broadcast(mesh_of(j)->all, "checkpoint folder", j->folder, (int64_t)sizeof j->folder, 0, e));
    j->folder[sizeof j->folder - 1] = '\0';
    st = writes(j) ? ckpt_part_sees(j->folder, e) : ST_OK;
    return ranks_agree(t, "checkpoint folder", st, e);
}

static int write_own(struct save_job *j, struct err *e)
{
    int st = writes(j) ? ckpt_write_part(j->folder, &j->args, mesh_of(j)->rank, &j->sums, e) : ST_OK;
    if (st != ST_OK)
        err_in(e, "saving checkpoint %s/checkpoints/step-%08lld", j->args.run_dir, (long long)j->args.step);
    return st;
}

/* st: did all write their files (the same on every rank)? Ends the job. */
static int complete(struct save_job *j, int st, struct err *note, struct err *e)
{
    struct trainer *t = j->p.t;
    struct ckpt_sums *sums = NULL;
    bool together = st == ST_OK;
    if (together) {
        st = mem_array((void **)&sums, (size_t)mesh_of(j)->world, sizeof *sums, e);
        st = ranks_agree(t, "checkpoint files", st, e);
    }
    if (st == ST_OK)
        st = ranks_collect(t, "checkpoint files", &j->sums, (int64_t)sizeof j->sums, sums, e);
    if (j->saving != NULL && st == ST_OK)
        st = ckpt_finish(j->saving, sums, e);
    else if (j->saving != NULL)
        ckpt_abandon(j->saving);
    if (together)
        st = ranks_agree(t, "checkpoint", st, e);
    if (note != NULL)
        *note = j->note;
    free(sums);
    job_free(j);
    return st;
}

int trainer_save(struct trainer *t, struct err *e) { return trainer_save_noting(t, NULL, e); }

int trainer_save_noting(struct trainer *t, struct err *note, struct err *e)
{
    struct save_job *j;
    int writers = writers_of(t);
    TRY(job_new(&j, t, writers, writers > 1, e));
    int st = open_folder(j, e);
    if (st == ST_OK)
        st = pieces_end(&j->p, write_own(j, e), e);
    return complete(j, st, note, e);
}

/* ---- before the run -------------------------------------------------------------------------- */

/* Rank 0 puts a file there, and the others look for it. */
int trainer_check_folder(struct trainer *t, struct err *e)
{
    char mark[FILE_TEMP_MAX] = "";
    int fd = -1, st = ST_OK, writers = writers_of(t);
    if (t->cfg->run.dir[0] == '\0' || writers == 1 || world_kind(t->world) == COMM_THREADS)
        return ST_OK;
    if (trainer_is_rank0(t)) {
        char *path = path_join(t->cfg->run.dir, "ranks");
        st = path != NULL ? file_temp_open(path, mark, &fd, e) : err_set(e, ST_NOMEM, "out of memory");
        free(path);
    }
    st = ranks_agree(t, "run folder", st, e);
    if (st == ST_OK)
        st = comm_host_broadcast(t->model.mesh.all, "run folder", mark, (int64_t)sizeof mark, 0, e);
    mark[sizeof mark - 1] = '\0';
    if (st == ST_OK)
        st = ranks_agree(t, "run folder", t->model.mesh.rank < writers ? ckpt_part_sees(mark, e) : ST_OK, e);
    if (fd >= 0) {
        unlink(mark);
        close(fd);
    }
    return st;
}

/* ---- looking at what would be saved ---------------------------------------------------------- */

struct visit {
    struct save_job *j;
    saved_fn fn;
    void *ctx;
};

static int visit_one(void *ctx, int i, struct err *e)
{
    const struct visit *v = ctx;
    const struct ckpt_item *item = &v->j->p.items[i];
    struct tensor host = item->host;
    TRY(fetch(v->j, item->key, &host, e));
    return v->fn(v->ctx, item->key, &host, e);
}

int trainer_visit_saved(struct trainer *t, saved_fn fn, void *ctx, struct err *e)
{
    struct save_job *j;
    TRY(job_new(&j, t, 1, true, e));
    int st = pieces_visit(&j->p, visit_one, &(struct visit){j, fn, ctx}, e);
    job_free(j);
    return st;
}

/* ---- while training goes on ------------------------------------------------------------------ */

/* From here on the job needs neither the device nor the other ranks, until its files are written. */
static int copy_one(void *ctx, int i, struct err *e)
{
    struct save_job *j = ctx;
    struct tensor *host = &j->p.items[i].host;
    if (mem_aligned(&host->data, (size_t)max_i64(tensor_bytes(host), 1), DEV_ALIGN, e) != ST_OK) {
        err_hint(e, "run.async_save keeps a copy of what a rank writes in host memory; run.async_save=off does not");
        return ST_NOMEM;
    }
    return pieces_fetch(&j->p, i, host, e);
}

static void *write_copy(void *ctx)
{
    struct save_job *j = ctx;
    j->status = write_own(j, &j->err);
    if (j->args.n_parts == 1 && j->saving != NULL) { /* no other rank has files to wait for */
        if (j->status == ST_OK)
            j->status = ckpt_finish(j->saving, &j->sums, &j->err);
        else
            ckpt_abandon(j->saving);
        j->saving = NULL;
    }
    atomic_store(&j->done, true);
    return NULL;
}

int trainer_save_begin(struct trainer *t, struct err *e)
{
    struct save_job *j;
    int writers = writers_of(t);
    if (t->saving != NULL)
        return err_set(e, ST_INTERNAL, "step %lld is to be saved while another checkpoint is being written",
                       (long long)t->step);
    TRY(job_new(&j, t, writers, writers > 1, e));
    int st = open_folder(j, e);
    if (st == ST_OK) {
        j->args.source = NULL;
        st = pieces_visit(&j->p, copy_one, j, e);
    }
    if (st != ST_OK) {
        ckpt_abandon(j->saving);
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

static struct save_job *join(struct trainer *t)
{
    struct save_job *j = t->saving;
    t->saving = NULL;
    if (j != NULL && j->threaded)
        pthread_join(j->thread, NULL);
    return j;
}

int trainer_save_end(struct trainer *t, int64_t *step, struct err *note, struct err *e)
{
    struct save_job *j = join(t);
    *step = -1;
    if (j == NULL)
        return ST_OK;
    *step = j->args.step;
    if (j->status != ST_OK && e != NULL)
        *e = j->err;
    int st = ranks_agree(t, "earlier checkpoint", j->status, e);
    if (st == ST_OK && j->args.n_parts > 1)
        return complete(j, st, note, e);
    ckpt_abandon(j->saving);
    if (note != NULL)
        *note = j->note;
    job_free(j);
    return st;
}

void trainer_save_drop(struct trainer *t)
{
    struct save_job *j = join(t);
    if (j == NULL)
        return;
    ckpt_abandon(j->saving);
    job_free(j);
}
