/* Files: read, map, write and rename so that a kill at any moment leaves the old or the new file. */
#ifndef BRAID_BASE_FILE_H
#define BRAID_BASE_FILE_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Opens an existing regular file for reading. Anything else (a FIFO, a device, a folder) is refused, and the call never
 * blocks. */
int file_open_regular(const char *path, int *fd, int64_t *size, struct err *e);

/* Read-only memory map. An empty file maps to data NULL, size 0. */
struct file_map {
    const uint8_t *data;
    size_t size;
    uint64_t dev, ino; /* of the mapped file; ino 0: plain memory */
};
int file_map_open(struct file_map *m, const char *path, struct err *e);
void file_map_close(struct file_map *m);
/* Copies bytes [at, at + n) of a map. Touching a map whose file became shorter ends the process by SIGBUS; this copy
 * is done by the kernel and returns an error instead. path: the mapped file, for the check and the message. */
int file_map_read(const struct file_map *m, const char *path, size_t at, void *out, size_t n, struct err *e);
/* Drops the whole pages of [at, at + n) from this process's memory; a later access reads the file again. */
void file_map_forget(const struct file_map *m, size_t at, size_t n);

/* file_id.c: which bytes a file holds, whatever its name and times. */
struct file_id {
    const char *path; /* for messages; not part of the identity */
    int64_t bytes;
    uint64_t xxh3; /* of all bytes; of a file over 64 MiB: of 256 blocks of 64 KiB, spread evenly */
};
int file_identify(const char *path, struct file_id *id, struct err *e);

/* Whole file into a malloc'd, NUL-terminated buffer; a file over max_bytes is an error. */
int file_read(const char *path, size_t max_bytes, char **out, size_t *len, struct err *e);
/* All bytes or an error; retries short writes and EINTR. */
int file_write_fd(int fd, const void *bytes, size_t n, const char *path, struct err *e);
/* A new file beside path under a random name, path + ".tmp-" + 16 hexadecimal digits, created with O_EXCL|O_NOFOLLOW
 * and locked while it is open, which tells a file in use from one that a killed process left. */
enum { FILE_TEMP_MAX = 4096 };
int file_temp_open(const char *path, char tmp[FILE_TEMP_MAX], int *fd, struct err *e);
/* The same for a folder; *fd holds its lock and is to be closed once it has its final name. */
int file_temp_dir(const char *path, char tmp[FILE_TEMP_MAX], int *fd, struct err *e);
/* Removes the temporary files and folders that killed processes left: those of path, or with path NULL those of every
 * file in dir. Returns their number. Never an error: readers ignore such files. */
int file_temp_clean(const char *dir, const char *path);
/* Write a temporary file beside path, fsync, rename it over path, fsync the folder. */
int file_write_atomic(const char *path, const void *bytes, size_t n, struct err *e);
int file_sync_dir(const char *dir, struct err *e);
int file_sync_parent(const char *path, struct err *e); /* the folder that holds path */
int file_make_dirs(const char *path, struct err *e);   /* mkdir -p; new names are synced */
int file_remove_tree(const char *path, struct err *e); /* rm -r; does not follow links */
bool file_exists(const char *path);
/* Like file_exists, but a lookup that fails for any reason other than absence is an error. */
int file_lookup(const char *path, bool *exists, struct err *e);
uint64_t random_u64(void); /* from the system, for unique names; not for numerical work */
bool file_is_dir(const char *path);
int64_t file_size(const char *path); /* -1 if it cannot be determined */
/* Sorted names in dir, without . and ..; free with file_free_list. */
int file_list_dir(const char *dir, char ***names, int *n, struct err *e);
void file_free_list(char **names, int n);
/* "a/b" into a malloc'd string. */
char *path_join(const char *a, const char *b);

double time_now(void);  /* monotonic seconds */
double time_wall(void); /* seconds since 1970 */
int cpu_count(void);    /* cores this process may use */

#endif
