/* quantise: argument checks, descriptor, test samples and bench shapes; see quantise.h. */
#include "ops/check.h"
#include "ops/opdesc.h"
#include "ops/ops.h"
#include "ops/quantise/quantise.h"
#include "tensor/f8.h"

int f8_check(const char *op, const char *name, const struct tensor *codes, const struct tensor *scales, enum dtype wide,
             int64_t block, bool square, struct err *e)
{
    char text[32];
    if (block < 0 || (block == 0 && square))
        return err_set(e, ST_INVALID, "%s: block is %lld%s, expected 1 or more, or 0 for one scale", op,
                       (long long)block, square ? " for square blocks" : "");
    if (codes->data != NULL && !dtype_is_f8(codes->dtype))
        return err_set(e, ST_INVALID, "%s: tensor %s has type %s, expected F8_E4M3 or F8_E5M2", op, name,
                       dtype_name(codes->dtype));
    CHECK_T(op, name, codes, codes->dtype, 2, -1, -1);
    TRY(check_dense(op, name, codes, e));
    struct tensor want = f8_scales(wide, codes->dim[0], codes->dim[1], block, square);
    snprintf(text, sizeof text, "%.20s's scales", name);
    CHECK_T(op, text, scales, wide, 1, want.dim[0]);
    return ST_OK;
}

static bool is_real(enum dtype t) { return t == DT_BF16 || t == DT_F32 || t == DT_F64; }

int quantise_check(const struct quantise_args *a, struct err *e)
{
    if (a->x.data != NULL && !is_real(a->x.dtype))
        return err_set(e, ST_INVALID, "quantise: tensor x has type %s, expected real numbers", dtype_name(a->x.dtype));
    CHECK_T("quantise", "x", &a->x, a->x.dtype, 2, -1, -1);
    if (!present(&a->q) && !present(&a->t))
        return err_set(e, ST_INVALID, "quantise: neither q nor t is given");
    if (present(&a->q) && present(&a->t) && a->q.dtype != a->t.dtype)
        return err_set(e, ST_INVALID, "quantise: q has type %s and t type %s", dtype_name(a->q.dtype),
                       dtype_name(a->t.dtype));
    enum dtype wide = wide_of(a->x.dtype);
    CHECK_OPT("quantise", "src", &a->src, DT_I32, 1, -1);
    if (present(&a->src) && (a->k < 1 || a->square || a->block == 0))
        return err_set(e, ST_INVALID, "quantise: src with k = %lld and %s; expected 1 or more, and blocks by rows",
                       (long long)a->k,
                       a->square       ? "square blocks"
                       : a->block == 0 ? "one scale"
                                       : "blocks by rows");
    if (present(&a->row) && !present(&a->src))
        return err_set(e, ST_INVALID, "quantise: row without src");
    CHECK_OPT("quantise", "row", &a->row, DT_I32, 2, a->x.dim[0], a->k);
    int64_t rows = quantise_rows(a);
    if (present(&a->q)) {
        TRY(f8_check("quantise", "q", &a->q, &a->qs, wide, a->block, a->square, e));
        CHECK_T("quantise", "q", &a->q, a->q.dtype, 2, rows, a->x.dim[1]);
    }
    if (present(&a->t)) {
        TRY(f8_check("quantise", "t", &a->t, &a->ts, wide, a->block, a->square, e));
        CHECK_T("quantise", "t", &a->t, a->t.dtype, 2, a->x.dim[1], rows);
    }
    return ST_OK;
}

/* ---- descriptor ------------------------------------------------------------------------------ */

/* places: rows that are taken by src; 0: none. */
static const struct op_dim dims[] = {{"rows", 5}, {"cols", 33}, {"places", 0}};

static void shapes(struct op_call *c)
{
    c->t[op_arg_index(c->desc, "x")] = tensor_2d(NULL, DT_NONE, (int64_t)op_dim(c, "rows"), (int64_t)op_dim(c, "cols"));
    int64_t places = (int64_t)op_dim(c, "places"), k = (int64_t)op_attr(c, "k");
    if (places > 0)
        c->t[op_arg_index(c->desc, "src")] = tensor_1d(NULL, DT_NONE, places);
    if (places > 0 && places == (int64_t)op_dim(c, "rows") * k)
        c->t[op_arg_index(c->desc, "row")] = tensor_2d(NULL, DT_NONE, places / k, k);
}

static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *x = &c->t[op_arg_index(c->desc, "x")];
    if (x->rank != 2)
        return err_set(e, ST_INVALID, "quantise: x has rank %d, expected 2", x->rank);
    enum dtype type = op_attr(c, "e5m2") != 0 ? DT_F8_E5M2 : DT_F8_E4M3, wide = wide_of(ops->real);
    int64_t block = (int64_t)op_attr(c, "block");
    bool square = op_attr(c, "square") != 0;
    const struct tensor *src = &c->t[op_arg_index(c->desc, "src")];
    int64_t rows = src->rank > 0 ? src->dim[0] : x->dim[0];
    if (op_attr(c, "wide_x") != 0)
        c->t[op_arg_index(c->desc, "x")].dtype = wide;
    if (op_attr(c, "only") != 2) {
        c->t[op_arg_index(c->desc, "q")] = tensor_2d(NULL, type, rows, x->dim[1]);
        c->t[op_arg_index(c->desc, "qs")] = f8_scales(wide, rows, x->dim[1], block, square);
    }
    if (op_attr(c, "only") != 1) {
        c->t[op_arg_index(c->desc, "t")] = tensor_2d(NULL, type, x->dim[1], rows);
        c->t[op_arg_index(c->desc, "ts")] = f8_scales(wide, x->dim[1], rows, block, square);
    }
    OP_UNPACK(quantise, a, c);
    int64_t work = ops->quantise_work != NULL ? ops->quantise_work(a) : 0;
    if (work > 0)
        c->t[op_arg_index(c->desc, "work")] = tensor_1d(NULL, DT_U8, work);
    return ST_OK;
}

/* Magnitudes over many orders, zeros, blocks of zeros. */
static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    bool inverse = op_arg_is(c, arg, "row");
    if (op_arg_is(c, arg, "src") ||
        inverse) { /* every seventh place is empty; places and choices are as far as they go */
        int64_t choices = (int64_t)(op_dim(c, "rows") * op_attr(c, "k")), places = (int64_t)op_dim(c, "places");
        for (int64_t i = 0, n = tensor_elems(host); i < n; i++)
            ((int32_t *)host->data)[i] = -1;
        for (int64_t i = 0; i < places && choices > 0; i++)
            if (i % 7 != 3)
                ((int32_t *)host->data)[inverse ? i * 11 % choices : i] = (int32_t)(inverse ? i : i * 11 % choices);
        return true;
    }
    if (!op_arg_is(c, arg, "x"))
        return false;
    int64_t cols = max_i64(host->dim[1], 1);
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++) {
        int64_t r = i / cols, k = i % cols;
        int order = (int)((r * 7 + k / 32 * 5) % 61) - 30;
        bool zero = (r / 2 + k / 64) % 9 == 8 || rng_below(key + 1, (uint64_t)i, 16) == 0;
        tensor_set(host, i, zero ? 0 : (double)(float)ldexp(rng_normal(key, (uint64_t)i), order));
    }
    return true;
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(quantise, a, c);
    double n = (double)(c->t[op_arg_index(c->desc, "src")].rank > 0 ? op_dim(c, "places") : (double)a->x.dim[0]) *
               (double)a->x.dim[1];
    *out = (struct op_cost){
        .flops = 4 * n,
        .bytes = n * (double)(dtype_bytes(a->x.dtype) + (present(&a->q) ? 1 : 0) + (present(&a->t) ? 1 : 0))};
}

/* only=1: q alone; only=2: t alone. */
static const struct op_sample samples[] = {
    {"rows=5 cols=33"},
    {"rows=1 cols=1"},
    {"rows=0 cols=16"},
    {"rows=16 cols=0"},
    {"rows=130 cols=129 only=1"},
    {"rows=129 cols=257 only=2"},
    {"rows=7 cols=300 block=32 strided=1"},
    {"rows=128 cols=128"},
    {"rows=256 cols=384 e5m2=1"},
    {"rows=144 cols=272"},
    {"rows=144 cols=272 only=1"},
    {"rows=16 cols=160 only=2"},
    {"rows=272 cols=144 square=1"},
    {"rows=272 cols=144 square=1 wide_x=1"},
    {"rows=256 cols=128 wide_x=1"},
    {"rows=33 cols=200 square=1 e5m2=1 strided=1"},
    {"rows=96 cols=64 block=32"},
    {"rows=70 cols=90 block=32 square=1"},
    {"rows=129 cols=300 block=0"},
    {"rows=256 cols=144 block=0 e5m2=1"},
    {"rows=256 cols=144 block=0 only=1 wide_x=1"},
    {"rows=128 cols=272 strided=1"},
    {"rows=9 cols=33 places=21 k=3"},
    {"rows=40 cols=264 places=160 k=2"}, /* a row of x is fetched twice for the same choice */
    {"rows=40 cols=264 places=80 k=2"},
    {"rows=35 cols=136 places=140 k=4 only=1"},
    {"rows=145 cols=144 places=290 k=2 only=1 e5m2=1 strided=1"},
    {"rows=40 cols=144 places=272 k=8 only=1 e5m2=1"},
    {"rows=33 cols=136 places=144 k=4 only=2 strided=1"},
    {"rows=10 cols=64 places=30 k=3 block=32"},
};
static const struct op_sample bench[] = {
    {"rows=4096 cols=320"},
    {"rows=16384 cols=2048 gpu=1"},
    {"rows=16384 cols=2048 only=1 gpu=1"},
    {"rows=16384 cols=11264 gpu=1"},
    {"rows=11264 cols=2048 square=1 wide_x=1 gpu=1"},
    {"rows=16384 cols=2048 block=0 gpu=1"},
    {"rows=16384 cols=2048 places=131072 k=8 only=1 gpu=1"},
    {"rows=16384 cols=2048 places=131072 k=8 gpu=1"},
};

OP_TABLES_WITH(quantise, QUANTISE_FIELDS, ,
               OP_ATTR_EXTRA("e5m2", 0) OP_ATTR_EXTRA("only", 0) OP_ATTR_EXTRA("wide_x", 0));
const struct op_desc quantise_desc = {
    OP_IS(quantise),
    .summary = "FP8 codes and scales by blocks, also of the transpose",
    OP_LIST(dims, dims),
    .sample_shapes = shapes,
    .infer = infer,
    .sample_fill = fill,
    .cost = cost,
    .tolerance = 0,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
