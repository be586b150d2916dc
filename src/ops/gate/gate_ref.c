/* gate, reference; see gate.h. */
#include "ops/ops_ref_int.h"
#include "ops/gate/gate.h"

#include <math.h>

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

int gate_fwd_ref(struct lane *l, const struct gate_fwd_args *a)
{
    TRY(gate_fwd_check(a, l->err));
    int64_t rows = rows_of(&a->x), n = cols_of(&a->x);
    bool shared = cols_of(&a->g) == 1;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < n; c++)
            f64_row(&a->y, r)[c] = f64_row(&a->x, r)[c] * sigmoid(f64_row(&a->g, r)[shared ? 0 : c]);
    return ST_OK;
}

int gate_bwd_ref(struct lane *l, const struct gate_bwd_args *a)
{
    TRY(gate_bwd_check(a, l->err));
    int64_t rows = rows_of(&a->x), n = cols_of(&a->x);
    bool shared = cols_of(&a->g) == 1;
    for (int64_t r = 0; r < rows; r++) {
        const double *dy = f64_row(&a->dy, r), *x = f64_row(&a->x, r), *g = f64_row(&a->g, r);
        double *dx = f64_row(&a->dx, r), *dg = f64_row(&a->dg, r), sum = 0;
        for (int64_t c = 0; c < n; c++) {
            double s = sigmoid(g[shared ? 0 : c]), d = dy[c] * x[c] * s * (1 - s);
            dx[c] = dy[c] * s;
            sum += d;
            if (!shared)
                dg[c] = d;
        }
        if (shared)
            dg[0] = sum;
    }
    return ST_OK;
}
