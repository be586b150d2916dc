/* The table of all parameters; see reshard_int.h. */
#include "train/reshard_int.h"

#include <stdlib.h>
#include <string.h>

static bool holds_all(const struct model *m)
{
    return m->mesh.pp == 1 && m->mesh.ep == 1 && m->mesh.etp == 1 && m->mesh.tp == 1;
}

/* The same model on one rank, on paper: nothing is allocated for it. */
static int make_paper(struct full_table *f, const struct model *m, struct err *e)
{
    const struct config_train *c = &m->cfg->train;
    struct model_plan_opts o = {.name = "paper", .mode = BUILD_TRAIN, .batch = c->micro_batch, .seq = c->seq};
    f->made = true;
    TRY(model_init(&f->paper, m->cfg, m->dev, e));
    TRY(model_plan_build(&f->paper, &f->plan, &o, e));
    f->params = &f->paper.params;
    return ST_OK;
}

/* The whole parameter's elements, as the part says. */
static int64_t whole_elems(const struct param *p)
{
    int64_t n = param_elems(p);
    if (p->shard.full > 0)
        n = p->dim[0] > 0 ? n / p->dim[0] * p->shard.full : 0;
    return p->slice.ranks > 0 ? n * p->slice.ranks : n;
}

int reshard_copy(const struct param *p, int64_t first, int64_t n, void *part, void *whole, int64_t size,
                 enum reshard way, struct err *e)
{
    if (first < 0 || n < 0 || first + n > param_elems(p))
        return err_set(e, ST_INTERNAL, "elements %lld .. %lld of a part of %s that has %lld", (long long)first,
                       (long long)(first + n), p->key, (long long)param_elems(p));
    for (int64_t at = 0; at < n;) {
        struct param_run run = param_run_from(p, first + at);
        int64_t here = min_i64(run.n, n - at);
        if (here <= 0 || run.whole < 0 || run.whole + here > whole_elems(p))
            return err_set(e, ST_INTERNAL, "element %lld of a part of %s has no place in the whole",
                           (long long)(first + at), p->key);
        char *a = (char *)part + at * size, *b = (char *)whole + run.whole * size;
        memcpy(way == RESHARD_TAKE ? a : b, way == RESHARD_TAKE ? b : a, (size_t)(here * size));
        at += here;
    }
    return ST_OK;
}

int full_table_open(struct full_table *f, const struct model *m, struct err *e)
{
    int st;
    *f = (struct full_table){.params = &m->params};
    if (!holds_all(m))
        TRY_OUT(make_paper(f, m, e));
    TRY_OUT(mem_array((void **)&f->local, (size_t)f->params->n, sizeof *f->local, e));
    for (int k = 0; k < f->params->n; k++)
        f->local[k] = param_find(&m->params, f->params->list[k].p.key);
    return ST_OK;
out:
    full_table_close(f);
    return st;
}

void full_table_close(struct full_table *f)
{
    if (f->made) {
        model_plan_release(&f->plan);
        model_release(&f->paper);
    }
    free(f->local);
    *f = (struct full_table){0};
}
