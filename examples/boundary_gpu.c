/* The mHC boundary on a GPU, from plain C: forward and backward at 16,384 tokens of 4 x 2048 channels, captured as a CUDA
 * graph and timed, with a check that two runs give the same bits.
 *
 *   make lib CUDA=yes && build/lib_example_gpu [GPU] */
#include "braidk.h"

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 16384, STREAMS = 4, CHANNELS = 2048, K = STREAMS * CHANNELS, N = STREAMS * STREAMS + 2 * STREAMS };
enum { RUNS = 50 };

static int failed(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}
static void cuda(cudaError_t code, const char *what)
{
    if (code != cudaSuccess)
        failed(what, cudaGetErrorString(code));
}

/* A tensor on the GPU with small random numbers. */
static struct braidk_tensor tensor(int dtype, int rank, int64_t rows, int64_t columns)
{
    int64_t n = rank == 2 ? rows * columns : rows;
    struct braidk_tensor t = {.rank = rank, .dtype = dtype};
    t.shape[0] = rows;
    t.shape[1] = rank == 2 ? columns : 0;
    t.stride[0] = rank == 2 ? columns : 1;
    t.stride[1] = rank == 2;
    size_t each = dtype == BRAIDK_BF16 ? 2 : 4;
    char *host = malloc((size_t)n * each);
    if (host == NULL)
        failed("malloc", "no memory");
    for (int64_t i = 0; i < n; i++) {
        float v = (float)rand() / (float)RAND_MAX - 0.5f;
        uint32_t bits;
        memcpy(&bits, &v, 4);
        bits = dtype == BRAIDK_BF16 ? bits >> 16 : bits;
        memcpy(host + i * (int64_t)each, &bits, each);
    }
    cuda(cudaMalloc(&t.data, (size_t)n * each), "cudaMalloc");
    cuda(cudaMemcpy(t.data, host, (size_t)n * each, cudaMemcpyHostToDevice), "cudaMemcpy");
    free(host);
    return t;
}

static uint64_t checksum(const struct braidk_tensor *t)
{
    size_t bytes = (size_t)(t->shape[0] * t->shape[1]) * (t->dtype == BRAIDK_BF16 ? 2 : 4);
    unsigned char *host = malloc(bytes);
    uint64_t sum = 14695981039346656037u;
    if (host == NULL)
        failed("malloc", "no memory");
    cuda(cudaMemcpy(host, t->data, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (size_t i = 0; i < bytes; i++)
        sum = (sum ^ host[i]) * 1099511628211u;
    free(host);
    return sum;
}

/* Mean time of a captured call, in microseconds. */
static double time_of(cudaStream_t stream, cudaGraphExec_t run)
{
    cudaEvent_t begin, end;
    float ms = 0;
    cuda(cudaEventCreate(&begin), "cudaEventCreate");
    cuda(cudaEventCreate(&end), "cudaEventCreate");
    for (int i = 0; i < RUNS + 5; i++) {
        if (i == 5)
            cuda(cudaEventRecord(begin, stream), "cudaEventRecord");
        cuda(cudaGraphLaunch(run, stream), "cudaGraphLaunch");
    }
    cuda(cudaEventRecord(end, stream), "cudaEventRecord");
    cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
    cuda(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    return 1e3 * (double)ms / RUNS;
}

int main(int argc, char **argv)
{
    struct braidk *k;
    char why[512];
    int gpu = argc > 1 ? atoi(argv[1]) : 0;
    if (braidk_open(gpu, &k, why, sizeof why) != BRAIDK_OK)
        failed("braidk_open", why);
    cuda(cudaSetDevice(gpu), "cudaSetDevice");
    printf("libbraidk %s, on %s\n", braidk_build(), braidk_device(k));

    struct braidk_mhc mhc = {.streams = STREAMS, .iterations = 20, .norm = 1, .root_eps = 1e-6, .norm_eps = 1e-5};
    struct braidk_mhc_boundary_args a = {
        .size = sizeof a,
        .x = tensor(BRAIDK_BF16, 2, ROWS, K),
        .f = tensor(BRAIDK_BF16, 2, ROWS, CHANNELS),
        .coef_in = tensor(BRAIDK_F32, 2, ROWS, N),
        .fn = tensor(BRAIDK_F32, 2, N, K),
        .base = tensor(BRAIDK_F32, 1, N, 0),
        .scale = tensor(BRAIDK_F32, 1, 3, 0),
        .norm_weight = tensor(BRAIDK_F32, 1, CHANNELS, 0),
        .y = tensor(BRAIDK_BF16, 2, ROWS, K),
        .h = tensor(BRAIDK_BF16, 2, ROWS, CHANNELS),
        .coef = tensor(BRAIDK_F32, 2, ROWS, N),
        .stat = tensor(BRAIDK_F32, 2, ROWS, N + 2),
        .mhc = mhc,
    };
    struct braidk_mhc_boundary_bwd_args b = {
        .size = sizeof b,
        .dy = tensor(BRAIDK_BF16, 2, ROWS, K),
        .dh = tensor(BRAIDK_BF16, 2, ROWS, CHANNELS),
        .dcoef = tensor(BRAIDK_F32, 2, ROWS, N),
        .x = a.x,
        .f = a.f,
        .coef_in = a.coef_in,
        .fn = a.fn,
        .base = a.base,
        .scale = a.scale,
        .norm_weight = a.norm_weight,
        .y = a.y,
        .coef = a.coef,
        .stat = a.stat,
        .dx = tensor(BRAIDK_BF16, 2, ROWS, K),
        .df = tensor(BRAIDK_BF16, 2, ROWS, CHANNELS),
        .dcoef_in = tensor(BRAIDK_F32, 2, ROWS, N),
        .dfn = tensor(BRAIDK_F32, 2, N, K),
        .dbase = tensor(BRAIDK_F32, 1, N, 0),
        .dscale = tensor(BRAIDK_F32, 1, 3, 0),
        .dnorm_weight = tensor(BRAIDK_F32, 1, CHANNELS, 0),
        .mhc = mhc,
    };
    if (braidk_mhc_boundary_work(k, &a, &a.work.bytes, why, sizeof why) != BRAIDK_OK ||
        braidk_mhc_boundary_bwd_work(k, &b, &b.work.bytes, why, sizeof why) != BRAIDK_OK)
        failed("work", why);
    cuda(cudaMalloc(&a.work.data, (size_t)a.work.bytes + 1), "cudaMalloc");
    cuda(cudaMalloc(&b.work.data, (size_t)b.work.bytes + 1), "cudaMalloc");
    braidk_mhc_boundary_supported(k, &a, why, sizeof why);
    printf("forward: %s\n", why);
    braidk_mhc_boundary_bwd_supported(k, &b, why, sizeof why);
    printf("backward: %s\n", why);

    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t run[2];
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    uint64_t first[2] = {0, 0};
    for (int pass = 0; pass < 2; pass++) {
        if (braidk_mhc_boundary(k, &a, stream, why, sizeof why) != BRAIDK_OK ||
            braidk_mhc_boundary_bwd(k, &b, stream, why, sizeof why) != BRAIDK_OK)
            failed("boundary", why);
        cuda(cudaStreamSynchronize(stream), "boundary");
        first[pass] = checksum(&a.y) ^ checksum(&a.h) * 3 ^ checksum(&b.dx) * 5 ^ checksum(&b.dfn) * 7;
    }
    for (int i = 0; i < 2; i++) {
        cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        int st = i == 0 ? braidk_mhc_boundary(k, &a, stream, why, sizeof why)
                        : braidk_mhc_boundary_bwd(k, &b, stream, why, sizeof why);
        cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
        if (st != BRAIDK_OK)
            failed("captured call", why);
        cuda(cudaGraphInstantiate(&run[i], graph, 0), "cudaGraphInstantiate");
    }
    printf("%d x %d: forward %.0f us, backward %.0f us; two runs: %s\n", ROWS, CHANNELS, time_of(stream, run[0]),
           time_of(stream, run[1]), first[0] == first[1] ? "the same bits" : "different bits");
    braidk_close(k);
    return first[0] == first[1] ? 0 : 1;
}
