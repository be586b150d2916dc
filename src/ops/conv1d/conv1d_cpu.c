/* conv1d, fast CPU version; see conv1d.h. The weights are first laid out by tap, so that a vector
 * holds neighbouring channels. Forward: rows in parallel. Backward: a unit is a block of rows times
 * a stripe of channels; it makes dpre of its rows and of the W-1 rows after them, which reach back
 * into it. */
#include "ops/cpu_math.h"
#include "ops/conv1d/conv1d.h"
#include "ops/ops_cpu_int.h"

#include <string.h>

enum { STRIPE = 128 };

/* Rows of [init | x] as both directions read them. */
struct source {
    const struct tensor *x, *init, *doc_start;
    const float *taps; /* [W][C] */
    const float *bias; /* or NULL */
    int64_t width, channels;
    bool fresh;
};

/* Row t of the input, from channel c on; NULL: zeros. */
static inline const float *input_row(const struct source *s, int64_t b, int64_t t, int64_t c)
{
    if (t >= 0)
        return (const float *)s->x->data + b * s->x->stride[0] + t * s->x->stride[1] + c;
    if (!present(s->init) || s->fresh)
        return NULL;
    return (const float *)s->init->data + b * s->init->stride[0] + (t + s->width - 1) * s->init->stride[1] + c;
}

/* The row seen through tap k by row t, or NULL. */
static inline const float *tap_row(const struct source *s, int64_t b, int64_t t, int64_t k, int64_t c)
{
    int64_t j = t - (s->width - 1) + k;
    if (present(s->doc_start) && j < ((const int32_t *)s->doc_start->data)[b * s->doc_start->stride[0] + t])
        return NULL;
    return input_row(s, b, j, c);
}

static void lay_out_taps(const struct tensor *w, float *taps)
{
    int64_t channels = w->dim[0], width = w->dim[1];
    const float *from = w->data;
    for (int64_t c = 0; c < channels; c++)
        for (int64_t k = 0; k < width; k++)
            taps[k * channels + c] = from[c * w->stride[0] + k];
}

/* pre of n channels of row t. The order of the sum (bias, then taps ascending) is the same on both
 * paths. */
static void pre_row(const struct source *s, int64_t b, int64_t t, int64_t c, int64_t n, float *pre)
{
    const float *bias = s->bias ? s->bias + c : NULL, *row[CONV1D_MAX_WIDTH];
    bool all = s->width == 4;
    for (int64_t k = 0; k < s->width; k++) {
        row[k] = tap_row(s, b, t, k, c);
        all = all && row[k] != NULL;
    }
    if (all) {
        const float *w0 = s->taps + c, *w1 = w0 + s->channels, *w2 = w1 + s->channels, *w3 = w2 + s->channels;
        const float *x0 = row[0], *x1 = row[1], *x2 = row[2], *x3 = row[3];
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            float sum = (bias ? bias[i] : 0.0f) + w0[i] * x0[i];
            sum += w1[i] * x1[i];
            sum += w2[i] * x2[i];
            pre[i] = sum + w3[i] * x3[i];
        }
        return;
    }
    for (int64_t i = 0; i < n; i++)
        pre[i] = bias ? bias[i] : 0.0f;
    for (int64_t k = 0; k < s->width; k++) {
        const float *w = s->taps + k * s->channels + c, *x = row[k];
        if (x == NULL)
            continue;
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            pre[i] += w[i] * x[i];
    }
}

int64_t CPU_NAME(conv1d_fwd_work_cpu)(const struct conv1d_fwd_args *a)
{
    return a->w.dim[0] * a->w.dim[1] * (int64_t)sizeof(float);
}

static void keep_tail(const struct conv1d_fwd_args *a, const struct source *s, int64_t b)
{
    int64_t before = s->width - 1, rows = a->x.dim[1];
    size_t bytes = (size_t)s->channels * sizeof(float);
    /* Ascending rows read at or behind where they write, so final may be init. */
    for (int64_t k = 0; k < before; k++) {
        const float *from = input_row(s, b, rows - before + k, 0);
        float *to = f32_row(&a->final, b * before + k);
        if (from != NULL && from != to)
            memcpy(to, from, bytes);
        else if (from == NULL)
            memset(to, 0, bytes);
    }
}

int CPU_NAME(conv1d_fwd_cpu)(struct lane *l, const struct conv1d_fwd_args *a)
{
    TRY(conv1d_fwd_check(a, l->err));
    TRY(check_work("conv1d_fwd", &a->work, CPU_NAME(conv1d_fwd_work_cpu)(a), l->err));
    int64_t batch = a->x.dim[0], rows = a->x.dim[1], channels = a->x.dim[2];
    lay_out_taps(&a->w, a->work.data);
    struct source s = {.x = &a->x,
                       .init = &a->init,
                       .doc_start = &a->doc_start,
                       .taps = a->work.data,
                       .bias = a->bias.data,
                       .width = a->w.dim[1],
                       .channels = channels,
                       .fresh = present(&a->start) && *(const int64_t *)a->start.data == 0};
#pragma omp parallel for schedule(static) if (batch * rows * channels > 8192)
    for (int64_t r = 0; r < batch * rows; r++) {
        float *y = f32_row(&a->y, r);
        for (int64_t c = 0; c < channels; c += STRIPE) {
            int64_t n = min_i64(STRIPE, channels - c);
            pre_row(&s, r / rows, r % rows, c, n, y + c);
            if (!a->silu)
                continue;
#pragma omp simd
            for (int64_t i = c; i < c + n; i++)
                y[i] = y[i] * fast_sigmoidf(y[i]);
        }
    }
    for (int64_t b = 0; present(&a->final) && b < batch; b++)
        keep_tail(a, &s, b);
    return ST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Taps, then per block of rows the sums of dw (by tap) and dbias. */
int64_t CPU_NAME(conv1d_bwd_work_cpu)(const struct conv1d_bwd_args *a)
{
    int64_t blocks = a->x.dim[0] * ceil_div(a->x.dim[1], CONV1D_BLOCK), channels = a->w.dim[0], width = a->w.dim[1];
    return (channels * width + blocks * (width + 1) * channels) * (int64_t)sizeof(float);
}

static void dpre_row(const struct conv1d_bwd_args *a, const struct source *s, int64_t b, int64_t t, int64_t c,
                     int64_t n, float *out)
{
    const float *dy = f32_row(&a->dy, b * a->x.dim[1] + t) + c;
    if (!a->silu) {
        memcpy(out, dy, (size_t)n * sizeof(float));
        return;
    }
    pre_row(s, b, t, c, n, out);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float sig = fast_sigmoidf(out[i]);
        out[i] = dy[i] * sig * (1.0f + out[i] * (1.0f - sig));
    }
}

/* Gradient of input row j: from rows t = j .. j+W-1 that see it, taps descending. */
static void dinput_row(const struct source *s, const float (*dpre)[STRIPE], int64_t b, int64_t j, int64_t from,
                       int64_t to, int64_t c, int64_t n, float *out)
{
    float sum[STRIPE] = {0};
    for (int64_t t = max_i64(j, from); t < min_i64(to, j + s->width); t++) {
        const float *w = s->taps + (j - t + s->width - 1) * s->channels + c, *d = dpre[t - from];
        if (present(s->doc_start) && j < ((const int32_t *)s->doc_start->data)[b * s->doc_start->stride[0] + t])
            continue;
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            sum[i] += w[i] * d[i];
    }
    memcpy(out, sum, (size_t)n * sizeof(float));
}

static void add_weight_sums(const struct source *s, const float (*dpre)[STRIPE], int64_t b, int64_t from, int64_t to,
                            int64_t c, int64_t n, float *partial)
{
    for (int64_t k = 0; k <= s->width; k++) {
        float sum[STRIPE] = {0};
        for (int64_t t = from; t < to; t++) {
            const float *d = dpre[t - from], *x = k < s->width ? tap_row(s, b, t, k, c) : NULL;
            if (k == s->width) {
#pragma omp simd
                for (int64_t i = 0; i < n; i++)
                    sum[i] += d[i];
            } else if (x != NULL) {
#pragma omp simd
                for (int64_t i = 0; i < n; i++)
                    sum[i] += d[i] * x[i];
            }
        }
        memcpy(partial + k * s->channels + c, sum, (size_t)n * sizeof(float));
    }
}

static void bwd_unit(const struct conv1d_bwd_args *a, const struct source *s, int64_t b, int64_t block, int64_t c,
                     float *partial)
{
    float dpre[CONV1D_BLOCK + CONV1D_MAX_WIDTH - 1][STRIPE];
    int64_t rows = a->x.dim[1], n = min_i64(STRIPE, s->channels - c), before = s->width - 1;
    int64_t from = block * CONV1D_BLOCK, to = min_i64(rows, from + CONV1D_BLOCK), beyond = min_i64(rows, to + before);
    for (int64_t t = from; t < beyond; t++)
        dpre_row(a, s, b, t, c, n, dpre[t - from]);
    for (int64_t j = from; j < to; j++)
        dinput_row(s, (const float(*)[STRIPE])dpre, b, j, from, beyond, c, n, f32_row(&a->dx, b * rows + j) + c);
    for (int64_t k = 0; block == 0 && present(&a->dinit) && k < before; k++)
        dinput_row(s, (const float(*)[STRIPE])dpre, b, k - before, 0, beyond, c, n,
                   f32_row(&a->dinit, b * before + k) + c);
    add_weight_sums(s, (const float(*)[STRIPE])dpre, b, from, to, c, n, partial);
}

static void finish_weights(const struct conv1d_bwd_args *a, const float *partial, int64_t blocks)
{
    int64_t channels = a->w.dim[0], width = a->w.dim[1], each = (width + 1) * channels;
    float *dw = a->dw.data, *dbias = a->dbias.data;
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < channels; c++) {
        for (int64_t k = 0; k < width; k++) {
            float *out = dw + c * a->dw.stride[0] + k, sum = a->acc_dw ? *out : 0.0f;
            for (int64_t u = 0; u < blocks; u++)
                sum += partial[u * each + k * channels + c];
            *out = sum;
        }
        float sum = dbias != NULL && a->acc_dbias ? dbias[c] : 0.0f;
        for (int64_t u = 0; dbias != NULL && u < blocks; u++)
            sum += partial[u * each + width * channels + c];
        if (dbias != NULL)
            dbias[c] = sum;
    }
}

int CPU_NAME(conv1d_bwd_cpu)(struct lane *l, const struct conv1d_bwd_args *a)
{
    TRY(conv1d_bwd_check(a, l->err));
    TRY(check_work("conv1d_bwd", &a->work, CPU_NAME(conv1d_bwd_work_cpu)(a), l->err));
    int64_t batch = a->x.dim[0], channels = a->x.dim[2], width = a->w.dim[1];
    int64_t blocks = ceil_div(a->x.dim[1], CONV1D_BLOCK), stripes = ceil_div(channels, STRIPE);
    float *taps = a->work.data, *partial = taps + channels * width;
    lay_out_taps(&a->w, taps);
    struct source s = {.x = &a->x,
                       .init = &a->init,
                       .doc_start = &a->doc_start,
                       .taps = taps,
                       .bias = a->bias.data,
                       .width = width,
                       .channels = channels};
#pragma omp parallel for schedule(dynamic)
    for (int64_t u = 0; u < batch * blocks * stripes; u++) {
        int64_t block = u / stripes;
        bwd_unit(a, &s, block / blocks, block % blocks, u % stripes * STRIPE, partial + block * (width + 1) * channels);
    }
    for (int64_t r = 0; blocks == 0 && present(&a->dinit) && r < rows_of(&a->dinit); r++)
        memset(f32_row(&a->dinit, r), 0, (size_t)channels * sizeof(float));
    finish_weights(a, partial, batch * blocks);
    return ST_OK;
}
