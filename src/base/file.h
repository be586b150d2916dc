/* Files: read, map, write and rename so that a kill at any moment leaves the old or the new file. */
#ifndef BRAID_BASE_FILE_H
#define BRAID_BASE_FILE_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Read-only memory map. An empty file maps to data NULL, size 0. */
struct file_map {
    const uint8_t *data;
    size_t size;
};
int file_map_open(struct file_map *m, const char *path, struct err *e);
void file_map_close(struct file_map *m);

/* Whole file into a malloc'd, NUL-terminated buffer; a file over max_bytes is an error. */
int file_read(const char *path, size_t max_bytes, char **out, size_t *len, struct err *e);
/* All bytes or an error; retries short writes and EINTR. */
int file_write_fd(int fd, const void *bytes, size_t n, const char *path, struct err *e);
/* Write path.tmp, fsync, rename over path, fsync the folder. */
int file_write_atomic(const char *path, const void *bytes, size_t n, struct err *e);
int file_sync_dir(const char *dir, struct err *e);
int file_make_dirs(const char *path, struct err *e); /* mkdir -p */
int file_remove_tree(const char *path, struct err *e); /* rm -r; does not follow links */
bool file_exists(const char *path);
bool file_is_dir(const char *path);
int64_t file_size(const char *path); /* -1 if it cannot be told */
/* Sorted names in dir, without . and ..; free with file_free_list. */
int file_list_dir(const char *dir, char ***names, int *n, struct err *e);
void file_free_list(char **names, int n);
/* "a/b" into a malloc'd string. */
char *path_join(const char *a, const char *b);

double time_now(void);  /* monotonic seconds */
double time_wall(void); /* seconds since 1970 */
int cpu_count(void);    /* cores this process may use */

#endif
