/* adamw, reference; see adamw.h. */
#include "ops/adamw/adamw_int.h"
#include "ops/adamw/adamw.h"
#include "ops/ops_ref_int.h"

#include <math.h>

static void update_one(const struct adamw_args *a, const struct adamw_part *part)
{
    const double *hyper = a->hyper.data, *scale = a->scale.data, *g = part->g.data;
    double *p = part->p.data, *m = part->m.data, *v = part->v.data, *copy = part->copy.data;
    for (int64_t i = 0; i < part->p.dim[0]; i++) {
        double gi = g[i] * scale[1];
        m[i] = a->beta1 * m[i] + (1 - a->beta1) * gi;
        v[i] = a->beta2 * v[i] + (1 - a->beta2) * gi * gi;
        double update = (m[i] / hyper[1]) / (sqrt(v[i] / hyper[2]) + a->eps);
        p[i] -= part->rate * hyper[0] * (update + part->decay * p[i]);
        if (copy != NULL)
            copy[i] = p[i];
    }
}

int adamw_ref(struct lane *l, const struct adamw_args *a)
{
    TRY(adamw_check(a, l->err));
    const double *scale = a->scale.data;
    if (scale[2] != 0)
        return ST_OK;
    TRY(adamw_value_check(a, l->err));
    for (int k = 0; k <= a->n_more; k++) {
        struct adamw_part part = adamw_part_at(a, k);
        update_one(a, &part);
        struct quantise_args codes = adamw_quantise(&part);
        if (present(&part.q))
            TRY(quantise_ref(l, &codes));
    }
    return ST_OK;
}
