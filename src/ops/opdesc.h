/* An op as data: names of its tensors and attributes, shape inference, cost, how to run it, samples
 * for tests and shapes for the bench. Tests, gradcheck, bench and `braid op` are written once, over
 * this; no op brings its own harness.
 *
 * Naming is the contract: a forward input "x" has gradient "dx", a forward output "y" has upstream
 * gradient "dy". The backward descriptor (field .backward of the forward one) lists as inputs any
 * forward inputs and outputs it needs, by the same names, and the "d<output>" ones; and as outputs
 * "d<input>" for each differentiable input. */
#ifndef BRAID_OPS_OPDESC_H
#define BRAID_OPS_OPDESC_H

#include "ops/op.h"

enum { OP_ARGS_BYTES = 4096, OP_MAX_ARGS = 32, OP_MAX_ATTRS = 20, OP_MAX_DIMS = 8 };

/* True for the device's type and the wide one beside it, which gradients are taken of. */
static inline bool arg_is_real(enum arg_type t) { return t == ARG_REAL || t == ARG_WIDE || t == ARG_STREAM; }

/* One shape to test or time: values for the op's dims and attributes by name, e.g.
 * "rows=7 cols=33 eps=1e-5"; what is not named takes the descriptor's default. An optional tensor is
 * given unless the sample says "no_<name>=1". One with "gpu=1" is for GPUs only: too large for a CPU. */
struct op_sample {
    const char *text;
};
struct op_cost {
    double flops, bytes; /* bytes: each input read once, each output written once */
};

struct op_call {
    const struct op_desc *desc;
    struct tensor t[OP_MAX_ARGS]; /* by position in desc->args; data NULL: absent */
    bool acc[OP_MAX_ARGS];        /* flags acc_<name>, by position */
    bool wide[OP_MAX_ARGS];       /* tensors of type ARG_STREAM that are wide here, by position */
    double attr[OP_MAX_ATTRS];    /* by position in desc->attrs */
    double dim[OP_MAX_DIMS];      /* by position in desc->dims: only for making samples */
};

struct op_desc {
    const char *name;    /* "rmsnorm_fwd" */
    const char *summary; /* one line for `braid op --help` */
    /* Its args struct, calls through a device's table. args_bytes 0: an op without a field list, which brings functions
     * below. */
    size_t args_bytes;
    int (*check)(const void *args, struct err *e);
    bool (*there)(const struct ops *ops);
    int (*call)(const struct ops *ops, struct lane *lane, const void *args);
    int64_t (*work_bytes)(const struct ops *ops, const void *args);
    const struct op_arg *args; /* fields */
    int n_args;
    const struct op_attr *attrs;
    int n_attrs;
    const struct op_dim *dims; /* named sizes a sample sets, with defaults */
    int n_dims;
    /* Numbers that shape texts name and that follow from args; false: not one of them. */
    bool (*number)(const void *args, const char *name, int64_t *out);
    /* Dims of a sample that follow from others, before shapes are made of them. */
    void (*sample_dims)(struct op_call *c);
    /* Where the shape text of an input does not say it all: after it. */
    void (*sample_shapes)(struct op_call *c);
    /* Fill one input with sensible random values; NULL or false: N(0,1) for reals. u in calls is a
     * counter-based key, so that every back end sees the same numbers. */
    bool (*sample_fill)(struct op_call *c, int arg, struct tensor *host, uint64_t key);
    /* Changes to the packed args: what an extra tensor of samples stands for. */
    void (*prepare)(const struct op_call *c, void *args);
    /* In place of what follows from the field list: check inputs and attributes, set shapes of
     * outputs and work; run. */
    int (*infer)(struct op_call *c, const struct ops *ops, struct err *e);
    int (*run)(const struct ops *ops, struct lane *lane, const struct op_call *c);
    void (*cost)(const struct op_call *c, struct op_cost *out);
    const char *backward; /* name of the backward descriptor, or NULL */
    double tolerance;     /* cpu against ref, relative to the largest value of the tensor */
    double narrow;        /* relative Frobenius error allowed beside bf16 storage, for values rounded on the way */
    const struct op_sample *samples; /* awkward shapes */
    int n_samples;
    const struct op_sample *bench;
    int n_bench;
};

/* Before a descriptor: OP_TABLES makes the op's fields, attributes and calls from its field list, OP_TABLES_WITH adds
 * rows of fields and of attributes. The three macros above it make one of these tables each. */
#define OP_FIELDS(op, LIST, ...)                                                                                       \
    static const struct op_arg op##_fields[] = {LIST(OP_FIELD_, OP_NO_ATTR_, OP_NO_STRUCT_, op) __VA_ARGS__}
#define OP_ATTRS(op, LIST, ...)                                                                                        \
    static const struct op_attr op##_attrs[] = {LIST(OP_NO_FIELD_, OP_ATTR_, OP_NO_STRUCT_, op)                        \
                                                    __VA_ARGS__{.name = NULL}}
#define OP_CALLS(op)                                                                                                   \
    static int op##_check_any(const void *a_, struct err *e) { return op##_check(a_, e); }                             \
    static bool op##_there(const struct ops *o) { return o->op != NULL; }                                              \
    static int op##_call(const struct ops *o, struct lane *l, const void *a_) { return o->op(l, a_); }                 \
    static int64_t op##_work_bytes(const struct ops *o, const void *a_)                                                \
    {                                                                                                                  \
        return o->op##_work ? o->op##_work(a_) : 0;                                                                    \
    }                                                                                                                  \
    _Static_assert(sizeof(struct op##_args) <= OP_ARGS_BYTES, "raise OP_ARGS_BYTES")
#define OP_TABLES_WITH(op, LIST, fields, ...)                                                                          \
    OP_FIELDS(op, LIST, fields);                                                                                       \
    OP_ATTRS(op, LIST, __VA_ARGS__);                                                                                   \
    OP_CALLS(op)
#define OP_TABLES(op, LIST) OP_TABLES_WITH(op, LIST, , )
/* In a descriptor: those of an op; OP_NAMED: under a name of its own. */
#define OP_IS(op) OP_NAMED(#op, op, op)
#define OP_NAMED(text, fields, op)                                                                                     \
    .name = text, .args = fields##_fields, .n_args = countof(fields##_fields), .attrs = op##_attrs,                    \
    .n_attrs = countof(op##_attrs) - 1, .args_bytes = sizeof(struct op##_args), .check = op##_check_any,               \
    .there = op##_there, .call = op##_call, .work_bytes = op##_work_bytes

/* In a descriptor: a list and its length. */
#define OP_LIST(field, list) .field = list, .n_##field = countof(list)

const struct op_desc *const *op_registry(int *n);
const struct op_desc *op_find(const char *name);
int op_arg_index(const struct op_desc *d, const char *name); /* -1 if absent */
/* The gradient of a tensor: "d<name>", or "d_<name>" where that is a word of C. */
int op_gradient_index(const struct op_desc *d, const char *name);
int op_attr_index(const struct op_desc *d, const char *name); /* -1 if absent */
bool op_has_dim(const struct op_desc *d, const char *name);
double op_dim(const struct op_call *c, const char *name);
double op_attr(const struct op_call *c, const char *name);
enum dtype op_arg_dtype(const struct op_arg *a, enum dtype real);
/* That of tensor i of this call: a stream may be wide. */
enum dtype op_call_dtype(const struct op_call *c, int i, enum dtype real);

/* The args struct of a call. */
struct op_packed {
    _Alignas(max_align_t) char bytes[OP_ARGS_BYTES];
};
void op_call_pack(const struct op_call *c, struct op_packed *out);
/* In a descriptor's functions: the args of call c as `name`. */
#define OP_UNPACK(op, name, c)                                                                                         \
    struct op_packed packed_;                                                                                          \
    op_call_pack(c, &packed_);                                                                                         \
    const struct op##_args *name = (const struct op##_args *)(const void *)packed_.bytes
/* Shapes of outputs and scratch from those of inputs and attributes, which are checked. */
int op_call_infer(struct op_call *c, const struct ops *ops, struct err *e);
int op_call_run(const struct ops *ops, struct lane *lane, const struct op_call *c);
/* Is argument i the one with this name? */
bool op_arg_is(const struct op_call *c, int i, const char *name);

/* Parse a sample, set attributes, dims and input shapes for a device type. */
int op_call_sample(struct op_call *c, const struct op_desc *d, const struct op_sample *s, const struct ops *ops,
                   struct err *e);
/* Bytes of all tensors but scratch: the cost of an op that touches each once. */
double op_bytes(const struct op_call *c);
/* sample_fill of ops over sequences. doc_start: documents of random length, a row begins one with this chance. start:
 * 1, because 0 would drop init, which the backward op cannot know. False: the argument is neither. */
bool op_fill_documents(const struct op_call *c, int arg, struct tensor *t, uint64_t key, double chance);
/* Offsets of ranges of rows, from 0 to `rows`: equal ones if balanced, else uneven ones, every third of them empty. */
void op_fill_ranges(struct tensor *host, int64_t rows, bool balanced, uint64_t key);
/* Set attribute or dim `name`; false if the op has none such. */
bool op_call_set(struct op_call *c, const char *name, double value);

#endif
