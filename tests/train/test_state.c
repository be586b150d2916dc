/* train/: moments in bf16 (optim.state). The loss follows that of fp32, a resumed run and every mesh have the same
 * moments, and checkpoints of either type load into either. */
#include "run.h"
#include "train/verify.h"

enum { STEPS = 40 };
#define MODEL "model.pattern=*-*- model.dropout=0 train.lr=1e-2 "

struct run_of {
    double loss[STEPS];
    int64_t moments; /* bytes */
};

static void train(struct run_of *r, const struct playground *pg, const char *options)
{
    struct config c;
    struct trainer t;
    struct err e = {0};
    run_config(&c, pg, options);
    assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
    run_steps(&t, STEPS, r->loss);
    r->moments = t.model.mem.allocated[ARENA_OPTIM];
    trainer_close(&t);
    config_release(&c);
}

static double mean_of_last(const struct run_of *r)
{
    double sum = 0;
    for (int i = STEPS - 10; i < STEPS; i++)
        sum += r->loss[i] / 10;
    return sum;
}

static void the_loss_follows_that_of_fp32(void **state)
{
    (void)state;
    static const char *const devices[] = {"cpu", "ref"};
    struct playground pg;
    playground_open(&pg);
    for (int d = 0; d < countof(devices); d++) {
        struct run_of wide, narrow;
        char options[512];
        snprintf(options, sizeof options, MODEL "run.device=%s", devices[d]);
        train(&wide, &pg, options);
        snprintf(options, sizeof options, MODEL "optim.state=bf16 run.device=%s", devices[d]);
        train(&narrow, &pg, options);
        double a = mean_of_last(&wide), b = mean_of_last(&narrow);
        /* the first update is the same */
        assert_true(wide.loss[0] == narrow.loss[0] && wide.loss[1] == narrow.loss[1]);
        assert_true(wide.loss[STEPS - 1] != narrow.loss[STEPS - 1]);
        if (!(a < 0.75 * wide.loss[0] && fabs(a - b) < 0.01 * a))
            fail_msg("%s: %g at first, %g in the end with fp32 and %g with bf16", devices[d], wide.loss[0], a, b);
        assert_true((d == 0 ? 2 : 4) * narrow.moments <= wide.moments + (d == 0 ? 2 : 4) * 100 * 256);
    }
    playground_close(&pg);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static void save_after(struct config *c, int steps, struct snapshot *at, double *losses)
{
    struct trainer t;
    struct err e = {0};
    assert_ok(trainer_open(&t, c, NULL, true, &e), &e);
    run_steps(&t, steps, losses);
    assert_ok(trainer_save(&t, &e), &e); /* with optim.offload an update is still to be applied */
    snapshot_take(at, &t);
    trainer_close(&t);
}

static void resume(struct trainer *t, const struct config *c, const struct playground *pg)
{
    struct ckpt *from;
    struct err e = {0};
    assert_ok(ckpt_open(&from, pg->run, &e), &e);
    assert_ok(trainer_open(t, c, from, true, &e), &e);
    ckpt_close(from);
}

static void a_resumed_run_draws_the_same(void **state)
{
    (void)state;
    static const char *const cases[] = {"", "optim.offload=all", "optim.offload=moments run.device=ref"};
    for (int k = 0; k < countof(cases); k++) {
        struct playground pg;
        struct config c;
        struct trainer t;
        struct err e = {0};
        struct snapshot half, straight, resumed;
        double losses[12], again[12];
        char options[512];
        playground_open(&pg);
        snprintf(options, sizeof options, MODEL "optim.state=bf16 %s", cases[k]);
        run_config(&c, &pg, options);
        save_after(&c, 6, &half, losses);
        assert_ok(trainer_open(&t, &c, NULL, true, &e), &e);
        run_steps(&t, 12, losses);
        snapshot_take(&straight, &t);
        trainer_close(&t);
        resume(&t, &c, &pg);
        snapshot_take(&resumed, &t);
        assert_true(snapshot_equal(&half, &resumed));
        snapshot_free(&resumed);
        run_steps(&t, 6, again);
        snapshot_take(&resumed, &t);
        assert_true(snapshot_equal(&straight, &resumed));
        assert_memory_equal(losses + 6, again, 6 * sizeof *again);
        trainer_close(&t);
        snapshot_free(&half);
        snapshot_free(&straight);
        snapshot_free(&resumed);
        config_release(&c);
        playground_close(&pg);
    }
}

/* Which type the moments of the newest checkpoint have. */
static enum dtype saved_type(const struct playground *pg)
{
    struct ckpt *from;
    struct err e = {0};
    enum dtype type = DT_NONE;
    assert_ok(ckpt_open(&from, pg->run, &e), &e);
    for (int i = 0; i < ckpt_count(from); i++)
        if (str_starts(ckpt_at(from, i).key, "exp_avg"))
            type = ckpt_at(from, i).view.dtype;
    ckpt_close(from);
    return type;
}

/* Second moments are those of the file, rounded to nearest where they must be. */
static void compare_moments(const struct trainer *t, const struct playground *pg, bool narrow)
{
    struct ckpt *from;
    struct err e = {0};
    int64_t nonzero = 0;
    assert_ok(ckpt_open(&from, pg->run, &e), &e);
    for (int k = 0; k < t->model.params.n; k++) {
        const struct param *p = &t->model.params.list[k].p;
        struct tensor m = optim_state(&t->model, k, 1), saved = tensor_shape(DT_F64, p->rank, p->dim);
        char key[256];
        assert_int_equal(m.dtype, narrow ? DT_BF16 : DT_F32);
        assert_non_null(saved.data = malloc((size_t)tensor_bytes(&saved)));
        snprintf(key, sizeof key, "exp_avg_sq.%s", p->key);
        assert_ok(ckpt_load(from, key, CKPT_OPTIM, &saved, p, &e), &e);
        for (int64_t i = 0; i < tensor_elems(&m); i++) {
            float want = (float)tensor_get(&saved, i);
            assert_true(tensor_get(&m, i) == (double)(narrow ? bf16_to_f32(f32_to_bf16(want)) : want));
            nonzero += want > 0;
        }
        free(saved.data);
    }
    assert_true(nonzero > 1000);
    ckpt_close(from);
}

static void checkpoints_of_either_type_load_into_either(void **state)
{
    (void)state;
    static const char *const types[] = {"fp32", "bf16"};
    for (int to = 0; to < 2; to++) {
        struct playground pg;
        struct config c;
        struct trainer t;
        struct snapshot at;
        double losses[8];
        char options[256];
        playground_open(&pg);
        snprintf(options, sizeof options, MODEL "optim.state=%s", types[!to]);
        run_config(&c, &pg, options);
        save_after(&c, 4, &at, losses);
        config_release(&c);
        assert_int_equal(saved_type(&pg), to ? DT_F32 : DT_BF16);
        snprintf(options, sizeof options, MODEL "optim.state=%s", types[to]);
        run_config(&c, &pg, options);
        resume(&t, &c, &pg);
        compare_moments(&t, &pg, to == 1);
        run_steps(&t, 4, losses + 4);
        assert_true(losses[7] < losses[0]);
        trainer_close(&t);
        snapshot_free(&at);
        config_release(&c);
        playground_close(&pg);
    }
}

/* ---- meshes ---------------------------------------------------------------------------------- */

/* Draws that depended on the rank would differ by 1 / 256 of a moment; sums in another order differ by 1e-15. */
static void every_mesh_draws_the_same(void **state)
{
    (void)state;
    static const char *const variants[] = {"TP2", "TP2 x DP2, zero 2, optimizer state in host memory",
                                           "DP4, zero 3, lanes in random order, poisoned", "DP2 x EP2, zero 2",
                                           "PP2 x VPP2, zero 1, optimizer state in host memory"};
    struct config user, small;
    struct verify *v;
    struct err e = {0};
    char *dir = temp_dir();
    int n;
    const struct verify_case *all = verify_cases(&n);
    assert_ok(config_init(&user, &e), &e);
    assert_ok(config_init(&small, &e), &e);
    assert_ok(tiny_set(&user, "model.pattern=*E*- model.vocab=1000 model.experts=8 optim.state=bf16", &e), &e);
    assert_ok(config_set(&user, "data.train", "no/such/file", NULL, &e), &e);
    assert_ok(config_finish(&user, &e), &e);
    assert_ok(verify_config(&small, &user, dir, &e), &e);
    assert_int_equal(small.optim.state, CFG_OPTIM_STATE_BF16);
    assert_ok(verify_open(&v, &small, &e), &e);
    for (int k = 0; k < countof(variants); k++) {
        struct verify_row row = {.outcome = VERIFY_DIFFERS};
        for (int i = 0; i < n; i++)
            if (strcmp(all[i].name, variants[k]) == 0)
                assert_ok(verify_run(v, &all[i], NULL, &row, &e), &e);
        if (row.outcome != VERIFY_CLOSE && row.outcome != VERIFY_SAME_BITS)
            fail_msg("%s: outcome %d, moments off by %g: %s %s", variants[k], (int)row.outcome, row.saved, row.where,
                     row.why.msg);
    }
    verify_close(v);
    config_release(&user);
    config_release(&small);
    assert_ok(file_remove_tree(dir, &e), &e);
    free(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_loss_follows_that_of_fp32),
        cmocka_unit_test(a_resumed_run_draws_the_same),
        cmocka_unit_test(checkpoints_of_either_type_load_into_either),
        cmocka_unit_test(every_mesh_draws_the_same),
    };
    return cmocka_run_group_tests_name("train: moments in bf16", tests, NULL, NULL);
}
