/* train/: many ranks, as threads of this process, against one rank: losses, updates, checkpoints of any mesh on any
 * other, resuming, stopping, failing. Assertions stay in the main thread: a rank only returns. */
#include "run.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>

/* ---- meshes ---------------------------------------------------------------------------------- */

/* A mesh is a number of ranks and the options that divide them. All have the same global batch and microbatch. */
struct mesh_case {
    const char *name;
    int ranks;
    const char *options;
};

/* A model that can be divided in every way the meshes ask for. */
struct model_case {
    const char *name, *options;
    const struct mesh_case *mesh;
    int n_meshes;
};

static const struct mesh_case dense_meshes[] = {
    {"one", 1, ""},
    {"dp2", 2, "parallel.bucket_mb=0.001"},
    {"dp4", 4, ""},
    {"dp4 off", 4, "parallel.zero=off"},
    {"dp3 zero 3", 3, "parallel.zero=3 parallel.bucket_mb=0.004"},
    {"pp2", 2, "parallel.pp=2"},
    {"pp2 dp2 zero 2", 4, "parallel.pp=2 parallel.zero=2"},
};
static const struct mesh_case expert_meshes[] = {
    {"one", 1, ""},
    {"dp2", 2, "parallel.bucket_mb=0.002"},
    {"dp4", 4, "parallel.zero=off"},
    {"ep2", 2, "parallel.ep=2"},
    {"ep2 of 4 zero 3", 4, "parallel.ep=2 parallel.zero=3 parallel.bucket_mb=0.002"},
    {"ep4 tight", 4, "parallel.ep=4 parallel.ep_capacity=0.3"}, /* too little: buffers grow and the step is repeated */
    {"pp2 ep2", 4, "parallel.pp=2 parallel.ep=2"},
};
/* Ranks that divide the rows of a microbatch report the losses of routers for their own. */
static const struct mesh_case row_meshes[] = {
    {"one", 1, ""},
    {"tp2 ep4 zero 3", 4, "parallel.tp=2 parallel.ep=4 parallel.zero=3"},
    {"etp2 ep2 zero 2", 4, "parallel.etp=2 parallel.ep=2 parallel.zero=2"},
};
/* Embedding and head share a weight, which both ends of a pipeline hold, as do depths of prediction. */
static const struct mesh_case deep_meshes[] = {
    {"one", 1, ""},
    {"pp2", 2, "parallel.pp=2"},
    {"pp2 dp2", 4, "parallel.pp=2 parallel.zero=off"},
    {"pp2 vpp2", 2, "parallel.pp=2 model.pattern=*|-|*|-/*-"},
    {"dp2 zero 3", 2, "parallel.zero=3"},
    {"pp2 dp2 zero 2", 4, "parallel.pp=2 parallel.zero=2"},
    {"tp2", 2, "parallel.tp=2"}, /* two ranks share keys and values */
    {"tp2 pp2 zero 2", 4, "parallel.tp=2 parallel.pp=2 parallel.zero=2"},
};
static const struct model_case models[] = {
    {"odd sizes", "model.pattern=*-*- model.hidden=18 model.heads=3 model.ffn=25 model.bias=on model.qk_norm=on",
     dense_meshes, countof(dense_meshes)},
    {"experts",
     "model.pattern=*E-E model.experts=4 model.topk=2 model.expert_ffn=12 model.router_score=sigmoid "
     "model.router_bias=on model.seq_aux_loss=0.01",
     expert_meshes, countof(expert_meshes)},
    /* Documents within samples: how many labels count differs from rank to rank. */
    {"deep",
     "model.pattern=*-*-/*- model.tied=on model.mtp_scale=0.3 model.dropout=0.1 data.eod=on data.eod_mask=on "
     "model.vocab=260 model.kv_heads=1",
     deep_meshes, countof(deep_meshes)},
    {"experts and rows",
     "model.pattern=*E-E model.experts=4 model.topk=2 model.expert_ffn=12 model.shared_ffn=8 model.shared_gate=on "
     "model.router_score=sigmoid model.router_bias=on model.aux_loss=0.01 model.expert_bias=on",
     row_meshes, countof(row_meshes)},
};

static const char *const common =
    "train.micro_batch=1 train.global_batch=12 train.seq=8 train.clip=0.5 run.save_every=0 run.keep=0";

/* ---- running --------------------------------------------------------------------------------- */

enum { MOST_STEPS = 32 };
struct job {
    const struct config *cfg;
    const char *from; /* run folder or NULL */
    int steps;        /* taken here; -1: trainer_run */
    bool save, replan;
    bool uneven;     /* weights grow from row to row */
    int poison_rank; /* a parameter of this rank becomes NaN; -1: of none */
    /* what came out */
    double loss[MOST_STEPS], norm[MOST_STEPS], eval, bits;
    int64_t eval_buffer; /* rows that a buffer between ranks holds in evaluation; 0: there is none */
    int64_t optim_bytes[8], skipped[8], replayed[8], at[8];
};

static int poison(struct trainer *t, struct err *e)
{
    struct tensor p = model_param(&t->model, param_find(&t->model.params, "decoder.layers.1.mlp.linear_fc2.weight"));
    if (p.data == NULL)
        return err_set(e, ST_INTERNAL, "no such parameter");
    tensor_set(&p, 5, NAN);
    return ST_OK;
}

/* So that the largest value of a block of scales is in its last rows, which the last rank has that has a part of it. */
static int make_uneven(struct trainer *t, struct err *e)
{
    for (int k = 0; k < t->model.params.n; k++) {
        const struct param *p = &t->model.params.list[k].p;
        struct tensor x = model_param(&t->model, k);
        int64_t first = model_param_kept(&t->model, k).first;
        for (int64_t i = 0, n = tensor_elems(&x); p->codes && i < n; i++)
            tensor_set(&x, i, tensor_get(&x, i) * (1 + (double)((first + i) / p->dim[p->rank - 1] / 16)));
    }
    return model_quantise(&t->model, e);
}

static int take_steps(struct trainer *t, struct job *j, int rank, struct err *e)
{
    for (int i = 0; i < j->steps; i++) {
        struct step_result r;
        TRY(trainer_step(t, &r, e));
        if (j->replan)
            TRY(trainer_replan(t, e));
        if (rank == 0 && i < MOST_STEPS) {
            j->loss[i] = r.loss;
            j->norm[i] = r.grad_norm;
        }
    }
    return ST_OK;
}

static int64_t buffer_of_eval(const struct trainer *t)
{
    for (int k = 0; k < t->model.metrics.n; k++)
        if (t->model.metrics.m[k].eval)
            return t->model.metrics.m[k].room;
    return 0;
}

static int one_rank(struct trainer *t, const struct rank_place *place, struct job *j, struct err *e)
{
    struct ckpt *from = NULL;
    int rank = place->mesh.rank;
    if (j->from != NULL)
        TRY(ckpt_open(&from, j->from, e));
    int st = trainer_open_on(t, j->cfg, place, from, true, e);
    ckpt_close(from);
    TRY(st);
    j->optim_bytes[rank] = t->model.mem.allocated[ARENA_OPTIM];
    if (j->poison_rank == rank)
        TRY(poison(t, e));
    if (j->uneven)
        TRY(make_uneven(t, e));
    if (rank == 0)
        j->eval_buffer = buffer_of_eval(t);
    TRY(j->steps < 0 ? trainer_run(t, e) : take_steps(t, j, rank, e));
    j->skipped[rank] = t->skipped;
    j->at[rank] = t->step;
    struct eval_result r = {0};
    if (t->has_eval && j->steps >= 0)
        TRY(trainer_eval(t, &r, e));
    j->replayed[rank] = t->replayed;
    if (rank == 0) {
        j->eval = r.loss;
        j->bits = r.bits_per_byte;
    }
    return j->save ? trainer_save(t, e) : ST_OK;
}

static int rank_main(struct world *w, void *ctx, struct err *e)
{
    struct job *j = ctx;
    struct rank_place place;
    struct trainer t = {0};
    int st = place_open(&place, j->cfg, w, 0, world_size(w), e);
    if (st == ST_OK)
        st = one_rank(&t, &place, j, e);
    trainer_close(&t);
    place_close(&place);
    return st;
}

static int run_job(struct job *j, int ranks, struct err *e)
{
    struct world_opts o = {.kind = COMM_THREADS, .ranks = ranks, .timeout = 60};
    return world_threads(&o, rank_main, j, e);
}

/* A folder of short texts, each a document. */
static void write_documents(const struct playground *pg)
{
    struct err e = {0};
    char *folder = path_join(pg->dir, "documents");
    assert_ok(file_make_dirs(folder, &e), &e);
    for (uint64_t i = 0; i < 60; i++) {
        char path[256], text[64];
        size_t n = 5 + rng_below(3, i, 40);
        for (size_t k = 0; k < n; k++)
            text[k] = (char)('a' + rng_below(4, 100 * i + k, 26));
        snprintf(path, sizeof path, "%s/%02d.txt", folder, (int)i);
        assert_ok(file_write_atomic(path, text, n, &e), &e);
    }
    free(folder);
}

/* A config of one model on one mesh, saving into folder `run` of the playground. */
static void mesh_config(struct config *c, struct playground *pg, const char *run, const char *model,
                        const struct mesh_case *m, const char *more)
{
    char options[1200];
    free(pg->run);
    pg->run = path_join(pg->dir, run);
    bool documents = strstr(model, "data.eod_mask") != NULL;
    if (documents)
        write_documents(pg);
    snprintf(options, sizeof options, "%s %s parallel.ranks=%d %s %s%s%s%s", common, model, m->ranks, m->options, more,
             documents ? " data.train=" : "", documents ? pg->dir : "", documents ? "/documents" : "");
    run_config(c, pg, options);
}

/* Steps on a mesh, from a checkpoint or the start, saved; returns what came out. */
static struct job run_job_on(struct playground *pg, const char *run, const char *model, const struct mesh_case *m,
                             struct job j, const char *more)
{
    struct config c;
    struct err e = {0};
    mesh_config(&c, pg, run, model, m, more);
    j.cfg = &c;
    j.save = true;
    j.poison_rank = -1;
    if (run_job(&j, m->ranks, &e) != ST_OK) {
        err_print(&e, stderr);
        fail_msg("%s, mesh %s", run, m->name);
    }
    config_release(&c);
    return j;
}

static struct job run_on(struct playground *pg, const char *run, const char *model, const struct mesh_case *m,
                         const char *from, int steps, const char *more)
{
    return run_job_on(pg, run, model, m, (struct job){.from = from, .steps = steps}, more);
}

/* ---- comparing checkpoints ------------------------------------------------------------------- */

/* Largest difference of parameters (and moments); -1: the keys differ. equal: bit for bit. */
static double compare_runs(const char *a, const char *b, bool *equal)
{
    struct err e = {0};
    struct ckpt *x, *y;
    double most = 0;
    assert_ok(ckpt_open(&x, a, &e), &e);
    assert_ok(ckpt_open(&y, b, &e), &e);
    *equal = ckpt_count(x) == ckpt_count(y) && ckpt_step(x) == ckpt_step(y);
    for (int i = 0; *equal && i < ckpt_count(x); i++) {
        struct ckpt_tensor p = ckpt_at(x, i), q = ckpt_at(y, i);
        struct st_difference d;
        assert_string_equal(p.key, q.key);
        assert_ok(st_compare(&p.view, &q.view, &d, &e), &e);
        most = fmax(most, d.count > 0 ? d.max_abs : 0);
    }
    *equal &= most == 0;
    ckpt_close(x);
    ckpt_close(y);
    return most;
}

static void assert_same_files(const struct playground *pg, const char *a, const char *b)
{
    char *x = path_join(pg->dir, a), *y = path_join(pg->dir, b);
    bool equal;
    double most = compare_runs(x, y, &equal);
    if (!equal)
        fail_msg("checkpoints of %s and %s differ by up to %g", a, b, most);
    free(x);
    free(y);
}

static void assert_near(const double *a, const double *b, int n, double bound, const char *what)
{
    for (int i = 0; i < n; i++)
        if (!(fabs(a[i] - b[i]) <= bound * fabs(a[i])))
            fail_msg("%s, step %d: %.17g and %.17g", what, i + 1, a[i], b[i]);
}

/* ---- tests ----------------------------------------------------------------------------------- */

/* In double what remains are orders of sums; fp32 is as the promise says. */
static void every_mesh_learns_like_one_rank(void **state)
{
    (void)state;
    enum { STEPS = 10 };
    static const struct {
        const char *device;
        double loss, norm, values;
    } kinds[] = {{"run.device=ref", 1e-10, 1e-8, 1e-6}, {"run.device=cpu", 1e-5, 1e-3, 0.02}};
    struct playground pg;
    playground_open(&pg);
    for (int k = 0; k < countof(kinds); k++)
        for (int i = 0; i < countof(models); i++) {
            struct job one = {0};
            for (int j = 0; j < models[i].n_meshes; j++) {
                const struct mesh_case *m = &models[i].mesh[j];
                char run[80], first[80], more[160], label[160];
                bool equal;
                snprintf(run, sizeof run, "learn %d %d %s", k, i, m->name);
                snprintf(first, sizeof first, "learn %d %d %s", k, i, models[i].mesh[0].name);
                snprintf(more, sizeof more, "%s data.split=70,30 train.eval_batches=5", kinds[k].device);
                snprintf(label, sizeof label, "%s on %s, %s", models[i].name, m->name, kinds[k].device);
                struct job got = run_on(&pg, run, models[i].options, m, NULL, STEPS, more);
                if (j == 0)
                    one = got;
                assert_near(one.loss, got.loss, STEPS, kinds[k].loss, label);
                assert_int_equal(got.replayed[0] > 0, strstr(m->name, "tight") != NULL);
                assert_near(one.norm, got.norm, STEPS, kinds[k].norm, label);
                assert_near(&one.eval, &got.eval, 1, kinds[k].loss, "evaluation");
                assert_true(one.bits > 0 && fabs(one.bits - got.bits) <= kinds[k].loss * one.bits);
                char *a = path_join(pg.dir, first), *b = path_join(pg.dir, run);
                double most = compare_runs(a, b, &equal);
                if (!(most <= kinds[k].values))
                    fail_msg("%s: values differ by %g", label, most);
                assert_true(j == 0 || !equal || m->ranks == 1); /* it was another order of sums */
                free(a);
                free(b);
            }
        }
    playground_close(&pg);
}

/* Evaluation adds up batches in their own order: the very same number from the same weights. */
static void evaluation_is_the_same_number_on_every_mesh(void **state)
{
    (void)state;
    struct playground pg;
    double want = 0;
    playground_open(&pg);
    for (int j = 0; j < countof(dense_meshes); j++) {
        struct job got =
            run_on(&pg, "eval", models[0].options, &dense_meshes[j], NULL, 0, "data.split=70,30 train.eval_batches=5");
        want = j == 0 ? got.eval : want;
        assert_true(want > 1 && got.eval == want);
    }
    playground_close(&pg);
}

/* The eval plan, too, takes only the room between ranks that it is given; it grows on all of them where that is too
 * little, and nothing is dropped. 8 rows with 2 choices each for 4 ranks: 8 rows at most, 4 are an even share. */
static void evaluation_keeps_to_the_capacity(void **state)
{
    (void)state;
    struct playground pg;
    double want = 0;
    static const struct {
        struct mesh_case mesh;
        int64_t buffer;
        bool grows;
    } cases[] = {{{"any", 4, "parallel.ep=4"}, 8, false},
                 {{"tight", 4, "parallel.ep=4 parallel.ep_capacity=0.3"}, 2, true},
                 {{"tight stages", 4, "parallel.ep=2 parallel.pp=2 parallel.ep_capacity=0.1"}, 1, true}};
    playground_open(&pg);
    for (int i = 0; i < countof(cases); i++) {
        struct job got = run_on(&pg, "eval", models[1].options, &cases[i].mesh, NULL, 0,
                                "run.device=ref data.split=70,30 train.eval_batches=5");
        want = i == 0 ? got.eval : want;
        assert_true(want > 1);
        assert_near(&want, &got.eval, 1, i == 1 ? 0 : 1e-12, cases[i].mesh.name);
        assert_int_equal(got.eval_buffer, cases[i].buffer);
        for (int r = 0; r < 4; r++)
            assert_int_equal(got.replayed[r] > 0, cases[i].grows);
    }
    playground_close(&pg);
}

/* Who updates what does not change a bit: sharded or not, in one message or many. */
static void sharding_and_buckets_change_no_bit(void **state)
{
    (void)state;
    static const char *const ways[] = {"", "parallel.zero=off", "parallel.bucket_mb=0.001",
                                       "parallel.zero=off parallel.bucket_mb=0.003",
                                       "plan.random_lanes=7 plan.poison=on parallel.bucket_mb=0.002"};
    static const struct {
        int model, ranks;
    } cases[] = {{0, 2}, {0, 3}, {1, 4}};
    struct playground pg;
    playground_open(&pg);
    for (int i = 0; i < countof(cases); i++) {
        int64_t all = 0;
        for (int w = 0; w < countof(ways); w++) {
            struct mesh_case m = {ways[w], cases[i].ranks, ways[w]};
            char run[32];
            snprintf(run, sizeof run, "way %d %d", i, w);
            struct job got = run_on(&pg, run, models[cases[i].model].options, &m, NULL, 6, "train.clip=0.1");
            assert_true(got.norm[0] > 0.1); /* clipping takes part */
            if (w > 0) {
                char first[32];
                snprintf(first, sizeof first, "way %d 0", i);
                assert_same_files(&pg, first, run);
            }
            /* Moments of a share: about one of so many parts. */
            if (w == 1)
                all = got.optim_bytes[0];
            if (w == 2)
                assert_true(got.optim_bytes[0] < all / cases[i].ranks + 64 * 1024 &&
                            got.optim_bytes[0] >= all / cases[i].ranks);
        }
    }
    playground_close(&pg);
}

/* What a rank keeps does not change a bit. With one microbatch on each rank all levels take the same sums; with
 * several, 0 and 1 add up microbatches before ranks, 2 and 3 ranks before microbatches. */
static void zero_levels_give_the_same_bits(void **state)
{
    (void)state;
    static const struct {
        int model, ranks;
        const char *options, *batch;
        bool one; /* microbatch */
    } cases[] = {{0, 3, "", "train.global_batch=3", true},
                 {0, 2, "", "train.global_batch=4", false},
                 {1, 4, "parallel.ep=2", "train.global_batch=4", true},
                 {1, 2, "", "train.global_batch=6", false},
                 {2, 2, "model.tied=off", "train.global_batch=2", true}};
    struct playground pg;
    playground_open(&pg);
    for (int i = 0; i < countof(cases); i++)
        for (int zero = 0; zero < 4; zero++) {
            char run[32], first[32], options[128];
            snprintf(run, sizeof run, "zero %d %d", i, zero);
            snprintf(first, sizeof first, "zero %d %d", i, cases[i].one || zero < 2 ? 0 : 2);
            snprintf(options, sizeof options, "%s parallel.zero=%d", cases[i].options, zero);
            struct mesh_case m = {run, cases[i].ranks, options};
            run_on(&pg, run, models[cases[i].model].options, &m, NULL, 4, cases[i].batch);
            assert_same_files(&pg, first, run);
        }
    playground_close(&pg);
}

/* FP8 codes of weights that ranks update in shards, which end anywhere in a block of scales, are those of whole
 * weights, which the update writes itself: of level 0, which gathers nothing. */
static void zero_levels_give_the_same_fp8_codes(void **state)
{
    (void)state;
#define INSIDE_BLOCKS "model.hidden=48 model.heads=3 model.ffn=144 "
    static const struct {
        int model, ranks, levels; /* levels: up to this one */
        const char *options, *batch;
    } cases[] = {
        {0, 3, 3, INSIDE_BLOCKS, "train.global_batch=3"},
        {0, 3, 3, INSIDE_BLOCKS "gpu.fp8_recipe=tensor plan.recompute=full", "train.global_batch=3"},
        {0, 3, 3, INSIDE_BLOCKS "gpu.fp8_recipe=mxfp8", "train.global_batch=3"},
        {0, 3, 3, INSIDE_BLOCKS "run.device=ref gpu.fp8_keep=*linear_qkv*", "train.global_batch=3"},
        {0, 4, 2, INSIDE_BLOCKS "parallel.pp=2 optim.offload=all", "train.global_batch=2"},
        {1, 4, 3, "parallel.ep=2 model.hidden=128 model.heads=2 model.expert_ffn=128", "train.global_batch=4"}};
    struct playground pg;
    playground_open(&pg);
    for (int i = 0; i < countof(cases); i++) {
        struct job first = {0};
        for (int zero = 0; zero <= cases[i].levels; zero++) {
            char run[32], none[32], options[240];
            snprintf(run, sizeof run, "fp8 %d %d", i, zero);
            snprintf(none, sizeof none, "fp8 %d 0", i);
            snprintf(options, sizeof options, "gpu.precision=fp8 parallel.zero=%d %s", zero, cases[i].options);
            struct mesh_case m = {run, cases[i].ranks, options};
            struct job got = run_job_on(&pg, run, models[cases[i].model].options, &m,
                                        (struct job){.steps = 3, .uneven = true}, cases[i].batch);
            first = zero == 0 ? got : first;
            assert_same_files(&pg, none, run);
            assert_memory_equal(first.loss, got.loss, sizeof got.loss);
            assert_true(first.eval == got.eval);
        }
    }
    playground_close(&pg);
}

/* Codes of what is loaded, on any level, are those that the run would have had. */
static void a_level_continues_another_in_fp8(void **state)
{
    (void)state;
    static const char *const levels[] = {"3", "1", "0"};
    struct playground pg;
    char options[3][160];
    playground_open(&pg);
    for (int i = 0; i < countof(levels); i++)
        snprintf(options[i], sizeof options[i], "gpu.precision=fp8 " INSIDE_BLOCKS "parallel.zero=%s", levels[i]);
    struct mesh_case m = {"fp8 whole", 3, options[2]};
    run_on(&pg, "fp8 whole", models[0].options, &m, NULL, 6, "train.global_batch=3");
    char *from = NULL;
    for (int i = 0; i < countof(levels); i++) {
        char run[32];
        snprintf(run, sizeof run, "fp8 part %d", i);
        m = (struct mesh_case){run, 3, options[i]};
        run_on(&pg, run, models[0].options, &m, from, 2, "train.global_batch=3");
        free(from);
        from = path_join(pg.dir, run);
    }
    free(from);
    assert_same_files(&pg, "fp8 whole", "fp8 part 2");
    playground_close(&pg);
}

/* Rounded to bf16 to travel: the run is another one, by about as much as such a rounding, on every level by the same
 * bits. */
static void bf16_reduction_is_the_same_on_every_level(void **state)
{
    (void)state;
    struct playground pg;
    playground_open(&pg);
    double plain = 0;
    for (int zero = -1; zero < 4; zero++) {
        char run[32], options[96];
        snprintf(run, sizeof run, "bf16 %d", zero);
        snprintf(options, sizeof options, "parallel.zero=%d parallel.reduce=%s", zero < 0 ? 1 : zero,
                 zero < 0 ? "fp32" : "bf16");
        struct mesh_case m = {run, 3, options};
        struct job got = run_on(&pg, run, models[0].options, &m, NULL, 4, "train.global_batch=3");
        if (zero < 0)
            plain = got.norm[0];
        else
            assert_same_files(&pg, "bf16 0", run);
        assert_true(zero < 0 || (got.norm[0] != plain && fabs(got.norm[0] - plain) < 0.01 * plain));
    }
    playground_close(&pg);
}

/* From each mesh to each: parameters and moments arrive bit for bit, and a run that stays on its mesh goes on as if it
 * had not stopped. */
static void any_checkpoint_loads_on_any_mesh(void **state)
{
    (void)state;
    struct playground pg;
    playground_open(&pg);
    for (int i = 0; i < countof(models); i++)
        for (int j = 0; j < models[i].n_meshes; j++) {
            const struct mesh_case *m = &models[i].mesh[j];
            char run[48], loaded[48], straight[48];
            snprintf(run, sizeof run, "save %d %d", i, j);
            snprintf(straight, sizeof straight, "straight %d %d", i, j);
            run_on(&pg, run, models[i].options, m, NULL, 3, "");
            char *from = path_join(pg.dir, run);
            for (int k = 0; k < models[i].n_meshes; k++) {
                snprintf(loaded, sizeof loaded, "load %d %d %d", i, j, k);
                run_on(&pg, loaded, models[i].options, &models[i].mesh[k], from, 0, "");
                assert_same_files(&pg, run, loaded);
            }
            run_on(&pg, straight, models[i].options, m, NULL, 5, "");
            snprintf(loaded, sizeof loaded, "resume %d %d", i, j);
            run_on(&pg, loaded, models[i].options, m, from, 2, "");
            assert_same_files(&pg, straight, loaded);
            free(from);
        }
    playground_close(&pg);
}

/* Planning again between steps, as growing buffers do: nothing persistent moves. */
static void planning_again_changes_nothing(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct err e = {0};
    playground_open(&pg);
    for (int i = 0; i < countof(models); i++) {
        char plain[32], again[32];
        snprintf(plain, sizeof plain, "plain %d", i);
        snprintf(again, sizeof again, "again %d", i);
        run_on(&pg, plain, models[i].options, &models[i].mesh[1], NULL, 4, "");
        mesh_config(&c, &pg, again, models[i].options, &models[i].mesh[1], "");
        struct job j = {.cfg = &c, .steps = 4, .save = true, .replan = true, .poison_rank = -1};
        assert_ok(run_job(&j, models[i].mesh[1].ranks, &e), &e);
        config_release(&c);
        assert_same_files(&pg, plain, again);
    }
    playground_close(&pg);
}

/* What is not finite on one rank is not finite for all: they skip together, or stop and say where it was. */
static void a_bad_value_on_one_rank_concerns_all(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct err e = {0};
    const struct mesh_case m = {"dp3", 3, ""};
    playground_open(&pg);
    /* else its owner's value replaces it */
    mesh_config(&c, &pg, "skip", models[0].options, &m, "train.nonfinite=skip parallel.zero=0");
    struct job j = {.cfg = &c, .steps = 3, .poison_rank = 1};
    assert_ok(run_job(&j, m.ranks, &e), &e);
    for (int r = 0; r < m.ranks; r++)
        assert_int_equal(j.skipped[r], 3);
    config_release(&c);
    mesh_config(&c, &pg, "stop", models[0].options, &m, "parallel.zero=off");
    j = (struct job){.cfg = &c, .steps = 3, .poison_rank = 1};
    assert_fails(run_job(&j, m.ranks, &e), ST_NONFINITE, &e, "first non-finite value");
    assert_non_null(strstr(e.msg, "1.mlp"));
    config_release(&c);
    playground_close(&pg);
}

/* SIGTERM reaches one thread; all ranks end after the same step, and the checkpoint goes on where they were. */
static void a_signal_stops_all_ranks_after_one_step(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct err e = {0};
    sigset_t set, before;
    const struct mesh_case *m = &dense_meshes[1];
    playground_open(&pg);
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set, &before);
    mesh_config(&c, &pg, "signal", models[0].options, m, "train.steps=6");
    kill(getpid(), SIGTERM);
    struct job j = {.cfg = &c, .steps = -1, .poison_rank = -1};
    assert_fails(run_job(&j, m->ranks, &e), ST_INTERRUPTED, &e, "stopped after step 1 of 6; a checkpoint was saved");
    err_clear(&e);
    j = (struct job){.cfg = &c, .steps = -1, .from = c.run.dir, .poison_rank = -1};
    assert_ok(run_job(&j, m->ranks, &e), &e);
    assert_true(j.at[0] == 6 && j.at[1] == 6);
    config_release(&c);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    run_on(&pg, "whole", models[0].options, m, NULL, 6, "train.steps=6");
    assert_same_files(&pg, "whole", "signal");
    playground_close(&pg);
}

/* Losses and what layers report, as logged. Times differ; the rest of each line must not. */
static char *logged(const struct playground *pg, const char *run)
{
    struct err e = {0};
    char *dir = path_join(pg->dir, run), *path = path_join(dir, "metrics.jsonl"), *text, *out = calloc(1, 1 << 16);
    size_t n;
    assert_non_null(out);
    assert_ok(file_read(path, 1 << 20, &text, &n, &e), &e);
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        const char *extra = strstr(line, "\"extra\"");
        if (extra != NULL)
            strcat(strcat(out, extra), "\n");
    }
    free(text);
    free(path);
    free(dir);
    return out;
}

/* The log of a model on one rank, which has that of every mesh. */
static char *log_on_any_mesh(struct playground *pg, const struct model_case *m)
{
    char *one = NULL;
    for (int i = 0; i < m->n_meshes; i++) {
        struct config c;
        struct err e = {0};
        mesh_config(&c, pg, m->mesh[i].name, m->options, &m->mesh[i],
                    "train.steps=2 train.warmup=0 run.device=ref train.lr=1e-9");
        struct job j = {.cfg = &c, .steps = -1, .poison_rank = -1};
        assert_ok(run_job(&j, m->mesh[i].ranks, &e), &e);
        config_release(&c);
        char *text = logged(pg, m->mesh[i].name);
        if (one == NULL)
            one = text;
        assert_string_equal(one, text);
        if (text != one)
            free(text);
    }
    return one;
}

static void the_log_of_several_ranks_is_that_of_one(void **state)
{
    (void)state;
    struct playground pg;
    playground_open(&pg);
    char *experts = log_on_any_mesh(&pg, &models[1]), *deep = log_on_any_mesh(&pg, &models[2]);
    assert_non_null(strstr(experts, "expert load max/layer 1"));
    assert_non_null(strstr(experts, "router seq aux loss/layer 3"));
    assert_non_null(strstr(deep, "mtp loss/depth 1"));
    free(experts);
    free(deep);
    playground_close(&pg);
}

static void what_cannot_be_is_refused(void **state)
{
    (void)state;
    struct playground pg;
    struct config c;
    struct err e = {0};
    const struct mesh_case five = {"dp5", 5, ""};
    playground_open(&pg);
    mesh_config(&c, &pg, "five", models[0].options, &five, "");
    struct job j = {.cfg = &c, .steps = 1, .poison_rank = -1};
    assert_fails(run_job(&j, five.ranks, &e), ST_USAGE, &e, "train.global_batch = 12 does not divide");
    config_release(&c);
    char more[200];
    /* Choices come and go microbatch by microbatch; a plan of a whole step leaves no time for that. */
    static const struct mesh_case whole[] = {{"pp2", 2, "parallel.pp=2"},
                                             {"pp2 ep2", 4, "parallel.pp=2 parallel.ep=2"},
                                             {"overlap", 2, "parallel.ep=2 parallel.overlap=ep"}};
    for (int i = 0; i < countof(whole); i++) {
        snprintf(more, sizeof more, "train.replay_routes=%s/routes", pg.dir);
        mesh_config(&c, &pg, "routes", models[1].options, &whole[i], more);
        assert_fails(run_job(&j, whole[i].ranks, &e), ST_USAGE, &e,
                     "train.replay_routes is set, but microbatches of a step run as one plan");
        config_release(&c);
        snprintf(more, sizeof more, "train.record_routes=%s/routes", pg.dir);
        mesh_config(&c, &pg, "routes", models[1].options, &whole[i], more);
        assert_fails(run_job(&j, whole[i].ranks, &e), ST_USAGE, &e, "routes are recorded by a run on one");
        config_release(&c);
    }
    /* A file that cannot be read stops all ranks at the start. */
    snprintf(more, sizeof more, "train.replay_routes=%s/none", pg.dir);
    mesh_config(&c, &pg, "routes", models[1].options, &expert_meshes[1], more);
    assert_fails(run_job(&j, expert_meshes[1].ranks, &e), ST_IO, &e, "none: cannot open recorded routes");
    config_release(&c);
    playground_close(&pg);
}

/* Another run's choices, taken down by one rank, are followed by many as by one. */
static void routes_of_one_rank_are_followed_by_many(void **state)
{
    (void)state;
    enum { STEPS = 4 };
    static const struct mesh_case meshes[] = {{"one", 1, ""},
                                              {"dp2", 2, ""},
                                              {"ep2 of 4", 4, "parallel.ep=2"},
                                              {"tight", 4, "parallel.ep=4 parallel.ep_capacity=0.3"}};
    struct playground pg;
    struct job one = {0};
    char more[200];
    playground_open(&pg);
    snprintf(more, sizeof more, "run.device=ref run.seed=77 train.record_routes=%s/routes", pg.dir);
    run_on(&pg, "other", models[1].options, &meshes[0], NULL, STEPS, more);
    struct job own = run_on(&pg, "own", models[1].options, &meshes[0], NULL, STEPS, "run.device=ref");
    for (int i = 0; i < countof(meshes); i++) {
        snprintf(more, sizeof more, "run.device=ref train.replay_routes=%s/routes", pg.dir);
        struct job got = run_on(&pg, "led", models[1].options, &meshes[i], NULL, STEPS, more);
        if (i == 0)
            one = got;
        assert_true(one.loss[0] != own.loss[0]);
        assert_near(one.loss, got.loss, STEPS, 1e-10, meshes[i].name);
    }
    playground_close(&pg);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mesh_learns_like_one_rank),
        cmocka_unit_test(evaluation_is_the_same_number_on_every_mesh),
        cmocka_unit_test(evaluation_keeps_to_the_capacity),
        cmocka_unit_test(sharding_and_buckets_change_no_bit),
        cmocka_unit_test(zero_levels_give_the_same_bits),
        cmocka_unit_test(zero_levels_give_the_same_fp8_codes),
        cmocka_unit_test(a_level_continues_another_in_fp8),
        cmocka_unit_test(bf16_reduction_is_the_same_on_every_level),
        cmocka_unit_test(any_checkpoint_loads_on_any_mesh),
        cmocka_unit_test(planning_again_changes_nothing),
        cmocka_unit_test(a_bad_value_on_one_rank_concerns_all),
        cmocka_unit_test(a_signal_stops_all_ranks_after_one_step),
        cmocka_unit_test(the_log_of_several_ranks_is_that_of_one),
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(routes_of_one_rank_are_followed_by_many),
    };
    return cmocka_run_group_tests_name("ranks", tests, NULL, NULL);
}
