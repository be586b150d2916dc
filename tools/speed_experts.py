#!/usr/bin/env python3
"""The MLP of experts on one GPU: braid next to PyTorch, in turns.

  speed_experts.py --bench build/tests/gpu/bench_experts [--seconds 85] [--rounds 3] [--peers ops_peers.py]

Two tables. With --peers, a file with grouped(experts, hidden, width, rows, name) that times PyTorch by triton.testing.do_bench and
prints: that function, as it is and for its shapes in its order (so torch.compile sees the second and third as dynamic), and braid before and after
each, by the same protocol: warm-up of 30 ms, 150 ms, 256 MB of zeros before every call, median.

Then turns. Both programs keep their data on the GPU and take turns: in every round each competitor runs for a fraction of a second to get hot and as
long again to be timed, the order moves on by one from round to round, and a ratio is taken between neighbours in time, so that a clock that falls with heat falls on all.
PyTorch: grouped_mm and a SwiGLU times probability compiled for the one shape, gradients in bf16; times of single calls, one after the
other, as in a step ("alone": by do_bench). braid: bench_experts, gradients of weights in fp32, written. Rates count useful work: 6 (forward) and 12 (backward) x rows x hidden x width.
Clock and power are what nvidia-smi sees during a block; MHz of braid's own is measured on the GPU right after the block, and "of peak" is the share of
what tensor cores can do at that clock (4096 a cycle and multiprocessor). The dense product has the size of fc1, by cuBLAS.
Stops beginning new measurements after --seconds; what matters most comes first.
"""
import argparse
import contextlib
import importlib.util
import io
import os
import re
import statistics
import subprocess
import threading
import time

import torch
import torch.nn.functional as F

BF16 = torch.bfloat16


def ragged(experts, rows):
    torch.manual_seed(experts)
    weight = torch.rand(experts) * 0.5 + 0.75
    return torch.multinomial(weight, rows, replacement=True).bincount(minlength=experts).tolist()


def skewed(experts, rows):
    weight = 1.0 / (torch.arange(experts) + 1.0)
    counts = (weight / weight.sum() * rows).long()
    counts[0] += rows - counts.sum()
    return counts.tolist()


OLMOE = (64, 2048, 1024)
MAIN = [
    ("DSv3 4 x (7168, 2048), 32768 rows", 4, 7168, 2048, ragged(4, 32768)),
    ("Qwen3-30B 128 x (2048, 768), 131072 rows", 128, 2048, 768, ragged(128, 131072)),
    ("OLMoE 64 x (2048, 1024), 131072 rows", *OLMOE, ragged(64, 131072)),
]
OTHERS = [
    ("one hot expert: OLMoE, 124772 of the rows", *OLMOE, [124772] + [100] * 63),
    ("skewed counts: OLMoE, as 1 / (i + 1)", *OLMOE, skewed(64, 131072)),
    ("half of the experts without rows: OLMoE", *OLMOE, [c for n in ragged(32, 131072) for c in (n, 0)]),
    ("256 experts of 64 rows (2048, 1024)", 256, 2048, 1024, [64] * 256),
]
WAYS = ["torch", "fused", "apart"]
PARTS = [("fc1", 2), ("up", 2), ("fc2", 1), ("dfc2", 1), ("down", 1), ("dx", 2), ("dw1", 2), ("dw2", 1)]  # useful products of rows x hidden x width


class Braid:
    def __init__(self, path):
        self.p = subprocess.Popen([path, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        self.p.stdin.write(line + "\n")
        self.p.stdin.flush()
        answer = self.p.stdout.readline().strip()
        if not answer or answer.startswith("not ok"):
            raise SystemExit(f"bench_experts, asked '{line[:60]}': {answer or 'no answer'}")
        return answer

    def shape(self, experts, hidden, width, counts):
        return self.ask("shape %d %d %d %s" % (experts, hidden, width, " ".join(map(str, counts))))

    def run(self, what, way, ms):  # microseconds, MHz
        us, mhz, _ = self.ask(f"run {what} {way} {ms}").split()
        return float(us), float(mhz)

    def bench(self, what, way, ms=150):
        us, mhz, _ = self.ask(f"bench {what} {way} {ms}").split()
        return float(us), float(mhz)

    def close(self):
        self.p.stdin.write("quit\n")
        self.p.stdin.flush()
        self.p.wait(timeout=20)


class Peer:
    compiled = None, None  # for which rows and width, the activation

    def __init__(self, experts, hidden, width, counts):
        dev, rows = "cuda", sum(counts)
        self.x = torch.randn(rows, hidden, device=dev, dtype=BF16, requires_grad=True)
        self.w1 = (torch.randn(experts, hidden, 2 * width, device=dev, dtype=BF16) * 0.02).requires_grad_()
        self.w2 = (torch.randn(experts, width, hidden, device=dev, dtype=BF16) * 0.02).requires_grad_()
        self.p = torch.rand(rows, 1, device=dev, dtype=torch.float32, requires_grad=True)
        self.offs = torch.tensor(counts, device=dev).cumsum(0).to(torch.int32)
        self.gm = getattr(F, "grouped_mm", None) or torch._grouped_mm

        def act(h, p):
            return (F.silu(h[:, :width].float()) * h[:, width:].float() * p).to(BF16)

        if Peer.compiled[0] != (rows, width):
            torch._dynamo.reset()
            Peer.compiled = (rows, width), torch.compile(act)
        self.act = Peer.compiled[1]
        self.y = self.forward()
        self.g = torch.randn_like(self.y)
        self.backward()
        self.dense = torch.randn(hidden, 2 * width, device=dev, dtype=BF16)
        torch.cuda.synchronize()

    def forward(self):
        return self.gm(self.act(self.gm(self.x, self.w1, offs=self.offs), self.p), self.w2, offs=self.offs)

    def no_grad(self):
        with torch.no_grad():
            self.forward()

    def again(self):
        torch.autograd.backward(self.y, self.g, retain_graph=True)

    def backward(self):
        for t in (self.x, self.w1, self.w2, self.p):
            t.grad = None
        self.again()

    def product(self):
        with torch.no_grad():
            self.x @ self.dense

    def alone(self, what):
        import triton
        call, grads = {"fwd": (self.no_grad, None), "bwd": (self.again, [self.x, self.w1, self.w2, self.p])}[what]
        return 1e3 * triton.testing.do_bench(call, warmup=30, rep=150, grad_to_none=grads, return_mode="median")

    def run(self, what, ms):
        call = {"fwd": self.no_grad, "bwd": self.backward, "dense": self.product}[what]
        for _ in range(2):
            call()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        n = max(5, min(1000, int(ms / max(first.elapsed_time(last), 0.001))))
        at = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        at[0].record()
        for i in range(n):
            call()
            at[i + 1].record()
        torch.cuda.synchronize()
        return 1e3 * statistics.median(at[i].elapsed_time(at[i + 1]) for i in range(n))


class Watch:
    """Clock and power, ten times a second."""

    FIELDS = "clocks.sm,power.draw,temperature.gpu"

    def __init__(self):
        self.seen = []
        try:
            self.p = subprocess.Popen(["nvidia-smi", "--query-gpu=" + self.FIELDS, "--format=csv,noheader,nounits", "-lms", "100"],
                                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self.read, daemon=True).start()
        except OSError:
            self.p = None

    def read(self):
        for line in self.p.stdout:
            try:
                self.seen.append((time.monotonic(), *[float(v) for v in line.split(",")]))
            except ValueError:
                pass

    def between(self, t0, t1):
        some = [s for s in self.seen if t0 + 0.05 <= s[0] <= t1 + 0.1]
        return tuple(statistics.mean(s[i] for s in some) for i in (1, 2, 3)) if some else (0.0, 0.0, 0.0)

    def close(self):
        if self.p is not None:
            self.p.terminate()


def compare(braid, watch, shape, ways, rounds, ms, late, sms):
    name, experts, hidden, width, counts = shape
    rows = sum(counts)
    peer = Peer(experts, hidden, width, counts)
    gib = braid.shape(experts, hidden, width, counts)
    flops = {"fwd": 6 * rows * hidden * width, "bwd": 12 * rows * hidden * width}
    took = {(w, d): [] for w in ways for d in flops}
    notes = {w: [] for w in ways}
    dense = []
    for k in range(rounds):
        if k > 0 and late():
            break
        for i in range(len(ways)):
            way = ways[(i + k) % len(ways)]
            t0 = time.monotonic()
            for d in flops:
                for _ in range(2):  # the first to be as hot as the others
                    us, mhz = (peer.run(d, ms), 0.0) if way == "torch" else braid.run(d, way, ms)
                took[way, d].append((us, mhz))
            notes[way].append(watch.between(t0, time.monotonic()))
        dense.append(peer.run("dense", ms / 3))
    rate = statistics.median(2 * rows * hidden * 2 * width / us / 1e6 for us in dense)
    print(f"\n== {name} ({gib[3:]} GiB of ours; dense product of fc1's size {rate:.0f} TFLOP/s)")
    for way in ways:
        cells = []
        for d in flops:
            times = [us for us, _ in took[way, d]]
            base = [us for us, _ in took["torch", d]]
            ratios = sorted(p / u for p, u in zip(base, times))
            us = statistics.median(times)
            text = f"{d} {us:8.1f} us {flops[d] / us / 1e6:4.0f} TFLOP/s"
            if way != "torch":
                mhz = statistics.median(m for _, m in took[way, d])
                share = flops[d] / (us * mhz * sms * 4096) if mhz > 0 else 0
                text += f"  {statistics.median(ratios):.3f} ({ratios[0]:.3f} - {ratios[-1]:.3f})  {mhz:4.0f} MHz {100 * share:2.0f} % of peak"
            cells.append(text)
        seen = [n for n in notes[way] if n[0] > 0]
        smi = " | smi %.0f MHz %.0f W %.0f C" % tuple(statistics.mean(n[i] for n in seen) for i in range(3)) if seen else ""
        print(f"{way:6s} " + "   ".join(cells) + smi, flush=True)
    if shape in MAIN and not late():
        alone = {d: peer.alone(d) for d in flops}
        print("alone  " + "   ".join(f"{d} {us:8.1f} us {flops[d] / us / 1e6:4.0f} TFLOP/s" for d, us in alone.items()), flush=True)
    del peer
    torch.cuda.empty_cache()


def peers_file(path):
    """The file's functions; what it would measure when run is left out."""
    os.environ["ONLY"] = "nothing"
    spec = importlib.util.spec_from_file_location("peers", path)
    module = importlib.util.module_from_spec(spec)
    with contextlib.redirect_stdout(io.StringIO()):
        spec.loader.exec_module(module)
    return module


def rested(bench, rest):
    """The file's timer, from a card that had nothing to do for a while after the first call (which compiles)."""
    def timer(f, *a):
        f()
        torch.cuda.synchronize()
        time.sleep(rest)
        return bench(f, *a)
    return timer


def peer_times(module, experts, hidden, width, rows):
    """Microseconds that grouped() prints, by name."""
    lines = []
    module.say = lambda *a: lines.append(" ".join(map(str, a)))
    module.grouped(experts, hidden, width, rows, "")
    found = {}
    for line in lines:
        both = re.search(r"(eager|compiled act) +fwd +([\d.]+) ms.* bwd +([\d.]+) ms", line)
        one = re.search(r"(fc1 alone|dense).*? ([\d.]+) ms", line)
        if both:
            found[both[1], "fwd"], found[both[1], "bwd"] = 1e3 * float(both[2]), 1e3 * float(both[3])
        elif one:
            found[one[1]] = 1e3 * float(one[2])
        else:
            raise SystemExit("ops_peers: " + line)
    return found


def as_peers(braid, path, ways, rounds, rest, late):
    """Each round is one run of the file's shapes, in a fresh torch.compile. Every measurement, theirs and ours, follows the same pause: at the power
    limit whoever comes after one is up to 10 % faster, and PyTorch compiles right before its own."""
    module, seen = peers_file(path), {}
    module.bench = rested(module.bench, rest)

    def timed(d, w):
        time.sleep(rest)
        return braid.bench(d, w)

    for _ in range(rounds):
        if seen and late():
            break
        torch._dynamo.reset()
        for shape in MAIN:
            name, experts, hidden, width, counts = shape
            took = seen.setdefault(name, {})
            braid.shape(experts, hidden, width, counts)
            ours = lambda: [took.setdefault((w, d), []).append(timed(d, w)) for w in ways for d in ("fwd", "bwd")]
            ours()
            for key, us in peer_times(module, experts, hidden, width, sum(counts)).items():
                took.setdefault(key, []).append(us)
            torch.cuda.empty_cache()
            ours()
            print(f"{name}, us: torch %.0f / %.0f; " % tuple(took["compiled act", d][-1] for d in ("fwd", "bwd")) +
                  "; ".join(w + " before and after %.0f, %.0f / %.0f, %.0f" % tuple(u for d in ("fwd", "bwd") for u, _ in took[w, d][-2:]) for w in ways), flush=True)
    for shape in MAIN:
        name, experts, hidden, width, counts = shape
        unit, took = 2 * sum(counts) * hidden * width, seen[name]
        rate = lambda us, products: products * unit / us / 1e6
        mid = statistics.median
        base = {d: mid(took["compiled act", d]) for d in ("fwd", "bwd")}
        print(f"\n== as ops_peers: {name}; fc1 alone {rate(mid(took['fc1 alone']), 2):.0f}, dense {rate(mid(took['dense']), 2):.0f} TFLOP/s")
        for key in ("eager", "compiled act"):
            print(f"torch {key:13s} " + "   ".join(f"{d} {mid(took[key, d]):7.0f} us {rate(mid(took[key, d]), n):4.0f}" for d, n in (("fwd", 3), ("bwd", 6))))
        for w in ways:
            cells = []
            for d, n in (("fwd", 3), ("bwd", 6)):
                runs, peer = took[w, d], took["compiled act", d]
                us, mhz = mid(u for u, _ in runs), mid(m for _, m in runs)
                pairs = [peer[i // 2] / u for i, (u, _) in enumerate(runs)]
                cells.append(f"{d} {us:7.0f} us {rate(us, n):4.0f}  {base[d] / us:.3f} ({min(pairs):.3f} - {max(pairs):.3f}) {mhz:4.0f} MHz")
            print(f"braid {w:13s} " + "   ".join(cells), flush=True)


def parts(braid, shape, ms, sms):
    name, experts, hidden, width, counts = shape
    braid.shape(experts, hidden, width, counts)
    print(f"\n-- parts, {name}")
    unit = 2 * sum(counts) * hidden * width
    for part, times in PARTS + [("act", 0), ("dact", 0), ("db1", 0)]:
        us, mhz = braid.bench(part, "fused", ms)
        share = times * unit / (us * mhz * sms * 4096) if mhz > 0 else 0
        print(f"{part:5s} {us:8.1f} us" + (f" {times * unit / us / 1e6:4.0f} TFLOP/s {mhz:4.0f} MHz {100 * share:2.0f} %" if times else ""), flush=True)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--bench", required=True)
    a.add_argument("--seconds", type=float, default=85)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--ms", type=float, default=160, help="how long a turn lasts")
    a.add_argument("--others", action="store_true", help="only the uneven counts")
    a.add_argument("--peers", help="ops_peers.py: the first table")
    a.add_argument("--rest", type=float, default=1.0, help="seconds of pause before each measurement of that table")
    a = a.parse_args()
    begin = time.monotonic()
    late = lambda: time.monotonic() - begin > a.seconds
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    watch, braid = Watch(), Braid(a.bench)
    print(torch.cuda.get_device_name(0), "PyTorch", torch.__version__)
    try:
        if a.peers:
            as_peers(braid, a.peers, WAYS[1:2], a.rounds, a.rest, late)
        for shape in MAIN if not a.others else []:
            if not late():
                compare(braid, watch, shape, WAYS, a.rounds, a.ms, late, sms)
        for shape in OTHERS:
            if not late():
                compare(braid, watch, shape, WAYS[:2], 2, a.ms, late, sms)
        if not late():
            braid.shape(64, 2048, 1024, [0] * 64)
            print("\n== no rows at all: fwd %.1f us, bwd %.1f us (zeros to the gradients of weights)" %
                  (braid.run("fwd", "fused", 20)[0], braid.run("bwd", "fused", 20)[0]))
        for shape in MAIN if not a.others else []:
            if not late():
                parts(braid, shape, 50, sms)
        print(f"\n{time.monotonic() - begin:.0f} s" + (", stopped early" if late() else ""))
        braid.close()
    finally:
        watch.close()
        if braid.p.poll() is None:
            braid.p.kill()


if __name__ == "__main__":
    main()
