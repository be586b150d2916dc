/* Groups of parameters as a run has them: are all globs of use, who is in which group, what freezing saves. */
#include "train/groups_int.h"
#include "train/reshard_int.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* ---- checks ---------------------------------------------------------------------------------- */

static bool matches_any(const struct param_table *t, const char *glob)
{
    for (int k = 0; k < t->n; k++)
        if (str_glob(glob, t->list[k].p.key))
            return true;
    return false;
}

static int unmatched(const struct param_table *t, const char *group, const char *glob, struct err *e)
{
    const char **keys = NULL;
    err_set(e, ST_USAGE, "group.%s.match: '%.200s' matches none of the model's %d parameters", group, glob, t->n);
    const char *near = NULL;
    if (mem_array((void **)&keys, (size_t)t->n, sizeof *keys, NULL) == ST_OK) {
        for (int k = 0; k < t->n; k++)
            keys[k] = t->list[k].p.key;
        near = nearest_name(glob, keys, t->n);
    }
    err_hint(e, "%s%s%s`braid plan --params=on` lists the names; * stands for any text", near ? "did you mean " : "",
             near ? near : "", near ? "? " : "");
    free(keys);
    return ST_USAGE;
}

/* Every word of a list of globs, as a string. */
static int check_globs(const struct param_table *t, const struct config_group *g, struct err *e)
{
    char glob[512];
    for (const char *p = g->match; *p != '\0';) {
        p += strspn(p, ", \t\n");
        size_t n = strcspn(p, ", \t\n");
        if (n >= sizeof glob)
            return err_set(e, ST_USAGE, "group.%s.match: a glob of %zu bytes is too long", g->name, n);
        snprintf(glob, sizeof glob, "%.*s", (int)n, p);
        if (n > 0 && !matches_any(t, glob))
            return unmatched(t, g->name, glob, e);
        p += n;
    }
    return ST_OK;
}

static int check_table(const struct config *c, const struct param_table *t, struct err *e)
{
    int trained = 0, in[CONFIG_MAX_GROUPS] = {0};
    for (int k = 0; k < t->n; k++) {
        trained += param_trained(&t->list[k].p);
        if (t->list[k].p.group > 0)
            in[t->list[k].p.group - 1]++;
    }
    for (int i = 0; i < c->n_groups; i++) {
        TRY(check_globs(t, &c->group[i], e));
        if (in[i] == 0) {
            err_set(e, ST_USAGE, "group.%s has no parameters: all that it matches belong to later groups",
                    c->group[i].name);
            return err_hint(
                e, "of several groups that match a parameter, the last one has it: put the general ones first");
        }
    }
    if (trained == 0) {
        err_set(e, ST_USAGE, "all %d parameters are frozen: there is nothing to train", t->n);
        return err_hint(e, "a group with freeze = off, after the others, trains what it matches");
    }
    return ST_OK;
}

bool groups_given(const struct config *c) { return c->n_groups > 0 || c->lora.rank > 0; }

/* ---- LoRA's targets */

/* The part of a projection that the adapter of this matrix is for, from its key: "q" of
 * "linear_qkv.adapter.adapter_q.linear_in.weight". */
static void part_of_key(const char *key, char *out, size_t size)
{
    static const char mark[] = ".adapter.adapter_";
    const char *at = strstr(key, mark);
    size_t n = at != NULL ? strcspn(at + sizeof mark - 1, ".") : 0;
    snprintf(out, size, "%.*s", (int)n, at != NULL ? at + sizeof mark - 1 : "");
}

static int unknown_target(const struct param_table *t, const char *word, struct err *e)
{
    bool expert = false, other = false;
    for (int k = 0; k < t->n; k++)
        if (t->list[k].p.lora.of == 0 && lora_names(word, t->list[k].p.key, NULL)) {
            expert |= t->list[k].p.expert;
            other |= !t->list[k].p.expert;
        }
    if (expert)
        err_set(e, ST_UNSUPPORTED,
                "lora.targets: '%.200s' names weights of experts, which have no adapters: one grouped product serves "
                "all experts",
                word);
    else if (other)
        err_set(e, ST_UNSUPPORTED,
                "lora.targets: '%.200s' names parameters, but no linear layer that can have an adapter", word);
    else
        err_set(e, ST_USAGE, "lora.targets: '%.200s' names nothing in this model", word);
    return err_hint(e, "linear layers of attention of every kind, MLPs, shared experts, Mamba-2 and gated delta "
                       "net have adapters: all-linear, "
                       "q_proj, linear_qkv, or globs over the names that `braid plan --params=on` lists");
}

static int check_target(const struct param_table *t, const char *word, struct err *e)
{
    char part[64];
    for (int k = 0; k < t->n; k++) {
        const struct param *p = &t->list[k].p;
        part_of_key(p->key, part, sizeof part);
        if (p->lora.of > 0 && lora_names(word, t->list[p->lora.of - 1].p.key, part))
            return ST_OK;
        /* A projection with a single part is named by it, too, which its key does not say. */
        if (p->lora.of > 0 && part[0] == '\0' && lora_names(word, t->list[p->lora.of - 1].p.key, "up"))
            return ST_OK;
    }
    return unknown_target(t, word, e);
}

static int check_targets(const struct config *c, const struct param_table *t, struct err *e)
{
    char word[512];
    for (const char *p = c->lora.targets; c->lora.rank > 0 && *p != '\0';) {
        p += strspn(p, ", \t\n");
        size_t n = strcspn(p, ", \t\n");
        if (n >= sizeof word)
            return err_set(e, ST_USAGE, "lora.targets: a name of %zu bytes is too long", n);
        snprintf(word, sizeof word, "%.*s", (int)n, p);
        if (n > 0)
            TRY(check_target(t, word, e));
        p += n;
    }
    return ST_OK;
}

int groups_check_model(const struct model *m, struct err *e)
{
    struct full_table full;
    if (!groups_given(m->cfg))
        return ST_OK;
    TRY(full_table_open(&full, m, e));
    int st = check_targets(m->cfg, full.params, e);
    if (st == ST_OK)
        st = check_table(m->cfg, full.params, e);
    full_table_close(&full);
    return st;
}

/* ---- for people ------------------------------------------------------------------------------ */

/* A key whose numbers are stars: "decoder.layers.*.mlp.linear_fc1.weight". */
static void starred(const char *key, char *out, size_t size)
{
    size_t n = 0;
    for (const char *p = key; *p != '\0' && n + 1 < size;) {
        bool number = isdigit((unsigned char)*p) && (p == key || p[-1] == '.');
        const char *end = p;
        while (number && isdigit((unsigned char)*end))
            end++;
        number = number && (*end == '.' || *end == '\0');
        out[n++] = number ? '*' : *p;
        p = number ? end : p + 1;
    }
    out[n] = '\0';
}

/* The kind that a parameter is listed under: its group, and whether it is frozen. */
struct kind {
    int group;
    bool frozen, adapter;
};
static bool is_of(const struct param *p, struct kind k)
{
    return !p->buffer && p->group == k.group && p->frozen == k.frozen && (p->lora.of > 0) == k.adapter;
}

static void print_names(const struct param_table *t, struct kind kind, struct buf *out)
{
    char name[256], other[256];
    const char *between = ": ";
    for (int k = 0; k < t->n; k++) {
        int same = 0;
        bool first = is_of(&t->list[k].p, kind);
        starred(t->list[k].p.key, name, sizeof name);
        for (int i = 0; i < t->n && first; i++) {
            starred(t->list[i].p.key, other, sizeof other);
            bool equal = is_of(&t->list[i].p, kind) && strcmp(name, other) == 0;
            first = !(equal && i < k);
            same += equal;
        }
        if (!first)
            continue;
        buf_addf(out, "%s%s", between, same > 1 ? name : t->list[k].p.key);
        if (same > 1)
            buf_addf(out, " x%d", same);
        between = ", ";
    }
    buf_add(out, "\n");
}

static void print_kind(const struct config *c, const struct param_table *t, struct kind kind, struct buf *out)
{
    int n = 0;
    double elems = 0;
    char count[32];
    for (int k = 0; k < t->n; k++)
        if (is_of(&t->list[k].p, kind)) {
            n++;
            elems += (double)param_elems(&t->list[k].p);
        }
    if (n == 0)
        return;
    const struct config_group *g = kind.group > 0 ? &c->group[kind.group - 1] : NULL;
    buf_addf(out, "  %s%s:", kind.adapter ? "adapters, " : "", g != NULL ? g->name : "no group");
    if (kind.frozen)
        buf_add(out, " frozen");
    else if (g != NULL)
        buf_addf(out, " learning rate x %g", g->lr);
    else
        buf_add(out, " trained");
    if (g != NULL && !kind.frozen && g->weight_decay >= 0)
        buf_addf(out, ", weight decay %g", g->weight_decay);
    buf_addf(out, ", %d tensor%s of %s values", n, n == 1 ? "" : "s", human_count(elems, count, sizeof count));
    print_names(t, kind, out);
}

/* What frozen parameters would need beside their values on this rank. */
static void print_saved(const struct model *m, struct buf *out)
{
    double all = 0, frozen = 0, bytes = 0;
    char a[32], b[32], d[32];
    for (int k = 0; k < m->params.n; k++) {
        const struct param *p = &m->params.list[k].p;
        int64_t wide = (int64_t)dtype_bytes(m->dev->wide), elems = param_elems(p);
        if (p->buffer)
            continue;
        all += (double)elems;
        if (!p->frozen)
            continue;
        bool master = param_dtype(p, m->dev->real) != m->dev->wide;
        frozen += (double)elems;
        bytes += (double)(wide * (elems * (master ? 2 : 1) + 2 * shard_updated(m, k).n));
    }
    if (frozen > 0)
        buf_addf(out, "  frozen: %s of %s values%s; gradients, moments%s of %s are not held\n",
                 human_count(frozen, a, sizeof a), human_count(all, b, sizeof b),
                 m->mesh.world > 1 ? " on this rank" : "",
                 m->dev->real != m->dev->wide ? " and fp32 master weights" : "", human_bytes(bytes, d, sizeof d));
}

int groups_print(const struct model *m, struct buf *out, struct err *e)
{
    struct full_table full;
    if (!groups_given(m->cfg))
        return ST_OK;
    TRY(full_table_open(&full, m, e));
    buf_add(out, "groups of parameters\n");
    if (m->cfg->lora.rank > 0)
        buf_addf(out, "  LoRA: rank %lld, alpha %g, %s\n", (long long)m->cfg->lora.rank, m->cfg->lora.alpha,
                 m->cfg->lora.targets);
    for (int i = 1; i <= m->cfg->n_groups + 1; i++)
        for (int f = 0; f < 4; f++)
            print_kind(m->cfg, full.params,
                       (struct kind){.group = i <= m->cfg->n_groups ? i : 0, .frozen = f % 2 != 0, .adapter = f >= 2},
                       out);
    print_saved(m, out);
    full_table_close(&full);
    return buf_check(out, e);
}
