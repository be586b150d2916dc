/* Collectives: each becomes one exchange of bytes between all members, then, for reductions, our own
 * sum in rank order. */
#include "comm/comm_int.h"
#include "comm/gpu_int.h"

#include <string.h>

int move_bytes(struct lane *l, void *dst, const void *src, int64_t bytes, struct err *e)
{
    (void)e;
    if (bytes <= 0 || dst == src)
        return ST_OK;
    if (on_gpu(l))
        return gpu_comm_copy(l, dst, src, bytes);
    memcpy(dst, src, (size_t)bytes);
    return ST_OK;
}

int move_own_parts(struct comm *c, struct lane *l, const struct exchange *x, struct err *e)
{
    int at = 0;
    for (int i = 0; i < x->n; i++) {
        const struct part *to = &x->part[i];
        if (to->peer != c->rank || to->send == NULL)
            continue;
        while (at < x->n && (x->part[at].peer != c->rank || x->part[at].recv == NULL))
            at++;
        if (at == x->n || x->part[at].recv_bytes != to->send_bytes)
            return err_set(e, ST_INTERNAL, "%s: rank %d sends itself %lld bytes and takes %lld", x->what,
                           c->world->rank, (long long)to->send_bytes,
                           at == x->n ? 0LL : (long long)x->part[at].recv_bytes);
        TRY(move_bytes(l, x->part[at++].recv, to->send, to->send_bytes, e));
    }
    return ST_OK;
}

/* ---- what is queued until the exchange ------------------------------------------------------- */

/* A message of no bytes is one all the same; it needs an address that is not NULL. */
static int add_part(struct comm *c, struct part p, struct err *e)
{
    struct comm_own *o = own(c);
    TRY(mem_grow((void **)&o->part, &o->cap_part, o->n_part + 1, sizeof *o->part, e));
    o->part[o->n_part++] = p;
    return ST_OK;
}
static const void *some(const void *p, struct comm *c) { return p != NULL ? p : (const void *)c; }
static int add_both(struct comm *c, int peer, const void *send, int64_t send_bytes, void *recv, int64_t recv_bytes,
                    struct err *e)
{
    return add_part(c, (struct part){peer, some(send, c), send_bytes, (void *)some(recv, c), recv_bytes}, e);
}

static int add_pending(struct comm *c, struct pending p, struct err *e)
{
    struct comm_own *o = own(c);
    TRY(mem_grow((void **)&o->pending, &o->cap_pending, o->n_pending + 1, sizeof *o->pending, e));
    o->pending[o->n_pending++] = p;
    return ST_OK;
}

static void count(struct comm *c)
{
    struct comm_own *o = own(c);
    bool plays = c->world->on_lane->plays_link;
    o->stats.calls++;
    for (size_t i = 0; i < o->n_part; i++) {
        if (o->part[i].send == NULL || (o->part[i].peer == c->rank && !plays))
            continue;
        o->stats.messages++;
        o->stats.bytes += o->part[i].send_bytes;
    }
}

static int exchange_now(struct comm *c, struct lane *l, enum comm_op op, const char *what, struct err *e)
{
    struct comm_own *o = own(c);
    const struct transport *t = l != NULL ? c->world->on_lane : c->world->on_host;
    const struct exchange x = {.op = op, .what = what, .part = o->part, .n = (int)o->n_part};
    int64_t number = o->number++;
    count(c);
    if (!comm_moves(c, t))
        return move_own_parts(c, l, &x, e);
    board_enter(c, number, what);
    int st = t->exchange(c, l, &x, e);
    if (st == ST_OK)
        board_leave(c);
    return st;
}

static int sum_one(struct lane *l, const struct pending *p)
{
    if (tensor_elems(&p->out) == 0)
        return ST_OK;
    if (on_gpu(l))
        return p->bf16 ? gpu_comm_sum_bf16(l, &p->out, p->pieces, p->n_pieces, p->add)
                       : gpu_comm_sum(l, &p->out, p->pieces, p->n_pieces);
    if (p->bf16)
        sum_bf16_pieces(&p->out, p->pieces, p->n_pieces, p->add);
    else
        sum_pieces(&p->out, p->pieces, p->n_pieces, l->dev->n_threads);
    return ST_OK;
}

static int finish(struct comm *c, struct lane *l, enum comm_op op, const char *what)
{
    struct comm_own *o = own(c);
    int st = exchange_now(c, l, op, what, l->err);
    for (size_t i = 0; st == ST_OK && i < o->n_pending; i++)
        st = sum_one(l, &o->pending[i]);
    o->n_part = o->n_pending = 0;
    if (st != ST_OK)
        err_in(l->err, "%s in group %s", what, c->name);
    return st;
}

/* Within a group the exchange comes at its end. */
static int finish_or_wait(struct comm *c, struct lane *l, enum comm_op op, const char *what)
{
    return own(c)->grouping ? ST_OK : finish(c, l, op, what);
}

int comm_group_begin(struct comm *c, struct lane *l, const char *what)
{
    if (own(c)->grouping)
        return err_set(l->err, ST_INTERNAL, "group %s: '%s' begins inside '%s'", c->name, what, own(c)->group_what);
    own(c)->grouping = true;
    own(c)->group_what = what;
    return ST_OK;
}

int comm_group_end(struct comm *c, struct lane *l)
{
    struct comm_own *o = own(c);
    if (!o->grouping)
        return err_set(l->err, ST_INTERNAL, "group %s: nothing was begun", c->name);
    o->grouping = false;
    if (o->n_part == 0)
        return ST_OK;
    return finish(c, l, OP_GROUP, o->group_what);
}

/* ---- the collectives ------------------------------------------------------------------------- */

static bool can_sum(enum dtype t) { return t == DT_F64 || t == DT_F32 || t == DT_BF16 || t == DT_I32 || t == DT_I64; }
static bool moves(const struct comm *c) { return comm_moves(c, c->world->on_lane); }
static int piece_bytes(const struct comm *c, const char *what, const struct tensor *t, int64_t piece, struct err *e)
{
    if (piece < 0 || tensor_elems(t) > piece * c->size)
        return err_set(e, ST_INTERNAL, "%s: %d pieces of %lld elements do not cover %lld", what, c->size,
                       (long long)piece, (long long)tensor_elems(t));
    return ST_OK;
}
static int64_t piece_begin(const struct tensor *t, int64_t piece, int r) { return min_i64(tensor_elems(t), piece * r); }
static int64_t piece_size(const struct tensor *t, int64_t piece, int r)
{
    return piece_begin(t, piece, r + 1) - piece_begin(t, piece, r);
}
static char *elem_at(const struct tensor *t, int64_t i)
{
    return t->data == NULL ? NULL : (char *)t->data + i * (int64_t)dtype_bytes(t->dtype);
}

static int check_tensor(const struct comm *c, struct lane *l, const char *what, const struct tensor *t)
{
    char text[96];
    if (!tensor_is_dense(t))
        return err_set(l->err, ST_INTERNAL, "%s: %s of group %s is not dense", what, tensor_text(t, text, sizeof text),
                       c->name);
    return ST_OK;
}

static int check_reduced(const struct comm *c, struct lane *l, const char *what, const struct tensor *t,
                         const struct tensor *work, int64_t elems)
{
    char text[96];
    TRY(check_tensor(c, l, what, t));
    if (!can_sum(t->dtype))
        return err_set(l->err, ST_INTERNAL, "%s: %s cannot be summed", what, tensor_text(t, text, sizeof text));
    int64_t need = elems * (int64_t)dtype_bytes(t->dtype);
    if (work->data != NULL ? tensor_bytes(work) < need : c->size > 1 && need > 0)
        return err_set(l->err, ST_INTERNAL, "%s: the work area has %lld bytes, needed are %lld", what,
                       work->data != NULL ? (long long)tensor_bytes(work) : 0LL, (long long)need);
    return ST_OK;
}

int comm_all_reduce(struct comm *c, struct lane *l, const char *what, struct tensor *t, struct tensor *work)
{
    int64_t bytes = tensor_bytes(t);
    TRY(check_reduced(c, l, what, t, work, tensor_elems(t) * c->size));
    if (!moves(c))
        return ST_OK;
    bool in_place = work->data == NULL; /* one rank that plays a link */
    for (int r = 0; r < c->size; r++)
        TRY(add_both(c, r, t->data, bytes, in_place ? t->data : (char *)work->data + r * bytes, bytes, l->err));
    if (!in_place)
        TRY(add_pending(c, (struct pending){.out = *t, .pieces = work->data, .n_pieces = c->size}, l->err));
    return finish_or_wait(c, l, OP_ALL_REDUCE, what);
}

/* Elements of a slice that piece r has. */
static int64_t slice_size(const struct tensor *x, struct piece_slice s, int r)
{
    int64_t left = piece_size(x, s.piece, r) - s.from;
    return left < 0 ? 0 : min_i64(left, s.n);
}

int64_t comm_sum_room(int ranks, int64_t n, enum dtype type, bool bf16)
{
    int64_t bytes = bf16 ? 2 * ranks * n * (int64_t)dtype_bytes(DT_BF16) : (ranks + 1) * n * (int64_t)dtype_bytes(type);
    return round_up(bytes, DEV_ALIGN);
}

/* Where piece r of a slice begins in x. */
static char *slice_at(const struct tensor *x, struct piece_slice s, int r)
{
    return elem_at(x, piece_begin(x, s.piece, r) + (slice_size(x, s, r) > 0 ? s.from : 0));
}

/* As bf16: all that leaves is rounded into the first half of work, what comes goes to the second. */
static int queue_bf16(struct comm *c, struct lane *l, const struct tensor *x, struct piece_slice s, char *work)
{
    enum { SIZE = 2 };
    int64_t mine = slice_size(x, s, c->rank);
    char *in = work + c->size * s.n * SIZE;
    for (int r = 0; r < c->size; r++) {
        int64_t n = slice_size(x, s, r);
        struct tensor to = tensor_1d(work + r * s.n * SIZE, DT_BF16, n),
                      from = tensor_1d(slice_at(x, s, r), x->dtype, n);
        TRY(n > 0 && on_gpu(l) ? gpu_comm_round(l, &to, &from) : ST_OK);
        if (!on_gpu(l))
            round_to_bf16(&to, &from);
        TRY(add_both(c, r, to.data, n * SIZE, in + r * mine * SIZE, mine * SIZE, l->err));
    }
    return ST_OK;
}

static int queue_wide(struct comm *c, struct lane *l, const struct tensor *x, struct piece_slice s, char *work)
{
    int64_t size = (int64_t)dtype_bytes(x->dtype), bytes = slice_size(x, s, c->rank) * size;
    for (int r = 0; r < c->size; r++)
        TRY(add_both(c, r, slice_at(x, s, r), slice_size(x, s, r) * size, work + (r + 1) * bytes, bytes, l->err));
    return ST_OK;
}

int comm_sum_pieces(struct comm *c, struct lane *l, const char *what, const struct tensor *x, struct piece_slice s,
                    struct tensor *out, bool add, struct tensor *work)
{
    int64_t mine = slice_size(x, s, c->rank), size = (int64_t)dtype_bytes(x->dtype), bytes = mine * size,
            room = comm_sum_room(c->size, s.n, x->dtype, s.bf16);
    struct tensor scratch = tensor_1d(work->data, DT_U8, tensor_bytes(work));
    TRY(check_reduced(c, l, what, x, &scratch, 0));
    TRY(piece_bytes(c, what, x, s.piece, l->err));
    if (out->dtype != x->dtype || (mine > 0 && s.from + mine > tensor_elems(out)))
        return err_set(l->err, ST_INTERNAL, "%s: the sum of a piece does not fit where it should go", what);
    if (s.n > 0 && (work->data == NULL || tensor_bytes(work) < room))
        return err_set(l->err, ST_INTERNAL, "%s: the work area has %lld bytes, needed are %lld", what,
                       (long long)tensor_bytes(work), (long long)room);
    char *sums = work->data;
    struct tensor to = tensor_1d(mine > 0 ? elem_at(out, s.from) : NULL, x->dtype, mine);
    TRY(s.bf16 ? queue_bf16(c, l, x, s, sums) : queue_wide(c, l, x, s, sums));
    if (s.bf16)
        TRY(add_pending(
            c,
            (struct pending){
                .out = to, .pieces = sums + c->size * s.n * 2, .n_pieces = c->size, .bf16 = true, .add = add},
            l->err));
    else
        TRY(add_pending(c, (struct pending){.out = to, .pieces = sums + (add ? 0 : bytes), .n_pieces = c->size + add},
                        l->err));
    if (add && !s.bf16 && mine > 0) /* what is there counts as the first piece */
        TRY(move_bytes(l, sums, to.data, bytes, l->err));
    return finish_or_wait(c, l, OP_REDUCE_SCATTER, what);
}

int comm_gather_pieces(struct comm *c, struct lane *l, const char *what, const struct tensor *own, struct tensor *x,
                       int64_t piece)
{
    int64_t size = (int64_t)dtype_bytes(x->dtype), mine = piece_size(x, piece, c->rank);
    TRY(check_tensor(c, l, what, x));
    TRY(piece_bytes(c, what, x, piece, l->err));
    if (mine > 0 && (own->dtype != x->dtype || tensor_elems(own) != mine))
        return err_set(l->err, ST_INTERNAL, "%s: a piece of %lld elements is to be gathered, not of %lld", what,
                       (long long)mine, (long long)tensor_elems(own));
    char *place = elem_at(x, piece_begin(x, piece, c->rank));
    const char *from = mine > 0 ? own->data : place;
    if (from != place && !c->world->on_lane->plays_link) /* which moves it there itself */
        TRY(move_bytes(l, place, from, mine * size, l->err));
    if (!moves(c))
        return ST_OK;
    for (int r = 0; r < c->size; r++)
        if (r != c->rank || c->world->on_lane->plays_link)
            TRY(add_both(c, r, from, mine * size, elem_at(x, piece_begin(x, piece, r)), piece_size(x, piece, r) * size,
                         l->err));
    return finish_or_wait(c, l, OP_ALL_GATHER, what);
}

int comm_all_gather(struct comm *c, struct lane *l, const char *what, struct tensor *x, int64_t piece)
{
    struct tensor own = tensor_1d(elem_at(x, piece_begin(x, piece, c->rank)), x->dtype, piece_size(x, piece, c->rank));
    return comm_gather_pieces(c, l, what, &own, x, piece);
}

static int check_member(const struct comm *c, const char *what, int rank, struct err *e)
{
    if (rank < 0 || rank >= c->size)
        return err_set(e, ST_INTERNAL, "%s: there is no rank %d in group %s of %d", what, rank, c->name, c->size);
    return ST_OK;
}

/* ---- ranks in their order -------------------------------------------------------------------- */

static int check_line(const struct comm *c, struct lane *l, const char *what, const struct tensor *one,
                      const struct tensor *many, int pieces)
{
    TRY(check_tensor(c, l, what, one));
    TRY(check_tensor(c, l, what, many));
    if (one->dtype != many->dtype || tensor_elems(many) != pieces * tensor_elems(one))
        return err_set(l->err, ST_INTERNAL, "%s: %d pieces of %lld elements are not %lld", what, pieces,
                       (long long)tensor_elems(one), (long long)tensor_elems(many));
    return ST_OK;
}

int comm_gather_line(struct comm *c, struct lane *l, const char *what, const struct tensor *own, struct tensor *x,
                     bool later)
{
    int64_t bytes = tensor_bytes(own);
    int first = later ? c->rank : 0, last = later ? c->size - 1 : c->rank;
    TRY(check_line(c, l, what, own, x, last - first + 1));
    TRY(move_bytes(l, (char *)x->data + (c->rank - first) * bytes, own->data, bytes, l->err));
    if (!moves(c))
        return ST_OK;
    for (int r = 0; r < c->size; r++) {
        struct part p = {.peer = r};
        if (r == c->rank)
            continue;
        if (r >= first && r <= last)
            p.recv = (char *)x->data + (r - first) * bytes, p.recv_bytes = bytes;
        else
            p.send = own->data, p.send_bytes = bytes;
        TRY(add_part(c, p, l->err));
    }
    return finish_or_wait(c, l, OP_ALL_GATHER, what);
}

int comm_sum_line(struct comm *c, struct lane *l, const char *what, const struct tensor *x, struct tensor *out,
                  struct tensor *work)
{
    int64_t bytes = tensor_bytes(out);
    int pieces = c->size - c->rank;
    TRY(check_line(c, l, what, out, x, c->rank + 1));
    TRY(check_reduced(c, l, what, out, work, tensor_elems(out) * pieces));
    if (!moves(c))
        return move_bytes(l, out->data, x->data, bytes, l->err);
    TRY(move_bytes(l, work->data, (const char *)x->data + c->rank * bytes, bytes, l->err));
    for (int r = 0; r < c->size; r++) {
        struct part p = {.peer = r};
        if (r == c->rank)
            continue;
        if (r < c->rank)
            p.send = (const char *)x->data + r * bytes, p.send_bytes = bytes;
        else
            p.recv = (char *)work->data + (r - c->rank) * bytes, p.recv_bytes = bytes;
        TRY(add_part(c, p, l->err));
    }
    TRY(add_pending(c, (struct pending){.out = *out, .pieces = work->data, .n_pieces = pieces}, l->err));
    return finish_or_wait(c, l, OP_REDUCE_SCATTER, what);
}

int comm_shift(struct comm *c, struct lane *l, const char *what, const struct tensor *send, struct tensor *recv,
               bool back)
{
    int to = c->rank + (back ? -1 : 1), from = c->rank + (back ? 1 : -1);
    bool gives = to >= 0 && to < c->size && send->data != NULL,
         takes = from >= 0 && from < c->size && recv->data != NULL;
    if (gives)
        TRY(check_tensor(c, l, what, send));
    if (takes)
        TRY(check_tensor(c, l, what, recv));
    if (gives)
        TRY(add_part(c, (struct part){.peer = to, .send = send->data, .send_bytes = tensor_bytes(send)}, l->err));
    if (takes)
        TRY(add_part(c, (struct part){.peer = from, .recv = recv->data, .recv_bytes = tensor_bytes(recv)}, l->err));
    return moves(c) ? finish_or_wait(c, l, OP_ALL_GATHER, what) : ST_OK;
}

int comm_hop(struct comm *c, struct lane *l, const char *what, const struct tensor *t, int from, int to)
{
    TRY(check_member(c, what, from, l->err));
    TRY(check_member(c, what, to, l->err));
    if (own(c)->grouping || from == to)
        return err_set(l->err, ST_INTERNAL, "%s: from rank %d to rank %d of group %s", what, from, to, c->name);
    if (c->rank == from || c->rank == to)
        TRY(check_tensor(c, l, what, t));
    if (c->rank == from)
        TRY(add_part(c, (struct part){.peer = to, .send = t->data, .send_bytes = tensor_bytes(t)}, l->err));
    if (c->rank == to)
        TRY(add_part(c, (struct part){.peer = from, .recv = t->data, .recv_bytes = tensor_bytes(t)}, l->err));
    return finish(c, l, OP_ALL_TO_ALL, what);
}

static int add_broadcast(struct comm *c, void *data, int64_t bytes, int root, struct err *e)
{
    if (c->rank != root)
        return add_part(c, (struct part){root, NULL, 0, (void *)some(data, c), bytes}, e);
    for (int r = 0; r < c->size; r++)
        if (r != root)
            TRY(add_part(c, (struct part){r, some(data, c), bytes, NULL, 0}, e));
    return ST_OK;
}

/* Rows of buffer r that count; a GPU's counts are not looked at, whole buffers travel. */
static int64_t buffer_rows(struct lane *l, const struct tensor *rows, int r, int64_t cap)
{
    if (rows == NULL || rows->data == NULL || on_gpu(l))
        return cap;
    return ((const int32_t *)rows->data)[r];
}

static int buffer_bytes(const struct comm *c, struct lane *l, const char *what, const struct tensor *t,
                        const struct tensor *rows, int64_t *out)
{
    char text[96];
    TRY(check_tensor(c, l, what, t));
    if (t->rank < 2 || t->dim[0] != c->size)
        return err_set(l->err, ST_INTERNAL, "%s: %s is not one buffer for each of %d ranks", what,
                       tensor_text(t, text, sizeof text), c->size);
    int64_t cap = t->dim[1];
    for (int r = 0; r < c->size; r++) {
        int64_t n = buffer_rows(l, rows, r, cap);
        if (n < 0 || n > cap)
            return err_set(l->err, ST_INTERNAL, "%s: %lld rows with rank %d of group %s, but a buffer holds %lld", what,
                           (long long)n, r, c->name, (long long)cap);
    }
    *out = cap == 0 ? 0 : tensor_bytes(t) / c->size / cap;
    return ST_OK;
}

int comm_all_to_all(struct comm *c, struct lane *l, const char *what, const struct tensor *send, struct tensor *recv,
                    const struct tensor *send_rows, const struct tensor *recv_rows)
{
    int64_t row, row_in;
    TRY(buffer_bytes(c, l, what, send, send_rows, &row));
    TRY(buffer_bytes(c, l, what, recv, recv_rows, &row_in));
    if (row != row_in && row > 0 && row_in > 0)
        return err_set(l->err, ST_INTERNAL, "%s: rows of %lld bytes go out, of %lld come in", what, (long long)row,
                       (long long)row_in);
    int64_t cap = send->dim[1], cap_in = recv->dim[1];
    for (int r = 0; r < c->size; r++) {
        char *out = (char *)send->data + r * cap * row, *in = (char *)recv->data + r * cap_in * row_in;
        TRY(add_both(c, r, out, buffer_rows(l, send_rows, r, cap) * row, in,
                     buffer_rows(l, recv_rows, r, cap_in) * row_in, l->err));
    }
    return finish_or_wait(c, l, OP_ALL_TO_ALL, what);
}

/* ---- between two ranks ----------------------------------------------------------------------- */

static int send_to(struct comm *c, struct lane *l, const char *what, const void *data, int64_t bytes, int to, int tag,
                   struct err *e)
{
    const struct message_to a = {.peer = to, .tag = tag, .bytes = bytes};
    TRY(check_member(c, what, to, e));
    own(c)->stats.calls++;
    own(c)->stats.messages += to != c->rank;
    own(c)->stats.bytes += to != c->rank ? bytes : 0;
    if (to == c->rank)
        return inbox_send_self(c, l, data, &a, e);
    return (l != NULL ? c->world->on_lane : c->world->on_host)->send(c, l, data, &a, e);
}

static int recv_from(struct comm *c, struct lane *l, const char *what, void *data, int64_t bytes, int from, int tag,
                     struct err *e)
{
    const struct message_to a = {.peer = from, .tag = tag, .bytes = bytes};
    TRY(check_member(c, what, from, e));
    own(c)->stats.calls++;
    if (from == c->rank)
        return inbox_recv_self(c, l, data, &a, e);
    board_enter(c, own(c)->number, what);
    int st = (l != NULL ? c->world->on_lane : c->world->on_host)->recv(c, l, data, &a, e);
    if (st != ST_OK)
        return err_in(e, "%s: receive from rank %d of group %s, tag %d", what, from, c->name, tag), st;
    board_leave(c);
    return ST_OK;
}

int comm_send(struct comm *c, struct lane *l, const char *what, const struct tensor *t, int to, int tag)
{
    TRY(check_tensor(c, l, what, t));
    return send_to(c, l, what, t->data, tensor_bytes(t), to, tag, l->err);
}

int comm_recv(struct comm *c, struct lane *l, const char *what, struct tensor *t, int from, int tag)
{
    TRY(check_tensor(c, l, what, t));
    return recv_from(c, l, what, t->data, tensor_bytes(t), from, tag, l->err);
}

int comm_host_send(struct comm *c, const char *what, const void *data, int64_t bytes, int to, struct err *e)
{
    return send_to(c, NULL, what, data, bytes, to, 0, e);
}

int comm_host_recv(struct comm *c, const char *what, void *data, int64_t bytes, int from, struct err *e)
{
    return recv_from(c, NULL, what, data, bytes, from, 0, e);
}

/* ---- host memory ----------------------------------------------------------------------------- */

static int finish_host(struct comm *c, const char *what, struct err *e)
{
    int st = exchange_now(c, NULL, OP_HOST, what, e);
    own(c)->n_part = own(c)->n_pending = 0;
    if (st != ST_OK)
        err_in(e, "%s in group %s", what, c->name);
    return st;
}

int comm_host_gather(struct comm *c, const char *what, const void *mine, int64_t bytes, void *all, struct err *e)
{
    for (int r = 0; r < c->size; r++)
        TRY(add_both(c, r, mine, bytes, (char *)all + r * bytes, bytes, e));
    return finish_host(c, what, e);
}

int comm_host_broadcast(struct comm *c, const char *what, void *data, int64_t bytes, int root, struct err *e)
{
    TRY(check_member(c, what, root, e));
    if (c->size == 1)
        return ST_OK;
    TRY(add_broadcast(c, data, bytes, root, e));
    return finish_host(c, what, e);
}

int comm_barrier(struct comm *c, const char *what, struct err *e)
{
    for (int r = 0; r < c->size; r++)
        TRY(add_both(c, r, NULL, 0, NULL, 0, e));
    return finish_host(c, what, e);
}

struct comm_stats comm_stats(const struct comm *c) { return ((const struct comm_own *)c)->stats; }
