/* Walking over layer kinds and residual connections; see kind.h. The lists themselves are in
 * layers/cores.c. */
#include "kind/kind.h"

#include <string.h>

const struct core_kind *core_find(char symbol)
{
    int n;
    const struct core_kind *const *all = core_kinds(&n);
    for (int i = 0; i < n; i++)
        if (all[i]->symbol == symbol)
            return all[i];
    return NULL;
}

const struct core_kind *core_transformer(enum key_place place, bool experts)
{
    int n;
    const struct core_kind *const *all = core_kinds(&n);
    for (int i = 0; i < n; i++)
        if (all[i]->keys.transformer && all[i]->keys.place == place && all[i]->has_experts == experts)
            return all[i];
    return NULL;
}
bool core_in(const struct core_kind *k, const char *pattern) { return strchr(pattern, k->symbol) != NULL; }

bool core_same_family(const struct core_kind *a, const struct core_kind *b)
{
    return strcmp(a->keys.family, b->keys.family) == 0;
}

const struct joint_kind *joint_of(const struct config *c)
{
    int n;
    const struct joint_kind *const *all = joint_kinds(&n), *plain = NULL;
    for (int i = 0; i < n; i++) {
        if (all[i]->chosen == NULL)
            plain = all[i];
        else if (all[i]->chosen(c))
            return all[i];
    }
    return plain;
}

bool kind_at(int i, struct kind_at *out)
{
    int n_cores, n_joints;
    const struct core_kind *const *cores = core_kinds(&n_cores);
    const struct joint_kind *const *joints = joint_kinds(&n_joints);
    if (i < n_cores)
        *out = (struct kind_at){.options = &cores[i]->options, .core = cores[i]};
    else if (i < n_cores + n_joints)
        *out = (struct kind_at){.options = &joints[i - n_cores]->options};
    return i < n_cores + n_joints;
}

/* Several kinds may have a group of one name (core_attn): i counts over all of that name. */
const struct recompute_group *kind_recompute(const char *name, int i)
{
    int n_cores, n_joints;
    const struct core_kind *const *cores = core_kinds(&n_cores);
    const struct joint_kind *const *joints = joint_kinds(&n_joints);
    for (int k = 0; k < n_cores + n_joints; k++) {
        const struct recompute_group *g = k < n_cores ? cores[k]->recompute : joints[k - n_cores]->recompute;
        for (int j = 0; j < KIND_MAX_GROUPS && g[j].name != NULL; j++)
            if (strcmp(g[j].name, name) == 0 && i-- == 0)
                return &g[j];
    }
    return NULL;
}
