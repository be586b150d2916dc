/* Text to ids: added tokens are cut out, the rest is normalised, split into pieces, and each piece
 * goes through BPE. Most pieces of natural text are tokens themselves or are found in the encoder's
 * cache. */
#include "token/token_int.h"

#include <stdlib.h>

enum { HOT_BITS = 14, HOT_KEY = 15, HOT_IDS = 3, CACHE_BITS = 17, CACHE_KEY = 26, CACHE_IDS = 8, PIECE_SLACK = 64 };

/* A short piece and its ids, in a table that fits into a core's own cache: it answers nine of ten
 * pieces of English. The key is the bytes, filled up with zeros, and their
 * number in the last one. */
struct hot_entry {
    uint64_t lo, hi; /* hi 0: empty */
    int32_t n_ids, ids[HOT_IDS];
};

/* One piece and its ids: a cache line. */
struct cache_entry {
    uint32_t tag;
    uint8_t n_key, n_ids; /* n_ids 0: empty */
    uint8_t key[CACHE_KEY];
    int32_t ids[CACHE_IDS];
};

struct token_encoder {
    const struct tokenizer *tok;
    const struct token_model *m;
    struct hot_entry *hot;     /* [1 << HOT_BITS] */
    struct cache_entry *cache; /* [1 << CACHE_BITS] */
    struct bpe_work work;
    struct buf normal, scratch;
    struct buf stage_text[STAGES_MAX];
    struct regex_match *match[STAGES_MAX];
    struct token_ids *out; /* of the call under way */
    bool first;            /* nothing of the text was passed to the stages yet */
    bool continues;        /* what comes next goes on after other text: no space is put in front */
};

int token_encoder_open(struct token_encoder **out, const struct tokenizer *t, struct err *e)
{
    struct token_encoder *c = *out = calloc(1, sizeof *c);
    if (c == NULL)
        return err_set(e, ST_NOMEM, "out of memory for an encoder");
    c->tok = t;
    c->m = t->model;
    buf_init(&c->normal, 0);
    buf_init(&c->scratch, 0);
    for (int i = 0; i < STAGES_MAX; i++)
        buf_init(&c->stage_text[i], 0);
    int st = ST_OK;
    if (c->m != NULL) {
        TRY_OUT(mem_aligned((void **)&c->hot, sizeof *c->hot << HOT_BITS, 64, e));
        memset(c->hot, 0, sizeof *c->hot << HOT_BITS);
        TRY_OUT(mem_array((void **)&c->cache, (size_t)1 << CACHE_BITS, sizeof *c->cache, e));
        for (int i = 0; i < c->m->n_stages; i++)
            if (c->m->stage[i].regex != NULL)
                TRY_OUT(regex_match_open(&c->match[i], c->m->stage[i].regex, e));
    }
out:
    if (st != ST_OK) {
        token_encoder_close(c);
        *out = NULL;
    }
    return st;
}

void token_encoder_close(struct token_encoder *c)
{
    if (c == NULL)
        return;
    for (int i = 0; i < STAGES_MAX; i++) {
        regex_match_close(c->match[i]);
        buf_release(&c->stage_text[i]);
    }
    bpe_work_release(&c->work);
    buf_release(&c->normal);
    buf_release(&c->scratch);
    free(c->hot);
    free(c->cache);
    free(c);
}

/* Room for n more ids; not mem_grow, which would clear memory that is filled at once. */
static int ids_reserve(struct token_ids *o, size_t n, struct err *e)
{
    if (o->cap - o->n >= n)
        return ST_OK;
    size_t cap = o->cap + o->cap / 2 + n + 1024;
    int32_t *ids = realloc(o->ids, cap * sizeof *ids);
    if (ids == NULL)
        return err_set(e, ST_NOMEM, "out of memory for %zu token ids", cap);
    o->ids = ids;
    o->cap = cap;
    return ST_OK;
}

static int put(struct token_ids *o, const int32_t *ids, size_t n, struct err *e)
{
    if (n == 0)
        return ST_OK;
    TRY(ids_reserve(o, n, e));
    memcpy(o->ids + o->n, ids, n * sizeof *ids);
    o->n += n;
    return ST_OK;
}

/* ---- One piece ------------------------------------------------------------------------------- */

static int merge_piece(struct token_encoder *c, const uint8_t *p, size_t len, uint64_t hash, struct cache_entry *slot,
                       struct err *e)
{
    size_t n;
    TRY(bpe_piece(c->m, &c->work, p, len, &n, e));
    if (len <= CACHE_KEY && n <= CACHE_IDS && n > 0) {
        slot->tag = (uint32_t)(hash >> 32);
        slot->n_key = (uint8_t)len;
        slot->n_ids = (uint8_t)n;
        memcpy(slot->key, p, len);
        memcpy(slot->ids, c->work.id, n * sizeof *slot->ids);
    }
    return put(c->out, c->work.id, n, e);
}

static int look_up_piece(struct token_encoder *c, const uint8_t *p, size_t len, struct err *e)
{
    const struct token_model *m = c->m;
    struct token_ids *o = c->out;
    if (o->cap - o->n < CACHE_IDS)
        TRY(ids_reserve(o, PIECE_SLACK, e));
    uint64_t hash = piece_hash(p, len);
    int32_t id = vocab_find(&m->vocab, p, len, hash);
    if (id >= 0 && (m->vocab.flags[id] & T_WHOLE)) {
        o->ids[o->n++] = id;
        return ST_OK;
    }
    struct cache_entry *slot = &c->cache[hash & ((1u << CACHE_BITS) - 1)];
    if (slot->tag == (uint32_t)(hash >> 32) && slot->n_key == len && slot->n_ids > 0 &&
        bytes_equal(slot->key, p, len)) {
        memcpy(o->ids + o->n, slot->ids, sizeof slot->ids);
        o->n += slot->n_ids;
        return ST_OK;
    }
    return merge_piece(c, p, len, hash, slot, e);
}

/* `end` is where readable bytes end: a short piece is read in two words if they are there. */
static inline int encode_piece(struct token_encoder *c, const uint8_t *p, size_t len, const uint8_t *end, struct err *e)
{
    if (len > HOT_KEY || end - p < 16)
        return look_up_piece(c, p, len, e);
    uint64_t lo, hi;
    memcpy(&lo, p, 8);
    memcpy(&hi, p + 8, 8);
    lo = len < 8 ? lo & ((UINT64_C(1) << 8 * len) - 1) : lo;
    hi = len > 8 ? hi & ((UINT64_C(1) << 8 * (len - 8)) - 1) : 0;
    hi |= (uint64_t)len << 56;
    uint64_t h = (lo ^ hi * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
    struct hot_entry *hot = &c->hot[h >> (64 - HOT_BITS)];
    struct token_ids *o = c->out;
    if (hot->lo == lo && hot->hi == hi) {
        if (o->cap - o->n < HOT_IDS)
            TRY(ids_reserve(o, PIECE_SLACK, e));
        memcpy(o->ids + o->n, hot->ids, sizeof hot->ids);
        o->n += (size_t)hot->n_ids;
        return ST_OK;
    }
    size_t before = o->n;
    TRY(look_up_piece(c, p, len, e));
    if (o->n - before > HOT_IDS)
        return ST_OK;
    *hot = (struct hot_entry){.lo = lo, .hi = hi, .n_ids = (int32_t)(o->n - before)};
    memcpy(hot->ids, o->ids + before, (o->n - before) * sizeof *hot->ids);
    return ST_OK;
}

/* A piece that leaves the stages. Vocabularies of characters have no splitter: they are cut before
 * U+2581, over which no token reaches. */
static int encode_pieces(struct token_encoder *c, const uint8_t *p, const uint8_t *end, struct err *e)
{
    static const uint8_t mark[3] = {0xE2, 0x96, 0x81};
    if (!c->m->cut_spaces)
        return encode_piece(c, p, (size_t)(end - p), end, e);
    while (p < end) {
        const uint8_t *q = p;
        while (end - q >= 3 && memcmp(q, mark, 3) == 0) /* marks may belong together: stay with the first */
            q += 3;
        const uint8_t *next = q < end ? memmem(q, (size_t)(end - q), mark, 3) : NULL;
        next = next != NULL ? next : end;
        TRY(encode_piece(c, p, (size_t)(next - p), end, e));
        p = next;
    }
    return ST_OK;
}

/* ---- Stages: each cuts the pieces of the one before ------------------------------------------ */

static int run_stage(struct token_encoder *c, int i, const uint8_t *p, const uint8_t *end, struct err *e);

/* The next match of a stage in [p, end); *from == end: none. */
static int next_match(struct token_encoder *c, int i, const uint8_t *text, const uint8_t *p, const uint8_t *end,
                      const uint8_t **from, const uint8_t **to, struct err *e)
{
    const struct stage *s = &c->m->stage[i];
    if (s->kind == STAGE_SPLIT) {
        size_t n = 0, step;
        while (p < end && (n = s->known->match(c->m->classes, p, end)) == 0) {
            (void)utf8_at(p, &step);
            p += step;
        }
        *from = p;
        *to = p + n;
    } else if (s->kind == STAGE_REGEX) {
        size_t a, b;
        TRY(regex_find(s->regex, c->match[i], text, (size_t)(end - text), (size_t)(p - text), &a, &b, e));
        *from = text + a;
        *to = text + b;
    } else {
        const uint8_t *hit = memmem(p, (size_t)(end - p), s->string, s->n_string);
        *from = hit != NULL ? hit : end;
        *to = hit != NULL ? hit + s->n_string : end;
    }
    return ST_OK;
}

/* Matches and gaps in order, joined as the behaviour says. `held` is where a piece that may still
 * grow begins. */
static int split_joining(struct token_encoder *c, int i, const uint8_t *text, const uint8_t *end, struct err *e)
{
    const struct stage *s = &c->m->stage[i];
    const bool previous = s->behavior == SPLIT_WITH_PREVIOUS;
    const uint8_t *held = text, *p = text;
    bool any = false, last_match = false; /* of the held piece */
    while (p < end) {
        const uint8_t *from, *to;
        TRY(next_match(c, i, text, p, end, &from, &to, e));
        for (int half = 0; half < 2; half++) { /* the gap, then the match */
            const uint8_t *stop = half == 0 ? from : to;
            bool match = (half == 1) != s->invert;
            if (stop == p)
                continue;
            bool join = any && (previous ? match && !last_match : !match && last_match);
            if (any && !join) {
                TRY(run_stage(c, i + 1, held, p, e));
                held = p;
            }
            any = true;
            last_match = match;
            p = stop;
        }
    }
    return held < end ? run_stage(c, i + 1, held, end, e) : ST_OK;
}

static int split_plainly(struct token_encoder *c, int i, const uint8_t *text, const uint8_t *end, struct err *e)
{
    const struct stage *s = &c->m->stage[i];
    const bool removed = s->behavior == SPLIT_REMOVED;
    for (const uint8_t *p = text, *from, *to; p < end; p = to) {
        TRY(next_match(c, i, text, p, end, &from, &to, e));
        if (from > p && !(removed && s->invert))
            TRY(run_stage(c, i + 1, p, from, e));
        if (to > from && !(removed && !s->invert))
            TRY(run_stage(c, i + 1, from, to, e));
    }
    return ST_OK;
}

static int add_space(struct token_encoder *c, int i, const uint8_t *p, const uint8_t *end, struct err *e)
{
    bool continues = c->continues;
    c->continues = false;
    if (*p == ' ' || continues)
        return run_stage(c, i + 1, p, end, e);
    struct buf *b = &c->stage_text[i];
    buf_clear(b);
    buf_add_n(b, " ", 1);
    buf_add_n(b, p, (size_t)(end - p));
    TRY(buf_check(b, e));
    return run_stage(c, i + 1, (const uint8_t *)b->text, (const uint8_t *)b->text + b->len, e);
}

/* Spaces become the replacement, and one is put in front where the scheme says so. */
static int metaspace(struct token_encoder *c, int i, const uint8_t *p, const uint8_t *end, struct err *e)
{
    const struct stage *s = &c->m->stage[i];
    struct buf *b = &c->stage_text[i];
    bool starts = *p == ' ' || ((size_t)(end - p) >= s->n_string && memcmp(p, s->string, s->n_string) == 0);
    buf_clear(b);
    if (!starts && !c->continues && (s->when == META_ALWAYS || (s->when == META_FIRST && c->first)))
        buf_add_n(b, s->string, s->n_string);
    while (p < end) {
        const uint8_t *space = memchr(p, ' ', (size_t)(end - p)), *stop = space != NULL ? space : end;
        buf_add_n(b, p, (size_t)(stop - p));
        if (space != NULL)
            buf_add_n(b, s->string, s->n_string);
        p = space != NULL ? space + 1 : end;
    }
    TRY(buf_check(b, e));
    c->first = c->continues = false;
    return run_stage(c, i + 1, (const uint8_t *)b->text, (const uint8_t *)b->text + b->len, e);
}

static int run_stage(struct token_encoder *c, int i, const uint8_t *p, const uint8_t *end, struct err *e)
{
    if (i == c->m->n_stages)
        return encode_pieces(c, p, end, e);
    const struct stage *s = &c->m->stage[i];
    if (s->kind == STAGE_SPACE)
        return add_space(c, i, p, end, e);
    if (s->kind == STAGE_METASPACE)
        return metaspace(c, i, p, end, e);
    if (s->behavior == SPLIT_WITH_PREVIOUS || s->behavior == SPLIT_WITH_NEXT)
        return split_joining(c, i, p, end, e);
    if (s->kind == STAGE_SPLIT && s->behavior == SPLIT_ISOLATED && i + 1 == c->m->n_stages && c->m->byte_level) {
        split_fn *match = s->known->match; /* the common case without the detour */
        while (p < end) {
            const uint8_t *from = p;
            size_t n = match(c->m->classes, p, end), step;
            while (n == 0 && p < end) {
                (void)utf8_at(p, &step);
                p += step;
                n = p < end && match(c->m->classes, p, end) > 0;
            }
            p = p == from ? p + n : p;
            TRY(encode_piece(c, from, (size_t)(p - from), end, e));
        }
        return ST_OK;
    }
    return split_plainly(c, i, p, end, e);
}

/* ---- The whole text -------------------------------------------------------------------------- */

static int encode_segment(struct token_encoder *c, const uint8_t *p, const uint8_t *end, struct err *e)
{
    if (p < end)
        TRY(run_stage(c, 0, p, end, e));
    c->first = c->continues = false;
    return ST_OK;
}

/* Added tokens of one trie are cut out of [p, end); what lies between goes to `next`. */
static int cut_added(struct token_encoder *c, const struct trie *t, const uint8_t *p, const uint8_t *end, bool special,
                     int (*next)(struct token_encoder *c, const uint8_t *p, const uint8_t *end, bool special,
                                 struct err *e),
                     struct err *e)
{
    const uint8_t *text = p, *from, *to;
    int which;
    while (trie_find(t, c->m->added, c->m->classes, text, p, end, special, &from, &to, &which)) {
        if (from > p)
            TRY(next(c, p, from, special, e));
        TRY(put(c->out, &c->m->added[which].id, 1, e));
        c->first = c->continues = false;
        p = to;
    }
    return p < end ? next(c, p, end, special, e) : ST_OK;
}

static int encode_between(struct token_encoder *c, const uint8_t *p, const uint8_t *end, bool special, struct err *e)
{
    (void)special;
    return encode_segment(c, p, end, e);
}

static int encode_normal(struct token_encoder *c, const uint8_t *p, const uint8_t *end, bool special, struct err *e)
{
    bool same = true;
    if (c->m->norm.n > 0)
        TRY(norm_apply(&c->m->norm, p, (size_t)(end - p), !c->continues, &c->normal, &c->scratch, &same, e));
    if (!same) {
        p = (const uint8_t *)c->normal.text;
        end = p + c->normal.len;
    }
    return cut_added(c, &c->m->normal, p, end, special, encode_between, e);
}

static int encode_bad_byte(struct token_encoder *c, uint8_t byte, struct err *e)
{
    int32_t id = c->m->byte_id[byte] >= 0 ? c->m->byte_id[byte] : c->m->unk;
    if (id < 0) {
        err_set(e, ST_INVALID, "byte 0x%02X is not valid UTF-8 and has no token", (unsigned)byte);
        return err_hint(e, "the tokenizer was trained without the full byte alphabet");
    }
    c->first = c->continues = false;
    return put(c->out, &id, 1, e);
}

static int encode_text(struct token_encoder *c, const uint8_t *p, const uint8_t *end, bool special, struct err *e)
{
    while (p < end) {
        const uint8_t *bad = utf8_check(p, end);
        if (bad > p)
            TRY(cut_added(c, &c->m->raw, p, bad, special, encode_normal, e));
        if (bad < end)
            TRY(encode_bad_byte(c, *bad++, e));
        p = bad;
    }
    return ST_OK;
}

int token_encode(struct token_encoder *c, const void *text, size_t n, unsigned flags, struct token_ids *out,
                 struct err *e)
{
    const uint8_t *p = text;
    const struct token_model *m = c->m;
    if (m == NULL) {
        TRY(ids_reserve(out, n, e));
        for (size_t i = 0; i < n; i++)
            out->ids[out->n++] = p[i];
        return ST_OK;
    }
    c->out = out;
    c->first = (flags & (TOKEN_LATER | TOKEN_CONTINUES)) == 0;
    c->continues = (flags & TOKEN_CONTINUES) != 0;
    if (flags & TOKEN_TEMPLATE)
        TRY(put(out, m->prefix, (size_t)m->n_prefix, e));
    if (n > 0)
        TRY(encode_text(c, p, p + n, (flags & TOKEN_SPECIAL) != 0, e));
    return flags & TOKEN_TEMPLATE ? put(out, m->suffix, (size_t)m->n_suffix, e) : ST_OK;
}

int tokenizer_encode(const struct tokenizer *t, const void *text, size_t n, unsigned flags, struct token_ids *out,
                     struct err *e)
{
    struct token_encoder *c;
    size_t before = out->n;
    TRY(token_encoder_open(&c, t, e));
    int st = token_encode(c, text, n, flags, out, e);
    token_encoder_close(c);
    if (st != ST_OK)
        out->n = before;
    return st;
}

int32_t tokenizer_next_special(const struct tokenizer *t, const char *text, size_t n, size_t *from, size_t *to)
{
    const struct token_model *m = t->model;
    const uint8_t *p = (const uint8_t *)text, *a, *b;
    int which;
    if (m == NULL || utf8_check(p, p + n) != p + n ||
        !trie_find(&m->raw, m->added, m->classes, p, p, p + n, true, &a, &b, &which))
        return -1;
    *from = (size_t)(a - p);
    *to = (size_t)(b - p);
    return m->added[which].id;
}

/* ---- Cutting long texts ---------------------------------------------------------------------- */

/* Class of the character that ends before p. Bytes that are not UTF-8 are pieces of their own: like
 * a sign. */
static uint8_t class_before(const uint8_t *classes, const uint8_t *text, const uint8_t *p)
{
    const uint8_t *q = p - 1;
    while (q > text && p - q < 4 && (*q & 0xC0) == 0x80)
        q--;
    size_t n = utf8_valid_len(q, p);
    return n == (size_t)(p - q) ? classes[utf8_at(q, &n)] : CH_SIGN;
}

/* All known patterns end a piece at these three places, whatever stands around them, and no normal
 * form joins the two sides: before a space after anything but white space; before a newline after a
 * letter or a number; after a newline that follows no white space and precedes a letter. */
size_t cut_between_pieces(const uint8_t *classes, const uint8_t *text, size_t n)
{
    for (size_t i = n; i-- > 2;) {
        const uint8_t *p = text + i;
        if (*p == ' ' && !(class_before(classes, text, p) & CH_SPACE))
            return i;
        if (*p == '\n' && (class_before(classes, text, p) & (CH_LETTER | CH_NUMBER)))
            return i;
        if (p[-1] != '\n' || (class_before(classes, text, p - 1) & CH_SPACE))
            continue;
        size_t len = utf8_valid_len(p, text + n);
        if (len > 0 && (classes[utf8_at(p, &len)] & CH_LETTER))
            return i;
    }
    return 0;
}

/* Added tokens could reach over such a place, or a pattern that is not known. */
static bool may_cut(const struct token_model *m)
{
    for (int i = 0; i < m->n_stages; i++)
        if (m->stage[i].kind != STAGE_SPLIT)
            return false;
    for (int i = 0; i < m->n_added; i++)
        if (m->added[i].lstrip || m->added[i].rstrip || memchr(m->added[i].text, ' ', m->added[i].n) != NULL ||
            memchr(m->added[i].text, '\n', m->added[i].n) != NULL)
            return false;
    return m->byte_level && m->n_stages > 0;
}

size_t token_cut(const struct tokenizer *t, const void *text, size_t n)
{
    if (t->model == NULL)
        return n;
    return may_cut(t->model) ? cut_between_pieces(t->model->classes, text, n) : 0;
}
