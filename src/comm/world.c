/* Worlds and groups: opening, closing, agreement. */
#include "comm/comm_int.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int comm_new(struct world *w, const char *name, const int *ranks, int n, int id, struct comm **out, struct err *e)
{
    struct comm_own *o;
    TRY(mem_array((void **)&o, 1, sizeof *o, e));
    int st = mem_array((void **)&o->ranks, (size_t)n, sizeof *o->ranks, e);
    if (st != ST_OK) {
        free(o);
        return st;
    }
    snprintf(o->name, sizeof o->name, "%s", name);
    o->pub = (struct comm){.world = w, .name = o->name, .rank = -1, .size = n, .ranks = o->ranks, .id = id};
    for (int i = 0; i < n; i++) {
        o->ranks[i] = ranks[i];
        if (ranks[i] == w->rank)
            o->pub.rank = i;
    }
    *out = &o->pub;
    return ST_OK;
}

static void comm_free(struct comm *c)
{
    struct comm_own *o = own(c);
    free(o->part);
    free(o->pending);
    free(o->ranks);
    free(o);
}

void comm_close(struct comm *c)
{
    if (c == NULL)
        return;
    const struct transport *t = c->world->on_lane;
    if (t->comm_close != NULL)
        t->comm_close(c);
    comm_free(c);
}

void world_loop(struct world *w, double rate, double latency)
{
    w->loop_rate = rate;
    w->loop_latency = latency;
}

int world_new(struct world **out, const struct world_opts *o, int rank, int size, struct err *e)
{
    struct world *w;
    TRY(mem_array((void **)&w, 1, sizeof *w, e));
    w->kind = o->kind;
    w->rank = rank;
    w->size = size;
    w->timeout = o->timeout;
    w->dev = o->dev;
    w->loop_rate = o->loop_rate > 0 ? o->loop_rate : 1e18;
    w->loop_latency = o->loop_latency;
    w->loop_ranks = o->loop_ranks;
    w->choose_gpus = o->choose_gpus;
    w->on_lane = w->on_host = &transport_self;
    w->board.fd = -1;
    w->board.mine.pid = (int32_t)getpid();
    w->board.mine.waits_for = -1;
    w->board.mine.step = -1; /* before the first */
    if (gethostname(w->board.mine.host, sizeof w->board.mine.host - 1) != 0)
        snprintf(w->board.mine.host, sizeof w->board.mine.host, "?");
    inbox_init(&w->inbox);
    int *ranks = NULL, st = mem_array((void **)&ranks, (size_t)size, sizeof *ranks, e);
    for (int i = 0; st == ST_OK && i < size; i++)
        ranks[i] = i;
    if (st == ST_OK)
        st = comm_new(w, "all", ranks, size, w->n_opened++, &w->all, e);
    free(ranks);
    if (st != ST_OK)
        free(w);
    else
        *out = w;
    return st;
}

/* The folder is rank 0's to make; the others come after it. */
static int board_folder(const char *path, struct err *e)
{
    const char *slash = path != NULL ? strrchr(path, '/') : NULL;
    if (slash == NULL || slash == path)
        return ST_OK;
    char *dir = strndup(path, (size_t)(slash - path));
    int st = dir != NULL ? file_make_dirs(dir, e) : err_set(e, ST_NOMEM, "no memory for a path");
    free(dir);
    return st;
}

int world_board(struct world *w, const struct world_opts *o, struct err *e)
{
    uint64_t run = hash64(&(double){time_wall()}, sizeof(double), (uint64_t)getpid());
    int st = w->rank == 0 ? board_folder(o->board, e) : ST_OK;
    TRY(comm_agree(w->all, "run folder", st, e));
    TRY(comm_host_broadcast(w->all, "start", &run, sizeof run, 0, e));
    return board_open_file(w, o->board, run, e);
}

int world_start(struct world *w, const struct world_opts *o, int status, struct err *e)
{
    if (status == ST_OK && o->status != ST_OK) {
        status = o->status;
        *e = *o->why;
    }
    return comm_agree(w->all, "start", status, e);
}

#ifndef BRAID_MPI
static int no_mpi(struct world **out, const struct world_opts *o, struct err *e)
{
    (void)out;
    (void)o;
    err_set(e, ST_UNSUPPORTED, "this braid was built without MPI");
    return err_hint(
        e, "install libopenmpi-dev and build again, or use thread ranks: parallel.comm=threads --parallel.ranks=N");
}
const struct transport_kind transport_kind_mpi = {.ranks = RANKS_PROCESSES, .host_only = true, .open = no_mpi};
#endif

static const struct transport_kind *kind_of(enum comm_kind k)
{
#define TRANSPORT_ROW(X, id, name) [COMM_##id] = &transport_kind_##name,
    static const struct transport_kind *const kinds[COMM_KINDS] = {TRANSPORTS(TRANSPORT_ROW, )};
    return k >= 0 && k < COMM_KINDS ? kinds[k] : NULL;
}

const char *comm_kind_name(enum comm_kind k)
{
#define TRANSPORT_NAME(X, id, name) [COMM_##id] = #name,
    static const char *const names[COMM_KINDS] = {TRANSPORTS(TRANSPORT_NAME, )};
    return k >= 0 && k < COMM_KINDS ? names[k] : "?";
}

enum comm_ranks comm_kind_ranks(enum comm_kind k) { return kind_of(k) != NULL ? kind_of(k)->ranks : RANKS_ONE; }

int world_open(struct world **out, const struct world_opts *o, struct err *e)
{
    *out = NULL;
    const struct transport_kind *kind = kind_of(o->kind);
    if (kind == NULL || kind->open == NULL)
        return err_set(e, ST_INTERNAL, "a world of kind %s is not opened like this", comm_kind_name(o->kind));
    return kind->open(out, o, e);
}

int world_open_host(struct world **out, const struct world_opts *o, struct err *e)
{
    struct launch l;
    struct world_opts host = *o;
    TRY(launch_detect(&l, e));
    host.kind = l.kind;
    return world_open(out, &host, e);
}

int world_abandon(struct world **w, int status, struct err *e)
{
    world_finish(*w, status, e);
    world_close(*w);
    *w = NULL;
    return status;
}

int world_device(struct world *w, struct dev *dev, struct err *e)
{
    w->dev = dev;
    if (kind_of(w->kind)->host_only && dev->kind == DEV_CUDA) {
        err_set(e, ST_UNSUPPORTED, "parallel.comm=%s moves host memory, but the device is %s", comm_kind_name(w->kind),
                dev->name);
        return err_hint(e, "leave parallel.comm at auto, or use run.device=cpu");
    }
    return w->on_lane->device != NULL ? w->on_lane->device(w, e) : ST_OK;
}

int comm_ring(struct comm *c, struct err *e)
{
    const struct transport *t = c->world->on_lane;
    return t->ring != NULL ? t->ring(c, e) : ST_OK;
}

int world_sync(struct world *w, const char *what, struct err *e)
{
    if (w->on_lane->sync != NULL)
        return w->on_lane->sync(w, what, e);
    return w->dev != NULL ? w->dev->vt->sync(w->dev, e) : ST_OK;
}

int world_forget(struct world *w, struct err *e)
{
    return w->on_lane->forget != NULL ? w->on_lane->forget(w, e) : ST_OK;
}

const char *world_note(const struct world *w) { return w->note; }

bool world_captures(const struct world *w, bool sends)
{
    return w->on_lane->captures && !(sends && w->on_lane->sends_apart);
}
int world_rank(const struct world *w) { return w->rank; }
int world_size(const struct world *w) { return w->size; }
enum comm_kind world_kind(const struct world *w) { return w->kind; }

void world_close(struct world *w)
{
    if (w == NULL)
        return;
    const struct transport *lane = w->on_lane, *host = w->on_host;
    if (lane != host && lane->close != NULL)
        lane->close(w);
    if (host->close != NULL)
        host->close(w);
    comm_close(w->all);
    if (!rank_stopped(w->board.mine.state))
        board_state(w, RANK_ENDED, "");
    board_close(w);
    inbox_release(&w->inbox);
    free(w);
}

struct comm *world_comm(struct world *w) { return w->all; }

/* ---- groups ---------------------------------------------------------------------------------- */

static int check_group(const struct world *w, const char *name, const int *ranks, int n, struct err *e)
{
    bool here = false;
    for (int i = 0; i < n; i++) {
        if (ranks[i] < 0 || ranks[i] >= w->size || (i > 0 && ranks[i] <= ranks[i - 1]))
            return err_set(e, ST_INTERNAL, "group %s on rank %d: ranks must rise and be below %d, member %d is %d",
                           name, w->rank, w->size, i, ranks[i]);
        here |= ranks[i] == w->rank;
    }
    if (n > 0 && !here)
        return err_set(e, ST_INTERNAL, "group %s on rank %d: it is not in the group", name, w->rank);
    return ST_OK;
}

/* Members must have named the same group. */
static int check_members(struct world *w, const char *name, const int *ranks, int n, struct err *e)
{
    uint64_t mine = hash64(ranks, (size_t)n * sizeof *ranks, hash64_str(name, 0)), *all = NULL;
    TRY(mem_array((void **)&all, (size_t)w->size, sizeof *all, e));
    int st = comm_host_gather(w->all, name, &mine, (int64_t)sizeof mine, all, e);
    for (int i = 0; st == ST_OK && i < n; i++)
        if (all[ranks[i]] != mine)
            st = err_set(e, ST_INTERNAL, "rank %d counts rank %d as a member of its group %s, which that rank does not",
                         w->rank, ranks[i], name);
    free(all);
    return st;
}

int comm_open(struct world *w, const char *name, const int *ranks, int n, struct comm **out, struct err *e)
{
    *out = NULL;
    int id = w->n_opened++;
    int st = check_group(w, name, ranks, n, e);
    int seen = check_members(w, name, ranks, st == ST_OK ? n : 0, st == ST_OK ? e : NULL);
    if (st == ST_OK)
        st = seen;
    if (st != ST_OK)
        return st;
    struct comm *c = NULL;
    if (n > 0)
        TRY(comm_new(w, name, ranks, n, id, &c, e));
    const struct transport *t = w->on_lane;
    if (c != NULL && t->comm_open != NULL)
        st = t->comm_open(c, e);
    if (st != ST_OK)
        comm_free(c);
    else
        *out = c;
    return st;
}

/* ---- agreement ------------------------------------------------------------------------------- */

/* Every rank takes over the error of rank `from` of the group. */
static int spread_error(struct comm *c, const char *what, int from, struct err *e)
{
    struct err told = {0};
    if (e != NULL && c->rank == from)
        told = *e;
    TRY(comm_host_broadcast(c, what, &told, (int64_t)sizeof told, from, e));
    told.msg[sizeof told.msg - 1] = told.hint[sizeof told.hint - 1] = told.trail[sizeof told.trail - 1] = '\0';
    if (c->rank != from && e != NULL) {
        *e = told;
        err_set(e, told.code, "rank %d: %.900s", c->ranks[from], told.msg);
        memcpy(e->hint, told.hint, sizeof e->hint);
        memcpy(e->trail, told.trail, sizeof e->trail);
    }
    c->world->agreed_error = true;
    return told.code;
}

int comm_agree(struct comm *c, const char *what, int status, struct err *e)
{
    if (status != ST_OK && c->world->agreed_error)
        return status; /* all know it, and are on their way out */
    c->world->agreed_error = false;
    int32_t mine = status, *all = NULL;
    int st = mem_array((void **)&all, (size_t)c->size, sizeof *all, e);
    if (st == ST_OK)
        st = comm_host_gather(c, what, &mine, (int64_t)sizeof mine, all, status == ST_OK ? e : NULL);
    int bad = -1;
    for (int r = 0; st == ST_OK && r < c->size && bad < 0; r++)
        if (all[r] != ST_OK)
            bad = r;
    if (st == ST_OK && bad >= 0) {
        st = all[bad];
        int told = spread_error(c, what, bad, e);
        st = told != ST_OK ? told : st;
    } else if (st != ST_OK && status != ST_OK) {
        st = status; /* its own error says more than that the others could not be told */
    }
    free(all);
    return st;
}

/* The first line in which two texts differ. */
static void first_difference(const char *a, const char *b, char *la, char *lb, size_t size)
{
    while (*a != '\0' || *b != '\0') {
        size_t na = strcspn(a, "\n"), nb = strcspn(b, "\n");
        if (na != nb || memcmp(a, b, na) != 0) {
            snprintf(la, size, "%.*s", (int)na, a);
            snprintf(lb, size, "%.*s", (int)nb, b);
            return;
        }
        a += na + (a[na] != '\0');
        b += nb + (b[nb] != '\0');
    }
}

/* Both texts on every rank, so that every rank has the same message. */
static int show_difference(struct world *w, const char *what, const char *text, int other, const int64_t *lengths,
                           struct err *e)
{
    char *both[2] = {NULL, NULL}, la[200] = "", lb[200] = "";
    int who[2] = {0, other}, st = ST_OK;
    for (int i = 0; i < 2 && st == ST_OK; i++) {
        st = mem_array((void **)&both[i], (size_t)lengths[who[i]] + 1, 1, e);
        if (st == ST_OK && w->rank == who[i])
            memcpy(both[i], text, (size_t)lengths[who[i]]);
        if (st == ST_OK)
            st = comm_host_broadcast(w->all, what, both[i], lengths[who[i]], who[i], e);
    }
    if (st == ST_OK) {
        first_difference(both[0], both[1], la, lb, sizeof la);
        st = err_set(e, ST_CONFLICT, "rank %d has another %s than rank 0: '%s' instead of '%s'", other, what, lb, la);
        err_hint(e, "start every rank with the same binary, config and options");
        w->agreed_error = true;
    }
    free(both[0]);
    free(both[1]);
    return st;
}

int world_same(struct world *w, const char *what, const char *text, struct err *e)
{
    struct sum {
        uint64_t hash;
        int64_t length;
    } mine = {hash64_str(text, 0), (int64_t)strlen(text)}, *all = NULL;
    int64_t *lengths = NULL;
    int st = mem_array((void **)&all, (size_t)w->size, sizeof *all, e);
    if (st == ST_OK)
        st = mem_array((void **)&lengths, (size_t)w->size, sizeof *lengths, e);
    if (st == ST_OK)
        st = comm_host_gather(w->all, what, &mine, (int64_t)sizeof mine, all, e);
    int other = -1;
    for (int r = 0; st == ST_OK && r < w->size; r++) {
        lengths[r] = all[r].length;
        if (other < 0 && (all[r].hash != all[0].hash || all[r].length != all[0].length))
            other = r;
    }
    if (st == ST_OK && other >= 0)
        st = show_difference(w, what, text, other, lengths, e);
    free(all);
    free(lengths);
    return st;
}

/* ---- the end of a rank ----------------------------------------------------------------------- */

/* In one write, so that the words of ranks do not mix. */
static void say(const struct world *w, const struct err *e)
{
    struct buf b;
    buf_init(&b, 0);
    if (e->code == ST_INTERRUPTED)
        buf_addf(&b, "braid: %s\n", e->msg);
    else if (w->agreed_error)
        buf_addf(&b, "braid: error: %s\n", e->msg);
    else
        buf_addf(&b, "braid: error on rank %d: %s\n", w->rank, e->msg);
    if (e->trail[0])
        buf_addf(&b, "  while: %s\n", e->trail);
    if (e->hint[0])
        buf_addf(&b, "  hint: %s\n", e->hint);
    fputs(b.text != NULL ? b.text : e->msg, stderr);
    fflush(stderr);
    buf_release(&b);
}

/* Others see the failure on the board and end too. The launcher ends all once a process has ended badly, so the last
 * words of each must be out before that. */
static void linger(struct world *w)
{
    enum { TRIES = 40, AT_LEAST = 12 };
    for (int i = 0; i < TRIES; i++) {
        int waiting = 0;
        for (int r = 0; r < w->size; r++) {
            struct board_entry x;
            waiting += r != w->rank && board_read(w, r, &x) && x.state == RANK_WAITS && time_wall() - x.beat < 0.5;
        }
        usleep(50000);
        if (waiting == 0 && i >= AT_LEAST)
            return;
    }
}

bool world_error_agreed(const struct world *w) { return w->agreed_error; }

int world_finish(struct world *w, int status, struct err *e)
{
    if (w->size == 1 || w->kind == COMM_THREADS || status == ST_OK)
        return status;
    if (w->agreed_error || status == ST_INTERRUPTED) {
        if (w->rank == 0)
            say(w, e);
        comm_barrier(w->all, "the end", NULL);
    } else {
        if (!rank_stopped(w->board.mine.state))
            board_state(w, RANK_FAILED, e->msg);
        say(w, e);
        linger(w);
    }
    err_clear(e);
    return status;
}
