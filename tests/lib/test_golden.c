/* libbraidk on the host against golden values: both profiles, both places of epsilon, with a norm and without, forward
 * and backward, in double (the reference) and in fp32. */
#include "lib/braidk.h"
#include "golden.h"

enum { ROWS = 3, STREAMS = 4, CHANNELS = 6, K = STREAMS * CHANNELS, N = STREAMS * STREAMS + 2 * STREAMS, MOST = N * K };

struct world {
    struct golden g;
    struct braidk *k;
    int dtype;
    double tolerance;
    void *kept[128];
    int n_kept;
};

static void *keep(struct world *w, size_t bytes)
{
    assert_true(w->n_kept < countof(w->kept));
    void *p = aligned_alloc(256, (bytes + 511) / 256 * 256);
    assert_non_null(p);
    memset(p, 0xff, bytes); /* not a number, in every type */
    return w->kept[w->n_kept++] = p;
}

static struct braidk_tensor empty(struct world *w, int rank, int64_t rows, int64_t columns)
{
    struct braidk_tensor t = {.rank = rank, .dtype = w->dtype};
    t.shape[0] = rows;
    t.shape[1] = rank == 2 ? columns : 0;
    t.stride[0] = rank == 2 ? columns : 1;
    t.stride[1] = rank == 2;
    t.data = keep(w, (size_t)(rank == 2 ? rows * columns : rows) * 8);
    return t;
}

static void set(const struct braidk_tensor *t, int64_t i, double v)
{
    if (t->dtype == BRAIDK_F64)
        ((double *)t->data)[i] = v;
    else
        ((float *)t->data)[i] = (float)v;
}
static double get(const struct braidk_tensor *t, int64_t i)
{
    return t->dtype == BRAIDK_F64 ? ((double *)t->data)[i] : (double)((float *)t->data)[i];
}

static struct braidk_tensor given(struct world *w, const char *name, int rank, int64_t rows, int64_t columns)
{
    int64_t n;
    const double *from = golden_at(&w->g, "in", name, &n);
    struct braidk_tensor t = empty(w, rank, rows, columns);
    assert_int_equal(n, rank == 2 ? rows * columns : rows);
    for (int64_t i = 0; i < n; i++)
        set(&t, i, from[i]);
    return t;
}

/* Coefficients as the library has them: zeros for pre, then post and comb. */
static struct braidk_tensor joined(struct world *w, const char *post, const char *comb)
{
    int64_t n;
    const double *p = golden_at(&w->g, "in", post, &n), *c = golden_at(&w->g, "in", comb, &n);
    struct braidk_tensor t = empty(w, 2, ROWS, N);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < N; i++)
            set(&t, r * N + i,
                i < STREAMS       ? 0
                : i < 2 * STREAMS ? p[r * STREAMS + i - STREAMS]
                                  : c[r * STREAMS * STREAMS + i - 2 * STREAMS]);
    return t;
}

/* Columns [first, first + count) of each row of t, [rows, width], against golden values. */
static void expect(struct world *w, const char *group, const char *name, const struct braidk_tensor *t, int64_t width,
                   int64_t first, int64_t count)
{
    int64_t n;
    double largest = 0, worst = 0;
    const double *want = golden_at(&w->g, group, name, &n);
    assert_int_equal(n % count, 0);
    for (int64_t i = 0; i < n; i++) {
        double have = get(t, i / count * width + first + i % count);
        largest = fmax(largest, fabs(want[i]));
        worst = fmax(worst, isnan(have) ? INFINITY : fabs(have - want[i]));
    }
    if (!(worst <= w->tolerance * largest))
        fail_msg("%s of %s differs by %g, where the largest value is %g", name, group, worst, largest);
}

static void work_for(struct world *w, struct braidk_work *work, int status, const char *why)
{
    if (status != BRAIDK_OK)
        fail_msg("%s", why);
    work->data = keep(w, (size_t)work->bytes + 1);
}
#define RUN(w, op, a)                                                                                                  \
    do {                                                                                                               \
        char why[512];                                                                                                 \
        work_for(w, &(a)->work, braidk_##op##_work((w)->k, a, &(a)->work.bytes, why, sizeof why), why);                \
        if (braidk_##op((w)->k, a, NULL, why, sizeof why) != BRAIDK_OK)                                                \
            fail_msg("%s", why);                                                                                       \
    } while (0)

static void expect_forward(struct world *w, const char *group, const struct braidk_tensor *y,
                           const struct braidk_tensor *h, const struct braidk_tensor *coef)
{
    expect(w, group, "y", y, K, 0, K);
    expect(w, group, "h", h, CHANNELS, 0, CHANNELS);
    expect(w, group, "pre", coef, N, 0, STREAMS);
    expect(w, group, "post_next", coef, N, STREAMS, STREAMS);
    expect(w, group, "comb_next", coef, N, 2 * STREAMS, STREAMS * STREAMS);
}
static void expect_params(struct world *w, const char *group, const struct braidk_tensor *dfn,
                          const struct braidk_tensor *dbase, const struct braidk_tensor *dscale)
{
    expect(w, group, "dfn", dfn, K, 0, K);
    expect(w, group, "dbase", dbase, N, 0, N);
    expect(w, group, "dscale", dscale, 3, 0, 3);
}
static void expect_closed(struct world *w, const char *group, const struct braidk_tensor *dx,
                          const struct braidk_tensor *df, const struct braidk_tensor *dcoef,
                          const struct braidk_tensor *dbias)
{
    expect(w, group, "dx", dx, K, 0, K);
    expect(w, group, "df", df, CHANNELS, 0, CHANNELS);
    expect(w, group, "dpost", dcoef, N, STREAMS, STREAMS);
    expect(w, group, "dcomb", dcoef, N, 2 * STREAMS, STREAMS * STREAMS);
    expect(w, group, "dbias", dbias, CHANNELS, 0, CHANNELS);
}

/* The fused boundary. */
static void with_norm(struct world *w, const char *group, struct braidk_mhc mhc)
{
    mhc.norm = 1;
    struct braidk_mhc_boundary_args a = {.size = sizeof a,
                                         .x = given(w, "x", 2, ROWS, K),
                                         .f = given(w, "f", 2, ROWS, CHANNELS),
                                         .coef_in = joined(w, "post", "comb"),
                                         .bias = given(w, "bias", 1, CHANNELS, 0),
                                         .fn = given(w, "fn", 2, N, K),
                                         .base = given(w, "base", 1, N, 0),
                                         .scale = given(w, "scale", 1, 3, 0),
                                         .norm_weight = given(w, "norm_weight", 1, CHANNELS, 0),
                                         .y = empty(w, 2, ROWS, K),
                                         .h = empty(w, 2, ROWS, CHANNELS),
                                         .coef = empty(w, 2, ROWS, N),
                                         .stat = empty(w, 2, ROWS, N + 2),
                                         .mhc = mhc};
    RUN(w, mhc_boundary, &a);
    expect_forward(w, group, &a.y, &a.h, &a.coef);
    struct braidk_mhc_boundary_bwd_args b = {.size = sizeof b,
                                             .dy = given(w, "grad_y", 2, ROWS, K),
                                             .dh = given(w, "grad_h", 2, ROWS, CHANNELS),
                                             .dcoef = joined(w, "grad_post", "grad_comb"),
                                             .x = a.x,
                                             .f = a.f,
                                             .coef_in = a.coef_in,
                                             .bias = a.bias,
                                             .fn = a.fn,
                                             .base = a.base,
                                             .scale = a.scale,
                                             .norm_weight = a.norm_weight,
                                             .y = a.y,
                                             .coef = a.coef,
                                             .stat = a.stat,
                                             .dx = empty(w, 2, ROWS, K),
                                             .df = empty(w, 2, ROWS, CHANNELS),
                                             .dcoef_in = empty(w, 2, ROWS, N),
                                             .dbias = empty(w, 1, CHANNELS, 0),
                                             .dfn = empty(w, 2, N, K),
                                             .dbase = empty(w, 1, N, 0),
                                             .dscale = empty(w, 1, 3, 0),
                                             .dnorm_weight = empty(w, 1, CHANNELS, 0),
                                             .mhc = mhc};
    RUN(w, mhc_boundary_bwd, &b);
    expect_closed(w, group, &b.dx, &b.df, &b.dcoef_in, &b.dbias);
    expect_params(w, group, &b.dfn, &b.dbase, &b.dscale);
    expect(w, group, "dnorm_weight", &b.dnorm_weight, CHANNELS, 0, CHANNELS);
}

/* post, then pre without a norm; backward in the other order, gradients of y added up here. */
static void without_norm(struct world *w, const char *group, struct braidk_mhc mhc)
{
    struct braidk_mhc_post_args post = {.size = sizeof post,
                                        .x = given(w, "x", 2, ROWS, K),
                                        .f = given(w, "f", 2, ROWS, CHANNELS),
                                        .coef = joined(w, "post", "comb"),
                                        .bias = given(w, "bias", 1, CHANNELS, 0),
                                        .y = empty(w, 2, ROWS, K),
                                        .mhc = mhc};
    RUN(w, mhc_post, &post);
    struct braidk_mhc_pre_args pre = {.size = sizeof pre,
                                      .x = post.y,
                                      .fn = given(w, "fn", 2, N, K),
                                      .base = given(w, "base", 1, N, 0),
                                      .scale = given(w, "scale", 1, 3, 0),
                                      .h = empty(w, 2, ROWS, CHANNELS),
                                      .coef = empty(w, 2, ROWS, N),
                                      .stat = empty(w, 2, ROWS, N + 2),
                                      .mhc = mhc};
    RUN(w, mhc_pre, &pre);
    expect_forward(w, group, &post.y, &pre.h, &pre.coef);
    struct braidk_mhc_pre_bwd_args b = {.size = sizeof b,
                                        .dh = given(w, "grad_h", 2, ROWS, CHANNELS),
                                        .dcoef = joined(w, "grad_post", "grad_comb"),
                                        .x = pre.x,
                                        .fn = pre.fn,
                                        .base = pre.base,
                                        .scale = pre.scale,
                                        .coef = pre.coef,
                                        .stat = pre.stat,
                                        .dx = empty(w, 2, ROWS, K),
                                        .dfn = empty(w, 2, N, K),
                                        .dbase = empty(w, 1, N, 0),
                                        .dscale = empty(w, 1, 3, 0),
                                        .mhc = mhc};
    RUN(w, mhc_pre_bwd, &b);
    expect_params(w, group, &b.dfn, &b.dbase, &b.dscale);
    struct braidk_tensor dy = given(w, "grad_y", 2, ROWS, K);
    for (int64_t i = 0; i < ROWS * K; i++)
        set(&dy, i, get(&dy, i) + get(&b.dx, i));
    struct braidk_mhc_post_bwd_args p = {.size = sizeof p,
                                         .dy = dy,
                                         .x = post.x,
                                         .f = post.f,
                                         .coef = post.coef,
                                         .bias = post.bias,
                                         .dx = empty(w, 2, ROWS, K),
                                         .df = empty(w, 2, ROWS, CHANNELS),
                                         .dcoef = empty(w, 2, ROWS, N),
                                         .dbias = empty(w, 1, CHANNELS, 0),
                                         .mhc = mhc};
    RUN(w, mhc_post_bwd, &p);
    expect_closed(w, group, &p.dx, &p.df, &p.dcoef, &p.dbias);
}

static void all_cases(int dtype, double tolerance)
{
    static const char *const names[] = {"d_outside", "d_inside", "s_outside", "s_inside"};
    for (int i = 0; i < 4; i++) {
        struct world w = {.dtype = dtype, .tolerance = tolerance};
        struct braidk_mhc mhc = {.streams = STREAMS,
                                 .iterations = 20,
                                 .profile = i < 2 ? BRAIDK_MHC_D : BRAIDK_MHC_S,
                                 .root_eps = i % 2 == 1 ? 1e-5 : 0,
                                 .norm_eps = 1e-5};
        char group[32], why[256];
        golden_open(&w.g);
        assert_int_equal(braidk_open(BRAIDK_HOST, &w.k, why, sizeof why), BRAIDK_OK);
        snprintf(group, sizeof group, "%s_norm", names[i]);
        with_norm(&w, group, mhc);
        snprintf(group, sizeof group, "%s_plain", names[i]);
        without_norm(&w, group, mhc);
        braidk_close(w.k);
        golden_close(&w.g);
        while (w.n_kept > 0)
            free(w.kept[--w.n_kept]);
    }
}

static void the_reference_gives_the_golden_values(void **state)
{
    (void)state;
    all_cases(BRAIDK_F64, 1e-11);
}

static void fp32_is_near_the_golden_values(void **state)
{
    (void)state;
    all_cases(BRAIDK_F32, 2e-5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_reference_gives_the_golden_values),
        cmocka_unit_test(fp32_is_near_the_golden_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
