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
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

int file_map_open(struct file_map *m, const char *path, struct err *e)
{
    struct stat sb;
    *m = (struct file_map){0};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_errno(e, "cannot open %s", path);
    int st = ST_OK;
    if (fstat(fd, &sb) != 0)
        st = err_errno(e, "cannot stat %s", path);
    else if (!S_ISREG(sb.st_mode))
        st = err_set(e, ST_INVALID, "%s is not a regular file", path);
    else if (sb.st_size > 0) {
        void *p = mmap(NULL, (size_t)sb.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED)
            st = err_errno(e, "cannot map %s (%lld bytes)", path, (long long)sb.st_size);
        else
            *m = (struct file_map){.data = p, .size = (size_t)sb.st_size};
    }
    close(fd);
    return st;
}

void file_map_close(struct file_map *m)
{
    if (m->data != NULL)
        munmap((void *)(uintptr_t)m->data, m->size);
    *m = (struct file_map){0};
}

int file_read(const char *path, size_t max_bytes, char **out, size_t *len, struct err *e)
{
    *out = NULL;
    *len = 0;
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        return err_errno(e, "cannot open %s", path);
    struct buf b;
    buf_init(&b, 0);
    char chunk[65536];
    size_t n;
    int st = ST_OK;
    while ((n = fread(chunk, 1, sizeof chunk, f)) > 0 && st == ST_OK) {
        if (b.len + n > max_bytes)
            st = err_set(e, ST_INVALID, "%s is larger than the %zu bytes allowed", path, max_bytes);
        buf_add_n(&b, chunk, n);
    }
    if (st == ST_OK && ferror(f))
        st = err_errno(e, "cannot read %s", path);
    fclose(f);
    buf_add_n(&b, "", 0); /* an empty file still gives a string */
    if (st == ST_OK)
        st = buf_check(&b, e);
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

int file_write_atomic(const char *path, const void *bytes, size_t n, struct err *e)
{
    char tmp[4096];
    if (snprintf(tmp, sizeof tmp, "%s.tmp", path) >= (int)sizeof tmp)
        return err_set(e, ST_INVALID, "path too long: %.200s...", path);
    int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return err_errno(e, "cannot create %s", tmp);
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
    char *slash = strrchr(tmp, '/');
    if (slash != NULL)
        *(slash == tmp ? slash + 1 : slash) = '\0';
    return file_sync_dir(slash ? tmp : ".", e);
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
        if (mkdir(partial, 0777) != 0 && errno != EEXIST)
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

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int file_list_dir(const char *dir, char ***names, int *n, struct err *e)
{
    *names = NULL;
    *n = 0;
    DIR *d = opendir(dir);
    if (d == NULL)
        return err_errno(e, "cannot open folder %s", dir);
    size_t cap = 0;
    int st = ST_OK;
    for (struct dirent *ent; st == ST_OK && (ent = readdir(d)) != NULL;) {
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
