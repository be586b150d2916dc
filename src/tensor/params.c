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

/* ---- tensor parallelism ---------------------------------------------------------------------- */

/* The dimension over all ranks. */
static int64_t whole_dim(const struct param *p, int dim)
{
    if (p->slice.ranks > 0 && dim == p->split.dim)
        return p->dim[dim] * p->slice.ranks;
    return dim == 0 && p->shard.full > 0 ? p->shard.full : p->dim[dim];
}

void param_replicate(struct param *p, enum split_grad grad)
{
    p->split = (struct param_split){.how = SPLIT_NONE, .grad = grad};
}

void param_split(struct param *p, int dim, enum split_unit unit, int64_t units)
{
    p->split = (struct param_split){0};
    param_split_section(p, dim, whole_dim(p, dim), unit, units);
}

void param_split_section(struct param *p, int dim, int64_t size, enum split_unit unit, int64_t units)
{
    struct param_split *s = &p->split;
    s->how = SPLIT_DIM;
    s->dim = dim;
    if (s->n_sections < PARAM_MAX_SECTIONS) /* one too many is seen by the check: the sizes do not add up */
        s->section[s->n_sections++] = (struct split_section){.size = size, .unit = unit, .units = units};
}

const char *split_unit_name(enum split_unit unit)
{
    static const char *const names[] = {[UNIT_HEADS] = "heads", [UNIT_GROUPS] = "groups", [UNIT_CHANNELS] = "channels",
                                        [UNIT_FFN] = "ffn",     [UNIT_VOCAB] = "vocab",   [UNIT_EXPERTS] = "experts"};
    return (unsigned)unit < countof(names) ? names[unit] : "?";
}

/* The largest number of ranks below this one that can share every section. */
static int64_t shareable(const struct param_split *s, int64_t ranks)
{
    int64_t n = ranks - 1;
    for (bool all = false; n > 1 && !all; n -= !all) {
        all = true;
        for (int i = 0; i < s->n_sections; i++)
            all &= s->section[i].units % n == 0;
    }
    return n;
}

int param_split_check(const struct param *p, int64_t ranks, struct err *e)
{
    const struct param_split *s = &p->split;
    if (s->how == SPLIT_UNKNOWN)
        return err_set(e, ST_INTERNAL, "parameter %s does not declare how tensor parallelism divides it", p->key);
    if (s->how == SPLIT_NONE)
        return ST_OK;
    int64_t sum = 0;
    for (int i = 0; i < s->n_sections; i++) {
        const struct split_section *x = &s->section[i];
        sum += x->size;
        if (x->units < 1 || x->size % x->units != 0)
            return err_set(e, ST_INTERNAL, "parameter %s: section %d of %lld is not of %lld whole %s", p->key, i,
                           (long long)x->size, (long long)x->units, split_unit_name(x->unit));
        if (x->units % ranks != 0) {
            err_set(e, ST_USAGE, "parameter %s: %lld %s cannot be shared by %lld ranks", p->key, (long long)x->units,
                    split_unit_name(x->unit), (long long)ranks);
            if (x->unit == UNIT_VOCAB)
                return err_hint(e, "model.vocab_multiple = %lld pads it; parallel.tp = %lld would do without",
                                (long long)ranks, (long long)shareable(s, ranks));
            return err_hint(e, "parallel.tp = %lld would do", (long long)shareable(s, ranks));
        }
    }
    if (s->dim >= p->rank || sum != whole_dim(p, s->dim))
        return err_set(e, ST_INTERNAL, "parameter %s: the sections of dimension %d add up to %lld", p->key, s->dim,
                       (long long)sum);
    return ST_OK;
}

int param_cut(struct param *p, int ranks, int rank, struct err *e)
{
    TRY(param_split_check(p, ranks, e));
    if (p->split.how != SPLIT_DIM || ranks == 1)
        return ST_OK;
    p->dim[p->split.dim] /= ranks;
    p->slice.ranks = ranks;
    p->slice.rank = rank;
    return ST_OK;
}

/* Elements of one index of a dimension: the product of the dimensions after it. */
static int64_t elems_below(const struct param *p, int dim)
{
    int64_t n = 1;
    for (int i = dim + 1; i < p->rank; i++)
        n *= p->dim[i];
    return n;
}

struct param_run param_run_from(const struct param *p, int64_t local)
{
    int64_t elems = param_elems(p);
    if (p->slice.ranks == 0) {
        int64_t first = p->shard.full > 0 && p->dim[0] > 0 ? p->shard.first * elems_below(p, 0) : 0;
        return (struct param_run){.whole = first + local, .n = elems - local};
    }
    int d = p->split.dim;
    int64_t inner = elems_below(p, d), row = p->dim[d] * inner, ranks = p->slice.ranks;
    int64_t before = local / row, at = local % row, local_from = 0, from = 0;
    if (d > 0 && p->shard.full > 0)
        before += p->shard.first * (elems_below(p, 0) / row);
    for (int i = 0; i < p->split.n_sections; i++) {
        int64_t size = p->split.section[i].size * inner, share = size / ranks, in = at - local_from;
        if (in < share)
            return (struct param_run){.whole = before * row * ranks + from + p->slice.rank * share + in,
                                      .n = share - in};
        local_from += share;
        from += size;
    }
    return (struct param_run){0}; /* the check of the split has seen that sections add up */
}

int64_t param_table_elems(const struct param_table *t)
{
    int64_t sum = 0;
    for (int i = 0; i < t->n; i++)
        sum += param_reals(&t->list[i].p);
    return sum;
}
