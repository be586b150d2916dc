/* Private to data/: sources of tokens, NumPy's shuffle, splits, sample layout, blends. */
#ifndef BRAID_DATA_INT_H
#define BRAID_DATA_INT_H

#include "data/data.h"

/* ---- NumPy RandomState ----------------------------------------------------------------------- */

struct mt19937 {
    uint32_t state[624];
    int next;
};
void mt_seed(struct mt19937 *r, uint32_t seed);
uint32_t mt_next(struct mt19937 *r);
/* RandomState.shuffle of a one-dimensional array. */
void mt_shuffle(struct mt19937 *r, uint32_t *a, int64_t n);

/* ---- Text files under a path ----------------------------------------------------------------- */

struct text_list {
    char **paths; /* sorted within each folder, folders where their name sorts */
    int64_t *sizes;
    size_t n, cap_paths, cap_sizes;
    int64_t binary, empty, other; /* left out */
};
/* Adds path, or every text file under it; max_files bounds the list. */
int text_list_add(struct text_list *l, const char *path, size_t max_files, struct err *e);
void text_list_release(struct text_list *l);

/* text_in.c: text that may be compressed, told by the name. */
enum text_packing { TEXT_PLAIN, TEXT_GZIP, TEXT_ZSTD };
enum text_packing text_packing_of(const char *path);
bool text_is_jsonl(const char *path);
struct text_in;
int text_in_open(struct text_in **out, const char *path, struct err *e);
void text_in_close(struct text_in *t); /* NULL is fine */
/* As many bytes as fit; fewer only at the end of the text. */
int text_in_read(struct text_in *t, uint8_t *out, size_t cap, size_t *n, struct err *e);
int64_t text_in_consumed(const struct text_in *t); /* bytes of the file so far */

/* text_parts.c: the texts of a list as parts that can be worked on in parallel. */
struct text_part {
    uint8_t *text;
    size_t n, cap;
    const char *path; /* of the list */
    int64_t line;     /* number of the first line; lines of JSON only */
    bool jsonl;       /* whole lines, one document each; else a document or the next part of one */
    bool ends_file;
};
/* Where n bytes of a longer text may be cut: the last such place, 0: nowhere. */
typedef size_t text_cut_fn(const void *ctx, const void *text, size_t n);
struct text_reader {
    const struct text_list *list;
    text_cut_fn *cut;
    const void *ctx;
    size_t file;
    struct text_in *in;
    const char *path;
    bool jsonl;
    int64_t line, done_bytes;
    uint8_t *rest; /* read already, after the cut */
    size_t n_rest, cap_rest;
};
void text_reader_init(struct text_reader *r, const struct text_list *list, text_cut_fn *cut, const void *ctx);
void text_reader_release(struct text_reader *r);
int64_t text_reader_consumed(const struct text_reader *r); /* bytes of all files so far */
int text_reader_next(struct text_reader *r, struct text_part *p, bool *got, struct err *e);
void text_part_release(struct text_part *p);
struct jsonl_bad {
    bool skip; /* count bad lines; else the first is an error */
    int64_t n, first_line;
    char why[192];
};
/* Calls each for every line that is JSON; *good false: the line is bad, why says how. */
struct json_t;
typedef int (*jsonl_fn)(void *ctx, const struct json_t *root, bool *good, char *why, size_t size, struct err *e);
int jsonl_lines(const struct text_part *p, struct jsonl_bad *bad, jsonl_fn each, void *ctx, struct err *e);
/* Calls each for the text of every line. */
int jsonl_each(const struct text_part *p, const char *field, struct jsonl_bad *bad,
               int (*each)(void *ctx, const char *text, size_t n, struct err *e), void *ctx, struct err *e);
/* jsonl_text.c: the text of this member, where the line is a simple one; false: ask the parser.
 * scratch holds n bytes. */
bool jsonl_text(const uint8_t *line, size_t n, const char *field, uint8_t *scratch, size_t *len);
int text_list_inputs(const char *const *in, int n_in, struct text_list *list, struct err *e);

/* token_manifest.c: PREFIX.tokens.json. */
struct token_manifest {
    bool found;
    char name[512], hash[32], key[32];
    int64_t documents, tokens, bytes, bad_lines, learned;
    bool eod_appended;
    char chat[64], chat_hash[32], loss_roles[64]; /* of conversations; "": others */
};
int token_manifest_remove(const char *prefix, struct err *e);
int token_manifest_write(const struct tokenize_opts *o, const struct tokenize_stats *s, struct err *e);
int token_manifest_read(const char *prefix, struct token_manifest *m, struct err *e); /* none: m->found is false */
int token_manifest_parse(const char *text, size_t n, const char *path, struct token_manifest *m, struct err *e);
/* Does it describe this many tokens, made by this tokenizer (NULL: any)? */
int token_manifest_check(const struct token_manifest *m, const char *prefix, int64_t tokens,
                         const struct tokenizer *tok, struct err *e);

/* Are they conversations written by this template (NULL: no conversations) and learned by these roles? has_loss: there
 * is a PREFIX.loss. */
int token_manifest_check_chat(const struct token_manifest *m, const char *prefix, bool has_loss,
                              const struct chat_template *chat, const char *loss_roles, struct err *e);

/* cache.c: the prefix of a token file that stands for the text at path, made now or earlier; NULL: path is used as it
 * is. */
int text_cache(const struct data_opts *o, const char *path, char **prefix, struct err *e);

/* ---- Sources: numbered sequences of token ids ------------------------------------------------ */

enum source_kind { SOURCE_MEGATRON, SOURCE_LLMC, SOURCE_TEXT };

struct source_file { /* llm.c shard or text: one sequence each */
    char *path;
    struct file_map map;
    enum dtype dtype;
    size_t skip;      /* header bytes */
    int64_t n_tokens; /* stored ones, without an appended eod */
};

struct source {
    enum source_kind kind;
    char *path; /* as named by the user; messages use it */
    int64_t n_seqs, n_tokens;
    int32_t append_eod; /* text only: id after each file, -1 none */
    int64_t skipped;    /* files of a folder left out */
    /* Megatron */
    struct file_map idx, bin;
    char *idx_path, *bin_path; /* NULL: memory, of a test */
    struct file_map loss;      /* of conversations */
    char *loss_path;           /* NULL: there is none */
    int32_t *lengths;          /* n_seqs; in memory, as opening a dataset walks them in random order */
    enum dtype dtype;
    int64_t n_docs;
    /* llm.c, text */
    struct source_file *files;
    size_t n_files, cap_files;
};

/* tok NULL, or not of bytes: text is refused. */
int source_open(struct source *s, const char *path, const struct tokenizer *tok, int32_t eod, struct err *e);
bool source_is_text(const char *path); /* a text file, a folder, or a pattern of text files */
void source_close(struct source *s);
const char *source_kind_name(enum source_kind k);
int64_t source_seq_len(const struct source *s, int64_t seq);
/* Ids [from, from + n) of a sequence, each checked to lie in 0..vocab-1. The range must exist. */
int source_read(const struct source *s, int64_t seq, int64_t from, int64_t n, int64_t vocab, int32_t *out,
                struct err *e);

/* Which of those ids are learned: a byte for each, 0 or 1. For sources that have a loss_path. */
int source_read_loss(const struct source *s, int64_t seq, int64_t from, int64_t n, uint8_t *out, struct err *e);

/* Checks of mapped bytes, apart from opening so that a fuzzer can feed them memory. */
/* s->path, idx, bin set; fills the rest, source_close releases */
int source_check_idx(struct source *s, struct err *e);
int source_check_shard(struct source_file *f, struct err *e);
bool llmc_is_shard(const uint8_t *bytes, size_t n);
/* Bytes into .bin of a sequence; checked once more, as the file may have been rewritten since it was opened. */
int idx_seq_offset(const struct source *s, int64_t seq, int64_t *offset, struct err *e);

/* ---- Splits ---------------------------------------------------------------------------------- */

/* A run of sequences; the first may lack its head and the last its tail (a split by tokens). */
struct part {
    int64_t first, n;   /* sequences */
    int64_t head, tail; /* tokens not belonging to the part */
    int64_t tokens;
};
int split_parse(const char *text, double fraction[3], struct err *e); /* sums to 1 */
/* [from, to) of n things for part i, Python's rounding. */
void split_range(const double fraction[3], int i, int64_t n, int64_t *from, int64_t *to);
int part_make(struct part *p, const struct source *s, const char *split, enum data_part which, struct err *e);
int64_t part_doc_len(const struct part *p, const struct source *s, int64_t doc);
const char *part_name(enum data_part which);

/* ---- Samples of one source ------------------------------------------------------------------- */

/* Where a sample starts: a place in the document order, and a token in that document. */
struct sample_start {
    int64_t doc, offset;
};

/* The order of documents laid end to end; sample j is its tokens [j*seq, j*seq + seq]. Every
 * START_STRIDE-th start is kept, the ones between are found by walking: this bounds memory. */
enum { START_STRIDE = 8 };
struct samples {
    const struct source *src;
    struct part part;
    int64_t seq, epochs, n; /* n samples */
    int64_t n_first;        /* samples shuffled among themselves; the rest belong to the last epoch */
    bool separate_last;
    uint32_t *order; /* documents of the part, n_order = part.n * epochs */
    int64_t n_order;
    struct sample_start *starts;
    uint32_t *shuffle; /* n */
    bool whole;
    int64_t cut; /* whole: documents longer than a sample, which lose their end */
};
/* In a source with a loss_path every sample holds whole documents (samples_whole.c): then starts has an entry for each,
 * and one more for the end. */
int samples_open(struct samples *s, const struct source *src, const struct part *part, int64_t seq, int64_t wanted,
                 uint32_t seed, struct err *e);
void samples_close(struct samples *s);
struct sample_start samples_start(const struct samples *s, int64_t j); /* before the shuffle */
/* marks may be NULL. */
int samples_get(const struct samples *s, int64_t i, int64_t vocab, int32_t *tokens, uint8_t *marks, struct err *e);
int samples_open_whole(struct samples *s, int64_t wanted, uint32_t seed, struct err *e);
int samples_get_whole(const struct samples *s, int64_t i, int64_t vocab, int32_t *tokens, uint8_t *marks,
                      struct err *e);

/* ---- Blends ---------------------------------------------------------------------------------- */

struct blend_spec {
    char **paths;
    double *weights; /* normalised, or NULL: by size */
    int n;
};
int blend_parse(struct blend_spec *b, const char *text, struct err *e);
void blend_spec_release(struct blend_spec *b);
/* Fill which[n], sample[n]. counts NULL: by weight alone. Else sources run out after counts[k]. */
int blend_fill(const double *weights, const int64_t *counts, int k, uint16_t *which, uint32_t *sample, int64_t n,
               struct err *e);
int64_t blend_need(int64_t n, double weight); /* samples to lay out for a source of that weight */

/* epoch.c: which of n samples stands at this index; from the second epoch on a permutation keyed by
 * seed and epoch. */
int64_t epoch_sample(int64_t seed, int64_t index, int64_t n);

#endif
