/* gmm8: argument checks, the composition on hosts, cost, descriptors, test samples and bench shapes; see gmm8.h. */
#include "ops/gmm8/gmm8_int.h"
#include "ops/opshape.h"

#include <math.h>
#include <string.h>

int gmm8_operands_check(const char *op, const struct tensor *x, const struct tensor *xs, const struct tensor *w,
                        const struct tensor *ws, const struct tensor *offset, enum dtype wide, int64_t block,
                        bool square, bool turned, struct err *e)
{
    if (wide != DT_F32 && wide != DT_F64)
        return err_set(e, ST_INVALID, "%s: scales of type %s, expected F32 or F64", op, dtype_name(wide));
    CHECK_T(op, "offset", offset, DT_I32, 1, -1);
    int64_t experts = offset->dim[0] - 1;
    if (experts < 1)
        return err_set(e, ST_INVALID, "%s: offset needs an entry for each expert and one more", op);
    TRY(f8_check(op, "x", x, xs, wide, block, false, e));
    TRY(f8_check(op, "w", w, ws, wide, block, square, e));
    if (present(w) && w->dtype != DT_F8_E4M3)
        return err_set(e, ST_INVALID, "%s: w has type %s, expected F8_E4M3", op, dtype_name(w->dtype));
    int64_t k = x->dim[1], want = turned ? experts * k : k;
    if (w->dim[1] != want || (!turned && w->dim[0] % experts != 0))
        return err_set(e, ST_INVALID, "%s: w is [%lld, %lld], which are not %lld matrices of %lld columns%s", op,
                       (long long)w->dim[0], (long long)w->dim[1], (long long)experts, (long long)k,
                       turned ? ", turned" : "");
    return ST_OK;
}

int gmm8_check(const struct gmm8_args *a, struct err *e)
{
    enum dtype wide = a->xs.dtype;
    TRY(gmm8_operands_check("gmm8", &a->x, &a->xs, &a->w, &a->ws, &a->offset, wide, a->block, a->square, a->turned, e));
    int64_t experts = a->offset.dim[0] - 1, n = gmm8_rows(&a->w, &a->offset, a->turned);
    CHECK_T("gmm8", "y", &a->y, wide_of(a->y.dtype) == wide ? a->y.dtype : wide, 2, a->x.dim[0], n);
    CHECK_OPT("gmm8", "bias", &a->bias, wide, 2, experts, n);
    CHECK_OPT("gmm8", "prob", &a->prob, wide, 1, a->x.dim[0]);
    return present(&a->bias) ? check_dense("gmm8", "bias", &a->bias, e) : ST_OK;
}

int gmm8_dw_check(const struct gmm8_dw_args *a, struct err *e)
{
    enum dtype wide = a->dyts.dtype;
    if (wide != DT_F32 && wide != DT_F64)
        return err_set(e, ST_INVALID, "gmm8_dw: scales of type %s, expected F32 or F64", dtype_name(wide));
    CHECK_T("gmm8_dw", "offset", &a->offset, DT_I32, 1, -1);
    if (a->offset.dim[0] < 2)
        return err_set(e, ST_INVALID, "gmm8_dw: offset needs an entry for each expert and one more");
    TRY(f8_check("gmm8_dw", "dyt", &a->dyt, &a->dyts, wide, a->block, false, e));
    TRY(f8_check("gmm8_dw", "xt", &a->xt, &a->xts, wide, a->block, false, e));
    CHECK_T("gmm8_dw", "xt", &a->xt, DT_F8_E4M3, 2, -1, a->dyt.dim[1]);
    CHECK_T("gmm8_dw", "dw", &a->dw, wide, 3, a->offset.dim[0] - 1, a->dyt.dim[0], a->xt.dim[0]);
    return check_dense("gmm8_dw", "dw", &a->dw, e);
}

/* ---- the composition ------------------------------------------------------------------------- */

int64_t gmm8_work_by(const struct gmm8_args *a, enum dtype wide)
{
    return gmm8_values_bytes(tensor_elems(&a->x), tensor_elems(&a->w), wide);
}
int64_t gmm8_dw_work_by(const struct gmm8_dw_args *a, enum dtype wide)
{
    return gmm8_values_bytes(tensor_elems(&a->dyt), tensor_elems(&a->xt), wide);
}

int gmm8_by(const struct gmm8_parts *p, struct lane *l, const struct gmm8_args *a)
{
    TRY(gmm8_check(a, l->err));
    TRY(check_work("gmm8", &a->work, gmm8_work_by(a, p->real), l->err));
    int64_t rows = a->x.dim[0], k = a->x.dim[1], experts = a->offset.dim[0] - 1,
            n = gmm8_rows(&a->w, &a->offset, a->turned);
    struct tensor none = tensor_1d(a->offset.data, p->real, 0); /* of what has no elements */
    struct tensor x = tensor_2d(a->work.data != NULL ? a->work.data : none.data, p->real, rows, k);
    struct tensor w = tensor_3d(a->work.data != NULL ? gmm8_second(a->work.data, rows * k, p->real) : none.data,
                                p->real, experts, n, k);
    p->decode(&a->x, &a->xs, a->block, false, false, 1, x.data);
    p->decode(&a->w, &a->ws, a->block, a->square, false, a->turned ? experts : 1, w.data);
    return p->gmm_fwd(
        l, &(struct gmm_fwd_args){.x = x, .w = w, .bias = a->bias, .prob = a->prob, .offset = a->offset, .y = a->y});
}

int gmm8_dw_by(const struct gmm8_parts *p, struct lane *l, const struct gmm8_dw_args *a)
{
    TRY(gmm8_dw_check(a, l->err));
    TRY(check_work("gmm8_dw", &a->work, gmm8_dw_work_by(a, p->real), l->err));
    int64_t rows = a->dyt.dim[1], out = a->dyt.dim[0], in = a->xt.dim[0];
    void *first = a->work.data != NULL ? a->work.data : a->offset.data,
         *second = a->work.data != NULL ? gmm8_second(first, rows * out, p->real) : a->offset.data;
    struct tensor dy = tensor_2d(first, p->real, rows, out), x = tensor_2d(second, p->real, rows, in);
    p->decode(&a->dyt, &a->dyts, a->block, false, true, 1, dy.data);
    p->decode(&a->xt, &a->xts, a->block, false, true, 1, x.data);
    return p->gmm_bwd(l,
                      &(struct gmm_bwd_args){.dy = dy, .x = x, .offset = a->offset, .dw = a->dw, .acc_dw = a->acc_dw});
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 11}, {"in", 9}, {"out", 13}, {"experts", 3}, {"tail", 0}};

static int64_t dim(const struct op_call *c, int i) { return (int64_t)c->dim[i]; }
static struct tensor *arg(struct op_call *c, const char *name) { return &c->t[op_arg_index(c->desc, name)]; }

static void shapes(struct op_call *c)
{
    int64_t rows = dim(c, 0), in = dim(c, 1), out = dim(c, 2), experts = dim(c, 3),
            block = (int64_t)op_attr(c, "block");
    bool square = op_attr(c, "square") != 0, turned = op_attr(c, "turned") != 0;
    int64_t w_rows = turned ? out : experts * out, w_cols = turned ? experts * in : in;
    *arg(c, "x") = tensor_2d(NULL, DT_NONE, rows, in);
    *arg(c, "xs") = f8_scales(DT_NONE, rows, in, block, false);
    *arg(c, "w") = tensor_2d(NULL, DT_NONE, w_rows, w_cols);
    *arg(c, "ws") = f8_scales(DT_NONE, w_rows, w_cols, block, square);
    *arg(c, "offset") = tensor_1d(NULL, DT_NONE, experts + 1);
    *arg(c, "bias") = tensor_2d(NULL, DT_NONE, experts, out);
    *arg(c, "prob") = tensor_1d(NULL, DT_NONE, rows);
}
static void dw_shapes(struct op_call *c)
{
    int64_t rows = dim(c, 0), in = dim(c, 1), out = dim(c, 2), block = (int64_t)op_attr(c, "block");
    *arg(c, "dyt") = tensor_2d(NULL, DT_NONE, out, rows);
    *arg(c, "dyts") = f8_scales(DT_NONE, out, rows, block, false);
    *arg(c, "xt") = tensor_2d(NULL, DT_NONE, in, rows);
    *arg(c, "xts") = f8_scales(DT_NONE, in, rows, block, false);
    *arg(c, "offset") = tensor_1d(NULL, DT_NONE, dim(c, 3) + 1);
}

static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *x = arg(c, "x"), *w = arg(c, "w"), *offset = arg(c, "offset");
    if (x->rank != 2 || w->rank != 2 || offset->rank != 1 || offset->dim[0] < 2)
        return err_set(e, ST_INVALID, "gmm8: x and w must have rank 2, offset rank 1 with two entries or more");
    if (op_attr(c, "e5m2") != 0)
        arg(c, "x")->dtype = DT_F8_E5M2;
    *arg(c, "y") = tensor_2d(NULL, ops->real, x->dim[0], gmm8_rows(w, offset, op_attr(c, "turned") != 0));
    return ST_OK;
}
static int dw_infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    const struct tensor *dyt = arg(c, "dyt"), *xt = arg(c, "xt"), *offset = arg(c, "offset");
    if (dyt->rank != 2 || xt->rank != 2 || offset->rank != 1 || offset->dim[0] < 2)
        return err_set(e, ST_INVALID, "gmm8_dw: dyt and xt must have rank 2, offset rank 1 with two entries or more");
    if (op_attr(c, "e5m2") != 0)
        arg(c, "dyt")->dtype = DT_F8_E5M2;
    *arg(c, "dw") = tensor_3d(NULL, wide_of(ops->real), offset->dim[0] - 1, dyt->dim[0], xt->dim[0]);
    return ST_OK;
}

/* Codes of values round 1, scales that are powers of two. */
static bool fill(struct op_call *c, int which, struct tensor *host, uint64_t key)
{
    const char *name = c->desc->args[which].name;
    size_t n = strlen(name);
    bool scale = host->rank == 1 && n > 1 && name[n - 1] == 's', codes = dtype_is_f8(host->dtype);
    if (op_arg_is(c, which, "offset"))
        op_fill_ranges(host, dim(c, 0) - dim(c, 4), false, key);
    for (int64_t i = 0, all = tensor_elems(host); (scale || codes) && i < all; i++)
        tensor_set(host, i,
                   scale ? ldexp(1, (int)rng_below(key, (uint64_t)i, 5) - 2) : 2 * rng_normal(key, (uint64_t)i));
    return scale || codes || op_arg_is(c, which, "offset");
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gmm8, a, c);
    double elems = (double)tensor_elems(&a->y);
    *out = (struct op_cost){.flops = 2 * elems * (double)a->x.dim[1],
                            .bytes = (double)tensor_elems(&a->x) + (double)tensor_elems(&a->w) +
                                     elems * (double)dtype_bytes(a->y.dtype)};
}
static void dw_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gmm8_dw, a, c);
    *out = (struct op_cost){.flops = 2 * (double)tensor_elems(&a->dyt) * (double)a->xt.dim[0],
                            .bytes = (double)tensor_elems(&a->dyt) + (double)tensor_elems(&a->xt) +
                                     (a->acc_dw ? 2 : 1) * (double)tensor_bytes(&a->dw)};
}

static const struct op_sample samples[] = {
    {"rows=11"},
    {"rows=0"},
    {"rows=1 experts=1 in=1 out=1 no_bias=1"},
    {"rows=30 experts=7 tail=6 block=32 square=0"},
    {"rows=20 experts=5 in=17 out=260 block=0 square=0 e5m2=1 no_prob=1"},
    {"rows=40 experts=3 in=140 out=70 turned=1 tail=40"},
    /* Sizes of the fast kernel: inside, at and past the edges of tiles. */
    {"rows=144 experts=1 in=128 out=256 no_bias=1"},
    {"rows=37 experts=3 in=128 out=128 tail=1"},
    {"rows=272 experts=5 in=256 out=128 tail=9"},
    {"rows=304 experts=4 in=384 out=384 turned=1 no_prob=1"},
    {"rows=192 experts=3 in=128 out=384 turned=1 e5m2=1 no_bias=1"},
    {"rows=144 experts=2 in=256 out=256 block=0 square=0 no_bias=1"},
    {"rows=48 experts=9 in=128 out=128 no_bias=1 tail=48"},
    {"rows=784 experts=5 in=640 out=640 no_bias=1 gpu=1"},
    {"rows=624 experts=70 in=256 out=1152 turned=1 e5m2=1 tail=16 gpu=1"},
};
static const struct op_sample dw_samples[] = {
    {"rows=11"},
    {"rows=0 acc_dw=1"},
    {"rows=30 experts=7 tail=6 block=32 acc_dw=1"},
    {"rows=300 experts=2 in=33 out=20 block=0 e5m2=1"},
    {"rows=144 experts=1 in=256 out=128"},
    {"rows=288 experts=5 in=128 out=256 tail=9 acc_dw=1"},
    {"rows=192 experts=4 in=384 out=128 e5m2=1"},
    {"rows=272 experts=9 in=128 out=128 block=0 acc_dw=1"},
    {"rows=48 experts=3 in=128 out=128 tail=48"},
    {"rows=912 experts=7 in=384 out=640 tail=3 acc_dw=1 gpu=1"},
    {"rows=624 experts=70 in=256 out=384 e5m2=1 gpu=1"},
};
static const struct op_sample bench[] = {
    {"rows=2048 in=256 out=512 experts=4 no_bias=1"},
    {"rows=131072 in=1024 out=2048 experts=64 no_bias=1 no_prob=1 gpu=1"},
    {"rows=131072 in=2048 out=2048 experts=64 turned=1 no_bias=1 no_prob=1 gpu=1"},
    {"rows=131072 in=1536 out=2048 experts=128 turned=1 no_bias=1 no_prob=1 gpu=1"},
    {"rows=32768 in=4096 out=7168 experts=4 turned=1 no_bias=1 no_prob=1 gpu=1"},
};
static const struct op_sample dw_bench[] = {
    {"rows=2048 in=256 out=512 experts=4"},
    {"rows=131072 in=2048 out=2048 experts=64 gpu=1"},
    {"rows=131072 in=1024 out=2048 experts=64 gpu=1"},
    {"rows=131072 in=2048 out=1536 experts=128 gpu=1"},
    {"rows=32768 in=7168 out=4096 experts=4 gpu=1"},
};

OP_TABLES_WITH(gmm8, GMM8_FIELDS, , OP_ATTR_EXTRA("e5m2", 0));
const struct op_desc gmm8_desc = {
    OP_IS(gmm8),
    .summary = "grouped linear of FP8 codes with scales by blocks",
    OP_LIST(dims, dims),
    .sample_shapes = shapes,
    .infer = infer,
    .sample_fill = fill,
    .cost = cost,
    .tolerance = 3e-5, /* tensor cores keep about 14 bits of the sum of 128 products */
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
OP_TABLES_WITH(gmm8_dw, GMM8_DW_FIELDS, , OP_ATTR_EXTRA("e5m2", 0));
const struct op_desc gmm8_dw_desc = {
    OP_IS(gmm8_dw),
    .summary = "weight gradients of grouped linear layers from FP8 codes",
    OP_LIST(dims, dims),
    .sample_shapes = dw_shapes,
    .infer = dw_infer,
    .sample_fill = fill,
    .cost = dw_cost,
    .tolerance = 3e-5,
    OP_LIST(samples, dw_samples),
    OP_LIST(bench, dw_bench),
};
