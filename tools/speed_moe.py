#!/usr/bin/env python3
"""Speed of a mixture-of-experts layer on the CPU: braid next to PyTorch.

  speed_moe.py --braid build/braid     time both and print PyTorch / braid

The PyTorch side is what a careful user writes without a grouped kernel: softmax router, top-k, tokens sorted
by expert, one pair of matrix products per expert over its rows, SwiGLU times the probability, index_add back;
forward and backward, fp32. braid's side is the trace of a training run of the pattern E: the time of all
nodes of the layer in a step, forward, backward and weight gradients; embedding, norms and head are left out.
Both route to balanced experts. Medians count; best times and their ratio show whether the machine was busy.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import time

import torch
import torch.nn.functional as F

SHAPES = [  # tokens, hidden, expert width, experts, k
    (2048, 512, 256, 16, 4),
    (2048, 512, 128, 64, 8),
    (2048, 1024, 1024, 8, 2),
]


def torch_layer(shape, threads, repeats):
    t, d, f, e, k = shape
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    h = torch.randn(t, d, requires_grad=True)
    router = (torch.randn(e, d) * 0.02).requires_grad_()
    w1 = [(torch.randn(2 * f, d) * 0.02).requires_grad_() for _ in range(e)]
    w2 = [(torch.randn(d, f) * 0.02).requires_grad_() for _ in range(e)]
    dy = torch.randn(t, d)
    params = [h, router, *w1, *w2]

    def step():
        top, idx = (h @ router.T).topk(k, dim=-1)
        prob = top.softmax(-1)
        flat = idx.reshape(-1)
        order = flat.argsort(stable=True)
        rows, p = h[order // k], prob.reshape(-1)[order]
        counts = torch.bincount(flat, minlength=e).tolist()
        out, at = [], 0
        for i, n in enumerate(counts):
            if n > 0:
                gate, up = (rows[at : at + n] @ w1[i].T).chunk(2, dim=-1)
                out.append((F.silu(gate) * up * p[at : at + n, None]) @ w2[i].T)
            at += n
        y = torch.zeros_like(h).index_add(0, order // k, torch.cat(out))
        y.backward(dy)
        for x in params:
            x.grad = None

    step()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), min(times)


def braid_layer(braid, shape, threads, repeats):
    """Median and best over steps of the time of all nodes of the layer, from the trace of a training run."""
    t, d, f, e, k = shape
    with tempfile.TemporaryDirectory() as tmp:
        text, trace = os.path.join(tmp, "text.txt"), os.path.join(tmp, "trace.json")
        with open(text, "w", encoding="utf-8") as out:
            out.write("".join(chr(97 + (i * 7919 + i // 13) % 26) for i in range(200000)))
        options = {
            "model.pattern": "E", "model.hidden": d, "model.heads": 1, "model.experts": e, "model.topk": k,
            "model.expert_ffn": f, "model.router_force_balance": "on", "train.seq": t // 4, "train.micro_batch": 4,
            "train.steps": repeats + 1, "data.train": text, "run.threads": threads, "run.dir": os.path.join(tmp, "run"),
            "run.tensorboard": "off", "run.report": "off", "plan.trace": trace, "plan.trace_steps": repeats + 1,
        }  # fmt: skip
        args = [braid, "train"] + [f"--{name}={value}" for name, value in options.items()]
        subprocess.run(args, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(trace, encoding="utf-8") as f_in:
            events = json.load(f_in)
    events = events["traceEvents"] if isinstance(events, dict) else events
    spans = [x for x in events if x.get("ph") == "X"]
    steps, current = [], None
    for x in sorted(spans, key=lambda x: x["ts"]):
        if re.search(r"batch\.batch", x["name"]):
            current = 0.0
            steps.append(current)
        if steps and re.match(r"0\.moe\.", x["name"]) and "noise" not in x["name"]:
            steps[-1] += x["dur"]
    return statistics.median(steps[1:]) * 1e-6, min(steps[1:]) * 1e-6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--braid", default="build/braid")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--shape", action="append", default=[], help="tokens,hidden,width,experts,k")
    a = parser.parse_args()
    shapes = [tuple(int(x) for x in text.split(",")) for text in a.shape] or SHAPES
    print(f"{'tokens':>7} {'hidden':>7} {'width':>6} {'experts':>8} {'k':>3} | {'PyTorch ms':>10} {'best':>7} | {'braid ms':>9} {'best':>7} | "
          f"{'ratio':>6} {'best':>5}")  # fmt: skip
    for shape in shapes:
        theirs, their_best = torch_layer(shape, a.threads, a.repeats)
        ours, our_best = braid_layer(a.braid, shape, a.threads, a.repeats)
        t, d, f, e, k = shape
        print(f"{t:7} {d:7} {f:6} {e:8} {k:3} | {theirs * 1e3:10.1f} {their_best * 1e3:7.1f} | {ours * 1e3:9.1f} {our_best * 1e3:7.1f} | "
              f"{theirs / ours:6.2f} {their_best / our_best:5.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
