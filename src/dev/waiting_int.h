/* How long threads of OpenMP spin while they wait for each other; see waiting.c. */
#ifndef BRAID_DEV_WAITING_INT_H
#define BRAID_DEV_WAITING_INT_H

#include <stdbool.h>

/* NULL: threads wait as their runtime has it, and the other functions do nothing. */
struct waiting;
struct waiting *waiting_open(int n_threads);
void waiting_close(struct waiting *w);
/* Between steps, by the thread that computes: looks now and then whether other programs use the
 * cores. */
void waiting_look(struct waiting *w);
/* For tests: are threads made to sleep soon? And the decision of one look: preemptions a second,
 * and cores that other programs use. */
bool waiting_is_short(const struct waiting *w);
void waiting_decide(struct waiting *w, double preempted_rate, double others_cores);

#endif
