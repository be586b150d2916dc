/* Layer patterns from ratios: Megatron's old way of describing a hybrid model. */
#include "config/config.h"
#include "kind/kind.h"

#include <math.h>
#include <string.h>

/* To the nearest, halves to the even side, whatever rounding mode the process is in. */
static int64_t round_half_even(double v)
{
    double down = floor(v), rest = v - down;
    return (int64_t)down + (rest > 0.5 || (rest == 0.5 && fmod(down, 2) != 0));
}

/* Distribute a symbol over the filling layers with `gap` of them in front of each. */
static void distribute(char *out, int64_t n, char filling, char symbol, double gap)
{
    double left = gap;
    for (int64_t i = 0; i < n; i++) {
        if (out[i] != filling)
            continue;
        if (left < 0.5) {
            out[i] = symbol;
            left += gap;
        } else {
            left -= 1;
        }
    }
}

static char filling_symbol(void)
{
    int n, i = 0;
    const struct core_kind *const *all = core_kinds(&n);
    while (i + 1 < n && !all[i]->fills)
        i++;
    return all[i]->symbol;
}

bool config_ratio_pattern(int64_t layers, double attn, double mlp, char out[CONFIG_RATIO_LAYERS + 1])
{
    if (layers < 1 || layers > CONFIG_RATIO_LAYERS || !(attn >= 0 && mlp >= 0 && attn + mlp <= 1))
        return false;
    int64_t n_attn = round_half_even((double)layers * attn), n_mlp = round_half_even((double)layers * mlp);
    int64_t rest = layers - n_attn;
    char filling = filling_symbol(), attention = core_transformer(KEY_PLACE_ATTENTION, false)->symbol,
         dense = core_transformer(KEY_PLACE_MLP, false)->symbol;
    memset(out, filling, (size_t)layers);
    out[layers] = '\0';
    distribute(out, layers, filling, attention, (double)rest / (double)(n_attn + 1));
    if (n_mlp > 0)
        distribute(out, layers, filling, dense, (double)(rest - n_mlp) / (double)n_mlp);
    return true;
}
