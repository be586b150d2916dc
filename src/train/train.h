/* The trainer: a model, its plans, the data and the loop. cmd/ calls these; nothing below knows them. */
#ifndef BRAID_TRAIN_H
#define BRAID_TRAIN_H

#include "ckpt/ckpt.h"
#include "data/data.h"
#include "optim/optim.h"
#include "train/log.h"

struct trainer {
    const struct config *cfg;
    struct dev dev;
    struct model model;
    struct model_plan train, eval;
    struct optim optim;
    struct exec exec;
    struct tokenizer tok;
    struct dataset *train_data, *valid_data;
    struct batch_opts batch_opts;
    struct batcher *batcher;
    struct batch eval_batch;
    const struct batch **micro; /* microbatches of the current step */
    int64_t n_micro;
    struct trace *trace;
    struct train_log *log;
    int64_t step;        /* updates done */
    int64_t tokens_seen;
    double train_seconds; /* of the run so far, earlier starts included */
    double peak_flops;
    int64_t skipped;
    bool has_eval;
    double scale[1 + MTP_MAX_DEPTHS]; /* of the losses in the current step */
    int64_t labels[1 + MTP_MAX_DEPTHS];
};

/* What the step said. */
struct step_result {
    double loss, grad_norm, lr, seconds;
    int64_t tokens;
    bool skipped;
};

/* Opens device, model, plans, data; commits memory; fills parameters from init or `from` (may be
 * NULL). data may be left out (plan, gradcheck). */
int trainer_open(struct trainer *t, const struct config *cfg, const struct ckpt *from, bool with_data, struct err *e);
/* Only the plans: nothing is allocated, nothing can be run (`braid plan`). */
int trainer_plan(struct trainer *t, const struct config *cfg, bool on_paper, struct err *e);
void trainer_close(struct trainer *t);
/* One optimizer step. On a non-finite loss or gradient nothing is updated; by policy it is an error that
 * names the first node, or result->skipped. */
int trainer_step(struct trainer *t, struct step_result *r, struct err *e);
/* Mean loss over train.eval_batches validation batches, and bits per byte. */
int trainer_eval(struct trainer *t, double *loss, double *bits_per_byte, struct err *e);
int trainer_save(struct trainer *t, struct err *e);
/* The whole run; stops early (checkpoint first) on SIGINT, SIGTERM or run.minutes. */
int trainer_run(struct trainer *t, struct err *e);

/* Labels that count at each MTP depth (0: the main loss) are added to counts. */
void count_labels(const int32_t *labels, const int32_t *doc_start, int64_t rows, int64_t seq, int depths, int64_t *counts);
/* Scale of each loss's gradient from those counts. */
void loss_scales(const struct config *cfg, const int64_t *counts, int depths, double *scale);

/* Parts that eval, generate, grads and gradcheck share. */
int tokenizer_for(const struct config *cfg, struct tokenizer *tok, struct err *e);
/* Keys of any layout (ckpt/keymap.h); on an error nothing has been changed. */
int load_params(struct model *m, const struct ckpt *c, struct err *e);
int load_moments(struct model *m, const struct ckpt *c, struct err *e);
/* Parameters alone, from a checkpoint, a run or a .safetensors file. allow: enum config_load_allow; note
 * gets a message about keys that were forgiven, or none. */
int load_weights(struct model *m, const char *path, int allow, struct err *note, struct err *e);
enum dev_kind device_of(const struct config *cfg);
int device_open(struct dev *d, const struct config *cfg, struct err *e);
void plan_options(struct exec *x, const struct config *cfg); /* poison, random lanes, sync, find_nan */

/* ---- generate ---------------------------------------------------------------------------------------------- */

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
int sample_token(const struct sampler *s, const struct tensor *logits, int64_t vocab, uint64_t n, struct candidate *scratch);

struct generator {
    struct model model;
    struct model_plan prefill, decode;
    struct exec exec;
    int64_t pos; /* tokens in the cache */
    int32_t *positions;
    struct tensor last; /* host view of the last row of logits */
};
int generator_open(struct generator *g, const struct config *cfg, struct dev *dev, const struct ckpt *from, int64_t max_tokens,
                   struct err *e);
void generator_close(struct generator *g);
/* Feed tokens; *logits is the row of the last one. */
int generator_feed(struct generator *g, const int32_t *tokens, int64_t n, struct tensor *logits, struct err *e);
void generator_rewind(struct generator *g); /* a new sequence */

/* ---- whole-model gradient check ------------------------------------------------------------------------------- */

#define GRADCHECK_ALLOWED 1e-6 /* relative error */
struct model_check_row {
    const char *key;
    double numeric, analytic, error;
};
/* Random directions per parameter, central differences in double on the reference device. visit is
 * called for each; the worst relative error comes back. */
int model_gradcheck(const struct config *cfg, uint64_t seed, void (*visit)(void *, const struct model_check_row *), void *ctx,
                    double *worst, struct err *e);

#endif
