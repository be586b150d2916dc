/* Private to hf/: the tables of families, an open folder, and where a parameter's rows are. */
#ifndef BRAID_HF_INT_H
#define BRAID_HF_INT_H

#include "hf/hf.h"

#include <jansson.h>

enum { HF_NAME = 256, HF_MAX_PARTS = 6, HF_CONFIG_BYTES = 4 << 20, HF_INDEX_BYTES = 64 << 20 };

/* ---- tables ---------------------------------------------------------------------------------- */

/* Some rows of a parameter, and the tensor they are in. Sizes are sums of products of letters (hf_size). With a chunk
 * the rows are taken out of a longer tensor: `chunk` rows from `offset` on, then `stride` further, and so on. */
struct hf_part {
    /* '@' at the start: behind the root of the names; '/': as it stands; else below the layer. {e}: number of the
     * expert */
    const char *name;
    const char *rows; /* NULL: all rows of the parameter */
    const char *chunk, *stride, *offset;
    const char *pairs; /* channels of a head: its halves are interleaved in the tensor, 0, n/2, 1, n/2 + 1, ... */
};

enum {
    HF_TRANSPOSED = 1, /* [in, out] in the folder */
    HF_FUSED = 2,      /* all experts in one tensor with a leading axis */
    HF_MINUS_ONE = 4,  /* the folder's value is ours + 1 where our norms are zero-centred */
    HF_KEEP_F32 = 8,   /* F32 whatever the export's dtype */
    HF_INTEGERS = 16,  /* a table, I64 in the folder */
};

/* One parameter of ours: for each of `groups` groups, its share of each part in turn. */
struct hf_rule {
    const char *key;    /* below the layer ("mlp.router.weight"), or whole; "mtp." stands for "mtp.layers.K." */
    const char *groups; /* NULL: one */
    unsigned flags;
    struct hf_part part[HF_MAX_PARTS];
};

enum hf_field_kind {
    HF_INT,
    HF_INT_OR_NULL, /* 0 is written as null */
    HF_REAL,
    HF_BOOL,
    HF_FIXED,   /* must have the value `text`, which is JSON; written so */
    HF_ABSENT,  /* must be absent, null, false or 0: braid has nothing for it */
    HF_IGNORED, /* says nothing about the mathematics */
    HF_NOTED,   /* ignored, with the note `text` where it is not 0 */
};
struct hf_field {
    const char *json;
    enum hf_field_kind kind;
    const char *option; /* "model.hidden" */
    const char *text;   /* where the file is silent: the option's text; NULL: the field is required */
};
enum { HF_DEFAULT_SEQ = 2048 }; /* train.seq of an imported model is its longest sequence, at most this */

struct hf_json {  /* config.json while it is read: the part that describes the language model */
    json_t *root; /* owned */
    json_t *text; /* root, or its text_config */
    const char *label;
};

/* A tensor of a prediction depth that is a copy of one of the model's: written, and read only to be compared. */
struct hf_copy {
    const char *key, *name; /* key: of our parameter */
};

struct hf_family {
    const char *model_type, *architecture;
    const char *roots[4];         /* prefixes that '@' stands for; the first is written */
    const char *layers;           /* "layers.": behind the root, before the number */
    const char *mtp_layers;       /* the same for a prediction depth; NULL: its layers follow those of the model */
    const char *depth;            /* layers of a prediction depth, such as "+E"; NULL: the family has none */
    const struct hf_copy *copies; /* ends with a row without a key; may be NULL */
    bool own_names;               /* tensors are not named after transformers' modules: no PEFT, no FP8 blocks */
    const struct hf_rule *const *rules;   /* ends with NULL */
    const struct hf_field *const *fields; /* each ends with a row without a name; the list with NULL */
    /* What the tables cannot say: the pattern, rotary embedding, routing. */
    int (*read)(const struct hf_json *j, struct config *c, struct err *e);
    int (*write)(const struct config *c, json_t *out, struct err *e);
};
extern const struct hf_family *const hf_families[]; /* ends with NULL */

/* "HD+2GD" with the sizes of a model; letters in families.c. */
int64_t hf_size(const struct config_model *m, const char *text);

/* ---- config.c -------------------------------------------------------------------------------- */

int hf_json_open(struct hf_json *j, const char *folder, struct err *e);
void hf_json_close(struct hf_json *j);
/* NULL where the field is absent or null. */
json_t *hf_json_get(const struct hf_json *j, const char *name);
int hf_json_int(const struct hf_json *j, const char *name, int64_t absent, int64_t *out, struct err *e);
int hf_json_real(const struct hf_json *j, const char *name, double absent, double *out, struct err *e);
int hf_refuse(const struct hf_json *j, const char *field, const char *why, struct err *e);
int hf_set_int(const struct hf_json *j, struct config *c, const char *option, int64_t value, struct err *e);
int hf_set_real(const struct hf_json *j, struct config *c, const char *option, double value, struct err *e);
int hf_set_text(const struct hf_json *j, struct config *c, const char *option, const char *value, struct err *e);
/* The longest sequence of the model; 0: config.json does not say. */
int hf_max_position(const struct hf_json *j, int64_t *out, struct err *e);
int hf_config_read(const struct hf_family *fam, const struct hf_json *j, struct config *c, struct buf *notes,
                   struct err *e);
int hf_config_write(const struct hf_family *fam, const struct config *c, enum dtype dtype, json_t **out, struct err *e);
/* A JSON file in a folder; NULL is lack of memory (export.c). */
int hf_write_json(const char *dir, const char *name, const json_t *json, struct err *e);
/* Sets a member of an object; NULL values and lack of memory are one error. */
int hf_put(json_t *object, const char *name, json_t *value, struct err *e);
/* An option of a model as a number. */
int hf_number(const struct config *c, const char *option, double *out, struct err *e);

/* ---- rope.c ---------------------------------------------------------------------------------- */

/* base, share: rope_theta and partial_rotary_factor where the folder has none; share 0: the class rotates whole heads.
 * */
int hf_rope_read(const struct hf_json *j, struct config *c, double base, double share, struct err *e);
int hf_rope_write(const struct config *c, json_t *out, struct err *e);
/* The scaling alone: kind and numbers in the object o, which is or is in `field`; nothing where it is the default. */
int hf_rope_scaling(const struct hf_json *j, struct config *c, const char *field, json_t *o, struct err *e);
int hf_rope_scaling_write(const struct config *c, json_t *o, struct err *e);

/* ---- folder.c -------------------------------------------------------------------------------- */

enum hf_quant { HF_PLAIN, HF_FP8, HF_MXFP4 };
struct hf_tensor { /* as the model sees it: dequantised */
    const struct st_entry *data, *scale;
    int file; /* of data */
    enum hf_quant quant;
    int rank;
    int64_t dim[TENSOR_MAX_RANK];
};
struct hf_name { /* one tensor of the folder */
    const char *name;
    const struct st_entry *entry;
    int file; /* which of the folder's holds it */
    bool used;
};
struct hf_link { /* one part of one parameter (and expert) */
    int param;
    int64_t expert; /* -1: not one expert's */
    const struct hf_rule *rule;
    int part;
    const char *name;
};
struct hf_folder {
    char *path;
    struct hf_json json;
    const struct hf_family *family;
    const char *root; /* what '@' is in this folder */
    bool gradients;   /* of a model, instead of its values */
    struct st_file **files;
    char **file_names; /* of the files, without the folder */
    int n_files;
    struct hf_name *names; /* sorted */
    int n_names;
    const struct config *config;
    const struct param *const *params;
    int n_params;
    struct hf_link *links; /* sorted by parameter, expert, part */
    int *first;            /* link of each parameter; n_params + 1 */
    int n_links;
    size_t links_cap;
    struct arena memory;
    /* The tensor read last: parts of several experts or sections share one. */
    const struct st_entry *held;
    float *values;
    size_t values_cap;
};
int hf_find(struct hf_folder *f, const char *name, struct hf_tensor *out);
/* All of it as F32, dense; valid until the next call. */
int hf_read(struct hf_folder *f, const struct hf_tensor *t, const char *name, const float **out, struct err *e);

/* ---- place.c --------------------------------------------------------------------------------- */

/* A parameter as matrices: `experts` of rows x cols. */
struct hf_matrix {
    int64_t experts, rows, cols;
};
struct hf_matrix hf_matrix_of(const struct param *p);
/* Where part `part` of a rule lies in the parameter and in the tensor. */
struct hf_span {
    int64_t rows, chunk, stride, offset, pairs; /* in the tensor */
    int64_t total;                              /* rows of the tensor */
    int64_t groups, per_group;                  /* rows of this part in a group */
    int64_t group_rows, group_at;               /* rows of a group, and where this part's begin */
};
int hf_span_of(const struct hf_rule *r, int part, const struct config_model *m, int64_t rows, struct hf_span *s,
               struct err *e);
/* Copies rows of a part between one matrix of the parameter and one of the tensor; cols are equal. */
void hf_copy_in(const struct hf_span *s, int64_t cols, bool transposed, float add, float *param, const float *tensor);
void hf_copy_out(const struct hf_span *s, int64_t cols, bool transposed, float add, const float *param, float *tensor);
/* The shape of the tensor that a part is in. */
int hf_part_shape(const struct hf_rule *r, const struct hf_span *s, const struct param *p,
                  int64_t dim[TENSOR_MAX_RANK]);

/* ---- bind.c ---------------------------------------------------------------------------------- */

/* Which rules a parameter has, in the order of preference; 0 where none fits. layer: the number in the key, or -1. */
struct hf_key {
    const char *rest;     /* what rules name */
    int64_t layer, depth; /* -1: none */
};
void hf_key_of(const char *key, struct hf_key *out);
/* The name of a part: root, layer and expert filled in. */
char *hf_part_name(struct arena *a, const struct hf_family *fam, const char *root, const struct config *c,
                   const struct hf_key *k, const char *name, int64_t expert);
/* Appends the links of one parameter by one rule. */
int hf_link_rule(struct hf_folder *f, int param, const struct hf_key *k, const struct hf_rule *r, struct err *e);
int64_t hf_pattern_layers(const struct config *c); /* numbered layers of the main part */
int64_t hf_pattern_depths(const struct config *c); /* of multi-token prediction */
/* Adds the prediction depths whose tensors are in the folder to model.pattern. */
int hf_add_predictions(struct hf_folder *f, struct config *c, struct err *e);
/* The rule by which a copy in a prediction depth is made of a parameter; NULL: no such copy. A tied model has its
 * embedding in place of the head. */
const struct hf_rule *hf_copy_rule(const struct hf_family *fam, const struct config *c, const struct hf_copy *copy);
const struct hf_rule *hf_next_rule(const struct hf_family *fam, const struct hf_key *k, const struct hf_rule *after);

#endif
