/* Added tokens: found in the text itself, before it is cut into pieces; leftmost first, then the
 * longest. */
#include "token/token_int.h"

#include <stdlib.h>

static int trie_child(struct trie *t, int32_t parent, uint8_t byte, int32_t *out, struct err *e)
{
    int32_t *link = parent < 0 ? &t->first[byte] : &t->nodes[parent].child;
    for (int32_t k = *link; k >= 0; k = t->nodes[k].next) {
        if (t->nodes[k].byte == byte) {
            *out = k;
            return ST_OK;
        }
    }
    TRY(mem_grow((void **)&t->nodes, &t->cap, t->n + 1, sizeof *t->nodes, e));
    link = parent < 0 ? &t->first[byte] : &t->nodes[parent].child; /* the array may have moved */
    t->nodes[t->n] = (struct trie_node){.token = -1, .child = -1, .next = *link, .byte = byte};
    *link = *out = (int32_t)t->n++;
    return ST_OK;
}

static int trie_add(struct trie *t, const struct added_token *tokens, const uint8_t *text, size_t n, int which,
                    struct err *e)
{
    int32_t node = -1;
    for (size_t i = 0; i < n; i++)
        TRY(trie_child(t, node, text[i], &node, e));
    if (n > 0) {
        int old = t->nodes[node].token;
        if (old >= 0 && tokens[old].id != tokens[which].id)
            return err_set(e, ST_CORRUPT, "added token '%.60s' occurs twice, as %d and %d", tokens[which].text,
                           tokens[old].id, tokens[which].id);
        t->nodes[node].token = which;
        t->only_byte = t->empty || t->only_byte == text[0] ? text[0] : -1;
        t->empty = false;
    }
    return ST_OK;
}

int trie_make(struct trie *t, const struct added_token *tokens, int n, bool normalized, const struct norm *norm,
              struct err *e)
{
    struct buf text, scratch;
    *t = (struct trie){.only_byte = -1, .empty = true};
    for (int i = 0; i < 256; i++)
        t->first[i] = -1;
    buf_init(&text, 0);
    buf_init(&scratch, 0);
    int st = ST_OK;
    for (int i = 0; i < n && st == ST_OK; i++) {
        if (tokens[i].normalized != normalized)
            continue;
        bool same = true;
        const uint8_t *p = (const uint8_t *)tokens[i].text;
        if (normalized)
            st = norm_apply(norm, p, tokens[i].n, true, &text, &scratch, &same, e);
        if (st == ST_OK)
            st = same ? trie_add(t, tokens, p, tokens[i].n, i, e)
                      : trie_add(t, tokens, (const uint8_t *)text.text, text.len, i, e);
    }
    buf_release(&text);
    buf_release(&scratch);
    return st;
}

void trie_release(struct trie *t)
{
    free(t->nodes);
    *t = (struct trie){.only_byte = -1, .empty = true};
}

/* The longest token at p that is asked for; -1: none. */
static int longest_at(const struct trie *t, const struct added_token *tokens, const uint8_t *p, const uint8_t *end,
                      bool special, size_t *len)
{
    int found = -1;
    int32_t node = t->first[*p];
    for (size_t i = 1; node >= 0; i++) {
        int token = t->nodes[node].token;
        if (token >= 0 && (special || !tokens[token].special)) {
            found = token;
            *len = i;
        }
        if (p + i >= end)
            break;
        node = t->nodes[node].child;
        while (node >= 0 && t->nodes[node].byte != p[i])
            node = t->nodes[node].next;
    }
    return found;
}

static const uint8_t *back_one(const uint8_t *start, const uint8_t *p)
{
    do {
        p--;
    } while (p > start && (*p & 0xC0) == 0x80);
    return p;
}

static bool word_at(const uint8_t *classes, const uint8_t *p)
{
    size_t n;
    return (classes[utf8_at(p, &n)] & (CH_LETTER | CH_NUMBER | CH_MARK)) || *p == '_';
}

bool trie_find(const struct trie *t, const struct added_token *tokens, const uint8_t *classes, const uint8_t *text,
               const uint8_t *p, const uint8_t *end, bool special, const uint8_t **from, const uint8_t **to, int *which)
{
    const uint8_t *floor = p; /* white space before it belongs to an earlier token */
    while (!t->empty && p < end) {
        if (t->only_byte >= 0) {
            p = memchr(p, t->only_byte, (size_t)(end - p));
            if (p == NULL)
                return false;
        } else if (t->first[*p] < 0) {
            p++;
            continue;
        }
        size_t len = 0, n;
        int found = longest_at(t, tokens, p, end, special, &len);
        if (found < 0) {
            p++;
            continue;
        }
        const struct added_token *a = &tokens[found];
        const uint8_t *stop = p + len;
        if (a->single_word &&
            ((p > text && word_at(classes, back_one(text, p))) || (stop < end && word_at(classes, stop)))) {
            p = stop;
            continue;
        }
        for (const uint8_t *q; a->lstrip && p > floor; p = q) {
            q = back_one(floor, p);
            if (!(classes[utf8_at(q, &n)] & CH_SPACE))
                break;
        }
        for (; a->rstrip && stop < end && (classes[utf8_at(stop, &n)] & CH_SPACE); stop += n)
            ;
        *from = p;
        *to = stop;
        *which = found;
        return true;
    }
    return false;
}
