#!/usr/bin/env python3
"""The MLP of experts on one GPU: braid next to PyTorch, in turns.

  speed_experts.py --bench build/tests/gpu/bench_experts [--seconds 85] [--rounds 3] [--forms wide,ring,pair]

Both programs keep their data on the GPU and take turns: in every round each competitor runs for a fraction of a second, the order moves on
by one from round to round, and a ratio is taken between neighbours in time, so that a clock that falls with heat falls on all.
PyTorch: grouped_mm and a compiled SwiGLU times probability, gradients in bf16; times of single calls, one after the other, as in a
step. braid: bench_experts, gradients of weights in fp32, written. Rates count useful work: 6 (forward) and 12 (backward) x rows x hidden x width.
Clock and power are what nvidia-smi sees during a block; MHz of braid's own is measured on the GPU right after the block, and "of peak" is the share of
what tensor cores can do at that clock (4096 a cycle and multiprocessor). The dense product has the size of fc1, by cuBLAS.
Stops beginning new measurements after --seconds; what matters most comes first.
"""
import argparse
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
    ("OLMoE 64 x (2048, 1024), 131072 rows", *OLMOE, ragged(64, 131072)),
    ("Qwen3-30B 128 x (2048, 768), 131072 rows", 128, 2048, 768, ragged(128, 131072)),
    ("DSv3 4 x (7168, 2048), 32768 rows", 4, 7168, 2048, ragged(4, 32768)),
]
OTHERS = [
    ("one hot expert: OLMoE, 124772 of the rows", *OLMOE, [124772] + [100] * 63),
    ("skewed counts: OLMoE, as 1 / (i + 1)", *OLMOE, skewed(64, 131072)),
    ("half of the experts without rows: OLMoE", *OLMOE, [c for n in ragged(32, 131072) for c in (n, 0)]),
    ("256 experts of 64 rows (2048, 1024)", 256, 2048, 1024, [64] * 256),
]
PEER = ("torch", None, None)
MAIN_WAYS = [PEER, ("fused wide", "fused", "wide"), ("apart wide", "apart", "wide"), ("fused ring", "fused", "ring"),
             ("apart ring", "apart", "ring"), ("fused pair", "fused", "pair"), ("apart pair", "apart", "pair")]
OTHER_WAYS = [PEER, ("fused auto", "fused", "auto"), ("fused ring", "fused", "ring"), ("fused pair", "fused", "pair")]
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

    def run(self, what, way, form, ms):  # microseconds, MHz
        us, mhz, _ = self.ask(f"run {what} {way} {form} {ms}").split()
        return float(us), float(mhz)

    def part(self, name, form, ms):
        us, mhz, _ = self.ask(f"part {name} fused {form} {ms}").split()
        return float(us), float(mhz)

    def close(self):
        self.p.stdin.write("quit\n")
        self.p.stdin.flush()
        self.p.wait(timeout=20)


class Peer:
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

        torch._dynamo.reset()
        self.act = torch.compile(act)
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

    def backward(self):
        for t in (self.x, self.w1, self.w2, self.p):
            t.grad = None
        torch.autograd.backward(self.y, self.g, retain_graph=True)

    def product(self):
        with torch.no_grad():
            self.x @ self.dense

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
    took = {(w[0], d): [] for w in ways for d in flops}
    notes = {w[0]: [] for w in ways}
    dense = []
    for k in range(rounds):
        if k > 0 and late():
            break
        for i in range(len(ways)):
            label, way, form = ways[(i + k) % len(ways)]
            t0 = time.monotonic()
            for d in flops:
                us, mhz = (peer.run(d, ms), 0.0) if way is None else braid.run(d, way, form, ms)
                took[label, d].append((us, mhz))
            notes[label].append(watch.between(t0, time.monotonic()))
        dense.append(peer.run("dense", ms / 3))
    rate = statistics.median(2 * rows * hidden * 2 * width / us / 1e6 for us in dense)
    print(f"\n== {name} ({gib[3:]} GiB of ours; dense product of fc1's size {rate:.0f} TFLOP/s)")
    for label, way, _ in ways:
        cells = []
        for d in flops:
            times = [us for us, _ in took[label, d]]
            base = [us for us, _ in took["torch", d]]
            ratios = sorted(p / u for p, u in zip(base, times))
            us = statistics.median(times)
            text = f"{d} {us:8.1f} us {flops[d] / us / 1e6:4.0f} TFLOP/s"
            if way is not None:
                mhz = statistics.median(m for _, m in took[label, d])
                share = flops[d] / (us * mhz * sms * 4096) if mhz > 0 else 0
                text += f"  {statistics.median(ratios):.3f} ({ratios[0]:.3f} - {ratios[-1]:.3f})  {mhz:4.0f} MHz {100 * share:2.0f} % of peak"
            cells.append(text)
        seen = [n for n in notes[label] if n[0] > 0]
        smi = " | smi %.0f MHz %.0f W %.0f C" % tuple(statistics.mean(n[i] for n in seen) for i in range(3)) if seen else ""
        print(f"{label:11s} " + "   ".join(cells) + smi, flush=True)
    del peer
    torch.cuda.empty_cache()


def parts(braid, shape, forms, ms, sms):
    name, experts, hidden, width, counts = shape
    braid.shape(experts, hidden, width, counts)
    print(f"\n-- parts, {name}")
    unit = 2 * sum(counts) * hidden * width
    for part, times in PARTS:
        line = f"{part:5s}"
        took = {f: [] for f in forms}
        for _ in range(2):
            for form in took:
                took[form].append(braid.part(part, form, ms))
        for form, runs in took.items():
            us, mhz = min(runs)
            share = times * unit / (us * mhz * sms * 4096) if mhz > 0 else 0
            line += f"   {form} {us:8.1f} us {times * unit / us / 1e6:4.0f} TFLOP/s {mhz:4.0f} MHz {100 * share:2.0f} %"
        print(line, flush=True)
    for part in ("act", "dact", "db1"):
        print(f"{part:5s}   {braid.part(part, 'wide', ms)[0]:8.1f} us", flush=True)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--bench", required=True)
    a.add_argument("--seconds", type=float, default=85)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--forms", default="wide,ring,pair", help="those that bench_experts check passes")
    a = a.parse_args()
    begin, forms = time.monotonic(), [None, "auto"] + a.forms.split(",")
    main_ways, other_ways = [w for w in MAIN_WAYS if w[2] in forms], [w for w in OTHER_WAYS if w[2] in forms]
    late = lambda: time.monotonic() - begin > a.seconds
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    watch, braid = Watch(), Braid(a.bench)
    print(torch.cuda.get_device_name(0), "PyTorch", torch.__version__)
    try:
        for shape in MAIN:
            if not late():
                compare(braid, watch, shape, main_ways, a.rounds, 160, late, sms)
        for shape in MAIN:
            if not late():
                parts(braid, shape, forms[2:], 50, sms)
        for shape in OTHERS:
            if not late():
                compare(braid, watch, shape, other_ways, 2, 100, late, sms)
        if not late():
            braid.shape(64, 2048, 1024, [0] * 64)
            print("\n== no rows at all: fwd %.1f us, bwd %.1f us (zeros to the gradients of weights)" %
                  (braid.run("fwd", "fused", "auto", 20)[0], braid.run("bwd", "fused", "auto", 20)[0]))
        print(f"\n{time.monotonic() - begin:.0f} s" + (", stopped early" if late() else ""))
        braid.close()
    finally:
        watch.close()
        if braid.p.poll() is None:
            braid.p.kill()


if __name__ == "__main__":
    main()
