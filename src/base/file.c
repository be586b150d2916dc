/* Files and clocks; see file.h. */
#include "base/file.h"

#include "base/mem.h"
#include "base/str.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

int file_open_regular(const char *path, int *fd, int64_t *size, struct err *e)
{
    struct stat sb;
    *size = 0;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* O_NONBLOCK: a FIFO would wait for a writer */
    if (*fd < 0)
        return err_errno(e, "cannot open %s", path);
    int st = ST_OK;
    if (fstat(*fd, &sb) != 0)
        st = err_errno(e, "cannot stat %s", path);
    else if (!S_ISREG(sb.st_mode))
        st = err_set(e, ST_INVALID, "%s is not a regular file", path);
    if (st == ST_OK) {
        *size = (int64_t)sb.st_size;
        return ST_OK;
    }
    close(*fd);
    *fd = -1;
    return st;
}

int file_map_open(struct file_map *m, const char *path, struct err *e)
{
    struct stat sb;
    int64_t size;
    int fd, st = ST_OK;
    *m = (struct file_map){0};
    TRY(file_open_regular(path, &fd, &size, e));
    if (fstat(fd, &sb) != 0) {
        st = err_errno(e, "cannot stat %s", path);
    } else if (size > 0) {
        void *p = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED)
            st = err_errno(e, "cannot map %s (%lld bytes)", path, (long long)size);
        else
            *m = (struct file_map){.data = p, .size = (size_t)size, .dev = sb.st_dev, .ino = sb.st_ino};
    }
    close(fd);
    return st;
}

int file_map_read(const struct file_map *m, const char *path, size_t at, void *out, size_t n, struct err *e)
{
    struct stat sb;
    if (at > m->size || n > m->size - at)
        return err_set(e, ST_INTERNAL, "%s: bytes %zu to %zu of %zu", path, at, at + n, m->size);
    if (n == 0)
        return ST_OK;
    struct iovec to = {out, n}, from = {(void *)(uintptr_t)(m->data + at), n};
    ssize_t got = process_vm_readv(getpid(), &to, 1, &from, 1, 0);
    bool refused = got < 0 && (errno == ENOSYS || errno == EPERM);
    if (refused) /* by a filter of system calls: then only the size protects, a moment before */
        got = 0;
    /* Within the last page a shorter file reads as zeros, so its size counts too. A file that was replaced is another
     * one: the map still shows the old bytes. */
    bool shorter = m->ino != 0 && stat(path, &sb) == 0 && sb.st_dev == m->dev && sb.st_ino == m->ino &&
                   (uint64_t)sb.st_size < m->size;
    if (refused && !shorter) {
        memcpy(out, m->data + at, n);
        return ST_OK;
    }
    if (got == (ssize_t)n && !shorter)
        return ST_OK;
    if (shorter)
        err_set(e, ST_IO, "%s became shorter while it was in use: %lld bytes, it had %zu", path, (long long)sb.st_size,
                m->size);
    else
        err_set(e, ST_IO, "bytes %zu to %zu of %s cannot be read: an input/output error, or it became shorter", at,
                at + n, path);
    return err_hint(e, "put the file back as it was; the same command then continues");
}

void file_map_forget(const struct file_map *m, size_t at, size_t n)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (m->data == NULL || m->ino == 0 || at > m->size || n > m->size - at)
        return; /* plain memory has no file to be read from again */
    size_t first = (at + page - 1) / page * page, end = (at + n) / page * page;
    if (end > first) /* advice: where it is refused, pages stay */
        (void)madvise((void *)(uintptr_t)(m->data + first), end - first, MADV_DONTNEED);
}

void file_map_close(struct file_map *m)
{
    if (m->data != NULL)
        munmap((void *)(uintptr_t)m->data, m->size);
    *m = (struct file_map){0};
}

int file_read(const char *path, size_t max_bytes, char **out, size_t *len, struct err *e)
{
    int64_t size;
    int fd, st = ST_OK;
    *out = NULL;
    *len = 0;
    TRY(file_open_regular(path, &fd, &size, e));
    struct buf b;
    buf_init(&b, 0);
    char chunk[65536];
    ssize_t n;
    while (st == ST_OK && (n = read(fd, chunk, sizeof chunk)) != 0) {
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            st = err_errno(e, "cannot read %s", path);
        else if (b.len + (size_t)n > max_bytes)
            st = err_set(e, ST_INVALID, "%s is larger than the %zu bytes allowed", path, max_bytes);
        else
            buf_add_n(&b, chunk, (size_t)n);
    }
    close(fd);
    buf_add_n(&b, "", 0); /* an empty file still gives a string */
    if (st == ST_OK)
        st = buf_check(&b, e);
    if (st == ST_OK && (int64_t)b.len < size) /* it is read while somebody cuts it, or the file system lies */
        st = err_set(e, ST_IO, "%s: %zu of its %lld bytes could be read", path, b.len, (long long)size);
    if (st != ST_OK) {
        buf_release(&b);
        return st;
    }
    *out = b.text;
    *len = b.len;
    return ST_OK;
}

int file_write_fd(int fd, const void *bytes, size_t n, const char *path, struct err *e)
{
    const char *p = bytes;
    while (n > 0) {
        ssize_t wrote = write(fd, p, n);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote < 0)
            return err_errno(e, "cannot write %s", path);
        p += wrote;
        n -= (size_t)wrote;
    }
    return ST_OK;
}

uint64_t random_u64(void)
{
    uint64_t v;
    if (getrandom(&v, sizeof v, 0) == (ssize_t)sizeof v)
        return v;
    /* O_EXCL finds names that are taken; here they only have to differ mostly. */
    double now[2] = {time_wall(), time_now()};
    return hash64(now, sizeof now, (uint64_t)getpid());
}

static const char temp_mark[] = ".tmp-";
enum { TEMP_DIGITS = 16 };

int file_temp_open(const char *path, char tmp[FILE_TEMP_MAX], int *fd, struct err *e)
{
    enum { TRIES = 16 };
    struct stat sb;
    *fd = -1;
    for (int i = 0; i < TRIES; i++) {
        if (snprintf(tmp, FILE_TEMP_MAX, "%s%s%016llx", path, temp_mark, (unsigned long long)random_u64()) >=
            FILE_TEMP_MAX)
            return err_set(e, ST_INVALID, "path too long: %.200s...", path);
        *fd = open(tmp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (*fd < 0 && errno == EEXIST)
            continue;
        if (*fd < 0)
            return err_errno(e, "cannot create %s", tmp);
        /* Not everywhere can files be locked; then leftovers are told by nothing, and another's may go. */
        flock(*fd, LOCK_EX | LOCK_NB);
        if (fstat(*fd, &sb) != 0 || sb.st_nlink > 0)
            return ST_OK;
        close(*fd); /* a cleaner came between open and flock */
        *fd = -1;
    }
    return err_set(e, ST_IO, "cannot create a temporary file beside %s: %d random names are taken", path, TRIES);
}

int file_temp_dir(const char *path, char tmp[FILE_TEMP_MAX], int *fd, struct err *e)
{
    *fd = -1;
    if (snprintf(tmp, FILE_TEMP_MAX, "%s%s%016llx", path, temp_mark, (unsigned long long)random_u64()) >= FILE_TEMP_MAX)
        return err_set(e, ST_INVALID, "path too long: %.200s...", path);
    if (mkdir(tmp, 0777) != 0)
        return err_errno(e, "cannot create folder %s", tmp);
    *fd = open(tmp, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (*fd < 0) {
        int st = err_errno(e, "cannot open folder %s", tmp);
        rmdir(tmp);
        return st;
    }
    flock(*fd, LOCK_EX | LOCK_NB);
    return ST_OK;
}

/* The length of the name before the mark and the digits of file_temp_open; 0: not such a name. */
static size_t temp_stem(const char *name)
{
    size_t n = strlen(name), tail = sizeof temp_mark - 1 + TEMP_DIGITS;
    if (n <= tail || strncmp(name + n - tail, temp_mark, sizeof temp_mark - 1) != 0 ||
        strspn(name + n - TEMP_DIGITS, "0123456789abcdef") != TEMP_DIGITS)
        return 0;
    return n - tail;
}

static bool remove_left(const char *path)
{
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return false;
    struct stat sb;
    bool left = fstat(fd, &sb) == 0 && (S_ISREG(sb.st_mode) || S_ISDIR(sb.st_mode)) &&
                flock(fd, LOCK_EX | LOCK_NB) == 0 && file_remove_tree(path, NULL) == ST_OK;
    close(fd);
    return left;
}

int file_temp_clean(const char *dir, const char *path)
{
    const char *slash = path ? strrchr(path, '/') : NULL, *stem = slash ? slash + 1 : path;
    char *parent = path == NULL    ? NULL
                   : slash == path ? strdup("/")
                   : slash         ? strndup(path, (size_t)(slash - path))
                                   : strdup(".");
    const char *where = path == NULL ? dir : parent;
    char **names = NULL;
    int n = 0, removed = 0;
    if (where == NULL || file_list_dir(where, &names, &n, NULL) != ST_OK)
        n = 0;
    for (int i = 0; i < n; i++) {
        size_t len = temp_stem(names[i]);
        if (len == 0 || (stem != NULL && (strlen(stem) != len || strncmp(names[i], stem, len) != 0)))
            continue;
        char *full = path_join(where, names[i]);
        removed += full != NULL && remove_left(full);
        free(full);
    }
    file_free_list(names, n);
    free(parent);
    return removed;
}

int file_write_atomic(const char *path, const void *bytes, size_t n, struct err *e)
{
    char tmp[FILE_TEMP_MAX];
    int fd;
    file_temp_clean(NULL, path); /* of an earlier writer that was killed */
    TRY(file_temp_open(path, tmp, &fd, e));
    int st = file_write_fd(fd, bytes, n, tmp, e);
    if (st == ST_OK && fsync(fd) != 0)
        st = err_errno(e, "cannot sync %s", tmp);
    if (close(fd) != 0 && st == ST_OK)
        st = err_errno(e, "cannot close %s", tmp);
    if (st == ST_OK && rename(tmp, path) != 0)
        st = err_errno(e, "cannot rename %s to %s", tmp, path);
    if (st != ST_OK) {
        unlink(tmp);
        return st;
    }
    return file_sync_parent(path, e);
}

int file_sync_parent(const char *path, struct err *e)
{
    const char *slash = strrchr(path, '/');
    if (slash == NULL)
        return file_sync_dir(".", e);
    char *dir = strndup(path, slash == path ? 1 : (size_t)(slash - path));
    if (dir == NULL)
        return err_set(e, ST_NOMEM, "out of memory syncing the folder of %s", path);
    int st = file_sync_dir(dir, e);
    free(dir);
    return st;
}

int file_sync_dir(const char *dir, struct err *e)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return err_errno(e, "cannot open folder %s", dir);
    /* Some file systems cannot sync a folder; that is not the caller's error. */
    int st = fsync(fd) != 0 && errno != EINVAL ? err_errno(e, "cannot sync folder %s", dir) : ST_OK;
    close(fd);
    return st;
}

int file_make_dirs(const char *path, struct err *e)
{
    char partial[4096];
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof partial)
        return err_set(e, ST_INVALID, "bad folder name of %zu bytes", n);
    memcpy(partial, path, n + 1);
    for (size_t i = 1; i <= n; i++) {
        if (partial[i] != '/' && partial[i] != '\0')
            continue;
        char saved = partial[i];
        partial[i] = '\0';
        if (mkdir(partial, 0777) == 0)
            TRY(file_sync_parent(partial, e)); /* what is synced inside would be lost with the name */
        else if (errno != EEXIST)
            return err_errno(e, "cannot create folder %s", partial);
        partial[i] = saved;
    }
    if (!file_is_dir(path))
        return err_set(e, ST_IO, "%s exists and is not a folder", path);
    return ST_OK;
}

int file_remove_tree(const char *path, struct err *e)
{
    struct stat sb;
    if (lstat(path, &sb) != 0)
        return errno == ENOENT ? ST_OK : err_errno(e, "cannot stat %s", path);
    if (!S_ISDIR(sb.st_mode))
        return unlink(path) == 0 ? ST_OK : err_errno(e, "cannot remove %s", path);
    char **names;
    int n, st = file_list_dir(path, &names, &n, e);
    if (st != ST_OK)
        return st;
    for (int i = 0; i < n && st == ST_OK; i++) {
        char *child = path_join(path, names[i]);
        st = child ? file_remove_tree(child, e) : err_set(e, ST_NOMEM, "out of memory");
        free(child);
    }
    file_free_list(names, n);
    if (st == ST_OK && rmdir(path) != 0)
        st = err_errno(e, "cannot remove folder %s", path);
    return st;
}

bool file_exists(const char *path)
{
    struct stat sb;
    return stat(path, &sb) == 0;
}

int file_lookup(const char *path, bool *exists, struct err *e)
{
    struct stat sb;
    *exists = stat(path, &sb) == 0;
    return *exists || errno == ENOENT || errno == ENOTDIR ? ST_OK : err_errno(e, "cannot look up %s", path);
}

bool file_is_dir(const char *path)
{
    struct stat sb;
    return stat(path, &sb) == 0 && S_ISDIR(sb.st_mode);
}

int64_t file_size(const char *path)
{
    struct stat sb;
    return stat(path, &sb) == 0 ? (int64_t)sb.st_size : -1;
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

int file_list_dir(const char *dir, char ***names, int *n, struct err *e)
{
    *names = NULL;
    *n = 0;
    DIR *d = opendir(dir);
    if (d == NULL)
        return err_errno(e, "cannot open folder %s", dir);
    size_t cap = 0;
    int st = ST_OK;
    for (;;) {
        errno = 0;
        struct dirent *ent = readdir(d);
        if (ent == NULL && errno != 0)
            st = err_errno(e, "cannot list folder %s", dir);
        if (ent == NULL || st != ST_OK)
            break;
        if (strcmp(ent->d_name, ".") == 0 || strcmp(ent->d_name, "..") == 0)
            continue;
        st = mem_grow((void **)names, &cap, (size_t)*n + 1, sizeof **names, e);
        if (st == ST_OK && ((*names)[*n] = strdup(ent->d_name)) == NULL)
            st = err_set(e, ST_NOMEM, "out of memory listing %s", dir);
        else if (st == ST_OK)
            ++*n;
    }
    closedir(d);
    if (st != ST_OK) {
        file_free_list(*names, *n);
        *names = NULL;
        *n = 0;
        return st;
    }
    if (*n > 1)
        qsort(*names, (size_t)*n, sizeof **names, by_name);
    return ST_OK;
}

void file_free_list(char **names, int n)
{
    for (int i = 0; i < n; i++)
        free(names[i]);
    free(names);
}

char *path_join(const char *a, const char *b)
{
    size_t na = strlen(a), nb = strlen(b);
    char *p = malloc(na + nb + 2);
    if (p == NULL)
        return NULL;
    memcpy(p, a, na);
    if (na > 0 && a[na - 1] != '/')
        p[na++] = '/';
    memcpy(p + na, b, nb + 1);
    return p;
}

static double clock_seconds(clockid_t id)
{
    struct timespec ts;
    clock_gettime(id, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

double time_now(void) { return clock_seconds(CLOCK_MONOTONIC); }
double time_wall(void) { return clock_seconds(CLOCK_REALTIME); }

int cpu_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}
