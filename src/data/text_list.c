/* The text files of a path: sorted, so that the same tree gives the same documents everywhere. */
#include "data/data_int.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_DEPTH = 64, PROBE_BYTES = 8192 };

/* Text has no NUL; looking at the start decides, as reading everything twice would be slow. */
static int looks_binary(const char *path, bool *binary, struct err *e)
{
    char probe[PROBE_BYTES];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_errno(e, "cannot open %s", path);
    ssize_t n;
    do {
        n = read(fd, probe, sizeof probe);
    } while (n < 0 && errno == EINTR);
    int st = n < 0 ? err_errno(e, "cannot read %s", path) : ST_OK;
    close(fd);
    *binary = n > 0 && memchr(probe, '\0', (size_t)n) != NULL;
    return st;
}

static int add_file(struct text_list *l, const char *path, int64_t size, size_t max_files, struct err *e)
{
    bool binary = false;
    if (text_packing_of(path) == TEXT_PLAIN)
        TRY(looks_binary(path, &binary, e));
    if (binary || size == 0) {
        l->binary += binary;
        l->empty += !binary;
        return ST_OK;
    }
    if (l->n >= max_files) {
        err_set(e, ST_UNSUPPORTED, "more than %zu text files, the last one %s", max_files, path);
        return err_hint(e, "turn them into one token file with: braid data tokenize");
    }
    TRY(mem_grow((void **)&l->paths, &l->cap_paths, l->n + 1, sizeof *l->paths, e));
    TRY(mem_grow((void **)&l->sizes, &l->cap_sizes, l->n + 1, sizeof *l->sizes, e));
    if ((l->paths[l->n] = strdup(path)) == NULL)
        return err_set(e, ST_NOMEM, "out of memory listing text files");
    l->sizes[l->n++] = size;
    return ST_OK;
}

static int add_dir(struct text_list *l, const char *dir, int depth, size_t max_files, struct err *e);

/* An entry found in a folder. What is plainly not text is counted, not an error. */
static int add_entry(struct text_list *l, const char *dir, const char *name, int depth, size_t max_files, struct err *e)
{
    struct stat sb;
    if (name[0] == '.' || str_ends(name, ".bin") || str_ends(name, ".idx") || str_ends(name, ".tokens.json") ||
        str_ends(name, ".loss")) {
        l->other++;
        return ST_OK;
    }
    char *path = path_join(dir, name);
    if (path == NULL)
        return err_set(e, ST_NOMEM, "out of memory listing %s", dir);
    int st = ST_OK;
    if (lstat(path, &sb) != 0)
        st = err_errno(e, "cannot stat %s", path);
    else if (S_ISDIR(sb.st_mode))
        st = add_dir(l, path, depth + 1, max_files, e);
    else if (stat(path, &sb) == 0 && S_ISREG(sb.st_mode))
        st = add_file(l, path, sb.st_size, max_files, e);
    else
        l->other++; /* a device, a broken link, or a link to a folder: those can form circles */
    free(path);
    return st;
}

static int add_dir(struct text_list *l, const char *dir, int depth, size_t max_files, struct err *e)
{
    char **names;
    int n;
    if (depth > MAX_DEPTH)
        return err_set(e, ST_INVALID, "%s is more than %d folders deep", dir, MAX_DEPTH);
    TRY(file_list_dir(dir, &names, &n, e));
    int st = ST_OK;
    for (int i = 0; i < n && st == ST_OK; i++)
        st = add_entry(l, dir, names[i], depth, max_files, e);
    file_free_list(names, n);
    return st;
}

int text_list_add(struct text_list *l, const char *path, size_t max_files, struct err *e)
{
    struct stat sb;
    if (stat(path, &sb) != 0)
        return err_errno(e, "cannot read %s", path);
    if (S_ISDIR(sb.st_mode))
        return add_dir(l, path, 0, max_files, e);
    if (!S_ISREG(sb.st_mode))
        return err_set(e, ST_INVALID, "%s is neither a file nor a folder", path);
    return add_file(l, path, sb.st_size, max_files, e);
}

void text_list_release(struct text_list *l)
{
    for (size_t i = 0; i < l->n; i++)
        free(l->paths[i]);
    free(l->paths);
    free(l->sizes);
    *l = (struct text_list){0};
}
