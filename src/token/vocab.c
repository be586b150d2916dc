/* The vocabulary: bytes of each id, a hash from bytes to id, and a hash from pairs of ids to their
 * merge. */
#include "token/token_int.h"

#include <stdlib.h>

void vocab_release(struct vocab *v)
{
    free(v->key);
    free(v->text);
    free(v->flags);
    free(v->bytes);
    free(v->slots);
    free(v->pairs);
    *v = (struct vocab){0};
}

static int keep_bytes(struct vocab *v, const void *bytes, size_t n, struct token_span *at, struct err *e)
{
    if (n > TOKEN_MAX_BYTES || v->n_bytes + n > UINT32_MAX)
        return err_set(e, ST_CORRUPT, "a token of %zu bytes; at most %d are supported", n, TOKEN_MAX_BYTES);
    TRY(mem_grow((void **)&v->bytes, &v->cap_bytes, v->n_bytes + n + 1, 1, e));
    if (n > 0)
        memcpy(v->bytes + v->n_bytes, bytes, n);
    *at = (struct token_span){(uint32_t)v->n_bytes, (uint32_t)n};
    v->n_bytes += n;
    return ST_OK;
}

int vocab_add(struct vocab *v, int64_t id, const void *key, size_t n, unsigned flags, struct err *e)
{
    if (id < 0 || id >= TOKEN_MAX_ID)
        return err_set(e, ST_CORRUPT, "token id %lld is outside 0..%d", (long long)id, TOKEN_MAX_ID - 1);
    size_t need = (size_t)id + 1;
    TRY(mem_grow((void **)&v->key, &v->cap_key, need, sizeof *v->key, e));
    TRY(mem_grow((void **)&v->text, &v->cap_text, need, sizeof *v->text, e));
    TRY(mem_grow((void **)&v->flags, &v->cap_flags, need, 1, e));
    if (v->flags[id] & T_USED)
        return err_set(e, ST_CORRUPT, "id %lld belongs to two tokens", (long long)id);
    TRY(keep_bytes(v, key, n, &v->key[id], e));
    v->text[id] = v->key[id];
    v->flags[id] = (uint8_t)(flags | T_USED);
    if (id >= v->n)
        v->n = (int32_t)id + 1;
    return ST_OK;
}

int vocab_set_text(struct vocab *v, int32_t id, const void *text, size_t n, struct err *e)
{
    return keep_bytes(v, text, n, &v->text[id], e);
}

static size_t table_size(size_t n)
{
    size_t size = 64;
    while (size < n * 2)
        size *= 2;
    return size;
}

int vocab_index(struct vocab *v, struct err *e)
{
    size_t n_model = 0;
    for (int32_t id = 0; id < v->n; id++)
        n_model += (v->flags[id] & T_MODEL) != 0;
    size_t size = table_size(n_model);
    free(v->slots);
    v->slots = NULL;
    TRY(mem_array((void **)&v->slots, size, sizeof *v->slots, e));
    v->slot_mask = (uint32_t)size - 1;
    for (size_t i = 0; i < size; i++)
        v->slots[i].id = -1;
    for (int32_t id = 0; id < v->n; id++) {
        if (!(v->flags[id] & T_MODEL))
            continue;
        const uint8_t *p = v->bytes + v->key[id].off;
        size_t n = v->key[id].len;
        uint64_t hash = piece_hash(p, n);
        int32_t other = vocab_find(v, p, n, hash);
        if (other >= 0)
            return err_set(e, ST_CORRUPT, "ids %d and %d are the same %zu bytes", other, id, n);
        uint32_t i = (uint32_t)hash & v->slot_mask;
        while (v->slots[i].id >= 0)
            i = (i + 1) & v->slot_mask;
        struct vocab_slot *s = &v->slots[i];
        *s = (struct vocab_slot){.tag = (uint32_t)(hash >> 32), .id = id, .len = (uint32_t)n};
        if (n <= sizeof s->head)
            memcpy(s->head, p, n);
    }
    return ST_OK;
}

int vocab_pairs_init(struct vocab *v, size_t n_pairs, struct err *e)
{
    size_t size = table_size(n_pairs);
    free(v->pairs);
    v->pairs = NULL;
    TRY(mem_array((void **)&v->pairs, size, sizeof *v->pairs, e));
    v->pair_mask = size - 1;
    v->n_pairs = 0;
    for (size_t i = 0; i < size; i++)
        v->pairs[i].pair = PAIR_NONE;
    return ST_OK;
}

void vocab_add_pair(struct vocab *v, int32_t left, int32_t right, uint32_t rank, int32_t id)
{
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint64_t i = pair_hash(pair) & v->pair_mask;
    while (v->pairs[i].pair != PAIR_NONE && v->pairs[i].pair != pair)
        i = (i + 1) & v->pair_mask;
    v->n_pairs += v->pairs[i].pair == PAIR_NONE;
    v->pairs[i] = (struct pair_slot){.pair = pair, .rank = rank, .id = id};
}

/* Calls of one pass: count first, so that the table gets its size, then fill. */
static size_t cut_tokens(struct vocab *v, bool fill)
{
    size_t n = 0;
    for (int32_t id = 0; id < v->n; id++) {
        if (!(v->flags[id] & T_MODEL))
            continue;
        const uint8_t *p = v->bytes + v->key[id].off;
        size_t len = v->key[id].len;
        for (size_t cut = 1; cut < len; cut++) {
            int32_t left = vocab_find(v, p, cut, piece_hash(p, cut));
            if (left < 0)
                continue;
            int32_t right = vocab_find(v, p + cut, len - cut, piece_hash(p + cut, len - cut));
            if (right < 0)
                continue;
            n++;
            if (fill)
                vocab_add_pair(v, left, right, (uint32_t)id, id);
        }
    }
    return n;
}

int vocab_pairs_of_ranks(struct vocab *v, struct err *e)
{
    TRY(vocab_pairs_init(v, cut_tokens(v, false), e));
    (void)cut_tokens(v, true);
    return ST_OK;
}
