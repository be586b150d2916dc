/* The runtime API over plain memory. Streams do their work when it is submitted, so they are always idle; a captured
 * graph is the list of what was submitted. BRAID_EMU_DEVICE=80 describes an 8.0 device, otherwise an H200. */
#include "cuda_runtime.h"

#include <chrono>
#include <cuda.h>
#include <stdlib.h>
#include <vector>

struct emu_stream {
    int unused;
};
struct emu_event {
    double time;
};
struct task {
    cudaError_t (*run)(void *);
    std::vector<unsigned char> argument;
};
struct emu_graph {
    std::vector<task> tasks;
};
struct emu_graph_run {
    std::vector<task> tasks;
};

static thread_local cudaError_t last_error;
static thread_local struct emu_graph *capture;

static cudaError_t noted(cudaError_t code)
{
    if (code != cudaSuccess)
        last_error = code;
    return code;
}
extern "C" cudaError_t emu_submit(cudaError_t (*run)(void *), const void *argument, size_t bytes)
{
    const unsigned char *from = (const unsigned char *)argument;
    task t = {run, std::vector<unsigned char>(from, from + bytes)};
    if (capture == NULL)
        return noted(run(t.argument.data()));
    capture->tasks.push_back(t);
    return cudaSuccess;
}

/* ---- the device ------------------------------------------------------------------------------ */

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = 1;
    return cudaSuccess;
}
/* The emulated runtime and driver are those of CUDA 13.0. */
cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) { return cudaRuntimeGetVersion(version); }
cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : noted(cudaErrorInvalidValue); }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int)
{
    const char *want = getenv("BRAID_EMU_DEVICE");
    bool old = want != NULL && strcmp(want, "80") == 0;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "emulated %s", old ? "device 8.0" : "H200");
    p->major = old ? 8 : 9;
    p->multiProcessorCount = old ? 108 : 132;
    p->totalGlobalMem = (size_t)8 << 30;
    p->l2CacheSize = (old ? 40 : 50) << 20;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = (size_t)(old ? 163 : 227) << 10;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    *free_bytes = *total = (size_t)8 << 30;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) { return last_error; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high)
{
    *low = 0;
    *high = -1;
    return cudaSuccess;
}
cudaError_t cudaGetLastError(void)
{
    cudaError_t code = last_error;
    last_error = cudaSuccess;
    return code;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }

static const struct {
    const char *name, *text;
} ERRORS[] = {
    {"cudaSuccess", "no error"},
    {"cudaErrorInvalidValue", "invalid argument"},
    {"cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {"cudaErrorMemoryAllocation", "out of memory"},
    {"cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {"cudaErrorInvalidClusterSize", "invalid cluster size"},
    {"cudaErrorNotSupported", "operation not supported"},
    {"cudaErrorNotReady", "device not ready"},
    {"cudaErrorLaunchFailure", "the emulator stopped the launch; its message is on standard error"},
};
const char *cudaGetErrorString(cudaError_t code) { return ERRORS[code].text; }
const char *cudaGetErrorName(cudaError_t code) { return ERRORS[code].name; }

/* ---- memory ---------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    *out = NULL;
    if (bytes == 0)
        return cudaSuccess;
#if defined(__SANITIZE_ADDRESS__)
    bool wrong = posix_memalign(out, 256, bytes) != 0; /* to the byte, so that what lies beyond is found */
#else
    bool wrong = posix_memalign(out, 256, (bytes + 255) / 256 * 256) != 0;
#endif
    if (!wrong)
        memset(*out, 0xff, bytes); /* not a number, in any type */
    return wrong ? noted(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaMallocHost(void **out, size_t bytes) { return cudaMalloc(out, bytes); }
cudaError_t cudaMallocManaged(void **out, size_t bytes, unsigned) { return cudaMalloc(out, bytes); }
cudaError_t cudaFree(void *p)
{
    free(p);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *p) { return cudaFree(p); }
cudaError_t cudaHostRegister(void *, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr, int)
{
    *value = 1;
    return cudaSuccess;
}

struct copy {
    char *dst;
    const char *src;
    size_t to_pitch, from_pitch, width, height;
};
static cudaError_t run_copy(void *argument)
{
    const struct copy *c = (const struct copy *)argument;
    for (size_t i = 0; i < c->height; i++)
        memmove(c->dst + i * c->to_pitch, c->src + i * c->from_pitch, c->width);
    return cudaSuccess;
}
struct fill {
    void *dst;
    int byte;
    size_t bytes;
};
static cudaError_t run_fill(void *argument)
{
    const struct fill *f = (const struct fill *)argument;
    memset(f->dst, f->byte, f->bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind)
{
    memmove(dst, src, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind, cudaStream_t)
{
    struct copy c = {(char *)dst, (const char *)src, 0, 0, bytes, 1};
    return emu_submit(run_copy, &c, sizeof c);
}
cudaError_t cudaMemcpy2DAsync(void *dst, size_t to_pitch, const void *src, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind, cudaStream_t)
{
    struct copy c = {(char *)dst, (const char *)src, to_pitch, from_pitch, width, height};
    if (width > to_pitch || width > from_pitch)
        return noted(cudaErrorInvalidValue);
    return emu_submit(run_copy, &c, sizeof c);
}
cudaError_t cudaMemsetAsync(void *dst, int byte, size_t bytes, cudaStream_t)
{
    struct fill f = {dst, byte, bytes};
    return emu_submit(run_fill, &f, sizeof f);
}

/* ---- streams, events, graphs ----------------------------------------------------------------- */

cudaError_t cudaStreamCreate(cudaStream_t *s)
{
    *s = new emu_stream();
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) { return cudaStreamCreate(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned, int) { return cudaStreamCreate(s); }
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    delete s;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return last_error; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus *status)
{
    *status = capture != NULL ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, enum cudaStreamCaptureMode)
{
    if (capture != NULL)
        return noted(cudaErrorNotSupported);
    capture = new emu_graph();
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph)
{
    *graph = capture;
    capture = NULL;
    return *graph != NULL ? cudaSuccess : noted(cudaErrorInvalidValue);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *run, cudaGraph_t graph, unsigned long long)
{
    *run = new emu_graph_run{graph->tasks};
    return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t run, cudaStream_t)
{
    for (task &t : run->tasks) {
        cudaError_t code = t.run(t.argument.data());
        if (code != cudaSuccess)
            return noted(code);
    }
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t run)
{
    delete run;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *e)
{
    *e = new emu_event();
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) { return cudaEventCreate(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    delete e;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t)
{
    e->time = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    *ms = (float)(1e3 * (to->time - from->time));
    return cudaSuccess;
}

extern "C" CUresult emu_encode_tiled(CUtensorMap *, int, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                                     const cuuint32_t *, const cuuint32_t *, int, int, int, int);
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found)
{
    bool known = strcmp(name, "cuTensorMapEncodeTiled") == 0;
    *out = known ? (void *)emu_encode_tiled : NULL;
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
