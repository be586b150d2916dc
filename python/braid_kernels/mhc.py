"""Manifold-constrained hyper-connections (mHC): functions for [..., n, C] streams.

    h, post, comb    = mhc_pre(x, fn, base, scale, norm_weight)          input of a sublayer
    y                = mhc_post(x, f, post, comb)                        its output back into the streams
    y, h, post, comb = mhc_boundary(x, f, post, comb, fn, base, scale, norm_weight)     both, between two sublayers: the fast one

x [..., n, C]; f, h [..., C]; post [..., n]; comb [..., n, n]; fn [n^2 + 2n, n C], base [n^2 + 2n], scale [3], norm_weight [C]. Parameters
have the names, order and meaning that DeepSeek-V4 has in transformers. Activations are bf16 or fp32 (fp64 on the CPU), parameters and
coefficients fp32 (fp64). With norm_weight h is normalised; without it h is the plain weighted sum.

The functions that end in _coef keep post and comb in one tensor coef [..., n^2 + 2n] (pre, post, comb): a chain of boundaries then copies
nothing between two of them. split_coef takes it apart.
"""

import torch

from . import _lib
from ._call import CALLERS, cast, dense, need_shape, never_repeat, under_autocast, wide_of
from ._register import define

EPS = 1e-6  # the epsilon of gates and Sinkhorn, which the kernels have built in
_PROFILES = {"d": 0, "s": 1}


def _sizes(x):
    """rows, n, C, K, N of streams [..., n, C]."""
    n, c = x.shape[-2], x.shape[-1]
    rows = 1
    for d in x.shape[:-2]:
        rows = rows * d
    return rows, n, c, n * c, n * n + 2 * n


def _options(n, iters, profile, norm, root_eps, norm_eps):
    return (n, iters, profile, 1 if norm else 0, root_eps, norm_eps)


def _maybe(t, shape):
    return None if t is None else shape


def _check_streams(op, x, f=None, **coefs):
    """x, and that the others have the same leading dimensions: rows that only agree in number are a mistake. By the functions that run first
    for tensors of new shapes, so that it costs nothing later."""
    if x.dim() < 3:
        raise _lib.BraidValueError(f"{op}: argument x has shape {tuple(x.shape)}, expected [..., streams, channels]")
    n, lead = x.shape[-2], x.shape[:-2]
    if f is not None:
        need_shape(op, "f", f, *lead, x.shape[-1])
    for name, t in coefs.items():
        need_shape(op, name, t, *lead, n * n + 2 * n)


# ---- pre -------------------------------------------------------------------------------------------------------------------------


def _pre(x, fn, base, scale, norm_weight, iters, profile, root_eps, norm_eps):
    _check_streams("mhc_pre", x)
    rows, n, c, k, logits = _sizes(x)
    lead, wide = list(x.shape[:-2]), wide_of(x.dtype)
    x, fn, base, scale, norm_weight = dense(x), dense(fn), dense(base), dense(scale), dense(norm_weight)
    h = x.new_empty(lead + [c])
    coef = x.new_empty(lead + [logits], dtype=wide)
    if norm_weight is None:  # the last column is not written
        stat = x.new_zeros([rows, logits + 2], dtype=wide)
        never_repeat()
    else:
        stat = x.new_empty([rows, logits + 2], dtype=wide)
    CALLERS["mhc_pre"](
        x,
        (x, fn, base, scale, norm_weight, h, coef, stat),
        ((rows, k), fn.shape, base.shape, scale.shape, norm_weight if norm_weight is None else norm_weight.shape)
        + ((rows, c), (rows, logits), (rows, logits + 2)),
        _options(n, iters, profile, norm_weight is not None, root_eps, norm_eps),
    )
    return h, coef, stat


def _pre_fake(x, fn, base, scale, norm_weight, iters, profile, root_eps, norm_eps):
    rows, n, c, k, logits = _sizes(x)
    lead, wide = list(x.shape[:-2]), wide_of(x.dtype)
    return (
        x.new_empty(lead + [c]),
        x.new_empty(lead + [logits], dtype=wide),
        x.new_empty([rows, logits + 2], dtype=wide),
    )


def _grads_of_params(x, fn, norm_weight):
    """Room for gradients of fn, base, scale and norm_weight; what is absent is empty."""
    logits, wide = fn.shape[0], fn.dtype
    return (
        fn.new_empty(fn.shape),
        fn.new_empty([logits]),
        fn.new_empty([3]),
        fn.new_empty([0 if norm_weight is None else norm_weight.shape[0]], dtype=wide),
    )


def _pre_bwd(dh, dcoef, x, fn, base, scale, norm_weight, coef, stat, iters, profile, root_eps, norm_eps):
    rows, n, c, k, logits = _sizes(x)
    dh, dcoef, x, fn, base, scale = dense(dh), dense(dcoef), dense(x), dense(fn), dense(base), dense(scale)
    norm_weight = dense(norm_weight)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dfn, dbase, dscale, dnorm = _grads_of_params(x, fn, norm_weight)
    thin = (rows, logits)
    CALLERS["mhc_pre_bwd"](
        x,
        (dh, dcoef, x, fn, base, scale, norm_weight, coef, stat, dx, dfn, dbase, dscale, dnorm if norm_weight is not None else None),
        ((rows, c), _maybe(dcoef, thin), (rows, k), fn.shape, base.shape, scale.shape, _maybe(norm_weight, (c,)))
        + (thin, (rows, logits + 2), (rows, k), fn.shape, (logits,), (3,), _maybe(norm_weight, (c,))),
        _options(n, iters, profile, norm_weight is not None, root_eps, norm_eps),
    )
    return dx, dfn, dbase, dscale, dnorm


def _pre_bwd_fake(dh, dcoef, x, fn, base, scale, norm_weight, coef, stat, iters, profile, root_eps, norm_eps):
    return (torch.empty_like(x, memory_format=torch.contiguous_format), *_grads_of_params(x, fn, norm_weight))


_PARAMS = "Tensor fn, Tensor base, Tensor scale, Tensor? norm_weight"
_RULE = "int iters, int profile, float root_eps, float norm_eps"
pre_op = define("mhc_pre", f"(Tensor x, {_PARAMS}, {_RULE}) -> (Tensor, Tensor, Tensor)", _pre, _pre_fake)
pre_bwd_op = define(
    "mhc_pre_bwd",
    f"(Tensor dh, Tensor? dcoef, Tensor x, {_PARAMS}, Tensor coef, Tensor stat, {_RULE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _pre_bwd,
    _pre_bwd_fake,
)


def _zeros_if_none(grad, like):
    return torch.zeros_like(like) if grad is None else grad


def _pre_setup(ctx, inputs, output):
    x, fn, base, scale, norm_weight = inputs[:5]
    h, coef, stat = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stat)
    ctx.save_for_backward(x, fn, base, scale, norm_weight, coef, stat)
    ctx.rule = inputs[5:]
    ctx.h_like = (h.shape, h.dtype)


def _pre_backward(ctx, dh, dcoef, dstat):
    x, fn, base, scale, norm_weight, coef, stat = ctx.saved_tensors
    if dh is None:
        dh = x.new_zeros(ctx.h_like[0])
    dx, dfn, dbase, dscale, dnorm = pre_bwd_op(dh, dcoef, x, fn, base, scale, norm_weight, coef, stat, *ctx.rule)
    return dx, dfn, dbase, dscale, dnorm if norm_weight is not None else None, None, None, None, None


pre_op.differentiate(_pre_setup, _pre_backward)

# ---- post ------------------------------------------------------------------------------------------------------------------------


def _post(x, f, coef, bias, profile):
    _check_streams("mhc_post", x, f, coef=coef)
    rows, n, c, k, logits = _sizes(x)
    x, f, coef, bias = dense(x), dense(f), dense(coef), dense(bias)
    y = torch.empty_like(x)
    CALLERS["mhc_post"](
        x,
        (x, f, coef, bias, y),
        ((rows, k), (rows, c), (rows, logits), bias if bias is None else bias.shape, (rows, k)),
        _options(n, 1, profile, False, 0.0, 0.0),
    )
    return y


def _post_fake(x, f, coef, bias, profile):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _post_grads(x, f, coef, bias):
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(f, memory_format=torch.contiguous_format),
        torch.empty_like(coef, memory_format=torch.contiguous_format),
        coef.new_empty([0 if bias is None else bias.shape[0]]),
    )


def _post_bwd(dy, x, f, coef, bias, profile):
    rows, n, c, k, logits = _sizes(x)
    dy, x, f, coef, bias = dense(dy), dense(x), dense(f), dense(coef), dense(bias)
    dx, df, dcoef, dbias = _post_grads(x, f, coef, bias)
    streams, one, thin, vector = (rows, k), (rows, c), (rows, logits), _maybe(bias, (c,))
    CALLERS["mhc_post_bwd"](
        x,
        (dy, x, f, coef, bias, dx, df, dcoef, None if bias is None else dbias),
        (streams, streams, one, thin, vector, streams, one, thin, vector),
        _options(n, 1, profile, False, 0.0, 0.0),
    )
    return dx, df, dcoef, dbias


def _post_bwd_fake(dy, x, f, coef, bias, profile):
    return _post_grads(x, f, coef, bias)


post_op = define("mhc_post", "(Tensor x, Tensor f, Tensor coef, Tensor? bias, int profile) -> Tensor", _post, _post_fake)
post_bwd_op = define(
    "mhc_post_bwd",
    "(Tensor dy, Tensor x, Tensor f, Tensor coef, Tensor? bias, int profile) -> (Tensor, Tensor, Tensor, Tensor)",
    _post_bwd,
    _post_bwd_fake,
)


def _post_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.profile = inputs[4]


def _post_backward(ctx, dy):
    x, f, coef, bias = ctx.saved_tensors
    dx, df, dcoef, dbias = post_bwd_op(dy, x, f, coef, bias, ctx.profile)
    return dx, df, dcoef, dbias if bias is not None else None, None


post_op.differentiate(_post_setup, _post_backward)

# ---- boundary --------------------------------------------------------------------------------------------------------------------


def _boundary(x, f, coef_in, bias, fn, base, scale, norm_weight, iters, profile, root_eps, norm_eps):
    _check_streams("mhc_boundary", x, f, coef=coef_in)
    rows, n, c, k, logits = _sizes(x)
    wide = wide_of(x.dtype)
    x, f, coef_in, bias = dense(x), dense(f), dense(coef_in), dense(bias)
    fn, base, scale, norm_weight = dense(fn), dense(base), dense(scale), dense(norm_weight)
    y, h, coef = torch.empty_like(x), torch.empty_like(f), torch.empty_like(coef_in)
    stat = x.new_empty([rows, logits + 2], dtype=wide)
    CALLERS["mhc_boundary"](
        x,
        (x, f, coef_in, bias, fn, base, scale, norm_weight, y, h, coef, stat),
        ((rows, k), (rows, c), (rows, logits), bias if bias is None else bias.shape)
        + (fn.shape, base.shape, scale.shape, norm_weight.shape, (rows, k), (rows, c), (rows, logits), (rows, logits + 2)),
        _options(n, iters, profile, True, root_eps, norm_eps),
    )
    return y, h, coef, stat


def _boundary_fake(x, f, coef_in, bias, fn, base, scale, norm_weight, iters, profile, root_eps, norm_eps):
    rows, n, c, k, logits = _sizes(x)
    likes = tuple([torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, f, coef_in)])
    return (*likes, x.new_empty([rows, logits + 2], dtype=wide_of(x.dtype)))


def _boundary_bwd(dy, dh, dcoef, x, f, coef_in, bias, fn, base, scale, norm_weight, y, coef, stat, iters, profile, root_eps, norm_eps):
    rows, n, c, k, logits = _sizes(x)
    dy, dh, dcoef, x, f, coef_in, bias = dense(dy), dense(dh), dense(dcoef), dense(x), dense(f), dense(coef_in), dense(bias)
    fn, base, scale, norm_weight = dense(fn), dense(base), dense(scale), dense(norm_weight)
    dx, df, dcoef_in, dbias = _post_grads(x, f, coef_in, bias)
    dfn, dbase, dscale, dnorm = _grads_of_params(x, fn, norm_weight)
    streams, one, thin, vector = (rows, k), (rows, c), (rows, logits), _maybe(bias, (c,))
    CALLERS["mhc_boundary_bwd"](
        x,
        (dy, dh, dcoef, x, f, coef_in, bias, fn, base, scale, norm_weight, y, coef, stat)
        + (dx, df, dcoef_in, None if bias is None else dbias, dfn, dbase, dscale, dnorm),
        (_maybe(dy, streams), one, _maybe(dcoef, thin), streams, one, thin, vector, fn.shape, base.shape, scale.shape, (c,))
        + (streams, thin, (rows, logits + 2), streams, one, thin, vector, fn.shape, (logits,), (3,), (c,)),
        _options(n, iters, profile, True, root_eps, norm_eps),
    )
    return dx, df, dcoef_in, dbias, dfn, dbase, dscale, dnorm


def _boundary_bwd_fake(dy, dh, dcoef, x, f, coef_in, bias, fn, base, scale, norm_weight, y, coef, stat, iters, profile, root_eps, norm_eps):
    return _post_grads(x, f, coef_in, bias) + _grads_of_params(x, fn, norm_weight)


_PARAMS_NORM = "Tensor fn, Tensor base, Tensor scale, Tensor norm_weight"
boundary_op = define(
    "mhc_boundary",
    f"(Tensor x, Tensor f, Tensor coef_in, Tensor? bias, {_PARAMS_NORM}, {_RULE}) -> (Tensor, Tensor, Tensor, Tensor)",
    _boundary,
    _boundary_fake,
)
boundary_bwd_op = define(
    "mhc_boundary_bwd",
    f"(Tensor? dy, Tensor dh, Tensor? dcoef, Tensor x, Tensor f, Tensor coef_in, Tensor? bias, {_PARAMS_NORM}, Tensor y, Tensor coef, "
    f"Tensor stat, {_RULE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _boundary_bwd,
    _boundary_bwd_fake,
)


def _boundary_setup(ctx, inputs, output):
    x, f, coef_in, bias, fn, base, scale, norm_weight = inputs[:8]
    y, h, coef, stat = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stat)
    ctx.save_for_backward(x, f, coef_in, bias, fn, base, scale, norm_weight, y, coef, stat)
    ctx.rule = inputs[8:]


def _boundary_backward(ctx, dy, dh, dcoef, dstat):
    x, f, coef_in, bias, fn, base, scale, norm_weight, y, coef, stat = ctx.saved_tensors
    if dh is None:
        dh = torch.zeros_like(f)
    grads = boundary_bwd_op(dy, dh, dcoef, x, f, coef_in, bias, fn, base, scale, norm_weight, y, coef, stat, *ctx.rule)
    dx, df, dcoef_in, dbias, dfn, dbase, dscale, dnorm = grads
    return dx, df, dcoef_in, dbias if bias is not None else None, dfn, dbase, dscale, dnorm, None, None, None, None


boundary_op.differentiate(_boundary_setup, _boundary_backward)

# ---- functions -------------------------------------------------------------------------------------------------------------------


def _rule(iters, eps, norm_eps, norm_eps_inside, profile, root_eps):
    if eps != EPS:
        raise _lib.BraidValueError(f"argument eps is {eps}: the kernels have {EPS} built in")
    if profile not in _PROFILES:
        raise _lib.BraidValueError(f"argument profile is {profile!r}, expected 'd' (DeepSeek-V4) or 's' (first Megatron form)")
    if root_eps is None:
        root_eps = norm_eps if norm_eps_inside else EPS
    if not norm_eps_inside and root_eps != EPS:
        raise _lib.BraidValueError(f"argument root_eps is {root_eps}: outside the root the kernels have {EPS} built in")
    return iters, _PROFILES[profile], float(root_eps) if norm_eps_inside else 0.0, float(norm_eps)


def _wide(op, x, **tensors):
    wide = wide_of(x.dtype)
    return [t if t is None or t.dtype == wide else cast(op, name, t, wide) for name, t in tensors.items()]


def split_coef(coef, n):
    """pre [..., n], post [..., n], comb [..., n, n] of coefficients [..., n^2 + 2n]: views."""
    pre, post, comb = coef.split([n, n, n * n], dim=-1)
    return pre, post, comb.unflatten(-1, (n, n))


def join_coef(post, comb):
    """Coefficients as mhc_post and mhc_boundary read them: their part for pre is not used, and is zero."""
    need_shape("join_coef", "comb", comb, *post.shape, *post.shape[-1:])
    flat = comb.flatten(-2)
    return torch.cat([torch.zeros_like(post), post, flat], dim=-1)


def _join(op, x, post, comb):
    need_shape(op, "post", post, *x.shape[:-1])
    need_shape(op, "comb", comb, *x.shape[:-1], x.shape[-2])
    wide = wide_of(x.dtype)
    return join_coef(cast(op, "post", post, wide), cast(op, "comb", comb, wide))


def mhc_pre_coef(
    x, fn, base, scale, norm_weight=None, *, iters=20, eps=EPS, norm_eps=EPS, norm_eps_inside=True, profile="d", root_eps=None
):
    """h, coef. A gradient through the part of coef for pre counts where norm_weight is given, and is ignored else."""
    x = under_autocast(x)
    fn, base, scale, norm_weight = _wide("mhc_pre", x, fn=fn, base=base, scale=scale, norm_weight=norm_weight)
    h, coef, _ = pre_op(x, fn, base, scale, norm_weight, *_rule(iters, eps, norm_eps, norm_eps_inside, profile, root_eps))
    return h, coef


def mhc_pre(x, fn, base, scale, norm_weight=None, **rule):
    """h [..., C], post [..., n], comb [..., n, n] of the streams x [..., n, C].

    iters: Sinkhorn iterations. eps: of gates and Sinkhorn, 1e-6. norm_eps: of the norm of h. norm_eps_inside: the projection is divided by
    sqrt(mean x^2 + root_eps), as DeepSeek-V4 and GLM are loaded by transformers (root_eps: norm_eps unless given); False: by
    sqrt(mean x^2) + 1e-6, as Megatron has it. profile: "d" (DeepSeek-V4) or "s" (first Megatron form).
    """
    h, coef = mhc_pre_coef(x, fn, base, scale, norm_weight, **rule)
    _, post, comb = split_coef(coef, x.shape[-2])
    return h, post, comb


def mhc_post_coef(x, f, coef, bias=None, *, profile="d"):
    if profile not in _PROFILES:
        raise _lib.BraidValueError(f"argument profile is {profile!r}, expected 'd' or 's'")
    x = under_autocast(x)
    coef, bias = _wide("mhc_post", x, coef=coef, bias=bias)
    return post_op(x, cast("mhc_post", "f", f, x.dtype), coef, bias, _PROFILES[profile])


def mhc_post(x, f, post, comb, bias=None, *, profile="d"):
    """y_i = post_i (f + bias) + sum_j comb[j][i] x_j (profile "s": comb[i][j])."""
    return mhc_post_coef(x, f, _join("mhc_post", x, post, comb), bias, profile=profile)


def mhc_boundary_coef(
    x, f, coef, fn, base, scale, norm_weight, bias=None, *, iters=20, eps=EPS, norm_eps=EPS, norm_eps_inside=True, profile="d", root_eps=None
):
    """y, h, coef of the next sublayer, from x, f and coef of the one before."""
    x = under_autocast(x)
    f = cast("mhc_boundary", "f", f, x.dtype)
    rule = _rule(iters, eps, norm_eps, norm_eps_inside, profile, root_eps)
    wides = _wide("mhc_boundary", x, coef=coef, bias=bias, fn=fn, base=base, scale=scale, norm_weight=norm_weight)
    coef, bias, fn, base, scale, norm_weight = wides
    if norm_weight is None:
        y = post_op(x, f, coef, bias, rule[1])
        h, coef, _ = pre_op(y, fn, base, scale, None, *rule)
        return y, h, coef
    y, h, coef, _ = boundary_op(x, f, coef, bias, fn, base, scale, norm_weight, *rule)
    return y, h, coef


def mhc_boundary(x, f, post, comb, fn, base, scale, norm_weight=None, bias=None, **rule):
    """y = mhc_post(x, f, post, comb, bias), then h, post, comb = mhc_pre(y, ...): returns y, h, post, comb."""
    y, h, coef = mhc_boundary_coef(x, f, _join("mhc_boundary", x, post, comb), fn, base, scale, norm_weight, bias, **rule)
    _, post, comb = split_coef(coef, x.shape[-2])
    return y, h, post, comb


def mhc_supported(x, op="mhc_boundary", profile="d", iters=20):
    """A sentence: which kernels run op (mhc_boundary or mhc_boundary_bwd) for streams like x, and why."""
    rows, n, c, k, logits = _sizes(x)
    real, wide = x.dtype, wide_of(x.dtype)
    shapes = {"x": (rows, k), "y": (rows, k), "dx": (rows, k), "dy": (rows, k), "f": (rows, c), "h": (rows, c), "df": (rows, c), "dh": (rows, c)}
    wides = {"fn": (logits, k), "base": (logits,), "scale": (3,), "norm_weight": (c,), "stat": (rows, logits + 2)}
    metas = []
    for name in _lib.OPS[op][0].split():
        if name in shapes:
            metas.append((shapes[name], real))
        elif "bias" in name:
            metas.append(None)
        else:
            key = name[1:] if name[1:] in wides else name
            metas.append((wides.get(key, (rows, logits)), wide))
    return CALLERS[op].supported(x.get_device(), metas, _options(n, iters, _PROFILES[profile], True, EPS, EPS))
