/* Text files to a token file. Parts of the text are read in order, encoded in parallel and written
 * in order; memory does not grow with the text, nor do the files depend on the
 * number of threads. */
#include "data/data_int.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEQUENCE_MAX = 1 << 30, /* a length is an int32: a longer document becomes several sequences */
    TEXT_FILES_MAX = 1 << 28,
    PARTS_PER_THREAD = 8, /* in one round */
};

/* A part, and what became of it. */
struct work {
    struct text_part part;
    struct token_ids ids;
    struct chat_marks marks; /* of conversations */
    size_t *ends;            /* where documents end among the ids */
    size_t n_ends, cap_ends;
    int64_t bytes, empty, learned;
    struct jsonl_bad bad;
    int st;
    struct err e;
};

struct job {
    const struct tokenize_opts *o;
    struct tokenize_stats *stats;
    struct token_writer *writer;
    struct token_encoder **encoders; /* [threads] */
    unsigned roles;                  /* of conversations: which are learned */
    struct work *work;               /* [n_work] */
    int threads, n_work;
    int64_t sequence; /* tokens in the open one */
    bool any;         /* the open document has tokens */
};

/* ---- Encoding: in any thread ----------------------------------------------------------------- */

struct encode_ctx {
    struct work *w;
    const struct job *j;
    struct token_encoder *encoder;
    unsigned flags;
    struct chat_list messages;
    struct chat_text text;
};

static int end_ids(struct work *w, struct err *e)
{
    TRY(mem_grow((void **)&w->ends, &w->cap_ends, w->n_ends + 1, sizeof *w->ends, e));
    w->ends[w->n_ends++] = w->ids.n;
    return ST_OK;
}

static int encode_document(void *ctx, const char *text, size_t n, struct err *e)
{
    struct encode_ctx *c = ctx;
    struct work *w = c->w;
    size_t before = w->ids.n;
    TRY(token_encode(c->encoder, text, n, c->flags, &w->ids, e));
    w->bytes += (int64_t)n;
    if (w->ids.n == before) {
        w->empty++;
        return ST_OK;
    }
    return end_ids(w, e);
}

/* Writes the messages by the template. *good false: it has no place for one of them, or nothing is learned. */
static int write_conversation(struct encode_ctx *c, bool *good, char *why, size_t size, struct err *e)
{
    const struct chat_template *t = c->j->o->chat;
    bool learned = false;
    struct err bad = {0};
    int st = ST_OK;
    for (size_t i = 0; i < c->messages.n && st == ST_OK; i++) {
        const struct chat_message *m = &c->messages.m[i];
        bool loss = !m->skip && (c->j->roles & 1u << m->role) != 0;
        learned = learned || loss;
        st = chat_text_add(&c->text, t, m, loss, &bad);
    }
    if (st == ST_OK)
        st = chat_text_end(&c->text, t, &bad);
    if (st != ST_OK && st != ST_INVALID) {
        *e = bad;
        return st;
    }
    *good = st == ST_OK && learned;
    if (!*good)
        snprintf(why, size, "%.180s",
                 st != ST_OK ? bad.msg : "no message of the roles that are learned (data.loss_roles)");
    return ST_OK;
}

static int encode_conversation(void *ctx, const struct json_t *root, bool *good, char *why, size_t size, struct err *e)
{
    struct encode_ctx *c = ctx;
    struct work *w = c->w;
    chat_text_clear(&c->text);
    *good = chat_list_read(&c->messages, root, c->j->o->field, why, size);
    if (*good)
        TRY(write_conversation(c, good, why, size, e));
    if (!*good)
        return ST_OK;
    size_t before = w->marks.n;
    TRY(chat_text_encode(&c->text, c->j->o->tokenizer, c->encoder, &w->ids, &w->marks, e));
    for (size_t i = before; i < w->marks.n; i++)
        w->learned += w->marks.loss[i];
    w->bytes += (int64_t)c->text.text.len;
    return end_ids(w, e);
}

static void encode_work(struct job *j, struct work *w, struct token_encoder *encoder)
{
    struct encode_ctx c = {.w = w, .j = j, .encoder = encoder, .flags = j->o->special ? TOKEN_SPECIAL : 0};
    w->ids.n = w->n_ends = w->marks.n = 0;
    w->bytes = w->empty = w->learned = 0;
    w->bad = (struct jsonl_bad){.skip = j->o->skip_bad};
    if (w->part.jsonl && j->o->chat != NULL) {
        chat_list_init(&c.messages);
        chat_text_init(&c.text);
        w->st = jsonl_lines(&w->part, &w->bad, encode_conversation, &c, &w->e);
        chat_list_release(&c.messages);
        chat_text_release(&c.text);
        return;
    }
    if (w->part.jsonl) {
        w->st = jsonl_each(&w->part, j->o->field, &w->bad, encode_document, &c, &w->e);
        return;
    }
    w->bytes = (int64_t)w->part.n;
    w->st = token_encode(encoder, w->part.text, w->part.n, c.flags, &w->ids, &w->e);
    if (w->st != ST_OK)
        err_in(&w->e, "tokenizing %s", w->part.path);
}

/* ---- Writing: in order ----------------------------------------------------------------------- */

static int write_ids(struct job *j, const int32_t *ids, size_t n, struct err *e)
{
    while (n > 0) {
        size_t room = (size_t)(SEQUENCE_MAX - j->sequence), take = n < room ? n : room;
        TRY(token_writer_add(j->writer, ids, take, e));
        j->sequence += (int64_t)take;
        j->any = true;
        ids += take;
        n -= take;
        if (j->sequence == SEQUENCE_MAX) {
            TRY(token_writer_end_sequence(j->writer, e));
            j->sequence = 0;
        }
    }
    return ST_OK;
}

static int end_document(struct job *j, struct err *e)
{
    int32_t eod = j->o->chat == NULL ? j->o->tokenizer->eod : -1; /* a conversation ends as its template says */
    if (!j->any)
        return ST_OK;
    if (eod >= 0) {
        TRY(write_ids(j, &eod, 1, e));
        j->stats->tokens++;
    }
    j->sequence = 0;
    j->any = false;
    j->stats->documents++;
    return token_writer_end_document(j->writer, e);
}

static int write_work(struct job *j, struct work *w, struct err *e)
{
    struct tokenize_stats *s = j->stats;
    if (w->st != ST_OK) {
        *e = w->e;
        return w->st;
    }
    size_t at = 0;
    for (size_t i = 0; i < w->n_ends; i++) {
        TRY(write_ids(j, w->ids.ids + at, w->ends[i] - at, e));
        if (j->o->chat != NULL)
            TRY(token_writer_add_loss(j->writer, w->marks.loss + at, w->ends[i] - at, e));
        TRY(end_document(j, e));
        at = w->ends[i];
    }
    TRY(write_ids(j, w->ids.ids + at, w->ids.n - at, e)); /* of a text file that may go on */
    s->tokens += (int64_t)w->ids.n;
    s->bytes += w->bytes;
    s->learned += w->learned;
    s->skipped_empty += w->empty;
    if (w->bad.n > 0 && s->bad_lines == 0)
        snprintf(s->first_bad, sizeof s->first_bad, "%s, line %lld: %s", w->part.path, (long long)w->bad.first_line,
                 w->bad.why);
    s->bad_lines += w->bad.n;
    if (!w->part.ends_file)
        return ST_OK;
    s->files++;
    return w->part.jsonl ? ST_OK : end_document(j, e);
}

/* ---- The rounds ------------------------------------------------------------------------------ */

static int run_rounds(struct job *j, struct text_reader *r, struct err *e)
{
    for (;;) {
        int n = 0;
        bool got = true;
        while (n < j->n_work) {
            TRY(text_reader_next(r, &j->work[n].part, &got, e));
            if (!got)
                break;
            n++;
        }
#pragma omp parallel for schedule(dynamic, 1) num_threads(j->threads)
        for (int i = 0; i < n; i++)
            encode_work(j, &j->work[i], j->encoders[omp_get_thread_num()]);
        for (int i = 0; i < n; i++)
            TRY(write_work(j, &j->work[i], e));
        j->stats->consumed = text_reader_consumed(r);
        if (j->o->progress != NULL)
            j->o->progress(j->o->progress_ctx, j->stats);
        if (!got)
            return ST_OK;
    }
}

int text_list_inputs(const char *const *in, int n_in, struct text_list *list, struct err *e)
{
    for (int i = 0; i < n_in; i++)
        TRY(text_list_add(list, in[i], TEXT_FILES_MAX, e));
    if (list->n > 0)
        return ST_OK;
    err_set(e, ST_INVALID, "no text was found: %lld binary files, %lld empty, %lld others", (long long)list->binary,
            (long long)list->empty, (long long)list->other);
    return err_hint(e, "a file with a NUL byte in its first 8 KiB counts as binary; hidden files, "
                       "*.bin and *.idx in folders are left out");
}

static int job_open(struct job *j, struct err *e)
{
    j->threads = j->o->threads > 0 ? j->o->threads : cpu_count();
    j->n_work = j->threads * PARTS_PER_THREAD;
    TRY(mem_array((void **)&j->encoders, (size_t)j->threads, sizeof(struct token_encoder *), e));
    TRY(mem_array((void **)&j->work, (size_t)j->n_work, sizeof *j->work, e));
    for (int i = 0; i < j->threads; i++)
        TRY(token_encoder_open(&j->encoders[i], j->o->tokenizer, e));
    return token_writer_open(&j->writer, j->o->out, token_dtype_for_vocab(j->o->tokenizer->vocab), j->o->replace, e);
}

static void job_close(struct job *j)
{
    token_writer_abort(j->writer);
    for (int i = 0; i < j->threads && j->encoders != NULL; i++)
        token_encoder_close(j->encoders[i]);
    for (int i = 0; i < j->n_work && j->work != NULL; i++) {
        text_part_release(&j->work[i].part);
        free(j->work[i].ids.ids);
        free(j->work[i].marks.loss);
        free(j->work[i].ends);
    }
    free(j->encoders);
    free(j->work);
}

/* Text among conversations would need marks of its own. */
static int check_chat(struct job *j, const struct text_list *list, struct err *e)
{
    for (size_t i = 0; i < list->n; i++)
        if (!text_is_jsonl(list->paths[i])) {
            err_set(e, ST_INVALID, "data.chat is set, but %s is no file of JSON lines (*.jsonl)", list->paths[i]);
            return err_hint(e, "conversations and other text are separate paths of a blend");
        }
    return chat_roles_parse(j->o->loss_roles, &j->roles, e);
}

static size_t cut_for_tokenizer(const void *tokenizer, const void *text, size_t n)
{
    return token_cut(tokenizer, text, n);
}

int data_tokenize(const struct tokenize_opts *o, struct tokenize_stats *stats, struct err *e)
{
    struct text_list list = {0};
    struct text_reader reader = {0};
    struct tokenize_opts filled = *o;
    struct job j = {.o = &filled, .stats = stats};
    *stats = (struct tokenize_stats){0};
    if (filled.field == NULL || filled.field[0] == '\0')
        filled.field = "text";
    if (filled.loss_roles == NULL || filled.loss_roles[0] == '\0')
        filled.loss_roles = "assistant";
    int st;
    TRY_OUT(text_list_inputs(o->in, o->n_in, &list, e)); /* before the outputs exist, lest they list themselves */
    if (o->chat != NULL)
        TRY_OUT(check_chat(&j, &list, e));
    stats->files_total = (int64_t)list.n;
    for (size_t i = 0; i < list.n; i++)
        stats->consumed_total += list.sizes[i];
    stats->skipped_binary = list.binary;
    stats->skipped_empty = list.empty;
    stats->skipped_other = list.other;
    TRY_OUT(job_open(&j, e));
    text_reader_init(&reader, &list, cut_for_tokenizer, o->tokenizer);
    TRY_OUT(run_rounds(&j, &reader, e));
    if (stats->documents == 0)
        TRY_OUT(err_set(e, ST_INVALID, "%s holds no text: %lld bad lines, %lld empty documents", o->in[0],
                        (long long)stats->bad_lines, (long long)stats->skipped_empty));
    TRY_OUT(token_manifest_remove(o->out, e));
    struct token_writer *done = j.writer;
    j.writer = NULL;
    TRY_OUT(token_writer_close(done, e));
    TRY_OUT(token_manifest_write(&filled, stats, e));
out:
    text_reader_release(&reader);
    job_close(&j);
    text_list_release(&list);
    return st;
}
