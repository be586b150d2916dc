/* Descriptors of the mhc ops: shapes by one letter per tensor, so that each op is a few lines. Private to
 * ops/mhc/mhc_*op.c.
 *
 *   K [rows, n C]   C [rows, C]   N [rows, N]   S [rows, N+2]   n [rows, n]   m [rows, n n]   1 [rows, 1]   q [rows, n+2]
 *   W [N, n C]      T [n, n C]    b [N]         v [C]           g [n]         s [1]           i [4] (info)
 *   h [MHC_HEALTH_ROWS, n n]      . scratch */
#ifndef BRAID_OPS_MHC_DESC_INT_H
#define BRAID_OPS_MHC_DESC_INT_H

#include "ops/check.h"
#include "ops/dropout/dropout.h"
#include "ops/mhc/mhc.h"
#include "ops/opdesc.h"
#include "ops/ops.h"

void mhc_sample_shapes(struct op_call *c, const char *letters);
/* Shapes of outputs from those of inputs and the attribute "streams". */
int mhc_infer_shapes(struct op_call *c, const char *letters, struct err *e);
bool mhc_sample_fill(struct op_call *c, int arg, struct tensor *host, uint64_t key);
struct mhc_rule mhc_pack_rule(const struct op_call *c);
struct dropout_rule mhc_pack_drop(const struct op_call *c, const struct tensor *info);
/* Every tensor moved once; flops per element of the largest stream tensor. */
void mhc_cost(const struct op_call *c, double flops_per_element, struct op_cost *out);
static inline const struct tensor *mhc_arg(const struct op_call *c, const char *name)
{
    static const struct tensor absent = {0};
    int i = op_arg_index(c->desc, name);
    return i < 0 ? &absent : &c->t[i];
}
#define T(name) (*mhc_arg(c, #name))

extern const struct op_dim mhc_dims[2];
#define MHC_RULE_ATTRS {.name = "streams", .value = 4}, {.name = "profile", .value = 0}, {.name = "iterations", .value = 20}
#define MHC_BOUNDARY_ATTRS {.name = "round_bf16", .value = 0}, {.name = "single_pass", .value = 0}, {.name = "ring", .value = 0}, {.name = "primitive", .value = 0}
#define MHC_DROP_ATTRS {.name = "p", .value = 0}, {.name = "key", .value = 77}, {.name = "seq", .value = 4}

/* op_pack(c) gives the args struct; letters as above. */
#define MHC_FUNCTIONS(op, letters, flops)                                                 \
    static void op##_shapes(struct op_call *c) { mhc_sample_shapes(c, letters); }          \
    static int op##_run(const struct ops *ops, struct lane *lane, const struct op_call *c) \
    {                                                                                     \
        struct op##_args a = op##_pack(c);                                                \
        return ops->op(lane, &a);                                                         \
    }                                                                                     \
    static void op##_cost(const struct op_call *c, struct op_cost *out) { mhc_cost(c, flops, out); }
#define MHC_INFER(op, letters)                                                            \
    static int op##_infer(struct op_call *c, const struct ops *ops, struct err *e)         \
    {                                                                                     \
        (void)ops;                                                                        \
        return mhc_infer_shapes(c, letters, e);                                           \
    }
#define MHC_INFER_WORK(op, letters)                                                       \
    static int op##_infer(struct op_call *c, const struct ops *ops, struct err *e)         \
    {                                                                                     \
        TRY(mhc_infer_shapes(c, letters, e));                                             \
        struct op##_args a = op##_pack(c);                                                \
        c->t[c->desc->n_args - 1] = tensor_1d(NULL, DT_U8, ops->op##_work ? ops->op##_work(&a) : 0); \
        return ST_OK;                                                                     \
    }
#define MHC_DESC(op, text, back, tol, sample_list, n_sample_list, bench_list) \
    MHC_DESC_ROUNDED(op, text, back, tol, 0, sample_list, n_sample_list, bench_list)
/* With an allowance for what bf16 rounds on the way. */
#define MHC_DESC_ROUNDED(op, text, back, tol, rounded, sample_list, n_sample_list, bench_list) \
    const struct op_desc op##_desc = {.name = #op,                                        \
                                      .summary = text,                                    \
                                      .args = op##_arg_list,                              \
                                      .n_args = countof(op##_arg_list),                   \
                                      .attrs = op##_attrs,                                \
                                      .n_attrs = countof(op##_attrs),                     \
                                      .dims = mhc_dims,                                   \
                                      .n_dims = countof(mhc_dims),                        \
                                      .sample_shapes = op##_shapes,                       \
                                      .sample_fill = mhc_sample_fill,                     \
                                      .infer = op##_infer,                                \
                                      .run = op##_run,                                    \
                                      .cost = op##_cost,                                  \
                                      .backward = back,                                   \
                                      .tolerance = tol,                                   \
                                      .narrow = rounded,                                  \
                                      .samples = sample_list,                             \
                                      .n_samples = n_sample_list,                         \
                                      .bench = bench_list,                                \
                                      .n_bench = countof(bench_list)}

#define IN(n)   {.name = #n}
#define SAVED(n) {.name = #n, .no_grad = true}
#define OPT(n)  {.name = #n, .role = ARG_OPT}
#define OUT(n)  {.name = #n, .role = ARG_OUT}
#define MADE(n) {.name = #n, .role = ARG_OUT, .no_grad = true}
#define OOUT(n) {.name = #n, .role = ARG_OOUT}
/* The same in the wide type. */
#define WIN(n)   {.name = #n, .type = ARG_WIDE}
#define WOPT(n)  {.name = #n, .role = ARG_OPT, .type = ARG_WIDE}
#define WOUT(n)  {.name = #n, .role = ARG_OUT, .type = ARG_WIDE}
#define WMADE(n) {.name = #n, .role = ARG_OUT, .no_grad = true, .type = ARG_WIDE}
#define WOOUT(n) {.name = #n, .role = ARG_OOUT, .type = ARG_WIDE}
#define INFO    {.name = "info", .role = ARG_OPT, .type = ARG_I64}
#define WORK    {.name = "work", .role = ARG_WORK, .type = ARG_U8}
#define FLAG(name) (op_attr(c, #name) != 0)

#endif
