/* Stop signals; see stop.h. */
#include "base/stop.h"
#include "base/base.h"

#include <pthread.h>

static const int signals[] = {SIGINT, SIGTERM, SIGHUP};

void stop_signals(sigset_t *set)
{
    sigemptyset(set);
    for (int i = 0; i < countof(signals); i++) {
        struct sigaction now;
        /* A blocked signal is delivered to sigtimedwait even if it is ignored, so those are left
         * out. */
        if (sigaction(signals[i], NULL, &now) != 0 || now.sa_handler != SIG_IGN)
            sigaddset(set, signals[i]);
    }
}

void stop_signals_blocked(sigset_t *set)
{
    sigset_t mask;
    sigemptyset(set);
    if (pthread_sigmask(SIG_BLOCK, NULL, &mask) != 0)
        return;
    for (int i = 0; i < countof(signals); i++)
        if (sigismember(&mask, signals[i]) == 1)
            sigaddset(set, signals[i]);
}

bool stop_pending(void)
{
    sigset_t set;
    if (sigpending(&set) != 0)
        return false;
    for (int i = 0; i < countof(signals); i++)
        if (sigismember(&set, signals[i]) == 1)
            return true;
    return false;
}
