/* Private to training a vocabulary: counted pieces, the trainer, and what its parts ask of each
 * other. */
#ifndef BRAID_TOKEN_TRAIN_INT_H
#define BRAID_TOKEN_TRAIN_INT_H

#include "token/token_int.h"

/* Different pieces and how often each was seen. */
struct piece_slot {
    uint64_t hash;
    uint64_t off; /* into bytes */
    uint32_t len; /* 0: empty slot */
    uint64_t count;
};
struct piece_table {
    struct piece_slot *slots;
    size_t mask, n; /* slots - 1; used */
    uint8_t *bytes;
    size_t n_bytes, cap_bytes;
};
int pieces_init(struct piece_table *t, size_t slots, struct err *e);
void pieces_release(struct piece_table *t);
int pieces_add(struct piece_table *t, const uint8_t *p, size_t len, uint64_t hash, uint64_t count, struct err *e);
/* Drops pieces seen once; *dropped grows by their number. */
int pieces_prune(struct piece_table *t, int64_t *dropped, struct err *e);

struct train_merge {
    uint32_t left, right, id, order;
};
struct token_trainer {
    struct token_train_opts o;
    const struct split_known *known; /* NULL: regex */
    struct regex *regex;
    char *pattern, *special;
    uint8_t *classes;
    struct piece_table pieces;
    struct token_train_stats stats;
    int n_special;
    /* after run */
    uint8_t *bytes; /* of all tokens */
    size_t n_bytes, cap_bytes;
    struct token_span *tokens; /* the alphabet, then merges in order */
    size_t n_tokens, cap_tokens;
    struct train_merge *merges;
    size_t n_merges, cap_merges;
};

#endif
