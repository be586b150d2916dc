"""Scans over a sequence: ssd (the core of Mamba-2) and the gated delta rule, with [batch, seq, heads, channels]."""

import torch

from . import _lib
from ._call import CALLERS, cast, dense, integers, need_rank, need_shape, wide_of
from ._register import define


def _maybe(t):
    return None if t is None else t.shape


def _chunks(seq, chunk):
    return (seq + chunk - 1) // chunk


# ---- ssd -------------------------------------------------------------------------------------------------------------------------


def _ssd_outputs(x, B, chunk):
    b, s, h, p = x.shape
    return x.new_empty(x.shape), x.new_empty([b, _chunks(s, chunk), h, B.shape[3], p])


def _ssd(x, dt, A_log, dt_bias, D, B, C, doc_start, chunk):
    ins = [dense(t) for t in (x, dt, A_log, dt_bias, D, B, C, doc_start)]
    outs = _ssd_outputs(x, B, chunk)
    CALLERS["ssd"](ins[0], (*ins, *outs), tuple(_maybe(t) for t in (*ins, *outs)), (chunk,))
    return outs


def _ssd_fake(x, dt, A_log, dt_bias, D, B, C, doc_start, chunk):
    return _ssd_outputs(x, B, chunk)


def _ssd_bwd(dy, x, dt, A_log, dt_bias, D, B, C, doc_start, states, chunk):
    ins = [dense(t) for t in (dy, x, dt, A_log, dt_bias, D, B, C, doc_start, states)]
    outs = _ssd_bwd_fake(*ins, chunk)
    given = [*outs[:4], None if D is None else outs[4], *outs[5:]]
    CALLERS["ssd_bwd"](ins[1], (*ins, *given), tuple(_maybe(t) for t in (*ins, *given)), (chunk,))
    return outs


def _ssd_bwd_fake(dy, x, dt, A_log, dt_bias, D, B, C, doc_start, states, chunk):
    def like(t):
        return t.new_empty(t.shape)

    return like(x), like(dt), like(A_log), like(dt_bias), A_log.new_empty([0]) if D is None else like(D), like(B), like(C)


_SSD = "Tensor x, Tensor dt, Tensor A_log, Tensor dt_bias, Tensor? D, Tensor B, Tensor C, Tensor? doc_start"
ssd_op = define("ssd", f"({_SSD}, int chunk) -> (Tensor, Tensor)", _ssd, _ssd_fake)
ssd_bwd_op = define(
    "ssd_bwd",
    f"(Tensor dy, {_SSD}, Tensor states, int chunk) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _ssd_bwd,
    _ssd_bwd_fake,
)


def _ssd_setup(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:8], output[1])
    ctx.chunk = inputs[8]


def _ssd_backward(ctx, dy, dstates):
    x, dt, A_log, dt_bias, D, B, C, doc_start, states = ctx.saved_tensors
    dx, ddt, dA, dbias, dD, dB, dC = ssd_bwd_op(dy, x, dt, A_log, dt_bias, D, B, C, doc_start, states, ctx.chunk)
    return dx, ddt, dA, dbias, dD if D is not None else None, dB, dC, None, None


ssd_op.differentiate(_ssd_setup, _ssd_backward)


def _doc_start(seq_idx):
    """Where the text of each position begins, from numbers that change where a text begins."""
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    places = torch.arange(seq_idx.shape[1], device=seq_idx.device, dtype=torch.int32).expand_as(begins)
    return torch.where(begins, places, torch.zeros_like(places)).cummax(dim=1).values.to(torch.int32)


def ssd(x, dt, A, B, C, chunk_size=128, *, D=None, dt_bias=None, seq_idx=None, dt_softplus=True):
    """y [b, s, h, p] of Mamba-2's scan; names as mamba_ssm's mamba_chunk_scan_combined. x [b, s, h, p], dt [b, s, h], A [h] (negative), B
    and C [b, s, g, n], D and dt_bias [h], seq_idx int [b, s]: the state is dropped where it changes. delta = softplus(dt + dt_bias)."""
    if not dt_softplus:
        raise _lib.BraidValueError("ssd: argument dt_softplus is False: the kernels apply softplus to dt")
    if D is not None and D.dim() != 1:
        raise _lib.BraidValueError(f"ssd: argument D has shape {tuple(D.shape)}, expected [heads]")
    need_rank("ssd", ("x", x, 4), ("B", B, 4), ("C", C, 4))
    need_shape("ssd", "A", A, x.shape[2])
    wide, real = wide_of(x.dtype), x.dtype
    A_log = torch.log(-cast("ssd", "A", A, wide))
    dt_bias = torch.zeros_like(A_log) if dt_bias is None else cast("ssd", "dt_bias", dt_bias, wide)
    D = cast("ssd", "D", D, wide)
    doc_start = None
    if seq_idx is not None:
        need_shape("ssd", "seq_idx", seq_idx, *x.shape[:2])
        doc_start = _doc_start(integers("ssd", "seq_idx", seq_idx))
    dt, B, C = cast("ssd", "dt", dt, real), cast("ssd", "B", B, real), cast("ssd", "C", C, real)
    return ssd_op(x, dt, A_log, dt_bias, D, B, C, doc_start, chunk_size)[0]


# ---- gated delta rule ------------------------------------------------------------------------------------------------------------


def _gdn_outputs(q, v, chunk):
    b, s, _, dk = q.shape
    return v.new_empty(v.shape), v.new_empty([b, _chunks(s, chunk), v.shape[2], dk, v.shape[3]])


def _gdn(q, k, v, alpha, beta, A_log, dt_bias, doc_start, chunk):
    ins = [dense(t) for t in (q, k, v, alpha, beta, A_log, dt_bias, doc_start)]
    outs = _gdn_outputs(q, v, chunk)
    CALLERS["gated_delta_rule"](ins[0], (*ins, *outs), tuple(_maybe(t) for t in (*ins, *outs)), (chunk,))
    return outs


def _gdn_fake(q, k, v, alpha, beta, A_log, dt_bias, doc_start, chunk):
    return _gdn_outputs(q, v, chunk)


def _gdn_bwd(d_o, q, k, v, alpha, beta, A_log, dt_bias, doc_start, states, chunk):
    ins = [dense(t) for t in (d_o, q, k, v, alpha, beta, A_log, dt_bias, doc_start, states)]
    outs = _gdn_bwd_fake(*ins, chunk)
    CALLERS["gated_delta_rule_bwd"](ins[1], (*ins, *outs), tuple(_maybe(t) for t in (*ins, *outs)), (chunk,))
    return outs


def _gdn_bwd_fake(d_o, q, k, v, alpha, beta, A_log, dt_bias, doc_start, states, chunk):
    return tuple(t.new_empty(t.shape) for t in (q, k, v, alpha, beta, A_log, dt_bias))


_GDN = "Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, Tensor A_log, Tensor dt_bias, Tensor? doc_start"
gdn_op = define("gated_delta_rule", f"({_GDN}, int chunk) -> (Tensor, Tensor)", _gdn, _gdn_fake)
gdn_bwd_op = define(
    "gated_delta_rule_bwd",
    f"(Tensor d_o, {_GDN}, Tensor states, int chunk) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gdn_bwd,
    _gdn_bwd_fake,
)


def _gdn_setup(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:8], output[1])
    ctx.chunk = inputs[8]


def _gdn_backward(ctx, d_o, dstates):
    *ins, states = ctx.saved_tensors
    return (*gdn_bwd_op(d_o, *ins, states, ctx.chunk), None, None)


gdn_op.differentiate(_gdn_setup, _gdn_backward)


def gated_delta_rule(
    q, k, v, g, beta, scale=None, cu_seqlens=None, *, A_log=None, dt_bias=None, chunk_size=64, use_qk_l2norm_in_kernel=True
):
    """o [b, s, hv, dv]; names as fla's chunk_gated_delta_rule. q, k [b, s, hk, dk], v [b, s, hv, dv], g and beta [b, s, hv].

    With A_log [hv] (and dt_bias [hv]) g and beta are the projections of the layer, and the kernels make decay and step of them: g' =
    -exp(A_log) softplus(g + dt_bias), beta' = sigmoid(beta). That is the exact and fast form. Without A_log they are the logarithm of the
    decay (< 0) and the step (0 to 1) themselves, which are inverted first and rounded to the type of q. cu_seqlens int [texts + 1]: batch 1,
    texts one behind the other. q and k are normalised inside."""
    if not use_qk_l2norm_in_kernel:
        raise _lib.BraidValueError("gated_delta_rule: argument use_qk_l2norm_in_kernel is False: the kernels normalise q and k")
    op, wide = "gated_delta_rule", wide_of(q.dtype)
    need_rank(op, ("q", q, 4), ("k", k, 4), ("v", v, 4))
    need_shape(op, "g", g, *v.shape[:3])
    need_shape(op, "beta", beta, *v.shape[:3])
    if A_log is None:
        if dt_bias is not None:
            raise _lib.BraidValueError("gated_delta_rule: argument dt_bias is given, but A_log is not")
        g = torch.log(torch.expm1(-cast(op, "g", g, wide)))
        beta = torch.logit(cast(op, "beta", beta, wide))
        A_log = torch.zeros(v.shape[2], dtype=wide, device=q.device)
    A_log = cast(op, "A_log", A_log, wide)
    dt_bias = torch.zeros_like(A_log) if dt_bias is None else cast(op, "dt_bias", dt_bias, wide)
    doc_start = None
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise _lib.BraidValueError(f"gated_delta_rule: argument cu_seqlens needs a batch of 1, q has {q.shape[0]}")
        need_rank(op, ("cu_seqlens", cu_seqlens, 1))
        cu_seqlens = integers(op, "cu_seqlens", cu_seqlens)
        places = torch.arange(q.shape[1], device=q.device, dtype=cu_seqlens.dtype)
        number = torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True)
        doc_start = cu_seqlens[number.clamp_max(cu_seqlens.shape[0] - 1)].unsqueeze(0)
    o = gdn_op(q, k, v, cast(op, "g", g, q.dtype), cast(op, "beta", beta, q.dtype), A_log, dt_bias, doc_start, chunk_size)[0]
    return o if scale is None else o * (scale * q.shape[3] ** 0.5)
