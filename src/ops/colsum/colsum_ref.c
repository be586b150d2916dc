/* colsum, reference; see colsum.h. */
#include "ops/ops_ref_int.h"
#include "ops/colsum/colsum.h"

int colsum_ref(struct lane *l, const struct colsum_args *a)
{
    TRY(colsum_check(a, l->err));
    int64_t rows = a->x.dim[0], n = a->x.dim[1];
    double *out = a->out.data;
    for (int64_t c = 0; !a->acc_out && c < n; c++)
        out[c] = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < n; c++)
            out[c] += f64_row(&a->x, r)[c];
    return ST_OK;
}
