/* A tensor is a value: a pointer, a type, a shape and strides. It owns nothing. Also here: the
 * parameter table's row type, because optimizer, checkpoint and model all use it. */
#ifndef BRAID_TENSOR_H
#define BRAID_TENSOR_H

#include "base/base.h"

enum dtype {
    DT_NONE = 0,
    DT_F64,
    DT_F32,
    DT_F16,
    DT_BF16,
    DT_I64,
    DT_I32,
    DT_I16,
    DT_I8,
    DT_U64,
    DT_U32,
    DT_U16,
    DT_U8,
    DT_BOOL,
    DT_F8_E4M3,
    DT_F8_E5M2,
    DT_F8_E8M0,
    DT_COUNT,
};
size_t dtype_bytes(enum dtype t);
const char *dtype_name(enum dtype t);         /* safetensors spelling: "F32", "BF16" */
enum dtype dtype_from_name(const char *name); /* DT_NONE if unknown */
/* The type of statistics, coefficients and gradients of parameters where activations are of type real. */
static inline enum dtype wide_of(enum dtype real) { return real == DT_BF16 || real == DT_F16 ? DT_F32 : real; }

enum { TENSOR_MAX_RANK = 5 };

struct tensor {
    void *data; /* NULL: absent (an optional argument not given) */
    enum dtype dtype;
    int rank;
    int64_t dim[TENSOR_MAX_RANK];
    int64_t stride[TENSOR_MAX_RANK]; /* in elements */
};

/* Dense row-major shape; data stays NULL until it is placed in memory. */
struct tensor tensor_shape(enum dtype dtype, int rank, const int64_t *dim);
struct tensor tensor_1d(void *data, enum dtype dtype, int64_t n);
struct tensor tensor_2d(void *data, enum dtype dtype, int64_t rows, int64_t cols);
struct tensor tensor_3d(void *data, enum dtype dtype, int64_t a, int64_t b, int64_t c);
struct tensor tensor_4d(void *data, enum dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d);

int64_t tensor_elems(const struct tensor *t);
int64_t tensor_bytes(const struct tensor *t); /* of the dense extent: elems * dtype size */
bool tensor_is_dense(const struct tensor *t);
bool tensor_same_shape(const struct tensor *a, const struct tensor *b);
/* "F32 [16, 256, 320]" */
const char *tensor_text(const struct tensor *t, char *out, size_t size);

/* Views. */
struct tensor tensor_cols(const struct tensor *t, int64_t first, int64_t n); /* slice of last dim */
struct tensor tensor_rows(const struct tensor *t, int64_t first, int64_t n); /* slice of dim 0 */
/* Split the last dim (size a*b) into two dims [.., a, b]. */
struct tensor tensor_split_last(const struct tensor *t, int64_t a, int64_t b);
/* Split dim 0 (size a*b) into [a, b, ..]. */
struct tensor tensor_split_first(const struct tensor *t, int64_t a, int64_t b);

/* Element access by flat (row-major) index, any real or integer dtype: tests and cold paths. */
double tensor_get(const struct tensor *t, int64_t i);
void tensor_set(const struct tensor *t, int64_t i, double value);
/* Copy with conversion between dense host tensors of equal element count. */
void tensor_convert(const struct tensor *dst, const struct tensor *src);

float bf16_to_f32(uint16_t h);
uint16_t f32_to_bf16(float f); /* round to nearest even; NaN stays NaN */
float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f);

/* ---- The parameter table's row --------------------------------------------------------------- */

enum init_kind {
    INIT_ZERO,
    INIT_ONE,
    INIT_NORMAL,      /* N(0, a^2) */
    INIT_UNIFORM,     /* U(a, b) */
    INIT_CONST,       /* a */
    INIT_LOG_UNIFORM, /* ln U(a, b): Mamba-2 and GDN A_log */
    INIT_DT_BIAS,     /* inverse softplus of exp(U(ln a, ln b)): Mamba-2 dt_bias */
    INIT_HASH,        /* (row + column) mod n_values: where hash routing starts */
};

/* In memory a fused projection is [section 0 | section 1 | ...], each section holding all groups.
 * On disk Megatron interleaves them by group: for each group, its rows of every section. With
 * n_sections 0 both are the same. rows[i] is per group; a bias is interleaved the same way.
 * grouped_in_memory: the other way round, groups in memory and sections on disk (interleaved gate and
 * up rows of experts). matrices > 0: dim 0 counts matrices, and the rows of each are dim 1. */
enum { PARAM_MAX_SECTIONS = 6 };
struct row_layout {
    int n_sections;
    int64_t groups;
    int64_t rows[PARAM_MAX_SECTIONS];
    bool grouped_in_memory;
    int64_t matrices;
};

/* How tensor parallelism divides a parameter over its ranks, declared by the layer beside the shape. A dimension that
 * is split consists of sections, one after the other in memory, each of whole units; every rank takes its share of each
 * section, in the order of ranks. Experts are divided by parallel.etp in the same way. */
enum split_how {
    SPLIT_UNKNOWN, /* not declared: the parameter cannot be part of a model under tensor parallelism */
    SPLIT_NONE,    /* every rank holds all of it */
    SPLIT_DIM,     /* dimension `dim` is divided */
};
enum split_unit { UNIT_HEADS, UNIT_GROUPS, UNIT_CHANNELS, UNIT_FFN, UNIT_VOCAB, UNIT_EXPERTS };
/* What is missing from the gradient that one rank computes. Parts are summed over the ranks; a gradient that every rank
 * computes in full must not be. */
enum split_grad {
    GRAD_COMPLETE,
    GRAD_OVER_TOKENS, /* a rank sees its share of the tokens */
    GRAD_OVER_HEADS,  /* a rank sees its share of the heads */
    GRAD_OF_LOSS,     /* every rank has a loss of its own, of which the step takes the mean */
};
struct split_section {
    int64_t size, units;
    enum split_unit unit;
};
struct param_split {
    enum split_how how;
    enum split_grad grad;
    int dim, n_sections;
    struct split_section section[PARAM_MAX_SECTIONS];
};

struct param {
    const char *key; /* canonical checkpoint key, e.g. decoder.layers.0.mlp.linear_fc1.weight */
    int rank;
    int64_t dim[4]; /* shape on this rank */
    /* Where a rank holds a part: rows [first, first + dim[0]) of `full`; full 0: all of it. */
    struct {
        int64_t full, first;
    } shard;
    /* Where tensor parallelism divides it: the share of this rank (param_cut); ranks 0: dim is the whole shape. */
    struct {
        int ranks, rank;
    } slice;
    enum init_kind init;
    double init_a, init_b;
    bool decay;       /* weight decay applies */
    bool buffer;      /* state that is saved with the model but not trained: no gradient, no moments */
    bool frozen;      /* keeps its value: no gradient, no moments, no master weights */
    int group;        /* [group.NAME] it belongs to: 1 + index in the config; 0: none */
    bool expert;      /* belongs to one expert of a mixture (its own data-parallel group) */
    bool wide;        /* kept in the wide type even where activations are narrower */
    bool codes;       /* products take FP8 codes of it, made after every change; it is wide then */
    bool code_shards; /* ranks that share it out have whole rows of it, and exchange codes instead of values */
    bool shared_ends; /* first and last pipeline stage hold a copy each, and their gradients are summed */
    /* LoRA: the adapter of rows [first, first + rows) of parameter of - 1, as they lie in memory. Its two matrices
     * follow each other in the table: down [rank, in], then up [rows, rank]. of 0: no adapter. */
    struct {
        int of;
        bool up;
        int64_t first;
    } lora;
    int64_t n_values; /* 0: reals. Else a table of I32 values 0 .. n_values - 1, which is a buffer */
    int layer;        /* physical layer, 0-based; -1: embedding, head, final norm */
    struct row_layout rows;
    struct param_split split;
};
int64_t param_elems(const struct param *p);
/* The optimizer changes it. */
static inline bool param_trained(const struct param *p) { return !p->buffer && !p->frozen; }
/* Type of the copy that layers work with, on a device of this real type. */
static inline enum dtype param_dtype(const struct param *p, enum dtype real)
{
    return p->n_values > 0 ? DT_I32 : p->rank == 1 || p->wide ? wide_of(real) : real;
}
/* In-memory row index of disk row r. */
int64_t param_row_from_disk(const struct param *p, int64_t r);

#endif
