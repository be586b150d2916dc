/* model/: which part of a pattern a pipeline rank runs. The tables are the specification's. */
#include "pattern_fixture.h"

struct chunk_case {
    const char *text;
    int rank, size, vp, first, last;
    const char *items;
    int physical, logical;
};

static void check_chunk(struct fixture *f, const struct chunk_case *c)
{
    struct pattern_place at = {c->rank, c->size, c->vp, c->first, c->last};
    struct pattern_chunk chunk;
    char text[128];
    assert_ok(pattern_parse(&f->p, c->text, &f->e), &f->e);
    assert_ok(pattern_choose(&f->p, &at, &chunk, &f->e), &f->e);
    items_text(&f->p, chunk.part.first_item, chunk.part.n_items, text);
    if (strcmp(text, c->items) != 0 || chunk.part.first_layer != c->physical || chunk.part.first_item != c->logical)
        fail_msg("'%s' rank %d of %d, vp %d: '%s' at %d, %d; not '%s' at %d, %d", c->text, c->rank, c->size, c->vp,
                 text, chunk.part.first_layer, chunk.part.first_item, c->items, c->physical, c->logical);
    assert_int_equal(chunk.auto_split, c->size > 1 && strchr(c->text, '|') == NULL);
    assert_int_equal(chunk.error, PATTERN_OK);
}

static void ranks_find_their_chunks(void **state)
{
    enum { NO = PATTERN_NOT_GIVEN };
    static const struct chunk_case cases[] = {
        {"M*M-", 0, 2, NO, NO, NO, "M *", 0, 0},
        {"M*M-", 1, 2, NO, NO, NO, "M -", 2, 2},
        {"M*M*M*M*", 0, 4, NO, NO, NO, "M *", 0, 0},
        {"M*M*M*M*", 3, 4, NO, NO, NO, "M *", 6, 6},
        {"M*M*M*", 0, 4, NO, 3, NO, "M * M", 0, 0},
        {"M*M*M*", 1, 4, NO, 3, NO, "*", 3, 3},
        {"M*M*M*", 3, 4, NO, 3, NO, "*", 5, 5},
        {"M*M*M*", 0, 4, NO, NO, 3, "M", 0, 0},
        {"M*M*M*", 2, 4, NO, NO, 3, "M", 2, 2},
        {"M*M*M*", 3, 4, NO, NO, 3, "* M *", 3, 3},
        {"M*M*M*M*", 0, 4, NO, 1, 1, "M", 0, 0},
        {"M*M*M*M*", 1, 4, NO, 1, 1, "* M *", 1, 1},
        {"M*M*M*M*", 2, 4, NO, 1, 1, "M * M", 4, 4},
        {"M*M*M*M*", 3, 4, NO, 1, 1, "*", 7, 7},
        {"[*-][*-]", 0, 2, NO, NO, NO, "(* -)", 0, 0},
        {"[*-][*-]", 1, 2, NO, NO, NO, "(* -)", 2, 1},
        {"[*-][*E]M-", 1, 3, NO, 2, NO, "(* E)", 2, 1},
        {"M*M*", 0, 2, NO, 4, 0, "M * M *", 0, 0}, /* 0 is given, and is not the same as absent */
        {"M*M*", 1, 2, NO, 4, 0, "", 4, 4},
        {"MM", 0, 3, NO, 0, NO, "", 0, 0},
        {"M*M*", 0, 1, NO, NO, NO, "M * M *", 0, 0},
        {"M*M*", 0, 1, 0, NO, NO, "M * M *", 0, 0},
        {"[M*E]|M-", 0, 1, 1, NO, NO, "M -", 3, 1},
        {"[*-][*-]|[*E][*E]", 0, 1, 1, NO, NO, "(* E) (* E)", 4, 2},
        {"MM|M*|M-|ME", 0, 4, NO, NO, NO, "M M", 0, 0},
        {"MM|M*|M-|ME", 1, 4, NO, NO, NO, "M *", 2, 2},
        {"MM|M*|M-|ME", 2, 4, NO, NO, NO, "M -", 4, 4},
        {"MM|M*|M-|ME", 3, 4, NO, NO, NO, "M E", 6, 6},
        {"MM|M*|M-|ME", 1, 2, 1, NO, NO, "M E", 6, 6},
        {"MM|M*|M-|ME", 0, 2, 1, NO, NO, "M -", 4, 4},
        {"MMM|M|MMMMM", 0, 3, NO, NO, NO, "M M M", 0, 0},
        {"MMM|M|MMMMM", 1, 3, NO, NO, NO, "M", 3, 3},
        {"MMM|M|MMMMM", 2, 3, NO, NO, NO, "M M M M M", 4, 4},
        {"||M*", 0, 1, 0, NO, NO, "", 0, 0},
        {"||M*", 0, 1, 2, NO, NO, "M *", 0, 0},
    };
    for (int i = 0; i < countof(cases); i++)
        check_chunk(*state, &cases[i]);
}

static void impossible_chunks_are_refused(void **state)
{
    enum { NO = PATTERN_NOT_GIVEN };
    struct fixture *f = *state;
    static const struct {
        const char *text;
        struct pattern_place at;
        enum pattern_error code;
        const char *match;
    } cases[] = {
        {"M*M*M*", {0, 4, NO, NO, NO}, PATTERN_AUTO_DIV, "evenly divisible"},
        {"M*M*M*M*M", {0, 4, NO, 2, NO}, PATTERN_AUTO_MIDDLE, "Middle layers"},
        {"M*M*", {0, 2, NO, 1, 1}, PATTERN_AUTO_MIDDLE, "Middle layers"},
        {"M*M*", {1, 3, NO, 4, 4}, PATTERN_AUTO_MIDDLE, "Middle layers"},
        {"M*M*", {0, 2, 0, NO, NO}, PATTERN_VPP_NO_PIPE, "Virtual pipeline parallelism"},
        {"M[M*]-", {0, 2, NO, NO, NO}, PATTERN_GROUP_SPLIT, "would split a bracketed"},
        {"M[M*]-", {1, 2, NO, NO, NO}, PATTERN_GROUP_SPLIT, "would split a bracketed"},
        {"[M*E][M*E]", {0, 3, NO, NO, NO}, PATTERN_GROUP_SPLIT, "would split a bracketed"},
        {"M|M|M", {0, 2, NO, NO, NO}, PATTERN_SEG_DIV, "evenly divisible"},
        {"M|M", {0, 4, NO, NO, NO}, PATTERN_SEG_DIV, "evenly divisible"},
        {"M*|M*", {0, 1, 5, NO, NO}, PATTERN_SEG_RANGE, "out of range"},
        {"M*M*", {0, 1, 1, NO, NO}, PATTERN_SEG_RANGE, "out of range"},
        {"M*|M*", {0, 1, INT32_MAX, NO, NO}, PATTERN_SEG_RANGE, "out of range"},
        {"M*|M*", {0, 2, NO, 1, NO}, PATTERN_PIPE_FIRST_LAST, "Cannot specify"},
        {"M*|M*|M", {0, 2, NO, NO, 0}, PATTERN_PIPE_FIRST_LAST, "Cannot specify"},
    };
    struct pattern_chunk chunk;
    for (int i = 0; i < countof(cases); i++) {
        assert_ok(pattern_parse(&f->p, cases[i].text, &f->e), &f->e);
        assert_fails(pattern_choose(&f->p, &cases[i].at, &chunk, &f->e), ST_USAGE, &f->e, cases[i].match);
        assert_string_equal(pattern_error_name(chunk.error), pattern_error_name(cases[i].code));
    }
    static const struct pattern_place nowhere[] = {
        {0, 0, NO, NO, NO}, {2, 2, NO, NO, NO}, {-1, 2, NO, NO, NO},
        {0, 1, -2, NO, NO}, {0, 2, NO, -2, NO}, {0, 2, NO, NO, -2},
    };
    for (int i = 0; i < countof(nowhere); i++) {
        assert_int_equal(pattern_choose(&f->p, &nowhere[i], &chunk, &f->e), ST_INVALID);
        assert_int_equal(chunk.error, PATTERN_PLACE);
    }
}

static void segments_decide_the_virtual_stages(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *text;
        int size, stages; /* -1: refused */
    } cases[] = {
        {"M*M*", 1, 0},    {"M*M*", 4, 0},   {"M|M", 2, 0},  {"M|M", 1, 2},
        {"M|M|M|M", 2, 2}, {"M|M|M", 2, -1}, {"M|M", 4, -1}, {"|||||||/M", 4, 2},
    };
    for (int i = 0; i < countof(cases); i++) {
        int stages;
        enum pattern_error code;
        assert_ok(pattern_parse(&f->p, cases[i].text, &f->e), &f->e);
        int st = pattern_virtual_stages(&f->p, cases[i].size, &stages, &code, &f->e);
        assert_int_equal(st, cases[i].stages < 0 ? ST_USAGE : ST_OK);
        assert_int_equal(code, cases[i].stages < 0 ? PATTERN_SEG_DIV : PATTERN_OK);
        assert_int_equal(stages, cases[i].stages < 0 ? 0 : cases[i].stages);
    }
    int stages;
    enum pattern_error code;
    assert_int_equal(pattern_virtual_stages(&f->p, 0, &stages, &code, &f->e), ST_INVALID);
}

/* 14 layers like DeepSeek-V3's on 4 ranks with 2 virtual stages; the last chunk holds the MTP depth
 * alone. */
static void the_worked_example_comes_out(void **state)
{
    struct fixture *f = *state;
    assert_ok(pattern_parse(&f->p, "[*-][*-]|[*-][*E]|[*E][*E]|[*E][*E]|[*E][*E]|[*E][*E]|[*E][*E]|/*E", &f->e), &f->e);
    assert_int_equal(f->p.n_segments, 8);
    assert_int_equal(f->p.n_layers, 28);
    assert_int_equal(f->p.n_items, 14);
    assert_int_equal(f->p.n_mtp_depths, 1);
    int stages;
    enum pattern_error code;
    assert_ok(pattern_virtual_stages(&f->p, 4, &stages, &code, &f->e), &f->e);
    assert_int_equal(stages, 2);
    for (int k = 0; k < 8; k++) {
        struct pattern_place at = {k % 4, 4, k / 4, PATTERN_NOT_GIVEN, PATTERN_NOT_GIVEN};
        struct pattern_chunk c;
        assert_ok(pattern_choose(&f->p, &at, &c, &f->e), &f->e);
        assert_int_equal(c.part.first_layer, 4 * k);
        assert_int_equal(c.part.first_item, 2 * k);
        assert_int_equal(c.part.n_layers, k == 7 ? 0 : 4);
        assert_int_equal(c.part.n_items, k == 7 ? 0 : 2);
    }
}

static void all_ranks_together_rebuild_the_pattern(void **state)
{
    enum { NO = PATTERN_NOT_GIVEN };
    struct fixture *f = *state;
    static const struct {
        const char *text;
        int size, first, last;
    } cases[] = {
        {"M*M*M*M*", 4, NO, NO},   {"M*M*M*M*", 4, 1, 1},        {"M*M*M*", 4, 3, NO},       {"M*M*M*", 4, NO, 3},
        {"[M*E]-[M*]E", 2, 4, NO}, {"MM|M*|[M-]|ME", 4, NO, NO}, {"MM||[M-]|ME", 2, NO, NO},
    };
    for (int i = 0; i < countof(cases); i++) {
        assert_ok(pattern_parse(&f->p, cases[i].text, &f->e), &f->e);
        int items = 0, layers = 0, stages = f->p.n_segments > 1 ? f->p.n_segments / cases[i].size : 1;
        for (int vp = 0; vp < stages; vp++)
            for (int rank = 0; rank < cases[i].size; rank++) {
                struct pattern_place at = {rank, cases[i].size, stages > 1 ? vp : NO, cases[i].first, cases[i].last};
                struct pattern_chunk c;
                assert_ok(pattern_choose(&f->p, &at, &c, &f->e), &f->e);
                assert_int_equal(c.part.first_item, items);
                assert_int_equal(c.part.first_layer, layers);
                items += c.part.n_items;
                layers += c.part.n_layers;
            }
        assert_int_equal(items, f->p.n_items);
        assert_int_equal(layers, f->p.n_layers);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(ranks_find_their_chunks, setup, teardown),
        cmocka_unit_test_setup_teardown(impossible_chunks_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(segments_decide_the_virtual_stages, setup, teardown),
        cmocka_unit_test_setup_teardown(the_worked_example_comes_out, setup, teardown),
        cmocka_unit_test_setup_teardown(all_ranks_together_rebuild_the_pattern, setup, teardown),
    };
    return cmocka_run_group_tests_name("pattern chunks", tests, NULL, NULL);
}
