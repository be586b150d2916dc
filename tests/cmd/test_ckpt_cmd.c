/* `braid ckpt`, called as the program calls it; its output is read back from a file. */
#include "support.h"

#include "cmd/cmd.h"

struct world {
    char *dir, *a, *b, *out;
    float x[6];
};

static void save(const char *run, int64_t step, float *x)
{
    struct err e = {0};
    struct ckpt_item items[] = {{"layers.10.w", tensor_2d(x, DT_F32, 2, 3), NULL, CKPT_MODEL, 0},
                                {"layers.2.w", tensor_2d(x, DT_F32, 3, 2), NULL, CKPT_MODEL, 0},
                                {"exp_avg.layers.2.w", tensor_2d(x, DT_F32, 3, 2), NULL, CKPT_OPTIM, 0}};
    struct ckpt_save_args args = {
        .run_dir = run, .step = step, .items = items, .n_items = 3, .config_text = "", .counters = {.samples = 4321}};
    assert_ok(ckpt_save(&args, &e), &e);
}

static int folder_open(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    w->dir = temp_dir();
    w->a = path_join(w->dir, "a");
    w->b = path_join(w->dir, "b");
    w->out = path_join(w->dir, "out");
    *state = w;
    return 0;
}

static int folder_close(void **state)
{
    struct world *w = *state;
    file_remove_tree(w->dir, NULL);
    free(w->dir);
    free(w->a);
    free(w->b);
    free(w->out);
    free(w);
    return 0;
}

/* Runs the command; its exit status is *rc and what it printed (both streams) the result. */
static char *run_command(struct world *w, int *rc, const char *first, const char *second, const char *third)
{
    char *argv[] = {(char *)(uintptr_t) "ckpt", (char *)(uintptr_t)first, (char *)(uintptr_t)second,
                    (char *)(uintptr_t)third, NULL};
    int argc = third ? 4 : second ? 3 : first ? 2 : 1, streams[2] = {dup(1), dup(2)};
    struct err e = {0};
    fflush(NULL);
    FILE *f = fopen(w->out, "wb");
    assert_non_null(f);
    dup2(fileno(f), 1);
    dup2(fileno(f), 2);
    *rc = cmd_ckpt(argc, argv);
    fflush(NULL);
    dup2(streams[0], 1);
    dup2(streams[1], 2);
    close(streams[0]);
    close(streams[1]);
    fclose(f);
    char *text;
    size_t n;
    assert_ok(file_read(w->out, 1 << 20, &text, &n, &e), &e);
    return text;
}

static void expect(struct world *w, int want, const char *first, const char *second, const char *third,
                   const char *holds)
{
    int rc;
    char *text = run_command(w, &rc, first, second, third);
    if (rc != want || strstr(text, holds) == NULL)
        fail_msg("exit %d, wanted %d with '%s' in:\n%s", rc, want, holds, text);
    free(text);
}

static void ls_lists_runs_checkpoints_and_files(void **state)
{
    struct world *w = *state;
    save(w->a, 10, w->x);
    save(w->a, 20, w->x);
    expect(w, 0, "ls", w->a, NULL, "step-00000020            4321");
    expect(w, 0, "ls", w->a, NULL, "2 checkpoints");
    char *step = path_join(w->a, "checkpoints/step-00000010"), *file = path_join(step, "optim.safetensors");
    expect(w, 0, "ls", step, NULL, "model  layers.2.w  F32 [3, 2]\nmodel  layers.10.w  F32 [2, 3]\noptim  exp_avg");
    expect(w, 0, "ls", step, NULL, "step 10, 3 tensors, 18 elements");
    expect(w, 0, "ls", file, NULL, "1 tensors");
    assert_int_equal(unlink(file), 0);
    expect(w, 0, "ls", w->a, NULL, "incomplete: optim.safetensors is missing");
    expect(w, 1, "ls", step, NULL, "optim.safetensors is missing");
    expect(w, 1, "ls", w->dir, NULL, "not a braid checkpoint");
    expect(w, 1, "ls", "/nonexistent", NULL, "/nonexistent");
    free(file);
    free(step);
}

static void verify_names_the_damaged_file(void **state)
{
    struct world *w = *state;
    save(w->a, 10, w->x);
    save(w->a, 20, w->x);
    expect(w, 0, "verify", w->a, NULL, "step-00000010: ok");
    char *file = path_join(w->a, "checkpoints/step-00000020/model.safetensors");
    FILE *f = fopen(file, "r+b");
    assert_non_null(f);
    fseek(f, -1, SEEK_END);
    fputc(7, f);
    fclose(f);
    expect(w, 1, "verify", w->a, NULL, "step-00000010: ok");
    expect(w, 1, "verify", w->a, NULL, "step-00000020 is damaged (model.safetensors: checksum");
    expect(w, 1, "verify", w->a, NULL, "1 of the 2 checkpoints");
    char *step = path_join(w->a, "checkpoints/step-00000010");
    expect(w, 0, "verify", step, NULL, "ok, step 10, 3 tensors");
    free(step);
    free(file);
}

static void diff_locates_differences(void **state)
{
    struct world *w = *state;
    struct err e = {0};
    save(w->a, 10, w->x);
    save(w->b, 10, w->x);
    expect(w, 0, "diff", w->a, w->b, "3 tensors equal, 0 differ, 0 only in A, 0 only in B");
    w->x[1] = 0.5f;
    w->x[5] = -3;
    save(w->b, 11, w->x);
    expect(w, 1, "diff", w->a, w->b,
           "model  layers.10.w: 2 of 6 elements differ, max abs difference 3 at [1, 2], first at "
           "[0, 1]");
    expect(w, 1, "diff", w->a, w->b, "note: A is of step 10, B of step 11");
    char *file = path_join(w->dir, "x.safetensors");
    struct st_item items[] = {{"layers.10.w", tensor_2d(w->x, DT_F32, 2, 3), NULL},
                              {"layers.2.w", tensor_2d(w->x, DT_F32, 2, 3), NULL},
                              {"new", tensor_2d(w->x, DT_F32, 2, 3), NULL}};
    assert_ok(st_write_file(file, items, 3, NULL, 0, &e), &e);
    expect(w, 1, "diff", w->b, file, "1 tensors equal, 1 differ, 1 only in A, 1 only in B");
    expect(w, 1, "diff", w->b, file, "model  layers.2.w: F32 [3, 2] against F32 [2, 3]");
    expect(w, 1, "diff", w->b, file, "model  new: only in B");
    expect(w, 0, "diff", file, file, "3 tensors equal");
    expect(w, 1, "diff", w->a, "/nonexistent", "/nonexistent");
    free(file);
}

static void wrong_usage_is_explained(void **state)
{
    struct world *w = *state;
    expect(w, 0, "--help", NULL, NULL, "usage: braid ckpt ls");
    expect(w, 0, "diff", "--help", NULL, "usage: braid ckpt ls");
    expect(w, 1, NULL, NULL, NULL, "needs a subcommand");
    expect(w, 1, "verfy", "x", NULL, "did you mean 'verify'?");
    expect(w, 1, "diff", "x", NULL, "takes 2 arguments, and 1 were given");
    expect(w, 1, "ls", "x", "y", "takes 1 argument, and 2 were given");
}

#define WITH_WORLD(test) cmocka_unit_test_setup_teardown(test, folder_open, folder_close)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_WORLD(ls_lists_runs_checkpoints_and_files),
        WITH_WORLD(verify_names_the_damaged_file),
        WITH_WORLD(diff_locates_differences),
        WITH_WORLD(wrong_usage_is_explained),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
