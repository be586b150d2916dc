/* cache_store and colsum beyond the descriptors' samples: strided keys, the end of the cache,
 * absent scratch. */
#include "bench.h"
#include "ops/cache/cache.h"
#include "ops/colsum/colsum.h"

/* Keys are a slice of the rows of a fused projection, so their rows are far apart. */
static void strided_keys_land_in_their_rows(void **state)
{
    (void)state;
    const enum dev_kind kinds[] = {DEV_REF, DEV_CPU};
    for (int i = 0; i < countof(kinds); i++) {
        struct bench t;
        open_bench(&t, kinds[i]);
        enum { B = 2, S = 3, G = 2, D = 4, WIDE = 40, MAX = 7 };
        double fused[B * S * WIDE], store[B * MAX * G * D];
        int64_t start = 4;
        struct tensor all = tensor_3d(fused, t.ops->real, B, S, WIDE);
        for (int64_t k = 0; k < tensor_elems(&all); k++)
            tensor_set(&all, k, (double)k);
        struct tensor keys = tensor_cols(&all, 10, G * D);
        struct cache_store_args a = {.x = tensor_split_last(&keys, G, D),
                                     .cache = tensor_4d(store, t.ops->real, B, MAX, G, D),
                                     .start = tensor_1d(&start, DT_I64, 1)};
        for (int64_t k = 0; k < tensor_elems(&a.cache); k++)
            tensor_set(&a.cache, k, -1);
        assert_ok(t.ops->cache_store(&t.lane, &a), &t.e);
        for (int b = 0; b < B; b++)
            for (int row = 0; row < MAX; row++)
                for (int c = 0; c < G * D; c++) {
                    double want = row < start ? -1 : (b * S + row - (int)start) * WIDE + 10 + c;
                    assert_true(tensor_get(&a.cache, (b * MAX + row) * G * D + c) == want);
                }
        dev_close(&t.dev);
    }
}

static void rows_beyond_the_cache_are_refused_and_nothing_is_written(void **state)
{
    (void)state;
    const enum dev_kind kinds[] = {DEV_REF, DEV_CPU};
    const int64_t bad[] = {-1, 3, INT64_MAX, INT64_MIN};
    for (int i = 0; i < countof(kinds); i++) {
        struct bench t;
        open_bench(&t, kinds[i]);
        double x[8] = {0}, store[16];
        memset(store, 0x55, sizeof store);
        int64_t start = 2;
        struct cache_store_args a = {.x = tensor_4d(x, t.ops->real, 1, 2, 1, 4),
                                     .cache = tensor_4d(store, t.ops->real, 1, 4, 1, 4),
                                     .start = tensor_1d(&start, DT_I64, 1)};
        for (int k = 0; k < countof(bad); k++) {
            start = bad[k];
            assert_fails(t.ops->cache_store(&t.lane, &a), ST_INVALID, &t.e, "a cache of 4 rows");
        }
        for (size_t k = 0; k < sizeof store; k++)
            assert_int_equal(((unsigned char *)store)[k], 0x55);
        start = 2;
        assert_ok(t.ops->cache_store(&t.lane, &a), &t.e);
        a.cache.stride[3] = 2;
        assert_fails(t.ops->cache_store(&t.lane, &a), ST_INVALID, &t.e, "strided last dimension");
        dev_close(&t.dev);
    }
}

static void a_column_sum_of_no_rows_is_zero_without_scratch(void **state)
{
    (void)state;
    struct bench t;
    open_bench(&t, DEV_CPU);
    float x[3] = {1, 2, 3}, out[3] = {NAN, NAN, NAN};
    struct colsum_args a = {.x = tensor_2d(x, DT_F32, 0, 3), .out = tensor_1d(out, DT_F32, 3)};
    assert_ok(t.ops->colsum(&t.lane, &a), &t.e);
    assert_true(out[0] == 0 && out[1] == 0 && out[2] == 0);
    a.x = tensor_2d(x, DT_F32, 1, 3);
    assert_fails(t.ops->colsum(&t.lane, &a), ST_INVALID, &t.e, "work has 0 bytes, 12 needed");
    a.out = tensor_1d(out, DT_F32, 2);
    assert_fails(t.ops->colsum(&t.lane, &a), ST_INVALID, &t.e, "tensor out");
    dev_close(&t.dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strided_keys_land_in_their_rows),
        cmocka_unit_test(rows_beyond_the_cache_are_refused_and_nothing_is_written),
        cmocka_unit_test(a_column_sum_of_no_rows_is_zero_without_scratch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
