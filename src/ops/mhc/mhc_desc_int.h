/* What the descriptors of the mhc ops share; private to ops/mhc/mhc_*op.c. */
#ifndef BRAID_OPS_MHC_DESC_INT_H
#define BRAID_OPS_MHC_DESC_INT_H

#include "ops/check.h"
#include "ops/mhc/mhc.h"
#include "ops/ops.h"
#include "ops/opshape.h"

/* Rows of attributes and fields of the structs that the ops share. */
#define MHC_RULE(op)                                                                                                   \
    OP_ATTR_IN(op, int64_t, "streams", rule.streams, 4)                                                                \
    OP_ATTR_IN(op, int, "profile", rule.profile, MHC_D)                                                                \
    OP_ATTR_IN(op, int64_t, "iterations", rule.iterations, 20)                                                         \
    OP_ATTR_IN(op, double, "root_eps", rule.root_eps, 0)
#define MHC_KERNELS(op)                                                                                                \
    OP_ATTR_IN(op, bool, "round_bf16", rule.round_bf16, 0)                                                             \
    OP_ATTR_IN(op, int, "kernels", rule.kernels, MHC_KERNELS_AUTO)
#define MHC_RULE_DROP(op) MHC_RULE(op) DROPOUT_ATTRS(op)
#define MHC_BOUNDARY(op) MHC_RULE(op) MHC_KERNELS(op) DROPOUT_ATTRS(op)
#define MHC_NONE(op)
#define MHC_STREAMS(op) OP_ATTR_EXTRA("streams", 4)

/* Fields, attributes and calls of an op, and its cost by flops for each element of the largest tensor; FIELDS and ATTRS
 * are macros of further rows. MHC_RULED: of one with a rule. */
#define MHC_TABLES(op, LIST, FIELDS, ATTRS, flops)                                                                     \
    OP_TABLES_WITH(op, LIST, FIELDS(op), ATTRS(op));                                                                   \
    static void op##_cost(const struct op_call *c, struct op_cost *out) { mhc_cost(c, flops, out); }
#define MHC_RULED(op, LIST, FIELDS, ATTRS, flops)                                                                      \
    MHC_TABLES(op, LIST, FIELDS, ATTRS, flops)                                                                         \
    static bool op##_number(const void *a, const char *name, int64_t *out)                                             \
    {                                                                                                                  \
        return mhc_number(&((const struct op##_args *)a)->rule, name, out);                                            \
    }
/* In a descriptor: what all of them have, after OP_IS. */
#define MHC_ALL(op, text) .summary = text, .cost = op##_cost, .sample_fill = mhc_sample_fill, OP_LIST(dims, mhc_dims)

extern const struct op_dim mhc_dims[2];
/* "logits" in shape texts. */
bool mhc_number(const struct mhc_rule *r, const char *name, int64_t *out);
bool mhc_sample_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key);
/* Shapes of outputs and scratch; refuses numbers of streams that no op has. */
int mhc_infer(struct op_call *c, const struct ops *ops, struct err *e);
/* Every tensor moved once. */
void mhc_cost(const struct op_call *c, double flops_per_element, struct op_cost *out);
static inline double mhc_streams(const struct op_call *c) { return op_attr(c, "streams"); }
/* A tensor of a call by name; absent if it has none such. */
static inline const struct tensor *mhc_arg(const struct op_call *c, const char *name)
{
    static const struct tensor absent = {0};
    int i = op_arg_index(c->desc, name);
    return i < 0 ? &absent : &c->t[i];
}

int mhc_refuse_if(const char *op, bool wrong, const char *what, struct err *e);
int mhc_rule_check(const char *op, const struct mhc_rule *r, struct err *e);
/* The width of a stream tensor must be a multiple of the number of streams: K = n C. */
int mhc_width_check(const char *op, int64_t k, int64_t n, struct err *e);
int mhc_drop_check(const char *op, const struct dropout_rule *r, const struct tensor *like, struct err *e);

#endif
