/* moeplan on host devices; see moeplan.h. A counting sort: two passes over the choices. */
#include "ops/ops_ref_int.h"
#include "ops/moeplan/moeplan.h"

int moeplan_host(const struct moeplan_args *a, struct err *e)
{
    TRY(moeplan_check(a, e));
    int64_t n = tensor_elems(&a->idx), experts = a->offset.dim[0] - 1;
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
        row[i] = idx[i] < 0 ? -1 : offset[idx[i]]++;
        if (idx[i] >= 0)
            src[row[i]] = (int32_t)i;
    }
    for (int64_t r = offset[experts]; r < n; r++)
        src[r] = -1;
    for (int64_t x = experts; x > 0; x--)
        offset[x] = offset[x - 1];
    offset[0] = 0;
    return ST_OK;
}

int moeplan_ref(struct lane *l, const struct moeplan_args *a) { return moeplan_host(a, l->err); }
