/* How ranks started with torchrun's variables find each other: rank 0 listens at MASTER_ADDR, the
 * others come there and learn where the rest listens. Then every pair connects. Every connection
 * begins with the handshake of tcp_hand_int.h.
 *
 * MASTER_PORT may be taken: torchrun's agent keeps a store of its own there. So there is a short
 * list of ports that every rank can work out; rank 0 listens at the first that is free, the others
 * try them in turn until a rank of this job answers. */
#include "comm/tcp_int.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PENDING = 256, SECRET_MIN = 16, SECRET_MAX = 4096 };
static const double try_seconds = 2; /* a rank waits so long for the answer of one port */

/* Rank 0's answer to those who came, and where each of them listens. */
struct answer {
    uint64_t magic;
    int32_t status, pad;
};
struct place {
    struct sockaddr_storage at;
    uint32_t length;
    int32_t port;
};
struct start {
    const struct launch *l;
    double begin, end; /* of the time for all this */
    const char *host;
    bool named; /* MASTER_ADDR is a name, not an address */
    struct tcp_address master[TCP_MAX_ADDRESSES];
    int n_master, port[TCP_MAX_PORTS], n_ports;
    char *secret;
    struct hand_job job;
    struct links links;
    int *fd, n_heard, n_wrong; /* n_wrong: connections without the secret */
    struct tcp_address wrong;  /* the last of those */
    struct hand_hello me, *came;
    struct place *place;
};

static int left_ms(const struct start *s)
{
    double left = s->end - time_now();
    return left <= 0 ? 0 : left > 0.2 ? 200 : (int)(left * 1000) + 1;
}

/* ---- whole messages over a finished connection ----------------------------------------------- */

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
    return transfer(s, fd, (void *)(uintptr_t)data, n, false); /* only read */
}

/* ---- rank 0 ---------------------------------------------------------------------------------- */

static int no_port(const struct start *s, int code, struct err *e)
{
    struct buf b;
    buf_init(&b, 0);
    for (int i = 0; i < s->n_ports; i++)
        buf_addf(&b, "%s%d", i > 0 ? ", " : "", s->port[i]);
    err_set(e, ST_PEER, "rank 0 cannot listen at MASTER_ADDR=%s, port %s: %s", s->host, b.text != NULL ? b.text : "?",
            strerror(code));
    buf_release(&b);
    return err_hint(e, "give another port with parallel.port, or another MASTER_PORT; is an "
                       "earlier run still there?");
}

static int listen_first(struct start *s, struct err *e)
{
    int code = EADDRNOTAVAIL, got;
    for (int p = 0; p < s->n_ports; p++)
        for (int a = 0; a < s->n_master; a++) {
            struct tcp_address at;
            tcp_listen_address(&s->master[a], s->named, &at);
            tcp_set_port(&at, s->port[p]);
            code = tcp_listen(&at, &s->links.listener, &got);
            if (code == 0)
                return ST_OK;
        }
    return no_port(s, code, e);
}

static int check_hello(const struct start *s, const struct hand_hello *h, struct err *e)
{
    if (h->size != s->l->size)
        return err_set(e, ST_USAGE, "process %d on %s says WORLD_SIZE=%d, rank 0 says %d", h->pid, h->host, h->size,
                       s->l->size);
    if (h->rank < 0 || h->rank >= s->l->size)
        return err_set(e, ST_USAGE, "process %d on %s says RANK=%d, which is not below WORLD_SIZE=%d", h->pid, h->host,
                       h->rank, s->l->size);
    if (h->port < 1 || h->port > 65535)
        return err_set(e, ST_USAGE, "process %d on %s (rank %d) says that it listens at port %d", h->pid, h->host,
                       h->rank, h->port);
    if (h->rank == 0 || s->fd[h->rank] >= 0)
        return err_set(e, ST_USAGE, "two processes say RANK=%d: %d on %s and %d on %s", h->rank, s->came[h->rank].pid,
                       s->came[h->rank].host, h->pid, h->host);
    return ST_OK;
}

/* A rank that came is admitted, or told that there will be no run: e says why. refuse: everybody is
 * told so. */
static int admit(struct start *s, struct link *l, int refuse, struct err *e)
{
    const struct hand_hello *h = &l->hand.hello;
    s->n_heard++;
    int st = refuse != ST_OK ? refuse : check_hello(s, h, e);
    if (st != ST_OK) {
        const struct answer no = {.magic = hand_magic, .status = st};
        give(s, l->fd, &no, sizeof no);
        return st;
    }
    s->place[h->rank] = (struct place){.at = l->other.at, .length = (uint32_t)l->other.length, .port = h->port};
    s->came[h->rank] = *h;
    s->fd[h->rank] = l->fd;
    l->fd = -1;
    return ST_OK;
}

/* Takes those whose handshake has ended. */
static int admit_all(struct start *s, int refuse, struct err *e)
{
    int st = ST_OK;
    for (int i = 0; i < s->links.n; i++) {
        struct link *l = &s->links.link[i];
        if (l->state == LINK_MET && (st == ST_OK || refuse != ST_OK))
            st = admit(s, l, refuse, refuse != ST_OK ? NULL : e);
        else if (l->state == LINK_LOST && l->result == HAND_SECRET) {
            s->n_wrong++;
            s->wrong = l->other;
        }
        if (l->state == LINK_MET || l->state == LINK_LOST)
            link_free(l);
    }
    return st;
}

static int some_missing(const struct start *s, struct err *e)
{
    struct buf b;
    char text[TCP_TEXT];
    int n = 0;
    buf_init(&b, 0);
    for (int r = 1; r < s->l->size; r++)
        if (s->fd[r] < 0 && n++ < 8)
            buf_addf(&b, "%s%d", n > 1 ? ", " : "", r);
    if (n > 8)
        buf_addf(&b, " and %d more", n - 8);
    if (s->n_wrong > 0)
        buf_addf(&b, "; %d connection%s of this job did not know the secret, the last from %s", s->n_wrong,
                 s->n_wrong > 1 ? "s" : "", tcp_text(&s->wrong, text));
    err_set(e, ST_PEER, "of %d ranks these did not come to rank 0 in time: %s", s->l->size,
            b.text != NULL ? b.text : "");
    buf_release(&b);
    return err_hint(e, s->n_wrong > 0
                           ? "parallel.secret must be the same on every rank"
                           : "see their output; MASTER_ADDR and MASTER_PORT must lead to rank 0 from everywhere");
}

static int n_came(const struct start *s)
{
    int n = 1;
    for (int r = 1; r < s->l->size; r++)
        n += s->fd[r] >= 0;
    return n;
}

/* One that came and is gone again will not come back. */
static int check_still_there(const struct start *s, struct err *e)
{
    for (int r = 1; r < s->l->size; r++) {
        char byte;
        if (s->fd[r] >= 0 && recv(s->fd[r], &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
            return err_set(e, ST_PEER, "rank %d (process %d on %s) left during the start", r, s->came[r].pid,
                           s->came[r].host);
    }
    return ST_OK;
}

static int gather_ranks(struct start *s, struct err *e)
{
    while (n_came(s) < s->l->size) {
        if (time_now() >= s->end)
            return some_missing(s, e);
        links_turn(&s->links, left_ms(s));
        TRY(admit_all(s, ST_OK, e));
        TRY(check_still_there(s, e));
    }
    return ST_OK;
}

/* Everybody who came, and who still comes in the next seconds, is told that
 * there will be no run. */
static int refuse_all(struct start *s, int status)
{
    const struct answer no = {.magic = hand_magic, .status = status};
    s->end = time_now() + 2;
    for (int r = 1; r < s->l->size; r++)
        if (s->fd[r] >= 0)
            give(s, s->fd[r], &no, sizeof no);
    while (s->n_heard < s->l->size - 1 && time_now() < s->end) {
        links_turn(&s->links, left_ms(s));
        admit_all(s, status, NULL);
    }
    return status;
}

/* Everybody is told where everybody listens. */
static int answer_all(struct start *s, struct err *e)
{
    const struct answer yes = {.magic = hand_magic, .status = ST_OK};
    for (int r = 1; r < s->l->size; r++)
        if (!give(s, s->fd[r], &yes, sizeof yes) || !give(s, s->fd[r], s->place, (size_t)s->l->size * sizeof *s->place))
            return err_set(e, ST_PEER, "rank %d (process %d on %s) left during the start", r, s->came[r].pid,
                           s->came[r].host);
    return ST_OK;
}

static int start_first(struct start *s, struct err *e)
{
    s->came[0] = s->me;
    TRY(listen_first(s, e));
    int st = gather_ranks(s, e);
    return st != ST_OK ? refuse_all(s, st) : answer_all(s, e);
}

/* ---- the others ------------------------------------------------------------------------------ */

static int not_reached(const struct start *s, int code, struct err *e)
{
    char text[TCP_TEXT];
    if (s->n_wrong > 0) {
        err_set(e, ST_PEER, "rank %d: rank 0 at %s has another secret than this rank", s->l->rank,
                tcp_text(&s->wrong, text));
        return err_hint(e, "parallel.secret must be the same on every rank");
    }
    err_set(e, ST_PEER, "rank %d cannot reach rank 0 at %s, port %d%s: %s", s->l->rank, s->host, s->port[0],
            s->n_ports > 1 ? " and those that stand in for it" : "", strerror(code));
    return err_hint(e, "is rank 0 running, and do MASTER_ADDR and MASTER_PORT (or parallel.port) "
                       "lead to it from here?");
}

/* True: rank 0 is reached. Tries one address and port. */
static bool try_port(struct start *s, const struct tcp_address *to, int *code)
{
    double left = s->end - time_now();
    struct link *l = link_connect(&s->links, to, 0, &s->me, left < try_seconds ? left : try_seconds);
    if (l == NULL) {
        *code = errno;
        return false;
    }
    while (l->state == LINK_CONNECTING || l->state == LINK_HANDSHAKE)
        links_turn(&s->links, left_ms(s));
    bool met = l->state == LINK_MET;
    if (met) {
        s->fd[0] = l->fd;
        l->fd = -1;
    } else if (l->result == HAND_SECRET) {
        s->n_wrong++;
        s->wrong = *to;
    } else {
        *code = l->code;
    }
    link_free(l);
    return met;
}

/* Rank 0 may start later, so ports are tried until the time is up. Where the only answers come from
 * a rank with another secret, more time will not help. */
static int reach_first(struct start *s, struct err *e)
{
    int code = ETIMEDOUT;
    while (time_now() < s->end && !(s->n_wrong > 0 && time_now() > s->begin + 5)) {
        for (int p = 0; p < s->n_ports; p++)
            for (int a = 0; a < s->n_master; a++) {
                struct tcp_address to = s->master[a];
                tcp_set_port(&to, s->port[p]);
                if (try_port(s, &to, &code)) {
                    s->master[0] = to;
                    return ST_OK;
                }
            }
        usleep(100000);
    }
    return not_reached(s, code, e);
}

static int hear_first(struct start *s, struct err *e)
{
    struct answer a;
    s->end += 3; /* rank 0, which knows who is missing, gives up first */
    if (!take(s, s->fd[0], &a, sizeof a) || a.magic != hand_magic)
        return err_set(e, ST_PEER, "rank %d: rank 0 ended during the start", s->l->rank);
    if (a.status != ST_OK) {
        err_clear(e); /* rank 0 reports it */
        return ST_PEER;
    }
    if (!take(s, s->fd[0], s->place, (size_t)s->l->size * sizeof *s->place))
        return err_set(e, ST_PEER, "rank %d: rank 0 ended during the start", s->l->rank);
    return ST_OK;
}

/* Where rank r listens. One that rank 0 sees on loopback is on rank 0's host, which may have
 * another address here. */
static struct tcp_address address_of(const struct start *s, int r)
{
    const struct place *p = &s->place[r];
    struct tcp_address a = {.at = p->at, .length = p->length <= sizeof p->at ? p->length : sizeof p->at};
    if (tcp_is_loopback(&a) && !tcp_is_loopback(&s->master[0]))
        a = s->master[0];
    tcp_set_port(&a, p->port);
    return a;
}

/* Ends links that are done: connections to ranks below are begun anew where they failed, those of
 * ranks above are kept. */
static void settle(struct start *s, double *retry_at)
{
    for (int i = 0; i < s->links.n; i++) {
        struct link *l = &s->links.link[i];
        if (l->state != LINK_MET && l->state != LINK_LOST)
            continue;
        bool came = l->hand.is_server;
        int r = came ? l->hand.hello.rank : l->peer;
        if (l->state == LINK_MET && r < s->l->size && (!came || r > s->l->rank) && s->fd[r] < 0) {
            s->fd[r] = l->fd;
            l->fd = -1;
        } else if (!came) {
            retry_at[r] = time_now() + 0.1;
        }
        link_free(l);
    }
}

static int meet_failed(const struct start *s, struct err *e)
{
    int r = 1;
    while (r < s->l->size - 1 && (r == s->l->rank || s->fd[r] >= 0))
        r++;
    struct tcp_address at = address_of(s, r);
    char text[TCP_TEXT];
    err_set(e, ST_PEER, "rank %d and rank %d (which listens at %s) did not meet in time", s->l->rank, r,
            tcp_text(&at, text));
    return err_hint(e, "every host must reach every other one; firewalls must let ranks connect to "
                       "any port of each other");
}

/* To every rank below this one; those above come here. All at once, so that no rank waits for a
 * chain of others. */
static int meet_others(struct start *s, struct err *e)
{
    double *retry_at = NULL; /* per rank: when to connect; negative: under way */
    TRY(mem_array((void **)&retry_at, (size_t)s->l->size, sizeof *retry_at, e));
    int st = ST_OK;
    while (st == ST_OK && n_came(s) < s->l->size - (s->l->rank != 0)) {
        for (int r = 1; r < s->l->rank; r++)
            if (s->fd[r] < 0 && retry_at[r] >= 0 && time_now() >= retry_at[r]) {
                struct tcp_address to = address_of(s, r);
                if (link_connect(&s->links, &to, r, &s->me, s->end - time_now()) != NULL)
                    retry_at[r] = -1;
            }
        links_turn(&s->links, left_ms(s) < 50 ? left_ms(s) : 50);
        settle(s, retry_at);
        if (time_now() >= s->end)
            st = meet_failed(s, e);
    }
    free(retry_at);
    return st;
}

static int start_other(struct start *s, struct err *e)
{
    struct tcp_address at;
    int port = 0;
    tcp_listen_address(&s->master[0], s->named, &at);
    int listener, code = tcp_listen(&at, &listener, &port);
    if (code != 0)
        return err_set(e, ST_PEER, "rank %d cannot listen for the others: %s", s->l->rank, strerror(code));
    s->me.port = port;
    int st = reach_first(s, e);
    s->links.listener = listener; /* ranks above come once they have heard from rank 0 */
    TRY(st);
    TRY(hear_first(s, e));
    return meet_others(s, e);
}

/* ---- what the launcher says ------------------------------------------------------------------ */

/* parallel.secret: env:NAME or a file; one line end at its end does not count. */
static int read_secret(struct start *s, const char *from, struct err *e)
{
    size_t n = 0;
    if (from == NULL || from[0] == '\0')
        return ST_OK;
    if (str_starts(from, "env:")) {
        const char *value = getenv(from + 4);
        if (value == NULL)
            return err_set(e, ST_USAGE, "parallel.secret=%s, but the environment has no %s", from, from + 4);
        s->secret = strdup(value);
        if (s->secret == NULL)
            return err_set(e, ST_NOMEM, "no memory for the secret of parallel.secret");
        n = strlen(s->secret);
    } else {
        TRY(file_read(from, SECRET_MAX, &s->secret, &n, e));
    }
    n -= n > 0 && s->secret[n - 1] == '\n';
    if (n < SECRET_MIN || n > SECRET_MAX) {
        err_set(e, ST_USAGE, "parallel.secret=%s has %zu bytes; at least %d are needed, at most %d are read", from, n,
                SECRET_MIN, SECRET_MAX);
        return err_hint(e, "head -c 32 /dev/urandom | base64 makes one");
    }
    s->job.key = s->secret;
    s->job.n_key = n;
    return ST_OK;
}

/* Ports that every rank of the job can work out. An agent of torchrun that says so keeps
 * MASTER_PORT itself. The others lie below the range from which systems take ports for outgoing
 * connections. */
static void list_ports(struct start *s, int master_port, int option)
{
    const char *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
    bool taken = agent != NULL && (strcmp(agent, "True") == 0 || strcmp(agent, "1") == 0);
    if (option > 0) {
        s->port[s->n_ports++] = option;
        return;
    }
    if (!taken)
        s->port[s->n_ports++] = master_port;
    for (int i = 0; i < 4; i++)
        s->port[s->n_ports++] = 10000 + (int)(hash64(&s->job.job, sizeof s->job.job, (uint64_t)i) % 22000);
}

static int read_launch(struct start *s, const struct world_opts *o, struct err *e)
{
    const char *port = getenv("MASTER_PORT"), *run = getenv("TORCHELASTIC_RUN_ID");
    int64_t number;
    struct in6_addr any;
    s->host = getenv("MASTER_ADDR");
    bool no_host = s->host == NULL || s->host[0] == '\0';
    if (no_host || port == NULL || !parse_i64(port, &number) || number < 1 || number > 65535) {
        err_set(e, ST_USAGE, "RANK and WORLD_SIZE ask for %d ranks, but %s", s->l->size,
                no_host        ? "MASTER_ADDR is not set"
                : port == NULL ? "MASTER_PORT is not set"
                               : "MASTER_PORT is no port");
        return err_hint(e, "MASTER_ADDR is the host of rank 0, MASTER_PORT a port that is free "
                           "there; or start with mpirun");
    }
    s->named = inet_pton(AF_INET, s->host, &any) != 1 && inet_pton(AF_INET6, s->host, &any) != 1 &&
               strcmp(s->host, "localhost") != 0;
    s->job.job = hash64_str(run != NULL ? run : "", (uint64_t)number);
    list_ports(s, (int)number, o->port);
    TRY(read_secret(s, o->secret, e));
    return tcp_resolve(s->host, s->master, &s->n_master, e);
}

int tcp_connect_all(const struct launch *l, const struct world_opts *o, int *fd, struct err *e)
{
    struct start s = {.l = l, .begin = time_now(), .fd = fd};
    int st;
    s.end = s.begin + (o->timeout > 0 ? o->timeout : 600);
    s.links.listener = -1;
    for (int r = 0; r < l->size; r++)
        fd[r] = -1;
    s.me = (struct hand_hello){.rank = l->rank, .size = l->size, .pid = (int32_t)getpid()};
    if (gethostname(s.me.host, sizeof s.me.host - 1) != 0)
        s.me.host[0] = '\0';
    TRY_OUT(mem_array((void **)&s.came, (size_t)l->size, sizeof *s.came, e));
    TRY_OUT(mem_array((void **)&s.place, (size_t)l->size, sizeof *s.place, e));
    TRY_OUT(read_launch(&s, o, e));
    TRY_OUT(links_open(&s.links, &s.job, l->size + PENDING, e));
    st = l->rank == 0 ? start_first(&s, e) : start_other(&s, e);
out:
    links_close(&s.links);
    if (s.secret != NULL)
        explicit_bzero(s.secret, strlen(s.secret));
    free(s.secret);
    free(s.came);
    free(s.place);
    return st;
}
