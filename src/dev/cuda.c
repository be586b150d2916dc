/* The CUDA device: memory, streams as lanes, events between them, captured runs. Plain C on the runtime API, which is
 * linked statically; the driver is found at run time, so a binary built with CUDA also starts without a GPU. */
#include "dev/cuda.h"
#include "dev/gpus.h"
#include "dev/host.h"

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Host values travel through pinned memory, so that the host need not wait for the GPU to take them. */
enum { STAGING_BYTES = 16 << 20 };

struct cuda_impl {
    struct cuda_dev pub; /* first: cuda_of() casts */
    struct cuda_memo memo;
    char *staging;
    int64_t staging_used;
    cudaEvent_t *event;
    size_t n_events;
    bool capturing;
};

static struct cuda_impl *impl_of(const struct dev *d) { return d->impl; }

int cuda_status(struct err *e, int code, const char *what)
{
    if (code == (int)cudaSuccess)
        return ST_OK;
    enum status st = code == (int)cudaErrorMemoryAllocation ? ST_NOMEM : ST_INTERNAL;
    return err_set(e, st, "%s: %s (%s)", what, cudaGetErrorString((cudaError_t)code),
                   cudaGetErrorName((cudaError_t)code));
}

#define CUDA(e, call) TRY(cuda_status(e, (int)(call), #call))

int cuda_tensor_maps(const struct lane *l, void **encoder)
{
    struct cuda_memo *memo = cuda_of(l)->memo;
    enum cudaDriverEntryPointQueryResult found;
    *encoder = memo != NULL ? memo->tensor_maps : NULL;
    if (*encoder != NULL)
        return ST_OK;
    CUDA(l->err, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", encoder, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || *encoder == NULL)
        return err_set(l->err, ST_UNSUPPORTED, "the driver lacks cuTensorMapEncodeTiled");
    if (memo != NULL)
        memo->tensor_maps = *encoder;
    return ST_OK;
}

int cuda_launched(const struct lane *l, const char *kernel)
{
    cudaError_t code = cudaPeekAtLastError();
    if (code == cudaSuccess)
        return ST_OK;
    cudaGetLastError();
    return cuda_status(l->err, (int)code, kernel);
}

int cuda_enter(int index, int *before, struct err *e)
{
    CUDA(e, cudaGetDevice(before));
    if (*before != index)
        CUDA(e, cudaSetDevice(index));
    return ST_OK;
}

void cuda_leave(int index, int before)
{
    if (before != index)
        cudaSetDevice(before);
}

static cudaStream_t stream(const struct dev *d, int lane) { return impl_of(d)->pub.stream[lane]; }

static int gpu_alloc(struct dev *d, int64_t bytes, void **out, struct err *e)
{
    (void)d;
    cudaError_t code = cudaMalloc(out, (size_t)bytes);
    if (code == cudaSuccess)
        return ST_OK;
    cudaGetLastError();
    return cuda_status(e, (int)code, "cudaMalloc");
}

static void gpu_free(struct dev *d, void *p)
{
    (void)d;
    cudaFree(p);
}

/* Pinned memory. cudaMallocHost clears and pins its pages by one thread, which takes tens of seconds for a hundred
 * gigabytes; so pages are mapped, huge where they can be, touched by all threads, which makes the kernel clear them,
 * and then pinned in one piece (a copy must not cross two pieces). Where that is refused, cudaMallocHost does it all.
 * In front of the memory lies what is needed to free it. */
enum { HUGE_PAGE = 1 << 21, SMALL_PAGE = 4096 };
struct pinned {
    char *map; /* NULL: of cudaMallocHost, from `base` on */
    char *base;
    size_t bytes;
};
static struct pinned *pinned_of(void *p) { return (struct pinned *)(void *)((char *)p - sizeof(struct pinned)); }

static int pin_pages(size_t bytes, void **out)
{
    size_t all = bytes + 2 * (size_t)HUGE_PAGE;
    char *map = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        return ST_NOMEM;
    char *at = map + (2 * (size_t)HUGE_PAGE - (uintptr_t)map % HUGE_PAGE);
    madvise(map, all, MADV_HUGEPAGE); /* refusal costs only time */
#pragma omp parallel for schedule(static) if (bytes > HUGE_PAGE)
    for (size_t i = 0; i < bytes; i += SMALL_PAGE)
        ((volatile char *)at)[i] = 0;
    if (cudaHostRegister(at, bytes, cudaHostRegisterDefault) != cudaSuccess) {
        cudaGetLastError();
        munmap(map, all);
        return ST_UNSUPPORTED;
    }
    *out = at;
    *pinned_of(at) = (struct pinned){.map = map, .bytes = all};
    return ST_OK;
}

int cuda_alloc_host(int64_t bytes, void **out, struct err *e)
{
    char *base = NULL;
    int reachable = 0, device = 0;
    if (cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&reachable, cudaDevAttrCanUseHostPointerForRegisteredMem, device) == cudaSuccess &&
        reachable != 0 && pin_pages((size_t)bytes, out) == ST_OK)
        return ST_OK;
    cudaGetLastError();
    cudaError_t code = cudaMallocHost((void **)&base, (size_t)bytes + SMALL_PAGE);
    if (code != cudaSuccess) {
        cudaGetLastError();
        return cuda_status(e, (int)code, "cudaMallocHost");
    }
    *out = base + SMALL_PAGE;
    memset(*out, 0, (size_t)bytes);
    *pinned_of(*out) = (struct pinned){.base = base};
    return ST_OK;
}

void cuda_free_host(void *p)
{
    struct pinned x = *pinned_of(p);
    if (x.map == NULL) {
        cudaFreeHost(x.base);
        return;
    }
    cudaHostUnregister(p);
    munmap(x.map, x.bytes);
}

int cuda_copy_on(struct dev *d, int lane, void *dst, const void *src, int64_t bytes, struct err *e)
{
    if (bytes > 0)
        CUDA(e, cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, stream(d, lane)));
    return ST_OK;
}

/* On the stream of lane 0, in order with what runs there; the host memory may be reused at once. The other end may be
 * pinned memory, too (optim.offload). */
static int gpu_copy_in(struct dev *d, void *dst, const void *host, int64_t bytes, struct err *e)
{
    struct cuda_impl *c = impl_of(d);
    if (bytes <= 0)
        return ST_OK;
    if (bytes > STAGING_BYTES) {
        CUDA(e, cudaStreamSynchronize(stream(d, 0)));
        CUDA(e, cudaMemcpy(dst, host, (size_t)bytes, cudaMemcpyDefault));
        return ST_OK;
    }
    if (c->staging_used + bytes > STAGING_BYTES) {
        CUDA(e, cudaStreamSynchronize(stream(d, 0)));
        c->staging_used = 0;
    }
    char *at = c->staging + c->staging_used;
    c->staging_used += round_up(bytes, DEV_ALIGN);
    memcpy(at, host, (size_t)bytes);
    CUDA(e, cudaMemcpyAsync(dst, at, (size_t)bytes, cudaMemcpyDefault, stream(d, 0)));
    return ST_OK;
}

static int gpu_copy_out(struct dev *d, void *host, const void *src, int64_t bytes, struct err *e)
{
    if (bytes <= 0)
        return ST_OK;
    CUDA(e, cudaMemcpyAsync(host, src, (size_t)bytes, cudaMemcpyDefault, stream(d, 0)));
    CUDA(e, cudaStreamSynchronize(stream(d, 0)));
    return ST_OK;
}

static int gpu_fill(struct dev *d, void *dst, int byte, int64_t bytes, struct err *e)
{
    if (bytes > 0)
        CUDA(e, cudaMemsetAsync(dst, byte, (size_t)bytes, stream(d, 0)));
    return ST_OK;
}

static int gpu_sync(struct dev *d, struct err *e)
{
    (void)d;
    CUDA(e, cudaDeviceSynchronize());
    return ST_OK;
}

static int64_t gpu_available(struct dev *d)
{
    size_t free_bytes = 0, total = 0;
    (void)d;
    return cudaMemGetInfo(&free_bytes, &total) == cudaSuccess ? (int64_t)free_bytes : -1;
}

static int event_at(struct cuda_impl *c, int index, cudaEvent_t *out, struct err *e)
{
    size_t had = c->n_events;
    TRY(mem_grow((void **)&c->event, &c->n_events, (size_t)index + 1, sizeof *c->event, e));
    for (size_t i = had; i < c->n_events; i++)
        CUDA(e, cudaEventCreateWithFlags(&c->event[i], cudaEventDisableTiming));
    *out = c->event[index];
    return ST_OK;
}

static int gpu_record(struct dev *d, int lane, int event, struct err *e)
{
    cudaEvent_t ev;
    TRY(event_at(impl_of(d), event, &ev, e));
    CUDA(e, cudaEventRecord(ev, stream(d, lane)));
    return ST_OK;
}

static int gpu_wait(struct dev *d, int lane, int event, struct err *e)
{
    cudaEvent_t ev;
    TRY(event_at(impl_of(d), event, &ev, e));
    CUDA(e, cudaStreamWaitEvent(stream(d, lane), ev, 0));
    return ST_OK;
}

static int gpu_capture_begin(struct dev *d, struct err *e)
{
    CUDA(e, cudaStreamBeginCapture(stream(d, 0), cudaStreamCaptureModeThreadLocal));
    impl_of(d)->capturing = true;
    return ST_OK;
}

static int gpu_capture_end(struct dev *d, void **out, struct err *e)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t run = NULL;
    impl_of(d)->capturing = false;
    CUDA(e, cudaStreamEndCapture(stream(d, 0), &graph));
    cudaError_t code = cudaGraphInstantiate(&run, graph, 0);
    cudaGraphDestroy(graph);
    TRY(cuda_status(e, (int)code, "cudaGraphInstantiate"));
    CUDA(e, cudaGraphUpload(run, stream(d, 0)));
    *out = run;
    return ST_OK;
}

static int gpu_capture_run(struct dev *d, void *graph, struct err *e)
{
    CUDA(e, cudaGraphLaunch((cudaGraphExec_t)graph, stream(d, 0)));
    return ST_OK;
}

static void gpu_capture_free(struct dev *d, void *graph)
{
    (void)d;
    if (graph != NULL)
        cudaGraphExecDestroy((cudaGraphExec_t)graph);
}

static void gpu_range_begin(struct dev *d, const char *name)
{
    (void)d;
    nvtxRangePushA(name);
}

static void gpu_range_end(struct dev *d)
{
    (void)d;
    nvtxRangePop();
}

static void gpu_close(struct dev *d)
{
    struct cuda_impl *c = impl_of(d);
    if (c == NULL)
        return;
    cudaDeviceSynchronize();
    dnn_close(&c->pub);
    blas_close(&c->pub);
    for (int l = 0; l < CUDA_LANES; l++)
        cudaFree(c->pub.workspace[l]);
    for (size_t i = 0; i < c->n_events; i++)
        cudaEventDestroy(c->event[i]);
    free(c->event);
    for (int l = 0; l < CUDA_LANES; l++)
        if (c->pub.stream[l] != NULL)
            cudaStreamDestroy(c->pub.stream[l]);
    if (c->staging != NULL)
        cudaFreeHost(c->staging);
    free(c);
    d->impl = NULL;
}

static const struct dev_vt cuda_vt = {
    .alloc = gpu_alloc,
    .free = gpu_free,
    .copy_in = gpu_copy_in,
    .copy_out = gpu_copy_out,
    .fill = gpu_fill,
    .sync = gpu_sync,
    .close = gpu_close,
    .available = gpu_available,
    .record = gpu_record,
    .wait = gpu_wait,
    .capture_begin = gpu_capture_begin,
    .capture_end = gpu_capture_end,
    .capture_run = gpu_capture_run,
    .capture_free = gpu_capture_free,
    .range_begin = gpu_range_begin,
    .range_end = gpu_range_end,
};

/* The runtime says "driver version is insufficient" where there is no driver at all. */
static int no_gpu(cudaError_t code, struct err *e)
{
    int runtime = 0, driver = 0;
    cudaRuntimeGetVersion(&runtime);
    cudaDriverGetVersion(&driver);
    if (driver == 0)
        err_set(e, ST_UNSUPPORTED, "this machine has no NVIDIA driver");
    else if (code == cudaErrorInsufficientDriver)
        err_set(e, ST_UNSUPPORTED, "the NVIDIA driver is too old: it knows CUDA %d.%d, and braid was built with %d.%d",
                driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    else
        err_set(e, ST_UNSUPPORTED, "no usable GPU: %s",
                code != cudaSuccess ? cudaGetErrorString(code) : "the driver lists none");
    return err_hint(e, driver == 0 ? "use --run.device=cpu, or install the driver"
                                   : "use --run.device=cpu, or see what nvidia-smi says");
}

int gpus_visible(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) == cudaSuccess)
        return n;
    cudaGetLastError();
    return 0;
}

int cuda_describe(struct cuda_dev *c, struct err *e)
{
    int n = 0;
    cudaError_t code = cudaGetDeviceCount(&n);
    if (code != cudaSuccess || n == 0)
        return no_gpu(code, e);
    if (c->want.index < 0 || c->want.index >= n)
        return err_set(e, ST_INVALID, "gpu.index is %d, but this machine has GPUs 0 to %d", c->want.index, n - 1);
    struct cudaDeviceProp p;
    CUDA(e, cudaGetDeviceProperties(&p, c->want.index));
    c->sm_count = p.multiProcessorCount;
    c->sm_budget = c->want.sms > 0 && c->want.sms < c->sm_count ? c->want.sms : c->sm_count;
    c->major = p.major;
    c->minor = p.minor;
    c->memory = (int64_t)p.totalGlobalMem;
    c->l2_bytes = p.l2CacheSize;
    c->smem_per_block = (int64_t)p.sharedMemPerBlockOptin;
    snprintf(c->gpu_name, sizeof c->gpu_name, "%.63s", p.name);
    if (p.major < 8) {
        err_set(e, ST_UNSUPPORTED, "%s has compute capability %d.%d; braid needs 8.0 or later", p.name, p.major,
                p.minor);
        return err_hint(e, "use run.device=cpu");
    }
    c->hopper = p.major == 9 && p.minor == 0 && !c->want.portable;
    return ST_OK;
}

static int open_streams(struct cuda_impl *c, struct err *e)
{
    /* Lanes: compute, side, comm, copy, update (plan/graph.h). Copies of a step's inputs are small and come first, on
     * the compute stream; the copy stream is for offloaded slots and state. */
    int low, high;
    CUDA(e, cudaDeviceGetStreamPriorityRange(&low, &high));
    for (int l = 0; l < CUDA_LANES; l++) {
        cudaStream_t s;
        CUDA(e, cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, l == 2 ? high : low));
        c->pub.stream[l] = s;
    }
    CUDA(e, cudaMallocHost((void **)&c->staging, STAGING_BYTES));
    return ST_OK;
}

/* Each lane has a workspace for cuBLASLt of its own, so that lanes do not share partial sums. */
static int open_workspaces(struct cuda_dev *c, struct err *e)
{
    for (int l = 0; c->blas != NULL && l < CUDA_GEMM_LANES; l++)
        CUDA(e, cudaMalloc(&c->workspace[l], BLAS_WORKSPACE));
    return ST_OK;
}

int dev_open_cuda(struct dev *d, const struct dev_gpu *gpu, int threads, struct err *e)
{
    struct cuda_impl *c;
    *d = (struct dev){.kind = DEV_CUDA, .n_threads = threads, .real = gpu->fp32 ? DT_F32 : DT_BF16, .wide = DT_F32};
    TRY(mem_array((void **)&c, 1, sizeof *c, e));
    d->impl = c;
    d->vt = &cuda_vt;
    c->pub.want = *gpu;
    c->pub.memo = &c->memo;
    int st = cuda_describe(&c->pub, e);
    d->hopper = c->pub.hopper;
    if (st == ST_OK)
        st = cuda_status(e, (int)cudaSetDevice(gpu->index), "cudaSetDevice");
    if (st == ST_OK)
        st = open_streams(c, e);
    if (st == ST_OK)
        st = blas_open(&c->pub, BLAS_WORKSPACE, e);
    if (st == ST_OK)
        st = open_workspaces(&c->pub, e);
    if (st == ST_OK)
        st = dnn_open(&c->pub, e);
    if (st != ST_OK) {
        dev_close(d);
        return st;
    }
    snprintf(d->name, sizeof d->name, "%.60s, %s%s%s", c->pub.gpu_name, gpu->fp32 ? "fp32" : "bf16",
             c->pub.hopper ? ", Hopper kernels" : ", portable kernels",
             c->pub.dnn != NULL ? ", cuDNN"
             : gpu->fp32        ? ""
                                : ", no cuDNN");
    return ST_OK;
}
