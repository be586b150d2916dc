/* Power cuts: a command is recorded once (record.c); then, at random moments of the record, disks are made as a power
 * cut may leave them, and the next run on each must bring the result.
 *
 * What the system promises is what was synced, and nothing else. Of a file: its bytes at its last fsync; every later
 * write may be there, partly there, or not, in any order, and a hole reads as zeros. Of a folder: its names at its last
 * fsync; each later change of a name may have reached the disk or not, in any order. A rename is one change.
 *
 *   powercut BRAID RECORD.so ROOT [--states=N] [--seed=N] [--only=NAME:STATE] [--no-syncs]
 *
 * With --no-syncs every sync of the record is left out, as if the program had forgotten them: then it must find
 * something.
 *
 * The last line is "N passed, N failed", a command being one. */
#include "record.h"
#include "scenarios.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_FDS = 1024, MOST_INODES = 4096, MOST_PENDING = 8192 };

/* ---- the model of a disk --------------------------------------------------------------------- */

struct bytes {
    char *data;
    size_t n, cap;
};
struct change { /* of a file: a write or a cut; of a folder: a name that is set or, with inode -1, removed */
    int64_t at;
    const char *data;
    size_t n;
    bool cut;
    char *name, *removed; /* a rename within a folder sets one name and removes another */
    int inode;
};
struct entry {
    char *name;
    int inode;
};
struct inode {
    bool folder;
    struct bytes synced; /* of a file */
    struct entry *names; /* of a folder, as synced */
    int n_names;
    size_t cap_names;
    struct change *pending;
    int n_pending;
    size_t cap_pending;
    struct entry *now; /* names as the program sees them */
    int n_now;
    size_t cap_now;
};
struct disk {
    struct inode *inodes;
    int n;
    int fds[MOST_FDS]; /* inode + 1; 0: not one of ours */
};

static void fatal(const char *what)
{
    printf("powercut: %s\n0 passed, 1 failed\n", what);
    exit(1);
}

static void grow(void **array, size_t *cap, size_t need, size_t size)
{
    if (mem_grow(array, cap, need, size, NULL) != ST_OK)
        fatal("out of memory");
}

static int new_inode(struct disk *d, bool folder)
{
    if (d->n == MOST_INODES)
        fatal("too many files");
    d->inodes[d->n] = (struct inode){.folder = folder};
    return d->n++;
}

static char *copy(const char *s)
{
    char *c = strdup(s);
    if (c == NULL)
        fatal("out of memory");
    return c;
}

static int find_name(const struct entry *e, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (strcmp(e[i].name, name) == 0)
            return i;
    return -1;
}

static void set_name(struct entry **e, int *n, size_t *cap, const char *name, int inode)
{
    int i = find_name(*e, *n, name);
    if (i >= 0 && inode >= 0) {
        (*e)[i].inode = inode;
    } else if (i >= 0) {
        free((*e)[i].name);
        (*e)[i] = (*e)[--*n];
    } else if (inode >= 0) {
        grow((void **)e, cap, (size_t)*n + 1, sizeof **e);
        (*e)[(*n)++] = (struct entry){copy(name), inode};
    }
}

/* The folder that holds a path, and its last part; -1: not below the root. */
static int parent_of(const struct disk *d, const char *path, const char **last)
{
    int at = 0;
    char part[256];
    while (path[0] == '.' && path[1] == '/')
        path += 2;
    if (path[0] == '/')
        return -1;
    for (;;) {
        const char *slash = strchr(path, '/');
        if (slash == NULL) {
            *last = path;
            return at;
        }
        snprintf(part, sizeof part, "%.*s", (int)(slash - path), path);
        const struct inode *f = &d->inodes[at];
        int i = find_name(f->now, f->n_now, part);
        if (i < 0)
            return -1;
        at = f->now[i].inode;
        path = slash + 1;
    }
}

static int lookup(const struct disk *d, const char *path)
{
    const char *last;
    if (strcmp(path, ".") == 0)
        return 0;
    int folder = parent_of(d, path, &last);
    if (folder < 0)
        return -1;
    int i = find_name(d->inodes[folder].now, d->inodes[folder].n_now, last);
    return i >= 0 ? d->inodes[folder].now[i].inode : -1;
}

static struct change *add_change(struct inode *f, struct change c)
{
    grow((void **)&f->pending, &f->cap_pending, (size_t)f->n_pending + 1, sizeof *f->pending);
    f->pending[f->n_pending] = c;
    return &f->pending[f->n_pending++];
}

static void change_name(struct disk *d, int folder, const char *name, int inode, const char *removed)
{
    struct inode *f = &d->inodes[folder];
    add_change(f, (struct change){.name = copy(name), .inode = inode, .removed = removed ? copy(removed) : NULL});
    set_name(&f->now, &f->n_now, &f->cap_now, name, inode);
    if (removed != NULL)
        set_name(&f->now, &f->n_now, &f->cap_now, removed, -1);
}

static void apply_name(struct entry **e, int *n, size_t *cap, const struct change *c)
{
    set_name(e, n, cap, c->name, c->inode);
    if (c->removed != NULL)
        set_name(e, n, cap, c->removed, -1);
}

static void apply_bytes(struct bytes *b, const struct change *c, size_t keep)
{
    size_t end = c->cut ? (size_t)c->at : (size_t)c->at + keep, was = b->n;
    grow((void **)&b->data, &b->cap, end, 1);
    if (end > was)
        memset(b->data + was, 0, end - was);
    if (c->cut || end > b->n)
        b->n = end;
    if (!c->cut && keep > 0)
        memcpy(b->data + c->at, c->data, keep);
}

static void forget_pending(struct inode *f)
{
    for (int i = 0; i < f->n_pending; i++) {
        free(f->pending[i].name);
        free(f->pending[i].removed);
    }
    f->n_pending = 0;
}

static void sync_inode(struct inode *f)
{
    for (int i = 0; i < f->n_pending; i++) {
        if (f->folder)
            apply_name(&f->names, &f->n_names, &f->cap_names, &f->pending[i]);
        else
            apply_bytes(&f->synced, &f->pending[i], f->pending[i].n);
    }
    forget_pending(f);
}

static void disk_release(struct disk *d)
{
    for (int i = 0; i < d->n; i++) {
        struct inode *f = &d->inodes[i];
        forget_pending(f);
        for (int k = 0; k < f->n_names; k++)
            free(f->names[k].name);
        for (int k = 0; k < f->n_now; k++)
            free(f->now[k].name);
        free(f->pending);
        free(f->names);
        free(f->now);
        free(f->synced.data);
    }
    free(d->inodes);
}

/* ---- replaying ------------------------------------------------------------------------------- */

static void do_open(struct disk *d, const struct record *r, const char *path)
{
    const char *last = NULL;
    int folder = strcmp(path, ".") == 0 ? 0 : parent_of(d, path, &last), inode = lookup(d, path);
    if (r->fd < 0 || r->fd >= MOST_FDS)
        return;
    d->fds[r->fd] = 0;
    if (folder < 0)
        return;
    if (inode < 0) { /* made by this call */
        inode = new_inode(d, false);
        change_name(d, folder, last, inode, NULL);
    } else if (r->at == 1) {
        add_change(&d->inodes[inode], (struct change){.cut = true});
    }
    d->fds[r->fd] = inode + 1;
}

static void do_rename(struct disk *d, const char *from, const char *to, bool link)
{
    const char *a, *b;
    int inode = lookup(d, from), x = parent_of(d, from, &a), y = parent_of(d, to, &b);
    if (inode < 0 || x < 0 || y < 0)
        return;
    change_name(d, y, b, inode, x == y && !link ? a : NULL);
    if (x != y && !link)
        change_name(d, x, a, -1, NULL);
}

static void do_record(struct disk *d, const struct record *r, const char *a, const char *b)
{
    const char *last;
    int folder, inode = r->fd >= 0 && r->fd < MOST_FDS ? d->fds[r->fd] - 1 : -1;
    char path[4096], to[4096];
    snprintf(path, sizeof path, "%.*s", (int)r->n_a, a);
    switch ((enum record_op)r->op) {
    case REC_OPEN: do_open(d, r, path); break;
    case REC_CLOSE:
        if (r->fd >= 0 && r->fd < MOST_FDS)
            d->fds[r->fd] = 0;
        break;
    case REC_WRITE:
        if (inode >= 0)
            add_change(&d->inodes[inode], (struct change){.at = r->at, .data = b, .n = (size_t)r->n_b});
        break;
    case REC_TRUNCATE:
        if (inode >= 0)
            add_change(&d->inodes[inode], (struct change){.at = r->at, .cut = true});
        break;
    case REC_SYNC:
        if (inode >= 0)
            sync_inode(&d->inodes[inode]);
        break;
    case REC_RENAME:
    case REC_LINK:
        snprintf(to, sizeof to, "%.*s", (int)r->n_b, b);
        do_rename(d, path, to, r->op == REC_LINK);
        break;
    case REC_MKDIR:
        folder = parent_of(d, path, &last);
        if (folder >= 0)
            change_name(d, folder, last, new_inode(d, true), NULL);
        break;
    case REC_REMOVE:
        folder = parent_of(d, path, &last);
        if (folder >= 0)
            change_name(d, folder, last, -1, NULL);
        break;
    }
}

/* The disk after `upto` records of the log; returns how many there are in all. */
static long replay(struct disk *d, const char *log, size_t size, long upto, bool no_syncs)
{
    long n = 0;
    for (size_t at = 0; at + sizeof(struct record) <= size; n++) {
        struct record r;
        memcpy(&r, log + at, sizeof r);
        const char *a = log + at + sizeof r, *b = a + r.n_a;
        at += sizeof r + r.n_a + (size_t)r.n_b;
        if (n < upto && !(no_syncs && r.op == REC_SYNC))
            do_record(d, &r, a, b);
    }
    return n;
}

/* What was there before the command ran, all of it synced. */
static void load_tree(struct disk *d, int inode, const char *path)
{
    char **names, child[4096];
    int n;
    if (file_list_dir(path, &names, &n, NULL) != ST_OK)
        fatal("cannot list the folder that a command starts from");
    for (int i = 0; i < n; i++) {
        snprintf(child, sizeof child, "%s/%s", path, names[i]);
        int k = new_inode(d, file_is_dir(child));
        struct inode *f = &d->inodes[k];
        change_name(d, inode, names[i], k, NULL);
        if (f->folder)
            load_tree(d, k, child);
        else if (file_read(child, (size_t)1 << 30, &f->synced.data, &f->synced.n, NULL) != ST_OK)
            fatal("cannot read a file that a command starts from");
        f->synced.cap = f->synced.n;
    }
    file_free_list(names, n);
    sync_inode(&d->inodes[inode]);
}

/* ---- what a power cut leaves ----------------------------------------------------------------- */

struct dice {
    uint64_t key, n;
};
static uint64_t roll(struct dice *x, uint64_t sides) { return rng_below(x->key, x->n++, sides); }

/* Which of n changes reached the disk: none, all, the first ones, or any. */
static void choose(struct dice *x, bool *kept, int n)
{
    uint64_t how = roll(x, 4), first = n > 0 ? roll(x, (uint64_t)n + 1) : 0;
    for (int i = 0; i < n; i++)
        kept[i] = how == 0 ? false : how == 1 ? true : how == 2 ? (uint64_t)i < first : roll(x, 2) == 0;
}

static void write_file(const struct inode *f, const char *path, struct dice *x)
{
    struct bytes b = {0};
    bool kept[MOST_PENDING];
    if (f->n_pending > MOST_PENDING)
        fatal("too many writes without a sync");
    apply_bytes(&b, &(struct change){.at = 0, .data = f->synced.data}, 0);
    if (f->synced.n > 0)
        apply_bytes(&b, &(struct change){.at = 0, .data = f->synced.data}, f->synced.n);
    choose(x, kept, f->n_pending);
    for (int i = 0; i < f->n_pending; i++) {
        const struct change *c = &f->pending[i];
        bool torn = kept[i] && !c->cut && c->n > 1 && roll(x, 8) == 0;
        if (kept[i])
            apply_bytes(&b, c, torn ? (size_t)roll(x, c->n) : c->n);
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0 || file_write_fd(fd, b.data, b.n, path, NULL) != ST_OK || close(fd) != 0)
        fatal("cannot write the state of a disk");
    free(b.data);
}

static void write_folder(const struct disk *d, int inode, const char *path, struct dice *x)
{
    const struct inode *f = &d->inodes[inode];
    struct entry *names = NULL;
    int n = 0;
    size_t cap = 0;
    bool kept[MOST_PENDING];
    char child[4096];
    if (f->n_pending > MOST_PENDING)
        fatal("too many names without a sync");
    for (int i = 0; i < f->n_names; i++)
        set_name(&names, &n, &cap, f->names[i].name, f->names[i].inode);
    choose(x, kept, f->n_pending);
    for (int i = 0; i < f->n_pending; i++)
        if (kept[i])
            apply_name(&names, &n, &cap, &f->pending[i]);
    for (int i = 0; i < n; i++) {
        snprintf(child, sizeof child, "%s/%s", path, names[i].name);
        if (!d->inodes[names[i].inode].folder)
            write_file(&d->inodes[names[i].inode], child, x);
        else if (mkdir(child, 0777) != 0)
            fatal("cannot make the state of a disk");
        else
            write_folder(d, names[i].inode, child, x);
        free(names[i].name);
    }
    free(names);
}

/* The newest checkpoint whose name was synced: the next run may not go back behind it. */
static long promised_step(const struct disk *d)
{
    int folder = lookup(d, "run/checkpoints");
    long newest = -1;
    for (int i = 0; folder >= 0 && i < d->inodes[folder].n_names; i++) {
        const char *name = d->inodes[folder].names[i].name;
        if (str_starts(name, "step-") && strchr(name, '.') == NULL)
            newest = max_i64(newest, atol(name + 5));
    }
    return newest;
}

/* ---- judging --------------------------------------------------------------------------------- */

struct powercut {
    struct place place;
    const char *record, *only;
    char work[512];
    long states;
    uint64_t seed;
    bool no_syncs;
};

static long continued_at(const char *dir)
{
    char path[4096], *text;
    size_t n;
    snprintf(path, sizeof path, "%s.err-again", dir);
    if (file_read(path, 1 << 20, &text, &n, NULL) != ST_OK)
        return -1;
    const char *at = strstr(text, " at step ");
    long step = strstr(text, "continuing ") && at ? atol(at + 9) : -1;
    free(text);
    return step;
}

static bool survives(const struct powercut *p, const struct scenario *s, const char *dir, long promised, char *why,
                     size_t size)
{
    char what[1024];
    if (!files_fit(&p->place, s, dir)) {
        snprintf(why, size, "an old file stands beside a new one");
        return false;
    }
    if (!s->again && same_results(&p->place, s, dir, "again", what, sizeof what))
        return true;
    int status = run_scenario(&p->place, s, dir, NULL, true, "again");
    long step = continued_at(dir);
    if (status != 0)
        snprintf(why, size, "the next run fails (status %d)", status);
    else if (!same_results(&p->place, s, dir, "again", what, sizeof what))
        snprintf(why, size, "after the next run: %s", what);
    else if (s->again && step < promised && promised >= 0 && step >= 0)
        snprintf(why, size, "it continues at step %ld although step %ld was saved", step, promised);
    else if (s->again && step < 0 && promised >= 0 && promised < 6)
        snprintf(why, size, "it begins anew although step %ld was saved", promised);
    else if (said(dir, "again", "cannot be used"))
        snprintf(why, size, "the next run finds a damaged checkpoint");
    else if (has_leftovers(dir, what, sizeof what))
        snprintf(why, size, "the next run leaves %s", what);
    else
        return true;
    return false;
}

static bool one_state(const struct powercut *p, const struct scenario *s, const char *log, size_t size, long state,
                      long total)
{
    char dir[600], why[2048] = "", start[4096];
    struct disk d = {0};
    if (mem_array((void **)&d.inodes, MOST_INODES, sizeof *d.inodes, NULL) != ST_OK)
        fatal("out of memory");
    snprintf(dir, sizeof dir, "%s/state", p->work);
    new_inode(&d, true);
    if (s->start != NULL) {
        int run = new_inode(&d, true);
        change_name(&d, 0, "run", run, NULL);
        sync_inode(&d.inodes[0]);
        snprintf(start, sizeof start, "%s/%s", p->place.base, s->start);
        load_tree(&d, run, start);
    }
    struct dice x = {.key = rng_key(p->seed, s->name) + (uint64_t)state};
    long at = (long)roll(&x, (uint64_t)total + 1);
    replay(&d, log, size, at, p->no_syncs);
    if (file_remove_tree(dir, NULL) != ST_OK || mkdir(dir, 0777) != 0)
        fatal("cannot make a folder");
    write_folder(&d, 0, dir, &x);
    long promised = promised_step(&d);
    disk_release(&d);
    if (survives(p, s, dir, promised, why, sizeof why))
        return true;
    printf("not ok power cut %s:%ld, after %ld of %ld calls: %s\n", s->name, state, at, total, why);
    print_tail(dir, "again");
    return false;
}

static bool one_command(const struct powercut *p, const struct scenario *s, long states)
{
    char dir[600], path[700], env_log[800], env_preload[4096], *log;
    size_t size;
    snprintf(dir, sizeof dir, "%s/recorded", p->work);
    snprintf(path, sizeof path, "%s/%s.log", p->work, s->name);
    snprintf(env_log, sizeof env_log, "RECORD_LOG=%s", path);
    snprintf(env_preload, sizeof env_preload, "LD_PRELOAD=%s", p->record);
    const char *env[] = {env_log, env_preload, NULL};
    if (run_scenario(&p->place, s, dir, env, false, "record") != 0 ||
        file_read(path, (size_t)1 << 30, &log, &size, NULL) != ST_OK) {
        printf("power cut: '%s' cannot be recorded\n", s->name);
        print_tail(dir, "record");
        return false;
    }
    struct disk none = {0};
    long total = replay(&none, log, size, 0, false), bad = 0;
    for (long i = 0; i < states; i++) {
        char name[128];
        snprintf(name, sizeof name, "%s:%ld", s->name, i);
        if (p->only == NULL || strcmp(p->only, name) == 0)
            bad += !one_state(p, s, log, size, i, total);
    }
    printf("%-10s %ld calls recorded, %ld states of the disk, %ld findings\n", s->name, total, states, bad);
    fflush(stdout);
    free(log);
    return bad == 0 && total > 0;
}

int main(int argc, char **argv)
{
    struct powercut p = {.states = 400, .seed = 1};
    char base[600];
    if (argc < 4) {
        fprintf(stderr, "usage: powercut BRAID RECORD.so ROOT [--states=N] [--seed=N] [--only=NAME:STATE]\n");
        return 2;
    }
    snprintf(p.work, sizeof p.work, "%s/braid-powercut-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    if (mkdtemp(p.work) == NULL)
        return 2;
    snprintf(base, sizeof base, "%s/base", p.work);
    p.place = (struct place){.braid = argv[1], .root = argv[3], .base = base};
    p.record = argv[2];
    for (int i = 4; i < argc; i++) {
        if (str_starts(argv[i], "--states="))
            p.states = atol(argv[i] + 9);
        if (str_starts(argv[i], "--seed="))
            p.seed = strtoull(argv[i] + 7, NULL, 10);
        if (str_starts(argv[i], "--only="))
            p.only = argv[i] + 7;
        p.no_syncs |= strcmp(argv[i], "--no-syncs") == 0;
    }
    int passed = 0, failed = 0, writers = 0;
    if (file_make_dirs(base, NULL) != ST_OK || !prepare_base(&p.place)) {
        printf("0 passed, 1 failed\n");
        return 1;
    }
    for (int i = 0; i < n_scenarios; i++)
        writers += scenarios[i].files[0] != NULL;
    for (int i = 0; i < n_scenarios; i++) {
        if (scenarios[i].files[0] == NULL)
            continue;
        bool ok = one_command(&p, &scenarios[i], ceil_div(p.states, writers));
        passed += ok;
        failed += !ok;
    }
    printf("%d passed, %d failed\n", passed, failed);
    file_remove_tree(p.work, NULL);
    return failed > 0;
}
