/* What the tests of patterns share. */
#ifndef BRAID_TESTS_PATTERN_FIXTURE_H
#define BRAID_TESTS_PATTERN_FIXTURE_H

#include "tiny.h"

/* One struct for all tests: it is large, and each parse starts it anew. */
struct fixture {
    struct pattern p;
    struct err e;
};

static inline int setup(void **state)
{
    *state = calloc(1, sizeof(struct fixture));
    return *state == NULL;
}

static inline int teardown(void **state)
{
    free(*state);
    return 0;
}

/* "M (M *) -": items with a blank between them. */
static inline const char *items_text(const struct pattern *p, int first, int n, char *out)
{
    size_t len = 0;
    for (int i = first; i < first + n; i++) {
        const struct pattern_item *it = &p->items[i];
        if (i > first)
            out[len++] = ' ';
        if (it->grouped)
            out[len++] = '(';
        for (int l = 0; l < it->n; l++) {
            if (l > 0)
                out[len++] = ' ';
            out[len++] = p->symbols[it->first + l];
        }
        if (it->grouped)
            out[len++] = ')';
    }
    out[len] = '\0';
    return out;
}

#endif
