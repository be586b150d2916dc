/* A device with a lane and its table of ops: what tests of single ops run on. */
#ifndef BRAID_TESTS_OPS_BENCH_H
#define BRAID_TESTS_OPS_BENCH_H

#include "support.h"

#include "ops/ops.h"

struct bench {
    struct dev dev;
    struct lane lane;
    const struct ops *ops;
    struct err e;
};

/* Closed by dev_close(&t->dev). */
static inline void open_bench(struct bench *t, enum dev_kind kind)
{
    memset(t, 0, sizeof *t);
    assert_ok(dev_open(&t->dev, kind, 0, &t->e), &t->e);
    t->lane = (struct lane){.dev = &t->dev, .err = &t->e};
    t->ops = ops_for(&t->dev);
}

/* Setup and teardown of tests that find a bench of the CPU in *state. */
static inline int open_cpu_bench(void **state)
{
    struct bench *t = malloc(sizeof *t);
    assert_non_null(t);
    open_bench(t, DEV_CPU);
    *state = t;
    return 0;
}

static inline int close_cpu_bench(void **state)
{
    struct bench *t = *state;
    dev_close(&t->dev);
    free(t);
    return 0;
}

/* Both host devices, for comparing them. */
struct bed {
    struct dev dev[2]; /* ref, cpu */
    struct err e;
};

static inline void open_bed(struct bed *b)
{
    *b = (struct bed){0};
    assert_ok(dev_open(&b->dev[0], DEV_REF, 1, &b->e), &b->e);
    assert_ok(dev_open(&b->dev[1], DEV_CPU, 2, &b->e), &b->e);
}

static inline void close_bed(struct bed *b)
{
    dev_close(&b->dev[0]);
    dev_close(&b->dev[1]);
}

#endif
