/* The health numbers of a mix, for any real type. Private to ops/mhc. */
#ifndef BRAID_OPS_MHC_HEALTH_INT_H
#define BRAID_OPS_MHC_HEALTH_INT_H

#include "ops/check.h"
#include "ops/mhc/mhc.h"
#include "ops/op.h"

#include <math.h>
#include <string.h>

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

/* Product of the d channels of two streams, of the type of y. */
typedef double mhc_health_dot(const void *p, const void *q, int64_t d);

static inline void mhc_health_cosines(const struct tensor *t, int64_t n, int64_t row, mhc_health_dot *dot,
                                      struct mhc_health_sums *s)
{
    int64_t d = t->dim[1] / n, step = d * (int64_t)dtype_bytes(t->dtype);
    const char *y = t->dtype == DT_F64 ? (const char *)f64_row(t, row) : (const char *)f32_row(t, row);
    double square[MHC_MAX_STREAMS];
    for (int64_t i = 0; i < n; i++) {
        square[i] = dot(y + i * step, y + i * step, d);
        for (int64_t j = 0; j < i; j++) {
            double length = sqrt(square[i] * square[j]);
            s->cosines += length > 0 ? dot(y + i * step, y + j * step, d) / length : 0;
            s->pairs++;
        }
    }
}

/* count values from column `first` of a row, as doubles; and back. */
static inline void mhc_health_load(const struct tensor *t, int64_t row, int64_t first, int64_t count, double *out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = t->dtype == DT_F64 ? f64_row(t, row)[first + i] : (double)f32_row(t, row)[first + i];
}
static inline void mhc_health_store(const struct tensor *t, int64_t row, int64_t count, const double *in)
{
    for (int64_t i = 0; i < count; i++) {
        if (t->dtype == DT_F64)
            f64_row(t, row)[i] = in[i];
        else
            f32_row(t, row)[i] = (float)in[i];
    }
}

/* product = mix times the product so far */
static inline void mhc_health_product(int64_t n, const double *mix, const double *before, double *product)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t k = 0; k < n; k++)
                sum += mix[i * n + k] * before[k * n + j];
            product[i * n + j] = sum;
        }
}

/* Row s of the sample is row s * stride of the batch; with fewer rows the last are left as identity. */
static inline void mhc_health_of(const struct mhc_health_args *a, int layer, mhc_health_dot *dot)
{
    const struct tensor *coef = &a->layer[layer].coef, *before = layer > 0 ? &a->comp : &a->comp_in;
    int64_t n = a->rule.streams, rows = coef->dim[0];
    int64_t stride = rows > MHC_HEALTH_ROWS ? rows / MHC_HEALTH_ROWS : 1;
    struct mhc_health_sums sums = {0};
    for (int64_t s = 0; s < MHC_HEALTH_ROWS; s++) {
        double res[MHC_MAX_STREAMS * MHC_MAX_STREAMS], mix[MHC_MAX_STREAMS * MHC_MAX_STREAMS],
            product[MHC_MAX_STREAMS * MHC_MAX_STREAMS];
        int64_t row = s * stride;
        if (row < rows)
            mhc_health_load(coef, row, 2 * n, n * n, res);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++)
                mix[i * n + j] = row >= rows ? i == j : a->rule.profile == MHC_D ? res[j * n + i] : res[i * n + j];
        if (present(before)) {
            mhc_health_load(before, s, 0, n * n, res);
            mhc_health_product(n, mix, res, product);
        } else
            memcpy(product, mix, (size_t)(n * n) * sizeof *product);
        mhc_health_store(&a->comp, s, n * n, product);
        if (row < rows) {
            mhc_health_lines(n, mix, product, &sums);
            mhc_health_cosines(&a->layer[layer].y, n, row, dot, &sums);
        }
    }
    for (int i = 0; i < MHC_HEALTH_ITEMS; i++) {
        double value = i < MHC_SIMILARITY ? sums.worst[i] : sums.pairs > 0 ? sums.cosines / (double)sums.pairs : 0;
        double *out = a->layer[layer].out[i].data;
        out[0] = value + (a->layer[layer].acc[i] ? out[0] : 0);
    }
}

static inline void mhc_health(const struct mhc_health_args *a, mhc_health_dot *dot)
{
    for (int l = 0; l < a->layers; l++)
        mhc_health_of(a, l, dot);
}

#endif
