/* `braid ckpt merge`: a checkpoint with LoRA adapters becomes one without, whose weights have them added. */
#include "cmd/cmd.h"
#include "train/interop.h"

#include <string.h>

static int merge(struct config *c, const struct ckpt *from, const char *dst, struct err *e)
{
    struct tokenizer tok = {.eod = -1};
    struct ckpt_file files[CKPT_MAX_FILES];
    int n_files = 0, st;
    TRY(tokenizer_of_checkpoint(c, from, false, e));
    TRY(config_complete(c, e));
    TRY(tokenizer_for(c, &tok, e));
    TRY_OUT(tokenizer_pack(&tok, files, &n_files, e));
    st = merge_checkpoint(from, c, files, n_files, dst, e);
    if (st == ST_OK)
        printf("merged %s: %s\n", ckpt_path(from), dst);
out:
    tokenizer_unpack(files, n_files);
    tokenizer_close(&tok);
    return st;
}

int ckpt_merge(int argc, char **argv, struct err *e)
{
    struct ckpt *from = NULL;
    struct config c;
    bool is_free;
    if (argc != 2 || str_starts(argv[0], "--") || str_starts(argv[1], "--"))
        return err_hint((err_set(e, ST_USAGE, "ckpt merge takes a checkpoint and a folder to write"), e),
                        "braid ckpt merge RUN NEW");
    TRY(cmd_free_name(argv[1], &is_free, e));
    if (!is_free)
        return err_hint((err_set(e, ST_CONFLICT, "%s is there already", argv[1]), e),
                        "name a new folder; nothing is replaced");
    TRY(config_init(&c, e));
    int st = ckpt_open(&from, argv[0], e);
    if (st == ST_OK) {
        const char *text = ckpt_config_text(from);
        st = config_load_saved(&c, text, strlen(text), ckpt_path(from), CFG_SAVED_MODEL, NULL, e);
    }
    if (st == ST_OK)
        st = merge(&c, from, argv[1], e);
    ckpt_close(from);
    config_release(&c);
    return st;
}
