/* braid data: turn text into token files, and look at data paths. */
#include "cmd/cmd.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: braid data tokenize --in PATH... --out PREFIX [--eod] [--force]\n"
    "       braid data info PATH... [--scan]\n"
    "\n"
    "tokenize  read text files, or folders recursively in sorted order, one document per file,\n"
    "          and write PREFIX.bin and PREFIX.idx (Megatron format, ids are bytes)\n"
    "  --in PATH...   files and folders; in folders, hidden names, *.bin, *.idx, empty files and\n"
    "                 files with a NUL byte in their first 8 KiB are left out and counted\n"
    "  --out PREFIX   where to write; its folder must exist\n"
    "  --eod          end every document with id 256 (vocabulary 257, 16-bit ids)\n"
    "  --force        replace PREFIX.bin and PREFIX.idx if they exist\n"
    "info      say what a data path is: a Megatron prefix, llm.c shards (or a quoted pattern such\n"
    "          as 'x_*.bin'), text, or a folder of text\n"
    "  --scan         read all ids and print their range\n";

static int usage_error(struct err *e, const char *what, const char *arg)
{
    err_set(e, ST_USAGE, "%s%s%s", what, arg ? " " : "", arg ? arg : "");
    return err_hint(e, "braid data --help");
}

/* ---- tokenize ------------------------------------------------------------------------------- */

struct progress {
    double started;
    bool shown;
};

static void show_progress(void *ctx, const struct tokenize_stats *now)
{
    struct progress *p = ctx;
    double mb = (double)now->bytes * 1e-6, took = time_now() - p->started;
    fprintf(stderr, "\r%lld of %lld files, %.1f MB, %.1f MB/s ", (long long)now->files,
            (long long)now->files_total, mb, took > 0 ? mb / took : 0);
    fflush(stderr);
    p->shown = true;
}

static void print_summary(const struct tokenize_opts *o, const struct tokenize_stats *s,
                          double took)
{
    char bytes[32];
    printf("wrote %s.bin and %s.idx: %lld documents, %lld tokens (%s, vocabulary %d%s)\n", o->out,
           o->out, (long long)s->documents, (long long)s->tokens,
           dtype_name(token_dtype_for_vocab(o->tokenizer->vocab)), o->tokenizer->vocab,
           o->tokenizer->eod >= 0 ? ", eod 256" : "");
    printf("read %lld files, %s in %.2f s\n", (long long)s->files,
           human_bytes((double)s->bytes, bytes, sizeof bytes), took);
    if (s->skipped_binary + s->skipped_empty + s->skipped_other > 0)
        printf("left out: %lld binary files (NUL bytes), %lld empty, %lld hidden, token files or "
               "links to folders\n",
               (long long)s->skipped_binary, (long long)s->skipped_empty,
               (long long)s->skipped_other);
}

static int tokenize(int argc, char **argv, struct err *e)
{
    const char **in;
    struct tokenize_opts o = {0};
    bool eod = false, in_list = false;
    int st;
    TRY(mem_array((void **)&in, (size_t)argc, sizeof *in, e));
    for (int i = 1; i < argc; i++) {
        bool is_in = strcmp(argv[i], "--in") == 0;
        if (str_starts(argv[i], "--in=")) {
            in[o.n_in++] = argv[i] + strlen("--in=");
            in_list = true; /* more paths may follow */
            continue;
        } else if (str_starts(argv[i], "--out=")) {
            if (o.out != NULL)
                TRY_OUT(usage_error(e, "--out takes one prefix, once", NULL));
            o.out = argv[i] + strlen("--out=");
        } else if (strcmp(argv[i], "--out") == 0) {
            if (i + 1 >= argc || o.out != NULL)
                TRY_OUT(usage_error(e, "--out takes one prefix, once", NULL));
            o.out = argv[++i];
        } else if (strcmp(argv[i], "--eod") == 0) {
            eod = true;
        } else if (strcmp(argv[i], "--force") == 0) {
            o.replace = true;
        } else if (!is_in && str_starts(argv[i], "--")) {
            TRY_OUT(usage_error(e, "unknown option", argv[i]));
        } else if (!is_in && !in_list) {
            TRY_OUT(usage_error(e, "unexpected argument", argv[i]));
        } else if (!is_in) {
            in[o.n_in++] = argv[i];
        }
        in_list = is_in || (in_list && !str_starts(argv[i], "--"));
    }
    if (o.n_in == 0 || o.out == NULL || o.out[0] == '\0')
        TRY_OUT(usage_error(e, "tokenize needs --in PATH... and --out PREFIX", NULL));
    struct tokenizer tok;
    struct tokenize_stats stats;
    struct progress p = {.started = time_now()};
    TRY_OUT(tokenizer_open(&tok, "bytes", eod, e));
    o.in = in;
    o.tokenizer = &tok;
    o.progress = isatty(STDERR_FILENO) ? show_progress : NULL;
    o.progress_ctx = &p;
    st = data_tokenize(&o, &stats, e);
    if (p.shown)
        fputs("\r\033[K", stderr);
    if (st == ST_OK)
        print_summary(&o, &stats, time_now() - p.started);
    tokenizer_close(&tok);
out:
    free(in);
    return st;
}

/* ---- info ---------------------------------------------------------------------------------- */

static void print_info(const char *path, const struct data_info *d)
{
    char tokens[32], bytes[32];
    printf("%s\n", path);
    printf("  kind       %s, %lld file%s, %s\n", d->kind, (long long)d->files,
           d->files == 1 ? "" : "s", human_bytes((double)d->bytes, bytes, sizeof bytes));
    printf("  ids        %s", dtype_name(d->dtype));
    if (d->scanned)
        printf(", %lld to %lld", (long long)d->min_id, (long long)d->max_id);
    printf("\n  tokens     %lld (%s)\n", (long long)d->tokens,
           human_count((double)d->tokens, tokens, sizeof tokens));
    printf("  sequences  %lld in %lld documents, %lld to %lld tokens long\n",
           (long long)d->sequences, (long long)d->documents, (long long)d->shortest,
           (long long)d->longest);
    if (d->skipped > 0)
        printf("  left out   %lld files (binary, empty, hidden or token files)\n",
               (long long)d->skipped);
}

static int info(int argc, char **argv, struct err *e)
{
    bool scan = false;
    int shown = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--scan") == 0)
            scan = true;
        else if (str_starts(argv[i], "--"))
            return usage_error(e, "unknown option", argv[i]);
    }
    for (int i = 1; i < argc; i++) {
        struct data_info d;
        if (str_starts(argv[i], "--"))
            continue;
        TRY(data_inspect(argv[i], scan, &d, e));
        print_info(argv[i], &d);
        shown++;
    }
    return shown > 0 ? ST_OK : usage_error(e, "info needs a data path", NULL);
}

int cmd_data(int argc, char **argv)
{
    struct err e = {0};
    int st;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(usage, stdout);
            return 0;
        }
    }
    if (argc >= 2 && strcmp(argv[1], "tokenize") == 0)
        st = tokenize(argc - 1, argv + 1, &e);
    else if (argc >= 2 && strcmp(argv[1], "info") == 0)
        st = info(argc - 1, argv + 1, &e);
    else
        st = usage_error(&e, argc < 2 ? "data needs a subcommand" : "unknown data subcommand",
                         argc < 2 ? NULL : argv[1]);
    if (st != ST_OK)
        err_print(&e, stderr);
    return st == ST_OK ? 0 : 1;
}
