/* A conversation in writing: pieces of text by the template and of messages, and their ids. */
#include "token/chat_int.h"
#include "token/token_int.h"

#include <stdlib.h>

void chat_text_init(struct chat_text *c)
{
    *c = (struct chat_text){.n_messages = 0};
    buf_init(&c->text, 0);
}

void chat_text_release(struct chat_text *c)
{
    buf_release(&c->text);
    free(c->pieces);
    *c = (struct chat_text){.n_messages = 0};
}

void chat_text_clear(struct chat_text *c)
{
    buf_clear(&c->text);
    c->n_pieces = c->done = c->done_bytes = 0;
    c->system = NULL;
    c->n_messages = 0;
    c->later = c->continues = false;
}

/* ---- Pieces ---------------------------------------------------------------------------------- */

static int add_piece(struct chat_text *c, const char *text, size_t n, bool literal, bool loss, struct err *e)
{
    if (n == 0)
        return ST_OK;
    TRY(mem_grow((void **)&c->pieces, &c->cap_pieces, c->n_pieces + 1, sizeof *c->pieces, e));
    c->pieces[c->n_pieces++] = (struct chat_piece){.n = n, .literal = literal, .loss = loss};
    buf_add_n(&c->text, text, n);
    return buf_check(&c->text, e);
}

/* What Python's str.strip drops. */
static bool is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

static void strip(const char **text, size_t *n)
{
    const uint8_t *p = (const uint8_t *)*text, *end = p + *n;
    size_t len;
    while (p < end && (len = utf8_valid_len(p, end)) > 0 && is_space(utf8_at(p, &len)))
        p += len;
    while (end > p) {
        const uint8_t *q = end - 1;
        while (q > p && end - q < 4 && (*q & 0xC0) == 0x80)
            q--;
        len = utf8_valid_len(q, end);
        if (len != (size_t)(end - q) || !is_space(utf8_at(q, &len)))
            break;
        end = q;
    }
    *text = (const char *)p;
    *n = (size_t)(end - p);
}

static int add_content(struct chat_text *c, const struct chat_template *t, const char *text, size_t n, bool loss,
                       struct err *e)
{
    if (t->trim)
        strip(&text, &n);
    return add_piece(c, text, n, false, loss, e);
}

/* What follows a message: learned as far as what ends the turn. */
static int add_ending(struct chat_text *c, const struct chat_template *t, const char *text, bool loss, struct err *e)
{
    const char *stop = strstr(text, t->stop);
    size_t n = stop != NULL ? (size_t)(stop - text) + strlen(t->stop) : 0;
    TRY(add_piece(c, text, n, true, loss, e));
    return add_piece(c, text + n, strlen(text + n), true, false, e);
}

static int add_turn(struct chat_text *c, const struct chat_template *t, const char *form, const struct chat_message *m,
                    bool loss, struct err *e)
{
    const char *content = strstr(form, "{content}"), *system = strstr(form, "{system}");
    if (system != NULL) { /* in front of the content: chat_text_add chose this form */
        TRY(add_piece(c, form, (size_t)(system - form), true, false, e));
        TRY(add_content(c, t, c->system->text, c->system->n, false, e));
        form = system + strlen("{system}");
    }
    size_t before = (size_t)(content - form), quiet = m->role == CHAT_ASSISTANT ? strlen(t->generation) : before;
    TRY(add_piece(c, form, quiet, true, false, e));
    TRY(add_piece(c, form + quiet, before - quiet, true, loss, e));
    TRY(add_content(c, t, m->text, m->n, loss, e));
    return add_ending(c, t, content + strlen("{content}"), loss, e);
}

/* ---- Messages -------------------------------------------------------------------------------- */

static int begin(struct chat_text *c, const struct chat_template *t, bool has_system, struct err *e)
{
    if (t->begin != NULL)
        TRY(add_piece(c, t->begin, strlen(t->begin), true, false, e));
    if (has_system || t->default_system == NULL || t->system == NULL)
        return ST_OK;
    struct chat_message m = {.role = CHAT_SYSTEM, .text = t->default_system, .n = strlen(t->default_system)};
    return add_turn(c, t, t->system, &m, false, e);
}

static int check_order(const struct chat_text *c, const struct chat_template *t, enum chat_role role, struct err *e)
{
    bool first = c->n_messages == 0;
    if (role == CHAT_SYSTEM && !first && (t->system == NULL || t->alternate))
        return err_set(e, ST_INVALID, "template %s takes a system message only at the beginning", t->name);
    if (!t->alternate || role == CHAT_SYSTEM || role == CHAT_TOOL)
        return ST_OK;
    bool user_next = first || c->last != CHAT_USER;
    if ((role == CHAT_USER) != user_next)
        return err_set(e, ST_INVALID,
                       "template %s needs messages of user and assistant by turns, beginning with the user's", t->name);
    return ST_OK;
}

int chat_text_add(struct chat_text *c, const struct chat_template *t, const struct chat_message *m, bool loss,
                  struct err *e)
{
    const char *const forms[CHAT_ROLES] = {
        [CHAT_SYSTEM] = t->system, [CHAT_USER] = t->user, [CHAT_ASSISTANT] = t->assistant, [CHAT_TOOL] = t->tool};
    const char *form = forms[m->role];
    TRY(check_order(c, t, m->role, e));
    if (c->n_messages == 0)
        TRY(begin(c, t, m->role == CHAT_SYSTEM, e));
    bool waits = m->role == CHAT_SYSTEM && form == NULL && t->system_user != NULL;
    if (form == NULL && !waits)
        return err_set(e, ST_INVALID, "template %s has no messages of role %s", t->name, chat_role_name(m->role));
    if (waits && loss)
        return err_set(e, ST_INVALID, "template %s writes the system message into the user's: it cannot be learned",
                       t->name);
    if (c->system != NULL && m->role != CHAT_USER)
        return err_set(e, ST_INVALID, "template %s needs a message of the user behind the system message", t->name);
    c->n_messages++;
    c->last = m->role;
    if (waits) {
        c->system = m;
        return ST_OK;
    }
    TRY(add_turn(c, t, c->system != NULL ? t->system_user : form, m, loss, e));
    c->system = NULL;
    return ST_OK;
}

int chat_text_end(const struct chat_text *c, const struct chat_template *t, struct err *e)
{
    if (c->system == NULL)
        return ST_OK;
    return err_set(e, ST_INVALID, "template %s needs a message of the user behind the system message", t->name);
}

int chat_text_ask(struct chat_text *c, const struct chat_template *t, struct err *e)
{
    TRY(chat_text_end(c, t, e));
    if (c->n_messages == 0 || c->last == CHAT_ASSISTANT)
        return err_set(e, ST_INVALID, "there is no message to reply to");
    return add_piece(c, t->generation, strlen(t->generation), true, false, e);
}

int chat_text_replied(struct chat_text *c, const struct chat_template *t, bool stopped, struct err *e)
{
    const char *ending = strstr(t->assistant, "{content}") + strlen("{content}");
    if (stopped)
        ending = strstr(ending, t->stop) + strlen(t->stop);
    c->last = CHAT_ASSISTANT;
    c->n_messages++;
    c->later = true;
    c->continues = !stopped;
    return add_piece(c, ending, strlen(ending), true, false, e);
}

/* ---- Ids ------------------------------------------------------------------------------------- */

struct encoding {
    struct chat_text *c;
    const struct tokenizer *tok;
    struct token_encoder *encoder;
    struct token_ids *out;
    struct chat_marks *marks;
};

static int mark(const struct encoding *x, size_t before, bool loss, struct err *e)
{
    struct chat_marks *m = x->marks;
    size_t n = x->out->n - before;
    if (n > 0)
        x->c->later = true;
    if (m == NULL || n == 0)
        return ST_OK;
    TRY(mem_grow((void **)&m->loss, &m->cap, m->n + n, 1, e));
    memset(m->loss + m->n, loss, n);
    m->n += n;
    return ST_OK;
}

/* Text between special tokens, all of it learned or none. */
static int encode_run(const struct encoding *x, const char *text, size_t n, bool loss, struct err *e)
{
    size_t before = x->out->n;
    unsigned flags = x->c->continues ? TOKEN_CONTINUES : x->c->later ? TOKEN_LATER : 0;
    if (n == 0)
        return ST_OK;
    TRY(token_encode(x->encoder, text, n, flags, x->out, e));
    x->c->continues = true;
    return mark(x, before, loss, e);
}

static int encode_special(const struct encoding *x, int32_t id, bool loss, struct err *e)
{
    size_t before = x->out->n;
    struct token_ids *o = x->out;
    TRY(mem_grow((void **)&o->ids, &o->cap, o->n + 1, sizeof *o->ids, e));
    o->ids[o->n++] = id;
    x->c->continues = false;
    return mark(x, before, loss, e);
}

int chat_text_encode(struct chat_text *c, const struct tokenizer *tok, struct token_encoder *encoder,
                     struct token_ids *out, struct chat_marks *marks, struct err *e)
{
    const struct encoding x = {.c = c, .tok = tok, .encoder = encoder, .out = out, .marks = marks};
    const char *text = c->text.text;
    size_t from = c->done_bytes, at = from; /* [from, at) was not encoded yet, and lies between special tokens */
    bool loss = false;
    for (; c->done < c->n_pieces; c->done++) {
        const struct chat_piece *p = &c->pieces[c->done];
        size_t end = at + p->n, a, b;
        if (p->loss != loss) {
            TRY(encode_run(&x, text + from, at - from, loss, e));
            from = at;
            loss = p->loss;
        }
        for (int32_t id; p->literal && (id = tokenizer_next_special(tok, text + at, end - at, &a, &b)) >= 0;
             from = at) {
            TRY(encode_run(&x, text + from, at + a - from, loss, e));
            TRY(encode_special(&x, id, loss, e));
            at += b;
        }
        at = end;
    }
    c->done_bytes = at;
    return encode_run(&x, text + from, at - from, loss, e);
}
