/* One batch through a whole model, with logits, loss and every gradient kept: what `braid grads` writes and what
 * imports are checked by. */
#ifndef BRAID_TRAIN_PROBE_H
#define BRAID_TRAIN_PROBE_H

#include "train/train.h"

struct probe_batch {
    int64_t batch, seq;
    int32_t *tokens, *labels, *pos, *doc; /* [batch, seq] */
};
/* `tokens` and, if there are any, `labels` (-1: ignored) of a file, I32 [batch, seq]; without labels they are the
 * tokens shifted by one. */
int probe_batch_read(struct probe_batch *b, const struct st_file *in, const char *label, struct err *e);
void probe_batch_release(struct probe_batch *b);

struct probe {
    struct dev dev;
    struct model model;
    struct model_plan plan;
    struct exec exec;
    double loss; /* mean over labels */
};
/* Runs the batch with the parameters of a checkpoint (from), of run.load_weights, or fresh ones. c's sizes of a batch
 * are set to this one's. */
int probe_run(struct probe *p, struct config *c, const struct probe_batch *b, const struct ckpt *from, struct err *e);
void probe_release(struct probe *p);

/* The difference from another program's values of the same batch: golden holds `logits` and maybe grad.NAME of a
 * Hugging Face folder's tensors. */
struct probe_difference {
    double logits;   /* largest difference over the largest logit */
    double kl;       /* mean over positions of KL(golden, ours), in nats */
    double gradient; /* worst norm of a difference over the norm, of all parameters; -1: the file has no gradients */
    char worst[128]; /* the parameter of that */
    int n_gradients;
};
int probe_compare(struct probe *p, const struct config *c, const char *golden, const char *hf_folder,
                  struct probe_difference *out, struct err *e);

#endif
