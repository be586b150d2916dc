/* norm8 on the GPU; see norm8.h. Tiles of 128 x 128 (ops/cuda/f8.cuh): a thread norms eight columns of eight rows,
 * rounds them as they would be stored, and hands them to the quantiser. Other shapes take the values by way of
 * scratch. */
#include "ops/cuda/f8.cuh"
#include "ops/norm8/norm8_int.h"

struct norm8_call {
    const void *x;
    int64_t stride, rows, d;
    const float *rstd, *w; /* w may be NULL */
    float one;             /* 1 if gains are 1 + w */
};

/* By shapes alone, so that scratch can be planned; addresses of slots are aligned. */
static bool in_tiles(const struct norm8_args *a)
{
    int64_t rows = a->x.dim[0], d = a->x.dim[1], align = 16 / (int64_t)dtype_bytes(a->x.dtype);
    return a->block == F8_TILE && rows > 0 && d > 0 && d % 8 == 0 && (a->t.rank == 0 || rows % 16 == 0) &&
           (rows == 1 || a->x.stride[0] % align == 0) && rows <= 65535ll * F8_TILE;
}

/* As norm_fwd_rows of ops/cuda/norm.cuh computes it. */
static __device__ __forceinline__ float normed(float x, float rstd, float gain) { return x * (rstd * gain); }
static __device__ __forceinline__ float gain_of(const struct norm8_call &a, int64_t c)
{
    return a.w != NULL ? a.w[c] + a.one : 1.0f;
}

template <typename T>
static __global__ void __launch_bounds__(F8_THREADS, sizeof(T) == 4 ? 2 : 3)
    norm8_tiles(const __grid_constant__ struct norm8_call a, const __grid_constant__ struct f8_out o)
{
    __shared__ struct f8_shared s;
    int64_t r0 = (int64_t)blockIdx.y * F8_TILE, c0 = (int64_t)blockIdx.x * F8_TILE;
    int valid = f8_valid(o, r0, c0);
    int64_t row = r0 + (valid > 0 ? threadIdx.x / 16 * 8 : 0), col = c0 + (valid > 0 ? threadIdx.x % 16 * 8 : 0);
    f8_walk<T> from(a.x, a.stride, r0, c0, valid);
    f8_eight<T> tile[8];
    float rstd[8], gain[8];
#pragma unroll
    for (int i = 0; i < 8; i++, from.next()) {
        tile[i] = from.load();
        rstd[i] = a.rstd[i < valid ? row + i : row]; /* rows past the last are cleared below */
    }
#pragma unroll
    for (int e = 0; e < 8; e++)
        gain[e] = gain_of(a, col + e);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float v[8];
        f8_floats(tile[i], v);
#pragma unroll
        for (int e = 0; e < 8; e++)
            v[e] = normed(v[e], rstd[i], gain[e]);
        tile[i] = f8_stored<T>(v);
    }
    f8_clear(tile, valid);
    f8_quantise_tile<T, DT_F8_E4M3, F8_ROWS>(tile, o, r0, c0, 0, &s);
}

template <typename T>
static __global__ void __launch_bounds__(256) norm8_values(const __grid_constant__ struct norm8_call a, T *y)
{
    int64_t row = blockIdx.x;
    for (int64_t c = threadIdx.x; c < a.d; c += 256)
        y[row * a.d + c] =
            from_float<T>(normed(to_float(((const T *)a.x)[row * a.stride + c]), a.rstd[row], gain_of(a, c)));
}

extern "C" int64_t norm8_work_cuda(const struct norm8_args *a)
{
    struct quantise_args q = {};
    q.block = a->block;
    return in_tiles(a) ? 0 : norm8_values_bytes(&a->x) + quantise_work_cuda(&q);
}

template <typename T> static int run(struct lane *l, const struct norm8_args *a, const struct norm8_call &c)
{
    if (in_tiles(a)) {
        struct f8_out o = f8_out_of(&a->q, &a->qs, &a->t, &a->ts, c.rows, c.d, a->block, false);
        dim3 grid((unsigned)ceil_div(c.d, F8_TILE), (unsigned)ceil_div(c.rows, F8_TILE));
        if (!pointer16(c.x) || !pointer16(o.q) || !pointer16(o.t))
            return err_set(l->err, ST_UNSUPPORTED, "norm8: tensors that do not begin at multiples of 16 bytes");
        LAUNCH(l, norm8_tiles<T>, grid, F8_THREADS, 0, c, o);
        return ST_OK;
    }
    if (c.rows >= 1ll << 31)
        return err_set(l->err, ST_UNSUPPORTED, "norm8: %lld rows are more than one launch takes", (long long)c.rows);
    if (c.rows > 0 && c.d > 0)
        LAUNCH(l, norm8_values<T>, (unsigned)c.rows, 256, 0, c, (T *)a->work.data);
    struct quantise_args q = norm8_quantise(a);
    if (quantise_work_cuda(&q) > 0)
        q.work = tensor_1d((char *)a->work.data + norm8_values_bytes(&a->x), DT_U8, quantise_work_cuda(&q));
    return quantise_cuda(l, &q);
}

extern "C" int norm8_cuda(struct lane *l, const struct norm8_args *a)
{
    TRY(norm8_check(a, l->err));
    TRY(check_work("norm8", &a->work, norm8_work_cuda(a), l->err));
    struct norm8_call c = {};
    c.x = a->x.data;
    c.rows = a->x.dim[0];
    c.d = a->x.dim[1];
    c.stride = c.rows > 1 ? a->x.stride[0] : c.d;
    c.rstd = (const float *)a->rstd.data;
    c.w = (const float *)a->w.data;
    c.one = a->zero_centered ? 1.0f : 0.0f;
    BY_REAL(a->x.dtype, T, return run<T>(l, a, c));
}
