/* What recompute relies on: streams and norms of an mHC boundary recomputed, from coefficients that were kept, have the
 * same bits, whichever kernels made them first. And fused kernels against separate ones. Needs a GPU;
 * "N passed, N failed" comes last.
 *
 *   check_mhc [SEED]...     default: 5 */
#include "ops/opcheck.h"
#include "ops/mhc/mhc.h"
#include "ops/ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct replay {
    struct dev *dev;
    struct lane lane;
    const struct ops *ops;
    const struct op_desc *desc;
    struct op_call host, there;
    struct op_block block;
    void *base;
};

static int arg_of(const struct replay *r, const char *name) { return op_arg_index(r->desc, name); }

/* A copy of what the device holds of a tensor of the call; NULL if that failed. */
static char *bytes_of(struct replay *r, const char *name, struct err *e)
{
    const struct tensor *t = &r->host.t[arg_of(r, name)];
    char *copy = malloc((size_t)tensor_bytes(t) + 1);
    if (copy == NULL || op_fetch(&r->block, r->dev, r->base, e) != ST_OK) {
        free(copy);
        return NULL;
    }
    return memcpy(copy, t->data, (size_t)tensor_bytes(t));
}

static int wipe(struct replay *r, const char *name, struct err *e)
{
    const struct tensor *t = &r->there.t[arg_of(r, name)];
    return r->dev->vt->fill(r->dev, t->data, 0, tensor_bytes(t), e);
}

static struct mhc_boundary_fwd_args again(const struct replay *r)
{
    const struct op_call *c = &r->there;
#define T(name) (c->t[arg_of(r, #name)])
    return (struct mhc_boundary_fwd_args){.x = T(x),
                                          .f = T(f),
                                          .bias = T(bias),
                                          .coef_in = T(coef_in),
                                          .gain = T(gain),
                                          .y = T(y),
                                          .stat = T(stat),
                                          .coef = T(coef),
                                          .h = T(h),
                                          .work = T(work),
                                          .rule = {.streams = (int64_t)op_attr(c, "streams"),
                                                   .profile = op_attr(c, "profile") != 0 ? MHC_S : MHC_D,
                                                   .iterations = (int64_t)op_attr(c, "iterations")},
                                          .drop = {.p = op_attr(c, "p"),
                                                   .key = (uint64_t)op_attr(c, "key"),
                                                   .seq = (int64_t)op_attr(c, "seq"),
                                                   .info = T(info)},
                                          .eps = op_attr(c, "eps"),
                                          .zero_centered = op_attr(c, "zero_centered") != 0,
                                          .reuse = true};
}

static struct mhc_combine_fwd_args combine_again(const struct replay *r)
{
    const struct op_call *c = &r->there;
    struct mhc_boundary_fwd_args b = again(r);
    int64_t n = b.rule.streams;
    return (struct mhc_combine_fwd_args){.x = b.x,
                                         .f = b.f,
                                         .bias = b.bias,
                                         .post = tensor_cols(&T(coef_in), n, n),
                                         .res = tensor_cols(&T(coef_in), 2 * n, n * n),
                                         .y = b.y,
                                         .rule = b.rule,
                                         .drop = b.drop};
}

static bool same(struct replay *r, const char *name, const char *first, struct err *e)
{
    char *now = bytes_of(r, name, e);
    bool ok =
        now != NULL && first != NULL && memcmp(first, now, (size_t)tensor_bytes(&r->host.t[arg_of(r, name)])) == 0;
    free(now);
    return ok;
}

/* 1 if y, h and stat come out the same from a replay of both, and y from combine alone. */
static int check(struct dev *dev, const char *text, uint64_t seed)
{
    struct err e = {0};
    struct replay r = {
        .dev = dev, .lane = {.dev = dev, .err = &e}, .ops = ops_for(dev), .desc = op_find("mhc_boundary_fwd")};
    struct op_sample sample = {text};
    char *y = NULL, *h = NULL, *stat = NULL;
    bool ok = op_call_sample(&r.host, r.desc, &sample, r.ops, &e) == ST_OK &&
              op_call_alloc(&r.host, &r.block, seed, false, &e) == ST_OK &&
              op_send(&r.host, &r.block, dev, &r.there, &r.base, &e) == ST_OK &&
              op_call_run(r.ops, &r.lane, &r.there) == ST_OK;
    if (ok) {
        y = bytes_of(&r, "y", &e);
        h = bytes_of(&r, "h", &e);
        stat = bytes_of(&r, "stat", &e);
        struct mhc_boundary_fwd_args both = again(&r);
        ok = wipe(&r, "y", &e) == ST_OK && wipe(&r, "h", &e) == ST_OK &&
             r.ops->mhc_boundary_fwd(&r.lane, &both) == ST_OK && same(&r, "y", y, &e) && same(&r, "h", h, &e) &&
             same(&r, "stat", stat, &e);
    }
    if (ok) {
        struct mhc_combine_fwd_args combine = combine_again(&r);
        ok = wipe(&r, "y", &e) == ST_OK && r.ops->mhc_combine_fwd(&r.lane, &combine) == ST_OK && same(&r, "y", y, &e);
    }
    printf("%s replay of mhc_boundary_fwd [%s] %s%s%s\n", ok ? "ok" : "not ok", dtype_name(dev->real), text,
           e.msg[0] ? ": " : "", e.msg);
    if (r.base != NULL)
        dev->vt->free(dev, r.base);
    op_call_free(&r.block);
    free(y);
    free(h);
    free(stat);
    return ok;
}

/* The largest difference of a tensor to what was kept of it, beside its largest value; not a number
 * if either has one. */
static double differs(struct replay *r, const char *name, const char *first, struct err *e)
{
    char *now = bytes_of(r, name, e);
    struct tensor a = r->host.t[arg_of(r, name)], b = a;
    double most = 0, scale = 0;
    a.data = (char *)(uintptr_t)first;
    b.data = now;
    for (int64_t i = 0; now != NULL && first != NULL && i < tensor_elems(&a); i++) {
        double x = tensor_get(&a, i), d = fabs(x - tensor_get(&b, i));
        most = d > most || isnan(d) ? d : most;
        scale = fmax(scale, fabs(x));
    }
    bool ok = now != NULL && first != NULL;
    free(now);
    return !ok ? NAN : scale > 0 ? most / scale : most;
}

/* 1 if the kernels that are chosen (one pass of clusters, two passes) give the bits of y that separate kernels give,
 * and the rest to within what the order of sums explains: h is rounded to bf16 (a step is 1/256 at least of a value,
 * 1/128 at most), and so may be coefficients. */
static int compare_kernels(struct dev *dev, const char *text, uint64_t seed)
{
    static const struct {
        const char *name;
        double allowed, rounded; /* rounded: with coefficients in bf16 */
    } outs[] = {{"stat", 2e-5, 1e-2}, {"coef", 2e-5, 8e-3}, {"h", 8e-3, 1.6e-2}};
    struct err e = {0};
    struct replay r = {
        .dev = dev, .lane = {.dev = dev, .err = &e}, .ops = ops_for(dev), .desc = op_find("mhc_boundary_fwd")};
    struct op_sample sample = {text};
    char *y = NULL, *kept[countof(outs)] = {0};
    double apart[countof(outs)] = {0};
    bool ok = op_call_sample(&r.host, r.desc, &sample, r.ops, &e) == ST_OK &&
              op_call_alloc(&r.host, &r.block, seed, false, &e) == ST_OK &&
              op_send(&r.host, &r.block, dev, &r.there, &r.base, &e) == ST_OK &&
              op_call_set(&r.there, "kernels", MHC_KERNELS_PRIMITIVE) && op_call_run(r.ops, &r.lane, &r.there) == ST_OK;
    if (ok) {
        bool rounded = op_attr(&r.there, "round_bf16") != 0;
        y = bytes_of(&r, "y", &e);
        for (int i = 0; i < countof(outs); i++) {
            kept[i] = bytes_of(&r, outs[i].name, &e);
            ok = ok && wipe(&r, outs[i].name, &e) == ST_OK;
        }
        ok = ok && wipe(&r, "y", &e) == ST_OK && op_call_set(&r.there, "kernels", MHC_KERNELS_AUTO) &&
             op_call_run(r.ops, &r.lane, &r.there) == ST_OK && same(&r, "y", y, &e);
        for (int i = 0; ok && i < countof(outs); i++) {
            apart[i] = differs(&r, outs[i].name, kept[i], &e);
            if (!(apart[i] <= (rounded ? outs[i].rounded : outs[i].allowed)))
                ok = false;
        }
    }
    printf("%s mhc_boundary_fwd by fused and by separate kernels, %s: stat %.1e, coef %.1e, h %.1e apart%s%s\n",
           ok ? "ok" : "not ok", text, apart[0], apart[1], apart[2], e.msg[0] ? ": " : "", e.msg);
    if (r.base != NULL)
        dev->vt->free(dev, r.base);
    op_call_free(&r.block);
    free(y);
    for (int i = 0; i < countof(outs); i++)
        free(kept[i]);
    return ok;
}

int main(int argc, char **argv)
{
    static const char *const samples[] = {"rows=130 d=128 p=0.1 seq=7",
                                          "rows=130 d=128 profile=1 no_bias=1",
                                          "rows=77 d=64",
                                          "rows=9 d=2048 no_bias=1",
                                          "rows=33 d=24",
                                          "rows=130 d=256 p=0.1 seq=7",
                                          "rows=40 d=512 profile=1 no_bias=1",
                                          "rows=17 d=33 streams=3 p=0.5"};
    static const char *const fused[] = {
        "rows=1 d=256", "rows=17 d=256 no_bias=1", "rows=15 d=512 profile=1 zero_centered=1",
        "rows=16 d=768 no_gain=1 no_bias=1 p=0.1 seq=7", "rows=37 d=1024 profile=1 p=0.25 seq=5 round_bf16=1",
        "rows=300 d=2048 no_bias=1", "rows=33 d=2048 round_bf16=1", "rows=140 d=4096 no_bias=1",
        "rows=2200 d=256 no_bias=1", "rows=70 d=1280 no_bias=1", "rows=50 d=1792", "rows=50 d=3840 profile=1 no_bias=1",
        /* too wide for clusters */
        "rows=17 d=4352 p=0.25 seq=5", "rows=70 d=7168 zero_centered=1 no_bias=1"};
    int passed = 0, failed = 0, seeds = argc > 1 ? argc - 1 : 1;
    /* With few multiprocessors each block has many tiles. */
    static const struct dev_gpu devices[] = {{.fp32 = false}, {.sms = 16}, {.fp32 = true}};
    for (int d = 0; d < countof(devices); d++) {
        struct dev dev;
        struct err e = {0};
        if (dev_open_gpu(&dev, &devices[d], 1, &e) != ST_OK) {
            printf("not ok no GPU: %s\n", e.msg);
            failed++;
            break;
        }
        for (int s = 0; s < seeds; s++) {
            uint64_t seed = argc > 1 ? strtoull(argv[1 + s], NULL, 10) : 5;
            for (int i = 0; devices[d].sms == 0 && i < countof(samples); i++)
                check(&dev, samples[i], seed) ? passed++ : failed++;
            for (int i = 0; !devices[d].fp32 && i < countof(fused); i++) {
                check(&dev, fused[i], seed) ? passed++ : failed++;
                compare_kernels(&dev, fused[i], seed) ? passed++ : failed++;
            }
        }
        dev_close(&dev);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
