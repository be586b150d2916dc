/* gatednorm beyond the descriptor's samples: known values, both orders, in place, and what it
 * refuses. */
#include "bench.h"
#include "ops/gatednorm/gatednorm.h"

static const enum dev_kind kinds[] = {DEV_REF, DEV_CPU};

static double silu(double z) { return z / (1 + exp(-z)); }

static void the_order_of_gate_and_norm_is_what_is_asked(void **state)
{
    (void)state;
    const double x[4] = {1, -2, 3, 0.5}, z[4] = {0.5, 2, -1, 1}, w[2] = {2, 0.25};
    for (int k = 0; k < countof(kinds); k++) {
        for (int norm_first = 0; norm_first < 2; norm_first++) {
            struct bench t;
            open_bench(&t, kinds[k]);
            double xs[4], zs[4], ws[2], ys[4], rstd[2];
            struct gatednorm_fwd_args a = {.x = tensor_2d(xs, t.ops->real, 1, 4),
                                           .z = tensor_2d(zs, t.ops->real, 1, 4),
                                           .w = tensor_1d(ws, t.ops->real, 2),
                                           .y = tensor_2d(ys, t.ops->real, 1, 4),
                                           .rstd = tensor_2d(rstd, t.ops->real, 1, 2),
                                           .eps = 1e-5,
                                           .group = 2,
                                           .norm_first = norm_first != 0};
            for (int i = 0; i < 4; i++) {
                tensor_set(&a.x, i, x[i]);
                tensor_set(&a.z, i, z[i]);
                tensor_set(&a.w, i % 2, w[i % 2]);
            }
            assert_ok(t.ops->gatednorm_fwd(&t.lane, &a), &t.e);
            for (int i = 0; i < 4; i++) {
                int g = i / 2 * 2;
                double v0 = norm_first ? x[g] : x[g] * silu(z[g]),
                       v1 = norm_first ? x[g + 1] : x[g + 1] * silu(z[g + 1]);
                double want = x[i] * silu(z[i]) / sqrt((v0 * v0 + v1 * v1) / 2 + 1e-5) * w[i % 2];
                assert_true(fabs(tensor_get(&a.y, i) - want) < 1e-6);
            }
            dev_close(&t.dev);
        }
    }
}

static void outputs_may_lie_over_inputs(void **state)
{
    (void)state;
    enum { R = 67, D = 24, G = 8 };
    for (int k = 0; k < countof(kinds); k++) {
        struct bench t;
        open_bench(&t, kinds[k]);
        enum dtype real = t.ops->real;
        size_t bytes = R * D * dtype_bytes(real);
        double *m = calloc(7 * R * D, sizeof *m), w[D], dw[D], work[D * 4];
        double *x = m, *z = m + R * D, *dy = m + 2 * R * D, *apart = m + 3 * R * D, *over = m + 4 * R * D,
               *dz = m + 5 * R * D;
        struct tensor rstd = tensor_2d(m + 6 * R * D, real, R, D / G);
        struct tensor tx = tensor_2d(x, real, R, D), tz = tensor_2d(z, real, R, D), tdy = tensor_2d(dy, real, R, D);
        struct tensor tw = tensor_1d(w, real, D);
        for (int i = 0; i < R * D; i++) {
            tensor_set(&tx, i, rng_normal(1, (uint64_t)i));
            tensor_set(&tz, i, rng_normal(2, (uint64_t)i));
            tensor_set(&tdy, i, rng_normal(3, (uint64_t)i));
        }
        for (int i = 0; i < D; i++)
            tensor_set(&tw, i, rng_normal(4, (uint64_t)i));
        struct gatednorm_fwd_args f = {
            .x = tx, .z = tz, .w = tw, .y = tensor_2d(apart, real, R, D), .rstd = rstd, .eps = 1e-5, .group = G};
        assert_ok(t.ops->gatednorm_fwd(&t.lane, &f), &t.e);
        memcpy(over, x, bytes);
        f.x = f.y = tensor_2d(over, real, R, D);
        assert_ok(t.ops->gatednorm_fwd(&t.lane, &f), &t.e);
        assert_memory_equal(apart, over, bytes);
        struct gatednorm_bwd_args b = {.dy = tdy,
                                       .x = tx,
                                       .z = tz,
                                       .w = tw,
                                       .rstd = rstd,
                                       .dx = tensor_2d(apart, real, R, D),
                                       .dz = tensor_2d(dz, real, R, D),
                                       .dw = tensor_1d(dw, real, D),
                                       .work = tensor_1d(work, DT_U8, sizeof work),
                                       .group = G};
        assert_ok(t.ops->gatednorm_bwd(&t.lane, &b), &t.e);
        memcpy(over, dy, bytes);
        b.dy = b.dx = tensor_2d(over, real, R, D);
        assert_ok(t.ops->gatednorm_bwd(&t.lane, &b), &t.e);
        assert_memory_equal(apart, over, bytes);
        free(m);
        dev_close(&t.dev);
    }
}

static void bad_groups_and_gains_are_named(void **state)
{
    (void)state;
    struct bench t;
    open_bench(&t, DEV_CPU);
    float m[64] = {0};
    struct gatednorm_fwd_args a = {.x = tensor_2d(m, DT_F32, 2, 6),
                                   .z = tensor_2d(m, DT_F32, 2, 6),
                                   .w = tensor_1d(m, DT_F32, 6),
                                   .y = tensor_2d(m, DT_F32, 2, 6),
                                   .rstd = tensor_2d(m, DT_F32, 2, 2),
                                   .group = 4};
    assert_fails(t.ops->gatednorm_fwd(&t.lane, &a), ST_INVALID, &t.e, "groups of 4 channels");
    a.group = 0;
    assert_fails(t.ops->gatednorm_fwd(&t.lane, &a), ST_INVALID, &t.e, "groups of 0 channels");
    a.group = 2;
    a.rstd = tensor_2d(m, DT_F32, 2, 3);
    a.w = tensor_1d(m, DT_F32, 3);
    assert_fails(t.ops->gatednorm_fwd(&t.lane, &a), ST_INVALID, &t.e, "tensor w is F32 [3]");
    a.w = tensor_1d(m, DT_F32, 2);
    a.z = tensor_2d(m, DT_F32, 2, 5);
    assert_fails(t.ops->gatednorm_fwd(&t.lane, &a), ST_INVALID, &t.e, "z");
    dev_close(&t.dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_order_of_gate_and_norm_is_what_is_asked),
        cmocka_unit_test(outputs_may_lie_over_inputs),
        cmocka_unit_test(bad_groups_and_gains_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
