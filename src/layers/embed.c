/* The token embedding: x[t] = W[token[t]], then dropout. Its backward is a weight gradient only. */
#include "layers/layer.h"
#include "ops/dropout/dropout.h"
#include "ops/embed/embed.h"

struct embed {
    double dropout;
    uint64_t key;
    int64_t seq;
};

static int apply_dropout(const struct step_ctx *c, const struct embed *m, const struct tensor *info, const struct tensor *from,
                         const struct tensor *to)
{
    struct dropout_args d = {.x = *from, .y = *to, .rule = {.p = m->dropout, .key = m->key, .seq = m->seq, .info = *info}};
    return c->ops->dropout(c->lane, &d);
}

static int embed_fwd(const struct step_ctx *c)
{
    enum { TOKEN, W, INFO, X };
    const struct embed *m = c->self;
    struct embed_fwd_args a = {.token = c->t[TOKEN], .w = c->t[W], .y = c->t[X]};
    TRY(c->ops->embed_fwd(c->lane, &a));
    return c->t[INFO].data ? apply_dropout(c, m, &c->t[INFO], &c->t[X], &c->t[X]) : ST_OK;
}

static int embed_dw(const struct step_ctx *c)
{
    enum { TOKEN, DX, INFO, DW, MASKED, WORK };
    const struct embed *m = c->self;
    struct embed_bwd_args a = {.token = c->t[TOKEN], .dy = c->t[DX], .dw = c->t[DW], .work = c->t[WORK], .acc_dw = c->add[DW]};
    if (c->t[INFO].data != NULL) {
        TRY(apply_dropout(c, m, &c->t[INFO], &c->t[DX], &c->t[MASKED]));
        a.dy = c->t[MASKED];
    }
    return c->ops->embed_bwd(c->lane, &a);
}

static int64_t padded_vocab(const struct config_model *c) { return round_up(c->vocab, c->vocab_multiple); }

struct param embedding_param(const struct build *b)
{
    const struct config_model *c = &b->cfg->model;
    struct param p = param_matrix("embedding.word_embeddings.weight", padded_vocab(c), c->hidden, c->embed_init_std);
    p.shared_ends = b->mesh->pp > 1 && (c->tied || b->n_depths > 0);
    return p;
}

int embed_declare(struct build *b, const char *scope, slot_id token, slot_id *x, slot_id *dx)
{
    const struct config_model *c = &b->cfg->model;
    struct graph *g = b->g;
    struct embed *m = graph_own(g, sizeof *m);
    if (m == NULL)
        return ST_NOMEM;
    bool drops = training(b) && c->dropout > 0;
    char site[64];
    snprintf(site, sizeof site, "dropout.%s", scope);
    *m = (struct embed){.dropout = drops ? c->dropout : 0, .key = rng_key((uint64_t)b->cfg->run.seed, site), .seq = b->seq};
    graph_scope(g, -1, scope);
    b->prefix[0] = '\0';
    struct param p = embedding_param(b);
    struct weight w = build_weight(b, &p);
    slot_id info = drops ? b->in.info : NO_SLOT;
    *x = build_real(b, "e", b->rows, c->hidden);
    *dx = build_grad(b, "de", b->rows, c->hidden);
    double bytes = (double)(b->rows * c->hidden) * (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "embed", LANE_COMPUTE, m);
    GRAPH_PHASE(g, n, PH_FWD, embed_fwd, READS(token), READS(w.w), READS(info), WRITES(*x));
    graph_cost(g, n, PH_FWD, 0, 2 * bytes);
    if (!training(b))
        return g->err.code;
    struct embed_bwd_args a = {.token = tensor_1d(NULL, DT_I32, b->rows), .dy = tensor_2d(NULL, b->dev->real, b->rows, c->hidden),
                               .dw = tensor_2d(NULL, b->dev->wide, padded_vocab(c), c->hidden)};
    slot_id work = b->ops->embed_bwd_work ? build_work(b, "bwd_work", b->ops->embed_bwd_work(&a)) : NO_SLOT;
    slot_id masked = drops ? build_real(b, "masked", b->rows, c->hidden) : NO_SLOT;
    GRAPH_PHASE(g, n, PH_DW, embed_dw, READS(token), READS(*dx), READS(info), ADDS(w.dw), WRITES(masked), WRITES(work));
    graph_cost(g, n, PH_DW, (double)(b->rows * c->hidden), 2 * bytes);
    return g->err.code;
}
