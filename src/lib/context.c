/* Handles and calls of the library: opening a device, the caller's tensors, scratch, errors as text. See braidk.h. */
#include "lib/lib_int.h"

#include "base/version.h"

#include <omp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PRODUCT_WORKSPACE = 32 << 20, WORK_ALIGN = 256 };

/* ---- errors ---------------------------------------------------------------------------------- */

static int status_of(enum status s)
{
    switch (s) {
    case ST_OK: return BRAIDK_OK;
    case ST_NOMEM: return BRAIDK_NOMEM;
    case ST_UNSUPPORTED: return BRAIDK_UNSUPPORTED;
    case ST_USAGE:
    case ST_INVALID: return BRAIDK_INVALID;
    default: return BRAIDK_FAILED;
    }
}

static int leave(int st, const char *text, char *err, size_t err_bytes)
{
    if (err != NULL && err_bytes > 0)
        snprintf(err, err_bytes, "%s", st == ST_OK ? "" : text);
    return status_of((enum status)st);
}

int invalid(struct call *c, const char *fmt, ...)
{
    char text[768];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return err_set(&c->err, ST_INVALID, "%s: %s", c->op, text);
}

void explain(struct call *c, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->why, sizeof c->why, fmt, args);
    va_end(args);
}

/* ---- the caller's tensors -------------------------------------------------------------------- */

static const enum dtype dtypes[] = {
    [BRAIDK_NONE] = DT_NONE, [BRAIDK_F32] = DT_F32, [BRAIDK_BF16] = DT_BF16, [BRAIDK_F64] = DT_F64,
    [BRAIDK_I32] = DT_I32,   [BRAIDK_I64] = DT_I64, [BRAIDK_U8] = DT_U8};

static int convert(struct call *c, const char *name, const struct braidk_tensor *t, struct tensor *out)
{
    *out = (struct tensor){0};
    if (t->rank <= 0 || t->rank > BRAIDK_MAX_RANK)
        return invalid(c, "argument %s %s", name, t->rank == 0 ? "is missing" : "has a rank outside 1 to 5");
    if (t->dtype <= BRAIDK_NONE || t->dtype >= countof(dtypes))
        return invalid(c, "argument %s has an unknown dtype %d", name, (int)t->dtype);
    *out = (struct tensor){.data = t->data, .dtype = dtypes[t->dtype], .rank = t->rank};
    int64_t elems = 1;
    for (int i = 0; i < t->rank; i++) {
        if (t->shape[i] < 0 || t->stride[i] < 0 || !i64_mul(elems, t->shape[i], &elems))
            return invalid(c, "argument %s has a negative size or stride, or too many elements", name);
        out->dim[i] = t->shape[i];
        out->stride[i] = t->stride[i];
    }
    if ((uintptr_t)t->data % dtype_bytes(out->dtype) != 0)
        return invalid(c, "argument %s is not aligned to the %zu bytes of its dtype", name, dtype_bytes(out->dtype));
    if (t->data == NULL && elems == 0)
        out->data = c; /* ops take NULL for absent; nothing is read here */
    if (out->data == NULL && !c->measure && !c->describe)
        return invalid(c, "argument %s has no data", name);
    return ST_OK;
}

int take(struct call *c, const char *name, const struct braidk_tensor *t, enum dtype type, int rank, const int64_t *dim,
         struct tensor *out)
{
    char have[128], need[128];
    TRY(convert(c, name, t, out));
    bool fits = out->dtype == type && out->rank == rank;
    for (int i = 0; fits && i < rank; i++)
        fits = dim[i] < 0 || out->dim[i] == dim[i];
    struct tensor want = tensor_shape(type, rank, dim);
    if (!fits)
        return invalid(c, "argument %s is %s, expected %s%s", name, tensor_text(out, have, sizeof have),
                       tensor_text(&want, need, sizeof need), strchr(need, '-') ? " (-1: any size)" : "");
    if (out->dim[rank - 1] > 1 && out->stride[rank - 1] != 1)
        return invalid(c, "argument %s has stride %lld in its last dimension, expected 1", name,
                       (long long)out->stride[rank - 1]);
    return ST_OK;
}

/* OpenMP's threads do not live on in a forked process, where GNU's runtime would wait for them for ever: it gets one.
 * */
static int threads_of(const struct braidk *k)
{
    if (getpid() != k->pid)
        omp_set_num_threads(1);
    return omp_get_max_threads();
}

int begin(struct call *c, const char *name, const struct braidk_tensor *t)
{
    struct tensor first;
    bool gpu = c->k->device != BRAIDK_HOST;
    TRY(convert(c, name, t, &first));
    if (first.dtype != DT_F32 && first.dtype != (gpu ? DT_BF16 : DT_F64))
        return invalid(c, "argument %s is %s, expected %s", name, dtype_name(first.dtype),
                       gpu ? "BF16 or F32 on a GPU" : "F32 or F64 on the host");
    c->dev = (struct dev){.kind = gpu                     ? DEV_CUDA
                                  : first.dtype == DT_F64 ? DEV_REF
                                                          : DEV_CPU,
                          .real = first.dtype,
                          .wide = wide_of(first.dtype),
                          .n_threads = gpu ? 1 : threads_of(c->k),
                          .impl = gpu ? &c->gpu : NULL};
    c->lane = (struct lane){.dev = &c->dev, .err = &c->err};
    c->ops = lib_ops(&c->dev);
    if (!gpu)
        explain(c, "%s kernels: host memory", first.dtype == DT_F64 ? "reference (double precision)" : cpu_isa());
    else
        explain(c, "%s",
                c->gpu.hopper ? "kernels for Hopper where they take the shape, portable ones else"
                              : "portable kernels: not a Hopper GPU");
    return c->ops != NULL ? ST_OK : err_set(&c->err, ST_UNSUPPORTED, "%s: no kernels for this device", c->op);
}

/* ---- scratch --------------------------------------------------------------------------------- */

struct tensor part(struct call *c, enum dtype type, int rank, const int64_t *dim)
{
    struct tensor t = tensor_shape(type, rank, dim);
    t.data = c->work != NULL ? c->work + c->parts : NULL;
    c->parts += round_up(max_i64(tensor_bytes(&t), 1), WORK_ALIGN);
    return t;
}

/* Empty scratch is somewhere, too: without rows ops give empty parts of it to other ops, for which NULL is absent. */
struct tensor scratch(struct call *c, int64_t bytes)
{
    c->scratch = max_i64(c->scratch, bytes);
    if (bytes == 0)
        return tensor_1d(c, DT_U8, 0);
    return tensor_1d(c->work != NULL ? c->work + c->scratch_at : NULL, DT_U8, bytes);
}

/* ---- handles --------------------------------------------------------------------------------- */

int braidk_version(void) { return BRAIDK_VERSION; }
const char *braidk_build(void) { return version_text(); }
const char *braidk_device(const struct braidk *k) { return k != NULL ? k->name : ""; }

#ifdef BRAID_CUDA
static int enter_gpu(const struct braidk *k, int *before, struct err *e) { return cuda_enter(k->device, before, e); }
static void leave_gpu(const struct braidk *k, int before) { cuda_leave(k->device, before); }

static int open_gpu(struct braidk *k, struct err *e)
{
    int before = 0;
    k->gpu.want.index = k->device;
    TRY(cuda_describe(&k->gpu, e));
    k->gpu.sm_budget = k->gpu.sm_count;
    k->gpu.memo = &k->memo;
    snprintf(k->name, sizeof k->name, "%.60s, %s kernels", k->gpu.gpu_name, k->gpu.hopper ? "Hopper" : "portable");
    TRY(enter_gpu(k, &before, e));
    int st = blas_open(&k->gpu, PRODUCT_WORKSPACE, e);
    leave_gpu(k, before);
    return st;
}
#else
static int enter_gpu(const struct braidk *k, int *before, struct err *e)
{
    (void)before;
    return err_set(e, ST_UNSUPPORTED, "GPU %d: this libbraidk was built without CUDA", k->device);
}
static void leave_gpu(const struct braidk *k, int before) { (void)k, (void)before; }
static int open_gpu(struct braidk *k, struct err *e)
{
    int before = 0;
    return enter_gpu(k, &before, e);
}
#endif

int braidk_open(int device, struct braidk **out, char *err, size_t err_bytes)
{
    struct err e = {0};
    struct braidk *k = NULL;
    if (out == NULL)
        return leave(ST_INVALID, "braidk_open: argument out is NULL", err, err_bytes);
    *out = NULL;
    int st = device >= BRAIDK_HOST ? ST_OK : err_set(&e, ST_INVALID, "braidk_open: no device has number %d", device);
    if (st == ST_OK)
        st = mem_array((void **)&k, 1, sizeof *k, &e);
    if (st != ST_OK)
        return leave(st, e.msg, err, err_bytes);
    k->device = device;
    k->pid = getpid();
    pthread_mutex_init(&k->lock, NULL);
    if (device == BRAIDK_HOST)
        snprintf(k->name, sizeof k->name, "this processor, %s kernels", cpu_isa());
    else
        st = open_gpu(k, &e);
    if (st != ST_OK)
        braidk_close(k);
    else
        *out = k;
    return leave(st, e.msg, err, err_bytes);
}

void braidk_close(struct braidk *k)
{
    if (k == NULL)
        return;
#ifdef BRAID_CUDA
    int before = 0;
    if (k->gpu.blas != NULL && enter_gpu(k, &before, NULL) == ST_OK) {
        blas_close(&k->gpu);
        leave_gpu(k, before);
    }
#endif
    pthread_mutex_destroy(&k->lock);
    free(k);
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* An op of the library, whatever its args: what it needs of them is found through offsets. */
struct op_entry {
    const char *name;
    size_t bytes, work_at;
    int (*run)(struct call *c, const void *args);
};
enum { MOST_ARGS_BYTES = 8192 };

/* A copy of the caller's args as this library knows them: fields that an older caller lacks are zero. */
static int copy_args(const struct op_entry *op, const void *args, void *to, struct err *e)
{
    size_t size = 0;
    if (args == NULL)
        return err_set(e, ST_INVALID, "%s: args is NULL", op->name);
    memcpy(&size, args, sizeof size);
    if (size < sizeof size || size > MOST_ARGS_BYTES) /* garbage, which must not be read as if it were there */
        return err_set(e, ST_INVALID, "%s: args.size is %zu; set it to sizeof the struct", op->name, size);
    for (size_t i = op->bytes; i < size; i++)
        if (((const char *)args)[i] != 0)
            return err_set(e, ST_UNSUPPORTED, "%s: args has fields that this libbraidk (version %d) does not know",
                           op->name, BRAIDK_VERSION);
    memset(to, 0, op->bytes);
    memcpy(to, args, size < op->bytes ? size : op->bytes);
    return ST_OK;
}

static int measure(struct call *c, const struct op_entry *op, const void *args, int64_t *bytes)
{
    c->measure = true;
    TRY(op->run(c, args));
    c->measure = false;
    c->scratch_at = c->parts;
    *bytes = round_up(c->parts + c->scratch, WORK_ALIGN) + (c->products && on_gpu(c) ? PRODUCT_WORKSPACE : 0);
    return ST_OK;
}

static int run(struct call *c, const struct op_entry *op, const void *args, void *stream)
{
    struct braidk_work work;
    int64_t need = 0;
    TRY(measure(c, op, args, &need));
    memcpy(&work, (const char *)args + op->work_at, sizeof work);
    if (need > 0 && (work.data == NULL || work.bytes < need))
        return invalid(c, "argument work has %lld bytes, %lld needed", (long long)(work.data ? work.bytes : 0),
                       (long long)need);
    if ((uintptr_t)work.data % WORK_ALIGN != 0)
        return invalid(c, "argument work is not aligned to %d bytes", WORK_ALIGN);
    c->work = work.data;
    c->parts = 0;
    for (int l = 0; on_gpu(c) && l < CUDA_LANES; l++) {
        c->gpu.stream[l] = stream;
        c->gpu.workspace[l] = c->products ? c->work + need - PRODUCT_WORKSPACE : NULL;
    }
    return op->run(c, args);
}

enum action { ACT_RUN, ACT_MEASURE, ACT_DESCRIBE };
/* stream: of ACT_RUN. bytes: of ACT_MEASURE. */
static int act(struct braidk *k, const struct op_entry *op, const void *args, enum action action, void *stream,
               int64_t *bytes, char *err, size_t err_bytes)
{
    _Alignas(16) char copy[MOST_ARGS_BYTES];
    struct call c = {.op = op->name, .k = k};
    int before = 0, st = ST_OK;
    if (k == NULL || (action == ACT_MEASURE && bytes == NULL))
        return leave(ST_INVALID, k == NULL ? "the handle is NULL" : "argument bytes is NULL", err, err_bytes);
    bool gpu = k->device != BRAIDK_HOST;
    st = copy_args(op, args, copy, &c.err);
    if (st == ST_OK && gpu)
        st = enter_gpu(k, &before, &c.err);
    if (st != ST_OK)
        return leave(st, c.err.msg, err, err_bytes);
    if (gpu)
        pthread_mutex_lock(&k->lock);
    c.gpu = k->gpu;
    if (action == ACT_MEASURE)
        st = measure(&c, op, copy, bytes);
    else if (action == ACT_RUN)
        st = run(&c, op, copy, stream);
    else {
        c.describe = c.measure = true;
        st = op->run(&c, copy);
    }
    if (gpu) {
        pthread_mutex_unlock(&k->lock);
        leave_gpu(k, before);
    }
    if (action == ACT_DESCRIBE && st == ST_OK && err != NULL && err_bytes > 0) {
        snprintf(err, err_bytes, "%s", c.why);
        return BRAIDK_OK;
    }
    return leave(st, c.err.msg, err, err_bytes);
}

#define DEFINE(op)                                                                                                     \
    _Static_assert(sizeof(struct braidk_##op##_args) <= MOST_ARGS_BYTES, "args of " #op);                              \
    static int run_##op(struct call *c, const void *a) { return lib_##op(c, a); }                                      \
    static const struct op_entry entry_##op = {#op, sizeof(struct braidk_##op##_args),                                 \
                                               offsetof(struct braidk_##op##_args, work), run_##op};                   \
    int braidk_##op(struct braidk *k, const struct braidk_##op##_args *a, void *stream, char *err, size_t err_bytes)   \
    {                                                                                                                  \
        return act(k, &entry_##op, a, ACT_RUN, stream, NULL, err, err_bytes);                                          \
    }                                                                                                                  \
    int braidk_##op##_work(struct braidk *k, const struct braidk_##op##_args *a, int64_t *bytes, char *err,            \
                           size_t err_bytes)                                                                           \
    {                                                                                                                  \
        return act(k, &entry_##op, a, ACT_MEASURE, NULL, bytes, err, err_bytes);                                       \
    }                                                                                                                  \
    int braidk_##op##_supported(struct braidk *k, const struct braidk_##op##_args *a, char *why, size_t why_bytes)     \
    {                                                                                                                  \
        return act(k, &entry_##op, a, ACT_DESCRIBE, NULL, NULL, why, why_bytes);                                       \
    }
BRAIDK_OPS(DEFINE)

size_t braidk_args_bytes(const char *op)
{
#define ENTRY(op) &entry_##op,
    static const struct op_entry *const all[] = {BRAIDK_OPS(ENTRY)};
    for (int i = 0; op != NULL && i < countof(all); i++)
        if (strcmp(all[i]->name, op) == 0)
            return all[i]->bytes;
    return 0;
}
