/* The MLPs of experts, up with its activation and down, as calls of ops/expert and ops/gmm; with the way from tokens to
 * rows of experts and back, by ops/moeplan and ops/permute. */
#include "lib/lib_int.h"

#include "ops/expert/expert.h"
#include "ops/gmm/gmm.h"
#include "ops/moeplan/moeplan.h"
#include "ops/permute/permute.h"

struct sizes {
    int64_t rows, in, f, up, out, experts; /* up: 2f with a gate, else f */
};

static int sizes_of(struct call *c, const struct braidk_act *act, const struct braidk_tensor *x,
                    const struct braidk_tensor *w13, const struct braidk_tensor *w2, struct act_rule *r,
                    struct sizes *s)
{
    TRY(begin(c, "x", x));
    if (act->kind < BRAIDK_SWIGLU || act->kind > BRAIDK_SILU)
        return invalid(c, "argument act.kind is %d, expected %d to %d", (int)act->kind, BRAIDK_SWIGLU, BRAIDK_SILU);
    *r = (struct act_rule){.kind = (enum act_kind)act->kind,
                           .clamp = act->clamp,
                           .alpha = act->alpha,
                           .offset = act->offset,
                           .interleave = act->interleave};
    if (x->rank != 2 || w13->rank != 3 || w2->rank != 3)
        return invalid(c, "argument %s has rank %d, expected %d",
                       x->rank != 2     ? "x"
                       : w13->rank != 3 ? "w13"
                                        : "w2",
                       (int)(x->rank != 2     ? x->rank
                             : w13->rank != 3 ? w13->rank
                                              : w2->rank),
                       x->rank != 2 ? 2 : 3);
    *s = (struct sizes){.rows = x->shape[0],
                        .in = x->shape[1],
                        .f = w2->shape[2],
                        .up = w2->shape[2] * act_gate(r->kind),
                        .out = w2->shape[1],
                        .experts = w2->shape[0]};
    if (act->interleave < 0 || (act->interleave > 0 && (!act_is_gated(r->kind) || s->f % act->interleave != 0)))
        return invalid(c, "argument interleave is %d: expected a divisor of the %lld channels of a gated activation",
                       (int)act->interleave, (long long)s->f);
    const char *slow = expert_not_fused(r);
    if (!on_gpu(c) || !c->describe)
        return ST_OK;
    if (c->gpu.hopper && real_of(c) == DT_BF16 && slow == NULL)
        explain(c, "Hopper kernels with the activation inside");
    else
        explain(c, "separate kernels: %s",
                slow != NULL     ? "the fused ones take swiglu, quick_geglu and relu2, gate and up in halves"
                : !c->gpu.hopper ? "not a Hopper GPU"
                                 : "the fused ones take BF16");
    return ST_OK;
}

int lib_expert_mlp(struct call *c, const struct braidk_expert_mlp_args *a)
{
    struct sizes s;
    struct act_rule rule;
    struct tensor x, w13, w2, offsets, prob = {0}, z, pre;
    TRY(sizes_of(c, &a->act, &a->x, &a->w13, &a->w2, &rule, &s));
    TAKE(c, a, x, real_of(c), s.rows, s.in);
    TAKE(c, a, w13, real_of(c), s.experts, s.up, s.in);
    TAKE(c, a, w2, real_of(c), s.experts, s.out, s.f);
    TAKE(c, a, offsets, DT_I32, s.experts + 1);
    TAKE_OPT(c, a, prob, wide_type(c), s.rows);
    TAKE(c, a, z, real_of(c), s.rows, s.out);
    TAKE(c, a, pre, real_of(c), s.rows, s.up);
    struct tensor y = PART(c, real_of(c), s.rows, s.f);
    struct expert_up_args up = {.x = x, .w = w13, .prob = prob, .offset = offsets, .pre = pre, .y = y, .rule = rule};
    struct gmm_fwd_args down = {.x = y, .w = w2, .offset = offsets, .y = z};
    RUN_PLAIN(c, expert_up, &up);
    RUN_PLAIN(c, gmm_fwd, &down);
    return ST_OK;
}

int lib_expert_mlp_bwd(struct call *c, const struct braidk_expert_mlp_bwd_args *a)
{
    struct sizes s;
    struct act_rule rule;
    struct tensor dz, x, w13, w2, offsets, prob = {0}, pre, dx = {0}, dw13 = {0}, dw2 = {0}, dprob = {0};
    TRY(sizes_of(c, &a->act, &a->x, &a->w13, &a->w2, &rule, &s));
    TAKE(c, a, dz, real_of(c), s.rows, s.out);
    TAKE(c, a, x, real_of(c), s.rows, s.in);
    TAKE(c, a, w13, real_of(c), s.experts, s.up, s.in);
    TAKE(c, a, w2, real_of(c), s.experts, s.out, s.f);
    TAKE(c, a, offsets, DT_I32, s.experts + 1);
    TAKE_OPT(c, a, prob, wide_type(c), s.rows);
    TAKE(c, a, pre, real_of(c), s.rows, s.up);
    TAKE_OPT(c, a, dx, real_of(c), s.rows, s.in);
    TAKE_OPT(c, a, dw13, wide_type(c), s.experts, s.up, s.in);
    TAKE_OPT(c, a, dw2, wide_type(c), s.experts, s.out, s.f);
    if (prob.rank > 0)
        TAKE(c, a, dprob, wide_type(c), s.rows);
    struct tensor y = {0}, dpre = PART(c, real_of(c), s.rows, s.up);
    if (dw2.rank > 0)
        y = PART(c, real_of(c), s.rows, s.f);
    struct expert_down_bwd_args down = {.dz = dz,
                                        .w = w2,
                                        .pre = pre,
                                        .prob = prob,
                                        .offset = offsets,
                                        .dpre = dpre,
                                        .y = y,
                                        .dprob = dprob,
                                        .rule = rule};
    struct gmm_bwd_args second = {.dy = dz, .x = y, .offset = offsets, .dw = dw2};
    struct gmm_bwd_args first = {.dy = dpre, .x = x, .w = w13, .offset = offsets, .dx = dx, .dw = dw13};
    RUN(c, expert_down_bwd, &down);
    if (dw2.rank > 0)
        RUN_PLAIN(c, gmm_bwd, &second);
    if (dx.rank > 0 || dw13.rank > 0)
        RUN_PLAIN(c, gmm_bwd, &first);
    return ST_OK;
}

/* ---- from tokens and back -------------------------------------------------------------------- */

/* Tokens, choices of each, rows of experts. */
struct routes {
    int64_t tokens, k, rows;
};

static int routes_of(struct call *c, const struct braidk_tensor *probs, const struct sizes *s, struct routes *r)
{
    if (probs->rank != 2 || probs->shape[0] != s->rows || probs->shape[1] < 1 || probs->shape[1] > PERMUTE_MAX_K)
        return invalid(c, "argument probs must be [tokens, choices] with %lld tokens and 1 to %d choices",
                       (long long)s->rows, PERMUTE_MAX_K);
    *r = (struct routes){probs->shape[0], probs->shape[1], probs->shape[0] * probs->shape[1]};
    return ST_OK;
}

int lib_moe_mlp(struct call *c, const struct braidk_moe_mlp_args *a)
{
    struct sizes s;
    struct routes n = {0};
    struct act_rule rule;
    struct tensor x, idx, probs, w13, w2, z, offsets, row, src, pre;
    TRY(sizes_of(c, &a->act, &a->x, &a->w13, &a->w2, &rule, &s));
    TRY(routes_of(c, &a->probs, &s, &n));
    TAKE(c, a, x, real_of(c), n.tokens, s.in);
    TAKE(c, a, idx, DT_I32, n.tokens, n.k);
    TAKE(c, a, probs, wide_type(c), n.tokens, n.k);
    TAKE(c, a, w13, real_of(c), s.experts, s.up, s.in);
    TAKE(c, a, w2, real_of(c), s.experts, s.out, s.f);
    TAKE(c, a, z, real_of(c), n.tokens, s.out);
    TAKE(c, a, offsets, DT_I32, s.experts + 1);
    TAKE(c, a, row, DT_I32, n.tokens, n.k);
    TAKE(c, a, src, DT_I32, n.rows);
    TAKE(c, a, pre, real_of(c), n.rows, s.up);
    struct tensor xs = PART(c, real_of(c), n.rows, s.in), prob = PART(c, wide_type(c), n.rows),
                  y = PART(c, real_of(c), n.rows, s.f), zs = PART(c, real_of(c), n.rows, s.out);
    struct moeplan_args plan = {.idx = idx, .offset = offsets, .row = row, .src = src};
    struct permute_args sort = {.x = x, .src = src, .row = row, .prob = probs, .y = xs, .yprob = prob, .k = n.k};
    struct expert_up_args up = {.x = xs, .w = w13, .prob = prob, .offset = offsets, .pre = pre, .y = y, .rule = rule};
    struct gmm_fwd_args down = {.x = y, .w = w2, .offset = offsets, .y = zs};
    struct unpermute_args back = {.x = zs, .row = row, .y = z};
    RUN(c, moeplan, &plan);
    RUN_PLAIN(c, permute, &sort);
    RUN_PLAIN(c, expert_up, &up);
    RUN_PLAIN(c, gmm_fwd, &down);
    RUN_PLAIN(c, unpermute, &back);
    return ST_OK;
}

int lib_moe_mlp_bwd(struct call *c, const struct braidk_moe_mlp_bwd_args *a)
{
    struct sizes s;
    struct routes n = {0};
    struct act_rule rule;
    struct tensor dz, x, probs, w13, w2, offsets, row, src, pre, dx, dprobs, dw13, dw2;
    TRY(sizes_of(c, &a->act, &a->x, &a->w13, &a->w2, &rule, &s));
    TRY(routes_of(c, &a->probs, &s, &n));
    TAKE(c, a, dz, real_of(c), n.tokens, s.out);
    TAKE(c, a, x, real_of(c), n.tokens, s.in);
    TAKE(c, a, probs, wide_type(c), n.tokens, n.k);
    TAKE(c, a, w13, real_of(c), s.experts, s.up, s.in);
    TAKE(c, a, w2, real_of(c), s.experts, s.out, s.f);
    TAKE(c, a, offsets, DT_I32, s.experts + 1);
    TAKE(c, a, row, DT_I32, n.tokens, n.k);
    TAKE(c, a, src, DT_I32, n.rows);
    TAKE(c, a, pre, real_of(c), n.rows, s.up);
    TAKE(c, a, dx, real_of(c), n.tokens, s.in);
    TAKE(c, a, dprobs, wide_type(c), n.tokens, n.k);
    TAKE(c, a, dw13, wide_type(c), s.experts, s.up, s.in);
    TAKE(c, a, dw2, wide_type(c), s.experts, s.out, s.f);
    struct tensor xs = PART(c, real_of(c), n.rows, s.in), prob = PART(c, wide_type(c), n.rows),
                  dprob = PART(c, wide_type(c), n.rows), y = PART(c, real_of(c), n.rows, s.f),
                  dzs = PART(c, real_of(c), n.rows, s.out), dpre = PART(c, real_of(c), n.rows, s.up),
                  dxs = PART(c, real_of(c), n.rows, s.in);
    struct permute_args again = {.x = x, .src = src, .row = row, .prob = probs, .y = xs, .yprob = prob, .k = n.k};
    struct permute_args sort = {.x = dz, .src = src, .row = row, .y = dzs, .k = n.k};
    struct expert_down_bwd_args down = {.dz = dzs,
                                        .w = w2,
                                        .pre = pre,
                                        .prob = prob,
                                        .offset = offsets,
                                        .dpre = dpre,
                                        .y = y,
                                        .dprob = dprob,
                                        .rule = rule};
    struct gmm_bwd_args second = {.dy = dzs, .x = y, .offset = offsets, .dw = dw2};
    struct gmm_bwd_args first = {.dy = dpre, .x = xs, .w = w13, .offset = offsets, .dx = dxs, .dw = dw13};
    struct unpermute_args back = {.x = dxs, .row = row, .xprob = dprob, .y = dx, .yprob = dprobs};
    RUN_PLAIN(c, permute, &sort);
    RUN_PLAIN(c, permute, &again);
    RUN(c, expert_down_bwd, &down);
    RUN_PLAIN(c, gmm_bwd, &second);
    RUN_PLAIN(c, gmm_bwd, &first);
    RUN_PLAIN(c, unpermute, &back);
    return ST_OK;
}
