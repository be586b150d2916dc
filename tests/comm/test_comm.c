/* Collectives among thread ranks: sizes, orders, groups, agreement, and what happens when a rank fails or does not
 * come. */
#include "support.h"

#include "comm/comm.h"

#include <signal.h>
#include <time.h>

static struct dev cpu_dev = {.kind = DEV_CPU, .real = DT_F32, .wide = DT_F32, .n_threads = 1};

struct rank_ctx {
    int64_t n;
    int (*body)(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e);
    enum dtype type;
    double timeout;
    int culprit;
    struct err said[8]; /* of each rank */
    int status[8];
    struct mesh_sizes sizes;
};

static int rank_fn(struct world *w, void *ctx, struct err *e)
{
    struct rank_ctx *c = ctx;
    struct lane l = {.dev = &cpu_dev, .index = 2, .err = e};
    int st = c->body(w, &l, c, e);
    c->status[world_rank(w)] = st;
    c->said[world_rank(w)] = *e;
    return st;
}

static int run_ranks(int ranks, struct rank_ctx *c, struct err *e)
{
    const struct world_opts o = {.kind = COMM_THREADS, .ranks = ranks, .timeout = c->timeout > 0 ? c->timeout : 20};
    return world_threads(&o, rank_fn, c, e);
}

#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        if (!(cond))                                                                                                   \
            return err_set(e, ST_INVALID, "rank %d of %d: %s (line %d)", world_rank(w), world_size(w), #cond,          \
                           __LINE__);                                                                                  \
    } while (0)

/* A value that depends on rank and place, whose sums depend on their order. */
static double value(int rank, int64_t i)
{
    uint64_t h = hash64(&i, sizeof i, (uint64_t)rank + 17);
    return ((double)(h >> 11) * 0x1p-53 - 0.5) * (rank % 2 ? 1e3 : 1e-3);
}
static int64_t whole(int rank, int64_t i) { return (int64_t)(hash64(&i, sizeof i, (uint64_t)rank) % 100000) - 50000; }

static bool is_whole(enum dtype t) { return t == DT_I32 || t == DT_I64; }
static void fill(struct tensor *t, int rank)
{
    for (int64_t i = 0, n = tensor_elems(t); i < n; i++)
        tensor_set(t, i, is_whole(t->dtype) ? (double)whole(rank, i) : value(rank, i));
}

/* The sum of all ranks' element i, as one rank alone would take it: one after the other, in the type of the sum. */
static double serial_sum(const struct tensor *like, int ranks, int64_t i)
{
    uint16_t h;
    float f = 0;
    double d = 0;
    int64_t whole_sum = 0;
    for (int r = 0; r < ranks; r++) {
        double v = value(r, i);
        switch (like->dtype) {
        case DT_BF16:
            h = f32_to_bf16((float)v);
            f = r == 0 ? bf16_to_f32(h) : f + bf16_to_f32(h);
            break;
        case DT_F32: f = r == 0 ? (float)v : f + (float)v; break;
        case DT_F64: d = r == 0 ? v : d + v; break;
        default: whole_sum += whole(r, i);
        }
    }
    return like->dtype == DT_BF16  ? bf16_to_f32(f32_to_bf16(f))
           : like->dtype == DT_F32 ? f
           : like->dtype == DT_F64 ? d
                                   : (double)whole_sum;
}

static struct tensor room_for(enum dtype type, int64_t n)
{
    void *p = calloc((size_t)n + 1, 8);
    assert_non_null(p);
    return tensor_1d(p, type, n);
}

static int body_all_reduce(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    int size = world_size(w), me = world_rank(w);
    struct tensor t = room_for(c->type, c->n), work = room_for(c->type, c->n * size);
    fill(&t, me);
    TRY(comm_all_reduce(world_comm(w), l, "sum", &t, &work));
    for (int64_t i = 0; i < c->n; i++)
        CHECK(tensor_get(&t, i) == serial_sum(&t, size, i));
    free(t.data);
    free(work.data);
    return ST_OK;
}

static const int64_t odd_sizes[] = {0, 1, 3, 64, 1001, 5000};

static void sums_have_the_bits_of_a_serial_loop(void **state)
{
    (void)state;
    static const enum dtype types[] = {DT_F64, DT_F32, DT_BF16, DT_I32, DT_I64};
    struct err e = {0};
    for (int ranks = 1; ranks <= 5; ranks++)
        for (int s = 0; s < countof(odd_sizes); s++)
            for (int t = 0; t < countof(types); t++) {
                struct rank_ctx c = {.n = odd_sizes[s], .type = types[t], .body = body_all_reduce};
                assert_ok(run_ranks(ranks, &c, &e), &e);
            }
}

/* Pieces of 64 times whatever is needed: the last rank's may be short or empty. x is summed in place in two slices, y
 * on top of what another place holds; both in one exchange. z travels as bf16. Then all pieces go to all, from where
 * they were summed. */
static int body_pieces(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    int size = world_size(w), me = world_rank(w);
    struct comm *all = world_comm(w);
    int64_t piece = round_up(ceil_div(c->n, size), 64), begin = min_i64(c->n, piece * me),
            end = min_i64(c->n, piece * (me + 1)), half = piece / 64 * 32;
    struct tensor x = room_for(DT_F32, c->n), y = room_for(DT_F32, c->n), z = room_for(DT_F32, c->n),
                  back = room_for(DT_F32, c->n);
    struct tensor work[3], in_x = tensor_1d((float *)x.data + begin, DT_F32, end - begin),
                           in_z = tensor_1d((float *)z.data + begin, DT_F32, end - begin);
    struct tensor apart = room_for(DT_F32, end - begin);
    for (int k = 0; k < 3; k++)
        work[k] = room_for(DT_F32, (size + 1) * piece + 64);
    fill(&x, me);
    fill(&y, me);
    fill(&z, me);
    for (int64_t i = begin; i < end; i++)
        tensor_set(&apart, i - begin, 0.5);
    struct comm_stats before = comm_stats(all);
    TRY(comm_group_begin(all, l, "bucket"));
    TRY(comm_sum_pieces(all, l, "x", &x, (struct piece_slice){.piece = piece, .n = half}, &in_x, false, &work[0]));
    TRY(comm_sum_pieces(all, l, "x", &x, (struct piece_slice){.piece = piece, .from = half, .n = piece - half}, &in_x,
                        false, &work[1]));
    TRY(comm_sum_pieces(all, l, "y", &y, (struct piece_slice){.piece = piece, .n = piece}, &apart, true, &work[2]));
    TRY(comm_group_end(all, l));
    CHECK(comm_stats(all).calls - before.calls == 1); /* one exchange for all */
    TRY(comm_sum_pieces(all, l, "z", &z, (struct piece_slice){.piece = piece, .n = piece, .bf16 = true}, &in_z, false,
                        &work[0]));
    for (int64_t i = 0; i < c->n; i++) {
        bool mine = i >= begin && i < end;
        double sum = 0.5, rounded = 0;
        for (int r = 0; r < size; r++) {
            sum = (float)(sum + (double)(float)value(r, i));
            rounded = (float)(rounded + (double)bf16_to_f32(f32_to_bf16((float)value(r, i))));
        }
        CHECK(tensor_get(&x, i) == (mine ? serial_sum(&x, size, i) : (double)(float)value(me, i)));
        CHECK(tensor_get(&y, i) == (double)(float)value(me, i));
        CHECK(!mine || tensor_get(&apart, i - begin) == sum);
        CHECK(!mine || tensor_get(&z, i) == rounded);
    }
    TRY(comm_gather_pieces(all, l, "back", &in_x, &back, piece));
    TRY(comm_all_gather(all, l, "back", &x, piece));
    for (int64_t i = 0; i < c->n; i++)
        CHECK(tensor_get(&x, i) == serial_sum(&x, size, i) && tensor_get(&back, i) == tensor_get(&x, i));
    struct tensor *all_rooms[] = {&x, &y, &z, &back, &apart, &work[0], &work[1], &work[2]};
    for (int k = 0; k < countof(all_rooms); k++)
        free(all_rooms[k]->data);
    return ST_OK;
}

static void pieces_are_reduced_and_gathered(void **state)
{
    (void)state;
    struct err e = {0};
    for (int ranks = 1; ranks <= 5; ranks++)
        for (int s = 0; s < countof(odd_sizes); s++) {
            struct rank_ctx c = {.n = odd_sizes[s], .body = body_pieces};
            assert_ok(run_ranks(ranks, &c, &e), &e);
        }
}

/* Rank a sends rank b (3 a + 5 b) % 7 rows of 6; what lies behind them must not be counted on. */
static int32_t rows_between(int a, int b) { return (int32_t)((3 * a + 5 * b) % 7); }
static int body_all_to_all(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    enum { CAP = 7, WIDTH = 6 };
    int size = world_size(w), me = world_rank(w);
    bool counted = c->n != 0;
    float out[5 * CAP * WIDTH], in[5 * CAP * WIDTH];
    int32_t n_out[5], n_in[5];
    for (int r = 0; r < size; r++) {
        n_out[r] = rows_between(me, r);
        n_in[r] = rows_between(r, me);
        for (int i = 0; i < CAP * WIDTH; i++) {
            out[r * CAP * WIDTH + i] = (float)(me * 10000 + r * 1000 + i);
            in[r * CAP * WIDTH + i] = -1;
        }
    }
    struct tensor s = tensor_3d(out, DT_F32, size, CAP, WIDTH), d = tensor_3d(in, DT_F32, size, CAP, WIDTH);
    struct tensor ns = tensor_1d(counted ? n_out : NULL, DT_I32, size),
                  nd = tensor_1d(counted ? n_in : NULL, DT_I32, size);
    TRY(comm_all_to_all(world_comm(w), l, "rows", &s, &d, &ns, &nd));
    for (int r = 0; r < size; r++)
        for (int i = 0; i < (counted ? n_in[r] : CAP) * WIDTH; i++)
            CHECK(in[r * CAP * WIDTH + i] == (float)(r * 10000 + me * 1000 + i));
    return ST_OK;
}

/* Every rank has a vector of 5; in a line those before (or after) it are gathered, and pieces for it are summed. */
static int line_body(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    enum { N = 5 };
    int me = world_rank(w), all = world_size(w);
    struct comm *line = world_comm(w);
    double own[N], many[8 * N], sum[N], work[8 * N], next[N];
    (void)c;
    for (int i = 0; i < N; i++)
        own[i] = value(me, i), next[i] = -1;
    struct tensor mine = tensor_1d(own, DT_F64, N), out = tensor_1d(sum, DT_F64, N), got = tensor_1d(next, DT_F64, N),
                  room = tensor_1d(work, DT_F64, (all - me) * N);
    for (int later = 0; later < 2; later++) {
        int first = later ? me : 0, n = later ? all - me : me + 1;
        struct tensor x = tensor_1d(many, DT_F64, n * N);
        TRY(comm_gather_line(line, l, "line", &mine, &x, later));
        for (int i = 0; i < n * N; i++)
            CHECK(many[i] == value(first + i / N, i % N));
    }
    struct tensor x = tensor_1d(many, DT_F64, (me + 1) * N);
    for (int i = 0; i < (me + 1) * N; i++)
        many[i] = value(me, i); /* piece r is for rank r */
    TRY(comm_sum_line(line, l, "sum", &x, &out, &room));
    for (int i = 0; i < N; i++) {
        double want = value(me, me * N + i);
        for (int r = me + 1; r < all; r++)
            want += value(r, me * N + i);
        CHECK(sum[i] == want);
    }
    for (int back = 0; back < 2; back++) {
        int from = me + (back ? 1 : -1);
        for (int i = 0; i < N; i++)
            next[i] = -1;
        TRY(comm_shift(line, l, "shift", &mine, &got, back));
        for (int i = 0; i < N; i++)
            CHECK(next[i] == (from >= 0 && from < all ? value(from, i) : -1));
    }
    struct tensor nothing = {0}; /* rank 0 has nothing to send, and the others pass on */
    next[0] = -1;
    TRY(comm_shift(line, l, "pass on", me > 0 ? &mine : &nothing, me > 1 ? &got : &nothing, false));
    CHECK(next[0] == (me > 1 ? value(me - 1, 0) : -1));
    for (int to = 1; to < all; to++) { /* along the line, one after the other */
        struct tensor none = {0}, state = tensor_1d(sum, DT_F64, N);
        for (int i = 0; i < N && me == to - 1; i++)
            sum[i] = to == 1 ? 1 : sum[i] + 1;
        TRY(comm_hop(line, l, "hop", me == to || me == to - 1 ? &state : &none, to - 1, to));
        CHECK(me != to || (sum[0] == to && sum[N - 1] == to));
    }
    struct tensor odd = tensor_1d(many, DT_F64, all * N + 1);
    CHECK(comm_gather_line(line, l, "odd", &mine, &odd, false) == ST_INTERNAL);
    err_clear(e);
    return ST_OK;
}

static void a_line_gathers_and_sums_what_lies_before_and_after(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++) {
        struct err e = {0};
        struct rank_ctx c = {.body = line_body};
        assert_ok(run_ranks(ranks, &c, &e), &e);
    }
}

static void rows_travel(void **state)
{
    (void)state;
    struct err e = {0};
    for (int ranks = 1; ranks <= 5; ranks++)
        for (int counted = 0; counted < 2; counted++) {
            struct rank_ctx c = {.n = counted, .body = body_all_to_all};
            assert_ok(run_ranks(ranks, &c, &e), &e);
        }
}

/* Everybody sends to everybody, itself included, before anybody receives; tags are received in another order. */
static int body_messages(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    int size = world_size(w), me = world_rank(w);
    struct comm *all = world_comm(w);
    for (int to = 0; to < size; to++)
        for (int tag = 0; tag < 3; tag++)
            for (int turn = 0; turn < 2; turn++) {
                int32_t v[3] = {me, tag, turn};
                struct tensor t = tensor_1d(v, DT_I32, 3);
                TRY(comm_send(all, l, "message", &t, to, tag));
            }
    for (int from = size - 1; from >= 0; from--)
        for (int tag = 2; tag >= 0; tag--)
            for (int turn = 0; turn < 2; turn++) {
                int32_t v[3] = {-1, -1, -1};
                struct tensor t = tensor_1d(v, DT_I32, 3);
                TRY(comm_recv(all, l, "message", &t, from, tag));
                CHECK(v[0] == from && v[1] == tag && v[2] == turn);
            }
    struct tensor none = tensor_1d(NULL, DT_F32, 0);
    TRY(comm_send(all, l, "nothing", &none, (me + 1) % size, 9));
    TRY(comm_recv(all, l, "nothing", &none, (me + size - 1) % size, 9));
    int64_t n = me + 5, got = 0;
    TRY(comm_host_send(all, "host", &n, sizeof n, (me + 1) % size, e));
    TRY(comm_host_recv(all, "host", &got, sizeof got, (me + size - 1) % size, e));
    CHECK(got == (me + size - 1) % size + 5);
    (void)c;
    return ST_OK;
}

static void sends_do_not_wait(void **state)
{
    (void)state;
    struct err e = {0};
    for (int ranks = 1; ranks <= 5; ranks++) {
        struct rank_ctx c = {.body = body_messages};
        assert_ok(run_ranks(ranks, &c, &e), &e);
    }
}

/* ---- groups and meshes ----------------------------------------------------------------------- */

static int check_sum(struct world *w, struct comm *g, struct lane *l, int64_t want, struct err *e)
{
    int64_t v = world_rank(w), work[8];
    struct tensor t = tensor_1d(&v, DT_I64, 1), wt = tensor_1d(work, DT_I64, 8);
    TRY(comm_all_reduce(g, l, g->name, &t, &wt));
    CHECK(v == want);
    return ST_OK;
}

static int body_groups(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    int me = world_rank(w), odd[2] = {1, 3}, even[3] = {0, 2, 4};
    struct comm *g, *none;
    TRY(comm_open(w, "parity", me % 2 ? odd : even, me % 2 ? 2 : 3, &g, e));
    CHECK(g->rank == me / 2 && g->size == (me % 2 ? 2 : 3));
    TRY(check_sum(w, g, l, me % 2 ? 4 : 6, e));
    TRY(comm_open(w, "odd", odd, me % 2 ? 2 : 0, &none, e));
    CHECK((none != NULL) == (me % 2 == 1));
    comm_close(none);
    comm_close(g);
    (void)c;
    return ST_OK;
}

static int body_wrong_group(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    int a[2] = {0, 1}, b[1] = {1};
    struct comm *g;
    (void)l;
    (void)c;
    int st = comm_open(w, "pair", world_rank(w) == 0 ? a : b, world_rank(w) == 0 ? 2 : 1, &g, e);
    comm_close(g);
    return st;
}

static void groups_are_apart(void **state)
{
    (void)state;
    struct err e = {0};
    struct rank_ctx c = {.body = body_groups}, bad = {.body = body_wrong_group};
    assert_ok(run_ranks(5, &c, &e), &e);
    assert_fails(run_ranks(2, &bad, &e), ST_INTERNAL, &e, "rank 0 counts rank 1 as a member of its group pair");
}

/* Groups of ranks that divide tokens, weights or experts: absent where nothing is divided. */
static int check_inner(struct world *w, const struct mesh *m, struct lane *l, struct err *e)
{
    int stage = m->pp_rank * m->stage, inner = m->tp * m->cp, block = stage + m->dp_rank * inner;
    int64_t tp = 0, cp = 0, batch = 0, etp = 0, all = 0;
    for (int i = 0; i < m->tp; i++)
        tp += block + m->cp_rank * m->tp + i;
    for (int i = 0; i < m->cp; i++)
        cp += block + i * m->tp + m->tp_rank;
    for (int i = 0; i < inner; i++)
        batch += block + i;
    for (int i = 0; i < m->etp; i++)
        etp += m->rank - m->etp_rank + i;
    for (int i = 0; i < m->stage; i++)
        all += stage + i;
    CHECK((m->tp_comm != NULL) == (m->tp > 1) && (m->cp_comm != NULL) == (m->cp > 1));
    CHECK((m->batch_comm != NULL) == (inner > 1) && (m->etp_comm != NULL) == (m->etp > 1));
    TRY(check_sum(w, m->stage_comm, l, all, e));
    if (m->tp > 1)
        TRY(check_sum(w, m->tp_comm, l, tp, e));
    if (m->cp > 1)
        TRY(check_sum(w, m->cp_comm, l, cp, e));
    if (inner > 1)
        TRY(check_sum(w, m->batch_comm, l, batch, e));
    return m->etp > 1 ? check_sum(w, m->etp_comm, l, etp, e) : ST_OK;
}

static int body_mesh(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    struct mesh m;
    TRY(mesh_open(&m, &c->sizes, w, e));
    int r = m.rank, stage = m.pp_rank * m.stage, slices = m.cp * m.dp;
    CHECK(r == m.stage_rank + m.stage * m.pp_rank && m.stage == m.tp * m.cp * m.dp);
    CHECK(m.stage_rank == m.tp_rank + m.tp * (m.cp_rank + m.cp * m.dp_rank));
    CHECK(m.stage_rank == m.etp_rank + m.etp * (m.ep_rank + m.ep * m.edp_rank));
    CHECK(r == mesh_rank_at(&m, m.pp_rank, m.dp_rank, m.cp_rank, m.tp_rank));
    CHECK(m.dp_comm->size == slices && m.stage_comm->size == m.stage && m.stage_comm->rank == m.stage_rank &&
          m.ep_comm->size == m.ep && m.edp_comm->size == m.edp && m.pp_comm->size == m.pp);
    CHECK(m.dp_comm->rank == m.cp_rank + m.cp * m.dp_rank && m.ep_comm->rank == m.ep_rank &&
          m.edp_comm->rank == m.edp_rank && m.pp_comm->rank == m.pp_rank);
    int64_t dp = 0, ep = 0, edp = 0, pp = 0;
    for (int i = 0; i < slices; i++)
        dp += stage + m.tp_rank + i * m.tp;
    for (int i = 0; i < m.ep; i++)
        ep += stage + m.etp_rank + m.etp * (i + m.ep * m.edp_rank);
    for (int i = 0; i < m.edp; i++)
        edp += stage + m.etp_rank + m.etp * (m.ep_rank + m.ep * i);
    for (int i = 0; i < m.pp; i++)
        pp += m.stage_rank + i * m.stage;
    TRY(check_inner(w, &m, l, e));
    TRY(check_sum(w, m.dp_comm, l, dp, e));
    TRY(check_sum(w, m.ep_comm, l, ep, e));
    TRY(check_sum(w, m.edp_comm, l, edp, e));
    TRY(check_sum(w, m.pp_comm, l, pp, e));
    bool end = m.pp > 1 && (m.pp_rank == 0 || m.pp_rank == m.pp - 1);
    CHECK((m.ends_comm != NULL) == end);
    if (end)
        TRY(check_sum(w, m.ends_comm, l, 2 * m.stage_rank + m.stage * (m.pp - 1), e));
    mesh_close(&m);
    return ST_OK;
}

static void meshes_have_their_groups(void **state)
{
    (void)state;
    static const struct {
        int world, pp, ep, tp, cp, etp;
    } cases[] = {{1, 1, 1, 1, 1, 1}, {4, 1, 1, 0, 0, 0}, {4, 1, 4, 1, 1, 1}, {4, 4, 1, 1, 1, 1}, {4, 2, 2, 1, 1, 1},
                 {6, 3, 2, 1, 1, 1}, {8, 2, 2, 1, 1, 1}, {4, 1, 1, 2, 2, 1}, {8, 1, 1, 2, 2, 1}, {8, 2, 2, 2, 1, 2},
                 {8, 1, 8, 2, 2, 1}, {8, 1, 2, 1, 4, 2}, {6, 1, 1, 3, 1, 1}};
    struct err e = {0};
    for (int i = 0; i < countof(cases); i++) {
        struct rank_ctx c = {.body = body_mesh,
                             .sizes = {.pp = cases[i].pp,
                                       .vpp = 1,
                                       .ep = cases[i].ep,
                                       .tp = cases[i].tp,
                                       .cp = cases[i].cp,
                                       .etp = cases[i].etp}};
        assert_ok(run_ranks(cases[i].world, &c, &e), &e);
    }
    struct rank_ctx c = {.body = body_mesh, .sizes = {3, 1, 1}};
    assert_fails(run_ranks(4, &c, &e), ST_USAGE, &e, "4 ranks do not divide into parallel.pp = 3");
    c.sizes = (struct mesh_sizes){.pp = 2, .vpp = 1, .ep = 3};
    assert_fails(run_ranks(4, &c, &e), ST_USAGE, &e, "parallel.ep = 3");
    c.sizes = (struct mesh_sizes){.pp = 2, .vpp = 1, .ep = 1, .tp = 3};
    assert_fails(run_ranks(4, &c, &e), ST_USAGE, &e, "parallel.tp = 3");
    c.sizes = (struct mesh_sizes){.pp = 1, .vpp = 1, .ep = 2, .etp = 4};
    assert_fails(run_ranks(4, &c, &e), ST_USAGE, &e, "parallel.etp = 4");
    struct mesh m;
    assert_fails(mesh_place(&m, &c.sizes, 4, 0, &e), ST_USAGE, &e, "parallel.ep = 2 and parallel.etp = 2");
    c.sizes = (struct mesh_sizes){.pp = 1, .vpp = 1, .ep = 3, .etp = 2};
    assert_fails(mesh_place(&m, &c.sizes, 8, 0, &e), ST_USAGE, &e, "a multiple of 6 ranks");
    assert_fails(mesh_place(&m, &(struct mesh_sizes){.pp = 1, .vpp = 1, .ep = 1}, 4, 4, &e), ST_USAGE, &e,
                 "rank 4 of a world of 4");
}

/* ---- agreement ------------------------------------------------------------------------------- */

static int body_agree(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    (void)l;
    TRY(comm_agree(world_comm(w), "fine", ST_OK, e));
    int st = world_rank(w) == c->culprit ? err_set(e, ST_CORRUPT, "the disk of this rank is on fire") : ST_OK;
    st = comm_agree(world_comm(w), "files", st, e);
    CHECK(st == ST_CORRUPT && e->code == ST_CORRUPT && strstr(e->msg, "on fire") != NULL);
    CHECK(world_rank(w) == c->culprit || strstr(e->msg, "rank 2: ") != NULL);
    return st;
}

static int body_same(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    (void)l;
    TRY(world_same(w, "binary", "one", e));
    return world_same(w, "config",
                      world_rank(w) == c->culprit ? "[train]\nlr = 2\nsteps = 4\n" : "[train]\nlr = 1\nsteps = 4\n", e);
}

static void ranks_agree_or_say_who_does_not(void **state)
{
    (void)state;
    struct err e = {0};
    struct rank_ctx c = {.body = body_agree, .culprit = 2}, d = {.body = body_same, .culprit = 3};
    assert_fails(run_ranks(4, &c, &e), ST_CORRUPT, &e, "on fire");
    assert_fails(run_ranks(4, &d, &e), ST_CONFLICT, &e,
                 "rank 3 has another config than rank 0: 'lr = 2' instead of 'lr = 1'");
    for (int r = 0; r < 4; r++)
        assert_string_equal(d.said[r].msg, e.msg);
    d.culprit = -1;
    assert_ok(run_ranks(4, &d, &e), &e);
}

/* ---- failures -------------------------------------------------------------------------------- */

static int one_sum(struct world *w, struct lane *l, const char *what)
{
    float v = 1, work[8];
    struct tensor t = tensor_1d(&v, DT_F32, 1), wt = tensor_1d(work, DT_F32, world_size(w));
    return comm_all_reduce(world_comm(w), l, what, &t, &wt);
}

static int body_fails(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    world_at_step(w, 3);
    TRY(one_sum(w, l, "first"));
    if (world_rank(w) == c->culprit)
        return err_set(e, ST_NONFINITE, "a NaN in layer 5");
    return one_sum(w, l, "second");
}

static void a_failure_ends_the_others(void **state)
{
    (void)state;
    struct err e = {0};
    struct rank_ctx c = {.body = body_fails, .culprit = 1, .timeout = 100};
    double start = time_now();
    assert_fails(run_ranks(3, &c, &e), ST_NONFINITE, &e, "a NaN in layer 5");
    assert_true(time_now() - start < 90); /* not by the timeout */
    assert_int_equal(c.status[0], ST_PEER);
    assert_non_null(strstr(c.said[0].msg, "rank 1 failed at step 3: a NaN in layer 5"));
    assert_non_null(strstr(c.said[2].msg, "rank 1 failed at step 3"));
}

static int body_leaves(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    (void)e;
    return world_rank(w) == c->culprit ? ST_OK : one_sum(w, l, "sum");
}

static void a_rank_that_ended_is_not_waited_for(void **state)
{
    (void)state;
    struct err e = {0};
    struct rank_ctx c = {.body = body_leaves, .culprit = 2};
    assert_fails(run_ranks(3, &c, &e), ST_PEER, &e, "for rank 2, which has ended");
}

/* Rank 0 waits for 1, 1 waits for 2, and 2 sleeps: all name rank 2. */
static int body_stalls(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    int me = world_rank(w);
    float v = 0;
    struct tensor t = tensor_1d(&v, DT_F32, 1);
    (void)e;
    world_at_step(w, 7);
    TRY(one_sum(w, l, "4.moe.dispatch"));
    if (me == c->culprit)
        nanosleep(&(struct timespec){.tv_sec = 3}, NULL);
    else
        TRY(comm_recv(world_comm(w), l, "5.cut.in", &t, me + 1, 1));
    return comm_send(world_comm(w), l, "5.cut.out", &t, me - 1 < 0 ? 0 : me - 1, 1);
}

static void a_timeout_names_who_did_not_come(void **state)
{
    (void)state;
    struct err e = {0};
    struct rank_ctx c = {.body = body_stalls, .culprit = 2, .timeout = 1};
    double start = time_now();
    assert_fails(run_ranks(3, &c, &e), ST_PEER, &e, "rank 2 (");
    assert_true(time_now() - start < 15); /* not by the usual timeout of 20 s */
    for (int r = 0; r < 2; r++) {
        assert_int_equal(c.status[r], ST_PEER);
        assert_non_null(strstr(c.said[r].msg, "'5.cut.in'"));
        assert_non_null(strstr(c.said[r].msg, "at step 7"));
        assert_non_null(strstr(c.said[r].msg, "rank 2 ("));
        assert_non_null(strstr(c.said[r].msg, "step 7, past collective 0 '4.moe.dispatch' of group all since"));
    }
    assert_non_null(strstr(c.said[0].msg, "rank 1 waits for it"));
}

static int body_mismatch(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    float v[4] = {0}, work[64];
    (void)c;
    (void)e;
    struct tensor t = tensor_1d(v, DT_F32, world_rank(w) == 1 ? 3 : 4), wt = tensor_1d(work, DT_F32, 64);
    return comm_all_reduce(world_comm(w), l, "sum", &t, &wt);
}

static int body_other_call(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    float v[4] = {0}, work[64];
    (void)c;
    (void)e;
    struct tensor t = tensor_1d(v, DT_F32, 4), wt = tensor_1d(work, DT_F32, 64);
    if (world_rank(w) == 1)
        return comm_all_gather(world_comm(w), l, "whole", &t, 2);
    return comm_all_reduce(world_comm(w), l, "sum", &t, &wt);
}

static int body_bad_args(struct world *w, struct lane *l, struct rank_ctx *c, struct err *e)
{
    float v[4] = {0};
    struct tensor t = tensor_1d(v, DT_F32, 4), small = tensor_1d(v, DT_F32, 4), u8 = tensor_1d(v, DT_U8, 4);
    struct comm *all = world_comm(w);
    (void)c;
    CHECK(comm_all_reduce(all, l, "sum", &t, &small) == ST_INTERNAL &&
          strstr(e->msg, "16 bytes, needed are 32") != NULL);
    CHECK(comm_all_reduce(all, l, "sum", &u8, &small) == ST_INTERNAL && strstr(e->msg, "cannot be summed") != NULL);
    CHECK(comm_all_gather(all, l, "back", &t, 1) == ST_INTERNAL && strstr(e->msg, "do not cover 4") != NULL);
    CHECK(comm_host_broadcast(all, "from", v, sizeof v, 2, e) == ST_INTERNAL &&
          strstr(e->msg, "no rank 2 in group all") != NULL);
    CHECK(comm_send(all, l, "to", &t, -1, 0) == ST_INTERNAL);
    CHECK(comm_recv(all, l, "from", &t, world_rank(w), 5) == ST_INTERNAL && strstr(e->msg, "has not sent") != NULL);
    CHECK(comm_group_end(all, l) == ST_INTERNAL);
    err_clear(e);
    return ST_OK;
}

static void differing_calls_are_errors(void **state)
{
    (void)state;
    struct err e = {0};
    struct rank_ctx c = {.body = body_mismatch}, d = {.body = body_other_call}, b = {.body = body_bad_args};
    assert_fails(run_ranks(3, &c, &e), ST_INTERNAL, &e, "bytes from rank");
    assert_fails(run_ranks(2, &d, &e), ST_INTERNAL, &e, "for different things");
    assert_ok(run_ranks(2, &b, &e), &e);
}

/* ---- one rank -------------------------------------------------------------------------------- */

static void one_rank_needs_nobody(void **state)
{
    (void)state;
    struct err e = {0};
    struct world *w;
    struct rank_ctx c = {.n = 100, .type = DT_F32, .body = body_pieces};
    struct lane l = {.dev = &cpu_dev, .err = &e};
    assert_ok(world_open(&w, &(struct world_opts){.kind = COMM_SELF}, &e), &e);
    assert_ok(body_pieces(w, &l, &c, &e), &e);
    assert_ok(body_all_to_all(w, &l, &c, &e), &e);
    assert_ok(body_messages(w, &l, &c, &e), &e);
    assert_ok(body_mesh(w, &l, &(struct rank_ctx){.sizes = {1, 1, 1}}, &e), &e);
    assert_ok(world_sync(w, "end", &e), &e);
    world_close(w);
}

/* Half of 4 MB at 100 MB/s, and 5 ms more. */
static void the_loop_takes_its_time(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    struct err e = {0};
    struct world *w;
    struct lane l = {.dev = &cpu_dev, .err = &e};
    struct tensor a = room_for(DT_F32, N), b = room_for(DT_F32, N);
    struct tensor send = tensor_3d(a.data, DT_F32, 1, N / 4, 4), recv = tensor_3d(b.data, DT_F32, 1, N / 4, 4),
                  none = {0};
    const struct world_opts o = {.kind = COMM_LOOP, .loop_rate = 100e6, .loop_latency = 5e-3, .loop_ranks = 2};
    assert_ok(world_open(&w, &o, &e), &e);
    fill(&a, 0);
    double start = time_now();
    assert_ok(comm_all_to_all(world_comm(w), &l, "rows", &send, &recv, &none, &none), &e);
    double took = time_now() - start;
    assert_true(took > 0.0259);
    assert_memory_equal(a.data, b.data, N * sizeof(float));
    struct rank_ctx c = {.n = 100, .type = DT_F32};
    assert_ok(body_all_reduce(w, &l, &c, &e), &e);
    struct mesh m;
    assert_ok(mesh_open(&m, &(struct mesh_sizes){.pp = 1, .vpp = 1, .ep = 1}, w, &e), &e);
    assert_true(m.ep_nodes);
    mesh_close(&m);
    world_close(w);
    free(a.data);
    free(b.data);
}

/* ---- under a launcher: the same bodies, one process per rank --------------------------------- */

static int all_bodies(struct world *w, struct lane *l, struct err *e)
{
    static const enum dtype types[] = {DT_F64, DT_F32, DT_BF16, DT_I32, DT_I64};
    for (int s = 0; s < countof(odd_sizes); s++) {
        struct rank_ctx c = {.n = odd_sizes[s]};
        for (int t = 0; t < countof(types); t++) {
            c.type = types[t];
            TRY(body_all_reduce(w, l, &c, e));
        }
        TRY(body_pieces(w, l, &c, e));
    }
    struct rank_ctx big = {.n = 700001, .type = DT_F32};
    TRY(body_pieces(w, l, &big, e));
    for (int counted = 0; counted < 2; counted++)
        TRY(body_all_to_all(w, l, &(struct rank_ctx){.n = counted}, e));
    for (int i = 0; i < 20; i++)
        TRY(body_messages(w, l, &(struct rank_ctx){0}, e));
    int size = world_size(w);
    TRY(body_mesh(w, l, &(struct rank_ctx){.sizes = {1, 1, size}}, e));
    TRY(body_mesh(w, l, &(struct rank_ctx){.sizes = {size, 1, 1}}, e));
    if (size % 2 == 0)
        TRY(body_mesh(w, l, &(struct rank_ctx){.sizes = {size / 2, 1, 2}}, e));
    TRY(body_same(w, l, &(struct rank_ctx){.culprit = -1}, e));
    return comm_agree(world_comm(w), "all", ST_OK, e);
}

/* What rank 2 does in step 3 while the others sum and pass messages on. */
static void misbehave(struct world *w, const char *how)
{
    if (world_rank(w) != 2)
        return;
    if (strcmp(how, "stop") == 0)
        raise(SIGSTOP);
    if (strcmp(how, "kill") == 0)
        raise(SIGKILL);
}

static int bad_run(struct world *w, struct lane *l, const char *how, struct err *e)
{
    float v = 0;
    struct tensor t = tensor_1d(&v, DT_F32, 1);
    int me = world_rank(w), size = world_size(w);
    for (int step = 1; step <= 5; step++) {
        world_at_step(w, step);
        TRY(one_sum(w, l, "4.moe.dispatch"));
        if (step == 3) {
            misbehave(w, how);
            if (me == 2 && strcmp(how, "fail") == 0)
                return err_set(e, ST_NONFINITE, "a NaN in layer 5");
        }
        TRY(comm_send(world_comm(w), l, "5.cut.out", &t, (me + size - 1) % size, step));
        TRY(comm_recv(world_comm(w), l, "5.cut.in", &t, (me + 1) % size, step));
    }
    return ST_OK;
}

/* test_comm ranks WHAT BOARD TIMEOUT [ipc] */
static int ranks_main(char **argv)
{
    struct err e = {0};
    struct launch at;
    struct world *w = NULL;
    struct dev dev = {0};
    struct lane l = {.dev = &dev, .index = 2, .err = &e};
    const char *what = argv[0];
    const struct world_opts o = {.board = argv[1], .timeout = strtod(argv[2], NULL)};
    struct world_opts opened = o;
    int st = launch_detect(&at, &e);
    opened.kind = argv[3] != NULL && strcmp(argv[3], "ipc") == 0 ? COMM_IPC : at.kind;
    if (st == ST_OK)
        st = dev_open(&dev, DEV_CPU, 1, &e);
    if (st == ST_OK)
        st = world_open(&w, &opened, &e);
    if (st == ST_OK)
        st = world_device(w, &dev, &e);
    if (st == ST_OK && strcmp(what, "all") == 0)
        st = all_bodies(w, &l, &e);
    else if (st == ST_OK && strcmp(what, "same") == 0)
        st = body_same(w, &l, &(struct rank_ctx){.culprit = 2}, &e);
    else if (st == ST_OK)
        st = bad_run(w, &l, what, &e);
    if (w != NULL)
        st = world_finish(w, st, &e);
    if (w != NULL && st == ST_OK && world_rank(w) == 0)
        printf("done: %d ranks by %s\n", world_size(w), comm_kind_name(world_kind(w)));
    world_close(w);
    dev_close(&dev);
    if (e.code != ST_OK)
        err_print(&e, stderr);
    return st == ST_OK ? 0 : 1;
}

int main(int argc, char **argv)
{
    if ((argc == 5 || argc == 6) && strcmp(argv[1], "ranks") == 0)
        return ranks_main(argv + 2);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_have_the_bits_of_a_serial_loop),
        cmocka_unit_test(pieces_are_reduced_and_gathered),
        cmocka_unit_test(a_line_gathers_and_sums_what_lies_before_and_after),
        cmocka_unit_test(rows_travel),
        cmocka_unit_test(sends_do_not_wait),
        cmocka_unit_test(groups_are_apart),
        cmocka_unit_test(meshes_have_their_groups),
        cmocka_unit_test(ranks_agree_or_say_who_does_not),
        cmocka_unit_test(a_failure_ends_the_others),
        cmocka_unit_test(a_rank_that_ended_is_not_waited_for),
        cmocka_unit_test(a_timeout_names_who_did_not_come),
        cmocka_unit_test(differing_calls_are_errors),
        cmocka_unit_test(one_rank_needs_nobody),
        cmocka_unit_test(the_loop_takes_its_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
