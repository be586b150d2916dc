/* Calls of ops as `braid op` makes them from a file: one of an op's samples with some attributes,
 * sizes and integers replaced by what the input says. Whatever it says, the call is refused with a
 * message or runs inside its tensors, on the reference and on the CPU.
 *
 *   byte 0, 1: op and sample; byte 2: device; then 3 bytes each: what is replaced, where, by which
 * value */
#include "ops/opguard.h"
#include "ops/ops.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void need(bool condition)
{
    if (!condition)
        abort();
}

/* Small numbers, and those at which something may overflow. */
static double number(uint8_t b)
{
    static const double edge[] = {0.5,          1e-300,        1 << 20,       1 << 24, 2147483647.0, 2147483648.0,
                                  4294967296.0, 0x1p40,        0x1p53,        0x1p62,  0x1p63,       0x1p64,
                                  1e300,        -2147483648.0, -2147483649.0, -0x1p40, -0x1p63,      -1e300,
                                  1048577.0,    65536.0,       65537.0,       1024.0,  255.0,        256.0};
    return b < 200 ? (double)(b % 100) - 20 : edge[(b - 200) % countof(edge)];
}

static int64_t whole(uint8_t b)
{
    double v = number(b);
    return v >= 0x1p63 ? INT64_MAX : v <= -0x1p63 ? INT64_MIN : (int64_t)v;
}

enum { REPLACE_ATTR, REPLACE_DIM, REPLACE_RANK, REPLACE_ABSENT, REPLACES };

static void replace_shape(struct op_call *c, uint8_t what, uint8_t where, uint8_t value)
{
    const struct op_desc *d = c->desc;
    struct tensor *t = &c->t[where % d->n_args];
    enum arg_role role = d->args[where % d->n_args].role;
    bool input = role == ARG_IN || role == ARG_OPT;
    switch (what % REPLACES) {
    case REPLACE_ATTR:
        if (d->n_attrs > 0)
            c->attr[where % d->n_attrs] = number(value);
        break;
    case REPLACE_DIM:
        if (input && t->rank > 0) {
            t->dim[(what / REPLACES) % t->rank] =
                whole(value) < 0 ? 0 : whole(value); /* a file has no negative sizes */
        }
        break;
    case REPLACE_RANK:
        if (input && t->rank > 0)
            for (t->rank = 1 + value % 4; t->rank > 1 && t->dim[t->rank - 1] == 0;)
                t->dim[t->rank - 1] = 1 + value / 4;
        break;
    default:
        if (role == ARG_OPT)
            *t = (struct tensor){0};
    }
}

/* Inputs only, dense, as a file gives them. */
static void only_inputs(struct op_call *c, const struct ops *ops)
{
    for (int i = 0; i < c->desc->n_args; i++) {
        const struct op_arg *a = &c->desc->args[i];
        struct tensor *t = &c->t[i];
        if ((a->role != ARG_IN && a->role != ARG_OPT) || t->rank == 0) {
            *t = (struct tensor){0};
            continue;
        }
        t->dtype = op_arg_dtype(a, ops->real);
    }
}

static void fill(struct op_call *c, int i, const uint8_t *data, size_t size)
{
    struct tensor *t = &c->t[i];
    enum arg_type type = c->desc->args[i].type;
    int64_t n = tensor_elems(t);
    if (arg_is_real(type) || type == ARG_F64) {
        for (int64_t k = 0; k < n; k++)
            tensor_set(t, k, (double)(k % 7) - 3);
        return;
    }
    /* As the sample has it where shapes are still the sample's: sample_fill trusts them. */
    for (size_t at = 3; n > 0 && at + 3 <= size; at += 3)
        if (data[at] % 8 == 7) {
            int64_t v = whole(data[at + 2]), k = data[at + 1] % n;
            if (t->dtype == DT_I64)
                ((int64_t *)t->data)[k] = v;
            else if (dtype_bytes(t->dtype) == 1)
                ((uint8_t *)t->data)[k] = (uint8_t)v;
            else
                ((int32_t *)t->data)[k] = (int32_t)(v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : v);
        }
}

static void run_call(struct op_call *c, const struct ops *ops, struct dev *dev, bool as_sampled, const uint8_t *data,
                     size_t size)
{
    struct err e = {0};
    struct lane lane = {.dev = dev, .err = &e};
    int64_t bytes = 0;
    int n = c->desc->n_args, st = op_guard_inputs(c, &e);
    if (st == ST_OK) {
        for (int i = 0; i < n; i++)
            if (c->t[i].rank > 0)
                c->t[i] = tensor_shape(c->t[i].dtype, c->t[i].rank, c->t[i].dim);
        st = op_call_infer(c, ops, &e);
    }
    if (st == ST_OK)
        st = op_guard_sizes(c, &bytes, &e);
    for (int i = 0; i < n && st == ST_OK && bytes <= 1 << 20; i++) {
        if (c->t[i].rank == 0)
            continue;
        size_t each = (size_t)tensor_bytes(&c->t[i]);
        c->t[i].data = aligned_alloc(64, each + 64 - each % 64);
        need(c->t[i].data != NULL);
        memset(c->t[i].data, 0, each);
        enum arg_role role = c->desc->args[i].role;
        if (role != ARG_IN && role != ARG_OPT)
            continue;
        if (as_sampled && c->desc->sample_fill != NULL)
            c->desc->sample_fill(c, i, &c->t[i], 1);
        fill(c, i, data, size);
    }
    if (st == ST_OK && bytes <= 1 << 20) {
        st = op_guard_indices(c, &e);
        if (st == ST_OK)
            st = op_call_run(ops, &lane, c);
    }
    need(st == ST_OK || e.msg[0] != '\0');
    for (int i = 0; i < n; i++)
        free(c->t[i].data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int n;
    const struct op_desc *const *all = op_registry(&n);
    struct err e = {0};
    struct dev dev;
    struct op_call c;
    if (size < 3)
        return 0;
    const struct op_desc *d = all[data[0] % n];
    if (dev_open(&dev, data[2] % 2 == 0 ? DEV_REF : DEV_CPU, 1, &e) != ST_OK)
        return 0;
    const struct ops *ops = ops_for(&dev);
    const struct op_sample *s = &d->samples[d->n_samples > 0 ? data[1] % d->n_samples : 0];
    bool large = d->n_samples == 0 || strstr(s->text, "gpu=1") != NULL || op_call_sample(&c, d, s, ops, &e) != ST_OK ||
                 op_bytes(&c) > 1 << 18;
    if (!large && ops_has(ops, d->name)) {
        bool as_sampled = true;
        only_inputs(&c, ops);
        for (size_t at = 3; at + 3 <= size; at += 3)
            if (data[at] % 8 != 7) {
                as_sampled = as_sampled && data[at] % REPLACES == REPLACE_ABSENT;
                replace_shape(&c, data[at], data[at + 1], data[at + 2]);
            }
        run_call(&c, ops, &dev, as_sampled, data, size);
    }
    dev_close(&dev);
    return 0;
}
