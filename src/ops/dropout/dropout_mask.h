/* The mask of dropout.h for a run of channels at once, in a form compilers turn into SIMD code.
 * Same bits as dropout_draw; for the CPU ops that apply dropout. */
#ifndef BRAID_OPS_DROPOUT_MASK_H
#define BRAID_OPS_DROPOUT_MASK_H

#include "ops/dropout/dropout.h"

enum { DROPOUT_DRAWS = 16, DROPOUT_RUN = 4 * DROPOUT_DRAWS }; /* channels per call */

/* One round of Philox on the counters c0..c3. */
#define DROPOUT_ROUND(r)                                                                                               \
    do {                                                                                                               \
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;                                     \
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ (k0 + (r)*0x9E3779B9u);                                                       \
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ (k1 + (r)*0xBB67AE85u);                                                       \
        c1 = (uint32_t)p1;                                                                                             \
        c3 = (uint32_t)p0;                                                                                             \
    } while (0)

/* bits[i]: the draw of channel first + i, i < DROPOUT_RUN; first is a multiple of 4. The rounds are
 * written out so that the counters stay in vector registers from the first to the last. */
static inline void dropout_bits(uint64_t key, int64_t step, int64_t sample, int64_t pos, int64_t first,
                                uint32_t bits[DROPOUT_RUN])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32), start = (uint32_t)(first / 4);
    uint32_t last = (uint32_t)step ^ (uint32_t)((uint64_t)sample >> 32);
#pragma omp simd
    for (int i = 0; i < DROPOUT_DRAWS; i++) {
        uint32_t c0 = start + (uint32_t)i, c1 = (uint32_t)pos, c2 = (uint32_t)sample, c3 = last;
        DROPOUT_ROUND(0u);
        DROPOUT_ROUND(1u);
        DROPOUT_ROUND(2u);
        DROPOUT_ROUND(3u);
        DROPOUT_ROUND(4u);
        DROPOUT_ROUND(5u);
        DROPOUT_ROUND(6u);
        DROPOUT_ROUND(7u);
        DROPOUT_ROUND(8u);
        DROPOUT_ROUND(9u);
        bits[4 * i] = c0;
        bits[4 * i + 1] = c1;
        bits[4 * i + 2] = c2;
        bits[4 * i + 3] = c3;
    }
}
#undef DROPOUT_ROUND

#endif
