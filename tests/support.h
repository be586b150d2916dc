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
#define assert_ok(call, e)                   \
    do {                                     \
        int status_ = (call);                \
        if (status_ != ST_OK)                \
            err_print((e), stderr);          \
        assert_int_equal(status_, ST_OK);    \
    } while (0)

/* The call must fail with this status and a message that holds the text. */
#define assert_fails(call, status, e, text)                                              \
    do {                                                                                 \
        assert_int_equal((call), (status));                                              \
        if (strstr((e)->msg, (text)) == NULL && strstr((e)->hint, (text)) == NULL)       \
            fail_msg("'%s' is neither in message '%s' nor in hint '%s'", (text), (e)->msg, (e)->hint); \
    } while (0)

/* A fresh folder under /tmp; remove it with file_remove_tree. */
static inline char *temp_dir(void)
{
    char *path = strdup("/tmp/braid-test-XXXXXX");
    assert_non_null(path);
    assert_non_null(mkdtemp(path));
    return path;
}

#endif
