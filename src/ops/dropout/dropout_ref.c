/* dropout, reference; see dropout.h. */
#include "ops/ops_ref_int.h"
#include "ops/dropout/dropout.h"

int dropout_ref(struct lane *l, const struct dropout_args *a)
{
    TRY(dropout_check(a, l->err));
    const struct dropout_rule *r = &a->rule;
    uint32_t threshold = dropout_threshold(r->p);
    for (int64_t t = 0; t < a->x.dim[0]; t++) {
        const double *x = f64_row(&a->x, t);
        double *y = f64_row(&a->y, t);
        struct draw_place at = {0};
        if (r->p > 0)
            at = dropout_place(r->info.data, t + r->first, r->seq);
        for (int64_t c = 0; c < a->x.dim[1]; c++) {
            bool keep = r->p == 0 || dropout_keep(r->key, threshold, at.step, at.sample, at.pos, c);
            y[c] = keep ? x[c] / (1 - r->p) : 0;
        }
    }
    return ST_OK;
}
