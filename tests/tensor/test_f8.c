/* FP8 codes and scales: every code, a dense sweep of floats against a search over all codes,
 * saturation, ties, scales. */
#include "support.h"
#include "tensor/f8.h"

static const enum dtype formats[] = {DT_F8_E4M3, DT_F8_E5M2};

static int largest_code(enum dtype t) { return t == DT_F8_E5M2 ? 0x7b : 0x7e; }

/* The value by the definition of the format, in double. */
static double value_of(int code, enum dtype t)
{
    int bits = t == DT_F8_E5M2 ? 2 : 3, bias = t == DT_F8_E5M2 ? 15 : 7, e = (code & 0x7f) >> bits,
        m = code & ((1 << bits) - 1);
    double v = e == 0 ? ldexp(m, 1 - bias - bits) : ldexp(1 + ldexp(m, -bits), e - bias);
    return code & 0x80 ? -v : v;
}

/* The nearest code by search; of two equally near ones the even. */
static int nearest(double v, enum dtype t)
{
    int low = 0, high = largest_code(t);
    double a = fabs(v);
    if (a >= value_of(high, t))
        return high | (signbit(v) ? 0x80 : 0);
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (value_of(middle, t) <= a)
            low = middle;
        else
            high = middle;
    }
    double below = a - value_of(low, t), above = value_of(high, t) - a;
    int code = below < above || (below == above && low % 2 == 0) ? low : high;
    return code | (signbit(v) ? 0x80 : 0);
}

static void every_code_decodes_and_encodes_to_itself(void **state)
{
    (void)state;
    for (int f = 0; f < countof(formats); f++)
        for (int code = 0; code < 256; code++) {
            float v = f8_to_f32((uint8_t)code, formats[f]);
            if ((code & 0x7f) > largest_code(formats[f])) { /* NaN, and the infinities of E5M2 */
                assert_true(!isfinite(v));
                continue;
            }
            assert_true((double)v == value_of(code, formats[f]));
            assert_int_equal(f8_from_f32(v, formats[f]), code);
            assert_int_equal(f8_from_f64((double)v, formats[f]), code);
        }
}

static void check_float(uint32_t bits, enum dtype t)
{
    float v;
    memcpy(&v, &bits, sizeof v);
    int want = isnan(v) ? F8_NAN : nearest((double)v, t);
    if (f8_from_f32(v, t) != want || f8_from_f64((double)v, t) != want)
        fail_msg("%s of %a: 0x%02x from float, 0x%02x from double, expected 0x%02x", dtype_name(t), (double)v,
                 f8_from_f32(v, t), f8_from_f64((double)v, t), want);
}

static void floats_round_to_the_nearest_code(void **state)
{
    (void)state;
    for (int f = 0; f < countof(formats); f++) {
        for (uint64_t bits = 0; bits < 1ull << 32; bits += 4001) /* all exponents, both signs, infinities and NaN */
            check_float((uint32_t)bits, formats[f]);
        for (int code = 0; code < largest_code(formats[f]); code++) { /* ties and their neighbours */
            float tie = (float)(0.5 * (value_of(code, formats[f]) + value_of(code + 1, formats[f])));
            uint32_t bits;
            memcpy(&bits, &tie, sizeof bits);
            for (int d = -1; d <= 1; d++) {
                check_float(bits + (uint32_t)d, formats[f]);
                check_float((bits + (uint32_t)d) | 0x80000000u, formats[f]);
            }
        }
    }
    /* From double the tie is missed where a float would have hit it. */
    assert_int_equal(f8_from_f64(1.0625 + 1e-12, DT_F8_E4M3), f8_from_f32(1.125f, DT_F8_E4M3));
    assert_int_equal(f8_from_f64(1.0625, DT_F8_E4M3), f8_from_f32(1, DT_F8_E4M3));
}

static void what_is_too_large_saturates_and_nan_stays(void **state)
{
    (void)state;
    assert_int_equal(f8_from_f32(INFINITY, DT_F8_E4M3), 0x7e);
    assert_int_equal(f8_from_f32(-INFINITY, DT_F8_E5M2), 0xfb);
    assert_int_equal(f8_from_f64(-1e300, DT_F8_E4M3), 0xfe);
    assert_int_equal(f8_from_f32(-NAN, DT_F8_E5M2), F8_NAN);
    assert_int_equal(f8_from_f64(NAN, DT_F8_E4M3), F8_NAN);
    assert_true(isnan(f8_to_f32(F8_NAN, DT_F8_E4M3)) && isnan(f8_to_f32(0xff, DT_F8_E5M2)));
}

/* The largest power of two that keeps amax within the format. */
static void scales_are_the_largest_that_fit(void **state)
{
    (void)state;
    for (int f = 0; f < countof(formats); f++) {
        double top = value_of(largest_code(formats[f]), formats[f]);
        for (uint64_t bits = 1; bits < 0x7f800000u; bits += 9973) {
            uint32_t u = (uint32_t)bits;
            float amax;
            memcpy(&amax, &u, sizeof amax);
            int k = f8_exponent(amax, formats[f]);
            assert_int_equal(k, f8_exponent_f64((double)amax, formats[f]));
            assert_true(ldexp((double)amax, k) <= top && (k == F8_EXPONENT_MAX || ldexp((double)amax, k + 1) > top));
            assert_true((double)f8_power(k) == ldexp(1, k) && (double)f8_power(-k) == ldexp(1, -k));
        }
        assert_int_equal(f8_exponent(0, formats[f]), 0);
        assert_int_equal(f8_exponent_f64(0, formats[f]), 0);
    }
    assert_int_equal(f8_exponent(448, DT_F8_E4M3), 0);
    assert_int_equal(f8_exponent(448.5f, DT_F8_E4M3), -1);
    assert_int_equal(f8_exponent(57344, DT_F8_E5M2), 0);
}

static void tensors_of_codes_read_and_write_values(void **state)
{
    (void)state;
    uint8_t code[3] = {0};
    struct tensor t = tensor_1d(code, DT_F8_E4M3, 3), e = tensor_1d(code, DT_F8_E8M0, 3);
    tensor_set(&t, 1, -1.5);
    assert_int_equal(code[1], 0xbc);
    assert_true(tensor_get(&t, 1) == -1.5);
    tensor_set(&e, 2, 0.25);
    assert_int_equal(code[2], 125);
    assert_true(tensor_get(&e, 2) == 0.25);
    tensor_set(&e, 2, NAN);
    assert_true(isnan(tensor_get(&e, 2)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_decodes_and_encodes_to_itself),  cmocka_unit_test(floats_round_to_the_nearest_code),
        cmocka_unit_test(what_is_too_large_saturates_and_nan_stays), cmocka_unit_test(scales_are_the_largest_that_fit),
        cmocka_unit_test(tensors_of_codes_read_and_write_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
