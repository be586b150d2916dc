/* Connections between ranks while they are made: addresses, listening, and many handshakes at once.
 * A connection that says nothing or something else ends after a few seconds and delays no other. */
#include "comm/tcp_int.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* Seconds a connection that came has for its handshake. */
static const double handshake_seconds = 5;

/* ---- addresses ------------------------------------------------------------------------------- */

static int resolve_family(const char *host, int family, struct tcp_address *out, int *n)
{
    struct addrinfo *list = NULL, hints = {.ai_family = family, .ai_socktype = SOCK_STREAM};
    int code = getaddrinfo(host, NULL, &hints, &list);
    *n = 0;
    for (struct addrinfo *a = list; code == 0 && a != NULL && *n < TCP_MAX_ADDRESSES; a = a->ai_next) {
        out[*n] = (struct tcp_address){.length = a->ai_addrlen};
        memcpy(&out[(*n)++].at, a->ai_addr, a->ai_addrlen);
    }
    if (list != NULL)
        freeaddrinfo(list);
    return code;
}

int tcp_resolve(const char *host, struct tcp_address *out, int *n, struct err *e)
{
    int code = resolve_family(host, AF_INET, out, n);
    if (*n == 0 && resolve_family(host, AF_INET6, out, n) == 0)
        code = 0;
    if (*n > 0)
        return ST_OK;
    err_set(e, ST_PEER, "the host of MASTER_ADDR=%s is not known here: %s", host,
            code != 0 ? gai_strerror(code) : "no address");
    return err_hint(e, "give its IP address, or make the name known on every host");
}

void tcp_set_port(struct tcp_address *a, int port)
{
    if (a->at.ss_family == AF_INET6)
        ((struct sockaddr_in6 *)&a->at)->sin6_port = htons((uint16_t)port);
    else
        ((struct sockaddr_in *)&a->at)->sin_port = htons((uint16_t)port);
}

bool tcp_is_loopback(const struct tcp_address *a)
{
    if (a->at.ss_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)&a->at)->sin6_addr);
    return ntohl(((const struct sockaddr_in *)&a->at)->sin_addr.s_addr) >> 24 == 127;
}

const char *tcp_text(const struct tcp_address *a, char out[TCP_TEXT])
{
    char host[64], port[16];
    if (getnameinfo((const struct sockaddr *)&a->at, a->length, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        snprintf(out, TCP_TEXT, "an unknown address");
    else
        snprintf(out, TCP_TEXT, strchr(host, ':') != NULL ? "[%s]:%s" : "%s:%s", host, port);
    return out;
}

static bool is_own(const struct tcp_address *a)
{
    struct tcp_address any_port = *a;
    tcp_set_port(&any_port, 0);
    int fd = socket(a->at.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool own = fd >= 0 && bind(fd, (struct sockaddr *)&any_port.at, any_port.length) == 0;
    if (fd >= 0)
        close(fd);
    return own;
}

/* The address packets to `to` leave from; nothing is sent to find out. */
static bool source_address(const struct tcp_address *to, struct tcp_address *out)
{
    struct tcp_address at = *to;
    tcp_set_port(&at, 9);
    int fd = socket(to->at.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    *out = (struct tcp_address){.length = sizeof out->at};
    bool found = fd >= 0 && connect(fd, (struct sockaddr *)&at.at, at.length) == 0 &&
                 getsockname(fd, (struct sockaddr *)&out->at, &out->length) == 0;
    if (fd >= 0)
        close(fd);
    return found;
}

void tcp_listen_address(const struct tcp_address *a, bool named, struct tcp_address *out)
{
    bool all = named && tcp_is_loopback(a);
    if (!all && is_own(a))
        *out = *a;
    else if (all || !source_address(a, out)) {
        *out = (struct tcp_address){.length = a->length};
        out->at.ss_family = a->at.ss_family; /* the rest is zero: all addresses of this host */
    }
    tcp_set_port(out, 0);
}

int tcp_listen(const struct tcp_address *at, int *out, int *port)
{
    struct tcp_address got = {.length = sizeof got.at};
    int on = 1, fd = socket(at->at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errno;
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(fd, (const struct sockaddr *)&at->at, at->length) != 0 || listen(fd, 1024) != 0 ||
        getsockname(fd, (struct sockaddr *)&got.at, &got.length) != 0) {
        int code = errno;
        close(fd);
        return code;
    }
    *out = fd;
    *port = ntohs(got.at.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&got.at)->sin6_port
                                               : ((struct sockaddr_in *)&got.at)->sin_port);
    return 0;
}

/* ---- links ----------------------------------------------------------------------------------- */

int links_open(struct links *s, const struct hand_job *job, int n, struct err *e)
{
    *s = (struct links){.job = job, .listener = -1, .n = n};
    TRY(mem_array((void **)&s->link, (size_t)n, sizeof *s->link, e));
    TRY(mem_array((void **)&s->poll, (size_t)n + 1, sizeof *s->poll, e));
    for (int i = 0; i < n; i++)
        s->link[i].fd = -1;
    return ST_OK;
}

void link_free(struct link *l)
{
    if (l->fd >= 0)
        close(l->fd);
    *l = (struct link){.fd = -1};
}

void links_close(struct links *s)
{
    for (int i = 0; s->link != NULL && i < s->n; i++)
        link_free(&s->link[i]);
    if (s->listener >= 0)
        close(s->listener);
    free(s->link);
    free(s->poll);
    *s = (struct links){.listener = -1};
}

static void lose(struct link *l, int code)
{
    l->state = LINK_LOST;
    l->code = code;
}

/* The unfinished connection that has been open the longest gives way, so that silent ones
 * cannot keep ranks out. */
static struct link *free_oldest(struct links *s)
{
    struct link *oldest = NULL;
    for (int i = 0; i < s->n; i++) {
        struct link *l = &s->link[i];
        if (l->state == LINK_HANDSHAKE && l->hand.is_server && (oldest == NULL || l->end < oldest->end))
            oldest = l;
    }
    if (oldest != NULL)
        link_free(oldest);
    return oldest;
}

static struct link *new_link(struct links *s)
{
    for (int i = 0; i < s->n; i++)
        if (s->link[i].state == LINK_FREE)
            return &s->link[i];
    return free_oldest(s);
}

static bool random_nonce(uint8_t nonce[HAND_NONCE_BYTES])
{
    return getrandom(nonce, HAND_NONCE_BYTES, 0) == HAND_NONCE_BYTES;
}

/* Waiting for a few small messages one after the other must not wait for full packets. */
static void no_delay(int fd)
{
    int on = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* slower without it, nothing else */
}

struct link *link_connect(struct links *s, const struct tcp_address *to, int peer, const struct hand_hello *me,
                          double seconds)
{
    uint8_t nonce[HAND_NONCE_BYTES];
    struct link *l = new_link(s);
    if (l == NULL || !random_nonce(nonce))
        return NULL;
    int fd = socket(to->at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return NULL;
    *l = (struct link){.state = LINK_CONNECTING, .fd = fd, .peer = peer, .end = time_now() + seconds, .other = *to};
    no_delay(fd);
    hand_open_client(&l->hand, s->job, me, nonce);
    if (connect(fd, (const struct sockaddr *)&to->at, to->length) != 0 && errno != EINPROGRESS)
        lose(l, errno);
    return l;
}

/* A few in one turn, so that a flood does not keep the others from moving on. */
static void let_in(struct links *s)
{
    for (int i = 0; i < 64; i++) {
        struct tcp_address from = {.length = sizeof from.at};
        uint8_t nonce[HAND_NONCE_BYTES];
        int fd = accept4(s->listener, (struct sockaddr *)&from.at, &from.length, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE) {
                free_oldest(s);
                usleep(1000);
            }
            return;
        }
        struct link *l = random_nonce(nonce) ? new_link(s) : NULL;
        if (l == NULL) {
            close(fd);
            return;
        }
        *l = (struct link){
            .state = LINK_HANDSHAKE, .fd = fd, .peer = -1, .end = time_now() + handshake_seconds, .other = from};
        no_delay(fd);
        hand_open_server(&l->hand, nonce);
    }
}

static void send_some(struct link *l)
{
    while (l->hand.n_out > 0 && l->state == LINK_HANDSHAKE) {
        ssize_t n = send(l->fd, l->hand.out, l->hand.n_out, MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n < 0)
            lose(l, errno);
        else
            hand_sent(&l->hand, (size_t)n);
    }
}

/* A client that knows the server's answer to be wrong hangs up instead of proving itself. */
static void other_side_closed(const struct links *s, struct link *l, int code)
{
    if (l->hand.is_server && l->hand.hello.magic == hand_magic && l->hand.hello.job == s->job->job)
        l->result = HAND_SECRET;
    lose(l, code);
}

static void receive_some(struct links *s, struct link *l)
{
    uint8_t bytes[sizeof(struct hand_hello)];
    while (l->state == LINK_HANDSHAKE && l->result == HAND_MORE) {
        ssize_t n = recv(l->fd, bytes, l->hand.want - l->hand.n_in, 0);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0) {
            other_side_closed(s, l, n < 0 ? errno : ECONNRESET);
            return;
        }
        l->result = hand_take(&l->hand, s->job, bytes, (size_t)n);
        send_some(l);
    }
}

static void advance_link(struct links *s, struct link *l, short got)
{
    if (l->state == LINK_CONNECTING && (got & (POLLOUT | POLLERR | POLLHUP))) {
        int code = 0;
        socklen_t n = sizeof code;
        if (getsockopt(l->fd, SOL_SOCKET, SO_ERROR, &code, &n) != 0)
            code = errno;
        if (code != 0)
            lose(l, code);
        else
            l->state = LINK_HANDSHAKE;
    }
    if (l->state == LINK_HANDSHAKE) {
        send_some(l);
        if (got & (POLLIN | POLLHUP | POLLERR))
            receive_some(s, l);
    }
    if (l->state == LINK_HANDSHAKE && l->result == HAND_DONE && l->hand.n_out == 0)
        l->state = LINK_MET;
    else if (l->state == LINK_HANDSHAKE && l->result != HAND_MORE && l->result != HAND_DONE)
        lose(l, EPROTO);
    if ((l->state == LINK_HANDSHAKE || l->state == LINK_CONNECTING) && time_now() >= l->end)
        lose(l, ETIMEDOUT);
}

void links_turn(struct links *s, int ms)
{
    int n = 0;
    for (int i = 0; i < s->n; i++) {
        const struct link *l = &s->link[i];
        if (l->state == LINK_MET || l->state == LINK_LOST)
            ms = 0; /* there is something to report already */
        if (l->state != LINK_CONNECTING && l->state != LINK_HANDSHAKE)
            continue;
        bool out = l->state == LINK_CONNECTING || l->hand.n_out > 0;
        s->poll[n++] = (struct pollfd){.fd = l->fd, .events = (short)(POLLIN | (out ? POLLOUT : 0))};
    }
    int n_links = n;
    if (s->listener >= 0)
        s->poll[n++] = (struct pollfd){.fd = s->listener, .events = POLLIN};
    if (poll(s->poll, (nfds_t)n, ms) < 0)
        return;
    for (int i = 0, at = 0; i < s->n && at < n_links; i++)
        if (s->link[i].state == LINK_CONNECTING || s->link[i].state == LINK_HANDSHAKE)
            advance_link(s, &s->link[i], s->poll[at++].revents);
    if (s->listener >= 0 && s->poll[n - 1].revents != 0)
        let_in(s);
}
