/* Counter-based random numbers (Philox4x32-10). A draw is a pure function of key and counter, so
 * random values are keyed by meaning (parameter key; or site, step, sample, position, channel) and
 * never by thread, rank or microbatch. Inline: kernels of every back end use the same function. */
#ifndef BRAID_BASE_PHILOX_H
#define BRAID_BASE_PHILOX_H

#include <stdint.h>

/* For small functions that host and GPU share. */
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

struct philox4 {
    uint32_t v[4];
};

HOST_DEVICE static inline struct philox4 philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    struct philox4 r = {{c0, c1, c2, c3}};
    return r;
}

/* (0, 1): never 0, so that a logarithm of it is finite. */
HOST_DEVICE static inline double u32_to_unit(uint32_t x) { return ((double)x + 0.5) * (1.0 / 4294967296.0); }

/* Key of a named source: seed and a name such as "decoder.layers.0.mlp.linear_fc1.weight". */
uint64_t rng_key(uint64_t seed, const char *name);
/* i-th value of the stream `key`, whatever was drawn before. */
double rng_uniform(uint64_t key, uint64_t i);             /* (0, 1) */
double rng_normal(uint64_t key, uint64_t i);              /* N(0, 1), Box-Muller */
uint64_t rng_below(uint64_t key, uint64_t i, uint64_t n); /* 0..n-1, bias below n / 2^64 */

#endif
