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
    int st = ops->adamw(&lane, &a);
    dev_close(&dev);
    return st;
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
    dev_close(&dev);
    assert_memory_equal(p[0], p[1], sizeof p[0]);
    assert_memory_equal(m[0], m[1], sizeof m[0]);
    assert_memory_equal(v[0], v[1], sizeof v[0]);
    assert_memory_equal(copy[0], p[0], sizeof p[0]);
    assert_memory_equal(copy[1], p[1], sizeof p[1]);
    for (int k = 0; k < PARTS * N; k++)
        assert_true(p[0][k / N][k % N] != (float)(k + 1));
}

/* ---- moments in bf16 ------------------------------------------------------------------------- */

enum { MANY = 4099 };
struct narrow {
    float p[MANY], g[MANY];
    uint16_t m[MANY], v[MANY];
};

static void narrow_fill(struct narrow *x)
{
    for (int i = 0; i < MANY; i++) {
        x->p[i] = (float)rng_normal(1, (uint64_t)i);
        x->g[i] = (float)rng_normal(2, (uint64_t)i);
        x->m[i] = f32_to_bf16((float)rng_normal(3, (uint64_t)i));
        x->v[i] = f32_to_bf16((float)rng_uniform(4, (uint64_t)i));
    }
}

/* Elements [first, first + n), which are those from `place` on of the parameter. */
static void narrow_update(struct narrow *x, int64_t first, int64_t n, struct adamw_place place, double number)
{
    struct dev dev;
    double hyper[8] = {lr, 0.5, 0.5, number}, scale[4] = {1, 1, 0, 0};
    assert_ok(dev_open(&dev, DEV_CPU, 0, &error), &error);
    struct lane lane = {.dev = &dev, .err = &error};
    struct adamw_args a = {.p = tensor_1d(x->p + first, DT_F32, n),
                           .g = tensor_1d(x->g + first, DT_F32, n),
                           .m = tensor_1d(x->m + first, DT_BF16, n),
                           .v = tensor_1d(x->v + first, DT_BF16, n),
                           .hyper = tensor_1d(hyper, DT_F64, 8),
                           .scale = tensor_1d(scale, DT_F64, 4),
                           .beta1 = beta1,
                           .beta2 = beta2,
                           .eps = 1e-8,
                           .decay = decay,
                           .rate = 1,
                           .bf16 = true,
                           .at = place};
    assert_ok(ops_for(&dev)->adamw(&lane, &a), &error);
    dev_close(&dev);
}

/* The mean over many updates with the same inputs is the moment in fp32, far below the step of bf16; and every draw is
 * one of the two neighbours. */
static void moments_are_rounded_without_bias(void **state)
{
    (void)state;
    enum { DRAWS = 1500, SHOWN = 64 };
    static struct narrow start, x;
    static double sum[SHOWN][2];
    narrow_fill(&start);
    for (int t = 0; t < DRAWS; t++) {
        x = start;
        narrow_update(&x, 0, SHOWN, (struct adamw_place){.key = 9}, t);
        for (int i = 0; i < SHOWN; i++) {
            sum[i][0] += (double)bf16_to_f32(x.m[i]);
            sum[i][1] += (double)bf16_to_f32(x.v[i]);
        }
    }
    double total = 0;
    for (int i = 0; i < SHOWN; i++) {
        double g = (double)start.g[i];
        const double want[2] = {beta1 * (double)bf16_to_f32(start.m[i]) + (1 - beta1) * g,
                                beta2 * (double)bf16_to_f32(start.v[i]) + (1 - beta2) * g * g};
        for (int k = 0; k < 2; k++) {
            double off = (sum[i][k] / DRAWS - want[k]) / (fabs(want[k]) * 0x1p-7);
            assert_true(fabs(off) < 5 * 0.5 / sqrt(DRAWS)); /* five standard deviations of a draw between neighbours */
            total += off;
        }
    }
    assert_true(fabs(total) < 5 * 0.5 / sqrt(DRAWS) * sqrt(2.0 * SHOWN));
}

/* The same bits in one call, in parts of any size, and as columns of rows. */
static void draws_depend_on_the_place_alone(void **state)
{
    (void)state;
    static const int64_t cuts[] = {0, 1, 6, 257, 1030, 1033, MANY};
    static struct narrow whole, parts, columns, other;
    narrow_fill(&whole);
    parts = columns = other = whole;
    narrow_update(&whole, 0, MANY, (struct adamw_place){.key = 5}, 3);
    for (int k = 0; k + 1 < countof(cuts); k++)
        narrow_update(&parts, cuts[k], cuts[k + 1] - cuts[k], (struct adamw_place){.key = 5, .first = cuts[k]}, 3);
    assert_memory_equal(&whole, &parts, sizeof whole);
    /* Rows of 10 elements that a whole of rows of 20 has at columns 0 to 9: the first row is that of the whole. */
    narrow_update(&columns, 0, 7, (struct adamw_place){.key = 5, .row = 10, .step = 20}, 3);
    narrow_update(&columns, 7, MANY - 7, (struct adamw_place){.key = 5, .lead = 7, .row = 10, .step = 20}, 3);
    assert_memory_equal(whole.m, columns.m, 10 * sizeof *whole.m);
    assert_true(memcmp(whole.m + 10, columns.m + 10, 10 * sizeof *whole.m) != 0);
    for (int64_t r = 0; r * 10 < MANY; r++) /* one row at a time */
        narrow_update(&other, r * 10, min_i64(10, MANY - r * 10), (struct adamw_place){.key = 5, .first = r * 20}, 3);
    assert_memory_equal(&columns, &other, sizeof other);
    narrow_fill(&other);
    narrow_update(&other, 0, MANY, (struct adamw_place){.key = 5}, 4);
    assert_memory_equal(whole.p, other.p, sizeof whole.p); /* the update itself is that of fp32 */
    assert_true(memcmp(whole.m, other.m, sizeof whole.m) != 0 && memcmp(whole.v, other.v, sizeof whole.v) != 0);
}

static void extremes_are_rounded_as_they_should(void **state)
{
    (void)state;
    const float largest = 3.4028235e38f, tiny = 1e-45f;
    for (uint32_t draw = 0; draw < 0x10000; draw += 0xFFF) {
        assert_true(isfinite(bf16_to_f32(adamw_round(largest, draw))) &&
                    isfinite(bf16_to_f32(adamw_round(-largest, draw))));
        assert_true(isnan(bf16_to_f32(adamw_round(NAN, draw))) && isinf(bf16_to_f32(adamw_round(-INFINITY, draw))));
        assert_true(bf16_to_f32(adamw_round(0, draw)) == 0 && bf16_to_f32(adamw_round(1.5f, draw)) == 1.5f);
        assert_true(bf16_to_f32(adamw_round(tiny, draw)) < 1e-40f);
    }
    assert_true(adamw_round(1 + 0x1p-8f, 0x7FFF) == 0x3F80 && adamw_round(1 + 0x1p-8f, 0x8000) == 0x3F81);
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
    a.m = a.v = tensor_1d(x, DT_BF16, 4);
    assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "tensor m is BF16");
    a.bf16 = true;
    assert_ok(adamw_check(&a, &error), &error);
    a.v = good.v;
    assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "tensor v");
    a = good;
    a.at.row = -1;
    assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "in rows of -1");
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
        cmocka_unit_test(moments_are_rounded_without_bias),
        cmocka_unit_test(draws_depend_on_the_place_alone),
        cmocka_unit_test(extremes_are_rounded_as_they_should),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
