/* Which core a pattern symbol means. One line per core; those without a declare function are known to the
 * pattern language but cannot be built yet, and say so before anything else happens. */
#include "layers/layer.h"

extern const struct core_kind core_attention, core_mlp;
extern const struct core_kind core_moe;
extern const struct core_kind core_mamba2;
extern const struct core_kind core_gdn;
extern const struct core_kind core_mla;

const struct core_kind *core_find(char symbol)
{
    static const struct core_kind no_dsa = {.symbol = 'D', .name = "sparse attention"};
    static const struct core_kind *const all[] = {
        &core_attention, &core_mlp, &core_moe, &core_mamba2, &core_mla, &core_gdn, &no_dsa,
    };
    for (int i = 0; i < countof(all); i++)
        if (all[i]->symbol == symbol)
            return all[i];
    return NULL;
}
