/* Sources: find out what a path is, map it, check it, and read ids from it. */
#include "data/data_int.h"

#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Each file is one mapping, and Linux allows a process 65530 of them by default. */
enum { MAX_MAPPED_FILES = 32768 };

const char *source_kind_name(enum source_kind k)
{
    static const char *const names[] = {"Megatron pair", "llm.c shards", "text"};
    return names[k];
}

/* ---- Opening --------------------------------------------------------------------------------- */

static int add_mapped(struct source *s, const char *path, struct err *e)
{
    if (s->n_files >= MAX_MAPPED_FILES)
        return err_set(e, ST_UNSUPPORTED, "%s: more than %d files", s->path, MAX_MAPPED_FILES);
    TRY(mem_grow((void **)&s->files, &s->cap_files, s->n_files + 1, sizeof *s->files, e));
    struct source_file *f = &s->files[s->n_files];
    *f = (struct source_file){.path = strdup(path)};
    if (f->path == NULL)
        return err_set(e, ST_NOMEM, "out of memory opening %s", path);
    s->n_files++;
    TRY(file_map_open(&f->map, path, e));
    if (s->kind == SOURCE_LLMC) {
        TRY(source_check_shard(f, e));
    } else {
        f->dtype = DT_U8;
        f->n_tokens = (int64_t)f->map.size;
    }
    s->n_seqs++;
    s->n_tokens += f->n_tokens + (s->append_eod >= 0 ? 1 : 0);
    return ST_OK;
}

static int open_text(struct source *s, const char *path, const struct tokenizer *tok, struct err *e)
{
    s->kind = SOURCE_TEXT;
    if (tok == NULL || !tok->is_bytes) {
        err_set(e, ST_INVALID, "%s is text, and the tokenizer '%s' does not read bytes as ids", path,
                tok ? tokenizer_kind(tok) : "none");
        return err_hint(e, "turn it into a token file first: braid data tokenize");
    }
    struct text_list list = {0};
    int st = text_list_add(&list, path, MAX_MAPPED_FILES, e);
    for (size_t i = 0; i < list.n && st == ST_OK; i++)
        st = add_mapped(s, list.paths[i], e);
    s->skipped += list.binary + list.empty + list.other;
    if (st == ST_OK && s->n_files == 0) {
        err_set(e, ST_INVALID, "%s holds no text (%lld binary files, %lld empty, %lld others)", path,
                (long long)list.binary, (long long)list.empty, (long long)list.other);
        st = err_hint(e, "a file with a NUL byte in its first 8 KiB counts as binary; token files "
                         "are a .bin with its .idx, or an llm.c shard");
    }
    text_list_release(&list);
    return st;
}

/* An .idx without its .bin, or the reverse, is the commonest mishap: say which one is missing. */
static int open_megatron(struct source *s, struct err *e)
{
    size_t n = strlen(s->path) + sizeof ".idx";
    TRY(mem_array((void **)&s->idx_path, n, 1, e));
    TRY(mem_array((void **)&s->bin_path, n, 1, e));
    snprintf(s->idx_path, n, "%s.idx", s->path);
    snprintf(s->bin_path, n, "%s.bin", s->path);
    int st = file_map_open(&s->idx, s->idx_path, e);
    if (st == ST_OK)
        st = file_map_open(&s->bin, s->bin_path, e);
    if (st != ST_OK && file_exists(s->bin_path) && !file_exists(s->idx_path))
        err_hint(e, "a killed `braid data tokenize` leaves a .bin without its .idx: run it again with --out %s",
                 s->path);
    else if (st != ST_OK)
        err_hint(e, "a token file is a pair %s and %s", s->bin_path, s->idx_path);
    TRY(st);
    TRY(source_check_idx(s, e));
    char *loss;
    TRY(mem_array((void **)&loss, n + 1, 1, e));
    snprintf(loss, n + 1, "%s.loss", s->path);
    bool exists;
    st = file_lookup(loss, &exists, e);
    if (st != ST_OK || !exists) {
        free(loss);
        return st;
    }
    s->loss_path = loss;
    TRY(file_map_open(&s->loss, loss, e));
    if ((int64_t)s->loss.size == s->n_tokens)
        return ST_OK;
    err_set(e, ST_CORRUPT, "%s has %zu marks for %lld tokens", loss, s->loss.size, (long long)s->n_tokens);
    return err_hint(e, "tokenize the conversations again, with --force");
}

static bool starts_as_shard(const char *path)
{
    uint8_t head[4];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool yes = fd >= 0 && read(fd, head, sizeof head) == 4 && llmc_is_shard(head, sizeof head);
    if (fd >= 0)
        close(fd);
    return yes;
}

static int open_one(struct source *s, const char *path, const struct tokenizer *tok, struct err *e)
{
    if (!file_is_dir(path) && starts_as_shard(path)) {
        if (s->kind == SOURCE_TEXT && s->n_files > 0)
            return err_set(e, ST_INVALID, "%s is an llm.c shard among text files", path);
        s->kind = SOURCE_LLMC;
        s->append_eod = -1;
        return add_mapped(s, path, e);
    }
    if (s->kind == SOURCE_LLMC)
        return err_set(e, ST_CORRUPT, "%s is not an llm.c shard, but others of its pattern are", path);
    return open_text(s, path, tok, e);
}

static int open_pattern(struct source *s, const char *pattern, const struct tokenizer *tok, struct err *e)
{
    glob_t found;
    int rc = glob(pattern, GLOB_ERR, NULL, &found); /* sorted by name */
    if (rc != 0) {
        globfree(&found);
        return err_set(e, ST_IO, rc == GLOB_NOMATCH ? "no file matches %s" : "cannot expand %s", pattern);
    }
    int st = ST_OK;
    for (size_t i = 0; i < found.gl_pathc && st == ST_OK; i++)
        st = open_one(s, found.gl_pathv[i], tok, e);
    globfree(&found);
    return st;
}

static bool has_suffix_file(const char *path, const char *suffix)
{
    char full[4096];
    return snprintf(full, sizeof full, "%s%s", path, suffix) < (int)sizeof full && file_exists(full);
}

bool source_is_text(const char *path)
{
    bool exists = file_exists(path);
    if (str_ends(path, ".bin") || str_ends(path, ".idx") || has_suffix_file(path, ".idx"))
        return false;
    if (exists)
        return file_is_dir(path) || !starts_as_shard(path);
    glob_t found;
    int rc = strpbrk(path, "*?[") != NULL ? glob(path, 0, NULL, &found) : GLOB_NOMATCH;
    if (rc != 0)
        return false;
    bool text = !starts_as_shard(found.gl_pathv[0]);
    globfree(&found);
    return text;
}

int source_open(struct source *s, const char *path, const struct tokenizer *tok, int32_t eod, struct err *e)
{
    *s = (struct source){.kind = SOURCE_TEXT, .append_eod = eod, .path = strdup(path)};
    if (s->path == NULL)
        return err_set(e, ST_NOMEM, "out of memory opening %s", path);
    bool exists = file_exists(path), has_idx = has_suffix_file(path, ".idx");
    bool one_of_pair = (str_ends(path, ".bin") || str_ends(path, ".idx")) && !(exists && starts_as_shard(path));
    int st;
    if (strpbrk(path, "*?[") != NULL && !exists && !has_idx) {
        st = open_pattern(s, path, tok, e);
    } else if (one_of_pair || (!exists && (has_idx || has_suffix_file(path, ".bin")))) {
        if (one_of_pair)
            s->path[strlen(path) - 4] = '\0'; /* the prefix */
        st = open_megatron(s, e);
    } else if (exists) {
        st = open_one(s, path, tok, e);
    } else {
        err_set(e, ST_IO, "data path %s: no such file, folder or token file", path);
        st = err_hint(e, "tried %s, %s.idx and %s.bin", path, path, path);
    }
    if (st != ST_OK)
        source_close(s);
    return st;
}

void source_close(struct source *s)
{
    file_map_close(&s->idx);
    file_map_close(&s->bin);
    file_map_close(&s->loss);
    for (size_t i = 0; i < s->n_files; i++) {
        file_map_close(&s->files[i].map);
        free(s->files[i].path);
    }
    free(s->files);
    free(s->path);
    free(s->idx_path);
    free(s->bin_path);
    free(s->loss_path);
    free(s->lengths);
    *s = (struct source){0};
}

/* ---- Reading --------------------------------------------------------------------------------- */

int64_t source_seq_len(const struct source *s, int64_t seq)
{
    if (s->kind == SOURCE_MEGATRON)
        return s->lengths[seq];
    return s->files[seq].n_tokens + (s->append_eod >= 0 ? 1 : 0);
}

/* The loop of one type. "wide" holds every value of the type, so one comparison as unsigned finds
 * negative ids too; an id outside the vocabulary ends the loop at its place. */
#define READ_IDS(type)                                                                                                 \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
        type value;                                                                                                    \
        memcpy(&value, from + i * (int64_t)sizeof value, sizeof value);                                                \
        int64_t wide = value;                                                                                          \
        if ((uint64_t)wide >= (uint64_t)vocab) {                                                                       \
            *bad = wide;                                                                                               \
            return i;                                                                                                  \
        }                                                                                                              \
        out[i] = (int32_t)wide;                                                                                        \
    }

/* How many ids were read before one lay outside the vocabulary: n if none did. */
static int64_t read_ids(const uint8_t *from, enum dtype dtype, int64_t n, int64_t vocab, int32_t *out, int64_t *bad)
{
    switch (dtype) {
    case DT_U8: READ_IDS(uint8_t) return n;
    case DT_U16: READ_IDS(uint16_t) return n;
    case DT_U32: READ_IDS(uint32_t) return n;
    case DT_I8: READ_IDS(int8_t) return n;
    case DT_I16: READ_IDS(int16_t) return n;
    case DT_I32: READ_IDS(int32_t) return n;
    case DT_I64: READ_IDS(int64_t) return n;
    default: return -1;
    }
}

/* Ids [from, from + n) of the sequence that begins at byte `base` of a map, by way of a small buffer: the map itself is
 * never touched, since its file may have become shorter (file_map_read). */
static int64_t read_mapped(const struct file_map *map, const char *path, int64_t base, enum dtype dtype, int64_t from,
                           int64_t n, int64_t vocab, int32_t *out, int64_t *bad, int *st, struct err *e)
{
    uint8_t bytes[32768];
    int64_t item = (int64_t)dtype_bytes(dtype), at_once = (int64_t)sizeof bytes / max_i64(item, 1);
    for (int64_t done = 0, take; done < n; done += take) {
        take = min_i64(at_once, n - done);
        *st = file_map_read(map, path, (size_t)(base + (from + done) * item), bytes, (size_t)(take * item), e);
        if (*st != ST_OK)
            return done;
        int64_t good = read_ids(bytes, dtype, take, vocab, out + done, bad);
        if (good != take)
            return good < 0 ? good : done + good;
    }
    return n;
}

int source_read(const struct source *s, int64_t seq, int64_t from, int64_t n, int64_t vocab, int32_t *out,
                struct err *e)
{
    bool pair = s->kind == SOURCE_MEGATRON;
    const struct source_file *f = pair ? NULL : &s->files[seq];
    enum dtype dtype = pair ? s->dtype : f->dtype;
    const char *path = pair ? (s->bin_path ? s->bin_path : s->path) : f->path;
    int64_t stored = n, bad = 0, base = pair ? 0 : (int64_t)f->skip;
    if (!pair && from + n > f->n_tokens) { /* the appended eod */
        stored = f->n_tokens - from;
        out[n - 1] = s->append_eod;
    }
    if (stored == 0) /* an empty .bin has no address to add to */
        return ST_OK;
    if (pair)
        TRY(idx_seq_offset(s, seq, &base, e));
    int st = ST_OK;
    int64_t good = read_mapped(pair ? &s->bin : &f->map, path, base, dtype, from, stored, vocab, out, &bad, &st, e);
    if (st != ST_OK || good == stored)
        return st;
    if (good < 0)
        return err_set(e, ST_INTERNAL, "%s: tokens of type %s", s->path, dtype_name(dtype));
    err_set(e, ST_CORRUPT, "%s: token %lld of sequence %lld is id %lld, outside the vocabulary of %lld", path,
            (long long)(from + good), (long long)seq, (long long)bad, (long long)vocab);
    return err_hint(e, "the data was made with another tokenizer, or model.vocab is set too low; "
                       "`braid data info PATH --scan` shows the largest id");
}

int source_read_loss(const struct source *s, int64_t seq, int64_t from, int64_t n, uint8_t *out, struct err *e)
{
    int64_t base;
    TRY(idx_seq_offset(s, seq, &base, e));
    int64_t at = base / (int64_t)dtype_bytes(s->dtype) + from;
    if (at + n > (int64_t)s->loss.size) /* sequences may lie apart in a .bin that another program wrote */
        return err_set(e, ST_CORRUPT, "%s ends before token %lld", s->loss_path, (long long)(at + n));
    TRY(file_map_read(&s->loss, s->loss_path, (size_t)at, out, (size_t)n, e));
    for (int64_t i = 0; i < n; i++)
        if (out[i] > 1)
            return err_set(e, ST_CORRUPT, "%s: mark %lld is %d, not 0 or 1", s->loss_path, (long long)(at + i),
                           (int)out[i]);
    return ST_OK;
}
