/* The Mersenne twister as NumPy's RandomState seeds it and shuffles with it. Sample order must
 * equal Megatron's, so this follows NumPy draw for draw;
 * tools/golden_shuffle.py makes the check. */
#include "data/data_int.h"

enum { MT_N = 624, MT_M = 397 };

void mt_seed(struct mt19937 *r, uint32_t seed)
{
    r->state[0] = seed;
    for (uint32_t i = 1; i < MT_N; i++)
        r->state[i] = 1812433253u * (r->state[i - 1] ^ (r->state[i - 1] >> 30)) + i;
    r->next = MT_N;
}

static void mt_refill(struct mt19937 *r)
{
    uint32_t *s = r->state;
    for (int i = 0; i < MT_N; i++) {
        uint32_t y = (s[i] & 0x80000000u) | (s[(i + 1) % MT_N] & 0x7fffffffu);
        s[i] = s[(i + MT_M) % MT_N] ^ (y >> 1) ^ ((y & 1) ? 0x9908b0dfu : 0);
    }
    r->next = 0;
}

uint32_t mt_next(struct mt19937 *r)
{
    if (r->next >= MT_N)
        mt_refill(r);
    uint32_t y = r->state[r->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

/* Uniform in 0..max by masking and rejection: a draw is 32 bits, as arrays here are below 2^32. */
static uint32_t mt_upto(struct mt19937 *r, uint32_t max)
{
    uint32_t mask = max;
    for (int shift = 1; shift < 32; shift *= 2)
        mask |= mask >> shift;
    uint32_t value;
    do {
        value = mt_next(r) & mask;
    } while (value > max);
    return value;
}

void mt_shuffle(struct mt19937 *r, uint32_t *a, int64_t n)
{
    for (int64_t i = n - 1; i > 0; i--) {
        uint32_t j = mt_upto(r, (uint32_t)i);
        uint32_t kept = a[i];
        a[i] = a[j];
        a[j] = kept;
    }
}
