/* Private to serve/: what its files share. */
#ifndef BRAID_SERVE_INT_H
#define BRAID_SERVE_INT_H

#include "serve/serve.h"

/* encode.c: fills prefix, from the encoder. */
int scorer_find_prefix(struct scorer *s, struct err *e);

/* tasks_read.c: one line of a tasks file. */
struct task {
    struct token_ids *sequence; /* context and continuation of each */
    int64_t *n_context;         /* tokens of it that are context */
    int64_t *bytes;             /* of text behind the continuation */
    int n, cap;
    int64_t label; /* -1: none */
};
/* Needs the tokenizer, the vocabulary and the length of s, and no model. Release it also after an error. */
int task_read(struct scorer *s, struct task *t, const char *line, size_t n, struct err *e);
void task_release(struct task *t);
/* Length of a text without the spaces at its end. */
size_t task_without_spaces(const char *text, size_t n);

#endif
