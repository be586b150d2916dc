/* One rank, which waits for no other. */
#include "comm/comm_int.h"

static int no_peer(struct comm *c, struct lane *l, const void *data, const struct message_to *to, struct err *e)
{
    (void)l;
    (void)data;
    return err_set(e, ST_INTERNAL, "one rank alone has no peer %d in group %s", to->peer, c->name);
}
static int no_peer_in(struct comm *c, struct lane *l, void *data, const struct message_to *from, struct err *e)
{
    return no_peer(c, l, data, from, e);
}

const struct transport transport_self = {
    .name = "self", .captures = true, .exchange = move_own_parts, .send = no_peer, .recv = no_peer_in};

static int open_self(struct world **out, const struct world_opts *o, struct err *e)
{
    return world_new(out, o, 0, 1, e);
}
const struct transport_kind transport_kind_self = {.ranks = RANKS_ONE, .open = open_self};
