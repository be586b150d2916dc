/* shard8, fast CPU version; see shard8.h. Blocks, rows and tiles in parallel, each by itself: no result depends on
 * threads. */
#include "ops/ops_cpu_int.h"
#include "ops/shard8/shard8.h"

#include <string.h>

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

/* The same in a rectangle: own rows [r0, r1), columns [c0, c1). */
static uint32_t rectangle(const struct tensor *x, int64_t r0, int64_t r1, int64_t c0, int64_t c1)
{
    uint32_t most = 0;
    for (int64_t r = r0; r < r1; r++) {
        uint32_t row = largest(f32_row(x, r) + c0, c1 - c0);
        most = row > most ? row : most;
    }
    return most;
}

int CPU_NAME(shard8_most_cpu)(struct lane *l, const struct shard8_most_args *a)
{
    TRY(shard8_most_check(a, l->err));
    int64_t n = a->x.dim[0], cols = a->x.dim[1], block = a->block, across = a->most.dim[1], down = a->most.dim[0];
    uint32_t *most = a->most.data, all = 0;
    if (block == 0) {
#pragma omp parallel for schedule(static) reduction(max : all) if (n * cols > 16384)
        for (int64_t r = 0; r < n; r++) {
            uint32_t row = largest(f32_row(&a->x, r), cols);
            all = row > all ? row : all;
        }
        most[0] = all;
        return ST_OK;
    }
    int64_t before = a->first % block; /* rows of the first block that others have */
#pragma omp parallel for schedule(static) if (n * cols > 16384)
    for (int64_t b = 0; b < down * across; b++) {
        int64_t r = b / across * block - before, c = b % across * block;
        most[b] = rectangle(&a->x, max_i64(r, 0), min_i64(n, r + block), c, min_i64(cols, c + block));
    }
    return ST_OK;
}

/* The inverse scale of block [i, j]. */
static float inverse_of(const struct shard8_codes_args *a, int64_t i, int64_t j)
{
    int64_t down = a->most.dim[1], across = a->most.dim[2];
    const uint32_t *most = a->most.data;
    uint32_t bits = 0;
    float amax;
    for (int64_t r = shard8_first(i, a->piece, a->block), end = shard8_end(i, a->piece, a->block, a->most.dim[0]);
         r < end; r++) {
        uint32_t own = most[(r * down + shard8_row(i, r, a->piece, a->block)) * across + j];
        bits = own > bits ? own : bits;
    }
    memcpy(&amax, &bits, sizeof amax);
    return bits >= 0x7f800000u ? NAN : f8_power(-f8_exponent(amax, DT_F8_E4M3));
}

static void encode(uint8_t *restrict to, const float *restrict x, int64_t n, float factor)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        to[i] = f8_from_f32(x[i] * factor, DT_F8_E4M3);
}

static void write_scales(const struct shard8_codes_args *a, int64_t i, int64_t j)
{
    bool square = a->block > 0;
    int64_t cols = a->x.dim[1], q = f8_scale_stride(a->rows, cols, a->block, square),
            t = f8_scale_stride(cols, a->rows, a->block, square);
    float inverse = inverse_of(a, i, j);
    ((float *)a->qs.data)[i * q + j] = inverse;
    if (present(&a->ts))
        ((float *)a->ts.data)[j * t + i] = inverse;
}

int CPU_NAME(shard8_codes_cpu)(struct lane *l, const struct shard8_codes_args *a)
{
    TRY(shard8_codes_check(a, l->err));
    int64_t n = a->x.dim[0], cols = a->x.dim[1], block = a->block, width = block > 0 ? block : max_i64(cols, 1),
            blocks = a->rows == 0 || cols == 0 ? 0
                     : block > 0               ? ceil_div(a->rows, block)
                                               : 1;
    int64_t q = f8_scale_stride(a->rows, cols, block, block > 0);
    memset(a->qs.data, 0, (size_t)tensor_bytes(&a->qs));
    if (present(&a->ts))
        memset(a->ts.data, 0, (size_t)tensor_bytes(&a->ts));
    for (int64_t i = 0; i < blocks; i++)
        for (int64_t j = 0; j < a->most.dim[2]; j++)
            write_scales(a, i, j);
#pragma omp parallel for schedule(static) if (n * cols > 16384)
    for (int64_t r = 0; r < n; r++) {
        const float *scale = (const float *)a->qs.data + (block > 0 ? (a->first + r) / block * q : 0);
        for (int64_t c = 0; c < cols; c += width) {
            float inverse = scale[c / width], factor = isnan(inverse) ? 1.0f : 1.0f / inverse; /* a power of two */
            encode((uint8_t *)a->q.data + r * cols + c, f32_row(&a->x, r) + c, min_i64(width, cols - c), factor);
        }
    }
    return ST_OK;
}

int CPU_NAME(shard8_turn_cpu)(struct lane *l, const struct shard8_turn_args *a)
{
    enum { TILE = 64 };
    TRY(shard8_turn_check(a, l->err));
    int64_t rows = a->q.dim[0], cols = a->q.dim[1], down = ceil_div(rows, TILE), across = ceil_div(cols, TILE);
#pragma omp parallel for schedule(static) if (rows * cols > 16384)
    for (int64_t k = 0; k < down * across; k++) {
        int64_t r0 = k % down * TILE, c0 = k / down * TILE, n = min_i64(TILE, rows - r0);
        for (int64_t c = c0; c < min_i64(cols, c0 + TILE); c++) {
            const uint8_t *from = (const uint8_t *)a->q.data + r0 * cols + c;
            uint8_t *to = (uint8_t *)a->t.data + c * rows + r0;
            for (int64_t r = 0; r < n; r++)
                to[r] = from[r * cols];
        }
    }
    return ST_OK;
}
