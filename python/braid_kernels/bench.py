"""Times of the kernels beside PyTorch's own on this GPU.

    python -m braid_kernels.bench [--rows 16384] [--channels 2048] [--no-compile]

Times by CUDA events over calls one behind the other, medians; where a call costs the processor more than the GPU, that is what shows.
"host" is what a call costs the processor until it returns, and what 1000 calls with gradients leave in memory; --only host measures that alone,
and without a GPU on the CPU, where times have the computation inside, for one row."""

import argparse
import gc
import os
import time

import torch
import torch.nn.functional as F

from . import binding, cross_entropy, expert_mlp, gated_delta_rule, library, mhc_boundary_coef, mhc_pre_coef, mhc_supported, ssd


def timed(f, runs=9, calls=5):
    for _ in range(3):
        f()
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            f()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[runs // 2]


def host(f, runs=20, calls=20):
    """Median over runs of the time for a call, of several enqueued one behind the other."""
    times = []
    for _ in range(runs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            f()
        times.append((time.perf_counter() - begin) / calls)
    return sorted(times)[runs // 2] * 1e6


def both(name, f, inputs, note=""):
    """Times forward and backward of f(*inputs)."""
    with_grad = [t for t in inputs if t.requires_grad]
    out = f(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    ups = [torch.randn_like(o) for o in out]
    forward = timed(lambda: f(*inputs))
    backward = timed(lambda: torch.autograd.grad(out, with_grad, ups, retain_graph=True))
    print(f"{name:34s} {forward:9.0f} {backward:9.0f}   {note}", flush=True)
    return forward, backward


def in_use():
    """Bytes of tensors on the GPU, or of this process."""
    gc.collect()
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def left_by(f, calls=1000):
    """Bytes that so many calls leave in use, after as many that may fill caches."""
    for _ in range(calls):
        f()
    before = in_use()
    for _ in range(calls):
        f()
    return in_use() - before


def eager_boundary(x, f, post, comb, fn, base, scale, weight):
    n = 4
    y = torch.einsum("rji,rjc->ric", comb.to(x.dtype), x) + post.to(x.dtype).unsqueeze(-1) * f.unsqueeze(-2)
    flat = y.flatten(1)
    z = F.linear(flat.float(), fn) * (flat.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    z = z * torch.cat([scale[0].expand(n), scale[1].expand(n), scale[2].expand(n * n)]) + base
    m = z[:, 2 * n :].unflatten(-1, (n, n)).softmax(-1) + 1e-6
    m = m / (m.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        m = m / (m.sum(-1, keepdim=True) + 1e-6)
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
    h = ((z[:, :n].sigmoid() + 1e-6).unsqueeze(-1).to(x.dtype) * y).sum(1)
    return y, F.rms_norm(h, (h.shape[-1],), weight.to(h.dtype), 1e-6), 2 * z[:, n : 2 * n].sigmoid(), m


def randn(*shape, dtype=torch.bfloat16, by=1.0):
    return (by * torch.randn(*shape, device="cuda" if torch.cuda.is_available() else "cpu", dtype=torch.float32)).to(dtype).requires_grad_()


def mhc(rows, c, compile_too):
    x, f = randn(rows, 4, c), randn(rows, c)
    params = [randn(24, 4 * c, dtype=torch.float32, by=0.01), randn(24, dtype=torch.float32), randn(3, dtype=torch.float32), randn(c, dtype=torch.float32)]
    h, coef = mhc_pre_coef(x, *params)
    coef = coef.detach().requires_grad_()
    print(f"mHC boundary, {rows} x 4 x {c}: {mhc_supported(x)}; backward: {mhc_supported(x, 'mhc_boundary_bwd')}")
    both("  braid", lambda *a: mhc_boundary_coef(*a), [x, f, coef, *params])
    post, comb = coef[:, 4:8].detach().requires_grad_(), coef[:, 8:].detach().unflatten(-1, (4, 4)).contiguous().requires_grad_()
    both("  PyTorch, eager", eager_boundary, [x, f, post, comb, *params])
    if compile_too:
        both("  PyTorch, compiled", torch.compile(eager_boundary), [x, f, post, comb, *params])
    overhead()


def overhead():
    gpu = torch.cuda.is_available()
    rows, c, real = (256, 256, torch.bfloat16) if gpu else (1, 8, torch.float32)
    wide = dict(dtype=torch.float32)
    params = [randn(24, 4 * c, by=0.01, **wide), randn(24, **wide), randn(3, **wide), randn(c, **wide)]
    small = [randn(rows, 4, c, dtype=real), randn(rows, c, dtype=real), randn(rows, 24, **wide), *params]
    y = mhc_boundary_coef(*small)
    ups = [torch.randn_like(o) for o in y]
    x = randn(3, **wide)
    double, up = x * 2, torch.ones_like(x)
    with torch.no_grad():
        plain = host(lambda: mhc_boundary_coef(*small))
    forward, backward = host(lambda: mhc_boundary_coef(*small)), host(lambda: torch.autograd.grad(y, small, ups, retain_graph=True))
    least = host(lambda: torch.autograd.grad(double, x, up, retain_graph=True))
    print(f"host, boundary of {rows} x 4 x {c}, {binding()}:\n  forward {plain:.1f} us without autograd, {forward:.1f} us with it; "
          f"backward {backward:.1f} us, that of a product by 2 {least:.1f} us")  # fmt: skip
    left = left_by(lambda: torch.autograd.grad(mhc_boundary_coef(*small), small, ups))
    print(f"  1000 calls of both leave {left} more bytes in use {'on the GPU' if gpu else 'by the process'}")


def experts(compile_too):
    rows, e, d, f = 131072, 64, 2048, 1024
    counts = torch.distributions.Multinomial(rows, torch.ones(e)).sample().int()
    offsets = F.pad(counts.cumsum(0).int(), (1, 0)).cuda()
    x, w13, w2, prob = randn(rows, d), randn(e, 2 * f, d, by=0.02), randn(e, d, f, by=0.02), randn(rows, dtype=torch.float32)
    print(f"experts, {e} x ({d}, {f}), {rows} rows")
    both("  braid", lambda x, a, b, p: expert_mlp(x, a, b, offsets, p), [x, w13, w2, prob])
    gm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    act = (torch.compile if compile_too else lambda f: f)(lambda h, p: (F.silu(h.chunk(2, -1)[0].float()) * h.chunk(2, -1)[1].float() * p[:, None]).to(torch.bfloat16))
    w1t, w2t = (w.detach().transpose(1, 2).contiguous().requires_grad_() for w in (w13, w2))
    both("  grouped_mm + activation", lambda x, a, b, p: gm(act(gm(x, a, offs=offsets[1:]), p), b, offs=offsets[1:]), [x, w1t, w2t, prob])


def scans():
    b, s, h, p, n, g = 4, 4096, 64, 64, 128, 8
    args = [randn(b, s, h, p), randn(b, s, h), (-torch.rand(h, device="cuda") - 0.5).requires_grad_(), randn(b, s, g, n), randn(b, s, g, n)]
    print(f"ssd, {b} x {s}, {h} heads of {p}, state {n}")
    both("  braid", lambda *a: ssd(*a, 128), args)
    b, s, hk, hv, d = 4, 4096, 16, 32, 128
    args = [randn(b, s, hk, d), randn(b, s, hk, d), randn(b, s, hv, d), randn(b, s, hv), randn(b, s, hv), randn(hv, dtype=torch.float32, by=0.1)]
    print(f"gated delta rule, {b} x {s}, {hk}/{hv} heads of {d}")
    both("  braid", lambda q, k, v, g, be, A: gated_delta_rule(q, k, v, g, be, A_log=A), args)


def head(compile_too):
    rows, d, v = 16384, 2048, 50304
    h, w, label = randn(rows, d), randn(v, d, by=0.02), torch.randint(0, v, (rows,), device="cuda")
    print(f"linear and cross entropy, {rows} x {d}, vocabulary {v} (forward has the gradients)")
    both("  braid", lambda h, w: cross_entropy(h, w, label), [h, w])
    f = (torch.compile if compile_too else lambda f: f)(lambda h, w: F.cross_entropy((h @ w.T).float(), label))
    both("  PyTorch" + (", compiled" if compile_too else ""), f, [h, w])


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rows", type=int, default=16384)
    ap.add_argument("--channels", type=int, default=2048)
    ap.add_argument("--no-compile", action="store_true")
    ap.add_argument("--only", default="mhc,experts,scans,head", help="some of mhc,experts,scans,head,host")
    a = ap.parse_args()
    unknown = [name for name in a.only.split(",") if name not in ("mhc", "experts", "scans", "head", "host")]
    if unknown:
        ap.error(f"argument --only: {unknown[0]!r} is none of mhc, experts, scans, head, host")
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        if a.only != "host":
            raise SystemExit("braid_kernels.bench needs a GPU that torch sees, but for --only host")
        torch.set_num_threads(1)
        return overhead()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, libbraidk {library().build}")
    print(f"{'':34s} {'forward':>9s} {'backward':>9s}   us")
    parts = {"mhc": lambda: mhc(a.rows, a.channels, not a.no_compile), "experts": lambda: experts(not a.no_compile), "scans": scans, "host": overhead,
             "head": lambda: head(not a.no_compile)}  # fmt: skip
    for name in a.only.split(","):
        parts[name]()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
