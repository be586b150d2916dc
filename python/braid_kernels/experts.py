"""The MLPs of a mixture of experts, and its router.

    z = expert_mlp(x, w13, w2, offsets, prob)          (prob * swiglu(x w13_e^T)) w2_e^T for the rows of each expert
    z = moe_mlp(x, idx, probs, w13, w2)                the same from tokens and back: sorting by expert and adding up are inside
    probs, idx = router_topk(logits, k)

x [R, in]; w13 [E, 2f, in] (gate rows, then up rows), w2 [E, out, f]; rows of expert e are [offsets[e], offsets[e + 1]): offsets int32
[E + 1] on the device, offsets[0] = 0. Rows past offsets[E] become 0. offsets_of_ends makes them of cumulative ends as torch's grouped_mm
takes them. prob [R] fp32, optional.

w13 and w2 may be fp32 while x is bf16: they are rounded inside, and their gradients are the fp32 sums themselves.
"""

import torch

from . import _lib
from ._call import CALLERS, cast, dense, integers, need_rank, under_autocast, wide_of
from ._register import define

_ACTS = {"swiglu": 0, "geglu": 1, "quick_geglu": 2, "gelu": 3, "quick_gelu": 4, "relu2": 5, "silu": 6}
_GATED = ("swiglu", "geglu", "quick_geglu")
_SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}


def _maybe(t, shape):
    return None if t is None else shape


def _narrow(op, x, name, w):
    """w in the type of x, a tensor of its own; empty where w has that type already."""
    return w.new_empty([0], dtype=x.dtype) if w.dtype == x.dtype else cast(op, name, w, x.dtype)


def _expert(x, w13, w2, offsets, prob, act, interleave, clamp, alpha, offset):
    x, w13, w2, offsets, prob = dense(x), dense(w13), dense(w2), dense(offsets), dense(prob)
    low13, low2 = _narrow("expert_mlp", x, "w13", w13), _narrow("expert_mlp", x, "w2", w2)
    by13, by2 = low13 if low13.numel() else w13, low2 if low2.numel() else w2
    z = x.new_empty([x.shape[0], w2.shape[1]])
    pre = x.new_empty([x.shape[0], w13.shape[1]])
    CALLERS["expert_mlp"](
        x,
        (x, by13, by2, offsets, prob, z, pre),
        (x.shape, w13.shape, w2.shape, offsets.shape, prob if prob is None else prob.shape, z.shape, pre.shape),
        (act, interleave, clamp, alpha, offset),
    )
    return z, pre, low13, low2


def _expert_fake(x, w13, w2, offsets, prob, act, interleave, clamp, alpha, offset):
    return (
        x.new_empty([x.shape[0], w2.shape[1]]),
        x.new_empty([x.shape[0], w13.shape[1]]),
        w13.new_empty([0] if w13.dtype == x.dtype else w13.shape, dtype=x.dtype),
        w2.new_empty([0] if w2.dtype == x.dtype else w2.shape, dtype=x.dtype),
    )


def _expert_bwd(dz, x, w13, w2, offsets, prob, pre, act, interleave, clamp, alpha, offset):
    dz, x, w13, w2, offsets, prob = dense(dz), dense(x), dense(w13), dense(w2), dense(offsets), dense(prob)
    dx, dw13, dw2, dprob = _expert_bwd_fake(dz, x, w13, w2, offsets, prob, pre, act, interleave, clamp, alpha, offset)
    rows = _maybe(prob, (x.shape[0],))
    CALLERS["expert_mlp_bwd"](
        x,
        (dz, x, w13, w2, offsets, prob, pre, dx, dw13, dw2, None if prob is None else dprob),
        (dz.shape, x.shape, w13.shape, w2.shape, offsets.shape, rows, pre.shape, x.shape, w13.shape, w2.shape, rows),
        (act, interleave, clamp, alpha, offset),
    )
    return dx, dw13, dw2, dprob


def _expert_bwd_fake(dz, x, w13, w2, offsets, prob, pre, act, interleave, clamp, alpha, offset):
    wide = wide_of(x.dtype)
    return (
        x.new_empty(x.shape),
        w13.new_empty(w13.shape, dtype=wide),
        w2.new_empty(w2.shape, dtype=wide),
        x.new_empty([0 if prob is None else x.shape[0]], dtype=wide),
    )


_ACT = "int act, int interleave, float clamp, float alpha, float offset"
_INPUTS = "Tensor x, Tensor w13, Tensor w2, Tensor offsets, Tensor? prob"
expert_op = define("expert_mlp", f"({_INPUTS}, {_ACT}) -> (Tensor, Tensor, Tensor, Tensor)", _expert, _expert_fake)
expert_bwd_op = define(
    "expert_mlp_bwd", f"(Tensor dz, {_INPUTS}, Tensor pre, {_ACT}) -> (Tensor, Tensor, Tensor, Tensor)", _expert_bwd, _expert_bwd_fake
)


def _expert_setup(ctx, inputs, output):
    x, w13, w2, offsets, prob = inputs[:5]
    z, pre, low13, low2 = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(pre, low13, low2)
    ctx.types = (w13.dtype, w2.dtype)
    ctx.save_for_backward(x, low13 if w13.dtype != x.dtype else w13, low2 if w2.dtype != x.dtype else w2, offsets, prob, pre)
    ctx.act = inputs[5:]


def _expert_backward(ctx, dz, *unused):
    x, w13, w2, offsets, prob, pre = ctx.saved_tensors
    none = (None,) * 5
    if dz is None:
        return (None,) * 5 + none
    dx, dw13, dw2, dprob = expert_bwd_op(dz, x, w13, w2, offsets, prob, pre, *ctx.act)
    return (dx, dw13.to(ctx.types[0]), dw2.to(ctx.types[1]), None, dprob if prob is not None else None, *none)


expert_op.differentiate(_expert_setup, _expert_backward)


def offsets_of_ends(ends):
    """Offsets [E + 1] of cumulative ends [E], as torch.nn.functional.grouped_mm takes them."""
    return torch.nn.functional.pad(integers("offsets_of_ends", "ends", ends), (1, 0))


def _act_of(op, act, interleave, clamp, alpha, offset):
    """The numbers of an activation. What one does not know is refused."""
    if act not in _ACTS:
        raise _lib.BraidValueError(f"{op}: argument act is {act!r}, expected one of {', '.join(_ACTS)}")
    quick = act.startswith("quick")
    if alpha is not None and not quick:
        raise _lib.BraidValueError(f"{op}: argument alpha is {alpha}, which {act} does not have")
    if offset != 0 and act not in _GATED:
        raise _lib.BraidValueError(f"{op}: argument offset is {offset}, which {act} does not have")
    return _ACTS[act], interleave, float(clamp), (1.702 if alpha is None else float(alpha)) if quick else 0.0, float(offset)


def expert_mlp(x, w13, w2, offsets, prob=None, *, act="swiglu", glu_interleave=0, clamp=0.0, alpha=None, offset=0.0):
    """act: swiglu, geglu, quick_geglu, gelu, quick_gelu, relu2, silu; quick: x sigmoid(alpha x), alpha 1.702 unless given. glu_interleave: gate
    and up rows of w13 alternate in blocks of so many (0: two halves). clamp: bound of gate and up, 0: none. offset: added to up."""
    op = "expert_mlp"
    numbers = _act_of(op, act, glu_interleave, clamp, alpha, offset)
    need_rank(op, ("x", x, 2), ("w13", w13, 3), ("w2", w2, 3))
    x, offsets, prob = under_autocast(x), integers(op, "offsets", offsets), cast(op, "prob", prob, wide_of(x.dtype))
    return expert_op(x, w13, w2, offsets, prob, *numbers)[0]


# ---- from tokens and back --------------------------------------------------------------------------------------------------------


def _moe_outputs(x, idx, w13, w2):
    t, k = idx.shape
    return (
        x.new_empty([t, w2.shape[1]]),
        idx.new_empty([w2.shape[0] + 1]),
        idx.new_empty([t, k]),
        idx.new_empty([t * k]),
        x.new_empty([t * k, w13.shape[1]]),
    )


def _moe(x, idx, probs, w13, w2, act, interleave, clamp, alpha, offset):
    x, idx, probs, w13, w2 = dense(x), dense(idx), dense(probs), dense(w13), dense(w2)
    low13, low2 = _narrow("moe_mlp", x, "w13", w13), _narrow("moe_mlp", x, "w2", w2)
    outs = _moe_outputs(x, idx, w13, w2)
    ins = (x, idx, probs, low13 if low13.numel() else w13, low2 if low2.numel() else w2)
    CALLERS["moe_mlp"](x, ins + outs, tuple([t.shape for t in ins + outs]), (act, interleave, clamp, alpha, offset))
    return (*outs, low13, low2)


def _moe_fake(x, idx, probs, w13, w2, act, interleave, clamp, alpha, offset):
    return (
        *_moe_outputs(x, idx, w13, w2),
        w13.new_empty([0] if w13.dtype == x.dtype else w13.shape, dtype=x.dtype),
        w2.new_empty([0] if w2.dtype == x.dtype else w2.shape, dtype=x.dtype),
    )


def _moe_bwd(dz, x, probs, w13, w2, offsets, row, src, pre, act, interleave, clamp, alpha, offset):
    ins = tuple([dense(t) for t in (dz, x, probs, w13, w2, offsets, row, src, pre)])
    outs = _moe_bwd_fake(*ins, act, interleave, clamp, alpha, offset)
    CALLERS["moe_mlp_bwd"](x, ins + outs, tuple([t.shape for t in ins + outs]), (act, interleave, clamp, alpha, offset))
    return outs


def _moe_bwd_fake(dz, x, probs, w13, w2, offsets, row, src, pre, act, interleave, clamp, alpha, offset):
    wide = wide_of(x.dtype)
    return x.new_empty(x.shape), probs.new_empty(probs.shape), w13.new_empty(w13.shape, dtype=wide), w2.new_empty(w2.shape, dtype=wide)


moe_op = define(
    "moe_mlp",
    f"(Tensor x, Tensor idx, Tensor probs, Tensor w13, Tensor w2, {_ACT}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _moe,
    _moe_fake,
)
moe_bwd_op = define(
    "moe_mlp_bwd",
    f"(Tensor dz, Tensor x, Tensor probs, Tensor w13, Tensor w2, Tensor offsets, Tensor row, Tensor src, Tensor pre, {_ACT}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _moe_bwd,
    _moe_bwd_fake,
)


def _moe_setup(ctx, inputs, output):
    x, idx, probs, w13, w2 = inputs[:5]
    z, offsets, row, src, pre, low13, low2 = output
    ctx.mark_non_differentiable(offsets, row, src, pre, low13, low2)
    ctx.set_materialize_grads(False)
    ctx.types = (w13.dtype, w2.dtype)
    ctx.save_for_backward(x, probs, low13 if w13.dtype != x.dtype else w13, low2 if w2.dtype != x.dtype else w2, offsets, row, src, pre)
    ctx.act = inputs[5:]


def _moe_backward(ctx, dz, *unused):
    if dz is None:
        return (None,) * 10
    dx, dprobs, dw13, dw2 = moe_bwd_op(dz, *ctx.saved_tensors, *ctx.act)
    return (dx, None, dprobs, dw13.to(ctx.types[0]), dw2.to(ctx.types[1])) + (None,) * 5


moe_op.differentiate(_moe_setup, _moe_backward)


def moe_mlp(x, idx, probs, w13, w2, *, act="swiglu", glu_interleave=0, clamp=0.0, alpha=None, offset=0.0):
    """z [T, out]: the sum over the k experts idx [T, k] of each token of x [T, in], weighted by probs [T, k]; negative idx: dropped. Tokens are
    sorted by expert inside. Weights and activations as in expert_mlp."""
    op = "moe_mlp"
    numbers = _act_of(op, act, glu_interleave, clamp, alpha, offset)
    need_rank(op, ("x", x, 2), ("idx", idx, 2), ("w13", w13, 3), ("w2", w2, 3))
    x, idx, probs = under_autocast(x), integers(op, "idx", idx), cast(op, "probs", probs, wide_of(x.dtype))
    return moe_op(x, idx, probs, w13, w2, *numbers)[0]


# ---- router ----------------------------------------------------------------------------------------------------------------------


def _router(logits, bias, k, score, pre_softmax, norm, groups, group_topk, scale):
    logits, bias = dense(logits), dense(bias)
    probs = logits.new_empty([logits.shape[0], k])
    idx = logits.new_empty([logits.shape[0], k], dtype=torch.int32)
    CALLERS["router_topk"](
        logits,
        (logits, bias, probs, idx),
        (logits.shape, bias if bias is None else bias.shape, probs.shape, idx.shape),
        (score, int(pre_softmax), int(norm), groups, group_topk, scale),
    )
    return probs, idx


def _router_fake(logits, bias, k, score, pre_softmax, norm, groups, group_topk, scale):
    return logits.new_empty([logits.shape[0], k]), logits.new_empty([logits.shape[0], k], dtype=torch.int32)


def _router_bwd(dprobs, logits, idx, score, pre_softmax, norm, groups, group_topk, scale):
    dprobs, logits = dense(dprobs), dense(logits)
    dlogits = torch.empty_like(logits)
    CALLERS["router_topk_bwd"](
        logits,
        (dprobs, logits, idx, dlogits),
        (dprobs.shape, logits.shape, idx.shape, logits.shape),
        (score, int(pre_softmax), int(norm), groups, group_topk, scale),
    )
    return dlogits


def _router_bwd_fake(dprobs, logits, idx, score, pre_softmax, norm, groups, group_topk, scale):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_RULE = "int score, bool pre_softmax, bool norm, int groups, int group_topk, float scale"
router_op = define("router_topk", f"(Tensor logits, Tensor? bias, int k, {_RULE}) -> (Tensor, Tensor)", _router, _router_fake)
router_bwd_op = define("router_topk_bwd", f"(Tensor dprobs, Tensor logits, Tensor idx, {_RULE}) -> Tensor", _router_bwd, _router_bwd_fake)


def _router_setup(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], output[1])
    ctx.rule = inputs[3:]


def _router_backward(ctx, dprobs, didx):
    logits, idx = ctx.saved_tensors
    return (router_bwd_op(dprobs, logits, idx, *ctx.rule),) + (None,) * 8


router_op.differentiate(_router_setup, _router_backward)


def router_topk(logits, k, *, score="softmax", pre_softmax=False, norm=None, bias=None, groups=0, group_topk=0, scale=1.0):
    """probs [T, k] fp32 and idx [T, k] int32 of the k best experts of each token. softmax: over the k chosen logits, with pre_softmax over
    all, not normalised again. sigmoid, sqrtsoftplus: normalised over the chosen unless norm is False. bias [E] changes the choice only. groups, group_topk: experts of the best
    groups only."""
    if score not in _SCORES:
        raise _lib.BraidValueError(f"router_topk: argument score is {score!r}, expected one of {', '.join(_SCORES)}")
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1]:
        raise _lib.BraidValueError(f"router_topk: argument k is {k} for logits of shape {tuple(logits.shape)}")
    if score == "softmax" and norm is not None:
        raise _lib.BraidValueError("router_topk: argument norm is for sigmoid and sqrtsoftplus; softmax over the chosen sums to 1")
    if score != "softmax" and pre_softmax:
        raise _lib.BraidValueError(f"router_topk: argument pre_softmax is given for {score}")
    norm = norm is not False
    logits = cast("router_topk", "logits", logits, wide_of(logits.dtype))
    bias = None if bias is None else cast("router_topk", "bias", bias.detach(), logits.dtype)
    return router_op(logits, bias, k, _SCORES[score], pre_softmax, norm, groups, group_topk, float(scale))
