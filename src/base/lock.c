/* Folder locks; see lock.h.
 *
 * The file holds one line, "HOST PID BOOT ID TIME BEAT": name of the machine, process, the kernel's boot identifier
 * (the same one: flock is decisive), a random identifier of this lock, when it was taken, and a counter that a thread
 * raises. A holder that ended without releasing leaves the file. On the same machine the kernel has dropped its flock,
 * so the lock is free; left by another machine, it is free once the counter stands still. The counter is compared with
 * itself, never a clock with the clock of another machine. */
#include "base/lock.h"

#include "base/file.h"
#include "base/mem.h"
#include "base/str.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 512 };

struct holder {
    char host[128], boot[64], since[32];
    long pid;
    unsigned long long id, beat;
};

struct dir_lock {
    char *path;
    int fd;
    double interval;
    struct holder self;
    pthread_t thread;
    bool owned; /* the file is ours to remove */
    bool beating;
    pthread_mutex_t mutex; /* guards stop */
    pthread_cond_t changed;
    bool stop;
};

/* ---- what the file says ---------------------------------------------------------------------- */

static void word_only(char *s) /* blanks separate fields */
{
    for (; *s != '\0'; s++)
        if (*s <= ' ' || *s == 0x7f)
            *s = '_';
}

static void describe_self(struct holder *h)
{
    *h = (struct holder){.pid = (long)getpid(), .id = random_u64()};
    if (gethostname(h->host, sizeof h->host - 1) != 0 || h->host[0] == '\0')
        snprintf(h->host, sizeof h->host, "unknown");
    word_only(h->host);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, h->boot, 36) : 0;
    if (fd >= 0)
        close(fd);
    if (n != 36)
        snprintf(h->boot, sizeof h->boot, "unknown-%llx", h->id); /* unlike any other: the heartbeat decides */
    word_only(h->boot);
    time_t now = time(NULL);
    struct tm tm;
    if (gmtime_r(&now, &tm) == NULL || strftime(h->since, sizeof h->since, "%Y-%m-%dT%H:%M:%SZ", &tm) == 0)
        snprintf(h->since, sizeof h->since, "unknown");
}

/* Fixed width, so that one pwrite over the old line is the whole change. */
static int line_of(const struct holder *h, char *line, size_t size)
{
    return snprintf(line, size, "%s %ld %s %016llx %s %012llu\n", h->host, h->pid, h->boot, h->id, h->since, h->beat);
}

/* False: the file is empty or says nothing that can be understood. */
static bool read_holder(const char *path, struct holder *h)
{
    char line[LINE_MAX_BYTES];
    *h = (struct holder){0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    ssize_t n = fd >= 0 ? read(fd, line, sizeof line - 1) : -1;
    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return false;
    line[n] = '\0';
    return sscanf(line, "%127s %ld %63s %llx %31s %llu", h->host, &h->pid, h->boot, &h->id, h->since, &h->beat) == 6;
}

static int write_self(const struct dir_lock *l, struct err *e)
{
    char line[LINE_MAX_BYTES];
    int n = line_of(&l->self, line, sizeof line);
    if (pwrite(l->fd, line, (size_t)n, 0) != n || ftruncate(l->fd, n) != 0)
        return err_errno(e, "cannot write %s", l->path);
    return ST_OK;
}

/* ---- the heartbeat --------------------------------------------------------------------------- */

static void *beat(void *arg)
{
    struct dir_lock *l = arg;
    char line[LINE_MAX_BYTES];
    pthread_mutex_lock(&l->mutex);
    while (!l->stop) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        double at = (double)until.tv_sec + 1e-9 * (double)until.tv_nsec + l->interval;
        until.tv_sec = (time_t)at;
        until.tv_nsec = (long)((at - (double)until.tv_sec) * 1e9);
        pthread_cond_timedwait(&l->changed, &l->mutex, &until);
        if (l->stop)
            break;
        l->self.beat++;
        int n = line_of(&l->self, line, sizeof line);
        ssize_t wrote = pwrite(l->fd, line, (size_t)n, 0); /* a beat that is lost is followed by another */
        (void)wrote;
    }
    pthread_mutex_unlock(&l->mutex);
    return NULL;
}

static int start_beating(struct dir_lock *l, struct err *e)
{
    sigset_t all, before;
    sigfillset(&all); /* signals belong to the main thread */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&l->thread, NULL, beat, l);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0)
        return err_set(e, ST_IO, "cannot start the thread that keeps %s: %s", l->path, strerror(rc));
    l->beating = true;
    return ST_OK;
}

/* ---- taking ---------------------------------------------------------------------------------- */

static int held(const struct dir_lock *l, const struct holder *h, bool known, struct err *e)
{
    if (known)
        err_set(e, ST_CONFLICT, "%s is held by process %ld on host %s since %s: another job works in this folder",
                l->path, h->pid, h->host, h->since);
    else
        err_set(e, ST_CONFLICT, "%s is held by another process: another job works in this folder", l->path);
    return err_hint(e, "wait for that job, stop it, or choose another folder");
}

/* Opens and locks the file; *locked is false where the file system has no flock. The file may go away between the two
 * calls, when its holder releases it. */
static int open_locked(struct dir_lock *l, bool *locked, struct err *e)
{
    enum { TRIES = 100 };
    struct stat mine, there;
    for (int i = 0; i < TRIES; i++) {
        l->fd = open(l->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
        if (l->fd < 0)
            return err_errno(e, "cannot open the lock %s", l->path);
        if (fstat(l->fd, &mine) == 0 && !S_ISREG(mine.st_mode))
            return err_set(e, ST_INVALID, "the lock %s is not a regular file", l->path);
        *locked = flock(l->fd, LOCK_EX | LOCK_NB) == 0;
        if (!*locked && errno == EWOULDBLOCK) {
            struct holder h;
            bool known = read_holder(l->path, &h);
            return held(l, &h, known, e);
        }
        if (fstat(l->fd, &mine) == 0 && stat(l->path, &there) == 0 && mine.st_ino == there.st_ino &&
            mine.st_dev == there.st_dev)
            return ST_OK;
        close(l->fd);
        l->fd = -1;
    }
    return err_set(e, ST_IO, "cannot lock %s: it is created and removed all the time", l->path);
}

/* A line that somebody left: does its writer still live? */
static bool lives(const struct dir_lock *l, const struct holder *was, bool locked, double patience)
{
    if (strcmp(was->boot, l->self.boot) == 0)
        return !locked && was->pid != l->self.pid && (kill((pid_t)was->pid, 0) == 0 || errno == EPERM);
    double end = time_now() + patience;
    for (struct holder now = *was; time_now() < end;) {
        struct timespec nap = {.tv_nsec = 100000000};
        nanosleep(&nap, NULL);
        if (read_holder(l->path, &now) && (now.beat != was->beat || now.id != was->id))
            return true;
    }
    return false;
}

static int take(struct dir_lock *l, double patience, struct err *note, struct err *e)
{
    struct holder was;
    bool locked = false;
    TRY(open_locked(l, &locked, e));
    if (read_holder(l->path, &was)) {
        if (lives(l, &was, locked, patience))
            return held(l, &was, true, e);
        err_set(note, ST_OK, "%s was left by process %ld on host %s (since %s), which is gone", l->path, was.pid,
                was.host, was.since);
    }
    l->owned = true;
    TRY(write_self(l, e));
    return start_beating(l, e);
}

int dir_lock_take(struct dir_lock **out, const char *dir, const struct dir_lock_opts *opts, struct err *note,
                  struct err *e)
{
    struct dir_lock *l = NULL;
    double patience = opts && opts->patience > 0 ? opts->patience : 20;
    *out = NULL;
    err_clear(note);
    TRY(mem_array((void **)&l, 1, sizeof *l, e));
    l->fd = -1;
    l->interval = opts && opts->beat > 0 ? opts->beat : 5;
    pthread_mutex_init(&l->mutex, NULL);
    pthread_cond_init(&l->changed, NULL);
    describe_self(&l->self);
    l->path = path_join(dir, "lock");
    int st = l->path ? take(l, patience, note, e) : err_set(e, ST_NOMEM, "out of memory locking %s", dir);
    if (st == ST_OK)
        *out = l;
    else
        dir_lock_release(l);
    return st;
}

int dir_lock_check(const struct dir_lock *l, struct err *e)
{
    struct holder h;
    bool known = read_holder(l->path, &h);
    if (known && h.id == l->self.id)
        return ST_OK;
    if (!known)
        err_set(e, ST_CONFLICT, "the lock %s is gone or unreadable: another job may work in this folder", l->path);
    else
        err_set(e, ST_CONFLICT, "%s was taken over by process %ld on host %s at %s", l->path, h.pid, h.host, h.since);
    return err_hint(e, "was this process suspended? The other job's files are left alone");
}

void dir_lock_release(struct dir_lock *l)
{
    if (l == NULL)
        return;
    pthread_mutex_lock(&l->mutex);
    l->stop = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mutex);
    if (l->beating)
        pthread_join(l->thread, NULL);
    if (l->fd >= 0) {
        struct holder h;
        if (l->owned && (!read_holder(l->path, &h) || h.id == l->self.id))
            unlink(l->path); /* while it is still locked: whoever opened it meanwhile notices */
        close(l->fd);
    }
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->mutex);
    free(l->path);
    free(l);
}
