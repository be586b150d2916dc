// What comm/ asks of a GPU: copies on a lane, sums of pieces in rank order, and a copy that takes as long as a link
// would.
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

extern "C" {
#include "comm/gpu_int.h"
#include "dev/cuda.h"
}

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

static cudaStream_t stream_of(const struct lane *l) { return (cudaStream_t)cuda_stream(l); }

extern "C" int gpu_comm_alloc(void **out, int64_t bytes, struct err *e)
{
    return cuda_status(e, (int)cudaMalloc(out, (size_t)bytes), "cudaMalloc of a message");
}
extern "C" void gpu_comm_free(void *p) { cudaFree(p); }
extern "C" int gpu_comm_copy(struct lane *l, void *dst, const void *src, int64_t bytes)
{
    return cuda_status(l->err, (int)cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, stream_of(l)),
                       "copy of a message");
}
extern "C" int gpu_comm_sync(struct lane *l)
{
    return cuda_status(l->err, (int)cudaStreamSynchronize(stream_of(l)),
                       "cudaStreamSynchronize of a lane that communicates");
}
extern "C" int gpu_comm_idle(struct dev *d, bool *idle, struct err *e)
{
    struct cuda_dev *c = (struct cuda_dev *)d->impl;
    *idle = true;
    for (int i = 0; i < CUDA_LANES; i++) {
        cudaError_t code = cudaStreamQuery((cudaStream_t)c->stream[i]);
        if (code == cudaErrorNotReady)
            *idle = false;
        else if (code != cudaSuccess)
            return cuda_status(e, (int)code, "cudaStreamQuery");
    }
    return ST_OK;
}

// ---- memory that other processes read
// --------------------------------------------------------------------------------------

extern "C" int gpu_comm_id(const struct dev *d, char out[GPU_ID_BYTES], struct err *e)
{
    struct cudaDeviceProp p;
    int device = 0;
    (void)d;
    TRY(cuda_status(e, (int)cudaGetDevice(&device), "cudaGetDevice"));
    TRY(cuda_status(e, (int)cudaGetDeviceProperties(&p, device), "cudaGetDeviceProperties"));
    static_assert(sizeof p.uuid.bytes == GPU_ID_BYTES, "a GPU's identity");
    memcpy(out, p.uuid.bytes, GPU_ID_BYTES);
    return ST_OK;
}

typedef CUresult (*attributes_fn)(unsigned, CUpointer_attribute *, void **, CUdeviceptr);

extern "C" int gpu_comm_export(const void *p, struct gpu_export *out, struct err *e)
{
    void *entry = NULL;
    cudaDriverEntryPointQueryResult found;
    TRY(cuda_status(
        e, (int)cudaGetDriverEntryPointByVersion("cuPointerGetAttributes", &entry, 12000, cudaEnableDefault, &found),
        "finding cuPointerGetAttributes"));
    if (found != cudaDriverEntryPointSuccess || entry == NULL)
        return err_set(e, ST_UNSUPPORTED, "the driver lacks cuPointerGetAttributes");
    CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                   CU_POINTER_ATTRIBUTE_BUFFER_ID};
    CUdeviceptr start = 0;
    size_t bytes = 0;
    unsigned long long id = 0;
    void *values[] = {&start, &bytes, &id};
    CUresult code = ((attributes_fn)entry)(3, which, values, (CUdeviceptr)p);
    if (code != CUDA_SUCCESS || start == 0)
        return err_set(e, ST_INTERNAL, "%p is not memory of a GPU: driver error %d", p, (int)code);
    cudaIpcMemHandle_t handle;
    TRY(cuda_status(e, (int)cudaIpcGetMemHandle(&handle, (void *)start), "cudaIpcGetMemHandle"));
    static_assert(sizeof handle == sizeof out->handle, "a handle fits");
    memcpy(out->handle, &handle, sizeof handle);
    out->id = id;
    out->start = start;
    out->bytes = bytes;
    out->offset = (int64_t)((CUdeviceptr)p - start);
    return ST_OK;
}

extern "C" int gpu_comm_import(const struct gpu_export *x, void **base, struct err *e)
{
    cudaIpcMemHandle_t handle;
    memcpy(&handle, x->handle, sizeof handle);
    cudaError_t code = cudaIpcOpenMemHandle(base, handle, cudaIpcMemLazyEnablePeerAccess);
    if (code != cudaSuccess)
        cudaGetLastError();
    return cuda_status(e, (int)code, "cudaIpcOpenMemHandle");
}

extern "C" void gpu_comm_unimport(void *base) { cudaIpcCloseMemHandle(base); }

extern "C" void gpu_comm_peek(const void *p, uint64_t *out)
{
    if (cudaMemcpy(out, p, sizeof *out, cudaMemcpyDeviceToHost) != cudaSuccess)
        *out = 0;
}

// ---- streams of their own
// --------------------------------------------------------------------------------------------------

extern "C" void *gpu_comm_stream(struct lane *l) { return cuda_stream(l); }
extern "C" int gpu_comm_stream_open(void **out, struct err *e)
{
    cudaStream_t s = NULL;
    int st = cuda_status(e, (int)cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreate");
    *out = s;
    return st;
}
extern "C" void gpu_comm_stream_close(void *stream)
{
    if (stream != NULL)
        cudaStreamDestroy((cudaStream_t)stream);
}
extern "C" int gpu_comm_stream_after(void *stream, struct lane *l)
{
    cudaEvent_t ev;
    TRY(cuda_status(l->err, (int)cudaEventCreateWithFlags(&ev, cudaEventDisableTiming), "cudaEventCreate"));
    cudaError_t code = cudaEventRecord(ev, stream_of(l));
    if (code == cudaSuccess)
        code = cudaStreamWaitEvent((cudaStream_t)stream, ev, 0);
    cudaEventDestroy(ev); // goes when it has passed
    return cuda_status(l->err, (int)code, "a send waits for its lane");
}
extern "C" int gpu_comm_message_mark(void **event, void *stream, struct err *e)
{
    if (*event == NULL) {
        cudaEvent_t ev;
        TRY(cuda_status(e, (int)cudaEventCreateWithFlags(&ev, cudaEventDisableTiming), "cudaEventCreate"));
        *event = ev;
    }
    return cuda_status(e, (int)cudaEventRecord((cudaEvent_t)*event, (cudaStream_t)stream), "cudaEventRecord of a send");
}
extern "C" bool gpu_comm_message_free(void *event) { return cudaEventQuery((cudaEvent_t)event) == cudaSuccess; }
extern "C" void gpu_comm_event_close(void *event) { cudaEventDestroy((cudaEvent_t)event); }

// ---- sums
// -------------------------------------------------------------------------------------------------------------------

template <typename T> struct acc_of {
    typedef T type;
};
template <> struct acc_of<__nv_bfloat16> {
    typedef float type;
};

template <typename T> __global__ static void sum_kernel(T *out, const T *in, int64_t n, int pieces)
{
    typedef typename acc_of<T>::type A;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        A a = (A)in[i];
        for (int r = 1; r < pieces; r++)
            a = (A)(a + (A)in[(int64_t)r * n + i]);
        out[i] = (T)a;
    }
}

template <typename T> static void launch_sum(struct lane *l, const struct tensor *out, const void *in, int pieces)
{
    int64_t n = tensor_elems(out), blocks = min_i64(ceil_div(n, 256), 1024);
    sum_kernel<T><<<(unsigned)blocks, 256, 0, stream_of(l)>>>((T *)out->data, (const T *)in, n, pieces);
}

extern "C" int gpu_comm_sum(struct lane *l, const struct tensor *out, const void *in, int pieces)
{
    switch (out->dtype) {
    case DT_F64: launch_sum<double>(l, out, in, pieces); break;
    case DT_F32: launch_sum<float>(l, out, in, pieces); break;
    case DT_BF16: launch_sum<__nv_bfloat16>(l, out, in, pieces); break;
    case DT_I64: launch_sum<int64_t>(l, out, in, pieces); break;
    case DT_I32: launch_sum<int32_t>(l, out, in, pieces); break;
    default: return err_set(l->err, ST_INTERNAL, "no sum of %s on a GPU", dtype_name(out->dtype));
    }
    return cuda_launched(l, "sum of pieces");
}

__global__ static void sum_bf16_kernel(float *out, const __nv_bfloat16 *in, int64_t n, int pieces, bool add)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        float a = (float)in[i];
        for (int r = 1; r < pieces; r++)
            a += (float)in[(int64_t)r * n + i];
        out[i] = add ? out[i] + a : a;
    }
}

__global__ static void round_kernel(__nv_bfloat16 *to, const float *from, int64_t n)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        to[i] = __float2bfloat16(from[i]);
}

static unsigned blocks_for(int64_t n) { return (unsigned)min_i64(ceil_div(n, 256), 1024); }

extern "C" int gpu_comm_sum_bf16(struct lane *l, const struct tensor *out, const void *in, int pieces, bool add)
{
    int64_t n = tensor_elems(out);
    if (out->dtype != DT_F32)
        return err_set(l->err, ST_INTERNAL, "no sum of bf16 pieces as %s on a GPU", dtype_name(out->dtype));
    sum_bf16_kernel<<<blocks_for(n), 256, 0, stream_of(l)>>>((float *)out->data, (const __nv_bfloat16 *)in, n, pieces,
                                                             add);
    return cuda_launched(l, "sum of bf16 pieces");
}

extern "C" int gpu_comm_round(struct lane *l, const struct tensor *to, const struct tensor *from)
{
    int64_t n = tensor_elems(from);
    if (from->dtype != DT_F32)
        return err_set(l->err, ST_INTERNAL, "no rounding of %s to bf16 on a GPU", dtype_name(from->dtype));
    round_kernel<<<blocks_for(n), 256, 0, stream_of(l)>>>((__nv_bfloat16 *)to->data, (const float *)from->data, n);
    return cuda_launched(l, "rounding to bf16");
}

// ---- a link of limited rate
// ------------------------------------------------------------------------------------------------

__device__ static unsigned long long now_ns()
{
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

enum { LINK_MOST_BLOCKS = 32, LINK_THREADS = 512, LINK_UNROLL = 16 };
static const double LINK_BLOCK_RATE = 60; // GB/s that one block copies with ease

// Each block copies its share in chunks and waits after each until the rate allows the next. Few blocks: compute beside
// them keeps nearly the whole GPU, as it would beside a network card. 16 bytes at a time, the rest byte by byte.
__global__ static void slow_copy_kernel(char *dst, const char *src, int64_t bytes, double ns_latency,
                                        double ns_per_byte)
{
    const int64_t chunk = (int64_t)LINK_THREADS * LINK_UNROLL * 16;
    int64_t n16 = bytes / 16 * 16;
    bool aligned = (((uintptr_t)dst | (uintptr_t)src) & 15) == 0;
    unsigned long long start = now_ns();
    for (int64_t at = (int64_t)blockIdx.x * chunk; at < bytes; at += (int64_t)gridDim.x * chunk) {
        int64_t end = at + chunk < bytes ? at + chunk : bytes;
        if (dst != src) {
            int64_t wide = !aligned ? at : end < n16 ? end : n16;
            uint4 v[LINK_UNROLL];
#pragma unroll
            for (int u = 0; u < LINK_UNROLL; u++) {
                int64_t i = at + ((int64_t)u * LINK_THREADS + threadIdx.x) * 16;
                if (i < wide)
                    v[u] = *(const uint4 *)(src + i);
            }
#pragma unroll
            for (int u = 0; u < LINK_UNROLL; u++) {
                int64_t i = at + ((int64_t)u * LINK_THREADS + threadIdx.x) * 16;
                if (i < wide)
                    *(uint4 *)(dst + i) = v[u];
            }
            for (int64_t i = (wide > at ? wide : at) + threadIdx.x; i < end; i += LINK_THREADS)
                dst[i] = src[i];
        }
        double due = ns_latency + ns_per_byte * (double)end;
        while ((double)(now_ns() - start) < due)
            __nanosleep(200);
    }
    while ((double)(now_ns() - start) < ns_latency + ns_per_byte * (double)bytes)
        __nanosleep(200);
}

extern "C" int gpu_comm_slow_copy(struct lane *l, void *dst, const void *src, int64_t bytes, double latency,
                                  double seconds)
{
    double per_byte = bytes > 0 ? seconds * 1e9 / (double)bytes : 0;
    if (latency == 0 &&
        per_byte < 1e-3) // faster than so few blocks: a link without limits, as schedules are compared with
        return dst != src ? gpu_comm_copy(l, dst, src, bytes) : ST_OK;
    double blocks = per_byte > 0 ? 1 / per_byte / LINK_BLOCK_RATE + 1
                                 : 1; // no more than the rate needs: each takes room from what computes
    int64_t most = min_i64(max_i64(ceil_div(bytes, (int64_t)LINK_THREADS * LINK_UNROLL * 16), 1), LINK_MOST_BLOCKS);
    int n = blocks < (double)most ? (int)blocks : (int)most;
    slow_copy_kernel<<<(unsigned)n, LINK_THREADS, 0, stream_of(l)>>>((char *)dst, (const char *)src, bytes,
                                                                     latency * 1e9, per_byte);
    return cuda_launched(l, "slow copy");
}
