/* headmm: argument checks, cost, descriptors, test samples and bench shapes; see headmm.h. */
#include "ops/check.h"
#include "ops/headmm/headmm.h"
#include "ops/opshape.h"

#include <string.h>

/* The widths of x and y are those of w, which of them depends on trans. */
static int check_widths(const char *op, const struct tensor *w, int64_t in, int64_t out, bool trans, struct err *e)
{
    if (w->dim[trans ? 2 : 1] == in && w->dim[trans ? 1 : 2] == out)
        return ST_OK;
    return err_set(e, ST_INVALID, "%s: w of %lld x %lld cannot map %lld to %lld channels%s", op, (long long)w->dim[1],
                   (long long)w->dim[2], (long long)in, (long long)out, trans ? " (trans)" : "");
}

int headmm_fwd_check(const struct headmm_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&headmm_fwd_desc, a, e));
    return check_widths("headmm_fwd", &a->w, a->x.dim[2], a->y.dim[2], a->trans, e);
}

int headmm_bwd_check(const struct headmm_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&headmm_bwd_desc, a, e));
    return check_widths("headmm_bwd", &a->w, a->x.dim[2], a->dy.dim[2], a->trans, e);
}

OP_CHECK(headmm_dw)

enum { D_T, D_H, D_X, D_Y, D_ROWS, D_COLS };
static const struct op_dim dims[] = {{"t", 5}, {"h", 3}, {"xw", 6}, {"yw", 4}, {"wr", 0}, {"wc", 0}};
static const struct op_dim dw_dims[] = {{"t", 5}, {"h", 3}, {"xw", 6}, {"yw", 4}, {"x2w", 5}};

static void sides_of_w(struct op_call *c)
{
    bool trans = op_attr(c, "trans") != 0;
    c->dim[D_ROWS] = c->dim[trans ? D_Y : D_X];
    c->dim[D_COLS] = c->dim[trans ? D_X : D_Y];
}

static bool width_of_y(const void *args, const char *name, int64_t *out)
{
    const struct headmm_fwd_args *a = args;
    if (strcmp(name, "yw") != 0 || a->w.rank != 3)
        return false;
    *out = a->w.dim[a->trans ? 1 : 2];
    return true;
}

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(headmm_fwd, a, c);
    *out = (struct op_cost){.flops = 2.0 * (double)tensor_elems(&a->w) * (double)a->x.dim[0], .bytes = op_bytes(c)};
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(headmm_bwd, a, c);
    *out = (struct op_cost){.flops = 4.0 * (double)tensor_elems(&a->w) * (double)a->x.dim[0], .bytes = op_bytes(c)};
}

static void dw_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(headmm_dw, a, c);
    *out = (struct op_cost){.flops = 2.0 * (double)tensor_elems(&a->dw) * (double)a->x.dim[0], .bytes = op_bytes(c)};
}

static const struct op_sample dw_samples[] = {{"t=5"},
                                              {"t=1 h=1 xw=1 yw=1 x2w=1 acc_dw=1"},
                                              {"t=0 h=2"},
                                              {"t=33 h=5 xw=16 yw=24 x2w=9 strided=1 acc_dw=1"},
                                              {"t=70 h=4 xw=64 yw=80 x2w=128"}};
static const struct op_sample dw_bench[] = {{"t=1024 h=8 xw=64 yw=128 x2w=64"},
                                            {"t=8192 h=128 xw=128 yw=512 x2w=128 gpu=1"}};
static const struct op_sample samples[] = {{"t=5"},
                                           {"t=5 trans=1 acc_dw=1"},
                                           {"t=1 h=1 xw=1 yw=1"},
                                           {"t=0 h=2"},
                                           {"t=0 h=2 acc_dw=1"},
                                           {"t=33 h=5 xw=16 yw=24 strided=1"},
                                           {"t=33 h=5 xw=24 yw=16 trans=1 strided=1 acc_dw=1"},
                                           {"t=70 h=4 xw=128 yw=80"},
                                           {"t=6 h=2 xw=8 yw=8 no_dw=1"},
                                           {"t=6 h=2 xw=8 yw=8 no_dx=1 trans=1"}};
enum { BACKWARD_ONLY = 2 }; /* gradcheck wants every gradient of an input that is there */
static const struct op_sample bench[] = {
    {"t=1024 h=8 xw=64 yw=128"}, {"t=8192 h=128 xw=128 yw=512 gpu=1"}, {"t=8192 h=128 xw=512 yw=128 trans=1 gpu=1"}};

OP_TABLES(headmm_fwd, HEADMM_FWD_FIELDS);
const struct op_desc headmm_fwd_desc = {
    OP_IS(headmm_fwd),        .summary = "a linear map of its own for each head",
    OP_LIST(dims, dims),      .sample_dims = sides_of_w,
    .number = width_of_y,     .cost = fwd_cost,
    .backward = "headmm_bwd", .tolerance = 2e-6,
    .samples = samples,       .n_samples = countof(samples) - BACKWARD_ONLY,
    OP_LIST(bench, bench),
};
OP_TABLES(headmm_bwd, HEADMM_BWD_FIELDS);
const struct op_desc headmm_bwd_desc = {
    OP_IS(headmm_bwd),         .summary = "gradient of headmm_fwd",
    OP_LIST(dims, dims),       .sample_dims = sides_of_w,
    .cost = bwd_cost,          .tolerance = 5e-6,
    OP_LIST(samples, samples), OP_LIST(bench, bench),
};
OP_TABLES(headmm_dw, HEADMM_DW_FIELDS);
const struct op_desc headmm_dw_desc = {
    OP_IS(headmm_dw),         .summary = "gradient of weights whose rows two maps of each head share",
    OP_LIST(dims, dw_dims),   .cost = dw_cost,
    .tolerance = 5e-6,        OP_LIST(samples, dw_samples),
    OP_LIST(bench, dw_bench),
};
