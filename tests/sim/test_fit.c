/* sim/: the fastest plan that fits. It fits, to the byte of the planner; less memory never gives a faster plan; nothing
 * that was tried and fits is faster; and what cannot fit says what would. */
#include "sim/fit.h"
#include "train/run.h"

#define MODEL "model.pattern=*-*-*-*- model.hidden=32 model.ffn=96 model.vocab=64 train.seq=64 train.micro_batch=4 "

/* Copies to the host take about as long as what they hide behind. */
static struct machine small_machine(void)
{
    return (struct machine){.flops = 1e9,
                            .attention = 1e9,
                            .attention_back = 1e9,
                            .bandwidth = 1e9,
                            .node = 1e-6,
                            .link = 1e9,
                            .inner = 1e9,
                            .gpus = 8,
                            .host = 0.3e9,
                            .memory = 1e9};
}

static int64_t planned(const struct config *c)
{
    struct trainer t = {0};
    struct err e = {0};
    assert_ok(trainer_plan(&t, c, true, &e), &e);
    int64_t bytes = memory_total(&t.model.mem, t.model.mem.planned, false);
    trainer_close(&t);
    return bytes;
}

static void what_is_chosen_fits_and_is_the_fastest(void **state)
{
    (void)state;
    static const char *const models[] = {MODEL "train.global_batch=8 ",
                                         MODEL "model.mhc_streams=4 train.global_batch=4 ",
                                         MODEL "model.pattern=*E*E model.experts=4 train.global_batch=8 "};
    static const double shares[] = {1.01, 0.8, 0.6, 0.45};
    struct machine m = small_machine();
    for (int k = 0; k < countof(models); k++) {
        struct config c;
        struct err e = {0};
        char options[400];
        double before = 0;
        snprintf(options, sizeof options, "%s plan.offload_min=0", models[k]);
        tiny_config(&c, options);
        int64_t whole = planned(&c), fitted = 0;
        for (int i = 0; i < countof(shares); i++) {
            struct fit f;
            struct fit_opts o = {.budget = shares[i] * (double)whole, .keep_micro = true};
            assert_ok(fit_search(&f, &c, &m, &o, &e), &e);
            assert_int_equal(f.as_given.bytes, whole);
            assert_int_equal(f.as_given.fits, i == 0);
            if (i == 0) { /* as it is: nothing is looked for */
                before = f.as_given.seconds;
            } else if (f.n > 0) {
                fitted++;
                assert_true((double)f.row[0].bytes <= o.budget);
                assert_true(f.row[0].seconds >= before * (1 - 1e-9)); /* less memory is not faster */
                before = f.row[0].seconds;
                for (int r = 1; r < f.n; r++)
                    assert_true(f.row[r].seconds >= f.row[0].seconds && (double)f.row[r].bytes <= o.budget);
                struct config chosen;
                tiny_config(&chosen, options);
                assert_ok(fit_apply(&f.row[0], &chosen, &e), &e);
                assert_int_equal(planned(&chosen), f.row[0].bytes); /* exact */
                config_release(&chosen);
            } else {
                assert_true((double)f.smallest.bytes > o.budget);
            }
            fit_release(&f);
        }
        assert_true(fitted > 0);
        config_release(&c);
    }
}

static void microbatches_are_chosen_and_the_global_batch_stays(void **state)
{
    (void)state;
    struct config c;
    struct fit f;
    struct err e = {0};
    struct machine m = small_machine();
    tiny_config(&c, MODEL "train.global_batch=8 train.micro_batch=8 plan.offload_min=0");
    struct fit_opts o = {.budget = 0.4 * (double)planned(&c), .counts_host = true};
    assert_ok(fit_search(&f, &c, &m, &o, &e), &e);
    assert_true(f.n > 0);
    assert_true(f.row[0].micro_batch < 8 && 8 % f.row[0].micro_batch == 0);
    for (int i = 0; i < f.n; i++)
        assert_true((double)(f.row[i].bytes) <= o.budget);
    assert_ok(fit_apply(&f.row[0], &c, &e), &e);
    assert_int_equal(c.train.global_batch, 8);
    assert_true((double)planned(&c) <= o.budget);
    fit_release(&f);
    config_release(&c);
}

static void what_cannot_fit_names_the_smallest_memory_that_works(void **state)
{
    (void)state;
    struct config c;
    struct fit f;
    struct err e = {0};
    struct machine m = small_machine();
    struct buf text;
    tiny_config(&c, MODEL "train.global_batch=4");
    struct fit_opts o = {.budget = 1000, .name = "1000 bytes"};
    assert_ok(fit_search(&f, &c, &m, &o, &e), &e);
    assert_int_equal(f.n, 0);
    int64_t least = f.smallest.bytes;
    assert_true(least > 1000 && least < f.as_given.bytes);
    buf_init(&text, 0);
    fit_verdict(&f, &c, &o, &text);
    assert_non_null(strstr(text.text, "nothing fits; the smallest memory that works is"));
    fit_release(&f);
    o.budget = (double)least; /* and that works */
    assert_ok(fit_search(&f, &c, &m, &o, &e), &e);
    assert_true(f.n > 0);
    buf_clear(&text);
    fit_print(&f, &c, &o, &text);
    assert_non_null(strstr(text.text, "--train.micro_batch=1 --train.global_batch=4"));
    fit_release(&f);
    buf_release(&text);
    config_release(&c);
}

/* Compressed attention, experts and hyper-connections save more kinds of activations than are tried one by one. */
static void models_with_many_kinds_of_activations_are_fitted(void **state)
{
    (void)state;
    struct config c;
    struct fit f;
    struct err e = {0};
    struct machine m = small_machine();
    tiny_config(&c, "model.pattern=[WE][CE][HE]/WE model.hidden=32 model.heads=4 model.mla_q_rank=16 model.mla_v=16 "
                    "model.mla_rope=8 "
                    "model.csa_window_size=8 model.compress_rate_csa=4 model.compress_rate_hca=16 model.o_groups=2 "
                    "model.o_lora_rank=16 model.dsa_indexer_n_heads=4 model.dsa_indexer_head_dim=16 "
                    "model.dsa_indexer_topk=4 "
                    "model.experts=4 model.topk=2 model.expert_ffn=64 model.mhc_streams=4 train.seq=64 "
                    "train.micro_batch=2");
    struct fit_opts o = {.budget = 1000, .counts_host = true, .keep_micro = true};
    assert_ok(fit_search(&f, &c, &m, &o, &e), &e);
    int64_t least = f.smallest.bytes;
    fit_release(&f);
    assert_ok(config_set(&c, "plan.recompute", "full", NULL, &e), &e);
    assert_true(least <= planned(&c)); /* what anybody would try by hand is no smaller */
    assert_ok(config_set(&c, "plan.recompute_block", "auto", NULL, &e), &e);
    assert_true(least <= planned(&c));
    config_release(&c);
}

static void amounts_of_memory_have_units(void **state)
{
    (void)state;
    double v;
    assert_true(config_memory("80", &v) && v == 80e9);
    assert_true(config_memory("80GB", &v) && v == 80e9);
    assert_true(config_memory("1.5GiB", &v) && v == 1.5 * 0x1p30);
    assert_true(config_memory("900MiB", &v) && v == 900 * 0x1p20);
    assert_true(config_memory("0.5TB", &v) && v == 0.5e12);
    static const char *const bad[] = {"", "GB", "80 GB", "80KB", "-1", "0", "1e3", "80GBs", "1..2", "99999999"};
    for (int i = 0; i < countof(bad); i++)
        assert_false(config_memory(bad[i], &v));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_chosen_fits_and_is_the_fastest),
        cmocka_unit_test(microbatches_are_chosen_and_the_global_batch_stays),
        cmocka_unit_test(what_cannot_fit_names_the_smallest_memory_that_works),
        cmocka_unit_test(models_with_many_kinds_of_activations_are_fitted),
        cmocka_unit_test(amounts_of_memory_have_units),
    };
    return cmocka_run_group_tests_name("sim: fit", tests, NULL, NULL);
}
