/* What a run has to do with text: its tokenizer, the copy of it in checkpoints, and text that is
 * tokenised first. */
#include "train/text_int.h"

#include <stdlib.h>
#include <string.h>

int tokenizer_for(const struct config *cfg, struct tokenizer *tok, struct err *e)
{
    struct tokenizer_opts o = {.name = cfg->data.tokenizer,
                               .eod = cfg->data.eod,
                               .eod_token = cfg->data.eod_token,
                               .pattern = cfg->data.token_pattern,
                               .special = cfg->data.token_special};
    return tokenizer_open_opts(tok, &o, e);
}

/* ---- in checkpoints -------------------------------------------------------------------------- */

enum { TOKENIZER_FILE_MAX = 256 << 20 };

/* Under these names a checkpoint holds the files, by what tokenizer_kind says; the GPT-2 pair must
 * keep its names. What programs of Hugging Face keep beside a tokenizer goes with it. */
static const char *const carried[] = {"tokenizer.json", "tokenizer.tiktoken", "tekken.json", "encoder.json",
                                      "vocab.bpe"};
static const char *const companions[] = {"tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                                         CHAT_FILE};
_Static_assert(2 + countof(companions) <= CKPT_MAX_FILES, "a checkpoint carries the pair of GPT-2 and every companion");

int tokenizer_n_carried(void) { return countof(carried) + countof(companions); }
const char *tokenizer_carried(int i) { return i < countof(carried) ? carried[i] : companions[i - countof(carried)]; }

static const char *carried_name(const struct tokenizer *tok, int i)
{
    const char *kind = tokenizer_kind(tok);
    if (tokenizer_n_files(tok) == 2)
        return carried[3 + i];
    return carried[strcmp(kind, "tokenizer.json") == 0 ? 0 : strcmp(kind, "tiktoken") == 0 ? 1 : 2];
}

int pack_file(const char *path, const char *name, struct ckpt_file *files, int *n, struct err *e)
{
    char *bytes;
    TRY(file_read(path, TOKENIZER_FILE_MAX, &bytes, &files[*n].n, e));
    files[*n].name = name;
    files[(*n)++].bytes = bytes;
    return ST_OK;
}

int tokenizer_pack(const struct tokenizer *tok, struct ckpt_file files[CKPT_MAX_FILES], int *n, struct err *e)
{
    *n = 0;
    for (int i = 0; i < tokenizer_n_files(tok); i++)
        TRY(pack_file(tokenizer_file(tok, i), carried_name(tok, i), files, n, e));
    if (*n == 0)
        return ST_OK;
    const char *first = tokenizer_file(tok, 0), *slash = strrchr(first, '/');
    int st = ST_OK;
    for (int i = 0; st == ST_OK && i < countof(companions) - 1; i++) { /* CHAT_FILE: chat_pack */
        struct buf path;
        buf_init(&path, 0);
        buf_addf(&path, "%.*s%s", slash != NULL ? (int)(slash - first + 1) : 0, first, companions[i]);
        st = buf_check(&path, e);
        if (st == ST_OK && file_exists(path.text) && !file_is_dir(path.text))
            st = pack_file(path.text, companions[i], files, n, e);
        buf_release(&path);
    }
    return st;
}

void tokenizer_unpack(struct ckpt_file files[CKPT_MAX_FILES], int n)
{
    for (int i = 0; i < n; i++)
        free((void *)(uintptr_t)files[i].bytes);
}

/* The path of the tokenizer that a checkpoint carries; NULL and ST_OK: none. Free it. */
static int carried_path(const struct ckpt *from, char **out, struct err *e)
{
    for (int i = 0; i < 4; i++) {
        *out = path_join(ckpt_path(from), carried[i]);
        if (*out == NULL)
            return err_set(e, ST_NOMEM, "out of memory");
        if (file_exists(*out))
            return ST_OK;
        free(*out);
        *out = NULL;
    }
    return ST_OK;
}

int tokenizer_of_checkpoint(struct config *c, const struct ckpt *from, bool keep_path, struct err *e)
{
    TRY(chat_of_checkpoint(c, from, keep_path, e));
    enum config_source source = config_source_of(c, "data.tokenizer").source;
    bool given = source == CFG_FROM_FILE || source == CFG_FROM_COMMAND;
    if (given || strcmp(c->data.tokenizer, "bytes") == 0 || (keep_path && file_exists(c->data.tokenizer)))
        return ST_OK;
    char *path;
    TRY(carried_path(from, &path, e));
    int st = path != NULL ? config_set(c, "data.tokenizer", path, NULL, e) : ST_OK;
    free(path);
    return st;
}

int tokenizer_check_resume(const struct config *c, const struct ckpt *from, struct err *e)
{
    char *path;
    struct tokenizer mine = {.eod = -1}, theirs;
    TRY(carried_path(from, &path, e));
    if (path == NULL || strcmp(path, c->data.tokenizer) == 0) {
        free(path);
        return ST_OK;
    }
    struct tokenizer_opts o = {.name = path, .pattern = c->data.token_pattern, .special = c->data.token_special};
    int st = tokenizer_open_opts(&theirs, &o, e);
    if (st == ST_OK) {
        o.name = c->data.tokenizer;
        st = tokenizer_open_opts(&mine, &o, e);
        if (st == ST_OK && mine.hash != theirs.hash) {
            err_set(e, ST_CONFLICT, "data.tokenizer=%s is not the tokenizer that %s was trained with",
                    c->data.tokenizer, ckpt_path(from));
            st = err_hint(e, "continue with the one in the checkpoint: %s", path);
        }
        tokenizer_close(&mine);
        tokenizer_close(&theirs);
    }
    free(path);
    return st;
}

/* ---- text as data ---------------------------------------------------------------------------- */

static void note(void *ctx, const char *line)
{
    const struct trainer *t = ctx;
    if (trainer_is_rank0(t) && !t->cfg->run.quiet)
        fprintf(stderr, "%s\n", line);
}

int text_options(struct trainer *t, struct data_opts *o, struct err *e)
{
    const struct config *c = t->cfg;
    if (c->run.dir[0] != '\0' && t->token_dir == NULL && (t->token_dir = path_join(c->run.dir, "tokens")) == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    o->cache_dir = t->token_dir;
    o->tokenizer_name = c->data.tokenizer;
    o->field = c->data.field;
    o->chat = c->data.chat[0] != '\0' ? &t->chat : NULL;
    o->loss_roles = c->data.loss_roles;
    o->threads = (int)c->run.threads;
    o->note = note;
    o->note_ctx = t;
    return ST_OK;
}
