/* Text as training data for a tokenizer that must encode it: tokenised once into a folder of its
 * own, and found there the next time. The name of a cached token file is a hash of what it was made
 * from: tokenizer, options, and name, size and time of every file. */
#include "data/data_int.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* Is there a file in the list that must be unpacked or parsed? */
static bool needs_parsing(const struct text_list *l)
{
    for (size_t i = 0; i < l->n; i++)
        if (text_is_jsonl(l->paths[i]) || text_packing_of(l->paths[i]) != TEXT_PLAIN)
            return true;
    return false;
}

static int list_path(const char *path, struct text_list *l, struct err *e)
{
    if (file_exists(path) || strpbrk(path, "*?[") == NULL)
        return text_list_add(l, path, SIZE_MAX, e);
    glob_t found;
    int rc = glob(path, GLOB_ERR, NULL, &found), st = ST_OK; /* sorted by name */
    for (size_t i = 0; rc == 0 && i < found.gl_pathc && st == ST_OK; i++)
        st = text_list_add(l, found.gl_pathv[i], SIZE_MAX, e);
    globfree(&found);
    return rc == 0 || rc == GLOB_NOMATCH ? st : err_set(e, ST_IO, "cannot expand %s", path);
}

/* Are these conversations? Those beside other text in one folder are refused when they are tokenised. */
static bool talks(const struct data_opts *o, const struct text_list *l)
{
    for (size_t i = 0; o->chat != NULL && i < l->n; i++)
        if (text_is_jsonl(l->paths[i]))
            return true;
    return false;
}

static int key_of(const struct data_opts *o, const struct text_list *l, char key[17], struct err *e)
{
    uint64_t h = hash64(&o->tokenizer->hash, sizeof o->tokenizer->hash, (uint64_t)(int64_t)o->eod);
    h = hash64_str(o->field != NULL ? o->field : "", h);
    if (talks(o, l))
        h = hash64(&o->chat->hash, sizeof o->chat->hash, hash64_str(o->loss_roles != NULL ? o->loss_roles : "", h));
    for (size_t i = 0; i < l->n; i++) {
        struct stat sb;
        char *full = realpath(l->paths[i], NULL);
        if (full == NULL || stat(full, &sb) != 0) {
            free(full);
            return err_errno(e, "cannot read %s", l->paths[i]);
        }
        int64_t what[3] = {sb.st_size, sb.st_mtim.tv_sec, sb.st_mtim.tv_nsec};
        h = hash64(what, sizeof what, hash64_str(full, h));
        free(full);
    }
    snprintf(key, 17, "%016" PRIx64, h);
    return ST_OK;
}

/* A folder in a place that others can write to must be ours alone. */
static int own_folder(const char *dir, bool shared, struct err *e)
{
    struct stat sb;
    if (!shared)
        return file_make_dirs(dir, e);
    if (mkdir(dir, 0700) != 0 && errno != EEXIST)
        return err_errno(e, "cannot create %s", dir);
    if (lstat(dir, &sb) != 0 || !S_ISDIR(sb.st_mode) || sb.st_uid != getuid() || (sb.st_mode & 022) != 0) {
        err_set(e, ST_IO, "%s is not a folder of this user alone", dir);
        return err_hint(e, "set run.dir, so that tokens are kept there");
    }
    return ST_OK;
}

static void say(const struct data_opts *o, const char *fmt, const char *a, const char *b, int64_t x, int64_t y)
{
    char line[1024];
    if (o->note == NULL)
        return;
    snprintf(line, sizeof line, fmt, a, b, (long long)x, (long long)y);
    o->note(o->note_ctx, line);
}

static int tokenize_into(const struct data_opts *o, const char *path, const struct text_list *l, const char *prefix,
                         const char *key, struct err *e)
{
    struct token_manifest m;
    struct tokenize_stats s;
    const char *const *in = (const char *const *)l->paths;
    struct tokenize_opts t = {.in = in,
                              .n_in = (int)l->n,
                              .out = prefix,
                              .tokenizer = o->tokenizer,
                              .tokenizer_name = o->tokenizer_name,
                              .field = o->field,
                              .chat = talks(o, l) ? o->chat : NULL,
                              .loss_roles = o->loss_roles,
                              .replace = true,
                              .threads = o->threads,
                              .key = key};
    struct err none;
    if (token_manifest_read(prefix, &m, &none) == ST_OK && m.found && strcmp(m.key, key) == 0) {
        say(o, "%s: tokens from %s, %lld documents, %lld tokens", path, prefix, m.documents, m.tokens);
        return ST_OK;
    }
    say(o, "%s: tokenizing once into %s (%lld files)", path, prefix, (int64_t)l->n, 0);
    TRY(data_tokenize(&t, &s, e));
    say(o, "%s: tokenized into %s, %lld documents, %lld tokens", path, prefix, s.documents, s.tokens);
    return ST_OK;
}

/* One process at a time: of many ranks the first one tokenises, the others wait and find the
 * result. */
static int with_lock(const struct data_opts *o, const char *path, const struct text_list *l, const char *prefix,
                     const char *key, struct err *e)
{
    size_t n = strlen(prefix) + 8;
    char *name;
    TRY(mem_array((void **)&name, n, 1, e));
    snprintf(name, n, "%s.lock", prefix);
    int fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600), st = ST_OK;
    if (fd < 0)
        st = err_errno(e, "cannot create %s", name);
    while (st == ST_OK && flock(fd, LOCK_EX) != 0)
        if (errno != EINTR)
            st = err_errno(e, "cannot lock %s", name);
    if (st == ST_OK)
        st = tokenize_into(o, path, l, prefix, key, e);
    if (fd >= 0)
        close(fd);
    free(name);
    return st;
}

int text_cache(const struct data_opts *o, const char *path, char **prefix, struct err *e)
{
    struct text_list list = {0};
    char key[17], shared[128];
    *prefix = NULL;
    if (o->tokenizer == NULL || !source_is_text(path))
        return ST_OK;
    int st;
    TRY_OUT(list_path(path, &list, e));
    if (list.n == 0 || list.n > INT32_MAX || (o->tokenizer->is_bytes && !needs_parsing(&list)))
        goto out; /* as it is, or source_open says what is wrong */
    bool own = o->cache_dir != NULL && o->cache_dir[0] != '\0';
    const char *tmp = getenv("TMPDIR");
    snprintf(shared, sizeof shared, "%.80s/braid-tokens-%u", tmp != NULL && tmp[0] == '/' ? tmp : "/tmp",
             (unsigned)getuid());
    const char *dir = own ? o->cache_dir : shared;
    TRY_OUT(own_folder(dir, !own, e));
    TRY_OUT(key_of(o, &list, key, e));
    size_t n = strlen(dir) + sizeof key + 8;
    TRY_OUT(mem_array((void **)prefix, n, 1, e));
    snprintf(*prefix, n, "%s/text-%s", dir, key);
    TRY_OUT(with_lock(o, path, &list, *prefix, key, e));
out:
    text_list_release(&list);
    if (st != ST_OK) {
        free(*prefix);
        *prefix = NULL;
        err_in(e, "preparing %s", path);
    }
    return st;
}
