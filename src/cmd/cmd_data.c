/* braid data: turn text into token files, train tokenizers, and look at data paths. */
#include "cmd/cmd.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: braid data tokenize --in PATH... --out PREFIX [--data.tokenizer=FILE] [options]\n"
    "       braid data train-tokenizer --in PATH... --out PREFIX [--vocab=N] [options]\n"
    "       braid data info PATH... [--scan] [--data.tokenizer=FILE]\n"
    "\n"
    "tokenize  read text and write PREFIX.bin, PREFIX.idx (Megatron format) and "
    "PREFIX.tokens.json, a\n"
    "          manifest with the tokenizer's hash, documents, tokens and bytes\n"
    "  --in PATH...   text files, *.jsonl, either of them compressed (.gz, .zst), or folders of "
    "such\n"
    "                 files, recursively in sorted order. A text file is a document, and so is "
    "each\n"
    "                 line of a .jsonl. In folders, hidden names, *.bin, *.idx, empty files and\n"
    "                 files with a NUL byte in their first 8 KiB are left out and counted\n"
    "  --out PREFIX   where to write; its folder must exist\n"
    "  --data.tokenizer=FILE   tokenizer.json, tiktoken, tekken.json or GPT-2's encoder.json; "
    "default\n"
    "                 bytes. Also data.token_pattern, data.token_special, data.eod_token, "
    "data.field\n"
    "  --append-eod   end every document with the tokenizer's end-of-document token (bytes: id "
    "256)\n"
    "  --special      names of special tokens in the text become those tokens\n"
    "  --field=NAME   member of each line of JSON that holds the text (data.field); default text\n"
    "  --skip-bad     leave bad lines of JSON out and count them\n"
    "  --data.chat=TEMPLATE   lines of JSON are conversations; PREFIX.loss marks what is learned of them: the\n"
    "                 messages of data.loss_roles\n"
    "  --run.threads=N   threads; default all cores\n"
    "  --force        replace PREFIX.* if they exist\n"
    "train-tokenizer  train a byte-level BPE vocabulary; writes PREFIX.json (Hugging Face "
    "tokenizer.json)\n"
    "          and PREFIX.tiktoken\n"
    "  --vocab=N          tokens in all, special ones included; default 32768\n"
    "  --pattern=NAME     how text is split: gpt2, llama3, qwen2, cl100k, nanochat, o200k, ... or "
    "a regular\n"
    "                     expression; default gpt2\n"
    "  --special-tokens=\"A B\"   their ids follow all others; default <|endoftext|>\n"
    "  --min-frequency=N  pairs seen less often are not merged; default 0\n"
    "  --max-token-bytes=N, --max-bytes=N, --max-pieces=N   longest token; text to read; different "
    "pieces to\n"
    "                     keep in memory (when more come, those seen once are dropped); default no "
    "limit,\n"
    "                     no limit, 32 million\n"
    "info      say what a data path is: a Megatron prefix, llm.c shards (or a quoted pattern such\n"
    "          as 'x_*.bin'), text, or a folder of text, and show the beginning of its text\n"
    "  --scan         read all ids and print their range\n";

static int usage_error(struct err *e, const char *what, const char *arg)
{
    err_set(e, ST_USAGE, "%s%s%s", what, arg ? " " : "", arg ? arg : "");
    return err_hint(e, "braid data --help");
}

/* ---- words ----------------------------------------------------------------------------------- */

/* What the subcommands share. Options of the config (--data.*, --run.threads) go into it. */
struct words {
    struct config c;
    const char **paths; /* after --in, or plain words */
    int n_paths;
    const char *out;
    bool append_eod, special, skip_bad, force, scan;
    int64_t vocab, min_frequency, max_token_bytes, max_bytes, max_pieces;
    const char *pattern, *special_tokens;
};

/* "--name=value" or "--name value": the value; NULL: another option. */
static const char *value_of(int argc, char **argv, int *i, const char *name)
{
    size_t n = strlen(name);
    if (strncmp(argv[*i], name, n) != 0)
        return NULL;
    if (argv[*i][n] == '=')
        return argv[*i] + n + 1;
    return argv[*i][n] == '\0' && *i + 1 < argc ? argv[++*i] : NULL;
}

static int take_number(int argc, char **argv, int *i, struct words *w, bool *taken, struct err *e)
{
    const struct {
        const char *name;
        int64_t *to;
    } numbers[] = {{"--vocab", &w->vocab},
                   {"--min-frequency", &w->min_frequency},
                   {"--max-token-bytes", &w->max_token_bytes},
                   {"--max-bytes", &w->max_bytes},
                   {"--max-pieces", &w->max_pieces}};
    for (int k = 0; k < countof(numbers) && !*taken; k++) {
        const char *v = value_of(argc, argv, i, numbers[k].name);
        if (v == NULL)
            continue;
        *taken = true;
        if (!parse_i64(v, numbers[k].to) || *numbers[k].to < 0) {
            err_set(e, ST_USAGE, "%s: '%s' is not a number", numbers[k].name, v);
            return err_hint(e, "whole numbers, also as 32k or 64Ki");
        }
    }
    return ST_OK;
}

static int take_text(int argc, char **argv, int *i, struct words *w, bool *taken, struct err *e)
{
    const char *v;
    *taken = true;
    if ((v = value_of(argc, argv, i, "--out")) != NULL) {
        if (w->out != NULL)
            return usage_error(e, "--out takes one prefix, once", NULL);
        w->out = v;
    } else if (strcmp(argv[*i], "--out") == 0) {
        return usage_error(e, "--out takes one prefix, once", NULL);
    } else if ((v = value_of(argc, argv, i, "--pattern")) != NULL) {
        w->pattern = v;
    } else if ((v = value_of(argc, argv, i, "--special-tokens")) != NULL) {
        w->special_tokens = v;
    } else if ((v = value_of(argc, argv, i, "--field")) != NULL) {
        return config_set(&w->c, "data.field", v, NULL, e);
    } else {
        *taken = false;
    }
    return ST_OK;
}

static bool take_flag(const char *arg, struct words *w)
{
    bool eod = strcmp(arg, "--append-eod") == 0 || strcmp(arg, "--eod") == 0, special = strcmp(arg, "--special") == 0,
         skip = strcmp(arg, "--skip-bad") == 0, force = strcmp(arg, "--force") == 0, scan = strcmp(arg, "--scan") == 0;
    w->append_eod |= eod;
    w->special |= special;
    w->skip_bad |= skip;
    w->force |= force;
    w->scan |= scan;
    return eod || special || skip || force || scan;
}

static int take_config(int argc, char **argv, int *i, struct words *w, bool *taken, struct err *e)
{
    const char *arg = argv[*i];
    if (!str_starts(arg, "--data.") && !str_starts(arg, "--run."))
        return ST_OK;
    *taken = true;
    char name[64];
    size_t n = strcspn(arg + 2, "=");
    if (n >= sizeof name)
        return usage_error(e, "unknown option", arg);
    memcpy(name, arg + 2, n);
    name[n] = '\0';
    const char *v = arg[2 + n] == '=' ? arg + 2 + n + 1 : *i + 1 < argc ? argv[++*i] : "";
    return config_set(&w->c, name, v, NULL, e);
}

static int read_words(int argc, char **argv, struct words *w, bool needs_in, struct err *e)
{
    bool in_list = !needs_in; /* info takes its paths without --in */
    TRY(config_init(&w->c, e));
    TRY(mem_array((void **)&w->paths, (size_t)argc, sizeof *w->paths, e));
    for (int i = 1; i < argc; i++) {
        bool taken = take_flag(argv[i], w);
        if (!taken)
            TRY(take_number(argc, argv, &i, w, &taken, e));
        if (!taken)
            TRY(take_config(argc, argv, &i, w, &taken, e));
        if (!taken)
            TRY(take_text(argc, argv, &i, w, &taken, e));
        if (taken) {
            in_list = !needs_in;
        } else if (needs_in && str_starts(argv[i], "--in=")) {
            w->paths[w->n_paths++] = argv[i] + strlen("--in=");
            in_list = true;
        } else if (needs_in && strcmp(argv[i], "--in") == 0) {
            in_list = true;
        } else if (str_starts(argv[i], "--") || !in_list) {
            return usage_error(e, str_starts(argv[i], "--") ? "unknown option" : "unexpected argument", argv[i]);
        } else {
            w->paths[w->n_paths++] = argv[i];
        }
    }
    return ST_OK;
}

static void words_release(struct words *w)
{
    free(w->paths);
    config_release(&w->c);
}

/* ---- tokenize -------------------------------------------------------------------------------- */

struct progress {
    double started;
    bool shown;
};

static void show_progress(void *ctx, const struct tokenize_stats *now)
{
    struct progress *p = ctx;
    char eta[32];
    double mb = (double)now->bytes * 1e-6, took = time_now() - p->started;
    double done = now->consumed_total > 0 ? (double)now->consumed / (double)now->consumed_total : 0;
    if (!isatty(STDERR_FILENO))
        return;
    int filled = (int)(done * 20);
    fprintf(stderr, "\r[%.*s%*s] %3.0f%%  %lld of %lld files  %.1f MB  %.1f MB/s  %s left ", filled,
            "####################", 20 - filled, "", 100 * done, (long long)now->files, (long long)now->files_total, mb,
            took > 0 ? mb / took : 0, human_time(done > 0 ? took / done - took : 0, eta, sizeof eta));
    fflush(stderr);
    p->shown = true;
}

static void end_progress(const struct progress *p)
{
    if (p->shown)
        fputs("\r\033[K", stderr);
}

static void print_read(const struct tokenize_stats *s, double took)
{
    char bytes[32];
    printf("read %lld files, %s in %.2f s (%.1f MB/s)\n", (long long)s->files,
           human_bytes((double)s->bytes, bytes, sizeof bytes), took, took > 0 ? (double)s->bytes * 1e-6 / took : 0);
    if (s->skipped_binary + s->skipped_empty + s->skipped_other > 0)
        printf("left out: %lld binary files (NUL bytes), %lld empty, %lld hidden, token files or "
               "links to folders\n",
               (long long)s->skipped_binary, (long long)s->skipped_empty, (long long)s->skipped_other);
    if (s->bad_lines > 0)
        printf("left out: %lld bad lines, the first: %s\n", (long long)s->bad_lines, s->first_bad);
}

static void print_summary(const struct tokenize_opts *o, const struct tokenize_stats *s, double took)
{
    const struct tokenizer *t = o->tokenizer;
    char eod[32] = "", hash[17];
    if (t->eod >= 0)
        snprintf(eod, sizeof eod, ", eod %d", (int)t->eod);
    printf("wrote %s.bin and %s.idx: %lld documents, %lld tokens (%s, vocabulary %d%s)\n", o->out, o->out,
           (long long)s->documents, (long long)s->tokens, dtype_name(token_dtype_for_vocab(t->vocab)), t->vocab, eod);
    printf("tokenizer %s (%s), hash %s; %.3f bytes a token\n", o->tokenizer_name, tokenizer_kind(t),
           tokenizer_hash_text(t, hash), s->tokens > 0 ? (double)s->bytes / (double)s->tokens : 0);
    if (o->chat != NULL)
        printf("conversations by template %s; learned: %s, %lld tokens (%.1f%%), marked in %s.loss\n", o->chat->name,
               o->loss_roles, (long long)s->learned, s->tokens > 0 ? 100.0 * (double)s->learned / (double)s->tokens : 0,
               o->out);
    print_read(s, took);
}

static int open_tokenizer(const struct words *w, bool eod, struct tokenizer *tok, struct err *e)
{
    const struct config_data *d = &w->c.data;
    struct tokenizer_opts o = {.name = d->tokenizer,
                               .eod = eod,
                               .eod_token = d->eod_token,
                               .pattern = d->token_pattern,
                               .special = d->token_special};
    return tokenizer_open_opts(tok, &o, e);
}

/* The template of conversations, where they are asked for. */
static int open_chat(const struct words *w, const struct tokenizer *tok, struct chat_template *chat, struct err *e)
{
    if (w->c.data.chat[0] == '\0')
        return ST_OK;
    TRY(chat_template_open(chat, w->c.data.chat, tok, e));
    if (chat->found[0] != '\0')
        printf("chat template %s, recognised in %s\n", chat->name, chat->found);
    return ST_OK;
}

static int tokenize(struct words *w, struct err *e)
{
    if (w->n_paths == 0 || w->out == NULL || w->out[0] == '\0')
        return usage_error(e, "tokenize needs --in PATH... and --out PREFIX", NULL);
    bool eod = w->append_eod || w->c.data.eod;
    struct tokenizer tok;
    struct chat_template chat = {.stop_id = -1};
    struct tokenize_stats stats;
    struct progress p = {.started = time_now()};
    TRY(open_tokenizer(w, eod, &tok, e));
    int st = open_chat(w, &tok, &chat, e);
    struct tokenize_opts o = {.in = w->paths,
                              .n_in = w->n_paths,
                              .out = w->out,
                              .tokenizer = &tok,
                              .tokenizer_name = w->c.data.tokenizer,
                              .special = w->special,
                              .field = w->c.data.field,
                              .skip_bad = w->skip_bad,
                              .chat = w->c.data.chat[0] != '\0' ? &chat : NULL,
                              .loss_roles = w->c.data.loss_roles,
                              .replace = w->force,
                              .threads = (int)w->c.run.threads,
                              .progress = show_progress,
                              .progress_ctx = &p};
    if (st == ST_OK)
        st = data_tokenize(&o, &stats, e);
    end_progress(&p);
    if (st == ST_OK)
        print_summary(&o, &stats, time_now() - p.started);
    chat_template_close(&chat);
    tokenizer_close(&tok);
    return st;
}

/* ---- train-tokenizer ------------------------------------------------------------------------- */

static void show_merges(void *ctx, int64_t merges)
{
    struct progress *p = ctx;
    if (!isatty(STDERR_FILENO))
        return;
    fprintf(stderr, "\r\033[K%lld merges ", (long long)merges);
    p->shown = true;
}

static int train_tokenizer(struct words *w, struct err *e)
{
    if (w->n_paths == 0 || w->out == NULL || w->out[0] == '\0')
        return usage_error(e, "train-tokenizer needs --in PATH... and --out PREFIX", NULL);
    char path[4096];
    for (int i = 0; i < 2 && !w->force; i++) {
        snprintf(path, sizeof path, "%s%s", w->out, i == 0 ? ".json" : ".tiktoken");
        bool exists;
        TRY(file_lookup(path, &exists, e));
        if (exists) {
            err_set(e, ST_CONFLICT, "%s exists already", path);
            return err_hint(e, "--force replaces it");
        }
    }
    struct progress p = {.started = time_now()};
    struct tokenize_stats read;
    struct token_train_stats s;
    struct train_tokenizer_opts o = {.in = w->paths,
                                     .n_in = w->n_paths,
                                     .field = w->c.data.field,
                                     .skip_bad = w->skip_bad,
                                     .max_bytes = w->max_bytes,
                                     .progress = show_progress,
                                     .merges = show_merges,
                                     .ctx = &p,
                                     .train = {.vocab = w->vocab,
                                               .pattern = w->pattern,
                                               .special = w->special_tokens,
                                               .min_frequency = w->min_frequency,
                                               .max_token_bytes = w->max_token_bytes,
                                               .max_pieces = w->max_pieces,
                                               .threads = (int)w->c.run.threads}};
    int st = data_train_tokenizer(&o, w->out, &read, &s, e);
    end_progress(&p);
    TRY(st);
    printf("wrote %s.json and %s.tiktoken: %lld tokens, %lld merges\n", w->out, w->out, (long long)s.tokens,
           (long long)s.merges);
    print_read(&read, time_now() - p.started);
    printf("%lld pieces of text, %lld different ones\n", (long long)s.pieces, (long long)s.unique);
    if (s.dropped > 0)
        printf("note: %lld pieces seen once were dropped to keep to --max-pieces=%lld\n", (long long)s.dropped,
               (long long)w->max_pieces);
    if (s.tokens < w->vocab)
        printf("note: the text has no more pairs to merge; %lld tokens were asked for\n", (long long)w->vocab);
    return ST_OK;
}

/* ---- info ------------------------------------------------------------------------------------ */

static void print_sample(const struct data_info *d)
{
    fputs("  begins     \"", stdout);
    for (size_t i = 0; i < d->n_sample; i++) {
        uint8_t c = d->sample[i];
        if (c == '\n' || c == '\t' || c == '\r')
            printf("\\%c", c == '\n' ? 'n' : c == '\t' ? 't' : 'r');
        else if (c < 0x20 || c == 0x7F)
            printf("\\x%02x", (unsigned)c);
        else
            putchar(c);
    }
    fputs("\"\n", stdout);
}

static void print_info(const char *path, const struct data_info *d)
{
    char tokens[32], bytes[32];
    printf("%s\n", path);
    printf("  kind       %s, %lld file%s, %s\n", d->kind, (long long)d->files, d->files == 1 ? "" : "s",
           human_bytes((double)d->bytes, bytes, sizeof bytes));
    printf("  ids        %s", dtype_name(d->dtype));
    if (d->scanned)
        printf(", %lld to %lld", (long long)d->min_id, (long long)d->max_id);
    printf("\n  tokens     %lld (%s)\n", (long long)d->tokens, human_count((double)d->tokens, tokens, sizeof tokens));
    printf("  sequences  %lld in %lld documents, %lld to %lld tokens long\n", (long long)d->sequences,
           (long long)d->documents, (long long)d->shortest, (long long)d->longest);
    if (d->tokenizer[0] != '\0')
        printf("  tokenizer  %s, hash %s; %lld bytes of text, %.3f a token\n", d->tokenizer, d->tokenizer_hash,
               (long long)d->text_bytes, d->tokens > 0 ? (double)d->text_bytes / (double)d->tokens : 0);
    if (d->chat[0] != '\0')
        printf("  chat       template %s; learned: %s, %lld tokens\n", d->chat, d->loss_roles, (long long)d->learned);
    if (d->skipped > 0)
        printf("  left out   %lld files (binary, empty, hidden or token files)\n", (long long)d->skipped);
    if (d->n_sample > 0)
        print_sample(d);
    if (d->note[0] != '\0')
        printf("  note       %s\n", d->note);
}

static int info(struct words *w, struct err *e)
{
    bool given = config_source_of(&w->c, "data.tokenizer").source != CFG_FROM_DEFAULT;
    struct tokenizer tok = {.eod = -1};
    if (w->n_paths == 0)
        return usage_error(e, "info needs a data path", NULL);
    if (given)
        TRY(open_tokenizer(w, false, &tok, e));
    int st = ST_OK;
    for (int i = 0; i < w->n_paths && st == ST_OK; i++) {
        struct data_info d;
        st = data_inspect(w->paths[i], w->scan, given ? &tok : NULL, &d, e);
        if (st == ST_OK)
            print_info(w->paths[i], &d);
    }
    tokenizer_close(&tok);
    return st;
}

int cmd_data(int argc, char **argv)
{
    static const struct {
        const char *name;
        bool needs_in;
        int (*run)(struct words *w, struct err *e);
    } subs[] = {{"tokenize", true, tokenize}, {"train-tokenizer", true, train_tokenizer}, {"info", false, info}};
    struct err e = {0};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(usage, stdout);
            return 0;
        }
    }
    int k = 0;
    while (k < countof(subs) && (argc < 2 || strcmp(argv[1], subs[k].name) != 0))
        k++;
    struct words w = {.vocab = 32768, .max_pieces = 32 << 20, .special_tokens = "<|endoftext|>"};
    int st;
    if (k == countof(subs)) {
        st = usage_error(&e, argc < 2 ? "data needs a subcommand" : "unknown data subcommand",
                         argc < 2 ? NULL : argv[1]);
    } else {
        st = read_words(argc - 1, argv + 1, &w, subs[k].needs_in, &e);
        if (st == ST_OK)
            st = subs[k].run(&w, &e);
        words_release(&w);
    }
    if (st != ST_OK)
        err_print(&e, stderr);
    return st == ST_OK ? 0 : 1;
}
