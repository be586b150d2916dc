/* The handshake of two ranks over TCP, as a pure machine: bytes in, bytes out, no sockets, so that
 * a fuzzer can drive it.
 *
 *   client -> server   hello      who it is, where it listens, a nonce
 *   server -> client   challenge  a nonce, MAC("server", hello, nonce): it knows the secret
 *   client -> server   proof      MAC("client", hello, nonce): so does the client
 *
 * MAC is HMAC-SHA-256 under the job's secret; without one the key is empty, and the handshake only
 * keeps other programs and other jobs apart. Both nonces are in both MACs, so that nothing recorded
 * can be used again; the labels differ, so that a MAC cannot be sent back to where it came from. */
#ifndef BRAID_COMM_TCP_HAND_INT_H
#define BRAID_COMM_TCP_HAND_INT_H

#include "base/base.h"

enum { HAND_NONCE_BYTES = 16 };

/* Integers are in the order of the machine: a rank of the other order does not know the magic
 * number. */
struct hand_hello {
    uint64_t magic, job;
    int32_t rank, size, port, pid;
    char host[40];
    uint8_t nonce[HAND_NONCE_BYTES];
};
struct hand_challenge {
    uint64_t magic, job;
    uint8_t nonce[HAND_NONCE_BYTES], mac[SHA256_BYTES];
};
struct hand_proof {
    uint8_t mac[SHA256_BYTES];
};

/* What both sides know before. */
struct hand_job {
    uint64_t job; /* the same on all ranks of a job, another for other jobs */
    const void *key;
    size_t n_key;
};

enum hand_result {
    HAND_MORE,      /* not at its end */
    HAND_DONE,      /* the other side knows the secret; of a server hello says who it is */
    HAND_STRANGER,  /* the other side uses another protocol */
    HAND_OTHER_JOB, /* a rank, but of another job */
    HAND_SECRET,    /* a rank of this job with another secret */
};
struct hand {
    bool is_server;
    int stage;
    struct hand_hello hello;
    uint8_t nonce[HAND_NONCE_BYTES]; /* the server's */
    uint8_t in[sizeof(struct hand_hello)], out[sizeof(struct hand_hello)];
    size_t n_in, want, n_out; /* received of what is wanted; to be sent, from the start of out */
};
extern const uint64_t hand_magic;

/* nonce: HAND_NONCE_BYTES random bytes. hello of a client: rank, size, port, pid and host; the rest
 * is filled in. */
void hand_open_client(struct hand *h, const struct hand_job *j, const struct hand_hello *me, const uint8_t *nonce);
void hand_open_server(struct hand *h, const uint8_t *nonce);
/* At most want - n_in bytes that have arrived. New bytes to send may be in out afterwards. */
enum hand_result hand_take(struct hand *h, const struct hand_job *j, const void *bytes, size_t n);
/* The first n bytes of out have been sent. */
void hand_sent(struct hand *h, size_t n);

#endif
