/* Private to token/: vocabulary and merges, splitters, normalisation, added tokens, readers of
 * files. */
#ifndef BRAID_TOKEN_INT_H
#define BRAID_TOKEN_INT_H

#include "token/token.h"

#include <string.h>

enum {
    TOKEN_MAX_ID = 1 << 24,     /* ids at or above it are refused */
    TOKEN_MAX_FILE = 256 << 20, /* bytes of a tokenizer file */
    TOKEN_MAX_BYTES = 1 << 16,  /* length of one token */
};

/* ---- UTF-8 ----------------------------------------------------------------------------------- */

/* Length of the valid sequence at p, 0: none. Surrogates and overlong forms are not valid. */
size_t utf8_valid_len(const uint8_t *p, const uint8_t *end);
/* First byte that is not part of valid UTF-8, or end. */
const uint8_t *utf8_check(const uint8_t *p, const uint8_t *end);
/* Code point at p, which must begin a valid sequence; *len is its length. */
static inline uint32_t utf8_at(const uint8_t *p, size_t *len)
{
    uint32_t c = p[0];
    if (c < 0x80) {
        *len = 1;
        return c;
    }
    if (c < 0xE0) {
        *len = 2;
        return (c & 31u) << 6 | (p[1] & 63u);
    }
    if (c < 0xF0) {
        *len = 3;
        return (c & 15u) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
    }
    *len = 4;
    return (c & 7u) << 18 | (p[1] & 63u) << 12 | (p[2] & 63u) << 6 | (p[3] & 63u);
}
size_t utf8_put(uint32_t c, uint8_t out[4]); /* length written */

/* ---- Classes of characters ------------------------------------------------------------------- */

enum { /* bits */
       CH_LETTER = 1,
       CH_NUMBER = 2,
       CH_SPACE = 4, /* White_Space */
       CH_MARK = 8,
       CH_SIGN = 16,    /* punctuation and symbols */
       CH_NEWLINE = 32, /* \r and \n */
       CH_UPPER = 64,   /* Lu, Lt */
       CH_LOWER = 128,  /* Ll */
};
enum { N_CODE_POINTS = 0x110000 };
int classes_make(uint8_t **out, struct err *e); /* [N_CODE_POINTS], release with free */

/* ---- Splitters ------------------------------------------------------------------------------- */

/* Length of the pattern's match at p, 0: no match there. p < end, valid UTF-8, end is the end of
 * the text. */
typedef size_t split_fn(const uint8_t *classes, const uint8_t *p, const uint8_t *end);
struct split_known {
    const char *name, *pattern;
    split_fn *match;
    /* its spelling in tokenizer.json, where a library with other quantifiers reads it; NULL: the same */
    const char *in_json;
};
/* X{n,m}+ is X{n,m} without going back in PCRE2 and tiktoken; in the library that reads tokenizer.json, it is
 * (X{n,m})+. */
bool split_reads_otherwise(const char *regex);
const struct split_known *split_find_pattern(const char *regex); /* NULL: not a known one */
const struct split_known *split_find_name(const char *name);
const struct split_known *split_table(int *n);

/* PCRE2: any pattern. A regex is shared by threads, each with its own match. */
struct regex;
struct regex_match;
int regex_open(struct regex **out, const char *pattern, struct err *e);
void regex_close(struct regex *r);
int regex_match_open(struct regex_match **out, const struct regex *r, struct err *e);
void regex_match_close(struct regex_match *m);
/* The first non-empty match at or after `from` in the n bytes; *start == n: there is none. */
int regex_find(const struct regex *r, struct regex_match *m, const uint8_t *text, size_t n, size_t from, size_t *start,
               size_t *end, struct err *e);

/* ---- Normalisation --------------------------------------------------------------------------- */

enum norm_kind { NORM_NFC, NORM_NFD, NORM_NFKC, NORM_NFKD, NORM_PREPEND, NORM_REPLACE };
struct norm_step {
    enum norm_kind kind;
    char *from, *to; /* prepend: to; replace: both */
    size_t n_from, n_to;
};
enum { NORM_MAX = 8 };
struct norm {
    struct norm_step step[NORM_MAX];
    int n;
};
void norm_release(struct norm *n);
/* The valid UTF-8 text, normalised, into out (cleared first). *same: nothing changed, and out is
 * not filled. */
int norm_apply(const struct norm *n, const uint8_t *text, size_t len, bool prepend, struct buf *out,
               struct buf *scratch, bool *same, struct err *e);

/* ---- Vocabulary ------------------------------------------------------------------------------ */

struct token_span {
    uint32_t off, len;
};
enum { /* flags of an id */
       T_USED = 1,
       T_MODEL = 2,   /* BPE can make it */
       T_ADDED = 4,   /* matched in text before BPE */
       T_SPECIAL = 8, /* no text of its own */
       T_WHOLE = 16,  /* a piece equal to this token is this token */
};
struct vocab_slot {
    uint32_t tag;
    int32_t id; /* -1: empty */
    uint32_t len;
    uint8_t head[20]; /* the token, if it is that short */
};
struct pair_slot {
    uint64_t pair; /* left << 32 | right; PAIR_NONE: empty */
    uint32_t rank;
    int32_t id;
};
#define PAIR_NONE UINT64_MAX
struct vocab {
    int32_t n; /* ids below it */
    size_t cap_key, cap_text, cap_flags;
    struct token_span *key;  /* bytes that BPE sees */
    struct token_span *text; /* bytes in decoded text, or the name of a special token */
    uint8_t *flags;
    uint8_t *bytes;
    size_t n_bytes, cap_bytes;
    struct vocab_slot *slots;
    uint32_t slot_mask;
    struct pair_slot *pairs;
    uint64_t pair_mask;
    size_t n_pairs;
};
void vocab_release(struct vocab *v);
/* Id `id` gets these bytes; text NULL: the same as key. An id that is in use is an error. */
int vocab_add(struct vocab *v, int64_t id, const void *key, size_t n, unsigned flags, struct err *e);
int vocab_set_text(struct vocab *v, int32_t id, const void *text, size_t n, struct err *e);
/* After the last vocab_add: the hash of T_MODEL tokens. Duplicate keys are an error. */
int vocab_index(struct vocab *v, struct err *e);
int vocab_pairs_init(struct vocab *v, size_t n_pairs, struct err *e);
/* A later entry for the same pair replaces the earlier, as in the reference. */
void vocab_add_pair(struct vocab *v, int32_t left, int32_t right, uint32_t rank, int32_t id);
/* Every way to cut a token into two tokens: tiktoken's merges, whose priority is the rank of the
 * result. */
int vocab_pairs_of_ranks(struct vocab *v, struct err *e);

static inline uint64_t piece_hash(const uint8_t *p, size_t n)
{
    uint64_t h = n * 0x9E3779B97F4A7C15u, a, b;
    if (n >= 8) {
        size_t i = 0;
        for (; i + 16 <= n; i += 8) {
            memcpy(&a, p + i, 8);
            h = (h ^ a) * 0xD6E8FEB86659FD93u;
            h ^= h >> 32;
        }
        memcpy(&a, p + i, 8);
        memcpy(&b, p + n - 8, 8);
    } else if (n >= 4) {
        uint32_t lo, hi;
        memcpy(&lo, p, 4);
        memcpy(&hi, p + n - 4, 4);
        a = lo;
        b = hi;
    } else {
        a = n > 0 ? p[0] | (uint64_t)p[n / 2] << 8 | (uint64_t)p[n - 1] << 16 : 0;
        b = 0;
    }
    h = (h ^ a) * 0xD6E8FEB86659FD93u;
    h ^= h >> 32;
    h = (h ^ b) * 0xC2B2AE3D27D4EB4Fu;
    return h ^ h >> 29;
}
static inline bool bytes_equal(const uint8_t *a, const uint8_t *b, size_t n)
{
    uint64_t x, y;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        memcpy(&x, a + i, 8);
        memcpy(&y, b + i, 8);
        if (x != y)
            return false;
    }
    for (; i < n; i++)
        if (a[i] != b[i])
            return false;
    return true;
}
/* Id of the model's token with these bytes, -1: none. hash is piece_hash of them. */
static inline int32_t vocab_find(const struct vocab *v, const uint8_t *p, size_t n, uint64_t hash)
{
    uint32_t tag = (uint32_t)(hash >> 32);
    for (uint32_t i = (uint32_t)hash & v->slot_mask;; i = (i + 1) & v->slot_mask) {
        const struct vocab_slot *s = &v->slots[i];
        if (s->id < 0)
            return -1;
        if (s->tag == tag && s->len == n &&
            bytes_equal(n <= sizeof s->head ? s->head : v->bytes + v->key[s->id].off, p, n))
            return s->id;
    }
}
static inline uint64_t pair_hash(uint64_t pair)
{
    uint64_t h = pair * 0x9E3779B97F4A7C15u;
    return h ^ h >> 31;
}
static inline const struct pair_slot *vocab_pair(const struct vocab *v, int32_t left, int32_t right)
{
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    for (uint64_t i = pair_hash(pair) & v->pair_mask;; i = (i + 1) & v->pair_mask) {
        const struct pair_slot *s = &v->pairs[i];
        if (s->pair == pair)
            return s;
        if (s->pair == PAIR_NONE)
            return NULL;
    }
}

/* ---- Added tokens ---------------------------------------------------------------------------- */

struct added_token {
    int32_t id;
    char *text;
    size_t n;
    bool special, normalized, lstrip, rstrip, single_word;
};
struct trie_node {
    int32_t token;       /* index of an added token, -1: none ends here */
    int32_t child, next; /* first child, next sibling; -1: none */
    uint8_t byte;
};
/* Tokens of one class (normalised or not), found leftmost, then longest. */
struct trie {
    struct trie_node *nodes;
    size_t n, cap;
    int32_t first[256]; /* node of a first byte, -1: none */
    int only_byte;      /* the one first byte, -1: several */
    bool empty;
};
int trie_make(struct trie *t, const struct added_token *tokens, int n, bool normalized, const struct norm *norm,
              struct err *e);
void trie_release(struct trie *t);
/* The next match in [p, end): true, and which token where. Special tokens are passed over without
 * `special`. */
bool trie_find(const struct trie *t, const struct added_token *tokens, const uint8_t *classes, const uint8_t *text,
               const uint8_t *p, const uint8_t *end, bool special, const uint8_t **from, const uint8_t **to,
               int *which);

/* ---- The model ------------------------------------------------------------------------------- */

enum stage_kind { STAGE_SPLIT, STAGE_REGEX, STAGE_STRING, STAGE_SPACE, STAGE_METASPACE };
enum stage_behavior { SPLIT_ISOLATED, SPLIT_REMOVED, SPLIT_WITH_PREVIOUS, SPLIT_WITH_NEXT };
enum metaspace_when { META_FIRST, META_ALWAYS, META_NEVER };
struct stage {
    enum stage_kind kind;
    enum stage_behavior behavior;
    enum metaspace_when when;
    bool invert;
    const struct split_known *known;
    struct regex *regex;
    char *string; /* searched for; metaspace: the replacement */
    size_t n_string;
};
enum { STAGES_MAX = 8, AFFIX_MAX = 8 };

/* What two adjacent bytes become; id -1: they do not merge. */
struct byte_pair {
    uint32_t rank;
    int32_t id;
};

struct token_model {
    const char *kind; /* of the file */
    char *files[2];
    int n_files;
    struct vocab vocab;
    struct norm norm;
    struct stage stage[STAGES_MAX];
    int n_stages;
    uint8_t *classes;
    struct added_token *added;
    int n_added;
    size_t cap_added;
    struct trie raw, normal; /* of added tokens matched before and after normalisation */
    bool byte_level;         /* symbols are bytes; else characters */
    bool byte_fallback, fuse_unk, ignore_merges;
    bool cut_spaces;              /* characters: no token has U+2581 after something else, so text is cut before
                         it */
    bool strip_first;             /* decoding: the first space of a text is not part of it */
    int32_t unk;                  /* -1: none */
    int32_t byte_id[256];         /* -1: none */
    struct byte_pair *byte_pairs; /* [65536] merges of two bytes; NULL: not byte-level */
    int32_t prefix[AFFIX_MAX], suffix[AFFIX_MAX]; /* the template */
    int n_prefix, n_suffix;
};
void token_model_release(struct token_model *m); /* frees m too; NULL is fine */
int token_model_add_added(struct token_model *m, const struct added_token *a, struct err *e); /* copies the text */
int token_model_add_pattern(struct token_model *m, const char *regex, struct err *e);         /* a Split, isolated */
/* After a reader has filled vocabulary, merges and added tokens: tables, checks, flags. */
int token_model_finish(struct token_model *m, struct err *e);
uint64_t token_model_hash(const struct token_model *m);

/* The last place in 2..n-1 where a text may be cut, 0: none (encode.c). */
size_t cut_between_pieces(const uint8_t *classes, const uint8_t *text, size_t n);

/* Readers: each takes the file's bytes, so that a fuzzer can feed them. path is for messages. */
int read_hf(struct token_model *m, const char *path, const char *text, size_t n, struct err *e);
int read_tiktoken(struct token_model *m, const char *path, const char *text, size_t n, const char *pattern,
                  const char *special, struct err *e);
int read_gpt2(struct token_model *m, const char *path, const char *encoder, size_t n_encoder, const char *merges,
              size_t n_merges, struct err *e);
int read_tekken(struct token_model *m, const char *path, const char *text, size_t n, struct err *e);
/* Sizes, -1: not base64. out holds at least n * 3 / 4 + 3 bytes. */
int64_t base64_decode(const char *text, size_t n, uint8_t *out);
void base64_encode(const uint8_t *bytes, size_t n, struct buf *out);
/* The byte alphabet of GPT-2. -1: a character outside it. */
int alphabet_byte(uint32_t c);
uint32_t alphabet_char(uint8_t byte);
/* A string in the byte alphabet to bytes; -1: it holds other characters. out holds at least n
 * bytes. */
int64_t alphabet_decode(const char *text, size_t n, uint8_t *out);

/* BPE of one piece by merging alone, without the shortcuts of an encoder; for
 * checks while loading. */
struct bpe_work {
    int32_t *id;    /* symbols */
    uint32_t *rank; /* of the pair that begins here */
    int32_t *made;  /* what that pair becomes */
    int32_t *next, *prev;
    uint64_t *heap; /* rank << 32 | place */
    size_t n_heap, cap, cap_heap;
};
void bpe_work_release(struct bpe_work *w);
/* The ids of the piece in w->id[0..*n). */
int bpe_piece(const struct token_model *m, struct bpe_work *w, const uint8_t *p, size_t len, size_t *n, struct err *e);

#endif
