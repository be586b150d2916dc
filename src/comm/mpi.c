/* Ranks as processes under an MPI launcher. Only messages are used, none of the library's reductions: sums are ours.
 * Every wait is a loop of tests with naps, so that it can end with a blame; MPI's own waits could not. */
#include "comm/comm_int.h"

#include <mpi.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

/* Counts are ints: longer messages travel in pieces. */
static const int64_t most_bytes = 1 << 30;

struct sending {
    struct message *message;
    int open; /* pieces not yet taken */
};
struct mpi {
    MPI_Comm exchange, host, inbox;
    MPI_Request *request; /* of the call that runs */
    int *peer, *index;    /* rank of the world of each; which are done */
    int64_t *expect;      /* bytes; -1: a send */
    MPI_Status *status;
    size_t n, cap, cap_peer, cap_index, cap_expect, cap_status;
    MPI_Request *out; /* messages on their way */
    struct sending **out_of;
    size_t n_out, cap_out, cap_out_of;
    int most_tag;
    bool stuck; /* a wait failed: the library cannot be closed in order */
};

static int mpi_status(struct err *e, int code, const char *what)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    if (code == MPI_SUCCESS)
        return ST_OK;
    MPI_Error_string(code, text, &n);
    return err_set(e, ST_PEER, "%s: %s", what, text);
}
#define MPI(e, call) TRY(mpi_status(e, call, #call))

/* ---- the requests of one call ---------------------------------------------------------------- */

static int grow(struct mpi *m, struct err *e)
{
    size_t need = m->n + 1;
    TRY(mem_grow((void **)&m->request, &m->cap, need, sizeof *m->request, e));
    TRY(mem_grow((void **)&m->peer, &m->cap_peer, need, sizeof *m->peer, e));
    TRY(mem_grow((void **)&m->index, &m->cap_index, need, sizeof *m->index, e));
    TRY(mem_grow((void **)&m->expect, &m->cap_expect, need, sizeof *m->expect, e));
    return mem_grow((void **)&m->status, &m->cap_status, need, sizeof *m->status, e);
}

/* A message in pieces; one of no bytes is one piece. */
static int start(struct mpi *m, MPI_Comm on, int peer, int tag, const void *send, void *recv, int64_t bytes,
                 struct err *e)
{
    int64_t at = 0;
    do {
        int64_t n = min_i64(bytes - at, most_bytes);
        TRY(grow(m, e));
        if (recv != NULL)
            MPI(e, MPI_Irecv((char *)recv + at, (int)n, MPI_BYTE, peer, tag, on, &m->request[m->n]));
        else
            MPI(e, MPI_Isend((const char *)send + at, (int)n, MPI_BYTE, peer, tag, on, &m->request[m->n]));
        m->peer[m->n] = peer;
        m->expect[m->n++] = recv != NULL ? n : -1;
        at += n;
    } while (at < bytes);
    return ST_OK;
}

/* Messages that arrived give their buffers back. */
static void take_back(struct world *w)
{
    struct mpi *m = w->mpi;
    for (size_t i = 0; i < m->n_out;) {
        int done = 0;
        if (MPI_Test(&m->out[i], &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || !done) {
            i++;
            continue;
        }
        struct sending *s = m->out_of[i];
        if (--s->open == 0) {
            inbox_spare(&w->inbox, s->message);
            free(s);
        }
        m->n_out--;
        m->out[i] = m->out[m->n_out];
        m->out_of[i] = m->out_of[m->n_out];
    }
}

static int check_done(struct mpi *m, int n_done, int code, struct err *e)
{
    for (int k = 0; k < n_done; k++) {
        int i = m->index[k], bytes = 0;
        if (code != MPI_SUCCESS && m->status[k].MPI_ERROR != MPI_SUCCESS) {
            TRY(mpi_status(e, m->status[k].MPI_ERROR, "a message"));
        } else if (m->expect[i] >= 0) {
            MPI_Get_count(&m->status[k], MPI_BYTE, &bytes);
            if (bytes != m->expect[i])
                return err_set(e, ST_INTERNAL,
                               "%lld bytes were to come from rank %d, and %d came: the ranks' calls differ",
                               (long long)m->expect[i], m->peer[i], bytes);
        }
        m->peer[i] = -1;
    }
    return ST_OK;
}

static int missing_peers(const struct mpi *m, int *missing)
{
    int n = 0;
    for (int turn = 0; turn < 2; turn++) /* those whose bytes have not come, before those that have not taken ours */
        for (size_t i = 0; i < m->n; i++) {
            bool wanted = m->peer[i] >= 0 && (m->expect[i] >= 0) == (turn == 0), seen = false;
            for (int k = 0; k < n; k++)
                seen |= missing[k] == m->peer[i];
            if (wanted && !seen)
                missing[n++] = m->peer[i];
        }
    return n;
}

static void nap(int turn)
{
    if (turn < 200)
        sched_yield();
    else
        usleep(turn < 2000 ? 20 : 200);
}

static int look(struct comm *c, struct wait *t, struct err *e)
{
    struct mpi *m = c->world->mpi;
    int *missing;
    TRY(mem_array((void **)&missing, (size_t)c->world->size, sizeof *missing, e));
    int n = missing_peers(m, missing), st = wait_look(c, t, missing, n, e);
    free(missing);
    return st;
}

static int wait_all(struct comm *c, struct err *e)
{
    struct world *w = c->world;
    struct mpi *m = w->mpi;
    struct wait t = wait_begin();
    int st = ST_OK;
    for (int left = (int)m->n, turn = 0; st == ST_OK && left > 0; turn++) {
        int n_done = 0, code = MPI_Testsome((int)m->n, m->request, &n_done, m->index, m->status);
        if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
            st = mpi_status(e, code, "MPI_Testsome");
            break;
        }
        if (n_done == MPI_UNDEFINED)
            break;
        st = check_done(m, n_done, code, e);
        left -= n_done;
        turn = n_done > 0 ? 0 : turn;
        if (st == ST_OK && left > 0) {
            take_back(w);
            nap(turn);
            if (wait_due(&t))
                st = look(c, &t, e);
        }
    }
    m->n = 0;
    m->stuck |= st != ST_OK;
    return st;
}

/* ---- the transport --------------------------------------------------------------------------- */

static int mpi_exchange(struct comm *c, struct lane *l, const struct exchange *x, struct err *e)
{
    struct mpi *m = c->world->mpi;
    MPI_Comm on = l != NULL ? m->exchange : m->host;
    m->n = 0;
    for (int turn = 0; turn < 2; turn++) /* receives first: what comes finds its place */
        for (int i = 0; i < x->n; i++) {
            const struct part *p = &x->part[i];
            if (p->peer == c->rank)
                continue;
            if (turn == 0 && p->recv != NULL)
                TRY(start(m, on, c->ranks[p->peer], c->id, NULL, p->recv, p->recv_bytes, e));
            if (turn == 1 && p->send != NULL)
                TRY(start(m, on, c->ranks[p->peer], c->id, p->send, NULL, p->send_bytes, e));
        }
    TRY(move_own_parts(c, l, x, e));
    return wait_all(c, e);
}

static int tag_of(const struct comm *c, const struct lane *l, int tag, int *out, struct err *e)
{
    enum { GROUPS = 128 };
    int64_t t = ((int64_t)tag * 2 + (l == NULL)) * GROUPS + c->id;
    if (tag < 0 || c->id >= GROUPS || t > c->world->mpi->most_tag)
        return err_set(e, ST_INTERNAL, "tag %d of group %s (number %d) is more than this MPI allows (%d)", tag, c->name,
                       c->id, c->world->mpi->most_tag);
    *out = (int)t;
    return ST_OK;
}

static int post_pieces(struct world *w, struct sending *s, int to, int tag, struct err *e)
{
    struct mpi *m = w->mpi;
    int64_t at = 0, bytes = s->message->bytes;
    do {
        int64_t n = min_i64(bytes - at, most_bytes);
        TRY(mem_grow((void **)&m->out, &m->cap_out, m->n_out + 1, sizeof *m->out, e));
        TRY(mem_grow((void **)&m->out_of, &m->cap_out_of, m->n_out + 1, sizeof(struct sending *), e));
        MPI(e, MPI_Isend((const char *)s->message->data + at, (int)n, MPI_BYTE, to, tag, m->inbox, &m->out[m->n_out]));
        m->out_of[m->n_out++] = s;
        s->open++;
        at += n;
    } while (at < bytes);
    return ST_OK;
}

/* The message stays ours until it has arrived, so the caller may go on at once. */
static int mpi_send(struct comm *c, struct lane *l, const void *data, const struct message_to *to, struct err *e)
{
    struct world *w = c->world;
    struct sending *s;
    int tag;
    TRY(tag_of(c, l, to->tag, &tag, e));
    take_back(w);
    TRY(mem_array((void **)&s, 1, sizeof *s, e));
    int st = inbox_blank(&w->inbox, false, to->bytes, &s->message, e);
    if (st != ST_OK) {
        free(s);
        return st;
    }
    TRY(move_bytes(l, s->message->data, data, to->bytes, e));
    return post_pieces(w, s, c->ranks[to->peer], tag, e);
}

static int mpi_recv(struct comm *c, struct lane *l, void *data, const struct message_to *from, struct err *e)
{
    struct mpi *m = c->world->mpi;
    int tag;
    TRY(tag_of(c, l, from->tag, &tag, e));
    m->n = 0;
    TRY(start(m, m->inbox, c->ranks[from->peer], tag, NULL, data != NULL ? data : m, from->bytes, e));
    return wait_all(c, e);
}

/* In order only if every rank gets there: one that failed just ends, and the launcher sees to the rest. */
static void mpi_close(struct world *w)
{
    struct mpi *m = w->mpi;
    double end = time_now() + 5;
    bool failed = m->stuck || rank_stopped(w->board.mine.state);
    while (!failed && m->n_out > 0 && time_now() < end) {
        take_back(w);
        usleep(100);
    }
    if (!failed && m->n_out == 0 && comm_barrier(w->all, "the end", NULL) == ST_OK)
        MPI_Finalize();
    free(m->request);
    free(m->peer);
    free(m->index);
    free(m->expect);
    free(m->status);
    free(m->out);
    free(m->out_of);
    free(m);
    w->mpi = NULL;
}

static const struct transport transport_mpi = {
    .name = "mpi", .exchange = mpi_exchange, .send = mpi_send, .recv = mpi_recv, .close = mpi_close};

/* ---- opening --------------------------------------------------------------------------------- */

static int start_library(struct mpi *m, int *rank, int *size, struct err *e)
{
    int level, flag = 0, *bound = NULL;
    MPI(e, MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level));
    MPI(e, MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    MPI(e, MPI_Comm_rank(MPI_COMM_WORLD, rank));
    MPI(e, MPI_Comm_size(MPI_COMM_WORLD, size));
    MPI(e, MPI_Comm_dup(MPI_COMM_WORLD, &m->exchange)); /* inherits the error handler */
    MPI(e, MPI_Comm_dup(MPI_COMM_WORLD, &m->host));
    MPI(e, MPI_Comm_dup(MPI_COMM_WORLD, &m->inbox));
    MPI(e, MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, (void *)&bound, &flag));
    m->most_tag = flag ? *bound : 32767;
    return ST_OK;
}

/* The launcher's variables against the library's view. */
static int check_launch(struct world *w, struct err *e)
{
    struct launch l;
    TRY(launch_read(&l, e));
    w->local_rank = l.local_rank;
    if (l.size != w->size || l.rank != w->rank) {
        err_set(e, ST_USAGE, "%s says rank %d of %d, but MPI says rank %d of %d", l.by, l.rank, l.size, w->rank,
                w->size);
        return err_hint(e, "use the launcher that belongs to this MPI; under Slurm: srun --mpi=pmix");
    }
    return ST_OK;
}

static int mpi_world_open(struct world **out, const struct world_opts *o, struct err *e)
{
    struct mpi *m;
    int rank, size;
    TRY(mem_array((void **)&m, 1, sizeof *m, e));
    int st = start_library(m, &rank, &size, e);
    if (st == ST_OK)
        st = world_new(out, o, rank, size, e);
    if (st != ST_OK) {
        free(m);
        return st;
    }
    struct world *w = *out;
    w->mpi = m;
    w->on_lane = w->on_host = &transport_mpi;
    st = world_board(w, o, e);
    if (st == ST_OK)
        st = check_launch(w, e);
    st = world_start(w, o, st, e);
    if (st == ST_OK)
        return ST_OK;
    world_finish(w, st, e);
    world_close(w);
    *out = NULL;
    return st;
}

const struct transport_kind transport_kind_mpi = {.ranks = RANKS_PROCESSES, .host_only = true, .open = mpi_world_open};
