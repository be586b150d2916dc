/* router beyond the descriptors' samples: who is chosen, what biases, groups, capacity and tables
 * do, losses against known values, noise, values that are not finite, rejected arguments. */
#include "bench.h"
#include "ops/router/router.h"

enum { T = 48, E = 16, K = 4 };

/* Room for one call; logits are N(0, 1). */
struct call {
    float logits[T * E], probs[T * K], bias[E], loss;
    int32_t idx[T * K];
    double load[(T + 1) * E], stat[ROUTER_STATS], tally[E], global[E + 1];
    struct router_fwd_args a;
};

static void prepare(struct call *c, int64_t rows, int64_t n, int64_t k)
{
    *c = (struct call){0};
    for (int i = 0; i < T * E; i++)
        c->logits[i] = (float)rng_normal(5, (uint64_t)i);
    c->a = (struct router_fwd_args){.logits = tensor_2d(c->logits, DT_F32, rows, n),
                                    .probs = tensor_2d(c->probs, DT_F32, rows, k),
                                    .idx = tensor_2d(c->idx, DT_I32, rows, k),
                                    .stat = tensor_1d(c->stat, DT_F64, ROUTER_STATS),
                                    .tally = tensor_1d(c->tally, DT_F64, n),
                                    .loss = tensor_1d(&c->loss, DT_F32, 1),
                                    .rule = {.scale = 1, .norm = true, .seq = rows}};
}

static int try_run(struct bench *t, struct call *c)
{
    struct router_fwd_args *a = &c->a;
    void *work = NULL;
    int64_t bytes = t->ops->router_fwd_work(a);
    assert_int_equal(posix_memalign(&work, 64, (size_t)bytes + 64), 0);
    memset(work, 0xFF, (size_t)bytes);
    a->work = tensor_1d(work, DT_U8, bytes);
    int st = t->ops->router_fwd(&t->lane, a);
    free(work);
    a->work = (struct tensor){0};
    return st;
}

static void run(struct bench *t, struct call *c) { assert_ok(try_run(t, c), &t->e); }

static void with_load(struct call *c)
{
    int64_t rows = c->a.logits.dim[0];
    c->a.load = tensor_2d(c->load, DT_F64, rows / c->a.rule.seq + 1, c->a.logits.dim[1]);
}

static void the_lowest_index_wins_among_equals(void **state)
{
    struct bench *t = *state;
    struct call c;
    const float rows[3][8] = {{0, 0, 0, 0, 0, 0, 0, 0}, {1, 3, 2, 3, 2, 3, 0, 0}, {-1, -2, -1, -2, -1, -2, -1, -9}};
    const int32_t want[3][3] = {{0, 1, 2}, {1, 3, 5}, {0, 2, 4}};
    prepare(&c, 3, 8, 3);
    memcpy(c.logits, rows, sizeof rows);
    for (enum router_score s = ROUTER_SOFTMAX; s <= ROUTER_SQRTSOFTPLUS; s++) {
        c.a.rule.score = s;
        run(t, &c);
        assert_memory_equal(c.idx, want, sizeof want);
    }
}

static void a_bias_changes_the_choice_and_not_the_probability(void **state)
{
    struct bench *t = *state;
    struct call c;
    prepare(&c, 1, 4, 2);
    const float z[] = {2, 1, 0, -1}, bias[] = {0, 0, 0, 5};
    memcpy(c.logits, z, sizeof z);
    memcpy(c.bias, bias, sizeof bias);
    c.a.rule.score = ROUTER_SIGMOID;
    c.a.bias = tensor_1d(c.bias, DT_F32, 4);
    run(t, &c);
    double s3 = 1 / (1 + exp(1.0)), s0 = 1 / (1 + exp(-2.0));
    assert_int_equal(c.idx[0], 3);
    assert_int_equal(c.idx[1], 0);
    assert_true(fabs(c.probs[0] - s3 / (s3 + s0)) < 1e-6 && fabs(c.probs[1] - s0 / (s3 + s0)) < 1e-6);
}

static void chosen_experts_come_from_the_best_groups_only(void **state)
{
    struct bench *t = *state;
    struct call c;
    const int64_t groups[][2] = {{8, 3}, {4, 2}, {16, 4}, {2, 1}};
    for (int g = 0; g < countof(groups); g++) {
        prepare(&c, T, E, K);
        c.a.rule.score = ROUTER_SIGMOID;
        c.a.rule.groups = groups[g][0];
        c.a.rule.group_topk = groups[g][1];
        run(t, &c);
        for (int r = 0; r < T; r++) {
            bool used[E] = {0};
            int n = 0;
            for (int j = 0; j < K; j++)
                used[c.idx[r * K + j] / (E / groups[g][0])] = true;
            for (int x = 0; x < groups[g][0]; x++)
                n += used[x];
            assert_in_range(n, 1, groups[g][1]);
        }
    }
    /* 4 of 16 from 3 of 8: a group scores its best expert alone (4 / 3 = 1), so 9 beats 5 + 5. */
    prepare(&c, 1, 8, 2);
    const float z[] = {5, 5, 9, -9, 0, 0, 0, 0};
    memcpy(c.logits, z, sizeof z);
    c.a.rule.groups = 4;
    c.a.rule.group_topk = 2;
    run(t, &c);
    assert_int_equal(c.idx[0], 2);
    c.a.rule.group_topk = 1; /* now two experts of one group count: 5 + 5 beats 9 - 9 */
    run(t, &c);
    assert_int_equal(c.idx[0], 0);
    assert_int_equal(c.idx[1], 1);
}

static void capacity_keeps_the_most_probable_or_the_earliest(void **state)
{
    struct bench *t = *state;
    for (int late = 0; late < 2; late++) {
        struct call all, c;
        prepare(&all, T, E, K);
        run(t, &all);
        prepare(&c, T, E, K);
        c.a.rule.capacity = 1;
        c.a.rule.drop_late = late;
        run(t, &c);
        int64_t capacity = router_capacity(&c.a.rule, T, E, K);
        assert_int_equal(capacity, 12);
        for (int e = 0; e < E; e++) {
            float worst_kept = INFINITY, best_lost = 0;
            int last_kept = -1, first_lost = T * K, kept = 0, wanted = 0;
            for (int i = 0; i < T * K; i++) {
                wanted += all.idx[i] == e;
                if (c.idx[i] == e) {
                    assert_true(c.probs[i] == all.probs[i]);
                    worst_kept = fminf(worst_kept, c.probs[i]);
                    last_kept = i;
                    kept++;
                } else if (c.idx[i] == -1 - e) {
                    assert_true(c.probs[i] == 0);
                    best_lost = fmaxf(best_lost, all.probs[i]);
                    first_lost = first_lost < i ? first_lost : i;
                }
            }
            assert_int_equal(kept, wanted < capacity ? wanted : capacity);
            assert_int_equal((int)c.tally[e], kept);
            assert_true(late ? last_kept < first_lost : worst_kept >= best_lost);
        }
        assert_true(c.stat[ROUTER_STAT_DROPPED] > 0);
    }
}

/* Two sequences of four tokens that all want expert 0, which keeps three of them: both first positions and the second
 * of the first sequence, not the first three rows. */
static void position_counts_before_the_sequence(void **state)
{
    struct bench *t = *state;
    struct call c;
    prepare(&c, 8, 4, 1);
    for (int r = 0; r < 8; r++)
        for (int e = 0; e < 4; e++)
            c.logits[r * 4 + e] = e == 0 ? 3 : 0;
    c.a.rule.pre_softmax = true;
    c.a.rule.seq = 4;
    c.a.rule.capacity = 1.5; /* of 8 / 4 */
    c.a.rule.drop_late = true;
    run(t, &c);
    const int32_t want[] = {0, 0, -1, -1, 0, -1, -1, -1};
    assert_memory_equal(c.idx, want, sizeof want);
}

static void a_table_decides_and_the_logits_weigh(void **state)
{
    struct bench *t = *state;
    struct call c;
    int32_t token[] = {2, 0}, table[] = {1, 3, 0, 2, 3, 2};
    prepare(&c, 2, 4, 2);
    c.a.token = tensor_1d(token, DT_I32, 2);
    c.a.table = tensor_2d(table, DT_I32, 3, 2);
    c.a.rule.score = ROUTER_SIGMOID;
    run(t, &c);
    const int32_t want[] = {3, 2, 1, 3};
    assert_memory_equal(c.idx, want, sizeof want);
    double a = 1 / (1 + exp(-c.logits[3])), b = 1 / (1 + exp(-c.logits[2]));
    assert_true(fabs(c.probs[0] - a / (a + b)) < 1e-6);
    token[1] = 3;
    assert_fails(try_run(t, &c), ST_INVALID, &t->e, "token 3");
    token[1] = 0;
    table[1] = 4;
    assert_fails(try_run(t, &c), ST_INVALID, &t->e, "expert 4");
}

/* Without tokens a row of the table is a row of the batch, and probabilities are those of a choice: softmax over the
 * chosen. */
static void a_table_without_tokens_is_a_choice_of_its_own(void **state)
{
    struct bench *t = *state;
    struct call c;
    int32_t table[] = {1, 3, 0, 2, 3, 2};
    prepare(&c, 3, 4, 2);
    c.a.table = tensor_2d(table, DT_I32, 3, 2);
    run(t, &c);
    assert_memory_equal(c.idx, table, sizeof table);
    assert_true(fabs(c.probs[0] - 1 / (1 + exp(c.logits[3] - c.logits[1]))) < 1e-6);
    table[5] = -1;
    assert_fails(try_run(t, &c), ST_INVALID, &t->e, "expert -1");
    table[5] = 2;
    c.a.table = tensor_2d(table, DT_I32, 2, 2);
    assert_fails(try_run(t, &c), ST_INVALID, &t->e, "one for each of the 3");
    int32_t token[] = {0, 1, 0};
    c.a.token = tensor_1d(token, DT_I32, 3);
    c.a.table = (struct tensor){0};
    assert_fails(try_run(t, &c), ST_INVALID, &t->e, "without table");
}

static void the_losses_have_their_known_values(void **state)
{
    struct bench *t = *state;
    struct call c;
    prepare(&c, 4, 4, 1);
    memset(c.logits, 0, sizeof c.logits); /* s = 1/4 everywhere, every token to expert 0 */
    c.a.rule.pre_softmax = true;
    c.a.rule.coef = (struct router_coef){.aux = 2, .z = 3};
    with_load(&c);
    run(t, &c);
    assert_true(fabs(c.stat[ROUTER_STAT_AUX] - 1) < 1e-6); /* E / (k N^2) * 4 * (4 / 4) */
    assert_true(fabs(c.stat[ROUTER_STAT_Z] - log(4) * log(4)) < 1e-5);
    assert_true(fabs(c.stat[ROUTER_STAT_LOSS] - (2 + 3 * log(4) * log(4))) < 1e-5);
    assert_true(fabs((double)c.loss - c.stat[ROUTER_STAT_LOSS]) < 1e-5);
    assert_true(c.stat[ROUTER_STAT_LOAD_MAX] == 4 && c.stat[ROUTER_STAT_LOAD_ENTROPY] == 0);
}

static void one_sequence_makes_both_balance_losses_equal(void **state)
{
    struct bench *t = *state;
    struct call one, two;
    prepare(&one, T, E, K);
    one.a.rule.coef = (struct router_coef){.aux = 1, .seq_aux = 1};
    with_load(&one);
    run(t, &one);
    assert_true(one.stat[ROUTER_STAT_AUX] == one.stat[ROUTER_STAT_SEQ_AUX]);
    /* Two sequences: the mean of what each gives alone. */
    double alone[2];
    for (int half = 0; half < 2; half++) {
        prepare(&two, T / 2, E, K);
        memcpy(two.logits, one.logits + half * T / 2 * E, sizeof(float) * T / 2 * E);
        two.a.rule.coef.seq_aux = 1;
        with_load(&two);
        run(t, &two);
        alone[half] = two.stat[ROUTER_STAT_SEQ_AUX];
    }
    one.a.rule.seq = T / 2;
    with_load(&one);
    run(t, &one);
    assert_true(fabs(one.stat[ROUTER_STAT_SEQ_AUX] - (alone[0] + alone[1]) / 2) < 1e-12);
}

static void the_global_loss_averages_over_microbatches(void **state)
{
    struct bench *t = *state;
    struct call c;
    double first[E];
    prepare(&c, T, E, K);
    c.a.rule.coef.global_aux = 1;
    c.a.global = tensor_1d(c.global, DT_F64, E + 1);
    with_load(&c);
    run(t, &c);
    memcpy(first, c.load, sizeof first);
    assert_memory_equal(first, c.load + E, sizeof first);
    for (int i = 0; i < T * E; i++)
        c.logits[i] = (float)rng_normal(6, (uint64_t)i);
    c.a.acc_global = true;
    run(t, &c);
    assert_true(c.global[E] == 2);
    for (int e = 0; e < E; e++)
        assert_true(c.load[E + e] == (first[e] + c.load[e]) / 2);
}

static void counts_and_statistics_add_up_over_microbatches(void **state)
{
    struct bench *t = *state;
    struct call c;
    prepare(&c, T, E, K);
    run(t, &c);
    double tally = c.tally[3], most = c.stat[ROUTER_STAT_LOAD_MAX];
    c.a.acc_tally = c.a.acc_stat = true;
    run(t, &c);
    assert_true(c.tally[3] == 2 * tally && c.stat[ROUTER_STAT_LOAD_MAX] == 2 * most);
}

static void logits_that_are_not_numbers_still_choose_valid_experts(void **state)
{
    struct bench *t = *state;
    for (enum router_score s = ROUTER_SOFTMAX; s <= ROUTER_SQRTSOFTPLUS; s++) {
        struct call c;
        prepare(&c, T, E, K);
        for (int i = 0; i < T * E; i += 3)
            c.logits[i] = i % 2 ? NAN : i % 4 ? INFINITY : -INFINITY;
        for (int i = 0; i < E; i++)
            c.logits[i] = NAN;
        c.a.rule.score = s;
        c.a.rule.groups = 4;
        c.a.rule.group_topk = 2;
        c.a.rule.capacity = 0.5;
        run(t, &c);
        for (int i = 0; i < T * K; i++)
            assert_in_range((c.idx[i] < 0 ? -1 - c.idx[i] : c.idx[i]), 0, E - 1);
    }
}

static void the_bias_moves_towards_balance(void **state)
{
    struct bench *t = *state;
    float bias[] = {0, 1, 2, 3};
    double tally[] = {7, 1, 4, 4};
    struct router_bias_args a = {.tally = tensor_1d(tally, DT_F64, 4), .bias = tensor_1d(bias, DT_F32, 4), .rate = 0.5};
    assert_ok(t->ops->router_bias(&t->lane, &a), &t->e);
    assert_true(bias[0] == -0.5f && bias[1] == 1.5f && bias[2] == 2 && bias[3] == 3);
}

static void noise_is_balanced_and_a_function_of_the_sample(void **state)
{
    struct bench *t = *state;
    enum { ROWS = 512, SEQ = 64 };
    static float z[ROWS * E], half[ROWS / 2 * E];
    int64_t info[] = {4, 10, 0, 0};
    struct router_noise_args a = {
        .info = tensor_1d(info, DT_I64, 4), .logits = tensor_2d(z, DT_F32, ROWS, E), .key = 9, .seq = SEQ};
    assert_ok(t->ops->router_noise(&t->lane, &a), &t->e);
    double sum = 0, square = 0;
    for (int i = 0; i < ROWS * E; i++) {
        sum += z[i];
        square += z[i] * z[i];
    }
    assert_true(fabs(sum / (ROWS * E)) < 0.05 && fabs(square / (ROWS * E) - 1) < 0.05);
    info[1] += ROWS / 2 / SEQ; /* the second half of the samples, as a microbatch of its own */
    a.logits = tensor_2d(half, DT_F32, ROWS / 2, E);
    assert_ok(t->ops->router_noise(&t->lane, &a), &t->e);
    assert_memory_equal(half, z + ROWS / 2 * E, sizeof half);
}

static void jitter_stays_in_its_range_and_is_its_own_gradient(void **state)
{
    struct bench *t = *state;
    float x[T * E], y[T * E], dx[T * E];
    int64_t info[] = {4, 10, 0, 0};
    for (int i = 0; i < T * E; i++)
        x[i] = (float)(i % 7 + 1);
    struct router_jitter_args a = {.x = tensor_2d(x, DT_F32, T, E),
                                   .info = tensor_1d(info, DT_I64, 4),
                                   .y = tensor_2d(y, DT_F32, T, E),
                                   .eps = 0.25,
                                   .key = 3,
                                   .seq = 8};
    assert_ok(t->ops->router_jitter(&t->lane, &a), &t->e);
    for (int i = 0; i < T * E; i++) {
        float f = y[i] / x[i];
        assert_true(f >= 0.75f && f <= 1.25f);
        dx[i] = 1;
        x[i] = 1;
    }
    float factor[T * E];
    a.y = tensor_2d(factor, DT_F32, T, E);
    assert_ok(t->ops->router_jitter(&t->lane, &a), &t->e);
    a.y = tensor_2d(dx, DT_F32, T, E);
    a.acc_y = true;
    assert_ok(t->ops->router_jitter(&t->lane, &a), &t->e);
    for (int i = 0; i < T * E; i++)
        assert_true(fabsf(y[i] - (float)(i % 7 + 1) * factor[i]) < 1e-5f && fabsf(dx[i] - 1 - factor[i]) < 1e-6f);
}

static void bad_arguments_are_refused(void **state)
{
    struct bench *t = *state;
    struct call c;
    prepare(&c, T, E, K);
    c.a.rule.seq = 7;
    assert_fails(t->ops->router_fwd(&t->lane, &c.a), ST_INVALID, &t->e, "sequences of 7");
    prepare(&c, T, E, K);
    c.a.rule.groups = 3;
    c.a.rule.group_topk = 1;
    assert_fails(t->ops->router_fwd(&t->lane, &c.a), ST_INVALID, &t->e, "groups");
    prepare(&c, T, E, K);
    c.a.rule.groups = 8;
    c.a.rule.group_topk = 1; /* 2 experts cannot hold 4 */
    assert_fails(t->ops->router_fwd(&t->lane, &c.a), ST_INVALID, &t->e, "cannot hold");
    prepare(&c, T, 2, K);
    assert_fails(t->ops->router_fwd(&t->lane, &c.a), ST_INVALID, &t->e, "4 of 2 experts");
    prepare(&c, T, E, K);
    c.a.rule.coef.aux = 1;
    assert_fails(t->ops->router_fwd(&t->lane, &c.a), ST_INVALID, &t->e, "load");
    prepare(&c, T, E, K);
    assert_fails(t->ops->router_fwd(&t->lane, &c.a), ST_INVALID, &t->e, "work");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, open_cpu_bench, close_cpu_bench)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(the_lowest_index_wins_among_equals),
        TEST(a_bias_changes_the_choice_and_not_the_probability),
        TEST(chosen_experts_come_from_the_best_groups_only),
        TEST(capacity_keeps_the_most_probable_or_the_earliest),
        TEST(position_counts_before_the_sequence),
        TEST(a_table_decides_and_the_logits_weigh),
        TEST(a_table_without_tokens_is_a_choice_of_its_own),
        TEST(the_losses_have_their_known_values),
        TEST(one_sequence_makes_both_balance_losses_equal),
        TEST(the_global_loss_averages_over_microbatches),
        TEST(counts_and_statistics_add_up_over_microbatches),
        TEST(logits_that_are_not_numbers_still_choose_valid_experts),
        TEST(the_bias_moves_towards_balance),
        TEST(noise_is_balanced_and_a_function_of_the_sample),
        TEST(jitter_stays_in_its_range_and_is_its_own_gradient),
        TEST(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
