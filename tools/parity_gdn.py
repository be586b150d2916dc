#!/usr/bin/env python3
"""Compare loss, logits and gradients of braid's gated delta net layers with PyTorch and Hugging Face.

  parity_gdn.py                      all cases, on braid's cpu device
  parity_gdn.py --device ref         all cases, on its double-precision reference device
  parity_gdn.py --trained            on weights that have moved
  parity_gdn.py --braid build/braid  which binary

`braid grads` computes each case for random tokens. The judge is the recurrence in float64, one token after
another, written here from its definition; attention, MLP and the loss are those of parity_torch.py. The same
model is then computed with the layer of Hugging Face Qwen3-Next (Qwen3NextGatedDeltaNet, weights regrouped by key
head): the columns "hf" show how far that is from the judge. Its casts to fp32 are turned into casts to fp64 for
this: in fp32 its gradient of A_log is up to 6e-3 off where that almost vanishes, which would hide a real
difference. Needs transformers.
"""
import argparse
import contextlib
import os
import sys
import tempfile

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import parity_torch as base

HF_LIMIT = 1e-9  # both in float64

CASES = {  # name: (pattern, key heads, value heads, key dim, value dim, taps, chunk, more options)
    "G": ("G", 2, 4, 8, 12, 4, 64, []),
    "G-": ("G-", 2, 2, 16, 16, 4, 16, []),
    "*G-": ("*G-", 1, 4, 8, 8, 4, 5, []),
    "G-G-*-": ("G-G-*-", 2, 4, 16, 8, 4, 8, []),
    "one tap": ("GG", 2, 4, 8, 8, 1, 64, []),
    "two taps, chunk 1": ("G", 1, 2, 8, 8, 2, 1, []),
    "untied": ("G*", 2, 4, 8, 8, 4, 7, ["model.tied=off"]),
    "zero-centred": ("G-", 2, 4, 8, 8, 4, 64, ["model.norm_zero_centered=on"]),
    "wide heads": ("G", 1, 2, 64, 128, 4, 32, []),
}


class Sizes:
    def __init__(self, case):
        self.pattern, self.hk, self.hv, self.dk, self.dv, self.taps, self.chunk, self.more = CASES[case]
        self.keys, self.inner, self.r = self.hk * self.dk, self.hv * self.dv, self.hv // self.hk

    def options(self):
        return [f"model.pattern={self.pattern}", f"model.gdn_key_heads={self.hk}", f"model.gdn_value_heads={self.hv}",
                f"model.gdn_key_dim={self.dk}", f"model.gdn_value_dim={self.dv}", f"model.gdn_conv={self.taps}",
                f"model.gdn_chunk={self.chunk}"]

    def sections(self):
        return [self.keys, self.keys, self.inner, self.inner, self.hv, self.hv]


def unit(x):
    return x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def recurrence(q, k, v, g, weight):
    """One token after another: q, k [b, s, h, dk], v [b, s, h, dv], g, weight [b, s, h]."""
    state = torch.zeros(*v.shape[:1], v.shape[2], k.shape[3], v.shape[3], dtype=v.dtype)
    out = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = weight[:, t, :, None] * (v[:, t] - held)
        state = state + k[:, t, :, :, None] * write[:, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * k.shape[3] ** -0.5)
    return torch.stack(out, 1)


def naive_layer(o, p, at, h, z):
    m = at + "self_attention."
    q, k, v, gate, beta, alpha = (h @ p[m + "in_proj.weight"].T).split(z.sections(), -1)
    mixed = torch.cat([q, k, v], -1).transpose(1, 2)
    mixed = F.conv1d(F.pad(mixed, (z.taps - 1, 0)), p[m + "conv1d.weight"], groups=mixed.shape[1])
    q, k, v = F.silu(mixed).transpose(1, 2).split(z.sections()[:3], -1)
    q, k = (unit(x.unflatten(-1, (z.hk, z.dk))).repeat_interleave(z.r, 2) for x in (q, k))
    g = -p[m + "A_log"].exp() * F.softplus(alpha + p[m + "dt_bias"])
    out = recurrence(q, k, v.unflatten(-1, (z.hv, z.dv)), g, torch.sigmoid(beta))
    out = base.rms_norm(o, out, p[m + "out_norm.weight"]) * F.silu(gate.unflatten(-1, (z.hv, z.dv)))
    return out.flatten(-2) @ p[m + "out_proj.weight"].T


class DoubleTorch:
    """torch, but what asks for float32 gets float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def in_double(module):
    keep = module.torch, torch.Tensor.float
    module.torch, torch.Tensor.float = DoubleTorch(), torch.Tensor.double
    try:
        yield
    finally:
        module.torch, torch.Tensor.float = keep


def hf_layer(o, p, at, h, z):
    """The layer of Hugging Face on the same weights: q, k, v, z of a key head together, then beta, alpha."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    m = at + "self_attention."
    config = Qwen3NextConfig(
        hidden_size=h.shape[-1], linear_num_key_heads=z.hk, linear_num_value_heads=z.hv, linear_key_head_dim=z.dk,
        linear_value_head_dim=z.dv, linear_conv_kernel_dim=z.taps, rms_norm_eps=o["model.norm_eps"], hidden_act="silu",
        num_hidden_layers=1, layer_types=["linear_attention"])  # fmt: skip
    with torch.device("meta"):
        module = hf.Qwen3NextGatedDeltaNet(config, 0)
    grouped = [w.unflatten(0, (z.hk, -1)) for w in p[m + "in_proj.weight"].split(z.sections(), 0)]
    gain = p[m + "out_norm.weight"]
    weights = {
        "in_proj_qkvz.weight": torch.cat(grouped[:4], 1).flatten(0, 1),
        "in_proj_ba.weight": torch.cat(grouped[4:], 1).flatten(0, 1),
        "conv1d.weight": p[m + "conv1d.weight"], "dt_bias": p[m + "dt_bias"], "A_log": p[m + "A_log"],
        "norm.weight": gain + 1 if o["model.norm_zero_centered"] else gain, "out_proj.weight": p[m + "out_proj.weight"],
    }  # fmt: skip
    with in_double(hf):
        return torch.func.functional_call(module, weights, (h,))


def run_model(o, params, tokens, labels, z, layer, dtype):
    p = {key: value.detach().to(dtype).requires_grad_() for key, value in params.items()}
    embedding = p["embedding.word_embeddings.weight"]
    x, number = embedding[tokens.long()], 0
    for i, symbol in enumerate(z.pattern):
        at = f"decoder.layers.{i}."
        if symbol == "G":
            x = x + layer(o, p, at, base.rms_norm(o, x, p[at + "self_attention.in_proj.layer_norm_weight"]), z)
        else:
            number += symbol == "*"
            x = x + (base.attention(o, p, at, x, number) if symbol == "*" else base.mlp(o, p, at, x))
    x = base.rms_norm(o, x, p["decoder.final_norm.weight"])
    logits = x @ (embedding if o["model.tied"] else p["output_layer.weight"]).T
    loss, objective = base.compute_losses(o, logits, labels)
    objective.backward()
    result = {"loss": loss.detach().reshape(1), "logits": logits.detach().flatten(0, 1)}
    result.update({"grad." + key: value.grad for key, value in p.items()})
    return result


def run_case(args, name):
    z = Sizes(name)
    o = base.read_options(args.config, ["model.vocab=67", *z.more])
    options = [f"--{x}" for x in [*z.options(), "model.vocab=67", *z.more, f"run.device={args.device}"]]
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 67, (2, 37), generator=generator, dtype=torch.int32)
    labels = torch.randint(-1, 67, (2, 37), generator=generator, dtype=torch.int32)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        source, result = os.path.join(folder, "in.safetensors"), os.path.join(folder, "out.safetensors")
        save_file({"tokens": tokens, "labels": labels}, source)
        if args.trained:  # the text has letters beyond 67
            options = [x for x in options if "vocab" not in x] + ["--model.vocab=256"]
            o = base.read_options(args.config, ["model.vocab=256", *z.more])
            options.append(f"--ckpt={base.train_briefly(args, options, folder)}")
        base.run_braid([args.braid, "grads", args.config, *options, "--in", source, "--out", result])
        found = load_file(result)
    params = {key[6:]: value for key, value in found.items() if key.startswith("param.")}
    exact = run_model(o, params, tokens, labels, z, naive_layer, torch.float64)
    loss, worst, key = base.worst_errors(found, exact)
    hf = run_model(o, params, tokens, labels, z, hf_layer, torch.float64)
    hf_loss, hf_worst, _ = base.worst_errors(hf, exact)
    loss_limit, limit = base.TOLERANCE[args.device]
    passed = loss <= loss_limit and worst <= limit and hf_worst <= HF_LIMIT
    print(f"{name:18} {'ok  ' if passed else 'FAIL'}  loss {loss:8.1e}  worst {worst:8.1e}  "
          f"hf: loss {hf_loss:8.1e}  worst {hf_worst:8.1e}  {key}", flush=True)  # fmt: skip
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--braid", default=os.path.join(base.ROOT, "build", "braid"))
    parser.add_argument("--config", default=os.path.join(base.ROOT, "configs", "tiny.ini"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "ref", "cuda"))
    parser.add_argument("--trained", action="store_true", help="on weights that have moved")
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    args = parser.parse_args()
    results = [run_case(args, name) for name in args.case or CASES]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
