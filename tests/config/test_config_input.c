/* config/: INI files and command lines, the good and the bad. */
#include "support.h"

#include "config/config_int.h"

static struct config fresh(void)
{
    struct config c;
    struct err e = {0};
    assert_ok(config_init(&c, &e), &e);
    return c;
}

static int read_text(struct config *c, const char *text, struct err *e)
{
    return config_read_ini_text(c, text, strlen(text), "t.ini", e);
}

static void ini_files_are_understood(void **state)
{
    (void)state;
    struct err e = {0};
    struct config c = fresh();
    assert_fails(read_text(&c,
                           "\xef\xbb\xbf# a comment\r\n"
                           "; another\r\n"
                           "[model]\r\n"
                           "hidden = 64 # wide\r\n"
                           "heads=4;not a comment: no space before it\n",
                           &e),
                 ST_USAGE, &e, "t.ini:5: model.heads");
    assert_ok(read_text(&c,
                        "[model]\n"
                        "hidden: 64 ; wide\n"
                        "  \n"
                        "pattern = *[-M]|E # layers\n"
                        "[ train ]\n"
                        "lr =\t3e-4\n"
                        "[model]\n"
                        "tied = no",
                        &e),
              &e);
    assert_int_equal(c.model.hidden, 64);
    assert_string_equal(c.model.pattern, "*[-M]|E");
    assert_true(c.train.lr == 3e-4);
    assert_false(c.model.tied);
    char from[64];
    assert_string_equal(config_source_text(&c, "train.lr", from, sizeof from), "t.ini:6");
    assert_ok(config_read_ini_text(&c, NULL, 0, "empty.ini", &e), &e);
    config_release(&c);
}

static void text_values_can_be_quoted_and_continued(void **state)
{
    (void)state;
    struct err e = {0};
    struct config c = fresh();
    assert_ok(read_text(&c,
                        "[data]\n"
                        "train = 0.7 web/text   # mostly this\n"
                        "\n"
                        "        # a comment between\n"
                        "        0.3 code\n"
                        "valid =\n"
                        "  v.txt\n"
                        "[generate]\n"
                        "prompt = \" a ; b # c\\n\\x41\\\"\" ; done\n"
                        "   \"[x] = y\"\n"
                        "tokens = 7\n",
                        &e),
              &e);
    assert_string_equal(c.data.train, "0.7 web/text 0.3 code");
    assert_string_equal(c.data.valid, "v.txt");
    assert_string_equal(c.generate.prompt, " a ; b # c\nA\"[x] = y");
    assert_int_equal(c.generate.tokens, 7);
    config_release(&c);
}

static void bad_files_are_refused_with_their_line(void **state)
{
    (void)state;
    static const struct {
        const char *text, *where, *message;
    } bad[] = {
        {"[model]\nhidden = 1\nhidden = 2\n", "t.ini:3", "already set in line 2"},
        {"[model]\nhidden = 1\n[train]\n[model]\nhidden = 1\n", "t.ini:5", "line 2"},
        {"[modle]\n", "t.ini:1", "did you mean [model]?"},
        {"\n[zzzzzzzzzzzz]\na = 1\n", "t.ini:2", "[generate]"},
        {"[model]\nhiden = 1\n", "t.ini:2", "did you mean hidden?"},
        {"[model]\nlr = 1\n", "t.ini:2", "option of section [train]"},
        {"[model]\nqqqqqqqqqqqqqqq = 1\n", "t.ini:2", "braid help model"},
        {"hidden = 1\n", "t.ini:1", "before any [section]"},
        {"[model]\nhidden\n", "t.ini:2", "key = value"},
        {"[model]\nhidden\nheads = x\n", "t.ini:2", "key = value"},
        {"[model\nhidden = 1\n", "t.ini:1", "[name]"},
        {"[model] hidden = 1\n", "t.ini:1", "[name]"},
        {"[model] [x]\n", "t.ini:1", "no section"},
        {"[]\n", "t.ini:1", "no section"},
        {"[", "t.ini:1", "[name]"},
        {"[model]\nhidden = 1x\n", "t.ini:2", "not an integer"},
        {"[model]\nhidden = 1\n\n\nheads = 9999999\n[data]\n", "t.ini:5", "out of range"},
        {"[model]\n= 3\n", "t.ini:2", "no option ''"},
        {"[model]\nhidden = 1\n  heads = 2\n", "t.ini:3", "indented"},
        {"[model]\npattern = *\n  hidden = 2\n", "t.ini:3", "indented"},
        {"[model]\npattern = \"*-\n", "t.ini:2", "closing quote"},
        {"[model]\npattern = \"*-\" x\n", "t.ini:2", "behind the closing quote"},
        {"[model]\npattern = \"\\q\"\n", "t.ini:2", "unknown escape"},
        {"[model]\npattern = \"\\x00\"\n", "t.ini:2", "unknown escape"},
        {"[model]\npattern = \"\\\n", "t.ini:2", "unknown escape"},
        {"[model]\n\x01\n", "t.ini:2", "0x01"},
        {"\x7f"
         "ELF",
         "t.ini:1", "0x7f"},
    };
    for (int i = 0; i < countof(bad); i++) {
        struct config c = fresh();
        struct err e = {0};
        assert_fails(read_text(&c, bad[i].text, &e), ST_USAGE, &e, bad[i].message);
        if (strstr(e.msg, bad[i].where) == NULL)
            fail_msg("'%s' does not name %s", e.msg, bad[i].where);
        assert_int_equal(read_text(&c, bad[i].text, NULL), ST_USAGE); /* no err is allowed, too */
        config_release(&c);
    }
}

static void sizes_are_bounded(void **state)
{
    (void)state;
    struct err e = {0};
    struct config c = fresh();
    assert_fails(config_read_ini_text(&c, "[model]\nhidden\0 = 3", 18, "t.ini", &e), ST_USAGE, &e,
                 "t.ini:2: byte 0x00");
    struct buf text;
    buf_init(&text, 0);
    buf_add(&text, "[data]\ntrain = ");
    for (int i = 0; i < 1000; i++)
        buf_add(&text, "x");
    assert_fails(read_text(&c, text.text, &e), ST_USAGE, &e, "t.ini:2: the line is longer");
    buf_clear(&text);
    buf_add(&text, "[data]\ntrain = a\n");
    for (int i = 0; i < 1000; i++)
        buf_add(&text, "  0123456789012345678901234567890123456789012345678901234567890123456789\n");
    assert_fails(read_text(&c, text.text, &e), ST_USAGE, &e, "longer than 65536 bytes");
    while (text.len <= CONFIG_MAX_FILE)
        buf_add(&text, "# ----------------------------------------------------------------------\n");
    assert_fails(read_text(&c, text.text, &e), ST_USAGE, &e, "too many");
    assert_string_equal(c.data.train, "");
    char *dir = temp_dir(), *path = path_join(dir, "big.ini");
    assert_fails(config_read_ini(&c, path, &e), ST_IO, &e, "big.ini");
    assert_ok(file_write_atomic(path, text.text, text.len, &e), &e);
    assert_fails(config_read_ini(&c, path, &e), ST_INVALID, &e, "larger than");
    assert_ok(file_remove_tree(dir, &e), &e);
    free(path);
    free(dir);
    buf_release(&text);
    config_release(&c);
}

/* ---- command line ---------------------------------------------------------------------------- */

#define PARSE(c, args, e, ...)                                                                                         \
    config_parse_args((c), countof(((const char *[]){__VA_ARGS__})),                                                   \
                      (char *const *)(uintptr_t)(const char *[]){__VA_ARGS__}, (args), (e))

static void options_are_taken_in_every_spelling(void **state)
{
    (void)state;
    struct err e = {0};
    struct config c = fresh();
    struct config_args args = {0};
    assert_ok(PARSE(&c, &args, &e, "--model.hidden=64", "--model.heads", "4", "--seq-length", "32",
                    "--micro-batch-size=2", "--untie-embeddings-and-output-weights", "--squared-relu",
                    "--model.qk_norm", "--run.report", "off", "--train.min_lr=-0", "here", "--data-path", "0.3", "a",
                    "0.7", "b", "--seed", "7", "--lr-decay-style=WSD", "--model.pattern=--*", "--", "--there"),
              &e);
    assert_int_equal(c.model.hidden, 64);
    assert_int_equal(c.model.heads, 4);
    assert_int_equal(c.train.seq, 32);
    assert_int_equal(c.train.micro_batch, 2);
    assert_false(c.model.tied);
    assert_int_equal(c.model.act, CFG_ACT_RELU2);
    assert_true(c.model.qk_norm);
    assert_false(c.run.report);
    assert_string_equal(c.data.train, "0.3 a 0.7 b");
    assert_int_equal(c.run.seed, 7);
    assert_int_equal(c.data.seed, 7);
    assert_int_equal(c.train.schedule, CFG_SCHEDULE_WSD);
    assert_string_equal(c.model.pattern, "--*");
    assert_int_equal(args.n_positional, 2);
    assert_string_equal(args.positional[0], "here");
    assert_string_equal(args.positional[1], "--there");
    assert_int_equal(config_source_of(&c, "model.hidden").source, CFG_FROM_COMMAND);
    config_release(&c);
}

static void bad_command_lines_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *word[3], *message;
    } bad[] = {
        {{"--model.hiden=3"}, "--model.hidden?"},
        {{"--hidden=3"}, "--model.hidden?"},
        {{"--hiden-size=3"}, "--hidden-size?"},
        {{"--qqqqqqqqqqqqqqqqqqqqqqqqqqqq"}, "braid help options"},
        {{"--model.hidden"}, "needs a value"},
        {{"--model.hidden", "--model.heads=3"}, "needs a value"},
        {{"--hidden-size"}, "needs a value"},
        {{"--data-path"}, "needs a value"},
        {{"--out"}, "needs a value"},
        {{"--out=a", "--out=b"}, "given twice"},
        {{"--model.hidden=3", "--model.hidden=3"}, "twice"},
        {{"--model.hidden=3", "--hidden-size=4"}, "--hidden-size"},
        {{"--swiglu", "--squared-relu"}, "twice"},
        {{"--untie-embeddings-and-output-weights=on"}, "takes no value"},
        {{"--model.hidden=x"}, "not an integer"},
        {{"--model.tied=perhaps"}, "neither"},
        {{"-q"}, "two dashes"},
        {{"--=3"}, "unknown option"},
        {{"nowhere/x.ini"}, "nowhere/x.ini"},
    };
    for (int i = 0; i < countof(bad); i++) {
        struct config c = fresh();
        struct err e = {0};
        struct config_extra out = {.name = "out", .help = "result file"};
        struct config_args args = {.extra = &out, .n_extra = 1};
        int n = 0;
        while (n < 3 && bad[i].word[n] != NULL)
            n++;
        int st = config_parse_args(&c, n, (char *const *)(uintptr_t)bad[i].word, &args, &e);
        assert_fails(st, i == countof(bad) - 1 ? ST_IO : ST_USAGE, &e, bad[i].message);
        config_release(&c);
    }
    char long_name[400] = "--";
    memset(long_name + 2, 'x', 397);
    struct config c = fresh();
    struct err e = {0};
    struct config_args args = {0};
    assert_fails(PARSE(&c, &args, &e, long_name), ST_USAGE, &e, "unknown option");
    assert_fails(PARSE(&c, &args, &e, "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15",
                       "16", "17"),
                 ST_USAGE, &e, "from '17' on");
    config_release(&c);
}

/* What a user of another program writes, and the answer. */
static void names_of_other_programs_are_answered(void **state)
{
    (void)state;
    static const struct {
        const char *word, *message;
    } asked[] = {
        {"--tensor-parallel-size=2", "it is called --parallel.tp here"},
        {"--parallel.muon=2", "the optimizer Muon is not built"},
        {"--ema=2", "an average of weights (EMA) is not built"},
        {"--fp4=e2m1", "fp4 is not built"},
        {"--train.learning_rate=1", "it is called --train.lr here"},
        {"--learning-rate=1", "it is called --train.lr here"},
        {"--batch_size=8", "--train.micro_batch here, or --train.global_batch"},
        {"--n_layer=3", "--model.layers here, or --model.pattern"},
        {"--model.n_embd=3", "it is called --model.hidden here"},
        {"--train.hidden=3", "did you mean --model.hidden?"},
        {"--trian.steps=3", "did you mean --train.steps?"},
        {"--stesp=3", "did you mean --train.steps?"},
        {"--parallel.xy=2", "`braid help parallel` lists"},
        {"--use_flash_attn", "leave it out"},
        {"--colour=red", "`braid help options`"},
    };
    for (int i = 0; i < countof(asked); i++) {
        struct config c = fresh();
        struct err e = {0};
        struct config_args args = {0};
        assert_fails(PARSE(&c, &args, &e, asked[i].word), ST_USAGE, &e, asked[i].message);
        assert_non_null(strstr(e.msg, "unknown option --"));
        config_release(&c);
    }
    struct config c = fresh();
    struct err e = {0};
    assert_fails(read_text(&c, "[train]\nema = 2\n", &e), ST_USAGE, &e, "an average of weights (EMA) is not built");
    assert_non_null(strstr(e.msg, "t.ini:2"));
    assert_fails(read_text(&c, "[train]\nlearning_rate = 2\n", &e), ST_USAGE, &e, "it is called train.lr here");
    config_release(&c);
}

/* A synonym names options that exist, and a name answered with "not built" is none. */
static void advice_is_about_real_options(void **state)
{
    (void)state;
    const char *word, *option[2], *name;
    for (int i = 0; config_synonym(i, &word, option) == 0; i++)
        for (int k = 0; k < 2 && option[k] != NULL; k++) {
            struct buf text;
            buf_init(&text, 0);
            struct config c = fresh();
            assert_non_null(config_value_text(&c, option[k], &text));
            buf_release(&text);
            config_release(&c);
        }
    for (int i = 0; (name = config_not_built(i)) != NULL; i++)
        for (int k = 0; k < config_option_count(); k++)
            assert_string_not_equal(strchr(config_option_name(k), '.') + 1, name);
}

static void overrides_win_over_the_file_wherever_it_stands(void **state)
{
    (void)state;
    struct err e = {0};
    struct config c = fresh();
    char *dir = temp_dir(), *path = path_join(dir, "a.ini");
    static const char ini[] = "[model]\nhidden = 64\nheads = 2\n";
    assert_ok(file_write_atomic(path, ini, strlen(ini), &e), &e);
    struct config_extra out = {.name = "out", .help = "result file"};
    struct config_args args = {.extra = &out, .n_extra = 1};
    assert_ok(PARSE(&c, &args, &e, "--model.hidden=128", "x", path, "--out", "o.st", "b.ini"), &e);
    assert_int_equal(c.model.hidden, 128);
    assert_int_equal(c.model.heads, 2);
    assert_string_equal(args.ini, path);
    assert_string_equal(out.value, "o.st");
    assert_int_equal(args.n_positional, 2);
    assert_string_equal(args.positional[1], "b.ini");
    char from[300];
    assert_string_equal(config_source_text(&c, "model.hidden", from, sizeof from), "command line");
    assert_non_null(strstr(config_source_text(&c, "model.heads", from, sizeof from), "a.ini:3"));
    assert_ok(file_remove_tree(dir, &e), &e);
    free(path);
    free(dir);
    config_release(&c);
}

static void a_word_of_a_command_may_stand_alone(void **state)
{
    (void)state;
    struct err e = {0};
    struct config c = fresh();
    struct config_extra check = {.name = "verify", .alone = "python3"};
    struct config_args args = {.extra = &check, .n_extra = 1};
    assert_ok(PARSE(&c, &args, &e, "--verify", "folder", "--model.qk_norm", "--model.norm=layer"), &e);
    assert_string_equal(check.value, "python3");
    assert_int_equal(args.n_positional, 1);
    assert_string_equal(args.positional[0], "folder");
    assert_int_equal(c.model.qk_norm, CFG_QK_NORM_HEAD); /* a choice that has an on */
    config_release(&c);
    c = fresh();
    check.value = NULL;
    assert_ok(PARSE(&c, &args, &e, "--model.qk_norm", "row", "--verify=file.safetensors"), &e);
    assert_string_equal(check.value, "file.safetensors");
    assert_int_equal(c.model.qk_norm, CFG_QK_NORM_ROW);
    config_release(&c);
    c = fresh();
    assert_ok(config_set(&c, "model.qk_norm", "true", NULL, &e), &e);
    assert_int_equal(c.model.qk_norm, CFG_QK_NORM_HEAD);
    config_release(&c);
}

static void help_is_noticed_before_anything_is_read(void **state)
{
    (void)state;
    struct err e = {0};
    struct config c = fresh();
    struct config_args args = {0};
    assert_ok(PARSE(&c, &args, &e, "nowhere.ini", "--model.hidden=64", "--help=train"), &e);
    assert_true(args.help);
    assert_string_equal(args.help_section, "train");
    assert_int_equal(c.model.hidden, 320);
    assert_ok(PARSE(&c, &args, &e, "-h"), &e);
    assert_true(args.help && args.help_section == NULL);
    config_release(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ini_files_are_understood),
        cmocka_unit_test(text_values_can_be_quoted_and_continued),
        cmocka_unit_test(bad_files_are_refused_with_their_line),
        cmocka_unit_test(sizes_are_bounded),
        cmocka_unit_test(options_are_taken_in_every_spelling),
        cmocka_unit_test(bad_command_lines_are_refused),
        cmocka_unit_test(names_of_other_programs_are_answered),
        cmocka_unit_test(advice_is_about_real_options),
        cmocka_unit_test(overrides_win_over_the_file_wherever_it_stands),
        cmocka_unit_test(a_word_of_a_command_may_stand_alone),
        cmocka_unit_test(help_is_noticed_before_anything_is_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
