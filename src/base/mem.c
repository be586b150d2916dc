/* Cold-path host memory; see mem.h. */
#include "base/mem.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

bool size_mul(size_t a, size_t b, size_t *out) { return !__builtin_mul_overflow(a, b, out); }
bool i64_mul(int64_t a, int64_t b, int64_t *out) { return !__builtin_mul_overflow(a, b, out); }

int mem_array(void **out, size_t count, size_t size, struct err *e)
{
    size_t bytes;
    *out = NULL;
    if (!size_mul(count, size, &bytes))
        return err_set(e, ST_NOMEM, "allocation of %zu x %zu bytes overflows", count, size);
    *out = calloc(bytes ? bytes : 1, 1);
    if (*out == NULL)
        return err_set(e, ST_NOMEM, "out of host memory asking for %zu bytes", bytes);
    return ST_OK;
}

int mem_grow(void **array, size_t *cap, size_t need, size_t size, struct err *e)
{
    if (need <= *cap)
        return ST_OK;
    size_t want = *cap ? *cap : 16, bytes;
    while (want < need)
        want = want > SIZE_MAX / 2 ? need : want * 2;
    if (!size_mul(want, size, &bytes))
        return err_set(e, ST_NOMEM, "array of %zu x %zu bytes overflows", want, size);
    char *grown = realloc(*array, bytes);
    if (grown == NULL)
        return err_set(e, ST_NOMEM, "out of host memory asking for %zu bytes", bytes);
    memset(grown + *cap * size, 0, bytes - *cap * size);
    *array = grown;
    *cap = want;
    return ST_OK;
}

int mem_aligned(void **out, size_t bytes, size_t align, struct err *e)
{
    size_t padded = (bytes + align - 1) / align * align;
    *out = padded < bytes ? NULL : aligned_alloc(align, padded ? padded : align);
    if (*out == NULL)
        return err_set(e, ST_NOMEM, "out of host memory asking for %zu bytes", bytes);
    return ST_OK;
}

struct arena_block {
    struct arena_block *next;
    size_t size, used;
    _Alignas(16) char data[];
};

void arena_init(struct arena *a) { *a = (struct arena){0}; }

void arena_release(struct arena *a)
{
    for (struct arena_block *b = a->head, *next; b != NULL; b = next) {
        next = b->next;
        free(b);
    }
    arena_init(a);
}

void *arena_alloc(struct arena *a, size_t bytes)
{
    enum { BLOCK = 16384 };
    if (bytes > SIZE_MAX / 2)
        return NULL;
    size_t need = (bytes + 15) & ~(size_t)15;
    if (a->head == NULL || a->head->size - a->head->used < need) {
        size_t size = need > BLOCK ? need : BLOCK;
        struct arena_block *b = calloc(1, sizeof *b + size);
        if (b == NULL)
            return NULL;
        b->size = size;
        b->next = a->head;
        a->head = b;
    }
    void *p = a->head->data + a->head->used;
    a->head->used += need;
    a->used_bytes += bytes;
    return p;
}

char *arena_strndup(struct arena *a, const char *s, size_t n)
{
    char *p = arena_alloc(a, n + 1);
    if (p != NULL)
        memcpy(p, s, n);
    return p;
}

char *arena_strdup(struct arena *a, const char *s) { return arena_strndup(a, s, strlen(s)); }

char *arena_printf(struct arena *a, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    char *p = n < 0 ? NULL : arena_alloc(a, (size_t)n + 1);
    if (p != NULL)
        vsnprintf(p, (size_t)n + 1, fmt, again);
    va_end(again);
    return p;
}
