"""Tests of python/braid_kernels: against eager PyTorch, gradcheck, opcheck, compile, checkpointing, autocast, errors. Prints a line
"ok ..." or "not ok ..." for each. tests/lib/test_python.sh runs it on the CPU. uses.py has what programs do with every function.

    BRAIDK_LIB=build/libbraidk.so python3 tests/lib/kernels.py [cpu|cuda] [--full]
"""

import gc
import os
import sys
import threading
import traceback

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))
import braid_kernels as bk  # noqa: E402
from braid_kernels import _lib, experts, loss, mhc, scans  # noqa: E402
from braid_kernels._register import Operator  # noqa: E402
from braid_kernels._replay import Replay  # noqa: E402

DEVICE = "cuda" if "cuda" in sys.argv[1:] else "cpu"
FULL = "--full" in sys.argv[1:]
CUDA = DEVICE == "cuda"
N = 4
LOGITS = N * N + 2 * N
TESTS = []


def test(f):
    TESTS.append(f)
    return f


def rand(*shape, dtype=torch.float64, by=1.0, grad=True):
    return (by * torch.randn(*shape, dtype=torch.float64)).to(dtype).to(DEVICE).requires_grad_(grad)


def params(c, dtype=torch.float64):
    return (
        rand(LOGITS, N * c, dtype=dtype, by=0.3 if c < 64 else 0.01),
        rand(LOGITS, dtype=dtype, by=0.5),
        torch.tensor([0.9, -0.7, 1.1], dtype=dtype, device=DEVICE).requires_grad_(),
        (1 + 0.2 * torch.randn(c, dtype=torch.float64)).to(dtype).to(DEVICE).requires_grad_(),
    )


# ---- eager forms -----------------------------------------------------------------------------------------------------------------


def eager_pre(x, fn, base, scale, weight=None, iters=20, norm_eps=1e-6, inside=True, profile="d", eps=1e-6, root_eps=None):
    n = x.shape[-2]
    flat = x.flatten(-2).to(fn.dtype)
    square = flat.square().mean(-1, keepdim=True)
    root = (square + (norm_eps if root_eps is None else root_eps)).sqrt() if inside else square.sqrt() + eps
    z = F.linear(flat, fn) / root * scale.repeat_interleave(torch.tensor([n, n, n * n], device=x.device)) + base
    pre = z[..., :n].sigmoid() + (eps if profile == "d" else 0)
    post = 2 * z[..., n : 2 * n].sigmoid()
    m = z[..., 2 * n :].unflatten(-1, (n, n))
    if profile == "d":
        m = m.softmax(-1) + eps
        m = m / (m.sum(-2, keepdim=True) + eps)
        for _ in range(iters - 1):
            m = m / (m.sum(-1, keepdim=True) + eps)
            m = m / (m.sum(-2, keepdim=True) + eps)
    else:
        m = (m - m.amax(-1, keepdim=True)).exp()
        for _ in range(iters):
            m = m / m.sum(-1, keepdim=True).clamp_min(eps)
            m = m / m.sum(-2, keepdim=True).clamp_min(eps)
    h = (pre.unsqueeze(-1) * x).sum(-2)
    if weight is not None:
        h = h * (h.square().mean(-1, keepdim=True) + norm_eps).rsqrt() * weight
    return h, post, m


def eager_post(x, f, post, comb, profile="d"):
    mixed = torch.einsum("...ji,...jc->...ic" if profile == "d" else "...ij,...jc->...ic", comb, x)
    return mixed + post.unsqueeze(-1) * f.unsqueeze(-2)


def eager_boundary(x, f, post, comb, fn, base, scale, weight, **kw):
    y = eager_post(x, f, post, comb, kw.get("profile", "d"))
    return (y, *eager_pre(y, fn, base, scale, weight, **kw))


def eager_expert(x, w13, w2, offsets, prob):
    ends, out = offsets.tolist(), []
    for e in range(w2.shape[0]):
        g, u = (x[ends[e] : ends[e + 1]] @ w13[e].T).chunk(2, -1)
        out.append((F.silu(g) * u * prob[ends[e] : ends[e + 1], None]) @ w2[e].T)
    return F.pad(torch.cat(out), (0, 0, 0, x.shape[0] - ends[-1]))


def eager_ssd(x, dt, A, B, C, D, dt_bias, begins=()):
    b, s, h, p = x.shape
    delta = F.softplus(dt + dt_bias)
    B, C = (t.repeat_interleave(h // t.shape[2], 2) for t in (B, C))
    state, out = x.new_zeros(b, h, B.shape[3], p), []
    for t in range(s):
        if t in begins:
            state = torch.zeros_like(state)
        state = (delta[:, t] * A).exp()[..., None, None] * state + (delta[:, t, :, None] * B[:, t])[..., None] * x[:, t, :, None, :]
        out.append((state * C[:, t, :, :, None]).sum(2) + D[:, None] * x[:, t])
    return torch.stack(out, 1)


def eager_gdn(q, k, v, g, beta, A_log, dt_bias, begins=()):
    s, r = q.shape[1], v.shape[2] // q.shape[2]
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(r, 2) for t in (q, k))
    decay, w = (-A_log.exp() * F.softplus(g + dt_bias)).exp(), beta.sigmoid()
    state, out = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3]), []
    for t in range(s):
        if t in begins:
            state = torch.zeros_like(state)
        state = decay[:, t, :, None, None] * state
        held = (state * k[:, t, :, :, None]).sum(2)
        state = state + k[:, t, :, :, None] * (w[:, t, :, None] * (v[:, t] - held))[:, :, None, :]
        out.append((state * q[:, t, :, :, None]).sum(2) * q.shape[3] ** -0.5)
    return torch.stack(out, 1)


# ---- comparison ------------------------------------------------------------------------------------------------------------------


def near(have, want, tolerance, what):
    have, want = have.detach().double().cpu(), want.detach().double().cpu()
    assert have.shape == want.shape, f"{what}: shape {tuple(have.shape)}, expected {tuple(want.shape)}"
    error = (have - want).norm() / want.norm().clamp_min(1e-12)
    assert error.isfinite() and error <= tolerance, f"{what}: relative error {error:.2e}, allowed {tolerance:.0e}"


def compare(kernel, eager, inputs, tolerance, names=None):
    """Outputs and gradients of kernel(inputs) against eager(inputs in double)."""
    wide = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs]
    have, want = kernel(*inputs), eager(*wide)
    have, want = (list(r) if isinstance(r, tuple) else [r] for r in (have, want))
    ups = [torch.randn(o.shape, dtype=torch.float64, device=o.device) for o in want]
    for i, (h, w) in enumerate(zip(have, want)):
        near(h, w, tolerance, f"output {i}")
    with_grad = [i for i, t in enumerate(inputs) if t.requires_grad]
    grads = torch.autograd.grad(have, [inputs[i] for i in with_grad], [u.to(h.dtype) for u, h in zip(ups, have)])
    right = torch.autograd.grad(want, [wide[i] for i in with_grad], [u.to(h.dtype).double() for u, h in zip(ups, have)])
    for i, g, r in zip(with_grad, grads, right):
        assert g.dtype == inputs[i].dtype
        near(g, r, tolerance, f"gradient of input {i}")


# The types of this device, and the relative error of each.
if CUDA:
    TYPES = [(torch.bfloat16, torch.float32, 2e-2), (torch.float32, torch.float32, 1e-4)]
else:
    TYPES = [(torch.float64, torch.float64, 1e-9), (torch.float32, torch.float32, 1e-4)]


def boundary_inputs(rows, c, real, wide):
    post, comb = torch.rand(*rows, N), torch.rand(*rows, N, N)
    return [
        rand(*rows, N, c, dtype=real),
        rand(*rows, c, dtype=real),
        post.to(wide).to(DEVICE).requires_grad_(),
        (comb / comb.sum(-1, keepdim=True)).to(wide).to(DEVICE).requires_grad_(),
        *params(c, wide),
    ]


@test
def boundary_equals_eager_in_both_profiles_and_epsilon_forms():
    for real, wide, tolerance in TYPES:
        for profile in "ds":
            for inside in (True, False):
                for c in (256, 24) if CUDA else (24,):
                    rule = dict(iters=20, norm_eps=1e-5, profile=profile)
                    compare(
                        lambda *a: bk.mhc_boundary(*a, norm_eps_inside=inside, **rule),
                        lambda *a: eager_boundary(*a, inside=inside, **rule),
                        boundary_inputs((2, 5), c, real, wide),
                        tolerance,
                    )


@test
def a_large_epsilon_inside_the_root_shows_on_every_path():
    for real, wide, tolerance in TYPES:
        for c in (256, 24, 4352) if CUDA else (24,):
            rule = dict(norm_eps=1e-5, root_eps=1.0)
            inputs = boundary_inputs((9,), c, real, wide)
            compare(lambda *a: bk.mhc_boundary(*a, **rule), lambda *a: eager_boundary(*a, **rule), inputs, tolerance)
            x, params = inputs[0], inputs[4:]
            compare(lambda *a: bk.mhc_pre(*a, **rule), lambda *a: eager_pre(*a, **rule), [x, *params], tolerance)
            compare(lambda *a: bk.mhc_pre(*a, **rule), lambda *a: eager_pre(*a, **rule), [x, *params[:3]], tolerance)


@test
def pre_and_post_equal_eager_with_a_norm_and_without():
    for real, wide, tolerance in TYPES:
        x, f, post, comb, fn, base, scale, weight = boundary_inputs((3, 2), 64, real, wide)
        compare(bk.mhc_pre, eager_pre, [x, fn, base, scale, weight], tolerance)
        compare(bk.mhc_pre, eager_pre, [x, fn, base, scale], tolerance)
        compare(bk.mhc_post, eager_post, [x, f, post, comb], tolerance)
        compare(lambda *a: bk.mhc_boundary(*a), lambda *a: eager_boundary(*a, None), [x, f, post, comb, fn, base, scale], tolerance)


@test
def a_bias_is_added_and_has_a_gradient():
    real, wide, tolerance = TYPES[0]
    x, f, post, comb, fn, base, scale, weight = boundary_inputs((5,), 64, real, wide)
    bias = rand(64, dtype=wide)
    compare(
        lambda *a: bk.mhc_boundary(*a[:-1], bias=a[-1]),
        lambda *a: eager_boundary(a[0], a[1] + a[-1], *a[2:-1]),
        [x, f, post, comb, fn, base, scale, weight, bias],
        tolerance,
    )


@test
def a_chain_of_boundaries_equals_eager():
    real, wide, tolerance = TYPES[0]
    c = 256 if CUDA else 16
    x = rand(7, N, c, dtype=real)
    ps = [params(c, wide) for _ in range(3)]
    flat = [t for p in ps for t in p]

    def kernel(x, *flat):
        ps = [flat[4 * i : 4 * i + 4] for i in range(3)]
        h, coef = bk.mhc_pre_coef(x, *ps[0], norm_eps=1e-5)
        for p in ps[1:]:
            x, h, coef = bk.mhc_boundary_coef(x, torch.tanh(h), coef, *p, norm_eps=1e-5)
        return bk.mhc_post_coef(x, torch.tanh(h), coef)

    def eager(x, *flat):
        ps = [flat[4 * i : 4 * i + 4] for i in range(3)]
        h, post, comb = eager_pre(x, *ps[0], norm_eps=1e-5)
        for p in ps[1:]:
            x, h, post, comb = eager_boundary(x, torch.tanh(h), post, comb, *p, norm_eps=1e-5)
        return eager_post(x, torch.tanh(h), post, comb)

    compare(kernel, eager, [x, *flat], 3 * tolerance)


@test
def experts_equal_eager():
    for real, wide, tolerance in TYPES:
        x, w13, w2 = rand(40, 32, dtype=real), rand(3, 32, 32, dtype=real, by=0.2), rand(3, 24, 16, dtype=real, by=0.2)
        offsets = torch.tensor([0, 11, 11, 37], dtype=torch.int32, device=DEVICE)
        prob = torch.rand(40).to(wide).to(DEVICE).requires_grad_()
        compare(bk.expert_mlp, eager_expert, [x, w13, w2, offsets, prob], tolerance)
        assert torch.equal(bk.offsets_of_ends(offsets[1:].long()), offsets)


@test
def activations_of_experts_equal_eager():
    real, wide, tolerance = TYPES[-1]
    x, w2 = rand(12, 16, dtype=real), rand(2, 8, 16, dtype=real, by=0.2)
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)

    def eager(act, gated, interleave=0, clamp=None, offset=0.0):
        def f(x, w13, w2, offsets):
            out = []
            for e, (a, b) in enumerate(((0, 5), (5, 12))):
                h = x[a:b] @ w13[e].T
                if gated:
                    g, u = h.unflatten(-1, (-1, 2, interleave)).unbind(-2) if interleave else h.chunk(2, -1)
                    g, u = (t.flatten(1) for t in (g, u))
                    if clamp:
                        g, u = g.clamp(max=clamp), u.clamp(-clamp, clamp)
                    h = act(g) * (u + offset)
                else:
                    h = act(h)
                out.append(h @ w2[e].T)
            return torch.cat(out)

        return f

    gelu, quick = lambda t: F.gelu(t, approximate="tanh"), lambda t: t * torch.sigmoid(1.702 * t)  # noqa: E731
    cases = [
        ("swiglu", dict(clamp=0.5, offset=1.0), eager(F.silu, True, clamp=0.5, offset=1.0)),
        ("swiglu", dict(glu_interleave=4), eager(F.silu, True, interleave=4)),
        ("geglu", {}, eager(gelu, True)),
        ("quick_geglu", dict(offset=1.0), eager(quick, True, offset=1.0)),
        ("gelu", {}, eager(gelu, False)),
        ("quick_gelu", {}, eager(quick, False)),
        ("relu2", {}, eager(lambda t: F.relu(t).square(), False)),
        ("silu", {}, eager(F.silu, False)),
    ]
    for act, options, want in cases:
        w13 = rand(2, 32 if act.endswith("glu") else 16, 16, dtype=real, by=0.3)
        compare(lambda x, a, b, o: bk.expert_mlp(x, a, b, o, act=act, **options), want, [x, w13, w2, offsets], tolerance)


def eager_moe(x, idx, probs, w13, w2):
    out = []
    for t in range(x.shape[0]):
        row = x.new_zeros(w2.shape[1])
        for j, e in enumerate(idx[t].tolist()):
            if e >= 0:
                g, u = (w13[e] @ x[t]).chunk(2)
                row = row + w2[e] @ (F.silu(g) * u * probs[t, j])
        out.append(row)
    return torch.stack(out)


@test
def experts_from_tokens_and_back_equal_eager():
    for real, wide, tolerance in TYPES:
        x, w13, w2 = rand(19, 32, dtype=real), rand(5, 32, 32, dtype=real, by=0.2), rand(5, 24, 16, dtype=real, by=0.2)
        idx = torch.stack([torch.randperm(5)[:2] for _ in range(19)]).int()
        idx[3, 1] = -1
        probs = torch.rand(19, 2).to(wide).to(DEVICE).requires_grad_()
        compare(bk.moe_mlp, eager_moe, [x, idx.to(DEVICE), probs, w13, w2], tolerance)


@test
def weights_of_experts_may_be_wider_than_their_input():
    if not CUDA:
        return
    x, w13, w2 = rand(64, 64, dtype=torch.bfloat16), rand(2, 64, 64, dtype=torch.float32, by=0.2), rand(2, 32, 32, dtype=torch.float32, by=0.2)
    offsets = torch.tensor([0, 30, 64], dtype=torch.int32, device=DEVICE)
    bk.expert_mlp(x, w13, w2, offsets).sum().backward()
    assert w13.grad.dtype == torch.float32 and w2.grad.dtype == torch.float32 and x.grad.dtype == torch.bfloat16
    prob = torch.ones(64, device=DEVICE)
    compare(lambda *a: bk.expert_mlp(*a), eager_expert, [x, w13, w2, offsets, prob], 2e-2)


@test
def scans_equal_eager():
    for real, wide, tolerance in TYPES:
        x, dt, B, C = (rand(2, 11, 4, 8, dtype=real), rand(2, 11, 4, dtype=real), rand(2, 11, 2, 16, dtype=real), rand(2, 11, 2, 16, dtype=real))
        A = (-torch.rand(4, dtype=torch.float64) - 0.1).to(wide).to(DEVICE).requires_grad_()
        D, bias = rand(4, dtype=wide), rand(4, dtype=wide)
        compare(
            lambda x, dt, A, B, C, D, b: bk.ssd(x, dt, A, B, C, 4, D=D, dt_bias=b), eager_ssd, [x, dt, A, B, C, D, bias], 3 * tolerance
        )
        seq = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]] * 2, device=DEVICE)
        compare(
            lambda x, dt, A, B, C, D, b: bk.ssd(x, dt, A, B, C, 4, D=D, dt_bias=b, seq_idx=seq),
            lambda *a: eager_ssd(*a, begins=(3, 7)),
            [x, dt, A, B, C, D, bias],
            3 * tolerance,
        )
        q, k, v = rand(1, 9, 2, 16, dtype=real), rand(1, 9, 2, 16, dtype=real), rand(1, 9, 4, 16, dtype=real)
        g, beta, A_log, dt_bias = rand(1, 9, 4, dtype=real), rand(1, 9, 4, dtype=real), rand(4, dtype=wide, by=0.3), rand(4, dtype=wide)
        compare(
            lambda q, k, v, g, b, A, d: bk.gated_delta_rule(q, k, v, g, b, A_log=A, dt_bias=d, chunk_size=4),
            eager_gdn,
            [q, k, v, g, beta, A_log, dt_bias],
            4 * tolerance,
        )
        ends = torch.tensor([0, 4, 9], device=DEVICE)
        compare(
            lambda q, k, v, g, b, A, d: bk.gated_delta_rule(q, k, v, g, b, cu_seqlens=ends, A_log=A, dt_bias=d, chunk_size=4),
            lambda *a: eager_gdn(*a, begins=(4,)),
            [q, k, v, g, beta, A_log, dt_bias],
            4 * tolerance,
        )


@test
def decay_and_step_themselves_give_the_same_scan():
    real, wide, tolerance = TYPES[-1]
    q, k, v = rand(1, 9, 2, 16, dtype=real), rand(1, 9, 2, 16, dtype=real), rand(1, 9, 4, 16, dtype=real)
    g, beta, A_log = rand(1, 9, 4, dtype=real), rand(1, 9, 4, dtype=real), rand(4, dtype=wide, by=0.3)
    want = bk.gated_delta_rule(q, k, v, g, beta, A_log=A_log)
    have = bk.gated_delta_rule(q, k, v, -A_log.exp() * F.softplus(g), beta.sigmoid(), scale=0.5)
    near(have, want * 0.5 * 4, 1e-3, "o")


@test
def router_equals_eager():
    logits = rand(13, 8, dtype=torch.float32 if CUDA else torch.float64)

    def eager(logits):
        top, idx = logits.topk(3, -1)
        return top.softmax(-1)

    compare(lambda t: bk.router_topk(t, 3)[0], eager, [logits], 1e-5)
    probs, idx = bk.router_topk(logits, 3)
    assert torch.equal(idx.long(), logits.topk(3, -1).indices)
    compare(lambda t: bk.router_topk(t, 3, pre_softmax=True)[0], lambda t: t.softmax(-1).topk(3, -1).values, [logits], 1e-5)

    def sigmoid(logits):
        s = logits.sigmoid().topk(3, -1).values
        return s / s.sum(-1, keepdim=True) * 2.5

    compare(lambda t: bk.router_topk(t, 3, score="sigmoid", scale=2.5)[0], sigmoid, [logits], 1e-5)
    compare(lambda t: bk.router_topk(t, 3, score="sigmoid", norm=False)[0], lambda t: t.sigmoid().topk(3, -1).values, [logits], 1e-5)
    bias = rand(8, dtype=logits.dtype, by=3.0, grad=False)
    _, idx = bk.router_topk(logits, 3, score="sigmoid", bias=bias)
    assert torch.equal(idx.long(), (logits.sigmoid() + bias).topk(3, -1).indices)
    _, idx = bk.router_topk(logits, 2, score="sigmoid", groups=4, group_topk=2)
    best = logits.unflatten(-1, (4, 2)).amax(-1).topk(2, -1).indices  # groups of 2, of which the best expert counts
    allowed = torch.zeros(13, 4, dtype=torch.bool, device=DEVICE).scatter_(1, best, True).repeat_interleave(2, 1)
    assert torch.equal(idx.long(), logits.masked_fill(~allowed, -torch.inf).topk(2, -1).indices)


@test
def loss_equals_eager():
    for real, wide, tolerance in TYPES:
        h, w = rand(3, 20, 32, dtype=real), rand(50, 32, dtype=real, by=0.3)
        label = torch.randint(0, 50, (3, 20), device=DEVICE)
        label[0, :7] = -100
        compare(
            lambda h, w: bk.cross_entropy(h, w, label),
            lambda h, w: F.cross_entropy((h @ w.T).flatten(0, 1), label.flatten()),
            [h, w],
            tolerance,
        )
        with torch.no_grad():
            near(bk.cross_entropy(h, w, label), F.cross_entropy((h @ w.T).flatten(0, 1).double(), label.flatten()), tolerance, "loss")


# ---- what torch asks of an operator ----------------------------------------------------------------------------------------------


def samples():
    """One call of each operator, in types that every device has."""
    t = torch.float32
    x, f, post, comb, fn, base, scale, weight = boundary_inputs((2, 3), 16, t, t)
    coef = bk.join_coef(post, comb).detach().requires_grad_()
    rule = (20, 0, 1e-6, 1e-6)
    yield mhc.pre_op.op, (x, fn, base, scale, weight, *rule)
    yield mhc.pre_op.op, (x, fn, base, scale, None, *rule)
    yield mhc.post_op.op, (x, f, coef, None, 0)
    yield mhc.boundary_op.op, (x, f, coef, None, fn, base, scale, weight, *rule)
    offsets = torch.tensor([0, 5, 9], dtype=torch.int32, device=DEVICE)
    yield experts.expert_op.op, (rand(9, 16, dtype=t), rand(2, 16, 16, dtype=t), rand(2, 16, 8, dtype=t), offsets, None, 0, 0, 0.0, 0.0, 0.0)
    idx = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32, device=DEVICE)
    yield experts.moe_op.op, (rand(3, 16, dtype=t), idx, rand(3, 2, dtype=t), rand(2, 16, 16, dtype=t), rand(2, 16, 8, dtype=t), 0, 0, 0.0, 0.0, 0.0)
    yield experts.router_op.op, (rand(9, 8, dtype=t), None, 2, 0, False, True, 0, 0, 1.0)
    yield scans.ssd_op.op, (
        rand(1, 8, 2, 8, dtype=t), rand(1, 8, 2, dtype=t), rand(2, dtype=t), rand(2, dtype=t), rand(2, dtype=t),
        rand(1, 8, 1, 8, dtype=t), rand(1, 8, 1, 8, dtype=t), None, 4,
    )  # fmt: skip
    yield scans.gdn_op.op, (
        rand(1, 8, 2, 8, dtype=t), rand(1, 8, 2, 8, dtype=t), rand(1, 8, 2, 8, dtype=t), rand(1, 8, 2, dtype=t), rand(1, 8, 2, dtype=t),
        rand(2, dtype=t), rand(2, dtype=t), None, 4,
    )  # fmt: skip
    yield loss.loss_op.op, (rand(6, 8, dtype=t), rand(11, 8, dtype=t), torch.arange(6, dtype=torch.int32, device=DEVICE), True)


@test
def opcheck_is_clean():
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"] + (["test_aot_dispatch_dynamic"] if FULL or CUDA else [])
    for op, args in samples():
        torch.library.opcheck(op, args, test_utils=tests)


@test
def two_runs_give_the_same_bits():
    for op, args in samples():
        first, second = op(*args), op(*args)
        first, second = (r if isinstance(r, tuple) else (r,) for r in (first, second))
        assert all(torch.equal(a, b) for a, b in zip(first, second)), str(op)
    real, wide, _ = TYPES[0]
    inputs = boundary_inputs((40,), 512 if CUDA else 32, real, wide)
    runs = []
    for _ in range(2):
        out = bk.mhc_boundary(*inputs)
        runs.append(torch.autograd.grad([o.double().square().sum() for o in out], inputs))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


@test
def the_dispatcher_gives_the_same_as_the_short_path():
    t = torch.float32
    x, f, post, comb, fn, base, scale, weight = boundary_inputs((6,), 16, t, t)
    args = (x, f, bk.join_coef(post, comb).detach().requires_grad_(), None, fn, base, scale, weight, 20, 0, 1e-6, 1e-6)
    leaves = [a for a in args if torch.is_tensor(a)]
    runs = []
    for call in (mhc.boundary_op, mhc.boundary_op.op):
        out = call(*args)
        runs.append((*out, *torch.autograd.grad([o.square().sum() for o in out[:3]], leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    assert type(mhc.boundary_op(*args)[0].grad_fn).__name__.startswith("mhc_boundary"), "the short path was not taken"


def fresh(args):
    """Arguments like these with other numbers."""
    return tuple([torch.randn_like(a) if torch.is_tensor(a) and a.is_floating_point() else a for a in args])


def flat_of(out):
    return out if isinstance(out, tuple) else (out,)


def operators():
    """Each Operator with arguments, gradients of one among them."""
    every = {o.op: o for m in (mhc, experts, scans, loss) for o in vars(m).values() if isinstance(o, Operator)}
    for op, args in samples():
        yield every[op], tuple([a.detach() if torch.is_tensor(a) else a for a in args])
    x, f, post, comb, fn, base, scale, weight = (t.detach() for t in boundary_inputs((2, 3), 16, torch.float32, torch.float32))
    coef = bk.join_coef(post, comb)
    _, h, then, stat = mhc.boundary_op.op(x, f, coef, None, fn, base, scale, weight, 20, 0, 1e-6, 1e-6)
    for dy, dcoef in ((x, then), (None, then), (x, None), (None, None)):
        back = (dy, h, dcoef, x.clone(), f, coef, None, fn, base, scale, weight, x + 1, then.clone(), stat, 20, 0, 1e-6, 1e-6)
        yield mhc.boundary_bwd_op, back


@test
def a_repeated_call_gives_what_the_first_one_gives():
    with torch.no_grad():
        for op, args in operators():
            for _ in range(3):
                args = fresh(args)
                have, want = flat_of(op(*args)), flat_of(op.op(*args))
                assert len(have) == len(want), op.name
                assert all(torch.equal(a, b) and a.shape == b.shape and a.dtype == b.dtype for a, b in zip(have, want)), op.name
                assert not {t.data_ptr() for t in have if t.numel()} & {a.data_ptr() for a in args if torch.is_tensor(a)}, op.name


@test
def calls_are_repeated_where_they_can_be():
    """Counts how often the function of an op runs."""
    t, seen = torch.float32, []
    x, f, post, comb, fn, base, scale, weight = (a.detach() for a in boundary_inputs((7,), 16, t, t))
    coef = bk.join_coef(post, comb)
    replay = Replay(lambda *args: seen.append(1) or mhc._boundary(*args), 8)

    def runs(*args):
        seen.clear()
        have, want = replay(*args), mhc.boundary_op.op(*args)
        assert all(torch.equal(a, b) for a, b in zip(have, want))
        return len(seen)

    rule = (20, 0, 1e-6, 1e-6)
    args = (x, f, coef, None, fn, base, scale, weight)
    assert [runs(*args, *rule) for _ in range(3)] == [1, 0, 0]
    assert runs(*fresh(args), *rule) == 0, "tensors like those before"
    assert [runs(*args, 5, 0, 1e-6, 1e-6) for _ in range(2)] == [1, 0], "other options"
    bias = torch.randn(16, dtype=t, device=DEVICE)
    assert [runs(*args[:3], bias, *args[4:], *rule) for _ in range(2)] == [1, 0], "an input that was absent"
    fewer = (x[:5].contiguous(), f[:5].contiguous(), coef[:5].contiguous(), *args[3:])
    assert [runs(*fewer, *rule) for _ in range(2)] == [1, 0], "other shapes"
    assert runs(*args, *rule) == 0, "the first shapes again"
    turned = (x.transpose(1, 2).contiguous().transpose(1, 2), *args[1:])
    assert [runs(*turned, *rule) for _ in range(2)] == [1, 1], "an input that is copied first"
    odd = torch.empty(x.numel() + 1, dtype=t, device=DEVICE)[1:].view_as(x).copy_(x)
    assert [runs(odd, *args[1:], *rule) for _ in range(2)] == [1, 1], "an address that other kernels take"
    assert runs(*args, *rule) == 0


@test
def an_input_given_twice_is_not_mixed_up():
    """Slots of two arguments that are one tensor cannot be told apart, so that such a call is no pattern for others."""
    t = torch.float32
    x, f, post, comb, fn, base, scale, weight = (a.detach() for a in boundary_inputs((6,), 16, t, t))
    coef, rule = bk.join_coef(post, comb), (20, 0, 1e-6, 1e-6)
    y, h, then, stat = mhc.boundary_op.op(x, f, coef, None, fn, base, scale, weight, *rule)
    replay = Replay(mhc._boundary_bwd, 14)
    for dy, dcoef in ((y, then), (torch.randn_like(y), torch.randn_like(then))):
        args = (dy, h, dcoef, x, f, coef, None, fn, base, scale, weight, y, then, stat, *rule)
        assert all(torch.equal(a, b) for a, b in zip(replay(*args), mhc.boundary_bwd_op.op(*args)))


@test
def a_second_derivative_is_refused():
    t = torch.float32
    x, f, post, comb, fn, base, scale, weight = boundary_inputs((6,), 16, t, t)
    for call in (mhc.pre_op, mhc.pre_op.op):
        h = call(x, fn, base, scale, weight, 20, 0, 1e-6, 1e-6)[0]
        g = torch.autograd.grad(h.square().sum(), x, create_graph=True)[0]
        refused(RuntimeError, "second derivatives", torch.autograd.grad, g.sum(), x)


def small_model():
    c = 256 if CUDA else 16
    real, wide, _ = TYPES[0] if CUDA else TYPES[-1]
    return rand(2, 8, N, c, dtype=real), params(c, wide), params(c, wide)


def run_model(x, first, second):
    h, coef = bk.mhc_pre_coef(x, *first)
    x, h, coef = bk.mhc_boundary_coef(x, torch.tanh(h), coef, *second)
    return bk.mhc_post_coef(x, torch.tanh(h), coef).float().square().mean()


@test
def compile_takes_the_whole_graph():
    x, first, second = small_model()
    want = torch.autograd.grad(run_model(x, first, second), [x, *first, *second])
    compiled = torch.compile(run_model, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    have = torch.autograd.grad(compiled(x, first, second), [x, *first, *second])
    for a, b in zip(have, want):
        near(a, b, 1e-2 if CUDA else 1e-5, "gradient under compile")


@test
def activation_checkpointing_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    x, first, second = small_model()
    want = torch.autograd.grad(run_model(x, first, second), [x, *first, *second])
    have = torch.autograd.grad(checkpoint(run_model, x, first, second, use_reentrant=False), [x, *first, *second])
    assert all(torch.equal(a, b) for a, b in zip(have, want))


@test
def autocast_leaves_parameters_wide():
    x, first, second = small_model()
    with torch.autocast(DEVICE, torch.bfloat16):
        run_model(x.float() if CUDA else x, first, second).backward()
    assert first[0].grad.dtype == torch.float32


@test
def threads_share_a_handle():
    x, first, second = small_model()
    want, bad = run_model(x, first, second), []

    def work():
        for _ in range(20):
            with torch.no_grad():
                if not torch.equal(run_model(x, first, second), want):
                    bad.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad


@test
def nothing_is_retained():
    x, first, second = small_model()
    for i in range(1000 if CUDA or FULL else 50):
        run_model(x, first, second).backward()
        x.grad = None
        for p in (*first, *second):
            p.grad = None
        if i == 10:
            gc.collect()
            live = sum(1 for o in gc.get_objects() if torch.is_tensor(o))
            memory = torch.cuda.memory_allocated() if CUDA else 0
    gc.collect()
    assert sum(1 for o in gc.get_objects() if torch.is_tensor(o)) <= live
    assert not CUDA or torch.cuda.memory_allocated() == memory


# ---- what only a GPU can show ----------------------------------------------------------------------------------------------------


@test
def a_cuda_graph_captures_forward_and_backward():
    if not CUDA:
        return
    x, first, second = small_model()
    inputs = [x, *first, *second]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            want = torch.autograd.grad(run_model(x, first, second), inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = torch.autograd.grad(run_model(x, first, second), inputs)
    for t in have:
        t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(have, want))


@test
def two_streams_at_once_give_the_same_bits():
    if not CUDA:
        return
    x, first, second = small_model()
    big = [boundary_inputs((4096,), 256 * (1 + i), torch.bfloat16, torch.float32) for i in range(2)]
    with torch.no_grad():
        want = [bk.mhc_boundary(*b) for b in big] + [bk.mhc_pre(b[0], *b[4:]) for b in big]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        for _ in range(10):
            have = [None] * 4
            for i, s in enumerate(streams):
                with torch.cuda.stream(s):
                    have[i] = bk.mhc_boundary(*big[i])
                    have[2 + i] = bk.mhc_pre(big[i][0], *big[i][4:])
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for h, w in zip(have, want) for a, b in zip(h, w))


# ---- errors ----------------------------------------------------------------------------------------------------------------------


def refused(kind, text, f, *args, **kw):
    try:
        f(*args, **kw)
    except kind as e:
        assert text in str(e), f"'{text}' is not in '{e}'"
        return
    raise AssertionError(f"no {kind.__name__} about '{text}'")


@test
def errors_name_the_argument():
    t = torch.float32
    x, f, post, comb, fn, base, scale, weight = boundary_inputs((6,), 16, t, t)
    v = bk.BraidValueError
    refused(v, "argument fn", bk.mhc_pre, x, fn[:-1], base, scale)
    refused(v, "argument base", bk.mhc_pre, x, fn, base[:-1], scale)
    refused(v, "argument scale", bk.mhc_pre, x, fn, base, scale[:2])
    refused(v, "argument norm_weight", bk.mhc_pre, x, fn, base, scale, weight[:-1])
    refused(v, "argument x", bk.mhc_pre, x[0, 0], fn, base, scale)
    refused(v, "argument x", bk.mhc_pre, x.half(), fn, base, scale)
    refused(v, "argument f", bk.mhc_post, x, f[:, :-1], post, comb)
    refused(v, "argument coef", bk.mhc_post_coef, x, f, torch.zeros(6, 23, device=DEVICE))
    refused(v, "argument iterations", bk.mhc_pre, x, fn, base, scale, iters=0)
    refused(v, "argument eps", bk.mhc_pre, x, fn, base, scale, eps=1e-5)
    refused(v, "argument profile", bk.mhc_pre, x, fn, base, scale, profile="p")
    refused(v, "argument root_eps", bk.mhc_pre, x, fn, base, scale, norm_eps_inside=False, root_eps=1e-5)
    refused(v, "argument offsets", bk.expert_mlp, rand(4, 8, dtype=t), rand(2, 8, 8, dtype=t), rand(2, 8, 4, dtype=t), torch.zeros(2, device=DEVICE))
    refused(v, "argument act", bk.expert_mlp, rand(4, 8, dtype=t), rand(2, 8, 8, dtype=t), rand(2, 8, 4, dtype=t), torch.zeros(3, device=DEVICE), act="relu")
    refused(v, "argument alpha", bk.expert_mlp, None, None, None, None, alpha=1.0)
    refused(v, "argument offset", bk.moe_mlp, None, None, None, None, None, act="relu2", offset=1.0)
    refused(v, "argument norm", bk.router_topk, rand(4, 8, dtype=t), 2, norm=True)
    refused(v, "argument pre_softmax", bk.router_topk, rand(4, 8, dtype=t), 2, score="sigmoid", pre_softmax=True)
    refused(v, "router", bk.router_topk, rand(4, 8, dtype=t), 2, groups=3, group_topk=1)
    refused(v, "argument k", bk.router_topk, rand(4, 8, dtype=t), 9)
    refused(v, "argument dt_softplus", bk.ssd, None, None, None, None, None, dt_softplus=False)
    raw = bytearray(4 * 3 + 1)
    if not CUDA:
        refused(v, "argument scale is not aligned", bk.mhc_pre, x, fn, base, torch.frombuffer(raw, dtype=t, offset=1, count=3))
        refused(v, "argument x is BF16", mhc.pre_op, x.bfloat16(), fn, base, scale, None, 20, 0, 0.0, 1e-6)
    else:
        refused(v, "argument base is on cpu", mhc.pre_op, x, fn, base.cpu(), scale, None, 20, 0, 0.0, 1e-6)
        refused(v, "argument x is F64", mhc.pre_op, x.double(), fn, base, scale, None, 20, 0, 0.0, 1e-6)


@test
def a_gpu_that_is_missing_is_named():
    try:
        bk.library().open(99)
    except bk.BraidError as e:
        assert any(t in str(e) for t in ("built without CUDA", "no NVIDIA driver", "GPUs 0 to", "driver is too old")), str(e)
    else:
        raise AssertionError("GPU 99 was opened")


@test
def kernels_can_be_asked_for():
    x = torch.empty(64, N, 256, dtype=TYPES[0][0], device=DEVICE)
    text = bk.mhc_supported(x), bk.mhc_supported(x, "mhc_boundary_bwd")
    assert all("kernels" in t or "fused" in t for t in text), text
    print("#", bk.library().build, "|", *text, "|", bk.binding())


def run_tests(tests):
    torch.manual_seed(0)
    bad = 0
    only = [a for a in sys.argv[1:] if not a.startswith("--") and a not in ("cpu", "cuda")]
    for f in tests:
        if only and f.__name__ not in only:
            continue
        try:
            f()
            print(f"ok {f.__name__.replace('_', ' ')}", flush=True)
        except Exception:
            bad += 1
            print(f"not ok {f.__name__.replace('_', ' ')}", flush=True)
            traceback.print_exc(file=sys.stdout)
    return 1 if bad else 0


if __name__ == "__main__":
    assert _lib is not None
    sys.exit(run_tests(TESTS))
