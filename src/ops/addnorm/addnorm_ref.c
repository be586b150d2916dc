/* addnorm, reference; see addnorm.h. */
#include "ops/ops_ref_int.h"
#include "ops/addnorm/addnorm.h"
#include "ops/dropout/dropout.h"

#include <math.h>

static double gain(const struct tensor *w, bool zero_centered, int64_t c)
{
    return present(w) ? ((const double *)w->data)[c] + (zero_centered ? 1 : 0) : 1;
}

/* What dropout multiplies channel c of token t with: 0 or 1 / (1 - p). */
static double drop_factor(const struct dropout_rule *r, int64_t t, int64_t c)
{
    if (r->p == 0)
        return 1;
    struct draw_place at = dropout_place(r->info.data, t + r->first, r->seq);
    bool keep = dropout_keep(r->key, dropout_threshold(r->p), at.step, at.sample, at.pos, c);
    return keep ? 1 / (1 - r->p) : 0;
}

int addnorm_fwd_ref(struct lane *l, const struct addnorm_fwd_args *a)
{
    TRY(addnorm_fwd_check(a, l->err));
    int64_t rows = a->x.dim[0], d = a->x.dim[1];
    const double *bias = a->bias.data;
    for (int64_t r = 0; r < rows; r++) {
        const double *s = f64_row(present(&a->f) ? &a->s : &a->x, r);
        for (int64_t c = 0; present(&a->f) && c < d; c++) {
            double f = f64_row(&a->f, r)[c] + (bias == NULL ? 0 : bias[c]);
            f64_row(&a->s, r)[c] = f64_row(&a->x, r)[c] + f * drop_factor(&a->drop, r, c);
        }
        if (!present(&a->rstd))
            continue;
        double sum = 0;
        for (int64_t c = 0; c < d; c++)
            sum += s[c] * s[c];
        double rstd = 1 / sqrt(sum / (double)d + a->eps);
        for (int64_t c = 0; present(&a->y) && c < d; c++)
            f64_row(&a->y, r)[c] = s[c] * rstd * gain(&a->w, a->zero_centered, c);
        ((double *)a->rstd.data)[r] = rstd;
    }
    return ST_OK;
}

/* dx of one row: what comes from further on, plus what comes through the norm. */
static void row_dx(const struct addnorm_bwd_args *a, int64_t r, int64_t d)
{
    double mean = 0, *dx = f64_row(&a->dx, r), *dw = a->dw.data;
    for (int64_t c = 0; c < d; c++)
        dx[c] = present(&a->ds) ? f64_row(&a->ds, r)[c] : 0;
    if (!present(&a->dy))
        return;
    const double *dy = f64_row(&a->dy, r), *s = f64_row(&a->s, r);
    double rstd = ((const double *)a->rstd.data)[r];
    for (int64_t c = 0; c < d; c++) {
        mean += dy[c] * gain(&a->w, a->zero_centered, c) * s[c] * rstd / (double)d;
        if (dw != NULL)
            dw[c] += dy[c] * s[c] * rstd;
    }
    for (int64_t c = 0; c < d; c++)
        dx[c] += rstd * (dy[c] * gain(&a->w, a->zero_centered, c) - s[c] * rstd * mean);
}

int addnorm_bwd_ref(struct lane *l, const struct addnorm_bwd_args *a)
{
    TRY(addnorm_bwd_check(a, l->err));
    int64_t rows = a->dx.dim[0], d = a->dx.dim[1];
    double *dw = a->dw.data, *dbias = a->dbias.data;
    for (int64_t c = 0; c < d; c++) {
        if (dw != NULL && !a->acc_dw)
            dw[c] = 0;
        if (dbias != NULL && !a->acc_dbias)
            dbias[c] = 0;
    }
    for (int64_t r = 0; r < rows; r++) {
        row_dx(a, r, d);
        for (int64_t c = 0; c < d; c++) {
            double df = f64_row(&a->dx, r)[c] * drop_factor(&a->drop, r, c);
            if (present(&a->df))
                f64_row(&a->df, r)[c] = df;
            if (dbias != NULL)
                dbias[c] += df;
        }
    }
    return ST_OK;
}
