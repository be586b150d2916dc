/* Elements and rows: conversion between dtypes without alignment, and between disk and memory row
 * order. Reals go through double and integers through int64, so each dtype needs one load and one
 * store instead of one routine per pair. */
#include "ckpt/ckpt_int.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 1024 }; /* elements on the stack at a time */

bool shape_bytes(enum dtype dtype, int rank, const int64_t *dim, int64_t *bytes)
{
    int64_t extent = (int64_t)dtype_bytes(dtype), nonzero = extent;
    if (extent <= 0)
        return false;
    for (int i = 0; i < rank; i++) {
        if (dim[i] < 0 || !i64_mul(nonzero, max_i64(dim[i], 1), &nonzero))
            return false;
        extent = dim[i] == 0 ? 0 : extent;
    }
    *bytes = extent == 0 ? 0 : nonzero;
    return true;
}

static bool is_real(enum dtype t) { return t == DT_F64 || t == DT_F32 || t == DT_F16 || t == DT_BF16; }

static bool is_integer(enum dtype t) { return t >= DT_I64 && t <= DT_BOOL; }

bool dtype_converts(enum dtype to, enum dtype from)
{
    return to == from || (is_real(to) && (is_real(from) || is_integer(from))) || (is_integer(to) && is_integer(from));
}

/* memcpy of one element: the compiler makes it a plain load, and it may be unaligned. */
#define LOAD_EACH(type, expression)                                                                                    \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
        type v;                                                                                                        \
        memcpy(&v, src + i * (int64_t)sizeof v, sizeof v);                                                             \
        out[i] = (expression);                                                                                         \
    }
#define STORE_EACH(type, expression)                                                                                   \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
        type v = (expression);                                                                                         \
        memcpy(dst + i * (int64_t)sizeof v, &v, sizeof v);                                                             \
    }

static void load_reals(double *out, const char *src, enum dtype t, int64_t n)
{
    switch (t) {
    case DT_F64: LOAD_EACH(double, v) break;
    case DT_F32: LOAD_EACH(float, (double)v) break;
    case DT_F16: LOAD_EACH(uint16_t, (double)f16_to_f32(v)) break;
    case DT_BF16: LOAD_EACH(uint16_t, (double)bf16_to_f32(v)) break;
    default:
        for (int64_t i = 0; i < n; i++)
            out[i] = (double)NAN;
    }
}

static void store_reals(char *dst, enum dtype t, const double *in, int64_t n)
{
    switch (t) {
    case DT_F64: STORE_EACH(double, in[i]) break;
    case DT_F32: STORE_EACH(float, (float)in[i]) break;
    case DT_F16: STORE_EACH(uint16_t, f32_to_f16((float)in[i])) break;
    case DT_BF16: STORE_EACH(uint16_t, f32_to_bf16((float)in[i])) break;
    default: break;
    }
}

/* False when a U64 is beyond int64. */
static bool load_integers(int64_t *out, const char *src, enum dtype t, int64_t n)
{
    switch (t) {
    case DT_I64: LOAD_EACH(int64_t, v) break;
    case DT_I32: LOAD_EACH(int32_t, v) break;
    case DT_I16: LOAD_EACH(int16_t, v) break;
    case DT_I8: LOAD_EACH(int8_t, v) break;
    case DT_U32: LOAD_EACH(uint32_t, v) break;
    case DT_U16: LOAD_EACH(uint16_t, v) break;
    case DT_U64:
        for (int64_t i = 0; i < n; i++) {
            uint64_t v;
            memcpy(&v, src + i * (int64_t)sizeof v, sizeof v);
            if (v > INT64_MAX)
                return false;
            out[i] = (int64_t)v;
        }
        break;
    default: LOAD_EACH(uint8_t, v) break;
    }
    return true;
}

static bool integers_fit(enum dtype t, const int64_t *in, int64_t n)
{
    int64_t low, high;
    switch (t) {
    case DT_I32: low = INT32_MIN, high = INT32_MAX; break;
    case DT_I16: low = INT16_MIN, high = INT16_MAX; break;
    case DT_I8: low = INT8_MIN, high = INT8_MAX; break;
    case DT_U64: low = 0, high = INT64_MAX; break;
    case DT_U32: low = 0, high = UINT32_MAX; break;
    case DT_U16: low = 0, high = UINT16_MAX; break;
    case DT_U8: low = 0, high = UINT8_MAX; break;
    case DT_BOOL: low = 0, high = 1; break;
    default: low = INT64_MIN, high = INT64_MAX; break;
    }
    for (int64_t i = 0; i < n; i++)
        if (in[i] < low || in[i] > high)
            return false;
    return true;
}

static void store_integers(char *dst, enum dtype t, const int64_t *in, int64_t n)
{
    /* Little-endian two's complement: the low bytes are the narrow integer. */
    size_t size = dtype_bytes(t);
    for (int64_t i = 0; i < n; i++)
        memcpy(dst + (size_t)i * size, &in[i], size);
}

static int convert_block(char *dst, enum dtype to, const char *src, enum dtype from, int64_t n, struct err *e)
{
    double reals[BLOCK];
    int64_t integers[BLOCK];
    if (is_real(from)) {
        load_reals(reals, src, from, n);
        store_reals(dst, to, reals, n);
        return ST_OK;
    }
    if (!load_integers(integers, src, from, n) || (is_integer(to) && !integers_fit(to, integers, n)))
        return err_set(e, ST_INVALID, "an %s value does not fit %s", dtype_name(from), dtype_name(to));
    if (is_integer(to)) {
        store_integers(dst, to, integers, n);
        return ST_OK;
    }
    for (int64_t i = 0; i < n; i++)
        reals[i] = (double)integers[i];
    store_reals(dst, to, reals, n);
    return ST_OK;
}

int convert_elems(void *dst, enum dtype to, const void *src, enum dtype from, int64_t n, struct err *e)
{
    if (n == 0)
        return ST_OK;
    if (to == from) {
        memcpy(dst, src, (size_t)n * dtype_bytes(to));
        return ST_OK;
    }
    if (!dtype_converts(to, from))
        return err_set(e, ST_UNSUPPORTED, "cannot convert %s to %s", dtype_name(from), dtype_name(to));
    char *d = dst;
    const char *s = src;
    for (int64_t at = 0; at < n; at += BLOCK) {
        TRY(convert_block(d, to, s, from, min_i64(BLOCK, n - at), e));
        d += BLOCK * (int64_t)dtype_bytes(to);
        s += BLOCK * (int64_t)dtype_bytes(from);
    }
    return ST_OK;
}

int64_t count_rows(const struct param *param, const struct tensor *t)
{
    int64_t rows = t->rank > 0 ? t->dim[0] : 1;
    return param != NULL && param->rows.matrices > 0 && t->rank > 1 ? rows * t->dim[1] : rows;
}

int check_rows(const struct param *param, const struct tensor *t, const char *key, struct err *e)
{
    if (param == NULL || param->rows.n_sections == 0)
        return ST_OK;
    const struct row_layout *l = &param->rows;
    char text[128];
    bool ok = l->n_sections > 0 && l->n_sections <= PARAM_MAX_SECTIONS && l->groups > 0 && t->rank > 0;
    int64_t per_group = 0, total = 0;
    for (int s = 0; ok && s < l->n_sections; s++) {
        ok = l->rows[s] >= 0 && l->rows[s] <= INT64_MAX - per_group;
        per_group += ok ? l->rows[s] : 0;
    }
    int64_t have = l->matrices > 0 && t->rank > 1 ? t->dim[1] : ok ? t->dim[0] : 0;
    ok = ok && (l->matrices == 0 || (t->rank > 1 && t->dim[0] == l->matrices));
    if (ok && i64_mul(per_group, l->groups, &total) && total == have)
        return ST_OK;
    return err_set(e, ST_INVALID, "%s: row layout of %lld groups with %lld rows does not fit %s", key,
                   (long long)l->groups, (long long)per_group, tensor_text(t, text, sizeof text));
}

int64_t row_run(const struct param *param, int64_t row, int64_t n_rows, int64_t *mem_row)
{
    if (param == NULL || param->rows.n_sections == 0) {
        *mem_row = row;
        return n_rows - row;
    }
    int64_t run = 1, start = param_row_from_disk(param, row);
    while (row + run < n_rows && param_row_from_disk(param, row + run) == start + run)
        run++;
    *mem_row = start;
    return run;
}

int copy_rows_from_disk(const struct tensor *dst, const struct tensor *src, const struct param *param, struct err *e)
{
    int64_t n = tensor_elems(src), rows = count_rows(param, src);
    if (n == 0)
        return ST_OK;
    int64_t row_elems = n / rows, mem_row;
    int64_t to_bytes = row_elems * (int64_t)dtype_bytes(dst->dtype);
    int64_t from_bytes = row_elems * (int64_t)dtype_bytes(src->dtype);
    for (int64_t row = 0, run; row < rows; row += run) {
        run = row_run(param, row, rows, &mem_row);
        TRY(convert_elems((char *)dst->data + mem_row * to_bytes, dst->dtype,
                          (const char *)src->data + row * from_bytes, src->dtype, run * row_elems, e));
    }
    return ST_OK;
}

const char *shown(const char *name, char *out, size_t size)
{
    size_t n = 0;
    for (; name[n] != '\0' && n + 1 < size; n++) {
        unsigned char ch = (unsigned char)name[n];
        out[n] = ch < 0x20 || ch == 0x7f ? '?' : name[n];
    }
    if (name[n] != '\0' && size > 4)
        memcpy(out + size - 4, "...", 3);
    out[n] = '\0';
    return out;
}

/* Values for reporting only: 64-bit integers beyond 2^53 round. */
static void load_values(double *out, const char *src, enum dtype t, int64_t n)
{
    if (!is_integer(t)) {
        load_reals(out, src, t, n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t v;
        const char *at = src + i * (int64_t)dtype_bytes(t);
        if (load_integers(&v, at, t, 1))
            out[i] = (double)v;
        else { /* a U64 beyond int64 */
            uint64_t u;
            memcpy(&u, at, sizeof u);
            out[i] = (double)u;
        }
    }
}

static void note_difference(struct st_difference *d, int64_t index, double difference)
{
    bool larger = d->count == 0 || (!isnan(d->max_abs) && !(difference <= d->max_abs));
    if (d->count++ == 0)
        d->first = index;
    if (larger) {
        d->max_abs = difference;
        d->max_at = index;
    }
}

static void compare_block(struct st_difference *d, const struct tensor *a, const struct tensor *b, int64_t at,
                          int64_t n)
{
    double x[BLOCK], y[BLOCK];
    size_t wa = dtype_bytes(a->dtype), wb = dtype_bytes(b->dtype);
    const char *pa = (const char *)a->data + (size_t)at * wa;
    const char *pb = (const char *)b->data + (size_t)at * wb;
    bool bitwise = a->dtype == b->dtype;
    if (bitwise && memcmp(pa, pb, (size_t)n * wa) == 0)
        return;
    load_values(x, pa, a->dtype, n);
    load_values(y, pb, b->dtype, n);
    for (int64_t i = 0; i < n; i++) {
        bool same = bitwise ? memcmp(pa + (size_t)i * wa, pb + (size_t)i * wb, wa) == 0
                            : x[i] == y[i] || (isnan(x[i]) && isnan(y[i]));
        if (!same)
            note_difference(d, at + i, x[i] == y[i] ? 0.0 : fabs(x[i] - y[i]));
    }
}

int st_compare(const struct tensor *a, const struct tensor *b, struct st_difference *out, struct err *e)
{
    *out = (struct st_difference){0};
    char ta[128], tb[128];
    bool values = a->dtype == b->dtype || dtype_converts(DT_F64, a->dtype);
    if (!tensor_same_shape(a, b) || !values || (a->dtype != b->dtype && !dtype_converts(DT_F64, b->dtype)))
        return err_set(e, ST_INVALID, "cannot compare %s with %s", tensor_text(a, ta, sizeof ta),
                       tensor_text(b, tb, sizeof tb));
    int64_t n = tensor_elems(a);
    for (int64_t at = 0; at < n; at += BLOCK)
        compare_block(out, a, b, at, min_i64(BLOCK, n - at));
    return ST_OK;
}
