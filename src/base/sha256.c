/* SHA-256 and HMAC-SHA-256; see sha256.h. Written for a few hundred bytes per handshake: plain
 * code, no tables but the standard's. */
#include "base/sha256.h"

#include <string.h>

static const uint32_t round_constant[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

static void compress(uint32_t h[8], const uint8_t *block)
{
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
               block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    memcpy(v, h, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25), choose = (v[4] & v[5]) ^ (~v[4] & v[6]);
        uint32_t t1 = v[7] + s1 + choose + round_constant[i] + w[i];
        uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22),
                 majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
        memmove(v + 1, v, 7 * sizeof v[0]);
        v[4] += t1;
        v[0] = t1 + s0 + majority;
    }
    for (int i = 0; i < 8; i++)
        h[i] += v[i];
}

void sha256_begin(struct sha256 *s)
{
    *s = (struct sha256){
        {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}, 0, {0}};
}

void sha256_add(struct sha256 *s, const void *bytes, size_t n)
{
    const uint8_t *at = bytes;
    while (n > 0) {
        size_t used = (size_t)(s->n_bytes % SHA256_BLOCK), k = SHA256_BLOCK - used;
        k = k < n ? k : n;
        memcpy(s->block + used, at, k);
        s->n_bytes += k;
        at += k;
        n -= k;
        if (used + k == SHA256_BLOCK)
            compress(s->h, s->block);
    }
}

void sha256_end(struct sha256 *s, uint8_t out[SHA256_BYTES])
{
    static const uint8_t padding[SHA256_BLOCK] = {0x80};
    uint64_t bits = s->n_bytes * 8;
    uint8_t length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)(bits >> (56 - 8 * i));
    size_t used = (size_t)(s->n_bytes % SHA256_BLOCK);
    sha256_add(s, padding, used < 56 ? 56 - used : 120 - used);
    sha256_add(s, length, sizeof length);
    for (int i = 0; i < SHA256_BYTES; i++)
        out[i] = (uint8_t)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}

void hmac_begin(struct hmac *m, const void *key, size_t n_key)
{
    uint8_t block[SHA256_BLOCK] = {0}, pad[SHA256_BLOCK];
    if (n_key > SHA256_BLOCK) {
        sha256_begin(&m->inner);
        sha256_add(&m->inner, key, n_key);
        sha256_end(&m->inner, block);
    } else if (n_key > 0) {
        memcpy(block, key, n_key);
    }
    for (int i = 0; i < SHA256_BLOCK; i++)
        pad[i] = block[i] ^ 0x36;
    sha256_begin(&m->inner);
    sha256_add(&m->inner, pad, sizeof pad);
    for (int i = 0; i < SHA256_BLOCK; i++)
        pad[i] = block[i] ^ 0x5c;
    sha256_begin(&m->outer);
    sha256_add(&m->outer, pad, sizeof pad);
}

void hmac_add(struct hmac *m, const void *bytes, size_t n) { sha256_add(&m->inner, bytes, n); }

void hmac_end(struct hmac *m, uint8_t out[SHA256_BYTES])
{
    uint8_t inner[SHA256_BYTES];
    sha256_end(&m->inner, inner);
    sha256_add(&m->outer, inner, sizeof inner);
    sha256_end(&m->outer, out);
}

bool bytes_equal_secret(const void *a, const void *b, size_t n)
{
    const volatile uint8_t *x = a, *y = b;
    uint8_t differs = 0;
    for (size_t i = 0; i < n; i++)
        differs |= (uint8_t)(x[i] ^ y[i]);
    return differs == 0;
}
