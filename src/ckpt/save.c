/* Saving: everything is written, synced and read back in a folder that readers ignore, then renamed. At every
 * moment between two system calls a reader finds the old checkpoint, the new one, or both. The lock of the run folder
 * keeps other writers out, so whatever is found under a temporary name was left by a process that is gone. */
#include "ckpt/ckpt_int.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *const section_files[CKPT_SECTIONS] = {"model.safetensors", "optim.safetensors"};
#define CONFIG_FILE "config.ini"

struct saver {
    const struct ckpt_save_args *args;
    char *dir, *final, *tmp, *old; /* <run>/checkpoints and the three names of this one */
    struct st_item *items;         /* of one section at a time */
    struct dir_lock *lock;         /* NULL: the caller has it */
    struct manifest manifest;
    struct manifest_file files[CKPT_SECTIONS + 1 + CKPT_MAX_FILES];
};

static int saver_init(struct saver *s, const struct ckpt_save_args *a, struct err *e)
{
    uint64_t id = random_u64();
    *s = (struct saver){.args = a};
    if (a->step < 0 || a->n_items < 0 || a->keep < 0 || a->n_train < 0 || a->n_data < 0 || a->n_files > CKPT_MAX_FILES)
        return err_set(e, ST_INVALID, "checkpoint step %lld, %d tensors, keep %d: none may be negative",
                       (long long)a->step, a->n_items, a->keep);
    s->dir = path_join(a->run_dir, "checkpoints");
    if (s->dir != NULL) {
        s->final = folder_path(s->dir, a->step, FOLDER_FINAL, 0);
        s->tmp = folder_path(s->dir, a->step, FOLDER_TMP, id);
        s->old = folder_path(s->dir, a->step, FOLDER_OLD, id);
    }
    if (s->final == NULL || s->tmp == NULL || s->old == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    TRY(mem_array((void **)&s->items, (size_t)a->n_items, sizeof *s->items, e));
    struct manifest *m = &s->manifest;
    m->step = a->step;
    m->counters = a->counters;
    m->counters.saved_at = time_wall();
    m->train = (struct ckpt_number *)(uintptr_t)a->train;
    m->n_train = a->n_train;
    m->data = (struct ckpt_data *)(uintptr_t)a->data;
    m->n_data = a->n_data;
    m->files = s->files;
    return mem_array((void **)&m->tensors, (size_t)a->n_items, sizeof *m->tensors, e);
}

static void saver_release(struct saver *s)
{
    dir_lock_release(s->lock);
    free(s->dir);
    free(s->final);
    free(s->tmp);
    free(s->old);
    free(s->items);
    free(s->manifest.tensors);
}

/* What killed writers left. A complete .old whose successor never arrived gets its name back. Not
 * an error if it fails: readers ignore leftovers, and the next save tries again. */
static void clean_stale(const char *dir)
{
    struct folder *list;
    int n;
    file_temp_clean(dir, NULL);
    if (folder_scan(dir, &list, &n, NULL) != ST_OK)
        return;
    for (int i = 0; i < n; i++) {
        struct folder *f = &list[i];
        if (f->kind == FOLDER_FINAL)
            continue;
        struct folder final = {.step = f->step, .path = folder_path(dir, f->step, FOLDER_FINAL, 0)};
        if (final.path != NULL && f->kind == FOLDER_OLD && folder_complete(f) && !folder_complete(&final)) {
            if (!file_exists(final.path) && rename(f->path, final.path) == 0)
                file_sync_dir(dir, NULL);
        } else if (final.path != NULL && (f->kind == FOLDER_TMP || folder_complete(&final))) {
            file_remove_tree(f->path, NULL);
        }
        free(final.path);
    }
    folder_scan_free(list, n);
}

static int add_file(struct saver *s, const char *name, struct file_sum sum)
{
    s->manifest.files[s->manifest.n_files] = (struct manifest_file){.name = name, .sum = sum};
    return s->manifest.n_files++;
}

static int write_section(struct saver *s, int section, struct err *e)
{
    static const struct st_meta meta[] = {{"format", "pt"}, {"writer", "braid"}};
    const struct ckpt_save_args *a = s->args;
    struct manifest *m = &s->manifest;
    struct file_sum sum;
    int n = 0;
    for (int i = 0; i < a->n_items; i++) {
        const struct ckpt_item *item = &a->items[i];
        if (item->section != section)
            continue;
        s->items[n++] = (struct st_item){item->key, item->host, item->param};
    }
    if (n == 0)
        return ST_OK;
    char *path = path_join(s->tmp, section_files[section]);
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = st_write_from(path, s->items, n, a->source, meta, countof(meta), &sum, e);
    free(path);
    if (st != ST_OK)
        return st;
    int file = add_file(s, section_files[section], sum);
    for (int i = 0; i < n; i++) {
        const struct tensor *t = &s->items[i].host;
        struct manifest_tensor *out = &m->tensors[m->n_tensors++];
        *out = (struct manifest_tensor){
            .key = s->items[i].name, .section = section, .dtype = t->dtype, .rank = t->rank, .file = file};
        memcpy(out->dim, t->dim, sizeof out->dim);
    }
    return ST_OK;
}

static int write_bytes(struct saver *s, const char *name, const void *bytes, size_t n, struct file_sum *sum,
                       struct err *e)
{
    char *path = path_join(s->tmp, name);
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = bytes_write_new(path, bytes, n, sum, e);
    free(path);
    return st;
}

static int write_text(struct saver *s, const char *name, const char *text, struct file_sum *sum, struct err *e)
{
    return write_bytes(s, name, text, strlen(text), sum, e);
}

/* The whole checkpoint under its temporary name, on the disk when this returns. */
static int write_folder(struct saver *s, struct err *e)
{
    struct file_sum sum;
    char *text;
    if (mkdir(s->tmp, 0777) != 0)
        return err_errno(e, "cannot create folder %s", s->tmp);
    for (int section = 0; section < CKPT_SECTIONS; section++)
        TRY(write_section(s, section, e));
    if (s->args->config_text != NULL) {
        TRY(write_text(s, CONFIG_FILE, s->args->config_text, &sum, e));
        add_file(s, CONFIG_FILE, sum);
    }
    for (int i = 0; i < s->args->n_files; i++) {
        const struct ckpt_file *f = &s->args->files[i];
        TRY(write_bytes(s, f->name, f->bytes, f->n, &sum, e));
        add_file(s, f->name, sum);
    }
    TRY(manifest_dump(&s->manifest, &text, e));
    int st = write_text(s, MANIFEST_NAME, text, &sum, e);
    free(text);
    TRY(st);
    return file_sync_dir(s->tmp, e);
}

static bool same_tensor(const struct manifest_tensor *t, const struct tensor *is)
{
    struct tensor wanted = tensor_shape(t->dtype, t->rank, t->dim);
    return is->dtype == t->dtype && tensor_same_shape(is, &wanted);
}

/* Headers and manifest as a reader will find them, against what was to be saved. Memory that ran out unnoticed, or a
 * disk that lies, must show before this checkpoint replaces another. */
static int read_back(const struct saver *s, struct err *e)
{
    const struct manifest *m = &s->manifest;
    struct ckpt *c = NULL;
    int st = ckpt_open_with(&c, s->tmp, CKPT_NO_CHECKSUM, e);
    if (st != ST_OK) {
        err_hint(e, "memory or the disk failed while it was written; earlier checkpoints are untouched");
        return st;
    }
    if (ckpt_step(c) != m->step || ckpt_count(c) != m->n_tensors || ckpt_data_count(c) != m->n_data)
        st = err_set(e, ST_CORRUPT, "%s reads back as step %lld with %d tensors, not step %lld with %d", s->tmp,
                     (long long)ckpt_step(c), ckpt_count(c), (long long)m->step, m->n_tensors);
    for (int i = 0; st == ST_OK && i < m->n_tensors; i++) {
        const struct manifest_tensor *t = &m->tensors[i];
        const struct st_entry *is = ckpt_entry(c, t->key, t->section);
        if (is == NULL || !same_tensor(t, &is->view))
            st = err_set(e, ST_CORRUPT, "%s: tensor '%s' reads back with another shape or not at all", s->tmp, t->key);
    }
    ckpt_close(c);
    return st;
}

/* Give the new folder its name. An earlier one of the same step steps aside first, under a name
 * readers know, because a folder cannot be renamed onto a full one. */
static int publish(struct saver *s, struct err *e)
{
    bool replaces = file_exists(s->final);
    if (replaces && rename(s->final, s->old) != 0)
        return err_errno(e, "cannot rename %s to %s", s->final, s->old);
    if (rename(s->tmp, s->final) != 0) {
        int st = err_errno(e, "cannot rename %s to %s", s->tmp, s->final);
        if (replaces && rename(s->old, s->final) != 0)
            err_hint(e, "the earlier checkpoint of this step is in %s", s->old);
        return st;
    }
    return file_sync_dir(s->dir, e); /* the new name is safe before the old data go */
}

static int write_latest(const struct saver *s, struct err *e)
{
    char text[128];
    char *path = path_join(s->dir, "latest");
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int n = snprintf(text, sizeof text, "%s\n", path_tail(s->final));
    int st = file_write_atomic(path, text, (size_t)n, e);
    free(path);
    return st;
}

/* Under a name readers ignore first, so that a kill leaves no half checkpoint. */
static int remove_checkpoint(const char *dir, const struct folder *f, struct err *e)
{
    char *doomed = folder_path(dir, f->step, FOLDER_TMP, random_u64());
    if (doomed == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st =
        rename(f->path, doomed) == 0 ? file_sync_dir(dir, e) : err_errno(e, "cannot rename %s to %s", f->path, doomed);
    if (st == ST_OK) /* only now: else a power cut could lose the files and keep the name */
        st = file_remove_tree(doomed, e);
    free(doomed);
    return st;
}

/* Only complete checkpoints count as kept, and only ones older than `step`, which is complete, go. */
static int prune(const char *dir, int64_t step, int keep, struct err *e)
{
    struct folder *list;
    int n, kept = 1, st = ST_OK;
    if (keep == 0)
        return ST_OK;
    TRY(folder_scan(dir, &list, &n, e));
    for (int i = 0; i < n && st == ST_OK; i++) {
        if (list[i].kind != FOLDER_FINAL || list[i].step >= step)
            continue;
        if (kept >= keep)
            st = remove_checkpoint(dir, &list[i], e);
        else
            kept += folder_complete(&list[i]);
    }
    folder_scan_free(list, n);
    return st;
}

void ckpt_tidy(const char *run_dir, int64_t step, int keep)
{
    char *dir = path_join(run_dir, "checkpoints");
    struct folder newest = {.step = step, .path = dir ? folder_path(dir, step, FOLDER_FINAL, 0) : NULL};
    file_temp_clean(run_dir, NULL);
    if (dir != NULL && file_is_dir(dir)) {
        clean_stale(dir);
        if (newest.path != NULL && folder_complete(&newest))
            prune(dir, step, keep, NULL);
    }
    free(newest.path);
    free(dir);
}

/* checkpoints-set-aside-<time>, a new folder. */
static int make_aside(const char *run_dir, char **out, struct err *e)
{
    char name[96], stamp[32] = "unknown";
    time_t now = time(NULL);
    struct tm tm;
    if (gmtime_r(&now, &tm) != NULL)
        strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", &tm);
    for (int i = 0; i < 1000; i++) {
        if (i == 0)
            snprintf(name, sizeof name, "checkpoints-set-aside-%s", stamp);
        else
            snprintf(name, sizeof name, "checkpoints-set-aside-%s-%d", stamp, i);
        *out = path_join(run_dir, name);
        if (*out == NULL)
            return err_set(e, ST_NOMEM, "out of memory");
        if (mkdir(*out, 0777) == 0)
            return ST_OK;
        bool taken = errno == EEXIST;
        int st = err_errno(e, "cannot create folder %s", *out);
        free(*out);
        *out = NULL;
        if (!taken)
            return st;
    }
    return err_set(e, ST_IO, "cannot create a folder for earlier checkpoints in %s", run_dir);
}

static int move_into(const struct folder *f, const char *to, struct err *e)
{
    char *target = path_join(to, path_tail(f->path));
    if (target == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = rename(f->path, target) == 0 ? ST_OK : err_errno(e, "cannot rename %s to %s", f->path, target);
    free(target);
    return st;
}

int ckpt_set_aside(const char *run_dir, int64_t after, char **to, int *moved, struct err *e)
{
    struct folder *list = NULL;
    int n = 0, st;
    char *dir = path_join(run_dir, "checkpoints"), *latest = dir ? path_join(dir, "latest") : NULL;
    bool exists = false;
    *to = NULL;
    *moved = 0;
    if (latest == NULL)
        TRY_OUT(err_set(e, ST_NOMEM, "out of memory"));
    TRY_OUT(file_lookup(dir, &exists, e));
    if (!exists)
        goto out;
    TRY_OUT(folder_scan(dir, &list, &n, e));
    for (int i = 0; i < n; i++) {
        if (list[i].kind == FOLDER_TMP || list[i].step <= after)
            continue;
        if (*to == NULL)
            TRY_OUT(make_aside(run_dir, to, e));
        TRY_OUT(move_into(&list[i], *to, e));
        ++*moved;
    }
    if (*to != NULL) {
        unlink(latest); /* the next save writes it again */
        TRY_OUT(file_sync_dir(*to, e));
        TRY_OUT(file_sync_dir(dir, e));
        st = file_sync_dir(run_dir, e);
    }
out:
    folder_scan_free(list, n);
    free(latest);
    free(dir);
    return st;
}

static int check_sections(const struct ckpt_save_args *a, struct err *e)
{
    for (int i = 0; i < a->n_items; i++)
        if (a->items[i].section < 0 || a->items[i].section >= CKPT_SECTIONS)
            return err_set(e, ST_INVALID, "checkpoint item %d has section %d", i, a->items[i].section);
    return ST_OK;
}

/* After the checkpoint is safe: nothing here may fail the save. The first failure becomes the note. */
static void tidy_up(const struct saver *s)
{
    struct err e = {0};
    int st = write_latest(s, &e);
    if (st == ST_OK)
        st = file_remove_tree(s->old, &e);
    if (st == ST_OK)
        st = prune(s->dir, s->args->step, s->args->keep, &e);
    if (s->args->note == NULL)
        return;
    err_clear(s->args->note);
    if (st == ST_OK)
        return;
    *s->args->note = e;
    err_in(s->args->note, "tidying up; checkpoint %s itself is saved", s->final);
}

int ckpt_save(const struct ckpt_save_args *args, struct err *e)
{
    struct saver s;
    int st = saver_init(&s, args, e);
    if (st != ST_OK)
        goto out;
    TRY_OUT(check_sections(args, e));
    TRY_OUT(file_make_dirs(s.dir, e));
    TRY_OUT(args->lock != NULL ? dir_lock_check(args->lock, e) : dir_lock_take(&s.lock, args->run_dir, NULL, NULL, e));
    TRY_OUT(file_sync_dir(args->run_dir, e));
    clean_stale(s.dir);
    st = write_folder(&s, e);
    if (st == ST_OK)
        st = read_back(&s, e);
    if (st == ST_OK)
        st = publish(&s, e);
    if (st != ST_OK) {
        file_remove_tree(s.tmp, NULL);
        err_in(e, "saving checkpoint %s", s.final);
        goto out;
    }
    tidy_up(&s);
out:
    saver_release(&s);
    return st;
}
