/* What every cmocka test includes, in the order cmocka wants, and a few checks of our own. */
#ifndef BRAID_TESTS_SUPPORT_H
#define BRAID_TESTS_SUPPORT_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"

/* The call must succeed; its error is printed when it does not. */
#define assert_ok(call, e)                                                                                             \
    do {                                                                                                               \
        int status_ = (call);                                                                                          \
        if (status_ != ST_OK)                                                                                          \
            err_print((e), stderr);                                                                                    \
        assert_int_equal(status_, ST_OK);                                                                              \
    } while (0)

/* The call must fail with this status and a message that holds the text. */
#define assert_fails(call, status, e, text)                                                                            \
    do {                                                                                                               \
        assert_int_equal((call), (status));                                                                            \
        if (strstr((e)->msg, (text)) == NULL && strstr((e)->hint, (text)) == NULL)                                     \
            fail_msg("'%s' is neither in message '%s' nor in hint '%s'", (text), (e)->msg, (e)->hint);                 \
    } while (0)

/* A fresh folder under /tmp; remove it with file_remove_tree. */
static inline char *temp_dir(void)
{
    char *path = strdup("/tmp/braid-test-XXXXXX");
    assert_non_null(path);
    assert_non_null(mkdtemp(path));
    return path;
}

/* One folder for each test that has make_test_dir and drop_test_dir as its setup and teardown. */
static inline char **test_dir_slot(void)
{
    static char *dir;
    return &dir;
}

static inline const char *test_dir(void) { return *test_dir_slot(); }

static inline int make_test_dir(void **state)
{
    (void)state;
    *test_dir_slot() = temp_dir();
    return 0;
}

static inline int drop_test_dir(void **state)
{
    (void)state;
    struct err e = {0};
    char *dir = *test_dir_slot();
    assert_ok(file_remove_tree(dir, &e), &e);
    free(dir);
    return 0;
}

/* The path of a name in it; good for the next 63 calls. */
static inline const char *in_test_dir(const char *name)
{
    static char paths[64][256];
    static int next;
    char *p = paths[next++ % 64];
    snprintf(p, 256, "%s/%s", test_dir(), name);
    return p;
}

static inline void write_test_file(const char *name, const void *bytes, size_t n)
{
    struct err e = {0};
    assert_ok(file_write_atomic(in_test_dir(name), bytes, n, &e), &e);
}

#endif
