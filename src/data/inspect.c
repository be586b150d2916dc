/* What a data path is: kind, counts, and on request the range of its ids. */
#include "data/data_int.h"

#include <stdlib.h>
#include <string.h>

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

/* The beginning of the first sequence, decoded. */
static int read_sample(const struct source *s, const struct tokenizer *tok, struct data_info *info, struct err *e)
{
    int32_t ids[sizeof info->sample];
    int64_t n = s->n_seqs > 0 ? min_i64(source_seq_len(s, 0), countof(ids)) : 0;
    TRY(source_read(s, 0, 0, n, INT32_MAX, ids, e));
    for (int64_t i = 0; i < n && info->n_sample < sizeof info->sample; i++) {
        size_t len, room = sizeof info->sample - info->n_sample;
        struct err unknown;
        if (tokenizer_decode(tok, ids[i], info->sample + info->n_sample, room, &len, &unknown) != ST_OK) {
            info->n_sample = 0;
            snprintf(info->note, sizeof info->note,
                     "no text is shown: %.150s; name its tokenizer with --data.tokenizer", unknown.msg);
            return ST_OK;
        }
        info->n_sample += len < room ? len : room;
    }
    size_t skip = tokenizer_text_skip(tok);
    if (info->n_sample > skip && skip > 0 && info->sample[0] == ' ') {
        info->n_sample -= skip;
        memmove(info->sample, info->sample + skip, info->n_sample);
    }
    while (info->n_sample > 0 && info->n_sample == sizeof info->sample && (info->sample[info->n_sample - 1] & 0x80))
        info->n_sample--; /* no half character at the cut */
    return ST_OK;
}

/* The tokenizer that made a token file, if it can be had and is the same. */
static int add_sample(const struct source *s, const struct tokenizer *tok, struct data_info *info, struct err *e)
{
    struct token_manifest m = {0};
    struct tokenizer own = {.eod = -1};
    struct err why;
    char hash[17];
    if (s->kind == SOURCE_MEGATRON)
        TRY(token_manifest_read(s->path, &m, e));
    snprintf(info->tokenizer, sizeof info->tokenizer, "%s", m.name);
    snprintf(info->tokenizer_hash, sizeof info->tokenizer_hash, "%s", m.hash);
    info->text_bytes = m.bytes;
    snprintf(info->chat, sizeof info->chat, "%s", m.chat);
    snprintf(info->loss_roles, sizeof info->loss_roles, "%s", m.loss_roles);
    info->learned = m.learned;
    if (s->n_tokens == 0)
        return ST_OK;
    if (m.found && tok != NULL)
        TRY(token_manifest_check(&m, s->path, s->n_tokens, tok, e));
    if (tok == NULL) {
        if (tokenizer_open(&own, m.found ? m.name : "bytes", !m.found, &why) != ST_OK) {
            snprintf(info->note, sizeof info->note,
                     "no text is shown: %.150s; name the tokenizer with --data.tokenizer", why.msg);
            return ST_OK;
        }
        if (m.found && strcmp(m.hash, tokenizer_hash_text(&own, hash)) != 0) {
            snprintf(info->note, sizeof info->note,
                     "no text is shown: %.120s is not the tokenizer that made it any more", m.name);
            tokenizer_close(&own);
            return ST_OK;
        }
    }
    int st = read_sample(s, tok != NULL ? tok : &own, info, e);
    tokenizer_close(&own);
    return st;
}

int data_inspect(const char *path, bool scan, const struct tokenizer *tok, struct data_info *info, struct err *e)
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
    if (st == ST_OK)
        st = add_sample(&s, tok, info, e);
    source_close(&s);
    return st;
}
