/* A library for LD_PRELOAD that writes down every call that changes files or names below a folder, and every sync, with
 * all data, for powercut.c to replay.
 *
 *   RECORD_LOG=FILE    the log; RECORD_ROOT is the current folder at the start
 *
 * One lock orders the calls as the log has them. Writes through mapped memory and stdio are not seen; what is recorded
 * here does not use them for files that matter. */
#include "record.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A library that is loaded before the program has no other place for its state. */
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;

static void put(const void *bytes, size_t n)
{
    for (const char *p = bytes; n > 0;) {
        long wrote = syscall(SYS_write, log_fd, p, n);
        if (wrote <= 0)
            abort(); /* a log with a hole would prove nothing */
        p += wrote;
        n -= (size_t)wrote;
    }
}

static void record(enum record_op op, int fd, int64_t at, const char *a, const void *b, size_t n_b)
{
    int saved = errno;
    struct record r = {.op = op, .fd = fd, .at = at, .n_a = a ? (uint32_t)strlen(a) : 0, .n_b = (uint64_t)n_b};
    put(&r, sizeof r);
    if (a != NULL)
        put(a, r.n_a);
    if (n_b > 0)
        put(b, n_b);
    errno = saved;
}

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("RECORD_LOG");
    if (path == NULL)
        return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0666);
    log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900);
    syscall(SYS_close, fd);
}

#define LOCKED(type, call, if_done)                                                                                    \
    do {                                                                                                               \
        if (log_fd < 0)                                                                                                \
            return (type)(call);                                                                                       \
        pthread_mutex_lock(&order);                                                                                    \
        type result_ = (type)(call);                                                                                   \
        if (result_ >= 0) {                                                                                            \
            if_done;                                                                                                   \
        }                                                                                                              \
        int saved_ = errno;                                                                                            \
        pthread_mutex_unlock(&order);                                                                                  \
        errno = saved_;                                                                                                \
        return result_;                                                                                                \
    } while (0)

int open(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    int mode = flags & O_CREAT ? va_arg(ap, int) : 0;
    va_end(ap);
    /* at: bit 0, the file is cut; whether it is new shows in the model of the disk */
    LOCKED(int, syscall(SYS_openat, AT_FDCWD, path, flags, mode),
           record(REC_OPEN, result_, (flags & O_TRUNC) != 0, path, NULL, 0));
}
int __open_2(const char *path, int flags); /* what _FORTIFY_SOURCE calls */
int __open_2(const char *path, int flags)
{
    LOCKED(int, syscall(SYS_openat, AT_FDCWD, path, flags, 0),
           record(REC_OPEN, result_, (flags & O_TRUNC) != 0, path, NULL, 0));
}
int close(int fd) { LOCKED(int, syscall(SYS_close, fd), record(REC_CLOSE, fd, 0, NULL, NULL, 0)); }
ssize_t write(int fd, const void *bytes, size_t n)
{
    if (fd <= 2)
        return syscall(SYS_write, fd, bytes, n);
    LOCKED(ssize_t, syscall(SYS_write, fd, bytes, n),
           record(REC_WRITE, fd, syscall(SYS_lseek, fd, 0, SEEK_CUR) - result_, NULL, bytes, (size_t)result_));
}
ssize_t pwrite(int fd, const void *bytes, size_t n, off_t at)
{
    LOCKED(ssize_t, syscall(SYS_pwrite64, fd, bytes, n, at), record(REC_WRITE, fd, at, NULL, bytes, (size_t)result_));
}
int ftruncate(int fd, off_t n)
{
    LOCKED(int, syscall(SYS_ftruncate, fd, n), record(REC_TRUNCATE, fd, n, NULL, NULL, 0));
}
int fsync(int fd) { LOCKED(int, syscall(SYS_fsync, fd), record(REC_SYNC, fd, 0, NULL, NULL, 0)); }
int rename(const char *from, const char *to)
{
    LOCKED(int, syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0),
           record(REC_RENAME, -1, 0, from, to, strlen(to)));
}
int link(const char *from, const char *to)
{
    LOCKED(int, syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0), record(REC_LINK, -1, 0, from, to, strlen(to)));
}
int mkdir(const char *path, mode_t mode)
{
    LOCKED(int, syscall(SYS_mkdirat, AT_FDCWD, path, mode), record(REC_MKDIR, -1, 0, path, NULL, 0));
}
int unlink(const char *path)
{
    LOCKED(int, syscall(SYS_unlinkat, AT_FDCWD, path, 0), record(REC_REMOVE, -1, 0, path, NULL, 0));
}
int rmdir(const char *path)
{
    LOCKED(int, syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR), record(REC_REMOVE, -1, 0, path, NULL, 0));
}
