/* moeplan and permute together: the order of rows, both maps, the round trip, refused arguments. */
#include "bench.h"
#include "ops/moeplan/moeplan.h"
#include "ops/permute/permute.h"

enum { T = 37, K = 3, E = 5, R = T * K, D = 70 };

struct maps {
    int32_t idx[R], offset[E + 1], row[R], src[R];
    struct moeplan_args a;
};

static void route(struct maps *m, bool drops)
{
    for (int i = 0; i < R; i++) {
        int32_t e = (int32_t)rng_below(3, (uint64_t)i, E - 1); /* the last expert stays empty */
        m->idx[i] = drops && i % 4 == 1 ? -1 - e : e;
    }
    m->a = (struct moeplan_args){.idx = tensor_2d(m->idx, DT_I32, T, K),
                                 .offset = tensor_1d(m->offset, DT_I32, E + 1),
                                 .row = tensor_2d(m->row, DT_I32, T, K),
                                 .src = tensor_1d(m->src, DT_I32, R)};
}

static void rows_are_ordered_by_expert_then_token(void **state)
{
    struct bench *t = *state;
    for (int drops = 0; drops < 2; drops++) {
        struct maps m;
        route(&m, drops);
        assert_ok(t->ops->moeplan(&t->lane, &m.a), &t->e);
        int kept = 0;
        for (int i = 0; i < R; i++) {
            assert_int_equal(m.row[i] < 0, m.idx[i] < 0);
            if (m.idx[i] < 0)
                continue;
            kept++;
            assert_int_equal(m.src[m.row[i]], i);
            assert_in_range(m.row[i], m.offset[m.idx[i]], m.offset[m.idx[i] + 1] - 1);
        }
        assert_int_equal(m.offset[0], 0);
        assert_int_equal(m.offset[E], kept);
        assert_int_equal(m.offset[E - 1], kept);
        for (int r = 1; r < kept; r++)
            if (m.idx[m.src[r]] == m.idx[m.src[r - 1]])
                assert_true(m.src[r] > m.src[r - 1]);
        for (int r = kept; r < R; r++)
            assert_int_equal(m.src[r], -1);
    }
}

static void an_expert_out_of_range_is_refused(void **state)
{
    struct bench *t = *state;
    struct maps m;
    route(&m, false);
    m.idx[5] = E;
    assert_fails(t->ops->moeplan(&t->lane, &m.a), ST_INVALID, &t->e, "choice 5 is expert 5");
    m.a.src = tensor_1d(m.src, DT_I32, R - 1);
    assert_fails(t->ops->moeplan(&t->lane, &m.a), ST_INVALID, &t->e, "src");
}

/* Experts that do nothing and probabilities of 1/k give the tokens back. */
static void there_and_back_restores_the_tokens(void **state)
{
    struct bench *t = *state;
    static float x[T * D], rows[R * D], y[T * D], prob[R], prow[R], pback[R];
    struct maps m;
    route(&m, false);
    assert_ok(t->ops->moeplan(&t->lane, &m.a), &t->e);
    for (int i = 0; i < T * D; i++)
        x[i] = (float)rng_normal(8, (uint64_t)i);
    for (int i = 0; i < R; i++)
        prob[i] = (float)i;
    struct permute_args there = {.x = tensor_2d(x, DT_F32, T, D),
                                 .src = m.a.src,
                                 .prob = tensor_2d(prob, DT_F32, T, K),
                                 .y = tensor_2d(rows, DT_F32, R, D),
                                 .yprob = tensor_1d(prow, DT_F32, R),
                                 .k = K};
    assert_ok(t->ops->permute(&t->lane, &there), &t->e);
    for (int i = 0; i < R * D; i++)
        rows[i] /= K;
    struct unpermute_args back = {.x = there.y,
                                  .row = m.a.row,
                                  .xprob = there.yprob,
                                  .y = tensor_2d(y, DT_F32, T, D),
                                  .yprob = tensor_2d(pback, DT_F32, T, K)};
    assert_ok(t->ops->unpermute(&t->lane, &back), &t->e);
    for (int i = 0; i < T * D; i++)
        assert_true(fabsf(y[i] - x[i]) <= 1e-6f * fabsf(x[i]));
    assert_memory_equal(prob, pback, sizeof prob);
}

static void dropped_rows_are_zero_and_give_nothing_back(void **state)
{
    struct bench *t = *state;
    static float x[T * D], rows[R * D], y[T * D];
    struct maps m;
    route(&m, true);
    assert_ok(t->ops->moeplan(&t->lane, &m.a), &t->e);
    for (int i = 0; i < T * D; i++)
        x[i] = 1;
    memset(rows, 0xFF, sizeof rows);
    struct permute_args there = {
        .x = tensor_2d(x, DT_F32, T, D), .src = m.a.src, .y = tensor_2d(rows, DT_F32, R, D), .k = K};
    assert_ok(t->ops->permute(&t->lane, &there), &t->e);
    for (int i = m.offset[E] * D; i < R * D; i++)
        assert_true(rows[i] == 0);
    struct unpermute_args back = {.x = there.y, .row = m.a.row, .y = tensor_2d(y, DT_F32, T, D)};
    assert_ok(t->ops->unpermute(&t->lane, &back), &t->e);
    for (int r = 0; r < T; r++) {
        int kept = 0;
        for (int j = 0; j < K; j++)
            kept += m.row[r * K + j] >= 0;
        assert_true(y[r * D] == (float)kept && y[r * D + D - 1] == (float)kept);
    }
}

/* Values whose sum depends on the order: 1 + 2^-24 + 2^-24 is 1 from the left,
 * more from the right. */
static void a_token_is_summed_in_order_of_choice(void **state)
{
    struct bench *t = *state;
    const float tiny = 0x1p-24f;
    float rows[3] = {1, tiny, tiny}, y[1], base[1] = {0};
    int32_t forward[] = {0, 1, 2}, backward[] = {1, 2, 0};
    struct unpermute_args a = {
        .x = tensor_2d(rows, DT_F32, 3, 1), .row = tensor_2d(forward, DT_I32, 1, 3), .y = tensor_2d(y, DT_F32, 1, 1)};
    assert_ok(t->ops->unpermute(&t->lane, &a), &t->e);
    assert_true(y[0] == 1);
    a.row = tensor_2d(backward, DT_I32, 1, 3);
    assert_ok(t->ops->unpermute(&t->lane, &a), &t->e);
    assert_true(y[0] == 1 + 2 * tiny);
    base[0] = 2;
    a.base = a.y = tensor_2d(base, DT_F32, 1, 1); /* the result may replace what it starts from */
    assert_ok(t->ops->unpermute(&t->lane, &a), &t->e);
    assert_true(base[0] == 3);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, open_cpu_bench, close_cpu_bench)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(rows_are_ordered_by_expert_then_token), TEST(an_expert_out_of_range_is_refused),
        TEST(there_and_back_restores_the_tokens),    TEST(dropped_rows_are_zero_and_give_nothing_back),
        TEST(a_token_is_summed_in_order_of_choice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
