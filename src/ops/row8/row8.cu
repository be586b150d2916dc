/* row8 on the GPU: a warp for each row, a block of 128 values at a time, four to a lane. Where rows allow it, lanes
 * load their four values and store their four codes at once. */
#include "ops/cuda/kernel.cuh"
#include "ops/cuda/ptx.cuh"
#include "ops/row8/row8.h"
#include "tensor/f8.h"

enum { THREADS = 256, WARPS = THREADS / 32 };

struct row8_job {
    void *values; /* read or written */
    uint8_t *q;
    const int32_t *src;
    int64_t stride, from, to, d, bytes; /* from: rows there are to read; to: rows to write */
    int64_t k;
};

/* The row that row r is made of, -1: none. */
__device__ __forceinline__ int64_t source_of(const struct row8_job &p, int64_t r)
{
    int64_t from = r;
    if (p.src != NULL) {
        int s = p.src[r];
        from = s < 0 ? -1 : s / p.k;
    }
    return from < p.from ? from : -1;
}

/* Four values from column c on; what lies behind the row is 0. */
template <typename T, bool VEC> __device__ __forceinline__ void load_four(const T *x, int64_t c, int64_t d, float v[4])
{
    if (VEC && c < d) {
        union {
            uint2 two;
            uint4 four;
            T t[16 / sizeof(float)];
        } u;
        if (sizeof(T) == 2)
            u.two = *(const uint2 *)(x + c);
        else
            u.four = *(const uint4 *)(x + c);
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = to_float(u.t[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = c + i < d ? to_float(x[c + i]) : 0.0f;
}

template <typename T, bool VEC> __global__ void __launch_bounds__(THREADS) pack_rows(struct row8_job p)
{
    int64_t r = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, blocks = (p.d + ROW8_BLOCK - 1) / ROW8_BLOCK;
    int lane = threadIdx.x % 32;
    if (r >= p.to)
        return;
    int64_t from = source_of(p, r), used = from < 0 ? 0 : p.d + blocks;
    uint8_t *q = p.q + r * p.bytes;
    const T *x = (const T *)p.values + (from < 0 ? 0 : from) * p.stride;
    for (int64_t b = 0; from >= 0 && b < blocks; b++) {
        int64_t c = b * ROW8_BLOCK + lane * 4;
        float v[4];
        load_four<T, VEC>(x, c, p.d, v);
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
        for (int s = 16; s > 0; s /= 2)
            most = max(most, __shfl_xor_sync(0xffffffffu, most, s));
        bool finite = most < 0x7f800000u;
        int k = finite ? f8_exponent(__uint_as_float(most), DT_F8_E4M3) : 0;
        float factor = f8_power(k);
        uint32_t codes =
            f8_pair<DT_F8_E4M3>(v[0] * factor, v[1] * factor) | f8_pair<DT_F8_E4M3>(v[2] * factor, v[3] * factor) << 16;
        if (VEC && c < p.d)
            *(uint32_t *)(q + c) = codes;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!VEC && c + i < p.d)
                q[c + i] = (uint8_t)(codes >> 8 * i);
        if (lane == 0)
            q[p.d + b] = finite ? (uint8_t)(127 - k) : (uint8_t)ROW8_NAN;
    }
    for (int64_t i = used + lane; i < p.bytes; i += 32)
        q[i] = 0;
}

__device__ __forceinline__ float scale_of(int e)
{
    return e == ROW8_NAN ? __uint_as_float(0x7fc00000u) : e == 0 ? 0x1p-127f : f8_power(e - 127);
}

template <typename T, bool VEC> __global__ void __launch_bounds__(THREADS) unpack_rows(struct row8_job p)
{
    int64_t r = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (r >= p.to)
        return;
    int64_t from = source_of(p, r);
    const uint8_t *q = p.q + (from < 0 ? 0 : from) * p.bytes;
    T *y = (T *)p.values + r * p.stride;
    for (int64_t c = lane * 4; c < p.d; c += 128) {
        float factor = from < 0 ? 0.0f : scale_of(q[p.d + c / ROW8_BLOCK]);
        uint32_t codes = VEC && from >= 0 ? *(const uint32_t *)(q + c) : 0;
        union {
            uint2 two;
            uint4 four;
            T t[16 / sizeof(float)];
        } u;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!VEC && from >= 0 && c + i < p.d)
                codes |= (uint32_t)q[c + i] << 8 * i;
            u.t[i] = from_float<T>(from < 0 ? 0.0f : f8_to_f32((uint8_t)(codes >> 8 * i), DT_F8_E4M3) * factor);
        }
        if (VEC && sizeof(T) == 2)
            *(uint2 *)(y + c) = u.two;
        else if (VEC)
            *(uint4 *)(y + c) = u.four;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!VEC && c + i < p.d)
                y[c + i] = u.t[i];
    }
}

/* Rows of whole fours, at addresses that allow accesses of four values. */
static bool in_fours(const struct tensor *values)
{
    int64_t size = 4 * (int64_t)dtype_bytes(values->dtype);
    return values->dim[1] % 4 == 0 && values->stride[0] % 4 == 0 && (uintptr_t)values->data % (uintptr_t)size == 0;
}

extern "C" int row8_pack_cuda(struct lane *l, const struct row8_pack_args *a)
{
    TRY(row8_pack_check(a, l->err));
    struct row8_job p = {a->x.data,      (uint8_t *)a->q.data, (const int32_t *)a->src.data,
                         a->x.stride[0], a->x.dim[0],          a->q.dim[0],
                         a->x.dim[1],    a->q.dim[1],          a->k};
    unsigned blocks = (unsigned)ceil_div(p.to, WARPS);
    BY_REAL(a->x.dtype, T, {
        if (in_fours(&a->x))
            LAUNCH(l, (pack_rows<T, true>), blocks, THREADS, 0, p);
        else
            LAUNCH(l, (pack_rows<T, false>), blocks, THREADS, 0, p);
    });
    return ST_OK;
}

extern "C" int row8_unpack_cuda(struct lane *l, const struct row8_unpack_args *a)
{
    TRY(row8_unpack_check(a, l->err));
    struct row8_job p = {a->y.data,      (uint8_t *)a->q.data, (const int32_t *)a->src.data,
                         a->y.stride[0], a->q.dim[0],          a->y.dim[0],
                         a->y.dim[1],    a->q.dim[1],          a->k};
    unsigned blocks = (unsigned)ceil_div(p.to, WARPS);
    BY_REAL(a->y.dtype, T, {
        if (in_fours(&a->y))
            LAUNCH(l, (unpack_rows<T, true>), blocks, THREADS, 0, p);
        else
            LAUNCH(l, (unpack_rows<T, false>), blocks, THREADS, 0, p);
    });
    return ST_OK;
}
