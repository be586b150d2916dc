/* Layer patterns from ratios: Megatron's old way of describing a hybrid model. */
#include "config/config.h"

#include <math.h>
#include <string.h>

/* To the nearest, halves to the even side, whatever rounding mode the process is in. */
static int64_t round_half_even(double v)
{
    double down = floor(v), rest = v - down;
    return (int64_t)down + (rest > 0.5 || (rest == 0.5 && fmod(down, 2) != 0));
}

/* Spread a symbol over the M's with `gap` of them in front of each. */
static void spread(char *out, int64_t n, char symbol, double gap)
{
    double left = gap;
    for (int64_t i = 0; i < n; i++) {
        if (out[i] != 'M')
            continue;
        if (left < 0.5) {
            out[i] = symbol;
            left += gap;
        } else {
            left -= 1;
        }
    }
}

bool config_ratio_pattern(int64_t layers, double attn, double mlp, char out[CONFIG_RATIO_LAYERS + 1])
{
    if (layers < 1 || layers > CONFIG_RATIO_LAYERS || !(attn >= 0 && mlp >= 0 && attn + mlp <= 1))
        return false;
    int64_t n_attn = round_half_even((double)layers * attn), n_mlp = round_half_even((double)layers * mlp);
    int64_t rest = layers - n_attn;
    memset(out, 'M', (size_t)layers);
    out[layers] = '\0';
    spread(out, layers, '*', (double)rest / (double)(n_attn + 1));
    if (n_mlp > 0)
        spread(out, layers, '-', (double)(rest - n_mlp) / (double)n_mlp);
    return true;
}
