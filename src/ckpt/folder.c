/* Checkpoint folders: their names, the scan for complete ones, and the checks of one folder. What
 * counts is what lies on disk; the `latest` file is only written for people. */
#include "ckpt/ckpt_int.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

const char *path_tail(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static const char *const suffixes[] = {[FOLDER_FINAL] = "", [FOLDER_OLD] = ".old-", [FOLDER_TMP] = ".tmp-"};

static void make_name(char *out, size_t size, int64_t step, enum folder_kind kind, uint64_t id)
{
    if (kind == FOLDER_FINAL)
        snprintf(out, size, "step-%08lld", (long long)step);
    else
        snprintf(out, size, "step-%08lld%s%016llx", (long long)step, suffixes[kind], (unsigned long long)id);
}

bool folder_parse_name(const char *name, struct folder *f)
{
    char again[96], *end;
    size_t digits = 0;
    *f = (struct folder){.kind = FOLDER_FINAL};
    if (!str_starts(name, "step-") || name[5] < '0' || name[5] > '9')
        return false;
    f->step = strtoll(name + 5, &end, 10);
    for (int k = FOLDER_OLD; k <= FOLDER_TMP; k++)
        if (str_starts(end, suffixes[k])) {
            f->kind = (enum folder_kind)k;
            const char *id = end + strlen(suffixes[k]);
            digits = strspn(id, "0123456789abcdef");
            if (digits < 1 || digits > 16)
                return false;
            f->id = strtoull(id, &end, 16);
        }
    /* The step written again must be the same: that refuses overflow, odd zeros and trailing text. */
    make_name(again, sizeof again, f->step, FOLDER_FINAL, 0);
    return *end == '\0' && strncmp(name, again, strlen(again)) == 0 &&
           strlen(name) == strlen(again) + strlen(suffixes[f->kind]) + digits;
}

char *folder_path(const char *dir, int64_t step, enum folder_kind kind, uint64_t id)
{
    char name[96];
    make_name(name, sizeof name, step, kind, id);
    return path_join(dir, name);
}

static int newest_first(const void *a, const void *b)
{
    const struct folder *x = a, *y = b;
    if (x->step != y->step)
        return x->step > y->step ? -1 : 1;
    if (x->kind != y->kind)
        return x->kind < y->kind ? -1 : 1;
    return strcmp(x->path, y->path);
}

/* A folder that cannot be looked at is a checkpoint that cannot be read, not one that is absent. */
static bool plainly_no_folder(const char *path)
{
    struct stat sb;
    return stat(path, &sb) == 0 && !S_ISDIR(sb.st_mode);
}

int folder_scan(const char *dir, struct folder **out, int *n, struct err *e)
{
    char **names = NULL;
    int n_names = 0;
    *out = NULL;
    *n = 0;
    TRY(file_list_dir(dir, &names, &n_names, e));
    struct folder *list = NULL;
    int st = mem_array((void **)&list, (size_t)n_names, sizeof *list, e);
    for (int i = 0; st == ST_OK && i < n_names; i++) {
        if (!folder_parse_name(names[i], &list[*n]))
            continue;
        list[*n].path = path_join(dir, names[i]);
        if (list[*n].path == NULL)
            st = err_set(e, ST_NOMEM, "out of memory listing %s", dir);
        else if (!plainly_no_folder(list[*n].path))
            ++*n;
        else
            free(list[*n].path);
    }
    file_free_list(names, n_names);
    if (st != ST_OK) {
        folder_scan_free(list, *n);
        *n = 0;
        return st;
    }
    qsort(list, (size_t)*n, sizeof *list, newest_first);
    *out = list;
    return ST_OK;
}

void folder_scan_free(struct folder *list, int n)
{
    for (int i = 0; i < n; i++)
        free(list[i].path);
    free(list);
}

static int check_file(const char *folder, const struct manifest_file *f, struct err *e)
{
    struct stat sb;
    char *path = path_join(folder, f->name);
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = ST_OK;
    if (stat(path, &sb) != 0)
        st = errno == ENOENT ? err_set(e, ST_CORRUPT, "%s is missing", f->name)
                             : err_errno(e, "cannot look at %s", f->name);
    else if (!S_ISREG(sb.st_mode))
        st = err_set(e, ST_CORRUPT, "%s is not a regular file", f->name);
    else if (sb.st_size != f->sum.bytes)
        st = err_set(e, ST_CORRUPT, "%s has %lld bytes, the manifest says %lld", f->name, (long long)sb.st_size,
                     (long long)f->sum.bytes);
    free(path);
    return st;
}

int folder_manifest(const char *path, struct manifest *m, struct err *e)
{
    char *file = path_join(path, MANIFEST_NAME), *text = NULL;
    size_t n;
    struct stat sb;
    int st;
    *m = (struct manifest){0};
    arena_init(&m->memory);
    if (file == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    if (stat(file, &sb) != 0)
        st = errno == ENOENT ? err_set(e, ST_CORRUPT, MANIFEST_NAME " is missing")
                             : err_errno(e, "cannot look at " MANIFEST_NAME);
    else if (!S_ISREG(sb.st_mode))
        st = err_set(e, ST_CORRUPT, MANIFEST_NAME " is not a regular file");
    else
        st = file_read(file, MANIFEST_MAX_BYTES, &text, &n, e);
    if (st == ST_OK) {
        char why[512];
        struct err inner = {0};
        st = manifest_parse(m, text, n, true, &inner);
        snprintf(why, sizeof why, "%.500s", inner.msg);
        if (st != ST_OK)
            err_set(e, (enum status)st, MANIFEST_NAME ": %s", why);
    }
    free(text);
    free(file);
    for (int i = 0; st == ST_OK && i < m->n_files; i++)
        st = check_file(path, &m->files[i], e);
    if (st != ST_OK)
        manifest_release(m);
    return st;
}

int folder_checksums(const char *path, const struct manifest *m, struct err *e)
{
    for (int i = 0; i < m->n_files; i++) {
        const struct manifest_file *f = &m->files[i];
        struct file_sum is;
        char *file = path_join(path, f->name);
        if (file == NULL)
            return err_set(e, ST_NOMEM, "out of memory");
        int st = file_checksum(file, &is, e);
        free(file);
        if (st != ST_OK)
            return st;
        if (is.bytes != f->sum.bytes || is.xxh3 != f->sum.xxh3)
            return err_set(e, ST_CORRUPT, "%s: checksum %016llx of %lld bytes, the manifest says %016llx of %lld",
                           f->name, (unsigned long long)is.xxh3, (long long)is.bytes, (unsigned long long)f->sum.xxh3,
                           (long long)f->sum.bytes);
    }
    return ST_OK;
}

bool folder_complete(const struct folder *f)
{
    struct manifest m;
    if (f->kind == FOLDER_TMP || folder_manifest(f->path, &m, NULL) != ST_OK)
        return false;
    bool same = m.step == f->step; /* else someone renamed it, and its place in time is unknown */
    manifest_release(&m);
    return same;
}
