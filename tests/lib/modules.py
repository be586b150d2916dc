"""Tests of braid_kernels.modules on the CPU: each module against the one whose place it takes. Lines "ok ..." and "not ok ..."."""

import copy
import io
import math
import os
import sys
import traceback
from typing import Tuple

import torch
from torch import nn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))
import braid_kernels as bk  # noqa: E402
from braid_kernels import modules  # noqa: E402

N, C = 4, 32


def near(have, want, what, tolerance=1e-4):
    error = (have.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12)
    assert error <= tolerance, f"{what}: relative error {error:.1e}"


def same_gradients(have, want, inputs, what):
    ups = [torch.randn_like(o) for o in want]
    a = torch.autograd.grad(have, inputs, ups, allow_unused=True)
    b = torch.autograd.grad(want, inputs, ups, allow_unused=True)
    for i, (x, y) in enumerate(zip(a, b)):
        assert (x is None) == (y is None), f"{what}: gradient {i} is missing"
        if x is not None:
            near(x, y, f"{what}: gradient {i}", 2e-4)


def deepseek(glm=False):
    """The module of DeepSeek-V4 in transformers, or GLM's; None where transformers has none."""
    try:
        if glm:
            from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection as Module
        else:
            from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection as Module
    except ImportError:
        print(f"# no {'GLM' if glm else 'DeepSeek-V4'} with hyper-connections in transformers here")
        return None
    config = type("Config", (), dict(hc_mult=N, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-5, hidden_size=C))()
    m = Module(config)
    for p in m.parameters():
        nn.init.normal_(p, 0, 0.3)
    return m


class EagerHyperConnection(nn.Module):
    """The module of transformers in words of our own, for machines without it."""

    def __init__(self):
        super().__init__()
        self.hc_mult, self.hc_sinkhorn_iters, self.hc_eps = N, 20, 1e-6
        self.input_norm = nn.Identity()
        self.input_norm.eps = 1e-5
        self.fn = nn.Parameter(0.3 * torch.randn(N * N + 2 * N, N * C))
        self.base = nn.Parameter(0.3 * torch.randn(N * N + 2 * N))
        self.scale = nn.Parameter(0.3 * torch.randn(3))

    def forward(self, x):
        flat = x.flatten(2)
        z = flat @ self.fn.T * (flat.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        z = z * self.scale.repeat_interleave(torch.tensor([N, N, N * N])) + self.base
        pre, post, m = z[..., :N].sigmoid() + 1e-6, 2 * z[..., N : 2 * N].sigmoid(), z[..., 2 * N :].unflatten(-1, (N, N)).softmax(-1) + 1e-6
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            m = m / (m.sum(-1, keepdim=True) + 1e-6)
            m = m / (m.sum(-2, keepdim=True) + 1e-6)
        return post, m, (pre.unsqueeze(-1) * x).sum(2)


def the_module_of_transformers_is_replaced():
    for m in (deepseek(), deepseek(glm=True), EagerHyperConnection()):
        if m is None:
            continue
        x = torch.randn(2, 5, N, C, requires_grad=True)
        want = m(x)
        assert modules.replace_transformers(nn.ModuleList([m])) == (1, 0)
        have = m(x)
        for a, b, what in zip(have, want, ("post", "comb", "collapsed")):
            assert a.shape == b.shape
            near(a, b, what)
        same_gradients(have, want, [x, *m.parameters()], type(m).__name__)
        assert list(dict(m.named_parameters())) == ["fn", "base", "scale"]


def a_layer_of_deepseek_is_fused():
    m = deepseek()
    if m is None:
        print("# skipped: no DeepSeek-V4 in transformers")
        return
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

    class Attention(nn.Linear):
        def forward(self, x, **kwargs):
            return super().forward(x), None

    class Mlp(nn.Linear):
        def forward(self, x, input_ids=None):
            return super().forward(x)

    layer = v4.DeepseekV4DecoderLayer.__new__(v4.DeepseekV4DecoderLayer)
    nn.Module.__init__(layer)
    layer.self_attn, layer.mlp = Attention(C, C), Mlp(C, C)
    layer.input_layernorm, layer.post_attention_layernorm = v4.DeepseekV4RMSNorm(C, eps=1e-5), v4.DeepseekV4RMSNorm(C, eps=1e-5)
    nn.init.normal_(layer.post_attention_layernorm.weight, 1, 0.2)
    layer.attn_hc, layer.ffn_hc = deepseek(), deepseek()
    x = torch.randn(2, 5, N, C, requires_grad=True)
    want = v4.DeepseekV4DecoderLayer.forward(layer, x)
    assert modules.replace_transformers(layer) == (2, 1)
    have = layer(x)
    near(have, want, "hidden states")
    same_gradients([have], [want], [x, *layer.parameters()], "layer")


def tiny_deepseek():
    """A model of DeepSeek-V4 with a layer of each kind; None where transformers has none."""
    try:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    except ImportError:
        return None
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    config = DeepseekV4Config(
        vocab_size=40, hidden_size=24, moe_intermediate_size=16, num_attention_heads=4, num_key_value_heads=1, head_dim=8, q_lora_rank=12,
        num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=1, hc_mult=N, compress_rates={kinds[1]: 4, kinds[2]: 8}, sliding_window=5,
        o_groups=2, o_lora_rank=6, index_n_heads=8, index_head_dim=8, index_topk=3, num_nextn_predict_layers=0, num_hash_layers=1,
        layer_types=kinds, num_hidden_layers=len(kinds), max_position_embeddings=64,
    )  # fmt: skip
    model = DeepseekV4ForCausalLM(config)
    for name, p in model.named_parameters():
        nn.init.normal_(p, 1 if "norm" in name else 0, 0.2)
    for m in model.modules():
        if hasattr(m, "tid2eid"):  # all zeros, which makes a gradient that is rounding alone
            m.tid2eid.copy_(torch.stack([torch.randperm(4)[:2] for _ in range(40)]))
    return model


def a_whole_model_of_deepseek_computes_the_same():
    model = tiny_deepseek()
    if model is None:
        print("# skipped: no DeepSeek-V4 in transformers")
        return
    tokens = torch.randint(0, 40, (2, 30))

    def run(m, **more):
        out = m(input_ids=tokens, labels=tokens, use_cache=False, **more)
        params = dict(m.named_parameters())
        grads = torch.autograd.grad(out.loss, list(params.values()), allow_unused=True)
        return out.logits, dict(zip(params, grads))

    want, right = run(model)
    changed = copy.deepcopy(model)
    assert modules.replace_transformers(changed) == (6, 3)
    assert list(changed.state_dict()) == list(model.state_dict())
    for what, m in (("changed", changed), ("copy of it", copy.deepcopy(changed))):
        have, grads = run(m)
        near(have, want, what + ": logits")
        for name in right:
            assert (grads[name] is None) == (right[name] is None), name
            if right[name] is not None:
                near(grads[name], right[name], f"{what}: gradient of {name}", 1e-3)
    changed.gradient_checkpointing_enable(dict(use_reentrant=False))
    changed.train()
    _, again = run(changed)
    assert all(g is None or torch.equal(g, grads[name]) for name, g in again.items()), "recomputed layers have other gradients"


def a_changed_module_can_be_copied_pickled_and_hooked():
    m = EagerHyperConnection()
    x = torch.randn(2, 5, N, C)
    modules.replace_transformers(nn.ModuleList([m]))
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    loaded, copied = torch.load(file, weights_only=False), copy.deepcopy(m)
    for other in (loaded, copied):
        assert all(torch.equal(a, b) for a, b in zip(other(x), m(x)))
        with torch.no_grad():
            other.base.add_(1)
        assert not torch.equal(other(x)[0], m(x)[0]), "a copy computes with the parameters of its original"
    calls = []
    hooked = EagerHyperConnection()  # as accelerate does it
    hooked._hf_hook, hooked._old_forward = object(), hooked.forward
    hooked.forward = lambda *args: calls.append(1) or hooked._old_forward(*args)
    modules.replace_transformers(nn.ModuleList([hooked]))
    hooked(x)
    assert calls and hooked._old_forward.func is modules._hc_forward


class MainModule(nn.Module):
    """Parameters and methods of HyperConnectionModule in Megatron's main branch, in words of our own."""

    def __init__(self):
        super().__init__()
        self.n, self.sinkhorn_iterations, self.norm_eps = N, 20, 1e-6
        self.mapping_proj = nn.Linear(N * C, N * N + 2 * N, bias=False)
        self.alpha_pre, self.alpha_post, self.alpha_res = (nn.Parameter(torch.full((1,), v)) for v in (0.5, -0.4, 0.7))
        self.bias = nn.Parameter(0.3 * torch.randn(N * N + 2 * N))

    def mappings(self, x):
        q = 1 / (x.norm(dim=-1, keepdim=True) / math.sqrt(x.shape[-1]) + 1e-6)
        by = torch.cat([self.alpha_pre.expand(N), self.alpha_post.expand(N), self.alpha_res.expand(N * N)])
        z = self.mapping_proj(x) * q * by + self.bias
        return z[..., :N].sigmoid(), 2 * z[..., N : 2 * N].sigmoid(), z[..., 2 * N :].unflatten(-1, (N, N))

    def forward(self, hidden_states, mhc_recompute_manager=None) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pre, post, m = self.mappings(hidden_states)
        m = (m - m.amax(-1, keepdim=True)).exp()
        for _ in range(20):
            m = m / m.sum(-1, keepdim=True).clamp_min(1e-6)
            m = m / m.sum(-2, keepdim=True).clamp_min(1e-6)
        return (pre.unsqueeze(-1) * hidden_states.unflatten(-1, (N, C))).sum(2), m, post

    def mix(self, h_res, streams):
        return torch.einsum("sbij,sbjc->sbic", h_res, streams)

    def fused_h_res_h_post_bda(self, h_res, original_residual, h_post, layer_output_with_bias, dropout_prob, training, fused, manager=None):
        f, bias = layer_output_with_bias
        f = f if bias is None else f + bias
        return (self.mix(h_res, original_residual.unflatten(-1, (N, C))) + h_post.unsqueeze(-1) * f.unsqueeze(-2)).flatten(2)


class DevelopmentModule(MainModule):
    """That of the development branch: DeepSeek-V4's form, and the residual among what forward returns."""

    def __init__(self):
        super().__init__()
        self.sinkhorn_eps = self.compute_h_eps = 1e-6

    def forward(
        self, hidden_states, mhc_recompute_manager=None, output_slot=None
    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        pre, post, m = self.mappings(hidden_states)
        pre, m = pre + 1e-6, m.softmax(-1) + 1e-6
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            m = m / (m.sum(-1, keepdim=True) + 1e-6)
            m = m / (m.sum(-2, keepdim=True) + 1e-6)
        return (pre.unsqueeze(-1) * hidden_states.unflatten(-1, (N, C))).sum(2), m, post, hidden_states

    def mix(self, h_res, streams):
        return torch.einsum("sbji,sbjc->sbic", h_res, streams)

    def fused_h_res_h_post_bda(self, *args, **kwargs):
        return super().fused_h_res_h_post_bda(*args, **kwargs)


def unsupported(text, f, *args, **kw):
    try:
        f(*args, **kw)
    except bk.BraidUnsupported as e:
        assert text in str(e), str(e)
        return
    raise AssertionError(f"nothing was refused about '{text}'")


def modules_of_megatron_are_patched_and_restored():
    for cls in (MainModule, DevelopmentModule):
        m, bias = cls(), torch.randn(C, requires_grad=True)
        x, f = torch.randn(5, 2, N * C, requires_grad=True), torch.randn(5, 2, C, requires_grad=True)

        def layer():
            h, res, post, *residual = m(x)
            y = m.fused_h_res_h_post_bda(res, residual[0] if residual else x, post, (f, bias), 0.1, False, True)
            return h, res, post, y, m.fused_h_res_h_post_bda(res, x, post, (f, None), 0.0, True, True)

        want, plain = layer(), cls.forward
        undo = modules.patch_megatron(cls)
        have = layer()
        unsupported("recompute manager", m, x, object())
        unsupported("recompute manager", m, x, mhc_recompute_manager=object())
        unsupported("dropout of 0.1", m.fused_h_res_h_post_bda, have[1], x, have[2], (f, None), 0.1, True, True)
        m.norm_eps = 1e-5
        unsupported("norm_eps is 1e-05", m, x)
        undo()
        assert cls.forward is plain
        for a, b, what in zip(have, want, ("aggregated", "h_res", "h_post", "y", "y without a bias")):
            near(a, b, f"{cls.__name__}: {what}")
        same_gradients(have, want, [x, f, bias, *m.parameters()], cls.__name__)
    unsupported("no fused_h_res_h_post_bda", modules.patch_megatron, nn.Linear)


def unknown_models_are_refused():
    for f in (lambda: modules.replace_transformers(nn.Linear(2, 2)), lambda: modules.replace_transformers(nn.ModuleList([wrong()]))):
        try:
            f()
        except bk.BraidUnsupported as e:
            assert "hyper-connection" in str(e) or "hc_eps" in str(e)
        else:
            raise AssertionError("nothing was refused")


def wrong():
    m = EagerHyperConnection()
    m.hc_eps = 1e-3
    return m


def main():
    torch.manual_seed(0)
    bad = 0
    for f in (
        the_module_of_transformers_is_replaced,
        a_layer_of_deepseek_is_fused,
        a_whole_model_of_deepseek_computes_the_same,
        a_changed_module_can_be_copied_pickled_and_hooked,
        modules_of_megatron_are_patched_and_restored,
        unknown_models_are_refused,
    ):
        try:
            f()
            print("ok", f.__name__.replace("_", " "), flush=True)
        except Exception:
            bad = 1
            print("not ok", f.__name__.replace("_", " "), flush=True)
            traceback.print_exc(file=sys.stdout)
    return bad


if __name__ == "__main__":
    sys.exit(main())
