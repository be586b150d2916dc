/* sqnorm and clip: precision, order, non-finite values, the clip rule. */
#include "support.h"
#include "ops/gradnorm/gradnorm.h"

#include "ops/ops.h"

static struct err error;

static double sqnorm_on(enum dev_kind kind, int threads, void *x, int64_t n)
{
    struct dev dev;
    assert_ok(dev_open(&dev, kind, threads, &error), &error);
    struct lane lane = {.dev = &dev, .err = &error};
    const struct ops *ops = ops_for(&dev);
    double out = -1;
    struct sqnorm_args a = {.x = tensor_1d(x, ops->real, n), .out = tensor_1d(&out, DT_F64, 1)};
    int64_t need = ops->sqnorm_work ? ops->sqnorm_work(&a) : 0;
    void *work = malloc((size_t)need + 1);
    assert_non_null(work);
    memset(work, 0xFF, (size_t)need + 1);
    a.work = tensor_1d(work, DT_U8, need);
    assert_ok(ops->sqnorm(&lane, &a), &error);
    free(work);
    dev_close(&dev);
    return out;
}

static void squares_are_summed_in_double(void **state)
{
    (void)state;
    float small[3] = {3, 4, 12};
    assert_true(sqnorm_on(DEV_CPU, 0, small, 3) == 169);
    double small64[3] = {3, 4, 12};
    assert_true(sqnorm_on(DEV_REF, 0, small64, 3) == 169);
    float wide[2] = {1e30f, 1e-3f}; /* its square is no fp32 number */
    assert_true(fabs(sqnorm_on(DEV_CPU, 0, wide, 2) / 1e60 - 1) < 1e-6);
    enum { N = 1000000 };
    float *x = malloc(N * sizeof *x);
    assert_non_null(x);
    for (int i = 0; i < N; i++)
        x[i] = i == 0 ? 4096.0f : 0.5f;
    assert_true(sqnorm_on(DEV_CPU, 0, x, N) == 16777216.0 + 0.25 * (N - 1)); /* exact in double */
    free(x);
}

static void threads_do_not_change_the_sum(void **state)
{
    (void)state;
    enum { N = 300001 };
    float *x = malloc(N * sizeof *x);
    assert_non_null(x);
    for (int i = 0; i < N; i++)
        x[i] = (float)rng_normal(3, (uint64_t)i);
    double one = sqnorm_on(DEV_CPU, 1, x, N);
    for (int threads = 2; threads <= 5; threads++)
        assert_true(sqnorm_on(DEV_CPU, threads, x, N) == one);
    free(x);
}

static void several_tensors_of_a_call_keep_their_sums_apart(void **state)
{
    (void)state;
    float x[3][3] = {{3, 4, 0}, {1, 2, 2}, {12, 5, 0}};
    double out[3] = {-1, -1, -1}, work[3];
    struct dev dev;
    assert_ok(dev_open(&dev, DEV_CPU, 0, &error), &error);
    struct lane lane = {.dev = &dev, .err = &error};
    const struct tensor more[] = {tensor_1d(x[1], DT_F32, 3), tensor_1d(x[2], DT_F32, 2)};
    struct sqnorm_args a = {.x = tensor_1d(x[0], DT_F32, 3),
                            .out = tensor_1d(out, DT_F64, 3),
                            .work = tensor_1d(work, DT_U8, sizeof work),
                            .more = more,
                            .n_more = 2};
    assert_ok(ops_for(&dev)->sqnorm(&lane, &a), &error);
    assert_true(out[0] == 25 && out[1] == 9 && out[2] == 169);
    a.out = tensor_1d(out, DT_F64, 2);
    assert_fails(ops_for(&dev)->sqnorm(&lane, &a), ST_INVALID, &error, "out is F64 [2]");
    dev_close(&dev);
}

static void non_finite_input_gives_a_non_finite_sum(void **state)
{
    (void)state;
    enum { N = 2 * SQNORM_BLOCK + 5 };
    static float x[N];
    static const int at[] = {0, SQNORM_BLOCK - 1, SQNORM_BLOCK, N - 1};
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int k = 0; k < countof(at) * countof(bad); k++) {
        for (int i = 0; i < N; i++)
            x[i] = 1;
        x[at[k / countof(bad)]] = bad[k % countof(bad)];
        assert_true(!isfinite(sqnorm_on(DEV_CPU, 0, x, N)));
    }
}

static void clip_on(enum dev_kind kind, double *sums, int64_t k, double *loss, double max_norm, double out[4])
{
    struct dev dev;
    assert_ok(dev_open(&dev, kind, 0, &error), &error);
    struct lane lane = {.dev = &dev, .err = &error};
    struct clip_args a = {.sums = tensor_1d(sums, DT_F64, k), .out = tensor_1d(out, DT_F64, 4), .max_norm = max_norm};
    if (loss != NULL)
        a.loss = tensor_1d(loss, DT_F64, 2);
    double total = 0;
    for (int64_t i = 0; i < k; i++)
        total += sums[i];
    out[3] = -1;
    assert_ok(ops_for(&dev)->clip(&lane, &a), &error);
    dev_close(&dev);
    assert_true(out[2] == 0 ? out[3] == total : isnan(out[3]));
}

static void clip_follows_the_rule_on_both_devices(void **state)
{
    (void)state;
    double sums[] = {9, 16}, loss[] = {2.5, 10}, out[4];
    for (int kind = DEV_REF; kind <= DEV_CPU; kind++) {
        enum dev_kind k = (enum dev_kind)kind;
        clip_on(k, sums, 2, loss, 1, out);
        assert_true(out[0] == 5 && out[1] == 1 / (5 + 1e-6) && out[2] == 0);
        clip_on(k, sums, 2, NULL, 10, out); /* below the limit */
        assert_true(out[0] == 5 && out[1] == 1 && out[2] == 0);
        clip_on(k, sums, 2, loss, 0, out); /* off */
        assert_true(out[0] == 5 && out[1] == 1 && out[2] == 0);
        clip_on(k, sums, 0, loss, 1, out); /* no parameters */
        assert_true(out[0] == 0 && out[1] == 1 && out[2] == 0);
    }
}

/* The fourth number of several clips, as ranks gather them, is what a further one takes. */
static void clip_reads_every_fourth_number(void **state)
{
    (void)state;
    double gathered[] = {100, 1, 0, 9, 100, 1, 0, 16}, out[4];
    for (int kind = DEV_REF; kind <= DEV_CPU; kind++) {
        struct dev dev;
        assert_ok(dev_open(&dev, (enum dev_kind)kind, 1, &error), &error);
        struct lane lane = {.dev = &dev, .err = &error};
        struct clip_args a = {
            .sums = tensor_1d(gathered + 3, DT_F64, 2), .out = tensor_1d(out, DT_F64, 4), .max_norm = 1};
        a.sums.stride[0] = 4;
        assert_ok(ops_for(&dev)->clip(&lane, &a), &error);
        assert_true(out[0] == 5 && out[2] == 0 && out[3] == 25);
        dev_close(&dev);
    }
}

static void a_non_finite_norm_or_loss_skips(void **state)
{
    (void)state;
    double out[4];
    static const double bad[] = {NAN, INFINITY, -1}; /* a negative sum has no root */
    for (int kind = DEV_REF; kind <= DEV_CPU; kind++) {
        enum dev_kind k = (enum dev_kind)kind;
        for (int i = 0; i < countof(bad); i++) {
            double sums[] = {0.25, bad[i]}, good[] = {4}, loss[] = {bad[i], 3}, fine[] = {1, 3};
            clip_on(k, sums, 2, fine, 1, out);
            assert_true(out[2] == 1);
            clip_on(k, good, 1, loss, 1, out);
            assert_true(out[0] == 2 && out[2] == (isfinite(bad[i]) ? 0 : 1));
        }
    }
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    struct dev dev;
    assert_ok(dev_open(&dev, DEV_CPU, 0, &error), &error);
    struct lane lane = {.dev = &dev, .err = &error};
    float x[SQNORM_BLOCK + 1] = {0};
    double out[4], work[1];
    struct sqnorm_args s = {.x = tensor_1d(x, DT_F32, SQNORM_BLOCK + 1),
                            .out = tensor_1d(out, DT_F64, 1),
                            .work = tensor_1d(work, DT_U8, sizeof work)};
    assert_fails(ops_for(&dev)->sqnorm(&lane, &s), ST_INVALID, &error, "work has 8 bytes, 16 needed");
    s.out.dtype = DT_F32;
    assert_fails(ops_for(&dev)->sqnorm(&lane, &s), ST_INVALID, &error, "out");
    struct clip_args c = {.sums = tensor_1d(work, DT_F64, 1), .out = tensor_1d(out, DT_F64, 4), .max_norm = -1};
    assert_fails(ops_for(&dev)->clip(&lane, &c), ST_INVALID, &error, "max_norm is -1");
    c.max_norm = NAN;
    assert_fails(ops_for(&dev)->clip(&lane, &c), ST_INVALID, &error, "max_norm");
    c.out = tensor_1d(out, DT_F64, 3);
    assert_fails(ops_for(&dev)->clip(&lane, &c), ST_INVALID, &error, "out is F64 [3]");
    dev_close(&dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(squares_are_summed_in_double),
        cmocka_unit_test(threads_do_not_change_the_sum),
        cmocka_unit_test(several_tensors_of_a_call_keep_their_sums_apart),
        cmocka_unit_test(non_finite_input_gives_a_non_finite_sum),
        cmocka_unit_test(clip_follows_the_rule_on_both_devices),
        cmocka_unit_test(a_non_finite_norm_or_loss_skips),
        cmocka_unit_test(clip_reads_every_fourth_number),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
