/* Text to the ids that a sequence begins with. It knows the tokenizer and not the model, so that
 * readers can be fuzzed. */
#include "serve/serve_int.h"

#include <stdlib.h>
#include <string.h>

/* The ids before the text are all that a template means for a sequence that goes on; what it puts behind is dropped. */
int scorer_find_prefix(struct scorer *s, struct err *e)
{
    struct token_ids plain = {0}, whole = {0};
    int st = token_encode(s->encoder, "a", 1, 0, &plain, e);
    if (st == ST_OK)
        st = token_encode(s->encoder, "a", 1, TOKEN_TEMPLATE, &whole, e);
    for (size_t at = 0; st == ST_OK && at + plain.n <= whole.n && at <= SCORER_PREFIX; at++)
        if (memcmp(whole.ids + at, plain.ids, plain.n * sizeof *plain.ids) == 0) {
            memcpy(s->prefix, whole.ids, at * sizeof *whole.ids);
            s->n_prefix = (int)at;
            break;
        }
    free(plain.ids);
    free(whole.ids);
    return st;
}

int scorer_append(struct token_ids *to, const int32_t *ids, size_t n, struct err *e)
{
    if (n == 0)
        return ST_OK;
    TRY(mem_grow((void **)&to->ids, &to->cap, to->n + n, sizeof *to->ids, e));
    memcpy(to->ids + to->n, ids, n * sizeof *ids);
    to->n += n;
    return ST_OK;
}

int scorer_encode(struct scorer *s, const char *text, size_t n, bool prefix, struct token_ids *out, struct err *e)
{
    if (prefix)
        TRY(scorer_append(out, s->prefix, (size_t)s->n_prefix, e));
    return n > 0 ? token_encode(s->encoder, text, n, TOKEN_SPECIAL, out, e) : ST_OK;
}

int scorer_encode_chat(struct scorer *s, const struct chat_list *l, struct token_ids *out, struct err *e)
{
    struct chat_text text;
    int st = ST_OK;
    chat_text_init(&text);
    for (size_t i = 0; i < l->n && st == ST_OK; i++)
        st = chat_text_add(&text, &s->chat, &l->m[i], false, e);
    if (st == ST_OK)
        st = chat_text_ask(&text, &s->chat, e);
    if (st == ST_OK)
        st = chat_text_encode(&text, &s->tok, s->encoder, out, NULL, e);
    chat_text_release(&text);
    return st;
}

int scorer_check_ids(const struct scorer *s, const int32_t *ids, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= s->cfg->model.vocab)
            return err_set(e, ST_INVALID, "token %d does not exist: the model has a vocabulary of %lld", (int)ids[i],
                           (long long)s->cfg->model.vocab);
    return ST_OK;
}
