/* ring: attention over the blocks of a sequence, one after the other, is attention over the sequence, with a window,
 * documents, a sink and dropped weights; so are its gradients. Generic checks are in test_ops.c. */
#include "bench.h"
#include "ops/attention/attention.h"
#include "ops/ring/ring.h"

#include "ops/check.h"

enum { B = 2, PART = 12, BLOCKS = 3, KEYS = BLOCKS * PART, H = 4, G = 2, D = 8 };

static struct tensor fresh(enum dtype type, int rank, const int64_t *dim, uint64_t key)
{
    struct tensor t = tensor_shape(type, rank, dim);
    t.data = malloc((size_t)tensor_bytes(&t) + 1);
    assert_non_null(t.data);
    for (int64_t i = 0; i < tensor_elems(&t); i++)
        tensor_set(&t, i, type == DT_F64 || type == DT_F32 ? (double)(float)rng_normal(key, (uint64_t)i) : 0);
    return t;
}
#define FRESH(type, rank, key, ...) fresh(type, rank, (const int64_t[]){__VA_ARGS__}, key)

/* Keys of block i before the queries' own. */
static struct tensor block(const struct tensor *t, int i)
{
    struct tensor part = *t;
    part.dim[1] = PART;
    part.data = (char *)t->data + (BLOCKS - 1 - i) * PART * t->stride[1] * (int64_t)dtype_bytes(t->dtype);
    return part;
}

struct case_ {
    struct tensor q, k, v, d_o, sink, doc, info;                /* given */
    struct tensor o, lse, dq, dk, dv, dsink;                    /* of all keys */
    struct tensor part, part_lse, sum, total, y, dq_part, dsum; /* block by block */
    struct tensor dk2, dv2, dsink2;
};

static void fill_case(struct case_ *c, enum dtype t)
{
    struct tensor *q_like[] = {&c->q, &c->d_o, &c->o, &c->dq, &c->part, &c->sum, &c->y, NULL, &c->dq_part, &c->dsum};
    struct tensor *k_like[] = {&c->k, &c->v, &c->dk, &c->dv, &c->dk2, &c->dv2};
    struct tensor *rows[] = {&c->lse, &c->part_lse, &c->total};
    struct tensor *heads[] = {&c->sink, &c->dsink, &c->dsink2};
    for (int i = 0; i < countof(q_like); i++)
        if (q_like[i] != NULL)
            *q_like[i] = FRESH(t, 4, 10 + (uint64_t)i, B, PART, H, D);
    for (int i = 0; i < countof(k_like); i++)
        *k_like[i] = FRESH(t, 4, 30 + (uint64_t)i, B, KEYS, G, D);
    for (int i = 0; i < countof(rows); i++)
        *rows[i] = FRESH(t, 3, 40 + (uint64_t)i, B, H, PART);
    for (int i = 0; i < countof(heads); i++)
        *heads[i] = FRESH(t, 1, 50 + (uint64_t)i, H);
    c->doc = FRESH(DT_I32, 2, 0, B, PART);
    c->info = FRESH(DT_I64, 1, 0, 4);
    for (int i = 0; i < PART; i++) { /* the first sequence: documents begin in each of the blocks, and at the start */
        int32_t *doc = c->doc.data;
        doc[i] = i < 3 ? 0 : i < 6 ? 5 : i < 9 ? 17 : KEYS - PART + 8;
        doc[PART + i] = 0;
    }
    ((int64_t *)c->info.data)[2] = KEYS - PART;
}

static void free_case(struct case_ *c)
{
    for (size_t i = 0; i < sizeof *c / sizeof(struct tensor); i++)
        free(((struct tensor *)c)[i].data);
}

/* Forward over keys [i] (-1: all of them), backward with the o and lse of all. */
static void attend(struct bed *b, const struct case_ *c, int64_t window, int i)
{
    struct dev *dev = &b->dev[c->q.dtype == DT_F32];
    struct lane l = {.dev = dev, .err = &b->e};
    const struct ops *ops = ops_for(dev);
    bool all = i < 0, own = i <= 0;
    struct dropout_rule drop = {.p = 0.25, .key = 7, .info = c->info};
    struct attention_fwd_args f = {.q = c->q,
                                   .k = all ? c->k : block(&c->k, i),
                                   .v = all ? c->v : block(&c->v, i),
                                   .o = all ? c->o : c->part,
                                   .lse = all ? c->lse : c->part_lse,
                                   .doc_start = c->doc,
                                   .sink = own ? c->sink : (struct tensor){0},
                                   .scale = 0.3,
                                   .window = window,
                                   .before = all ? 0 : (BLOCKS - 1 - i) * PART,
                                   .after = all ? 0 : i * PART,
                                   .drop = drop};
    f.work = FRESH(DT_U8, 1, 0, ops->attention_fwd_work != NULL ? ops->attention_fwd_work(&f) : 0);
    assert_ok(ops->attention_fwd(&l, &f), &b->e);
    struct attention_bwd_args g = {.d_o = c->d_o,
                                   .q = c->q,
                                   .k = f.k,
                                   .v = f.v,
                                   .o = c->o,
                                   .lse = c->lse,
                                   .doc_start = c->doc,
                                   .sink = f.sink,
                                   .dq = all ? c->dq : c->dq_part,
                                   .dk = all ? c->dk : block(&c->dk2, i),
                                   .dv = all ? c->dv : block(&c->dv2, i),
                                   .dsink = all   ? c->dsink
                                            : own ? c->dsink2
                                                  : (struct tensor){0},
                                   .scale = 0.3,
                                   .window = window,
                                   .before = f.before,
                                   .after = f.after,
                                   .drop = drop};
    g.work = FRESH(DT_U8, 1, 0, ops->attention_bwd_work != NULL ? ops->attention_bwd_work(&g) : 0);
    assert_ok(ops->attention_bwd(&l, &g), &b->e);
    free(f.work.data);
    free(g.work.data);
}

static void join(struct bed *b, const struct case_ *c, int i)
{
    struct dev *dev = &b->dev[c->q.dtype == DT_F32];
    struct lane l = {.dev = dev, .err = &b->e};
    struct tensor x = tensor_2d(c->dq_part.data, c->q.dtype, B * PART, H * D), y = x;
    y.data = c->dsum.data;
    struct ring_merge_args m = {.o = c->part, .lse = c->part_lse, .sum = c->sum, .total = c->total, .y = c->y};
    m.acc_sum = m.acc_total = i > 0;
    assert_ok(ops_for(dev)->ring_merge(&l, &m), &b->e);
    assert_ok(ops_for(dev)->ring_add(&l, &(struct ring_add_args){.x = x, .y = y, .acc_y = i > 0}), &b->e);
}

static void assert_near(const char *what, const struct tensor *got, const struct tensor *want)
{
    double tolerance = got->dtype == DT_F64 ? 1e-13 : 2e-5;
    for (int64_t i = 0; i < tensor_elems(got); i++) {
        double g = tensor_get(got, i), w = tensor_get(want, i);
        if (g != w && !(fabs(g - w) <= tolerance * (1 + fabs(w))))
            fail_msg("%s: element %lld is %.9g, expected %.9g", what, (long long)i, g, w);
    }
}

static void blocks_of_keys_are_the_whole(void **state)
{
    static const enum dtype types[] = {DT_F64, DT_F32};
    struct bed b;
    (void)state;
    open_bed(&b);
    for (int t = 0; t < countof(types); t++)
        for (int64_t window = 0; window <= 20; window += 20) {
            struct case_ c = {0};
            fill_case(&c, types[t]);
            attend(&b, &c, window, -1);
            for (int i = 0; i < BLOCKS; i++) {
                attend(&b, &c, window, i);
                join(&b, &c, i);
            }
            assert_near("o", &c.y, &c.o);
            assert_near("lse", &c.total, &c.lse);
            assert_near("dq", &c.dsum, &c.dq);
            assert_near("dk", &c.dk2, &c.dk);
            assert_near("dv", &c.dv2, &c.dv);
            assert_near("dsink", &c.dsink2, &c.dsink);
            free_case(&c);
        }
    close_bed(&b);
}

/* A row that sees nothing of any block stays as attention leaves it, and what is not a number comes through. */
static void nothing_weighs_nothing(void **state)
{
    struct bed b;
    (void)state;
    open_bed(&b);
    struct lane l = {.dev = &b.dev[1], .err = &b.e};
    float o[3] = {5, 7, 9}, lse[3] = {-INFINITY, 1, NAN}, sum[3] = {1, 2, 3}, total[3] = {-INFINITY, -INFINITY, 0};
    struct ring_merge_args m = {.o = tensor_4d(o, DT_F32, 1, 3, 1, 1),
                                .lse = tensor_3d(lse, DT_F32, 1, 1, 3),
                                .sum = tensor_4d(sum, DT_F32, 1, 3, 1, 1),
                                .total = tensor_3d(total, DT_F32, 1, 1, 3),
                                .acc_sum = true,
                                .acc_total = true};
    assert_ok(ops_for(l.dev)->ring_merge(&l, &m), &b.e);
    assert_true(sum[0] == 0 && isinf(total[0]) && total[0] < 0);
    assert_true(sum[1] == 7 && total[1] == 1);
    assert_true(isnan(sum[2]) && isnan(total[2]));
    m.acc_sum = false;
    assert_int_equal(ops_for(l.dev)->ring_merge(&l, &m), ST_INVALID);
    err_clear(&b.e);
    close_bed(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_of_keys_are_the_whole),
        cmocka_unit_test(nothing_weighs_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
