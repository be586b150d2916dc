/* sim/: the best meshes for a number of GPUs. Rows are sorted, fit, and are planned again by hand to the same byte;
 * what is left out is counted; budgets that nothing fits are said to be such. */
#include "sim/search.h"
#include "train/run.h"

#define MODEL                                                                                                          \
    "model.pattern=*E*E model.experts=4 model.topk=2 model.expert_ffn=12 model.tied=off train.micro_batch=1 "          \
    "train.seq=8 "

static void search(struct buf *out, const char *options, int gpus, double budget)
{
    struct config c;
    struct err e = {0};
    struct machine m = machine_h200();
    struct search_opts o = {.gpus = gpus, .budget = budget, .tokens = 1e9, .simulated = 16};
    char text[400];
    snprintf(text, sizeof text, MODEL "%s", options);
    tiny_config(&c, text);
    buf_init(out, 0);
    assert_ok(search_print(&c, &m, &o, out, &e), &e);
    assert_non_null(out->text);
    config_release(&c);
}

/* The options of a row, as tiny_config takes them. */
static void options_of(const char *row, char *out, size_t size)
{
    const char *from = strstr(row, "--");
    size_t n = 0;
    assert_non_null(from);
    for (; *from != '\n' && n + 1 < size; from++)
        if (from[0] != '-' || (n > 0 && out[n - 1] != ' ' && from[1] != '-'))
            out[n++] = *from;
    out[n] = '\0';
}

static int64_t planned(const char *options, int gpus)
{
    struct config c;
    struct rank_place place;
    struct err e = {0};
    char text[600];
    int64_t most = 0;
    snprintf(text, sizeof text, MODEL "train.global_batch=16 parallel.ranks=%d %s", gpus, options);
    tiny_config(&c, text);
    for (int rank = 0; rank < gpus; rank++) {
        struct trainer t = {0};
        assert_ok(place_on_paper(&place, &c, rank, &e), &e);
        assert_ok(trainer_plan_on(&t, &c, &place, true, &e), &e);
        most = max_i64(most, memory_total(&t.model.mem, t.model.mem.planned, false));
        trainer_close(&t);
    }
    config_release(&c);
    return most;
}

static void rows_are_sorted_and_what_they_say(void **state)
{
    (void)state;
    struct buf out;
    double before = 0;
    int rows = 0;
    char bytes[32], options[400];
    search(&out, "train.global_batch=16", 4, 1e9);
    const char *at = strstr(out.text, "options\n");
    assert_non_null(at);
    for (at = strchr(at, '\n') + 1; strchr("0123456789 ", *at) != NULL && *at != '\0';
         at = strchr(at, '\n') + 1, rows++) {
        double ms = atof(at);
        assert_true(ms >= before);
        before = ms;
        options_of(at, options, sizeof options);
        if (strstr(options, "parallel.pp=1 ") == NULL) /* stages need a cut pattern */
            continue;
        human_bytes((double)planned(options, 4), bytes, sizeof bytes);
        const char *end = strchr(at, '\n'), *found = strstr(at, bytes);
        if (found == NULL || found > end)
            fail_msg("%s: planned by hand it needs %s, not %.*s", options, bytes, (int)(end - at), at);
    }
    assert_true(rows >= 4);
    buf_release(&out);
}

static void what_cannot_be_is_left_out_with_the_reason(void **state)
{
    (void)state;
    struct buf out;
    search(&out, "train.global_batch=6", 4, 1e9);
    assert_null(strstr(out.text, "left out: 0 that"));
    buf_release(&out);
    search(&out, "train.global_batch=16", 8, 1e9); /* four items cannot be eight stages */
    assert_null(strstr(out.text, ", 0 with more stages"));
    buf_release(&out);
    search(&out, "train.global_batch=16", 4, 1e9); /* by a rule, whose words are the reason */
    assert_non_null(strstr(out.text, ": parallel.zero = 3 gathers the weights of a stage anew"));
    buf_release(&out);
    search(&out, "train.global_batch=16 model.kv_heads=2 model.heads=2", 4, 1e9);
    const char *heads = strstr(out.text, "refused by rules");
    assert_non_null(heads);
    assert_null(strstr(strstr(out.text, "options\n"), "--parallel.tp=4"));
    buf_release(&out);
}

/* The smallest plan by hand: nothing that the table could have shown instead needs less. */
static void a_budget_that_nothing_fits_gets_the_smallest_that_works(void **state)
{
    (void)state;
    struct buf out;
    char options[400], bytes[32];
    search(&out, "train.global_batch=16", 4, 100);
    const char *at = strstr(out.text, "no mesh of so many GPUs fits 100 B; the smallest needs ");
    assert_non_null(at);
    const char *row = strchr(at, '\n') + 1;
    options_of(row, options, sizeof options);
    if (strstr(options, "parallel.pp=1 ") != NULL) {
        human_bytes((double)planned(options, 4), bytes, sizeof bytes);
        assert_non_null(strstr(at, bytes));
        assert_true(planned(options, 4) <= planned("parallel.zero=3 train.micro_batch=1 plan.recompute=full", 4));
    }
    buf_release(&out);
    struct buf again; /* with as much as it needs, it is found */
    search(&again, "train.global_batch=16", 4, 1.0001 * (double)planned(options, 4));
    assert_null(strstr(again.text, "no mesh of so many"));
    assert_non_null(strstr(again.text, "--parallel.pp="));
    buf_release(&again);
}

/* What the given options keep on the host counts in estimates and plans: as much less as by hand. */
static void given_offload_is_honoured(void **state)
{
    (void)state;
    struct buf out;
    char bytes[32], options[400];
    search(&out, "train.global_batch=16 optim.offload=moments", 1, 1e9);
    const char *row = strstr(out.text, "options\n");
    assert_non_null(row);
    options_of(row + strlen("options\n"), options, sizeof options);
    int64_t without = planned(options, 1);
    snprintf(options + strlen(options), sizeof options - strlen(options), " optim.offload=moments");
    int64_t with = planned(options, 1);
    assert_true(with < without);
    human_bytes((double)with, bytes, sizeof bytes);
    assert_non_null(strstr(row, bytes));
    buf_release(&out);
}

/* Every way to divide the ranks is among the attempts, and those that are shown are planned by hand in the first test.
 * */
static void tensor_and_context_parallelism_are_searched(void **state)
{
    (void)state;
    struct buf out;
    search(&out, "train.global_batch=1 model.pattern=*-*- train.seq=8192 model.vocab_multiple=4", 4, 1e12); /* dp 1 */
    const char *rows = strstr(out.text, "options\n");
    assert_non_null(rows);
    assert_non_null(strstr(rows, "--parallel.tp=4"));
    assert_non_null(strstr(rows, "--parallel.cp=4"));
    buf_release(&out);
    search(&out, "train.global_batch=16 train.seq=512 model.experts=2 model.expert_ffn=4096 model.vocab_multiple=4", 4,
           1e12);
    assert_non_null(strstr(strstr(out.text, "options\n"), "--parallel.etp=4"));
    buf_release(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_sorted_and_what_they_say),
        cmocka_unit_test(what_cannot_be_is_left_out_with_the_reason),
        cmocka_unit_test(a_budget_that_nothing_fits_gets_the_smallest_that_works),
        cmocka_unit_test(given_offload_is_honoured),
        cmocka_unit_test(tensor_and_context_parallelism_are_searched),
    };
    return cmocka_run_group_tests_name("sim: search", tests, NULL, NULL);
}
