/* Launches: what may be asked for, and clusters of a grid spread over OS threads. */
#include "machine.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <stdlib.h>
#include <thread>

/* ---- clusters over OS threads ---------------------------------------------------------------- */

static uint64_t *seed_place(void)
{
    static uint64_t seed = [] {
        const char *s = getenv("BRAID_EMU_SEED");
        return s != NULL ? (uint64_t)strtoull(s, NULL, 0) : 1;
    }();
    return &seed;
}
uint64_t emu_seed(void) { return *seed_place(); }
void emu_set_seed(uint64_t seed) { *seed_place() = seed; }

static bool *races_place(void)
{
    static bool races = [] {
        const char *s = getenv("BRAID_EMU_RACES");
        return s == NULL || atoi(s) != 0;
    }();
    return &races;
}
void emu_set_races(bool on) { *races_place() = on; }

struct team {
    std::mutex mutex;
    std::condition_variable work, done;
    std::vector<std::thread> threads;
    const struct emu_launch *launch;
    uint64_t round, clusters, draw;
    std::atomic<uint64_t> next;
    std::atomic<bool> fine;
    int busy;
};

static void run_share(struct team *t, struct pool *p)
{
    const struct emu_launch *l = t->launch;
    uint64_t n = t->clusters, step = 1;
    gridDim = l->grid;
    blockDim = l->block;
    if (n > 3) /* blocks come in any order */
        for (step = n / 2 + 1; std::__gcd(step, n) != 1; step++)
            ;
    for (uint64_t i; t->fine && (i = t->next++) < n;) {
        uint64_t k = (i * step + t->draw) % n;
        struct draws d = {t->draw ^ k * 0x9E3779B97F4A7C15ull};
        uint64_t draw = d.next();
        /* which takes long, and clusters do much the same */
        bool races = *races_place() && (k == 0 || k == n - 1 || d.below(8) == 0);
        if (!run_cluster(l, k * l->cluster, draw, races, p))
            t->fine = false;
    }
}
static void help(struct team *t)
{
    struct pool p;
    uint64_t round = 0;
    for (;;) {
        {
            std::unique_lock<std::mutex> lock(t->mutex);
            t->work.wait(lock, [&] { return t->round != round; });
            round = t->round;
        }
        run_share(t, &p);
        std::lock_guard<std::mutex> lock(t->mutex);
        if (--t->busy == 0)
            t->done.notify_all();
    }
}
static int helpers(void)
{
    const char *n = getenv("BRAID_EMU_THREADS");
    int threads = n != NULL ? atoi(n) : (int)std::thread::hardware_concurrency();
    return threads > 1 ? threads - 1 : 0;
}
static bool run_grid(const struct emu_launch *l)
{
    static struct team *t = new team(); /* helpers never end */
    static struct pool *mine = new pool();
    static std::mutex one;
    static uint64_t launches;
    std::lock_guard<std::mutex> launch_lock(one);
    t->launch = l;
    t->clusters = (uint64_t)l->grid.x * l->grid.y * l->grid.z / l->cluster;
    struct draws d = {emu_seed() * 1000003 + ++launches};
    t->draw = d.next() >> 1;
    t->next = 0;
    t->fine = true;
    int wanted = t->clusters >= 2 ? helpers() : 0;
    while (wanted > (int)t->threads.size()) {
        t->threads.emplace_back(help, t);
        t->threads.back().detach();
    }
    if (wanted > 0) {
        std::lock_guard<std::mutex> lock(t->mutex);
        t->busy = (int)t->threads.size();
        t->round++;
        t->work.notify_all();
    }
    run_share(t, mine);
    if (wanted > 0) {
        std::unique_lock<std::mutex> lock(t->mutex);
        t->done.wait(lock, [&] { return t->busy == 0; });
    }
    return t->fine;
}

/* ---- what a launch may ask for --------------------------------------------------------------- */

enum { PLAIN_SHARED = 48 << 10, MOST_THREADS = 1024, SM_THREADS = 2048 };
static size_t most_shared(void)
{
    struct cudaDeviceProp p;
    cudaGetDeviceProperties(&p, 0);
    return p.sharedMemPerBlockOptin;
}
struct attributes {
    int shared = PLAIN_SHARED;
    bool wide_clusters = false;
};
static struct attributes *attributes_of(const void *kernel)
{
    static std::mutex mutex;
    static std::map<const void *, attributes> all;
    std::lock_guard<std::mutex> lock(mutex);
    return &all[kernel];
}
cudaError_t emu_kernel_attribute(const void *kernel, enum cudaFuncAttribute what, int value)
{
    struct attributes *a = attributes_of(kernel);
    if (what == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value < 0 || (size_t)value > most_shared())
            return cudaErrorInvalidValue;
        a->shared = value;
    } else if (what == cudaFuncAttributeNonPortableClusterSizeAllowed) {
        a->wide_clusters = value != 0;
    }
    return cudaSuccess;
}
/* Multiprocessors come in groups of at least 16, and a cluster stays in one. Registers are not counted. */
cudaError_t emu_active_clusters(int *n, const void *kernel, unsigned cluster, unsigned threads, size_t shared)
{
    enum { GROUPS = 8, GROUP_SMS = 16 };
    const struct attributes *a = attributes_of(kernel);
    *n = 0;
    if (cluster == 0 || cluster > (a->wide_clusters ? 16u : 8u))
        return cudaErrorInvalidClusterSize;
    if (threads == 0 || threads > MOST_THREADS || shared > (size_t)a->shared)
        return cudaErrorInvalidConfiguration;
    size_t by_shared = (most_shared() + 1024) / (shared + 1024), by_threads = SM_THREADS / threads;
    *n = (int)(GROUPS * (GROUP_SMS * (by_shared < by_threads ? by_shared : by_threads) / cluster));
    return cudaSuccess;
}

static cudaError_t check_launch(const struct emu_launch *l)
{
    const struct attributes *a = attributes_of(l->kernel);
    uint64_t threads = (uint64_t)l->block.x * l->block.y * l->block.z;
    if (threads == 0 || threads > MOST_THREADS || l->block.z > 64 || l->grid.x == 0 || l->grid.y == 0 || l->grid.z == 0)
        return cudaErrorInvalidConfiguration;
    if (l->grid.x > 0x7fffffffu || l->grid.y > 65535 || l->grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    if (l->cluster == 0 || l->cluster > (a->wide_clusters ? 16u : 8u) || l->grid.x % l->cluster != 0)
        return cudaErrorInvalidClusterSize;
    return l->shared > (size_t)a->shared ? cudaErrorInvalidValue : cudaSuccess;
}

struct launched { /* as it is submitted: the arguments are a copy */
    struct emu_launch l;
};
static cudaError_t run_launched(void *argument)
{
    struct launched *r = (struct launched *)argument;
    return run_grid(&r->l) ? cudaSuccess : cudaErrorLaunchFailure;
}
cudaError_t emu_launch_kernel(const struct emu_launch *l)
{
    struct launched r = {*l};
    cudaError_t code = check_launch(l);
    if (code != cudaSuccess)
        return emu_submit([](void *c) { return *(cudaError_t *)c; }, &code, sizeof code);
    enum cudaStreamCaptureStatus capturing;
    cudaStreamIsCapturing(NULL, &capturing);
    if (capturing == cudaStreamCaptureStatusActive)
        r.l.call = l->copy(l->call); /* lives as long as the program: graphs are few */
    return emu_submit(run_launched, &r, sizeof r);
}
