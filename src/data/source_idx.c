/* The Megatron index: every field of .idx is checked against both file sizes before it is used, so
 * that reading tokens later needs no bounds checks of its own. Fields are unaligned: memcpy. */
#include "data/data_int.h"

#include <string.h>

enum { IDX_HEADER = 34, IDX_VERSION = 1 };
static const uint8_t idx_magic[9] = "MMIDIDX\0";

static uint64_t load_u64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

int64_t idx_seq_len(const struct source *s, int64_t seq)
{
    int32_t v;
    memcpy(&v, s->idx.data + IDX_HEADER + 4 * (size_t)seq, sizeof v);
    return v;
}

int64_t idx_seq_offset(const struct source *s, int64_t seq)
{
    return (int64_t)load_u64(s->idx.data + IDX_HEADER + 4 * (size_t)s->n_seqs + 8 * (size_t)seq);
}

static int64_t idx_doc_start(const struct source *s, int64_t doc)
{
    return (int64_t)load_u64(s->idx.data + IDX_HEADER + 12 * (size_t)s->n_seqs + 8 * (size_t)doc);
}

static int check_dtype(struct source *s, struct err *e)
{
    static const enum dtype types[] = {[1] = DT_U8,  [2] = DT_I8,  [3] = DT_I16, [4] = DT_I32,
                                       [5] = DT_I64, [6] = DT_F64, [7] = DT_F32, [8] = DT_U16};
    unsigned code = s->idx.data[17];
    if (code < 1 || code >= (unsigned)countof(types))
        return err_set(e, ST_CORRUPT,
                       "%s.idx: unknown token type code %u at byte 17 (1 to 8 exist)", s->path,
                       code);
    s->dtype = types[code];
    if (s->dtype == DT_F64 || s->dtype == DT_F32)
        return err_set(e, ST_UNSUPPORTED, "%s.idx: holds %s values, not token ids", s->path,
                       dtype_name(s->dtype));
    return ST_OK;
}

static int check_header(struct source *s, struct err *e)
{
    const uint8_t *p = s->idx.data;
    size_t size = s->idx.size;
    if (size < IDX_HEADER)
        return err_set(e, ST_CORRUPT, "%s.idx: %zu bytes, its header alone has %d", s->path, size,
                       IDX_HEADER);
    if (memcmp(p, idx_magic, sizeof idx_magic) != 0)
        return err_set(e, ST_CORRUPT, "%s.idx: does not start with the magic MMIDIDX", s->path);
    uint64_t version = load_u64(p + 9), seqs = load_u64(p + 18), docs = load_u64(p + 26);
    if (version != IDX_VERSION)
        return err_set(e, ST_UNSUPPORTED, "%s.idx: version %llu, this program reads version %d",
                       s->path, (unsigned long long)version, IDX_VERSION);
    TRY(check_dtype(s, e));
    /* The counts are bounded by the size first: the sum below cannot overflow. */
    size_t room = size - IDX_HEADER;
    if (seqs > room / 12 || docs > room / 8 || 12 * seqs + 8 * docs > room)
        return err_set(e, ST_CORRUPT,
                       "%s.idx: %zu bytes cannot hold the %llu sequences and %llu document entries "
                       "its header names (truncated?)",
                       s->path, size, (unsigned long long)seqs, (unsigned long long)docs);
    uint64_t rest = room - 12 * seqs - 8 * docs;
    if (rest != 0 && rest == seqs)
        return err_set(e, ST_UNSUPPORTED, "%s.idx: has sequence modes (a multimodal dataset)",
                       s->path);
    if (rest != 0)
        return err_set(e, ST_CORRUPT, "%s.idx: %llu bytes follow the last field", s->path,
                       (unsigned long long)rest);
    s->n_seqs = (int64_t)seqs;
    s->n_docs = (int64_t)docs - 1;
    return ST_OK;
}

static int check_sequences(struct source *s, struct err *e)
{
    int64_t item = (int64_t)dtype_bytes(s->dtype), size = (int64_t)s->bin.size, before = 0;
    s->n_tokens = 0;
    for (int64_t i = 0; i < s->n_seqs; i++) {
        int64_t len = idx_seq_len(s, i), offset = idx_seq_offset(s, i);
        if (len < 0)
            return err_set(e, ST_CORRUPT, "%s.idx: sequence %lld has length %lld", s->path,
                           (long long)i, (long long)len);
        if (offset < before || offset % item != 0)
            return err_set(
                e, ST_CORRUPT,
                "%s.idx: sequence %lld starts at byte %lld of .bin, the one before ends at "
                "%lld (tokens of %lld bytes)",
                s->path, (long long)i, (long long)offset, (long long)before, (long long)item);
        if (offset > size || len * item > size - offset)
            return err_set(e, ST_CORRUPT,
                           "%s.bin: %lld bytes, but sequence %lld needs %lld bytes from %lld "
                           "(truncated, or not the .bin of this .idx?)",
                           s->path, (long long)size, (long long)i, (long long)(len * item),
                           (long long)offset);
        before = offset + len * item;
        s->n_tokens += len; /* they do not overlap: at most the bytes of .bin */
    }
    return ST_OK;
}

static int check_documents(struct source *s, struct err *e)
{
    int64_t before = 0;
    for (int64_t d = 0; d <= s->n_docs; d++) {
        int64_t start = idx_doc_start(s, d);
        if (start < before || start > s->n_seqs || (d == 0 && start != 0))
            return err_set(
                e, ST_CORRUPT, "%s.idx: document entry %lld is sequence %lld, after %lld, of %lld",
                s->path, (long long)d, (long long)start, (long long)before, (long long)s->n_seqs);
        before = start;
    }
    if (s->n_docs < 0 || before != s->n_seqs)
        return err_set(e, ST_CORRUPT, "%s.idx: documents cover %lld of %lld sequences", s->path,
                       (long long)before, (long long)s->n_seqs);
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
