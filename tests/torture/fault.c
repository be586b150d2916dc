/* A library for LD_PRELOAD that makes one call of a program fail, or ends the program there.
 *
 *   TORTURE_CALL=alloc|write|short_write|read|fsync|close|rename|open|mmap|stat|thread|folder|kill_before|kill_after
 *   TORTURE_N=N            the N-th such call, from 1; 0: none, calls are only counted
 *   TORTURE_REPORT=FILE    at the end, "CALL COUNT" of every kind and "hit 0|1"
 *
 * "folder" is mkdir, unlink, rmdir and ftruncate. The last two end the program by SIGKILL before or after a call that
 * changes the disk. Calls count from the first line of main on, and only if they come from the program or from the C
 * library on its behalf: what a failing malloc does inside of OpenBLAS or libgomp is not ours to repair. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum call {
    ALLOC,
    WRITE,
    SHORT_WRITE,
    READ,
    FSYNC,
    CLOSE,
    RENAME,
    OPEN,
    MMAP,
    STAT,
    THREAD,
    FOLDER,
    KILL_BEFORE,
    KILL_AFTER,
    CALLS
};
static const char *const names[CALLS] = {"alloc",  "write",  "short_write", "read",      "fsync",
                                         "close",  "rename", "open",        "mmap",      "stat",
                                         "thread", "folder", "kill_before", "kill_after"};

/* A library that is loaded before the program has no other place for its state. */
static atomic_bool armed;
static atomic_long counts[CALLS];
static atomic_int hit;
static int chosen = -1;
static long chosen_n;
static char report[4096];
static struct {
    uintptr_t from, to;
} ranges[16]; /* of the program and the C library */
static int n_ranges;

static int note_range(struct dl_phdr_info *info, size_t size, void *ctx)
{
    (void)size;
    (void)ctx;
    bool program = info->dlpi_name[0] == '\0', libc = strstr(info->dlpi_name, "/libc.so") != NULL;
    for (int i = 0; (program || libc) && i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD && (info->dlpi_phdr[i].p_flags & PF_X) && n_ranges < 16) {
            ranges[n_ranges].from = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            ranges[n_ranges].to = ranges[n_ranges].from + info->dlpi_phdr[i].p_memsz;
            n_ranges++;
        }
    return 0;
}

static void end(void)
{
    atomic_store(&armed, false);
    char text[1024];
    size_t n = 0;
    for (int i = 0; i < CALLS; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "%s %ld\n", names[i], atomic_load(&counts[i]));
    n += (size_t)snprintf(text + n, sizeof text - n, "hit %d\n", atomic_load(&hit));
    int fd = (int)syscall(SYS_openat, AT_FDCWD, report, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd >= 0) {
        syscall(SYS_write, fd, text, n);
        syscall(SYS_close, fd);
    }
}

__attribute__((constructor)) static void begin(void)
{
    const char *call = getenv("TORTURE_CALL"), *n = getenv("TORTURE_N"), *to = getenv("TORTURE_REPORT");
    if (to == NULL)
        return;
    snprintf(report, sizeof report, "%s", to);
    for (int i = 0; i < CALLS; i++)
        if (call != NULL && strcmp(call, names[i]) == 0)
            chosen = i;
    chosen_n = n != NULL ? atol(n) : 0;
    dl_iterate_phdr(note_range, NULL);
    atexit(end);
    atomic_store(&armed, true);
}

static bool ours(const void *caller)
{
    uintptr_t at = (uintptr_t)caller;
    for (int i = 0; i < n_ranges; i++)
        if (at >= ranges[i].from && at < ranges[i].to)
            return true;
    return false;
}

/* Is this the call that fails? */
static bool fails(enum call c, const void *caller)
{
    if (!atomic_load(&armed) || !ours(caller))
        return false;
    long n = atomic_fetch_add(&counts[c], 1) + 1;
    if ((int)c != chosen || n != chosen_n)
        return false;
    atomic_store(&hit, 1);
    return true;
}

static void dies(enum call c, const void *caller)
{
    if (fails(c, caller))
        syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
}

#define CALLER __builtin_return_address(0)
#define NEXT(name)                                                                                                     \
    static __typeof__(name) *next;                                                                                     \
    if (next == NULL)                                                                                                  \
    next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define FAIL(c, code, value)                                                                                           \
    do {                                                                                                               \
        if (fails(c, CALLER)) {                                                                                        \
            errno = code;                                                                                              \
            return value;                                                                                              \
        }                                                                                                              \
    } while (0)
/* A call that changes the disk, with both places where a kill may come. */
#define CHANGE(type, expression)                                                                                       \
    do {                                                                                                               \
        dies(KILL_BEFORE, CALLER);                                                                                     \
        type result_ = (expression);                                                                                   \
        int saved_ = errno;                                                                                            \
        dies(KILL_AFTER, CALLER);                                                                                      \
        errno = saved_;                                                                                                \
        return result_;                                                                                                \
    } while (0)

/* ---- memory: the C library's own entries need no dlsym, which would allocate itself ---------- */

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t align, size_t n);

void *malloc(size_t n)
{
    FAIL(ALLOC, ENOMEM, NULL);
    return __libc_malloc(n);
}
void *calloc(size_t n, size_t size)
{
    FAIL(ALLOC, ENOMEM, NULL);
    return __libc_calloc(n, size);
}
void *realloc(void *p, size_t n)
{
    FAIL(ALLOC, ENOMEM, NULL);
    return __libc_realloc(p, n);
}
void *aligned_alloc(size_t align, size_t n)
{
    FAIL(ALLOC, ENOMEM, NULL);
    return __libc_memalign(align, n);
}
int posix_memalign(void **out, size_t align, size_t n)
{
    if (fails(ALLOC, CALLER))
        return ENOMEM;
    void *p = __libc_memalign(align, n);
    if (p == NULL)
        return ENOMEM;
    *out = p;
    return 0;
}

/* ---- files ----------------------------------------------------------------------------------- */

/* Standard output and the terminal are not the disk. */
static bool to_disk(int fd) { return fd > 2; }

ssize_t write(int fd, const void *bytes, size_t n)
{
    if (!to_disk(fd))
        return syscall(SYS_write, fd, bytes, n);
    FAIL(WRITE, ENOSPC, -1);
    if (n > 1 && fails(SHORT_WRITE, CALLER))
        n /= 2;
    CHANGE(ssize_t, syscall(SYS_write, fd, bytes, n));
}
ssize_t pwrite(int fd, const void *bytes, size_t n, off_t at)
{
    FAIL(WRITE, ENOSPC, -1);
    if (n > 1 && fails(SHORT_WRITE, CALLER))
        n /= 2;
    CHANGE(ssize_t, syscall(SYS_pwrite64, fd, bytes, n, at));
}
ssize_t read(int fd, void *bytes, size_t n)
{
    FAIL(READ, EIO, -1);
    return syscall(SYS_read, fd, bytes, n);
}
ssize_t pread(int fd, void *bytes, size_t n, off_t at)
{
    FAIL(READ, EIO, -1);
    return syscall(SYS_pread64, fd, bytes, n, at);
}
/* The forms that _FORTIFY_SOURCE calls. */
ssize_t __read_chk(int fd, void *bytes, size_t n, size_t room);
ssize_t __read_chk(int fd, void *bytes, size_t n, size_t room)
{
    (void)room;
    FAIL(READ, EIO, -1);
    return syscall(SYS_read, fd, bytes, n);
}
ssize_t __pread_chk(int fd, void *bytes, size_t n, off_t at, size_t room);
ssize_t __pread_chk(int fd, void *bytes, size_t n, off_t at, size_t room)
{
    (void)room;
    FAIL(READ, EIO, -1);
    return syscall(SYS_pread64, fd, bytes, n, at);
}
int __open_2(const char *path, int flags);
int __open_2(const char *path, int flags)
{
    FAIL(OPEN, EMFILE, -1);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0);
}
ssize_t process_vm_readv(pid_t pid, const struct iovec *to, unsigned long n_to, const struct iovec *from,
                         unsigned long n_from, unsigned long flags)
{
    FAIL(READ, EFAULT, -1);
    return syscall(SYS_process_vm_readv, pid, to, n_to, from, n_from, flags);
}
size_t fread(void *to, size_t size, size_t n, FILE *f)
{
    NEXT(fread);
    FAIL(READ, EIO, 0);
    return next(to, size, n, f);
}
struct dirent *readdir(DIR *d)
{
    NEXT(readdir);
    FAIL(READ, EIO, NULL);
    return next(d);
}
int fsync(int fd)
{
    FAIL(FSYNC, EIO, -1);
    CHANGE(int, (int)syscall(SYS_fsync, fd));
}
int close(int fd)
{
    if (fd > 2 && fails(CLOSE, CALLER)) {
        syscall(SYS_close, fd);
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_close, fd);
}
int rename(const char *from, const char *to)
{
    FAIL(RENAME, EIO, -1);
    CHANGE(int, (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
int link(const char *from, const char *to)
{
    FAIL(RENAME, EIO, -1);
    CHANGE(int, (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0));
}
int open(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    int mode = flags & O_CREAT ? va_arg(ap, int) : 0;
    va_end(ap);
    FAIL(OPEN, EMFILE, -1);
    if (!(flags & O_CREAT))
        return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    CHANGE(int, (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}
FILE *fopen(const char *path, const char *mode)
{
    NEXT(fopen);
    FAIL(OPEN, EMFILE, NULL);
    return next(path, mode);
}
DIR *opendir(const char *path)
{
    NEXT(opendir);
    FAIL(OPEN, EMFILE, NULL);
    return next(path);
}
void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    FAIL(MMAP, ENOMEM, MAP_FAILED);
    return (void *)syscall(SYS_mmap, at, n, prot, flags, fd, offset);
}
int stat(const char *path, struct stat *sb)
{
    FAIL(STAT, EIO, -1);
    return (int)syscall(SYS_newfstatat, AT_FDCWD, path, sb, 0);
}
int lstat(const char *path, struct stat *sb)
{
    FAIL(STAT, EIO, -1);
    return (int)syscall(SYS_newfstatat, AT_FDCWD, path, sb, AT_SYMLINK_NOFOLLOW);
}
int fstat(int fd, struct stat *sb)
{
    FAIL(STAT, EIO, -1);
    return (int)syscall(SYS_fstat, fd, sb);
}
int mkdir(const char *path, mode_t mode)
{
    FAIL(FOLDER, EDQUOT, -1);
    CHANGE(int, (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}
int unlink(const char *path)
{
    FAIL(FOLDER, EIO, -1);
    CHANGE(int, (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}
int rmdir(const char *path)
{
    FAIL(FOLDER, EIO, -1);
    CHANGE(int, (int)syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR));
}
int ftruncate(int fd, off_t n)
{
    FAIL(FOLDER, EIO, -1);
    CHANGE(int, (int)syscall(SYS_ftruncate, fd, n));
}

/* ---- threads, whoever starts them ------------------------------------------------------------ */

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    NEXT(pthread_create);
    if (atomic_load(&armed)) {
        long n = atomic_fetch_add(&counts[THREAD], 1) + 1;
        if (chosen == THREAD && n == chosen_n) {
            atomic_store(&hit, 1);
            return EAGAIN;
        }
    }
    return next(thread, attr, fn, arg);
}
