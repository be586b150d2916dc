/* Data: text to tokens, token files, and the pure function from a step number to its samples.
 *
 *   path(s) -> sources (Megatron pair, llm.c shards, plain text) -> split -> samples -> blend
 *           -> dataset_get(index) -> batcher (microbatches, prepared ahead by one thread)
 *
 * Everything after opening is read-only, so a dataset may be used by many threads, and resuming a
 * run needs nothing but its step number. Files are memory-mapped: they must not be shortened while
 * they are open. */
#ifndef BRAID_DATA_H
#define BRAID_DATA_H

#include "base/base.h"
#include "tensor/tensor.h"
#include "token/chat.h"

/* ---- Token files: writing -------------------------------------------------------------------- */

/* Writes PREFIX.bin and PREFIX.idx (Megatron). Both appear only in close, complete and synced;
 * abort, or a failure in close, leaves nothing behind. With replace, close removes an old pair, its .idx first, so that
 * at no moment an .idx describes the wrong .bin. */
struct token_writer;
int token_writer_open(struct token_writer **out, const char *prefix, enum dtype dtype, bool replace,
                      struct err *e); /* DT_U8, DT_U16 or DT_I32 */
int token_writer_add(struct token_writer *w, const int32_t *ids, size_t n, struct err *e);
/* For conversations: a byte for each of the ids that are added next says whether it is learned, and goes to
 * PREFIX.loss. All ids need one. */
int token_writer_add_loss(struct token_writer *w, const uint8_t *loss, size_t n, struct err *e);
int token_writer_end_sequence(struct token_writer *w, struct err *e); /* an empty one is dropped */
int token_writer_end_document(struct token_writer *w, struct err *e);
int token_writer_close(struct token_writer *w, struct err *e); /* frees w, success or not */
void token_writer_abort(struct token_writer *w);               /* frees w; NULL is fine */
enum dtype token_dtype_for_vocab(int64_t vocab);               /* the narrowest of U8, U16, I32 */

/* ---- Text to token files --------------------------------------------------------------------- */

struct tokenize_stats {
    int64_t files, files_total;       /* read so far, and found */
    int64_t consumed, consumed_total; /* bytes of the files, compressed as they are */
    /* left out: files with a NUL near their start; files and documents without text */
    int64_t skipped_binary, skipped_empty;
    int64_t skipped_other;            /* hidden names, *.bin, *.idx, links to folders, devices */
    int64_t bytes, tokens, documents; /* bytes of text */
    int64_t learned;                  /* tokens of conversations that have a loss */
    int64_t bad_lines;
    char first_bad[512]; /* file, line and reason of the first bad line */
};

struct tokenize_opts {
    const char *const *in; /* text files, or folders taken recursively in sorted order; .gz and .zst are unpacked */
    int n_in;
    const char *out;                   /* prefix */
    const struct tokenizer *tokenizer; /* its eod, if any, closes every document */
    const char *tokenizer_name;        /* for the manifest; NULL: its kind */
    bool special;                      /* names of special tokens in the text become their ids */
    const char *field;                 /* of lines of JSON (*.jsonl); NULL: "text" */
    bool skip_bad;                     /* leave bad lines out and count them */
    const struct chat_template *chat;  /* lines of JSON are conversations, written so; NULL: text */
    const char *loss_roles;            /* of conversations: whose messages are learned */
    bool replace;
    int threads;                                                   /* 0: all cores */
    const char *key;                                               /* kept in the manifest; NULL: none */
    void (*progress)(void *ctx, const struct tokenize_stats *now); /* about every 8 MB per thread; may be NULL */
    void *progress_ctx;
};
/* Writes PREFIX.bin, PREFIX.idx and PREFIX.tokens.json. A text file is a document, and so is each line of a *.jsonl;
 * hidden files and folders (".git") are not read. */
int data_tokenize(const struct tokenize_opts *o, struct tokenize_stats *stats, struct err *e);

/* Trains a vocabulary on the same kind of inputs; see token.h. Stops reading after max_bytes of text, 0: never. */
struct train_tokenizer_opts {
    const char *const *in;
    int n_in;
    const char *field;
    bool skip_bad;
    int64_t max_bytes;
    struct token_train_opts train;
    void (*progress)(void *ctx, const struct tokenize_stats *now); /* while reading; may be NULL */
    void (*merges)(void *ctx, int64_t merges);                     /* while merging; may be NULL */
    void *ctx;
};
int data_train_tokenizer(const struct train_tokenizer_opts *o, const char *out_prefix, struct tokenize_stats *read,
                         struct token_train_stats *stats, struct err *e);

/* ---- Looking at a path ----------------------------------------------------------------------- */

struct data_info {
    char kind[32];    /* "Megatron pair", "llm.c shards", "text" */
    enum dtype dtype; /* of the first file */
    int64_t files, sequences, documents, tokens, bytes;
    int64_t shortest, longest; /* sequences, in tokens */
    int64_t skipped;           /* files of a folder left out */
    bool scanned;
    int64_t min_id, max_id;                  /* when scanned and tokens > 0 */
    char tokenizer[512], tokenizer_hash[32]; /* from the manifest of a token file; "": there is none */
    int64_t text_bytes;                      /* likewise */
    char chat[64], loss_roles[64];           /* likewise, of conversations; "": others */
    int64_t learned;                         /* likewise: tokens that have a loss */
    uint8_t sample[200];                     /* the beginning of the text, as the tokenizer decodes it */
    size_t n_sample;
    char note[256]; /* why there is no sample, or "" */
};
/* tok decodes the sample; NULL: bytes, or the tokenizer that the manifest names, if it is still there. */
int data_inspect(const char *path, bool scan_ids, const struct tokenizer *tok, struct data_info *info, struct err *e);

/* ---- Datasets -------------------------------------------------------------------------------- */

enum data_part { DATA_TRAIN, DATA_VALID, DATA_TEST };

struct data_opts {
    /* One path, several ("a b"), or a blend ("0.7 a 0.3 b"); quotes protect blanks. A path is a
     * Megatron prefix, an llm.c shard, a text file, a folder of text, or a pattern ("x_*.bin"). */
    const char *paths;
    int64_t seq;       /* tokens per sample; dataset_get gives one more */
    int64_t seed;      /* 0 .. 2^32-1, NumPy RandomState; Megatron's default is 1234 */
    const char *split; /* "99,1,0" for train, valid, test; NULL or "": all of it, whatever part */
    enum data_part part;
    int64_t n_samples;                 /* wanted; as many epochs are laid out as they need. 0: one epoch */
    int64_t vocab;                     /* every id must be below */
    const struct tokenizer *tokenizer; /* NULL: text paths are refused. Must outlive the dataset */
    int32_t eod;                       /* closes each text file; token files hold theirs already. -1: none */
    /* Text that is not read as bytes, and lines of JSON, are tokenised once and kept: */
    /* here; NULL or "": in a folder of the user in the system's place for temporary files */
    const char *cache_dir;
    const char *tokenizer_name;       /* for the manifest of the cache, and for messages */
    const char *field;                /* of lines of JSON; NULL: "text" */
    const struct chat_template *chat; /* lines of JSON are conversations; NULL: token files must not be, either */
    const char *loss_roles;
    int threads;                               /* 0: all cores */
    void (*note)(void *ctx, const char *line); /* what is done about text; may be NULL */
    void *note_ctx;
};

struct dataset;
int dataset_open(struct dataset **out, const struct data_opts *o, struct err *e);
void dataset_close(struct dataset *ds);
int64_t dataset_n_samples(const struct dataset *ds); /* at least n_samples when that was given */
int64_t dataset_seq(const struct dataset *ds);
int64_t dataset_tokens(const struct dataset *ds); /* of the part, one epoch, all paths */
bool dataset_has_text(const struct dataset *ds);  /* a path is text, which the tokenizer reads */
/* Tokens [seq + 1] of sample index: a pure function, safe in any thread. An index past the last
 * sample begins the next epoch, whose order is another permutation of the same samples: the order does not depend on
 * the planned length of a run. Negative: an error. */
int dataset_get(const struct dataset *ds, int64_t index, int32_t *tokens, struct err *e);
/* The same with marks [seq + 1]. Of conversations a sample holds whole ones, filled up with tokens
 * that have no loss. */
enum {
    MARK_LOSS = 1,
    MARK_START = 2,
    MARK_CHAT = 4
}; /* is learned; begins a document; START marks every beginning, so eod is not needed for that */
int dataset_get_marked(const struct dataset *ds, int64_t index, int32_t *tokens, uint8_t *marks, struct err *e);
/* What every file of the dataset holds, in the order of the blend; *list is malloc'd, and so are its paths. */
int dataset_identify(const struct dataset *ds, struct file_id **list, int *n, struct err *e);
/* A few lines for the log: paths, kinds, tokens, samples, epochs. */
void dataset_describe(const struct dataset *ds, struct buf *out);

/* ---- Batches --------------------------------------------------------------------------------- */

struct batch_opts {
    int64_t micro_batch, global_batch; /* in samples; global is a multiple of micro * dp_size */
    int64_t dp_rank, dp_size;
    int64_t parts, part; /* ranks that divide every sample, and which of them this is; 0 counts as one */
    int depths;          /* multi-token prediction, with parts: ids of so many further places to the left */
    int32_t eod;         /* -1: none */
    bool eod_mask;      /* documents within a sample do not see each other; positions restart. Conversations never do */
    bool eod_mask_loss; /* no loss for guessing the token after an eod */
    int ahead;          /* microbatches prepared in advance, >= 1 */
    int keep;           /* how many delivered views stay valid, >= 1 */
};

/* The part of a batch that a rank works on: the same arrays unless ranks divide samples. */
struct batch_part {
    int64_t seq, first;                         /* tokens of each sample, and the first one's place in it */
    int32_t *tokens, *labels, *pos, *doc_start; /* [rows, seq]; doc_start counts from the sample's beginning */
    int32_t *doc_local;                         /* doc_start counted from the part's; negative: in an earlier part */
    /* [depths, rows, seq]: place t of depth k holds what t + k + 1 has, of the same document; else 0, -1 and 0. NULL
     * where samples are not divided. */
    int32_t *next_tokens, *next_labels, *next_pos;
    int depths;
};
struct batch {
    int64_t step, micro;  /* which one this is */
    int64_t first_sample; /* dataset index of row 0; rows follow each other */
    int64_t rows, seq;
    int32_t *tokens;    /* [rows, seq] */
    int32_t *labels;    /* [rows, seq], -1: no loss */
    int32_t *pos;       /* [rows, seq] position, from 0 in each document if eod_mask */
    int32_t *doc_start; /* [rows, seq] index in the row of the first token this one may see */
    int32_t *row_buf;   /* [seq + 1] scratch */
    uint8_t *mark_buf;  /* likewise */
    struct batch_part part;
    int32_t *part_buf; /* memory of a part of its own */
};
int batch_alloc(struct batch *b, int64_t rows, int64_t seq, struct err *e);
/* batch_fill then also makes part `which` of `parts` equal ones of every sample. */
int batch_divide(struct batch *b, int64_t parts, int64_t which, int depths, struct err *e);
void batch_cut(struct batch *b); /* the part of what the whole arrays hold now */
void batch_release(struct batch *b);
int batch_check_opts(const struct batch_opts *o, struct err *e);
int64_t batch_micros_per_step(const struct batch_opts *o);
/* Sample of row j is step*global + micro*(micro_batch*dp_size) + dp_rank*micro_batch + j. */
int batch_fill(struct batch *b, const struct dataset *ds, const struct batch_opts *o, int64_t step, int64_t micro,
               struct err *e);

/* The same batches in order from (first_step, 0), prepared by a thread. Allocates only in open. */
struct batcher;
int batcher_open(struct batcher **out, const struct dataset *ds, const struct batch_opts *o, int64_t first_step,
                 struct err *e);
/* The view stays valid for opts.keep - 1 further calls. An error stays: later calls repeat it. */
int batcher_next(struct batcher *b, const struct batch **view, struct err *e);
void batcher_close(struct batcher *b); /* NULL is fine */

#endif
