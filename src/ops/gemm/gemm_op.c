/* gemm: argument checks, cost, descriptor, test samples and bench shapes; see gemm.h. */
#include "ops/check.h"
#include "ops/gemm/gemm.h"
#include "ops/opdesc.h"
#include "ops/ops.h"

static int check_stride(const char *name, const struct tensor *t, struct err *e)
{
    if (t->dim[0] <= 1 || t->stride[0] >= t->dim[1])
        return ST_OK;
    return err_set(e, ST_INVALID, "gemm: rows of %s overlap: stride %lld for %lld columns", name,
                   (long long)t->stride[0], (long long)t->dim[1]);
}

int gemm_check(const struct gemm_args *a, struct err *e)
{
    /* The first of a and b with a real type says what real is: c may be wider. */
    bool known = a->a.dtype == DT_BF16 || a->a.dtype == DT_F32 || a->a.dtype == DT_F64;
    enum dtype real = known ? a->a.dtype : a->b.dtype, out = a->c.dtype == wide_of(real) ? wide_of(real) : real;
    CHECK_T("gemm", "c", &a->c, out, 2, -1, -1);
    int64_t m = a->c.dim[0], n = a->c.dim[1];
    CHECK_T("gemm", "a", &a->a, real, 2, a->trans_a ? -1 : m, a->trans_a ? m : -1);
    int64_t k = a->a.dim[a->trans_a ? 0 : 1];
    CHECK_T("gemm", "b", &a->b, real, 2, a->trans_b ? n : k, a->trans_b ? k : n);
    CHECK_OPT("gemm", "bias", &a->bias, wide_of(real), 1, n);
    TRY(check_stride("a", &a->a, e));
    TRY(check_stride("b", &a->b, e));
    return check_stride("c", &a->c, e);
}

/* ---- descriptor ------------------------------------------------------------------------------ */

static const struct op_dim dims[] = {{"m", 5}, {"n", 33}, {"k", 17}};

static void shapes(struct op_call *c)
{
    int64_t m = (int64_t)c->dim[0], n = (int64_t)c->dim[1], k = (int64_t)c->dim[2];
    bool ta = op_attr(c, "trans_a") != 0, tb = op_attr(c, "trans_b") != 0;
    c->t[op_arg_index(c->desc, "a")] = tensor_2d(NULL, DT_NONE, ta ? k : m, ta ? m : k);
    c->t[op_arg_index(c->desc, "b")] = tensor_2d(NULL, DT_NONE, tb ? n : k, tb ? k : n);
}

/* Which sizes meet depends on trans_a and trans_b; wide_c asks for a wide result. */
static int infer(struct op_call *c, const struct ops *ops, struct err *e)
{
    (void)ops;
    const struct tensor *a = &c->t[op_arg_index(c->desc, "a")], *b = &c->t[op_arg_index(c->desc, "b")];
    if (a->rank != 2 || b->rank != 2)
        return err_set(e, ST_INVALID, "gemm: a has rank %d and b rank %d, expected 2", a->rank, b->rank);
    c->t[op_arg_index(c->desc, "c")] =
        tensor_2d(NULL, op_attr(c, "wide_c") != 0 ? wide_of(a->dtype) : a->dtype, a->dim[op_attr(c, "trans_a") != 0],
                  b->dim[op_attr(c, "trans_b") == 0]);
    return ST_OK;
}

static void cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gemm, a, c);
    double k = (double)a->a.dim[a->trans_a ? 0 : 1], size = (double)dtype_bytes(a->a.dtype);
    double c_elems = (double)tensor_elems(&a->c);
    *out = (struct op_cost){
        .flops = 2 * c_elems * k,
        .bytes = size * ((double)tensor_elems(&a->a) + (double)tensor_elems(&a->b) + (a->acc_c ? 2 : 1) * c_elems)};
}

static const struct op_sample samples[] = {
    {"m=5 n=33 k=17"},
    {"m=1 n=1 k=1 no_bias=1"},
    {"m=0 n=7 k=3"},
    {"m=7 n=0 k=3"},
    {"m=7 n=9 k=0"},
    {"m=7 n=9 k=0 no_bias=1"},
    {"m=7 n=9 k=0 no_bias=1 acc_c=1"},
    {"m=6 n=5 k=4 alpha=0 acc_c=1"},
    {"m=65 n=129 k=33 trans_b=1"},
    {"m=33 n=20 k=70 trans_a=1 acc_c=1 no_bias=1"},
    {"m=17 n=19 k=23 trans_a=1 trans_b=1 alpha=0.5 acc_c=1"},
    {"m=1 n=65 k=40 trans_b=1 no_bias=1"},
    {"m=64 n=1 k=31 no_bias=1 acc_c=1"},
    {"m=9 n=11 k=13 strided=1"},
    {"m=9 n=11 k=13 trans_a=1 trans_b=1 acc_c=1 strided=1"},
    {"m=130 n=67 k=257 no_bias=1 trans_b=1 strided=1"},
    /* Large enough for sgemm_cpu.c: tails of rows, columns and depth, one and two blocks of depth. */
    {"m=203 n=127 k=389 trans_b=1"},
    {"m=72 n=136 k=200 trans_a=1 acc_c=1 wide_c=1 no_bias=1"},
    {"m=65 n=8 k=64 trans_b=1 wide_c=1"},
    {"m=203 n=160 k=70 no_bias=1 strided=1"},
    {"m=70 n=96 k=770 trans_a=1 no_bias=1 alpha=0.5 acc_c=1 strided=1"},
    {"m=77 n=125 k=385 trans_a=1 trans_b=1 acc_c=1"},
};
/* Linear layers of a small model forward, by input and by weight; then a large one. */
static const struct op_sample bench[] = {
    {"m=4096 n=960 k=320 trans_b=1 no_bias=1"},
    {"m=4096 n=320 k=960 no_bias=1"},
    {"m=960 n=320 k=4096 trans_a=1 acc_c=1 no_bias=1"},
    {"m=4096 n=320 k=864 trans_b=1"},
    {"m=4096 n=864 k=320 no_bias=1"},
    {"m=320 n=864 k=4096 trans_a=1 acc_c=1 no_bias=1"},
    {"m=2048 n=2048 k=2048 trans_b=1 no_bias=1"},
};

OP_TABLES_WITH(gemm, GEMM_FIELDS, , OP_ATTR_EXTRA("wide_c", 0));
const struct op_desc gemm_desc = {
    OP_IS(gemm),           .summary = "c (+)= alpha op(a) op(b), plus bias",
    OP_LIST(dims, dims),   .sample_shapes = shapes,
    .infer = infer,        .cost = cost,
    .tolerance = 1e-5,     OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
