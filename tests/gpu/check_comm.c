/* Ranks on one GPU: NCCL with one rank, thread ranks that share the device, and the loop that plays a link. Needs a
 * GPU; "N passed, N failed" comes last.
 *
 *   check_comm
 *
 * Started by a launcher (mpirun, or RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT) it checks every call
 * over NCCL, or over ipc where ranks share a GPU, and measures what the links carry; `check_comm cpu` does the same
 * without GPUs, over the launcher's own messages. */
#include "comm/comm.h"
#include "dev/gpus.h"

#include <stdlib.h>
#include <string.h>

enum { LANE = 2 };
static int passed, failed;

static int result(const char *name, int st, const struct err *e)
{
    printf("%s %s", st == ST_OK ? "ok" : "not ok", name);
    printf(st == ST_OK ? "\n" : ": %s\n", e->msg);
    passed += st == ST_OK;
    failed += st != ST_OK;
    return st;
}

/* ---- tensors on the device, with values that depend on the rank ------------------------------ */

static double value(int rank, int64_t i)
{
    uint64_t h = hash64(&i, sizeof i, (uint64_t)rank + 17);
    return ((double)(h >> 11) * 0x1p-53 - 0.5) * (rank % 2 ? 1e3 : 1e-3);
}

static int put(struct dev *d, struct tensor *t, enum dtype type, int64_t n, int rank, struct err *e)
{
    struct tensor host = tensor_1d(calloc((size_t)n + 1, 8), type, n);
    *t = tensor_1d(NULL, type, n);
    for (int64_t i = 0; i < n; i++)
        tensor_set(&host, i, type == DT_I32 ? (double)((rank + 3) * (i % 1000)) : value(rank, i));
    int st = d->vt->alloc(d, max_i64(tensor_bytes(t), 1), &t->data, e);
    if (st == ST_OK)
        st = d->vt->copy_in(d, t->data, host.data, tensor_bytes(t), e);
    if (st == ST_OK)
        st = d->vt->sync(d, e);
    free(host.data);
    return st;
}

/* Against a function of the place; the first difference is the error. */
typedef double want_fn(enum dtype type, int ranks, int64_t i);
static int compare(struct dev *d, const struct tensor *t, want_fn *want, int ranks, struct err *e)
{
    struct tensor host;
    int st = d->vt->sync(d, e);
    if (st == ST_OK)
        st = dev_fetch(d, t, &host, e);
    for (int64_t i = 0; st == ST_OK && i < tensor_elems(t); i++)
        if (tensor_get(&host, i) != want(t->dtype, ranks, i))
            st = err_set(e, ST_INVALID, "%s, %d ranks: element %lld is %.9g instead of %.9g", dtype_name(t->dtype),
                         ranks, (long long)i, tensor_get(&host, i), want(t->dtype, ranks, i));
    dev_fetched(d, &host);
    return st;
}

static double rounded(enum dtype type, double v)
{
    return type == DT_BF16 ? bf16_to_f32(f32_to_bf16((float)v)) : type == DT_F32 ? (float)v : v;
}
static double serial_sum(enum dtype type, int ranks, int64_t i)
{
    if (type == DT_I32) {
        double sum = 0;
        for (int r = 0; r < ranks; r++)
            sum += (double)((r + 3) * (i % 1000));
        return sum;
    }
    float sum = (float)rounded(type, value(0, i));
    for (int r = 1; r < ranks; r++)
        sum += (float)rounded(type, value(r, i));
    return rounded(type, sum);
}

/* ---- the same calls on any world ------------------------------------------------------------- */

static int sums(struct world *w, struct dev *d, struct lane *l, enum dtype type, int64_t n, struct err *e)
{
    struct comm *all = world_comm(w);
    struct tensor x, y, work;
    int ranks = world_size(w), me = world_rank(w);
    int64_t piece = round_up(ceil_div(n, ranks), 64);
    TRY(put(d, &x, type, n, me, e));
    TRY(put(d, &y, type, n, me, e));
    TRY(put(d, &work, type, round_up(n, 64 * ranks) * (ranks + 1), 0, e));
    TRY(comm_all_reduce(all, l, "sum", &x, &work));
    TRY(compare(d, &x, serial_sum, ranks, e));
    TRY(comm_group_begin(all, l, "bucket"));
    struct tensor own = tensor_1d((char *)y.data + min_i64(me * piece, n) * (int64_t)dtype_bytes(type), type,
                                  min_i64(piece, n - min_i64(me * piece, n)));
    TRY(comm_sum_pieces(all, l, "pieces", &y, (struct piece_slice){.piece = piece, .n = piece}, &own, false, &work));
    TRY(comm_group_end(all, l));
    TRY(comm_all_gather(all, l, "back", &y, piece));
    TRY(compare(d, &y, serial_sum, ranks, e));
    d->vt->free(d, x.data);
    d->vt->free(d, y.data);
    d->vt->free(d, work.data);
    return ST_OK;
}

/* Buffer r of rank s holds 10 s + r; afterwards buffer r of this rank holds 10 r + me. */
static int buffers(struct world *w, struct dev *d, struct lane *l, struct err *e)
{
    enum { ROWS = 37, WIDTH = 24 };
    int ranks = world_size(w), me = world_rank(w), st = ST_OK;
    int64_t n = (int64_t)ranks * ROWS * WIDTH;
    float *host = calloc((size_t)n, sizeof *host);
    struct tensor a, b, none = {0};
    TRY(put(d, &a, DT_F32, n, 0, e));
    TRY(put(d, &b, DT_F32, n, 0, e));
    for (int64_t i = 0; i < n; i++)
        host[i] = (float)(10 * me + i / (ROWS * WIDTH));
    TRY(d->vt->copy_in(d, a.data, host, n * 4, e));
    TRY(d->vt->sync(d, e));
    struct tensor s = tensor_3d(a.data, DT_F32, ranks, ROWS, WIDTH), r = tensor_3d(b.data, DT_F32, ranks, ROWS, WIDTH);
    TRY(comm_all_to_all(world_comm(w), l, "buffers", &s, &r, &none, &none));
    TRY(world_sync(w, "buffers", e));
    TRY(d->vt->sync(d, e));
    TRY(d->vt->copy_out(d, host, b.data, n * 4, e));
    for (int64_t i = 0; i < n && st == ST_OK; i++)
        if (host[i] != (float)(10 * (i / (ROWS * WIDTH)) + me))
            st = err_set(e, ST_INVALID, "buffer element %lld of rank %d is %g", (long long)i, me, (double)host[i]);
    d->vt->free(d, a.data);
    d->vt->free(d, b.data);
    free(host);
    return st;
}

static double from_next(enum dtype type, int ranks, int64_t i) { return rounded(type, value(ranks, i)); }

/* Round a ring, this rank included, two messages under way at once. */
static int messages(struct world *w, struct dev *d, struct lane *l, struct err *e)
{
    int ranks = world_size(w), me = world_rank(w), next = (me + 1) % ranks;
    struct tensor a, b;
    TRY(put(d, &a, DT_F32, 5000, me, e));
    TRY(put(d, &b, DT_F32, 5000, 99, e));
    for (int turn = 0; turn < 3; turn++) {
        TRY(comm_send(world_comm(w), l, "message", &a, (me + ranks - 1) % ranks, 2));
        TRY(comm_send(world_comm(w), l, "message", &a, me, 2));
        TRY(comm_recv(world_comm(w), l, "message", &b, next, 2));
        TRY(compare(d, &b, from_next, next, e));
        TRY(comm_recv(world_comm(w), l, "message", &b, me, 2));
        TRY(compare(d, &b, from_next, me, e));
    }
    d->vt->free(d, a.data);
    d->vt->free(d, b.data);
    return ST_OK;
}

static int all_calls(struct world *w, struct dev *d, struct err *e)
{
    static const int64_t sizes[] = {1, 1001, 300007};
    static const enum dtype types[] = {DT_F32, DT_BF16, DT_I32};
    struct lane l = {.dev = d, .index = LANE, .err = e};
    for (int s = 0; s < countof(sizes); s++)
        for (int t = 0; t < countof(types); t++)
            TRY(sums(w, d, &l, types[t], sizes[s], e));
    TRY(buffers(w, d, &l, e));
    return messages(w, d, &l, e);
}

/* ---- captured: the exchange and the sum are replayed on new values --------------------------- */

static double doubled_value(enum dtype type, int ranks, int64_t i) { return rounded(type, value(ranks, i)); }

static int captured(struct world *w, struct dev *d, struct err *e)
{
    struct lane l = {.dev = d, .index = LANE, .err = e};
    struct tensor x, y, a, b, none = {0};
    void *graph = NULL;
    int64_t n = 64 * 100;
    TRY(put(d, &x, DT_F32, n, 5, e));
    TRY(put(d, &y, DT_F32, n, 6, e));
    a = tensor_3d(x.data, DT_F32, 1, 64, 100);
    b = tensor_3d(y.data, DT_F32, 1, 64, 100);
    for (int turn = 0; turn < 2; turn++) { /* first as it is, then captured */
        if (turn == 1)
            TRY(d->vt->capture_begin(d, e));
        TRY(d->vt->record(d, 0, 0, e));
        TRY(d->vt->wait(d, LANE, 0, e));
        TRY(comm_all_to_all(world_comm(w), &l, "rows", &a, &b, &none, &none));
        TRY(comm_send(world_comm(w), &l, "self", &b, 0, 1));
        TRY(comm_recv(world_comm(w), &l, "self", &b, 0, 1));
        TRY(d->vt->record(d, LANE, 1, e));
        TRY(d->vt->wait(d, 0, 1, e));
        if (turn == 1)
            TRY(d->vt->capture_end(d, &graph, e));
    }
    for (int v = 7; v < 10; v++) {
        struct tensor fresh;
        TRY(put(d, &fresh, DT_F32, n, v, e));
        struct tensor host;
        TRY(dev_fetch(d, &fresh, &host, e));
        TRY(d->vt->copy_in(d, x.data, host.data, tensor_bytes(&x), e));
        dev_fetched(d, &host);
        TRY(d->vt->capture_run(d, graph, e));
        TRY(world_sync(w, "captured", e));
        TRY(compare(d, &y, doubled_value, v, e));
        d->vt->free(d, fresh.data);
    }
    d->vt->capture_free(d, graph);
    d->vt->free(d, x.data);
    d->vt->free(d, y.data);
    return ST_OK;
}

/* ---- the worlds ------------------------------------------------------------------------------ */

static int with_world(enum comm_kind kind, struct dev *d, int (*fn)(struct world *w, struct dev *d, struct err *e),
                      struct err *e)
{
    const struct world_opts o = {
        .kind = kind, .timeout = 20, .loop_rate = 400e9, .loop_latency = 10e-6, .loop_ranks = 8};
    struct world *w;
    TRY(world_open(&w, &o, e));
    int st = world_device(w, d, e);
    if (st == ST_OK)
        st = fn(w, d, e);
    world_close(w);
    return st;
}

static int rank_fn(struct world *w, void *ctx, struct err *e)
{
    struct dev d;
    (void)ctx;
    TRY(dev_open(&d, DEV_CUDA, 1, e));
    int st = world_device(w, &d, e);
    if (st == ST_OK)
        st = all_calls(w, &d, e);
    dev_close(&d);
    return st;
}

/* The time of a link: never less than it says. How much more depends on what else the GPU does: it is printed. */
static int loop_time(struct world *w, struct dev *d, struct err *e)
{
    struct lane l = {.dev = d, .index = LANE, .err = e};
    enum { REPEATS = 20 };
    static const int64_t mib[] = {1, 16, 256};
    for (int s = 0; s < countof(mib); s++) {
        int64_t bytes = mib[s] << 20;
        struct tensor a = tensor_3d(NULL, DT_F32, 1, bytes / 4096, 1024), b = a, none = {0};
        TRY(d->vt->alloc(d, bytes, &a.data, e));
        TRY(d->vt->alloc(d, bytes, &b.data, e));
        TRY(comm_all_to_all(world_comm(w), &l, "warm", &a, &b, &none, &none));
        TRY(d->vt->sync(d, e));
        double start = time_now();
        for (int i = 0; i < REPEATS; i++)
            TRY(comm_all_to_all(world_comm(w), &l, "rows", &a, &b, &none, &none));
        TRY(d->vt->sync(d, e));
        double took = (time_now() - start) / REPEATS, want = 10e-6 + (double)bytes * 7 / 8 / 400e9;
        printf("  loop: %lld MiB in %.1f us, a link of 400 GB/s and 10 us among 8 ranks takes %.1f us\n",
               (long long)mib[s], took * 1e6, want * 1e6);
        if (took < want)
            return err_set(e, ST_INVALID, "%lld MiB took %.1f us, less than %.1f us", (long long)mib[s], took * 1e6,
                           want * 1e6);
        d->vt->free(d, a.data);
        d->vt->free(d, b.data);
    }
    return ST_OK;
}

/* ---- several processes ----------------------------------------------------------------------- */

enum measured { ALL_TO_ALL, REDUCE_SCATTER, ALL_GATHER, MEASURED };

static int call_once(enum measured what, struct comm *c, struct lane *l, struct tensor *a, struct tensor *b)
{
    struct tensor none = {0}, flat = tensor_1d(a->data, DT_F32, tensor_elems(a)),
                  work = tensor_1d(b->data, DT_F32, tensor_elems(b));
    if (what == ALL_TO_ALL)
        return comm_all_to_all(c, l, "rows", a, b, &none, &none);
    int64_t piece = tensor_elems(&flat) / c->size;
    if (what == REDUCE_SCATTER) { /* of each piece as much as the scratch has room for */
        struct tensor own = tensor_1d((float *)flat.data + c->rank * piece, DT_F32, piece);
        struct piece_slice s = {.piece = piece, .n = piece * c->size / (c->size + 1) / 64 * 64};
        return comm_sum_pieces(c, l, "sums", &flat, s, &own, false, &work);
    }
    return comm_all_gather(c, l, "pieces", &flat, piece);
}

/* Bytes that leave each rank in a second: (R - 1) / R of the tensor in each call. */
static int measure_links(struct world *w, struct dev *d, struct err *e)
{
    static const char *const names[] = {"all-to-all", "reduce-scatter", "all-gather"};
    static const int64_t kib[] = {64, 1024, 16384, 262144};
    struct comm *c = world_comm(w);
    struct lane l = {.dev = d, .index = d->kind == DEV_CUDA ? LANE : 0, .err = e};
    int sizes = d->kind == DEV_CUDA ? countof(kib) : countof(kib) - 1, repeats = d->kind == DEV_CUDA ? 20 : 3;
    for (int s = 0; s < sizes; s++) {
        int64_t rows = round_up(kib[s], c->size) / c->size;
        struct tensor a = tensor_3d(NULL, DT_F32, c->size, rows, 256), b = a;
        TRY(d->vt->alloc(d, tensor_bytes(&a), &a.data, e));
        TRY(d->vt->alloc(d, tensor_bytes(&b), &b.data, e));
        TRY(d->vt->fill(d, a.data, 0, tensor_bytes(&a), e));
        for (int what = 0; what < MEASURED; what++) {
            TRY(call_once((enum measured)what, c, &l, &a, &b));
            TRY(world_sync(w, "warm", e));
            TRY(comm_barrier(c, "start", e));
            double start = time_now();
            for (int i = 0; i < repeats; i++)
                TRY(call_once((enum measured)what, c, &l, &a, &b));
            TRY(world_sync(w, names[what], e));
            double took = (time_now() - start) / repeats;
            if (world_rank(w) == 0)
                printf("link %-14s %2d ranks %7lld KiB %10.1f us %8.2f GB/s out of each\n", names[what], c->size,
                       (long long)(tensor_bytes(&a) >> 10), took * 1e6,
                       (double)tensor_bytes(&a) * (c->size - 1) / c->size / took * 1e-9);
        }
        d->vt->free(d, a.data);
        d->vt->free(d, b.data);
    }
    return ST_OK;
}

static int many(const struct launch *launch, bool gpus, struct err *e)
{
    struct dev d;
    struct world *w = NULL;
    const struct world_opts o = {.kind = gpus ? COMM_NCCL : launch->kind, .timeout = 60, .choose_gpus = true};
    TRY(gpus ? dev_open_gpu(&d, &(struct dev_gpu){.index = launch->local_rank % (int)max_i64(gpus_visible(), 1)}, 1, e)
             : dev_open(&d, DEV_CPU, 1, e));
    int st = world_open(&w, &o, e);
    if (st == ST_OK)
        st = world_device(w, &d, e);
    if (st == ST_OK && gpus)
        st = all_calls(w, &d, e);
    if (st == ST_OK)
        st = measure_links(w, &d, e);
    if (w != NULL)
        st = comm_agree(world_comm(w), "every call", st, e);
    char name[64];
    snprintf(name, sizeof name, "%s: every call on %d ranks", w != NULL ? comm_kind_name(world_kind(w)) : "?",
             launch->size);
    if (launch->rank == 0)
        result(name, st, e);
    world_close(w);
    dev_close(&d);
    return st;
}

int main(int argc, char **argv)
{
    struct err e = {0};
    struct dev d;
    struct launch launch;
    if (launch_detect(&launch, &e) == ST_OK && launch.size > 1)
        return many(&launch, argc < 2 || strcmp(argv[1], "cpu") != 0, &e) != ST_OK;
    if (dev_open(&d, DEV_CUDA, 1, &e) != ST_OK) {
        err_print(&e, stderr);
        printf("0 passed, 1 failed\n");
        return 1;
    }
    result("loop: every call", with_world(COMM_LOOP, &d, all_calls, &e), &e);
    result("loop: captured", with_world(COMM_LOOP, &d, captured, &e), &e);
    result("loop: time", with_world(COMM_LOOP, &d, loop_time, &e), &e);
    result("self: captured", with_world(COMM_SELF, &d, captured, &e), &e);
    for (int ranks = 1; ranks <= 4; ranks++) {
        char name[32];
        snprintf(name, sizeof name, "threads: %d ranks", ranks);
        result(
            name,
            world_threads(&(struct world_opts){.kind = COMM_THREADS, .ranks = ranks, .timeout = 30}, rank_fn, NULL, &e),
            &e);
    }
    result("nccl, one rank: every call", with_world(COMM_NCCL, &d, all_calls, &e), &e);
    result("nccl, one rank: captured", with_world(COMM_NCCL, &d, captured, &e), &e);
    dev_close(&d);
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
