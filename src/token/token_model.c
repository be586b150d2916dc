/* What a reader has filled becomes a tokenizer: tables, checks, flags, and the
 * hash that names it. */
#include "token/token_int.h"

#include <stdlib.h>

void token_model_release(struct token_model *m)
{
    if (m == NULL)
        return;
    for (int i = 0; i < m->n_stages; i++) {
        regex_close(m->stage[i].regex);
        free(m->stage[i].string);
    }
    for (int i = 0; i < m->n_added; i++)
        free(m->added[i].text);
    free(m->added);
    free(m->files[0]);
    free(m->files[1]);
    norm_release(&m->norm);
    trie_release(&m->raw);
    trie_release(&m->normal);
    vocab_release(&m->vocab);
    free(m->classes);
    free(m->byte_pairs);
    free(m);
}

int token_model_add_added(struct token_model *m, const struct added_token *a, struct err *e)
{
    TRY(mem_grow((void **)&m->added, &m->cap_added, (size_t)m->n_added + 1, sizeof *m->added, e));
    struct added_token *to = &m->added[m->n_added];
    *to = *a;
    to->text = malloc(a->n + 1);
    if (to->text == NULL)
        return err_set(e, ST_NOMEM, "out of memory for an added token");
    memcpy(to->text, a->text, a->n);
    to->text[a->n] = '\0';
    m->n_added++;
    return ST_OK;
}

int token_model_add_pattern(struct token_model *m, const char *regex, struct err *e)
{
    if (m->n_stages == STAGES_MAX)
        return err_set(e, ST_UNSUPPORTED, "more than %d steps before BPE", STAGES_MAX);
    struct stage *s = &m->stage[m->n_stages];
    *s = (struct stage){.kind = STAGE_SPLIT, .behavior = SPLIT_ISOLATED, .known = split_find_pattern(regex)};
    if (s->known == NULL) {
        s->kind = STAGE_REGEX;
        TRY(regex_open(&s->regex, regex, e));
        s->string = strdup(regex);
        if (s->string == NULL) {
            regex_close(s->regex);
            return err_set(e, ST_NOMEM, "out of memory for a pattern");
        }
    }
    m->n_stages++;
    return ST_OK;
}

/* Added tokens take their place in the table; one that the model has too must have the same id
 * there. */
static int place_added(struct token_model *m, struct err *e)
{
    struct vocab *v = &m->vocab;
    for (int i = 0; i < m->n_added; i++) {
        struct added_token *a = &m->added[i];
        unsigned flags = T_ADDED | (a->special ? T_SPECIAL : 0);
        if (a->n == 0)
            return err_set(e, ST_CORRUPT, "added token %d is empty", a->id);
        if (a->id < 0 || a->id >= v->n || !(v->flags[a->id] & T_USED)) {
            TRY(vocab_add(v, a->id, a->text, a->n, flags, e));
        } else {
            struct token_span t = v->text[a->id];
            if (t.len != a->n || memcmp(v->bytes + t.off, a->text, a->n) != 0)
                return err_set(e, ST_CORRUPT, "added token '%.60s' has id %d, which is '%.*s' in the vocabulary",
                               a->text, a->id, (int)(t.len < 60 ? t.len : 60), (const char *)v->bytes + t.off);
            v->flags[a->id] |= (uint8_t)flags;
        }
    }
    return ST_OK;
}

/* Ids without a token are allowed, but a few entries may not cause large tables. */
static int check_holes(const struct vocab *v, struct err *e)
{
    int64_t used = 0;
    for (int32_t id = 0; id < v->n; id++)
        used += v->flags[id] & T_USED;
    if (used == 0)
        return err_set(e, ST_CORRUPT, "the vocabulary is empty");
    if (v->n > 2 * used + 65536)
        return err_set(e, ST_CORRUPT, "ids reach %d, but there are only %lld tokens", v->n - 1, (long long)used);
    return ST_OK;
}

/* Byte fallback: the tokens <0x00>..<0xFF> are bytes. */
static int find_byte_tokens(struct token_model *m, struct err *e)
{
    for (int b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b, name[8];
        snprintf((char *)name, sizeof name, "<0x%02X>", (unsigned)b);
        const uint8_t *p = m->byte_level ? &byte : name;
        size_t n = m->byte_level ? 1 : 6;
        m->byte_id[b] = vocab_find(&m->vocab, p, n, piece_hash(p, n));
        if (!m->byte_level && m->byte_id[b] >= 0 && m->byte_fallback)
            TRY(vocab_set_text(&m->vocab, m->byte_id[b], &byte, 1, e));
    }
    return ST_OK;
}

static const char space_mark[] = "\xe2\x96\x81"; /* U+2581 */

/* In vocabularies of characters U+2581 stands for a space. */
static int decode_space_marks(struct token_model *m, struct err *e)
{
    struct vocab *v = &m->vocab;
    uint8_t text[TOKEN_MAX_BYTES];
    m->cut_spaces = vocab_find(v, (const uint8_t *)space_mark, 3, piece_hash((const uint8_t *)space_mark, 3)) >= 0;
    for (int32_t id = 0; id < v->n; id++) {
        if (!(v->flags[id] & T_MODEL) || (v->flags[id] & T_ADDED))
            continue;
        const uint8_t *p = v->bytes + v->key[id].off;
        size_t n = v->key[id].len, at = 0;
        bool marks = false, other = false;
        for (size_t i = 0; i < n;) {
            bool mark = i + 3 <= n && memcmp(p + i, space_mark, 3) == 0;
            if (mark && other)
                m->cut_spaces = false;
            marks = marks || mark;
            other = other || !mark;
            text[at++] = mark ? ' ' : p[i];
            i += mark ? 3 : 1;
        }
        if (marks)
            TRY(vocab_set_text(v, id, text, at, e));
    }
    return ST_OK;
}

/* Does a piece equal to a token always become that token? Then an encoder can take it without
 * merging. */
static int find_whole_tokens(struct token_model *m, struct err *e)
{
    struct bpe_work w = {0};
    struct err why;
    int st = ST_OK;
    for (int32_t id = 0; id < m->vocab.n && st == ST_OK; id++) {
        struct token_span k = m->vocab.key[id];
        if (!(m->vocab.flags[id] & T_MODEL) || k.len == 0)
            continue;
        size_t n = 0;
        if (!m->ignore_merges)
            st = bpe_piece(m, &w, m->vocab.bytes + k.off, k.len, &n, &why);
        if (st == ST_INVALID) { /* a token that text cannot make */
            st = ST_OK;
            continue;
        }
        if (m->ignore_merges || (n == 1 && w.id[0] == id))
            m->vocab.flags[id] |= T_WHOLE;
    }
    bpe_work_release(&w);
    return st == ST_OK ? st : err_set(e, (enum status)st, "out of memory checking the vocabulary");
}

/* Most pairs that BPE asks for are two bytes: a table for those is small and needs no hash. */
static int make_byte_pairs(struct token_model *m, struct err *e)
{
    TRY(mem_array((void **)&m->byte_pairs, 65536, sizeof *m->byte_pairs, e));
    for (int i = 0; i < 65536; i++) {
        int32_t left = m->byte_id[i >> 8], right = m->byte_id[i & 255];
        const struct pair_slot *s = left >= 0 && right >= 0 ? vocab_pair(&m->vocab, left, right) : NULL;
        m->byte_pairs[i] = s != NULL ? (struct byte_pair){s->rank, s->id} : (struct byte_pair){UINT32_MAX, -1};
    }
    return ST_OK;
}

int token_model_finish(struct token_model *m, struct err *e)
{
    if (m->classes == NULL)
        TRY(classes_make(&m->classes, e));
    TRY(place_added(m, e));
    TRY(check_holes(&m->vocab, e));
    TRY(find_byte_tokens(m, e));
    if (m->byte_level)
        TRY(make_byte_pairs(m, e));
    else
        TRY(decode_space_marks(m, e));
    TRY(trie_make(&m->raw, m->added, m->n_added, false, &m->norm, e));
    TRY(trie_make(&m->normal, m->added, m->n_added, true, &m->norm, e));
    return find_whole_tokens(m, e);
}

static uint64_t hash_pairs(const struct vocab *v)
{
    uint64_t sum = 0; /* of hashes: the order in the table does not matter */
    for (uint64_t i = 0; v->pairs != NULL && i <= v->pair_mask; i++) {
        const struct pair_slot *s = &v->pairs[i];
        uint64_t words[2] = {s->pair, (uint64_t)s->rank << 32 | (uint32_t)s->id};
        if (s->pair != PAIR_NONE)
            sum += hash64(words, sizeof words, 1);
    }
    return sum;
}

uint64_t token_model_hash(const struct token_model *m)
{
    const struct vocab *v = &m->vocab;
    uint64_t h = hash_pairs(v);
    for (int32_t id = 0; id < v->n; id++) {
        int32_t word[3] = {id, v->flags[id] & (T_USED | T_MODEL | T_ADDED | T_SPECIAL), (int32_t)v->key[id].len};
        h = hash64(word, sizeof word, h);
        h = hash64(v->bytes + v->key[id].off, v->key[id].len, h);
    }
    for (int i = 0; i < m->n_added; i++) {
        const struct added_token *a = &m->added[i];
        int32_t word[] = {a->id, a->normalized, a->lstrip, a->rstrip, a->single_word};
        h = hash64(word, sizeof word, h);
    }
    for (int i = 0; i < m->norm.n; i++) {
        const struct norm_step *s = &m->norm.step[i];
        h = hash64(&s->kind, sizeof s->kind, h);
        h = s->from != NULL ? hash64(s->from, s->n_from, h) : h;
        h = s->to != NULL ? hash64(s->to, s->n_to, h) : h;
    }
    for (int i = 0; i < m->n_stages; i++) {
        const struct stage *s = &m->stage[i];
        int32_t word[] = {(int32_t)(s->kind == STAGE_REGEX ? STAGE_SPLIT : s->kind), (int32_t)s->behavior,
                          (int32_t)s->when, s->invert};
        h = hash64(word, sizeof word, h);
        h = hash64_str(s->known != NULL ? s->known->pattern : s->string != NULL ? s->string : "", h);
    }
    int32_t word[] = {m->byte_level, m->byte_fallback, m->fuse_unk, m->ignore_merges, m->unk};
    return hash64(word, sizeof word, h);
}
