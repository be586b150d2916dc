/* Multi-token prediction: the entry of one depth.
 *
 *   ids_k   = ids_{k-1} shifted left, labels likewise; embedding and head are the main model's
 *   e       [T, d]   = E[ids_k]
 * With one residual stream:
 *   cat     [T, 2d]  = [ enorm(e) | hnorm(h_{k-1}) ]
 *   x       [T, d]   = cat W_eh^T          enters a stack of its own, with a final norm and a loss
 * With n streams, h_{k-1} [T, n d] being those before their contraction; each stream by itself, e for all:
 *   x_i     [T, d]   = enorm(e) W_e^T + hnorm(h_{k-1, i}) W_h^T
 * which are the streams of the depth's stack: nothing is expanded again.
 * backward: dcat = dx W_eh; de and the contribution to dh_{k-1} through the two norms. h_{k-1} has two readers: with
 * one stream the head (in the forward half) and this entry, else this entry and, after it, the contraction. */
#include "layers/shard.h"
#include "ops/dropout/dropout.h"
#include "ops/gemm/gemm.h"
#include "ops/mhc/mhc.h"
#include "ops/shift/shift.h"

struct entry {
    int64_t hidden, streams;
};

static struct tensor ids(const struct build *b, slot_id s)
{
    struct tensor t = of(b->g, s);
    return t.data ? tensor_split_first(&t, b->batch, b->seq) : t;
}

/* Streams [T, n d] as n T rows of d. */
static struct tensor by_stream(const struct entry *m, struct tensor t)
{
    return tensor_2d(t.data, t.dtype, t.dim[0] * m->streams, m->hidden);
}

/* The normed embedding and hidden state: halves of one tensor, or a tensor each. */
static struct tensor normed_e(const struct entry *m, struct tensor e)
{
    return m->streams > 1 ? e : tensor_cols(&e, 0, m->hidden);
}
static struct tensor normed_h(const struct entry *m, struct tensor e, struct tensor h)
{
    return m->streams > 1 ? by_stream(m, h) : tensor_cols(&e, m->hidden, m->hidden);
}

/* ---- declaration ----------------------------------------------------------------------------- */

/* Normed embedding and hidden state with their gradients; with one stream en, den hold both and hn, dhn are absent. */
struct normed {
    slot_id en, den, hn, dhn;
};

static void declare_norms(struct build *b, const struct entry *m, slot_id e, slot_id de, const struct mtp_io *io,
                          const struct normed *y)
{
    struct graph *g = b->g;
    struct norm enorm = norm_weights(b, "enorm.weight", m->hidden), hnorm = norm_weights(b, "hnorm.weight", m->hidden);
    norm_statistics(b, &enorm, "e", b->rows);
    norm_statistics(b, &hnorm, "h", b->rows * m->streams);
    int n = graph_node(g, "norms", LANE_COMPUTE, NULL);
    norm_forward(g, n, PH_FWD, &enorm, of(g, e), normed_e(m, of(g, y->en)));
    norm_forward(g, n, PH_FWD, &hnorm, by_stream(m, of(g, io->h)), normed_h(m, of(g, y->en), of(g, y->hn)));
    graph_again(g, n, y->en);
    graph_again(g, n, y->hn);
    /* With one stream the head's contribution to dh is already there; the contraction of several adds its own after
     * this. */
    struct tensor dh = by_stream(m, of(g, io->dh)), none = {0};
    graph_sum(g, io->dh);
    norm_backward(g, n, &enorm, normed_e(m, of(g, y->den)), of(g, e), none, of(g, de));
    norm_backward(g, n, &hnorm, normed_h(m, of(g, y->den), of(g, y->dhn)), by_stream(m, of(g, io->h)),
                  m->streams > 1 ? none : dh, dh);
    double elems = 0.5 * (double)(b->rows * m->hidden * (1 + m->streams)), size = (double)dtype_bytes(b->dev->real);
    graph_cost(g, n, PH_FWD, 8 * elems, 4 * elems * size);
    graph_cost(g, n, PH_REPLAY, 8 * elems, 4 * elems * size);
    graph_cost(g, n, PH_BWD, 18 * elems, 6 * elems * size);
}

/* The projection's output x starts the depth's residual stream: it is that stream, or the same numbers in its type. */
static void enter_stream(struct build *b, slot_id x, slot_id dx, struct mtp_io *io)
{
    struct graph *g = b->g;
    int64_t d = b->cfg->model.hidden;
    io->x = x;
    io->dx = dx;
    if (!wide_stream(b))
        return;
    io->x = build_stream(b, "stream", b->rows, d);
    io->dx = build_stream_grad(b, "dstream", b->rows, d);
    int n = graph_node(g, "enter", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, dropout, .x = of(g, x), .y = of(g, io->x));
    GRAPH_OP(g, n, PH_BWD, dropout, .x = of(g, io->dx), .y = of(g, dx));
    double bytes = (double)(b->rows * d) * (double)(dtype_bytes(b->dev->real) + dtype_bytes(b->dev->wide));
    graph_cost(g, n, PH_FWD, 0, bytes);
    graph_cost(g, n, PH_BWD, 0, bytes);
}

static void declare_eh_proj(struct build *b, const struct normed *y, struct mtp_io *io)
{
    int64_t d = b->cfg->model.hidden;
    struct param p = param_matrix("eh_proj.weight", d, 2 * d, b->cfg->model.init_std);
    param_replicate(&p, GRAD_OVER_TOKENS);
    slot_id x = build_real(b, "x", b->rows, d), dx = build_grad(b, "dx", b->rows, d);
    linear_declare(b, "eh_proj",
                   &(struct linear){.x = y->en,
                                    .y = x,
                                    .dy = dx,
                                    .dx = y->den,
                                    .w = build_linear_weight(b, &p),
                                    .bias = no_weight(),
                                    .in = 2 * d,
                                    .out = d});
    enter_stream(b, x, dx, io);
}

static void declare_streams(struct build *b, const struct entry *m, const struct normed *y, struct mtp_io *io)
{
    struct graph *g = b->g;
    int64_t d = m->hidden, wide = m->streams * d;
    struct param pe = param_matrix("e_proj.weight", d, d, b->cfg->model.init_std),
                 ph = param_matrix("h_proj.weight", d, d, b->cfg->model.init_std);
    param_replicate(&pe, GRAD_OVER_TOKENS);
    param_replicate(&ph, GRAD_OVER_TOKENS);
    slot_id ep = build_real(b, "e_proj", b->rows, d), dep = build_grad(b, "de_proj", b->rows, d);
    linear_declare(b, "e_proj",
                   &(struct linear){.x = y->en,
                                    .y = ep,
                                    .dy = dep,
                                    .dx = y->den,
                                    .w = build_linear_weight(b, &pe),
                                    .bias = no_weight(),
                                    .in = d,
                                    .out = d});
    struct weight w = build_weight(b, &ph);
    io->x = build_real(b, "stream", b->rows, wide);
    io->dx = build_grad(b, "dstream", b->rows, wide);
    double flops = 2 * (double)(b->rows * wide * d),
           bytes = 2 * (double)(b->rows * wide) * (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "h_proj", LANE_COMPUTE, NULL);
    struct tensor x = by_stream(m, of(g, io->x)), dx = by_stream(m, of(g, io->dx)), hn = by_stream(m, of(g, y->hn));
    GRAPH_OP(g, n, PH_FWD, mhc_expand_fwd, .x = of(g, ep), .y = of(g, io->x));
    GRAPH_OP(g, n, PH_FWD, gemm, .a = hn, .b = of(g, w.w), .c = x, .trans_b = true, .alpha = 1);
    graph_again(g, n, io->x);
    GRAPH_OP(g, n, PH_BWD, mhc_expand_bwd, .dy = of(g, io->dx), .dx = of(g, dep));
    GRAPH_OP(g, n, PH_BWD, gemm, .a = dx, .b = of(g, w.w), .c = by_stream(m, of(g, y->dhn)), .alpha = 1);
    GRAPH_OP(g, n, PH_DW, gemm, .a = dx, .b = hn, .c = of(g, w.dw), .trans_a = true, .alpha = 1);
    for (int ph_id = PH_FWD; ph_id < PH_COUNT; ph_id++)
        graph_cost(g, n, (enum phase_id)ph_id, flops, bytes);
}

static void shift_ids(struct build *b, struct mtp_io *io, bool learned)
{
    struct graph *g = b->g;
    struct tensor shape = tensor_1d(NULL, DT_I32, all_rows(b));
    slot_id token = graph_slot(g, "token", shape), label = graph_slot(g, "label", shape);
    int n = graph_node(g, "shift", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, shift, .x = ids(b, io->token), .doc_start = ids(b, b->in.doc_start), .y = ids(b, token),
             .fill = 0);
    GRAPH_OP(g, n, PH_FWD, shift, .x = ids(b, io->label), .doc_start = ids(b, b->in.doc_start), .y = ids(b, label),
             .fill = -1);
    if (learned) { /* a token of the next position brings its position along, as in Megatron */
        slot_id pos = graph_slot(g, "pos", shape);
        GRAPH_OP(g, n, PH_FWD, shift, .x = ids(b, io->pos), .doc_start = ids(b, b->in.doc_start), .y = ids(b, pos),
                 .fill = 0);
        io->pos = pos;
    }
    io->token = token;
    io->label = label;
}

int mtp_declare(struct build *b, int depth, struct mtp_io *io)
{
    struct graph *g = b->g;
    int64_t d = b->cfg->model.hidden;
    struct entry sizes = {.hidden = d, .streams = io->streams}, *m = &sizes;
    bool learned = b->cfg->model.position == CFG_POSITION_LEARNED;
    char scope[32];
    snprintf(scope, sizeof scope, "mtp%d", depth);
    graph_scope(g, -1, scope);
    if (b->in.next_token[depth] != NO_SLOT) { /* the next place may be another rank's: shifted before the cut */
        io->token = b->in.next_token[depth];
        io->label = b->in.next_label[depth];
        io->pos = learned ? b->in.next_pos[depth] : io->pos;
    } else {
        shift_ids(b, io, learned);
    }
    slot_id e, de;
    TRY(embed_declare(b, scope, EMBED_DEPTH, io->token, io->pos, &e, &de));
    graph_scope(g, -1, scope);
    snprintf(b->prefix, sizeof b->prefix, "mtp.layers.%d.", depth);
    bool wide = io->streams > 1;
    struct normed y = {
        .en = build_real(b, wide ? "en" : "cat", b->rows, wide ? d : 2 * d), .hn = NO_SLOT, .dhn = NO_SLOT};
    y.den = build_grad(b, wide ? "den" : "dcat", b->rows, wide ? d : 2 * d);
    if (wide) {
        y.hn = build_real(b, "hn", b->rows, io->streams * d);
        y.dhn = build_grad(b, "dhn", b->rows, io->streams * d);
    }
    declare_norms(b, m, e, de, io, &y);
    if (wide)
        declare_streams(b, m, &y, io);
    else
        declare_eh_proj(b, &y, io);
    return g->err.code;
}
