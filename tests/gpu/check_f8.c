/* FP8 on a GPU (or on the emulator of tests/emu): codes of every bf16 number and of a sweep of floats are those of
 * tensor/f8.h; a value that is not finite shows in its block's scale and in no other; act8 gives the codes of act
 * followed by quantise, norm8 those of addnorm followed by quantise, and adamw those of its result, to the bit. Prints
 * "N passed, N failed" last.
 *
 *   check_f8 [FLOATS]     numbers of the sweep, default 1000000 */
#include "ops/act8/act8.h"
#include "ops/adamw/adamw.h"
#include "ops/addnorm/addnorm.h"
#include "ops/norm8/norm8.h"
#include "ops/ops.h"
#include "ops/quantise/quantise.h"
#include "tensor/f8.h"

#include <stdio.h>
#include <stdlib.h>

struct tally {
    int passed, failed;
};

static void verdict(struct tally *t, bool ok, const char *what, const char *of)
{
    ok ? t->passed++ : t->failed++;
    printf("%s %s, %s\n", ok ? "ok" : "not ok", what, of);
}

static void must(int status, const struct err *e)
{
    if (status == ST_OK)
        return;
    printf("not ok %s\n0 passed, 1 failed\n", e->msg);
    exit(1);
}

static struct tensor there(struct dev *d, struct tensor shape, const void *host, struct err *e)
{
    must(d->vt->alloc(d, max_i64(tensor_bytes(&shape), 16), &shape.data, e), e);
    if (host != NULL)
        must(d->vt->copy_in(d, shape.data, host, tensor_bytes(&shape), e), e);
    return shape;
}

static void *back(struct dev *d, const struct tensor *t, struct err *e)
{
    void *host = malloc((size_t)tensor_bytes(t) + 1);
    if (host == NULL)
        exit(1);
    must(d->vt->copy_out(d, host, t->data, tensor_bytes(t), e), e);
    return host;
}

/* Codes and scales of x and of its transpose, on the device. */
struct codes {
    struct tensor q, qs, t, ts;
};

static struct codes new_codes(struct dev *d, enum dtype type, int64_t rows, int64_t cols, struct err *e)
{
    return (struct codes){there(d, tensor_2d(NULL, type, rows, cols), NULL, e),
                          there(d, f8_scales(DT_F32, rows, cols, 128, false), NULL, e),
                          there(d, tensor_2d(NULL, type, cols, rows), NULL, e),
                          there(d, f8_scales(DT_F32, cols, rows, 128, false), NULL, e)};
}

static void free_codes(struct dev *d, struct codes *c)
{
    d->vt->free(d, c->q.data);
    d->vt->free(d, c->qs.data);
    d->vt->free(d, c->t.data);
    d->vt->free(d, c->ts.data);
}

static void quantise(struct dev *d, const struct tensor *x, const struct codes *c, struct err *e)
{
    struct lane lane = {.dev = d, .err = e};
    must(ops_for(d)->quantise(
             &lane, &(struct quantise_args){.x = *x, .q = c->q, .qs = c->qs, .t = c->t, .ts = c->ts, .block = 128}),
         e);
}

/* ---- conversion: the first value of each row is the largest of the format, so that the row is */

static bool codes_of(struct dev *d, enum dtype type, const float *values, int64_t n, enum dtype stored, struct err *e)
{
    int64_t rows = round_up(ceil_div(n, 127), 16);
    struct tensor host = tensor_2d(calloc((size_t)rows * 128, 4), stored, rows, 128);
    for (int64_t r = 0; r < rows; r++) {
        tensor_set(&host, r * 128, type == DT_F8_E5M2 ? 57344 : 448);
        for (int64_t c = 1; c < 128 && r * 127 + c - 1 < n; c++)
            tensor_set(&host, r * 128 + c, (double)values[r * 127 + c - 1]);
    }
    struct tensor x = there(d, host, host.data, e);
    struct codes c = new_codes(d, type, rows, 128, e);
    quantise(d, &x, &c, e);
    uint8_t *q = back(d, &c.q, e);
    bool same = true;
    for (int64_t i = 0; i < rows * 128; i++)
        same = same && q[i] == f8_from_f32((float)tensor_get(&host, i), type);
    free(q);
    free(host.data);
    d->vt->free(d, x.data);
    free_codes(d, &c);
    return same;
}

static void check_conversion(struct dev *d, struct tally *t, int64_t floats, struct err *e)
{
    static const enum dtype types[] = {DT_F8_E4M3, DT_F8_E5M2};
    int64_t room = floats > 1 << 16 ? floats : 1 << 16;
    float *v = malloc((size_t)room * sizeof *v);
    for (int k = 0; v != NULL && k < countof(types); k++) {
        int64_t n = 0;
        float top = types[k] == DT_F8_E5M2 ? 57344 : 448;
        for (uint32_t u = 0; u < 1 << 16; u++)
            if (fabsf(bf16_to_f32((uint16_t)u)) <= top)
                v[n++] = bf16_to_f32((uint16_t)u);
        verdict(t, codes_of(d, types[k], v, n, DT_BF16, e), "every bf16 number becomes the same code",
                dtype_name(types[k]));
        uint32_t most;
        memcpy(&most, &top, sizeof most);
        for (n = 0; n < floats; n++) {
            uint32_t u = (uint32_t)((uint64_t)most * (uint64_t)n / (uint64_t)floats) | (n % 2 ? 0x80000000u : 0);
            memcpy(&v[n], &u, sizeof u);
        }
        verdict(t, codes_of(d, types[k], v, n, DT_F32, e), "a sweep of floats becomes the same codes",
                dtype_name(types[k]));
    }
    free(v);
}

static void check_nonfinite(struct dev *d, struct tally *t, struct err *e)
{
    enum { ROWS = 144, COLS = 256 };
    static const double bad[] = {NAN, -INFINITY};
    for (int k = 0; k < countof(bad); k++) {
        struct tensor host = tensor_2d(calloc(ROWS * COLS, 2), DT_BF16, ROWS, COLS);
        for (int64_t i = 0; i < ROWS * COLS; i++)
            tensor_set(&host, i, rng_normal(3, (uint64_t)i));
        tensor_set(&host, 130 * COLS + 200, bad[k]);
        struct tensor x = there(d, host, host.data, e);
        struct codes c = new_codes(d, DT_F8_E4M3, ROWS, COLS, e);
        quantise(d, &x, &c, e);
        float *qs = back(d, &c.qs, e), *ts = back(d, &c.ts, e);
        int wrong = 0;
        for (int64_t r = 0; r < ROWS; r++)
            for (int64_t b = 0; b < COLS / 128; b++)
                wrong += isnan(qs[f8_scale_at(&c.q, 128, false, r, 128 * b)]) != (r == 130 && b == 1);
        for (int64_t r = 0; r < COLS; r++)
            for (int64_t b = 0; b < 2; b++)
                wrong += isnan(ts[f8_scale_at(&c.t, 128, false, r, 128 * b)]) != (r == 200 && b == 1);
        verdict(t, wrong == 0, "a value that is not finite marks its blocks and no other",
                isnan(bad[k]) ? "NaN" : "infinity");
        free(qs);
        free(ts);
        free(host.data);
        d->vt->free(d, x.data);
        free_codes(d, &c);
    }
}

/* ---- act8 ------------------------------------------------------------------------------------ */

static bool same(struct dev *d, const struct tensor *a, const struct tensor *b, struct err *e)
{
    void *x = back(d, a, e), *y = back(d, b, e);
    bool is = memcmp(x, y, (size_t)tensor_bytes(a)) == 0;
    free(x);
    free(y);
    return is;
}

static struct tensor random_there(struct dev *d, int64_t rows, int64_t cols, uint64_t key, struct err *e)
{
    struct tensor host = tensor_2d(calloc((size_t)(rows * cols), 4), d->real, rows, cols);
    for (int64_t i = 0; i < rows * cols; i++)
        tensor_set(&host, i, ldexp(rng_normal(key, (uint64_t)i), (int)(i / cols % 7) - 3));
    struct tensor t = there(d, host, host.data, e);
    free(host.data);
    return t;
}

static void check_act(struct dev *d, struct tally *t, int64_t rows, int64_t f, enum act_kind kind, enum dtype type,
                      struct err *e)
{
    const struct ops *ops = ops_for(d);
    struct lane lane = {.dev = d, .err = e};
    struct act_rule rule = {.kind = kind, .alpha = 1.702, .clamp = kind == ACT_GEGLU ? 2 : 0};
    int64_t wide = act_is_gated(kind) ? 2 * f : f;
    struct tensor x = random_there(d, rows, wide, 1, e), dy = random_there(d, rows, f, 2, e);
    struct tensor y = there(d, tensor_2d(NULL, d->real, rows, f), NULL, e),
                  dx = there(d, tensor_2d(NULL, d->real, rows, wide), NULL, e);
    char name[64];
    snprintf(name, sizeof name, "%lld x %lld, kind %d, %s", (long long)rows, (long long)f, (int)kind, dtype_name(type));
    for (int bwd = 0; bwd < 2; bwd++) {
        struct codes one = new_codes(d, type, rows, bwd ? wide : f, e),
                     two = new_codes(d, type, rows, bwd ? wide : f, e);
        struct act8_fwd_args fa = {
            .x = x, .q = one.q, .qs = one.qs, .t = one.t, .ts = one.ts, .block = 128, .rule = rule};
        struct act8_bwd_args ba = {
            .dy = dy, .x = x, .q = one.q, .qs = one.qs, .t = one.t, .ts = one.ts, .block = 128, .rule = rule};
        int64_t work = bwd ? ops->act8_bwd_work(&ba) : ops->act8_fwd_work(&fa);
        struct tensor scratch = there(d, tensor_1d(NULL, DT_U8, work), NULL, e);
        fa.work = ba.work = work > 0 ? scratch : (struct tensor){0};
        must(bwd ? ops->act8_bwd(&lane, &ba) : ops->act8_fwd(&lane, &fa), e);
        must(bwd ? ops->act_bwd(&lane, &(struct act_bwd_args){.dy = dy, .x = x, .dx = dx, .rule = rule})
                 : ops->act_fwd(&lane, &(struct act_fwd_args){.x = x, .y = y, .rule = rule}),
             e);
        quantise(d, bwd ? &dx : &y, &two, e);
        bool all = same(d, &one.q, &two.q, e) && same(d, &one.qs, &two.qs, e) && same(d, &one.t, &two.t, e) &&
                   same(d, &one.ts, &two.ts, e);
        verdict(t, all, bwd ? "act8_bwd is act_bwd, then quantise" : "act8_fwd is act_fwd, then quantise", name);
        d->vt->free(d, scratch.data);
        free_codes(d, &one);
        free_codes(d, &two);
    }
    d->vt->free(d, x.data);
    d->vt->free(d, dy.data);
    d->vt->free(d, y.data);
    d->vt->free(d, dx.data);
}

/* ---- norm8 ----------------------------------------------------------------------------------- */

/* Codes of both orientations at once, and each alone. */
static void check_norm(struct dev *d, struct tally *t, int64_t rows, int64_t cols, bool zero_centered, struct err *e)
{
    const struct ops *ops = ops_for(d);
    struct lane lane = {.dev = d, .err = e};
    struct tensor x = random_there(d, rows, cols, 4, e), w = there(d, tensor_1d(NULL, d->wide, cols), NULL, e);
    struct tensor rstd[2], y = there(d, tensor_2d(NULL, d->real, rows, cols), NULL, e);
    for (int k = 0; k < 2; k++)
        rstd[k] = there(d, tensor_1d(NULL, d->wide, rows), NULL, e);
    float *gains = malloc((size_t)cols * sizeof *gains);
    for (int64_t c = 0; gains != NULL && c < cols; c++)
        gains[c] = (float)rng_normal(5, (uint64_t)c);
    must(d->vt->copy_in(d, w.data, gains, tensor_bytes(&w), e), e);
    free(gains);
    struct codes one = new_codes(d, DT_F8_E4M3, rows, cols, e), two = new_codes(d, DT_F8_E4M3, rows, cols, e);
    char name[64];
    snprintf(name, sizeof name, "%lld x %lld", (long long)rows, (long long)cols);
    must(ops->addnorm_fwd(&lane,
                          &(struct addnorm_fwd_args){
                              .x = x, .w = w, .y = y, .rstd = rstd[0], .eps = 1e-5, .zero_centered = zero_centered}),
         e);
    must(ops->addnorm_fwd(&lane, &(struct addnorm_fwd_args){.x = x, .w = w, .rstd = rstd[1], .eps = 1e-5}), e);
    verdict(t, same(d, &rstd[0], &rstd[1], e), "statistics alone are those of the norm", name);
    quantise(d, &y, &two, e);
    for (int only = 0; only < 3; only++) {
        struct norm8_args a = {.x = x, .rstd = rstd[1], .w = w, .block = 128, .zero_centered = zero_centered};
        if (only != 2) {
            a.q = one.q;
            a.qs = one.qs;
        }
        if (only != 1) {
            a.t = one.t;
            a.ts = one.ts;
        }
        must(d->vt->fill(d, one.q.data, 0x55, tensor_bytes(&one.q), e), e);
        must(d->vt->fill(d, one.t.data, 0x55, tensor_bytes(&one.t), e), e);
        int64_t work = ops->norm8_work(&a);
        struct tensor scratch = there(d, tensor_1d(NULL, DT_U8, work), NULL, e);
        a.work = work > 0 ? scratch : (struct tensor){0};
        must(ops->norm8(&lane, &a), e);
        bool all = (only == 2 || (same(d, &one.q, &two.q, e) && same(d, &one.qs, &two.qs, e))) &&
                   (only == 1 || (same(d, &one.t, &two.t, e) && same(d, &one.ts, &two.ts, e)));
        verdict(t, all, "norm8 is addnorm, then quantise", name);
        d->vt->free(d, scratch.data);
    }
    free_codes(d, &one);
    free_codes(d, &two);
    for (int k = 0; k < 2; k++)
        d->vt->free(d, rstd[k].data);
    d->vt->free(d, x.data);
    d->vt->free(d, w.data);
    d->vt->free(d, y.data);
}

/* ---- adamw ----------------------------------------------------------------------------------- */

static struct tensor random_floats(struct dev *d, int64_t n, uint64_t key, bool positive, struct err *e)
{
    float *host = malloc((size_t)n * sizeof *host);
    for (int64_t i = 0; host != NULL && i < n; i++) {
        double z = ldexp(rng_normal(key, (uint64_t)i), (int)(i / 1000 % 9) - 4);
        host[i] = (float)(positive ? z * z : z);
    }
    struct tensor t = there(d, tensor_1d(NULL, DT_F32, n), host, e);
    free(host);
    return t;
}

static struct codes square_codes(struct dev *d, int64_t rows, int64_t cols, struct err *e)
{
    return (struct codes){there(d, tensor_2d(NULL, DT_F8_E4M3, rows, cols), NULL, e),
                          there(d, f8_scales(DT_F32, rows, cols, 128, true), NULL, e),
                          there(d, tensor_2d(NULL, DT_F8_E4M3, cols, rows), NULL, e),
                          there(d, f8_scales(DT_F32, cols, rows, 128, true), NULL, e)};
}

/* Two matrices with codes and, between them, a parameter without, as one call; and each alone, without codes. */
static void check_update(struct dev *d, struct tally *t, int64_t rows, int64_t cols, bool skip, struct err *e)
{
    enum { PARTS = 3 };
    const struct ops *ops = ops_for(d);
    struct lane lane = {.dev = d, .err = e};
    const double hyper[8] = {0.01, 1 - 0.9, 1 - 0.95}, scale[4] = {1, 0.5, skip, 0};
    struct tensor numbers = there(d, tensor_1d(NULL, DT_F64, 8), hyper, e),
                  clip = there(d, tensor_1d(NULL, DT_F64, 4), scale, e);
    struct adamw_part part[2][PARTS];
    struct codes want = square_codes(d, rows, cols, e);
    int64_t n = rows * cols;
    for (int way = 0; way < 2; way++)
        for (int k = 0; k < PARTS; k++) {
            uint64_t key = (uint64_t)(4 * k);
            part[way][k] = (struct adamw_part){.p = random_floats(d, n, key + 1, false, e),
                                               .g = random_floats(d, n, key + 2, false, e),
                                               .m = random_floats(d, n, key + 3, false, e),
                                               .v = random_floats(d, n, key + 4, true, e),
                                               .decay = 0.1,
                                               .rate = 0.5};
            struct codes c = square_codes(d, rows, cols, e);
            if (way == 0 && k != 1) {
                part[way][k].q = c.q;
                part[way][k].qs = c.qs;
                part[way][k].t = c.t;
                part[way][k].ts = c.ts;
                struct quantise_args before = {.x = tensor_2d(part[way][k].p.data, DT_F32, rows, cols),
                                               .q = c.q,
                                               .qs = c.qs,
                                               .t = c.t,
                                               .ts = c.ts,
                                               .block = 128,
                                               .square = true};
                must(ops->quantise(&lane, &before), e); /* what a skipped step leaves */
            } else {
                free_codes(d, &c);
            }
        }
    for (int way = 0; way < 2; way++)
        for (int k = 0; k < (way == 0 ? 1 : PARTS); k++) {
            const struct adamw_part *p = &part[way][k];
            struct adamw_args a = {.p = p->p, .g = p->g, .m = p->m, .v = p->v, .q = p->q, .qs = p->qs, .t = p->t};
            a.ts = p->ts;
            a.hyper = numbers;
            a.scale = clip;
            a.beta1 = 0.9;
            a.beta2 = 0.95;
            a.eps = 1e-8;
            a.decay = p->decay;
            a.rate = p->rate;
            a.more = p + 1;
            a.n_more = way == 0 ? PARTS - 1 : 0;
            must(ops->adamw(&lane, &a), e);
        }
    bool values = true, codes = true;
    for (int k = 0; k < PARTS; k++) {
        struct adamw_part *a = &part[0][k], *b = &part[1][k];
        values &= same(d, &a->p, &b->p, e) && same(d, &a->m, &b->m, e) && same(d, &a->v, &b->v, e);
        if (k != 1) {
            struct quantise_args q = {.x = tensor_2d(b->p.data, DT_F32, rows, cols),
                                      .q = want.q,
                                      .qs = want.qs,
                                      .t = want.t,
                                      .ts = want.ts,
                                      .block = 128,
                                      .square = true};
            must(ops->quantise(&lane, &q), e);
            codes &= same(d, &a->q, &want.q, e) && same(d, &a->qs, &want.qs, e) && same(d, &a->t, &want.t, e) &&
                     same(d, &a->ts, &want.ts, e);
            free_codes(d, &(struct codes){a->q, a->qs, a->t, a->ts});
        }
        struct tensor *gone[] = {&a->p, &a->g, &a->m, &a->v, &b->p, &b->g, &b->m, &b->v};
        for (int i = 0; i < countof(gone); i++)
            d->vt->free(d, gone[i]->data);
    }
    char name[64];
    snprintf(name, sizeof name, "%lld x %lld%s", (long long)rows, (long long)cols, skip ? ", skipped" : "");
    verdict(t, values, "adamw with codes updates as without", name);
    verdict(t, codes, "codes of adamw are those of its result", name);
    free_codes(d, &want);
    d->vt->free(d, numbers.data);
    d->vt->free(d, clip.data);
}

int main(int argc, char **argv)
{
    struct tally t = {0};
    struct err e = {0};
    struct dev d;
    int64_t floats = argc > 1 ? atoll(argv[1]) : 1000000;
    must(dev_open_gpu(&d, &(struct dev_gpu){0}, 1, &e), &e);
    printf("%s\n", d.name);
    check_conversion(&d, &t, floats > 127 ? floats : 127, &e);
    check_nonfinite(&d, &t, &e);
    static const enum act_kind kinds[] = {ACT_SWIGLU, ACT_GEGLU, ACT_QUICK_GEGLU, ACT_GELU, ACT_RELU2, ACT_SILU};
    for (int k = 0; k < countof(kinds); k++)
        check_act(&d, &t, 144, 256, kinds[k], k % 2 ? DT_F8_E5M2 : DT_F8_E4M3, &e);
    check_act(&d, &t, 48, 144, ACT_SWIGLU, DT_F8_E4M3, &e); /* by way of scratch */
    check_norm(&d, &t, 144, 272, false, &e);
    check_norm(&d, &t, 256, 128, true, &e);
    check_norm(&d, &t, 33, 200, false, &e); /* rows that are no whole vectors: by way of scratch */
    check_update(&d, &t, 144, 272, false, &e);
    check_update(&d, &t, 256, 128, false, &e);
    check_update(&d, &t, 128, 128, true, &e);
    check_update(&d, &t, 35, 20, false, &e); /* no tiles */
    dev_close(&d);
    printf("%d passed, %d failed\n", t.passed, t.failed);
    return t.failed != 0;
}
