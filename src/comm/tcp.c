/* Ranks as processes without MPI: a connection between every two (tcp_start.c), and messages with a small header on
 * them. What arrives is kept as messages until it is asked for; what is sent is written as far as the other side takes
 * it, the rest while waiting. */
#include "comm/tcp_int.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { KIND_EXCHANGE, KIND_MESSAGE };
struct head {
    int32_t comm, tag, kind, host; /* host: of a host call */
    int64_t bytes;
};
/* On its way out. Of an exchange the bytes stay the caller's, who waits until they are gone. */
struct outgoing {
    struct outgoing *next;
    struct head head;
    const char *data;
    struct message *kept; /* a copy, of a message */
    int64_t sent;         /* of head and data together */
};
struct peer {
    int fd;
    struct outgoing *first, **last;
    struct head head; /* of what is arriving */
    int64_t got;      /* of head and data together */
    int64_t queued;   /* bytes that have arrived, or begun to, and were not asked for yet */
    bool refused;     /* it sent more than fits, or something that is no message */
    struct message *arriving;
};
struct tcp {
    struct peer *peer;
    struct pollfd *poll;
    struct inbox in;
    int64_t queue_bytes; /* a peer's messages are read ahead up to here */
};

static int64_t head_size(void) { return (int64_t)sizeof(struct head); }

/* ---- progress -------------------------------------------------------------------------------- */

/* The message's address holds the kind beside the tag, so that exchanges and messages do not mix. */
static void address(struct message *l, int comm, int from, int to, int tag, int kind, bool host)
{
    l->comm = comm * 2 + kind;
    l->from = from;
    l->to = to;
    l->tag = tag;
    l->host = host;
}

static void hang_up(struct peer *p)
{
    if (p->fd >= 0)
        close(p->fd);
    p->fd = -1;
}

static void write_some(struct world *w, struct peer *p)
{
    while (p->first != NULL && p->fd >= 0) {
        struct outgoing *o = p->first;
        int64_t total = head_size() + o->head.bytes;
        bool in_head = o->sent < head_size();
        const char *at = in_head ? (const char *)&o->head + o->sent : o->data + (o->sent - head_size());
        ssize_t n = send(p->fd, at, (size_t)((in_head ? head_size() : total) - o->sent),
                         MSG_NOSIGNAL | (in_head && o->head.bytes > 0 ? MSG_MORE : 0));
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n < 0)
            hang_up(p);
        o->sent += n > 0 ? n : 0;
        if (o->sent < total)
            continue;
        p->first = o->next;
        if (p->first == NULL)
            p->last = &p->first;
        if (o->kept != NULL)
            inbox_spare(&w->inbox, o->kept);
        free(o);
    }
}

/* What no rank sends: numbers from a broken or hostile peer, before memory is taken for them. */
static bool is_message(const struct tcp *t, const struct head *h)
{
    return h->comm >= 0 && h->comm < 1 << 24 && (h->kind == KIND_EXCHANGE || h->kind == KIND_MESSAGE) &&
           (h->host == 0 || h->host == 1) && h->bytes >= 0 && h->bytes <= t->queue_bytes;
}

/* True: a header is complete and its message has room. */
static bool begin_message(struct world *w, int from)
{
    struct peer *p = &w->tcp->peer[from];
    bool fits = is_message(w->tcp, &p->head) && p->queued <= w->tcp->queue_bytes - p->head.bytes - head_size();
    if (!fits || inbox_blank(&w->tcp->in, false, p->head.bytes, &p->arriving, NULL) != ST_OK) {
        p->refused = true;
        hang_up(p);
        return false;
    }
    p->queued += p->head.bytes + head_size();
    address(p->arriving, p->head.comm, from, w->rank, p->head.tag, p->head.kind, p->head.host != 0);
    return true;
}

static void read_some(struct world *w, int from)
{
    struct peer *p = &w->tcp->peer[from];
    while (p->fd >= 0) {
        bool in_head = p->got < head_size();
        char *at = in_head ? (char *)&p->head + p->got : (char *)p->arriving->data + (p->got - head_size());
        int64_t want = (in_head ? head_size() : head_size() + p->head.bytes) - p->got;
        ssize_t n = want > 0 ? recv(p->fd, at, (size_t)want, 0) : 0;
        if (want > 0 && n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (want > 0 && n <= 0) {
            hang_up(p); /* closed, or broken: whoever waits for it is told */
            return;
        }
        p->got += n;
        if (in_head && (p->got < head_size() || !begin_message(w, from)))
            continue;
        if (p->got == head_size() + p->head.bytes) {
            inbox_post(&w->tcp->in, p->arriving);
            p->arriving = NULL;
            p->got = 0;
        }
    }
}

static void progress(struct world *w, int ms)
{
    struct tcp *t = w->tcp;
    int n = 0;
    for (int r = 0; r < w->size; r++)
        if (t->peer[r].fd >= 0)
            t->poll[n++] = (struct pollfd){.fd = t->peer[r].fd,
                                           .events = (short)(POLLIN | (t->peer[r].first != NULL ? POLLOUT : 0))};
    if (poll(t->poll, (nfds_t)n, ms) <= 0)
        return;
    for (int r = 0, i = 0; r < w->size && i < n; r++) {
        if (t->peer[r].fd != t->poll[i].fd)
            continue;
        short got = t->poll[i++].revents;
        if (got & POLLOUT)
            write_some(w, &t->peer[r]);
        if (got & (POLLIN | POLLHUP | POLLERR))
            read_some(w, r);
    }
}

static int post(struct world *w, int to, struct head head, const void *data, struct message *kept, struct err *e)
{
    struct peer *p = &w->tcp->peer[to];
    struct outgoing *o;
    TRY(mem_array((void **)&o, 1, sizeof *o, e));
    *o = (struct outgoing){.head = head, .data = data, .kept = kept};
    *p->last = o;
    p->last = &o->next;
    write_some(w, p);
    return ST_OK;
}

/* ---- waiting --------------------------------------------------------------------------------- */

static int too_much(struct comm *c, int from, struct err *e)
{
    struct world *w = c->world;
    char limit[32];
    err_set(e, ST_PEER,
            "rank %d at step %lld in '%s': rank %d sent something that is not a message, or more than %s ahead of what "
            "this rank has received",
            w->rank, (long long)w->board.mine.step, w->board.mine.what, from,
            human_bytes((double)w->tcp->queue_bytes, limit, sizeof limit));
    board_state(w, RANK_FAILED, e != NULL ? e->msg : "");
    return ST_PEER;
}

/* A closed connection says at once what a timeout would say later. The board may tell more: its rank failed, or gave
 * up. */
static int check_alive(struct comm *c, struct wait *t, const int *missing, int n, struct err *e)
{
    struct world *w = c->world;
    bool gone = false;
    for (int i = 0; i < n; i++)
        gone |= w->tcp->peer[missing[i]].fd < 0;
    if (!gone)
        return wait_due(t) ? wait_look(c, t, missing, n, e) : ST_OK;
    for (int i = 0; i < n; i++) {
        if (w->tcp->peer[missing[i]].fd >= 0)
            continue;
        if (w->tcp->peer[missing[i]].refused)
            return too_much(c, missing[i], e);
        usleep(50000); /* its last entry on the board may be on its way */
        TRY(wait_look(c, t, &missing[i], 1, e));
        err_set(e, ST_PEER,
                "rank %d at step %lld in '%s' of group %s: the connection to rank %d is closed: that process ended or "
                "was killed",
                w->rank, (long long)w->board.mine.step, w->board.mine.what, w->board.mine.group, missing[i]);
        board_state(w, RANK_GAVE_UP, e != NULL ? e->msg : "");
        return ST_PEER;
    }
    return ST_OK;
}

/* Waits for one message. The pieces of one exchange come one after the other, so waiting for them in turn loses
 * nothing. */
static int await(struct comm *c, const struct message *like, struct message **out, struct wait *t, struct err *e)
{
    struct world *w = c->world;
    while ((*out = inbox_take(&w->tcp->in, like)) == NULL) {
        progress(w, 50);
        if ((*out = inbox_take(&w->tcp->in, like)) != NULL)
            break;
        TRY(check_alive(c, t, &like->from, 1, e));
    }
    return ST_OK;
}

static int take_message(struct comm *c, struct lane *l, int from, int tag, int kind, void *data, int64_t bytes,
                        struct wait *t, struct err *e)
{
    struct world *w = c->world;
    struct message like, *message;
    address(&like, c->id, from, w->rank, tag, kind, l == NULL);
    TRY(await(c, &like, &message, t, e));
    w->tcp->peer[from].queued -= message->bytes + head_size();
    int st = ST_OK;
    if (message->bytes != bytes)
        st = err_set(e, ST_INTERNAL, "%lld bytes were to come from rank %d, and %lld came: the ranks' calls differ",
                     (long long)bytes, from, (long long)message->bytes);
    else
        st = move_bytes(l, data, message->data, bytes, e);
    inbox_spare(&w->tcp->in, message);
    return st;
}

/* Until nothing of an exchange is left to send; messages may stay. */
static bool still_sending(const struct peer *p)
{
    for (const struct outgoing *o = p->first; o != NULL; o = o->next)
        if (o->kept == NULL)
            return true;
    return false;
}

static int flush(struct comm *c, struct wait *t, struct err *e)
{
    struct world *w = c->world;
    for (int i = 0; i < c->size; i++) {
        int r = c->ranks[i];
        while (r != w->rank && still_sending(&w->tcp->peer[r])) {
            progress(w, 50);
            if (still_sending(&w->tcp->peer[r]))
                TRY(check_alive(c, t, &r, 1, e));
        }
    }
    return ST_OK;
}

static int tcp_exchange(struct comm *c, struct lane *l, const struct exchange *x, struct err *e)
{
    struct world *w = c->world;
    struct wait t = wait_begin();
    for (int i = 0; i < x->n; i++) {
        const struct part *p = &x->part[i];
        if (p->peer != c->rank && p->send != NULL)
            TRY(post(w, c->ranks[p->peer], (struct head){c->id, 0, KIND_EXCHANGE, l == NULL, p->send_bytes}, p->send,
                     NULL, e));
    }
    TRY(move_own_parts(c, l, x, e));
    for (int i = 0; i < x->n; i++) {
        const struct part *p = &x->part[i];
        if (p->peer != c->rank && p->recv != NULL)
            TRY(take_message(c, l, c->ranks[p->peer], 0, KIND_EXCHANGE, p->recv, p->recv_bytes, &t, e));
    }
    return flush(c, &t, e);
}

static int tcp_send(struct comm *c, struct lane *l, const void *data, const struct message_to *to, struct err *e)
{
    struct world *w = c->world;
    struct message *kept;
    TRY(inbox_blank(&w->inbox, false, to->bytes, &kept, e));
    TRY(move_bytes(l, kept->data, data, to->bytes, e));
    return post(w, c->ranks[to->peer], (struct head){c->id, to->tag, KIND_MESSAGE, l == NULL, to->bytes}, kept->data,
                kept, e);
}

static int tcp_recv(struct comm *c, struct lane *l, void *data, const struct message_to *from, struct err *e)
{
    struct wait t = wait_begin();
    return take_message(c, l, c->ranks[from->peer], from->tag, KIND_MESSAGE, data, from->bytes, &t, e);
}

/* Messages still on their way go out first, for a few seconds at most. */
static void tcp_close(struct world *w)
{
    struct tcp *t = w->tcp;
    double end = time_now() + 5;
    for (int r = 0; r < w->size; r++)
        while (t->peer[r].fd >= 0 && t->peer[r].first != NULL && !rank_stopped(w->board.mine.state) && time_now() < end)
            progress(w, 50);
    for (int r = 0; r < w->size; r++) {
        struct peer *p = &t->peer[r];
        hang_up(p);
        while (p->first != NULL) {
            struct outgoing *next = p->first->next;
            if (p->first->kept != NULL)
                inbox_spare(&w->inbox, p->first->kept);
            free(p->first);
            p->first = next;
        }
        if (p->arriving != NULL)
            inbox_spare(&t->in, p->arriving);
    }
    inbox_release(&t->in);
    free(t->peer);
    free(t->poll);
    free(t);
    w->tcp = NULL;
}

static const struct transport transport_tcp = {
    .name = "tcp", .exchange = tcp_exchange, .send = tcp_send, .recv = tcp_recv, .close = tcp_close};

/* ---- opening --------------------------------------------------------------------------------- */

/* Half of the memory: what a peer may be ahead with is bounded by a step, and far below it where a
 * model fits at all. */
static int64_t default_queue(void)
{
    int64_t pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? pages / 2 * page : (int64_t)1 << 32;
}

static int make(struct tcp **out, int size, int64_t queue_bytes, struct err *e)
{
    struct tcp *t;
    TRY(mem_array((void **)&t, 1, sizeof *t, e));
    t->queue_bytes = queue_bytes > 0 ? queue_bytes : default_queue();
    int st = mem_array((void **)&t->peer, (size_t)size, sizeof *t->peer, e);
    if (st == ST_OK)
        st = mem_array((void **)&t->poll, (size_t)size, sizeof *t->poll, e);
    for (int r = 0; st == ST_OK && r < size; r++) {
        t->peer[r].fd = -1;
        t->peer[r].last = &t->peer[r].first;
    }
    inbox_init(&t->in);
    *out = t;
    return st;
}

static int connect_world(struct world *w, const struct launch *l, const struct world_opts *o, struct err *e)
{
    int *fd;
    TRY(mem_array((void **)&fd, (size_t)l->size, sizeof *fd, e));
    int st = tcp_connect_all(l, o, fd, e);
    for (int r = 0; r < l->size; r++)
        w->tcp->peer[r].fd = fd[r];
    free(fd);
    return st;
}

static int tcp_world_open(struct world **out, const struct world_opts *o, struct err *e)
{
    struct launch l;
    struct tcp *t;
    int wrong = launch_read(&l, NULL); /* rank 0 is told, and says it */
    if (wrong != ST_OK && (l.kind != COMM_TCP || l.rank == 0))
        return launch_read(&l, e);
    TRY(world_new(out, o, l.rank, l.size, e));
    struct world *w = *out;
    int st = make(&t, l.size, o->queue_bytes, e);
    if (st != ST_OK) {
        world_close(w);
        return st;
    }
    w->tcp = t;
    w->local_rank = l.local_rank;
    w->on_lane = w->on_host = &transport_tcp;
    st = connect_world(w, &l, o, e);
    if (st == ST_OK) {
        st = world_board(w, o, e);
        st = world_start(w, o, st, e);
        if (st != ST_OK)
            world_finish(w, st, e);
    }
    if (st != ST_OK) {
        world_close(w);
        *out = NULL;
    }
    return st;
}

const struct transport_kind transport_kind_tcp = {.ranks = RANKS_PROCESSES, .host_only = true, .open = tcp_world_open};
