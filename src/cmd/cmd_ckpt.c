/* `braid ckpt`: list, verify and compare checkpoints, without a model or a GPU. Single safetensors
 * files, as `braid op` and `braid grads` write them, can be listed and compared too. */
#include "cmd/cmd.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

static const char usage[] =
    "usage: braid ckpt ls DIR        the checkpoints of a run, or the tensors of one checkpoint\n"
    "       braid ckpt verify DIR    read every byte and compare checksums: one checkpoint, or "
    "all\n"
    "                                of a run; exit 1 if one is damaged or incomplete\n"
    "       braid ckpt diff A B      compare tensors bit by bit; exit 1 if any differs\n"
    "       braid ckpt convert SRC DST --layout=flat|logical|stacked|indexed|grouped "
    "[--pattern=P]\n"
    "                                [--glu-interleave=N] [--from-interleave=N]\n"
    "                                the same values under other keys; see below\n"
    "       braid ckpt merge SRC DST  a run folder DST whose weights have SRC's LoRA adapters added\n"
    "\n"
    "DIR, A and B: a run folder (diff: its newest checkpoint), a checkpoint folder step-..., or "
    "for\n"
    "ls and diff also a .safetensors file. diff looks at tensors only, not at step or config.\n"
    "\n"
    "convert: SRC is what ls takes. DST, which must not exist, is a new run folder with one\n"
    "checkpoint, or a .safetensors file of the model alone. Layouts of layers: flat numbers each\n"
    "layer, logical numbers groups as a Transformer does, stacked has one key for all layers, or\n"
    "numbers groups where they are not all alike, and a Transformer's keys for prediction depths.\n"
    "Layouts of experts: indexed has one tensor for each, grouped one for all. Where the keys do\n"
    "not say how layers are grouped, the checkpoint's own pattern does, or --pattern.\n"
    "Rows of the experts' first matrix are all gate rows, then all up rows; --glu-interleave=N\n"
    "writes a file with alternating blocks of N, and notes that in its metadata. A file of another\n"
    "program does not say that it is interleaved: --from-interleave=N does.\n"
    "Training reads every layout by itself (run.load_weights); this is for other programs.\n";

/* ---- tensors of a checkpoint or of a file, in one form --------------------------------------- */

struct named { /* borrowed from the open file or checkpoint */
    const char *group, *key;
    struct tensor view;
};
struct source {
    struct ckpt *ckpt;
    struct st_file *file;
    struct named *list; /* sorted by group and key, numbers in keys by value */
    int n;
};

static int by_group_and_key(const void *a, const void *b)
{
    const struct named *x = a, *y = b;
    int order = strcmp(x->group, y->group);
    return order != 0 ? order : strverscmp(x->key, y->key);
}

static void source_close(struct source *s)
{
    free(s->list);
    ckpt_close(s->ckpt);
    st_close(s->file);
}

static int source_open(struct source *s, const char *path, unsigned flags, struct err *e)
{
    *s = (struct source){0};
    if (file_exists(path) && !file_is_dir(path))
        TRY(st_open(&s->file, path, e));
    else
        TRY(ckpt_open_with(&s->ckpt, path, flags, e));
    int n = s->file ? st_count(s->file) : ckpt_count(s->ckpt);
    int st = mem_array((void **)&s->list, (size_t)n, sizeof *s->list, e);
    if (st != ST_OK) {
        source_close(s);
        return st;
    }
    for (int i = 0; i < n; i++) {
        if (s->file != NULL) {
            const struct st_entry *entry = st_entry(s->file, i);
            s->list[i] = (struct named){"model", entry->name, entry->view};
        } else {
            struct ckpt_tensor t = ckpt_at(s->ckpt, i);
            s->list[i] = (struct named){ckpt_section_name(t.section), t.key, t.view};
        }
    }
    s->n = n;
    qsort(s->list, (size_t)n, sizeof *s->list, by_group_and_key);
    return ST_OK;
}

/* Keys come from a file: whatever could steer a terminal is replaced. */
static void print_key(const struct named *t)
{
    printf("%s  ", t->group);
    for (const unsigned char *p = (const unsigned char *)t->key; *p; p++)
        putchar(*p < 0x20 || *p == 0x7f ? '?' : *p);
}

/* ---- ls -------------------------------------------------------------------------------------- */

/* Everything but a folder with a manifest is no run, unless it cannot be looked at. */
static int look_for_run(const char *path, bool *run, struct err *e)
{
    char *manifest = path_join(path, "manifest.json");
    struct stat sb;
    bool one = false;
    int st = manifest != NULL ? file_lookup(manifest, &one, e) : err_set(e, ST_NOMEM, "out of memory");
    bool exists = st == ST_OK && stat(path, &sb) == 0;
    if (st == ST_OK && !exists && errno != ENOENT && errno != ENOTDIR)
        st = err_errno(e, "cannot look up %s", path);
    *run = exists && !one && S_ISDIR(sb.st_mode);
    free(manifest);
    return st;
}

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int ls_run(const char *path, struct err *e)
{
    struct ckpt_info *list;
    int n;
    TRY(ckpt_list(path, &list, &n, e));
    printf("%-16s %12s %14s %8s %11s  %s\n", "checkpoint", "samples", "tokens", "tensors", "size", "saved");
    for (int i = 0; i < n; i++) {
        const struct ckpt_info *c = &list[i];
        char size[32], when[64] = "";
        time_t saved = c->counters.saved_at > 0 && c->counters.saved_at < 1e12 ? (time_t)c->counters.saved_at : 0;
        struct tm tm;
        if (localtime_r(&saved, &tm) != NULL)
            strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", &tm);
        if (c->complete)
            printf("%-16s %12lld %14lld %8d %11s  %s\n", last_part(c->path), (long long)c->counters.samples,
                   (long long)c->counters.tokens, c->n_tensors, human_bytes((double)c->bytes, size, sizeof size), when);
        else
            printf("%-16s incomplete: %s\n", last_part(c->path), c->why);
    }
    printf("%d checkpoint%s\n", n, n == 1 ? "" : "s");
    ckpt_list_free(list, n);
    return ST_OK;
}

static int ls_tensors(const char *path, struct err *e)
{
    struct source s;
    char text[128], size[32];
    double bytes = 0, elems = 0;
    TRY(source_open(&s, path, CKPT_NO_CHECKSUM, e));
    for (int i = 0; i < s.n; i++) {
        print_key(&s.list[i]);
        printf("  %s\n", tensor_text(&s.list[i].view, text, sizeof text));
        bytes += (double)tensor_bytes(&s.list[i].view);
        elems += (double)tensor_elems(&s.list[i].view);
    }
    if (s.ckpt != NULL)
        printf("step %lld, ", (long long)ckpt_step(s.ckpt));
    printf("%d tensors, %.0f elements, %s\n", s.n, elems, human_bytes(bytes, size, sizeof size));
    source_close(&s);
    return ST_OK;
}

static int run_ls(char **args, struct err *e)
{
    bool run;
    TRY(look_for_run(args[0], &run, e));
    return run ? ls_run(args[0], e) : ls_tensors(args[0], e);
}

/* ---- verify ---------------------------------------------------------------------------------- */

static int verify_one(const char *path, struct err *e)
{
    struct ckpt *c;
    TRY(ckpt_open(&c, path, e)); /* reads and checks every byte */
    printf("%s: ok, step %lld, %d tensors\n", ckpt_path(c), (long long)ckpt_step(c), ckpt_count(c));
    ckpt_close(c);
    return ST_OK;
}

static int run_verify(char **args, struct err *e)
{
    struct ckpt_info *list;
    int n, bad = 0;
    bool run;
    TRY(look_for_run(args[0], &run, e));
    if (!run)
        return verify_one(args[0], e);
    TRY(ckpt_list(args[0], &list, &n, e));
    for (int i = 0; i < n; i++) {
        struct err one = {0};
        if (verify_one(list[i].path, &one) == ST_OK)
            continue;
        bad++;
        err_print(&one, stderr);
    }
    ckpt_list_free(list, n);
    if (n == 0)
        return err_set(e, ST_INVALID, "there is no checkpoint in %s", args[0]);
    return bad == 0 ? ST_OK : err_set(e, ST_CORRUPT, "%d of the %d checkpoints in %s are damaged", bad, n, args[0]);
}

/* ---- diff ------------------------------------------------------------------------------------ */

static void print_index(const struct tensor *t, int64_t flat)
{
    int64_t at[TENSOR_MAX_RANK] = {0};
    for (int d = t->rank - 1; d >= 0; d--) {
        at[d] = flat % t->dim[d];
        flat /= t->dim[d];
    }
    putchar('[');
    for (int d = 0; d < t->rank; d++)
        printf("%s%lld", d ? ", " : "", (long long)at[d]);
    putchar(']');
}

static bool pair_differs(const struct named *a, const struct named *b)
{
    struct st_difference d;
    char ta[128], tb[128];
    tensor_text(&a->view, ta, sizeof ta);
    tensor_text(&b->view, tb, sizeof tb);
    if (st_compare(&a->view, &b->view, &d, NULL) != ST_OK) {
        print_key(a);
        printf(": %s against %s\n", ta, tb);
        return true;
    }
    bool types = a->view.dtype != b->view.dtype;
    if (d.count == 0 && !types)
        return false;
    print_key(a);
    if (types)
        printf(": %s against %s", ta, tb);
    if (d.count == 0) {
        printf(": equal values\n");
        return true;
    }
    printf(": %lld of %lld elements differ, max abs difference %.9g at ", (long long)d.count,
           (long long)tensor_elems(&a->view), d.max_abs);
    print_index(&a->view, d.max_at);
    printf(", first at ");
    print_index(&a->view, d.first);
    putchar('\n');
    return true;
}

static int diff_sources(const struct source *a, const struct source *b)
{
    int i = 0, j = 0, equal = 0, differ = 0, only_a = 0, only_b = 0;
    while (i < a->n || j < b->n) {
        int order = i == a->n ? 1 : j == b->n ? -1 : by_group_and_key(&a->list[i], &b->list[j]);
        if (order == 0) {
            bool different = pair_differs(&a->list[i++], &b->list[j++]);
            differ += different;
            equal += !different;
            continue;
        }
        print_key(order < 0 ? &a->list[i++] : &b->list[j++]);
        printf(": only in %s\n", order < 0 ? "A" : "B");
        only_a += order < 0;
        only_b += order > 0;
    }
    printf("%d tensors equal, %d differ, %d only in A, %d only in B\n", equal, differ, only_a, only_b);
    return differ + only_a + only_b;
}

static int run_diff(char **args, struct err *e)
{
    struct source a, b;
    TRY(source_open(&a, args[0], 0, e));
    int st = source_open(&b, args[1], 0, e);
    if (st != ST_OK) {
        source_close(&a);
        return st;
    }
    if (a.ckpt != NULL && b.ckpt != NULL && ckpt_step(a.ckpt) != ckpt_step(b.ckpt))
        printf("note: A is of step %lld, B of step %lld\n", (long long)ckpt_step(a.ckpt), (long long)ckpt_step(b.ckpt));
    int differences = diff_sources(&a, &b);
    source_close(&a);
    source_close(&b);
    /* Told apart from failure by an empty error: a difference is a result. */
    return differences ? ST_CONFLICT : ST_OK;
}

/* ---- dispatch -------------------------------------------------------------------------------- */

int cmd_ckpt(int argc, char **argv)
{
    static const char *const names[] = {"ls", "verify", "diff"};
    static int (*const actions[])(char **, struct err *) = {run_ls, run_verify, run_diff};
    static const int wanted[] = {1, 1, 2};
    struct err e = {0};
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(usage, stdout);
            return 0;
        }
    int which = -1;
    bool converts = argc > 1 && strcmp(argv[1], "convert") == 0, merges = argc > 1 && strcmp(argv[1], "merge") == 0;
    if (converts || merges) {
        if ((converts ? ckpt_convert : ckpt_merge)(argc - 2, argv + 2, &e) == ST_OK)
            return fflush(stdout) == 0 ? 0 : 1;
        err_print(&e, stderr);
        return 1;
    }
    for (int i = 0; argc > 1 && i < countof(names); i++)
        which = strcmp(argv[1], names[i]) == 0 ? i : which;
    if (which < 0) {
        const char *near = argc > 1 ? nearest_name(argv[1], names, countof(names)) : NULL;
        err_set(&e, ST_USAGE, argc > 1 ? "ckpt has no subcommand '%s'" : "ckpt needs a subcommand%s",
                argc > 1 ? argv[1] : "");
        err_hint(&e, near ? "did you mean '%s'?" : "ls, verify, diff, convert or merge; see braid ckpt --help%s",
                 near ? near : "");
    } else if (argc - 2 != wanted[which]) {
        err_set(&e, ST_USAGE, "ckpt %s takes %d argument%s, and %d were given", names[which], wanted[which],
                wanted[which] == 1 ? "" : "s", argc - 2);
        err_hint(&e, "see braid ckpt --help");
    } else if (actions[which](argv + 2, &e) == ST_OK)
        return 0;
    fflush(stdout);
    if (e.msg[0])
        err_print(&e, stderr);
    return 1;
}
