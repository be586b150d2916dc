/* safetensors: against files of the Python package, against hostile headers, and round trips. */
#include "support.h"

#include <signal.h>
#include <sys/resource.h>

#include "ckpt/ckpt_int.h"

static const char golden_path[] = "tests/ckpt/golden.safetensors"; /* tools/check_safetensors.py */

static void a_file_of_the_python_package_reads(void **state)
{
    (void)state;
    struct err e = {0};
    struct st_file *f;
    assert_ok(st_open(&f, golden_path, &e), &e);
    assert_int_equal(st_count(f), 6);
    assert_string_equal(st_metadata(f, "maker"), "the python package");
    assert_null(st_metadata(f, "other"));
    assert_null(st_find(f, "nothing"));
    assert_null(st_find(f, "__metadata__"));
    float a[6];
    const struct st_entry *entry = st_find(f, "a.weight");
    assert_non_null(entry);
    struct tensor t = tensor_2d(a, DT_F32, 2, 3);
    assert_ok(st_read(entry, &t, &e), &e);
    static const float want[6] = {0, 1, -2, 3.5f, 1e-30f, 65504};
    assert_memory_equal(a, want, sizeof want);
    float scalar;
    t = tensor_shape(DT_F32, 0, NULL);
    t.data = &scalar;
    assert_ok(st_read(st_find(f, "b.scalar"), &t, &e), &e);
    assert_true(scalar == -7.25f);
    double h[3];
    t = tensor_1d(h, DT_F64, 3);
    assert_ok(st_read(st_find(f, "h"), &t, &e), &e);
    assert_true(h[0] == 1 && h[1] == -2 && isinf(h[2]));
    int32_t u[5];
    t = tensor_1d(u, DT_I32, 5);
    assert_ok(st_read(st_find(f, "u\xc3\xa9"), &t, &e), &e);
    assert_int_equal(u[4], 255);
    t = tensor_2d(NULL, DT_F32, 0, 4);
    assert_ok(st_read(st_find(f, "empty"), &t, &e), &e);
    t = tensor_2d(a, DT_F32, 3, 2);
    assert_fails(st_read(entry, &t, &e), ST_INVALID, &e, "F32 [2, 3]");
    t = tensor_2d(a, DT_I32, 2, 3);
    assert_fails(st_read(entry, &t, &e), ST_UNSUPPORTED, &e, "a.weight");
    st_close(f);
}

static void our_file_equals_the_python_package_byte_for_byte(void **state)
{
    (void)state;
    struct err e = {0};
    double d[2] = {0.1, -2.5};
    float a[6] = {0, 1, -2, 3.5f, 1e-30f, 65504}, scalar = -7.25f;
    uint16_t h[3] = {0x3f80, 0xc000, 0x7f80};
    uint8_t u[5] = {1, 2, 3, 254, 255};
    struct tensor zero = tensor_shape(DT_F32, 0, NULL);
    zero.data = &scalar;
    struct st_item items[] = {
        {"u\xc3\xa9", tensor_1d(u, DT_U8, 5), NULL},    {"h", tensor_1d(h, DT_BF16, 3), NULL},
        {"empty", tensor_2d(NULL, DT_F32, 0, 4), NULL}, {"b.scalar", zero, NULL},
        {"a.weight", tensor_2d(a, DT_F32, 2, 3), NULL}, {"d", tensor_1d(d, DT_F64, 2), NULL},
    };
    struct st_meta meta = {"maker", "the python package"};
    char *dir = temp_dir(), *path = path_join(dir, "x.safetensors"), *ours, *theirs;
    size_t n_ours, n_theirs;
    assert_ok(st_write_file(path, items, countof(items), &meta, 1, &e), &e);
    assert_ok(file_read(path, 10000, &ours, &n_ours, &e), &e);
    assert_ok(file_read(golden_path, 10000, &theirs, &n_theirs, &e), &e);
    assert_int_equal(n_ours, n_theirs);
    assert_memory_equal(ours, theirs, n_ours);
    char **names;
    int n;
    assert_ok(file_list_dir(dir, &names, &n, &e), &e);
    assert_int_equal(n, 1); /* nothing temporary left */
    file_free_list(names, n);
    free(ours);
    free(theirs);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(path);
    free(dir);
}

/* A file in memory: length, header padded with `pad` spaces, n zero bytes of data. */
static size_t make_file(uint8_t *out, const char *header, size_t pad, size_t n)
{
    size_t len = strlen(header);
    uint64_t total = len + pad;
    memcpy(out, &total, 8);
    memcpy(out + 8, header, len);
    memset(out + 8 + len, ' ', pad);
    memset(out + 8 + len + pad, 0, n);
    return 8 + len + pad + n;
}

#define ENTRY(type, shape, begin, end)                                                                                 \
    "{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"

static void hostile_headers_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        enum status status;
        const char *text;
    } cases[] = {
        {"{\"a\":" ENTRY("F32", "[2]", "0", "8") "}", 7, ST_CORRUPT, "past the end"},
        {"{\"a\":" ENTRY("F32", "[2]", "0", "8") "}", 9, ST_CORRUPT, "belong to none"},
        {"{\"a\":" ENTRY("F32", "[2]", "0", "4") "}", 4, ST_CORRUPT, "disagree"},
        {"{\"a\":" ENTRY("F32", "[1]", "4", "8") "}", 8, ST_CORRUPT, "gap"},
        {"{\"a\":" ENTRY("F32", "[1]", "0", "4") ",\"b\":" ENTRY("F32", "[1]", "0", "4") "}", 4, ST_CORRUPT, "overlap"},
        {"{\"a\":" ENTRY("F32", "[2]", "0", "8") ",\"b\":" ENTRY("F32", "[1]", "4", "8") "}", 8, ST_CORRUPT, "overlap"},
        {"{\"a\":" ENTRY("F32", "[1]", "0", "4") ",\"a\":" ENTRY("F32", "[1]", "4", "8") "}", 8, ST_CORRUPT,
         "duplicate"},
        {"{\"a\":" ENTRY("F32", "[-1]", "0", "4") "}", 4, ST_CORRUPT, "whole number"},
        {"{\"a\":" ENTRY("F32", "[1.0]", "0", "4") "}", 4, ST_CORRUPT, "whole number"},
        {"{\"a\":" ENTRY("F32", "[\"1\"]", "0", "4") "}", 4, ST_CORRUPT, "whole number"},
        {"{\"a\":" ENTRY("F32", "[1]", "-4", "0") "}", 4, ST_CORRUPT, "ascending"},
        {"{\"a\":" ENTRY("F32", "[1]", "4", "0") "}", 4, ST_CORRUPT, "ascending"},
        {"{\"a\":" ENTRY("F32", "[4294967296,4294967296]", "0", "0") "}", 0, ST_CORRUPT, "overflows"},
        {"{\"a\":" ENTRY("F32", "[4611686018427387904]", "0", "0") "}", 0, ST_CORRUPT, "overflows"},
        {"{\"a\":" ENTRY("U8", "[0,4294967296,4294967296]", "0", "0") "}", 0, ST_CORRUPT, "overflows"},
        {"{\"a\":" ENTRY("U8", "[4294967296,4294967296,0]", "0", "0") "}", 0, ST_CORRUPT, "overflows"},
        {"{\"a\":" ENTRY("U8", "[99999999999999999999]", "0", "0") "}", 0, ST_CORRUPT, "too big"},
        {"{\"a\":" ENTRY("F4", "[1]", "0", "1") "}", 1, ST_UNSUPPORTED, "unknown dtype 'F4'"},
        {"{\"a\":" ENTRY("F32", "[1,1,1,1,1,1]", "0", "4") "}", 4, ST_UNSUPPORTED, "6 dimensions"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, ST_CORRUPT, "missing"},
        {"{\"a\":[]}", 0, ST_CORRUPT, "missing"},
        {"{\"a\":" ENTRY("F32", "[1]", "0", "4") "", 4, ST_CORRUPT, "not a valid"},
        {"[1]", 0, ST_CORRUPT, "not a JSON object"},
        {" {}", 0, ST_CORRUPT, "not a JSON object"},
        {"{}x", 0, ST_CORRUPT, "not a valid"},
        {"{\"__metadata__\":{\"a\":1}}", 0, ST_CORRUPT, "not a string"},
        {"{\"__metadata__\":[]}", 0, ST_CORRUPT, "not an object"},
        {"{\"\\u0000\":" ENTRY("F32", "[1]", "0", "4") "}", 4, ST_CORRUPT, "not a valid"},
        {"{\"\xff\":" ENTRY("F32", "[1]", "0", "4") "}", 4, ST_CORRUPT, "not a valid"},
    };
    uint8_t bytes[1024];
    for (int i = 0; i < countof(cases); i++) {
        struct err e = {0};
        struct st_file *f;
        size_t n = make_file(bytes, cases[i].header, 0, cases[i].data);
        assert_fails(st_open_bytes(&f, bytes, n, "case", &e), cases[i].status, &e, cases[i].text);
        assert_null(f);
    }
}

static void names_cannot_steer_the_terminal(void **state)
{
    (void)state;
    uint8_t bytes[1024];
    struct err e = {0};
    struct st_file *f;
    size_t n = make_file(bytes, "{\"\\u001b[2J\":" ENTRY("F32", "[1]", "0", "4") "}", 0, 3);
    assert_fails(st_open_bytes(&f, bytes, n, "case", &e), ST_CORRUPT, &e, "'?[2J'");
}

static void lying_lengths_and_every_truncation_are_refused(void **state)
{
    (void)state;
    struct err e = {0};
    struct st_file *f;
    char *text;
    size_t n;
    assert_ok(file_read(golden_path, 10000, &text, &n, &e), &e);
    for (size_t i = 0; i < n; i++) {
        uint8_t *copy = malloc(i + 1); /* exact size: a sanitizer sees a read past it */
        memcpy(copy, text, i);
        assert_fails(st_open_bytes(&f, copy, i, "cut", &e), ST_CORRUPT, &e, "");
        free(copy);
    }
    static const uint64_t lengths[] = {UINT64_MAX, INT64_MAX, 100000001, 100000000, 4096, 0, 1};
    for (int i = 0; i < countof(lengths); i++) {
        memcpy(text, &lengths[i], 8);
        assert_fails(st_open_bytes(&f, text, n, "lie", &e), ST_CORRUPT, &e, "header");
    }
    free(text);
    assert_fails(st_open(&f, "tests/ckpt/none", &e), ST_IO, &e, "tests/ckpt/none");
    assert_fails(st_open(&f, "tests/ckpt", &e), ST_INVALID, &e, "regular file");
    assert_fails(st_open(&f, "/dev/null", &e), ST_INVALID, &e, "regular file");
}

static void unaligned_data_read_right(void **state)
{
    (void)state;
    uint8_t bytes[1024];
    static const char header[] = "{\"b\":" ENTRY("U8", "[1]", "0", "1") ",\"a\":" ENTRY("F64", "[2]", "1", "17") "}";
    for (size_t pad = 0; pad < 8; pad++) {
        struct err e = {0};
        struct st_file *f;
        double in[2] = {1.0 / 3, -4};
        float out[2];
        size_t n = make_file(bytes, header, pad, 17);
        memcpy(bytes + n - 16, in, 16);
        assert_ok(st_open_bytes(&f, bytes, n, "unaligned", &e), &e);
        struct tensor t = tensor_1d(out, DT_F32, 2);
        assert_ok(st_read(st_find(f, "a"), &t, &e), &e);
        assert_true(out[0] == (float)in[0] && out[1] == -4);
        struct st_difference d;
        assert_ok(st_compare(&st_find(f, "a")->view, &t, &d, &e), &e);
        assert_int_equal(d.count, 1);
        assert_true(d.max_abs > 0 && d.max_abs < 1e-7);
        st_close(f);
    }
}

static void every_dtype_round_trips(void **state)
{
    (void)state;
    struct err e = {0};
    struct st_item items[DT_COUNT];
    uint64_t data[DT_COUNT][6];
    char *dir = temp_dir(), *path = path_join(dir, "x.safetensors");
    int64_t dim[5] = {1, 2, 1, 3, 1};
    int n = 0;
    for (int t = DT_NONE + 1; t < DT_COUNT; t++, n++) {
        for (int i = 0; i < 6; i++)
            data[t][i] = rng_below(7, (uint64_t)(t * 6 + i), UINT64_MAX);
        items[n] = (struct st_item){dtype_name((enum dtype)t), tensor_shape((enum dtype)t, 5, dim), NULL};
        items[n].host.data = data[t];
    }
    assert_ok(st_write_file(path, items, n, NULL, 0, &e), &e);
    assert_ok(st_write_file(path, items, n, NULL, 0, &e), &e); /* over itself */
    struct st_file *f;
    assert_ok(st_open(&f, path, &e), &e);
    assert_int_equal(st_count(f), n);
    for (int i = 0; i < n; i++) {
        uint64_t back[6] = {0};
        const struct st_entry *entry = st_find(f, items[i].name);
        struct tensor dst = items[i].host;
        dst.data = back;
        assert_non_null(entry);
        assert_int_equal((uintptr_t)entry->view.data % dtype_bytes(dst.dtype), 0); /* aligned */
        assert_ok(st_read(entry, &dst, &e), &e);
        assert_memory_equal(back, items[i].host.data, (size_t)tensor_bytes(&dst));
    }
    st_close(f);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(path);
    free(dir);
}

static void integers_convert_only_when_they_fit(void **state)
{
    (void)state;
    struct err e = {0};
    int64_t wide[3] = {0, -1, 70000};
    uint16_t narrow[3];
    int32_t middle[3];
    float real[3];
    assert_ok(convert_elems(middle, DT_I32, wide, DT_I64, 3, &e), &e);
    assert_int_equal(middle[2], 70000);
    assert_int_equal(middle[1], -1);
    assert_ok(convert_elems(real, DT_F32, middle, DT_I32, 3, &e), &e);
    assert_true(real[2] == 70000.0f);
    assert_fails(convert_elems(narrow, DT_U16, wide, DT_I64, 3, &e), ST_INVALID, &e, "does not fit U16");
    assert_fails(convert_elems(middle, DT_I32, real, DT_F32, 3, &e), ST_UNSUPPORTED, &e, "F32 to I32");
    uint64_t huge = UINT64_MAX;
    assert_fails(convert_elems(wide, DT_I64, &huge, DT_U64, 1, &e), ST_INVALID, &e, "does not fit");
    assert_false(dtype_converts(DT_F32, DT_F8_E4M3));
}

static void reals_convert_across_blocks(void **state)
{
    (void)state;
    enum { N = 3000 };
    struct err e = {0};
    float *in = malloc(N * sizeof *in), *out = malloc(N * sizeof *out);
    uint16_t *mid = malloc(N * sizeof *mid);
    for (int i = 0; i < N; i++)
        in[i] = bf16_to_f32((uint16_t)(i * 11)); /* exact in bf16 */
    assert_ok(convert_elems(mid, DT_BF16, in, DT_F32, N, &e), &e);
    assert_ok(convert_elems(out, DT_F32, mid, DT_BF16, N, &e), &e);
    for (int i = 0; i < N; i++)
        assert_true(in[i] == out[i] || isnan(in[i]));
    free(in);
    free(out);
    free(mid);
}

static void the_writer_refuses_what_it_cannot_write(void **state)
{
    (void)state;
    struct err e = {0};
    float x[8] = {0};
    uint8_t u[8] = {0};
    char *dir = temp_dir(), *path = path_join(dir, "x.safetensors");
    struct tensor good = tensor_2d(x, DT_F32, 2, 4), strided = tensor_cols(&good, 0, 2);
    struct tensor absent = tensor_1d(NULL, DT_F32, 3), untyped = tensor_1d(x, DT_NONE, 3);
    struct tensor negative = tensor_1d(x, DT_F32, -3), bytes = tensor_1d(u, DT_U8, 8);
    struct param p = {.rows = {.n_sections = 2, .groups = 2, .rows = {1, 1}}};
    const struct {
        struct st_item items[2];
        int n;
        enum status status;
        const char *text;
    } cases[] = {
        {{{"a", good, NULL}, {"a", bytes, NULL}}, 2, ST_CONFLICT, "used twice"},
        {{{"__metadata__", good, NULL}}, 1, ST_CONFLICT, "reserved"},
        {{{"a", strided, NULL}}, 1, ST_INVALID, "dense"},
        {{{"a", absent, NULL}}, 1, ST_INVALID, "dense"},
        {{{"a", untyped, NULL}}, 1, ST_INVALID, "impossible"},
        {{{"a", negative, NULL}}, 1, ST_INVALID, "impossible"},
        {{{NULL, good, NULL}}, 1, ST_INVALID, "no name"},
        {{{"", good, NULL}}, 1, ST_INVALID, "no name"},
        {{{"\xff\xfe", good, NULL}}, 1, ST_INVALID, "UTF-8"},
        {{{"a", good, &p}}, 1, ST_INVALID, "row layout"},
    };
    for (int i = 0; i < countof(cases); i++) {
        assert_fails(st_write_file(path, cases[i].items, cases[i].n, NULL, 0, &e), cases[i].status, &e, cases[i].text);
        assert_false(file_exists(path));
    }
    char *nowhere = path_join(dir, "no/such/x.safetensors");
    struct st_item item = {"a", good, NULL};
    assert_fails(st_write_file(nowhere, &item, 1, NULL, 0, &e), ST_IO, &e, "cannot create");
    free(nowhere);
    char **names;
    int n;
    assert_ok(file_list_dir(dir, &names, &n, &e), &e);
    assert_int_equal(n, 0);
    file_free_list(names, n);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(path);
    free(dir);
}

static void a_failed_write_leaves_the_old_file(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    struct err e = {0};
    char *dir = temp_dir(), *path = path_join(dir, "x.safetensors");
    float *x = calloc(N, sizeof *x);
    x[0] = 1;
    struct st_item item = {"a", tensor_1d(x, DT_F32, 16), NULL};
    assert_ok(st_write_file(path, &item, 1, NULL, 0, &e), &e);
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = 1 << 16;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    x[0] = 2;
    item.host = tensor_1d(x, DT_F32, N);
    int st = st_write_file(path, &item, 1, NULL, 0, &e);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    assert_fails(st, ST_IO, &e, "cannot write");
    struct st_file *f;
    float back[16];
    struct tensor t = tensor_1d(back, DT_F32, 16);
    assert_ok(st_open(&f, path, &e), &e);
    assert_ok(st_read(st_find(f, "a"), &t, &e), &e);
    assert_true(back[0] == 1);
    st_close(f);
    char **names;
    int n;
    assert_ok(file_list_dir(dir, &names, &n, &e), &e);
    assert_int_equal(n, 1);
    file_free_list(names, n);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(x);
    free(path);
    free(dir);
}

static void differences_are_counted_and_located(void **state)
{
    (void)state;
    enum { N = 5000 };
    struct err e = {0};
    float *a = calloc(N, sizeof *a), *b = calloc(N, sizeof *b);
    struct tensor ta = tensor_1d(a, DT_F32, N), tb = tensor_1d(b, DT_F32, N);
    struct st_difference d;
    a[7] = b[7] = NAN; /* the same bits are equal */
    assert_ok(st_compare(&ta, &tb, &d, &e), &e);
    assert_int_equal(d.count, 0);
    b[1500] = 0.5f;
    b[4000] = -2;
    b[4999] = 1;
    assert_ok(st_compare(&ta, &tb, &d, &e), &e);
    assert_int_equal(d.count, 3);
    assert_int_equal(d.first, 1500);
    assert_int_equal(d.max_at, 4000);
    assert_true(d.max_abs == 2);
    b[0] = -0.0f; /* other bits, equal value */
    assert_ok(st_compare(&ta, &tb, &d, &e), &e);
    assert_int_equal(d.count, 4);
    b[2000] = NAN;
    assert_ok(st_compare(&ta, &tb, &d, &e), &e);
    assert_true(isnan(d.max_abs) && d.max_at == 2000);
    tb.dim[0] = N - 1;
    assert_fails(st_compare(&ta, &tb, &d, &e), ST_INVALID, &e, "cannot compare");
    free(a);
    free(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_of_the_python_package_reads),
        cmocka_unit_test(our_file_equals_the_python_package_byte_for_byte),
        cmocka_unit_test(hostile_headers_are_refused),
        cmocka_unit_test(names_cannot_steer_the_terminal),
        cmocka_unit_test(lying_lengths_and_every_truncation_are_refused),
        cmocka_unit_test(unaligned_data_read_right),
        cmocka_unit_test(every_dtype_round_trips),
        cmocka_unit_test(integers_convert_only_when_they_fit),
        cmocka_unit_test(reals_convert_across_blocks),
        cmocka_unit_test(the_writer_refuses_what_it_cannot_write),
        cmocka_unit_test(a_failed_write_leaves_the_old_file),
        cmocka_unit_test(differences_are_counted_and_located),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
