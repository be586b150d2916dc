/* The head: logits = h W^T and cross entropy, in chunks of rows (ops/xent). In training its gradient is
 * made in the same pass, while the chunk's logits are still in cache; so its weight gradient is the
 * first contribution to a tied embedding, in every schedule. Decoding writes logits instead. */
#include "layers/layer.h"
#include "ops/gemm/gemm.h"
#include "ops/xent/xent.h"

struct head {
    double z_loss;
    int64_t chunk, scale_index;
};

static int head_fwd(const struct step_ctx *c)
{
    enum { H, W, LABEL, SCALE, LOSS, DH, DW, LOGITS, WORK };
    const struct head *m = c->self;
    struct xent_args a = {.h = c->t[H], .w = c->t[W], .label = c->t[LABEL], .loss = c->t[LOSS],
                          .logits = c->t[LOGITS], .dh = c->t[DH], .dw = c->t[DW], .work = c->t[WORK], .z_loss = m->z_loss,
                          .chunk = m->chunk, .acc_loss = c->add[LOSS], .acc_dw = c->add[DW]};
    if (c->t[SCALE].data != NULL)
        a.scale = tensor_rows(&c->t[SCALE], m->scale_index, 1);
    return c->ops->xent(c->lane, &a);
}

static int head_logits(const struct step_ctx *c)
{
    enum { H, W, LOGITS };
    struct gemm_args a = {.a = c->t[H], .b = c->t[W], .c = c->t[LOGITS], .trans_b = true, .alpha = 1};
    return c->ops->gemm(c->lane, &a);
}

static struct weight head_weight(struct build *b, int64_t vocab)
{
    const struct config_model *c = &b->cfg->model;
    struct param tied = embedding_param(b);
    struct param own = param_matrix("output_layer.weight", vocab, c->hidden, c->init_std);
    return build_weight(b, c->tied ? &tied : &own);
}

int head_declare(struct build *b, const struct head_io *io)
{
    const struct config_model *c = &b->cfg->model;
    struct graph *g = b->g;
    struct head *m = graph_own(g, sizeof *m);
    if (m == NULL)
        return ST_NOMEM;
    int64_t vocab = round_up(c->vocab, c->vocab_multiple), d = c->hidden;
    graph_scope(g, -1, io->scope);
    b->prefix[0] = '\0';
    struct weight w = head_weight(b, vocab);
    double rows = (double)b->rows, flops = 2 * rows * (double)d * (double)vocab, size = (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "head", LANE_COMPUTE, m);
    bool main_head = io->scale_index == 0, logits = main_head && (b->mode == BUILD_DECODE || b->want_logits);
    slot_id out = logits ? build_state(b, "logits", tensor_2d(NULL, b->dev->real, b->rows, vocab)) : NO_SLOT;
    if (logits)
        b->logits = out;
    if (b->mode == BUILD_DECODE) {
        GRAPH_PHASE(g, n, PH_FWD, head_logits, READS(io->h), READS(w.w), WRITES(out));
        graph_cost(g, n, PH_FWD, flops, size * (rows * (double)(d + vocab) + (double)(d * vocab)));
        return g->err.code;
    }
    m->z_loss = b->cfg->train.z_loss;
    m->scale_index = io->scale_index;
    /* On a GPU the op itself knows how many rows its products want. */
    int64_t automatic = b->dev->kind == DEV_CUDA ? 0 : xent_chunk(b->rows, d, vocab);
    m->chunk = b->cfg->train.loss_chunk > 0 ? min_i64(b->cfg->train.loss_chunk, b->rows) : automatic;
    struct tensor hs = tensor_2d(NULL, b->dev->real, b->rows, d), ws = tensor_2d(NULL, b->dev->real, vocab, d);
    struct xent_args a = {.h = hs, .w = ws, .label = tensor_1d(NULL, DT_I32, b->rows), .chunk = m->chunk};
    if (training(b)) {
        a.dh = hs;
        a.dw = ws;
    }
    slot_id work = b->ops->xent_work ? build_work(b, "work", b->ops->xent_work(&a)) : NO_SLOT;
    GRAPH_PHASE(g, n, PH_FWD, head_fwd, READS(io->h), READS(w.w), READS(io->label), READS(b->in.scale), ADDS(io->loss),
                ADDS(training(b) ? io->dh : NO_SLOT), ADDS(w.dw), WRITES(out), WRITES(work));
    graph_cost(g, n, PH_FWD, training(b) ? 3 * flops : flops, size * ((training(b) ? 2 : 1) * (rows * (double)d + (double)(d * vocab))));
    return g->err.code;
}
