/* CUDA C++ as plain C++: qualifiers, vector types, built-in variables and functions of device code, and launches.
 * Threads are fibers of the emulator (emu.h). Only what braid's kernels use. */
#ifndef BRAID_EMU_CUDA_RUNTIME_H
#define BRAID_EMU_CUDA_RUNTIME_H

#include "cuda_runtime_api.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
/* One block at a time runs on an OS thread; blocks of a cluster run together, and must not use this (emu.h). */
#define __shared__ static thread_local
#define DYNAMIC_SHARED(type, name, align) type *name = (type *)emu_dynamic_shared(align)

/* ---- vector types ---------------------------------------------------------------------------- */

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(16) double2 { double x, y; };

static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }

#include "emu.h"

#define threadIdx (emu_self->thread)
#define blockIdx (emu_self->block)
extern __thread uint3 blockDim, gridDim; /* of the launch this OS thread works for */
#define warpSize 32

/* ---- bits and functions ---------------------------------------------------------------------- */

template <typename To, typename From> static inline To emu_bits(From x)
{
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
static inline float __int_as_float(int x) { return emu_bits<float>(x); }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned by)
{
    unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++)
        out |= (unsigned)(both >> 8 * (by >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
static inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return emu_bits<int>(x); }

template <typename A, typename B> static inline std::common_type_t<A, B> min(A a, B b)
{
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return (T)fmin((T)a, (T)b);
    else
        return (T)a < (T)b ? (T)a : (T)b;
}
template <typename A, typename B> static inline std::common_type_t<A, B> max(A a, B b)
{
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return (T)fmax((T)a, (T)b);
    else
        return (T)a > (T)b ? (T)a : (T)b;
}

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
#define __expf(x) expf(x) /* the C library has functions of these names */
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
static inline float __fdividef(float x, float y)
{
    return fabsf(y) > 8.5e37f ? (isinf(x) ? NAN : isnan(y) ? y : 0.0f * x) : x / y;
}
static inline float __frcp_rn(float x) { return 1.0f / x; }
/* Not to be fused with an addition: the compiler may not look inside. */
static inline float emu_whole(float x)
{
    __asm__ volatile("" : "+m"(x));
    return x;
}
static inline float __fmul_rn(float x, float y) { return emu_whole(x * y); }
static inline float __fadd_rn(float x, float y) { return emu_whole(x) + emu_whole(y); }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline unsigned __vmaxu2(unsigned a, unsigned b)
{
    unsigned high = (a >> 16) > (b >> 16) ? a : b, low = (a & 0xffffu) > (b & 0xffffu) ? a : b;
    return (high & 0xffff0000u) | (low & 0xffffu);
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
static inline int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }

template <typename T> static inline T __ldg(const T *p) { return *p; }
template <typename T> static inline T __ldcs(const T *p) { return *p; }
template <typename T> static inline T __ldcg(const T *p) { return *p; }
template <typename T> static inline void __stcs(T *p, T v) { *p = v; }
template <typename T> static inline void __stcg(T *p, T v) { *p = v; }

template <typename T> static inline T atomicAdd(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
template <typename T> static inline T atomicMax(T *p, T v)
{
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
    return old;
}
static inline void __threadfence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block(void) {}
static inline void __nanosleep(unsigned ns)
{
    (void)ns;
    emu_yield();
}
static inline void __trap(void) { emu_fail("__trap()"); }
#define __cvta_generic_to_shared(p) ((size_t)emu_shared_address(p))

/* ---- a warp together ------------------------------------------------------------------------- */

static inline void __syncthreads(void) { emu_block_barrier(); }
static inline void __syncwarp(unsigned mask = 0xffffffffu) { emu_meet(mask, EMU_SYNCWARP, NULL, 0, NULL); }

/* What lane `from` gave; a lane that is not of the mask has given nothing. */
template <typename T> static inline T emu_given(const struct emu_meeting *m, int from)
{
    T v;
    if (m->mask >> from & 1)
        memcpy(&v, m->given[from], sizeof v);
    else
        memset((void *)&v, 0xff, sizeof v);
    return v;
}
template <typename T> static inline T emu_shuffle(unsigned mask, T v, int from, bool inside)
{
    const struct emu_meeting *m = emu_meet(mask, EMU_SHUFFLE, &v, sizeof v, NULL);
    return inside ? emu_given<T>(m, from) : v;
}
template <typename T> static inline T __shfl_sync(unsigned mask, T v, int from, int width = 32)
{
    int lane = emu_self->lane;
    return emu_shuffle(mask, v, lane / width * width + (from & (width - 1)), true);
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32)
{
    int lane = emu_self->lane, from = lane ^ bits;
    return emu_shuffle(mask, v, from & 31, from < lane / width * width + width);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32)
{
    int lane = emu_self->lane, from = lane - (int)by;
    return emu_shuffle(mask, v, from & 31, from >= lane / width * width);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32)
{
    int lane = emu_self->lane, from = lane + (int)by;
    return emu_shuffle(mask, v, from & 31, from < lane / width * width + width);
}
static inline unsigned __ballot_sync(unsigned mask, int yes)
{
    unsigned votes = 0;
    const struct emu_meeting *m = emu_meet(mask, EMU_VOTE, &yes, sizeof yes, NULL);
    for (int l = 0; l < 32; l++)
        if (m->came >> l & 1 && emu_given<int>(m, l) != 0)
            votes |= 1u << l;
    return votes;
}
static inline unsigned __activemask(void) { return emu_self->warp_mask; }
static inline int __any_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) != 0; }
static inline int __all_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes == 0) == 0; }
template <typename T> static inline unsigned __match_any_sync(unsigned mask, T v)
{
    unsigned same = 0;
    const struct emu_meeting *m = emu_meet(mask, EMU_MATCH, &v, sizeof v, NULL);
    for (int l = 0; l < 32; l++)
        if (m->came >> l & 1 && emu_given<T>(m, l) == v)
            same |= 1u << l;
    return same;
}
template <typename T> static inline T __reduce_max_sync(unsigned mask, T v)
{
    const struct emu_meeting *m = emu_meet(mask, EMU_REDUCE, &v, sizeof v, NULL);
    for (int l = 0; l < 32; l++)
        if (m->came >> l & 1)
            v = max(v, emu_given<T>(m, l));
    return v;
}
template <typename T> static inline T __reduce_min_sync(unsigned mask, T v)
{
    const struct emu_meeting *m = emu_meet(mask, EMU_REDUCE, &v, sizeof v, NULL);
    for (int l = 0; l < 32; l++)
        if (m->came >> l & 1)
            v = min(v, emu_given<T>(m, l));
    return v;
}

/* ---- launches -------------------------------------------------------------------------------- */

enum cudaLaunchAttributeID { cudaLaunchAttributeIgnore, cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        struct {
            unsigned x, y, z;
        } clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

/* A kernel and its arguments, for any number of threads. */
template <typename... P> struct emu_call {
    void (*kernel)(P...);
    std::tuple<P...> args;
    static void run(const void *call)
    {
        const emu_call *c = (const emu_call *)call;
        std::apply(c->kernel, c->args);
    }
    static void *copy(const void *call) { return new emu_call(*(const emu_call *)call); }
    static void drop(void *call) { delete (emu_call *)call; }
};

template <typename... P, typename... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c, void (*kernel)(P...), A &&...args)
{
    emu_call<P...> call = {kernel, std::tuple<P...>(static_cast<P>(args)...)};
    struct emu_launch l = {};
    l.grid = {c->gridDim.x, c->gridDim.y, c->gridDim.z};
    l.block = {c->blockDim.x, c->blockDim.y, c->blockDim.z};
    l.cluster = 1;
    l.shared = c->dynamicSmemBytes;
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
            l.cluster = c->attrs[i].val.clusterDim.x;
    l.kernel = (const void *)kernel;
    l.run = emu_call<P...>::run;
    l.copy = emu_call<P...>::copy;
    l.drop = emu_call<P...>::drop;
    l.call = &call;
    return emu_launch_kernel(&l);
}
template <typename F> static inline cudaError_t cudaFuncSetAttribute(F *kernel, cudaFuncAttribute what, int value)
{
    return emu_kernel_attribute((const void *)kernel, what, value);
}
template <typename F>
static inline cudaError_t cudaOccupancyMaxActiveClusters(int *n, F *kernel, const cudaLaunchConfig_t *c)
{
    unsigned cluster = 1;
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeClusterDimension)
            cluster = c->attrs[i].val.clusterDim.x;
    return emu_active_clusters(n, (const void *)kernel, cluster, c->blockDim.x * c->blockDim.y * c->blockDim.z,
                               c->dynamicSmemBytes);
}
template <typename T> static inline cudaError_t cudaMalloc(T **out, size_t bytes)
{
    return cudaMalloc((void **)out, bytes);
}
template <typename T>
static inline cudaError_t cudaMallocManaged(T **out, size_t bytes, unsigned flags = cudaMemAttachGlobal)
{
    return cudaMallocManaged((void **)out, bytes, flags);
}

#endif
