/* row8, fast CPU version; see row8.h. Rows in parallel, each block by itself. */
#include "ops/ops_cpu_int.h"
#include "ops/row8/row8.h"
#include "tensor/f8.h"

#include <string.h>

static void pack_block(const float *restrict x, int64_t n, uint8_t *restrict code, uint8_t *scale)
{
    uint32_t most = 0; /* as integers NaN counts as larger than all else */
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, x + i, sizeof u);
        u &= 0x7fffffffu;
        most = u > most ? u : most;
    }
    float amax;
    memcpy(&amax, &most, sizeof amax);
    bool finite = most < 0x7f800000u;
    int k = finite ? f8_exponent(amax, DT_F8_E4M3) : 0;
    float factor = f8_power(k);
    *scale = finite ? (uint8_t)(127 - k) : ROW8_NAN;
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        code[i] = f8_from_f32(x[i] * factor, DT_F8_E4M3);
}

int CPU_NAME(row8_pack_cpu)(struct lane *l, const struct row8_pack_args *a)
{
    TRY(row8_pack_check(a, l->err));
    int64_t d = a->x.dim[1], bytes = row8_bytes(d), rows = a->q.dim[0];
    const int32_t *src = a->src.data;
#pragma omp parallel for schedule(static) if (rows * d > 16384)
    for (int64_t r = 0; r < rows; r++) {
        uint8_t *q = (uint8_t *)a->q.data + r * bytes;
        int64_t from = src != NULL ? (src[r] < 0 ? -1 : src[r] / a->k) : r, used = from < 0 ? 0 : d + row8_blocks(d);
        for (int64_t b = 0; from >= 0 && b < row8_blocks(d); b++)
            pack_block(f32_row(&a->x, from) + b * ROW8_BLOCK, min_i64(ROW8_BLOCK, d - b * ROW8_BLOCK),
                       q + b * ROW8_BLOCK, q + d + b);
        memset(q + used, 0, (size_t)(bytes - used));
    }
    return ST_OK;
}

static void unpack_block(const uint8_t *restrict code, int64_t n, uint8_t scale, float *restrict y)
{
    float factor = scale == ROW8_NAN ? NAN : scale == 0 ? 0x1p-127f : f8_power((int)scale - 127);
    for (int64_t i = 0; i < n; i++)
        y[i] = f8_to_f32(code[i], DT_F8_E4M3) * factor;
}

int CPU_NAME(row8_unpack_cpu)(struct lane *l, const struct row8_unpack_args *a)
{
    TRY(row8_unpack_check(a, l->err));
    int64_t d = a->y.dim[1], bytes = row8_bytes(d), rows = a->y.dim[0];
    const int32_t *src = a->src.data;
#pragma omp parallel for schedule(static) if (rows * d > 16384)
    for (int64_t r = 0; r < rows; r++) {
        int64_t from = src != NULL ? (src[r] < 0 ? -1 : src[r] / a->k) : r;
        float *y = f32_row(&a->y, r);
        if (from < 0)
            memset(y, 0, (size_t)d * sizeof *y);
        for (int64_t b = 0; from >= 0 && b < row8_blocks(d); b++) {
            const uint8_t *q = (const uint8_t *)a->q.data + from * bytes;
            unpack_block(q + b * ROW8_BLOCK, min_i64(ROW8_BLOCK, d - b * ROW8_BLOCK), q[d + b], y + b * ROW8_BLOCK);
        }
    }
    return ST_OK;
}
