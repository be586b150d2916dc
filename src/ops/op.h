/* An op described once: its field list. A contract header (<op>/<op>.h) lists the tensors and numbers of an op,
 *
 *     #define RMSNORM_BWD_FIELDS(T, N, S, op)  \
 *         T(op, dy, IN, REAL, "... d")       \
 *         T(op, w, OPT, WIDE, "d")           \
 *         T(op, dw, OPT_SUM, WIDE, "=w @w")  \
 *         T(op, work, WORK, U8, "")          \
 *         N(op, bool, zero_centered, 0)
 *     OP_ARGS(rmsnorm_bwd, RMSNORM_BWD_FIELDS)
 *
 * and nothing else names them: struct rmsnorm_bwd_args, the table of fields and attributes that tests, `braid op` and
 * the planner use, argument checks, shapes of outputs and samples follow from the list.
 *   T(op, name, role, type, shape)   a tensor; roles and types below, shapes in opshape.h
 *   N(op, type, name, default)       a number: double, bool, int, int64_t or uint64_t
 *   S(op, declaration)               any other member (a struct of numbers that several ops share); its numbers are
 *                                    listed in <op>_op.c
 * Contract headers are compiled as C11 and, by nvcc, as C++. */
#ifndef BRAID_OPS_OP_H
#define BRAID_OPS_OP_H

#include <stddef.h>

/* Functions of a contract have C linkage, also under nvcc, and so have those of the folders below, whichever header
 * comes first. */
#ifdef __cplusplus
#define OP_C extern "C"
extern "C" {
#include "dev/dev.h"
}
#else
#define OP_C extern
#include "dev/dev.h"
#endif

struct op_desc; /* opdesc.h */
struct ops;     /* ops.h: the table of functions, included only by callers of its functions */

/* The table of this device; on cpu the variant for the instruction set of this processor. */
OP_C const struct ops *ops_for(const struct dev *d);
/* Does the table have the op of this descriptor? */
OP_C bool ops_has(const struct ops *o, const char *name);

enum arg_role {
    ARG_IN,   /* read */
    ARG_OUT,  /* written */
    ARG_OPT,  /* read; may be absent */
    ARG_OOUT, /* written; may be absent */
    ARG_WORK, /* scratch; size from the op's _work function */
};
enum arg_type {
    ARG_REAL,
    ARG_I32,
    ARG_I64,
    ARG_F64,
    ARG_U8,
    ARG_WIDE,
    ARG_F8,     /* E4M3, or E5M2 where the op takes it */
    ARG_STREAM, /* real, or wide where the residual stream is (model.fp32_residual); samples say "wide_<name>=1" */
};

struct op_arg {
    const char *name;
    enum arg_role role;
    enum arg_type type;
    bool no_grad;  /* no gradient is taken of it: tables and masks among inputs, saved statistics among outputs */
    bool in_place; /* an output that is read first: optimizer state, caches */
    const char *shape;
    size_t at;     /* the tensor in the args struct */
    size_t acc_at; /* bool acc_<name> beside it: true adds, false overwrites; 0: none */
};
#define OP_NOWHERE SIZE_MAX /* op_arg.at: only samples have this tensor */
enum attr_kind { ATTR_NONE, ATTR_double, ATTR_bool, ATTR_int, ATTR_int64_t, ATTR_uint64_t };
struct op_attr {
    const char *name;
    double value; /* default */
    enum attr_kind kind;
    size_t at; /* in the args struct */
};

struct op_dim {
    const char *name;
    double value; /* default */
};

/* Roles: what the op does with a tensor, hence how a node uses the slot that is bound to it. OPT_: it may be absent.
 *   IN, OPT            read
 *   FIXED, OPT_FIXED   read; no gradient is taken of it (tables, masks)
 *   OUT, OPT_OUT       overwritten
 *   SAVED, OPT_SAVED   overwritten; a statistic for the backward pass, of which no gradient is taken
 *   SUM, OPT_SUM       overwritten by the first contribution, added to by later ones: has a flag acc_<name>
 *   STATE, OPT_STATE   updated in place
 *   WORK               scratch */
#define OP_ROLE_IN .role = ARG_IN
#define OP_ROLE_OPT .role = ARG_OPT
#define OP_ROLE_FIXED .role = ARG_IN, .no_grad = true
#define OP_ROLE_OPT_FIXED .role = ARG_OPT, .no_grad = true
#define OP_ROLE_OUT .role = ARG_OUT
#define OP_ROLE_OPT_OUT .role = ARG_OOUT
#define OP_ROLE_SAVED .role = ARG_OUT, .no_grad = true
#define OP_ROLE_OPT_SAVED .role = ARG_OOUT, .no_grad = true
#define OP_ROLE_SUM .role = ARG_OUT
#define OP_ROLE_OPT_SUM .role = ARG_OOUT
#define OP_ROLE_STATE .role = ARG_OUT, .in_place = true
#define OP_ROLE_OPT_STATE .role = ARG_OOUT, .in_place = true
#define OP_ROLE_WORK .role = ARG_WORK

/* OP_SUMS_<role>(text): the text for roles with a flag, nothing for the others. */
#define OP_SUMS_IN(...)
#define OP_SUMS_OPT(...)
#define OP_SUMS_FIXED(...)
#define OP_SUMS_OPT_FIXED(...)
#define OP_SUMS_OUT(...)
#define OP_SUMS_OPT_OUT(...)
#define OP_SUMS_SAVED(...)
#define OP_SUMS_OPT_SAVED(...)
#define OP_SUMS_SUM(...) __VA_ARGS__
#define OP_SUMS_OPT_SUM(...) __VA_ARGS__
#define OP_SUMS_STATE(...)
#define OP_SUMS_OPT_STATE(...)
#define OP_SUMS_WORK(...)

/* Every *_cpu.c is compiled once per instruction set with ISA defined (avx512, avx2 or base); CPU_NAME(f) is f_avx512
 * and so on. Without a word, as in a contract that a layer reads, it is that of any processor. */
#ifndef ISA
#define ISA base
#endif
#define CPU_PASTE2(name, isa) name##_##isa
#define CPU_PASTE(name, isa) CPU_PASTE2(name, isa)
#define CPU_NAME(name) CPU_PASTE(name, ISA)
/* One form of an op: what runs it, and how much scratch it needs. Which forms exist is said in ops.def. */
#define OP_FORM_(op, run, work)                                                                                        \
    OP_C int run(struct lane *l, const struct op##_args *a);                                                           \
    OP_C int64_t work(const struct op##_args *a);
#define OP_FORMS(op)                                                                                                   \
    OP_FORM_(op, op##_ref, op##_work_ref)                                                                              \
    OP_FORM_(op, CPU_NAME(op##_cpu), CPU_NAME(op##_work_cpu))                                                          \
    OP_FORM_(op, op##_cuda, op##_work_cuda)                                                                            \
    OP_C const struct op_desc op##_desc;

/* The args struct: a member for each tensor (with its flag), number and struct. */
#define OP_TENSOR_(op, name, role, type, shape)                                                                        \
    struct tensor name;                                                                                                \
    OP_SUMS_##role(bool acc_##name;)
#define OP_NUMBER_(op, type, name, value) type name;
#define OP_STRUCT_(op, declaration) declaration;
#define OP_ARGS(op, LIST)                                                                                              \
    struct op##_args {                                                                                                 \
        LIST(OP_TENSOR_, OP_NUMBER_, OP_STRUCT_, op)                                                                   \
    };                                                                                                                 \
    OP_FORMS(op)                                                                                                       \
    OP_C int op##_check(const struct op##_args *a, struct err *e)

/* Rows of the descriptor's tables. */
#define OP_FIELD_(op, fname, frole, ftype, fshape)                                                                     \
    {.name = #fname,                                                                                                   \
     .type = ARG_##ftype,                                                                                              \
     .shape = fshape,                                                                                                  \
     .at = offsetof(struct op##_args, fname),                                                                          \
     OP_ROLE_##frole,                                                                                                  \
     OP_SUMS_##frole(.acc_at = offsetof(struct op##_args, acc_##fname))},
#define OP_ATTR_(op, ctype, aname, avalue)                                                                             \
    {.name = #aname, .value = avalue, .kind = ATTR_##ctype, .at = offsetof(struct op##_args, aname)},
#define OP_NO_FIELD_(op, name, role, type, shape)
#define OP_NO_ATTR_(op, type, name, value)
#define OP_NO_STRUCT_(op, declaration)
/* A tensor inside a member, and one that only samples have: OP_FIELD_IN(dropout, "info", rule.info, OPT, I64, "4"). */
#define OP_FIELD_IN(op, fname, path, frole, ftype, fshape)                                                             \
    {.name = fname, .type = ARG_##ftype, .shape = fshape, .at = offsetof(struct op##_args, path), OP_ROLE_##frole},
/* A sum inside a member, and its flag. */
#define OP_SUM_IN(op, fname, path, acc, frole, ftype, fshape)                                                          \
    {.name = fname,                                                                                                    \
     .type = ARG_##ftype,                                                                                              \
     .shape = fshape,                                                                                                  \
     .at = offsetof(struct op##_args, path),                                                                           \
     .acc_at = offsetof(struct op##_args, acc),                                                                        \
     OP_ROLE_##frole},
#define OP_EXTRA(fname, frole, ftype, fshape)                                                                          \
    {.name = fname, .type = ARG_##ftype, .shape = fshape, .at = OP_NOWHERE, OP_ROLE_##frole},
/* A number inside a member: OP_ATTR_IN(act_fwd, double, "clamp", rule.clamp, 0). */
#define OP_ATTR_IN(op, ctype, aname, path, avalue)                                                                     \
    {.name = aname, .value = avalue, .kind = ATTR_##ctype, .at = offsetof(struct op##_args, path)},
/* One that only samples and `braid op` know. */
#define OP_ATTR_EXTRA(aname, avalue) {.name = aname, .value = avalue},

#endif
