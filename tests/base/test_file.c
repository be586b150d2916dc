/* Files of every kind: what is refused, what temporary files are called, maps whose file shrinks, identities. */
#include "base/busfault.h"
#include "support.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

static char *dir;

static const char *in_dir(const char *name)
{
    static char paths[8][256];
    static int next;
    char *p = paths[next++ % 8];
    snprintf(p, 256, "%s/%s", dir, name);
    return p;
}

static int open_dir(void **state)
{
    (void)state;
    dir = temp_dir();
    return 0;
}

static int close_dir(void **state)
{
    (void)state;
    file_remove_tree(dir, NULL);
    free(dir);
    return 0;
}

static int n_files(void)
{
    struct err e = {0};
    char **names;
    int n;
    assert_ok(file_list_dir(dir, &names, &n, &e), &e);
    file_free_list(names, n);
    return n;
}

static void put(const char *path, const char *bytes, size_t n)
{
    struct err e = {0};
    assert_ok(file_write_atomic(path, bytes, n, &e), &e);
}

/* Opening a FIFO for reading would wait for a writer for ever. */
static void a_fifo_is_refused_where_a_file_is_expected(void **state)
{
    (void)state;
    struct err e = {0};
    const char *fifo = in_dir("fifo");
    char *text;
    size_t n;
    struct file_map m;
    struct file_id id;
    assert_int_equal(mkfifo(fifo, 0666), 0);
    alarm(20); /* a hang fails the test */
    assert_fails(file_read(fifo, 100, &text, &n, &e), ST_INVALID, &e, "not a regular file");
    assert_fails(file_map_open(&m, fifo, &e), ST_INVALID, &e, "not a regular file");
    assert_fails(file_identify(fifo, &id, &e), ST_INVALID, &e, "not a regular file");
    alarm(0);
    assert_fails(file_read(dir, 100, &text, &n, &e), ST_INVALID, &e, "not a regular file");
}

static void temporary_files_have_new_random_names_and_follow_no_link(void **state)
{
    (void)state;
    struct err e = {0};
    char a[FILE_TEMP_MAX], b[FILE_TEMP_MAX];
    int fa, fb;
    const char *path = in_dir("x");
    assert_ok(file_temp_open(path, a, &fa, &e), &e);
    assert_ok(file_temp_open(path, b, &fb, &e), &e);
    assert_string_not_equal(a, b);
    assert_true(str_starts(a, path) && strlen(a) == strlen(path) + 5 + 16);
    /* A link that somebody laid where earlier versions wrote is not followed. */
    put(in_dir("precious"), "keep", 4);
    assert_int_equal(symlink(in_dir("precious"), in_dir("x.tmp")), 0);
    put(path, "new", 3);
    assert_int_equal(file_size(in_dir("precious")), 4);
    /* Both are in use: nothing to clean. Closed without being renamed, they are leftovers. */
    assert_int_equal(file_temp_clean(NULL, path), 0);
    close(fa);
    assert_int_equal(file_temp_clean(NULL, path), 1);
    close(fb);
    put(in_dir("y.tmp-0123456789abcdef"), "", 0);
    put(in_dir("y.tmp-0123456789abcde"), "", 0); /* a digit short: not ours */
    assert_int_equal(file_temp_clean(dir, NULL), 2);
    assert_int_equal(n_files(), 4); /* x, the link, precious, the one that is not ours */
}

static void a_map_of_a_file_that_shrinks_gives_an_error(void **state)
{
    (void)state;
    struct err e = {0};
    const char *path = in_dir("m");
    char *big = calloc(1, 100000), got[100];
    struct file_map m;
    put(path, big, 100000);
    assert_ok(file_map_open(&m, path, &e), &e);
    assert_ok(file_map_read(&m, path, 99900, got, 100, &e), &e);
    assert_fails(file_map_read(&m, path, 99901, got, 100, &e), ST_INTERNAL, &e, "99901");
    assert_int_equal(truncate(path, 5000), 0);
    assert_fails(file_map_read(&m, path, 90000, got, 100, &e), ST_IO, &e, "shorter");
    assert_fails(file_map_read(&m, path, 4990, got, 20, &e), ST_IO, &e, "shorter"); /* zeros up to the page's end */
    file_map_close(&m);
    put(path, big, 100000); /* replaced: the map shows the old bytes, which are still there */
    assert_ok(file_map_open(&m, path, &e), &e);
    put(path, "x", 1);
    assert_ok(file_map_read(&m, path, 50000, got, 100, &e), &e);
    file_map_close(&m);
    free(big);
}

static void an_identity_is_of_bytes_not_of_names_and_times(void **state)
{
    (void)state;
    struct err e = {0};
    struct file_id a, b;
    put(in_dir("a"), "some bytes", 10);
    put(in_dir("b"), "some bytes", 10);
    assert_ok(file_identify(in_dir("a"), &a, &e), &e);
    assert_ok(file_identify(in_dir("b"), &b, &e), &e);
    assert_true(a.bytes == 10 && b.bytes == 10 && a.xxh3 == b.xxh3);
    put(in_dir("b"), "some bytEs", 10);
    assert_ok(file_identify(in_dir("b"), &b, &e), &e);
    assert_true(a.xxh3 != b.xxh3);
    put(in_dir("b"), "", 0);
    assert_ok(file_identify(in_dir("b"), &b, &e), &e);
    assert_int_equal(b.bytes, 0);
}

/* A file over 64 MiB is sampled: its first, last and many bytes between count, its size always does. */
static void a_large_file_is_sampled_over_its_whole_length(void **state)
{
    (void)state;
    struct err e = {0};
    struct file_id was, is;
    const char *path = in_dir("large");
    const off_t size = (100 << 20) + 12345;
    int fd = open(path, O_RDWR | O_CREAT, 0666);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, size), 0); /* sparse */
    assert_ok(file_identify(path, &was, &e), &e);
    const off_t places[] = {0, size - 1, 60000};
    for (int i = 0; i < countof(places); i++) {
        assert_int_equal(pwrite(fd, "x", 1, places[i]), 1);
        assert_ok(file_identify(path, &is, &e), &e);
        assert_true(is.xxh3 != was.xxh3);
        was = is;
    }
    char *noise = malloc(1 << 20); /* a stretch longer than the distance of two samples is seen wherever it lies */
    memset(noise, 1, 1 << 20);
    assert_int_equal(pwrite(fd, noise, 1 << 20, 50 << 20), 1 << 20);
    assert_ok(file_identify(path, &is, &e), &e);
    assert_true(is.xxh3 != was.xxh3);
    assert_int_equal(ftruncate(fd, size + 1), 0);
    assert_ok(file_identify(path, &is, &e), &e);
    assert_int_equal(is.bytes, size + 1);
    free(noise);
    close(fd);
}

static void what_cannot_be_looked_up_is_not_absent(void **state)
{
    (void)state;
    struct err e = {0};
    bool exists;
    assert_ok(file_lookup(dir, &exists, &e), &e);
    assert_true(exists);
    assert_ok(file_lookup(in_dir("no"), &exists, &e), &e);
    assert_false(exists);
    assert_int_equal(symlink("loop", in_dir("loop")), 0);
    assert_fails(file_lookup(in_dir("loop"), &exists, &e), ST_IO, &e, "loop");
}

/* In another process: reads through a map whose file is gone by then. */
static int read_gone_file(const char *path, const char *err_path)
{
    pid_t pid = fork();
    if (pid == 0) {
        struct file_map m;
        int fd = open(err_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        busfault_report();
        if (fd < 0 || dup2(fd, STDERR_FILENO) < 0 || file_map_open(&m, path, NULL) != ST_OK || truncate(path, 0) != 0)
            _exit(7);
        volatile uint8_t first = *(volatile const uint8_t *)m.data;
        (void)first;
        _exit(8);
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void a_gone_file_that_is_read_is_named(void **state)
{
    (void)state;
    struct err e = {0};
    char bytes[3 * 4096] = "weights", *text;
    size_t len;
    const char *path = in_dir("gone.safetensors"), *said = in_dir("said");
    assert_ok(file_write_atomic(path, bytes, sizeof bytes, &e), &e);
    assert_int_equal(read_gone_file(path, said), 1);
    assert_ok(file_read(said, 4096, &text, &len, &e), &e);
    assert_non_null(strstr(text, "/gone.safetensors became shorter while it was read"));
    free(text);
}

int main(void)
{
#define WITH_DIR(test) cmocka_unit_test_setup_teardown(test, open_dir, close_dir)
    const struct CMUnitTest tests[] = {
        WITH_DIR(a_fifo_is_refused_where_a_file_is_expected),
        WITH_DIR(temporary_files_have_new_random_names_and_follow_no_link),
        WITH_DIR(a_map_of_a_file_that_shrinks_gives_an_error),
        WITH_DIR(an_identity_is_of_bytes_not_of_names_and_times),
        WITH_DIR(a_large_file_is_sampled_over_its_whole_length),
        WITH_DIR(what_cannot_be_looked_up_is_not_absent),
        WITH_DIR(a_gone_file_that_is_read_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
