/* layernorm, reference; see layernorm.h. */
#include "ops/layernorm/layernorm.h"
#include "ops/ops_ref_int.h"

#include <math.h>

static double gain(const struct tensor *w, bool zero_centered, int64_t c)
{
    return present(w) ? ((const double *)w->data)[c] + (zero_centered ? 1 : 0) : 1;
}

int layernorm_fwd_ref(struct lane *l, const struct layernorm_fwd_args *a)
{
    TRY(layernorm_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0], d = a->x.dim[1];
    for (int64_t r = 0; r < rows; r++) {
        const double *x = f64_row(&a->x, r), *b = a->b.data;
        double *y = f64_row(&a->y, r), mean = 0, variance = 0;
        for (int64_t c = 0; c < d; c++)
            mean += x[c] / (double)d;
        for (int64_t c = 0; c < d; c++)
            variance += (x[c] - mean) * (x[c] - mean) / (double)d;
        double rstd = 1 / sqrt(variance + a->eps);
        for (int64_t c = 0; c < d; c++)
            y[c] = (x[c] - mean) * rstd * gain(&a->w, a->zero_centered, c) + (b == NULL ? 0 : b[c]);
        ((double *)a->mean.data)[r] = mean;
        ((double *)a->rstd.data)[r] = rstd;
    }
    return ST_OK;
}

int layernorm_bwd_ref(struct lane *l, const struct layernorm_bwd_args *a)
{
    TRY(layernorm_bwd_check(a, l->err));
    int64_t rows = a->x.dim[0], d = a->x.dim[1];
    double *dw = a->dw.data, *db = a->db.data;
    for (int64_t c = 0; c < d; c++) {
        if (dw != NULL && !a->acc_dw)
            dw[c] = 0;
        if (db != NULL && !a->acc_db)
            db[c] = 0;
    }
    for (int64_t r = 0; r < rows; r++) {
        const double *x = f64_row(&a->x, r), *dy = f64_row(&a->dy, r);
        double *dx = f64_row(&a->dx, r), rstd = ((const double *)a->rstd.data)[r],
               mean = ((const double *)a->mean.data)[r];
        double mean_u = 0, mean_ux = 0;
        for (int64_t c = 0; c < d; c++) {
            double xh = (x[c] - mean) * rstd, u = dy[c] * gain(&a->w, a->zero_centered, c);
            mean_u += u / (double)d;
            mean_ux += u * xh / (double)d;
            if (dw != NULL)
                dw[c] += dy[c] * xh;
            if (db != NULL)
                db[c] += dy[c];
        }
        for (int64_t c = 0; c < d; c++) {
            double xh = (x[c] - mean) * rstd, u = dy[c] * gain(&a->w, a->zero_centered, c);
            double through = rstd * (u - mean_u - xh * mean_ux);
            dx[c] = through + (present(&a->dres) ? f64_row(&a->dres, r)[c] : 0);
        }
    }
    return ST_OK;
}
