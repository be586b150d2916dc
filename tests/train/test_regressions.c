/* Mistakes that other trainers of hybrid stacks made, as checks that a run passes and that named
 * mutants, which make the mistake again, do not: the part that needs the trainer. See
 * tests/model/test_regressions.c. */
#include "run.h"

/* ---- D: what reported numbers of routers are divided by -------------------------------------- */

enum { MAX_REPORTED = 64, MICROBATCHES = 3 };

/* What a step reported under one tag, with the numbers of the pattern. */
struct reported {
    int main_e, depth_e, depths, layers; /* E of the main part, of one depth; physical layers */
    int n;
    double value[MAX_REPORTED];
};

static int routers(const struct reported *r) { return r->main_e + r->depth_e * r->depths; }

/* Each router gave 1.0 in each microbatch, so nothing but 1.0 may be said,
 * once for every router. */
static const char *reported_fault(const struct reported *r)
{
    if (r->n != routers(r))
        return "another number of routers";
    for (int i = 0; i < r->n; i++)
        if (r->value[i] != 1.0)
            return "not 1.0";
    return NULL;
}

static void scale(struct reported *r, double by)
{
    for (int i = 0; i < r->n; i++)
        r->value[i] *= by;
}

/* A count that already holds the depths is handed to a reporter that adds them. */
static int mutant_D_divisor(const struct reported *r) { return routers(r) + r->depths; }
static void mutant_D_depths_are_counted_twice(struct reported *r)
{
    scale(r, (double)routers(r) / mutant_D_divisor(r));
}

/* The mean is taken over all layers, of which some have no router. */
static void mutant_D_every_layer_counts(struct reported *r) { scale(r, (double)routers(r) / r->layers); }

/* Sums over microbatches are reported as if there were one. */
static void mutant_D_microbatches_are_not_counted(struct reported *r) { scale(r, MICROBATCHES); }

/* Routers of depths have no entries. */
static void mutant_D_depths_are_left_out(struct reported *r) { r->n -= r->depth_e * r->depths; }

/* The numbers that follow "tag/layer L": in the record of the last step. */
static void read_reported(struct reported *r, const char *text, const char *tag)
{
    char start[64], *end;
    const char *last = text;
    for (const char *at = text; (at = strstr(at, "{\"step\":")) != NULL; at++)
        last = at;
    int n = snprintf(start, sizeof start, "\"%s/layer ", tag);
    assert_true(n > 0 && n < (int)sizeof start);
    for (r->n = 0; (last = strstr(last, start)) != NULL; r->n++) {
        assert_true(r->n < MAX_REPORTED);
        last = strstr(last, "\":");
        assert_non_null(last);
        r->value[r->n] = strtod(last + 2, &end);
        assert_true(end > last + 2 && (*end == ',' || *end == '}'));
    }
}

/* One expert takes every token: the balance loss and the load of the busiest expert are 1 in every
 * microbatch, and 32 tokens sum without rounding. */
static void check_run(const char *pattern, struct reported out[2])
{
    static const char *const tags[2] = {"router aux loss", "expert load max"};
    char options[512], *path, *text;
    struct playground pg;
    struct config c;
    struct trainer t;
    struct err e = {0};
    size_t len;
    playground_open(&pg);
    snprintf(options, sizeof options,
             "model.pattern=%s model.experts=1 model.topk=1 model.aux_loss=0.1 "
             "model.mamba_head_dim=4 model.mamba_state=4 model.mamba_groups=1 "
             "train.micro_batch=2 train.global_batch=6 train.steps=2 train.warmup=1",
             pattern);
    run_config(&c, &pg, options);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    assert_ok(trainer_run(&t, &e), &e);
    assert_int_equal(t.n_micro, MICROBATCHES);
    path = path_join(pg.run, "metrics.jsonl");
    assert_ok(file_read(path, 1 << 20, &text, &len, &e), &e);
    const struct pattern *p = &t.model.pattern;
    for (int k = 0; k < 2; k++) {
        out[k] = (struct reported){.main_e = pattern_map(p->symbols, 'E', NULL),
                                   .depth_e = pattern_map(p->mtp_symbols, 'E', NULL),
                                   .depths = p->n_mtp_depths,
                                   .layers = p->n_layers + p->n_mtp_layers * p->n_mtp_depths};
        read_reported(&out[k], text, tags[k]);
        for (int i = 0; i < t.model.metrics.n; i++) { /* nine digits are printed, all must be right */
            const struct metric *m = &t.model.metrics.m[i];
            const char *slot = t.model.mem.base[ARENA_STATE] + m->offset;
            if (strcmp(m->tag, tags[k]) == 0)
                assert_true(*(const double *)(const void *)slot / (double)t.n_micro == 1.0);
        }
    }
    trainer_close(&t);
    config_release(&c);
    free(text);
    free(path);
    playground_close(&pg);
}

static void ones_in_every_slot_are_reported_as_one(void **state)
{
    (void)state;
    static void (*const mutants[])(struct reported *) = {mutant_D_depths_are_counted_twice,
                                                         mutant_D_depths_are_left_out, mutant_D_every_layer_counts,
                                                         mutant_D_microbatches_are_not_counted};
    static const struct {
        const char *pattern;
        int right, wrong; /* divisors: as it should be, and with depths counted twice */
    } cases[] = {
        {"MEME", 2, 2},       {"EEEEEEEEEEEEE-/*E", 14, 15}, {"MEME/*E/*E", 4, 6},
        {"[*E][*E]", 2, 2},   {"[*-]|[*E]|/*E", 2, 3},       {"M|E|-|E", 2, 2},
        {"*E/-EE/-EE", 5, 7},
    };
    for (int i = 0; i < countof(cases); i++) {
        struct reported r[2];
        check_run(cases[i].pattern, r);
        for (int k = 0; k < 2; k++) {
            const char *fault = reported_fault(&r[k]);
            if (fault != NULL)
                fail_msg("'%s': %s", cases[i].pattern, fault);
            assert_int_equal(r[k].n, cases[i].right);
            assert_int_equal(mutant_D_divisor(&r[k]), cases[i].wrong);
            for (int m = 0; m < countof(mutants); m++) {
                struct reported wrong = r[k];
                mutants[m](&wrong);
                bool needs_mtp = m < 2; /* without depths the first two are right */
                assert_int_equal(reported_fault(&wrong) != NULL, !needs_mtp || r[k].depths > 0);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ones_in_every_slot_are_reported_as_one),
    };
    return cmocka_run_group_tests_name("regressions of the trainer", tests, NULL, NULL);
}
