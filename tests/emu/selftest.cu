/* The emulator itself: small kernels that are right, and ones with a fault that it must show. Right ones give the same
 * numbers under every seed; a race gives others under some, and with races looked for stops the launch, as misuse does,
 * with a message. Prints "N passed, N failed" last. */
#include "ops/cuda/hopper.cuh"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SEEDS = 60, THREADS = 128, OUT = 1024 };
enum expected { RIGHT, WRONG_SOMETIMES, STOPPED_SOMETIMES, RACE };

template <typename... P, typename... A>
static cudaError_t launch(void (*kernel)(P...), int grid, int cluster, int threads, size_t smem, A... args)
{
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute a = {};
    a.id = cudaLaunchAttributeClusterDimension;
    a.val.clusterDim = {(unsigned)cluster, 1, 1};
    c.gridDim = dim3((unsigned)grid);
    c.blockDim = dim3((unsigned)threads);
    c.dynamicSmemBytes = smem;
    c.attrs = &a;
    c.numAttrs = 1;
    return cudaLaunchKernelEx(&c, kernel, args...);
}

/* ---- barriers of a block --------------------------------------------------------------------- */

template <bool BARRIER> __global__ void reversed(int *out)
{
    __shared__ int x[THREADS];
    x[threadIdx.x] = (int)threadIdx.x;
    if (BARRIER)
        __syncthreads();
    out[threadIdx.x] = x[THREADS - 1 - threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = -1; /* not what the next block starts with */
}
template <bool BARRIER> __global__ void neighbours(int *out)
{
    DYNAMIC_SHARED(int, x, 4);
    x[threadIdx.x] = (int)threadIdx.x;
    if (BARRIER)
        __syncwarp();
    out[threadIdx.x] = x[threadIdx.x ^ 1];
}
/* Groups of 64 threads with barriers of their own. */
template <int EXPECTED> __global__ void groups(int *out)
{
    DYNAMIC_SHARED(int, x, 4);
    int group = (int)threadIdx.x / 64;
    x[threadIdx.x] = (int)threadIdx.x;
    named_barrier_of(1 + group, EXPECTED);
    out[threadIdx.x] = x[threadIdx.x ^ 63];
}
__global__ void sums(int *out)
{
    int v = (int)threadIdx.x;
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, d);
    out[threadIdx.x] = v + __popc(__ballot_sync(0xffffffffu, threadIdx.x % 3 == 0));
}
__global__ void parted(int *out)
{
    out[threadIdx.x] = threadIdx.x % 32 < 16 ? __shfl_xor_sync(0xffffffffu, 1, 1) : __any_sync(0xffffffffu, 1);
}

/* ---- copies by hardware ---------------------------------------------------------------------- */

template <bool WAIT> __global__ void bulk_in(const int *in, int *out)
{
    DYNAMIC_SHARED(int, x, 16);
    uint64_t *bar = (uint64_t *)(x + THREADS);
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        barrier_init_done();
        barrier_expect(bar, THREADS * 4);
        bulk_load(x, in, THREADS * 4, bar);
    }
    __syncthreads();
    if (WAIT)
        barrier_wait_bounded(bar, 0);
    out[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0)
        barrier_wait_bounded(bar, 0);
}
/* x is stored, then used again. */
template <bool WAIT> __global__ void bulk_out(int *out)
{
    DYNAMIC_SHARED(int, x, 16);
    for (int round = 0; round < 4; round++) {
        x[threadIdx.x] = round * THREADS + (int)threadIdx.x;
        fence_async_proxy();
        __syncthreads();
        if (threadIdx.x == 0) {
            bulk_store(out + round * THREADS, x, THREADS * 4);
            bulk_commit();
            if (WAIT)
                bulk_wait_read<0>();
        }
        __syncthreads();
    }
    if (threadIdx.x == 0)
        bulk_wait<0>();
}
__global__ void bulk_unfenced(int *out)
{
    DYNAMIC_SHARED(int, x, 16);
    x[threadIdx.x] = (int)threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(out, x, THREADS * 4);
        bulk_commit();
        bulk_wait<0>();
    }
}
__global__ void bulk_left(int *out)
{
    DYNAMIC_SHARED(int, x, 16);
    x[threadIdx.x] = (int)threadIdx.x;
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(out, x, THREADS * 4);
        bulk_commit();
    }
}
__global__ void bulk_crooked(const int *in, int *)
{
    DYNAMIC_SHARED(int, x, 16);
    uint64_t *bar = (uint64_t *)(x + THREADS);
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        bulk_load(x, in + 1, 64, bar);
    }
}
template <bool WAIT> __global__ void copy_in(const int *in, int *out)
{
    DYNAMIC_SHARED(int, x, 16);
    copy_async16(x + threadIdx.x * 4, in + threadIdx.x * 4);
    copies_commit();
    if (WAIT)
        copies_wait<0>();
    __syncthreads();
    out[threadIdx.x] = x[(threadIdx.x * 4 + 4) % (THREADS * 4)];
}

/* ---- mbarriers ------------------------------------------------------------------------------- */

template <int ARRIVALS, bool INIT> __global__ void meet(int *out)
{
    DYNAMIC_SHARED(uint64_t, bar, 16);
    if (threadIdx.x == 0 && INIT) {
        barrier_init(bar, ARRIVALS);
        barrier_init_done();
    }
    __syncthreads();
    barrier_arrive(bar);
    barrier_wait_bounded(bar, 0);
    out[threadIdx.x] = 7;
}
/* Thread 0 waits for rounds that others complete without it: when it comes late, two of them look like none. */
template <bool COUNTED> __global__ void overtaken(int *out)
{
    DYNAMIC_SHARED(uint64_t, bar, 16);
    if (threadIdx.x == 0) {
        barrier_init(bar, COUNTED ? 2 : 1);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x == 32 || (COUNTED && threadIdx.x == 0))
        for (int round = 0; round < 2; round++) {
            barrier_arrive(bar);
            barrier_wait_bounded(bar, (uint32_t)round);
        }
    else if (threadIdx.x == 0)
        for (int round = 0; round < 2; round++)
            barrier_wait_bounded(bar, (uint32_t)round);
    out[threadIdx.x] = 7;
}

/* A warp writes, one lane of it arrives for all: only the lanes that came to the __syncwarp before are spoken for. */
template <bool BARRIER> __global__ void spoken_for(int *out)
{
    DYNAMIC_SHARED(int, x, 16);
    uint64_t *bar = (uint64_t *)(x + THREADS);
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        x[threadIdx.x] = 7;
        if (BARRIER)
            __syncwarp();
        if (threadIdx.x == 0)
            barrier_arrive(bar);
    } else {
        barrier_wait_bounded(bar, 0);
    }
    out[threadIdx.x] = threadIdx.x < 32 ? 7 : x[threadIdx.x % 32];
}
/* Threads read x, then hardware fills it again. */
template <bool BARRIER> __global__ void filled_again(const int *in, int *out)
{
    DYNAMIC_SHARED(int, x, 16);
    uint64_t *bar = (uint64_t *)(x + THREADS);
    x[threadIdx.x] = in[threadIdx.x];
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        barrier_init_done();
    }
    fence_async_proxy();
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x ^ 1] - in[threadIdx.x ^ 1] + in[threadIdx.x];
    if (BARRIER)
        __syncthreads();
    if (threadIdx.x == 0) {
        barrier_expect(bar, THREADS * 4);
        bulk_load(x, in, THREADS * 4, bar);
    }
    barrier_wait_bounded(bar, 0);
}

/* ---- clusters -------------------------------------------------------------------------------- */

enum { BLOCKS = 4 };
/* Every block sends 16 bytes to every block; all add what came, in order. READY: barriers are initialised before
 * anybody sends. STAY: a block does not end while others may send. */
template <bool READY, bool STAY> __global__ void all_to_all(int *out)
{
    DYNAMIC_SHARED(float4, from, 16);
    uint64_t *bar = (uint64_t *)(from + BLOCKS);
    uint32_t rank = cluster_rank();
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        barrier_init_done();
        barrier_expect(bar, BLOCKS * 16);
    }
    __syncthreads();
    if (READY)
        cluster_sync();
    if (threadIdx.x < BLOCKS)
        cluster_send(smem_address_in(from + rank, threadIdx.x), make_float4((float)rank, 1, (float)blockIdx.x, 0),
                     smem_address_in(bar, threadIdx.x));
    if (STAY || rank != 0) {
        barrier_wait_bounded(bar, 0);
        float sum = 0;
        for (int i = 0; i < BLOCKS; i++)
            sum += from[i].x + 10 * from[i].y + 100 * from[i].z;
        if (threadIdx.x < 32)
            out[blockIdx.x * 32 + threadIdx.x] = (int)sum;
    }
    if (STAY)
        cluster_sync();
}

/* ---- wgmma ----------------------------------------------------------------------------------- */

enum { HASTE_NONE, HASTE_RESULT, HASTE_OPERAND, HASTE_FENCE };
/* Two products of ones: rows of 64 ones each in k. */
template <int HASTE> __global__ void multiply(int *out)
{
    DYNAMIC_SHARED(char, tile, 1024);
    bf16 *ones = (bf16 *)tile;
    float d[32];
    for (int i = (int)threadIdx.x; i < 64 * 64; i += THREADS)
        ones[i] = __float2bfloat16_rn(1.0f);
    if (HASTE != HASTE_FENCE)
        fence_async_proxy();
    __syncthreads();
    wgmma_hold(d);
    wgmma_begin();
    for (int k = 0; k < 4; k++)
        wgmma<64, 0, 0>::run(d, wgmma_tile(tile + 32 * k, 1024, 1024), wgmma_tile(tile + 32 * k, 1024, 1024), k == 0);
    wgmma_commit();
    if (HASTE == HASTE_RESULT) {
        wgmma_hold(d);
        out[threadIdx.x] = (int)d[5];
    }
    if (HASTE == HASTE_OPERAND) {
        __syncthreads();
        ones[threadIdx.x] = __float2bfloat16_rn(2.0f);
    }
    wgmma_wait<0>();
    wgmma_hold(d);
    if (HASTE != HASTE_RESULT)
        out[threadIdx.x] = (int)d[5];
}

/* A block's send to itself, without others. */
__global__ void alone_in_cluster(int *)
{
    DYNAMIC_SHARED(float4, x, 16);
    uint64_t *bar = (uint64_t *)(x + 1);
    if (threadIdx.x == 0) {
        barrier_init(bar, 1);
        barrier_init_done();
        barrier_expect(bar, 16);
        cluster_send(smem_address_in(x, 0), make_float4(0, 0, 0, 0), smem_address_in(bar, 0));
        barrier_wait_bounded(bar, 0);
    }
}

/* ---- the list -------------------------------------------------------------------------------- */

static const int *input;
static cudaError_t with_input(void (*kernel)(const int *, int *), int *out)
{
    return launch(kernel, 1, 1, THREADS, 8192, input, out);
}
static cudaError_t alone(void (*kernel)(int *), int *out) { return launch(kernel, 1, 1, THREADS, 8192, out); }
static cudaError_t together(void (*kernel)(int *), int *out)
{
    return launch(kernel, 2 * BLOCKS, BLOCKS, 64, 1024, out);
}

struct test {
    const char *name;
    enum expected expected;
    const char *says; /* STOPPED_SOMETIMES: in the message */
    cudaError_t (*run)(int *out);
};
static const struct test TESTS[] = {
    {"block barrier", RIGHT, NULL, [](int *o) { return alone(reversed<true>, o); }},
    {"no block barrier", WRONG_SOMETIMES, NULL, [](int *o) { return alone(reversed<false>, o); }},
    {"warp barrier", RIGHT, NULL, [](int *o) { return alone(neighbours<true>, o); }},
    {"no warp barrier", WRONG_SOMETIMES, NULL, [](int *o) { return alone(neighbours<false>, o); }},
    {"named barriers", RIGHT, NULL, [](int *o) { return alone(groups<64>, o); }},
    {"named barriers of too many", STOPPED_SOMETIMES, "wait for a named barrier",
     [](int *o) { return alone(groups<96>, o); }},
    {"shuffles and votes", RIGHT, NULL, [](int *o) { return alone(sums, o); }},
    {"lanes at different places", STOPPED_SOMETIMES, "meet at different places",
     [](int *o) { return alone(parted, o); }},
    {"bulk load", RIGHT, NULL, [](int *o) { return with_input(bulk_in<true>, o); }},
    {"bulk load, no wait", WRONG_SOMETIMES, NULL, [](int *o) { return with_input(bulk_in<false>, o); }},
    {"bulk load, crooked", STOPPED_SOMETIMES, "multiples of 16", [](int *o) { return with_input(bulk_crooked, o); }},
    {"bulk stores", RIGHT, NULL, [](int *o) { return alone(bulk_out<true>, o); }},
    {"bulk stores, overwritten", WRONG_SOMETIMES, NULL, [](int *o) { return alone(bulk_out<false>, o); }},
#if !defined(__SANITIZE_ADDRESS__) /* writes are not watched there (watch.cc) */
    {"bulk store, no fence", STOPPED_SOMETIMES, "without fence_async_proxy",
     [](int *o) { return alone(bulk_unfenced, o); }},
    {"wgmma, no fence", STOPPED_SOMETIMES, "without fence_async_proxy",
     [](int *o) { return alone(multiply<HASTE_FENCE>, o); }},
#endif
    {"bulk store, left", STOPPED_SOMETIMES, "before its bulk stores", [](int *o) { return alone(bulk_left, o); }},
    {"cp.async", RIGHT, NULL, [](int *o) { return with_input(copy_in<true>, o); }},
    {"cp.async, no wait", WRONG_SOMETIMES, NULL, [](int *o) { return with_input(copy_in<false>, o); }},
    {"mbarrier", RIGHT, NULL, [](int *o) { return alone(meet<THREADS, true>, o); }},
    {"mbarrier, one short", STOPPED_SOMETIMES, "selftest.cu", [](int *o) { return alone(meet<THREADS + 1, true>, o); }},
    {"mbarrier, deadlock is named", STOPPED_SOMETIMES, "1 of 129 arrivals",
     [](int *o) { return alone(meet<THREADS + 1, true>, o); }},
    {"mbarrier, not initialised", STOPPED_SOMETIMES, "never initialised",
     [](int *o) { return alone(meet<THREADS, false>, o); }},
    {"rounds, counted", RIGHT, NULL, [](int *o) { return alone(overtaken<true>, o); }},
    {"rounds, overtaken", STOPPED_SOMETIMES, "deadlock", [](int *o) { return alone(overtaken<false>, o); }},
    {"copy over what was read", RIGHT, NULL, [](int *o) { return with_input(filled_again<true>, o); }},
    {"cluster of one block", STOPPED_SOMETIMES, "cluster of one block",
     [](int *o) { return alone(alone_in_cluster, o); }},
    {"cluster", RIGHT, NULL, [](int *o) { return together(all_to_all<true, true>, o); }},
    {"cluster, not ready", STOPPED_SOMETIMES, "never initialised",
     [](int *o) { return together(all_to_all<false, true>, o); }},
    {"cluster, block gone", STOPPED_SOMETIMES, "end", [](int *o) { return together(all_to_all<true, false>, o); }},
    {"wgmma", RIGHT, NULL, [](int *o) { return alone(multiply<HASTE_NONE>, o); }},
    {"wgmma, result too soon", WRONG_SOMETIMES, NULL, [](int *o) { return alone(multiply<HASTE_RESULT>, o); }},
    {"wgmma, operand too soon", WRONG_SOMETIMES, NULL, [](int *o) { return alone(multiply<HASTE_OPERAND>, o); }},
#if !defined(__SANITIZE_ADDRESS__)
    {"race, no block barrier", RACE, "a race in shared memory", [](int *o) { return alone(reversed<false>, o); }},
    {"race, no warp barrier", RACE, "a race in shared memory", [](int *o) { return alone(neighbours<false>, o); }},
    {"race, one lane arrives for others", RACE, "a race in shared memory: a read after a write",
     [](int *o) { return alone(spoken_for<false>, o); }},
    {"race, a copy over what is read", RACE, "a race in shared memory: a copy",
     [](int *o) { return with_input(filled_again<false>, o); }},
#endif
    {"one lane arrives for its warp", RIGHT, NULL, [](int *o) { return alone(spoken_for<true>, o); }},
    {"too much shared memory", STOPPED_SOMETIMES, "", [](int *o) { return launch(sums, 1, 1, THREADS, 49153, o); }},
    {"too large a cluster", STOPPED_SOMETIMES, "", [](int *o) { return launch(sums, 16, 16, THREADS, 0, o); }},
};

/* Numbers that the right ones give. */
static bool is_right(const char *name, const int *out)
{
    bool bulk = strncmp(name, "bulk stores", 11) == 0, cluster = strncmp(name, "cluster", 7) == 0;
    for (int i = 0; i < (bulk ? 4 * THREADS : cluster ? 2 * BLOCKS * 32 : THREADS); i++) {
        int want = 7;
        if (strstr(name, "block barrier"))
            want = THREADS - 1 - i;
        else if (strstr(name, "warp barrier"))
            want = i ^ 1;
        else if (strncmp(name, "named", 5) == 0)
            want = i ^ 63;
        else if (strncmp(name, "shuffles", 8) == 0)
            want = 32 * (i / 32 * 32) + 31 * 16 + (i / 32 * 32 % 3 == 0 ? 11 : i / 32 * 32 % 3 == 1 ? 10 : 11);
        else if (strncmp(name, "bulk load", 9) == 0 || strncmp(name, "copy over", 9) == 0)
            want = input[i];
        else if (bulk)
            want = i;
        else if (strncmp(name, "cp.async", 8) == 0)
            want = input[(i * 4 + 4) % (THREADS * 4)];
        else if (cluster)
            want = 6 + 10 * BLOCKS + 100 * (i / 32 / BLOCKS == 0 ? 0 + 1 + 2 + 3 : 4 + 5 + 6 + 7);
        else if (strncmp(name, "wgmma", 5) == 0)
            want = 64;
        if (out[i] != want)
            return false;
    }
    return true;
}

/* Messages go to a file while a test runs. */
static int hide(FILE **file)
{
    int old = dup(2);
    *file = tmpfile();
    if (old < 0 || *file == NULL || dup2(fileno(*file), 2) < 0)
        abort();
    return old;
}
static bool said(FILE *file, const char *text)
{
    static char all[1 << 20];
    rewind(file);
    all[fread(all, 1, sizeof all - 1, file)] = '\0';
    return strstr(all, text) != NULL;
}

static bool check(const struct test *t, int *out)
{
    int right = 0, wrong = 0, stopped = 0;
    bool named = false;
    for (int seed = 1; seed <= SEEDS && !(t->expected != RIGHT && t->expected != RACE &&
                                          (t->expected == WRONG_SOMETIMES ? wrong > 0 : stopped > 0));
         seed++) {
        FILE *file;
        memset(out, 0xff, OUT * sizeof *out);
        emu_set_seed((uint64_t)seed);
        emu_set_races(t->expected == RACE || t->expected == RIGHT);
        int old = hide(&file);
        cudaError_t code = t->run(out);
        cudaGetLastError();
        named = named || (code != cudaSuccess && said(file, t->says != NULL ? t->says : ""));
        dup2(old, 2);
        close(old);
        fclose(file);
        stopped += code != cudaSuccess;
        wrong += code == cudaSuccess && !is_right(t->name, out);
        right += code == cudaSuccess && is_right(t->name, out);
    }
    bool ok = t->expected == RACE              ? stopped == SEEDS && named
              : t->expected == RIGHT           ? right == SEEDS
              : t->expected == WRONG_SOMETIMES ? wrong > 0 && stopped == 0
                                               : stopped > 0 && named;
    printf("%s %s: %d right, %d wrong, %d stopped%s\n", ok ? "ok" : "not ok", t->name, right, wrong, stopped,
           stopped > 0 && !named ? " (without the message)" : "");
    return ok;
}

int main(void)
{
    int passed = 0, failed = 0, *in, *out;
    if (cudaMalloc(&in, OUT * sizeof *in) != cudaSuccess || cudaMalloc(&out, OUT * sizeof *out) != cudaSuccess)
        return 1;
    for (int i = 0; i < OUT; i++)
        in[i] = 3 * i + 1;
    input = in;
    for (const struct test &t : TESTS)
        check(&t, out) ? passed++ : failed++;
    cudaFree(in);
    cudaFree(out);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
