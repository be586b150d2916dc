/* Saving: everything is written, synced and read back in a folder that readers ignore, then renamed. At every
 * moment between two system calls a reader finds the old checkpoint, the new one, or both. Several writers put files of
 * their own into that folder (save_part.c); one of them creates it, writes the manifest last and renames it. The lock
 * of the run folder keeps other runs out, so whatever is found under a temporary name was left by a process that is
 * gone. */
#include "ckpt/ckpt_int.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define CONFIG_FILE "config.ini"

struct ckpt_saving {
    const struct ckpt_save_args *args;
    char *dir, *final, *tmp, *old; /* <run>/checkpoints and the three names of this one */
    struct dir_lock *lock;         /* NULL: the caller has it */
    struct manifest manifest;
    struct arena names; /* of files */
};

static int n_parts(const struct ckpt_save_args *a) { return a->n_parts > 1 ? a->n_parts : 1; }

static int check_args(const struct ckpt_save_args *a, struct err *e)
{
    if (a->step < 0 || a->n_items < 0 || a->keep < 0 || a->n_train < 0 || a->n_data < 0 || a->n_files > CKPT_MAX_FILES)
        return err_set(e, ST_INVALID, "checkpoint step %lld, %d tensors, keep %d: none may be negative",
                       (long long)a->step, a->n_items, a->keep);
    for (int i = 0; i < a->n_items; i++) {
        const struct ckpt_item *item = &a->items[i];
        if (item->section < 0 || item->section >= CKPT_SECTIONS || item->part < 0 || item->part >= n_parts(a))
            return err_set(e, ST_INVALID, "checkpoint item %d has section %d and part %d of %d", i, item->section,
                           item->part, n_parts(a));
    }
    return ST_OK;
}

static int saver_init(struct ckpt_saving *s, const struct ckpt_save_args *a, struct err *e)
{
    uint64_t id = random_u64();
    struct manifest *m = &s->manifest;
    *s = (struct ckpt_saving){.args = a};
    arena_init(&s->names);
    TRY(check_args(a, e));
    s->dir = path_join(a->run_dir, "checkpoints");
    if (s->dir != NULL) {
        s->final = folder_path(s->dir, a->step, FOLDER_FINAL, 0);
        s->tmp = folder_path(s->dir, a->step, FOLDER_TMP, id);
        s->old = folder_path(s->dir, a->step, FOLDER_OLD, id);
    }
    if (s->final == NULL || s->tmp == NULL || s->old == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    m->step = a->step;
    m->counters = a->counters;
    m->counters.saved_at = time_wall();
    m->train = (struct ckpt_number *)(uintptr_t)a->train;
    m->n_train = a->n_train;
    m->data = (struct ckpt_data *)(uintptr_t)a->data;
    m->n_data = a->n_data;
    size_t n_files = (size_t)CKPT_SECTIONS * (size_t)n_parts(a) + 1 + CKPT_MAX_FILES;
    TRY(mem_array((void **)&m->files, n_files, sizeof *m->files, e));
    return mem_array((void **)&m->tensors, (size_t)a->n_items, sizeof *m->tensors, e);
}

static void saver_free(struct ckpt_saving *s)
{
    dir_lock_release(s->lock);
    free(s->dir);
    free(s->final);
    free(s->tmp);
    free(s->old);
    free(s->manifest.files);
    free(s->manifest.tensors);
    arena_release(&s->names);
    free(s);
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

static int add_file(struct ckpt_saving *s, const char *name, struct file_sum sum)
{
    s->manifest.files[s->manifest.n_files] = (struct manifest_file){.name = name, .sum = sum};
    return s->manifest.n_files++;
}

/* The file of a part, as its writer reported it; *file is its number in the manifest. */
static int add_part(struct ckpt_saving *s, int section, int part, const struct ckpt_sums *sums, int *file,
                    struct err *e)
{
    char name[PART_NAME];
    const char *kept = arena_strdup(&s->names, part_file(section, part, n_parts(s->args), name));
    struct file_sum sum = {.bytes = sums->bytes[section], .xxh3 = sums->xxh3[section]};
    char *path = kept != NULL ? path_join(s->tmp, kept) : NULL;
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int64_t size = file_size(path);
    free(path);
    if (size != sum.bytes) {
        if (size >= 0)
            err_set(e, ST_IO, "rank %d wrote %lld bytes into %s, and it has %lld", part, (long long)sum.bytes, kept,
                    (long long)size);
        else
            err_set(e, ST_IO, "rank %d wrote %s, which rank 0 does not see in %s", part, kept, s->tmp);
        return err_hint(e, NOT_SHARED);
    }
    *file = add_file(s, kept, sum);
    return ST_OK;
}

/* Files and tensors of one section, for the manifest. */
static int list_section(struct ckpt_saving *s, int section, const struct ckpt_sums *sums, struct err *e)
{
    const struct ckpt_save_args *a = s->args;
    struct manifest *m = &s->manifest;
    int *file = NULL, st = ST_OK, parts = n_parts(a);
    TRY(mem_array((void **)&file, (size_t)parts, sizeof *file, e));
    for (int p = 0; p < parts; p++) {
        file[p] = -1;
        if (sums[p].bytes[section] > 0)
            TRY_OUT(add_part(s, section, p, &sums[p], &file[p], e));
    }
    for (int i = 0; i < a->n_items; i++) {
        const struct ckpt_item *item = &a->items[i];
        if (item->section != section)
            continue;
        if (file[item->part] < 0)
            TRY_OUT(err_set(e, ST_INTERNAL, "rank %d wrote no file, and %s was to be in it", item->part, item->key));
        struct manifest_tensor *out = &m->tensors[m->n_tensors++];
        *out = (struct manifest_tensor){.key = item->key,
                                        .section = section,
                                        .dtype = item->host.dtype,
                                        .rank = item->host.rank,
                                        .file = file[item->part]};
        memcpy(out->dim, item->host.dim, sizeof out->dim);
    }
out:
    free(file);
    return st;
}

static int write_bytes(struct ckpt_saving *s, const char *name, const void *bytes, size_t n, struct file_sum *sum,
                       struct err *e)
{
    char *path = path_join(s->tmp, name);
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = bytes_write_new(path, bytes, n, sum, e);
    free(path);
    return st;
}

static int write_text(struct ckpt_saving *s, const char *name, const char *text, struct file_sum *sum, struct err *e)
{
    return write_bytes(s, name, text, strlen(text), sum, e);
}

/* What the writers of parts leave to do: the whole checkpoint is on the disk under its temporary name when this
 * returns. */
static int complete_folder(struct ckpt_saving *s, const struct ckpt_sums *sums, struct err *e)
{
    struct file_sum sum;
    char *text;
    for (int section = 0; section < CKPT_SECTIONS; section++)
        TRY(list_section(s, section, sums, e));
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
static int read_back(const struct ckpt_saving *s, struct err *e)
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
static int publish(struct ckpt_saving *s, struct err *e)
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

static int write_latest(const struct ckpt_saving *s, struct err *e)
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

/* After the checkpoint is safe: nothing here may fail the save. The first failure becomes the note. */
static void tidy_up(const struct ckpt_saving *s)
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

static int begin(struct ckpt_saving *s, struct err *e)
{
    const struct ckpt_save_args *a = s->args;
    TRY(file_make_dirs(s->dir, e));
    TRY(a->lock != NULL ? dir_lock_check(a->lock, e) : dir_lock_take(&s->lock, a->run_dir, NULL, NULL, e));
    TRY(file_sync_dir(a->run_dir, e));
    clean_stale(s->dir);
    if (mkdir(s->tmp, 0777) == 0)
        return ST_OK;
    int st = err_errno(e, "cannot create folder %s", s->tmp);
    err_in(e, "saving checkpoint %s", s->final);
    return st;
}

int ckpt_begin(struct ckpt_saving **out, const struct ckpt_save_args *args, struct err *e)
{
    struct ckpt_saving *s;
    *out = NULL;
    TRY(mem_array((void **)&s, 1, sizeof *s, e));
    int st = saver_init(s, args, e);
    if (st == ST_OK)
        st = begin(s, e);
    if (st == ST_OK)
        *out = s;
    else
        saver_free(s);
    return st;
}

const char *ckpt_saving_folder(const struct ckpt_saving *s) { return s->tmp; }

int ckpt_finish(struct ckpt_saving *s, const struct ckpt_sums *sums, struct err *e)
{
    int st = complete_folder(s, sums, e);
    if (st == ST_OK)
        st = read_back(s, e);
    if (st == ST_OK)
        st = publish(s, e);
    if (st == ST_OK) {
        tidy_up(s);
        saver_free(s);
        return ST_OK;
    }
    err_in(e, "saving checkpoint %s", s->final);
    ckpt_abandon(s);
    return st;
}

void ckpt_abandon(struct ckpt_saving *s)
{
    if (s == NULL)
        return;
    file_remove_tree(s->tmp, NULL);
    saver_free(s);
}

int ckpt_save(const struct ckpt_save_args *args, struct err *e)
{
    struct ckpt_saving *s;
    struct ckpt_sums *sums = NULL;
    int st, parts = n_parts(args);
    TRY(ckpt_begin(&s, args, e));
    st = mem_array((void **)&sums, (size_t)parts, sizeof *sums, e);
    for (int p = 0; st == ST_OK && p < parts; p++)
        st = ckpt_write_part(s->tmp, args, p, &sums[p], e);
    if (st == ST_OK) {
        st = ckpt_finish(s, sums, e);
    } else {
        err_in(e, "saving checkpoint %s", s->final);
        ckpt_abandon(s);
    }
    free(sums);
    return st;
}
