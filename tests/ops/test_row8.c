/* row8: known codes and scales, rows by a map, what is not finite, values that survive a second packing. */
#include "bench.h"
#include "ops/row8/row8.h"

#include <math.h>

enum { ROWS = 3, D = 200, BYTES = 208 };

static void known_codes(void **state)
{
    struct bench *b = *state;
    float x[ROWS * D] = {0}, y[2 * D];
    uint8_t q[2 * BYTES];
    const int32_t src[2] = {5, -1}; /* token 2 of two choices each; nothing */
    assert_int_equal(row8_bytes(D), BYTES);
    x[2 * D] = 448; /* the largest code, scale 1 */
    x[2 * D + 1] = -1;
    x[2 * D + 130] = 0.75f; /* a block of its own: 1.5 * 2^8 is the code, so the inverse scale is 2^-9 */
    struct row8_pack_args p = {.x = tensor_2d(x, DT_F32, ROWS, D),
                               .src = tensor_1d((void *)(uintptr_t)src, DT_I32, 2),
                               .q = tensor_2d(q, DT_U8, 2, BYTES),
                               .k = 2};
    memset(q, 77, sizeof q);
    assert_ok(b->ops->row8_pack(&b->lane, &p), &b->e);
    assert_int_equal(q[0], 0x7e);
    assert_int_equal(q[1], 0xb8);
    assert_int_equal(q[D], 127);
    assert_int_equal(q[130], 0x7c);
    assert_int_equal(q[D + 1], 127 - 9);
    for (int i = D + 2; i < 2 * BYTES; i++)
        assert_int_equal(q[i], 0);
    struct row8_unpack_args u = {.q = p.q, .y = tensor_2d(y, DT_F32, 2, D), .k = 1};
    assert_ok(b->ops->row8_unpack(&b->lane, &u), &b->e);
    assert_memory_equal(y, x + (size_t)2 * D, D * sizeof *y); /* all of them are codes */
    for (int i = D; i < 2 * D; i++)
        assert_true(y[i] == 0);
}

static void a_second_packing_changes_nothing(void **state)
{
    struct bench *b = *state;
    float x[ROWS * D], y[2][ROWS * D];
    uint8_t q[ROWS * BYTES];
    double most = 0;
    for (int i = 0; i < ROWS * D; i++)
        x[i] = ldexpf((float)rng_normal(9, (uint64_t)i), i / 64 * 5 - 20);
    for (int pass = 0; pass < 2; pass++) {
        struct row8_pack_args p = {
            .x = tensor_2d(pass == 0 ? x : y[0], DT_F32, ROWS, D), .q = tensor_2d(q, DT_U8, ROWS, BYTES), .k = 1};
        struct row8_unpack_args u = {.q = p.q, .y = tensor_2d(y[pass], DT_F32, ROWS, D), .k = 1};
        assert_ok(b->ops->row8_pack(&b->lane, &p), &b->e);
        assert_ok(b->ops->row8_unpack(&b->lane, &u), &b->e);
    }
    assert_memory_equal(y[0], y[1], sizeof y[0]);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < D; c++) {
            float amax = 0;
            for (int i = c / 128 * 128; i < D && i < c / 128 * 128 + 128; i++)
                amax = fmaxf(amax, fabsf(x[r * D + i]));
            double error = fabs((double)y[0][r * D + c] - (double)x[r * D + c]);
            /* half a unit in the last of four bits, or of the smallest code */
            assert_true(error <= fmax(fabs((double)x[r * D + c]) / 16, (double)amax * 0x1p-17));
            most = fmax(most, error);
        }
    assert_true(most > 0);
}

static void what_is_not_finite_stays_so(void **state)
{
    struct bench *b = *state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int k = 0; k < 3; k++) {
        float x[D] = {0}, y[D];
        uint8_t q[BYTES];
        x[3] = bad[k];
        x[150] = 1;
        struct row8_pack_args p = {.x = tensor_2d(x, DT_F32, 1, D), .q = tensor_2d(q, DT_U8, 1, BYTES), .k = 1};
        struct row8_unpack_args u = {.q = p.q, .y = tensor_2d(y, DT_F32, 1, D), .k = 1};
        assert_ok(b->ops->row8_pack(&b->lane, &p), &b->e);
        assert_ok(b->ops->row8_unpack(&b->lane, &u), &b->e);
        assert_int_equal(q[D], ROW8_NAN);
        for (int i = 0; i < 128; i++)
            assert_true(isnan(y[i]));
        assert_true(y[150] == 1);
    }
}

static void wrong_shapes_are_refused(void **state)
{
    struct bench *b = *state;
    float x[D] = {0};
    uint8_t q[BYTES];
    struct row8_pack_args p = {.x = tensor_2d(x, DT_F32, 1, D), .q = tensor_2d(q, DT_U8, 1, BYTES - 16), .k = 1};
    assert_fails(b->ops->row8_pack(&b->lane, &p), ST_INVALID, &b->e, "expected U8 [1, 208]");
    p.q = tensor_2d(q, DT_U8, 1, BYTES);
    p.k = 0;
    assert_fails(b->ops->row8_pack(&b->lane, &p), ST_INVALID, &b->e, "k is 0");
    struct row8_unpack_args u = {.q = p.q, .y = tensor_2d(x, DT_F32, 1, D - 16), .k = 1};
    assert_fails(b->ops->row8_unpack(&b->lane, &u), ST_INVALID, &b->e, "q");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, open_cpu_bench, close_cpu_bench)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(known_codes),
        TEST(a_second_packing_changes_nothing),
        TEST(what_is_not_finite_stays_so),
        TEST(wrong_shapes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
