/* The order of later epochs: a keyed permutation computed per index, so that it needs no memory and does
 * not depend on how many steps a run was planned for. A four-round Feistel network over the next
 * power of four, walked until the value falls inside the range. */
#include "data/data_int.h"

static uint64_t feistel(uint64_t key, uint64_t x, int half_bits)
{
    uint64_t mask = (1ull << half_bits) - 1, left = x >> half_bits, right = x & mask;
    for (uint32_t round = 0; round < 4; round++) {
        uint64_t mixed = philox(key, (uint32_t)right, (uint32_t)(right >> 32), round, 0).v[0];
        uint64_t next = (left ^ mixed) & mask;
        left = right;
        right = next;
    }
    return left << half_bits | right;
}

int64_t epoch_sample(int64_t seed, int64_t index, int64_t n)
{
    int64_t epoch = index / n, i = index % n;
    if (epoch == 0)
        return i; /* the layout's own shuffle */
    uint64_t key = rng_key((uint64_t)seed + (uint64_t)epoch * 0x9E3779B97F4A7C15ull, "epoch"), x = (uint64_t)i;
    int half_bits = 1;
    while ((uint64_t)n > 1ull << 2 * half_bits)
        half_bits++;
    do {
        x = feistel(key, x, half_bits);
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}
