/* The parameter table; see params.h. */
#include "tensor/params.h"

#include <stdlib.h>
#include <string.h>

void param_table_init(struct param_table *t)
{
    *t = (struct param_table){0};
    arena_init(&t->text);
}

void param_table_release(struct param_table *t)
{
    arena_release(&t->text);
    free(t->list);
    *t = (struct param_table){0};
}

int param_find(const struct param_table *t, const char *key)
{
    for (int i = 0; i < t->n; i++)
        if (strcmp(t->list[i].p.key, key) == 0)
            return i;
    return -1;
}

int param_add(struct param_table *t, const struct param *p, int *index, bool *is_new, struct err *e)
{
    *index = param_find(t, p->key);
    *is_new = *index < 0;
    if (!*is_new) {
        const struct param *have = &t->list[*index].p;
        bool same = have->rank == p->rank && memcmp(have->dim, p->dim, sizeof p->dim[0] * (size_t)p->rank) == 0;
        return same ? ST_OK : err_set(e, ST_INTERNAL, "parameter %s is declared with two shapes", p->key);
    }
    TRY(mem_grow((void **)&t->list, &t->cap, (size_t)t->n + 1, sizeof *t->list, e));
    struct param_entry *row = &t->list[t->n];
    *row = (struct param_entry){.p = *p};
    row->p.key = arena_strdup(&t->text, p->key);
    if (row->p.key == NULL)
        return err_set(e, ST_NOMEM, "out of memory adding parameter %s", p->key);
    *index = t->n++;
    return ST_OK;
}

int64_t param_table_elems(const struct param_table *t)
{
    int64_t sum = 0;
    for (int i = 0; i < t->n; i++)
        sum += param_reals(&t->list[i].p);
    return sum;
}
