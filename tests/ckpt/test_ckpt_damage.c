/* The bad day of a checkpoint: memory that runs out while it is written, damage of every kind when a run continues,
 * a folder that cannot be tidied up. */
#include "support.h"

#include "ckpt/ckpt_int.h"

#include <sys/resource.h>
#include <sys/stat.h>

enum { N = 100 };

static int save_with(const char *run, int64_t step, int keep, struct err *note, struct err *e)
{
    float values[N];
    for (int i = 0; i < N; i++)
        values[i] = (float)step;
    struct ckpt_item items[] = {{"w", tensor_1d(values, DT_F32, N), NULL, CKPT_MODEL, 0},
                                {"exp_avg.w", tensor_1d(values, DT_F32, N), NULL, CKPT_OPTIM, 0}};
    struct ckpt_number train = {"stamp", (double)step};
    struct ckpt_data data[] = {{"train", {"a.bin", 10, 0x1234}}, {"valid", {"b\xff.bin", 20, 0x5678}}};
    return ckpt_save(&(struct ckpt_save_args){.run_dir = run,
                                              .step = step,
                                              .items = items,
                                              .n_items = 2,
                                              .config_text = "x = 1\n",
                                              .train = &train,
                                              .n_train = 1,
                                              .data = data,
                                              .n_data = 2,
                                              .keep = keep,
                                              .note = note},
                     e);
}

static void save(const char *run, int64_t step)
{
    struct err e = {0};
    assert_ok(save_with(run, step, 0, NULL, &e), &e);
}

static void done(char *run)
{
    file_remove_tree(run, NULL);
    free(run);
}

static const char *at(const char *run, const char *name)
{
    static char paths[8][512];
    static int next;
    char *p = paths[next++ % 8];
    snprintf(p, 512, "%s/checkpoints/%s", run, name);
    return p;
}

/* ---- memory that runs out -------------------------------------------------------------------- */

static int countdown; /* Jansson's allocations until one fails; below 0: never */

static void *failing_malloc(size_t n) { return countdown >= 0 && countdown-- == 0 ? NULL : malloc(n); }

/* With a failed allocation inside Jansson the value is missing from the document, without an error anywhere. */
static void a_failed_allocation_never_gives_a_damaged_checkpoint(void **state)
{
    (void)state;
    struct err e = {0};
    char *run = temp_dir();
    int failures = 0, k = 0;
    save(run, 1);
    json_set_alloc_funcs(failing_malloc, free);
    for (bool injected = true; injected; k++) {
        countdown = k;
        int st = save_with(run, 2, 1, NULL, &e);
        injected = countdown < 0;
        countdown = -1;
        struct ckpt *c;
        struct err why = {0};
        assert_ok(ckpt_open(&c, run, &why), &why);
        assert_int_equal(ckpt_step(c), st == ST_OK ? 2 : 1);
        assert_int_equal(ckpt_count(c), 2);
        assert_int_equal(ckpt_data_count(c), 2);
        ckpt_close(c);
        failures += st != ST_OK;
        if (st == ST_OK) { /* back to one older checkpoint */
            assert_ok(file_remove_tree(at(run, "step-00000002"), &why), &why);
            save(run, 1);
        }
    }
    json_set_alloc_funcs(malloc, free);
    assert_true(k > 100 && failures >= k - 10);
    done(run);
}

/* ---- continuing over damage ------------------------------------------------------------------ */

static void cut_manifest(const char *f) { assert_int_equal(truncate(at(f, "step-00000020/manifest.json"), 60), 0); }
static void lost_manifest(const char *f) { assert_int_equal(unlink(at(f, "step-00000020/manifest.json")), 0); }
static void cut_model(const char *f) { assert_int_equal(truncate(at(f, "step-00000020/model.safetensors"), 60), 0); }
static void lost_optim(const char *f) { assert_int_equal(unlink(at(f, "step-00000020/optim.safetensors")), 0); }
static void flipped(const char *f)
{
    FILE *file = fopen(at(f, "step-00000020/optim.safetensors"), "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, -3, SEEK_END), 0);
    fputc(0x55, file);
    fclose(file);
}
static void newer_version(const char *f)
{
    const char *text = "{\"format\":\"braid-checkpoint\",\"version\":99,\"checksum\":\"0123456789abcdef\"}";
    assert_ok(file_write_atomic(at(f, "step-00000020/manifest.json"), text, strlen(text), NULL), NULL);
}
static void looping_name(const char *f) /* cannot be looked at: as with a missing right, or an error of the disk */
{
    assert_ok(file_remove_tree(at(f, "step-00000020"), NULL), NULL);
    assert_int_equal(symlink("step-00000020", at(f, "step-00000020")), 0);
}
static void renamed(const char *f)
{
    assert_ok(file_remove_tree(at(f, "step-00000020"), NULL), NULL);
    assert_int_equal(rename(at(f, "step-00000005"), at(f, "step-00000020")), 0);
}

static const struct damage {
    const char *why;
    void (*make)(const char *run);
} damages[] = {{"manifest.json: it is not a JSON object", cut_manifest},
               {"manifest.json is missing", lost_manifest},
               {"model.safetensors has 60 bytes", cut_model},
               {"optim.safetensors is missing", lost_optim},
               {"optim.safetensors: checksum", flipped},
               {"its format version is 99", newer_version},
               {"Too many levels of symbolic links", looping_name},
               {"its manifest is of step 5", renamed}};

static void every_damage_is_named_and_the_newest_intact_one_is_used(void **state)
{
    (void)state;
    for (int i = 0; i < countof(damages); i++) {
        struct err e = {0};
        char *run = temp_dir();
        struct ckpt *c;
        struct buf text;
        save(run, 5);
        save(run, 10);
        save(run, 20);
        damages[i].make(run);
        buf_init(&text, 0);
        assert_ok(ckpt_open_intact(&c, run, -1, &text, &e), &e);
        assert_non_null(c);
        assert_int_equal(ckpt_step(c), 10);
        assert_non_null(text.text);
        assert_non_null(strstr(text.text, "step-00000020 cannot be used"));
        if (strstr(text.text, damages[i].why) == NULL)
            fail_msg("'%s' is not in '%s'", damages[i].why, text.text);
        ckpt_close(c);
        buf_release(&text);
        done(run);
    }
}

static void only_damaged_checkpoints_are_refused(void **state)
{
    (void)state;
    for (int i = 0; i < countof(damages); i++) {
        struct err e = {0};
        char *run = temp_dir();
        struct ckpt *c;
        if (damages[i].make == renamed)
            save(run, 5);
        save(run, 20);
        damages[i].make(run);
        assert_fails(ckpt_open_intact(&c, run, -1, NULL, &e), ST_CORRUPT, &e, damages[i].why);
        assert_null(c);
        assert_non_null(strstr(e.hint, "run.resume=never"));
        done(run);
    }
}

static void a_run_without_checkpoints_has_nothing_to_continue(void **state)
{
    (void)state;
    struct err e = {0};
    char *run = temp_dir(), *dir = path_join(run, "checkpoints");
    struct ckpt *c;
    assert_ok(ckpt_open_intact(&c, run, -1, NULL, &e), &e);
    assert_null(c);
    assert_int_equal(mkdir(dir, 0777), 0);
    assert_int_equal(mkdir(at(run, "step-00000020.tmp-0123456789abcdef"), 0777), 0); /* never finished */
    assert_ok(ckpt_open_intact(&c, run, -1, NULL, &e), &e);
    assert_null(c);
    assert_ok(file_remove_tree(dir, &e), &e);
    assert_int_equal(symlink("checkpoints", dir), 0); /* it cannot be looked at: who knows what it holds */
    assert_fails(ckpt_open_intact(&c, run, -1, NULL, &e), ST_IO, &e, "checkpoints");
    free(dir);
    done(run);
}

static void without_descriptors_nothing_is_taken_for_damaged(void **state)
{
    (void)state;
    struct err e = {0};
    char *run = temp_dir();
    struct ckpt *c;
    struct rlimit before, few;
    save(run, 10);
    save(run, 20);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before;
    for (few.rlim_cur = 3; few.rlim_cur < 12; few.rlim_cur++) {
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
        int st = ckpt_open_intact(&c, run, -1, NULL, &e);
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
        if (st == ST_OK) {
            assert_non_null(c); /* never "there is none" */
            assert_int_equal(ckpt_step(c), 20);
            ckpt_close(c);
        }
    }
    done(run);
}

static void a_step_can_be_named(void **state)
{
    (void)state;
    struct err e = {0};
    char *run = temp_dir();
    struct ckpt *c;
    save(run, 10);
    save(run, 20);
    assert_ok(ckpt_open_intact(&c, run, 10, NULL, &e), &e);
    assert_int_equal(ckpt_step(c), 10);
    ckpt_close(c);
    assert_fails(ckpt_open_intact(&c, run, 15, NULL, &e), ST_USAGE, &e, "20, 10");
    cut_model(run);
    /* another would be a surprise */
    assert_fails(ckpt_open_intact(&c, run, 20, NULL, &e), ST_CORRUPT, &e, "has 60 bytes");
    done(run);
}

/* ---- tidying up ------------------------------------------------------------------------------ */

static void a_latest_that_cannot_be_written_is_a_note(void **state)
{
    (void)state;
    struct err e = {0}, note = {0};
    char *run = temp_dir();
    struct ckpt *c;
    save(run, 1);
    assert_int_equal(unlink(at(run, "latest")), 0);
    assert_int_equal(mkdir(at(run, "latest"), 0777), 0);
    assert_ok(save_with(run, 2, 1, &note, &e), &e);
    assert_int_equal(note.code, ST_IO);
    assert_non_null(strstr(note.msg, "latest"));
    assert_ok(ckpt_open(&c, run, &e), &e);
    assert_int_equal(ckpt_step(c), 2);
    ckpt_close(c);
    assert_int_equal(rmdir(at(run, "latest")), 0);
    assert_ok(save_with(run, 3, 1, &note, &e), &e);
    assert_int_equal(note.code, ST_OK);
    assert_false(file_exists(at(run, "step-00000001"))); /* what the failure left over went with the next save */
    done(run);
}

static void a_start_removes_what_a_kill_left(void **state)
{
    (void)state;
    struct err e = {0};
    char *run = temp_dir(), **names, *half = path_join(run, "report.html.tmp-0123456789abcdef");
    int n;
    for (int64_t step = 1; step <= 5; step++)
        save(run, step);
    assert_int_equal(mkdir(at(run, "step-00000006.tmp-0123456789abcdef"), 0777), 0);
    assert_ok(file_write_atomic(at(run, "latest.tmp-0123456789abcdef"), "", 0, &e), &e);
    assert_ok(file_write_atomic(half, "", 0, &e), &e);
    assert_int_equal(rename(at(run, "step-00000004"), at(run, "step-00000004.old-0123456789abcdef")), 0);
    ckpt_tidy(run, 5, 2);
    assert_false(file_exists(half));
    char *dir = path_join(run, "checkpoints");
    assert_ok(file_list_dir(dir, &names, &n, &e), &e);
    assert_int_equal(n, 3); /* latest, and steps 4 (restored) and 5 */
    assert_string_equal(names[1], "step-00000004");
    file_free_list(names, n);
    free(dir);
    free(half);
    done(run);
}

static void surplus_checkpoints_stay_while_the_newest_is_damaged(void **state)
{
    (void)state;
    char *run = temp_dir();
    save(run, 5);
    save(run, 10);
    save(run, 20);
    cut_model(run);
    ckpt_tidy(run, 20, 1);
    assert_true(file_exists(at(run, "step-00000005")) && file_exists(at(run, "step-00000010")));
    done(run);
}

static void earlier_checkpoints_are_moved_aside_never_lost(void **state)
{
    (void)state;
    struct err e = {0};
    char *run = temp_dir(), *to, *path;
    int moved;
    struct ckpt *c;
    save(run, 5);
    save(run, 10);
    save(run, 20);
    assert_ok(ckpt_set_aside(run, 10, &to, &moved, &e), &e);
    assert_int_equal(moved, 1);
    path = path_join(to, "step-00000020");
    assert_ok(ckpt_open(&c, path, &e), &e);
    ckpt_close(c);
    free(path);
    free(to);
    assert_ok(ckpt_open(&c, run, &e), &e);
    assert_int_equal(ckpt_step(c), 10);
    ckpt_close(c);
    assert_ok(ckpt_set_aside(run, -1, &to, &moved, &e), &e); /* within the same second: another folder */
    assert_int_equal(moved, 2);
    free(to);
    assert_ok(ckpt_set_aside(run, -1, &to, &moved, &e), &e);
    assert_true(moved == 0 && to == NULL);
    assert_ok(ckpt_open_intact(&c, run, -1, NULL, &e), &e);
    assert_null(c);
    done(run);
}

static void another_process_in_the_folder_is_refused(void **state)
{
    (void)state;
    struct err e = {0};
    char *run = temp_dir();
    struct dir_lock *l;
    save(run, 1);
    assert_ok(dir_lock_take(&l, run, NULL, NULL, &e), &e);
    assert_fails(save_with(run, 2, 0, NULL, &e), ST_CONFLICT, &e, "held by process");
    assert_false(file_exists(at(run, "step-00000002")));
    dir_lock_release(l);
    save(run, 2);
    done(run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_failed_allocation_never_gives_a_damaged_checkpoint),
        cmocka_unit_test(every_damage_is_named_and_the_newest_intact_one_is_used),
        cmocka_unit_test(only_damaged_checkpoints_are_refused),
        cmocka_unit_test(a_run_without_checkpoints_has_nothing_to_continue),
        cmocka_unit_test(without_descriptors_nothing_is_taken_for_damaged),
        cmocka_unit_test(a_step_can_be_named),
        cmocka_unit_test(a_latest_that_cannot_be_written_is_a_note),
        cmocka_unit_test(a_start_removes_what_a_kill_left),
        cmocka_unit_test(surplus_checkpoints_stay_while_the_newest_is_damaged),
        cmocka_unit_test(earlier_checkpoints_are_moved_aside_never_lost),
        cmocka_unit_test(another_process_in_the_folder_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
