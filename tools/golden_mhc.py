#!/usr/bin/env python3
"""Writes tests/lib/fixtures/mhc.safetensors: golden values of mHC in fp64, which docs/GOLDEN.md describes.

    tools/golden_mhc.py [FILE]           needs torch and numpy; braid is not used
    tools/golden_mhc.py --check [FILE]   compares with what is there

The formulas are written out plainly, and gradients are torch's autograd: nothing here is shared with braid."""

import json
import struct
import sys

import numpy as np
import torch

ROWS, N, C, ITERS = 3, 4, 6, 20
EPS, ROOT_EPS, NORM_EPS = 1e-6, 1e-5, 1e-5


def sinkhorn_d(z):
    m = torch.softmax(z, -1) + EPS
    m = m / (m.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERS - 1):
        m = m / (m.sum(-1, keepdim=True) + EPS)
        m = m / (m.sum(-2, keepdim=True) + EPS)
    return m


def sinkhorn_s(z):
    m = torch.exp(z - z.amax(-1, keepdim=True).detach())
    for _ in range(ITERS):
        m = m / m.sum(-1, keepdim=True).clamp_min(EPS)
        m = m / m.sum(-2, keepdim=True).clamp_min(EPS)
    return m


def post_of(profile, x, f, bias, post, comb):
    mixed = torch.einsum("rji,rjc->ric" if profile == "d" else "rij,rjc->ric", comb, x)
    return mixed + post.unsqueeze(-1) * (f + bias).unsqueeze(-2)


def pre_of(profile, inside, x, fn, base, scale):
    flat = x.flatten(1)
    square = flat.square().mean(-1, keepdim=True)
    root = torch.sqrt(square + ROOT_EPS) if inside else torch.sqrt(square) + EPS
    by = torch.cat([scale[0].expand(N), scale[1].expand(N), scale[2].expand(N * N)])
    z = flat @ fn.T / root * by + base
    pre = torch.sigmoid(z[:, :N]) + (EPS if profile == "d" else 0)
    post = 2 * torch.sigmoid(z[:, N : 2 * N])
    comb = (sinkhorn_d if profile == "d" else sinkhorn_s)(z[:, 2 * N :].reshape(-1, N, N))
    return pre, post, comb, (pre.unsqueeze(-1) * x).sum(1)


def inputs():
    rng = np.random.default_rng(20260801)

    def normal(*shape, by=1.0):
        return by * rng.standard_normal(shape)

    x = normal(ROWS, N, C)
    x[2] *= 1e-3  # where the place of epsilon matters
    f = normal(ROWS, C)
    f[2] *= 1e-3
    comb = rng.random((ROWS, N, N))
    return {
        "x": x,
        "f": f,
        "post": 2 * rng.random((ROWS, N)),
        "comb": comb / comb.sum(-1, keepdims=True),
        "bias": normal(C, by=1e-3),
        "fn": normal(N * N + 2 * N, N * C, by=0.3),
        "base": normal(N * N + 2 * N, by=0.5),
        "scale": np.array([0.9, -0.7, 1.1]),
        "norm_weight": 1 + normal(C, by=0.2),
        "grad_y": normal(ROWS, N, C),
        "grad_h": normal(ROWS, C),
        "grad_post": normal(ROWS, N),
        "grad_comb": normal(ROWS, N, N),
    }


def case(given, profile, inside, norm):
    """Outputs and gradients of the boundary: post with the given coefficients, then pre of its result."""
    names = ["x", "f", "post", "comb", "bias", "fn", "base", "scale"] + (["norm_weight"] if norm else [])
    t = {k: torch.tensor(v, dtype=torch.float64, requires_grad=k in names) for k, v in given.items()}
    y = post_of(profile, t["x"], t["f"], t["bias"], t["post"], t["comb"])
    pre, post, comb, h = pre_of(profile, inside, y, t["fn"], t["base"], t["scale"])
    if norm:
        h = h / torch.sqrt(h.square().mean(-1, keepdim=True) + NORM_EPS) * t["norm_weight"]
    loss = (y * t["grad_y"]).sum() + (h * t["grad_h"]).sum() + (post * t["grad_post"]).sum() + (comb * t["grad_comb"]).sum()
    grads = torch.autograd.grad(loss, [t[k] for k in names])
    out = {"y": y, "h": h, "pre": pre, "post_next": post, "comb_next": comb}
    out.update({"d" + k: g for k, g in zip(names, grads)})
    return {k: v.detach().numpy() for k, v in out.items()}


def tensors():
    given = inputs()
    out = {"in/" + k: v for k, v in given.items()}
    for profile in "ds":
        for place in ("outside", "inside"):
            for norm in (True, False):
                name = f"{profile}_{place}_{'norm' if norm else 'plain'}"
                out.update({f"{name}/{k}": v for k, v in case(given, profile, place == "inside", norm).items()})
    return out


def encode(all_tensors):
    meta = {
        "streams": str(N), "iterations": str(ITERS), "eps": repr(EPS), "root_eps": repr(ROOT_EPS), "norm_eps": repr(NORM_EPS),
    }  # fmt: skip
    head, data, at = {"__metadata__": meta}, [], 0
    for name, value in all_tensors.items():
        raw = np.ascontiguousarray(value, dtype="<f8").tobytes()
        head[name] = {"dtype": "F64", "shape": list(value.shape), "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data)


def main():
    args = [a for a in sys.argv[1:] if a != "--check"]
    path = args[0] if args else "tests/lib/fixtures/mhc.safetensors"
    made = encode(tensors())
    if "--check" not in sys.argv[1:]:
        with open(path, "wb") as f:
            f.write(made)
        return 0
    with open(path, "rb") as f:
        there = f.read()
    n = struct.unpack("<Q", there[:8])[0]
    same = there[: 8 + n] == made[: 8 + n]
    a, b = np.frombuffer(there[8 + n :], "<f8"), np.frombuffer(made[8 + n :], "<f8")
    worst = np.max(np.abs(a - b) / np.maximum(np.abs(a), 1e-9)) if same else np.inf
    print(f"{path}: {len(a)} values, worst relative difference {worst:.1e}")
    return 0 if worst < 1e-9 else 1


if __name__ == "__main__":
    sys.exit(main())
