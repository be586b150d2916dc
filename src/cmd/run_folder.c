/* What may be a run folder, and the options of a run whose checkpoints are gone. */
#include "cmd/cmd.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

static bool has(const char *dir, const char *name)
{
    char *path = path_join(dir, name);
    bool there = path != NULL && file_exists(path);
    free(path);
    return there;
}

/* Beside a run's own files, what a launcher or the user may put there before the first start. */
static bool harmless(const char *name)
{
    static const char *const ends[] = {".log", ".out", ".err", ".ini", ".lock", ".board", ".tmp"};
    for (int i = 0; i < countof(ends); i++)
        if (str_ends(name, ends[i]))
            return true;
    return name[0] == '.' || strcmp(name, "lock") == 0 || strcmp(name, "tb") == 0 || strcmp(name, "report.html") == 0 ||
           strcmp(name, "tokens") == 0; /* text that a run prepared which was refused then */
}

int cmd_check_run_folder(const struct config *c, struct err *e)
{
    static const char *const marks[] = {"config.ini", "metrics.jsonl", "checkpoints"};
    const char *dir = c->run.dir;
    char **names;
    int n, st = ST_OK;
    if (dir[0] == '\0' || !file_exists(dir))
        return ST_OK;
    if (!file_is_dir(dir)) {
        err_set(e, ST_USAGE, "run.dir: %s is a file, and a run is a folder", dir);
        return err_hint(e, "name a folder that does not exist yet, such as runs/a");
    }
    for (int i = 0; i < countof(marks); i++)
        if (has(dir, marks[i]))
            return ST_OK;
    TRY(file_list_dir(dir, &names, &n, e));
    for (int i = 0; i < n && st == ST_OK; i++)
        if (!harmless(names[i])) {
            st = err_set(
                e, ST_USAGE,
                "run.dir: %s is not a run: it holds %.80s and neither config.ini nor metrics.jsonl nor checkpoints",
                dir, names[i]);
            err_hint(e, "name an empty folder, or one that does not exist yet, such as runs/a");
        }
    file_free_list(names, n);
    return st;
}

/* The folder's real path; of one that does not exist yet, its nearest parent that does, followed by the rest. */
static bool real_path(const char *path, char out[PATH_MAX])
{
    char head[PATH_MAX], real[PATH_MAX];
    if (snprintf(head, sizeof head, "%s", path) >= (int)sizeof head)
        return false;
    for (;;) {
        const char *rest = path + strlen(head);
        if (realpath(head[0] ? head : path[0] == '/' ? "/" : ".", real) != NULL)
            return snprintf(out, PATH_MAX, "%s%s%s", real, rest[0] && rest[0] != '/' ? "/" : "", rest) < PATH_MAX;
        char *slash = strrchr(head, '/');
        if (head[0] == '\0')
            return false;
        *(slash != NULL ? slash : head) = '\0';
    }
}

static bool lies_in(const char *inner, const char *outer)
{
    size_t n = strlen(outer);
    return strncmp(inner, outer, n) == 0 && (inner[n] == '/' || inner[n] == '\0' || (n > 0 && outer[n - 1] == '/'));
}

int cmd_check_run_in_data(const struct config *c, struct err *e)
{
    const char *const lists[] = {c->data.train, c->data.valid};
    char run[PATH_MAX], data[PATH_MAX], word[PATH_MAX];
    if (c->run.dir[0] == '\0' || !real_path(c->run.dir, run))
        return ST_OK;
    for (int i = 0; i < countof(lists); i++)
        for (const char *p = lists[i]; *p != '\0';) {
            p += strspn(p, " ");
            size_t n = strcspn(p, " ");
            snprintf(word, sizeof word, "%.*s", (int)min_i64((int64_t)n, PATH_MAX - 1), p);
            p += n;
            if (n == 0 || !file_is_dir(word) || !real_path(word, data) || !lies_in(run, data))
                continue;
            err_set(e, ST_USAGE, "run.dir = %s lies in the data folder %s: what the run writes would become data",
                    c->run.dir, word);
            return err_hint(e, "name a run folder elsewhere, such as runs/a");
        }
    return ST_OK;
}

int cmd_options_of_run(struct config *c, const struct config_args *args, bool is_rank0, struct err *e)
{
    char *path = path_join(c->run.dir, "config.ini"), *text = NULL;
    size_t n = 0;
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    bool wanted =
        c->run.dir[0] != '\0' && args->ini == NULL && c->run.resume == CFG_RESUME_AUTO && c->run.load[0] == '\0';
    if (!wanted || !file_exists(path)) {
        free(path);
        return ST_OK;
    }
    struct buf changes;
    buf_init(&changes, 0);
    int st = file_read(path, 1 << 20, &text, &n, e);
    if (st == ST_OK)
        st = config_load_saved(c, text, n, path, CFG_SAVED_ALL, &changes, e);
    if (st == ST_CONFLICT) { /* another model than the one that is gone */
        if (is_rank0)
            fprintf(stderr,
                    "note: %s has no checkpoint, and its config.ini is of another model: a new run with the options "
                    "given\n",
                    c->run.dir);
        err_clear(e);
        st = ST_OK;
    } else if (st == ST_OK && is_rank0) {
        fprintf(stderr, "%s has no checkpoint: a new run with the options of %s\n%s", c->run.dir, path,
                changes.text ? changes.text : "");
    }
    buf_release(&changes);
    free(text);
    free(path);
    return st;
}
