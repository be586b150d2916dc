/* A model: config and pattern turned into parameters and graphs. One model holds the parameter table and
 * the memory; it can build several plans over them (train, eval, decode). */
#ifndef BRAID_MODEL_H
#define BRAID_MODEL_H

#include "layers/layer.h"
#include "model/pattern.h"
#include "model/policy.h"
#include "ops/quantise/quantise.h"
#include "plan/plan.h"

/* ---- chunks ---------------------------------------------------------------------------------- */

/* What virtual stage v of a rank holds of the model. */
struct model_chunk {
    int segment, n_segments; /* number among all chunks of the model, and how many there are */
    int from, n;             /* layers of the main part */
    bool first, last;        /* of the model: embedding; final norm, head and prediction depths */
};
int model_chunk(const struct pattern *p, const struct mesh *m, int v, struct model_chunk *out, struct err *e);

/* ---- model ----------------------------------------------------------------------------------- */

struct model {
    const struct config *cfg;
    struct dev *dev;
    const struct ops *ops;
    struct mesh mesh; /* this rank's place; a single rank unless the trainer sets another before the first plan */
    struct pattern pattern;
    struct policy policy;
    struct param_table params;
    struct table_list tables;
    struct metric_list metrics;
    struct route_list routes; /* of the training plan */
    struct update_list updates;
    struct memory mem;
    bool codes_stale; /* values were changed whose FP8 codes ranks make together */
};
int model_init(struct model *m, const struct config *cfg, struct dev *dev, struct err *e);
void model_release(struct model *m);

/* The model in one mode: a graph, its plan, and the slots that the host reads and writes. */
struct model_plan {
    struct graph g;
    struct plan p;
    struct order order; /* of a training plan: the update may go into another plan of the same graph (optim/) */
    enum build_mode mode;
    int64_t batch, seq;
    int64_t cache_len;
    slot_id loss, logits;
    slot_id mtp_loss[MTP_MAX_DEPTHS]; /* training: F64 [2] of each depth */
    int n_mtp;                        /* the same on every rank; where there is no head, the losses are NO_SLOT */
    int n_micro;                      /* microbatches of one run: 1, or with a pipeline or overlap all of a step */
    bool built;
};
struct model_plan_opts {
    const char *name;
    enum build_mode mode;
    int64_t batch, seq;
    int64_t n_micro;   /* training: microbatches of a step on this rank; 0: one */
    int64_t cache_len; /* decode */
    bool want_logits;
};
/* Declares everything and plans it; reserves memory. Before model_commit. */
int model_plan_build(struct model *m, struct model_plan *mp, const struct model_plan_opts *o, struct err *e);
void model_plan_release(struct model_plan *mp);

/* Allocates all arenas, binds the plans, fills tables. Fails unless the allocated bytes equal the planned ones. */
int model_commit(struct model *m, struct model_plan **plans, int n_plans, struct err *e);
/* Fill parameters from their declared init: a function of run.seed and the key alone. */
int model_init_params(struct model *m, struct err *e);

/* Host views; valid on host devices. */
/* As trained: the fp32 master weight where there is one. On the device; of the parameter's shape, or where a rank keeps
 * a shard [n] of it. */
struct tensor model_param(const struct model *m, int index);
struct shard model_param_kept(const struct model *m, int index); /* which elements those are */
/* Sets the part that this rank keeps of master weight and working copy from a dense host tensor of the whole parameter,
 * in the wide type. */
int model_set_param(struct model *m, int index, const struct tensor *host, struct err *e);
/* Whole, or this rank's shard of the sums. */
struct tensor model_grad(const struct model *m, int index);
/* A parameter that has FP8 codes as a matrix, and where its codes and scales are. */
struct quantise_args model_param_codes(const struct model *m, int index);
/* Makes the FP8 codes of a parameter from its value; of all that have codes. To be called after every change of values
 * outside the update plan. Codes that ranks make together (codes.c) are stale then, until all ranks call
 * model_share_codes. */
int model_quantise_param(const struct model *m, int index, struct lane *lane);
int model_quantise(struct model *m, struct err *e);
int model_share_codes(struct model *m, struct err *e);
/* Do ranks make the codes of this parameter together? */
bool model_shares_codes(const struct model *m, int index);
/* The stages of that, for all such parameters; what: a name for messages. Bytes that a stage moves. */
enum code_stage { CODES_MOST, CODES_SHARE, CODES_ENCODE, CODES_GATHER, CODES_TURN, CODE_STAGES };
int model_code_stage(const struct model *m, enum code_stage stage, const char *what, struct lane *lane);
double model_code_stage_bytes(const struct model *m, enum code_stage stage);
/* Copies persistent memory that layers share by offset (metrics, tables, routes) to and from the host. */
int model_read_state(const struct model *m, int64_t offset, void *out, int64_t bytes, struct err *e);
int model_write_state(const struct model *m, int64_t offset, const void *in, int64_t bytes, struct err *e);
/* Address of a persistent slot of a bound plan. */
struct tensor model_slot(const struct model *m, const struct model_plan *mp, slot_id slot);

/* Forward FLOPs of one token at length seq by the Megatron convention, times 3 for
 * training: what MFU is computed from. */
double model_flops_per_token(const struct config *cfg, const struct pattern *p, int64_t seq);
/* Its parts: one layer, the head, an MTP depth less its layers. */
double model_layer_flops(const struct config *cfg, char symbol, int64_t seq);
double model_head_flops(const struct config *cfg);
double model_mtp_flops(const struct config *cfg);
/* The stack as a table: layer, kind, keys, parameters, FLOPs. */
void model_print_stack(const struct model *m, struct buf *out);
/* What every pipeline stage holds; nothing without a pipeline. */
void model_print_stages(const struct model *m, struct buf *out);
void model_print_params(const struct model *m, struct buf *out);
/* The kernels of each class of ops on a device, with the reason where another could be expected (kernels.c). */
void model_print_kernels(const struct config *cfg, const struct dev *d, struct buf *out);
/* An error where kernels that were asked for by name do not exist for this model. */
int model_check_kernels(const struct config *cfg, const struct dev *d, struct err *e);

#endif
