/* gemm beyond what the descriptor's samples ask: garbage in C, bad shapes and strides, known
 * values. */
#include "bench.h"
#include "ops/gemm/gemm.h"

#include "ops/cpu_gemm.h"

static void the_product_of_two_known_matrices_is_right(void **state)
{
    (void)state;
    struct bench t;
    open_bench(&t, DEV_CPU);
    float a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 0, -1, 2, 1, 1}, bias[] = {10, 20}, c[4];
    struct gemm_args g = {.a = tensor_2d(a, DT_F32, 2, 3),
                          .b = tensor_2d(b, DT_F32, 3, 2),
                          .c = tensor_2d(c, DT_F32, 2, 2),
                          .bias = tensor_1d(bias, DT_F32, 2),
                          .alpha = 2};
    assert_ok(t.ops->gemm(&t.lane, &g), &t.e);
    const float want[] = {2 * 2 + 10, 2 * 7 + 20, 2 * 5 + 10, 2 * 16 + 20};
    for (int i = 0; i < 4; i++)
        assert_true(c[i] == want[i]);
    /* The bias is added again where C is kept. */
    g.alpha = 0;
    g.acc_c = true;
    assert_ok(t.ops->gemm(&t.lane, &g), &t.e);
    for (int i = 0; i < 4; i++)
        assert_true(c[i] == want[i] + bias[i % 2]);
    dev_close(&t.dev);
}

static void beta_zero_never_reads_c_of(int M, int N, int K)
{
    float *a = calloc((size_t)(M * K), sizeof *a), *b = calloc((size_t)(N * K), sizeof *b);
    float *bias = calloc((size_t)N, sizeof *bias), *c = calloc((size_t)(M * N), sizeof *c);
    assert_true(a != NULL && b != NULL && bias != NULL && c != NULL);
    struct bench t;
    open_bench(&t, DEV_CPU);
    for (int variant = 0; variant < 32; variant++) {
        bool vector = variant & 8, no_k = variant & 16;
        struct gemm_args g = {.trans_a = variant & 1, .trans_b = variant & 2, .alpha = 1};
        int64_t m = vector ? 1 : M, k = no_k ? 0 : K;
        g.a = g.trans_a ? tensor_2d(a, DT_F32, k, m) : tensor_2d(a, DT_F32, m, k);
        g.b = g.trans_b ? tensor_2d(b, DT_F32, N, k) : tensor_2d(b, DT_F32, k, N);
        g.c = tensor_2d(c, DT_F32, m, N);
        if (variant & 4)
            g.bias = tensor_1d(bias, DT_F32, N);
        for (int i = 0; i < M * N; i++)
            c[i] = NAN;
        assert_ok(t.ops->gemm(&t.lane, &g), &t.e);
        for (int64_t i = 0; i < m * N; i++)
            assert_true(c[i] == 0);
    }
    dev_close(&t.dev);
    free(a);
    free(b);
    free(bias);
    free(c);
}

static void beta_zero_never_reads_c(void **state)
{
    (void)state;
    beta_zero_never_reads_c_of(37, 65, 19);
    beta_zero_never_reads_c_of(131, 125, 400); /* in tiles */
}

static void tiles_are_chosen_by_the_whole_shape(void **state)
{
    (void)state;
    struct sgemm g = {.m = 4096, .n = 320, .k = 864, .lda = 864, .ldb = 320, .ldc = 320};
    assert_true(sgemm_prefers_tiles(&g));
    struct sgemm few_rows = g, narrow = g, shallow = g, small = g, ragged = g;
    few_rows.m = 16;
    narrow.n = 33;
    shallow.k = 8;
    small.m = small.n = small.k = 64;
    ragged.n = 100; /* 28 of 128 columns would be for nothing */
    assert_false(sgemm_prefers_tiles(&few_rows));
    assert_false(sgemm_prefers_tiles(&narrow));
    assert_false(sgemm_prefers_tiles(&shallow));
    assert_false(sgemm_prefers_tiles(&small));
    assert_false(sgemm_prefers_tiles(&ragged));
    ragged.n = 1000;
    assert_true(sgemm_prefers_tiles(&ragged));
}

/* What "100 %" means: a rate of every CPU, and unknown (0) where none was measured. How close products come to it is
 * for `braid bench` to say: a busy machine may slow either one down. */
static void a_cpu_has_a_peak_and_others_say_so(void **state)
{
    (void)state;
    struct bench t;
    open_bench(&t, DEV_CPU);
    double peak = dev_peak_flops(&t.dev);
    assert_true(isfinite(peak) && peak > 1e6);
    dev_close(&t.dev);
    open_bench(&t, DEV_REF);
    assert_true(dev_peak_flops(&t.dev) == 0);
    dev_close(&t.dev);
}

static void one_row_may_have_any_stride(void **state)
{
    (void)state;
    struct bench t;
    open_bench(&t, DEV_CPU);
    float a[] = {1, 2, 3}, b[] = {4, 5, 6}, c[] = {0};
    struct gemm_args g = {.a = tensor_2d(a, DT_F32, 1, 3),
                          .b = tensor_2d(b, DT_F32, 1, 3),
                          .c = tensor_2d(c, DT_F32, 1, 1),
                          .trans_b = true,
                          .alpha = 1};
    g.a.stride[0] = g.b.stride[0] = g.c.stride[0] = 0;
    assert_ok(t.ops->gemm(&t.lane, &g), &t.e);
    assert_true(c[0] == 32);
    dev_close(&t.dev);
}

static void wrong_shapes_and_strides_are_refused(void **state)
{
    (void)state;
    const enum dev_kind kinds[] = {DEV_REF, DEV_CPU};
    for (int i = 0; i < countof(kinds); i++) {
        struct bench t;
        open_bench(&t, kinds[i]);
        double mem[64] = {0};
        enum dtype real = t.ops->real;
        const struct gemm_args good = {.a = tensor_2d(mem, real, 2, 3),
                                       .b = tensor_2d(mem, real, 3, 4),
                                       .c = tensor_2d(mem + 32, real, 2, 4),
                                       .alpha = 1};
        assert_ok(t.ops->gemm(&t.lane, &good), &t.e);
        struct gemm_args g = good;
        g.trans_b = true;
        assert_fails(t.ops->gemm(&t.lane, &g), ST_INVALID, &t.e, "tensor b");
        g = good;
        g.a = tensor_2d(mem, real, 3, 3);
        assert_fails(t.ops->gemm(&t.lane, &g), ST_INVALID, &t.e, "tensor a");
        g = good;
        g.bias = tensor_1d(mem, real, 3);
        assert_fails(t.ops->gemm(&t.lane, &g), ST_INVALID, &t.e, "tensor bias");
        g = good;
        g.c.data = NULL;
        assert_fails(t.ops->gemm(&t.lane, &g), ST_INVALID, &t.e, "missing");
        g = good;
        g.b.stride[0] = 3;
        assert_fails(t.ops->gemm(&t.lane, &g), ST_INVALID, &t.e, "rows of b overlap");
        g = good;
        g.a.dtype = DT_I32;
        assert_fails(t.ops->gemm(&t.lane, &g), ST_INVALID, &t.e, "tensor a");
        dev_close(&t.dev);
    }
}

static void sizes_beyond_the_library_are_refused_before_memory_is_touched(void **state)
{
    (void)state;
    struct bench t;
    open_bench(&t, DEV_CPU);
    float x = 7;
    struct gemm_args g = {.a = tensor_2d(&x, DT_F32, 2, 1),
                          .b = tensor_2d(&x, DT_F32, 1, 1),
                          .c = tensor_2d(&x, DT_F32, 2, 1),
                          .alpha = 1};
    g.c.stride[0] = (int64_t)1 << 31;
    assert_fails(t.ops->gemm(&t.lane, &g), ST_UNSUPPORTED, &t.e, "2147483648");
    assert_true(x == 7);
    dev_close(&t.dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_product_of_two_known_matrices_is_right),
        cmocka_unit_test(beta_zero_never_reads_c),
        cmocka_unit_test(tiles_are_chosen_by_the_whole_shape),
        cmocka_unit_test(a_cpu_has_a_peak_and_others_say_so),
        cmocka_unit_test(one_row_may_have_any_stride),
        cmocka_unit_test(wrong_shapes_and_strides_are_refused),
        cmocka_unit_test(sizes_beyond_the_library_are_refused_before_memory_is_touched),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
