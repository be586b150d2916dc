/* What recompute relies on: streams and norms of an mHC boundary made again, from coefficients that were kept, have the same
 * bits, whichever kernels made them first. Needs a GPU; "N passed, N failed" comes last.
 *
 *   check_mhc */
#include "ops/opcheck.h"

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
    return (struct mhc_boundary_fwd_args){
        .x = T(x), .f = T(f), .bias = T(bias), .coef_in = T(coef_in), .gain = T(gain), .y = T(y), .stat = T(stat), .coef = T(coef), .h = T(h),
        .work = T(work),
        .rule = {.streams = (int64_t)op_attr(c, "streams"), .profile = op_attr(c, "profile") != 0 ? MHC_S : MHC_D,
                 .iterations = (int64_t)op_attr(c, "iterations")},
        .drop = {.p = op_attr(c, "p"), .key = (uint64_t)op_attr(c, "key"), .seq = (int64_t)op_attr(c, "seq"), .info = T(info)},
        .eps = op_attr(c, "eps"), .zero_centered = op_attr(c, "zero_centered") != 0, .reuse = true};
}

static struct mhc_combine_fwd_args combine_again(const struct replay *r)
{
    const struct op_call *c = &r->there;
    struct mhc_boundary_fwd_args b = again(r);
    int64_t n = b.rule.streams;
    return (struct mhc_combine_fwd_args){.x = b.x, .f = b.f, .bias = b.bias, .post = tensor_cols(&T(coef_in), n, n),
                                         .res = tensor_cols(&T(coef_in), 2 * n, n * n), .y = b.y, .rule = b.rule, .drop = b.drop};
}

static bool same(struct replay *r, const char *name, const char *first, struct err *e)
{
    char *now = bytes_of(r, name, e);
    bool ok = now != NULL && first != NULL && memcmp(first, now, (size_t)tensor_bytes(&r->host.t[arg_of(r, name)])) == 0;
    free(now);
    return ok;
}

/* 1 if y, h and stat come out the same from a replay of both, and y from combine alone. */
static int check(struct dev *dev, const char *text)
{
    struct err e = {0};
    struct replay r = {.dev = dev, .lane = {.dev = dev, .err = &e}, .ops = ops_for(dev), .desc = op_find("mhc_boundary_fwd")};
    struct op_sample sample = {text};
    char *y = NULL, *h = NULL, *stat = NULL;
    bool ok = op_call_sample(&r.host, r.desc, &sample, r.ops, &e) == ST_OK && op_call_alloc(&r.host, &r.block, 5, false, &e) == ST_OK &&
              op_send(&r.host, &r.block, dev, &r.there, &r.base, &e) == ST_OK && r.desc->run(r.ops, &r.lane, &r.there) == ST_OK;
    if (ok) {
        y = bytes_of(&r, "y", &e);
        h = bytes_of(&r, "h", &e);
        stat = bytes_of(&r, "stat", &e);
        struct mhc_boundary_fwd_args both = again(&r);
        ok = wipe(&r, "y", &e) == ST_OK && wipe(&r, "h", &e) == ST_OK && r.ops->mhc_boundary_fwd(&r.lane, &both) == ST_OK &&
             same(&r, "y", y, &e) && same(&r, "h", h, &e) && same(&r, "stat", stat, &e);
    }
    if (ok) {
        struct mhc_combine_fwd_args combine = combine_again(&r);
        ok = wipe(&r, "y", &e) == ST_OK && r.ops->mhc_combine_fwd(&r.lane, &combine) == ST_OK && same(&r, "y", y, &e);
    }
    printf("%s replay of mhc_boundary_fwd [%s] %s%s%s\n", ok ? "ok" : "not ok", dtype_name(dev->real), text, e.msg[0] ? ": " : "", e.msg);
    if (r.base != NULL)
        dev->vt->free(dev, r.base);
    op_call_free(&r.block);
    free(y);
    free(h);
    free(stat);
    return ok;
}

int main(void)
{
    static const char *const samples[] = {"rows=130 d=128 p=0.1 seq=7", "rows=130 d=128 profile=1 no_bias=1", "rows=77 d=64", "rows=9 d=2048 no_bias=1",
                                          "rows=33 d=24", "rows=130 d=256 p=0.1 seq=7", "rows=40 d=512 profile=1 no_bias=1",               "rows=17 d=33 streams=3 p=0.5"};
    int passed = 0, failed = 0;
    for (int fp32 = 0; fp32 < 2; fp32++) {
        struct dev dev;
        struct err e = {0};
        if (dev_open_gpu(&dev, &(struct dev_gpu){.fp32 = fp32 == 1}, 1, &e) != ST_OK) {
            printf("not ok no GPU: %s\n", e.msg);
            failed++;
            break;
        }
        for (int i = 0; i < countof(samples); i++)
            check(&dev, samples[i]) ? passed++ : failed++;
        dev_close(&dev);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
