/* Private to ckpt/keys/: a key taken apart, and which layers of a file are which of the model. */
#ifndef BRAID_KEYMAP_INT_H
#define BRAID_KEYMAP_INT_H

#include "ckpt/ckpt_int.h"
#include "ckpt/keys/keymap.h"
#include "kind/kind.h"

/* ---- name.c ---------------------------------------------------------------------------------- */

enum key_scope { SCOPE_PLAIN, SCOPE_LAYER, SCOPE_MTP };
enum {
    NOT_NUMBERED = -1, /* layer: all layers stacked; in MTP the one transformer_layer */
    NO_LAYER = -2,     /* MTP: what belongs to the depth itself */
    WHOLE = -1,        /* expert, part: not split */
    KEY_MAX_LAYER = 1 << 16,
};
struct key_name {
    enum key_scope scope;
    int depth, layer, expert, part;
    const char *leaf; /* what is left, in one spelling */
};
/* Any text is a name; what is not understood is a plain one. */
int key_parse(struct arena *a, const char *key, struct key_name *out, struct err *e);
/* How names are spelled in an output. */
struct key_spelling {
    bool transformer; /* the final norm by a Transformer's name */
    bool wrapped; /* hyper-connections as a hybrid stack of Megatron's names them: inner_layer., hyper_connection. */
    bool distributed; /* experts.experts., as a distributed checkpoint names what sits in a grouped module */
};
/* The name as text, in braid's spelling unless told otherwise. NULL: no memory. */
char *key_text(struct arena *a, const struct key_name *name, const struct key_spelling *how);
/* Scope, depth, layer, leaf; then part and expert. */
int key_order_place(const struct key_name *a, const struct key_name *b);
int key_order(const struct key_name *a, const struct key_name *b);
/* The split of this leaf, and the kind that defines it; NULL: it is stored whole. */
const struct key_split *key_split_of(const char *leaf, const struct core_kind **kind);
int key_parts(const char *leaf, int part); /* how many parts the split has that `part` belongs to */

/* Hyper-connections of a layer. One number may hold those of several layers; a second layer of a class there has
 * "_2" in its name. */
enum key_hyper { HYPER_NONE, HYPER_ATTENTION, HYPER_MLP, HYPER_ANY /* no class in the name: a hybrid's, or Mamba's */ };
enum key_hyper key_hyper(const char *leaf, bool *second, const char **rest);
enum key_hyper key_hyper_of(unsigned family); /* HYPER_ANY for a layer of its own */
char *key_hyper_leaf(struct arena *a, enum key_hyper class, bool second, const char *rest); /* NULL: no memory */
bool key_ignored(const char *key); /* _extra_state: metadata of the writer's runtime */

/* A family of layer kinds (kind_keys.family) is a bit; layers of different families can share a number because their
 * keys differ. */
enum { FAM_OTHER = 1u << KIND_MAX_CORES, FAM_COUNT = KIND_MAX_CORES + 1 };
unsigned family_of(char symbol);            /* FAM_OTHER: no such kind */
unsigned families_at(enum key_place place); /* of kinds that stand there */
unsigned families_mixing(void);             /* of those that mix positions */
unsigned families_of_transformer(void);     /* of those that a plain Transformer has */
unsigned families_optional(void);           /* of those that only the file or only the model may have */
/* The family a leaf belongs to; all that stand in one place, or 0, when the leaf alone cannot tell. */
unsigned key_family(const char *leaf);
const char *family_name(unsigned family);
const char *families_text(unsigned set, char *out, size_t size); /* "attention and MLP" */

/* ---- glu.c ----------------------------------------------------------------------------------- */

/* Rows of matrices whose gate and up rows lie in blocks of `from` (0: two halves), to blocks of `to`. */
struct glu_rows {
    int64_t matrices, rows, bytes; /* bytes of a row */
    int64_t from, to;
};
bool key_is_glu(const char *leaf); /* weight or bias of the experts' first layer */
int glu_check(const char *label, const char *key, int64_t rows, int64_t blocks, struct err *e);
void glu_reorder(void *to, const void *from, const struct glu_rows *r);
/* The entry of a file's metadata; NULL is 0. */
int glu_parse(const char *label, const char *text, int64_t *out, struct err *e);

/* ---- layers.c -------------------------------------------------------------------------------- */

struct key_source {
    struct key_name name;
    const struct key_tensor *tensor;
    bool used;
};
struct key_stack { /* the families at each number, of a file or of wanted keys */
    unsigned *families;
    int n;
};
/* Stacked keys count at every number; their layer axes must agree. */
int key_stack_of(struct key_stack *s, const struct key_source *list, int n, const char *label, struct err *e);
void key_stack_release(struct key_stack *s);

struct key_wanted {
    struct key_name name;
    const struct param *param;
};
/* Malloc'd arrays. */
struct key_match {
    int *file_of; /* the number in the file of the model's physical layer, -1 for none */
    bool *second; /* an earlier layer with the same number has hyper-connections of the same class */
    int n;        /* one past the highest physical layer */
};
int key_match_layers(struct key_match *out, const struct key_stack *file, const struct key_wanted *wants, int n,
                     const char *label, struct err *e);
void key_match_release(struct key_match *m);
/* Names without a class (hyper_connection.*), which a hybrid stack of Megatron's gives every layer, get the class of
 * the one layer with their number. Sorts the list. */
int key_name_hyper(struct arena *a, struct key_source *list, int n, struct err *e);
/* The slice of a stacked tensor at one number. */
struct tensor layer_slice(const struct tensor *t, int64_t row);

#endif
