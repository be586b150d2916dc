/* keylist: argument checks, cost, descriptor, test samples and bench shapes; see keylist.h. */
#include "ops/check.h"
#include "ops/keylist/keylist_int.h"
#include "ops/opshape.h"

int keylist_check(const struct keylist_args *a, struct err *e)
{
    const int64_t all[] = {a->batch, a->seq, a->window, a->most, a->base, a->entries, a->ratio, a->origin};
    static const char *const names[] = {"batch", "seq", "window", "most", "base", "entries", "ratio", "origin"};
    for (int i = 0; i < countof(all); i++)
        if (all[i] < 0 || all[i] > INT32_MAX / 2)
            return err_set(e, ST_INVALID, "keylist: %s is %lld, expected 0 to 2^30 - 1", names[i], (long long)all[i]);
    return op_check_fields(&keylist_desc, a, e);
}

int keylist_values_check(const struct keylist_args *a, struct err *e)
{
    int64_t start = index_start(&a->start);
    if (a->origin > max_i64(0, start - a->window + 1))
        return err_set(e, ST_INVALID, "keylist: tokens from %lld on are too few for a window of %lld behind token %lld",
                       (long long)a->origin, (long long)a->window, (long long)start);
    if (start < 0 || start - a->origin > a->base - a->seq)
        return err_set(e, ST_INVALID,
                       "keylist: %lld queries from token %lld on are beyond the %lld tokens among the keys",
                       (long long)a->seq, (long long)start, (long long)a->base);
    for (int64_t r = 0; present(&a->sel) && r < a->batch * a->seq; r++) {
        const int32_t *sel = (const int32_t *)a->sel.data + row_offset(&a->sel, r);
        for (int64_t k = 0; k < a->most; k++)
            if (sel[k] >= a->entries)
                return err_set(e, ST_INVALID, "keylist: sel[%lld, %lld] is %d, there are %lld entries", (long long)r,
                               (long long)k, (int)sel[k], (long long)a->entries);
    }
    return ST_OK;
}

/* ---- descriptor ------------------------------------------------------------------------------ */

static const struct op_dim dims[] = {{"first", 0}};

static bool fill(struct op_call *c, int arg, struct tensor *t, uint64_t key)
{
    if (op_arg_is(c, arg, "start")) {
        ((int64_t *)t->data)[0] = (int64_t)c->dim[0];
        return true;
    }
    int64_t entries = (int64_t)op_attr(c, "entries");
    for (int64_t i = 0; op_arg_is(c, arg, "sel") && i < tensor_elems(t); i++) /* every other one is none */
        tensor_set(t, i, i % 2 == 0 || entries == 0 ? -1 : (double)rng_below(key, (uint64_t)i, (uint64_t)entries));
    return op_arg_is(c, arg, "sel") || op_fill_documents(c, arg, t, key, 0.1);
}

static void cost(const struct op_call *c, struct op_cost *out) { *out = (struct op_cost){.bytes = op_bytes(c)}; }

static const struct op_sample samples[] = {
    {"no_doc_start=1 no_start=1 no_sel=1"},
    {"no_start=1"},
    {"batch=0"},
    {"seq=0"},
    {"batch=1 seq=1 window=1 most=0 base=1 entries=0 ratio=0 no_start=1"},
    {"batch=3 seq=40 window=7 most=10 base=40 entries=10 no_start=1 no_sel=1"},
    {"batch=2 seq=3 window=8 most=20 base=90 entries=23 first=70 no_doc_start=1 no_sel=1"},
    {"batch=2 seq=3 window=8 most=5 base=90 entries=23 first=87 no_doc_start=1"},
    {"batch=1 seq=300 window=128 most=2 base=300 entries=2 ratio=128 no_start=1 no_sel=1"},
    {"batch=2 seq=5 window=4 most=3 base=8 entries=6 first=20 origin=17"}, /* few tokens before a part */
    {"batch=2 seq=9 window=4 most=9 base=12 entries=9 first=33 origin=30 no_sel=1 no_doc_start=1"},
    {"batch=1 seq=20 window=50 most=0 base=20 entries=0 ratio=0 no_start=1"},
};
static const struct op_sample bench[] = {
    {"batch=1 seq=4096 window=128 most=512 base=4096 entries=1024 no_doc_start=1 no_start=1"}};

OP_TABLES(keylist, KEYLIST_FIELDS);
const struct op_desc keylist_desc = {
    OP_IS(keylist),        .summary = "lists of keys: a window of tokens, then compressed entries",
    OP_LIST(dims, dims),   .cost = cost,
    .sample_fill = fill,   OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
