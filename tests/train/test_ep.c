/* train/: what travels to experts on other ranks: a token once to a rank, FP8 codes where asked for. Ranks are threads;
 * a rank only returns, assertions are in the main thread. */
#include "run.h"

#include <math.h>

enum { STEPS = 3, MOST_RANKS = 8 };

struct job {
    const struct config *cfg;
    double loss[STEPS];
    int64_t sent[MOST_RANKS]; /* bytes to other ranks of ep_comm in the last step */
};

static int take_steps(struct trainer *t, void *ctx, struct err *e)
{
    struct job *j = ctx;
    const struct mesh *m = &t->model.mesh;
    int64_t before = 0;
    for (int i = 0; i < STEPS; i++) {
        struct step_result r;
        before = comm_stats(m->ep_comm).bytes;
        TRY(trainer_step(t, &r, e));
        if (m->rank == 0)
            j->loss[i] = r.loss;
    }
    j->sent[m->rank] = comm_stats(m->ep_comm).bytes - before;
    return ST_OK;
}

static int rank_main(struct world *w, void *ctx, struct err *e)
{
    return run_rank(w, ((struct job *)ctx)->cfg, take_steps, ctx, e);
}

/* One rank that plays several sends its rows to itself. */
static int run_alone(struct job *j, struct err *e)
{
    struct world *w = NULL;
    const struct world_opts o = {.kind = COMM_LOOP, .loop_rate = 1e12, .loop_ranks = 8};
    TRY(world_open(&w, &o, e));
    int st = rank_main(w, j, e);
    world_close(w);
    return st;
}

static void run(const struct playground *pg, const char *model, const char *options, int ranks, struct job *j)
{
    struct config c;
    struct err e = {0};
    char all[900];
    snprintf(all, sizeof all, "%s %s %s=%d", model, options, "parallel.ranks", ranks);
    run_config(&c, pg, all);
    *j = (struct job){.cfg = &c};
    struct world_opts o = {.kind = COMM_THREADS, .ranks = ranks, .timeout = 60};
    if (strstr(options, "comm=loop") != NULL)
        assert_ok(run_alone(j, &e), &e);
    else
        assert_ok(world_threads(&o, rank_main, j, &e), &e);
    config_release(&c);
}

#define MODEL                                                                                                          \
    "run.dir= model.pattern=*E-E model.hidden=24 model.heads=2 model.experts=8 model.topk=4 model.expert_ffn=16 "      \
    "model.shared_ffn=8 train.micro_batch=1 train.global_batch=8 train.seq=16 "

/* ---- a token travels once -------------------------------------------------------------------- */

/* With two ranks a token is at most one row for the other one, whichever of its four experts are there. Each microbatch
 * and layer: the row there and back, and the gradients of both; two probabilities and their gradients; the choices of
 * all places; one number of rows. */
static void a_token_travels_once_to_a_rank(void **state)
{
    enum { TOKENS = 16, WIDTH = 24, PER = 4, LAYERS = 2, MICROBATCHES = 4, SIZE = 4 };
    struct playground pg;
    struct job j;
    (void)state;
    playground_open(&pg);
    run(&pg, MODEL, "parallel.ep=2", 2, &j);
    int64_t row = (4 * WIDTH + 2 * PER) * SIZE, most = TOKENS * row + TOKENS * PER * SIZE + SIZE;
    for (int r = 0; r < 2; r++) {
        assert_true(j.sent[r] <= LAYERS * MICROBATCHES * most);
        /* a row for each choice would be two on average */
        assert_true(j.sent[r] > LAYERS * MICROBATCHES * most / 2);
    }
    playground_close(&pg);
}

/* ---- rows as codes --------------------------------------------------------------------------- */

/* In double: codes are those of a token, whoever its experts' ranks are, so meshes agree but for the order of sums. */
static void codes_do_not_depend_on_the_mesh(void **state)
{
    static const struct {
        const char *options;
        int ranks;
    } meshes[] = {{"parallel.comm=loop", 1},
                  {"parallel.ep=2", 2},
                  {"parallel.ep=4 parallel.overlap=ep plan.poison=on", 4},
                  {"parallel.etp=2", 2},
                  {"parallel.ep=2 parallel.etp=2 plan.recompute=full parallel.zero=3", 4},
                  {"parallel.ep=2 parallel.tp=2 parallel.ep_capacity=0.4", 2}};
    struct playground pg;
    struct job plain, first, j;
    (void)state;
    playground_open(&pg);
    run(&pg, MODEL "run.device=ref", "parallel.ep=2", 2, &plain);
    for (int i = 0; i < countof(meshes); i++) {
        char options[200];
        snprintf(options, sizeof options, "parallel.ep_fp8=dispatch %s", meshes[i].options);
        run(&pg, MODEL "run.device=ref", options, meshes[i].ranks, &j);
        first = i == 0 ? j : first;
        for (int k = 0; k < STEPS; k++)
            if (!(fabs(j.loss[k] - first.loss[k]) < 1e-9 * first.loss[k]))
                fail_msg("%s: loss %.15g of step %d, expected %.15g", meshes[i].options, j.loss[k], k, first.loss[k]);
    }
    for (int k = 0; k < STEPS; k++) { /* and they are not the values themselves */
        double apart = fabs(first.loss[k] - plain.loss[k]) / plain.loss[k];
        assert_true(apart > 1e-8 && apart < 1e-2);
    }
    playground_close(&pg);
}

/* Both directions: close to the values themselves, and the same bits twice, on the CPU and in double. */
static void outputs_travel_as_codes(void **state)
{
    static const char *const devices[] = {MODEL "run.device=ref", MODEL "run.device=cpu"};
    struct playground pg;
    struct job plain, there, both, again;
    (void)state;
    playground_open(&pg);
    for (int d = 0; d < 2; d++) {
        run(&pg, devices[d], "parallel.ep=2", 2, &plain);
        run(&pg, devices[d], "parallel.ep=2 parallel.ep_fp8=dispatch", 2, &there);
        run(&pg, devices[d], "parallel.ep=2 parallel.ep_fp8=both", 2, &both);
        run(&pg, devices[d], "parallel.ep=2 parallel.ep_fp8=both", 2, &again);
        assert_memory_equal(both.loss, again.loss, sizeof both.loss);
        for (int k = 0; k < STEPS; k++) {
            assert_true(fabs(both.loss[k] - plain.loss[k]) < 1e-2 * plain.loss[k]);
            assert_true(both.loss[k] != there.loss[k]);
        }
        for (int r = 0; r < 2; r++)
            assert_true(both.sent[r] < there.sent[r] && there.sent[r] < plain.sent[r]);
    }
    playground_close(&pg);
}

/* Experts in FP8 make codes of their input anyway: the same ones of what came as codes, so the first forward pass has
 * the same bits. Weight gradients take codes by 128 tokens, which are made of the values that came. */
static void experts_in_fp8_get_the_codes_they_would_make(void **state)
{
    static const char model[] =
        "run.dir= model.pattern=*E model.hidden=128 model.heads=2 model.experts=4 model.topk=2 model.expert_ffn=256 "
        "gpu.precision=fp8 train.micro_batch=1 train.global_batch=2 train.seq=16 parallel.ep=2";
    struct playground pg;
    struct job off, on, slices;
    (void)state;
    playground_open(&pg);
    run(&pg, model, "", 2, &off);
    run(&pg, model, "parallel.ep_fp8=dispatch", 2, &on);
    assert_true(off.loss[0] == on.loss[0]);
    assert_true(fabs(off.loss[1] - on.loss[1]) < 1e-2 * off.loss[1]);
    /* slices of 128 channels have their own codes */
    run(&pg, model, "train.global_batch=4 parallel.etp=2", 4, &slices);
    assert_true(isfinite(slices.loss[STEPS - 1]));
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_token_travels_once_to_a_rank),
        cmocka_unit_test(codes_do_not_depend_on_the_mesh),
        cmocka_unit_test(outputs_travel_as_codes),
        cmocka_unit_test(experts_in_fp8_get_the_codes_they_would_make),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
