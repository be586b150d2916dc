/* Between tcp_start.c (who meets whom), tcp_link.c (connections that are being made) and tcp.c
 * (messages over the finished ones). */
#ifndef BRAID_COMM_TCP_INT_H
#define BRAID_COMM_TCP_INT_H

#include "comm/comm_int.h"
#include "comm/tcp_hand_int.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

/* fd[r]: a connection to every other rank, non-blocking; -1 for the rank itself. An error that rank
 * 0 knows is reported by rank 0 alone: e of the others stays clear. */
int tcp_connect_all(const struct launch *l, const struct world_opts *o, int *fd, struct err *e);

/* ---- addresses ------------------------------------------------------------------------------- */

struct tcp_address {
    struct sockaddr_storage at;
    socklen_t length;
};
enum { TCP_MAX_ADDRESSES = 8, TCP_MAX_PORTS = 8, TCP_TEXT = 80 };
/* IPv4 addresses of a host, IPv6 ones if it has no other. */
int tcp_resolve(const char *host, struct tcp_address *out, int *n, struct err *e);
void tcp_set_port(struct tcp_address *a, int port);
/* Where to listen so that only hosts that reach `a` can connect: the address itself where it
 * is this host's, else the one packets to it leave from. named: a was found by a name, which its
 * own host may resolve to loopback while others do not; then all addresses. */
void tcp_listen_address(const struct tcp_address *a, bool named, struct tcp_address *out);
bool tcp_is_loopback(const struct tcp_address *a);
const char *tcp_text(const struct tcp_address *a, char out[TCP_TEXT]);
/* errno, or 0: *fd listens at `at`; *port: which port it got. */
int tcp_listen(const struct tcp_address *at, int *fd, int *port);

/* ---- links: connections on which a handshake runs -------------------------------------------- */

enum link_state { LINK_FREE, LINK_CONNECTING, LINK_HANDSHAKE, LINK_MET, LINK_LOST };
struct link {
    enum link_state state;
    int fd, peer; /* peer: the rank a client goes to */
    double end;   /* of the time for this one */
    struct tcp_address other;
    struct hand hand;
    enum hand_result result;
    int code; /* errno of one that was lost */
};
/* All links of a rank that starts. One turn moves all of them on; none can hold up the others. */
struct links {
    const struct hand_job *job;
    int listener; /* -1: no connection is accepted */
    struct link *link;
    struct pollfd *poll;
    int n; /* places in link[] */
};
int links_open(struct links *s, const struct hand_job *job, int n, struct err *e);
void links_close(struct links *s);
/* Begins to connect; seconds: time for connection and handshake. NULL: no place, or no socket. */
struct link *link_connect(struct links *s, const struct tcp_address *to, int peer, const struct hand_hello *me,
                          double seconds);
/* Waits at most ms until something happens. Afterwards links may be MET or LOST: the caller takes
 * fd (sets it to -1) and calls link_free. */
void links_turn(struct links *s, int ms);
void link_free(struct link *l);

#endif
