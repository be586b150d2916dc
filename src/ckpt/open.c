/* Opening a checkpoint: find it, check all of it, and only then hand out tensors. A damaged one is
 * refused with the name of the next older good one, never silently replaced by it. */
#include "ckpt/ckpt_int.h"

#include <stdlib.h>
#include <string.h>

enum { CONFIG_MAX_BYTES = 16 << 20 };

struct ckpt {
    char *path, *config;
    struct manifest m;
    struct st_file **files;          /* one per manifest file; NULL: not safetensors */
    const struct st_entry **entries; /* one per manifest tensor */
};

/* ---- finding --------------------------------------------------------------------------------- */

/* Good: complete, and its bytes are what was written. */
static bool folder_good(const struct folder *f)
{
    struct manifest m;
    if (!folder_complete(f) || folder_manifest(f->path, &m, NULL) != ST_OK)
        return false;
    bool good = folder_checksums(f->path, &m, NULL) == ST_OK;
    manifest_release(&m);
    return good;
}

static char *parent_of(const char *path)
{
    char *copy = strdup(path);
    if (copy == NULL)
        return NULL;
    size_t n = strlen(copy);
    while (n > 1 && copy[n - 1] == '/')
        copy[--n] = '\0';
    char *slash = strrchr(copy, '/');
    if (slash == NULL)
        snprintf(copy, n + 1, ".");
    else
        *(slash == copy ? slash + 1 : slash) = '\0';
    return copy;
}

/* The path to recommend instead of a damaged checkpoint; NULL when there is none. malloc'd. */
static char *next_older_good(const char *path)
{
    struct folder self, *list;
    int n;
    char *dir = parent_of(path), *found = NULL;
    if (dir == NULL || !folder_parse_name(path_tail(path), &self))
        self.step = INT64_MAX;
    if (dir != NULL && folder_scan(dir, &list, &n, NULL) == ST_OK) {
        for (int i = 0; i < n && found == NULL; i++) {
            bool older = list[i].step < self.step || (list[i].step == self.step && list[i].kind != self.kind);
            if (older && list[i].kind != FOLDER_TMP && folder_good(&list[i]))
                found = strdup(list[i].path);
        }
        folder_scan_free(list, n);
    }
    free(dir);
    return found;
}

/* Wrap what is wrong with the folder at path: the checkpoint's name, the reason, the remedy. */
static int damaged(const char *path, int st, const struct err *inner, struct err *e)
{
    char reason[600];
    snprintf(reason, sizeof reason, "%.599s", inner->msg);
    if (st != ST_CORRUPT) {
        err_set(e, (enum status)st, "checkpoint %s cannot be read: %s", path, reason);
        if (inner->hint[0])
            err_hint(e, "%s", inner->hint);
        else if (st == ST_UNSUPPORTED)
            err_hint(e, "read it with the braid that wrote it, or a newer one");
        else if (st == ST_INVALID)
            err_hint(e, "name a braid run folder, or one of its checkpoints/step-... folders");
        return st;
    }
    char *older = next_older_good(path);
    err_set(e, ST_CORRUPT, "checkpoint %s is damaged (%s)", path, reason);
    if (older != NULL)
        err_hint(e, "use %s, the next older good one; `braid ckpt verify` checks them all", older);
    else
        err_hint(e, "there is no older good one beside it; restore it from a copy, or start again");
    free(older);
    return st;
}

/* The newest checkpoint in a folder of them: of the highest step the one with its final name, unless only the one that
 * was to be replaced is complete. A damaged one is not passed over: opening it says what is wrong
 * and names an older. */
static int newest_in(const char *dir, char **path, struct err *e)
{
    struct folder *list;
    int n, first = -1, st = ST_OK;
    *path = NULL;
    TRY(folder_scan(dir, &list, &n, e));
    for (int i = 0; i < n && *path == NULL && (first < 0 || list[i].step == list[first].step); i++) {
        if (list[i].kind == FOLDER_TMP)
            continue;
        first = first < 0 ? i : first;
        if (folder_complete(&list[i]) && (*path = strdup(list[i].path)) == NULL)
            st = err_set(e, ST_NOMEM, "out of memory");
    }
    if (first < 0) {
        st = err_set(e, ST_INVALID, "there is no checkpoint in %s yet", dir);
        err_hint(e, "name the folder of a run that has saved one, or start afresh");
    } else if (st == ST_OK && *path == NULL && (*path = strdup(list[first].path)) == NULL) {
        st = err_set(e, ST_NOMEM, "out of memory");
    }
    folder_scan_free(list, n);
    return st;
}

static bool holds(const char *dir, const char *name)
{
    char *path = path_join(dir, name);
    bool found = path != NULL && file_exists(path);
    free(path);
    return found;
}

static int foreign(const char *path, struct err *e)
{
    err_set(e, ST_INVALID, "%s is not a braid checkpoint: it has neither " MANIFEST_NAME " nor checkpoints/", path);
    if (holds(path, "latest_checkpointed_iteration.txt") || holds(path, ".metadata"))
        err_hint(e, "it looks like a Megatron checkpoint, which braid does not read");
    else if (holds(path, "config.json"))
        err_hint(e, "it looks like a Hugging Face model folder; name a braid run folder instead");
    else
        err_hint(e, "name a run folder, or one of its checkpoints/step-... folders");
    return ST_INVALID;
}

static bool has_step_folders(const char *dir)
{
    struct folder *list;
    int n;
    if (folder_scan(dir, &list, &n, NULL) != ST_OK)
        return false;
    folder_scan_free(list, n);
    return n > 0;
}

static int folder_for(const char *path, char **folder, struct err *e)
{
    struct folder f;
    if (holds(path, MANIFEST_NAME) || folder_parse_name(path_tail(path), &f))
        return (*folder = strdup(path)) ? ST_OK : err_set(e, ST_NOMEM, "out of memory");
    char *inside = path_join(path, "checkpoints");
    if (inside == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = file_is_dir(inside)      ? newest_in(inside, folder, e)
             : has_step_folders(path) ? newest_in(path, folder, e)
                                      : foreign(path, e);
    free(inside);
    return st;
}

/* From what the user named to one checkpoint folder (malloc'd). */
static int resolve(const char *path, char **folder, struct err *e)
{
    int st;
    *folder = NULL;
    if (!file_exists(path)) {
        st = err_set(e, ST_IO, "there is no checkpoint or run folder %s", path);
        err_hint(e, "check the path; `braid ckpt ls RUN` lists what a run has saved");
        return st;
    }
    if (!file_is_dir(path)) {
        st = err_set(e, ST_INVALID, "%s is a file, and a checkpoint is a folder", path);
        err_hint(e, "name the step-... folder that holds it, or the run folder");
        return st;
    }
    char *plain = strdup(path); /* without the slashes a shell completes */
    if (plain == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    for (size_t n = strlen(plain); n > 1 && plain[n - 1] == '/'; n--)
        plain[n - 1] = '\0';
    st = folder_for(plain, folder, e);
    free(plain);
    return st;
}

/* ---- opening --------------------------------------------------------------------------------- */

static int open_file(struct ckpt *c, int i, struct err *e)
{
    const char *name = c->m.files[i].name;
    size_t n;
    char *path = path_join(c->path, name);
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = ST_OK;
    if (str_ends(name, ".safetensors"))
        st = st_open(&c->files[i], path, e);
    else if (strcmp(name, "config.ini") == 0)
        st = file_read(path, CONFIG_MAX_BYTES, &c->config, &n, e);
    free(path);
    return st;
}

/* The manifest and the files must tell the same story. */
static int match_tensors(struct ckpt *c, struct err *e)
{
    char key[NAME_TEXT], have[128], said[128];
    int64_t stored = 0;
    for (int i = 0; i < c->m.n_files; i++)
        stored += c->files[i] ? st_count(c->files[i]) : 0;
    if (stored != c->m.n_tensors)
        return err_set(e, ST_CORRUPT, "the files hold %lld tensors, the manifest lists %d", (long long)stored,
                       c->m.n_tensors);
    for (int i = 0; i < c->m.n_tensors; i++) {
        const struct manifest_tensor *t = &c->m.tensors[i];
        const char *file = c->m.files[t->file].name;
        const struct st_file *f = c->files[t->file];
        const struct st_entry *entry = f ? st_find(f, t->key) : NULL;
        struct tensor listed = tensor_shape(t->dtype, t->rank, t->dim);
        shown(t->key, key, sizeof key);
        if (entry == NULL)
            return err_set(e, ST_CORRUPT, "%s lacks the tensor '%s'", file, key);
        if (entry->view.dtype != t->dtype || !tensor_same_shape(&entry->view, &listed))
            return err_set(e, ST_CORRUPT, "%s: tensor '%s' is %s, the manifest says %s", file, key,
                           tensor_text(&entry->view, have, sizeof have), tensor_text(&listed, said, sizeof said));
        c->entries[i] = entry;
    }
    return ST_OK;
}

static int open_folder(struct ckpt *c, unsigned flags, struct err *e)
{
    TRY(folder_manifest(c->path, &c->m, e));
    if (!(flags & CKPT_NO_CHECKSUM))
        TRY(folder_checksums(c->path, &c->m, e));
    TRY(mem_array((void **)&c->files, (size_t)c->m.n_files, sizeof(struct st_file *), e));
    TRY(mem_array((void **)&c->entries, (size_t)c->m.n_tensors, sizeof(struct st_entry *), e));
    for (int i = 0; i < c->m.n_files; i++)
        TRY(open_file(c, i, e));
    return match_tensors(c, e);
}

int ckpt_open_with(struct ckpt **out, const char *path, unsigned flags, struct err *e)
{
    struct ckpt *c = NULL;
    struct err inner = {0};
    int st;
    *out = NULL;
    TRY(mem_array((void **)&c, 1, sizeof *c, e));
    arena_init(&c->m.memory);
    TRY_OUT(resolve(path, &c->path, e));
    st = open_folder(c, flags, &inner);
    if (st != ST_OK)
        st = damaged(c->path, st, &inner, e);
out:
    if (st != ST_OK)
        ckpt_close(c);
    else
        *out = c;
    return st;
}

/* Opens list[i] with every check, or says in why what is wrong with it. */
static int try_folder(struct ckpt **out, const struct folder *f, struct err *why)
{
    struct ckpt *c = NULL;
    *out = NULL;
    TRY(mem_array((void **)&c, 1, sizeof *c, why));
    arena_init(&c->m.memory);
    c->path = strdup(f->path);
    int st = c->path ? open_folder(c, 0, why) : err_set(why, ST_NOMEM, "out of memory");
    if (st == ST_OK && c->m.step != f->step)
        st = err_set(why, ST_CORRUPT, "its manifest is of step %lld", (long long)c->m.step);
    if (st != ST_OK)
        ckpt_close(c);
    else
        *out = c;
    return st;
}

static int no_such_step(const struct folder *list, int n, const char *run_dir, int64_t step, struct err *e)
{
    struct buf have;
    buf_init(&have, 400);
    for (int i = 0; i < n; i++)
        if (list[i].kind == FOLDER_FINAL)
            buf_addf(&have, "%s%lld", have.len > 0 ? ", " : "", (long long)list[i].step);
    err_set(e, ST_USAGE, "run.load_step=%lld, but %s holds no checkpoint of that step", (long long)step, run_dir);
    if (have.len > 0)
        err_hint(e, "it holds steps %s", have.text);
    buf_release(&have);
    return ST_USAGE;
}

static int open_first_intact(struct ckpt **out, const struct folder *list, int n, const char *run_dir, int64_t step,
                             struct buf *damage, struct err *e)
{
    struct err why = {0};
    char first[400] = "";
    int tried = 0;
    for (int i = 0; i < n; i++) {
        if (list[i].kind == FOLDER_TMP || (step >= 0 && list[i].step != step))
            continue;
        err_clear(&why);
        int st = try_folder(out, &list[i], &why);
        if (st == ST_OK)
            return ST_OK;
        if (st == ST_NOMEM) { /* not the checkpoint's fault: an older one would be a step back for nothing */
            *e = why;
            return err_in(e, "opening checkpoint %s", list[i].path);
        }
        if (tried++ == 0)
            snprintf(first, sizeof first, "%.60s: %.320s", path_tail(list[i].path), why.msg);
        if (damage != NULL)
            buf_addf(damage, "checkpoint %s cannot be used: %s\n", list[i].path, why.msg);
    }
    if (tried == 0)
        return step >= 0 ? no_such_step(list, n, run_dir, step, e) : ST_OK;
    err_set(e, ST_CORRUPT, "none of the %d checkpoint%s in %s%s can be used; %s", tried, tried == 1 ? "" : "s", run_dir,
            step >= 0 ? " with the step of run.load_step" : "", first);
    return err_hint(e, "restore one from a copy, or start over with run.resume=never, which moves them aside");
}

int ckpt_open_intact(struct ckpt **out, const char *run_dir, int64_t step, struct buf *damage, struct err *e)
{
    struct folder *list = NULL;
    bool exists = false;
    int n = 0, st;
    *out = NULL;
    char *dir = path_join(run_dir, "checkpoints"); /* not there yet if the run stopped before its first one */
    if (dir == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    TRY_OUT(file_lookup(dir, &exists, e));
    if (exists)
        TRY_OUT(folder_scan(dir, &list, &n, e));
    st = open_first_intact(out, list, n, run_dir, step, damage, e);
out:
    folder_scan_free(list, n);
    free(dir);
    return st;
}

int ckpt_open(struct ckpt **out, const char *path, struct err *e) { return ckpt_open_with(out, path, 0, e); }

void ckpt_close(struct ckpt *c)
{
    if (c == NULL)
        return;
    for (int i = 0; c->files != NULL && i < c->m.n_files; i++)
        st_close(c->files[i]);
    free(c->files);
    free(c->entries);
    manifest_release(&c->m);
    free(c->config);
    free(c->path);
    free(c);
}

int ckpt_verify(const struct ckpt *c, struct err *e)
{
    struct err inner = {0};
    int st = folder_checksums(c->path, &c->m, &inner);
    return st == ST_OK ? ST_OK : damaged(c->path, st, &inner, e);
}

/* ---- contents -------------------------------------------------------------------------------- */

const char *ckpt_path(const struct ckpt *c) { return c->path; }
const char *ckpt_config_text(const struct ckpt *c) { return c->config ? c->config : ""; }
int64_t ckpt_step(const struct ckpt *c) { return c->m.step; }
const struct ckpt_counters *ckpt_counters(const struct ckpt *c) { return &c->m.counters; }
int ckpt_count(const struct ckpt *c) { return c->m.n_tensors; }

int ckpt_data_count(const struct ckpt *c) { return c->m.n_data; }
struct ckpt_data ckpt_data_at(const struct ckpt *c, int i) { return c->m.data[i]; }

const struct st_entry *ckpt_entry(const struct ckpt *c, const char *key, int section)
{
    const struct manifest_tensor *t = manifest_find(&c->m, key, section);
    return t != NULL ? c->entries[t - c->m.tensors] : NULL;
}

bool ckpt_train_number(const struct ckpt *c, const char *name, double *out)
{
    for (int i = 0; i < c->m.n_train; i++)
        if (strcmp(c->m.train[i].name, name) == 0) {
            *out = c->m.train[i].value;
            return true;
        }
    return false;
}

bool ckpt_has(const struct ckpt *c, const char *key, enum ckpt_section section)
{
    return manifest_find(&c->m, key, (int)section) != NULL;
}

struct ckpt_tensor ckpt_at(const struct ckpt *c, int i)
{
    const struct manifest_tensor *t = &c->m.tensors[i];
    return (struct ckpt_tensor){.key = t->key,
                                .section = (enum ckpt_section)t->section,
                                .file = c->m.files[t->file].name,
                                .view = c->entries[i]->view};
}

static int no_such_key(const struct ckpt *c, const char *key, int section, struct err *e)
{
    char text[NAME_TEXT];
    const char **names = NULL, *near = NULL;
    int n = 0, st = err_set(e, ST_INVALID, "checkpoint %s has no %s tensor '%s'", c->path,
                            ckpt_section_name((enum ckpt_section)section), key);
    if (mem_array((void **)&names, (size_t)c->m.n_tensors, sizeof *names, NULL) == ST_OK) {
        for (int i = 0; i < c->m.n_tensors; i++)
            if (c->m.tensors[i].section == section)
                names[n++] = c->m.tensors[i].key;
        near = nearest_name(key, names, n);
    }
    if (near != NULL)
        err_hint(e, "the nearest is '%s'; was it saved with another configuration?", shown(near, text, sizeof text));
    else
        err_hint(e, "it was saved with another configuration; `braid ckpt ls` lists its tensors");
    free(names);
    return st;
}

int ckpt_load(const struct ckpt *c, const char *key, enum ckpt_section section, const struct tensor *dst,
              const struct param *param, struct err *e)
{
    char have[128], want[128];
    const struct manifest_tensor *t = manifest_find(&c->m, key, (int)section);
    if (t == NULL)
        return no_such_key(c, key, (int)section, e);
    const struct tensor *src = &c->entries[t - c->m.tensors]->view;
    tensor_text(src, have, sizeof have);
    tensor_text(dst, want, sizeof want);
    if (!tensor_same_shape(src, dst)) {
        int st = err_set(e, ST_CONFLICT, "%s is %s in checkpoint %s but the model needs %s", key, have, c->path, want);
        err_hint(e, "the model configuration differs from the checkpoint's config.ini");
        return st;
    }
    if (!tensor_is_dense(dst) || (dst->data == NULL && tensor_elems(dst) > 0))
        return err_set(e, ST_INVALID, "%s: the destination is not a dense host tensor", key);
    if (!dtype_converts(dst->dtype, src->dtype))
        return err_set(e, ST_UNSUPPORTED, "%s: cannot convert %s to %s", key, have, want);
    TRY(check_rows(param, dst, key, e));
    int st = copy_rows_from_disk(dst, src, param, e);
    if (st != ST_OK)
        err_in(e, "loading %s from %s", key, c->path);
    return st;
}

/* ---- listing --------------------------------------------------------------------------------- */

static void describe(struct ckpt_info *info, struct folder *f)
{
    struct manifest m;
    struct err e = {0};
    *info = (struct ckpt_info){.path = f->path, .step = f->step};
    f->path = NULL; /* moved */
    if (folder_manifest(info->path, &m, &e) != ST_OK) {
        snprintf(info->why, sizeof info->why, "%.255s", e.msg);
        return;
    }
    info->complete = m.step == info->step;
    if (!info->complete)
        snprintf(info->why, sizeof info->why, "its manifest is of step %lld", (long long)m.step);
    info->counters = m.counters;
    info->n_tensors = m.n_tensors;
    for (int i = 0; i < m.n_files; i++)
        info->bytes += m.files[i].sum.bytes;
    manifest_release(&m);
}

int ckpt_list(const char *run_dir, struct ckpt_info **out, int *n, struct err *e)
{
    struct folder *list = NULL;
    int found = 0, st = ST_OK;
    *out = NULL;
    *n = 0;
    char *inside = path_join(run_dir, "checkpoints");
    if (inside == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    if (file_is_dir(inside))
        st = folder_scan(inside, &list, &found, e);
    else if (file_is_dir(run_dir) && !has_step_folders(run_dir))
        st = foreign(run_dir, e);
    else
        st = folder_scan(run_dir, &list, &found, e);
    free(inside);
    if (st == ST_OK)
        st = mem_array((void **)out, (size_t)found, sizeof **out, e);
    for (int i = found - 1; st == ST_OK && i >= 0; i--)
        if (list[i].kind != FOLDER_TMP)
            describe(&(*out)[(*n)++], &list[i]);
    folder_scan_free(list, found);
    return st;
}

void ckpt_list_free(struct ckpt_info *list, int n)
{
    for (int i = 0; i < n; i++)
        free(list[i].path);
    free(list);
}
