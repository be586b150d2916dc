/* embed: order of sums, bad tokens, views. test_ops checks gradients and cpu against ref. */
#include "support.h"
#include "ops/embed/embed.h"

#include "ops/ops.h"

struct fixture {
    struct err e;
    struct dev dev;
    struct lane lane;
    const struct ops *ops;
};

static struct fixture open_on(enum dev_kind kind)
{
    struct fixture f = {0};
    assert_ok(dev_open(&f.dev, kind, 0, &f.e), &f.e);
    f.lane.dev = &f.dev;
    f.ops = ops_for(&f.dev);
    return f;
}

static void rows_are_copied_in_token_order(void **state)
{
    (void)state;
    struct fixture f = open_on(DEV_CPU);
    f.lane.err = &f.e;
    int32_t token[] = {2, 0, 2, 1};
    float w[] = {1, 2, 3, 4, 5, 6}, y[4 * 5];
    for (int i = 0; i < countof(y); i++)
        y[i] = -1;
    struct embed_fwd_args a = {
        .token = tensor_1d(token, DT_I32, 4), .w = tensor_2d(w, DT_F32, 3, 2), .y = tensor_2d(y, DT_F32, 4, 5)};
    a.y = tensor_cols(&a.y, 1, 2);
    assert_ok(f.ops->embed_fwd(&f.lane, &a), &f.e);
    static const float want[] = {-1, 5, 6, -1, -1, -1, 1, 2, -1, -1, -1, 5, 6, -1, -1, -1, 3, 4, -1, -1};
    assert_memory_equal(y, want, sizeof want);
    dev_close(&f.dev);
}

/* 1e8 + 1 - 1e8 is 0 in fp32 in this order and 1 in others. Wide enough for
 * the threads to share. */
static void summands_of_a_token_add_in_order(void **state)
{
    (void)state;
    enum { D = 8000, ROWS = 4, VOCAB = 2 };
    static float dy[ROWS * D], dw[VOCAB * D];
    int32_t token[ROWS] = {1, 1, 0, 1};
    static const float value[ROWS] = {1e8f, 1, 5, -1e8f};
    for (int threads = 1; threads <= 3; threads++) {
        struct fixture f = {0};
        assert_ok(dev_open(&f.dev, DEV_CPU, threads, &f.e), &f.e);
        f.lane = (struct lane){.dev = &f.dev, .err = &f.e};
        for (int i = 0; i < ROWS * D; i++)
            dy[i] = value[i / D];
        for (int i = 0; i < VOCAB * D; i++)
            dw[i] = NAN;
        struct embed_bwd_args a = {.token = tensor_1d(token, DT_I32, ROWS),
                                   .dy = tensor_2d(dy, DT_F32, ROWS, D),
                                   .dw = tensor_2d(dw, DT_F32, VOCAB, D)};
        for (int round = 0; round < 2; round++) {
            a.acc_dw = round == 1;
            assert_ok(ops_for(&f.dev)->embed_bwd(&f.lane, &a), &f.e);
            for (int c = 0; c < D; c++) {
                assert_true(dw[c] == (round == 0 ? 5.0f : 10.0f));
                assert_true(dw[D + c] == 0.0f);
            }
        }
        dev_close(&f.dev);
    }
}

static void strided_gradients_are_read_by_row(void **state)
{
    (void)state;
    struct fixture f = open_on(DEV_CPU);
    f.lane.err = &f.e;
    int32_t token[] = {1, 1};
    float dy[] = {1, 2, 100, 3, 4, 100}, dw[4] = {9, 9, 9, 9};
    struct embed_bwd_args a = {
        .token = tensor_1d(token, DT_I32, 2), .dy = tensor_2d(dy, DT_F32, 2, 3), .dw = tensor_2d(dw, DT_F32, 2, 2)};
    a.dy = tensor_cols(&a.dy, 0, 2);
    assert_ok(f.ops->embed_bwd(&f.lane, &a), &f.e);
    assert_true(dw[0] == 0 && dw[1] == 0 && dw[2] == 4 && dw[3] == 6);
    dev_close(&f.dev);
}

static void a_bad_token_is_named_and_nothing_is_written(void **state)
{
    (void)state;
    static const int32_t bad[] = {-1, 3, INT32_MAX, INT32_MIN};
    for (int k = 0; k < countof(bad); k++) {
        for (int kind = DEV_REF; kind <= DEV_CPU; kind++) {
            struct fixture f = open_on((enum dev_kind)kind);
            f.lane.err = &f.e;
            int32_t token[] = {0, bad[k]};
            double w[6] = {0}, y[4], dw[6];
            memset(y, 0x77, sizeof y);
            memset(dw, 0x77, sizeof dw);
            struct embed_fwd_args a = {.token = tensor_1d(token, DT_I32, 2),
                                       .w = tensor_2d(w, f.ops->real, 3, 2),
                                       .y = tensor_2d(y, f.ops->real, 2, 2)};
            assert_fails(f.ops->embed_fwd(&f.lane, &a), ST_INVALID, &f.e, "token[1]");
            struct embed_bwd_args b = {.token = a.token, .dy = a.y, .dw = tensor_2d(dw, f.ops->real, 3, 2)};
            assert_fails(f.ops->embed_bwd(&f.lane, &b), ST_INVALID, &f.e, "vocabulary of 3");
            for (size_t i = 0; i < sizeof y; i++)
                assert_int_equal(((unsigned char *)y)[i], 0x77);
            for (size_t i = 0; i < sizeof dw; i++)
                assert_int_equal(((unsigned char *)dw)[i], 0x77);
            dev_close(&f.dev);
        }
    }
}

static void wrong_shapes_are_refused(void **state)
{
    (void)state;
    struct fixture f = open_on(DEV_CPU);
    f.lane.err = &f.e;
    int32_t token[] = {0, 0};
    float w[12] = {0}, y[12] = {0};
    struct embed_fwd_args good = {
        .token = tensor_1d(token, DT_I32, 2), .w = tensor_2d(w, DT_F32, 3, 2), .y = tensor_2d(y, DT_F32, 2, 2)};
    struct embed_fwd_args a = good;
    a.token.dtype = DT_I64;
    assert_fails(f.ops->embed_fwd(&f.lane, &a), ST_INVALID, &f.e, "token");
    a = good;
    a.w = tensor_2d(w, DT_F32, 3, 4);
    a.w = tensor_cols(&a.w, 0, 2);
    assert_fails(f.ops->embed_fwd(&f.lane, &a), ST_INVALID, &f.e, "w must be contiguous");
    a = good;
    a.y = tensor_2d(y, DT_F32, 3, 2);
    assert_fails(f.ops->embed_fwd(&f.lane, &a), ST_INVALID, &f.e, "y is F32 [3, 2], expected F32 [2, 2]");
    struct embed_bwd_args b = {.token = good.token, .dy = good.y, .dw = tensor_2d(w, DT_F32, 3, 3)};
    assert_fails(f.ops->embed_bwd(&f.lane, &b), ST_INVALID, &f.e, "dw");
    dev_close(&f.dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_copied_in_token_order),
        cmocka_unit_test(summands_of_a_token_add_in_order),
        cmocka_unit_test(strided_gradients_are_read_by_row),
        cmocka_unit_test(a_bad_token_is_named_and_nothing_is_written),
        cmocka_unit_test(wrong_shapes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
