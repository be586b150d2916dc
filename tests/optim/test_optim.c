/* optim/: the planned update against a scalar AdamW written here. */
#include "optim/optim.h"
#include "tiny.h"

/* A tiny model with its update plan. */
struct update {
    struct tiny t;
    struct optim o;
};

static void update_open(struct update *u, const char *options, enum dev_kind kind)
{
    struct tiny *t = &u->t;
    *u = (struct update){0};
    tiny_config(&t->c, options);
    struct model_plan *plans[] = {&t->train};
    struct model_plan_opts o = {.name = "train", .mode = BUILD_TRAIN, .batch = 2, .seq = t->c.train.seq};
    assert_ok(dev_open(&t->dev, kind, 1, &t->e), &t->e);
    assert_ok(model_init(&t->m, &t->c, &t->dev, &t->e), &t->e);
    assert_ok(model_plan_build(&t->m, &t->train, &o, &t->e), &t->e);
    assert_ok(optim_build(&u->o, &t->m, &t->train, &t->e), &t->e);
    assert_ok(model_commit(&t->m, plans, 1, &t->e), &t->e);
    assert_ok(plan_bind(&u->o.p, &t->m.mem, &t->e), &t->e);
    assert_ok(model_init_params(&t->m, &t->e), &t->e);
    tiny_exec(&t->x, &t->dev, &t->c);
    assert_ok(exec_prepare(&t->x, &t->train.p, &t->e), &t->e);
    assert_ok(exec_prepare(&t->x, &u->o.p, &t->e), &t->e);
}

static void update_close(struct update *u)
{
    optim_release(&u->o);
    tiny_close(&u->t);
}

static void update_run(struct update *u, int64_t step)
{
    double hyper[HYPER_COUNT];
    optim_hyper(&u->o, step, hyper);
    struct run_info run = {.step = step, .first_mb = true, .hyper = hyper};
    assert_ok(exec_run(&u->t.x, &u->o.p, &run, &u->t.e), &u->t.e);
}

static const double *clip_of(const struct update *u)
{
    return (const void *)(u->t.m.mem.base[ARENA_STATE] + u->o.g.slots[u->o.clip].offset);
}

/* ---- scalar AdamW ---------------------------------------------------------------------------- */

struct scalar_adamw {
    double *p, *m, *v;
};

static void scalar_open(struct scalar_adamw *s, const struct model *m)
{
    int64_t n = param_table_elems(&m->params), at = 0;
    double **all[] = {&s->p, &s->m, &s->v};
    for (int i = 0; i < 3; i++)
        assert_non_null(*all[i] = calloc((size_t)n, sizeof(double)));
    for (int k = 0; k < m->params.n; k++) {
        struct tensor p = model_param(m, k);
        for (int64_t i = 0; i < tensor_elems(&p); i++)
            s->p[at++] = tensor_get(&p, i);
    }
}

static double scalar_step(struct scalar_adamw *s, const struct update *u, double lr, int64_t step)
{
    const struct config_train *c = &u->t.c.train;
    const struct model *m = &u->t.m;
    double sum = 0, coef = 1;
    for (int k = 0; k < m->params.n; k++) {
        struct tensor g = model_grad(m, k);
        for (int64_t i = 0; i < tensor_elems(&g); i++)
            sum += tensor_get(&g, i) * tensor_get(&g, i);
    }
    double norm = sqrt(sum);
    if (c->clip > 0 && c->clip / (norm + 1e-6) < 1)
        coef = c->clip / (norm + 1e-6);
    int64_t at = 0;
    for (int k = 0; k < m->params.n; k++) {
        struct tensor g = model_grad(m, k);
        double decay = m->params.list[k].p.rank >= 2 ? c->weight_decay : 0;
        for (int64_t i = 0; i < tensor_elems(&g); i++, at++) {
            double x = tensor_get(&g, i) * coef;
            s->m[at] = c->beta1 * s->m[at] + (1 - c->beta1) * x;
            s->v[at] = c->beta2 * s->v[at] + (1 - c->beta2) * x * x;
            double mean = s->m[at] / (1 - pow(c->beta1, (double)step + 1)),
                   square = s->v[at] / (1 - pow(c->beta2, (double)step + 1));
            s->p[at] -= lr * (mean / (sqrt(square) + c->eps) + decay * s->p[at]);
        }
    }
    return norm;
}

static double worst_difference(const struct scalar_adamw *s, const struct model *m)
{
    double worst = 0;
    int64_t at = 0;
    for (int k = 0; k < m->params.n; k++) {
        struct tensor t[3] = {model_param(m, k), optim_state(m, k, 0), optim_state(m, k, 1)};
        for (int64_t i = 0; i < tensor_elems(&t[0]); i++, at++) {
            const double want[3] = {s->p[at], s->m[at], s->v[at]};
            for (int w = 0; w < 3; w++)
                worst = fmax(worst, fabs(tensor_get(&t[w], i) - want[w]));
        }
    }
    return worst;
}

static void scalar_close(struct scalar_adamw *s)
{
    free(s->p);
    free(s->m);
    free(s->v);
}

static void updates_equal_a_scalar_adamw(void **state)
{
    (void)state;
    static const struct {
        const char *options;
        enum dev_kind kind;
        double bound;
        bool clips;
    } cases[] = {
        {"train.clip=0.05 train.lr=0.01 train.schedule=constant model.bias=on model.qk_norm=on", DEV_REF, 1e-14, true},
        {"train.clip=0 train.lr=0.02 train.schedule=constant train.weight_decay=0.3 model.tied=off", DEV_REF, 1e-14,
         false},
        {"train.clip=1000 train.lr=0.02 train.schedule=constant train.beta1=0 train.beta2=0.5 "
         "train.eps=1e-3",
         DEV_REF, 1e-14, false},
        {"train.clip=0.05 train.lr=0.01 train.schedule=constant plan.poison=on plan.random_lanes=3", DEV_REF, 1e-14,
         true},
        {"train.clip=0.05 train.lr=0.01 train.schedule=constant", DEV_CPU, 3e-6, true},
    };
    for (int k = 0; k < countof(cases); k++) {
        struct update u;
        struct scalar_adamw s;
        update_open(&u, cases[k].options, cases[k].kind);
        scalar_open(&s, &u.t.m);
        for (int64_t step = 0; step < 3; step++) {
            tiny_run(&u.t, 4);
            update_run(&u, step);
            double norm = scalar_step(&s, &u, u.t.c.train.lr, step);
            const double *clip = clip_of(&u);
            assert_true(fabs(clip[CLIP_NORM] - norm) <= 1e-6 * norm && clip[CLIP_SKIP] == 0);
            assert_int_equal(clip[CLIP_COEF] < 1, cases[k].clips);
            double worst = worst_difference(&s, &u.t.m);
            if (!(worst <= cases[k].bound))
                fail_msg("%s, step %d: off by %g", cases[k].options, (int)step, worst);
        }
        scalar_close(&s);
        update_close(&u);
    }
}

static void only_matrices_decay(void **state)
{
    (void)state;
    struct update u;
    update_open(&u,
                "model.bias=on model.qk_norm=on model.attn_sink=learnable model.tied=off "
                "train.clip=0 train.lr=0.5 "
                "train.schedule=constant train.weight_decay=0.25",
                DEV_REF);
    const struct param_table *p = &u.t.m.params;
    int matrices = 0, vectors = 0;
    for (int k = 0; k < p->n; k++) {
        assert_int_equal(p->list[k].p.decay, p->list[k].p.rank >= 2);
        matrices += p->list[k].p.rank >= 2;
        vectors += p->list[k].p.rank < 2;
    }
    assert_true(matrices == 6 && vectors == 10);
    /* With gradients of zero only the decay moves anything. */
    struct scalar_adamw before;
    scalar_open(&before, &u.t.m);
    update_run(&u, 0);
    int64_t at = 0;
    for (int k = 0; k < p->n; k++) {
        struct tensor t = model_param(&u.t.m, k);
        double factor = p->list[k].p.rank >= 2 ? 1 - 0.5 * 0.25 : 1;
        for (int64_t i = 0; i < tensor_elems(&t); i++, at++)
            assert_true(fabs(tensor_get(&t, i) - before.p[at] * factor) <= 1e-15);
    }
    scalar_close(&before);
    update_close(&u);
}

static void hyper_values_follow_the_schedule(void **state)
{
    (void)state;
    struct update u;
    double h[HYPER_COUNT];
    update_open(&u,
                "train.lr=0.1 train.min_lr=0.01 train.warmup=4 train.steps=20 "
                "train.schedule=linear train.beta1=0.9 train.beta2=0.95",
                DEV_REF);
    static const struct {
        int64_t step;
        double lr;
    } cases[] = {{0, 0.025}, {3, 0.1}, {4, 0.1}, {12, 0.055}, {20, 0.01}, {1000, 0.01}};
    for (int i = 0; i < countof(cases); i++) {
        optim_hyper(&u.o, cases[i].step, h);
        assert_true(fabs(h[HYPER_LR] - cases[i].lr) < 1e-15);
        assert_true(fabs(h[HYPER_CORRECT1] - (1 - pow(0.9, (double)cases[i].step + 1))) < 1e-15);
        assert_true(fabs(h[HYPER_CORRECT2] - (1 - pow(0.95, (double)cases[i].step + 1))) < 1e-15);
    }
    update_close(&u);
}

static void a_bad_gradient_or_loss_updates_nothing(void **state)
{
    (void)state;
    for (int what = 0; what < 3; what++) {
        struct update u;
        struct scalar_adamw before;
        update_open(&u, "train.schedule=constant", DEV_REF);
        tiny_run(&u.t, 2);
        update_run(&u, 0);
        scalar_open(&before, &u.t.m);
        tiny_run(&u.t, 2);
        struct tensor g = model_grad(&u.t.m, 2), loss = model_slot(&u.t.m, &u.t.train, u.t.train.loss);
        if (what == 2)
            tensor_set(&loss, 0, NAN);
        else
            tensor_set(&g, 1, what ? INFINITY : NAN);
        struct tensor m1 = optim_state(&u.t.m, 2, 0);
        double moment = tensor_get(&m1, 1);
        update_run(&u, 1);
        assert_true(clip_of(&u)[CLIP_SKIP] == 1);
        assert_true(tensor_get(&m1, 1) == moment);
        int64_t at = 0;
        for (int k = 0; k < u.t.m.params.n; k++) {
            struct tensor t = model_param(&u.t.m, k);
            for (int64_t i = 0; i < tensor_elems(&t); i++)
                assert_true(tensor_get(&t, i) == before.p[at++]);
        }
        scalar_close(&before);
        update_close(&u);
    }
}

static void an_update_without_its_numbers_is_an_error(void **state)
{
    (void)state;
    struct update u;
    update_open(&u, "", DEV_REF);
    struct run_info run = {.first_mb = true};
    assert_fails(exec_run(&u.t.x, &u.o.p, &run, &u.t.e), ST_INTERNAL, &u.t.e, "lacks its hyper-parameters");
    update_close(&u);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(updates_equal_a_scalar_adamw),
        cmocka_unit_test(only_matrices_decay),
        cmocka_unit_test(hyper_values_follow_the_schedule),
        cmocka_unit_test(a_bad_gradient_or_loss_updates_nothing),
        cmocka_unit_test(an_update_without_its_numbers_is_an_error),
    };
    return cmocka_run_group_tests_name("optim", tests, NULL, NULL);
}
