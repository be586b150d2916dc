/* The registry of op descriptors, and calls through them: both from ops.def. */
#include "ops/opdesc.h"
#include "ops/ops.h"

#include <string.h>

#define OP(name, ref, cpu, cuda) extern const struct op_desc name##_desc;
#define ALIAS(name, op) extern const struct op_desc name##_desc;
#include "ops/ops.def"
#undef OP
#undef ALIAS

const struct op_desc *const *op_registry(int *n)
{
    static const struct op_desc *const all[] = {
#define OP(name, ref, cpu, cuda) &name##_desc,
#define ALIAS(name, op) &name##_desc,
#include "ops/ops.def"
    };
    *n = countof(all);
    return all;
}

const struct op_desc *op_find(const char *name)
{
    int n;
    const struct op_desc *const *all = op_registry(&n);
    for (int i = 0; i < n; i++)
        if (all[i] != NULL && strcmp(all[i]->name, name) == 0)
            return all[i];
    return NULL;
}

bool ops_has(const struct ops *o, const char *name)
{
    const struct {
        const char *name;
        bool there;
    } entry[] = {
#undef OP
#undef ALIAS
#define OP(name, ref, cpu, cuda) {#name, o->name != NULL},
#define ALIAS(name, op) {#name, o->op != NULL},
#include "ops/ops.def"
    };
    for (int i = 0; i < countof(entry); i++)
        if (strcmp(entry[i].name, name) == 0)
            return entry[i].there;
    return false;
}
