/* mhc_rebuild: the bits of the step-by-step path, on every device and instruction set; arguments it refuses. Values
 * against the reference are in the descriptor's tests. */
#include "ops/ops.h"
#include "support.h"
#include "ops/mhc/mhc.h"

#include "ops/mhc/mhc_rebuild_int.h"
#include "ops/opcheck.h"

static struct err e;

static struct tensor fresh(const struct tensor *like)
{
    struct tensor t = tensor_2d(NULL, like->dtype, like->dim[0], like->dim[1]);
    t.data = calloc((size_t)tensor_bytes(&t) + 1, 1);
    assert_non_null(t.data);
    return t;
}

static void assert_same_rows(const struct tensor *got, const struct tensor *want, const char *text, const char *by,
                             int layer)
{
    size_t size = dtype_bytes(got->dtype), row = (size_t)got->dim[1] * size;
    for (int64_t r = 0; r < got->dim[0]; r++)
        if (memcmp((char *)got->data + (size_t)(r * got->stride[0]) * size,
                   (char *)want->data + (size_t)(r * want->stride[0]) * size, row) != 0)
            fail_msg("'%s': row %lld of layer %d differs from that of %s", text, (long long)r, layer, by);
}

/* Every layer by combine, and by a boundary that only closes, each from what the one before it stored. */
static void check_bits(const struct ops *ops, struct lane *lane, const struct op_sample *s, bool strided)
{
    const struct op_desc *d = op_find("mhc_rebuild");
    struct op_call c;
    struct op_block block;
    assert_ok(op_call_sample(&c, d, s, ops, &e), &e);
    assert_ok(op_call_alloc(&c, &block, 9, strided, &e), &e);
    assert_ok(op_call_run(ops, lane, &c), &e);
    OP_UNPACK(mhc_rebuild, packed, &c);
    struct mhc_rebuild_args a = *packed;
    int64_t n = a.rule.streams;
    struct tensor x = a.x, made[MHC_REBUILD_LAYERS], closed = fresh(&a.x);
    for (int l = 0; l < a.layers; l++) {
        const struct mhc_rebuild_layer *at = &a.layer[l];
        made[l] = fresh(&a.x);
        struct mhc_combine_fwd_args combine = {.x = x,
                                               .f = at->f,
                                               .bias = at->bias,
                                               .post = tensor_cols(&at->coef, n, n),
                                               .res = tensor_cols(&at->coef, 2 * n, n * n),
                                               .y = made[l],
                                               .rule = a.rule,
                                               .drop = a.drop};
        combine.drop.key = at->key;
        struct mhc_boundary_fwd_args close = {.x = x,
                                              .f = at->f,
                                              .bias = at->bias,
                                              .coef_in = at->coef,
                                              .y = closed,
                                              .rule = a.rule,
                                              .drop = combine.drop,
                                              .reuse = true};
        close.work = tensor_1d(NULL, DT_U8, ops->mhc_boundary_fwd_work ? ops->mhc_boundary_fwd_work(&close) : 0);
        close.work.data = malloc((size_t)close.work.dim[0] + 1);
        assert_non_null(close.work.data);
        assert_ok(ops->mhc_combine_fwd(lane, &combine), &e);
        assert_ok(ops->mhc_boundary_fwd(lane, &close), &e);
        assert_same_rows(&closed, &made[l], s->text, "combine", l + 1);
        if (present(&at->y))
            assert_same_rows(&at->y, &made[l], s->text, "combine", l + 1);
        x = made[l];
        free(close.work.data);
    }
    assert_true(op_guards_intact(&c, &block));
    for (int l = 0; l < a.layers; l++)
        free(made[l].data);
    free(closed.data);
    op_call_free(&block);
}

static void layers_have_the_bits_of_the_step_by_step_path(void **state)
{
    (void)state;
    const struct op_desc *d = op_find("mhc_rebuild");
    for (int kind = 0; kind < 2; kind++) {
        struct dev dev;
        assert_ok(dev_open(&dev, kind ? DEV_CPU : DEV_REF, 2, &e), &e);
        struct lane lane = {.dev = &dev, .err = &e};
        const struct ops *ops = &ops_ref;
        for (int v = 0; kind == 0 ? v == 0 : (ops = ops_cpu_variant(v)) != NULL; v++)
            for (int i = 0; i < d->n_samples; i++)
                for (int strided = 0; strided < 2; strided++)
                    check_bits(ops, &lane, &d->samples[i], strided == 1);
        dev_close(&dev);
    }
}

/* Two layers with two streams of two channels, by hand. */
static void a_small_case_has_the_values_it_should(void **state)
{
    (void)state;
    static const double x[4] = {1, 2, 3, 4}, f[2][2] = {{1, -1}, {2, 0}}, bias[2] = {0.5, 0};
    /* pre (not used), post, res by rows: profile S multiplies from the left */
    static const double coef[2][8] = {{9, 9, 1, 2, 1, 0, 1, 1}, {9, 9, 0, 1, 0, 1, 1, 0}};
    static const double want[2][4] = {{1 + 1.5, 2 - 1, 1 + 3 + 3, 2 + 4 - 2}, {7, 4, 2.5 + 2, 1}};
    for (int kind = 0; kind < 2; kind++) {
        struct dev dev;
        assert_ok(dev_open(&dev, kind ? DEV_CPU : DEV_REF, 1, &e), &e);
        struct lane lane = {.dev = &dev, .err = &e};
        const struct ops *ops = ops_for(&dev);
        double room[64] = {0};
        char *at = (char *)room;
        struct tensor t[9];
        static const int64_t cols[9] = {4, 2, 8, 4, 2, 8, 4, 2, 4};
        for (int i = 0; i < 9; i++, at += tensor_bytes(&t[i - 1]))
            t[i] = tensor_2d(at, ops->real, 1, cols[i]);
        for (int i = 0; i < 4; i++)
            tensor_set(&t[0], i, x[i]);
        for (int l = 0; l < 2; l++)
            for (int i = 0; i < 8; i++) {
                tensor_set(&t[2 + 3 * l], i, coef[l][i]);
                if (i < 2)
                    tensor_set(&t[1 + 3 * l], i, f[l][i]);
            }
        tensor_set(&t[7], 0, bias[0]);
        struct mhc_rebuild_args a = {.x = t[0], .layers = 2, .rule = {.streams = 2, .profile = MHC_S, .iterations = 1}};
        a.layer[0] =
            (struct mhc_rebuild_layer){.f = t[1], .bias = tensor_1d(t[7].data, ops->real, 2), .coef = t[2], .y = t[3]};
        a.layer[1] = (struct mhc_rebuild_layer){.f = t[4], .coef = t[5], .y = t[6]};
        assert_ok(ops->mhc_rebuild(&lane, &a), &e);
        for (int l = 0; l < 2; l++)
            for (int i = 0; i < 4; i++)
                assert_true(tensor_get(&t[3 + 3 * l], i) == want[l][i]);
        /* Without the first y the second is the same. */
        for (int i = 0; i < 4; i++)
            tensor_set(&t[6], i, 77);
        tensor_set(&t[3], 0, 55);
        a.layer[0].y = (struct tensor){0};
        assert_ok(ops->mhc_rebuild(&lane, &a), &e);
        assert_true(tensor_get(&t[3], 0) == 55);
        for (int i = 0; i < 4; i++)
            assert_true(tensor_get(&t[6], i) == want[1][i]);
        dev_close(&dev);
    }
}

static void wrong_arguments_are_refused(void **state)
{
    (void)state;
    float room[4096] = {0};
    struct dev dev;
    assert_ok(dev_open(&dev, DEV_CPU, 1, &e), &e);
    struct lane lane = {.dev = &dev, .err = &e};
    const struct ops *ops = ops_for(&dev);
    struct mhc_rebuild_args good = {
        .x = tensor_2d(room, DT_F32, 3, 8), .layers = 2, .rule = {.streams = 2, .iterations = 1}};
    for (int l = 0; l < 2; l++)
        good.layer[l] = (struct mhc_rebuild_layer){.f = tensor_2d(room + 100, DT_F32, 3, 4),
                                                   .coef = tensor_2d(room + 200, DT_F32, 3, 8),
                                                   .y = tensor_2d(room + 300 + 100 * l, DT_F32, 3, 8)};
    assert_ok(ops->mhc_rebuild(&lane, &good), &e);
    struct mhc_rebuild_args a = good;
    a.layers = 0;
    assert_fails(ops->mhc_rebuild(&lane, &a), ST_INVALID, &e, "0 layers");
    a.layers = MHC_REBUILD_LAYERS + 1;
    assert_fails(ops->mhc_rebuild(&lane, &a), ST_INVALID, &e, "8 layers");
    a = good;
    a.layer[1].y = (struct tensor){0};
    assert_fails(ops->mhc_rebuild(&lane, &a), ST_INVALID, &e, "y of layer 2");
    a = good;
    a.layer[1].coef = tensor_2d(room + 200, DT_F32, 3, 7);
    assert_fails(ops->mhc_rebuild(&lane, &a), ST_INVALID, &e, "coef2");
    a = good;
    a.layer[1].coef = (struct tensor){0};
    assert_fails(ops->mhc_rebuild(&lane, &a), ST_INVALID, &e, "coef2");
    a = good;
    a.layer[0].f = tensor_2d(room + 100, DT_F32, 3, 5);
    assert_fails(ops->mhc_rebuild(&lane, &a), ST_INVALID, &e, "f");
    a = good;
    a.rule.streams = 1;
    assert_fails(ops->mhc_rebuild(&lane, &a), ST_INVALID, &e, "1 streams");
    struct op_call gap;
    assert_fails(op_call_sample(&gap, op_find("mhc_rebuild"), &(struct op_sample){"layers=4 no_f2=1"}, ops, &e),
                 ST_INVALID, &e, "f3 is given, but f2 is not");
    a = good;
    a.drop.p = 0.5; /* without info */
    assert_int_not_equal(ops->mhc_rebuild(&lane, &a), ST_OK);
    dev_close(&dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_have_the_bits_of_the_step_by_step_path),
        cmocka_unit_test(a_small_case_has_the_values_it_should),
        cmocka_unit_test(wrong_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
