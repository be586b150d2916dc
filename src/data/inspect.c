/* What a data path is: kind, counts, and on request the range of its ids. */
#include "data/data_int.h"

#include <stdlib.h>

static int scan_ids(const struct source *s, struct data_info *info, struct err *e)
{
    enum { CHUNK = 1 << 16 };
    int32_t *ids;
    TRY(mem_array((void **)&ids, CHUNK, sizeof *ids, e));
    int st = ST_OK;
    info->min_id = INT32_MAX;
    for (int64_t i = 0; i < s->n_seqs && st == ST_OK; i++) {
        int64_t len = source_seq_len(s, i), n;
        for (int64_t at = 0; at < len && st == ST_OK; at += n) {
            n = min_i64(CHUNK, len - at);
            st = source_read(s, i, at, n, INT32_MAX, ids, e);
            for (int64_t k = 0; k < n && st == ST_OK; k++) {
                info->min_id = min_i64(info->min_id, ids[k]);
                info->max_id = max_i64(info->max_id, ids[k]);
            }
        }
    }
    free(ids);
    info->scanned = true;
    return st;
}

int data_inspect(const char *path, bool scan, struct data_info *info, struct err *e)
{
    struct source s;
    struct tokenizer bytes;
    *info = (struct data_info){0};
    TRY(tokenizer_open(&bytes, "bytes", false, e));
    TRY(source_open(&s, path, &bytes, -1, e));
    bool pair = s.kind == SOURCE_MEGATRON;
    snprintf(info->kind, sizeof info->kind, "%s", source_kind_name(s.kind));
    info->dtype = pair ? s.dtype : s.files[0].dtype;
    info->files = pair ? 2 : (int64_t)s.n_files;
    info->sequences = s.n_seqs;
    info->documents = pair ? s.n_docs : s.n_seqs;
    info->tokens = s.n_tokens;
    info->skipped = s.skipped;
    info->bytes = (int64_t)(s.bin.size + s.idx.size);
    for (size_t i = 0; i < s.n_files; i++)
        info->bytes += (int64_t)s.files[i].map.size;
    info->shortest = s.n_seqs > 0 ? INT64_MAX : 0;
    for (int64_t i = 0; i < s.n_seqs; i++) {
        info->shortest = min_i64(info->shortest, source_seq_len(&s, i));
        info->longest = max_i64(info->longest, source_seq_len(&s, i));
    }
    int st = scan && s.n_tokens > 0 ? scan_ids(&s, info, e) : ST_OK;
    source_close(&s);
    return st;
}
