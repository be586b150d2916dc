/* data/: tokenizers, the writer, text to token files, and readers faced with damaged files. */
#include "support.h"

#include "data/data_int.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

static int open_source(const char *path, struct err *e)
{
    struct source s;
    struct tokenizer bytes;
    assert_ok(tokenizer_open(&bytes, "bytes", false, e), e);
    int st = source_open(&s, path, &bytes, -1, e);
    if (st == ST_OK)
        source_close(&s);
    return st;
}

static int n_files(const char *path)
{
    struct err e = {0};
    char **names;
    int n;
    assert_ok(file_list_dir(path, &names, &n, &e), &e);
    file_free_list(names, n);
    return n;
}

static void bytes_tokenizer_round_trips(void **state)
{
    (void)state;
    struct err e = {0};
    struct tokenizer t;
    assert_ok(tokenizer_open(&t, "bytes", true, &e), &e);
    assert_int_equal(t.vocab, 257);
    assert_int_equal(t.eod, 256);
    const uint8_t text[] = {0, 'a', 0xff, '\n'};
    struct token_encoder *c;
    struct token_ids ids = {0};
    size_t n;
    assert_ok(token_encoder_open(&c, &t, &e), &e);
    assert_ok(token_encode(c, text, 4, TOKEN_SPECIAL, &ids, &e), &e);
    assert_int_equal(ids.n, 4);
    for (int i = 0; i < 4; i++) {
        uint8_t out;
        assert_ok(tokenizer_decode(&t, ids.ids[i], &out, 1, &n, &e), &e);
        assert_true(n == 1 && out == text[i]);
    }
    token_encoder_close(c);
    free(ids.ids);
    assert_fails(tokenizer_decode(&t, 257, NULL, 0, &n, &e), ST_INVALID, &e, "outside");
    const int32_t labels[] = {65, -1, 256, 66};
    int64_t count;
    assert_ok(tokenizer_count_bytes(&t, labels, 4, &count, &e), &e);
    assert_int_equal(count, 2); /* an ignored label and an eod hold no text */
    tokenizer_close(&t);
    assert_ok(tokenizer_open(&t, "bytes", false, &e), &e);
    assert_true(t.vocab == 256 && t.eod == -1);
    assert_fails(tokenizer_open(&t, "klingon", false, &e), ST_IO, &e, "klingon");
}

/* Two documents, the first of two sequences, an empty third: the bytes of .idx are the format's. */
static void writer_makes_the_format_byte_for_byte(void **state)
{
    (void)state;
    struct err e = {0};
    struct token_writer *w;
    const int32_t a[] = {1, 2, 65535}, b[] = {4};
    assert_ok(token_writer_open(&w, in_test_dir("w"), DT_U16, false, &e), &e);
    assert_ok(token_writer_add(w, a, 3, &e), &e);
    assert_ok(token_writer_end_sequence(w, &e), &e);
    assert_ok(token_writer_add(w, b, 1, &e), &e);
    assert_ok(token_writer_end_document(w, &e), &e);
    assert_ok(token_writer_end_document(w, &e), &e);
    assert_ok(token_writer_close(w, &e), &e);
    static const uint8_t want[] = {
        'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 8, /* version 1, u16 */
        2,   0,   0,   0,   0,   0,   0,   0, 3, 0, 0, 0, 0, 0, 0, 0,       /* S, K */
        3,   0,   0,   0,   1,   0,   0,   0,                               /* lengths */
        0,   0,   0,   0,   0,   0,   0,   0, 6, 0, 0, 0, 0, 0, 0, 0,       /* offsets */
        0,   0,   0,   0,   0,   0,   0,   0, 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0,
    };
    char *got;
    size_t n;
    assert_ok(file_read(in_test_dir("w.idx"), 1000, &got, &n, &e), &e);
    assert_int_equal(n, sizeof want);
    assert_memory_equal(got, want, n);
    free(got);
    assert_ok(file_read(in_test_dir("w.bin"), 1000, &got, &n, &e), &e);
    assert_int_equal(n, 8);
    assert_memory_equal(got, "\1\0\2\0\xff\xff\4\0", 8);
    free(got);
    assert_int_equal(n_files(test_dir()), 2); /* no .tmp */

    struct data_info info;
    assert_ok(data_inspect(in_test_dir("w"), true, NULL, &info, &e), &e);
    assert_int_equal(info.sequences, 2);
    assert_int_equal(info.documents, 2);
    assert_int_equal(info.tokens, 4);
    assert_int_equal(info.longest, 3);
    assert_int_equal(info.min_id, 1);
    assert_int_equal(info.max_id, 65535);
    assert_ok(data_inspect(in_test_dir("w.idx"), false, NULL, &info, &e), &e); /* either file names the pair */

    assert_fails(token_writer_open(&w, in_test_dir("w"), DT_U16, false, &e), ST_CONFLICT, &e, "exists");
    assert_fails(token_writer_open(&w, in_test_dir("v"), DT_F32, false, &e), ST_INVALID, &e, "F32");
    assert_ok(token_writer_open(&w, in_test_dir("w"), DT_U8, true, &e), &e);
    assert_fails(token_writer_add(w, a, 3, &e), ST_INVALID, &e, "65535 does not fit");
    token_writer_abort(w); /* the old pair is untouched */
    assert_ok(data_inspect(in_test_dir("w"), false, NULL, &info, &e), &e);
    assert_int_equal(info.tokens, 4);
    assert_int_equal(n_files(test_dir()), 2);
}

static void a_replaced_pair_is_the_new_one(void **state)
{
    (void)state;
    struct err e = {0};
    for (int round = 0; round < 2; round++) {
        struct token_writer *w;
        int32_t ids[300000];
        for (int i = 0; i < 300000; i++)
            ids[i] = i + round;
        assert_ok(token_writer_open(&w, in_test_dir("r"), DT_I32, round > 0, &e), &e);
        assert_ok(token_writer_add(w, ids, (size_t)(300000 - round), &e), &e); /* past one buffer */
        assert_ok(token_writer_close(w, &e), &e);                              /* ends the open document */
    }
    struct source s;
    int32_t ids[2];
    assert_ok(source_open(&s, in_test_dir("r"), NULL, -1, &e), &e);
    assert_int_equal(s.n_tokens, 299999);
    assert_int_equal(s.n_docs, 1);
    assert_ok(source_read(&s, 0, 299997, 2, 1000000, ids, &e), &e);
    assert_int_equal(ids[1], 299999);
    source_close(&s);
}

static void a_full_disk_leaves_nothing(void **state)
{
    (void)state;
    struct err e = {0};
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    for (int i = 0; i < 2; i++) { /* no room for the .bin, then none for the .idx */
        struct token_writer *w;
        const int32_t id = 1;
        small = before;
        small.rlim_cur = i == 0 ? 0 : 1;
        assert_ok(token_writer_open(&w, in_test_dir("full"), DT_U8, false, &e), &e);
        assert_ok(token_writer_add(w, &id, 1, &e), &e);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        int st = token_writer_close(w, &e);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        assert_fails(st, ST_IO, &e, i == 0 ? "full.bin" : "full.idx");
        assert_int_equal(n_files(test_dir()), 0);
    }
    signal(SIGXFSZ, handler);
}

/* A kill between the renames of .bin and .idx leaves the first under its name and the second under a temporary one. */
static void half_a_pair_of_a_killed_writer_is_replaced(void **state)
{
    (void)state;
    struct err e = {0};
    struct token_writer *w;
    const int32_t id = 1;
    write_test_file("k.bin", "old", 3);
    /* whose it is nobody knows */
    assert_fails(token_writer_open(&w, in_test_dir("k"), DT_U8, false, &e), ST_CONFLICT, &e, "k.bin");
    write_test_file("k.idx.tmp-0123456789abcdef", "x", 1);
    assert_ok(token_writer_open(&w, in_test_dir("k"), DT_U8, false, &e), &e);
    assert_ok(token_writer_add(w, &id, 1, &e), &e);
    assert_ok(token_writer_close(w, &e), &e);
    struct data_info info;
    assert_ok(data_inspect(in_test_dir("k"), false, NULL, &info, &e), &e);
    assert_int_equal(info.tokens, 1);
    assert_int_equal(n_files(test_dir()), 2);
    unlink(in_test_dir("k.bin"));
    unlink(in_test_dir("k.idx"));
}

static void the_temporary_file_of_a_living_writer_stays(void **state)
{
    (void)state;
    struct err e = {0};
    struct token_writer *a, *b;
    const int32_t id = 1;
    assert_ok(token_writer_open(&a, in_test_dir("two"), DT_U8, true, &e), &e);
    assert_ok(token_writer_open(&b, in_test_dir("two"), DT_U8, true, &e), &e);
    assert_int_equal(n_files(test_dir()), 4);
    assert_ok(token_writer_add(a, &id, 1, &e), &e);
    assert_ok(token_writer_close(b, &e), &e);
    assert_ok(token_writer_close(a, &e), &e);
    assert_int_equal(n_files(test_dir()), 2);
    unlink(in_test_dir("two.bin"));
    unlink(in_test_dir("two.idx"));
}

/* Reading through the map would end the process by SIGBUS. */
static void a_file_that_becomes_shorter_is_an_error_that_names_it(void **state)
{
    (void)state;
    struct err e = {0};
    struct token_writer *w;
    static int32_t ids[20000], got[20000];
    assert_ok(token_writer_open(&w, in_test_dir("s"), DT_U16, true, &e), &e);
    assert_ok(token_writer_add(w, ids, countof(ids), &e), &e);
    assert_ok(token_writer_close(w, &e), &e);
    struct source s;
    for (int i = 0; i < 2; i++) { /* the tokens, then the index */
        assert_ok(source_open(&s, in_test_dir("s"), NULL, -1, &e), &e);
        assert_ok(source_read(&s, 0, 0, countof(ids), 10, got, &e), &e);
        assert_int_equal(truncate(in_test_dir(i == 0 ? "s.bin" : "s.idx"), i == 0 ? 100 : 40), 0);
        assert_fails(source_read(&s, 0, 15000, 5000, 10, got, &e), ST_IO, &e, i == 0 ? "s.bin" : "s.idx");
        /* zeros of the last page are not data */
        assert_fails(source_read(&s, 0, 60, 10, 10, got, &e), ST_IO, &e, "shorter");
        source_close(&s);
        if (i == 0)
            assert_int_equal(truncate(in_test_dir("s.bin"), 2 * countof(ids)), 0);
    }
    unlink(in_test_dir("s.bin"));
    unlink(in_test_dir("s.idx"));
}

static void a_failed_rename_leaves_no_half_pair(void **state)
{
    (void)state;
    struct err e = {0};
    struct token_writer *w;
    const int32_t id = 1;
    assert_ok(token_writer_open(&w, in_test_dir("h"), DT_U8, false, &e), &e);
    assert_ok(token_writer_add(w, &id, 1, &e), &e);
    assert_int_equal(mkdir(in_test_dir("h.idx"), 0777), 0); /* in the way of the second rename */
    assert_fails(token_writer_close(w, &e), ST_IO, &e, "cannot rename");
    assert_int_equal(n_files(test_dir()), 1);
    assert_ok(token_writer_open(&w, in_test_dir("h"), DT_U8, true, &e), &e);
    assert_fails(token_writer_close(w, &e), ST_IO, &e, "cannot replace");
    assert_int_equal(n_files(test_dir()), 1);
}

static void tokenizing_a_tree_is_sorted_and_counts_what_it_leaves_out(void **state)
{
    (void)state;
    struct err e = {0};
    assert_ok(file_make_dirs(in_test_dir("t/b"), &e), &e);
    assert_ok(file_make_dirs(in_test_dir("t/.git"), &e), &e);
    write_test_file("t/c.txt", "cc", 2);
    write_test_file("t/a.txt", "aaa", 3);
    write_test_file("t/b/z.txt", "z", 1);
    write_test_file("t/b/empty", "", 0);
    write_test_file("t/binary", "x\0y", 3);
    write_test_file("t/.hidden", "no", 2);
    write_test_file("t/.git/config", "no", 2);
    write_test_file("t/old.bin", "no", 2);
    assert_int_equal(symlink("..", in_test_dir("t/b/up")), 0); /* a circle */
    struct tokenizer tok;
    assert_ok(tokenizer_open(&tok, "bytes", true, &e), &e);
    const char *in[] = {in_test_dir("t")};
    struct tokenize_opts o = {.in = in, .n_in = 1, .out = in_test_dir("t/out"), .tokenizer = &tok};
    struct tokenize_stats s;
    for (int round = 0; round < 2; round++) { /* the second does not read the first's output */
        o.replace = round > 0;
        assert_ok(data_tokenize(&o, &s, &e), &e);
        assert_int_equal(s.files, 3);
        assert_int_equal(s.bytes, 6);
        assert_int_equal(s.tokens, 9);
        assert_int_equal(s.skipped_binary, 1);
        assert_int_equal(s.skipped_empty, 1);
    }
    struct source src;
    int32_t ids[4];
    assert_ok(source_open(&src, o.out, NULL, -1, &e), &e);
    assert_int_equal(src.dtype, DT_U16);
    assert_int_equal(src.n_seqs, 3);
    static const int32_t want[3][4] = {{'a', 'a', 'a', 256}, {'z', 256}, {'c', 'c', 256}};
    for (int64_t i = 0; i < 3; i++) {
        int64_t n = source_seq_len(&src, i);
        assert_ok(source_read(&src, i, 0, n, 257, ids, &e), &e);
        assert_memory_equal(ids, want[i], (size_t)n * sizeof *ids);
    }
    source_close(&src);
}

static void tokenizing_errors_are_clear_and_leave_nothing(void **state)
{
    (void)state;
    struct err e = {0};
    struct tokenizer tok;
    struct tokenize_stats s;
    assert_ok(tokenizer_open(&tok, "bytes", false, &e), &e);
    write_test_file("a.txt", "text", 4);
    write_test_file("nul", "\0", 1);
    const char *missing[] = {in_test_dir("a.txt"), in_test_dir("nope")}, *nul[] = {in_test_dir("nul")};
    struct tokenize_opts o = {.in = missing, .n_in = 2, .out = in_test_dir("o"), .tokenizer = &tok};
    assert_fails(data_tokenize(&o, &s, &e), ST_IO, &e, "nope");
    o.in = nul;
    o.n_in = 1;
    assert_fails(data_tokenize(&o, &s, &e), ST_INVALID, &e, "1 binary");
    o.in = missing;
    o.out = in_test_dir("no/folder/o");
    assert_fails(data_tokenize(&o, &s, &e), ST_IO, &e, "does not exist");
    o.out = in_test_dir("a.txt/o"); /* a file where a folder should be */
    assert_fails(data_tokenize(&o, &s, &e), ST_IO, &e, "Not a directory");
    assert_int_equal(n_files(test_dir()), 2);
}

/* A good pair "g" of sequences 2, 0, 3 in 16 bits; its .idx of n bytes comes back. */
static uint8_t *good_pair(size_t *n)
{
    struct err e = {0};
    struct token_writer *w;
    const int32_t ids[] = {1, 2, 3, 4, 5};
    assert_ok(token_writer_open(&w, in_test_dir("g"), DT_U16, true, &e), &e);
    assert_ok(token_writer_add(w, ids, 2, &e), &e);
    assert_ok(token_writer_end_document(w, &e), &e);
    assert_ok(token_writer_add(w, ids + 2, 3, &e), &e);
    assert_ok(token_writer_close(w, &e), &e);
    char *bytes;
    assert_ok(file_read(in_test_dir("g.idx"), 1000, &bytes, n, &e), &e);
    assert_int_equal(*n, 34 + 12 * 2 + 8 * 3);
    return (uint8_t *)bytes;
}

static void an_index_cut_anywhere_is_refused(void **state)
{
    (void)state;
    struct err e = {0};
    size_t n;
    uint8_t *idx = good_pair(&n);
    assert_ok(open_source(in_test_dir("g"), &e), &e);
    for (size_t cut = 0; cut < n; cut++) {
        write_test_file("g.idx", idx, cut);
        assert_fails(open_source(in_test_dir("g"), &e), ST_CORRUPT, &e, "g.idx");
    }
    free(idx);
}

static void every_damaged_field_is_refused(void **state)
{
    (void)state;
    static const struct {
        size_t at;
        uint8_t byte;
        enum status status;
        const char *text;
    } damages[] = {
        {0, 'X', ST_CORRUPT, "magic"},
        {8, 1, ST_CORRUPT, "magic"},
        {9, 2, ST_UNSUPPORTED, "version 2"},
        {17, 0, ST_CORRUPT, "type code 0"},
        {17, 9, ST_CORRUPT, "type code 9"},
        {17, 6, ST_UNSUPPORTED, "F64"},
        {17, 7, ST_UNSUPPORTED, "F32"},
        {17, 5, ST_CORRUPT, "g.bin"},          /* 8-byte ids: more than .bin holds */
        {18, 1, ST_CORRUPT, "bytes follow"},   /* fewer sequences than there are */
        {25, 0xff, ST_CORRUPT, "cannot hold"}, /* 2^63 sequences */
        {26, 4, ST_CORRUPT, "cannot hold"},
        {33, 0x80, ST_CORRUPT, "cannot hold"}, /* 8 * K overflows */
        {37, 0x80, ST_CORRUPT, "has length -"},
        {36, 1, ST_CORRUPT, "g.bin"},            /* a long first sequence */
        {42, 1, ST_CORRUPT, "starts at byte 1"}, /* between two tokens */
        {50, 2, ST_CORRUPT, "starts at byte 2"}, /* inside the sequence before */
        {50, 6, ST_CORRUPT, "g.bin"},            /* past the end */
        {57, 0x80, ST_CORRUPT, "starts at byte -"},
        {57, 0x7f, ST_CORRUPT, "g.bin"},
        {58, 1, ST_CORRUPT, "document entry 0"},
        {66, 3, ST_CORRUPT, "document entry 1"},
        {81, 0x80, ST_CORRUPT, "document entry 2"},
        {74, 1, ST_CORRUPT, "cover 1 of 2"},
    };
    struct err e = {0};
    size_t n;
    uint8_t *idx = good_pair(&n);
    for (int i = 0; i < countof(damages); i++) {
        uint8_t kept = idx[damages[i].at];
        idx[damages[i].at] = damages[i].byte;
        write_test_file("g.idx", idx, n);
        assert_fails(open_source(in_test_dir("g"), &e), damages[i].status, &e, damages[i].text);
        idx[damages[i].at] = kept;
    }
    uint8_t *more = calloc(1, n + 3);
    memcpy(more, idx, n);
    write_test_file("g.idx", more, n + 2);
    assert_fails(open_source(in_test_dir("g"), &e), ST_UNSUPPORTED, &e, "multimodal");
    write_test_file("g.idx", more, n + 3);
    assert_fails(open_source(in_test_dir("g"), &e), ST_CORRUPT, &e, "follow");
    write_test_file("g.idx", idx, n);
    assert_ok(open_source(in_test_dir("g"), &e), &e);
    write_test_file("g.bin", "123456789", 9); /* 5 tokens need 10 */
    assert_fails(open_source(in_test_dir("g"), &e), ST_CORRUPT, &e, "9 bytes");
    write_test_file("g.bin", "", 0);
    assert_fails(open_source(in_test_dir("g"), &e), ST_CORRUPT, &e, "0 bytes");
    assert_int_equal(unlink(in_test_dir("g.bin")), 0);
    assert_fails(open_source(in_test_dir("g"), &e), ST_IO, &e, "g.bin");
    assert_int_equal(unlink(in_test_dir("g.idx")), 0);
    assert_fails(open_source(in_test_dir("g"), &e), ST_IO, &e, "tried");
    free(more);
    free(idx);
}

/* Every integer type reads, and an id outside the vocabulary is named with its place. */
static void ids_are_checked_against_the_vocabulary(void **state)
{
    (void)state;
    static const struct {
        uint8_t code;
        uint8_t bytes[16];
        size_t n;
        const char *bad; /* of the second id, or NULL */
    } cases[] = {
        {1, {3, 200}, 2, "id 200"},
        {2, {3, 200}, 2, "id -56"},
        {3, {3, 0, 255, 255}, 4, "id -1,"},
        {8, {3, 0, 100, 0}, 4, "id 100"},
        {8, {3, 0, 99, 0}, 4, NULL},
        {4, {3, 0, 0, 0, 0, 0, 0, 0x80}, 8, "id -2147483648"},
        {4, {3, 0, 0, 0, 9, 0, 0, 0}, 8, NULL},
        {5, {3, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0}, 16, "id 4294967305"},
        {5, {3, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0}, 16, NULL},
    };
    struct err e = {0};
    size_t n;
    uint8_t *idx = good_pair(&n);
    idx[18] = 1; /* one sequence of two tokens: lengths at 34, offset at 38, documents at 46 */
    idx[26] = 2;
    memset(idx + 34, 0, n - 34);
    idx[34] = 2;
    idx[54] = 1;
    for (int i = 0; i < countof(cases); i++) {
        struct source s;
        int32_t ids[2];
        idx[17] = cases[i].code;
        write_test_file("g.idx", idx, 62);
        write_test_file("g.bin", cases[i].bytes, cases[i].n);
        assert_ok(source_open(&s, in_test_dir("g"), NULL, -1, &e), &e);
        int st = source_read(&s, 0, 0, 2, 100, ids, &e);
        assert_int_equal(st, cases[i].bad ? ST_CORRUPT : ST_OK);
        if (cases[i].bad) {
            assert_non_null(strstr(e.msg, cases[i].bad));
            assert_non_null(strstr(e.msg, "g.bin: token 1 of sequence 0"));
        } else {
            assert_int_equal(ids[0], 3);
        }
        source_close(&s);
    }
    free(idx);
}

static void write_shard(const char *name, int32_t magic, int32_t version, int32_t count, const void *tokens, size_t n)
{
    uint8_t bytes[2048] = {0};
    memcpy(bytes, &magic, 4);
    memcpy(bytes + 4, &version, 4);
    memcpy(bytes + 8, &count, 4);
    memcpy(bytes + 1024, tokens, n);
    write_test_file(name, bytes, 1024 + n);
}

static void shards_of_both_kinds_read(void **state)
{
    (void)state;
    struct err e = {0};
    struct source s;
    const uint16_t two[] = {7, 50256, 9};
    const uint32_t four[] = {128000, 5, 0xffffffff};
    int32_t ids[3];
    write_shard("s_1.bin", 20240520, 1, 3, two, sizeof two);
    write_shard("s_0.bin", 20240801, 7, 3, four, sizeof four);
    assert_ok(source_open(&s, in_test_dir("s_1.bin"), NULL, -1, &e), &e);
    assert_ok(source_read(&s, 0, 0, 3, 50257, ids, &e), &e);
    assert_int_equal(ids[1], 50256);
    source_close(&s);
    assert_ok(source_open(&s, in_test_dir("s_*.bin"), NULL, -1, &e), &e); /* sorted: s_0 first */
    assert_int_equal(s.n_seqs, 2);
    assert_int_equal(s.n_tokens, 6);
    assert_ok(source_read(&s, 0, 0, 2, 200000, ids, &e), &e);
    assert_int_equal(ids[0], 128000);
    assert_fails(source_read(&s, 0, 0, 3, 200000, ids, &e), ST_CORRUPT, &e, "id 4294967295");
    source_close(&s);
    write_test_file("s_2.bin", "text", 4);
    assert_fails(open_source(in_test_dir("s_*.bin"), &e), ST_CORRUPT, &e, "s_2.bin");
    assert_fails(open_source(in_test_dir("q_*.bin"), &e), ST_IO, &e, "no file matches");
}

static void damaged_shards_are_refused(void **state)
{
    (void)state;
    struct err e = {0};
    const uint16_t ids[] = {1, 2, 3};
    write_shard("s.bin", 20240520, 2, 3, ids, 6);
    assert_fails(open_source(in_test_dir("s.bin"), &e), ST_UNSUPPORTED, &e, "version 2");
    write_shard("s.bin", 20240520, 1, 4, ids, 6);
    assert_fails(open_source(in_test_dir("s.bin"), &e), ST_CORRUPT, &e, "4 tokens");
    write_shard("s.bin", 20240520, 1, 2, ids, 6);
    assert_fails(open_source(in_test_dir("s.bin"), &e), ST_CORRUPT, &e, "2 tokens");
    write_shard("s.bin", 20240520, 1, -3, ids, 6);
    assert_fails(open_source(in_test_dir("s.bin"), &e), ST_CORRUPT, &e, "-3 tokens");
    write_shard("s.bin", 20240801, 7, INT32_MAX, ids, 6);
    assert_fails(open_source(in_test_dir("s.bin"), &e), ST_CORRUPT, &e, "truncated");
    write_shard("s.bin", 20240520, 1, 3, ids, 6);
    assert_ok(open_source(in_test_dir("s.bin"), &e), &e);
    for (off_t cut = 4; cut < 1030; cut++) {
        struct stat sb;
        write_shard("s.bin", 20240520, 1, 3, ids, 6);
        assert_int_equal(truncate(in_test_dir("s.bin"), cut), 0);
        assert_int_equal(stat(in_test_dir("s.bin"), &sb), 0);
        assert_fails(open_source(in_test_dir("s.bin"), &e), ST_CORRUPT, &e, "s.bin");
        cut += cut > 16 && cut < 1000 ? 97 : 0;
    }
    write_test_file("s.bin", "abc", 3); /* too short for a magic: taken for one of a pair */
    assert_fails(open_source(in_test_dir("s.bin"), &e), ST_IO, &e, "s.idx");
}

static void paths_that_hold_nothing_are_explained(void **state)
{
    (void)state;
    struct err e = {0};
    assert_fails(open_source(in_test_dir("none"), &e), ST_IO, &e, "no such file, folder or token file");
    assert_fails(open_source(test_dir(), &e), ST_INVALID, &e, "holds no text");
    write_test_file("nul", "a\0b", 3);
    assert_fails(open_source(in_test_dir("nul"), &e), ST_INVALID, &e, "1 binary");
    write_test_file("x.idx", "", 0);
    assert_fails(open_source(in_test_dir("x"), &e), ST_IO, &e, "x.bin");
}

int main(void)
{
#define WITH_DIR(f) cmocka_unit_test_setup_teardown(f, make_test_dir, drop_test_dir)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_tokenizer_round_trips),
        WITH_DIR(writer_makes_the_format_byte_for_byte),
        WITH_DIR(a_replaced_pair_is_the_new_one),
        WITH_DIR(a_full_disk_leaves_nothing),
        WITH_DIR(half_a_pair_of_a_killed_writer_is_replaced),
        WITH_DIR(the_temporary_file_of_a_living_writer_stays),
        WITH_DIR(a_file_that_becomes_shorter_is_an_error_that_names_it),
        WITH_DIR(a_failed_rename_leaves_no_half_pair),
        WITH_DIR(tokenizing_a_tree_is_sorted_and_counts_what_it_leaves_out),
        WITH_DIR(tokenizing_errors_are_clear_and_leave_nothing),
        WITH_DIR(an_index_cut_anywhere_is_refused),
        WITH_DIR(every_damaged_field_is_refused),
        WITH_DIR(ids_are_checked_against_the_vocabulary),
        WITH_DIR(shards_of_both_kinds_read),
        WITH_DIR(damaged_shards_are_refused),
        WITH_DIR(paths_that_hold_nothing_are_explained),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
