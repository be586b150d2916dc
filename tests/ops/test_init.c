/* init: values are those of the random stream at their place in the whole parameter, however it is cut. */
#include "support.h"
#include "ops/init/init.h"

enum { N = 41, KEY = 1234567 };

static void fill(float *y, int64_t first, int64_t n, enum init_kind kind)
{
    struct err e = {0};
    struct init_args a = {.y = tensor_1d(y, DT_F32, n), .a = 0.02, .b = 3, .first = first, .key = KEY, .kind = kind};
    assert_ok(init_host(&a, &e), &e);
}

static void normal_values_are_those_of_the_stream(void **state)
{
    (void)state;
    static const int64_t firsts[] = {0, 1, 2, 7, ((int64_t)1 << 33) + 5};
    for (int k = 0; k < countof(firsts); k++)
        for (int64_t n = 0; n <= N; n += 1 + n / 5) {
            float y[N + 1];
            y[n] = -1;
            fill(y, firsts[k], n, INIT_NORMAL);
            for (int64_t i = 0; i < n; i++)
                assert_true(y[i] == (float)(0.02 * rng_normal(KEY, (uint64_t)(firsts[k] + i))));
            assert_true(y[n] == -1);
        }
}

static void parts_have_the_values_of_the_whole(void **state)
{
    (void)state;
    static const enum init_kind kinds[] = {INIT_NORMAL, INIT_UNIFORM, INIT_LOG_UNIFORM};
    for (int k = 0; k < countof(kinds); k++) {
        float whole[N], parts[N];
        fill(whole, 3, N, kinds[k]);
        fill(parts, 3, 10, kinds[k]);
        fill(parts + 10, 13, 1, kinds[k]);
        fill(parts + 11, 14, N - 11, kinds[k]);
        assert_memory_equal(whole, parts, sizeof whole);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(normal_values_are_those_of_the_stream),
        cmocka_unit_test(parts_have_the_values_of_the_whole),
    };
    return cmocka_run_group_tests_name("init", tests, NULL, NULL);
}
