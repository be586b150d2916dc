#!/usr/bin/env python3
"""Compare loss, logits and gradients of braid's manifold hyper-connections with PyTorch.

  parity_mhc.py                      all cases, on braid's cpu device
  parity_mhc.py --device ref         all cases, on its double-precision reference device
  parity_mhc.py --braid build/braid  which binary

The streams, the mapping, Sinkhorn, the mix and the contraction are written here from the formulas, for
both profiles; attention, MLP and the loss are those of parity_torch.py. Mixing parameters start away
from their initial values (alpha 0.01, bias 0 would hide errors): a checkpoint is not needed for that,
the cases set model.mhc_gating to 1. braid is measured against float64.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file

import parity_torch as base

EPS = 1e-6

CASES = {  # name: (profile, streams, iterations, more options)
    "d4": ("d", 4, 20, []),
    "s4": ("s", 4, 20, []),
    "d2": ("d", 2, 20, []),
    "s3": ("s", 3, 5, []),
    "d8": ("d", 8, 20, []),
    "d4-one-iteration": ("d", 4, 1, []),
    "d4-bias": ("d", 4, 20, ["model.bias=on", "model.tied=off"]),
    "s4-long": ("s", 4, 20, ["model.pattern=*-*-*-"]),
    "d4-fresh": ("d", 4, 20, ["model.mhc_gating=0.01"]),
}


def sinkhorn(logits, profile, iterations):
    """[..., n, n] to a (nearly) doubly stochastic matrix."""
    if profile == "d":
        m = torch.softmax(logits, -1) + EPS
        m = m / (m.sum(-2, keepdim=True) + EPS)
        for _ in range(iterations - 1):
            m = m / (m.sum(-1, keepdim=True) + EPS)
            m = m / (m.sum(-2, keepdim=True) + EPS)
        return m
    m = torch.exp(logits - logits.max(-1, keepdim=True).values)
    for _ in range(iterations):
        m = m / m.sum(-1, keepdim=True).clamp(min=EPS)
        m = m / m.sum(-2, keepdim=True).clamp(min=EPS)
    return m


def mapping(p, at, streams, profile, iterations):
    """streams [b, s, n, C] to pre, post [b, s, n] and res [b, s, n, n]."""
    n = streams.shape[-2]
    flat = streams.flatten(-2)
    q = 1 / (flat.pow(2).mean(-1, keepdim=True).sqrt() + EPS)
    z = flat @ p[at + "mapping_proj.weight"].T * q
    beta = p[at + "bias"]
    pre = torch.sigmoid(z[..., :n] * p[at + "alpha_pre"] + beta[:n])
    post = 2 * torch.sigmoid(z[..., n : 2 * n] * p[at + "alpha_post"] + beta[n : 2 * n])
    logits = z[..., 2 * n :] * p[at + "alpha_res"] + beta[2 * n :]
    res = sinkhorn(logits.unflatten(-1, (n, n)), profile, iterations)
    return (pre + EPS if profile == "d" else pre), post, res


def mix(res, streams, profile):
    if profile == "d":
        return torch.einsum("bsji,bsjc->bsic", res, streams)
    return torch.einsum("bsij,bsjc->bsic", res, streams)


def contract(o, p, streams, profile):
    if profile == "s":
        return streams.mean(-2)
    e = o["model.norm_eps"]
    flat = streams.flatten(-2)
    rms = torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + e)
    gate = torch.sigmoid(flat @ p["decoder.hc_head_fn"].T * rms * p["decoder.hc_head_scale"] + p["decoder.hc_head_base"])
    return ((gate + e)[..., None] * streams).sum(-2)


def compute_logits(o, p, tokens, profile, n, iterations):
    embedding = p["embedding.word_embeddings.weight"]
    streams = embedding[tokens][..., None, :].expand(-1, -1, n, -1)
    number = 0
    for i, symbol in enumerate(o["model.pattern"]):
        at = f"decoder.layers.{i}."
        module = "self_attention" if symbol == "*" else "mlp"
        pre, post, res = mapping(p, f"{at}{module}_hyper_connection.", streams, profile, iterations)
        x = (pre[..., None] * streams).sum(-2)
        number += symbol == "*"
        f = base.attention(o, p, at, x, number) if symbol == "*" else base.mlp(o, p, at, x)
        streams = mix(res, streams, profile) + post[..., None] * f[..., None, :]
    x = base.rms_norm(o, contract(o, p, streams, profile), p["decoder.final_norm.weight"])
    return x @ (embedding if o["model.tied"] else p["output_layer.weight"]).T


def run_model(o, params, tokens, labels, case):
    p = {key: value.detach().double().requires_grad_() for key, value in params.items()}
    logits = compute_logits(o, p, tokens.long(), *case)
    loss, objective = base.compute_losses(o, logits, labels)
    objective.backward()
    result = {"loss": loss.detach().reshape(1), "logits": logits.detach().flatten(0, 1)}
    result.update({"grad." + key: value.grad for key, value in p.items()})
    return result


def run_case(args, name):
    profile, n, iterations, more = CASES[name]
    config = os.path.join(base.ROOT, "configs", "tiny.ini")
    o = base.read_options(config, [m for m in more if "mhc" not in m] + ["model.vocab=67"])
    options = [f"model.mhc_streams={n}", f"model.mhc_profile={profile}", f"model.mhc_iterations={iterations}",
               "model.vocab=67", f"run.device={args.device}"]
    options += more if any("mhc_gating" in m for m in more) else ["model.mhc_gating=1", *more]
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 67, (2, 24), generator=generator, dtype=torch.int32)
    labels = torch.randint(-1, 67, (2, 24), generator=generator, dtype=torch.int32)
    with tempfile.TemporaryDirectory() as folder:
        source, result = os.path.join(folder, "in.safetensors"), os.path.join(folder, "out.safetensors")
        save_file({"tokens": tokens, "labels": labels}, source)
        subprocess.run([args.braid, "grads", config, f"--in={source}", f"--out={result}", *(f"--{x}" for x in options)],
                       check=True, stdout=subprocess.DEVNULL)
        found = load_file(result)
    params = {key[6:]: value for key, value in found.items() if key.startswith("param.")}
    exact = run_model(o, params, tokens, labels, (profile, n, iterations))
    loss, worst, key = base.worst_errors(found, exact)
    loss_limit, limit = base.TOLERANCE[args.device]
    passed = loss <= loss_limit and worst <= limit
    print(f"{name:18} {'ok  ' if passed else 'FAIL'}  loss {loss:8.1e}  worst {worst:8.1e}  {key}", flush=True)
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--braid", default=os.path.join(base.ROOT, "build", "braid"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "ref", "cuda"))
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    args = parser.parse_args()
    results = [run_case(args, name) for name in args.case or CASES]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
