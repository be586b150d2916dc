/* base/: errors, memory, strings, random numbers, files. */
#include "support.h"

static void errors_carry_message_hint_and_trail(void **state)
{
    (void)state;
    struct err e = {0};
    assert_int_equal(err_set(&e, ST_INVALID, "width %d", 3), ST_INVALID);
    assert_int_equal(err_hint(&e, "use %d", 4), ST_INVALID);
    err_in(&e, "reading a.ini");
    err_in(&e, "starting");
    assert_string_equal(e.msg, "width 3");
    assert_string_equal(e.hint, "use 4");
    assert_string_equal(e.trail, "reading a.ini; starting");
    for (int i = 0; i < 200; i++)
        err_in(&e, "a long way down, step %d", i); /* must not overflow */
    assert_true(strlen(e.trail) < sizeof e.trail);
}

static void overflow_is_refused(void **state)
{
    (void)state;
    struct err e = {0};
    void *p;
    assert_fails(mem_array(&p, SIZE_MAX / 2, 4, &e), ST_NOMEM, &e, "overflows");
    struct arena a;
    arena_init(&a);
    assert_null(arena_alloc(&a, SIZE_MAX - 8));
    assert_string_equal(arena_printf(&a, "%d-%s", 7, "x"), "7-x");
    char *big = arena_alloc(&a, 100000);
    assert_non_null(big);
    for (int i = 0; i < 100000; i++)
        assert_int_equal(big[i], 0);
    arena_release(&a);
}

static void numbers_parse_strictly(void **state)
{
    (void)state;
    int64_t i;
    double d;
    assert_true(parse_i64("12k", &i) && i == 12000);
    assert_true(parse_i64("-3", &i) && i == -3);
    assert_true(parse_i64("2Mi", &i) && i == 2 << 20);
    static const char *const bad[] = {"", " 1", "1 ", "1x", "9223372036854775808", "90000000000000000k", "0x10", "1.5"};
    for (int k = 0; k < countof(bad); k++)
        assert_false(parse_i64(bad[k], &i));
    assert_true(parse_f64("1e-3", &d) && d == 1e-3);
    assert_false(parse_f64("nan", &d));
    assert_false(parse_f64("inf", &d));
    assert_false(parse_f64("1e999", &d));
    assert_false(parse_f64("1,5", &d));
}

static void names_match(void **state)
{
    (void)state;
    static const char *const names[] = {"model.hidden", "train.steps", "train.lr"};
    assert_string_equal(nearest_name("model.hiden", names, 3), "model.hidden");
    assert_null(nearest_name("zzzzzzzzzzzzzz", names, 3));
    assert_string_equal(nearest_name("trian.lr", names, 3), "train.lr"); /* neighbours exchanged: one mistake */
    /* 3 of 11 characters are more than a quarter */
    assert_null(nearest_name("train.sizes", names, 3));
    assert_null(nearest_name("data.train", names, 3));
    assert_true(str_glob("joint.*", "joint.norm"));
    assert_false(str_glob("joint.*", "mlp.act"));
    assert_true(str_glob("*.act", "mlp.act"));
    assert_true(str_glob("**", ""));
}

static void buffers_stop_at_their_maximum(void **state)
{
    (void)state;
    struct err e = {0};
    struct buf b;
    buf_init(&b, 10);
    buf_add(&b, "12345");
    buf_addf(&b, "%d", 67890);
    assert_string_equal(b.text, "1234567890");
    buf_add(&b, "x");
    assert_true(b.failed);
    assert_int_equal(buf_check(&b, &e), ST_NOMEM);
    buf_release(&b);
}

/* Known answers of Random123's kat_vectors for philox4x32-10. */
static void philox_known_answers(void **state)
{
    (void)state;
    struct philox4 r = philox(0, 0, 0, 0, 0);
    assert_int_equal(r.v[0], 0x6627e8d5);
    assert_int_equal(r.v[1], 0xe169c58d);
    assert_int_equal(r.v[2], 0xbc57ac4c);
    assert_int_equal(r.v[3], 0x9b00dbd8);
    r = philox(0xffffffffffffffffull, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff);
    assert_int_equal(r.v[0], 0x408f276d);
    r = philox(0x299f31d0a4093822ull, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344);
    assert_int_equal(r.v[0], 0xd16cfe09);
    assert_int_equal(r.v[1], 0x94fdcceb);
    assert_int_equal(r.v[2], 0x5001e420);
    assert_int_equal(r.v[3], 0x24126ea1);
}

static void normal_has_its_moments(void **state)
{
    (void)state;
    enum { N = 200000 };
    double sum = 0, sq = 0, fourth = 0;
    uint64_t key = rng_key(1, "a.weight");
    for (uint64_t i = 0; i < N; i++) {
        double x = rng_normal(key, i);
        sum += x;
        sq += x * x;
        fourth += x * x * x * x;
    }
    assert_true(fabs(sum / N) < 0.01);
    assert_true(fabs(sq / N - 1) < 0.02);
    assert_true(fabs(fourth / N - 3) < 0.1);
    assert_true(rng_key(1, "a") != rng_key(1, "b") && rng_key(1, "a") != rng_key(2, "a"));
}

static void files_are_replaced_whole(void **state)
{
    (void)state;
    struct err e = {0};
    char *dir = temp_dir(), *sub = path_join(dir, "a/b"), *path = path_join(sub, "f");
    assert_ok(file_make_dirs(sub, &e), &e);
    assert_ok(file_write_atomic(path, "hello", 5, &e), &e);
    assert_ok(file_write_atomic(path, "bye", 3, &e), &e);
    char *text;
    size_t len;
    assert_ok(file_read(path, 100, &text, &len, &e), &e);
    assert_string_equal(text, "bye");
    free(text);
    assert_fails(file_read(path, 2, &text, &len, &e), ST_INVALID, &e, "larger than");
    assert_fails(file_read("/nonexistent/x", 2, &text, &len, &e), ST_IO, &e, "/nonexistent/x");
    struct file_map m;
    assert_ok(file_map_open(&m, path, &e), &e);
    assert_int_equal(m.size, 3);
    file_map_close(&m);
    assert_fails(file_map_open(&m, sub, &e), ST_INVALID, &e, "regular file");
    char **names;
    int n;
    assert_ok(file_list_dir(sub, &names, &n, &e), &e);
    assert_int_equal(n, 1); /* no .tmp left */
    file_free_list(names, n);
    assert_ok(file_remove_tree(dir, &e), &e);
    assert_false(file_exists(dir));
    free(path);
    free(sub);
    free(dir);
}

/* Times come from files too, whatever they say. */
static void times_are_readable(void **state)
{
    (void)state;
    static const struct {
        double seconds;
        const char *text;
    } cases[] = {{1.25, "1.2s"},  {59.9, "59.9s"},    {61, "1m01s"},
                 {7260, "2h01m"}, {INFINITY, "infs"}, {-INFINITY, "-infs"}};
    char out[32];
    for (int i = 0; i < countof(cases); i++)
        assert_string_equal(human_time(cases[i].seconds, out, sizeof out), cases[i].text);
    assert_non_null(strstr(human_time(NAN, out, sizeof out), "nan"));
}

/* ---- SHA-256 and HMAC ------------------------------------------------------------------------ */

static void hex(const uint8_t *bytes, char *out)
{
    for (int i = 0; i < SHA256_BYTES; i++)
        sprintf(out + 2 * i, "%02x", bytes[i]);
}

/* Vectors of FIPS 180-4 and its examples; long text in pieces of every size. */
static void sha256_gives_the_standard_s_values(void **state)
{
    (void)state;
    static const struct {
        const char *text, *digest;
    } known[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    };
    struct sha256 s;
    uint8_t out[SHA256_BYTES];
    char text[2 * SHA256_BYTES + 1];
    for (int i = 0; i < countof(known); i++) {
        sha256_begin(&s);
        sha256_add(&s, known[i].text, strlen(known[i].text));
        sha256_end(&s, out);
        hex(out, text);
        assert_string_equal(text, known[i].digest);
    }
    for (size_t piece = 1; piece < 200; piece += 7) {
        char part[200];
        memset(part, 'a', sizeof part);
        sha256_begin(&s);
        for (size_t done = 0, k; done < 1000000; done += k) {
            k = 1000000 - done < piece ? 1000000 - done : piece;
            sha256_add(&s, part, k);
        }
        sha256_end(&s, out);
        hex(out, text);
        assert_string_equal(text, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    }
}

/* Vectors of RFC 4231: a short key, a readable one, one of a byte value, one longer than a block. */
static void hmac_gives_the_standard_s_values(void **state)
{
    (void)state;
    uint8_t key[131], data[50], out[SHA256_BYTES];
    char text[2 * SHA256_BYTES + 1];
    struct hmac m;
    memset(key, 0x0b, 20);
    hmac_begin(&m, key, 20);
    hmac_add(&m, "Hi ", 3);
    hmac_add(&m, "There", 5);
    hmac_end(&m, out);
    hex(out, text);
    assert_string_equal(text, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    hmac_begin(&m, "Jefe", 4);
    hmac_add(&m, "what do ya want for nothing?", 28);
    hmac_end(&m, out);
    hex(out, text);
    assert_string_equal(text, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    memset(key, 0xaa, sizeof key);
    memset(data, 0xdd, sizeof data);
    hmac_begin(&m, key, 20);
    hmac_add(&m, data, sizeof data);
    hmac_end(&m, out);
    hex(out, text);
    assert_string_equal(text, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    hmac_begin(&m, key, sizeof key);
    hmac_add(&m, "Test Using Larger Than Block-Size Key - Hash Key First", 54);
    hmac_end(&m, out);
    hex(out, text);
    assert_string_equal(text, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    assert_true(bytes_equal_secret("same", "same", 4));
    assert_false(bytes_equal_secret("same", "sane", 4));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sha256_gives_the_standard_s_values),
        cmocka_unit_test(hmac_gives_the_standard_s_values),
        cmocka_unit_test(errors_carry_message_hint_and_trail),
        cmocka_unit_test(overflow_is_refused),
        cmocka_unit_test(numbers_parse_strictly),
        cmocka_unit_test(names_match),
        cmocka_unit_test(buffers_stop_at_their_maximum),
        cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(normal_has_its_moments),
        cmocka_unit_test(times_are_readable),
        cmocka_unit_test(files_are_replaced_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
