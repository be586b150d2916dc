/* What the files of the library share: a handle, one call of an op of the library as calls of ops, and scratch. Private
 * to lib/.
 *
 * An op of the library is a function of a struct call and its args. It runs twice: first with measure set, where calls
 * of ops only say how much scratch they need, then for real; so that sizes and calls cannot disagree. */
#ifndef BRAID_LIB_INT_H
#define BRAID_LIB_INT_H

#include "lib/braidk.h"

#include "dev/cuda.h"
#include "ops/check.h"
#include "ops/ops.h"

#include <pthread.h>
#include <sys/types.h>

struct braidk {
    int device; /* BRAIDK_HOST, or of CUDA */
    pid_t pid;  /* of the process that opened it */
    char name[96];
    pthread_mutex_t lock; /* of memo and what cuBLASLt remembers; taken while work is enqueued */
    struct cuda_memo memo;
    struct cuda_dev gpu;
};

struct call {
    const char *op;
    struct braidk *k;
    const struct ops *ops;
    struct dev dev;
    struct cuda_dev gpu;
    struct lane lane;
    struct err err;
    bool measure;
    bool describe;      /* only the choice of kernels is wanted */
    bool products;      /* some op uses cuBLASLt: its workspace is part of work */
    char *work;         /* NULL while measuring */
    int64_t parts;      /* bytes of tensors between ops, so far */
    int64_t scratch;    /* bytes that the hungriest op needs */
    int64_t scratch_at; /* where in work they begin: behind all parts */
    char why[256];      /* which kernels, and the reason */
};

/* The tables of ops that the library calls, by real type; NULL: none. Only ops named in table.c are not NULL. */
const struct ops *lib_ops(const struct dev *d);

/* A caller's tensor as an op's, checked: type, rank and dims (-1: any). The name is that of the argument. */
int take(struct call *c, const char *name, const struct braidk_tensor *t, enum dtype type, int rank, const int64_t *dim,
         struct tensor *out);
#define TAKE(c, a, name, type, ...)                                                                                    \
    TRY(take(c, #name, &(a)->name, type, countof(((const int64_t[]){__VA_ARGS__})), (const int64_t[]){__VA_ARGS__},    \
             &name))
/* Absent is fine: then it stays absent. */
#define TAKE_OPT(c, a, name, type, ...)                                                                                \
    do {                                                                                                               \
        if ((a)->name.rank > 0)                                                                                        \
            TAKE(c, a, name, type, __VA_ARGS__);                                                                       \
    } while (0)
/* The real type of a call is that of this tensor; sets table and device. */
int begin(struct call *c, const char *name, const struct braidk_tensor *t);
static inline enum dtype real_of(const struct call *c) { return c->dev.real; }
static inline enum dtype wide_type(const struct call *c) { return wide_of(c->dev.real); }
int invalid(struct call *c, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* A tensor between ops, in work. */
struct tensor part(struct call *c, enum dtype type, int rank, const int64_t *dim);
#define PART(c, type, ...) part(c, type, countof(((const int64_t[]){__VA_ARGS__})), (const int64_t[]){__VA_ARGS__})
/* Scratch of an op that needs so many bytes. */
struct tensor scratch(struct call *c, int64_t bytes);
/* Calls op name with args; .work is set here. RUN_PLAIN: for ops without scratch. */
#define RUN(c, name, args)                                                                                             \
    do {                                                                                                               \
        (args)->work = scratch(c, (c)->ops->name##_work != NULL ? (c)->ops->name##_work(args) : 0);                    \
        if (!(c)->measure)                                                                                             \
            TRY((c)->ops->name(&(c)->lane, args));                                                                     \
    } while (0)
#define RUN_PLAIN(c, name, args)                                                                                       \
    do {                                                                                                               \
        if (!(c)->measure)                                                                                             \
            TRY((c)->ops->name(&(c)->lane, args));                                                                     \
    } while (0)
/* Which kernels will run, for braidk_OP_supported. */
void explain(struct call *c, const char *fmt, ...) PRINTF_LIKE(2, 3);
static inline bool on_gpu(const struct call *c) { return c->dev.kind == DEV_CUDA; }

/* An element of a vector as a vector of its own. */
static inline struct tensor element(const struct tensor *t, int64_t i)
{
    return tensor_1d(t->data != NULL ? (char *)t->data + i * (int64_t)dtype_bytes(t->dtype) : NULL, t->dtype, 1);
}

#define LIB_OP(op) int lib_##op(struct call *c, const struct braidk_##op##_args *a);
BRAIDK_OPS(LIB_OP)
#undef LIB_OP

#endif
