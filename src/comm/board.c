/* The board: every rank's place, written before it can block, and which rank is responsible when a wait lasts too long.
 * Ranks of one process share memory; others share a file of fixed-size records, which a stopped or killed rank leaves
 * behind. */
#include "comm/comm_int.h"
#include "base/stop.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const double look_every = 0.2;
static const double stop_grace = 22; /* seconds between a stop signal and the end of a wait */

static void copy_text(char *out, size_t size, const char *text)
{
    size_t n = strlen(text);
    n = n < size ? n : size - 1;
    memcpy(out, text, n);
    out[n] = '\0';
}

int board_open_file(struct world *w, const char *path, uint64_t run, struct err *e)
{
    struct board *b = &w->board;
    b->run = b->mine.run = run;
    if (path == NULL || path[0] == '\0')
        return ST_OK;
    b->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (b->fd < 0)
        return err_errno(e, "cannot open %s, where ranks write what they wait for", path);
    board_state(w, RANK_AT_WORK, "");
    return ST_OK;
}

void board_close(struct world *w)
{
    if (w->board.fd >= 0)
        close(w->board.fd);
    w->board.fd = -1;
}

/* Where a record cannot be written, others see the one before it: a message may be less exact, nothing else. */
void board_write(struct world *w)
{
    struct board *b = &w->board;
    b->mine.beat = time_wall();
    if (b->entries != NULL) {
        pthread_mutex_lock(b->lock);
        b->entries[w->rank] = b->mine;
        pthread_mutex_unlock(b->lock);
    } else if (b->fd >= 0) {
        ssize_t n = pwrite(b->fd, &b->mine, sizeof b->mine, (off_t)w->rank * (off_t)sizeof b->mine);
        (void)n;
    }
}

static void end_text(struct board_entry *x)
{
    x->host[sizeof x->host - 1] = x->group[sizeof x->group - 1] = x->what[sizeof x->what - 1] =
        x->why[sizeof x->why - 1] = '\0';
}

bool board_read(struct world *w, int rank, struct board_entry *out)
{
    struct board *b = &w->board;
    if (b->entries != NULL) {
        pthread_mutex_lock(b->lock);
        *out = b->entries[rank];
        pthread_mutex_unlock(b->lock);
    } else if (b->fd < 0 || pread(b->fd, out, sizeof *out, (off_t)rank * (off_t)sizeof *out) != (ssize_t)sizeof *out) {
        return false;
    }
    end_text(out);
    return out->run == b->run && out->state != RANK_NEW;
}

static void set_state(struct world *w, enum rank_state s)
{
    w->board.mine.state = (int32_t)s;
    w->board.mine.since = time_wall();
    if (s != RANK_GAVE_UP) /* which others follow to the cause */
        w->board.mine.waits_for = -1;
    board_write(w);
}

void board_enter(struct comm *c, int64_t number, const char *what)
{
    struct board_entry *m = &c->world->board.mine;
    m->number = number;
    copy_text(m->group, sizeof m->group, c->name);
    copy_text(m->what, sizeof m->what, what);
    set_state(c->world, RANK_WAITS);
}

void board_leave(struct comm *c) { set_state(c->world, RANK_AT_WORK); }

void board_state(struct world *w, enum rank_state s, const char *why)
{
    copy_text(w->board.mine.why, sizeof w->board.mine.why, why);
    set_state(w, s);
}

void world_at_step(struct world *w, int64_t step)
{
    w->board.mine.step = step; /* seen with the next collective */
    if (w->board.mine.state == RANK_NEW)
        w->board.mine.state = RANK_AT_WORK;
}

/* ---- waiting --------------------------------------------------------------------------------- */

struct wait wait_begin(void)
{
    double now = time_now();
    return (struct wait){.start = now, .next = now + look_every};
}

bool wait_due(const struct wait *t) { return time_now() >= t->next; }

/* A rank that waits gives a sign of life with every look. */
static bool alive(const struct world *w, const struct board_entry *x)
{
    double limit = w->timeout > 0 ? w->timeout / 2 : 10;
    limit = limit > 10 ? 10 : limit < 0.5 ? 0.5 : limit;
    return time_wall() - x->beat < limit;
}

/* From a rank that has not come to the one it waits for itself, and so on: the last is where it began. */
static int root_cause(struct world *w, int rank)
{
    int at = rank;
    for (int hops = 0; hops < w->size; hops++) {
        struct board_entry x;
        bool follow = board_read(w, at, &x) && (x.state == RANK_GAVE_UP || (x.state == RANK_WAITS && alive(w, &x)));
        if (!follow || x.waits_for < 0 || x.waits_for >= w->size)
            return at;
        if (x.waits_for == w->rank)
            return rank; /* each waits for the other: the calls do not match */
        at = x.waits_for;
    }
    return rank;
}

static void describe(struct world *w, int rank, struct buf *b)
{
    struct board_entry x;
    if (!board_read(w, rank, &x)) {
        buf_addf(b, "rank %d (nothing is known of it)", rank);
        return;
    }
    buf_addf(b, "rank %d (process %d on %s): step %lld, ", rank, (int)x.pid, x.host, (long long)x.step);
    double ago = time_wall() - x.since;
    const char *name = x.what[0] != '\0' ? x.what : "the start";
    switch (x.state) {
    case RANK_WAITS:
        buf_addf(b, "in collective %lld '%s' of group %s since %.1f s", (long long)x.number, name, x.group, ago);
        if (!alive(w, &x))
            buf_addf(b, ", no sign of life for %.1f s", time_wall() - x.beat);
        break;
    case RANK_GAVE_UP: buf_addf(b, "gave up waiting in '%s' %.1f s ago", name, ago); break;
    case RANK_FAILED:
    case RANK_FOLLOWED: buf_addf(b, "failed %.1f s ago: %s", ago, x.why); break;
    case RANK_ENDED: buf_addf(b, "ended %.1f s ago, after '%s'", ago, name); break;
    default:
        buf_addf(b, "past collective %lld '%s' of group %s since %.1f s, computing, stopped or dead",
                 (long long)x.number, name, x.group, ago);
    }
}

static int blame(struct comm *c, const struct wait *t, const int *missing, int n, struct err *e)
{
    enum { NAMED = 4 };
    struct world *w = c->world;
    struct buf b;
    int cause[NAMED], n_cause = 0, more = 0;
    for (int i = 0; i < n; i++) {
        int r = root_cause(w, missing[i]), seen = 0;
        for (int k = 0; k < n_cause; k++)
            seen |= cause[k] == r;
        if (!seen && n_cause < NAMED)
            cause[n_cause++] = r;
        else
            more += !seen;
    }
    buf_init(&b, 0);
    for (int i = 0; i < n_cause; i++) {
        buf_add(&b, i > 0 ? "; " : "");
        describe(w, cause[i], &b);
    }
    if (more > 0)
        buf_addf(&b, "; and %d more", more);
    if (n_cause == 1 && n == 1 && cause[0] != missing[0])
        buf_addf(&b, "; rank %d waits for it", missing[0]);
    const struct board_entry *m = &w->board.mine;
    err_set(e, ST_PEER, "rank %d waited %.1f s at step %lld in collective %lld '%s' of group %s for %s", w->rank,
            time_now() - t->start, (long long)m->step, (long long)m->number, m->what, m->group,
            b.text != NULL ? b.text : "others");
    buf_release(&b);
    err_hint(
        e, "look at that rank's output; parallel.timeout (%g s) is how long ranks wait; the last checkpoint is intact",
        w->timeout);
    w->board.mine.waits_for = n_cause > 0 ? cause[0] : -1;
    board_state(w, RANK_GAVE_UP, e != NULL ? e->msg : "");
    return ST_PEER;
}

/* Somebody failed, or gave up: what this rank waits for will not come. */
static int others_stopped(struct comm *c, const struct wait *t, const int *missing, int n, struct err *e)
{
    struct world *w = c->world;
    for (int r = 0; r < w->size; r++) {
        struct board_entry x;
        if (r == w->rank || !board_read(w, r, &x))
            continue;
        if (x.state == RANK_FAILED) {
            board_state(w, RANK_FOLLOWED, x.why);
            return err_set(e, ST_PEER, "rank %d stopped: rank %d failed at step %lld: %s", w->rank, r,
                           (long long)x.step, x.why);
        }
        if (x.state == RANK_GAVE_UP && x.step <= w->board.mine.step + 1)
            return blame(c, t, missing, n, e);
        for (int i = 0; i < n; i++)
            if (missing[i] == r && x.state == RANK_ENDED) {
                board_state(w, RANK_FOLLOWED, "a rank it waited for had ended");
                return err_set(e, ST_PEER,
                               "rank %d waits at step %lld in '%s' of group %s for rank %d, which has ended", w->rank,
                               (long long)w->board.mine.step, w->board.mine.what, w->board.mine.group, r);
            }
    }
    return ST_OK;
}

/* Is the process of this rank, on this host, stopped or dead? Where that cannot be told, no. */
static bool is_halted(struct world *w, int rank)
{
    struct board_entry x;
    char path[40], text[256] = "";
    if (!board_read(w, rank, &x) || strcmp(x.host, w->board.mine.host) != 0)
        return false;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)x.pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    const char *state = n > 0 ? strrchr(text, ')') : NULL; /* "pid (name) state" */
    return state != NULL && state[1] == ' ' && strchr("TtZX", state[2]) != NULL;
}

/* A stop signal is answered after the step, when all ranks have agreed. A rank whose peer is stopped or dead does not
 * get there, nor does one that waits much longer; launchers kill after half a minute, with nothing said. Threads end
 * with their process. */
static int check_stop(struct comm *c, struct wait *t, const int *missing, int n, struct err *e)
{
    struct world *w = c->world;
    if (w->kind == COMM_THREADS || !stop_pending())
        return ST_OK;
    if (t->stop_at == 0)
        t->stop_at = time_now() + stop_grace;
    bool halted = false;
    for (int i = 0; i < n; i++)
        halted |= is_halted(w, missing[i]);
    if (!halted && time_now() < t->stop_at)
        return ST_OK;
    struct buf b;
    buf_init(&b, 0);
    if (n > 0)
        describe(w, missing[0], &b);
    err_set(e, ST_PEER, "rank %d was told to stop at step %lld while it waited in '%s' of group %s for %s", w->rank,
            (long long)w->board.mine.step, w->board.mine.what, w->board.mine.group, b.text != NULL ? b.text : "others");
    buf_release(&b);
    board_state(w, RANK_GAVE_UP, e != NULL ? e->msg : "");
    return ST_PEER;
}

int wait_look(struct comm *c, struct wait *t, const int *missing, int n, struct err *e)
{
    struct world *w = c->world;
    double now = time_now();
    TRY(check_stop(c, t, missing, n, e));
    if (w->timeout > 0 && now - t->start > w->timeout)
        return blame(c, t, missing, n, e);
    TRY(others_stopped(c, t, missing, n, e));
    w->board.mine.waits_for = n > 0 ? missing[0] : -1;
    board_write(w);
    t->next = now + look_every;
    if (w->timeout > 0 && t->next > t->start + w->timeout)
        t->next = t->start + w->timeout + 1e-3;
    return ST_OK;
}
