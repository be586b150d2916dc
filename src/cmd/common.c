/* What commands share: reading options, help, checkpoints, exit codes. */
#include "cmd/cmd.h"

#include <stdlib.h>
#include <string.h>

int cmd_exit(int status, const struct err *e)
{
    if (status == ST_OK)
        return 0;
    if (e->code == ST_OK) /* world_finish has reported it */
        return status == ST_INTERRUPTED ? 130 : status == ST_USAGE ? 2 : 1;
    if (status == ST_INTERRUPTED) {
        fprintf(stderr, "braid: %s\n", e->msg);
        if (e->hint[0])
            fprintf(stderr, "  hint: %s\n", e->hint);
        return 130;
    }
    err_print(e, stderr);
    return status == ST_USAGE ? 2 : 1;
}

int cmd_explain(const char *word)
{
    struct buf out;
    struct err e = {0};
    int st = ST_OK;
    buf_init(&out, 0);
    if (strcmp(word, "all") == 0 || strcmp(word, "options") == 0)
        config_help(&out, NULL);
    else if (config_has_section(word))
        config_help(&out, word);
    else
        st = config_help_word(&out, word, &e);
    if (st == ST_OK && out.text != NULL)
        fputs(out.text, stdout);
    buf_release(&out);
    return cmd_exit(st, &e);
}

static void list_options(const char *argv0, const char *options)
{
    struct buf out;
    buf_init(&out, 0);
    config_help_list(&out, options);
    printf("\noptions it is most often given, in FILE.ini or here:\n%s\nbraid %s --help=all explains all options, "
           "--help=train a section, "
           "braid help lr one option\n",
           out.text ? out.text : "", argv0);
    buf_release(&out);
}

bool cmd_wants_help(int argc, char **argv, const char *usage, const char *options)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        bool plain = strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0,
             word = str_starts(argv[i], "--help=");
        if (!plain && !word)
            continue;
        fputs(usage, stdout);
        if (options != NULL && word) {
            putchar('\n');
            cmd_explain(argv[i] + strlen("--help="));
        } else if (options != NULL) {
            list_options(argv[0], options);
        }
        return true;
    }
    return false;
}

int cmd_config(struct config *c, int argc, char **argv, struct config_args *args, struct err *e)
{
    TRY(config_init(c, e));
    TRY(config_parse_args(c, argc - 1, argv + 1, args, e));
    for (int i = 0; i < args->n_notes && !c->run.quiet; i++)
        fprintf(stderr, "note: --%s has no effect: %s\n", args->notes[i].flag, args->notes[i].text);
    return ST_OK;
}

int cmd_words(const struct config_args *args, int most, struct err *e)
{
    if (args->n_positional <= most)
        return ST_OK;
    const char *word = args->positional[most];
    err_set(e, ST_USAGE, "unexpected word '%s'", word);
    static const char *const other[] = {".yaml", ".yml", ".json", ".toml", ".cfg", ".conf", ".py", ".sh"};
    for (int i = 0; i < countof(other); i++)
        if (str_ends(word, other[i]))
            return err_hint(e, "options are read from INI files, FILE.ini: [section] and key = value; `braid help "
                               "options` lists them");
    if (file_is_dir(word) && most == 0)
        return err_hint(e, "a run folder is an option: --run.dir=%s starts the run there, or continues it", word);
    if (file_exists(word) && most == 0)
        return err_hint(e, "data is an option: --data.train=%s; a config file ends in .ini", word);
    return err_hint(e, "options are written --section.key=value; add --help to see what this command takes");
}

int cmd_finish(struct config *c, struct err *e) { return config_complete(c, e); }

int cmd_take_weights(struct model *m, struct err *e)
{
    struct err note = {0};
    TRY(load_weights(m, m->cfg->run.load_weights, m->cfg->run.load_allow, &note, e));
    if (note.msg[0] != '\0' && m->mesh.rank == 0)
        fprintf(stderr, "note: %s\n", note.msg);
    return ST_OK;
}

int cmd_refuse_weights(const struct config *c, const char *command, struct err *e)
{
    if (c->run.load_weights[0] == '\0')
        return ST_OK;
    err_set(e, ST_USAGE, "run.load_weights = %.200s: %s does not read it", c->run.load_weights, command);
    return err_hint(e, "`braid train` and `braid grads` do; `braid ckpt convert` makes a checkpoint of a file");
}

void cmd_say_unused(const struct config *c)
{
    struct buf lines;
    buf_init(&lines, 0);
    if (!c->run.quiet && config_unused(c, &lines) > 0 && lines.text != NULL)
        for (const char *line = lines.text; *line != '\0'; line += strcspn(line, "\n") + 1)
            fprintf(stderr, "note: %.*s\n", (int)strcspn(line, "\n"), line);
    buf_release(&lines);
}

void cmd_say_unread(const struct config *c, const char *command)
{
    static const char training[] =
        "train.steps train.global_batch train.lr train.min_lr train.warmup train.schedule train.decay_steps "
        "train.wsd_* train.beta* train.eps train.weight_decay train.clip train.nonfinite* train.log_* "
        "train.eval_every run.resume run.save_* run.async_save run.keep run.minutes run.tensorboard run.report "
        "run.sample_tokens optim.* parallel.*";
    struct buf names;
    buf_init(&names, 0);
    if (!c->run.quiet && config_given(c, training, &names) > 0 && names.text != NULL)
        for (const char *name = names.text; *name != '\0'; name += strcspn(name, "\n") + 1)
            fprintf(stderr, "note: %.*s (command line) has no effect: braid %s does not train\n",
                    (int)strcspn(name, "\n"), name, command);
    buf_release(&names);
}

int cmd_open_checkpoint(struct config *c, const struct config_args *args, struct ckpt **out, struct err *e)
{
    const char *path = args->n_positional > 0 ? args->positional[0] : c->run.load[0] ? c->run.load : c->run.dir;
    if (path[0] == '\0' && args->ini != NULL) {
        err_set(e, ST_USAGE, "%s holds options, not a trained model", args->ini);
        return err_hint(
            e, "give a run folder or a checkpoint folder in its place; `braid train %s --run.dir=DIR` makes one",
            args->ini);
    }
    if (path[0] == '\0') {
        err_set(e, ST_USAGE, "no checkpoint was named");
        return err_hint(e, "give a run folder or a checkpoint folder as the first word");
    }
    if (c->run.load_step >= 0)
        TRY(ckpt_open_intact(out, path, c->run.load_step, NULL, e));
    else
        TRY(ckpt_open(out, path, e));
    const char *text = ckpt_config_text(*out);
    if (text[0] == '\0') {
        err_set(e, ST_CORRUPT, "checkpoint %s holds no configuration", ckpt_path(*out));
        return err_hint(e, "it was not written by braid train; `braid ckpt ls` shows what it is");
    }
    TRY(config_load_saved(c, text, strlen(text), ckpt_path(*out), CFG_SAVED_MODEL, NULL, e));
    return tokenizer_of_checkpoint(c, *out, false, e);
}

/* A folder where an earlier command failed or was killed: nothing but an empty checkpoints/, temporary folders in it, a
 * lock. */
static bool only_leftovers(const char *dst)
{
    char **names = NULL, *inside = path_join(dst, "checkpoints");
    int n = 0;
    bool only = inside != NULL && file_list_dir(dst, &names, &n, NULL) == ST_OK;
    for (int i = 0; i < n; i++)
        only = only && (strcmp(names[i], "checkpoints") == 0 || strcmp(names[i], "lock") == 0);
    file_free_list(names, n);
    names = NULL;
    n = 0;
    if (only && file_is_dir(inside))
        only = file_list_dir(inside, &names, &n, NULL) == ST_OK;
    for (int i = 0; i < n; i++)
        only = only && strstr(names[i], ".tmp-") != NULL;
    file_free_list(names, n);
    free(inside);
    return only;
}

int cmd_free_name(const char *path, bool *is_free, struct err *e)
{
    bool exists = false;
    TRY(file_lookup(path, &exists, e));
    *is_free = !exists || only_leftovers(path);
    return ST_OK;
}

int cmd_length(const struct config *c, const char *given, int64_t *out, struct err *e)
{
    *out = c->train.seq;
    if (given != NULL && (!parse_i64(given, out) || *out < 2 || *out > 16777216))
        return err_set(e, ST_USAGE, "--length=%s is no number of tokens from 2 to 16777216", given);
    *out = max_i64(*out, 2);
    return ST_OK;
}
