/* Address space for OpenBLAS. It takes a buffer of 128 MiB for each thread, the first of them while
 * the program is being loaded, and tries for ever where there is no room for one. So, where address
 * space is limited, the room is tested before OpenBLAS asks, and its buffers are taken up front. */
#include "dev/blas_int.h"

#include "base/base.h"

#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { MAX_BUFFERS = 64 };
static const size_t buffer_bytes = ((size_t)128 << 20) + (64 << 10);

/* OpenBLAS's own, not in its header; absent in other libraries with the same interface. */
extern void *blas_memory_alloc(int) __attribute__((weak));
extern void blas_memory_free(void *) __attribute__((weak));

/* No limit, no test. Strict accounting of the system counts like a limit. */
static bool is_limited(void)
{
    struct rlimit r;
    char mode = '0';
    if (getrlimit(RLIMIT_AS, &r) == 0 && r.rlim_cur != RLIM_INFINITY)
        return true;
    int fd = open("/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, &mode, 1);
    close(fd);
    return n == 1 && mode == '2';
}

static bool has_room(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return false;
    munmap(p, bytes);
    return true;
}

int blas_reserve(int threads, struct err *e)
{
    void *buffer[MAX_BUFFERS];
    int n = threads > cpu_count() ? threads : cpu_count(); /* ranks that are threads share the cores */
    n = n < MAX_BUFFERS ? n : MAX_BUFFERS;
    if (!is_limited())
        return ST_OK;
    size_t bytes = (size_t)n * buffer_bytes;
    if (!has_room(bytes)) {
        err_set(e, ST_NOMEM, "no address space for the %zu MiB of buffers that OpenBLAS takes for %d threads",
                bytes >> 20, n);
        return err_hint(e, "raise the limit (ulimit -v), or let the program use fewer cores (taskset)");
    }
    if (blas_memory_alloc == NULL || blas_memory_free == NULL)
        return ST_OK;
    for (int i = 0; i < n; i++)
        buffer[i] = blas_memory_alloc(0);
    for (int i = 0; i < n; i++)
        blas_memory_free(buffer[i]); /* it keeps them */
    return ST_OK;
}

/* ---- before OpenBLAS is loaded --------------------------------------------------------------- */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1 /* their address space has no limit, and they start at the same moment */
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define SANITIZED 1
#endif
#endif

#ifndef SANITIZED
/* By hand: the C library is not set up yet. */
static int leading_number(const char *text)
{
    int n = 0;
    for (; *text >= '0' && *text <= '9' && n < 100000; text++)
        n = n * 10 + (*text - '0');
    return n;
}

/* Threads that OpenBLAS makes buffers for when it is loaded: its variables, else the cores of the
 * process. */
static int threads_at_load(char **env)
{
    static const char *const names[] = {"OPENBLAS_NUM_THREADS=", "GOTO_NUM_THREADS=", "OMP_NUM_THREADS="};
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    for (int i = countof(names) - 1; i >= 0; i--)
        for (char **at = env; at != NULL && *at != NULL; at++)
            if (strncmp(*at, names[i], strlen(names[i])) == 0) {
                int given = leading_number(*at + strlen(names[i]));
                n = given > 0 && given < n ? given : n;
            }
    return n < MAX_BUFFERS ? n : MAX_BUFFERS;
}

static void check_at_load(int argc, char **argv, char **env)
{
    static const char text[] = "braid: error: no address space for the buffers of OpenBLAS, 128 MiB for each core\n"
                               "  hint: raise the limit (ulimit -v), or set OPENBLAS_NUM_THREADS to a smaller number\n";
    (void)argc;
    (void)argv;
    if (!is_limited() || has_room((size_t)threads_at_load(env) * buffer_bytes))
        return;
    ssize_t n = write(STDERR_FILENO, text, sizeof text - 1);
    (void)n;
    _exit(1);
}

/* The one place where an executable runs something before the libraries it was linked with. */
__attribute__((section(".preinit_array"), used)) static void (*const at_load)(int, char **, char **) = check_at_load;
#endif
