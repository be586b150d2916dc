/* Which core a pattern symbol means. One line per core; those without a declare function are known to the
 * pattern language but cannot be built yet, and say so before anything else happens. */
#include "layers/layer.h"

extern const struct core_kind core_attention, core_mlp;

const struct core_kind *core_find(char symbol)
{
    static const struct core_kind named[] = {
        {.symbol = 'M', .name = "Mamba-2"},
        {.symbol = 'G', .name = "gated delta net"},
        {.symbol = '+', .name = "multi-latent attention"},
        {.symbol = 'D', .name = "sparse attention"},
        {.symbol = 'E', .name = "mixture of experts"},
    };
    if (symbol == core_attention.symbol)
        return &core_attention;
    if (symbol == core_mlp.symbol)
        return &core_mlp;
    for (int i = 0; i < countof(named); i++)
        if (named[i].symbol == symbol)
            return &named[i];
    return NULL;
}
