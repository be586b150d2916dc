/* Codes that an op makes beside or instead of its result are those of quantise after it, to the bit, on host devices
 * (tests/gpu/check_f8.c: on a GPU and on its emulator): norm8 and adamw. */
#include "support.h"
#include "ops/adamw/adamw.h"
#include "ops/addnorm/addnorm.h"
#include "ops/norm8/norm8.h"
#include "ops/ops.h"
#include "ops/quantise/quantise.h"

enum { ROWS = 144, COLS = 272, N = ROWS * COLS };

static struct err error;
static const enum dev_kind kinds[] = {DEV_REF, DEV_CPU};

/* Numbers of a device's real type. */
static struct tensor numbers(enum dtype type, int rank, const int64_t *dim, uint64_t key)
{
    struct tensor t = tensor_shape(type, rank, dim);
    assert_ok(mem_aligned(&t.data, (size_t)tensor_bytes(&t), DEV_ALIGN, &error), &error);
    for (int64_t i = 0; i < tensor_elems(&t); i++)
        tensor_set(&t, i, key != 0 ? (double)(float)ldexp(rng_normal(key, (uint64_t)i), (int)(i / 97 % 9) - 4) : 0);
    return t;
}
static struct tensor vector(enum dtype type, int64_t n, uint64_t key) { return numbers(type, 1, &n, key); }
static struct tensor matrix(enum dtype type, int64_t rows, int64_t cols, uint64_t key)
{
    return numbers(type, 2, (const int64_t[]){rows, cols}, key);
}

static struct quantise_args new_codes(enum dtype wide, bool square)
{
    struct quantise_args a = {.q = tensor_2d(malloc(N), DT_F8_E4M3, ROWS, COLS),
                              .t = tensor_2d(malloc(N), DT_F8_E4M3, COLS, ROWS),
                              .qs = vector(wide, f8_scales(wide, ROWS, COLS, 128, square).dim[0], 0),
                              .ts = vector(wide, f8_scales(wide, COLS, ROWS, 128, square).dim[0], 0),
                              .block = 128,
                              .square = square};
    assert_true(a.q.data != NULL && a.t.data != NULL);
    return a;
}
static void free_codes(struct quantise_args *a)
{
    free(a->q.data);
    free(a->t.data);
    free(a->qs.data);
    free(a->ts.data);
}
static void expect_same(const struct tensor *a, const struct tensor *b)
{
    assert_memory_equal(a->data, b->data, (size_t)tensor_bytes(a));
}

static void codes_of_norms_are_those_of_the_normed(void **state)
{
    (void)state;
    for (int k = 0; k < countof(kinds) * 2; k++) {
        struct dev d;
        assert_ok(dev_open(&d, kinds[k / 2], 0, &error), &error);
        struct lane lane = {.dev = &d, .err = &error};
        const struct ops *ops = ops_for(&d);
        struct tensor x = matrix(d.real, ROWS, COLS, 1), y = matrix(d.real, ROWS, COLS, 0), w = vector(d.wide, COLS, 2),
                      rstd = vector(d.wide, ROWS, 0), alone = vector(d.wide, ROWS, 0);
        struct addnorm_fwd_args n = {.x = x, .w = w, .y = y, .rstd = rstd, .eps = 1e-5, .zero_centered = k % 2};
        assert_ok(ops->addnorm_fwd(&lane, &n), &error);
        n.y = (struct tensor){0};
        n.rstd = alone;
        assert_ok(ops->addnorm_fwd(&lane, &n), &error);
        expect_same(&rstd, &alone);
        struct quantise_args want = new_codes(d.wide, false), got = new_codes(d.wide, false);
        want.x = y;
        assert_ok(ops->quantise(&lane, &want), &error);
        struct norm8_args a = {.x = x, .rstd = rstd, .w = w, .q = got.q, .qs = got.qs, .block = 128};
        a.zero_centered = k % 2;
        int64_t bytes = ops->norm8_work(&a);
        a.work = tensor_1d(malloc((size_t)bytes), DT_U8, bytes);
        assert_ok(ops->norm8(&lane, &a), &error); /* one orientation after the other */
        a.q = a.qs = (struct tensor){0};
        a.t = got.t;
        a.ts = got.ts;
        assert_ok(ops->norm8(&lane, &a), &error);
        expect_same(&want.q, &got.q);
        expect_same(&want.qs, &got.qs);
        expect_same(&want.t, &got.t);
        expect_same(&want.ts, &got.ts);
        a.work.dim[0] = bytes - 1;
        assert_fails(ops->norm8(&lane, &a), ST_INVALID, &error, "work");
        a.rstd.dim[0] = ROWS - 1;
        assert_fails(norm8_check(&a, &error), ST_INVALID, &error, "tensor rstd");
        free(a.work.data);
        free_codes(&want);
        free_codes(&got);
        void *rest[] = {x.data, y.data, w.data, rstd.data, alone.data};
        for (int i = 0; i < countof(rest); i++)
            free(rest[i]);
        dev_close(&d);
    }
}

static void codes_of_an_update_are_those_of_its_result(void **state)
{
    (void)state;
    for (int k = 0; k < countof(kinds); k++) {
        struct dev d;
        assert_ok(dev_open(&d, kinds[k], 0, &error), &error);
        struct lane lane = {.dev = &d, .err = &error};
        const struct ops *ops = ops_for(&d);
        double hyper[8] = {0.01, 0.1, 0.05}, scale[4] = {1, 0.5, 0, 0};
        struct tensor p = vector(d.wide, N, 3), g = vector(d.wide, N, 4), m = vector(d.wide, N, 5),
                      v = vector(d.wide, N, 0);
        struct quantise_args want = new_codes(d.wide, true), got = new_codes(d.wide, true);
        struct adamw_args a = {.p = p, .g = g, .m = m, .v = v, .q = got.q, .qs = got.qs, .t = got.t, .ts = got.ts};
        a.hyper = tensor_1d(hyper, DT_F64, 8);
        a.scale = tensor_1d(scale, DT_F64, 4);
        a.beta1 = 0.9;
        a.beta2 = 0.95;
        a.eps = 1e-8;
        a.rate = 1;
        assert_ok(ops->adamw(&lane, &a), &error);
        want.x = tensor_2d(p.data, d.wide, ROWS, COLS);
        assert_ok(ops->quantise(&lane, &want), &error);
        expect_same(&want.q, &got.q);
        expect_same(&want.qs, &got.qs);
        expect_same(&want.t, &got.t);
        expect_same(&want.ts, &got.ts);
        memset(got.q.data, 0x55, N); /* a skipped update writes nothing */
        scale[2] = 1;
        assert_ok(ops->adamw(&lane, &a), &error);
        for (int i = 0; i < N; i++)
            assert_int_equal(((uint8_t *)got.q.data)[i], 0x55);
        a.q.dim[0] = ROWS - 1;
        assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "q");
        a.q = (struct tensor){0};
        assert_fails(adamw_check(&a, &error), ST_INVALID, &error, "codes t without codes q");
        free_codes(&want);
        free_codes(&got);
        void *rest[] = {p.data, g.data, m.data, v.data};
        for (int i = 0; i < countof(rest); i++)
            free(rest[i]);
        dev_close(&d);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codes_of_norms_are_those_of_the_normed),
        cmocka_unit_test(codes_of_an_update_are_those_of_its_result),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
