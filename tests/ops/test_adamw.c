/* adamw: known values over three steps (an independent Python computation in the order
 * "decay, then step" of other programs), skip, edge values. */
#include "support.h"
#include "ops/adamw/adamw.h"

#include "ops/ops.h"

static const double lr = 0.0625, beta1 = 0.875, beta2 = 0.96875, decay = 0.25;

static struct err error;

/* One update on either device; arrays are of its real type. */
static int update(enum dev_kind kind, void *p, void *g, void *m, void *v, int64_t n, double *hyper, double *scale)
{
    struct dev dev;
    assert_ok(dev_open(&dev, kind, 0, &error), &error);
    struct lane lane = {.dev = &dev, .err = &error};
    const struct ops *ops = ops_for(&dev);
    struct adamw_args a = {.p = tensor_1d(p, ops->real, n),
                           .g = tensor_1d(g, ops->real, n),
                           .m = tensor_1d(m, ops->real, n),
                           .v = tensor_1d(v, ops->real, n),
                           .hyper = tensor_1d(hyper, DT_F64, 8),
                           .scale = tensor_1d(scale, DT_F64, 4),
                           .beta1 = beta1,
                           .beta2 = beta2,
                           .eps = 1e-8,
                           .decay = decay,
                           .rate = 1};
    return ops->adamw(&lane, &a);
}

static void three_steps_give_known_values(void **state)
{
    (void)state;
    static const double grads[3][3] = {{0.25, 1e-3, 8}, {-1, 1e-3, 0}, {2, 1e-3, -4}};
    static const double want_p[3][3] = {{0.4296875024999999, -2.03124937500625, -0.062499999921874994},
                                        {0.45845490238162884, -2.0620104785280273, -0.10310264663875847},
                                        {0.4275979620690489, -2.0922909398072767, -0.11132467508245948}};
    static const double want_m[3] = {0.16455078125, 0.00033007812499999997, 0.265625};
    static const double want_v[3] = {0.1571063995361328, 9.0850830078125e-08, 2.376953125};
    double p[3] = {0.5, -2, 0}, m[3] = {0}, v[3] = {0}, scale[4] = {1, 1, 0, 0};
    float p32[3] = {0.5f, -2, 0}, m32[3] = {0}, v32[3] = {0};
    for (int t = 1; t <= 3; t++) {
        double hyper[8] = {lr, 1 - pow(beta1, t), 1 - pow(beta2, t)}, g[3];
        float g32[3];
        for (int i = 0; i < 3; i++)
            g32[i] = (float)(g[i] = grads[t - 1][i]);
        assert_ok(update(DEV_REF, p, g, m, v, 3, hyper, scale), &error);
        assert_ok(update(DEV_CPU, p32, g32, m32, v32, 3, hyper, scale), &error);
        for (int i = 0; i < 3; i++) {
            assert_true(fabs(p[i] - want_p[t - 1][i]) < 1e-14);
            assert_true(fabs((double)p32[i] - want_p[t - 1][i]) < 3e-7);
        }
    }
    for (int i = 0; i < 3; i++) {
        assert_true(fabs(m[i] - want_m[i]) < 1e-15 && fabs(v[i] - want_v[i]) < 1e-15);
        assert_true(fabs((double)m32[i] / want_m[i] - 1) < 1e-6 && fabs((double)v32[i] / want_v[i] - 1) < 1e-6);
    }
}

static void a_skipped_step_writes_nothing(void **state)
{
    (void)state;
    double hyper[8] = {lr, 0, NAN}, scale[4] = {INFINITY, NAN, 1, 0}; /* as after a non-finite norm */
    float p[2] = {1, 2}, g[2] = {NAN, INFINITY}, m[2] = {3, 4}, v[2] = {5, 6};
    assert_ok(update(DEV_CPU, p, g, m, v, 2, hyper, scale), &error);
    assert_true(p[0] == 1 && p[1] == 2 && m[0] == 3 && m[1] == 4 && v[0] == 5 && v[1] == 6);
    double p64[1] = {1}, g64[1] = {NAN}, m64[1] = {3}, v64[1] = {5};
    assert_ok(update(DEV_REF, p64, g64, m64, v64, 1, hyper, scale), &error);
    assert_true(p64[0] == 1 && m64[0] == 3 && v64[0] == 5);
}

static void the_clip_coefficient_scales_the_gradient(void **state)
{
    (void)state;
    double hyper[8] = {lr, 1 - beta1, 1 - beta2}, scale[4] = {8, 0.125, 0, 0}, plain[4] = {0, 1, 0, 0};
    float p[2] = {1, 1}, g[2] = {8, -16}, m[2] = {0}, v[2] = {0};
    float q[2] = {1, 1}, h[2] = {1, -2}, mq[2] = {0}, vq[2] = {0};
    assert_ok(update(DEV_CPU, p, g, m, v, 2, hyper, scale), &error);
    assert_ok(update(DEV_CPU, q, h, mq, vq, 2, hyper, plain), &error);
    assert_memory_equal(p, q, sizeof p);
    assert_memory_equal(m, mq, sizeof m);
    assert_memory_equal(v, vq, sizeof v);
    assert_true(g[0] == 8 && g[1] == -16);
}

/* Gradients over the whole range of fp32: the root inside must follow, from 0 to overflow. */
static void every_magnitude_of_gradient_moves_the_parameter_alike(void **state)
{
    (void)state;
    enum { N = 400 };
    static float p[N], g[N], m[N], v[N];
    static double p64[N], g64[N], m64[N], v64[N];
    double hyper[8] = {lr, 1 - beta1, 1 - beta2}, scale[4] = {0, 1, 0, 0};
    for (int i = 0; i < N; i++) {
        g[i] = i == 0 ? 0.0f : (float)pow(10, -17 + 36.0 * i / N); /* squares: normal in fp32 */
        g64[i] = (double)g[i];
        p[i] = 1;
        p64[i] = 1;
    }
    assert_ok(update(DEV_CPU, p, g, m, v, N, hyper, scale), &error);
    assert_ok(update(DEV_REF, p64, g64, m64, v64, N, hyper, scale), &error);
    for (int i = 0; i < N; i++)
        assert_true(fabs((double)p[i] - p64[i]) < 2e-7);
    float huge[1] = {1e30f}, one[1] = {1}, m1[1] = {0}, v1[1] = {0};
    assert_ok(update(DEV_CPU, one, huge, m1, v1, 1, hyper, scale), &error); /* v overflows */
    assert_true(isinf(v1[0]) && !isnan(one[0]));
    float nan[1] = {NAN};
    assert_ok(update(DEV_CPU, one, nan, m1, v1, 1, hyper, scale), &error);
    assert_true(isnan(one[0]));
}

static void unusable_numbers_are_refused_before_writing(void **state)
{
    (void)state;
    double scale[4] = {0, 1, 0, 0}, bad_scale[4] = {0, NAN, 0, 0};
    double no_step[8] = {lr, 0, 0}, nan_lr[8] = {NAN, 0.1, 0.1}, good[8] = {lr, 0.1, 0.1};
    for (int kind = DEV_REF; kind <= DEV_CPU; kind++) {
        double p[1], g[1] = {0}, m[1], v[1] = {0};
        memset(p, 0x77, sizeof p);
        memset(m, 0x77, sizeof m);
        enum dev_kind k = (enum dev_kind)kind;
        assert_fails(update(k, p, g, m, v, 1, no_step, scale), ST_INVALID, &error, "counts from 1");
        assert_fails(update(k, p, g, m, v, 1, nan_lr, scale), ST_NONFINITE, &error, "learning rate");
        assert_fails(update(k, p, g, m, v, 1, good, bad_scale), ST_NONFINITE, &error, "coefficient");
        assert_int_equal(((unsigned char *)p)[0], 0x77);
        assert_int_equal(((unsigned char *)m)[7], 0x77);
    }
}

/* Parameters of one call, each with its own decay and a copy, end up as after calls of their own. */
static void several_parameters_go_as_one_by_one(void **state)
{
    (void)state;
    enum { N = 7, PARTS = 3 };
    static const double decays[PARTS] = {0.25, 0, 0.5};
    float p[2][PARTS][N], m[2][PARTS][N], v[2][PARTS][N], copy[2][PARTS][N], g[PARTS][N];
    double hyper[8] = {lr, 1 - beta1, 1 - beta2}, scale[4] = {0, 0.5, 0, 0};
    struct dev dev;
    assert_ok(dev_open(&dev, DEV_CPU, 0, &error), &error);
    struct lane lane = {.dev = &dev, .err = &error};
    for (int k = 0; k < PARTS * N; k++) {
        g[k / N][k % N] = (float)rng_normal(5, (uint64_t)k);
        for (int way = 0; way < 2; way++) {
            p[way][k / N][k % N] = (float)(k + 1);
            m[way][k / N][k % N] = v[way][k / N][k % N] = 0.5f;
            copy[way][k / N][k % N] = NAN;
        }
    }
    for (int way = 0; way < 2; way++) {
        struct adamw_part part[PARTS];
        for (int k = 0; k < PARTS; k++)
            part[k] = (struct adamw_part){.p = tensor_1d(p[way][k], DT_F32, N),
                                          .g = tensor_1d(g[k], DT_F32, N),
                                          .m = tensor_1d(m[way][k], DT_F32, N),
                                          .v = tensor_1d(v[way][k], DT_F32, N),
                                          .copy = tensor_1d(copy[way][k], DT_F32, N),
                                          .decay = decays[k],
                                          .rate = 1};
        int calls = way == 0 ? 1 : PARTS;
        for (int k = 0; k < calls; k++) {
            struct adamw_args a = {.p = part[k].p,
                                   .g = part[k].g,
                                   .m = part[k].m,
                                   .v = part[k].v,
                                   .copy = part[k].copy,
                                   .decay = part[k].decay,
                                   .rate = part[k].rate,
                                   .hyper = tensor_1d(hyper, DT_F64, 8),
                                   .scale = tensor_1d(scale, DT_F64, 4),
                                   .beta1 = beta1,
                                   .beta2 = beta2,
                                   .eps = 1e-8,
                                   .more = part + 1,
                                   .n_more = way == 0 ? PARTS - 1 : 0};
            assert_ok(ops_for(&dev)->adamw(&lane, &a), &error);
        }
    }
    assert_memory_equal(p[0], p[1], sizeof p[0]);
    assert_memory_equal(m[0], m[1], sizeof m[0]);
    assert_memory_equal(v[0], v[1], sizeof v[0]);
    assert_memory_equal(copy[0], p[0], sizeof p[0]);
    assert_memory_equal(copy[1], p[1], sizeof p[1]);
    for (int k = 0; k < PARTS * N; k++)
        assert_true(p[0][k / N][k % N] != (float)(k + 1));
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    float x[8] = {0};
    double h[8] = {0};
    struct adamw_args good = {.p = tensor_1d(x, DT_F32, 4),
                              .g = tensor_1d(x, DT_F32, 4),
                              .m = tensor_1d(x, DT_F32, 4),
                              .v = tensor_1d(x, DT_F32, 4),
                              .hyper = tensor_1d(h, DT_F64, 8),
                              .scale = tensor_1d(h, DT_F64, 4),
                              .beta1 = 0.9,
                              .beta2 = 0.99,
                              .eps = 1e-8};
    assert_ok(adamw_check(&good, &error), &error);
    struct adamw_args a = good;
    a.g = tensor_1d(x, DT_F32, 3);
    assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "tensor g is F32 [3]");
    a = good;
    a.v = tensor_1d(h, DT_F64, 4);
    assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "tensor v");
    a = good;
    a.beta2 = 1;
    assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "beta2 is 1");
    a = good;
    a.eps = 0;
    assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "eps");
    a = good;
    a.decay = NAN;
    assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "decay");
    a = good;
    a.copy = tensor_1d(h, DT_F64, 4);
    assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "tensor copy");
    a.copy = tensor_1d(h, DT_BF16, 4);
    assert_ok(adamw_check(&a, &error), &error);
    a = good;
    a.n_more = 1;
    assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "without a list");
    struct adamw_part more = {.p = good.p, .g = good.g, .m = good.m, .v = tensor_1d(x, DT_F32, 3)};
    a.more = &more;
    assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "tensor v is F32 [3]");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(three_steps_give_known_values),
        cmocka_unit_test(a_skipped_step_writes_nothing),
        cmocka_unit_test(the_clip_coefficient_scales_the_gradient),
        cmocka_unit_test(every_magnitude_of_gradient_moves_the_parameter_alike),
        cmocka_unit_test(unusable_numbers_are_refused_before_writing),
        cmocka_unit_test(several_parameters_go_as_one_by_one),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
