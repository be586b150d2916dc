/* mhc at the shapes and in the corners that upstream's own tests and reviews know (mhc.md, sections 6 and 7): fast code
 * against the reference, forward and backward, gradients where an epsilon decides. */
#include "support.h"
#include "ops/mhc/mhc.h"

#include "ops/opcheck.h"
#include "ops/ops.h"

static struct err e;

/* ---- upstream's shapes: rows are s times b --------------------------------------------------- */

static void fast_code_equals_the_reference_at_upstreams_shapes(void **state)
{
    (void)state;
    static const struct {
        const char *op;
        struct op_sample sample;
        double tolerance;
    } cases[] = {
        {"mhc_sinkhorn_fwd", {"rows=8 streams=4 iterations=5"}, 1e-5},
        {"mhc_sinkhorn_fwd", {"rows=1 streams=2 iterations=10 profile=1"}, 1e-5},
        {"mhc_sinkhorn_fwd", {"rows=32 streams=4 iterations=20"}, 1e-5},
        {"mhc_sinkhorn_bwd", {"rows=8 streams=4 iterations=5"}, 2e-5},
        {"mhc_sinkhorn_bwd", {"rows=1 streams=2 iterations=10 profile=1"}, 2e-5},
        {"mhc_sinkhorn_bwd", {"rows=32 streams=4 iterations=20"}, 2e-5},
        {"mhc_aggregate_fwd", {"rows=8 d=1024 streams=4"}, 2e-6},
        {"mhc_aggregate_fwd", {"rows=1 d=256 streams=2"}, 2e-6},
        {"mhc_aggregate_fwd", {"rows=64 d=4096 streams=4"}, 2e-6},
        {"mhc_aggregate_bwd", {"rows=8 d=1024 streams=4"}, 1e-5},
        {"mhc_aggregate_bwd", {"rows=1 d=256 streams=2"}, 1e-5},
        {"mhc_aggregate_bwd", {"rows=128 d=1536 streams=4"}, 1e-5},
        {"mhc_combine_fwd", {"rows=8 d=1024 streams=4"}, 2e-6},
        {"mhc_combine_fwd", {"rows=8 d=1024 streams=4 no_bias=1"}, 2e-6},
        {"mhc_combine_fwd", {"rows=2 d=256 streams=2 profile=1"}, 2e-6},
        {"mhc_combine_bwd", {"rows=8 d=1024 streams=4"}, 1e-5},
        {"mhc_combine_bwd", {"rows=8 d=1024 streams=4 no_bias=1 no_dbias=1"}, 1e-5},
        {"mhc_combine_bwd", {"rows=2 d=256 streams=2 profile=1"}, 1e-5},
        {"mhc_project_fwd", {"rows=256 d=1024 streams=4"}, 1e-5},
        {"mhc_project_fwd", {"rows=64 d=256 streams=2"}, 1e-5},
        {"mhc_project_fwd", {"rows=128 d=512 streams=4"}, 1e-5},
        {"mhc_project_bwd", {"rows=256 d=1024 streams=4"}, 1e-5},
        {"mhc_project_bwd", {"rows=64 d=256 streams=2"}, 1e-5},
        {"mhc_gates_fwd", {"rows=256 streams=4"}, 1e-5},
        {"mhc_gates_bwd", {"rows=256 streams=4"}, 2e-5},
        {"mhc_contract_fwd", {"rows=32 d=1024 streams=4"}, 1e-5},
        {"mhc_contract_bwd", {"rows=32 d=1024 streams=4"}, 2e-5},
        {"mhc_boundary_fwd", {"rows=8 d=1024 streams=4 iterations=5"}, 2e-5},
        {"mhc_boundary_bwd", {"rows=8 d=1024 streams=4 iterations=5"}, 5e-5},
        /* TransformerEngine's widths, an odd one too */
        {"mhc_boundary_fwd", {"rows=3 d=5129 streams=4"}, 2e-5},
        {"mhc_boundary_bwd", {"rows=3 d=5129 streams=4"}, 2e-4},
        /* (samples are of size 1, so wider mappings would have logits of hundreds) */
        {"mhc_project_fwd", {"rows=2 d=16384 streams=4"}, 1e-5},
        {"mhc_project_bwd", {"rows=2 d=16384 streams=4"}, 1e-5},
        {"mhc_combine_fwd", {"rows=2 d=16384 streams=4 profile=1"}, 2e-6},
        {"mhc_combine_bwd", {"rows=2 d=16384 streams=4"}, 1e-5},
        /* nothing to do */
        {"mhc_boundary_fwd", {"rows=0 d=64 streams=4"}, 0},
        {"mhc_boundary_bwd", {"rows=0 d=64 streams=4"}, 0},
    };
    struct dev dev;
    assert_ok(dev_open(&dev, DEV_CPU, 2, &e), &e);
    for (int i = 0; i < countof(cases); i++) {
        struct op_check_result r;
        const struct op_desc *d = op_find(cases[i].op);
        assert_non_null(d);
        assert_ok(op_compare(d, &cases[i].sample, &dev, ops_for(&dev), 11, &r, &e), &e);
        assert_true(r.compared > 0);
        if (!(r.worst <= cases[i].tolerance))
            fail_msg("%s, %s: error %g in %s", cases[i].op, cases[i].sample.text, r.worst, r.where);
    }
    dev_close(&dev);
}

/* ---- one epsilon on all paths ---------------------------------------------------------------- */

enum { ROWS = 3, STREAMS = 4, WIDTH = 6, K = STREAMS * WIDTH, LOGITS = STREAMS * STREAMS + 2 * STREAMS };

struct mapping {
    struct dev dev;
    struct lane lane;
    const struct ops *ops;
    struct mhc_rule rule;
    struct tensor x, w, alpha, beta, p, rho, coef, weight;
    struct tensor dx, dp, drho;
};

static struct tensor make(const struct mapping *m, int64_t rows, int64_t cols, uint64_t key, double scale)
{
    struct tensor t = tensor_2d(calloc((size_t)(rows * cols), sizeof(double)), m->dev.real, rows, cols);
    assert_non_null(t.data);
    for (int64_t i = 0; i < rows * cols; i++)
        tensor_set(&t, i, (double)(float)(scale * rng_normal(key, (uint64_t)i)));
    return t;
}

static void open_mapping(struct mapping *m, enum dev_kind kind, enum mhc_profile profile, double size)
{
    *m = (struct mapping){.rule = {.streams = STREAMS, .profile = profile, .iterations = 20}};
    assert_ok(dev_open(&m->dev, kind, 1, &e), &e);
    m->lane = (struct lane){.dev = &m->dev, .err = &e};
    m->ops = ops_for(&m->dev);
    m->x = make(m, ROWS, K, 1, size);
    m->w = make(m, LOGITS, K, 2, 1);
    m->alpha = make(m, 1, 1, 0, 0);
    tensor_set(&m->alpha, 0, 0.7);
    m->alpha = tensor_1d(m->alpha.data, m->dev.real, 1);
    m->beta = make(m, 1, LOGITS, 3, 0.3);
    m->beta = tensor_1d(m->beta.data, m->dev.real, LOGITS);
    m->p = make(m, ROWS, LOGITS, 0, 0);
    m->rho = make(m, ROWS, 1, 0, 0);
    m->coef = make(m, ROWS, LOGITS, 0, 0);
    m->weight = make(m, ROWS, LOGITS, 4, 1);
    m->dx = make(m, ROWS, K, 0, 0);
    m->dp = make(m, ROWS, LOGITS, 0, 0);
    m->drho = make(m, ROWS, 1, 0, 0);
}

static void close_mapping(struct mapping *m)
{
    struct tensor *all[] = {&m->x,    &m->w,      &m->alpha, &m->beta, &m->p,   &m->rho,
                            &m->coef, &m->weight, &m->dx,    &m->dp,   &m->drho};
    for (int i = 0; i < countof(all); i++)
        free(all[i]->data);
    dev_close(&m->dev);
}

static struct tensor part(const struct tensor *t, int k)
{
    static const int64_t first[] = {0, STREAMS, 2 * STREAMS}, n[] = {STREAMS, STREAMS, STREAMS * STREAMS};
    return tensor_cols(t, first[k], n[k]);
}

/* The weighted sum of the gates and mixing logits. */
static double mapping_value(struct mapping *m)
{
    struct mhc_project_fwd_args a = {.x = m->x, .w = m->w, .p = m->p, .rho = m->rho};
    struct mhc_gates_fwd_args g = {.p = m->p,
                                   .rho = m->rho,
                                   .a_pre = m->alpha,
                                   .a_post = m->alpha,
                                   .a_res = m->alpha,
                                   .beta = m->beta,
                                   .pre = part(&m->coef, 0),
                                   .post = part(&m->coef, 1),
                                   .logits = part(&m->coef, 2),
                                   .rule = m->rule};
    assert_ok(m->ops->mhc_project_fwd(&m->lane, &a), &e);
    assert_ok(m->ops->mhc_gates_fwd(&m->lane, &g), &e);
    double sum = 0;
    for (int64_t i = 0; i < ROWS * LOGITS; i++)
        sum += tensor_get(&m->coef, i) * tensor_get(&m->weight, i);
    return sum;
}

static void mapping_gradient(struct mapping *m)
{
    struct mhc_gates_bwd_args g = {.dpre = part(&m->weight, 0),
                                   .dpost = part(&m->weight, 1),
                                   .dlogits = part(&m->weight, 2),
                                   .p = m->p,
                                   .rho = m->rho,
                                   .a_pre = m->alpha,
                                   .a_post = m->alpha,
                                   .a_res = m->alpha,
                                   .beta = m->beta,
                                   .dp = m->dp,
                                   .drho = m->drho,
                                   .rule = m->rule};
    struct mhc_project_bwd_args a = {.dp = m->dp, .drho = m->drho, .x = m->x, .w = m->w, .rho = m->rho, .dx = m->dx};
    mapping_value(m);
    assert_ok(m->ops->mhc_gates_bwd(&m->lane, &g), &e);
    assert_ok(m->ops->mhc_project_bwd(&m->lane, &a), &e);
}

/* Streams of the size of epsilon: there 1 / (rho + eps) is half of 1 / rho, so a backward pass with another epsilon,
 * or none, is far off. */
static void streams_as_small_as_epsilon_have_the_right_gradient(void **state)
{
    (void)state;
    for (int profile = MHC_D; profile <= MHC_S; profile++) {
        struct mapping ref, cpu;
        open_mapping(&ref, DEV_REF, (enum mhc_profile)profile, MHC_EPS);
        open_mapping(&cpu, DEV_CPU, (enum mhc_profile)profile, MHC_EPS);
        mapping_gradient(&ref);
        mapping_gradient(&cpu);
        double largest = 0;
        for (int64_t i = 0; i < ROWS * K; i++)
            largest = fmax(largest, fabs(tensor_get(&ref.dx, i)));
        for (int64_t i = 0; i < ROWS * K; i++) {
            const double h = 1e-11;
            double v = tensor_get(&ref.x, i), up, down;
            tensor_set(&ref.x, i, v + h);
            up = mapping_value(&ref);
            tensor_set(&ref.x, i, v - h);
            down = mapping_value(&ref);
            tensor_set(&ref.x, i, v);
            double numeric = (up - down) / (2 * h), analytic = tensor_get(&ref.dx, i);
            if (!(fabs(numeric - analytic) <= 1e-4 * largest))
                fail_msg("gradient %g, difference %g", analytic, numeric);
            assert_true(fabs(tensor_get(&cpu.dx, i) - analytic) <= 1e-4 * largest);
        }
        for (int64_t i = 0; i < ROWS * LOGITS; i++)
            assert_true(fabs(tensor_get(&cpu.coef, i) - tensor_get(&ref.coef, i)) < 1e-5);
        close_mapping(&ref);
        close_mapping(&cpu);
    }
}

/* A column of the mixing matrix that nothing goes to: its sum is of the size of epsilon, in every iteration. */
static void sinkhorn_has_the_right_gradient_where_epsilon_decides(void **state)
{
    (void)state;
    for (int profile = MHC_D; profile <= MHC_S; profile++)
        for (int64_t iterations = 1; iterations <= 20; iterations += 19) {
            struct mapping m;
            open_mapping(&m, DEV_REF, (enum mhc_profile)profile, 1);
            m.rule.iterations = iterations;
            enum { SIZE = STREAMS * STREAMS };
            struct tensor logits = make(&m, 1, SIZE, 5, 1), res = make(&m, 1, SIZE, 0, 0), g = make(&m, 1, SIZE, 6, 1),
                          back = make(&m, 1, SIZE, 0, 0);
            for (int64_t i = 0; i < STREAMS; i++)
                tensor_set(&logits, i * STREAMS + 2, -14 + 0.1 * (double)i); /* exp(-14) is 8e-7 */
            struct mhc_sinkhorn_fwd_args f = {.logits = logits, .res = res, .rule = m.rule};
            struct mhc_sinkhorn_bwd_args b = {.dres = g, .logits = logits, .dlogits = back, .rule = m.rule};
            assert_ok(m.ops->mhc_sinkhorn_bwd(&m.lane, &b), &e);
            for (int64_t i = 0; i < SIZE; i++) {
                const double h = 1e-6;
                double v = tensor_get(&logits, i), sum[2] = {0, 0};
                for (int side = 0; side < 2; side++) {
                    tensor_set(&logits, i, side ? v - h : v + h);
                    assert_ok(m.ops->mhc_sinkhorn_fwd(&m.lane, &f), &e);
                    for (int64_t k = 0; k < SIZE; k++)
                        sum[side] += tensor_get(&res, k) * tensor_get(&g, k);
                }
                tensor_set(&logits, i, v);
                double numeric = (sum[0] - sum[1]) / (2 * h);
                if (!(fabs(numeric - tensor_get(&back, i)) <= 1e-6 * (1 + fabs(numeric))))
                    fail_msg("profile %d, %d iterations, logit %d: gradient %g, difference %g", profile,
                             (int)iterations, (int)i, tensor_get(&back, i), numeric);
            }
            struct tensor *all[] = {&logits, &res, &g, &back};
            for (int k = 0; k < countof(all); k++)
                free(all[k]->data);
            close_mapping(&m);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fast_code_equals_the_reference_at_upstreams_shapes),
        cmocka_unit_test(streams_as_small_as_epsilon_have_the_right_gradient),
        cmocka_unit_test(sinkhorn_has_the_right_gradient_where_epsilon_decides),
    };
    return cmocka_run_group_tests_name("mhc, upstream", tests, NULL, NULL);
}
