/* gmm, reference; see gmm.h. */
#include "ops/gmm/gmm_int.h"
#include "ops/gmm/gmm.h"
#include "ops/ops_ref_int.h"

static const double *matrix(const struct tensor *w, int64_t e)
{
    return (const double *)w->data + e * w->dim[1] * w->dim[2];
}
static double prob_of(const struct tensor *prob, int64_t r)
{
    return present(prob) ? ((const double *)prob->data)[r] : 1;
}

int gmm_fwd_ref(struct lane *l, const struct gmm_fwd_args *a)
{
    TRY(gmm_fwd_check(a, l->err));
    TRY(gmm_offset_check("gmm_fwd", &a->offset, a->x.dim[0], l->err));
    int64_t experts = a->w.dim[0], out = a->w.dim[1], in = a->w.dim[2];
    const int32_t *offset = a->offset.data;
    for (int64_t e = 0; e < experts; e++) {
        for (int64_t r = offset[e]; r < offset[e + 1]; r++) {
            for (int64_t o = 0; o < out; o++) {
                double sum = 0;
                for (int64_t i = 0; i < in; i++)
                    sum += f64_row(&a->x, r)[i] * matrix(&a->w, e)[o * in + i];
                double bias = present(&a->bias) ? ((const double *)a->bias.data)[e * out + o] : 0;
                f64_row(&a->y, r)[o] = sum + prob_of(&a->prob, r) * bias;
            }
        }
    }
    for (int64_t r = offset[experts]; r < a->y.dim[0]; r++)
        for (int64_t o = 0; o < out; o++)
            f64_row(&a->y, r)[o] = 0;
    return ST_OK;
}

static void input_gradient(const struct gmm_bwd_args *a, int64_t e, int64_t first, int64_t end)
{
    int64_t out = a->w.dim[1], in = a->w.dim[2];
    for (int64_t r = first; r < end; r++)
        for (int64_t i = 0; i < in; i++) {
            double sum = 0;
            for (int64_t o = 0; o < out; o++)
                sum += f64_row(&a->dy, r)[o] * matrix(&a->w, e)[o * in + i];
            f64_row(&a->dx, r)[i] = sum;
        }
}

static void weight_gradient(const struct gmm_bwd_args *a, int64_t e, int64_t first, int64_t end)
{
    int64_t out = a->dw.dim[1], in = a->dw.dim[2];
    double *dw = (double *)a->dw.data + e * out * in;
    for (int64_t o = 0; o < out; o++)
        for (int64_t i = 0; i < in; i++) {
            double sum = a->acc_dw ? dw[o * in + i] : 0;
            for (int64_t r = first; r < end; r++)
                sum += f64_row(&a->dy, r)[o] * f64_row(&a->x, r)[i];
            dw[o * in + i] = sum;
        }
}

static void bias_gradients(const struct gmm_bwd_args *a, int64_t e, int64_t first, int64_t end)
{
    int64_t out = a->dy.dim[1];
    double *dprob = a->dprob.data;
    for (int64_t o = 0; present(&a->dbias) && o < out; o++) {
        double *dbias = (double *)a->dbias.data + e * out + o, sum = a->acc_dbias ? *dbias : 0;
        for (int64_t r = first; r < end; r++)
            sum += prob_of(&a->prob, r) * f64_row(&a->dy, r)[o];
        *dbias = sum;
    }
    for (int64_t r = first; dprob != NULL && r < end; r++) {
        double sum = a->acc_dprob ? dprob[r] : 0;
        for (int64_t o = 0; o < out; o++)
            sum += f64_row(&a->dy, r)[o] * ((const double *)a->bias.data)[e * out + o];
        dprob[r] = sum;
    }
}

int gmm_bwd_ref(struct lane *l, const struct gmm_bwd_args *a)
{
    TRY(gmm_bwd_check(a, l->err));
    TRY(gmm_offset_check("gmm_bwd", &a->offset, a->dy.dim[0], l->err));
    int64_t experts = a->offset.dim[0] - 1, rows = a->dy.dim[0];
    const int32_t *offset = a->offset.data;
    for (int64_t e = 0; e < experts; e++) {
        if (present(&a->dx))
            input_gradient(a, e, offset[e], offset[e + 1]);
        if (present(&a->dw))
            weight_gradient(a, e, offset[e], offset[e + 1]);
        bias_gradients(a, e, offset[e], offset[e + 1]);
    }
    for (int64_t r = offset[experts]; r < rows; r++) {
        for (int64_t i = 0; present(&a->dx) && i < a->dx.dim[1]; i++)
            f64_row(&a->dx, r)[i] = 0;
        if (present(&a->dprob) && !a->acc_dprob)
            ((double *)a->dprob.data)[r] = 0;
    }
    return ST_OK;
}
