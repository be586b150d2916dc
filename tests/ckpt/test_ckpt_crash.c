/* Kills and full disks: whatever moment they pick, a complete checkpoint is left. */
#include "support.h"

#include "ckpt/ckpt.h"

#include <signal.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>

enum { N = 40000 }; /* large enough that a kill often lands inside the data */

/* Written as one part or, by the stamp, as two or three. */
static int save_stamped(const char *run, int64_t step, int stamp, int keep, struct err *e)
{
    int parts = 1 + stamp % 3;
    float *model = malloc(N * sizeof *model), *optim = malloc(N * sizeof *optim);
    for (int i = 0; i < N; i++) {
        model[i] = (float)(step * 10 + stamp);
        optim[i] = -model[i];
    }
    struct ckpt_item items[] = {{"w", tensor_1d(model, DT_F32, N), NULL, CKPT_MODEL, parts - 1},
                                {"exp_avg.w", tensor_1d(optim, DT_F32, N), NULL, CKPT_OPTIM, parts / 2}};
    struct ckpt_number train = {"stamp", stamp};
    int st = ckpt_save(&(struct ckpt_save_args){.run_dir = run,
                                                .step = step,
                                                .items = items,
                                                .n_items = 2,
                                                .n_parts = parts,
                                                .config_text = "",
                                                .train = &train,
                                                .n_train = 1,
                                                .keep = keep},
                       e);
    free(model);
    free(optim);
    return st;
}

/* Opens the newest with all checks; manifest, model and optimizer must be of one save. */
static int64_t check_newest(const char *run)
{
    struct err e = {0};
    struct ckpt *c;
    double stamp = -1;
    float *model = malloc(N * sizeof *model), *optim = malloc(N * sizeof *optim);
    struct tensor m = tensor_1d(model, DT_F32, N), o = tensor_1d(optim, DT_F32, N);
    assert_ok(ckpt_open(&c, run, &e), &e);
    int64_t step = ckpt_step(c);
    assert_true(ckpt_train_number(c, "stamp", &stamp));
    assert_ok(ckpt_load(c, "w", CKPT_MODEL, &m, NULL, &e), &e);
    assert_ok(ckpt_load(c, "exp_avg.w", CKPT_OPTIM, &o, NULL, &e), &e);
    for (int i = 0; i < N; i++) {
        assert_true(model[i] == (float)step * 10 + (float)stamp);
        assert_true(optim[i] == -model[i]);
    }
    ckpt_close(c);
    free(model);
    free(optim);
    return step;
}

static void a_kill_at_any_moment_leaves_a_complete_checkpoint(void **state)
{
    (void)state;
    enum { ROUNDS = 20 };
    struct err e = {0};
    char *run = temp_dir();
    assert_ok(save_stamped(run, 0, 0, 2, &e), &e);
    int64_t last = 0;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) { /* every step twice: also the replacement of a checkpoint is interrupted */
            for (int64_t step = last + 1;; step++)
                for (int stamp = 1; stamp <= 2; stamp++)
                    if (save_stamped(run, step, stamp, 2, &e) != ST_OK) {
                        err_print(&e, stderr);
                        _exit(1);
                    }
        }
        usleep((useconds_t)(1000 + rng_below(99, round, 60000)));
        assert_int_equal(kill(child, SIGKILL), 0);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status)); /* it did not stop by an error of its own */
        int64_t step = check_newest(run);
        assert_true(step >= last);
        last = step;
    }
    assert_true(last > 0);
    assert_ok(save_stamped(run, last + 1, 3, 2, &e), &e);
    char *dir = path_join(run, "checkpoints"), **names;
    int n;
    assert_ok(file_list_dir(dir, &names, &n, &e), &e);
    for (int i = 0; i < n; i++)
        assert_null(strchr(names[i], '.')); /* the last save swept up what the kills left */
    assert_int_equal(n, 3);
    file_free_list(names, n);
    free(dir);
    assert_ok(file_remove_tree(run, &e), &e);
    free(run);
}

/* Runs a replacement of step 2 in a child and kills it after its k-th system call. False when it
 * had finished before; *traced is false when tracing is not permitted here. */
static bool save_killed_after(const char *run, int k, bool *traced)
{
    int status;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
            _exit(77);
        raise(SIGSTOP);
        _exit(save_stamped(run, 2, 5, 1, NULL) == ST_OK ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    *traced = WIFSTOPPED(status);
    for (int stop = 0; WIFSTOPPED(status) && stop < 2 * k; stop++) { /* at entry and at exit */
        assert_int_equal(ptrace(PTRACE_SYSCALL, child, NULL, NULL), 0);
        assert_int_equal(waitpid(child, &status, 0), child);
    }
    if (!WIFSTOPPED(status)) {
        assert_true(!*traced || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
        return false;
    }
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    return true;
}

/* In memory where that exists: a kill cares about the order of calls, not
 * about the disk's speed. */
static char *fast_dir(void)
{
    char *path = strdup("/dev/shm/braid-test-XXXXXX");
    if (path != NULL && mkdtemp(path) != NULL)
        return path;
    free(path);
    return temp_dir();
}

/* Exhaustive where the random kills are not: the narrow moments between two renames included. */
static void a_kill_after_each_single_system_call_loses_nothing(void **state)
{
    (void)state;
    struct err e = {0};
    bool killed = true, traced = true;
    int k = 1;
    for (; killed; k++) {
        char *run = fast_dir();
        assert_ok(save_stamped(run, 1, 0, 0, &e), &e);
        assert_ok(save_stamped(run, 2, 0, 0, &e), &e);
        killed = save_killed_after(run, k, &traced);
        assert_int_equal(check_newest(run), 2);
        assert_ok(save_stamped(run, 3, 0, 2, &e), &e);
        assert_int_equal(check_newest(run), 3);
        char *dir = path_join(run, "checkpoints"), **names;
        int n;
        assert_ok(file_list_dir(dir, &names, &n, &e), &e);
        assert_int_equal(n, traced ? 3 : n); /* latest, steps 2 and 3: swept, and 2 restored */
        file_free_list(names, n);
        free(dir);
        assert_ok(file_remove_tree(run, &e), &e);
        free(run);
    }
    if (!traced)
        skip();
    assert_true(k > 40); /* it was really interrupted many times */
}

static void check_survivor(const char *run, int st, struct err *e)
{
    assert_fails(st, ST_IO, e, "cannot write");
    assert_non_null(strstr(e->trail, "step-00000002"));
    assert_int_equal(check_newest(run), 1);
    char *dir = path_join(run, "checkpoints"), **names;
    int n;
    assert_ok(file_list_dir(dir, &names, &n, e), e);
    assert_int_equal(n, 2); /* latest and step-00000001: nothing temporary */
    file_free_list(names, n);
    free(dir);
}

static void a_file_size_limit_leaves_the_previous_checkpoint(void **state)
{
    (void)state;
    struct err e = {0};
    char *run = temp_dir();
    assert_ok(save_stamped(run, 1, 0, 1, &e), &e);
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = N * 2; /* half of a tensor */
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    int st = save_stamped(run, 2, 0, 1, &e);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    check_survivor(run, st, &e);
    assert_ok(file_remove_tree(run, &e), &e);
    free(run);
}

static void a_full_disk_leaves_the_previous_checkpoint(void **state)
{
    (void)state;
    struct err e = {0};
    char *run = temp_dir();
    if (mount("tmpfs", run, "tmpfs", 0, "size=480k") != 0) { /* room for one and a half */
        assert_ok(file_remove_tree(run, &e), &e);
        free(run);
        skip();
    }
    int first = save_stamped(run, 1, 0, 0, &e);
    int second = save_stamped(run, 2, 0, 0, &e);
    if (first == ST_OK)
        check_survivor(run, second, &e);
    assert_int_equal(umount(run), 0);
    assert_int_equal(first, ST_OK);
    struct err clean = {0};
    assert_ok(file_remove_tree(run, &clean), &clean);
    free(run);
}

/* ---- several writers ------------------------------------------------------------------------- */

static int die_instead(void *ctx, const char *key, struct tensor *host, struct err *e)
{
    (void)ctx, (void)key, (void)host, (void)e;
    kill(getpid(), SIGKILL);
    return ST_OK;
}

/* Step 2 in two parts, the second of which is written by a process that ends in the middle of it. */
static void a_writer_that_is_killed_leaves_nothing_of_its_checkpoint(void **state)
{
    (void)state;
    for (int finish = 0; finish < 2; finish++) {
        struct err e = {0};
        char *run = temp_dir();
        float value[4] = {1, 2, 3, 4};
        assert_ok(save_stamped(run, 1, 0, 1, &e), &e);
        struct ckpt_item items[] = {{"a", tensor_1d(value, DT_F32, 4), NULL, CKPT_MODEL, 0},
                                    {"b", tensor_1d(value, DT_F32, 4), NULL, CKPT_MODEL, 1}};
        struct ckpt_save_args args = {.run_dir = run, .step = 2, .items = items, .n_items = 2, .n_parts = 2};
        struct ckpt_saving *saving;
        struct ckpt_sums sums[2] = {0};
        assert_ok(ckpt_begin(&saving, &args, &e), &e);
        assert_ok(ckpt_part_sees(ckpt_saving_folder(saving), &e), &e);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            args.source = &(struct ckpt_source){.fetch = die_instead};
            _exit(ckpt_write_part(ckpt_saving_folder(saving), &args, 1, &sums[1], NULL));
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFSIGNALED(status));
        assert_ok(ckpt_write_part(ckpt_saving_folder(saving), &args, 0, &sums[0], &e), &e);
        if (finish)
            assert_fails(ckpt_finish(saving, sums, &e), ST_INTERNAL, &e, "rank 1 wrote no file");
        else
            ckpt_abandon(saving);
        assert_int_equal(check_newest(run), 1);
        char *dir = path_join(run, "checkpoints"), **names;
        int n;
        assert_ok(file_list_dir(dir, &names, &n, &e), &e);
        assert_int_equal(n, 2); /* latest and step-00000001 */
        file_free_list(names, n);
        free(dir);
        assert_ok(file_remove_tree(run, &e), &e);
        free(run);
    }
}

static void a_read_only_folder_is_reported(void **state)
{
    (void)state;
    struct err e = {0};
    assert_fails(save_stamped("/proc/braid-run", 1, 0, 0, &e), ST_IO, &e, "/proc/braid-run");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_kill_at_any_moment_leaves_a_complete_checkpoint),
        cmocka_unit_test(a_kill_after_each_single_system_call_loses_nothing),
        cmocka_unit_test(a_file_size_limit_leaves_the_previous_checkpoint),
        cmocka_unit_test(a_full_disk_leaves_the_previous_checkpoint),
        cmocka_unit_test(a_writer_that_is_killed_leaves_nothing_of_its_checkpoint),
        cmocka_unit_test(a_read_only_folder_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
