/* epplan: argument checks, cost, descriptors, test samples; see epplan.h. */
#include "ops/check.h"
#include "ops/epplan/epplan.h"
#include "ops/opshape.h"

static int check_ranks(const char *op, const struct tensor *idx, int64_t ranks, int64_t local, int64_t each,
                       struct err *e)
{
    if (tensor_elems(idx) > INT32_MAX)
        return err_set(e, ST_INVALID, "%s: %lld choices, expected at most %d", op, (long long)tensor_elems(idx),
                       INT32_MAX);
    if (ranks < 1 || local < 1 || each < 1 || ranks > INT32_MAX / local)
        return err_set(e, ST_INVALID, "%s: %lld ranks of %lld experts each, %lld entries for a token", op,
                       (long long)ranks, (long long)local, (long long)each);
    return ST_OK;
}

static int check_places(const char *op, int64_t places, int64_t ranks, int64_t each, struct err *e)
{
    if (ranks < 1 || places % ranks != 0 || places > INT32_MAX / max_i64(each, 1))
        return err_set(e, ST_INVALID, "%s: %lld places in buffers for %lld ranks, %lld entries each", op,
                       (long long)places, (long long)ranks, (long long)each);
    return ST_OK;
}

int epdest_check(const struct epdest_args *a, struct err *e)
{
    TRY(op_check_fields(&epdest_desc, a, e));
    return check_ranks("epdest", &a->idx, a->ranks, a->local, a->most, e);
}

int epsend_check(const struct epsend_args *a, struct err *e)
{
    TRY(op_check_fields(&epsend_desc, a, e));
    return check_places("epsend", a->from.dim[0], a->rows.dim[0], 1, e);
}

int epchoices_check(const struct epchoices_args *a, struct err *e)
{
    TRY(op_check_fields(&epchoices_desc, a, e));
    TRY(check_ranks("epchoices", &a->idx, a->ranks, a->local, a->per, e));
    if (a->to.dim[1] < 1)
        return err_set(e, ST_INVALID, "epchoices: to has no entries for a token");
    return check_places("epchoices", a->from.dim[0], a->ranks, a->per, e);
}

/* ---- samples: a fixed routing, so that the maps of all three agree --------------------------- */

/* Choices of a token differ; every seventh is dropped. */
static int32_t expert_of(int64_t t, int64_t j, int64_t k, int64_t experts)
{
    int64_t first = (int64_t)rng_below(7, (uint64_t)t, (uint64_t)experts);
    return (t * k + j) % 7 == 5 ? -1 : (int32_t)((first + j * (1 + t % 3)) % experts);
}

static bool goes_to(int64_t t, int64_t rank, int64_t k, int64_t ranks, int64_t local)
{
    for (int64_t j = 0; j < k; j++) {
        int32_t x = expert_of(t, j, k, ranks * local);
        if (x >= 0 && x / local == rank)
            return true;
    }
    return false;
}

static void fill_idx(struct tensor *host, int64_t experts)
{
    int64_t k = host->dim[1];
    for (int64_t i = 0; i < tensor_elems(host); i++)
        ((int32_t *)host->data)[i] = expert_of(i / k, i % k, k, experts);
}

static double dest_numbers(const struct op_call *c) { return op_dim(c, "rows") * op_dim(c, "k"); }

/* ---- epdest ---------------------------------------------------------------------------------- */

static const struct op_dim dest_dims[] = {{"rows", 9}, {"k", 2}};

static bool dest_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    if (op_arg_is(c, arg, "idx"))
        fill_idx(host, (int64_t)(op_attr(c, "ranks") * op_attr(c, "local")));
    return op_arg_is(c, arg, "idx");
}

static void dest_cost(const struct op_call *c, struct op_cost *out)
{
    double n = dest_numbers(c);
    *out = (struct op_cost){.flops = n * op_attr(c, "most"), .bytes = 8 * n};
}

static const struct op_sample dest_samples[] = {{"rows=9 k=2"},
                                                {"rows=0 k=2"},
                                                {"rows=1 k=1 ranks=1 local=1 most=1"},
                                                {"rows=33 k=5 ranks=3 local=2 most=3"},
                                                {"rows=257 k=8 ranks=8 local=8 most=8"},
                                                {"rows=20 k=4 ranks=16 local=1 most=4"},
                                                {"rows=20 k=6 ranks=2 local=9 most=2"}};
static const struct op_sample dest_bench[] = {{"rows=16384 k=8 ranks=8 local=8 most=8"}};

OP_TABLES(epdest, EPDEST_FIELDS);
const struct op_desc epdest_desc = {
    OP_IS(epdest),
    .summary = "the ranks that hold a token's experts, each once",
    OP_LIST(dims, dest_dims),
    .cost = dest_cost,
    .sample_fill = dest_fill,
    .tolerance = 0,
    OP_LIST(samples, dest_samples),
    OP_LIST(bench, dest_bench),
};

/* ---- epsend: samples start from rows that are already sorted by rank, as moeplan leaves them - */

static const struct op_dim send_dims[] = {{"rows", 9}, {"most", 2}, {"ranks", 2}};

/* Uneven shares; every seventh row is dropped, at the end. Row i is entry i in reverse. */
static bool send_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    int32_t *v = host->data;
    int64_t n = (int64_t)(c->dim[0] * c->dim[1]), kept = n - n / 7, ranks = (int64_t)c->dim[2];
    (void)key;
    if (op_arg_is(c, arg, "offset"))
        for (int64_t x = 0; x <= ranks; x++)
            v[x] = (int32_t)(kept * x * x / (ranks * ranks));
    for (int64_t i = 0; op_arg_is(c, arg, "row") && i < n; i++)
        v[i] = n - 1 - i < kept ? (int32_t)(n - 1 - i) : -1;
    for (int64_t i = 0; op_arg_is(c, arg, "src") && i < n; i++)
        v[i] = i < kept ? (int32_t)(n - 1 - i) : -1;
    return op_arg_is(c, arg, "offset") || op_arg_is(c, arg, "row") || op_arg_is(c, arg, "src");
}

static void send_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(epsend, a, c);
    double n = (double)tensor_elems(&a->row) + (double)a->from.dim[0];
    *out = (struct op_cost){.flops = n, .bytes = 8 * n};
}

static const struct op_sample send_samples[] = {
    {"rows=9 most=2 cap=18"},
    {"rows=9 most=2 cap=3"},
    {"rows=0 most=1 cap=0"},
    {"rows=1 most=1 ranks=1 cap=1"},
    {"rows=257 most=3 ranks=4 cap=257"},
    {"rows=1000 most=8 ranks=8 cap=1100"},
};
static const struct op_sample send_bench[] = {{"rows=16384 most=8 ranks=8 cap=14336"}};

OP_TABLES_WITH(epsend, EPSEND_FIELDS, , OP_ATTR_EXTRA("cap", 18));
const struct op_desc epsend_desc = {
    OP_IS(epsend),
    .summary = "places of tokens in the buffers that go to other ranks",
    OP_LIST(dims, send_dims),
    .cost = send_cost,
    .sample_fill = send_fill,
    .tolerance = 0,
    OP_LIST(samples, send_samples),
    OP_LIST(bench, send_bench),
};

/* ---- epchoices ------------------------------------------------------------------------------- */

static const struct op_dim choice_dims[] = {{"rows", 9}, {"k", 3}, {"most", 2}, {"cap", 9}, {"places", 0}};

static void choice_places(struct op_call *c) { c->dim[4] = c->dim[3] * op_attr(c, "ranks"); }

/* to, or from: tokens in order in the buffer of each of their ranks, as far as there is room. */
static void fill_places(const struct op_call *c, struct tensor *host, bool to)
{
    int64_t tokens = (int64_t)c->dim[0], k = (int64_t)c->dim[1], most = (int64_t)c->dim[2], cap = (int64_t)c->dim[3];
    int64_t ranks = (int64_t)op_attr(c, "ranks"), local = (int64_t)op_attr(c, "local");
    int32_t *v = host->data;
    for (int64_t i = 0; i < tensor_elems(host); i++)
        v[i] = -1;
    for (int64_t r = 0; r < ranks; r++) {
        int64_t n = 0;
        for (int64_t t = 0; t < tokens; t++) {
            int64_t before = 0;
            if (!goes_to(t, r, k, ranks, local))
                continue;
            for (int64_t q = 0; q < r; q++)
                before += goes_to(t, q, k, ranks, local);
            if (before >= most || n >= cap)
                continue;
            v[to ? t * most + before : r * cap + n] = (int32_t)(to ? r * cap + n : t * most + before);
            n++;
        }
    }
}

static bool choice_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key)
{
    (void)key;
    if (op_arg_is(c, arg, "idx"))
        fill_idx(host, (int64_t)(op_attr(c, "ranks") * op_attr(c, "local")));
    else if (op_arg_is(c, arg, "to") || op_arg_is(c, arg, "from"))
        fill_places(c, host, op_arg_is(c, arg, "to"));
    else
        return false;
    return true;
}

static void choice_cost(const struct op_call *c, struct op_cost *out)
{
    OP_UNPACK(epchoices, a, c);
    double n = (double)tensor_elems(&a->idx) + (double)a->from.dim[0] * (double)a->per;
    *out = (struct op_cost){.flops = n * op_dim(c, "k"), .bytes = 8 * n};
}

static const struct op_sample choice_samples[] = {{"rows=9 k=3"},
                                                  {"rows=9 k=3 cap=4"},
                                                  {"rows=0 k=2 cap=0"},
                                                  {"rows=1 k=1 most=1 ranks=1 local=1 cap=1 per=1"},
                                                  {"rows=40 k=5 most=3 ranks=3 local=4 cap=40 per=4"},
                                                  {"rows=40 k=5 most=3 ranks=3 local=4 cap=40 per=4 whole=1"},
                                                  {"rows=300 k=8 most=8 ranks=8 local=8 cap=260 per=8"},
                                                  {"rows=20 k=4 most=4 ranks=16 local=1 cap=7 per=1"}};
static const struct op_sample choice_bench[] = {{"rows=16384 k=8 most=8 ranks=8 local=8 cap=14336 per=8"}};

OP_TABLES(epchoices, EPCHOICES_FIELDS);
const struct op_desc epchoices_desc = {
    OP_IS(epchoices),
    .summary = "choices that travel with the rows of tokens to other ranks",
    OP_LIST(dims, choice_dims),
    .sample_dims = choice_places,
    .cost = choice_cost,
    .sample_fill = choice_fill,
    .tolerance = 0,
    OP_LIST(samples, choice_samples),
    OP_LIST(bench, choice_bench),
};
