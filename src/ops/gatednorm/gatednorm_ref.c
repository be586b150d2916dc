/* gatednorm, reference; see gatednorm.h. */
#include "ops/ops_ref_int.h"
#include "ops/gatednorm/gatednorm.h"

#include <math.h>

static double sigmoid(double z) { return 1 / (1 + exp(-z)); }
static double silu(double z) { return z * sigmoid(z); }
static double silu_slope(double z) { return sigmoid(z) * (1 + z * (1 - sigmoid(z))); }

int gatednorm_fwd_ref(struct lane *l, const struct gatednorm_fwd_args *a)
{
    TRY(gatednorm_fwd_check(a, l->err));
    int64_t d = a->x.dim[1], g = a->group, n_w = a->w.dim[0];
    for (int64_t r = 0; r < a->x.dim[0]; r++) {
        const double *x = f64_row(&a->x, r), *z = f64_row(&a->z, r), *w = a->w.data;
        double *y = f64_row(&a->y, r), *rstd = f64_row(&a->rstd, r);
        for (int64_t k = 0; k < d / g; k++) {
            double sum = 0;
            for (int64_t c = k * g; c < (k + 1) * g; c++) {
                double v = a->norm_first ? x[c] : x[c] * silu(z[c]);
                sum += v * v;
            }
            rstd[k] = 1 / sqrt(sum / (double)g + a->eps);
            for (int64_t c = k * g; c < (k + 1) * g; c++)
                y[c] = x[c] * silu(z[c]) * rstd[k] * (w[c % n_w] + (a->zero_centered ? 1 : 0));
        }
    }
    return ST_OK;
}

static void bwd_group(const struct gatednorm_bwd_args *a, int64_t r, int64_t k)
{
    const double *x = f64_row(&a->x, r), *z = f64_row(&a->z, r), *dy = f64_row(&a->dy, r), *w = a->w.data;
    double *dx = f64_row(&a->dx, r), *dz = f64_row(&a->dz, r), *dw = a->dw.data, rstd = f64_row(&a->rstd, r)[k];
    int64_t g = a->group, n_w = a->w.dim[0];
    double one = a->zero_centered ? 1 : 0, mean = 0;
    for (int64_t c = k * g; c < (k + 1) * g; c++) {
        double hat = rstd * (a->norm_first ? x[c] : x[c] * silu(z[c])); /* xh or vh */
        double up = a->norm_first ? dy[c] * silu(z[c]) : dy[c];         /* dn or dy */
        mean += up * (w[c % n_w] + one) * hat / (double)g;
        dw[c % n_w] += up * hat;
    }
    for (int64_t c = k * g; c < (k + 1) * g; c++) {
        double gain = w[c % n_w] + one, gate = silu(z[c]), upstream = dy[c];
        if (a->norm_first) {
            dz[c] = upstream * x[c] * rstd * gain * silu_slope(z[c]);
            dx[c] = rstd * (upstream * gate * gain - x[c] * rstd * mean);
        } else {
            double dv = rstd * (upstream * gain - x[c] * gate * rstd * mean);
            dz[c] = dv * x[c] * silu_slope(z[c]);
            dx[c] = dv * gate;
        }
    }
}

int gatednorm_bwd_ref(struct lane *l, const struct gatednorm_bwd_args *a)
{
    TRY(gatednorm_bwd_check(a, l->err));
    for (int64_t c = 0; !a->acc_dw && c < a->w.dim[0]; c++)
        ((double *)a->dw.data)[c] = 0;
    for (int64_t r = 0; r < a->x.dim[0]; r++)
        for (int64_t k = 0; k < a->x.dim[1] / a->group; k++)
            bwd_group(a, r, k);
    return ST_OK;
}
