/* Patterns in options: repeats written out, and the Transformer that a number of layers means. */
#include "../support.h"
#include "config/config.h"

static struct config fresh(void)
{
    struct config c;
    struct err e = {0};
    assert_ok(config_init(&c, &e), &e);
    return c;
}

static void repeats_are_written_out(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"[*-]x3", "[*-][*-][*-]"},
        {"(M-)x3", "M-M-M-"},
        {"Mx4*", "MMMM*"},
        {"M(*-)x2|(ME)x2/*-", "M*-*-|MEME/*-"},
        {"((M-)x2*)x2", "M-M-*M-M-*"},
        {"([M-]x2[*E])x2", "[M-][M-][*E][M-][M-][*E]"},
        {"(M-)", "M-"},
        {"()x3M", "M"},
        {"*-", "*-"},
        {"", ""},
        {"M-x", "M-x"}, /* left for the pattern's parser */
        {"[M", "[M"},
    };
    for (int i = 0; i < countof(cases); i++) {
        char out[CONFIG_PATTERN_MAX + 1];
        struct err e = {0};
        assert_ok(config_expand_pattern(cases[i][0], out, &e), &e);
        assert_string_equal(out, cases[i][1]);
    }
    char out[CONFIG_PATTERN_MAX + 1];
    struct err e = {0};
    assert_ok(config_expand_pattern("Mx4096", out, &e), &e);
    assert_int_equal(strlen(out), 4096);
}

static void repeats_that_make_no_sense_are_refused_with_their_place(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"(M-x3", "'(' without a matching ')' at position 1"},
        {"M-)x3", "this ')' was not opened at position 3"},
        {"x3M", "nothing in front of this repeat at position 1"},
        {"M|x3", "nothing in front of this repeat at position 3"},
        {"[x3M]", "nothing in front of this repeat at position 2"},
        {"Mx0", "0 times at position 2"},
        {"Mx4097", "more than 4096 characters"},
        {"((Mx99)x99)x99", "more than 4096 characters"},
        {"Mx99999999999999999999", "more than 4096 characters"},
        {"((((((((((((((((((M))))))))))))))))))", "nested too deep"},
    };
    for (int i = 0; i < countof(cases); i++) {
        char out[CONFIG_PATTERN_MAX + 1];
        struct err e = {0};
        assert_fails(config_expand_pattern(cases[i][0], out, &e), ST_USAGE, &e, cases[i][1]);
    }
}

/* Options, saved form, and the comparison with a checkpoint see the written-out pattern. */
static void options_take_repeats(void **state)
{
    (void)state;
    struct config c = fresh(), again = fresh();
    struct err e = {0};
    struct buf saved;
    buf_init(&saved, 0);
    assert_ok(config_set(&c, "model.pattern", "(M-)x2*", NULL, &e), &e);
    assert_ok(config_set(&c, "model.mtp_pattern", "(*-)x2", NULL, &e), &e);
    assert_ok(config_set(&c, "model.mtp_layers", "1", NULL, &e), &e);
    assert_ok(config_finish(&c, &e), &e);
    assert_string_equal(c.model.pattern, "M-M-*/*-*-");
    config_write(&c, &saved, false);
    assert_ok(buf_check(&saved, &e), &e);
    assert_ok(config_set(&again, "model.pattern", "(M-)x2*/*-*-", NULL, &e), &e);
    assert_ok(config_load_saved(&again, saved.text, saved.len, "step-1", CFG_SAVED_ALL, NULL, &e), &e);
    config_release(&again);
    again = fresh();
    assert_ok(config_set(&again, "model.pattern", "(M-)x3*/*-*-", NULL, &e), &e);
    assert_int_equal(config_load_saved(&again, saved.text, saved.len, "step-1", CFG_SAVED_ALL, NULL, &e), ST_CONFLICT);
    buf_release(&saved);
    config_release(&again);
    config_release(&c);
}

static void layers_alone_make_a_transformer(void **state)
{
    (void)state;
    struct err e = {0};
    struct config c = fresh(), resumed = fresh();
    struct buf saved;
    buf_init(&saved, 0);
    assert_ok(config_set(&c, "model.layers", "3", NULL, &e), &e);
    assert_ok(config_finish(&c, &e), &e);
    assert_string_equal(c.model.pattern, "[*-][*-][*-]");
    config_write(&c, &saved, false);
    assert_ok(config_set(&resumed, "model.layers", "3", NULL, &e), &e); /* the same command continues */
    assert_ok(config_load_saved(&resumed, saved.text, saved.len, "step-1", CFG_SAVED_ALL, NULL, &e), &e);
    assert_ok(config_finish(&resumed, &e), &e);
    assert_string_equal(resumed.model.pattern, "[*-][*-][*-]");
    assert_ok(config_set(&c, "model.experts", "4", NULL, &e), &e);
    assert_ok(config_finish(&c, &e), &e);
    assert_string_equal(c.model.pattern, "[*E][*E][*E]");
    assert_ok(config_set(&c, "model.layers", "1024", NULL, &e), &e);
    assert_ok(config_finish(&c, &e), &e);
    assert_int_equal(strlen(c.model.pattern), 4096);
    buf_release(&saved);
    config_release(&resumed);
    config_release(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(repeats_are_written_out),
        cmocka_unit_test(repeats_that_make_no_sense_are_refused_with_their_place),
        cmocka_unit_test(options_take_repeats),
        cmocka_unit_test(layers_alone_make_a_transformer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
