/* Key maps: where the data of a model's parameters are in a file that may name them another way.
 *
 * Files of one model differ in how layers are numbered (each layer, or each group of layers as
 * a Transformer does), whether layers of one kind are stacked under a key without a number, what
 * the final norm and the layers of multi-token prediction are called, and whether experts share one
 * tensor or have one each. A map reads all of these and finds out by the structure of the keys, not
 * by what the file says about itself. Values never change: every map is bit-exact. */
#ifndef BRAID_KEYMAP_H
#define BRAID_KEYMAP_H

#include "ckpt/ckpt.h"

/* ---- what a file holds ----------------------------------------------------------------------- */

enum key_space { KEYS_MODEL, KEYS_EXP_AVG, KEYS_EXP_AVG_SQ, KEYS_FP32_PARAM, KEYS_SPACES };
const char *key_space_name(enum key_space s); /* "model", "exp_avg", ... */

struct key_tensor {
    const char *key;    /* a model key: what marks the space is cut off */
    const char *stored; /* as in the file */
    struct tensor view; /* on the read-only map; may be unaligned for its dtype */
    enum key_space space;
};
struct key_file {
    const char *label; /* for messages */
    struct key_tensor *list;
    int n;
    int64_t glu_interleave; /* gate and up rows of experts alternate in blocks of so many; 0: halves */
    /* private */
    struct ckpt *ckpt;
    struct st_file *files[2];
    struct arena memory;
};
/* path: a checkpoint folder, a run folder (its newest checkpoint), a folder with megatron.json, model.safetensors and
 * maybe optimizer.safetensors (braid export --format=megatron, tools/megatron_dist.py) or a .safetensors file. A file
 * says by the entry KEY_GLU_INTERLEAVE of its metadata that its experts are interleaved; checkpoints never are. */
#define KEY_GLU_INTERLEAVE "glu_interleave"
int key_file_open(struct key_file *f, const char *path, struct err *e);
/* The same on an open checkpoint, which must outlive it. */
int key_file_from(struct key_file *f, const struct ckpt *c, struct err *e);
void key_file_close(struct key_file *f);

/* ---- loading --------------------------------------------------------------------------------- */

struct keymap;
struct config;
/* Where each of the n parameters is. A parameter of the decoder names its physical layer in
 * `layer`. Everything is checked here: ambiguity, structure, shapes and dtypes, so that loading
 * does not fail halfway. `to` is the dtype that will be loaded into (tables: I32). A key that is not
 * there is no error yet. Of a model whose file holds fp32 master weights too (fp32_param), those are loaded. */
int keymap_open(struct keymap **out, const struct key_file *f, enum key_space space, const struct param *const *params,
                int n, enum dtype to, struct err *e);
void keymap_close(struct keymap *m); /* NULL is allowed */
bool keymap_has(const struct keymap *m, int i);
/* One error names what is missing and what is left over; allow: CKPT_ALLOW_*. */
int keymap_check(const struct keymap *m, unsigned allow, struct err *e);
int keymap_missing(const struct keymap *m);
int keymap_unexpected(const struct keymap *m);
/* Fill dst, a dense host tensor of the parameter's shape, in the order of memory. */
int keymap_load(const struct keymap *m, int i, const struct tensor *dst, struct err *e);

/* ---- writing another layout ------------------------------------------------------------------ */

enum key_layout {
    KEYS_FLAT,    /* layers numbered one by one; decoder.final_norm */
    KEYS_LOGICAL, /* layers numbered by group, as a Transformer's; decoder.final_layernorm */
    KEYS_STACKED, /* a Transformer's: as KEYS_LOGICAL, but one key for all layers, with a leading layer axis, where they
                   * are alike; prediction depths of attention and MLP are one transformer_layer */
    KEYS_INDEXED, /* experts: weight0, weight1, ... */
    KEYS_GROUPED, /* experts: one weight with a leading expert axis */
    KEYS_LAYOUTS,
};
const char *key_layout_name(enum key_layout l);
bool key_layout_from_name(const char *name, enum key_layout *out);

/* The layers of the model, where the file's keys alone do not say: symbol and group of each. */
struct key_layers {
    int n;
    const char *symbols; /* as in a pattern */
    const uint16_t *item;
    bool grouped; /* the pattern has brackets, even if no two layers share a group */
};
struct key_output {
    struct st_item *items; /* model keys of one space; data on the file's map or in memory */
    int n;
    const char *note; /* NULL, or why something was not written as the layout has it */
    struct arena memory;
};
struct key_target {
    enum key_layout layout;
    int64_t glu_interleave;          /* of the output, as in struct key_file */
    const struct key_layers *layers; /* may be NULL */
    /* of the model; not NULL: names and parts of a distributed checkpoint of Megatron's */
    const struct config *distributed;
};
/* The file must outlive the output. */
int key_convert(struct key_output *out, const struct key_file *f, enum key_space space, const struct key_target *to,
                struct err *e);
void key_output_release(struct key_output *o);

#endif
