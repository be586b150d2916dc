/* addnorm: argument checks, cost, descriptors, test samples and bench shapes; see addnorm.h. */
#include "ops/check.h"
#include "ops/addnorm/addnorm.h"
#include "ops/dropout/dropout.h"
#include "ops/opshape.h"

/* The mask applies to tensors like `like`. */
static int drop_check(const char *op, const struct dropout_rule *r, const struct tensor *like, struct err *e)
{
    struct dropout_args d = {.x = *like, .y = *like, .rule = *r};
    int st = dropout_check(&d, e);
    return st != ST_OK ? (err_in(e, "%s", op), st) : ST_OK;
}

int addnorm_fwd_check(const struct addnorm_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&addnorm_fwd_desc, a, e));
    TRY(check_same_type("addnorm_fwd", "s", &a->s, "x", &a->x, e));
    return present(&a->f) ? drop_check("addnorm_fwd", &a->drop, &a->x, e) : ST_OK;
}

int addnorm_bwd_check(const struct addnorm_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&addnorm_bwd_desc, a, e));
    TRY(check_same_type("addnorm_bwd", "s", &a->s, "dx", &a->dx, e));
    TRY(check_same_type("addnorm_bwd", "ds", &a->ds, "dx", &a->dx, e));
    return present(&a->df) || present(&a->dbias) ? drop_check("addnorm_bwd", &a->drop, &a->dx, e) : ST_OK;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static const struct op_dim dims[] = {{"rows", 5}, {"d", 33}};

/* Step 3, the first sample's index beyond 32 bits. */
static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    const double info[] = {3, 4294967296.0 + 11, 40, 0};
    if (!op_arg_is(c, arg, "info"))
        return false;
    for (int i = 0; i < countof(info); i++)
        tensor_set(host, i, info[i]);
    return true;
}

static double bytes_of(const struct tensor *t) { return t->rank > 0 ? (double)tensor_bytes(t) : 0; }

static void fwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(addnorm_fwd, a, c);
    double n = (double)tensor_elems(&a->x);
    *out = (struct op_cost){.flops = 6 * n,
                            .bytes = bytes_of(&a->x) + bytes_of(&a->f) + bytes_of(&a->s) + bytes_of(&a->y)};
}

/* x stands for s where there was no f, hence no s. */
static void x_for_s(const struct op_call *c, void *args)
{
    struct addnorm_bwd_args *a = args;
    if (a->s.rank == 0)
        a->s = c->t[op_arg_index(c->desc, "x")];
}

static void bwd_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(addnorm_bwd, a, c);
    double n = (double)tensor_elems(&a->dx), stream = (double)tensor_bytes(&a->dx);
    *out = (struct op_cost){.flops = 11 * n,
                            .bytes = stream * (1 + (a->dy.rank > 0)) + bytes_of(&a->dy) + bytes_of(&a->ds) +
                                     bytes_of(&a->df)};
}

/* The stream wider than what layers see. */
#define WIDE_STREAM " wide_x=1 wide_s=1 wide_ds=1 wide_dx=1"
static const struct op_sample samples[] = {
    {"rows=5 d=33"},
    {"rows=1 d=1"},
    {"rows=0 d=8"},
    {"rows=3 d=0"},
    {"rows=65 d=64 zero_centered=1 no_bias=1 no_info=1"},
    {"rows=129 d=17 no_w=1 no_bias=1"},
    {"rows=70 d=48 strided=1"},
    {"rows=9 d=20 no_f=1 no_bias=1 no_ds=1"},
    {"rows=9 d=20 no_f=1 no_bias=1 no_ds=1 no_w=1 strided=1"},
    {"rows=9 d=21 no_y=1 no_w=1 no_dy=1 no_rstd=1"},
    {"rows=9 d=21 no_y=1 no_w=1 no_dy=1 no_rstd=1 no_bias=1 p=0.5 strided=1"},
    {"rows=9 d=21 no_y=1 no_w=1 no_dy=1"},
    {"rows=65 d=264 no_y=1 no_w=1 no_dy=1 no_bias=1"},
    {"rows=12 d=65 p=0.25 seq=5"},
    {"rows=12 d=65 p=0.25 seq=5 first=24"},
    {"rows=67 d=130 p=0.1 seq=3 no_bias=1 strided=1"},
    {"rows=10 d=7 p=0.5 seq=1 no_w=1 zero_centered=1 key=5"},
    {"rows=37 d=264 p=0.1 seq=5"},
    {"rows=9 d=2056 no_bias=1"},
    {"rows=600 d=512"},
    {"rows=3 d=8200 p=0.5"},
    {"rows=5 d=33" WIDE_STREAM},
    {"rows=0 d=8" WIDE_STREAM},
    {"rows=65 d=64 zero_centered=1 no_bias=1 no_info=1" WIDE_STREAM},
    {"rows=70 d=48 strided=1" WIDE_STREAM},
    {"rows=9 d=24 no_f=1 no_bias=1 no_ds=1" WIDE_STREAM},
    {"rows=9 d=24 no_y=1 no_w=1 no_dy=1 no_rstd=1" WIDE_STREAM},
    {"rows=9 d=21 no_y=1 no_w=1 no_dy=1 no_rstd=1 no_bias=1 p=0.5 strided=1" WIDE_STREAM},
    {"rows=37 d=264 p=0.1 seq=5" WIDE_STREAM},
    {"rows=67 d=520 no_w=1 no_bias=1" WIDE_STREAM},
    {"rows=20 d=2056 no_bias=1" WIDE_STREAM},
    {"rows=3 d=8200 p=0.5" WIDE_STREAM},
    /* Backward only: gradcheck wants every gradient of an input that is there. */
    {"rows=5 d=33 no_df=1 no_dbias=1"},
    {"rows=0 d=8 acc_dw=1 acc_dbias=1"},
    {"rows=64 d=16 no_dw=1 no_dbias=1"},
    {"rows=65 d=64 zero_centered=1 no_info=1 acc_dw=1"},
    {"rows=129 d=257 acc_dbias=1 no_df=1 strided=1"},
    {"rows=130 d=17 no_w=1 no_dbias=1 no_x=1"},
    {"rows=9 d=20 no_s=1 no_ds=1"},
    {"rows=9 d=20 no_ds=1 no_w=1 no_df=1 strided=1"},
    {"rows=9 d=21 no_dy=1 no_w=1 no_s=1 no_x=1 no_rstd=1 p=0.5 acc_dbias=1"},
    {"rows=67 d=130 p=0.1 seq=3 acc_dbias=1 acc_dw=1 strided=1"},
    {"rows=10 d=7 p=0.5 seq=1 no_w=1 key=5 no_dbias=1"},
    {"rows=66 d=300 no_df=1 p=0.3"},
    {"rows=66 d=304 no_df=1 no_dbias=1" WIDE_STREAM},
    {"rows=129 d=256 no_dbias=1 acc_dw=1" WIDE_STREAM},
    {"rows=9 d=24 no_ds=1 no_w=1 no_df=1" WIDE_STREAM},
    {"rows=9 d=24 no_dy=1 no_w=1 no_s=1 no_x=1 no_rstd=1 p=0.5 acc_dbias=1" WIDE_STREAM},
    {"rows=9 d=24 no_dy=1 no_w=1 no_s=1 no_x=1 no_rstd=1 no_df=1" WIDE_STREAM},
};
enum { BACKWARD_ONLY = 17 };
static const struct op_sample bench[] = {
    {"rows=4096 d=320 no_bias=1"},
    {"rows=4096 d=320 p=0.1 seq=256"},
    {"rows=16384 d=2048 no_bias=1"},
    {"rows=16384 d=2048 no_bias=1" WIDE_STREAM},
};
static const struct op_sample bwd_bench[] = {
    {"rows=4096 d=320 no_df=1 no_dbias=1"},
    {"rows=4096 d=320 p=0.1 seq=256"},
    {"rows=16384 d=2048 no_df=1 no_dbias=1"},
    {"rows=16384 d=2048 no_dbias=1" WIDE_STREAM},
};

OP_TABLES_WITH(addnorm_fwd, ADDNORM_FWD_FIELDS, DROPOUT_INFO(addnorm_fwd), DROPOUT_ATTRS(addnorm_fwd));
const struct op_desc addnorm_fwd_desc = {
    OP_IS(addnorm_fwd),    .summary = "residual add with bias and dropout, then rmsnorm",
    OP_LIST(dims, dims),   .cost = fwd_cost,
    .sample_fill = fill,   .backward = "addnorm_bwd",
    .tolerance = 2e-6,     .narrow = 2e-3, /* the stream is rounded before it is normed */
    .samples = samples,    .n_samples = countof(samples) - BACKWARD_ONLY,
    OP_LIST(bench, bench),
};
OP_TABLES_WITH(addnorm_bwd, ADDNORM_BWD_FIELDS, DROPOUT_INFO(addnorm_bwd) OP_EXTRA("x", OPT, STREAM, "rows d"),
               DROPOUT_ATTRS(addnorm_bwd));
const struct op_desc addnorm_bwd_desc = {
    OP_IS(addnorm_bwd),  .prepare = x_for_s,        .summary = "gradient of addnorm_fwd",
    OP_LIST(dims, dims), .cost = bwd_cost,          .sample_fill = fill,
    .tolerance = 5e-6,   OP_LIST(samples, samples), OP_LIST(bench, bwd_bench),
};
