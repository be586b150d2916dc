/* Writing LoRA adapters for PEFT. Which module an adapter belongs to, and in which order the rows of its second matrix
 * are, follows from the family's rules for the weight: rows of the matrix go where rows of the weight would. */
#include "hf/peft.h"
#include "hf/out_int.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct peft_writer {
    const struct peft_export *x;
    struct hf_out out; /* names and rows of the weights' tensors */
    struct arena memory;
    struct st_item *items;
    json_t *modules;
    int n_items;
    bool transposed;
};

static void *own(struct peft_writer *w, int64_t n, size_t size, struct err *e)
{
    void *p = arena_alloc(&w->memory, (size_t)max_i64(n, 1) * size);
    if (p == NULL)
        err_set(e, ST_NOMEM, "out of memory for adapters");
    return p;
}

static int add_item(struct peft_writer *w, const char *module, const char *which, int64_t rows, int64_t cols,
                    const float *values, struct err *e)
{
    struct tensor wide = tensor_2d((void *)(uintptr_t)values, DT_F32, rows, cols), host = wide;
    host.dtype = w->x->dtype;
    host.data = own(w, rows * cols, dtype_bytes(host.dtype), e);
    const char *name = arena_printf(&w->memory, "base_model.model.%s.lora_%s.weight", module, which);
    if (host.data == NULL || name == NULL)
        return err_set(e, ST_NOMEM, "out of memory for adapters");
    tensor_convert(&host, &wide);
    w->items[w->n_items++] = (struct st_item){.name = name, .host = host};
    return ST_OK;
}

/* The part that all rows of a tensor belong to; -1: none of them has an adapter. */
static int part_of_tensor(struct peft_writer *w, const struct hf_out_tensor *t, const struct peft_adapter *a, int *part,
                          struct err *e)
{
    const struct hf_folder *f = &w->out.links;
    int64_t rows = 0;
    float *found = NULL;
    for (int i = t->first; i < t->end; i++) {
        const struct hf_link *l = &f->links[i];
        struct hf_span s;
        TRY(hf_span_of(l->rule, l->part, &f->config->model, a->rows, &s, e));
        if (found == NULL) {
            rows = s.total;
            if ((found = own(w, rows, sizeof *found, e)) == NULL)
                return e->code;
            for (int64_t r = 0; r < rows; r++)
                found[r] = -2; /* of no weight of ours */
        }
        if (f->params[l->param]->key != a->key)
            return err_set(e, ST_UNSUPPORTED, "%s is made of several of our weights: PEFT cannot hold their adapters",
                           t->name);
        hf_copy_out(&s, 1, false, 0, a->part_of, found);
    }
    *part = rows > 0 ? (int)found[0] : -1;
    for (int64_t r = 0; r < rows; r++)
        if ((int)found[r] != *part || *part == -2)
            return err_set(e, ST_UNSUPPORTED,
                           "%s has rows of several of our adapters, or of none: PEFT has one for a module", t->name);
    return ST_OK;
}

static int add_tensor(struct peft_writer *w, const struct hf_out_tensor *t, struct err *e)
{
    const struct hf_folder *f = &w->out.links;
    const struct hf_link *first = &f->links[t->first];
    const struct peft_adapter *a = &w->x->list[first->param];
    int64_t rank = w->x->config->lora.rank, total = 0;
    float *up = NULL;
    int part = -1;
    TRY(part_of_tensor(w, t, a, &part, e));
    if (part < 0)
        return ST_OK;
    for (int i = t->first; i < t->end; i++) {
        struct hf_span s;
        TRY(hf_span_of(f->links[i].rule, f->links[i].part, &f->config->model, a->rows, &s, e));
        total = s.total;
        if (up == NULL && (up = own(w, total * rank, sizeof *up, e)) == NULL)
            return e->code;
        hf_copy_out(&s, rank, false, 0, a->up, up);
    }
    w->transposed |= (first->rule->flags & HF_TRANSPOSED) != 0;
    char *module = arena_strdup(&w->memory, t->name);
    if (module == NULL)
        return err_set(e, ST_NOMEM, "out of memory for adapters");
    if (str_ends(module, ".weight"))
        module[strlen(module) - strlen(".weight")] = '\0';
    TRY(add_item(w, module, "A", rank, a->in, a->down[part], e));
    TRY(add_item(w, module, "B", total, rank, up, e));
    return json_array_append_new(w->modules, json_string(module)) == 0
               ? ST_OK
               : err_set(e, ST_NOMEM, "out of memory for adapters");
}

static int write_config(const struct peft_writer *w, const char *dir, struct err *e)
{
    const struct config_lora *c = &w->x->config->lora;
    json_t *j =
        json_pack("{s:s, s:s, s:s?, s:I, s:f, s:f, s:O, s:s, s:b, s:b, s:b, s:n}", "peft_type", "LORA", "task_type",
                  "CAUSAL_LM", "base_model_name_or_path", w->x->base, "r", (json_int_t)c->rank, "lora_alpha", c->alpha,
                  "lora_dropout", 0.0, "target_modules", w->modules, "bias", "none", "fan_in_fan_out",
                  (int)w->transposed, "inference_mode", 1, "init_lora_weights", 1, "modules_to_save");
    int st = hf_write_json(dir, "adapter_config.json", j, e);
    json_decref(j);
    return st;
}

static int write_folder(struct peft_writer *w, const char *dir, struct err *e)
{
    static const struct st_meta meta[] = {{"format", "pt"}};
    char *path = path_join(dir, "adapter_model.safetensors");
    int st = path ? st_write_file(path, w->items, w->n_items, meta, countof(meta), e)
                  : err_set(e, ST_NOMEM, "out of memory");
    free(path);
    TRY(st);
    TRY(write_config(w, dir, e));
    TRY(file_sync_dir(dir, e));
    if (rename(dir, w->x->path) != 0)
        return err_errno(e, "cannot rename %s to %s", dir, w->x->path);
    return file_sync_parent(w->x->path, e);
}

/* The tensors of the weights, as if adapters were weights with `rank` inputs. */
static int list_items(struct peft_writer *w, const struct hf_family *fam, struct hf_export *as, struct err *e)
{
    const struct peft_export *x = w->x;
    struct param *fakes = own(w, x->n, sizeof *fakes, e);
    const struct param **list = own(w, x->n, sizeof *list, e);
    if (fakes == NULL || list == NULL)
        return e->code;
    for (int i = 0; i < x->n; i++) {
        fakes[i] = (struct param){.key = x->list[i].key, .rank = 2, .dim = {x->list[i].rows, x->config->lora.rank}};
        list[i] = &fakes[i];
    }
    *as = (struct hf_export){.path = x->path, .config = x->config, .params = list, .n_params = x->n};
    TRY(hf_out_open(&w->out, as, fam, e));
    w->items = own(w, 2 * (int64_t)w->out.n_tensors, sizeof *w->items, e);
    w->modules = json_array();
    if (w->items == NULL || w->modules == NULL)
        return err_set(e, ST_NOMEM, "out of memory for adapters");
    for (int i = 0; i < w->out.n_tensors; i++)
        TRY(add_tensor(w, &w->out.tensors[i], e));
    return ST_OK;
}

int peft_export(const struct peft_export *x, struct err *e)
{
    struct peft_writer w = {.x = x};
    struct hf_export as;
    const struct hf_family *fam;
    json_t *config = NULL;
    char tmp[FILE_TEMP_MAX];
    bool exists;
    int st, fd = -1;
    TRY(file_lookup(x->path, &exists, e));
    if (exists)
        return err_hint((err_set(e, ST_CONFLICT, "%s exists", x->path), e), "give a folder that does not exist yet");
    file_temp_clean(NULL, x->path);
    arena_init(&w.memory);
    TRY_OUT(hf_choose(x->config, x->family, DT_F32, &fam, &config, e));
    if (fam->own_names) {
        err_set(e, ST_UNSUPPORTED,
                "PEFT finds adapters by the names of transformers' modules, which a %s folder does not have",
                fam->model_type);
        st = err_hint(e, "--format=hf writes the model with its adapters merged");
        goto out;
    }
    TRY_OUT(list_items(&w, fam, &as, e));
    TRY_OUT(file_temp_dir(x->path, tmp, &fd, e));
    st = write_folder(&w, tmp, e);
    if (st != ST_OK)
        file_remove_tree(tmp, NULL);
out:
    if (fd >= 0)
        close(fd);
    json_decref(config);
    json_decref(w.modules);
    hf_out_close(&w.out);
    arena_release(&w.memory);
    return st;
}
