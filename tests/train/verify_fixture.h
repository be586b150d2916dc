/* A small model that `braid verify` runs, for the tests of it. */
#ifndef BRAID_TESTS_TRAIN_VERIFY_FIXTURE_H
#define BRAID_TESTS_TRAIN_VERIFY_FIXTURE_H

#include "tiny.h"
#include "train/verify.h"

struct fixture {
    struct config user, small;
    struct verify *v;
    struct err e;
    char *dir;
};

/* The user's config: of no data, and with these options. */
static inline void fixture_begin(struct fixture *f, const char *options)
{
    *f = (struct fixture){.dir = temp_dir()};
    assert_ok(config_init(&f->user, &f->e), &f->e);
    assert_ok(config_init(&f->small, &f->e), &f->e);
    assert_ok(tiny_set(&f->user, "model.vocab=1000 data.train=no/such/file model.mtp_scale=0.3", &f->e), &f->e);
    assert_ok(tiny_set(&f->user, options, &f->e), &f->e);
    assert_ok(config_finish(&f->user, &f->e), &f->e);
}

static inline void fixture_close(struct fixture *f)
{
    verify_close(f->v);
    config_release(&f->user);
    config_release(&f->small);
    assert_ok(file_remove_tree(f->dir, &f->e), &f->e);
    free(f->dir);
}

static inline const struct verify_case *variant_named(const char *name)
{
    int n;
    const struct verify_case *all = verify_cases(&n);
    for (int i = 0; i < n; i++)
        if (strcmp(all[i].name, name) == 0)
            return &all[i];
    fail_msg("no variant is called %s", name);
    return NULL;
}

#endif
