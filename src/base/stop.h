/* The signals that ask a process to stop: SIGINT, SIGTERM and SIGHUP. No handler is installed: they are blocked and
 * polled. */
#ifndef BRAID_BASE_STOP_H
#define BRAID_BASE_STOP_H

#include <signal.h>
#include <stdbool.h>

/* All of them but those that the process was started to ignore (nohup). */
void stop_signals(sigset_t *set);
/* Those that this thread currently blocks. */
void stop_signals_blocked(sigset_t *set);
/* One has arrived and has not been consumed. */
bool stop_pending(void);

#endif
