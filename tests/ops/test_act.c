/* act and gate beyond the descriptors' samples: in place, column layouts, the edges of the clamp,
 * values that are not finite, rejected arguments. */
#include "bench.h"
#include "ops/act/act.h"
#include "ops/gate/gate.h"

enum { ROWS = 5, F = 34 };

static void fill(float *x, int n, uint64_t key)
{
    for (int i = 0; i < n; i++)
        x[i] = (float)rng_normal(key, (uint64_t)i);
}

static void the_gradient_may_replace_the_pre_activations(void **state)
{
    struct bench *t = *state;
    float x[ROWS * 2 * F], dy[ROWS * F], dx[ROWS * 2 * F];
    fill(x, ROWS * 2 * F, 1);
    fill(dy, ROWS * F, 2);
    for (enum act_kind kind = ACT_SWIGLU; kind <= ACT_SILU; kind++) {
        float in[ROWS * 2 * F];
        int64_t wide = act_is_gated(kind) ? 2 * F : F;
        memcpy(in, x, sizeof in);
        struct act_bwd_args a = {.dy = tensor_2d(dy, DT_F32, ROWS, F),
                                 .x = tensor_2d(x, DT_F32, ROWS, wide),
                                 .dx = tensor_2d(dx, DT_F32, ROWS, wide),
                                 .rule = {.kind = kind, .alpha = 1.702, .clamp = 1, .interleave = F / 2}};
        assert_ok(t->ops->act_bwd(&t->lane, &a), &t->e);
        a.x = a.dx = tensor_2d(in, DT_F32, ROWS, wide);
        assert_ok(t->ops->act_bwd(&t->lane, &a), &t->e);
        assert_memory_equal(in, dx, (size_t)(ROWS * wide) * sizeof(float));
    }
}

/* Interleaved in twos, [1,2,5,6,3,4,7,8] is gate 1..4 and up 5..8. */
static void interleaved_columns_mean_the_same_as_halves(void **state)
{
    struct bench *t = *state;
    float pairs[] = {1, 2, 5, 6, 3, 4, 7, 8}, halves[] = {1, 2, 3, 4, 5, 6, 7, 8}, y[2][4];
    for (int g = 0; g < 2; g++) {
        struct act_fwd_args a = {.x = tensor_2d(g ? pairs : halves, DT_F32, 1, 8),
                                 .y = tensor_2d(y[g], DT_F32, 1, 4),
                                 .rule = {.kind = ACT_SWIGLU, .interleave = g ? 2 : 0}};
        assert_ok(t->ops->act_fwd(&t->lane, &a), &t->e);
    }
    for (int j = 0; j < 4; j++) {
        double gate = j + 1, up = j + 5;
        assert_true(y[0][j] == y[1][j]);
        assert_true(fabs(y[0][j] - gate / (1 + exp(-gate)) * up) < 1e-5);
    }
}

static void the_clamp_stops_gradients_only_beyond_its_edges(void **state)
{
    struct bench *t = *state;
    /* gate: inside, on the edge, beyond, far below; up: inside, on each edge, beyond. */
    float x[] = {1, 2, 2.5f, -9, 0.5f, 2, -2, -2.5f}, y[4], dy[] = {1, 1, 1, 1}, dx[8];
    struct act_rule rule = {.kind = ACT_QUICK_GEGLU, .alpha = 1.5, .clamp = 2, .offset = 1};
    struct act_fwd_args f = {.x = tensor_2d(x, DT_F32, 1, 8), .y = tensor_2d(y, DT_F32, 1, 4), .rule = rule};
    struct act_bwd_args b = {
        .dy = tensor_2d(dy, DT_F32, 1, 4), .x = f.x, .dx = tensor_2d(dx, DT_F32, 1, 8), .rule = rule};
    assert_ok(t->ops->act_fwd(&t->lane, &f), &t->e);
    assert_ok(t->ops->act_bwd(&t->lane, &b), &t->e);
    assert_true(fabs(y[1] - 2 / (1 + exp(-3.0)) * 3) < 1e-5);
    assert_true(fabs(y[2] - 2 / (1 + exp(-3.0)) * -1) < 1e-5); /* gate 2.5 counts as 2 */
    assert_true(dx[0] != 0 && dx[1] != 0 && dx[2] == 0 && dx[3] != 0);
    assert_true(dx[4] != 0 && dx[5] != 0 && dx[6] != 0 && dx[7] == 0);
}

static void a_nan_is_not_hidden_and_large_values_stay_finite(void **state)
{
    struct bench *t = *state;
    for (enum act_kind kind = ACT_SWIGLU; kind <= ACT_SILU; kind++) {
        float x[2 * F], y[F];
        for (int i = 0; i < 2 * F; i++)
            x[i] = i % F == 3 ? NAN : i % 2 ? 1e4f : -1e4f;
        struct act_fwd_args a = {.x = tensor_2d(x, DT_F32, 1, act_is_gated(kind) ? 2 * F : F),
                                 .y = tensor_2d(y, DT_F32, 1, F),
                                 .rule = {.kind = kind, .alpha = 1.702}};
        assert_ok(t->ops->act_fwd(&t->lane, &a), &t->e);
        for (int j = 0; j < F; j++)
            assert_true(j == 3 ? isnan(y[j]) : isfinite(y[j]));
    }
}

static void act_refuses_what_it_cannot_do(void **state)
{
    struct bench *t = *state;
    float m[64] = {0};
    const struct act_fwd_args good = {.x = tensor_2d(m, DT_F32, 2, 12), .y = tensor_2d(m + 32, DT_F32, 2, 6)};
    assert_ok(t->ops->act_fwd(&t->lane, &good), &t->e);
    struct act_fwd_args a = good;
    a.rule.kind = ACT_SILU;
    assert_fails(t->ops->act_fwd(&t->lane, &a), ST_INVALID, &t->e, "tensor y is F32 [2, 6]");
    a = good;
    a.rule.kind = (enum act_kind)7;
    assert_fails(t->ops->act_fwd(&t->lane, &a), ST_INVALID, &t->e, "kind 7");
    a = good;
    a.rule.interleave = 4;
    assert_fails(t->ops->act_fwd(&t->lane, &a), ST_INVALID, &t->e, "interleave 4 does not divide the width 6");
    a = good;
    a.rule.clamp = -1;
    assert_fails(t->ops->act_fwd(&t->lane, &a), ST_INVALID, &t->e, "clamp is -1");
    a = good;
    a.prob = tensor_1d(m, DT_F32, 3);
    assert_fails(t->ops->act_fwd(&t->lane, &a), ST_INVALID, &t->e, "tensor prob");
    struct act_bwd_args b = {.dy = good.y, .x = good.x, .dx = good.x, .prob = tensor_1d(m, DT_F32, 2)};
    assert_fails(t->ops->act_bwd(&t->lane, &b), ST_INVALID, &t->e, "tensor dprob is missing");
    b.dprob = b.prob;
    b.prob.data = NULL;
    assert_fails(t->ops->act_bwd(&t->lane, &b), ST_INVALID, &t->e, "dprob is given without prob");
}

static void a_gate_works_in_place(void **state)
{
    struct bench *t = *state;
    for (int shared = 0; shared < 2; shared++) {
        float x[ROWS * F], in[ROWS * F], y[ROWS * F], g[ROWS * F], dx[ROWS * F], dg[2][ROWS * F];
        fill(x, ROWS * F, 1);
        fill(g, ROWS * F, 2);
        struct tensor like = tensor_2d(x, DT_F32, ROWS, F), gate = tensor_2d(g, DT_F32, ROWS, shared ? 1 : F);
        struct gate_fwd_args f = {.x = like, .g = gate, .y = tensor_2d(y, DT_F32, ROWS, F)};
        assert_ok(t->ops->gate_fwd(&t->lane, &f), &t->e);
        memcpy(in, x, sizeof in);
        f.x = f.y = tensor_2d(in, DT_F32, ROWS, F);
        assert_ok(t->ops->gate_fwd(&t->lane, &f), &t->e);
        assert_memory_equal(in, y, sizeof y);

        struct gate_bwd_args b = {.dy = tensor_2d(y, DT_F32, ROWS, F),
                                  .x = like,
                                  .g = gate,
                                  .dx = tensor_2d(dx, DT_F32, ROWS, F),
                                  .dg = gate};
        b.dg.data = dg[0];
        assert_ok(t->ops->gate_bwd(&t->lane, &b), &t->e);
        b.dx = b.dy;
        b.dg.data = dg[1];
        assert_ok(t->ops->gate_bwd(&t->lane, &b), &t->e);
        assert_memory_equal(y, dx, sizeof dx);
        assert_memory_equal(dg[0], dg[1], (size_t)tensor_bytes(&gate));
    }
}

static void a_gate_must_fit_its_rows(void **state)
{
    struct bench *t = *state;
    float m[64] = {0};
    struct gate_fwd_args f = {
        .x = tensor_2d(m, DT_F32, 3, 4), .g = tensor_2d(m, DT_F32, 3, 2), .y = tensor_2d(m + 32, DT_F32, 3, 4)};
    assert_fails(t->ops->gate_fwd(&t->lane, &f), ST_INVALID, &t->e, "tensor g");
    f.g = tensor_2d(m, DT_F32, 2, 1);
    assert_fails(t->ops->gate_fwd(&t->lane, &f), ST_INVALID, &t->e, "tensor g");
    f.g = tensor_3d(m, DT_F32, 3, 4, 1);
    assert_fails(t->ops->gate_fwd(&t->lane, &f), ST_INVALID, &t->e, "tensor g");
    f.x = tensor_1d(m, DT_F32, 4);
    assert_fails(t->ops->gate_fwd(&t->lane, &f), ST_INVALID, &t->e, "tensor x is F32 [4]");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_gradient_may_replace_the_pre_activations, open_cpu_bench, close_cpu_bench),
        cmocka_unit_test_setup_teardown(interleaved_columns_mean_the_same_as_halves, open_cpu_bench, close_cpu_bench),
        cmocka_unit_test_setup_teardown(the_clamp_stops_gradients_only_beyond_its_edges, open_cpu_bench,
                                        close_cpu_bench),
        cmocka_unit_test_setup_teardown(a_nan_is_not_hidden_and_large_values_stay_finite, open_cpu_bench,
                                        close_cpu_bench),
        cmocka_unit_test_setup_teardown(act_refuses_what_it_cannot_do, open_cpu_bench, close_cpu_bench),
        cmocka_unit_test_setup_teardown(a_gate_works_in_place, open_cpu_bench, close_cpu_bench),
        cmocka_unit_test_setup_teardown(a_gate_must_fit_its_rows, open_cpu_bench, close_cpu_bench),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
