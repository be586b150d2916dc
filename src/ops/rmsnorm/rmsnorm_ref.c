/* rmsnorm, reference; see rmsnorm.h. */
#include "ops/ops_ref_int.h"
#include "ops/rmsnorm/rmsnorm.h"

#include <math.h>

static double gain(const struct tensor *w, bool zero_centered, int64_t c)
{
    return present(w) ? ((const double *)w->data)[c] + (zero_centered ? 1 : 0) : 1;
}

int rmsnorm_fwd_ref(struct lane *l, const struct rmsnorm_fwd_args *a)
{
    TRY(rmsnorm_fwd_check(a, l->err));
    int64_t rows = rows_of(&a->x), d = cols_of(&a->x);
    for (int64_t r = 0; r < rows; r++) {
        const double *x = f64_row(&a->x, r);
        double *y = f64_row(&a->y, r), sum = 0;
        for (int64_t c = 0; c < d; c++)
            sum += x[c] * x[c];
        double rstd = 1 / sqrt(sum / (double)d + a->eps);
        for (int64_t c = 0; c < d; c++)
            y[c] = x[c] * rstd * gain(&a->w, a->zero_centered, c);
        ((double *)a->rstd.data)[r] = rstd;
    }
    return ST_OK;
}

int rmsnorm_bwd_ref(struct lane *l, const struct rmsnorm_bwd_args *a)
{
    TRY(rmsnorm_bwd_check(a, l->err));
    int64_t rows = rows_of(&a->x), d = cols_of(&a->x);
    double *dw = a->dw.data;
    for (int64_t c = 0; dw != NULL && !a->acc_dw && c < d; c++)
        dw[c] = 0;
    for (int64_t r = 0; r < rows; r++) {
        const double *x = f64_row(&a->x, r), *dy = f64_row(&a->dy, r);
        double *dx = f64_row(&a->dx, r), rstd = ((const double *)a->rstd.data)[r], mean = 0;
        for (int64_t c = 0; c < d; c++) {
            mean += dy[c] * gain(&a->w, a->zero_centered, c) * x[c] * rstd / (double)d;
            if (dw != NULL)
                dw[c] += dy[c] * x[c] * rstd;
        }
        for (int64_t c = 0; c < d; c++) {
            double u = dy[c] * gain(&a->w, a->zero_centered, c);
            double through = rstd * (u - x[c] * rstd * mean);
            dx[c] = through + (present(&a->dres) ? f64_row(&a->dres, r)[c] : 0);
        }
    }
    return ST_OK;
}
