/* Tensor values, views and host conversions; see tensor.h. */
#include "tensor/tensor.h"
#include "tensor/f8.h"

#include <math.h>
#include <string.h>

static const struct {
    const char *name;
    size_t bytes;
} dtypes[DT_COUNT] = {
    [DT_NONE] = {"NONE", 0},       [DT_F64] = {"F64", 8},         [DT_F32] = {"F32", 4},
    [DT_F16] = {"F16", 2},         [DT_BF16] = {"BF16", 2},       [DT_I64] = {"I64", 8},
    [DT_I32] = {"I32", 4},         [DT_I16] = {"I16", 2},         [DT_I8] = {"I8", 1},
    [DT_U64] = {"U64", 8},         [DT_U32] = {"U32", 4},         [DT_U16] = {"U16", 2},
    [DT_U8] = {"U8", 1},           [DT_BOOL] = {"BOOL", 1},       [DT_F8_E4M3] = {"F8_E4M3", 1},
    [DT_F8_E5M2] = {"F8_E5M2", 1}, [DT_F8_E8M0] = {"F8_E8M0", 1},
};

size_t dtype_bytes(enum dtype t) { return (unsigned)t < DT_COUNT ? dtypes[t].bytes : 0; }
const char *dtype_name(enum dtype t) { return (unsigned)t < DT_COUNT ? dtypes[t].name : "?"; }

enum dtype dtype_from_name(const char *name)
{
    for (int t = DT_NONE + 1; t < DT_COUNT; t++)
        if (strcmp(name, dtypes[t].name) == 0)
            return (enum dtype)t;
    return DT_NONE;
}

struct tensor tensor_shape(enum dtype dtype, int rank, const int64_t *dim)
{
    struct tensor t = {.dtype = dtype, .rank = rank};
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; i--) {
        t.dim[i] = dim[i];
        t.stride[i] = stride;
        stride *= dim[i];
    }
    return t;
}

static struct tensor shaped(void *data, enum dtype dtype, int rank, const int64_t *dim)
{
    struct tensor t = tensor_shape(dtype, rank, dim);
    t.data = data;
    return t;
}

struct tensor tensor_1d(void *data, enum dtype dtype, int64_t n) { return shaped(data, dtype, 1, &n); }

struct tensor tensor_2d(void *data, enum dtype dtype, int64_t rows, int64_t cols)
{
    return shaped(data, dtype, 2, (int64_t[]){rows, cols});
}

struct tensor tensor_3d(void *data, enum dtype dtype, int64_t a, int64_t b, int64_t c)
{
    return shaped(data, dtype, 3, (int64_t[]){a, b, c});
}

struct tensor tensor_4d(void *data, enum dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return shaped(data, dtype, 4, (int64_t[]){a, b, c, d});
}

int64_t tensor_elems(const struct tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++)
        n *= t->dim[i];
    return n;
}

int64_t tensor_bytes(const struct tensor *t) { return tensor_elems(t) * (int64_t)dtype_bytes(t->dtype); }

bool tensor_is_dense(const struct tensor *t)
{
    int64_t stride = 1;
    for (int i = t->rank - 1; i >= 0; i--) {
        if (t->dim[i] != 1 && t->stride[i] != stride)
            return false;
        stride *= t->dim[i];
    }
    return true;
}

bool tensor_same_shape(const struct tensor *a, const struct tensor *b)
{
    if (a->rank != b->rank)
        return false;
    for (int i = 0; i < a->rank; i++)
        if (a->dim[i] != b->dim[i])
            return false;
    return true;
}

const char *tensor_text(const struct tensor *t, char *out, size_t size)
{
    struct buf b;
    buf_init(&b, 200);
    buf_addf(&b, "%s [", dtype_name(t->dtype));
    for (int i = 0; i < t->rank; i++)
        buf_addf(&b, "%s%lld", i ? ", " : "", (long long)t->dim[i]);
    buf_add(&b, "]");
    snprintf(out, size, "%s", b.text ? b.text : "?");
    buf_release(&b);
    return out;
}

static struct tensor offset(struct tensor t, int64_t elems)
{
    if (t.data != NULL)
        t.data = (char *)t.data + elems * (int64_t)dtype_bytes(t.dtype);
    return t;
}

/* A view of an absent tensor (a gradient outside of training) is absent, too. */
struct tensor tensor_cols(const struct tensor *t, int64_t first, int64_t n)
{
    if (t->rank == 0)
        return *t;
    struct tensor v = offset(*t, first * t->stride[t->rank - 1]);
    v.dim[t->rank - 1] = n;
    return v;
}

struct tensor tensor_rows(const struct tensor *t, int64_t first, int64_t n)
{
    if (t->rank == 0)
        return *t;
    struct tensor v = offset(*t, first * t->stride[0]);
    v.dim[0] = n;
    return v;
}

struct tensor tensor_split_last(const struct tensor *t, int64_t a, int64_t b)
{
    struct tensor v = *t;
    if (t->rank == 0)
        return v;
    int last = t->rank - 1;
    v.rank = t->rank + 1;
    v.dim[last] = a;
    v.dim[last + 1] = b;
    v.stride[last] = b * t->stride[last];
    v.stride[last + 1] = t->stride[last];
    return v;
}

struct tensor tensor_split_first(const struct tensor *t, int64_t a, int64_t b)
{
    struct tensor v = *t;
    if (t->rank == 0)
        return v;
    v.rank = t->rank + 1;
    for (int i = t->rank; i > 1; i--) {
        v.dim[i] = t->dim[i - 1];
        v.stride[i] = t->stride[i - 1];
    }
    v.dim[0] = a;
    v.dim[1] = b;
    v.stride[0] = b * t->stride[0];
    v.stride[1] = t->stride[0];
    return v;
}

static const char *element(const struct tensor *t, int64_t i)
{
    int64_t at = 0;
    for (int d = t->rank - 1; d >= 0; d--) {
        at += i % t->dim[d] * t->stride[d];
        i /= t->dim[d];
    }
    return (const char *)t->data + at * (int64_t)dtype_bytes(t->dtype);
}

uint8_t f8_from_f64(double v, enum dtype t)
{
    const int least = t == DT_F8_E5M2 ? -14 : -6, bits = t == DT_F8_E5M2 ? 2 : 3;
    int e = 0;
    if (!isfinite(v) || fabs(v) >= ldexp(1.75, f8_top(t)))
        return f8_from_f32((float)(isnan(v) ? v : copysign(ldexp(1.75, f8_top(t)), v)), t);
    (void)frexp(v, &e);
    int last = (e - 1 > least ? e - 1 : least) - bits; /* exponent of the code's last bit */
    return f8_from_f32((float)ldexp(nearbyint(ldexp(v, -last)), last), t);
}

int f8_exponent_f64(double amax, enum dtype t)
{
    int e = 0;
    double m = frexp(amax, &e);
    if (amax == 0)
        return 0;
    int k = f8_top(t) - (e - 1) - (m > 0.875);
    return k > F8_EXPONENT_MAX ? F8_EXPONENT_MAX : k < -F8_EXPONENT_MAX ? -F8_EXPONENT_MAX : k;
}

/* A power of two: the nearest below, within the range of the format. */
static uint8_t e8m0_from_f64(double v)
{
    int e = 0;
    if (!isfinite(v) || v <= 0)
        return 0xff;
    (void)frexp(v, &e);
    e += 126;
    return (uint8_t)(e < 0 ? 0 : e > 254 ? 254 : e);
}

double tensor_get(const struct tensor *t, int64_t i)
{
    const void *p = element(t, i);
    switch (t->dtype) {
    case DT_F64: return *(const double *)p;
    case DT_F32: return (double)*(const float *)p;
    case DT_F16: return (double)f16_to_f32(*(const uint16_t *)p);
    case DT_BF16: return (double)bf16_to_f32(*(const uint16_t *)p);
    case DT_I64: return (double)*(const int64_t *)p;
    case DT_I32: return (double)*(const int32_t *)p;
    case DT_I16: return (double)*(const int16_t *)p;
    case DT_I8: return (double)*(const int8_t *)p;
    case DT_U64: return (double)*(const uint64_t *)p;
    case DT_U32: return (double)*(const uint32_t *)p;
    case DT_U16: return (double)*(const uint16_t *)p;
    case DT_U8:
    case DT_BOOL: return (double)*(const uint8_t *)p;
    case DT_F8_E4M3:
    case DT_F8_E5M2: return (double)f8_to_f32(*(const uint8_t *)p, t->dtype);
    case DT_F8_E8M0: return *(const uint8_t *)p == 0xff ? NAN : ldexp(1, *(const uint8_t *)p - 127);
    default: return NAN;
    }
}

void tensor_set(const struct tensor *t, int64_t i, double value)
{
    void *p = (void *)(uintptr_t)element(t, i);
    switch (t->dtype) {
    case DT_F64: *(double *)p = value; break;
    case DT_F32: *(float *)p = (float)value; break;
    case DT_F16: *(uint16_t *)p = f32_to_f16((float)value); break;
    case DT_BF16: *(uint16_t *)p = f32_to_bf16((float)value); break;
    case DT_I64: *(int64_t *)p = (int64_t)value; break;
    case DT_I32: *(int32_t *)p = (int32_t)value; break;
    case DT_I16: *(int16_t *)p = (int16_t)value; break;
    case DT_I8: *(int8_t *)p = (int8_t)value; break;
    case DT_U64: *(uint64_t *)p = (uint64_t)value; break;
    case DT_U32: *(uint32_t *)p = (uint32_t)value; break;
    case DT_U16: *(uint16_t *)p = (uint16_t)value; break;
    case DT_U8:
    case DT_BOOL: *(uint8_t *)p = (uint8_t)value; break;
    case DT_F8_E4M3:
    case DT_F8_E5M2: *(uint8_t *)p = f8_from_f64(value, t->dtype); break;
    case DT_F8_E8M0: *(uint8_t *)p = e8m0_from_f64(value); break;
    default: break;
    }
}

void tensor_convert(const struct tensor *dst, const struct tensor *src)
{
    int64_t n = tensor_elems(src);
    if (dst->dtype == src->dtype && tensor_is_dense(dst) && tensor_is_dense(src)) {
        if (n > 0)
            memmove(dst->data, src->data, (size_t)tensor_bytes(src));
        return;
    }
    for (int64_t i = 0; i < n; i++)
        tensor_set(dst, i, tensor_get(src, i));
}

static float bits_to_f32(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static uint32_t f32_to_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

float bf16_to_f32(uint16_t h) { return bits_to_f32((uint32_t)h << 16); }

uint16_t f32_to_bf16(float f)
{
    uint32_t u = f32_to_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 0x1fu, mantissa = h & 0x3ffu;
    if (exponent == 0x1f)
        return bits_to_f32(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) /* subnormal: mantissa * 2^-24 is exact in fp32 */
        return sign ? -(float)mantissa * 0x1p-24f : (float)mantissa * 0x1p-24f;
    return bits_to_f32(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t f32_to_f16(float f)
{
    uint32_t u = f32_to_bits(f), sign = u >> 16 & 0x8000u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (rest >= 0x477ff000u) /* rounds to 65536 or more */
        return (uint16_t)(sign | 0x7c00u);
    if (rest < 0x38800000u) { /* subnormal result: add a magic number so that the FPU rounds */
        float shifted = bits_to_f32(rest) + 0.5f;
        return (uint16_t)(sign | (f32_to_bits(shifted) - 0x3f000000u));
    }
    uint32_t rounded = rest + 0xfffu + (rest >> 13 & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

int64_t param_elems(const struct param *p)
{
    int64_t n = 1;
    for (int i = 0; i < p->rank; i++)
        n *= p->dim[i];
    return n;
}

/* Where row r, counted by groups, is when counted by sections. */
static int64_t section_row(const struct row_layout *l, int64_t r, int64_t per_group)
{
    int64_t group = r / per_group, within = r % per_group, base = 0;
    int s = 0;
    for (; s + 1 < l->n_sections && within >= l->rows[s]; s++) {
        within -= l->rows[s];
        base += l->groups * l->rows[s];
    }
    return base + group * l->rows[s] + within;
}

/* Where row r, counted by sections, is when counted by groups. */
static int64_t grouped_row(const struct row_layout *l, int64_t r, int64_t per_group)
{
    int64_t before = 0;
    int s = 0;
    for (; s + 1 < l->n_sections && r >= l->groups * l->rows[s]; s++) {
        r -= l->groups * l->rows[s];
        before += l->rows[s];
    }
    return r / l->rows[s] * per_group + before + r % l->rows[s];
}

int64_t param_row_from_disk(const struct param *p, int64_t r)
{
    if (p->rows.n_sections == 0)
        return r;
    int64_t per_group = 0;
    for (int s = 0; s < p->rows.n_sections; s++)
        per_group += p->rows.rows[s];
    int64_t all = per_group * p->rows.groups, matrix = r / all;
    r %= all;
    return matrix * all +
           (p->rows.grouped_in_memory ? grouped_row(&p->rows, r, per_group) : section_row(&p->rows, r, per_group));
}
