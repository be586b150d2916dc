/* Append-only files of whole records; see log_int.h. */
#include "log/log_int.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int sink_open(struct sink *s, const char *path, int flags, struct err *e)
{
    *s = (struct sink){.fd = -1};
    s->path = strdup(path);
    if (s->path == NULL)
        return err_set(e, ST_NOMEM, "no memory for a path of %zu bytes", strlen(path));
    s->fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | flags, 0666);
    struct stat info;
    if (s->fd < 0 || fstat(s->fd, &info) != 0) {
        int st = err_errno(e, "cannot open %s for appending", path);
        sink_close(s, NULL);
        return st;
    }
    s->size = info.st_size;
    return ST_OK;
}

int sink_write(struct sink *s, const void *bytes, size_t n, struct err *e)
{
    if (s->fd < 0)
        return ST_OK;
    if (s->broken && ftruncate(s->fd, s->size) != 0)
        return err_errno(e, "cannot cut a half-written record off %s", s->path);
    s->broken = false;
    int st = file_write_fd(s->fd, bytes, n, s->path, e);
    if (st != ST_OK) {
        s->broken = ftruncate(s->fd, s->size) != 0;
        return st;
    }
    s->size += (int64_t)n;
    s->written = true;
    return ST_OK;
}

int sink_close(struct sink *s, struct err *e)
{
    int st = ST_OK;
    if (s->fd >= 0) {
        struct stat info;
        /* Pipes and devices cannot be synced; only a regular file's failure means lost records. */
        if (s->written && fsync(s->fd) != 0 && fstat(s->fd, &info) == 0 && S_ISREG(info.st_mode))
            st = err_errno(e, "cannot sync %s", s->path);
        if (close(s->fd) != 0 && st == ST_OK)
            st = err_errno(e, "cannot close %s", s->path);
    }
    free(s->path);
    *s = (struct sink){.fd = -1};
    return st;
}
