/* data/: conversations: what is learned of them, how they are packed, what is refused. */
#include "support.h"

#include "data/data_int.h"

static const char lines[] =
    "{\"messages\":[{\"role\":\"user\",\"content\":\"Ask one\"},{\"role\":\"assistant\",\"content\":\"Reply one\"},"
    "{\"role\":\"user\",\"content\":\"Ask more\"},{\"role\":\"assistant\",\"content\":\"Reply more\"}]}\n"
    "\n"
    "{\"conversations\":[{\"from\":\"human\",\"value\":\"Ask two\"},{\"from\":\"gpt\",\"value\":\"Reply two\"}]}\n"
    "{\"messages\":[{\"role\":\"user\",\"content\":\"Ask three\"},{\"role\":\"assistant\",\"content\":\"Not "
    "this\",\"weight\":0},"
    "{\"role\":\"user\",\"content\":\"Again\"},{\"role\":\"assistant\",\"content\":\"Reply three\"}]}\n";

struct fixture {
    struct tokenizer tok;
    struct chat_template chat;
};

static void fixture_open(struct fixture *f, const char *template)
{
    struct err e = {0};
    assert_ok(tokenizer_open(&f->tok, "bytes", false, &e), &e);
    assert_ok(chat_template_open(&f->chat, template, &f->tok, &e), &e);
    write_test_file("c.jsonl", lines, sizeof lines - 1);
}

static void fixture_close(struct fixture *f)
{
    chat_template_close(&f->chat);
    tokenizer_close(&f->tok);
}

static int tokenize(const struct fixture *f, const char *name, const char *out, const char *roles, bool skip_bad,
                    struct tokenize_stats *s, struct err *e)
{
    const char *in[] = {in_test_dir(name)};
    struct tokenize_opts o = {.in = in,
                              .n_in = 1,
                              .out = in_test_dir(out),
                              .tokenizer = &f->tok,
                              .chat = &f->chat,
                              .loss_roles = roles,
                              .skip_bad = skip_bad,
                              .replace = true,
                              .threads = 2};
    return data_tokenize(&o, s, e);
}

static int open_dataset(const struct fixture *f, struct dataset **ds, const char *path, int64_t seq, const char *roles,
                        struct err *e)
{
    struct data_opts o = {.paths = path,
                          .seq = seq,
                          .seed = 5,
                          .vocab = 256,
                          .tokenizer = &f->tok,
                          .eod = -1,
                          .chat = &f->chat,
                          .loss_roles = roles,
                          .cache_dir = in_test_dir("cache")};
    return dataset_open(ds, &o, e);
}

/* The text of all labels of an epoch, samples in their order. */
static void learned_text(const struct dataset *ds, int64_t seq, struct buf *out)
{
    struct err e = {0};
    struct batch b;
    struct batch_opts o = {.micro_batch = 1, .global_batch = 1, .dp_size = 1, .eod = -1, .ahead = 1, .keep = 1};
    assert_ok(batch_alloc(&b, 1, seq, &e), &e);
    for (int64_t k = 0; k < dataset_n_samples(ds); k++) {
        assert_ok(batch_fill(&b, ds, &o, k, 0, &e), &e);
        for (int64_t i = 0; i < seq; i++) {
            char c = (char)b.labels[i];
            if (b.labels[i] >= 0)
                buf_add_n(out, &c, 1);
            if (b.labels[i] >= 0 && i + 1 < seq)
                assert_int_equal(b.labels[i], b.tokens[i + 1]);
            assert_int_equal(b.pos[i], i - b.doc_start[i]);
            if (b.pos[i] == 0 && i > 0) /* another conversation, or the filling */
                assert_int_equal(b.labels[i - 1], -1);
        }
    }
    batch_release(&b);
    assert_ok(buf_check(out, &e), &e);
}

static int count(const char *text, const char *what)
{
    int n = 0;
    for (const char *p = text; (p = strstr(p, what)) != NULL; p++)
        n++;
    return n;
}

static void only_the_chosen_roles_are_learned(void **state)
{
    (void)state;
    static const char *const replies[] = {"Reply one<|im_end|>", "Reply more<|im_end|>", "Reply two<|im_end|>",
                                          "Reply three<|im_end|>"};
    static const char *const asked[] = {"Ask one<|im_end|>", "Ask more<|im_end|>", "Ask two<|im_end|>",
                                        "Ask three<|im_end|>", "Again<|im_end|>"};
    struct fixture f;
    struct err e = {0};
    fixture_open(&f, "chatml");
    for (int users = 0; users < 2; users++)
        for (int64_t seq = 200; seq < 500; seq += 150) {
            struct dataset *ds;
            struct buf text;
            size_t want = 0;
            buf_init(&text, 0);
            assert_ok(open_dataset(&f, &ds, in_test_dir("c.jsonl"), seq, users ? "user,assistant" : "assistant", &e),
                      &e);
            learned_text(ds, seq, &text);
            for (int i = 0; i < countof(replies); i++) {
                want += strlen(replies[i]);
                assert_int_equal(count(text.text, replies[i]), 1);
            }
            for (int i = 0; users && i < countof(asked); i++) {
                want += strlen(asked[i]);
                assert_int_equal(count(text.text, asked[i]), 1);
            }
            assert_int_equal(text.len, want); /* and nothing else: neither "Not this" nor what the template writes */
            buf_release(&text);
            dataset_close(ds);
        }
    fixture_close(&f);
}

/* 40 conversations of different lengths: each is in exactly one sample, from its first token to its last. */
static void conversations_are_packed_whole(void **state)
{
    (void)state;
    enum { DOCS = 40, SEQ = 120 };
    struct fixture f;
    struct err e = {0};
    struct buf text;
    struct dataset *ds;
    int seen[DOCS] = {0};
    int32_t tokens[SEQ + 1];
    uint8_t marks[SEQ + 1];
    fixture_open(&f, "zephyr");
    buf_init(&text, 0);
    for (int i = 0; i < DOCS; i++)
        buf_addf(
            &text,
            "{\"messages\":[{\"role\":\"user\",\"content\":\"%.*s\"},{\"role\":\"assistant\",\"content\":\"%c\"}]}\n",
            i % 13, "abcdefghijklmnop", '0' + i);
    write_test_file("many.jsonl", text.text, text.len);
    assert_ok(open_dataset(&f, &ds, in_test_dir("many.jsonl"), SEQ, "assistant", &e), &e);
    assert_true(dataset_n_samples(ds) < DOCS); /* several in a sample */
    for (int64_t k = 0; k < dataset_n_samples(ds); k++) {
        assert_ok(dataset_get_marked(ds, k, tokens, marks, &e), &e);
        assert_true(marks[0] & MARK_START);
        for (int i = 0; i <= SEQ;) {
            char doc[SEQ + 2] = "", want[SEQ + 2];
            int from = i;
            do
                doc[i - from] = (char)tokens[i];
            while (++i <= SEQ && !(marks[i] & MARK_START));
            if (doc[0] == '\0') /* the filling */
                continue;
            doc[i - from] = '\0';
            const char *reply = strstr(doc, "<|assistant|>\n");
            assert_non_null(reply);
            int d = reply[strlen("<|assistant|>\n")] - '0';
            assert_true(d >= 0 && d < DOCS);
            snprintf(want, sizeof want, "<|user|>\n%.*s</s>\n<|assistant|>\n%c</s>\n", d % 13, "abcdefghijklmnop",
                     '0' + d);
            assert_string_equal(doc, want);
            seen[d]++;
        }
    }
    for (int d = 0; d < DOCS; d++)
        assert_int_equal(seen[d], 1);
    dataset_close(ds);
    buf_release(&text);
    fixture_close(&f);
}

static void bad_lines_are_named_or_counted(void **state)
{
    (void)state;
    static const char bad[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]}\n"
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}\n"
        "{\"messages\":[{\"role\":\"nobody\",\"content\":\"a\"}]}\n"
        "not json\n"
        "{\"text\":\"a\"}\n"
        "{\"messages\":[{\"role\":\"tool\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]}\n";
    struct fixture f;
    struct tokenize_stats s;
    struct err e = {0};
    fixture_open(&f, "zephyr");
    write_test_file("bad.jsonl", bad, sizeof bad - 1);
    assert_fails(tokenize(&f, "bad.jsonl", "bad", "assistant", false, &s, &e), ST_CORRUPT, &e,
                 "bad.jsonl, line 2: no message of the roles");
    assert_ok(tokenize(&f, "bad.jsonl", "bad", "assistant", true, &s, &e), &e);
    assert_int_equal(s.bad_lines, 5);
    assert_int_equal(s.documents, 1);
    assert_non_null(strstr(s.first_bad, "line 2"));
    assert_int_equal(s.learned, strlen("b</s>"));
    assert_ok(tokenize(&f, "bad.jsonl", "bad", "user", true, &s, &e), &e);
    assert_int_equal(s.bad_lines, 4); /* a conversation of the user alone is one to learn from, then */
    write_test_file("plain.txt", "text", 4);
    assert_fails(tokenize(&f, "plain.txt", "plain", "assistant", false, &s, &e), ST_INVALID, &e,
                 "no file of JSON lines");
    assert_fails(tokenize(&f, "c.jsonl", "c", "assistant,nobody", false, &s, &e), ST_INVALID, &e,
                 "'nobody' is no role");
    fixture_close(&f);
}

static void another_template_other_roles_and_missing_marks_are_refused(void **state)
{
    (void)state;
    struct fixture f, other;
    struct tokenize_stats s;
    struct dataset *ds;
    struct data_info info;
    struct err e = {0};
    const char *prefix = in_test_dir("t");
    fixture_open(&f, "chatml");
    fixture_open(&other, "zephyr");
    assert_ok(tokenize(&f, "c.jsonl", "t", "assistant", false, &s, &e), &e);
    assert_ok(data_inspect(prefix, false, NULL, &info, &e), &e);
    assert_string_equal(info.chat, "chatml");
    assert_int_equal(info.learned, s.learned);
    assert_ok(open_dataset(&f, &ds, prefix, 200, "assistant", &e), &e);
    dataset_close(ds);
    assert_fails(open_dataset(&other, &ds, prefix, 200, "assistant", &e), ST_CONFLICT, &e, "chat template chatml");
    assert_fails(open_dataset(&f, &ds, prefix, 200, "user", &e), ST_CONFLICT, &e, "data.loss_roles=assistant");
    struct data_opts plain = {.paths = prefix, .seq = 20, .seed = 5, .vocab = 256, .tokenizer = &f.tok, .eod = -1};
    assert_fails(dataset_open(&ds, &plain, &e), ST_CONFLICT, &e, "set data.chat=chatml");
    write_test_file("x.txt", lines, sizeof lines - 1);
    assert_fails(open_dataset(&f, &ds, in_test_dir("x.txt"), 20, "assistant", &e), ST_INVALID, &e,
                 "holds no conversations");
    assert_int_equal(truncate(in_test_dir("t.loss"), 7), 0);
    assert_fails(open_dataset(&f, &ds, prefix, 200, "assistant", &e), ST_CORRUPT, &e, "7 marks for");
    assert_int_equal(unlink(in_test_dir("t.loss")), 0);
    assert_fails(open_dataset(&f, &ds, prefix, 200, "assistant", &e), ST_CORRUPT, &e, ".loss is missing");
    assert_ok(tokenize(&f, "c.jsonl", "t", "assistant", false, &s, &e), &e);
    assert_int_equal(unlink(in_test_dir("t.tokens.json")), 0);
    assert_fails(open_dataset(&f, &ds, prefix, 200, "assistant", &e), ST_CORRUPT, &e, "no .tokens.json");
    const char *in[] = {in_test_dir("x.txt")}; /* other text takes the marks away */
    struct tokenize_opts o = {.in = in, .n_in = 1, .out = prefix, .tokenizer = &f.tok, .replace = true};
    assert_ok(data_tokenize(&o, &s, &e), &e);
    assert_false(file_exists(in_test_dir("t.loss")));
    fixture_close(&f);
    fixture_close(&other);
}

/* Text and conversations in one run: the text keeps its own labels. */
static void conversations_blend_with_text(void **state)
{
    (void)state;
    enum { SEQ = 200 };
    struct fixture f;
    struct dataset *ds;
    struct err e = {0};
    char paths[1024], text[4000];
    int32_t tokens[SEQ + 1];
    uint8_t marks[SEQ + 1];
    int64_t talks = 0, other = 0;
    fixture_open(&f, "chatml");
    memset(text, 'x', sizeof text);
    write_test_file("x.txt", text, sizeof text);
    snprintf(paths, sizeof paths, "0.5 %s 0.5 %s", in_test_dir("c.jsonl"), in_test_dir("x.txt"));
    assert_ok(open_dataset(&f, &ds, paths, SEQ, "assistant", &e), &e);
    for (int64_t k = 0; k < dataset_n_samples(ds); k++) {
        assert_ok(dataset_get_marked(ds, k, tokens, marks, &e), &e);
        bool talk = (marks[0] & MARK_CHAT) != 0;
        talks += talk;
        other += !talk;
        for (int i = 0; i <= SEQ && !talk; i++)
            assert_true(marks[i] == MARK_LOSS && tokens[i] == 'x');
    }
    assert_true(talks > 0 && other > 0);
    dataset_close(ds);
    fixture_close(&f);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, make_test_dir, drop_test_dir)
    const struct CMUnitTest tests[] = {
        T(only_the_chosen_roles_are_learned), T(conversations_are_packed_whole),
        T(bad_lines_are_named_or_counted),    T(another_template_other_roles_and_missing_marks_are_refused),
        T(conversations_blend_with_text),
    };
    return cmocka_run_group_tests_name("chat", tests, NULL, NULL);
}
