/* Shapes by text; see opshape.h. */
#include "ops/opshape.h"

#include "ops/check.h"
#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_SIZES = 24, MAX_TERMS = 3, UNKNOWN = -1 };

struct sizes {
    const struct op_desc *desc;
    const void *args;
    const struct op_call *call; /* samples and inference: tensors and numbers that are not in args; else NULL */
    bool use_extras;            /* attributes that are not in args count too */
    bool use_dims;              /* a name that nothing else knows is a dim of the sample */
    int n;
    struct {
        const char *name;
        size_t length;
        int64_t value;
    } size[MAX_SIZES];
    int lead_rank; /* of "..."; 0: not known yet */
    int64_t lead[TENSOR_MAX_RANK];
};

static const struct tensor *tensor_at(const struct sizes *s, int i)
{
    return s->call ? &s->call->t[i]
                   : (const struct tensor *)(const void *)((const char *)s->args + s->desc->args[i].at);
}

static bool is_there(const struct sizes *s, int i)
{
    const struct tensor *t = tensor_at(s, i);
    return s->call ? t->rank > 0 : t->data != NULL;
}

static bool is_input(const struct op_arg *a) { return a->role == ARG_IN || a->role == ARG_OPT; }

/* ---- words ----------------------------------------------------------------------------------- */

/* The next word of a shape text; false at its end. */
static bool next_word(const char **text, const char **word, size_t *length)
{
    const char *p = *text + strspn(*text, " ");
    *word = p;
    *length = strcspn(p, " ");
    *text = p + *length;
    return *length > 0;
}

static bool is_size(const char *word) { return strchr("=!@+&", word[0]) == NULL; }
static bool is_lead(const char *word, size_t length) { return length == 3 && strncmp(word, "...", 3) == 0; }

/* The field that a word like "@w" names; -1: the word is of another kind. */
static int field_of(const struct op_desc *d, const char *word, size_t length, char kind)
{
    for (int i = 0; word[0] == kind && i < d->n_args; i++)
        if (strlen(d->args[i].name) == length - 1 && strncmp(d->args[i].name, word + 1, length - 1) == 0)
            return i;
    return -1;
}

static bool has_word(const char *text, const char *want)
{
    const char *word;
    size_t length;
    while (next_word(&text, &word, &length))
        if (length == strlen(want) && strncmp(word, want, length) == 0)
            return true;
    return false;
}

/* ---- names ----------------------------------------------------------------------------------- */

static int64_t number_in(const void *args, const struct op_attr *a)
{
    const char *p = (const char *)args + a->at;
    switch (a->kind) {
    case ATTR_int64_t: return *(const int64_t *)(const void *)p;
    case ATTR_int: return *(const int *)(const void *)p;
    default: return UNKNOWN;
    }
}

static int64_t value_of(const struct sizes *s, const char *name, size_t length)
{
    char text[32];
    int64_t out;
    for (int i = 0; i < s->n; i++)
        if (s->size[i].length == length && strncmp(s->size[i].name, name, length) == 0)
            return s->size[i].value;
    if (length >= sizeof text)
        return UNKNOWN;
    memcpy(text, name, length);
    text[length] = '\0';
    if (strcmp(text, "all") == 0 && s->lead_rank > 0) {
        out = 1;
        for (int i = 0; i < s->lead_rank; i++)
            out *= s->lead[i];
        return out;
    }
    int attr = op_attr_index(s->desc, text);
    if (attr >= 0 && s->desc->attrs[attr].kind != ATTR_NONE)
        return number_in(s->args, &s->desc->attrs[attr]);
    if (attr >= 0 && s->use_extras)
        return s->call->attr[attr] >= 0 && s->call->attr[attr] < 1e15 ? (int64_t)s->call->attr[attr] : UNKNOWN;
    if (s->desc->number != NULL && s->desc->number(s->args, text, &out))
        return out;
    return s->use_dims && op_has_dim(s->desc, text) ? (int64_t)op_dim(s->call, text) : UNKNOWN;
}

static void learn(struct sizes *s, const char *name, size_t length, int64_t value)
{
    if (value >= 0 && s->n < MAX_SIZES) {
        s->size[s->n].name = name;
        s->size[s->n].length = length;
        s->size[s->n++].value = value;
    }
}

/* ---- one size: terms with operators between -------------------------------------------------- */

struct term {
    const char *name;
    size_t length;
    int64_t value;
    char op; /* in front of it */
};

static int terms_of(const struct sizes *s, const char *word, size_t length, struct term *t)
{
    int n = 0;
    for (size_t at = 0; at < length && n < MAX_TERMS; n++) {
        char op = n > 0 ? word[at++] : ' ';
        size_t end = at;
        while (end < length && strchr("+-*/", word[end]) == NULL)
            end++;
        bool digits = end > at && word[at] >= '0' && word[at] <= '9';
        int64_t value = digits ? strtoll(word + at, NULL, 10) : value_of(s, word + at, end - at);
        t[n] = (struct term){.name = word + at, .length = end - at, .value = value, .op = op};
        at = end;
    }
    return n;
}

static int64_t apply(int64_t a, char op, int64_t b)
{
    return op == '+' ? a + b : op == '-' ? a - b : op == '*' ? a * b : b > 0 ? ceil_div(a, b) : UNKNOWN;
}

static int64_t evaluate(const struct sizes *s, const char *word, size_t length)
{
    struct term t[MAX_TERMS];
    int n = terms_of(s, word, length, t);
    int64_t value = n > 0 ? t[0].value : UNKNOWN;
    for (int i = 0; i < n; i++)
        if (t[i].value < 0)
            return UNKNOWN;
    for (int i = 1; i < n && value >= 0; i++)
        value = apply(value, t[i].op, t[i].value);
    return value;
}

/* a op b = value for the one of both that is not known; UNKNOWN: cannot be told. */
static int64_t solve(char op, int64_t known, bool first_unknown, int64_t value)
{
    if (op == '+')
        return value - known;
    if (op == '-')
        return first_unknown ? value + known : known - value;
    return op == '*' && known > 0 && value % known == 0 ? value / known : UNKNOWN;
}

/* Learn the one unknown name of a word from the size it stands for. */
static void bind(struct sizes *s, const char *word, size_t length, int64_t size)
{
    struct term t[MAX_TERMS];
    int n = terms_of(s, word, length, t), unknown = -1;
    for (int i = 0; i < n; i++) {
        if (t[i].value < 0 && unknown >= 0)
            return;
        unknown = t[i].value < 0 ? i : unknown;
    }
    if (unknown < 0 || t[unknown].name[0] == '*')
        return;
    if (n == 3 && unknown < 2) { /* (a op b) op c */
        size = solve(t[2].op, t[2].value, true, size);
        n = 2;
    }
    if (n == 2 && size >= 0)
        size = solve(t[1].op, t[unknown == 0 ? 1 : 0].value, unknown == 0, size);
    if (n <= 2)
        learn(s, t[unknown].name, t[unknown].length, size);
}

/* One of the sizes a word allows: the one the tensor has, if any; -1: any. */
static int64_t allowed(const struct sizes *s, const char *word, size_t length, int64_t have)
{
    int64_t first = UNKNOWN;
    for (size_t at = 0; at < length;) {
        size_t n = 0;
        while (at + n < length && word[at + n] != '|')
            n++;
        int64_t value = n == 1 && word[at] == '*' ? UNKNOWN : evaluate(s, word + at, n);
        if (value == UNKNOWN || value == have || have == UNKNOWN)
            return value;
        first = at == 0 ? value : first;
        at += n + 1;
    }
    return first;
}

/* ---- whole shapes ---------------------------------------------------------------------------- */

/* Words for single dimensions; whether leading ones come before them. */
static int count_sizes(const char *text, bool *lead)
{
    int n = 0;
    const char *word;
    size_t length;
    *lead = false;
    while (next_word(&text, &word, &length)) {
        *lead |= is_lead(word, length);
        n += is_size(word) && !is_lead(word, length);
    }
    return n;
}

static void bind_tensor(struct sizes *s, int i)
{
    const struct tensor *t = tensor_at(s, i);
    bool lead;
    int n = count_sizes(s->desc->args[i].shape, &lead), at = 0;
    if (lead ? t->rank <= n : t->rank != n)
        return;
    if (lead && s->lead_rank == 0) {
        s->lead_rank = t->rank - n;
        memcpy(s->lead, t->dim, (size_t)s->lead_rank * sizeof s->lead[0]);
    }
    at = t->rank - n;
    const char *text = s->desc->args[i].shape, *word;
    size_t length;
    while (next_word(&text, &word, &length)) {
        if (!is_size(word) || is_lead(word, length))
            continue;
        size_t first = 0;
        while (first < length && word[first] != '|')
            first++;
        if (first == length || s->call != NULL)
            bind(s, word, first, t->dim[at]);
        at++;
    }
}

/* The shape the text asks for; sizes it leaves open are -1. have: what the tensor is, NULL: nothing
 * yet. */
static int wanted(const struct sizes *s, int i, const struct tensor *have, int64_t *dim)
{
    const char *text = s->desc->args[i].shape, *word;
    size_t length;
    int rank = 0;
    while (next_word(&text, &word, &length)) {
        int like = field_of(s->desc, word, length, '=');
        if (like >= 0) {
            const struct tensor *t = tensor_at(s, like);
            memcpy(dim, t->dim, (size_t)t->rank * sizeof *dim);
            return t->rank;
        }
        for (int k = 0; is_lead(word, length) && k < s->lead_rank; k++)
            dim[rank++] = s->lead[k];
        if (is_lead(word, length) && s->lead_rank == 0) /* no tensor has leading sizes, and all must */
            dim[rank++] = UNKNOWN;
        if (is_size(word) && !is_lead(word, length) && rank < TENSOR_MAX_RANK) {
            dim[rank] = allowed(s, word, length, have != NULL && rank < have->rank ? have->dim[rank] : UNKNOWN);
            rank++;
        }
    }
    return rank;
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* Must it be there, may it be there, given what else is? */
static int check_presence(const struct sizes *s, int i, struct err *e)
{
    const struct op_arg *a = &s->desc->args[i];
    const char *text = a->shape, *word;
    size_t length;
    bool there = is_there(s, i);
    while (next_word(&text, &word, &length)) {
        int both = field_of(s->desc, word, length, '@'), needs = field_of(s->desc, word, length, '+'),
            only = field_of(s->desc, word, length, '&');
        int other = both >= 0 ? both : needs >= 0 ? needs : only;
        if (other < 0 || s->call != NULL) /* inputs alone cannot tell */
            continue;
        if (!there && only < 0 && is_there(s, other))
            return err_set(e, ST_INVALID, "%s: tensor %s is missing, %s is given", s->desc->name, a->name,
                           s->desc->args[other].name);
        if (there && needs < 0 && !is_there(s, other))
            return err_set(e, ST_INVALID, "%s: %s is given without %s", s->desc->name, a->name,
                           s->desc->args[other].name);
    }
    if (!there && (a->role == ARG_IN || (a->role == ARG_OUT && s->call == NULL)))
        return err_set(e, ST_INVALID, "%s: tensor %s is missing", s->desc->name, a->name);
    return ST_OK;
}

/* The type that "real" means in this call: that of the first real tensor, else of the narrowest stream, else of the
 * first wide one. */
static enum dtype real_of(const struct sizes *s)
{
    static const enum arg_type order[] = {ARG_REAL, ARG_STREAM, ARG_WIDE};
    for (int pass = 0; pass < countof(order); pass++) {
        enum dtype found = DT_NONE;
        for (int i = 0; i < s->desc->n_args; i++) {
            const struct op_arg *a = &s->desc->args[i];
            if (a->at == OP_NOWHERE || a->type != order[pass] || !is_there(s, i))
                continue;
            enum dtype type = tensor_at(s, i)->dtype;
            if (found == DT_NONE || (order[pass] == ARG_STREAM && wide_of(type) == found))
                found = type;
        }
        if (found != DT_NONE)
            return found;
    }
    return DT_NONE;
}

/* The type that tensor i must have: that of its field, and a stream may be wide. */
static enum dtype wanted_dtype(const struct sizes *s, int i, enum dtype real)
{
    const struct op_arg *a = &s->desc->args[i];
    bool wide = a->type == ARG_STREAM && tensor_at(s, i)->dtype == wide_of(real);
    return op_arg_dtype(a, wide ? wide_of(real) : real);
}

static int check_tensors(struct sizes *s, bool inputs_only, struct err *e)
{
    const struct op_desc *d = s->desc;
    enum dtype real = real_of(s);
    if (real != DT_NONE && real != DT_BF16 && real != DT_F32 && real != DT_F64)
        return err_set(e, ST_INVALID, "%s: tensors of type %s, expected real numbers", d->name, dtype_name(real));
    for (int i = 0; i < d->n_args; i++)
        if ((!inputs_only || is_input(&d->args[i])) && d->args[i].at != OP_NOWHERE && d->args[i].role != ARG_WORK &&
            is_there(s, i))
            bind_tensor(s, i);
    for (int i = 0; i < d->n_args; i++) {
        const struct op_arg *a = &d->args[i];
        if (a->role == ARG_WORK || (inputs_only && !is_input(a)) || (a->at == OP_NOWHERE && s->call == NULL) ||
            a->shape[0] == '\0')
            continue;
        TRY(check_presence(s, i, e));
        if (!is_there(s, i))
            continue;
        struct tensor t = *tensor_at(s, i);
        int64_t dim[TENSOR_MAX_RANK];
        int rank = wanted(s, i, &t, dim);
        t.data = t.data != NULL ? t.data : &t; /* shapes alone: nothing looks there */
        TRY(check_tensor(d->name, a->name, &t, wanted_dtype(s, i, real), rank, dim, e));
        if (has_word(a->shape, "!"))
            TRY(check_dense(d->name, a->name, &t, e));
    }
    return ST_OK;
}

int op_check_fields(const struct op_desc *d, const void *args, struct err *e)
{
    struct sizes s = {.desc = d, .args = args};
    return check_tensors(&s, false, e);
}

/* ---- samples and inference ------------------------------------------------------------------- */

/* An optional output goes without what it depends on: another field, or the input whose gradient it
 * is. */
static bool wants_output(const struct sizes *s, int i)
{
    const struct op_arg *a = &s->desc->args[i];
    const char *text = a->shape, *word;
    size_t length;
    while (next_word(&text, &word, &length)) {
        static const char kinds[] = "@+&";
        for (int k = 0; kinds[k] != '\0'; k++) {
            int other = field_of(s->desc, word, length, kinds[k]);
            if (other >= 0 && is_input(&s->desc->args[other]) && !is_there(s, other))
                return false;
        }
    }
    int of = a->name[0] == 'd' ? op_arg_index(s->desc, a->name + 1) : -1;
    return a->role != ARG_OOUT || of < 0 || s->desc->args[of].role != ARG_OPT || is_there(s, of);
}

int op_infer_shapes(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct op_desc *d = c->desc;
    struct op_packed p;
    op_call_pack(c, &p);
    struct sizes s = {.desc = d, .args = &p, .call = c};
    TRY(check_tensors(&s, true, e));
    s.use_extras = true;
    for (int i = 0; i < d->n_args; i++)
        if (is_input(&d->args[i]) && is_there(&s, i))
            bind_tensor(&s, i);
    s.use_dims = true;
    for (int i = 0; i < d->n_args; i++) {
        int64_t dim[TENSOR_MAX_RANK];
        if (is_input(&d->args[i]) || d->args[i].role == ARG_WORK || !wants_output(&s, i))
            continue;
        int rank = wanted(&s, i, NULL, dim);
        for (int k = 0; k < rank; k++)
            if (dim[k] < 0)
                return err_set(e, ST_INVALID, "%s: dimension %d of %s cannot be told from the inputs", d->name, k,
                               d->args[i].name);
        c->t[i] = tensor_shape(op_call_dtype(c, i, ops->real), rank, dim);
    }
    return ST_OK;
}

void op_sample_shapes(struct op_call *c)
{
    const struct op_desc *d = c->desc;
    struct op_packed p;
    op_call_pack(c, &p);
    struct sizes s = {.desc = d, .args = &p, .call = c, .use_extras = true, .use_dims = true};
    s.lead[s.lead_rank++] = (int64_t)op_dim(c, "rows");
    if (op_dim(c, "heads") > 0)
        s.lead[s.lead_rank++] = (int64_t)op_dim(c, "heads");
    for (int i = 0; i < d->n_args; i++) {
        int64_t dim[TENSOR_MAX_RANK];
        if (!is_input(&d->args[i]) || d->args[i].shape[0] == '\0')
            continue;
        int rank = wanted(&s, i, NULL, dim);
        for (int k = 0; k < rank; k++)
            dim[k] = max_i64(dim[k], 0);
        c->t[i] = tensor_shape(DT_NONE, rank, dim);
    }
}
