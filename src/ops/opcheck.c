/* Gradcheck and comparison over op descriptors; see opcheck.h. */
#include "ops/opcheck.h"

#include "ops/check.h"
#include "ops/ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 64, GUARD_BYTE = 0xA5, STRIDE_PAD = 3 };

bool op_sample_flag(const struct op_sample *s, const char *name)
{
    char want[64];
    snprintf(want, sizeof want, "%s=1", name);
    const char *p = strstr(s->text, want);
    return p != NULL && (p == s->text || p[-1] == ' ');
}

/* Extent in elements of a possibly strided tensor. */
static int64_t extent(const struct tensor *t)
{
    int64_t last = 0;
    for (int i = 0; i < t->rank; i++) {
        if (t->dim[i] == 0)
            return 0;
        last += (t->dim[i] - 1) * t->stride[i];
    }
    return last + 1;
}

static void pad_rows(struct tensor *t)
{
    if (t->rank < 2)
        return;
    t->stride[t->rank - 2] += STRIDE_PAD;
    for (int i = t->rank - 3; i >= 0; i--)
        t->stride[i] = t->stride[i + 1] * t->dim[i + 1];
}

/* fast: large tensors repeat their first million values (timing needs random-looking data, not new data). */
static void fill_arg(struct op_call *c, int i, uint64_t key, bool fast)
{
    const struct op_arg *a = &c->desc->args[i];
    struct tensor *t = &c->t[i];
    if (a->role == ARG_WORK) {
        memset(t->data, 0xFF, (size_t)tensor_bytes(t)); /* NaN */
        return;
    }
    if (c->desc->sample_fill != NULL && c->desc->sample_fill(c, i, t, key))
        return;
    int64_t all = tensor_elems(t), n = fast ? min_i64(all, 1 << 20) : all;
    for (int64_t k = 0; k < n; k++) {
        /* fp32 values, so that the double reference sees exactly the same inputs. */
        double v = arg_is_real(a->type) || a->type == ARG_F64 ? (double)(float)rng_normal(key, (uint64_t)k) : 0;
        tensor_set(t, k, v);
    }
    for (int64_t size = (int64_t)dtype_bytes(t->dtype); n > 0 && n < all; n *= 2)
        memcpy((char *)t->data + n * size, t->data, (size_t)(min_i64(n, all - n) * size));
}

static int alloc_call(struct op_call *c, struct op_block *b, uint64_t key, bool strided, bool fast, struct err *e)
{
    size_t total = GUARD;
    for (int i = 0; i < c->desc->n_args; i++) {
        struct tensor *t = &c->t[i];
        if (t->rank == 0)
            continue;
        if (strided && arg_is_real(c->desc->args[i].type) && c->desc->args[i].role != ARG_WORK)
            pad_rows(t);
        total += (size_t)round_up(extent(t) * (int64_t)dtype_bytes(t->dtype), GUARD) + GUARD;
    }
    TRY(mem_aligned((void **)&b->base, total, GUARD, e));
    b->bytes = total;
    memset(b->base, GUARD_BYTE, total);
    size_t at = GUARD;
    for (int i = 0; i < c->desc->n_args; i++) {
        struct tensor *t = &c->t[i];
        if (t->rank == 0)
            continue;
        t->data = b->base + at;
        at += (size_t)round_up(extent(t) * (int64_t)dtype_bytes(t->dtype), GUARD) + GUARD;
        fill_arg(c, i, rng_key(key, c->desc->args[i].name), fast);
    }
    return ST_OK;
}

int op_call_alloc_fast(struct op_call *c, struct op_block *b, uint64_t key, struct err *e)
{
    return alloc_call(c, b, key, false, true, e);
}

int op_call_alloc(struct op_call *c, struct op_block *b, uint64_t key, bool strided, struct err *e)
{
    return alloc_call(c, b, key, strided, false, e);
}

/* Every byte that belongs to no element must be as it was. */
bool op_guards_intact(const struct op_call *c, const struct op_block *b)
{
    char *seen = calloc(b->bytes, 1);
    if (seen == NULL)
        return false;
    for (int i = 0; i < c->desc->n_args; i++) {
        const struct tensor *t = &c->t[i];
        int64_t size = (int64_t)dtype_bytes(t->dtype), rows = t->data ? rows_of(t) : 0;
        for (int64_t r = 0; t->data != NULL && t->rank > 0 && r < rows; r++)
            memset(seen + ((char *)t->data - b->base) + row_offset(t, r) * size, 1, (size_t)(cols_of(t) * size));
    }
    bool ok = true;
    for (size_t k = 0; k < b->bytes && ok; k++)
        ok = seen[k] || (unsigned char)b->base[k] == GUARD_BYTE;
    free(seen);
    return ok;
}

void op_call_free(struct op_block *b)
{
    free(b->base);
    b->base = NULL;
}

static void note_error(struct op_check_result *out, double error, const char *tensor, int64_t index)
{
    if (error > out->worst || !isfinite(error)) {
        out->worst = isfinite(error) ? error : HUGE_VAL;
        snprintf(out->where, sizeof out->where, "%s[%lld]", tensor, (long long)index);
    }
}

/* ---- gradients ------------------------------------------------------------------------------- */

static double weighted_output(const struct op_call *f, const struct op_call *b)
{
    double sum = 0;
    for (int i = 0; i < f->desc->n_args; i++) {
        const struct op_arg *a = &f->desc->args[i];
        if ((a->role != ARG_OUT && a->role != ARG_OOUT) || !arg_is_real(a->type) || a->no_grad || f->t[i].data == NULL)
            continue;
        int j = op_gradient_index(b->desc, a->name);
        for (int64_t k = 0, n = j < 0 ? 0 : tensor_elems(&f->t[i]); k < n; k++)
            sum += tensor_get(&f->t[i], k) * tensor_get(&b->t[j], k);
    }
    return sum;
}

/* Backward inputs that are forward tensors take their values; others that are neither those nor
 * upstream gradients are dropped if optional. */
static void link_backward(const struct op_call *f, struct op_call *b)
{
    for (int j = 0; j < b->desc->n_args; j++) {
        const struct op_arg *a = &b->desc->args[j];
        int i = op_arg_index(f->desc, a->name);
        int up = a->name[0] == 'd' ? op_arg_index(f->desc, a->name + (a->name[1] == '_' ? 2 : 1)) : -1;
        bool is_input = a->role == ARG_IN || a->role == ARG_OPT;
        if (is_input && i >= 0) {
            if (f->t[i].data == NULL && a->role == ARG_OPT)
                b->t[j] = (struct tensor){0};
            else
                for (int64_t k = 0, n = f->t[i].data ? tensor_elems(&f->t[i]) : 0; k < n && b->t[j].data != NULL; k++)
                    tensor_set(&b->t[j], k, tensor_get(&f->t[i], k));
        } else if (a->role == ARG_OPT && up < 0) {
            b->t[j] = (struct tensor){0};
        } else if (a->role == ARG_OOUT && up >= 0 && f->t[up].data == NULL) {
            b->t[j] = (struct tensor){0}; /* gradient of an input that is not there */
        }
    }
    memset(b->acc, 0, sizeof b->acc);
    for (int k = 0; k < b->desc->n_attrs; k++) {
        int same = op_attr_index(f->desc, b->desc->attrs[k].name);
        if (same >= 0)
            b->attr[k] = f->attr[same];
        if (str_starts(b->desc->attrs[k].name, "acc_"))
            b->attr[k] = 0;
    }
}

static int check_input(struct op_call *f, const struct op_call *b, int i, int j, struct lane *lane, uint64_t key,
                       struct op_check_result *out)
{
    enum { DIRECTIONS = 3 };
    struct tensor *x = &f->t[i];
    int64_t n = tensor_elems(x);
    for (int dir = 0; dir < DIRECTIONS && n > 0; dir++) {
        double analytic = 0, scale = 0, h = 1e-5, at[2];
        uint64_t dk = rng_key(key + (uint64_t)dir, f->desc->args[i].name);
        for (int64_t k = 0; k < n; k++) {
            double g = tensor_get(&b->t[j], k), v = rng_normal(dk, (uint64_t)k);
            analytic += g * v;
            scale += g * g * v * v;
        }
        for (int side = 0; side < 2; side++) {
            for (int64_t k = 0; k < n; k++)
                tensor_set(x, k, tensor_get(x, k) + (side ? -2 : 1) * h * rng_normal(dk, (uint64_t)k));
            TRY(op_call_run(&ops_ref, lane, f));
            at[side] = weighted_output(f, b);
        }
        for (int64_t k = 0; k < n; k++)
            tensor_set(x, k, tensor_get(x, k) + h * rng_normal(dk, (uint64_t)k));
        double numeric = (at[0] - at[1]) / (2 * h);
        note_error(out, fabs(numeric - analytic) / (sqrt(scale) + fabs(analytic) + 1e-3), f->desc->args[i].name, dir);
        out->compared++;
    }
    return ST_OK;
}

int op_gradcheck(const struct op_desc *d, const struct op_sample *s, uint64_t seed, struct op_check_result *out,
                 struct err *e)
{
    *out = (struct op_check_result){0};
    const struct op_desc *back = d->backward ? op_find(d->backward) : NULL;
    if (d->backward != NULL && back == NULL)
        return err_set(e, ST_INTERNAL, "%s: backward op '%s' is not registered", d->name, d->backward);
    if (back == NULL)
        return ST_OK;
    struct op_call f, b;
    struct op_block fb = {0}, bb = {0};
    struct dev dev = {.kind = DEV_REF, .real = DT_F64, .wide = DT_F64, .n_threads = 1};
    struct lane lane = {.dev = &dev, .err = e};
    int st;
    TRY_OUT(op_call_sample(&f, d, s, &ops_ref, e));
    TRY_OUT(op_call_sample(&b, back, s, &ops_ref, e));
    memset(f.acc, 0, sizeof f.acc);
    for (int k = 0; k < d->n_attrs; k++)
        if (str_starts(d->attrs[k].name, "acc_"))
            f.attr[k] = 0;
    TRY_OUT(op_call_alloc(&f, &fb, seed, false, e));
    TRY_OUT(op_call_alloc(&b, &bb, seed + 1, false, e));
    TRY_OUT(op_call_run(&ops_ref, &lane, &f));
    link_backward(&f, &b);
    TRY_OUT(op_call_run(&ops_ref, &lane, &b));
    for (int i = 0; i < d->n_args && st == ST_OK; i++) {
        const struct op_arg *a = &d->args[i];
        int j = op_gradient_index(back, a->name);
        if ((a->role != ARG_IN && a->role != ARG_OPT) || !arg_is_real(a->type) || a->no_grad || f.t[i].data == NULL)
            continue;
        if (j < 0)
            st = err_set(e, ST_INTERNAL, "%s gives no gradient for input %s of %s", back->name, a->name, d->name);
        else
            st = check_input(&f, &b, i, j, &lane, seed + 7, out);
    }
out:
    op_call_free(&fb);
    op_call_free(&bb);
    return st != ST_OK ? (err_in(e, "gradcheck of %s, sample '%s'", d->name, s->text), st) : ST_OK;
}

/* ---- one table against the reference --------------------------------------------------------- */

static void compare_outputs(const struct op_call *got, const struct op_call *want, struct op_check_result *out)
{
    for (int i = 0; i < got->desc->n_args; i++) {
        const struct op_arg *a = &got->desc->args[i];
        if ((a->role != ARG_OUT && a->role != ARG_OOUT) || got->t[i].data == NULL)
            continue;
        double largest = 1e-6;
        int64_t n = tensor_elems(&got->t[i]);
        for (int64_t k = 0; k < n; k++) {
            double w = fabs(tensor_get(&want->t[i], k));
            largest = isfinite(w) && w > largest ? w : largest;
        }
        for (int64_t k = 0; k < n; k++) {
            double g = tensor_get(&got->t[i], k), w = tensor_get(&want->t[i], k);
            if (g != w && !(isnan(g) && isnan(w)))
                note_error(out, fabs(g - w) / largest, a->name, k);
        }
        out->compared++;
    }
}

int op_compare(const struct op_desc *d, const struct op_sample *s, struct dev *dev, const struct ops *ops,
               uint64_t seed, struct op_check_result *out, struct err *e)
{
    *out = (struct op_check_result){0};
    struct op_call fast, slow;
    struct op_block fb = {0}, sb = {0};
    struct dev ref = {.kind = DEV_REF, .real = DT_F64, .wide = DT_F64, .n_threads = 1};
    struct lane fast_lane = {.dev = dev, .err = e}, ref_lane = {.dev = &ref, .err = e};
    bool strided = op_sample_flag(s, "strided");
    int st;
    TRY_OUT(op_call_sample(&fast, d, s, ops, e));
    TRY_OUT(op_call_sample(&slow, d, s, &ops_ref, e));
    TRY_OUT(op_call_alloc(&fast, &fb, seed, strided, e));
    TRY_OUT(op_call_alloc(&slow, &sb, seed, strided, e));
    TRY_OUT(op_call_run(ops, &fast_lane, &fast));
    TRY_OUT(op_call_run(&ops_ref, &ref_lane, &slow));
    if (!op_guards_intact(&fast, &fb))
        st = err_set(e, ST_INTERNAL, "%s on %s wrote outside its tensors", d->name, ops->name);
    else if (!op_guards_intact(&slow, &sb))
        st = err_set(e, ST_INTERNAL, "%s on ref wrote outside its tensors", d->name);
    else
        compare_outputs(&fast, &slow, out);
out:
    op_call_free(&fb);
    op_call_free(&sb);
    return st != ST_OK ? (err_in(e, "comparing %s, sample '%s'", d->name, s->text), st) : ST_OK;
}
