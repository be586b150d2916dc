/* train/: decoding with caches against the full forward pass, and sampling. */
#include "tiny.h"
#include "train/train.h"

enum { LENGTH = 72, CACHE = 96 };

static const char *const models[] = {
    "model.pattern=*-*-",
    "model.kv_heads=1",
    "model.attn_window=9",
    "model.attn_window=40 model.pattern=**- model.attn_window_skip=2",
    "model.attn_sink=learnable",
    "model.attn_sink=off_by_one model.attn_window=5",
    "model.qk_norm=on model.attn_gate=on",
    "model.bias=on model.rope=interleaved model.rope_percent=0.5",
    "model.rope=none",
    "model.pattern=**- model.no_rope_freq=2",
    "model.rope_scaling=linear model.rope_factor=3",
    "model.rope_scaling=llama3 model.rope_factor=8 model.rope_original=32",
    "model.rope_scaling=yarn model.rope_factor=4 model.rope_original=16",
    "model.norm_zero_centered=on model.tied=off model.dropout=0.5",
    "plan.poison=on plan.random_lanes=3 model.vocab_multiple=8",
};

/* Logits of every position of one sequence, from the training plan. */
static double *full_logits(struct tiny *t, const int32_t *tokens, int64_t *vocab)
{
    int32_t labels[LENGTH], pos[LENGTH], doc[LENGTH] = {0};
    for (int i = 0; i < LENGTH; i++) {
        labels[i] = 1;
        pos[i] = i;
    }
    static const double mtp_scale[MTP_MAX_DEPTHS] = {0};
    struct run_info run = {.first_mb = true,
                           .scale = 1,
                           .mtp_scale = mtp_scale,
                           .tokens = tokens,
                           .labels = labels,
                           .pos = pos,
                           .doc_start = doc};
    assert_ok(exec_run(&t->x, &t->train.p, &run, &t->e), &t->e);
    struct tensor logits = model_slot(&t->m, &t->train, t->train.logits);
    *vocab = logits.dim[1];
    double *out = malloc((size_t)tensor_elems(&logits) * sizeof *out);
    assert_non_null(out);
    for (int64_t i = 0; i < tensor_elems(&logits); i++)
        out[i] = tensor_get(&logits, i);
    return out;
}

/* Dropout is for training only: the comparison runs without it. */
static void undrop(struct tiny *t, const char *options, enum dev_kind kind)
{
    char all[512];
    snprintf(all, sizeof all, "train.seq=%d train.micro_batch=1 %s model.dropout=0 model.attention_dropout=0", LENGTH,
             options);
    tiny_open(t, all, kind, 1);
}

static void assert_row(const struct tensor *got, const double *want, int64_t vocab, double bound, const char *model,
                       int64_t at)
{
    double top = 0;
    for (int64_t v = 0; v < vocab; v++)
        top = fmax(top, fabs(want[v]));
    for (int64_t v = 0; v < vocab; v++) {
        double x = tensor_get(got, v);
        if (!(fabs(x - want[v]) <= bound * top))
            fail_msg("%s: logit %d at position %d is %.17g, not %.17g", model, (int)v, (int)at, x, want[v]);
    }
}

/* What generator_feed_all shows of a sequence, held against the rows of the forward pass. */
struct shown {
    const double *want;
    int64_t vocab, n;
    double bound;
    const char *model;
};

static int show_rows(void *ctx, int64_t first, const struct tensor *logits, struct err *e)
{
    struct shown *s = ctx;
    (void)e;
    assert_int_equal(first, s->n);
    for (int64_t r = 0; r < logits->dim[0]; r++) {
        struct tensor row = tensor_rows(logits, r, 1);
        assert_row(&row, s->want + (first + r) * s->vocab, s->vocab, s->bound, s->model, first + r);
    }
    s->n += logits->dim[0];
    return ST_OK;
}

static int refuse_to_go_on(void *ctx, struct err *e)
{
    int *left = ctx;
    return (*left)-- > 0 ? ST_OK : err_set(e, ST_INTERRUPTED, "enough");
}

static void check_model(const char *model, enum dev_kind kind, double bound)
{
    static const int64_t prompts[] = {1, 31, 32, 33, 70};
    struct tiny t;
    struct generator g;
    struct tensor logits;
    int64_t vocab;
    int32_t tokens[CACHE] = {0};
    char all[512];
    struct err e = {0};
    struct config c;
    undrop(&t, model, kind);
    for (int i = 0; i < LENGTH; i++)
        tokens[i] = (int32_t)rng_below(3, (uint64_t)i, (uint64_t)t.c.model.vocab);
    double *want = full_logits(&t, tokens, &vocab);
    snprintf(all, sizeof all, "train.seq=%d %s", LENGTH, model);
    tiny_config(&c, all);
    assert_ok(generator_open(&g, &c, &t.dev, NULL, (struct generator_size){.batch = 1, .tokens = CACHE}, &e), &e);
    for (int p = 0; p < countof(prompts); p++) {
        generator_rewind(&g);
        assert_ok(generator_feed(&g, tokens, prompts[p], &logits, &e), &e);
        assert_row(&logits, want + (prompts[p] - 1) * vocab, vocab, bound, model, prompts[p] - 1);
        int64_t until = p == 0 ? LENGTH : min_i64(LENGTH, prompts[p] + 3); /* the first goes through every position */
        for (int64_t i = prompts[p]; i < until; i++) {
            assert_ok(generator_feed(&g, tokens + i, 1, &logits, &e), &e);
            assert_row(&logits, want + i * vocab, vocab, bound, model, i);
        }
    }
    struct shown shown = {.want = want, .vocab = vocab, .bound = bound, .model = model};
    generator_rewind(&g);
    assert_ok(generator_feed_all(&g, tokens, LENGTH, show_rows, &shown, &logits, &e), &e);
    assert_int_equal(shown.n, LENGTH);
    assert_row(&logits, want + (LENGTH - 1) * vocab, vocab, bound, model, LENGTH - 1);
    int left = 1;
    g.check = refuse_to_go_on;
    g.check_ctx = &left;
    generator_rewind(&g);
    assert_fails(generator_feed(&g, tokens, LENGTH, &logits, &e), ST_INTERRUPTED, &e, "enough");
    assert_int_equal(g.pos, 64); /* one run, of the longest plan that fits */
    g.check = NULL;
    assert_fails(generator_feed(&g, tokens, CACHE - g.pos + 1, &logits, &e), ST_INVALID, &e,
                 "the cache holds 96 tokens");
    generator_close(&g);
    config_release(&c);
    free(want);
    tiny_close(&t);
}

/* Sequences side by side against each of them alone: a prompt that takes several plans, then single tokens. */
static void check_side_by_side(const char *model, enum dev_kind kind, double bound)
{
    enum { BATCH = 3, PROMPT = 37, MORE = 3, ALL = PROMPT + MORE };
    struct tiny t;
    struct generator one, many;
    struct tensor alone, all, row;
    struct config c;
    struct err e = {0};
    char text[512];
    int32_t tokens[BATCH][ALL], feed[BATCH * ALL];
    undrop(&t, model, kind);
    snprintf(text, sizeof text, "train.seq=%d %s", LENGTH, model);
    tiny_config(&c, text);
    for (int b = 0; b < BATCH; b++)
        for (int i = 0; i < ALL; i++)
            tokens[b][i] = (int32_t)rng_below((uint64_t)b, (uint64_t)i, (uint64_t)c.model.vocab);
    assert_ok(generator_open(&one, &c, &t.dev, NULL, (struct generator_size){.batch = 1, .tokens = ALL}, &e), &e);
    assert_ok(generator_open(&many, &c, &t.dev, NULL, (struct generator_size){.batch = BATCH, .tokens = ALL}, &e), &e);
    for (int b = 0; b < BATCH; b++)
        memcpy(feed + b * PROMPT, tokens[b], PROMPT * sizeof feed[0]);
    assert_ok(generator_feed(&many, feed, PROMPT, &all, &e), &e);
    for (int i = PROMPT; i < ALL; i++) {
        for (int b = 0; b < BATCH; b++)
            feed[b] = tokens[b][i];
        assert_ok(generator_feed(&many, feed, 1, &all, &e), &e);
    }
    assert_int_equal(all.dim[0], BATCH);
    for (int b = 0; b < BATCH; b++) {
        double want[512];
        generator_rewind(&one);
        assert_ok(generator_feed(&one, tokens[b], ALL, &alone, &e), &e);
        assert_true(alone.dim[1] <= countof(want));
        for (int64_t v = 0; v < alone.dim[1]; v++)
            want[v] = logit_at(&alone, v);
        row = tensor_rows(&all, b, 1);
        assert_row(&row, want, c.model.vocab, bound, model, b);
    }
    generator_close(&one);
    generator_close(&many);
    config_release(&c);
    tiny_close(&t);
}

static void sequences_side_by_side_are_those_alone(void **state)
{
    int n;
    const char *const *general = tiny_models(&n);
    (void)state;
    for (int i = 0; i < n; i++)
        check_side_by_side(general[i], DEV_REF, 0);
    for (int i = 0; i < countof(models); i++)
        check_side_by_side(models[i], i % 2 ? DEV_CPU : DEV_REF, 1e-5);
}

static void decode_equals_forward(enum dev_kind kind, double bound)
{
    int n;
    const char *const *general = tiny_models(&n);
    for (int i = 0; i < n; i++)
        check_model(general[i], kind, bound);
    for (int i = 0; i < countof(models); i++)
        check_model(models[i], kind, bound);
}

static void cached_decoding_is_bitwise_the_forward_pass_on_ref(void **state)
{
    (void)state;
    decode_equals_forward(DEV_REF, 0);
}

static void cached_decoding_is_the_forward_pass_on_cpu(void **state)
{
    (void)state;
    decode_equals_forward(DEV_CPU, 1e-5);
}

/* ---- sampling -------------------------------------------------------------------------------- */

enum { V = 5 };
static const double sample_logits[V] = {0.5, 2.0, -1.0, 2.5, 0.0};

static int pick(double temperature, int64_t top_k, double top_p, uint64_t seed, uint64_t n)
{
    struct candidate scratch[V];
    double copy[V];
    memcpy(copy, sample_logits, sizeof copy);
    struct tensor logits = tensor_2d(copy, DT_F64, 1, V);
    struct sampler s = {.temperature = temperature, .top_k = top_k, .top_p = top_p, .seed = seed};
    return sample_token(&s, &logits, V, n, scratch);
}

static void narrow_samplers_take_the_likeliest_token(void **state)
{
    (void)state;
    for (uint64_t n = 0; n < 100; n++) {
        assert_int_equal(pick(0, 0, 1, 1, n), 3);
        assert_int_equal(pick(1, 1, 1, 1, n), 3);
        assert_int_equal(pick(5, 0, 1e-9, 1, n), 3);
        int two = pick(1, 2, 1, 1, n);
        assert_true(two == 3 || two == 1);
        /* 3 has 0.51 and 1 has 0.31: together they pass 0.7 */
        two = pick(1, 0, 0.7, 1, n);
        assert_true(two == 3 || two == 1);
    }
}

static void sampling_follows_the_probabilities(void **state)
{
    (void)state;
    enum { DRAWS = 20000 };
    for (int hot = 0; hot < 2; hot++) {
        double temperature = hot ? 2 : 1, sum = 0;
        int count[V] = {0};
        for (uint64_t n = 0; n < DRAWS; n++)
            count[pick(temperature, 0, 1, 9, n)]++;
        for (int v = 0; v < V; v++)
            sum += exp(sample_logits[v] / temperature);
        for (int v = 0; v < V; v++)
            assert_true(fabs((double)count[v] / DRAWS - exp(sample_logits[v] / temperature) / sum) < 0.015);
    }
}

static void the_same_seed_draws_the_same_tokens(void **state)
{
    (void)state;
    int same = 0;
    for (uint64_t n = 0; n < 200; n++) {
        assert_int_equal(pick(1, 0, 1, 4, n), pick(1, 0, 1, 4, n));
        same += pick(1, 0, 1, 4, n) == pick(1, 0, 1, 5, n);
    }
    assert_true(same < 150);
}

/* The plain way: everything is put in order. */
static int candidate_order(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    return x->p != y->p ? (x->p < y->p ? 1 : -1) : x->id - y->id;
}

static int sample_sorting_all(const struct sampler *s, const double *logits, int64_t vocab, uint64_t n,
                              struct candidate *c)
{
    double top = logits[0], sum = 0, kept = 0;
    for (int64_t i = 1; i < vocab; i++)
        top = fmax(top, logits[i]);
    for (int64_t i = 0; i < vocab; i++) {
        c[i] = (struct candidate){.p = exp((logits[i] - top) / s->temperature), .id = (int)i};
        sum += c[i].p;
    }
    qsort(c, (size_t)vocab, sizeof *c, candidate_order);
    int64_t k = s->top_k > 0 ? s->top_k : vocab, used = 0;
    while (used < k && (used == 0 || kept < s->top_p * sum))
        kept += c[used++].p;
    double u = rng_uniform(rng_key(s->seed, "sample"), n) * kept;
    for (int64_t i = 0; i < used; i++)
        if ((u -= c[i].p) <= 0)
            return c[i].id;
    return c[used - 1].id;
}

/* Logits of a few values only: order among equals counts. Flat ones need many candidates, steep ones few. */
static void sampling_without_sorting_all_draws_the_same_tokens(void **state)
{
    (void)state;
    enum { WIDE = 3000 };
    static const struct {
        int64_t top_k;
        double top_p;
    } how[] = {{0, 1},  {0, 0.9},   {0, 0.999}, {1, 1},         {50, 1},
               {64, 1}, {65, 0.95}, {700, 0.5}, {WIDE, 0.9999}, {2999, 1}};
    double *logits = malloc(WIDE * sizeof *logits), *copy = malloc(WIDE * sizeof *copy);
    struct candidate *a = malloc(WIDE * sizeof *a), *b = malloc(WIDE * sizeof *b);
    for (int steep = 0; steep < 3; steep++) {
        for (int i = 0; i < WIDE; i++)
            logits[i] = floor(20 * rng_uniform(rng_key(7, "logits"), (uint64_t)i)) * (steep == 0   ? 0.01
                                                                                      : steep == 1 ? 0.2
                                                                                                   : 2);
        for (int h = 0; h < countof(how); h++)
            for (uint64_t n = 0; n < 20; n++) {
                struct sampler s = {.temperature = 0.9, .top_k = how[h].top_k, .top_p = how[h].top_p, .seed = 3};
                memcpy(copy, logits, WIDE * sizeof *copy);
                struct tensor t = tensor_2d(copy, DT_F64, 1, WIDE);
                assert_int_equal(sample_token(&s, &t, WIDE, n, a), sample_sorting_all(&s, logits, WIDE, n, b));
            }
    }
    free(logits);
    free(copy);
    free(a);
    free(b);
}

/* Rows added to round the vocabulary up are never drawn. */
static void padding_is_never_sampled(void **state)
{
    (void)state;
    double wide[V + 3] = {0, 0, 0, 0, 0, 50, 50, 50};
    struct candidate scratch[V];
    struct tensor logits = tensor_2d(wide, DT_F64, 1, V + 3);
    struct sampler s = {.temperature = 1, .top_p = 1, .seed = 2};
    for (uint64_t n = 0; n < 200; n++)
        assert_true(sample_token(&s, &logits, V, n, scratch) < V);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cached_decoding_is_bitwise_the_forward_pass_on_ref),
        cmocka_unit_test(cached_decoding_is_the_forward_pass_on_cpu),
        cmocka_unit_test(sequences_side_by_side_are_those_alone),
        cmocka_unit_test(narrow_samplers_take_the_likeliest_token),
        cmocka_unit_test(sampling_follows_the_probabilities),
        cmocka_unit_test(the_same_seed_draws_the_same_tokens),
        cmocka_unit_test(sampling_without_sorting_all_draws_the_same_tokens),
        cmocka_unit_test(padding_is_never_sampled),
    };
    return cmocka_run_group_tests_name("decode", tests, NULL, NULL);
}
