/* The head: logits = h W^T and cross entropy, in chunks of rows (ops/xent). In training its gradient is
 * made in the same pass, while the chunk's logits are still in cache; so its weight gradient is the
 * first contribution to a tied embedding, in every schedule. Decoding writes logits instead. */
#include "layers/layer.h"
#include "ops/gemm/gemm.h"
#include "ops/xent/xent.h"

static struct weight head_weight(struct build *b, int64_t vocab)
{
    const struct config_model *c = &b->cfg->model;
    struct param tied = embedding_param(b);
    struct param own = param_matrix("output_layer.weight", vocab, c->hidden, c->init_std);
    param_split(&own, 0, UNIT_VOCAB, vocab);
    return build_weight(b, c->tied ? &tied : &own);
}

int head_declare(struct build *b, const struct head_io *io)
{
    const struct config_model *c = &b->cfg->model;
    struct graph *g = b->g;
    int64_t vocab = padded_vocab(c), d = c->hidden;
    graph_scope(g, -1, io->scope);
    b->prefix[0] = '\0';
    struct weight w = head_weight(b, vocab);
    double rows = (double)b->rows, flops = 2 * rows * (double)d * (double)vocab,
           size = (double)dtype_bytes(b->dev->real);
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
