/* quantise, fast CPU version; see quantise.h. Strips of rows of codes in parallel, each block by itself: no result
 * depends on threads. The transpose is quantised from a strip of columns, copied so that its rows are contiguous. */
#include "ops/ops_cpu_int.h"
#include "ops/quantise/quantise.h"
#include "tensor/f8.h"

#include <string.h>

enum { STRIP = 128, WIDTH = 128 }; /* of the copy: a tile that stays in the cache */

/* Bits of the largest magnitude: as integers NaN counts as larger than all else. */
static uint32_t largest(const float *restrict x, int64_t n)
{
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, x + i, sizeof u);
        u &= 0x7fffffffu;
        most = u > most ? u : most;
    }
    return most;
}

static void encode(uint8_t *restrict to, const float *restrict x, int64_t n, float scale, enum dtype type)
{
    if (type == DT_F8_E4M3) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            to[i] = f8_from_f32(x[i] * scale, DT_F8_E4M3);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            to[i] = f8_from_f32(x[i] * scale, DT_F8_E5M2);
    }
}

/* Factor for the values, and the inverse scale. */
static float factor_of(uint32_t amax_bits, enum dtype type, float *inverse)
{
    float amax;
    memcpy(&amax, &amax_bits, sizeof amax);
    if (amax_bits >= 0x7f800000u) {
        *inverse = NAN;
        return 1;
    }
    int k = f8_exponent(amax, type);
    *inverse = f8_power(-k);
    return f8_power(k);
}

/* What is quantised: codes, their scales, and where their rows come from. */
struct target {
    const struct tensor *x, *codes, *scales;
    const int32_t *src; /* rows of x are taken by this map of choices, `k` to a row; NULL: as they are */
    int64_t block, k;
    bool square, transposed;
};

/* Row r of the codes, columns [c, c + n), as contiguous floats; copy has room for n. */
static const float *values(const struct target *t, int64_t r, int64_t c, int64_t n, float *copy)
{
    if (!t->transposed && t->src == NULL)
        return f32_row(t->x, r) + c;
    if (!t->transposed && t->src[r] >= 0)
        return f32_row(t->x, t->src[r] / t->k) + c;
    if (!t->transposed) {
        memset(copy, 0, (size_t)n * sizeof(float));
        return copy;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t row = t->src == NULL ? c + i : t->src[c + i] < 0 ? -1 : t->src[c + i] / t->k;
        copy[i] = row < 0 ? 0.0f : f32_row(t->x, row)[r];
    }
    return copy;
}

/* Codes of a rectangle of at most STRIP x WIDTH under one scale, or under one for each row. */
static void one_tile(const struct target *t, int64_t r0, int64_t rows, int64_t c0, int64_t cols, bool by_row)
{
    float copy[WIDTH], *scale = t->scales->data;
    uint8_t *codes = t->codes->data;
    uint32_t amax = 0;
    float inverse = 0, factor = 1;
    for (int64_t r = r0; !by_row && r < r0 + rows; r++) {
        uint32_t most = largest(values(t, r, c0, cols, copy), cols);
        amax = most > amax ? most : amax;
    }
    if (!by_row)
        factor = factor_of(amax, t->codes->dtype, &inverse);
    for (int64_t r = r0; r < r0 + rows; r++) {
        const float *x = values(t, r, c0, cols, copy);
        if (by_row)
            factor = factor_of(largest(x, cols), t->codes->dtype, &inverse);
        scale[f8_scale_at(t->codes, t->block, t->square, r, c0)] = inverse;
        encode(codes + r * t->codes->dim[1] + c0, x, cols, factor, t->codes->dtype);
    }
}

/* One scale for everything. */
static void whole(const struct target *t)
{
    const struct tensor *x = t->x;
    int64_t rows = t->codes->dim[0], cols = t->codes->dim[1];
    float *scale = t->scales->data;
    uint32_t amax = 0;
#pragma omp parallel for schedule(static) reduction(max : amax) if (rows * cols > 16384)
    for (int64_t r = 0; r < x->dim[0]; r++) {
        uint32_t most = largest(f32_row(x, r), x->dim[1]);
        amax = most > amax ? most : amax;
    }
    float factor = factor_of(amax, t->codes->dtype, &scale[0]);
#pragma omp parallel for schedule(static) if (rows * cols > 16384)
    for (int64_t r = 0; r < rows; r++) {
        float copy[WIDTH];
        for (int64_t c = 0; c < cols; c += WIDTH) {
            int64_t n = min_i64(WIDTH, cols - c);
            encode((uint8_t *)t->codes->data + r * cols + c, values(t, r, c, n, copy), n, factor, t->codes->dtype);
        }
    }
}

static void quantise_one(const struct target *t)
{
    int64_t rows = t->codes->dim[0], cols = t->codes->dim[1], strip = t->square ? t->block : STRIP;
    memset(t->scales->data, 0, (size_t)tensor_bytes(t->scales));
    if (t->block == 0 && rows > 0 && cols > 0)
        whole(t);
#pragma omp parallel for schedule(static) if (rows * cols > 16384)
    for (int64_t r = 0; r < (t->block > 0 ? rows : 0); r += strip)
        for (int64_t c = 0; c < cols; c += t->block)
            one_tile(t, r, min_i64(strip, rows - r), c, min_i64(t->block, cols - c), !t->square);
}

int CPU_NAME(quantise_cpu)(struct lane *l, const struct quantise_args *a)
{
    TRY(quantise_check(a, l->err));
    if (a->block > WIDTH)
        return err_set(l->err, ST_UNSUPPORTED, "quantise: blocks of %lld values; the cpu device has up to %d",
                       (long long)a->block, WIDTH);
    if (present(&a->q))
        quantise_one(&(struct target){.x = &a->x,
                                      .codes = &a->q,
                                      .scales = &a->qs,
                                      .src = a->src.data,
                                      .k = a->k,
                                      .block = a->block,
                                      .square = a->square});
    if (present(&a->t))
        quantise_one(&(struct target){.x = &a->x,
                                      .codes = &a->t,
                                      .scales = &a->ts,
                                      .src = a->src.data,
                                      .k = a->k,
                                      .block = a->block,
                                      .square = a->square,
                                      .transposed = true});
    return ST_OK;
}
