/* Training, second part: the most frequent pair of adjacent symbols becomes a new symbol, again and
 * again.
 *
 * The merges are those of Hugging Face's trainer, which decides ties by the smaller pair of ids.
 * Three of its properties are kept on purpose, as they show in the result: a token that two pairs
 * can make has one id; the count of a pair that was merged is not reset, so it counts on if the
 * pair appears anew through such an id; and each time a pair gains places, it enters the queue with
 * those places only. */
#include "token/train_int.h"

#include <omp.h>
#include <stdlib.h>

enum { ALPHABET = 256, REPORT_EVERY = 256 };

struct place_list {
    uint32_t *words;
    uint32_t n, cap;
};
struct pair_entry {
    uint64_t pair; /* PAIR_NONE: empty */
    int64_t count;
    struct place_list gained; /* in the present step */
};
struct queue_entry {
    int64_t count;
    uint64_t pair;
    struct place_list places;
};
struct words {
    uint32_t *symbols;
    uint64_t *at;    /* [n] first symbol */
    uint32_t *len;   /* [n] */
    uint64_t *count; /* [n] */
    size_t n;
};
struct merger {
    struct token_trainer *t;
    struct words w;
    struct pair_entry *pairs;
    size_t mask, n_pairs;
    struct queue_entry *queue;
    size_t n_queue, cap_queue;
    size_t *touched; /* slots of pairs that gained places in this step */
    size_t n_touched, cap_touched;
    struct vocab_slot *known; /* token bytes to id; tag and head are not used */
    size_t known_mask;
};

static inline uint64_t pair_of(uint32_t left, uint32_t right) { return (uint64_t)left << 32 | right; }

/* ---- Pairs ----------------------------------------------------------------------------------- */

static int pairs_grow(struct merger *m, struct err *e)
{
    struct pair_entry *old = m->pairs;
    size_t n_old = old != NULL ? m->mask + 1 : 0, size = n_old > 0 ? n_old * 2 : 1 << 16;
    m->pairs = NULL;
    int st = mem_array((void **)&m->pairs, size, sizeof *m->pairs, e);
    if (st != ST_OK) {
        m->pairs = old;
        return st;
    }
    m->mask = size - 1;
    for (size_t i = 0; i < size; i++)
        m->pairs[i].pair = PAIR_NONE;
    for (size_t i = 0; i < n_old; i++) {
        if (old[i].pair == PAIR_NONE)
            continue;
        size_t k = (size_t)pair_hash(old[i].pair) & m->mask;
        while (m->pairs[k].pair != PAIR_NONE)
            k = (k + 1) & m->mask;
        m->pairs[k] = old[i];
    }
    free(old);
    m->n_touched = 0; /* slots have moved */
    for (size_t i = 0; i < size; i++)
        if (m->pairs[i].gained.n > 0)
            m->touched[m->n_touched++] = i; /* as many as before: there is room */
    return ST_OK;
}

static int pair_at(struct merger *m, uint64_t pair, struct pair_entry **out, struct err *e)
{
    size_t i = (size_t)pair_hash(pair) & m->mask;
    while (m->pairs[i].pair != pair && m->pairs[i].pair != PAIR_NONE)
        i = (i + 1) & m->mask;
    if (m->pairs[i].pair == PAIR_NONE) {
        if (m->n_pairs * 2 > m->mask) {
            TRY(pairs_grow(m, e));
            return pair_at(m, pair, out, e);
        }
        m->pairs[i] = (struct pair_entry){.pair = pair};
        m->n_pairs++;
    }
    *out = &m->pairs[i];
    return ST_OK;
}

/* The pair is seen count more often in this word, which is noted once. */
static int pair_gain(struct merger *m, uint64_t pair, int64_t count, uint32_t word, struct err *e)
{
    struct pair_entry *p;
    TRY(pair_at(m, pair, &p, e));
    p->count += count;
    struct place_list *l = &p->gained;
    if (l->n > 0 && l->words[l->n - 1] == word)
        return ST_OK;
    if (l->n == 0) {
        TRY(mem_grow((void **)&m->touched, &m->cap_touched, m->n_touched + 1, sizeof *m->touched, e));
        m->touched[m->n_touched++] = (size_t)(p - m->pairs);
    }
    if (l->n == l->cap) {
        uint32_t cap = l->cap < 4 ? 4 : l->cap + l->cap / 2;
        uint32_t *words = realloc(l->words, cap * sizeof *words);
        if (words == NULL)
            return err_set(e, ST_NOMEM, "out of memory for the places of pairs");
        l->words = words;
        l->cap = cap;
    }
    l->words[l->n++] = word;
    return ST_OK;
}

static int pair_lose(struct merger *m, uint64_t pair, int64_t count, struct err *e)
{
    struct pair_entry *p;
    TRY(pair_at(m, pair, &p, e));
    p->count -= count;
    return ST_OK;
}

/* ---- Queue: most frequent first, then the smaller pair --------------------------------------- */

static inline bool before(const struct queue_entry *a, const struct queue_entry *b)
{
    return a->count != b->count ? a->count > b->count : a->pair < b->pair;
}

static void queue_up(struct merger *m, size_t i)
{
    struct queue_entry x = m->queue[i];
    for (; i > 0 && before(&x, &m->queue[(i - 1) / 2]); i = (i - 1) / 2)
        m->queue[i] = m->queue[(i - 1) / 2];
    m->queue[i] = x;
}

static void queue_down(struct merger *m, size_t i)
{
    struct queue_entry x = m->queue[i];
    for (size_t child; (child = 2 * i + 1) < m->n_queue; i = child) {
        child += child + 1 < m->n_queue && before(&m->queue[child + 1], &m->queue[child]);
        if (!before(&m->queue[child], &x))
            break;
        m->queue[i] = m->queue[child];
    }
    m->queue[i] = x;
}

/* Pairs that gained places in this step enter the queue with them. */
static int queue_gained(struct merger *m, struct err *e)
{
    for (size_t i = 0; i < m->n_touched; i++) {
        struct pair_entry *p = &m->pairs[m->touched[i]];
        if (p->count > 0) {
            TRY(mem_grow((void **)&m->queue, &m->cap_queue, m->n_queue + 1, sizeof *m->queue, e));
            m->queue[m->n_queue] = (struct queue_entry){.count = p->count, .pair = p->pair, .places = p->gained};
            queue_up(m, m->n_queue++);
        } else {
            free(p->gained.words);
        }
        p->gained = (struct place_list){0};
    }
    m->n_touched = 0;
    return ST_OK;
}

/* ---- Tokens ---------------------------------------------------------------------------------- */

static int token_push(struct token_trainer *t, const uint8_t *a, size_t n_a, const uint8_t *b, size_t n_b,
                      struct err *e)
{
    TRY(mem_grow((void **)&t->tokens, &t->cap_tokens, t->n_tokens + 1, sizeof *t->tokens, e));
    if (t->n_bytes + n_a + n_b > t->cap_bytes) {
        size_t cap = t->cap_bytes * 2 + n_a + n_b + 65536, off_a = a != NULL ? (size_t)(a - t->bytes) : 0,
               off_b = b != NULL ? (size_t)(b - t->bytes) : 0;
        uint8_t *bytes = realloc(t->bytes, cap);
        if (bytes == NULL)
            return err_set(e, ST_NOMEM, "out of memory for %zu tokens", t->n_tokens);
        t->bytes = bytes;
        t->cap_bytes = cap;
        a = a != NULL ? bytes + off_a : NULL;
        b = b != NULL ? bytes + off_b : NULL;
    }
    if (n_a > 0)
        memcpy(t->bytes + t->n_bytes, a, n_a);
    if (n_b > 0)
        memcpy(t->bytes + t->n_bytes + n_a, b, n_b);
    t->tokens[t->n_tokens++] = (struct token_span){(uint32_t)t->n_bytes, (uint32_t)(n_a + n_b)};
    t->n_bytes += n_a + n_b;
    return ST_OK;
}

/* The id of left and right together: a new one, unless another pair made the same bytes before. */
static int token_for(struct merger *m, uint32_t left, uint32_t right, uint32_t *id, struct err *e)
{
    struct token_trainer *t = m->t;
    TRY(token_push(t, t->bytes + t->tokens[left].off, t->tokens[left].len, t->bytes + t->tokens[right].off,
                   t->tokens[right].len, e));
    struct token_span s = t->tokens[t->n_tokens - 1];
    const uint8_t *p = t->bytes + s.off;
    size_t i = (size_t)piece_hash(p, s.len) & m->known_mask;
    for (; m->known[i].id >= 0; i = (i + 1) & m->known_mask) {
        struct token_span k = t->tokens[m->known[i].id];
        if (k.len == s.len && memcmp(t->bytes + k.off, p, s.len) == 0) {
            t->n_tokens--;
            t->n_bytes = s.off;
            *id = (uint32_t)m->known[i].id;
            return ST_OK;
        }
    }
    *id = (uint32_t)t->n_tokens - 1;
    m->known[i].id = (int32_t)*id;
    return ST_OK;
}

/* ---- Words ----------------------------------------------------------------------------------- */

static int make_words(struct merger *m, const uint32_t byte_id[ALPHABET], struct err *e)
{
    const struct piece_table *p = &m->t->pieces;
    struct words *w = &m->w;
    if (p->n > UINT32_MAX - 1)
        return err_set(e, ST_UNSUPPORTED, "%zu different pieces of text", p->n);
    TRY(mem_aligned((void **)&w->symbols, (p->n_bytes + 1) * sizeof *w->symbols, 64, e));
    TRY(mem_array((void **)&w->at, p->n, sizeof *w->at, e));
    TRY(mem_array((void **)&w->len, p->n, sizeof *w->len, e));
    TRY(mem_array((void **)&w->count, p->n, sizeof *w->count, e));
    uint64_t at = 0;
    for (size_t i = 0; i <= p->mask; i++) {
        const struct piece_slot *s = &p->slots[i];
        if (s->len == 0)
            continue;
        w->at[w->n] = at;
        w->len[w->n] = s->len;
        w->count[w->n++] = s->count;
        for (uint32_t k = 0; k < s->len; k++)
            w->symbols[at++] = byte_id[p->bytes[s->off + k]];
    }
    return ST_OK;
}

static int count_pairs(struct merger *m, struct err *e)
{
    for (size_t i = 0; i < m->w.n; i++) {
        const uint32_t *s = m->w.symbols + m->w.at[i];
        for (uint32_t k = 0; k + 1 < m->w.len[i]; k++)
            TRY(pair_gain(m, pair_of(s[k], s[k + 1]), (int64_t)m->w.count[i], (uint32_t)i, e));
    }
    return queue_gained(m, e);
}

static inline bool fits(const struct token_trainer *t, uint32_t a, uint32_t b)
{
    return t->o.max_token_bytes == 0 || (int64_t)t->tokens[a].len + t->tokens[b].len <= t->o.max_token_bytes;
}

/* Merges left to right in one word; counts follow the neighbours. */
static int merge_word(struct merger *m, uint32_t word, uint32_t left, uint32_t right, uint32_t id, struct err *e)
{
    uint32_t *s = m->w.symbols + m->w.at[word], n = m->w.len[word], to = 0;
    int64_t count = (int64_t)m->w.count[word];
    for (uint32_t i = 0; i < n; i++) {
        if (!(s[i] == left && i + 1 < n && s[i + 1] == right)) {
            s[to++] = s[i];
            continue;
        }
        if (to > 0) {
            TRY(pair_lose(m, pair_of(s[to - 1], left), count, e));
            if (fits(m->t, s[to - 1], id))
                TRY(pair_gain(m, pair_of(s[to - 1], id), count, word, e));
        }
        if (i + 2 < n) {
            TRY(pair_lose(m, pair_of(right, s[i + 2]), count, e));
            if (fits(m->t, s[i + 2], id))
                TRY(pair_gain(m, pair_of(id, s[i + 2]), count, word, e));
        }
        s[to++] = id;
        i++;
    }
    m->w.len[word] = to;
    return ST_OK;
}

/* ---- The whole ------------------------------------------------------------------------------- */

/* Takes the best pair out of the queue; false: none is left that is frequent enough. */
static bool next_pair(struct merger *m, struct queue_entry *top)
{
    while (m->n_queue > 0) {
        struct pair_entry *p;
        struct err none;
        if (pair_at(m, m->queue[0].pair, &p, &none) != ST_OK) /* it exists: nothing is allocated */
            return false;
        if (p->count != m->queue[0].count) {
            m->queue[0].count = p->count;
            queue_down(m, 0);
            continue;
        }
        *top = m->queue[0];
        if (top->count < 1 || top->count < m->t->o.min_frequency)
            return false;
        m->queue[0] = m->queue[--m->n_queue];
        if (m->n_queue > 0)
            queue_down(m, 0);
        return true;
    }
    return false;
}

static int merge_all(struct merger *m, void (*report)(void *ctx, int64_t merges), void *ctx, struct err *e)
{
    struct token_trainer *t = m->t;
    struct queue_entry top;
    while ((int64_t)t->n_tokens < t->o.vocab - t->n_special && next_pair(m, &top)) {
        uint32_t left = (uint32_t)(top.pair >> 32), right = (uint32_t)top.pair, id;
        int st = token_for(m, left, right, &id, e);
        if (st == ST_OK)
            st = mem_grow((void **)&t->merges, &t->cap_merges, t->n_merges + 1, sizeof *t->merges, e);
        if (st == ST_OK)
            t->merges[t->n_merges++] = (struct train_merge){.left = left, .right = right, .id = id};
        for (uint32_t i = 0; i < top.places.n && st == ST_OK; i++)
            st = merge_word(m, top.places.words[i], left, right, id, e);
        free(top.places.words);
        TRY(st);
        TRY(queue_gained(m, e));
        if (report != NULL && t->n_merges % REPORT_EVERY == 0)
            report(ctx, (int64_t)t->n_merges);
    }
    return ST_OK;
}

/* The alphabet has the order of its characters, as in GPT-2 and in Hugging Face's trainer. */
static int make_alphabet(struct merger *m, uint32_t byte_id[ALPHABET], struct err *e)
{
    uint32_t next = 0;
    for (uint32_t c = 0; c < 0x144; c++) {
        int byte = alphabet_byte(c);
        if (byte < 0)
            continue;
        uint8_t b = (uint8_t)byte;
        byte_id[b] = next++;
        TRY(token_push(m->t, NULL, 0, NULL, 0, e));
        TRY(mem_grow((void **)&m->t->bytes, &m->t->cap_bytes, m->t->n_bytes + 1, 1, e));
        m->t->bytes[m->t->n_bytes++] = b;
        m->t->tokens[m->t->n_tokens - 1].len = 1;
    }
    return ST_OK;
}

static int make_known(struct merger *m, struct err *e)
{
    size_t size = 1024;
    while (size < (size_t)m->t->o.vocab * 2)
        size *= 2;
    TRY(mem_array((void **)&m->known, size, sizeof *m->known, e));
    m->known_mask = size - 1;
    for (size_t i = 0; i < size; i++)
        m->known[i].id = -1;
    return ST_OK; /* single bytes are never made by a merge */
}

static int by_pair(const void *x, const void *y)
{
    const struct train_merge *a = x, *b = y;
    uint64_t pa = pair_of(a->left, a->right), pb = pair_of(b->left, b->right);
    return pa != pb ? (pa < pb ? -1 : 1) : a->order < b->order ? -1 : 1;
}

static int by_order(const void *x, const void *y)
{
    const struct train_merge *a = x, *b = y;
    return a->order < b->order ? -1 : a->order > b->order;
}

/* A pair that was merged twice counts where it was merged last. */
static void drop_repeats(struct token_trainer *t)
{
    size_t kept = 0;
    for (size_t i = 0; i < t->n_merges; i++)
        t->merges[i].order = (uint32_t)i;
    qsort(t->merges, t->n_merges, sizeof *t->merges, by_pair);
    for (size_t i = 0; i < t->n_merges; i++) {
        const struct train_merge *a = &t->merges[i], *b = a + 1;
        if (i + 1 == t->n_merges || a->left != b->left || a->right != b->right)
            t->merges[kept++] = *a;
    }
    t->n_merges = kept;
    qsort(t->merges, kept, sizeof *t->merges, by_order);
}

int token_trainer_run(struct token_trainer *t, void (*report)(void *ctx, int64_t merges), void *ctx, struct err *e)
{
    struct merger m = {.t = t};
    uint32_t byte_id[ALPHABET];
    int st;
    TRY_OUT(pairs_grow(&m, e));
    TRY_OUT(make_known(&m, e));
    TRY_OUT(make_alphabet(&m, byte_id, e));
    TRY_OUT(make_words(&m, byte_id, e));
    pieces_release(&t->pieces); /* the words replace them */
    TRY_OUT(pieces_init(&t->pieces, 64, e));
    TRY_OUT(count_pairs(&m, e));
    TRY_OUT(merge_all(&m, report, ctx, e));
    drop_repeats(t);
    t->stats.merges = (int64_t)t->n_merges;
    t->stats.tokens = (int64_t)t->n_tokens + t->n_special;
out:
    for (size_t i = 0; i < m.n_queue; i++)
        free(m.queue[i].places.words);
    for (size_t i = 0; m.pairs != NULL && i <= m.mask; i++)
        free(m.pairs[i].gained.words);
    free(m.queue);
    free(m.pairs);
    free(m.touched);
    free(m.known);
    free(m.w.symbols);
    free(m.w.at);
    free(m.w.len);
    free(m.w.count);
    return st;
}
