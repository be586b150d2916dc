/* epplan on host devices; see epplan.h. */
#include "ops/ops_ref_int.h"
#include "ops/epplan/epplan.h"

int epsend_host(const struct epsend_args *a, struct err *e)
{
    TRY(epsend_check(a, e));
    int64_t ranks = a->count.dim[0], local = a->count.dim[1], cap = a->from.dim[0] / ranks, n = tensor_elems(&a->row);
    const int32_t *offset = a->offset.data, *src = a->src.data;
    int32_t *to = a->to.data, *from = a->from.data, *count = a->count.data, *rows = a->rows.data;
    double *need = a->need.data, most = a->acc_need ? *need : 0;
    for (int64_t x = 0; x < ranks * local; x++)
        count[x] = offset[x + 1] - offset[x];
    for (int64_t r = 0; r < ranks; r++) {
        int32_t first = offset[r * local], wanted = offset[(r + 1) * local] - first;
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

int eprecv_host(const struct eprecv_args *a, struct err *e)
{
    TRY(eprecv_check(a, e));
    int64_t ranks = a->count.dim[0], local = a->count.dim[1], cap = a->from.dim[0] / ranks;
    const int32_t *count = a->count.data;
    int32_t *offset = a->offset.data, *from = a->from.data, *to = a->to.data, *rows = a->rows.data;
    for (int64_t at = 0; at < ranks * cap; at++)
        to[at] = from[at] = -1;
    for (int64_t r = 0; r < ranks; r++)
        rows[r] = 0;
    int32_t next = 0;
    for (int64_t x = 0; x < local; x++) {
        offset[x] = next;
        for (int64_t r = 0; r < ranks; r++) {
            int64_t before = 0; /* rows of this rank for earlier experts */
            for (int64_t y = 0; y < x; y++)
                before += max_i64(count[r * local + y], 0);
            for (int64_t i = before; i < min_i64(before + count[r * local + x], cap); i++, next++) {
                from[next] = (int32_t)(r * cap + i);
                to[r * cap + i] = next;
                rows[r]++;
            }
        }
    }
    offset[local] = next;
    return ST_OK;
}

int epsend_ref(struct lane *l, const struct epsend_args *a) { return epsend_host(a, l->err); }
int eprecv_ref(struct lane *l, const struct eprecv_args *a) { return eprecv_host(a, l->err); }
