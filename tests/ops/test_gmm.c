/* gmm beyond the descriptors' samples: biases scaled by probabilities, empty experts, no rows at
 * all, offsets that lie. */
#include "bench.h"
#include "ops/gmm/gmm.h"

#include "ops/gmm/gmm_form.h"
#include "ops/gmm/gmm_tile.h"

static void a_bias_is_scaled_by_the_probability_of_its_row(void **state)
{
    struct bench *t = *state;
    float x[] = {1, 2, 3, 4, 5, 6}, w[] = {1, 0, 0, 1, 1, 0, 0, 1}, bias[] = {10, 20, 100, 200}, y[6];
    float prob[2][3] = {{0.5f, 0.5f, 1}, {0.25f, 0.5f, 1.5f}};
    const float want[2][6] = {{6, 12, 8, 14, 105, 206}, {3.5f, 7, 8, 14, 155, 306}};
    int32_t offset[] = {0, 2, 3};
    struct gmm_fwd_args a = {.x = tensor_2d(x, DT_F32, 3, 2),
                             .w = tensor_3d(w, DT_F32, 2, 2, 2),
                             .bias = tensor_2d(bias, DT_F32, 2, 2),
                             .offset = tensor_1d(offset, DT_I32, 3),
                             .y = tensor_2d(y, DT_F32, 3, 2)};
    for (int i = 0; i < 2; i++) {
        a.prob = tensor_1d(prob[i], DT_F32, 3);
        assert_ok(t->ops->gmm_fwd(&t->lane, &a), &t->e);
        assert_memory_equal(y, want[i], sizeof y);
    }
    float dy[] = {1, 1, 1, 1, 1, 1}, dbias[4], dprob[3] = {1, 1, 1};
    const float want_dbias[] = {0.75f, 0.75f, 1.5f, 1.5f}, want_dprob[] = {31, 31, 301};
    struct gmm_bwd_args b = {.dy = tensor_2d(dy, DT_F32, 3, 2),
                             .bias = a.bias,
                             .prob = a.prob,
                             .offset = a.offset,
                             .dbias = tensor_2d(dbias, DT_F32, 2, 2),
                             .dprob = tensor_1d(dprob, DT_F32, 3),
                             .acc_dprob = true};
    assert_ok(t->ops->gmm_bwd(&t->lane, &b), &t->e);
    assert_memory_equal(dbias, want_dbias, sizeof dbias);
    assert_memory_equal(dprob, want_dprob, sizeof dprob);
}

static void an_empty_expert_keeps_its_gradient_or_gets_zeros(void **state)
{
    struct bench *t = *state;
    float dy[] = {1, 2}, x[] = {3, 4, 5, 6}, dw[3][2], dbias[3];
    int32_t offset[] = {0, 1, 1, 2};
    for (int acc = 0; acc < 2; acc++) {
        for (int i = 0; i < 3; i++)
            dw[i][0] = dw[i][1] = dbias[i] = acc ? 0.5f : NAN;
        struct gmm_bwd_args b = {.dy = tensor_2d(dy, DT_F32, 2, 1),
                                 .x = tensor_2d(x, DT_F32, 2, 2),
                                 .offset = tensor_1d(offset, DT_I32, 4),
                                 .dw = tensor_3d(dw, DT_F32, 3, 1, 2),
                                 .dbias = tensor_2d(dbias, DT_F32, 3, 1),
                                 .acc_dw = acc,
                                 .acc_dbias = acc};
        assert_ok(t->ops->gmm_bwd(&t->lane, &b), &t->e);
        float start = acc ? 0.5f : 0;
        assert_true(dw[0][0] == start + 3 && dw[0][1] == start + 4 && dbias[0] == start + 1);
        assert_true(dw[1][0] == start && dw[1][1] == start && dbias[1] == start);
        assert_true(dw[2][0] == start + 10 && dw[2][1] == start + 12 && dbias[2] == start + 2);
    }
}

static void no_rows_still_give_every_gradient(void **state)
{
    struct bench *t = *state;
    float none[1] = {0}, w[4] = {1, 2, 3, 4}, dw[4] = {NAN, NAN, NAN, NAN}, y[2] = {NAN, NAN};
    int32_t offset[] = {0, 0, 0};
    struct gmm_bwd_args b = {.dy = tensor_2d(none, DT_F32, 0, 1),
                             .x = tensor_2d(none, DT_F32, 0, 2),
                             .w = tensor_3d(w, DT_F32, 2, 1, 2),
                             .offset = tensor_1d(offset, DT_I32, 3),
                             .dx = tensor_2d(none, DT_F32, 0, 2),
                             .dw = tensor_3d(dw, DT_F32, 2, 1, 2)};
    assert_ok(t->ops->gmm_bwd(&t->lane, &b), &t->e);
    for (int i = 0; i < 4; i++)
        assert_true(dw[i] == 0);
    /* Rows that belong to nobody are zero. */
    float x[4] = {NAN, NAN, NAN, NAN};
    struct gmm_fwd_args f = {
        .x = tensor_2d(x, DT_F32, 2, 2), .w = b.w, .offset = b.offset, .y = tensor_2d(y, DT_F32, 2, 1)};
    assert_ok(t->ops->gmm_fwd(&t->lane, &f), &t->e);
    assert_true(y[0] == 0 && y[1] == 0);
}

static void offsets_that_lie_are_refused(void **state)
{
    struct bench *t = *state;
    float x[4] = {0}, w[4] = {0}, y[2];
    const int32_t bad[][3] = {{0, 2, 1}, {0, 1, 3}, {1, 1, 2}, {0, -1, 2}};
    for (int i = 0; i < countof(bad); i++) {
        int32_t offset[3];
        memcpy(offset, bad[i], sizeof offset);
        struct gmm_fwd_args a = {.x = tensor_2d(x, DT_F32, 2, 2),
                                 .w = tensor_3d(w, DT_F32, 2, 1, 2),
                                 .offset = tensor_1d(offset, DT_I32, 3),
                                 .y = tensor_2d(y, DT_F32, 2, 1)};
        assert_fails(t->ops->gmm_fwd(&t->lane, &a), ST_INVALID, &t->e, "offsets");
    }
    struct gmm_fwd_args a = {.x = tensor_2d(x, DT_F32, 2, 2), .w = tensor_3d(w, DT_F32, 2, 2, 1)};
    assert_fails(t->ops->gmm_fwd(&t->lane, &a), ST_INVALID, &t->e, "w");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, open_cpu_bench, close_cpu_bench)

/* The choice a GPU makes: large tiles where there is work for them, small ones for few rows or narrow outputs. */
static void tiles_follow_the_shape(void **state)
{
    (void)state;
    struct gmm_shape olmoe = {.rows = 131072, .n = 2048, .groups = 64, .ragged = true},
                     weights = {.rows = 1024, .n = 2048, .groups = 64};
    struct gmm_shape few = {.rows = 64, .n = 1024, .groups = 8, .ragged = true},
                     thin = {.rows = 4096, .n = 128, .groups = 16, .ragged = true};
    assert_int_equal(gmm_tile_for(&olmoe, 132), GMM_TILE_LARGE);
    assert_int_equal(gmm_tile_for(&weights, 132), GMM_TILE_LARGE);
    assert_int_equal(gmm_tile_for(&few, 132), GMM_TILE_SMALL);
    assert_int_equal(gmm_tile_for(&thin, 132), GMM_TILE_SMALL);
}

/* However rows fall on the groups (and on none), the bound covers their tiles; here the worst case: one row too many
 * each. */
static void the_bound_on_tiles_holds(void **state)
{
    (void)state;
    for (enum gmm_tile t = GMM_TILE_SMALL; t < GMM_TILES; t++) {
        struct gmm_tile_size z = gmm_tile_size(t);
        /* seven groups and a tail */
        struct gmm_shape s = {.rows = 8 * (z.m + 1), .n = z.n + 1, .groups = 7, .ragged = true};
        assert_true(gmm_tiles_most(&s, t) >= 8 * 2 * 2);
        struct gmm_shape w = {.rows = z.m + 1, .n = z.n + 1, .groups = 7};
        assert_int_equal(gmm_tiles_most(&w, t), 7 * 2 * 2);
    }
}

/* Bulk copies: none where most multiprocessors would idle; and tiles that run together read about as many rows as
 * weights. */
static void large_tiles_are_for_large_products(void **state)
{
    (void)state;
    assert_true(gmm_form_fills(64, 2048, 132) && !gmm_form_fills(2, 2048, 132) && !gmm_form_fills(64, 0, 132));
    assert_true(gmm_form_fills(33, 1, 132) && !gmm_form_fills(32, 1, 132) &&
                gmm_form_fills(32, GMM_FORM_COLS + 1, 132));
    double rows = GMM_FORM_SWEEP * GMM_FORM_ROWS, columns = 132.0 / GMM_FORM_SWEEP * GMM_FORM_COLS;
    assert_true(rows / columns > 0.5 && rows / columns < 2);
}

/* Large experts: the cut into pieces follows the number of threads, the sums do not. */
enum { BIG_ROWS = 831, BIG = 1024, BIG_EXPERTS = 3 };
struct big {
    float *x, *w, *y, *dx, *dw;
};
static void run_big(struct big *b, int threads)
{
    struct err e = {0};
    struct dev dev;
    assert_ok(dev_open(&dev, DEV_CPU, threads, &e), &e);
    struct lane lane = {.dev = &dev, .err = &e};
    const struct ops *ops = ops_for(&dev);
    int32_t offset[] = {0, 300, 300, BIG_ROWS};
    struct tensor x = tensor_2d(b->x, DT_F32, BIG_ROWS, BIG), w = tensor_3d(b->w, DT_F32, BIG_EXPERTS, BIG, BIG),
                  at = tensor_1d(offset, DT_I32, BIG_EXPERTS + 1), y = tensor_2d(b->y, DT_F32, BIG_ROWS, BIG);
    struct gmm_fwd_args f = {.x = x, .w = w, .offset = at, .y = y};
    assert_ok(ops->gmm_fwd(&lane, &f), &e);
    struct gmm_bwd_args g = {.dy = y,
                             .x = x,
                             .w = w,
                             .offset = at,
                             .dx = tensor_2d(b->dx, DT_F32, BIG_ROWS, BIG),
                             .dw = tensor_3d(b->dw, DT_F32, BIG_EXPERTS, BIG, BIG)};
    assert_ok(ops->gmm_bwd(&lane, &g), &e);
    dev_close(&dev);
}

static void threads_do_not_change_large_experts(void **state)
{
    (void)state;
    enum { RUNS = 3, N = BIG_ROWS * BIG, WEIGHTS = BIG_EXPERTS * BIG * BIG };
    struct big b[RUNS];
    for (int i = 0; i < RUNS; i++) {
        float *all = calloc((size_t)3 * N + 2 * WEIGHTS, sizeof *all);
        assert_non_null(all);
        b[i] = (struct big){all, all + 3 * N, all + N, all + 2 * N, all + 3 * N + WEIGHTS};
        for (int k = 0; k < N; k++)
            b[i].x[k] = sinf((float)k);
        for (int k = 0; k < WEIGHTS; k++)
            b[i].w[k] = cosf((float)k);
        run_big(&b[i], i + 1);
    }
    for (int i = 1; i < RUNS; i++) {
        assert_memory_equal(b[i].y, b[0].y, N * sizeof(float));
        assert_memory_equal(b[i].dx, b[0].dx, N * sizeof(float));
        assert_memory_equal(b[i].dw, b[0].dw, WEIGHTS * sizeof(float));
    }
    double sum = 0; /* the last row and column, of the last expert */
    for (int k = 0; k < BIG; k++)
        sum += (double)b[0].x[N - BIG + k] * b[0].w[WEIGHTS - BIG + k];
    assert_true(fabs(sum - b[0].y[N - 1]) < 1e-3);
    for (int k = 0; k < BIG * BIG; k++)
        assert_true(b[0].dw[BIG * BIG + k] == 0); /* an expert without rows */
    for (int i = 0; i < RUNS; i++)
        free(b[i].x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_bias_is_scaled_by_the_probability_of_its_row),
        TEST(an_empty_expert_keeps_its_gradient_or_gets_zeros),
        TEST(no_rows_still_give_every_gradient),
        TEST(offsets_that_lie_are_refused),
        cmocka_unit_test(threads_do_not_change_large_experts),
        cmocka_unit_test(tiles_follow_the_shape),
        cmocka_unit_test(the_bound_on_tiles_holds),
        cmocka_unit_test(large_tiles_are_for_large_products),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
