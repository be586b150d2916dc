/* Ranks of one process, one thread each. An exchange is a meeting: each rank publishes what it sends, waits until all
 * have, takes what is for it, and waits until all have taken. On a GPU the ranks share the device: lanes are drained
 * before the meeting, and the bytes are copied on the device. No thread spins: there may be fewer cores than ranks. */
#include "comm/comm_int.h"
#include "comm/gpu_int.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct rank_slot {
    int64_t came, left; /* exchanges begun, finished */
    const struct exchange *x;
};
/* Where the members of one group meet. */
struct meeting {
    struct meeting *next;
    int id, first;
    struct rank_slot *slot;
};
struct rendezvous {
    pthread_mutex_t lock, board_lock;
    pthread_cond_t changed;
    int size;
    struct meeting *meetings;
    struct inbox inbox;
    struct board_entry *entries;
    bool failed; /* some rank: everybody looks at once */
    int first_failed;
};

static struct rendezvous *rendezvous_of(const struct comm *c) { return c->world->rendezvous; }

static int missing_ranks(const struct comm *c, const struct meeting *meeting, int64_t number, int *missing)
{
    int n = 0;
    for (int r = 0; r < c->size; r++)
        if (meeting->slot[r].came < number)
            missing[n++] = c->ranks[r];
    return n;
}

static int count_not_left(const struct comm *c, const struct meeting *meeting, int64_t number)
{
    int n = 0;
    for (int r = 0; r < c->size; r++)
        n += meeting->slot[r].left < number;
    return n;
}

/* Until something changes, or it is time to look again. The lock is held. */
static void nap(struct rendezvous *h)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 100 * 1000 * 1000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_cond_timedwait(&h->changed, &h->lock, &until);
}

/* With the lock held, which is let go for looks at the board. */
static int look(struct comm *c, struct wait *t, const int *missing, int n, struct err *e)
{
    struct rendezvous *h = rendezvous_of(c);
    if (!h->failed && !wait_due(t))
        return ST_OK;
    pthread_mutex_unlock(&h->lock);
    int st = wait_look(c, t, missing, n, e);
    pthread_mutex_lock(&h->lock);
    return st;
}

/* A rank that gives up before all have arrived withdraws its arrival, so that no other goes on to read what it
 * published. After that it may not fail: another may be reading already, and waits until this one has left. So room for
 * the missing ranks is made before. */
static int wait_until_all_came(struct comm *c, struct meeting *meeting, int64_t number, int *missing, struct err *e)
{
    struct rendezvous *h = rendezvous_of(c);
    struct wait t = wait_begin();
    int n, st = ST_OK;
    pthread_mutex_lock(&h->lock);
    while (st == ST_OK && (n = missing_ranks(c, meeting, number, missing)) > 0) {
        st = look(c, &t, missing, n, e);
        n = missing_ranks(c, meeting, number, missing);
        if (n == 0)
            st = ST_OK; /* the last one came while the board was read */
        else if (st == ST_OK)
            nap(h);
    }
    if (st != ST_OK)
        meeting->slot[c->rank].came--;
    pthread_mutex_unlock(&h->lock);
    return st;
}

/* Everybody who came leaves, whatever it found, so this needs no limit. */
static void wait_until_all_left(struct comm *c, struct meeting *meeting, int64_t number)
{
    struct rendezvous *h = rendezvous_of(c);
    pthread_mutex_lock(&h->lock);
    while (count_not_left(c, meeting, number) > 0)
        nap(h);
    pthread_mutex_unlock(&h->lock);
}

static int64_t arrive(struct rendezvous *h, struct rank_slot *s, const struct exchange *x)
{
    pthread_mutex_lock(&h->lock);
    s->x = x;
    int64_t number = ++s->came;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    return number;
}

static void leave(struct rendezvous *h, struct rank_slot *s)
{
    pthread_mutex_lock(&h->lock);
    s->left++;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
}

/* What a peer has for this rank, in order, against what this rank takes from it. */
static int take_from(struct comm *c, struct lane *l, const struct exchange *mine, int peer,
                     const struct exchange *theirs, struct err *e)
{
    int at = 0, world_peer = c->ranks[peer];
    if (mine->op != theirs->op)
        return err_set(e, ST_INTERNAL, "ranks %d and %d met in group %s for different things: '%s' and '%s'",
                       c->world->rank, world_peer, c->name, mine->what, theirs->what);
    for (int i = 0; i < mine->n; i++) {
        const struct part *p = &mine->part[i];
        if (p->peer != peer || p->recv == NULL)
            continue;
        while (at < theirs->n && (theirs->part[at].peer != c->rank || theirs->part[at].send == NULL))
            at++;
        if (at == theirs->n || theirs->part[at].send_bytes != p->recv_bytes)
            return err_set(e, ST_INTERNAL,
                           "'%s' in group %s: rank %d takes %lld bytes from rank %d, which sends %lld in '%s'",
                           mine->what, c->name, c->world->rank, (long long)p->recv_bytes, world_peer,
                           at == theirs->n ? 0LL : (long long)theirs->part[at].send_bytes, theirs->what);
        TRY(move_bytes(l, p->recv, theirs->part[at].send, p->recv_bytes, e));
        at++;
    }
    while (at < theirs->n && (theirs->part[at].peer != c->rank || theirs->part[at].send == NULL))
        at++;
    if (at < theirs->n)
        return err_set(e, ST_INTERNAL, "'%s' in group %s: rank %d sends rank %d %lld bytes that are not taken",
                       theirs->what, c->name, world_peer, c->world->rank, (long long)theirs->part[at].send_bytes);
    return ST_OK;
}

static int threads_exchange(struct comm *c, struct lane *l, const struct exchange *x, struct err *e)
{
    struct rendezvous *h = rendezvous_of(c);
    struct meeting *meeting = c->native;
    struct rank_slot *slot = &meeting->slot[c->rank];
    if (on_gpu(l))
        TRY(gpu_comm_sync(l));
    int *missing;
    TRY(mem_array((void **)&missing, (size_t)c->size, sizeof *missing, e));
    int64_t number = arrive(h, slot, x);
    int st = wait_until_all_came(c, meeting, number, missing, e);
    free(missing);
    TRY(st);
    for (int r = 0; r < c->size && st == ST_OK; r++)
        st = take_from(c, l, x, r, meeting->slot[r].x, e);
    if (on_gpu(l) && st == ST_OK)
        st = gpu_comm_sync(l);
    leave(h, slot);
    wait_until_all_left(c, meeting, number);
    return st;
}

static struct message addressed(const struct comm *c, const struct lane *l, int from, int to, int tag)
{
    return (struct message){.comm = c->id, .from = from, .to = to, .tag = tag, .host = l == NULL};
}

static int threads_send(struct comm *c, struct lane *l, const void *data, const struct message_to *to, struct err *e)
{
    struct rendezvous *h = rendezvous_of(c);
    struct message *message, a = addressed(c, l, c->world->rank, c->ranks[to->peer], to->tag);
    pthread_mutex_lock(&h->lock);
    int st = inbox_blank(&h->inbox, on_gpu(l), to->bytes, &message, e);
    pthread_mutex_unlock(&h->lock);
    TRY(st);
    message->comm = a.comm;
    message->from = a.from;
    message->to = a.to;
    message->tag = a.tag;
    message->host = a.host;
    st = move_bytes(l, message->data, data, to->bytes, e);
    if (st == ST_OK && on_gpu(l))
        st = gpu_comm_sync(l);
    pthread_mutex_lock(&h->lock);
    inbox_post(&h->inbox, message);
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
    return st;
}

static int threads_recv(struct comm *c, struct lane *l, void *data, const struct message_to *from, struct err *e)
{
    struct rendezvous *h = rendezvous_of(c);
    int peer = c->ranks[from->peer], st = ST_OK;
    struct message *message = NULL, like = addressed(c, l, peer, c->world->rank, from->tag);
    struct wait t = wait_begin();
    pthread_mutex_lock(&h->lock);
    /* Once more after a look that found the peer ended: what it sent before may have come while the board was read. */
    while ((message = inbox_take(&h->inbox, &like)) == NULL && st == ST_OK) {
        nap(h);
        st = look(c, &t, &peer, 1, e);
    }
    pthread_mutex_unlock(&h->lock);
    if (message == NULL)
        return st;
    st = ST_OK;
    if (message->bytes != from->bytes)
        st = err_set(e, ST_INTERNAL, "rank %d receives %lld bytes from rank %d (tag %d), which sent %lld",
                     c->world->rank, (long long)from->bytes, peer, from->tag, (long long)message->bytes);
    else
        st = move_bytes(l, data, message->data, from->bytes, e);
    if (st == ST_OK && on_gpu(l))
        st = gpu_comm_sync(l);
    pthread_mutex_lock(&h->lock);
    inbox_spare(&h->inbox, message);
    pthread_mutex_unlock(&h->lock);
    return st;
}

/* ---- meetings: the first member to come makes one, the rendezvous removes it ----------------- */

static int meeting_new(const struct comm *c, struct meeting **out, struct err *e)
{
    struct meeting *meeting;
    TRY(mem_array((void **)&meeting, 1, sizeof *meeting, e));
    int st = mem_array((void **)&meeting->slot, (size_t)c->size, sizeof *meeting->slot, e);
    if (st != ST_OK) {
        free(meeting);
        return st;
    }
    meeting->id = c->id;
    meeting->first = c->ranks[0];
    *out = meeting;
    return ST_OK;
}

static int threads_comm_open(struct comm *c, struct err *e)
{
    struct rendezvous *h = rendezvous_of(c);
    int st = ST_OK;
    pthread_mutex_lock(&h->lock);
    struct meeting *meeting = h->meetings;
    while (meeting != NULL && (meeting->id != c->id || meeting->first != c->ranks[0]))
        meeting = meeting->next;
    if (meeting == NULL) {
        st = meeting_new(c, &meeting, e);
        if (st == ST_OK) {
            meeting->next = h->meetings;
            h->meetings = meeting;
        }
    }
    if (st == ST_OK)
        c->native = meeting;
    pthread_mutex_unlock(&h->lock);
    return st;
}

/* A meeting stays until the rendezvous goes: a slower member may not have come yet. */
static void threads_comm_close(struct comm *c) { c->native = NULL; }

const struct transport transport_threads = {.name = "threads",
                                            .exchange = threads_exchange,
                                            .send = threads_send,
                                            .recv = threads_recv,
                                            .comm_open = threads_comm_open,
                                            .comm_close = threads_comm_close};

/* ---- the ranks ------------------------------------------------------------------------------- */

struct rank_thread {
    pthread_t thread;
    const struct world_opts *opts;
    struct rendezvous *rendezvous;
    int rank, status;
    struct err err;
    int (*fn)(struct world *w, void *ctx, struct err *e);
    void *ctx;
};

/* A rank that failed before it had a world, or whose thread could not be started: others look for it on the board. */
static void note_absence(struct rendezvous *h, const struct rank_thread *t)
{
    struct board_entry x = {.state = RANK_FAILED, .pid = (int32_t)getpid(), .host = "this host"};
    x.since = x.beat = time_wall();
    snprintf(x.why, sizeof x.why, "%.150s", t->err.msg);
    pthread_mutex_lock(&h->board_lock);
    h->entries[t->rank] = x;
    pthread_mutex_unlock(&h->board_lock);
}

static void note_end(struct rendezvous *h, struct world *w, const struct rank_thread *t)
{
    if (w == NULL)
        note_absence(h, t);
    else if (!rank_stopped(w->board.mine.state))
        board_state(w, t->status == ST_OK ? RANK_ENDED : RANK_FAILED, t->status == ST_OK ? "" : t->err.msg);
    pthread_mutex_lock(&h->lock);
    if (t->status != ST_OK && !h->failed)
        h->first_failed = t->rank;
    h->failed |= t->status != ST_OK;
    pthread_cond_broadcast(&h->changed);
    pthread_mutex_unlock(&h->lock);
}

static int open_rank(struct rank_thread *t, struct world **out, struct err *e)
{
    TRY(world_new(out, t->opts, t->rank, t->rendezvous->size, e));
    struct world *w = *out;
    w->kind = COMM_THREADS;
    w->rendezvous = t->rendezvous;
    w->on_lane = w->on_host = &transport_threads;
    w->board.entries = t->rendezvous->entries;
    w->board.lock = &t->rendezvous->board_lock;
    w->local_rank = t->rank;
    board_state(w, RANK_AT_WORK, "");
    return threads_comm_open(w->all, e);
}

static void *rank_main(void *arg)
{
    struct rank_thread *t = arg;
    struct world *w = NULL;
    t->status = open_rank(t, &w, &t->err);
    if (t->status == ST_OK)
        t->status = t->fn(w, t->ctx, &t->err);
    note_end(t->rendezvous, w, t);
    world_close(w);
    return NULL;
}

static int rendezvous_open(struct rendezvous *h, int size, struct err *e)
{
    pthread_condattr_t attr;
    *h = (struct rendezvous){.size = size};
    TRY(mem_array((void **)&h->entries, (size_t)size, sizeof *h->entries, e));
    inbox_init(&h->inbox);
    pthread_mutex_init(&h->lock, NULL);
    pthread_mutex_init(&h->board_lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&h->changed, &attr);
    pthread_condattr_destroy(&attr);
    return ST_OK;
}

static void rendezvous_close(struct rendezvous *h)
{
    while (h->meetings != NULL) {
        struct meeting *next = h->meetings->next;
        free(h->meetings->slot);
        free(h->meetings);
        h->meetings = next;
    }
    inbox_release(&h->inbox);
    free(h->entries);
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->lock);
    pthread_mutex_destroy(&h->board_lock);
}

/* A rank whose thread cannot be started counts as failed, so that the others end. */
static int start_rank(struct rank_thread *t, struct err *e)
{
    int code = pthread_create(&t->thread, NULL, rank_main, t);
    if (code == 0)
        return ST_OK;
    t->status = err_set(&t->err, ST_NOMEM, "cannot start a thread for rank %d: %s", t->rank, strerror(code));
    *e = t->err;
    note_end(t->rendezvous, NULL, t);
    return t->status;
}

int world_threads(const struct world_opts *o, int (*fn)(struct world *w, void *ctx, struct err *e), void *ctx,
                  struct err *e)
{
    struct rendezvous h;
    struct rank_thread *t = NULL;
    int started = 0;
    if (o->ranks < 1)
        return err_set(e, ST_USAGE, "%d thread ranks", o->ranks);
    TRY(rendezvous_open(&h, o->ranks, e));
    int st = mem_array((void **)&t, (size_t)o->ranks, sizeof *t, e);
    for (; st == ST_OK && started < o->ranks; started += st == ST_OK) {
        t[started] = (struct rank_thread){.opts = o, .rendezvous = &h, .rank = started, .fn = fn, .ctx = ctx};
        st = start_rank(&t[started], e);
    }
    for (int i = 0; i < started; i++)
        pthread_join(t[i].thread, NULL);
    if (st == ST_OK && h.failed) {
        *e = t[h.first_failed].err;
        st = t[h.first_failed].status;
    }
    free(t);
    rendezvous_close(&h);
    return st;
}

const struct transport_kind transport_kind_threads = {.ranks = RANKS_THREADS};
