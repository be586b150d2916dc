/* shard8: argument checks, descriptors, test samples and bench shapes; see shard8.h. */
#include "ops/shard8/shard8.h"
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/opshape.h"

#include <math.h>

enum { MOST_ROWS = 1 << 30 }; /* so that no product of two sizes overflows */

/* Own rows of a matrix; block and first are numbers that make sense. */
static int check_own(const char *op, const struct tensor *x, int64_t first, int64_t block, struct err *e)
{
    if (x->data != NULL && x->dtype != DT_F32 && x->dtype != DT_F64)
        return err_set(e, ST_INVALID, "%s: tensor x has type %s, expected F32 or F64", op, dtype_name(x->dtype));
    CHECK_T(op, "x", x, x->dtype, 2, -1, -1);
    if (first < 0 || block < 0 || first > MOST_ROWS || block > MOST_ROWS)
        return err_set(e, ST_INVALID, "%s: first is %lld and block %lld, expected 0 to %d", op, (long long)first,
                       (long long)block, MOST_ROWS);
    return check_dense(op, "x", x, e);
}

int shard8_most_check(const struct shard8_most_args *a, struct err *e)
{
    TRY(check_own("shard8_most", &a->x, a->first, a->block, e));
    CHECK_T("shard8_most", "most", &a->most, a->x.dtype, 2, -1, shard8_across(a->x.dim[1], a->block));
    int64_t n = a->x.dim[0], reached = a->block == 0 ? 1 : n > 0 ? (a->first % a->block + n - 1) / a->block + 1 : 0;
    if (a->most.dim[0] < reached)
        return err_set(e, ST_INVALID,
                       "shard8_most: %lld rows from row %lld on reach into %lld rows of blocks, most has %lld",
                       (long long)n, (long long)a->first, (long long)reached, (long long)a->most.dim[0]);
    return check_dense("shard8_most", "most", &a->most, e);
}

int shard8_codes_check(const struct shard8_codes_args *a, struct err *e)
{
    const char *op = "shard8_codes";
    TRY(check_own(op, &a->x, a->first, a->block, e));
    int64_t n = a->x.dim[0], cols = a->x.dim[1];
    bool square = a->block > 0;
    if (a->piece < 1 || a->piece > MOST_ROWS || a->rows < 0 || a->rows > MOST_ROWS || n > a->piece ||
        a->first + n > a->rows)
        return err_set(e, ST_INVALID, "%s: rows %lld to %lld of %lld, in pieces of %lld", op, (long long)a->first,
                       (long long)(a->first + n), (long long)a->rows, (long long)a->piece);
    CHECK_T(op, "most", &a->most, a->x.dtype, 3, -1, shard8_down(a->piece, a->block), shard8_across(cols, a->block));
    TRY(check_dense(op, "most", &a->most, e));
    if (a->most.dim[0] * a->piece < a->rows)
        return err_set(e, ST_INVALID, "%s: %lld pieces of %lld do not cover %lld rows", op, (long long)a->most.dim[0],
                       (long long)a->piece, (long long)a->rows);
    CHECK_T(op, "q", &a->q, DT_F8_E4M3, 2, n, cols);
    TRY(check_dense(op, "q", &a->q, e));
    CHECK_T(op, "qs", &a->qs, a->x.dtype, 1, f8_scales(a->x.dtype, a->rows, cols, a->block, square).dim[0]);
    CHECK_OPT(op, "ts", &a->ts, a->x.dtype, 1, f8_scales(a->x.dtype, cols, a->rows, a->block, square).dim[0]);
    return ST_OK;
}

OP_CHECK(shard8_turn)

/* ---- samples --------------------------------------------------------------------------------- */

/* own: rows that this rank has; ranks: all of them. */
static const struct op_dim most_dims[] = {{"own", 5}, {"cols", 33}};
static const struct op_dim codes_dims[] = {{"own", 5}, {"cols", 33}, {"ranks", 1}};

static void own_shape(struct op_call *c)
{
    c->t[op_arg_index(c->desc, "x")] = tensor_2d(NULL, DT_NONE, (int64_t)op_dim(c, "own"), (int64_t)op_dim(c, "cols"));
}

static void codes_shapes(struct op_call *c)
{
    int64_t block = (int64_t)op_attr(c, "block");
    own_shape(c);
    c->t[op_arg_index(c->desc, "most")] =
        tensor_3d(NULL, DT_NONE, (int64_t)op_dim(c, "ranks"), shard8_down((int64_t)op_attr(c, "piece"), block),
                  shard8_across((int64_t)op_dim(c, "cols"), block));
}

static int own_rank(const struct op_call *c, struct err *e)
{
    const struct tensor *x = &c->t[op_arg_index(c->desc, "x")];
    return x->rank == 2 ? ST_OK : err_set(e, ST_INVALID, "%s: x has rank %d, expected 2", c->desc->name, x->rank);
}

static int most_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *x = &c->t[op_arg_index(c->desc, "x")];
    int64_t block = (int64_t)op_attr(c, "block");
    TRY(own_rank(c, e));
    c->t[op_arg_index(c->desc, "most")] =
        tensor_2d(NULL, wide_of(ops->real), shard8_down(x->dim[0], block), shard8_across(x->dim[1], block));
    return ST_OK;
}

static int codes_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *x = &c->t[op_arg_index(c->desc, "x")];
    int64_t rows = (int64_t)op_attr(c, "rows"), block = (int64_t)op_attr(c, "block");
    enum dtype wide = wide_of(ops->real);
    TRY(own_rank(c, e));
    if (rows < 0 || block < 0 || rows > MOST_ROWS || block > MOST_ROWS)
        return err_set(e, ST_INVALID, "shard8_codes: rows is %lld and block %lld", (long long)rows, (long long)block);
    c->t[op_arg_index(c->desc, "q")] = tensor_2d(NULL, DT_F8_E4M3, x->dim[0], x->dim[1]);
    c->t[op_arg_index(c->desc, "qs")] = f8_scales(wide, rows, x->dim[1], block, block > 0);
    if (op_attr(c, "turned") != 0)
        c->t[op_arg_index(c->desc, "ts")] = f8_scales(wide, x->dim[1], rows, block, block > 0);
    return ST_OK;
}

/* Magnitudes over many orders, zeros, blocks of zeros; maxima of a few, of which one or two are of what is not
 * finite. */
static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    bool most = op_arg_is(c, arg, "most");
    int64_t cols = max_i64(host->dim[host->rank - 1], 1);
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++) {
        int64_t r = i / cols, b = most ? i : i % cols / 64;
        bool zero = (r / 2 + b) % 9 == 8 || rng_below(key + 1, (uint64_t)i, 16) == 0;
        double v = zero ? 0 : (double)(float)ldexp(rng_normal(key, (uint64_t)i), (int)((r * 7 + b * 5) % 61) - 30);
        tensor_set(host, i, most && i % 23 == 22 ? HUGE_VAL : most ? fabs(v) : v);
    }
    return true;
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    const struct tensor *x = &c->t[op_arg_index(c->desc, "x")];
    double n = (double)tensor_elems(x);
    *out = (struct op_cost){.flops = 4 * n, .bytes = n * (double)(dtype_bytes(x->dtype) + 1)};
}

static void turn_cost(const struct op_call *c, struct op_cost *out)
{
    *out = (struct op_cost){.bytes = 2 * (double)tensor_elems(&c->t[op_arg_index(c->desc, "q")])};
}

static bool fill_codes(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (!op_arg_is(c, arg, "q"))
        return false;
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++)
        ((uint8_t *)host->data)[i] = (uint8_t)rng_below(key, (uint64_t)i, 127);
    return true;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_sample most_samples[] = {
    {"own=5 cols=33"},
    {"own=1 cols=1"},
    {"own=0 cols=16"},
    {"own=144 cols=272 first=144"},
    {"own=130 cols=129 first=127"},
    {"own=128 cols=128 first=128"},
    {"own=91 cols=144 first=182"},
    {"own=300 cols=300 block=0"},
    {"own=7 cols=64 first=30 block=32"},
};
static const struct op_sample most_bench[] = {{"own=1408 cols=2048"}, {"own=1408 cols=2048 block=0"}};
static const struct op_sample codes_samples[] = {
    {"own=5 cols=33 rows=5 piece=5"},
    {"own=0 cols=16 rows=10 piece=5 first=10 ranks=3"},
    {"own=144 cols=272 rows=432 piece=144 first=144 ranks=3 turned=1"},
    {"own=90 cols=144 rows=272 piece=91 first=182 ranks=3 turned=1"},
    {"own=128 cols=128 rows=512 piece=128 first=128 ranks=4"},
    {"own=3 cols=130 rows=300 piece=3 first=126 ranks=100 turned=1"},
    {"own=100 cols=300 rows=300 piece=100 first=100 ranks=3 block=0 turned=1"},
    {"own=7 cols=64 rows=33 piece=7 first=21 ranks=5 block=32"},
};
static const struct op_sample codes_bench[] = {
    {"own=1408 cols=2048 rows=11264 piece=1408 first=1408 ranks=8 turned=1"}};
static const struct op_dim turn_dims[] = {{"rows", 5}, {"cols", 33}};
static const struct op_sample turn_samples[] = {{"rows=5 cols=33"},    {"rows=1 cols=1"},    {"rows=0 cols=16"},
                                                {"rows=144 cols=272"}, {"rows=130 cols=60"}, {"rows=68 cols=132"}};
static const struct op_sample turn_bench[] = {{"rows=4096 cols=320"}, {"rows=11264 cols=2048 gpu=1"}};

OP_TABLES(shard8_most, SHARD8_MOST_FIELDS);
const struct op_desc shard8_most_desc = {
    OP_IS(shard8_most),
    .summary = "largest magnitudes in scale blocks, of some rows of a matrix",
    OP_LIST(dims, most_dims),
    .sample_shapes = own_shape,
    .infer = most_infer,
    .sample_fill = fill,
    .cost = cost,
    .tolerance = 0,
    OP_LIST(samples, most_samples),
    OP_LIST(bench, most_bench),
};
OP_FIELDS(shard8_codes, SHARD8_CODES_FIELDS, );
OP_ATTRS(shard8_codes, SHARD8_CODES_FIELDS, OP_ATTR_EXTRA("turned", 0));
OP_CALLS(shard8_codes);
const struct op_desc shard8_codes_desc = {
    OP_IS(shard8_codes),
    .summary = "FP8 codes of some rows of a matrix, and the scales of all",
    OP_LIST(dims, codes_dims),
    .sample_shapes = codes_shapes,
    .infer = codes_infer,
    .sample_fill = fill,
    .cost = cost,
    .tolerance = 0,
    OP_LIST(samples, codes_samples),
    OP_LIST(bench, codes_bench),
};
OP_TABLES(shard8_turn, SHARD8_TURN_FIELDS);
const struct op_desc shard8_turn_desc = {
    OP_IS(shard8_turn),
    .summary = "transpose of FP8 codes",
    OP_LIST(dims, turn_dims),
    .sample_fill = fill_codes,
    .cost = turn_cost,
    .tolerance = 0,
    OP_LIST(samples, turn_samples),
    OP_LIST(bench, turn_bench),
};
