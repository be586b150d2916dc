/* The handshake of two ranks; see tcp_hand_int.h. */
#include "comm/tcp_hand_int.h"

#include <string.h>

const uint64_t hand_magic = 0x32646961726221ull; /* this protocol, second version */

enum { STAGE_HELLO, STAGE_CHALLENGE, STAGE_PROOF, STAGE_END };

static void sign(const struct hand *h, const struct hand_job *j, const char *label, uint8_t out[SHA256_BYTES])
{
    struct hmac m;
    hmac_begin(&m, j->key, j->n_key);
    hmac_add(&m, label, strlen(label) + 1);
    hmac_add(&m, &h->hello, sizeof h->hello);
    hmac_add(&m, h->nonce, sizeof h->nonce);
    hmac_end(&m, out);
}

static void queue_out(struct hand *h, const void *bytes, size_t n)
{
    memcpy(h->out + h->n_out, bytes, n);
    h->n_out += n;
}

static void expect(struct hand *h, int stage, size_t want)
{
    h->stage = stage;
    h->n_in = 0;
    h->want = want;
}

void hand_open_client(struct hand *h, const struct hand_job *j, const struct hand_hello *me, const uint8_t *nonce)
{
    *h = (struct hand){.hello = *me};
    h->hello.magic = hand_magic;
    h->hello.job = j->job;
    h->hello.host[sizeof h->hello.host - 1] = '\0';
    memcpy(h->hello.nonce, nonce, HAND_NONCE_BYTES);
    queue_out(h, &h->hello, sizeof h->hello);
    expect(h, STAGE_CHALLENGE, sizeof(struct hand_challenge));
}

void hand_open_server(struct hand *h, const uint8_t *nonce)
{
    *h = (struct hand){.is_server = true};
    memcpy(h->nonce, nonce, HAND_NONCE_BYTES);
    expect(h, STAGE_HELLO, sizeof(struct hand_hello));
}

/* The server answers another job's rank too, so that it learns at once that it is wrong here. */
static enum hand_result take_hello(struct hand *h, const struct hand_job *j)
{
    struct hand_challenge c = {.magic = hand_magic, .job = j->job};
    memcpy(&h->hello, h->in, sizeof h->hello);
    memcpy(c.nonce, h->nonce, sizeof c.nonce);
    sign(h, j, "server", c.mac);
    queue_out(h, &c, sizeof c);
    bool other = h->hello.job != j->job;
    h->hello.host[sizeof h->hello.host - 1] = '\0'; /* signed as it came, shown as text */
    expect(h, STAGE_PROOF, sizeof(struct hand_proof));
    return other ? HAND_OTHER_JOB : HAND_MORE;
}

static enum hand_result take_challenge(struct hand *h, const struct hand_job *j)
{
    struct hand_challenge c;
    uint8_t mac[SHA256_BYTES];
    memcpy(&c, h->in, sizeof c);
    if (c.job != j->job)
        return HAND_OTHER_JOB;
    memcpy(h->nonce, c.nonce, sizeof h->nonce);
    sign(h, j, "server", mac);
    if (!bytes_equal_secret(mac, c.mac, sizeof mac))
        return HAND_SECRET;
    sign(h, j, "client", mac);
    queue_out(h, mac, sizeof mac);
    expect(h, STAGE_END, 0);
    return HAND_DONE;
}

static enum hand_result take_proof(struct hand *h, const struct hand_job *j)
{
    uint8_t mac[SHA256_BYTES];
    sign(h, j, "client", mac);
    if (!bytes_equal_secret(mac, h->in, sizeof mac))
        return HAND_SECRET;
    expect(h, STAGE_END, 0);
    return HAND_DONE;
}

enum hand_result hand_take(struct hand *h, const struct hand_job *j, const void *bytes, size_t n)
{
    uint64_t magic = 0;
    if (h->stage == STAGE_END || n > h->want - h->n_in)
        return HAND_STRANGER;
    memcpy(h->in + h->n_in, bytes, n);
    h->n_in += n;
    /* Another protocol is recognised by its first bytes. */
    size_t known = h->n_in < sizeof magic ? h->n_in : sizeof magic;
    memcpy(&magic, h->in, known);
    if (h->stage != STAGE_PROOF && memcmp(&magic, &hand_magic, known) != 0)
        return HAND_STRANGER;
    if (h->n_in < h->want)
        return HAND_MORE;
    switch (h->stage) {
    case STAGE_HELLO: return take_hello(h, j);
    case STAGE_CHALLENGE: return take_challenge(h, j);
    default: return take_proof(h, j);
    }
}

void hand_sent(struct hand *h, size_t n)
{
    h->n_out -= n;
    memmove(h->out, h->out + n, h->n_out);
}
