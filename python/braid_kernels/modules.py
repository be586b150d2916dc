"""Modules that take the place of other libraries' mHC.

    replace_transformers(model)     DeepSeek-V4, GLM and others that share their hyper-connections, in transformers
    patch_megatron()                HyperConnectionModule of Megatron-LM

Both change what computes, and neither changes a parameter, its name or its place in a checkpoint. What the kernels cannot do is refused
with the reason, never computed in another way silently."""

import functools
import typing

import torch
from torch import nn

from . import _lib
from .mhc import EPS, join_coef, mhc_boundary, mhc_post, mhc_pre


class HyperConnection(nn.Module):
    """post, comb, collapsed = module(streams [..., n, C]): the interface of transformers' DeepseekV4HyperConnection, with its parameters
    fn, base and scale."""

    def __init__(self, streams, channels, iters=20, eps=EPS, norm_eps=EPS, norm_eps_inside=True, profile="d"):
        super().__init__()
        logits = streams * streams + 2 * streams
        self.hc_mult = streams
        self.rule = dict(iters=iters, eps=eps, norm_eps=norm_eps, norm_eps_inside=norm_eps_inside, profile=profile)
        self.fn = nn.Parameter(torch.empty(logits, streams * channels))
        self.base = nn.Parameter(torch.zeros(logits))
        self.scale = nn.Parameter(torch.full((3,), 0.01))
        nn.init.xavier_uniform_(self.fn)

    def forward(self, streams):
        h, post, comb = mhc_pre(streams, self.fn, self.base, self.scale, **self.rule)
        return post, comb, h


# ---- transformers ----------------------------------------------------------------------------------------------------------------


def _looks_like_hc(m):
    return type(m).__name__.endswith("HyperConnection") and all(hasattr(m, a) for a in ("fn", "base", "scale", "hc_mult", "hc_sinkhorn_iters"))


def _rule_of(m):
    norm = getattr(m, "input_norm", None)
    norm_eps = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None)
    if norm_eps is None:
        raise _lib.BraidUnsupported(f"{type(m).__name__}: its input_norm has no epsilon that is known here")
    if m.hc_eps != EPS:
        raise _lib.BraidUnsupported(f"{type(m).__name__}: hc_eps is {m.hc_eps}, the kernels have {EPS} built in")
    return dict(iters=m.hc_sinkhorn_iters, norm_eps=norm_eps)


def _hc_forward(self, hidden_streams):
    h, post, comb = mhc_pre(hidden_streams, self.fn, self.base, self.scale, **self.braid_rule)
    return post, comb, h


def _set_forward(m, f):
    """As a partial, which can be copied and pickled with its module, unlike a method. accelerate's hooks call _old_forward."""
    setattr(m, "_old_forward" if hasattr(m, "_hf_hook") else "forward", functools.partial(f, m))


def _is_plain_norm(m):
    return type(m).__name__.endswith("RMSNorm") and hasattr(m, "weight") and getattr(m, "bias", None) is None


def _layer_forward(self, hidden_states, input_ids=None, **kwargs):
    """DeepseekV4DecoderLayer: the boundary between attention and MLP is one call."""
    post, comb, collapsed = self.attn_hc(hidden_states)
    attn, _ = self.self_attn(self.input_layernorm(collapsed), **kwargs)
    hc, norm = self.ffn_hc, self.post_attention_layernorm
    rule = dict(hc.braid_rule, root_eps=hc.braid_rule["norm_eps"], norm_eps=norm.variance_epsilon)
    y, h, post, comb = mhc_boundary(hidden_states, attn, post, comb, hc.fn, hc.base, hc.scale, norm.weight, **rule)
    return mhc_post(y, self.mlp(h, input_ids=input_ids), post, comb)


def replace_transformers(model, fuse_layers=True):
    """Every hyper-connection module below model computes with braid's kernels. fuse_layers: layers of DeepSeek-V4 take the boundary between
    their two sublayers in one call, norm included. Returns how many modules and layers were changed."""
    modules = layers = 0
    for m in model.modules():
        if _looks_like_hc(m):
            m.braid_rule = _rule_of(m)
            _set_forward(m, _hc_forward)
            modules += 1
    if modules == 0:
        raise _lib.BraidUnsupported(f"{type(model).__name__} has no hyper-connection modules (fn, base, scale) that are known here")
    for m in model.modules():
        if fuse_layers and type(m).__name__ == "DeepseekV4DecoderLayer" and _is_plain_norm(m.post_attention_layernorm):
            _set_forward(m, _layer_forward)
            layers += 1
    return modules, layers


# ---- Megatron --------------------------------------------------------------------------------------------------------------------


def _megatron_params(m):
    norm = getattr(m, "norm", None)
    if norm is not None and getattr(norm, "weight", None) is not None:
        raise _lib.BraidUnsupported("HyperConnectionModule: this Megatron has a norm with a weight before the projection")
    for name in ("norm_eps", "sinkhorn_eps", "compute_h_eps"):
        if getattr(m, name, EPS) != EPS:
            raise _lib.BraidUnsupported(f"HyperConnectionModule: {name} is {getattr(m, name)}, the kernels have {EPS} built in")
    scale = torch.cat([m.alpha_pre.reshape(1), m.alpha_post.reshape(1), m.alpha_res.reshape(1)])
    return m.mapping_proj.weight, m.bias, scale


def _megatron_profile(m):
    return "d" if hasattr(m, "compute_h_eps") else "s"  # only the form of DeepSeek-V4 adds an epsilon to H_pre


def _returns_residual(forward):
    """Does this forward return (aggregated, h_res, h_post, residual), as in Megatron's development branch?"""
    returned = forward.__annotations__.get("return")
    return len(typing.get_args(returned)) == 4


def _no_manager(manager, slot=None):
    if manager is not None or slot is not None:
        raise _lib.BraidUnsupported("HyperConnectionModule: a recompute manager needs Megatron's own code: use its other forms of recompute")


def patch_megatron(cls=None, profile=None):
    """HyperConnectionModule of Megatron computes with braid's kernels: forward, and fused_h_res_h_post_bda, which closes a sublayer. profile: "d" for
    the form of its development branch (DeepSeek-V4), "s" for that of its main branch, None: as the module is. Returns a function that undoes
    it. Recompute managers of Megatron, and dropout behind a sublayer, are refused."""
    if cls is None:
        try:
            from megatron.core.transformer.hyper_connection import HyperConnectionModule as cls
        except ImportError:
            raise _lib.BraidUnsupported("no HyperConnectionModule in this Megatron: pass the class") from None
    if profile not in (None, "d", "s"):
        raise _lib.BraidValueError(f"patch_megatron: argument profile is {profile!r}, expected 'd', 's' or None")
    before = {name: cls.__dict__.get(name) for name in ("forward", "fused_h_res_h_post_bda")}
    if None in before.values():
        raise _lib.BraidUnsupported(f"{cls.__name__} has no forward or no fused_h_res_h_post_bda of its own: another Megatron than is known here")
    residual_too = _returns_residual(before["forward"])

    def streams_of(self, x):
        s, b, k = x.shape
        return x.reshape(s, b, self.n, k // self.n)

    def forward(self, hidden_states, mhc_recompute_manager=None, output_slot=None):
        _no_manager(mhc_recompute_manager, output_slot)
        fn, base, scale = _megatron_params(self)
        rule = dict(iters=self.sinkhorn_iterations, norm_eps_inside=False, profile=profile or _megatron_profile(self))
        h, post, comb = mhc_pre(streams_of(self, hidden_states), fn, base, scale, **rule)
        return (h, comb, post, hidden_states) if residual_too else (h, comb, post)

    def fused_h_res_h_post_bda(
        self, h_res, original_residual, h_post, layer_output_with_bias, dropout_prob, training, fused, manager=None
    ):
        _no_manager(manager)
        if training and dropout_prob != 0:
            raise _lib.BraidUnsupported(f"HyperConnectionModule: dropout of {dropout_prob} behind a sublayer, which the kernels do not have")
        f, bias = layer_output_with_bias
        y = mhc_post(streams_of(self, original_residual), f, h_post, h_res, bias, profile=profile or _megatron_profile(self))
        return y.reshape(original_residual.shape)

    cls.forward, cls.fused_h_res_h_post_bda = forward, fused_h_res_h_post_bda

    def undo():
        for name, f in before.items():
            setattr(cls, name, f)

    return undo


__all__ = ["HyperConnection", "join_coef", "patch_megatron", "replace_transformers"]
