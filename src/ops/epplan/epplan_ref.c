/* epplan on host devices; see epplan.h. */
#include "ops/ops_ref_int.h"
#include "ops/epplan/epplan.h"

static int check_experts(const char *op, const struct tensor *idx, int64_t experts, struct err *e)
{
    const int32_t *v = idx->data;
    for (int64_t i = 0, n = tensor_elems(idx); i < n; i++)
        if (v[i] >= experts)
            return err_set(e, ST_INVALID, "%s: choice %lld is expert %d of %lld", op, (long long)i, v[i],
                           (long long)experts);
    return ST_OK;
}

/* The least rank above `last` among a token's choices, -1: none. */
static int32_t next_rank(const int32_t *idx, int64_t k, int64_t local, int32_t last)
{
    int32_t next = -1;
    for (int64_t j = 0; j < k; j++) {
        int32_t r = idx[j] < 0 ? -1 : (int32_t)(idx[j] / local);
        if (r > last && (next < 0 || r < next))
            next = r;
    }
    return next;
}

int epdest_host(const struct epdest_args *a, struct err *e)
{
    TRY(epdest_check(a, e));
    TRY(check_experts("epdest", &a->idx, a->ranks * a->local, e));
    int64_t tokens = a->idx.dim[0], k = a->idx.dim[1], most = a->most;
    const int32_t *idx = a->idx.data;
    int32_t *dest = a->dest.data;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0, last = -1; i < most; i++) {
            int32_t r = last < -1 ? -1 : next_rank(idx + t * k, k, a->local, (int32_t)last);
            dest[t * most + i] = r;
            last = r < 0 ? -2 : r; /* no rank is above the last one: the rest is -1 */
        }
    return ST_OK;
}

int epsend_host(const struct epsend_args *a, struct err *e)
{
    TRY(epsend_check(a, e));
    int64_t ranks = a->rows.dim[0], cap = a->from.dim[0] / ranks, n = tensor_elems(&a->row);
    const int32_t *offset = a->offset.data, *src = a->src.data;
    int32_t *to = a->to.data, *from = a->from.data, *rows = a->rows.data;
    double *need = a->need.data, most = a->acc_need ? *need : 0;
    for (int64_t r = 0; r < ranks; r++) {
        int32_t first = offset[r], wanted = offset[r + 1] - first;
        most = wanted > most ? wanted : most;
        rows[r] = (int32_t)min_i64(wanted, cap);
        for (int64_t i = 0; i < cap; i++)
            from[r * cap + i] = i < wanted ? src[first + i] : -1;
    }
    *need = most;
    for (int64_t i = 0; i < n; i++)
        to[i] = -1;
    for (int64_t at = 0; at < ranks * cap; at++)
        if (from[at] >= 0)
            to[from[at]] = (int32_t)at;
    return ST_OK;
}

static int check_maps(const struct epchoices_args *a, struct err *e)
{
    const int32_t *to = a->to.data, *from = a->from.data;
    int64_t n = tensor_elems(&a->to), places = a->from.dim[0];
    for (int64_t i = 0; i < n; i++)
        if (to[i] >= places)
            return err_set(e, ST_INVALID, "epchoices: to[%lld] is %d, expected less than %lld", (long long)i, to[i],
                           (long long)places);
    for (int64_t i = 0; i < places; i++)
        if (from[i] >= n)
            return err_set(e, ST_INVALID, "epchoices: from[%lld] is %d, expected less than %lld", (long long)i, from[i],
                           (long long)n);
    return ST_OK;
}

int epchoices_host(const struct epchoices_args *a, struct err *e)
{
    TRY(epchoices_check(a, e));
    TRY(check_experts("epchoices", &a->idx, a->ranks * a->local, e));
    TRY(check_maps(a, e));
    int64_t k = a->idx.dim[1], most = a->to.dim[1], places = a->from.dim[0], cap = places / a->ranks, per = a->per;
    const int32_t *idx = a->idx.data, *from = a->from.data;
    int32_t *sent = a->sent.data, *src = a->src.data, *row = a->row.data;
    for (int64_t i = 0, n = tensor_elems(&a->row); i < n; i++)
        row[i] = -1;
    for (int64_t at = 0; at < places; at++) {
        int64_t rank = at / cap, t = from[at] < 0 ? -1 : from[at] / most, n = 0;
        for (int64_t i = 0; i < per; i++)
            sent[at * per + i] = src[at * per + i] = -1;
        for (int64_t j = 0; t >= 0 && j < k && n < per; j++) {
            int32_t x = idx[t * k + j];
            if (x < 0 || x / a->local != rank)
                continue;
            sent[at * per + n] = x - (a->whole ? 0 : (int32_t)(rank * a->local));
            src[at * per + n] = (int32_t)(t * k + j);
            row[t * k + j] = (int32_t)(at * per + n++);
        }
    }
    return ST_OK;
}

int epdest_ref(struct lane *l, const struct epdest_args *a) { return epdest_host(a, l->err); }
int epsend_ref(struct lane *l, const struct epsend_args *a) { return epsend_host(a, l->err); }
int epchoices_ref(struct lane *l, const struct epchoices_args *a) { return epchoices_host(a, l->err); }
