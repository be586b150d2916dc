/* shift, fast CPU version; see shift.h. */
#include "ops/ops_cpu_int.h"
#include "ops/shift/shift.h"

#include <string.h>

int CPU_NAME(shift_cpu)(struct lane *l, const struct shift_args *a)
{
    TRY(shift_check(a, l->err));
    int64_t rows = a->x.dim[0], n = a->x.dim[1];
    for (int64_t b = 0; n > 0 && b < rows; b++) {
        const int32_t *x = (const int32_t *)a->x.data + b * n, *doc = (const int32_t *)a->doc_start.data;
        int32_t *y = (int32_t *)a->y.data + b * n;
        memcpy(y, x + 1, (size_t)(n - 1) * sizeof *y);
        y[n - 1] = (int32_t)a->fill;
        for (int64_t t = 0; doc != NULL && t + 1 < n; t++)
            if (doc[b * n + t + 1] != doc[b * n + t])
                y[t] = (int32_t)a->fill;
    }
    return ST_OK;
}
