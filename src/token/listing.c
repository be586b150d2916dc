/* A vocabulary written out for other programs: tokens in the byte alphabet of GPT-2, merges in the order of their
 * ranks. */
#include "token/token_int.h"

#include <stdlib.h>

static const char *in_alphabet(struct arena *a, const uint8_t *bytes, size_t n)
{
    char *text = arena_alloc(a, 2 * n + 1), *p = text;
    for (size_t i = 0; text != NULL && i < n; i++)
        p += utf8_put(alphabet_char(bytes[i]), (uint8_t *)p);
    return text;
}

static int no_memory(struct err *e) { return err_set(e, ST_NOMEM, "out of memory for a vocabulary"); }

static int list_bytes(const struct tokenizer *t, struct token_listing *out, struct err *e)
{
    for (int i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        out->tokens[i] = in_alphabet(&out->memory, &byte, 1);
        out->types[i] = TOKEN_ORDINARY;
    }
    if (t->vocab > 256) {
        out->tokens[256] = "<|endoftext|>";
        out->types[256] = TOKEN_CONTROL;
    }
    out->pattern = "gpt2";
    for (int i = 0; i < t->vocab; i++)
        if (out->tokens[i] == NULL)
            return no_memory(e);
    return ST_OK;
}

static int list_tokens(const struct token_model *m, struct token_listing *out, struct err *e)
{
    const struct vocab *v = &m->vocab;
    for (int32_t i = 0; i < v->n; i++) {
        unsigned f = v->flags[i];
        bool named = (f & (T_ADDED | T_SPECIAL)) != 0;
        struct token_span s = named ? v->text[i] : v->key[i];
        if (!(f & T_USED))
            out->tokens[i] = arena_printf(&out->memory, "<|unused_%d|>", (int)i);
        else if (named)
            out->tokens[i] = arena_strndup(&out->memory, (const char *)v->bytes + s.off, s.len);
        else
            out->tokens[i] = in_alphabet(&out->memory, v->bytes + s.off, s.len);
        out->types[i] = !(f & T_USED)   ? TOKEN_UNUSED
                        : f & T_SPECIAL ? TOKEN_CONTROL
                        : named         ? TOKEN_ADDED
                                        : TOKEN_ORDINARY;
        if (out->tokens[i] == NULL)
            return no_memory(e);
    }
    return ST_OK;
}

static int by_rank(const void *a, const void *b)
{
    const struct pair_slot *x = *(const struct pair_slot *const *)a, *y = *(const struct pair_slot *const *)b;
    return x->rank != y->rank ? (x->rank < y->rank ? -1 : 1) : x->pair < y->pair ? -1 : x->pair > y->pair;
}

static int list_merges(const struct token_model *m, struct token_listing *out, struct err *e)
{
    const struct vocab *v = &m->vocab;
    const struct pair_slot **order = NULL;
    int64_t n = 0;
    TRY(mem_array((void **)&order, v->n_pairs + 1, sizeof *order, e));
    for (uint64_t i = 0; v->pairs != NULL && i <= v->pair_mask; i++)
        if (v->pairs[i].pair != PAIR_NONE && (size_t)n < v->n_pairs)
            order[n++] = &v->pairs[i];
    qsort(order, (size_t)n, sizeof *order, by_rank);
    out->merges = arena_alloc(&out->memory, (size_t)(n + 1) * sizeof *out->merges);
    int st = out->merges != NULL ? ST_OK : no_memory(e);
    for (int64_t i = 0; st == ST_OK && i < n; i++) {
        const char *left = out->tokens[order[i]->pair >> 32], *right = out->tokens[order[i]->pair & UINT32_MAX];
        out->merges[i] = arena_printf(&out->memory, "%s %s", left, right);
        if (out->merges[i] == NULL)
            st = no_memory(e);
    }
    out->n_merges = n;
    free(order);
    return st;
}

int token_listing_open(struct token_listing *out, const struct tokenizer *t, struct err *e)
{
    const struct token_model *m = t->model;
    *out = (struct token_listing){.n = t->vocab, .bos = -1};
    arena_init(&out->memory);
    out->tokens = arena_alloc(&out->memory, (size_t)t->vocab * sizeof *out->tokens);
    out->types = arena_alloc(&out->memory, (size_t)t->vocab * sizeof *out->types);
    if (out->tokens == NULL || out->types == NULL)
        return no_memory(e);
    if (m == NULL)
        return list_bytes(t, out, e);
    if (!m->byte_level)
        return err_set(e, ST_UNSUPPORTED, "the tokenizer joins characters, not bytes, and has no list of byte merges");
    for (int i = 0; i < m->n_stages; i++)
        if (m->stage[i].kind == STAGE_SPLIT && m->stage[i].known != NULL)
            out->pattern = m->stage[i].known->name;
    if (m->n_prefix > 0)
        out->bos = m->prefix[0];
    TRY(list_tokens(m, out, e));
    return list_merges(m, out, e);
}

void token_listing_close(struct token_listing *l) { arena_release(&l->memory); }
