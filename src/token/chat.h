/* Conversations as text: chat templates, messages from JSON, and ids with a mark for those that are learned.
 *
 * A template says how a message of each role is written. The known ones go by name; others come from a small file of
 * lines `key = "text"` (docs/TOKENS.md). Names of special tokens are tokens where the template writes them and stay
 * plain text inside a message, so that no message can end its own turn. */
#ifndef BRAID_CHAT_H
#define BRAID_CHAT_H

#include "token/token.h"

/* ---- Templates ------------------------------------------------------------------------------- */

struct chat_template {
    char name[64];  /* of the template that is used: what "auto" found, the path of a file */
    char found[96]; /* where "auto" found it, or "" */
    uint64_t hash;  /* of everything below */
    const char *begin, *system, *user, *system_user, *assistant, *tool; /* NULL: there is none */
    const char *generation;     /* what a reply follows: the beginning of `assistant` */
    const char *stop;           /* ends a reply */
    const char *default_system; /* for conversations without a system message; NULL: none */
    bool trim;                  /* white space around messages is dropped */
    bool alternate;             /* user and assistant must take turns */
    int32_t stop_id;            /* -1: the tokenizer has no such token, only its text (bytes) */
    struct arena memory;
};
/* name: one of the known ones, a file, or "auto": the one that the file beside the tokenizer holds. Close it also after
 * an error. */
int chat_template_open(struct chat_template *t, const char *name, const struct tokenizer *tok, struct err *e);
void chat_template_close(struct chat_template *t);
/* The text of a template file. */
int chat_template_parse(struct chat_template *t, const char *text, size_t n, const char *where, struct err *e);
/* Is it the name of a known one, or "auto"? Else it means a file. */
bool chat_template_known(const char *name);
/* Which known template a Jinja text is: its name; NULL: none, and *like names one that it resembles, or NULL. */
const char *chat_template_recognise(const char *jinja, const char **like);
const char *chat_hash_text(const struct chat_template *t, char out[17]);

/* ---- Messages -------------------------------------------------------------------------------- */

enum chat_role { CHAT_SYSTEM, CHAT_USER, CHAT_ASSISTANT, CHAT_TOOL, CHAT_ROLES };
const char *chat_role_name(enum chat_role r);
/* Bit 1 << role for each role of a list ("assistant,user", or "all"). */
int chat_roles_parse(const char *list, unsigned *roles, struct err *e);

struct chat_message {
    enum chat_role role;
    const char *text;
    size_t n;
    bool skip; /* its own weight is 0: not learned, whatever its role */
};
struct chat_list {
    struct chat_message *m;
    size_t n, cap;
    struct arena memory;
};
void chat_list_init(struct chat_list *l);
void chat_list_release(struct chat_list *l);
/* The messages of one JSON object: {"messages": [{"role", "content"}]} or {"conversations": [{"from", "value"}]}, where
 * field is "" or "text"; else of that member. False: why says what is wrong. Texts live as long as l; root may go. */
struct json_t;
bool chat_list_read(struct chat_list *l, const struct json_t *root, const char *field, char *why, size_t size);

/* ---- Text and ids ---------------------------------------------------------------------------- */

/* A conversation as text. Messages are added in order; encode turns what was added since into ids. */
struct chat_piece {
    size_t n;     /* bytes of text */
    bool literal; /* written by the template: names of special tokens are tokens */
    bool loss;
};
struct chat_text {
    struct buf text;
    struct chat_piece *pieces;
    size_t n_pieces, cap_pieces, done, done_bytes; /* done: encoded already */
    const struct chat_message *system;             /* waits for the first message of the user */
    int n_messages;
    enum chat_role last;
    bool later, continues; /* ids of this conversation exist; the last of them was no special token */
};
void chat_text_init(struct chat_text *c);
void chat_text_release(struct chat_text *c);
void chat_text_clear(struct chat_text *c);
/* loss: its text, and what ends it, is learned. A message that this template cannot express is ST_INVALID. m must live
 * until the next message was added. */
int chat_text_add(struct chat_text *c, const struct chat_template *t, const struct chat_message *m, bool loss,
                  struct err *e);
/* Asks for a reply. */
int chat_text_ask(struct chat_text *c, const struct chat_template *t, struct err *e);
/* Adds a reply whose ids are known already; stopped: with its stop token. */
int chat_text_replied(struct chat_text *c, const struct chat_template *t, bool stopped, struct err *e);
/* Ends the conversation: a system message that still waits is an error. */
int chat_text_end(const struct chat_text *c, const struct chat_template *t, struct err *e);
/* Appends ids and, where loss is not NULL, as many marks, 1: learned. */
struct chat_marks {
    uint8_t *loss;
    size_t n, cap;
};
int chat_text_encode(struct chat_text *c, const struct tokenizer *tok, struct token_encoder *encoder,
                     struct token_ids *out, struct chat_marks *marks, struct err *e);

#endif
