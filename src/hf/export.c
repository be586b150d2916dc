/* Writing a folder that transformers reads: config.json, safetensors files of bounded size, their index. Everything
 * goes into a folder beside the one asked for, which gets its name when all of it is on the disk. */
#include "hf/out_int.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- which family can say it ----------------------------------------------------------------- */

/* Options of the model that no config.json holds: how it was begun, and how its memory lies. */
static bool outside_config(const char *option)
{
    static const char *const names[] = {"model.layers",
                                        "model.attn_ratio",
                                        "model.mlp_ratio",
                                        "model.mtp_pattern",
                                        "model.mtp_layers",
                                        "model.init_std",
                                        "model.embed_init_std",
                                        "model.init_scale",
                                        "model.mhc_gating",
                                        "model.dropout",
                                        "model.glu_interleave",
                                        "model.vocab_multiple",
                                        "model.mamba_chunk",
                                        "model.gdn_chunk",
                                        "model.aux_loss",
                                        "model.seq_aux_loss",
                                        "model.global_aux_loss",
                                        "model.router_z_loss",
                                        "model.router_jitter",
                                        "model.router_bias_rate",
                                        "model.mtp_scale",
                                        "model.router_force_balance",
                                        "model.max_position",
                                        "model.attention_dropout",
                                        "model.dsa_dense_warmup",
                                        "model.dsa_indexer_loss_coeff",
                                        "model.dsa_indexer_use_sparse_loss"};
    for (int i = 0; i < countof(names); i++)
        if (strcmp(option, names[i]) == 0)
            return true;
    return false;
}

static int first_difference(const struct config *c, const struct config *again, const struct hf_family *fam,
                            struct err *e)
{
    int st = ST_OK;
    struct buf a, b;
    buf_init(&a, 0);
    buf_init(&b, 0);
    for (int i = 0; st == ST_OK && i < config_option_count(); i++) {
        const char *name = config_option_name(i);
        if (!str_starts(name, "model.") || outside_config(name) || !config_reads(c, name))
            continue;
        buf_clear(&a);
        buf_clear(&b);
        const char *is = config_value_text(c, name, &a), *would = config_value_text(again, name, &b);
        if (is == NULL || would == NULL || strcmp(is, would) != 0)
            st = err_set(e, ST_UNSUPPORTED, "a %s model cannot say %s = %.80s (it would be read as %.80s)",
                         fam->model_type, name, is ? is : "?", would ? would : "?");
    }
    buf_release(&a);
    buf_release(&b);
    return st;
}

/* model.bias is the biases of attention and of MLPs; other programs name those. */
static void name_biases(struct config *c)
{
    if (!c->model.bias || strpbrk(c->model.pattern, "+DCHW") != NULL)
        return;
    c->model.bias = false;
    c->model.attn_bias = c->model.mlp_bias = true;
}

/* The tensors say how many prediction depths there are; those of this family are all alike. */
static int add_depths(const struct hf_family *fam, const struct config *c, struct config *again, struct err *e)
{
    const char *depths = strchr(c->model.pattern, '/');
    struct buf text;
    if (depths == NULL || fam->depth == NULL)
        return ST_OK;
    buf_init(&text, 0);
    buf_addf(&text, "%s%s", again->model.pattern, depths);
    int st = buf_check(&text, e);
    if (st == ST_OK)
        st = config_set(again, "model.pattern", text.text, NULL, e);
    buf_release(&text);
    return st;
}

/* A family can express a model if its config.json, read again, gives the same options. */
static int expresses(const struct hf_family *fam, const struct config *given, enum dtype dtype, json_t **out,
                     struct err *e)
{
    struct config plain = *given, *c = &plain, again; /* strings stay the original's */
    char seq[32];
    name_biases(c);
    struct hf_json j = {.label = "the exported config.json"};
    int st;
    *out = NULL;
    TRY(config_init(&again, e));
    TRY_OUT(hf_config_write(fam, c, dtype, &j.root, e));
    j.text = j.root;
    TRY_OUT(hf_config_read(fam, &j, &again, NULL, e));
    TRY_OUT(add_depths(fam, c, &again, e));
    snprintf(seq, sizeof seq, "%lld", (long long)c->train.seq);
    TRY_OUT(config_set(&again, "train.seq", seq, NULL, e));
    TRY_OUT(config_finish(&again, e));
    name_biases(&again);
    st = first_difference(c, &again, fam, e);
out:
    config_release(&again);
    if (st != ST_OK)
        json_decref(j.root);
    else
        *out = j.root;
    return st;
}

int hf_choose(const struct config *c, const char *family, enum dtype dtype, const struct hf_family **out, json_t **json,
              struct err *e)
{
    struct buf tried, near;
    *json = NULL;
    buf_init(&tried, 480);
    buf_init(&near, 480);
    for (int i = 0; hf_families[i] != NULL; i++) {
        struct err why;
        err_clear(&why);
        if (family != NULL && strcmp(family, hf_families[i]->model_type) != 0)
            continue;
        int st = expresses(hf_families[i], c, dtype, json, &why);
        if (st == ST_OK) {
            *out = hf_families[i];
            buf_release(&tried);
            buf_release(&near);
            return ST_OK;
        }
        if (family != NULL) {
            *e = why;
            buf_release(&tried);
            buf_release(&near);
            return st;
        }
        buf_addf(&tried, "%s%s: %.70s", tried.len ? "; " : "", hf_families[i]->model_type, why.msg);
        if (!str_starts(why.msg, "model.pattern")) /* a family with these layers */
            buf_addf(&near, "%s%s: %.160s", near.len ? "; " : "", hf_families[i]->model_type, why.msg);
    }
    err_set(e, ST_UNSUPPORTED,
            family ? "there is no family '%s'" : "no family of transformers that braid writes can express this model",
            family);
    err_hint(e, "%s", near.len > 0 ? near.text : tried.text ? tried.text : "see braid export --help for the families");
    buf_release(&tried);
    buf_release(&near);
    return ST_UNSUPPORTED;
}

/* False: the pattern is not of pairs alone. */
static bool group_pairs(const char *pattern, struct buf *out)
{
    for (const char *p = pattern; *p != '\0'; p++)
        if (strchr("|/", *p) != NULL)
            buf_addf(out, "%c", *p);
        else if (strchr("*+DGMCHW", *p) != NULL && (p[1] == '-' || p[1] == 'E'))
            buf_addf(out, "[%c%c]", p[0], p[1]), p++;
        else
            return false;
    return !out->failed;
}

void hf_as_written(const struct config *given, const char *family, struct config *out, struct buf *pattern)
{
    const struct hf_family *fam;
    struct err why;
    json_t *json;
    err_clear(&why);
    *out = *given;
    int st = hf_choose(given, family, DT_F32, &fam, &json, &why);
    json_decref(json);
    if (st != ST_OK && group_pairs(given->model.pattern, pattern))
        out->model.pattern = pattern->text; /* what does not fit either is said by whoever writes */
}

int hf_family_of(const struct config *given, const char *family, const char **name, struct err *e)
{
    const struct hf_family *fam;
    struct config c;
    struct buf pattern;
    json_t *json;
    buf_init(&pattern, 0);
    hf_as_written(given, family, &c, &pattern);
    int st = hf_choose(&c, family, DT_F32, &fam, &json, e);
    json_decref(json);
    buf_release(&pattern);
    if (st == ST_OK)
        *name = fam->model_type;
    return st;
}

/* ---- tensors --------------------------------------------------------------------------------- */

struct writer {
    const struct hf_export *x;
    struct hf_out out; /* sorted by name once the shards are known */
    int n_shards;
    int64_t all_bytes, done_bytes;
    void *narrow;
    size_t narrow_cap;
    char *tmp;
};

static bool in_codes(const struct hf_export *x) { return x->dtype == DT_F8_E4M3; }
static enum dtype plain_dtype(const struct hf_export *x) { return in_codes(x) ? DT_BF16 : x->dtype; }
static enum dtype dtype_on_disk(const struct writer *w, const struct hf_out_tensor *t)
{
    return t->codes ? DT_F8_E4M3 : t->integers ? DT_I64 : t->keep_f32 ? DT_F32 : plain_dtype(w->x);
}

static int64_t bytes_on_disk(const struct writer *w, const struct hf_out_tensor *t)
{
    return tensor_elems(&t->shape) * (int64_t)dtype_bytes(dtype_on_disk(w, t));
}

static void make_shards(struct writer *w)
{
    int64_t in_shard = 0;
    for (int i = 0; i < w->out.n_tensors; i++) {
        int64_t bytes = bytes_on_disk(w, &w->out.tensors[i]);
        if (i > 0 && in_shard + bytes > w->x->shard_bytes) {
            w->n_shards++;
            in_shard = 0;
        }
        w->out.tensors[i].shard = w->n_shards;
        in_shard += bytes;
        w->all_bytes += bytes;
    }
    w->n_shards++;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct hf_out_tensor *)a)->name, ((const struct hf_out_tensor *)b)->name);
}

/* ckpt_source: one tensor of the folder. */
static int fetch_tensor(void *ctx, const char *name, struct tensor *host, struct err *e)
{
    struct writer *w = ctx;
    struct hf_out_tensor want = {.name = name},
                         *t = bsearch(&want, w->out.tensors, (size_t)w->out.n_tensors, sizeof want, by_name);
    int64_t n = tensor_elems(host);
    float *values;
    if (t == NULL)
        return err_set(e, ST_INTERNAL, "there is no rule to export '%s'", name);
    TRY(hf_out_values(&w->out, t, &values, e));
    host->data = values;
    if (t->codes || t->scales) {
        TRY(mem_grow(&w->narrow, &w->narrow_cap, (size_t)tensor_bytes(host), 1, e));
        if (t->codes)
            hf_out_block_codes(&t->shape, values, w->narrow);
        else
            TRY(hf_out_block_scales(&t->of, name, values, w->narrow, e));
        host->data = w->narrow;
    } else if (host->dtype != DT_F32) {
        TRY(mem_grow(&w->narrow, &w->narrow_cap, (size_t)tensor_bytes(host), 1, e));
        struct tensor wide = tensor_1d(values, DT_F32, n), narrow = tensor_1d(w->narrow, host->dtype, n);
        tensor_convert(&narrow, &wide);
        host->data = w->narrow;
    }
    w->done_bytes += tensor_bytes(host);
    if (w->x->progress != NULL)
        w->x->progress(w->x->ctx, w->done_bytes, w->all_bytes);
    return ST_OK;
}

/* ---- files ----------------------------------------------------------------------------------- */

static void shard_name(const struct writer *w, int shard, char out[64])
{
    if (w->n_shards == 1)
        snprintf(out, 64, "model.safetensors");
    else
        snprintf(out, 64, "model-%05d-of-%05d.safetensors", shard + 1, w->n_shards);
}

static int write_shard(struct writer *w, int shard, struct err *e)
{
    static const struct st_meta meta[] = {{"format", "pt"}};
    struct ckpt_source source = {fetch_tensor, w};
    struct st_item *items = NULL;
    char name[64];
    int n = 0;
    shard_name(w, shard, name);
    char *path = path_join(w->tmp, name);
    int st = mem_array((void **)&items, (size_t)w->out.n_tensors, sizeof *items, e);
    for (int i = 0; st == ST_OK && i < w->out.n_tensors; i++) {
        const struct hf_out_tensor *t = &w->out.tensors[i];
        if (t->shard == shard)
            items[n++] = (struct st_item){.name = t->name,
                                          .host = tensor_shape(dtype_on_disk(w, t), t->shape.rank, t->shape.dim)};
    }
    if (st == ST_OK)
        st = path ? st_write_stream(path, items, n, &source, meta, countof(meta), e)
                  : err_set(e, ST_NOMEM, "out of memory");
    free(items);
    free(path);
    return st;
}

int hf_write_json(const char *dir, const char *name, const json_t *json, struct err *e)
{
    char *text = json ? json_dumps(json, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(17)) : NULL,
         *path = path_join(dir, name);
    struct buf b;
    buf_init(&b, 0);
    if (text != NULL)
        buf_addf(&b, "%s\n", text);
    int st = text != NULL && path != NULL && !b.failed ? file_write_atomic(path, b.text, b.len, e)
                                                       : err_set(e, ST_NOMEM, "out of memory for %s", name);
    buf_release(&b);
    free(text);
    free(path);
    return st;
}

static int write_json(struct writer *w, const char *name, const json_t *json, struct err *e)
{
    return hf_write_json(w->tmp, name, json, e);
}

static int write_index(struct writer *w, struct err *e)
{
    json_t *map = json_object(), *root = NULL;
    int st = ST_OK;
    for (int i = 0; st == ST_OK && i < w->out.n_tensors; i++) {
        char name[64];
        shard_name(w, w->out.tensors[i].shard, name);
        st = hf_put(map, w->out.tensors[i].name, json_string(name), e);
    }
    root = json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)w->all_bytes, "weight_map", map);
    if (st == ST_OK)
        st = write_json(w, "model.safetensors.index.json", root, e);
    json_decref(root);
    json_decref(map);
    return st;
}

static int copy_file(struct writer *w, const char *from, struct err *e)
{
    const char *slash = strrchr(from, '/');
    char *path = path_join(w->tmp, slash ? slash + 1 : from), *text = NULL;
    size_t len;
    int st = path == NULL ? err_set(e, ST_NOMEM, "out of memory") : file_read(from, (size_t)1 << 30, &text, &len, e);
    if (st == ST_OK)
        st = file_write_atomic(path, text, len, e);
    free(text);
    free(path);
    return st;
}

static int write_folder(struct writer *w, json_t *config, struct err *e)
{
    for (int s = 0; s < w->n_shards; s++)
        TRY(write_shard(w, s, e));
    if (w->n_shards > 1)
        TRY(write_index(w, e));
    TRY(write_json(w, "config.json", config, e));
    json_t *generation = json_pack("{s:b}", "_from_model_config", 1);
    int st = write_json(w, "generation_config.json", generation, e);
    json_decref(generation);
    TRY(st);
    for (int i = 0; i < w->x->n_extra_files; i++)
        TRY(copy_file(w, w->x->extra_files[i], e));
    TRY(file_sync_dir(w->tmp, e));
    if (rename(w->tmp, w->x->path) != 0)
        return err_errno(e, "cannot rename %s to %s", w->tmp, w->x->path);
    return file_sync_parent(w->x->path, e);
}

int hf_export(const struct hf_export *x, struct err *e)
{
    struct writer w = {.x = x};
    const struct hf_family *fam;
    json_t *config = NULL;
    char tmp[FILE_TEMP_MAX];
    bool exists;
    int st, fd = -1;
    TRY(file_lookup(x->path, &exists, e));
    if (exists)
        return err_hint((err_set(e, ST_CONFLICT, "%s exists", x->path), e), "give a folder that does not exist yet");
    file_temp_clean(NULL, x->path);
    TRY_OUT(hf_choose(x->config, x->family, plain_dtype(x), &fam, &config, e));
    TRY_OUT(hf_out_open(&w.out, x, fam, e));
    if (in_codes(x)) {
        TRY_OUT(hf_out_codes(&w.out, e));
        TRY_OUT(hf_out_codes_config(&w.out, config, e));
    }
    make_shards(&w);
    qsort(w.out.tensors, (size_t)w.out.n_tensors, sizeof *w.out.tensors, by_name);
    TRY_OUT(file_temp_dir(x->path, tmp, &fd, e));
    w.tmp = tmp;
    st = write_folder(&w, config, e);
    if (st != ST_OK)
        file_remove_tree(w.tmp, NULL);
out:
    if (fd >= 0)
        close(fd);
    json_decref(config);
    hf_out_close(&w.out);
    free(w.narrow);
    return st;
}
