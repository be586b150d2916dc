/* tests/lib/fixtures/mhc.safetensors in memory: values of mHC in fp64 that tools/golden_mhc.py made without braid. */
#ifndef BRAID_TESTS_LIB_GOLDEN_H
#define BRAID_TESTS_LIB_GOLDEN_H

#include "support.h"

#include <jansson.h>

struct golden {
    char *bytes;
    const double *data;
    json_t *head;
};

static inline void golden_open(struct golden *g)
{
    FILE *f = fopen("tests/lib/fixtures/mhc.safetensors", "rb");
    uint64_t n = 0;
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    long size = ftell(f);
    assert_true(size > 8);
    rewind(f);
    g->bytes = malloc((size_t)size);
    assert_non_null(g->bytes);
    assert_int_equal(fread(g->bytes, 1, (size_t)size, f), (size_t)size);
    fclose(f);
    memcpy(&n, g->bytes, sizeof n);
    assert_true(n < (uint64_t)size && n % 8 == 0);
    g->head = json_loadb(g->bytes + 8, n, 0, NULL);
    assert_non_null(g->head);
    g->data = (const double *)(const void *)(g->bytes + 8 + n);
}

static inline void golden_close(struct golden *g)
{
    json_decref(g->head);
    free(g->bytes);
}

/* Values of "group/name" and how many there are. */
static inline const double *golden_at(const struct golden *g, const char *group, const char *name, int64_t *n)
{
    char key[96];
    snprintf(key, sizeof key, "%s/%s", group, name);
    json_t *row = json_object_get(g->head, key), *at = row ? json_object_get(row, "data_offsets") : NULL;
    if (at == NULL)
        fail_msg("no golden values %s", key);
    int64_t first = json_integer_value(json_array_get(at, 0)), end = json_integer_value(json_array_get(at, 1));
    *n = (end - first) / 8;
    return g->data + first / 8;
}

#endif
