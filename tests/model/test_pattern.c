/* model/: the pattern language. The tables are those of the specification, one row per case. */
#include "pattern_fixture.h"

static void expect_error(struct fixture *f, const char *text, enum pattern_error code, const char *match)
{
    int st = pattern_parse(&f->p, text, &f->e);
    if (st != ST_USAGE || f->p.error != code)
        fail_msg("'%s': %s, not %s", text, pattern_error_name(f->p.error), pattern_error_name(code));
    if (strstr(f->e.msg, match) == NULL)
        fail_msg("'%s': '%s' is not in '%s'", text, match, f->e.msg);
}

/* ---- grammar --------------------------------------------------------------------------------- */

static void segments_become_items(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *text, *items;
    } cases[] = {
        {"M*-M*-M*-", "M * - M * - M * -"},
        {"M[M*]-", "M (M *) -"},
        {"[M*E]", "(M * E)"},
        {"MMMMMMMMM", "M M M M M M M M M"},
        {"MM*-MM*-", "M M * - M M * -"},
        {"E", "E"},
        {"", ""},
        {"GGG*GGG*", "G G G * G G G *"},
        {"GEGEGE*E", "G E G E G E * E"},
        {"MDMD", "M D M D"},
        {"M+M+", "M + M +"},
        {"D+", "D +"},
        {"[-*][-E][--][*][E][M]", "(- *) (- E) (- -) (*) (E) (M)"},
    };
    char text[128];
    for (int i = 0; i < countof(cases); i++) {
        assert_ok(pattern_parse_segment(&f->p, cases[i].text, &f->e), &f->e);
        assert_int_equal(f->p.n_segments, 1);
        assert_string_equal(items_text(&f->p, 0, f->p.n_items, text), cases[i].items);
    }
    static const struct {
        const char *text;
        enum pattern_error code;
    } bad[] = {
        {"M*X", PATTERN_SYMBOL},        {"M|M", PATTERN_SYMBOL},         {"M/M", PATTERN_SYMBOL},
        {"M[[M]]", PATTERN_GROUP_NEST}, {"M[EM]", PATTERN_MOE_NOT_LAST}, {"MDM*-", PATTERN_ATTN_MIX},
        {"M+M*-", PATTERN_ATTN_MIX},
    };
    for (int i = 0; i < countof(bad); i++) {
        assert_int_equal(pattern_parse_segment(&f->p, bad[i].text, &f->e), ST_USAGE);
        assert_string_equal(pattern_error_name(f->p.error), pattern_error_name(bad[i].code));
    }
}

static void patterns_split_into_main_and_depths(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *text, *main, *mtp; /* main NULL: absent */
        int depths;
    } cases[] = {
        {NULL, NULL, "", 0},
        {"", "", "", 0},
        {"M*M*", "M*M*", "", 0},
        {"[M*E]", "[M*E]", "", 0},
        {"M[M*]-", "M[M*]-", "", 0},
        {"MMMM", "MMMM", "", 0},
        {"*M*M", "*M*M", "", 0},
        {"MM-*", "MM-*", "", 0},
        {"E", "E", "", 0},
        {"GGG*GGG*", "GGG*GGG*", "", 0},
        {"GEGEGE*E", "GEGEGE*E", "", 0},
        {"MDMD", "MDMD", "", 0},
        {"DM", "DM", "", 0},
        {"M+M+", "M+M+", "", 0},
        {"+M", "+M", "", 0},
        {"M*|M*", "M*|M*", "", 0},
        {"M-M-|M-M*-", "M-M-|M-M*-", "", 0},
        {"M|M|M|M", "M|M|M|M", "", 0},
        {"M*M*/MM", "M*M*", "MM", 1},
        {"MMMM/*M", "MMMM", "*M", 1},
        {"M/M", "M", "M", 1},
        {"M*M*/MM/MM", "M*M*", "MM", 2},
        {"M*M*/MM/MM/MM", "M*M*", "MM", 3},
        {"MMMM/*M/*M/*M", "MMMM", "*M", 3},
        {"M*/*/*/*", "M*", "*", 3},
        {"M/M/M/M/M", "M", "M", 4},
        {"M-M-|M-M*-/MM/MM", "M-M-|M-M*-", "MM", 2},
        {"/MM/MM", NULL, "MM", 2},
        {"M*M*/", "M*M*", "", 0},
        {"/", NULL, "", 0},
        {"//", NULL, "", 0},
        {"M//", "M", "", 0},
        {"M*M*M*M*/MMM/MMM", "M*M*M*M*", "MMM", 2},
        {"MM-MM-/*M/*M", "MM-MM-", "*M", 2},
        {"MEME/MM/MM", "MEME", "MM", 2},
        {"GEGEGE*E/GG/GG", "GEGEGE*E", "GG", 2},
        {"MDMD/MD/MD", "MDMD", "MD", 2},
        {"M+M+/M+/M+", "M+M+", "M+", 2},
        {"*****/M/M/M/M", "*****", "M", 4},
        {"|", "|", "", 0},
        {"||", "||", "", 0},
        {"M|", "M|", "", 0},
        {"|/*E", "|", "*E", 1},
        {"M*M*/MD", "M*M*", "MD", 1}, /* mixing across the MTP boundary is not the parser's business */
    };
    for (int i = 0; i < countof(cases); i++) {
        const char *main = cases[i].main ? cases[i].main : "";
        assert_ok(pattern_parse(&f->p, cases[i].text, &f->e), &f->e);
        assert_int_equal(f->p.error, PATTERN_OK);
        assert_int_equal(f->p.has_main, cases[i].main != NULL);
        assert_int_equal(f->p.main_len, strlen(main));
        assert_memory_equal(f->p.text, main, strlen(main));
        assert_string_equal(f->p.mtp_symbols, cases[i].mtp);
        assert_int_equal(f->p.n_mtp_layers, strlen(cases[i].mtp));
        assert_int_equal(f->p.n_mtp_depths, cases[i].depths);
    }
}

static void each_mistake_has_its_code_and_phrase(void **state)
{
    struct fixture *f = *state;
    static const struct {
        enum pattern_error code;
        const char *match;
        const char *texts[12];
    } cases[] = {
        {PATTERN_MTP_DIFFER,
         "All MTP patterns must be identical",
         {"M*M*/MM/M*", "M*M*/MM/MM/M", "MMMM/*M/M*", "M*M*/MM/Ma", "M*//MM", "M*/MM/"}},
        {PATTERN_SYMBOL,
         "not a valid layer symbol",
         {"M*X*", "MaMM", "M*M*1", "M[M*]X", "[MX]", " M", "m", "M*M*/MX", "M*M*/Ma/Ma", "M*M*/M|M/M|M", "M\\",
          "M\xc3\xa9"}},
        {PATTERN_GROUP_OPEN, "without a matching", {"M[M*", "[M|*]", "[M/*]", "[[", "[X", "M/[M"}},
        {PATTERN_GROUP_CLOSE, "was not opened", {"M]", "M[M]]", "]", "M|]"}},
        {PATTERN_GROUP_NEST, "not supported", {"M[M[*]]", "[[*]]", "[[]]"}},
        {PATTERN_GROUP_EMPTY, "cannot be empty", {"M[]", "[]", "M|[]"}},
        {PATTERN_MOE_NOT_LAST, "must be the last", {"M[EM]", "[EE]", "[M*E-]"}},
        {PATTERN_ATTN_MIX,
         "both Attention and MLA/DSA",
         {"M*D", "*|D", "[*D]", "[*]D", "MD|M*", "M+*", "M/*D", "M/[*D]"}},
        {PATTERN_MTP_GROUP, "not supported because each MTP depth", {"M*/[*E]", "[*-]|/[*E]", "M/M[M]/M[M]"}},
    };
    for (int i = 0; i < countof(cases); i++)
        for (int k = 0; k < countof(cases[i].texts) && cases[i].texts[k] != NULL; k++)
            expect_error(f, cases[i].texts[k], cases[i].code, cases[i].match);
}

/* Which of two mistakes is told: inside a group unmatched, empty, nested, symbol, place of the E; a
 * whole part before its mixing; the main part before the depths; unlike depths before bad symbols
 * in them. */
static void mistakes_are_told_in_order(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *text;
        enum pattern_error code;
    } cases[] = {
        {"[[X", PATTERN_GROUP_OPEN},   {"[X[E*]", PATTERN_GROUP_NEST},  {"[EX]", PATTERN_SYMBOL},
        {"[EX*D]", PATTERN_SYMBOL},    {"*D|X", PATTERN_SYMBOL},        {"X/M/*", PATTERN_SYMBOL},
        {"M/X/Y", PATTERN_MTP_DIFFER}, {"M/[X]", PATTERN_SYMBOL},       {"M/[]", PATTERN_GROUP_EMPTY},
        {"M][", PATTERN_GROUP_CLOSE},  {"[E*]]", PATTERN_MOE_NOT_LAST}, {"*D/M/*", PATTERN_ATTN_MIX},
    };
    for (int i = 0; i < countof(cases); i++)
        expect_error(f, cases[i].text, cases[i].code, "");
}

static void the_mark_stands_under_the_mistake(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *text;
        int position; /* from 1 */
    } cases[] = {
        {"*-x", 3},   {"-[*-", 2},    {"M[*]]", 5},  {"*[]", 3},    {"M[M[*]]", 4}, {"M[ME*]", 4},  {"M*D", 3},
        {"DM|M*", 5}, {"M/MM/M*", 7}, {"M/MM/M", 7}, {"M/M/MM", 6}, {"M/[*E]", 3},  {"M/MX/MX", 4}, {"M\xc3\xa9*", 2},
    };
    for (int i = 0; i < countof(cases); i++) {
        char position[32];
        assert_int_equal(pattern_parse(&f->p, cases[i].text, &f->e), ST_USAGE);
        snprintf(position, sizeof position, "at position %d of", cases[i].position);
        assert_non_null(strstr(f->e.msg, position));
        const char *line = strchr(f->e.hint, '\n');
        assert_non_null(line);
        /* The hint's first line follows "  hint: ", which the mark's line makes up for. */
        assert_int_equal(strchr(line, '^') - (line + 1), 8 + cases[i].position - 1);
    }
}

static void long_patterns_show_the_part_that_matters(void **state)
{
    struct fixture *f = *state;
    char text[PATTERN_MAX + 2];
    memset(text, '-', sizeof text);
    text[3000] = 'x';
    text[PATTERN_MAX] = '\0';
    assert_fails(pattern_parse(&f->p, text, &f->e), ST_USAGE, &f->e, "position 3001");
    const char *x = strchr(f->e.hint, 'x'), *line = strchr(f->e.hint, '\n'), *mark = strchr(f->e.hint, '^');
    assert_non_null(x);
    assert_non_null(mark);
    assert_int_equal(mark - (line + 1), x - f->e.hint + 8);
    assert_true(strncmp(f->e.hint, "...-", 4) == 0 && strncmp(line - 4, "-...", 4) == 0);
    text[3000] = '-';
    assert_ok(pattern_parse(&f->p, text, &f->e), &f->e);
    assert_int_equal(f->p.n_layers, PATTERN_MAX);
    text[PATTERN_MAX] = '-';
    text[PATTERN_MAX + 1] = '\0';
    expect_error(f, text, PATTERN_LENGTH, "at most 4096");
    memset(text, '|', PATTERN_MAX);
    text[PATTERN_MAX] = '\0';
    assert_ok(pattern_parse(&f->p, text, &f->e), &f->e);
    assert_int_equal(f->p.n_segments, PATTERN_MAX + 1);
    assert_int_equal(pattern_parse(&f->p, "x", NULL), ST_USAGE); /* the error may be of no interest */
}

/* ---- counts and numbers ---------------------------------------------------------------------- */

static void layers_and_segments_are_counted(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *text;
        int layers, segments, items;
    } cases[] = {
        {"M*M*", 4, 1, 4},
        {"MMMM", 4, 1, 4},
        {"M", 1, 1, 1},
        {"[M*E]", 3, 1, 1},
        {"M[M*]-", 4, 1, 3},
        {"M-M-|M-M*-", 9, 2, 9},
        {"M-M-|M-M*-|M-M-|M-M*-", 18, 4, 18},
        {"||M", 1, 3, 1},
        {"M|M", 2, 2, 2},
        {"M*M*/MM/MM", 4, 1, 4},
        {"M-M-|M-M*-/MM/MM", 9, 2, 9},
        {"M|M|M|M", 4, 4, 4},
        {"", 0, 1, 0},
        {NULL, 0, 1, 0},
        {"/M", 0, 1, 0},
    };
    for (int i = 0; i < countof(cases); i++) {
        assert_ok(pattern_parse(&f->p, cases[i].text, &f->e), &f->e);
        assert_int_equal(f->p.n_layers, cases[i].layers);
        assert_int_equal(strlen(f->p.symbols), cases[i].layers);
        assert_int_equal(f->p.n_segments, cases[i].segments);
        assert_int_equal(f->p.n_items, cases[i].items);
    }
}

/* In the order of the names that Megatron gives the layers. */
#define SYMBOLS "*DGM+-E"
enum { N_SYMBOLS = sizeof SYMBOLS - 1 };

static void symbols_are_counted_in_all_parts(void **state)
{
    struct fixture *f = *state;
    static const struct {
        const char *text;
        int count[N_SYMBOLS];
    } cases[] = {
        {"M*M*", {2, 0, 0, 2, 0, 0, 0}},
        {"MG*-E", {1, 0, 1, 1, 0, 1, 1}},
        {"MGD-E", {0, 1, 1, 1, 0, 1, 1}},
        {"MG+-E", {0, 0, 1, 1, 1, 1, 1}},
        {"M-M-|M-M*-", {1, 0, 0, 4, 0, 4, 0}},
        {"M*M*/MM/MM", {2, 0, 0, 6, 0, 0, 0}},
        {"M-M-|M-M*-/MM/MM", {1, 0, 0, 8, 0, 4, 0}},
        {"MEME", {0, 0, 0, 2, 0, 0, 2}},
        {"M[M*]E", {1, 0, 0, 2, 0, 0, 1}},
        {"MMMM/*M/*M/*M", {3, 0, 0, 7, 0, 0, 0}},
        {"GMGM", {0, 0, 2, 2, 0, 0, 0}},
        {"G*GM*", {2, 0, 2, 1, 0, 0, 0}},
        {"DMDM", {0, 2, 0, 2, 0, 0, 0}},
        {"+M+M", {0, 0, 0, 2, 2, 0, 0}},
        {"", {0}},
    };
    for (int i = 0; i < countof(cases); i++) {
        int count[N_SYMBOLS];
        assert_ok(pattern_parse(&f->p, cases[i].text, &f->e), &f->e);
        for (int k = 0; k < N_SYMBOLS; k++)
            count[k] = pattern_map(f->p.symbols, SYMBOLS[k], NULL) +
                       pattern_map(f->p.mtp_symbols, SYMBOLS[k], NULL) * f->p.n_mtp_depths;
        assert_memory_equal(count, cases[i].count, sizeof count);
    }
}

/* "* 0; M 1": each symbol that occurs with the physical layers it stands at, in order. */
static const char *maps_text(const char *symbols, char *out)
{
    size_t len = 0;
    out[0] = '\0';
    for (const char *s = SYMBOLS; *s != '\0'; s++) {
        int layers[64], n = pattern_map(symbols, *s, layers);
        assert_int_equal(n, pattern_map(symbols, *s, NULL));
        for (int i = 0; i < n; i++)
            len += (size_t)sprintf(out + len, "%s%.*s%d", i == 0 && len > 0 ? "; " : " ", i == 0, s, layers[i]);
    }
    return out;
}

static void maps_find_the_layers_of_a_kind(void **state)
{
    struct fixture *f = *state;
    char text[128];
    assert_string_equal(maps_text("*M-E", text), " *0; M1; -2; E3");
    assert_string_equal(maps_text("DMDM", text), " D0 2; M1 3");
    assert_string_equal(maps_text("*DM-", text), " *0; D1; M2; -3"); /* mixing is checked elsewhere */
    assert_string_equal(maps_text("MMM", text), " M0 1 2");
    assert_string_equal(maps_text("", text), "");
    assert_ok(pattern_parse(&f->p, "[M*E]M", &f->e), &f->e);
    assert_string_equal(maps_text(f->p.symbols, text), " *1; M0 3; E2");
}

static void children_of_a_group_are_numbered_consecutively(void **state)
{
    struct fixture *f = *state;
    assert_ok(pattern_parse(&f->p, "M[M*]-|[E]", &f->e), &f->e);
    static const struct pattern_item items[] = {{0, 1, false}, {1, 2, true}, {3, 1, false}, {4, 1, true}};
    static const uint16_t item_of[] = {0, 1, 1, 2, 3}, at[] = {0, 2, 3, 5, 8};
    assert_int_equal(f->p.n_items, countof(items));
    for (int i = 0; i < countof(items); i++)
        assert_true(f->p.items[i].first == items[i].first && f->p.items[i].n == items[i].n &&
                    f->p.items[i].grouped == items[i].grouped);
    assert_memory_equal(f->p.item_of, item_of, sizeof item_of);
    assert_memory_equal(f->p.at, at, sizeof at);
    assert_string_equal(f->p.symbols, "MM*-E");
}

/* ---- keys ------------------------------------------------------------------------------------ */

static void groups_are_stored_under_their_item(void **state)
{
    struct fixture *f = *state;
    static const int grouped[] = {0, 1, 1, 2, 3, 3}, flat[] = {0, 1, 2, 3, 4, 5};
    assert_ok(pattern_parse(&f->p, "M[M*]-|[*E]", &f->e), &f->e);
    assert_true(f->p.grouped);
    assert_string_equal(pattern_final_norm_key(&f->p), "decoder.final_layernorm.weight");
    for (int l = 0; l < 6; l++)
        assert_int_equal(pattern_layer_key_index(&f->p, l), grouped[l]);
    assert_ok(pattern_parse(&f->p, "MM*-|*E/*E", &f->e), &f->e);
    assert_false(f->p.grouped);
    assert_string_equal(pattern_final_norm_key(&f->p), "decoder.final_norm.weight");
    for (int l = 0; l < 6; l++)
        assert_int_equal(pattern_layer_key_index(&f->p, l), flat[l]);
}

static void groups_whose_keys_would_collide_are_refused(void **state)
{
    struct fixture *f = *state;
    static const char *const bad[] = {"[MM*E]", "[**-]", "[D+E]", "M[*--]", "[GG]", "M|-[M*M]"};
    static const char *const good[] = {"[M*E]", "[*-][*-]", "MM**--", "[MG*-E]", "[-E]", "M/MM", ""};
    for (int i = 0; i < countof(bad); i++) {
        assert_ok(pattern_parse(&f->p, bad[i], &f->e), &f->e);
        assert_fails(pattern_check_keys(&f->p, &f->e), ST_USAGE, &f->e, "under one number");
    }
    assert_non_null(strstr(f->e.msg, "decoder.layers.2 would"));
    assert_non_null(strstr(f->e.msg, "at position 7"));
    for (int i = 0; i < countof(good); i++) {
        assert_ok(pattern_parse(&f->p, good[i], &f->e), &f->e);
        assert_ok(pattern_check_keys(&f->p, &f->e), &f->e);
    }
}

/* ---- what can be built ----------------------------------------------------------------------- */

static void the_first_symbol_without_a_core_is_named(void **state)
{
    struct fixture *f = *state;
    assert_ok(pattern_parse(&f->p, "-[-]|-/-", &f->e), &f->e);
    assert_ok(pattern_check_cores(&f->p, &f->e), &f->e);
    static const char *const empty[] = {"", "|", "/-", NULL};
    for (int i = 0; i < countof(empty); i++) {
        assert_ok(pattern_parse(&f->p, empty[i], &f->e), &f->e);
        assert_fails(pattern_check_cores(&f->p, &f->e), ST_USAGE, &f->e, "empty");
    }
    assert_ok(pattern_parse(&f->p, "-/-/-/-/-/-/-/-/-/-", &f->e), &f->e);
    assert_fails(pattern_check_cores(&f->p, &f->e), ST_USAGE, &f->e, "9 MTP depths, at most 8");
    for (const char *s = SYMBOLS; *s != '\0'; s++) {
        char text[16];
        if (core_find(*s)->declare != NULL)
            continue;
        snprintf(text, sizeof text, "-[-%c]|%c", *s, *s);
        assert_ok(pattern_parse(&f->p, text, &f->e), &f->e);
        assert_fails(pattern_check_cores(&f->p, &f->e), ST_USAGE, &f->e, "no core yet");
        assert_non_null(strstr(f->e.msg, "at position 4"));
        snprintf(text, sizeof text, "-/-%c/-%c", *s, *s);
        assert_ok(pattern_parse(&f->p, text, &f->e), &f->e);
        assert_fails(pattern_check_cores(&f->p, &f->e), ST_USAGE, &f->e, "no core yet");
        assert_non_null(strstr(f->e.msg, "at position 4"));
    }
}

/* On one rank a pattern runs all its segments in order, so the cuts change nothing. */
static void cuts_change_nothing_on_one_rank(void **state)
{
    (void)state;
    struct tiny whole, cut;
    tiny_open(&whole, "model.pattern=*-*-", DEV_REF, 1);
    tiny_open(&cut, "model.pattern=|*-|*|-|", DEV_REF, 1);
    tiny_run(&whole, 2);
    tiny_run(&cut, 2);
    double a = tiny_loss(&whole), b = tiny_loss(&cut);
    assert_memory_equal(&a, &b, sizeof a);
    assert_int_equal(whole.m.params.n, cut.m.params.n);
    for (int k = 0; k < whole.m.params.n; k++)
        assert_string_equal(whole.m.params.list[k].p.key, cut.m.params.list[k].p.key);
    tiny_close(&whole);
    tiny_close(&cut);
}

static bool has_line(const char *text, const char *glob)
{
    char line[512];
    while (*text != '\0') {
        size_t n = strcspn(text, "\n");
        snprintf(line, sizeof line, "%.*s", (int)n, text);
        if (str_glob(glob, line))
            return true;
        text += n + (text[n] == '\n');
    }
    return false;
}

static void the_stack_is_drawn(void **state)
{
    (void)state;
    struct tiny t;
    struct buf out;
    tiny_open(&t, "model.pattern=*[*-]|[-]/*- model.layers=7", DEV_REF, 1);
    buf_init(&out, 0);
    model_print_stack(&t.m, &out);
    assert_ok(buf_check(&out, &t.e), &t.e);
    static const char *const lines[] = {
        "pattern *[*-]|[-]/*-: 4 layers in 3 items, 2 pipeline segments, 1 MTP depth of 2 layers",
        " * 0 *0  *  attention *decoder.layers.0.* *",
        " * 1 *1 [*  attention *decoder.layers.*",
        " * 2 *1  -] mlp *decoder.layers.*",
        "*segment 1*",
        " * 3 *2 [-] mlp *decoder.layers.*",
        "*MTP depth 0*mtp.layers.0.*",
        " * - *mtp.layers.0.mtp_model_layer.layers.1.* *",
        "*model.layers = 7 is not used: the pattern has 4 layers",
    };
    for (int i = 0; i < countof(lines); i++)
        if (!has_line(out.text, lines[i]))
            fail_msg("no line like '%s' in\n%s", lines[i], out.text);
    buf_release(&out);
    tiny_close(&t);
}

/* ---- ratios ---------------------------------------------------------------------------------- */

static void ratios_become_patterns(void **state)
{
    (void)state;
    static const struct {
        int64_t n;
        double attn, mlp;
        const char *pattern;
    } cases[] = {
        {8, 0, 0, "MMMMMMMM"},
        {10, .3, 0, "MM*MM*M*MM"},
        {10, .3, .3, "M-*MM*-*M-"},
        {10, .5, 0, "M*M*M**M*M"},
        {4, .5, 0, "M**M"},
        {1, 0, 0, "M"},
        {1, 1, 0, "*"},
        {12, .25, .25, "MM*-MM*-M*M-"},
        {6, 1, 0, "******"},
        {7, 0, 1, "-------"},
        {5, .5, 0, "M*M*M"}, /* 2.5 rounds to 2 */
        {3, .5, 0, "*M*"},   /* 1.5 rounds to 2 */
        {56, .08, .5, "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"},
    };
    char made[CONFIG_RATIO_LAYERS + 1];
    for (int i = 0; i < countof(cases); i++) {
        assert_true(config_ratio_pattern(cases[i].n, cases[i].attn, cases[i].mlp, made));
        assert_string_equal(made, cases[i].pattern);
    }
    assert_int_equal(pattern_map(made, '*', NULL), 4);
    assert_int_equal(pattern_map(made, '-', NULL), 28);
    assert_int_equal(pattern_map(made, 'M', NULL), 24);
    assert_false(config_ratio_pattern(0, .5, 0, made));
    assert_false(config_ratio_pattern(-1, .5, 0, made));
    assert_false(config_ratio_pattern(CONFIG_RATIO_LAYERS + 1, .5, 0, made));
    assert_false(config_ratio_pattern(4, .6, .5, made));
    assert_false(config_ratio_pattern(4, -.1, .5, made));
    assert_false(config_ratio_pattern(4, NAN, 0, made));
}

static void ratio_options_make_the_pattern_and_survive_a_resume(void **state)
{
    (void)state;
    struct config c, again;
    struct err e = {0};
    struct buf text;
    buf_init(&text, 0);
    assert_ok(config_init(&c, &e), &e);
    assert_ok(tiny_set(&c, "model.layers=10 model.attn_ratio=0.3 model.mlp_ratio=0.3", &e), &e);
    assert_ok(config_finish(&c, &e), &e);
    assert_string_equal(c.model.pattern, "M-*MM*-*M-");
    config_write(&c, &text, false);
    assert_ok(config_init(&again, &e), &e);
    assert_ok(tiny_set(&again, "model.layers=10 model.attn_ratio=0.3", &e), &e);
    assert_ok(config_load_saved(&again, text.text, text.len, "ck", CFG_SAVED_ALL, NULL, &e), &e);
    assert_ok(config_finish(&again, &e), &e);
    assert_string_equal(again.model.pattern, "M-*MM*-*M-");
    assert_true(again.model.mlp_ratio == 0.3);
    config_release(&again);
    /* The pattern follows a change of what it was made from. */
    assert_ok(tiny_set(&c, "model.mlp_ratio=0", &e), &e);
    assert_ok(config_finish(&c, &e), &e);
    assert_string_equal(c.model.pattern, "MM*MM*M*MM");
    assert_ok(tiny_set(&c, "model.attn_ratio=0 model.layers=0", &e), &e);
    assert_ok(config_finish(&c, &e), &e);
    assert_string_equal(c.model.pattern, "*-*-");
    config_release(&c);
    buf_release(&text);
}

/* The pattern after finishing a config with these words of a command line; or the rule that is broken. */
static void assert_depths(const char *const *words, int n, const char *pattern, const char *rule)
{
    struct config c;
    struct config_args args = {0};
    struct err e = {0};
    char copy[8][64], *argv[8];
    for (int i = 0; i < n; i++) {
        snprintf(copy[i], sizeof copy[i], "%s", words[i]);
        argv[i] = copy[i];
    }
    assert_ok(config_init(&c, &e), &e);
    assert_ok(config_parse_args(&c, n, argv, &args, &e), &e);
    if (rule != NULL) {
        assert_fails(config_finish(&c, &e), ST_USAGE, &e, rule);
    } else {
        assert_ok(config_finish(&c, &e), &e);
        assert_string_equal(c.model.pattern, pattern);
        assert_ok(config_finish(&c, &e), &e); /* a second time changes nothing */
        assert_string_equal(c.model.pattern, pattern);
    }
    config_release(&c);
}

static void separate_depth_options_become_part_of_the_pattern(void **state)
{
    (void)state;
#define WORDS(...) (const char *const[]){__VA_ARGS__}, countof(((const char *const[]){__VA_ARGS__}))
    assert_depths(
        WORDS("--hybrid-layer-pattern", "M*M*", "--mtp-num-layers", "2", "--mtp-hybrid-override-pattern", "MM"),
        "M*M*/MM/MM", NULL);
    assert_depths(
        WORDS("--hybrid-override-pattern=M-M-|M-M*-", "--mtp-num-layers=1", "--mtp-hybrid-override-pattern=*E"),
        "M-M-|M-M*-/*E", NULL);
    assert_depths(WORDS("--num-layers=4", "--hybrid-attention-ratio=0.5", "--mtp-num-layers=1",
                        "--mtp-hybrid-override-pattern=*-"),
                  "M**M/*-", NULL);
    assert_depths(WORDS("--mtp-num-layers=1", "--mtp-hybrid-override-pattern=*-"), "*-*-/*-", NULL);
    /* the pattern wins */
    assert_depths(WORDS("--hybrid-layer-pattern=M*/MM/MM", "--mtp-num-layers=1"), "M*/MM/MM", NULL);
    assert_depths(WORDS("--hybrid-layer-pattern=M*/MM", "--mtp-num-layers=1", "--mtp-hybrid-override-pattern=M*"), NULL,
                  "pattern-or-mtp-pattern");
    assert_depths(WORDS("--hybrid-layer-pattern=M*", "--mtp-num-layers=1"), NULL, "mtp-layers-need-pattern");
    assert_depths(WORDS("--num-layers=2", "--mtp-num-layers=1"), "[*-][*-]/*-", NULL);
    assert_depths(WORDS("--num-layers=1", "--num-experts=4", "--mtp-num-layers=2"), "[*E]/*E/*E", NULL);
    assert_depths(WORDS("--num-layers=1", "--mtp-num-layers=1", "--mtp-hybrid-override-pattern=*"), "[*-]/*", NULL);
    assert_depths(WORDS("--hybrid-layer-pattern=M*", "--mtp-hybrid-override-pattern=MM"), NULL,
                  "mtp-pattern-needs-layers");
    assert_depths(WORDS("--mtp-num-layers=1", "--mtp-hybrid-override-pattern=M/M"), NULL, "mtp-pattern-is-one-depth");
    /* Both spellings of the pattern are one option. */
    struct config c;
    struct config_args args = {0};
    struct err e = {0};
    char a[] = "--hybrid-layer-pattern=M*", b[] = "--hybrid-override-pattern=M*";
    assert_ok(config_init(&c, &e), &e);
    assert_fails(config_parse_args(&c, 2, (char *const[]){a, b}, &args, &e), ST_USAGE, &e, "model.pattern");
    config_release(&c);
#undef WORDS
}

static void separate_depth_options_survive_a_resume(void **state)
{
    (void)state;
    static const char *const options[] = {
        "model.pattern=M* model.mtp_layers=2 model.mtp_pattern=*-",
        "model.layers=4 model.attn_ratio=0.5 model.mtp_layers=1 model.mtp_pattern=*",
        "model.mtp_layers=1 model.mtp_pattern=*E",
    };
    static const char *const patterns[] = {"M*/*-/*-", "M**M/*", "*-*-/*E"};
    for (int i = 0; i < countof(options); i++)
        for (int said = 0; said < 2; said++) { /* again on the command line, or left to the checkpoint */
            struct config c, again;
            struct err e = {0};
            struct buf text;
            buf_init(&text, 0);
            assert_ok(config_init(&c, &e), &e);
            assert_ok(tiny_set(&c, options[i], &e), &e);
            assert_ok(config_finish(&c, &e), &e);
            config_write(&c, &text, false);
            assert_ok(config_init(&again, &e), &e);
            assert_ok(tiny_set(&again, said ? options[i] : "", &e), &e);
            assert_ok(config_load_saved(&again, text.text, text.len, "ck", CFG_SAVED_ALL, NULL, &e), &e);
            assert_ok(config_finish(&again, &e), &e);
            assert_string_equal(again.model.pattern, patterns[i]);
            config_release(&again);
            config_release(&c);
            buf_release(&text);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(segments_become_items, setup, teardown),
        cmocka_unit_test_setup_teardown(patterns_split_into_main_and_depths, setup, teardown),
        cmocka_unit_test_setup_teardown(each_mistake_has_its_code_and_phrase, setup, teardown),
        cmocka_unit_test_setup_teardown(mistakes_are_told_in_order, setup, teardown),
        cmocka_unit_test_setup_teardown(the_mark_stands_under_the_mistake, setup, teardown),
        cmocka_unit_test_setup_teardown(long_patterns_show_the_part_that_matters, setup, teardown),
        cmocka_unit_test_setup_teardown(layers_and_segments_are_counted, setup, teardown),
        cmocka_unit_test_setup_teardown(symbols_are_counted_in_all_parts, setup, teardown),
        cmocka_unit_test_setup_teardown(maps_find_the_layers_of_a_kind, setup, teardown),
        cmocka_unit_test_setup_teardown(children_of_a_group_are_numbered_consecutively, setup, teardown),
        cmocka_unit_test_setup_teardown(groups_are_stored_under_their_item, setup, teardown),
        cmocka_unit_test_setup_teardown(groups_whose_keys_would_collide_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(the_first_symbol_without_a_core_is_named, setup, teardown),
        cmocka_unit_test(cuts_change_nothing_on_one_rank),
        cmocka_unit_test(the_stack_is_drawn),
        cmocka_unit_test(ratios_become_patterns),
        cmocka_unit_test(ratio_options_make_the_pattern_and_survive_a_resume),
        cmocka_unit_test(separate_depth_options_become_part_of_the_pattern),
        cmocka_unit_test(separate_depth_options_survive_a_resume),
    };
    return cmocka_run_group_tests_name("pattern", tests, NULL, NULL);
}
