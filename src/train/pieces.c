/* Tensors of a checkpoint, put together from what ranks hold; see pieces_int.h. */
#include "train/pieces_int.h"
#include "train/reshard_int.h"

#include <stdlib.h>
#include <string.h>

/* Bytes that others may have sent to a rank before it has received them: as many as its largest tensor, or these. */
enum { ROUND_BYTES = 64 << 20 };
enum what { WHAT_VALUE, WHAT_MOMENT1, WHAT_MOMENT2, WHAT_COUNT };
static const char *const moment[2] = {"exp_avg", "exp_avg_sq"};

/* ---- what a rank answers for ----------------------------------------------------------------- */

/* Elements [first, first + n) of this rank's part of a parameter, and where they are on the device; n 0: another rank
 * has them. */
struct extent {
    int64_t first, n;
    struct tensor at;
};

/* The type that files hold. */
static enum dtype saved_type(const struct trainer *t, const struct param *p, enum what what)
{
    return what == WHAT_VALUE ? param_dtype(p, t->dev.wide) : optim_type(&t->model);
}

/* turn: of ranks that hold copies not always the first answers, but the one whose turn it is. */
static struct extent extent_of(const struct model *m, int k, enum what what, int turn)
{
    const struct param_entry *row = &m->params.list[k];
    const struct mesh *mesh = &m->mesh;
    bool copy =
        mesh_copy_rank(mesh, &row->p) != turn % mesh_copies(mesh, &row->p); /* of what another rank answers for */
    bool far_end = row->p.shared_ends && mesh->pp_rank > 0;
    /* Experts live on every rank of ep_comm, each a slice; what is whole on all of them is answered for by one. Where a
     * rank updates a piece it answers for that: its copy of the others' pieces is renewed by the next step. */
    bool pieces = !shard_is_all(m, k);
    struct shard s = pieces ? shard_of(m, k) : (struct shard){.n = param_elems(&row->p)};
    if (far_end || (!pieces && copy) || s.n == 0)
        return (struct extent){0};
    struct tensor t = what == WHAT_VALUE ? model_param(m, k) : optim_state(m, k, what == WHAT_MOMENT2);
    int64_t skip = what == WHAT_VALUE ? (s.first - model_param_kept(m, k).first) * (int64_t)dtype_bytes(t.dtype) : 0;
    return (struct extent){.first = s.first, .n = s.n, .at = tensor_1d((char *)t.data + skip, t.dtype, s.n)};
}

static int local_row(const struct pieces *s, int i) { return s->full.local[s->of[i].index]; }

static struct extent own_extent(const struct pieces *s, int i)
{
    int k = local_row(s, i);
    /* Turns are counted in the table of all parameters, which every rank has. */
    return k >= 0 ? extent_of(&s->t->model, k, (enum what)s->of[i].what, s->spread ? s->of[i].index : 0)
                  : (struct extent){0};
}

/* ---- who gets what --------------------------------------------------------------------------- */

static int list_items(struct pieces *s, struct err *e)
{
    const struct param_table *full = s->full.params;
    TRY(mem_array((void **)&s->items, WHAT_COUNT * (size_t)full->n, sizeof *s->items, e));
    TRY(mem_array((void **)&s->of, WHAT_COUNT * (size_t)full->n, sizeof *s->of, e));
    for (int k = 0; k < full->n; k++) {
        const struct param *p = &full->list[k].p;
        for (int w = 0; w < (param_trained(p) ? WHAT_COUNT : 1); w++) {
            const char *key = w == WHAT_VALUE ? p->key : arena_printf(&s->keys, "%s.%s", moment[w - 1], p->key);
            if (key == NULL)
                return err_set(e, ST_NOMEM, "out of memory saving a checkpoint");
            s->of[s->n] = (struct piece_of){.index = k, .what = w};
            s->items[s->n++] =
                (struct ckpt_item){.key = key,
                                   .param = p,
                                   .section = w == WHAT_VALUE ? CKPT_MODEL : CKPT_OPTIM,
                                   .host = tensor_shape(saved_type(s->t, p, (enum what)w), p->rank, p->dim)};
        }
    }
    return ST_OK;
}

/* holds[rank][item]: does the rank answer for a part of it? */
static int exchange_holdings(struct pieces *s, struct err *e)
{
    const struct mesh *mesh = &s->t->model.mesh;
    int st = ST_OK;
    uint8_t *mine = NULL;
    TRY(mem_array((void **)&s->holds, (size_t)mesh->world * (size_t)s->n, 1, e));
    TRY(mem_array((void **)&mine, (size_t)s->n, 1, e));
    for (int i = 0; i < s->n; i++)
        mine[i] = own_extent(s, i).n > 0;
    if (mesh->world > 1)
        st = comm_host_gather(mesh->all, "save", mine, s->n, s->holds, e);
    else
        memcpy(s->holds, mine, (size_t)s->n);
    free(mine);
    return st;
}

static bool holds(const struct pieces *s, int rank, int i) { return s->holds[(int64_t)rank * s->n + i] != 0; }

struct sized {
    int64_t bytes;
    int item;
};

static int largest_first(const void *a, const void *b)
{
    const struct sized *x = a, *y = b;
    return x->bytes != y->bytes ? (x->bytes > y->bytes ? -1 : 1) : (x->item > y->item) - (x->item < y->item);
}

/* Each tensor goes to the writer with least to write among those that hold a part of it; where none of them writes,
 * among all. Every rank finds the same. */
static int choose_writers(struct pieces *s, struct err *e)
{
    struct sized *list = NULL;
    int64_t *load = NULL;
    int st;
    TRY_OUT(mem_array((void **)&list, (size_t)s->n, sizeof *list, e));
    TRY_OUT(mem_array((void **)&load, (size_t)s->writers, sizeof *load, e));
    for (int i = 0; i < s->n; i++)
        list[i] = (struct sized){.bytes = tensor_bytes(&s->items[i].host), .item = i};
    qsort(list, (size_t)s->n, sizeof *list, largest_first);
    for (int k = 0; k < s->n; k++) {
        int i = list[k].item, best = -1, any = 0;
        for (int r = 0; r < s->writers; r++) {
            if (holds(s, r, i) && (best < 0 || load[r] < load[best]))
                best = r;
            any = load[r] < load[any] ? r : any;
        }
        s->items[i].part = best >= 0 ? best : any;
        load[s->items[i].part] += list[k].bytes;
    }
out:
    free(list);
    free(load);
    return st;
}

static int in_order_of_writing(const void *a, const void *b)
{
    const struct ckpt_item *x = *(const struct ckpt_item *const *)a, *y = *(const struct ckpt_item *const *)b;
    return x->part != y->part ? x->part - y->part : ckpt_item_order(x, y);
}

/* In each round a writer gets the next of its tensors, as many as its share of memory allows. order: all items by
 * round, and of a round by writer in the order of its file. */
static int plan_rounds(struct pieces *s, struct err *e)
{
    const struct ckpt_item **by_writer = NULL;
    int64_t most = ROUND_BYTES, bytes = 0;
    int st;
    TRY_OUT(mem_array((void **)&by_writer, (size_t)s->n, sizeof *by_writer, e));
    TRY_OUT(mem_array((void **)&s->round, (size_t)s->n, sizeof *s->round, e));
    TRY_OUT(mem_array((void **)&s->order, (size_t)s->n, sizeof *s->order, e));
    for (int i = 0; i < s->n; i++) {
        by_writer[i] = &s->items[i];
        most = max_i64(most, tensor_bytes(&s->items[i].host));
    }
    qsort(by_writer, (size_t)s->n, sizeof *by_writer, in_order_of_writing);
    for (int k = 0, round = 0; k < s->n; k++) {
        int64_t size = tensor_bytes(&by_writer[k]->host);
        bool next = k > 0 && by_writer[k]->part == by_writer[k - 1]->part;
        round = !next ? 0 : bytes + size > most ? round + 1 : round;
        bytes = !next || bytes + size > most ? size : bytes + size;
        s->round[by_writer[k] - s->items] = round;
        s->n_rounds = round >= s->n_rounds ? round + 1 : s->n_rounds;
    }
    TRY_OUT(mem_array((void **)&s->round_at, (size_t)s->n_rounds + 1, sizeof *s->round_at, e));
    for (int i = 0; i < s->n; i++)
        s->round_at[s->round[i] + 1]++;
    for (int r = 0; r < s->n_rounds; r++)
        s->round_at[r + 1] += s->round_at[r];
    for (int k = 0; k < s->n; k++) { /* each round keeps the order of writing; afterwards its mark is where it ends */
        int i = (int)(by_writer[k] - s->items);
        s->order[s->round_at[s->round[i]]++] = i;
    }
    for (int r = s->n_rounds; r > 0; r--)
        s->round_at[r] = s->round_at[r - 1];
    s->round_at[0] = 0;
out:
    free(by_writer);
    return st;
}

int pieces_open(struct pieces *s, struct trainer *t, int writers, bool spread, struct err *e)
{
    const struct mesh *mesh = &t->model.mesh;
    *s = (struct pieces){.t = t, .writers = writers, .spread = spread};
    arena_init(&s->keys);
    int st = full_table_open(&s->full, &t->model, e);
    if (st == ST_OK)
        st = list_items(s, e);
    if (mesh->world > 1)
        st = comm_agree(mesh->all, "save", st, e);
    if (st == ST_OK)
        st = exchange_holdings(s, e);
    if (st == ST_OK)
        st = choose_writers(s, e);
    if (st == ST_OK)
        st = plan_rounds(s, e);
    if (mesh->world > 1)
        st = comm_agree(mesh->all, "save", st, e);
    if (st != ST_OK)
        pieces_close(s);
    return st;
}

void pieces_close(struct pieces *s)
{
    free(s->items);
    free(s->of);
    free(s->holds);
    free(s->round);
    free(s->order);
    free(s->round_at);
    arena_release(&s->keys);
    full_table_close(&s->full);
    *s = (struct pieces){0};
}

/* ---- a rank's own part ----------------------------------------------------------------------- */

/* Values of a part go to their places in the whole tensor. */
static int place(const struct tensor *whole, const struct param *part, const struct extent *x, void *values,
                 int64_t *placed, struct err *e)
{
    *placed += x->n;
    return reshard_copy(part, x->first, x->n, values, whole->data, (int64_t)dtype_bytes(whole->dtype), RESHARD_PLACE,
                        e);
}

/* A frozen parameter has no master weights: files hold its working copy, widened. The caller frees the values. */
static int fetch_wide(struct trainer *t, const struct extent *x, enum dtype type, struct tensor *out, struct err *e)
{
    struct tensor host;
    *out = tensor_1d(NULL, type, x->n);
    TRY(mem_aligned(&out->data, (size_t)max_i64(tensor_bytes(out), 1), DEV_ALIGN, e));
    int st = dev_fetch(&t->dev, &x->at, &host, e);
    if (st != ST_OK) {
        free(out->data);
        return st;
    }
    tensor_convert(out, &host);
    dev_fetched(&t->dev, &host);
    return ST_OK;
}

static int take_own(struct pieces *s, int i, const struct tensor *whole, int64_t *placed, struct err *e)
{
    struct trainer *t = s->t;
    int k = local_row(s, i);
    struct extent x = own_extent(s, i);
    struct tensor values;
    if (x.n == 0)
        return ST_OK;
    struct param_run run = param_run_from(&t->model.params.list[k].p, x.first);
    int64_t size = (int64_t)dtype_bytes(whole->dtype);
    if (run.n >= x.n && x.at.dtype == whole->dtype && run.whole + x.n <= tensor_elems(whole)) {
        *placed += x.n;
        return t->dev.vt->copy_out(&t->dev, (char *)whole->data + run.whole * size, x.at.data, x.n * size, e);
    }
    TRY(fetch_wide(t, &x, whole->dtype, &values, e));
    int st = place(whole, &t->model.params.list[k].p, &x, values.data, placed, e);
    free(values.data);
    return st;
}

/* ---- messages -------------------------------------------------------------------------------- */

/* Which elements follow, and of which part of the parameter: as in struct param. n -1: the sender could not read them,
 * and nothing follows. */
struct answer {
    int64_t first, n;
    int64_t dim[4], full, from;
    int32_t ranks, rank;
};

static int send_values(struct pieces *s, int i, const struct extent *x, const struct tensor *host, struct err *e)
{
    const struct param *p = &s->t->model.params.list[local_row(s, i)].p;
    struct comm *all = s->t->model.mesh.all;
    struct answer a = {.first = x->first,
                       .n = x->n,
                       .full = p->shard.full,
                       .from = p->shard.first,
                       .ranks = p->slice.ranks,
                       .rank = p->slice.rank};
    memcpy(a.dim, p->dim, sizeof a.dim);
    int st = comm_host_send(all, "save", &a, (int64_t)sizeof a, s->items[i].part, e);
    if (st == ST_OK)
        st = comm_host_send(all, "save", host->data, tensor_bytes(host), s->items[i].part, e);
    s->broken |= st != ST_OK;
    return st;
}

/* This rank's elements of an item to the rank that writes it. */
static int send_own(struct pieces *s, int i, struct err *e)
{
    struct trainer *t = s->t;
    struct extent x = own_extent(s, i);
    enum dtype type = s->items[i].host.dtype;
    bool widen = x.at.dtype != type;
    struct tensor host;
    int st = widen ? fetch_wide(t, &x, type, &host, e) : dev_fetch(&t->dev, &x.at, &host, e);
    if (st != ST_OK) { /* the other rank waits for it and must hear */
        struct answer none = {.n = -1};
        s->broken |=
            comm_host_send(t->model.mesh.all, "save", &none, (int64_t)sizeof none, s->items[i].part, NULL) != ST_OK;
        return st;
    }
    st = send_values(s, i, &x, &host, e);
    if (widen)
        free(host.data);
    else
        dev_fetched(&t->dev, &host);
    return st;
}

/* The part that an answer describes, of a parameter of the full table. */
static int part_of(const struct param *whole, const struct answer *a, struct param *out, struct err *e)
{
    *out = *whole;
    bool sane = a->ranks >= 0 && a->rank >= 0 && (a->ranks == 0 || a->rank < a->ranks) && a->full >= 0;
    for (int d = 0; d < whole->rank; d++) {
        sane &= a->dim[d] >= 0 && a->dim[d] <= whole->dim[d];
        out->dim[d] = a->dim[d];
    }
    out->shard.full = a->full;
    out->shard.first = a->from;
    out->slice.ranks = a->ranks;
    out->slice.rank = a->rank;
    sane = sane && (a->full == 0 || a->full == whole->dim[0]) &&
           (a->ranks == 0 || out->dim[whole->split.dim] * a->ranks == whole->dim[whole->split.dim]);
    return sane ? ST_OK : err_set(e, ST_INTERNAL, "a rank sent a part of %s that does not fit", whole->key);
}

/* whole NULL: the values are received and dropped. */
static int take_from(struct pieces *s, int i, int rank, const struct tensor *whole, int64_t *placed, struct err *e)
{
    struct comm *all = s->t->model.mesh.all;
    struct answer a;
    struct param part;
    void *values;
    TRY(comm_host_recv(all, "save", &a, (int64_t)sizeof a, rank, e));
    if (a.n < 0)
        return err_set(e, ST_IO, "rank %d could not send its part of %s", rank, s->items[i].key);
    TRY(part_of(&s->full.params->list[s->of[i].index].p, &a, &part, e));
    if (a.n > param_elems(&part))
        return err_set(e, ST_INTERNAL, "a rank sent %lld elements of a part of %s", (long long)a.n, part.key);
    struct extent x = {.first = a.first, .n = a.n};
    int64_t bytes = a.n * (int64_t)dtype_bytes(s->items[i].host.dtype);
    TRY(mem_aligned(&values, (size_t)max_i64(bytes, 1), DEV_ALIGN, e));
    int st = comm_host_recv(all, "save", values, bytes, rank, e);
    if (st == ST_OK && whole != NULL)
        st = place(whole, &part, &x, values, placed, e);
    free(values);
    return st;
}

/* ---- rounds ---------------------------------------------------------------------------------- */

/* All ranks begin the next round, or stop because one of them has failed. */
static int begin_round(struct pieces *s, struct err *e)
{
    const struct mesh *mesh = &s->t->model.mesh;
    int round = s->begun, st = ST_OK;
    if (mesh->world > 1)
        TRY(comm_agree(mesh->all, "save", ST_OK, e));
    s->begun++;
    for (int k = s->round_at[round]; k < s->round_at[round + 1]; k++) {
        int i = s->order[k];
        if (s->items[i].part == mesh->rank || !holds(s, mesh->rank, i))
            continue;
        int sent = send_own(s, i, st == ST_OK ? e : NULL); /* after an error the rest still goes: others wait for it */
        st = st == ST_OK ? sent : st;
    }
    return st;
}

int pieces_fetch(struct pieces *s, int i, const struct tensor *whole, struct err *e)
{
    const struct mesh *mesh = &s->t->model.mesh;
    int64_t placed = 0;
    while (s->begun <= s->round[i])
        TRY(begin_round(s, e));
    s->taken++;
    TRY(take_own(s, i, whole, &placed, e));
    for (int r = 0; r < mesh->world; r++)
        if (r != mesh->rank && holds(s, r, i))
            TRY(take_from(s, i, r, whole, &placed, e));
    if (placed != tensor_elems(whole))
        return err_set(e, ST_INTERNAL, "saving %s: ranks hold %lld of its %lld elements", s->items[i].key,
                       (long long)placed, (long long)tensor_elems(whole));
    return ST_OK;
}

/* After an error: what others have sent in rounds that have begun would be taken for part of the next checkpoint. */
static void drop_sent(struct pieces *s)
{
    const struct mesh *mesh = &s->t->model.mesh;
    int64_t nothing = 0, mine = 0;
    for (int k = 0; s->begun > 0 && k < s->round_at[min_i64(s->begun, s->n_rounds)]; k++) {
        int i = s->order[k];
        if (s->items[i].part != mesh->rank || mine++ < s->taken)
            continue;
        for (int r = 0; r < mesh->world; r++)
            if (r != mesh->rank && holds(s, r, i) && take_from(s, i, r, NULL, &nothing, NULL) != ST_OK)
                return;
    }
}

int pieces_end(struct pieces *s, int st, struct err *e)
{
    const struct mesh *mesh = &s->t->model.mesh;
    while (st == ST_OK && s->begun < s->n_rounds)
        st = begin_round(s, e);
    if (mesh->world == 1 || s->broken)
        return st;
    if (st != ST_OK)
        drop_sent(s);
    return comm_agree(mesh->all, "save", st, e);
}

int pieces_visit(struct pieces *s, piece_fn fn, void *ctx, struct err *e)
{
    int st = ST_OK;
    for (int k = 0; st == ST_OK && k < s->n; k++) {
        int i = s->order[k];
        if (s->items[i].part == s->t->model.mesh.rank)
            st = fn(ctx, i, e);
    }
    return pieces_end(s, st, e);
}
