/* The token embedding: x[t] = W[token[t]], then dropout. Its backward is a weight gradient only. */
#include "layers/layer.h"
#include "ops/dropout/dropout.h"
#include "ops/embed/embed.h"

struct param embedding_param(const struct build *b)
{
    const struct config_model *c = &b->cfg->model;
    struct param p = param_matrix("embedding.word_embeddings.weight", padded_vocab(c), c->hidden, c->embed_init_std);
    param_split(&p, 0, UNIT_VOCAB, p.dim[0]);
    p.shared_ends = b->mesh->pp > 1 && (c->tied || b->n_depths > 0);
    return p;
}

int embed_declare(struct build *b, const char *scope, slot_id token, slot_id *x, slot_id *dx)
{
    const struct config_model *c = &b->cfg->model;
    struct graph *g = b->g;
    bool drops = training(b) && c->dropout > 0;
    char site[64];
    snprintf(site, sizeof site, "dropout.%s", scope);
    graph_scope(g, -1, scope);
    b->prefix[0] = '\0';
    struct param p = embedding_param(b);
    struct weight w = build_weight(b, &p);
    struct dropout_rule rule = {.p = c->dropout, .key = rng_key((uint64_t)b->cfg->run.seed, site), .seq = b->seq, .info = of(g, b->in.info)};
    *x = build_real(b, "e", b->rows, c->hidden);
    *dx = build_grad(b, "de", b->rows, c->hidden);
    double bytes = (double)(b->rows * c->hidden) * (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "embed", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, embed_fwd, .token = of(g, token), .w = of(g, w.w), .y = of(g, *x));
    if (drops)
        GRAPH_OP(g, n, PH_FWD, dropout, .x = of(g, *x), .y = of(g, *x), .rule = rule);
    graph_cost(g, n, PH_FWD, 0, 2 * bytes);
    if (!training(b))
        return g->err.code;
    slot_id masked = drops ? build_real(b, "masked", b->rows, c->hidden) : *dx;
    if (drops)
        GRAPH_OP(g, n, PH_DW, dropout, .x = of(g, *dx), .y = of(g, masked), .rule = rule);
    GRAPH_OP(g, n, PH_DW, embed_bwd, .token = of(g, token), .dy = of(g, masked), .dw = of(g, w.dw));
    graph_cost(g, n, PH_DW, (double)(b->rows * c->hidden), 2 * bytes);
    return g->err.code;
}
