#!/usr/bin/env python3
"""mHC on one GPU: the boundary's share of the copy rate, and every primitive beside Transformer Engine's Triton kernels and torch.compile, in one run.

  PEERS=folder speed_mhc_gpu.py --bench build/tests/gpu/bench_mhc [--shapes 32768x7168,...] [--kinds te,compile] [--cache folder] [--compile seconds] [--seconds 300]

PEERS: a folder with Transformer Engine's sources (--kinds compile does without). bf16 streams, 4 of them, 20 Sinkhorn iterations, random data.

First the peers' kernels are compiled into --cache, all processors at it, until --compile seconds are over (0: not at all); a cache that is there is used. Then, each line as
soon as it is known: the copy rate (2 GiB by PyTorch's copy, read and written); the boundary at every shape; the primitives at every shape, beside the peers.

Boundary: calls one after the other on alternating buffers, median of rounds; bytes are each tensor once. Backward is with the gradients of all parameters.
Primitives: the median of single calls, each behind a write of 256 MB, so that the cache has nothing of its data; peers also behind a pause of the GPU that
their host code hides in. In every round each competitor runs for a fraction of a second, and a ratio is the median over rounds of neighbours in time.
The peers' backward is torch.autograd with all gradients their kernels give. Ratio: the faster peer's time by ours; above 1 we are faster. "ok": not more than 3 %
behind it. "in a row": ours as the boundary is timed, with its share of the copy rate.

Tuning: Transformer Engine's kernels are tuned by Triton's autotuner, with their own lists of forms and Triton's own way of timing (25 ms and 100 ms a form), at the shape
they are measured at. The projection is measured with and without split K, the faster counts. torch.compile: mode "default", static shapes, TF32 allowed.
"""
import argparse
import hashlib
import math
import os
import statistics
import subprocess
import sys
import time

N = 4
# op: what of each is measured
OPS = ["project", "combine", "combine_bias", "aggregate", "gates", "sinkhorn"]
BOUNDARY = [("boundary_fwd", "boundary forward"), ("boundary_back", "boundary backward, parameters"),
            ("boundary_back_graph", "  as a captured graph"), ("boundary_bwd", "  streams alone"), ("boundary_dw", "  parameters alone")]


class Braid:
    """Times from bench_mhc."""

    def __init__(self, path):
        self.p = subprocess.Popen([path, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        self.p.stdin.write(line + "\n")
        self.p.stdin.flush()
        answer = self.p.stdout.readline().strip()
        if not answer or answer.startswith("not ok"):
            raise SystemExit(f"bench_mhc, asked '{line}': {answer or 'no answer'}")
        return answer

    def cold(self, op, ms):
        return float(self.ask(f"run {op} {ms}").split()[0])

    def row(self, op, ms):
        """Microseconds and bytes."""
        us, _, moved = self.ask(f"row {op} {ms}").split()
        return float(us), float(moved)

    def close(self):
        self.p.stdin.write("quit\n")
        self.p.stdin.flush()
        self.p.wait(timeout=20)


class Clock:
    """The same way of timing as bench_mhc's of single calls."""

    def __init__(self):
        self.flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
        old, new = torch.randn(1 << 30, device="cuda", dtype=BF16), torch.empty(1 << 30, device="cuda", dtype=BF16)
        self.copy = lambda: new.copy_(old)

    def copy_rate(self, ms):
        return 4 * 2.0**30 / self.run(self.copy, ms) / 1e6

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


# What torch.compile gets: the same formulas as in the peers' script mhc_peers.py.
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
    """Functions and their arguments, by op and kind, for the ops asked for."""

    def __init__(self, rows, d, kinds, ops=tuple(OPS)):
        new = lambda *shape, dtype=F32: torch.randn(*shape, device="cuda", dtype=dtype)
        if set(ops) - {"sinkhorn", "gates"}:
            self.x, self.f, w = new(rows, N, d, dtype=BF16), new(rows, d, dtype=BF16), new(24, N * d) * 0.01
        else:
            self.x, self.f, w = new(rows, N, 1, dtype=BF16), new(rows, 1, dtype=BF16), new(24, N)
            d = 1
        bias = new(d, dtype=BF16)
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


# ---- compiling ahead: fills the compilers' caches, measures nothing ------------------------------------------------------------------


def compile_te(claims, shapes):
    """Compiles forms of Transformer Engine's kernels that no other process has claimed; nothing is launched. The number of rows does not matter to the code."""
    from triton.runtime import autotuner

    def compile_only(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        kwargs["warmup"] = True
        for form in self.prune_configs(kwargs):
            what = [self.base_fn.__name__, str(form), {k: getattr(v, "dtype", v) for k, v in kwargs.items() if k != "grid"}]
            mine = os.path.join(claims, hashlib.sha256(repr(what).encode()).hexdigest())
            try:
                os.close(os.open(mine, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            try:
                self.fn.run(*args, **kwargs, **form.all_kwargs())
            except Exception as e:  # a form that the machine has no room for: tuning will pass it by too
                print(f"  {self.base_fn.__name__} {form}: {repr(e)[:120]}", flush=True)

    autotuner.Autotuner.run = compile_only
    for rows, d in shapes:
        peers = Peers(1024, d, ["te"])
        for op, kind in peers.calls:
            peers.open(op, kind, "bwd")


def compile_torch(claims, shapes, op, way):
    for rows, d in shapes:
        Peers(rows, d, ["compile"], (op,)).open(op, "compile", way)
        torch.cuda.synchronize()
        open(os.path.join(claims, f"torch {op} {way} {rows} {d}"), "w").close()
        torch.cuda.empty_cache()


def compile_job(a):
    """What a process that compile_start started does."""
    start = time.monotonic()
    if a.job == "te":
        compile_te(a.claims, a.beside)
    else:
        compile_torch(a.claims, a.beside, *a.job.split(","))
    if a.verbose:
        print(f"  compiled {a.job} in {time.monotonic() - start:.1f} s after {start - a.begin:.1f} s of imports", flush=True)


def compile_start(a):
    """Processes of their own, because a GPU cannot be shared with one that was forked; begun before this one has even imported PyTorch."""
    a.claims = os.path.join(a.cache, f"claims-{os.getpid()}")
    os.makedirs(a.claims)
    jobs = [f"{op},{way}" for op in reversed(a.ops) for way in ("bwd", "fwd") if "compile" in a.kinds] + ["te" for _ in range((os.cpu_count() + 1) // 2) if "te" in a.kinds]
    return [subprocess.Popen([sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--job", j, "--claims", a.claims]) for j in jobs]


def compile_end(a, jobs):
    for j in jobs:
        try:
            j.wait(max(0.0, a.begin + a.compile - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
    cut = [j for j in jobs if j.poll() is None]
    for j in cut:
        j.kill()
    for j in jobs:
        j.wait()
    print(f"compiled until {time.monotonic() - a.begin:.0f} s: {len(os.listdir(a.claims))} kernels and graphs, {len(cut)} of {len(jobs)} processes cut short, "
          f"{sum(j.returncode != 0 for j in jobs) - len(cut)} failed", flush=True)


# ---- measuring -----------------------------------------------------------------------------------------------------------------------


def boundaries(braid, clock, shapes, a):
    print(f"\n| {'boundary':31s} | {'tokens x C':>14s} | {'us':>9s} | {'MB':>9s} | {'TB/s':>6s} | {'% copy':>6s} |\n|---|---|---|---|---|---|", flush=True)
    for rows, d in shapes:
        braid.ask(f"shape {rows} {d}")
        for op, name in BOUNDARY:
            took = [braid.row(op, a.ms) for _ in range(a.rounds)]
            us, moved = statistics.median(us for us, _ in took), took[0][1]
            print(f"| {name:31s} | {f'{rows} x {d}':>14s} | {us:9.1f} | {moved / 1e6:9.1f} | {moved / us / 1e6:6.2f} | {100 * moved / us / 1e6 / clock.copy_rate(a.ms):6.1f} |", flush=True)


def turns(braid, clock, calls, op, a):
    """Times of everyone, a list each, round by round."""
    took = {k: [] for k in ["braid", "copy", *calls]}
    for r in range(a.rounds):
        order = list(took)
        for k in order[r % len(order) :] + order[: r % len(order)]:
            took[k].append(braid.cold(op, a.ms) if k == "braid" else clock.run(clock.copy, a.ms) if k == "copy" else clock.run(calls[k][0], a.ms, calls[k][1]))
    return took


def open_peers(peers, op, way, late, verbose):
    calls = {}
    for k in ("te", "te split-K", "compile"):
        if (op, k) not in peers.calls or (k == "te split-K" and way == "bwd") or late():
            continue
        try:
            start = time.monotonic()
            calls[k] = peers.open(op, k, way)
            torch.cuda.synchronize()
            if verbose:
                print(f"  {op} {way} {k}: ready after {time.monotonic() - start:.1f} s", flush=True)
        except Exception as e:  # a peer that refuses is a hole in the table, not the end of it
            print(f"  {op} {way} {k}: {repr(e)[:160]}", flush=True)
    return calls


def primitives(braid, clock, rows, d, a, late, verdict):
    peers = Peers(rows, d, a.kinds, a.ops)
    braid.ask(f"shape {rows} {d}")
    print(f"\n| {f'{rows} x {d}':16s} | {'ours us':>9s} | {'TE us':>9s} | {'compiled':>9s} | {'ratio':>6s} | {'':6s} | {'in a row':>9s} | {'MB':>8s} | {'TB/s':>6s} | {'% copy':>6s} |\n|---|---|---|---|---|---|---|---|---|---|", flush=True)
    total = {"fwd": 0.0, "bwd": 0.0}
    cell = lambda v: f"{v:9.1f}" if v is not None else f"{'-':>9s}"
    for op in a.ops:
        for way in ("fwd", "bwd"):
            calls = open_peers(peers, op, way, late, a.verbose)
            took = turns(braid, clock, calls, f"{op}_{way}", a)
            calls.clear()
            torch.cuda.empty_cache()
            us = {k: statistics.median(v) for k, v in took.items()}
            te = min((us[k] for k in ("te", "te split-K") if k in us), default=None)
            rival = min((k for k in us if k not in ("braid", "copy")), key=lambda k: us[k], default=None)
            ratio = statistics.median(p / q for p, q in zip(took[rival], took["braid"])) if rival else None
            in_row, moved = braid.row(f"{op}_{way}", a.ms)
            rate = moved / in_row / 1e6
            if op != "combine_bias" and te is not None:
                total[way] += te
            verdict.append((rows, d, op, way, us["braid"], te, us.get("compile"), ratio))
            print(f"| {op + ' ' + way:16s} | {us['braid']:9.1f} | {cell(te)} | {cell(us.get('compile'))} | {f'{ratio:6.3f}' if ratio else '     -'} | "
                  f"{'ok' if ratio and ratio >= 0.97 else 'behind' if ratio else 'alone':6s} | {in_row:9.1f} | {moved / 1e6:8.1f} | {rate:6.2f} | {100 * rate * us['copy'] * 1e6 / (4 * 2.0**30):6.1f} |", flush=True)
    if total["fwd"] > 0:
        print(f"sum of TE: {total['fwd']:.1f} us forward, {total['bwd']:.1f} backward with the gradient of w; without the norm, which the boundary has", flush=True)


def closing(verdict, late):
    compared = [v for v in verdict if v[7]]
    behind = [f"{op} {way} at {rows} x {d} ({ratio:.3f})" for rows, d, op, way, *_, ratio in compared if ratio < 0.97]
    print(f"\nprimitives beside a peer: {len(compared)} of {len(verdict)}; more than 3 % behind the faster one: {', '.join(behind) or 'none'}")
    for rows, d, op, way, ours, te, *_ in verdict:
        if op == "project" and way == "bwd" and te is not None:
            print(f"projection backward at {rows} x {d}: {te / ours:.2f} times Transformer Engine's speed, 2 asked for")
    for shape in {v[:2] for v in verdict if v[0] == 32768}:
        both = [v[4] for v in verdict if v[:2] == shape and v[2] == "sinkhorn"]
        if len(both) == 2:
            print(f"Sinkhorn forward and backward, 32768 tokens: {sum(both):.1f} us, less than 60 asked for")
    if late():
        print("late: peers were left out at the end")


def options():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--bench", help="bench_mhc; without it peers are compiled and no more")
    a.add_argument("--shapes", default="32768x7168,16384x2048,8192x4096", help="of the boundary")
    a.add_argument("--beside", default=None, help="shapes of the primitives; the same if not given")
    a.add_argument("--kinds", default="te,compile")
    a.add_argument("--ops", default=",".join(OPS))
    a.add_argument("--cache", default=os.path.join(os.path.expanduser("~"), ".cache", "braid-peers"))
    a.add_argument("--compile", type=float, default=120)
    a.add_argument("--verbose", action="store_true", help="how long peers take to load and tune")
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--ms", type=float, default=25)
    a.add_argument("--seconds", type=float, default=300, help="after this no peer is started any more")
    a.add_argument("--job", help=argparse.SUPPRESS)
    a.add_argument("--claims", help=argparse.SUPPRESS)
    a = a.parse_args()
    a.begin = time.monotonic()
    a.cache = os.path.abspath(a.cache)
    a.shapes = [tuple(map(int, s.split("x"))) for s in a.shapes.split(",")]
    a.beside = [tuple(map(int, s.split("x"))) for s in a.beside.split(",")] if a.beside else a.shapes
    a.kinds, a.ops = [k for k in a.kinds.split(",") if k], a.ops.split(",")
    if "te" in a.kinds:
        sys.path.insert(0, os.environ["PEERS"]) if "PEERS" in os.environ else sys.exit("PEERS: a folder with Transformer Engine's sources; or --kinds compile")
    return a


def main(a):
    late = lambda: time.monotonic() - a.begin > a.seconds
    clock, braid, verdict = Clock(), Braid(a.bench), []
    try:
        print(f"{torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}, copy {clock.copy_rate(100):.3f} TB/s", flush=True)
        boundaries(braid, clock, a.shapes, a)
        for rows, d in a.beside:
            primitives(braid, clock, rows, d, a, late, verdict)
            torch.cuda.empty_cache()
        closing(verdict, late)
        print(f"{time.monotonic() - a.begin:.0f} s")
        braid.close()
    finally:
        if braid.p.poll() is None:
            braid.p.kill()


if __name__ == "__main__":
    OPTIONS = options()
    os.environ["TRITON_CACHE_DIR"] = os.path.join(OPTIONS.cache, "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(OPTIONS.cache, "inductor")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the same in every process: it is part of what the cache is looked up by
    JOBS = compile_start(OPTIONS) if OPTIONS.compile > 0 and OPTIONS.kinds and not OPTIONS.job else []
    import torch
    import torch._inductor.config

    torch._inductor.config.autotune_local_cache = False  # what is fastest is found out when nothing else runs, not while all processors compile
    torch.backends.cuda.matmul.allow_tf32 = True
    BF16, F32 = torch.bfloat16, torch.float32
    if OPTIONS.job:
        compile_job(OPTIONS)
        sys.exit()
    if OPTIONS.verbose:
        print(f"PyTorch imported after {time.monotonic() - OPTIONS.begin:.1f} s", flush=True)
    if JOBS:
        compile_end(OPTIONS, JOBS)
    if OPTIONS.bench:
        main(OPTIONS)
