/* How long threads of OpenMP spin while they wait for each other. With the cores to themselves,
 * spinning is what makes short loops fast. Beside another program it is what makes them slow: a
 * thread that spins keeps its core from the one it waits for, which the system has put aside for
 * the other program. So preemptions are counted; where there are many, and others do use these
 * cores (our own threads preempt each other too), threads are made to sleep soon.
 *
 * libgomp (gcc) reads its spin count from the environment before main. But it spins a few
 * microseconds only while it manages more threads than the process has cores; so a second team is
 * made, which does nothing but exist. libomp (clang) has a function. */
#include "dev/waiting_int.h"

#include "base/base.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/resource.h>
#include <unistd.h>

enum { MOST_IDLE_THREADS = 16 };
static const double look_seconds = 0.2, calm_seconds = 3;
static const double crowded_rate = 30, calm_rate = 8; /* preemptions a second */
static const double others_least = 0.15;              /* cores that others use */

struct waiting {
    int n_idle; /* threads of the second team */
    bool is_short;
    double looked, crowded; /* when: the last look, and the last one that found others at work */
    long preempted;         /* up to the last look */
    double others;          /* seconds of processor time that others had used; negative: not read */
    pthread_t team;
    pthread_mutex_t lock;
    pthread_cond_t change;
    bool up, end; /* the team exists; it should go */
};

extern void kmp_set_blocktime(int) __attribute__((weak));
enum { LIBOMP_SHORT_MS = 0, LIBOMP_LONG_MS = 200 }; /* 200 is its default */

static long count_preemptions(void)
{
    struct rusage u;
    return getrusage(RUSAGE_SELF, &u) == 0 ? u.ru_nivcsw : 0;
}

/* Seconds of processor time that others have used on the cores of this process since some moment;
 * negative: unknown. */
static double others_seconds(void)
{
    cpu_set_t set;
    struct rusage u;
    char text[32768]; /* no stream: steps allocate nothing */
    double busy = 0, tick = (double)sysconf(_SC_CLK_TCK);
    int fd = open("/proc/stat", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0)
        close(fd);
    if (n <= 0 || tick <= 0 || sched_getaffinity(0, sizeof set, &set) != 0 || getrusage(RUSAGE_SELF, &u) != 0)
        return -1;
    text[n] = '\0';
    for (char *line = text; line != NULL && str_starts(line, "cpu");
         line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        int core;
        unsigned long long user, nice, sys, idle, io, irq, soft, steal;
        if (sscanf(line, "cpu%d %llu %llu %llu %llu %llu %llu %llu %llu", &core, &user, &nice, &sys, &idle, &io, &irq,
                   &soft, &steal) == 9 &&
            core >= 0 && core < CPU_SETSIZE && CPU_ISSET((size_t)core, &set))
            busy += (double)(user + nice + sys + irq + soft + steal);
    }
    double own =
        (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
    return busy / tick - own;
}

struct waiting *waiting_open(int n_threads)
{
    int n_idle = cpu_count() - n_threads + 2; /* with these, one more than there are cores */
    if (n_threads < 2 || n_idle > MOST_IDLE_THREADS)
        return NULL; /* nobody waits, or there are cores to spare */
    struct waiting *w = calloc(1, sizeof *w);
    if (w == NULL)
        return NULL;
    w->n_idle = n_idle > 2 ? n_idle : 2;
    if (pthread_mutex_init(&w->lock, NULL) != 0) {
        free(w);
        return NULL;
    }
    if (pthread_cond_init(&w->change, NULL) != 0) {
        pthread_mutex_destroy(&w->lock);
        free(w);
        return NULL;
    }
    w->looked = time_now();
    w->preempted = count_preemptions();
    w->others = -1;
    return w;
}

/* The first thread of the second team. Its members sleep in the runtime once the empty region is
 * over. */
static void *hold_team(void *ctx)
{
    struct waiting *w = ctx;
    volatile int members = 0;
#pragma omp parallel num_threads(w->n_idle)
    {
#pragma omp atomic
        members++;
    }
    pthread_mutex_lock(&w->lock);
    w->up = true;
    pthread_cond_broadcast(&w->change);
    while (!w->end)
        pthread_cond_wait(&w->change, &w->lock);
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static void make_short(struct waiting *w)
{
    if (kmp_set_blocktime != NULL) {
        kmp_set_blocktime(LIBOMP_SHORT_MS);
        w->is_short = true;
        return;
    }
    w->up = w->end = false;
    if (pthread_create(&w->team, NULL, hold_team, w) != 0)
        return; /* slower, nothing else */
    pthread_mutex_lock(&w->lock);
    while (!w->up)
        pthread_cond_wait(&w->change, &w->lock);
    pthread_mutex_unlock(&w->lock);
    w->is_short = true;
}

static void make_long(struct waiting *w)
{
    w->is_short = false;
    if (kmp_set_blocktime != NULL) {
        kmp_set_blocktime(LIBOMP_LONG_MS);
        return;
    }
    pthread_mutex_lock(&w->lock);
    w->end = true;
    pthread_cond_broadcast(&w->change);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->team, NULL);
}

void waiting_close(struct waiting *w)
{
    if (w == NULL)
        return;
    if (w->is_short)
        make_long(w);
    pthread_cond_destroy(&w->change);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

bool waiting_is_short(const struct waiting *w) { return w != NULL && w->is_short; }

void waiting_decide(struct waiting *w, double preempted_rate, double others_cores)
{
    double now = time_now();
    if (preempted_rate > calm_rate && others_cores > others_least)
        w->crowded = now;
    if (!w->is_short && preempted_rate > crowded_rate && others_cores > others_least)
        make_short(w);
    else if (w->is_short && now - w->crowded > calm_seconds)
        make_long(w);
}

void waiting_look(struct waiting *w)
{
    if (w == NULL)
        return;
    double now = time_now(), seconds = now - w->looked;
    if (seconds < look_seconds)
        return;
    long count = count_preemptions();
    double rate = (double)(count - w->preempted) / seconds, before = w->others;
    w->others = rate > calm_rate ? others_seconds() : -1; /* where nothing is preempted there is nothing to read */
    waiting_decide(w, rate, before >= 0 && w->others >= 0 ? (w->others - before) / seconds : 0);
    w->preempted = count;
    w->looked = now;
}
