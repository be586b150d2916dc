/* row8: argument checks, descriptors, test samples and bench shapes; see row8.h. */
#include "ops/row8/row8.h"
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/ops.h"

#include <math.h>

static int check_rows(const char *op, const struct tensor *values, const char *name, const struct tensor *q,
                      const struct tensor *src, int64_t k, bool pack, struct err *e)
{
    if (values->data != NULL && values->dtype != DT_BF16 && values->dtype != DT_F32 && values->dtype != DT_F64)
        return err_set(e, ST_INVALID, "%s: tensor %s has type %s, expected real numbers", op, name,
                       dtype_name(values->dtype));
    CHECK_T(op, name, values, values->dtype, 2, -1, -1);
    CHECK_OPT(op, "src", src, DT_I32, 1, -1);
    if (k < 1)
        return err_set(e, ST_INVALID, "%s: k is %lld, expected 1 or more", op, (long long)k);
    int64_t from = pack ? values->dim[0] : -1, places = present(src) ? src->dim[0] : from;
    CHECK_T(op, "q", q, DT_U8, 2, pack ? places : -1, row8_bytes(values->dim[1]));
    TRY(check_dense(op, "q", q, e));
    if (!pack)
        CHECK_T(op, name, values, values->dtype, 2, present(src) ? src->dim[0] : q->dim[0], -1);
    return ST_OK;
}

int row8_pack_check(const struct row8_pack_args *a, struct err *e)
{
    return check_rows("row8_pack", &a->x, "x", &a->q, &a->src, a->k, true, e);
}

int row8_unpack_check(const struct row8_unpack_args *a, struct err *e)
{
    return check_rows("row8_unpack", &a->y, "y", &a->q, &a->src, a->k, false, e);
}

/* ---- samples --------------------------------------------------------------------------------- */

/* places: rows that are taken by src; 0: none. */
static const struct op_dim dims[] = {{"rows", 5}, {"d", 33}, {"places", 0}};

static void map_shape(struct op_call *c)
{
    if (op_dim(c, "places") > 0)
        c->t[op_arg_index(c->desc, "src")] = tensor_1d(NULL, DT_NONE, (int64_t)op_dim(c, "places"));
}

static bool fill_map(struct op_call *c, int arg, struct tensor *host)
{
    int64_t choices = (int64_t)(op_dim(c, "rows") * op_attr(c, "k"));
    if (!op_arg_is(c, arg, "src"))
        return false;
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++)
        ((int32_t *)host->data)[i] = i % 7 == 3 || choices == 0 ? -1 : (int32_t)(i * 11 % choices);
    return true;
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    const struct tensor *values = &c->t[op_arg_index(c->desc, c->desc->args[0].name[0] == 'x' ? "x" : "y")];
    double places = op_dim(c, "places") > 0 ? op_dim(c, "places") : op_dim(c, "rows"),
           n = places * (double)values->dim[1];
    *out = (struct op_cost){.flops = 4 * n, .bytes = n * (double)(dtype_bytes(values->dtype) + 1)};
}

static const struct op_sample samples[] = {{"rows=5 d=33"},
                                           {"rows=1 d=1"},
                                           {"rows=0 d=16"},
                                           {"rows=7 d=128"},
                                           {"rows=9 d=257 strided=1"},
                                           {"rows=33 d=384"},
                                           {"rows=9 d=300 places=21 k=3"},
                                           {"rows=40 d=264 places=160 k=2 strided=1"},
                                           {"rows=64 d=1024 places=64 k=4"}};
static const struct op_sample bench[] = {{"rows=1024 d=512"},
                                         {"rows=16384 d=2048 gpu=1"},
                                         {"rows=16384 d=2048 places=98304 k=8 gpu=1"},
                                         {"rows=16384 d=7168 places=98304 k=8 gpu=1"}};

/* ---- row8_pack ------------------------------------------------------------------------------- */

static void pack_shapes(struct op_call *c)
{
    c->t[op_arg_index(c->desc, "x")] = tensor_2d(NULL, DT_NONE, (int64_t)op_dim(c, "rows"), (int64_t)op_dim(c, "d"));
    map_shape(c);
}

static int pack_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *x = &c->t[op_arg_index(c->desc, "x")], *src = &c->t[op_arg_index(c->desc, "src")];
    (void)ops;
    if (x->rank != 2)
        return err_set(e, ST_INVALID, "row8_pack: x has rank %d, expected 2", x->rank);
    c->t[op_arg_index(c->desc, "q")] =
        tensor_2d(NULL, DT_U8, src->rank > 0 ? src->dim[0] : x->dim[0], row8_bytes(x->dim[1]));
    return ST_OK;
}

/* Magnitudes over many orders, zeros, blocks of zeros. */
static bool pack_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (fill_map(c, arg, host))
        return true;
    if (!op_arg_is(c, arg, "x"))
        return false;
    int64_t cols = max_i64(host->dim[1], 1);
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++) {
        int64_t r = i / cols, b = i % cols / 64;
        bool zero = (r / 2 + b) % 9 == 8 || rng_below(key + 1, (uint64_t)i, 16) == 0;
        tensor_set(host, i,
                   zero ? 0 : (double)(float)ldexp(rng_normal(key, (uint64_t)i), (int)((r * 7 + b * 5) % 61) - 30));
    }
    return true;
}

OP_TABLES(row8_pack, ROW8_PACK_FIELDS);
const struct op_desc row8_pack_desc = {
    OP_IS(row8_pack),
    .summary = "rows as FP8 codes with their scales behind them",
    OP_LIST(dims, dims),
    .sample_shapes = pack_shapes,
    .infer = pack_infer,
    .sample_fill = pack_fill,
    .cost = cost,
    .tolerance = 0,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};

/* ---- row8_unpack ----------------------------------------------------------------------------- */

static const struct op_dim unpack_dims[] = {{"rows", 5}, {"places", 0}};

static void unpack_shapes(struct op_call *c)
{
    c->t[op_arg_index(c->desc, "q")] =
        tensor_2d(NULL, DT_NONE, (int64_t)op_dim(c, "rows"), row8_bytes((int64_t)op_attr(c, "d")));
    map_shape(c);
}

/* How many of the bytes of a row are codes is an attribute: its length is rounded. */
static int unpack_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *q = &c->t[op_arg_index(c->desc, "q")], *src = &c->t[op_arg_index(c->desc, "src")];
    double wanted = op_attr(c, "d");
    if (q->rank != 2 || !(wanted >= 0 && wanted <= (double)q->dim[1]) || q->dim[1] != row8_bytes((int64_t)wanted))
        return err_set(e, ST_INVALID, "row8_unpack: q has rank %d and %lld bytes a row, attribute d is %g", q->rank,
                       q->rank == 2 ? (long long)q->dim[1] : 0LL, wanted);
    int64_t d = (int64_t)wanted;
    c->t[op_arg_index(c->desc, "y")] = tensor_2d(NULL, ops->real, src->rank > 0 ? src->dim[0] : q->dim[0], d);
    return ST_OK;
}

static bool unpack_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (fill_map(c, arg, host))
        return true;
    if (!op_arg_is(c, arg, "q"))
        return false;
    int64_t d = (int64_t)op_attr(c, "d"), bytes = max_i64(host->dim[1], 1);
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++) {
        uint8_t code = (uint8_t)rng_below(key, (uint64_t)i, 256);
        bool nan = (code & 0x7f) == 0x7f;
        /* scales of moderate size, so that values are normal floats of every type */
        ((uint8_t *)host->data)[i] = i % bytes >= d ? (uint8_t)(97 + code % 61) : nan ? (uint8_t)(code - 1) : code;
    }
    return true;
}

OP_TABLES_WITH(row8_unpack, ROW8_UNPACK_FIELDS, , OP_ATTR_EXTRA("d", 33));
const struct op_desc row8_unpack_desc = {
    OP_IS(row8_unpack),
    .summary = "values of rows that came as FP8 codes",
    OP_LIST(dims, unpack_dims),
    .sample_shapes = unpack_shapes,
    .infer = unpack_infer,
    .sample_fill = unpack_fill,
    .cost = cost,
    .tolerance = 0,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
