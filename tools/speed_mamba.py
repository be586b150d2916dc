#!/usr/bin/env python3
"""Speed of one Mamba-2 layer, forward and backward on two CPU threads: braid next to PyTorch.

  speed_mamba.py [--braid build/braid] [--turns 5]

The PyTorch side is what a careful user writes: fp32, eager mode, the chunked algorithm of the paper as batched matrix
products (C B^T once per group, decays by differences of running sums, states passed in a short loop over chunks), depthwise F.conv1d,
autograd for the backward pass. It is checked against the recurrence before it is timed. Both sides compute the same thing: the layer
with its projections, gradients of the input and of every parameter. braid's time is the sum of the layer's steps in one training step, read
from a trace (plan.trace), so that embedding, head and optimizer do not count. A turn is the best of three passes on either side.
Turns alternate, so that a busy machine hits both alike; medians and best turns are printed."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

from parity_mamba import recurrence

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CASES = [  # name, batch, seq, hidden, heads, width, groups, state, chunk
    ("hidden 320, as the demo", 16, 256, 320, 10, 64, 2, 64, 128),
    ("hidden 512, 8 groups", 4, 1024, 512, 16, 64, 8, 128, 128),
    ("hidden 1024, one group", 1, 2048, 1024, 32, 64, 1, 128, 128),
]


def chunked(x, dt, a_log, dt_bias, d, b, c, q):
    batch, seq, heads, width = x.shape
    groups, state, n = b.shape[2], b.shape[3], seq // q
    r = heads // groups
    delta = F.softplus(dt + dt_bias)
    s = (delta * -torch.exp(a_log)).view(batch, n, q, groups, r).permute(0, 1, 3, 4, 2).cumsum(-1)  # [B, n, G, r, q]
    xd = (x * delta[..., None]).view(batch, n, q, groups, r, width).permute(0, 1, 3, 4, 2, 5)  # [B, n, G, r, q, P]
    bc = b.view(batch, n, q, groups, state).permute(0, 1, 3, 2, 4)  # [B, n, G, q, N]
    cc = c.view(batch, n, q, groups, state).permute(0, 1, 3, 2, 4)
    causal = torch.ones(q, q, dtype=torch.bool).tril()
    decay = torch.exp((s[..., :, None] - s[..., None, :]).masked_fill(~causal, float("-inf")))  # [B, n, G, r, q, q]
    y = ((cc @ bc.transpose(-1, -2))[:, :, :, None] * decay) @ xd
    end = s[..., -1:]
    local = (bc[:, :, :, None] * torch.exp(end - s)[..., None]).transpose(-1, -2) @ xd  # [B, n, G, r, N, P]
    h, entering = torch.zeros_like(local[:, 0]), []
    for k in range(n):
        entering.append(h)
        h = torch.exp(end[:, k])[..., None] * h + local[:, k]
    y = y + (cc[:, :, :, None] * torch.exp(s)[..., None]) @ torch.stack(entering, 1)
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, seq, heads, width)
    return y + d[:, None] * x


class Mamba2(nn.Module):
    def __init__(self, hidden, heads, width, groups, state, chunk):
        super().__init__()
        self.sizes, self.chunk = (heads, width, groups, state), chunk
        self.inner, self.gn = heads * width, groups * state
        self.in_proj = nn.Linear(hidden, 2 * self.inner + 2 * self.gn + heads, bias=False)
        self.conv = nn.Conv1d(self.inner + 2 * self.gn, self.inner + 2 * self.gn, 4, groups=self.inner + 2 * self.gn, padding=3)
        self.a_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.full((heads,), -3.0))
        self.d, self.norm = nn.Parameter(torch.ones(heads)), nn.Parameter(torch.ones(self.inner))
        self.out_proj = nn.Linear(self.inner, hidden, bias=False)

    def forward(self, u):
        heads, width, groups, state = self.sizes
        batch, seq, _ = u.shape
        z, xbc, dt = self.in_proj(u).split([self.inner, self.inner + 2 * self.gn, heads], dim=-1)
        xbc = F.silu(self.conv(xbc.transpose(1, 2))[..., :seq].transpose(1, 2))
        x, b, c = xbc.split([self.inner, self.gn, self.gn], dim=-1)
        y = chunked(x.reshape(batch, seq, heads, width), dt, self.a_log, self.dt_bias, self.d, b.reshape(batch, seq, groups, state),
                    c.reshape(batch, seq, groups, state), self.chunk)
        v = (y.reshape(batch, seq, -1) * F.silu(z)).reshape(batch, seq, groups, -1)
        v = F.rms_norm(v, (v.shape[-1],), eps=1e-5).reshape(batch, seq, -1)
        return self.out_proj(v * self.norm)


def check_chunked():
    torch.manual_seed(0)
    t = [torch.randn(s, dtype=torch.float64) for s in ((2, 64, 4, 8), (2, 64, 4), (4,), (4,), (4,), (2, 64, 2, 6), (2, 64, 2, 6))]
    wrong = (chunked(*t, 16) - recurrence(*t)[0]).abs().max().item()
    if wrong > 1e-10:
        sys.exit(f"the PyTorch side is off by {wrong}")


def torch_turn(layer, u, grad):
    layer.zero_grad(set_to_none=True)
    u.grad = None
    begin = time.perf_counter()
    layer(u).backward(grad)
    return time.perf_counter() - begin


def braid_turn(braid, case, folder):
    """Seconds per step in the steps of the layer, from a trace of a few training steps."""
    _, batch, seq, hidden, heads, width, groups, state, chunk = case
    trace, data = os.path.join(folder, "trace.json"), os.path.join(folder, "text.txt")
    with open(data, "w") as f:
        f.write("the quick brown fox jumps over the lazy dog. " * (4 * batch * seq // 40 + 100))
    steps = 4
    words = ["train", "--model.pattern=M", f"--model.hidden={hidden}", "--model.heads=1", f"--model.mamba_heads={heads}",
             f"--model.mamba_head_dim={width}", f"--model.mamba_groups={groups}", f"--model.mamba_state={state}",
             f"--model.mamba_chunk={chunk}", f"--train.seq={seq}", f"--train.micro_batch={batch}", f"--train.steps={steps}",
             f"--data.train={data}", "--run.threads=2", "--run.quiet=on", f"--plan.trace={trace}", f"--plan.trace_steps={steps}"]
    done = subprocess.run([braid, *words], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"braid {' '.join(words)}\n{done.stderr}")
    with open(trace) as f:
        events = json.load(f)
    events = events["traceEvents"] if isinstance(events, dict) else events
    spent = {}
    for e in events:
        if e.get("ph") == "X" and ".mamba." in "." + e["name"]:
            spent.setdefault(e["name"], []).append(e["dur"] / 1e6)
    if not spent:
        sys.exit(f"the trace names no step of the layer: {sorted({e['name'] for e in events})[:20]}")
    # The first step warms up; of the others the best counts as a whole, like PyTorch's best of three.
    k = min(range(1, steps), key=lambda i: sum(v[i] for v in spent.values()))
    return sum(v[k] for v in spent.values()), {name: v[k] for name, v in spent.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--braid", default=os.path.join(ROOT, "build", "braid"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", action="store_true", help="show where braid's time goes")
    options = parser.parse_args()
    torch.set_num_threads(2)
    check_chunked()
    print("| layer | tokens | PyTorch ms (best) | braid ms (best) | braid / PyTorch, medians (best) |\n|---|---|---|---|---|")
    for case in CASES:
        name, batch, seq, hidden, heads, width, groups, state, chunk = case
        layer = Mamba2(hidden, heads, width, groups, state, chunk)
        u, grad = torch.randn(batch, seq, hidden, requires_grad=True), torch.randn(batch, seq, hidden)
        theirs, ours = [], []
        torch_turn(layer, u, grad)
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(options.turns):
                theirs.append(min(torch_turn(layer, u, grad) for _ in range(3)))
                seconds, detail = braid_turn(options.braid, case, folder)
                ours.append(seconds)
        a, b = statistics.median(theirs), statistics.median(ours)
        print(f"| {name} | {batch * seq} | {a * 1e3:.1f} ({min(theirs) * 1e3:.1f}) | {b * 1e3:.1f} ({min(ours) * 1e3:.1f}) | "
              f"{a / b:.2f} ({min(theirs) / min(ours):.2f}) |", flush=True)
        for step, t in detail.items() if options.steps else ():
            print(f"  {step:<24} {t * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
