/* Training, first part: text to different pieces and their counts. Texts form groups of a fixed
 * size, groups are counted in parallel, and their tables are added up in order: the number of
 * threads does not show in the result. */
#include "token/train_int.h"

#include <omp.h>
#include <stdlib.h>

enum { GROUP_BYTES = 4 << 20, FIRST_SLOTS = 1 << 16, PIECE_MAX = 1 << 20 };

int pieces_init(struct piece_table *t, size_t slots, struct err *e)
{
    *t = (struct piece_table){.mask = slots - 1};
    return mem_array((void **)&t->slots, slots, sizeof *t->slots, e);
}

void pieces_release(struct piece_table *t)
{
    free(t->slots);
    free(t->bytes);
    *t = (struct piece_table){0};
}

static struct piece_slot *find_slot(const struct piece_table *t, const uint8_t *p, size_t len, uint64_t hash)
{
    size_t i = (size_t)hash & t->mask;
    while (t->slots[i].len != 0 &&
           !(t->slots[i].hash == hash && t->slots[i].len == len && bytes_equal(t->bytes + t->slots[i].off, p, len)))
        i = (i + 1) & t->mask;
    return &t->slots[i];
}

static int grow_slots(struct piece_table *t, struct err *e)
{
    struct piece_slot *old = t->slots;
    size_t n_old = t->mask + 1;
    t->slots = NULL;
    int st = mem_array((void **)&t->slots, n_old * 2, sizeof *t->slots, e);
    if (st != ST_OK) {
        t->slots = old;
        return st;
    }
    t->mask = n_old * 2 - 1;
    for (size_t i = 0; i < n_old; i++) {
        if (old[i].len == 0)
            continue;
        size_t k = (size_t)old[i].hash & t->mask;
        while (t->slots[k].len != 0)
            k = (k + 1) & t->mask;
        t->slots[k] = old[i];
    }
    free(old);
    return ST_OK;
}

int pieces_add(struct piece_table *t, const uint8_t *p, size_t len, uint64_t hash, uint64_t count, struct err *e)
{
    struct piece_slot *s = find_slot(t, p, len, hash);
    if (s->len != 0) {
        s->count += count;
        return ST_OK;
    }
    if (t->n * 2 > t->mask) {
        TRY(grow_slots(t, e));
        s = find_slot(t, p, len, hash);
    }
    if (t->n_bytes + len > t->cap_bytes) {
        size_t cap = t->cap_bytes * 2 + len + 65536;
        uint8_t *bytes = realloc(t->bytes, cap);
        if (bytes == NULL)
            return err_set(e, ST_NOMEM, "out of memory for %zu pieces of text", t->n);
        t->bytes = bytes;
        t->cap_bytes = cap;
    }
    memcpy(t->bytes + t->n_bytes, p, len);
    *s = (struct piece_slot){.hash = hash, .off = t->n_bytes, .len = (uint32_t)len, .count = count};
    t->n_bytes += len;
    t->n++;
    return ST_OK;
}

int pieces_prune(struct piece_table *t, int64_t *dropped, struct err *e)
{
    struct piece_table kept;
    TRY(pieces_init(&kept, t->mask + 1, e));
    int st = ST_OK;
    for (size_t i = 0; i <= t->mask && st == ST_OK; i++) {
        const struct piece_slot *s = &t->slots[i];
        if (s->len != 0 && s->count > 1)
            st = pieces_add(&kept, t->bytes + s->off, s->len, s->hash, s->count, e);
        else if (s->len != 0)
            ++*dropped;
    }
    if (st != ST_OK) {
        pieces_release(&kept);
        return st;
    }
    pieces_release(t);
    *t = kept;
    return ST_OK;
}

/* ---- One text -------------------------------------------------------------------------------- */

struct counter {
    const struct token_trainer *t;
    struct regex_match *match; /* NULL for known patterns */
    struct piece_table pieces;
    int64_t n;
};

static int count_piece(struct counter *c, const uint8_t *p, size_t len, struct err *e)
{
    c->n++;
    if (len == 1 || len > PIECE_MAX) /* nothing to merge in one byte; endless pieces are not words */
        return ST_OK;
    return pieces_add(&c->pieces, p, len, piece_hash(p, len), 1, e);
}

static int count_known(struct counter *c, const uint8_t *p, const uint8_t *end, struct err *e)
{
    split_fn *match = c->t->known->match;
    const uint8_t *gap = p;
    while (p < end) {
        size_t n = match(c->t->classes, p, end), step;
        if (n == 0) {
            (void)utf8_at(p, &step);
            p += step;
            continue;
        }
        if (gap < p)
            TRY(count_piece(c, gap, (size_t)(p - gap), e));
        TRY(count_piece(c, p, n, e));
        gap = p += n;
    }
    return gap < p ? count_piece(c, gap, (size_t)(p - gap), e) : ST_OK;
}

static int count_regex(struct counter *c, const uint8_t *text, size_t n, struct err *e)
{
    for (size_t at = 0, from, to; at < n; at = to) {
        TRY(regex_find(c->t->regex, c->match, text, n, at, &from, &to, e));
        if (from > at)
            TRY(count_piece(c, text + at, from - at, e));
        if (to > from)
            TRY(count_piece(c, text + from, to - from, e));
    }
    return ST_OK;
}

/* Bytes that are not UTF-8 cut the text and are not counted. */
static int count_text(struct counter *c, const uint8_t *p, size_t n, struct err *e)
{
    const uint8_t *end = p + n;
    while (p < end) {
        const uint8_t *bad = utf8_check(p, end);
        if (bad > p)
            TRY(c->t->known != NULL ? count_known(c, p, bad, e) : count_regex(c, p, (size_t)(bad - p), e));
        p = bad + (bad < end);
    }
    return ST_OK;
}

size_t token_trainer_cut(const struct token_trainer *t, const void *text, size_t n)
{
    const uint8_t *p = text;
    size_t cut = cut_between_pieces(t->classes, p, n);
    for (size_t back = 0; cut == 0 && back < 4 && back + 1 < n; back++)
        if ((p[n - 1 - back] & 0xC0) != 0x80)
            cut = n - 1 - back;
    return cut > 0 ? cut : n;
}

/* ---- Many texts ------------------------------------------------------------------------------ */

struct group {
    int first, n;
    struct counter c;
    struct err e;
    int st;
};

static void count_group(struct group *g, const struct token_text *texts)
{
    g->st = pieces_init(&g->c.pieces, FIRST_SLOTS, &g->e);
    if (g->st == ST_OK && g->c.t->regex != NULL)
        g->st = regex_match_open(&g->c.match, g->c.t->regex, &g->e);
    for (int i = 0; i < g->n && g->st == ST_OK; i++)
        g->st = count_text(&g->c, texts[g->first + i].bytes, texts[g->first + i].n, &g->e);
    regex_match_close(g->c.match);
    g->c.match = NULL;
}

static int add_group(struct token_trainer *t, struct group *g, struct err *e)
{
    if (g->st != ST_OK) {
        *e = g->e;
        return g->st;
    }
    for (size_t i = 0; i <= g->c.pieces.mask; i++) {
        const struct piece_slot *s = &g->c.pieces.slots[i];
        if (s->len != 0)
            TRY(pieces_add(&t->pieces, g->c.pieces.bytes + s->off, s->len, s->hash, s->count, e));
    }
    t->stats.pieces += g->c.n;
    if (t->o.max_pieces > 0 && (int64_t)t->pieces.n > t->o.max_pieces)
        TRY(pieces_prune(&t->pieces, &t->stats.dropped, e));
    return ST_OK;
}

static int make_groups(struct group *groups, const struct token_trainer *t, const struct token_text *texts, int n)
{
    int n_groups = 0;
    size_t bytes = 0;
    for (int i = 0; i < n; i++) {
        if (n_groups == 0 || bytes >= GROUP_BYTES) {
            groups[n_groups++] = (struct group){.first = i, .c.t = t};
            bytes = 0;
        }
        groups[n_groups - 1].n++;
        bytes += texts[i].n;
    }
    return n_groups;
}

int token_trainer_add(struct token_trainer *t, const struct token_text *texts, int n, struct err *e)
{
    struct group *groups;
    TRY(mem_array((void **)&groups, (size_t)n, sizeof *groups, e));
    int n_groups = make_groups(groups, t, texts, n);
#pragma omp parallel for schedule(dynamic, 1) num_threads(t->o.threads)
    for (int i = 0; i < n_groups; i++)
        count_group(&groups[i], texts);
    int st = ST_OK;
    for (int i = 0; i < n_groups; i++) {
        if (st == ST_OK)
            st = add_group(t, &groups[i], e);
        pieces_release(&groups[i].c.pieces);
    }
    for (int i = 0; i < n; i++)
        t->stats.bytes += (int64_t)texts[i].n;
    t->stats.unique = (int64_t)t->pieces.n;
    free(groups);
    return st;
}
