/* Requests as JSON: the forms of a prompt, limits, and fields that are refused by name; texts and hosts. */
#include "serve/serve.h"
#include "support.h"

enum { VOCAB = 300 };

static int encode(void *ctx, const char *text, size_t n, bool prefix, struct token_ids *out, struct err *e)
{
    (void)ctx;
    TRY(mem_grow((void **)&out->ids, &out->cap, n + 1, sizeof *out->ids, e));
    if (prefix)
        out->ids[out->n++] = VOCAB - 1;
    for (size_t i = 0; i < n; i++)
        out->ids[out->n++] = (uint8_t)text[i];
    return ST_OK;
}

static const struct serve_limits limits = {
    .body_bytes = 1 << 20, .tokens = 100, .length = 40, .seconds = 1, .connections = 1};

static int read_request(struct completion_request *r, const char *body, struct err *e)
{
    *e = (struct err){0};
    return request_read(r, body, strlen(body), &limits, VOCAB, encode, NULL, e);
}

/* A conversation: the bytes of its messages. */
static int encode_chat(void *ctx, const struct chat_list *l, struct token_ids *out, struct err *e)
{
    for (size_t i = 0; i < l->n; i++)
        TRY(encode(ctx, l->m[i].text, l->m[i].n, false, out, e));
    return ST_OK;
}

static int read_chat(struct completion_request *r, const char *body, int32_t stop_id, struct err *e)
{
    static struct chat_template chat = {.stop = "<end>"};
    chat.stop_id = stop_id;
    *e = (struct err){0};
    return request_read_chat(r, body, strlen(body), &limits, VOCAB, &chat, encode_chat, NULL, e);
}

static void conversations_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *body, *text;
        int status;
    } bad[] = {
        {"{\"prompt\": \"a\"}", "belongs to /v1/completions", ST_INVALID},
        {"{}", "no field \"messages\"", ST_INVALID},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"logprobs\": true}", "logprobs", ST_UNSUPPORTED},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"tools\": [{}]}", "tools", ST_INVALID},
        {"{\"messages\": [{\"role\": \"king\", \"content\": \"a\"}]}", "role 'king'", ST_INVALID},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"max_completion_tokens\": 41}", "0 to 40",
         ST_INVALID},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"\"}]}", "no tokens", ST_INVALID},
    };
    struct completion_request r;
    struct err e;
    assert_ok(
        read_chat(&r,
                  "{\"model\": \"m\", \"messages\": [{\"role\": \"user\", \"content\": \"abc\"}], \"temperature\": 0}",
                  7, &e),
        &e);
    assert_true(r.n_prompts == 1 && r.prompts[0].n == 3 && r.max_tokens == 37 && r.n_stops == 0 &&
                r.sampler.temperature == 0);
    request_release(&r);
    assert_ok(
        read_chat(
            &r, "{\"messages\": [{\"role\": \"user\", \"content\": \"abc\"}], \"max_tokens\": 5, \"logprobs\": false}",
            -1, &e),
        &e);
    assert_true(r.max_tokens == 5 && r.n_stops == 1 && r.n_stop[0] == 5);
    request_release(&r);
    for (int i = 0; i < countof(bad); i++) {
        assert_fails(read_chat(&r, bad[i].body, 7, &e), bad[i].status, &e, bad[i].text);
        request_release(&r);
    }
}

static void accepts(struct completion_request *r, const char *body)
{
    struct err e;
    assert_ok(read_request(r, body, &e), &e);
}

static void refuses(const char *body, int status, const char *text)
{
    struct completion_request r;
    struct err e;
    assert_fails(read_request(&r, body, &e), status, &e, text);
    request_release(&r);
}

static void prompts_have_four_forms(void **state)
{
    (void)state;
    struct completion_request r;
    accepts(&r, "{\"prompt\": \"ab\"}");
    assert_int_equal(r.n_prompts, 1);
    assert_int_equal(r.prompts[0].n, 3);
    assert_int_equal(r.prompts[0].ids[0], VOCAB - 1);
    assert_int_equal(r.prompts[0].ids[2], 'b');
    assert_int_equal(r.max_tokens, 16);
    assert_int_equal(r.n_top, -1);
    request_release(&r);
    accepts(&r, "{\"prompt\": [\"a\", \"bc\"], \"add_special_tokens\": false}");
    assert_int_equal(r.n_prompts, 2);
    assert_int_equal(r.prompts[0].n, 1);
    assert_int_equal(r.prompts[1].n, 2);
    request_release(&r);
    accepts(&r, "{\"prompt\": [7, 299]}");
    assert_int_equal(r.n_prompts, 1);
    assert_int_equal(r.prompts[0].ids[1], 299);
    request_release(&r);
    accepts(&r, "{\"prompt\": [[7], [1, 2]], \"max_tokens\": 0}");
    assert_int_equal(r.n_prompts, 2);
    assert_int_equal(r.prompts[1].ids[0], 1);
    assert_int_equal(r.n_tokens, 3);
    request_release(&r);
}

static void other_fields_are_read(void **state)
{
    (void)state;
    struct completion_request r;
    accepts(&r, "{\"prompt\": [1], \"max_tokens\": 5, \"temperature\": 0.5, \"top_p\": 0.9, \"top_k\": 3, \"stop\": "
                "[\"x\", \"yz\"], "
                "\"seed\": 12, \"echo\": true, \"logprobs\": 4, \"n\": 1, \"stream\": false, \"user\": \"me\", "
                "\"suffix\": null}");
    assert_int_equal(r.max_tokens, 5);
    assert_true(r.sampler.temperature == 0.5 && r.sampler.top_p == 0.9);
    assert_int_equal(r.sampler.top_k, 3);
    assert_int_equal(r.sampler.seed, 12);
    assert_int_equal(r.n_stops, 2);
    assert_int_equal(r.n_stop[1], 2);
    assert_memory_equal(r.stop[1], "yz", 2);
    assert_true(r.echo);
    assert_int_equal(r.n_top, 4);
    request_release(&r);
    struct completion_request one, other;
    accepts(&one, "{\"prompt\": [1]}");
    accepts(&other, "{\"prompt\": [1]}");
    assert_true(one.sampler.seed != other.sampler.seed);
    request_release(&one);
    request_release(&other);
}

static void bad_fields_are_named(void **state)
{
    (void)state;
    refuses("", ST_INVALID, "not JSON");
    refuses("[]", ST_INVALID, "must be a JSON object");
    refuses("{}", ST_INVALID, "no field \"prompt\"");
    refuses("{\"prompt\": \"a\", \"prompt\": \"b\"}", ST_INVALID, "not JSON: duplicate");
    refuses("{\"prompt\": []}", ST_INVALID, "must be a text");
    refuses("{\"prompt\": 5}", ST_INVALID, "must be a text");
    refuses("{\"prompt\": [1, \"a\"]}", ST_INVALID, "prompt 0: element 1 is not a token id");
    refuses("{\"prompt\": [\"a\", 1]}", ST_INVALID, "prompt 1 is neither");
    refuses("{\"prompt\": [[1], []]}", ST_INVALID, "prompt 1 has no tokens");
    refuses("{\"prompt\": [-1]}", ST_INVALID, "token -1 does not exist");
    refuses("{\"prompt\": [300]}", ST_INVALID, "token 300 does not exist: the model has a vocabulary of 300");
    refuses("{\"prompt\": [1], \"max_token\": 3}", ST_INVALID, "did you mean \"max_tokens\"?");
    refuses("{\"prompt\": [1], \"max_tokens\": 1.5}", ST_INVALID, "\"max_tokens\" must be a whole number from 0 to 40");
    refuses("{\"prompt\": [1], \"temperature\": -1}", ST_INVALID, "\"temperature\" must be a number from 0 to 100");
    refuses("{\"prompt\": [1], \"logprobs\": 21}", ST_INVALID, "\"logprobs\" must be a whole number from 0 to 20");
    refuses("{\"prompt\": [1], \"logprobs\": true}", ST_INVALID, "\"logprobs\"");
    refuses("{\"prompt\": [1], \"stop\": \"\"}", ST_INVALID, "\"stop\" must be");
    refuses("{\"prompt\": [1], \"echo\": 1}", ST_INVALID, "\"echo\" must be true or false");
    refuses("{\"prompt\": [1], \"stream\": true}", ST_UNSUPPORTED, "\"stream\" is not supported");
    refuses("{\"prompt\": [1], \"n\": 2}", ST_UNSUPPORTED, "\"n\" other than 1");
    refuses("{\"prompt\": [1], \"presence_penalty\": 0.1}", ST_UNSUPPORTED, "\"presence_penalty\" other than 0");
    refuses("{\"prompt\": [1], \"logit_bias\": {\"5\": 1}}", ST_UNSUPPORTED, "\"logit_bias\" is not supported");
}

static void limits_hold(void **state)
{
    (void)state;
    struct completion_request r;
    accepts(&r, "{\"prompt\": [1, 2], \"max_tokens\": 38}");
    request_release(&r);
    refuses("{\"prompt\": [1, 2], \"max_tokens\": 39}", ST_INVALID,
            "prompt 0 has 2 tokens, and max_tokens is 39: together at most 40");
    accepts(&r, "{\"prompt\": [[1], [2], [3], [4]], \"max_tokens\": 24}");
    request_release(&r);
    refuses("{\"prompt\": [[1], [2], [3], [4, 5]], \"max_tokens\": 24}", ST_INVALID, "more than 100 tokens");
    struct buf many;
    struct err e = {0};
    buf_init(&many, 0);
    buf_add(&many, "{\"prompt\": \"");
    for (int i = 0; i < 41 * 1024; i++)
        buf_add(&many, "a");
    buf_add(&many, "\"}");
    assert_fails(request_read(&r, many.text, many.len, &limits, VOCAB, encode, NULL, &e), ST_INVALID, &e,
                 "prompt 0 has 41984 bytes, which are more than 40 tokens");
    request_release(&r);
    buf_release(&many);
    buf_init(&many, 0);
    buf_add(&many, "{\"max_tokens\": 0, \"prompt\": [\"\"");
    for (int i = 0; i < PROMPTS_MAX; i++)
        buf_add(&many, ", \"\"");
    buf_add(&many, "]}");
    assert_fails(request_read(&r, many.text, many.len, &limits, VOCAB, encode, NULL, &e), ST_INVALID, &e,
                 "1025 prompts, at most 1024");
    request_release(&r);
    buf_release(&many);
}

static void strings_are_always_json(void **state)
{
    (void)state;
    struct buf b;
    buf_init(&b, 0);
    reply_string(&b, "a\"\\\n\0\xE2\x82\xAC\xE2\x82z\xFF", 12);
    assert_string_equal(b.text, "\"a\\\"\\\\\\u000a\\u0000\xE2\x82\xAC\xEF\xBF\xBD\xEF\xBF\xBDz\xEF\xBF\xBD\"");
    buf_release(&b);
}

static void only_loopback_needs_no_token(void **state)
{
    (void)state;
    struct serve_address a;
    struct err e = {0};
    assert_ok(serve_address(&a, "127.0.0.1", 80, false, &e), &e);
    assert_true(a.loopback);
    assert_ok(serve_address(&a, "127.8.8.8", 80, false, &e), &e);
    assert_fails(serve_address(&a, "0.0.0.0", 80, false, &e), ST_USAGE, &e, "--token=FILE");
    assert_fails(serve_address(&a, "::", 80, false, &e), ST_USAGE, &e, "--token=FILE");
    assert_fails(serve_address(&a, "192.0.2.7", 80, false, &e), ST_USAGE, &e, "--token=FILE");
    assert_ok(serve_address(&a, "0.0.0.0", 80, true, &e), &e);
    assert_false(a.loopback);
    assert_fails(serve_address(&a, "", 80, true, &e), ST_USAGE, &e, "no address");
}

static void foreign_names_of_this_machine_are_seen(void **state)
{
    (void)state;
    static const char *const good[] = {"localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.9.9.9",
                                       "[::1]:80",  "[::1]",          "box:9"};
    static const char *const bad[] = {
        "", "evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "[::2]:80", "[", "10.0.0.1", ":80"};
    for (int i = 0; i < countof(good); i++)
        if (!serve_host_is_local(good[i], "box"))
            fail_msg("%s was refused", good[i]);
    for (int i = 0; i < countof(bad); i++)
        if (serve_host_is_local(bad[i], "box"))
            fail_msg("%s was accepted", bad[i]);
}

static void tokens_come_from_a_file(void **state)
{
    (void)state;
    char *dir = temp_dir(), *path = path_join(dir, "token"), *token = NULL;
    struct err e = {0};
    assert_ok(file_write_atomic(path, "0123456789abcdef\nmore\n", 22, &e), &e);
    assert_ok(serve_read_token(path, &token, &e), &e);
    assert_string_equal(token, "0123456789abcdef");
    free(token);
    assert_ok(file_write_atomic(path, "short\n", 6, &e), &e);
    assert_fails(serve_read_token(path, &token, &e), ST_USAGE, &e, "at least 16 printable characters");
    assert_ok(file_write_atomic(path, "0123456789 abcdef", 17, &e), &e);
    assert_fails(serve_read_token(path, &token, &e), ST_USAGE, &e, "without spaces");
    assert_ok(file_remove_tree(dir, &e), &e);
    free(path);
    free(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conversations_are_read),
        cmocka_unit_test(prompts_have_four_forms),
        cmocka_unit_test(other_fields_are_read),
        cmocka_unit_test(bad_fields_are_named),
        cmocka_unit_test(limits_hold),
        cmocka_unit_test(strings_are_always_json),
        cmocka_unit_test(only_loopback_needs_no_token),
        cmocka_unit_test(foreign_names_of_this_machine_are_seen),
        cmocka_unit_test(tokens_come_from_a_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
