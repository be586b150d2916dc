/* conv1d, reference; see conv1d.h. */
#include "ops/ops_ref_int.h"
#include "ops/conv1d/conv1d.h"

#include <math.h>
#include <string.h>

/* What both directions read: element (t, c) of [init | x], t >= -(W-1). */
struct source {
    const struct tensor *x, *init, *doc_start;
    int64_t width;
    bool fresh; /* init counts as zeros */
};

static double input_at(const struct source *s, int64_t b, int64_t t, int64_t c)
{
    if (t >= 0)
        return ((const double *)s->x->data)[b * s->x->stride[0] + t * s->x->stride[1] + c];
    if (!present(s->init) || s->fresh)
        return 0;
    return ((const double *)s->init->data)[b * s->init->stride[0] + (t + s->width - 1) * s->init->stride[1] + c];
}

static int64_t first_seen(const struct source *s, int64_t b, int64_t t)
{
    return present(s->doc_start) ? ((const int32_t *)s->doc_start->data)[b * s->doc_start->stride[0] + t] : INT64_MIN;
}

static double pre_at(const struct source *s, const struct tensor *w, const struct tensor *bias, int64_t b, int64_t t,
                     int64_t c)
{
    double sum = present(bias) ? ((const double *)bias->data)[c] : 0;
    int64_t first = first_seen(s, b, t);
    for (int64_t k = 0; k < s->width; k++) {
        int64_t j = t - (s->width - 1) + k;
        if (j >= first)
            sum += ((const double *)w->data)[c * w->stride[0] + k] * input_at(s, b, j, c);
    }
    return sum;
}

int conv1d_fwd_ref(struct lane *l, const struct conv1d_fwd_args *a)
{
    TRY(conv1d_fwd_check(a, l->err));
    int64_t rows = a->x.dim[1], channels = a->x.dim[2], width = a->w.dim[1], before = width - 1;
    bool fresh = present(&a->start) && *(const int64_t *)a->start.data == 0;
    struct source s = {.x = &a->x, .init = &a->init, .doc_start = &a->doc_start, .width = width, .fresh = fresh};
    for (int64_t b = 0; b < a->x.dim[0]; b++) {
        for (int64_t t = 0; t < rows; t++) {
            double *y = f64_row(&a->y, b * rows + t);
            for (int64_t c = 0; c < channels; c++) {
                double pre = pre_at(&s, &a->w, &a->bias, b, t, c);
                y[c] = a->silu ? pre / (1 + exp(-pre)) : pre;
            }
        }
        /* Ascending rows read at or behind where they write, so final may be init. */
        for (int64_t k = 0; present(&a->final) && k < before; k++)
            for (int64_t c = 0; c < channels; c++)
                f64_row(&a->final, b * before + k)[c] = input_at(&s, b, rows - before + k, c);
    }
    return ST_OK;
}

static void clear(const struct tensor *t)
{
    for (int64_t r = 0; present(t) && r < rows_of(t); r++)
        memset(f64_row(t, r), 0, (size_t)cols_of(t) * sizeof(double));
}

static void spread(const struct conv1d_bwd_args *a, const struct source *s, int64_t b, int64_t t, int64_t c,
                   double dpre)
{
    int64_t width = s->width, first = first_seen(s, b, t);
    double *dw = (double *)a->dw.data + c * a->dw.stride[0];
    if (present(&a->dbias))
        ((double *)a->dbias.data)[c] += dpre;
    for (int64_t k = 0; k < width; k++) {
        int64_t j = t - (width - 1) + k;
        double w = ((const double *)a->w.data)[c * a->w.stride[0] + k];
        if (j < first)
            continue;
        dw[k] += dpre * input_at(s, b, j, c);
        if (j >= 0)
            f64_row(&a->dx, b * a->x.dim[1] + j)[c] += w * dpre;
        else if (present(&a->dinit))
            f64_row(&a->dinit, b * (width - 1) + j + width - 1)[c] += w * dpre;
    }
}

int conv1d_bwd_ref(struct lane *l, const struct conv1d_bwd_args *a)
{
    TRY(conv1d_bwd_check(a, l->err));
    struct source s = {.x = &a->x, .init = &a->init, .doc_start = &a->doc_start, .width = a->w.dim[1]};
    clear(&a->dx);
    clear(&a->dinit);
    if (!a->acc_dw)
        clear(&a->dw);
    for (int64_t c = 0; present(&a->dbias) && !a->acc_dbias && c < a->x.dim[2]; c++)
        ((double *)a->dbias.data)[c] = 0;
    for (int64_t b = 0; b < a->x.dim[0]; b++)
        for (int64_t t = 0; t < a->x.dim[1]; t++)
            for (int64_t c = 0; c < a->x.dim[2]; c++) {
                double pre = pre_at(&s, &a->w, &a->bias, b, t, c), sig = 1 / (1 + exp(-pre));
                double slope = a->silu ? sig * (1 + pre * (1 - sig)) : 1;
                spread(a, &s, b, t, c, f64_row(&a->dy, b * a->x.dim[1] + t)[c] * slope);
            }
    return ST_OK;
}
