/* Processes of one host that read each other's memory: GPUs by CUDA's IPC handles, so that several ranks may share one
 * GPU, which NCCL refuses; host memory by process_vm_readv. The host transport of the launcher carries notes of where
 * the bytes are, so that every wait is a wait of that transport, with its limits and its messages.
 *
 * An exchange: this rank's stream is drained, notes are exchanged, each rank copies what is for it, and nobody goes on
 * before its readers are done. A send copies into a buffer that the receiver reads and marks as taken. Both drain
 * streams on the host, so plans with messages are not captured as graphs. */
#include "comm/comm_int.h"
#include "comm/gpu_int.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

/* Where some bytes of a rank are, for another process. */
struct note {
    struct gpu_export gpu;
    uint64_t at; /* of host memory */
    int64_t bytes;
};
/* A rank's allocation on a GPU, mapped into this process. */
struct import {
    int rank;
    struct gpu_export of;
    char *base;
};
/* A message that was sent: a mark, which its receiver sets, and the bytes. */
struct parcel {
    struct parcel *next;
    char *room;
    int64_t bytes;
    bool gpu, under_way;
};
enum { MARK_BYTES = DEV_ALIGN };
struct whereabouts {
    char host[40]; /* boot id: the same in every container of a host */
    int32_t pid, on_gpu;
    char gpu[GPU_ID_BYTES];
};
struct ipc {
    struct whereabouts *rank;
    struct import *import;
    size_t n_import, cap_import;
    struct parcel *parcels;
    struct note *out, *in; /* of one exchange, by peer */
    struct part *part;
    size_t cap_out, cap_in, cap_part;
};

/* ---- who is where ---------------------------------------------------------------------------- */

static void find_self(const struct world *w, struct whereabouts *me)
{
    *me = (struct whereabouts){.pid = (int32_t)getpid(), .on_gpu = w->dev->kind == DEV_CUDA};
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, me->host, sizeof me->host - 1) : -1;
    if (fd >= 0)
        close(fd);
    if (n <= 0)
        memcpy(me->host, w->board.mine.host, sizeof w->board.mine.host);
}

static int find_all(struct world *w, struct whereabouts **out, struct err *e)
{
    struct whereabouts me, *all = NULL;
    find_self(w, &me);
    int st = me.on_gpu ? gpu_comm_id(w->dev, me.gpu, e) : ST_OK;
    st = comm_agree(w->all, "GPUs", st, e);
    if (st == ST_OK)
        st = mem_array((void **)&all, (size_t)w->size, sizeof *all, e);
    if (st == ST_OK)
        st = comm_host_gather(w->all, "GPUs", &me, (int64_t)sizeof me, all, e);
    if (st != ST_OK)
        free(all);
    else
        *out = all;
    return st;
}

static bool same_gpu(const struct whereabouts *a, const struct whereabouts *b)
{
    return a->on_gpu && b->on_gpu && memcmp(a->host, b->host, sizeof a->host) == 0 &&
           memcmp(a->gpu, b->gpu, sizeof a->gpu) == 0;
}

int gpus_shared(struct world *w, int pair[2], bool *shared, struct err *e)
{
    struct whereabouts *all;
    *shared = false;
    TRY(find_all(w, &all, e));
    for (int a = 0; a < w->size && !*shared; a++)
        for (int b = a + 1; b < w->size && !*shared; b++)
            if (same_gpu(&all[a], &all[b])) {
                *shared = true;
                pair[0] = a;
                pair[1] = b;
            }
    free(all);
    return ST_OK;
}

/* ---- memory of another process --------------------------------------------------------------- */

static int write_note(struct lane *l, const void *p, int64_t bytes, struct note *n, struct err *e)
{
    *n = (struct note){.bytes = bytes, .at = (uint64_t)(uintptr_t)p};
    return on_gpu(l) && bytes > 0 ? gpu_comm_export(p, &n->gpu, e) : ST_OK;
}

/* What is at the same addresses now was allocated after the earlier one was freed. */
static void drop_stale(struct ipc *t, int rank, const struct gpu_export *x)
{
    for (size_t i = 0; i < t->n_import;) {
        struct import *m = &t->import[i];
        bool overlaps = m->rank == rank && m->of.start < x->start + x->bytes && x->start < m->of.start + m->of.bytes;
        if (overlaps) {
            gpu_comm_unimport(m->base);
            *m = t->import[--t->n_import];
        } else {
            i++;
        }
    }
}

static int find_import(struct ipc *t, int rank, const struct gpu_export *x, char **at, struct err *e)
{
    for (size_t i = 0; i < t->n_import; i++) {
        const struct import *m = &t->import[i];
        if (m->rank == rank && m->of.id == x->id && m->of.start == x->start) {
            *at = m->base + x->offset;
            return ST_OK;
        }
    }
    void *base = NULL;
    TRY(mem_grow((void **)&t->import, &t->cap_import, t->n_import + 1, sizeof *t->import, e));
    drop_stale(t, rank, x);
    int st = gpu_comm_import(x, &base, e);
    if (st != ST_OK)
        return err_in(e, "opening the GPU memory of rank %d", rank), st;
    t->import[t->n_import++] = (struct import){.rank = rank, .of = *x, .base = base};
    *at = (char *)base + x->offset;
    return ST_OK;
}

static void drop_imports(struct ipc *t)
{
    for (size_t i = 0; i < t->n_import; i++)
        gpu_comm_unimport(t->import[i].base);
    t->n_import = 0;
}

/* Host memory of rank: into `to`, or, where that is NULL, from `from`. */
static int cross(const struct world *w, int rank, uint64_t at, void *to, const void *from, int64_t bytes, struct err *e)
{
    for (int64_t done = 0; done < bytes;) {
        char *mine = to != NULL ? (char *)to + done : (char *)(uintptr_t)from + done;
        struct iovec here = {mine, (size_t)(bytes - done)},
                     there = {(char *)(uintptr_t)at + done, (size_t)(bytes - done)};
        pid_t pid = w->ipc->rank[rank].pid;
        ssize_t n =
            to != NULL ? process_vm_readv(pid, &here, 1, &there, 1, 0) : process_vm_writev(pid, &here, 1, &there, 1, 0);
        if (n <= 0) {
            err_errno(e, "rank %d cannot reach %lld bytes in the memory of rank %d (process %d)", w->rank,
                      (long long)bytes, rank, (int)pid);
            return err_hint(e, "parallel.comm=ipc needs processes of one user that may look into each other "
                               "(kernel.yama.ptrace_scope); parallel.comm=tcp and mpi do not");
        }
        done += n;
    }
    return ST_OK;
}

static int read_note(struct world *w, struct lane *l, int rank, const struct note *n, int64_t skip, void *to,
                     int64_t bytes, struct err *e)
{
    char *from;
    if (bytes == 0)
        return ST_OK;
    if (!on_gpu(l))
        return cross(w, rank, n->at + (uint64_t)skip, to, NULL, bytes, e);
    TRY(find_import(w->ipc, rank, &n->gpu, &from, e));
    return gpu_comm_copy(l, to, from + skip, bytes);
}

static int drain(struct lane *l) { return on_gpu(l) ? gpu_comm_sync(l) : ST_OK; }

/* ---- exchanges ------------------------------------------------------------------------------- */

static bool sends_to(const struct part *p, int peer) { return p->peer == peer && p->send != NULL; }
static bool takes_from(const struct part *p, int peer) { return p->peer == peer && p->recv != NULL; }

/* Notes for each peer one after the other; the host transport compares how many each expects. */
static int list_notes(struct comm *c, struct lane *l, const struct exchange *x, int *n_parts, struct err *e)
{
    struct ipc *t = c->world->ipc;
    size_t out = 0, in = 0;
    TRY(mem_grow((void **)&t->out, &t->cap_out, (size_t)x->n + 1, sizeof *t->out, e));
    TRY(mem_grow((void **)&t->in, &t->cap_in, (size_t)x->n + 1, sizeof *t->in, e));
    TRY(mem_grow((void **)&t->part, &t->cap_part, (size_t)c->size, sizeof *t->part, e));
    *n_parts = 0;
    for (int r = 0; r < c->size; r++) {
        size_t out_from = out, in_from = in;
        for (int i = 0; i < x->n && r != c->rank; i++) {
            const struct part *p = &x->part[i];
            if (sends_to(p, r))
                TRY(write_note(l, p->send, p->send_bytes, &t->out[out++], e));
            in += takes_from(p, r);
        }
        if (out == out_from && in == in_from)
            continue;
        int64_t size = (int64_t)sizeof(struct note);
        t->part[(*n_parts)++] =
            (struct part){r, out > out_from ? &t->out[out_from] : NULL, (int64_t)(out - out_from) * size,
                          in > in_from ? &t->in[in_from] : NULL, (int64_t)(in - in_from) * size};
    }
    return ST_OK;
}

static int take_all(struct comm *c, struct lane *l, const struct exchange *x, struct err *e)
{
    struct ipc *t = c->world->ipc;
    size_t in = 0;
    for (int r = 0; r < c->size; r++)
        for (int i = 0; i < x->n && r != c->rank; i++) {
            const struct part *p = &x->part[i];
            if (!takes_from(p, r))
                continue;
            const struct note *n = &t->in[in++];
            if (n->bytes != p->recv_bytes)
                return err_set(e, ST_INTERNAL,
                               "'%s' in group %s: rank %d takes %lld bytes from rank %d, which sends %lld", x->what,
                               c->name, c->world->rank, (long long)p->recv_bytes, c->ranks[r], (long long)n->bytes);
            TRY(read_note(c->world, l, c->ranks[r], n, 0, p->recv, p->recv_bytes, e));
        }
    return move_own_parts(c, l, x, e);
}

/* Who read from this rank says so, in a message without bytes. */
static int wait_for_readers(struct comm *c, const struct exchange *x, int n_parts, struct err *e)
{
    struct ipc *t = c->world->ipc;
    for (int i = 0; i < n_parts; i++) {
        struct part *p = &t->part[i];
        bool sent = p->send != NULL, took = p->recv != NULL;
        *p = (struct part){.peer = p->peer, .send = took ? t : NULL, .recv = sent ? t : NULL};
    }
    const struct exchange done = {.op = OP_HOST, .what = x->what, .part = t->part, .n = n_parts};
    return c->world->on_host->exchange(c, NULL, &done, e);
}

static int ipc_exchange(struct comm *c, struct lane *l, const struct exchange *x, struct err *e)
{
    int n_parts;
    TRY(drain(l));
    TRY(list_notes(c, l, x, &n_parts, e));
    const struct exchange notes = {.op = OP_HOST, .what = x->what, .part = c->world->ipc->part, .n = n_parts};
    TRY(c->world->on_host->exchange(c, NULL, &notes, e));
    TRY(take_all(c, l, x, e));
    TRY(drain(l));
    return wait_for_readers(c, x, n_parts, e);
}

/* ---- messages -------------------------------------------------------------------------------- */

static bool is_taken(struct parcel *p)
{
    uint64_t mark = 0;
    if (!p->under_way)
        return true;
    if (p->gpu)
        gpu_comm_peek(p->room, &mark);
    else
        mark = __atomic_load_n((uint64_t *)(void *)p->room, __ATOMIC_ACQUIRE);
    p->under_way = mark == 0;
    return mark != 0;
}

static int blank_parcel(struct ipc *t, bool gpu, int64_t bytes, struct parcel **out, struct err *e)
{
    for (struct parcel *p = t->parcels; p != NULL; p = p->next)
        if (p->gpu == gpu && p->bytes == bytes && is_taken(p)) {
            *out = p;
            return ST_OK;
        }
    struct parcel *p;
    TRY(mem_array((void **)&p, 1, sizeof *p, e));
    int64_t size = MARK_BYTES + max_i64(bytes, 1);
    int st =
        gpu ? gpu_comm_alloc((void **)&p->room, size, e) : mem_aligned((void **)&p->room, (size_t)size, DEV_ALIGN, e);
    if (st != ST_OK) {
        free(p);
        return err_in(e, "a message of %lld bytes", (long long)bytes), st;
    }
    p->gpu = gpu;
    p->bytes = bytes;
    p->next = t->parcels;
    *out = t->parcels = p;
    return ST_OK;
}

/* Tags of lanes begin after the one that host calls use. */
static struct message_to noted(const struct message_to *m)
{
    return (struct message_to){.peer = m->peer, .tag = m->tag + 1, .bytes = (int64_t)sizeof(struct note)};
}

static int ipc_send(struct comm *c, struct lane *l, const void *data, const struct message_to *to, struct err *e)
{
    const uint64_t open = 0;
    struct parcel *p;
    struct note n;
    struct message_to at = noted(to);
    TRY(blank_parcel(c->world->ipc, on_gpu(l), to->bytes, &p, e));
    TRY(move_bytes(l, p->room, &open, (int64_t)sizeof open, e));
    TRY(move_bytes(l, p->room + MARK_BYTES, data, to->bytes, e));
    TRY(drain(l));
    TRY(write_note(l, p->room, MARK_BYTES + to->bytes, &n, e));
    p->under_way = true;
    return c->world->on_host->send(c, NULL, &n, &at, e);
}

static int ipc_recv(struct comm *c, struct lane *l, void *data, const struct message_to *from, struct err *e)
{
    static const uint64_t taken = 1;
    struct world *w = c->world;
    struct note n;
    int rank = c->ranks[from->peer];
    struct message_to at = noted(from);
    TRY(w->on_host->recv(c, NULL, &n, &at, e));
    if (n.bytes != MARK_BYTES + from->bytes)
        return err_set(e, ST_INTERNAL, "rank %d receives %lld bytes from rank %d (tag %d), which sent %lld", w->rank,
                       (long long)from->bytes, rank, from->tag, (long long)(n.bytes - MARK_BYTES));
    TRY(read_note(w, l, rank, &n, MARK_BYTES, data, from->bytes, e));
    TRY(drain(l));
    if (!on_gpu(l))
        return cross(w, rank, n.at, NULL, &taken, (int64_t)sizeof taken, e);
    char *mark;
    TRY(find_import(w->ipc, rank, &n.gpu, &mark, e));
    TRY(gpu_comm_copy(l, mark, &taken, (int64_t)sizeof taken));
    return drain(l);
}

/* ---- opening --------------------------------------------------------------------------------- */

static int check_host(const struct world *w, struct err *e)
{
    const struct whereabouts *all = w->ipc->rank;
    for (int r = 1; r < w->size; r++) {
        if (memcmp(all[r].host, all[0].host, sizeof all[r].host) != 0) {
            err_set(e, ST_UNSUPPORTED, "parallel.comm=ipc joins processes of one host, but ranks 0 and %d are on two",
                    r);
            return err_hint(e, "start one rank for each GPU and use parallel.comm=nccl, or put all ranks on one host");
        }
        if (all[r].on_gpu != all[0].on_gpu)
            return err_set(e, ST_USAGE, "parallel.comm=ipc: rank %d has %s GPU, and rank 0 has %s", r,
                           all[r].on_gpu ? "a" : "no", all[0].on_gpu ? "one" : "none");
    }
    return ST_OK;
}

/* Every rank reads a number of every other, so that what the system refuses shows before the first step. The second of
 * two small allocations: they lie in one block of the driver's. */
static int try_all(struct world *w, struct err *e)
{
    struct lane l = {.dev = w->dev, .index = 0, .err = e};
    void *first = NULL, *room = NULL;
    int64_t mine = w->rank + 1, *all = NULL;
    int st;
    TRY_OUT(mem_array((void **)&all, (size_t)w->size + 1, sizeof *all, e));
    TRY_OUT(w->dev->vt->alloc(w->dev, DEV_ALIGN, &first, e));
    TRY_OUT(w->dev->vt->alloc(w->dev, (w->size + 1) * (int64_t)sizeof mine, &room, e));
    int64_t *got = room;
    TRY_OUT(w->dev->vt->copy_in(w->dev, room, &mine, (int64_t)sizeof mine, e));
    TRY_OUT(w->dev->vt->sync(w->dev, e));
    struct part *part = NULL;
    TRY_OUT(mem_array((void **)&part, (size_t)w->size, sizeof *part, e));
    for (int r = 0; r < w->size; r++)
        part[r] = (struct part){r, got, (int64_t)sizeof mine, got + 1 + r, (int64_t)sizeof mine};
    const struct exchange x = {.op = OP_ALL_GATHER, .what = "memory of others", .part = part, .n = w->size};
    st = ipc_exchange(w->all, &l, &x, e);
    free(part);
    TRY_OUT(st);
    TRY_OUT(w->dev->vt->copy_out(w->dev, all, got + 1, w->size * (int64_t)sizeof mine, e));
    for (int r = 0; r < w->size && st == ST_OK; r++)
        if (all[r] != r + 1)
            st = err_set(e, ST_INTERNAL, "rank %d reads %lld in the memory of rank %d, where %d was written", w->rank,
                         (long long)all[r], r, r + 1);
out:
    if (room != NULL)
        w->dev->vt->free(w->dev, room);
    if (first != NULL)
        w->dev->vt->free(w->dev, first);
    free(all);
    return st;
}

static int ipc_device(struct world *w, struct err *e)
{
    free(w->ipc->rank);
    w->ipc->rank = NULL;
    TRY(find_all(w, &w->ipc->rank, e));
    TRY(comm_agree(w->all, "one host", check_host(w, e), e));
    if (w->dev->kind != DEV_CUDA)
        prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* where it fails, try_all says so */
    TRY(comm_barrier(w->all, "memory of others", e));
    int st = w->size > 1 ? try_all(w, e) : ST_OK;
    st = comm_agree(w->all, "memory of others", st, e);
    drop_imports(w->ipc); /* the room for the try is gone */
    return st;
}

/* All close what they have opened before anyone frees it. */
static int ipc_forget(struct world *w, struct err *e)
{
    drop_imports(w->ipc);
    return comm_barrier(w->all, "memory is allocated anew", e);
}

/* The last messages may still be read, for a few seconds at most. */
static void ipc_close(struct world *w)
{
    struct ipc *t = w->ipc;
    double end = time_now() + 5;
    drop_imports(t);
    while (t->parcels != NULL) {
        struct parcel *p = t->parcels;
        while (!is_taken(p) && !rank_stopped(w->board.mine.state) && time_now() < end)
            usleep(2000);
        t->parcels = p->next;
        if (p->gpu)
            gpu_comm_free(p->room);
        else
            free(p->room);
        free(p);
    }
    free(t->rank);
    free(t->import);
    free(t->out);
    free(t->in);
    free(t->part);
    free(t);
    w->ipc = NULL;
}

static const struct transport transport_ipc = {
    .name = "ipc",
    .exchange = ipc_exchange,
    .send = ipc_send,
    .recv = ipc_recv,
    .device = ipc_device,
    .forget = ipc_forget,
    .close = ipc_close,
};

int ipc_attach(struct world *w, struct err *e)
{
    struct ipc *t;
    TRY(mem_array((void **)&t, 1, sizeof *t, e));
    w->kind = COMM_IPC;
    w->ipc = t;
    w->on_lane = &transport_ipc;
    return w->dev != NULL ? ipc_device(w, e) : ST_OK;
}

static int ipc_world_open(struct world **out, const struct world_opts *o, struct err *e)
{
    TRY(world_open_host(out, o, e));
    int st = ipc_attach(*out, e);
    return st == ST_OK ? ST_OK : world_abandon(out, st, e);
}

const struct transport_kind transport_kind_ipc = {.ranks = RANKS_PROCESSES, .open = ipc_world_open};
