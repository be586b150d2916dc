/* permute and unpermute: argument checks, cost, descriptors, test samples and bench shapes; see
 * permute.h. */
#include "ops/check.h"
#include "ops/opshape.h"
#include "ops/permute/permute.h"

int permute_check(const struct permute_args *a, struct err *e)
{
    TRY(op_check_fields(&permute_desc, a, e));
    if (!present(&a->x) && !present(&a->prob))
        return err_set(e, ST_INVALID, "permute: neither x nor prob is given");
    return a->k >= 1 ? ST_OK : err_set(e, ST_INVALID, "permute: k is %lld, expected at least 1", (long long)a->k);
}

int unpermute_check(const struct unpermute_args *a, struct err *e)
{
    TRY(op_check_fields(&unpermute_desc, a, e));
    if (a->row.dim[1] >= 1 && a->row.dim[1] <= PERMUTE_MAX_K)
        return ST_OK;
    return err_set(e, ST_INVALID, "unpermute: k is %lld, expected 1 to %d", (long long)a->row.dim[1], PERMUTE_MAX_K);
}

/* ---- samples: maps of a fixed routing, so that both directions agree ------------------------- */

static const struct op_dim dims[] = {{"rows", 7}, {"d", 33}, {"experts", 4}, {"dropped", 0}, {"places", 0}};

static void every_choice(struct op_call *c) { c->dim[4] = c->dim[0] * op_attr(c, "k"); }

static int32_t expert_of(const struct op_call *c, int64_t choice)
{
    bool lost = c->dim[3] != 0 && choice % 5 == 2;
    return lost ? -1 : (int32_t)rng_below(99, (uint64_t)choice, (uint64_t)c->dim[2]);
}

/* Fills src (inverse true) or row by the definition: rank in the order by expert, then choice. */
static void fill_map(const struct op_call *c, struct tensor *host, bool inverse)
{
    int64_t n = tensor_elems(host);
    int32_t *map = host->data, rank = 0;
    for (int64_t i = 0; i < n; i++)
        map[i] = -1;
    for (int32_t x = 0; x < (int32_t)c->dim[2]; x++)
        for (int64_t i = 0; i < n; i++)
            if (expert_of(c, i) == x) {
                map[inverse ? rank : i] = inverse ? (int32_t)i : rank;
                rank++;
            }
}

static bool fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    if (c->desc->args[arg].type != ARG_I32)
        return false;
    fill_map(c, host, c->desc->args[arg].name[0] == 's');
    return true;
}

static const struct op_sample samples[] = {
    {"rows=7 d=33"},
    {"rows=0 d=8"},
    {"rows=1 d=1 k=1 experts=1"},
    {"rows=20 d=65 k=3 dropped=1"},
    {"rows=20 d=65 k=3 dropped=1 strided=1 no_prob=1 no_yprob=1 no_dyprob=1 no_dprob=1 no_xprob=1 no_dxprob=1"},
    {"rows=9 d=64 k=4 experts=9 no_prob=1 no_yprob=1 no_dyprob=1 no_dprob=1 no_xprob=1 no_dxprob=1"},
    {"rows=12 d=130 k=5 experts=3 no_base=1 acc_y=1 dropped=1"},
    {"rows=7 d=33 no_row=1"},
    {"rows=20 k=3 dropped=1 no_x=1 no_y=1 no_base=1 no_dy=1 no_dx=1"},
    {"rows=20 k=3 dropped=1 no_x=1 no_y=1 no_row=1 no_base=1 no_dy=1 no_dx=1"},
    {"rows=21 d=264 k=9 dropped=1 no_row=1"},
    {"rows=21 d=2072 k=17 experts=5 dropped=1 no_base=1"},
};
static const struct op_sample bench[] = {
    {"rows=1024 d=512 k=8 experts=64"},
    {"rows=1024 d=2048 k=2 experts=8"},
    {"rows=16384 d=2048 k=8 experts=64 no_prob=1 no_yprob=1 no_xprob=1 no_base=1 gpu=1"}};

/* ---- permute and its gradient ---------------------------------------------------------------- */

static void copy_cost(const struct op_call *c, struct op_cost *out)
{
    double tokens = op_dim(c, "rows"), rows = tokens * op_attr(c, "k"), d = op_dim(c, "d"),
           size = (double)dtype_bytes(c->t[0].dtype);
    *out = (struct op_cost){.flops = rows * d, .bytes = (tokens + rows) * d * size};
}

OP_TABLES(permute, PERMUTE_FIELDS);
OP_TABLES_WITH(unpermute, UNPERMUTE_FIELDS, , OP_ATTR_EXTRA("k", 2));

const struct op_desc permute_desc = {
    OP_IS(permute),
    .summary = "copy token rows to the rows of their experts",
    OP_LIST(dims, dims),
    .sample_dims = every_choice,
    .cost = copy_cost,
    .sample_fill = fill,
    .backward = "permute_bwd",
    .tolerance = 1e-7,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
#define PERMUTE_BWD_FIELDS(op)                                                                                         \
    OP_FIELD_IN(op, "dy", x, IN, REAL, "places d")                                                                     \
    OP_FIELD_IN(op, "row", row, IN, I32, "rows k !")                                                                   \
    OP_FIELD_IN(op, "dyprob", xprob, OPT, WIDE, "places")                                                              \
    OP_FIELD_IN(op, "dx", y, OUT, REAL, "rows d")                                                                      \
    OP_FIELD_IN(op, "dprob", yprob, OPT_OUT, WIDE, "rows k ! @dyprob")
static const struct op_arg permute_bwd_fields[] = {PERMUTE_BWD_FIELDS(unpermute)};
const struct op_desc permute_bwd_desc = {
    OP_NAMED("permute_bwd", permute_bwd, unpermute),
    .summary = "gradient of permute: unpermute",
    OP_LIST(dims, dims),
    .sample_dims = every_choice,
    .cost = copy_cost,
    .sample_fill = fill,
    .tolerance = 1e-6,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};

/* ---- unpermute and its gradient -------------------------------------------------------------- */

const struct op_desc unpermute_desc = {
    OP_IS(unpermute),
    .summary = "sum the expert rows of each token, in order of choice",
    OP_LIST(dims, dims),
    .sample_dims = every_choice,
    .cost = copy_cost,
    .sample_fill = fill,
    .backward = "unpermute_bwd",
    .tolerance = 1e-6,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
#define UNPERMUTE_BWD_FIELDS(op)                                                                                       \
    OP_FIELD_IN(op, "dy", x, IN, REAL, "rows d")                                                                       \
    OP_FIELD_IN(op, "src", src, IN, I32, "places")                                                                     \
    OP_FIELD_IN(op, "row", row, OPT, I32, "rows k !")                                                                  \
    OP_FIELD_IN(op, "dyprob", prob, OPT, WIDE, "rows k !")                                                             \
    OP_FIELD_IN(op, "dx", y, OUT, REAL, "places d")                                                                    \
    OP_FIELD_IN(op, "dxprob", yprob, OPT_OUT, WIDE, "places @dyprob")
static const struct op_arg unpermute_bwd_fields[] = {UNPERMUTE_BWD_FIELDS(permute)};
const struct op_desc unpermute_bwd_desc = {
    OP_NAMED("unpermute_bwd", unpermute_bwd, permute),
    .summary = "gradient of unpermute: permute",
    OP_LIST(dims, dims),
    .sample_dims = every_choice,
    .cost = copy_cost,
    .sample_fill = fill,
    .tolerance = 1e-7,
    OP_LIST(samples, samples),
    OP_LIST(bench, bench),
};
