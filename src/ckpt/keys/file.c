/* The tensors of a checkpoint or of a single safetensors file as one list, each in its space:
 * model, or one of the optimizer's states under the same keys. */
#include "ckpt/keys/keys_int.h"

#include <stdlib.h>
#include <string.h>

static const char *const space_names[KEYS_SPACES] = {"model", "exp_avg", "exp_avg_sq", "fp32_param"};

const char *key_space_name(enum key_space s) { return space_names[s]; }

/* exp_avg.<key>, as braid writes it, or Megatron's optimizer.state.exp_avg.<key>; where experts have an optimizer of
 * their own, chained_0. and chained_1. stand in front. */
static enum key_space space_of(const char *stored, const char **key)
{
    const char *rest = stored;
    if (str_starts(rest, "chained_")) {
        size_t digits = strspn(rest + strlen("chained_"), "0123456789");
        const char *behind = rest + strlen("chained_") + digits;
        rest = digits > 0 && str_starts(behind, ".optimizer.") ? behind + 1 : rest;
    }
    *key = rest;
    if (str_starts(rest, "optimizer.state."))
        rest += strlen("optimizer.state.");
    for (int s = KEYS_EXP_AVG; s < KEYS_SPACES; s++) {
        size_t n = strlen(space_names[s]);
        if (strncmp(rest, space_names[s], n) == 0 && rest[n] == '.') {
            *key = rest + n + 1;
            return (enum key_space)s;
        }
    }
    return KEYS_MODEL;
}

static void add(struct key_file *f, const char *stored, const struct tensor *view)
{
    const char *key;
    enum key_space space = space_of(stored, &key);
    f->list[f->n++] = (struct key_tensor){.key = key, .stored = stored, .view = *view, .space = space};
}

int key_file_from(struct key_file *f, const struct ckpt *c, struct err *e)
{
    *f = (struct key_file){.label = ckpt_path(c)};
    TRY(mem_array((void **)&f->list, (size_t)ckpt_count(c), sizeof *f->list, e));
    for (int i = 0; i < ckpt_count(c); i++) {
        struct ckpt_tensor t = ckpt_at(c, i);
        add(f, t.key, &t.view);
    }
    return ST_OK;
}

/* The tensors of files 0 .. n - 1; the first file says which gate rows lie where. */
static int list_files(struct key_file *f, const char *path, int n, struct err *e)
{
    int count = 0;
    for (int k = 0; k < n; k++)
        count += st_count(f->files[k]);
    f->label = arena_strdup(&f->memory, path);
    if (f->label == NULL)
        return err_set(e, ST_NOMEM, "out of memory opening %s", path);
    TRY(mem_array((void **)&f->list, (size_t)count, sizeof *f->list, e));
    TRY(glu_parse(path, st_metadata(f->files[0], KEY_GLU_INTERLEAVE), &f->glu_interleave, e));
    for (int k = 0; k < n; k++)
        for (int i = 0; i < st_count(f->files[k]); i++)
            add(f, st_entry(f->files[k], i)->name, &st_entry(f->files[k], i)->view);
    return ST_OK;
}

/* megatron.json says what the folder is. */
static int open_megatron(struct key_file *f, const char *path, struct err *e)
{
    char *model = arena_printf(&f->memory, "%s/model.safetensors", path);
    char *optimizer = arena_printf(&f->memory, "%s/optimizer.safetensors", path);
    if (model == NULL || optimizer == NULL)
        return err_set(e, ST_NOMEM, "out of memory opening %s", path);
    TRY(st_open(&f->files[0], model, e));
    if (file_exists(optimizer))
        TRY(st_open(&f->files[1], optimizer, e));
    return list_files(f, path, f->files[1] != NULL ? 2 : 1, e);
}

static bool is_megatron(const char *path)
{
    char *mark = path_join(path, "megatron.json");
    bool is = mark != NULL && file_exists(mark);
    free(mark);
    return is;
}

int key_file_open(struct key_file *f, const char *path, struct err *e)
{
    struct ckpt *c;
    int st;
    *f = (struct key_file){0};
    arena_init(&f->memory);
    if (is_megatron(path)) {
        st = open_megatron(f, path, e);
    } else if (!file_exists(path) || file_is_dir(path)) {
        TRY(ckpt_open(&c, path, e));
        st = key_file_from(f, c, e);
        f->ckpt = c;
    } else {
        TRY(st_open(&f->files[0], path, e));
        st = list_files(f, path, 1, e);
    }
    if (st != ST_OK)
        key_file_close(f);
    return st;
}

void key_file_close(struct key_file *f)
{
    free(f->list);
    ckpt_close(f->ckpt);
    st_close(f->files[0]);
    st_close(f->files[1]);
    arena_release(&f->memory);
    *f = (struct key_file){0};
}
