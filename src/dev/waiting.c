/* How long threads of OpenMP spin while they wait for each other. With the cores to themselves,
 * spinning is what makes short loops fast. Beside another program it is what makes them slow: a
 * thread that spins keeps its core from the one it waits for, which the system has put aside for
 * the other program. So preemptions are counted, and while there are many, threads are made to
 * sleep soon.
 *
 * libgomp (gcc) reads its spin count from the environment before main. But it spins a few
 * microseconds only while it manages more threads than the process has cores; so a second team is
 * made, which does nothing but exist. libomp (clang) has a function. */
#include "dev/waiting.h"

#include "base/base.h"

#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/resource.h>

enum { MOST_IDLE_THREADS = 16 };
static const double look_seconds = 0.2, calm_seconds = 3;
static const double crowded_rate = 30, calm_rate = 8; /* preemptions a second */

struct waiting {
    int n_idle; /* threads of the second team */
    bool is_short;
    double looked, crowded; /* when: the last look, and the last one that found others at work */
    long preempted;         /* up to the last look */
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

void waiting_decide(struct waiting *w, long preempted, double seconds)
{
    double rate = (double)preempted / seconds, now = time_now();
    if (rate > calm_rate)
        w->crowded = now;
    if (!w->is_short && rate > crowded_rate)
        make_short(w);
    else if (w->is_short && now - w->crowded > calm_seconds)
        make_long(w);
}

void waiting_look(struct waiting *w)
{
    if (w == NULL)
        return;
    double now = time_now();
    if (now - w->looked < look_seconds)
        return;
    long count = count_preemptions();
    waiting_decide(w, count - w->preempted, now - w->looked);
    w->preempted = count;
    w->looked = now;
}
