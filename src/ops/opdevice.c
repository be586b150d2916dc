/* Op calls on a GPU: sending the tensors of a call there and back, and comparing with the reference; see opcheck.h. */
#include "ops/opcheck.h"
#include "ops/gemm/gemm.h"

#include "dev/cuda.h"
#include "ops/check.h"
#include "ops/ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int op_send(const struct op_call *c, const struct op_block *b, struct dev *dev, struct op_call *there, void **base,
            struct err *e)
{
    *there = *c;
    TRY(dev->vt->alloc(dev, (int64_t)b->bytes, base, e));
    for (int i = 0; i < c->desc->n_args; i++)
        if (c->t[i].data != NULL)
            there->t[i].data = (char *)*base + ((char *)c->t[i].data - b->base);
    return dev->vt->copy_in(dev, *base, b->base, (int64_t)b->bytes, e);
}

int op_fetch(const struct op_block *b, struct dev *dev, const void *base, struct err *e)
{
    TRY(dev->vt->sync(dev, e));
    return dev->vt->copy_out(dev, b->base, base, (int64_t)b->bytes, e);
}

/* Both sides see the numbers as the narrow side holds them. */
static void same_inputs(const struct op_call *narrow, const struct op_call *exact)
{
    for (int i = 0; i < narrow->desc->n_args; i++) {
        enum arg_type type = narrow->desc->args[i].type;
        if (narrow->t[i].data == NULL || narrow->desc->args[i].role == ARG_WORK ||
            !(arg_is_real(type) || type == ARG_F64))
            continue;
        for (int64_t k = 0, n = tensor_elems(&narrow->t[i]); k < n; k++)
            tensor_set(&exact->t[i], k, tensor_get(&narrow->t[i], k));
    }
}

static double round_to(enum dtype t, double v)
{
    return t == DT_BF16 ? (double)bf16_to_f32(f32_to_bf16((float)v)) : t == DT_F32 ? (double)(float)v : v;
}

static void note(struct op_check_result *out, double ratio, const char *name, int64_t k, double got, double want)
{
    if (ratio > out->worst || !isfinite(ratio)) {
        out->worst = isfinite(ratio) ? ratio : HUGE_VAL;
        snprintf(out->where, sizeof out->where, "%s[%lld] %g, not %g", name, (long long)k, got, want);
    }
}

/* Sums of squares of one output: of the value, of our error, of the error of rounding the exact value. */
static void compare_output(const struct op_call *got, const struct op_call *want, int i, double allowed_extra,
                           struct op_check_result *out)
{
    double value = 0, error = 0, floor = 0, worst = -1;
    int64_t where = 0, n = tensor_elems(&got->t[i]);
    const char *name = got->desc->args[i].name;
    for (int64_t k = 0; k < n; k++) {
        double g = tensor_get(&got->t[i], k), w = tensor_get(&want->t[i], k), r = round_to(got->t[i].dtype, w);
        if (!isfinite(w) || !isfinite(g)) {
            if (!(g == w || (isnan(g) && isnan(w))))
                note(out, HUGE_VAL, name, k, g, w);
            continue;
        }
        value += w * w;
        error += (g - w) * (g - w);
        floor += (r - w) * (r - w);
        if (fabs(g - w) > worst) {
            worst = fabs(g - w);
            where = k;
        }
    }
    out->compared++;
    if (n > 0) {
        double allowed = 2 * sqrt(floor) + allowed_extra * sqrt(value) + 1e-6 * sqrt((double)n) * allowed_extra;
        note(out, error == 0 ? 0 : sqrt(error) / (allowed + 1e-30), name, where, tensor_get(&got->t[i], where),
             tensor_get(&want->t[i], where));
    }
}

static int run_there(const struct op_call *c, const struct op_block *b, struct dev *dev, struct err *e)
{
    struct op_call there;
    void *base = NULL;
    struct lane lane = {.dev = dev, .err = e};
    int st = op_send(c, b, dev, &there, &base, e);
    if (st == ST_OK)
        st = op_call_run(ops_for(dev), &lane, &there);
    if (st == ST_OK)
        st = op_fetch(b, dev, base, e);
    if (base != NULL)
        dev->vt->free(dev, base);
    return st;
}

static bool is_output(const struct op_call *c, int i)
{
    enum arg_role role = c->desc->args[i].role;
    return (role == ARG_OUT || role == ARG_OOUT) && c->t[i].data != NULL;
}

/* Bytes of outputs, row by row: padding between rows is not compared. */
static bool same_bits(const struct op_call *a, const struct op_call *b)
{
    for (int i = 0; i < a->desc->n_args; i++) {
        size_t size = dtype_bytes(a->t[i].dtype);
        for (int64_t r = 0, rows = is_output(a, i) ? rows_of(&a->t[i]) : 0; r < rows; r++) {
            size_t at = (size_t)row_offset(&a->t[i], r) * size;
            if (memcmp((char *)a->t[i].data + at, (char *)b->t[i].data + at, (size_t)cols_of(&a->t[i]) * size) != 0)
                return false;
        }
    }
    return true;
}

/* Products on another lane, of memory of their own. */
struct load {
    void *base;
    struct gemm_args g;
    struct lane lane;
};
enum { LOAD = 2048 };

static int load_open(struct load *w, struct dev *dev, struct err *e)
{
    int64_t bytes = LOAD * LOAD * (int64_t)dtype_bytes(dev->real);
    *w = (struct load){.lane = {.dev = dev, .index = 1, .err = e}};
    TRY(dev->vt->alloc(dev, 3 * bytes, &w->base, e));
    TRY(dev->vt->fill(dev, w->base, 1, 3 * bytes, e));
    char *at = w->base;
    w->g = (struct gemm_args){.a = tensor_2d(at, dev->real, LOAD, LOAD),
                              .b = tensor_2d(at + bytes, dev->real, LOAD, LOAD),
                              .c = tensor_2d(at + 2 * bytes, dev->real, LOAD, LOAD),
                              .alpha = 1};
    return dev->vt->sync(dev, e);
}

int op_repeat_gpu(const struct op_desc *d, const struct op_sample *s, struct dev *dev, int times, struct err *e)
{
    struct op_call first, again;
    struct op_block fb = {0}, ab = {0};
    struct load load = {0};
    struct cuda_dev *gpu = dev->impl;
    const struct ops *ops = ops_for(dev);
    bool strided = op_sample_flag(s, "strided");
    int st, budget = gpu->sm_budget;
    TRY_OUT(op_call_sample(&first, d, s, ops, e));
    TRY_OUT(op_call_alloc(&first, &fb, 1, strided, e));
    TRY_OUT(run_there(&first, &fb, dev, e));
    TRY_OUT(load_open(&load, dev, e));
    for (int k = 0; k < times && st == ST_OK; k++) {
        TRY_OUT(op_call_sample(&again, d, s, ops, e));
        TRY_OUT(op_call_alloc(&again, &ab, 1, strided, e));
        gpu->sm_budget = budget >> k % 8 > 0 ? budget >> k % 8 : 1;
        TRY_OUT(ops->gemm(&load.lane, &load.g));
        TRY_OUT(run_there(&again, &ab, dev, e));
        if (!same_bits(&first, &again))
            st = err_set(e, ST_INTERNAL, "%s gave other bits in run %d of %d beside other work", d->name, k + 2,
                         times + 1);
        op_call_free(&ab);
    }
out:
    gpu->sm_budget = budget;
    if (load.base != NULL) {
        dev->vt->sync(dev, e);
        dev->vt->free(dev, load.base);
    }
    op_call_free(&fb);
    op_call_free(&ab);
    return st;
}

int op_compare_gpu(const struct op_desc *d, const struct op_sample *s, struct dev *dev, uint64_t seed,
                   struct op_check_result *out, struct err *e)
{
    *out = (struct op_check_result){0};
    struct op_call fast, again, exact;
    struct op_block fb = {0}, ab = {0}, xb = {0};
    struct dev ref = {.kind = DEV_REF, .real = DT_F64, .wide = DT_F64, .n_threads = 1};
    struct lane ref_lane = {.dev = &ref, .err = e};
    bool strided = op_sample_flag(s, "strided");
    const struct ops *ops = ops_for(dev);
    int st;
    TRY_OUT(op_call_sample(&fast, d, s, ops, e));
    TRY_OUT(op_call_sample(&again, d, s, ops, e));
    TRY_OUT(op_call_sample(&exact, d, s, &ops_ref, e));
    TRY_OUT(op_call_alloc(&fast, &fb, seed, strided, e));
    TRY_OUT(op_call_alloc(&again, &ab, seed, strided, e));
    TRY_OUT(op_call_alloc(&exact, &xb, seed, strided, e));
    same_inputs(&fast, &exact);
    TRY_OUT(run_there(&fast, &fb, dev, e));
    TRY_OUT(run_there(&again, &ab, dev, e));
    TRY_OUT(op_call_run(&ops_ref, &ref_lane, &exact));
    if (!op_guards_intact(&fast, &fb))
        st = err_set(e, ST_INTERNAL, "%s on %s wrote outside its tensors", d->name, ops->name);
    else if (!same_bits(&fast, &again))
        st = err_set(e, ST_INTERNAL, "%s on %s gives different bits each time", d->name, ops->name);
    bool wide_stream = false; /* then nothing is rounded on the way */
    for (int i = 0; i < d->n_args; i++)
        wide_stream |= fast.wide[i];
    double extra = 10 * d->tolerance + (dev->real == DT_BF16 && !wide_stream ? d->narrow : 0);
    for (int i = 0; st == ST_OK && i < d->n_args; i++)
        if (is_output(&fast, i))
            compare_output(&fast, &exact, i, extra, out);
out:
    op_call_free(&fb);
    op_call_free(&ab);
    op_call_free(&xb);
    return st != ST_OK ? (err_in(e, "comparing %s, sample '%s'", d->name, s->text), st) : ST_OK;
}
