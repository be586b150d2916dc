/* Attention on a GPU beyond what single samples show: a backward cut into pieces gives the bits of the whole call,
 * eager or captured; the library's results and those of our own kernels fit together; the number of multiprocessors
 * changes no bits; a wrong start harms nothing. Prints "N passed, N failed" last. */
#include "dev/cuda.h"
#include "ops/attention/attention.h"
#include "ops/check.h"
#include "ops/ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct bed {
    struct dev dev;
    struct err e;
    int passed, failed;
};

static void verdict(struct bed *b, const char *what, bool ok)
{
    ok ? b->passed++ : b->failed++;
    printf("%s %s\n", ok ? "ok" : "not ok", what);
}

static void must(struct bed *b, int status)
{
    if (status == ST_OK)
        return;
    printf("not ok %s\n%d passed, %d failed\n", b->e.msg, b->passed, b->failed + 1);
    exit(1);
}

/* A tensor on the GPU: random reals (scaled), or zeros. */
static struct tensor there(struct bed *b, struct tensor t, uint64_t key, double scale)
{
    int64_t bytes = max_i64(tensor_bytes(&t), 1);
    struct tensor host = t;
    host.data = calloc(1, (size_t)bytes);
    if (host.data == NULL)
        exit(1);
    for (int64_t i = 0; key != 0 && i < tensor_elems(&t); i++)
        tensor_set(&host, i, scale * rng_normal(key, (uint64_t)i));
    must(b, b->dev.vt->alloc(&b->dev, bytes, &t.data, &b->e));
    must(b, b->dev.vt->copy_in(&b->dev, t.data, host.data, tensor_bytes(&t), &b->e));
    must(b, b->dev.vt->sync(&b->dev, &b->e));
    free(host.data);
    return t;
}

static struct tensor here(struct bed *b, const struct tensor *t)
{
    struct tensor host;
    must(b, b->dev.vt->sync(&b->dev, &b->e));
    must(b, dev_fetch(&b->dev, t, &host, &b->e));
    return host;
}

static void drop(struct bed *b, struct tensor *t)
{
    if (t->data != NULL)
        b->dev.vt->free(&b->dev, t->data);
    t->data = NULL;
}

static bool same(struct bed *b, const struct tensor *x, const struct tensor *y)
{
    struct tensor hx = here(b, x), hy = here(b, y);
    bool equal = memcmp(hx.data, hy.data, (size_t)tensor_bytes(x)) == 0;
    dev_fetched(&b->dev, &hx);
    dev_fetched(&b->dev, &hy);
    return equal;
}

/* Relative Frobenius distance. */
static double distance(struct bed *b, const struct tensor *x, const struct tensor *y)
{
    struct tensor hx = here(b, x), hy = here(b, y);
    double diff = 0, size = 0;
    for (int64_t i = 0; i < tensor_elems(x); i++) {
        double u = tensor_get(&hx, i), v = tensor_get(&hy, i);
        diff += (u - v) * (u - v);
        size += v * v;
    }
    dev_fetched(&b->dev, &hx);
    dev_fetched(&b->dev, &hy);
    return sqrt(diff / size);
}

/* Heads of a width that the library takes backward on every GPU. */
enum { BATCH = 2, SEQ = 256, HEADS = 8, GROUPS = 2, WIDTH = 192, WIDTH_V = 128 };

static struct tensor rows(int64_t heads) { return tensor_4d(NULL, DT_BF16, BATCH, SEQ, heads, WIDTH); }
static struct tensor value_rows(int64_t heads) { return tensor_4d(NULL, DT_BF16, BATCH, SEQ, heads, WIDTH_V); }

struct grads {
    struct tensor dq, dk, dv;
};
static struct grads new_grads(struct bed *b)
{
    return (struct grads){there(b, rows(HEADS), 0, 0), there(b, rows(GROUPS), 0, 0),
                          there(b, value_rows(GROUPS), 0, 0)};
}
static void drop_grads(struct bed *b, struct grads *g)
{
    drop(b, &g->dq);
    drop(b, &g->dk);
    drop(b, &g->dv);
}
static bool same_grads(struct bed *b, const struct grads *x, const struct grads *y)
{
    return same(b, &x->dq, &y->dq) && same(b, &x->dk, &y->dk) && same(b, &x->dv, &y->dv);
}

static struct attention_bwd_args into(struct attention_bwd_args a, const struct grads *g, const struct tensor *work)
{
    a.dq = g->dq;
    a.dk = g->dk;
    a.dv = g->dv;
    a.work = *work;
    return a;
}

static void check_pieces(struct bed *b, const struct attention_bwd_args *base)
{
    const struct ops *ops = ops_for(&b->dev);
    struct lane lane = {.dev = &b->dev, .err = &b->e};
    struct grads whole = new_grads(b), cut = new_grads(b), replayed = new_grads(b);
    int64_t full = ops->attention_bwd_work(base);
    struct tensor work = there(b, tensor_1d(NULL, DT_U8, full), 0, 0);
    struct tensor third = tensor_1d(work.data, DT_U8, full / 3), two_thirds = tensor_1d(work.data, DT_U8, full / 3 * 2);
    struct attention_bwd_args a = into(*base, &whole, &work), c = into(*base, &cut, &third),
                              r = into(*base, &replayed, &two_thirds);
    void *graph = NULL;
    must(b, ops->attention_bwd(&lane, &a));
    must(b, ops->attention_bwd(&lane, &c));
    verdict(b, "a backward in pieces, one after the other, gives the bits of the whole", same_grads(b, &whole, &cut));
    c.work = two_thirds;
    must(b, b->dev.vt->fill(&b->dev, cut.dq.data, 0, tensor_bytes(&cut.dq), &b->e));
    must(b, ops->attention_bwd(&lane, &c));
    verdict(b, "a backward in pieces, side by side, gives the bits of the whole", same_grads(b, &whole, &cut));
    must(b, b->dev.vt->capture_begin(&b->dev, &b->e));
    must(b, ops->attention_bwd(&lane, &r));
    must(b, b->dev.vt->capture_end(&b->dev, &graph, &b->e));
    bool untouched = !same(b, &whole.dq, &replayed.dq);
    must(b, b->dev.vt->capture_run(&b->dev, graph, &b->e));
    verdict(b, "a captured backward in pieces gives the same bits", untouched && same_grads(b, &whole, &replayed));
    b->dev.vt->capture_free(&b->dev, graph);
    drop(b, &work);
    drop_grads(b, &whole);
    drop_grads(b, &cut);
    drop_grads(b, &replayed);
}

/* Documents that all begin at 0 change nothing but the choice of kernel. */
static void check_both_ways(struct bed *b, struct attention_fwd_args *f, struct attention_bwd_args *base)
{
    const struct ops *ops = ops_for(&b->dev);
    struct lane lane = {.dev = &b->dev, .err = &b->e};
    struct attention_fwd_args own = *f;
    struct tensor doc = there(b, tensor_2d(NULL, DT_I32, BATCH, SEQ), 0, 0),
                  work = there(b, tensor_1d(NULL, DT_U8, ops->attention_bwd_work(base)), 0, 0);
    own.doc_start = doc;
    own.o = there(b, value_rows(HEADS), 0, 0);
    own.lse = there(b, f->lse, 0, 0);
    must(b, ops->attention_fwd(&lane, &own));
    double o = distance(b, &own.o, &f->o), lse = distance(b, &own.lse, &f->lse);
    printf("own forward against the chosen one: o %.2e, lse %.2e\n", o, lse);
    verdict(b, "forward of both kinds agree", o < 5e-3 && lse < 1e-5);
    struct grads g = new_grads(b), mixed = new_grads(b);
    struct attention_bwd_args x = into(*base, &g, &work), y = into(*base, &mixed, &work);
    must(b, ops->attention_bwd(&lane, &x));
    y.doc_start = doc; /* our backward of the library's forward */
    must(b, ops->attention_bwd(&lane, &y));
    double dq = distance(b, &mixed.dq, &g.dq), dk = distance(b, &mixed.dk, &g.dk), dv = distance(b, &mixed.dv, &g.dv);
    printf("own backward against the chosen one: dq %.2e, dk %.2e, dv %.2e\n", dq, dk, dv);
    verdict(b, "backward of both kinds agree", dq < 1e-2 && dk < 1e-2 && dv < 1e-2);
    drop(b, &doc);
    drop(b, &work);
    drop(b, &own.o);
    drop(b, &own.lse);
    drop_grads(b, &g);
    drop_grads(b, &mixed);
}

/* Blocks wait for each other's sums: on one multiprocessor all are done in order, on many they meet. */
static void check_multiprocessors(struct bed *b, int64_t width, int64_t groups, int64_t window)
{
    const struct ops *ops = ops_for(&b->dev);
    struct cuda_dev *gpu = b->dev.impl;
    struct lane lane = {.dev = &b->dev, .err = &b->e};
    const int64_t heads = 4, seq = 1000;
    struct tensor of_q = tensor_4d(NULL, DT_BF16, 2, seq, heads, width),
                  of_k = tensor_4d(NULL, DT_BF16, 2, seq, groups, width);
    struct attention_fwd_args f = {.q = there(b, of_q, 1, 1),
                                   .k = there(b, of_k, 2, 1),
                                   .v = there(b, of_k, 3, 1),
                                   .o = there(b, of_q, 0, 0),
                                   .lse = there(b, tensor_3d(NULL, DT_F32, 2, heads, seq), 0, 0),
                                   .scale = 0.1,
                                   .window = window};
    f.work = there(b, tensor_1d(NULL, DT_U8, ops->attention_fwd_work(&f)), 0, 0);
    must(b, ops->attention_fwd(&lane, &f));
    struct attention_bwd_args base = {.d_o = there(b, of_q, 4, 1),
                                      .q = f.q,
                                      .k = f.k,
                                      .v = f.v,
                                      .o = f.o,
                                      .lse = f.lse,
                                      .scale = 0.1,
                                      .window = window};
    struct tensor work = there(b, tensor_1d(NULL, DT_U8, ops->attention_bwd_work(&base)), 0, 0);
    static const int counts[] = {0, 1, 7};
    struct grads g[countof(counts)];
    int all = gpu->sm_budget;
    for (int i = 0; i < countof(counts); i++) {
        g[i] = (struct grads){there(b, of_q, 5, 1), there(b, of_k, 6, 1), there(b, of_k, 7, 1)};
        struct attention_bwd_args a = into(base, &g[i], &work);
        must(b, b->dev.vt->fill(&b->dev, work.data, 0xff, tensor_bytes(&work), &b->e));
        gpu->sm_budget = counts[i] > 0 ? counts[i] : all;
        must(b, ops->attention_bwd(&lane, &a));
    }
    gpu->sm_budget = all;
    verdict(b, "the number of multiprocessors changes no bits of a backward",
            same_grads(b, &g[0], &g[1]) && same_grads(b, &g[0], &g[2]));
    struct attention_bwd_args any = into(base, &g[1], &work);
    gpu->want.fast = true;
    must(b, ops->attention_bwd(&lane, &any));
    gpu->want.fast = false;
    verdict(b, "sums in any order (gpu.fast) are the same but for rounding",
            distance(b, &g[1].dq, &g[0].dq) < 5e-3 && distance(b, &g[1].dk, &g[0].dk) < 5e-3 &&
                distance(b, &g[1].dv, &g[0].dv) < 5e-3);
    for (int i = 0; i < countof(counts); i++)
        drop_grads(b, &g[i]);
    struct tensor *rest[] = {&f.q, &f.k, &f.v, &f.o, &f.lse, &f.work, &base.d_o, &work};
    for (int i = 0; i < countof(rest); i++)
        drop(b, rest[i]);
}

static void check_start(struct bed *b, const struct attention_fwd_args *f)
{
    const struct ops *ops = ops_for(&b->dev);
    struct lane lane = {.dev = &b->dev, .err = &b->e};
    static const int64_t values[] = {INT64_MAX, 1, -1, -SEQ, INT64_MIN};
    bool ok = true;
    for (int i = 0; i < countof(values); i++) {
        struct attention_fwd_args a = *f;
        a.start = there(b, tensor_1d(NULL, DT_I64, 1), 0, 0);
        must(b, b->dev.vt->copy_in(&b->dev, a.start.data, &values[i], 8, &b->e));
        ok = ok && ops->attention_fwd(&lane, &a) == ST_OK && b->dev.vt->sync(&b->dev, &b->e) == ST_OK;
        drop(b, &a.start);
    }
    verdict(b, "a start that is out of range harms nothing", ok);
}

int main(void)
{
    struct bed b = {0};
    if (dev_open_gpu(&b.dev, &(struct dev_gpu){0}, 1, &b.e) != ST_OK) {
        printf("not ok no GPU: %s\n0 passed, 1 failed\n", b.e.msg);
        return 1;
    }
    printf("%s\n", b.dev.name);
    verdict(&b, "cuDNN is there", ((struct cuda_dev *)b.dev.impl)->dnn != NULL);
    const struct ops *ops = ops_for(&b.dev);
    struct lane lane = {.dev = &b.dev, .err = &b.e};
    struct attention_fwd_args f = {.q = there(&b, rows(HEADS), 1, 1),
                                   .k = there(&b, rows(GROUPS), 2, 1),
                                   .v = there(&b, value_rows(GROUPS), 3, 1),
                                   .o = there(&b, value_rows(HEADS), 0, 0),
                                   .lse = there(&b, tensor_3d(NULL, DT_F32, BATCH, HEADS, SEQ), 0, 0),
                                   .scale = 0.125};
    f.work = there(&b, tensor_1d(NULL, DT_U8, ops->attention_fwd_work(&f)), 0, 0);
    struct attention_bwd_args g = {.d_o = there(&b, value_rows(HEADS), 4, 1),
                                   .q = f.q,
                                   .k = f.k,
                                   .v = f.v,
                                   .o = f.o,
                                   .lse = f.lse,
                                   .dq = f.q,
                                   .dk = f.k,
                                   .dv = f.v,
                                   .scale = 0.125};
    for (int windowed = 0; windowed < 2; windowed++) {
        f.window = g.window = windowed ? 100 : 0;
        must(&b, ops->attention_fwd(&lane, &f));
        check_pieces(&b, &g);
        check_both_ways(&b, &f, &g);
        check_start(&b, &f);
    }
    check_multiprocessors(&b, 64, 4, 0);
    check_multiprocessors(&b, 128, 1, 0);
    check_multiprocessors(&b, 128, 2, 300);
    struct tensor *all[] = {&f.q, &f.k, &f.v, &f.o, &f.lse, &f.work, &g.d_o};
    for (int i = 0; i < countof(all); i++)
        drop(&b, all[i]);
    dev_close(&b.dev);
    printf("%d passed, %d failed\n", b.passed, b.failed);
    return b.failed != 0;
}
