#!/usr/bin/env python3
"""mHC's primitives on one GPU: braid next to Transformer Engine's Triton kernels and torch.compile, in turns.

  PEERS=folder speed_mhc_gpu.py --bench build/tests/gpu/bench_mhc_serve [--shapes 32768x7168,16384x2048] [--rounds 3] [--seconds 300] [--kinds te,compile] [--warm]

PEERS: a folder with Transformer Engine's sources (without it only PyTorch is measured). bf16 streams, 4 of them, 20 Sinkhorn iterations. Every time is the median
of single calls, each behind a write of 256 MB, so that the cache has nothing of its data; peers also behind a pause of the GPU that their host code
hides in. In every round each competitor runs for a fraction of a second, and a ratio is the median over rounds of neighbours in time. Backward of the peers is
torch.autograd with all gradients their kernels give. Bytes: what each op must move at least. Copy: 2 GiB by cudaMemcpy, read and written.
Ratio: the faster peer's time by ours; above 1 we are faster. "ok": not more than 3 % behind it.
--warm compiles the peers' kernels first, a process for each, side by side; what is measured after it tunes and times as without.
"""
import argparse
import math
import os
import statistics
import subprocess
import sys
import time

import torch

BF16, F32, N = torch.bfloat16, torch.float32, 4


class Braid:
    def __init__(self, path):
        self.p = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        self.p.stdin.write(line + "\n")
        self.p.stdin.flush()
        answer = self.p.stdout.readline().strip()
        if not answer or answer.startswith("not ok"):
            raise SystemExit(f"bench_mhc_serve, asked '{line}': {answer or 'no answer'}")
        return answer

    def run(self, op, ms):
        return float(self.ask(f"run {op} {ms}").split()[0])

    def close(self):
        self.p.stdin.write("quit\n")
        self.p.stdin.flush()
        self.p.wait(timeout=20)


class Clock:
    """The same way of timing as bench_mhc_serve's."""

    def __init__(self):
        self.flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def run(self, call, ms, clear=()):
        def once():
            for t in clear:
                t.grad = None
            self.flush.zero_()
            torch.cuda._sleep(600000)
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            call()
            last.record()
            return first, last

        for _ in range(3):
            pair = once()
        torch.cuda.synchronize()
        calls = int(max(5, min(200, ms / (pair[0].elapsed_time(pair[1]) + 0.1))))
        pairs = [once() for _ in range(calls)]
        torch.cuda.synchronize()
        return 1e3 * statistics.median(a.elapsed_time(b) for a, b in pairs)


# What torch.compile gets: the same formulas as in shared/peers/mhc_peers.py.
def sinkhorn(logits):
    m = torch.exp(logits - logits.amax(-1, keepdim=True))
    for _ in range(20):
        m = m / m.sum(-1, keepdim=True).clamp(min=1e-6)
        m = m / m.sum(-2, keepdim=True).clamp(min=1e-6)
    return m


def gates(p, rho, alpha, beta):
    z = p / (rho + 1e-6) * torch.cat([alpha[:1].expand(N), alpha[1:2].expand(N), alpha[2:].expand(N * N)]) + beta
    return torch.sigmoid(z[:, :N]), 2 * torch.sigmoid(z[:, N : 2 * N]), z[:, 2 * N :]


def aggregate(x, pre):
    return (x * pre.unsqueeze(-1)).sum(1)


def combine(res, x, post, f):
    return torch.matmul(res, x) + post.unsqueeze(-1) * f.unsqueeze(1)


def combine_bias(res, x, post, f, bias):
    return torch.matmul(res, x) + post.unsqueeze(-1) * (f + bias).unsqueeze(1)


def project(x, w):
    r = x.float().norm(dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
    return torch.nn.functional.linear(x, w).float(), 1.0 / (r + 1e-6)


class Peers:
    """Functions and their arguments, by op and kind."""

    def __init__(self, rows, d, kinds):
        new = lambda *shape, dtype=F32: torch.randn(*shape, device="cuda", dtype=dtype)
        self.x, self.f = new(rows, N, d, dtype=BF16), new(rows, d, dtype=BF16)
        bias, w = new(d, dtype=BF16), new(24, N * d) * 0.01
        logits, res = new(rows, N, N), torch.softmax(new(rows, N, N), -1)
        pre, post, p, rho = torch.rand(rows, N, device="cuda"), torch.rand(rows, N, device="cuda"), new(rows, 24), torch.rand(rows, 1, device="cuda") + 0.5
        self.calls = {}
        if "compile" in kinds:
            torch._dynamo.reset()
            half = lambda t: t.to(BF16)
            for op, fn, args in (("sinkhorn", sinkhorn, [logits]), ("gates", gates, [p, rho, torch.full((3,), 0.01, device="cuda"), torch.zeros(24, device="cuda")]),
                                 ("aggregate", aggregate, [self.x, half(pre)]), ("combine", combine, [half(res), self.x, half(post), self.f]),
                                 ("combine_bias", combine_bias, [half(res), self.x, half(post), self.f, bias]), ("project", project, [self.x.view(rows, N * d), half(w)])):
                self.calls[op, "compile"] = (torch.compile(fn, dynamic=False), args)
        if "te" in kinds:
            from transformer_engine.pytorch.triton import mhc as te
            xc, s = self.x.view(rows, 1, d, N), (rows, 1)
            h = torch.cat([p, torch.zeros(rows, 8, device="cuda")], 1)
            self.calls["sinkhorn", "te"] = (lambda l: te.mhc_fused_sinkhorn(l, N, True, 20), [logits.view(*s, N, N)])
            self.calls["gates", "te"] = (lambda *a: te.mhc_fused_scale(*a, N), [h, torch.full((3,), 0.01, device="cuda"), torch.zeros(1, 24, device="cuda"), rho.view(rows)])
            self.calls["aggregate", "te"] = (lambda x, g: te.mhc_fused_aggregate(x, g, N), [xc, pre.view(*s, N)])
            self.calls["combine", "te"] = (lambda f, g, x, r: te.mhc_fused_expand_combine(f, None, g, x, r, N), [self.f.view(*s, d), post.view(*s, N), xc, res.view(*s, N, N)])
            self.calls["combine_bias", "te"] = (lambda f, b, g, x, r: te.mhc_fused_expand_combine(f, b, g, x, r, N), [self.f.view(*s, d), bias, post.view(*s, N), xc, res.view(*s, N, N)])
            self.calls["project", "te"] = (lambda x, w: te.mhc_fused_projection(x, w, use_split_k=False), [self.x.view(rows, N * d), w])
            self.calls["project", "te split-K"] = (lambda x, w: te.mhc_fused_projection(x, w, use_split_k=True), [self.x.view(rows, N * d), w])

    def open(self, op, kind, way):
        """A call and what it must clear before."""
        fn, args = self.calls[op, kind]
        args = [t.detach().requires_grad_(way == "bwd") for t in args]
        if way == "fwd":
            def forward():
                with torch.no_grad():
                    fn(*args)
            forward()
            return forward, ()
        out = fn(*args)
        outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        grads = [torch.randn_like(o) for o in outs]
        backward = lambda: torch.autograd.backward(outs, grads, retain_graph=True)
        backward()
        return backward, args


def warm(a, kinds):
    """Fills the compilers' caches, for a third of the time at most."""
    jobs, deadline = [], time.monotonic() + a.seconds / 3
    for kind in kinds:
        for shape in a.shapes.split(","):
            for op, *_ in OPS:
                for name, way in [("te", "fwd"), ("te split-K", "fwd"), ("te", "bwd")] if kind == "te" else [("compile", "bwd")]:
                    if op in a.ops.split(",") and (op == "project" or name != "te split-K"):
                        jobs.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--bench", "none", "--shapes", shape, "--kinds", kind, "--warm-one", f"{op},{name},{way}"],
                                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for j in jobs:
        try:
            j.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            j.kill()


def warm_one(job, shape, kind):
    op, name, way = job.split(",")
    rows, d = map(int, shape.split("x"))
    if kind == "te":  # compiled code does not depend on the number of rows, and which of it is fastest is found out later
        tune_by(lambda call, quantiles=None: (call(), [1.0, 1.0, 1.0])[1])
        rows = 1024
    peers = Peers(rows, d, [kind])
    if name == "compile":
        peers.open(op, name, "fwd")
    peers.open(op, name, way)
    torch.cuda.synchronize()


def tune_by(bench):
    from triton.runtime import autotuner
    autotuner.Autotuner.do_bench = staticmethod(bench)


def tune_briefly():
    """Triton's tuning takes 125 ms for each of some hundred kernels; 25 are enough to tell them apart."""
    import triton
    tune_by(lambda call, quantiles=None: triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles))


# op, bytes in units of a stream (rows x C bf16) and of a float for each row: forward, backward
OPS = [("project", (4, 25), (8, 26)), ("combine", (9, 20), (14, 40)), ("combine_bias", (9, 20), (14, 40)), ("aggregate", (5, 4), (9, 8)),
       ("gates", (0, 49), (0, 74)), ("sinkhorn", (0, 32), (0, 48))]
BOUNDARY = [("boundary_fwd", 10, 74), ("boundary_fwd_ring", 10, 74), ("boundary_fwd_single", 10, 74), ("boundary_bwd", 15, 146),
            ("boundary_dw", 4, 50), ("boundary_dw_single", 4, 50), ("boundary_bwd_products", 15, 146), ("boundary_dw_products", 0, 50)]


def compare(braid, clock, rows, d, a, late):
    kinds = [k for k in a.kinds.split(",") if k]
    size = lambda u, c: 2.0 * rows * d * u + 4.0 * rows * c
    peers = Peers(rows, d, kinds)
    print(f"\n== {rows} x {d} ({braid.ask(f'shape {rows} {d}')[3:]} GiB of ours)")
    print(f"{'op':18s} {'ours us':>9s} {'TE us':>9s} {'compiled':>9s} {'ratio':>7s}        {'TB/s':>6s} {'of copy':>7s}")
    total = {"fwd": 0.0, "bwd": 0.0}
    for op, *moved in [o for o in OPS if o[0] in a.ops.split(",")]:
        for way, (u, c) in zip(("fwd", "bwd"), moved):
            names = [k for k in ("te", "te split-K", "compile") if (op, k) in peers.calls and not (k == "te split-K" and way == "bwd")]
            calls = {}
            for k in names:
                try:
                    if not late():
                        start = time.monotonic()
                        calls[k] = peers.open(op, k, way)
                        if a.verbose:
                            print(f"  {op} {way} {k}: ready after {time.monotonic() - start:.1f} s", flush=True)
                except Exception as e:  # a peer that refuses is a hole in the table, not the end of it
                    print(f"  {op} {way} {k}: {repr(e)[:160]}", flush=True)
            took = {k: [] for k in ["braid", "copy", *calls]}
            for r in range(a.rounds):
                order = list(took)
                for k in order[r % len(order):] + order[: r % len(order)]:
                    took[k].append(braid.run(f"{op}_{way}", a.ms) if k == "braid" else clock.run(clock.copy, a.ms) if k == "copy" else clock.run(*calls[k][:1], a.ms, calls[k][1]))
            calls.clear()
            torch.cuda.empty_cache()
            us = {k: statistics.median(v) for k, v in took.items()}
            te = min((us[k] for k in ("te", "te split-K") if k in us), default=None)
            rival = min((k for k in us if k not in ("braid", "copy")), key=lambda k: us[k], default=None)
            ratio = statistics.median(p / q for p, q in zip(took[rival], took["braid"])) if rival else 0
            rate, copy = size(u, c) / us["braid"] / 1e6, 4 * 2.0**30 / us["copy"] / 1e6
            if op != "combine_bias" and te is not None:
                total[way] += te
            cell = lambda v: f"{v:9.1f}" if v is not None else " " * 9
            print(f"{op + ' ' + way:18s} {us['braid']:9.1f} {cell(te)} {cell(us.get('compile'))} {ratio:7.3f} {'   ok  ' if ratio >= 0.97 else 'behind ' if rival else '       '}"
                  f"{rate:6.2f} {100 * rate / copy:6.1f} %", flush=True)
    for op, u, c in BOUNDARY:
        if op.endswith("_single") and "dw" not in op and (d % 256 != 0 or d > 4096):
            continue
        us = statistics.median(braid.run(op, a.ms) for _ in range(a.rounds))
        rate, copy = size(u, c) / us / 1e6, 4 * 2.0**30 / clock.run(clock.copy, a.ms) / 1e6
        print(f"{op:18s} {us:9.1f} {'':35s}{rate:6.2f} {100 * rate / copy:6.1f} %", flush=True)
    if total["fwd"] > 0:
        print(f"{'sum of TE':18s} {'':9s} {total['fwd']:9.1f} forward, {total['bwd']:.1f} backward with the gradient of w; without the norm, which the boundary has", flush=True)
    if d <= 2048:
        both = [(braid.run("rebuild", a.ms), braid.run("combines", a.ms)) for _ in range(a.rounds)]
        print("seven layers made again: %.1f us in one launch, %.1f in seven" % tuple(statistics.median(v) for v in zip(*both)), flush=True)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--bench", required=True)
    a.add_argument("--shapes", default="32768x7168,16384x2048")
    a.add_argument("--kinds", default="te,compile")
    a.add_argument("--ops", default=",".join(op for op, *_ in OPS))
    a.add_argument("--warm", action="store_true")
    a.add_argument("--warm-one", default="", help=argparse.SUPPRESS)
    a.add_argument("--verbose", action="store_true", help="how long peers take to compile and tune")
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--ms", type=float, default=25)
    a.add_argument("--seconds", type=float, default=300, help="after this no peer is started any more")
    a = a.parse_args()
    if "te" in a.kinds.split(","):
        sys.path.insert(0, os.environ["PEERS"]) if "PEERS" in os.environ else sys.exit("PEERS: a folder with Transformer Engine's sources; or --kinds compile")
    if a.warm_one:
        return warm_one(a.warm_one, a.shapes, a.kinds)
    begin = time.monotonic()
    if a.warm:
        warm(a, [k for k in a.kinds.split(",") if k])
        print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    if "te" in a.kinds.split(","):
        tune_briefly()
    clock, braid = Clock(), Braid(a.bench)
    late = lambda: time.monotonic() - begin > a.seconds
    old, new = torch.randn(1 << 30, device="cuda", dtype=BF16), torch.empty(1 << 30, device="cuda", dtype=BF16)
    clock.copy = lambda: new.copy_(old)
    torch.backends.cuda.matmul.allow_tf32 = True
    print(torch.cuda.get_device_name(0), "PyTorch", torch.__version__, "copy %.3f TB/s" % (4 * 2.0**30 / clock.run(clock.copy, 50) / 1e6))
    try:
        for shape in a.shapes.split(","):
            compare(braid, clock, *map(int, shape.split("x")), a, late)
            torch.cuda.empty_cache()
        print(f"\n{time.monotonic() - begin:.0f} s" + (", peers left out at the end" if late() else ""))
        braid.close()
    finally:
        if braid.p.poll() is None:
            braid.p.kill()


if __name__ == "__main__":
    main()
