/* SHA-256 and HMAC-SHA-256 (FIPS 180-4, RFC 2104), for messages that must come from somebody who
 * knows a secret. Checksums of files and names use hash64(), which is faster and proves nothing. */
#ifndef BRAID_BASE_SHA256_H
#define BRAID_BASE_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SHA256_BYTES = 32, SHA256_BLOCK = 64 };

struct sha256 {
    uint32_t h[8];
    uint64_t n_bytes; /* added so far */
    uint8_t block[SHA256_BLOCK];
};
void sha256_begin(struct sha256 *s);
void sha256_add(struct sha256 *s, const void *bytes, size_t n);
void sha256_end(struct sha256 *s, uint8_t out[SHA256_BYTES]);

struct hmac {
    struct sha256 inner, outer;
};
void hmac_begin(struct hmac *m, const void *key, size_t n_key);
void hmac_add(struct hmac *m, const void *bytes, size_t n);
void hmac_end(struct hmac *m, uint8_t out[SHA256_BYTES]);

/* Takes the same time wherever the two differ. */
bool bytes_equal_secret(const void *a, const void *b, size_t n);

#endif
