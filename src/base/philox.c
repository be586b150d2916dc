/* Named random streams on Philox; see philox.h. */
#include "base/philox.h"

#include "base/str.h"

#include <math.h>

__extension__ typedef unsigned __int128 u128; /* gcc and clang; not ISO C */

uint64_t rng_key(uint64_t seed, const char *name) { return hash64_str(name, seed ^ 0x6272616964ull); }

static struct philox4 draw(uint64_t key, uint64_t i) { return philox(key, (uint32_t)i, (uint32_t)(i >> 32), 0, 0); }

double rng_uniform(uint64_t key, uint64_t i) { return u32_to_unit(draw(key, i / 4).v[i % 4]); }

double rng_normal(uint64_t key, uint64_t i)
{
    const double two_pi = 6.283185307179586;
    struct philox4 r = draw(key, i / 2);
    int pair = (int)(i % 2) * 2;
    return sqrt(-2.0 * log(u32_to_unit(r.v[pair]))) * cos(two_pi * u32_to_unit(r.v[pair + 1]));
}

uint64_t rng_below(uint64_t key, uint64_t i, uint64_t n)
{
    struct philox4 r = draw(key, i);
    uint64_t x = (uint64_t)r.v[0] << 32 | r.v[1];
    return (uint64_t)(((u128)x * n) >> 64);
}
