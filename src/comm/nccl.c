/* GPUs: one process each, messages by NCCL on the lane's stream; start, agreement and logs go over the host transport
 * of the launcher. The library is opened at run time and its few functions are declared here, so that this compiles
 * everywhere.
 *
 * An exchange is one group of sends and receives in a communicator of all ranks. A send between two stages must not
 * wait for its receiver, which NCCL's would: it goes through a copy, on a stream of its own, in a communicator of the
 * two ranks for this direction. */
#include "comm/comm_int.h"
#include "comm/gpu_int.h"
#include "dev/vendor.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct nccl_id {
    char bytes[128];
};
enum { NCCL_INT8 = 0, NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };
struct nccl_api {
    int (*get_id)(struct nccl_id *id);
    int (*init)(void **comm, int ranks, struct nccl_id id, int rank);
    int (*abort)(void *comm);
    int (*destroy)(void *comm);
    int (*send)(const void *data, size_t n, int type, int peer, void *comm, void *stream);
    int (*recv)(void *data, size_t n, int type, int peer, void *comm, void *stream);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*async_error)(void *comm, int *code);
    const char *(*error_text)(int code);
};
/* One direction between this rank and a neighbour. */
struct edge {
    void *comm, *stream;
    struct inbox messages;
};
struct nccl {
    void *lib;
    struct nccl_api api;
    void *all;
    struct comm *ring;     /* the group whose neighbours send to each other */
    struct edge *out, *in; /* by rank of that group */
};

static int nccl_status(const struct nccl *n, struct err *e, int code, const char *what)
{
    if (code == NCCL_SUCCESS || code == NCCL_IN_PROGRESS)
        return ST_OK;
    return err_set(e, ST_PEER, "%s: %s", what, n->api.error_text(code));
}
#define NCCL(n, e, call) TRY(nccl_status(n, e, (n)->api.call, "nccl " #call))

static int load(struct nccl *n, struct err *e)
{
    static const char *const names[] = {"libnccl.so.2", "libnccl.so", NULL};
    struct nccl_api *a = &n->api;
    /* clang-format off */
    const struct vendor_symbol symbols[] = {
        {"ncclGetUniqueId", (void **)&a->get_id}, {"ncclCommInitRank", (void **)&a->init},
        {"ncclCommAbort", (void **)&a->abort},
        {"ncclCommDestroy", (void **)&a->destroy}, {"ncclSend", (void **)&a->send}, {"ncclRecv", (void **)&a->recv},
        {"ncclGroupStart", (void **)&a->group_start}, {"ncclGroupEnd", (void **)&a->group_end},
        {"ncclCommGetAsyncError", (void **)&a->async_error}, {"ncclGetErrorString", (void **)&a->error_text},
    };
    /* clang-format on */
    if (vendor_open(&n->lib, names, e) != ST_OK)
        return err_hint(e, "install NCCL (libnccl2), or name its folder in LD_LIBRARY_PATH");
    return vendor_find(n->lib, symbols, countof(symbols), e);
}

/* ---- communicators --------------------------------------------------------------------------- */

/* One of the members makes the id, the host transport carries it. */
static int open_all(struct world *w, struct err *e)
{
    struct nccl *n = w->nccl;
    struct nccl_id id = {{0}};
    int st = ST_OK;
    if (w->rank == 0)
        st = nccl_status(n, e, n->api.get_id(&id), "ncclGetUniqueId");
    TRY(comm_agree(w->all, "nccl", st, e));
    TRY(comm_host_broadcast(w->all, "nccl id", &id, sizeof id, 0, e));
    st = nccl_status(n, e, n->api.init(&n->all, w->size, id, w->rank), "ncclCommInitRank");
    return comm_agree(w->all, "nccl start", st, e);
}

static int open_edge(struct nccl *n, struct edge *x, const struct nccl_id *id, bool sender, struct err *e)
{
    inbox_init(&x->messages);
    TRY(nccl_status(n, e, n->api.init(&x->comm, 2, *id, sender ? 0 : 1), "ncclCommInitRank of two stages"));
    return sender ? gpu_comm_stream_open(&x->stream, e) : ST_OK;
}

/* Neighbours of a ring, each pair and direction in one order on all members, so that no two wait for each other. */
static int open_ring(struct world *w, struct err *e)
{
    struct nccl *n = w->nccl;
    struct comm *c = n->ring;
    int p = c->size;
    struct nccl_id *ids, mine[2];
    TRY(mem_array((void **)&n->out, (size_t)p, sizeof *n->out, e));
    TRY(mem_array((void **)&n->in, (size_t)p, sizeof *n->in, e));
    TRY(mem_array((void **)&ids, (size_t)p * 2, sizeof *ids, e));
    int st = ST_OK;
    for (int i = 0; i < 2 && st == ST_OK; i++) /* of the edges from this rank upwards and downwards */
        st = nccl_status(n, e, n->api.get_id(&mine[i]), "ncclGetUniqueId");
    if (st == ST_OK)
        st = comm_host_gather(c, "nccl ids", mine, sizeof mine, ids, e);
    for (int a = 0; a < p && st == ST_OK; a++)
        for (int down = 0; down < (p > 2 ? 2 : 1) && st == ST_OK; down++) {
            int b = (a + (down ? p - 1 : 1)) % p;
            if (a == c->rank)
                st = open_edge(n, &n->out[b], &ids[2 * a + down], true, e);
            else if (b == c->rank)
                st = open_edge(n, &n->in[a], &ids[2 * a + down], false, e);
        }
    free(ids);
    return comm_agree(c, "nccl stages", st, e);
}

/* NCCL has one rank on a GPU, no more. */
static int leave_to_ipc(struct world *w, const int pair[2], struct err *e)
{
    if (!w->choose_gpus) {
        err_set(e, ST_UNSUPPORTED,
                "parallel.comm=nccl needs a GPU for each rank, but ranks %d and %d have the same one", pair[0],
                pair[1]);
        return err_hint(e, "start one rank for each GPU, or use parallel.comm=auto or ipc");
    }
    snprintf(w->note, sizeof w->note,
             "parallel.comm=ipc: ranks %d and %d share a GPU, which NCCL refuses; steps are not captured as graphs",
             pair[0], pair[1]);
    free(w->nccl);
    w->nccl = NULL;
    return ipc_attach(w, e);
}

static int nccl_device(struct world *w, struct err *e)
{
    bool shared;
    int pair[2];
    if (w->dev->kind != DEV_CUDA) {
        err_set(e, ST_USAGE, "parallel.comm=nccl moves the memory of GPUs, but the device is %s", w->dev->name);
        return err_hint(e, "use run.device=cuda, or parallel.comm=mpi");
    }
    TRY(gpus_shared(w, pair, &shared, e));
    if (shared)
        return leave_to_ipc(w, pair, e);
    TRY(comm_agree(w->all, "nccl library", w->nccl->lib == NULL ? load(w->nccl, e) : ST_OK, e));
    TRY(open_all(w, e));
    return w->nccl->ring != NULL && w->nccl->ring->size > 1 ? open_ring(w, e) : ST_OK;
}

static int nccl_ring(struct comm *c, struct err *e)
{
    struct world *w = c->world;
    w->nccl->ring = c;
    return w->nccl->all != NULL && c->size > 1 ? open_ring(w, e) : ST_OK;
}

static void close_comm(struct nccl *n, void *comm, bool failed)
{
    if (comm == NULL)
        return;
    if (failed)
        n->api.abort(comm); /* lets kernels go that wait for others */
    else
        n->api.destroy(comm);
}

static void close_ring(struct nccl *n, int size, bool failed)
{
    for (int r = 0; n->out != NULL && n->in != NULL && r < size; r++) {
        close_comm(n, n->in[r].comm, failed);
        close_comm(n, n->out[r].comm, failed);
        if (n->out[r].comm != NULL) {
            gpu_comm_stream_close(n->out[r].stream);
            inbox_release(&n->out[r].messages);
        }
    }
    free(n->out);
    free(n->in);
    n->out = n->in = NULL;
}

static void nccl_comm_close(struct comm *c)
{
    struct nccl *n = c->world->nccl;
    if (n != NULL && n->ring == c) {
        close_ring(n, c->size, rank_stopped(c->world->board.mine.state));
        n->ring = NULL;
    }
}

static void nccl_close(struct world *w)
{
    struct nccl *n = w->nccl;
    if (n->ring != NULL)
        nccl_comm_close(n->ring);
    close_comm(n, n->all, rank_stopped(w->board.mine.state));
    vendor_close(n->lib);
    free(n);
    w->nccl = NULL;
}

/* ---- messages -------------------------------------------------------------------------------- */

static int check_open(const struct comm *c, struct err *e)
{
    return c->world->nccl->all != NULL
               ? ST_OK
               : err_set(e, ST_INTERNAL, "a collective of group %s before the GPU was given to the world", c->name);
}

static int start_parts(struct comm *c, struct lane *l, const struct exchange *x, struct err *e)
{
    struct nccl *n = c->world->nccl;
    void *stream = gpu_comm_stream(l);
    for (int i = 0; i < x->n; i++) {
        const struct part *p = &x->part[i];
        int peer = c->ranks[p->peer];
        if (p->send != NULL && p->send_bytes > 0)
            NCCL(n, e, send(p->send, (size_t)p->send_bytes, NCCL_INT8, peer, n->all, stream));
        if (p->recv != NULL && p->recv_bytes > 0)
            NCCL(n, e, recv(p->recv, (size_t)p->recv_bytes, NCCL_INT8, peer, n->all, stream));
    }
    return ST_OK;
}

static int nccl_exchange(struct comm *c, struct lane *l, const struct exchange *x, struct err *e)
{
    struct nccl *n = c->world->nccl;
    TRY(check_open(c, e));
    NCCL(n, e, group_start());
    int st = start_parts(c, l, x, e);
    int end = nccl_status(n, st == ST_OK ? e : NULL, n->api.group_end(), "ncclGroupEnd");
    return st != ST_OK ? st : end;
}

static int edge_of(struct comm *c, struct edge *side, int peer, int tag, struct edge **out, struct err *e)
{
    struct nccl *n = c->world->nccl;
    TRY(check_open(c, e));
    if (c != n->ring || side == NULL || side[peer].comm == NULL)
        return err_set(e, ST_UNSUPPORTED,
                       "nccl: group %s sends to rank %d (tag %d), which is no neighbour of rank %d in a pipeline",
                       c->name, peer, tag, c->rank);
    *out = &side[peer];
    return ST_OK;
}

/* NCCL knows no tags: between two stages messages are taken in the order they were sent, which is the order of the
 * schedule. */
static int nccl_send(struct comm *c, struct lane *l, const void *data, const struct message_to *to, struct err *e)
{
    struct nccl *n = c->world->nccl;
    struct edge *x;
    struct message *message;
    TRY(edge_of(c, n->out, to->peer, to->tag, &x, e));
    TRY(inbox_blank(&x->messages, true, to->bytes, &message, e));
    TRY(move_bytes(l, message->data, data, to->bytes, e));
    TRY(gpu_comm_stream_after(x->stream, l));
    NCCL(n, e, send(message->data, (size_t)to->bytes, NCCL_INT8, 1, x->comm, x->stream));
    TRY(gpu_comm_message_mark(&message->busy, x->stream, e));
    inbox_spare(&x->messages, message);
    return ST_OK;
}

static int nccl_recv(struct comm *c, struct lane *l, void *data, const struct message_to *from, struct err *e)
{
    struct nccl *n = c->world->nccl;
    struct edge *x;
    TRY(edge_of(c, n->in, from->peer, from->tag, &x, e));
    NCCL(n, e, recv(data, (size_t)from->bytes, NCCL_INT8, 0, x->comm, gpu_comm_stream(l)));
    return ST_OK;
}

/* Ranks that are not here yet, by the board: what runs on the GPUs cannot be asked. */
static int not_here(struct world *w, int *missing)
{
    int n = 0;
    for (int r = 0; r < w->size; r++) {
        struct board_entry x;
        bool here = r == w->rank ||
                    (board_read(w, r, &x) && x.step >= w->board.mine.step && strcmp(x.what, w->board.mine.what) == 0);
        if (!here)
            missing[n++] = r;
    }
    return n;
}

static int nccl_sync(struct world *w, const char *what, struct err *e)
{
    struct nccl *n = w->nccl;
    struct wait t = wait_begin();
    int *missing, st, code = NCCL_SUCCESS;
    bool idle = false;
    TRY(mem_array((void **)&missing, (size_t)w->size, sizeof *missing, e));
    board_enter(w->all, own(w->all)->number, what);
    for (int turn = 0;; turn++) {
        st = gpu_comm_idle(w->dev, &idle, e);
        if (st == ST_OK && n->all != NULL)
            st = nccl_status(n, e, n->api.async_error(n->all, &code), "ncclCommGetAsyncError");
        if (st == ST_OK)
            st = nccl_status(n, e, code, "nccl, while the GPUs exchanged");
        if (st != ST_OK || idle)
            break;
        usleep(turn < 100 ? 20 : 200);
        if (wait_due(&t) && (st = wait_look(w->all, &t, missing, not_here(w, missing), e)) != ST_OK)
            break;
    }
    free(missing);
    if (st == ST_OK)
        board_leave(w->all);
    return st;
}

static const struct transport transport_nccl = {
    .name = "nccl",
    .alone_too = true,
    .captures = true,
    .sends_apart = true,
    .exchange = nccl_exchange,
    .send = nccl_send,
    .recv = nccl_recv,
    .comm_close = nccl_comm_close,
    .ring = nccl_ring,
    .device = nccl_device,
    .sync = nccl_sync,
    .close = nccl_close,
};

/* The launcher's transport for the host; one rank alone needs none. */
static int nccl_world_open(struct world **out, const struct world_opts *o, struct err *e)
{
    struct nccl *n;
    TRY(world_open_host(out, o, e));
    struct world *w = *out;
    int st = comm_agree(w->all, "nccl", mem_array((void **)&n, 1, sizeof *n, e), e);
    if (st != ST_OK)
        return world_abandon(out, st, e);
    w->kind = COMM_NCCL;
    w->nccl = n;
    w->on_lane = &transport_nccl;
    st = w->dev != NULL ? nccl_device(w, e) : ST_OK;
    return st == ST_OK ? ST_OK : world_abandon(out, st, e);
}

const struct transport_kind transport_kind_nccl = {.ranks = RANKS_PROCESSES, .open = nccl_world_open};
