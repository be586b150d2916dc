/* Tokenizers: text to token ids and back, for the formats that published models use.
 *
 *   "bytes"                  ids 0..255 are the bytes, 256 may be the end of a document
 *   tokenizer.json           Hugging Face: byte-level BPE, or SentencePiece-style BPE with byte
 * fallback
 *   *.tiktoken, *.model      lines of base64 and rank (tiktoken, Llama 3, Qwen)
 *   encoder.json + vocab.bpe GPT-2; either file names the pair
 *   tekken.json              Mistral
 *
 * A tokenizer is read-only after opening and may be shared by threads; each thread encodes with its
 * own encoder, which holds scratch memory and a cache of pieces. Any byte string can be encoded:
 * bytes that are not UTF-8 become single-byte tokens. */
#ifndef BRAID_TOKEN_H
#define BRAID_TOKEN_H

#include "base/base.h"

struct token_model; /* private to token/ */

struct tokenizer {
    int32_t vocab;             /* ids are 0..vocab-1 */
    int32_t eod;               /* end-of-document id, -1: none */
    bool is_bytes;             /* ids are the bytes: text needs no conversion, and may be cut anywhere */
    uint64_t hash;             /* of everything that decides ids: vocabulary, merges, pattern, special tokens */
    struct token_model *model; /* NULL for bytes */
};

struct tokenizer_opts {
    const char *name;      /* "bytes" or a path */
    bool eod;              /* wanted: bytes get id 256, a file's own end-of-document token is looked for */
    const char *eod_token; /* text of that token; NULL or "": the first known name in the vocabulary */
    const char *pattern;   /* tiktoken files only: name or regex; NULL or "": known by the number of tokens */
    const char *special;   /* tiktoken files only: names separated by spaces, ids after the last rank */
};
int tokenizer_open_opts(struct tokenizer *t, const struct tokenizer_opts *o, struct err *e);
/* The same with automatic choices. */
int tokenizer_open(struct tokenizer *t, const char *name, bool with_eod, struct err *e);
void tokenizer_close(struct tokenizer *t);

/* Bytes of one id as they appear in text; *n is the full length, of which at most cap are written.
 * Special tokens have none; tokenizer_name gives theirs. */
int tokenizer_decode(const struct tokenizer *t, int32_t id, uint8_t *out, size_t cap, size_t *n, struct err *e);
/* Length of that text: the table behind bits per byte. Special tokens and ids outside the
 * vocabulary: 0. */
int64_t token_n_bytes(const struct tokenizer *t, int32_t id);
/* Bytes of text behind these ids. Special tokens count 0, ids < 0 are ignored; others must be in
 * the vocabulary. */
int tokenizer_count_bytes(const struct tokenizer *t, const int32_t *ids, int64_t n, int64_t *bytes, struct err *e);
/* Text of a special or added token, NULL for others. Not NUL-terminated; *n is its length. */
const char *tokenizer_name(const struct tokenizer *t, int32_t id, size_t *n);
/* Bytes in front of a decoded text that are not part of it: 1 where encoding puts a space there (SentencePiece). */
size_t tokenizer_text_skip(const struct tokenizer *t);
bool token_is_special(const struct tokenizer *t, int32_t id);
/* The id of a special or added token with this text, -1: there is none. */
int32_t tokenizer_find(const struct tokenizer *t, const char *text);
/* The first special or added token that occurs in a text: its id and where it is; -1: none does. */
int32_t tokenizer_next_special(const struct tokenizer *t, const char *text, size_t n, size_t *from, size_t *to);
/* "tokenizer.json", "tiktoken", ... and the name of the pattern, for messages. */
const char *tokenizer_kind(const struct tokenizer *t);
/* Written in hexadecimal to out, which is returned. */
const char *tokenizer_hash_text(const struct tokenizer *t, char out[17]);
/* The files a tokenizer is read from: 0 for bytes, 2 for the GPT-2 pair. A copy of them beside each
 * other is the same tokenizer; opts is what must be given again. */
int tokenizer_n_files(const struct tokenizer *t);
const char *tokenizer_file(const struct tokenizer *t, int i);

/* A growing list of ids; start with {0}, release with free(ids). */
struct token_ids {
    int32_t *ids;
    size_t n, cap;
};

enum token_flags {
    TOKEN_SPECIAL = 1,   /* names of special tokens in the text become their ids; without it they are text */
    TOKEN_TEMPLATE = 2,  /* put what the tokenizer's template puts around a text (a begin-of-text id) */
    TOKEN_LATER = 4,     /* the text follows a special token: it is not the beginning of a document */
    TOKEN_CONTINUES = 8, /* the text follows other text: no space is put in front of it either */
};

struct token_encoder;
int token_encoder_open(struct token_encoder **out, const struct tokenizer *t, struct err *e);
void token_encoder_close(struct token_encoder *c); /* NULL is fine */
/* Appends the ids of the n bytes. The text is treated as one whole document. */
int token_encode(struct token_encoder *c, const void *text, size_t n, unsigned flags, struct token_ids *out,
                 struct err *e);

/* The same with a temporary encoder, for occasional texts. On an error nothing is appended to out. */
int tokenizer_encode(const struct tokenizer *t, const void *text, size_t n, unsigned flags, struct token_ids *out,
                     struct err *e);
/* How many bytes at the beginning of a text are valid UTF-8. */
size_t token_utf8(const void *text, size_t n);
/* Where a long text may be cut without changing its ids: the last such place in 1..n, 0: none. */
size_t token_cut(const struct tokenizer *t, const void *text, size_t n);

/* ---- A vocabulary for other programs --------------------------------------------------------- */

enum token_type { TOKEN_ORDINARY = 1, TOKEN_CONTROL = 3, TOKEN_ADDED = 4, TOKEN_UNUSED = 5 }; /* as GGUF numbers them */
struct token_listing {
    int32_t n;
    const char **tokens; /* ordinary ones in the byte alphabet of GPT-2, others as they are written */
    int32_t *types;      /* enum token_type */
    int64_t n_merges;
    const char **merges; /* "left right", the first merged first */
    const char *pattern; /* name of a known pattern; NULL: another one */
    int32_t bos;         /* what the template begins with, -1: nothing */
    struct arena memory;
};
/* Byte-level tokenizers only. Close it also after an error. */
int token_listing_open(struct token_listing *out, const struct tokenizer *t, struct err *e);
void token_listing_close(struct token_listing *l);

/* ---- Training a byte-level BPE vocabulary ---------------------------------------------------- */

struct token_trainer;
struct token_train_opts {
    int64_t vocab;           /* tokens in all, special ones included */
    const char *pattern;     /* name of a known pattern, or a regex; NULL or "": gpt2 */
    const char *special;     /* names separated by spaces; their ids follow the merges */
    int64_t min_frequency;   /* pairs seen less often are not merged */
    int64_t max_token_bytes; /* 0: any length */
    int64_t max_pieces;      /* unique pieces kept; when more come, those seen once are dropped. 0: no
                           limit */
    int threads;
};
struct token_train_stats {
    int64_t bytes, pieces, unique; /* of text, in it, and how many different ones */
    int64_t dropped;               /* pieces seen once that were dropped, to keep to max_pieces */
    int64_t merges, tokens;        /* tokens: the vocabulary's size */
};
int token_trainer_open(struct token_trainer **out, const struct token_train_opts *o, struct err *e);
void token_trainer_close(struct token_trainer *t); /* NULL is fine */
/* Counts the pieces of these texts, with all threads. The result depends on the texts and on how
 * they are divided among calls, not on the number of threads. */
struct token_text {
    const void *bytes;
    size_t n;
};
int token_trainer_add(struct token_trainer *t, const struct token_text *texts, int n, struct err *e);
/* Where a long text is best cut: where no piece is cut, if there is such a place, else between
 * characters. Never 0. */
size_t token_trainer_cut(const struct token_trainer *t, const void *text, size_t n);
/* Finds the merges. report is called now and then with the merges found so far; it may be NULL. */
int token_trainer_run(struct token_trainer *t, void (*report)(void *ctx, int64_t merges), void *ctx, struct err *e);
struct token_train_stats token_trainer_stats(const struct token_trainer *t);
/* Writes PREFIX.json (Hugging Face tokenizer.json) and PREFIX.tiktoken. */
int token_trainer_write(const struct token_trainer *t, const char *prefix, struct err *e);

#endif
