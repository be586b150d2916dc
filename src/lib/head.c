/* The router of a mixture of experts, and the loss of a language model, as calls of ops/router and ops/xent. */
#include "lib/lib_int.h"

#include "ops/router/router.h"
#include "ops/xent/xent.h"

#include <math.h>

/* A router has wide tensors only: its real type is the type of the logits. */
static int router_rule_of(struct call *c, const struct braidk_router *r, const struct braidk_tensor *logits,
                          struct router_rule *out)
{
    TRY(begin(c, "logits", logits));
    if (real_of(c) == DT_BF16)
        return invalid(c, "argument logits is BF16, expected F32");
    if (logits->rank != 2)
        return invalid(c, "argument logits has rank %d, expected 2", (int)logits->rank);
    if (r->score < BRAIDK_SOFTMAX || r->score > BRAIDK_SQRTSOFTPLUS)
        return invalid(c, "argument score is %d, expected %d to %d", (int)r->score, BRAIDK_SOFTMAX,
                       BRAIDK_SQRTSOFTPLUS);
    if (!isfinite(r->scale))
        return invalid(c, "argument scale is not a number");
    *out = (struct router_rule){.score = (enum router_score)r->score,
                                .pre_softmax = r->pre_softmax != 0,
                                .norm = r->norm != 0,
                                .groups = r->groups,
                                .group_topk = r->group_topk,
                                .scale = r->scale != 0 ? r->scale : 1,
                                .seq = max_i64(logits->shape[0], 1)};
    return ST_OK;
}

int lib_router_topk(struct call *c, const struct braidk_router_topk_args *a)
{
    struct router_rule rule;
    struct tensor logits, bias = {0}, probs, idx;
    TRY(router_rule_of(c, &a->router, &a->logits, &rule));
    int64_t rows = a->logits.shape[0], experts = a->logits.shape[1];
    TAKE(c, a, logits, wide_type(c), rows, experts);
    TAKE_OPT(c, a, bias, wide_type(c), experts);
    TAKE(c, a, probs, wide_type(c), rows, -1);
    TAKE(c, a, idx, DT_I32, rows, probs.dim[1]);
    struct router_fwd_args f = {.logits = logits, .bias = bias, .probs = probs, .idx = idx, .rule = rule};
    RUN(c, router_fwd, &f);
    return ST_OK;
}

int lib_router_topk_bwd(struct call *c, const struct braidk_router_topk_bwd_args *a)
{
    struct router_rule rule;
    struct tensor dprobs, logits, idx, dlogits;
    TRY(router_rule_of(c, &a->router, &a->logits, &rule));
    int64_t rows = a->logits.shape[0], experts = a->logits.shape[1];
    TAKE(c, a, logits, wide_type(c), rows, experts);
    TAKE(c, a, dprobs, wide_type(c), rows, -1);
    TAKE(c, a, idx, DT_I32, rows, dprobs.dim[1]);
    TAKE(c, a, dlogits, real_of(c), rows, experts);
    struct router_bwd_args b = {.dprobs = dprobs, .logits = logits, .idx = idx, .dlogits = dlogits, .rule = rule};
    RUN_PLAIN(c, router_bwd, &b);
    return ST_OK;
}

int lib_cross_entropy(struct call *c, const struct braidk_cross_entropy_args *a)
{
    struct tensor h, w, label, scale = {0}, loss, dh = {0}, dw = {0};
    TRY(begin(c, "h", &a->h));
    TAKE(c, a, h, real_of(c), -1, -1);
    TAKE(c, a, w, real_of(c), -1, h.dim[1]);
    TAKE(c, a, label, DT_I32, h.dim[0]);
    TAKE(c, a, loss, DT_F64, 2);
    TAKE_OPT(c, a, dh, real_of(c), h.dim[0], h.dim[1]);
    TAKE_OPT(c, a, dw, wide_type(c), w.dim[0], h.dim[1]);
    if (dh.rank == 0 && dw.rank > 0)
        return invalid(c, "argument dw is given, but dh is not");
    if (dh.rank > 0)
        TAKE(c, a, scale, DT_F64, 1);
    c->products = true;
    struct xent_args x = {.h = h, .w = w, .label = label, .scale = scale, .loss = loss, .dh = dh, .dw = dw};
    RUN(c, xent, &x);
    return ST_OK;
}
