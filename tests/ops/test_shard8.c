/* shard8: ranks that have pieces of a matrix make the codes and scales that quantise makes of all of it, wherever the
 * pieces end, and what is not finite on one of them is in the scale of all. */
#include "bench.h"
#include "ops/quantise/quantise.h"
#include "ops/shard8/shard8.h"

#include <math.h>

enum { MOST_RANKS = 5, ROOM = 300 * 150, SCALES = 4096 };

struct made {
    uint8_t q[ROOM], t[ROOM];
    double qs[SCALES], ts[SCALES]; /* or floats */
};
struct matrix {
    int64_t rows, cols, block;
    double values[ROOM]; /* or floats */
};

static struct quantise_args whole_of(struct bench *b, struct matrix *m, struct made *out)
{
    bool square = m->block > 0;
    enum dtype wide = b->dev.wide;
    struct quantise_args a = {.x = tensor_2d(m->values, wide, m->rows, m->cols),
                              .q = tensor_2d(out->q, DT_F8_E4M3, m->rows, m->cols),
                              .t = tensor_2d(out->t, DT_F8_E4M3, m->cols, m->rows),
                              .qs = f8_scales(wide, m->rows, m->cols, m->block, square),
                              .ts = f8_scales(wide, m->cols, m->rows, m->block, square),
                              .block = m->block,
                              .square = square};
    a.qs.data = out->qs;
    a.ts.data = out->ts;
    assert_true(tensor_elems(&a.qs) <= SCALES && tensor_elems(&a.ts) <= SCALES);
    return a;
}

/* Every rank finds its maxima, then, with those of all, every rank makes its codes and all scales. */
static void by_pieces(struct bench *b, struct matrix *m, int ranks, struct made *out)
{
    struct quantise_args whole = whole_of(b, m, out);
    int64_t piece = ceil_div(m->rows, ranks), down = shard8_down(piece, m->block),
            across = shard8_across(m->cols, m->block);
    static double maxima[SCALES];
    struct tensor all = tensor_3d(maxima, b->dev.wide, ranks, down, across);
    assert_true(tensor_elems(&all) <= SCALES);
    for (int stage = 0; stage < 2; stage++)
        for (int r = 0; r < ranks; r++) {
            int64_t first = min_i64(m->rows, r * piece), n = min_i64(piece, m->rows - first);
            struct tensor x = tensor_rows(&whole.x, first, n), q = tensor_rows(&whole.q, first, n),
                          own = tensor_2d(NULL, b->dev.wide, down, across);
            own.data = (char *)maxima + r * tensor_bytes(&own);
            struct shard8_most_args most = {.x = x, .most = own, .first = first, .block = m->block};
            struct shard8_codes_args codes = {.x = x,
                                              .most = all,
                                              .q = q,
                                              .qs = whole.qs,
                                              .ts = whole.ts,
                                              .rows = m->rows,
                                              .first = first,
                                              .piece = piece,
                                              .block = m->block};
            if (stage == 0)
                assert_ok(b->ops->shard8_most(&b->lane, &most), &b->e);
            else
                assert_ok(b->ops->shard8_codes(&b->lane, &codes), &b->e);
        }
    assert_ok(b->ops->shard8_turn(&b->lane, &(struct shard8_turn_args){.q = whole.q, .t = whole.t}), &b->e);
}

static void expect_same(struct bench *b, struct matrix *m, int ranks)
{
    static struct made one, many;
    memset(&one, 7, sizeof one);
    memset(&many, 9, sizeof many);
    struct quantise_args whole = whole_of(b, m, &one);
    int64_t codes = m->rows * m->cols;
    assert_ok(b->ops->quantise(&b->lane, &whole), &b->e);
    by_pieces(b, m, ranks, &many);
    assert_memory_equal(one.q, many.q, (size_t)codes);
    assert_memory_equal(one.t, many.t, (size_t)codes);
    assert_memory_equal(one.qs, many.qs, (size_t)tensor_bytes(&whole.qs));
    assert_memory_equal(one.ts, many.ts, (size_t)tensor_bytes(&whole.ts));
}

/* The largest values grow from row to row, so a rank that goes by its own rows alone has other scales. */
static void fill(struct bench *b, struct matrix *m)
{
    struct tensor x = tensor_2d(m->values, b->dev.wide, m->rows, m->cols);
    for (int64_t i = 0, n = m->rows * m->cols; i < n; i++)
        tensor_set(&x, i, (double)(float)(rng_normal(3, (uint64_t)i) * ldexp(1, (int)(i / m->cols % 40) - 20)));
}

static void pieces_get_the_codes_of_the_whole(void **state)
{
    (void)state;
    static const struct {
        int64_t rows, cols, block;
        int ranks;
    } cases[] = {{272, 144, 128, 3}, {300, 150, 128, 5}, {128, 16, 128, 4}, {6, 130, 128, 5},
                 {272, 144, 0, 3},   {70, 90, 32, 4},    {256, 128, 128, 1}};
    static struct matrix m;
    for (int device = 0; device < 2; device++) {
        struct bench b;
        open_bench(&b, device == 0 ? DEV_CPU : DEV_REF);
        for (int i = 0; i < countof(cases); i++) {
            m = (struct matrix){.rows = cases[i].rows, .cols = cases[i].cols, .block = cases[i].block};
            fill(&b, &m);
            expect_same(&b, &m, cases[i].ranks);
        }
        dev_close(&b.dev);
    }
}

static void what_is_not_finite_is_in_the_scale_of_all(void **state)
{
    struct bench *b = *state;
    static struct matrix m;
    static struct made made;
    static const double bad[] = {NAN, HUGE_VAL};
    for (int i = 0; i < countof(bad); i++) {
        m = (struct matrix){.rows = 272, .cols = 144, .block = 128};
        fill(b, &m);
        struct tensor x = tensor_2d(m.values, b->dev.wide, m.rows, m.cols);
        tensor_set(&x, 200 * m.cols + 5, bad[i]); /* of rank 2 of 3; rank 1 has the first rows of its block */
        by_pieces(b, &m, 3, &made);
        const float *scale = (const float *)made.qs;
        assert_true(isnan(scale[4]) && !isnan(scale[0]) && !isnan(scale[5]));
        expect_same(b, &m, 3);
    }
}

static void what_does_not_fit_is_refused(void **state)
{
    struct bench *b = *state;
    float x[2 * 16] = {0}, most[4];
    uint8_t q[2 * 16];
    struct shard8_most_args a = {
        .x = tensor_2d(x, DT_F32, 2, 16), .most = tensor_2d(most, DT_F32, 1, 1), .first = 127, .block = 128};
    assert_fails(b->ops->shard8_most(&b->lane, &a), ST_INVALID, &b->e, "reach into 2 rows of blocks");
    struct shard8_codes_args c = {.x = a.x,
                                  .most = tensor_3d(most, DT_F32, 1, 2, 1),
                                  .q = tensor_2d(q, DT_F8_E4M3, 2, 16),
                                  .qs = tensor_1d(most, DT_F32, 4),
                                  .rows = 5,
                                  .piece = 2,
                                  .block = 128};
    assert_fails(b->ops->shard8_codes(&b->lane, &c), ST_INVALID, &b->e, "1 pieces of 2 do not cover 5 rows");
    c.first = 4;
    assert_fails(b->ops->shard8_codes(&b->lane, &c), ST_INVALID, &b->e, "rows 4 to 6 of 5");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, open_cpu_bench, close_cpu_bench)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_get_the_codes_of_the_whole),
        TEST(what_is_not_finite_is_in_the_scale_of_all),
        TEST(what_does_not_fit_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
