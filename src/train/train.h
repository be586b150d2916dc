/* The trainer: a model, its plans, the data and the loop. cmd/ calls these functions; folders below do not. */
#ifndef BRAID_TRAIN_H
#define BRAID_TRAIN_H

#include "ckpt/ckpt.h"
#include "data/data.h"
#include "log/log.h"
#include "optim/optim.h"
#include "plan/exec.h"

/* Place of a trainer among the ranks of a run, and its share of the machine. The caller owns groups and world. */
struct rank_place {
    struct mesh mesh;
    struct world *world; /* NULL: a single rank, or a plan that is not run */
    int threads;         /* 0: run.threads */
    int gpu;             /* added to gpu.index; wraps around the GPUs from there on */
};
struct rank_place place_alone(void);
/* Sizes from the options of [parallel]; virtual stages from the pattern where they are not given. */
int place_sizes(const struct config *cfg, struct mesh_sizes *s, struct err *e);
/* Opens the groups; on one machine its ranks share cores and take a GPU each. Every rank of w calls it. */
int place_open(struct rank_place *p, const struct config *cfg, struct world *w, int local_rank, int local_ranks,
               struct err *e);
/* Rank `rank` of parallel.ranks without communication: for plans that are not run. */
int place_on_paper(struct rank_place *p, const struct config *cfg, int rank, struct err *e);
void place_close(struct rank_place *p);

/* Why a run ends early; a request of any rank stops all. STOP_FAILED: a checkpoint could not be written. */
enum stop_request { STOP_NOT, STOP_TIME, STOP_SIGNAL, STOP_FAILED };

struct trainer {
    const struct config *cfg;
    struct world *world;
    struct ranks *ranks; /* ranks.c: communication between steps; NULL: a single rank */
    struct dev dev;
    struct model model;
    struct model_plan train, eval;
    struct optim optim;
    struct exec exec;
    struct tokenizer tok;
    struct ckpt_file tok_files[CKPT_MAX_FILES]; /* the tokenizer as checkpoints carry it */
    int n_tok_files;
    struct chat_template chat; /* where data.chat is set */
    char *token_dir;           /* where text is tokenised into; NULL: run.dir is not set */
    struct dataset *train_data, *valid_data;
    struct batch_opts batch_opts;
    struct batcher *batcher;
    struct batch eval_batch;
    const struct batch **micro; /* microbatches of the current step */
    struct run_info *run;       /* of each */
    int64_t n_micro;
    struct trace *trace;
    struct routes *routes; /* recorded or replayed; else NULL */
    struct train_log *log;
    struct samples *samples; /* samples.c: text written at evaluations; NULL: none */
    int64_t step;            /* updates done */
    int64_t tokens_seen;
    double train_seconds; /* of the run so far, earlier starts included */
    double peak_flops;
    int64_t skipped, skipped_in_a_row;
    bool has_eval;
    double scale[1 + MTP_MAX_DEPTHS];                     /* of the losses in the current step */
    int64_t labels[1 + MTP_MAX_DEPTHS];                   /* of all ranks */
    double mean_loss[1 + MTP_MAX_DEPTHS];                 /* of the last step, main loss first */
    enum stop_request (*stop_request)(struct trainer *t); /* called after each step; NULL: the run is never stopped */
    double deadline;                                      /* monotonic seconds; 0: none */
    struct save_job *saving;                              /* save.c: the checkpoint that a thread writes; NULL: none */
    struct dir_lock *lock;  /* of run.dir, on the rank that writes there; NULL: each save takes it */
    struct ckpt_data *data; /* identity of every data file; owned, with the paths */
    int n_data;
    /* changes in them since the checkpoint that were accepted; NULL: none */
    char *data_note;
    /* the last step could not read its data, on some rank; nothing was updated */
    bool data_failed;
    int64_t replayed; /* steps, and batches of evaluations, repeated with larger buffers */
    bool stale;       /* weights that other ranks updated have not arrived yet: trainer_refresh */
    bool pending;     /* the update of the last step is to be applied by the next one: trainer_settle */
    struct {
        double plan, memory, params; /* seconds: planning, allocating, filling parameters */
    } start;
    bool noted_bits, noted_eval; /* the log has already noted what an evaluation lacks */
};
/* Rank 0 writes logs and checkpoints and prints to the terminal. */
static inline bool trainer_is_rank0(const struct trainer *t) { return t->model.mesh.rank == 0; }

/* Result of one step. */
struct step_result {
    double loss, grad_norm, lr, seconds;
    int64_t tokens;
    bool skipped;
    enum stop_request stop; /* the same on all ranks */
    bool saving;            /* some rank still writes its files of a checkpoint; the same on all ranks */
};

/* Opens device, model, plans, data; commits memory; fills parameters from init or `from` (may be
 * NULL). data may be left out (plan, gradcheck). */
int trainer_open(struct trainer *t, const struct config *cfg, const struct ckpt *from, bool with_data, struct err *e);
/* The same for one of several ranks; every rank calls it, as it does all that follow. Each rank loads its part of
 * `from`, whichever mesh wrote it. */
int trainer_open_on(struct trainer *t, const struct config *cfg, const struct rank_place *place,
                    const struct ckpt *from, bool with_data, struct err *e);
/* Makes the plans only: nothing is allocated and nothing can run (`braid plan`). */
int trainer_plan(struct trainer *t, const struct config *cfg, bool on_paper, struct err *e);
int trainer_plan_on(struct trainer *t, const struct config *cfg, const struct rank_place *place, bool on_paper,
                    struct err *e);
void trainer_close(struct trainer *t);
/* One optimizer step. On a non-finite loss or gradient nothing is updated; by policy it is an error that
 * names the first node, or result->skipped. */
int trainer_step(struct trainer *t, struct step_result *r, struct err *e);
/* Result of an evaluation. Validation data that cannot be read, and token ids whose bytes are not known, are not errors
 * of the run: the number is left out and the reason is kept. */
struct eval_result {
    double loss;                  /* mean over train.eval_batches validation batches */
    double bits_per_byte;         /* 0: not known */
    bool failed;                  /* the data could not be read: loss means nothing */
    int64_t tokens, tokens_total; /* evaluated, and in the validation data; more than that: some were seen again */
    double bytes;                 /* of text behind the targets; 0: not known */
    struct err why;               /* of failed, or of bits per byte that are not known; may be empty on other ranks */
};
int trainer_eval(struct trainer *t, struct eval_result *r, struct err *e);
/* Applies the update of the last step now, where the next step would otherwise apply it beside its forward pass
 * (optim.overlap). Code that reads weights or moments calls this or trainer_refresh first. */
int trainer_settle(struct trainer *t, struct err *e);
/* The plan of a step's first microbatches, where there is an update to apply or not. */
const struct plan *trainer_first_plan(const struct trainer *t, bool pending);
/* trainer_settle, then fetches the weights that other ranks update (parallel.zero). A step does so by itself while it
 * computes; other code that reads weights calls this first. Every rank calls it. */
int trainer_refresh(struct trainer *t, struct err *e);
int trainer_save(struct trainer *t, struct err *e);
/* Shows rank 0 every tensor that a checkpoint would hold, gathered from all ranks, under its key; host is valid during
 * the call. Every rank calls it. */
typedef int (*saved_fn)(void *ctx, const char *key, const struct tensor *host, struct err *e);
int trainer_visit_saved(struct trainer *t, saved_fn fn, void *ctx, struct err *e);
/* trainer_save in two parts (run.async_save), both called by every rank. begin: each rank copies what it writes to host
 * memory, and a thread writes the copy; one at a time. end: waits for all threads and gives the checkpoint its name;
 * returns at once where nothing was begun. *step: of the checkpoint, -1: none; note as for trainer_save_noting. */
int trainer_save_begin(struct trainer *t, struct err *e);
enum saving { SAVING_NOTHING, SAVING_UNDER_WAY, SAVING_DONE, SAVING_FAILED };
enum saving trainer_saving(const struct trainer *t);
int trainer_save_end(struct trainer *t, int64_t *step, struct err *note, struct err *e);
/* Instead of trainer_save_end where other ranks may be gone: what others wrote may be incomplete, so a checkpoint of
 * several ranks is given up; that of a single writer is completed. */
void trainer_save_drop(struct trainer *t);
/* Do all ranks see the folder that the run writes into? They write files of checkpoints there. Every rank calls it. */
int trainer_check_folder(struct trainer *t, struct err *e);
/* Gradients of the last step that are exactly zero, over all ranks, each element once. Every rank calls it. */
int trainer_count_zeros(struct trainer *t, double *zeros, struct err *e);
/* Replans after mesh.ep_rows of the model has changed: parameters, moments and state stay, frames and workspace are
 * reallocated. */
int trainer_replan(struct trainer *t, struct err *e);
/* Identifies the contents of the data files, which every checkpoint records: compares them over ranks, and with what
 * `from` (may be NULL) recorded. A difference is ST_CONFLICT, unless data.accept_change is on. Every rank calls it. */
int trainer_identify_data(struct trainer *t, const struct ckpt *from, struct err *e);
/* The whole run; stops early (checkpoint first) on a stop signal, on run.minutes, or when data cannot be read. */
int trainer_run(struct trainer *t, struct err *e);

/* Which parameters are in which group of the config, for people; nothing where there are no groups (groups.c). */
int groups_print(const struct model *m, struct buf *out, struct err *e);

/* Labels that count at each MTP depth (0: the main loss) are added to counts. */
void count_labels(const int32_t *labels, const int32_t *doc_start, int64_t rows, int64_t seq, int depths,
                  int64_t *counts);
/* Scale of each loss's gradient from those counts. */
void loss_scales(const struct config *cfg, const int64_t *counts, int depths, double *scale);

/* Choices of routers, recorded to a file or replayed from one (routes.c); *out is NULL where neither is asked for,
 * which the functions below allow. give: before a microbatch runs; take: after it. */
int routes_open(struct routes **out, struct model *m, const struct config *cfg, int64_t step, struct err *e);
void routes_close(struct routes *r);
int routes_give(struct routes *r, int64_t first_sample, struct err *e);
int routes_take(struct routes *r, int64_t first_sample, struct err *e);
/* For commands that run a model without a trainer, where choices are neither recorded nor replayed. */
int routes_refuse(const struct config *cfg, const char *command, struct err *e);

/* Parts that eval, generate, grads and gradcheck share. */
int tokenizer_for(const struct config *cfg, struct tokenizer *tok, struct err *e);
/* text.c: a checkpoint carries the tokenizer's files. */
int tokenizer_pack(const struct tokenizer *tok, struct ckpt_file files[CKPT_MAX_FILES], int *n, struct err *e);
void tokenizer_unpack(struct ckpt_file files[CKPT_MAX_FILES], int n); /* frees what pack read */
/* chat.c: the template of data.chat, which must be set; and its file, added to those that a checkpoint carries. */
int chat_for(const struct config *cfg, const struct tokenizer *tok, struct chat_template *chat, struct err *e);
int chat_pack(const struct config *cfg, struct ckpt_file files[CKPT_MAX_FILES], int *n, struct err *e);
/* data.chat becomes the checkpoint's own copy of a template file, as data.tokenizer does. */
int chat_of_checkpoint(struct config *c, const struct ckpt *from, bool keep_path, struct err *e);
/* Names that such files have in a checkpoint. */
int tokenizer_n_carried(void);
const char *tokenizer_carried(int i);
/* data.tokenizer becomes the checkpoint's own copy, unless the user named one; keep_path: or the saved path still
 * exists. */
int tokenizer_of_checkpoint(struct config *c, const struct ckpt *from, bool keep_path, struct err *e);
/* Is data.tokenizer still the one that the checkpoint was trained with? A checkpoint without one always passes. */
int tokenizer_check_resume(const struct config *c, const struct ckpt *from, struct err *e);
int text_options(struct trainer *t, struct data_opts *o, struct err *e); /* how text becomes tokens */
/* An error if the tokenizer has ids that model.vocab does not cover. Token files have a vocabulary of their own. */
int tokenizer_fits(const struct config *cfg, const struct tokenizer *tok, struct err *e);
/* The vocabulary from the tokenizer where it was left open; then automatic values and rules. */
int config_complete(struct config *c, struct err *e);
/* Keys of any layout (ckpt/keys/keymap.h); after an error nothing has been changed. With several ranks each loads its
 * part. */
int load_params(struct model *m, const struct ckpt *c, struct err *e);
/* The same for a start from a base: adapters that its file lacks keep the values they have. */
int load_base(struct model *m, const struct ckpt *c, struct err *e);
int load_moments(struct model *m, const struct ckpt *c, struct err *e);
/* Parameters alone, from a checkpoint, a run or a .safetensors file. allow: enum config_load_allow; note
 * gets a message about keys that were missing or left over and allowed, or none. */
int load_weights(struct model *m, const char *path, int allow, struct err *note, struct err *e);
enum dev_kind device_of(const struct config *cfg);
int device_open(struct dev *d, const struct config *cfg, struct err *e);
int device_open_on(struct dev *d, const struct config *cfg, const struct rank_place *place, struct err *e);
void plan_options(struct exec *x, const struct config *cfg); /* poison, random lanes, sync, find_nan */

/* ---- generate -------------------------------------------------------------------------------- */

struct sampler {
    double temperature, top_p;
    int64_t top_k;
    uint64_t seed;
};
struct candidate {
    double p;
    int id;
};
/* The chosen token of one row of logits; draw number n of the stream. temperature 0: the largest. The
 * first `vocab` logits take part; scratch holds as many candidates. */
int sample_token(const struct sampler *s, const struct tensor *logits, int64_t vocab, uint64_t n,
                 struct candidate *scratch);
/* Element i of a row of logits in host memory. */
static inline double logit_at(const struct tensor *row, int64_t i)
{
    switch (row->dtype) {
    case DT_F32: return ((const float *)row->data)[i];
    case DT_BF16: return bf16_to_f32(((const uint16_t *)row->data)[i]);
    default: return tensor_get(row, i);
    }
}

/* A model that continues sequences, one or several of equal length side by side. Plans of several lengths share
 * parameters and caches, so a prompt of n tokens takes about n / 256 runs and a few short ones, never a padded one:
 * recurrent states would remember the padding. */
enum { GENERATOR_PLANS = 5 };
struct generator {
    struct model own;                         /* of generator_open */
    struct model *model;                      /* the one that is run: own, or that of a trainer */
    struct model_plan plans[GENERATOR_PLANS]; /* longest first; the last one takes a single token */
    int n_plans;
    struct exec exec;
    int64_t batch;                          /* sequences side by side */
    int64_t cache_len, pos;                 /* tokens of a sequence that the caches hold at most, and now */
    int32_t *positions, *tokens;            /* of one run, all sequences */
    struct tensor host;                     /* logits of all rows, valid until the next feed */
    struct tensor last;                     /* logits [batch, vocabulary] of the last row of each sequence, likewise */
    int (*check)(void *ctx, struct err *e); /* before each run of a plan; an error ends the feed. NULL: not called */
    void *check_ctx;
};
struct generator_size {
    int64_t batch;   /* sequences side by side */
    int64_t tokens;  /* of a sequence, at most */
    int64_t at_once; /* most tokens of all sequences in one run, of which each has a row of logits; 0: 256 */
};
int generator_open(struct generator *g, const struct config *cfg, struct dev *dev, const struct ckpt *from,
                   struct generator_size size, struct err *e);
/* The same on a model that the caller owns: plan before model_commit, bind after it. */
int generator_plan(struct generator *g, struct model *m, struct generator_size size, struct err *e);
int generator_bind(struct generator *g, struct err *e);
void generator_close(struct generator *g);
/* Feed tokens [batch, n], n more of each sequence; *logits [batch, vocabulary] are those of the last ones. */
int generator_feed(struct generator *g, const int32_t *tokens, int64_t n, struct tensor *logits, struct err *e);
/* Feed tokens of the only sequence and show fn the logits of each: rows `first`, first + 1, ... of these n tokens. */
typedef int (*logits_fn)(void *ctx, int64_t first, const struct tensor *logits, struct err *e);
int generator_feed_all(struct generator *g, const int32_t *tokens, int64_t n, logits_fn fn, void *ctx,
                       struct tensor *last, struct err *e);
void generator_rewind(struct generator *g); /* new sequences */

/* ---- whole-model gradient check -------------------------------------------------------------- */

#define GRADCHECK_ALLOWED 1e-6 /* relative error */
struct model_check_row {
    const char *key;
    double numeric, analytic, error;
};
/* Random directions per parameter, central differences in double on the reference device. visit is
 * called for each; the worst relative error comes back. */
int model_gradcheck(const struct config *cfg, uint64_t seed, void (*visit)(void *, const struct model_check_row *),
                    void *ctx, double *worst, struct err *e);

#endif
