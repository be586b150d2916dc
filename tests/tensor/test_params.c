/* Slices of parameters: what ranks hold covers the whole once, in the order of sections. */
#include "support.h"

#include "tensor/params.h"

#include <stdlib.h>
#include <string.h>

/* Every element of the whole is in the part of one rank; within a part runs follow each other without gaps. */
static void covers_once(const struct param *whole, int ranks, int64_t shards)
{
    struct err e = {0};
    int64_t n = param_elems(whole);
    int *seen = calloc((size_t)n, sizeof *seen);
    assert_non_null(seen);
    for (int64_t s = 0; s < shards; s++)
        for (int r = 0; r < ranks; r++) {
            struct param p = *whole;
            if (shards > 1) {
                p.shard.full = p.dim[0];
                p.dim[0] /= shards;
                p.shard.first = s * p.dim[0];
            }
            assert_ok(param_cut(&p, ranks, r, &e), &e);
            assert_int_equal(param_elems(&p) * shards * ranks, n);
            for (int64_t at = 0; at < param_elems(&p);) {
                struct param_run run = param_run_from(&p, at);
                assert_true(run.n > 0 && run.whole >= 0 && run.whole + run.n <= n);
                struct param_run second = run.n > 1 ? param_run_from(&p, at + 1) : run;
                assert_true(run.n == 1 || (second.whole == run.whole + 1 && second.n == run.n - 1));
                for (int64_t i = 0; i < run.n; i++)
                    seen[run.whole + i]++;
                at += run.n;
            }
        }
    for (int64_t i = 0; i < n; i++)
        assert_int_equal(seen[i], 1);
    free(seen);
}

static void slices_cover_the_whole_once(void **state)
{
    (void)state;
    struct param rows = {.key = "rows", .rank = 2, .dim = {18, 5}};
    param_split_section(&rows, 0, 12, UNIT_HEADS, 6);
    param_split_section(&rows, 0, 6, UNIT_GROUPS, 6);
    struct param columns = {.key = "columns", .rank = 2, .dim = {7, 12}};
    param_split(&columns, 1, UNIT_FFN, 12);
    struct param taps = {.key = "taps", .rank = 3, .dim = {8, 1, 4}};
    param_split(&taps, 0, UNIT_HEADS, 4);
    struct param experts = {.key = "experts", .rank = 3, .dim = {4, 6, 5}};
    param_split_section(&experts, 1, 4, UNIT_FFN, 4);
    param_split_section(&experts, 1, 2, UNIT_FFN, 2);
    covers_once(&rows, 1, 1);
    covers_once(&rows, 2, 1);
    covers_once(&rows, 3, 1);
    covers_once(&rows, 6, 1);
    covers_once(&columns, 4, 1);
    covers_once(&taps, 4, 1);
    covers_once(&experts, 2, 1);
    covers_once(&experts, 2, 2); /* divided among ranks, and each expert among others */
    covers_once(&experts, 1, 4);
}

static void sections_keep_their_places(void **state)
{
    (void)state;
    struct err e = {0};
    struct param p = {.key = "qkv", .rank = 2, .dim = {12, 2}};
    param_split_section(&p, 0, 8, UNIT_HEADS, 4);
    param_split_section(&p, 0, 4, UNIT_GROUPS, 2);
    assert_ok(param_cut(&p, 2, 1, &e), &e);
    assert_int_equal(p.dim[0], 6);
    assert_int_equal(param_run_from(&p, 0).whole, 4 * 2); /* the second half of the first section */
    assert_int_equal(param_run_from(&p, 0).n, 4 * 2);
    assert_int_equal(param_run_from(&p, 4 * 2).whole, (8 + 2) * 2); /* and of the second */
    assert_int_equal(param_run_from(&p, 4 * 2 + 3).n, 1);
}

static void what_does_not_divide_names_a_number_that_does(void **state)
{
    (void)state;
    struct err e = {0};
    struct param p = {.key = "qkv", .rank = 2, .dim = {18, 2}};
    param_split_section(&p, 0, 12, UNIT_HEADS, 6);
    param_split_section(&p, 0, 6, UNIT_GROUPS, 3);
    assert_fails(param_cut(&p, 4, 0, &e), ST_USAGE, &e, "6 heads cannot be shared by 4 ranks");
    assert_non_null(strstr(e.hint, "parallel.tp = 3 would do"));
    struct param v = {.key = "embedding", .rank = 2, .dim = {257, 2}};
    param_split(&v, 0, UNIT_VOCAB, 257);
    assert_fails(param_cut(&v, 2, 0, &e), ST_USAGE, &e, "257 vocab cannot be shared by 2 ranks");
    assert_non_null(strstr(e.hint, "model.vocab_multiple = 2"));
    struct param none = {.key = "new", .rank = 1, .dim = {4}};
    assert_fails(param_cut(&none, 2, 0, &e), ST_INTERNAL, &e, "new does not declare");
    struct param gain = {.key = "gain", .rank = 1, .dim = {5}};
    param_replicate(&gain, GRAD_OVER_TOKENS);
    assert_ok(param_cut(&gain, 2, 1, &e), &e);
    assert_int_equal(gain.dim[0], 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slices_cover_the_whole_once),
        cmocka_unit_test(sections_keep_their_places),
        cmocka_unit_test(what_does_not_divide_names_a_number_that_does),
    };
    return cmocka_run_group_tests_name("params", tests, NULL, NULL);
}
