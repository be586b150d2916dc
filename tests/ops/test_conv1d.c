/* conv1d beyond the descriptor's samples: known values, pieces against the whole, the start of a
 * text, views into wide rows, and what it refuses. */
#include "support.h"
#include "ops/conv1d/conv1d.h"

#include "ops/ops.h"

struct bench {
    struct dev dev;
    struct lane lane;
    const struct ops *ops;
    struct err e;
    double work[1 << 16];
};

static struct bench *open_bench(enum dev_kind kind)
{
    struct bench *t = calloc(1, sizeof *t);
    assert_non_null(t);
    assert_ok(dev_open(&t->dev, kind, 0, &t->e), &t->e);
    t->lane = (struct lane){.dev = &t->dev, .err = &t->e};
    t->ops = ops_for(&t->dev);
    return t;
}

static void close_bench(struct bench *t)
{
    dev_close(&t->dev);
    free(t);
}

static struct tensor scratch(struct bench *t) { return tensor_1d(t->work, DT_U8, sizeof t->work); }

static void fill(struct tensor *t, uint64_t key)
{
    for (int64_t i = 0; i < tensor_elems(t); i++)
        tensor_set(t, i, (double)(float)rng_normal(key, (uint64_t)i));
}

static const enum dev_kind kinds[] = {DEV_REF, DEV_CPU};

static void taps_reach_back_from_the_present_row(void **state)
{
    (void)state;
    for (int k = 0; k < countof(kinds); k++) {
        struct bench *t = open_bench(kinds[k]);
        double x[5], y[5], w[3], bias[1];
        const double in[] = {1, 10, 100, 1000, 10000}, want[] = {3.5, 32.5, 321.5, 3210.5, 32100.5};
        struct conv1d_fwd_args a = {.x = tensor_3d(x, t->ops->real, 1, 5, 1),
                                    .w = tensor_2d(w, t->ops->real, 1, 3),
                                    .bias = tensor_1d(bias, t->ops->real, 1),
                                    .y = tensor_3d(y, t->ops->real, 1, 5, 1),
                                    .work = scratch(t)};
        for (int i = 0; i < 5; i++)
            tensor_set(&a.x, i, in[i]);
        for (int i = 0; i < 3; i++)
            tensor_set(&a.w, i, i + 1);
        tensor_set(&a.bias, 0, 0.5);
        assert_ok(t->ops->conv1d_fwd(&t->lane, &a), &t->e);
        for (int i = 0; i < 5; i++)
            assert_true(tensor_get(&a.y, i) == want[i]);
        close_bench(t);
    }
}

/* Rows in pieces of 1, 2 and 5, the tail handed on in place, are bit for bit the whole. */
static void pieces_with_a_tail_equal_the_whole(void **state)
{
    (void)state;
    enum { B = 2, S = 8, C = 21, W = 4 };
    const int64_t pieces[] = {1, 2, 5};
    for (int k = 0; k < countof(kinds); k++) {
        struct bench *t = open_bench(kinds[k]);
        enum dtype real = t->ops->real;
        double x[B * S * C], y[B * S * C], part[B * S * C], w[C * W], bias[C], tail[B * (W - 1) * C];
        struct conv1d_fwd_args a = {.x = tensor_3d(x, real, B, S, C),
                                    .w = tensor_2d(w, real, C, W),
                                    .bias = tensor_1d(bias, real, C),
                                    .y = tensor_3d(y, real, B, S, C),
                                    .work = scratch(t),
                                    .silu = true};
        fill(&a.x, 1);
        fill(&a.w, 2);
        fill(&a.bias, 3);
        assert_ok(t->ops->conv1d_fwd(&t->lane, &a), &t->e);
        memset(tail, 0xFF, sizeof tail); /* must not matter: the text starts at 0 */
        struct conv1d_fwd_args p = a;
        p.init = p.final = tensor_3d(tail, real, B, W - 1, C);
        int64_t start = 0;
        p.start = tensor_1d(&start, DT_I64, 1);
        for (int i = 0; i < countof(pieces); i++) {
            p.x = tensor_3d((char *)x + start * C * (int64_t)dtype_bytes(real), real, B, pieces[i], C);
            p.y = tensor_3d((char *)part + start * C * (int64_t)dtype_bytes(real), real, B, pieces[i], C);
            p.x.stride[0] = p.y.stride[0] = S * C;
            assert_ok(t->ops->conv1d_fwd(&t->lane, &p), &t->e);
            start += pieces[i];
        }
        assert_memory_equal(y, part, B * S * C * dtype_bytes(real));
        for (int64_t i = 0; i < (W - 1) * C; i++)
            assert_true(tensor_get(&p.final, i) == tensor_get(&a.x, (S - W + 1) * C + i));
        close_bench(t);
    }
}

/* Documents in one row are what they would be in rows of their own. */
static void documents_do_not_see_each_other(void **state)
{
    (void)state;
    enum { S = 11, C = 6, W = 4, CUT = 5 };
    for (int k = 0; k < countof(kinds); k++) {
        struct bench *t = open_bench(kinds[k]);
        enum dtype real = t->ops->real;
        double x[S * C], y[S * C], own[S * C], w[C * W];
        int32_t doc[S];
        for (int i = 0; i < S; i++)
            doc[i] = i < CUT ? 0 : CUT;
        struct conv1d_fwd_args a = {.x = tensor_3d(x, real, 1, S, C),
                                    .w = tensor_2d(w, real, C, W),
                                    .y = tensor_3d(y, real, 1, S, C),
                                    .doc_start = tensor_2d(doc, DT_I32, 1, S),
                                    .work = scratch(t),
                                    .silu = true};
        fill(&a.x, 1);
        fill(&a.w, 2);
        assert_ok(t->ops->conv1d_fwd(&t->lane, &a), &t->e);
        a.doc_start = (struct tensor){0};
        a.x = tensor_3d((char *)x + CUT * C * dtype_bytes(real), real, 1, S - CUT, C);
        a.y = tensor_3d((char *)own + CUT * C * dtype_bytes(real), real, 1, S - CUT, C);
        assert_ok(t->ops->conv1d_fwd(&t->lane, &a), &t->e);
        a.x = tensor_3d(x, real, 1, CUT, C);
        a.y = tensor_3d(own, real, 1, CUT, C);
        assert_ok(t->ops->conv1d_fwd(&t->lane, &a), &t->e);
        assert_memory_equal(y, own, S * C * dtype_bytes(real));
        close_bench(t);
    }
}

static void bad_shapes_are_named(void **state)
{
    (void)state;
    struct bench *t = open_bench(DEV_CPU);
    float x[64] = {0}, w[64] = {0};
    struct conv1d_fwd_args a = {.x = tensor_3d(x, DT_F32, 1, 4, 3),
                                .w = tensor_2d(w, DT_F32, 3, 17),
                                .y = tensor_3d(x, DT_F32, 1, 4, 3),
                                .work = scratch(t)};
    assert_fails(t->ops->conv1d_fwd(&t->lane, &a), ST_INVALID, &t->e, "17 taps");
    a.w = tensor_2d(w, DT_F32, 4, 4);
    assert_fails(t->ops->conv1d_fwd(&t->lane, &a), ST_INVALID, &t->e, "w");
    a.w = tensor_2d(w, DT_F32, 3, 4);
    a.init = tensor_3d(w, DT_F32, 1, 4, 3);
    assert_fails(t->ops->conv1d_fwd(&t->lane, &a), ST_INVALID, &t->e, "init");
    a.init = (struct tensor){0};
    a.work = tensor_1d(t->work, DT_U8, 4);
    assert_fails(t->ops->conv1d_fwd(&t->lane, &a), ST_INVALID, &t->e, "work");
    close_bench(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(taps_reach_back_from_the_present_row),
        cmocka_unit_test(pieces_with_a_tail_equal_the_whole),
        cmocka_unit_test(documents_do_not_see_each_other),
        cmocka_unit_test(bad_shapes_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
