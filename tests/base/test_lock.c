/* The lock of a folder: one holder at a time, named; left by the dead and by other machines. */
#include "support.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

static const struct dir_lock_opts quick = {.beat = 0.05, .patience = 0.6};

static char *path_of(const char *dir)
{
    char *p = path_join(dir, "lock");
    assert_non_null(p);
    return p;
}

static void write_line(const char *dir, const char *line)
{
    char *path = path_of(dir);
    struct err e = {0};
    assert_ok(file_write_atomic(path, line, strlen(line), &e), &e);
    free(path);
}

static void done(char *dir)
{
    file_remove_tree(dir, NULL);
    free(dir);
}

static void a_second_process_is_refused_and_told_the_holder(void **state)
{
    (void)state;
    struct err e = {0}, note = {0};
    struct dir_lock *a, *b;
    char *dir = temp_dir(), *path = path_of(dir), pid[32], host[128] = "";
    assert_ok(dir_lock_take(&a, dir, &quick, &note, &e), &e);
    assert_string_equal(note.msg, "");
    assert_ok(dir_lock_check(a, &e), &e);
    snprintf(pid, sizeof pid, "process %ld", (long)getpid());
    gethostname(host, sizeof host - 1);
    assert_fails(dir_lock_take(&b, dir, &quick, NULL, &e), ST_CONFLICT, &e, pid);
    assert_non_null(strstr(e.msg, host));
    assert_non_null(strstr(e.msg, "since 20"));
    assert_null(b);
    dir_lock_release(a);
    assert_false(file_exists(path));
    assert_ok(dir_lock_take(&b, dir, &quick, &note, &e), &e);
    dir_lock_release(b);
    free(path);
    done(dir);
}

static void a_killed_holder_leaves_a_lock_that_is_free(void **state)
{
    (void)state;
    struct err e = {0}, note = {0};
    struct dir_lock *l;
    char *dir = temp_dir(), said[64];
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (dir_lock_take(&l, dir, &quick, NULL, NULL) != ST_OK || write(ready[1], "x", 1) != 1)
            _exit(1);
        pause();
        _exit(0);
    }
    char c;
    assert_int_equal(read(ready[0], &c, 1), 1);
    snprintf(said, sizeof said, "process %ld", (long)child);
    assert_fails(dir_lock_take(&l, dir, &quick, NULL, &e), ST_CONFLICT, &e, said);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_ok(dir_lock_take(&l, dir, &quick, &note, &e), &e);
    assert_non_null(strstr(note.msg, said));
    assert_non_null(strstr(note.msg, "is gone"));
    dir_lock_release(l);
    close(ready[0]);
    close(ready[1]);
    done(dir);
}

static void a_silent_lock_of_another_machine_is_stale(void **state)
{
    (void)state;
    struct err e = {0}, note = {0};
    struct dir_lock *l;
    char *dir = temp_dir();
    write_line(dir, "elsewhere 4711 another-boot 00000000000000aa 2026-01-01T00:00:00Z 000000000007\n");
    double before = time_now();
    assert_ok(dir_lock_take(&l, dir, &quick, &note, &e), &e);
    assert_true(time_now() - before >= quick.patience); /* it listened for a heartbeat first */
    assert_non_null(strstr(note.msg, "process 4711 on host elsewhere"));
    dir_lock_release(l);
    done(dir);
}

/* What a holder on another machine does, where flock does not reach. */
static void a_beating_lock_of_another_machine_is_held(void **state)
{
    (void)state;
    struct err e = {0};
    struct dir_lock *l;
    char *dir = temp_dir(), *path = path_of(dir);
    write_line(dir, "elsewhere 4711 another-boot 00000000000000aa 2026-01-01T00:00:00Z 000000000007\n");
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        for (int beat = 8;; beat++) {
            char line[128];
            int n = snprintf(line, sizeof line,
                             "elsewhere 4711 another-boot 00000000000000aa 2026-01-01T00:00:00Z %012d\n", beat);
            int fd = open(path, O_WRONLY);
            if (fd < 0 || pwrite(fd, line, (size_t)n, 0) != n)
                _exit(1);
            close(fd);
            usleep(50000);
        }
    assert_fails(dir_lock_take(&l, dir, &(struct dir_lock_opts){.patience = 10}, NULL, &e), ST_CONFLICT, &e,
                 "process 4711 on host elsewhere since 2026-01-01T00:00:00Z");
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    free(path);
    done(dir);
}

static void a_lock_that_was_taken_over_is_noticed_and_left_alone(void **state)
{
    (void)state;
    struct err e = {0};
    struct dir_lock *l;
    char *dir = temp_dir(), *path = path_of(dir);
    assert_ok(dir_lock_take(&l, dir, &(struct dir_lock_opts){.beat = 100}, NULL, &e), &e);
    write_line(dir, "elsewhere 4711 another-boot 00000000000000aa 2026-01-01T00:00:00Z 000000000007\n");
    assert_fails(dir_lock_check(l, &e), ST_CONFLICT, &e, "taken over by process 4711 on host elsewhere");
    dir_lock_release(l);
    assert_true(file_exists(path));
    free(path);
    done(dir);
}

static void the_heartbeat_goes_on(void **state)
{
    (void)state;
    struct err e = {0};
    struct dir_lock *l;
    char *dir = temp_dir(), *path = path_of(dir), *a = NULL, *b = NULL;
    size_t n;
    assert_ok(dir_lock_take(&l, dir, &quick, NULL, &e), &e);
    assert_ok(file_read(path, 1000, &a, &n, &e), &e);
    for (int i = 0; i < 600; i++) {
        usleep(50000);
        free(b);
        assert_ok(file_read(path, 1000, &b, &n, &e), &e);
        if (strcmp(a, b) != 0)
            break;
    }
    assert_string_not_equal(a, b);
    dir_lock_release(l);
    free(a);
    free(b);
    free(path);
    done(dir);
}

static void what_cannot_be_a_lock_is_refused(void **state)
{
    (void)state;
    struct err e = {0};
    struct dir_lock *l;
    char *dir = temp_dir(), *path = path_of(dir);
    assert_int_equal(mkfifo(path, 0666), 0);
    assert_fails(dir_lock_take(&l, dir, &quick, NULL, &e), ST_INVALID, &e, "not a regular file");
    unlink(path);
    assert_int_equal(symlink("/etc/passwd", path), 0);
    assert_fails(dir_lock_take(&l, dir, &quick, NULL, &e), ST_IO, &e, "lock");
    unlink(path);
    write_line(dir, "rubbish\n"); /* of nobody */
    assert_ok(dir_lock_take(&l, dir, &quick, NULL, &e), &e);
    dir_lock_release(l);
    assert_fails(dir_lock_take(&l, "/proc/braid", &quick, NULL, &e), ST_IO, &e, "/proc/braid");
    free(path);
    done(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_second_process_is_refused_and_told_the_holder),
        cmocka_unit_test(a_killed_holder_leaves_a_lock_that_is_free),
        cmocka_unit_test(a_silent_lock_of_another_machine_is_stale),
        cmocka_unit_test(a_beating_lock_of_another_machine_is_held),
        cmocka_unit_test(a_lock_that_was_taken_over_is_noticed_and_left_alone),
        cmocka_unit_test(the_heartbeat_goes_on),
        cmocka_unit_test(what_cannot_be_a_lock_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
