/* Which layers of a file are which layers of the model. Numbers alone cannot tell: 1 is the second
 * layer of a flat hybrid and the second pair of a Transformer. What each number holds can. */
#include "ckpt/keys/keys_int.h"

#include <stdlib.h>
#include <string.h>

static bool one_bit(unsigned set) { return set != 0 && (set & (set - 1)) == 0; }

static int count_bits(unsigned set)
{
    int n = 0;
    for (; set != 0; set &= set - 1)
        n++;
    return n;
}

/* ---- the families at each number ------------------------------------------------------------- */

/* How many numbers there are; stacked tensors must agree on their axis. */
static int count_numbers(int *count, const struct key_source *list, int n, const char *label, struct err *e)
{
    const struct key_source *axis = NULL;
    char a[NAME_TEXT], b[NAME_TEXT];
    *count = 0;
    for (int i = 0; i < n; i++) {
        const struct key_source *s = &list[i];
        if (s->name.scope != SCOPE_LAYER)
            continue;
        if (s->name.layer >= 0) {
            *count = s->name.layer >= *count ? s->name.layer + 1 : *count;
            continue;
        }
        shown(s->tensor->stored, a, sizeof a);
        const struct tensor *t = &s->tensor->view;
        if (t->rank == 0 || t->dim[0] > KEY_MAX_LAYER)
            return err_set(e, ST_CONFLICT, "%s: '%s' has no number, but no layer axis either", label, a);
        if (axis != NULL && axis->tensor->view.dim[0] != t->dim[0])
            return err_set(e, ST_CONFLICT, "%s: '%s' stacks %lld layers, '%s' %lld", label, a, (long long)t->dim[0],
                           shown(axis->tensor->stored, b, sizeof b), (long long)axis->tensor->view.dim[0]);
        axis = s;
        *count = t->dim[0] > *count ? (int)t->dim[0] : *count;
    }
    return ST_OK;
}

static void note(unsigned *at, const char *leaf)
{
    unsigned family = key_family(leaf);
    *at |= one_bit(family) ? family : FAM_OTHER;
}

/* An unknown layer counts as one; beside a known kind, unknown leaves belong to that. */
static void settle(unsigned *families, int n)
{
    for (int i = 0; i < n; i++)
        if (families[i] != FAM_OTHER)
            families[i] &= ~(unsigned)FAM_OTHER;
}

int key_stack_of(struct key_stack *s, const struct key_source *list, int n, const char *label, struct err *e)
{
    *s = (struct key_stack){0};
    TRY(count_numbers(&s->n, list, n, label, e));
    TRY(mem_array((void **)&s->families, (size_t)s->n, sizeof *s->families, e));
    for (int i = 0; i < n; i++) {
        const struct key_name *name = &list[i].name;
        if (name->scope != SCOPE_LAYER)
            continue;
        int first = name->layer >= 0 ? name->layer : 0;
        int end = name->layer >= 0 ? first + 1 : (int)list[i].tensor->view.dim[0];
        for (int k = first; k < end; k++)
            note(&s->families[k], name->leaf);
    }
    settle(s->families, s->n);
    return ST_OK;
}

void key_stack_release(struct key_stack *s)
{
    free(s->families);
    *s = (struct key_stack){0};
}

struct tensor layer_slice(const struct tensor *t, int64_t row)
{
    struct tensor view = tensor_shape(t->dtype, t->rank - 1, t->dim + 1);
    view.data = (char *)t->data + row * tensor_bytes(&view);
    return view;
}

/* ---- the model's side ------------------------------------------------------------------------ */

struct layers { /* the model: families by its own numbers, and by physical layer */
    struct key_stack numbers;
    unsigned *families;
    int *number; /* of each physical layer in the model's keys */
    int n;
    bool latent, mtp; /* attention without one projection for all; layers for prediction depths */
};

static void layers_release(struct layers *m)
{
    key_stack_release(&m->numbers);
    free(m->families);
    free(m->number);
}

static int read_model(struct layers *m, const struct key_wanted *w, int n, struct err *e)
{
    bool *fused = NULL;
    for (int i = 0; i < n; i++) {
        m->mtp |= w[i].name.scope == SCOPE_MTP;
        if (w[i].name.scope != SCOPE_LAYER)
            continue;
        if (w[i].param->layer < 0 || w[i].param->layer >= KEY_MAX_LAYER || w[i].name.layer < 0)
            return err_set(e, ST_INVALID, "parameter %s names no layer", w[i].param->key);
        m->n = w[i].param->layer >= m->n ? w[i].param->layer + 1 : m->n;
        m->numbers.n = w[i].name.layer >= m->numbers.n ? w[i].name.layer + 1 : m->numbers.n;
    }
    TRY(mem_array((void **)&m->families, (size_t)m->n, sizeof *m->families, e));
    TRY(mem_array((void **)&m->number, (size_t)m->n, sizeof *m->number, e));
    TRY(mem_array((void **)&m->numbers.families, (size_t)m->numbers.n, sizeof(unsigned), e));
    TRY(mem_array((void **)&fused, (size_t)m->n, sizeof *fused, e));
    for (int i = 0; i < n; i++) {
        if (w[i].name.scope != SCOPE_LAYER)
            continue;
        int l = w[i].param->layer;
        note(&m->families[l], w[i].name.leaf);
        note(&m->numbers.families[w[i].name.layer], w[i].name.leaf);
        m->number[l] = w[i].name.layer;
        fused[l] |= str_starts(w[i].name.leaf, "self_attention.linear_qkv.");
    }
    settle(m->families, m->n);
    settle(m->numbers.families, m->numbers.n);
    unsigned attention = families_at(KEY_PLACE_ATTENTION) & families_of_transformer();
    for (int l = 0; l < m->n; l++)
        m->latent |= (m->families[l] & attention) && !fused[l];
    free(fused);
    return ST_OK;
}

/* ---- matching -------------------------------------------------------------------------------- */

/* The file counts as the model does if every number they share holds the same. What only one of
 * them has is then missing or unexpected by name. */
static bool same_numbers(const struct key_stack *a, const struct key_stack *b)
{
    for (int i = 0; i < a->n && i < b->n; i++)
        if (a->families[i] != 0 && b->families[i] != 0 && a->families[i] != b->families[i])
            return false;
    return true;
}

static int count_family(const unsigned *families, int n, unsigned family)
{
    int count = 0;
    for (int i = 0; i < n; i++)
        count += (families[i] & family) != 0;
    return count;
}

/* The k-th layer of a kind is the k-th layer of that kind. Mamba layers may be in one alone: a
 * Transformer grows into a hybrid with fresh ones, or a hybrid is read without. */
static int pair_by_rank(int *file_of, const struct layers *m, const struct key_stack *file, unsigned *lone,
                        const char *label, struct err *e)
{
    unsigned optional = families_optional();
    *lone = 0;
    for (int f = 0; f < FAM_COUNT; f++) {
        unsigned family = 1u << f;
        int in_model = count_family(m->families, m->n, family);
        int in_file = count_family(file->families, file->n, family);
        if ((family & optional) && (in_model == 0) != (in_file == 0)) {
            *lone |= family;
            continue;
        }
        if (in_model != in_file) {
            err_set(e, ST_CONFLICT, "%s: it has %d %s layer%s, the model has %d", label, in_file, family_name(family),
                    in_file == 1 ? "" : "s", in_model);
            return err_hint(e, "model.pattern must have the layers of the file; only Mamba layers may be all "
                               "new or all left out");
        }
        for (int l = 0, at = 0; l < m->n; l++) {
            if (m->families[l] != family)
                continue;
            while (!(file->families[at] & family))
                at++;
            file_of[l] = at++;
        }
    }
    return ST_OK;
}

/* Does each number of the file hold the next layers of the model? */
static bool same_order(const struct layers *m, const struct key_stack *file, unsigned lone, int *bad_number,
                       int *bad_layer)
{
    int l = 0;
    for (int i = 0; i < file->n; i++) {
        unsigned set = file->families[i] & ~lone, seen = 0;
        *bad_number = i;
        for (int k = count_bits(set); k > 0; k--, l++) {
            while (l < m->n && (m->families[l] & lone || m->families[l] == 0))
                l++;
            *bad_layer = l;
            if (l == m->n || !(m->families[l] & set) || (m->families[l] & seen))
                return false;
            seen |= m->families[l];
        }
    }
    return true;
}

/* Every number holds attention and an MLP, all MLPs of one kind. */
static bool is_transformer(const struct key_stack *s, unsigned lone)
{
    unsigned mlp = 0, mlps = families_at(KEY_PLACE_MLP) & families_of_transformer();
    unsigned attention = families_at(KEY_PLACE_ATTENTION) & families_of_transformer();
    for (int i = 0; i < s->n; i++) {
        unsigned set = s->families[i] & ~lone;
        if (set == 0)
            continue;
        mlp |= set & mlps;
        if (!(set & attention) || !one_bit(set & mlps) || count_bits(set) != 2)
            return false;
    }
    return one_bit(mlp);
}

static int pair_layers(int *file_of, const struct layers *m, const struct key_stack *file, const char *label,
                       struct err *e)
{
    unsigned lone;
    int number, layer;
    char holds[128];
    for (int l = 0; l < m->n; l++)
        if (m->families[l] != 0 && !one_bit(m->families[l]))
            return err_set(e, ST_INVALID, "layer %d of the model is %s at once", l,
                           families_text(m->families[l], holds, sizeof holds));
    TRY(pair_by_rank(file_of, m, file, &lone, label, e));
    if (same_order(m, file, lone, &number, &layer))
        return ST_OK;
    bool pairs = is_transformer(file, lone) || is_transformer(&m->numbers, lone);
    unsigned others = families_at(KEY_PLACE_ATTENTION) & ~families_of_transformer();
    if (pairs && !m->latent && !m->mtp && count_family(file->families, file->n, others) == 0)
        return ST_OK;
    err_set(e, ST_CONFLICT, "%s: layers come in another order: its number %d holds %s, where the model has %s", label,
            number, families_text(file->families[number], holds, sizeof holds),
            layer < m->n ? family_name(m->families[layer]) : "no more");
    return err_hint(e, "orders may differ only between a Transformer and a hybrid of plain attention and one "
                       "kind of MLP, without prediction depths");
}

/* Layers that share a number in the file, and the name of their hyper-connections but for "_2". */
static int find_seconds(struct key_match *out, const struct layers *m, struct err *e)
{
    unsigned *seen = NULL; /* classes at each number */
    int numbers = 0;
    for (int l = 0; l < m->n; l++)
        numbers = out->file_of[l] >= numbers ? out->file_of[l] + 1 : numbers;
    TRY(mem_array((void **)&seen, (size_t)numbers, sizeof *seen, e));
    for (int l = 0; l < m->n; l++) {
        if (out->file_of[l] < 0 || m->families[l] == 0)
            continue;
        unsigned class = 1u << key_hyper_of(m->families[l]), *at = &seen[out->file_of[l]];
        out->second[l] = (*at & class) != 0;
        *at |= class;
    }
    free(seen);
    return ST_OK;
}

int key_match_layers(struct key_match *out, const struct key_stack *file, const struct key_wanted *wants, int n,
                     const char *label, struct err *e)
{
    struct layers m = {0};
    int st;
    *out = (struct key_match){0};
    TRY_OUT(read_model(&m, wants, n, e));
    out->n = m.n;
    TRY_OUT(mem_array((void **)&out->file_of, (size_t)m.n, sizeof *out->file_of, e));
    TRY_OUT(mem_array((void **)&out->second, (size_t)m.n, sizeof *out->second, e));
    bool same = same_numbers(file, &m.numbers);
    for (int l = 0; l < m.n; l++)
        out->file_of[l] = same ? m.number[l] : -1;
    if (!same)
        TRY_OUT(pair_layers(out->file_of, &m, file, label, e));
    st = find_seconds(out, &m, e);
out:
    layers_release(&m);
    return st;
}

void key_match_release(struct key_match *m)
{
    free(m->file_of);
    free(m->second);
    *m = (struct key_match){0};
}

/* ---- hyper-connections of a hybrid stack ----------------------------------------------------- */

static int by_place(const void *a, const void *b)
{
    const struct key_source *x = a, *y = b;
    return key_order_place(&x->name, &y->name);
}

static bool same_layer(const struct key_name *a, const struct key_name *b)
{
    return a->scope == b->scope && a->depth == b->depth && a->layer == b->layer;
}

int key_name_hyper(struct arena *a, struct key_source *list, int n, struct err *e)
{
    if (n > 0)
        qsort(list, (size_t)n, sizeof *list, by_place);
    for (int i = 0, end; i < n; i = end) {
        unsigned families = 0;
        bool second;
        const char *rest;
        for (end = i; end < n && same_layer(&list[end].name, &list[i].name); end++)
            if (key_hyper(list[end].name.leaf, &second, &rest) == HYPER_NONE)
                note(&families, list[end].name.leaf);
        settle(&families, 1);
        if (list[i].name.scope == SCOPE_PLAIN || list[i].name.layer == NO_LAYER || !one_bit(families) ||
            families == FAM_OTHER)
            continue;
        for (int k = i; k < end; k++) {
            if (key_hyper(list[k].name.leaf, &second, &rest) != HYPER_ANY)
                continue;
            list[k].name.leaf = key_hyper_leaf(a, key_hyper_of(families), false, rest);
            if (list[k].name.leaf == NULL)
                return err_set(e, ST_NOMEM, "out of memory reading keys");
        }
    }
    return ST_OK;
}
