/* Any bytes, in any pieces, as one side of the handshake of two ranks. The first byte chooses the
 * side and whether MACs are filled in correctly. Without the secret nobody is let in, whatever the
 * bytes; with it, what was said is what arrived. */
#include "comm/tcp_hand_int.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void need(bool condition)
{
    if (!condition)
        abort();
}

static const struct hand_job job = {.job = 7, .key = "a secret that nobody knows", .n_key = 26};
static const uint8_t nonce[2][HAND_NONCE_BYTES] = {{1}, {2}};

/* Feeds bytes in pieces of 1 to 16, as long as the machine wants some. */
static enum hand_result feed(struct hand *h, const uint8_t *data, size_t size)
{
    enum hand_result r = HAND_MORE;
    while (r == HAND_MORE && size > 0) {
        size_t n = 1 + data[0] % 16, room = h->want - h->n_in;
        n = n < size ? n : size;
        n = n < room ? n : room;
        r = hand_take(h, &job, data, n);
        data += n;
        size -= n;
        need(h->n_out <= sizeof h->out && h->n_in <= h->want);
        if (h->n_out > 0)
            hand_sent(h, h->n_out);
    }
    return r;
}

/* An honest client with fields from the input against an honest server. */
static void honest(const uint8_t *data, size_t size)
{
    struct hand client, server;
    struct hand_hello me = {0};
    memcpy(&me, data, size < sizeof me ? size : sizeof me);
    hand_open_client(&client, &job, &me, nonce[0]);
    hand_open_server(&server, nonce[1]);
    enum hand_result r = hand_take(&server, &job, client.out, client.n_out);
    need(r == HAND_MORE && server.n_out == sizeof(struct hand_challenge));
    hand_sent(&client, client.n_out);
    r = hand_take(&client, &job, server.out, server.n_out);
    need(r == HAND_DONE && client.n_out == sizeof(struct hand_proof));
    hand_sent(&server, server.n_out);
    r = hand_take(&server, &job, client.out, client.n_out);
    need(r == HAND_DONE && server.hello.rank == me.rank && server.hello.size == me.size &&
         server.hello.port == me.port);
    need(strlen(server.hello.host) < sizeof server.hello.host);
    need(hand_take(&server, &job, "x", 1) == HAND_STRANGER); /* nothing comes after the end */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct hand h;
    if (size < 1)
        return 0;
    switch (data[0] % 3) {
    case 0:
        hand_open_server(&h, nonce[1]);
        need(feed(&h, data + 1, size - 1) != HAND_DONE);
        need(memchr(h.hello.host, '\0', sizeof h.hello.host) != NULL);
        break;
    case 1:
        hand_open_client(&h, &job, &(struct hand_hello){.rank = 1, .size = 2}, nonce[0]);
        hand_sent(&h, h.n_out);
        need(feed(&h, data + 1, size - 1) != HAND_DONE);
        break;
    default: honest(data + 1, size - 1);
    }
    return 0;
}
