/* shift, reference; see shift.h. */
#include "ops/ops_ref_int.h"
#include "ops/shift/shift.h"

int shift_ref(struct lane *l, const struct shift_args *a)
{
    TRY(shift_check(a, l->err));
    int64_t rows = a->x.dim[0], n = a->x.dim[1];
    for (int64_t b = 0; b < rows; b++) {
        for (int64_t t = 0; t < n; t++) {
            const int32_t *x = (const int32_t *)a->x.data + b * n, *doc = (const int32_t *)a->doc_start.data;
            bool ends = t + 1 == n || (doc != NULL && doc[b * n + t + 1] != doc[b * n + t]);
            ((int32_t *)a->y.data)[b * n + t] = ends ? (int32_t)a->fill : x[t + 1];
        }
    }
    return ST_OK;
}
