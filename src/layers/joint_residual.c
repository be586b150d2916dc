/* The plain residual joint: s = x + dropout(f), h = norm(s); one fused pass (ops/addnorm) for RMSNorm, two for
 * LayerNorm.
 *
 *   stream  [rows, hidden]  s; the first joint has nothing to add and passes the embedding on
 *   h       [rows, hidden]  normed input of the next core; rstd [rows]
 * backward: dx = ds + norm_backward(dh): the gradient of the stream has this one owner. df equals dx
 * without dropout, and then is the same slot.
 * With model.fp32_residual x, s, dx and ds are fp32 beside layers of bf16: what a layer adds to the stream is not
 * rounded to the few bits of a bf16. Then df, which a layer reads, is a slot of its own. */
#include "layers/shard.h"
#include "ops/addnorm/addnorm.h"
#include "ops/dropout/dropout.h"

static bool drops_out(const struct build *b) { return training(b) && b->cfg->model.dropout > 0; }

/* Dropout of the sublayer that this joint closes; without it info is absent and p 0. */
static struct dropout_rule drop_rule(const struct build *b, bool closes)
{
    if (!closes || !drops_out(b))
        return (struct dropout_rule){0};
    char site[64];
    snprintf(site, sizeof site, "dropout.joint.%d", b->layer);
    return (struct dropout_rule){.p = b->cfg->model.dropout,
                                 .key = rng_key((uint64_t)b->cfg->run.seed, site),
                                 .seq = b->seq,
                                 .first = shard_first_row(b),
                                 .info = of(b->g, b->in.info)};
}

/* Elements of the stream, and bytes of so many in its type and in the layers'. */
struct sizes {
    double elems, stream, layer;
};
static struct sizes sizes_of(const struct build *b, int64_t d)
{
    double elems = (double)(b->rows * d), layer = elems * (double)dtype_bytes(b->dev->real);
    return (struct sizes){
        .elems = elems, .layer = layer, .stream = wide_stream(b) ? elems * (double)dtype_bytes(b->dev->wide) : layer};
}

static int residual_declare(struct build *b, const struct sublayer *prev, struct sublayer *next, const char *norm_key,
                            bool last)
{
    struct graph *g = b->g;
    bool closes = prev->f != NO_SLOT, drops = drops_out(b);
    graph_scope(g, b->layer, "joint");

    int64_t d = b->cfg->model.hidden;
    struct norm norm = norm_weights(b, norm_key, d);
    slot_id s = closes ? build_stream(b, "stream", b->rows, d) : NO_SLOT;
    norm_statistics(b, &norm, "", b->rows);
    struct dropout_rule drop = drop_rule(b, closes);
    next->x = closes ? s : prev->x;
    next->h = build_real(b, "norm", b->rows, d);
    next->dh = build_grad(b, "dnorm", b->rows, d);
    next->dx = last ? NO_SLOT : build_stream_grad(b, "dstream", b->rows, d);
    next->df = last ? NO_SLOT : drops || wide_stream(b) ? build_grad(b, "df", b->rows, d) : next->dx;
    next->f = NO_SLOT;

    struct sizes size = sizes_of(b, d);
    int n = graph_node(g, "joint", LANE_COMPUTE, NULL);
    if (!norm.layer)
        GRAPH_OP(g, n, PH_FWD, addnorm_fwd, .x = of(g, prev->x), .f = of(g, prev->f), .w = of(g, norm.w.w),
                 .s = of(g, s), .y = of(g, next->h), .rstd = of(g, norm.rstd), .eps = norm.eps,
                 .zero_centered = norm.zero_centered, .drop = drop);
    else if (closes)
        GRAPH_OP(g, n, PH_FWD, addnorm_fwd, .x = of(g, prev->x), .f = of(g, prev->f), .s = of(g, s), .drop = drop);
    if (norm.layer)
        norm_forward(g, n, PH_FWD, &norm, of(g, next->x), of(g, next->h));
    else if (!wide_stream(b))
        declare_norm_source(
            b, (struct known_norm){
                   .h = next->h, .x = next->x, .rstd = norm.rstd, .w = norm.w.w, .zero_centered = norm.zero_centered});
    graph_cost(g, n, PH_FWD, 5 * size.elems, (closes ? 2 : 1) * (size.stream + size.layer));
    if (!training(b))
        return g->err.code;
    /* The norm alone, from the stream that was kept. */
    if (norm.layer)
        norm_forward(g, n, PH_REPLAY, &norm, of(g, next->x), of(g, next->h));
    else
        GRAPH_OP(g, n, PH_REPLAY, addnorm_fwd, .x = of(g, next->x), .w = of(g, norm.w.w), .y = of(g, next->h),
                 .rstd = of(g, norm.rstd), .eps = norm.eps, .zero_centered = norm.zero_centered);
    graph_cost(g, n, PH_REPLAY, 4 * size.elems, size.stream + size.layer);
    graph_replay(g, next->h, n);
    slot_id df = closes && prev->df != prev->dx ? prev->df : NO_SLOT;
    if (!norm.layer)
        GRAPH_OP(g, n, PH_BWD, addnorm_bwd, .dy = of(g, next->dh), .ds = of(g, next->dx), .s = of(g, next->x),
                 .w = of(g, norm.w.w), .rstd = of(g, norm.rstd), .dx = of(g, prev->dx), .df = of(g, df),
                 .dw = of(g, norm.w.dw), .zero_centered = norm.zero_centered, .drop = drop);
    else
        norm_backward(g, n, &norm, of(g, next->dh), of(g, next->x), of(g, next->dx), of(g, prev->dx));
    if (norm.layer && df != NO_SLOT)
        GRAPH_OP(g, n, PH_BWD, addnorm_bwd, .ds = of(g, prev->dx), .dx = of(g, prev->dx), .df = of(g, df),
                 .drop = drop);
    graph_inplace(g, n, PH_BWD, next->dx, prev->dx); /* the gradient that came in becomes the one that goes out */
    graph_cost(g, n, PH_BWD, 11 * size.elems, 3 * size.stream + (wide_stream(b) ? 2 : 1) * size.layer);
    return g->err.code;
}

static int residual_close(struct build *b, const struct sublayer *prev, struct sublayer *next)
{
    struct graph *g = b->g;
    int64_t d = b->cfg->model.hidden;
    *next = *prev;
    if (prev->f == NO_SLOT)
        return ST_OK;
    graph_scope(g, b->layer, "joint");
    struct dropout_rule drop = drop_rule(b, true);
    *next = sublayer_entry(build_stream(b, "stream", b->rows, d), build_stream_grad(b, "dstream", b->rows, d), false);
    struct sizes size = sizes_of(b, d);
    int n = graph_node(g, "close", LANE_COMPUTE, NULL);
    GRAPH_OP(g, n, PH_FWD, addnorm_fwd, .x = of(g, prev->x), .f = of(g, prev->f), .s = of(g, next->x), .drop = drop);
    graph_inplace(g, n, PH_FWD, prev->x, next->x); /* where no backward step reads it */
    graph_cost(g, n, PH_FWD, size.elems, 2 * size.stream + size.layer);
    if (!training(b))
        return g->err.code;
    GRAPH_OP(g, n, PH_BWD, addnorm_bwd, .ds = of(g, next->dx), .dx = of(g, prev->dx),
             .df = of(g, prev->df != prev->dx ? prev->df : NO_SLOT), .drop = drop);
    graph_inplace(g, n, PH_BWD, next->dx, prev->dx);
    graph_cost(g, n, PH_BWD, size.elems, 2 * size.stream + (wide_stream(b) ? size.layer : 0));
    return g->err.code;
}

static void residual_arrive(struct build *b, struct sublayer *entry)
{
    int64_t d = b->cfg->model.hidden;
    *entry = sublayer_entry(build_stream(b, "stream", b->rows, d), build_stream_grad(b, "dstream", b->rows, d), false);
}

static void residual_kernels(const struct kernel_report *r)
{
    if (r->dev->kind == DEV_CUDA && r->cfg->model.fp32_residual)
        kernel_line(r, "residual stream", "fp32",
                    r->dev->real == DT_F32 ? NULL : "model.fp32_residual; layers read and write bf16");
}

const struct joint_kind joint_residual = {
    .name = "residual",
    .kernels = residual_kernels,
    .recompute = {{"layernorm", {"norm"}}},
    .declare = residual_declare,
    .close = residual_close,
    .arrive = residual_arrive,
};
