/* gmm: argument checks, cost, descriptors, test samples and bench shapes; see gmm.h. */
#include "ops/check.h"
#include "ops/gmm/gmm.h"
#include "ops/gmm/gmm_int.h"
#include "ops/opshape.h"

OP_CHECK(gmm_fwd)

int gmm_bwd_check(const struct gmm_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&gmm_bwd_desc, a, e));
    return a->offset.dim[0] > 1 ? ST_OK
                                : err_set(e, ST_INVALID, "gmm_bwd: offset needs an entry for each expert and one more");
}

int gmm_offset_check(const char *op, const struct tensor *offset, int64_t rows, struct err *e)
{
    const int32_t *at = offset->data;
    int64_t n = offset->dim[0] - 1;
    bool good = at[0] == 0 && at[n] <= rows;
    for (int64_t x = 0; x < n && good; x++)
        good = at[x] <= at[x + 1];
    return good ? ST_OK
                : err_set(e, ST_INVALID, "%s: offsets must rise from 0 to at most %lld rows", op, (long long)rows);
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 11},   {"in", 9},   {"out", 13},
                                     {"experts", 3}, {"tail", 0}, {"balanced", 0}};

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    if (c->desc->args[arg].type == ARG_I32)
        op_fill_ranges(host, (int64_t)(op_dim(c, "rows") - op_dim(c, "tail")), op_dim(c, "balanced") != 0, key);
    return c->desc->args[arg].type == ARG_I32;
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gmm_fwd, a, c);
    double rows = c->dim[0], in = c->dim[1], width = c->dim[2], size = (double)dtype_bytes(a->x.dtype);
    *out = (struct op_cost){.flops = 2 * rows * in * width,
                            .bytes = size * (rows * (in + width) + c->dim[3] * in * width)};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(gmm_bwd, a, c);
    double rows = c->dim[0], in = c->dim[1], width = c->dim[2], weights = c->dim[3] * in * width,
           size = (double)dtype_bytes(a->dy.dtype), wide = (double)dtype_bytes(wide_of(a->dy.dtype));
    double dx = a->dx.rank > 0, dw = a->dw.rank > 0, passes = a->acc_dw != 0 ? 2 : 1;
    *out = (struct op_cost){.flops = 2 * rows * in * width * (dx + dw),
                            .bytes = (dx + dw) * size * rows * (in + width) + dx * size * weights +
                                     dw * passes * wide * weights};
}

static const struct op_sample samples[] = {
    {"rows=11"},
    {"rows=0"},
    {"rows=1 experts=1 in=1 out=1"},
    {"rows=600 experts=2 in=5 out=7 no_prob=1 no_dprob=1"},
    {"rows=30 experts=7 tail=6 acc_dw=1 acc_dbias=1 acc_dprob=1"},
    {"rows=20 no_bias=1 no_prob=1 no_dprob=1 experts=5"},
    {"rows=6 experts=16 no_bias=1 no_prob=1 no_dprob=1 acc_dw=1 in=33"},
    {"rows=20 in=17 out=260 tail=20"},
    {"rows=1060 experts=1 in=9 out=300 no_prob=1 no_dprob=1"}, /* several pieces of rows and columns */
    {"rows=70 experts=2 in=550 out=10 tail=3"},
    /* Whole vectors, so the tensor cores of a GPU take them: inside, at and past the edges of its tiles. */
    {"rows=700 experts=3 in=72 out=264 tail=9"},
    {"rows=130 experts=1 in=64 out=256 no_prob=1 no_dprob=1 acc_dw=1"},
    {"rows=40 experts=9 in=200 out=136 acc_dw=1 acc_dbias=1 acc_dprob=1"},
    {"rows=0 in=16 out=24"},
    {"rows=40 experts=3 in=24 out=40 tail=40"},
    {"rows=300 experts=4 in=88 out=72 no_bias=1 no_prob=1 no_dprob=1"},
    /* Its large tiles, forward, by input and by weight; then several of them for each multiprocessor. */
    {"rows=500 experts=3 in=136 out=2056 gpu=1"},
    {"rows=500 experts=3 in=2056 out=136 tail=9 acc_dw=1 gpu=1"},
    {"rows=1100 experts=5 in=72 out=4104 no_dx=1 gpu=1"},
    {"rows=1100 experts=2 in=520 out=1032 acc_dw=1 no_dx=1 no_bias=1 no_prob=1 no_dprob=1 gpu=1"},
};
static const struct op_sample bench[] = {
    {"rows=8192 in=512 out=1024 experts=8 no_bias=1"},
    {"rows=4096 in=512 out=512 experts=64 no_bias=1"},
    {"rows=131072 in=2048 out=1024 experts=64 no_bias=1 no_prob=1 balanced=1 gpu=1"},
    {"rows=131072 in=1024 out=2048 experts=64 no_bias=1 no_prob=1 balanced=1 gpu=1"},
    {"rows=131072 in=2048 out=2048 experts=64 no_bias=1 no_prob=1 gpu=1"}};
static const struct op_sample bwd_bench[] = {
    {"rows=8192 in=512 out=1024 experts=8 no_bias=1"},
    {"rows=4096 in=512 out=512 experts=64 no_bias=1"},
    {"rows=131072 in=2048 out=1024 experts=64 no_bias=1 no_prob=1 balanced=1 no_dw=1 gpu=1"},
    {"rows=131072 in=1024 out=2048 experts=64 no_bias=1 no_prob=1 balanced=1 no_dw=1 gpu=1"},
    {"rows=131072 in=2048 out=1024 experts=64 no_bias=1 no_prob=1 balanced=1 no_dx=1 acc_dw=1 gpu=1"},
    {"rows=131072 in=1024 out=2048 experts=64 no_bias=1 no_prob=1 balanced=1 no_dx=1 acc_dw=1 gpu=1"},
    {"rows=131072 in=2048 out=2048 experts=64 no_bias=1 no_prob=1 no_dx=1 acc_dw=1 gpu=1"},
};

OP_TABLES(gmm_fwd, GMM_FWD_FIELDS);
const struct op_desc gmm_fwd_desc = {
    OP_IS(gmm_fwd),        .summary = "grouped linear: a weight matrix for each range of rows",
    .dims = dims,          .n_dims = countof(dims),
    .sample_fill = fill,   .cost = fwd_cost,
    .backward = "gmm_bwd", .tolerance = 2e-6,
    .samples = samples,    .n_samples = countof(samples),
    .bench = bench,        .n_bench = countof(bench),
};
OP_TABLES(gmm_bwd, GMM_BWD_FIELDS);
const struct op_desc gmm_bwd_desc = {
    OP_IS(gmm_bwd),
    .summary = "gradients of gmm_fwd",
    .dims = dims,
    .n_dims = countof(dims),
    .sample_fill = fill,
    .cost = bwd_cost,
    .tolerance = 3e-6,
    .samples = samples,
    .n_samples = countof(samples),
    .bench = bwd_bench,
    .n_bench = countof(bwd_bench),
};
