/* What a run has to do with text: its tokenizer, the copy of it in checkpoints, and text that is
 * tokenised first. */
#include "train/train.h"

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

/* ---- in checkpoints
 * --------------------------------------------------------------------------------------------- */

enum { TOKENIZER_FILE_MAX = 256 << 20 };

/* Under these names a checkpoint holds the files, by what tokenizer_kind says; the GPT-2 pair must
 * keep its names. */
static const char *const carried[] = {"tokenizer.json", "tokenizer.tiktoken", "tekken.json",
                                      "encoder.json", "vocab.bpe"};

static const char *carried_name(const struct tokenizer *tok, int i)
{
    const char *kind = tokenizer_kind(tok);
    if (tokenizer_n_files(tok) == 2)
        return carried[3 + i];
    return carried[strcmp(kind, "tokenizer.json") == 0 ? 0 : strcmp(kind, "tiktoken") == 0 ? 1 : 2];
}

int tokenizer_pack(const struct tokenizer *tok, struct ckpt_file files[2], int *n, struct err *e)
{
    *n = 0;
    for (int i = 0; i < tokenizer_n_files(tok); i++) {
        char *bytes;
        TRY(file_read(tokenizer_file(tok, i), TOKENIZER_FILE_MAX, &bytes, &files[*n].n, e));
        files[*n].name = carried_name(tok, i);
        files[(*n)++].bytes = bytes;
    }
    return ST_OK;
}

void tokenizer_unpack(struct ckpt_file files[2], int n)
{
    for (int i = 0; i < n; i++)
        free((void *)(uintptr_t)files[i].bytes);
}

int tokenizer_of_checkpoint(struct config *c, const struct ckpt *from, bool keep_path,
                            struct err *e)
{
    enum config_source source = config_source_of(c, "data.tokenizer").source;
    bool given = source == CFG_FROM_FILE || source == CFG_FROM_COMMAND;
    if (given || strcmp(c->data.tokenizer, "bytes") == 0 ||
        (keep_path && file_exists(c->data.tokenizer)))
        return ST_OK;
    for (int i = 0; i < 4; i++) {
        char *path = path_join(ckpt_path(from), carried[i]);
        if (path == NULL)
            return err_set(e, ST_NOMEM, "out of memory");
        bool found = file_exists(path);
        int st = found ? config_set(c, "data.tokenizer", path, NULL, e) : ST_OK;
        free(path);
        if (found || st != ST_OK)
            return st;
    }
    return ST_OK;
}

/* ---- text as data
 * ---------------------------------------------------------------------------------------------------
 */

static void note(void *ctx, const char *line)
{
    const struct trainer *t = ctx;
    if (trainer_speaks(t) && !t->cfg->run.quiet)
        fprintf(stderr, "%s\n", line);
}

int text_options(struct trainer *t, struct data_opts *o, struct err *e)
{
    const struct config *c = t->cfg;
    if (c->run.dir[0] != '\0' && t->token_dir == NULL &&
        (t->token_dir = path_join(c->run.dir, "tokens")) == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    o->cache_dir = t->token_dir;
    o->tokenizer_name = c->data.tokenizer;
    o->field = c->data.field;
    o->threads = (int)c->run.threads;
    o->note = note;
    o->note_ctx = t;
    return ST_OK;
}
