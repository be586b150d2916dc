/* A layer kind (core) and a residual connection (joint), each defined once: everything that the rest of the program
 * must know about one is a field here. The pattern language, options and their rules, checkpoint keys, FLOPs, recompute
 * groups, the small models of `braid verify` and the graph builder walk over the kinds and name none of them.
 *
 * Kinds are defined in layers/, one file each, and listed in layers/cores.def and layers/joints.def. This header is
 * below config and ckpt, which therefore see the kinds without seeing how a layer is built: types of the folders above
 * are only named here. */
#ifndef BRAID_KIND_H
#define BRAID_KIND_H

#include "base/base.h"

struct config;
struct build;
struct core_io;
struct kernel_report;
struct sublayer;

/* ---- options --------------------------------------------------------------------------------- */

/* An option that not every model reads. An option that no kind lists is read by all of them. */
struct option_use {
    const char *name;
    bool (*read)(const struct config *c); /* false: something it needs is off; may be NULL */
    const char *needs;                    /* what that is */
};
/* A rule over several options, checked after the automatic values are derived, whether the pattern has the kind or
 * not. The message is followed by the values and origins of the named options. */
struct rule {
    const char *name;
    bool (*broken)(const struct config *c);
    const char *message;
    const char *options[4];
};
/* A size of the small model that `braid verify` derives from the user's. */
struct tiny_size {
    const char *name;
    int64_t value;
    bool always; /* else only where the user's value is larger */
};
/* What a kind may read while its options are shrunk: the layers of both models, one symbol each. */
struct tiny_model {
    const struct config *user;
    const char *user_symbols, *symbols;
};
enum { KIND_MAX_REFUSED = 16 };
struct kind_options {
    const struct option_use *uses;
    int n_uses;
    const char *refused[KIND_MAX_REFUSED]; /* options that ask for what this kind cannot do */
    const struct rule *rules;
    int n_rules;
    const struct tiny_size *tiny;
    int n_tiny;
    /* Changes that a table of sizes cannot express; may be NULL. */
    int (*shrink)(struct config *c, const struct tiny_model *m, struct err *e);
};
#define KIND_ROWS(field, table) .field = (table), .n_##field = countof(table)

/* ---- checkpoint keys ------------------------------------------------------------------------- */

/* Which part of a Transformer layer the kind stands for. Its hyper-connections are named after it. */
enum key_place {
    KEY_PLACE_ALONE,     /* a layer of its own: hyper_connection. */
    KEY_PLACE_ATTENTION, /* self_attention_hyper_connection. */
    KEY_PLACE_MLP,       /* mlp_hyper_connection. */
};
/* A tensor that a distributed checkpoint of Megatron's stores in parts, so that each can be cut among ranks;
 * together they are the rows of one tensor. */
enum { KEY_MAX_PARTS = 6 };
struct key_split {
    const char *leaf;
    const char *parts[KEY_MAX_PARTS];
};
enum { KEY_MAX_PREFIXES = 8 };
struct kind_keys {
    const char *family; /* kinds of one family store the same names, so they cannot share a layer number */
    enum key_place place;
    bool mixes;       /* mixes positions: comes first where two layers share a number */
    bool transformer; /* the layer that a plain Transformer has in this place */
    bool optional;    /* a file may lack all of these layers, or have them where the model has none */
    /* How its keys begin after "decoder.layers.N."; the longest match of all kinds decides. */
    const char *prefixes[KEY_MAX_PREFIXES];
    const struct key_split *splits;
    int n_splits;
    /* Rows of each part of one of these splits. NULL without splits. */
    void (*part_rows)(const struct config *c, const struct key_split *s, int64_t rows[KEY_MAX_PARTS]);
};

/* ---- recompute ------------------------------------------------------------------------------- */

/* A name of Megatron's in plan.recompute, and the slots that it means here. */
enum { RECOMPUTE_MAX_MEMBERS = 4 };
struct recompute_group {
    const char *name, *members[RECOMPUTE_MAX_MEMBERS];
};
enum { KIND_MAX_GROUPS = 4 };

/* ---- sizes ----------------------------------------------------------------------------------- */

/* Elements of the largest tensors that a kind may have: of an activation for each token, and of a weight. In double,
 * because they are compared with what 64 bits can count. */
struct kind_sizes {
    double token, weight;
};

/* ---- cores ----------------------------------------------------------------------------------- */

struct core_kind {
    char symbol;
    const char *name;     /* in tables: "mlp" */
    const char *title;    /* in messages: "MLP" */
    const char *norm_key; /* where Megatron keeps the gain of the norm in front of it */
    const char *excludes; /* symbols that cannot stand in one part of a pattern with it; NULL: none */
    const char *excludes_message;
    bool ends_group;       /* must be the last layer of its group */
    bool has_experts;      /* parallel.ep distributes its experts over ranks */
    bool divides_sequence; /* works on a part of every sequence, as a rank of parallel.cp has it */
    bool fills;            /* fills the layers that model.attn_ratio and model.mlp_ratio leave over */
    bool by_row;           /* treats every row by itself, so tensor-parallel ranks keep their share of the rows in it */
    bool divides_weights;  /* or: has slices of its weights under parallel.tp, all rows, and gives a part of a sum */
    struct kind_options options;
    struct kind_keys keys;
    struct recompute_group recompute[KIND_MAX_GROUPS];
    /* Forward FLOPs of one token at length seq, by the Megatron convention. */
    double (*flops)(const struct config *c, int64_t seq);
    /* Called whether or not the pattern has the kind; NULL: nothing is larger than model.hidden. */
    struct kind_sizes (*sizes)(const struct config *c);
    /* Prints which kernels run its ops, and why; NULL: there is no choice. */
    void (*kernels)(const struct kernel_report *r);
    /* Draws random numbers in training, beside dropout; NULL: never. */
    bool (*draws)(const struct config *c);
    /* Declares parameters, slots and nodes, and creates io->f. NULL: known to the pattern, but not built. */
    int (*declare)(struct build *b, struct core_io *io);
};
enum { KIND_MAX_CORES = 15 };
const struct core_kind *const *core_kinds(int *n); /* in the order of cores.def; layers/cores.c */
const struct core_kind *core_find(char symbol);    /* NULL: unknown symbol */
/* The pattern has a layer of this kind. */
bool core_in(const struct core_kind *k, const char *pattern);
bool core_same_family(const struct core_kind *a, const struct core_kind *b);
/* The first kind that a plain Transformer has in this place, without experts or with them. */
const struct core_kind *core_transformer(enum key_place place, bool experts);

/* ---- joints ---------------------------------------------------------------------------------- */

struct joint_kind {
    const char *name;
    struct kind_options options;
    struct recompute_group recompute[KIND_MAX_GROUPS];
    bool (*chosen)(const struct config *c); /* the model's options ask for it; NULL: where no other is asked for */
    /* As for cores; check_kernels: an error where kernels that were asked for by name do not exist. */
    struct kind_sizes (*sizes)(const struct config *c);
    void (*kernels)(const struct kernel_report *r);
    int (*check_kernels)(const struct kernel_report *r, struct err *e);
    /* Closes prev (f NO_SLOT: nothing to close, x is the embedding, or with wide the streams of an MTP entry) and
     * opens next. norm_key: key of the gain. last: next is the head, which reads h; where the joint has several
     * streams, multi-token prediction reads x as well and adds to its gradient. */
    int (*declare)(struct build *b, const struct sublayer *prev, struct sublayer *next, const char *norm_key,
                   bool last);
    /* The first half alone, in front of a pipeline cut: next gets x, dx, wide and the carry, and opens nothing. With
     * nothing to close, x passes unchanged, a single stream expanded to several where the joint has several. */
    int (*close)(struct build *b, const struct sublayer *prev, struct sublayer *next);
    /* The other side of that cut: slots for what crosses. b->layer: the first layer after it. */
    void (*arrive)(struct build *b, struct sublayer *entry);
    /* Training, after the recompute policy: replays of what was dropped may be joined. NULL: they stay as
     * declared. */
    int (*settle)(struct build *b);
};
const struct joint_kind *const *joint_kinds(int *n); /* in the order of joints.def; layers/cores.c */
const struct joint_kind *joint_of(const struct config *c);

/* ---- all kinds ------------------------------------------------------------------------------- */

/* The options of kind i, cores first; core is NULL for a joint. False: there are no more. */
struct kind_at {
    const struct kind_options *options;
    const struct core_kind *core;
};
bool kind_at(int i, struct kind_at *out);
/* The slots that a group's name means, or NULL. */
const struct recompute_group *kind_recompute(const char *name, int i);

#endif
