#!/usr/bin/env python3
"""Speed of the gated delta rule on the CPU: braid next to PyTorch, forward and backward, fp32.

  speed_gdn.py --braid build/braid     time both in turns and print PyTorch / braid

The PyTorch side is the chunked algorithm as written for tensors (chunks of 64, triangular solve, scan over
chunks, autograd), the same inputs and outputs as braid's ops gdn_fwd and gdn_bwd: unit length of q and k, gates,
rule. braid's side is `braid bench gdn`. Rounds alternate; the best of each is kept, so that other load on the
machine hurts both alike.
"""
import argparse
import json
import os
import subprocess
import tempfile
import time

import torch
import torch.nn.functional as F

SHAPES = [  # batch, rows, key heads, value heads, dim of both: those of braid's bench
    (16, 256, 4, 4, 64),
    (1, 4096, 8, 16, 128),
]
CHUNK = 64


def unit(x):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def chunked(q, k, v, alpha, beta, a_log, dt_bias):
    """q, k [b, s, hk, d], v [b, s, hv, d], alpha, beta [b, s, hv]; s a multiple of CHUNK."""
    r = v.shape[2] // k.shape[2]
    q = unit(q).repeat_interleave(r, 2) * k.shape[-1] ** -0.5
    k = unit(k).repeat_interleave(r, 2)
    g = -a_log.exp() * F.softplus(alpha + dt_bias)
    q, k, v, g, w = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v, g, beta.sigmoid()))
    s = g.cumsum(-1)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    decay = (s.unsqueeze(-1) - s.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()
    kb = k * w.unsqueeze(-1)
    system = (kb @ k.mT) * decay
    both = torch.cat([v * w.unsqueeze(-1), kb * s.exp().unsqueeze(-1)], -1)
    u, wk = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True).split(v.shape[-1], -1)
    pairs = (q @ k.mT) * decay
    q_in = q * s.exp().unsqueeze(-1)
    k_out = k * (s[..., -1:] - s).exp().unsqueeze(-1)
    last = s[..., -1].exp()[..., None, None]
    state = torch.zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for i in range(v.shape[2]):
        x = u[:, :, i] - wk[:, :, i] @ state
        out.append(q_in[:, :, i] @ state + pairs[:, :, i] @ x)
        state = state * last[:, :, i] + k_out[:, :, i].mT @ x
    return torch.stack(out, 2).flatten(2, 3).transpose(1, 2)


def torch_problem(shape):
    b, s, hk, hv, d = shape
    torch.manual_seed(1)
    inputs = [torch.randn(b, s, hk, d), torch.randn(b, s, hk, d), torch.randn(b, s, hv, d), torch.randn(b, s, hv),
              torch.randn(b, s, hv), torch.randn(hv) - 2.5, torch.randn(hv)]  # fmt: skip
    return [x.requires_grad_() for x in inputs], torch.randn(b, s, hv, d)


def torch_times(problem):
    inputs, dy = problem
    begin = time.perf_counter()
    out = chunked(*inputs)
    middle = time.perf_counter()
    out.backward(dy)
    end = time.perf_counter()
    for x in inputs:
        x.grad = None
    return middle - begin, end - middle


def braid_times(braid, threads, seconds):
    """{(op, batch, rows): seconds} of one run of the bench."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "bench.json")
        subprocess.run([braid, "bench", "gdn", f"--seconds={seconds}", f"--json={path}"], check=True,
                       stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": str(threads)})  # fmt: skip
        with open(path, encoding="utf-8") as f:
            ops = json.load(f)["ops"]
    result = {}
    for op in ops:
        dims = dict(word.split("=") for word in op["shape"].split())
        result[op["op"], int(dims["b"]), int(dims["s"])] = op["us"] * 1e-6
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--braid", default=os.path.join(os.path.dirname(__file__), "..", "build", "braid"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="how long braid times each op in a round")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    problems = [torch_problem(shape) for shape in SHAPES]
    best = {}
    for _ in range(args.rounds):
        ours = braid_times(args.braid, args.threads, args.seconds)
        for shape, problem in zip(SHAPES, problems):
            theirs = torch_times(problem)
            for which, op in enumerate(("gdn_fwd", "gdn_bwd")):
                key = op, shape[0], shape[1]
                mine, other = best.get(key, (float("inf"), float("inf")))
                best[key] = min(mine, ours[key]), min(other, theirs[which])
    print(f"{'batch x rows, heads, dim':28} {'':8} {'braid ms':>9} {'torch ms':>9} {'ratio':>6}")
    for b, s, hk, hv, d in SHAPES:
        pairs = [best[op, b, s] for op in ("gdn_fwd", "gdn_bwd")]
        pairs.append(tuple(x + y for x, y in zip(*pairs)))
        for name, (mine, other) in zip(("forward", "backward", "both"), pairs):
            shape = f"{b} x {s}, {hk}/{hv}, {d}"
            print(f"{shape:28} {name:8} {1e3 * mine:9.1f} {1e3 * other:9.1f} {other / mine:6.2f}")


if __name__ == "__main__":
    main()
