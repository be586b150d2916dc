/* xent: known losses, extreme logits, ignored labels, chunks, z-loss, errors. test_ops checks the
 * gradients of the plain loss and cpu against ref on awkward shapes. */
#include "support.h"
#include "ops/xent/xent.h"

#include "ops/ops.h"

enum { MAX_ROWS = 40, MAX_D = 40, MAX_VOCAB = 300 };

/* One head with room for everything, in the real type of its device. */
struct head {
    struct err e;
    struct dev dev;
    struct lane lane;
    const struct ops *ops;
    double h[MAX_ROWS * MAX_D], w[MAX_VOCAB * MAX_D], bias[MAX_VOCAB], nll[MAX_ROWS], logits[MAX_ROWS * MAX_VOCAB];
    double dh[MAX_ROWS * MAX_D], dw[MAX_VOCAB * MAX_D], dbias[MAX_VOCAB], scale[1], loss[2];
    int32_t label[MAX_ROWS];
    char work[MAX_ROWS * (MAX_VOCAB + 16) * 4 + MAX_ROWS * 8 + 64] __attribute__((aligned(64)));
    struct xent_args a;
    bool opened;
};

/* Everything random, gradients asked for, all outputs NaN. */
static void head_open(struct head *s, enum dev_kind kind, int64_t rows, int64_t d, int64_t vocab, bool bias)
{
    if (s->opened)
        dev_close(&s->dev);
    memset(s, 0xFF, sizeof *s);
    s->e = (struct err){0};
    assert_ok(dev_open(&s->dev, kind, 0, &s->e), &s->e);
    s->opened = true;
    s->lane = (struct lane){.dev = &s->dev, .err = &s->e};
    s->ops = ops_for(&s->dev);
    enum dtype real = s->ops->real;
    s->a = (struct xent_args){.h = tensor_2d(s->h, real, rows, d),
                              .w = tensor_2d(s->w, real, vocab, d),
                              .label = tensor_1d(s->label, DT_I32, rows),
                              .scale = tensor_1d(s->scale, DT_F64, 1),
                              .loss = tensor_1d(s->loss, DT_F64, 2),
                              .nll = tensor_1d(s->nll, real, rows),
                              .logits = tensor_2d(s->logits, real, rows, vocab),
                              .dh = tensor_2d(s->dh, real, rows, d),
                              .dw = tensor_2d(s->dw, real, vocab, d),
                              .work = tensor_1d(s->work, DT_U8, sizeof s->work)};
    if (bias) {
        s->a.bias = tensor_1d(s->bias, real, vocab);
        s->a.dbias = tensor_1d(s->dbias, real, vocab);
    }
    for (int64_t i = 0; i < rows * d; i++)
        tensor_set(&s->a.h, i, (double)(float)rng_normal(1, (uint64_t)i));
    for (int64_t i = 0; i < vocab * d; i++)
        tensor_set(&s->a.w, i, (double)(float)rng_normal(2, (uint64_t)i));
    for (int64_t i = 0; bias && i < vocab; i++)
        tensor_set(&s->a.bias, i, (double)(float)rng_normal(3, (uint64_t)i));
    for (int64_t i = 0; i < rows; i++)
        s->label[i] = (int32_t)rng_below(4, (uint64_t)i, (uint64_t)vocab);
    s->scale[0] = 0.125;
}

static void fill(const struct tensor *t, double value)
{
    for (int64_t i = 0; i < tensor_elems(t); i++)
        tensor_set(t, i, value);
}

static bool all_equal(const struct tensor *t, double value)
{
    for (int64_t i = 0; i < tensor_elems(t); i++)
        if (tensor_get(t, i) != value)
            return false;
    return true;
}

static double worst(const struct tensor *a, const struct tensor *b)
{
    double most = 0, largest = 1e-30;
    for (int64_t i = 0; i < tensor_elems(a); i++) {
        double gap = fabs(tensor_get(a, i) - tensor_get(b, i));
        most = gap <= most ? most : gap; /* NaN counts */
        largest = fmax(largest, fabs(tensor_get(b, i)));
    }
    return most / largest;
}

static void equal_logits_cost_the_logarithm_of_the_vocabulary(void **state)
{
    (void)state;
    static struct head s;
    static const double level[] = {0, 1e4, -1e4};
    for (int kind = DEV_REF; kind <= DEV_CPU; kind++) {
        for (int k = 0; k < countof(level); k++) {
            head_open(&s, (enum dev_kind)kind, 3, 1, 257, false);
            fill(&s.a.h, 1);
            fill(&s.a.w, level[k]);
            assert_ok(s.ops->xent(&s.lane, &s.a), &s.e);
            assert_true(fabs(s.loss[0] - 3 * log(257)) < 1e-6 && s.loss[1] == 3);
            for (int64_t v = 0; v < 257; v++) {
                double sum = 0;
                for (int r = 0; r < 3; r++)
                    sum += 0.125 * (1.0 / 257 - (s.label[r] == v));
                assert_true(fabs(tensor_get(&s.a.dw, v) - sum) < 1e-7);
            }
        }
    }
}

static void logits_of_ten_thousand_stay_finite_and_exact(void **state)
{
    (void)state;
    static struct head s;
    for (int kind = DEV_REF; kind <= DEV_CPU; kind++) {
        head_open(&s, (enum dev_kind)kind, 2, 1, 100, false);
        fill(&s.a.h, 1);
        fill(&s.a.w, -1e4);
        tensor_set(&s.a.w, 7, 1e4);
        s.label[0] = 7;
        s.label[1] = 8;
        assert_ok(s.ops->xent(&s.lane, &s.a), &s.e);
        assert_true(tensor_get(&s.a.nll, 0) == 0);
        assert_true(tensor_get(&s.a.nll, 1) == 2e4);
        assert_true(s.loss[0] == 2e4 && s.loss[1] == 2);
        for (int64_t v = 0; v < 100; v++)
            assert_true(tensor_get(&s.a.dw, v) == (v == 7 ? 0.125 : v == 8 ? -0.125 : 0));
        assert_true(tensor_get(&s.a.dh, 0) == 0 && tensor_get(&s.a.dh, 1) == 0.125 * 2e4);
        assert_true(tensor_get(&s.a.logits, 7) == 1e4);
    }
}

static void a_vocabulary_of_one_costs_nothing(void **state)
{
    (void)state;
    static struct head s;
    head_open(&s, DEV_CPU, 5, 3, 1, true);
    s.a.chunk = 2;
    assert_ok(s.ops->xent(&s.lane, &s.a), &s.e);
    assert_true(s.loss[0] == 0 && s.loss[1] == 5);
    assert_true(all_equal(&s.a.dh, 0) && all_equal(&s.a.dw, 0) && all_equal(&s.a.dbias, 0));
}

static void ignored_labels_have_no_loss_and_no_gradient(void **state)
{
    (void)state;
    static struct head s, some;
    for (int kind = DEV_REF; kind <= DEV_CPU; kind++) {
        head_open(&s, (enum dev_kind)kind, 21, 5, 33, true);
        s.a.chunk = 4;
        s.a.z_loss = 0.5;
        memset(s.label, 0xFF, sizeof s.label);
        assert_ok(s.ops->xent(&s.lane, &s.a), &s.e);
        assert_true(s.loss[0] == 0 && s.loss[1] == 0 && all_equal(&s.a.nll, 0));
        assert_true(all_equal(&s.a.dh, 0) && all_equal(&s.a.dw, 0) && all_equal(&s.a.dbias, 0));
        fill(&s.a.dw, 3); /* accumulating nothing leaves what was there */
        fill(&s.a.dbias, 4);
        s.a.acc_dw = s.a.acc_dbias = s.a.acc_loss = true;
        s.loss[0] = 5;
        assert_ok(s.ops->xent(&s.lane, &s.a), &s.e);
        assert_true(all_equal(&s.a.dw, 3) && all_equal(&s.a.dbias, 4) && s.loss[0] == 5 && s.loss[1] == 0);
        /* Dropping the last 11 rows is the same as ignoring them. */
        head_open(&s, (enum dev_kind)kind, 21, 5, 33, true);
        head_open(&some, (enum dev_kind)kind, 10, 5, 33, true);
        for (int r = 10; r < 21; r++)
            s.label[r] = -1;
        assert_ok(s.ops->xent(&s.lane, &s.a), &s.e);
        assert_ok(some.ops->xent(&some.lane, &some.a), &some.e);
        assert_true(fabs(s.loss[0] - some.loss[0]) < 1e-5 && s.loss[1] == 10);
        assert_true(worst(&s.a.dw, &some.a.dw) < 1e-5 && worst(&s.a.dbias, &some.a.dbias) < 1e-5);
    }
}

static void the_chunk_changes_only_rounding(void **state)
{
    (void)state;
    static struct head s, ref;
    static const int64_t chunks[] = {0, 1, 2, 7, 16, 36, 37, 1000000};
    head_open(&ref, DEV_REF, 37, 19, 277, true);
    assert_ok(ref.ops->xent(&ref.lane, &ref.a), &ref.e);
    for (int k = 0; k < countof(chunks); k++) {
        head_open(&s, DEV_CPU, 37, 19, 277, true);
        s.a.chunk = chunks[k];
        assert_ok(s.ops->xent(&s.lane, &s.a), &s.e);
        assert_true(fabs(s.loss[0] / ref.loss[0] - 1) < 1e-6 && s.loss[1] == 37);
        assert_true(worst(&s.a.nll, &ref.a.nll) < 2e-6 && worst(&s.a.logits, &ref.a.logits) < 2e-6);
        assert_true(worst(&s.a.dh, &ref.a.dh) < 5e-6 && worst(&s.a.dw, &ref.a.dw) < 5e-6);
        assert_true(worst(&s.a.dbias, &ref.a.dbias) < 5e-6);
    }
}

static void halves_of_a_batch_add_up(void **state)
{
    (void)state;
    static struct head all, s;
    head_open(&all, DEV_CPU, 30, 8, 50, true);
    assert_ok(all.ops->xent(&all.lane, &all.a), &all.e);
    head_open(&s, DEV_CPU, 30, 8, 50, true);
    struct xent_args whole = s.a;
    for (int half = 0; half < 2; half++) {
        s.a.h = tensor_rows(&whole.h, half * 15, 15);
        s.a.label = tensor_rows(&whole.label, half * 15, 15);
        s.a.dh = tensor_rows(&whole.dh, half * 15, 15);
        s.a.nll = tensor_rows(&whole.nll, half * 15, 15);
        s.a.logits = tensor_rows(&whole.logits, half * 15, 15);
        s.a.acc_loss = s.a.acc_dw = s.a.acc_dbias = half == 1;
        assert_ok(s.ops->xent(&s.lane, &s.a), &s.e);
    }
    assert_true(fabs(s.loss[0] / all.loss[0] - 1) < 1e-6 && s.loss[1] == 30);
    assert_true(worst(&whole.dh, &all.a.dh) < 1e-5 && worst(&s.a.dw, &all.a.dw) < 1e-5);
    assert_true(worst(&s.a.dbias, &all.a.dbias) < 1e-5 && worst(&whole.nll, &all.a.nll) < 1e-6);
}

/* scale * (sum nll + z_loss * sum lse^2), lse taken from the logits the op returns. */
static double objective(struct head *s)
{
    double sum = 0;
    assert_ok(s->ops->xent(&s->lane, &s->a), &s->e);
    for (int64_t r = 0; r < s->a.h.dim[0]; r++) {
        if (s->label[r] < 0)
            continue;
        double lse = tensor_get(&s->a.nll, r) + tensor_get(&s->a.logits, r * s->a.w.dim[0] + s->label[r]);
        sum += tensor_get(&s->a.nll, r) + s->a.z_loss * lse * lse;
    }
    return s->scale[0] * sum;
}

static void z_loss_has_the_gradient_of_its_definition(void **state)
{
    (void)state;
    static struct head s, grad;
    head_open(&s, DEV_REF, 6, 4, 9, true);
    s.a.z_loss = 0.05;
    s.label[2] = -1;
    double at = objective(&s), plain = s.loss[0];
    grad = s;
    const double *dh = grad.dh, *dw = grad.dw, *dbias = grad.dbias;
    struct {
        double *x;
        const double *g;
        int n;
    } part[] = {{s.h, dh, 24}, {s.w, dw, 36}, {s.bias, dbias, 9}};
    for (int k = 0; k < countof(part); k++) {
        for (int i = 0; i < part[k].n; i++) {
            double keep = part[k].x[i], step = 1e-5;
            part[k].x[i] = keep + step;
            double up = objective(&s);
            part[k].x[i] = keep - step;
            double down = objective(&s);
            part[k].x[i] = keep;
            assert_true(fabs((up - down) / (2 * step) - part[k].g[i]) < 1e-8);
        }
    }
    s.a.z_loss = 0; /* the reported loss does not hold the extra term */
    assert_true(objective(&s) < at && s.loss[0] == plain);
}

static void without_gradients_only_the_loss_is_written(void **state)
{
    (void)state;
    static struct head s, full;
    head_open(&full, DEV_CPU, 9, 6, 20, false);
    assert_ok(full.ops->xent(&full.lane, &full.a), &full.e);
    head_open(&s, DEV_CPU, 9, 6, 20, false);
    s.a.dh = s.a.dw = s.a.scale = s.a.nll = s.a.logits = (struct tensor){0};
    assert_ok(s.ops->xent(&s.lane, &s.a), &s.e);
    assert_true(s.loss[0] == full.loss[0] && s.loss[1] == 9);
}

static void a_nan_reaches_the_loss(void **state)
{
    (void)state;
    static struct head s;
    static const double bad[] = {NAN, INFINITY};
    for (int k = 0; k < countof(bad); k++) {
        head_open(&s, DEV_CPU, 9, 6, 20, false);
        tensor_set(&s.a.h, 3 * 6 + 1, bad[k]);
        assert_ok(s.ops->xent(&s.lane, &s.a), &s.e);
        assert_true(!isfinite(s.loss[0]) && !isfinite(tensor_get(&s.a.nll, 3)));
        assert_true(isfinite(tensor_get(&s.a.nll, 2)) != 0);
    }
}

static void a_bad_label_is_named_and_nothing_is_written(void **state)
{
    (void)state;
    static struct head s, before;
    static const int32_t bad[] = {-2, 20, INT32_MAX, INT32_MIN};
    for (int k = 0; k < countof(bad) * 2; k++) {
        head_open(&s, k % 2 ? DEV_CPU : DEV_REF, 9, 6, 20, true);
        s.label[8] = bad[k / 2];
        before = s;
        assert_fails(s.ops->xent(&s.lane, &s.a), ST_INVALID, &s.e, "label[8]");
        assert_memory_equal(s.dh, before.dh, sizeof s.dh);
        assert_memory_equal(s.dw, before.dw, sizeof s.dw);
        assert_memory_equal(s.loss, before.loss, sizeof s.loss);
        assert_memory_equal(s.nll, before.nll, sizeof s.nll);
    }
}

static void a_frozen_head_passes_the_gradient_on(void **state)
{
    (void)state;
    static struct head s, frozen;
    for (int k = 0; k < 2; k++) {
        head_open(&s, k ? DEV_CPU : DEV_REF, 9, 6, 20, true);
        assert_ok(s.ops->xent(&s.lane, &s.a), &s.e);
        head_open(&frozen, k ? DEV_CPU : DEV_REF, 9, 6, 20, true);
        frozen.a.dw = (struct tensor){0};
        assert_ok(frozen.ops->xent(&frozen.lane, &frozen.a), &frozen.e);
        assert_memory_equal(s.dh, frozen.dh, sizeof s.dh);
        assert_memory_equal(s.loss, frozen.loss, sizeof s.loss);
    }
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    static struct head s;
    head_open(&s, DEV_CPU, 9, 6, 20, true);
    struct xent_args good = s.a;
    s.a.dh = (struct tensor){0};
    assert_fails(s.ops->xent(&s.lane, &s.a), ST_INVALID, &s.e, "dw is given without dh");
    s.a = good;
    s.a.dbias = (struct tensor){0};
    assert_fails(s.ops->xent(&s.lane, &s.a), ST_INVALID, &s.e, "dbias is missing");
    s.a = good;
    s.a.bias = (struct tensor){0};
    assert_fails(s.ops->xent(&s.lane, &s.a), ST_INVALID, &s.e, "dbias is given without bias");
    s.a = good;
    s.a.scale = (struct tensor){0};
    assert_fails(s.ops->xent(&s.lane, &s.a), ST_INVALID, &s.e, "scale is missing");
    s.a = good;
    s.a.chunk = -1;
    assert_fails(s.ops->xent(&s.lane, &s.a), ST_INVALID, &s.e, "chunk is -1");
    s.a = good;
    s.a.z_loss = NAN;
    assert_fails(s.ops->xent(&s.lane, &s.a), ST_INVALID, &s.e, "z_loss");
    s.a = good;
    s.a.work.dim[0] = s.ops->xent_work(&good) - 1;
    assert_fails(s.ops->xent(&s.lane, &s.a), ST_INVALID, &s.e, "needed");
    s.a = good;
    s.a.w.stride[0] = 0; /* a broadcast row: BLAS cannot */
    assert_fails(s.ops->xent(&s.lane, &s.a), ST_INVALID, &s.e, "overlap");
    s.a = good;
    s.a.label = tensor_1d(s.label, DT_I32, 8);
    assert_fails(s.ops->xent(&s.lane, &s.a), ST_INVALID, &s.e, "label is I32 [8], expected I32 [9]");
}

static void the_chunk_rule_bounds_the_logits(void **state)
{
    (void)state;
    assert_int_equal(xent_chunk(4096, 320, 256), 1024);
    assert_int_equal(xent_chunk(4096, 1024, 65536), 128);
    assert_int_equal(xent_chunk(12000, 1024, 65536), 256); /* 188 rows, next power of two */
    assert_int_equal(xent_chunk(200, 8, 50000), 128);
    assert_int_equal(xent_chunk(5, 8, 50000), 5);
    assert_int_equal(xent_chunk(0, 8, 10), 0);
    assert_int_equal(xent_chunk(7, 0, 0), 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_logits_cost_the_logarithm_of_the_vocabulary),
        cmocka_unit_test(logits_of_ten_thousand_stay_finite_and_exact),
        cmocka_unit_test(a_vocabulary_of_one_costs_nothing),
        cmocka_unit_test(ignored_labels_have_no_loss_and_no_gradient),
        cmocka_unit_test(the_chunk_changes_only_rounding),
        cmocka_unit_test(halves_of_a_batch_add_up),
        cmocka_unit_test(z_loss_has_the_gradient_of_its_definition),
        cmocka_unit_test(without_gradients_only_the_loss_is_written),
        cmocka_unit_test(a_nan_reaches_the_loss),
        cmocka_unit_test(a_bad_label_is_named_and_nothing_is_written),
        cmocka_unit_test(a_frozen_head_passes_the_gradient_on),
        cmocka_unit_test(bad_arguments_are_refused),
        cmocka_unit_test(the_chunk_rule_bounds_the_logits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
