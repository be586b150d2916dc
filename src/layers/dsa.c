/* Sparse attention, symbol 'D': known to the pattern language and to checkpoint keys, but not
 * built. */
#include "layers/layer.h"

const struct core_kind core_dsa = {
    .symbol = 'D',
    .name = "sparse attention",
    .title = "sparse attention",
    .keys = {.family = "attention", .place = KEY_PLACE_ATTENTION, .mixes = true, .transformer = true}};
