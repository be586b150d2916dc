/* How ranks started with torchrun's variables find each other: rank 0 listens at MASTER_ADDR:MASTER_PORT, the others come there,
 * say who they are, and learn where the rest listens. Then every pair connects. What strangers send is dropped. */
#include "comm/tcp_int.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const uint64_t greeting = 0x31646961726221ull; /* this protocol, first version */

/* What a rank says when it comes, and what it is told. */
struct hello {
    uint64_t magic;
    int32_t rank, size, port, pid;
    char host[40];
};
struct answer {
    uint64_t magic;
    int32_t status, pad;
};
struct place {
    struct sockaddr_storage at;
    uint32_t length;
    int32_t port;
};
/* Rank 0's list of those who came; of the others, who they are. */
struct start {
    const struct launch *l;
    double end; /* of the time for all this */
    int *fd, listener, n_heard;
    struct hello *came;
    struct place *place;
};

static int left_ms(const struct start *s)
{
    double left = s->end - time_now();
    return left <= 0 ? 0 : left > 1 ? 1000 : (int)(left * 1000) + 1;
}

/* All bytes or false, within the time. */
static bool transfer(const struct start *s, int fd, void *data, size_t n, bool in)
{
    for (size_t at = 0; at < n;) {
        struct pollfd p = {.fd = fd, .events = in ? POLLIN : POLLOUT};
        if (poll(&p, 1, left_ms(s)) <= 0) {
            if (time_now() >= s->end)
                return false;
            continue;
        }
        ssize_t k = in ? recv(fd, (char *)data + at, n - at, 0) : send(fd, (char *)data + at, n - at, MSG_NOSIGNAL);
        if (k <= 0 && !(k < 0 && (errno == EAGAIN || errno == EINTR)))
            return false;
        at += k > 0 ? (size_t)k : 0;
    }
    return true;
}
static bool take(const struct start *s, int fd, void *data, size_t n) { return transfer(s, fd, data, n, true); }
static bool give(const struct start *s, int fd, const void *data, size_t n)
{
    char *copy = malloc(n);
    bool ok = copy != NULL && transfer(s, fd, memcpy(copy, data, n), n, false);
    free(copy);
    return ok;
}

static void set_up(int fd)
{
    int on = 1;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL, 0) | O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static int listen_at(int port, int *out, int *port_out, struct err *e)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {.s_addr = htonl(INADDR_ANY)}};
    socklen_t n = sizeof a;
    int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return err_errno(e, "no socket to listen on");
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) != 0 || listen(fd, 1024) != 0 || getsockname(fd, (struct sockaddr *)&a, &n) != 0) {
        err_errno(e, "rank 0 cannot listen on port %d (MASTER_PORT)", port);
        close(fd);
        return err_hint(e, "choose another MASTER_PORT; is an earlier run still there?");
    }
    *out = fd;
    *port_out = ntohs(a.sin_port);
    return ST_OK;
}

/* Tries until the time is up: the other side may start later. */
static int connect_to(const struct start *s, const struct sockaddr *at, socklen_t length, int *out)
{
    int code = ETIMEDOUT;
    do {
        int fd = socket(at->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
            return errno;
        if (connect(fd, at, length) == 0) {
            *out = fd;
            return 0;
        }
        code = errno;
        if (code == EINPROGRESS) {
            struct pollfd p = {.fd = fd, .events = POLLOUT};
            socklen_t n = sizeof code;
            code = ETIMEDOUT;
            if (poll(&p, 1, left_ms(s)) > 0)
                getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &n);
        }
        if (code == 0) {
            *out = fd;
            return 0;
        }
        close(fd);
        usleep(100000);
    } while (time_now() < s->end);
    return code;
}

static struct hello hello_of(const struct start *s, int port)
{
    struct hello h = {.magic = greeting, .rank = s->l->rank, .size = s->l->size, .port = port, .pid = (int32_t)getpid()};
    if (gethostname(h.host, sizeof h.host - 1) != 0)
        h.host[0] = '\0';
    return h;
}

/* ---- rank 0 ---------------------------------------------------------------------------------------------------------------- */

static int check_hello(const struct start *s, const struct hello *h, struct err *e)
{
    if (h->size != s->l->size)
        return err_set(e, ST_USAGE, "process %d on %s says WORLD_SIZE=%d, rank 0 says %d", h->pid, h->host, h->size, s->l->size);
    if (h->rank < 0 || h->rank >= s->l->size)
        return err_set(e, ST_USAGE, "process %d on %s says RANK=%d, which is not below WORLD_SIZE=%d", h->pid, h->host, h->rank, s->l->size);
    if (h->rank == 0 || s->fd[h->rank] >= 0)
        return err_set(e, ST_USAGE, "two processes say RANK=%d: %d on %s and %d on %s", h->rank, s->came[h->rank].pid, s->came[h->rank].host, h->pid, h->host);
    return ST_OK;
}

static void missing_text(const struct start *s, struct buf *b)
{
    int n = 0;
    for (int r = 1; r < s->l->size; r++)
        if (s->fd[r] < 0 && n++ < 8)
            buf_addf(b, "%s%d", n > 1 ? ", " : "", r);
    if (n > 8)
        buf_addf(b, " and %d more", n - 8);
}

/* Takes one more rank in, or turns it away: e says why. refuse: everybody is turned away. */
static int accept_one(struct start *s, int refuse, int *n_came, struct err *e)
{
    struct place p = {.length = sizeof p.at};
    socklen_t length = sizeof p.at;
    struct hello h;
    int fd = accept4(s->listener, (struct sockaddr *)&p.at, &length, SOCK_CLOEXEC);
    if (fd < 0)
        return ST_OK;
    set_up(fd);
    struct start brief = *s; /* a stranger who says nothing must not use up the time */
    brief.end = brief.end < time_now() + 5 ? brief.end : time_now() + 5;
    if (!take(&brief, fd, &h, sizeof h) || h.magic != greeting) {
        close(fd);
        return ST_OK;
    }
    h.host[sizeof h.host - 1] = '\0';
    s->n_heard++;
    int st = refuse != ST_OK ? refuse : check_hello(s, &h, e);
    if (st != ST_OK) {
        const struct answer no = {.magic = greeting, .status = st};
        give(&brief, fd, &no, sizeof no);
        close(fd);
        return st;
    }
    p.length = (uint32_t)length;
    p.port = h.port;
    s->place[h.rank] = p;
    s->came[h.rank] = h;
    s->fd[h.rank] = fd;
    (*n_came)++;
    return ST_OK;
}

static int gather_ranks(struct start *s, struct err *e)
{
    int n_came = 1, st = ST_OK;
    while (st == ST_OK && n_came < s->l->size) {
        struct pollfd p = {.fd = s->listener, .events = POLLIN};
        if (time_now() >= s->end) {
            struct buf b;
            buf_init(&b, 0);
            missing_text(s, &b);
            err_set(e, ST_PEER, "of %d ranks these did not come to rank 0 in time: %s", s->l->size, b.text != NULL ? b.text : "");
            buf_release(&b);
            return err_hint(e, "see their output; MASTER_ADDR and MASTER_PORT must lead to rank 0 from everywhere");
        }
        if (poll(&p, 1, left_ms(s)) > 0)
            st = accept_one(s, ST_OK, &n_came, e);
    }
    return st;
}

/* Everybody who came, and who still comes in the next seconds, hears that there will be no run. */
static int refuse_all(struct start *s, int status)
{
    const struct answer no = {.magic = greeting, .status = status};
    s->end = time_now() + 2;
    for (int r = 1; r < s->l->size; r++)
        if (s->fd[r] >= 0)
            give(s, s->fd[r], &no, sizeof no);
    while (s->n_heard < s->l->size - 1 && time_now() < s->end) {
        struct pollfd p = {.fd = s->listener, .events = POLLIN};
        int n = 0;
        if (poll(&p, 1, left_ms(s)) > 0)
            accept_one(s, status, &n, NULL);
    }
    return status;
}

/* Everybody hears where everybody listens. */
static int answer_all(struct start *s, struct err *e)
{
    const struct answer yes = {.magic = greeting, .status = ST_OK};
    for (int r = 1; r < s->l->size; r++)
        if (!give(s, s->fd[r], &yes, sizeof yes) || !give(s, s->fd[r], s->place, (size_t)s->l->size * sizeof *s->place))
            return err_set(e, ST_PEER, "rank %d (process %d on %s) left during the start", r, s->came[r].pid, s->came[r].host);
    return ST_OK;
}

static int start_first(struct start *s, int port, struct err *e)
{
    int same;
    s->came[0] = hello_of(s, port);
    TRY(listen_at(port, &s->listener, &same, e));
    int st = gather_ranks(s, e);
    return st != ST_OK ? refuse_all(s, st) : answer_all(s, e);
}

/* ---- the others -------------------------------------------------------------------------------------------------------------- */

static int reach_first(struct start *s, const char *host, const char *port, struct err *e)
{
    struct addrinfo *list = NULL, hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
    int code = getaddrinfo(host, port, &hints, &list);
    if (code != 0)
        return err_set(e, ST_PEER, "rank %d cannot find MASTER_ADDR=%s: %s", s->l->rank, host, gai_strerror(code));
    code = connect_to(s, list->ai_addr, list->ai_addrlen, &s->fd[0]);
    freeaddrinfo(list);
    if (code == 0)
        return ST_OK;
    err_set(e, ST_PEER, "rank %d cannot reach rank 0 at %s:%s: %s", s->l->rank, host, port, strerror(code));
    return err_hint(e, "is rank 0 running, and do MASTER_ADDR and MASTER_PORT lead to it from here?");
}

static int hear_first(struct start *s, struct err *e)
{
    struct answer a;
    if (!take(s, s->fd[0], &a, sizeof a) || a.magic != greeting)
        return err_set(e, ST_PEER, "rank %d: rank 0 ended during the start", s->l->rank);
    if (a.status != ST_OK) {
        err_clear(e); /* rank 0 says it */
        return ST_PEER;
    }
    if (!take(s, s->fd[0], s->place, (size_t)s->l->size * sizeof *s->place))
        return err_set(e, ST_PEER, "rank %d: rank 0 ended during the start", s->l->rank);
    return ST_OK;
}

/* To every rank below this one; those above come here. */
static int meet_others(struct start *s, struct err *e)
{
    const struct hello me = hello_of(s, 0);
    for (int r = 1; r < s->l->rank; r++) {
        struct place *p = &s->place[r];
        ((struct sockaddr_in *)&p->at)->sin_port = htons((uint16_t)p->port);
        int code = connect_to(s, (struct sockaddr *)&p->at, p->length, &s->fd[r]);
        if (code != 0 || !give(s, s->fd[r], &me, sizeof me))
            return err_set(e, ST_PEER, "rank %d cannot reach rank %d: %s", s->l->rank, r, strerror(code));
    }
    int want = s->l->size - 1 - s->l->rank;
    while (want > 0) {
        struct pollfd p = {.fd = s->listener, .events = POLLIN};
        struct hello h;
        if (time_now() >= s->end)
            return err_set(e, ST_PEER, "rank %d: %d of the ranks above it did not come in time", s->l->rank, want);
        if (poll(&p, 1, left_ms(s)) <= 0)
            continue;
        int fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            continue;
        set_up(fd);
        if (!take(s, fd, &h, sizeof h) || h.magic != greeting || h.rank <= s->l->rank || h.rank >= s->l->size || s->fd[h.rank] >= 0) {
            close(fd);
            continue;
        }
        s->fd[h.rank] = fd;
        want--;
    }
    return ST_OK;
}

static int start_other(struct start *s, const char *host, const char *port, struct err *e)
{
    int mine;
    TRY(listen_at(0, &s->listener, &mine, e));
    TRY(reach_first(s, host, port, e));
    const struct hello h = hello_of(s, mine);
    if (!give(s, s->fd[0], &h, sizeof h))
        return err_set(e, ST_PEER, "rank %d: rank 0 ended during the start", s->l->rank);
    TRY(hear_first(s, e));
    return meet_others(s, e);
}

int tcp_connect_all(const struct launch *l, double timeout, int *fd, struct err *e)
{
    const char *host = getenv("MASTER_ADDR"), *port = getenv("MASTER_PORT");
    int64_t number;
    if (host == NULL || host[0] == '\0' || port == NULL || !parse_i64(port, &number) || number < 1 || number > 65535) {
        err_set(e, ST_USAGE, "RANK and WORLD_SIZE ask for %d ranks, but %s", l->size,
                host == NULL || host[0] == '\0' ? "MASTER_ADDR is not set" : port == NULL ? "MASTER_PORT is not set" : "MASTER_PORT is no port");
        return err_hint(e, "MASTER_ADDR is the host of rank 0, MASTER_PORT a port that is free there; or start with mpirun");
    }
    struct start s = {.l = l, .end = time_now() + (timeout > 0 ? timeout : 600), .fd = fd, .listener = -1};
    for (int r = 0; r < l->size; r++)
        fd[r] = -1;
    int st = mem_array((void **)&s.came, (size_t)l->size, sizeof *s.came, e);
    if (st == ST_OK)
        st = mem_array((void **)&s.place, (size_t)l->size, sizeof *s.place, e);
    if (st == ST_OK)
        st = l->rank == 0 ? start_first(&s, (int)number, e) : start_other(&s, host, port, e);
    if (s.listener >= 0)
        close(s.listener);
    for (int r = 0; r < l->size && st == ST_OK; r++)
        if (fd[r] >= 0)
            set_up(fd[r]);
    free(s.came);
    free(s.place);
    return st;
}
