/* One rank that acts as one of many: what it exchanges with itself is really copied, and takes what a link would. Of an
 * exchange of n bytes among R ranks n (R - 1) / R leave a rank. */
#include "comm/comm_int.h"
#include "comm/gpu_int.h"

#include <time.h>

static double cost(const struct world *w, int64_t bytes)
{
    double ranks = w->loop_ranks > 1 ? w->loop_ranks : 1;
    return (double)bytes * (ranks - 1) / ranks / w->loop_rate;
}

static void sleep_until(double when)
{
    double left = when - time_now();
    while (left > 0) {
        struct timespec t = {.tv_sec = (time_t)left, .tv_nsec = (long)((left - (double)(time_t)left) * 1e9)};
        nanosleep(&t, NULL);
        left = when - time_now();
    }
}

static int gpu_exchange(struct comm *c, struct lane *l, const struct exchange *x)
{
    double latency = c->world->loop_latency;
    for (int i = 0; i < x->n; i++) {
        const struct part *p = &x->part[i];
        if (p->send_bytes != p->recv_bytes)
            return err_set(l->err, ST_INTERNAL, "%s: sends itself %lld bytes and takes %lld", x->what,
                           (long long)p->send_bytes, (long long)p->recv_bytes);
        TRY(gpu_comm_slow_copy(l, p->recv, p->send, p->send_bytes, latency, cost(c->world, p->send_bytes)));
        latency = 0; /* one message's worth: the parts travel together */
    }
    return ST_OK;
}

static int loop_exchange(struct comm *c, struct lane *l, const struct exchange *x, struct err *e)
{
    if (on_gpu(l))
        return gpu_exchange(c, l, x);
    double end = time_now() + c->world->loop_latency;
    for (int i = 0; i < x->n; i++)
        end += cost(c->world, x->part[i].send_bytes);
    TRY(move_own_parts(c, l, x, e));
    sleep_until(end);
    return ST_OK;
}

static int no_peer(struct comm *c, struct lane *l, const void *data, const struct message_to *to, struct err *e)
{
    (void)l;
    (void)data;
    return err_set(e, ST_INTERNAL, "the loop has no peer %d in group %s", to->peer, c->name);
}
static int no_peer_in(struct comm *c, struct lane *l, void *data, const struct message_to *from, struct err *e)
{
    return no_peer(c, l, data, from, e);
}

const struct transport transport_loop = {.name = "loop",
                                         .plays_link = true,
                                         .captures = true,
                                         .exchange = loop_exchange,
                                         .send = no_peer,
                                         .recv = no_peer_in};

static int open_loop(struct world **out, const struct world_opts *o, struct err *e)
{
    TRY(world_new(out, o, 0, 1, e));
    (*out)->on_lane = &transport_loop;
    return ST_OK;
}
const struct transport_kind transport_kind_loop = {.ranks = RANKS_ONE, .open = open_loop};
