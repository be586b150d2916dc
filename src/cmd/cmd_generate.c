/* braid generate: continue a prompt, or talk with the model, streamed to the terminal. */
#include "cmd/cmd.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "usage: braid generate RUN_OR_CHECKPOINT [--generate.prompt=TEXT | --generate.prompt_file=FILE] "
    "[--generate.tokens=N]\n"
    "                      [--chat=on [--system=TEXT] [--length=N]] [--section.key=value ...]\n\n"
    "Text appears as it is made. generate.prompt_file=- reads the prompt from standard input; generate.stop ends a "
    "sample at a\n"
    "text; generate.special=on prints special tokens by name.\n"
    "--chat=on: a conversation by the template of the training data (data.chat). Each line of standard input is a "
    "message, the model\n"
    "replies until the template's end of a turn, and remembers up to --length tokens (train.seq by default). /new "
    "begins another\n"
    "conversation, /exit or the end of the input ends. With a prompt it replies to that one and ends.\n"
    "Sampling: generate.temperature (0: always the likeliest), top_k, top_p, seed. The same seed gives the same "
    "text.\n"
    "generate.samples=64 with generate.batch=16 makes 64 samples, 16 side by side.\n";
static const char own_options[] = "generate.* data.chat run.device run.threads";

enum { PROMPT_MAX = 16 << 20, STOPS_MAX = 16, TOKEN_TEXT = 65536 };

/* The text of a sample while it is made. */
struct sample {
    struct buf held; /* text that may turn out to be the beginning of a stop text, or half a character */
    struct buf text; /* of one of several: printed when it is complete */
    int stopped_by;  /* the stop text that appeared last */
    bool ended;
    size_t lead; /* spaces that the template puts in front of a reply, not printed yet */
};

struct job {
    struct config c;
    struct ckpt *from;
    struct dev dev;
    struct generator g;
    struct tokenizer tok;
    struct token_ids prompt;
    char *prompt_text;
    size_t n_prompt_text;
    struct candidate *scratch;
    const char *stop[STOPS_MAX]; /* not NUL-terminated */
    size_t n_stop[STOPS_MAX], longest_stop;
    int n_stops;
    struct sample *samples; /* those that are made side by side */
    int64_t n_samples;
    bool noted; /* that ids are printed as numbers */
    /* of a conversation */
    struct chat_template chat;
    struct chat_text text;
    struct token_encoder *encoder;
    struct token_ids turn; /* what the model reads next */
    const char *system;    /* NULL: none */
    int64_t length, drawn; /* tokens at most; drawn so far, in all conversations */
};

/* ---- the prompt ------------------------------------------------------------------------------ */

static int read_all(FILE *f, const char *name, struct buf *out, struct err *e)
{
    char block[4096];
    size_t n;
    while ((n = fread(block, 1, sizeof block, f)) > 0)
        buf_add_n(out, block, n);
    if (ferror(f))
        return err_errno(e, "cannot read %s", name);
    return buf_check(out, e);
}

static int read_prompt(struct job *j, struct err *e)
{
    const char *path = j->c.generate.prompt_file, *text = j->c.generate.prompt;
    if (path[0] != '\0' && text[0] != '\0')
        return err_set(e, ST_USAGE, "generate.prompt and generate.prompt_file are both set");
    if (strcmp(path, "-") == 0) {
        struct buf in;
        buf_init(&in, PROMPT_MAX);
        int st = read_all(stdin, "standard input", &in, e);
        j->prompt_text = in.text != NULL ? in.text : strdup("");
        j->n_prompt_text = in.len;
        return st;
    }
    if (path[0] != '\0')
        return file_read(path, PROMPT_MAX, &j->prompt_text, &j->n_prompt_text, e);
    j->prompt_text = strdup(text[0] ? text : "\n");
    j->n_prompt_text = j->prompt_text != NULL ? strlen(j->prompt_text) : 0;
    return j->prompt_text != NULL ? ST_OK : err_set(e, ST_NOMEM, "out of memory");
}

/* The embedding may lack ids of the tokenizer when the model was trained on token files. */
static int check_ids(const struct job *j, const struct token_ids *ids, struct err *e)
{
    for (size_t i = 0; i < ids->n; i++)
        if (ids->ids[i] < 0 || ids->ids[i] >= j->c.model.vocab) {
            err_set(e, ST_USAGE,
                    "the prompt needs token %d of tokenizer '%s', but the model has a vocabulary "
                    "of %lld",
                    (int)ids->ids[i], j->c.data.tokenizer, (long long)j->c.model.vocab);
            return err_hint(e, "give another --generate.prompt, or the tokenizer of the training "
                               "data: --data.tokenizer");
        }
    return ST_OK;
}

static int encode_prompt(struct job *j, struct err *e)
{
    TRY(tokenizer_encode(&j->tok, j->prompt_text, j->n_prompt_text, TOKEN_SPECIAL | TOKEN_TEMPLATE, &j->prompt, e));
    if (j->prompt.n == 0)
        return err_set(e, ST_USAGE, "the prompt is empty");
    return check_ids(j, &j->prompt, e);
}

static int split_stops(struct job *j, struct err *e)
{
    for (const char *p = j->c.generate.stop; *p != '\0';) {
        size_t n = strcspn(p, "|");
        if (n > 0 && j->n_stops == STOPS_MAX)
            return err_set(e, ST_USAGE, "generate.stop has more than %d texts", STOPS_MAX);
        if (n > 0) {
            j->stop[j->n_stops] = p;
            j->n_stop[j->n_stops++] = n;
            j->longest_stop = n > j->longest_stop ? n : j->longest_stop;
        }
        p += n + (p[n] == '|');
    }
    return ST_OK;
}

/* ---- the text -------------------------------------------------------------------------------- */

static void print_bytes(const char *bytes, size_t n)
{
    fwrite(bytes, 1, n, stdout);
    fflush(stdout);
}

/* A sample alone appears as it is made, one of several when it is complete. */
static void show(const struct job *j, struct sample *s, const char *bytes, size_t n)
{
    if (j->n_samples > 1)
        buf_add_n(&s->text, bytes, n);
    else
        print_bytes(bytes, n);
}

/* Bytes at the end that begin a character which is not complete yet. */
static size_t half_character(const char *text, size_t n)
{
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        uint8_t c = (uint8_t)text[n - back];
        size_t whole = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : c >= 0xC0 ? 2 : 1;
        if ((c & 0xC0) != 0x80)
            return whole > back ? back : 0;
    }
    return 0;
}

/* Prints what cannot be part of a stop text any more. True: a stop text appeared, and nothing after
 * it is printed. */
static bool print_held(struct job *j, struct sample *s, bool last)
{
    size_t from = 0, n = s->held.len, first = n;
    bool found = false;
    for (int i = 0; i < j->n_stops; i++) {
        const char *hit = memmem(s->held.text, n, j->stop[i], j->n_stop[i]);
        if (hit != NULL && (size_t)(hit - s->held.text) <= first) {
            first = (size_t)(hit - s->held.text);
            found = true;
            s->stopped_by = i;
        }
    }
    size_t keep = last || found ? 0 : j->longest_stop > 1 ? j->longest_stop - 1 : 0;
    size_t stop = found ? first : n > keep ? n - keep : 0;
    if (!last && !found)
        stop -= half_character(s->held.text, stop);
    show(j, s, s->held.text, stop);
    from = stop;
    memmove(s->held.text, s->held.text + from, n - from);
    s->held.len = found ? 0 : n - from;
    return found;
}

/* A model of token files may know ids that the tokenizer does not: they are printed as numbers. */
static bool emit(struct job *j, struct sample *s, int32_t id)
{
    uint8_t text[TOKEN_TEXT];
    size_t n = 0;
    struct err unknown = {0};
    const char *name = tokenizer_name(&j->tok, id, &n);
    if (name != NULL && token_is_special(&j->tok, id)) {
        if (j->c.generate.special)
            buf_add_n(&s->held, name, n);
    } else if (tokenizer_decode(&j->tok, id, text, sizeof text, &n, &unknown) == ST_OK) {
        buf_add_n(&s->held, text, n < sizeof text ? n : sizeof text);
    } else {
        if (!j->noted)
            fprintf(stderr, "note: %s (tokenizer '%s'); such tokens are printed as <id>\n", unknown.msg,
                    j->c.data.tokenizer);
        j->noted = true;
        buf_addf(&s->held, "<%d>", (int)id);
    }
    for (; s->lead > 0 && s->held.len > 0; s->lead--) {
        if (s->held.text[0] != ' ') {
            s->lead = 0;
            break;
        }
        memmove(s->held.text, s->held.text + 1, s->held.len--);
    }
    return s->held.len > 0 && print_held(j, s, false);
}

/* Everything that is held, of a sample that has ended. */
static void finish(struct job *j, struct sample *s)
{
    if (s->held.len > 0)
        (void)print_held(j, s, true);
    buf_clear(&s->held);
}

/* The next token of each sample that has not ended, and its text; ids: what the model reads next. Draws depend on seed,
 * number and place alone, so that samples side by side draw what each would alone. */
static int next_tokens(struct job *j, int64_t first, int64_t i, const struct tensor *logits, int32_t *ids,
                       struct err *e)
{
    const struct config_generate *o = &j->c.generate;
    int64_t vocab = j->c.model.vocab;
#pragma omp parallel for schedule(dynamic, 1) if (j->n_samples > 1)
    for (int64_t k = 0; k < j->n_samples; k++) {
        struct sampler draw = {.temperature = o->temperature,
                               .top_k = o->top_k,
                               .top_p = o->top_p,
                               .seed = (uint64_t)(o->seed + first + k)};
        struct tensor row = tensor_rows(logits, k, 1);
        if (!j->samples[k].ended)
            ids[k] = sample_token(&draw, &row, vocab, (uint64_t)i, j->scratch + k * vocab);
    }
    for (int64_t k = 0; k < j->n_samples; k++) {
        struct sample *s = &j->samples[k];
        if (!s->ended)
            s->ended = (ids[k] == j->tok.eod && !o->special) || emit(j, s, ids[k]);
        TRY(buf_check(&s->held, e));
    }
    return ST_OK;
}

static bool all_ended(const struct job *j)
{
    bool all = true;
    for (int64_t k = 0; k < j->n_samples; k++)
        all &= j->samples[k].ended;
    return all;
}

/* Samples first, first + 1, ... of which n are wanted; where that is fewer than fit side by side, the rest has ended.
 * */
static int some_samples(struct job *j, int64_t first, int64_t n, int32_t *ids, struct err *e)
{
    const struct config_generate *o = &j->c.generate;
    bool given = o->prompt[0] != '\0' || o->prompt_file[0] != '\0';
    int64_t length = (int64_t)j->prompt.n;
    struct tensor logits;
    generator_rewind(&j->g);
    for (int64_t k = 0; k < j->n_samples; k++) {
        buf_clear(&j->samples[k].text);
        j->samples[k].ended = k >= n;
        memcpy(ids + k * length, j->prompt.ids, (size_t)length * sizeof *ids);
        if (given)
            show(j, &j->samples[k], j->prompt_text, j->n_prompt_text);
    }
    TRY(generator_feed(&j->g, ids, length, &logits, e));
    for (int64_t i = 0; i < o->tokens && !all_ended(j); i++) {
        TRY(next_tokens(j, first, i, &logits, ids, e));
        if (ferror(stdout))
            return err_errno(e, "cannot write to standard output");
        if (i + 1 < o->tokens && !all_ended(j))
            TRY(generator_feed(&j->g, ids, 1, &logits, e));
    }
    for (int64_t k = 0; k < n; k++)
        finish(j, &j->samples[k]);
    return ST_OK;
}

/* Memory for so many samples side by side. */
static int open_samples(struct job *j, int64_t batch, int64_t tokens, struct err *e)
{
    TRY(mem_array((void **)&j->samples, (size_t)batch, sizeof *j->samples, e));
    j->n_samples = batch;
    for (int64_t k = 0; k < batch; k++) {
        buf_init(&j->samples[k].held, 0);
        buf_init(&j->samples[k].text, 0);
    }
    TRY(mem_array((void **)&j->scratch, (size_t)(batch * j->c.model.vocab), sizeof *j->scratch, e));
    return generator_open(&j->g, &j->c, &j->dev, j->from, (struct generator_size){.batch = batch, .tokens = tokens}, e);
}

static void close_samples(struct job *j)
{
    for (int64_t k = 0; k < j->n_samples; k++) {
        buf_release(&j->samples[k].held);
        buf_release(&j->samples[k].text);
    }
    generator_close(&j->g);
    free(j->samples);
    free(j->scratch);
}

static int print_samples(struct job *j, int64_t first, int64_t n, struct err *e)
{
    for (int64_t k = 0; k < n; k++) {
        const struct buf *text = &j->samples[k].text;
        TRY(buf_check(text, e));
        if (j->n_samples > 1)
            printf("%s--- sample %lld ---\n", first + k > 0 ? "\n" : "", (long long)(first + k) + 1);
        if (text->len > 0)
            print_bytes(text->text, text->len);
        putchar('\n');
    }
    return ST_OK;
}

static int samples(struct job *j, struct err *e)
{
    const struct config_generate *o = &j->c.generate;
    int64_t batch = min_i64(o->batch, o->samples);
    int32_t *ids = NULL;
    TRY(open_samples(j, batch, (int64_t)j->prompt.n + o->tokens, e));
    int st = mem_array((void **)&ids, (size_t)batch * j->prompt.n, sizeof *ids, e);
    for (int64_t k = 0; k < o->samples && st == ST_OK; k += batch) {
        int64_t n = min_i64(batch, o->samples - k);
        if (o->samples > 1 && batch == 1)
            printf("%s--- sample %lld ---\n", k > 0 ? "\n" : "", (long long)k + 1);
        st = some_samples(j, k, n, ids, e);
        if (st == ST_OK)
            st = print_samples(j, k, n, e);
    }
    free(ids);
    return st;
}

/* ---- a conversation -------------------------------------------------------------------------- */

static int begin_conversation(struct job *j, struct err *e)
{
    generator_rewind(&j->g);
    chat_text_clear(&j->text);
    if (j->system == NULL)
        return ST_OK;
    struct chat_message *m = arena_alloc(&j->chat.memory, sizeof *m); /* it may wait for the user's first one */
    if (m == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    *m = (struct chat_message){.role = CHAT_SYSTEM, .text = j->system, .n = strlen(j->system)};
    return chat_text_add(&j->text, &j->chat, m, false, e);
}

static int encode_message(struct job *j, const char *text, size_t n, struct err *e)
{
    struct chat_message m = {.role = CHAT_USER, .text = text, .n = n};
    TRY(chat_text_add(&j->text, &j->chat, &m, false, e));
    TRY(chat_text_ask(&j->text, &j->chat, e));
    j->turn.n = 0;
    TRY(chat_text_encode(&j->text, &j->tok, j->encoder, &j->turn, NULL, e));
    return check_ids(j, &j->turn, e);
}

/* A conversation that has become too long is left behind; a message that is too long alone is an error. */
static int take_message(struct job *j, const char *text, size_t n, struct err *e)
{
    bool fresh = j->g.pos == 0;
    TRY(encode_message(j, text, n, e));
    if (j->g.pos + (int64_t)j->turn.n >= j->length && !fresh) {
        fprintf(
            stderr,
            "note: the conversation has %lld tokens, and at most %lld are remembered (--length): another one begins\n",
            (long long)(j->g.pos + (int64_t)j->turn.n), (long long)j->length);
        TRY(begin_conversation(j, e));
        TRY(encode_message(j, text, n, e));
    }
    if (j->g.pos + (int64_t)j->turn.n < j->length)
        return ST_OK;
    err_set(e, ST_USAGE,
            "the message has %zu tokens with what the template adds; with the reply at most %lld are possible",
            j->turn.n, (long long)j->length);
    return err_hint(e, "--length=N gives more room, where the model can use it");
}

/* Bytes have no stop token: there its text, among the stop texts, ends the reply. */
static int reply(struct job *j, struct err *e)
{
    const struct config_generate *o = &j->c.generate;
    struct sampler s = {.temperature = o->temperature, .top_k = o->top_k, .top_p = o->top_p, .seed = (uint64_t)o->seed};
    struct sample *text = &j->samples[0];
    struct tensor logits;
    int64_t room = min_i64(o->tokens, j->length - j->g.pos - (int64_t)j->turn.n);
    bool ended = false, cut = false; /* as the template says, or otherwise */
    text->lead = strcspn(j->chat.assistant + strlen(j->chat.generation), "{");
    TRY(generator_feed(&j->g, j->turn.ids, (int64_t)j->turn.n, &logits, e));
    for (int64_t i = 0; i < room && !ended && !cut; i++) {
        int32_t id = sample_token(&s, &logits, j->c.model.vocab, (uint64_t)j->drawn++, j->scratch);
        if (id == j->chat.stop_id)
            ended = true;
        else if (id == j->tok.eod && !o->special)
            cut = true;
        else if (emit(j, text, id))
            *(j->stop[text->stopped_by] == j->chat.stop ? &ended : &cut) = true;
        TRY(buf_check(&text->held, e));
        if (ferror(stdout))
            return err_errno(e, "cannot write to standard output");
        if (!cut)
            TRY(generator_feed(&j->g, &id, 1, &logits, e));
    }
    finish(j, text);
    putchar('\n');
    fflush(stdout);
    return chat_text_replied(&j->text, &j->chat, ended, e);
}

static int converse(struct job *j, struct err *e)
{
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    int st = ST_OK;
    bool person = isatty(STDIN_FILENO);
    while (st == ST_OK) {
        if (person)
            fputs("> ", stderr);
        if ((n = getline(&line, &cap, stdin)) < 0)
            break;
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r'))
            line[--n] = '\0';
        if (strcmp(line, "/exit") == 0)
            break;
        if (strcmp(line, "/new") == 0) {
            st = begin_conversation(j, e);
        } else if (n > 0) {
            st = take_message(j, line, (size_t)n, e);
            if (st == ST_OK)
                st = reply(j, e);
        }
    }
    if (st == ST_OK && ferror(stdin))
        st = err_errno(e, "cannot read standard input");
    free(line);
    return st;
}

static int talk(struct job *j, struct err *e)
{
    const struct config_generate *o = &j->c.generate;
    TRY(chat_for(&j->c, &j->tok, &j->chat, e));
    if (j->chat.stop_id < 0 && j->n_stops < STOPS_MAX) {
        j->stop[j->n_stops] = j->chat.stop;
        j->n_stop[j->n_stops] = strlen(j->chat.stop);
        j->longest_stop = j->n_stop[j->n_stops] > j->longest_stop ? j->n_stop[j->n_stops] : j->longest_stop;
        j->n_stops++;
    }
    if (o->samples != 1 || o->batch != 1)
        return err_set(e, ST_USAGE,
                       "--chat=on has one conversation: generate.samples=%lld and generate.batch=%lld have no meaning",
                       (long long)o->samples, (long long)o->batch);
    TRY(token_encoder_open(&j->encoder, &j->tok, e));
    TRY(open_samples(j, 1, j->length, e));
    TRY(begin_conversation(j, e));
    if (o->prompt[0] == '\0' && o->prompt_file[0] == '\0')
        return converse(j, e);
    TRY(read_prompt(j, e));
    TRY(take_message(j, j->prompt_text, j->n_prompt_text, e));
    return reply(j, e);
}

static int run(struct job *j, int argc, char **argv, struct err *e)
{
    enum { CHAT, SYSTEM, LENGTH };
    struct config_extra x[] = {[CHAT] = {.name = "chat"}, [SYSTEM] = {.name = "system"}, [LENGTH] = {.name = "length"}};
    struct config_args args = {.extra = x, .n_extra = countof(x)};
    bool chat = false;
    TRY(cmd_config(&j->c, argc, argv, &args, e));
    TRY(cmd_words(&args, 1, e));
    TRY(cmd_open_checkpoint(&j->c, &args, &j->from, e));
    TRY(cmd_finish(&j->c, e));
    TRY(cmd_refuse_weights(&j->c, "braid generate", e));
    cmd_say_unread(&j->c, "generate");
    TRY(tokenizer_for(&j->c, &j->tok, e));
    if (x[CHAT].value != NULL && !parse_bool(x[CHAT].value, &chat)) {
        err_set(e, ST_USAGE, "--chat=%s is neither on nor off", x[CHAT].value);
        return err_hint(e, "--data.chat=NAME chooses another template than that of the training data");
    }
    if (!chat && (x[SYSTEM].value != NULL || x[LENGTH].value != NULL))
        return err_set(e, ST_USAGE, "--system and --length belong to --chat=on");
    j->system = x[SYSTEM].value;
    TRY(split_stops(j, e));
    if (!chat) {
        TRY(read_prompt(j, e));
        TRY(encode_prompt(j, e));
    } else {
        TRY(cmd_length(&j->c, x[LENGTH].value, &j->length, e));
    }
    TRY(device_open(&j->dev, &j->c, e));
    return chat ? talk(j, e) : samples(j, e);
}

int cmd_generate(int argc, char **argv)
{
    if (cmd_wants_help(argc, argv, usage, own_options))
        return 0;
    struct job j = {0};
    struct err e = {0};
    chat_text_init(&j.text);
    int code = cmd_exit(run(&j, argc, argv, &e), &e);
    close_samples(&j);
    token_encoder_close(j.encoder);
    chat_text_release(&j.text);
    chat_template_close(&j.chat);
    free(j.turn.ids);
    tokenizer_close(&j.tok);
    ckpt_close(j.from);
    dev_close(&j.dev);
    config_release(&j.c);
    free(j.prompt.ids);
    free(j.prompt_text);
    return code;
}
