/* The chat template of a run: opened, and carried by its checkpoints. */
#include "train/text_int.h"

#include <stdlib.h>
#include <string.h>

int chat_for(const struct config *cfg, const struct tokenizer *tok, struct chat_template *chat, struct err *e)
{
    if (cfg->data.chat[0] != '\0')
        return chat_template_open(chat, cfg->data.chat, tok, e);
    err_set(e, ST_INVALID, "the model has no chat template: data.chat is not set");
    return err_hint(e, "--data.chat=NAME names the one it was trained with; auto takes it from the tokenizer's folder");
}

int chat_pack(const struct config *cfg, struct ckpt_file files[CKPT_MAX_FILES], int *n, struct err *e)
{
    const char *name = cfg->data.chat;
    if (name[0] == '\0' || chat_template_known(name))
        return ST_OK;
    return pack_file(name, CHAT_FILE, files, n, e);
}

int chat_of_checkpoint(struct config *c, const struct ckpt *from, bool keep_path, struct err *e)
{
    const char *name = c->data.chat;
    enum config_source source = config_source_of(c, "data.chat").source;
    if (name[0] == '\0' || chat_template_known(name) || source == CFG_FROM_FILE || source == CFG_FROM_COMMAND ||
        (keep_path && file_exists(name)))
        return ST_OK;
    char *path = path_join(ckpt_path(from), CHAT_FILE);
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    int st = file_exists(path) ? config_set(c, "data.chat", path, NULL, e) : ST_OK;
    free(path);
    return st;
}
