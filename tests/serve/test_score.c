/* The engine: log-probabilities of a long sequence are those of the forward pass, and the likeliest token has the best
 * one's value. */
#include "serve/serve.h"
#include "tiny.h"

enum { LENGTH = 345, VOCAB = 31 }; /* one run of each length of plan at least, with the longest first */

static int32_t token_at(int i) { return (int32_t)rng_below(11, (uint64_t)i, VOCAB); }

/* Logarithm of the softmax at each place, from the training plan. */
static void forward(const char *options, double (*want)[VOCAB])
{
    struct tiny t;
    int32_t tokens[LENGTH], labels[LENGTH], pos[LENGTH], doc[LENGTH] = {0};
    static const double mtp_scale[MTP_MAX_DEPTHS] = {0};
    tiny_open(&t, options, DEV_REF, 1);
    for (int i = 0; i < LENGTH; i++) {
        tokens[i] = token_at(i);
        labels[i] = 1;
        pos[i] = i;
    }
    struct run_info run = {.first_mb = true,
                           .scale = 1,
                           .mtp_scale = mtp_scale,
                           .tokens = tokens,
                           .labels = labels,
                           .pos = pos,
                           .doc_start = doc};
    assert_ok(exec_run(&t.x, &t.train.p, &run, &t.e), &t.e);
    struct tensor logits = model_slot(&t.m, &t.train, t.train.logits);
    for (int i = 0; i < LENGTH; i++) {
        double sum = 0;
        for (int v = 0; v < VOCAB; v++)
            sum += exp(tensor_get(&logits, i * logits.dim[1] + v));
        for (int v = 0; v < VOCAB; v++)
            want[i][v] = tensor_get(&logits, i * logits.dim[1] + v) - log(sum);
    }
    tiny_close(&t);
}

static void check_scores(const struct token_score *scores, double (*want)[VOCAB], int from)
{
    for (int i = from > 0 ? from : 1; i < LENGTH; i++) {
        const double *w = want[i - 1];
        int best = 0;
        for (int v = 1; v < VOCAB; v++)
            best = w[v] > w[best] ? v : best;
        assert_true(fabs(scores[i].logprob - w[token_at(i)]) < 1e-12);
        assert_int_equal(scores[i].n_top, 3);
        assert_int_equal(scores[i].top[0].id, best);
        assert_true(fabs(scores[i].top[0].logprob - w[best]) < 1e-12);
        assert_true(scores[i].top[0].logprob >= scores[i].top[1].logprob &&
                    scores[i].top[1].logprob >= scores[i].top[2].logprob);
        if (best == token_at(i)) /* bit by bit, which clients compare */
            assert_true(scores[i].logprob == scores[i].top[0].logprob);
    }
}

static void scores_are_those_of_the_forward_pass(void **state)
{
    static const char recurrent[] =
        "model.pattern=M*G- model.mamba_head_dim=4 model.mamba_state=5 model.mamba_groups=2 model.mamba_chunk=3 "
        "model.gdn_value_heads=4 model.gdn_key_heads=2 model.gdn_key_dim=5 model.gdn_value_dim=4 model.gdn_chunk=3";
    static const char *const models[] = {
        "model.pattern=*- model.vocab_multiple=8",
        recurrent,
        "model.pattern=+E model.mla_kv_rank=12 model.mla_nope=6 model.mla_rope=4 model.mla_v=5 model.experts=4",
    };
    (void)state;
    static double want[LENGTH][VOCAB];
    static struct token_score scores[LENGTH];
    int32_t tokens[LENGTH + 1];
    for (int i = 0; i <= LENGTH; i++)
        tokens[i] = token_at(i);
    for (int m = 0; m < countof(models); m++) {
        struct config c;
        struct scorer s;
        struct tensor last;
        struct err e = {0};
        char all[512];
        snprintf(all, sizeof all, "%s train.seq=%d train.micro_batch=1 model.vocab=%d run.device=ref", models[m],
                 LENGTH, VOCAB);
        forward(all, want);
        tiny_config(&c, all);
        assert_ok(scorer_open(&s, &c, NULL, LENGTH, &e), &e);
        assert_ok(scorer_begin(&s, tokens, LENGTH, 0, 3, scores, &last, &e), &e);
        assert_true(isnan(scores[0].logprob));
        check_scores(scores, want, 0);
        memset(scores, 0, sizeof scores);
        assert_ok(scorer_begin(&s, tokens, LENGTH, 300, 3, scores, &last, &e), &e);
        assert_int_equal(scores[299].n_top, 0);
        check_scores(scores, want, 300);
        assert_ok(scorer_begin(&s, tokens, LENGTH - 1, 0, 0, NULL, &last, &e), &e);
        assert_ok(scorer_score(&s, &last, tokens[LENGTH - 1], 0, scores, &e), &e);
        assert_true(fabs(scores[0].logprob - want[LENGTH - 2][tokens[LENGTH - 1]]) < 1e-12);
        assert_fails(scorer_begin(&s, tokens, LENGTH + 1, 0, 0, NULL, &last, &e), ST_INVALID, &e,
                     "346 tokens is longer than the 345");
        assert_fails(scorer_begin(&s, tokens, 0, 0, 0, NULL, &last, &e), ST_INVALID, &e, "no tokens");
        tokens[5] = VOCAB;
        assert_fails(scorer_begin(&s, tokens, 9, 0, 0, NULL, &last, &e), ST_INVALID, &e, "token 31 does not exist");
        tokens[5] = token_at(5);
        scorer_close(&s);
        config_release(&c);
    }
}

static void logits_that_are_not_finite_are_an_error(void **state)
{
    (void)state;
    float row[VOCAB] = {0};
    struct config c;
    struct scorer s = {.cfg = &c};
    struct tensor logits = tensor_2d(row, DT_F32, 1, VOCAB);
    struct token_score score;
    struct err e = {0};
    char all[64];
    snprintf(all, sizeof all, "model.vocab=%d", VOCAB);
    tiny_config(&c, all);
    assert_ok(scorer_score(&s, &logits, 3, 2, &score, &e), &e);
    assert_true(fabs(score.logprob + log(VOCAB)) < 1e-12);
    assert_int_equal(score.top[0].id, 0); /* equal ones by id */
    assert_int_equal(score.top[1].id, 1);
    row[9] = NAN;
    assert_fails(scorer_score(&s, &logits, 3, 0, &score, &e), ST_NONFINITE, &e, "not finite");
    row[9] = INFINITY;
    assert_fails(scorer_score(&s, &logits, 3, 0, &score, &e), ST_NONFINITE, &e, "not finite");
    config_release(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_are_those_of_the_forward_pass),
        cmocka_unit_test(logits_that_are_not_finite_are_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
