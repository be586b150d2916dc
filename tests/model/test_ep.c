/* Experts on several ranks: loss and every gradient against one rank that takes the same microbatches, with ranks as
 * threads; experts split, copied, empty; every router mode; buffers too small are noticed; shards start from the same
 * values. */
#include "tiny.h"
#include "ops/router/router.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RANKS = 6, MICROS = 2 };

struct shared {
    const char *options;
    enum dev_kind kind;
    int ranks, ep;
    int64_t ep_rows;
    bool loop; /* exchange nodes even for one rank */
    /* what the ranks found */
    double loss[MAX_RANKS], wanted[MAX_RANKS];
    struct param_table table; /* of one rank alone: keys and whole shapes */
    double **grad, **value;   /* [param]: summed over ranks, assembled from shards; the parameter itself */
};

/* Opens, runs and adds what it has to the shared sums: in order of ranks, so that the result is the same every time. */
static int open_on(struct tiny *t, const struct shared *s, const struct mesh *mesh, struct err *e)
{
    struct model_plan *plans[] = {&t->train};
    struct model_plan_opts o = {
        .name = "train", .mode = BUILD_TRAIN, .batch = t->c.train.micro_batch, .seq = t->c.train.seq};
    TRY(dev_open(&t->dev, s->kind, 1, e));
    TRY(model_init(&t->m, &t->c, &t->dev, e));
    t->m.mesh = *mesh;
    TRY(model_plan_build(&t->m, &t->train, &o, e));
    TRY(model_commit(&t->m, plans, 1, e));
    TRY(model_init_params(&t->m, e));
    memset(t->m.mem.base[ARENA_FRAME], 0xFF, (size_t)t->m.mem.allocated[ARENA_FRAME]);
    memset(t->m.mem.base[ARENA_WORK], 0xFF, (size_t)t->m.mem.allocated[ARENA_WORK]);
    tiny_exec(&t->x, &t->dev, &t->c);
    return exec_prepare(&t->x, &t->train.p, e);
}

static int run_on(struct tiny *t, const struct mesh *mesh, struct err *e)
{
    int64_t size = t->c.train.micro_batch, share = size * mesh->dp;
    for (int64_t m = 0; m < MICROS * (MAX_RANKS / mesh->dp); m++) {
        struct tiny_batch b;
        int64_t first = m * share + mesh->dp_rank * size;
        static const double mtp_scale[MTP_MAX_DEPTHS] = {1.0 / 48, 1.0 / 56};
        tiny_batch_fill(&b, &t->c, first, size);
        struct run_info run = {.step = 3,
                               .first_sample = first,
                               .first_mb = m == 0,
                               .scale = 1.0 / 32,
                               .mtp_scale = mtp_scale,
                               .mb_share = 1.0 / (MICROS * MAX_RANKS),
                               .tokens = b.tokens,
                               .labels = b.labels,
                               .pos = b.pos,
                               .doc_start = b.doc};
        int st = exec_run(&t->x, &t->train.p, &run, e);
        tiny_batch_release(&b);
        TRY(st);
    }
    return ST_OK;
}

static void take_param(struct shared *s, const struct tiny *t, int k)
{
    const struct param *p = &t->m.params.list[k].p;
    int at = param_find(&s->table, p->key);
    int64_t n = param_elems(p), first = p->dim[0] > 0 ? p->shard.first * (n / p->dim[0]) : 0;
    struct tensor v = model_param(&t->m, k);
    assert_true(at >= 0);
    for (int64_t i = 0; i < n; i++)
        s->value[at][first + i] = tensor_get(&v, i);
    if (p->buffer)
        return;
    struct tensor g = model_grad(&t->m, k);
    for (int64_t i = 0; i < n; i++)
        s->grad[at][first + i] += tensor_get(&g, i);
}

static int rank_main(struct world *w, void *ctx, struct err *e)
{
    struct shared *s = ctx;
    struct mesh mesh;
    struct tiny t = {0};
    TRY(mesh_open(&mesh, &(struct mesh_sizes){.pp = 1, .vpp = 1, .ep = s->ep}, w, e));
    mesh.ep_rows = s->ep_rows;
    mesh.ep_nodes = s->loop;
    tiny_config(&t.c, s->options);
    int st = open_on(&t, s, &mesh, e);
    if (st == ST_OK)
        st = run_on(&t, &mesh, e);
    for (int r = 0; st == ST_OK && r < mesh.world; r++) {
        st = comm_barrier(mesh.all, "turns", e);
        if (r != mesh.rank || st != ST_OK)
            continue;
        s->loss[r] = tiny_loss(&t);
        for (int k = 0; k < t.m.params.n; k++)
            take_param(s, &t, k);
        for (int k = 0; k < t.m.metrics.n; k++) {
            const struct metric *m = &t.m.metrics.m[k];
            double need = *(const double *)(const void *)(t.m.mem.base[ARENA_STATE] + m->offset);
            if (m->room > 0 && need > (double)m->room)
                s->wanted[r] = fmax(s->wanted[r], need);
        }
    }
    if (st == ST_OK)
        st = comm_barrier(mesh.all, "turns", e);
    tiny_close(&t);
    mesh_close(&mesh);
    return st;
}

static void shared_open(struct shared *s)
{
    struct tiny t;
    param_table_init(&s->table);
    tiny_open(&t, s->options, s->kind, 1);
    size_t n = (size_t)t.m.params.n;
    assert_non_null(s->grad = calloc(n, sizeof *s->grad));
    assert_non_null(s->value = calloc(n, sizeof *s->value));
    for (int k = 0; k < t.m.params.n; k++) {
        struct err e = {0};
        int index;
        bool is_new;
        assert_ok(param_add(&s->table, &t.m.params.list[k].p, &index, &is_new, &e), &e);
        assert_non_null(s->grad[k] = calloc((size_t)param_elems(&t.m.params.list[k].p), sizeof(double)));
        assert_non_null(s->value[k] = calloc((size_t)param_elems(&t.m.params.list[k].p), sizeof(double)));
    }
    tiny_close(&t);
}

static void shared_close(struct shared *s)
{
    for (int k = 0; k < s->table.n; k++) {
        free(s->grad[k]);
        free(s->value[k]);
    }
    free(s->grad);
    free(s->value);
    param_table_release(&s->table);
}

static void run_ranks(struct shared *s)
{
    struct err e = {0};
    struct world_opts o = {.kind = COMM_THREADS, .ranks = s->ranks, .timeout = 60};
    shared_open(s);
    assert_ok(world_threads(&o, rank_main, s, &e), &e);
}

static double total_loss(const struct shared *s)
{
    double sum = 0;
    for (int r = 0; r < s->ranks; r++)
        sum += s->loss[r];
    return sum;
}

/* Largest difference over the largest value of the two. */
static double distance(const double *a, const double *b, int64_t n)
{
    double most = 0, size = 1e-30;
    for (int64_t i = 0; i < n; i++) {
        most = fmax(most, fabs(a[i] - b[i]));
        size = fmax(size, fmax(fabs(a[i]), fabs(b[i])));
        if (isnan(a[i]) || isnan(b[i]))
            return INFINITY;
    }
    return most / size;
}

static void compare(const struct shared *one, const struct shared *many, double allowed)
{
    assert_true(fabs(total_loss(one) - total_loss(many)) <= allowed * fabs(total_loss(one)));
    for (int k = 0; k < one->table.n; k++) {
        const struct param *p = &one->table.list[k].p;
        int64_t n = param_elems(p);
        assert_memory_equal(one->value[k], many->value[k], (size_t)n * sizeof(double));
        double d = distance(one->grad[k], many->grad[k], n);
        if (d > allowed)
            fail_msg("%s, %d ranks, ep %d: gradient of %s differs by %g of its size", many->options, many->ranks,
                     many->ep, p->key, d);
    }
}

static const char *const models[] = {
    "model.pattern=*E model.experts=6 model.topk=2 model.seq_aux_loss=0.1 model.router_z_loss=0.01 "
    "model.expert_bias=on",
    "model.pattern=*E-E model.experts=6 model.topk=3 model.shared_ffn=8 model.shared_gate=on model.dropout=0.1 "
    "plan.recompute=moe.rows,moe.act",
    "model.pattern=E*E model.experts=6 model.topk=2 model.router_score=sigmoid model.router_bias=on "
    "model.router_scale=2.5 model.router_hash_layers=1",
    "model.pattern=*E model.experts=6 model.topk=2 model.router_capacity=0.7 model.aux_loss=0.1 model.act=swiglu "
    "model.glu_interleave=2 model.ffn=12",
    "model.pattern=[*E]-/*E model.experts=6 model.topk=2 model.mhc_streams=2 model.mhc_gating=0.7 model.mtp_scale=0.5 "
    "plan.delay_dw=on plan.offload=* plan.offload_min=0",
    "model.pattern=*E model.experts=6 model.topk=6", /* every rank gets every row */
};

static void gradients_equal_those_of_one_rank(void **state)
{
    (void)state;
    static const int grids[][2] = {{2, 2}, {3, 3}, {2, 1}, {6, 2}, {6, 6}, {6, 3}};
    for (int m = 0; m < countof(models); m++) {
        struct shared one = {.options = models[m], .kind = DEV_REF, .ranks = 1, .ep = 1};
        run_ranks(&one);
        for (int g = 0; g < countof(grids); g++) {
            struct shared many = {.options = models[m], .kind = DEV_REF, .ranks = grids[g][0], .ep = grids[g][1]};
            run_ranks(&many);
            compare(&one, &many, 1e-11);
            shared_close(&many);
        }
        shared_close(&one);
    }
}

static void single_precision_stays_close(void **state)
{
    (void)state;
    struct shared one = {.options = models[1], .kind = DEV_CPU, .ranks = 1, .ep = 1},
                  many = {.options = models[1], .kind = DEV_CPU, .ranks = 3, .ep = 3};
    run_ranks(&one);
    run_ranks(&many);
    compare(&one, &many, 2e-5);
    shared_close(&one);
    shared_close(&many);
}

/* The exchange alone: one rank, sent to itself, changes no bit. */
static void exchange_with_itself_changes_nothing(void **state)
{
    (void)state;
    struct shared plain = {.options = models[0], .kind = DEV_CPU, .ranks = 1, .ep = 1},
                  loop = {.options = models[0], .kind = DEV_CPU, .ranks = 1, .ep = 1, .loop = true};
    run_ranks(&plain);
    run_ranks(&loop);
    compare(&plain, &loop, 0);
    shared_close(&plain);
    shared_close(&loop);
}

static void full_buffers_are_noticed(void **state)
{
    (void)state;
    struct shared small = {.options = models[0], .kind = DEV_REF, .ranks = 2, .ep = 2, .ep_rows = 3},
                  large = {.options = models[0], .kind = DEV_REF, .ranks = 2, .ep = 2, .ep_rows = 16 * 2};
    run_ranks(&small);
    run_ranks(&large);
    for (int r = 0; r < 2; r++) {
        assert_true(small.wanted[r] > 3);
        assert_true(large.wanted[r] == 0);
    }
    shared_close(&small);
    shared_close(&large);
}

/* ---- bug G: the weight gradient of shared experts among those of the routed ones ------------- */

/* They run beside the router, in front of the dispatch, so what their weight gradients read comes only with the
 * backward pass of that part:
 * after that of the dispatch, long after the experts' own. */
static int step_at(const struct order *o, const struct graph *g, const char *name, enum phase_id ph, int mb)
{
    for (int i = 0; i < o->n; i++)
        if (o->list[i].phase == ph && o->list[i].mb == mb && strcmp(g->nodes[o->list[i].node].name, name) == 0)
            return i;
    fail_msg("no step %s (%s) of microbatch %d", name, phase_name(ph), mb);
    return -1;
}

static void mutant_G_shared_dw_with_the_experts(void **state)
{
    (void)state;
    struct tiny t;
    tiny_open(&t, "model.pattern=*E model.experts=4 model.shared_ffn=8 plan.delay_dw=on", DEV_REF, 1);
    struct mesh mesh = mesh_alone();
    mesh.ep_nodes = true;
    model_plan_release(&t.train);
    t.m.mesh = mesh;
    struct model_plan_opts o = {.name = "train", .mode = BUILD_TRAIN, .batch = 2, .seq = 8};
    assert_ok(model_plan_build(&t.m, &t.train, &o, &t.e), &t.e);
    const struct graph *g = &t.train.g;
    struct order order = {0};
    struct schedule_opts s = {.pp = 1, .vpp = 1, .n_mb = 3, .overlap = OVERLAP_EP, .delay_dw = true};
    assert_ok(schedule_step(g, &s, &order, &t.e), &t.e);
    for (int mb = 0; mb < 3; mb++) {
        int dw = step_at(&order, g, "1.moe.shared_fc2", PH_DW, mb);
        assert_true(step_at(&order, g, "1.moe.dispatch", PH_BWD, mb) < dw);
        assert_true(step_at(&order, g, "1.moe.fc1", PH_DW, mb) < dw);
    }
    struct plan right, wrong;
    assert_ok(plan_build(&right, "right", g, &order, &t.e), &t.e);
    plan_release(&right);
    int from = step_at(&order, g, "1.moe.shared_fc1", PH_DW, 1), to = step_at(&order, g, "1.moe.fc1", PH_DW, 1);
    struct step_ref moved = order.list[from];
    memmove(order.list + to + 1, order.list + to, (size_t)(from - to) * sizeof moved);
    order.list[to] = moved;
    assert_fails(plan_build(&wrong, "wrong", g, &order, &t.e), ST_INTERNAL, &t.e, "which nothing has written yet");
    plan_release(&wrong);
    order_release(&order);
    tiny_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_equal_those_of_one_rank),    cmocka_unit_test(single_precision_stays_close),
        cmocka_unit_test(exchange_with_itself_changes_nothing), cmocka_unit_test(full_buffers_are_noticed),
        cmocka_unit_test(mutant_G_shared_dw_with_the_experts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
