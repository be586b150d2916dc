/* xent, reference; see xent.h. One row at a time: the chunk plays no part here. */
#include "ops/ops_ref_int.h"
#include "ops/xent/xent.h"
#include "ops/xent/xent_int.h"

#include <math.h>

int64_t xent_work_ref(const struct xent_args *a) { return a->w.dim[0] * (int64_t)sizeof(double); }

static void zero(const struct tensor *t)
{
    for (int64_t i = 0; present(t) && i < tensor_elems(t); i++)
        tensor_set(t, i, 0);
}

static void row_logits(const struct xent_args *a, int64_t r, double *z)
{
    for (int64_t v = 0; v < a->w.dim[0]; v++) {
        z[v] = present(&a->bias) ? ((const double *)a->bias.data)[v] : 0;
        for (int64_t c = 0; c < a->w.dim[1]; c++)
            z[v] += f64_row(&a->w, v)[c] * f64_row(&a->h, r)[c];
        if (present(&a->logits))
            f64_row(&a->logits, r)[v] = z[v];
    }
}

static double log_sum_exp(const double *z, int64_t n)
{
    double max = z[0], sum = 0;
    for (int64_t v = 1; v < n; v++)
        max = z[v] > max ? z[v] : max;
    for (int64_t v = 0; v < n; v++)
        sum += exp(z[v] - max);
    return max + log(sum);
}

static void row_gradient(const struct xent_args *a, int64_t r, int64_t label, const double *z, double lse)
{
    double scale = ((const double *)a->scale.data)[0];
    for (int64_t v = 0; v < a->w.dim[0]; v++) {
        double softmax = exp(z[v] - lse);
        double dz = scale * (softmax * (1 + 2 * a->z_loss * lse) - (v == label));
        if (present(&a->dbias))
            ((double *)a->dbias.data)[v] += dz;
        for (int64_t c = 0; c < a->w.dim[1]; c++) {
            f64_row(&a->dh, r)[c] += dz * f64_row(&a->w, v)[c];
            if (present(&a->dw))
                f64_row(&a->dw, v)[c] += dz * f64_row(&a->h, r)[c];
        }
    }
}

int xent_ref(struct lane *l, const struct xent_args *a)
{
    TRY(xent_check(a, l->err));
    TRY(xent_label_check(a, l->err));
    TRY(check_work("xent", &a->work, xent_work_ref(a), l->err));
    double *z = a->work.data, sum = 0, count = 0, *loss = a->loss.data;
    zero(&a->dh);
    if (!a->acc_dw)
        zero(&a->dw);
    if (!a->acc_dbias)
        zero(&a->dbias);
    for (int64_t r = 0; r < a->h.dim[0]; r++) {
        int64_t label = ((const int32_t *)a->label.data)[r];
        double nll = 0;
        row_logits(a, r, z);
        if (label >= 0) {
            double lse = log_sum_exp(z, a->w.dim[0]);
            nll = lse - z[label];
            count++;
            if (present(&a->dh))
                row_gradient(a, r, label, z, lse);
        }
        if (present(&a->nll))
            ((double *)a->nll.data)[r] = nll;
        sum += nll;
    }
    loss[0] = (a->acc_loss ? loss[0] : 0) + sum;
    loss[1] = (a->acc_loss ? loss[1] : 0) + count;
    return ST_OK;
}
