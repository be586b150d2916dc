/* A tiny training run on a text made by the test. */
#ifndef BRAID_TESTS_TRAIN_RUN_H
#define BRAID_TESTS_TRAIN_RUN_H

#include "tiny.h"
#include "train/train.h"

/* A folder with text.txt (varied), dull.txt (repetitive) and room for a run. */
struct playground {
    char *dir, *text, *dull, *run;
};

static inline void playground_open(struct playground *p)
{
    struct err e = {0};
    struct buf text, dull;
    p->dir = temp_dir();
    p->text = path_join(p->dir, "text.txt");
    p->dull = path_join(p->dir, "dull.txt");
    p->run = path_join(p->dir, "run");
    buf_init(&text, 0);
    buf_init(&dull, 0);
    for (uint64_t i = 0; i < 800; i++) {
        buf_addf(&text, "%c%s", (int)('a' + rng_below(5, i, 26)), rng_below(6, i, 5) ? "" : " ");
        buf_add(&dull, "braid ");
    }
    assert_ok(file_write_atomic(p->text, text.text, text.len, &e), &e);
    assert_ok(file_write_atomic(p->dull, dull.text, dull.len, &e), &e);
    buf_release(&text);
    buf_release(&dull);
}

static inline void playground_close(struct playground *p)
{
    struct err e = {0};
    assert_ok(file_remove_tree(p->dir, &e), &e);
    free(p->dir);
    free(p->text);
    free(p->dull);
    free(p->run);
}

/* A config that trains on text.txt; paths are set here, the rest by options. */
static inline void run_config(struct config *c, const struct playground *p, const char *options)
{
    struct err e = {0};
    assert_ok(config_init(c, &e), &e);
    assert_ok(config_set(c, "data.train", p->text, NULL, &e), &e);
    assert_ok(config_set(c, "run.dir", p->run, NULL, &e), &e);
    assert_ok(tiny_set(c,
                       "model.pattern=*- model.hidden=16 model.heads=2 model.ffn=24 "
                       "model.vocab=256 train.seq=16 "
                       "train.micro_batch=2 train.global_batch=4 train.steps=40 train.lr=3e-3 "
                       "train.warmup=3 run.threads=1 "
                       "run.quiet=on run.tensorboard=off run.report=off",
                       &e),
              &e);
    assert_ok(tiny_set(c, options, &e), &e);
    assert_ok(config_finish(c, &e), &e);
}

static inline void run_steps(struct trainer *t, int n, double *losses)
{
    for (int i = 0; i < n; i++) {
        struct err e = {0};
        struct step_result r;
        assert_ok(trainer_step(t, &r, &e), &e);
        assert_false(r.skipped);
        if (losses != NULL)
            losses[i] = r.loss;
    }
}

/* What a thread rank does: opens a trainer of this config on its place, and `work` with it. */
static inline int run_rank(struct world *w, const struct config *cfg,
                           int (*work)(struct trainer *t, void *ctx, struct err *e), void *ctx, struct err *e)
{
    struct rank_place place;
    struct trainer t = {0};
    int st = place_open(&place, cfg, w, 0, world_size(w), e);
    if (st == ST_OK)
        st = trainer_open_on(&t, cfg, &place, NULL, true, e);
    if (st == ST_OK)
        st = work(&t, ctx, e);
    trainer_close(&t);
    place_close(&place);
    return st;
}

/* Everything an update may change. */
struct snapshot {
    int64_t bytes[2];
    char *data[2];
};

static inline void snapshot_take(struct snapshot *s, struct trainer *t)
{
    struct err e = {0};
    assert_ok(trainer_settle(t, &e), &e);
    static const enum arena_id arena[2] = {ARENA_PARAM, ARENA_OPTIM};
    for (int i = 0; i < 2; i++) {
        s->bytes[i] = t->model.mem.allocated[arena[i]];
        assert_non_null(s->data[i] = malloc((size_t)s->bytes[i]));
        memcpy(s->data[i], t->model.mem.base[arena[i]], (size_t)s->bytes[i]);
    }
}

static inline bool snapshot_equal(const struct snapshot *a, const struct snapshot *b)
{
    bool same = true;
    for (int i = 0; i < 2; i++)
        same &= a->bytes[i] == b->bytes[i] && memcmp(a->data[i], b->data[i], (size_t)a->bytes[i]) == 0;
    return same;
}

static inline void snapshot_free(struct snapshot *s)
{
    free(s->data[0]);
    free(s->data[1]);
}

#endif
