/* Writing the tensors of a file in another layout. Everything is first taken apart into one tensor
 * per layer, then numbered anew, and what belongs together is put together. */
#include "ckpt/keys/keys_int.h"

#include <stdlib.h>
#include <string.h>

static const char *const layout_names[KEYS_LAYOUTS] = {"flat", "logical", "stacked", "indexed", "grouped"};

const char *key_layout_name(enum key_layout l) { return layout_names[l]; }

bool key_layout_from_name(const char *name, enum key_layout *out)
{
    for (int i = 0; i < KEYS_LAYOUTS; i++)
        if (strcmp(name, layout_names[i]) == 0) {
            *out = (enum key_layout)i;
            return true;
        }
    return false;
}

struct atom { /* one layer's tensor, or one expert's */
    struct key_name name;
    struct tensor view;
    const char *stored;
};
struct work {
    const struct key_file *file;
    enum key_layout to;
    const struct key_layers *layers;
    const struct config *distributed;
    int64_t glu_interleave;
    struct key_stack stack; /* what the file's model has at each number */
    struct atom *atoms;
    size_t n, cap;
    struct key_output *out;
    bool transformer_norm, hyper, numbered_flat;
};

static int by_name(const void *a, const void *b)
{
    const struct atom *x = a, *y = b;
    int order = key_order(&x->name, &y->name);
    return order ? order : strcmp(x->stored, y->stored);
}

static int add_atom(struct work *w, const struct atom *atom, struct err *e)
{
    TRY(mem_grow((void **)&w->atoms, &w->cap, w->n + 1, sizeof *w->atoms, e));
    w->atoms[w->n++] = *atom;
    return ST_OK;
}

static int no_memory(struct err *e) { return err_set(e, ST_NOMEM, "out of memory converting keys"); }

/* Two tensors under one name: in the file as it is, or after numbering. */
static int sort_atoms(struct work *w, struct err *e)
{
    char a[NAME_TEXT], b[NAME_TEXT];
    if (w->n > 0)
        qsort(w->atoms, w->n, sizeof *w->atoms, by_name);
    for (size_t i = 1; i < w->n; i++)
        if (key_order(&w->atoms[i - 1].name, &w->atoms[i].name) == 0)
            return err_set(e, ST_CONFLICT, "%s: '%s' and '%s' are names of the same tensor", w->file->label,
                           shown(w->atoms[i - 1].stored, a, sizeof a), shown(w->atoms[i].stored, b, sizeof b));
    return ST_OK;
}

/* ---- taking apart ---------------------------------------------------------------------------- */

/* The tensors of a space with their names. */
static int read_names(struct work *w, enum key_space space, struct key_source *list, int *n, struct err *e)
{
    const struct key_file *f = w->file;
    *n = 0;
    for (int i = 0; i < f->n; i++) {
        if (f->list[i].space != space || key_ignored(f->list[i].key))
            continue;
        list[*n].tensor = &f->list[i];
        TRY(key_parse(&w->out->memory, f->list[i].key, &list[(*n)++].name, e));
    }
    return key_name_hyper(&w->out->memory, list, *n, e);
}

static int add_atoms(struct work *w, const struct key_source *s, struct err *e)
{
    struct atom atom = {s->name, s->tensor->view, s->tensor->stored};
    if (atom.name.scope != SCOPE_LAYER || atom.name.layer != NOT_NUMBERED)
        return add_atom(w, &atom, e);
    if (s->tensor->view.rank == 0)
        return err_set(e, ST_CONFLICT, "%s: '%s' has no number, but no layer axis either", w->file->label, atom.stored);
    for (int64_t row = 0; row < s->tensor->view.dim[0]; row++) {
        atom.name.layer = (int)row;
        atom.view = layer_slice(&s->tensor->view, row);
        TRY(add_atom(w, &atom, e));
    }
    return ST_OK;
}

/* The numbers of layers are those of the model, whatever space is converted: not every parameter has moments. */
static int read_atoms(struct work *w, enum key_space space, struct err *e)
{
    const struct key_file *f = w->file;
    struct key_source *list = NULL;
    struct key_stack own = {0};
    int n, st;
    TRY(mem_array((void **)&list, (size_t)f->n, sizeof *list, e));
    TRY_OUT(read_names(w, KEYS_MODEL, list, &n, e));
    TRY_OUT(key_stack_of(&w->stack, list, n, f->label, e));
    TRY_OUT(read_names(w, space, list, &n, e));
    TRY_OUT(key_stack_of(&own, list, n, f->label, e));
    if (own.n > w->stack.n) { /* a file of optimizer state alone */
        struct key_stack model = w->stack;
        w->stack = own;
        own = model;
    }
    for (int i = 0; i < n; i++) {
        bool second;
        const char *rest;
        w->transformer_norm |= strstr(list[i].tensor->key, "decoder.final_layernorm.") != NULL;
        w->hyper |= key_hyper(list[i].name.leaf, &second, &rest) != HYPER_NONE;
        TRY_OUT(add_atoms(w, &list[i], e));
    }
    st = sort_atoms(w, e);
out:
    key_stack_release(&own);
    free(list);
    return st;
}

/* ---- numbering ------------------------------------------------------------------------------- */

static bool one_bit(unsigned set) { return set != 0 && (set & (set - 1)) == 0; }

static bool has_groups(const struct key_stack *s);
static unsigned hyper_family(const struct work *w, const struct atom *atom, unsigned set);

/* Which of the kinds in `set` a leaf belongs to. */
static int family_in(const struct work *w, const struct atom *atom, unsigned set, unsigned *family, struct err *e)
{
    char key[NAME_TEXT], holds[128];
    unsigned of_leaf = key_family(atom->name.leaf);
    *family = of_leaf ? of_leaf & set : set;
    if (!one_bit(*family) && has_groups(&w->stack))
        *family = hyper_family(w, atom, set);
    if (one_bit(*family))
        return ST_OK;
    return err_set(e, ST_CONFLICT, "%s: '%s' may belong to any of %s", w->file->label,
                   shown(atom->stored, key, sizeof key), families_text(set, holds, sizeof holds));
}

/* The kind of layer whose hyper-connections these are: the first or second of their class in a group of the pattern. */
static unsigned hyper_family(const struct work *w, const struct atom *atom, unsigned set)
{
    bool second;
    const char *rest;
    enum key_hyper class = key_hyper(atom->name.leaf, &second, &rest);
    for (int l = 0, seen = 0; class != HYPER_NONE && w->layers != NULL && l < w->layers->n; l++) {
        unsigned family = family_of(w->layers->symbols[l]);
        if (w->layers->item[l] == atom->name.layer && key_hyper_of(family) == class && seen++ == (int)second)
            return family & set;
    }
    return 0;
}

static bool has_groups(const struct key_stack *s)
{
    for (int i = 0; i < s->n; i++)
        if (s->families[i] != 0 && !one_bit(s->families[i]))
            return true;
    return false;
}

static int order_unknown(const struct work *w, int number, struct err *e)
{
    char holds[128];
    err_set(e, ST_CONFLICT, "%s: number %d holds %s: the keys do not say how to number them as '%s'", w->file->label,
            number, families_text(w->stack.families[number], holds, sizeof holds), layout_names[w->to]);
    return err_hint(e, "give the model's groups: --pattern='[*-][*-]'");
}

static bool pattern_has_groups(const struct key_layers *l)
{
    if (l != NULL && l->grouped)
        return true;
    for (int i = 1; l != NULL && i < l->n; i++)
        if (l->item[i] == l->item[i - 1])
            return true;
    return false;
}

static int pattern_differs(const struct work *w, int layer, struct err *e)
{
    err_set(e, ST_CONFLICT, "%s: the given pattern differs from the file's layers at layer %d", w->file->label, layer);
    return err_hint(e, "the pattern must be the one the file's model has");
}

/* First number of each kind in the physical order: base[number * FAM_COUNT + kind]. */
static int number_flat(const struct work *w, int *base, struct err *e)
{
    /* then what follows a mixer */
    const unsigned mixers = families_mixing(), usual[] = {mixers, ~(mixers | FAM_OTHER), FAM_OTHER};
    int next = 0;
    bool given = pattern_has_groups(w->layers);
    for (int i = 0; i < w->stack.n; i++) {
        unsigned left = w->stack.families[i];
        while (given && next < w->layers->n && w->layers->item[next] == i) {
            unsigned family = family_of(w->layers->symbols[next]);
            if (!(left & family))
                return pattern_differs(w, next, e);
            left &= ~family;
            base[i * FAM_COUNT + __builtin_ctz(family)] = next++;
        }
        if (given && left != 0)
            return pattern_differs(w, next, e);
        for (int k = 0; left != 0 && k < countof(usual); k++) {
            unsigned family = left & usual[k];
            if (family != 0 && !one_bit(family))
                return order_unknown(w, i, e);
            if (family != 0)
                base[i * FAM_COUNT + __builtin_ctz(family)] = next++;
        }
        if (!given && w->stack.families[i] == 0)
            next++; /* a number without keys stays a layer without keys */
    }
    return ST_OK;
}

static int number_logical(const struct work *w, int *base, struct err *e)
{
    bool given = pattern_has_groups(w->layers);
    if (given && w->layers->n != w->stack.n)
        return pattern_differs(w, w->stack.n < w->layers->n ? w->stack.n : w->layers->n, e);
    for (int i = 0; i < w->stack.n; i++) {
        unsigned family = w->stack.families[i];
        if (given && family_of(w->layers->symbols[i]) != family)
            return pattern_differs(w, i, e);
        if (!given && !(family & (i % 2 ? families_at(KEY_PLACE_MLP) : families_mixing())))
            return order_unknown(w, i, e);
        base[i * FAM_COUNT + __builtin_ctz(family)] = given ? w->layers->item[i] : i / 2;
    }
    return ST_OK;
}

/* The name of a layer's hyper-connections, alone with its number or second of its class in a group. */
static int rename_hyper(struct work *w, struct atom *atom, int layer, struct err *e)
{
    bool second, wanted = false;
    const char *rest;
    enum key_hyper class = key_hyper(atom->name.leaf, &second, &rest);
    if (class == HYPER_NONE || class == HYPER_ANY)
        return ST_OK;
    bool grouped = w->to != KEYS_FLAT && pattern_has_groups(w->layers);
    for (int l = layer - 1; grouped && l >= 0 && w->layers->item[l] == w->layers->item[layer]; l--)
        wanted |= key_hyper_of(family_of(w->layers->symbols[l])) == class;
    if (wanted != second)
        atom->name.leaf = key_hyper_leaf(&w->out->memory, class, wanted, rest);
    return atom->name.leaf ? ST_OK : no_memory(e);
}

static int renumber(struct work *w, struct err *e)
{
    bool flat = w->to == KEYS_FLAT, groups = has_groups(&w->stack);
    bool as_it_is = w->to == KEYS_INDEXED || w->to == KEYS_GROUPED;
    w->numbered_flat = as_it_is ? !groups : flat;
    if (as_it_is || groups != flat || w->stack.n == 0)
        return ST_OK; /* numbered so already */
    int *base = NULL;
    TRY(mem_array((void **)&base, (size_t)w->stack.n * FAM_COUNT, sizeof *base, e));
    int st = flat ? number_flat(w, base, e) : number_logical(w, base, e);
    for (size_t i = 0; st == ST_OK && i < w->n; i++) {
        struct atom *atom = &w->atoms[i];
        unsigned family = 0;
        if (atom->name.scope != SCOPE_LAYER)
            continue;
        int layer = atom->name.layer;
        st = family_in(w, atom, w->stack.families[layer], &family, e);
        if (st == ST_OK)
            st = rename_hyper(w, atom, layer, e);
        if (st == ST_OK)
            atom->name.layer = base[layer * FAM_COUNT + __builtin_ctz(family)];
    }
    free(base);
    return st;
}

static int add_note(struct work *w, const char *text, struct err *e)
{
    if (w->out->note == NULL)
        w->out->note = text;
    return text ? ST_OK : no_memory(e);
}

/* Atoms first .. end - 1 are a depth; its layers are attention, then an MLP, as in a Transformer layer. */
static bool is_pair(const struct atom *at, size_t n)
{
    bool has[2] = {false, false};
    for (size_t i = 0; i < n; i++) {
        unsigned family = key_family(at[i].name.leaf),
                 fits[2] = {families_at(KEY_PLACE_ATTENTION), families_at(KEY_PLACE_MLP)};
        int layer = at[i].name.layer;
        if (layer < 0)
            continue;
        if (layer > 1 || family == 0 || (family & ~fits[layer]) != 0)
            return false;
        has[layer] = true;
    }
    return has[0] && has[1];
}

/* Layers of a depth become a Transformer's one layer. */
static int join_depths(struct work *w, struct err *e)
{
    for (size_t i = 0, n; i < w->n; i += n) {
        bool numbered = false;
        n = 1;
        if (w->atoms[i].name.scope != SCOPE_MTP)
            continue;
        while (i + n < w->n && w->atoms[i + n].name.scope == SCOPE_MTP &&
               w->atoms[i + n].name.depth == w->atoms[i].name.depth)
            n++;
        for (size_t k = i; k < i + n; k++)
            numbered |= w->atoms[k].name.layer >= 0;
        bool pair = numbered && is_pair(&w->atoms[i], n);
        for (size_t k = i; pair && k < i + n; k++)
            if (w->atoms[k].name.layer >= 0)
                w->atoms[k].name.layer = NOT_NUMBERED;
        if (numbered && !pair)
            TRY(add_note(w,
                         arena_printf(&w->out->memory,
                                      "prediction depth %d stays in numbered layers: it is not one attention "
                                      "layer and one MLP, as a Transformer's is",
                                      w->atoms[i].name.depth),
                         e));
    }
    return ST_OK;
}

/* Prediction depths: layers by number, or a Transformer's one layer that holds a mixer and an MLP. */
static int renumber_depths(struct work *w, struct err *e)
{
    if (w->to == KEYS_INDEXED || w->to == KEYS_GROUPED)
        return ST_OK;
    if (w->to == KEYS_STACKED)
        return join_depths(w, e);
    unsigned mlps = families_at(KEY_PLACE_MLP);
    for (size_t i = 0; i < w->n; i++) {
        struct key_name *name = &w->atoms[i].name;
        if (name->scope != SCOPE_MTP || name->layer != NOT_NUMBERED)
            continue;
        unsigned family = key_family(name->leaf);
        if (family == 0 || ((family & families_mixing()) && (family & mlps)))
            return err_set(e, ST_CONFLICT, "%s: '%s' is in no layer of a mixer and an MLP", w->file->label,
                           w->atoms[i].stored);
        name->layer = (family & mlps) != 0;
    }
    return ST_OK;
}

/* ---- experts --------------------------------------------------------------------------------- */

/* The router knows how many there are; without it a leading axis does. */
static int64_t experts_of(const struct work *w, const struct atom *atom)
{
    struct atom router = {.name = atom->name, .stored = ""};
    router.name.leaf = "mlp.router.weight";
    for (size_t i = 0; i < w->n; i++)
        if (key_order(&w->atoms[i].name, &router.name) == 0 && w->atoms[i].view.rank == 2)
            return w->atoms[i].view.dim[0];
    int own = str_ends(atom->name.leaf, "bias") ? 1 : 2; /* axes of one expert */
    return atom->view.rank == own + 1 ? atom->view.dim[0] : 0;
}

static int split_experts(struct work *w, struct err *e)
{
    char key[NAME_TEXT], text[128];
    size_t n = w->n; /* new ones go behind */
    for (size_t i = 0; i < n; i++) {
        struct atom atom = w->atoms[i];
        if (!str_starts(atom.name.leaf, "mlp.experts.") || atom.name.expert != WHOLE ||
            !(str_ends(atom.name.leaf, ".weight") || str_ends(atom.name.leaf, ".bias")))
            continue;
        int64_t experts = experts_of(w, &atom);
        struct tensor all = atom.view;
        if (experts <= 0 || experts >= KEY_MAX_LAYER || all.rank == 0 || all.dim[0] % experts != 0)
            return err_set(e, ST_CONFLICT, "%s: Cannot split checkpoint tensor '%s', %s, among %lld experts",
                           w->file->label, shown(atom.stored, key, sizeof key), tensor_text(&all, text, sizeof text),
                           (long long)experts);
        struct tensor one = layer_slice(&all, 0);
        if (all.dim[0] != experts) { /* packed rows */
            one = all;
            one.dim[0] = all.dim[0] / experts;
        }
        for (int k = 0; k < (int)experts; k++) {
            atom.name.expert = k;
            atom.view = one;
            atom.view.data = (char *)all.data + k * tensor_bytes(&one);
            if (k == 0)
                w->atoms[i] = atom;
            else
                TRY(add_atom(w, &atom, e));
        }
    }
    return sort_atoms(w, e);
}

/* Gate and up rows of experts from the file's blocks to the wanted ones. */
static int reorder_glu(struct work *w, struct err *e)
{
    for (size_t i = 0; i < w->n; i++) {
        struct atom *atom = &w->atoms[i];
        struct glu_rows r = {.matrices = 1, .from = w->file->glu_interleave, .to = w->glu_interleave};
        int64_t bytes = tensor_bytes(&atom->view);
        if (!key_is_glu(atom->name.leaf) || r.from == r.to || bytes == 0 || atom->view.rank == 0)
            continue;
        int own = str_ends(atom->name.leaf, "bias") ? 1 : 2; /* axes of one expert */
        if (atom->name.expert == WHOLE)
            r.matrices = atom->view.rank > own ? atom->view.dim[0] : max_i64(1, experts_of(w, atom));
        int64_t rows = atom->view.rank > own ? r.matrices * atom->view.dim[1] : atom->view.dim[0];
        if (rows % r.matrices != 0)
            return err_set(e, ST_CONFLICT, "%s: '%s' has %lld rows for %lld experts", w->file->label, atom->stored,
                           (long long)rows, (long long)r.matrices);
        r.rows = rows / r.matrices;
        r.bytes = bytes / rows;
        if (r.from > 0)
            TRY(glu_check(w->file->label, atom->stored, r.rows, r.from, e));
        if (r.to > 0)
            TRY(glu_check(w->file->label, atom->stored, r.rows, r.to, e));
        void *data = arena_alloc(&w->out->memory, (size_t)bytes);
        if (data == NULL)
            return no_memory(e);
        glu_reorder(data, atom->view.data, &r);
        atom->view.data = data;
    }
    return ST_OK;
}

/* ---- putting together ------------------------------------------------------------------------ */

static int unlike(const struct work *w, const struct atom *a, const struct atom *b, struct err *e)
{
    char x[NAME_TEXT], y[NAME_TEXT], ta[128], tb[128];
    err_set(e, ST_CONFLICT, "%s: '%s' is %s but '%s' is %s: only equals can be stacked", w->file->label,
            shown(a->stored, x, sizeof x), tensor_text(&a->view, ta, sizeof ta), shown(b->stored, y, sizeof y),
            tensor_text(&b->view, tb, sizeof tb));
    return ST_CONFLICT;
}

/* Atoms first .. first + n - 1 become one tensor with a leading axis, in the place of the first. */
static int stack_atoms(struct work *w, size_t first, int n, struct err *e)
{
    struct atom *at = &w->atoms[first];
    int64_t dim[TENSOR_MAX_RANK] = {n}, bytes = tensor_bytes(&at->view), all;
    if (at->view.rank >= TENSOR_MAX_RANK || !i64_mul(bytes, n, &all))
        return err_set(e, ST_UNSUPPORTED, "%s: '%s' has too many axes to be stacked", w->file->label, at->stored);
    for (int k = 1; k < n; k++)
        if (at[k].view.dtype != at->view.dtype || !tensor_same_shape(&at[k].view, &at->view))
            return unlike(w, at, &at[k], e);
    memcpy(dim + 1, at->view.dim, (size_t)at->view.rank * sizeof *dim);
    char *data = arena_alloc(&w->out->memory, (size_t)all + 1);
    if (data == NULL)
        return no_memory(e);
    for (int k = 0; k < n && bytes > 0; k++)
        memcpy(data + k * bytes, at[k].view.data, (size_t)bytes);
    at->view = tensor_shape(at->view.dtype, at->view.rank + 1, dim);
    at->view.data = data;
    return ST_OK;
}

static int group_experts(struct work *w, struct err *e)
{
    size_t kept = 0;
    char key[NAME_TEXT];
    for (size_t i = 0, n; i < w->n; i += n) {
        for (n = 1; w->atoms[i].name.expert != WHOLE && i + n < w->n; n++)
            if (key_order_place(&w->atoms[i].name, &w->atoms[i + n].name) != 0)
                break;
        if (w->atoms[i].name.expert != WHOLE) {
            if (w->atoms[i + n - 1].name.expert != (int)n - 1)
                return err_set(
                    e, ST_CONFLICT, "%s: not all experts beside '%s' are there: %zu, the last with number %d",
                    w->file->label, shown(w->atoms[i].stored, key, sizeof key), n, w->atoms[i + n - 1].name.expert);
            TRY(stack_atoms(w, i, (int)n, e));
            w->atoms[i].name.expert = WHOLE;
        }
        w->atoms[kept++] = w->atoms[i];
    }
    w->n = kept;
    return sort_atoms(w, e);
}

/* The layer last: what is to be stacked lies together. */
static int by_leaf(const void *a, const void *b)
{
    struct atom x = *(const struct atom *)a, y = *(const struct atom *)b;
    int lx = x.name.layer, ly = y.name.layer;
    if (x.name.scope == SCOPE_LAYER && y.name.scope == SCOPE_LAYER)
        x.name.layer = y.name.layer = 0;
    int order = key_order(&x.name, &y.name);
    return order ? order : lx < ly ? -1 : lx > ly;
}

static int count_layers(const struct work *w)
{
    int layers = 0;
    for (size_t i = 0; i < w->n; i++)
        if (w->atoms[i].name.scope == SCOPE_LAYER && w->atoms[i].name.layer >= layers)
            layers = w->atoms[i].name.layer + 1;
    return layers;
}

/* Why layers cannot be stacked, or NULL: each must have what the first has, alike. Atoms are sorted by_leaf. */
static int why_unlike(struct work *w, int layers, const char **why, struct err *e)
{
    char key[NAME_TEXT];
    *why = NULL;
    for (size_t i = 0, n; i < w->n; i += n) {
        n = w->atoms[i].name.scope == SCOPE_LAYER ? (size_t)layers : 1;
        for (size_t k = 0; n > 1 && k < n; k++) {
            struct key_name want = w->atoms[i].name;
            want.layer = (int)k;
            bool there = i + k < w->n && key_order(&w->atoms[i + k].name, &want) == 0;
            if (there && w->atoms[i + k].view.dtype == w->atoms[i].view.dtype &&
                tensor_same_shape(&w->atoms[i + k].view, &w->atoms[i].view))
                continue;
            *why = arena_printf(&w->out->memory, "layers stay numbered: layer %d has no '%s' like that of layer %d",
                                (int)k, shown(want.leaf, key, sizeof key), w->atoms[i].name.layer);
            return *why ? ST_OK : no_memory(e);
        }
    }
    return ST_OK;
}

/* A Transformer whose layers are all alike has one key for all of them, any other one for each. */
static int stack_layers(struct work *w, struct err *e)
{
    size_t kept = 0;
    int layers = count_layers(w);
    const char *why;
    if (layers == 0)
        return ST_OK;
    qsort(w->atoms, w->n, sizeof *w->atoms, by_leaf);
    TRY(why_unlike(w, layers, &why, e));
    if (why != NULL) {
        TRY(add_note(w, why, e));
        return sort_atoms(w, e);
    }
    for (size_t i = 0, n; i < w->n; i += n) {
        n = 1;
        if (w->atoms[i].name.scope == SCOPE_LAYER) {
            n = (size_t)layers;
            TRY(stack_atoms(w, i, layers, e));
            w->atoms[i].name.layer = NOT_NUMBERED;
        }
        w->atoms[kept++] = w->atoms[i];
    }
    w->n = kept;
    return ST_OK;
}

/* ---- parts of projections -------------------------------------------------------------------- */

/* Rows of each part of a leaf; 0: it has none. */
static int part_rows(const struct config *c, const char *leaf, int64_t rows[KEY_MAX_PARTS])
{
    const struct core_kind *kind;
    const struct key_split *s = key_split_of(leaf, &kind);
    if (s != NULL)
        kind->keys.part_rows(c, s, rows);
    return key_parts(leaf, 0);
}

static int split_parts(struct work *w, struct err *e)
{
    char key[NAME_TEXT], text[128];
    size_t n_atoms = w->n;
    for (size_t i = 0; i < n_atoms; i++) {
        struct atom atom = w->atoms[i];
        int64_t rows[KEY_MAX_PARTS] = {0};
        int n = atom.name.scope == SCOPE_PLAIN || atom.name.part != WHOLE
                    ? 0
                    : part_rows(w->distributed, atom.name.leaf, rows);
        int axis = atom.name.scope == SCOPE_LAYER && atom.name.layer == NOT_NUMBERED;
        int64_t all = 0, at = 0;
        for (int k = 0; k < n; k++)
            all += rows[k];
        if (n == 0)
            continue;
        if (axis || atom.view.rank == 0 || atom.view.dim[0] != all)
            return err_set(e, ST_CONFLICT, "%s: '%s' is %s, but the parts of the model have %lld rows", w->file->label,
                           shown(atom.stored, key, sizeof key), tensor_text(&atom.view, text, sizeof text),
                           (long long)all);
        int64_t row_bytes = all > 0 ? tensor_bytes(&atom.view) / all : 0;
        for (int k = 0; k < n; k++, at += rows[k - 1]) {
            struct atom part = atom;
            part.name.part = k;
            part.view.dim[0] = rows[k];
            part.view.data = (char *)atom.view.data + at * row_bytes;
            if (k == 0)
                w->atoms[i] = part;
            else
                TRY(add_atom(w, &part, e));
        }
    }
    return sort_atoms(w, e);
}

/* ---- the whole ------------------------------------------------------------------------------- */

static int emit(struct work *w, struct err *e)
{
    struct key_output *o = w->out;
    struct key_spelling how = {.transformer = w->to == KEYS_LOGICAL || w->to == KEYS_STACKED ||
                                              (w->to != KEYS_FLAT && w->transformer_norm),
                               .wrapped = w->distributed != NULL && w->hyper && w->numbered_flat,
                               .distributed = w->distributed != NULL};
    o->items = arena_alloc(&o->memory, (w->n + 1) * sizeof *o->items);
    if (o->items == NULL)
        return no_memory(e);
    for (size_t i = 0; i < w->n; i++) {
        char *key = key_text(&o->memory, &w->atoms[i].name, &how);
        if (key == NULL)
            return no_memory(e);
        o->items[o->n++] = (struct st_item){.name = key, .host = w->atoms[i].view};
    }
    return ST_OK;
}

static int convert(struct work *w, enum key_space space, struct err *e)
{
    TRY(read_atoms(w, space, e));
    TRY(renumber(w, e));
    TRY(renumber_depths(w, e));
    TRY(sort_atoms(w, e));
    TRY(reorder_glu(w, e));
    if (w->to == KEYS_INDEXED)
        TRY(split_experts(w, e));
    if (w->to == KEYS_GROUPED || w->distributed != NULL)
        TRY(group_experts(w, e));
    if (w->distributed != NULL)
        TRY(split_parts(w, e));
    if (w->to == KEYS_STACKED)
        TRY(stack_layers(w, e));
    return emit(w, e);
}

int key_convert(struct key_output *out, const struct key_file *f, enum key_space space, const struct key_target *to,
                struct err *e)
{
    *out = (struct key_output){0};
    arena_init(&out->memory);
    struct work w = {.file = f,
                     .to = to->layout,
                     .layers = to->layers,
                     .distributed = to->distributed,
                     .glu_interleave = to->glu_interleave,
                     .out = out};
    int st = convert(&w, space, e);
    key_stack_release(&w.stack);
    free(w.atoms);
    if (st != ST_OK)
        key_output_release(out);
    return st;
}

void key_output_release(struct key_output *o)
{
    arena_release(&o->memory);
    *o = (struct key_output){0};
}
