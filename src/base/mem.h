/* Host memory for cold paths: checked allocation and a bump arena of strings and small structs.
 * Training memory (parameters, frames, workspace) is planned and owned by plan/, not allocated here. */
#ifndef BRAID_BASE_MEM_H
#define BRAID_BASE_MEM_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Zeroed; overflow of count * size is an error. count 0 gives a valid pointer. */
int mem_array(void **out, size_t count, size_t size, struct err *e);
/* Grow *array (of *cap elements) so that it holds need; the new part is zeroed. */
int mem_grow(void **array, size_t *cap, size_t need, size_t size, struct err *e);
/* Aligned, not zeroed; for buffers that hold tensors. Release with free(). */
int mem_aligned(void **out, size_t bytes, size_t align, struct err *e);

/* Bump arena: everything is freed at once. */
struct arena_block;
struct arena {
    struct arena_block *head;
    size_t used_bytes; /* requested, over all blocks */
};
void arena_init(struct arena *a);
void arena_release(struct arena *a);
/* Zeroed, 16-byte aligned; NULL only when the system has no memory left. */
void *arena_alloc(struct arena *a, size_t bytes);
char *arena_strdup(struct arena *a, const char *s);
char *arena_strndup(struct arena *a, const char *s, size_t n);
char *arena_printf(struct arena *a, const char *fmt, ...) PRINTF_LIKE(2, 3);

bool size_mul(size_t a, size_t b, size_t *out); /* false on overflow */
bool i64_mul(int64_t a, int64_t b, int64_t *out);
static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
