/* The head: logits = h W^T and cross entropy, in chunks of rows (ops/xent). In training its gradient is
 * made in the same pass, while the chunk's logits are still in cache; so its weight gradient is the
 * first contribution to a tied embedding, in every schedule. Decoding writes logits instead.
 *
 * Tensor-parallel ranks have the logits of a part of the vocabulary each, of all rows. Of every chunk they exchange
 * three numbers a row (ops/vocab), in the middle of the node; so it runs on the communication lane, where all that
 * these ranks exchange is in one order. */
#include "layers/shard.h"
#include "ops/gemm/gemm.h"
#include "ops/ops.h"
#include "ops/vocab/vocab.h"
#include "ops/xent/xent.h"

static struct weight head_weight(struct build *b, int64_t vocab)
{
    const struct config_model *c = &b->cfg->model;
    struct param tied = embedding_param(b);
    struct param own = param_matrix("output_layer.weight", vocab, c->hidden, c->init_std);
    param_split(&own, 0, UNIT_VOCAB, vocab);
    return build_weight(b, c->tied ? &tied : &own);
}

/* ---- a part of the vocabulary ---------------------------------------------------------------- */

struct parts_node {
    const char *what;
    const struct mesh *mesh;
    int64_t rows, chunk, vocab; /* vocab: of all ranks */
    int64_t scale_index;        /* which of the batch's loss scales */
    double z_loss;
};
enum {
    PARTS_H,
    PARTS_W,
    PARTS_LABEL,
    PARTS_SCALE,
    PARTS_LOSS,
    PARTS_DH,
    PARTS_DW,
    PARTS_Z,
    PARTS_STATS,
    PARTS_ALL,
    PARTS_WORK,
    PARTS_USES
};

static int chunk_loss(const struct step_ctx *c, struct comm *comm, int64_t at, int64_t n, struct tensor *z)
{
    const struct parts_node *p = c->self;
    int64_t part = p->vocab / comm->size, first = comm->rank * part, count = n * VOCAB_STATS;
    enum dtype wide = c->t[PARTS_STATS].dtype;
    struct tensor stats = tensor_1d(c->t[PARTS_STATS].data, wide, count),
                  all = tensor_1d(c->t[PARTS_ALL].data, wide, count * comm->size),
                  label = tensor_rows(&c->t[PARTS_LABEL], at, n);
    bool grads = c->t[PARTS_DH].data != NULL;
    TRY(c->ops->vocab_stats(c->lane, &(struct vocab_stats_args){.z = *z,
                                                                .label = label,
                                                                .stats = tensor_2d(stats.data, wide, n, VOCAB_STATS),
                                                                .first = first,
                                                                .vocab = p->vocab}));
    TRY(comm_gather_pieces(comm, c->lane, p->what, &stats, &all, count));
    return c->ops->vocab_loss(
        c->lane, &(struct vocab_loss_args){.z = *z,
                                           .all = tensor_3d(all.data, wide, comm->size, n, VOCAB_STATS),
                                           .label = label,
                                           .scale = grads ? tensor_rows(&c->t[PARTS_SCALE], p->scale_index, 1)
                                                          : (struct tensor){0},
                                           .loss = c->t[PARTS_LOSS],
                                           .acc_loss = c->add[PARTS_LOSS] || at > 0,
                                           .dz = grads ? *z : (struct tensor){0},
                                           .work = c->t[PARTS_WORK],
                                           .first = first,
                                           .vocab = p->vocab,
                                           .z_loss = p->z_loss});
}

static int parts_step(const struct step_ctx *c)
{
    const struct parts_node *p = c->self;
    struct comm *comm = p->mesh->tp_comm;
    if (comm == NULL)
        return err_set(c->lane->err, ST_INTERNAL, "%s: this plan was made without the ranks it is for", p->what);
    for (int64_t at = 0; at < p->rows; at += p->chunk) {
        int64_t n = min_i64(p->chunk, p->rows - at);
        struct tensor h = tensor_rows(&c->t[PARTS_H], at, n), z = tensor_rows(&c->t[PARTS_Z], 0, n), w = c->t[PARTS_W];
        TRY(c->ops->gemm(c->lane, &(struct gemm_args){.a = h, .b = w, .c = z, .trans_b = true, .alpha = 1}));
        TRY(chunk_loss(c, comm, at, n, &z));
        if (c->t[PARTS_DH].data != NULL)
            TRY(c->ops->gemm(
                c->lane, &(struct gemm_args){.a = z, .b = w, .c = tensor_rows(&c->t[PARTS_DH], at, n), .alpha = 1}));
        if (c->t[PARTS_DW].data != NULL)
            TRY(c->ops->gemm(c->lane, &(struct gemm_args){.a = z,
                                                          .b = h,
                                                          .c = c->t[PARTS_DW],
                                                          .acc_c = c->add[PARTS_DW] || at > 0,
                                                          .trans_a = true,
                                                          .alpha = 1}));
    }
    return ST_OK;
}

static int64_t loss_work(const struct build *b, int64_t rows, int64_t part, int64_t ranks)
{
    struct vocab_loss_args a = {.z = tensor_2d(NULL, b->dev->real, rows, part),
                                .all = tensor_3d(NULL, b->dev->wide, ranks, rows, VOCAB_STATS)};
    return b->ops->vocab_loss_work != NULL ? b->ops->vocab_loss_work(&a) : 0;
}

static int declare_parts(struct build *b, const struct head_io *io, const struct weight *w, double flops)
{
    struct graph *g = b->g;
    const struct mesh *mesh = b->mesh;
    int64_t vocab = padded_vocab(&b->cfg->model), part = vocab / mesh->tp, d = b->cfg->model.hidden, rows = all_rows(b),
            automatic = xent_chunk(rows, d, part),
            chunk = b->cfg->train.loss_chunk > 0 ? min_i64(b->cfg->train.loss_chunk, rows) : automatic;
    if (b->want_logits)
        return err_set(&g->err, ST_UNSUPPORTED, "logits of a vocabulary that parallel.tp divides cannot be written");
    struct gathered h = shard_gather(b, "gathered", io->h, NO_SLOT);
    struct parts_node *p = graph_own(g, sizeof *p);
    if (p == NULL || g->err.code != ST_OK)
        return g->err.code;
    *p = (struct parts_node){.what = graph_name(g, "head"),
                             .mesh = mesh,
                             .rows = rows,
                             .chunk = chunk,
                             .vocab = vocab,
                             .scale_index = io->scale_index,
                             .z_loss = b->cfg->train.z_loss};
    slot_id dh = build_grad(b, "dall", rows, d), dw = w->dw != NO_SLOT && !g->slots[w->dw].unwanted ? w->dw : NO_SLOT;
    slot_id z = build_real(b, "part", chunk, part), stats = build_wide(b, "stats", chunk, VOCAB_STATS),
            all = build_wide(b, "all_stats", chunk * mesh->tp, VOCAB_STATS),
            work = build_work(b, "loss_terms", loss_work(b, chunk, part, mesh->tp));
    int n = graph_node(g, "head", LANE_COMM, p);
    graph_role(g, n, ROLE_SHARD);
    GRAPH_PHASE(g, n, PH_FWD, parts_step, [PARTS_H] = READS(h.x), [PARTS_W] = READS(w->w),
                [PARTS_LABEL] = READS(io->label), [PARTS_SCALE] = READS(b->in.scale), [PARTS_LOSS] = ADDS(io->loss),
                [PARTS_DH] = WRITES(dh), [PARTS_DW] = ADDS(dw), [PARTS_Z] = WRITES(z), [PARTS_STATS] = WRITES(stats),
                [PARTS_ALL] = WRITES(all), [PARTS_WORK] = WRITES(work));
    double size = (double)dtype_bytes(b->dev->real);
    graph_cost(g, n, PH_FWD, (training(b) ? 3 : 1) * flops / mesh->tp,
               size * ((training(b) ? 2 : 1) * (double)(rows * d + d * part)));
    if (training(b)) {
        graph_sum(g, io->dh); /* prediction depths add to it */
        shard_scatter(b, "scattered", dh, io->dh, NO_SLOT, NO_SLOT);
    }
    return g->err.code;
}

/* ---- declaration ----------------------------------------------------------------------------- */

int head_declare(struct build *b, const struct head_io *io)
{
    const struct config_model *c = &b->cfg->model;
    struct graph *g = b->g;
    int64_t vocab = padded_vocab(c), d = c->hidden;
    graph_scope(g, -1, io->scope);
    b->prefix[0] = '\0';
    struct weight w = head_weight(b, vocab);
    double rows = (double)all_rows(b), flops = 2 * rows * (double)d * (double)vocab,
           size = (double)dtype_bytes(b->dev->real);
    if (b->mesh->tp > 1)
        return declare_parts(b, io, &w, flops);
    int n = graph_node(g, "head", LANE_COMPUTE, NULL);
    bool main_head = io->scale_index == 0, logits = main_head && (b->mode == BUILD_DECODE || b->want_logits);
    slot_id out = logits ? build_state(b, "logits", tensor_2d(NULL, b->dev->real, b->rows, vocab)) : NO_SLOT;
    if (logits)
        b->logits = out;
    if (b->mode == BUILD_DECODE) {
        GRAPH_OP(g, n, PH_FWD, gemm, .a = of(g, io->h), .b = of(g, w.w), .c = of(g, out), .trans_b = true, .alpha = 1);
        graph_cost(g, n, PH_FWD, flops, size * (rows * (double)(d + vocab) + (double)(d * vocab)));
        return g->err.code;
    }
    /* On a GPU the op itself knows how many rows its products want. */
    int64_t automatic = b->dev->kind == DEV_CUDA ? 0 : xent_chunk(b->rows, d, vocab);
    int64_t chunk = b->cfg->train.loss_chunk > 0 ? min_i64(b->cfg->train.loss_chunk, b->rows) : automatic;
    struct tensor scale = of(g, b->in.scale);
    graph_sum(g, io->dh); /* prediction depths add to it */
    GRAPH_OP(g, n, PH_FWD, xent, .h = of(g, io->h), .w = of(g, w.w), .label = of(g, io->label), .loss = of(g, io->loss),
             .scale = scale.data != NULL ? tensor_rows(&scale, io->scale_index, 1) : scale,
             .dh = of(g, training(b) ? io->dh : NO_SLOT), .dw = of(g, w.dw), .logits = of(g, out),
             .z_loss = b->cfg->train.z_loss, .chunk = chunk);
    graph_cost(g, n, PH_FWD, training(b) ? 3 * flops : flops,
               size * ((training(b) ? 2 : 1) * (rows * (double)d + (double)(d * vocab))));
    return g->err.code;
}
