/* Generic handling of op descriptors: names, attributes, samples. */
#include "ops/opdesc.h"
#include "ops/ops.h"
#include "ops/opshape.h"

#include <stdlib.h>
#include <string.h>

int op_arg_index(const struct op_desc *d, const char *name)
{
    for (int i = 0; i < d->n_args; i++)
        if (strcmp(d->args[i].name, name) == 0)
            return i;
    return -1;
}

int op_gradient_index(const struct op_desc *d, const char *name)
{
    char text[64];
    snprintf(text, sizeof text, "d%s", name);
    int i = op_arg_index(d, text);
    snprintf(text, sizeof text, "d_%s", name);
    return i >= 0 ? i : op_arg_index(d, text);
}

int op_attr_index(const struct op_desc *d, const char *name)
{
    for (int i = 0; i < d->n_attrs; i++)
        if (strcmp(d->attrs[i].name, name) == 0)
            return i;
    return -1;
}

static int dim_index(const struct op_desc *d, const char *name)
{
    for (int i = 0; i < d->n_dims; i++)
        if (strcmp(d->dims[i].name, name) == 0)
            return i;
    return -1;
}

double op_dim(const struct op_call *c, const char *name)
{
    int i = dim_index(c->desc, name);
    return i < 0 ? 0 : c->dim[i];
}

double op_attr(const struct op_call *c, const char *name)
{
    int i = op_attr_index(c->desc, name);
    return i < 0 ? 0 : c->attr[i];
}

enum dtype op_arg_dtype(const struct op_arg *a, enum dtype real)
{
    static const enum dtype fixed[] = {
        [ARG_I32] = DT_I32, [ARG_I64] = DT_I64, [ARG_F64] = DT_F64, [ARG_U8] = DT_U8, [ARG_F8] = DT_F8_E4M3};
    return a->type == ARG_REAL || a->type == ARG_STREAM ? real : a->type == ARG_WIDE ? wide_of(real) : fixed[a->type];
}

enum dtype op_call_dtype(const struct op_call *c, int i, enum dtype real)
{
    return op_arg_dtype(&c->desc->args[i], c->wide[i] ? wide_of(real) : real);
}

bool op_has_dim(const struct op_desc *d, const char *name) { return dim_index(d, name) >= 0; }
bool op_arg_is(const struct op_call *c, int i, const char *name) { return strcmp(c->desc->args[i].name, name) == 0; }

/* What does not fit becomes -1, which the checks of the ops refuse. */
static void pack_number(char *at, enum attr_kind kind, double value)
{
    int64_t whole = value >= 0 && value < 9e18 ? (int64_t)value : -1;
    int small = value >= 0 && value < INT32_MAX ? (int)value : -1;
    uint64_t big = value >= 0 && value < 1.8e19 ? (uint64_t)value : 0;
    bool flag = value != 0;
    switch (kind) {
    case ATTR_NONE: break;
    case ATTR_double: memcpy(at, &value, sizeof value); break;
    case ATTR_bool: memcpy(at, &flag, sizeof flag); break;
    case ATTR_int: memcpy(at, &small, sizeof small); break;
    case ATTR_int64_t: memcpy(at, &whole, sizeof whole); break;
    case ATTR_uint64_t: memcpy(at, &big, sizeof big); break;
    }
}

void op_call_pack(const struct op_call *c, struct op_packed *out)
{
    const struct op_desc *d = c->desc;
    memset(out->bytes, 0, sizeof out->bytes);
    for (int i = 0; i < d->n_args; i++) {
        if (d->args[i].at == OP_NOWHERE)
            continue;
        memcpy(out->bytes + d->args[i].at, &c->t[i], sizeof c->t[i]);
        if (d->args[i].acc_at != 0)
            memcpy(out->bytes + d->args[i].acc_at, &c->acc[i], sizeof c->acc[i]);
    }
    for (int k = 0; k < d->n_attrs; k++)
        pack_number(out->bytes + d->attrs[k].at, d->attrs[k].kind, c->attr[k]);
    if (d->prepare != NULL)
        d->prepare(c, out->bytes);
}

int op_call_run(const struct ops *ops, struct lane *lane, const struct op_call *c)
{
    if (c->desc->run != NULL)
        return c->desc->run(ops, lane, c);
    struct op_packed p;
    op_call_pack(c, &p);
    return c->desc->call(ops, lane, &p);
}

bool op_call_set(struct op_call *c, const char *name, double value)
{
    int attr = op_attr_index(c->desc, name), dim = dim_index(c->desc, name);
    int sum = str_starts(name, "acc_") ? op_arg_index(c->desc, name + 4) : -1;
    if (sum >= 0 && c->desc->args[sum].acc_at != 0) {
        c->acc[sum] = value != 0;
        return true;
    }
    int wide = str_starts(name, "wide_") ? op_arg_index(c->desc, name + 5) : -1;
    if (wide >= 0 && c->desc->args[wide].type == ARG_STREAM) {
        c->wide[wide] = value != 0;
        return true;
    }
    if (attr >= 0)
        c->attr[attr] = value;
    if (dim >= 0)
        c->dim[dim] = value;
    return attr >= 0 || dim >= 0;
}

/* Calls visit(name, value) for each "name=value" of the text. */
static int each_setting(const char *text, int (*visit)(void *, const char *, double), void *ctx, struct err *e)
{
    char word[64];
    for (const char *p = text; *p != '\0';) {
        size_t n = strcspn(p, " ");
        if (n >= sizeof word)
            return err_set(e, ST_INVALID, "sample '%s': a setting is too long", text);
        memcpy(word, p, n);
        word[n] = '\0';
        char *eq = strchr(word, '=');
        double value;
        if (n > 0 && (eq == NULL || !parse_f64(eq + 1, &value)))
            return err_set(e, ST_INVALID, "sample '%s': '%s' is not name=number", text, word);
        if (n > 0) {
            *eq = '\0';
            TRY(visit(ctx, word, value));
        }
        p += n + (p[n] == ' ');
    }
    return ST_OK;
}

struct applying {
    struct op_call *call;
    bool absent[OP_MAX_ARGS];
};

static int apply(void *ctx, const char *name, double value)
{
    struct applying *a = ctx;
    if (str_starts(name, "no_") && value != 0) {
        int arg = op_arg_index(a->call->desc, name + 3);
        bool optional =
            arg >= 0 && (a->call->desc->args[arg].role == ARG_OPT || a->call->desc->args[arg].role == ARG_OOUT);
        if (optional) /* a sample may be for a partner op that can go without it */
            a->absent[arg] = true;
    } else {
        op_call_set(a->call, name, value); /* a name of the partner op is ignored here */
    }
    return ST_OK;
}

/* Scratch of a call whose other tensors have their shapes, unless the op's own inference has set it. */
static void infer_work(struct op_call *c, const struct ops *ops)
{
    struct op_packed p;
    for (int i = 0; c->desc->args_bytes > 0 && i < c->desc->n_args; i++)
        if (c->desc->args[i].role == ARG_WORK && c->t[i].rank == 0) {
            op_call_pack(c, &p);
            c->t[i] = tensor_1d(NULL, DT_U8, c->desc->work_bytes(ops, &p));
        }
}

int op_call_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    for (int i = 0; i < c->desc->n_args; i++)
        if (c->desc->args[i].role != ARG_IN && c->desc->args[i].role != ARG_OPT)
            c->t[i] = (struct tensor){0};
    TRY(c->desc->infer != NULL ? c->desc->infer(c, ops, e) : op_infer_shapes(c, ops, e));
    infer_work(c, ops);
    return ST_OK;
}

int op_call_sample(struct op_call *c, const struct op_desc *d, const struct op_sample *s, const struct ops *ops,
                   struct err *e)
{
    *c = (struct op_call){.desc = d};
    for (int i = 0; i < d->n_attrs; i++)
        c->attr[i] = d->attrs[i].value;
    for (int i = 0; i < d->n_dims; i++)
        c->dim[i] = d->dims[i].value;
    struct applying a = {.call = c};
    TRY(each_setting(s->text, apply, &a, e));
    if (d->sample_dims != NULL)
        d->sample_dims(c);
    if (d->args_bytes > 0)
        op_sample_shapes(c);
    if (d->sample_shapes != NULL)
        d->sample_shapes(c);
    for (int i = 0; i < d->n_args; i++) {
        if (a.absent[i])
            c->t[i] = (struct tensor){0};
        else if (c->t[i].rank > 0)
            c->t[i].dtype = op_call_dtype(c, i, ops->real);
    }
    TRY(op_call_infer(c, ops, e));
    for (int i = 0; i < d->n_args; i++)
        if (a.absent[i])
            c->t[i] = (struct tensor){0};
    return ST_OK;
}

double op_bytes(const struct op_call *c)
{
    double bytes = 0;
    for (int i = 0; i < c->desc->n_args; i++)
        if (c->t[i].rank > 0 && c->desc->args[i].role != ARG_WORK)
            bytes += (double)tensor_bytes(&c->t[i]);
    return bytes;
}

bool op_fill_documents(const struct op_call *c, int arg, struct tensor *t, uint64_t key, double chance)
{
    enum arg_type type = c->desc->args[arg].type;
    if (type == ARG_I64)
        *(int64_t *)t->data = 1;
    for (int64_t b = 0; type == ARG_I32 && b < t->dim[0]; b++) {
        int32_t first = b % 2 == 0 ? -100 : 0; /* began long before, or at row 0 */
        for (int64_t j = 0; j < t->dim[1]; j++) {
            if (rng_uniform(key, (uint64_t)(b * t->dim[1] + j)) < chance)
                first = (int32_t)j;
            ((int32_t *)t->data)[b * t->stride[0] + j] = first;
        }
    }
    return type == ARG_I64 || type == ARG_I32;
}

void op_fill_ranges(struct tensor *host, int64_t rows, bool balanced, uint64_t key)
{
    int32_t *at = host->data;
    int64_t n = host->dim[0] - 1, used = 0;
    at[0] = 0;
    for (int64_t x = 0; x < n; x++) {
        int64_t left = rows - used, mean = rows / n;
        int64_t take = x == n - 1   ? left
                       : balanced   ? mean
                       : x % 3 == 1 ? 0
                                    : min_i64(left, mean + (int64_t)rng_below(key, (uint64_t)x, (uint64_t)mean + 2));
        used += take;
        at[x + 1] = (int32_t)used;
    }
}
