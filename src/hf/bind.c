/* Binding: which tensors of the folder make up each parameter of the model. Nothing is read before all of it is known
 * to fit. */
#include "hf/hf_int.h"

#include <stdlib.h>
#include <string.h>

/* ---- keys and names -------------------------------------------------------------------------- */

/* A number at s and what follows it and a dot; NULL if there is none. */
static const char *numbered(const char *s, int64_t *n)
{
    char *end;
    if (*s < '0' || *s > '9')
        return NULL;
    *n = strtoll(s, &end, 10);
    return *end == '.' ? end + 1 : NULL;
}

void hf_key_of(const char *key, struct hf_key *out)
{
    static const char decoder[] = "decoder.layers.", mtp[] = "mtp.layers.", nested[] = "mtp_model_layer.layers.";
    const char *rest;
    *out = (struct hf_key){.rest = key, .layer = -1, .depth = -1};
    if (str_starts(key, decoder) && (rest = numbered(key + sizeof decoder - 1, &out->layer)) != NULL) {
        out->rest = rest;
    } else if (str_starts(key, mtp) && (rest = numbered(key + sizeof mtp - 1, &out->depth)) != NULL) {
        out->rest = rest;
        if (str_starts(rest, nested) && (rest = numbered(rest + sizeof nested - 1, &out->layer)) != NULL)
            out->rest = rest;
    }
}

int64_t hf_pattern_layers(const struct config *c)
{
    int64_t n = 0;
    bool inside = false;
    for (const char *p = c->model.pattern; *p && *p != '/'; p++) {
        if (*p == '[' || *p == ']')
            inside = *p == '[';
        n += *p == '[' || (!inside && strchr("MG*D+CHW-E", *p) != NULL);
    }
    return n;
}

int64_t hf_pattern_depths(const struct config *c)
{
    int64_t n = 0;
    for (const char *p = c->model.pattern; *p; p++)
        n += *p == '/';
    return n;
}

static bool rule_fits(const struct hf_rule *r, const struct hf_key *k)
{
    if (k->depth >= 0 && k->layer < 0)
        return str_starts(r->key, "mtp.") && strcmp(r->key + 4, k->rest) == 0;
    return strcmp(r->key, k->rest) == 0;
}

const struct hf_rule *hf_next_rule(const struct hf_family *fam, const struct hf_key *k, const struct hf_rule *after)
{
    bool passed = after == NULL;
    for (int i = 0; fam->rules[i] != NULL; i++)
        for (const struct hf_rule *r = fam->rules[i]; r->key != NULL; r++) {
            if (passed && rule_fits(r, k))
                return r;
            passed |= r == after;
        }
    return NULL;
}

char *hf_part_name(struct arena *a, const struct hf_family *fam, const char *root, const struct config *c,
                   const struct hf_key *k, const char *name, int64_t expert)
{
    struct buf b;
    buf_init(&b, HF_NAME);
    if (*name == '@' || *name == '/') {
        buf_addf(&b, "%s", *name == '@' ? root : "");
        name++;
    } else if (k->depth >= 0 && fam->mtp_layers != NULL) {
        buf_addf(&b, "%s%lld.", fam->mtp_layers, (long long)k->depth);
    } else if (k->depth >= 0) {
        buf_addf(&b, "%s%s%lld.", root, fam->layers, (long long)(hf_pattern_layers(c) + k->depth));
    } else if (k->layer >= 0) {
        buf_addf(&b, "%s%s%lld.", root, fam->layers, (long long)k->layer);
    }
    const char *mark = strstr(name, "{e}");
    if (mark != NULL)
        buf_addf(&b, "%.*s%lld%s", (int)(mark - name), name, (long long)expert, mark + 3);
    else
        buf_add(&b, name);
    char *text = b.failed ? NULL : arena_strdup(a, b.text);
    buf_release(&b);
    return text;
}

/* ---- links ----------------------------------------------------------------------------------- */

int hf_link_rule(struct hf_folder *f, int param, const struct hf_key *k, const struct hf_rule *r, struct err *e)
{
    struct hf_matrix m = hf_matrix_of(f->params[param]);
    bool each = f->params[param]->expert && !(r->flags & HF_FUSED);
    for (int64_t x = 0; x < (each ? m.experts : 1); x++)
        for (int i = 0; i < HF_MAX_PARTS && r->part[i].name != NULL; i++) {
            char *name = hf_part_name(&f->memory, f->family, f->root, f->config, k, r->part[i].name, x);
            if (name == NULL)
                return err_set(e, ST_NOMEM, "out of memory");
            TRY(mem_grow((void **)&f->links, &f->links_cap, (size_t)f->n_links + 1, sizeof *f->links, e));
            f->links[f->n_links++] =
                (struct hf_link){.param = param, .expert = each ? x : -1, .rule = r, .part = i, .name = name};
        }
    return ST_OK;
}

static bool has_tensor(struct hf_folder *f, const char *name)
{
    struct hf_tensor t;
    return hf_find(f, name, &t);
}

int hf_add_predictions(struct hf_folder *f, struct config *c, struct err *e)
{
    struct hf_key k = {.rest = "enorm.weight", .layer = -1, .depth = 0};
    const struct hf_rule *r = f->family->depth != NULL ? hf_next_rule(f->family, &k, NULL) : NULL;
    const char *last = "";
    struct buf pattern;
    if (r == NULL)
        return ST_OK;
    buf_init(&pattern, 0);
    buf_add(&pattern, c->model.pattern);
    for (;; k.depth++) {
        char *name = hf_part_name(&f->memory, f->family, f->root, c, &k, r->part[0].name, -1);
        bool same = name != NULL && strcmp(name, last) == 0; /* a family without numbers has one depth */
        if (name == NULL || same || !has_tensor(f, name))
            break;
        buf_addf(&pattern, "/%s", f->family->depth);
        last = name;
    }
    int st = buf_check(&pattern, e);
    if (st == ST_OK && k.depth > 0)
        st = hf_set_text(&f->json, c, "model.pattern", pattern.text, e);
    buf_release(&pattern);
    return st;
}

const struct hf_rule *hf_copy_rule(const struct hf_family *fam, const struct config *c, const struct hf_copy *copy)
{
    bool head = strcmp(copy->key, "output_layer.weight") == 0;
    struct hf_key k = {
        .rest = head && c->model.tied ? "embedding.word_embeddings.weight" : copy->key, .layer = -1, .depth = -1};
    return hf_next_rule(fam, &k, NULL);
}

/* The rule whose first tensor is there; else the first one, for the message. */
static int choose_rule(struct hf_folder *f, int param, struct err *e)
{
    const struct param *p = f->params[param];
    const struct hf_rule *chosen = NULL, *first;
    struct hf_key k;
    hf_key_of(p->key, &k);
    first = hf_next_rule(f->family, &k, NULL);
    if (first == NULL)
        return err_set(e, ST_UNSUPPORTED, "a %s model has nothing for our parameter %s", f->family->model_type, p->key);
    for (const struct hf_rule *r = first; r != NULL && chosen == NULL; r = hf_next_rule(f->family, &k, r)) {
        char *name = hf_part_name(&f->memory, f->family, f->root, f->config, &k, r->part[0].name, 0);
        if (name == NULL)
            return err_set(e, ST_NOMEM, "out of memory");
        if (has_tensor(f, name))
            chosen = r;
    }
    return hf_link_rule(f, param, &k, chosen != NULL ? chosen : first, e);
}

/* A table indexes arrays: what it may hold is checked before anything is loaded. */
static int check_table(struct hf_folder *f, const struct param *p, const struct hf_tensor *t, const char *name,
                       struct err *e)
{
    struct tensor table = tensor_shape(DT_I32, t->rank, t->dim);
    int64_t n = tensor_elems(&table);
    TRY(mem_array(&table.data, (size_t)n, sizeof(int32_t), e));
    int st = st_read(t->data, &table, e);
    const int32_t *values = table.data;
    for (int64_t i = 0; st == ST_OK && i < n; i++)
        if (values[i] < 0 || values[i] >= p->n_values)
            st = err_set(e, ST_INVALID, "%s: tensor '%s' holds %d at element %lld, but only experts 0 to %lld exist",
                         f->path, name, values[i], (long long)i, (long long)p->n_values - 1);
    free(table.data);
    return st;
}

static int check_link(struct hf_folder *f, const struct hf_link *l, struct err *e)
{
    const struct param *p = f->params[l->param];
    struct hf_matrix m = hf_matrix_of(p);
    struct hf_span s;
    struct hf_tensor t;
    struct hf_rule rule = *l->rule;
    int64_t want[TENSOR_MAX_RANK] = {0};
    char a[128], b[128];
    if (!hf_find(f, l->name, &t))
        return err_set(e, ST_INVALID, "%s: no tensor '%s' in the folder, which our %s is made of", f->path, l->name,
                       p->key);
    if (t.quant == HF_MXFP4)
        rule.flags &= ~(unsigned)HF_TRANSPOSED; /* blocks lie along the inputs: rows are outputs */
    TRY(hf_span_of(l->rule, l->part, &f->config->model, m.rows, &s, e));
    int rank = hf_part_shape(&rule, &s, p, want);
    struct tensor is = tensor_shape(t.data->view.dtype, t.rank, t.dim), should = tensor_shape(is.dtype, rank, want);
    if (!tensor_same_shape(&is, &should))
        return err_set(e, ST_INVALID, "%s: tensor '%s' is %s, but config.json makes it %s", f->path, l->name,
                       tensor_text(&is, a, sizeof a), tensor_text(&should, b, sizeof b));
    bool bytes = is.dtype == DT_U8 || is.dtype == DT_I8,
         scale_bytes = t.scale != NULL && dtype_bytes(t.scale->view.dtype) == 1;
    if (t.quant == HF_MXFP4 && (!bytes || !scale_bytes))
        return err_set(e, ST_INVALID, "%s: tensor '%s' is MXFP4, whose blocks and scales must be bytes", f->path,
                       l->name);
    if (is.dtype == DT_F8_E4M3 && t.quant != HF_FP8)
        return err_set(e, ST_INVALID, "%s: tensor '%s' is FP8 and has no '%s_scale_inv'", f->path, l->name, l->name);
    if (p->n_values > 0)
        return check_table(f, p, &t, l->name, e);
    return ST_OK;
}

/* What a folder may hold beside the model. */
static bool harmless(const char *name)
{
    static const char *const ends[] = {".rotary_emb.inv_freq", "_extra_state", ".attn.bias", ".attn.masked_bias"};
    static const char *const starts[] = {"model.visual.", "visual.", "vision_tower.", "multi_modal_projector."};
    for (int i = 0; i < countof(ends); i++)
        if (str_ends(name, ends[i]))
            return true;
    for (int i = 0; i < countof(starts); i++)
        if (str_starts(name, starts[i]))
            return true;
    return false;
}

/* Tensor `copy` must hold what the tensor of this rule does. */
static int check_same(struct hf_folder *f, struct hf_name *copy, const struct hf_rule *r, const char *why,
                      struct err *e)
{
    struct hf_key k = {.layer = -1, .depth = -1};
    struct st_difference diff;
    struct hf_tensor original;
    char *name = r ? hf_part_name(&f->memory, f->family, f->root, f->config, &k, r->part[0].name, -1) : NULL;
    if (name == NULL || !hf_find(f, name, &original))
        return err_set(e, ST_INTERNAL, "the tensor that '%s' copies was there before", copy->name);
    TRY(st_compare(&original.data->view, &copy->entry->view, &diff, e));
    if (diff.count != 0)
        return err_set(e, ST_CONFLICT, "%s: %s, but '%s' differs from '%s' in %lld values", f->path, why, copy->name,
                       name, (long long)diff.count);
    copy->used = true;
    return ST_OK;
}

/* A tied model's folder may carry the head all the same: then it must be the embedding. */
static int check_tied_head(struct hf_folder *f, struct hf_name *head, struct err *e)
{
    static const struct hf_copy tied = {"output_layer.weight", NULL};
    return check_same(f, head, hf_copy_rule(f->family, f->config, &tied), "config.json ties the head to the embedding",
                      e);
}

/* A copy that a prediction depth carries of a tensor of the model. */
static int check_copies(struct hf_folder *f, struct hf_name *n, struct err *e)
{
    for (const struct hf_copy *c = f->family->copies; c != NULL && c->key != NULL && !n->used; c++)
        for (struct hf_key k = {.layer = -1}; k.depth < hf_pattern_depths(f->config) && !n->used; k.depth++) {
            char *name = hf_part_name(&f->memory, f->family, f->root, f->config, &k, c->name, -1);
            if (name == NULL)
                return err_set(e, ST_NOMEM, "out of memory");
            if (strcmp(name, n->name) == 0)
                TRY(check_same(f, n, hf_copy_rule(f->family, f->config, c),
                               "multi-token prediction shares embedding and head with the model", e));
        }
    return ST_OK;
}

/* Tensors of multi-token prediction: under names of their own, or as the layer behind the last one. */
static bool is_prediction(const struct hf_folder *f, const char *name)
{
    struct hf_key k = {.rest = "enorm.weight", .layer = -1, .depth = 0};
    char prefix[HF_NAME];
    if (hf_pattern_depths(f->config) > 0) /* they are imported */
        return false;
    if (f->family->mtp_layers != NULL)
        return str_starts(name, "mtp.");
    int n = snprintf(prefix, sizeof prefix, "%s%s%lld.", f->root, f->family->layers,
                     (long long)hf_pattern_layers(f->config));
    return hf_next_rule(f->family, &k, NULL) != NULL && n > 0 && (size_t)n < sizeof prefix && str_starts(name, prefix);
}

static int check_leftovers(struct hf_folder *f, struct buf *notes, struct err *e)
{
    int64_t predictions = 0;
    for (int i = 0; i < f->n_names; i++) {
        struct hf_name *n = &f->names[i];
        if (n->used || harmless(n->name))
            continue;
        TRY(check_copies(f, n, e));
        if (n->used)
            continue;
        if (strcmp(n->name, "lm_head.weight") == 0 && f->config->model.tied) {
            TRY(check_tied_head(f, n, e));
        } else if (is_prediction(f, n->name)) {
            predictions++;
        } else {
            err_set(e, ST_UNSUPPORTED,
                    "%s: tensor '%.160s' belongs to no parameter of the %s model that config.json describes", f->path,
                    n->name, f->family->model_type);
            return err_hint(e, "the folder holds more than braid can express; nothing was written");
        }
    }
    if (predictions > 0 && notes != NULL)
        buf_addf(notes, "%lld tensors of multi-token prediction were left out\n", (long long)predictions);
    return ST_OK;
}

int hf_bind(struct hf_folder *f, const struct config *c, const struct param *const *params, int n, struct buf *notes,
            struct err *e)
{
    f->config = c;
    f->params = params;
    f->n_params = n;
    f->n_links = 0;
    TRY(mem_array((void **)&f->first, (size_t)n + 1, sizeof *f->first, e));
    for (int i = 0; i < n; i++) {
        f->first[i] = f->n_links;
        TRY(choose_rule(f, i, e));
    }
    f->first[n] = f->n_links;
    for (int i = 0; i < f->n_names; i++)
        f->names[i].used = false;
    for (int i = 0; i < f->n_links; i++)
        if (!f->gradients || param_trained(params[f->links[i].param]))
            TRY(check_link(f, &f->links[i], e));
    return check_leftovers(f, notes, e);
}

bool hf_same_tensor(const struct hf_folder *f, int i, int k)
{
    return strcmp(f->links[f->first[i]].name, f->links[f->first[k]].name) == 0;
}

/* ---- loading --------------------------------------------------------------------------------- */

/* The parameter is one tensor as it stands: embeddings and heads, the largest of all, are read without a copy. */
static bool is_whole(const struct hf_folder *f, int i, const struct hf_tensor *t)
{
    const struct hf_link *l = &f->links[f->first[i]];
    const struct hf_part *p = &l->rule->part[0];
    return f->first[i + 1] == f->first[i] + 1 && l->expert < 0 &&
           (l->rule->flags & ~(unsigned)(HF_KEEP_F32 | HF_INTEGERS)) == 0 && l->rule->groups == NULL &&
           p->stride == NULL && p->offset == NULL && p->pairs == NULL && t->quant == HF_PLAIN;
}

int hf_load(struct hf_folder *f, int i, const struct tensor *dst, struct err *e)
{
    const struct param *p = f->params[i];
    struct hf_matrix m = hf_matrix_of(p);
    struct hf_tensor whole;
    if (f->first[i + 1] > f->first[i] && hf_find(f, f->links[f->first[i]].name, &whole) && is_whole(f, i, &whole)) {
        struct tensor to = tensor_shape(DT_F32, whole.rank, whole.dim);
        to.data = dst->data;
        int st = st_read(whole.data, &to, e);
        st_forget(f->files[whole.file], whole.data);
        return st;
    }
    for (int k = f->first[i]; k < f->first[i + 1]; k++) {
        const struct hf_link *l = &f->links[k];
        struct hf_span s;
        struct hf_tensor t;
        const float *values;
        float add =
            l->rule->flags & HF_MINUS_ONE && f->config->model.norm_zero_centered && !f->gradients ? -1.0f : 0.0f;
        TRY(hf_span_of(l->rule, l->part, &f->config->model, m.rows, &s, e));
        if (!hf_find(f, l->name, &t))
            return err_set(e, ST_INTERNAL, "tensor '%s' was there before", l->name);
        TRY(hf_read(f, &t, l->name, &values, e));
        bool transposed = l->rule->flags & HF_TRANSPOSED && t.quant != HF_MXFP4;
        for (int64_t x = 0; x < m.experts; x++) {
            if (l->expert >= 0 && l->expert != x)
                continue;
            const float *from = values + (l->rule->flags & HF_FUSED ? x * s.total * m.cols : 0);
            hf_copy_in(&s, m.cols, transposed, add, (float *)dst->data + x * m.rows * m.cols, from);
        }
    }
    return ST_OK;
}
