/* TensorBoard files: checksums, exact bytes, restarts and names. */
#include "support.h"

#include "log/tensorboard_int.h"

static char *only_file(const char *dir, int which, size_t *len)
{
    struct err e = {0};
    char **names, *text;
    int n;
    assert_ok(file_list_dir(dir, &names, &n, &e), &e);
    assert_true(which < n);
    assert_non_null(strstr(names[which], "tfevents"));
    char *path = path_join(dir, names[which]);
    assert_ok(file_read(path, 1 << 20, &text, len, &e), &e);
    free(path);
    file_free_list(names, n);
    return text;
}

static void crc32c_gives_the_published_check_value(void **state)
{
    (void)state;
    assert_int_equal(crc32c("123456789", 9), 0xE3069283u);
    assert_int_equal(crc32c("", 0), 0);
}

static void a_scalar_is_written_byte_for_byte(void **state)
{
    (void)state;
    static const uint8_t want[] = {
        0x18, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xa3, 0x7f, 0x4b, 0x22, 0x09, 0x00, 0x00, 0x00, 0x40, 0xfc,
        0x54, 0xd9, 0x41, 0x1a, 0x0d, 'b',  'r',  'a',  'i',  'n',  '.',  'E',  'v',  'e',  'n',  't',  ':',  '2',
        0xec, 0xed, 0x8f, 0x9d, 0x1e, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xd9, 0xdc, 0x12, 0x32, 0x09, 0x00,
        0x00, 0x40, 0x40, 0xfc, 0x54, 0xd9, 0x41, 0x10, 0xac, 0x02, 0x2a, 0x10, 0x0a, 0x0e, 0x0a, 0x07, 0x6c, 0x6d,
        0x20, 0x6c, 0x6f, 0x73, 0x73, 0x15, 0x00, 0x00, 0x20, 0x40, 0xa8, 0x4a, 0x05, 0x08,
    };
    struct err e = {0};
    struct tb_writer w;
    char *dir = temp_dir();
    assert_ok(tb_open(&w, dir, 1700000000, &e), &e);
    assert_false(w.had_files);
    tb_begin(&w);
    tb_add_scalar(&w, "lm loss", 2.5);
    assert_ok(tb_end(&w, 300, 1700000001, &e), &e);
    tb_begin(&w);
    assert_ok(tb_end(&w, 301, 1700000002, &e), &e); /* nothing added, nothing written */
    assert_ok(tb_close(&w, &e), &e);
    size_t n;
    char *got = only_file(dir, 0, &n);
    assert_int_equal(n, sizeof want);
    assert_memory_equal(got, want, sizeof want);
    free(got);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(dir);
}

/* Payload of record number `index`; checks the length against the file. */
static const uint8_t *record(const char *file, size_t size, int index, size_t *n)
{
    size_t at = 0;
    for (;; index--) {
        uint64_t len;
        assert_true(at + 16 <= size);
        memcpy(&len, file + at, sizeof len);
        assert_true(len <= size - at - 16);
        if (index == 0) {
            *n = (size_t)len;
            return (const uint8_t *)file + at + 12;
        }
        at += 16 + (size_t)len;
    }
}

static void several_scalars_share_an_event_and_odd_steps_survive(void **state)
{
    (void)state;
    struct err e = {0};
    struct tb_writer w;
    char *dir = temp_dir();
    assert_ok(tb_open(&w, dir, 1, &e), &e);
    tb_begin(&w);
    tb_add_scalar(&w, "a", 1);
    tb_add_scalar(&w, "b/c", NAN);
    assert_ok(tb_end(&w, -1, 2, &e), &e);
    assert_ok(tb_close(&w, &e), &e);
    size_t size, n;
    char *file = only_file(dir, 0, &size);
    const uint8_t *p = record(file, size, 1, &n);
    static const uint8_t step[] = {0x10, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0x2a, 22, 0x0a,
                                   8,    0x0a, 1,    'a',  0x15, 0,    0,    0x80, 0x3f, 0x0a, 10,   0x0a, 3,  'b'};
    assert_int_equal(n, 9 + 11 + 2 + 22);
    assert_memory_equal(p + 9, step, sizeof step);
    free(file);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(dir);
}

static void a_restart_opens_a_later_file_and_says_so(void **state)
{
    (void)state;
    struct err e = {0};
    struct tb_writer w;
    char *dir = temp_dir();
    assert_ok(tb_open(&w, dir, 1700000000, &e), &e);
    assert_ok(tb_close(&w, &e), &e);
    assert_ok(tb_open(&w, dir, 1600000000, &e), &e); /* the clock went back */
    assert_true(w.had_files);
    assert_ok(tb_restart_at(&w, 5, 1600000000, &e), &e);
    assert_ok(tb_close(&w, &e), &e);
    size_t size, n;
    char *file = only_file(dir, 1, &size); /* names are sorted: the new file comes second */
    static const uint8_t want[] = {0x10, 5, 0x3a, 2, 0x08, 1};
    const uint8_t *p = record(file, size, 1, &n);
    assert_int_equal(n, 9 + sizeof want);
    assert_memory_equal(p + 9, want, sizeof want);
    free(file);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(dir);
}

static void text_is_shown_verbatim_and_is_valid_utf8(void **state)
{
    (void)state;
    struct err e = {0};
    struct tb_writer w;
    char *dir = temp_dir();
    assert_ok(tb_open(&w, dir, 1, &e), &e);
    assert_ok(tb_text(&w, "config", "a = 1\n# b\xff", 0, 1, &e), &e);
    assert_ok(tb_close(&w, &e), &e);
    size_t size, n;
    char *file = only_file(dir, 0, &size);
    const uint8_t *p = record(file, size, 1, &n);
    static const char body[] = "    a = 1\n    # b\xEF\xBF\xBD\n";
    static const uint8_t meta[] = {0x4a, 8, 0x0a, 6, 0x0a, 4, 't', 'e', 'x', 't'};
    static const uint8_t head[] = {0x08, 7, 0x12, 4, 0x12, 2, 0x08, 1, 0x42, sizeof body - 1};
    assert_non_null(memmem(p, n, body, sizeof body - 1));
    assert_non_null(memmem(p, n, head, sizeof head));
    assert_memory_equal(p + n - sizeof meta, meta, sizeof meta);
    free(file);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(dir);
}

static void a_folder_that_cannot_be_made_is_an_error(void **state)
{
    (void)state;
    struct err e = {0};
    struct tb_writer w;
    assert_int_equal(tb_open(&w, "/dev/null/tb", 1, &e), ST_IO);
    assert_non_null(strstr(e.msg, "/dev/null"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crc32c_gives_the_published_check_value),
        cmocka_unit_test(a_scalar_is_written_byte_for_byte),
        cmocka_unit_test(several_scalars_share_an_event_and_odd_steps_survive),
        cmocka_unit_test(a_restart_opens_a_later_file_and_says_so),
        cmocka_unit_test(text_is_shown_verbatim_and_is_valid_utf8),
        cmocka_unit_test(a_folder_that_cannot_be_made_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
