/* adamw, reference; see adamw.h. */
#include "ops/adamw/adamw_int.h"
#include "ops/ops_ref_int.h"

#include <math.h>

int adamw_ref(struct lane *l, const struct adamw_args *a)
{
    TRY(adamw_check(a, l->err));
    const double *hyper = a->hyper.data, *scale = a->scale.data, *g = a->g.data;
    double *p = a->p.data, *m = a->m.data, *v = a->v.data;
    if (scale[2] != 0)
        return ST_OK;
    TRY(adamw_value_check(a, l->err));
    for (int64_t i = 0; i < a->p.dim[0]; i++) {
        double gi = g[i] * scale[1];
        m[i] = a->beta1 * m[i] + (1 - a->beta1) * gi;
        v[i] = a->beta2 * v[i] + (1 - a->beta2) * gi * gi;
        double update = (m[i] / hyper[1]) / (sqrt(v[i] / hyper[2]) + a->eps);
        p[i] -= hyper[0] * (update + a->decay * p[i]);
    }
    return ST_OK;
}
