/* The Megatron index: every field of .idx is checked against both file sizes before it is used. The file is read in
 * pieces by file_map_read and never through its map, since somebody may shorten it meanwhile. */
#include "data/data_int.h"

#include <string.h>

enum { IDX_HEADER = 34, IDX_VERSION = 1, PIECE = 1024 };
static const uint8_t idx_magic[9] = "MMIDIDX\0";

static uint64_t load_u64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static int read_idx(const struct source *s, size_t at, void *out, size_t n, struct err *e)
{
    return file_map_read(&s->idx, s->idx_path ? s->idx_path : s->path, at, out, n, e);
}

static size_t offsets_at(const struct source *s) { return IDX_HEADER + 4 * (size_t)s->n_seqs; }
static size_t documents_at(const struct source *s) { return IDX_HEADER + 12 * (size_t)s->n_seqs; }

int idx_seq_offset(const struct source *s, int64_t seq, int64_t *offset, struct err *e)
{
    int64_t bytes = s->lengths[seq] * (int64_t)dtype_bytes(s->dtype), size = (int64_t)s->bin.size;
    TRY(read_idx(s, offsets_at(s) + 8 * (size_t)seq, offset, sizeof *offset, e));
    if (*offset >= 0 && *offset <= size && bytes <= size - *offset)
        return ST_OK;
    return err_set(e, ST_CORRUPT,
                   "%s.idx: sequence %lld now starts at byte %lld of %lld: it was rewritten while in use", s->path,
                   (long long)seq, (long long)*offset, (long long)size);
}

static int check_dtype(struct source *s, unsigned code, struct err *e)
{
    static const enum dtype types[] = {
        [1] = DT_U8, [2] = DT_I8, [3] = DT_I16, [4] = DT_I32, [5] = DT_I64, [6] = DT_F64, [7] = DT_F32, [8] = DT_U16};
    if (code < 1 || code >= (unsigned)countof(types))
        return err_set(e, ST_CORRUPT, "%s.idx: unknown token type code %u at byte 17 (1 to 8 exist)", s->path, code);
    s->dtype = types[code];
    if (s->dtype == DT_F64 || s->dtype == DT_F32)
        return err_set(e, ST_UNSUPPORTED, "%s.idx: holds %s values, not token ids", s->path, dtype_name(s->dtype));
    return ST_OK;
}

static int check_header(struct source *s, struct err *e)
{
    uint8_t p[IDX_HEADER];
    size_t size = s->idx.size;
    if (size < IDX_HEADER)
        return err_set(e, ST_CORRUPT, "%s.idx: %zu bytes, its header alone has %d", s->path, size, IDX_HEADER);
    TRY(read_idx(s, 0, p, sizeof p, e));
    if (memcmp(p, idx_magic, sizeof idx_magic) != 0)
        return err_set(e, ST_CORRUPT, "%s.idx: does not start with the magic MMIDIDX", s->path);
    uint64_t version = load_u64(p + 9), seqs = load_u64(p + 18), docs = load_u64(p + 26);
    if (version != IDX_VERSION)
        return err_set(e, ST_UNSUPPORTED, "%s.idx: version %llu, this program reads version %d", s->path,
                       (unsigned long long)version, IDX_VERSION);
    TRY(check_dtype(s, p[17], e));
    /* The counts are bounded by the size first: the sum below cannot overflow. */
    size_t room = size - IDX_HEADER;
    if (seqs > room / 12 || docs > room / 8 || 12 * seqs + 8 * docs > room)
        return err_set(e, ST_CORRUPT,
                       "%s.idx: %zu bytes cannot hold the %llu sequences and %llu document entries "
                       "its header names (truncated?)",
                       s->path, size, (unsigned long long)seqs, (unsigned long long)docs);
    uint64_t rest = room - 12 * seqs - 8 * docs;
    if (rest != 0 && rest == seqs)
        return err_set(e, ST_UNSUPPORTED, "%s.idx: has sequence modes (a multimodal dataset)", s->path);
    if (rest != 0)
        return err_set(e, ST_CORRUPT, "%s.idx: %llu bytes follow the last field", s->path, (unsigned long long)rest);
    s->n_seqs = (int64_t)seqs;
    s->n_docs = (int64_t)docs - 1;
    return ST_OK;
}

static int check_sequence(struct source *s, int64_t i, int64_t offset, int64_t *before, struct err *e)
{
    int64_t item = (int64_t)dtype_bytes(s->dtype), size = (int64_t)s->bin.size, len = s->lengths[i];
    if (len < 0)
        return err_set(e, ST_CORRUPT, "%s.idx: sequence %lld has length %lld", s->path, (long long)i, (long long)len);
    if (offset < *before || offset % item != 0)
        return err_set(e, ST_CORRUPT,
                       "%s.idx: sequence %lld starts at byte %lld of .bin, the one before ends at "
                       "%lld (tokens of %lld bytes)",
                       s->path, (long long)i, (long long)offset, (long long)*before, (long long)item);
    if (offset > size || len * item > size - offset)
        return err_set(e, ST_CORRUPT,
                       "%s.bin: %lld bytes, but sequence %lld needs %lld bytes from %lld "
                       "(truncated, or not the .bin of this .idx?)",
                       s->path, (long long)size, (long long)i, (long long)(len * item), (long long)offset);
    *before = offset + len * item;
    s->n_tokens += len; /* they do not overlap: at most the bytes of .bin */
    return ST_OK;
}

static int check_sequences(struct source *s, struct err *e)
{
    int64_t before = 0, offsets[PIECE];
    s->n_tokens = 0;
    TRY(mem_array((void **)&s->lengths, (size_t)s->n_seqs, sizeof *s->lengths, e));
    TRY(read_idx(s, IDX_HEADER, s->lengths, 4 * (size_t)s->n_seqs, e));
    for (int64_t at = 0, n; at < s->n_seqs; at += n) {
        n = min_i64(PIECE, s->n_seqs - at);
        TRY(read_idx(s, offsets_at(s) + 8 * (size_t)at, offsets, 8 * (size_t)n, e));
        for (int64_t i = 0; i < n; i++)
            TRY(check_sequence(s, at + i, offsets[i], &before, e));
    }
    return ST_OK;
}

static int check_documents(struct source *s, struct err *e)
{
    int64_t before = 0, starts[PIECE];
    for (int64_t at = 0, n; at <= s->n_docs; at += n) {
        n = min_i64(PIECE, s->n_docs + 1 - at);
        TRY(read_idx(s, documents_at(s) + 8 * (size_t)at, starts, 8 * (size_t)n, e));
        for (int64_t i = 0; i < n; i++) {
            if (starts[i] < before || starts[i] > s->n_seqs || (at + i == 0 && starts[i] != 0))
                return err_set(e, ST_CORRUPT, "%s.idx: document entry %lld is sequence %lld, after %lld, of %lld",
                               s->path, (long long)(at + i), (long long)starts[i], (long long)before,
                               (long long)s->n_seqs);
            before = starts[i];
        }
    }
    if (s->n_docs < 0 || before != s->n_seqs)
        return err_set(e, ST_CORRUPT, "%s.idx: documents cover %lld of %lld sequences", s->path, (long long)before,
                       (long long)s->n_seqs);
    return ST_OK;
}

int source_check_idx(struct source *s, struct err *e)
{
    s->kind = SOURCE_MEGATRON;
    s->append_eod = -1;
    TRY(check_header(s, e));
    TRY(check_sequences(s, e));
    return check_documents(s, e);
}
