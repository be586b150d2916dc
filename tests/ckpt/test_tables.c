/* Parameters whose values in memory are not simply those of the file: gate and up rows of experts in
 * blocks, in memory or in the file, and tables of integers. */
#include "support.h"

#include "ckpt/keys/keymap.h"

#define FIXTURES "tests/ckpt/fixtures/"
#define LAYER "decoder.layers.0.mlp."

/* ---- blocks of rows -------------------------------------------------------------------------- */

/* Three experts of six rows: gate 0 1 2, up 0 1 2. */
enum { EXPERTS = 3, ROWS = 6, COLS = 4, ELEMS = EXPERTS * ROWS * COLS };

static struct param fc1(bool bias, int64_t blocks)
{
    struct param p = {.key = bias ? LAYER "experts.linear_fc1.bias" : LAYER "experts.linear_fc1.weight",
                      .rank = bias ? 2 : 3,
                      .dim = {EXPERTS, ROWS, COLS}};
    if (blocks > 0)
        p.rows = (struct row_layout){.n_sections = 2,
                                     .groups = ROWS / 2 / blocks,
                                     .rows = {blocks, blocks},
                                     .grouped_in_memory = true,
                                     .matrices = EXPERTS};
    return p;
}

/* The files have an attention layer beside the experts. */
static const struct param attention = {
    .key = "decoder.layers.0.self_attention.linear_proj.weight", .rank = 2, .dim = {4, 4}};

/* What a model with such blocks gets from a file. */
static void load(const char *path, bool bias, int64_t blocks, float *out)
{
    struct err e = {0};
    struct param p = fc1(bias, blocks);
    p.layer = 1;
    const struct param *list[] = {&p, &attention};
    struct tensor dst = tensor_shape(DT_F32, p.rank, p.dim);
    struct key_file f;
    struct keymap *m;
    dst.data = out;
    assert_ok(key_file_open(&f, path, &e), &e);
    assert_ok(keymap_open(&m, &f, KEYS_MODEL, list, 2, DT_F32, &e), &e);
    assert_true(keymap_has(m, 0));
    assert_ok(keymap_load(m, 0, &dst, &e), &e);
    keymap_close(m);
    key_file_close(&f);
}

static void rows_in_blocks_are_halves_on_disk(void **state)
{
    (void)state;
    /* The example of the layout's definition: two gate rows, two up rows, ... */
    static const float memory[2][8] = {{1, 2, 5, 6, 3, 4, 7, 8}, {11, 12, 15, 16, 13, 14, 17, 18}};
    static const float disk[2][8] = {{1, 2, 3, 4, 5, 6, 7, 8}, {11, 12, 13, 14, 15, 16, 17, 18}};
    struct err e = {0};
    struct param p = {.key = "w",
                      .rank = 3,
                      .dim = {2, 8, 1},
                      .rows = {.n_sections = 2, .groups = 2, .rows = {2, 2}, .grouped_in_memory = true, .matrices = 2}};
    char *dir = temp_dir(), *path = path_join(dir, "w.safetensors");
    struct st_item item = {.name = "w", .host = tensor_3d((void *)(uintptr_t)memory, DT_F32, 2, 8, 1), .param = &p};
    assert_ok(st_write_file(path, &item, 1, NULL, 0, &e), &e);
    struct st_file *f;
    assert_ok(st_open(&f, path, &e), &e);
    assert_memory_equal(st_entry(f, 0)->view.data, disk, sizeof disk);
    st_close(f);
    p.rows.matrices = 3; /* the layout must fit the tensor */
    assert_fails(st_write_file(path, &item, 1, NULL, 0, &e), ST_INVALID, &e, "row layout");
    p.rows.matrices = 2;
    p.rows.groups = 4;
    assert_fails(st_write_file(path, &item, 1, NULL, 0, &e), ST_INVALID, &e, "row layout");
    file_remove_tree(dir, NULL);
    free(dir);
    free(path);
}

static void models_with_blocks_and_halves_read_one_file(void **state)
{
    (void)state;
    static const char *const files[] = {"experts_grouped", "experts_indexed", "experts_packed", "experts_interleaved"};
    for (int bias = 0; bias < 2; bias++)
        for (int64_t blocks = 1; blocks <= 3; blocks += 2)
            for (int i = 0; i < countof(files); i++) {
                char path[256];
                float halves[ELEMS] = {0}, mixed[ELEMS] = {0}, want[ELEMS] = {0};
                int64_t cols = bias ? 1 : COLS;
                load(FIXTURES "experts_grouped.safetensors", bias, 0, halves);
                snprintf(path, sizeof path, FIXTURES "%s.safetensors", files[i]);
                load(path, bias, blocks, mixed);
                for (int64_t k = 0; k < EXPERTS; k++)
                    for (int64_t up = 0; up < 2; up++)
                        for (int64_t j = 0; j < ROWS / 2; j++)
                            memcpy(want + (k * ROWS + j / blocks * 2 * blocks + up * blocks + j % blocks) * cols,
                                   halves + (k * ROWS + up * ROWS / 2 + j) * cols, (size_t)cols * sizeof *want);
                assert_memory_equal(mixed, want, sizeof mixed);
                load(path, bias, 0, mixed);
                assert_memory_equal(mixed, halves, sizeof mixed);
            }
}

/* Converts SRC and compares every tensor with the fixture WANT, bit by bit. */
static void assert_converts(const char *src, int64_t from, enum key_layout layout, int64_t to, const char *want)
{
    struct err e = {0};
    struct key_file f, w;
    struct key_output out;
    char path[256];
    snprintf(path, sizeof path, FIXTURES "%s.safetensors", src);
    assert_ok(key_file_open(&f, path, &e), &e);
    f.glu_interleave = from >= 0 ? from : f.glu_interleave;
    snprintf(path, sizeof path, FIXTURES "%s.safetensors", want);
    assert_ok(key_file_open(&w, path, &e), &e);
    struct key_target target = {.layout = layout, .glu_interleave = to};
    assert_ok(key_convert(&out, &f, KEYS_MODEL, &target, &e), &e);
    assert_int_equal(out.n, w.n);
    for (int i = 0; i < w.n; i++) {
        int k = 0;
        while (k < out.n && strcmp(out.items[k].name, w.list[i].key) != 0)
            k++;
        assert_true(k < out.n && tensor_same_shape(&out.items[k].host, &w.list[i].view));
        assert_memory_equal(out.items[k].host.data, w.list[i].view.data, (size_t)tensor_bytes(&w.list[i].view));
    }
    key_output_release(&out);
    key_file_close(&f);
    key_file_close(&w);
}

static void files_convert_between_blocks_and_halves(void **state)
{
    (void)state;
    enum { SAID = -1 };
    assert_converts("experts_interleaved", SAID, KEYS_GROUPED, 0, "experts_grouped");
    assert_converts("experts_interleaved", SAID, KEYS_INDEXED, 0, "experts_indexed");
    assert_converts("experts_interleaved", SAID, KEYS_GROUPED, 1, "experts_interleaved");
    assert_converts("experts_interleaved", SAID, KEYS_GROUPED, 3, "experts_grouped"); /* one block: halves */
    assert_converts("experts_grouped", SAID, KEYS_GROUPED, 1, "experts_interleaved");
    assert_converts("experts_indexed", SAID, KEYS_GROUPED, 1, "experts_interleaved");
    assert_converts("experts_sequential", SAID, KEYS_GROUPED, 1, "experts_interleaved");
    assert_converts("experts_grouped", 0, KEYS_GROUPED, 0, "experts_grouped");
    /* Packed rows are split by the router's number of experts first. */
    struct err e = {0};
    struct key_file f, g;
    struct key_output there, back;
    struct key_target blocks = {.layout = KEYS_INDEXED, .glu_interleave = 1};
    assert_ok(key_file_open(&f, FIXTURES "experts_packed.safetensors", &e), &e);
    assert_ok(key_convert(&there, &f, KEYS_MODEL, &blocks, &e), &e);
    assert_ok(key_file_open(&g, FIXTURES "experts_interleaved.safetensors", &e), &e);
    assert_ok(key_convert(&back, &g, KEYS_MODEL, &blocks, &e), &e);
    assert_int_equal(there.n, back.n);
    for (int i = 0; i < there.n; i++)
        assert_memory_equal(there.items[i].host.data, back.items[i].host.data,
                            (size_t)tensor_bytes(&there.items[i].host));
    key_file_close(&f);
    key_file_close(&g);
    key_output_release(&there);
    key_output_release(&back);
}

static void blocks_that_cannot_be_are_refused(void **state)
{
    (void)state;
    struct err e = {0};
    struct param p = fc1(false, 0);
    p.layer = 1;
    const struct param *list[] = {&p, &attention};
    struct key_file f;
    struct keymap *m;
    struct key_output out;
    assert_ok(key_file_open(&f, FIXTURES "experts_grouped.safetensors", &e), &e);
    struct key_target two = {.layout = KEYS_GROUPED, .glu_interleave = 2};
    assert_fails(key_convert(&out, &f, KEYS_MODEL, &two, &e), ST_CONFLICT, &e,
                 "6 rows: they cannot be gate and up rows in blocks of 2");
    f.glu_interleave = 2;
    assert_fails(keymap_open(&m, &f, KEYS_MODEL, list, 2, DT_F32, &e), ST_CONFLICT, &e, "blocks of 2");
    key_file_close(&f);
    static const char *const texts[] = {"", "x", "-1", "2 ", "99999999999999999999"};
    char *dir = temp_dir();
    for (int i = 0; i < countof(texts); i++) {
        float zero = 0;
        struct st_meta meta = {KEY_GLU_INTERLEAVE, texts[i]};
        struct st_item item = {.name = "w", .host = tensor_1d(&zero, DT_F32, 1)};
        char *path = path_join(dir, "w.safetensors");
        assert_ok(st_write_file(path, &item, 1, &meta, 1, &e), &e);
        assert_fails(key_file_open(&f, path, &e), ST_INVALID, &e, "which is no number");
        free(path);
    }
    file_remove_tree(dir, NULL);
    free(dir);
}

/* ---- tables of integers ---------------------------------------------------------------------- */

static int load_table(const void *values, enum dtype type, int32_t out[6], struct err *e)
{
    struct param p = {.key = LAYER "router.tid2eid", .rank = 2, .dim = {3, 2}, .buffer = true, .n_values = 4};
    const struct param *list[] = {&p};
    char *dir = temp_dir(), *path = path_join(dir, "t.safetensors");
    struct st_item item = {.name = p.key, .host = tensor_2d((void *)(uintptr_t)values, type, 3, 2)};
    struct tensor dst = tensor_2d(out, DT_I32, 3, 2);
    struct keymap *m = NULL;
    struct key_file f;
    assert_ok(st_write_file(path, &item, 1, NULL, 0, e), e);
    assert_ok(key_file_open(&f, path, e), e);
    int st = keymap_open(&m, &f, KEYS_MODEL, list, 1, DT_F32, e);
    if (st == ST_OK)
        st = keymap_load(m, 0, &dst, e);
    keymap_close(m);
    key_file_close(&f);
    file_remove_tree(dir, NULL);
    free(dir);
    free(path);
    return st;
}

static void tables_load_as_integers_in_their_range(void **state)
{
    (void)state;
    struct err e = {0};
    static const int32_t narrow[6] = {0, 3, 1, 2, 3, 0}, beyond[6] = {0, 3, 1, 4, 3, 0}, below[6] = {0, 3, 1, -1, 3, 0};
    static const int64_t wide[6] = {0, 3, 1, 2, 3, 0}, far[6] = {0, 3, 1, 1LL << 32, 3, 0};
    static const float reals[6] = {0};
    int32_t out[6] = {9, 9, 9, 9, 9, 9};
    assert_ok(load_table(narrow, DT_I32, out, &e), &e);
    assert_memory_equal(out, narrow, sizeof out);
    memset(out, 9, sizeof out);
    assert_ok(load_table(wide, DT_I64, out, &e), &e);
    assert_memory_equal(out, narrow, sizeof out);
    assert_fails(load_table(beyond, DT_I32, out, &e), ST_CONFLICT, &e, "tid2eid holds 4 at element 3, but only 0 to 3");
    assert_fails(load_table(below, DT_I32, out, &e), ST_CONFLICT, &e, "holds -1");
    assert_fails(load_table(far, DT_I64, out, &e), ST_CONFLICT, &e, "holds 4294967296");
    assert_fails(load_table(reals, DT_F32, out, &e), ST_UNSUPPORTED, &e, "cannot convert F32 to I32");
    assert_memory_equal(out, narrow, sizeof out); /* nothing was touched */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_in_blocks_are_halves_on_disk),
        cmocka_unit_test(models_with_blocks_and_halves_read_one_file),
        cmocka_unit_test(files_convert_between_blocks_and_halves),
        cmocka_unit_test(blocks_that_cannot_be_are_refused),
        cmocka_unit_test(tables_load_as_integers_in_their_range),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
