"""How programs use braid_kernels, for every function of it: torch.func, compile with sizes that change, inference, meta tensors, inputs that
are not contiguous, gradients of some inputs only, no rows at all, and what is refused. Prints lines as kernels.py does.

    BRAIDK_LIB=build/libbraidk.so python3 tests/lib/uses.py [cpu|cuda] [name of a test...]
"""

import copy
import sys

import torch
from kernels import CUDA, DEVICE, N, bk, near, params, rand, refused, run_tests
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

TESTS = []
T = torch.float32
C = 16


def test(f):
    TESTS.append(f)
    return f


def integers(*shape, most):
    return torch.randint(0, most, shape, device=DEVICE)


def every(rows=6):
    """Each function with arguments, in fp32; a name for what fails."""

    def positive(*shape):
        return torch.rand(*shape, device=DEVICE).requires_grad_()

    x, f, p = rand(rows, N, C, dtype=T), rand(rows, C, dtype=T), params(C, T)
    post, comb = positive(rows, N), torch.rand(rows, N, N, device=DEVICE).softmax(-1).requires_grad_()
    w13, w2 = rand(2, 32, C, dtype=T), rand(2, C, C, dtype=T)
    offsets = torch.tensor([0, rows // 2, rows], dtype=torch.int32, device=DEVICE)
    A, A_log = (-torch.rand(2, device=DEVICE) - 0.1).requires_grad_(), rand(2, dtype=T)
    scan, per_head = [rand(1, rows, 2, 8, dtype=T) for _ in range(3)], [rand(1, rows, 2, dtype=T) for _ in range(2)]
    groups = [rand(1, rows, 1, 8, dtype=T) for _ in range(2)]
    yield "mhc_pre", bk.mhc_pre, [x, *p]
    yield "mhc_pre without a norm", bk.mhc_pre, [x, *p[:3]]
    yield "mhc_post", bk.mhc_post, [x, f, post, comb, rand(C, dtype=T)]
    yield "mhc_boundary", bk.mhc_boundary, [x, f, post, comb, *p]
    yield "expert_mlp", bk.expert_mlp, [rand(rows, C, dtype=T), w13, w2, offsets, positive(rows)]
    yield "moe_mlp", bk.moe_mlp, [rand(rows, C, dtype=T), integers(rows, 2, most=2), positive(rows, 2), w13, w2]
    yield "router_topk", lambda t: bk.router_topk(t, 2)[0], [rand(rows, 8, dtype=T)]
    yield "ssd", lambda *a: bk.ssd(*a, 4), [scan[0], per_head[0], A, *groups]
    yield "gated_delta_rule", lambda q, k, v, g, b, A: bk.gated_delta_rule(q, k, v, g, b, A_log=A, chunk_size=4), [*scan, *per_head, A_log]
    yield "cross_entropy", bk.cross_entropy, [rand(rows, 8, dtype=T), rand(11, 8, dtype=T), integers(rows, most=11)]


def parts(out):
    return out if isinstance(out, tuple) else (out,)


def loss_of(out):
    return sum(o.double().square().sum() for o in parts(out))


def floats(args):
    return [i for i, a in enumerate(args) if a.is_floating_point()]


def gradients(f, args):
    return torch.autograd.grad(loss_of(f(*args)), [args[i] for i in floats(args)], allow_unused=True)


def same(have, want, what, tolerance=None):
    assert len(have) == len(want)
    for i, (a, b) in enumerate(zip(have, want)):
        assert (a is None) == (b is None), f"{what}: gradient {i}"
        if a is not None and tolerance is None:
            assert torch.equal(a, b), f"{what}: {i} differs"
        elif a is not None:
            near(a, b, tolerance, f"{what}: {i}")


def moved(args, change):
    """Arguments after a change, with gradients where they had some."""
    return [change(a.detach()).requires_grad_(a.requires_grad) for a in args]


@test
def no_rows_give_no_rows_and_gradients_of_zero():
    for name, f, args in every(rows=0):
        out = f(*args)
        assert name == "cross_entropy" or all(0 in o.shape for o in parts(out)), name
        for i, g in zip(floats(args), gradients(f, args)):
            assert g is None or (g.shape == args[i].shape and not g.any()), f"{name}: gradient of argument {i}"


@test
def gradients_of_some_inputs_are_those_of_all():
    for name, f, args in every():
        want = gradients(f, args)
        for i, w in zip(floats(args), want):
            some = [a if j == i else a.detach() for j, a in enumerate(args)]
            if w is not None:
                same(torch.autograd.grad(loss_of(f(*some)), [args[i]]), [w], f"{name}, argument {i} alone")


@test
def inputs_need_not_be_contiguous():
    def spread(t):
        return torch.stack([t, t], -1)[..., 0] if t.dim() > 0 else t

    for name, f, args in every():
        wide = moved(args, spread)
        assert not any(a.is_contiguous() for a in wide if a.numel() > 1)
        same(parts(f(*wide)), parts(f(*args)), name)
        same(gradients(f, wide), gradients(f, args), name)


@test
def gradients_that_are_expanded_are_taken():
    for name, f, args in every():
        want = torch.autograd.grad(parts(f(*args)), args[0], [torch.ones_like(o) for o in parts(f(*args))])
        have = torch.autograd.grad(sum(o.sum() for o in parts(f(*args))), args[0])
        same(have, want, name)


@test
def inference_gives_the_same():
    for name, f, args in every():
        with torch.no_grad():
            want = parts(f(*args))
        with torch.inference_mode():
            same(parts(f(*args)), want, name)
            copies = [a.clone() for a in args]
        with torch.no_grad():
            same(parts(f(*copies)), want, name + ", inference tensors")


@test
def transforms_of_torch_func_give_the_same():
    for name, f, args in every():
        at = floats(args)
        plain = [a.detach() for a in args]

        def loss(*some):
            return loss_of(f(*[some[at.index(i)] if i in at else a for i, a in enumerate(plain)]))

        some = [plain[i] for i in at]
        want = [torch.zeros_like(a) if g is None else g for a, g in zip(some, gradients(f, args))]
        everything = tuple(range(len(at)))
        same(torch.func.grad(loss, everything)(*some), want, name + ", grad")
        stacked = torch.stack([some[0], 2 * some[0]])
        dims = (0,) + (None,) * (len(at) - 1)
        have = torch.func.vmap(torch.func.grad(loss), dims)(stacked, *some[1:])
        same([have[0], have[1]], [want[0], torch.func.grad(loss)(stacked[1], *some[1:])], name + ", vmap of grad")
        out = torch.func.vmap(lambda t: f(t, *plain[1:]))(stacked)
        same([o[1] for o in parts(out)], parts(f(stacked[1], *plain[1:])), name + ", vmap")
        refused(NotImplementedError, "jvp", torch.func.jvp, lambda t: loss(t, *some[1:]), (some[0],), (torch.ones_like(some[0]),))


@test
def second_derivatives_are_refused_and_not_incomplete():
    for name, f, args in every():
        scale = torch.tensor(2.0, requires_grad=True, device=DEVICE)
        g = torch.autograd.grad(loss_of(f(*args)) * scale, args[0], create_graph=True)[0]
        refused(RuntimeError, "second derivatives", torch.autograd.grad, g.square().sum(), [args[0], scale], allow_unused=True)


class BackwardCalls(TorchDispatchMode):
    """Calls of operators of backward passes."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "braid_kernels" and str(op).endswith("_bwd.default"):
            self.calls.append((op, tuple([a.detach() if torch.is_tensor(a) else a for a in args])))
        return op(*args, **(kwargs or {}))


@test
def opcheck_is_clean_for_backward_passes():
    seen = set()
    for name, f, args in every():
        with BackwardCalls() as mode:
            gradients(f, args)
        assert len(mode.calls) == 1, name
        for op, given in mode.calls:
            seen.add(str(op))
            torch.library.opcheck(op, given, test_utils=["test_schema", "test_faketensor", "test_autograd_registration"])
    known = {str(getattr(torch.ops.braid_kernels, n).default) for n in dir(torch.ops.braid_kernels) if n.endswith("_bwd")}
    assert known == seen, known ^ seen


@test
def compile_takes_every_function_with_sizes_that_change():
    for name, f, args in every():
        torch._dynamo.reset()
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
        same(gradients(compiled, args), gradients(f, args), name, 1e-5)
        for other, g, more in every(rows=10):
            if other == name:
                same(gradients(compiled, more), gradients(f, more), name + ", more rows", 1e-5)


@test
def meta_tensors_give_shapes():
    for (name, f, args) in every():
        out = f(*[a.to("meta") for a in args])
        for o, w in zip(parts(out), parts(f(*args))):
            assert o.is_meta and o.shape == w.shape and o.dtype == w.dtype, name


@test
def half_precision_is_refused_by_name():
    names = {
        "mhc_pre": "x fn base scale norm_weight", "mhc_pre without a norm": "x fn base scale", "mhc_post": "x f post comb bias",
        "mhc_boundary": "x f post comb fn base scale norm_weight", "expert_mlp": "x w13 w2 offsets prob", "moe_mlp": "x idx probs w13 w2",
        "router_topk": "logits", "ssd": "x dt A B C", "gated_delta_rule": "q k v g beta A_log", "cross_entropy": "h w label",
    }  # fmt: skip
    for name, f, args in every():
        for i in range(len(args)):
            some = list(args)
            some[i] = args[i].detach().half()
            refused(bk.BraidValueError, f"argument {names[name].split()[i]} has dtype torch.float16", f, *some)


@test
def shapes_are_refused_by_the_names_of_arguments():
    v = bk.BraidValueError
    calls = {name: (f, args) for name, f, args in every()}

    def wrong(text, name, i, change):
        f, args = calls[name]
        some = list(args)
        some[i] = change(args[i].detach())
        refused(v, text, f, *some)

    first, one, less = (lambda t: t[0]), (lambda t: t.unsqueeze(0)), (lambda t: t[..., :-1].contiguous())
    scalar = lambda t: t.flatten()[0]  # noqa: E731
    for i, name in ((2, "base"), (3, "scale"), (4, "norm_weight")):
        wrong(f"argument {name} has no dimensions", "mhc_pre", i, scalar)
    wrong("argument bias has no dimensions", "mhc_post", 4, scalar)
    wrong("argument prob has no dimensions", "expert_mlp", 4, scalar)
    wrong("argument f has shape (1, 6, 16), expected (6, 16)", "mhc_post", 1, one)
    for i, name in ((2, "post"), (3, "comb")):
        for change in (first, one, less):
            wrong(f"argument {name} has shape", "mhc_boundary", i, change)
    for i, name in ((0, "x"), (1, "idx"), (3, "w13"), (4, "w2")):
        wrong(f"argument {name} has shape", "moe_mlp", i, first)
    for i, name in ((0, "x"), (2, "A"), (3, "B"), (4, "C")):
        wrong(f"argument {name} has shape", "ssd", i, first)
    for i, name in ((0, "q"), (1, "k"), (2, "v"), (3, "g"), (4, "beta")):
        wrong(f"argument {name} has shape", "gated_delta_rule", i, first)
    for i, name in ((1, "w"), (2, "label")):
        wrong(f"argument {name} has shape", "cross_entropy", i, first)
    wrong("argument offsets has dtype torch.float32", "expert_mlp", 3, lambda t: t.float())
    wrong("argument idx has dtype torch.bool", "moe_mlp", 1, lambda t: t.bool())
    wrong("argument label has dtype torch.float32", "cross_entropy", 2, lambda t: t.float())
    x = rand(2, 3, N, C, dtype=T)  # as many rows, but others
    refused(v, "argument f has shape (3, 2, 16), expected (2, 3, 16)", bk.mhc_post_coef, x, rand(3, 2, C, dtype=T), rand(2, 3, 24, dtype=T))
    refused(v, "argument coef has shape (3, 2, 24), expected (2, 3, 24)", bk.mhc_post_coef, x, rand(2, 3, C, dtype=T), rand(3, 2, 24, dtype=T))
    scan, seq = calls["ssd"][1], torch.zeros(1, 5, dtype=torch.int64, device=DEVICE)
    refused(v, "argument seq_idx has shape", bk.ssd, *scan, 4, seq_idx=seq)


@test
def labels_outside_of_the_vocabulary_are_not_ignored():
    h, w = rand(4, 8, dtype=T), rand(11, 8, dtype=T)
    for bad in (-1, 11, 2**32 + 1):
        label = torch.tensor([1, 2, bad, 3], device=DEVICE)
        if CUDA:
            assert bk.cross_entropy(h, w, label).isnan(), bad
        else:
            refused(bk.BraidValueError, "label[2]", bk.cross_entropy, h, w, label)
    label = torch.tensor([1, 2, -1, 3], device=DEVICE)
    near(bk.cross_entropy(h, w, label, ignore_index=-1), nn.functional.cross_entropy(h @ w.T, label, ignore_index=-1), 1e-4, "loss")


@test
def modules_can_be_copied_and_called_with_other_parameters():
    from braid_kernels.modules import HyperConnection

    m, x = HyperConnection(N, C).to(DEVICE), rand(2, 3, N, C, dtype=T)
    other = copy.deepcopy(m)
    same(other(x), m(x), "copy")
    params = {name: torch.randn_like(p) for name, p in m.named_parameters()}
    other.load_state_dict(params)
    same(torch.func.functional_call(m, params, (x,)), other(x), "functional_call")
    g = torch.func.grad(lambda p: loss_of(torch.func.functional_call(m, p, (x,))))(params)
    want = torch.autograd.grad(loss_of(other(x)), list(other.parameters()))
    same([g[name] for name, _ in other.named_parameters()], want, "gradients of functional_call")


@test
def autocast_narrows_what_goes_into_matrix_products():
    if not CUDA:
        return
    for name, f, args in every():
        with torch.autocast("cuda", torch.bfloat16):
            out = f(*args)
            narrow = name.split()[0] in ("mhc_pre", "mhc_post", "mhc_boundary", "expert_mlp", "moe_mlp")
            assert parts(out)[0].dtype == (torch.bfloat16 if narrow else T), name
        for i, g in zip(floats(args), torch.autograd.grad(loss_of(out), [args[i] for i in floats(args)], allow_unused=True)):
            assert g is None or g.dtype == T, f"{name}: {i}"


if __name__ == "__main__":
    sys.exit(run_tests(TESTS))
