/* The checkpoint of a mesh against that of one rank; see verify_saved_int.h. */
#include "train/verify_saved_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static enum saved_kind kind_of(const char *key)
{
    if (strncmp(key, "exp_avg_sq.", strlen("exp_avg_sq.")) == 0)
        return SAVED_SQUARE;
    return strncmp(key, "exp_avg.", strlen("exp_avg.")) == 0 ? SAVED_MOMENT : SAVED_VALUE;
}

static int keep_one(void *ctx, const char *key, const struct tensor *host, struct err *e)
{
    struct saved *s = ctx;
    TRY(mem_grow((void **)&s->list, &s->cap, (size_t)s->n + 1, sizeof *s->list, e));
    struct saved_tensor *x = &s->list[s->n];
    *x = (struct saved_tensor){.key = strdup(key), .kind = kind_of(key), .n = tensor_elems(host)};
    s->n++;
    if (x->key == NULL)
        return err_set(e, ST_NOMEM, "no memory for the key of a tensor");
    TRY(mem_array((void **)&x->value, (size_t)max_i64(x->n, 1), sizeof *x->value, e));
    for (int64_t i = 0; i < x->n; i++)
        x->value[i] = tensor_get(host, i);
    for (int64_t i = 0; i < x->n; i++)
        s->largest[x->kind] = fmax(s->largest[x->kind], fabs(x->value[i]));
    return ST_OK;
}

int saved_keep(struct saved *s, struct trainer *t, struct err *e) { return trainer_visit_saved(t, keep_one, s, e); }

struct comparison {
    const struct saved *plain;
    struct saved_difference *out;
    int seen;
};

static double largest_difference(const struct saved *plain, const struct saved_tensor *x, const struct tensor *host)
{
    static const double least[SAVED_KINDS] = {[SAVED_MOMENT] = 1e-6, [SAVED_SQUARE] = 1e-12};
    double most = 0, size = least[x->kind] * plain->largest[x->kind];
    if (tensor_elems(host) != x->n)
        return INFINITY;
    for (int64_t i = 0; i < x->n; i++) {
        double d = fabs(tensor_get(host, i) - x->value[i]);
        if (isnan(d))
            return INFINITY;
        most = fmax(most, d);
        size = fmax(size, fabs(x->value[i]));
    }
    return most == 0 ? 0 : most / fmax(size, 1e-300);
}

static int compare_one(void *ctx, const char *key, const struct tensor *host, struct err *e)
{
    struct comparison *c = ctx;
    (void)e;
    int i = 0;
    while (i < c->plain->n && strcmp(c->plain->list[i].key, key) != 0)
        i++;
    double d = i < c->plain->n ? largest_difference(c->plain, &c->plain->list[i], host) : INFINITY;
    if (d > c->out->most) {
        c->out->most = d;
        snprintf(c->out->key, sizeof c->out->key, "%s", key);
    }
    c->seen++;
    return ST_OK;
}

int saved_compare(const struct saved *plain, struct trainer *t, struct saved_difference *out, struct err *e)
{
    struct comparison c = {.plain = plain, .out = out};
    *out = (struct saved_difference){0};
    int st = trainer_visit_saved(t, compare_one, &c, e);
    if (st == ST_INTERNAL) { /* ranks do not hold the parts of one whole; all of them have this error */
        *out = (struct saved_difference){.most = INFINITY};
        snprintf(out->key, sizeof out->key, "%.120s", e->msg);
        err_clear(e);
        return ST_OK;
    }
    TRY(st);
    if (trainer_is_rank0(t) && c.seen != plain->n) {
        out->most = INFINITY;
        snprintf(out->key, sizeof out->key, "the list of tensors");
    }
    return ST_OK;
}

void saved_release(struct saved *s)
{
    for (int i = 0; i < s->n; i++) {
        free(s->list[i].key);
        free(s->list[i].value);
    }
    free(s->list);
    *s = (struct saved){0};
}
