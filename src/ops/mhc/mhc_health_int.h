/* The health numbers of a mix, for any real type: a few rows, so tensor_get and _set are fast enough.
 * Private to ops/mhc. */
#ifndef BRAID_OPS_MHC_HEALTH_INT_H
#define BRAID_OPS_MHC_HEALTH_INT_H

#include "ops/check.h"
#include "ops/ops.h"

#include <math.h>

struct mhc_health_sums {
    double worst[MHC_SIMILARITY], cosines;
    int64_t pairs;
};

/* |sum - 1| of the lines of one mix and the gains of the product, rows then columns. */
static inline void mhc_health_lines(int64_t n, const double *mix, const double *product, struct mhc_health_sums *s)
{
    for (int64_t i = 0; i < n; i++) {
        double sum[2] = {0, 0}, gain[2] = {0, 0};
        for (int64_t j = 0; j < n; j++) {
            sum[0] += mix[i * n + j];
            sum[1] += mix[j * n + i];
            gain[0] += fabs(product[i * n + j]);
            gain[1] += fabs(product[j * n + i]);
        }
        for (int side = 0; side < 2; side++) {
            s->worst[MHC_ROW_ERROR + side] = fmax(s->worst[MHC_ROW_ERROR + side], fabs(sum[side] - 1));
            s->worst[MHC_GAIN_FORWARD + side] = fmax(s->worst[MHC_GAIN_FORWARD + side], gain[side]);
        }
    }
}

static inline void mhc_health_cosines(const struct mhc_health_args *a, int64_t row, struct mhc_health_sums *s)
{
    int64_t n = a->rule.streams, d = a->y.dim[1] / n;
    bool wide = a->y.dtype == DT_F64;
    const double *y64 = wide ? f64_row(&a->y, row) : NULL;
    const float *y32 = wide ? NULL : f32_row(&a->y, row);
    double dot[MHC_MAX_STREAMS * MHC_MAX_STREAMS] = {0};
    for (int64_t c = 0; c < d; c++)
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j <= i; j++)
                dot[i * n + j] += wide ? y64[i * d + c] * y64[j * d + c] : (double)y32[i * d + c] * (double)y32[j * d + c];
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < i; j++) {
            double length = sqrt(dot[i * n + i] * dot[j * n + j]);
            s->cosines += length > 0 ? dot[i * n + j] / length : 0;
            s->pairs++;
        }
}

/* Row s of the sample is row s * stride of the batch; with fewer rows the last are left as identity. */
static inline void mhc_health(const struct mhc_health_args *a)
{
    int64_t n = a->rule.streams, rows = a->coef.dim[0];
    int64_t stride = rows > MHC_HEALTH_ROWS ? rows / MHC_HEALTH_ROWS : 1;
    struct mhc_health_sums sums = {0};
    for (int64_t s = 0; s < MHC_HEALTH_ROWS; s++) {
        double mix[MHC_MAX_STREAMS * MHC_MAX_STREAMS], product[MHC_MAX_STREAMS * MHC_MAX_STREAMS];
        int64_t row = s * stride;
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++) {
                int64_t at = row * mhc_logits(n) + 2 * n + (a->rule.profile == MHC_D ? j * n + i : i * n + j);
                mix[i * n + j] = row < rows ? tensor_get(&a->coef, at) : i == j;
            }
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++) {
                double sum = present(&a->comp_in) ? 0 : mix[i * n + j];
                for (int64_t k = 0; present(&a->comp_in) && k < n; k++)
                    sum += mix[i * n + k] * tensor_get(&a->comp_in, (s * n + k) * n + j);
                product[i * n + j] = sum;
                tensor_set(&a->comp, (s * n + i) * n + j, sum);
            }
        if (row < rows) {
            mhc_health_lines(n, mix, product, &sums);
            mhc_health_cosines(a, row, &sums);
        }
    }
    for (int i = 0; i < MHC_HEALTH_ITEMS; i++) {
        double value = i < MHC_SIMILARITY ? sums.worst[i] : sums.pairs > 0 ? sums.cosines / (double)sums.pairs : 0;
        double *out = a->out[i].data;
        out[0] = value + (a->acc_out ? out[0] : 0);
    }
}

#endif
