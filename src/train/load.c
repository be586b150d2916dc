/* Filling a model from a checkpoint or a file of weights, whatever layout its keys have and whatever ranks wrote it. A
 * rank checks the file against all parameters of the model and takes what it holds of each. */
#include "ckpt/keys/keymap.h"
#include "hf/hf.h"
#include "train/reshard_int.h"

#include <stdlib.h>
#include <string.h>

static int load_params_from(struct model *m, const struct ckpt *c, bool base, struct err *e);

/* The parameters that a space of keys has: moments belong to trained ones only. base: without adapters. */
static int list_params(const struct full_table *full, enum key_space space, bool base, const struct param ***out,
                       int **index, int *n, struct err *e)
{
    *n = 0;
    TRY(mem_array((void **)out, (size_t)full->params->n, sizeof **out, e));
    TRY(mem_array((void **)index, (size_t)full->params->n, sizeof **index, e));
    for (int k = 0; k < full->params->n; k++) {
        if (space != KEYS_MODEL && !param_trained(&full->params->list[k].p))
            continue;
        if (base && full->params->list[k].p.lora.of > 0)
            continue;
        (*out)[*n] = &full->params->list[k].p;
        (*index)[(*n)++] = full->local[k];
    }
    return ST_OK;
}

/* This rank's part of a whole tensor on the host. */
static int take_part(struct model *m, int index, enum key_space space, const struct tensor *whole, struct err *e)
{
    const struct param *p = &m->params.list[index].p;
    bool moment = space != KEYS_MODEL;
    struct shard s = moment ? shard_updated(m, index) : (struct shard){.n = param_elems(p)};
    int64_t size = (int64_t)dtype_bytes(whole->dtype);
    void *part;
    TRY(mem_aligned(&part, (size_t)max_i64(s.n * size, 1), DEV_ALIGN, e));
    int st = reshard_copy(p, s.first, s.n, part, whole->data, size, RESHARD_TAKE, e);
    if (st == ST_OK && moment) {
        struct tensor place = optim_state(m, index, space == KEYS_EXP_AVG_SQ);
        st = m->dev->vt->copy_in(m->dev, place.data, part, tensor_bytes(&place), e);
    } else if (st == ST_OK) {
        struct tensor slice = tensor_shape(whole->dtype, p->rank, p->dim);
        slice.data = part;
        st = model_set_param(m, index, &slice, e);
    }
    free(part);
    return st;
}

/* On a host device that holds all of it straight into place, else by way of a host copy. */
static int load_one(struct model *m, const struct keymap *map, int i, const struct param *whole, int index,
                    enum key_space space, struct err *e)
{
    bool moment = space != KEYS_MODEL;
    struct tensor place = moment ? optim_state(m, index, space == KEYS_EXP_AVG_SQ) : model_param(m, index);
    if (m->dev->kind != DEV_CUDA && place.rank == whole->rank && tensor_elems(&place) == param_elems(whole))
        return keymap_load(map, i, &place, e);
    struct tensor host =
        tensor_shape(moment ? optim_type(m) : param_dtype(whole, m->dev->wide), whole->rank, whole->dim);
    TRY(mem_aligned(&host.data, (size_t)max_i64(tensor_bytes(&host), 1), DEV_ALIGN, e));
    int st = keymap_load(map, i, &host, e);
    if (st == ST_OK)
        st = take_part(m, index, space, &host, e);
    free(host.data);
    return st;
}

/* Everything is checked before the first value changes. note (may be NULL)
 * says what was allowed. */
static int load_space(struct model *m, const struct key_file *f, enum key_space space, bool base, unsigned allow,
                      struct err *note, struct err *e)
{
    const struct param **params = NULL;
    struct keymap *map = NULL;
    int *index = NULL, n, st;
    struct full_table full;
    TRY(full_table_open(&full, m, e));
    TRY_OUT(list_params(&full, space, base, &params, &index, &n, e));
    TRY_OUT(keymap_open(&map, f, space, params, n, space != KEYS_MODEL ? optim_type(m) : m->dev->wide, e));
    st = keymap_check(map, allow, e);
    if (st == ST_OK && n > 0 && keymap_missing(map) == n)
        st = err_set(e, ST_CONFLICT, "%.200s holds none of the model's %d parameters", f->label, n);
    if (st != ST_OK && note != NULL)
        err_hint(e, "run.load_allow=missing, unexpected or both goes on without them; `braid ckpt "
                    "ls` lists a file's tensors");
    if (st == ST_OK)
        keymap_check(map, 0, note);
    for (int i = 0; st == ST_OK && i < n; i++) {
        if (!keymap_has(map, i) || index[i] < 0)
            continue;
        st = load_one(m, map, i, params[i], index[i], space, e);
    }
    if (st == ST_OK && space == KEYS_MODEL)
        st = model_quantise(m, e);
out:
    keymap_close(map);
    free(params);
    free(index);
    full_table_close(&full);
    return st;
}

/* Only training has the parts for prediction depths; evaluation and generation leave them in the
 * file. */
static void drop_unbuilt_depths(struct key_file *f, const struct model *m)
{
    bool built = m->pattern.n_mtp_depths == 0 || m->mesh.world > 1;
    for (int k = 0; k < m->params.n; k++)
        built |= str_starts(m->params.list[k].p.key, "mtp.");
    int kept = 0;
    for (int i = 0; i < f->n; i++)
        if (built || !str_starts(f->list[i].key, "mtp."))
            f->list[kept++] = f->list[i];
    f->n = kept;
}

/* A base that gets adapters here has none in its file; they keep their first values. */
static bool lacks_adapters(const struct key_file *f)
{
    for (int i = 0; i < f->n; i++)
        if (strstr(f->list[i].key, ".adapter.") != NULL)
            return false;
    return true;
}

int load_params(struct model *m, const struct ckpt *c, struct err *e) { return load_params_from(m, c, false, e); }
int load_base(struct model *m, const struct ckpt *c, struct err *e) { return load_params_from(m, c, true, e); }

static int load_params_from(struct model *m, const struct ckpt *c, bool base, struct err *e)
{
    struct key_file f;
    TRY(key_file_from(&f, c, e));
    drop_unbuilt_depths(&f, m);
    int st = load_space(m, &f, KEYS_MODEL, base && lacks_adapters(&f), 0, NULL, e);
    key_file_close(&f);
    return st;
}

/* A checkpoint has moments of what was trained. Where that has changed since, the message names it; the keys of a layer
 * without any would only tell that layers are missing. */
static int check_trained(struct model *m, const struct ckpt *c, struct err *e)
{
    char key[256];
    struct full_table full;
    TRY(full_table_open(&full, m, e));
    int st = ST_OK;
    for (int k = 0; k < full.params->n && st == ST_OK; k++) {
        const struct param *p = &full.params->list[k].p;
        snprintf(key, sizeof key, "%s.%s", key_space_name(KEYS_EXP_AVG), p->key);
        bool had = ckpt_has(c, key, CKPT_OPTIM);
        if (p->buffer || had == param_trained(p) || !ckpt_has(c, p->key, CKPT_MODEL))
            continue;
        st = err_set(e, ST_CONFLICT, "%s was %s when %s was saved, and now it is %s", p->key,
                     had ? "trained" : "frozen", ckpt_path(c), had ? "frozen" : "trained");
        err_hint(e, "a run keeps what it trains; start another one from the weights: --run.load=RUN --run.dir=OTHER");
    }
    full_table_close(&full);
    return st;
}

int load_moments(struct model *m, const struct ckpt *c, struct err *e)
{
    struct key_file f;
    TRY(check_trained(m, c, e));
    TRY(key_file_from(&f, c, e));
    int st = load_space(m, &f, KEYS_EXP_AVG, false, 0, NULL, e);
    if (st == ST_OK)
        st = load_space(m, &f, KEYS_EXP_AVG_SQ, false, 0, NULL, e);
    key_file_close(&f);
    return st;
}

/* Values in the row order of files, as the dense tensor that memory holds. */
static void to_memory(const struct param *p, const float *disk, const struct tensor *mem)
{
    int64_t rows = p->rows.matrices > 0 ? p->dim[0] * p->dim[1]
                   : p->rank > 0        ? p->dim[0]
                                        : 1,
            n = param_elems(p), cols = rows > 0 ? n / rows : 0;
    size_t size = dtype_bytes(mem->dtype);
    for (int64_t r = 0; r < rows; r++) {
        struct tensor from = tensor_1d((void *)(uintptr_t)(disk + r * cols), DT_F32, cols), to = from;
        to.dtype = mem->dtype;
        to.data = (char *)mem->data + (size_t)(param_row_from_disk(p, r) * cols) * size;
        tensor_convert(&to, &from);
    }
}

static int load_from_folder(struct model *m, struct hf_folder *f, int i, const struct param *whole, int index,
                            struct err *e)
{
    struct tensor disk = tensor_shape(DT_F32, whole->rank, whole->dim),
                  mem = tensor_shape(param_dtype(whole, m->dev->wide), whole->rank, whole->dim);
    int st;
    TRY(mem_aligned(&disk.data, (size_t)max_i64(tensor_bytes(&disk), 1), DEV_ALIGN, e));
    TRY_OUT(mem_aligned(&mem.data, (size_t)max_i64(tensor_bytes(&mem), 1), DEV_ALIGN, e));
    TRY_OUT(hf_load(f, i, &disk, e));
    to_memory(whole, disk.data, &mem);
    st = take_part(m, index, KEYS_MODEL, &mem, e);
out:
    free(disk.data);
    free(mem.data);
    return st;
}

static int load_folder(struct model *m, const char *path, struct err *note, struct err *e)
{
    const struct param **params = NULL;
    struct hf_folder *f = NULL;
    struct full_table full;
    struct buf notes;
    int *index = NULL, n, st;
    buf_init(&notes, sizeof note->msg - 1);
    TRY(full_table_open(&full, m, e));
    TRY_OUT(list_params(&full, KEYS_MODEL, true, &params, &index, &n, e));
    TRY_OUT(hf_open(&f, path, e));
    TRY_OUT(hf_bind(f, m->cfg, params, n, &notes, e));
    if (notes.len > 0)
        err_set(note, ST_CONFLICT, "%s: %s", path, notes.text);
    for (int i = 0; st == ST_OK && i < n; i++)
        if (index[i] >= 0)
            st = load_from_folder(m, f, i, params[i], index[i], e);
out:
    hf_close(f);
    buf_release(&notes);
    free(params);
    free(index);
    full_table_close(&full);
    return st;
}

int load_weights(struct model *m, const char *path, int allow, struct err *note, struct err *e)
{
    static const unsigned flags[] = {[CFG_LOAD_ALLOW_NONE] = 0,
                                     [CFG_LOAD_ALLOW_MISSING] = CKPT_ALLOW_MISSING,
                                     [CFG_LOAD_ALLOW_UNEXPECTED] = CKPT_ALLOW_UNEXPECTED,
                                     [CFG_LOAD_ALLOW_BOTH] = CKPT_ALLOW_MISSING | CKPT_ALLOW_UNEXPECTED};
    struct key_file f;
    err_clear(note);
    if (hf_is_folder(path) && allow != CFG_LOAD_ALLOW_NONE)
        return err_set(e, ST_USAGE,
                       "run.load_allow is for files of weights; %s is a Hugging Face folder, which is loaded whole",
                       path);
    if (hf_is_folder(path))
        return load_folder(m, path, note, e);
    TRY(key_file_open(&f, path, e));
    int st = load_space(m, &f, KEYS_MODEL, lacks_adapters(&f), flags[allow], note, e);
    key_file_close(&f);
    return st;
}
