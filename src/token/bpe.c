/* BPE of one piece: the adjacent pair of least rank is merged, the leftmost one first, until none
 * is left. */
#include "token/token_int.h"

#include <stdlib.h>

enum { SCAN_MAX = 64 }; /* up to so many symbols a scan for the least rank is faster than a heap */
#define RANK_NONE UINT32_MAX

void bpe_work_release(struct bpe_work *w)
{
    free(w->id);
    free(w->rank);
    free(w->made);
    free(w->next);
    free(w->prev);
    free(w->heap);
    *w = (struct bpe_work){0};
}

/* Not mem_grow: scratch need not be zeroed or kept. */
static int regrow(void **p, size_t n, size_t size, struct err *e)
{
    free(*p);
    *p = NULL;
    return mem_aligned(p, n * size, 16, e);
}

static int work_reserve(struct bpe_work *w, size_t n, struct err *e)
{
    if (n <= w->cap)
        return ST_OK;
    if (n > INT32_MAX / 4)
        return err_set(e, ST_UNSUPPORTED, "a piece of %zu bytes that no rule of the tokenizer cuts", n);
    size_t cap = n + n / 2 + 256;
    w->cap = 0;
    TRY(regrow((void **)&w->id, cap, sizeof *w->id, e));
    TRY(regrow((void **)&w->rank, cap, sizeof *w->rank, e));
    TRY(regrow((void **)&w->made, cap, sizeof *w->made, e));
    w->cap = cap;
    return ST_OK;
}

static int heap_reserve(struct bpe_work *w, struct err *e)
{
    if (w->cap_heap >= w->cap)
        return ST_OK;
    w->cap_heap = 0;
    TRY(regrow((void **)&w->next, w->cap, sizeof *w->next, e));
    TRY(regrow((void **)&w->prev, w->cap, sizeof *w->prev, e));
    TRY(regrow((void **)&w->heap, w->cap * 3, sizeof *w->heap, e)); /* n - 1 at first, two more per merge */
    w->cap_heap = w->cap;
    return ST_OK;
}

static inline void find_pair(const struct token_model *m, struct bpe_work *w, size_t i, size_t right)
{
    const struct pair_slot *s = vocab_pair(&m->vocab, w->id[i], w->id[right]);
    w->rank[i] = s != NULL ? s->rank : RANK_NONE;
    w->made[i] = s != NULL ? s->id : -1;
}

/* Ranks of all pairs of neighbours, before the first merge. */
static void find_pairs(const struct token_model *m, struct bpe_work *w, const uint8_t *p, size_t n)
{
    bool bytes = m->byte_level; /* symbol i is byte i */
    for (size_t i = 0; i + 1 < n; i++) {
        if (bytes) {
            struct byte_pair b = m->byte_pairs[p[i] << 8 | p[i + 1]];
            w->rank[i] = b.rank;
            w->made[i] = b.id;
        } else {
            find_pair(m, w, i, i + 1);
        }
    }
}

static size_t merge_by_scan(const struct token_model *m, struct bpe_work *w, size_t n)
{
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (w->rank[i] < w->rank[best])
                best = i;
        if (w->rank[best] == RANK_NONE)
            break;
        w->id[best] = w->made[best];
        n--;
        memmove(w->id + best + 1, w->id + best + 2, (n - best - 1) * sizeof *w->id);
        memmove(w->rank + best + 1, w->rank + best + 2, (n - best - 1) * sizeof *w->rank);
        memmove(w->made + best + 1, w->made + best + 2, (n - best - 1) * sizeof *w->made);
        if (best + 1 < n)
            find_pair(m, w, best, best + 1);
        if (best > 0)
            find_pair(m, w, best - 1, best);
    }
    return n;
}

static void heap_push(struct bpe_work *w, uint64_t x)
{
    size_t i = w->n_heap++;
    for (; i > 0 && w->heap[(i - 1) / 2] > x; i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = x;
}

static uint64_t heap_pop(struct bpe_work *w)
{
    uint64_t top = w->heap[0], x = w->heap[--w->n_heap];
    size_t i = 0, n = w->n_heap;
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        child += child + 1 < n && w->heap[child + 1] < w->heap[child];
        if (w->heap[child] >= x)
            break;
        w->heap[i] = w->heap[child];
    }
    w->heap[i] = x;
    return top;
}

static void offer(const struct token_model *m, struct bpe_work *w, size_t i)
{
    find_pair(m, w, i, (size_t)w->next[i]);
    if (w->rank[i] != RANK_NONE)
        heap_push(w, (uint64_t)w->rank[i] << 32 | i);
}

/* Symbols are a list linked by next and prev. An entry of the heap is out of date when its place is
 * gone (rank none) or begins another pair by now: merging only lengthens symbols, so an equal rank
 * means the same pair. */
static size_t merge_by_heap(const struct token_model *m, struct bpe_work *w, size_t n)
{
    w->n_heap = 0;
    for (size_t i = 0; i < n; i++) {
        w->next[i] = i + 1 < n ? (int32_t)i + 1 : -1;
        w->prev[i] = (int32_t)i - 1;
    }
    w->rank[n - 1] = RANK_NONE;
    for (size_t i = 0; i + 1 < n; i++)
        if (w->rank[i] != RANK_NONE)
            heap_push(w, (uint64_t)w->rank[i] << 32 | i);
    while (w->n_heap > 0) {
        uint64_t top = heap_pop(w);
        size_t i = (size_t)(top & UINT32_MAX);
        if (w->rank[i] != (uint32_t)(top >> 32))
            continue;
        int32_t gone = w->next[i], after = w->next[gone];
        w->id[i] = w->made[i];
        w->rank[gone] = RANK_NONE;
        w->rank[i] = RANK_NONE;
        w->next[i] = after;
        if (after >= 0) {
            w->prev[after] = (int32_t)i;
            offer(m, w, i);
        }
        if (w->prev[i] >= 0)
            offer(m, w, (size_t)w->prev[i]);
    }
    size_t count = 0;
    for (int32_t i = 0; i >= 0; i = w->next[i])
        w->id[count++] = w->id[i]; /* count <= i: what is read has not been overwritten */
    return count;
}

static int no_token(const uint8_t *p, size_t n, struct err *e)
{
    char hex[16] = "";
    for (size_t i = 0; i < n && i < 4; i++)
        snprintf(hex + 3 * i, sizeof hex - 3 * i, " %02X", p[i]);
    err_set(e, ST_INVALID, "the vocabulary has no token for the bytes%s, and no unknown token", hex);
    return err_hint(e, "the tokenizer was trained without the full byte alphabet");
}

/* Symbols of a vocabulary of characters: a character, or its bytes as <0xHH>, or
 * the unknown token. */
static int char_symbols(const struct token_model *m, struct bpe_work *w, const uint8_t *p, size_t len, size_t *n,
                        struct err *e)
{
    const uint8_t *end = p + len;
    bool after_unk = false;
    for (size_t k; p < end; p += k) {
        k = utf8_valid_len(p, end);
        k = k == 0 ? 1 : k;
        int32_t id = vocab_find(&m->vocab, p, k, piece_hash(p, k));
        if (id >= 0) {
            w->id[(*n)++] = id;
            after_unk = false;
            continue;
        }
        bool have = m->byte_fallback;
        for (size_t i = 0; i < k; i++)
            have = have && m->byte_id[p[i]] >= 0;
        for (size_t i = 0; i < k && have; i++)
            w->id[(*n)++] = m->byte_id[p[i]];
        if (!have && m->unk < 0)
            return no_token(p, k, e);
        if (!have && !(after_unk && m->fuse_unk))
            w->id[(*n)++] = m->unk;
        after_unk = !have;
    }
    return ST_OK;
}

int bpe_piece(const struct token_model *m, struct bpe_work *w, const uint8_t *p, size_t len, size_t *n, struct err *e)
{
    *n = 0;
    TRY(work_reserve(w, len, e));
    if (m->byte_level) {
        for (size_t i = 0; i < len; i++) {
            w->id[i] = m->byte_id[p[i]];
            if (w->id[i] < 0 && (w->id[i] = m->unk) < 0)
                return no_token(p + i, 1, e);
        }
        *n = len;
    } else {
        TRY(char_symbols(m, w, p, len, n, e));
    }
    find_pairs(m, w, p, *n);
    if (*n <= SCAN_MAX) {
        *n = merge_by_scan(m, w, *n);
        return ST_OK;
    }
    TRY(heap_reserve(w, e));
    *n = merge_by_heap(m, w, *n);
    return ST_OK;
}
