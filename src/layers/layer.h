/* Cores and joints, and what they see while they declare themselves.
 *
 * A *core* maps h [rows, hidden] to f [rows, hidden] and knows nothing of residuals. A *joint* closes
 * the sublayer before it and opens the one after it: it owns the residual stream, forward and
 * backward. model/stack.c alternates them:
 *
 *     embed -> joint -> core -> joint -> core -> ... -> joint -> head
 *
 * Add a core: one file with, in this order, maths and a shape legend, sizes, params, nodes and slots,
 * cost, options and rules, the const struct core_kind (kind/kind.h); then a line in cores.def. Pattern,
 * checks of options, checkpoints, FLOPs, `braid verify` and the tests of all kinds then find it. */
#ifndef BRAID_LAYERS_H
#define BRAID_LAYERS_H

#include "comm/comm.h"
#include "config/config.h"
#include "kind/kind.h"
#include "ops/act/act.h"
#include "ops/dropout/dropout.h"
#include "ops/rope/rope.h"
#include "plan/graph.h"
#include "tensor/params.h"

enum build_mode {
    BUILD_TRAIN,  /* forward, backward, weight gradients */
    BUILD_EVAL,   /* forward and loss */
    BUILD_DECODE, /* forward with caches, logits out */
};

/* A persistent tensor that several plans share by name: a table computed once at start (RoPE), or with
 * fill NULL a decode cache, which starts as zeros. */
struct table {
    const char *name;
    struct tensor shape;
    int64_t offset; /* in ARENA_STATE */
    void (*fill)(struct tensor *host, const void *arg);
    const void *arg; /* must live until model_commit */
};
struct table_list {
    struct table *t;
    int n;
    size_t cap;
};

/* A number (or n of them) that a layer reports each step: summed over microbatches in a persistent F64 slot,
 * divided by their count when logged as "tag/layer L" (or "tag/layer L.i"). */
struct metric {
    const char *tag;
    int layer;
    int64_t n, offset; /* offset in ARENA_STATE */
    bool objective;    /* added to the loss that is minimised: gradcheck counts it in */
    const char *only;  /* an objective of the parameters whose keys contain this text; NULL: of all */
    int64_t room;      /* > 0: not a metric: rows there was room for; the value is what the run wanted */
    enum room_kind {
        ROOM_BUFFER, /* in a buffer between two ranks */
        ROOM_EXPERTS /* at the experts of a rank */
    } room_kind;
    bool eval; /* with room: of the eval plan */
};
struct metric_list {
    struct metric *m;
    int n;
    size_t cap;
};

/* The share of tokens that have an expert on a given one of `ranks` ranks, if all experts are equally likely. */
double tokens_on_rank(const struct config_model *c, int64_t ranks);

/* A router whose choices the trainer records or dictates (train/routes.c): I32 [rows, k] in ARENA_STATE. */
struct route_site {
    int layer;
    int64_t k, experts;
    int64_t chosen, given; /* offsets; -1: not asked for */
};
struct route_list {
    struct route_site *s;
    int n;
    size_t cap;
};

/* A step that a layer adds to the update plan, run after the optimizer (expert bias): uses name persistent memory by
 * arena and offset. */
struct update_use {
    struct tensor shape;
    enum arena_id arena;
    int64_t offset;
    enum use_mode mode;
};
struct update_decl {
    const char *name;
    enum lane_id lane;
    step_fn fn;
    const void *self;
    int n_uses;
    struct update_use use[4];
};
struct update_list {
    struct update_decl *u;
    int n;
    size_t cap;
};

enum { MTP_MAX_DEPTHS = 8 };
/* The inputs of a microbatch and the scalars of a step: slots made by the stack, read by layers. */
struct batch_slots {
    slot_id token, label, pos, doc_start; /* I32 [rows] */
    slot_id doc_local; /* doc_start counted from this rank's first token of the sequence; doc_start where it has all */
    /* Where ranks divide sequences: the ids of every prediction depth; else NO_SLOT. */
    slot_id next_token[MTP_MAX_DEPTHS], next_label[MTP_MAX_DEPTHS], next_pos[MTP_MAX_DEPTHS];
    slot_id info;     /* I64 [4]: step, first sample; where something is drawn: dropout, router noise */
    slot_id start;    /* I64 [1]: decoding */
    slot_id scale;    /* F64 [1 + MTP depths]: of the loss gradients */
    slot_id mb_share; /* F64 [1]: 1 / microbatches of a step; scales losses that are means over one */
    slot_id loss;     /* F64 [2], persistent: sum of nll, number of labels */
};

/* Which residual streams training keeps where a joint has several; made from plan.recompute_block by model/policy.c. */
struct stream_policy {
    /* the stream in front of every so many layers is kept, those between are recomputed; 0: all are kept */
    int64_t every;
    bool by_unit; /* `every` counts units (groups of a grouped pattern), else joints */
    bool stay;    /* nothing in the policy may drop a stream */
};

struct build {
    const struct config *cfg;
    struct dev *dev;
    const struct ops *ops;
    const struct mesh *mesh; /* never NULL; of one rank unless training with several */
    enum build_mode mode;
    struct graph *g;
    struct memory *mem;
    struct param_table *params;
    struct table_list *tables;
    struct metric_list *metrics;
    struct route_list *routes;
    struct update_list *updates;
    struct units *units; /* unit.h; NULL: every parameter is kept whole */
    int64_t batch, seq;  /* of this plan */
    int64_t rows;        /* of what is being declared: batch * seq, or this rank's share of them (shard.h) */
    int64_t whole_seq;   /* tokens of a sequence, of which this rank has seq (parallel.cp) */
    int64_t cache_len;   /* decode: positions the caches hold */
    struct batch_slots in;
    struct stream_policy streams;
    const struct core_kind *core; /* of the layer */
    int layer;                    /* physical layer, 0-based; MTP layers go on counting: names are unique */
    int number;                   /* 1-based among the layers with this symbol: "every k-th attention layer" */
    int n_layers;                 /* symbols in the pattern */
    int unit; /* what plan.recompute_block counts, from the part's start: groups of a grouped pattern, else layers */
    bool unit_start; /* the layer is the first of its unit */
    int n_depths;    /* of multi-token prediction, whatever the mode */
    char prefix[64]; /* key prefix of the layer: "decoder.layers.3." */
    /* lists of keys that a sparse attention layer selected, for later ones that share them (dsa.c) */
    struct shared_index {
        slot_id idx;
        int number, chunk; /* of the layer: its b->number, 0: none yet; its chunk */
    } shared_index;
    struct known_codes *known_codes; /* activations whose FP8 codes are declared already (linear8.c) */
    struct known_norm *known_norms;  /* activations that are norms of what is kept (linear8.c) */
    bool want_logits;
    slot_id logits;           /* head output in decode mode, or with want_logits */
    struct adapter *adapters; /* lora.c: those declared so far, newest first */
    struct err *e;
};

/* FP8 codes of a matrix with their inverse scales, and of its transpose (ops/quantise); NO_SLOT: not made. */
struct code_slots {
    slot_id q, qs, t, ts;
};
/* A weight and its gradient; both NO_SLOT when absent (no bias). dw is NO_SLOT unless training. codes: products take
 * these instead of w, which then is fp32. */
struct weight {
    slot_id w, dw;
    int param; /* row of the parameter table */
    struct code_slots codes;
};
/* name is appended to the layer's prefix unless it is a whole key (b->prefix empty). */
struct weight build_weight(struct build *b, const struct param *decl);
/* The weight of a linear layer: with gpu.precision=fp8 it has codes, unless gpu.fp8_keep names it or its sizes forbid
 * (linear8.c). */
struct weight build_linear_weight(struct build *b, const struct param *decl);
struct weight no_weight(void);
/* Declarations of the common kinds. */
struct param param_matrix(const char *name, int64_t out, int64_t in, double std);
struct param param_vector(const char *name, int64_t n, enum init_kind init);
/* Std of projections that write into the residual stream. */
double output_std(const struct build *b);

slot_id build_real(struct build *b, const char *name, int64_t rows, int64_t cols); /* activation */
slot_id build_wide(struct build *b, const char *name, int64_t rows, int64_t cols); /* activation in the wide type */
slot_id build_grad(struct build *b, const char *name, int64_t rows, int64_t cols); /* NO_SLOT unless training */
slot_id build_wide_grad(struct build *b, const char *name, int64_t rows, int64_t cols); /* NO_SLOT unless training */
/* The plain residual stream: an activation, or in the wide type where model.fp32_residual asks for one that is wider
 * than the layers' (wide_stream). Layers never see it: they read its norm and write what is added to it. */
bool wide_stream(const struct build *b);
slot_id build_stream(struct build *b, const char *name, int64_t rows, int64_t cols);
slot_id build_stream_grad(struct build *b, const char *name, int64_t rows, int64_t cols); /* NO_SLOT unless training */
slot_id build_work(struct build *b, const char *name, int64_t bytes);                     /* NO_SLOT if 0 bytes */
slot_id build_table(struct build *b, const char *name, struct tensor shape, void (*fill)(struct tensor *, const void *),
                    const void *arg);                                        /* shared by full name */
slot_id build_state(struct build *b, const char *name, struct tensor shape); /* zeroed, persistent */
slot_id build_metric(struct build *b, const char *tag, int64_t n);           /* NO_SLOT unless training; ADDS() to it */
/* Training only; the strings and self must live as long as the graph (graph_own). */
void build_update(struct build *b, const struct update_decl *u);
static inline bool training(const struct build *b) { return b->mode == BUILD_TRAIN; }

/* ---- linear: y = x W^T + bias, the block most cores are made of ------------------------------ */

enum { LINEAR_MAX_PARTS = 3 };
struct linear {
    slot_id x, y, dy, dx; /* dy, dx: NO_SLOT unless training (or no dx wanted) */
    struct weight w, bias;
    int64_t in, out;
    int64_t first;       /* where y is the product with some rows of the weight only, for adapters: the first of them */
    struct linear_part { /* outputs of several projections in one: each has a LoRA adapter of its own */
        const char *name;
        int64_t rows;
    } part[LINEAR_MAX_PARTS]; /* up to the first without a name; none: one projection */
    bool plain;               /* never adapted: routers */
    bool summed;              /* y is one rank's part of a sum over tensor-parallel ranks */
    bool x_kept;              /* x is kept for the backward pass of another node in any case */
};
int linear_declare(struct build *b, const char *name, const struct linear *l); /* node */
/* The same in two halves, between which a core may append to the forward phase what is to be recomputed with it. */
int linear_forward(struct build *b, const char *name, const struct linear *l); /* node */
void linear_backward(struct build *b, int node, const struct linear *l);
/* LoRA (lora.c): the adapters of a linear layer, in its own node. */
void lora_forward(struct build *b, int node, const struct linear *l, const char *name);
void lora_backward(struct build *b, int node, const struct linear *l);
/* Does this word of lora.targets name (a part of) the linear layer with this weight? part: NULL or
 * "" if it has none. */
bool lora_names(const char *word, const char *weight_key, const char *part);
bool attention_draws(const struct config *c); /* random numbers, for the dropout of attention weights */
/* Dropout of the attention weights of this layer; without it p is 0 and info absent. */
struct dropout_rule attention_dropout(const struct build *b);
/* ---- the same in FP8 (linear8.c); build.c chooses by the weight's codes */

/* Codes of the input of a linear layer, declared before its node; those of one activation are shared by all its
 * readers. */
struct code_slots activation_codes(struct build *b, const struct linear *l);
/* h is the norm of x, and x and rstd are kept for the backward pass: codes of h are made of them, those of its
 * transpose in the backward pass, and h itself only for readers that want numbers. Declared after h, before its
 * readers. */
struct known_norm {
    slot_id h, x, rstd, w;
    bool zero_centered;
    struct known_norm *next;
};
void declare_norm_source(struct build *b, struct known_norm source);
/* For a node that makes codes instead of the activation, or of the gradient, x: declared before any linear layer that
 * reads x, which then is not written. Its node can make them again. */
struct code_slots declare_known(struct build *b, slot_id x, enum dtype type);
struct code_slots known_codes(const struct build *b, slot_id x); /* NO_SLOT: none */
void codes_again(struct build *b, int node, const struct code_slots *c);
/* The nonlinearity of an MLP between two linear layers, as codes where they take them (mlp.c). */
struct act_slots {
    slot_id pre, act, dact, dpre;
};
void act_codes(struct build *b, const struct act_slots *s, const struct weight *w1, const struct weight *w2, bool bias);
void act_declare(struct build *b, const char *name, struct act_rule rule, const struct act_slots *s);
void linear8_forward(struct build *b, int node, const struct linear *l);
void linear8_backward(struct build *b, int node, const struct linear *l);
/* The layouts of codes that gpu.fp8_recipe asks for. */
struct code_rule {
    int64_t block;
    bool square; /* of weights; activations have their scales by rows */
    enum dtype grad;
};
struct code_rule code_rule(const struct config *cfg);
/* Where ranks share out a weight that has codes, do these travel, not its values? For scales of squares or of whole
 * tensors, with which the codes of the transpose are the same codes. */
bool codes_travel(const struct config *cfg);
/* Shape of the largest magnitudes that ranks tell each other of such a weight (ops/shard8). */
struct tensor code_maxima(const struct config *cfg, const struct mesh *m, const struct param *p, enum dtype wide);
/* The two matrices of experts, which have codes together or not at all: sizes are multiples of 128, and gpu.fp8_keep
 * names neither. The matrices of a parameter lie one below the other in its codes. */
void build_expert_weights(struct build *b, const struct param *p1, const struct param *p2, struct weight *w1,
                          struct weight *w2);
/* Room and slots for the codes of a weight that has them (param.codes). */
void weight_codes(struct build *b, struct param_entry *row, struct weight *w);

/* RoPE settings of the model for `dim` rotated channels. */
struct rope_config rope_from_config(const struct config *cfg, int64_t dim);

/* ---- norm: RMSNorm or LayerNorm of whole rows, as model.norm says ---------------------------- */

struct norm {
    struct weight w, b; /* gain; bias of a LayerNorm */
    slot_id mean, rstd; /* [rows]; mean: LayerNorm only */
    double eps;
    bool layer, zero_centered;
};
/* key: of the gain, which ends in "weight"; that of the bias ends in "bias". */
struct norm norm_weights(struct build *b, const char *key, int64_t width);
/* Statistics of `rows` rows under the names "<prefix>rstd" and "<prefix>mean". */
void norm_statistics(struct build *b, struct norm *n, const char *prefix, int64_t rows);
void norm_forward(struct graph *g, int node, enum phase_id ph, const struct norm *n, struct tensor x, struct tensor y);
/* dres: added to dx; may be absent. */
void norm_backward(struct graph *g, int node, const struct norm *n, struct tensor dy, struct tensor x,
                   struct tensor dres, struct tensor dx);

/* ---- cores ----------------------------------------------------------------------------------- */

struct core_io {
    slot_id h, f;   /* in, out */
    slot_id df, dh; /* gradient of f (read), of h (write) */
};

/* ---- joints ---------------------------------------------------------------------------------- */

/* What a joint opens and the next one closes. */
struct sublayer {
    slot_id x, dx;  /* residual stream, and its gradient, which the closing joint writes */
    slot_id h, dh;  /* normed input of the core; dh is written by the core */
    slot_id f, df;  /* output of the core; df is written by the closing joint */
    slot_id aux[8]; /* the joint's own: mixing coefficients and their gradients */
    bool wide;      /* x holds all streams of a joint with several; after the last joint: before their contraction */
};
enum { AUX_CARRY = 2 }; /* of sublayer.aux: what crosses a cut beside x, forward only (metrics); NO_SLOT: nothing */
/* The stream a stack starts with: no sublayer is open. */
struct sublayer sublayer_entry(slot_id x, slot_id dx, bool wide);
/* Layers per block for which recomputing streams block by block needs least memory: those of a kept stream per
 * block, n C a token, and (n + 2) C a layer for the block being replayed (paper, eq. 20). */
int64_t mhc_block_layers(int64_t streams, int64_t layers);

/* ---- pipeline cuts --------------------------------------------------------------------------- */

/* Segment `before` of the model ends here, or the one after it begins here: the closed stream goes to the rank of the
 * next segment, its gradient comes back. Nodes "cutN.out" and "cutN.in" on the communication lane. */
struct cut_place {
    int before;     /* number of the segment in front of the cut */
    int n_segments; /* of the model */
};
int cut_out_declare(struct build *b, const struct cut_place *at, const struct sublayer *closed);
int cut_in_declare(struct build *b, const struct cut_place *at, const struct joint_kind *joint, struct sublayer *entry);

/* ---- ends ------------------------------------------------------------------------------------ */

/* The embedding's weight, which a tied head, a prediction depth and another stage may share. */
struct param embedding_param(const struct build *b);
/* Embedding (with dropout) of these tokens at these positions, which count where positions are learned; creates x, dx:
 * the residual stream, or what a prediction depth norms. All embeddings share their weights. */
enum embed_use { EMBED_STREAM, EMBED_DEPTH };
int embed_declare(struct build *b, const char *scope, enum embed_use use, slot_id token, slot_id pos, slot_id *x,
                  slot_id *dx);
/* Head and loss; reads h, adds to dh while still in the forward half. All heads share one weight. */
struct head_io {
    const char *scope;
    slot_id h, dh, label;
    slot_id loss;        /* F64 [2], persistent */
    int64_t scale_index; /* which of the batch's loss scales */
};
int head_declare(struct build *b, const struct head_io *io);
/* One depth of multi-token prediction: from the hidden state, tokens and labels of the depth before it
 * (updated to this depth's) to the input of its own stack. */
struct mtp_io {
    /* of the depth before: normed output, or with streams > 1 the streams before their contraction */
    slot_id h, dh;
    int64_t streams;           /* of h and x */
    slot_id token, label, pos; /* in: of the depth before; out: shifted */
    slot_id x, dx;             /* out: input of the depth's stack */
};
int mtp_declare(struct build *b, int depth, struct mtp_io *io);

/* ---- options of rotary embedding, which attention and latent attention read: attention.c ----- */

bool rope_rotates(const struct config *c);
bool rope_is_llama3(const struct config *c);
bool rope_is_yarn(const struct config *c);
bool rope_is_stretched(const struct config *c); /* either of them */
#define ROPE_NEEDS "rotary embedding (model.rope, model.no_rope_freq)"
/* clang-format off */
#define ROPE_USES \
    {"model.rope_base", rope_rotates, ROPE_NEEDS}, \
    {"model.rope_scaling", rope_rotates, ROPE_NEEDS}, \
    {"model.rope_factor", rope_rotates, ROPE_NEEDS}, \
    {"model.rope_original", rope_is_stretched, "model.rope_scaling = llama3 or yarn"}, \
    {"model.rope_low", rope_is_llama3, "model.rope_scaling = llama3"}, \
    {"model.rope_high", rope_is_llama3, "model.rope_scaling = llama3"}, \
    {"model.rope_beta_fast", rope_is_yarn, "model.rope_scaling = yarn"}, \
    {"model.rope_beta_slow", rope_is_yarn, "model.rope_scaling = yarn"}, \
    {"model.rope_truncate", rope_is_yarn, "model.rope_scaling = yarn"}, \
    {"model.rope_mscale", rope_is_yarn, "model.rope_scaling = yarn"}, \
    {"model.rope_mscale_all_dim", rope_is_yarn, "model.rope_scaling = yarn"}
/* clang-format on */

/* ---- kernels.c: which kernels run a kind's ops ----------------------------------------------- */

struct kernel_report {
    const struct config *cfg;
    const struct dev *dev;
    bool on_paper, hopper, cudnn; /* on_paper: a plan for a GPU that is not there */
    struct buf *out;
};
struct kernel_report kernel_report_of(const struct config *cfg, const struct dev *d, struct buf *out);
/* why may be NULL. */
void kernel_line(const struct kernel_report *r, const char *what, const char *kernel, const char *why);
/* Causal attention; widths are of a head. */
struct attention_sizes {
    const char *what;
    int64_t width, values, keys, window; /* of queries and keys; of values; heads of keys; 0: none */
    bool ring;                           /* a call has the keys of one rank (parallel.cp_comm) */
};
void kernel_line_attention(const struct kernel_report *r, const struct attention_sizes *a);
/* Attention over lists of keys that all heads share, and the scores of its indexer. */
struct sparse_sizes {
    const char *what;
    int64_t width, values;          /* channels of a key, and of a value */
    int64_t index_heads, index_dim; /* 0: there is no indexer */
};
void kernel_lines_sparse(const struct kernel_report *r, const struct sparse_sizes *s);

#endif
