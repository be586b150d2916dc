/* The embedding: e[t] = W[token[t]], where positions are learned + P[pos[t]]; x = dropout(e), the same slot unless the
 * residual stream is wider than the layers. Its backward is weight gradients only. */
#include "layers/shard.h"
#include "ops/addnorm/addnorm.h"
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

/* The trained vector of each position. A prediction depth reads it on the last stage, too. */
static int declare_positions(struct build *b, struct weight *w)
{
    const struct config_model *c = &b->cfg->model;
    int64_t needed = b->mode == BUILD_DECODE ? b->cache_len : b->whole_seq;
    *w = no_weight();
    if (c->position != CFG_POSITION_LEARNED)
        return ST_OK;
    if (needed > c->max_position) {
        err_set(&b->g->err, ST_USAGE,
                "a sequence of %lld tokens needs more than the %lld positions that the model has learned",
                (long long)needed, (long long)c->max_position);
        return err_hint(&b->g->err, "prompt and generate.tokens, or train.seq, may have %lld tokens together",
                        (long long)c->max_position);
    }
    struct param p =
        param_matrix("embedding.position_embeddings.weight", c->max_position, c->hidden, c->embed_init_std);
    p.shared_ends = b->mesh->pp > 1 && b->n_depths > 0;
    param_replicate(&p, GRAD_OVER_TOKENS);
    *w = build_weight(b, &p);
    return b->g->err.code;
}

/* Tensor-parallel ranks divide the vocabulary: each looks up the tokens it has rows for; their sum, in which
 * every token has its row once, is scattered. Returns this rank's rows; their gradient goes to *de. */
static slot_id declare_lookup(struct build *b, slot_id token, const struct weight *w, slot_id *de)
{
    struct graph *g = b->g;
    int64_t d = b->cfg->model.hidden, all = all_rows(b), part = padded_vocab(&b->cfg->model) / b->mesh->tp,
            first = b->mesh->tp_rank * part;
    double bytes = (double)(all * d) * (double)dtype_bytes(b->dev->real);
    slot_id e_all = build_real(b, "e_all", all, d), de_all = build_grad(b, "de_all", all, d);
    slot_id e = build_real(b, "e", b->rows, d);
    *de = build_grad(b, "de", b->rows, d);
    int n = graph_node(g, "embed", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, embed_fwd, .token = of(g, token), .w = of(g, w->w), .y = of(g, e_all), .first = first,
             .part = true);
    graph_cost(g, n, PH_FWD, 0, 2 * bytes);
    if (training(b)) {
        GRAPH_OP(g, n, PH_DW, embed_bwd, .token = of(g, token), .dy = of(g, de_all), .dw = of(g, w->dw), .first = first,
                 .part = true);
        graph_cost(g, n, PH_DW, (double)(all * d), 2 * bytes);
    }
    shard_scatter(b, "scattered", e_all, e, *de, de_all);
    return e;
}

/* What follows the lookup on this rank's rows: positions, dropout, the stream's type. */
static int declare_divided(struct build *b, slot_id token, slot_id pos, const struct weight *w,
                           const struct weight *positions, const struct dropout_rule *rule, bool widens, slot_id *x,
                           slot_id *dx)
{
    struct graph *g = b->g;
    int64_t d = b->cfg->model.hidden;
    bool learned = positions->w != NO_SLOT;
    slot_id de, e = declare_lookup(b, token, w, &de);
    *x = e;
    *dx = de;
    if (rule->p == 0 && !widens && !learned)
        return g->err.code;
    *x = widens ? build_stream(b, "stream", b->rows, d) : build_real(b, "x", b->rows, d);
    *dx = widens ? build_stream_grad(b, "dstream", b->rows, d) : build_grad(b, "dx", b->rows, d);
    slot_id sum = learned ? build_real(b, "sum", b->rows, d) : e;
    double bytes = 3 * (double)(b->rows * d) * (double)dtype_bytes(b->dev->real);
    int n = graph_node(g, "enter", LANE_COMPUTE, NULL);
    if (learned) {
        slot_id of_pos = build_real(b, "position", b->rows, d);
        GRAPH_OP(g, n, PH_FWD, embed_fwd, .token = shard_rows(b, of(g, pos)), .w = of(g, positions->w),
                 .y = of(g, of_pos));
        GRAPH_OP(g, n, PH_FWD, addnorm_fwd, .x = of(g, e), .f = of(g, of_pos), .s = of(g, sum));
    }
    GRAPH_OP(g, n, PH_FWD, dropout, .x = of(g, sum), .y = of(g, *x), .rule = *rule);
    graph_cost(g, n, PH_FWD, 0, bytes);
    if (!training(b))
        return g->err.code;
    GRAPH_OP(g, n, PH_BWD, dropout, .x = of(g, *dx), .y = of(g, de), .rule = *rule);
    graph_cost(g, n, PH_BWD, 0, bytes);
    if (learned) {
        GRAPH_OP(g, n, PH_DW, embed_bwd, .token = shard_rows(b, of(g, pos)), .dy = of(g, de),
                 .dw = of(g, positions->dw));
        graph_cost(g, n, PH_DW, 0, bytes);
    }
    return g->err.code;
}

int embed_declare(struct build *b, const char *scope, enum embed_use use, slot_id token, slot_id pos, slot_id *x,
                  slot_id *dx)
{
    const struct config_model *c = &b->cfg->model;
    struct graph *g = b->g;
    bool drops = training(b) && c->dropout > 0, widens = use == EMBED_STREAM && wide_stream(b),
         passes = drops || widens;
    char site[64];
    snprintf(site, sizeof site, "dropout.%s", scope);
    graph_scope(g, -1, scope);
    b->prefix[0] = '\0';
    struct param p = embedding_param(b);
    struct weight w = build_weight(b, &p), positions;
    TRY(declare_positions(b, &positions));
    struct dropout_rule rule = {.p = c->dropout,
                                .key = rng_key((uint64_t)b->cfg->run.seed, site),
                                .seq = b->seq,
                                .first = shard_first_row(b),
                                .info = of(g, b->in.info)};
    if (!drops)
        rule = (struct dropout_rule){0};
    if (b->mesh->tp > 1)
        return declare_divided(b, token, pos, &w, &positions, &rule, widens, x, dx);
    slot_id e = build_real(b, "e", b->rows, c->hidden);
    *x = widens ? build_stream(b, "stream", b->rows, c->hidden) : e;
    *dx = widens ? build_stream_grad(b, "de", b->rows, c->hidden) : build_grad(b, "de", b->rows, c->hidden);
    double elems = (double)(b->rows * c->hidden), bytes = elems * (double)dtype_bytes(b->dev->real);
    double passing = widens ? bytes + elems * (double)dtype_bytes(b->dev->wide) : 0;
    int n = graph_node(g, "embed", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, embed_fwd, .token = of(g, token), .w = of(g, w.w), .y = of(g, e));
    if (positions.w != NO_SLOT) {
        slot_id of_pos = build_real(b, "position", b->rows, c->hidden);
        GRAPH_OP(g, n, PH_FWD, embed_fwd, .token = of(g, pos), .w = of(g, positions.w), .y = of(g, of_pos));
        GRAPH_OP(g, n, PH_FWD, addnorm_fwd, .x = of(g, e), .f = of(g, of_pos), .s = of(g, e));
    }
    if (passes)
        GRAPH_OP(g, n, PH_FWD, dropout, .x = of(g, e), .y = of(g, *x), .rule = rule);
    graph_cost(g, n, PH_FWD, 0, 2 * bytes + passing);
    if (!training(b))
        return g->err.code;
    slot_id masked = passes ? build_real(b, "masked", b->rows, c->hidden) : *dx;
    if (passes)
        GRAPH_OP(g, n, PH_DW, dropout, .x = of(g, *dx), .y = of(g, masked), .rule = rule);
    GRAPH_OP(g, n, PH_DW, embed_bwd, .token = of(g, token), .dy = of(g, masked), .dw = of(g, w.dw));
    if (positions.w != NO_SLOT)
        GRAPH_OP(g, n, PH_DW, embed_bwd, .token = of(g, pos), .dy = of(g, masked), .dw = of(g, positions.dw));
    graph_cost(g, n, PH_DW, elems, 2 * bytes + passing);
    return g->err.code;
}
