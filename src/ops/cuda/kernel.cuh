/* What every .cu file shares: types, launches, reductions, 16-byte accesses. Kernels are templates over the real type
 * (float or bf16) and small integers only; launchers are extern "C" functions with the signatures of ops.h.
 *
 * House rules: fp32 arithmetic, one rounding on store; no floating-point atomics; the order of every sum depends on
 * shapes only; every launch is followed by cuda_launched (LAUNCH does it). */
#ifndef BRAID_OPS_CUDA_KERNEL_CUH
#define BRAID_OPS_CUDA_KERNEL_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

extern "C" {
#include "dev/cuda.h"
#include "ops/check.h"
#include "ops/ops_cuda_int.h"
}

typedef __nv_bfloat16 bf16;

static inline cudaStream_t stream_of(const struct lane *l) { return (cudaStream_t)cuda_stream(l); }

/* Launch on the lane's stream and return from the caller if that failed. An empty grid does nothing. */
#define LAUNCH(lane, kernel, grid, block, smem, ...)                                                                   \
    do {                                                                                                               \
        cudaLaunchConfig_t config_ = {};                                                                               \
        config_.gridDim = dim3(grid);                                                                                  \
        config_.blockDim = dim3(block);                                                                                \
        config_.dynamicSmemBytes = (smem);                                                                             \
        config_.stream = stream_of(lane);                                                                              \
        if (config_.gridDim.x > 0 && config_.gridDim.y > 0 && config_.gridDim.z > 0) {                                 \
            (void)cudaLaunchKernelEx(&config_, kernel, __VA_ARGS__);                                                   \
            TRY(cuda_launched(lane, #kernel));                                                                         \
        }                                                                                                              \
    } while (0)

/* The same in clusters of so many blocks; the grid is a multiple of it. Sizes above 8 are not portable. */
#define LAUNCH_CLUSTER(lane, kernel, grid, cluster, block, smem, ...)                                                  \
    do {                                                                                                               \
        cudaLaunchConfig_t config_ = {};                                                                               \
        cudaLaunchAttribute attribute_ = {};                                                                           \
        attribute_.id = cudaLaunchAttributeClusterDimension;                                                           \
        attribute_.val.clusterDim = {(unsigned)(cluster), 1, 1};                                                       \
        config_.gridDim = dim3(grid);                                                                                  \
        config_.blockDim = dim3(block);                                                                                \
        config_.dynamicSmemBytes = (smem);                                                                             \
        config_.stream = stream_of(lane);                                                                              \
        config_.attrs = &attribute_;                                                                                   \
        config_.numAttrs = 1;                                                                                          \
        TRY(cuda_status((lane)->err, (int)cudaLaunchKernelEx(&config_, kernel, __VA_ARGS__), "launch of " #kernel));   \
    } while (0)

/* The shared memory a launch asks for, as an array of this type (the emulator of tests/emu has its own). */
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name, align)                                                                              \
    extern __shared__ __align__(align)                                                                                 \
    type name[]
#endif

/* Run the statement with T bound to the element type of the tensor: BY_REAL(a->x.dtype, T, { ... }). */
#define BY_REAL(dtype_, T, ...)                                                                                        \
    do {                                                                                                               \
        if ((dtype_) == DT_BF16) {                                                                                     \
            typedef bf16 T;                                                                                            \
            __VA_ARGS__;                                                                                               \
        } else {                                                                                                       \
            typedef float T;                                                                                           \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (0)

/* More than 48 KB of dynamic shared memory must be asked for. */
#define NEEDS_SMEM(lane, kernel, bytes)                                                                                \
    TRY(cuda_status((lane)->err,                                                                                       \
                    (int)cudaFuncSetAttribute((kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes)),    \
                    "cudaFuncSetAttribute(" #kernel ")"))

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
/* What a store and a load make of x. */
template <typename T> __device__ __forceinline__ float rounded(float x) { return to_float(from_float<T>(x)); }

/* Elements in 16 bytes, and whether a row of n elements at this address can be taken so. */
template <typename T> struct pack {
    static constexpr int N = 16 / (int)sizeof(T);
    T v[N];
};
template <typename T> __device__ __forceinline__ pack<T> load16(const T *p)
{
    union {
        uint4 raw;
        pack<T> v;
    } u;
    u.raw = *(const uint4 *)p;
    return u.v;
}
template <typename T> __device__ __forceinline__ void store16(T *p, const pack<T> &v)
{
    union {
        uint4 raw;
        pack<T> v;
    } u;
    u.v = v;
    *(uint4 *)p = u.raw;
}
static inline bool aligned16(const struct tensor *t)
{
    int64_t n = 16 / (int64_t)dtype_bytes(t->dtype);
    if ((uintptr_t)t->data % 16 != 0 || t->dim[t->rank - 1] % n != 0)
        return false;
    for (int i = 0; i < t->rank - 1; i++)
        if (t->stride[i] % n != 0)
            return false;
    return true;
}
static inline bool absent_or_aligned16(const struct tensor *t) { return t->data == NULL || aligned16(t); }

/* Sums in a fixed order: all lanes of the warp get the result. */
__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
        x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
__device__ __forceinline__ float warp_max(float x)
{
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
/* Over a block of THREADS (a multiple of 32); all threads get the result. scratch: THREADS / 32 floats; safe to call
 * again at once with the same scratch. */
template <int THREADS> __device__ __forceinline__ float block_sum(float x, float *scratch)
{
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++)
        sum += scratch[w];
    __syncthreads();
    return sum;
}
template <int THREADS> __device__ __forceinline__ float block_max(float x, float *scratch)
{
    x = warp_max(x);
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float m = scratch[0];
#pragma unroll
    for (int w = 1; w < THREADS / 32; w++)
        m = fmaxf(m, scratch[w]);
    __syncthreads();
    return m;
}

/* Address of row r (flat over all dims but the last) of a strided tensor, as row_offset() of ops/check.h. */
template <typename T> __device__ __forceinline__ T *row_at(const struct tensor &t, int64_t r)
{
    int64_t at = 0;
    for (int i = t.rank - 2; i > 0; i--) {
        at += r % t.dim[i] * t.stride[i];
        r /= t.dim[i];
    }
    return (T *)t.data + (t.rank >= 2 ? at + r * t.stride[0] : at);
}

#endif
