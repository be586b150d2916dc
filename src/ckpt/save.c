/* Saving: everything is written and synced in a folder that readers ignore, then renamed. At every
 * moment between two system calls a reader finds the old checkpoint, the new one, or both. */
#include "ckpt/ckpt_int.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const section_files[CKPT_SECTIONS] = {"model.safetensors", "optim.safetensors"};
#define CONFIG_FILE "config.ini"

struct saver {
    const struct ckpt_save_args *args;
    char *dir, *final, *tmp, *old; /* <run>/checkpoints and the three names of this one */
    struct st_item *items;         /* of one section at a time */
    struct manifest manifest;
    struct manifest_file files[CKPT_SECTIONS + 1];
};

static int saver_init(struct saver *s, const struct ckpt_save_args *a, struct err *e)
{
    long pid = (long)getpid();
    *s = (struct saver){.args = a};
    if (a->step < 0 || a->n_items < 0 || a->keep < 0 || a->n_train < 0)
        return err_set(e, ST_INVALID,
                       "checkpoint step %lld, %d tensors, keep %d: none may be negative",
                       (long long)a->step, a->n_items, a->keep);
    s->dir = path_join(a->run_dir, "checkpoints");
    if (s->dir != NULL) {
        s->final = folder_path(s->dir, a->step, FOLDER_FINAL, 0);
        s->tmp = folder_path(s->dir, a->step, FOLDER_TMP, pid);
        s->old = folder_path(s->dir, a->step, FOLDER_OLD, pid);
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
    m->files = s->files;
    return mem_array((void **)&m->tensors, (size_t)a->n_items, sizeof *m->tensors, e);
}

static void saver_release(struct saver *s)
{
    free(s->dir);
    free(s->final);
    free(s->tmp);
    free(s->old);
    free(s->items);
    free(s->manifest.tensors);
}

static bool writer_is_gone(long pid)
{
    /* Our own number: a leftover of ours, or of a predecessor (in a container it often repeats). */
    return pid == (long)getpid() || pid <= 0 || (kill((pid_t)pid, 0) != 0 && errno == ESRCH);
}

/* What killed writers left. A complete .old whose successor never arrived gets its name back. Not
 * an error if it fails: readers ignore leftovers, and the next save tries again. */
static void clean_stale(const char *dir)
{
    struct folder *list;
    int n;
    if (folder_scan(dir, &list, &n, NULL) != ST_OK)
        return;
    for (int i = 0; i < n; i++) {
        struct folder *f = &list[i];
        if (f->kind == FOLDER_FINAL || !writer_is_gone(f->pid))
            continue;
        struct folder final = {.step = f->step, .path = folder_path(dir, f->step, FOLDER_FINAL, 0)};
        if (final.path != NULL && f->kind == FOLDER_OLD && folder_complete(f) &&
            !folder_complete(&final)) {
            if (!file_exists(final.path) && rename(f->path, final.path) == 0)
                file_sync_dir(dir, NULL);
        } else if (final.path != NULL)
            file_remove_tree(f->path, NULL);
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
        *out = (struct manifest_tensor){.key = s->items[i].name,
                                        .section = section,
                                        .dtype = t->dtype,
                                        .rank = t->rank,
                                        .file = file};
        memcpy(out->dim, t->dim, sizeof out->dim);
    }
    return ST_OK;
}

static int write_text(struct saver *s, const char *name, const char *text, struct file_sum *sum,
                      struct err *e)
{
    char *path = path_join(s->tmp, name);
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = bytes_write_new(path, text, strlen(text), sum, e);
    free(path);
    return st;
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
    TRY(manifest_dump(&s->manifest, &text, e));
    int st = write_text(s, MANIFEST_NAME, text, &sum, e);
    free(text);
    TRY(st);
    return file_sync_dir(s->tmp, e);
}

/* Give the new folder its name. An earlier one of the same step steps aside first, under a name
 * readers know, because a folder cannot be renamed onto a full one. */
static int publish(struct saver *s, struct err *e)
{
    struct folder final = {.step = s->args->step, .path = s->final};
    /* Stale cleaning left an .old of ours only if that is the complete one of the two. */
    if (file_exists(s->old) && file_exists(s->final) && !folder_complete(&final))
        TRY(file_remove_tree(s->final, e));
    bool replaces = file_exists(s->final);
    if (replaces && rename(s->final, s->old) != 0)
        return err_errno(e, "cannot rename %s to %s", s->final, s->old);
    if (rename(s->tmp, s->final) != 0) {
        int st = err_errno(e, "cannot rename %s to %s", s->tmp, s->final);
        if (replaces && rename(s->old, s->final) != 0)
            err_hint(e, "the earlier checkpoint of this step is in %s", s->old);
        return st;
    }
    TRY(file_sync_dir(s->dir, e)); /* the new name is safe before the old data go */
    return file_remove_tree(s->old, e);
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
    char *doomed = folder_path(dir, f->step, FOLDER_TMP, (long)getpid());
    if (doomed == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = rename(f->path, doomed) == 0 ? file_remove_tree(doomed, e)
                                          : err_errno(e, "cannot rename %s to %s", f->path, doomed);
    free(doomed);
    return st;
}

/* Only complete checkpoints count as kept, and only ones older than the one just saved go. */
static int prune(const struct saver *s, struct err *e)
{
    struct folder *list;
    int n, kept = 1, st = ST_OK;
    if (s->args->keep == 0)
        return ST_OK;
    TRY(folder_scan(s->dir, &list, &n, e));
    for (int i = 0; i < n && st == ST_OK; i++) {
        if (list[i].kind != FOLDER_FINAL || list[i].step >= s->args->step)
            continue;
        if (kept >= s->args->keep)
            st = remove_checkpoint(s->dir, &list[i], e);
        else
            kept += folder_complete(&list[i]);
    }
    folder_scan_free(list, n);
    return st;
}

static int check_sections(const struct ckpt_save_args *a, struct err *e)
{
    for (int i = 0; i < a->n_items; i++)
        if (a->items[i].section < 0 || a->items[i].section >= CKPT_SECTIONS)
            return err_set(e, ST_INVALID, "checkpoint item %d has section %d", i,
                           a->items[i].section);
    return ST_OK;
}

int ckpt_save(const struct ckpt_save_args *args, struct err *e)
{
    struct saver s;
    int st = saver_init(&s, args, e);
    if (st != ST_OK)
        goto out;
    TRY_OUT(check_sections(args, e));
    TRY_OUT(file_make_dirs(s.dir, e));
    TRY_OUT(file_sync_dir(args->run_dir, e));
    clean_stale(s.dir);
    st = write_folder(&s, e);
    if (st == ST_OK)
        st = publish(&s, e);
    if (st != ST_OK) {
        file_remove_tree(s.tmp, NULL);
        err_in(e, "saving checkpoint %s", s.final);
        goto out;
    }
    st = write_latest(&s, e);
    if (st == ST_OK)
        st = prune(&s, e);
    if (st != ST_OK)
        err_in(e, "tidying up; checkpoint %s itself is saved", s.final);
out:
    saver_release(&s);
    return st;
}
