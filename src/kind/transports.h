/* The list of transports: T(X, ID, name) for each. The values of parallel.comm, enum comm_kind and the table of
 * comm/world.c are made from it; comm/<name>.c defines `transport_kind_<name>`, which says how a world of that
 * kind is opened. */
#ifndef BRAID_KIND_TRANSPORTS_H
#define BRAID_KIND_TRANSPORTS_H

#define TRANSPORTS(T, X)                                                                                               \
    T(X, SELF, self)                                                                                                   \
    T(X, THREADS, threads)                                                                                             \
    T(X, MPI, mpi)                                                                                                     \
    T(X, NCCL, nccl)                                                                                                   \
    T(X, IPC, ipc)                                                                                                     \
    T(X, LOOP, loop)                                                                                                   \
    T(X, TCP, tcp)

#endif
