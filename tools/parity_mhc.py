#!/usr/bin/env python3
"""Compare loss, logits and gradients of braid's manifold hyper-connections with PyTorch.

  parity_mhc.py                      all cases, on braid's cpu device
  parity_mhc.py --device ref         all cases, on its double-precision reference device
  parity_mhc.py --braid build/braid  which binary

The streams, the mapping, Sinkhorn, the mix, the contraction and the prediction depths, which go on from the
streams before their contraction, are written here from the formulas, for both profiles; attention, MLP and the loss are those of parity_torch.py. Mixing parameters start away
from their initial values (alpha 0.01, bias 0 would hide errors): a checkpoint is not needed for that,
the cases set model.mhc_gating to 1 and the other weights to ten times the usual size, so that the streams differ;
"fresh" has the initial values. braid is measured against float64; in brackets, PyTorch's own float32 against it.
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
    "d4-mtp1": ("d", 4, 20, ["model.pattern=*-*-/*-"]),
    "d2-mtp2": ("d", 2, 20, ["model.pattern=*-/*-/*-", "model.tied=off"]),
    "s3-mtp2": ("s", 3, 5, ["model.pattern=*-/*-/*-"]),
}
MTP_SCALE = 0.5  # the losses of the depths together weigh this much


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


def contract(o, p, where, streams, profile):
    if profile == "s":
        return streams.mean(-2)
    e = o["model.norm_eps"]
    flat = streams.flatten(-2)
    rms = torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + e)
    gate = torch.sigmoid(flat @ p[where + "hc_head_fn"].T * rms * p[where + "hc_head_scale"] + p[where + "hc_head_base"])
    return ((gate + e)[..., None] * streams).sum(-2)


def run_layers(o, p, symbols, where, streams, case):
    """A stack of layers over the streams [b, s, n, C]."""
    profile, _, iterations = case
    number = 0
    for i, symbol in enumerate(symbols):
        at = f"{where}{i}."
        module = "self_attention" if symbol == "*" else "mlp"
        pre, post, res = mapping(p, f"{at}{module}_hyper_connection.", streams, profile, iterations)
        x = (pre[..., None] * streams).sum(-2)
        number += symbol == "*"
        f = base.attention(o, p, at, x, number) if symbol == "*" else base.mlp(o, p, at, x)
        streams = mix(res, streams, profile) + post[..., None] * f[..., None, :]
    return streams


def head(o, p, streams, where, norm, profile):
    x = base.rms_norm(o, contract(o, p, where, streams, profile), p[where + norm])
    return x @ (p["embedding.word_embeddings.weight"] if o["model.tied"] else p["output_layer.weight"]).T


def shift(ids, fill):
    """One position to the left; the last column has nothing to take."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], fill)], 1)


def run_forward(o, p, tokens, labels, case):
    """Logits and labels of the main head and of each prediction depth. A depth takes the streams before their
    contraction: each is normed and projected by itself, the embedding of the next token is added to all."""
    profile, n, _ = case
    main, *depths = o["model.pattern"].split("/")
    embedding = p["embedding.word_embeddings.weight"]
    streams = embedding[tokens][..., None, :].expand(-1, -1, n, -1)
    streams = run_layers(o, p, main, "decoder.layers.", streams, case)
    results = [(head(o, p, streams, "decoder.", "final_norm.weight", profile), labels)]
    for k, symbols in enumerate(depths):
        tokens, labels = shift(tokens, 0), shift(labels, -1)
        at = f"mtp.layers.{k}."
        e = base.rms_norm(o, embedding[tokens], p[at + "enorm.weight"]) @ p[at + "e_proj.weight"].T
        h = base.rms_norm(o, streams, p[at + "hnorm.weight"]) @ p[at + "h_proj.weight"].T
        streams = run_layers(o, p, symbols, at + "mtp_model_layer.layers.", e[..., None, :] + h, case)
        results.append((head(o, p, streams, at, "final_layernorm.weight", profile), labels))
    return results


def run_model(o, params, tokens, labels, case, dtype=torch.float64):
    p = {key: value.detach().to(dtype).requires_grad_() for key, value in params.items()}
    results = run_forward(o, p, tokens.long(), labels, case)
    logits = results[0][0]
    loss, objective = base.compute_losses(o, *results[0])
    for r in results[1:]:
        objective = objective + MTP_SCALE / (len(results) - 1) * base.compute_losses(o, *r)[1]
    objective.backward()
    result = {"loss": loss.detach().reshape(1), "logits": logits.detach().flatten(0, 1)}
    result.update({"grad." + key: value.grad for key, value in p.items()})
    return result


def grouped(tensors):
    """The three alphas of a mapping as one tensor, base and scale of a contraction as another. A single one may vanish:
    behind equal streams neither the size of what is read (the norm undoes it) nor the mix (any mix of equals is the
    same) matters, so alpha_pre and alpha_res of the first layer have no gradient but rounding."""
    out = {}
    for key, value in sorted(tensors.items()):
        for suffix, name in ((".alpha_pre", ".alpha"), (".alpha_post", ".alpha"), (".alpha_res", ".alpha"), ("hc_head_base", "hc_head"), ("hc_head_scale", "hc_head")):
            if key.endswith(suffix):
                key = key[: -len(suffix)] + name
                value = torch.cat([out[key], value.flatten()]) if key in out else value.flatten()
                break
        out[key] = value
    return out


def run_case(args, name):
    profile, n, iterations, more = CASES[name]
    config = os.path.join(base.ROOT, "configs", "tiny.ini")
    o = base.read_options(config, [m for m in more if "mhc" not in m] + ["model.vocab=67"])
    options = [f"model.mhc_streams={n}", f"model.mhc_profile={profile}", f"model.mhc_iterations={iterations}",
               "model.vocab=67", f"run.device={args.device}", f"model.mtp_scale={MTP_SCALE}"]
    options += more if any("mhc_gating" in m for m in more) else ["model.mhc_gating=1", "model.init_std=0.2", *more]
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
    rounded = run_model(o, params, tokens, labels, (profile, n, iterations), torch.float32)
    loss, worst, key = base.worst_errors(grouped(found), grouped(exact))
    torch_loss, torch_worst, _ = base.worst_errors(grouped(rounded), grouped(exact))
    loss_limit, limit = base.TOLERANCE[args.device]
    passed = loss <= loss_limit and worst <= limit
    print(f"{name:18} {'ok  ' if passed else 'FAIL'}  loss {loss:8.1e} ({torch_loss:8.1e})  worst {worst:8.1e} ({torch_worst:8.1e})  {key}", flush=True)
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
