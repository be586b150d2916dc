/* braid verify: all variants agree for a model with every kind of layer, and what is wrong on purpose is found and named. */
#include "support.h"

#include "train/verify.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

struct fixture {
    struct config user, small;
    struct verify *v;
    struct err e;
    char *dir;
};

static void set(struct config *c, const char *name, const char *value)
{
    struct err e = {0};
    assert_ok(config_set(c, name, value, NULL, &e), &e);
}

static void fixture_open(struct fixture *f, const char *pattern)
{
    *f = (struct fixture){.dir = temp_dir()};
    assert_ok(config_init(&f->user, &f->e), &f->e);
    assert_ok(config_init(&f->small, &f->e), &f->e);
    set(&f->user, "model.pattern", pattern);
    set(&f->user, "model.vocab", "1000");
    set(&f->user, "model.experts", "64");
    set(&f->user, "model.topk", "8");
    set(&f->user, "model.seq_aux_loss", "0.01");
    set(&f->user, "model.shared_ffn", "512");
    set(&f->user, "model.dropout", "0.1");
    set(&f->user, "model.mtp_scale", "0.3");
    set(&f->user, "data.train", "no/such/file");
    assert_ok(config_finish(&f->user, &f->e), &f->e);
}

static void fixture_run(struct fixture *f)
{
    assert_ok(verify_config(&f->small, &f->user, f->dir, &f->e), &f->e);
    assert_ok(verify_open(&f->v, &f->small, &f->e), &f->e);
}

static void fixture_close(struct fixture *f)
{
    verify_close(f->v);
    config_release(&f->user);
    config_release(&f->small);
    assert_ok(file_remove_tree(f->dir, &f->e), &f->e);
    free(f->dir);
}

static const struct verify_case *variant_named(const char *name)
{
    int n;
    const struct verify_case *all = verify_cases(&n);
    for (int i = 0; i < n; i++)
        if (strcmp(all[i].name, name) == 0)
            return &all[i];
    fail_msg("no variant is called %s", name);
    return NULL;
}

/* ---- everything right ------------------------------------------------------------------------------------------------- */

static void every_way(const char *pattern, const char *streams)
{
    struct fixture f;
    int n;
    const struct verify_case *all = verify_cases(&n);
    fixture_open(&f, pattern);
    set(&f.user, "model.mhc_streams", streams);
    fixture_run(&f);
    for (int i = 0; i < n; i++) {
        struct verify_row row;
        if (!verify_applies(&f.small, &all[i]))
            continue;
        assert_ok(verify_run(f.v, &all[i], NULL, &row, &f.e), &f.e);
        if (row.outcome > VERIFY_CLOSE)
            fail_msg("%s: loss %g, norm %g, gradient %g, parameter %g in %s %s", all[i].name, row.loss, row.norm, row.grad, row.param, row.where,
                     row.why.msg);
        if (all[i].ranks == 1) /* one rank, whatever the schedule: the same bits */
            assert_int_equal(row.outcome, VERIFY_SAME_BITS);
    }
    fixture_close(&f);
}

static void all_ways_agree(void **state)
{
    (void)state;
    every_way("M*[ME]G-[*E]/*E", "0");
    every_way("[*E]M-[*E]M-/*E", "4");
    every_way("+-+-", "2");
}

/* ---- balance over a step ---------------------------------------------------------------------------------------------- */

static int no_sum(const struct step_ctx *c)
{
    (void)c;
    return ST_OK;
}

static void without_load_sum(struct trainer *t)
{
    struct graph *g = &t->train.g;
    int found = 0;
    for (int i = 0; i < g->n_nodes; i++)
        if (strstr(g->nodes[i].name, "load_sum") != NULL) {
            g->nodes[i].phase[PH_FWD].fn = no_sum;
            found++;
        }
    assert_true(found > 0);
}

/* Its running mean depends on how many microbatches are known at once; what must be equal is, on every mesh. */
static void balance_over_a_step_agrees(void **state)
{
    (void)state;
    struct fixture f;
    int n;
    const struct verify_case *all = verify_cases(&n);
    fixture_open(&f, "*E-E/*E");
    set(&f.user, "model.global_aux_loss", "0.1");
    set(&f.user, "model.aux_loss", "0.1");
    set(&f.user, "model.router_capacity", "1.1");
    fixture_run(&f);
    for (int i = 0; i < n; i++) {
        struct verify_row row;
        assert_ok(verify_run(f.v, &all[i], NULL, &row, &f.e), &f.e);
        if (row.outcome > VERIFY_CLOSE)
            fail_msg("%s: loss %g, norm %g, gradient %g, parameter %g in %s %s", all[i].name, row.loss, row.norm, row.grad, row.param, row.where,
                     row.why.msg);
    }
    struct verify_row wrong;
    assert_ok(verify_run(f.v, variant_named("DP2"), &(struct verify_sabotage){.trainer = without_load_sum}, &wrong, &f.e), &f.e);
    assert_int_equal(wrong.outcome, VERIFY_DIFFERS);
    fixture_close(&f);
}

/* ---- wrong on purpose -------------------------------------------------------------------------------------------------- */

static void expect_found(const char *pattern, const char *variant, const struct verify_sabotage *wrong, const char *where)
{
    struct fixture f;
    struct verify_row row;
    fixture_open(&f, pattern);
    fixture_run(&f);
    assert_ok(verify_run(f.v, variant_named(variant), NULL, &row, &f.e), &f.e);
    assert_true(row.outcome <= VERIFY_CLOSE);
    assert_ok(verify_run(f.v, variant_named(variant), wrong, &row, &f.e), &f.e);
    assert_int_equal(row.outcome, VERIFY_DIFFERS);
    if (strstr(row.where, where) == NULL)
        fail_msg("the difference is in %s, not in %s", row.where, where);
    fixture_close(&f);
}

static int do_nothing(const struct step_ctx *c)
{
    (void)c;
    return ST_OK;
}

/* The first sum of gradients over ranks that reads a parameter of experts, or one that does not, is left out on all ranks. */
static void leave_out(struct trainer *t, const char *what)
{
    struct graph *g = &t->optim.g;
    for (int i = 0; i < g->n_nodes; i++)
        if (strstr(g->nodes[i].name, what) != NULL) {
            g->nodes[i].phase[PH_FWD].fn = do_nothing;
            return;
        }
    fail_msg("the update has no node like %s", what);
}
static void no_reduction(struct trainer *t) { leave_out(t, "reduce"); }
static void no_gather(struct trainer *t) { leave_out(t, "gather"); }

static void missing_reduction_is_found(void **state)
{
    (void)state;
    expect_found("*-*-", "DP2", &(struct verify_sabotage){.trainer = no_reduction}, "weight, rank");
    expect_found("*E*E", "DP2 x EP2", &(struct verify_sabotage){.trainer = no_reduction}, "weight, rank");
    expect_found("*-*-", "DP4", &(struct verify_sabotage){.trainer = no_gather}, "weight, rank");
}

/* One rank scales its second loss twice as much. */
static void scale_twice(struct config *c, int rank)
{
    if (rank == 1)
        set(c, "model.mtp_scale", "0.6");
}

static void wrong_scale_is_found(void **state)
{
    (void)state;
    expect_found("*-*-/*-", "DP2", &(struct verify_sabotage){.config = scale_twice}, "mtp.layers.0");
}

/* Stage 0 builds what stage 1 should, and the other way round. */
static void swap_segments(struct config *c, int rank)
{
    char text[64];
    (void)rank;
    const char *bar = strchr(c->model.pattern, '|');
    assert_non_null(bar);
    snprintf(text, sizeof text, "%s|%.*s", bar + 1, (int)(bar - c->model.pattern), c->model.pattern);
    set(c, "model.pattern", text);
}

static void swapped_segment_is_found(void **state)
{
    (void)state;
    expect_found("*-M-", "PP2", &(struct verify_sabotage){.config = swap_segments}, "decoder.layers.");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(balance_over_a_step_agrees), cmocka_unit_test(all_ways_agree),         cmocka_unit_test(missing_reduction_is_found), cmocka_unit_test(wrong_scale_is_found),
        cmocka_unit_test(swapped_segment_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
