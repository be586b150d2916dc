/* Pieces of the kernels that walk rows: vectors as floats, teams of threads, dropout factors. */
#ifndef BRAID_OPS_CUDA_ROWS_CUH
#define BRAID_OPS_CUDA_ROWS_CUH

#include "ops/cuda/kernel.cuh"
#include "ops/cuda/ptx.cuh"
#include "ops/dropout/dropout.h"

static inline bool pointer16(const void *p) { return (uintptr_t)p % 16 == 0; }
/* Rows of this tensor can be taken in vectors of `bytes` bytes. */
static inline bool aligned_to(const struct tensor *t, int64_t bytes)
{
    int64_t size = (int64_t)dtype_bytes(t->dtype);
    if ((uintptr_t)t->data % (uintptr_t)bytes != 0 || t->dim[t->rank - 1] * size % bytes != 0)
        return false;
    for (int i = 0; i < t->rank - 1; i++)
        if (t->stride[i] * size % bytes != 0)
            return false;
    return true;
}

/* Sixteen bytes as they lie in memory. Kernels hold rows in this form: an array of bf16 would take a
 * register for each. */
__device__ __forceinline__ uint4 load_raw(const void *p) { return *(const uint4 *)p; }
__device__ __forceinline__ void store_raw(void *p, const uint4 &v) { *(uint4 *)p = v; }
__device__ __forceinline__ uint4 zero_raw() { return make_uint4(0, 0, 0, 0); }

__device__ __forceinline__ void unpack2(uint32_t raw, float *out)
{
    out[0] = __uint_as_float(raw << 16);
    out[1] = __uint_as_float(raw & 0xffff0000u);
}
__device__ __forceinline__ uint32_t pack2(float a, float b)
{
    union {
        __nv_bfloat162 v;
        uint32_t raw;
    } u;
    u.v = __floats2bfloat162_rn(a, b);
    return u.raw;
}
template <typename T> __device__ __forceinline__ void unpack(const uint4 &raw, float *out);
template <> __device__ __forceinline__ void unpack<float>(const uint4 &raw, float *out)
{
    out[0] = __uint_as_float(raw.x);
    out[1] = __uint_as_float(raw.y);
    out[2] = __uint_as_float(raw.z);
    out[3] = __uint_as_float(raw.w);
}
template <> __device__ __forceinline__ void unpack<bf16>(const uint4 &raw, float *out)
{
    unpack2(raw.x, out);
    unpack2(raw.y, out + 2);
    unpack2(raw.z, out + 4);
    unpack2(raw.w, out + 6);
}
template <typename T> __device__ __forceinline__ uint4 repack(const float *in);
template <> __device__ __forceinline__ uint4 repack<float>(const float *in)
{
    return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]), __float_as_uint(in[3]));
}
template <> __device__ __forceinline__ uint4 repack<bf16>(const float *in)
{
    return make_uint4(pack2(in[0], in[1]), pack2(in[2], in[3]), pack2(in[4], in[5]), pack2(in[6], in[7]));
}

/* V elements as floats: one element, 8 bytes, or a multiple of 16. */
template <typename T, int V> __device__ __forceinline__ void load_floats(const T *p, float (&out)[V])
{
    if constexpr (V == 1) {
        out[0] = to_float(p[0]);
    } else if constexpr (V * sizeof(T) == 8) {
        uint2 raw = *(const uint2 *)p;
        unpack2(raw.x, out);
        unpack2(raw.y, out + 2);
    } else {
        constexpr int N = 16 / sizeof(T);
#pragma unroll
        for (int k = 0; k < V / N; k++)
            unpack<T>(load_raw(p + k * N), out + k * N);
    }
}
template <typename T, int V> __device__ __forceinline__ void store_floats(T *p, const float (&in)[V])
{
    if constexpr (V == 1) {
        p[0] = from_float<T>(in[0]);
    } else if constexpr (V * sizeof(T) == 8) {
        *(uint2 *)p = make_uint2(pack2(in[0], in[1]), pack2(in[2], in[3]));
    } else {
        constexpr int N = 16 / sizeof(T);
#pragma unroll
        for (int k = 0; k < V / N; k++)
            store_raw(p + k * N, repack<T>(in + k * N));
    }
}

/* V elements as they lie in memory, in registers. */
template <typename T, int V> struct in_registers {
    static constexpr int N = 16 / (int)sizeof(T), VECTORS = V / N;
    uint4 raw[VECTORS];
};
/* Those at p; NULL: zeros. */
template <typename T, int V> __device__ __forceinline__ in_registers<T, V> hold(const T *p)
{
    in_registers<T, V> h;
#pragma unroll
    for (int k = 0; k < h.VECTORS; k++)
        h.raw[k] = p != NULL ? load_raw(p + k * h.N) : zero_raw();
    return h;
}
template <typename T, int V> __device__ __forceinline__ void unpack_held(const in_registers<T, V> &h, float *out)
{
#pragma unroll
    for (int k = 0; k < h.VECTORS; k++)
        unpack<T>(h.raw[k], out + k * h.N);
}
/* Rounds V floats, stores and holds them. */
template <typename T, int V>
__device__ __forceinline__ void store_and_hold(T *p, const float (&in)[V], in_registers<T, V> &h)
{
#pragma unroll
    for (int k = 0; k < h.VECTORS; k++) {
        h.raw[k] = repack<T>(in + k * h.N);
        store_raw(p + k * h.N, h.raw[k]);
    }
}

/* As row_at, without the divisions where there is nothing to divide. */
template <typename T> __device__ __forceinline__ T *row_ptr(const struct tensor &t, int64_t r)
{
    return t.rank == 2 ? (T *)t.data + r * t.stride[0] : row_at<T>(t, r);
}

/* Row r of a tensor of rank 2. */
template <typename T> __device__ __forceinline__ T *row2(const struct tensor &t, int64_t r)
{
    return (T *)t.data + r * t.stride[0];
}

/* The same rows as a tensor of rank 2, if one stride leads from each to the next. */
static inline bool as_rank2(struct tensor *t)
{
    if (t->data == NULL || t->rank == 2)
        return true;
    for (int i = 0; i < t->rank - 2; i++)
        if (t->dim[i] > 1 && t->stride[i] != t->dim[i + 1] * t->stride[i + 1])
            return false;
    int64_t rows = rows_of(t), d = cols_of(t), stride = t->stride[t->rank - 2];
    t->rank = 2;
    t->dim[0] = rows;
    t->dim[1] = d;
    t->stride[0] = stride;
    t->stride[1] = 1;
    return true;
}

/* Sums of R values over teams of TT neighbouring threads (a power of two), in a fixed order; every thread of the block
 * calls, every thread of a team gets its sums. scratch: R floats per warp of the block. Without LAST the next call must
 * use other scratch. */
template <int TT, int R, bool LAST = true> __device__ __forceinline__ void team_sum(float (&v)[R], float *scratch)
{
    constexpr int IN_WARP = TT < 32 ? TT : 32;
#pragma unroll
    for (int j = 0; j < R; j++)
#pragma unroll
        for (int d = IN_WARP / 2; d > 0; d >>= 1)
            v[j] += __shfl_xor_sync(0xffffffffu, v[j], d);
    if constexpr (TT > 32) {
        constexpr int WARPS = TT / 32;
        int warp = threadIdx.x / 32, first = warp / WARPS * WARPS;
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int j = 0; j < R; j++)
                scratch[warp * R + j] = v[j];
        __syncthreads();
#pragma unroll
        for (int j = 0; j < R; j++) {
            v[j] = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                v[j] += scratch[(first + w) * R + j];
        }
        if (LAST)
            __syncthreads();
    }
}

/* sigmoid; an infinite denominator gives 0. The bits of __expf and __fdividef, which also take care of numbers that are
 * too small: 1 is added to those. */
__device__ __forceinline__ float quick_sigmoid(float x) { return reciprocal_fast(1.0f + exp_fast(-x)); }

/* ---- dropout --------------------------------------------------------------------------------- */

struct drop_rule {
    uint64_t key;
    const int64_t *info; /* NULL: nothing is dropped */
    int64_t seq, first;
    uint32_t threshold;
    float kept; /* 1 / (1 - p) */
};
static inline struct drop_rule drop_rule_of(const struct dropout_rule *r)
{
    struct drop_rule d = {r->key,
                          r->p > 0 ? (const int64_t *)r->info.data : NULL,
                          r->seq > 0 ? r->seq : 1,
                          r->first,
                          dropout_threshold(r->p),
                          (float)(1 / (1 - r->p))};
    return d;
}
/* Where a row stands in the stream of random numbers: dropout_place, with the short division where that does. */
__device__ __forceinline__ struct draw_place drop_row_of(const struct drop_rule &d, int64_t t)
{
    int64_t row = t + d.first;
    bool small = row < (1ll << 32) && d.seq < (1ll << 32);
    int64_t sample = small ? (int64_t)((unsigned)row / (unsigned)d.seq) : row / d.seq;
    struct draw_place r = {d.info[0], d.info[1] + sample, d.info[2] + row - sample * d.seq};
    return r;
}
/* Factors of V channels from c on: V and c are multiples of 4, or V is 1. */
template <int V>
__device__ __forceinline__ void drop_factors(const struct drop_rule &d, const struct draw_place &r, int64_t c,
                                             float (&out)[V])
{
    if constexpr (V == 1) {
        out[0] = dropout_keep(d.key, d.threshold, r.step, r.sample, r.pos, c) ? d.kept : 0.0f;
    } else {
#pragma unroll
        for (int k = 0; k < V / 4; k++) {
            struct philox4 bits = dropout_draw(d.key, r.step, r.sample, r.pos, c + 4 * k);
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[4 * k + i] = bits.v[i] >= d.threshold ? d.kept : 0.0f;
        }
    }
}

#endif
