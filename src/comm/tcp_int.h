/* Between tcp_start.c, which connects the ranks, and tcp.c, which moves messages over the connections. */
#ifndef BRAID_COMM_TCP_INT_H
#define BRAID_COMM_TCP_INT_H

#include "comm/comm_int.h"

/* fd[r]: a connection to every other rank, non-blocking; -1 for the rank itself. An error is said once: e of rank 0 where that
 * knows it. */
int tcp_connect_all(const struct launch *l, double timeout, int *fd, struct err *e);

#endif
