/* Stop signals while a run starts. Training holds SIGINT and SIGTERM back and asks for them between
 * steps; until its first step nothing asks, and reading, planning, allocating or waiting for other
 * ranks may take long. So a thread waits for them meanwhile, and a signal ends the process at once:
 * there is nothing to save yet. */
#include "cmd/cmd.h"
#include "base/stop.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

struct startup_watch {
    pthread_t thread;
    int signals, wake;
    atomic_bool ended;
};

static void end_process(int sig)
{
    static const char by_user[] = "braid: interrupted before the first step; nothing was saved\n";
    static const char by_other[] = "braid: told to stop before the first step; nothing was saved\n";
    ssize_t n = sig == SIGINT ? write(STDERR_FILENO, by_user, sizeof by_user - 1)
                              : write(STDERR_FILENO, by_other, sizeof by_other - 1);
    (void)n;
    _exit(130);
}

static void *watch(void *ctx)
{
    struct startup_watch *w = ctx;
    struct pollfd p[2] = {{.fd = w->wake, .events = POLLIN}, {.fd = w->signals, .events = POLLIN}};
    for (;;) {
        struct signalfd_siginfo info;
        if (poll(p, 2, -1) < 0)
            continue; /* EINTR: nothing else can go wrong with two open descriptors */
        if (p[0].revents != 0)
            return NULL; /* a signal that came at the same time is left to the training loop */
        if (read(w->signals, &info, sizeof info) == (ssize_t)sizeof info)
            end_process((int)info.ssi_signo);
    }
}

static void release(struct startup_watch *w)
{
    if (w->signals >= 0)
        close(w->signals);
    if (w->wake >= 0)
        close(w->wake);
    free(w);
}

/* Without the thread the signals wait for the first step: that is no reason not to train. */
struct startup_watch *startup_watch_begin(void)
{
    struct startup_watch *w = calloc(1, sizeof *w);
    sigset_t set;
    if (w == NULL)
        return NULL;
    stop_signals_blocked(&set);
    w->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    w->wake = eventfd(0, EFD_CLOEXEC);
    if (w->signals < 0 || w->wake < 0 || pthread_create(&w->thread, NULL, watch, w) != 0) {
        release(w);
        return NULL;
    }
    return w;
}

void startup_watch_end(struct startup_watch *w)
{
    const uint64_t one = 1;
    if (w == NULL || atomic_exchange(&w->ended, true))
        return;
    if (write(w->wake, &one, sizeof one) == (ssize_t)sizeof one)
        pthread_join(w->thread, NULL);
}

void startup_watch_close(struct startup_watch *w)
{
    if (w == NULL)
        return;
    startup_watch_end(w);
    release(w);
}
