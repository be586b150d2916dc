/* mhc beyond the descriptors' samples: values from the specification, extreme inputs, the boundary against its
 * primitives, masks, aliasing, rejected arguments. */
#include "ops/mhc/mhc_path.h"
#include "ops/dropout/dropout.h"
#include "ops/mhc/mhc.h"
#include "ops/ops.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "support.h"

#include "ops/opcheck.h"

static struct err e;

struct machine {
    struct dev dev;
    struct lane lane;
    const struct ops *ops;
};

static void open_machine(struct machine *m, enum dev_kind kind)
{
    assert_ok(dev_open(&m->dev, kind, 2, &e), &e);
    m->lane = (struct lane){.dev = &m->dev, .err = &e};
    m->ops = ops_for(&m->dev);
}

/* A tensor of the machine's type, filled by a function of the index. */
static struct tensor make(const struct machine *m, int64_t rows, int64_t cols, uint64_t key, double scale)
{
    struct tensor t = tensor_2d(NULL, m->ops->real, rows, cols);
    t.data = calloc((size_t)(rows * cols + 1), sizeof(double));
    assert_non_null(t.data);
    for (int64_t i = 0; i < rows * cols; i++)
        tensor_set(&t, i, (double)(float)(scale * rng_normal(key, (uint64_t)i)));
    return t;
}

static struct tensor from(const struct machine *m, int64_t rows, int64_t cols, const double *values)
{
    struct tensor t = make(m, rows, cols, 1, 0);
    for (int64_t i = 0; i < rows * cols; i++)
        tensor_set(&t, i, values[i]);
    return t;
}

static struct tensor flat(struct tensor t) { return tensor_1d(t.data, t.dtype, t.dim[0] * t.dim[1]); }

static void assert_near(const struct tensor *t, const double *values, int64_t first, int64_t n, double tolerance)
{
    for (int64_t i = 0; i < n; i++) {
        double v = tensor_get(t, first + i);
        if (!(fabs(v - values[i]) <= tolerance))
            fail_msg("element %lld is %.12g, expected %.12g", (long long)(first + i), v, values[i]);
    }
}

static const struct mhc_rule d4 = {.streams = 4, .profile = MHC_D, .iterations = 20};
static const struct mhc_rule s4 = {.streams = 4, .profile = MHC_S, .iterations = 20};

/* ---- values of the specification ------------------------------------------------------------- */

static const double golden_logits[16] = {0.5,  -0.3, 1.2, 0.0, 0.1, 0.9,  -0.7, 0.4,
                                         -1.0, 0.2,  0.3, 0.8, 0.6, -0.5, 0.0,  -0.2};

static void check_golden(enum dev_kind kind, double tolerance)
{
    static const double want_s[16] = {0.267212513, 0.122285576, 0.464021548, 0.146480363, 0.205164244, 0.465041044,
                                      0.079495273, 0.250299439, 0.076844566, 0.259848712, 0.243148285, 0.420158437,
                                      0.450778677, 0.152824668, 0.213334894, 0.183061761};
    static const double want_d_first[4] = {0.267212133, 0.122285996, 0.464020265, 0.146480606};
    static const double want_d_last[4] = {0.450777390, 0.152824926, 0.213334843, 0.183061842};
    static const double upstream[16] = {1, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0.5, 0, 0.25, 0, 0, 2};
    static const double grad_first[4] = {0.146146402, 0.018324706, -0.081988554, -0.082482554};
    static const double grad_last[4] = {-0.162180884, -0.001047942, -0.071125886, 0.234354713};
    struct machine m;
    open_machine(&m, kind);
    struct tensor logits = from(&m, 1, 16, golden_logits), res = make(&m, 1, 16, 0, 0), up = from(&m, 1, 16, upstream);
    struct mhc_sinkhorn_fwd_args f = {.logits = logits, .res = res, .rule = s4};
    assert_ok(m.ops->mhc_sinkhorn_fwd(&m.lane, &f), &e);
    assert_near(&res, want_s, 0, 16, tolerance);
    f.rule = d4;
    assert_ok(m.ops->mhc_sinkhorn_fwd(&m.lane, &f), &e);
    assert_near(&res, want_d_first, 0, 4, tolerance);
    assert_near(&res, want_d_last, 12, 4, tolerance);
    struct mhc_sinkhorn_bwd_args b = {.dres = up, .logits = logits, .dlogits = res, .rule = s4};
    assert_ok(m.ops->mhc_sinkhorn_bwd(&m.lane, &b), &e);
    assert_near(&res, grad_first, 0, 4, tolerance);
    assert_near(&res, grad_last, 12, 4, tolerance);
    free(logits.data);
    free(res.data);
    free(up.data);
    dev_close(&m.dev);
}

static void sinkhorn_gives_the_specified_values(void **state)
{
    (void)state;
    check_golden(DEV_REF, 6e-10);
    check_golden(DEV_CPU, 1e-6);
}

static void mixing_is_transposed_in_profile_d_and_not_in_s(void **state)
{
    (void)state;
    static const double res_in[4] = {1, 2, 3, 4}, x_in[8] = {10, 100, 3, 4, 1, 2, 5, 6};
    static const double want[2][8] = {{13, 106, 18, 22, 24, 208, 26, 32}, {12, 104, 13, 16, 34, 308, 29, 36}};
    for (int kind = 0; kind < 2; kind++) {
        struct machine m;
        open_machine(&m, kind ? DEV_CPU : DEV_REF);
        struct tensor res = from(&m, 1, 4, res_in), x = from(&m, 1, 8, x_in), f = make(&m, 1, 4, 0, 0),
                      post = make(&m, 1, 2, 0, 0);
        for (int profile = 0; profile < 2; profile++) {
            struct tensor y = make(&m, 1, 8, 0, 0);
            struct mhc_combine_fwd_args a = {
                .x = x,
                .f = f,
                .post = post,
                .res = res,
                .y = y,
                .rule = {.streams = 2, .profile = profile ? MHC_S : MHC_D, .iterations = 1}};
            assert_ok(m.ops->mhc_combine_fwd(&m.lane, &a), &e);
            assert_near(&y, want[profile], 0, 8, 0);
            a.y = a.x; /* in place */
            assert_ok(m.ops->mhc_combine_fwd(&m.lane, &a), &e);
            assert_near(&x, want[profile], 0, 8, 0);
            for (int i = 0; i < 8; i++)
                tensor_set(&x, i, x_in[i]);
            free(y.data);
        }
        free(res.data);
        free(x.data);
        free(f.data);
        free(post.data);
        dev_close(&m.dev);
    }
}

/* ---- extremes -------------------------------------------------------------------------------- */

/* Worst |line sum - 1| of rows (true) or columns. */
static double line_error(const struct tensor *res, int64_t n, bool rows)
{
    double worst = 0;
    for (int64_t r = 0; r < res->dim[0]; r++)
        for (int64_t i = 0; i < n; i++) {
            double sum = 0;
            for (int64_t j = 0; j < n; j++)
                sum += tensor_get(res, r * n * n + (rows ? i * n + j : j * n + i));
            worst = fmax(worst, fabs(sum - 1));
        }
    return worst;
}

static void huge_logits_stay_finite_forward_and_backward(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++)
        for (int profile = 0; profile < 2; profile++) {
            struct machine m;
            open_machine(&m, kind ? DEV_CPU : DEV_REF);
            struct tensor logits = make(&m, 40, 16, 5, 1e4), res = make(&m, 40, 16, 0, 0), up = make(&m, 40, 16, 6, 1),
                          dl = make(&m, 40, 16, 0, 0);
            struct mhc_rule rule = profile ? s4 : d4;
            struct mhc_sinkhorn_fwd_args f = {.logits = logits, .res = res, .rule = rule};
            struct mhc_sinkhorn_bwd_args b = {.dres = up, .logits = logits, .dlogits = dl, .rule = rule};
            assert_ok(m.ops->mhc_sinkhorn_fwd(&m.lane, &f), &e);
            assert_ok(m.ops->mhc_sinkhorn_bwd(&m.lane, &b), &e);
            for (int64_t i = 0; i < 40 * 16; i++) {
                double v = tensor_get(&res, i);
                assert_true(v >= 0 && v <= 1.001);
                assert_true(isfinite(tensor_get(&dl, i)));
            }
            free(logits.data);
            free(res.data);
            free(up.data);
            free(dl.data);
            dev_close(&m.dev);
        }
}

static void ordinary_logits_give_a_doubly_stochastic_matrix(void **state)
{
    (void)state;
    struct machine m;
    open_machine(&m, DEV_CPU);
    struct tensor logits = make(&m, 400, 16, 9, 1), res = make(&m, 400, 16, 0, 0);
    for (int profile = 0; profile < 2; profile++) {
        struct mhc_sinkhorn_fwd_args f = {.logits = logits, .res = res, .rule = profile ? s4 : d4};
        assert_ok(m.ops->mhc_sinkhorn_fwd(&m.lane, &f), &e);
        assert_true(line_error(&res, 4, true) < 1e-3); /* columns come last, rows drift */
        assert_true(line_error(&res, 4, false) < 3e-6);
    }
    free(logits.data);
    free(res.data);
    dev_close(&m.dev);
}

/* Columns further apart than fp32's smallest number would start at 0 and stay there. */
static void columns_far_apart_give_a_doubly_stochastic_matrix(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct machine m;
        open_machine(&m, kind ? DEV_CPU : DEV_REF);
        struct tensor logits = make(&m, 100, 16, 9, 1), res = make(&m, 100, 16, 0, 0);
        struct mhc_sinkhorn_fwd_args f = {.logits = logits, .res = res, .rule = s4};
        for (int64_t i = 0; i < 100 * 16; i++)
            tensor_set(&logits, i, tensor_get(&logits, i) - 120 * (double)(i % 4));
        assert_ok(m.ops->mhc_sinkhorn_fwd(&m.lane, &f), &e);
        assert_true(line_error(&res, 4, true) < 1e-3);
        assert_true(line_error(&res, 4, false) < 3e-6);
        free(logits.data);
        free(res.data);
        dev_close(&m.dev);
    }
}

/* 256 squared times 16384 channels is past what fp16 can hold, and 1e18 squared past fp32's half. */
static void large_inputs_do_not_overflow_the_root_mean_square(void **state)
{
    (void)state;
    struct machine m;
    open_machine(&m, DEV_CPU);
    struct tensor x = make(&m, 1, 16384, 1, 0), w = make(&m, 24, 16384, 2, 0.01), p = make(&m, 1, 24, 0, 0),
                  rho = make(&m, 1, 1, 0, 0);
    struct mhc_project_fwd_args a = {.x = x, .w = w, .p = p, .rho = rho};
    for (int big = 0; big < 2; big++) {
        double v = big ? 1e16 : 256;
        for (int64_t i = 0; i < 16384; i++)
            tensor_set(&x, i, v);
        assert_ok(m.ops->mhc_project_fwd(&m.lane, &a), &e);
        assert_true(fabs(tensor_get(&rho, 0) / v - 1) < 1e-5);
        for (int64_t i = 0; i < 24; i++)
            assert_true(isfinite(tensor_get(&p, i)));
    }
    free(x.data);
    free(w.data);
    free(p.data);
    free(rho.data);
    dev_close(&m.dev);
}

static void a_stream_of_zeros_has_no_gradient_through_the_norm(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct machine m;
        open_machine(&m, kind ? DEV_CPU : DEV_REF);
        struct tensor x = make(&m, 3, 8, 0, 0), w = make(&m, 8, 8, 2, 1), dp = make(&m, 3, 8, 0, 0),
                      rho = make(&m, 3, 1, 0, 0);
        struct tensor drho = make(&m, 3, 1, 4, 1), dx = make(&m, 3, 8, 5, 1);
        struct mhc_project_bwd_args a = {.dp = dp, .drho = drho, .x = x, .w = w, .rho = rho, .dx = dx};
        assert_ok(m.ops->mhc_project_bwd(&m.lane, &a), &e);
        for (int64_t i = 0; i < 24; i++)
            assert_true(tensor_get(&dx, i) == 0);
        struct tensor *all[] = {&x, &w, &dp, &rho, &drho, &dx};
        for (int i = 0; i < countof(all); i++)
            free(all[i]->data);
        dev_close(&m.dev);
    }
}

/* ---- the boundary and its primitives --------------------------------------------------------- */

enum { ROWS = 37, C = 13, N4 = 24 };

struct boundary {
    struct machine m;
    struct mhc_rule rule;
    struct tensor x, f, bias, coef_in, w, a_pre, a_post, a_res, beta, gain, y, stat, coef, h, work, info;
    struct tensor dh, dy, dcoef, dx, df, dcoef_in, dz, dgain, dbias;
};

static void open_boundary(struct boundary *b, enum dev_kind kind, struct mhc_rule rule)
{
    open_machine(&b->m, kind);
    b->rule = rule;
    const struct machine *m = &b->m;
    struct {
        struct tensor *t;
        int64_t rows, cols;
    } all[] = {{&b->x, ROWS, 4 * C},  {&b->f, ROWS, C},      {&b->bias, 1, C},     {&b->coef_in, ROWS, N4},
               {&b->w, N4, 4 * C},    {&b->a_pre, 1, 1},     {&b->a_post, 1, 1},   {&b->a_res, 1, 1},
               {&b->beta, 1, N4},     {&b->gain, 1, C},      {&b->y, ROWS, 4 * C}, {&b->stat, ROWS, N4 + 2},
               {&b->coef, ROWS, N4},  {&b->h, ROWS, C},      {&b->dh, ROWS, C},    {&b->dy, ROWS, 4 * C},
               {&b->dcoef, ROWS, N4}, {&b->dx, ROWS, 4 * C}, {&b->df, ROWS, C},    {&b->dcoef_in, ROWS, N4},
               {&b->dz, ROWS, N4},    {&b->dgain, 1, C},     {&b->dbias, 1, C}};
    for (int i = 0; i < countof(all); i++)
        *all[i].t = make(m, all[i].rows, all[i].cols, 100 + (uint64_t)i, 1);
    struct tensor *vectors[] = {&b->bias, &b->a_pre, &b->a_post, &b->a_res, &b->beta, &b->gain, &b->dgain, &b->dbias};
    for (int i = 0; i < countof(vectors); i++)
        *vectors[i] = flat(*vectors[i]);
    b->work = tensor_1d(calloc(1 << 20, 1), DT_U8, 1 << 20);
    b->info = tensor_1d(calloc(4, 8), DT_I64, 4);
}

static void close_boundary(struct boundary *b)
{
    struct tensor *all[] = {&b->x,        &b->f,    &b->bias,  &b->coef_in, &b->w,     &b->a_pre, &b->a_post,
                            &b->a_res,    &b->beta, &b->gain,  &b->y,       &b->stat,  &b->coef,  &b->h,
                            &b->work,     &b->info, &b->dh,    &b->dy,      &b->dcoef, &b->dx,    &b->df,
                            &b->dcoef_in, &b->dz,   &b->dgain, &b->dbias};
    for (int i = 0; i < countof(all); i++)
        free(all[i]->data);
    dev_close(&b->m.dev);
}

static struct dropout_rule dropping(const struct boundary *b)
{
    return (struct dropout_rule){.p = 0.3, .key = 5, .seq = 7, .info = b->info};
}

static struct mhc_boundary_fwd_args forward(const struct boundary *b)
{
    return (struct mhc_boundary_fwd_args){.x = b->x,
                                          .f = b->f,
                                          .bias = b->bias,
                                          .coef_in = b->coef_in,
                                          .w = b->w,
                                          .a_pre = b->a_pre,
                                          .a_post = b->a_post,
                                          .a_res = b->a_res,
                                          .beta = b->beta,
                                          .gain = b->gain,
                                          .y = b->y,
                                          .stat = b->stat,
                                          .coef = b->coef,
                                          .h = b->h,
                                          .work = b->work,
                                          .rule = b->rule,
                                          .eps = 1e-5,
                                          .drop = dropping(b)};
}

static struct tensor part(const struct tensor *t, int64_t first, int64_t n) { return tensor_cols(t, first, n); }

/* The same by primitives, into tensors of its own. */
static void chain(const struct boundary *b, struct tensor *y, struct tensor *coef, struct tensor *h)
{
    const struct ops *o = b->m.ops;
    struct lane *l = (struct lane *)&b->m.lane;
    struct tensor p = make(&b->m, ROWS, N4, 0, 0), rho = make(&b->m, ROWS, 1, 0, 0), a = make(&b->m, ROWS, C, 0, 0),
                  rstd = make(&b->m, 1, ROWS, 0, 0);
    struct mhc_combine_fwd_args combine = {.x = b->x,
                                           .f = b->f,
                                           .bias = b->bias,
                                           .post = part(&b->coef_in, 4, 4),
                                           .res = part(&b->coef_in, 8, 16),
                                           .y = *y,
                                           .rule = b->rule,
                                           .drop = dropping(b)};
    struct mhc_project_fwd_args project = {.x = *y, .w = b->w, .p = p, .rho = rho};
    struct mhc_gates_fwd_args gates = {.p = p,
                                       .rho = rho,
                                       .a_pre = b->a_pre,
                                       .a_post = b->a_post,
                                       .a_res = b->a_res,
                                       .beta = b->beta,
                                       .pre = part(coef, 0, 4),
                                       .post = part(coef, 4, 4),
                                       .logits = part(coef, 8, 16),
                                       .rule = b->rule};
    struct mhc_sinkhorn_fwd_args sinkhorn = {.logits = gates.logits, .res = gates.logits, .rule = b->rule};
    struct mhc_aggregate_fwd_args aggregate = {.x = *y, .pre = gates.pre, .a = a};
    struct rmsnorm_fwd_args norm = {.x = a, .w = b->gain, .y = *h, .rstd = flat(rstd), .eps = 1e-5};
    assert_ok(o->mhc_combine_fwd(l, &combine), &e);
    assert_ok(o->mhc_project_fwd(l, &project), &e);
    assert_ok(o->mhc_gates_fwd(l, &gates), &e);
    assert_ok(o->mhc_sinkhorn_fwd(l, &sinkhorn), &e);
    assert_ok(o->mhc_aggregate_fwd(l, &aggregate), &e);
    assert_ok(o->rmsnorm_fwd(l, &norm), &e);
    free(p.data);
    free(rho.data);
    free(a.data);
    free(rstd.data);
}

static double worst_difference(const struct tensor *a, const struct tensor *b)
{
    double worst = 0;
    for (int64_t i = 0, n = tensor_elems(a); i < n; i++)
        worst = fmax(worst, fabs(tensor_get(a, i) - tensor_get(b, i)));
    return worst;
}

static void the_boundary_is_the_chain_of_its_primitives(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++)
        for (int profile = 0; profile < 2; profile++) {
            struct boundary b;
            open_boundary(&b, kind ? DEV_CPU : DEV_REF, profile ? s4 : d4);
            struct tensor y = make(&b.m, ROWS, 4 * C, 0, 0), coef = make(&b.m, ROWS, N4, 0, 0),
                          h = make(&b.m, ROWS, C, 0, 0);
            struct mhc_boundary_fwd_args a = forward(&b);
            assert_ok(b.m.ops->mhc_boundary_fwd(&b.m.lane, &a), &e);
            chain(&b, &y, &coef, &h);
            double limit = kind ? 2e-5 : 0;
            assert_true(worst_difference(&y, &b.y) <= limit);
            assert_true(worst_difference(&coef, &b.coef) <= limit);
            assert_true(worst_difference(&h, &b.h) <= limit);
            free(y.data);
            free(coef.data);
            free(h.data);
            close_boundary(&b);
        }
}

/* What recompute relies on: streams and norms recomputed have the same bits. */
static void replays_have_the_same_bits(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct boundary b;
        open_boundary(&b, kind ? DEV_CPU : DEV_REF, d4);
        struct mhc_boundary_fwd_args a = forward(&b);
        assert_ok(b.m.ops->mhc_boundary_fwd(&b.m.lane, &a), &e);
        struct tensor y = make(&b.m, ROWS, 4 * C, 1, 1), h = make(&b.m, ROWS, C, 1, 1), h2 = make(&b.m, ROWS, C, 1, 1);
        struct mhc_combine_fwd_args combine = {.x = b.x,
                                               .f = b.f,
                                               .bias = b.bias,
                                               .post = part(&b.coef_in, 4, 4),
                                               .res = part(&b.coef_in, 8, 16),
                                               .y = y,
                                               .rule = b.rule,
                                               .drop = dropping(&b)};
        assert_ok(b.m.ops->mhc_combine_fwd(&b.m.lane, &combine), &e);
        assert_memory_equal(y.data, b.y.data, (size_t)tensor_bytes(&y));
        struct mhc_boundary_fwd_args again = {.x = y,
                                              .gain = b.gain,
                                              .stat = b.stat,
                                              .coef = b.coef,
                                              .h = h,
                                              .work = b.work,
                                              .rule = b.rule,
                                              .eps = 1e-5,
                                              .reuse = true};
        assert_ok(b.m.ops->mhc_boundary_fwd(&b.m.lane, &again), &e);
        assert_memory_equal(h.data, b.h.data, (size_t)tensor_bytes(&h));
        /* Both in one pass, over the old streams. */
        a.y = a.x;
        a.h = h2;
        a.reuse = true;
        assert_ok(b.m.ops->mhc_boundary_fwd(&b.m.lane, &a), &e);
        assert_memory_equal(b.x.data, b.y.data, (size_t)tensor_bytes(&b.x));
        assert_memory_equal(h2.data, b.h.data, (size_t)tensor_bytes(&h));
        free(y.data);
        free(h.data);
        free(h2.data);
        close_boundary(&b);
    }
}

static struct mhc_boundary_bwd_args backward(const struct boundary *b)
{
    return (struct mhc_boundary_bwd_args){.dh = b->dh,
                                          .dy = b->dy,
                                          .dcoef = b->dcoef,
                                          .y = b->y,
                                          .stat = b->stat,
                                          .coef = b->coef,
                                          .gain = b->gain,
                                          .w = b->w,
                                          .a_pre = b->a_pre,
                                          .a_post = b->a_post,
                                          .a_res = b->a_res,
                                          .beta = b->beta,
                                          .x = b->x,
                                          .f = b->f,
                                          .bias = b->bias,
                                          .coef_in = b->coef_in,
                                          .dx = b->dx,
                                          .df = b->df,
                                          .dcoef_in = b->dcoef_in,
                                          .dz = b->dz,
                                          .dgain = b->dgain,
                                          .dbias = b->dbias,
                                          .work = b->work,
                                          .rule = b->rule,
                                          .drop = dropping(b)};
}

static void the_gradient_may_replace_the_incoming_one(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct boundary b;
        open_boundary(&b, kind ? DEV_CPU : DEV_REF, s4);
        struct mhc_boundary_fwd_args f = forward(&b);
        struct mhc_boundary_bwd_args a = backward(&b);
        assert_ok(b.m.ops->mhc_boundary_fwd(&b.m.lane, &f), &e);
        assert_ok(b.m.ops->mhc_boundary_bwd(&b.m.lane, &a), &e);
        a.dx = a.dy;
        assert_ok(b.m.ops->mhc_boundary_bwd(&b.m.lane, &a), &e);
        assert_memory_equal(b.dy.data, b.dx.data, (size_t)tensor_bytes(&b.dx));
        /* The aggregate's weights belong to the sublayer that opened, not to the one that closed. */
        for (int64_t r = 0; r < ROWS; r++)
            for (int64_t i = 0; i < 4; i++)
                assert_true(tensor_get(&b.dcoef_in, r * N4 + i) == 0);
        close_boundary(&b);
    }
}

/* One mask over all streams: channel i C + c of the dropout op, C not a multiple of the draws' four. */
static void the_mask_is_that_of_the_dropout_op_over_all_streams(void **state)
{
    (void)state;
    struct boundary b;
    open_boundary(&b, DEV_CPU, d4);
    struct tensor zero = make(&b.m, ROWS, 4 * C, 0, 0), y = make(&b.m, ROWS, 4 * C, 0, 0),
                  wide = make(&b.m, ROWS, 4 * C, 0, 0);
    struct mhc_combine_fwd_args a = {
        .x = zero, .f = b.f, .post = part(&b.coef_in, 4, 4), .res = part(&b.coef_in, 8, 16), .y = y, .rule = b.rule};
    assert_ok(b.m.ops->mhc_combine_fwd(&b.m.lane, &a), &e);
    struct dropout_args d = {.x = y, .y = wide, .rule = dropping(&b)};
    assert_ok(b.m.ops->dropout(&b.m.lane, &d), &e);
    a.drop = dropping(&b);
    assert_ok(b.m.ops->mhc_combine_fwd(&b.m.lane, &a), &e);
    assert_true(worst_difference(&y, &wide) < 1e-6);
    int zeros = 0;
    for (int64_t i = 0; i < ROWS * 4 * C; i++)
        zeros += tensor_get(&y, i) == 0;
    assert_in_range(zeros, ROWS * 4 * C * 25 / 100, ROWS * 4 * C * 35 / 100);
    free(zero.data);
    free(y.data);
    free(wide.data);
    close_boundary(&b);
}

/* ---- rounding, expansion, contraction -------------------------------------------------------- */

static void coefficients_are_rounded_to_bf16_on_request(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct boundary b;
        struct mhc_rule rule = d4;
        rule.round_bf16 = true;
        open_boundary(&b, kind ? DEV_CPU : DEV_REF, rule);
        struct mhc_boundary_fwd_args a = forward(&b);
        assert_ok(b.m.ops->mhc_boundary_fwd(&b.m.lane, &a), &e);
        int changed = 0;
        struct tensor rounded = make(&b.m, ROWS, N4, 0, 0);
        for (int64_t i = 0; i < ROWS * N4; i++) {
            double v = tensor_get(&b.coef, i);
            assert_true(v == (double)bf16_to_f32(f32_to_bf16((float)v)));
            tensor_set(&rounded, i, v);
        }
        a.rule.round_bf16 = false;
        assert_ok(b.m.ops->mhc_boundary_fwd(&b.m.lane, &a), &e);
        for (int64_t i = 0; i < ROWS * N4; i++) {
            double v = tensor_get(&b.coef, i);
            changed += v != tensor_get(&rounded, i);
            assert_true(fabs(v - tensor_get(&rounded, i)) <= fabs(v) / 256 + 1e-30);
        }
        assert_true(changed > ROWS * N4 / 2);
        free(rounded.data);
        close_boundary(&b);
    }
}

static void contracting_the_expanded_stream_gives_it_back(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        struct machine m;
        open_machine(&m, kind ? DEV_CPU : DEV_REF);
        struct tensor x = make(&m, 9, 11, 1, 1), y = make(&m, 9, 44, 0, 0), z = make(&m, 9, 11, 0, 0);
        struct mhc_expand_fwd_args up = {.x = x, .y = y};
        struct mhc_contract_fwd_args down = {.x = y, .y = z};
        assert_ok(m.ops->mhc_expand_fwd(&m.lane, &up), &e);
        assert_ok(m.ops->mhc_contract_fwd(&m.lane, &down), &e);
        assert_memory_equal(z.data, x.data, (size_t)tensor_bytes(&x));
        for (int64_t i = 0; i < 9 * 44; i++) /* materialised copies, stream major */
            assert_true(tensor_get(&y, i) == tensor_get(&x, i / 44 * 11 + i % 44 % 11));
        free(x.data);
        free(y.data);
        free(z.data);
        dev_close(&m.dev);
    }
}

/* With equal streams any doubly stochastic mix gives the same: no gradient reaches the mixing logits. */
static void equal_streams_give_no_gradient_to_the_mixing_logits(void **state)
{
    (void)state;
    for (int profile = 0; profile < 2; profile++) {
        struct boundary b;
        open_boundary(&b, DEV_REF, profile ? s4 : d4);
        struct mhc_combine_bwd_args a = {.dy = b.dy,
                                         .x = b.x,
                                         .f = b.f,
                                         .post = part(&b.coef_in, 4, 4),
                                         .res = part(&b.coef_in, 8, 16),
                                         .dx = b.dx,
                                         .df = b.df,
                                         .dpost = part(&b.dcoef_in, 4, 4),
                                         .dres = part(&b.dcoef_in, 8, 16),
                                         .rule = b.rule};
        for (int64_t i = 0; i < ROWS * 4 * C; i++)
            tensor_set(&b.x, i, tensor_get(&b.f, i / (4 * C) * C + i % C));
        assert_ok(b.m.ops->mhc_combine_bwd(&b.m.lane, &a), &e);
        struct tensor dres = part(&b.dcoef_in, 8, 16), logits = part(&b.dcoef, 8, 16), dl = make(&b.m, ROWS, 16, 0, 0);
        struct mhc_sinkhorn_bwd_args s = {.dres = dres, .logits = logits, .dlogits = dl, .rule = b.rule};
        assert_ok(b.m.ops->mhc_sinkhorn_bwd(&b.m.lane, &s), &e);
        double largest = 0;
        for (int64_t i = 0; i < ROWS * 16; i++)
            largest = fmax(largest, fabs(tensor_get(&dl, i)));
        assert_true(largest < 1e-2);
        free(dl.data);
        close_boundary(&b);
    }
}

/* ---- rejected -------------------------------------------------------------------------------- */

static void bad_arguments_are_refused_with_the_reason(void **state)
{
    (void)state;
    struct boundary b;
    open_boundary(&b, DEV_CPU, d4);
    struct mhc_boundary_fwd_args a = forward(&b);
    a.rule.streams = 1;
    assert_fails(b.m.ops->mhc_boundary_fwd(&b.m.lane, &a), ST_INVALID, &e, "1 streams");
    a = forward(&b);
    a.rule.iterations = 0;
    assert_fails(b.m.ops->mhc_boundary_fwd(&b.m.lane, &a), ST_INVALID, &e, "0 Sinkhorn iterations");
    a = forward(&b);
    a.rule.streams = 3;
    assert_fails(b.m.ops->mhc_boundary_fwd(&b.m.lane, &a), ST_INVALID, &e, "not a multiple of 3 streams");
    a = forward(&b);
    a.coef_in.data = NULL;
    assert_fails(b.m.ops->mhc_boundary_fwd(&b.m.lane, &a), ST_INVALID, &e, "tensor coef_in is missing, f is given");
    a = forward(&b);
    a.w.dim[0] = 23;
    assert_fails(b.m.ops->mhc_boundary_fwd(&b.m.lane, &a), ST_INVALID, &e, "tensor w is");
    a = forward(&b);
    a.drop.p = 1;
    assert_fails(b.m.ops->mhc_boundary_fwd(&b.m.lane, &a), ST_INVALID, &e, "p is 1");
    struct mhc_boundary_bwd_args g = backward(&b);
    g.df.data = NULL;
    assert_fails(b.m.ops->mhc_boundary_bwd(&b.m.lane, &g), ST_INVALID, &e, "tensor df is missing, f is given");
    g = backward(&b);
    g.work.data = NULL;
    assert_fails(b.m.ops->mhc_boundary_bwd(&b.m.lane, &g), ST_INVALID, &e, "work has 0 bytes");
    struct mhc_contract_fwd_args c = {.x = b.y, .y = b.f};
    c.x.dim[1] = 4 * C - 1;
    assert_fails(b.m.ops->mhc_contract_fwd(&b.m.lane, &c), ST_INVALID, &e, "not a multiple");
    close_boundary(&b);
}

/* Which kernels a GPU would run and why, for every shape that matters: no GPU is needed to know. */
static void paths_are_chosen_by_shape_and_device(void **state)
{
    (void)state;
    static const struct mhc_device h200 = {true, 132, 128}, narrow = {true, 132, 96}, no_clusters = {true, 132, 0},
                                   a100 = {false, 108, 0};
    static const struct {
        struct mhc_shape shape; /* kernels, type, streams, channels, aligned, w aligned, closes, maps */
        const struct mhc_device *device;
        enum mhc_path path;
        const char *why;
    } cases[] = {
        {{MHC_KERNELS_AUTO, DT_BF16, 4, 2048, 1, 1, 1, 1}, &h200, MHC_PATH_CLUSTER, "fill the GPU"},
        {{MHC_KERNELS_BOUNDARY, DT_BF16, 4, 4096, 1, 1, 1, 1}, &h200, MHC_PATH_CLUSTER, "fill the GPU"},
        {{MHC_KERNELS_AUTO, DT_BF16, 4, 2048, 1, 1, 1, 0}, &h200, MHC_PATH_PASS, "coefficients and norm"},
        {{MHC_KERNELS_AUTO, DT_BF16, 4, 4096, 1, 1, 1, 1}, &narrow, MHC_PATH_PASS, "idle"},
        {{MHC_KERNELS_AUTO, DT_BF16, 4, 4096, 1, 1, 1, 1}, &no_clusters, MHC_PATH_PASS, "idle"},
        {{MHC_KERNELS_AUTO, DT_BF16, 4, 4352, 1, 1, 1, 1}, &h200, MHC_PATH_PASS, "up to 4096"},
        {{MHC_KERNELS_AUTO, DT_BF16, 4, 2048, 1, 0, 1, 1}, &h200, MHC_PATH_ROWS, "aligned to 16 bytes"},
        {{MHC_KERNELS_AUTO, DT_BF16, 4, 320, 1, 1, 1, 1}, &h200, MHC_PATH_ROWS, "multiples of 256"},
        {{MHC_KERNELS_AUTO, DT_BF16, 4, 2048, 1, 1, 1, 1}, &a100, MHC_PATH_ROWS, "not a Hopper GPU"},
        {{MHC_KERNELS_AUTO, DT_BF16, 4, 2048, 0, 1, 1, 1}, &h200, MHC_PATH_ROWS, "aligned to 16 bytes"},
        {{MHC_KERNELS_AUTO, DT_BF16, 4, 72, 1, 1, 1, 1}, &h200, MHC_PATH_ROWS, "multiples of 256"},
        {{MHC_KERNELS_AUTO, DT_BF16, 2, 2048, 1, 1, 1, 1}, &h200, MHC_PATH_ROWS, "4 streams"},
        {{MHC_KERNELS_AUTO, DT_F32, 4, 2048, 1, 1, 1, 1}, &h200, MHC_PATH_ROWS, "take bf16"},
        {{MHC_KERNELS_AUTO, DT_BF16, 4, 2048, 1, 1, 0, 1}, &h200, MHC_PATH_ROWS, "closes no sublayer"},
        {{MHC_KERNELS_BOUNDARY, DT_BF16, 4, 2048, 1, 1, 0, 1}, &h200, MHC_PATH_ROWS, "closes no sublayer"},
        {{MHC_KERNELS_BOUNDARY, DT_F32, 4, 2048, 1, 1, 1, 1}, &h200, MHC_PATH_NONE, "take bf16"},
        {{MHC_KERNELS_BOUNDARY, DT_BF16, 3, 2048, 1, 1, 1, 1}, &h200, MHC_PATH_NONE, "4 streams"},
        {{MHC_KERNELS_BOUNDARY, DT_F32, 4, 2048, 1, 1, 1, 1}, &a100, MHC_PATH_NONE, "take bf16"},
        {{MHC_KERNELS_BOUNDARY, DT_BF16, 4, 2048, 1, 1, 1, 1}, &a100, MHC_PATH_ROWS, "not a Hopper GPU"},
        {{MHC_KERNELS_BOUNDARY, DT_BF16, 4, 320, 1, 1, 1, 1}, &h200, MHC_PATH_ROWS, "multiples of 256"},
        {{MHC_KERNELS_PRIMITIVE, DT_BF16, 4, 2048, 1, 1, 1, 1}, &h200, MHC_PATH_ROWS, "mhc.kernels = primitive"},
        {{MHC_KERNELS_REF, DT_BF16, 4, 2048, 1, 1, 1, 1}, &h200, MHC_PATH_PLAIN, "mhc.kernels = ref"},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct mhc_choice c = mhc_path_of(&cases[i].shape, cases[i].device);
        if (c.path != cases[i].path || strstr(c.why, cases[i].why) == NULL)
            fail_msg("case %d: path %d (%s, %s), expected %d with '%s'", i, c.path, c.kernels, c.why, cases[i].path,
                     cases[i].why);
        int st = mhc_refuse_path(&cases[i].shape, &c, &e);
        if (cases[i].path == MHC_PATH_NONE)
            assert_fails(st, ST_UNSUPPORTED, &e, cases[i].why);
        else
            assert_ok(st, &e);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sinkhorn_gives_the_specified_values),
        cmocka_unit_test(mixing_is_transposed_in_profile_d_and_not_in_s),
        cmocka_unit_test(huge_logits_stay_finite_forward_and_backward),
        cmocka_unit_test(ordinary_logits_give_a_doubly_stochastic_matrix),
        cmocka_unit_test(columns_far_apart_give_a_doubly_stochastic_matrix),
        cmocka_unit_test(large_inputs_do_not_overflow_the_root_mean_square),
        cmocka_unit_test(a_stream_of_zeros_has_no_gradient_through_the_norm),
        cmocka_unit_test(the_boundary_is_the_chain_of_its_primitives),
        cmocka_unit_test(replays_have_the_same_bits),
        cmocka_unit_test(paths_are_chosen_by_shape_and_device),
        cmocka_unit_test(the_gradient_may_replace_the_incoming_one),
        cmocka_unit_test(the_mask_is_that_of_the_dropout_op_over_all_streams),
        cmocka_unit_test(coefficients_are_rounded_to_bf16_on_request),
        cmocka_unit_test(contracting_the_expanded_stream_gives_it_back),
        cmocka_unit_test(equal_streams_give_no_gradient_to_the_mixing_logits),
        cmocka_unit_test(bad_arguments_are_refused_with_the_reason),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
