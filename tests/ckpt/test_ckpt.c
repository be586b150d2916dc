/* Checkpoint folders: what is saved comes back, and what is damaged, foreign or
 * left over does not. */
#include "support.h"

#include "ckpt/ckpt_int.h"

#include <sys/stat.h>

/* A run folder with a model of three tensors: one fused projection, one of bf16, one scalar. */
struct world {
    char *run;
    float fused[6][2], average[6][2], scalar;
    uint16_t half[4];
    struct param param;
    struct ckpt_item items[4];
    struct ckpt_number train[2];
    struct ckpt_save_args args;
    struct err e;
};

static void fill(struct world *w, int64_t step)
{
    for (int i = 0; i < 12; i++) {
        w->fused[i / 2][i % 2] = (float)(step * 100 + i);
        w->average[i / 2][i % 2] = (float)(-step * 100 - i);
    }
    for (int i = 0; i < 4; i++)
        w->half[i] = f32_to_bf16((float)(step + i));
    w->scalar = (float)step;
    w->args.step = step;
    w->args.counters =
        (struct ckpt_counters){.samples = step * 8, .tokens = step * 64, .seed = UINT64_MAX - 1, .wall_seconds = 0.1};
    w->train[0] = (struct ckpt_number){"loss_ema", 1.0 / 3 + (double)step};
    w->train[1] = (struct ckpt_number){"odd", (double)NAN};
}

static int world_open(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    w->run = temp_dir();
    struct tensor scalar = tensor_shape(DT_F32, 0, NULL);
    scalar.data = &w->scalar;
    w->param = (struct param){
        .key = "fused.weight", .rank = 2, .dim = {6, 2}, .rows = {.n_sections = 2, .groups = 2, .rows = {2, 1}}};
    w->items[0] = (struct ckpt_item){"fused.weight", tensor_2d(w->fused, DT_F32, 6, 2), &w->param, CKPT_MODEL, 0};
    w->items[1] = (struct ckpt_item){"half", tensor_1d(w->half, DT_BF16, 4), NULL, CKPT_MODEL, 0};
    w->items[2] =
        (struct ckpt_item){"exp_avg.fused.weight", tensor_2d(w->average, DT_F32, 6, 2), &w->param, CKPT_OPTIM, 0};
    w->items[3] = (struct ckpt_item){"scale", scalar, NULL, CKPT_MODEL, 0};
    w->args = (struct ckpt_save_args){.run_dir = w->run,
                                      .items = w->items,
                                      .n_items = 4,
                                      .config_text = "[model]\nhidden = 2\n",
                                      .train = w->train,
                                      .n_train = 2};
    *state = w;
    return 0;
}

static int world_close(void **state)
{
    struct world *w = *state;
    file_remove_tree(w->run, NULL);
    free(w->run);
    free(w);
    return 0;
}

static void save(struct world *w, int64_t step)
{
    fill(w, step);
    assert_ok(ckpt_save(&w->args, &w->e), &w->e);
}

/* <run>/checkpoints/<name>[/<file>], in a buffer of the world's own size. */
static const char *at(const struct world *w, const char *name, char *out)
{
    snprintf(out, 512, "%s/checkpoints/%s", w->run, name);
    return out;
}

static int64_t newest(struct world *w)
{
    struct ckpt *c;
    assert_ok(ckpt_open(&c, w->run, &w->e), &w->e);
    int64_t step = ckpt_step(c);
    ckpt_close(c);
    return step;
}

static void flip_byte(const char *path, long where)
{
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, where, where < 0 ? SEEK_END : SEEK_SET), 0);
    int ch = fgetc(f);
    assert_int_equal(fseek(f, -1, SEEK_CUR), 0);
    fputc(ch ^ 1, f);
    assert_int_equal(fclose(f), 0);
}

static void what_is_saved_comes_back(void **state)
{
    struct world *w = *state;
    struct ckpt *c;
    save(w, 7);
    assert_ok(ckpt_open(&c, w->run, &w->e), &w->e);
    assert_int_equal(ckpt_step(c), 7);
    assert_int_equal(ckpt_counters(c)->samples, 56);
    assert_int_equal(ckpt_counters(c)->tokens, 448);
    assert_true(ckpt_counters(c)->seed == UINT64_MAX - 1);
    assert_true(ckpt_counters(c)->wall_seconds == 0.1);
    assert_true(fabs(ckpt_counters(c)->saved_at - time_wall()) < 60);
    double v;
    assert_true(ckpt_train_number(c, "loss_ema", &v) && v == 1.0 / 3 + 7);
    assert_true(ckpt_train_number(c, "odd", &v) && isnan(v));
    assert_false(ckpt_train_number(c, "none", &v));
    assert_string_equal(ckpt_config_text(c), "[model]\nhidden = 2\n");
    assert_true(ckpt_has(c, "half", CKPT_MODEL));
    assert_false(ckpt_has(c, "half", CKPT_OPTIM));
    float fused[6][2], average[6][2], half[4];
    struct tensor t = tensor_2d(fused, DT_F32, 6, 2);
    assert_ok(ckpt_load(c, "fused.weight", CKPT_MODEL, &t, &w->param, &w->e), &w->e);
    assert_memory_equal(fused, w->fused, sizeof fused);
    t.data = average;
    assert_ok(ckpt_load(c, "exp_avg.fused.weight", CKPT_OPTIM, &t, &w->param, &w->e), &w->e);
    assert_memory_equal(average, w->average, sizeof average);
    t = tensor_1d(half, DT_F32, 4); /* bf16 on disk */
    assert_ok(ckpt_load(c, "half", CKPT_MODEL, &t, NULL, &w->e), &w->e);
    assert_true(half[0] == 7 && half[3] == 10);
    assert_ok(ckpt_verify(c, &w->e), &w->e);
    ckpt_close(c);
    char *text, path[512];
    size_t n;
    assert_ok(file_read(at(w, "latest", path), 100, &text, &n, &w->e), &w->e);
    assert_string_equal(text, "step-00000007\n");
    free(text);
}

/* Two groups with rows {2, 1}: memory is q0 q1 q2 q3 k0 k1, disk is q0 q1 k0 q2 q3 k1. */
static void fused_rows_are_interleaved_on_disk(void **state)
{
    struct world *w = *state;
    struct ckpt *c;
    static const int disk_to_memory[6] = {0, 1, 4, 2, 3, 5};
    save(w, 3);
    assert_ok(ckpt_open(&c, w->run, &w->e), &w->e);
    float disk[6][2];
    struct tensor t = tensor_2d(disk, DT_F32, 6, 2);
    assert_ok(ckpt_load(c, "fused.weight", CKPT_MODEL, &t, NULL, &w->e), &w->e);
    for (int r = 0; r < 6; r++)
        assert_memory_equal(disk[r], w->fused[disk_to_memory[r]], sizeof disk[r]);
    struct param wrong = w->param;
    wrong.rows.groups = 3;
    assert_fails(ckpt_load(c, "fused.weight", CKPT_MODEL, &t, &wrong, &w->e), ST_INVALID, &w->e, "row layout");
    ckpt_close(c);
}

static void wrong_requests_name_key_and_shapes(void **state)
{
    struct world *w = *state;
    struct ckpt *c;
    float x[12];
    save(w, 1);
    assert_ok(ckpt_open(&c, w->run, &w->e), &w->e);
    struct tensor t = tensor_2d(x, DT_F32, 3, 4);
    assert_fails(ckpt_load(c, "fused.weight", CKPT_MODEL, &t, NULL, &w->e), ST_CONFLICT, &w->e,
                 "fused.weight is F32 [6, 2]");
    assert_non_null(strstr(w->e.msg, "needs F32 [3, 4]"));
    assert_fails(ckpt_load(c, "fused.wieght", CKPT_MODEL, &t, NULL, &w->e), ST_INVALID, &w->e,
                 "nearest is 'fused.weight'");
    t = tensor_2d(x, DT_I32, 6, 2);
    assert_fails(ckpt_load(c, "fused.weight", CKPT_MODEL, &t, NULL, &w->e), ST_UNSUPPORTED, &w->e, "I32");
    t = tensor_2d(NULL, DT_F32, 6, 2);
    assert_fails(ckpt_load(c, "fused.weight", CKPT_MODEL, &t, NULL, &w->e), ST_INVALID, &w->e, "dense");
    ckpt_close(c);
}

static void the_newest_is_found_by_scanning(void **state)
{
    struct world *w = *state;
    char path[512];
    static const int64_t steps[] = {10, 20, 100000000, 30};
    for (int i = 0; i < countof(steps); i++)
        save(w, steps[i]);
    assert_int_equal(newest(w), 100000000); /* nine digits sort by number */
    assert_ok(file_remove_tree(at(w, "step-100000000", path), &w->e), &w->e);
    assert_int_equal(newest(w), 30);
    assert_ok(file_write_atomic(at(w, "latest", path), "step-99999999\n", 14, &w->e), &w->e);
    assert_int_equal(newest(w), 30);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(newest(w), 30);
    /* A damaged newest is refused, with the name of an older one; it is not passed over in silence. */
    struct ckpt *c;
    assert_int_equal(truncate(at(w, "step-00000030/model.safetensors", path), 50), 0);
    assert_fails(ckpt_open(&c, w->run, &w->e), ST_CORRUPT, &w->e, "step-00000020");
    assert_int_equal(unlink(at(w, "step-00000020/manifest.json", path)), 0);
    assert_fails(ckpt_open(&c, w->run, &w->e), ST_CORRUPT, &w->e, "step-00000010");
    assert_fails(ckpt_open(&c, at(w, "step-00000030/", path), &w->e), ST_CORRUPT, &w->e, "has 50 bytes");
    assert_non_null(strstr(w->e.hint, "step-00000010"));
    assert_fails(ckpt_open(&c, at(w, "step-00000020", path), &w->e), ST_CORRUPT, &w->e, "manifest.json is missing");
    struct ckpt_info *list;
    int n;
    assert_ok(ckpt_list(w->run, &list, &n, &w->e), &w->e);
    assert_int_equal(n, 3);
    assert_int_equal(list[0].step, 10);
    assert_true(list[0].complete && list[0].n_tensors == 4 && list[0].bytes > 100);
    assert_false(list[1].complete || list[2].complete);
    assert_non_null(strstr(list[2].why, "50 bytes"));
    ckpt_list_free(list, n);
}

static void damage_is_refused_with_the_next_older_good_one(void **state)
{
    struct world *w = *state;
    struct ckpt *c;
    char path[512];
    save(w, 10);
    save(w, 20);
    save(w, 30);
    flip_byte(at(w, "step-00000030/optim.safetensors", path), -3);
    flip_byte(at(w, "step-00000020/config.ini", path), 2);
    assert_fails(ckpt_open(&c, w->run, &w->e), ST_CORRUPT, &w->e,
                 "step-00000030 is damaged (optim.safetensors: checksum");
    assert_non_null(strstr(w->e.hint, "step-00000010")); /* 20 is damaged too */
    assert_ok(ckpt_open_with(&c, w->run, CKPT_NO_CHECKSUM, &w->e), &w->e);
    assert_fails(ckpt_verify(c, &w->e), ST_CORRUPT, &w->e, "optim.safetensors");
    ckpt_close(c);
    assert_ok(ckpt_open(&c, at(w, "step-00000010", path), &w->e), &w->e);
    ckpt_close(c);
    flip_byte(at(w, "step-00000010/model.safetensors", path), 20);
    assert_fails(ckpt_open(&c, at(w, "step-00000010", path), &w->e), ST_CORRUPT, &w->e, "no older good one");
}

/* What it says after parsing, in one spelling; NULL when it is refused. */
static char *meaning(const char *text, size_t n)
{
    struct err e = {0};
    struct manifest m;
    char *again;
    if (manifest_parse(&m, text, n, true, &e) != ST_OK)
        return NULL;
    assert_ok(manifest_dump(&m, &again, &e), &e);
    manifest_release(&m);
    return again;
}

static void no_damaged_manifest_is_believed(void **state)
{
    struct world *w = *state;
    char path[512], *text;
    size_t n;
    int same = 0;
    save(w, 10);
    assert_ok(file_read(at(w, "step-00000010/manifest.json", path), 100000, &text, &n, &w->e), &w->e);
    char *original = meaning(text, n);
    assert_non_null(original);
    for (size_t i = 0; i < n; i++) {
        text[i] ^= 1;
        char *flipped = meaning(text, n);
        text[i] ^= 1;
        if (flipped != NULL) { /* the 17th digit of a number can round to the same double */
            assert_string_equal(flipped, original);
            same++;
        }
        free(flipped);
        char *cut = malloc(i + 1);
        memcpy(cut, text, i);
        assert_null(meaning(cut, i));
        free(cut);
    }
    assert_true(same <= 3);
    free(original);
    free(text);
}

static void manifests_that_lie_are_refused(void **state)
{
    (void)state;
#define HEAD                                                                                                           \
    "{\"format\":\"braid-checkpoint\",\"version\":1,\"step\":1,\"samples\":1,\"tokens\":1,"                            \
    "\"seed\":\"1\","                                                                                                  \
    "\"wall_seconds\":1,\"saved_at\":1,\"checksum\":\"0123456789abcdef\","
#define SUM "\"bytes\":1,\"xxh3\":\"0123456789abcdef\""
    static const struct {
        const char *text;
        enum status status;
        const char *message;
    } cases[] = {
        {"{}", ST_INVALID, "not a braid manifest"},
        {"[]", ST_CORRUPT, "not a JSON object"},
        {"{\"format\":\"pytorch\"}", ST_INVALID, "format 'pytorch'"},
        {"{\"format\":\"braid-checkpoint\",\"version\":2}", ST_UNSUPPORTED, "version is 2"},
        {"{\"format\":\"braid-checkpoint\",\"version\":1}", ST_CORRUPT, "checksum is missing"},
        {HEAD "\"step\":2}", ST_CORRUPT, "duplicate"},
        {HEAD "\"train\":{\"a\":\"x\"},\"files\":{},\"tensors\":{}}", ST_CORRUPT, "train value"},
        {HEAD "\"train\":{},\"files\":{\"../x\":{" SUM "}},\"tensors\":{}}", ST_CORRUPT, "not allowed"},
        {HEAD "\"train\":{},\"files\":{\"/etc/passwd\":{" SUM "}},\"tensors\":{}}", ST_CORRUPT, "not allowed"},
        {HEAD "\"train\":{},\"files\":{\"manifest.json\":{" SUM "}},\"tensors\":{}}", ST_CORRUPT, "not allowed"},
        {HEAD "\"train\":{},\"files\":{\"\":{" SUM "}},\"tensors\":{}}", ST_CORRUPT, "not allowed"},
        {HEAD "\"train\":{},\"files\":{\"a\":{\"bytes\":-1,\"xxh3\":\"0123456789abcdef\"}},"
              "\"tensors\":{}}",
         ST_CORRUPT, "size or checksum"},
        {HEAD "\"train\":{},\"files\":{\"a\":{\"bytes\":1,\"xxh3\":\"xyz\"}},\"tensors\":{}}", ST_CORRUPT,
         "size or checksum"},
        {HEAD "\"train\":{},\"files\":{},\"tensors\":{\"other\":{}}}", ST_CORRUPT, "unknown section"},
        {HEAD "\"train\":{},\"files\":{},\"tensors\":{\"model\":{\"k\":{\"dtype\":\"F32\","
              "\"shape\":[1],\"file\":\"a\"}}}}",
         ST_CORRUPT, "not listed"},
        {HEAD "\"train\":{},\"files\":{\"a\":{" SUM
              "}},\"tensors\":{\"model\":{\"k\":{\"dtype\":\"F32\",\"shape\":[-1],\"file\":\"a\"}}}}",
         ST_CORRUPT, "impossible shape"},
        {HEAD "\"train\":{},\"files\":{\"a\":{" SUM
              "}},\"tensors\":{\"model\":{\"k\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1],"
              "\"file\":\"a\"}}}}",
         ST_CORRUPT, "dtype or shape"},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct err e = {0};
        struct manifest m;
        assert_fails(manifest_parse(&m, cases[i].text, strlen(cases[i].text), false, &e), cases[i].status, &e,
                     cases[i].message);
    }
}

static void foreign_and_missing_folders_are_explained(void **state)
{
    struct world *w = *state;
    struct ckpt *c;
    char path[512];
    assert_fails(ckpt_open(&c, "/nonexistent/run", &w->e), ST_IO, &w->e, "/nonexistent/run");
    assert_fails(ckpt_open(&c, w->run, &w->e), ST_INVALID, &w->e, "not a braid checkpoint");
    snprintf(path, sizeof path, "%s/config.json", w->run);
    assert_ok(file_write_atomic(path, "{}", 2, &w->e), &w->e);
    assert_fails(ckpt_open(&c, w->run, &w->e), ST_INVALID, &w->e, "Hugging Face");
    assert_fails(ckpt_open(&c, path, &w->e), ST_INVALID, &w->e, "is a file");
    snprintf(path, sizeof path, "%s/latest_checkpointed_iteration.txt", w->run);
    assert_ok(file_write_atomic(path, "7", 1, &w->e), &w->e);
    assert_fails(ckpt_open(&c, w->run, &w->e), ST_INVALID, &w->e, "Megatron");
    snprintf(path, sizeof path, "%s/checkpoints/step-00000001", w->run);
    assert_ok(file_make_dirs(path, &w->e), &w->e);
    assert_fails(ckpt_open(&c, w->run, &w->e), ST_CORRUPT, &w->e,
                 "step-00000001 is damaged (manifest.json is missing)");
    assert_ok(file_remove_tree(path, &w->e), &w->e);
    assert_fails(ckpt_open(&c, w->run, &w->e), ST_INVALID, &w->e, "no checkpoint in");
    snprintf(path, sizeof path, "%s/manifest.json", w->run);
    assert_ok(file_write_atomic(path, "{}", 2, &w->e), &w->e);
    assert_fails(ckpt_open(&c, w->run, &w->e), ST_INVALID, &w->e, "not a braid manifest");
}

/* Files that are valid and carry the right checksums, but contradict the manifest. */
static void a_manifest_and_files_that_disagree_are_refused(void **state)
{
    struct world *w = *state;
    struct ckpt *c;
    char path[512], *text;
    size_t n;
    struct manifest m;
    save(w, 5);
    assert_ok(file_read(at(w, "step-00000005/manifest.json", path), 100000, &text, &n, &w->e), &w->e);
    assert_ok(manifest_parse(&m, text, n, true, &w->e), &w->e);
    free(text);
    static const char *const messages[] = {"manifest says F32 [2, 6]", "lacks the tensor 'sc'", "lists 3"};
    for (int i = 0; i < countof(messages); i++) {
        struct manifest lie = m;
        struct manifest_tensor tensors[4];
        memcpy(tensors, m.tensors, sizeof tensors);
        lie.tensors = tensors;
        if (i == 0)
            tensors[0].dim[0] = 2, tensors[0].dim[1] = 6;
        else if (i == 1)
            tensors[2].key = "sc";
        else
            lie.n_tensors = 3;
        assert_ok(manifest_dump(&lie, &text, &w->e), &w->e);
        assert_ok(file_write_atomic(path, text, strlen(text), &w->e), &w->e);
        free(text);
        assert_fails(ckpt_open(&c, w->run, &w->e), ST_CORRUPT, &w->e, messages[i]);
    }
    manifest_release(&m);
}

static void saving_a_step_again_replaces_it(void **state)
{
    struct world *w = *state;
    char dir[512], **names;
    int n;
    save(w, 5);
    fill(w, 9);
    w->args.step = 5;
    assert_ok(ckpt_save(&w->args, &w->e), &w->e);
    struct ckpt *c;
    float scale;
    struct tensor t = tensor_shape(DT_F32, 0, NULL);
    t.data = &scale;
    assert_ok(ckpt_open(&c, w->run, &w->e), &w->e);
    assert_ok(ckpt_load(c, "scale", CKPT_MODEL, &t, NULL, &w->e), &w->e);
    assert_true(scale == 9);
    ckpt_close(c);
    assert_ok(file_list_dir(at(w, "", dir), &names, &n, &w->e), &w->e);
    assert_int_equal(n, 2); /* latest and step-00000005 */
    file_free_list(names, n);
}

static void an_old_folder_alone_is_found_and_restored(void **state)
{
    struct world *w = *state;
    char a[512], b[512];
    save(w, 10);
    save(w, 20);
    /* A kill between the two renames of a replacement; no process has this number. */
    assert_int_equal(rename(at(w, "step-00000020", a), at(w, "step-00000020.old-2147483646", b)), 0);
    assert_int_equal(newest(w), 20);
    save(w, 30);
    assert_true(file_is_dir(a));
    assert_false(file_exists(b));
    struct ckpt *c;
    assert_ok(ckpt_open(&c, a, &w->e), &w->e);
    assert_int_equal(ckpt_step(c), 20);
    ckpt_close(c);
}

static void leftovers_of_dead_writers_are_cleaned(void **state)
{
    struct world *w = *state;
    char path[512], own[512];
    save(w, 10);
    assert_int_equal(rename(at(w, "step-00000010", path), at(w, "step-00000010.tmp-2147483646", own)), 0);
    struct ckpt *c;
    assert_fails(ckpt_open(&c, w->run, &w->e), ST_INVALID, &w->e, "no checkpoint"); /* tmp is ignored */
    snprintf(own, sizeof own, "%s/checkpoints/step-00000003.tmp-0123456789abcdef", w->run);
    assert_ok(file_make_dirs(own, &w->e), &w->e);
    assert_ok(file_make_dirs(at(w, "step-5", path), &w->e), &w->e); /* not ours */
    save(w, 20);
    assert_false(file_exists(own));
    assert_true(file_exists(path));
    assert_false(file_exists(at(w, "step-00000010.tmp-2147483646", path)));
    /* A complete .old beside a damaged final one. */
    char final[512], old[512];
    snprintf(old, sizeof old, "%s/checkpoints/step-00000020.old-00000000000000aa", w->run);
    assert_int_equal(rename(at(w, "step-00000020", final), old), 0);
    assert_ok(file_make_dirs(final, &w->e), &w->e);
    assert_int_equal(newest(w), 20);
    save(w, 20);
    assert_int_equal(newest(w), 20);
    save(w, 30);
    assert_false(file_exists(old)); /* now that its successor is complete */
}

static void only_the_wanted_number_is_kept(void **state)
{
    struct world *w = *state;
    char path[512];
    for (int step = 1; step <= 4; step++)
        save(w, step);
    w->args.keep = 2;
    assert_int_equal(unlink(at(w, "step-00000004/config.ini", path)), 0); /* does not count */
    save(w, 5);
    assert_true(file_exists(at(w, "step-00000005", path)));
    assert_true(file_exists(at(w, "step-00000003", path)));
    assert_false(file_exists(at(w, "step-00000002", path)));
    assert_false(file_exists(at(w, "step-00000001", path)));
    w->args.keep = 1;
    save(w, 3); /* going back: what is saved stays, and so does the later one */
    assert_true(file_exists(at(w, "step-00000003", path)));
    assert_true(file_exists(at(w, "step-00000005", path)));
    save(w, 6);
    struct ckpt_info *list;
    int n;
    assert_ok(ckpt_list(w->run, &list, &n, &w->e), &w->e);
    assert_int_equal(n, 1);
    assert_int_equal(list[0].step, 6);
    ckpt_list_free(list, n);
}

static void bad_saves_leave_nothing(void **state)
{
    struct world *w = *state;
    char **names, dir[512];
    int n;
    save(w, 1);
    fill(w, 2);
    w->items[1].key = "scale"; /* twice in the model section */
    assert_fails(ckpt_save(&w->args, &w->e), ST_CONFLICT, &w->e, "used twice");
    assert_non_null(strstr(w->e.trail, "step-00000002"));
    w->items[1].key = "half";
    w->items[1].section = 2;
    assert_fails(ckpt_save(&w->args, &w->e), ST_INVALID, &w->e, "section 2");
    w->items[1].section = CKPT_MODEL;
    w->train[1].name = "loss_ema";
    assert_fails(ckpt_save(&w->args, &w->e), ST_INVALID, &w->e, "used twice");
    w->args.step = -1;
    assert_fails(ckpt_save(&w->args, &w->e), ST_INVALID, &w->e, "negative");
    assert_ok(file_list_dir(at(w, "", dir), &names, &n, &w->e), &w->e);
    assert_int_equal(n, 2);
    file_free_list(names, n);
    assert_int_equal(newest(w), 1);
}

/* The format allows any number of files; a later writer with several ranks will make them. */
static void tensors_may_lie_in_several_shards(void **state)
{
    struct world *w = *state;
    char path[512], folder[512];
    save(w, 1);
    fill(w, 2);
    assert_ok(file_make_dirs(at(w, "step-00000002", folder), &w->e), &w->e);
    struct manifest_file files[2] = {{.name = "model-0.safetensors"}, {.name = "model-1.safetensors"}};
    struct manifest_tensor tensors[2] = {{"half", CKPT_MODEL, DT_BF16, 1, {4}, 0},
                                         {"scale", CKPT_MODEL, DT_F32, 0, {0}, 1}};
    struct st_item items[2] = {{"half", w->items[1].host, NULL}, {"scale", w->items[3].host, NULL}};
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/checkpoints/step-00000002/%s", w->run, files[i].name);
        assert_ok(st_write_new(path, &items[i], 1, NULL, 0, &files[i].sum, &w->e), &w->e);
    }
    struct manifest m = {.step = 2, .files = files, .n_files = 2, .tensors = tensors, .n_tensors = 2};
    char *text;
    assert_ok(manifest_dump(&m, &text, &w->e), &w->e);
    assert_ok(file_write_atomic(at(w, "step-00000002/manifest.json", path), text, strlen(text), &w->e), &w->e);
    free(text);
    struct ckpt *c;
    float scale;
    struct tensor t = tensor_shape(DT_F32, 0, NULL);
    t.data = &scale;
    assert_ok(ckpt_open(&c, w->run, &w->e), &w->e);
    assert_ok(ckpt_load(c, "scale", CKPT_MODEL, &t, NULL, &w->e), &w->e);
    assert_true(scale == 2);
    assert_string_equal(ckpt_config_text(c), "");
    ckpt_close(c);
}

static void folder_names_are_parsed_strictly(void **state)
{
    (void)state;
    struct folder f;
    assert_true(folder_parse_name("step-00000100", &f) && f.step == 100 && f.kind == FOLDER_FINAL);
    assert_true(folder_parse_name("step-123456789.old-17", &f) && f.kind == FOLDER_OLD && f.id == 0x17);
    assert_true(folder_parse_name("step-00000100.old-0123456789abcdef", &f) && f.id == 0x0123456789abcdef);
    assert_true(folder_parse_name("step-00000100.tmp-1", &f) && f.kind == FOLDER_TMP);
    static const char *const bad[] = {"step-100",
                                      "step-0000100",
                                      "step-00000100x",
                                      "step--0000100",
                                      "step-",
                                      "step-00000100.tmp-",
                                      "step-00000100.tmp--1",
                                      "step-00000100.tmp-00123456789abcdef",
                                      "step-00000100.tmp-0X",
                                      "step-00000100.bak-1",
                                      "step-99999999999999999999",
                                      "step-00000100.old-1.tmp-2",
                                      "latest",
                                      ""};
    for (int i = 0; i < countof(bad); i++)
        assert_false(folder_parse_name(bad[i], &f));
}

/* ---- several writers ------------------------------------------------------------------------- */

/* Each tensor lies whole in the file of its part; readers need no more than the manifest. */
static void parts_of_several_writers_are_one_checkpoint(void **state)
{
    struct world *w = *state;
    struct ckpt *c;
    char path[512];
    float fused[6][2];
    struct tensor dst = tensor_2d(fused, DT_F32, 6, 2);
    w->args.n_parts = 3;
    w->items[0].part = 2;
    w->items[2].part = 1;
    save(w, 5);
    assert_true(file_exists(at(w, "step-00000005/model-00001-of-00003.safetensors", path)));
    assert_true(file_exists(at(w, "step-00000005/model-00003-of-00003.safetensors", path)));
    assert_true(file_exists(at(w, "step-00000005/optim-00002-of-00003.safetensors", path)));
    assert_false(file_exists(at(w, "step-00000005/model-00002-of-00003.safetensors", path)));
    assert_false(file_exists(at(w, "step-00000005/model.safetensors", path)));
    assert_ok(ckpt_open(&c, w->run, &w->e), &w->e);
    assert_int_equal(ckpt_count(c), 4);
    assert_ok(ckpt_verify(c, &w->e), &w->e);
    assert_ok(ckpt_load(c, "fused.weight", CKPT_MODEL, &dst, &w->param, &w->e), &w->e);
    assert_memory_equal(fused, w->fused, sizeof fused);
    assert_ok(ckpt_load(c, "exp_avg.fused.weight", CKPT_OPTIM, &dst, &w->param, &w->e), &w->e);
    assert_memory_equal(fused, w->average, sizeof fused);
    ckpt_close(c);
    w->items[0].part = 3;
    assert_fails(ckpt_save(&w->args, &w->e), ST_INVALID, &w->e, "part 3 of 3");
}

/* Save step 6 in two parts, the second in a folder that the first writer does not look into. */
static void a_folder_that_writers_do_not_share_is_reported(void **state)
{
    struct world *w = *state;
    struct ckpt_saving *s;
    struct ckpt_sums sums[2];
    char *elsewhere = temp_dir();
    save(w, 5);
    fill(w, 6);
    w->args.n_parts = 2;
    w->items[0].part = 1;
    assert_ok(ckpt_begin(&s, &w->args, &w->e), &w->e);
    assert_ok(ckpt_write_part(ckpt_saving_folder(s), &w->args, 0, &sums[0], &w->e), &w->e);
    assert_ok(ckpt_write_part(elsewhere, &w->args, 1, &sums[1], &w->e), &w->e);
    assert_fails(ckpt_finish(s, sums, &w->e), ST_IO, &w->e, "rank 1 wrote model-00002-of-00002.safetensors");
    assert_non_null(strstr(w->e.hint, "run.save_ranks=1"));
    assert_ok(ckpt_begin(&s, &w->args, &w->e), &w->e); /* and a file of another size */
    for (int part = 0; part < 2; part++)
        assert_ok(ckpt_write_part(ckpt_saving_folder(s), &w->args, part, &sums[part], &w->e), &w->e);
    sums[1].bytes[CKPT_MODEL]++;
    assert_fails(ckpt_finish(s, sums, &w->e), ST_IO, &w->e, "and it has");
    file_remove_tree(elsewhere, NULL);
    assert_fails(ckpt_part_sees(elsewhere, &w->e), ST_IO, &w->e, "is not there on this rank");
    free(elsewhere);
    assert_int_equal(newest(w), 5);
}

#define WITH_WORLD(test) cmocka_unit_test_setup_teardown(test, world_open, world_close)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_WORLD(what_is_saved_comes_back),
        WITH_WORLD(fused_rows_are_interleaved_on_disk),
        WITH_WORLD(wrong_requests_name_key_and_shapes),
        WITH_WORLD(the_newest_is_found_by_scanning),
        WITH_WORLD(damage_is_refused_with_the_next_older_good_one),
        WITH_WORLD(no_damaged_manifest_is_believed),
        cmocka_unit_test(manifests_that_lie_are_refused),
        WITH_WORLD(parts_of_several_writers_are_one_checkpoint),
        WITH_WORLD(a_folder_that_writers_do_not_share_is_reported),
        WITH_WORLD(foreign_and_missing_folders_are_explained),
        WITH_WORLD(a_manifest_and_files_that_disagree_are_refused),
        WITH_WORLD(saving_a_step_again_replaces_it),
        WITH_WORLD(an_old_folder_alone_is_found_and_restored),
        WITH_WORLD(leftovers_of_dead_writers_are_cleaned),
        WITH_WORLD(only_the_wanted_number_is_kept),
        WITH_WORLD(bad_saves_leave_nothing),
        WITH_WORLD(tensors_may_lie_in_several_shards),
        cmocka_unit_test(folder_names_are_parsed_strictly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
