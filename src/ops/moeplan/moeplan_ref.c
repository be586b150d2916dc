/* moeplan on host devices; see moeplan.h. A counting sort: two passes over the choices. */
#include "ops/ops_ref_int.h"
#include "ops/moeplan/moeplan.h"

int moeplan_host(const struct moeplan_args *a, struct err *e)
{
    TRY(moeplan_check(a, e));
    int64_t n = tensor_elems(&a->idx), experts = a->offset.dim[0] - 1, rows = a->src.dim[0];
    const int32_t *idx = a->idx.data;
    int32_t *offset = a->offset.data, *row = a->row.data, *src = a->src.data;
    for (int64_t x = 0; x <= experts; x++)
        offset[x] = 0;
    for (int64_t i = 0; i < n; i++) {
        if (idx[i] >= experts)
            return err_set(e, ST_INVALID, "moeplan: choice %lld is expert %d of %lld", (long long)i, idx[i],
                           (long long)experts);
        if (idx[i] >= 0)
            offset[idx[i]]++;
    }
    /* offset[x] becomes the first row of x, and walks to its end as rows are distributed. */
    int32_t at = 0;
    for (int64_t x = 0; x <= experts; x++) {
        int32_t count = offset[x];
        offset[x] = at;
        at += count;
    }
    for (int64_t i = 0; i < n; i++) {
        int32_t r = idx[i] < 0 ? -1 : offset[idx[i]]++;
        row[i] = r < rows ? r : -1;
        if (row[i] >= 0)
            src[r] = (int32_t)i;
    }
    for (int64_t r = at; r < rows; r++)
        src[r] = -1;
    for (int64_t x = experts; x > 0; x--)
        offset[x] = (int32_t)min_i64(offset[x - 1], rows);
    offset[0] = 0;
    double *need = a->need.data;
    if (need != NULL)
        *need = a->acc_need && *need > at ? *need : at;
    return ST_OK;
}

int moeplan_ref(struct lane *l, const struct moeplan_args *a) { return moeplan_host(a, l->err); }
