/* The map from a model's parameters to the tensors of a file. Opening it decides where everything
 * comes from and refuses what is ambiguous; loading then only copies. */
#include "ckpt/keys/keys_int.h"

#include <stdlib.h>
#include <string.h>

struct found { /* one parameter: its rows, front to back, are these pieces */
    struct tensor *pieces;
    int n;
};

struct keymap {
    const struct key_file *file;
    enum key_space space;
    enum dtype to;
    struct key_source *sources; /* sorted by key_order */
    int n_sources;
    struct key_wanted *wants;
    struct found *found;
    int n_wants;
    int *used_rows; /* of each source: layers of a stack are taken one by one */
    struct key_match layers;
    int missing, unexpected;
    struct keymap *exact; /* of a model whose file has fp32 master weights as well: those, which are loaded instead */
    struct arena memory;
};

/* ---- reading names --------------------------------------------------------------------------- */

static int by_order(const void *a, const void *b)
{
    const struct key_source *x = a, *y = b;
    int order = key_order(&x->name, &y->name);
    return order ? order : strcmp(x->tensor->stored, y->tensor->stored);
}

static int read_sources(struct keymap *m, struct err *e)
{
    char a[NAME_TEXT], b[NAME_TEXT];
    TRY(mem_array((void **)&m->sources, (size_t)m->file->n, sizeof *m->sources, e));
    for (int i = 0; i < m->file->n; i++) {
        const struct key_tensor *t = &m->file->list[i];
        if (t->space != m->space || key_ignored(t->key) || (m->space == KEYS_MODEL && str_starts(t->key, "optimizer.")))
            continue;
        m->sources[m->n_sources].tensor = t;
        TRY(key_parse(&m->memory, t->key, &m->sources[m->n_sources++].name, e));
    }
    TRY(key_name_hyper(&m->memory, m->sources, m->n_sources, e));
    qsort(m->sources, (size_t)m->n_sources, sizeof *m->sources, by_order);
    for (int i = 1; i < m->n_sources; i++)
        if (key_order(&m->sources[i - 1].name, &m->sources[i].name) == 0)
            return err_set(e, ST_CONFLICT, "%s: '%s' and '%s' are names of the same tensor", m->file->label,
                           shown(m->sources[i - 1].tensor->stored, a, sizeof a),
                           shown(m->sources[i].tensor->stored, b, sizeof b));
    return mem_array((void **)&m->used_rows, (size_t)m->n_sources, sizeof *m->used_rows, e);
}

static int want_order(const void *a, const void *b, void *wants)
{
    const struct key_wanted *w = wants;
    return key_order(&w[*(const int *)a].name, &w[*(const int *)b].name);
}

/* A group such as [MM*E] would store two layers under one key. */
static int refuse_twins(const struct keymap *m, struct err *e)
{
    int *order = NULL, st = ST_OK;
    TRY(mem_array((void **)&order, (size_t)m->n_wants, sizeof *order, e));
    for (int i = 0; i < m->n_wants; i++)
        order[i] = i;
    qsort_r(order, (size_t)m->n_wants, sizeof *order, want_order, m->wants);
    for (int i = 1; i < m->n_wants && st == ST_OK; i++)
        if (want_order(&order[i - 1], &order[i], m->wants) == 0)
            st = err_set(e, ST_CONFLICT, "two parameters of the model have the key %s: it cannot be stored",
                         m->wants[order[i]].param->key);
    free(order);
    return st;
}

static int read_wants(struct keymap *m, const struct param *const *params, int n, struct err *e)
{
    TRY(mem_array((void **)&m->wants, (size_t)n, sizeof *m->wants, e));
    TRY(mem_array((void **)&m->found, (size_t)n, sizeof *m->found, e));
    m->n_wants = n;
    for (int i = 0; i < n; i++) {
        m->wants[i].param = params[i];
        TRY(key_parse(&m->memory, params[i]->key, &m->wants[i].name, e));
    }
    return refuse_twins(m, e);
}

/* ---- finding --------------------------------------------------------------------------------- */

struct range {
    int first, end;
};

static struct range find(const struct keymap *m, const struct key_name *name)
{
    int low = 0, high = m->n_sources;
    while (low < high) {
        int mid = low + (high - low) / 2;
        if (key_order_place(&m->sources[mid].name, name) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    struct range r = {low, low};
    while (r.end < m->n_sources && key_order_place(&m->sources[r.end].name, name) == 0)
        r.end++;
    return r;
}

static int collision(const struct keymap *m, int i, const struct range *a, const struct range *b, struct err *e)
{
    char x[NAME_TEXT], y[NAME_TEXT];
    err_set(e, ST_CONFLICT, "%s: %s could come from '%s' or from '%s'", m->file->label, m->wants[i].param->key,
            shown(m->sources[a->first].tensor->stored, x, sizeof x),
            shown(m->sources[b->end - 1].tensor->stored, y, sizeof y));
    return err_hint(e, "the file holds it twice; remove one of them");
}

/* Layers of the model's prediction depth that hold a leaf's family. */
static int mtp_layers_like(const struct keymap *m, const struct key_name *name)
{
    unsigned family = key_family(name->leaf);
    int last = -1, count = 0;
    for (int i = 0; i < m->n_wants; i++) {
        const struct key_name *w = &m->wants[i].name;
        unsigned theirs = key_family(w->leaf);
        if (w->scope != SCOPE_MTP || w->depth != name->depth || w->layer < 0 || w->layer == last)
            continue;
        if (theirs != 0 && (theirs & family) == theirs) {
            count++;
            last = w->layer;
        }
    }
    return count;
}

/* The name of a parameter as the file numbers its layers. */
static int name_in_file(struct keymap *m, int i, struct key_name *out, struct err *e)
{
    const char *rest;
    bool second;
    int layer = m->wants[i].param->layer;
    *out = m->wants[i].name;
    if (out->scope != SCOPE_LAYER)
        return ST_OK;
    out->layer = m->layers.file_of[layer];
    enum key_hyper class = key_hyper(out->leaf, &second, &rest);
    if (class == HYPER_NONE || second == m->layers.second[layer] || class == HYPER_ANY)
        return ST_OK;
    out->leaf = key_hyper_leaf(&m->memory, class, m->layers.second[layer], rest);
    return out->leaf ? ST_OK : err_set(e, ST_NOMEM, "out of memory mapping keys");
}

/* Two ways to name a place: by number, and by the one name for all. */
static int find_either(struct keymap *m, int i, struct range *out, bool *shared, struct err *e)
{
    struct key_name name;
    TRY(name_in_file(m, i, &name, e));
    int number = name.layer;
    *out = (struct range){0, 0};
    *shared = false;
    if (number != NOT_NUMBERED || name.scope == SCOPE_MTP)
        *out = find(m, &name);
    if (name.scope == SCOPE_PLAIN || number < 0)
        return ST_OK;
    name.layer = NOT_NUMBERED;
    struct range other = find(m, &name);
    if (other.first == other.end)
        return ST_OK;
    if (name.scope == SCOPE_LAYER && number >= m->sources[other.first].tensor->view.dim[0])
        return ST_OK;
    if (name.scope == SCOPE_MTP && mtp_layers_like(m, &name) != 1) {
        err_set(e, ST_CONFLICT, "%s: depth %d has one layer of each kind, but the model's has %d with %s",
                m->file->label, name.depth, mtp_layers_like(m, &name), name.leaf);
        return err_hint(e, "a Transformer's prediction depth fits patterns such as /*- and /*E only");
    }
    if (out->first != out->end)
        return collision(m, i, out, &other, e);
    *out = other;
    *shared = true;
    return ST_OK;
}

/* ---- shapes ---------------------------------------------------------------------------------- */

static int wrong_shape(const struct keymap *m, int i, const char *stored, const struct tensor *have, struct err *e)
{
    const struct param *p = m->wants[i].param;
    struct tensor want = tensor_shape(have->dtype, p->rank, p->dim);
    char key[NAME_TEXT], a[128], b[128];
    err_set(e, ST_CONFLICT, "%s: '%s' is %s but %s of the model needs %s", m->file->label,
            shown(stored, key, sizeof key), tensor_text(have, a, sizeof a), p->key, tensor_text(&want, b, sizeof b));
    return err_hint(e, "the model configuration differs from the one it was saved with");
}

static bool same_dims(int rank, const int64_t *a, const int64_t *b)
{
    return rank <= 0 || memcmp(a, b, (size_t)rank * sizeof *a) == 0;
}

/* [E, out, in] may be stored as [E * out, in]. */
static bool packed(const struct param *p, const struct tensor *t)
{
    int64_t rows;
    return p->rank > 1 && t->rank == p->rank - 1 && i64_mul(p->dim[0], p->dim[1], &rows) && t->dim[0] == rows &&
           same_dims(t->rank - 1, t->dim + 1, p->dim + 2);
}

/* How many experts the model's own keys split this leaf into. */
static int count_experts(const struct keymap *m, const struct key_name *name)
{
    int n = 0;
    for (int i = 0; i < m->n_wants; i++)
        n += m->wants[i].name.expert != WHOLE && key_order_place(&m->wants[i].name, name) == 0;
    return n;
}

/* Expert k of n from one tensor for all: rows of a leading expert axis, or equal shares of the
 * rows. */
static int split_expert(const struct keymap *m, int i, const char *stored, struct tensor *t, struct err *e)
{
    int n = count_experts(m, &m->wants[i].name), k = m->wants[i].name.expert;
    char key[NAME_TEXT], text[128];
    if (n == 0 || k >= n || t->rank == 0 || t->dim[0] % n != 0)
        return err_set(e, ST_CONFLICT, "%s: Cannot split checkpoint tensor '%s', %s, among %d experts", m->file->label,
                       shown(stored, key, sizeof key), tensor_text(t, text, sizeof text), n);
    if (t->dim[0] == n) {
        *t = layer_slice(t, k);
        return ST_OK;
    }
    int64_t rows = t->dim[0] / n;
    char *data = t->data;
    t->dim[0] = rows;
    t->data = data + k * tensor_bytes(t);
    return ST_OK;
}

/* ---- taking ---------------------------------------------------------------------------------- */

static struct tensor take(struct keymap *m, int source, bool stacked, int number)
{
    m->used_rows[source]++;
    m->sources[source].used = true;
    const struct tensor *view = &m->sources[source].tensor->view;
    return stacked ? layer_slice(view, number) : *view;
}

static int take_whole(struct keymap *m, int i, int source, bool stacked, int number, struct err *e)
{
    const struct param *p = m->wants[i].param;
    const struct key_name *name = &m->wants[i].name;
    const char *stored = m->sources[source].tensor->stored;
    struct tensor t = take(m, source, stacked, number);
    if (name->expert != WHOLE && m->sources[source].name.expert == WHOLE) {
        m->used_rows[source] -= name->expert > 0; /* a layer counts once, however many share it */
        TRY(split_expert(m, i, stored, &t, e));
    }
    bool fits = t.rank == p->rank && same_dims(p->rank, t.dim, p->dim);
    if (!fits && !(str_starts(name->leaf, "mlp.experts.") && packed(p, &t)))
        return wrong_shape(m, i, stored, &t, e);
    m->found[i].pieces[0] = t;
    m->found[i].n = 1;
    return ST_OK;
}

/* Experts stored one by one: exactly those of the model, each of the shape of one. */
static int take_experts(struct keymap *m, int i, struct range r, bool stacked, int number, struct err *e)
{
    const struct param *p = m->wants[i].param;
    int n = r.end - r.first;
    if (p->rank < 2 || n != p->dim[0] || m->sources[r.end - 1].name.expert != n - 1) {
        err_set(e, ST_CONFLICT, "%s: %s has %d experts from 0 to %d, the model has %lld", m->file->label, p->key, n,
                m->sources[r.end - 1].name.expert, (long long)(p->rank < 2 ? 1 : p->dim[0]));
        return err_hint(e, "experts are all needed, numbered from 0; see model.experts");
    }
    for (int k = 0; k < n; k++) {
        struct tensor t = take(m, r.first + k, stacked, number);
        if (t.rank != p->rank - 1 || !same_dims(t.rank, t.dim, p->dim + 1))
            return wrong_shape(m, i, m->sources[r.first + k].tensor->stored, &t, e);
        m->found[i].pieces[k] = t;
    }
    m->found[i].n = n;
    return ST_OK;
}

/* Parts of a projection: rows that follow each other. */
static int take_parts(struct keymap *m, int i, struct range r, bool stacked, int number, struct err *e)
{
    const struct param *p = m->wants[i].param;
    int n = r.end - r.first;
    int64_t rows = 0;
    if (n != key_parts(m->wants[i].name.leaf, m->sources[r.end - 1].name.part))
        return err_set(e, ST_CONFLICT, "%s: %s is stored in parts, and not all of them are there", m->file->label,
                       p->key);
    for (int k = 0; k < n; k++) {
        struct tensor t = take(m, r.first + k, stacked, number);
        const char *stored = m->sources[r.first + k].tensor->stored;
        if (t.rank != p->rank || t.rank == 0 || !same_dims(t.rank - 1, t.dim + 1, p->dim + 1) ||
            t.dim[0] > p->dim[0] - rows)
            return wrong_shape(m, i, stored, &t, e);
        rows += t.dim[0];
        m->found[i].pieces[k] = t;
    }
    m->found[i].n = n;
    if (rows != p->dim[0])
        return err_set(e, ST_CONFLICT, "%s: the parts of %s have %lld rows together, the model needs %lld",
                       m->file->label, p->key, (long long)rows, (long long)p->dim[0]);
    return ST_OK;
}

static enum dtype loaded_as(const struct keymap *m, int i) { return m->wants[i].param->n_values > 0 ? DT_I32 : m->to; }

/* A table indexes arrays: what it may hold is checked before anything is loaded. */
static int check_values(const struct keymap *m, int i, const struct tensor *piece, struct err *e)
{
    const struct param *p = m->wants[i].param;
    int64_t n = tensor_elems(piece), size = (int64_t)dtype_bytes(piece->dtype);
    for (int64_t k = 0; k < n; k++) {
        int64_t v;
        TRY(convert_elems(&v, DT_I64, (const char *)piece->data + k * size, piece->dtype, 1, e));
        if (v >= 0 && v < p->n_values)
            continue;
        err_set(e, ST_CONFLICT, "%s: %s holds %lld at element %lld, but only 0 to %lld mean something", m->file->label,
                p->key, (long long)v, (long long)k, (long long)p->n_values - 1);
        return err_hint(e, "the table is damaged, or of a model with more experts; see model.experts");
    }
    return ST_OK;
}

/* Blocks of gate and up rows in the file; matrices: 1 where the model's experts are single. */
static int64_t blocks_of(const struct keymap *m, int i, int64_t *matrices, int64_t *rows)
{
    const struct param *p = m->wants[i].param;
    int own = str_ends(m->wants[i].name.leaf, ".bias") ? 1 : 2, many = p->rank > own;
    *matrices = many ? p->dim[0] : 1;
    *rows = p->dim[many];
    return key_is_glu(m->wants[i].name.leaf) ? m->file->glu_interleave : 0;
}

static int check_types(const struct keymap *m, int i, struct err *e)
{
    const struct param *p = m->wants[i].param;
    enum dtype to = loaded_as(m, i);
    struct tensor want = tensor_shape(to, p->rank, p->dim);
    int64_t matrices, rows, blocks = blocks_of(m, i, &matrices, &rows);
    for (int k = 0; k < m->found[i].n; k++) {
        if (!dtype_converts(to, m->found[i].pieces[k].dtype))
            return err_set(e, ST_UNSUPPORTED, "%s: %s: cannot convert %s to %s", m->file->label, p->key,
                           dtype_name(m->found[i].pieces[k].dtype), dtype_name(to));
        if (p->n_values > 0)
            TRY(check_values(m, i, &m->found[i].pieces[k], e));
    }
    if (blocks > 0)
        TRY(glu_check(m->file->label, p->key, rows, blocks, e));
    return check_rows(p, &want, p->key, e);
}

static int resolve(struct keymap *m, int i, struct err *e)
{
    struct range r;
    bool shared;
    TRY(find_either(m, i, &r, &shared, e));
    const struct key_name *name = &m->wants[i].name;
    bool stacked = shared && name->scope == SCOPE_LAYER;
    int number = name->scope == SCOPE_LAYER ? m->layers.file_of[m->wants[i].param->layer] : 0;
    if (r.first == r.end) {
        m->missing++;
        return ST_OK;
    }
    m->found[i].pieces = arena_alloc(&m->memory, (size_t)(r.end - r.first) * sizeof(struct tensor));
    if (m->found[i].pieces == NULL)
        return err_set(e, ST_NOMEM, "out of memory mapping keys");
    /* WHOLE sorts first: beside numbered experts or parts, one tensor for all
     * is a second source. */
    const struct key_source *first = &m->sources[r.first], *last = &m->sources[r.end - 1];
    int st, whole = first->name.expert == WHOLE && first->name.part == WHOLE;
    if (r.end - r.first > 1 && (whole || (first->name.part == WHOLE) != (last->name.part == WHOLE)))
        return collision(m, i, &r, &r, e);
    if (name->expert != WHOLE && !whole) { /* the model's experts are single as well */
        int at = r.first;
        while (at < r.end && m->sources[at].name.expert != name->expert)
            at++;
        if (at == r.end) {
            m->missing++;
            return ST_OK;
        }
        st = take_whole(m, i, at, stacked, number, e);
    } else if (whole) {
        st = take_whole(m, i, r.first, stacked, number, e);
    } else if (first->name.expert != WHOLE) {
        st = take_experts(m, i, r, stacked, number, e);
    } else {
        st = take_parts(m, i, r, stacked, number, e);
    }
    return st == ST_OK ? check_types(m, i, e) : st;
}

/* A stack of which only some layers were taken is left over in part. */
static bool left_over(const struct keymap *m, int source)
{
    const struct key_source *s = &m->sources[source];
    bool stack = s->name.scope == SCOPE_LAYER && s->name.layer == NOT_NUMBERED;
    return !s->used || (stack && m->used_rows[source] < s->tensor->view.dim[0]);
}

static int build(struct keymap *m, const struct param *const *params, int n, struct err *e)
{
    struct key_stack stack = {0};
    TRY(read_sources(m, e));
    TRY(read_wants(m, params, n, e));
    int st = key_stack_of(&stack, m->sources, m->n_sources, m->file->label, e);
    if (st == ST_OK)
        st = key_match_layers(&m->layers, &stack, m->wants, n, m->file->label, e);
    key_stack_release(&stack);
    for (int i = 0; st == ST_OK && i < n; i++)
        st = resolve(m, i, e);
    for (int i = 0; st == ST_OK && i < m->n_sources; i++)
        m->unexpected += left_over(m, i);
    return st;
}

static bool has_space(const struct key_file *f, enum key_space space)
{
    for (int i = 0; i < f->n; i++)
        if (f->list[i].space == space)
            return true;
    return false;
}

int keymap_open(struct keymap **out, const struct key_file *f, enum key_space space, const struct param *const *params,
                int n, enum dtype to, struct err *e)
{
    struct keymap *m = NULL;
    *out = NULL;
    TRY(mem_array((void **)&m, 1, sizeof *m, e));
    arena_init(&m->memory);
    m->file = f;
    m->space = space;
    m->to = to;
    int st = build(m, params, n, e);
    if (st == ST_OK && space == KEYS_MODEL && has_space(f, KEYS_FP32_PARAM))
        st = keymap_open(&m->exact, f, KEYS_FP32_PARAM, params, n, to, e);
    if (st != ST_OK)
        keymap_close(m);
    else
        *out = m;
    return st;
}

void keymap_close(struct keymap *m)
{
    if (m == NULL)
        return;
    keymap_close(m->exact);
    free(m->sources);
    free(m->wants);
    free(m->found);
    free(m->used_rows);
    key_match_release(&m->layers);
    arena_release(&m->memory);
    free(m);
}

/* ---- answers --------------------------------------------------------------------------------- */

bool keymap_has(const struct keymap *m, int i) { return m->found[i].n > 0; }
int keymap_missing(const struct keymap *m) { return m->missing; }
int keymap_unexpected(const struct keymap *m) { return m->unexpected; }

/* Lists the first few names; the message has their number in any case. */
static void list_key(struct buf *b, int *n, const char *key)
{
    enum { SHOW = 8, ROOM = 330 };
    char text[NAME_TEXT];
    shown(key, text, sizeof text);
    if (*n >= SHOW || b->len + strlen(text) > ROOM)
        return;
    buf_addf(b, "%s%s", (*n)++ ? ", " : ": ", text);
}

int keymap_check(const struct keymap *m, unsigned allow, struct err *e)
{
    if (m->exact != NULL) /* tables and buffers have no master weights */
        TRY(keymap_check(m->exact, allow | CKPT_ALLOW_MISSING, e));
    int missing = allow & CKPT_ALLOW_MISSING ? 0 : m->missing, n_missing = 0;
    int unexpected = allow & CKPT_ALLOW_UNEXPECTED ? 0 : m->unexpected, n_unexpected = 0;
    if (missing + unexpected == 0)
        return ST_OK;
    struct buf a, b;
    buf_init(&a, 0);
    buf_init(&b, 0);
    for (int i = 0; missing > 0 && i < m->n_wants; i++)
        if (!keymap_has(m, i))
            list_key(&a, &n_missing, m->wants[i].param->key);
    for (int i = 0; unexpected > 0 && i < m->n_sources; i++)
        if (left_over(m, i))
            list_key(&b, &n_unexpected, m->sources[i].tensor->stored);
    int st =
        err_set(e, ST_CONFLICT, "%s tensors of %.120s: %d missing%s%s; %d unexpected%s%s", key_space_name(m->space),
                m->file->label, missing, a.text ? a.text : "", missing > n_missing ? ", ..." : "", unexpected,
                b.text ? b.text : "", unexpected > n_unexpected ? ", ..." : "");
    err_hint(e, "the model configuration differs from the one it was saved with; `braid ckpt ls` "
                "lists its tensors");
    buf_release(&a);
    buf_release(&b);
    return st;
}

/* ---- loading --------------------------------------------------------------------------------- */

static int copy_pieces(const struct found *f, const struct tensor *dst, struct err *e)
{
    char *at = dst->data;
    for (int k = 0; k < f->n; k++) {
        int64_t n = tensor_elems(&f->pieces[k]);
        TRY(convert_elems(at, dst->dtype, f->pieces[k].data, f->pieces[k].dtype, n, e));
        at += n * (int64_t)dtype_bytes(dst->dtype);
    }
    return ST_OK;
}

/* Everything in one piece and in the order of a braid file: gate rows, then up rows. */
static int copy_in_disk_order(const struct keymap *m, int i, const struct tensor *dst, struct err *e)
{
    int64_t matrices, rows, blocks = blocks_of(m, i, &matrices, &rows), bytes = tensor_bytes(dst);
    if (blocks == 0)
        return copy_pieces(&m->found[i], dst, e);
    struct tensor stored = *dst;
    TRY(mem_aligned(&stored.data, (size_t)bytes, 64, e));
    int st = copy_pieces(&m->found[i], &stored, e);
    struct glu_rows change = {.matrices = matrices, .rows = rows, .bytes = bytes / (matrices * rows), .from = blocks};
    if (st == ST_OK)
        glu_reorder(dst->data, stored.data, &change);
    free(stored.data);
    return st;
}

int keymap_load(const struct keymap *m, int i, const struct tensor *dst, struct err *e)
{
    if (m->exact != NULL && keymap_has(m->exact, i))
        return keymap_load(m->exact, i, dst, e);
    const struct param *p = m->wants[i].param;
    const struct found *f = &m->found[i];
    struct tensor shape = tensor_shape(dst->dtype, p->rank, p->dim);
    bool blocks = m->file->glu_interleave > 0 && key_is_glu(m->wants[i].name.leaf);
    if (f->n == 0)
        return err_set(e, ST_CONFLICT, "%s has no %s tensor for %s", m->file->label, key_space_name(m->space), p->key);
    if (dst->dtype != loaded_as(m, i) || !tensor_is_dense(dst) || !tensor_same_shape(dst, &shape) ||
        (dst->data == NULL && tensor_elems(dst) > 0))
        return err_set(e, ST_INVALID, "%s: the destination is not a dense host tensor of its shape", p->key);
    if (tensor_elems(dst) == 0)
        return ST_OK;
    if (p->rows.n_sections == 0)
        return copy_in_disk_order(m, i, dst, e);
    shape.data = f->pieces[0].data;
    shape.dtype = f->pieces[0].dtype;
    if (f->n == 1 && !blocks)
        return copy_rows_from_disk(dst, &shape, p, e);
    void *rows = NULL;
    TRY(mem_aligned(&rows, (size_t)tensor_bytes(dst), 64, e));
    shape = *dst;
    shape.data = rows;
    int st = copy_in_disk_order(m, i, &shape, e);
    if (st == ST_OK)
        st = copy_rows_from_disk(dst, &shape, p, e);
    free(rows);
    return st;
}
