/* What the descriptors of ops with an activation share: act, act8, expert, expert8. */
#ifndef BRAID_OPS_ACT_DESC_H
#define BRAID_OPS_ACT_DESC_H

#include "ops/act/act.h"
#include "ops/opdesc.h"

/* Rows of attributes. offset_name: "offset", or another one where a tensor has that name. */
#define ACT_RULE_ATTRS(op, offset_name)                                                                                \
    OP_ATTR_IN(op, int, "kind", rule.kind, ACT_SWIGLU)                                                                 \
    OP_ATTR_IN(op, double, "clamp", rule.clamp, 0)                                                                     \
    OP_ATTR_IN(op, double, "alpha", rule.alpha, 1.702)                                                                 \
    OP_ATTR_IN(op, double, offset_name, rule.offset, 0)                                                                \
    OP_ATTR_IN(op, int64_t, "interleave", rule.interleave, 0)

/* Defines the .number of an op: "gate" in shape texts. */
#define ACT_NUMBER(op)                                                                                                 \
    static bool op##_number(const void *args, const char *name, int64_t *out)                                          \
    {                                                                                                                  \
        *out = act_gate(((const struct op##_args *)args)->rule.kind);                                                  \
        return strcmp(name, "gate") == 0;                                                                              \
    }

/* Pre-activations wide enough for the clamp to bite, but no nearer than gap to its edges and to 0, where the slope
 * jumps and central differences mean nothing. */
void act_fill_inputs(const struct op_call *c, double gap, struct tensor *host, uint64_t key);

#endif
