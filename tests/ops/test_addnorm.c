/* addnorm beyond the descriptor's samples: in place, the mask of the dropout op, rejected
 * arguments. */
#include "support.h"
#include "ops/addnorm/addnorm.h"
#include "ops/dropout/dropout.h"

#include "ops/ops.h"

enum { ROWS = 67, D = 70 };

struct bench {
    struct dev dev;
    struct lane lane;
    const struct ops *ops;
    struct err e;
    int64_t info[4];
    float x[ROWS * D], f[ROWS * D], s[ROWS * D], y[ROWS * D], rstd[ROWS], w[D];
};

static struct tensor matrix(float *data) { return tensor_2d(data, DT_F32, ROWS, D); }
static struct tensor vector(float *data) { return tensor_1d(data, DT_F32, D); }

static int open_bench(void **state)
{
    struct bench *t = calloc(1, sizeof *t);
    assert_non_null(t);
    assert_ok(dev_open(&t->dev, DEV_CPU, 0, &t->e), &t->e);
    t->lane = (struct lane){.dev = &t->dev, .err = &t->e};
    t->ops = ops_for(&t->dev);
    t->info[0] = 9;
    t->info[1] = 1000;
    for (int i = 0; i < ROWS * D; i++) {
        t->x[i] = (float)rng_normal(1, (uint64_t)i);
        t->f[i] = (float)rng_normal(2, (uint64_t)i);
    }
    for (int i = 0; i < D; i++)
        t->w[i] = (float)rng_normal(3, (uint64_t)i);
    *state = t;
    return 0;
}

static int close_bench(void **state)
{
    struct bench *t = *state;
    dev_close(&t->dev);
    free(t);
    return 0;
}

static struct addnorm_fwd_args forward(struct bench *t)
{
    return (struct addnorm_fwd_args){.x = matrix(t->x),
                                     .f = matrix(t->f),
                                     .w = vector(t->w),
                                     .s = matrix(t->s),
                                     .y = matrix(t->y),
                                     .rstd = tensor_1d(t->rstd, DT_F32, ROWS),
                                     .eps = 1e-5};
}

static struct dropout_rule half(struct bench *t)
{
    return (struct dropout_rule){.p = 0.5, .key = 42, .seq = 5, .info = tensor_1d(t->info, DT_I64, 4)};
}

static void the_stream_may_be_updated_in_place(void **state)
{
    struct bench *t = *state;
    for (int dropped = 0; dropped < 2; dropped++) {
        float y[ROWS * D], s[ROWS * D], x[ROWS * D];
        struct addnorm_fwd_args a = forward(t);
        if (dropped)
            a.drop = half(t);
        assert_ok(t->ops->addnorm_fwd(&t->lane, &a), &t->e);
        memcpy(y, t->y, sizeof y);
        memcpy(s, t->s, sizeof s);
        memcpy(x, t->x, sizeof x);
        a.x = a.s = matrix(x);
        memset(t->y, 0xFF, sizeof t->y);
        assert_ok(t->ops->addnorm_fwd(&t->lane, &a), &t->e);
        assert_memory_equal(x, s, sizeof s);
        assert_memory_equal(t->y, y, sizeof y);
    }
}

static void the_mask_is_that_of_the_dropout_op(void **state)
{
    struct bench *t = *state;
    float dropped[ROWS * D];
    struct dropout_args d = {.x = matrix(t->f), .y = matrix(dropped), .rule = half(t)};
    assert_ok(t->ops->dropout(&t->lane, &d), &t->e);
    memset(t->x, 0, sizeof t->x);
    struct addnorm_fwd_args a = {.x = matrix(t->x), .f = matrix(t->f), .s = matrix(t->s), .drop = half(t)};
    assert_ok(t->ops->addnorm_fwd(&t->lane, &a), &t->e);
    int zeros = 0;
    for (int i = 0; i < ROWS * D; i++) {
        assert_true(t->s[i] == dropped[i]);
        zeros += t->s[i] == 0;
    }
    assert_in_range(zeros, ROWS * D * 45 / 100, ROWS * D * 55 / 100);
    /* Backward drops the same channels. */
    float df[ROWS * D];
    struct addnorm_bwd_args b = {.ds = matrix(t->f), .dx = matrix(t->y), .df = matrix(df), .drop = half(t)};
    assert_ok(t->ops->addnorm_bwd(&t->lane, &b), &t->e);
    assert_memory_equal(t->y, t->f, sizeof t->y);
    for (int i = 0; i < ROWS * D; i++)
        assert_true(df[i] == dropped[i]);
}

static void the_gradient_may_replace_the_incoming_one(void **state)
{
    struct bench *t = *state;
    static float ds[ROWS * D], dx[ROWS * D], dw[D], dw2[D], work[4 * D];
    struct addnorm_fwd_args f = forward(t);
    assert_ok(t->ops->addnorm_fwd(&t->lane, &f), &t->e);
    memcpy(ds, t->f, sizeof ds);
    struct addnorm_bwd_args b = {.dy = matrix(t->x),
                                 .ds = matrix(ds),
                                 .s = f.s,
                                 .w = f.w,
                                 .rstd = f.rstd,
                                 .dx = matrix(dx),
                                 .dw = vector(dw),
                                 .work = tensor_1d(work, DT_U8, sizeof work)};
    assert_true(t->ops->addnorm_bwd_work(&b) <= (int64_t)sizeof work);
    assert_ok(t->ops->addnorm_bwd(&t->lane, &b), &t->e);
    b.dx = b.ds;
    b.dw = vector(dw2);
    assert_ok(t->ops->addnorm_bwd(&t->lane, &b), &t->e);
    assert_memory_equal(ds, dx, sizeof dx);
    assert_memory_equal(dw, dw2, sizeof dw);
}

static void no_rows_need_no_scratch_and_give_zero_sums(void **state)
{
    struct bench *t = *state;
    float dw[D], dbias[D];
    memset(dw, 0xFF, sizeof dw);
    memset(dbias, 0xFF, sizeof dbias);
    struct tensor none = tensor_2d(t->x, DT_F32, 0, D), rstd = tensor_1d(t->rstd, DT_F32, 0);
    struct addnorm_bwd_args b = {.dy = none,
                                 .ds = none,
                                 .s = none,
                                 .w = vector(t->w),
                                 .rstd = rstd,
                                 .dx = none,
                                 .dw = vector(dw),
                                 .dbias = vector(dbias)};
    assert_int_equal(t->ops->addnorm_bwd_work(&b), 0);
    assert_ok(t->ops->addnorm_bwd(&t->lane, &b), &t->e);
    for (int i = 0; i < D; i++)
        assert_true(dw[i] == 0 && dbias[i] == 0);
}

static void arguments_that_do_not_fit_together_are_refused(void **state)
{
    struct bench *t = *state;
    struct tensor none = {0};
    struct addnorm_fwd_args f = forward(t);
    f.s = none;
    assert_fails(t->ops->addnorm_fwd(&t->lane, &f), ST_INVALID, &t->e, "s is missing, f is given");
    f = forward(t);
    f.f = f.s = none;
    f.bias = vector(t->w);
    assert_fails(t->ops->addnorm_fwd(&t->lane, &f), ST_INVALID, &t->e, "bias is given without f");
    f = forward(t);
    f.rstd = none;
    assert_fails(t->ops->addnorm_fwd(&t->lane, &f), ST_INVALID, &t->e, "w is given without rstd");
    f.w = none;
    assert_fails(t->ops->addnorm_fwd(&t->lane, &f), ST_INVALID, &t->e, "rstd is missing, y is given");
    f = forward(t);
    f.rstd = tensor_1d(t->rstd, DT_F32, ROWS - 1);
    assert_fails(t->ops->addnorm_fwd(&t->lane, &f), ST_INVALID, &t->e, "rstd");
    f = forward(t);
    f.drop = half(t);
    f.drop.p = 1;
    assert_fails(t->ops->addnorm_fwd(&t->lane, &f), ST_INVALID, &t->e, "p is 1");
    f.drop = half(t);
    f.drop.info = none;
    assert_fails(t->ops->addnorm_fwd(&t->lane, &f), ST_INVALID, &t->e, "info");

    f = forward(t);
    struct addnorm_bwd_args b = {.dy = f.y, .s = f.s, .rstd = f.rstd, .dx = matrix(t->x), .dw = vector(t->w)};
    assert_fails(t->ops->addnorm_bwd(&t->lane, &b), ST_INVALID, &t->e, "dw is given without w");
    b.w = vector(t->w);
    assert_fails(t->ops->addnorm_bwd(&t->lane, &b), ST_INVALID, &t->e, "work has 0 bytes");
    b.s = none;
    assert_fails(t->ops->addnorm_bwd(&t->lane, &b), ST_INVALID, &t->e, "tensor s is missing");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_stream_may_be_updated_in_place, open_bench, close_bench),
        cmocka_unit_test_setup_teardown(the_mask_is_that_of_the_dropout_op, open_bench, close_bench),
        cmocka_unit_test_setup_teardown(the_gradient_may_replace_the_incoming_one, open_bench, close_bench),
        cmocka_unit_test_setup_teardown(no_rows_need_no_scratch_and_give_zero_sums, open_bench, close_bench),
        cmocka_unit_test_setup_teardown(arguments_that_do_not_fit_together_are_refused, open_bench, close_bench),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
