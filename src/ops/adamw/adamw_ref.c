/* adamw, reference; see adamw.h. */
#include "ops/adamw/adamw_int.h"
#include "ops/adamw/adamw.h"
#include "ops/ops_ref_int.h"

#include <math.h>

static double get(const struct tensor *t, int64_t i)
{
    return t->dtype == DT_BF16 ? (double)bf16_to_f32(((const uint16_t *)t->data)[i]) : ((const double *)t->data)[i];
}

static void put(const struct tensor *t, int64_t i, double x, bool bf16, uint32_t draw)
{
    uint16_t rounded = adamw_round((float)x, draw);
    if (t->dtype == DT_BF16)
        ((uint16_t *)t->data)[i] = rounded;
    else
        ((double *)t->data)[i] = bf16 ? (double)bf16_to_f32(rounded) : x;
}

static void update_one(const struct adamw_args *a, const struct adamw_part *part)
{
    const double *hyper = a->hyper.data, *scale = a->scale.data, *g = part->g.data;
    double *p = part->p.data, *copy = part->copy.data;
    for (int64_t i = 0; i < part->p.dim[0]; i++) {
        double gi = g[i] * scale[1];
        double m = a->beta1 * get(&part->m, i) + (1 - a->beta1) * gi,
               v = a->beta2 * get(&part->v, i) + (1 - a->beta2) * gi * gi;
        double update = (m / hyper[1]) / (sqrt(v / hyper[2]) + a->eps);
        uint32_t draw = 0;
        if (a->bf16) {
            int64_t place = adamw_place_of(&part->at, i);
            draw = adamw_draws(part->at.key, place / 4, hyper[3]).v[place % 4];
        }
        put(&part->m, i, m, a->bf16, draw);
        put(&part->v, i, v, a->bf16, draw >> 16);
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
