/* Bounds of op calls whose data come from a file; see opguard.h. */
#include "ops/opguard.h"

#include <string.h>

/* Products of two tensors' sizes, or of one and an attribute or two, stay below 2^63. */
static const int64_t max_elems = (int64_t)1 << 31;
static const int64_t max_inferred = (int64_t)1 << 40;
static const double max_attr = 1 << 20;
/* A file of a few bytes can name any size beside a size of 0, and ops walk over rows that hold nothing. */
static const int64_t max_beside_zero = 1 << 20;

/* Attributes are sizes, choices and switches, whole and not negative; but for these. */
static bool may_be_negative(const char *name)
{
    static const char reals[] =
        "a b alpha beta scale offset shift fill clamp z z_loss aux seq_aux global_aux eps decay "
        "rate dt_min dt_max max_norm p beta1 beta2 capacity";
    return str_has_word(reals, name);
}

static double attr_limit(const char *name)
{
    if (strcmp(name, "key") == 0)
        return 0x1p53;
    return strcmp(name, "n") == 0 ? 0x1p31 : max_attr;
}

/* Elements of a shape in which a size of 0 counts as 1: strides are products too. -1: too many, or
 * a negative size, or too many beside one of 0. */
static int64_t extent(const struct tensor *t, int64_t most)
{
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++) {
        int64_t d = max_i64(t->dim[i], 1);
        if (t->dim[i] < 0 || d > most / n)
            return -1;
        n *= d;
    }
    return n > max_beside_zero && tensor_elems(t) == 0 ? -1 : n;
}

int op_guard_inputs(const struct op_call *c, struct err *e)
{
    const struct op_desc *d = c->desc;
    for (int i = 0; i < d->n_attrs; i++) {
        double limit = attr_limit(d->attrs[i].name), low = may_be_negative(d->attrs[i].name) ? -limit : 0;
        if (!(c->attr[i] >= low && c->attr[i] <= limit))
            return err_set(e, ST_INVALID, "%s: attribute %s is %g, expected %g to %g", d->name, d->attrs[i].name,
                           c->attr[i], low, limit);
    }
    for (int i = 0; i < d->n_args; i++) {
        char text[128];
        if (c->t[i].rank > 0 && extent(&c->t[i], max_elems) < 0)
            return err_set(e, ST_INVALID, "%s: tensor %s is %s, beyond %lld elements", d->name, d->args[i].name,
                           tensor_text(&c->t[i], text, sizeof text), (long long)max_elems);
    }
    return ST_OK;
}

int op_guard_sizes(const struct op_call *c, int64_t *bytes, struct err *e)
{
    *bytes = 0;
    for (int i = 0; i < c->desc->n_args; i++) {
        const struct tensor *t = &c->t[i];
        char text[128];
        if (t->rank == 0)
            continue;
        if (extent(t, max_inferred) < 0)
            return err_set(e, ST_INVALID, "%s: tensor %s would be %s, beyond %lld elements", c->desc->name,
                           c->desc->args[i].name, tensor_text(t, text, sizeof text), (long long)max_inferred);
        *bytes += tensor_bytes(t); /* at most 32 of at most 2^43 */
    }
    return ST_OK;
}

/* ---- indices --------------------------------------------------------------------------------- */

/* Entries lie in [low, high): high is a size of another tensor, times an attribute where one is
 * named. low is the number, or -high where both signs are indices. Ops that check their indices
 * themselves on every call (embed, xent, rope, moeplan, ...) have no row. */
enum low { LOW_DROPPED = -1, LOW_ZERO = 0, LOW_BOTH_SIGNS = 1 };
struct index_rule {
    const char *op, *name;
    enum low low;
    const char *of;
    int dim;
    const char *times;
    bool rising; /* 0 first, then never less than the one before; the end may be reached */
};
static const struct index_rule index_rules[] = {
    {"permute", "src", LOW_DROPPED, "x", 0, "k", false},
    {"permute", "src", LOW_DROPPED, "prob", 0, "k", false}, /* where there is no x */
    {"permute", "row", LOW_DROPPED, "src", 0, NULL, false},
    {"permute_bwd", "row", LOW_DROPPED, "dy", 0, NULL, false},
    {"unpermute", "row", LOW_DROPPED, "x", 0, NULL, false},
    {"unpermute", "row", LOW_DROPPED, "xprob", 0, NULL, false},
    {"unpermute_bwd", "src", LOW_DROPPED, "dy", 0, "k", false},
    {"unpermute_bwd", "row", LOW_DROPPED, "src", 0, NULL, false},
    {"quantise", "src", LOW_DROPPED, "x", 0, "k", false},
    {"quantise", "row", LOW_DROPPED, "src", 0, NULL, false},
    {"row8_pack", "src", LOW_DROPPED, "x", 0, "k", false},
    {"row8_unpack", "src", LOW_DROPPED, "q", 0, "k", false},
    {"router_bwd", "idx", LOW_BOTH_SIGNS, "logits", 1, NULL, false},
    {"epsend", "offset", LOW_ZERO, "src", 0, NULL, true},
    {"epsend", "row", LOW_DROPPED, "src", 0, NULL, false},
    {"epsend", "src", LOW_DROPPED, "src", 0, NULL, false},
};

static int bad_index(const struct op_call *c, const struct index_rule *r, int64_t at, int64_t value, int64_t low,
                     int64_t high, struct err *e)
{
    return err_set(e, ST_INVALID, "%s: %s[%lld] is %lld, expected %lld to %lld%s", c->desc->name, r->name,
                   (long long)at, (long long)value, (long long)low, (long long)high - !r->rising,
                   r->rising ? ", rising from 0" : "");
}

static int check_indices(const struct op_call *c, const struct index_rule *r, const struct tensor *t, int64_t high,
                         struct err *e)
{
    int64_t low = r->low == LOW_BOTH_SIGNS ? -high : (int64_t)r->low, before = 0;
    for (int64_t i = 0, n = tensor_elems(t); i < n; i++) {
        int64_t v = t->dtype == DT_I64 ? ((const int64_t *)t->data)[i] : ((const int32_t *)t->data)[i];
        if (v < low || v > high - !r->rising || (r->rising && (v < before || (i == 0 && v != 0))))
            return bad_index(c, r, i, v, low, high, e);
        before = v;
    }
    return ST_OK;
}

int op_guard_indices(const struct op_call *c, struct err *e)
{
    for (int k = 0; k < countof(index_rules); k++) {
        const struct index_rule *r = &index_rules[k];
        if (strcmp(r->op, c->desc->name) != 0)
            continue;
        int at = op_arg_index(c->desc, r->name), of = op_arg_index(c->desc, r->of);
        if (at < 0 || of < 0)
            return err_set(e, ST_INTERNAL, "%s has no tensor %s or %s", r->op, r->name, r->of);
        const struct tensor *t = &c->t[at];
        if (t->data == NULL || c->t[of].rank <= r->dim)
            continue; /* absent, or of a shape that the contract refuses */
        int64_t high = c->t[of].dim[r->dim] * (r->times != NULL ? (int64_t)op_attr(c, r->times) : 1);
        TRY(check_indices(c, r, t, high, e));
    }
    return ST_OK;
}
