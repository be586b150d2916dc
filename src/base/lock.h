/* The lock of a folder: one process at a time works in it. DIR/lock is locked with flock, and says who holds it. Where
 * flock does not work across machines (some network file systems), the holder's heartbeat in the
 * file takes its place. */
#ifndef BRAID_BASE_LOCK_H
#define BRAID_BASE_LOCK_H

#include "base/err.h"

#include <stdbool.h>

struct dir_lock;
struct dir_lock_opts {
    double beat;     /* seconds between heartbeats; 0: 5 */
    double patience; /* seconds without a heartbeat after which another machine's lock is stale; 0: 20 */
};
/* ST_CONFLICT names the holder: host, process, since when. note (may be NULL) reports a stale lock that was taken over.
 * opts may be NULL. */
int dir_lock_take(struct dir_lock **out, const char *dir, const struct dir_lock_opts *opts, struct err *note,
                  struct err *e);
/* Is it still ours? Another machine may have taken it over while this process was suspended. */
int dir_lock_check(const struct dir_lock *l, struct err *e);
void dir_lock_release(struct dir_lock *l); /* removes the file; NULL is fine */

#endif
