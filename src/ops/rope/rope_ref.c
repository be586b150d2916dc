/* rope, reference; see rope.h. */
#include "ops/ops_ref_int.h"
#include "ops/rope/rope.h"

#include <math.h>

static double gain(const struct tensor *w, bool zero_centered, int64_t c)
{
    return present(w) ? ((const double *)w->data)[c] + (zero_centered ? 1 : 0) : 1;
}

/* Rotate the first channels of u in place by the angles of row `position`, or back. */
static void rotate(double *u, const struct tensor *cos_table, const struct tensor *sin_table, int64_t position,
                   bool interleaved, bool back)
{
    int64_t pairs = cos_table->dim[1];
    const double *cosines = f64_row(cos_table, position), *sines = f64_row(sin_table, position);
    for (int64_t c = 0; c < pairs; c++) {
        double *x = interleaved ? u + 2 * c : u + c, *y = interleaved ? u + 2 * c + 1 : u + c + pairs;
        double old_x = *x, old_y = *y, s = back ? -sines[c] : sines[c];
        *x = old_x * cosines[c] - old_y * s;
        *y = old_y * cosines[c] + old_x * s;
    }
}

int rope_fwd_ref(struct lane *l, const struct rope_fwd_args *a)
{
    TRY(rope_fwd_check(a, l->err));
    TRY(rope_positions_check("rope_fwd", &a->pos, &a->cos, l->err));
    int64_t tokens = a->x.dim[0], heads = a->x.dim[1], d = a->x.dim[2];
    for (int64_t r = 0; r < tokens * heads; r++) {
        const double *x = f64_row(&a->x, r);
        double *y = f64_row(&a->y, r), sum = 0, rstd = 1;
        for (int64_t c = 0; c < d; c++)
            sum += x[c] * x[c];
        if (present(&a->w)) {
            rstd = 1 / sqrt(sum / (double)d + a->eps);
            f64_row(&a->rstd, r / heads)[r % heads] = rstd;
        }
        for (int64_t c = 0; c < d; c++)
            y[c] = x[c] * rstd * gain(&a->w, a->zero_centered, c);
        if (present(&a->cos))
            rotate(y, &a->cos, &a->sin, ((const int32_t *)a->pos.data)[r / heads], a->interleaved, false);
    }
    return ST_OK;
}

int rope_bwd_ref(struct lane *l, const struct rope_bwd_args *a)
{
    TRY(rope_bwd_check(a, l->err));
    TRY(rope_positions_check("rope_bwd", &a->pos, &a->cos, l->err));
    int64_t tokens = a->dy.dim[0], heads = a->dy.dim[1], d = a->dy.dim[2];
    double *dw = a->dw.data;
    for (int64_t c = 0; present(&a->w) && !a->acc_dw && c < d; c++)
        dw[c] = 0;
    for (int64_t r = 0; r < tokens * heads; r++) {
        const double *dy = f64_row(&a->dy, r);
        double *du = f64_row(&a->dx, r), mean = 0; /* dx holds du until the norm's part */
        for (int64_t c = 0; c < d; c++)
            du[c] = dy[c];
        if (present(&a->cos))
            rotate(du, &a->cos, &a->sin, ((const int32_t *)a->pos.data)[r / heads], a->interleaved, true);
        if (!present(&a->w))
            continue;
        const double *x = f64_row(&a->x, r);
        double rstd = f64_row(&a->rstd, r / heads)[r % heads];
        for (int64_t c = 0; c < d; c++) {
            mean += du[c] * gain(&a->w, a->zero_centered, c) * x[c] * rstd / (double)d;
            dw[c] += du[c] * x[c] * rstd;
        }
        for (int64_t c = 0; c < d; c++)
            du[c] = rstd * (du[c] * gain(&a->w, a->zero_centered, c) - x[c] * rstd * mean);
    }
    return ST_OK;
}
