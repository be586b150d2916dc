/* ring_merge and ring_add, reference; see ring.h. */
#include "ops/ops_ref_int.h"
#include "ops/ring/ring.h"

#include <math.h>

/* Element [i, j, k] of the first three dimensions. */
static double *at(const struct tensor *t, int64_t i, int64_t j, int64_t k)
{
    return (double *)t->data + i * t->stride[0] + j * t->stride[1] + k * t->stride[2];
}

static void merge_row(const struct ring_merge_args *a, int64_t b, int64_t i, int64_t h)
{
    const double *o = at(&a->o, b, i, h), lse = *at(&a->lse, b, h, i);
    double *sum = at(&a->sum, b, i, h), *total = at(&a->total, b, h, i);
    double before = a->acc_total ? *total : -INFINITY, top = fmax(before, lse), all = top, old = 0, add = 0;
    if (top != -INFINITY) {
        all = top + log(exp(before - top) + exp(lse - top));
        old = exp(before - all);
        add = exp(lse - all);
    }
    for (int64_t c = 0; c < a->o.dim[3]; c++) {
        sum[c] = (old != 0 ? old * sum[c] : 0) + (add != 0 ? add * o[c] : 0);
        if (present(&a->y))
            at(&a->y, b, i, h)[c] = sum[c];
    }
    *total = all;
}

int ring_merge_ref(struct lane *l, const struct ring_merge_args *a)
{
    TRY(ring_merge_check(a, l->err));
    for (int64_t b = 0; b < a->o.dim[0]; b++)
        for (int64_t i = 0; i < a->o.dim[1]; i++)
            for (int64_t h = 0; h < a->o.dim[2]; h++)
                merge_row(a, b, i, h);
    return ST_OK;
}

int ring_add_ref(struct lane *l, const struct ring_add_args *a)
{
    TRY(ring_add_check(a, l->err));
    for (int64_t r = 0; r < a->x.dim[0]; r++)
        for (int64_t c = 0; c < a->x.dim[1]; c++)
            f64_row(&a->y, r)[c] = (a->acc_y ? f64_row(&a->y, r)[c] : 0) + f64_row(&a->x, r)[c];
    return ST_OK;
}
