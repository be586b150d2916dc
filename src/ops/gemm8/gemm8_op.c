/* gemm8: argument checks, cost, descriptor, test samples and bench shapes; see gemm8.h. */
#include "ops/check.h"
#include "ops/gemm8/gemm8.h"
#include "ops/opdesc.h"
#include "ops/ops.h"
#include "ops/quantise/quantise.h"
#include "tensor/f8.h"

int gemm8_check(const struct gemm8_args *a, struct err *e)
{
    enum dtype wide = a->as.dtype, real = a->c.dtype;
    if (wide != DT_F32 && wide != DT_F64)
        return err_set(e, ST_INVALID, "gemm8: scales of type %s, expected F32 or F64", dtype_name(wide));
    if (a->a_square && a->b_square)
        return err_set(e, ST_INVALID, "gemm8: both operands have square blocks; one must have its scales by rows");
    TRY(f8_check("gemm8", "a", &a->a, &a->as, wide, a->block, a->a_square, e));
    TRY(f8_check("gemm8", "b", &a->b, &a->bs, wide, a->block, a->b_square, e));
    CHECK_T("gemm8", "b", &a->b, a->b.dtype, 2, -1, a->a.dim[1]);
    CHECK_T("gemm8", "c", &a->c, wide_of(real) == wide ? real : wide, 2, a->a.dim[0], a->b.dim[0]);
    CHECK_OPT("gemm8", "bias", &a->bias, wide, 1, a->c.dim[1]);
    if (a->c.dim[0] <= 1 || a->c.stride[0] >= a->c.dim[1])
        return ST_OK;
    return err_set(e, ST_INVALID, "gemm8: rows of c overlap: stride %lld for %lld columns", (long long)a->c.stride[0],
                   (long long)a->c.dim[1]);
}

/* ---- descriptor ------------------------------------------------------------------------------ */

static const struct op_dim dims[] = {{"m", 5}, {"n", 33}, {"k", 17}};

/* Types of codes and sizes of scales follow from attributes, which are set by now. */
static void shapes(struct op_call *c)
{
    int64_t m = (int64_t)c->dim[0], n = (int64_t)c->dim[1], k = (int64_t)c->dim[2],
            block = (int64_t)op_attr(c, "block");
    c->t[op_arg_index(c->desc, "a")] = tensor_2d(NULL, DT_NONE, m, k);
    c->t[op_arg_index(c->desc, "b")] = tensor_2d(NULL, DT_NONE, n, k);
    c->t[op_arg_index(c->desc, "as")] = f8_scales(DT_NONE, m, k, block, op_attr(c, "a_square") != 0);
    c->t[op_arg_index(c->desc, "bs")] = f8_scales(DT_NONE, n, k, block, op_attr(c, "b_square") != 0);
}

static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    struct tensor *a = &c->t[op_arg_index(c->desc, "a")];
    const struct tensor *b = &c->t[op_arg_index(c->desc, "b")];
    if (a->rank != 2 || b->rank != 2)
        return err_set(e, ST_INVALID, "gemm8: a has rank %d and b rank %d, expected 2", a->rank, b->rank);
    if (op_attr(c, "a_e5m2") != 0)
        a->dtype = DT_F8_E5M2;
    c->t[op_arg_index(c->desc, "c")] =
        tensor_2d(NULL, op_attr(c, "wide_c") != 0 ? wide_of(ops->real) : ops->real, a->dim[0], b->dim[0]);
    OP_UNPACK(gemm8, args, c);
    int64_t work = ops->gemm8_work != NULL ? ops->gemm8_work(args) : 0;
    if (work > 0)
        c->t[op_arg_index(c->desc, "work")] = tensor_1d(NULL, DT_U8, work);
    return ST_OK;
}

/* Codes of values round 1, scales that are powers of two. */
static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    bool scale = op_arg_is(c, arg, "as") || op_arg_is(c, arg, "bs");
    if (!scale && !dtype_is_f8(host->dtype))
        return false;
    for (int64_t i = 0, n = tensor_elems(host); i < n; i++)
        tensor_set(host, i,
                   scale ? ldexp(1, (int)rng_below(key, (uint64_t)i, 5) - 2) : 2 * rng_normal(key, (uint64_t)i));
    return true;
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gemm8, a, c);
    double elems = (double)tensor_elems(&a->c);
    *out = (struct op_cost){.flops = 2 * elems * (double)a->a.dim[1],
                            .bytes = (double)tensor_elems(&a->a) + (double)tensor_elems(&a->b) +
                                     (a->acc_c ? 2 : 1) * elems * (double)dtype_bytes(a->c.dtype)};
}

static const struct op_sample samples[] = {
    {"m=5 n=33 k=17"},
    {"m=1 n=1 k=1 no_bias=1"},
    {"m=0 n=7 k=3"},
    {"m=7 n=0 k=3"},
    {"m=7 n=9 k=0"},
    {"m=7 n=9 k=0 no_bias=1 acc_c=1"},
    {"m=64 n=128 k=256 b_square=1 no_bias=1"},
    {"m=130 n=144 k=272 b_square=1"},
    {"m=128 n=256 k=384 no_bias=1 acc_c=1 wide_c=1"},
    {"m=144 n=80 k=208 wide_c=1 acc_c=1 a_e5m2=1"},
    {"m=66 n=70 k=130 a_square=1 strided=1"},
    {"m=33 n=65 k=96 block=32"},
    {"m=20 n=48 k=300 block=0 a_e5m2=1"},
    {"m=128 n=128 k=128 block=0 no_bias=1"},
};
static const struct op_sample bench[] = {
    {"m=4096 n=960 k=320 b_square=1 no_bias=1"},
    {"m=16384 n=6144 k=2048 b_square=1 no_bias=1 gpu=1"},
    {"m=16384 n=2048 k=2048 b_square=1 no_bias=1 gpu=1"},
    {"m=16384 n=11264 k=2048 b_square=1 no_bias=1 gpu=1"},
    {"m=16384 n=2048 k=5632 b_square=1 no_bias=1 gpu=1"},
    {"m=16384 n=2048 k=11264 b_square=1 no_bias=1 gpu=1"},
    {"m=11264 n=2048 k=16384 acc_c=1 wide_c=1 no_bias=1 gpu=1"},
    {"m=2048 n=5632 k=16384 acc_c=1 wide_c=1 no_bias=1 gpu=1"},
    {"m=16384 n=11264 k=2048 block=0 no_bias=1 gpu=1"},
};

OP_TABLES_WITH(gemm8, GEMM8_FIELDS, , OP_ATTR_EXTRA("a_e5m2", 0) OP_ATTR_EXTRA("wide_c", 0));
const struct op_desc gemm8_desc = {
    OP_IS(gemm8),
    .summary = "c (+)= a b^T of FP8 codes with scales by blocks, plus bias",
    OP_LIST(dims, dims),
    .sample_shapes = shapes,
    .infer = infer,
    .sample_fill = fill,
    .cost = cost,
    .tolerance = 3e-5, /* tensor cores keep about 14 bits of the sum of 128 products */
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
