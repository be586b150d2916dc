/* row8, reference; see row8.h. Block by block: largest magnitude, scale, codes. */
#include "ops/ops_ref_int.h"
#include "ops/row8/row8.h"
#include "tensor/f8.h"

#include <string.h>

static void pack_block(const double *x, int64_t n, uint8_t *code, uint8_t *scale)
{
    double amax = 0;
    for (int64_t i = 0; i < n; i++) {
        double v = fabs(x[i]);
        amax = isnan(amax) || v <= amax ? amax : v; /* NaN stays */
    }
    int k = isfinite(amax) ? f8_exponent_f64(amax, DT_F8_E4M3) : 0;
    *scale = isfinite(amax) ? (uint8_t)(127 - k) : ROW8_NAN;
    for (int64_t i = 0; i < n; i++)
        code[i] = f8_from_f64(ldexp(x[i], k), DT_F8_E4M3);
}

int row8_pack_ref(struct lane *l, const struct row8_pack_args *a)
{
    TRY(row8_pack_check(a, l->err));
    int64_t d = a->x.dim[1], bytes = row8_bytes(d);
    const int32_t *src = a->src.data;
    for (int64_t r = 0; r < a->q.dim[0]; r++) {
        uint8_t *q = (uint8_t *)a->q.data + r * bytes;
        int64_t from = src != NULL ? (src[r] < 0 ? -1 : src[r] / a->k) : r;
        memset(q, 0, (size_t)bytes);
        for (int64_t b = 0; from >= 0 && b < row8_blocks(d); b++)
            pack_block(f64_row(&a->x, from) + b * ROW8_BLOCK, min_i64(ROW8_BLOCK, d - b * ROW8_BLOCK),
                       q + b * ROW8_BLOCK, q + d + b);
    }
    return ST_OK;
}

int row8_unpack_ref(struct lane *l, const struct row8_unpack_args *a)
{
    TRY(row8_unpack_check(a, l->err));
    int64_t d = a->y.dim[1], bytes = row8_bytes(d);
    const int32_t *src = a->src.data;
    for (int64_t r = 0; r < a->y.dim[0]; r++) {
        int64_t from = src != NULL ? (src[r] < 0 ? -1 : src[r] / a->k) : r;
        const uint8_t *q = (const uint8_t *)a->q.data + max_i64(from, 0) * bytes;
        for (int64_t c = 0; c < d; c++) {
            int e = from < 0 ? 127 : q[d + c / ROW8_BLOCK];
            double v = from < 0 ? 0 : (double)f8_to_f32(q[c], DT_F8_E4M3);
            f64_row(&a->y, r)[c] = e == ROW8_NAN ? NAN : ldexp(v, e - 127);
        }
    }
    return ST_OK;
}
