/* The signals that ask a process to stop: SIGINT, SIGTERM and SIGHUP. Nothing installs a handler:
 * they are blocked, and asked for. */
#ifndef BRAID_BASE_STOP_H
#define BRAID_BASE_STOP_H

#include <signal.h>
#include <stdbool.h>

/* Without those that the process was started to ignore (nohup). */
void stop_signals(sigset_t *set);
/* Those that this thread blocks now. */
void stop_signals_blocked(sigset_t *set);
/* One has come and was not taken yet. */
bool stop_pending(void);

#endif
