/* Asking a trained model: log-likelihoods of given text and new text, one engine behind `braid eval --tasks` and `braid
 * serve`.
 *
 *   score.c    the engine: log-probabilities of every token of a sequence; encode.c: text to ids
 *   tasks.c    multiple-choice tasks; tasks_read.c: a line of their file
 *   request.c  a completions request, from JSON
 *   reply.c    running it; its answer, to JSON (json.c)
 *   http.c     the server (libmicrohttpd); page.c is the page it shows
 */
#ifndef BRAID_SERVE_H
#define BRAID_SERVE_H

#include "train/train.h"

/* ---- the engine ------------------------------------------------------------------------------ */

enum { SCORER_TOP = 20, SCORER_PREFIX = 8 };

struct scorer {
    const struct config *cfg;
    struct tokenizer tok;
    struct token_encoder *encoder;
    struct dev dev;
    struct generator g;
    struct candidate *scratch;     /* for sampling: one per word of the vocabulary */
    int32_t prefix[SCORER_PREFIX]; /* what the tokenizer's template puts before a text */
    int n_prefix;
    int64_t length; /* most tokens of a sequence */
    struct chat_template chat;
    bool has_chat; /* data.chat is set */
};
int scorer_open(struct scorer *s, const struct config *cfg, const struct ckpt *from, int64_t length, struct err *e);
void scorer_close(struct scorer *s);

/* Appends the ids of a text; names of special tokens in it become those tokens. prefix: begin as the tokenizer's
 * template does. */
int scorer_encode(struct scorer *s, const char *text, size_t n, bool prefix, struct token_ids *out, struct err *e);
/* Appends the ids of a conversation that asks for a reply; needs has_chat. */
int scorer_encode_chat(struct scorer *s, const struct chat_list *l, struct token_ids *out, struct err *e);
/* An error that names the first id the model does not have. */
int scorer_check_ids(const struct scorer *s, const int32_t *ids, size_t n, struct err *e);
int scorer_append(struct token_ids *to, const int32_t *ids, size_t n, struct err *e);

/* What is known of one token of a sequence. The first token of a sequence has no probability:
 * logprob is NaN, n_top 0. */
struct token_score {
    double logprob; /* natural logarithm; of the model itself, whatever the temperature */
    int n_top;
    struct {
        int32_t id;
        double logprob;
    } top[SCORER_TOP]; /* the likeliest tokens at this place, best first; equal ones by id */
};
/* Starts a new sequence with these tokens. scores[from..n) are filled, with n_top alternatives each; n_top 0: none.
 * scores may be NULL. *last is the row of logits behind them, valid until the next call. */
int scorer_begin(struct scorer *s, const int32_t *ids, int64_t n, int64_t from, int n_top, struct token_score *scores,
                 struct tensor *last, struct err *e);
/* The sequence goes on with this token. */
int scorer_continue(struct scorer *s, int32_t id, struct tensor *last, struct err *e);
/* Score of token id where this row of logits was made. */
int scorer_score(const struct scorer *s, const struct tensor *row, int32_t id, int n_top, struct token_score *out,
                 struct err *e);

/* ---- tasks ----------------------------------------------------------------------------------- */

struct task_opts {
    const char *path; /* lines {"context": text or ids, "continuations": [text or ids, ...], "label": k} */
    const char *out;  /* a line for each line; NULL: none */
    void (*progress)(void *ctx, int64_t done, int64_t all); /* tokens; NULL: none */
    void *ctx;
};
struct task_result {
    int64_t lines, labelled, continuations, tokens;
    int64_t right, right_norm; /* of the labelled lines */
    int64_t cut;               /* continuations whose context lost its beginning */
    double logprob;            /* sum over labelled continuations */
};
int tasks_run(struct scorer *s, const struct task_opts *o, struct task_result *r, struct err *e);

/* ---- completions ----------------------------------------------------------------------------- */

enum { STOPS_MAX = 16, PROMPTS_MAX = 1024, STOP_BYTES = 1024 };

struct serve_limits {
    int64_t body_bytes, tokens; /* of a request; tokens: of all prompts and what may follow them */
    int64_t length;             /* of one prompt and what follows it */
    double seconds;             /* from the arrival of a request to its answer */
    int connections;
};

struct completion_request {
    struct token_ids *prompts;
    int n_prompts;
    int64_t max_tokens, n_tokens; /* n_tokens: of all prompts */
    struct sampler sampler;
    int n_top; /* alternatives of each token; -1: no log-probabilities */
    bool echo;
    const struct chat_template *chat; /* of a conversation; NULL: a completion */
    char *stop[STOPS_MAX];
    size_t n_stop[STOPS_MAX];
    int n_stops;
};
/* Gives a valid request or ST_INVALID, whatever the bytes are. encode turns text into ids; release r also after an
 * error. */
typedef int (*encode_fn)(void *ctx, const char *text, size_t n, bool prefix, struct token_ids *out, struct err *e);
int request_read(struct completion_request *r, const char *body, size_t n, const struct serve_limits *l, int64_t vocab,
                 encode_fn encode, void *ctx, struct err *e);
/* A conversation: {"messages": [...]} and the same fields otherwise, where they have a meaning. */
typedef int (*encode_chat_fn)(void *ctx, const struct chat_list *l, struct token_ids *out, struct err *e);
int request_read_chat(struct completion_request *r, const char *body, size_t n, const struct serve_limits *l,
                      int64_t vocab, const struct chat_template *chat, encode_chat_fn encode, void *ctx, struct err *e);
void request_release(struct completion_request *r);
/* Runs it and writes the answer. */
int request_answer(struct scorer *s, const struct completion_request *r, const char *model, struct buf *out,
                   struct err *e);
/* {"error": {...}} with the message of e. */
void reply_error(struct buf *out, int http_status, const struct err *e);
void reply_models(struct buf *out, const char *model, int64_t length);
/* Bytes of the character at text, 0: none begins there. */
size_t reply_character(const char *text, size_t n);
/* A quoted JSON string; bytes that are not UTF-8 become U+FFFD. */
void reply_string(struct buf *out, const char *text, size_t n);

/* ---- the server ------------------------------------------------------------------------------ */

struct serve_opts {
    const char *host, *model;
    int port;          /* 0: any free one */
    const char *token; /* NULL: none is required; then the address must be a loopback one */
    struct serve_limits limits;
    bool quiet;
};
/* Blocks stop signals (base/stop.h) until they are polled. Called before any thread is started, because threads inherit
 * it. */
int serve_block_signals(struct err *e);
/* Serves until a stop signal. ST_UNSUPPORTED where the server is not built in. */
int serve_run(struct scorer *s, const struct serve_opts *o, struct err *e);

/* host.c: where to listen. An address beyond loopback without a token is an error. */
struct serve_address {
    _Alignas(8) unsigned char bytes[128]; /* a sockaddr */
    int family;
    bool loopback;
};
int serve_address(struct serve_address *a, const char *host, int port, bool has_token, struct err *e);
/* Does this Host header name this server? A page whose own name was made to point here (DNS rebinding) sends that
 * name. */
bool serve_host_is_local(const char *header, const char *listening);
/* The token in the first line of a file. */
int serve_read_token(const char *path, char **out, struct err *e);

/* page.c: texts that follow each other; NULL ends them. */
extern const char *const serve_page[];

#endif
