/* dropout: the mask itself. Known bits come from an independent Philox written in Python. */
#include "support.h"
#include "ops/dropout/dropout.h"

#include "ops/dropout/dropout_mask.h"
#include "ops/ops.h"

enum { SEQ = 16, D = 130, SAMPLES = 8, TOKENS = SEQ * SAMPLES };

static void apply_part(enum dev_kind kind, void *x, void *y, int64_t rows, int64_t d, double p, uint64_t key,
                       int64_t seq, const int64_t from[4])
{
    struct err e = {0};
    struct dev dev;
    assert_ok(dev_open(&dev, kind, 0, &e), &e);
    struct lane lane = {.dev = &dev, .err = &e};
    int64_t info[4] = {from[0], from[1], from[2], from[3]};
    const struct ops *ops = ops_for(&dev);
    struct dropout_args a = {.x = tensor_2d(x, ops->real, rows, d),
                             .y = tensor_2d(y, ops->real, rows, d),
                             .rule = {.p = p, .key = key, .seq = seq, .info = tensor_1d(info, DT_I64, 4)}};
    assert_ok(ops->dropout(&lane, &a), &e);
    dev_close(&dev);
}

static void apply(enum dev_kind kind, void *x, void *y, int64_t rows, int64_t d, double p, uint64_t key, int64_t seq,
                  int64_t step, int64_t sample)
{
    apply_part(kind, x, y, rows, d, p, key, seq, (const int64_t[4]){step, sample, 0, 0});
}

static void ones(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = 1;
}

static void a_fixed_key_gives_a_known_mask(void **state)
{
    (void)state;
    enum { COLS = 24 };
    static const char *const want[4] = {"001110001001100000110001", "110101110110100000101100",
                                        "111010001011100101100010", "010100100001110100100110"};
    float x[4 * COLS], y[4 * COLS];
    double x64[4 * COLS], y64[4 * COLS];
    ones(x, 4 * COLS);
    for (int i = 0; i < 4 * COLS; i++)
        x64[i] = 1;
    apply(DEV_CPU, x, y, 4, COLS, 0.5, 0x0123456789abcdefull, 2, 7, (3ll << 32) + 2);
    apply(DEV_REF, x64, y64, 4, COLS, 0.5, 0x0123456789abcdefull, 2, 7, (3ll << 32) + 2);
    for (int i = 0; i < 4 * COLS; i++) {
        double expect = want[i / COLS][i % COLS] == '1' ? 2 : 0;
        assert_true((double)y[i] == expect && y64[i] == expect);
    }
}

static void runs_of_draws_equal_single_draws(void **state)
{
    (void)state;
    uint32_t bits[DROPOUT_RUN];
    for (int64_t k = 0; k < 50; k++) {
        int64_t sample = k * 987654321987, pos = k * 31, first = k * 4 * 7;
        uint64_t key = rng_key((uint64_t)k, "site");
        dropout_bits(key, k - 3, sample, pos, first, bits);
        for (int64_t i = 0; i < DROPOUT_RUN; i++)
            assert_int_equal(bits[i], dropout_draw(key, k - 3, sample, pos, first + i).v[(first + i) % 4]);
    }
}

static void the_kept_share_is_one_minus_p(void **state)
{
    (void)state;
    static float x[TOKENS * D], y[TOKENS * D];
    static const double ps[] = {0.01, 0.1, 0.5, 0.9};
    const double n = TOKENS * D;
    ones(x, TOKENS * D);
    for (int k = 0; k < countof(ps); k++) {
        double p = ps[k], kept = 0, by_parity[2] = {0};
        apply(DEV_CPU, x, y, TOKENS, D, p, rng_key(4, "keep"), SEQ, k, 0);
        for (int i = 0; i < TOKENS * D; i++) {
            assert_true(y[i] == 0.0f || fabs((double)y[i] - 1 / (1 - p)) < 1e-6 / (1 - p));
            kept += y[i] != 0.0f;
            by_parity[i / D % 2] += y[i] != 0.0f;
        }
        double sigma = sqrt(n * p * (1 - p));
        assert_true(fabs(kept - n * (1 - p)) < 5 * sigma);
        assert_true(fabs(by_parity[0] - by_parity[1]) < 5 * sigma);
    }
}

static void the_split_into_microbatches_does_not_matter(void **state)
{
    (void)state;
    static float x[TOKENS * D], whole[TOKENS * D], parts[TOKENS * D];
    const int64_t base = 1000;
    uint64_t key = rng_key(1, "decoder.layers.0");
    for (int i = 0; i < TOKENS * D; i++)
        x[i] = (float)rng_normal(2, (uint64_t)i);
    apply(DEV_CPU, x, whole, TOKENS, D, 0.3, key, SEQ, 5, base);
    for (int size = 1; size < SAMPLES; size *= 2) {
        memset(parts, 0, sizeof parts);
        for (int first = 0; first < SAMPLES; first += size)
            apply(DEV_CPU, x + first * SEQ * D, parts + first * SEQ * D, size * SEQ, D, 0.3, key, SEQ, 5, base + first);
        assert_memory_equal(whole, parts, sizeof whole);
    }
}

/* Ranks that divide sequences draw what one rank draws for the same tokens. */
static void rows_of_a_part_draw_what_they_draw_in_the_whole(void **state)
{
    (void)state;
    enum { PARTS = 4, CHUNK = SEQ / PARTS, ROWS = CHUNK * SAMPLES };
    static float x[TOKENS * D], whole[TOKENS * D], part[ROWS * D];
    ones(x, TOKENS * D);
    apply(DEV_CPU, x, whole, TOKENS, D, 0.3, 99, SEQ, 5, 1000);
    for (int64_t p = 0; p < PARTS; p++) {
        apply_part(DEV_CPU, x, part, ROWS, D, 0.3, 99, CHUNK, (const int64_t[4]){5, 1000, p * CHUNK, 0});
        for (int64_t t = 0; t < ROWS; t++)
            assert_memory_equal(part + t * D, whole + (t / CHUNK * SEQ + p * CHUNK + t % CHUNK) * D, D * sizeof *part);
    }
}

static void step_sample_and_key_each_change_the_mask(void **state)
{
    (void)state;
    static float x[SEQ * D], a[SEQ * D], b[SEQ * D];
    ones(x, SEQ * D);
    apply(DEV_CPU, x, a, SEQ, D, 0.5, 10, SEQ, 1, 1);
    static const int64_t other[][3] = {{11, 1, 1}, {10, 2, 1}, {10, 1, 2}, {10, 1, 1 + (1ll << 40)}};
    for (int k = 0; k < countof(other); k++) {
        int same = 0;
        apply(DEV_CPU, x, b, SEQ, D, 0.5, (uint64_t)other[k][0], SEQ, other[k][1], other[k][2]);
        for (int i = 0; i < SEQ * D; i++)
            same += (a[i] != 0.0f) == (b[i] != 0.0f);
        assert_true(abs(same - SEQ * D / 2) < 5 * 23); /* sigma of 2080 fair coins */
    }
}

/* <dy, drop(x)> = <drop(dy), x>: the op is its own backward. */
static void it_is_its_own_gradient_and_works_in_place(void **state)
{
    (void)state;
    static double x[SEQ * D], dy[SEQ * D], y[SEQ * D];
    double left = 0, right = 0;
    for (int i = 0; i < SEQ * D; i++) {
        x[i] = rng_normal(5, (uint64_t)i);
        dy[i] = rng_normal(6, (uint64_t)i);
    }
    apply(DEV_REF, x, y, SEQ, D, 0.25, 77, 4, 3, 2);
    for (int i = 0; i < SEQ * D; i++)
        left += dy[i] * y[i];
    apply(DEV_REF, dy, dy, SEQ, D, 0.25, 77, 4, 3, 2);
    for (int i = 0; i < SEQ * D; i++)
        right += dy[i] * x[i];
    assert_true(fabs(left) > 1 && fabs(left - right) < 1e-10 * fabs(left));

    static float f[SEQ * D], g[SEQ * D];
    for (int i = 0; i < SEQ * D; i++)
        f[i] = (float)x[i];
    apply(DEV_CPU, f, g, SEQ, D, 0.25, 77, 4, 3, 2);
    apply(DEV_CPU, f, f, SEQ, D, 0.25, 77, 4, 3, 2);
    assert_memory_equal(f, g, sizeof f);
}

static void bad_rules_are_refused_and_zero_copies(void **state)
{
    (void)state;
    struct err e = {0};
    struct dev dev;
    assert_ok(dev_open(&dev, DEV_CPU, 0, &e), &e);
    struct lane lane = {.dev = &dev, .err = &e};
    float x[4] = {1, 2, 3, 4}, y[4] = {0};
    struct dropout_args a = {.x = tensor_2d(x, DT_F32, 2, 2), .y = tensor_2d(y, DT_F32, 2, 2)};
    assert_ok(ops_for(&dev)->dropout(&lane, &a), &e); /* p = 0 needs neither info nor seq */
    assert_memory_equal(x, y, sizeof x);
    static const double bad[] = {1, 1.5, -0.1, NAN};
    for (int k = 0; k < countof(bad); k++) {
        a.rule.p = bad[k];
        assert_fails(ops_for(&dev)->dropout(&lane, &a), ST_INVALID, &e, "p is");
    }
    a.rule.p = 0.5;
    assert_fails(ops_for(&dev)->dropout(&lane, &a), ST_INVALID, &e, "seq is 0");
    a.rule.seq = 2;
    assert_fails(ops_for(&dev)->dropout(&lane, &a), ST_INVALID, &e, "info is missing");
    a.x = tensor_1d(x, DT_F32, 4);
    assert_fails(ops_for(&dev)->dropout(&lane, &a), ST_INVALID, &e, "x is");
    dev_close(&dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_fixed_key_gives_a_known_mask),
        cmocka_unit_test(runs_of_draws_equal_single_draws),
        cmocka_unit_test(the_kept_share_is_one_minus_p),
        cmocka_unit_test(the_split_into_microbatches_does_not_matter),
        cmocka_unit_test(rows_of_a_part_draw_what_they_draw_in_the_whole),
        cmocka_unit_test(step_sample_and_key_each_change_the_mask),
        cmocka_unit_test(it_is_its_own_gradient_and_works_in_place),
        cmocka_unit_test(bad_rules_are_refused_and_zero_copies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
