/* router: argument checks, shared host code and cost; the descriptors are in router_desc.c. See
 * router.h. */
#include "ops/check.h"
#include "ops/opshape.h"
#include "ops/router/router.h"
#include "ops/router/router_int.h"

static int check_rule(const char *op, const struct router_rule *r, int64_t rows, int64_t n, int64_t k, struct err *e)
{
    if (n < 1 || n > ROUTER_MAX_EXPERTS || k < 1 || k > ROUTER_MAX_TOPK || k > n)
        return err_set(e, ST_INVALID, "%s: %lld of %lld experts; at most %d of %d are possible", op, (long long)k,
                       (long long)n, ROUTER_MAX_TOPK, ROUTER_MAX_EXPERTS);
    if (r->seq < 1 || rows % r->seq != 0)
        return err_set(e, ST_INVALID, "%s: %lld rows are not sequences of %lld", op, (long long)rows,
                       (long long)r->seq);
    if (r->groups < 0 || (r->groups > 0 && (n % r->groups != 0 || r->group_topk < 1 || r->group_topk > r->groups ||
                                            r->group_topk > ROUTER_MAX_TOPK || r->group_topk * (n / r->groups) < k ||
                                            r->group_best < 0 || r->group_best > ROUTER_MAX_TOPK)))
        return err_set(e, ST_INVALID, "%s: %lld of %lld groups cannot hold %lld of %lld experts", op,
                       (long long)r->group_topk, (long long)r->groups, (long long)k, (long long)n);
    if (!(r->capacity >= 0))
        return err_set(e, ST_INVALID, "%s: capacity factor %g is negative", op, r->capacity);
    return ST_OK;
}

int64_t router_capacity(const struct router_rule *r, int64_t tokens, int64_t experts, int64_t k)
{
    double c = ceil((double)tokens * (double)k / (double)experts * r->capacity);
    return r->capacity > 0 && c < (double)tokens ? (int64_t)c : tokens;
}

int router_fwd_check(const struct router_fwd_args *a, struct err *e)
{
    TRY(op_check_fields(&router_fwd_desc, a, e));
    int64_t rows = a->logits.dim[0];
    TRY(check_rule("router_fwd", &a->rule, rows, a->logits.dim[1], a->probs.dim[1], e));
    if (present(&a->table) && !present(&a->token) && a->table.dim[0] != rows)
        return err_set(e, ST_INVALID,
                       "router_fwd: a table without token has %lld rows, expected one for each of the %lld tokens",
                       (long long)a->table.dim[0], (long long)rows);
    if (!present(&a->load) && router_balances(&a->rule))
        return err_set(e, ST_INVALID, "router_fwd: a balance loss needs the tensor load");
    return ST_OK;
}

int router_bwd_check(const struct router_bwd_args *a, struct err *e)
{
    TRY(op_check_fields(&router_bwd_desc, a, e));
    TRY(check_rule("router_bwd", &a->rule, a->logits.dim[0], a->logits.dim[1], a->idx.dim[1], e));
    if (present(&a->dloss) && router_balances(&a->rule) && !present(&a->load))
        return err_set(e, ST_INVALID, "router_bwd: tensor load is missing");
    return ST_OK;
}

static int check_seq(const char *op, int64_t seq, struct err *e)
{
    return seq >= 1 ? ST_OK : err_set(e, ST_INVALID, "%s: seq is %lld, expected at least 1", op, (long long)seq);
}

int router_noise_check(const struct router_noise_args *a, struct err *e)
{
    TRY(op_check_fields(&router_noise_desc, a, e));
    return check_seq("router_noise", a->seq, e);
}

int router_jitter_check(const struct router_jitter_args *a, struct err *e)
{
    TRY(op_check_fields(&router_jitter_desc, a, e));
    return check_seq("router_jitter", a->seq, e);
}

OP_CHECK(router_bias)

int router_table_check(const struct router_fwd_args *a, struct err *e)
{
    if (!present(&a->table))
        return ST_OK;
    int64_t k = a->table.dim[1], vocab = a->table.dim[0], n = a->logits.dim[1];
    for (int64_t t = 0; t < a->logits.dim[0]; t++) {
        int64_t token = router_table_row(a, t);
        if (token < 0 || token >= vocab)
            return err_set(e, ST_INVALID, "router_fwd: token %lld of row %lld is not in the table of %lld",
                           (long long)token, (long long)t, (long long)vocab);
        for (int64_t j = 0; j < k; j++) {
            int64_t expert = ((const int32_t *)a->table.data)[token * k + j];
            if (expert < 0 || expert >= n)
                return err_set(e, ST_INVALID, "router_fwd: the table sends its row %lld to expert %lld of %lld",
                               (long long)token, (long long)expert, (long long)n);
        }
    }
    return ST_OK;
}
