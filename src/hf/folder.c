/* An open folder: its config, its files, and its tensors by name, quantised ones as the values they stand for. */
#include "hf/hf_int.h"
#include "tensor/f8.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool hf_is_folder(const char *path)
{
    char *config = file_is_dir(path) ? path_join(path, "config.json") : NULL;
    bool is = config != NULL && file_exists(config);
    free(config);
    return is;
}

/* ---- files ----------------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct hf_name *)a)->name, ((const struct hf_name *)b)->name);
}

static int open_shard(struct hf_folder *f, const char *name, struct err *e)
{
    char *path = path_join(f->path, name);
    f->file_names[f->n_files] = arena_strdup(&f->memory, name);
    if (path == NULL || f->file_names[f->n_files] == NULL) {
        free(path);
        return err_set(e, ST_NOMEM, "out of memory");
    }
    int st = st_open(&f->files[f->n_files], path, e);
    free(path);
    if (st == ST_OK)
        f->n_files++;
    return st;
}

/* The file names of a folder that has no index, or all that its index names; malloc'd list of malloc'd names. */
static int list_shards(const struct hf_folder *f, char ***names, int *n, struct err *e)
{
    char **all = NULL;
    int n_all = 0, kept = 0;
    TRY(file_list_dir(f->path, &all, &n_all, e));
    for (int i = 0; i < n_all; i++) {
        if (str_starts(all[i], "model") && str_ends(all[i], ".safetensors"))
            all[kept++] = all[i];
        else
            free(all[i]);
    }
    *names = all;
    *n = kept;
    if (kept > 0)
        return ST_OK;
    file_free_list(all, 0);
    err_set(e, ST_INVALID, "%s holds no model*.safetensors", f->path);
    return err_hint(e,
                    "pickled weights (pytorch_model.bin, *.pth) are not read; save the model again with safetensors");
}

static int list_tensors(struct hf_folder *f, struct err *e)
{
    int n = 0;
    for (int i = 0; i < f->n_files; i++)
        n += st_count(f->files[i]);
    TRY(mem_array((void **)&f->names, (size_t)n, sizeof *f->names, e));
    for (int i = 0; i < f->n_files; i++)
        for (int k = 0; k < st_count(f->files[i]); k++) {
            const struct st_entry *entry = st_entry(f->files[i], k);
            const char *name = !f->gradients ? entry->name : str_starts(entry->name, "grad.") ? entry->name + 5 : NULL;
            if (name != NULL)
                f->names[f->n_names++] = (struct hf_name){.name = name, .entry = entry, .file = i};
        }
    qsort(f->names, (size_t)f->n_names, sizeof *f->names, by_name);
    for (int i = 1; i < f->n_names; i++)
        if (strcmp(f->names[i - 1].name, f->names[i].name) == 0)
            return err_set(e, ST_CONFLICT, "%s: two files hold a tensor named '%.160s'", f->path, f->names[i].name);
    return ST_OK;
}

static struct hf_name *name_at(struct hf_folder *f, const char *name)
{
    struct hf_name want = {.name = name};
    return bsearch(&want, f->names, (size_t)f->n_names, sizeof *f->names, by_name);
}

/* Every tensor is in the file that the index names for it: a missing, stale or exchanged shard is found before anything
 * is loaded. */
static int compare_index(struct hf_folder *f, json_t *map, struct err *e)
{
    const char *name;
    json_t *value;
    json_object_foreach(map, name, value)
    {
        const struct hf_name *n = name_at(f, name);
        const char *file = json_string_value(value);
        if (n == NULL)
            err_set(e, ST_CORRUPT, "%s: tensor '%.160s' should be in %.80s, but no file of the folder holds it",
                    f->path, name, file ? file : "a file");
        else if (file == NULL || strcmp(file, f->file_names[n->file]) != 0)
            err_set(e, ST_CORRUPT, "%s: tensor '%.160s' should be in %.80s by the index, but %s holds it", f->path,
                    name, file ? file : "a file", f->file_names[n->file]);
        else
            continue;
        return err_hint(e, "a shard is missing, truncated or another one's: fetch the folder again");
    }
    for (int i = 0; i < f->n_names; i++)
        if (json_object_get(map, f->names[i].name) == NULL)
            return err_set(e, ST_CORRUPT, "%s: tensor '%.160s' in %s is not in the index", f->path, f->names[i].name,
                           f->file_names[f->names[i].file]);
    return ST_OK;
}

static int check_index(struct hf_folder *f, struct err *e)
{
    char *path = path_join(f->path, "model.safetensors.index.json"), *text = NULL;
    size_t len;
    int st = ST_OK;
    json_error_t je;
    json_t *root = NULL;
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory");
    if (!file_exists(path))
        goto out;
    TRY_OUT(file_read(path, HF_INDEX_BYTES, &text, &len, e));
    root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &je);
    json_t *map = json_object_get(root, "weight_map");
    if (!json_is_object(map)) {
        st = err_set(e, ST_CORRUPT, "%s: %s", path, root == NULL ? je.text : "no object \"weight_map\"");
        goto out;
    }
    st = compare_index(f, map, e);
out:
    json_decref(root);
    free(text);
    free(path);
    return st;
}

static int open_files(struct hf_folder *f, struct err *e)
{
    char **names = NULL;
    int n = 0, st;
    TRY(list_shards(f, &names, &n, e));
    TRY_OUT(mem_array((void **)&f->files, (size_t)n, sizeof *f->files, e));
    TRY_OUT(mem_array((void **)&f->file_names, (size_t)n, sizeof *f->file_names, e));
    for (int i = 0; i < n; i++)
        TRY_OUT(open_shard(f, names[i], e));
    TRY_OUT(list_tensors(f, e));
    st = check_index(f, e);
out:
    file_free_list(names, n);
    return st;
}

/* ---- family ---------------------------------------------------------------------------------- */

static int find_family(struct hf_folder *f, struct err *e)
{
    const char *type = json_string_value(hf_json_get(&f->json, "model_type"));
    struct buf known;
    buf_init(&known, 0);
    for (int i = 0; hf_families[i] != NULL; i++) {
        if (type != NULL && strcmp(type, hf_families[i]->model_type) == 0)
            f->family = hf_families[i];
        buf_addf(&known, "%s%s", i ? ", " : "", hf_families[i]->model_type);
    }
    if (f->family == NULL) {
        err_set(e, ST_UNSUPPORTED, "%s: model_type '%.60s' of config.json is no family that braid knows", f->path,
                type ? type : "");
        err_hint(e, "known: %s", known.text ? known.text : "");
    }
    buf_release(&known);
    return f->family != NULL ? ST_OK : e->code;
}

/* The root is the one under which the embedding is found. */
static int find_root(struct hf_folder *f, struct err *e)
{
    struct hf_key k;
    hf_key_of("embedding.word_embeddings.weight", &k);
    for (const struct hf_rule *r = hf_next_rule(f->family, &k, NULL); r != NULL; r = hf_next_rule(f->family, &k, r))
        for (int i = 0; i < countof(f->family->roots) && f->family->roots[i] != NULL; i++) {
            char *name = hf_part_name(&f->memory, f->family, f->family->roots[i], NULL, &k, r->part[0].name, -1);
            if (name == NULL)
                return err_set(e, ST_NOMEM, "out of memory");
            if (name_at(f, name) != NULL) {
                f->root = f->family->roots[i];
                return ST_OK;
            }
        }
    return err_set(e, ST_INVALID, "%s: no embedding of a %s model is in the folder's files", f->path,
                   f->family->model_type);
}

static int open_gradients(struct hf_folder *f, const char *file, struct err *e)
{
    TRY(mem_array((void **)&f->files, 1, sizeof *f->files, e));
    TRY(st_open(&f->files[0], file, e));
    f->n_files = 1;
    return list_tensors(f, e);
}

static int open_folder(struct hf_folder **out, const char *path, const char *gradients, struct err *e)
{
    struct hf_folder *f = calloc(1, sizeof *f);
    int st = ST_OK;
    *out = NULL;
    if (f == NULL || (f->path = strdup(path)) == NULL) {
        free(f);
        return err_set(e, ST_NOMEM, "out of memory");
    }
    arena_init(&f->memory);
    f->gradients = gradients != NULL;
    TRY_OUT(hf_json_open(&f->json, f->path, e));
    TRY_OUT(find_family(f, e));
    TRY_OUT(gradients ? open_gradients(f, gradients, e) : open_files(f, e));
    st = find_root(f, e);
out:
    if (st != ST_OK) {
        hf_close(f);
        return st;
    }
    *out = f;
    return ST_OK;
}

int hf_open(struct hf_folder **out, const char *path, struct err *e) { return open_folder(out, path, NULL, e); }

int hf_open_gradients(struct hf_folder **out, const char *path, const char *file, struct err *e)
{
    return open_folder(out, path, file, e);
}

void hf_close(struct hf_folder *f)
{
    if (f == NULL)
        return;
    for (int i = 0; i < f->n_files; i++)
        st_close(f->files[i]);
    hf_json_close(&f->json);
    free(f->path);
    free(f->files);
    free(f->file_names);
    free(f->names);
    free(f->links);
    free(f->first);
    free(f->values);
    arena_release(&f->memory);
    free(f);
}

const char *hf_family_name(const struct hf_folder *f) { return f->family->model_type; }

/* ---- tensors --------------------------------------------------------------------------------- */

static bool use(struct hf_folder *f, const char *name, const char *suffix, const struct st_entry **out, int *file)
{
    char text[HF_NAME + 32];
    int n = snprintf(text, sizeof text, "%s%s", name, suffix);
    struct hf_name *found = n > 0 && (size_t)n < sizeof text ? name_at(f, text) : NULL;
    if (found == NULL)
        return false;
    found->used = true;
    *out = found->entry;
    *file = found->file;
    return true;
}

/* The scales of NAME.weight are NAME.weight_scale_inv, or NAME.scale in the folders of DeepSeek-V4. */
static bool find_scale(struct hf_folder *f, const char *name, struct hf_tensor *t)
{
    static const char end[] = "weight";
    char stem[HF_NAME];
    size_t n = strlen(name) - (str_ends(name, ".weight") ? sizeof end - 1 : 0);
    int file;
    if (use(f, name, "_scale_inv", &t->scale, &file))
        return true;
    if (n == strlen(name) || n >= sizeof stem)
        return false;
    memcpy(stem, name, n);
    stem[n] = '\0';
    return use(f, stem, "scale", &t->scale, &file);
}

/* False: the folder has no such tensor. */
int hf_find(struct hf_folder *f, const char *name, struct hf_tensor *out)
{
    int scale_file;
    *out = (struct hf_tensor){.quant = HF_PLAIN};
    if (use(f, name, "", &out->data, &out->file)) {
        enum dtype dtype = out->data->view.dtype;
        bool codes = dtype == DT_F8_E4M3, halves = (dtype == DT_I8 || dtype == DT_U8) && out->data->view.rank > 0;
        out->rank = out->data->view.rank;
        memcpy(out->dim, out->data->view.dim, sizeof out->dim);
        if ((codes || halves) && find_scale(f, name, out))
            out->quant = codes ? HF_FP8 : HF_MXFP4;
        if (out->quant == HF_MXFP4)
            out->dim[out->rank - 1] *= 2; /* [.., bytes of two values each] */
        return true;
    }
    if (!use(f, name, "_blocks", &out->data, &out->file) || !use(f, name, "_scales", &out->scale, &scale_file) ||
        out->data->view.rank < 2)
        return false;
    /* [.., blocks, 16 bytes of two values each] */
    out->quant = HF_MXFP4;
    out->rank = out->data->view.rank - 1;
    memcpy(out->dim, out->data->view.dim, sizeof out->dim);
    out->dim[out->rank - 1] *= 2 * out->data->view.dim[out->rank];
    return true;
}

/* One scale for a block of 128 x 128, for a row, or for a row and a tile of columns: the shapes say which. */
static int read_fp8(const struct hf_tensor *t, const char *name, float *out, struct err *e)
{
    const struct tensor *v = &t->data->view, *s = &t->scale->view;
    int64_t rows = v->rank > 1 ? v->dim[v->rank - 2] : 1, cols = v->dim[v->rank - 1];
    int64_t matrices = rows > 0 && cols > 0 ? tensor_elems(v) / (rows * cols) : 0;
    int64_t n_scales = tensor_elems(s), per_matrix = matrices ? n_scales / matrices : 0;
    int64_t by_row = ceil_div(rows, 128), by_col = ceil_div(cols, 128), row_block = 128, col_block = 128;
    float table[256];
    if (s->rank == v->rank && per_matrix != by_row * by_col && s->dim[s->rank - 2] == rows && s->dim[s->rank - 1] > 0 &&
        cols % s->dim[s->rank - 1] == 0)
        by_col = s->dim[s->rank - 1], col_block = cols / by_col, by_row = rows, row_block = 1;
    else if (per_matrix == rows && per_matrix != by_row * by_col)
        by_col = 1, col_block = max_i64(cols, 1), by_row = rows, row_block = 1;
    if (matrices * by_row * by_col != n_scales)
        return err_set(e, ST_INVALID,
                       "'%.160s' has %lld scales, which fit neither blocks of 128 x 128 nor rows of its shape", name,
                       (long long)n_scales);
    struct tensor scales = tensor_shape(DT_F32, s->rank, s->dim);
    TRY(mem_array(&scales.data, (size_t)n_scales, sizeof(float), e));
    int st = ST_OK;
    if (s->dtype == DT_F8_E8M0)
        tensor_convert(&scales, s); /* bytes: at an aligned place wherever they are */
    else
        st = st_read(t->scale, &scales, e);
    for (int i = 0; i < 256; i++)
        table[i] = f8_to_f32((uint8_t)i, DT_F8_E4M3);
    const uint8_t *codes = v->data;
    const float *scale = scales.data;
    for (int64_t m = 0; st == ST_OK && m < matrices; m++)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++, codes++)
                *out++ = table[*codes] * scale[(m * by_row + r / row_block) * by_col + c / col_block];
    free(scales.data);
    return st;
}

enum { MXFP4_BYTES = 16 }; /* of a block of 32 values, which share a scale */

/* One scale for every block, along the inputs. */
static bool mxfp4_fits(const struct hf_tensor *t)
{
    const struct tensor *v = &t->data->view, *s = &t->scale->view;
    return v->rank > 0 && dtype_bytes(s->dtype) == 1 && v->dim[v->rank - 1] % MXFP4_BYTES == 0 &&
           tensor_elems(s) * MXFP4_BYTES == tensor_elems(v);
}

static void read_mxfp4(const struct hf_tensor *t, float *out)
{
    static const float value[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    const struct tensor *v = &t->data->view;
    const uint8_t *bytes = v->data, *scales = t->scale->view.data;
    int64_t per_block = MXFP4_BYTES, blocks = tensor_elems(v) / per_block;
    for (int64_t b = 0; b < blocks; b++) {
        float scale = scales[b] == 255 ? NAN : ldexpf(1.0f, (int)scales[b] - 127);
        for (int64_t i = 0; i < per_block; i++, bytes++) {
            *out++ = value[*bytes & 15] * scale;
            *out++ = value[*bytes >> 4] * scale;
        }
    }
}

int hf_read(struct hf_folder *f, const struct hf_tensor *t, const char *name, const float **out, struct err *e)
{
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++)
        n *= t->dim[i]; /* the file holds as many: checked when it was opened */
    *out = f->values;
    if (f->held == t->data)
        return ST_OK;
    f->held = NULL;
    TRY(mem_grow((void **)&f->values, &f->values_cap, (size_t)n, sizeof *f->values, e));
    struct tensor dst = tensor_shape(DT_F32, t->rank, t->dim);
    dst.data = f->values;
    if (t->quant == HF_FP8)
        TRY(read_fp8(t, name, f->values, e));
    else if (t->quant == HF_MXFP4 && !mxfp4_fits(t))
        return err_set(e, ST_INVALID, "'%.160s': the scales do not fit the blocks", name);
    else if (t->quant == HF_MXFP4)
        read_mxfp4(t, f->values);
    else
        TRY(st_read(t->data, &dst, e));
    st_forget(f->files[t->file], t->data);
    f->held = t->data;
    *out = f->values;
    return ST_OK;
}
